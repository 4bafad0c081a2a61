# SPDX-License-Identifier: Apache-2.0
"""What was wrong with each recipe of commit d5f84678, and which are new:
`python -m docs.recipe_changes`.

docs/recipes_before.json holds what `upref recipe` printed at that commit: the settings,
what it said still differs, and its line on group normalization, which it printed
whatever the advantages of the objective are.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from upref.errors import InputError
from upref.registry import get
from upref_frameworks.audits import frameworks
from upref_frameworks.audits.recipe import covered_objectives, recipe, typed_fields
from upref_frameworks.ledger import read_tables

BEFORE = Path(__file__).parent / "recipes_before.json"
ADVANTAGES = (
    "the standard deviation of the group, where the objective has another estimator"
)
SPLIT = "a recorded fault of micro-batches left out"
OF_ADVANTAGES = "a recorded difference of the advantages left out"
MISSING = "a setting left out"
REFUSED = "it cannot run, and is refused now"
SILENT = "nothing differs, it said, where something does"
KINDS = (ADVANTAGES, SPLIT, OF_ADVANTAGES, MISSING, SILENT, REFUSED)


def before() -> dict[str, dict[str, Any]]:
    """Return the recipes of that commit, by `OBJECTIVE in FRAMEWORK`."""
    return json.loads(BEFORE.read_text(encoding="utf-8"))


def faults(name: str, old: dict[str, Any]) -> dict[str, list[str]]:
    """Return what was wrong with a recipe, by kind.

    Args:
        name: `OBJECTIVE in FRAMEWORK`.
        old: what it was.

    Returns:
        A kind of fault and what is meant by it; empty where nothing was found.
    """
    objective, framework = name.split(" in ")
    try:
        now = recipe(objective, framework)
    except InputError as error:
        return {REFUSED: [str(error)]}
    kinds: dict[str, list[str]] = {}
    if _group_norm_for_another(get(objective).adv, framework, old["advantages"]):
        kinds[ADVANTAGES] = [f"`{old['advantages']}`, for {get(objective).adv}"]
    measured = [line for line in now.differs if "not measured" not in line]
    for kind, begin in (
        (SPLIT, "in micro-batches: "),
        (OF_ADVANTAGES, "in the advantages: "),
    ):
        lines = [line for line in measured if line.startswith(begin)]
        if lines:
            kinds[kind] = [line.removeprefix(begin) for line in lines]
    keys = sorted({key for line in now.settings for key, _ in typed_fields(line)})
    then = "\n".join(old["settings"])
    missing = [key for key in keys if key not in then]
    if missing and "upref" not in then:
        kinds[MISSING] = missing
    of_the_loss = [line for line in measured if not line.startswith("in ")]
    if not old["differs"] and of_the_loss:
        kinds[SILENT] = of_the_loss
    return kinds


def _group_norm_for_another(kind: str, framework: str, old: str) -> bool:
    """Whether that line sets group_norm, and the objective's kind of advantage is
    another.
    """
    if kind == "group_norm":
        return False
    tables = read_tables(framework)["recipe"]["advantages"]
    printed = set(typed_fields(old))
    of_group_norm = set(typed_fields(tables.get("group_norm", {}).get("set", "")))
    own = set(typed_fields(tables.get(kind, {}).get("set", "")))
    return bool(printed) and printed <= of_group_norm and printed != own


def table() -> str:
    """Return a count by kind, a row for each recipe with a fault, and the names of
    those that are new.
    """
    old = before()
    rows = ["| recipe | what was wrong |", "|---|---|"]
    count: Counter[str] = Counter()
    for name in sorted(old):
        kinds = faults(name, old[name])
        count.update(kinds.keys())
        if kinds:
            cell = "<br>".join(
                f"*{kind}*: {'; '.join(lines)}" for kind, lines in kinds.items()
            )
            rows.append(f"| {name} | {cell} |".replace("\n", " "))
    every = [f"{o} in {n}" for n in frameworks() for o in covered_objectives(n, {})]
    new = sorted(set(every) - set(old))
    counted = ", ".join(f"{kind}: {count[kind]}" for kind in KINDS)
    head = f"{len(old)} recipes then, {len(every)} of losses that the audit compares now. {counted}."
    return "\n".join([head, "", *rows, "", f"New, {len(new)}: {', '.join(new)}."])


if __name__ == "__main__":
    print(table())
