# SPDX-License-Identifier: Apache-2.0
"""Named functions of the policy that a loss may maximize, and their gradients by the
logits.

Two of the divergences and one entropy are no functions of the policy: they are sums over
prefixes in which how often a prefix is reached is held fixed. Their fields of gradients
are listed, because per-token terms of losses have these gradients.

A function takes the Point, whose own logits are constants to it, and the logits z [K]
by which it is differentiated; at z = point.z it has its value. Entropies and
divergences are in nats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from upref.maximization.policy import Responses


@dataclass(frozen=True)
class Point:
    """Where gradients are compared.

    Attributes:
        responses: all responses.
        z: the logits of the policy, [K].
        z_ref: the logits of the reference policy, [K].
        R: the reward of each response, [N].
    """

    responses: Responses
    z: Tensor
    z_ref: Tensor
    R: Tensor


Value: TypeAlias = Callable[[Point, Tensor], Tensor]
PER_PREFIX = "per prefix"


def mean_reward(point: Point, z: Tensor) -> Tensor:
    """Return Σ P(o) R(o)."""
    return (point.responses.probabilities(z) * point.R).sum()


def mean_reward_per_token(point: Point, z: Tensor) -> Tensor:
    """Return Σ P(o) R(o) / |o|."""
    per_token = point.R / point.responses.lengths
    return (point.responses.probabilities(z) * per_token).sum()


def mean_length(point: Point, z: Tensor) -> Tensor:
    """Return Σ P(o) |o|, in tokens."""
    return (point.responses.probabilities(z) * point.responses.lengths).sum()


def entropy(point: Point, z: Tensor) -> Tensor:
    """Return -Σ P(o) log P(o)."""
    log_P = point.responses.log_probs(z).sum(1)
    return -(log_P.exp() * log_P).sum()


def kl(point: Point, z: Tensor) -> Tensor:
    """Return KL(π ‖ π_ref) of whole responses."""
    log_P = point.responses.log_probs(z).sum(1)
    log_P_ref = point.responses.log_probs(point.z_ref).sum(1)
    return (log_P.exp() * (log_P - log_P_ref)).sum()


def kl_from_reference(point: Point, z: Tensor) -> Tensor:
    """Return KL(π_ref ‖ π) of whole responses."""
    log_P = point.responses.log_probs(z).sum(1)
    log_P_ref = point.responses.log_probs(point.z_ref).sum(1)
    return (log_P_ref.exp() * (log_P_ref - log_P)).sum()


def _reach(point: Point) -> Tensor:
    """Return the probability that each prefix is reached under point.z, [K]: a constant
    to the gradient.
    """
    responses = point.responses
    P = responses.probabilities(point.z)
    reached = torch.zeros(len(responses.prefixes), dtype=P.dtype)
    token_P = P[:, None].expand(responses.mask.shape)
    return reached.index_add(
        0, responses.prefix_of_token[responses.mask], token_P[responses.mask]
    )


def entropy_per_prefix(point: Point, z: Tensor) -> Tensor:
    """Return Σ_k reach(k) H(π(. | k)), reach held fixed."""
    return (_reach(point) * point.responses.entropies(z)).sum()


def _kl_per_prefix(z: Tensor, other: Tensor) -> Tensor:
    """Return KL(π_z ‖ π_other) of the next token behind each prefix, [K], of two
    policies by their logits [K].
    """
    p = z.sigmoid()
    logsigmoid = torch.nn.functional.logsigmoid
    of_one = p * (logsigmoid(z) - logsigmoid(other))
    return of_one + (1 - p) * (logsigmoid(-z) - logsigmoid(-other))


def kl_per_prefix(point: Point, z: Tensor) -> Tensor:
    """Return Σ_k reach(k) KL(π(. | k) ‖ π_ref(. | k)), reach held fixed."""
    return (_reach(point) * _kl_per_prefix(z, point.z_ref)).sum()


def kl_from_reference_per_prefix(point: Point, z: Tensor) -> Tensor:
    """Return Σ_k reach(k) KL(π_ref(. | k) ‖ π(. | k)), reach held fixed: reach is that
    of π too.
    """
    return (_reach(point) * _kl_per_prefix(point.z_ref, z)).sum()


@dataclass(frozen=True)
class PolicyFunction:
    """A function of the policy that has a name.

    Attributes:
        words: for the report.
        value: what it is at a point, where the policy has the logits z.
        is_divergence: whether it is one from the reference policy.
        is_per_prefix: whether it is a sum over prefixes, with their reach held fixed.
    """

    words: str
    value: Value
    is_divergence: bool = False
    is_per_prefix: bool = False


def divergence(words: str, value: Value, *, per_prefix: bool = False) -> PolicyFunction:
    """Make the PolicyFunction of a divergence from the reference policy."""
    return PolicyFunction(words, value, is_divergence=True, is_per_prefix=per_prefix)


# by id; of two that have one gradient, a sum names the earlier
FUNCTIONS: dict[str, PolicyFunction] = {
    "mean-reward": PolicyFunction("the mean reward", mean_reward),
    "mean-reward-per-token": PolicyFunction(
        "the mean of reward / length", mean_reward_per_token
    ),
    "mean-length": PolicyFunction("the mean length", mean_length),
    "entropy": PolicyFunction("the entropy of responses", entropy),
    "entropy-per-prefix": PolicyFunction(
        f"the entropy {PER_PREFIX}", entropy_per_prefix, is_per_prefix=True
    ),
    "kl": divergence("KL(π ‖ π_ref) of responses", kl),
    "kl-from-reference": divergence("KL(π_ref ‖ π) of responses", kl_from_reference),
    "kl-per-prefix": divergence(
        f"KL(π ‖ π_ref) {PER_PREFIX}", kl_per_prefix, per_prefix=True
    ),
    "kl-from-reference-per-prefix": divergence(
        f"KL(π_ref ‖ π) {PER_PREFIX}", kl_from_reference_per_prefix, per_prefix=True
    ),
}
MEAN_REWARD = "mean-reward"
KL_OF_RESPONSES = "kl"


def gradient(id: str, point: Point) -> Tensor:
    """Return the gradient of a function of the policy by the logits, [K].

    Args:
        id: a key of FUNCTIONS.
        point: the policy.
    """
    z = point.z.clone().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[id].value(point, z), z)
    return slope
