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
        return [
            [i % len(rows) for i in range(n * size, (n + 1) * size)]
            for n in range(len(steps))
        ]
    number_of = {id(row): i for i, row in enumerate(rows)}
    numbers = [[number_of[id(row)] for row in step_rows] for step_rows in rows_of_steps]
    times = [sum(step.count(i) for step in numbers) for i in range(len(rows))]
    fewer, more = ("no optimizer step", "more than one optimizer step")
    if passes > 1:
        fewer = f"fewer than {passes} optimizer steps"
        more = f"more than {passes} optimizer steps"
    for words, wrong in (
        (fewer, [i for i, count in enumerate(times) if count < passes]),
        (more, [i for i, count in enumerate(times) if count > passes]),
    ):
        if wrong:
            responses = ", ".join(map(str, wrong))
            raise UntrainedRowsError(
                f"{words} of the generation batch trains on responses {responses}"
            )
    if any(len(step) != size for step in numbers):
        raise UntrainedRowsError(
            f"the optimizer steps have {[len(step) for step in numbers]} responses, not {size} each"
        )
    return numbers
