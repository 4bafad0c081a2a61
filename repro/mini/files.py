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
    """Lock the folder, which is made, for one process at a time; gives the file
    descriptor of the lock.

    kill -9 frees it. Processes that inherit the descriptor hold the lock as well, until
    the last of them ends.

    Args:
        folder: it is made.
        other: by what it may be in use, for the message.

    Raises:
        InputError: the folder is in use or cannot be made.
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
    """Wait for the lock of the folder, which exists: with `write` alone, else together
    with any number of readers. kill -9 frees it.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def publish(folder: Path, write: Callable[[Path], None], **facts) -> None:
    """Make the folder by `write`, all or nothing, in place of one that is there.

    Args:
        folder: where it will be; until it is whole, it is a draft beside this place.
        write: writes files, and no folders, into the draft, whose path it is given.
        **facts: for provenance.json, which also has the sha256 of every file.

    Raises:
        OSError: the disk is full, or cannot be written.
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
    """Return as an OSError, with the number of a full disk, what torch and safetensors
    raise where a file cannot be written. Its text is their own where they do not say
    that the disk is full.
    """
    said = str(e).splitlines()[0]
    full = "unexpected pos" in said or "os error 28" in said or "iostream" in said
    return OSError(ENOSPC, os.strerror(ENOSPC) if full else said, str(path))


def checked(folder: Path) -> dict[str, Any]:
    """Return the facts in provenance.json of a folder whose files are all what they
    were.

    Raises:
        InputError: a file is missing or differs from its sha256.
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
        if isinstance(e, InputError):  # a ValueError, too
            raise
        raise InputError(
            f"{folder} is not a whole folder: {type(e).__name__}: {e}."
        ) from e
    return facts


def facts_digest(facts: dict[str, Any]) -> str:
    """Return the sha256 of these facts as sorted JSON, without their own `digest`."""
    plain = json.dumps(
        {k: v for k, v in facts.items() if k != "digest"}, sort_keys=True
    )
    return hashlib.sha256(plain.encode()).hexdigest()


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def save_tree(path: Path, tree: Any) -> None:
    """Write nested dicts, lists and tuples of tensors, numbers, text and None to one
    safetensors file, all or nothing.

    The structure is JSON in the file's metadata, so that reading it runs no code, which
    reading a pickle does; beside it is a digest of it and of the tensors. Tuples come
    back as lists.

    Raises:
        OSError: the disk is full, or cannot be written.
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
    """Return what `save_tree` wrote, with tensors on the CPU.

    Raises:
        InputError: the file is something else, or not what was written.
    """
    try:
        with safe_open(path, "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
            facts = f.metadata()
            plain = facts["tree"]
            digest = facts.get("digest")  # files from before it have none
            if digest is not None and digest != _digest_of_tree(plain, tensors):
                raise ValueError("its content is not what was written")
            return _tree(json.loads(plain), tensors.__getitem__)
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
    """Return the sha256 of the JSON and of each tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(plain.encode())
    for name in sorted(tensors):
        x = tensors[name]
        total.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        total.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _plain(x: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the tree as JSON holds it, and put its tensors into `tensors` by number.

    A tensor becomes {"tensor": NUMBER}, a dict {"dict": [[key, value], ...]}, so that
    keys need not be text.
    """
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        # a file cannot hold two tensors that share memory; gigabytes are not copied
        shared = {y.data_ptr() for y in tensors.values()}
        alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
        if not alone or x.data_ptr() in shared:
            x = x.clone(memory_format=torch.contiguous_format)
        name = str(len(tensors))
        tensors[name] = x
        return {"tensor": name}
    if isinstance(x, dict):
        return {"dict": [[k, _plain(v, tensors)] for k, v in x.items()]}
    if isinstance(x, list | tuple):
        return [_plain(v, tensors) for v in x]
    return x


def _tree(x: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the tree that `_plain` made.

    Args:
        x: its JSON.
        tensor: returns the tensor of a number.
    """
    if isinstance(x, list):
        return [_tree(v, tensor) for v in x]
    if not isinstance(x, dict):
        return x
    if "tensor" in x:
        return tensor(x["tensor"])
    return {k: _tree(v, tensor) for k, v in x["dict"]}


class Log:
    """A JSONL file to which a run adds, and which goes back to where it was at a
    checkpoint.

    `here` is kept in the checkpoint; `back_to` then drops what a killed run wrote after
    it.
    """

    def __init__(self, path: Path):
        self.path = path

    def add(self, row: dict[str, Any]) -> None:
        """Add a line. Raises ValueError where a number is not finite."""
        with self.path.open("a") as f:
            f.write(json.dumps(row, allow_nan=False) + "\n")

    def here(self) -> list[Any]:
        """Flush the file, which is made if it is not there, and return [its bytes,
        their sha256].
        """
        self.path.touch()
        flush(self.path)
        return [self.path.stat().st_size, sha256(self.path)]

    def back_to(self, size: int, digest: str = hashlib.sha256().hexdigest()) -> None:
        """Cut the file to its first `size` bytes.

        Raises:
            InputError: these are not the bytes with this digest, that of no bytes by
                default.
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
