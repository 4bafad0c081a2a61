# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: named by what was asked, for that run alone, in use by one
process at a time.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repro.with_verl.config.naming import asked
from upref import InputError

# a run may be made longer, under its name
LONGER = ("trainer.total_training_steps", "trainer.total_epochs")


def check(folder: Path, overrides: list[str]) -> None:
    """Raise InputError if this folder holds a run that was asked for something else.
    Another number of steps is no difference, and an absent overrides.json is none
    either.
    """
    try:
        saved = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
        before = asked([row["override"] for row in saved["overrides"]])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(
            f"{folder}/overrides.json cannot be read: take another name=, or remove the folder."
        ) from e
    now = asked(overrides)
    for key in sorted(before.keys() | now.keys()):
        if key not in LONGER and before.get(key) != now.get(key):
            raise InputError(
                f"{folder} holds a run with {key}={before.get(key, '(not set)')}, and asked is "
                f"{now.get(key, '(not set)')}: leave name= out, or take another."
            )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which is made if it is absent. Raise InputError if
    another process holds it. The lock ends with this process.
    """
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
