# SPDX-License-Identifier: Apache-2.0
"""A loss or a gradient that is no number: the minibatch is kept with the policy before it, and can be played again."""

import pickle
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from repro.mini.train.checkpoint import Run
from repro.mini.train.rollout import Batch
from repro.mini.train.settings import Settings
from upref.errors import InputError

UNREADABLE = (OSError, EOFError, pickle.PickleError, RuntimeError, LookupError, TypeError, ValueError, AttributeError)


class NotFinite(Exception):
    """The run cannot go on; the message says how to look at it."""


def keep_for_replay(run: Run, batch: Batch, ref, rows: Tensor, out: Path, number: int, why: Exception) -> str:
    path = out / f"replay-{run.step}-{number}.pt"
    at = {"step": run.step, "number": number, "settings": asdict(run.s), "batch": batch, "ref": ref, "rows": rows}
    torch.save(at | {"policy": run.policy.state_dict(), "optimizer": run.optimizer.state_dict()}, path)
    return (
        f"step {run.step}, minibatch {number}: {why}. The minibatch and the policy before it are in {path}; "
        f"replay it: python -m repro.mini.train --replay {path}"
    )


def again(path: Path) -> tuple[Run, Batch, Tensor | None, Tensor]:
    """The run as it was before that minibatch, and what `update` takes of the minibatch."""
    try:
        at = torch.load(path, weights_only=False)
        run = Run(Settings.of(at["settings"]))
        run.policy.load_state_dict(at["policy"])
        run.optimizer.load_state_dict(at["optimizer"])
        if (there := vars(at["batch"]).keys()) != (due := {f.name for f in fields(Batch)}):
            raise ValueError(f"{', '.join(sorted(there ^ due))} of its batch are too many or too few")
        return run, at["batch"], at["ref"], at["rows"]
    except UNREADABLE as e:
        raise InputError(f"{path} is no replay file of this version: {type(e).__name__}: {e}.") from e
