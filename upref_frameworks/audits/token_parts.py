# SPDX-License-Identifier: Apache-2.0
"""On what a framework's GAE, its critic's loss and its loss of a teacher are compared,
and with what: the cases and the references of three kinds of Component.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref import critic, distillation, token_advantages
from upref.aggregation import aggregate
from upref.weights.batches import typical_batch

Function = Callable[..., Tensor]
Cases = dict[str, tuple[Any, ...]]
# what a case of GAE holds
BEHIND = "padding behind the responses"
BEFORE = "padding before the responses"
INSIDE = "a tool's tokens inside the responses"


def _numbers(*shape: int, step: float) -> Tensor:
    """Return numbers in [-1, 1] of this shape without a pattern, in float64."""
    n = torch.Size(shape).numel()
    return (step * torch.arange(1, n + 1, dtype=torch.float64)).sin().reshape(shape)


# ---- GAE -----------------------------------------------------------------------------
def advantage_cases() -> Cases:
    """Return cases of GAE by their name: (rewards [N, K], values [N, K], mask [N, K]).

    The mask is True on tokens of the policy. A reward stands on such a token; a critic's
    value stands on every one.
    """
    whole = torch.ones(3, 6, dtype=torch.bool)
    lengths = torch.tensor([6, 1, 4])[:, None]
    behind = torch.arange(6) < lengths
    inside = whole.clone()
    inside[0, 2:4] = False
    inside[2, 1] = False
    masks = {
        "whole responses": whole,
        BEHIND: behind,
        BEFORE: behind.flip(1),
        INSIDE: inside,
    }
    rewards = _numbers(3, 6, step=1.3)
    values = _numbers(3, 6, step=2.1)
    return {k: (torch.where(m, rewards, 0), values, m) for k, m in masks.items()}


def typical_advantage_arguments() -> tuple[Any, ...]:
    """Return the arguments of GAE on the typical batch, in which the second third of each
    response is a tool's. The critic's values scatter around the mean reward.
    """
    batch = typical_batch()
    lengths = batch.mask.sum(1, keepdim=True)
    place = torch.arange(batch.mask.shape[1])
    of_tool = (3 * place >= lengths) & (3 * place < 2 * lengths)
    mask = batch.mask & ~of_tool
    is_last = place == lengths - 1
    rewards = torch.where(is_last & (batch.adv > 0), 1.0, 0.0).double()
    values = 0.5 + 0.2 * _numbers(*batch.mask.shape, step=2.1)
    return rewards, values, mask


def gae_returns(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Return A + V, the advantages of `gae` plus the critic's values, which the critic
    learns, [N, K]; 0 on untrained slots.
    """
    A = token_advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
    return torch.where(mask, A + values, 0)


ADVANTAGES: dict[str, Function] = {
    "gae": token_advantages.gae,
    "gae_whitened": token_advantages.gae_whitened,
    "gae_returns": gae_returns,
}


def on_trained(function: Function) -> Function:
    """Return a framework's function of rewards, values and mask, with 0 on slots that
    are not trained, where no reader of the answer looks.

    Args:
        function: (rewards, values, mask as numbers) -> [N, K].
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the answer on trained slots, [N, K]."""
        return torch.where(mask, function(rewards, values, mask.to(rewards)), 0)

    return answer


# ---- critics -------------------------------------------------------------------------
def value_cases() -> Cases:
    """Return cases of a critic's loss by their name: (values, old values, returns, mask),
    each [B, T].

    Some values have left a clip of 0.2 towards their return, some away from it, and some
    have not left it.
    """
    values, old = _numbers(3, 6, step=1.1), _numbers(3, 6, step=1.7)
    returns = 2 * _numbers(3, 6, step=2.9)
    near = old + 0.15 * values
    padded = torch.arange(6) < torch.tensor([6, 1, 4])[:, None]
    inside = padded & (torch.arange(6) != 2)
    return {
        "values that have moved far": (values, old, returns, padded),
        "values within the clip": (near, old, returns, padded),
        INSIDE: (values, old, returns, inside),
    }


def _averaged_value_loss(name: str, agg: str) -> Function:
    """Return the critic's loss of this name, aggregated to a scalar, in the signature
    of its cases: values, old values, returns, mask.
    """

    def loss(
        values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, **hp: float
    ) -> Tensor:
        """Return the aggregated loss."""
        of_old = () if name == "mse" else (old,)
        per_token = critic.get(name)(values, returns, *of_old, **hp)
        return aggregate(per_token, mask, agg=agg)

    return loss


VALUES: dict[str, Function] = {
    f"{name}, {agg}": _averaged_value_loss(name, agg)
    for name in critic.VALUE_LOSSES
    for agg in ("token-mean", "seq-mean-token-mean")
}


# ---- teachers ------------------------------------------------------------------------
def divergence_cases() -> Cases:
    """Return cases of a loss of a teacher by their name: (student's logits [B, T, V],
    teacher's logits [B, T, V], mask [B, T]).
    """
    student, teacher = (3 * _numbers(2, 4, 9, step=x) for x in (1.7, 0.7))
    padded = torch.arange(4) < torch.tensor([4, 2])[:, None]
    inside = padded & (torch.arange(4) != 1)
    near = student + 0.1 * teacher
    return {
        "another teacher": (student, teacher, padded),
        "a teacher near the student": (student, near, padded),
        "the student itself": (student, student.clone(), padded),
        "far logits": (10 * student, 10 * teacher, padded),
        INSIDE: (student, teacher, inside),
    }


def _averaged_divergence(
    name: str, student: Tensor, teacher: Tensor, mask: Tensor, **hp: float
) -> Tensor:
    """Return the divergence of this name, averaged over the tokens of the mask."""
    per_token = distillation.get(name)(student, teacher, **hp)
    return aggregate(per_token, mask, agg="token-mean")


def without_value(loss: Function) -> Function:
    """Return a loss whose gradient is this one's, and whose value is 0."""

    def difference(*args: Tensor, **hp: float) -> Tensor:
        """Return the loss minus itself as a constant."""
        value = loss(*args, **hp)
        return value - value.detach()

    return difference


def in_expectation(of_tokens: Function) -> Function:
    """Return the expected gradient of a loss of sampled tokens.

    Args:
        of_tokens: (student's logits, teacher's logits, tokens [B, T]) -> [B, T].

    Returns:
        A function in the signature of the cases. Its value is 0: that of a loss of
        sampled tokens means nothing.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the tokens, each drawn from the student."""
        probability = student.detach().softmax(-1)
        expected = torch.zeros_like(probability[..., 0])
        for token in range(student.shape[-1]):
            drawn = torch.full(mask.shape, token)
            of_token = of_tokens(student, teacher, drawn)
            expected = expected + probability[..., token] * of_token
        return aggregate(expected, mask, agg="token-mean")

    return without_value(loss)


DIVERGENCES: dict[str, Function] = {
    name: partial(_averaged_divergence, name)
    for name in distillation.names()
    if name not in distillation.SAMPLED
}
DIVERGENCES |= {
    f"sampled_{name}": without_value(DIVERGENCES[name])
    for name in ("reverse_kl", "forward_kl")
}
