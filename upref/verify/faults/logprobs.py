# SPDX-License-Identifier: Apache-2.0
"""The reference as a pipeline of stages, and known faults: which stage each one
replaces, and by what.

y = logit_scale (h W^T + b),  z = softcap tanh(y / softcap),  x = z/τ,  log Z = log Σ
exp x,  lp = x_o - log Z,  H

One file: a catalogue is read as one.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from upref.user_code.logprobs import KernelOutcome, Problem
from upref.verify.faults import Fault

LOG_2 = 0.6931471805599453
# constants that are added to a probability, or that it is clamped to
EPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
# how many of the largest logits are kept
TOP = (10, 20, 32, 40, 50, 64, 100, 128, 1000)
# sizes of tiles, the largest first
TILES = tuple(2**n for n in range(17, 1, -1))


@dataclass(frozen=True)
class Stages:
    """The stages of a computation of log-probabilities: what a fault replaces.

    None stands for the stage of the reference.
    """

    given: Callable[[Problem], Problem] | None = None
    y: Callable[[Problem], Tensor] | None = None
    z: Callable[[Tensor, Problem], Tensor] | None = None
    x: Callable[[Tensor, float], Tensor] | None = None
    # where the entropy is computed from another x
    x_H: Callable[[Tensor, float], Tensor] | None = None
    # x_o of x, the tokens and τ
    picked: Callable[[Tensor, Tensor, float], Tensor] | None = None
    log_Z: Callable[[Tensor], Tensor] | None = None
    lp: Callable[[Tensor, Problem], Tensor] | None = None
    H: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # of H, x, lp
    up: Callable[[Tensor, Problem], Tensor] | None = None  # of an upstream gradient
    only: str = ""  # the output whose upstream gradient changes; "": both outputs'
    inner: bool = False  # the first and the last token of a row may have any log-prob
    size: int = 0  # of the tiles, or the number of logits that are kept


LogprobFault: TypeAlias = Fault[Stages]
RIGHT = Stages()


def fault(words: str, *, id: str, **stages: Any) -> LogprobFault:
    """Make a fault of the stages that it replaces, which are fields of Stages."""
    return Fault(words, Stages(**stages), id=id)


def is_same(one: LogprobFault, other: LogprobFault) -> bool:
    """Tell whether two faults are the same, at the same size of tiles."""
    return (one.id, one.change.size) == (other.id, other.change.size)


def states(problem: Problem) -> Tensor:
    """Return the logits y of a problem, before the softcap and the temperature, [.., V]."""
    y = problem.x if problem.weight is None else problem.x @ problem.weight.T
    return problem.logit_scale * (y if problem.bias is None else y + problem.bias)


def cap(y: Tensor, problem: Problem) -> Tensor:
    """Return the logits z, after the softcap."""
    return (
        y if problem.softcap is None else problem.softcap * (y / problem.softcap).tanh()
    )


def log_sum(x: Tensor) -> Tensor:
    """Return log Z of each token."""
    return torch.logsumexp(x, -1)


def entropy(x: Tensor) -> Tensor:
    """Return the entropy H of each token in nats; p = 0 contributes 0."""
    lp = x - log_sum(x)[..., None]
    return -(lp.exp() * lp.masked_fill(lp.isneginf(), 0)).sum(-1)


def pick(x: Tensor, tokens: Tensor, t: float = 1.0) -> Tensor:
    """Return x_o, the logit of each sampled token. Faults alone use t, which is τ."""
    return x.gather(-1, tokens[..., None])[..., 0]


def _log_softmax_over(x: Tensor, tokens: Tensor, t: float, dimension: int) -> Tensor:
    """Return the log-softmax over a dimension of the logits, at each sampled token."""
    return pick(x.log_softmax(dimension), tokens)


def _clamped_logits(y: Tensor, problem: Problem, bound: float) -> Tensor:
    """Return the logits after the softcap, clamped to ±bound."""
    return cap(y, problem).clamp(-bound, bound)


def solved(problem: Problem, f: Stages = RIGHT) -> KernelOutcome:
    """Compute outputs and gradients in float64 by autograd, with the stages of f.

    Args:
        problem: the inputs, in any dtype.
        f: the stages that are replaced; by default none, which is the reference.

    Returns:
        By name: "log-prob" and "entropy"; and, if the problem has an upstream gradient,
        "gradient of hidden" and "gradient of weight", or "gradient of logits".
    """
    problem = problem.to(torch.float64)
    leaves = {
        name: tensor.detach().requires_grad_()
        for name, tensor in problem.leaves.items()
    }
    # the hidden states or the logits are the first leaf
    given = replace(problem, x=next(iter(leaves.values())), weight=leaves.get("weight"))
    if f.given:
        given = f.given(given)
    outputs = _outputs(given, f)
    numbers = {name: output.detach() for name, output in outputs.items()}
    terms = []
    for name, upstream in (("log-prob", given.g), ("entropy", given.g_H)):
        if upstream is None:
            continue
        if f.up and f.only in ("", name):
            upstream = f.up(upstream, given)
        # an output may be infinite where its upstream gradient is 0
        output = torch.where(upstream == 0, 0, outputs[name])
        terms.append((output * upstream).sum())
    if not terms:
        return KernelOutcome(numbers)
    total = torch.stack(terms).sum()
    gradients: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        numbers[f"gradient of {name}"] = gradient
    return KernelOutcome(numbers)


def _outputs(given: Problem, f: Stages) -> dict[str, Tensor]:
    """Return the log-probabilities and the entropies, with the stages of f: from y, the
    logits, to z, those after the softcap, to x, those at the temperature τ.
    """
    tau = given.temperature
    y = (f.y or states)(given)
    z = (f.z or cap)(y, given)
    divide = f.x or torch.div
    x = divide(z, tau)
    x_of_entropy = (f.x_H or divide)(z, tau)
    tokens = given.tokens.long().clamp(min=0)  # padding may have an id of -100
    x_of_token = (f.picked or pick)(x, tokens, tau)
    log_Z = (f.log_Z or log_sum)(x)
    lp = x_of_token - log_Z
    if f.lp:
        lp = f.lp(lp, given)
    H = entropy(x_of_entropy)
    if f.H:
        H = f.H(H, x, lp)
    return {"log-prob": lp, "entropy": H}


# ---- the records ---------------------------------------------------------------------
def as_if(value: Tensor, gradient: Tensor) -> Tensor:
    """Return a tensor that has this value and the gradient of the other tensor."""
    return gradient + (value - gradient).detach()


def _p_log_p(H: Tensor, x: Tensor, lp: Tensor) -> Tensor:
    """Return H with the gradient -p log p by the logits; -p (log p + H) is right."""
    log_p = (x - log_sum(x)[..., None]).detach()
    return as_if(H, -(log_p.exp() * log_p * x).sum(-1))


def _read_as_contiguous(u: Tensor) -> Tensor:
    """Return the tensor as code reads it that ignores strides: the numbers in memory
    from its first one on, in the same shape. Where memory holds fewer numbers, the first
    one stands for all.
    """
    room = u.untyped_storage().nbytes() // u.element_size() - u.storage_offset()
    if room < u.numel():  # expanded from fewer numbers
        return u.flatten()[0].expand_as(u)
    return u.as_strided(
        u.shape, torch.empty_like(u, memory_format=torch.contiguous_format).stride()
    )


def _vocabulary_size(problem: Problem) -> int:
    """Return V, the number of ids."""
    return problem.x.shape[-1] if problem.weight is None else len(problem.weight)


def _with_frozen_weight(problem: Problem) -> Problem:
    """Return the problem with a weight that gets no gradient."""
    if problem.weight is None:
        return problem
    return replace(problem, weight=problem.weight.detach())


def _softcap_fault(
    words: str, f: Callable[[Tensor, float, float], Tensor], id: str
) -> LogprobFault:
    """Make a fault of the softcap: f takes y, the softcap and τ. It changes nothing
    where a problem has no softcap.
    """
    return fault(
        f"the softcap {words}",
        id=id,
        z=lambda y, p: y if p.softcap is None else f(y, p.softcap, p.temperature),
    )


def _upstream_faults(
    words: str, up: Callable[[Tensor, Problem], Tensor], id: str
) -> Iterator[LogprobFault]:
    """Yield a fault of both upstream gradients, then of each one alone."""
    yield fault(words, id=id, up=up)
    for only in ("log-prob", "entropy"):
        yield fault(f"{words} ({only})", id=f"{only}-{id}", up=up, only=only)


def smoothed(eps: float) -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return the stage `picked` that mixes in a share eps of the mean of all logits."""
    return lambda x, ids, t: (1 - eps) * pick(x, ids) + eps * x.mean(-1)


def at_least(least: float) -> Callable[[Tensor, Problem], Tensor]:
    """Return the stage `lp` with a lower bound on the log-probability."""
    return lambda lp, p: lp.clamp(min=least)


def added(eps: float) -> Callable[[Tensor, Problem], Tensor]:
    """Return the stage `lp` with eps added to the probability."""
    return lambda lp, p: (lp.exp() + eps).log()


def through_probability(
    dtype: torch.dtype,
) -> Callable[[Tensor, Problem], Tensor]:
    """Return the stage `lp` that takes the logarithm of the probability in a dtype."""
    return lambda lp, p: lp.to(dtype).exp().log().double()


def clamped(eps: float) -> Callable[[Tensor, Problem], Tensor]:
    """Return the stage `lp` with a lower bound on the probability."""
    return lambda lp, p: lp.exp().clamp(min=eps).log()


def largest(k: int) -> Callable[[Tensor], Tensor]:
    """Return a function from logits [.., V] to the k largest ones, [.., k]."""
    return lambda x: x.topk(k).values


def shifted(by: int, rows: int) -> Callable[[Problem], Problem]:
    """Return the stage `given` that moves the logits (rows = 1) or the tokens
    (rows = 0) of each response by `by` places; what leaves it comes in at its other end.
    """
    return lambda p: replace(
        p, tokens=p.tokens.roll(by * (1 - rows), -1), x=p.x.roll(by * rows, -2)
    )


PLAIN = (
    fault("the temperature is left out", id="temperature-missing", x=lambda z, t: z),
    fault(
        "the entropy is taken at temperature 1",
        id="entropy-temperature-missing",
        x_H=lambda z, t: z,
    ),
    fault(
        "the logits are divided by the temperature twice",
        id="temperature-twice",
        x=lambda z, t: z / t**2,
    ),
    fault(
        "the logits are multiplied by the temperature",
        id="temperature-multiplied",
        x=lambda z, t: z * t,
    ),
    fault(
        "the log-softmax is divided by the temperature, and not the logits",
        id="log-softmax-over-temperature",
        x=lambda z, t: z,
        lp=lambda lp, p: lp / p.temperature,
    ),
    fault(
        "the log-probs are divided by the temperature once more, after the softmax",
        id="temperature-after-softmax-again",
        lp=lambda lp, p: lp / p.temperature,
    ),
    fault(
        "the backward leaves out the factor 1/temperature",
        id="backward-temperature-missing",
        x=lambda z, t: as_if(z / t, z),
    ),
    fault(
        "the backward multiplies by the temperature",
        id="backward-temperature-multiplied",
        x=lambda z, t: as_if(z / t, z * t),
    ),
    fault(
        "the backward divides by the temperature twice",
        id="backward-temperature-twice",
        x=lambda z, t: as_if(z / t, z / t**2),
    ),
    fault(
        "the backward of the entropy leaves out the factor 1/temperature",
        id="entropy-backward-temperature-missing",
        x_H=lambda z, t: as_if(z / t, z),
    ),
    fault(
        "the backward of the log-probs leaves out the factor 1/temperature",
        id="log-prob-backward-temperature-missing",
        x=lambda z, t: as_if(z / t, z),
        x_H=torch.div,
    ),
    fault(
        "the negative log-likelihood is returned: the sign is flipped",
        id="log-prob-negated",
        lp=lambda lp, p: -lp,
    ),
    fault(
        "the gradient of the log-probs has its sign flipped",
        id="log-prob-gradient-negated",
        lp=lambda lp, p: as_if(lp, -lp),
    ),
    fault(
        "probabilities are returned, and not their logarithms",
        id="probabilities-for-log-probs",
        lp=lambda lp, p: lp.exp(),
    ),
    fault(
        "logits are returned: the normalizer is left out",
        id="normalizer-missing",
        log_Z=lambda x: 0 * x[..., 0],
    ),
    fault(
        "the log-probs are detached: they have no gradient",
        id="log-prob-detached",
        lp=lambda lp, p: lp.detach(),
    ),
    fault(
        "the normalizer is detached: only the sampled token's logit has a gradient",
        id="normalizer-detached",
        log_Z=lambda x: log_sum(x).detach(),
    ),
    fault(
        "the backward of the log-probs is -p: it lacks the sampled token's own 1",
        id="backward-lacks-sampled-token",
        picked=lambda x, ids, t: pick(x, ids).detach(),
    ),
    fault("logarithms to base 2", id="base-2", lp=lambda lp, p: lp / LOG_2),
    fault(
        "the entropy is detached: it has no gradient",
        id="entropy-detached",
        H=lambda H, x, lp: H.detach(),
    ),
    fault(
        "the gradient of the entropy has its sign flipped",
        id="entropy-gradient-negated",
        H=lambda H, x, lp: as_if(H, -H),
    ),
    fault(
        "the gradient of the entropy is -p log p: it lacks the term -p H",
        id="entropy-gradient-lacks-p-h",
        H=_p_log_p,
    ),
    fault(
        "the entropy has its sign flipped", id="entropy-negated", H=lambda H, x, lp: -H
    ),
    fault(
        "the entropy is minus the sampled token's log-prob",
        id="entropy-is-minus-log-prob",
        H=lambda H, x, lp: -lp,
    ),
    fault(
        "the entropy is in bits",
        id="entropy-in-bits",
        H=lambda H, x, lp: H / LOG_2,
    ),
    fault(
        "the entropy is divided by log V",
        id="entropy-over-log-vocabulary",
        H=lambda H, x, lp: H / torch.log(torch.tensor(1.0 * x.shape[-1])),
    ),
    fault(
        "the entropy is averaged over all tokens",
        id="entropy-averaged",
        H=lambda H, x, lp: H.mean().expand_as(H),
    ),
    fault(
        "the logits are divided by the square root of the temperature",
        id="root-of-temperature",
        x=lambda z, t: z / t**0.5,
    ),
    fault(
        "the log-probs are divided by the size of the vocabulary",
        id="log-prob-over-vocabulary",
        lp=lambda lp, p: lp / _vocabulary_size(p),
    ),
    fault(
        "the largest log-prob is returned, not the token's",
        id="largest-log-prob",
        picked=lambda x, ids, t: x.amax(-1),
    ),
    fault(
        "the logarithm of the sigmoid replaces the log-softmax",
        id="sigmoid-for-softmax",
        log_Z=lambda x: 0 * x[..., 0],
        picked=lambda x, ids, t: torch.nn.functional.logsigmoid(pick(x, ids)),
    ),
    *(
        fault(
            f"the softmax is over dimension {d} of the logits, not over the vocabulary",
            id="softmax-over-other-dimension",
            log_Z=lambda x: 0 * x[..., 0],
            picked=partial(_log_softmax_over, dimension=d),
        )
        for d in (0, 1)
    ),
    *(
        fault(
            "the logits are clamped before the softmax",
            id="logits-clamped",
            z=partial(_clamped_logits, bound=bound),
        )
        for bound in (1, 5, 10, 15, 20, 30, 50, 60, 80, 88, 100, 1000)
    ),
    fault("the softcap is left out", id="softcap-missing", z=lambda y, p: y),
    fault(
        "the derivative of the softcap is left out of the backward",
        id="softcap-derivative-missing",
        z=lambda y, p: as_if(cap(y, p), y),
    ),
    _softcap_fault(
        "is not divided by inside tanh",
        lambda y, c, t: c * y.tanh(),
        id="softcap-not-divided",
    ),
    _softcap_fault(
        "is not multiplied by outside tanh",
        lambda y, c, t: (y / c).tanh(),
        id="softcap-not-multiplied",
    ),
    _softcap_fault(
        "is applied after the temperature",
        lambda y, c, t: t * c * (y / t / c).tanh(),
        id="softcap-after-temperature",
    ),
    _softcap_fault(
        "clamps the logits", lambda y, c, t: y.clamp(-c, c), id="softcap-clamps"
    ),
    fault(
        "the logit scale is left out",
        id="logit-scale-missing",
        y=lambda p: states(replace(p, logit_scale=1.0)),
    ),
    fault(
        "the logit scale is left out of the backward",
        id="logit-scale-missing-in-backward",
        y=lambda p: as_if(states(p), states(replace(p, logit_scale=1.0))),
    ),
    fault(
        "the bias is left out",
        id="bias-missing",
        y=lambda p: states(replace(p, bias=None)),
    ),
    *_upstream_faults(
        "the first token's upstream gradient is used for all",
        lambda u, p: u.flatten()[0].expand_as(u),
        id="upstream-of-first-token",
    ),
    *_upstream_faults(
        "the mean of the upstream gradients is used for all tokens",
        lambda u, p: u.mean().expand_as(u),
        id="upstream-averaged",
    ),
    *_upstream_faults(
        "the upstream gradient is ignored: all tokens count 1",
        lambda u, p: torch.ones_like(u),
        id="upstream-ignored",
    ),
    *_upstream_faults(
        "negative upstream gradients are dropped",
        lambda u, p: u.clamp(min=0),
        id="negative-upstream-dropped",
    ),
    *_upstream_faults(
        "the upstream gradient is read as contiguous: its layout is ignored",
        lambda u, p: _read_as_contiguous(u),
        id="upstream-read-as-contiguous",
    ),
    fault(
        "the entropy's gradient is skipped where the log-prob's upstream gradient is 0",
        id="entropy-gradient-skipped",
        only="entropy",
        up=lambda u, p: 0 * u if p.g is None else u * (p.g != 0),
    ),
    fault(
        "the input is read as contiguous: its layout is ignored",
        id="input-read-as-contiguous",
        given=lambda p: replace(p, x=_read_as_contiguous(p.x)),
    ),
    *(
        fault(
            f"shifted by one: {mix_up} {sign} 1",
            id=f"{id}-{which}",
            given=shifted(by, rows),
            inner=True,
        )
        for rows, (id, mix_up) in enumerate(
            (
                ("log-prob-of", "row t has the log-prob of token t"),
                ("logits-of", "token t is scored by the logits of row t"),
            )
        )
        for which, sign, by in (("next-token", "+", -1), ("previous-token", "-", 1))
    ),
    fault(
        "the ids are stored in 16 bits",
        id="ids-in-16-bits",
        given=lambda p: replace(
            p,
            tokens=p.tokens.to(torch.int16).long()
            % (p.x if p.weight is None else p.weight.mT).shape[-1],
        ),
    ),
    fault(
        "id 0 is treated as padding: its log-prob is 0",
        id="id-0-as-padding",
        lp=lambda lp, p: lp.masked_fill(p.tokens == 0, 0),
    ),
    fault(
        "each token has the mean of its row",
        id="log-prob-averaged-over-row",
        lp=lambda lp, p: lp.mean(-1, True).expand_as(lp),
    ),
    fault(
        "the sampled token is left out of the normalizer",
        id="sampled-token-left-out-of-normalizer",
        lp=lambda lp, p: lp - (-lp.expm1()).log(),
    ),
    *(
        fault(
            f"labels are smoothed by {eps:g}",
            id="labels-smoothed",
            picked=smoothed(eps),
        )
        for eps in (0.01, 0.05, 0.1, 0.2)
    ),
    *(
        fault(
            f"the log-probs are clamped to at least {at}",
            id="log-prob-floored",
            lp=at_least(at),
        )
        for at in (-1, -2, -5, -8, -10, -15, -20, -25, -30, -50, -100)
    ),
    fault(
        "temperatures below 1 are ignored",
        id="temperature-below-1-ignored",
        x=lambda z, t: z / max(t, 1.0),
    ),
    fault(
        "temperatures above 1 are ignored",
        id="temperature-above-1-ignored",
        x=lambda z, t: z / min(t, 1.0),
    ),
    fault(
        "the normalizer leaves out the temperature",
        id="normalizer-temperature-missing",
        x=lambda z, t: z,
        x_H=torch.div,
        picked=lambda x, ids, t: pick(x, ids) / t,
    ),
    fault(
        "the sampled token's logit leaves out the temperature",
        id="sampled-logit-temperature-missing",
        picked=lambda x, ids, t: pick(x, ids) * t,
    ),
    fault(
        "the bias is not divided by the temperature",
        id="bias-temperature-missing",
        y=lambda p: states(
            p if p.bias is None else replace(p, bias=p.bias * p.temperature)
        ),
    ),
    fault(
        "the entropy is a mean over the vocabulary, not a sum",
        id="entropy-over-vocabulary",
        H=lambda H, x, lp: H / x.shape[-1],
    ),
    fault(
        "the maximum of the whole batch is subtracted, not each row's",
        id="maximum-of-batch",
        log_Z=lambda x: (m := x.detach().max()) + (x - m).exp().sum(-1).log(),
    ),
    fault(
        "the running maximum starts at 0",
        id="running-maximum-from-0",
        log_Z=lambda x: (
            (m := x.detach().amax(-1, keepdim=True).clamp(min=0))[..., 0]
            + (x - m).exp().sum(-1).log()
        ),
    ),
    fault(
        "exp is taken without subtracting the maximum",
        id="exp-before-maximum",
        log_Z=lambda x: x.exp().sum(-1).log(),
    ),
    fault(
        "the weight gets no gradient",
        id="weight-without-gradient",
        y=lambda p: states(_with_frozen_weight(p)),
    ),
    fault(
        "the hidden states get no gradient",
        id="hidden-states-without-gradient",
        y=lambda p: states(p if p.weight is None else replace(p, x=p.x.detach())),
    ),
    *(
        fault(
            "it takes the logarithm of the softmax: -inf, without a gradient, where the probability underflows to 0",
            id="log-of-softmax",
            lp=through_probability(dtype),
        )
        for dtype in (torch.float64, torch.float32)
    ),
    *(
        fault(
            f"{eps:g} is added to the probability",
            id="probability-plus-constant",
            lp=added(eps),
        )
        for eps in EPS
    ),
    *(
        fault(
            f"the probability is clamped to at least {eps:g}",
            id="probability-floored",
            lp=clamped(eps),
        )
        for eps in EPS
    ),
)


def known(problem: Problem) -> Iterator[LogprobFault]:
    """Yield all known faults, in the order in which they are tried: PLAIN first, then the
    sizes of tiles, the largest first, and last the sums over the largest logits alone.
    Those of code that cuts the vocabulary or the tokens into tiles have the sizes that cut
    this problem.
    """
    yield from PLAIN
    V = _vocabulary_size(problem)
    for n in TILES:
        yield from _column_tile_faults(V, n)
        yield from _token_tile_faults(problem.tokens.shape, n)
    for k in (k for k in TOP if k < V):
        yield _normalizer_fault(
            f"all but the {k} largest logits are left out of the sums over the vocabulary",
            largest(k),
            id="normalized-over-largest",
            size=k,
        )


def _normalizer_fault(
    words: str, change: Callable[[Tensor], Tensor], id: str, size: int
) -> LogprobFault:
    """Make a fault of the sums over the vocabulary, in log Z and in H."""
    return fault(
        words,
        id=id,
        size=size,
        log_Z=lambda x: log_sum(change(x)),
        H=lambda H, x, lp: entropy(change(x)),
    )


def _column_tile_faults(V: int, n: int) -> Iterator[LogprobFault]:
    """Yield the faults of a kernel with tiles of n columns.

    Args:
        V: the ids of the vocabulary.
        n: the columns of a tile. Faults of a last, partial tile are left out where there
            is none.
    """
    full_columns = V // n * n
    padded_columns = math.ceil(V / n) * n
    start_of_last = (V - 1) // n * n
    # more columns of padding than the vocabulary has are tried for small tiles alone
    if V < padded_columns <= 2 * V + 8 or V < n <= 128:

        def with_padding(x: Tensor) -> Tensor:
            """Return the logits, with a 0 for each column that pads the vocabulary."""
            return torch.nn.functional.pad(x, (0, padded_columns - V))

        yield _normalizer_fault(
            f"the columns that pad the vocabulary to a multiple of {n} are counted",
            with_padding,
            id="padding-columns-counted",
            size=n,
        )

    def is_missed(ids: Tensor) -> Tensor:
        """Mark the tokens whose id is the last of a tile, or of the vocabulary."""
        return (ids % n == n - 1) | (ids == V - 1)

    has_tiles = n < V
    tile_words = f"each tile of {n} columns" if has_tiles else "the vocabulary"
    yield fault(
        f"the last id of {tile_words} is missed: its logit counts 0",
        id="last-id-of-tile-missed",
        size=n if has_tiles else 0,
        picked=lambda x, ids, t: pick(x, ids).masked_fill(is_missed(ids), 0),
    )
    if not 0 < full_columns < V:
        return
    yield _normalizer_fault(
        f"the last, partial tile of {n} columns is left out",
        lambda x: x[..., :full_columns],
        id="last-tile-left-out",
        size=n,
    )
    yield fault(
        f"the last, partial tile of {n} columns gets no gradient",
        id="last-tile-without-gradient",
        size=n,
        x=lambda z, t: (
            torch.cat([z[..., :full_columns], z[..., full_columns:].detach()], -1) / t
        ),
    )
    yield fault(
        f"the hidden states' gradient has the last tile of {n} columns alone",
        id="gradient-of-last-tile-alone",
        size=n,
        x=lambda z, t: (
            torch.cat([z[..., :start_of_last].detach(), z[..., start_of_last:]], -1) / t
        ),
    )
    yield fault(
        f"the running sums of tiles of {n} columns are not rescaled",
        id="running-sums-not-rescaled",
        size=n,
        log_Z=lambda x: _sum_without_rescaling(x, n),
        H=lambda H, x, lp: (
            log_sum(x)
            - _sum_without_rescaling(x, n, x) / (log_sum(x) - x.amax(-1)).exp()
        ),
    )


def _sum_without_rescaling(x: Tensor, n: int, factor: Tensor | None = None) -> Tensor:
    """Return log Z of a kernel that does not rescale its running sum when the maximum
    grows. With a factor, return its sum of exp(x - maximum) factor instead.
    """
    maximum_so_far = (
        torch.stack([tile.amax(-1) for tile in x.split(n, -1)], -1).cummax(-1).values
    )
    maximum_of_column = maximum_so_far.repeat_interleave(n, -1)[..., : x.shape[-1]]
    exponentials = (x - maximum_of_column).exp()
    if factor is None:
        return maximum_so_far[..., -1] + exponentials.sum(-1).log()
    return (exponentials * factor).sum(-1)


def _token_tile_faults(shape: torch.Size, n: int) -> Iterator[LogprobFault]:
    """Yield the faults of a kernel with tiles of n tokens, where n tokens cut this shape.

    Args:
        shape: of the tokens.
        n: the tokens of a tile.
    """
    N = shape.numel()
    index = torch.arange(N).reshape(shape)
    is_in_last = index >= N // n * n
    tile_words = f"the last, partial tile of {n} tokens"

    def without_weight_gradient_of(rows: Tensor) -> Callable[[Problem], Tensor]:
        """Return the stage `y` in which these rows give the weight no gradient."""
        return lambda p: torch.where(
            rows[..., None], states(_with_frozen_weight(p)), states(p)
        )

    if is_in_last.any() and not is_in_last.all():
        yield fault(
            f"{tile_words} is left out: its results are 0",
            id="last-rows-left-out",
            size=n,
            lp=lambda lp, p: lp.masked_fill(is_in_last, 0),
            H=lambda H, x, lp: H.masked_fill(is_in_last, 0),
        )
        yield fault(
            f"{tile_words} gets no gradient",
            id="last-rows-without-gradient",
            size=n,
            up=lambda u, p: u.masked_fill(is_in_last, 0),
        )
        yield fault(
            f"the weight's gradient lacks {tile_words}",
            id="weight-gradient-lacks-last-rows",
            size=n,
            y=without_weight_gradient_of(is_in_last),
        )
    if n >= N:
        return
    # the rows that give the weight no gradient: all but those of one tile
    all_but_first = index >= n
    all_but_last = index < (N - 1) // n * n
    for which, rows in (("first", all_but_first), ("last", all_but_last)):
        yield fault(
            f"the weight's gradient has the {which} tile of {n} tokens alone",
            id=f"weight-gradient-of-{which}-rows-alone",
            size=n,
            y=without_weight_gradient_of(rows),
        )
