# SPDX-License-Identifier: Apache-2.0
"""The oracle of an entropy bonus that the user declares: loss = -J - c H, with H the mean of
the tokens' entropies as the objective is averaged.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from upref.rollouts import Rollouts
from upref.verify.factors import (
    FACTORS,
    aggregation_id,
    aggregation_words,
    common_value,
)
from upref.verify.finding import NO_CAUSE, Cause, number_pair
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail
from upref.verify.shrink import make_example, shrink, worst

LARGEST_ENTROPY = 3.0  # nats, of the batch
SAME = 1e-5  # relative: two coefficients so near are one


def _not_declared(case: LossCase) -> str:
    """Return why no bonus is compared; "" where one is."""
    if not case.entropy_coef:
        return "no entropy bonus is declared"
    if case.wrong:
        return "the weights are wrong already"
    return ""


@oracle("entropy-bonus", 82, _not_declared, implied=True)
def entropy_bonus(case: LossCase) -> Iterator[Finding]:
    """Compare the gradient by the entropy with that of the declared bonus.

    Args:
        case: the loss and its objective.

    Yields:
        A failure with its cause, in the smallest batch; nothing where the two agree.
    """
    batch = _with_entropies(case.grid(thin=5))
    errors = _errors(case, batch)
    if errors.max() <= case.tol:
        return
    small = shrink(batch, lambda smaller: bool(_errors(case, smaller).max() > case.tol))
    due, found = _bonus_slope(case, small), -_entropy_slope(case, small)
    place = worst(_errors(case, small))
    yield fail(
        "entropy-bonus",
        "the gradient by the entropy",
        *number_pair("dJ/dH", due[place].item(), found[place].item()),
        make_example(small, reads=case.loss.reads),
        _cause(case, batch),
    )


def _with_entropies(batch: Rollouts) -> Rollouts:
    """Return the batch with entropies that differ from token to token."""
    generator = torch.Generator().manual_seed(0)
    H = torch.rand(batch.mask.shape, generator=generator, dtype=batch.logp.dtype)
    return batch.but(entropy=LARGEST_ENTROPY * (0.05 + 0.95 * H))


def _entropy_slope(case: LossCase, batch: Rollouts) -> Tensor:
    """Return the gradient of the loss by the entropy of each token, [B, T]."""
    found = case.loss.ask("gradient_by_input", batch, "entropy")
    return torch.zeros_like(batch.logp) if found is None else found


def _bonus_slope(case: LossCase, batch: Rollouts, agg: str = "") -> Tensor:
    """Return the derivative of the declared bonus c H by the entropy of each token.

    Args:
        case: with the coefficient.
        batch: the batch.
        agg: a key of FACTORS; "" for the aggregation of the objective.

    Returns:
        [B, T].
    """
    return case.entropy_coef * case.factors(batch, agg) * batch.mask


def _errors(case: LossCase, batch: Rollouts) -> Tensor:
    """Return how far the slope of each token is from the one that is due, relative to
    the largest, [B, T].
    """
    due = _bonus_slope(case, batch)
    distance = (_entropy_slope(case, batch) + due).abs()
    return (distance / due.abs().max()).nan_to_num(nan=torch.inf)


def _cause(case: LossCase, batch: Rollouts) -> Cause:
    """Return the fault of the bonus, the first that fits of: missing; on masked slots;
    another aggregation; another coefficient. No cause where none fits.
    """
    found = -_entropy_slope(case, batch)
    mask = batch.mask
    if not found.any():
        return Cause(
            "the entropy has no gradient: the bonus is missing, or computed of a detached entropy",
            ("entropy-bonus-missing",),
        )
    if found[~mask].any():
        return _cause_of_masked(case, batch, found)
    bonuses = {
        name: common_value(found[mask] / _bonus_slope(case, batch, name)[mask])
        for name in dict.fromkeys((case.agg, *FACTORS))
    }
    # another aggregation with a factor fits too much
    exact = [
        name
        for name, bonus in bonuses.items()
        if bonus is not None and abs(bonus - 1) < SAME
    ]
    if exact and exact[0] != case.agg:
        due = aggregation_words(case.agg)
        return Cause(
            f"the entropy bonus is aggregated by {aggregation_words(exact[0])}, not by {due}",
            (f"entropy-bonus-{aggregation_id(exact[0])}",),
        )
    own = bonuses[case.agg]
    if own is None:
        return NO_CAUSE
    return _cause_of_coefficient(case, own * case.entropy_coef)


def _cause_of_coefficient(case: LossCase, coefficient: float) -> Cause:
    """Return the cause that the bonus has another coefficient.

    Args:
        case: with the declared one.
        coefficient: of H in J.
    """
    if abs(coefficient + case.entropy_coef) < SAME * case.entropy_coef:
        return Cause(
            f"the entropy is added to the loss, not subtracted: a penalty of {case.entropy_coef:g} times it",
            ("entropy-bonus-negated",),
        )
    return Cause(
        f"the coefficient of the entropy bonus is {coefficient:.4g}, not {case.entropy_coef:g}",
        ("other-coefficient-of-entropy-bonus",),
    )


def _cause_of_masked(case: LossCase, batch: Rollouts, found: Tensor) -> Cause:
    """Return the cause that the bonus is over masked slots too.

    Args:
        case: with the coefficient.
        batch: the batch.
        found: the slope of J by the entropy of each slot, [B, T].
    """
    words = "the entropy bonus counts masked slots"
    slots = batch.mask.numel()
    bonus = common_value(found.flatten())
    if bonus is not None and abs(bonus * slots / case.entropy_coef - 1) < SAME:
        words += ": it is the mean over all slots of the batch"
    return Cause(words, ("entropy-bonus-masked-slots",))
