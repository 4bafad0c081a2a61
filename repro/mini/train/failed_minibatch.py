# SPDX-License-Identifier: Apache-2.0
"""A loss or a gradient that is no number: the minibatch is kept with the policy before
it, and can be played again.
"""

from dataclasses import asdict, fields
from pathlib import Path

from torch import Tensor

from repro.mini import files
from repro.mini.train.checkpoint import Run
from repro.mini.train.rollout import Batch
from repro.mini.train.settings import Settings
from upref.errors import InputError

# what making a run and a batch of a file's content may raise
UNREADABLE = (RuntimeError, LookupError, TypeError, ValueError, AttributeError)


class NotFinite(Exception):
    """The run cannot go on; the message says how to look at it."""


def keep_minibatch(
    run: Run,
    batch: Batch,
    ref: Tensor | None,
    rows: Tensor,
    out: Path,
    number: int,
    why: Exception,
) -> str:
    """Write a minibatch and the policy before it to
    OUT/minibatch-STEP-NUMBER.safetensors; return a sentence on what happened and how to
    repeat it.

    Without pickle: people send such a file with a report, and reading it must not run
    what it holds.

    Args:
        run: before the update.
        batch: of the step.
        ref: log-probabilities of the base, or None.
        rows: of the batch, in the minibatch.
        out: folder of the run.
        number: of the minibatch in the step, from 0.
        why: what was not finite.
    """
    path = out / f"minibatch-{run.step}-{number}.safetensors"
    at = {
        "step": run.step,
        "number": number,
        "settings": asdict(run.s),
        "batch": vars(batch),
        "ref": ref,
        "rows": rows,
    }
    files.save_tree(
        path,
        at
        | {"policy": run.policy.state_dict(), "optimizer": run.optimizer.state_dict()},
    )
    return (
        f"step {run.step}, minibatch {number}: {why}. The minibatch and the policy before it are in {path}; "
        f"repeat it: python -m repro.mini.train --minibatch {path}"
    )


def load_minibatch(path: Path) -> tuple[Run, Batch, Tensor | None, Tensor]:
    """Return the run as it was before a kept minibatch, and what `loop.update` takes of
    it: batch, ref and rows.

    Raises:
        InputError: the file is no minibatch of this version.
    """
    try:
        at = files.load_tree(path)
        run = Run(Settings.of(at["settings"]))
        run.policy.load_state_dict(at["policy"])
        run.optimizer.load_state_dict(at["optimizer"])
        if (there := at["batch"].keys()) != (due := {f.name for f in fields(Batch)}):
            raise ValueError(
                f"{', '.join(sorted(there ^ due))} of its batch are too many or too few"
            )
        return run, Batch(**at["batch"]), at["ref"], at["rows"]
    except (InputError, *UNREADABLE) as e:
        said = (
            str(e).rstrip(".")
            if isinstance(e, InputError)
            else f"{type(e).__name__}: {e}"
        )
        raise InputError(
            f"{path} is not a kept minibatch of this version: {said}."
        ) from e
