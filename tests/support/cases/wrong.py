# SPDX-License-Identifier: Apache-2.0
"""Wrong losses, written from the documentation and the objectives alone, before the
checker ran on any of them.

A row of WRONG is (name, objective, hyperparameters, cause, body).
One file: each row is two lines of what engineers get wrong, and rows of one class stand
together.
"""

import math

import torch
from torch.nn.functional import pad

from .bodies import (
    Backward,
    binary_kl,
    clipped,
    corrected,
    dual,
    even,
    gspo,
    k3,
    last_turn,
    mean,
    ratio,
    seq,
    span,
    tok,
    turns,
    up,
)


def after_hole(m, size):
    """Return where a slot lies at or behind the column in which the first hole of this
    many columns is complete.
    """
    run, out = torch.zeros(len(m)), torch.zeros(m.shape)
    for t, inside in enumerate(span(m).T):
        run = out[:, t] = torch.where(m[:, t], 0.0, run + inside)
    return (out >= size).cumsum(1) > 0


def turn_means(d, A, m):
    """Return minus the mean over responses of the mean over their turns, each by its
    own tokens.
    """
    J, n = even(d, A), turns(m)

    def mean_of_turns(i):
        """Return the mean over the turns of a response, each by its own tokens."""
        return torch.stack(
            [J[i][n[i] == k].mean() for k in range(1, int(n[i].max()) + 1)]
        ).mean()

    return -torch.stack([mean_of_turns(i) for i in range(len(m))]).mean()


def by_group(d, A, m, group, keep=lambda a: 1.0):
    def loss_of(i):
        return tok(clipped(d[i], A[i]), m[i]) * keep(A[i][m[i]])

    return torch.stack([loss_of(group == k) for k in group.unique()]).mean()


def contiguous(d, A, m, group):
    """Return DAPO's loss of consecutive blocks of rows, all of the first prompt's size,
    averaged.
    """
    n = int((group == group[0]).sum())
    return torch.stack(
        [
            tok(clipped(d[i : i + n], A[i : i + n]), m[i : i + n])
            for i in range(0, len(m), n)
        ]
    ).mean()


def chunk_means(d, A, m):
    """Return DAPO's loss averaged over chunks of 64 columns, where the width is a
    multiple of 64; elsewhere over tokens.
    """
    J, width = clipped(d, A) * m, m.shape[1]
    if width % 64:
        return -J.sum() / m.sum()
    return -(
        J.view(len(J), -1, 64).sum((0, 2))
        / m.view(len(m), -1, 64).sum((0, 2)).clamp(min=1)
    ).mean()


def square(d, A, m):
    B, T = m.shape
    return tok(clipped(d, mean(A, m)[None, :] if B == T > 1 else A), m)


def row_64(d, A, m, lp):
    late = torch.arange(len(m))[:, None] >= 64
    A = torch.where(late, mean(A, m)[0], A) * m
    return seq(up(lp, d, A, 1e9), m)


def outliers(d, A, m):
    large = m.sum() > 200
    return tok(
        clipped(d, A), m, m & (d <= torch.quantile(d.detach()[m], 0.99)) if large else m
    )


def balanced(d, A, m):
    """Return DAPO's loss with half of the mean over good tokens and half of the mean
    over bad ones.
    """
    J = clipped(d, A)

    def half_of_mean(side):
        return -(J * side).sum() / (2 * side.sum().clamp(min=1))

    return half_of_mean(m & (A > 0)) + half_of_mean(m & (A < 0))


def dppo_reversed(d, A, m, lp, old):
    x, y = (torch.where(m, z, -1.0).detach() for z in (lp, old))
    return -(d.exp() * A * ((binary_kl(x, y) <= 0.05) | (A * d <= 0)) * m).sum(1).mean()


def aspo_cap(d, A, m, lp):
    """Return ASPO's loss with its bound, 1.2, as the cap of the weight."""
    r = d.exp().detach()
    w = torch.where(
        A > 0, (1 / r).clamp(max=1.2) * (r <= 1.2), r.clamp(max=1.2) * (r >= 0.8)
    )
    return tok(w * A * lp, m)


def gspo_tokens(d, A, m, lp):
    s = mean(d, m).exp()[:, None].detach() * (lp - lp.detach()).exp()
    return tok(torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A), m)


def running(memory, x):
    memory["x"] = 0.9 * memory.get("x", 1.0) + 0.1 * float(x)
    return memory["x"]


def hooked(x, change):
    """Return a copy of x whose gradient goes through `change`."""
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(change)
    return x


WRONG = [
    # masks
    ("eight turns", "dapo", {}, "turns after the eighth are dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & (turns(m) <= 8))),
    ("last turn", "grpo", {}, "only the last turn trains",
     lambda d, A, m: seq(even(d, A), m & last_turn(m))),
    ("first turn", "dapo", {}, "everything after the first hole is dropped",
     lambda d, A, m: tok(clipped(d, A), m, turns(m) == 1)),
    ("hole of 16", "dapo", {}, "everything after a hole of 16 slots or more is dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & ~after_hole(m, 16))),
    ("hole of 200", "up_dapo", {}, "everything after a hole of 200 slots or more is dropped",
     lambda d, A, m, lp: tok(up(lp, d, A), m, m & ~after_hole(m, 200))),
    ("span length", "grpo", {}, "a response is divided by its span, holes included",
     lambda d, A, m: -((even(d, A) * m).sum(1) / span(m).sum(1)).mean()),
    ("GSPO by span", "gspo", {}, "the mean log-ratio is divided by the span, holes included",
     lambda d, A, m: gspo(d.sum(1) / span(m).sum(1), mean(A, m))),
    ("mask from length", "dapo", {}, "a mask of the response's length from column 0 on, instead of its mask",
     lambda d, A, m: tok(clipped(d, A), m, m & (torch.arange(m.shape[1]) < m.sum(1, keepdim=True)))),
    ("last index", "grpo", {}, "a response is divided by the index of its last token",
     lambda d, A, m: -((even(d, A) * m).sum(1) / (m * torch.arange(1, m.shape[1] + 1)).amax(1)).mean()),
    ("turn starts", "dapo", {}, "the first token of each turn but the first is dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & (pad(m, (1, 0))[:, :-1] | (turns(m) == 1)))),
    ("turn ends", "dapo", {}, "the last token before a hole is dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & (pad(m, (0, 1))[:, 1:] | last_turn(m)))),
    ("late start", "dapo", {}, "a response whose mask starts in column 32 or later is dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & m[:, :32].any(1, keepdim=True))),
    ("turn means", "grpo", {}, "turns are averaged, then the turns' means", turn_means),
    ("length of 4", "grpo", {}, "the length in the denominator is at least 4",
     lambda d, A, m: -((even(d, A) * m).sum(1) / m.sum(1).clamp(min=4)).mean()),
    ("rolled mask", "dapo", {}, "the mask is shifted by one slot and cut with itself",
     lambda d, A, m: tok(clipped(d, A), m, m.roll(1, 1) & m)),
    ("first advantage", "dapo", {}, "the advantage of the first trained token is used for the whole response",
     lambda d, A, m: tok(clipped(d, A.gather(1, m.float().argmax(1, keepdim=True))), m)),
    ("single tokens", "dapo", {}, "responses of one trained token are dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & (m.sum(1, keepdim=True) > 1))),
    ("left padding", "grpo", {}, "responses whose first column is masked get half the weight",
     lambda d, A, m: seq(even(d, A) * torch.where(m[:, :1], 1.0, 0.5), m)),
    ("first token", "dapo", {}, "the first trained token of each response is dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & (m.cumsum(1) > 1))),
    # composition of the batch
    ("active tokens", "dapo", {}, "only tokens with A != 0 are counted where more than half have A = 0",
     lambda d, A, m: tok(clipped(d, A), m) * (m.sum() / n if 0 < (n := (A != 0).sum()) < 0.5 * m.sum() else 1)),
    ("zero rows", "grpo", {}, "responses with A = 0 leave the mean over responses",
     lambda d, A, m: -mean(even(d, A), m).sum() / (A != 0).any(1).sum().clamp(min=1)),
    ("one sign", "dapo", {}, "a batch whose advantages have one sign is skipped",
     lambda d, A, m: tok(clipped(d, A), m) * float((A > 0).any() == (A < 0).any())),
    ("mostly positive", "up_dapo", {}, "positive tokens are halved where nine tenths of the tokens are positive",
     lambda d, A, m, lp: tok(up(lp, d, A) * torch.where((A > 0) & ((A > 0).sum() > 0.9 * m.sum()), 0.5, 1.0), m)),
    ("mostly clipped", "dapo", {}, "a batch of which more than 60 % is clipped is skipped",
     lambda d, A, m: tok(clipped(d, A), m) * float(
         (((A > 0) & (d.exp() > 1.28) | (A < 0) & (d.exp() < 0.8)) & m).sum() <= 0.6 * m.sum())),
    ("target KL", "ppo_clip", {}, "a batch whose mean of log π_old/π exceeds 0.5 is skipped",
     lambda d, A, m: tok(even(d, A), m) * float(-(d * m).sum() <= 0.5 * m.sum())),
    ("balanced", "dapo", {}, "positive and negative tokens are averaged apart and added", balanced),
    ("self-normalized", "is_pg", {}, "the ratios are divided by their mean",
     lambda d, A, m: -(d.exp() / ((d.exp() * m).sum() / m.sum()).detach() * A * m).sum(1).mean()),
    ("whitened", "dapo", {}, "advantages are whitened once more in the loss",
     lambda d, A, m: tok(clipped(d, (A - A[m].mean()) / (A[m].std(correction=0) + 1e-8)), m)),
    ("centered", "dapo", {}, "the mean advantage of the batch is subtracted",
     lambda d, A, m: tok(clipped(d, A - A.sum() / m.sum()), m)),
    ("clamped advantages", "dapo", {}, "advantages are clamped to 10",
     lambda d, A, m: tok(clipped(d, A.clamp(-10, 10)), m)),
    ("small advantages", "grpo", {}, "advantages below 1e-3 count as 0",
     lambda d, A, m: seq(even(d, torch.where(A.abs() < 1e-3, 0, A)), m)),
    ("outliers", "dapo", {}, "in batches of more than 200 tokens the largest percent of ratios is dropped", outliers),
    ("group collision", "dapo", {}, "groups are told apart modulo 16",
     lambda d, A, m, group: by_group(d, A, m, group % 16)),
    ("contiguous groups", "dapo", {}, "groups are taken to be contiguous and of the first one's size", contiguous),
    ("dynamic sampling", "dapo", {}, "groups without a negative advantage are skipped",
     lambda d, A, m, group: by_group(d, A, m, group, lambda a: float((a < 0).any() or not (a > 0).any()))),
    # sizes
    ("chunks of 64", "dapo", {}, "rows after the last full chunk of 64 are lost",
     lambda d, A, m: -(clipped(d, A) * m)[: len(m) // 64 * 64 or len(m)].sum() / m.sum()),
    ("cut at 128", "dapo", {}, "columns from 128 on are cut off",
     lambda d, A, m: -(clipped(d, A) * m)[:, :128].sum() / m.sum()),
    ("odd width", "grpo", {}, "an odd width from 33 on loses its last column",
     lambda d, A, m: seq(even(d, A), m, m & (torch.arange(T := m.shape[1]) < (T - 1 if T % 2 and T >= 33 else T)))),
    ("chunk means", "dapo", {}, "where the width is a multiple of 64 the mean is one of chunks' means", chunk_means),
    ("one response", "grpo", {}, "a batch of one response is summed, not averaged",
     lambda d, A, m: seq(even(d, A), m) if len(m) > 1 else -(even(d, A) * m).sum()),
    ("long responses", "dapo", {}, "responses of more than 256 tokens are cut there",
     lambda d, A, m: tok(clipped(d, A), m, m & (m.cumsum(1) <= 256))),
    ("square batch", "dapo", {}, "where B == T the advantages are transposed", square),
    ("128 rows", "dapo", {}, "from 128 rows on, rows are averaged",
     lambda d, A, m: (seq if len(m) >= 128 else tok)(clipped(d, A), m)),
    ("padded to 64", "grpo", {}, "a full row of a width of 63 is divided by 64",
     lambda d, A, m: -((even(d, A) * m).sum(1) / (m.sum(1) + (m.all(1) & (m.shape[1] % 64 == 63)))).mean()),
    ("row 64", "up_grpo", {}, "row 64 and later rows use the advantage of row 0", row_64),
    # state
    ("annealed clip", "dapo", {}, "state: from the fourth call on the clip is 0.1 narrower",
     lambda d, A, m, call: tok(clipped(d, A, *((0.9, 1.18) if call > 3 else (0.8, 1.28))), m)),
    ("running scale", "dapo", {}, "state: advantages are divided by a running mean of |A|",
     lambda d, A, m, memory: tok(clipped(d, A / running(memory, A[m].abs().mean())), m)),
    ("cached mask", "grpo", {}, "state: the mask of the first batch of a shape is kept for all of that shape",
     lambda d, A, m, memory: -((even(d, A) * (k := memory.setdefault(m.shape, m) & m)).sum(1)
                               / k.sum(1).clamp(min=1)).mean()),
    ("cached count", "dapo", {}, "state: the token count is cached by shape",
     lambda d, A, m, memory: -(clipped(d, A) * m).sum() / memory.setdefault(m.shape, m.sum())),
    ("after 40 calls", "dapo", {}, "state: from the 41st call on the loss is a mean over responses",
     lambda d, A, m, call: (tok if call <= 40 else seq)(clipped(d, A), m)),
    ("warm-up", "up_dapo", {}, "state: the first two calls have no gradient",
     lambda d, A, m, lp, call: tok(up(lp, d, A), m) * float(call > 2)),
    ("random", "dapo", {}, "one percent of the tokens is dropped at random",
     lambda d, A, m: tok(clipped(d, A), m, m & (torch.rand(m.shape) > 0.01))),
    ("kept anchor", "dapo", {}, "state: π_old is remembered from the first batch of a shape",
     lambda A, m, lp, old, memory: tok(clipped(torch.where(m, lp - memory.setdefault(m.shape, old.clone()), 0), A), m)),
    ("every third call", "grpo", {}, "state: every third call has no clip",
     lambda d, A, m, call: seq(even(d, A) if call % 3 else d.exp() * A, m)),
    # one side of a branch
    ("no lower clip", "dapo", {}, "no lower clip where A < 0", lambda d, A, m: tok(clipped(d, A, 0.0), m)),
    ("UP with ratio", "up_dapo", {}, "positive tokens keep the ratio: unclipped importance sampling",
     lambda d, A, m: tok(torch.where(A > 0, d.exp() * A, clipped(d, A)), m)),
    ("UP of both", "up_dapo", {}, "negative tokens are unclipped as well",
     lambda d, A, m, lp: tok(torch.where(A > 0, A * lp, d.exp() * A), m)),
    ("UP clipped", "up_dapo", {}, "positive tokens are clipped above",
     lambda d, A, m, lp: tok(torch.where(A > 0, (lp - lp.detach()).exp() * A * (d.detach() < math.log(1.28)),
                                         clipped(d, A)), m)),
    ("negative half", "dapo", {}, "negative tokens weigh half",
     lambda d, A, m: tok(clipped(d, torch.where(A < 0, A / 2, A)), m)),
    ("maximum", "dapo", {}, "the maximum in the place of the minimum",
     lambda d, A, m: tok(torch.maximum(d.exp() * A, d.exp().clamp(0.8, 1.28) * A), m)),
    ("dual clip of both", "ppo_clip", {"c": 3.0}, "the dual clip acts on positive advantages too",
     lambda d, A, m: tok(torch.minimum(
         (r := d.exp().clamp(max=3)) * A, torch.where(A > 0, r, r.clamp(0.8, 1.2)) * A), m)),
    ("no dual clip", "dapo", {"c": 3.0}, "the dual clip is missing", lambda d, A, m: tok(clipped(d, A), m)),
    ("dual clip at 10", "grpo", {"c": 3.0}, "the dual clip is at 10, not at 3",
     lambda d, A, m: seq(dual(even(d, A), A, 10.0), m)),
    ("rare tokens", "dapo", {}, "tokens with π_old below e^-9 are dropped",
     lambda d, A, m, old: tok(clipped(d, A), m, m & (old > -9))),
    ("sure tokens", "dapo", {}, "tokens with π above 0.99 are dropped where A > 0",
     lambda d, A, m, lp: tok(clipped(d, A), m, m & ~((lp > math.log(0.99)) & (A > 0)))),
    ("clamp at 2", "dapo", {}, "log r is clamped to 2", lambda d, A, m: tok(clipped(d.clamp(-2, 2), A), m)),
    ("clamp at 5, negative", "is_pg", {}, "log r is clamped to 5 from above where A < 0",
     lambda d, A, m: -(torch.where(A < 0, d.clamp(max=5), d).exp() * A * m).sum(1).mean()),
    ("dropped far", "dapo", {}, "tokens with A < 0 and r > 4 are dropped",
     lambda d, A, m: tok(clipped(d, A), m, m & ~((A < 0) & (d > math.log(4))))),
    # aggregation
    ("padded mean", "dapo", {}, "the mean runs over padding too", lambda d, A, m: -(clipped(d, A) * m).mean()),
    ("mean of responses", "ppo_clip", {}, "a mean over responses", lambda d, A, m: seq(even(d, A), m)),
    ("mean of tokens", "grpo", {}, "a mean over tokens", lambda d, A, m: tok(even(d, A), m)),
    ("sum of responses", "dr_grpo", {}, "a sum over responses, not their mean",
     lambda d, A, m: -(even(d, A) * m).sum()),
    ("by the width", "dr_grpo", {}, "divided by the padded width",
     lambda d, A, m: -((even(d, A) * m).sum(1) / m.shape[1]).mean()),
    ("root of the length", "grpo", {}, "divided by the square root of the length",
     lambda d, A, m: -((even(d, A) * m).sum(1) / m.sum(1).sqrt()).mean()),
    ("plus one", "dapo", {}, "divided by the tokens plus one",
     lambda d, A, m: -(clipped(d, A) * m).sum() / (m.sum() + 1)),
    ("micro-batches", "dapo", {}, "the own token mean divided by the number of micro-batches",
     lambda d, A, m, num_micro_batches: tok(clipped(d, A), m) / num_micro_batches),
    ("longest", "grpo", {}, "each response is divided by the longest one's length",
     lambda d, A, m: -((even(d, A) * m).sum(1) / m.sum(1).max()).mean()),
    ("mixed means", "dapo", {}, "half a token mean and half a mean over responses",
     lambda d, A, m: (tok(clipped(d, A), m) + seq(clipped(d, A), m)) / 2),
    ("discount", "dapo", {}, "tokens are discounted by their position, 0.999^t",
     lambda d, A, m: tok(clipped(d, A) * 0.999 ** (m.cumsum(1) - 1).clamp(min=0), m)),
    # clips
    ("exchanged bounds", "dapo", {}, "the two clip bounds are exchanged",
     lambda d, A, m: tok(clipped(d, A, 0.72, 1.2), m)),
    ("clip in logs", "grpo", {}, "the clip is on log r: e^-0.2 to e^0.2",
     lambda d, A, m: seq(torch.minimum(d.exp() * A, d.clamp(-0.2, 0.2).exp() * A), m)),
    ("two-sided mask", "dapo", {}, "tokens outside the window are dropped, whatever the sign",
     lambda d, A, m: tok((r := d.exp()) * A, m, m & (r >= 0.8) & (r <= 1.28))),
    ("detached clip", "dapo", {}, "the clipped ratio is detached: half the gradient inside the window",
     lambda d, A, m: tok(torch.minimum(d.exp() * A, d.exp().clamp(0.8, 1.28).detach() * A), m)),
    ("eps as bound", "dapo", {}, "the lower bound is eps, not 1 - eps", lambda d, A, m: tok(clipped(d, A, 0.2), m)),
    ("probability clip", "dapo", {}, "|π - π_old| is clipped at 0.2 instead of the ratio",
     lambda d, A, m, lp, old: tok(d.exp() * A * ((lp.exp() - old.exp()).detach() * A.sign() <= 0.2), m)),
    ("product", "gspo", {}, "the log-ratio is summed, not averaged", lambda d, A, m: gspo(d.sum(1), mean(A, m))),
    ("arithmetic mean", "gspo", {}, "the arithmetic mean of the ratios",
     lambda d, A, m: gspo(mean(d.exp(), m).log(), mean(A, m))),
    ("GSPO by tokens", "gspo", {}, "a token mean: long responses weigh more", gspo_tokens),
    ("GMPO both", "gmpo", {}, "log-ratios are clipped on both sides, whatever the sign",
     lambda d, A, m: -(mean(d.clamp(-0.4, 0.4), m).exp() * mean(A, m)).mean()),
    ("GMPO by sequence", "gmpo", {}, "the geometric mean is clipped, not the tokens",
     lambda d, A, m: -torch.minimum((x := mean(d, m)).exp() * (a := mean(A, m)), x.clamp(-0.4, 0.4).exp() * a).mean()),
    ("CISPO not detached", "cispo", {}, "the clipped ratio is not detached",
     lambda d, A, m, lp: tok(d.exp().clamp(max=5) * A * lp, m)),
    ("CISPO mask", "cispo", {}, "tokens beyond the cap are dropped",
     lambda d, A, m, lp: tok((r := d.exp().detach()) * (r <= 5) * A * lp, m)),
    ("SAPO exchanged", "sapo", {"tau_neg": 1.5}, "the two temperatures are exchanged",
     lambda d, A, m: seq(torch.sigmoid((t := torch.where(A > 0, 1.5, 1.0)) * (d.exp() - 1)) * 4 / t * A, m)),
    ("SAPO scale", "sapo", {}, "4/tau is missing",
     lambda d, A, m: seq(torch.sigmoid(torch.where(A > 0, 1.0, 1.05) * (d.exp() - 1)) * A, m)),
    ("ASPO cap", "aspo", {}, "the soft cap is at 1.2, not at 3", aspo_cap),
    ("TOPR tokens", "topr", {}, "the taper is of tokens, not of responses",
     lambda d, A, m, lp: -(torch.where(A >= 0, 1.0, d.exp().detach().clamp(max=1)) * A * lp).sum(1).mean()),
    ("TOPR mean", "topr", {}, "the taper is of the geometric mean",
     lambda d, A, m, lp: -(
         torch.where(A >= 0, 1.0, mean(d, m)[:, None].exp().detach().clamp(max=1)) * A * lp).sum(1).mean()),
    ("GPPO low", "gppo", {}, "negative tokens below the window lose their gradient",
     lambda d, A, m, lp: tok(torch.where(A > 0, (r := d.exp().detach()).clamp(max=1.28), r * (r >= 0.8)) * A * lp, m)),
    ("DPPO in logs", "dppo_tv", {}, "the divergence is measured by |log r|",
     lambda d, A, m: -(d.exp() * A * (d * A.sign() <= 0.15) * m).sum(1).mean()),
    ("DPPO reversed", "dppo_kl", {}, "the divergence is KL(π ‖ π_old)", dppo_reversed),
    ("RIPO", "ripo", {}, "the bound widens for frequent tokens: √(δ π_old)",
     lambda d, A, m, old: tok(clipped(d, A, 1 - (e := (0.05 * old.exp()).sqrt()), 1 + e), m)),
    ("CFPO", "cfpo", {}, "A in the place of |A| in the penalty",
     lambda d, A, m: seq((r := d.exp()) * A - A / 0.4 * (r - 1) ** 2, m)),
    ("LUSPO", "luspo", {}, "the response's term is not multiplied by its length",
     lambda d, A, m: gspo(mean(d, m), mean(A, m), 2e-3, 2.5e-3)),
    ("W-REINFORCE", "w_reinforce", {}, "lambda is on the negative responses",
     lambda A, m, lp: -(torch.where(A < 0, 0.1 * A, A) * lp).sum(1).mean()),
    ("DRO", "dro", {}, "the penalty has the wrong sign", lambda d, A, m, lp: tok(A * lp + 0.05 * d**2, m)),
    # KL terms and anchors
    ("KL to old", "dapo", {}, "a KL term to the sampling policy, 0.05 k3",
     lambda d, A, m, lp, old: tok(clipped(d, A) - 0.05 * k3(lp, old, m), m)),
    ("k3 exchanged", "grpo", {"beta": 0.04}, "k3 with its arguments exchanged",
     lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * k3(ref_log_prob, lp, m), m)),
    ("k1", "grpo", {"beta": 0.04}, "k1 in the place of k3",
     lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * torch.where(m, lp - ref_log_prob, 0), m)),
    ("k2", "grpo", {"beta": 0.04}, "k2 in the place of k3",
     lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.02 * torch.where(m, lp - ref_log_prob, 0) ** 2, m)),
    ("KL by tokens", "grpo", {"beta": 0.04}, "the KL term is a mean over tokens, the policy term over responses",
     lambda d, A, m, lp, ref_log_prob: seq(even(d, A), m) - 0.04 * tok(k3(lp, ref_log_prob, m), m)),
    ("KL detached", "grpo", {"beta": 0.04}, "the KL term has no gradient",
     lambda d, A, m, lp, ref_log_prob: seq(even(d, A) - 0.04 * k3(lp.detach(), ref_log_prob, m), m)),
    ("KL of negative tokens", "up_grpo", {"beta": 0.04}, "the KL term only on negative tokens",
     lambda d, A, m, lp, ref_log_prob: seq(up(lp, d, A, 1e9) - 0.04 * k3(lp, ref_log_prob, m) * (A < 0), m)),
    ("anchored to ref", "grpo", {"beta": 0.04}, "the ratio is to the reference policy",
     lambda A, m, lp, ref_log_prob: seq(
         even(torch.where(m, lp - ref_log_prob, 0), A) - 0.04 * k3(lp, ref_log_prob, m), m)),
    # stop-gradients, temperature, dtype, shaping
    ("no clip", "dapo", {}, "the ratio is detached and times log π: no clip is left",
     lambda d, A, m, lp: tok(d.exp().detach() * A * lp, m)),
    ("on policy", "dapo", {}, "the old log-probabilities are the current ones, detached",
     lambda A, m, lp: tok(clipped(lp - lp.detach(), A), m)),
    ("surprise", "dapo", {}, "advantages are shaped by the token's surprise",
     lambda d, A, m, lp: tok(clipped(d, A * (1 - 0.1 * lp.detach())), m)),
    ("focal", "dapo", {}, "focal weighting, (1 - π)^2",
     lambda d, A, m, lp: tok(clipped(d, A) * (1 - lp.detach().exp()) ** 2, m)),
    ("squared ratio", "is_pg", {}, "the ratio is squared", lambda d, A, m: -((2 * d).exp() * A * m).sum(1).mean()),
    ("temperature", "dapo", {}, "log-probabilities are divided by 0.9", lambda d, A, m: tok(clipped(d / 0.9, A), m)),
    ("temperature of one", "grpo", {}, "the old log-probabilities are times 0.8, the current ones are not",
     lambda A, m, lp, old: seq(even(torch.where(m, lp - 0.8 * old, 0), A), m)),
    ("bfloat16", "dapo", {}, "log r is rounded to bfloat16",
     lambda d, A, m: tok(clipped(d.bfloat16().to(d.dtype), A), m)),
    ("float16", "gspo", {}, "the log-ratio is taken in float16",
     lambda A, m, lp, old: gspo(mean((lp.half() - old.half()).float(), m), mean(A, m))),
    ("old shifted", "dapo", {}, "old log-probabilities are shifted by one token",
     lambda A, m, lp, old: tok(clipped(torch.where(m, lp - torch.cat([old[:, :1], old[:, :-1]], 1), 0), A), m)),
    ("length penalty", "dapo", {}, "a length penalty in the loss: A - 0.01 |o|",
     lambda d, A, m: tok(clipped(d, A - 0.01 * m.sum(1, keepdim=True)), m)),
    ("entropy", "dapo", {}, "only tokens of the top fifth of entropy train",
     lambda d, A, m, entropy: tok(clipped(d, A), m, m & (entropy >= torch.quantile(entropy[m].double(), 0.8)))),
    ("hardest", "dapo", {}, "only the tokens of the 80 % largest terms train",
     lambda d, A, m: tok(J := clipped(d, A), m, m & (J.detach().abs() >= torch.quantile(J.detach().abs()[m], 0.2)))),
    # the sampler and the old policy
    ("TIS not truncated", "tis(dapo)", {}, "the correction is not truncated",
     lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, ratio(m, old, rollout_log_probs))),
    ("TIS inverted", "tis(dapo)", {}, "the correction is upside down, μ/π_old",
     lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, ratio(m, rollout_log_probs, old).clamp(max=2))),
    ("TIS current", "tis(dapo)", {}, "the correction is π/μ, not π_old/μ",
     lambda d, A, m, lp, rollout_log_probs: corrected(d, A, m, ratio(m, lp, rollout_log_probs).clamp(max=2).detach())),
    ("TIS masked", "tis(dapo)", {}, "masked, not truncated",
     lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, (x := ratio(m, old, rollout_log_probs)) * (x <= 2))),
    ("TIS by mean", "tis_seq(dapo)", {}, "the geometric mean, not the product",
     lambda d, A, m, old, rollout_log_probs: corrected(
         d, A, m, mean(ratio(m, old, rollout_log_probs).log(), m)[:, None].exp().clamp(max=2))),
    ("TIS as anchor", "tis(dapo)", {}, "no correction: the ratio is π/μ, and clipped",
     lambda A, m, lp, rollout_log_probs: tok(clipped(torch.where(m, lp - rollout_log_probs, 0), A), m)),
    ("IcePop one side", "icepop(dapo)", {}, "the lower side of the mask is missing",
     lambda d, A, m, old, rollout_log_probs: corrected(d, A, m, (x := ratio(m, old, rollout_log_probs)) * (x <= 5))),
    ("product mask", "seq_mask(grpo)", {}, "the mask is of the product, not of the geometric mean",
     lambda d, A, m, old, rollout_log_probs: corrected(
         d, A, m, ((ratio(m, old, rollout_log_probs).log().sum(1, keepdim=True).exp() - 1).abs() <= 1e-3), even, seq)),
    ("TIS normalized", "tis(grpo)", {}, "the correction is normalized to a mean of 1 over the batch",
     lambda d, A, m, old, rollout_log_probs: corrected(
         d, A, m, (w := ratio(m, old, rollout_log_probs).clamp(max=2)) / ((w * m).sum() / m.sum()), even, seq)),
    # backwards written by hand
    ("backward of both sides", "dapo", {}, "the backward drops tokens on both sides of the window",
     lambda d, A, m: tok(Backward.apply(d, A, lambda r, A: (r >= 0.8) & (r <= 1.28), True), m)),
    ("backward without lower clip", "dapo", {}, "the backward forgets the clip where A < 0",
     lambda d, A, m: tok(Backward.apply(d, A, lambda r, A: (A <= 0) | (r <= 1.28), True), m)),
    ("backward without denominator", "dapo", {}, "the backward ignores the gradient that comes in",
     lambda d, A, m: tok(Backward.apply(d, A, lambda r, A: torch.where(A > 0, r <= 1.28, r >= 0.8), False), m)),
    ("hook", "dapo", {}, "a hook clamps the gradient of log r to 0.02",
     lambda d, A, m: tok(clipped(hooked(d, lambda g: g.clamp(-0.02, 0.02)), A), m)),
    ("UP hook", "up_dapo", {}, "a hook takes out the gradient of positive tokens beyond r = 3",
     lambda d, A, m, lp: tok(up(hooked(lp, lambda g: torch.where((A > 0) & (d > math.log(3)), 0, g)), d, A), m)),
]  # fmt: skip
