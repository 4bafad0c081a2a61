# SPDX-License-Identifier: Apache-2.0
"""Wrong losses of the other objectives: responses, weights, samplers, bounds."""

import math

import torch

from tests.fifth_set.case import wrong
from tests.fifth_set.parts import clipped, zeroed


def gspo(s, a, mask):
    """GSPO's loss of these ratios of responses; a: 0 in masked slots."""
    return -clipped(s, a.sum(1) / mask.sum(1), 1 - 3e-4, 1 + 4e-4).mean()


# ---- GSPO, LUSPO, GMPO, UP-GSPO ------------------------------------------------------
@wrong("gspo", "s is the product of the ratios, not their geometric mean")
def product_for_the_root(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s = x.sum(1).exp()
    return gspo(s, a, mask)


@wrong("gspo", "log s is averaged over the padded width")
def geometric_mean_over_the_width(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s = x.mean(1).exp()
    return gspo(s, a, mask)


@wrong("gspo", "s is the arithmetic mean of the ratios")
def arithmetic_mean(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s = torch.where(mask, x.exp(), 0).sum(1) / mask.sum(1)
    return gspo(s, a, mask)


@wrong("gspo", "PPO's bounds of 0.2 are used for s")
def token_bounds_for_responses(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1)
    s, a = (x.sum(1) / n).exp(), a.sum(1) / n
    return -clipped(s, a, 0.8, 1.28).mean()


@wrong("gspo", "responses are weighted by their length: a mean over tokens")
def gspo_by_tokens(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s = (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().expand_as(x)
    t = clipped(s, a, 1 - 3e-4, 1 + 4e-4)
    return -torch.where(mask, t, 0).sum() / mask.sum()


@wrong("gspo", "in the token form s is not detached: its gradient counts twice")
def gspo_token_undetached(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1, keepdim=True)
    log_s = x.sum(1, keepdim=True) / n
    s = (log_s + torch.where(mask, log_prob - log_prob.detach(), 0)).exp()
    t = clipped(s, a, 1 - 3e-4, 1 + 4e-4)
    return -(torch.where(mask, t, 0).sum(1) / n[:, 0]).mean()


@wrong("gspo", "s is replaced by the median of the tokens' ratios")
def median_ratio(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    s = torch.where(mask, x, math.nan).nanmedian(1).values.exp()
    return gspo(s, a, mask)


@wrong("luspo", "the response's term counts once, not |o| times")
def luspo_without_the_length(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1)
    s, a = (x.sum(1) / n).exp(), a.sum(1) / n
    return -clipped(s, a, 1 - 2e-3, 1 + 2.5e-3).mean()


@wrong("luspo", "the term is multiplied by the square root of |o|")
def luspo_by_the_root_of_the_length(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1)
    s, a = (x.sum(1) / n).exp(), a.sum(1) / n
    return -(n.sqrt() * clipped(s, a, 1 - 2e-3, 1 + 2.5e-3)).mean()


@wrong(
    "gmpo", "the tokens' log-ratios are clipped on both sides, whatever the sign of A"
)
def gmpo_clipped_on_both_sides(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1)
    return -(a.sum(1) / n * (x.clamp(-0.4, 0.4).sum(1) / n).exp()).mean()


@wrong("gmpo", "the bounds are 1 ± 0.4, not e^±0.4")
def gmpo_with_linear_bounds(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1)
    up, down = x.clamp(max=math.log(1.4)), x.clamp(min=math.log(0.6))
    c = torch.where(a > 0, up, down)
    return -(a.sum(1) / n * (c.sum(1) / n).exp()).mean()


@wrong("up_gspo", "a good response's log-probability is summed, not averaged")
def up_gspo_summed(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    n = mask.sum(1)
    s, a = (x.sum(1) / n).exp(), a.sum(1) / n
    J = torch.where(a > 0, a * lp.sum(1), a * s.clamp(min=1 - 3e-4))
    return -J.mean()


@wrong("up_gspo", "bad responses use the ratio of each token")
def up_gspo_with_token_ratios(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    J = torch.where(a > 0, a * lp, torch.minimum(r * a, r.clamp(min=1 - 3e-4) * a))
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


@wrong(
    "up_gspo", "the upper bound is kept where A > 0: good responses stop at s = 1.0004"
)
def up_gspo_that_stops(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    n = mask.sum(1)
    s, a = (x.sum(1) / n).exp(), a.sum(1) / n
    good = torch.where(s.detach() > 1 + 4e-4, 0, a * lp.sum(1) / n)
    return -torch.where(
        a > 0, good, torch.minimum(s * a, s.clamp(min=1 - 3e-4) * a)
    ).mean()


# ---- UP ------------------------------------------------------------------------------
@wrong("up_dapo", "A > 0 uses π_θ, not its logarithm")
def up_with_the_probability(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    J = torch.where(a > 0, a * lp.exp(), torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -torch.where(mask, J, 0).sum() / mask.sum()


@wrong("up_dapo", "A > 0 uses the plain ratio: π_old stays in the weight")
def up_with_the_ratio(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    J = torch.where(a > 0, a * r, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -J.sum() / mask.sum()


@wrong("up_dapo", "bad tokens lose their lower clip")
def up_without_the_lower_clip(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -torch.where(a > 0, a * lp, a * x.exp()).sum() / mask.sum()


@wrong(
    "up_dapo", "bad tokens are clipped at 1.28 as well, by a clamp without the minimum"
)
def up_clamped_for_losers(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().clamp(0.8, 1.28)
    return -torch.where(a > 0, a * lp, a * r).sum() / mask.sum()


@wrong(
    "up_dapo", "the branch is chosen by the mean advantage of the batch's prompt rows"
)
def up_by_the_batch_sign(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    good = (a.sum() > 0).expand_as(a)
    J = torch.where(good, a * lp, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -J.sum() / mask.sum()


@wrong("up_grpo", "the anchored form lacks its stop-gradient: the weight is 0")
def up_anchored_without_stop(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    J = torch.where(
        a > 0, a * (lp - lp).exp(), torch.minimum(r * a, r.clamp(min=0.8) * a)
    )
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


@wrong("up_grpo", "good tokens above r = 1.2 weigh sg(1.2/r)")
def up_damped(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    damp = (1.2 / r).clamp(max=1).detach()
    J = torch.where(a > 0, a * damp * lp, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


@wrong("up_grpo", "a positive advantage below 0.6 takes the branch of negative ones")
def up_above_a_threshold(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp()
    J = torch.where(a > 0.6, a * lp, torch.minimum(r * a, r.clamp(min=0.8) * a))
    return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()


# ---- CISPO and its relatives ---------------------------------------------------------
@wrong("cispo", "the clipped ratio is not detached")
def cispo_undetached(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -(x.exp().clamp(max=5.0) * a * lp).sum() / mask.sum()


@wrong("cispo", "tokens beyond the cap are masked, not capped")
def cispo_that_masks(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    return -(torch.where(r <= 5, r, 0) * a * lp).sum() / mask.sum()


@wrong("cispo", "the cap is 4, the bound is taken as absolute")
def cispo_cap_as_absolute(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -(x.exp().detach().clamp(max=4.0) * a * lp).sum() / mask.sum()


@wrong("cispo", "the cap acts for positive advantages alone")
def cispo_capped_for_winners(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    return -(torch.where(a > 0, r.clamp(max=5), r) * a * lp).sum() / mask.sum()


@wrong("cispo_verl", "the weight is a plain mean of ratio and 1 within the bounds")
def cispo_half_way(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    w = (0.5 * x.exp() + 0.5).detach().clamp(0.8, 1.2)
    return -(w * a * lp).sum() / mask.sum()


@wrong("gppo", "the bound has no gradient beyond the clip")
def gppo_as_ppo(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -clipped(r, a, 0.8, 1.28).sum() / mask.sum()


@wrong("gppo", "beyond the bounds the weight is 1, not the bound")
def gppo_with_one(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    beyond = (a > 0) & (r > 1.28) | (a < 0) & (r < 0.8)
    return -(torch.where(beyond, 1, r) * a * lp).sum() / mask.sum()


@wrong("ce_gppo", "the two shares are exchanged")
def ce_gppo_exchanged(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    w = torch.where((a < 0) & (r < 0.8), 1.0 * 0.8, r)
    w = torch.where((a > 0) & (r > 1.2), 0.75 * 1.2, w)
    return -(w * a * lp).sum() / mask.sum()


@wrong("aspo", "negative tokens are flipped too")
def aspo_for_both_signs(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    w = (1 / r).clamp(max=3)
    alive = torch.where(a > 0, r <= 1.2, r >= 0.8)
    return -(torch.where(alive, w, 0) * a * lp).sum() / mask.sum()


@wrong("aspo", "the flipped weight has no cap")
def aspo_without_a_cap(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    r = x.exp().detach()
    w = torch.where(a > 0, 1 / r, r.clamp(max=3))
    alive = torch.where(a > 0, r <= 1.2, r >= 0.8)
    return -(torch.where(alive, w, 0) * a * lp).sum() / mask.sum()


@wrong("aspo_code", "the quantile is over the batch, not over each response")
def aspo_code_batch_quantile(log_prob, old_log_prob, advantages, mask, entropy):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    calm = entropy <= torch.where(mask, entropy, math.nan).flatten().nanquantile(0.8)
    eps = torch.where(calm, 0.2, 0.4)
    r = x.exp().detach()
    w = torch.where(a > 0, 1 / r, r).clamp(max=3)
    alive = torch.where(a > 0, r <= 1 + eps, r >= 1 - eps)
    return -(torch.where(alive, w, 0) * a * lp).sum() / mask.sum()


@wrong("sapo", "the factor 4/τ is missing")
def sapo_without_four(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    tau = torch.where(a > 0, 1.0, 1.05)
    t = torch.sigmoid(tau * (x.exp() - 1)) * a
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


@wrong("sapo", "the temperatures of the two signs are exchanged")
def sapo_exchanged(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    tau = torch.where(a > 0, 1.05, 1.0)
    t = 4 / tau * torch.sigmoid(tau * (x.exp() - 1)) * a
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


@wrong("sapo", "the gate is centered at r = 0: sigmoid(τ r)")
def sapo_off_center(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    tau = torch.where(a > 0, 1.0, 1.05)
    t = 4 / tau * torch.sigmoid(tau * x.exp()) * a
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


# ---- REINFORCE and whole responses ---------------------------------------------------
@wrong("reinforce", "the probability is trained, not its logarithm")
def reinforce_of_probabilities(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    return -torch.where(mask, lp.exp() * a, 0).sum(1).mean()


@wrong("rloo", "the log-probability of a response is averaged over its tokens")
def rloo_by_the_mean(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    return -((lp * a).sum(1) / mask.sum(1)).mean()


@wrong("rloo", "a leave-one-out baseline is subtracted from the advantages again")
def rloo_baseline_twice(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    A, n = a.sum(1) / mask.sum(1), len(a)
    A = A - (A.sum() - A) / max(n - 1, 1)
    return -(A * lp.sum(1)).mean()


@wrong("is_pg", "the ratio is detached and its log-probability forgotten where r > 2")
def is_truncated(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    return -(x.exp().clamp(max=2) * a).sum(1).mean()


@wrong("topr", "good responses carry the truncated ratio too")
def topr_truncates_both(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    S = x.sum(1).exp().detach().clamp(max=1)
    return -(S * a.sum(1) / mask.sum(1) * lp.sum(1)).mean()


@wrong("topr", "the ratio is that of each token")
def topr_by_tokens(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    w = torch.where(a >= 0, 1, x.exp().detach().clamp(max=1))
    return -(w * a * lp).sum(1).mean()


@wrong("topr", "bad responses are cut at 1 from below, not from above")
def topr_from_below(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    S = x.sum(1).exp().detach().clamp(min=1)
    A = a.sum(1) / mask.sum(1)
    return -(torch.where(A >= 0, 1, S) * A * lp.sum(1)).mean()


@wrong("tpo", "the softmax over a prompt is of mean log-probabilities")
def tpo_of_means(log_prob, old_log_prob, advantages, mask, group):
    lp, old, a = zeroed(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1)
    lp, old, a = lp.sum(1) / n, old.sum(1) / n, a.sum(1) / n
    loss = 0.0
    for g in group.unique():
        i = group == g
        q = (old[i] + a[i]).softmax(0)
        loss = loss - i.sum() * (q * lp[i].log_softmax(0)).sum()
    return loss / len(group)


@wrong("tpo", "the target is the old policy's share times e^(A/2)")
def tpo_at_another_eta(log_prob, old_log_prob, advantages, mask, group):
    lp, old, a = (x.sum(1) for x in zeroed(mask, log_prob, old_log_prob, advantages))
    a = a / mask.sum(1)
    loss = 0.0
    for g in group.unique():
        i = group == g
        q = (old[i] + a[i] / 2).softmax(0)
        loss = loss - i.sum() * (q * lp[i].log_softmax(0)).sum()
    return loss / len(group)


@wrong("vespo", "c1 and c2 are exchanged")
def vespo_exchanged(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    lw = x.sum(1).detach()
    A = a.sum(1) / mask.sum(1)
    k, lam = torch.where(A > 0, 3.0, 2.0), torch.where(A > 0, 2.0, 3.0)
    return -((k * lw + lam * (1 - lw.exp())).exp() * A * lp.sum(1)).mean()


@wrong("w_reinforce", "λ scales the negative responses")
def w_reinforce_exchanged(log_prob, old_log_prob, advantages, mask):
    lp, a = zeroed(mask, log_prob, advantages)
    return -(torch.where(a < 0, 0.1 * a, a) * lp).sum(1).mean()


@wrong("wapo", "losers are trained too")
def wapo_with_losers(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -torch.minimum(r * a, r.clamp(max=10.0) * a).sum(1).mean()


# ---- penalties and bounds that move --------------------------------------------------
@wrong("dro", "the penalty is τ (log r)², twice what it should be")
def dro_twice(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    return -(a * lp - 0.1 * x**2).sum() / mask.sum()


@wrong("cfpo", "the penalty lacks the size of A")
def cfpo_without_a(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    t = r * a - (r - 1) ** 2 / 0.4
    return -(torch.where(mask, t, 0).sum(1) / mask.sum(1)).mean()


@wrong("cfpo", "the penalty is on log r")
def cfpo_on_the_logarithm(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    t = x.exp() * a - a.abs() * x**2 / 0.4
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("drpo", "the penalty is not divided by π_old: CFPO's at ε = 12.5")
def drpo_without_mu(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return -(r * a - a.abs() / 25 * (r - 1) ** 2).sum() / mask.sum()


@wrong("bandpo_tv", "the bounds are made of π_θ, not of π_old")
def band_of_the_new_policy(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    p, r = torch.where(mask, log_prob, 0).exp().detach(), x.exp()
    low, high = (1 - 0.05 / p).clamp(min=0), torch.minimum(1 + 0.05 / p, 1 / p)
    c = torch.maximum(torch.minimum(r, high), low)
    return -(torch.minimum(r * a, c * a).sum(1) / mask.sum(1)).mean()


@wrong("bandpo_chi2", "the factor 1 - π_old under the root is missing: RIPO's band")
def chi2_without_the_rest(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    mu, r = torch.where(mask, old_log_prob, 0).exp(), x.exp()
    e = (0.05 / mu).sqrt()
    low, high = (1 - e).clamp(min=0), torch.minimum(1 + e, 1 / mu)
    c = torch.maximum(torch.minimum(r, high), low)
    return -(torch.minimum(r * a, c * a).sum(1) / mask.sum(1)).mean()


@wrong("ripo", "the square root is missing: ε = δ/π_old")
def ripo_without_the_root(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    e, r = 0.05 / torch.where(mask, old_log_prob, 0).exp(), x.exp()
    c = torch.maximum(torch.minimum(r, 1 + e), 1 - e)
    return -torch.minimum(r * a, c * a).sum() / mask.sum()


@wrong("dppo_tv", "the mask is symmetric: |π_θ - π_old| <= δ whatever the sign of A")
def dppo_on_both_sides(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    gap = (log_prob.exp() - old_log_prob.exp()).abs().detach()
    return -torch.where(mask & (gap <= 0.15), x.exp() * a, 0).sum(1).mean()


@wrong("dppo_tv_verl", "the ratio is not truncated at 3")
def dppo_untruncated(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    gain = (log_prob.exp() - old_log_prob.exp()).detach()
    M = mask & (torch.where(a > 0, gain, -gain) <= 0.2)
    return -torch.where(M, x.exp().detach() * a * lp, 0).sum() / mask.sum()


@wrong("dppo_kl", "the divergence has its arguments exchanged: KL(π_θ ‖ π_old)")
def dppo_reverse_kl(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    p, mu = (torch.where(mask, v, -1.0).detach() for v in (log_prob, old_log_prob))
    q, nu = -torch.expm1(p), -torch.expm1(mu)
    rest = torch.where(
        q > 0, q * (q.clamp(min=1e-300).log() - nu.clamp(min=1e-300).log()), 0
    )
    kl = p.exp() * (p - mu) + rest
    M = (kl <= 0.05) | (a * x <= 0)
    return -torch.where(mask & M, x.exp() * a, 0).sum(1).mean()


@wrong("cppo", "the budget counts the token itself: the sum is inclusive")
def cppo_inclusive(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum(1, keepdim=True)
    w = torch.where(mask, 1 - 0.2 * (mask.cumsum(1) - 1) / (n - 1).clamp(min=1), 0)
    gain = torch.where(mask, log_prob.exp() - old_log_prob.exp(), 0).detach()
    d = w * gain.abs()
    inside = d <= torch.minimum(
        torch.tensor(0.15), 0.15 + 0.015 * w.cumsum(1) - d.cumsum(1)
    )
    return -torch.where(mask & ((a * x <= 0) | inside), x.exp() * a, 0).sum(1).mean()


@wrong("m2po", "the second moment is taken over all tokens, not over those past π_old")
def m2po_over_all(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    m2 = torch.where(mask, x.detach() ** 2, math.inf).flatten()
    order = m2.argsort()
    mean = m2[order].cumsum(0) / torch.arange(1, len(m2) + 1)
    keep = torch.zeros(len(m2), dtype=torch.bool)
    keep[order] = mean <= 0.04
    past = (a > 0) & (x > 0) | (a < 0) & (x < 0)
    return (
        -torch.where(mask & (~past | keep.view_as(x)), x.exp() * a, 0).sum()
        / mask.sum()
    )


@wrong("kl_cov", "the tokens of the smallest covariance are penalized")
def kl_cov_smallest(log_prob, old_log_prob, advantages, mask):
    x, lp, a = zeroed(mask, log_prob - old_log_prob, log_prob, advantages)
    n = mask.sum()
    c = (a - a.sum() / n) * (lp.detach() - lp.detach().sum() / n)
    k = max(1, int(0.0002 * n))
    cut = c[mask].sort().values[k - 1]
    pen = torch.where(mask & (c <= cut), x.abs(), 0)
    return -(x.exp() * a - pen).sum() / n


@wrong("reinforce_pp", "advantages are whitened over tokens once more")
def whitened_over_tokens(log_prob, old_log_prob, advantages, mask):
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    n = mask.sum()
    mean = a.sum() / n
    var = torch.where(mask, (a - mean) ** 2, 0).sum() / n
    a = torch.where(mask, (a - mean) / (var + 1e-8).sqrt(), 0)
    r = x.exp()
    return -(clipped(r, a, 0.8, 1.2).sum(1) / mask.sum(1)).mean()


# ---- corrections for the sampler -----------------------------------------------------
def ppo_terms(mask, log_prob, old_log_prob, advantages, low=0.8, high=1.28):
    """Return PPO's terms, 0 in masked slots."""
    x, a = zeroed(mask, log_prob - old_log_prob, advantages)
    r = x.exp()
    return clipped(r, a, low, high)


@wrong("tis(dapo)", "ρ is upside down: μ/π_old")
def tis_inverted(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    rho = torch.where(mask, rollout_log_probs - old_log_prob, 0).exp().clamp(max=2)
    return -(rho * t).sum() / mask.sum()


@wrong("tis(dapo)", "the correction is π_θ/μ, not π_old/μ")
def tis_of_the_new_policy(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    rho = torch.where(mask, log_prob.detach() - rollout_log_probs, 0).exp().clamp(max=2)
    return -(rho * t).sum() / mask.sum()


@wrong("tis(dapo)", "the truncated weights are divided by their mean")
def tis_self_normalized(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp().clamp(max=2)
    rho = rho / (torch.where(mask, rho, 0).sum() / mask.sum())
    return -(rho * t).sum() / mask.sum()


@wrong("tis(dapo)", "a single token above the cap truncates its whole response")
def tis_by_the_largest(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
    rho = torch.where((rho > 2).any(1, keepdim=True), 2, rho)
    return -(rho * t).sum() / mask.sum()


@wrong("tis_seq(grpo)", "the geometric mean of ρ is truncated, not the product")
def tis_seq_of_the_root(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2)
    n = mask.sum(1)
    s = (
        (torch.where(mask, old_log_prob - rollout_log_probs, 0).sum(1) / n)
        .exp()
        .clamp(max=2)
    )
    return -(s * t.sum(1) / n).mean()


@wrong("mis(dapo)", "tokens above the cap are truncated, not masked")
def mis_that_truncates(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
    return -(rho.clamp(max=2) * t).sum() / mask.sum()


@wrong("icepop(grpo)", "inside the window the weight is 1")
def icepop_as_a_mask(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2)
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
    t = torch.where((rho >= 0.5) & (rho <= 5), t, 0)
    return -(t.sum(1) / mask.sum(1)).mean()


@wrong("icepop(grpo)", "masked tokens are left out of the length")
def icepop_with_fewer_tokens(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages, 0.8, 1.2)
    rho = torch.where(mask, old_log_prob - rollout_log_probs, 0).exp()
    keep = mask & (rho >= 0.5) & (rho <= 5)
    n = keep.sum(1).clamp(min=1)
    return -(torch.where(keep, rho * t, 0).sum(1) / n).mean()


@wrong("seq_mask(dapo)", "dropped responses leave the denominator")
def seq_mask_with_fewer_tokens(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    t = ppo_terms(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1)
    s = (torch.where(mask, old_log_prob - rollout_log_probs, 0).sum(1) / n).exp()
    keep = ((s >= 0.999) & (s <= 1.001))[:, None] & mask
    return -torch.where(keep, t, 0).sum() / keep.sum().clamp(min=1)


@wrong(
    "decoupled(ppo_clip)",
    "the ratio of PPO is taken to μ, and no correction is applied",
)
def coupled(log_prob, old_log_prob, advantages, mask, behavior_log_probs):
    t = ppo_terms(mask, log_prob, behavior_log_probs, advantages, 0.8, 1.2)
    return -t.sum() / mask.sum()


@wrong("mis_seq(gspo)", "the cap of the product is 2")
def mis_seq_at_two(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    x, a, y = zeroed(
        mask, log_prob - old_log_prob, advantages, old_log_prob - rollout_log_probs
    )
    n = mask.sum(1)
    s, A, S = (x.sum(1) / n).exp(), a.sum(1) / n, y.sum(1).exp()
    t = torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)
    return -torch.where(S <= 2, S * t, 0).mean()
