# SPDX-License-Identifier: Apache-2.0
"""Probability Capacity (fan2026up, Sec. 3.3 and App. B), read off the gradient weight of any objective.

    Cap(p, mu) = |p* - p|,    p* = the first probability, from p in the direction of the update (up for A > 0, down
                              for A < 0), from which on dJ/dlp = 0; 1 or 0 where there is none

The paper's closed forms (Eq. 11, 1 - p for UP, Eq. A3) are consequences, and tests. What Cap is not: a bound on where
the policy can go. It says how far a token is carried by its own gradient, all else fixed; one large step overshoots it,
and other tokens' gradients, momentum and shared parameters move a token whose own gradient is 0.

At a kink the weight is looked at a hair (1e-12 of r) ahead of p, so rounding in p/mu does not matter: Cap = 0 at
r = 1+ε_high (Eq. 11) and at r = 1-ε_low; at r = c the token is still alive (Eq. A3 includes its end). At p = 0 and
mu = 0 the limit is meant. At A = 0 there is no update: Cap = 0 (the paper's A <= 0 means A < 0).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.ops import inf
from upref.registry import Objective, get

HAIR = 1e-12  # relative; two kinks of a weight are further apart than that
TINY = 1e-30  # stands for probability 0
ROWS = 512  # pairs (mu, A) mapped at a time

# Where the weight is looked at first: every 26 % of r, every 2 % in [1e-3, 1e3], ever closer towards r = 1.
_NEAR = np.logspace(-12, -1, 111)
_GRID = np.unique(np.r_[np.logspace(-30, 30, 601), np.logspace(-3, 3, 601), 1 - _NEAR, 1, 1 + _NEAR])
_AT_ONE = int(np.searchsorted(_GRID, 1.0))


def capacity(objective: "str | Objective | Callable[..., Tensor]", pi, pi_old, adv=1.0, **hp) -> np.ndarray:
    """Cap: how far the probability pi may still move with the update before its own gradient vanishes.

    objective   a registered name, an Objective, or any loss `(log_prob, old_log_prob, advantages, mask) -> scalar` to
                be minimised, or its name (path/to/file.py:function, package.module:function, verl:loss_mode). A loss
                is called on float64 [N, 1] tensors (a bool mask); its weight is found by autograd.
    pi, pi_old  p = π_θ(o_t) and mu = π_old(o_t), probabilities in [0, 1];    adv   advantage A; they broadcast
    hp          the objective's hyperparameters, or the loss's own keywords; a KL term does not count
    returns     float64 array of the broadcast shape, in units of probability, to 1e-9 or better

    Level "sequence": the paper leaves Cap open there; this is our definition. All tokens of a response get one gradient
    in log space, so follow p̄ = exp(mean_t lp), the geometric-mean probability, under a common shift of all lp: then
    pi = p̄, pi_old = p̄_old and the same formula holds. One token moved alone goes further: `own_token_bound`. Level
    "trajectory": likewise, pi being the probability of the whole response.

    A dead band narrower than the scan (2 % of r in 1e-3..1e3, finer near 1) may be missed. A weight that fades without
    a cut (SAPO) counts as alive where float64 rounds it to 0.
    Raises InputError on anything that is not a probability, on A that is not finite, on objectives whose weight depends
    on the batch or on more than r, A and mu (`obstacle`: m2po, aspo_code), and on a loss without a finite gradient.
    """
    p, mu, A = _points(pi, pi_old, adv)
    shape, (p, mu, A) = p.shape, (p.ravel(), np.maximum(mu.ravel(), TINY), A.ravel())
    weight, reads_mu = weight_of(objective, hp)
    pairs, row = np.unique((mu if reads_mu else 1) + 1j * A, return_inverse=True)  # complex: unique pairs (mu, A)
    cap = np.zeros(len(p))
    with np.errstate(all="ignore"):
        for start in range(0, len(pairs), ROWS):
            here = row // ROWS == start // ROWS
            block = pairs[start : start + ROWS]
            cap[here] = _block(weight, reads_mu, block, row[here] - start, p[here], mu[here], A[here])
    return cap.reshape(shape)


def find(objective: "str | Objective | Callable[..., Tensor]") -> "Objective | Callable[..., Tensor]":
    """The objective of that name, or where the name has a colon the loss at that place; anything else is itself."""
    if isinstance(objective, str) and ":" in objective:
        from upref.check.foreign import named

        return named(objective)
    return get(objective) if isinstance(objective, str) else objective


def name_of(objective: Objective | Callable) -> str:
    return objective.name if isinstance(objective, Objective) else getattr(objective, "__name__", "the loss")


def with_hp(objectives, hp: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Each objective or loss, found by name, with the hyperparameters it takes; InputError for one that none takes."""
    if not objectives:
        raise InputError("name at least one objective.")
    found = [find(o) for o in objectives]
    for key in hp:
        if not any(_takes(o, key) for o in found):
            if len(found) == 1 and isinstance(found[0], Objective):
                found[0].resolve({key: hp[key]})  # says what it has
            raise InputError(f"none of {', '.join(map(name_of, found))} has a hyperparameter {key!r}.")
    return [(o, {k: v for k, v in hp.items() if _takes(o, k)}) for o in found]


def _takes(o, key: str) -> bool:
    if isinstance(o, Objective):
        return key in o.hyperparameters
    parameters = inspect.signature(o).parameters
    return key in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def obstacle(objective: Objective) -> str:
    """Why the weight of a token by itself is not a function of (r, A, mu), so that there is no Cap; "" if it is one."""
    return objective.coupled or ("its clip depends on the token's entropy" if "entropy" in objective.reads else "")


def own_token_bound(pi_old, eps_high, length, log_ratio_of_others=0.0) -> np.ndarray:
    """p up to which one token alone (A > 0) keeps its gradient under GSPO: min(1, mu (1+ε_high)^T / Π_{others} r).

    The sequence bound s <= 1+ε_high solved for one token of length = T; log_ratio_of_others = Σ_{others} log r.
    """
    log_r = length * np.log1p(eps_high) - log_ratio_of_others
    return np.minimum(1, np.asarray(pi_old) * np.exp(np.minimum(log_r, 700)))


def cuts(objective: "str | Objective | Callable[..., Tensor]", mu: float, A: float, **hp) -> np.ndarray:
    """The ratios r, ascending, at which the weight of a token of π_old(o_t) = mu and advantage A turns to 0 or back."""
    weight, reads_mu = weight_of(objective, hp)
    with np.errstate(all="ignore"):
        ends, _ = _scan(weight, reads_mu, np.array([[mu]]), np.array([[A]]), both=True)
    return np.sort(ends[ends >= 0])


def _block(weight, reads_mu, pairs, row, p, mu, A) -> np.ndarray:
    ends, faded = _scan(weight, reads_mu, pairs.real[:, None], pairs.imag[:, None])
    r, up = np.maximum(p, TINY) / mu, A > 0
    ahead = np.minimum(np.where(up, r * (1 + HAIR), r * (1 - HAIR)), 1 / mu)
    alive = (weight(ahead, A, mu) != 0) | faded[row, np.searchsorted(_GRID, ahead).clip(max=len(_GRID) - 1)]
    end = np.where(ends >= 0, ends, inf)[row]
    above = np.where(end >= r[:, None], end, inf).min(1)
    below = np.where(end <= r[:, None], end, 0).max(1)
    goal = np.minimum(np.where(up, above, below) * mu, 1)
    return np.where(alive, np.maximum(np.where(up, goal - p, p - goal), 0), 0)


def _scan(weight, reads_mu, mu, A, both=False) -> tuple[np.ndarray, np.ndarray]:
    """For each row (mu, A): the r where the live weight ends in the direction of the update (both: anywhere), bisected
    to the last bit and padded with -1; and where on the grid it has faded."""
    r = np.broadcast_to(np.minimum(_GRID, 1 / mu if reads_mu else inf), (len(mu), len(_GRID)))
    w = weight(r, A, mu)
    faded = _faded(w)
    live = (w != 0) | faded
    below, above = live[:, :-1], live[:, 1:]
    i, k = (below != above if both else np.where(A > 0, below & ~above, ~below & above)).nonzero()
    inside, outside = np.where(below[i, k], (r[i, k], r[i, k + 1]), (r[i, k + 1], r[i, k]))
    while (((middle := (inside + outside) / 2) != inside) & (middle != outside)).any():
        alive = weight(middle, A[i, 0], mu[i, 0]) != 0
        inside, outside = np.where(alive, middle, inside), np.where(alive, outside, middle)
    nth = np.arange(len(i)) - np.searchsorted(i, i)
    ends = np.full((len(mu), nth.max(initial=0) + 1), -1.0)
    ends[i, nth] = inside
    return ends, faded


def _faded(w) -> np.ndarray:
    """Zeros next to a weight 1e-10 times that at r = 1: rounding put them there, not a cut."""
    faint = (w != 0) & (abs(w) < 1e-10 * abs(w[:, [_AT_ONE]]))
    if not faint.any():
        return faint
    n = w.shape[1]
    left = np.maximum.accumulate(np.where(w != 0, np.arange(n), 0), 1)
    right = np.minimum.accumulate(np.where(w != 0, np.arange(n), n - 1)[:, ::-1], 1)[:, ::-1]
    return (w == 0) & (np.take_along_axis(faint, left, 1) | np.take_along_axis(faint, right, 1))


def weight_of(objective: "str | Objective | Callable[..., Tensor]", hp) -> tuple[Callable, bool]:
    """dJ/dlp of a response of one token, alone in its batch, as a function of numpy (r, A, mu); does mu matter?"""
    objective = find(objective)
    if isinstance(objective, Objective):
        objective.resolve(hp)
        if why := obstacle(objective):
            raise InputError(f"{objective.name} has no weight of a token by itself: {why}.")
        return partial(_known, objective, hp), objective.reads_mu
    if not callable(objective):
        raise InputError(f"capacity needs an objective's name, an Objective or a loss, got {type(objective).__name__}.")
    return partial(_foreign, objective, hp), True


def _known(objective: Objective, hp, r, A, mu):
    if objective.level != "free":
        return objective.weight(r, A, mu=mu, **hp) + 0 * r
    one = np.broadcast_arrays(r, A)  # each point a response of one token
    r, A = (x.reshape(-1, 1) for x in one)
    return objective.weight(r, A, mu=mu, mask=np.ones(r.shape, bool), **hp).reshape(one[0].shape)


def _foreign(loss, hp, r, A, mu):
    r, A, mu = np.broadcast_arrays(r, A, mu)
    tensor = lambda x: torch.tensor(x.reshape(-1, 1), dtype=torch.float64)
    lp, lp_old, adv = tensor(np.minimum(np.log(mu) + np.log(r), 0)), tensor(np.log(mu)), tensor(A)
    if not lp.numel():
        return r
    g = _gradient(loss, hp, lp, lp_old, adv)
    i = g.abs().argmax()
    alone = _gradient(loss, hp, lp[i, None], lp_old[i, None], adv[i, None])[0, 0]  # without the batch's denominator
    return (g if g[i] == 0 else g * (alone / g[i])).numpy().reshape(r.shape)


def _gradient(loss, hp, lp, lp_old, adv) -> Tensor:
    lp = lp.clone().requires_grad_()
    with torch.enable_grad():
        J = loss(lp, lp_old, adv, torch.ones_like(lp, dtype=torch.bool), **hp)
    if isinstance(J, tuple) and J:  # (loss, metrics)
        J = J[0]
    if not (isinstance(J, Tensor) and J.requires_grad and (J.numel() == 1 or J.shape in {lp.shape, lp.shape[:1]})):
        raise InputError("the loss must be one tensor element, or one a token, that depends on log_prob.")
    (g,) = torch.autograd.grad(J.sum(), lp, allow_unused=True)
    if g is None or not g.isfinite().all():
        where = "" if g is None else f" at pi={float(lp.detach().exp()[~g.isfinite()][0]):.3g}"
        raise InputError(f"the loss has no finite gradient in log_prob{where}.")
    return 0 - g  # not -0


def _points(pi, pi_old, adv) -> list[np.ndarray]:
    points = []
    for name, x in (("pi", pi), ("pi_old", pi_old), ("adv", adv)):
        try:
            x = np.asarray(x.detach().cpu().double() if isinstance(x, Tensor) else x, dtype=float)
        except (TypeError, ValueError):
            raise InputError(f"{name} must be numbers, got {type(x).__name__}.") from None
        bad = ~np.isfinite(x) if name == "adv" else ~((x >= 0) & (x <= 1))
        if bad.any():
            want = "an advantage is finite" if name == "adv" else "a probability is in [0, 1] (is it a logarithm?)"
            raise InputError(f"{name} is {x[bad].flat[0]:g}: {want}.")
        points.append(x)
    try:
        return list(np.broadcast_arrays(*points))
    except ValueError:
        shapes = ", ".join(str(x.shape) for x in points)
        raise InputError(f"pi, pi_old and adv have shapes {shapes}, which do not broadcast.") from None
