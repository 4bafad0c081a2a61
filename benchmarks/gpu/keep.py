# SPDX-License-Identifier: Apache-2.0
"""Add the rows of a run to benchmarks/gpu/results.json.

    python -m benchmarks.gpu.keep FOLDER/gpu.json COMMIT

A row takes the place of the row of the same name; each says which run it is of.
"""

import json
import sys
from pathlib import Path
from typing import Any

from upref.files import write_atomically

RESULTS = Path(__file__).with_name("results.json")
# what tells one row from another
NAMES = (
    "fact", "test", "part", "model", "step", "function", "dtype", "objective", "liger", "settings", "who", "H", "N",
    "run", "estimate",
)  # fmt: skip
LONGEST = 4000  # characters of a text that are kept


def name_of(kind: str, row: dict[str, Any]) -> str:
    """What tells it from the other rows of its kind."""
    return json.dumps([kind, *(row.get(k) for k in NAMES)])


def added(kept: dict[str, Any], new: dict[str, Any], commit: str) -> dict[str, Any]:
    """The results with those of another run.

    Args:
        kept: `runs` and `rows`; empty before the first run.
        new: gpu.json of the run.
        commit: of the checkout that ran.

    Returns:
        The results with the new rows in place of those of the same name.
    """
    runs = kept.get("runs", [])
    rows = {name_of(r["kind"], r): r for r in kept.get("rows", [])}
    for part, found in new["rows"].items():
        kind = part.partition("-")[0]
        for row in found:
            row = {k: shortened(v) for k, v in row.items()}
            rows[name_of(kind, row)] = {"kind": kind, "of": len(runs)} | row
    machine = next((r for r in new["rows"].get("facts", []) if "gpu" in r), {})
    run = {"commit": commit, "date": machine.get("date"), "parts": new["parts"]}
    return {"runs": [*runs, run], "rows": list(rows.values())}


def shortened(value: Any) -> Any:
    """A long text without its middle; everything else as it is."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[: LONGEST // 2]} ... {value[-LONGEST // 2 :]}"
    return value


def main(path: str, commit: str) -> None:
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    new = json.loads(Path(path).read_text("utf-8"))
    text = json.dumps(added(kept, new, commit), indent=0) + "\n"
    write_atomically(RESULTS, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
