# SPDX-License-Identifier: Apache-2.0
"""What was registered, when: `python -m repro.mini.round2.registration COMMIT`, once, before any run.

registration.json names the commit that holds rule, claims and seeds, and the digest of each of these files. A test
holds the files of today to it, and the commit of every run to being that one or a later one.
"""

import json
import sys
from pathlib import Path
from typing import Any

from repro.mini import files

HERE = Path(__file__).parent
FILE = HERE / "registration.json"


def registered() -> list[Path]:
    return [HERE / "rule.py", HERE / "power.md", HERE / "pilot.jsonl", *sorted((HERE / "experiments").glob("*.toml"))]


def digests() -> dict[str, str]:
    return {path.relative_to(HERE).as_posix(): files.sha256(path) for path in registered()}


def load() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


if __name__ == "__main__":
    text = json.dumps({"commit": sys.argv[1], "sha256": digests()}, indent=1) + "\n"
    files.write_atomically(FILE, text.encode())
