# SPDX-License-Identifier: Apache-2.0
"""Cases of an engine that hides its gradients: they are read from what the weights
moved.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from upref.conformance.cases import Case
from upref.conformance.updates import rows_of_updates
from upref.step.check import StepReport, check_recorded, check_step, with_cause
from upref.step.compare.case import FLOAT32_BOUND
from upref.step.compare.moved import WeightReader
from upref.step.compare.record import Recorded, Step
from upref.step.inputs.reference import Gradient, TorchModel
from upref.step.inputs.rows import CASE_AXES, Row

Move = Callable[[Any, list[Row]], Any]

SAME = 1e-3  # of the norm: two gradients so near to each other are one
LEARNING_RATE = 1.0  # of an engine whose optimizer is not torch's
NO_MOVE = (
    "the adapter has no method move, which lets the weights show the gradient of an "
    "engine"
)
WRITE_MOVE = (
    "the step moved the weights and left no gradient: its engine keeps the gradients in buffers of its own. The cases "
    "`engine/*` of level 7 read them from what the weights moved: give the adapter a method move(model, rows, case) "
    "that trains as step does. For the other cases, let step return {name: gradient}"
)


def compare_moved(
    move: Move,
    model: Any,
    rows: list[Row],
    case: Case,
    learning_rate: float,
    check_arguments: dict[str, Any],
) -> StepReport:
    """Run one optimizer step through an engine, on all ranks, and compare what the
    weights moved.

    Args:
        move: the adapter's.
        model: what it trains.
        rows: of all ranks.
        case: of level 7.
        learning_rate: of an optimizer that is not torch's.
        check_arguments: what else `check_step` takes.

    Returns:
        The report of the first rank.
    """
    return check_step(
        move,
        model,
        case.objective,
        rows=rows,
        without=CASE_AXES,
        perturb_weights=False,
        moved=learning_rate,
        **check_arguments,
    )


def compare_moves(
    move: Move,
    model: Any,
    rows: list[Row],
    case: Case,
    learning_rate: float,
    check_arguments: dict[str, Any],
) -> StepReport:
    """Run several optimizer steps through an engine, and compare what the weights moved
    in each. Each step has an equal share of the rows.

    Args:
        move: the adapter's.
        model: what it trains.
        rows: of all steps.
        case: of level 7, in one process.
        learning_rate: of an optimizer that is not torch's.
        check_arguments: what else `check_recorded` takes.

    Returns:
        The report on all steps.

    Raises:
        StaleWeightsError: a step's forward passes had the weights from before the step
            that it follows.
        UntrainedRowsError: a row trains in no step, or in two.
    """
    reference = TorchModel(model)
    reader = WeightReader(model, learning_rate, steps=case.updates)
    with reader.following(), reader.replacing():
        out = move(model, rows)
        read = reader.read_steps(out)
    steps = [step for step, _ in read]
    rows_of_steps = rows_of_updates(steps, rows)
    bound = FLOAT32_BOUND + max(moved.allowed for _, moved in read)

    def compare(
        steps: Sequence[Step], rows_of_steps: Sequence[list[Row]], explain: bool
    ) -> StepReport:
        """Compare steps with the objective's on their rows."""
        return check_recorded(
            Recorded(reference, list(steps)),
            rows_of_steps,
            case.objective,
            without=CASE_AXES,
            bound=bound,
            **check_arguments | {"explain": explain},
        )

    report = compare(steps, rows_of_steps, explain=False)
    if not report and check_arguments["explain"]:
        fault = ""
        if compare(steps[:1], rows_of_steps[:1], explain=False):  # the first agrees
            fault = _fault_between(steps, rows_of_steps, compare)
        if fault:
            report = with_cause(report, fault)
        else:
            report = compare(steps, rows_of_steps, explain=True)
    largest = max((moved for _, moved in read), key=lambda moved: moved.allowed)
    return replace(report, moved=str(largest))


def _fault_between(
    steps: Sequence[Step],
    rows_of_steps: Sequence[list[Row]],
    compare: Callable[[Sequence[Step], Sequence[list[Row]], bool], StepReport],
) -> str:
    """Return what the second of two optimizer steps keeps of the first, in words: its
    gradient, alone or in a sum, or its weights; "" where none of these explains the
    gradient.

    Args:
        steps: two, of which the first is right.
        rows_of_steps: of each.
        compare: of steps and their rows.
    """
    first, second = steps
    if _distance(first, second) < SAME:
        return "the second optimizer step gets the gradient of the first"
    rest: Gradient = {
        name: gradient - first.gradients.get(name, torch.zeros_like(gradient))
        for name, gradient in second.gradients.items()
    }
    for words, step in (
        (
            "the gradient of the first optimizer step is not cleared: the second gets the sum of both",
            Step(second.weights, rest),
        ),
        (
            "the second optimizer step has the gradient at the weights from before the first",
            Step(first.weights, second.gradients),
        ),
    ):
        if compare([step], rows_of_steps[1:], False):
            return words
    return ""


def _distance(first: Step, second: Step) -> float:
    """Return |g_2 - g_1| / |g_1|, with the gradients g of two steps; 1 where they are
    of other parameters.
    """
    if first.gradients.keys() != second.gradients.keys():
        return 1.0
    a, b = (
        torch.cat([step.gradients[name].flatten() for name in first.gradients])
        for step in (first, second)
    )
    return float((b - a).norm() / a.norm())
