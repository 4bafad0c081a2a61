# SPDX-License-Identifier: Apache-2.0
"""From logits to log-probabilities, entropy and KL, over the full vocabulary, in nats.

    π_t(v) = exp(z_t(v)/τ) / Σ_u exp(z_t(u)/τ)        z logits [..., V], τ temperature

The temperature is the sampler's: log-probs taken at another τ are another policy's, and
the ratio r is wrong from the first token. A sampler that truncates (top-p, top-k)
renormalizes over fewer tokens, so its own log-probs are not these. Half-precision
logits are widened to float32 before the division by τ, float64 stays. A logit of -inf
is a forbidden token (p = 0, and 0 log 0 = 0); a row without a finite logit, or with a
NaN or +inf, gives NaN in its own slot only, so padding may hold anything. All raise
InputError on a τ that is not a finite number > 0 and on shapes that do not fit.

With d = z/τ - max z/τ, log π(v) = d_v - log Σ_u exp(d_u). `torch.log_softmax` on a CPU
adds the exponentials in a few long chains, and a float32 chain drops small terms beside
a large sum: at V = 262k the log-probability is off by up to 3.3e-5 and the entropy by
2.3e-4. `torch.sum` adds them in a tree: 1.9e-6 and 9.1e-7 (benchmarks/hidden.json).
`upref.hidden` starts from hidden states and stores no [T, V] logits.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from upref.errors import InputError
from upref.tensors import describe, is_materialized


def token_log_probs(
    logits: Float[Tensor, "*B T V"],
    tokens: Int[Tensor, "*B T"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*B T"]:
    """Return lp_t = log π_t(o_t) for logits that are already aligned: logits[b, t]
    predicted tokens[b, t].

    A token outside the vocabulary raises InputError, masked or not: give padding any
    valid id.

    Args:
        logits: [..., T, V], before the softmax.
        tokens: ids in [0, V), [..., T].
        temperature: τ > 0 of the sampler; logits are divided by it.

    Returns:
        [..., T], in nats, computed in float32 at least, with gradients to the logits.
    """
    _check_logits(logits, temperature)
    check_tokens(tokens, logits.shape[:-1], logits.shape[-1], "logits", "tokens")
    return _log_probs_of(logits, tokens, temperature)


def shifted_log_probs(
    logits: Float[Tensor, "B S V"],
    input_ids: Int[Tensor, "B S"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "B S-1"]:
    """Return lp_t = log π_t(x_{t+1}) from a causal LM's raw output over input_ids:
    entry t belongs to input_ids[:, t + 1].

    The mask of the result is `mask[:, 1:]` of the token mask. No logits predict the
    first token.

    Args:
        logits: [B, S, V], as a causal LM returns them.
        input_ids: the tokens that the LM read, [B, S].
        temperature: τ > 0 of the sampler.

    Returns:
        [B, S - 1], in nats.

    Raises:
        InputError: logits are not [B, S, V], one row for each token.
    """
    _check_logits(logits, temperature)
    check_tokens(input_ids, logits.shape[:-1], logits.shape[-1], "logits", "input_ids")
    if logits.ndim != 3:
        raise InputError(
            f"logits must be [B, S, V], one row per entry of input_ids, got {tuple(logits.shape)}."
        )
    return _log_probs_of(logits[:, :-1], input_ids[:, 1:], temperature)


def entropy(
    logits: Float[Tensor, "*B T V"], *, temperature: float = 1.0
) -> Float[Tensor, "*B T"]:
    """Return the entropy H_t = -Σ_v π_t(v) log π_t(v), between 0 and log V.

    Args:
        logits: [..., T, V], before the softmax.
        temperature: τ > 0; logits are divided by it.

    Returns:
        [..., T], in nats, with gradients to the logits.
    """
    _check_logits(logits, temperature)
    d, e, s = _softmax(logits, temperature)
    return s.log() - (e * d.masked_fill(e == 0, 0)).sum(-1) / s


def categorical_kl(
    logits_p: Float[Tensor, "*B T V"],
    logits_q: Float[Tensor, "*B T V"],
    *,
    temperature: float = 1.0,
) -> Float[Tensor, "*B T"]:
    """Return KL(p‖q)_t = Σ_v p_t(v) (log p_t(v) - log q_t(v)) of two softmaxes at τ.

    It is +inf where p allows a token that q forbids; there the gradient exists with
    respect to logits_q only.

    Args:
        logits_p: of p, [..., T, V].
        logits_q: of q, the same shape.
        temperature: τ > 0; both are divided by it.

    Returns:
        [..., T], in nats.

    Raises:
        InputError: the logits differ in shape.
    """
    _check_logits(logits_p, temperature)
    _check_logits(logits_q, temperature)
    if logits_p.shape != logits_q.shape:
        raise InputError(
            f"logits_p {tuple(logits_p.shape)} and logits_q {tuple(logits_q.shape)} must have the same shape: "
            "take both over the same tokens and the same vocabulary."
        )
    lp = _log_softmax(logits_p, temperature)
    lq = _log_softmax(logits_q, temperature)
    p = lp.exp()
    return (p * (lp.masked_fill(p == 0, 0) - lq.masked_fill(p == 0, 0))).sum(-1)


def _softmax(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return d = z/τ - max z/τ, exp(d), and Σ exp(d) over the vocabulary. No exp(d)
    overflows, since d <= 0.
    """
    x = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    d = x - x.detach().amax(-1, keepdim=True)
    e = d.exp()
    return d, e, e.sum(-1)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log π(v) of every token v of the vocabulary, [..., T, V]."""
    d, _, s = _softmax(logits, temperature)
    return d - s.log()[..., None]


def _log_probs_of(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log π of these tokens alone, [..., T]."""
    d, _, s = _softmax(logits, temperature)
    return d.gather(-1, tokens.long()[..., None])[..., 0] - s.log()


def _check_logits(logits: Tensor, temperature: float) -> None:
    """Raise InputError for logits or a temperature without log-probabilities. Logits
    are floating-point numbers, [..., T, V].
    """
    if (
        not is_materialized(logits)
        or not logits.is_floating_point()
        or logits.ndim < 2
        or not logits.shape[-1]
    ):
        raise InputError(
            f"logits must be a floating-point tensor [..., T, V], got {describe(logits)}."
        )
    check_temperature(temperature)


def check_temperature(temperature: float) -> None:
    """Raise InputError where a temperature is not a finite number > 0."""
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 < temperature < 1e300
    ):
        raise InputError(
            "temperature must be a finite number > 0, the one that the tokens were sampled at, got "
            f"{repr(temperature)[:60]}; greedy sampling (0) has no log-probabilities."
        )


def check_tokens(tokens: Tensor, shape: torch.Size, V: int, of: str, name: str) -> None:
    """Raise InputError where token ids are not integers in [0, V) of the right shape.

    Args:
        tokens: the ids.
        shape: the shape that they must have.
        V: the size of the vocabulary.
        of: the name of the tensor with that shape and one more axis, for the message.
        name: the name of the argument, for the message.
    """
    if (
        not is_materialized(tokens)
        or tokens.is_floating_point()
        or tokens.is_complex()
        or tokens.dtype == torch.bool
    ):
        raise InputError(
            f"{name} must be an integer tensor of token ids, got {describe(tokens)}."
        )
    if shape != tokens.shape:
        last = "V" if of == "logits" else "H"
        raise InputError(
            f"{name} {tuple(tokens.shape)} must have the shape of {of} without {last}, {tuple(shape)}."
        )
    is_outside = (tokens < 0) | (tokens >= V)
    if is_outside.any():
        index = tuple(is_outside.nonzero()[0].tolist())
        raise InputError(
            f"{name}{list(index)} is {tokens[index].item()}, outside the vocabulary of {V}: replace padding "
            "such as -100 by any valid id and mask it."
        )


def clamp_log_probs(lp: Tensor) -> Tensor:
    """Clamp log-probabilities at 0, which online softmax kernels exceed by rounding
    (1e-7), and keep every gradient.

    Args:
        lp: of any shape.

    Returns:
        Numbers of at most 0, whose gradient by lp is 1 everywhere.
    """
    return lp - lp.detach().clamp(min=0).nan_to_num(0.0, 0.0, 0.0)
