# SPDX-License-Identifier: Apache-2.0
"""One loss of a framework against the objective its name promises: gradients, and the
faults that account for them.

Where gradients differ, the faults declared are put into the reference, and the
difference that remains is the proof: at most TOL, or the row is unexplained. Each fault
is then shown by itself: on the token, and on the share of a typical batch's gradient,
that repairing it alone would change. No number is of a step between the paper and the
framework.
losses.py makes what is compared. A row of the table and its numbers are here, in one file,
because they are read together.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from upref.aggregation import Totals, row_weights
from upref.description import RATIO_SYMBOLS
from upref.registry import REDUCE
from upref.rollouts import Rollouts, autograd_gradient
from upref.weights.batches import (
    LOG_R,
    breakpoints,
    regime_words,
    token_at,
)
from upref_frameworks.audits.case import MICRO, TOL, ComparisonCase
from upref_frameworks.audits.faulty import Explanation, FaultyObjective

MASKED = "a masked slot"  # the regime of a token that does not count


@dataclass(frozen=True)
class Example:
    """A token on which two gradients differ most.

    Tokens within |log r| <= 5 go before the farther ones.

    Attributes:
        difference: relative to max(1, |expected|).
        where: the regime of the token, in words.
        expected: its weight dJ_t/dlp by the one gradient.
        found: its weight by the other one.
    """

    difference: float
    where: str
    expected: float
    found: float

    @property
    def weights(self) -> tuple[str, str]:
        """Return expected and found, with as many digits as tell them apart.

        Returns:
            Two numbers as text, of 4, 8 or 12 significant digits; equal only where 12
            digits are.
        """
        for digits in (4, 8, 12):
            texts = f"{self.expected:.{digits}g}", f"{self.found:.{digits}g}"
            if texts[0] != texts[1]:
                break
        return texts

    def __str__(self) -> str:
        return f"{self.where}: {' -> '.join(self.weights)}"


@dataclass(frozen=True)
class FaultEffect:
    """What a fault does to the gradient of a typical batch.

    w is the gradient with the fault repaired, and v the one with the fault in it.

    Attributes:
        change: |v - w| / |w|.
        cosine: of the angle between v and w.
        factor: |v| / |w|.
    """

    change: float
    cosine: float
    factor: float

    @property
    def severity(self) -> str:
        """Return a key of SEVERITY in upref_frameworks/ledger.py.

        Returns:
            `cosmetic` below a change of 2 %, else `breaks` up to a cosine of 0.5, else
            `rescales` where the sine of the angle is below half of the change, else
            `weakens`.
        """
        if self.change < 0.02:
            return "cosmetic"
        if self.cosine <= 0.5:
            return "breaks"
        sine = math.sqrt(max(1 - self.cosine**2, 0))
        return "rescales" if sine < self.change / 2 else "weakens"

    @classmethod
    def between(cls, found: Tensor, expected: Tensor) -> "FaultEffect":
        """Measure what turns one gradient into another: distance, angle and length.

        Args:
            found: the gradient v with the fault, of any shape.
            expected: the gradient w without it, of the same shape.

        Returns:
            Where w is 0 and v is not: change 1, cosine 0 and factor infinity. Where
            both are 0: change 0, cosine 1, factor 1.
        """
        w = expected.norm().item()
        v = found.norm().item()
        if not w:
            return cls(float(v > 0), float(v == 0), math.inf if v else 1.0)
        change = (found - expected).norm().item() / w
        return cls(
            change, (found * expected).sum().item() / (w * v) if v else 0.0, v / w
        )


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison: the difference before any reason, what repairing each would
    change, the difference after all.
    """

    setting: str
    mode: str
    label: str
    objective: str
    promise: str
    command: str
    micro_batches: int
    difference: float
    spot: Example
    reasons: list[tuple[str, Example]]
    remains: float
    tol: float = TOL  # wider for a framework that computes in float32
    kind: str = "loss"  # or that of a Component
    effects: list[FaultEffect] = field(default_factory=list)  # of each reason

    @property
    def agrees(self) -> bool:
        """Return whether the difference is within the tolerance without any reason."""
        return self.difference <= self.tol

    @property
    def ok(self) -> bool:
        """Return whether it agrees, or differs for reasons that leave no difference."""
        return self.remains <= self.tol

    @property
    def verdict(self) -> str:
        """Return the verdict in the words of the table, with the size of an agreement."""
        if self.agrees:
            if self.difference == 0:
                return "agrees exactly"
            return f"agrees to {self.difference:.0e}"
        return "differs, explained" if self.ok else "differs, UNEXPLAINED"


# ---- comparing -----------------------------------------------------------------------
def gradient_with_faults(faulty: FaultyObjective, batch: Rollouts) -> Tensor:
    """Return the gradient of an objective with faults put into it.

    A fault may replace the formula or hyperparameters, which `faulty.objective` has
    already. It may also change the batch that is read (`view`), add a term to J
    (`term`), multiply the gradient (`scale`), or aggregate in another way (`agg`).

    Args:
        faulty: the objective.
        batch: token tensors [B, T].

    Returns:
        dJ/dlp, [B, T].
    """
    factor: Tensor | float = 1.0
    for fault in faulty.faults:
        factor = factor * fault.change.scale(batch)
    # as row weights, so that an objective with one term per response can be
    # aggregated in another way
    if faulty.agg != faulty.agg_of_objective:
        seen = batch
        for fault in faulty.faults:
            seen = fault.change.view(seen)
        totals = Totals.of(batch.mask, seen.group)
        # of each response, or one number for all
        new = row_weights(faulty.agg, batch.mask, totals)
        old = row_weights(faulty.agg_of_objective, batch.mask, totals)
        ratio = torch.as_tensor(new / old, dtype=batch.logp.dtype)
        factor = factor * ratio.reshape(-1, 1)

    def J(batch: Rollouts) -> Tensor:
        """Compute the objective with the faults, and the terms that they add."""
        for fault in faulty.faults:
            batch = fault.change.view(batch)
        terms = [
            fault.change.term(batch) for fault in faulty.faults if fault.change.term
        ]
        return sum(terms, faulty.objective(batch, **faulty.hp))

    return autograd_gradient(J, batch) * factor


def difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| / max(1, |expected|), element by element.

    Args:
        found: any shape.
        expected: the same shape.

    Returns:
        The same shape, not negative.
    """
    return (found - expected).abs() / expected.abs().clamp(min=1)


def compare(
    framework: str,
    case: ComparisonCase,
    in_one: Tensor,
    split: Tensor,
    tol: float = TOL,
) -> list[ComparisonRow]:
    """Compare the gradient of a framework's loss with the promised one.

    Args:
        framework: its name, for the command that repeats the comparison.
        case: what is compared with what, on which batch.
        in_one: [B, T], the gradient of -loss with respect to `case.batch.logp`.
        split: the same, of MICRO micro-batches.
        tol: the largest difference, as of `difference`, that counts as rounding.

    Returns:
        A row for the whole batch; a second one for micro-batches, where these are
        compared and have another gradient.
    """
    weights = in_one / case.unit
    rows = [_row(framework, case, case.explanation, weights, 1, tol)]
    if case.split_explanation:
        split_weights = split / case.unit
        if difference(split_weights, weights).max() > tol:
            rows.append(
                _row(framework, case, case.split_explanation, split_weights, MICRO, tol)
            )
    return rows


def _row(
    framework: str,
    case: ComparisonCase,
    explanation: Explanation,
    found: Tensor,
    micro: int,
    tol: float,
) -> ComparisonRow:
    """Return the row of one comparison: the weights that were found beside those that
    are promised.

    It has the largest difference from the promise, what repairing each fault alone
    changes, and the difference that remains with all faults put into the promise. Where
    the difference is at most `tol` or not a number, no fault is used. Tokens so near to a
    bound that rounding decides are left out of what remains.
    """
    comparison = case.comparison
    promised = (
        gradient_with_faults(case.without_faults.promised, case.batch) / case.unit
    )
    largest = difference(found, promised).max().item()
    differs = largest > tol  # False where a number is NaN
    if not differs:
        explanation = case.without_faults
    faults = explanation.faulty.faults
    effects = _effects_of_faults(explanation, case.typical)
    explained = gradient_with_faults(explanation.faulty, case.batch) / case.unit
    skip = torch.zeros_like(case.batch.mask)
    for fault in faults:
        skip = skip | fault.change.skip(case.batch)
    remains = difference(found, explained).masked_fill(skip, 0).max().item()
    reasons = []
    for fault, repaired in zip(faults, explanation.repaired, strict=True):
        without_fault = gradient_with_faults(repaired, case.batch) / case.unit
        example = _worst_token(explanation, case.batch, explained, without_fault)
        reasons.append((fault.words, example))
    hp = "".join(f" --hp {k}={v:g}" for k, v in comparison.hp.items())
    return ComparisonRow(
        setting=comparison.setting,
        mode=comparison.mode,
        label=case.label,
        objective=comparison.objective,
        promise=case.promise,
        command=f"upref check {framework}:{case.label} --as {comparison.objective}{hp}",
        micro_batches=micro,
        difference=largest,
        spot=_worst_token(explanation, case.batch, found, promised),
        reasons=reasons,
        remains=remains,
        tol=tol,
        effects=effects,
    )


def _effects_of_faults(
    explanation: Explanation, typical: Rollouts
) -> list[FaultEffect]:
    """Return what each fault does to the gradient of a typical batch, with all other
    faults in it.
    """
    if not explanation.repaired:
        return []
    faulty = gradient_with_faults(explanation.faulty, typical)
    return [
        FaultEffect.between(faulty, gradient_with_faults(repaired, typical))
        for repaired in explanation.repaired
    ]


def _worst_token(
    explanation: Explanation,
    batch: Rollouts,
    found: Tensor,
    expected: Tensor,
) -> Example:
    """Return an example: a token whose gradient differs most.

    Of several that differ as much, it takes one whose ratio is on the fixed grid rather
    than at the edge of a bound, and of these the one nearest to π_old. Tokens with a
    log-ratio beyond 5 count only where no other token differs.
    """
    differences = difference(found, expected)
    log_r = torch.where(batch.mask, batch.logp - batch.logp_old, 0)
    if reduce := REDUCE.get(explanation.level):
        log_r = reduce(log_r, batch.mask)[:, None].expand_as(log_r)
    near_differences = differences.masked_fill(log_r.abs() > 5, 0)
    differences = near_differences if near_differences.max() > TOL else differences
    # but for rounding, the ratio is none of the fixed grid
    is_off_grid = (log_r[..., None] - torch.as_tensor(LOG_R)).abs().amin(-1) > 1e-12
    # the lowest rank is taken: 100 is above every |log r| of a token on the grid
    rank = torch.where(
        differences >= differences.max() * (1 - 1e-6),
        log_r.abs() + 100 * is_off_grid,
        math.inf,
    )
    i, t = divmod(int(rank.argmin()), rank.shape[1])
    where = _regime_of_token(explanation, batch, i, t, log_r[i, t].exp().item())
    # + 0.0 turns -0.0 into 0.0
    return Example(
        differences[i, t].item(),
        where,
        expected[i, t].item() + 0.0,
        found[i, t].item() + 0.0,
    )


def _regime_of_token(
    explanation: Explanation, batch: Rollouts, i: int, t: int, r: float
) -> str:
    """Name the regime of a token, by the bounds of the promised objective and of the
    one that its faults leave.
    """
    if not batch.mask[i, t]:
        return MASKED
    A, _, mu = token_at(batch, i, t)
    promised = explanation.promised
    faulty = explanation.faulty
    bounds: list[float] = []
    if A:
        of_promised = breakpoints(promised.objective, A, mu, **promised.hp)
        of_faulty = breakpoints(faulty.objective, A, mu, **faulty.hp)
        bounds = sorted({*of_promised, *of_faulty})
    regime = regime_words(A, r, bounds, RATIO_SYMBOLS[explanation.level])
    if promised.objective.reads_mu:
        regime += f" (mu = {mu:.2g})"
    return regime
