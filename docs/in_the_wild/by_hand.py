# SPDX-License-Identifier: Apache-2.0
"""What each loss of losses.toml computes, written down after reading it: (lp, old, A, m, ref) -> what to minimize.

lp, old and ref are log-probabilities [B, T], A advantages [B, T], m the mask. The docstring is the formula.
"""

import torch


def tokens(x, m):
    """The mean over all tokens."""
    return x[m].sum() / m.sum()


def means(x, m):
    """The mean of each response."""
    return torch.stack([row[i].mean() for row, i in zip(x, m, strict=True)])


def responses(x, m):
    """The mean over responses of the mean of each."""
    return means(x, m).mean()


def sums(x, m):
    """The sum of each response."""
    return torch.stack([row[i].sum() for row, i in zip(x, m, strict=True)])


def clip(lp, old, A, low=0.2, high=0.2):
    """min(r A, clip(r, 1 - low, 1 + high) A)"""
    r = (lp - old).exp()
    return torch.where(A > 0, A * r.clamp(max=1 + high), A * r.clamp(min=1 - low))


def k3(lp, ref):
    return (ref - lp).exp() - 1 - (ref - lp)


def ppo(lp, old, A, m, ref):
    """−mean_i mean_t min(r A, clip(r, 1 ± 0.2) A)"""
    return -responses(clip(lp, old, A), m)


def ppo_tokens(lp, old, A, m, ref):
    """−mean over all tokens of min(r A, clip(r, 1 ± 0.2) A)"""
    return -tokens(clip(lp, old, A), m)


def grpo(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.04 k3]"""
    return -responses(clip(lp, old, A) - 0.04 * k3(lp, ref), m)


def feld_grpo(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.01 (log π_ref − log π)]: the KL term has the wrong sign"""
    return -responses(clip(lp, old, A) - 0.01 * (ref - lp), m)


def nick(lp, old, A, m, ref):
    """−mean_i min(R A, clip(R, 1 ± 0.25) A) + 0.04 mean_i Σ_t k3, R = Π_t r_t the product over a response"""
    return (
        -clip(sums(lp, m), sums(old, m), A[:, 0], 0.25, 0.25).mean()
        + 0.04 * sums(k3(lp, ref), m).mean()
    )


def yuanxuns(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 0.8, 1.3) A) − 0.01 k3]"""
    return -tokens(clip(lp, old, A, 0.2, 0.3) - 0.01 * k3(lp, ref), m)


def nikhil(lp, old, A, m, ref):
    """−mean_i mean_t [A log π − 0.04 (log π − log π_ref)]: no ratio, no clip"""
    return -responses(A * lp - 0.04 * (lp - ref), m)


def gameof(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.01 k3], after an assertion that r = 1, which fails off policy"""
    return -responses(clip(lp, old, A) - 0.01 * k3(lp, ref), m)


def fangyuan(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.1 k3]"""
    return -responses(clip(lp, old, A) - 0.1 * k3(lp, ref), m)


def r20213(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 1 ± 0.2) A) − 0.04 · k3 / 2]"""
    return -tokens(clip(lp, old, A) - 0.02 * k3(lp, ref), m)


def on_policy(lp, old, A, m, ref):
    """−mean_i mean_t [A π / sg(π) − 0.04 k3]: the ratio is 1 by construction"""
    return -responses(A * lp - 0.04 * k3(lp, ref), m)


def skandml(lp, old, A, m, ref):
    """−mean_i mean_t [A π / sg(π) − 0.01 k3]: the ratio is 1 by construction"""
    return -responses(A * lp - 0.01 * k3(lp, ref), m)


def joecummings_simple(lp, old, A, m, ref):
    """−mean_i mean_t [A π / sg(π) − 0.1 k3]: the ratio is 1 by construction"""
    return -responses(A * lp - 0.1 * k3(lp, ref), m)


def gspo(lp, old, A, m, ref):
    """−mean_i min(s A, clip(s, 1 ± 0.2) A), s = exp(mean_t log r)"""
    return -clip(means(lp, m), means(old, m), A[:, 0]).mean()


def gspo_kl(lp, old, A, m, ref):
    """−mean_i [min(s A, clip(s, 1 ± 0.2) A) − 0.04 mean_t k3], s = exp(mean_t log r)"""
    return gspo(lp, old, A, m, ref) + 0.04 * responses(k3(lp, ref), m)


def gamendez(lp, old, A, m, ref):
    """+mean_i Σ_t [min(r A, clip(r A, 0.8, 1.2)) − 0.01 (π/π_ref − log(π/π_ref))]: minimized with this sign"""
    x = (lp - old).exp() * A
    q = (lp - ref).exp()
    return sums(torch.minimum(x, x.clamp(0.8, 1.2)) - 0.01 * (q - q.log()), m).mean()


def wangitu(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.04 r k3]: the KL term is weighted by the ratio"""
    return -responses(clip(lp, old, A) - 0.04 * k3(lp, ref) * (lp - old).exp(), m)


def robotsail(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.1) A) − k3]"""
    return -responses(clip(lp, old, A, 0.1, 0.1) - k3(lp, ref), m)


def tianyi(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.04 k3], log r and log π_ref/π clamped to ±20"""
    log_r = (lp - old).clamp(-20, 20)
    log_r_ref = (lp - ref).clamp(-20, 20)
    return -responses(clip(log_r, 0 * old, A) - 0.04 * k3(log_r_ref, 0 * ref), m)


def asimkadav(lp, old, A, m, ref):
    """−(1/BT) Σ A log π + 0.02 mean_i Σ_t (log π − log π_ref), padded slots included: it takes no mask"""
    return -(A[:, :1] * lp).mean() + 0.02 * (lp - ref).sum(1).mean()


def ojus(lp, old, A, m, ref):
    """−mean_i Σ_t min(r A, clip(r, 1 ± 0.1) A) / (|o_i| + 1e-6)"""
    return -(sums(clip(lp, old, A, 0.1, 0.1), m) / (m.sum(1) + 1e-6)).mean()


def sandesh(lp, old, A, m, ref):
    """−mean_i A Σ_t log π"""
    return -sums(A * lp, m).mean()


def zhili(lp, old, A, m, ref):
    """−mean over all tokens of A_t log π_t: [:None] leaves A [B], which runs only if B = T"""
    raise RuntimeError


def zyl_grpo(lp, old, A, m, ref):
    """−mean over all tokens of A log π"""
    return -tokens(A * lp, m)


def malice(lp, old, A, m, ref):
    """−mean over all tokens of clip(r, 1 ± 0.2) clip(A, ±5): without the minimum"""
    return -tokens((lp - old).exp().clamp(0.8, 1.2) * A.clamp(-5, 5), m)


def malice_soft(lp, old, A, m, ref):
    """−mean over all tokens of r exp(−|log r|) clip(A, ±5), r clamped to e^±30"""
    d = lp - old
    return -tokens((d.clamp(-30, 30) - d.abs()).exp() * A.clamp(-5, 5), m)


def dapo(lp, old, A, m, ref):
    """−mean over all tokens of min(r A, clip(r, 0.8, 1.28) A)"""
    return -tokens(clip(lp, old, A, 0.2, 0.28), m)


def linxinrong_grpo(lp, old, A, m, ref):
    """−mean_i mean_t min(r A, clip(r, 1 ± 0.2) A) + 0.04 · mean of k3 over all tokens"""
    return -responses(clip(lp, old, A), m) + 0.04 * tokens(k3(lp, ref), m)


def jimyma(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 1 ± 0.2) A) − 0.04 k3]"""
    return -tokens(clip(lp, old, A) - 0.04 * k3(lp, ref), m)


def vegaction(lp, old, A, m, ref):
    """−mean_i Σ_t min(r A, clip(r, 1 ± 0.2) A) / (|o_i| + 1e-8)"""
    return -(sums(clip(lp, old, A), m) / (m.sum(1) + 1e-8)).mean()


def briefgpt(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 1 ± 0.2) A) − 0.01 (log π − log π_old)]"""
    return -tokens(clip(lp, old, A) - 0.01 * (lp - old), m)


def joecummings(lp, old, A, m, ref):
    """−mean over all tokens (their number + 1e-8) of [min(r A, clip(r, 1 ± 0.1) A) − 0.1 k3]"""
    return -(clip(lp, old, A, 0.1, 0.1) - 0.1 * k3(lp, ref))[m].sum() / (m.sum() + 1e-8)


def joecummings_completion(lp, old, A, m, ref):
    """−mean_i min(R A, clip(R, 1 ± 0.1) A) + 0.1 (P − 1 − log P), R = Π r and P = Π π_ref/π over the whole batch"""
    one = clip(lp[m].sum(), old[m].sum(), A[:, 0], 0.1, 0.1).mean()
    return -one + 0.1 * k3(lp[m].sum(), ref[m].sum()) * m.sum() / (m.sum() + 1e-8)


def bary(lp, old, A, m, ref):
    """−(1/BT) Σ min(r A_t, clip(r, 1 ± 0.2) A_t) + ...: A [B] broadcasts over the tokens, which runs only if B = T"""
    raise RuntimeError


def guochen(lp, old, A, m, ref):
    """−Σ_i Σ_t min(r A, clip(r, 1 ± 0.2) A): the sum over the batch"""
    return -clip(lp, old, A)[m].sum()


def reinforce_mean(lp, old, A, m, ref):
    """−mean_i mean_t A log π"""
    return -responses(A * lp, m)


def up_tokens(lp, old, A, m, ref):
    """−mean over all tokens of (A log π if A > 0, else max(r, 0.8) A)"""
    return -tokens(torch.where(A > 0, A * lp, A * (lp - old).exp().clamp(min=0.8)), m)


def up_tokens_dual(lp, old, A, m, ref):
    """−mean over all tokens of (A log π if A > 0, else clip(r, 0.8, 3) A)"""
    return -tokens(torch.where(A > 0, A * lp, A * (lp - old).exp().clamp(0.8, 3.0)), m)


def drpo(lp, old, A, m, ref):
    """−mean over all tokens of [r A − |A| π_old (r − 1)² / 25]"""
    r = (lp - old).exp()
    return -tokens(r * A - A.abs() * old.exp() * (r - 1) ** 2 / 25, m)


def wapo(lp, old, A, m, ref):
    """−mean_i Σ_t min(r, 10) A where A > 0, else 0 (their fixed length left out)"""
    return -sums(
        torch.where(A > 0, A * (lp - old).exp().clamp(max=10), 0 * A), m
    ).mean()


def gspo_narrow(lp, old, A, m, ref):
    """−mean_i min(s A, clip(s, 1 ± 0.0003) A)"""
    return -clip(means(lp, m), means(old, m), A[:, 0], 3e-4, 3e-4).mean()


def dapo_tokens(lp, old, A, m, ref):
    """−mean over all tokens of min(r A, clip(r, 0.8, 1.28) A)"""
    return -tokens(clip(lp, old, A, 0.2, 0.28), m)


def ppo_longest(lp, old, A, m, ref):
    """−Σ over all tokens of min(r A, clip(r, 1 ± 0.2) A) / (B times the longest response)"""
    return -sums(clip(lp, old, A), m).mean() / m.sum(1).max()


def influence(lp, old, A, m, ref):
    """−mean_i mean_t [min(r A, clip(r, 1 ± 0.2) A) − 0.01 k3], log r clamped to ±20"""
    return -responses(
        clip((lp - old).clamp(-20, 20), 0 * old, A) - 0.01 * k3(lp, ref), m
    )


def kl_to_old(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 1 ± 0.2) A) − 0.04 k3 to π_old]"""
    return -tokens(clip(lp, old, A) - 0.04 * k3(lp, old), m)


def ppo_sums_10(lp, old, A, m, ref):
    """−mean_i Σ_t min(r A, clip(r, 1 ± 0.2) A), log r clamped to ±10 (their fixed length left out)"""
    return -sums(clip((lp - old).clamp(-10, 10), 0 * old, A), m).mean()


def dapo_10(lp, old, A, m, ref):
    """−mean over all tokens of min(r A, clip(r, 0.8, 1.28) A), log r clamped to ±10"""
    return -tokens(clip((lp - old).clamp(-10, 10), 0 * old, A, 0.2, 0.28), m)


def cispo_10(lp, old, A, m, ref):
    """−mean over all tokens of sg(min(r, 1.2)) A log π, log r clamped to ±10"""
    return -tokens((lp - old).clamp(-10, 10).exp().clamp(max=1.2).detach() * A * lp, m)


def cispo_sum(lp, old, A, m, ref):
    """−Σ over all tokens of sg(min(r, 4)) A log π"""
    return -((lp - old).exp().clamp(max=4).detach() * A * lp)[m].sum()


def gspo_paper(lp, old, A, m, ref):
    """−mean_i min(s A, clip(s, 0.9997, 1.0004) A), s = exp(mean_t log r)"""
    return -clip(means(lp, m), means(old, m), A[:, 0], 3e-4, 4e-4).mean()


def eblanca(lp, old, A, m, ref):
    """−mean_i Σ_t min(r A, clip(r, 0.8, 1.3) A), r cut at 1.5: without gradient there where A < 0"""
    r = (lp - old).exp().clamp(max=1.5)
    return -sums(
        torch.where(A > 0, A * r.clamp(max=1.3), A * r.clamp(min=0.8)), m
    ).mean()


def bird(lp, old, A, m, ref):
    """−mean_i min(q A, clip(q, 1 ± 0.1) A), q the mean of the ratios of all slots, padded ones included: no mask"""
    q = (lp - old).exp().mean(1)
    return -clip(q.log(), 0 * q, A[:, 0], 0.1, 0.1).mean()


def kl_002(lp, old, A, m, ref):
    """−mean over all tokens of [min(r A, clip(r, 1 ± 0.2) A) − 0.02 k3]"""
    return -tokens(clip(lp, old, A) - 0.02 * k3(lp, ref), m)


def products(lp, old, A, m, ref):
    """−mean_i min(R A, clip(R, 1 ± 0.2) A), R = Π_t r_t the product over a response"""
    return -clip(sums(lp, m), sums(old, m), A[:, 0]).mean()
