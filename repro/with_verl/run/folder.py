# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: named by what was asked, for that run alone, in use by one process at a time."""

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from upref import InputError

# Settings that may change from one start of a run to the next: they do not change what is trained.
FREE = (
    "hydra.", "ray_kwargs.", "trainer.default_local_dir", "trainer.experiment_name", "trainer.logger",
    "trainer.max_actor_ckpt_to_keep", "trainer.project_name", "trainer.save_freq", "reward.num_workers",
)  # fmt: skip
SAID_ALREADY = ("actor_rollout_ref.rollout.seed", "actor_rollout_ref.actor.data_loader_seed")  # by data.seed
LONGER = ("trainer.total_training_steps", "trainer.total_epochs")  # a run may be made longer, under its name


def asked(overrides: list[str]) -> dict[str, str]:
    """Setting -> value, the last one given, of what makes one run another than the next."""
    pairs = (line.lstrip("+").partition("=") for line in overrides)
    return {key: value for key, _, value in pairs if not key.startswith(FREE)}


def name_of(first: str, own: list[str], given: list[str]) -> str:
    """Readable first: up_dapo-paper_dapo-seed3-1f2e3d4c. `own`: the scale's lines before places are filled in."""
    digest = hashlib.sha256(json.dumps([first, *sorted(asked([*own, *given]).items())]).encode()).hexdigest()[:8]
    short = {k: v for k, v in asked(given).items() if k not in SAID_ALREADY and "/" not in v and "[" not in v}
    said = [f"{key.rpartition('.')[2]}{value}" for key, value in short.items()]
    readable = re.sub(r"[^\w.=-]+", "_", "-".join([first, *said]))[:80].strip("-_.")
    return f"{readable}-{digest}"


def check(folder: Path, overrides: list[str]) -> None:
    """InputError where this folder holds a run that was asked for something else."""
    try:
        saved = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
        before = asked([row["override"] for row in saved["overrides"]])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"{folder}/overrides.json cannot be read: take another name=, or remove the folder.") from e
    now = asked(overrides)
    for key in sorted(before.keys() | now.keys()):
        if key not in LONGER and before.get(key) != now.get(key):
            raise InputError(
                f"{folder} holds a run with {key}={before.get(key, '(not set)')}, and asked is "
                f"{now.get(key, '(not set)')}: leave name= out, or take another."
            )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """InputError where another launch has the folder; the lock goes with this process."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a+", encoding="utf-8") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            f.seek(0)
            raise InputError(
                f"{folder} is being trained by {f.read().strip() or 'another launch'}: wait or end it."
            ) from e
        f.truncate(0)
        f.write(f"process {os.getpid()} on {socket.gethostname()}")
        f.flush()
        yield


def busy(folder: Path) -> str:
    """Who trains in this folder; "" where nobody does."""
    try:
        with alone(folder):
            return ""
    except InputError:
        return (folder / "lock").read_text(encoding="utf-8").strip() or "another launch"
