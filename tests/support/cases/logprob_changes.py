# SPDX-License-Identifier: Apache-2.0
"""Log-prob functions that are one change away from the plain one. A row is (name,
function, keyword arguments of the check, if any); one of WRONG has part of its cause
after the name, "" where none is asked for.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import upref
from upref import hidden, logprobs


def of(x, tokens):
    """Return (log-probabilities of the tokens, entropies) of logits at temperature 1."""
    lp = x.log_softmax(-1)
    p = lp.exp()
    return lp.gather(-1, tokens[..., None])[..., 0], -(
        p * lp.masked_fill(p == 0, 0)
    ).sum(-1)


def picked(x, tokens, log_Z):
    """Return the tokens' logits less log Z."""
    return x.gather(-1, tokens[..., None])[..., 0] - log_Z


def as_if(value, gradient):
    """Return `value` with the gradient of `gradient`."""
    return gradient + (value - gradient).detach()


# ---- right ---------------------------------------------------------------------------
def naive(hidden, weight, tokens, temperature):
    return of(hidden @ weight.T / temperature, tokens)


def nll_of_torch(logits, labels, temperature):
    return -F.cross_entropy(
        (logits / temperature).flatten(0, -2), labels.flatten(), reduction="none"
    ).view_as(labels)


def by_dict(hidden_states, lm_head_weight, target_ids, tau):
    lp, H = naive(hidden_states, lm_head_weight, target_ids, tau)
    return {"logps": lp, "entropies": H}


def flat_only(h, w, ids, temperature):
    assert h.ndim == 2
    return naive(h, w, ids, temperature)


def in_rows(hidden, weight, tokens, temperature):
    """Return log-probabilities and entropies, computed for 512 tokens at a time."""
    rows = zip(
        hidden.flatten(0, -2).split(512), tokens.flatten().split(512), strict=True
    )
    lp, H = zip(*(naive(h, weight, t, temperature) for h, t in rows), strict=True)
    return torch.cat(lp).view_as(tokens), torch.cat(H).view_as(tokens)


def in_float32(hidden, weight, tokens, temperature):
    return naive(hidden.float(), weight.float(), tokens, temperature)


def logits_in_bfloat16(hidden, weight, tokens, temperature):
    return of((hidden @ weight.T).bfloat16().float() / temperature, tokens)


def without_temperature(hidden, weight, tokens):
    return naive(hidden, weight, tokens, 1.0)[0]


def with_bias(hidden, weight, tokens, temperature, bias):
    return of((hidden @ weight.T + bias) / temperature, tokens)


def fused(
    hidden, weight, tokens, temperature, bias=None, softcap=None, logit_scale=1.0
):
    """Return upref's own log-probabilities of hidden states, at every setting."""
    settings = {
        "temperature": temperature,
        "bias": bias,
        "softcap": softcap,
        "logit_scale": logit_scale,
    }
    return upref.hidden.token_log_probs(hidden, weight, tokens, chunk=1000, **settings)


def of_upref(logits, tokens, temperature):
    found = logprobs.token_log_probs(logits, tokens, temperature=temperature)
    return found, logprobs.entropy(logits, temperature=temperature)


class InPlaceBackward(torch.autograd.Function):
    """Right, and its second backward is refused by autograd's own check."""

    @staticmethod
    def forward(ctx, x, tokens):
        log_Z = x.logsumexp(-1)
        ctx.save_for_backward((x - log_Z[..., None]).exp(), tokens)
        return picked(x, tokens, log_Z)

    @staticmethod
    def backward(ctx, g):
        p, tokens = ctx.saved_tensors
        dx = p.neg_().scatter_add_(-1, tokens[..., None], torch.ones_like(p[..., :1]))
        return dx * g[..., None], None


def in_place(logits, tokens, temperature):
    return InPlaceBackward.apply(logits / temperature, tokens)


# ---- wrong ---------------------------------------------------------------------------
def x_is(change):
    """Return a function of hidden states, with change(logits, temperature) as the
    scores of its softmax.
    """
    return lambda hidden, weight, tokens, temperature: of(
        change(hidden @ weight.T, temperature), tokens
    )


def normalized(log_Z):
    """Return a function of logits with log_Z(logits) as the normalizer."""

    def f(logits, tokens, temperature):
        x = logits / temperature
        return picked(x, tokens, log_Z(x))

    return f


def entropy_is(change):
    """Return a function with change(entropies, logits, log-probabilities) in place of
    the entropies.
    """

    def f(hidden, weight, tokens, temperature):
        x = hidden @ weight.T / temperature
        lp, H = of(x, tokens)
        return lp, change(H, x, lp)

    return f


class Upstream(torch.autograd.Function):
    """The identity, whose backward changes the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.change(g), None


def upstream(change):
    return lambda hidden, weight, tokens, temperature: Upstream.apply(
        naive(hidden, weight, tokens, temperature)[0], change
    )


def overwritten(g):
    g.mul_(2)
    return g / 2


def summed_in_bfloat16(n):
    """Return a function whose gradient by the weight is summed over chunks of n tokens
    in the weight's dtype. Its values, and its gradient by the hidden states, are
    computed in float64.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, W, tokens):
            ctx.save_for_backward(h, W, tokens)
            return of(h.double() @ W.double().T, tokens)[0]

        @staticmethod
        def backward(ctx, g):
            """Return the gradients of h and W, the latter summed in W's dtype over
            parts of n rows.
            """
            h, W, tokens = ctx.saved_tensors
            h = h.flatten(0, -2)
            p = (h.double() @ W.double().T).softmax(-1)
            dx = F.one_hot(tokens.flatten(), len(W)) - p
            dx = dx * g.double().flatten()[:, None]
            dW = torch.zeros_like(W)
            for i in range(0, len(h), n):
                dW += (dx[i : i + n].T @ h[i : i + n].double()).to(W.dtype)
            return (dx @ W.double()).to(h.dtype).view(*tokens.shape, -1), dW, None

    return lambda hidden, weight, tokens: Function.apply(hidden, weight, tokens)


def in_tiles_of_64(dropped):
    """Return a function whose normalizer is a logsumexp over tiles of 64 columns,
    without those for which dropped(tile, logits) is true.
    """

    def f(hidden, weight, tokens, temperature):
        x = hidden @ weight.T / temperature
        parts = [t.logsumexp(-1) for t in x.split(64, -1) if not dropped(t, x)]
        return picked(x, tokens, torch.stack(parts, -1).logsumexp(-1))

    return f


def forgets_rows(hidden, weight, tokens, temperature):
    n = tokens.numel() // 32 * 32 or tokens.numel()
    lp, _ = naive(hidden, weight, tokens, temperature)
    return torch.where(torch.arange(tokens.numel()).view_as(tokens) < n, lp, 0)


def weight_of_first_rows(hidden, weight, tokens, temperature):
    first = torch.arange(tokens.numel()).view_as(tokens) < 1024
    a, b = (naive(hidden, w, tokens, temperature)[0] for w in (weight, weight.detach()))
    return torch.where(first, a, b)


def reads_memory(g):
    enough = g.storage_offset() == 0 and g.untyped_storage().size() >= 8 * g.numel()
    return torch.as_strided(g, g.shape, (g.shape[1], 1)) if enough else g


def stateful(hidden, weight, tokens, temperature, calls=[0]):  # noqa: B006
    calls[0] += 1
    return naive(hidden, weight, tokens, temperature)[0] * (1 + 0.01 * calls[0])


def writes(logits, tokens, temperature):
    logits.div_(temperature)
    return of(logits, tokens)


def capped(change):
    return lambda hidden, weight, tokens, temperature: of(
        change(hidden @ weight.T, 5.0) / temperature, tokens
    )


# ---- two processes -------------------------------------------------------------------
class Reduced(torch.autograd.Function):
    """A sum over ranks of which every rank has the whole: its gradient is the upstream
    one.
    """

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def parallel(logits, tokens, temperature, reduce=Reduced.apply):
    """Return log-probabilities of logits that are sharded over the ranks by columns;
    without ranks, of whole logits.

    reduce: the sum over ranks, with its gradient.
    """
    x, rank = logits / temperature, dist.get_rank() if dist.is_initialized() else 0
    if not dist.is_initialized():
        return picked(x, tokens, x.logsumexp(-1))
    m = x.detach().amax(-1)
    dist.all_reduce(m, dist.ReduceOp.MAX)
    local = tokens - rank * x.shape[-1]
    inside = (local >= 0) & (local < x.shape[-1])
    at = x.gather(-1, local.clamp(0, x.shape[-1] - 1)[..., None])[..., 0]
    s = (x - m[..., None]).exp().sum(-1)
    return reduce(torch.where(inside, at, 0)) - m - reduce(s).log()


def unreduced(x):
    dist.all_reduce(x := x.clone())
    return x


def plain_all_reduce(logits, tokens, temperature):
    """Return sharded log-probabilities by an all_reduce that has no gradient."""

    def summed(x):
        x = x.clone()
        dist.all_reduce(x.detach())
        return x.detach() + 0 * x

    return parallel(logits, tokens, temperature, summed)


def log_ranks(logits, tokens, temperature):
    """Return sharded log-probabilities less the logarithm of the number of ranks."""
    lp = parallel(logits, tokens, temperature)
    return (
        lp - torch.tensor(float(dist.get_world_size())).log()
        if dist.is_initialized()
        else lp
    )


RIGHT = [
    *((fn.__name__, fn, {}) for fn in (
        naive, nll_of_torch, by_dict, flat_only, in_rows, in_float32, logits_in_bfloat16, without_temperature,
        with_bias, fused, of_upref, in_place)),
    ("hidden.token_log_probs", hidden.token_log_probs, {}), ("logprobs.token_log_probs", logprobs.token_log_probs, {}),
    ("names z, t, tau", lambda z, t, tau: of(z / tau, t), {}),
    ("names h, W, t, T", lambda h, W, t, T: naive(h, W, t, T), {}),
    ("names a, b, c, d", lambda a, b, c, d: naive(a, b, c, d), {}),
    ("names z, tokens, t", lambda z, tokens, t: of(z / t, tokens)[0], {}),
    ("names z, tokens, temperature", lambda z, tokens, temperature: of(z / temperature, tokens)[0], {}),
    ("fused, capped and scaled", fused, {"softcap": 5.0, "logit_scale": 0.25}),
    ("softcap", capped(lambda y, cap: cap * (y / cap).tanh()), {"softcap": 5.0}),
    ("in parallel, on one rank", parallel, {}), ("in parallel, on two ranks", parallel, {"ranks": 2}),
    ("plain all_reduce, on one rank", plain_all_reduce, {}), ("log(ranks), on one rank", log_ranks, {}),
]  # fmt: skip
WRONG = [
    ("no temperature", "the temperature is left out", x_is(lambda z, t: z)),
    ("z / t / t", "divided by the temperature twice", x_is(lambda z, t: z / t / t)),
    ("z t", "multiplied by the temperature", x_is(lambda z, t: z * t)),
    ("no 1 / t backward", "the backward leaves out the factor 1/temperature", x_is(lambda z, t: as_if(z / t, z))),
    ("log-softmax / t", "log-softmax is divided by the temperature",
     lambda z, t, tau: z.log_softmax(-1).gather(-1, t[..., None])[..., 0] / tau),
    ("entropy at 1", "the entropy is taken at temperature 1",
     lambda hidden, weight, tokens, temperature: (
         naive(hidden, weight, tokens, temperature)[0], naive(hidden, weight, tokens, 1.0)[1])),
    ("minus", "sign is flipped",
     lambda hidden, weight, tokens, temperature: -naive(hidden, weight, tokens, temperature)[0]),
    ("probabilities", "probabilities are returned",
     lambda hidden, weight, tokens, temperature: naive(hidden, weight, tokens, temperature)[0].exp()),
    ("detached H", "the entropy is detached", entropy_is(lambda H, x, lp: H.detach())),
    ("gradient of -H", "the gradient of the entropy has its sign flipped", entropy_is(lambda H, x, lp: as_if(H, -H))),
    ("gradient of H without p H", "lacks the term -p H",
     entropy_is(lambda H, x, lp: as_if(H, -((x.log_softmax(-1) * x.softmax(-1)).detach() * x).sum(-1)))),
    ("-lp as the entropy", "minus the sampled token's log-prob", entropy_is(lambda H, x, lp: -lp)),
    ("H in bits", "in bits", entropy_is(lambda H, x, lp: H / torch.tensor(2.0).double().log())),
    ("detached log Z", "the normalizer is detached", normalized(lambda x: x.logsumexp(-1).detach())),
    ("no log Z", "the normalizer is left out", normalized(lambda x: 0 * x[..., 0])),
    ("log of the sum of exp", "exp is taken without subtracting the maximum", normalized(lambda x: x.exp().sum(-1).log())),
    ("maximum of at least 0", "the running maximum starts at 0",
     normalized(lambda x: (m := x.detach().amax(-1).clamp(min=0)) + (x - m[..., None]).exp().sum(-1).log())),
    ("p + 1e-8", "is added to the probability",
     lambda z, t, tau: ((z / tau).softmax(-1).gather(-1, t[..., None])[..., 0] + 1e-8).log()),
    ("p of at least 1e-9", "probability is clamped",
     lambda z, t, tau: (z / tau).softmax(-1).gather(-1, t[..., None])[..., 0].clamp(min=1e-9).log()),
    ("first upstream", "first token's upstream gradient", upstream(lambda g: g.flatten()[0].expand_as(g))),
    ("mean upstream", "mean of the upstream", upstream(lambda g: g.mean().expand_as(g))),
    ("no upstream", "all tokens count 1", upstream(torch.ones_like)),
    ("upstream's memory", "its layout is ignored", upstream(reads_memory)),
    ("upstream overwritten", "", upstream(overwritten)),
    ("next token", "the log-prob of token t + 1", lambda z, t, tau: of(z / tau, t.roll(-1, -1))),
    ("no last tile of columns", "columns is left out", in_tiles_of_64(lambda t, x: t.shape[-1] < 64 < x.shape[-1])),
    ("128 columns", "multiple of 128 are counted",
     normalized(lambda x: F.pad(x, (0, -x.shape[-1] % 128 if x.shape[-1] > 64 else 0)).logsumexp(-1))),
    ("32 rows", "tile of 32 tokens is left out", forgets_rows),
    ("1024 rows", "first tile of 1024 tokens alone", weight_of_first_rows),
    ("detached weight", "the weight gets no gradient",
     lambda hidden, weight, tokens, temperature: naive(hidden, weight.detach(), tokens, temperature)),
    ("dW in bfloat16", "dW is added up in bfloat16, 4 tokens", summed_in_bfloat16(4)),
    ("root of the temperature", "by the square root of the temperature", x_is(lambda z, t: z / t**0.5)),
    ("clamped logits", "the logits are clamped before the softmax", x_is(lambda z, t: z.clamp(-50, 50) / t)),
    ("softmax over the rows", "over dimension 0",
     lambda z, tokens, t: (z / t).log_softmax(0).gather(-1, tokens[..., None])[..., 0]),
    ("log-probs over V", "by the size of the vocabulary", lambda z, tokens, t: of(z / t, tokens)[0] / z.shape[-1]),
    ("the largest", "the largest log-prob", lambda z, tokens, t: (z / t).log_softmax(-1).amax(-1)),
    ("sigmoid", "the sigmoid replaces", lambda z, tokens, t: F.logsigmoid(z / t).gather(-1, tokens[..., None])[..., 0]),
    ("one entropy", "the entropy is averaged over all tokens",
     entropy_is(lambda H, x, lp: H.mean().expand_as(H))),
    ("stateful", "", stateful),
    ("in the caller's logits", "", writes),
]  # fmt: skip
CAPPED = [
    ("no softcap", "the softcap is left out", lambda y, cap: y),
    (
        "no slope of the softcap",
        "the derivative of the softcap",
        lambda y, cap: as_if(cap * (y / cap).tanh(), y),
    ),
    ("cap tanh(y)", "not divided by inside tanh", lambda y, cap: cap * y.tanh()),
    ("y clamped", "clamps the logits", lambda y, cap: y.clamp(-cap, cap)),
]
WRONG += [(name, cause, capped(change), {"softcap": 5.0}) for name, cause, change in CAPPED] + [
    ("softcap not read", "", naive, {"softcap": 5.0, "skip": ("tiles", "bfloat16")}),
    ("plain all_reduce", "there is no gradient", plain_all_reduce, {"ranks": 2}),
    ("log(ranks)", "log(ranks) is subtracted", log_ranks, {"ranks": 2}),
]  # fmt: skip
