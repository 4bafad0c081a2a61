# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

import contextlib
import glob
import os
import secrets
import time
from pathlib import Path


def write_atomically(path: Path | str, content: bytes | str) -> None:
    """Write beside the file, flush to the disk, rename: an interruption or a full disk leaves the old or the new file.

    Several processes and threads may write one file; the last one stays. What a killed one left beside it is removed
    after an hour.

    Args:
        path: The file. Its folder must exist.
        content: Bytes, or text, which is written as UTF-8.

    Raises:
        OSError: With the name of the file, whichever call failed.
    """
    path = Path(path)
    start = f".{path.name[:200]}."
    draft = path.with_name(start + secrets.token_hex(4))
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(draft)
        draft.rename(path)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            for left in path.parent.glob(glob.escape(start) + "?" * 8):
                if time.time() - left.stat().st_mtime > 3600:
                    left.unlink()


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
