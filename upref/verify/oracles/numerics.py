# SPDX-License-Identifier: Apache-2.0
"""The oracle of far ratios, rare tokens and low precision."""

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
from upref.verify.measure import HABIT, LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import grid_off_bounds
from upref.verify.oracles.weights import bounds_of
from upref.verify.report import UNKNOWN, Finding, fail, note
from upref.verify.shrink import example, numbers, shrink, smallest, wrong
from upref.weights.batches import GUARD, clamped, overflowing, single_token_responses

Pairs = tuple[tuple[float, float], ...]
FAR = (5.0, 8.0, 9.5, 10.5, 15.0, 19.5, 20.5, 30.0, 50.0)
# no sampler draws a token of probability e^-88
SAMPLED = math.log(torch.finfo(torch.float32).max) - 1
FULL = math.log(torch.finfo(torch.float64).max) - 1


@oracle("extremes", 90)
def extremes(case: LossCase) -> list[Finding]:
    """Ratios so far from 1, and tokens so rare, that exp and log leave the range of a
    dtype.
    """
    findings: list[Finding] = []
    # wrong beyond the grid, if at all
    is_right_nearby = not case.wrong or bool(
        (case.weight_error(grid_off_bounds(case)) <= case.tol).all()
    )
    if is_right_nearby and not case.single and not case.objective.batch_coupled:
        findings += [f for f in clamps(case) if not case.wrong or f.cause != UNKNOWN]
    notes: dict[str, Finding] = {}
    # what is noted in one may be wrong in the next
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = _overflows(case, dtype)
        if wrong := [f for f in found.values() if f.severity == "failure"]:
            return findings + wrong
        notes = found | notes
    return [*findings, *notes.values()]


def _overflows(case: LossCase, dtype: torch.dtype) -> dict[str, Finding]:
    """NaN, or a lost weight, where the objective's own is an ordinary number; a note
    for ratios and tokens that no sampler can produce, which is where exp(log r)
    overflows float32 and exp(log π_old) leaves it."""
    wide = case.ready(overflowing())
    short = str(dtype).removeprefix("torch.")
    low = wide.floats(dtype)
    try:
        gradient = case.gradient(low).double()
    except InputError as e:
        if dtype is torch.float64 and not _runs_below_overflow(case, low):
            return {
                "refused": fail(
                    "extremes", "float64, |log r| up to 800", "a finite loss", str(e)
                )
            }
        if dtype is torch.float64:
            words = f"|log r| above {FULL:.0f} is"
        else:
            words = f"{short} inputs are"
        return {"refused": note("extremes", f"{words} refused", found=str(e))}
    extreme = _extremes(case, low, gradient)
    notes: dict[str, Finding] = {}
    for kind, hit in extreme.hits.items():
        if not hit.any():
            continue
        i, t = hit.nonzero()[0].tolist()
        why = _why(case, extreme.b, low, i, t, math.isnan(extreme.found[i, t].item()))
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
            return bool(
                _extremes(case, batch, case.gradient(batch).double())
                .hits["wrong"]
                .any()
            )

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
    """

    b: Rollouts  # the numbers that the loss got, in float64
    expected: Tensor
    found: Tensor
    # "wrong"; "far" and "rare" are those that no sampler produces
    hits: dict[str, Tensor]

    def place(self, i: int, t: int, dtype: str) -> TokenPlace:
        """The token in column t of response i.

        Args:
            i: the row.
            t: the column.
            dtype: in words, in which it was found.
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
    """gradient: the gradient of the loss on this batch, whose numbers may be of any dtype."""
    batch = low.floats(torch.float64)
    expected = case.expected(batch)
    found = gradient / case.factors(batch)
    dtype = low.logp.dtype
    log_r = batch.logp - batch.logp_old
    A = batch.adv.expand_as(batch.logp)
    room = _room(case, dtype)
    # some write a geometric mean as the root of a product
    by_response = case.objective.level in ("sequence_mean", "custom")
    # A / (N r) leaves the dtype too
    size = torch.where(A == 0, 1, (A * case.factors(batch)).abs().clamp(1e-30, 1)).log()
    is_far = (
        log_r.abs().sum(1, keepdim=True).expand_as(log_r)
        if by_response
        else log_r.abs()
    ) - size > SAMPLED
    is_unseen = is_far | (batch.logp_old < -SAMPLED)
    # a weight that is no ratio run away
    is_ordinary = (expected.abs() > 0.1 * A.abs()) & (expected.abs() < 10 * A.abs() + 1)
    is_lost = ~found.isfinite()
    # which tokens tie at a cut of the batch, rounding decides; wrong weights are
    # another oracle's
    if not case.wrong and (dtype is torch.float64 or not case.objective.batch_coupled):
        is_off = (found - expected).abs() > 0.1 * expected.abs() + room
        is_lost |= is_off & ~_rounds_to_a_bound(case, log_r, by_response, dtype)
    is_wrong = (
        (~found.isfinite() & (expected.abs() < 1e30) | is_lost & is_ordinary)
        & ~is_unseen
        & batch.mask
    )
    is_forgiven = (~found.isfinite() | is_lost & is_ordinary) & ~is_wrong & batch.mask
    return Extremes(
        batch,
        expected,
        found,
        {"wrong": is_wrong, "far": is_forgiven & is_far, "rare": is_forgiven & ~is_far},
    )


def _rounds_to_a_bound(
    case: LossCase, log_r: Tensor, by_response: bool, dtype: torch.dtype
) -> Tensor:
    """Where the ratio and a bound of the objective may be one number in this dtype.
    There the rule for a tie decides: torch.clamp passes the gradient of a tie up to
    torch 2.13, and none in 2.14.
    """
    ratios = log_r.mean(1, keepdim=True).expand_as(log_r) if by_response else log_r
    room = 4 * torch.finfo(dtype).eps
    close = torch.zeros_like(log_r, dtype=torch.bool)
    for sign in (1.0, -1.0):
        for bound in bounds_of(case, sign):
            if bound > 0:
                close |= (ratios - math.log(bound)).abs() <= room
    return close


def _room(case: LossCase, dtype: torch.dtype) -> float:
    """What rounding leaves of the KL term where π is π_ref: its slope is a difference
    of two terms of size β there.
    """
    return float(4 * torch.finfo(dtype).eps * abs(case.hp.get("beta") or 0))


def _runs_below_overflow(case: LossCase, batch: Rollouts) -> bool:
    """Whether it raised only because exp(log r) is infinite: louder than the NaN that
    is forgiven.
    """
    try:
        case.gradient(
            replace(
                batch,
                logp=torch.where(
                    (batch.logp - batch.logp_old).abs() > FULL,
                    batch.logp_old,
                    batch.logp,
                ),
            )
        )
    except InputError:
        return False
    return True


def _why(
    case: LossCase, batch: Rollouts, low: Rollouts, i: int, t: int, nan: bool
) -> str:
    """The one change that makes it right: a nearer ratio, or the same ratio of a more
    likely token. Both sides of the end of a dtype are asked, far from it and as near as
    rounding allows, for two probabilities and two advantages."""
    x, A = (batch.logp - batch.logp_old)[i, t].item(), batch.adv[i, t].item()
    dtype = low.logp.dtype

    def right(log_r: float, lp: float, A: float) -> bool:
        """Whether the weight of one token is the objective's."""

        def full(v: float) -> Tensor:
            """One token with this number."""
            return torch.full_like(low.logp[:1, :1], v)

        token = case.ready(
            Rollouts(
                full(lp), full(lp - log_r), full(A), full(1).bool(), logp_ref=full(lp)
            )
        )
        try:
            found = case.gradient(token).double() / case.factors(token)
        except InputError:
            return False
        expected = case.expected(token.floats(torch.float64))
        margin = 0.05 * max(abs(A), float(expected.abs().max())) + _room(case, dtype)
        return bool((found - expected).abs().max() <= margin)

    for end_dtype in (torch.float32, dtype):
        limits = torch.finfo(end_dtype)
        name = str(end_dtype).removeprefix("torch.")
        most, tiny, least = (
            math.log(limits.max),
            -math.log(limits.tiny),
            -math.log(limits.tiny) - math.log(limits.eps),
        )
        # rounding of the inputs
        margin = 0.02 + 2 * most * max(limits.eps, torch.finfo(dtype).eps)
        advantages = ((A, 1.0), (A / 3, 40.0))

        def right_at_excess(
            excess: float, most: float = most, advantages: Pairs = advantages
        ) -> list[bool]:
            """Whether it is right, for each advantage, so far above exp's overflow."""
            log_r = math.copysign(most + excess, x)
            lp = -most - max(excess, 0)
            return [right(log_r, lp - below, a) for a, below in advantages]

        def rare(lp: float, advantages: Pairs = advantages) -> list[bool]:
            """Whether it is right, for each advantage, at a token of this -log π."""
            return [right(x, -lp, a) for a, _ in advantages]

        if (
            abs(x) > most
            and all(right_at_excess(-4) + right_at_excess(-margin))
            and not any(right_at_excess(4) + right_at_excess(margin))
        ):
            product = ", and 0 * inf is NaN" if nan else ""
            return f"exp(log r) overflows {name} at |log r| > {most:.3g} (float16: 11.1){product}"
        if (
            abs(x) < 1
            and all(rare(tiny - 9) + rare(tiny - margin))
            and not any(rare(least + margin) + rare(least + 60))
        ):
            return f"exp(log_prob) underflows {name}, though the ratio is near 1: use differences of log-probabilities"
    return ""


class Hit(NamedTuple):
    """A token whose weight differs at a far ratio."""

    A: float
    log_r: float
    expected: float
    found: float


def _lost(hit: Hit) -> float:
    """How much of its weight a token loses, divided by its ratio above 1."""
    ratio_above_one = math.exp(max(0.0, hit.log_r))
    return round(abs(hit.expected - hit.found) / ratio_above_one, 6)


def clamps(case: LossCase) -> list[Finding]:
    """A weight that is lost beyond some |log r|: a clamp of the log-ratio. Shown is the
    token that loses most.

    Args:
        case: the loss and its objective.

    Returns:
        Findings, with the cause where it is known.
    """
    hits = []
    guard = GUARD[case.objective.level]
    for A in (1.0, -1.0):
        batch = case.ready(
            single_token_responses(
                A, [math.exp(sign * log_r) for log_r in FAR for sign in (1, -1)]
            )
        )
        found = case.weights(batch)[:, 0]
        expected = case.expected(batch)[:, 0]
        errors = case.weight_error(batch)[:, 0]
        hits += [
            Hit(A, sign * log_r, expected[n].item(), found[n].item())
            for n, (log_r, sign) in enumerate(product(FAR, (1, -1)))
            if errors[n] > HABIT
        ]
    if not hits:
        return []
    near_hits = [hit for hit in hits if abs(hit.log_r) < guard] or hits
    # the nearest, where many lose all
    A, log_r, expected_weight, found_weight = max(
        near_hits, key=lambda hit: (_lost(hit), -abs(hit.log_r))
    )
    clamp = _clamp_cause(case, hits)
    why = clamp or Cause(UNKNOWN)
    if abs(log_r) < guard:
        alone = case.ready(single_token_responses(A, [math.exp(log_r)]))
        together = case.ready(
            single_token_responses(
                A, [math.exp(sign * y) for y in FAR for sign in (1, -1)]
            )
        )
        smallest_batch, i, t = smallest(
            case,
            *(
                (alone, (0, 0))
                if wrong(case)(alone)
                else (together, _place(together, log_r))
            ),
        )
        log_r = (smallest_batch.logp - smallest_batch.logp_old)[i, t].item()
        if log_r > 0:
            reached = (
                f"as of a token that was sampled at π_old = {math.exp(-abs(log_r)):.1g}"
            )
        else:
            reached = ""
        place = TokenPlace(A, numbers={"log r": log_r}, remark=reached)
        return [
            fail(
                "extremes",
                "",
                *numbers(case, smallest_batch, i, t),
                example(case, smallest_batch),
                why,
                place=place,
            )
        ]
    if not clamp:
        words = f"another weight at {guard:g} or beyond"
    else:
        words = f"clamped at {guard:g} or beyond"
    return [
        note(
            "extremes",
            "",
            expected_weight,
            found_weight,
            why,
            place=TokenPlace(A, numbers={"log r": log_r}, remark=words),
        )
    ]


def _place(batch: Rollouts, x: float) -> tuple[int, int]:
    """Where the token of this log-ratio is."""
    return divmod(
        int((batch.logp - batch.logp_old - x).abs().argmin()), batch.mask.shape[1]
    )


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
    near_batch = case.ready(clamped())
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
    """Find the least |log r| on one side at which the weight differs, by bisection.

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
        if case.weight_error(token).max() > HABIT:
            wrong_at = middle
        else:
            right_at = middle
    return wrong_at


def _interval_words(low: float, high: float) -> str:
    """What log r is clamped to."""
    if low == -high:
        return f"to ±{high:g}"
    if low == -math.inf:
        return f"at {high:g}"
    if high == math.inf:
        return f"to {low:g} and above"
    return f"to [{low:g}, {high:g}]"
