# SPDX-License-Identifier: Apache-2.0
"""What docs/howto/diff.md has generated: where the steps of two trainers differ, case by
case.

    python -m docs.diff trl verl openrlhf skyrl

runs each case of one process once with each trainer, compares every two of them, and
records the answers in docs/steps/diff.json.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from docs import record
from tests.conformance.known_bugs import load
from upref import markdown
from upref.conformance import CASES
from upref.conformance.diff import chosen_cases, compare_runs, run_cases, why_left_out

FILE = Path(__file__).parent / "steps" / "diff.json"


def pairs() -> str:
    """Return a table of every two trainers: in how many cases their steps differ, and
    in which.
    """
    rows = []
    for pair in record.rows(FILE)["pairs"]:
        differing = [one["case"] for one in _differing(pair)]
        cells = [
            f"{pair['a']} and {pair['b']}",
            len(pair["compared"]),
            len(differing),
            markdown.codes(differing),
        ]
        rows.append(cells)
    return markdown.table(["trainers", "cases that both have", "differ", "which"], rows)


def differences() -> str:
    """Return a list of the cases in which two trainers differ: in each, what each
    trainer does, and the first quantity in which each pair differs.
    """
    found = record.rows(FILE)
    does = _what_each_does(found["pairs"])
    lines = []
    for case, pairs_of in _first_quantities(found["pairs"]).items():
        sentences = [
            f"{'; '.join(pairs)} differ first in *{quantity}*."
            for quantity, pairs in pairs_of.items()
        ]
        lines.append(f"* `{case}`: {' '.join(sentences)}")
        for trainer in found["trainers"]:
            lines.append(f"  * {trainer}: {does[case].get(trainer, 'left out')}")
    return "\n".join(lines)


def _what_each_does(pairs: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return case -> trainer -> what it does, of recorded comparisons."""
    does: dict[str, dict[str, str]] = {}
    for pair in pairs:
        for one in pair["compared"]:
            causes = zip((pair["a"], pair["b"]), one["causes"], strict=True)
            does.setdefault(one["case"], {}).update(causes)
    return does


def _first_quantities(pairs: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return case -> first quantity that differs -> the pairs of trainers that differ
    first in it, in words; a case in which no pair differs is not there.
    """
    quantities: dict[str, dict[str, list[str]]] = {}
    for pair in pairs:
        between = f"{_short(pair['a'])} and {_short(pair['b'])}"
        for one in _differing(pair):
            quantity = one["quantity"].partition(":")[0]
            of_case = quantities.setdefault(one["case"], {})
            of_case.setdefault(quantity, []).append(between)
    return quantities


def left_out() -> str:
    """Return a list of the cases that are left out, by the reason why."""
    reasons: dict[str, list[str]] = {}
    for case, why in record.rows(FILE)["left_out"]:
        reasons.setdefault(why, []).append(case)
    prepared = [case for case in CASES if case.startswith("prepare/")]
    lines = []
    for why, cases in reasons.items():
        shown = ["prepare/*"] if cases == prepared else cases
        lines.append(f"* {markdown.codes(shown)}: {why}")
    return "\n".join(lines)


def _differing(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the compared cases of a pair in which a quantity differs."""
    return [one for one in pair["compared"] if one["quantity"]]


def _short(name: str) -> str:
    """Return the name of a trainer without its version."""
    return name.partition(" ")[0]


def main(names: list[str]) -> None:
    """Compare every two trainers, and record where they differ.

    Args:
        names: of frameworks with adapters.
    """
    chosen = chosen_cases([])
    runs = [run_cases(load(name), chosen) for name in names]
    found = []
    for a, b in itertools.combinations(runs, 2):
        difference = compare_runs(a, b, chosen)
        print(difference, flush=True)
        data = difference.data()
        for one in data["compared"]:
            del one["settings"]  # the adapters have them
        del data["left_out"]
        found.append(data)
    # cases that no comparison has, then those that one trainer lacks
    lacking = []
    for case in chosen:
        if why := why_left_out(case):
            lacking.append((case.id, why))
    for run in runs:
        for case_id, why in run.left_out.items():
            lacking.append((case_id, f"{run.name}: {why}"))
    rows = {
        "trainers": [run.name for run in runs],
        "pairs": found,
        "left_out": lacking,
    }
    record.add(FILE, f"python -m docs.diff {' '.join(names)}", rows, [0])


if __name__ == "__main__":
    torch.set_num_threads(1)  # the models are tiny: more threads wait for each other
    main(sys.argv[1:])
