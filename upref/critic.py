# SPDX-License-Identifier: Apache-2.0
"""Losses of a critic: the error of a token's value against its return.

    V, V_old, R   value now, value before the update, return; [B, T]
    ε             how far a value may move in one update

    mse       c (V - R)²
    clipped   c max((V - R)², (V_clip - R)²),   V_clip = V_old + clip(V - V_old, -ε, ε)

The clip bounds the step of a value as PPO's clip bounds that of a probability: the larger error counts, so that a value
that has left the range gets a gradient only if that leads back. c is 1/2 in verl, TRL and OpenRLHF, and 1 in others. V_old
and R are constants.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from upref import catalog
from upref.errors import InputError
from upref.tensors import describe, is_materialized

PerToken = Float[Tensor, "B T"]


def mse(values: PerToken, returns: PerToken, *, scale: float = 0.5) -> PerToken:
    """Return c (V - R)².

    Args:
        values: V, [B, T]; gradients flow into it alone.
        returns: R, [B, T], in the unit of V.
        scale: c.

    Returns:
        [B, T], to be minimized.
    """
    _check(values, returns)
    return scale * (values - returns.detach()) ** 2


def clipped(
    values: PerToken,
    returns: PerToken,
    old_values: PerToken,
    *,
    clip: float = 0.2,
    scale: float = 0.5,
) -> PerToken:
    """Return c max((V - R)², (V_clip - R)²), V_clip = V_old + clip(V - V_old, -ε, ε): OpenAI Baselines, verl, TRL.

    Args:
        values: V, [B, T]; gradients flow into it alone.
        returns: R, [B, T], in the unit of V.
        old_values: V_old, [B, T].
        clip: ε, in the unit of V.
        scale: c.

    Returns:
        [B, T], to be minimized.

    Raises:
        InputError: clip is no number >= 0, or the tensors do not fit each other.
    """
    _check(values, returns, old_values)
    if isinstance(clip, bool) or not isinstance(clip, int | float) or not clip >= 0:
        raise InputError(f"clip must be a number >= 0, got {repr(clip)[:60]}.")
    old = old_values.detach()
    near = old + (values - old).clamp(-clip, clip)
    R = returns.detach()
    return scale * torch.maximum((values - R) ** 2, (near - R) ** 2)


VALUE_LOSSES: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (mse, clipped)}


def get(name: str) -> Callable[..., Tensor]:
    """Return the value loss of this name.

    Args:
        name: a key of VALUE_LOSSES.

    Raises:
        InputError: there is none.
    """
    if not isinstance(name, str) or name not in VALUE_LOSSES:
        raise catalog.unknown_value_loss(name, VALUE_LOSSES)
    return VALUE_LOSSES[name]


def _check(*tensors: Tensor) -> None:
    """Raise InputError for what are no floating-point tensors of one shape."""
    first = tensors[0]
    fits = all(is_materialized(x) and x.is_floating_point() for x in tensors)
    if not fits or any(x.shape != first.shape for x in tensors):
        got = ", ".join(map(describe, tensors))
        raise InputError(
            f"values, returns and old_values must be floating-point tensors of one shape, got {got}."
        )
