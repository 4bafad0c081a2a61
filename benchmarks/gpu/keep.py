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

from docs import record
from docs.record import Record

RESULTS = Path(__file__).with_name("results.json")
# what tells one row from another
NAMES = (
    "fact", "test", "part", "model", "step", "function", "dtype", "objective", "liger", "settings", "who", "H", "N",
    "run", "estimate", "case", "sampler",
)  # fmt: skip
LONGEST = 4000  # characters of a text that are kept


def name_of(kind: str, row: dict[str, Any]) -> str:
    """Return the text that tells a row from all other rows: its kind and its fields of
    NAMES, as JSON.
    """
    return json.dumps([kind, *(row.get(k) for k in NAMES)])


def added(
    kept: list[Record],
    new: dict[str, Any],
    commit: str,
    without: Mapping[str, str] = MappingProxyType({}),
) -> list[Record]:
    """Add the rows of a run to the results; nothing is written.

    Args:
        kept: a record for each run before.
        new: gpu.json of the run.
        commit: of the checkout that ran.
        without: part -> why its rows are not kept.

    Returns:
        The results with the new rows in place of those of the same name; a row of the
        kind "run" has the run's parts.
    """
    there: set[str] = set()
    for earlier in kept:
        there |= earlier.rows.keys()
    number = len(kept)
    run = {"kind": "run", "of": number, "run": str(number), "parts": new["parts"]}
    if "gpu" in new:  # a run without the part `facts` names its GPU itself
        run["gpu"] = new["gpu"]
    if without:
        run["without"] = dict(without)
    rows = {name_of("run", run): run}
    for part, found in new["rows"].items():
        if part in without:
            continue
        kind = part.partition("-")[0]
        for row in found:
            name = name_of(kind, row)
            is_known = name in there or name in rows
            if is_known and lacks_package(row):
                continue
            fields = {field: shortened(value) for field, value in row.items()}
            rows[name] = {"kind": kind, "of": number} | fields
    command = "python -m benchmarks.gpu --out FOLDER"
    machine = new.get("gpu", "a GPU")
    mine = Record(command, commit, new["date"], machine, [], rows)
    return [*record.without(kept, rows), mine]


def lacks_package(row: dict[str, Any]) -> bool:
    """Tell whether it failed because a package is not installed there."""
    return str(row.get("failed", "")).startswith("ModuleNotFoundError")


def shortened(value: Any) -> Any:
    """Return a text of more than LONGEST characters without its middle; return
    everything else as it is.
    """
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[: LONGEST // 2]} ... {value[-LONGEST // 2 :]}"
    return value


def main(path: str, commit: str, *left_out: str) -> None:
    """Add the rows of gpu.json to results.json.

    Args:
        path: of gpu.json.
        commit: of the checkout that ran.
        *left_out: nothing; or `--without`, a part whose rows are not kept, and why.
    """
    without = dict([left_out[1:]]) if left_out else {}
    new = json.loads(Path(path).read_text("utf-8"))
    record.write(RESULTS, added(record.read(RESULTS), new, commit, without))


if __name__ == "__main__":
    main(*sys.argv[1:])
