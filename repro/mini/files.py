# SPDX-License-Identifier: Apache-2.0
"""Folders that are whole or not there and checked before they are believed, logs that
one can go back in.

A folder is written beside its place, hashed, flushed to the disk and renamed: kill -9
leaves the old or the new one.
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

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from upref.errors import InputError
from upref.files import flush, write_atomically

PROVENANCE = "provenance.json"
__all__ = [
    "Log",
    "alone",
    "checked",
    "flush",
    "load_tree",
    "locked",
    "publish",
    "save_tree",
    "sha256",
    "write_atomically",
]


@contextmanager
def alone(folder: Path, other: str) -> Iterator[int]:
    """One process at a time in the folder, which is made; gives the number of the lock.

    kill -9 frees it. Processes that inherit the number hold it as well, until the last
    of them ends. Raises InputError where the folder is in use (by `other`, says the
    sentence) or cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise InputError(
            f"cannot write in {folder} ({e.strerror}): choose another folder with --out."
        ) from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder} is in use by {other}: wait for it or stop it."
            ) from None
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked(folder: Path, *, write: bool) -> Iterator[None]:
    """Wait for the folder, which exists; then one writer is alone in it, or any number
    of readers. kill -9 frees it.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def publish(folder: Path, write: Callable[[Path], None], **facts) -> None:
    """Make the folder by `write`, all or nothing; provenance.json holds the facts and
    the sha256 of every file.
    """
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        try:
            write(draft)
        except (RuntimeError, SafetensorError) as e:
            raise _disk_error(e, folder) from e
        digests = {p.name: sha256(p) for p in sorted(draft.iterdir())}
        (draft / PROVENANCE).write_text(
            json.dumps(facts | {"sha256": digests}, indent=1) + "\n"
        )
        for path in [*draft.iterdir(), draft]:
            flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _disk_error(e: Exception, path: Path) -> OSError:
    """What torch and safetensors raise where the disk is full, as an OSError."""
    said = str(e).splitlines()[0]
    full = "unexpected pos" in said or "os error 28" in said or "iostream" in said
    return OSError(ENOSPC, os.strerror(ENOSPC) if full else said, str(path))


def checked(folder: Path) -> dict[str, Any]:
    """The facts of a folder whose files are all what they were. Raises InputError if
    one is not.
    """
    try:
        facts = json.loads((folder / PROVENANCE).read_text())
        for name, digest in facts["sha256"].items():
            if sha256(folder / name) != digest:
                raise InputError(
                    f"{folder / name} is not the file that was written: its sha256 differs."
                )
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(
            f"{folder} is not a whole folder: {type(e).__name__}: {e}."
        ) from e
    return facts


def facts_digest(facts: dict[str, Any]) -> str:
    """The sha256 of these facts, their own `digest` left out."""
    plain = json.dumps(
        {k: v for k, v in facts.items() if k != "digest"}, sort_keys=True
    )
    return hashlib.sha256(plain.encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def save_tree(path: Path, tree: Any) -> None:
    """Nested dicts, lists and tuples of tensors, numbers, words and None, in one
    safetensors file.

    The structure is JSON in the file's metadata, so that reading it runs no code, which
    reading a pickle does; beside it is a digest of it and of the tensors. Tuples come
    back as lists.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_plain(tree, tensors))
    facts = {"tree": plain, "digest": _digest_of_tree(plain, tensors)}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, draft, facts)
        flush(draft)
        draft.rename(path)
        flush(path.parent)
    except SafetensorError as e:
        raise _disk_error(e, path) from e
    finally:
        draft.unlink(missing_ok=True)


def load_tree(path: Path) -> Any:
    """What `save_tree` wrote. Raises InputError on anything else, and where the content
    is not what was written.
    """
    try:
        with safe_open(path, "pt") as f:
            tensors, facts = (
                {name: f.get_tensor(name) for name in f.keys()},  # noqa: SIM118
                f.metadata(),
            )
            # files from before this digest have none
            if "digest" in facts and facts["digest"] != _digest_of_tree(
                facts["tree"], tensors
            ):
                raise ValueError("its content is not what was written")
            return _tree(json.loads(facts["tree"]), tensors.__getitem__)
    except (
        OSError,
        SafetensorError,
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
    ) as e:
        raise InputError(f"{path} cannot be read: {type(e).__name__}: {e}.") from e


def _digest_of_tree(plain: str, tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256(plain.encode())
    for name in sorted(tensors):
        x = tensors[name]
        total.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        total.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _plain(x: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree as JSON holds it, and put its tensors into `tensors` by number."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        # a file cannot hold two tensors that share memory; gigabytes are not copied
        shared = {y.data_ptr() for y in tensors.values()}
        alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
        if not alone or x.data_ptr() in shared:
            x = x.clone(memory_format=torch.contiguous_format)
        tensors[name := str(len(tensors))] = x
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": [[k, _plain(v, tensors)] for k, v in x.items()]}
    return [_plain(v, tensors) for v in x] if isinstance(x, list | tuple) else x


def _tree(x: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the tree that `_plain` wrote; `tensor` reads one by its number."""
    if isinstance(x, dict):
        return (
            tensor(x["tensor"])
            if "tensor" in x
            else {k: _tree(v, tensor) for k, v in x["dict"]}
        )
    return [_tree(v, tensor) for v in x] if isinstance(x, list) else x


class Log:
    """A JSONL file. `here` is how far it is written, and the digest of that; `back_to`
    drops what a killed run wrote after its checkpoint."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")

    def here(self) -> list[Any]:
        """[bytes, their sha256]."""
        self.path.touch()
        flush(self.path)
        return [self.path.stat().st_size, sha256(self.path)]

    def back_to(self, size: int, digest: str = hashlib.sha256().hexdigest()) -> None:
        """Raises InputError if the first `size` bytes are not those that the checkpoint
        was made with.
        """
        self.path.touch()
        content = self.path.read_bytes()
        if len(content) < size or hashlib.sha256(content[:size]).hexdigest() != digest:
            wrong = (
                "is shorter than when"
                if len(content) < size
                else "is not what it was when"
            )
            raise InputError(
                f"{self.path} {wrong} the checkpoint was made: remove its folder to start over."
            )
        os.truncate(self.path, size)
