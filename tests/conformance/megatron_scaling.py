# SPDX-License-Identifier: Apache-2.0
"""Megatron's loss scaling under context parallelism 2, on a CPU: which way to return a
loss gives the whole gradient.

    pip install --no-deps megatron-core==0.16.1 einops
    python -m tests.conformance.megatron_scaling

A model without attention needs no context, so that each of two ranks may take its half
of every sequence. Megatron's own schedule (`forward_backward_no_pipelining`) scales the
loss; the gradients are then averaged over the ranks, or summed and divided by all
tokens under `calculate_per_token_loss`, as its distributed data parallelism does.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist, nn

from tests.conformance.megatron_ranks import WORLD, OnCpu, join_group, measure
from upref.step.case import built, meant
from upref.step.check import check_recorded
from upref.step.record import Recorded, Step
from upref.step.reference import TorchModel, as_float64
from upref.step.rows import AXES, Row
from upref.verify.group import on_loopback

VOCABULARY, TEMPERATURE, MICRO_BATCHES = 96, 0.7, 2
WAYS = ("two values", "three values", "three values, per token")


class Bigram(nn.Module):
    """The next token depends on the last one alone: no context is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


def make_rows(model: nn.Module) -> list[Row]:
    """Return eight responses with holes, so that the halves of sequences have other
    numbers of tokens.
    """
    return built(TorchModel(model), meant("ppo_clip", {}, TEMPERATURE), None, ()).rows


def term(model: nn.Module, row: Row, rank: int) -> tuple[torch.Tensor, int]:
    """Return the clipped term summed over the response tokens of this rank's half of a
    row, and their number.
    """
    start, half = len(row.prompt), len(row.ids) // WORLD
    mine = range(half) if rank == 0 else range(half, len(row.ids))
    at = [i for i in mine if i >= start and row.trains[i - start]]
    if not at:
        return 0 * sum(parameter.sum() for parameter in model.parameters()), 0
    ids = torch.tensor(row.ids)
    logits = model(input_ids=ids[[i - 1 for i in at]]).logits / TEMPERATURE
    lp = logits.log_softmax(-1).gather(1, ids[at][:, None])[:, 0]
    ratio = (lp - torch.tensor([row.old[i - start] for i in at])).exp()
    J = torch.minimum(ratio * row.adv, ratio.clamp(0.8, 1.2) * row.adv).sum()
    return -J, len(at)


def error_of(
    way: str, rank: int, model: nn.Module, rows: list[Row], config: Any
) -> float:
    """Return the relative error of the gradient that Megatron's schedule makes with
    this way of returning a loss.
    """
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    tokens = sum(sum(row.trains) for row in rows)
    counted: list[torch.Tensor] = []
    config.calculate_per_token_loss = way.endswith("per token")

    def keep_count(models: Any, number: Any = None, **_: Any) -> None:
        counted.append(number)

    def take_no_input(_: Any) -> None:
        """The only stage has none before it."""

    config.finalize_model_grads_func = keep_count
    model.config = config
    model.model_type = ModelType.encoder_or_decoder
    model.set_input_tensor = take_no_input
    model.zero_grad()

    def forward_step(data: Any, model: nn.Module) -> tuple[torch.Tensor, Any]:
        parts = [term(model, row, rank) for row in next(data)]
        loss, own = sum(part for part, _ in parts), sum(number for _, number in parts)

        def two(output: torch.Tensor) -> Any:
            return output * MICRO_BATCHES / tokens, {}

        def three(output: torch.Tensor) -> Any:
            return output.clone(), torch.tensor(own, dtype=torch.int), {}

        return loss, two if way == "two values" else three

    size = len(rows) // MICRO_BATCHES
    parts = iter([rows[i : i + size] for i in range(0, len(rows), size)])
    with OnCpu():
        forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=parts,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=1,
            micro_batch_size=1,
        )
    divisor = torch.tensor(float(WORLD))
    if config.calculate_per_token_loss:
        divisor = counted[-1].float().clone()
        dist.all_reduce(divisor)
    found = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        found[name] = as_float64(parameter.grad / divisor)
    seen = Recorded(TorchModel(model), [Step({}, found)])
    report = check_recorded(
        seen, [rows], "ppo_clip", temperature=TEMPERATURE, without=AXES, explain=False
    )
    return report.error


def rank_errors(rank: int, store: str, errors: Any) -> None:
    """Be one of the ranks: the first writes the error of each way."""
    join_group(rank, store)
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=WORLD)
    torch.manual_seed(0)
    model = Bigram()
    rows = make_rows(model)
    for way in WAYS:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=1,
            context_parallel_size=WORLD,
            use_cpu_initialization=True,
        )
        found = error_of(way, rank, model, rows, config)
        if rank == 0:
            errors[way] = found
    dist.destroy_process_group()


if __name__ == "__main__":
    import os

    os.environ |= on_loopback()
    for its_way, its_error in measure(rank_errors).items():
        print(f"{its_way:26} {its_error:.1e}")
    sys.exit(0)
