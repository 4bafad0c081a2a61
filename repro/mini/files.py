# SPDX-License-Identifier: Apache-2.0
"""Folders that are whole or not there and checked before they are believed, logs that one can go back in.

A folder is written beside its place, hashed, flushed to the disk and renamed: kill -9 leaves the old or the new one.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from upref.errors import InputError

PROVENANCE = "provenance.json"


@contextmanager
def alone(folder: Path, other: str) -> Iterator[int]:
    """One process at a time in the folder, which is made; gives the number of the lock.

    kill -9 frees it. Processes that inherit the number hold it as well, until the last of them ends.
    Raises InputError where the folder is in use (by `other`, says the sentence) or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise InputError(f"cannot write in {folder} ({e.strerror}): choose another folder with --out.") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{folder} is in use by {other}: wait for it or stop it.") from None
        yield lock
    finally:
        os.close(lock)


def publish(folder: Path, write: Callable[[Path], None], **facts) -> None:
    """Make the folder by `write`, all or nothing; provenance.json holds the facts and the sha256 of every file."""
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        try:
            write(draft)
        except (RuntimeError, SafetensorError) as e:  # how torch and safetensors say that the disk is full
            raise OSError(ENOSPC, str(e).splitlines()[0], str(folder)) from e
        digests = {p.name: sha256(p) for p in sorted(draft.iterdir())}
        (draft / PROVENANCE).write_text(json.dumps(facts | {"sha256": digests}, indent=1) + "\n")
        for path in [*draft.iterdir(), draft]:
            flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def checked(folder: Path) -> dict[str, Any]:
    """The facts of a folder whose files are all what they were. Raises InputError if one is not."""
    try:
        facts = json.loads((folder / PROVENANCE).read_text())
        for name, digest in facts["sha256"].items():
            if sha256(folder / name) != digest:
                raise InputError(f"{folder / name} is not the file that was written: its sha256 differs.")
    except (OSError, ValueError, KeyError, AttributeError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{folder} is not a whole folder: {type(e).__name__}: {e}.") from e
    return facts


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        flush(draft)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


class Log:
    """A JSONL file. `here` is how far it is written; `back_to` drops what a killed run wrote after its checkpoint."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")

    def here(self) -> int:
        self.path.touch()
        flush(self.path)
        return self.path.stat().st_size

    def back_to(self, size: int) -> None:
        self.path.touch()
        if self.path.stat().st_size < size:
            raise InputError(
                f"{self.path} is shorter than when the checkpoint was made: remove its folder to start over."
            )
        os.truncate(self.path, size)
