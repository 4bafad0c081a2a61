# SPDX-License-Identifier: Apache-2.0
"""The reference as a pipeline of stages, and known faults as records: which stage each one replaces, and by what.

y = logit_scale (h W^T + b),  z = softcap tanh(y / softcap),  x = z/τ,  log Z = log Σ exp x,  lp = x_o - log Z,  H
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from upref.foreign.logprobs import Outcome, Problem

EPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
TILES = tuple(2**n for n in range(17, 1, -1))


@dataclass(frozen=True)
class Fault:
    """A stage that is None is the reference's."""

    words: str
    given: Callable[[Problem], Problem] | None = None
    y: Callable[[Problem], Tensor] | None = None
    z: Callable[[Tensor, Problem], Tensor] | None = None
    x: Callable[[Tensor, float], Tensor] | None = None
    x_H: Callable[[Tensor, float], Tensor] | None = None  # where the entropy is computed from another x
    picked: Callable[[Tensor], Tensor] | None = None  # of x_o
    log_Z: Callable[[Tensor], Tensor] | None = None
    lp: Callable[[Tensor, float], Tensor] | None = None
    H: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # of H, x, lp
    up: Callable[[Tensor], Tensor] | None = None  # of an upstream gradient


RIGHT = Fault("")


def states(p: Problem, x: Tensor | None = None) -> Tensor:
    """y, from other states where they are given."""
    x = p.x if x is None else x
    y = x if p.weight is None else x @ p.weight.T
    return p.logit_scale * (y if p.bias is None else y + p.bias)


def cap(y: Tensor, p: Problem) -> Tensor:
    return y if p.softcap is None else p.softcap * (y / p.softcap).tanh()


def log_sum(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def entropy(x: Tensor) -> Tensor:
    lp = x - log_sum(x)[..., None]
    return -(lp.exp() * lp.masked_fill(lp.isneginf(), 0)).sum(-1)


def solved(p: Problem, f: Fault = RIGHT) -> Outcome:
    """Outputs and gradients by autograd in float64."""
    leaves = {k: v.detach().double().requires_grad_() for k, v in p.leaves.items()}
    q = replace(p.to(torch.float64), x=leaves["logits" if p.weight is None else "hidden"], weight=leaves.get("weight"))
    q = f.given(q) if f.given else q
    z = (f.z or cap)((f.y or states)(q), q)
    at = lambda stage: (stage or torch.div)(z, q.temperature)
    x = at(f.x)
    tokens = q.tokens.long().clamp(min=0)[..., None]
    picked = x.gather(-1, tokens)[..., 0]
    lp = (f.picked(picked) if f.picked else picked) - (f.log_Z or log_sum)(x)
    lp = f.lp(lp, q.temperature) if f.lp else lp
    H = entropy(at(f.x_H) if f.x_H else x)
    H = f.H(H, x, lp) if f.H else H
    out = {"log-prob": lp, "entropy": H}
    used = [(out[k], f.up(u) if f.up else u) for k, u in (("log-prob", q.g), ("entropy", q.g_H)) if u is not None]
    numbers = {k: v.detach() for k, v in out.items()}
    if used:
        total = torch.stack([(torch.where(u == 0, 0, y) * u).sum() for y, u in used]).sum()
        parts = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
        got = dict(zip(leaves, parts, strict=False))
        numbers |= {
            f"gradient of {k}": torch.zeros_like(v) if got.get(k) is None else got[k] for k, v in leaves.items()
        }
    return Outcome(numbers)


# ---- the records -----------------------------------------------------------------------------------------------------
def as_if(value: Tensor, gradient: Tensor) -> Tensor:
    """This value with that gradient."""
    return gradient + (value - gradient).detach()


def _no_slope(y: Tensor, p: Problem) -> Tensor:
    return as_if(cap(y, p), y)


def _p_log_p(H: Tensor, x: Tensor, lp: Tensor) -> Tensor:
    """The gradient -p log p, where -p (log p + H) is right."""
    log_p = (x - log_sum(x)[..., None]).detach()
    return as_if(H, -(log_p.exp() * log_p * x).sum(-1))


def _first(u: Tensor) -> Tensor:
    return u.flatten()[0].expand_as(u)


def _memory(u: Tensor) -> Tensor:
    """What lies in memory from its first number on."""
    room = u.untyped_storage().nbytes() // u.element_size() - u.storage_offset()
    return (
        u
        if room < u.numel()
        else u.as_strided(u.shape, torch.empty_like(u, memory_format=torch.contiguous_format).stride())
    )


def _shift(by: int) -> Callable[[Problem], Problem]:
    return lambda p: replace(p, tokens=p.tokens.roll(by, -1))


def _guarded(guard: Callable[[Tensor, float], Tensor], eps: float) -> Callable[[Tensor, float], Tensor]:
    return lambda lp, t: guard(lp.exp(), eps).log()


KNOWN = (
    Fault("the temperature is left out", x=lambda z, t: z),
    Fault("the temperature is left out of the log-probs, and not of the entropy", x=lambda z, t: z, x_H=torch.div),
    Fault("the entropy is taken at temperature 1", x_H=lambda z, t: z),
    Fault("the logits are divided by the temperature twice", x=lambda z, t: z / t**2),
    Fault("the log-probs divide by the temperature twice, the entropy once", x=lambda z, t: z / t**2, x_H=torch.div),
    Fault("the entropy divides by the temperature twice", x_H=lambda z, t: z / t**2),
    Fault("the logits are multiplied by the temperature", x=lambda z, t: z * t),
    Fault("the log-softmax is divided by the temperature, and not the logits",
          x=lambda z, t: z, lp=lambda lp, t: lp / t),
    Fault("the log-softmax is divided by the temperature, and not the logits; the entropy is right",
          x=lambda z, t: z, lp=lambda lp, t: lp / t, x_H=torch.div),
    Fault("the log-probs are divided by the temperature once more, after the softmax", lp=lambda lp, t: lp / t),
    Fault("the backward leaves out the factor 1/temperature", x=lambda z, t: as_if(z / t, z)),
    Fault("the backward multiplies by the temperature", x=lambda z, t: as_if(z / t, z * t)),
    Fault("the backward divides by the temperature twice", x=lambda z, t: as_if(z / t, z / t**2)),
    Fault("the backward of the entropy leaves out the factor 1/temperature", x_H=lambda z, t: as_if(z / t, z)),
    Fault("the backward of the log-probs leaves out the factor 1/temperature",
          x=lambda z, t: as_if(z / t, z), x_H=torch.div),
    Fault("the negative log-likelihood is returned: the sign is flipped", lp=lambda lp, t: -lp),
    Fault("the gradient of the log-probs has its sign flipped", lp=lambda lp, t: as_if(lp, -lp)),
    Fault("probabilities are returned, and not their logarithms", lp=lambda lp, t: lp.exp()),
    Fault("logits are returned: the normaliser is left out", log_Z=lambda x: 0 * x[..., 0]),
    Fault("the log-probs are detached: they have no gradient", lp=lambda lp, t: lp.detach()),
    Fault("the normaliser is detached: only the sampled token's logit has a gradient",
          log_Z=lambda x: log_sum(x).detach()),
    Fault("the backward of the log-probs is -p: it lacks the sampled token's own 1", picked=torch.Tensor.detach),
    Fault("logarithms to base 2", lp=lambda lp, t: lp / 0.6931471805599453),
    Fault("the entropy is detached: it has no gradient", H=lambda H, x, lp: H.detach()),
    Fault("the gradient of the entropy has its sign flipped", H=lambda H, x, lp: as_if(H, -H)),
    Fault("the gradient of the entropy is -p log p: it lacks the term -p H", H=_p_log_p),
    Fault("the entropy has its sign flipped", H=lambda H, x, lp: -H),
    Fault("the entropy is minus the sampled token's log-prob", H=lambda H, x, lp: -lp),
    Fault("the entropy is in bits", H=lambda H, x, lp: H / 0.6931471805599453),
    Fault("the entropy is divided by log V", H=lambda H, x, lp: H / torch.log(torch.tensor(1.0 * x.shape[-1]))),
    Fault("the softcap is left out", z=lambda y, p: y),
    Fault("the derivative of the softcap is left out of the backward", z=_no_slope),
    Fault("the softcap is not divided by inside tanh", z=lambda y, p: y if p.softcap is None else p.softcap * y.tanh()),
    Fault("the softcap is not multiplied by outside tanh",
          z=lambda y, p: y if p.softcap is None else (y / p.softcap).tanh()),
    Fault("the softcap is applied after the temperature",
          z=lambda y, p: y if p.softcap is None else p.temperature * cap(y / p.temperature, p)),
    Fault("the softcap clamps the logits", z=lambda y, p: y if p.softcap is None else y.clamp(-p.softcap, p.softcap)),
    Fault("the logit scale is left out", y=lambda p: states(replace(p, logit_scale=1.0))),
    Fault("the logit scale is left out of the backward",
          y=lambda p: as_if(states(p), states(replace(p, logit_scale=1.0)))),
    Fault("the bias is left out", y=lambda p: states(replace(p, bias=None))),
    Fault("the first token's upstream gradient is used for all", up=_first),
    Fault("the mean of the upstream gradients is used for all tokens", up=lambda u: u.mean().expand_as(u)),
    Fault("the upstream gradient is ignored: all tokens count 1", up=torch.ones_like),
    Fault("the upstream gradient is read as contiguous: its layout is ignored", up=_memory),
    Fault("shifted by one: row t has the log-prob of token t + 1", given=_shift(-1)),
    Fault("shifted by one: row t has the log-prob of token t - 1", given=_shift(1)),
    Fault("the running maximum starts at 0", log_Z=lambda x: (
        m := x.detach().amax(-1, keepdim=True).clamp(min=0))[..., 0] + (x - m).exp().sum(-1).log()),
    Fault("exp is taken before the maximum is subtracted", log_Z=lambda x: x.exp().sum(-1).log()),
    Fault("the weight gets no gradient",
          y=lambda p: states(p if p.weight is None else replace(p, weight=p.weight.detach()))),
    Fault("the hidden states get no gradient",
          y=lambda p: states(p if p.weight is None else replace(p, x=p.x.detach()))),
    *(Fault(f"{eps:g} is added to the probability", lp=_guarded(torch.add, eps)) for eps in EPS),
    *(Fault(f"the probability is clamped to at least {eps:g}", lp=_guarded(torch.clamp, eps)) for eps in EPS),
)  # fmt: skip


def in_tiles(p: Problem) -> Iterator[Fault]:
    """Faults of code that cuts the vocabulary or the tokens into tiles, for the sizes that cut this problem."""
    for n in TILES:
        yield from _columns(p.x.shape[-1] if p.weight is None else len(p.weight), n)
        yield from _rows(p.tokens.shape, n)


def _columns(V: int, n: int) -> Iterator[Fault]:
    whole, padded = V // n * n, -(-V // n) * n
    cut = lambda x: x[..., :whole]
    pad = lambda x: torch.nn.functional.pad(x, (0, padded - V))
    for told, change in (
        (f"the last, partial tile of {n} columns is left out", cut if 0 < whole < V else None),
        (
            f"the columns that pad the vocabulary to a multiple of {n} are counted",
            pad if V < padded <= 2 * V + 8 else None,
        ),
    ):
        if change:
            yield Fault(f"{told} in the normaliser", log_Z=_then(log_sum, change))
            yield Fault(f"{told} in the normaliser and the entropy", log_Z=_then(log_sum, change), H=_anew(change))
    if 0 < whole < V:
        yield Fault(f"the last, partial tile of {n} columns gets no gradient",
                    x=lambda z, t: torch.cat([z[..., :whole], z[..., whole:].detach()], -1) / t)  # fmt: skip


def _then(f: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(change(x))


def _anew(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda H, x, lp: entropy(change(x))


def _rows(shape: torch.Size, n: int) -> Iterator[Fault]:
    N = shape.numel()
    at = torch.arange(N).reshape(shape)
    last = at >= N // n * n
    if last.any() and not last.all():
        told = f"the last, partial tile of {n} tokens"
        yield Fault(f"{told} is left out: its results are 0", lp=lambda lp, t: lp.masked_fill(last, 0),
                    H=lambda H, x, lp: H.masked_fill(last, 0))  # fmt: skip
        yield Fault(f"{told} gets no gradient", up=lambda u: u.masked_fill(last, 0))
        yield Fault(f"the weight's gradient lacks {told}", y=_without(last))
    if n < N:
        yield Fault(f"the weight's gradient has the first tile of {n} tokens alone", y=_without(at >= n))
        yield Fault(f"the weight's gradient has the last tile of {n} tokens alone", y=_without(at < (N - 1) // n * n))


def _without(rows: Tensor) -> Callable[[Problem], Tensor]:
    """y whose gradient reaches the weight from the other rows alone."""

    def y(p: Problem) -> Tensor:
        if p.weight is None:
            return states(p)
        return torch.where(rows[..., None], states(replace(p, weight=p.weight.detach())), states(p))

    return y
