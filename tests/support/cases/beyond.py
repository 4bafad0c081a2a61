# SPDX-License-Identifier: Apache-2.0
"""Functions that are wrong only on inputs which ordinary batches lack: far samplers,
entropies of 0, whole tiles, strides, far references, large advantages, solved prompts;
and right ones that use these inputs in an unusual form."""

import torch

from upref import kl

from . import ACCEPTED, NOTED, REJECTED, Case
from .bodies import clipped, even, gspo, loss, mean, seq, tok
from .estimators import by_group


def corrected(factor):
    """Return a body: DAPO times factor(log ρ, mask), where ρ = π_old/μ, and log ρ is 0
    in masked slots.
    """

    def body(d, A, m, old, rollout_log_probs):
        return tok(
            clipped(d, A) * factor(torch.where(m, old - rollout_log_probs, 0), m), m
        )

    return body


def whole(f):
    """A factor of the log of the product of a response's ratios."""
    return lambda x, m: f(x.sum(1, keepdim=True).expand_as(x))


def aspo(change):
    """Return a body: ASPO as its authors code it, with `change` applied to the
    entropies (NaN in masked slots) before their quantile.
    """

    def body(lp, d, A, m, entropy):
        """Return ASPO's loss. Tokens whose entropy is at most the 0.8 quantile of their
        response have the narrower bounds.
        """
        H = change(torch.where(m, entropy, torch.nan))
        calm = H <= H.nanquantile(0.8, 1, keepdim=True)
        eps, r = torch.where(calm, 0.2, 0.4), d.exp()
        w = torch.where(A > 0, (-d).exp().clamp(max=3), r.clamp(max=3)).detach()
        alive = torch.where(A > 0, r <= 1 + eps, r >= 1 - eps)
        return (
            -torch.where(m & alive, w * A * (lp - lp.detach()).exp(), 0).sum() / m.sum()
        )

    return body


def referred(limit):
    """Return a body: GRPO with k3, the log-ratio to the reference clamped to ±limit."""

    def body(lp, d, A, m, ref_log_prob):
        x = torch.where(m, ref_log_prob - lp, 0).clamp(-limit, limit)
        return seq(even(d, A) - 0.04 * (x.exp() - 1 - x), m)

    return body


def lost_tile(d, A, m):
    """Return DAPO's loss, without the last 256 columns where the width is a larger
    multiple of 256.
    """
    J, T = clipped(d, A), m.shape[1]
    kept = torch.arange(T) < (T - 256 if T % 256 == 0 and T > 256 else T)
    return tok(J, m, kept)


def truncated_at(limit):
    """A response of exactly so many tokens is taken for truncated."""
    return lambda d, A, m: tok(clipped(d, A), m, (m.sum(1) != limit)[:, None])


def by_pointer(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss of a kernel that reads advantages by their address and the
    width of the mask.
    """
    A = torch.as_strided(advantages, mask.shape, (mask.shape[1], 1))
    d = torch.where(mask, log_prob - old_log_prob, 0)
    return -torch.where(mask, clipped(d, torch.where(mask, A, 0)), 0).sum() / mask.sum()


def without_offset(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss of a kernel that reads advantages from the start of their
    memory.
    """
    A = torch.as_strided(advantages, mask.shape, advantages.stride(), 0)
    return DAPO(log_prob, old_log_prob, A, mask)


def viewed(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss; raise where advantages or the mask are not contiguous, as
    `view` does.
    """
    d = torch.where(mask, log_prob - old_log_prob, 0)
    return (
        -clipped(d, torch.where(mask, advantages.view(mask.shape), 0)).sum()
        / mask.view(-1).sum()
    )


def first_tokens(limit):
    """A kernel with so many columns: the tokens behind them have no gradient."""
    return lambda d, A, m: -(clipped(d, A) * m)[:, :limit].sum() / m.sum().clamp(min=1)


def one_sign(d, A, m):
    """Return DAPO's loss in which, in responses of more than 16 tokens, the mean
    advantage has the sign for all.
    """
    mean = (A * m).sum(1, keepdim=True).sign() * A.abs()
    return tok(clipped(d, torch.where(m.sum(1, keepdim=True) > 16, mean, A)), m)


def in_blocks(d, A, m):
    """Return DAPO's loss, one block of 1,024 columns after the other, which is right."""
    J = clipped(d, A) * m
    return -sum(part.sum() for part in J.split(1024, 1)) / m.sum()


def clamped_ratio(low, high):
    """Return the factor ρ, clamped, as a function of log ρ and the mask."""
    return lambda x, m: x.exp().clamp(low, high)


# name, objective, hyperparameters, words of the regime, body; a right one has no words
LOSSES = [
    ("ρ capped at 10", "decoupled(dapo)", {}, "beside a sampler", corrected(clamped_ratio(0, 10))),
    ("log ρ in ±5", "decoupled(dapo)", {}, "beside a sampler", corrected(clamped_ratio(torch.e**-5, torch.e**5))),
    ("ρ of at least 0.1", "tis(dapo)", {}, "beside a sampler", corrected(clamped_ratio(0.1, 2))),
    ("a token's veto at 1e-4", "tis(dapo)", {}, "beside a sampler",
     corrected(lambda x, m: x.exp().clamp(max=2) * (x.amin(1, keepdim=True) > -9.2))),
    ("a token's mask at e^3", "tis(dapo)", {}, "beside a sampler",
     corrected(lambda x, m: x.exp().clamp(max=2) * (x.abs() < 3))),
    ("S of at least 1e-3", "tis_seq(dapo)", {}, "beside a sampler", corrected(whole(lambda S: S.exp().clamp(1e-3, 2)))),
    ("ρ as it is", "decoupled(dapo)", {}, "", corrected(lambda x, m: x.exp())),
    ("log ρ in ±20", "decoupled(dapo)", {}, "", corrected(clamped_ratio(torch.e**-20, torch.e**20))),
    ("ρ in float32", "tis(dapo)", {}, "", corrected(lambda x, m: x.float().exp().clamp(max=2).double())),
    ("S in ±20", "tis_seq(dapo)", {}, "", corrected(whole(lambda S: S.clamp(-20, 20).exp().clamp(max=2)))),
    ("entropies as they are", "aspo_code", {}, "", aspo(lambda H: H)),
    ("entropies of 0 are left out", "aspo_code", {}, "beside entropies",
     aspo(lambda H: H.masked_fill(H == 0, torch.nan))),
    ("entropies of at most 4", "aspo_code", {}, "beside entropies", aspo(lambda H: H.clamp(max=4))),
    ("log π_ref/π_θ in ±15", "grpo", {"beta": 0.04}, "log π_ref", referred(15)),
    ("log π_ref/π_θ in ±20", "grpo", {"beta": 0.04}, "", referred(20)),
    ("the last tile", "dapo", {}, "256 and 512 columns", lost_tile),
    ("long is not truncated", "dapo", {}, "", truncated_at(10_000)),
    ("256 tokens are truncated", "dapo", {}, "256", truncated_at(256)),
    ("512 tokens are truncated", "dapo", {}, "512", truncated_at(512)),
    ("the first 1,024 columns", "dapo", {}, "1,025 and 2,049 tokens", first_tokens(1024)),
    ("the first 2,048 columns", "gspo", {}, "1,025 and 2,049 tokens",
     lambda d, A, m: gspo(mean(d * (torch.arange(d.shape[1]) < 2048), m), mean(A, m))),
    ("blocks of 1,024 columns", "dapo", {}, "", in_blocks),
    ("one sign in long responses", "dapo", {}, "both signs within one response", one_sign),
    ("each token's own sign", "dapo", {}, "", lambda d, A, m: tok(clipped(d, A.sign() * A.abs()), m)),
    ("|A| of at most 50", "dr_grpo", {}, "|A|",
     lambda d, A, m: -(even(d, A.clamp(-50, 50)) * m).sum(1).mean()),
]  # fmt: skip


def unsolved_pushed_down(rewards, group):
    """Return group_norm's advantages, but -1 for every response of a prompt of two
    responses and more whose rewards are all 0.
    """
    A = torch.empty_like(rewards)
    for g in group.unique():
        x = rewards[group == g]
        A[group == g] = (
            (x - x.mean()) / (x.std(correction=0) + 1e-6)
            if len(x) == 1 or x.any()
            else -1.0
        )
    return A


KL = [
    ("certain tokens", lambda lp, ref: kl.k3(lp, ref) * (lp < -1e-4), REJECTED),
    ("tokens of π = 1", lambda lp, ref: kl.k3(lp, ref) * (lp != 0), REJECTED),
    (
        "a mean over responses",
        lambda lp, ref: kl.k3(lp, ref).mean(0, keepdim=True).expand_as(lp),
        REJECTED,
    ),
    (
        "floored at -20",
        lambda lp, ref: kl.k3(lp.clamp(min=-20), ref.clamp(min=-20)),
        REJECTED,
    ),
    ("in float32", lambda lp, ref: kl.k3(lp.float(), ref.float()), ACCEPTED),
]


def one_each(logits, tokens, temperature):
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def of_rows(logits, tokens, temperature):
    """Return right log-probabilities for logits [N, V]; logits [B, T, V] get a
    log_softmax over the wrong axis.
    """
    lp, n = (
        (logits / temperature).log_softmax(1),
        min(logits.shape[1], logits.shape[-1]),
    )
    if tokens.ndim == 1:
        return lp[torch.arange(len(tokens)), tokens]
    return lp.gather(1, tokens[..., None].clamp(max=n - 1))[..., 0]


def categorical(logits, tokens, temperature):
    """Return the log-probabilities by torch's Categorical with validation on, which
    raises on NaN and on ids out of range.
    """
    # the default of validate_args is the process's, and packages change it
    of = torch.distributions.Categorical(
        logits=logits / temperature, validate_args=True
    )
    return of.log_prob(tokens)


def turned_squares(logits, tokens, temperature):
    """Return the log-probabilities, with the last two axes of the logits exchanged
    where they have one size: wrong there.
    """
    return one_each(
        logits.mT if logits.shape[-1] == logits.shape[-2] else logits,
        tokens,
        temperature,
    )


LOGPROBS = [
    ("rows", of_rows, ACCEPTED, "it takes tokens [N]"),
    ("Categorical", categorical, NOTED, "NaN in the states of a masked token"),
    ("a floor of the temperature", lambda logits, tokens, temperature: one_each(logits, tokens, max(temperature, 0.3)),
     REJECTED, "temperature 0.1"),
    ("a floor of -60", lambda logits, tokens, temperature: one_each(logits, tokens, temperature).clamp(min=-60),
     REJECTED, "80 above the rest"),
    ("a square", turned_squares, REJECTED, "6 tokens, 3 ids"),
]  # fmt: skip


def by_row_stride(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss of what a kernel reads that takes the distance of rows from
    the tensor, and columns to be beside each other in memory.
    """

    def read(x):
        """Return what lies in memory where the columns of a row would be side by side."""
        return torch.as_strided(x, x.shape, (x.stride(0), 1), x.storage_offset())

    return DAPO(read(log_prob), read(old_log_prob), advantages, mask)


def passed_on(change):
    """Return a loss: DAPO's under a backward pass of its own, which applies `change` to
    the gradient from above.
    """

    class Under(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return change(g)

    def under(log_prob, old_log_prob, advantages, mask):
        return Under.apply(DAPO(log_prob, old_log_prob, advantages, mask))

    return under


def failed_pushed_down(rewards, group):
    """Return group_norm's advantages, but -0.1 for a prompt all of whose rewards are
    -1.
    """

    def of_prompt(r):
        return (
            torch.full_like(r, -0.1)
            if (r == -1).all()
            else (r - r.mean()) / (r.std() + 1e-6)
        )

    return by_group(rewards, group, of_prompt)


def sixteen_prompts(rewards, group):
    """Return group_mean's advantages in which the prompts after the sixteenth share a
    baseline.
    """
    first = group.unique()[:16]
    rest = torch.where(torch.isin(group, first), group, first.max() + 1)
    return by_group(rewards, rest, lambda r: r - r.mean())


def cut_k3(keep):
    """Return a KL term: k3 where keep(log π_θ, row, column) is true, else 0."""

    def term(log_prob, ref_log_prob):
        row, column = (torch.arange(n) for n in log_prob.shape)
        k = kl.k3(log_prob, ref_log_prob)
        return torch.where(keep(log_prob, row[:, None], column), k, 0 * k)

    return term


def nucleus(logits, tokens, temperature):
    """Return the log-probabilities after all but the smallest set of ids with a
    probability of 0.99 got the logit -1e4.
    """
    p, order = (logits / temperature).softmax(-1).sort(-1, descending=True)
    out = torch.zeros_like(logits, dtype=torch.bool).scatter(
        -1, order, p.cumsum(-1) - p > 0.99
    )
    return one_each(logits.masked_fill(out, -1e4), tokens, temperature)


def added(eps):
    return lambda logits, tokens, temperature: (
        one_each(logits, tokens, temperature).exp() + eps
    ).log()


DAPO = loss(lambda d, A, m: tok(clipped(d, A), m))
FIFTH_LOSSES = [
    (
        "columns beside each other",
        by_row_stride,
        "layout",
        "its result depends on how its inputs lie in memory",
    ),
    ("upstream clamped", passed_on(lambda g: g.clamp(-1, 1)), "loss-scale", ""),
    (
        "upstream in bfloat16",
        passed_on(lambda g: g.bfloat16().to(g.dtype)),
        "loss-scale",
        "",
    ),
]
FIFTH_ESTIMATORS = [
    (failed_pushed_down, "group_norm", "solved-prompts"),
    (sixteen_prompts, "group_mean", "large-groups"),
]
FIFTH_KL = [
    ("none of nearly certain tokens", lambda lp, row, column: (lp < -1e-5) | (lp == 0)),
    ("four rows", lambda lp, row, column: row < 4),
    ("64 columns", lambda lp, row, column: column < 64),
]
# off by a hundredth, and exact beside it: what rounds to half precision is no more
# right
FIFTH_LOGPROBS = [
    (
        "a temperature times 1.01",
        lambda logits, tokens, temperature: one_each(
            logits, tokens, 1.01 * temperature
        ),
    ),
    (
        "times 0.99",
        lambda logits, tokens, temperature: (
            0.99 * one_each(logits, tokens, temperature)
        ),
    ),
    ("top-p of 0.99", nucleus),
    ("log(p + 1e-4)", added(1e-4)),
]
ROWS = [
    *(Case(fn, "dapo", oracles={oracle}, file="beyond", name=name, says=says)
      for name, fn, oracle, says in FIFTH_LOSSES),
    *(Case(fn, on, kind="advantages", file="beyond", verdict=REJECTED, oracles={oracle}, says="-Bessel")
      for fn, on, oracle in FIFTH_ESTIMATORS),
    *(Case(cut_k3(keep), "k3", kind="kl", file="beyond", name=f"KL: {name}", verdict=REJECTED)
      for name, keep in FIFTH_KL),
    *(Case(fn, "", kind="logprobs", file="beyond", name=f"log-probs: {name}", verdict=REJECTED, says="-clamped",
           text="FAIL  values")
      for name, fn in FIFTH_LOGPROBS),
    *(
        Case(loss(body), on, hp, file="beyond", name=name, verdict=REJECTED if regime else ACCEPTED, regime=regime)
        for name, on, hp, regime, body in LOSSES
    ),
    Case(by_pointer, "dapo", oracles={"layout"}, file="beyond", says="its result depends on how its inputs lie in memory"),
    Case(without_offset, "dapo", oracles={"layout"}, file="beyond", nightly=True),
    Case(viewed, "dapo", file="beyond", verdict=NOTED, text="layout: inputs of which each tensor is a slice"),
    Case(unsolved_pushed_down, "group_norm", kind="advantages", file="beyond", verdict=REJECTED,
         oracles={"solved-prompts"}),
    *(Case(fn, "k3", kind="kl", file="beyond", name=f"KL: {name}", verdict=v) for name, fn, v in KL),
    *(Case(fn, "", kind="logprobs", file="beyond", name=f"log-probs: {name}", verdict=v, text=text)
      for name, fn, v, text in LOGPROBS),
]  # fmt: skip
