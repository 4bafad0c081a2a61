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
    """Return the first 16 hexadecimal digits of the SHA-1 of these texts."""
    return hashlib.sha1("\0".join(parts).encode()).hexdigest()[:16]


@cache
def library() -> str:
    """Return the digest of the checker's code: a verdict is valid for this code only."""
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
    """Return the digest of the search's code: a truth is valid for this code only."""
    here = Path(__file__).parent
    return digest(
        *(
            (here / name).read_text()
            for name in ("batches.py", "search.py", "styles.py")
        )
    )


class Store:
    """Rows by key, kept in a file with a line of JSON for each; a later line replaces
    an earlier one of its key.
    """

    def __init__(self, path: Path):
        """Read the rows of the file if there is one; make its folder if there is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.known = path, {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self.known[row["key"]] = row

    def get(self, key: str, make, again=lambda row: False) -> dict:
        """Return the row of that key. Where it is not known, or `again(row)` is true,
        compute it with `make`, and append it to the file.
        """
        if key not in self.known or again(self.known[key]):
            self.known[key] = {"key": key} | make()
            with self.path.open("a") as f:
                f.write(json.dumps(self.known[key], ensure_ascii=False) + "\n")
        return self.known[key]
