# SPDX-License-Identifier: Apache-2.0
"""Black boxes written before `identify` ran on them: (objectives of this gradient,
hyperparameters to be found, body).

Bodies are as in bodies.py; "" is no registered objective.
"""

import math

import torch

from .bodies import binary_kl, clipped, dual, gspo, k3, mean, seq, tok


def vespo(d, A, m, lp):
    x = d.sum(1, keepdim=True).detach()
    W = x.clamp(max=50).exp()
    phi = torch.where(A > 0, (x + 2 * (1 - W)).exp(), (2 * x + 1.5 * (1 - W)).exp())
    return -(phi * A * lp).sum(1).mean()


def aspo(d, A, m, lp):
    """Return ASPO's loss with a cap of 2 and a bound of 0.15."""
    r = d.exp().detach()
    w = torch.where(
        A > 0, (1 / r).clamp(max=2) * (r <= 1.15), r.clamp(max=2) * (r >= 0.85)
    )
    return tok(w * A * lp, m)


def bandpo(d, A, m, old):
    r, mu = d.exp(), old.exp()
    low, high = (1 - 0.08 / mu).clamp(min=0), torch.minimum(1 + 0.08 / mu, 1 / mu)
    return seq(torch.minimum(r * A, torch.minimum(torch.maximum(r, low), high) * A), m)


def m2po(d, A, m):
    among, x = m & (d * A > 0), (d.detach() ** 2).double()
    v = x[among].sort().values
    over = (v.cumsum(0) / torch.arange(1, len(v) + 1) > 0.1).nonzero()
    return tok(d.exp() * A * (~(among & (x >= v[over[0, 0]])) if len(over) else m), m)


def dppo_kl(d, A, m, lp, old):
    x, y = (torch.where(m, z, -1.0).detach() for z in (lp, old))
    return -(d.exp() * A * ((binary_kl(y, x) <= 0.1) | (A * d <= 0)) * m).sum(1).mean()


def moved(lp, old, A):
    return (lp.exp() - old.exp()) * A.sign()


BOXES = [
    ("grpo reinforce_pp reinforce_pp_baseline", {"eps": 0.13}, lambda d, A, m: seq(clipped(d, A, 0.87, 1.13), m)),
    ("dapo", {"eps_low": 0.15, "eps_high": 0.35, "c": 4.0},
     lambda d, A, m: tok(dual(clipped(d, A, 0.85, 1.35), A, 4), m)),
    ("gspo", {"eps_low": 2e-3, "eps_high": 5e-3}, lambda d, A, m: gspo(mean(d, m), mean(A, m), 2e-3, 5e-3)),
    ("cispo", {"eps_high": 1.5}, lambda d, A, m, lp: tok(d.exp().clamp(max=2.5).detach() * A * lp, m)),
    ("cispo_verl", {"eps_low": 0.3, "eps_high": 0.1},
     lambda d, A, m, lp: tok(d.exp().clamp(0.7, 1.1).detach() * A * lp, m)),
    ("up_dapo up_dapo_anchored", {"eps_low": 0.1},
     lambda d, A, m, lp: tok(torch.where(A > 0, A * lp, d.clamp(min=math.log(0.9)).exp() * A), m)),
    ("up_grpo up_grpo_anchored", {"eps": 0.3, "c": 5.0},
     lambda d, A, m, lp: seq(torch.where(A > 0, A * lp, d.clamp(math.log(0.7), math.log(5)).exp() * A), m)),
    ("up_gspo up_gspo_anchored", {"eps_low": 1e-2},
     lambda d, A, m, lp: -torch.where((a := mean(A, m)) > 0, a * mean(lp, m), a * mean(d, m).exp().clamp(0.99)).mean()),
    ("sapo", {"tau_pos": 0.8, "tau_neg": 1.3},
     lambda d, A, m: seq(torch.sigmoid((t := torch.where(A > 0, 0.8, 1.3).to(d)) * (d.exp() - 1)) * 4 / t * A, m)),
    ("gmpo", {"eps": 0.25},
     lambda d, A, m: -(mean(torch.where(A > 0, d.clamp(max=0.25), d.clamp(min=-0.25)), m).exp() * mean(A, m)).mean()),
    ("gppo", {"eps_low": 0.3, "eps_high": 0.4}, lambda d, A, m, lp: tok(
        torch.where(A > 0, (r := d.exp().detach()).clamp(max=1.4), r.clamp(min=0.7)) * A * lp, m)),
    ("topr", {}, lambda d, A, m, lp: -(
        torch.where(A >= 0, 1, d.sum(1, keepdim=True).clamp(max=0).exp().detach()) * A * lp).sum(1).mean()),
    ("vespo", {"c1_pos": 1.0, "c2_pos": 2.0, "c1_neg": 2.0, "c2_neg": 1.5}, vespo),
    ("aspo", {"eps": 0.15, "cap": 2.0}, aspo),
    ("dppo_tv", {"delta": 0.1}, lambda d, A, m, lp, old: -(d.exp() * A * (moved(lp, old, A) <= 0.1) * m).sum(1).mean()),
    ("dppo_tv_verl", {"delta": 0.15, "trunc": 6.0},
     lambda d, A, m, lp, old: tok(d.exp().clamp(max=6).detach() * A * (moved(lp, old, A) <= 0.15) * lp, m)),
    ("w_reinforce", {"lam": 0.3}, lambda A, m, lp: -(torch.where(A > 0, 0.3 * A, A) * lp).sum(1).mean()),
    ("reinforce rloo", {}, lambda A, m, lp: -(A * (lp - lp.detach()).exp()).sum(1).mean()),
    ("dr_grpo", {"eps": 0.25, "c": 2.5}, lambda d, A, m: -dual(clipped(d, A, 0.75, 1.25), A, 2.5).sum(1).mean()),
    ("is_pg", {}, lambda d, A, m: -(d.exp() * A * m).sum(1).mean()),
    ("reinforce_off_policy", {}, lambda A, m, lp: tok(A * lp, m)),
    ("ripo", {"delta": 0.02},
     lambda d, A, m, old: tok(clipped(d, A, 1 - (e := (0.02 / old.exp()).sqrt()), 1 + e), m)),
    ("bandpo_tv", {"delta": 0.08}, bandpo),
    ("cfpo", {"eps": 0.3}, lambda d, A, m: seq(d.exp() * A - A.abs() / 0.6 * torch.expm1(d) ** 2, m)),
    ("dro", {"tau": 0.4}, lambda d, A, m, lp: tok(A * lp - 0.2 * d**2, m)),
    ("luspo", {"eps_low": 1e-3, "eps_high": 4e-3}, lambda d, A, m: -(
        torch.minimum((s := mean(d, m)[:, None].exp()) * A, s.clamp(0.999, 1.004) * A) * m).sum(1).mean()),
    ("wapo", {"eps": 2.0}, lambda d, A, m: -(d.clamp(max=math.log(3)).exp() * A * (A > 0)).sum(1).mean()),
    ("ce_gppo", {"eps_low": 0.2, "eps_high": 0.3, "share_low": 0.5, "share_high": 0.8}, lambda d, A, m, lp: tok(
        torch.where(A > 0, torch.where((r := d.exp().detach()) > 1.3, 1.04, r), torch.where(r < 0.8, 0.4, r)) * A * lp,
        m)),
    ("grpo", {"eps": 0.2, "beta": 0.05},
     lambda d, A, m, lp, ref_log_prob: seq(clipped(d, A, 0.8, 1.2) - 0.05 * k3(lp, ref_log_prob, m), m)),
    ("dapo_no_upper_clip", {"eps_low": 0.25, "c": 6.0}, lambda d, A, m: tok(
        torch.where(A > 0, d, d.clamp(math.log(0.75), math.log(6))).exp() * A, m)),
    ("w_reinforce_code", {"lam": 0.2, "eps": 0.1},
     lambda d, A, m: tok(clipped(d, torch.where(A > 0, 0.2 * A, A), 0.9, 1.1), m)),
    ("m2po", {"tau": 0.1}, m2po),
    ("dppo_kl", {"delta": 0.1}, dppo_kl),
    ("", {}, lambda d, A, m: tok(A * torch.tanh(d), m)),
    ("", {}, lambda d, A, m, lp: tok(A * (lp + 0.5 * torch.sin(2 * d)), m)),
]  # fmt: skip
