# SPDX-License-Identifier: Apache-2.0
"""Write a file whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_atomically(path: Path | str, content: bytes | str) -> None:
    """Write beside the file, flush to the disk, rename: an interruption or a full disk leaves the old or the new file.

    Args:
        path: The file. Its folder must exist.
        content: Bytes, or text, which is written as UTF-8.

    Raises:
        OSError: With the name of the file, whichever call failed.
    """
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        flush(draft)
        draft.rename(path)
    except OSError as e:
        raise OSError(e.errno, e.strerror or str(e), str(path)) from e
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
