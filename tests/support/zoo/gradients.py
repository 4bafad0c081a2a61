# SPDX-License-Identifier: Apache-2.0
"""Values that look right, derivatives that are not: a detach too few, too many, or on
the wrong factor.
"""

import torch

from . import Case


def ratio_of_itself(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - log_prob.detach())
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    return -(torch.where(mask, terms, 0.0).sum(1) / mask.sum(1)).mean()


class _Fused(torch.autograd.Function):
    """Gradient and value at once, as kernels compute them; what comes from above is
    forgotten.
    """

    @staticmethod
    def forward(ctx, log_prob, old_log_prob, advantages, mask):
        """Return GRPO's loss, and save its gradient by log_prob."""
        with torch.enable_grad():
            x = log_prob.detach().requires_grad_()
            ratio = torch.exp(x - old_log_prob)
            terms = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            value = -(torch.where(mask, terms, 0.0).sum(1) / mask.sum(1)).mean()
            ctx.save_for_backward(*torch.autograd.grad(value, x))
        return value.detach()

    @staticmethod
    def backward(ctx, above):
        return *ctx.saved_tensors, None, None, None


def fused(log_prob, old_log_prob, advantages, mask):
    return _Fused.apply(log_prob, old_log_prob, advantages, mask)


def detached_negatives(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    ratio = torch.exp(log_prob - old_log_prob).detach()
    negative = torch.min(ratio * advantages, ratio.clamp(min=1 - eps_low) * advantages)
    return -torch.where(advantages > 0, advantages * log_prob, negative)[mask].mean()


def weight_not_detached(log_prob, old_log_prob, advantages, mask, *, eps_high=4.0):
    weight = torch.exp(log_prob - old_log_prob).clamp(max=1 + eps_high)
    return -(weight * advantages * log_prob)[mask].mean()


def objective_returned(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    return torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)[
        mask
    ].mean()


def unsigned_advantage(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with |A| in place of A as a factor."""
    ratio = torch.exp(log_prob - old_log_prob)
    bounded = torch.where(
        advantages > 0, ratio.clamp(max=1 + eps_high), ratio.clamp(min=1 - eps_low)
    )
    return -(bounded * advantages.abs())[mask].mean()


def ratio_twice(log_prob, old_log_prob, advantages, mask):
    ratio = torch.exp(log_prob - old_log_prob)
    # V-trace has already multiplied the advantage
    corrected = advantages * ratio.detach()
    return -torch.where(mask, corrected * ratio, 0.0).sum(-1).mean()


def reward_shaped_with_a_gradient(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss whose advantages have a KL term subtracted that is not
    detached.
    """
    log_ratio = log_prob - old_log_prob
    shaped = advantages - 0.01 * log_ratio  # k1 in the reward, the graph attached
    ratio = log_ratio.exp()
    return -torch.min(ratio * shaped, ratio.clamp(1 - eps_low, 1 + eps_high) * shaped)[
        mask
    ].mean()


def probability_for_log_probability(log_prob, old_log_prob, advantages, mask):
    return -(advantages * log_prob.exp())[mask].sum() / mask.sum()


def straight_through_clip(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio + (ratio.clamp(1 - eps, 1 + eps) - ratio).detach()
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


def weight_instead_of_clip(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's terms, detached, as weights of log π_θ: clipped tokens keep a
    gradient.
    """
    ratio = torch.exp(log_prob - old_log_prob)
    surrogate = torch.min(
        ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    )
    return -(surrogate.detach() * log_prob)[mask].mean()


def clip_in_the_log_domain(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    log_ratio = log_prob - old_log_prob
    low, high = torch.log1p(torch.tensor([-eps, eps], dtype=log_ratio.dtype))
    bounded = torch.min(log_ratio * advantages, log_ratio.clamp(low, high) * advantages)
    return -(torch.where(mask, bounded, 0.0).sum(-1) / mask.sum(-1)).mean()


def anchored_on_the_wrong_policy(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2
):
    """Return UP's loss whose good tokens have the ratio to the old policy, not to
    itself.
    """
    anchored = torch.exp(log_prob - old_log_prob)  # for A > 0 meant to be π/sg(π)
    negative = torch.min(
        anchored * advantages, anchored.clamp(min=1 - eps_low) * advantages
    )
    return -torch.where(advantages > 0, anchored * advantages, negative)[mask].mean()


def negative_branch_anchored(log_prob, old_log_prob, advantages, mask, *, eps_low=0.2):
    """Return UP's loss whose bad tokens too have the ratio to the policy itself, which
    is 1.
    """
    anchored = torch.exp(log_prob - log_prob.detach())
    negative = torch.min(
        anchored * advantages, anchored.clamp(min=1 - eps_low) * advantages
    )
    return -torch.where(advantages > 0, anchored * advantages, negative)[mask].mean()


def silent_entropy_bonus(log_prob, old_log_prob, advantages, mask, *, eps=0.2):
    """Return PPO's loss plus 0.001 times the mean of log π_θ."""
    ratio = torch.exp(log_prob - old_log_prob)
    policy = -torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)[
        mask
    ].mean()
    return policy + 0.001 * log_prob[mask].mean()


def kl_under_no_grad(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, *, eps=0.2, beta=0.04
):
    """Return GRPO's loss whose KL term has no gradient."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    with torch.no_grad():
        d = ref_log_prob - log_prob
        kl = d.exp() - 1 - d
    return -(torch.where(mask, terms - beta * kl, 0.0).sum(-1) / mask.sum(-1)).mean()


def kl_the_other_way(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, *, eps=0.2, beta=0.04
):
    """Return GRPO's loss with k3 of log π_θ - log π_ref, the wrong sign."""
    ratio = torch.exp(log_prob - old_log_prob)
    terms = torch.min(ratio * advantages, ratio.clamp(1 - eps, 1 + eps) * advantages)
    d = log_prob - ref_log_prob
    kl = d.exp() - 1 - d
    return -(torch.where(mask, terms - beta * kl, 0.0).sum(-1) / mask.sum(-1)).mean()


def tie_with_a_detached_clip(
    log_prob, old_log_prob, advantages, mask, *, eps_low=0.2, eps_high=0.28
):
    """Return DAPO's loss with the ratio detached before its clip."""
    ratio = torch.exp(log_prob - old_log_prob)
    # "it is a constant there anyway"
    clipped = ratio.detach().clamp(1 - eps_low, 1 + eps_high)
    return -torch.min(ratio * advantages, clipped * advantages)[mask].mean()


ZOO = [
    Case(
        tie_with_a_detached_clip, "dapo", oracles={"gradient", "on-policy"},
        why="inside the window both sides are equal, and torch.min halves the gradient between them",
    ),
    Case(
        ratio_of_itself, "grpo", oracles={"gradient", "dead-hyperparameter"},
        why="old log-probabilities recomputed with the current weights: r = 1 for ever",
        source="meta-pytorch/torchforge#571",
    ),
    Case(
        detached_negatives, "up_dapo", oracles={"gradient", "on-policy"},
        why="the ratio is detached: negatives have no gradient", source="nikhilbarhate99/PPO-PyTorch#18",
    ),
    Case(
        weight_not_detached, "cispo", oracles={"gradient", "stop-gradient", "on-policy"},
        why="the gradient also flows through the importance weight",
    ),
    Case(objective_returned, "ppo_clip", oracles={"gradient", "on-policy"}, why="J is returned for the loss"),
    Case(unsigned_advantage, "dapo", oracles={"gradient", "on-policy"}, why="|A|: bad answers are reinforced"),
    Case(
        ratio_twice, "is_pg", oracles={"gradient"},
        why="the importance ratio is in the advantage already: weight r²", source="PufferAI/PufferLib#306",
    ),
    Case(
        reward_shaped_with_a_gradient, "dapo", oracles={"gradient", "stop-gradient", "zero-advantage", "on-policy"},
        why="a KL term inside the advantage, differentiated",
    ),
    Case(
        probability_for_log_probability, "reinforce_off_policy", oracles={"gradient", "on-policy"},
        why="A π, not A log π",
    ),
    Case(
        straight_through_clip, "ppo_clip", oracles={"gradient", "stop-gradient"},
        why="values are clipped, gradients go straight through",
    ),
    Case(
        weight_instead_of_clip, "dapo", oracles={"gradient", "stop-gradient"},
        why="sg(min(r A, clip(r) A)) log π never switches a token off",
    ),
    Case(clip_in_the_log_domain, "grpo", oracles={"gradient"}, why="log r in place of r: weight A instead of A r"),
    Case(
        anchored_on_the_wrong_policy, "up_dapo", oracles={"gradient"},
        why="the anchor is π_old: unclipped IS for A > 0",
    ),
    Case(
        negative_branch_anchored, "up_dapo", oracles={"gradient", "dead-hyperparameter"},
        why="negatives too are anchored on sg(π), so that their clip is inert",
    ),
    Case(
        silent_entropy_bonus, "ppo_clip", oracles={"gradient", "zero-advantage", "on-policy"},
        why="an undeclared regulariser with a coefficient of its own", source="GMISWE/tinker-cloud#66",
    ),
    Case(
        kl_under_no_grad, "grpo", {"beta": 0.04}, {"gradient", "dead-hyperparameter", "stop-gradient"},
        "the KL penalty is computed under no_grad", "allenai/open-instruct#530",
    ),
    Case(fused, "grpo", {"eps": 0.2}, {"loss-scale"}, "its backward pass ignores grad_output: a scale has no effect"),
    Case(kl_the_other_way, "grpo", {"beta": 0.04}, {"gradient"}, "k3 with policy and reference exchanged"),
]  # fmt: skip
