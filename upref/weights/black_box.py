# SPDX-License-Identifier: Apache-2.0
"""A loss as a black box: each property that its gradients alone show, measured by one
function.

`check`, `identify`, weights and Cap call these functions with batches and tolerances of
their own, so they mean the same by a property. A loss is a function `gradient` from a
batch to dJ/dlp, [B, T], or a function `weights` from (r, A, mu) to the weights of
responses of one token, all in one batch.

What stays apart, and why:

* The aggregation and its factor are read off in upref.verify.measure (`OnPolicy`).
  Weights and Cap need neither: they divide by what one token has alone in its batch.
  `check` compares with the objective's weights, which may be 0 on policy; `identify`
  has no objective yet, and compares with A.
* For an aggregation that it does not recognize, `identify` cannot divide it out, and
  takes the tokens for coupled. Weights and Cap draw such a loss.
* `identify` names a KL term by its form, and takes it out whatever the loss reads.
  Weights and Cap take out what is left at A = 0 of a loss that reads the reference
  policy; any other bonus or penalty is part of the weight that they draw.
* `identify` measures coupling at |A| = 1, where advantages that are divided by their size
  couple no tokens, because it names that as a fault. Weights and Cap use other sizes
  too.
* `identify` tries two values of π_old, which suffice for the objectives that read it. A
  Cap map has all values, so weights and Cap try rare tokens too.
* upref.verify.oracles.state reports since which call a loss gives other answers, and
  whether a seed decides them; `gives_two_answers` tells only that it does.
* A training step shows gradients of parameters: upref.step.explain.weights solves for the
  weights of its tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts

Gradient: TypeAlias = Callable[[Rollouts], Tensor]
Weights: TypeAlias = Callable[[Any, Any, Any], np.ndarray]

SIGNS = (1.0, -1.0)
# in nats, on both sides of the thresholds that losses have
ENTROPIES = (0.01, 0.1, 0.3, 0.6, 1.0, 1.5, 3.0, 6.0)
# tokens that a loss gets in one call: a wrong [B] - [B, 1] in it makes 8 MB
AT_ONCE = 1000
# log r of a few tokens and of many others, on nobody's bound
FEW_LOG_R = np.array([-1, -0.1, *np.geomspace(0.03, 3, 12)])
MANY_LOG_R = np.unique(
    np.r_[
        np.linspace(-8, 8, 49), np.outer((-1, 1), np.geomspace(1e-6, 0.3, 25)).ravel()
    ]
)
# log r of tokens of every probability
MIDDLE_LOG_R = np.linspace(-3, 3, 41) + 0.0123
MOST_LIKELY = 0.99  # no token that is compared has a larger probability
# of the token of a response whose ratio and probability are changed
OTHER_RATIOS = np.exp([-3.0, -1.0, -0.3, -0.05, 0.05, 0.3, 1.0, 3.0])
MU_OF_OTHER = 0.02
SMALLEST_WEIGHT = 1e-3  # of the largest one: less is not compared any closer
ALONE_STEP = 5  # of so many of the few tokens, one is measured alone too


# ---- tokens by themselves ------------------------------------------------------------
def low_probability(r: Any) -> np.ndarray:
    """Return π_old of a low-probability token whose ratio is r: 0.02, or less where the
    ratio is above 45.

    Args:
        r: ratios.

    Returns:
        Probabilities mu with mu r <= 0.9.
    """
    return np.minimum(0.02, 0.9 / r)


def single_token_batch(A: Any, r: Any, mu: Any) -> Rollouts:
    """Make a response of one token for each (A, r, mu) of flat arrays; π_ref = π_θ.

    Args:
        A, r, mu: numbers or arrays [n], which broadcast.

    Returns:
        A batch [n, 1] in float64.
    """
    A, r, mu = (
        torch.tensor(numbers, dtype=torch.float64)[:, None]
        for numbers in np.broadcast_arrays(A, r, mu)
    )
    lp = (mu.log() + r.log()).clamp(max=0)
    return Rollouts(
        lp,
        mu.log(),
        A,
        torch.ones_like(A, dtype=torch.bool),
        logp_ref=lp,
        entropy=torch.ones_like(A),
    )


def two_token_batch(A: Any, r: Any, mu: Any) -> Rollouts:
    """Make `single_token_batch` with a second token of ratio 1 and half the entropy in
    each response.

    Args:
        A, r, mu: of the first tokens, numbers or arrays [n].

    Returns:
        A batch [n, 2].
    """
    batch = single_token_batch(A, r, mu)
    lp = torch.cat([batch.logp, batch.logp_old], 1)
    old = torch.cat([batch.logp_old, batch.logp_old], 1)
    adv = torch.cat([batch.adv, batch.adv], 1)
    mask = torch.ones_like(lp, dtype=torch.bool)
    H = torch.tensor([2.0, 1.0], dtype=lp.dtype)
    return Rollouts(lp, old, adv, mask, logp_ref=lp, entropy=H.expand_as(lp).clone())


def in_parts(weights: Weights, at_once: int, r: Any, A: Any, mu: Any) -> np.ndarray:
    """Measure the weights of many tokens, a bounded number in each batch.

    Args:
        weights: the weights of the tokens of one batch, from flat arrays.
        at_once: the largest number of tokens in one batch.
        r, A, mu: arrays that broadcast.

    Returns:
        The weights, of the shape that the arguments broadcast to.
    """
    points = np.broadcast_arrays(r, A, mu)
    columns = [column.ravel() for column in points]
    starts = range(0, len(columns[0]), at_once)
    parts = [
        weights(*(column[start : start + at_once] for column in columns))
        for start in starts
    ]
    # no tokens, no part: the empty column has the type of the weights
    return np.concatenate(parts or [columns[0]]).reshape(points[0].shape)


# ---- comparing -----------------------------------------------------------------------
def relative_error(
    found: Any,
    expected: Any,
    beside: Any = 0.0,
    floor: float | Tensor = 0.1,
) -> Tensor:
    """Compute |found - expected| relative to |expected|, |beside| or the floor,
    whichever is largest; inf where the result is NaN.

    Args:
        found, expected, beside: tensors or arrays of one shape.
        floor: the least divisor.

    Returns:
        The shape of the inputs.
    """
    found, expected, beside, floor = map(
        torch.as_tensor, (found, expected, beside, floor)
    )
    scale = torch.maximum(torch.maximum(expected.abs(), beside.abs()), floor)
    return ((found - expected).abs() / scale).nan_to_num(nan=torch.inf)


def differ(x: np.ndarray, y: np.ndarray, tol: float) -> bool:
    """Tell whether some pair of weights differs, relative to the larger one.

    Args:
        x: weights.
        y: weights of the same shape.
        tol: the relative error that is allowed.

    Returns:
        True if one pair differs by more, or is not a number.
    """
    return bool((relative_error(x, y, x) > tol).any())


def same_numbers(x: Tensor, y: Tensor) -> bool:
    """Tell whether two gradients are the same to the last bit; NaN is equal to NaN.

    Args:
        x, y: of one shape.

    Returns:
        True if all numbers are the same.
    """
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


# ---- properties of a gradient --------------------------------------------------------
def gradient_at_zero_advantage(gradient: Gradient, batch: Rollouts) -> Tensor:
    """Measure the part of a gradient that does not depend on A, such as a KL term's.

    Args:
        gradient: of the loss.
        batch: the batch, whose advantages are replaced by 0.

    Returns:
        [B, T].

    Raises:
        InputError: the loss refuses A = 0.
    """
    return gradient(replace(batch, adv=torch.zeros_like(batch.adv)))


def part_with_advantage(gradient: Gradient, batch: Rollouts) -> Tensor:
    """Measure the part of a gradient that depends on A.

    Args:
        gradient: of the loss.
        batch: the batch.

    Returns:
        [B, T]: the gradient less that at A = 0; the whole gradient where that at A = 0
        is not finite, or the loss refuses A = 0.
    """
    whole = gradient(batch)
    try:
        without_advantage = gradient_at_zero_advantage(gradient, batch)
    except InputError:  # an oracle reports a loss that refuses A = 0
        return whole
    if without_advantage.isfinite().all() and without_advantage.any():
        return whole - without_advantage
    return whole


def computes_in_float32(gradient: Gradient, batch: Rollouts) -> bool:
    """Tell whether a gradient carries only the digits of float32, at advantages and
    ratios that have more.

    Args:
        gradient: of the loss.
        batch: a batch in float64, whose advantages and ratios are moved a little.

    Returns:
        True if each number of the gradient is one of float32, and not all are 0.
    """
    slot_numbers = torch.arange(batch.mask.numel(), dtype=batch.logp.dtype).reshape(
        batch.mask.shape
    )
    A = batch.adv * (1 + 0.1 * slot_numbers[:, :1].sin())
    logp = batch.logp - 1e-3 * (1.1 + slot_numbers.cos())
    moved = replace(batch, logp=logp, adv=A)
    found = gradient(moved)[batch.mask]
    return bool((found != 0).any() and torch.equal(found.float().double(), found))


def gives_two_answers(gradient: Gradient, batch: Rollouts) -> bool:
    """Tell whether three calls on the same batch give two gradients.

    Args:
        gradient: of the loss.
        batch: the batch.

    Returns:
        True for a loss that draws random numbers, or counts its calls.
    """
    first = gradient(batch)
    return any(not same_numbers(gradient(batch), first) for _ in range(2))


def reads_entropy(gradient: Gradient) -> bool:
    """Tell whether the weight of a token depends on its entropy.

    Args:
        gradient: of a loss that takes the entropy.

    Returns:
        True if one of ENTROPIES gives another gradient.
    """
    ratios = np.exp(np.linspace(-1.5, 1.5, 301))
    r, A = (column.ravel() for column in np.meshgrid(ratios, SIGNS))
    batch = two_token_batch(A, r, low_probability(r))
    found = gradient(batch)
    for entropy in ENTROPIES:
        of_all = replace(batch, entropy=torch.full_like(batch.logp, entropy))
        if not torch.allclose(found, gradient(of_all), rtol=1e-6, atol=0):
            return True
    return False


def reads_other_tokens(
    gradient: Gradient, advantages: Sequence[float], tol: float
) -> bool:
    """Tell whether the weight of a token depends on the other tokens of its response.

    One token of each response gets another ratio, or another probability, and the
    gradient of the other one is compared: of the first, and of the second. The
    aggregation is not divided out, so a factor that the responses share counts as a
    dependence too.

    Args:
        gradient: of a loss whose weights do not depend on other responses.
        advantages: of the tokens.
        tol: weights with a smaller relative difference count as equal.

    Returns:
        True if some weight is another one beside another token.
    """
    columns = np.meshgrid(np.exp(MIDDLE_LOG_R), advantages)
    r, A = (column.ravel() for column in columns)
    batch = two_token_batch(A, r, low_probability(r))
    lp, old = batch.logp, batch.logp_old

    def weights_beside(ratio: float, mu: float, column: int) -> Tensor:
        """Return the gradients of these tokens, in the first or second column (0, 1),
        beside others of this ratio and old probability, [n].
        """
        other = 1 - column
        logp, lp_old = (x.flip(1) if column else x.clone() for x in (lp, old))
        lp_old[:, other] = np.log(mu)
        logp[:, other] = np.log(mu * ratio)
        changed = batch.but(logp=logp, logp_old=lp_old, logp_ref=logp)
        return gradient(changed)[:, column].double()

    others = [(float(ratio), MU_OF_OTHER) for ratio in OTHER_RATIOS]
    for column in (0, 1):
        beside_same = weights_beside(1.0, MU_OF_OTHER, column)
        floor = SMALLEST_WEIGHT * beside_same.abs().max()
        for ratio, mu in [*others, (1.0, MOST_LIKELY)]:
            found = weights_beside(ratio, mu, column)
            error = relative_error(found, beside_same, found, floor)
            if (error > 10 * tol).any():
                return True
    return False


# ---- properties of the weights of single tokens --------------------------------------
def is_coupled(weights: Weights, advantages: Sequence[float], tol: float) -> bool:
    """Tell whether the weight of a token depends on the other responses of its batch.

    Args:
        weights: of responses of one token, all in one batch.
        advantages: of the tokens, in several sizes: at one size alone, a loss that
            divides the advantages by their size seems not to be coupled.
        tol: weights with a smaller relative difference count as equal.

    Returns:
        True if some tokens have other weights beside many tokens, or alone, than beside
        a few.
    """
    few_tokens = _low_probability_tokens(FEW_LOG_R, advantages)
    many_tokens = _low_probability_tokens(MANY_LOG_R, advantages)
    all_tokens = [
        np.r_[few, many] for few, many in zip(few_tokens, many_tokens, strict=True)
    ]
    beside_few = weights(*few_tokens)
    beside_many = weights(*all_tokens)[: len(beside_few)]
    if differ(beside_few, beside_many, tol):
        return True
    some_tokens = [column[::ALONE_STEP] for column in few_tokens]
    alone = in_parts(weights, 1, *some_tokens)
    return differ(beside_few[::ALONE_STEP], alone, tol)


def _low_probability_tokens(
    log_r: np.ndarray, advantages: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return r, A and mu of a token for each log-ratio and advantage. Where A < 0 the
    ratio is inverted: then it is also on the side that the update moves it to.
    """
    A = np.repeat(advantages, len(log_r))
    r = np.exp(np.sign(A) * np.tile(log_r, len(advantages)))
    return r, A, low_probability(r)


def reads_old_probability(
    weights: Weights, advantages: Sequence[float], mus: Sequence[float], tol: float
) -> bool:
    """Tell whether the weight of a token depends on mu = π_old beside the ratio.

    Args:
        weights: of responses of one token.
        advantages: of the tokens.
        mus: probabilities under the old policy that are compared with a low one.
        tol: weights with a smaller relative difference count as equal.

    Returns:
        True if some weight is another one at another mu.
    """
    A, mu, r = (
        column.ravel()
        for column in np.meshgrid(advantages, mus, np.exp(MIDDLE_LOG_R), indexing="ij")
    )
    possible = mu * r < MOST_LIKELY
    A, mu, r = A[possible], mu[possible], r[possible]
    return differ(weights(r, A, mu), weights(r, A, low_probability(r)), tol)
