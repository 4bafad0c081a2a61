# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

import contextlib
import glob
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from upref.errors import InputError

if sys.platform != "win32":
    import fcntl

MARK = ".made-by-upref"  # in a folder whose files a command of ours may remove
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # to open a pipe waits for who writes into it


def write_atomically(path: Path | str, content: bytes | str) -> None:
    """Write beside the file, flush to the disk, rename: an interruption or a full disk
    leaves the old or the new file.

    Several processes and threads may write one file; the last one stays. What a killed
    process left beside it is removed. A pipe or a device is written to as it is.

    Args:
        path: The file, or a link to it. Its folder must exist.
        content: Bytes, or text, which is written as UTF-8.

    Raises:
        OSError: With the name of the file, whichever call failed.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            Path(path).write_bytes(content)
        else:
            _write_and_rename(Path(os.path.realpath(path)), content)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e


def _write_and_rename(path: Path, content: bytes) -> None:
    """Write a draft beside the file, put it in its place, and remove drafts that
    others left.
    """
    prefix = f".{path.name[:180]}."
    draft = _open_locked_draft(path, prefix)
    try:
        with draft:  # which holds its lock
            draft.write(content)
            draft.flush()
            os.fsync(draft.fileno())
            os.rename(draft.name, path)
    finally:
        with contextlib.suppress(OSError):
            Path(draft.name).unlink(missing_ok=True)
            for leftover in path.parent.glob(f"{glob.escape(prefix)}{'[0-9a-f]' * 16}"):
                if not is_locked(leftover):
                    leftover.unlink(missing_ok=True)


def _open_locked_draft(path: Path, prefix: str) -> BinaryIO:
    """Open a new file beside the path, with a lock that ends with this process."""
    while True:
        draft = path.with_name(f"{prefix}{secrets.token_hex(8)}").open("xb")
        _lock(draft.fileno())
        # another writer may have removed it before it was locked
        if os.path.exists(draft.name):
            return draft
        draft.close()


def _lock(handle: int, wait: bool = True) -> bool:
    """Lock an open file, and tell whether that was done: another process may hold the
    lock, and a file system may have no locks.
    """
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file or folder, once nobody else does; kill -9 frees it.

    Args:
        path: of the file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process holds its lock, in a container or on a machine with the
    same file system too; where the system cannot tell, yes.

    Args:
        path: of the file or folder.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        return not _lock(handle, wait=False)
    finally:
        os.close(handle)


def own_folder(folder: Path, *, empty: bool = False) -> None:
    """Make a folder whose files may be removed later, or find that this function made
    it; so nothing is removed that is somebody else's.

    Args:
        folder: is made where it is missing; an empty one is taken.
        empty: remove what an earlier command left in it.

    Raises:
        InputError: The folder has files, and this function did not make it.
    """
    mark = folder / MARK
    if folder.is_dir() and any(folder.iterdir()) and not mark.is_file():
        raise InputError(
            f"{folder} has files and no {MARK}, so this command removes none of them: "
            "name another folder, or remove them yourself."
        )
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    for path in folder.iterdir() if empty else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != mark:
            path.unlink()


def require_readable(path: Path) -> None:
    """Raise InputError where there is no file of that name to read.

    Args:
        path: of the file.
    """
    try:
        handle = os.open(path.resolve(strict=True), os.O_RDONLY | NO_WAIT)
        os.close(handle)
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        why = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise InputError(f"there is no file {str(path)!r} to read ({why}).") from e


def require_file(path: Path, hint: str = "") -> None:
    """Raise InputError where there is no file of that name.

    Args:
        path: of the file.
        hint: what to do about it, behind the sentence.
    """
    if not path.is_file():
        raise InputError(f"there is no file {path}{hint and f': {hint}'}.")


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk.

    Args:
        path: of the file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
