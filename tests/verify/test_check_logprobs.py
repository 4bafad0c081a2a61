# SPDX-License-Identifier: Apache-2.0
"""check_logprobs on right and wrong functions. A row is (part of the cause, function); a cause of "" is not asked for.

The contract: log-probs in nats and, where a function returns a pair, entropies; gradients of both. Rounding, NaN at
logits of -inf, NaN from masked NaN states, and a refusal of -100 or of a layout are notes.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import upref
from upref import InputError, check_logprobs, hidden, logprobs


def of(x, tokens):
    lp = x.log_softmax(-1)
    p = lp.exp()
    return lp.gather(-1, tokens[..., None])[..., 0], -(p * lp.masked_fill(p == 0, 0)).sum(-1)


def picked(x, tokens, log_Z):
    return x.gather(-1, tokens[..., None])[..., 0] - log_Z


def as_if(value, gradient):
    return gradient + (value - gradient).detach()


# ---- right -----------------------------------------------------------------------------------------------------------
def naive(hidden, weight, tokens, temperature):
    return of(hidden @ weight.T / temperature, tokens)


def nll_of_torch(logits, labels, temperature):
    return -F.cross_entropy((logits / temperature).flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


def by_dict(hidden_states, lm_head_weight, target_ids, tau):
    lp, H = naive(hidden_states, lm_head_weight, target_ids, tau)
    return {"logps": lp, "entropies": H}


def flat_only(h, w, ids, temperature):
    assert h.ndim == 2
    return naive(h, w, ids, temperature)


def in_rows(hidden, weight, tokens, temperature):
    rows = zip(hidden.flatten(0, -2).split(512), tokens.flatten().split(512), strict=True)
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


def fused(hidden, weight, tokens, temperature, bias=None, softcap=None, logit_scale=1.0):
    settings = {"temperature": temperature, "bias": bias, "softcap": softcap, "logit_scale": logit_scale}
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


RIGHT = [
    naive, nll_of_torch, by_dict, flat_only, in_rows, in_float32, logits_in_bfloat16, without_temperature, with_bias,
    fused, of_upref, hidden.token_log_probs, logprobs.token_log_probs, lambda z, t, tau: of(z / tau, t),
    lambda h, W, t, T: naive(h, W, t, T), lambda a, b, c, d: naive(a, b, c, d),
    lambda z, tokens, t: of(z / t, tokens)[0], lambda z, tokens, temperature: of(z / temperature, tokens)[0],
]  # fmt: skip


@pytest.mark.parametrize("fn", RIGHT, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_right_functions_agree(fn):
    report = check_logprobs(fn)
    assert report, str(report)


# ---- wrong -----------------------------------------------------------------------------------------------------------
def x_is(change):
    """From hidden states, x as this makes it of the logits and the temperature."""
    return lambda hidden, weight, tokens, temperature: of(change(hidden @ weight.T, temperature), tokens)


def normalized(log_Z):
    """From logits, with this normalizer."""

    def f(logits, tokens, temperature):
        x = logits / temperature
        return picked(x, tokens, log_Z(x))

    return f


def entropy_is(change):
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
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h, W, tokens):
            ctx.save_for_backward(h, W, tokens)
            return of(h.double() @ W.double().T, tokens)[0]

        @staticmethod
        def backward(ctx, g):
            h, W, tokens = (x.flatten(0, -2) if i == 0 else x for i, x in enumerate(ctx.saved_tensors))
            dx = F.one_hot(tokens.flatten(), len(W)) - (h.double() @ W.double().T).softmax(-1)
            dx = dx * g.double().flatten()[:, None]
            dW = torch.zeros_like(W)
            for i in range(0, len(h), n):
                dW += (dx[i : i + n].T @ h[i : i + n].double()).to(W.dtype)
            return (dx @ W.double()).to(h.dtype).view(*tokens.shape, -1), dW, None

    return lambda hidden, weight, tokens: Function.apply(hidden, weight, tokens)


def in_tiles_of_64(dropped):
    """Online softmax over tiles of 64 columns; `dropped` says which tiles are left out."""

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


WRONG = [
    ("the temperature is left out", x_is(lambda z, t: z)),
    ("divided by the temperature twice", x_is(lambda z, t: z / t / t)),
    ("multiplied by the temperature", x_is(lambda z, t: z * t)),
    ("the backward leaves out the factor 1/temperature", x_is(lambda z, t: as_if(z / t, z))),
    (
        "log-softmax is divided by the temperature",
        lambda z, t, tau: z.log_softmax(-1).gather(-1, t[..., None])[..., 0] / tau,
    ),
    (
        "the entropy is taken at temperature 1",
        lambda hidden, weight, tokens, temperature: (
            naive(hidden, weight, tokens, temperature)[0],
            naive(hidden, weight, tokens, 1.0)[1],
        ),
    ),
    ("sign is flipped", lambda hidden, weight, tokens, temperature: -naive(hidden, weight, tokens, temperature)[0]),
    (
        "probabilities are returned",
        lambda hidden, weight, tokens, temperature: naive(hidden, weight, tokens, temperature)[0].exp(),
    ),
    ("the entropy is detached", entropy_is(lambda H, x, lp: H.detach())),
    ("the gradient of the entropy has its sign flipped", entropy_is(lambda H, x, lp: as_if(H, -H))),
    (
        "lacks the term -p H",
        entropy_is(lambda H, x, lp: as_if(H, -((x.log_softmax(-1) * x.softmax(-1)).detach() * x).sum(-1))),
    ),
    ("minus the sampled token's log-prob", entropy_is(lambda H, x, lp: -lp)),
    ("in bits", entropy_is(lambda H, x, lp: H / torch.tensor(2.0).double().log())),
    ("the normalizer is detached", normalized(lambda x: x.logsumexp(-1).detach())),
    ("the normalizer is left out", normalized(lambda x: 0 * x[..., 0])),
    ("exp is taken before the maximum", normalized(lambda x: x.exp().sum(-1).log())),
    (
        "the running maximum starts at 0",
        normalized(lambda x: (m := x.detach().amax(-1).clamp(min=0)) + (x - m[..., None]).exp().sum(-1).log()),
    ),
    (
        "is added to the probability",
        lambda z, t, tau: ((z / tau).softmax(-1).gather(-1, t[..., None])[..., 0] + 1e-8).log(),
    ),
    (
        "probability is clamped",
        lambda z, t, tau: (z / tau).softmax(-1).gather(-1, t[..., None])[..., 0].clamp(min=1e-9).log(),
    ),
    ("first token's upstream gradient", upstream(lambda g: g.flatten()[0].expand_as(g))),
    ("mean of the upstream", upstream(lambda g: g.mean().expand_as(g))),
    ("all tokens count 1", upstream(torch.ones_like)),
    ("its layout is ignored", upstream(reads_memory)),
    ("", upstream(overwritten)),
    ("the log-prob of token t + 1", lambda z, t, tau: of(z / tau, t.roll(-1, -1))),
    ("columns is left out", in_tiles_of_64(lambda t, x: t.shape[-1] < 64 < x.shape[-1])),
    (
        "multiple of 128 are counted",
        normalized(lambda x: F.pad(x, (0, -x.shape[-1] % 128 if x.shape[-1] > 64 else 0)).logsumexp(-1)),
    ),
    ("tile of 32 tokens is left out", forgets_rows),
    ("first tile of 1024 tokens alone", weight_of_first_rows),
    (
        "the weight gets no gradient",
        lambda hidden, weight, tokens, temperature: naive(hidden, weight.detach(), tokens, temperature),
    ),
    ("dW is added up in bfloat16, 4 tokens", summed_in_bfloat16(4)),
    ("", stateful),
    ("", writes),
]


@pytest.mark.parametrize("cause, fn", WRONG, ids=[f"{i} {c[:50]}" for i, (c, _) in enumerate(WRONG)])
def test_wrong_functions_fail_with_their_cause(cause, fn):
    report = check_logprobs(fn)
    assert not report, report.text(True)
    assert any(cause in f.cause for f in report.failures), report.text(True)


CAPPED = [
    ("", lambda y, cap: cap * (y / cap).tanh()),
    ("the softcap is left out", lambda y, cap: y),
    ("the derivative of the softcap", lambda y, cap: as_if(cap * (y / cap).tanh(), y)),
    ("not divided by inside tanh", lambda y, cap: cap * y.tanh()),
    ("clamps the logits", lambda y, cap: y.clamp(-cap, cap)),
]


@pytest.mark.parametrize("cause, change", CAPPED, ids=[c for c, _ in CAPPED])
def test_softcaps(cause, change):
    f = lambda hidden, weight, tokens, temperature: of(change(hidden @ weight.T, 5.0) / temperature, tokens)
    report = check_logprobs(f, softcap=5.0)
    assert bool(report) == (not cause) and all(cause in f.cause for f in report.failures[:1]), str(report)


def test_a_cap_and_a_scale_that_are_arguments_are_given():
    assert check_logprobs(fused, softcap=5.0, logit_scale=0.25)
    assert not check_logprobs(naive, softcap=5.0, skip=("tiles", "bfloat16"))


# ---- two processes ---------------------------------------------------------------------------------------------------
class Reduced(torch.autograd.Function):
    """A sum over ranks of which every rank has the whole: its gradient is the upstream one."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def parallel(logits, tokens, temperature, reduce=Reduced.apply, own=False):
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
    def summed(x):
        x = x.clone()
        dist.all_reduce(x.detach())
        return x.detach() + 0 * x

    return parallel(logits, tokens, temperature, summed)


def log_ranks(logits, tokens, temperature):
    lp = parallel(logits, tokens, temperature)
    return lp - torch.tensor(float(dist.get_world_size())).log() if dist.is_initialized() else lp


@pytest.mark.parametrize(
    "cause, fn", [(None, parallel), ("there is no gradient", plain_all_reduce), ("log(ranks) is subtracted", log_ranks)]
)
def test_a_sharded_vocabulary(cause, fn):
    assert check_logprobs(fn)
    report = check_logprobs(fn, ranks=2)
    assert bool(report) == (cause is None), str(report)
    assert cause is None or cause in report.failures[0].cause, str(report)


# ---- the way in ------------------------------------------------------------------------------------------------------
def test_the_command_and_the_assertion(tmp_path):
    (tmp_path / "my.py").write_text(
        "def lp(logits, tokens, temperature):\n"
        "    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]\n"
    )
    command = [sys.executable, "-m", "upref", "check", "my.py:lp", "--as-logprobs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "the temperature is left out" in done.stdout, done
    assert upref.assert_logprobs(naive)
    with pytest.raises(pytest.fail.Exception, match="temperature"):
        upref.assert_logprobs(x_is(lambda z, t: z))


@pytest.mark.parametrize(
    "fn, settings, says",
    [
        (3, {}, "not a log-probability function"),
        (lambda logits, tokens, temperature: None, {}, "return one each"),
        (lambda logits, tokens, temperature: of(logits, tokens)[0].mean(), {}, "return one each"),
        (lambda logits, tokens, temperature: 1 / 0, {}, "ZeroDivisionError"),
        (lambda logits, tokens, temperature, labels2: 0, {}, "which of"),
        (lambda logits, tokens, temperature, magic: 0, {}, "magic"),
        (lambda: 0, {}, "names no arguments"),
        (naive, {"softcap": -1}, "softcap"),
        (naive, {"ranks": 0}, "ranks"),
        (naive, {"skip": ("no",)}, "no oracle"),
    ],
)
def test_bad_input_is_one_sentence(fn, settings, says):
    with pytest.raises(InputError, match=says):
        check_logprobs(fn, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("name, n", [("torch", 1), pytest.param("trl", 2, marks=pytest.mark.trl)])
def test_the_log_prob_functions_of_torch_and_trl_agree(name, n):
    from upref.audits.kernels import kernels

    found = kernels(name)
    assert len(found.reports) == n and found and all(found.reports.values()), str(found)
