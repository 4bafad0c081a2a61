# SPDX-License-Identifier: Apache-2.0
"""Add the rows of a run to benchmarks/gpu/results.json.

    python -m benchmarks.gpu.keep FOLDER/gpu.json COMMIT
    python -m benchmarks.gpu.keep FOLDER/gpu.json COMMIT --without training "REASON"

A row takes the place of the row of the same name; each says which run it is of. A row
that lacks a package takes the place of none. The second form keeps a part's status, but
not its rows, and writes down why.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from upref.files import write_atomically

RESULTS = Path(__file__).with_name("results.json")
# what tells one row from another
NAMES = (
    "fact", "test", "part", "model", "step", "function", "dtype", "objective", "liger", "settings", "who", "H", "N",
    "run", "estimate", "case", "sampler",
)  # fmt: skip
LONGEST = 4000  # characters of a text that are kept


def name_of(kind: str, row: dict[str, Any]) -> str:
    """What tells it from the other rows of its kind."""
    return json.dumps([kind, *(row.get(k) for k in NAMES)])


def added(
    kept: dict[str, Any],
    new: dict[str, Any],
    commit: str,
    without: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The results with those of another run.

    Args:
        kept: `runs` and `rows`; empty before the first run.
        new: gpu.json of the run.
        commit: of the checkout that ran.
        without: part -> why its rows are not kept.

    Returns:
        The results with the new rows in place of those of the same name.
    """
    runs = kept.get("runs", [])
    rows = {name_of(r["kind"], r): r for r in kept.get("rows", [])}
    for part, found in new["rows"].items():
        if part in without:
            continue
        kind = part.partition("-")[0]
        for row in found:
            name = name_of(kind, row)
            if name in rows and lacks_package(row):
                continue
            row = {k: shortened(v) for k, v in row.items()}
            rows[name] = {"kind": kind, "of": len(runs)} | row
    run = {"commit": commit, "date": new["date"], "parts": new["parts"]}
    if "gpu" in new:  # a run without the part `facts` names its GPU itself
        run["gpu"] = new["gpu"]
    if without:
        run["without"] = without
    return {"runs": [*runs, run], "rows": list(rows.values())}


def lacks_package(row: dict[str, Any]) -> bool:
    """Tell whether it failed because a package is not installed there."""
    return str(row.get("failed", "")).startswith("ModuleNotFoundError")


def shortened(value: Any) -> Any:
    """A long text without its middle; everything else as it is."""
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[: LONGEST // 2]} ... {value[-LONGEST // 2 :]}"
    return value


def main(path: str, commit: str, *left_out: str) -> None:
    without = dict([left_out[1:]]) if left_out else {}
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    new = json.loads(Path(path).read_text("utf-8"))
    text = json.dumps(added(kept, new, commit, without), indent=0) + "\n"
    write_atomically(RESULTS, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
