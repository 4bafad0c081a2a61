# SPDX-License-Identifier: Apache-2.0
"""Black boxes for identify.

target: the names that are true answers; "none" where no name is; "pitfall of NAME"
where a known mistake is.
"""

import math

import torch

from tests.fifth_set.case import case
from tests.fifth_set.parts import clipped, zeroed


def box(target, fault="", **expected):
    """Decorator: a box."""
    return case("box", target, fault, **expected)


@box("dapo", eps_low=0.1, eps_high=0.4)
def box_ppo_tokens(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -clipped(r, a, 0.9, 1.4).sum() / mask.sum()


@box("dr_grpo", eps=0.2)
def box_sums(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -clipped(r, a, 0.8, 1.2).sum(1).mean()


@box("grpo", eps=0.2, beta=0.02)
def box_with_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x, a, d = zeroed(mask, log_prob - old_log_prob, advantages, ref_log_prob - log_prob)
    r = x.exp()
    t = clipped(r, a, 0.8, 1.2) - 0.02 * (d.exp() - 1 - d)
    return -(t.sum(1) / mask.sum(1)).mean()


@box("gspo", eps_low=0.003, eps_high=0.004)
def box_geometric(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s, a = (x.sum(1) / mask.sum(1)).exp(), a.sum(1) / mask.sum(1)
    return -clipped(s, a, 0.997, 1.004).mean()


@box("cispo", eps_high=2.0)
def box_capped(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -(x.exp().clamp(max=3).detach() * a * lp).sum() / mask.sum()


@box("ce_gppo", share_low=0.5, share_high=0.8)
def box_ce_gppo(log_prob, old_log_prob, advantages, mask):
    """Return CE-GPPO's loss with the shares 0.8 above and 0.5 below."""
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    w = torch.where(
        (a > 0) & (r > 1.2), 0.8 * 1.2, torch.where((a < 0) & (r < 0.8), 0.4, r)
    )
    return -(w * a * lp).sum() / mask.sum()


@box("up_dapo|up_dapo_anchored", eps_low=0.3)
def box_up(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -torch.where(a > 0, a * lp, a * x.exp().clamp(min=0.7)).sum() / mask.sum()


@box("up(cispo_verl)|up(gppo)|none")
def box_up_of_cispo(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach().clamp(0.8, 1.2)
    return -torch.where(a > 0, a * lp, r * a * lp).sum() / mask.sum()


@box("tis(dapo)", is_max=4.0)
def box_tis(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    """Return DAPO's loss times the ratio to the sampler, at most 4."""
    x, a, y = zeroed(
        mask, log_prob - old_log_prob, advantages, old_log_prob - rollout_log_probs
    )
    r = x.exp()
    return -(y.exp().clamp(max=4) * clipped(r, a, 0.8, 1.28)).sum() / mask.sum()


@box("mis(grpo)", is_max=2.5)
def box_mis(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    """Return GRPO's loss times the ratio to the sampler, which is 0 above 2.5."""
    x, a, y = zeroed(
        mask, log_prob - old_log_prob, advantages, old_log_prob - rollout_log_probs
    )
    r, rho = x.exp(), y.exp()
    t = torch.where(rho <= 2.5, rho, 0) * clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@box("tis_seq(gspo)", is_max=2.0)
def box_tis_of_responses(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    """Return GSPO's loss times the response's ratio to the sampler, at most 2."""
    x, a, y = zeroed(
        mask, log_prob - old_log_prob, advantages, old_log_prob - rollout_log_probs
    )
    s, a = (x.sum(1) / mask.sum(1)).exp(), a.sum(1) / mask.sum(1)
    S = y.sum(1).exp().clamp(max=2)
    return -(S * clipped(s, a, 1 - 3e-4, 1 + 4e-4)).mean()


@box("tpo", eta=1.0)
def box_targets(log_prob, old_log_prob, advantages, mask, group):
    """Return TPO's loss with eta = 1."""
    lp, old, a = (x.sum(1) for x in zeroed(mask, log_prob, old_log_prob, advantages))
    a = a / mask.sum(1)
    loss = 0.0
    for g in group.unique():
        i = group == g
        loss = (
            loss - i.sum() * ((old[i] + a[i]).softmax(0) * lp[i].log_softmax(0)).sum()
        )
    return loss / len(group)


@box("sapo", tau_pos=1.0, tau_neg=1.05)
def box_soft(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    tau = torch.where(a > 0, 1.0, 1.05)
    t = 4 / tau * torch.sigmoid(tau * (x.exp() - 1)) * a
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


@box("gmpo", eps=0.3)
def box_geometric_of_tokens(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    c = torch.where(a > 0, x.clamp(max=0.3), x.clamp(min=-0.3))
    n = mask.sum(1)
    return -(a.sum(1) / n * (c.sum(1) / n).exp()).mean()


@box("dro", tau=0.3)
def box_square(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -(a * lp - 0.15 * x**2).sum() / mask.sum()


@box("dppo_tv", delta=0.25)
def box_tv(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    gain = (log_prob.exp() - old_log_prob.exp()).detach()
    M = mask & (torch.where(a > 0, gain, -gain) <= 0.25)
    return -torch.where(M, x.exp() * a, 0).sum(1).mean()


@box("topr")
def box_tapered(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    A, S = a.sum(1) / mask.sum(1), x.sum(1).exp().detach()
    return -(torch.where(A >= 0, 1, S.clamp(max=1)) * A * lp.sum(1)).mean()


@box("reinforce|rloo")
def box_plain(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    return -(a * lp).sum(1).mean()


@box("w_reinforce", lam=0.25)
def box_weighted(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    return -(torch.where(a > 0, 0.25 * a, a) * lp).sum(1).mean()


@box("kl_cov", share=0.002, coef=1.0)
def box_covariance(log_prob, old_log_prob, advantages, mask):
    """Return KL-Cov's loss with a share of 0.002 of the tokens."""
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    n = mask.sum()
    c = (a - a.sum() / n) * (lp.detach() - lp.detach().sum() / n)
    c = c.masked_fill(~mask, -math.inf)
    k = max(1, int(0.002 * n))
    cut = c[mask].sort(descending=True).values[k - 1]
    pen = torch.where(c >= cut, x.abs(), 0)
    return -(x.exp() * a - pen).sum() / n


@box("none")
def box_of_cubes(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    return -((x.exp() ** 3 + 1) / 4 * a).sum() / mask.sum()


@box("none")
def box_ramp(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    w = (2 - x.exp().detach()).clamp(0, 1.5)
    return -(w * a * lp).sum() / mask.sum()


@box("pitfall of dapo", "A < 0 lacks its clip")
def box_losers_unclipped(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -(torch.where(a > 0, r.clamp(max=1.28), r) * a).sum() / mask.sum()


@box("pitfall of grpo", "the advantages are clamped to ±1")
def box_clamped_advantages(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages.clamp(-1, 1))
    r = x.exp()
    t = clipped(r, a, 0.8, 1.2)
    return -(t.sum(1) / mask.sum(1)).mean()


@box(
    "pitfall of ppo_clip|pitfall of dapo|pitfall of grpo|pitfall of dr_grpo",
    "the ratio is clamped, the minimum is missing",
)
def box_without_the_minimum(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    return -(x.exp().clamp(0.8, 1.2) * a).sum() / mask.sum()
