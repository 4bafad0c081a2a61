# SPDX-License-Identifier: Apache-2.0
"""Which rows each optimizer step of a generation batch trained on."""

from upref.step.compare.record import Step
from upref.step.inputs.rows import Row


class UntrainedRowsError(Exception):
    """Some rows train in no optimizer step, or in two."""


def rows_of_updates(steps: list[Step], rows: list[Row]) -> list[list[Row]]:
    """Return the rows that each optimizer step trained on: a trainer may shuffle them.

    Args:
        steps: the recorded steps.
        rows: of the generation batch.

    Raises:
        UntrainedRowsError: as `numbers_of_updates`.
    """
    return [[rows[i] for i in numbers] for numbers in numbers_of_updates(steps, rows)]


def numbers_of_updates(
    steps: list[Step], rows: list[Row], passes: int = 1
) -> list[list[int]]:
    """Return the numbers of the rows that each optimizer step trained on, by the token
    ids of its forward passes. Where none were recorded, each step has as many rows, in
    their order.

    Args:
        steps: the recorded steps.
        rows: of the generation batch.
        passes: how often each row should train.

    Raises:
        UntrainedRowsError: a row trains more or less often, or the steps differ in
            their numbers of rows.
    """
    size = len(rows) * passes // len(steps)
    rows_of_steps = [step.rows(rows) for step in steps]
    if not any(rows_of_steps):
        # the model was not fed token ids: the first step has the first rows
        return _numbers_in_order(len(steps), size, len(rows))
    number_of = {id(row): i for i, row in enumerate(rows)}
    numbers = [[number_of[id(row)] for row in step_rows] for step_rows in rows_of_steps]
    _refuse_wrong_counts(numbers, len(rows), passes)
    if any(len(step) != size for step in numbers):
        raise UntrainedRowsError(
            f"the optimizer steps have {[len(step) for step in numbers]} responses, not {size} each"
        )
    return numbers


def _numbers_in_order(steps: int, size: int, rows: int) -> list[list[int]]:
    """Return the numbers of rows of steps that train on the rows in their order, `size`
    rows each; behind the last row, the first one follows.
    """
    numbers = []
    for step in range(steps):
        first = step * size
        numbers.append([i % rows for i in range(first, first + size)])
    return numbers


def _refuse_wrong_counts(numbers: list[list[int]], rows: int, passes: int) -> None:
    """Raise UntrainedRowsError where a row trains less or more often than `passes`
    times.

    Args:
        numbers: of each step: the numbers of the rows that it trained on.
        rows: how many rows there are.
        passes: how often each should train.
    """
    trained = [i for step in numbers for i in step]
    counts = [trained.count(i) for i in range(rows)]
    too_rare = [i for i, count in enumerate(counts) if count < passes]
    too_often = [i for i, count in enumerate(counts) if count > passes]
    if passes > 1:
        fewer = f"fewer than {passes} optimizer steps"
        more = f"more than {passes} optimizer steps"
    else:
        fewer = "no optimizer step"
        more = "more than one optimizer step"
    for words, wrong in ((fewer, too_rare), (more, too_often)):
        if wrong:
            responses = ", ".join(map(str, wrong))
            raise UntrainedRowsError(
                f"{words} of the generation batch trains on responses {responses}"
            )
