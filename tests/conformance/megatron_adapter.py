# SPDX-License-Identifier: Apache-2.0
"""An adapter for Megatron's core library: its schedules and its parallel layers on a
CPU, in the cases of two ranks that divide each row.

    pip install --no-deps megatron-core==0.16.1 einops

The loss is a clipped term of ours; Megatron scales it, accumulates its gradients and
moves what the ranks exchange. A loss is returned as two values, (loss, log), or as
three, (sum, number of tokens, log).
"""

import torch
from torch import distributed as dist, nn
from torch.nn.utils.rnn import pad_sequence

from tests.conformance.megatron_parallel import without_cuda

PAD = 2
SIZES = {
    "context": "context_parallel_size",
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
}


class Megatron:
    """Losses as two values, which the caller has divided by the tokens of the step."""

    name = "megatron-core 0.16.1"
    values, per_token = 2, False

    def supports(self, case):
        """Return "" for a case that the adapter can run, else why not."""
        if case.parallel not in SIZES:
            return "the adapter has the cases of ranks that divide a row"
        if self.values == 3 and case.objective != "ppo_clip":
            return "three values are a sum over tokens and their number"
        return ""

    def scale(self, case):
        return 1.0

    def settings(self, case):
        """Return the settings of Megatron in which a case runs, as texts."""
        return {
            SIZES[case.parallel]: str(case.ranks),
            "values of the loss function": str(self.values),
            "calculate_per_token_loss": str(self.per_token),
        }

    def step(self, model, rows, case):
        """Run Megatron's schedule on this rank's part of the model, and return the
        gathered gradients.
        """
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parallel_state.initialize_model_parallel(**{SIZES[case.parallel]: case.ranks})
        with without_cuda():
            part = PARTS[case.parallel](model)
            part.config = make_config(case, self.per_token)
            counted = []
            part.config.finalize_model_grads_func = lambda _, n=None, **__: (
                counted.append(n)
            )
            size = len(rows) // case.micro_batches
            get_forward_backward_func()(
                forward_step_func=self.forward_step(rows, case),
                data_iterator=iter(
                    [rows[i : i + size] for i in range(0, len(rows), size)]
                ),
                model=[part],
                num_microbatches=case.micro_batches,
                seq_length=longest(rows),
                micro_batch_size=size,
            )
        parallel_state.destroy_model_parallel()
        return gathered(part, case, self.divisor(case, counted))

    def divisor(self, case, counted):
        """Return what Megatron's own `finalize_model_grads`, which is replaced here,
        divides by.
        """
        if not self.per_token:  # its data parallelism averages over context ranks too
            return float(case.ranks) if case.parallel == "context" else 1.0
        tokens = counted[-1].float().clone()
        if case.parallel != "tensor":  # there each rank has counted all of them
            dist.all_reduce(tokens)
        return tokens

    def forward_step(self, rows, case):
        """Return the function that Megatron's schedule calls with each micro-batch: it
        returns the part's output, and the loss as a function of it.
        """
        tokens = sum(sum(row.trains) for row in rows)

        def one(data, part):
            """Return the part's output for the next micro-batch, and the function that
            makes the loss of it.
            """
            micro = next(data)
            batch = collated(micro, longest(rows), case)
            output = part(batch["ids"])

            def loss(output):
                """Return the loss and a log; or, with three values, the sum, the number
                of tokens and a log.
                """
                lp = part.log_probs(output, batch["ids"], case.temperature)
                ratio = torch.where(batch["trains"], lp - batch["old"], 0).exp()
                adv = batch["adv"]
                J = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
                J = torch.where(batch["trains"], J, 0)
                if self.values == 3:
                    number = batch["trains"].sum().int()
                    return -J.sum(), number, {}
                weights = 1 / tokens
                if case.objective == "grpo":
                    weights = 1 / (batch["counts"] * len(rows))
                return -(J * weights).sum() * case.micro_batches, {}

            return output, loss

        return one


class MegatronPerToken(Megatron):
    """Losses as three values with the setting that they are made for."""

    values, per_token = 3, True


class MegatronThreeValues(Megatron):
    """Losses as three values without it: NVIDIA/Megatron-LM#7513."""

    values, per_token = 3, False


def make_config(case, per_token):
    """Return Megatron's configuration of two layers, divided over the case's ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=per_token,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **{SIZES[case.parallel]: case.ranks},
    )


class Part(nn.Module):
    """The embedding, norm and head of a model without layers, as one rank has them."""

    model_type = None

    def __init__(self, model):
        super().__init__()
        from megatron.core.enums import ModelType

        self.model_type = ModelType.encoder_or_decoder
        self.given = None
        self.take(model)

    def take(self, model):
        """Take the embedding, the norm and the head of the model."""
        self.embed, self.norm, self.head = (
            model.model.embed_tokens,
            model.model.norm,
            model.lm_head,
        )

    def set_input_tensor(self, tensor):
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))

    def log_probs(self, logits, ids, temperature):
        """Return the log-probabilities of the tokens, [B, S]: of each, given those
        before it; the first has 0.
        """
        every = (logits[:, :-1] / temperature).log_softmax(-1)
        lp = every.gather(-1, ids[:, 1:, None])[..., 0]
        return behind_zero(lp)


def behind_zero(lp):
    """[B, T - 1] log-probabilities as [B, T]: the first token of a row has none."""
    return torch.cat([torch.zeros_like(lp[:, :1]), lp], 1)


class TensorPart(Part):
    """Half of the vocabulary in Megatron's embedding and head."""

    def take(self, model):
        """Take this rank's half of the vocabulary's weights, in Megatron's parallel
        layers.
        """
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            VocabParallelEmbedding,
        )

        config = make_config(TENSOR, False)
        V, H = model.model.embed_tokens.weight.shape

        def normal(weight):
            return nn.init.normal_(weight)

        self.embed = VocabParallelEmbedding(V, H, init_method=normal, config=config)
        self.head = ColumnParallelLinear(
            H, V, config=config, init_method=normal, bias=False, gather_output=False
        )
        self.norm = model.model.norm
        half = slice(dist.get_rank() * V // 2, (dist.get_rank() + 1) * V // 2)
        with torch.no_grad():
            self.embed.weight.copy_(model.model.embed_tokens.weight[half])
            self.head.weight.copy_(model.lm_head.weight[half])

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))[0]

    def log_probs(self, logits, ids, temperature):
        """Return the log-probabilities from this rank's half of the logits, by
        Megatron's cross entropy.
        """
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        scores = (logits[:, :-1] / temperature).transpose(0, 1).contiguous()
        lp = -vocab_parallel_cross_entropy(scores, ids[:, 1:].t().contiguous()).t()
        return behind_zero(lp)


class StagePart(Part):
    """The embedding on the first rank, the norm and the head on the last."""

    def forward(self, ids):
        if dist.get_rank() == 0:
            return self.embed(ids).transpose(0, 1).contiguous()
        return self.head(self.norm(self.given.transpose(0, 1)))


class TENSOR:
    """What `make_config` reads of a case."""

    parallel, ranks = "tensor", 2


PARTS = {"context": Part, "tensor": TensorPart, "pipeline": StagePart}
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def gathered(part, case, divisor):
    """Return all gradients on each rank, by the names of the model."""
    found = {}
    for short, name in NAMES.items():
        weight = getattr(part, short).weight
        gradient = weight.grad
        if gradient is None:
            gradient = torch.zeros_like(weight)
        if case.parallel == "tensor" and short != "norm":
            halves = [torch.empty_like(gradient) for _ in range(case.ranks)]
            dist.all_gather(halves, gradient.contiguous())
            gradient = torch.cat(halves)
        elif case.parallel != "tensor":
            dist.all_reduce(gradient)
        found[name] = gradient / divisor
    return found


def longest(rows):
    return max(len(row.ids) for row in rows)


def collated(rows, width, case):
    """Return the rows of a micro-batch, padded on the right to one width.

    Under context parallelism only this rank's half of each row trains; `counts` are of
    the whole row.
    """
    ids = pad([row.ids for row in rows], PAD, width)
    trains = pad([[False] * len(row.prompt) + row.trains for row in rows], False, width)
    old = pad([[0.0] * len(row.prompt) + row.old for row in rows], 0.0, width)
    counts = trains.sum(1, keepdim=True)
    if case.parallel == "context":
        ends = torch.tensor([[len(row.ids) // 2] for row in rows])
        first = torch.arange(width)[None] < ends
        trains = trains & (first if dist.get_rank() == 0 else ~first)
    adv = torch.tensor([[row.adv] for row in rows])
    return {"ids": ids, "trains": trains, "old": old, "adv": adv, "counts": counts}


def pad(lists, value, width):
    tensors = [torch.tensor(each) for each in lists]
    made = pad_sequence(tensors, batch_first=True, padding_value=value)
    return nn.functional.pad(made, (0, width - made.shape[1]), value=value)
