# SPDX-License-Identifier: Apache-2.0
"""Advantage functions of tokens and turns as people write them: WRONG with the id of the
fault, and RIGHT, each with the estimator that it is meant as.
"""

import numpy as np
import torch


# ---- right ---------------------------------------------------------------------------
def gae_of_lists(rewards, values, response_mask, gamma=0.99, lam=0.95):
    """Return GAE's advantages by plain Python over the trained tokens of each response."""
    out = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        where = response_mask[i].bool().nonzero()[:, 0].tolist()
        adv, next_value = 0.0, 0.0
        for t in reversed(where):
            delta = rewards[i, t] + gamma * next_value - values[i, t]
            adv = delta + gamma * lam * adv
            next_value = values[i, t]
            out[i, t] = adv
    return out


def gae_with_carry(token_level_rewards, values, loss_mask, gamma, lambd):
    """Return GAE's advantages and returns as verl computes them: an untrained token
    passes on what came from behind it.
    """
    next_value = last = 0.0
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        m = loss_mask[:, t]
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        candidate = delta + gamma * lambd * last
        next_value = values[:, t] * m + (1 - m) * next_value
        last = candidate * m + (1 - m) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], 1)
    return advantages * loss_mask, advantages + values


def gae_truncated(rewards, values, mask, bootstrap_value, gamma=1.0, lam=0.95):
    """Return GAE's advantages, with the critic's value behind a response that was cut
    off.
    """
    out = np.zeros(rewards.shape)
    for i in range(len(out)):
        steps = np.flatnonzero(mask[i])
        v_next, a_next = float(bootstrap_value[i]), 0.0
        for t in steps[::-1]:
            a_next = (
                float(rewards[i, t])
                + gamma * v_next
                - float(values[i, t])
                + gamma * lam * a_next
            )
            v_next = float(values[i, t])
            out[i, t] = a_next
    return out


def gae_fixed(rewards, values, mask):
    """γ and λ are written into it."""
    return gae_of_lists(rewards, values, mask, 0.97, 0.9)


def gae_in_float32(rewards, values, mask, gamma, lam):
    return gae_of_lists(rewards.float(), values.float(), mask, gamma, lam)


def whitened_gae(rewards, values, mask, gamma, lam):
    adv = gae_of_lists(rewards, values, mask, gamma, lam)
    x = adv[mask]
    return torch.where(mask, (adv - x.mean()) / (x.var() + 1e-8).sqrt(), 0)


def to_go(rewards, mask):
    """The reward to go, by a sum from the back."""
    return (rewards * mask).flip(1).cumsum(1).flip(1) * mask


def returns_by_matrix(step_rewards, step_mask, discount):
    """Return discounted returns of the trained steps, by a matrix of powers of the
    discount over their ranks.
    """
    rank = step_mask.long().cumsum(1)
    distance = rank[:, None, :] - rank[:, :, None]
    power = torch.where(distance >= 0, float(discount) ** distance.clamp(min=0), 0.0)
    power = power.to(step_rewards.dtype) * step_mask[:, None, :]
    return (power @ step_rewards[..., None])[..., 0] * step_mask


def turns_then_discount(turn_rewards, turn_mask, uid, gamma):
    """Normalize the rewards over all turns of a prompt, then discount them."""
    adv = torch.zeros_like(turn_rewards)
    for one in sorted(set(map(str, uid))):
        rows = torch.tensor([str(u) == one for u in uid])[:, None] & turn_mask
        v = turn_rewards[rows]
        if len(v) > 1:
            adv[rows] = (v - v.mean()) / (v.std() + 1e-6)
    return returns_by_matrix(adv, turn_mask, gamma)


def turns_of_one_number(rewards, mask, group, gamma):
    """Return returns of rewards that are normalized over the turns with one column,
    prompt by prompt; a single one gives 0.
    """
    adv = torch.zeros_like(rewards)
    for g in group.unique():
        for k in range(rewards.shape[1]):
            rows = (group == g) & mask[:, k]
            v = rewards[rows, k]
            if len(v) > 1:
                adv[rows, k] = (v - v.mean()) / (v.std() + 1e-6)
    return returns_by_matrix(adv, mask, gamma)


def _steps(returns, mask, group, state):
    """Return the returns normalized over the slots of one prompt that share a state; 0
    for a slot without a peer.
    """
    out = torch.zeros_like(returns)
    for g in group.unique():
        for s in state.unique():
            which = mask & (state == s) & (group == g)[:, None]
            v = returns[which]
            if len(v) > 1:
                out[which] = (v - v.mean()) / (v.std() + 1e-6)
    return out


def _responses(rewards, mask, group):
    """Return the sums of rewards normalized over the responses of each prompt, [B]; 0
    for a response without a peer.
    """
    total = (rewards * mask).sum(1)
    out = torch.zeros_like(total)
    for g in group.unique():
        rows = (group == g) & mask.any(1)
        v = total[rows]
        if len(v) > 1:
            out[rows] = (v - v.mean()) / (v.std() + 1e-6)
    return out


def group_in_group(rewards, mask, group, anchor_obs, gamma, step_advantage_w):
    returns = returns_by_matrix(rewards, mask, gamma)
    step = _steps(returns, mask, group, anchor_obs)
    return (_responses(rewards, mask, group)[:, None] + step_advantage_w * step) * mask


def teacher_returns(student_logps, teacher_logps, mask, gamma):
    r = torch.where(mask, teacher_logps - student_logps, 0)
    return returns_by_matrix(r, mask, gamma)


def teacher_advantage(log_probs, teacher_log_probs, advantages, mask, kl_coef=1.0):
    return torch.where(mask, advantages - kl_coef * (log_probs - teacher_log_probs), 0)


def teacher_advantage_alone(log_probs, teacher_log_probs, mask):
    return (teacher_log_probs - log_probs) * mask


RIGHT = [
    (gae_of_lists, "gae", {}),
    (gae_with_carry, "gae", {}),
    (gae_truncated, "gae", {}),
    (gae_fixed, "gae", {}),
    (gae_fixed, "gae", {"gamma": 0.97, "lam": 0.9}),
    (gae_in_float32, "gae", {}),
    (whitened_gae, "gae_whitened", {}),
    (to_go, "discounted_returns", {}),
    (returns_by_matrix, "discounted_returns", {}),
    (turns_then_discount, "turns_normalized_discounted", {}),
    (turns_of_one_number, "turn_index_normalized_discounted", {}),
    (group_in_group, "gigpo", {}),
    (teacher_returns, "minillm", {}),
    (teacher_advantage, "distillation", {}),
    (teacher_advantage_alone, "distillation", {}),
]


# ---- wrong ---------------------------------------------------------------------------
def _gae(rewards, values, mask, gamma, lam, next_value=0.0, last=0.0, **change):
    """Return GAE's advantages by a loop over every slot, with one thing changed.

    change: moved: what is applied to the rewards first. on_value, on_sum: other factors
    of the next value, and of the sum. no_value: no value is subtracted. through:
    untrained slots count as steps. reset: they end the sum.
    """
    rewards = change.get("moved", lambda r: r)(rewards)
    out = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + change.get("on_value", gamma) * next_value
        if not change.get("no_value"):
            delta = delta - values[:, t]
        now = delta + change.get("on_sum", gamma * lam) * last
        out[:, t] = now
        if change.get("through"):
            last, next_value = now, values[:, t]
        else:
            m = mask[:, t]
            last = torch.where(m, now, last if not change.get("reset") else 0.0)
            next_value = torch.where(
                m, values[:, t], next_value if not change.get("reset") else 0.0
            )
    return torch.where(mask, out, 0)


def runs_through_tools(rewards, values, mask, gamma, lam):
    return _gae(rewards * mask, values * mask, mask, gamma, lam, through=True)


def reads_values_of_tools(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, through=True)


def tools_end_the_sum(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, reset=True)


def no_lambda(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, on_sum=gamma)


def no_gamma_in_delta(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, on_value=1.0)


def no_gamma_in_sum(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, on_sum=lam)


def no_value_subtracted(rewards, values, mask, gamma, lam):
    return _gae(rewards, values, mask, gamma, lam, no_value=True)


def reward_late(rewards, values, mask, gamma, lam):
    def late(r):
        return torch.nn.functional.pad(r[:, 1:], (0, 1))

    return _gae(rewards, values, mask, gamma, lam, moved=late)


def returns_instead(rewards, values, mask, gamma, lam):
    return gae_of_lists(rewards, values, mask, gamma, lam) + values * mask


def truncation_ignored(rewards, values, mask, bootstrap, gamma, lam):
    return gae_of_lists(rewards, values, mask, gamma, lam)


def whitened_though_raw(rewards, values, mask, gamma, lam):
    return whitened_gae(rewards, values, mask, gamma, lam)


def whitened_with_padding(rewards, values, mask, gamma, lam):
    adv = gae_of_lists(rewards, values, mask, gamma, lam)
    return (adv - adv.mean()) / (adv.std() + 1e-8) * mask


def whitened_by_row(rewards, values, mask, gamma, lam):
    """Return GAE's advantages whitened within each response; 0 where it has one token."""
    adv = gae_of_lists(rewards, values, mask, gamma, lam)
    out = torch.zeros_like(adv)
    for i in range(len(adv)):
        v = adv[i][mask[i]]
        if len(v) > 1:
            out[i][mask[i]] = (v - v.mean()) / (v.var() + 1e-8).sqrt()
    return out


def returns_undiscounted(rewards, mask, gamma):
    return to_go(rewards, mask)


def returns_reset(token_level_rewards, response_mask, gamma):
    """Return the returns of verl's REINFORCE++ before whitening: an untrained slot ends
    the sum.
    """
    out = torch.zeros_like(token_level_rewards)
    running = 0
    for t in reversed(range(out.shape[1])):
        running = token_level_rewards[:, t] + gamma * running
        out[:, t] = running
        running = running * response_mask[:, t]
    return out * response_mask


def returns_from_front(rewards, mask, gamma):
    """Return returns that are summed from the first token on, where they must be from
    the last one.
    """
    out = torch.zeros_like(rewards)
    total = torch.zeros(len(rewards), dtype=rewards.dtype)
    for t in range(rewards.shape[1]):
        total = torch.where(mask[:, t], rewards[:, t] + gamma * total, total)
        out[:, t] = total
    return out * mask


def discounted_then_turns(turn_rewards, turn_mask, group, gamma):
    """Return discounted returns, normalized over all turns of a prompt: the reverse of
    the right order.
    """
    returns = returns_by_matrix(turn_rewards, turn_mask, gamma)
    adv = torch.zeros_like(returns)
    for g in group.unique():
        rows = (group == g)[:, None] & turn_mask
        v = returns[rows]
        if len(v) > 1:
            adv[rows] = (v - v.mean()) / (v.std() + 1e-6)
    return adv


def turns_over_batch(rewards, mask, group, gamma):
    v = rewards[mask]
    adv = torch.where(mask, (rewards - v.mean()) / (v.std() + 1e-6), 0)
    return returns_by_matrix(adv, mask, gamma)


def turns_not_discounted(rewards, mask, group, gamma):
    return turns_then_discount(rewards, mask, group.tolist(), 0.0)


def steps_across_prompts(rewards, mask, group, state, gamma, omega):
    step = _steps(
        returns_by_matrix(rewards, mask, gamma), mask, torch.zeros_like(group), state
    )
    return (_responses(rewards, mask, group)[:, None] + omega * step) * mask


def steps_of_rewards(rewards, mask, group, state, gamma, omega):
    step = _steps(rewards, mask, group, state)
    return (_responses(rewards, mask, group)[:, None] + omega * step) * mask


def weight_left_out(rewards, mask, group, state, gamma, omega):
    return group_in_group(rewards, mask, group, state, gamma, 1.0)


def teacher_backwards(student_logps, teacher_logps, mask, gamma):
    return teacher_returns(teacher_logps, student_logps, mask, gamma)


def teacher_by_position(student_logps, teacher_logps, mask, gamma):
    r = torch.where(mask, teacher_logps - student_logps, 0)
    weight = gamma ** torch.arange(r.shape[1], dtype=r.dtype)
    return (r * weight).flip(1).cumsum(1).flip(1) * mask


def halved(rewards, values, mask, gamma, lam):
    return gae_of_lists(rewards, values, mask, gamma, lam) / 2


def opo_without_lengths(rewards, mask, group):
    R = (rewards * mask).sum(1)
    out = torch.stack([R[i] - R[group == group[i]].mean() for i in range(len(R))])
    return out[:, None] * mask


def token_baseline_without_sum(rewards, old_log_probs, sum_pi_squared, mask, group):
    """Return the optimal token baseline's advantages with weights that are not summed
    from the first token on.
    """
    w = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    returns = (rewards * mask).flip(1).cumsum(1).flip(1)
    out = torch.zeros_like(returns)
    for g in group.unique():
        for k in range(mask.shape[1]):
            cells = (group == g) & mask[:, k]
            G = returns[cells, k]
            alone = len(G) < 2
            out[cells, k] = G - (0 if alone else G @ w[cells, k] / w[cells, k].sum())
    return out


WRONG = [
    (opo_without_lengths, "opo", "baseline-by-length-missing"),
    (opo_without_lengths, "gpg", "gpg-factor-missing"),
    (token_baseline_without_sum, "optimal_token_baseline", "weights-not-cumulated"),
    (runs_through_tools, "gae", "untrained-slots-discount"),
    (reads_values_of_tools, "gae", "runs-through-untrained-slots"),
    (tools_end_the_sum, "gae", "untrained-slot-ends-sum"),
    (no_lambda, "gae", "lambda-missing"),
    (no_gamma_in_delta, "gae", "next-value-undiscounted"),
    (no_gamma_in_sum, "gae", "gamma-missing-in-decay"),
    (no_value_subtracted, "gae", "value-not-subtracted"),
    (reward_late, "gae", "reward-one-slot-late"),
    (returns_instead, "gae", "returns-for-advantages"),
    (truncation_ignored, "gae", "bootstrap-missing"),
    (whitened_though_raw, "gae", "advantages-whitened-over-batch"),
    (gae_of_lists, "gae_whitened", "estimator-gae"),
    (whitened_with_padding, "gae_whitened", "whitened-with-padding"),
    (whitened_by_row, "gae_whitened", "whitened-by-response"),
    (returns_undiscounted, "discounted_returns", "gamma-missing"),
    (returns_reset, "discounted_returns", "untrained-slot-ends-sum"),
    (returns_from_front, "discounted_returns", "runs-forward"),
    (discounted_then_turns, "turns_normalized_discounted", "turns-in-other-order"),
    (turns_over_batch, "turns_normalized_discounted", "turns-by-other-group"),
    (turns_not_discounted, "turns_normalized_discounted", "turns-in-other-order"),
    (turns_of_one_number, "turns_normalized_discounted", "turns-by-other-group"),
    (steps_across_prompts, "gigpo", "steps-across-prompts"),
    (steps_of_rewards, "gigpo", "steps-without-returns"),
    (weight_left_out, "gigpo", "step-weight-missing"),
    (teacher_backwards, "minillm", "teacher-sign-flipped"),
    (teacher_by_position, "minillm", "discount-by-position"),
    (halved, "gae", "numbers-scaled"),
]
