# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a sampler that cuts the distribution: top-k and top-p.

    K = the k tokens of the largest z          p_K = π restricted to K, and normalized
    N = the fewest tokens, the most probable first, whose p_K adds up to at least p
    log π_cut(v) = z_v/τ - log Σ_{u in N} exp(z_u/τ),  v in N;   -∞ elsewhere

The temperature acts before the cuts. The token that crosses p is kept (holtzman2020curious).
vLLM, transformers and NeMo-RL apply top-p to what top-k leaves: `kept`. SGLang and
FlashInfer's filter_apply_order="joint" make both cuts on the whole distribution: `kept_jointly`.
Of tokens with equal logits at the edge of top-k all are kept.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref.errors import InputError
from upref.logprobs import check_temperature, check_tokens
from upref.tensors import describe, is_materialized


def kept(
    logits: Float[Tensor, "*B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Bool[Tensor, "*B V"]:
    """Return N, the tokens that a sampler may draw: top-k first, then top-p of what is left.

    Args:
        logits: z, [..., V].
        temperature: τ > 0; logits are divided by it before the cuts.
        top_k: how many tokens are left; None: all.
        top_p: p, the mass of them that is left, in (0, 1].

    Returns:
        [..., V]; at least the most probable token is kept.
    """
    z = _scaled(logits, temperature, top_k, top_p)
    in_k = _largest(z, top_k)
    return in_k & _mass(z.masked_fill(~in_k, -torch.inf), top_p)


def kept_jointly(
    logits: Float[Tensor, "*B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Bool[Tensor, "*B V"]:
    """Return the tokens that both cuts of the whole distribution leave.

    Args:
        logits: z, [..., V].
        temperature: τ > 0; logits are divided by it before the cuts.
        top_k: how many tokens are left; None: all.
        top_p: p, the mass of the whole distribution that is left, in (0, 1].

    Returns:
        [..., V].
    """
    z = _scaled(logits, temperature, top_k, top_p)
    return _largest(z, top_k) & _mass(z, top_p)


def nucleus_log_probs(
    logits: Float[Tensor, "*B V"],
    tokens: Int[Tensor, "*B"],
    keep: Bool[Tensor, "*B V"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*B"]:
    """Return log π_cut of each token, normalized over the tokens that are kept.

    Args:
        logits: z, [..., V].
        tokens: ids in [0, V), [...].
        keep: N, of `kept`, `kept_jointly`, or as the engine recorded it, [..., V].
        temperature: τ > 0 of the sampler.

    Returns:
        [...], in nats, with gradients to the logits; -inf for a token that is not kept, NaN
        where none is.

    Raises:
        InputError: keep is no bool tensor of the shape of the logits.
    """
    z = _scaled(logits, temperature, None, 1.0)
    check_tokens(tokens, logits.shape[:-1], logits.shape[-1], "logits", "tokens")
    if keep.shape != logits.shape or keep.dtype != torch.bool:
        raise InputError(
            f"keep must be a bool tensor of the shape of logits, {tuple(logits.shape)}, got {describe(keep)}."
        )
    log_p = z.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return log_p.gather(-1, tokens.long()[..., None])[..., 0]


def _scaled(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float
) -> Tensor:
    """Return z/τ in float32 at least; InputError where an argument is not possible."""
    if not is_materialized(logits) or not logits.is_floating_point() or not logits.ndim:
        raise InputError(
            f"logits must be a floating-point tensor [..., V], got {describe(logits)}."
        )
    check_temperature(temperature)
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise InputError(
            f"top_k must be a number of tokens of at least 1, or None, got {repr(top_k)[:60]}."
        )
    is_number = isinstance(top_p, int | float) and not isinstance(top_p, bool)
    if not is_number or not 0 < top_p <= 1:
        raise InputError(
            f"top_p must be a number above 0 and at most 1, got {repr(top_p)[:60]}."
        )
    return (logits if logits.dtype == torch.float64 else logits.float()) / temperature


def _largest(z: Tensor, top_k: int | None) -> Tensor:
    """Return which logits are among the k largest, ties with the last one included."""
    if top_k is None or top_k >= z.shape[-1]:
        return torch.ones_like(z, dtype=torch.bool)
    return z >= z.topk(top_k, -1).values[..., -1:]


def _mass(z: Tensor, top_p: float) -> Tensor:
    """Return the most probable tokens whose mass is at least p, the crossing one included."""
    if top_p == 1:
        return torch.ones_like(z, dtype=torch.bool)
    probabilities, order = z.softmax(-1).sort(-1, descending=True)
    mass_before = probabilities.cumsum(-1) - probabilities
    is_kept = mass_before < top_p
    return torch.zeros_like(is_kept).scatter(-1, order, is_kept)
