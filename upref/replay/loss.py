# SPDX-License-Identifier: Apache-2.0
"""Whether the logged loss is the objective's, which other sum of its terms it is, or what it was divided by.

The terms of the tokens are computed once. Every aggregation is one weight per response, so each candidate is a sum of
them. Frameworks take the mean over the tokens of a step where a paper's formula takes it within each prompt: that is
the default of the comparison.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import AGGREGATIONS, Totals, aggregate
from upref.definition import Objective
from upref.errors import InputError
from upref.registry import get
from upref.replay.findings import Checked, Finding
from upref.replay.schema import RecordedBatch, expect_batch
from upref.rollouts import Rollouts

# A float32 mean over n terms is off by a few units of 6e-8 times the mean |term|; one in bfloat16 would be off by 4e-3
# and name nothing. Seven digits are what frameworks log.
ROUNDING = 5e-6
SHARP = 1e-4  # of the sum of |terms|: with fewer digits another sum may agree by chance
FACTORS = (2.0, 4.0, 8.0, 1 / 2, 1 / 4, 1 / 8)  # accumulation steps, ranks, micro-batches


@dataclass(frozen=True, kw_only=True)
class Loss(Checked):
    """The logged loss beside the objective's.

    Args:
        objective: its name.
        logged: the number that the run logged.
        value: the objective's loss, aggregated as `expected` says.
        expected: name of that aggregation.
        found: the sum of the terms that the logged number is; "" if none.
        divisor: the number by which the sum of the terms would be divided; None where the logged number is 0.
    """

    objective: str
    logged: float
    value: float
    expected: str
    found: str
    divisor: float | None


def framework_aggregation(objective: Objective) -> Objective:
    """The objective with the aggregation that frameworks give it: the token mean in place of group-token-mean."""
    return objective.aggregated("token-mean") if objective.agg == "group-token-mean" else objective


def loss(
    batch: RecordedBatch, objective: Objective | str, logged: float | None = None, *, digits: float = 0.0, **hp: Any
) -> Loss:
    """Compare the logged loss with the objective's on the recorded tokens.

    Args:
        batch: with the columns adv and old; with now, off the first optimizer step too.
        objective: the Objective that ran, or its name.
        logged: the number; None: `logged["loss"]` of the file.
        digits: half a unit of the number's last printed digit.
        **hp: hyperparameters of the objective.

    Returns:
        The answer. It is false where the number is another sum of the same terms, or a simple multiple of theirs.

    Raises:
        InputError: a column or the number is missing.
    """
    expect_batch(batch, "the check of the loss")
    o = framework_aggregation(get(objective) if isinstance(objective, str) else objective)
    if logged is None:
        logged = batch.logged.get("loss")
    if logged is None:
        raise InputError("the check of the loss needs the number that the run logged: --loss, or `logged` of the file.")
    b = batch.rollouts(sampler=o.sampler is not None)
    values = _candidates(batch, o, b, hp)
    name, value = next(values)
    terms = _terms(o, b, hp)
    size = float(aggregate(terms.abs(), b.mask, o.agg, b.group))
    tolerance = digits + ROUNDING * max(size, abs(value))
    findings = [] if batch.now is not None else [_note("needs_now")]
    numbers = {"logged": logged, "expected": name, "objective": o.name, "value": value}
    found, total = "", float(-aggregate(terms, b.mask, "seq-mean-token-sum" if terms.ndim == 2 else o.agg, b.group))
    total *= len(b.mask)  # the two means are over responses
    divisor = total / logged if logged else None
    if abs(value - logged) <= tolerance:
        found = name
        if abs(value) <= 10 * tolerance:
            findings.append(_note("uninformative", value=value))
    else:
        sharp = tolerance < SHARP * size
        equal = (n for n, v in values if abs(v - logged) <= tolerance and abs(v - value) > 10 * tolerance)
        found = next(equal, "") if sharp else ""
        factor = logged / value if min(abs(value), abs(logged)) > 100 * tolerance else 0.0
        multiple = sharp and any(abs(factor / f - 1) <= 2 * tolerance / abs(value) for f in FACTORS)
        if found:
            findings.append(Finding("loss", "failure", "other_sum", numbers | {"found": found}))
        elif multiple:
            findings.append(Finding("loss", "failure", "multiple", numbers | {"factor": factor}))
        elif divisor is not None and divisor > 0:
            more = {"divisor": divisor, "tokens": int(b.mask.sum()), "responses": len(b.mask)}
            findings.append(_note("divided", **numbers | more))
        else:
            findings.append(_note("unexplained", **numbers))
    return Loss(objective=o.name, logged=logged, value=value, expected=name, found=found, divisor=divisor,
                findings=tuple(findings))  # fmt: skip


def _note(cause: str, **numbers: Any) -> Finding:
    return Finding("loss", "note", cause, numbers)


def _terms(o: Objective, b: Rollouts, hp: dict[str, Any]) -> Tensor:
    """J of every token [B, T], or of every response [B], before aggregation."""
    own = {k: v for k, v in o.resolve(hp).items() if k != "beta"}
    terms = o.unreduced(b.logp, b.logp_old, b.adv, b.mask, b.entropy, b.logp_sampler, b.group, **own)
    return torch.where(b.mask if terms.ndim == 2 else b.mask.any(1), terms, 0.0)


def _candidates(batch: RecordedBatch, o: Objective, b: Rollouts, hp: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(what it is, the loss): first the expected one, then every other sum of the same terms."""
    yield o.agg, float(o.loss(b, **hp))
    beta = o.resolve(hp).get("beta")
    for agg in AGGREGATIONS:
        if agg in (o.agg, "seq-mean-token-sum-norm") or (agg == "seq-mean") != (o.agg == "seq-mean"):
            continue
        yield agg, float(o.aggregated(agg).loss(b, **hp))
    trains = batch.mask.any(1)
    for column, words in ((batch.micro, "micro-batches"), (batch.rank, "ranks")):
        if column is None or len(column[trains].unique()) < 2:
            continue
        parts = [b.rows(i, Totals.of(b.mask[i])) for i in _members(column[trains])]
        values = [float(o.loss(part, **hp)) for part in parts]
        yield f"mean over {words} of their own {o.agg}", sum(values) / len(values)
        yield f"sum over {words} of their own {o.agg}", sum(values)
    if beta:
        yield f"{o.agg} without the KL term", float(o.loss(b, **hp | {"beta": 0.0}))
    if o.kl and not beta and b.logp_ref is not None:
        return
    if b.logp_sampler is None and batch.sampler is not None and batch.old is not None and o.level == "token":
        yield from _with_sampler_as_old(batch, o, hp)


def _with_sampler_as_old(batch: RecordedBatch, o: Objective, hp: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The same objective with the sampler's log-probabilities in the place of π_old."""
    try:
        b = batch.rollouts(sampler=True)
        assert b.logp_sampler is not None
        swapped = b.but(logp_old=b.logp_sampler, logp_sampler=None)
        yield f"{o.agg} with the sampler's column as π_old", float(o.loss(swapped, **hp))
    except InputError:
        return  # the sampler's column holds no log-probabilities


def _members(column: Tensor) -> list[Tensor]:
    return [(column == value).nonzero()[:, 0] for value in column.unique()]
