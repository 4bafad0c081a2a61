# SPDX-License-Identifier: Apache-2.0
"""Answers kept in a scratch folder, a line of JSON each, so that a run that was cut off
goes on where it was.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import upref


def digest(*parts: str) -> str:
    return hashlib.sha1("\0".join(parts).encode()).hexdigest()[:16]


@cache
def library() -> str:
    """Of all that judges: an answer of the checker holds for this code only."""
    root = Path(upref.__file__).parent
    folders = (
        "verify",
        "verify/oracles",
        "verify/advantages",
        "user_code",
        "weights",
        "objectives",
    )
    files = [
        root / f"{n}.py" for n in ("registry", "ops", "aggregation", "rollouts", "kl")
    ]
    files += [p for folder in folders for p in sorted((root / folder).glob("*.py"))]
    return digest(*(p.read_text() for p in files))


@cache
def searcher() -> str:
    here = Path(__file__).parent
    return digest(
        *(
            (here / name).read_text()
            for name in ("batches.py", "search.py", "styles.py")
        )
    )


class Store:
    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.known = path, {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.known[row["key"]] = row

    def get(self, key: str, make, again=lambda row: False) -> dict:
        """The row of that key, made and written where it is not known, or is to be
        asked again.
        """
        if key not in self.known or again(self.known[key]):
            self.known[key] = {"key": key} | make()
            with self.path.open("a") as f:
                f.write(json.dumps(self.known[key], ensure_ascii=False) + "\n")
        return self.known[key]
