# SPDX-License-Identifier: Apache-2.0
"""Every check that the columns of a run's recorded batches allow, one step in memory at
a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from upref.definition import Objective
from upref.errors import InputError
from upref.replay.advantages import advantages
from upref.replay.compare import HeavyToken, ObjectiveWeights, heaviest_tokens, weights
from upref.replay.gap import gap
from upref.replay.lines import summary_line
from upref.replay.loss import loss, settle
from upref.replay.report import Replay, StepChecks
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.series import StepGap, measure_step, ratio_one, series
from upref.replay.terms import objective_as_run

CHECKS = ("sampler", "advantages", "loss", "objectives")
OTHERS = ("dapo", "up_dapo", "grpo", "gspo", "cispo")
CORRECTIONS = ("tis", "icepop", "mis")


def replay(
    batches: Iterable[RecordedBatch],
    objective: str | Objective = "",
    *,
    hp: Mapping[str, Any] | None = None,
    logged: float | None = None,
    digits: float = 0.0,
    only: Iterable[str] = CHECKS,
    others: Iterable[str] = (),
    tokenizer: Any = None,
) -> Replay:
    """Check the recorded batches of a run, one step in memory at a time.

    Args:
        batches: steps in order, for example from `upref.replay.read_steps`.
        objective: what ran, as `upref.replay.loss` takes it.
        hp: its hyperparameters.
        logged: the loss that the run logged; for a single step.
        digits: half a unit of its last printed digit.
        only: which of CHECKS to run.
        others: objectives to compare with, in place of the usual ones.
        tokenizer: of transformers, for the texts of the heaviest tokens.

    Returns:
        The Replay.

    Raises:
        InputError: a file cannot be read, or the objective or a hyperparameter does not
            exist.
    """
    chosen = tuple(only)
    if unknown := [check for check in chosen if check not in CHECKS]:
        raise InputError(
            f"there is no check {unknown[0]!r}: choose from {', '.join(CHECKS)}."
        )
    settings = dict(hp or {})
    o = objective_as_run(objective, settings) if objective else None
    if o is not None:
        o.resolve(settings)
    compared = list(others)
    steps: list[StepChecks] = []
    gaps: list[StepGap] = []
    last: RecordedBatch | None = None
    for position, batch in enumerate(batches):
        checks = _check(batch, position, o, settings, logged, digits, chosen)
        steps.append(checks)
        if checks.sampler is not None:
            gaps.append(measure_step(batch, position))
        last = batch
    if last is None:
        raise InputError("there is no recorded batch: give at least one file.")
    if logged is not None and len(steps) > 1:
        raise InputError(
            "one number is the loss of one step: give the files of that step alone."
        )
    steps = _settled(steps)
    table, heaviest = _table(last, o, settings, chosen, compared, tokenizer)
    whole = series(gaps) if len(gaps) > 1 else None
    return Replay(o.name if o else "", tuple(steps), whole, table, heaviest)


def _settled(steps: list[StepChecks]) -> list[StepChecks]:
    """The steps, where nothing is called another sum that only some of them are."""
    at = [n for n, s in enumerate(steps) if s.loss is not None]
    settled = settle([found for s in steps if (found := s.loss) is not None])
    out = list(steps)
    for n, found in zip(at, settled, strict=True):
        out[n] = replace(steps[n], loss=found)
    return out


def _check(
    batch: RecordedBatch,
    position: int,
    o: Objective | None,
    hp: dict[str, Any],
    logged: float | None,
    digits: float,
    chosen: tuple[str, ...],
) -> StepChecks:
    expect_batch(batch, "replay")
    done: dict[str, Any] = dict.fromkeys(CHECKS)
    not_run: dict[str, str] = {}
    wanted = [c for c in chosen if c in ("sampler", "advantages")]
    if "loss" in chosen and (
        logged is not None or (o is not None and "loss" in batch.logged)
    ):
        if o is None:
            raise InputError(
                "the check of the loss needs the objective that ran: --as NAME."
            )
        wanted.append("loss")
    work = {
        "sampler": lambda: gap(batch),
        "advantages": lambda: advantages(batch),
        "loss": lambda: loss(batch, o or "", logged, digits=digits, **hp),
    }
    for check in wanted:
        try:
            done[check] = work[check]()
        except InputError as e:
            not_run[check] = str(e)
    if "objectives" in chosen:
        try:
            batch.rollouts()
        except InputError as e:
            not_run["objectives"] = str(e)
    step = batch.step if batch.step is not None else position
    return StepChecks(
        step,
        summary_line(batch),
        done["sampler"],
        done["advantages"],
        done["loss"],
        ratio_one(batch),
        not_run,
    )


def _table(
    batch: RecordedBatch,
    o: Objective | None,
    hp: dict[str, Any],
    chosen: tuple[str, ...],
    others: list[str],
    tokenizer: Any,
) -> tuple[ObjectiveWeights | None, tuple[HeavyToken, ...]]:
    """The objectives on the last step, and its heaviest tokens; nothing where a column
    is missing.
    """
    if "objectives" not in chosen:
        return None, ()
    names = list(others)
    if not names:
        base = o if o is not None and o.sampler is None else None
        names = list(OTHERS)
        if base is not None and base.name != "dapo" and not base.name.startswith("up"):
            names.append(f"up({base.name})")
        if batch.sampler is not None and not batch.sampler.isnan().any():
            names += [f"{c}({base.name if base else 'dapo'})" for c in CORRECTIONS]
    try:
        table = weights(batch, names, ran=o or "", **hp)
    except InputError:
        return None, ()  # `not_run` says why
    return table, tuple(
        heaviest_tokens(batch, table.rows[0], tokenizer=tokenizer)
    ) if table.rows else ()
