# SPDX-License-Identifier: Apache-2.0
"""The gradient that verl's engine hands to its optimizer, beside the objective's
float64 gradient of the same rows.

The loss's own parity check covers the loss. This covers the rest of the step: packing,
micro-batches, recomputation, offload, the reduction over ranks, the clip of the norm.
Every process of a run imports this module (VERL_USE_EXTERNAL_MODULES); each rank writes
the rows of its first STEPS optimizer steps below UPREF_GRADIENTS, rank 0 also the
weights and the gathered gradients. `compared` reads them.
"""

import os
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine.base import BaseEngine

from upref.step import Recorded, Row, Step, StepReport, TorchModel, check_recorded
from upref.step.record import watched
from upref.step.rows import CASE_AXES

STEPS = 8
_taken = 0


def recorded(train_batch: Any) -> Any:
    """verl's train_batch, which makes one optimizer step of a mini-batch."""

    @wraps(train_batch)
    def record(engine: Any, data: Any, loss_function: Any) -> Any:
        global _taken
        if _taken == STEPS:
            return train_batch(engine, data, loss_function)
        seen: list[Step] = []
        with watched(engine.module, seen, 1):
            out = train_batch(engine, data, loss_function)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        kept: dict[str, Any] = {"rows": [asdict(r) for r in rows_of(data)]}
        if seen and not rank:
            kept |= {"weights": seen[0].weights, "gradients": seen[0].gradients}
        folder = Path(os.environ["UPREF_GRADIENTS"])
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(kept, folder / f"{_taken}-{rank}.pt")
        _taken += 1
        return out

    return record


def rows_of(data: Any) -> list[Row]:
    """The responses of a mini-batch as verl's trainer hands it to the engine: nested
    tensors, no padding.
    """
    of = {
        k: [x.tolist() for x in data[k].unbind()]
        for k in ("prompts", "responses", "old_log_probs", "advantages")
    }
    trains = [x.bool().tolist() for x in data["response_mask"].unbind()]
    each = zip(
        of["prompts"],
        of["responses"],
        trains,
        of["advantages"],
        of["old_log_probs"],
        strict=True,
    )
    return [Row(p, r, t, a, o) for p, r, t, a, o in each]


def compared(
    folder: Path,
    model: Any,
    objective: str,
    half: torch.dtype | None,
    clip: float = 1.0,
) -> tuple[StepReport, int]:
    """The verdict on all recorded steps, and how many there are. model: of
    transformers, that the run started from.
    """
    steps, rows = [], []
    for first in sorted(
        folder.glob("*-0.pt"), key=lambda p: int(p.stem.partition("-")[0])
    ):
        of = first.stem.partition("-")[0]
        ranks = [
            torch.load(p, weights_only=True) for p in sorted(folder.glob(f"{of}-*.pt"))
        ]
        if "gradients" in ranks[0]:
            steps.append(Step(ranks[0]["weights"], ranks[0]["gradients"]))
            rows.append([Row(**row) for rank in ranks for row in rank["rows"]])
    seen = Recorded(TorchModel(model), steps)
    report = check_recorded(
        seen, rows, objective, temperature=1.0, without=CASE_AXES, bound=half, clip=clip
    )
    return report, len(steps)


if "UPREF_GRADIENTS" in os.environ:
    setattr(BaseEngine, "train_batch", recorded(BaseEngine.train_batch))  # noqa: B010  mypy
