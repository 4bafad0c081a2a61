# SPDX-License-Identifier: Apache-2.0
"""What was registered, when: `python -m repro.mini.study.registration FOLDER COMMIT`,
once, before any run of it.

FOLDER is repro/mini/round2 or repro/mini/stale. Its registration.json names the commit
that holds rule, claims and seeds, and the digest of each of these files. A test
compares today's files with it, and checks that the commit of every run is that one or a
later one.
"""

import json
import sys
from pathlib import Path
from typing import Any

from repro.mini import files

PATTERNS = (
    "rule.py",
    "design.toml",
    "difficulty.json",
    "runs.sha256",
    "power.md",
    "pilot.jsonl",
    "experiments/*.toml",
)


def digests(folder: Path) -> dict[str, str]:
    paths = [path for pattern in PATTERNS for path in sorted(folder.glob(pattern))]
    return {path.relative_to(folder).as_posix(): files.sha256(path) for path in paths}


def load(folder: Path) -> dict[str, Any]:
    """The commit and the digests; {} if nothing is registered yet."""
    path = folder / "registration.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


if __name__ == "__main__":
    here = Path(sys.argv[1])
    text = json.dumps({"commit": sys.argv[2], "sha256": digests(here)}, indent=1) + "\n"
    files.write_atomically(here / "registration.json", text.encode())
