# SPDX-License-Identifier: Apache-2.0
"""The expected gradient of a loss, an advantage or a KL term: a sum over all groups of
responses, which are drawn independently from one policy.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from upref.maximization.functions import Point
from upref.rollouts import Rollouts
from upref.user_code.kl import Term

# (rewards [G], group [G]) -> one advantage per response
Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# what a training step hands to autograd: a batch -> dJ/dlp, [G, T]
TokenGradient: TypeAlias = Callable[[Rollouts], Tensor]
SAME = 1e-6  # of gradients that differ in the order of the responses alone
ALL_ORDERS = 4  # the largest group of which all orders are compared
USES = ("loss", "reward", "advantage")  # where a KL term may stand


@dataclass(frozen=True)
class Expected:
    """An expected gradient.

    Attributes:
        gradient: of J by the logits, [K].
        size: the mean length of the gradient of one batch. The expected gradient is
            small or 0 where those of the batches cancel.
    """

    gradient: Tensor
    size: float


def groups_of(number: int, size: int, ordered: bool) -> Iterator[tuple[int, ...]]:
    """List the groups of responses.

    Args:
        number: of responses.
        size: of a group.
        ordered: whether each order of a group is listed by itself.

    Yields:
        The responses of each group, by index.
    """
    if ordered:
        yield from itertools.product(range(number), repeat=size)
    else:
        yield from itertools.combinations_with_replacement(range(number), size)


def orders(group: tuple[int, ...]) -> int:
    """Return the number of different orders of a group: 3 of (0, 0, 1).

    Args:
        group: the responses, by index.
    """
    repeats = math.prod(math.factorial(n) for n in Counter(group).values())
    return math.factorial(len(group)) // repeats


def make_batch(
    point: Point, group: tuple[int, ...], estimator: Estimator, z_old: Tensor
) -> Rollouts:
    """Make the batch that a training step gets.

    Args:
        point: the policy that is trained.
        group: the responses, by index.
        estimator: makes their advantages.
        z_old: the logits of the policy that sampled them.

    Returns:
        A batch [G, T] in float64, of one prompt.
    """
    rows = list(group)
    responses = point.responses
    R = point.R[rows]
    ids = torch.zeros(len(rows), dtype=torch.int64)
    lp_old = responses.log_probs(z_old)[rows]
    return Rollouts(
        responses.log_probs(point.z)[rows],
        lp_old,
        estimator(R, ids)[:, None].expand(lp_old.shape).clone(),
        responses.mask[rows],
        group=ids,
        logp_ref=responses.log_probs(point.z_ref)[rows],
        entropy=responses.entropies(point.z)[responses.prefix_of_token][rows],
    )


def reorderings(group: tuple[int, ...]) -> Iterator[list[int]]:
    """List orders of the responses of a group that make other batches of it.

    Args:
        group: the responses, by index.

    Yields:
        The positions of the responses in another order. A group of up to ALL_ORDERS
        responses gets every order. A larger one gets each swap of two neighbors: every
        order is made of such swaps.
    """
    size = len(group)
    if size <= ALL_ORDERS:
        positions = [list(order) for order in itertools.permutations(range(size))]
    else:
        positions = []
        for i in range(size - 1):
            swapped = list(range(size))
            swapped[i], swapped[i + 1] = i + 1, i
            positions.append(swapped)
    seen = {group}
    for order in positions:
        reordered = tuple(group[i] for i in order)
        if reordered not in seen:
            seen.add(reordered)
            yield order


def _depends_on_order(
    answer: Callable[[tuple[int, ...]], Tensor], number: int, size: int
) -> bool:
    """Tell whether an answer depends on the order of a group: each group is compared
    with its `reorderings`.

    Args:
        answer: a row or a number for each response of a group.
        number: of responses to choose from.
        size: of a group.
    """
    for group in groups_of(number, size, ordered=False):
        listed = answer(group)
        scale = float(listed.abs().max()) or 1.0
        for order in reorderings(group):
            reordered = answer(tuple(group[i] for i in order))
            if float((reordered - listed[order]).abs().max()) > SAME * scale:
                return True
    return False


def depends_on_order(
    token_gradient: TokenGradient,
    point: Point,
    estimator: Estimator,
    size: int,
    *,
    z_old: Tensor | None = None,
) -> bool:
    """Tell whether the gradient depends on the order of the responses of a batch.

    Args:
        token_gradient: of the loss.
        point: the policy.
        estimator: makes the advantages.
        size: of a group.
        z_old: the logits of the policy that sampled; None: it is the one that trains.
    """
    logits = point.z if z_old is None else z_old

    def of_group(group: tuple[int, ...]) -> Tensor:
        """Return the gradient of a group by its log-probabilities, [G, T]."""
        return token_gradient(make_batch(point, group, estimator, logits))

    return _depends_on_order(of_group, len(point.responses.tokens), size)


def of_loss(
    token_gradient: TokenGradient,
    point: Point,
    estimator: Estimator,
    size: int,
    *,
    ordered: bool = False,
    z_old: Tensor | None = None,
) -> Expected:
    """Return the expected gradient of a loss over all groups of one prompt.

    E = Σ_groups P(group) Σ_it dJ/dlp_it ∇lp_it, where autograd holds P fixed.

    Args:
        token_gradient: dJ/dlp of the loss.
        point: the policy that is trained.
        estimator: makes the advantages of a group.
        size: G, the responses of a group.
        ordered: list each order of a group.
        z_old: the logits of the policy that sampled; None: it is the one that trains.
    """
    z_old = point.z if z_old is None else z_old
    responses = point.responses
    P = responses.probabilities(z_old)
    slopes = responses.slopes(point.z)
    total = torch.zeros_like(point.z)
    mean_size = 0.0
    for group in groups_of(len(responses.tokens), size, ordered):
        rows = list(group)
        batch = make_batch(point, group, estimator, z_old)
        w = torch.where(batch.mask, token_gradient(batch), 0)
        gradient = torch.einsum("it,itk->k", w, slopes[rows])
        times = 1 if ordered else orders(group)
        probability = times * float(P[rows].prod())
        total += probability * gradient
        mean_size += probability * float(gradient.norm())
    return Expected(total, mean_size)


def of_estimator(
    point: Point, estimator: Estimator, size: int, *, ordered: bool = False
) -> Expected:
    """Return the expected gradient of an advantage estimator by itself: of the plain
    policy gradient 1/G Σ_i A_i Σ_t log π(o_it), on policy.

    Args:
        point: the policy.
        estimator: makes the advantages of a group.
        size: G, the responses of a group.
        ordered: list each order of a group.
    """
    responses = point.responses
    P = responses.probabilities(point.z)
    scores = responses.slopes(point.z).sum(1)  # ∇log P(o), [N, K]
    total = torch.zeros_like(point.z)
    mean_size = 0.0
    for group in groups_of(len(responses.tokens), size, ordered):
        rows = list(group)
        A = estimator(point.R[rows], torch.zeros(size, dtype=torch.int64))
        gradient = A @ scores[rows] / size
        times = 1 if ordered else orders(group)
        probability = times * float(P[rows].prod())
        total += probability * gradient
        mean_size += probability * float(gradient.norm())
    return Expected(total, mean_size)


def is_order_read(estimator: Estimator, R: Tensor, size: int) -> bool:
    """Tell whether advantages depend on the order of the responses.

    Args:
        estimator: makes the advantages of a group.
        R: the reward of each response, [N].
        size: of a group.
    """
    ids = torch.zeros(size, dtype=torch.int64)

    def of_group(group: tuple[int, ...]) -> Tensor:
        """Return the advantages of a group, [G]."""
        return estimator(R[list(group)], ids)

    return _depends_on_order(of_group, len(R), size)


def of_kl(term: Term, point: Point, use: str) -> Expected:
    """Return the expected gradient of a KL term that is subtracted from J, on policy.

        loss        J = -Σ_t k_t
        reward      J = -sg(Σ_s k_s) Σ_t log π(o_t): the response's reward has the term
        advantage   J = -Σ_t sg(k_t) log π(o_t): each token's advantage has its own

    Args:
        term: the KL term.
        point: the policy.
        use: one of USES.
    """
    responses = point.responses
    P = responses.probabilities(point.z)
    slopes = responses.slopes(point.z)
    lp_ref = responses.log_probs(point.z_ref)
    lp = responses.log_probs(point.z)
    total = torch.zeros_like(point.z)
    mean_size = 0.0
    for i, length in enumerate(responses.lengths.tolist()):
        own = lp[i : i + 1, :length].clone().requires_grad_()
        k = term(own, lp_ref[i : i + 1, :length])
        if use == "loss":
            w = _slope(k, own)
        elif use == "reward":
            w = k.detach().sum().expand(1, length)
        else:
            w = k.detach()
        gradient = -torch.einsum("t,tk->k", w[0], slopes[i, :length])
        total += P[i] * gradient
        mean_size += float(P[i]) * float(gradient.norm())
    return Expected(total, mean_size)


def _slope(k: Tensor, lp: Tensor) -> Tensor:
    """Return the derivative of the sum of a KL term by lp, in its shape; 0 where it has
    no gradient.
    """
    if not k.requires_grad:
        return torch.zeros_like(lp)
    (slope,) = torch.autograd.grad(k.sum(), lp, allow_unused=True)
    return torch.zeros_like(lp) if slope is None else slope
