# SPDX-License-Identifier: Apache-2.0
"""Every check that the columns of a run's recorded batches allow, one step in memory at
a time.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from upref import registry
from upref.definition import Objective
from upref.errors import InputError
from upref.replay.advantages import advantages
from upref.replay.another import settle_objective, sums_with_gradient
from upref.replay.checks import StepChecks
from upref.replay.compare import HeavyToken, ObjectiveWeights, heaviest_tokens, weights
from upref.replay.gap import gap
from upref.replay.lines import summary_line
from upref.replay.loss import loss, settle
from upref.replay.report import Replay
from upref.replay.schema import (
    SEVERAL_LOSSES,
    UNTOLD,
    RecordedBatch,
    expect_batch,
)
from upref.replay.series import StepGap, measure_step, ratio_one, series
from upref.replay.terms import objective_as_run
from upref.replay.zero import zero_mismatch

CHECKS = ("sampler", "advantages", "loss", "objectives")
OTHERS = ("dapo", "up_dapo", "grpo", "gspo", "cispo")  # of the table, by default
# transforms of an objective by a sampler correction, in the table by default
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
    zero: bool = False,
) -> Replay:
    """Check the recorded batches of a run. At most four steps are in memory at a time.

    Args:
        batches: steps in order, for example from `upref.replay.read_steps`.
        objective: what ran, as `upref.replay.loss` takes it.
        hp: its hyperparameters.
        logged: the loss that the run logged; for a single step. None: that of each
            file.
        digits: half a unit of its last printed digit.
        only: which of CHECKS to run.
        others: objectives to compare with, in place of the usual ones.
        tokenizer: of transformers, for the texts of the heaviest tokens.
        zero: also compare the sampler with the trainer bit by bit.

    Returns:
        The Replay. A check whose column is missing is in its `not_run`, with the
        reason; the check of the loss is left out where no objective or no loss is
        known.

    Raises:
        InputError: there is no step, a file cannot be read, or the objective, a check
            or a hyperparameter does not exist; or one loss is given for several steps,
            or without an objective.
    """
    chosen = tuple(only)
    for check in chosen:
        if check not in CHECKS:
            raise InputError(
                f"there is no check {check!r}: choose from {', '.join(CHECKS)}."
            )
    settings = dict(hp or {})
    o: Objective | None = None
    if objective:
        o = objective_as_run(objective, settings)
        o.resolve(settings)  # refuses what is no hyperparameter of it
    compared_names = list(others)
    steps: list[StepChecks] = []
    gaps: list[StepGap] = []
    exercised = Largest()
    widest = Largest()
    for position, batch in enumerate(batches):
        checks = _check_step(batch, position, o, settings, logged, digits, chosen)
        if zero:
            checks = _with_zero_mismatch(checks, batch)
        steps.append(checks)
        # -1 is below every gap and every mean of |log r|
        size = -1.0
        if checks.sampler is not None:
            gaps.append(measure_step(batch, position))
            size = gaps[-1].size
        widest.compare(batch, size)
        log_ratio = -1.0
        if "objectives" not in checks.not_run and _has_advantage(batch):
            log_ratio = _mean_log_ratio(batch)
        exercised.compare(batch, log_ratio)
    if exercised.batch is None or widest.batch is None:
        raise InputError("there is no recorded batch: give at least one file.")
    if logged is not None and len(steps) > 1:
        raise InputError(
            "one number is the loss of one step: give the files of that step alone."
        )
    steps = _settle_losses(steps)
    if o is not None:
        steps = settle_objective(steps, settings, o)
    table, heaviest = _make_table(
        exercised.batch, o, settings, chosen, compared_names, tokenizer
    )
    return Replay(
        objective=o.name if o else "",
        steps=tuple(steps),
        series=series(gaps) if len(gaps) > 1 else None,
        table=table,
        heaviest=heaviest,
        exercised=exercised.batch,
        widest=widest.batch,
    )


class Largest:
    """The step of a run of which a number is largest; of several, the last one."""

    def __init__(self) -> None:
        self.batch: RecordedBatch | None = None
        self.number = -math.inf

    def compare(self, batch: RecordedBatch, number: float) -> None:
        """Keep the step if its number is as large as that of the kept one.

        Args:
            batch: the step.
            number: its number.
        """
        if number >= self.number:
            self.batch = batch
            self.number = number


def _mean_log_ratio(batch: RecordedBatch) -> float:
    """Return how far π_θ is from π_old: the mean over trained tokens of min(|log r|,
    1); 0 where now or old is not recorded.
    """
    if batch.now is None or batch.old is None:
        return 0.0
    return float((batch.now - batch.old)[batch.mask].abs().clamp(max=1).mean())


def _has_advantage(batch: RecordedBatch) -> bool:
    """Return whether a token that trains has an advantage other than 0."""
    return batch.adv is not None and bool((batch.adv[batch.mask] != 0).any())


def _settle_losses(steps: list[StepChecks]) -> list[StepChecks]:
    """Return the steps with their checks of the loss as `settle` returns them: a
    failure that one step has alone becomes a note.
    """
    numbers = []
    losses = []
    for n, step in enumerate(steps):
        if step.loss is not None:
            numbers.append(n)
            losses.append(step.loss)
    settled_steps = list(steps)
    for n, settled in zip(numbers, settle(losses), strict=True):
        settled_steps[n] = replace(steps[n], loss=settled)
    return settled_steps


def _check_step(
    batch: RecordedBatch,
    position: int,
    o: Objective | None,
    hp: dict[str, Any],
    logged: float | None,
    digits: float,
    chosen: tuple[str, ...],
) -> StepChecks:
    """Run the chosen checks on one step. A check whose column is missing is listed in
    `not_run`.

    Args:
        batch: the step.
        position: of the step in the run, its number where the file has none.
        o: the objective that ran; None where it is not known.
        hp: its hyperparameters.
        logged: the loss that the run logged; None: that of the file.
        digits: half a unit of its last printed digit.
        chosen: of CHECKS.

    Raises:
        InputError: a loss is given, and no objective.
    """
    expect_batch(batch, "replay")
    results: dict[str, Any] = dict.fromkeys(CHECKS)
    not_run: dict[str, str] = {}
    to_run = [c for c in chosen if c in ("sampler", "advantages")]
    if "loss" in chosen and _can_check_loss(batch, o, logged):
        to_run.append("loss")
    check_functions = {
        "sampler": lambda: gap(batch),
        "advantages": lambda: advantages(batch),
        "loss": lambda: loss(batch, o or "", logged, digits=digits, **hp),
    }
    for check in to_run:
        try:
            results[check] = check_functions[check]()
        except InputError as e:
            not_run[check] = str(e)
    if "objectives" in chosen:
        try:
            batch.rollouts()
        except InputError as e:
            not_run["objectives"] = str(e)
    step = batch.step if batch.step is not None else position
    checks = StepChecks(
        step,
        summary_line(batch),
        results["sampler"],
        results["advantages"],
        results["loss"],
        ratio_one(batch),
        not_run,
        untold=batch.meta.get(UNTOLD, ""),
    )
    if o is not None and checks.has_other_gradient:
        same = sums_with_gradient(batch, o, registry.names(), hp)
        return replace(checks, same_gradient=same)
    return checks


def _can_check_loss(
    batch: RecordedBatch, o: Objective | None, logged: float | None
) -> bool:
    """Return whether a loss and the objective that ran are known; True as well where the
    files of the step log several losses, so that the check of the loss says so.

    Raises:
        InputError: a loss is given, and no objective.
    """
    if logged is not None and o is None:
        raise InputError(
            "the check of the loss needs the objective that ran: --as NAME."
        )
    if logged is not None:
        return True
    return o is not None and ("loss" in batch.logged or SEVERAL_LOSSES in batch.meta)


def _with_zero_mismatch(checks: StepChecks, batch: RecordedBatch) -> StepChecks:
    """Add the check of zero mismatch to those of a step; where it cannot run, `not_run`
    says why.
    """
    try:
        return replace(checks, zero=zero_mismatch(batch))
    except InputError as e:
        return replace(checks, not_run=checks.not_run | {"zero": str(e)})


def _make_table(
    batch: RecordedBatch,
    o: Objective | None,
    hp: dict[str, Any],
    chosen: tuple[str, ...],
    others: list[str],
    tokenizer: Any,
) -> tuple[ObjectiveWeights | None, tuple[HeavyToken, ...]]:
    """Return the table of objectives on a step, and its heaviest tokens; (None, ()) where
    it was not chosen, a column is missing, or no token has an advantage.

    Args:
        batch: the step.
        o: the objective that ran, the first row; None where it is not known.
        hp: its hyperparameters.
        chosen: of CHECKS.
        others: names of the other rows; []: OTHERS, and UP and the sampler corrections
            of the objective that ran, where they apply.
        tokenizer: of transformers, or None.
    """
    if "objectives" not in chosen or not _has_advantage(batch):
        return None, ()
    names: list[str | Objective] = list(others) or _usual_others(batch, o)
    try:
        table = weights(batch, names, ran=o or "", **hp)
    except InputError:
        return None, ()  # `not_run` says why
    if not table.rows:
        return table, ()
    heaviest = heaviest_tokens(batch, table.rows[0], tokenizer=tokenizer)
    return table, tuple(heaviest)


def _usual_others(batch: RecordedBatch, o: Objective | None) -> list[str | Objective]:
    """Return OTHERS, UP of the objective that ran where it is another one than DAPO, and
    its sampler corrections where the sampler is recorded. These are DAPO's where the
    objective is not known or corrects for its sampler itself.
    """
    base = o
    if o is not None and o.sampler is not None:
        base = None
    names: list[str | Objective] = list(OTHERS)
    if base is not None and base.name != "dapo" and not base.is_up:
        names.append(_derived("up", base))
    if batch.sampler is not None and not batch.sampler.isnan().any():
        names += [_derived(correction, base) for correction in CORRECTIONS]
    return names


def _derived(transform: str, base: Objective | None) -> str | Objective:
    """Return what a transform makes of the objective that ran, with the aggregation of
    the run; of DAPO, by its name, where `base` is None.
    """
    if base is None:
        return f"{transform}(dapo)"
    derived = registry.get(f"{transform}({base.name})")
    return derived if derived.agg == base.agg else derived.aggregated(base.agg)
