# SPDX-License-Identifier: Apache-2.0
"""Losses that misread their batch: tokens shifted or left out, advantages changed once
more. A row is (name, objective, words of the cause, body); after a "-", words that
would be wrong.
"""

import torch

from .bodies import clipped, even, mean, seq, tok, up


def moved(x, by):
    """Return x [B, T] moved by so many columns to the right (to the left if negative),
    with 0 in the columns that become free.
    """
    out = torch.zeros_like(x)
    out[:, max(by, 0) : len(x[0]) + min(by, 0)] = x[
        :, max(-by, 0) : len(x[0]) + min(-by, 0)
    ]
    return out


def place(m):
    return m.cumsum(1) - 1


def column(m):
    return torch.arange(m.shape[1])


def rows(A, m):
    """The advantage of each response."""
    return (A * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)


def standard(A, m):
    """Return the advantages normalized over the responses."""
    x = rows(A, m)
    return (A - x.mean()) / (x.std() + 1e-6)


def gspo(d, A, m, n):
    s = ((d * m).sum(1) / n).exp()
    return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()


def kept(d, A, m, on):
    return tok(clipped(d, A), m & on)


CASES = [
    ("old_log_prob late", "dapo", "old_log_prob is one token too late",
     lambda lp, old, A, m: tok(clipped(lp - moved(old, 1), A), m)),
    ("old_log_prob early", "dapo", "old_log_prob is one token too early",
     lambda lp, old, A, m: tok(clipped(lp - old.roll(-1, 1), A), m)),
    ("log_prob late", "dapo", "log_prob is one token too late",
     lambda lp, old, A, m: tok(clipped(moved(lp, 1) - old, A), m)),
    ("log_prob early, UP", "up_dapo", "log_prob is one token too early",
     lambda lp, old, A, m: tok(up(moved(lp, -1), moved(lp, -1) - old, A, 1e9), m)),
    ("advantages late", "dapo", "the advantages are one token too late",
     lambda d, A, m: tok(clipped(d, moved(A, 1)), m)),
    ("mask late", "dapo", "the mask is one token too late", lambda d, A, m: tok(clipped(d, A), moved(m, 1))),
    ("mask early", "dapo", "the mask is one token too early", lambda d, A, m: tok(clipped(d, A), moved(m, -1))),
    ("mask rolled", "cispo", "the mask is one token too late",
     lambda lp, d, A, m: tok(d.exp().clamp(max=5).detach() * A * lp, m.roll(1, 1))),
    ("old_log_prob late, where A > 0", "dapo", "-one token too",
     lambda lp, old, A, m: tok(clipped(lp - torch.where(A > 0, moved(old, 1), old), A), m)),
    ("discount by column", "dapo", "A is discounted by 0.99 a token, from the first column on",
     lambda d, A, m: tok(clipped(d, A * 0.99 ** column(m)), m)),
    ("discount by token", "grpo", "A is discounted by 0.95 a token, from the first token on",
     lambda d, A, m: seq(even(d, A * 0.95 ** place(m)), m)),
    ("discount back", "dapo", "A is discounted by 0.9 a token, back from the last token",
     lambda d, A, m: tok(clipped(d, A * 0.9 ** place(m.flip(1)).flip(1)), m)),
    ("discount by the column of the length", "dapo", "back from column |o| - 1",
     lambda d, A, m: tok(clipped(d, A * 0.99 ** (m.sum(1, keepdim=True) - 1 - column(m))), m)),
    ("linear in the column", "dapo", "-discounted", lambda d, A, m: tok(clipped(d, A * (1 - 0.01 * column(m))), m)),
    ("half of A < 0", "dapo", "every weight is 0.5 times what it should be where A < 0",
     lambda d, A, m: tok(clipped(d, torch.where(A < 0, A / 2, A)), m)),
    ("both signs", "up_dapo", "3 times what it should be where A > 0 and 0.2 times",
     lambda lp, d, A, m: tok(up(lp, d, A * torch.where(A > 0, 3, 0.2), 1e9), m)),
    ("A over the root of |o|", "grpo", "every weight is multiplied by |o|^-0.5",
     lambda d, A, m: seq(even(d, A / m.sum(1, keepdim=True).sqrt()), m)),
    ("A times |o| to 0.3", "dapo", "every weight is multiplied by |o|^0.3",
     lambda d, A, m: tok(clipped(d, A * m.sum(1, keepdim=True) ** 0.3), m)),
    ("A in ±1", "dapo", "advantages are clipped to ±1", lambda d, A, m: tok(clipped(d, A.clamp(-1, 1)), m)),
    ("A in ±10", "dapo", "advantages are clipped to ±10", lambda d, A, m: tok(clipped(d, A.clamp(-10, 10)), m)),
    ("A below 1e-5 dropped", "dapo", "-advantages are clipped",
     lambda d, A, m: tok(clipped(d, A * (A.abs() > 1e-5)), m)),
    ("A in ±2 on wide batches", "dapo", "-advantages are clipped",
     lambda d, A, m: tok(clipped(d, A.clamp(-2, 2) if m.shape[1] > 12 else A), m)),
    ("A in [-10, 20]", "dapo", "-advantages are clipped", lambda d, A, m: tok(clipped(d, A.clamp(-10, 20)), m)),
    ("A over the std of the batch", "dapo", "divided by their standard deviation, over the responses of each batch",
     lambda d, A, m: tok(clipped(d, A / (rows(A, m).std() + 1e-6)), m)),
    ("A normalized", "dapo", "whitened again, over the responses of each batch",
     lambda d, A, m: tok(clipped(d, standard(A, m)), m)),
    ("A centered", "grpo", "centered again, over the tokens of each batch",
     lambda d, A, m: seq(even(d, A - A[m].mean()), m)),
    ("the first 5 tokens", "dapo", "tokens behind the first 5 of a response are not trained, and not counted",
     lambda d, A, m: kept(d, A, m, m.cumsum(1) <= 5)),
    ("the first 5 tokens, all counted", "dapo", "behind the first 5 of a response are not trained, though counted",
     lambda d, A, m: tok(clipped(d, A), m, m.cumsum(1) <= 5)),
    ("the first 16 columns", "grpo", "tokens behind the first 16 columns are not trained, though counted",
     lambda d, A, m: seq(even(d, A), m, column(m) < 16)),
    ("responses of 7 tokens at most", "dapo", "responses of more than 7 tokens are not trained, and not counted",
     lambda d, A, m: kept(d, A, m, m.sum(1, keepdim=True) < 8)),
    ("responses of 3 tokens at least", "dapo", "responses of fewer than 3 tokens are not trained, though counted",
     lambda d, A, m: tok(clipped(d, A), m, m.sum(1, keepdim=True) > 2)),
    ("the last token alone", "ppo_clip", "tokens in front of the last 1 of a response are not trained, though counted",
     lambda d, A, m: tok(even(d, A), m, m.flip(1).cumsum(1).flip(1) == 1)),
    ("all but the last 2 tokens", "ppo_clip", "the last 2 tokens of each response are not trained, though counted",
     lambda d, A, m: tok(even(d, A), m, m.flip(1).cumsum(1).flip(1) > 2)),
    ("all but the first 3 tokens", "grpo", "the first 3 tokens of each response are not trained, though counted",
     lambda d, A, m: seq(even(d, A), m, m.cumsum(1) > 3)),
    ("likely tokens do not train", "dapo", "tokens with a log_prob above -0.5 are not trained, though counted",
     lambda lp, d, A, m: tok(clipped(d, A), m, lp <= -0.5)),
    ("rare tokens do not train", "dapo", "tokens with a log_prob below -3 are not trained, though counted",
     lambda lp, d, A, m: tok(clipped(d, A), m, lp >= -3)),
    ("every second token", "dapo", "-tokens behind", lambda d, A, m: tok(clipped(d, A), m, place(m) % 2 == 0)),
    ("GSPO over the padded width", "gspo", "divided by the padded width",
     lambda d, A, m: gspo(d, mean(A, m), m, m.shape[1])),
    ("temperature of log_prob alone", "dapo", "log_prob is multiplied by 1.4286",
     lambda lp, old, A, m: tok(clipped(lp / 0.7 - old, A), m)),
    ("temperature of old_log_prob alone", "dapo", "old_log_prob is multiplied by 0.76923",
     lambda lp, old, A, m: tok(clipped(lp - old / 1.3, A), m)),
    ("π log π", "dapo", "0.01 times -π log π of the sampled token",
     lambda lp, d, A, m: tok(clipped(d, A) - 0.01 * lp.exp() * lp, m)),
    ("π_old log π", "dapo", "-π log π", lambda lp, old, d, A, m: tok(clipped(d, A) - 0.01 * old.exp() * lp, m)),
    ("A + 1", "dapo", "1 is added to every advantage", lambda d, A, m: tok(clipped(d, A + 1), m)),
    ("exp(A)", "dapo", "exp(A) replaces A", lambda d, A, m: tok(clipped(d, A.exp()), m)),
    ("tanh(A)", "grpo", "tanh(A) replaces A", lambda d, A, m: seq(even(d, A.tanh()), m)),
    ("A = 0 uncounted", "dapo", "tokens with A = 0 are not counted in the denominator",
     lambda d, A, m: -(clipped(d, A) * m).sum() / (m & (A != 0)).sum().clamp(min=1)),
    ("A > 0 alone", "dapo", "tokens with A <= 0 are not trained, and not counted",
     lambda d, A, m: -(clipped(d, A) * (m & (A > 0))).sum() / (m & (A > 0)).sum().clamp(min=1)),
    ("GSPO over the longest response", "gspo", "divided by the length of the longest response",
     lambda d, A, m: gspo(d, mean(A, m), m, m.sum(1).max())),
    ("GSPO of the mean ratio", "gspo", "the mean of its tokens' ratios",
     lambda d, A, m: gspo(mean(d.exp(), m).log()[:, None] * m, mean(A, m), m, m.sum(1))),
    ("log r", "dapo", "log r, or 1 + log r, replaces the ratio",
     lambda d, A, m: tok(torch.minimum(d * A, d.clamp(-0.2, 0.28) * A), m)),
    ("r twice, capped at 2", "dapo", "once more, as a constant, at most 2",
     lambda d, A, m: tok(clipped(d, A) * d.exp().clamp(max=2).detach(), m)),
    ("r twice", "grpo", "once more, as a constant", lambda d, A, m: seq(even(d, A) * d.exp().detach(), m)),
    ("UP with a bound", "up_dapo", "the tokens of A > 0 are clipped too",
     lambda lp, d, A, m: tok(torch.where(A > 0, A * lp * (d.exp() < 1.28), clipped(d, A)), m)),
]  # fmt: skip
