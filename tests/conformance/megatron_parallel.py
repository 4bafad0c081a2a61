# SPDX-License-Identifier: Apache-2.0
"""Megatron's tensor and pipeline parallelism 2 on a CPU, beside one process.

    pip install --no-deps megatron-core==0.16.1 einops
    python -m tests.conformance.megatron_parallel

Each of two ranks first makes the gradient of a whole GPTModel. It then takes its part
of the same weights, makes the gradient in parallel, and compares that with its part of
the first one. The loss is DAPO's, of log-probabilities at a temperature.

Sequence parallelism is not among them: Megatron refuses it for torch's layer norm, the
only one that runs without a GPU.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist, nn

from tests.conformance.megatron_ranks import WORLD, OnCpu, join_group, measure
from upref.aggregation import Totals
from upref.registry import get
from upref.verify.group import on_loopback

VOCABULARY, HIDDEN, LAYERS, LENGTH = 96, 32, 2, 12
MICRO_BATCHES, ROWS, TEMPERATURE = 3, 2, 0.7
TENSOR = {"tensor_model_parallel_size": WORLD}
PIPELINE = {"pipeline_model_parallel_size": WORLD}
WAYS = {  # the sizes, and what the loss is multiplied by before the schedule divides it
    "tensor parallel 2": (TENSOR, MICRO_BATCHES),
    "pipeline parallel 2": (PIPELINE, MICRO_BATCHES),
    "pipeline parallel 2, divided twice": (PIPELINE, 1),  # a mistake, to be found
}


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Let Megatron run where there is no GPU: its buffers go to the CPU, dropout is 0."""
    from megatron.core import tensor_parallel

    tracker = type(tensor_parallel.random.get_cuda_rng_tracker())
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(_patching())
        patch(torch.cuda, "current_device", _cpu)
        patch(torch.cuda, "synchronize", _nothing)
        patch(torch.Tensor, "cuda", _unmoved)
        patch(tracker, "fork", _no_fork)
        stack.enter_context(OnCpu())
        yield


@contextlib.contextmanager
def _patching() -> Iterator[Any]:
    """Yield patch(owner, attribute, value), and restore each attribute at the end."""
    before = []

    def patch(owner: Any, name: str, value: Any) -> None:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        yield patch
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _cpu() -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _unmoved(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _no_fork(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def make_model(**parallel: Any) -> nn.Module:
    """Return this rank's part of a GPTModel with two layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **parallel,
    )
    return GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=True,
        share_embeddings_and_output_weights=False,
    )


def make_batches() -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of rows with holes, whose trained tokens differ in number."""
    draw = torch.Generator().manual_seed(1)
    batches = []
    for i in range(MICRO_BATCHES):
        shape = (ROWS, LENGTH)
        trains = torch.rand(shape, generator=draw) < (i + 1) / (MICRO_BATCHES + 1)
        trains[:, 1] = True
        trains[:, 0] = False  # the first token has no log-probability
        batches.append(
            {
                "ids": torch.randint(VOCABULARY, shape, generator=draw),
                "trains": trains,
                "old": -4.5 + torch.rand(shape, generator=draw),
                "adv": torch.randn(ROWS, 1, generator=draw),
            }
        )
    return batches


def gradients(model: nn.Module, times: int = MICRO_BATCHES) -> dict[str, torch.Tensor]:
    """Return what Megatron's own schedule accumulates over the micro-batches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    batches = make_batches()
    counts = Totals.of(torch.cat([batch["trains"] for batch in batches]))
    model.config.finalize_model_grads_func = _nothing  # of its own buffers

    def forward_step(data: Any, model: nn.Module) -> tuple[torch.Tensor, Any]:
        """Return the model's output for the next batch, and the function that makes
        DAPO's loss of it.
        """
        batch = next(data)
        places = torch.arange(LENGTH).expand(ROWS, -1)
        output = model(batch["ids"], places, None)

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict]:
            scores = logits[:, :-1].transpose(0, 1).contiguous() / TEMPERATURE
            targets = batch["ids"][:, 1:].t().contiguous()
            lp = -vocab_parallel_cross_entropy(scores, targets).t()
            kept = batch["trains"][:, 1:]
            J = get("dapo").J(
                lp, batch["old"][:, 1:], batch["adv"], kept, None, None, None, counts
            )
            return -J * times, {}

        return output, loss

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=ROWS,
    )
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def part(name: str, parameter: nn.Parameter, whole: dict[str, torch.Tensor], rank: int):
    """Return this rank's part of a tensor of the whole model."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        first = rank * LAYERS // WORLD
        for i in range(LAYERS // WORLD):
            name = name.replace(f".layers.{i}.", f".layers.{first + i}.")
    found = whole[name]
    if (
        getattr(parameter, "tensor_model_parallel", False)
        and found.shape != parameter.shape
    ):
        return found.chunk(WORLD, parameter.partition_dim)[rank]
    return found


def error_of(way: str, rank: int) -> float:
    """Return the relative error of the parallel gradient, over the parts of both ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    model = make_model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = gradients(model)
    parallel_state.destroy_model_parallel()
    sizes, times = WAYS[way]
    parallel_state.initialize_model_parallel(**sizes)
    model = make_model(**sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(part(name, parameter, weights, rank))
    found = gradients(model, times)
    squares = torch.zeros(2, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        want = part(name, parameter, expected, rank).double()
        squares += torch.stack(
            [(found[name] - want).square().sum(), want.square().sum()]
        )
    dist.all_reduce(squares)
    parallel_state.destroy_model_parallel()
    return float((squares[0] / squares[1]).sqrt())


def rank_errors(rank: int, store: str, errors: Any) -> None:
    """Be one of the ranks: the first writes the error of each way."""
    join_group(rank, store)
    with without_cuda():
        for way in WAYS:
            found = error_of(way, rank)
            if rank == 0:
                errors[way] = found
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    os.environ |= on_loopback()
    for its_way, its_error in measure(rank_errors).items():
        print(f"{its_way:36} {its_error:.1e}")
    sys.exit(0)
