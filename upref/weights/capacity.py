# SPDX-License-Identifier: Apache-2.0
"""Probability Capacity (fan2026up, Sec. 3.3 and App. B), read off the gradient weight
of any objective.

    Cap(p, mu) = |p* - p|,    p* = the first probability, from p in the direction of the update (up for A > 0, down
                              for A < 0), from which on dJ/dlp = 0; 1 or 0 where there
                              is none

The paper's closed forms (Eq. 11, 1 - p for UP, Eq. A3) are consequences, and tests.
What Cap is not: a bound on where the policy can go. It says how far a token is carried
by its own gradient, all else fixed; one large step overshoots it, and other tokens'
gradients, momentum and shared parameters move a token whose own gradient is 0.

At a breakpoint the weight is read 1e-12 of r ahead of p, so that rounding in p/mu does
not matter: Cap = 0 at r = 1+ε_high (Eq. 11) and at r = 1-ε_low; at r = c the token is
still alive (Eq. A3 includes its end). At p = 0 and mu = 0 the limit is meant. At A = 0
there is no update: Cap = 0 (the paper's A <= 0 means A < 0).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from upref.errors import InputError
from upref.registry import Objective
from upref.weights.curve import Curve, make_curve

FADED_MU = 0.01  # π_old of a token whose ratio may grow to 100
FADED_WEIGHT = 1e-3  # of that at r = 1: a smaller weight at that ratio has faded
TINY = 1e-30  # stands for probability 0


def capacity(
    objective: "str | Objective | Curve | Callable[..., Tensor]",
    pi: Any,
    pi_old: Any,
    adv: Any = 1.0,
    **hp: Any,
) -> np.ndarray:
    """Compute Cap: how far the probability pi can move with the update before its own
    gradient vanishes.

    Args:
        objective: a registered name, an Objective, any loss (as for `upref.check`) or
            its name, or the Curve of one.
        pi: p = π_θ(o_t), probabilities in [0, 1].
        pi_old: mu = π_old(o_t), probabilities in [0, 1].
        adv: advantage A. pi, pi_old and adv broadcast.
        **hp: the objective's hyperparameters, or the loss's own keywords. A KL term
            does not count.

    Returns:
        A float64 array of the broadcast shape, in units of probability, to 1e-9 or
        better.

    Raises:
        InputError: a value is no probability, A is not finite, the objective has no
            weight of a single token (m2po, aspo_code), or the loss cannot be called or
            has no finite gradient.

    The paper leaves Cap open at level "sequence_mean"; this is our definition. All
    tokens of a response get one gradient in log space, so follow p̄ = exp(mean_t lp),
    the geometric-mean probability, under a common shift of all lp: then pi = p̄, pi_old
    = p̄_old and the same formula holds. One token that moves alone goes further:
    `own_token_bound`. At level "sequence_product", pi is the probability of the whole
    response. Of any other loss whose weight depends on the other tokens of the response,
    Cap is that of a response of one token.

    A dead band narrower than the scan (2 % of r in 1e-3..1e3, finer near 1) may be
    missed. Only a cut ends a token's room. A weight that fades without one (SAPO, a
    tanh) counts as nonzero everywhere, also where float64 rounds it to 0: its Cap is
    that of an objective without a clip, however small the weight.
    """
    p, mu, A = _checked_points(pi, pi_old, adv)
    shape = p.shape
    p = p.ravel()
    mu = np.maximum(mu.ravel(), TINY)
    A = A.ravel()
    curve = _toward_the_update(make_curve(objective, **hp))
    points = np.stack([mu if curve.reads_mu else np.ones_like(mu), A], 1)
    pairs, pair_of_point = np.unique(points, axis=0, return_inverse=True)
    pair_of_point = pair_of_point.ravel()
    ends, alive_below_all = curve.ends(pairs[:, 1], pairs[:, 0])
    r = np.maximum(p, TINY) / mu
    moves_up = A > 0
    step_ahead = np.where(moves_up, 1 + curve.rtol_ratio, 1 - curve.rtol_ratio)
    r_ahead = np.minimum(r * step_ahead, 1 / mu)
    # each end turns the weight from 0 to another number, or back
    ends_passed = (ends[pair_of_point] < r_ahead[:, None]).sum(1)
    even_ends_passed = ends_passed % 2 == 0
    alive_here = alive_below_all[pair_of_point] == even_ends_passed
    # 0 below all ends and inf above them, so that each point is between two
    ends = np.pad(ends, ((0, 0), (1, 1)), constant_values=((0, 0), (0, np.inf)))
    end_below = ends[pair_of_point, ends_passed]
    end_above = ends[pair_of_point, ends_passed + 1]
    vanishing_probability = np.minimum(np.where(moves_up, end_above, end_below) * mu, 1)
    cap = np.where(moves_up, vanishing_probability - p, p - vanishing_probability)
    # no more than a bound times TINY, which stands for a probability of 0
    cap = np.where(cap < 1e9 * TINY, 0, cap)
    return np.where(alive_here & (A != 0), cap, 0).reshape(shape)


def words_for_fading(curves: Sequence[Curve]) -> str:
    """Say which weights fade where A > 0, without a cut that would end the room: at the
    ratio 100 they are below FADED_WEIGHT of that at 1.

    Args:
        curves: of a token by itself.

    Returns:
        A line without its end; "" where there is no such curve.
    """
    far = 1 / FADED_MU
    names = [
        curve.name
        for curve in curves
        if abs(float(curve(far, 1.0, FADED_MU)))
        < FADED_WEIGHT * abs(float(curve(1.0, 1.0, FADED_MU)))
        and capacity(curve, FADED_MU, FADED_MU) == 1 - FADED_MU
    ]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: the weight fades without a cut, and Cap counts only cuts "
        "(see `upref weights`)"
    )


def _toward_the_update(curve: Curve) -> Curve:
    """Return the curve with weight 0 where its weight does not have the sign of A. There
    a penalty pulls the token back, so the update carries it no further.
    """

    def weight(r: Any, A: Any, mu: Any) -> np.ndarray:
        """Return the curve's weight where it has the sign of A, else 0."""
        w = curve.weight(r, A, mu)
        return np.where(w * A > 0, w, 0)

    return replace(curve, weight=weight)


def own_token_bound(
    pi_old: Any,
    eps_high: Any,
    length: Any,
    log_ratio_of_others: Any = 0.0,
) -> np.ndarray:
    """Return the p up to which one token that moves alone (A > 0) keeps its gradient
    under GSPO: min(1, mu (1+ε_high)^T / Π_{others} r).

    The sequence bound s <= 1+ε_high solved for one token of length = T;
    log_ratio_of_others = Σ_{others} log r.

    Args:
        pi_old: probabilities under the old policy.
        eps_high: ε_high; the upper bound of the clip is 1 + ε_high.
        length: T, in tokens.
        log_ratio_of_others: in nats.

    Returns:
        Probabilities, of the shape that the arguments broadcast to.
    """
    log_r = length * np.log1p(eps_high) - log_ratio_of_others
    return np.minimum(1, np.asarray(pi_old) * np.exp(np.minimum(log_r, 700)))


def _checked_points(pi: Any, pi_old: Any, adv: Any) -> list[np.ndarray]:
    """Return the three arguments as arrays that broadcast. Raise InputError where they
    are no probabilities or no advantages.
    """
    points = []
    for name, given in (("pi", pi), ("pi_old", pi_old), ("adv", adv)):
        try:
            if isinstance(given, Tensor):
                numbers = np.asarray(given.detach().cpu().double())
            else:
                numbers = np.asarray(given, dtype=float)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            # OverflowError: 10**400; RuntimeError: a tensor without data
            raise InputError(
                f"{name} must be numbers, got {type(given).__name__}."
            ) from None
        if name == "adv":
            is_bad = ~np.isfinite(numbers)
            requirement = "an advantage is finite"
        else:
            is_bad = ~((numbers >= 0) & (numbers <= 1))
            requirement = "a probability is in [0, 1] (is it a logarithm?)"
        if is_bad.any():
            raise InputError(f"{name} is {numbers[is_bad].flat[0]:g}: {requirement}.")
        points.append(numbers)
    try:
        return list(np.broadcast_arrays(*points))
    except ValueError:
        shapes = ", ".join(str(numbers.shape) for numbers in points)
        raise InputError(
            f"pi, pi_old and adv have shapes {shapes}, which do not broadcast."
        ) from None
