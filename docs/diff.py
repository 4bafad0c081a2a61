# SPDX-License-Identifier: Apache-2.0
"""What docs/howto/diff.md has generated: where the steps of two trainers differ, case by
case.

    python -m docs.diff trl verl

runs `upref diff` and records its answer in docs/steps/diff-trl-verl.json.
"""

import sys
from pathlib import Path

import torch

from docs import record
from upref import markdown, plugins
from upref.conformance import load_adapter
from upref.conformance.diff import chosen_cases, diff_steps

HERE = Path(__file__).parent / "steps"


def matrix(a: str, b: str) -> str:
    """Say in how many cases the steps of two trainers are the same, with a table of
    those that differ and a line of those that were left out.
    """
    found = record.rows(HERE / f"diff-{a}-{b}.json")
    names = (found["a"], found["b"])
    compared = found["compared"]
    differing = [one for one in compared if one["quantity"]]
    same = [f"`{one['case']}`" for one in compared if not one["quantity"]]
    rows = []
    for one in differing:
        cells = [
            value if value == cause else f"{value}; {cause}"
            for value, cause in zip((one["a"], one["b"]), one["causes"], strict=True)
        ]
        shown = [cell.replace("|", "\\|") for cell in cells]
        rows.append([f"`{one['case']}`", one["quantity"], *shown])
    left_out = [f"`{case}`: {why}" for case, why in found["left_out"].items()]
    return "\n".join(
        [
            f"Of {len(compared)} cases that both {names[0]} and {names[1]} have, {len(differing)} differ:",
            "",
            markdown.table(["case", "first difference", *names], rows),
            "",
            f"These {len(same)} do not differ: {', '.join(same)}.",
            "",
            "Left out:",
            "",
            *[f"* {words}" for words in left_out],
        ]
    )


def main(a: str, b: str) -> None:
    """Compare two trainers, and record where they differ."""
    targets = plugins.adapters()
    adapters = [load_adapter(targets[name]) for name in (a, b)]
    found = diff_steps(*adapters, chosen_cases([]))
    print(found)
    file = HERE / f"diff-{a}-{b}.json"
    record.add(file, f"python -m docs.diff {a} {b}", found.data(), [0])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny: more threads wait for each other
    main(*sys.argv[1:3])
