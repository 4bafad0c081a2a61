# SPDX-License-Identifier: Apache-2.0
"""Log-prob functions as people write them: RIGHT ones, and WRONG ones with the fault
planted in each.

Someone wrote them from the documentation of `upref.check_logprobs` and from bug reports
of other projects, without reading the checker. A row is (name, function, keyword
arguments of the check); a wrong row's name is its fault.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

RIGHT, WRONG = [], []


def right(name, **options):
    return lambda fn: RIGHT.append((name, fn, options)) or fn


def wrong(name, **options):
    return lambda fn: WRONG.append((name, fn, options)) or fn


def pick(x, tokens):
    return x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy_of(logp):
    return -(logp.exp() * logp.masked_fill(logp == -math.inf, 0)).sum(-1)


# ---- right, from logits ----


@right("log_softmax and gather")
def plain(logits, tokens, temperature):
    return pick((logits / temperature).log_softmax(-1), tokens)


@right("cross_entropy with the sign turned")
def by_cross_entropy(logits, tokens, temperature):
    """Return log-probabilities as minus a cross-entropy in float32."""
    loss = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float() / temperature,
        tokens.reshape(-1),
        reduction="none",
    )
    return -loss.view(tokens.shape)


@right("torch.distributions.Categorical")
def by_categorical(logits, tokens, temperature):
    d = torch.distributions.Categorical(
        logits=logits / temperature, validate_args=False
    )
    return d.log_prob(tokens), d.entropy()


@right("one row at a time")
def by_rows(logits, tokens, temperature):
    """Return log-probabilities, computed row by row."""
    flat, ids = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1)
    rows = [
        row[i] / temperature - (row / temperature).logsumexp(-1)
        for row, i in zip(flat, ids, strict=True)
    ]
    return torch.stack(rows).view(tokens.shape)


@right("nll_loss of a float64 log_softmax, cast back")
def in_double(logits, tokens, temperature):
    """Return log-probabilities and entropies computed in float64, cast to the dtype of
    the logits.
    """
    logp = (logits.double() / temperature).log_softmax(-1)
    lp = -F.nll_loss(logp.flatten(0, -2), tokens.flatten(), reduction="none").view(
        tokens.shape
    )
    return lp.to(logits.dtype), entropy_of(logp).to(logits.dtype)


@right("a clone divided in place, minus its logsumexp")
def clone_in_place(logits, tokens, temperature):
    x = logits.clone().div_(temperature)
    lse = x.logsumexp(-1)
    p = (x - lse[..., None]).exp()
    return pick(x, tokens) - lse, lse - (p * x.masked_fill(p == 0, 0)).sum(-1)


@right("one-hot product with forbidden tokens masked")
def by_one_hot(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    chosen = torch.arange(logits.shape[-1], device=logits.device) == tokens[..., None]
    return logp.masked_fill(~chosen, 0).sum(-1)


@right("special.entr of the softmax")
def by_entr(logits, tokens, temperature):
    x = logits.float() / temperature
    return pick(x.log_softmax(-1), tokens), torch.special.entr(x.softmax(-1)).sum(-1)


@right("logcumsumexp's last column")
def by_scan(logits, tokens, temperature):
    x = logits.float() / temperature
    return pick(x, tokens) - x.logcumsumexp(-1)[..., -1]


class Answer(NamedTuple):
    logprobs: torch.Tensor
    entropy: torch.Tensor


class Head:
    def __call__(self, logits, labels, tau):
        logp = torch.log_softmax(logits.float() * (1 / tau), dim=-1)
        return Answer(
            torch.take_along_dim(logp, labels[..., None], -1)[..., 0], entropy_of(logp)
        )


right("an object that returns a NamedTuple")(Head())


@right("ids of -100 give a log-prob of 0")
def ignoring(logits, tokens, temperature):
    keep = tokens != -100
    return torch.where(
        keep, plain(logits, tokens.masked_fill(~keep, 0), temperature), 0.0
    )


@right("softmax saved in bfloat16 for the backward")
def saved_in_bf16(logits, tokens, temperature):
    return SavedBf16.apply(logits, tokens, temperature)


class SavedBf16(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, tau):
        logp = (logits.float() / tau).log_softmax(-1)
        ctx.save_for_backward(logp.exp().bfloat16(), tokens)
        ctx.tau, ctx.dtype = tau, logits.dtype
        return pick(logp, tokens)

    @staticmethod
    def backward(ctx, g):
        """Return the gradient by the logits, from probabilities that were saved in
        bfloat16.
        """
        p, tokens = ctx.saved_tensors
        dx = -p.float() * g[..., None]
        return (
            dx.scatter_add(-1, tokens[..., None], g[..., None].to(dx.dtype))
            .div(ctx.tau)
            .to(ctx.dtype),
            None,
            None,
        )


@right("softcap before the temperature", softcap=30.0)
def capped(logits, tokens, temperature):
    return plain(30 * torch.tanh(logits / 30), tokens, temperature)


# ---- right, from hidden states ----


@right("hidden states divided by the temperature")
def scaled_states(hidden, weight, tokens, temperature):
    logp = F.linear(hidden / temperature, weight).float().log_softmax(-1)
    return pick(logp, tokens), entropy_of(logp)


@right("the token's logit from its own row of the head")
def own_row(hidden, weight, tokens, temperature):
    """Return log-probabilities with the token's logit computed from its own row of the
    weight.
    """
    y = (
        torch.einsum("...h,...h->...", hidden.float(), weight[tokens].float())
        / temperature
    )
    return y - torch.einsum(
        "...h,vh->...v", hidden.float() / temperature, weight.float()
    ).logsumexp(-1)


@right("checkpointed chunks of tokens")
def checkpointed(hidden, weight, tokens, temperature, chunk=37):
    """Return log-probabilities and entropies, chunk by chunk of tokens under activation
    checkpointing.
    """

    def part(h, w, ids):
        logp = (h.float() @ w.T / temperature).log_softmax(-1)
        return pick(logp, ids), entropy_of(logp)

    w = weight.float()
    parts = [
        checkpoint(part, h, w, i, use_reentrant=False)
        for h, i in zip(
            hidden.flatten(0, -2).split(chunk),
            tokens.flatten().split(chunk),
            strict=True,
        )
    ]
    lp, ent = (torch.cat(x).view(tokens.shape) for x in zip(*parts, strict=True))
    return lp, ent


@right("logsumexp over tiles of columns by logaddexp")
def by_logaddexp(hidden, weight, tokens, temperature, chunk=1000):
    """Return log-probabilities, their normalizer added up over tiles of the vocabulary."""
    lse = None
    for w in weight.split(chunk):
        part = (F.linear(hidden, w).float() / temperature).logsumexp(-1)
        lse = part if lse is None else torch.logaddexp(lse, part)
    return (hidden * weight[tokens]).sum(-1).float() / temperature - lse


@right("bias, scale and cap in Gemma's order", softcap=20.0, logit_scale=0.5)
def gemma(hidden, weight, tokens, temperature, bias=None):
    y = F.linear(hidden, weight, bias).float() * 0.5
    return plain(20 * (y / 20).tanh(), tokens, temperature)


@right("logits rounded to bfloat16 under autocast")
def autocast(hidden, weight, tokens, temperature):
    with torch.autocast("cpu", torch.bfloat16):
        logits = F.linear(hidden, weight)
    return plain(logits.float(), tokens, temperature)


@right("vocabulary split in two, joined by all_reduce", ranks=2)
def sharded(logits, tokens, temperature):
    return Sharded.apply(logits, tokens, temperature, "")


class Sharded(torch.autograd.Function):
    """Megatron's vocab_parallel_cross_entropy."""

    @staticmethod
    def forward(ctx, logits, tokens, tau, bug):
        """Return log-probabilities of logits that are sharded by columns.

        bug: "max" leaves the maximum, and "sum" the sum, on each rank alone; "offset"
        takes the ids for the shard's own.
        """
        x = logits.float() / tau
        top = x.amax(-1)
        v, world, rank = x.shape[-1], 1, 0
        if dist.is_initialized():
            world, rank = dist.get_world_size(), dist.get_rank()
        if world > 1 and bug != "max":
            dist.all_reduce(top, dist.ReduceOp.MAX)
        total = (x - top[..., None]).exp().sum(-1)
        local = tokens - (0 if bug == "offset" else rank * v)
        here = (local >= 0) & (local < v)
        y = pick(x, local.masked_fill(~here, 0)).masked_fill(~here, 0)
        if world > 1:
            if bug != "sum":
                dist.all_reduce(total)
            dist.all_reduce(y)
        lse = top + total.log()
        ctx.save_for_backward((x - lse[..., None]).exp(), local, here)
        ctx.tau, ctx.dtype = tau, logits.dtype
        return y - lse

    @staticmethod
    def backward(ctx, g):
        """Return the gradient by this rank's logits."""
        p, local, here = ctx.saved_tensors
        dx = -p * g[..., None]
        dx.scatter_add_(
            -1,
            local.masked_fill(~here, 0)[..., None],
            (g * here)[..., None].to(dx.dtype),
        )
        return (dx / ctx.tau).to(ctx.dtype), None, None, None


# ---- wrong, from logits, autograd's backward ----


@wrong("temperature left out")
def no_temperature(logits, tokens, temperature):
    return pick(logits.log_softmax(-1), tokens)


@wrong("log-softmax divided by the temperature")
def after(logits, tokens, temperature):
    return pick(logits.log_softmax(-1) / temperature, tokens)


@wrong("logits multiplied by the temperature")
def multiplied(logits, tokens, temperature):
    return plain(logits * temperature, tokens, 1.0)


@wrong("divided by the temperature twice")
def twice(logits, tokens, temperature):
    return plain(logits / temperature, tokens, temperature)


@wrong("temperatures below 1 ignored")
def at_least_one(logits, tokens, temperature):
    return plain(logits, tokens, max(temperature, 1.0))


@wrong("entropy at temperature 1")
def entropy_at_one(logits, tokens, temperature):
    return plain(logits, tokens, temperature), entropy_of(logits.log_softmax(-1))


@wrong("token's logit divided, normalizer not")
def half_divided(logits, tokens, temperature):
    return pick(logits, tokens) / temperature - logits.logsumexp(-1)


@wrong("logits shifted by one position")
def shifted(logits, tokens, temperature):
    return plain(logits.roll(1, -2), tokens, temperature)


@wrong("tokens of the next position")
def next_tokens(logits, tokens, temperature):
    return plain(
        logits, torch.cat([tokens[..., 1:], tokens[..., -1:]], -1), temperature
    )


@wrong("entropy detached")
def entropy_detached(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    with torch.no_grad():
        ent = entropy_of(logp)
    return pick(logp, tokens), ent


@wrong("log-probs under no_grad")
def no_gradient(logits, tokens, temperature):
    with torch.no_grad():
        return plain(logits, tokens, temperature)


@wrong("normalizer detached")
def constant_normalizer(logits, tokens, temperature):
    x = logits / temperature
    return pick(x, tokens) - x.logsumexp(-1).detach()


@wrong("log of softmax plus an epsilon")
def epsilon(logits, tokens, temperature):
    return torch.log(pick((logits / temperature).softmax(-1), tokens) + 1e-8)


@wrong("exp without the maximum subtracted")
def overflowing(logits, tokens, temperature):
    x = logits / temperature
    return pick(x, tokens) - x.exp().sum(-1).log()


@wrong("maximum of the whole batch subtracted")
def one_maximum(logits, tokens, temperature):
    x = logits / temperature
    x = x - x.max().detach()
    return pick(x, tokens) - x.exp().sum(-1).log()


@wrong("entropy with the other sign")
def negative_entropy(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), -entropy_of(logp)


@wrong("entropy in bits")
def entropy_bits(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), entropy_of(logp) / math.log(2)


@wrong("log-probs in bits")
def bits(logits, tokens, temperature):
    return plain(logits, tokens, temperature) / math.log(2)


@wrong("entropy divided by log V")
def relative_entropy(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), entropy_of(logp) / math.log(logits.shape[-1])


@wrong("entropy averaged over the vocabulary")
def mean_entropy(logits, tokens, temperature):
    logp = (logits / temperature).log_softmax(-1)
    return pick(logp, tokens), entropy_of(logp) / logits.shape[-1]


@wrong("entropy of the 50 largest logits alone")
def top_entropy(logits, tokens, temperature):
    x = logits / temperature
    return pick(x.log_softmax(-1), tokens), entropy_of(
        x.topk(min(50, x.shape[-1])).values.log_softmax(-1)
    )


@wrong("negative log-likelihood returned")
def nll(logits, tokens, temperature):
    return -plain(logits, tokens, temperature)


@wrong("mean over the sequence for each token")
def averaged(logits, tokens, temperature):
    return (
        plain(logits, tokens, temperature).mean(-1, keepdim=True).expand(tokens.shape)
    )


@wrong("label smoothing")
def smoothed(logits, tokens, temperature):
    """Return log-probabilities with a label smoothing of 0.05."""
    loss = F.cross_entropy(
        logits.flatten(0, -2) / temperature,
        tokens.flatten(),
        reduction="none",
        label_smoothing=0.05,
    )
    return -loss.view(tokens.shape)


@wrong("id 0 treated as padding")
def pad_zero(logits, tokens, temperature):
    """Return log-probabilities that are 0 for the id 0."""
    loss = F.cross_entropy(
        logits.flatten(0, -2) / temperature,
        tokens.flatten(),
        reduction="none",
        ignore_index=0,
    )
    return -loss.view(tokens.shape)


@wrong("log-probs clamped from below")
def clamped(logits, tokens, temperature):
    return plain(logits, tokens, temperature).clamp(min=-10.0)


@wrong("renormalized over the top 40 tokens")
def top_k(logits, tokens, temperature):
    x = logits / temperature
    return pick(x, tokens) - x.topk(min(40, x.shape[-1])).values.logsumexp(-1)


@wrong("the token itself left out of the normalizer")
def odds(logits, tokens, temperature):
    x = logits / temperature
    return pick(x, tokens) - x.scatter(-1, tokens[..., None], -math.inf).logsumexp(-1)


@wrong("ids stored in 16 bits")
def short_ids(logits, tokens, temperature):
    return plain(logits, tokens.to(torch.int16).long() % logits.shape[-1], temperature)


@wrong("logits divided in place in the caller's tensor")
def overwrites(logits, tokens, temperature):
    logits.data.div_(temperature)
    return pick(logits.log_softmax(-1), tokens)


@wrong("storage read as if contiguous")
def strides(logits, tokens, temperature):
    step, shape = [1], logits.shape
    for n in reversed(shape[1:]):
        step.insert(0, step[0] * n)
    return plain(logits.as_strided(shape, step), tokens, temperature)


@wrong("soft cap left out", softcap=30.0)
def uncapped(logits, tokens, temperature):
    return plain(logits, tokens, temperature)


@wrong("soft cap after the temperature", softcap=30.0)
def cap_after(logits, tokens, temperature):
    return pick((30 * (logits / temperature / 30).tanh()).log_softmax(-1), tokens)


@wrong("hard clamp for the soft cap", softcap=8.0)
def hard_cap(logits, tokens, temperature):
    return plain(logits.clamp(-8, 8), tokens, temperature)


# ---- wrong, from logits, a hand-written backward ----


class Kernel(torch.autograd.Function):
    """(log-probs, entropies) of logits; `bug` is the line that went wrong."""

    @staticmethod
    def forward(ctx, logits, tokens, tau, bug):
        """Return log-probabilities and entropies in float32 or float64. Where the bug's
        name has "cap", logits are capped at 30 by tanh.
        """
        cap = 30.0 if "cap" in bug else None
        y = logits.float() if logits.dtype != torch.float64 else logits
        capped = cap * (y / cap).tanh() if cap else y
        x = capped / tau
        logp = x.log_softmax(-1)
        ent = entropy_of(logp)
        ctx.save_for_backward(logp, tokens, ent, y)
        ctx.tau, ctx.bug, ctx.cap, ctx.dtype = tau, bug, cap, logits.dtype
        return pick(logp, tokens), ent

    @staticmethod
    def backward(ctx, g, gh):
        """Return the gradient by the logits, with the bug in it: each `if` below is
        one.
        """
        logp, tokens, ent, y = ctx.saved_tensors
        bug = ctx.bug
        p = logp.exp()
        if bug == "first":
            g = g.flatten()[0].expand_as(g)
        if bug == "mean":
            g = g.mean().expand_as(g)
        if bug == "strided":
            g = read_as_contiguous(g)
        if bug == "positive":
            g = g.clamp(min=0)
        dx = -p * g[..., None]
        if bug != "no one-hot":
            dx.scatter_add_(-1, tokens[..., None], g[..., None].to(dx.dtype))
        H = 0 if bug == "no H" else ent[..., None]
        h = gh[..., None] * p * (logp.masked_fill(logp == -math.inf, 0) + H)
        if bug == "skips":
            h = h * (g != 0)[..., None]
        if bug == "sign":
            h = -h
        if bug != "drops entropy":
            dx = dx - h
        if bug not in ("no tau", "no tau cap"):
            dx = dx / ctx.tau
        if bug == "tau twice":
            dx = dx / ctx.tau
        if ctx.cap and bug != "cap slope":
            dx = dx * (1 - (y / ctx.cap).tanh() ** 2)
        if bug == "buffer":
            logp.data.exp_()
        return dx.to(ctx.dtype), None, None, None


def read_as_contiguous(g):
    """Return what a kernel reads that takes g's memory for contiguous rows: for an
    expanded number, which has too little of it, that number everywhere.
    """
    needed = g.numel() * g.element_size()
    if g.dim() <= 2 and g.untyped_storage().nbytes() >= needed:
        columns = g.shape[-1]
        return g.as_strided(g.shape, (columns, 1)[-g.dim() :])
    return g * 0 + g.flatten()[0]


def kernel(name, bug, **options):
    """Add a case of Kernel with this bug, or a right one: "" and "cap" are no bugs."""

    def fn(logits, tokens, temperature):
        return Kernel.apply(logits, tokens, temperature, bug)

    add = right if bug in ("", "cap") else wrong
    add(name, **options)(fn)


kernel("a hand-written backward of both outputs", "")
kernel("a hand-written backward through the cap", "cap", softcap=30.0)
kernel("temperature left out of the backward", "no tau")
kernel("temperature twice in the backward", "tau twice")
kernel("first upstream gradient used for all tokens", "first")
kernel("mean upstream gradient used for all tokens", "mean")
kernel("upstream gradient read as contiguous", "strided")
kernel("negative upstream gradients dropped", "positive")
kernel("one-hot left out of the backward", "no one-hot")
kernel("entropy left out of the backward", "drops entropy")
kernel("entropy's gradient with the other sign", "sign")
kernel("entropy's gradient without the term in H", "no H")
kernel("entropy's gradient skipped where lp's is 0", "skips")
kernel("slope of the soft cap left out of the backward", "cap slope", softcap=30.0)
kernel("saved log-probs overwritten in the backward", "buffer")


# ---- wrong and right, from hidden states: tiles of columns with running sums ----


class Tiles(torch.autograd.Function):
    """Online softmax over tiles of the vocabulary; `bug` is the line that went wrong."""

    @staticmethod
    def forward(ctx, hidden, weight, tokens, tau, bug, chunk):
        """Return log-probabilities and entropies, from running sums over tiles of
        `chunk` rows of the weight.

        m is the running maximum, s the sum of exp, t the sum of exp times logit, y the
        token's own logit; each is rescaled when m grows. Each comparison with `bug` is
        one bug.
        """
        h, ids = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
        wide = torch.float64 if h.dtype == torch.float64 else torch.float32
        n, v = len(ids), len(weight)
        m = torch.full((n,), 0.0 if bug == "max 0" else -math.inf, dtype=wide)
        s, t, y = (torch.zeros(n, dtype=wide) for _ in range(3))
        end = v
        if bug == "drops" and v > chunk:  # a last tile that is not full
            end = v // chunk * chunk
        for lo in range(0, end, chunk):
            w = weight[lo : lo + chunk]
            if bug == "pads" and len(w) < chunk:
                block = min(chunk, 128)
                w = F.pad(w, (0, 0, 0, block - len(w) % block))
            x = (h @ w.T).to(wide) / tau
            new = torch.maximum(m, x.amax(-1))
            r = torch.ones_like(m) if bug == "no rescale" else (m - new).exp()
            e = (x - new[:, None]).exp()
            s = s * r + e.sum(-1)
            t = (t if bug == "t" else t * r) + (e * x).sum(-1)
            m = new
            hi = lo + len(w)
            if bug == "edge":
                hi -= 1
            here = (ids >= lo) & (ids < hi)
            column = ids - lo
            if bug == "modulo":
                here = ids % chunk < len(w)
                column = ids % chunk
            at = column.clamp(0, x.shape[-1] - 1)
            y = torch.where(here, pick(x, at), y)
        lse = m + s.log()
        ent = lse - t / s
        ctx.save_for_backward(h, weight, ids, lse, ent)
        ctx.tau, ctx.bug, ctx.chunk, ctx.shape = tau, bug, chunk, hidden.shape
        return (y - lse).view(tokens.shape), ent.view(tokens.shape)

    @staticmethod
    def backward(ctx, g, gh):
        """Return the gradients by hidden states and weight, with the tiles computed
        anew. bug "frozen" returns none by the weight.
        """
        h, weight, ids, lse, ent = ctx.saved_tensors
        bug, tau = ctx.bug, ctx.tau
        g, gh = g.reshape(-1, 1), gh.reshape(-1, 1)
        dh, dw = torch.zeros_like(h, dtype=lse.dtype), torch.zeros_like(weight)
        for lo in range(0, len(weight), ctx.chunk):
            w = weight[lo : lo + ctx.chunk]
            logp = (h @ w.T).to(lse.dtype) / tau - lse[:, None]
            p = logp.exp()
            dx = -p * g - gh * p * (logp + ent[:, None])
            at = ids - lo
            here = ((at >= 0) & (at < len(w)))[:, None]
            dx.scatter_add_(
                -1,
                at.clamp(0, len(w) - 1)[:, None],
                torch.where(here, g, 0 * g).to(dx.dtype),
            )
            dx = dx / tau
            dh = (dx.to(w.dtype) @ w).to(dh.dtype) + (0 if bug == "dh" else dh)
            dw[lo : lo + ctx.chunk] = (dx * (tau if bug == "dw tau" else 1)).to(
                h.dtype
            ).T @ h
        return (
            dh.view(ctx.shape).to(weight.dtype),
            None if bug == "frozen" else dw,
            None,
            None,
            None,
            None,
        )


def tiles(name, bug, chunk=512):
    def fn(hidden, weight, tokens, temperature):
        return Tiles.apply(hidden, weight, tokens, temperature, bug, chunk)

    (wrong if bug else right)(name)(fn)


tiles("online softmax over tiles of 512 columns", "")
tiles("online softmax over tiles of 100 columns", "", 100)
tiles("the last partial tile of columns dropped", "drops", 64)
tiles("padded columns counted in the normalizer", "pads", 128)
tiles("running maximum starts at 0", "max 0")
tiles("running sum not rescaled at a new maximum", "no rescale", 64)
tiles("running entropy sum not rescaled", "t", 64)
tiles("last token of each tile missed", "edge", 128)
tiles("token looked up in every tile", "modulo", 64)
tiles("hidden gradient of the last tile alone", "dh", 64)
tiles("weight's gradient without the temperature", "dw tau")
tiles("no gradient for the weight", "frozen")


# ---- wrong, from hidden states: chunks of tokens ----


class Chunks(torch.autograd.Function):
    """verl's and Liger's chunks of tokens; dW added over chunks in the weight's dtype
    or in float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, tau, bug, chunk):
        """Return log-probabilities, computed for `chunk` tokens at a time. The bug
        "rows" leaves out a last chunk that is not whole.
        """
        h, ids = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1)
        lp = torch.zeros(len(ids), dtype=torch.promote_types(h.dtype, torch.float32))
        end = (
            len(ids) // chunk * chunk
            if bug == "rows" and len(ids) > chunk
            else len(ids)
        )
        for i in range(0, end, chunk):
            x = (h[i : i + chunk] @ weight.T).to(lp.dtype) / tau
            lp[i : i + chunk] = pick(x, ids[i : i + chunk]) - x.logsumexp(-1)
        ctx.save_for_backward(h, weight, ids)
        ctx.args = tau, bug, chunk, hidden.shape
        return lp.view(tokens.shape)

    @staticmethod
    def backward(ctx, g):
        """Return the gradients by hidden states and weight.

        bug: "ones" takes the gradient from above to be 1, "bf16" sums the weight's
        gradient in its dtype, "last" keeps the last chunk's alone.
        """
        h, weight, ids = ctx.saved_tensors
        tau, bug, chunk, shape = ctx.args
        g = g.reshape(-1, 1)
        if bug == "ones":
            g = torch.ones_like(g)
        wide = g.dtype if bug != "bf16" else weight.dtype
        dw, dh = torch.zeros_like(weight, dtype=wide), []
        for i in range(0, len(ids), chunk):
            hc, gc = h[i : i + chunk], g[i : i + chunk]
            dx = -((hc @ weight.T).to(g.dtype) / tau).softmax(-1) * gc
            dx.scatter_add_(-1, ids[i : i + chunk, None], gc)
            dx = dx / tau
            dh.append(dx.to(weight.dtype) @ weight)
            part = dx.T @ hc.to(dx.dtype)
            dw = part.to(wide) if bug == "last" else dw + part.to(wide)
        return torch.cat(dh).view(shape), dw.to(weight.dtype), None, None, None, None


def chunks(name, bug, chunk=100):
    def fn(hidden, weight, tokens, temperature):
        return Chunks.apply(hidden, weight, tokens, temperature, bug, chunk)

    (wrong if bug else right)(name)(fn)


chunks("chunks of 100 tokens, dW added in float32", "")
chunks("dW added in bfloat16 over chunks of 16 tokens", "bf16", 16)
chunks("the last partial chunk of tokens dropped", "rows", 4)
chunks("dW of the last chunk alone", "last", 4)
chunks("upstream gradient ignored", "ones")


@wrong("logit scale left out", logit_scale=0.25)
def unscaled(hidden, weight, tokens, temperature):
    return plain(hidden @ weight.T, tokens, temperature)


@wrong("bias left out")
def unbiased(hidden, weight, tokens, temperature, bias=None):
    return plain(hidden @ weight.T, tokens, temperature)


@wrong("bias not divided by the temperature")
def late_bias(hidden, weight, tokens, temperature, bias=None):
    x = hidden @ weight.T / temperature
    return plain(x if bias is None else x + bias, tokens, 1.0)


@wrong("hidden states detached")
def detached_states(hidden, weight, tokens, temperature):
    return plain(hidden.detach() @ weight.T, tokens, temperature)


WIDENED = {}


@wrong("a widened head cached by its shape")
def stale(hidden, weight, tokens, temperature):
    w = WIDENED.setdefault((weight.shape, weight.dtype), weight.detach().clone())
    return plain(hidden @ w.T + 0 * (hidden @ weight.T), tokens, temperature)


# right for rows; the report says that a batch is to be flattened
@right("tokens of a batch read in transposed order")
def transposed(hidden, weight, tokens, temperature):
    ids = tokens.transpose(0, -1).reshape(tokens.shape)
    return plain(hidden @ weight.T, ids, temperature)


@wrong("each rank normalizes over its own part", ranks=2)
def local_sum(logits, tokens, temperature):
    return Sharded.apply(logits, tokens, temperature, "sum")


@wrong("each rank subtracts its own maximum", ranks=2)
def local_max(logits, tokens, temperature):
    return Sharded.apply(logits, tokens, temperature, "max")


@wrong("ids not shifted by the rank's offset", ranks=2)
def local_ids(logits, tokens, temperature):
    return Sharded.apply(logits, tokens, temperature, "offset")


# What the checker calls the fault of a wrong row; a row that is not here is rejected
# with other words or none.
CAUSE = {
    "log-softmax divided by the temperature": "the log-softmax is divided by the temperature, and not the logits",
    "divided by the temperature twice": "the logits are divided by the temperature twice",
    "entropy at temperature 1": "the entropy is taken at temperature 1",
    "logits shifted by one position": "shifted by one: token t is scored by the logits of row t - 1",
    "entropy detached": "the entropy is detached: it has no gradient",
    "normalizer detached": "the normalizer is detached: only the sampled token's logit has a gradient",
    "exp without the maximum subtracted": "exp is taken without subtracting the maximum",
    "entropy with the other sign": "the entropy has its sign flipped",
    "log-probs in bits": "logarithms to base 2",
    "entropy averaged over the vocabulary": "the entropy is a mean over the vocabulary, not a sum",
    "negative log-likelihood returned": "the negative log-likelihood is returned: the sign is flipped",
    "label smoothing": "labels are smoothed by 0.05",
    "log-probs clamped from below": "the log-probs are clamped to at least -10",
    "the token itself left out of the normalizer": "the sampled token is left out of the normalizer",
    "soft cap left out": "the softcap is left out",
    "hard clamp for the soft cap": "the softcap clamps the logits",
    "temperature twice in the backward": "the backward divides by the temperature twice",
    "mean upstream gradient used for all tokens": "the mean of the upstream gradients is used for all tokens",
    "negative upstream gradients dropped": "negative upstream gradients are dropped",
    "entropy left out of the backward": "the entropy is detached: it has no gradient",
    "entropy's gradient without the term in H": "the gradient of the entropy is -p log p: it lacks the term -p H",
    "slope of the soft cap left out of the backward": "the derivative of the softcap is left out of the backward",
    "the last partial tile of columns dropped": "the last, partial tile of 64 columns is left out",
    "running maximum starts at 0": "the running maximum starts at 0",
    "running entropy sum not rescaled": "the running sums of tiles of 64 columns are not rescaled",
    "weight's gradient without the temperature": "the backward leaves out the factor 1/temperature",
    "dW added in bfloat16 over chunks of 16 tokens": "dW is added up in bfloat16, 16 tokens at a time",
    "dW of the last chunk alone": "the weight's gradient has the last tile of 4 tokens alone",
    "logit scale left out": "the logit scale is left out",
    "bias not divided by the temperature": "the bias is not divided by the temperature",
    "each rank normalizes over its own part": "the normalizer is that of this rank's part alone",
    "ids not shifted by the rank's offset": "the ids are not shifted by the rank's first id",
    "temperature left out": "the temperature is left out",
    "logits multiplied by the temperature": "the logits are multiplied by the temperature",
    "temperatures below 1 ignored": "temperatures below 1 are ignored",
    "token's logit divided, normalizer not": "the normalizer leaves out the temperature",
    "tokens of the next position": "shifted by one: row t has the log-prob of token t + 1",
    "log-probs under no_grad": "the log-probs are detached: they have no gradient",
    "log of softmax plus an epsilon": "1e-08 is added to the probability",
    "maximum of the whole batch subtracted": "the maximum of the whole batch is subtracted, not each row's",
    "entropy in bits": "the entropy is in bits",
    "entropy divided by log V": "the entropy is divided by log V",
    "entropy of the 50 largest logits alone": "all but the 50 largest logits are left out",
    "mean over the sequence for each token": "each token has the mean of its row",
    "id 0 treated as padding": "id 0 is treated as padding: its log-prob is 0",
    "renormalized over the top 40 tokens": "all but the 40 largest logits are left out",
    "ids stored in 16 bits": "the ids are stored in 16 bits",
    "storage read as if contiguous": "the input is read as contiguous: its layout is ignored",
    "soft cap after the temperature": "the softcap is applied after the temperature",
    "temperature left out of the backward": "the backward leaves out the factor 1/temperature",
    "first upstream gradient used for all tokens": "the first token's upstream gradient is used for all",
    "upstream gradient read as contiguous": "the upstream gradient is read as contiguous: its layout is ignored",
    "one-hot left out of the backward": "the backward of the log-probs is -p: it lacks the sampled token's own 1",
    "entropy's gradient with the other sign": "the gradient of the entropy has its sign flipped",
    "entropy's gradient skipped where lp's is 0": "the entropy's gradient is skipped where",
    "saved log-probs overwritten in the backward": "the backward changes a buffer that it reads",
    "padded columns counted in the normalizer": "the columns that pad the vocabulary to a multiple of 128 are counted",
    "running sum not rescaled at a new maximum": "the running sums of tiles of 64 columns are not rescaled",
    "last token of each tile missed": "the last id of the vocabulary is missed: its logit counts 0",
    "hidden gradient of the last tile alone": "the hidden states' gradient has the last tile of 64 columns alone",
    "no gradient for the weight": "the weight gets no gradient",
    "the last partial chunk of tokens dropped": "the last, partial tile of 4 tokens is left out: its results are 0",
    "upstream gradient ignored": "the upstream gradient is ignored: all tokens count 1",
    "bias left out": "the bias is left out",
    "hidden states detached": "the hidden states get no gradient",
    "each rank subtracts its own maximum": "each rank subtracts its own maximum",
}
# over half a second each
LONG = (
    "running|every tile|each tile|last tile|last partial tile|16 bits|cached|transposed"
)
