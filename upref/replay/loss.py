# SPDX-License-Identifier: Apache-2.0
"""Whether the logged loss is the objective's, which other sum of its terms it is, or
what it was divided by.

The terms of the tokens are computed once. Every aggregation is one weight per response,
so each candidate is a sum of them. Frameworks take the mean over the tokens of a step
where a paper's formula takes it within each prompt: that is the default of the
comparison.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from upref.aggregation import AGGREGATIONS, aggregate
from upref.definition import Objective
from upref.errors import InputError
from upref.replay.findings import Checked, ReplayFinding, note
from upref.replay.normalizer import Normalizer, normalizer
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.terms import EXTRA, FACTORS, StepTerms, as_run, or_else, terms_of

# A float32 mean over n terms is off by a few units of 6e-8 times the mean |term|; one
# in bfloat16 would be off by 4e-3 and name nothing. Seven digits are what frameworks
# log.
ROUNDING = 5e-6
SHARP = 1e-4  # of the sum of |terms|: with fewer digits another sum may agree by chance


@dataclass(frozen=True, kw_only=True)
class Loss(Checked):
    """The logged loss beside the objective's.

    Args:
        objective: its name.
        logged: the number that the run logged.
        value: the objective's loss, aggregated as `expected` says.
        expected: name of that aggregation.
        found: the sum of the terms that the logged number is; "" if none.
        divisor: the number by which the sum of the terms would be divided; None where
            the logged number is 0.
        gradient: the sum of the terms whose gradient is the recorded dL/dlp; "" if
            none, or nothing was recorded.
        gradient_factor: the recorded gradient over that of the sum that it was compared
            with, where one number.
        gradient_tolerance: relative error up to which it is that gradient.
        unused: hyperparameters that may be doubled without another loss: this step does
            not exercise them.
    """

    objective: str
    logged: float
    value: float
    expected: str
    found: str
    divisor: float | None
    gradient: str = ""
    gradient_factor: float | None = None
    gradient_tolerance: float = 0.0
    unused: tuple[str, ...] = ()


def loss(
    batch: RecordedBatch,
    objective: Objective | str,
    logged: float | None = None,
    *,
    digits: float = 0.0,
    **hp: Any,
) -> Loss:
    """Compare the logged loss with the objective's on the recorded tokens, and dL/dlp
    with its gradient.

    Where the file states the counts by which its framework divides (`schema.LOGGED`),
    the loss may have them or those of the tokens that are there.

    Args:
        batch: with the columns adv and old; with now, off the first optimizer step too.
            With grad, the gradient is compared as well (`upref.replay.normalizer`).
        objective: the Objective that ran, or its name.
        logged: the number; None: `logged["loss"]` of the file.
        digits: half a unit of the number's last printed digit.
        **hp: hyperparameters of the objective.

    Returns:
        The answer. It is false where the number is another sum of the same terms, or a
        simple multiple of theirs, and where the gradient has another normalizer. With
        grad, the number alone proves nothing.

    Raises:
        InputError: a column, the number, or the file of a rank is missing.
    """
    expect_batch(batch, "the check of the loss")
    o = as_run(objective, hp)
    if logged is None:
        logged = batch.logged.get("loss")
    if logged is None:
        raise InputError(
            "the check of the loss needs the number that the run logged: --loss, or `logged` of the file."
        )
    if not math.isfinite(logged):
        raise InputError(
            f"the loss that the run logged is {logged}: replay a step that has a number."
        )
    step = terms_of(batch, o, hp)
    gradient = None if batch.grad is None else normalizer(batch, o, **hp)
    name, value = next(_accepted(step))
    size = float(step.total(step.terms.abs()))
    tolerance = digits + ROUNDING * max(size, abs(value))
    findings = [] if batch.now is not None else [note("loss", "needs_now")]
    numbers = {"logged": logged, "expected": name, "objective": o.name, "value": value}
    total = float(
        -aggregate(
            step.terms,
            step.b.mask,
            "seq-mean-token-sum" if step.terms.ndim == 2 else o.agg,
        )
    )
    total *= len(step.b.mask)  # the two means are over responses
    divisor = total / logged if logged else None
    found, equal_value = next(
        ((n, v) for n, v in _accepted(step) if abs(v - logged) <= tolerance), ("", 0.0)
    )
    if found:
        name, value = found, equal_value
        if abs(value) <= 10 * tolerance:
            findings.append(note("loss", "uninformative", value=value))
    elif batch.meta.get(EXTRA):
        findings.append(
            note(
                "loss",
                "extra_terms",
                logged=logged,
                value=value,
                extra=batch.meta[EXTRA],
            )
        )
    else:
        sharp = tolerance < SHARP * size
        others = _candidates(batch, step)
        equal = [
            n
            for n, v in others
            if abs(v - logged) <= tolerance and abs(v - value) > 10 * tolerance
        ]
        provable = sharp and _may_accuse(gradient)
        found = or_else(equal) if provable else ""
        factor = (
            logged / value if min(abs(value), abs(logged)) > 100 * tolerance else 0.0
        )
        multiple = provable and any(
            abs(factor / f - 1) <= 2 * tolerance / abs(value) for f in FACTORS
        )
        if found:
            findings.append(
                ReplayFinding(
                    "loss", "failure", "other_sum", numbers | {"found": found}
                )
            )
        elif multiple:
            findings.append(
                ReplayFinding(
                    "loss", "failure", "multiple", numbers | {"factor": factor}
                )
            )
        elif divisor is not None and divisor > 0:
            more = {
                "divisor": divisor,
                "tokens": int(step.b.mask.sum()),
                "responses": len(step.b.mask),
            }
            findings.append(note("loss", "divided", **numbers | more))
        else:
            findings.append(note("loss", "unexplained", **numbers))
    if gradient is not None:
        findings += gradient.findings
    return Loss(
        objective=o.name,
        logged=logged,
        value=value,
        expected=name,
        found=found,
        divisor=divisor,
        gradient="" if gradient is None else gradient.found,
        gradient_factor=None if gradient is None else gradient.factor,
        gradient_tolerance=0.0 if gradient is None else gradient.tolerance,
        unused=tuple(_unused(step)),
        findings=tuple(findings),
    )


def _unused(step: StepTerms) -> Iterator[str]:
    """The hyperparameters that may be doubled without another loss."""
    value = step.loss()
    for name, number in step.o.resolve(step.hp).items():
        if not number or not math.isfinite(number):
            continue  # a bound that is not there
        try:
            doubled = replace(step, hp=step.hp | {name: 2 * number}).loss()
        except InputError:
            continue  # no such hyperparameter may be twice as large
        if doubled == value:
            yield name


def _may_accuse(gradient: Normalizer | None) -> bool:
    """Whether one number may be called another sum: dL/dlp is not recorded, has nothing
    to say, or is another sum too.

    With few tokens at r = 1 a mean over some of them can equal another sum of all of
    them by chance.
    """
    if gradient is None or gradient.failures:
        return True
    return [f.cause for f in gradient.findings] == ["no_gradient"]


def _accepted(step: StepTerms) -> Iterator[tuple[str, float]]:
    """(what it is, the loss): the objective's, by the framework's counts and by those
    of the tokens that are there.
    """
    for name, counted in step.by_counts():
        yield name, counted.loss()


def _candidates(batch: RecordedBatch, step: StepTerms) -> Iterator[tuple[str, float]]:
    """(what it is, the loss) of every other sum of the same terms."""
    o, hp = step.o, step.hp
    for name, counted in step.by_other_counts():
        yield name, counted.loss()
    own = step.own()
    beta = o.resolve(hp).get("beta")
    for agg in AGGREGATIONS:
        if agg in (o.agg, "seq-mean-token-sum-norm") or (agg == "seq-mean") != (
            o.agg == "seq-mean"
        ):
            continue
        if agg == "group-token-mean" and step.b.group is None:
            continue  # it is the token mean
        yield agg, own.under(agg).loss()
    for words, _, parts in own.parts():
        values = [part.loss() for part in parts]
        yield f"mean over {words} of their own {o.agg}", sum(values) / len(values)
        yield f"sum over {words} of their own {o.agg}", sum(values)
    if beta:
        yield (
            f"{o.agg} without the KL term",
            replace(step, hp=hp | {"beta": 0.0}).loss(),
        )
    if o.kl and not beta and step.b.logp_ref is not None:
        return
    if (
        step.b.logp_sampler is None
        and batch.sampler is not None
        and batch.old is not None
        and o.level == "token"
    ):
        yield from _with_sampler_as_old(batch, step)


def _with_sampler_as_old(
    batch: RecordedBatch, step: StepTerms
) -> Iterator[tuple[str, float]]:
    """The same objective with the sampler's log-probabilities in the place of π_old."""
    try:
        b = batch.rollouts(sampler=True)
    except InputError:
        return  # the sampler's column holds no log-probabilities
    assert b.logp_sampler is not None
    swapped = step.b.but(logp_old=b.logp_sampler)
    yield (
        f"{step.o.agg} with the sampler's column as π_old",
        replace(step, b=swapped).loss(),
    )
