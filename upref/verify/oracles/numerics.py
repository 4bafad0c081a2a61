# SPDX-License-Identifier: Apache-2.0
"""The oracle of far ratios, rare and certain tokens, and low precision."""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.explain import cause_if_confirmed
from upref.verify.faults.losses import clamp_faults
from upref.verify.finding import NO_CAUSE, Cause, TokenPlace
from upref.verify.measure import HABIT_TOL, LossCase
from upref.verify.oracle import oracle, refused
from upref.verify.oracles.invariance import grid_off_bounds
from upref.verify.report import NOTHING_FITS, Finding, fail, note
from upref.verify.shrink import example, numbers, shrink, smallest, wrong
from upref.weights.batches import (
    GUARD,
    clamped_batch,
    overflowing_batch,
    single_token_responses,
)

# |log r| at which a clamp is searched
FAR = (5.0, 8.0, 9.5, 10.5, 15.0, 19.5, 20.5, 30.0, 50.0)
# no sampler draws a token of a smaller probability than e^-88
LARGEST_SAMPLED = math.log(torch.finfo(torch.float32).max) - 1
# exp(log r)² overflows float32 from here on. The derivative of 1 / exp(-log r) has that
# square, and no sampler draws a token of a smaller probability than e^-44 either.
LARGEST_SQUARED = math.log(torch.finfo(torch.float32).max) / 2 - 1
LARGEST_FLOAT64 = math.log(torch.finfo(torch.float64).max) - 1  # of log r
LARGE_WEIGHT = 1e30  # an expected weight above this may overflow
CERTAIN = "harmless: where π_θ is 1, no logit has a gradient"


@oracle("extremes", 90)
def extremes(case: LossCase) -> list[Finding]:
    """Compare on ratios so far from 1, and tokens so rare, that exp and log leave the
    range of a dtype.

    Args:
        case: the loss and its objective.

    Returns:
        What `clamps` finds, if the weights are right nearer to 1; then the failure of the
        first of float64, float32 and bfloat16 that has one, or their notes, one of a kind.
    """
    findings: list[Finding] = []
    # wrong beyond the grid, if at all
    is_right_nearby = not case.wrong or bool(
        (case.weight_error(grid_off_bounds(case)) <= case.tol).all()
    )
    if is_right_nearby and not case.single and not case.objective.batch_coupled:
        findings += [f for f in clamps(case) if not case.wrong or f.is_explained]
    notes: dict[str, Finding] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = _overflows(case, dtype)
        failures = [f for f in found.values() if f.severity == "failure"]
        if failures:
            return findings + failures
        notes = found | notes  # of two notes of a kind, the wider dtype's
    return [*findings, *notes.values()]


def _overflows(case: LossCase, dtype: torch.dtype) -> dict[str, Finding]:
    """Return a failure for NaN, or for a weight that is lost, where the objective's own
    weight is an ordinary number; else notes for ratios and tokens that no sampler can
    produce, and for another weight where π_θ is 1. Of the former exp(log r) overflows
    float32, and exp(log π_old) underflows it.

    Args:
        case: the loss and its objective.
        dtype: the dtype of the inputs.

    Returns:
        Findings by "wrong", "far", "rare", "certain" or "refused".
    """
    wide = case.ready(overflowing_batch())
    short = str(dtype).removeprefix("torch.")
    low = wide.floats(dtype)
    try:
        gradient = case.gradient(low).double()
    except InputError as e:
        if dtype is torch.float64 and not _runs_below_overflow(case, low):
            return {"refused": refused("extremes", "float64, |log r| up to 800", e)}
        if dtype is torch.float64:
            words = f"|log r| above {LARGEST_FLOAT64:.0f} is"
        else:
            words = f"{short} inputs are"
        return {"refused": note("extremes", f"{words} refused", found=str(e))}
    extreme = _extremes(case, low, gradient)
    notes: dict[str, Finding] = {}
    for kind, hit in extreme.hits.items():
        if not hit.any():
            continue
        i, t = hit.nonzero()[0].tolist()
        is_nan = math.isnan(extreme.found[i, t].item())
        if kind == "certain":
            why = CERTAIN
        else:
            why = _dtype_that_overflows(case, extreme.b, low, i, t, is_nan)
        if kind != "wrong":
            notes[kind] = note(
                "extremes",
                "",
                *extreme.weights(i, t),
                why,
                place=extreme.place(i, t, short),
            )
            continue

        def is_wrong(batch: Rollouts) -> bool:
            """Return whether some token of this batch is wrong too."""
            of_batch = _extremes(case, batch, case.gradient(batch).double())
            return bool(of_batch.hits["wrong"].any())

        small = shrink(low, is_wrong, (i, t))
        shown_extremes = _extremes(case, small, case.gradient(small).double())
        i, t = shown_extremes.hits["wrong"].nonzero()[0].tolist()
        shown = example(case, shown_extremes.b, dtype)
        place = shown_extremes.place(i, t, short)
        return {
            kind: fail(
                "extremes", "", *shown_extremes.weights(i, t), shown, why, place=place
            )
        }
    return notes


@dataclass(frozen=True)
class Extremes:
    """Weights of a batch of far ratios and rare tokens, and the tokens where they
    differ by more than rounding.

    Attributes:
        b: the numbers that the loss got, in float64.
        expected: the expected weights, [B, T].
        found: the weights found, [B, T].
        hits: masks [B, T] of the tokens that differ: "wrong"; "far" and "rare" are
            those that no sampler produces, "certain" those of probability 1 whose weight
            is finite.
    """

    b: Rollouts
    expected: Tensor
    found: Tensor
    hits: dict[str, Tensor]

    def place(self, i: int, t: int, dtype: str) -> TokenPlace:
        """Return the place of a token.

        Args:
            i: its row.
            t: its column.
            dtype: the words for the dtype in which it was found.
        """
        A = self.b.adv[i, t].item()
        log_r = (self.b.logp - self.b.logp_old)[i, t].item()
        size = {} if abs(A) in (0, 1) else {"A": A}
        numbers = size | {"log r": log_r, "log π": self.b.logp[i, t].item()}
        return TokenPlace(None if size else A, numbers=numbers, remark=dtype)

    def weights(self, i: int, t: int) -> tuple[float, float]:
        """Return the expected and the found weight of a token.

        Args:
            i: the row.
            t: the column.
        """
        return self.expected[i, t].item(), self.found[i, t].item()


def _extremes(case: LossCase, low: Rollouts, gradient: Tensor) -> Extremes:
    """Compare a gradient with the objective's on a batch of far ratios and rare tokens.

    Args:
        case: the loss and its objective.
        low: the batch, in any dtype.
        gradient: the loss's gradient on it, in float64, [B, T].
    """
    batch = low.floats(torch.float64)
    expected = case.expected(batch)
    found = gradient / case.factors(batch)
    dtype = low.logp.dtype
    log_r = batch.logp - batch.logp_old
    A = batch.adv.expand_as(batch.logp)
    # some losses write a geometric mean as the root of a product, which overflows first
    by_response = case.objective.level in ("sequence_mean", "custom")
    if by_response:
        size_of_log_r = log_r.abs().sum(1, keepdim=True).expand_as(log_r)
    else:
        size_of_log_r = log_r.abs()
    # the gradient of a token is A r times its factor: a small one leaves the dtype too
    log_factor = (
        torch.where(A == 0, 1, (A * case.factors(batch)).abs().clamp(1e-30, 1))
    ).log()
    is_not_finite = ~found.isfinite()
    is_far = size_of_log_r - log_factor > LARGEST_SAMPLED
    if dtype is not torch.float64:
        square_overflows = size_of_log_r - log_factor > LARGEST_SQUARED
        # where log r < 0, the sampler's probability may be an ordinary one
        is_far = is_far | (is_not_finite & square_overflows & (log_r > 0))
    is_unseen = is_far | (batch.logp_old < -LARGEST_SAMPLED)
    # neither a weight that is nearly 0 nor a ratio that has run away
    is_ordinary = (expected.abs() > 0.1 * A.abs()) & (expected.abs() < 10 * A.abs() + 1)
    is_lost = is_not_finite
    # at a cut of a coupled batch, rounding decides which tokens tie. Another oracle
    # reports wrong weights.
    if not case.wrong and (dtype is torch.float64 or not case.objective.batch_coupled):
        # a loss may clip log r: rounding it by half a unit multiplies the weight
        rounding = torch.expm1(torch.finfo(dtype).eps / 2 * log_r.abs())
        room = rounding.clamp(min=0.1) * expected.abs() + _rounding_of_kl(case, dtype)
        differs = (found - expected).abs() > room
        is_lost = is_lost | (
            differs & ~_rounds_to_a_bound(case, log_r, by_response, dtype)
        )
    is_lost_ordinary = is_lost & is_ordinary
    is_overflow = is_not_finite & (expected.abs() < LARGE_WEIGHT)
    is_hit = is_not_finite | is_lost_ordinary
    is_certain = (batch.logp == 0) & ~is_not_finite & batch.mask
    is_wrong = (is_overflow | is_lost_ordinary) & ~is_unseen & batch.mask & ~is_certain
    is_forgiven = is_hit & ~is_wrong & ~is_certain & batch.mask
    hits = {
        "wrong": is_wrong,
        "far": is_forgiven & is_far,
        "rare": is_forgiven & ~is_far,
        # a divergence that is infinite at π_θ = 1 is decided by a guard there
        "certain": is_hit & is_certain & (not case.objective.reads_mu),
    }
    return Extremes(batch, expected, found, hits)


def _rounds_to_a_bound(
    case: LossCase, log_r: Tensor, by_response: bool, dtype: torch.dtype
) -> Tensor:
    """Return the tokens whose ratio and a bound of the objective may be one number in
    this dtype, [B, T]. There the rule for a tie decides: torch.clamp passes the
    gradient of a tie up to torch 2.13, and none in 2.14.
    """
    ratios = log_r.mean(1, keepdim=True).expand_as(log_r) if by_response else log_r
    room = 4 * torch.finfo(dtype).eps
    close = torch.zeros_like(log_r, dtype=torch.bool)
    for sign in (1.0, -1.0):
        for bound in case.bounds(sign):
            if bound > 0:
                close |= (ratios - math.log(bound)).abs() <= room
    return close


def _rounding_of_kl(case: LossCase, dtype: torch.dtype) -> float:
    """Return the rounding error of the KL term's weight where π_θ is π_ref. The weight
    is there a difference of two terms of size β.
    """
    return float(4 * torch.finfo(dtype).eps * abs(case.hp.get("beta") or 0))


def _runs_below_overflow(case: LossCase, batch: Rollouts) -> bool:
    """Return whether the loss accepts the batch without the ratios at which exp(log r)
    is infinite. An error there is better than the NaN, which is allowed.
    """
    overflows = (batch.logp - batch.logp_old).abs() > LARGEST_FLOAT64
    logp = torch.where(overflows, batch.logp_old, batch.logp)
    try:
        case.gradient(replace(batch, logp=logp))
    except InputError:
        return False
    return True


# (divisor of A, how much lower log π is than it must be): a loss must be right, or
# wrong, for both
VARIANTS = ((1, 1.0), (3, 40.0))
BEYOND_END = 4.0  # a log r so far from the end of a dtype is beyond all rounding


def _dtype_that_overflows(
    case: LossCase, batch: Rollouts, low: Rollouts, i: int, t: int, is_nan: bool
) -> str:
    """Return the words for the dtype whose end makes the weight of a token wrong, or "".

    The loss is tried on single tokens on both sides of the end of float32 and of the
    batch's dtype, far from it and as near as rounding allows, for two probabilities and
    two advantages. The cause is known if all tokens on one side are right, and all on
    the other are wrong: nearer ratios, or more likely tokens with the same ratio.

    Args:
        case: the loss and its objective.
        batch: the batch in float64.
        low: the batch in its own dtype.
        i: the row of the token.
        t: the column of the token.
        is_nan: whether its weight is NaN.
    """
    token_log_r = (batch.logp - batch.logp_old)[i, t].item()
    token_A = batch.adv[i, t].item()
    dtype = low.logp.dtype

    def is_right(log_r: float, lp: float, A: float) -> bool:
        """Return whether the weight of a single token is the objective's to 5 %: what
        overflows is off by more. False where the loss refuses it.
        """

        def filled(value: float) -> Tensor:
            """Return this number as a batch of one token."""
            return torch.full_like(low.logp[:1, :1], value)

        token = case.ready(
            Rollouts(
                filled(lp),
                filled(lp - log_r),
                filled(A),
                filled(1).bool(),
                logp_ref=filled(lp),
                entropy=filled(1),
            )
        )
        try:
            found = case.gradient(token).double() / case.factors(token)
        except InputError:
            return False
        expected = case.expected(token.floats(torch.float64))
        largest = max(abs(token_A), float(expected.abs().max()))
        room = 0.05 * largest + _rounding_of_kl(case, dtype)
        return bool((found - expected).abs().max() <= room)

    def right_at_ratio(end: float, excess: float) -> list[bool]:
        """Return whether tokens are right whose |log r| is so far beyond the end."""
        log_r = math.copysign(end + excess, token_log_r)
        lp = -end - max(excess, 0)
        return [
            is_right(log_r, lp - less, token_A / divisor) for divisor, less in VARIANTS
        ]

    def rounding_of(end_dtype: torch.dtype) -> float:
        """Return how far rounding moves a log r at which exp overflows this dtype."""
        eps = max(torch.finfo(end_dtype).eps, torch.finfo(dtype).eps)
        return 0.02 + 2 * math.log(torch.finfo(end_dtype).max) * eps

    def overflow_begins_at(end: float, rounding: float) -> bool:
        """Return whether all tokens below this |log r| are right, and none above it."""
        below = right_at_ratio(end, -BEYOND_END) + right_at_ratio(end, -rounding)
        if not all(below):
            return False
        above = right_at_ratio(end, BEYOND_END) + right_at_ratio(end, rounding)
        return not any(above)

    def right_at_probability(lp: float) -> list[bool]:
        """Return whether tokens of this log π are right."""
        return [is_right(token_log_r, lp, token_A / divisor) for divisor, _ in VARIANTS]

    end_dtypes = (torch.float32, dtype)
    powers = ((1, "exp(log r)"), (2, "exp(log r)²")) if is_nan else ((1, "exp(log r)"),)
    for (power, words), end_dtype in product(powers, end_dtypes):
        end = math.log(torch.finfo(end_dtype).max) / power
        if abs(token_log_r) > end and overflow_begins_at(end, rounding_of(end_dtype)):
            name = str(end_dtype).removeprefix("torch.")
            half_end = math.log(torch.finfo(torch.float16).max) / power
            text = f"{words} overflows {name} at |log r| > {end:.3g} (float16: {half_end:.3g})"
            return text + (", and 0 * inf is NaN" if is_nan else "")
    if abs(token_log_r) >= 1:
        return ""
    for end_dtype in end_dtypes:
        limits = torch.finfo(end_dtype)
        underflow = -math.log(limits.tiny)  # of a normal number
        last_subnormal = underflow - math.log(limits.eps)
        rounding = rounding_of(end_dtype)
        above = right_at_probability(-(underflow - 9))
        above += right_at_probability(-(underflow - rounding))
        if all(above):
            below = right_at_probability(-(last_subnormal + rounding))
            below += right_at_probability(-(last_subnormal + 60))
            if not any(below):
                name = str(end_dtype).removeprefix("torch.")
                return (
                    f"exp(log_prob) underflows {name}, though the ratio is near 1: "
                    "use differences of log-probabilities"
                )
    return ""


class Hit(NamedTuple):
    """A token whose weight differs at a far ratio."""

    A: float
    log_r: float
    expected: float
    found: float


def _lost_weight(hit: Hit) -> float:
    """Return how far the weight of a token is off, over its ratio, or over 1 where the
    ratio is below 1; to six decimals, so that equal losses are ties.
    """
    ratio_above_one = math.exp(max(0.0, hit.log_r))
    return round(abs(hit.expected - hit.found) / ratio_above_one, 6)


def clamps(case: LossCase) -> list[Finding]:
    """Report a weight that is lost beyond some |log r|: a clamp of the log-ratio. The
    finding shows the token that loses most.

    Args:
        case: the loss and its objective.

    Returns:
        A failure; a note where only ratios that a clamp may guard against differ; or
        nothing.
    """
    hits = []
    guard = GUARD[case.objective.level]
    for A in (1.0, -1.0):
        batch = _far_responses(case, A)
        found = case.weights(batch)[:, 0]
        expected = case.expected(batch)[:, 0]
        errors = case.weight_error(batch)[:, 0]
        hits += [
            Hit(A, sign * log_r, expected[n].item(), found[n].item())
            for n, (log_r, sign) in enumerate(product(FAR, (1, -1)))
            if errors[n] > HABIT_TOL
        ]
    if not hits:
        return []
    near_hits = [hit for hit in hits if abs(hit.log_r) < guard] or hits
    # of those that lose equally much, the nearest
    worst = max(near_hits, key=lambda hit: (_lost_weight(hit), -abs(hit.log_r)))
    cause = _clamp_cause(case, hits)
    if abs(worst.log_r) < guard:
        return [_clamp_failure(case, worst, cause or NOTHING_FITS)]
    if cause:
        words = f"clamped at {guard:g} or beyond"
    else:
        words = f"a different weight at {guard:g} or beyond"
    return [
        note(
            "extremes",
            "",
            worst.expected,
            worst.found,
            cause or NOTHING_FITS,
            place=TokenPlace(worst.A, numbers={"log r": worst.log_r}, remark=words),
        )
    ]


def _far_responses(case: LossCase, A: float) -> Rollouts:
    """Return a batch of responses of one token, one for each far ratio on either side."""
    ratios = [math.exp(sign * log_r) for log_r in FAR for sign in (1, -1)]
    return case.ready(single_token_responses(A, ratios))


def _clamp_failure(case: LossCase, hit: Hit, cause: Cause) -> Finding:
    """Return the failure of this token, shown in the smallest batch where it differs:
    alone, or beside others.
    """
    alone = case.ready(single_token_responses(hit.A, [math.exp(hit.log_r)]))
    if wrong(case)(alone):
        small, i, t = smallest(case, alone, (0, 0))
    else:
        together = _far_responses(case, hit.A)
        small, i, t = smallest(case, together, _place(together, hit.log_r))
    log_r = (small.logp - small.logp_old)[i, t].item()
    if log_r > 0:
        remark = (
            f"as of a token that was sampled at π_old = {math.exp(-abs(log_r)):.1g}"
        )
    else:
        remark = ""
    return fail(
        "extremes",
        "",
        *numbers(case, small, i, t),
        example(case, small),
        cause,
        place=TokenPlace(hit.A, numbers={"log r": log_r}, remark=remark),
    )


def _place(batch: Rollouts, log_r: float) -> tuple[int, int]:
    """Return the row and the column of the token whose log-ratio is nearest to this."""
    distance = (batch.logp - batch.logp_old - log_r).abs()
    return divmod(int(distance.argmin()), batch.mask.shape[1])


def _clamp_cause(case: LossCase, hits: list[Hit]) -> Cause:
    """Find the clamp of log r that gives the reference the weights found on every batch.

    Far batches are among them.

    Args:
        case: the loss beside its objective.
        hits: tokens whose weights differ, at least one.

    Returns:
        The clamp, or no cause where none gives all the weights.
    """
    ends = {1: math.inf, -1: -math.inf}
    for side in ends:
        beyond_it = [hit for hit in hits if hit.log_r * side > 0]
        if beyond_it:
            nearest = min(beyond_it, key=lambda hit: abs(hit.log_r))
            ends[side] = side * _where_it_acts(case, nearest.A, side, nearest.log_r)
    near_batch = case.ready(clamped_batch())
    far_batch = case.stress_batch("ratios")
    # a small difference shows only beyond the bound itself, which is a round number
    for digits in (2, 6):
        low, high = (float(f"{ends[side]:.{digits}g}") for side in (-1, 1))
        faults = clamp_faults(
            case.objective, case.hp, low, high, _interval_words(low, high)
        )
        for fault in faults:
            if cause := cause_if_confirmed(case, fault, near_batch, far_batch):
                return cause
    return NO_CAUSE


def _where_it_acts(case: LossCase, A: float, side: int, log_r: float) -> float:
    """Find the least |log r| on one side at which the weight differs, by bisection between
    it and the next ratio of FAR below.

    Args:
        case: the loss beside its objective.
        A: the advantage of the token.
        side: 1 for r > 1, -1 for r < 1.
        log_r: of a token there whose weight differs.

    Returns:
        |log r|.
    """
    wrong_at = abs(log_r)
    right_at = max((x for x in FAR if x < wrong_at), default=0.0)
    for _ in range(30):
        middle = (right_at + wrong_at) / 2
        token = case.ready(single_token_responses(A, [math.exp(side * middle)]))
        if case.weight_error(token).max() > HABIT_TOL:
            wrong_at = middle
        else:
            right_at = middle
    return wrong_at


def _interval_words(low: float, high: float) -> str:
    """Return the words for the interval to which log r is clamped."""
    if low == -high:
        return f"to ±{high:g}"
    if low == -math.inf:
        return f"at {high:g}"
    if high == math.inf:
        return f"to {low:g} and above"
    return f"to [{low:g}, {high:g}]"
