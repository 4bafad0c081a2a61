# SPDX-License-Identifier: Apache-2.0
"""Whether a step with another number of an objective is noticed:
`python -m docs.bounds` computes and prints the table.

Each number of each objective is halved and doubled in the reference, on the rows that
check_step makes; a number that is 0 becomes 0.1 and 0.2, a seed becomes 1 and 2. The
results are in steps/bounds.json. What is not noticed stands with its reason in
steps/unreached.toml.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from docs import record
from upref import markdown
from upref.errors import InputError
from upref.registry import get, names
from upref.step.compare.case import FLOAT32_BOUND, build_case, make_goal, perturb
from upref.step.compare.forward import gradients_by_row
from upref.step.compare.goal import Goal
from upref.step.compare.reach import Reference
from upref.step.inputs.families import tiny
from upref.step.inputs.reference import TorchModel

UNREACHED = Path(__file__).parent / "steps/unreached.toml"
RECORD = UNREACHED.with_name("bounds.json")
TEMPERATURE = 0.7
DUAL_CLIP = 3.0  # where an objective takes one and has none by default


@dataclass(frozen=True)
class Number:
    """One number of an objective, and which other values change the gradient on the
    rows.

    Attributes:
        objective: its name.
        name: of the number.
        value: at the defaults.
        noticed: other value -> whether check_step notices it.
    """

    objective: str
    name: str
    value: float
    noticed: dict[float, bool]

    @property
    def reached(self) -> bool:
        """Whether every other value is noticed."""
        return all(self.noticed.values())


def exceptions() -> dict[tuple[str, str], str]:
    """Return (objective, number) -> the reason why the rows do not reach it."""
    listed = tomllib.loads(UNREACHED.read_text(encoding="utf-8"))["number"]
    return {(one["objective"], one["name"]): one["reason"] for one in listed}


def judged() -> list[str]:
    """Return the objectives that check_step takes: none that reads group ids."""
    return [name for name in names() if "group" not in get(name).reads]


def other_values(name: str, value: float) -> tuple[float, float]:
    """Return the two other values of a number: half and twice of it, 0.1 and 0.2 for 0,
    1 and 2 for a seed.
    """
    if name == "seed":
        return 1, 2
    return (0.1, 0.2) if value == 0 else (value / 2, value * 2)


def default_goal(name: str) -> Goal:
    """Return the objective at its defaults, with a dual clip where it takes one."""
    o = get(name)
    hp = {"c": DUAL_CLIP} if "c" in o.hyperparameters else {}
    return make_goal(o, hp, TEMPERATURE)


def changed(goal: Goal, name: str, value: float) -> Goal:
    """Return the goal with another value of one number.

    Raises:
        InputError: the number cannot have this value.
    """
    if name == "beta":
        return replace(goal, beta=value)
    resolved: dict[str, Any] = goal.objective.resolve(goal.hp | {name: value})
    return replace(goal, hp={k: v for k, v in resolved.items() if k != "beta"})


def numbers(model: TorchModel, name: str, seed: int = 0) -> Iterator[Number]:
    """Yield each number of one objective, compared on the rows of that seed. A value
    that the number cannot have is left out.

    Args:
        model: makes the rows.
        name: of the objective.
        seed: of the rows.
    """
    goal = default_goal(name)
    case = build_case(model, goal, None, (), seed)
    reference = Reference.of(
        goal,
        case.forward,
        case.padded,
        FLOAT32_BOUND,
        gradients_by_row(goal, case.forward, case.padded),
    )
    values = dict(goal.hp)
    if "beta" in goal.objective.hyperparameters:
        values["beta"] = 0.0
    for number, value in values.items():
        noticed = {}
        for other in other_values(number, value):
            try:
                noticed[other] = not reference.agrees(changed(goal, number, other))
            except InputError:  # it cannot have this value
                continue
        yield Number(name, number, value, noticed)


def reference_model() -> TorchModel:
    """Return the two-layer model of the trainers' tables."""
    return TorchModel(perturb(tiny("qwen3")))


def compute() -> list[Number]:
    """Return all numbers of all objectives, computed on one thread."""
    torch.set_num_threads(1)
    model = reference_model()
    return [number for name in judged() for number in numbers(model, name)]


def recorded() -> list[Number]:
    """Return what `python -m docs.bounds` computed last."""
    numbers = []
    for row in record.rows(RECORD):
        # the keys of JSON are text
        noticed = {float(value): x for value, x in row["noticed"].items()}
        numbers.append(Number(**row | {"noticed": noticed}))
    return numbers


def table() -> str:
    """Return the recorded table, in Markdown, below how many numbers are noticed.

    Raises:
        KeyError: a value is not noticed, and steps/unreached.toml has no reason.
    """
    every, reasons = recorded(), exceptions()
    rows = []
    for number in every:
        others = ", ".join(f"{value:g}" for value in number.noticed)
        missed = [f"{value:g}" for value, x in number.noticed.items() if not x]
        result = "noticed"
        if missed:
            reason = reasons[number.objective, number.name]
            result = f"{', '.join(missed)} not noticed: {reason}"
        cells = (
            f"`{number.objective}`",
            number.name,
            f"{number.value:g}",
            others,
            result,
        )
        rows.append(cells)
    count = sum(number.reached for number in every)
    head = f"{len(every)} numbers of {len(judged())} objectives: {count} are noticed at both other values."
    columns = ["objective", "number", "value", "others", ""]
    return head + "\n\n" + markdown.table(columns, rows)


if __name__ == "__main__":
    record.add(RECORD, "python -m docs.bounds", [asdict(one) for one in compute()])
    print(table())
