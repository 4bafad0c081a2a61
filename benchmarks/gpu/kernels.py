# SPDX-License-Identifier: Apache-2.0
"""check_logprobs of log-probability functions that run on the GPU: upref's, torch's,
and the fused kernels of TRL, verl and Liger.

The check makes its problems on the CPU. `carried` moves a problem to the GPU, in the
dtype in which the function is meant to run, and the answers back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import upref
import upref.hidden
import upref.logprobs
from benchmarks.gpu.place import PartSetup, moved

Function = Callable[..., Any]


def carried(f: Function, kind: str, device: str, dtype: torch.dtype) -> Function:
    """Return f as a function of CPU tensors. It moves them to the device, and the
    results of f back.

    Args:
        f: `(hidden, weight, tokens, temperature)` or `(logits, tokens, temperature)`.
        kind: hidden or logits.
        device: where f computes.
        dtype: of the real tensors that f is given.

    Returns:
        The function, which check_logprobs takes.
    """

    def on_device(*inputs: Any) -> Any:
        """Call f on copies of the inputs on the device. Return its results on the CPU;
        a None in a tuple is left out.
        """
        out = f(*(moved(x, device, dtype) for x in inputs))
        if not isinstance(out, tuple):
            return out.cpu()
        return tuple(x.cpu() for x in out if x is not None)

    if kind == "logits":

        def of_logits(logits: Tensor, tokens: Tensor, temperature: float) -> Any:
            return on_device(logits, tokens, temperature)

        return of_logits

    def of_hidden(
        hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
    ) -> Any:
        return on_device(hidden, weight, tokens, temperature)

    return of_hidden


# ---- who is checked: kind, and what makes the function -------------------------------
# Each function below imports a package and returns its log-probability function, either
# of (h, W, tokens, T): hidden states [..., H], the head's weight [V, H], token ids [...]
# and the temperature; or of (z, tokens, T), with logits z [..., V]. That function returns
# the tokens' log-probabilities [...], or these and the entropies [...].
def upref_hidden() -> Function:
    """Return upref.hidden.token_log_probs, of hidden states."""
    return lambda h, W, tokens, T: upref.hidden.token_log_probs(
        h, W, tokens, temperature=T
    )


def upref_logits() -> Function:
    """Return the log-probabilities and the entropy of upref.logprobs, of logits."""
    return lambda z, tokens, T: (
        upref.logprobs.token_log_probs(z, tokens, temperature=T),
        upref.logprobs.entropy(z, temperature=T),
    )


def upref_compiled() -> Function:
    """Return a log_softmax of logits in float32, compiled by torch; without the
    entropy.
    """

    def f(z: Tensor, tokens: Tensor, T: float) -> Tensor:
        d = z.float() / T
        return d.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    return torch.compile(f, dynamic=True)


def trl_chunked() -> Function:
    """Return TRL's ChunkedLogProbFunction, of hidden states, with the entropy."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def f(h: Tensor, W: Tensor, tokens: Tensor, T: float) -> tuple[Tensor, Tensor]:
        lp, entropy = ChunkedLogProbFunction.apply(
            h.flatten(0, -2), W, None, tokens.flatten(), T, 32768, None, 1.0, ("entropy",)
        )[:2]  # fmt: skip
        return lp.view(tokens.shape), entropy.view(tokens.shape)

    return f


def trl_selective() -> Function:
    """Return TRL's selective_log_softmax, of logits, without the entropy."""
    from trl.trainer.utils import selective_log_softmax

    return lambda z, tokens, T: selective_log_softmax(z, tokens, temperature=T)


def trl_with_entropy() -> Function:
    """Return TRL's selective_log_softmax_and_entropy, of logits."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return lambda z, tokens, T: selective_log_softmax_and_entropy(
        z, tokens, temperature=T
    )


def verl_triton() -> Function:
    """Return verl's Triton kernel linear_cross_entropy, of hidden states, with the
    entropy.
    """
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def f(h: Tensor, W: Tensor, tokens: Tensor, T: float) -> tuple[Tensor, Tensor]:
        # it takes hidden sizes that are multiples of 128: zeros change no logit
        more = (0, -h.shape[-1] % 128)
        flat = torch.nn.functional.pad(h.flatten(0, -2), more).contiguous()
        W = torch.nn.functional.pad(W, more).contiguous()
        lp, entropy = linear_cross_entropy(flat, W, tokens.flatten(), float(T), "none")
        return lp.view(tokens.shape), entropy.view(tokens.shape)

    return f


def verl_fused() -> Function:
    """Return verl's FusedLinearForPPO, of hidden states, with the entropy."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return lambda h, W, tokens, T: FusedLinearForPPO()(h, W, tokens, T)


def verl_logits() -> Function:
    """Return verl's logprobs_from_logits and entropy_from_logits, of logits."""
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    return lambda z, tokens, T: (
        logprobs_from_logits(z / T, tokens),
        entropy_from_logits(z / T),
    )


def liger_linear() -> Function:
    """Return Liger's fused linear cross entropy, of hidden states, without the entropy.
    It has no temperature, so the hidden states are divided by it.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction,
    )

    def f(h: Tensor, W: Tensor, tokens: Tensor, T: float) -> Tensor:
        rows = (h / T).flatten(0, -2)
        out = LigerFusedLinearCrossEntropyFunction.apply(
            rows, W, tokens.flatten(), None, None, -100, 0.0, 0.0, "none"
        )
        return -(out[0] if isinstance(out, tuple) else out).view(tokens.shape)

    return f


def liger_cross_entropy() -> Function:
    """Return Liger's cross entropy, of logits, without the entropy. It has no
    temperature, so the logits are divided by it.
    """
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def f(z: Tensor, tokens: Tensor, T: float) -> Tensor:
        out = LigerCrossEntropyFunction.apply(
            (z / T).flatten(0, -2), tokens.flatten(), None, -100, 0.0, 0.0, "none"
        )
        return -(out[0] if isinstance(out, tuple) else out).view(tokens.shape)

    return f


def wrong() -> Function:
    """Return a function of hidden states that ignores the temperature. The check must
    reject it.
    """
    return lambda h, W, tokens, T: (
        (h @ W.T).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    )


MAKERS: dict[str, tuple[str, Callable[[], Function]]] = {
    "upref.hidden": ("hidden", upref_hidden),
    "upref.logprobs": ("logits", upref_logits),
    "log_softmax, compiled by torch": ("logits", upref_compiled),
    "TRL ChunkedLogProbFunction": ("hidden", trl_chunked),
    "TRL selective_log_softmax": ("logits", trl_selective),
    "TRL selective_log_softmax_and_entropy": ("logits", trl_with_entropy),
    "verl linear_cross_entropy (Triton)": ("hidden", verl_triton),
    "verl FusedLinearForPPO": ("hidden", verl_fused),
    "verl logprobs_from_logits": ("logits", verl_logits),
    "Liger fused linear cross entropy, reduction none": ("hidden", liger_linear),
    "Liger cross entropy, reduction none": ("logits", liger_cross_entropy),
    "a fault: no temperature": ("hidden", wrong),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(place: PartSetup, which: str) -> None:
    """Check one function in float32 and bfloat16; write a row for each.

    Args:
        place: where.
        which: its number in MAKERS.
    """
    name = [*MAKERS][int(which)]
    kind, make = MAKERS[name]
    for dtype_name, dtype in DTYPES.items():
        with place.row(function=name, dtype=dtype_name) as row:
            fn = carried(make(), kind, place.device, dtype)
            fn.__name__ = name
            report = upref.check_logprobs(fn)
            row |= {
                "agrees": bool(report),
                "failures": [str(f) for f in report.failures],
                "text": str(report),
            }
