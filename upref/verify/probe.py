# SPDX-License-Identifier: Apache-2.0
"""A loss as a black box: its aggregation, its KL term, its weight w(r, A, π_old) as a
curve, every jump located, and its gradients on batches beside these jumps.

The curve is measured on responses of one token, where token, sequence and trajectory
ratios are the same number. Where the weight depends on the entropy, a token of high
entropy is measured beside another one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from upref import kl
from upref.aggregation import AGGREGATIONS
from upref.errors import InputError
from upref.registry import REDUCE
from upref.rollouts import Rollouts
from upref.user_code import Loss, no_objective
from upref.verify.factors import SAME_FACTOR, common_value, is_one, names
from upref.verify.kl_terms import possible_terms, term_coefficient, term_slope
from upref.verify.measure import (
    LossCase,
    OnPolicy,
    make_case,
    measure_on_policy,
)
from upref.weights import black_box
from upref.weights.batches import (
    GRID_ADVANTAGES,
    LOG_R,
    MU,
    make_batch,
    on_policy_batch,
    random_batch,
)
from upref.weights.black_box import (
    AT_ONCE,
    MANY_LOG_R,
    MOST_LIKELY,
    SIGNS,
    gradient_at_zero_advantage,
    in_parts,
    low_probability as mu_of,
    single_token_batch,
    two_token_batch,
)
from upref.weights.curve import Curve

FEWER_ROWS = (0, 1, 2, 3, 4)  # of the on-policy batch
FADED_WEIGHT = 1e-9  # a weight per advantage below which a jump to 0 is one of rounding
MUS = (0.3, 0.9)  # π_old, beside that of a rare token, where the weight depends on it
RANDOM_BATCHES = 12  # of a measured loss, beside the grid
NEARLY_CERTAIN = 0.999  # π_θ of a token of a batch is below this


class Point(NamedTuple):
    """Where a weight is measured: a token by itself, or beside another one."""

    A: float
    r: float
    mu: float
    # the response has a second token, of ratio 1 and half the entropy
    high_entropy: bool = False


@dataclass(frozen=True)
class BlackBox:
    """What is measured of a loss before any objective is tried."""

    case: LossCase
    agg: str = ""  # a key of FACTORS, "" where none explains the on-policy gradient
    scale: float = 1.0  # a factor of every weight that the aggregation does not have
    kl: str = ""  # the estimator of its KL term; "" where it has none
    beta: float = 0.0  # the coefficient of its KL term
    reads_mu: bool = False
    reads_entropy: bool = False
    batch_coupled: bool = False  # the weight of a token depends on other responses
    random: bool = False  # two calls give two gradients
    points: tuple[Point, ...] = ()
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))  # at the points
    sides: int = 0  # so many of the last points are beside a jump
    # where the weight jumps, and the weight halfway through the jump
    jumps: tuple[tuple[Point, float], ...] = ()
    # jumps at which a weight fades, so that rounding makes the last of it 0
    faded: frozenset[Point] = frozenset()

    @property
    def loss(self) -> Loss:
        return self.case.loss

    def ask(self, points: list[Point]) -> np.ndarray:
        """Measure w = dJ_t/dlp_t at each point (π_ref = π_θ). The aggregation and the
        scale are divided out, and the KL term is subtracted.

        Args:
            points: the points.

        Returns:
            A weight for each point.
        """
        weights = np.zeros(len(points))
        for high_entropy in (False, True):
            indices = [
                i
                for i, point in enumerate(points)
                if point.high_entropy is high_entropy
            ]
            if indices:
                r, A, mu = (
                    np.array([getattr(points[i], name) for i in indices])
                    for name in ("r", "A", "mu")
                )
                weights[indices] = self.curve(high_entropy)(r, A, mu)
        return weights

    def curve(self, high_entropy: bool = False) -> Curve:
        """Return the weight of one token, less that of the KL term, as a curve: it calls the
        loss when it is asked for points.

        Args:
            high_entropy: the token is before another one, of ratio 1 and half the
                entropy; else it is alone.
        """

        def weights_in_one_batch(r: Any, A: Any, mu: Any) -> np.ndarray:
            """Return the weights of points that are responses of one batch."""
            batch = self.loss.visible_batch(
                (two_token_batch if high_entropy else single_token_batch)(A, r, mu)
            )
            return (self.gradient(batch) - self.kl_weights(batch))[:, 0].numpy()

        def weight(r: Any, A: Any, mu: Any) -> np.ndarray:
            """Return the weight at each point, with few enough points in one batch."""
            at_once = 1 if self.batch_coupled else AT_ONCE
            return in_parts(weights_in_one_batch, at_once, r, A, mu)

        curve = Curve(
            self.loss.name, weight, reads_mu=True, batch_coupled=self.batch_coupled
        )
        if self.case.single:
            return curve.in_float32()
        return replace(curve, floor=100 * self.case.tol)

    def gradient(self, batch: Rollouts) -> Tensor:
        """Measure the weights on any batch.

        Args:
            batch: the batch.

        Returns:
            [B, T].
        """
        return (
            self.case.gradient(batch)
            / self.case.factors(batch, self.agg or "token-mean")
            / self.scale
        )

    def accepts(self, batch: Rollouts) -> bool:
        """Tell whether the loss takes advantages of tokens, and has a finite gradient on a
        batch.

        Args:
            batch: a batch whose advantages differ within a response.
        """
        try:
            return self.loss.adv_shape == "BT" and bool(
                self.case.gradient(self.case.ready(batch)).isfinite().all()
            )
        except InputError:
            return False

    def kl_weights(self, batch: Rollouts) -> Tensor:
        """Compute dKL/dlp of each token, times -beta.

        Args:
            batch: the batch.

        Returns:
            [B, T].
        """
        if not self.beta:
            return torch.zeros_like(batch.logp)
        return torch.where(batch.mask, -self.beta * term_slope(self.kl, batch), 0)

    @property
    def tol(self) -> float:
        return self.case.tol

    @property
    def resolution(self) -> float:
        """How near to a bound the two sides are still told apart, relative to r."""
        return max(abs(e) for e in self.case.edges)

    def beside(self) -> "BlackBox":
        """Return a black box with both sides of every jump at the end of the curve.

        Returns:
            A black box with these points behind the others, and their weights.
        """
        n = len(self.points) - self.sides
        sides = [
            jump._replace(r=jump.r * (1 + sign * self.resolution))
            for jump, _ in self.jumps
            for sign in (-1, 1)
        ]
        weights = np.r_[self.weights[:n], self.ask(sides)]
        return replace(
            self, points=(*self.points[:n], *sides), sides=len(sides), weights=weights
        )

    def unscaled(self) -> "BlackBox":
        """Return a black box in which the scale is a part of the weights."""
        scale = self.scale
        return replace(
            self,
            scale=1.0,
            weights=self.weights * scale,
            jumps=tuple((point, middle * scale) for point, middle in self.jumps),
        )

    def loosened(self, near: float) -> "BlackBox":
        """Return a black box whose points are no nearer to a bound than a distance.

        Args:
            near: the relative distance.
        """
        return replace(self, case=replace(self.case, edges=(-near, near))).beside()

    def bounds(self, A: float) -> list[float]:
        """Return the ratios at which the weight of a rare token jumps at this A, without
        those where it fades.

        Args:
            A: the advantage.

        Returns:
            Ratios, ascending.
        """
        of_rare_tokens = [
            jump
            for jump, _ in self.jumps
            if not jump.high_entropy and jump.mu not in MUS
        ]
        return sorted(
            jump.r for jump in of_rare_tokens if jump.A == A and jump not in self.faded
        )


def low_probability_point(A: float, r: float, high_entropy: bool = False) -> Point:
    """Return a token of the ratio r whose probabilities are low enough for it.

    Args:
        A: the advantage.
        r: the ratio.
        high_entropy: whether a second token of half its entropy is beside it.
    """
    return Point(A, float(r), float(mu_of(r)), high_entropy)


def measure(loss: Loss, batch_coupled: bool | None = None) -> BlackBox:
    """Measure everything that BlackBox has, by a few hundred small batches.

    Args:
        loss: as read.
        batch_coupled: whether the caller needs a loss whose tokens are coupled, or one
            whose tokens are not: a loss of the other kind gets no curve. None: every
            loss gets one.

    Raises:
        InputError: the loss cannot be run, or has no finite gradient on policy.
    """
    case = make_case(loss, no_objective(), {})
    on_policy = measure_on_policy(case)
    batch = case.ready(on_policy_batch())
    gradient = on_policy.found
    if not (gradient[batch.mask].isfinite().all() and gradient[batch.mask].any()):
        if gradient[batch.mask].isfinite().all():
            why = "no gradient"
        else:
            why = "a gradient that is not finite"
        raise InputError(
            f"{loss.name} has {why} on a good batch (π_θ = π_old, finite log-probabilities)."
        )
    far_batch = replace(
        batch,
        logp=batch.logp
        - 0.4 * (1 + torch.arange(batch.mask.numel()).reshape(batch.mask.shape).sin()),
    )
    random = black_box.gives_two_answers(case.gradient, far_batch)
    fewer = measure_on_policy(case, FEWER_ROWS)
    agg, scale = _measured_aggregation(case, [on_policy, fewer])
    box = BlackBox(case, agg, scale, random=random)
    # the gradient of k1 does not depend on the reference
    estimators = kl.ESTIMATORS if "logp_ref" in loss.reads else ["k1"]
    box = replace(box, **_find_kl_term(box, batch, estimators))
    coupled = not random and black_box.is_coupled(box.curve(), SIGNS, box.tol)
    box = replace(box, batch_coupled=coupled)
    reads_mu = black_box.reads_old_probability(box.curve(), SIGNS, MUS, box.tol)
    entropy = "entropy" in loss.reads and black_box.reads_entropy(case.gradient)
    box = replace(box, reads_mu=reads_mu, reads_entropy=entropy)
    return _with_curve(box) if batch_coupled in (None, coupled) else box


def _measured_aggregation(
    case: LossCase, measured: list[OnPolicy]
) -> tuple[str, float]:
    """Return the aggregation that leaves one number on each sign of A, and that number
    where both signs share it, else 1; "" and 1 where none does. Of several, one that
    leaves 1 on a sign goes first, then one that leaves one number on both signs.
    """
    fits: list[FittingAggregation] = []
    for name in sorted(names(""), key=lambda n: n not in AGGREGATIONS):
        multiples_by_sign = [
            torch.cat([measurement.multiples(name, A) for measurement in measured])
            for A in SIGNS
        ]
        if not all(map(_is_one_number, multiples_by_sign)):
            continue
        if not all(multiples.isfinite().all() for multiples in multiples_by_sign):
            continue
        with_gradient = [
            multiples for multiples in multiples_by_sign if multiples.any()
        ]
        factors = [multiples.mean().item() for multiples in with_gradient] or [1.0]
        signs_agree = max(factors) - min(factors) <= SAME_FACTOR * abs(factors[0])
        unit_factor = next((factor for factor in factors if is_one(factor)), None)
        if unit_factor is not None:
            # 1 on one sign: the scale is 1, and the other sign's weights are wrong
            scale = unit_factor
        elif signs_agree:
            scale = factors[0]
        else:
            scale = 1.0
        fits.append(
            FittingAggregation(
                has_no_unit=unit_factor is None,
                signs_differ=not signs_agree,
                place=len(fits),
                name=name,
                scale=scale,
            )
        )
    if not fits:
        return "", 1.0
    best = min(fits)
    is_rounding = abs(best.scale - 1) < min(SAME_FACTOR, case.tol)
    return best.name, 1.0 if is_rounding else best.scale


class FittingAggregation(NamedTuple):
    """An aggregation that leaves one number on each sign of A. The least is the best:
    what leaves 1 on a sign, then what leaves one number on both, then the earlier one.

    Attributes:
        has_no_unit: it leaves 1 on no sign.
        signs_differ: it leaves two numbers.
        place: among those that fit, in the order in which they are tried.
        name: of the aggregation.
        scale: the number that it leaves; 1 where the two signs share none.
    """

    has_no_unit: bool
    signs_differ: bool
    place: int
    name: str
    scale: float


def _is_one_number(multiples: Tensor) -> bool:
    """Return whether these multiples are one number. All 0 is one too, of a sign of A
    without a gradient, which `common_value` does not take for one.
    """
    return common_value(multiples) is not None or bool(multiples.abs().max() <= 1e-9)


def termed(box: BlackBox) -> BlackBox | None:
    """Return a black box from which a KL term of an unusual form is subtracted; None
    where there is none.

    Args:
        box: the loss without that.
    """
    if box.kl or box.random:
        kl_term = {}
    else:
        kl_term = _find_kl_term(
            box, box.case.ready(on_policy_batch()), possible_terms("", box.loss.reads)
        )
    return _with_curve(replace(box, **kl_term)) if kl_term else None


def _find_kl_term(
    box: BlackBox, batch: Rollouts, among: Iterable[str]
) -> dict[str, Any]:
    """Return the KL term and its coefficient as fields of BlackBox, {} where there is
    none; of several that fit, the last. With A = 0 nothing else is left of the gradient.
    """
    # a term in log r is none
    unevenness = (
        torch.arange(batch.mask.numel(), dtype=batch.logp.dtype)
        .reshape(batch.mask.shape)
        .cos()
    )
    batch = replace(batch, logp=batch.logp - 0.2 - 0.1 * unevenness)
    gradient_without_advantage = gradient_at_zero_advantage(box.gradient, batch)
    gradient = gradient_without_advantage[batch.mask]
    kl_term: dict[str, Any] = {}
    if not gradient.abs().max() > 0:
        return kl_term
    for name in among:
        slope = term_slope(name, batch)[batch.mask]
        beta = term_coefficient(gradient, slope)
        if (gradient + beta * slope).abs().max() <= max(
            1e-6, box.tol
        ) * gradient.abs().max():
            kl_term = {"kl": name, "beta": beta}
    return kl_term


def _point_at(r: float, A: float, mu: float | None, high_entropy: bool) -> Point:
    """Return a point at this ratio; mu None: its token has a low probability."""
    if mu is None:
        return low_probability_point(A, r, high_entropy)
    return Point(A, float(r), mu, high_entropy)


def _with_curve(box: BlackBox) -> BlackBox:
    """Return a black box with the weight on a grid of ratios, and with every jump and the
    points on its two sides: for both signs of A, and again at other π_old, or beside
    another token, where the weight depends on that. A random loss gets no jumps.
    """
    # fewer ratios where the weight depends on the batch: each costs a call
    grid = np.exp(MANY_LOG_R[:: 3 if box.batch_coupled else 1])
    lines: list[tuple[float, float | None, bool]] = [(A, None, False) for A in SIGNS]
    lines += [(A, mu, False) for A in SIGNS for mu in MUS] if box.reads_mu else []
    lines += [(A, None, True) for A in SIGNS] if box.reads_entropy else []
    points: list[Point] = []
    jumps: list[tuple[Point, float]] = []
    faded: set[Point] = set()
    for A, mu, high_entropy in lines:
        ratios = grid if mu is None else grid[mu * grid < MOST_LIKELY]
        point_at = partial(_point_at, A=A, mu=mu, high_entropy=high_entropy)
        points += [point_at(r) for r in ratios]
        if box.random:
            continue
        for jump in box.curve(high_entropy).jumps(A, mu, ratios):
            at_jump = point_at(jump.r)
            jumps.append((at_jump, (jump.below + jump.above) / 2))
            if max(abs(jump.below), abs(jump.above)) < FADED_WEIGHT:
                faded.add(at_jump)
    jump_points = [point for point, _ in jumps]

    def line_of(point: Point) -> tuple[float, bool, bool]:
        """Return what two points of one curve share; all π_old of MUS are one curve."""
        return (point.A, point.mu in MUS, point.high_entropy)

    def is_off_bound(point: Point, jump_point: Point) -> bool:
        """Tell whether a point is on another curve than a jump, or not near it."""
        if line_of(point) != line_of(jump_point):
            return True
        return abs(point.r / jump_point.r - 1) > box.resolution

    # leave out points on a bound: rounding decides their side
    points = [
        point
        for point in points
        if all(is_off_bound(point, jump_point) for jump_point in jump_points)
    ]
    return replace(
        box,
        points=tuple(points),
        weights=box.ask(points),
        jumps=tuple(jumps),
        faded=frozenset(faded),
    ).beside()


# ---- batches ------------------------------------------------------------------------
Token = tuple[float, float, float]  # A, π_old, r


@dataclass(frozen=True)
class Measured:
    """A batch and the gradient of the loss on it.

    Attributes:
        batch: the batch.
        advantages_differ: the tokens of a response have advantages of their own.
        gradient: dJ/dlp of the loss, [B, T].
    """

    batch: Rollouts
    advantages_differ: bool
    gradient: Tensor


def measure_batches(box: BlackBox) -> list[Measured]:
    """Measure the loss on a batch of tokens, on batches of responses (their log-ratio
    is a mean, and a sum), and on random ones. A loss that takes advantages of tokens is
    measured on a batch of tokens that has them, too.

    Args:
        box: the loss, measured on single tokens.

    Returns:
        In this order; the batch with advantages of tokens comes before the random ones.
    """
    rng = np.random.default_rng(0)
    tokens = _tokens_to_measure(box)
    tokens = [tokens[i] for i in rng.permutation(len(tokens))]
    # the bounds of a response's ratio do not depend on mu
    fewer = [(A, mu, r) for A, mu, r in tokens if mu not in MU[1:] and r < 60]
    batches = [make_batch(tokens, "token", True, rng)]
    batches += [make_batch(fewer, level, True, rng) for level in REDUCE]
    with_own_advantages = make_batch(tokens, "token", False, rng)
    # (batch, whether the advantages of a response differ)
    in_order = [(batch, False) for batch in batches]
    if box.accepts(with_own_advantages):
        in_order.append((with_own_advantages, True))
    for _ in range(RANDOM_BATCHES):
        in_order.append((random_batch(rng, one_adv=True), False))
    ready = [(box.case.ready(batch), differs) for batch, differs in in_order]
    return [
        Measured(batch, differs, box.case.gradient(batch)) for batch, differs in ready
    ]


def _tokens_to_measure(box: BlackBox) -> list[Token]:
    """Return tokens (A, π_old, r) of every ratio of the grid, and beside every jump of the
    weight. Ratios on a bound are left out: there rounding decides, and so does torch's
    clamp. So are tokens whose π_θ = π_old r would be nearly 1 or more.
    """
    jumps = [point for point, _ in box.jumps if not point.high_entropy]
    on_grid = product(GRID_ADVANTAGES, MU, np.exp(LOG_R))
    tokens = [(A, mu, float(r)) for A, mu, r in on_grid]
    for jump in jumps:
        of_same_sign = [A for A in GRID_ADVANTAGES if A * jump.A > 0]
        beside = (jump.r * (1 - box.resolution), jump.r * (1 + box.resolution))
        probabilities = [jump.mu] if box.reads_mu else MU
        for A, r, mu in product(of_same_sign, beside, probabilities):
            tokens.append((A, mu, r))
    bounds = [] if box.reads_mu else [jump.r for jump in jumps]
    nearest = 0.9 * box.resolution  # the tokens beside a jump are farther from it

    def is_on_bound(r: float) -> bool:
        """Return whether a ratio is on one of the bounds."""
        return any(abs(r / bound - 1) < nearest for bound in bounds)

    return [
        (A, mu, r)
        for A, mu, r in tokens
        if mu * r < NEARLY_CERTAIN and not is_on_bound(r)
    ]
