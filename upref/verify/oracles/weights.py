# SPDX-License-Identifier: Apache-2.0
"""A loss against its objective: weights by regime, weights on random batches,
aggregation, anchor, value.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.registry import REDUCE
from upref.rollouts import Rollouts
from upref.verify.explain import (
    by_fixed_length,
    cause_if_confirmed,
    explain,
    first_confirmed,
    holds_on_other_batches,
    two_gradients,
)
from upref.verify.factors import aggregation_id, declared_aggregation
from upref.verify.faults.losses import LossFault, fault
from upref.verify.finding import NO_CAUSE, Cause, Number, TokenPlace, number_pair
from upref.verify.measure import EXACT, HABIT, LossCase, without_rest
from upref.verify.oracle import oracle
from upref.verify.pattern import MeasuredWeights, pattern
from upref.verify.regions import Region, regions
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import (
    differ,
    example,
    numbers,
    sampler_ratio,
    shrink,
    smallest,
    token_numbers,
    worst,
)
from upref.weights.batches import (
    OFF_EDGES,
    breakpoints,
    high_entropy_weight,
    make_batch,
    on_policy_batch,
    random_batches,
    two_token_batch,
)
from upref.weights.curve import of_objective, single_token_batch

RANDOM = 60  # random batches beside the grid
BELOW = f"below the limit of {HABIT:g}, as 1e-6 in a denominator is"
PARTLY = "weights are right up to what rounding its inputs to float32 makes of them"


@oracle("gradient", 10)
def gradient(case: LossCase) -> list[Finding]:
    """The weight of each token, regime by regime, then on random batches.

    Args:
        case: the loss and its objective.

    Returns:
        Failures, one for each region in which weights differ, and notes.
    """
    batch = case.grid()
    found = case.weights(batch)
    errors = case.weight_error(batch, found)
    r = case.ratio(batch)
    A = torch.where(batch.mask, batch.adv.expand_as(errors), 0)
    ties = torch.zeros_like(batch.mask)
    for sign in (1.0, -1.0):
        for k in bounds_of(case, sign):
            ties |= (A * sign > 0) & ((r / k - 1).abs() < 1e-11)
    is_wrong = errors > case.tol
    findings: list[Finding] = []
    if (
        (is_wrong & ~ties).any()
        and not case.single
        and _in_part(case, batch, found, ties)
    ):
        return [note("gradient", PARTLY), *_random(case)]
    findings += _ties(case, batch, is_wrong & ties, r, A, found)
    if (failing := is_wrong & ~ties).any():
        return findings + _regimes(case, batch, failing, r, A, found, ties)
    if not case.single and (small := errors.masked_fill(ties, 0).max()) > EXACT:
        findings.append(
            note("gradient", f"weights differ by {small:.1e} relative", cause=BELOW)
        )
    return findings or _random(case)


def _in_part(case: LossCase, batch: Rollouts, found: Tensor, ties: Tensor) -> bool:
    """Whether the weights are right as far as float32 goes; then it is so compared from
    here on.
    """
    if _moved_bound(case):
        return False
    single = replace(case)
    single.in_float32()
    if (single.weight_error(batch, found) > single.tol).logical_and(~ties).any():
        return False
    # so far from the bounds that no rounding moves a token over them
    if single.weight_error(single.grid()).max() > single.tol:
        return False
    case.in_float32()
    return True


BESIDE = 3e-7  # relative: beyond what float32 makes of a bound


def _moved_bound(case: LossCase) -> bool:
    """Whether a bound lies elsewhere for tokens of all probabilities alike: rounding
    moves some over it, some back.
    """
    if case.objective.batch_coupled:
        return False
    weight = of_objective(case.objective, **case.plain_hp)
    if "entropy" not in case.objective.reads:
        return _moved_for(
            case,
            weight,
            lambda at: make_batch(
                at, case.objective.level, True, np.random.default_rng(0)
            ),
        )
    return _moved_for(case, weight, _by(single_token_batch)) or _moved_for(
        case, high_entropy_weight(case.objective, case.plain_hp), _by(two_token_batch)
    )


def _by(make: Callable[..., Rollouts]) -> Callable[[list[Any]], Rollouts]:
    """`make`, which takes A, r and mu, for a list of tokens (A, mu, r)."""
    return lambda at: make(*np.array(at)[:, [0, 2, 1]].T)


def _moved_for(
    case: LossCase, weight: Callable[..., Any], make: Callable[[list[Any]], Rollouts]
) -> bool:
    """Whether a bound is wrong for tokens of all probabilities alike.

    make: a batch of tokens (A, mu, r), each the first of its row where a row has more.
    """
    for A in (1.0, -1.0):
        # one bound at every π_old: side, what lives beside it, the how manieth of these
        tokens_of_bound: dict[tuple[Any, ...], list[Any]] = {}
        for mu in np.geomspace(
            0.02, 0.6, 8 if case.objective.reads_mu else 24
        ).tolist():
            seen: Counter[tuple[Any, ...]] = Counter()
            for k in breakpoints(
                case.objective,
                A,
                mu if case.objective.reads_mu else 0.02,
                **case.plain_hp,
            ):
                ends = k * (1 - BESIDE), k * (1 + BESIDE)
                lives = tuple((weight(ends, A, mu) != 0).tolist())
                seen[lives] += 1
                for side, r in enumerate(ends):
                    if mu * r < 0.99:
                        tokens_of_bound.setdefault(
                            (side, *lives, seen[lives]), []
                        ).append((A, mu, r))
        for tokens in tokens_of_bound.values():
            batch = case.ready(make(tokens)) if len(tokens) > 3 else None
            if (
                batch is not None
                and (
                    case.weight_error(batch)[
                        batch.mask
                        if "entropy" not in case.objective.reads
                        else (..., 0)
                    ]
                    > 0.01
                ).all()
            ):
                return True
    return False


def bounds_of(case: LossCase, A: float) -> list[float]:
    """Find the ratios at which the objective's own weight jumps.

    Args:
        case: the loss and its objective.
        A: the advantage.

    Returns:
        Ratios, ascending; none where they depend on more than the ratio.
    """
    if case.objective.batch_coupled or case.objective.reads_mu or not A:
        return []
    return breakpoints(case.objective, A, 0.02, **case.plain_hp)


def _ties(
    case: LossCase,
    batch: Rollouts,
    wrong_ties: Tensor,
    r: Tensor,
    A: Tensor,
    found: Tensor,
) -> list[Finding]:
    """A note for each bound at which weights differ, where those beside it are right."""
    expected = case.expected(batch)
    out = []
    for sign in (1.0, -1.0):
        of_sign = wrong_ties & (A * sign > 0)
        for k in sorted({round(x, 9) for x in r[of_sign].tolist()}):
            i, t = (of_sign & ((r - k).abs() < 1e-8)).nonzero()[0].tolist()
            place = TokenPlace(
                sign,
                numbers={"r": k},
                remark="exactly on a bound, where < in place of <=, rounding, or clamp in torch 2.14 decides",
            )
            out.append(
                note(
                    "gradient",
                    "",
                    expected[i, t].item(),
                    found[i, t].item(),
                    place=place,
                )
            )
    return out


def _regimes(
    case: LossCase,
    batch: Rollouts,
    failing: Tensor,
    r: Tensor,
    A: Tensor,
    found: Tensor,
    ties: Tensor,
) -> list[Finding]:
    """A failure for each region in which weights differ, with one cause for all of them
    where a known fault gives all weights.
    """
    parts = [
        p
        for sign in (1.0, -1.0, 0.0)
        for p in regions(case, batch, sign, A, ties, failing, r, bounds_of(case, sign))
    ]
    bounds = sorted({round(x, 7) for p in parts for x in p.ends})
    known_fault = explain(case, batch, found, ties, bounds)
    prefer = _typical(case.weight_error(batch, found), r)
    if known_fault is not None:
        case.cause = known_fault.cause
        return _of_one_fault(case, batch, _by_sign(parts), failing, prefer, known_fault)
    tested = MeasuredWeights(batch, found, case.expected(batch), r, batch.mask & ~ties)
    parts = _by_sign(parts) if len(parts) > 2 else parts
    out: list[Finding] = []
    for part in parts:
        small, token = _smallest_of(case, batch, part, failing, prefer)
        why = Cause("" if out else _pattern_of(case, tested, small))
        out.append(_in_region(case, part, small, token, why))
    return out


def _of_one_fault(
    case: LossCase,
    batch: Rollouts,
    parts: list[Region],
    failing: Tensor,
    prefer: Tensor,
    known_fault: LossFault,
) -> list[Finding]:
    """Return one finding for all regions that the fault explains, shown in the first
    region with a batch on which the printed gradients differ.

    Args:
        case, batch, failing, prefer: as of `_smallest_of`.
        parts: the regions, one for each sign of A.
        known_fault: the fault.
    """
    for part in parts:
        small, token = _smallest_of(case, batch, part, failing, prefer)
        finding = _in_region(case, part, small, token, known_fault.cause)
        if finding.example is not None:
            break
    also = tuple(other.place for other in parts if other is not part)
    finding = replace(finding, also=also)
    if known_fault.kind != "stop-gradient":
        return [finding]
    lost = fail("stop-gradient", "", cause=known_fault.cause, place=parts[0].place)
    return [finding, lost]


def _in_region(
    case: LossCase, part: Region, small: Rollouts, at: tuple[int, int], why: Cause
) -> Finding:
    """The finding of a region, shown by this token of its smallest batch."""
    place = replace(part.place, numbers=token_numbers(case, small, at))
    shown = example(case, small)
    return fail("gradient", "", *numbers(case, small, *at), shown, why, place=place)


def _pattern_of(case: LossCase, tested: MeasuredWeights, small: Rollouts) -> str:
    """What the wrong weights have in common, where no known fault gives them."""
    found = case.weights(small)
    expected = case.expected(small)
    shown = MeasuredWeights(small, found, expected, case.ratio(small), small.mask)
    return pattern(tested, shown, case.tol, case.objective.level not in REDUCE)


def _smallest_of(
    case: LossCase, batch: Rollouts, part: Region, failing: Tensor, prefer: Tensor
) -> tuple[Rollouts, tuple[int, int]]:
    """Return the smallest batch in which tokens of this region differ, and the token
    that differs most.

    Args:
        case: the loss and its objective.
        batch: the batch that is made smaller, [B, T].
        part: the region.
        failing: the tokens of the batch that differ, [B, T].
        prefer: how much each token should be the one that is shown, [B, T].
    """
    # else an aggregation that is not the objective's makes up for it
    visible = _shown_at(case, batch, part.sign)
    shows = _shown_at if (visible & part.tokens & failing).any() else _wrong_at
    wrong_tokens = part.tokens & failing & (visible if shows is _shown_at else failing)

    def smallest_with(shows: Callable[..., Tensor], wrong_tokens: Tensor) -> Any:
        """The smallest batch with such a token, and the one that differs most."""
        token = worst(torch.where(wrong_tokens, prefer, -1.0))
        small = shrink(batch, lambda x: bool(shows(case, x, part.sign).any()), token)
        shown = shows(case, small, part.sign)
        return small, worst(case.weight_error(small).masked_fill(~shown, -1.0))

    small, token = smallest_with(shows, wrong_tokens)
    if not case.single and not _beyond_float32(case, small)[token]:
        # a bound that the loss computes in float32 is not what is wrong with it
        clearly_wrong = wrong_tokens & _beyond_float32(case, batch)
        if clearly_wrong.any():
            return smallest_with(
                lambda *arguments: shows(*arguments) & _beyond_float32(*arguments[:2]),
                clearly_wrong,
            )
    return small, token


def _beyond_float32(case: LossCase, batch: Rollouts) -> Tensor:
    """Tokens whose weight is wrong by more than rounding to float32 makes of it, [B, T].

    Args:
        case: the loss and its objective.
        batch: the batch.
    """
    single = replace(case)
    single.in_float32()
    return single.weight_error(batch) > single.tol


def _by_sign(parts: list[Region]) -> list[Region]:
    """One region for each sign of A: more findings of one fault are hard to read."""
    out = []
    for sign in dict.fromkeys(p.sign for p in parts):
        of_sign = [p for p in parts if p.sign == sign]
        tokens = torch.stack([p.tokens for p in of_sign]).any(0)
        intervals = tuple(interval for p in of_sign for interval in p.place.intervals)
        out.append(Region(replace(of_sign[0].place, intervals=intervals), sign, tokens))
    return out


def _wrong_at(case: LossCase, batch: Rollouts, sign: float) -> Tensor:
    return (case.weight_error(batch) > case.tol) & (
        batch.adv.expand_as(batch.mask).sign() == sign
    )


def _shown_at(case: LossCase, batch: Rollouts, sign: float) -> Tensor:
    """Tokens of that sign whose weight is wrong and whose dJ/dlp is another number too."""
    return _wrong_at(case, batch, sign) & differ(case, batch)


def _typical(off: Tensor, r: Tensor) -> Tensor:
    """Prefer a large difference on a ratio that a reader can picture."""
    return (
        off.nan_to_num(posinf=1e30).clamp(max=1e30) / (1 + r.log().abs() * 20) + 1e-12
    )


def _many(case: LossCase) -> int:
    """How many random batches are compared: bounds that are solved for are slow."""
    return RANDOM // 4 if case.objective.reads_mu else RANDOM


def _random_batches(case: LossCase, seed: int, many: int) -> list[Rollouts]:
    """Those of `random_batches` that the loss can read, the same objects each time."""
    batches: list[Rollouts] = case.cached(
        ("random", seed, many),
        lambda: list(map(case.visible_batch, random_batches(seed, many, case.one_adv))),
    )
    return batches


def _random(case: LossCase, seed: int = 0) -> list[Finding]:
    """The first failure on random batches."""
    count = _many(case)
    for n, batch in enumerate(_random_batches(case, seed, count)):
        errors = case.weight_error(
            batch, case.kept_value_and_gradient(batch)[1] / case.factors(batch)
        )
        if not errors.max() > 10 * case.tol:
            continue
        errors = errors.masked_fill(case.rounded(batch), 0)
        if errors.max() > 10 * case.tol:
            known_fault = explain(
                case, batch, case.weights(batch), case.rounded(batch), []
            )
            batch, i, t = smallest(case, batch, worst(errors))
            sign = batch.adv[i, t].sign().item()
            ratios = {"r": case.ratio(batch)[i, t].item()} | sampler_ratio(
                case, batch, (i, t)
            )
            place = TokenPlace(sign, numbers=ratios, remark=f"in random batch {n}")
            expected, found = numbers(case, batch, i, t)
            found_number = Number(found, "weight", _alone(case, batch, i, t))
            cause = known_fault.cause if known_fault else NO_CAUSE
            return [
                fail(
                    "gradient",
                    "",
                    expected,
                    found_number,
                    example(case, batch),
                    cause,
                    place=place,
                )
            ]
    return []


def _alone(case: LossCase, batch: Rollouts, i: int, t: int) -> str:
    """The weight that the same token has by itself, where that is another."""
    A = batch.adv[i, t].item()
    r = (batch.logp[i, t] - batch.logp_old[i, t]).exp().item()
    if (
        case.objective.level in REDUCE
        or case.objective.level == "custom"
        or A == 0
        or batch.mask.sum() == 1
    ):
        return ""
    single = case.weights(
        case.ready(single_token_batch(A, [r], [batch.logp_old[i, t].exp().item()]))
    )[0, 0].item()
    same = abs(single - case.weights(batch)[i, t].item()) <= 1e-6 * abs(A)
    return "" if same else f"and {single:.6g} alone in its batch"


@oracle("on-policy", 20, lambda case: case.objective.on_policy_exception, implied=True)
def on_policy(case: LossCase) -> list[Finding]:
    """The weights at r = 1, on a batch of its own."""
    batch = case.ready(on_policy_batch())
    errors = case.weight_error(batch)
    if errors.max() <= 10 * case.tol:
        return []
    if not differ(case, batch)[errors > 10 * case.tol].any():
        return []  # an aggregation that is not the objective's: the next oracle's

    def shows(batch: Rollouts) -> bool:
        """Whether a weight is wrong, and dJ/dlp there is another number too."""
        return bool(
            (differ(case, batch) & (case.weight_error(batch) > 10 * case.tol)).any()
        )

    small = shrink(batch, shows, worst(errors.masked_fill(~differ(case, batch), 0)))
    i, t = worst(case.weight_error(small).masked_fill(~differ(case, small), 0))
    scaled = case.weights(batch) / case.scale
    scaling = fault(
        f"every weight is {case.scale:.5g} times what it should be",
        "rounding",
        id="weights-scaled",
        scale=lambda batch: case.scale,
    )
    is_scaled = (
        case.fits
        and abs(case.scale - 1) > 1e-5
        and bool(case.weight_error(batch, scaled).max() <= 10 * case.tol)
    )
    cause = first_confirmed(case, two_gradients(case, batch))
    if is_scaled:
        scaling = next(by_fixed_length(case), scaling)
    if not cause and is_scaled:  # many rows, too: a factor may be that of a small batch
        cause = cause_if_confirmed(case, scaling, case.grid(edges=OFF_EDGES))
    cause = cause or case.cause
    place = TokenPlace(
        small.adv[i, t].sign().item(),
        numbers={"r": 1.0} | sampler_ratio(case, small, (i, t)),
    )
    return [
        fail(
            "on-policy",
            "",
            *numbers(case, small, i, t),
            example(case, small),
            cause,
            place=place,
        )
    ]


@oracle("aggregation", 30)
def aggregation(case: LossCase) -> list[Finding]:
    """What the weights of each response are multiplied by."""
    batch = case.ready(on_policy_batch())
    declared = declared_aggregation(case.objective)
    declared_words = case.objective.agg if declared != case.agg else declared
    if case.agg == declared and HABIT < abs(case.scale - 1) < 1e-5:
        return [
            note("aggregation", f"a factor of 1 {case.scale - 1:+.1e}", cause=BELOW)
        ]

    def factors_differ(batch: Rollouts) -> bool:
        return not torch.allclose(
            case.factors(batch, declared), case.factors(batch), rtol=1e-6
        )

    def shows(batch: Rollouts) -> bool:
        """Whether dJ/dlp is another number too."""
        return factors_differ(batch) and bool(differ(case, batch).any())

    if not case.fits or not factors_differ(batch):
        return []
    small = shrink(batch, shows if shows(batch) else factors_differ)
    lengths = small.mask.sum(1)
    right_factors = case.factors(small, declared)[:, 0]
    found_factors = case.factors(small)[:, 0]
    row = int((found_factors / right_factors - 1).abs().argmax())
    if case.loss.visible_batch(batch).group is not None:
        group = ""
    else:
        group = " (the loss takes no groups: the batch counts as one)"
    text = f"ragged lengths (here a response of {int(lengths[row])} of {int(lengths.sum())} tokens)"
    expected = Number(
        right_factors[row].item(), "factor", f"by {declared_words}{group}"
    )
    found = Number(found_factors[row].item(), "factor", f"by {case.agg}")

    def aggregated(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The part of the gradient that depends on A, at r = 1, found and expected."""
        replaced = dict.fromkeys(
            ("logp", "logp_ref", *(["logp_sampler"] if case.objective.sampler else [])),
            batch.logp_old,
        )
        # as in `make_case`: neither a clip nor a KL term is an aggregation's
        on_policy_batch_ = case.visible_batch(batch.but(**replaced))
        return without_rest(case, on_policy_batch_), case.expected(
            on_policy_batch_
        ) * case.factors(on_policy_batch_) * case.scale

    # of the response's ratio: at 1 it looks the same
    power = case.objective.one_adv and "gradient" in case.failed
    why = NO_CAUSE
    if not power and holds_on_other_batches(case, aggregated, batch):
        why = Cause(case.agg, (aggregation_id(case.agg),))
    return [fail("aggregation", text, expected, found, example(case, small), why)]


@oracle(
    "value", 150, lambda case: "the weights are wrong already" if case.wrong else ""
)
def value(case: LossCase) -> list[Finding]:
    """The value of the loss; a difference without effect on the gradient is a note."""
    for n, batch in enumerate(_random_batches(case, 0, _many(case))[:10]):
        found_value, _ = case.kept_value_and_gradient(batch)
        found = found_value.item()
        expected = case.objective.loss(batch, **case.hp).item()
        if not math.isfinite(found):
            return [
                fail(
                    "value", f"random batch {n}", *number_pair("value", expected, found)
                )
            ]
        if abs(found - expected) > max(1e-6, case.tol) * max(1, abs(expected)):
            why = "a form or a constant without effect on the gradient"
            return [
                note(
                    "value",
                    "the value differs",
                    *number_pair("value", expected, found),
                    why,
                )
            ]
    return []
