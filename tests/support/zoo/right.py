# SPDX-License-Identifier: Apache-2.0
"""Correct losses in the styles in which people write them. A checker that rejects one
of these is wrong.
"""

import math

import torch

from . import Case


def verl_style(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28, c=3.0
):
    """Return DAPO's loss in verl's style: losses rather than objectives, log r clamped
    at 20, a dual clip by min and max, 1e-8 in the denominator.
    """
    lp, old, A = (
        torch.where(mask, x, 0.0) for x in (log_prob, old_log_prob, advantages)
    )
    negative_approx_kl = torch.clamp(lp - old, min=-20.0, max=20.0)
    ratio = torch.exp(negative_approx_kl)
    pg_losses1 = -A * ratio
    pg_losses2 = -A * torch.clamp(ratio, 1 - eps_low, 1 + eps_high)
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    clip_pg_losses2 = torch.min(-A * c, clip_pg_losses1)
    pg_losses = torch.where(A < 0, clip_pg_losses2, clip_pg_losses1)
    return (pg_losses * mask).sum() / (mask.sum() + 1e-8)


def verl_style_sequence_mean(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss in verl's style, with 1e-8 added to each length."""
    lp, old, A = (x.masked_fill(~mask, 0) for x in (log_prob, old_log_prob, advantages))
    ratio = (lp - old).clamp(-20, 20).exp()
    pg_losses = torch.maximum(-A * ratio, -A * ratio.clamp(1 - eps, 1 + eps))
    return ((pg_losses * mask).sum(dim=-1) / (mask.sum(dim=-1) + 1e-8)).mean()


def trl_style(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss in TRL's style: coef_1 and coef_2, no clamp of the exponent."""
    completion_mask = mask.to(log_prob.dtype)
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - eps, 1 + eps)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    return (
        (per_token_loss * completion_mask).sum(-1)
        / completion_mask.sum(-1).clamp(min=1.0)
    ).mean()


def anchored(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP-DAPO's loss with π/sg(π) for positives; their value is A, not A log π."""
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    positive = torch.exp(lp - lp.detach()) * A
    ratio = torch.exp(torch.where(A > 0, torch.zeros_like(lp), lp - old))
    negative = torch.max(ratio, torch.full_like(ratio, 1 - eps_low)) * A
    return -torch.where(A > 0, positive, torch.min(ratio * A, negative)).mean()


def log_form(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, c=None):
    """Return UP-DAPO's loss: A log π for positives, PPO's terms for negatives alone, by
    boolean indexing.
    """
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    up = A > 0
    ratio = (lp[~up] - old[~up]).exp()
    if c is not None:
        ratio = ratio.clamp(max=c)
    negative = torch.min(ratio * A[~up], ratio.clamp(min=1 - eps_low) * A[~up])
    return -((A[up] * lp[up]).sum() + negative.sum()) / mask.sum()


def python_loops(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss token by token, as in a lecture."""
    total = 0.0
    for i in range(mask.shape[0]):
        response = []
        for t in range(mask.shape[1]):
            if not mask[i, t]:
                continue
            A = advantages[i, t]
            ratio = torch.exp(log_prob[i, t] - old_log_prob[i, t])
            if (A > 0 and ratio > 1 + eps) or (A < 0 and ratio < 1 - eps):
                ratio = ratio.detach().clamp(1 - eps, 1 + eps)
            response.append(ratio * A)
        total = total + sum(response) / len(response)
    return -total / mask.shape[0]


def packed(log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4):
    """Return GSPO's loss with padding removed and responses laid end to end, by
    cu_seqlens and index_add.
    """
    lengths = mask.sum(-1)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    segment = torch.repeat_interleave(
        torch.arange(len(lengths), device=lp.device), lengths
    )
    log_s = lp.new_zeros(len(lengths)).index_add(0, segment, lp - old) / lengths
    s, A = log_s.exp(), A[cu_seqlens[:-1]]
    return -torch.min(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).sum() / len(
        lengths
    )


def gspo_token(
    log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4, eps_high=4e-4
):
    """Return GSPO-token's loss: sg(s) π/sg(π) for each token has another value than
    GSPO's terms and the same gradient.
    """
    lengths = mask.sum(-1, keepdim=True)
    log_ratio = torch.where(mask, log_prob - old_log_prob, 0.0)
    lp, A = torch.where(mask, log_prob, 0.0), torch.where(mask, advantages, 0.0)
    s = torch.exp(
        lp - lp.detach() + (log_ratio.sum(-1, keepdim=True) / lengths).detach()
    )
    loss = torch.maximum(-A * s, -A * s.clamp(1 - eps_low, 1 + eps_high))
    return (torch.where(mask, loss, 0.0).sum(-1) / lengths[:, 0]).mean()


def einsum_style(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    """Return CISPO's loss with a weight under no_grad, and one einsum for product, mask
    and sum.
    """
    lp, old, A = (
        x.masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob, advantages)
    )
    with torch.no_grad():
        weight = (lp - old).exp().clamp(max=1 + eps_high)
    return -torch.einsum("bt,bt,bt,bt->", weight, A, lp, mask.to(lp.dtype)) / mask.sum()


def masked_select_style(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss of flattened tokens, piecewise by multiplication with a
    detached gate.
    """

    def select(x):
        return torch.masked_select(x, mask)

    ratio, A = select(log_prob).sub(select(old_log_prob)).exp(), select(advantages)
    gate = torch.where(A > 0, ratio <= 1 + eps_high, ratio >= 1 - eps_low).to(
        ratio.dtype
    )
    return -torch.dot(gate * A, ratio) / A.numel()


def nan_to_num_style(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return Dr. GRPO's loss of inputs that are cleaned and multiplied by a float mask."""
    keep = mask.to(log_prob.dtype)
    lp, old, A = (
        torch.where(mask, x, 0.0).nan_to_num()
        for x in (log_prob, old_log_prob, advantages)
    )
    ratio = ((lp - old) * keep).exp()
    objective = torch.minimum(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A) * keep
    return objective.sum(dim=1).mean().neg()


def detached_score_function(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss as its gradient written down: sg(weight) log π, with another
    value.
    """
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    r = (lp.detach() - old).exp()
    clipped = ((A > 0) & (r > 1 + eps)) | ((A < 0) & (r < 1 - eps))
    weight = torch.where(clipped, torch.zeros_like(r), r * A)
    return -(weight * lp).mean()


def centered_value(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss of min((r - 1) A, ...), whose value is 0 on-policy: another
    constant, the same gradient.
    """
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    gain = torch.expm1(lp - old)
    return -torch.minimum(gain * A, gain.clamp(-eps, eps) * A).mean()


def sign_trick(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28):
    """Return DAPO's loss as r A less the excess of r over the bound, as a hinge."""
    lp, old, A = log_prob[mask], old_log_prob[mask], advantages[mask]
    r = torch.exp(lp - old)
    excess = torch.where(
        A >= 0, torch.relu(r - (1 + eps_high)), -torch.relu((1 - eps_low) - r)
    )
    return ((excess - r) * A).sum() / mask.sum()


def log_domain_bounds(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with log r clipped at the logarithms of the bounds, then one
    exp.
    """
    log_r = (log_prob - old_log_prob)[mask]
    A = advantages[mask]
    bounded = torch.where(
        A > 0,
        log_r.clamp(max=math.log1p(eps_high)),
        log_r.clamp(min=math.log1p(-eps_low)),
    )
    return -(bounded.exp() * A).mean()


def loop_over_groups(
    log_prob, old_log_prob, advantages, mask, group, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with Eq. 14's denominator: the tokens of one prompt, then the
    mean over prompts.
    """
    losses = []
    for g in torch.unique(group):
        rows = group == g
        inside = mask[rows]
        ratio, A = (
            torch.exp(log_prob[rows][inside] - old_log_prob[rows][inside]),
            advantages[rows][inside],
        )
        losses.append(
            -torch.min(ratio * A, ratio.clamp(1 - eps_low, 1 + eps_high) * A).mean()
        )
    return torch.stack(losses).mean()


def with_a_reference(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, *, eps=0.2, beta=0.04
):
    """Return GRPO's loss with k3 through expm1."""
    lp, old, A, ref = (
        x.masked_fill(~mask, 0.0)
        for x in (log_prob, old_log_prob, advantages, ref_log_prob)
    )
    ratio = (lp - old).exp()
    per_token = torch.min(ratio * A, ratio.clamp(1 - eps, 1 + eps) * A)
    per_token = per_token - beta * (torch.expm1(ref - lp) - (ref - lp))
    return -(per_token.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)).mean()


def geometric_by_logs(log_prob, old_log_prob, advantages, mask, *, eps=0.4):
    """Return GMPO's loss: a clip with the sign of A, and the geometric mean by prod and
    a root.
    """
    sign = torch.where(mask, advantages, 0.0).sum(-1, keepdim=True).sign()
    signed = sign * torch.where(mask, log_prob - old_log_prob, 0.0)
    clipped = torch.minimum(signed, signed.clamp(-eps, eps)) * sign
    length = mask.sum(-1).to(log_prob.dtype)
    s = torch.where(mask, clipped, 0.0).exp().prod(-1) ** (1 / length)
    A = torch.where(mask, advantages, 0.0).sum(-1) / length
    return -(s * A).mean()


def soft_gate(log_prob, old_log_prob, advantages, mask, *, tau_pos=1.0, tau_neg=1.05):
    """Return SAPO's loss with σ written as tanh: σ(x) = (1 + tanh(x/2))/2, whose
    constant only moves the value.

    torch.where on two Python numbers makes float32: 1.05 is off by 2e-8, as in many
    trainers, and nobody is harmed.
    """
    x = torch.where(mask, log_prob - old_log_prob, 0.0).exp() - 1
    A = torch.where(mask, advantages, 0.0)
    tau = torch.where(A > 0, tau_pos, tau_neg)
    terms = 2 / tau * torch.tanh(tau * x / 2) * A
    return -(terms.sum(-1) / mask.sum(-1)).mean()


def one_response_at_a_time(log_prob, old_log_prob, advantages, mask, *, eps_low=3e-4):
    """Return UP-GSPO's loss by a loop over responses, with .item() on each advantage."""
    losses = []
    for lp, old, A, inside in zip(
        log_prob, old_log_prob, advantages, mask, strict=True
    ):
        lp, old, A = lp[inside], old[inside], A[inside][0].item()
        if A > 0:
            losses.append(-A * lp.mean())
        else:
            s = (lp - old).mean().exp()
            losses.append(-A * s.clamp(min=1 - eps_low))
    return sum(losses) / len(losses)


def masks_of_signs(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP-DAPO's loss with one float mask for each sign of A."""
    pos, neg = (((advantages > 0) == side) & mask for side in (True, False))
    ratio = torch.exp((log_prob - old_log_prob) * neg)
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -((pos * advantages * log_prob).sum() + (neg * negative).sum()) / mask.sum()


def rows_under_vmap(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss, each row under vmap, the clip as a hinge."""

    def row(lp, old, A, inside):
        """Return the sum of one row's terms."""
        r = torch.exp(torch.where(inside, lp - old, 0.0))
        over = torch.where(
            A >= 0, (r - (1 + eps_high)).relu(), -((1 - eps_low) - r).relu()
        )
        return torch.where(inside, (r - over) * A, 0.0).sum()

    return -torch.vmap(row)(log_prob, old_log_prob, advantages, mask).sum() / mask.sum()


def multiplied_by_the_mask(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return GRPO's loss as the textbook has it: multiplied by the mask, which keeps a
    NaN of a masked slot (OpenRLHF/OpenRLHF#1240).
    """
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -((terms * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def masked_after_exp(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss masked after exp: its value is clean, the gradient of a NaN in
    a masked slot is not (NVIDIA-NeMo/RL#4120).
    """
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    # the value is clean, exp's gradient is 0 * NaN
    return -torch.where(mask, terms, 0.0).sum() / mask.sum()


ZOO = [
    Case(verl_style, "dapo", {"c": 3.0}),
    Case(verl_style_sequence_mean, "grpo"),
    Case(trl_style, "grpo"),
    Case(anchored, "up_dapo"),
    Case(log_form, "up_dapo"),
    Case(log_form, "up_dapo", {"c": 3.0}),
    Case(python_loops, "grpo"),
    Case(packed, "gspo"),
    Case(gspo_token, "gspo"),
    Case(einsum_style, "cispo"),
    Case(masked_select_style, "dapo"),
    Case(masked_select_style, "dapo", {"eps_low": 0.1, "eps_high": 0.5}),
    Case(nan_to_num_style, "dr_grpo"),
    Case(detached_score_function, "ppo_clip"),
    Case(centered_value, "ppo_clip"),
    Case(sign_trick, "dapo"),
    Case(log_domain_bounds, "dapo"),
    Case(loop_over_groups, "dapo"),
    Case(with_a_reference, "grpo", {"beta": 0.04}),
    Case(geometric_by_logs, "gmpo"),
    Case(soft_gate, "sapo"),
    Case(one_response_at_a_time, "up_gspo"),
    Case(rows_under_vmap, "dapo"),
    Case(masks_of_signs, "up_dapo", leaks=True),
    Case(multiplied_by_the_mask, "grpo", leaks=True),
    Case(masked_after_exp, "dapo", leaks=True),
]
