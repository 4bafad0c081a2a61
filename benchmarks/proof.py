# SPDX-License-Identifier: Apache-2.0
"""What the proof within `upref.check` costs: CPU seconds of a check with it and without it,
of each objective's own function.

    python -m benchmarks.proof [NAME...]

The CPU time of the solver's processes is included. A row says whether the proof stands;
where a check tries none, its two figures differ by chance alone. The first check, which
imports, is not counted.
"""

import statistics
import sys

import torch

import upref
from upref.proof.solver import cpu_seconds
from upref.registry import get, names

ORACLE = "every-value"


def measured(name: str, skip: tuple[str, ...]) -> tuple[float, bool]:
    """Return the CPU seconds of a check, and whether its report has a proof.

    Args:
        name: of the objective.
        skip: oracles that do not run.
    """
    start = cpu_seconds()
    report = upref.check(get(name), name, skip=skip)
    return cpu_seconds() - start, "proved for every value" in str(report)


def main(chosen: list[str]) -> int:
    """Print a row for each objective, and the medians."""
    torch.set_num_threads(1)
    measured("dapo", ())
    rows = []
    print("objective            with   without  proof   (CPU seconds of one check)")
    for name in chosen or names():
        without, _ = measured(name, (ORACLE,))
        with_proof, is_proved = measured(name, ())
        rows.append((with_proof, without))
        word = "stands" if is_proved else "-"
        print(f"{name:20} {with_proof:5.2f}  {without:7.2f}  {word}", flush=True)
    for what, of in (("median", statistics.median), ("largest", max)):
        columns = [of(column) for column in zip(*rows, strict=True)]
        print(f"{what:20} {columns[0]:5.2f}  {columns[1]:7.2f}")
    added = [a - b for a, b in rows]
    print(
        f"{len(rows)} objectives; the proof adds {statistics.median(added):.2f} s in the median, "
        f"at most {max(added):.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
