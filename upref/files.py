# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

import contextlib
import glob
import os
import platform
import re
import secrets
import sys
from pathlib import Path

from upref.errors import InputError


def write_atomically(path: Path | str, content: bytes | str) -> None:
    """Write beside the file, flush to the disk, rename: an interruption or a full disk leaves the old or the new file.

    Several processes and threads may write one file; the last one stays. What a killed process of this machine left
    beside it is removed.

    Args:
        path: The file. Its folder must exist.
        content: Bytes, or text, which is written as UTF-8.

    Raises:
        OSError: With the name of the file, whichever call failed.
    """
    path = Path(path)
    start = f".{path.name[:180]}.{re.sub(r'[^0-9A-Za-z-]', '-', platform.node())[:30]}."
    draft = path.with_name(f"{start}{os.getpid()}.{secrets.token_hex(4)}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(draft)
        draft.rename(path)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e
    finally:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
            for left in path.parent.glob(glob.escape(start) + "*.????????"):
                if not is_running(int(left.name.removeprefix(start).partition(".")[0])):
                    left.unlink()


def is_running(process: int) -> bool:
    """Whether a process of this machine has this id; where the system cannot tell, yes."""
    if sys.platform == "win32":  # there os.kill ends a process
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def require_readable(path: Path) -> None:
    """Raise InputError where there is no file of that name to read."""
    try:
        path.resolve(strict=True).open().close()
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        why = getattr(e, "strerror", None) or " ".join(str(e).split())
        raise InputError(f"there is no file {str(path)!r} to read ({why}).") from e


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
