# SPDX-License-Identifier: Apache-2.0
"""upref.hidden at the sizes of real models: time, memory and error beside logits in
full and the fused heads of TRL, verl and Liger, in one process.

The time is of one forward and backward, of log-probability and entropy; the memory is
what that allocates beyond the inputs. Errors are against float64 on the same rounded
inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import upref.hidden
from benchmarks.gpu import kernels
from benchmarks.gpu.place import SEED, PartSetup

V, TAU = 151_936, 0.8
Function = Callable[[Tensor, Tensor, Tensor, float], Any]


def naive(h: Tensor, W: Tensor, tokens: Tensor, T: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies [N] from all logits [N, V] at once, by
    torch's log_softmax in float32.
    """
    lp = ((h @ W.T).float() / T).log_softmax(-1)
    return lp.gather(1, tokens[:, None])[:, 0], -(lp.exp() * lp).sum(1)


def hidden_at(chunk: int, **settings: Any) -> Callable[[], Function]:
    """Return a maker of upref.hidden.token_log_probs with chunks of `chunk` logits and
    other settings.
    """
    return lambda: (
        lambda h, W, tokens, T: upref.hidden.token_log_probs(
            h, W, tokens, temperature=T, chunk=chunk, **settings
        )
    )


def from_logits(make: Callable[[], Function]) -> Callable[[], Function]:
    """Turn a maker of a function of logits into a maker of a function of hidden states,
    which computes all logits.
    """

    def made() -> Function:
        f: Any = make()
        return lambda h, W, tokens, T: f(h @ W.T, tokens, T)

    return made


WHO: dict[str, Callable[[], Function]] = {
    "logits in full": lambda: naive,
    "logits in full, compiled": lambda: torch.compile(naive),
    "upref.hidden": hidden_at(2**23),
    "upref.hidden, chunk 2^26": hidden_at(2**26),
    "upref.hidden, chunk 2^28": hidden_at(2**28),
    "upref.hidden, Triton": hidden_at(2**26, kernels="triton"),
    "upref.hidden, Triton, logits kept": hidden_at(
        2**26, kernels="triton", keep_logits=True
    ),
    "TRL ChunkedLogProbFunction": kernels.trl_chunked,
    "TRL selective_log_softmax_and_entropy": from_logits(kernels.trl_with_entropy),
    "verl linear_cross_entropy (Triton)": kernels.verl_triton,
    "verl FusedLinearForPPO": kernels.verl_fused,
}
# dtype, hidden size, tokens: what matters most comes first
CASES = [
    ("bfloat16", 896, 4096),
    ("bfloat16", 4096, 4096),
    ("bfloat16", 896, 512),
    ("float32", 896, 4096),
    ("bfloat16", 896, 16384),
    ("bfloat16", 4096, 16384),
    ("bfloat16", 4096, 512),
    ("float32", 896, 512),
    ("float32", 896, 16384),
    ("float32", 4096, 4096),
]
COMPILED_AT = 4096
TRIAL = [("float32", 64, 32), ("bfloat16", 64, 32)]


def inputs(
    dtype: torch.dtype, H: int, N: int, words: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [N, H], the head's weight [V, H] and tokens [N] at random.

    In every second row (0, 2, ...) one token has a probability near 0.9; in rows 0, 4,
    ... it is the sampled one.

    Args:
        dtype: of the hidden states and the weight, which require gradients.
        H: hidden size.
        N: tokens.
        words: V, the size of the vocabulary.
        device: where the tensors are made.
    """
    g = torch.Generator(device).manual_seed(SEED)
    make = {"generator": g, "device": device}
    W = torch.randn(words, H, **make).mul_(H**-0.5)
    h, tokens = torch.randn(N, H, **make), torch.randint(words, (N,), **make)
    peak = tokens[::2].clone()
    # a row of W has a length near 1, so this token's logit over TAU is log V + 2.3 above
    # the average one: p = 0.9
    h[::2] = W[peak] * (TAU * (torch.tensor(float(words)).log() + 2.3)).item()
    tokens[2::4] = torch.randint(words, (len(tokens[2::4]),), **make)
    return h.to(dtype).requires_grad_(), W.to(dtype).requires_grad_(), tokens


def train(f: Function, h: Tensor, W: Tensor, tokens: Tensor) -> list[Tensor]:
    """Run forward and backward of a function at the temperature TAU. Return
    log-probabilities [N], entropies [N], and the gradients by h and W of the sum of
    log-probabilities + 0.1 entropies.
    """
    lp, entropy = f(h, W, tokens, TAU)
    total = lp.sum() + 0.1 * entropy.sum()
    return [lp.detach(), entropy.detach(), *torch.autograd.grad(total, (h, W))]


def main(place: PartSetup) -> None:
    """Measure every function at every size; write a row of each. Compiled ones run at
    one number of tokens alone.
    """
    cases, words = (TRIAL, 1000) if place.small else (CASES, V)
    for dtype, H, N in cases:
        measure_all(place, dtype, H, N, words)


def measure_all(place: PartSetup, dtype: str, H: int, N: int, words: int) -> None:
    """Measure every function at one size: hidden size H, N tokens, and so many words."""
    h, W, tokens = inputs(getattr(torch, dtype), H, N, words, place.device)
    want = None
    # in float64 the larger sizes take too long: they get no errors
    if N <= 4096 and H * N <= 4096 * 896:
        want = exact(h, W, tokens)
    for name, make in WHO.items():
        if "compiled" in name and N != COMPILED_AT:
            continue  # each size compiles again, for seconds
        with place.row(who=name, dtype=dtype, H=H, N=N, V=words) as row:
            measure(place, make(), (h, W, tokens), want, row)
        if place.device == "cuda":
            torch.cuda.empty_cache()


def measure(
    place: PartSetup,
    f: Function,
    tensors: tuple[Tensor, Tensor, Tensor],
    want: list[Tensor] | None,
    row: dict[str, Any],
) -> None:
    """Fill a row with the errors, then the memory, then the time.

    Args:
        place: where.
        f: the function.
        tensors: hidden states, weight and tokens.
        want: what `train` returns of them in float64; None leaves the errors out.
        row: is changed in place.
    """
    results = train(f, *tensors)  # what is compiled at the first call
    if want is not None:
        names = ("log-prob", "entropy", "dh", "dW")
        for name, x, y in zip(names, results, want, strict=True):
            # log-probabilities in nats, gradients relative to their largest entry
            size = 1.0 if name in names[:2] else float(y.abs().max())
            row[f"error of {name}"] = float((x.double() - y).abs().max()) / size
    del results
    row["peak_bytes"] = place.peak_bytes(lambda: train(f, *tensors))
    row["milliseconds"] = place.milliseconds(lambda: train(f, *tensors))


def exact(h: Tensor, W: Tensor, tokens: Tensor) -> list[Tensor]:
    """Return what `train` returns of upref.hidden in float64."""
    wide = [x.detach().double().requires_grad_() for x in (h, W)]

    def f(h: Tensor, W: Tensor, tokens: Tensor, T: float) -> tuple[Tensor, Tensor]:
        return upref.hidden.token_log_probs(h, W, tokens, temperature=T, chunk=2**26)

    return train(f, wide[0], wide[1], tokens)
