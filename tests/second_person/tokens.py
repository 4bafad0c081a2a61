# SPDX-License-Identifier: Apache-2.0
"""Advantages of tokens and turns: twenty wrong functions, ten right ones."""

from collections import defaultdict

import numpy as np
import torch

from tests.second_person.case import right, wrong


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def masked_whiten(x, mask, shift_mean=True):
    mean = masked_mean(x, mask)
    var = masked_mean((x - mean) ** 2, mask) * mask.sum() / (mask.sum() - 1)
    white = (x - mean) * torch.rsqrt(var + 1e-8)
    return white if shift_mean else white + mean


def skip_scan(rewards, values, mask, gamma, lam, tail=0.0):
    """Return GAE's advantages over the trained tokens, by a loop over columns; 0 in
    masked slots.
    """
    last = torch.zeros_like(values[:, 0])
    next_value = torch.zeros_like(values[:, 0]) + tail
    out = torch.zeros_like(values)
    for t in range(values.shape[1] - 1, -1, -1):
        m = mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(m, delta + gamma * lam * last, last)
        next_value = torch.where(m, values[:, t], next_value)
        out[:, t] = torch.where(m, last, torch.zeros_like(last))
    return out


def returns_to_go(x, mask, gamma):
    """Return discounted returns over the trained tokens of each response; 0 in masked
    slots.
    """
    run, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in reversed(range(x.shape[1])):
        m = mask[:, t].bool()
        run = torch.where(m, x[:, t] + gamma * run, run)
        out[:, t] = torch.where(m, run, torch.zeros_like(run))
    return out


# ---- wrong ---------------------------------------------------------------------------
@wrong(
    "gae",
    "the value of the slot to the right is read, padding and tools included",
    "next value|untrained|padding|mask",
)
def gae_of_cleanrl(rewards, values, mask, gamma, lam):
    lastgaelam, advantages_reversed = 0, []
    gen_len = rewards.shape[1]
    for t in reversed(range(gen_len)):
        nextvalues = values[:, t + 1] if t < gen_len - 1 else 0.0
        delta = rewards[:, t] + gamma * nextvalues - values[:, t]
        lastgaelam = delta + gamma * lam * lastgaelam
        advantages_reversed.append(lastgaelam)
    return torch.stack(advantages_reversed[::-1], dim=1) * mask


@wrong("gae", "the trace decays by lambda alone, without gamma", "λ|lam")
def gae_trace_without_gamma(rewards, values, response_mask, gamma=1.0, lam=0.95):
    last, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    out = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        m = response_mask[:, t].bool()
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = torch.where(m, delta + lam * last, last)
        next_value = torch.where(m, values[:, t], next_value)
        out[:, t] = last * m
    return out


@wrong("gae", "the next value is not discounted", "next value|γ|gamma")
def gae_delta_without_gamma(rewards, values, response_mask, gamma=1.0, lam=0.95):
    last, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    out = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        m = response_mask[:, t].bool()
        delta = rewards[:, t] + next_value - values[:, t]
        last = torch.where(m, delta + gamma * lam * last, last)
        next_value = torch.where(m, values[:, t], next_value)
        out[:, t] = last * m
    return out


@wrong("gae", "it returns (returns, advantages), in this order", "return|value")
def gae_returns_first(token_level_rewards, values, response_mask, gamma, lam):
    adv = skip_scan(token_level_rewards, values, response_mask, gamma, lam)
    returns = adv + values
    return returns, adv


@wrong(
    "gae",
    "the discount counts from the first token, and is not divided out",
    "position|absolute|first|count",
)
def gae_by_cumulative_sum(rewards, values, mask, gamma=0.99, lam=0.95):
    order = mask.bool().int().argsort(dim=1, descending=True, stable=True)
    count = mask.bool().sum(1, keepdim=True)
    at = torch.arange(mask.shape[1])[None]
    live = at < count
    r, v = rewards.gather(1, order) * live, values.gather(1, order) * live
    after = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    delta = (r + gamma * after - v) * live
    decay = (gamma * lam) ** at.to(r.dtype)
    sums = (delta * decay).flip(1).cumsum(1).flip(1) * live
    return torch.zeros_like(r).scatter(1, order, sums)


@wrong(
    "gae_whitened",
    "the mean and the deviation are over all slots, padding included",
    "padding|untrained|all slots|mask",
)
def gae_whitened_over_padding(rewards, values, response_mask, gamma=1.0, lam=1.0):
    adv = skip_scan(rewards, values, response_mask, gamma, lam)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return adv * response_mask


@wrong(
    "gae_whitened",
    "each response is whitened by itself",
    "response|row|itself|alone",
)
def gae_whitened_by_row(rewards, values, response_mask, gamma=1.0, lam=1.0):
    adv = skip_scan(rewards, values, response_mask, gamma, lam)
    m = response_mask.to(adv.dtype)
    n = m.sum(1, keepdim=True).clamp(min=1)
    mean = (adv * m).sum(1, keepdim=True) / n
    var = (((adv - mean) ** 2) * m).sum(1, keepdim=True) / n
    return (adv - mean) * torch.rsqrt(var + 1e-8) * m


@wrong("gae_whitened", "the mean is kept", "mean")
def gae_whitened_keeps_mean(rewards, values, response_mask, gamma, lam):
    adv = skip_scan(rewards, values, response_mask, gamma, lam)
    m = response_mask.to(adv.dtype)
    return masked_whiten(adv, m, shift_mean=False) * m


@wrong("gae", "the value behind a cut response is not discounted", "bootstrap|γ|gamma")
def gae_bootstrap_undiscounted(rewards, values, mask, bootstrap, gamma, lam):
    last = torch.zeros_like(bootstrap)
    out = torch.zeros_like(values)
    after, factor = bootstrap, torch.ones_like(bootstrap)
    for t in reversed(range(values.shape[1])):
        m = mask[:, t].bool()
        delta = rewards[:, t] + factor * after - values[:, t]
        last = torch.where(m, delta + gamma * lam * last, last)
        after = torch.where(m, values[:, t], after)
        factor = torch.where(m, torch.full_like(factor, gamma), factor)
        out[:, t] = last * m
    return out


@wrong(
    "gae",
    "the value behind a response is put in the last column, not behind its last token",
    "bootstrap|last|behind",
)
def gae_bootstrap_in_last_column(rewards, values, mask, next_value, gamma, lam):
    padded = torch.cat([values * mask, next_value[:, None]], 1)
    out, last = torch.zeros_like(values), torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        m = mask[:, t].bool()
        ahead = [padded[:, -1] if t + 1 == values.shape[1] else padded[:, t + 1]]
        delta = rewards[:, t] + gamma * ahead[0] - values[:, t]
        last = torch.where(m, delta + gamma * lam * last, torch.zeros_like(last))
        out[:, t] = last
    return out


@wrong(
    "discounted_returns",
    "a tool's tokens cost a factor gamma each",
    "untrained|tool|decay",
)
def returns_decay_over_tools(rewards, response_mask, gamma):
    run, out = torch.zeros_like(rewards[:, 0]), []
    for t in reversed(range(rewards.shape[1])):
        run = rewards[:, t] * response_mask[:, t] + gamma * run
        out.append(run)
    return torch.stack(out[::-1], 1) * response_mask


@wrong(
    "discounted_returns",
    "a token's own reward is left out of its return",
    "own reward|next|late|shift|itself",
)
def returns_from_next_slot(rewards, loss_mask, gamma):
    out = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        at = torch.nonzero(loss_mask[i]).flatten().tolist()
        run = 0.0
        for t in reversed(at):
            out[i, t] = run
            run = rewards[i, t] + gamma * run
            if t != at[-1]:
                out[i, t] = gamma * out[i, t]
        if at:
            out[i, at[-1]] = 0.0
    return out


@wrong(
    "turns_normalized_discounted",
    "rewards are normalized over the batch, not over the turns of the prompt",
    "batch|prompt|group",
)
def turns_normalized_over_batch(turn_rewards, turn_mask, group, gamma=0.95):
    m = turn_mask.bool()
    x = turn_rewards[m]
    norm = torch.zeros_like(turn_rewards)
    norm[m] = (x - x.mean()) / (x.std() + 1e-6)
    return returns_to_go(norm, m, gamma)


@wrong(
    "turns_discounted_normalized",
    "it normalizes first and discounts then",
    "order|discount|first",
)
def turns_in_the_other_order(turn_rewards, turn_mask, index, gamma=0.95):
    m = turn_mask.bool()
    norm = torch.zeros_like(turn_rewards)
    for g in torch.as_tensor(index).unique():
        rows = m & (torch.as_tensor(index) == g)[:, None]
        x = turn_rewards[rows]
        if len(x) > 1:
            norm[rows] = (x - x.mean()) / (x.std() + 1e-6)
    return returns_to_go(norm, m, gamma)


@wrong(
    "turn_index_normalized_discounted",
    "a response without a k-th turn counts as a reward of 0 there",
    "without|missing|absent|zero|0|untrained",
)
def turns_missing_count_as_zero(turn_rewards, turn_mask, uid, gamma=0.9):
    uid = torch.as_tensor(uid)
    x = turn_rewards * turn_mask
    norm = torch.zeros_like(x)
    for g in uid.unique():
        rows = uid == g
        if rows.sum() > 1:
            std = x[rows].std(0, keepdim=True)
            norm[rows] = (x[rows] - x[rows].mean(0, keepdim=True)) / (std + 1e-6)
    return returns_to_go(norm * turn_mask, turn_mask, gamma)


@wrong(
    "step_group_norm",
    "equal states of other prompts are in one group",
    "prompt|state",
)
def steps_by_state_alone(step_rewards, step_mask, uid, anchor_obs, gamma=0.95):
    m = step_mask.bool()
    G = returns_to_go(step_rewards, m, gamma)
    buckets = defaultdict(list)
    for i, t in m.nonzero().tolist():
        buckets[int(anchor_obs[i, t])].append((i, t))
    out = torch.zeros_like(G)
    for cells in buckets.values():
        x = torch.stack([G[c] for c in cells])
        if len(x) > 1:
            scaled = (x - x.mean()) / (x.std() + 1e-6)
            for c, a in zip(cells, scaled, strict=True):
                out[c] = a
    return out


def _steps(G, m, uid, state):
    out = torch.zeros_like(G)
    buckets = defaultdict(list)
    for i, t in m.nonzero().tolist():
        buckets[int(uid[i]), int(state[i, t])].append((i, t))
    for cells in buckets.values():
        x = torch.stack([G[c] for c in cells])
        if len(x) > 1:
            for c, a in zip(cells, (x - x.mean()) / (x.std() + 1e-6), strict=True):
                out[c] = a
    return out


def _episodes(rewards, m, uid):
    score = (rewards * m).sum(1)
    out = torch.zeros_like(score)
    for g in sorted({int(u) for u in uid}):
        rows = torch.tensor([i for i, u in enumerate(uid) if int(u) == g])
        if len(rows) > 1:
            x = score[rows]
            out[rows] = (x - x.mean()) / (x.std() + 1e-6)
    return out


@wrong("gigpo", "omega weighs both parts", "ω|omega|episode|weigh")
def gigpo_omega_on_both(step_rewards, step_mask, uid, anchor_obs, gamma, omega):
    m = step_mask.bool()
    steps = _steps(returns_to_go(step_rewards, m, gamma), m, uid, anchor_obs)
    episode = _episodes(step_rewards, m, uid)[:, None].expand_as(steps)
    return omega * (episode + steps) * m


@wrong(
    "gigpo",
    "the episode part counts each response once per step",
    "step|response|once|length|often",
)
def gigpo_long_responses_count_more(
    step_rewards, step_mask, uid, anchor_obs, gamma=0.95, omega=1.0
):
    m = step_mask.bool()
    steps = _steps(returns_to_go(step_rewards, m, gamma), m, uid, anchor_obs)
    score = (step_rewards * m).sum(1)
    episode = torch.zeros_like(score)
    for g in sorted({int(u) for u in uid}):
        rows = torch.tensor([i for i, u in enumerate(uid) if int(u) == g])
        x = torch.cat([score[i].repeat(int(m[i].sum())) for i in rows])
        if len(x) > 1:
            episode[rows] = (score[rows] - x.mean()) / (x.std() + 1e-6)
    return (episode[:, None] + omega * steps) * m


@wrong("distillation", "the teacher's pull has the wrong sign", "sign")
def distilled_away(advantages, log_prob, teacher_log_prob, mask, coef=1.0):
    return (advantages + coef * (log_prob - teacher_log_prob)) * mask


@wrong(
    "gae",
    "torch.roll brings the first value behind the last slot",
    "next value|first|wrap|last|behind|untrained",
)
def gae_rolled(rewards, values, mask, gamma=0.99, lam=0.95):
    m = mask.to(values.dtype)
    following = torch.roll(values * m, -1, dims=1)
    delta = (rewards + gamma * following - values) * m
    out, last = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        last = delta[:, t] + gamma * lam * last
        out[:, t] = last
    return out * m


# ---- right ---------------------------------------------------------------------------
@right("gae")
def gae_packed_left(rewards, values, mask, gamma=0.99, lam=0.95):
    order = mask.bool().int().argsort(dim=1, descending=True, stable=True)
    live = torch.arange(mask.shape[1])[None] < mask.bool().sum(1, keepdim=True)
    r, v = rewards.gather(1, order) * live, values.gather(1, order) * live
    delta = r + gamma * torch.nn.functional.pad(v[:, 1:], (0, 1)) - v
    adv = torch.zeros_like(v)
    for t in reversed(range(v.shape[1])):
        later = adv[:, t + 1] if t + 1 < v.shape[1] else 0.0
        adv[:, t] = (delta[:, t] + gamma * lam * later) * live[:, t]
    return torch.zeros_like(adv).scatter(1, order, adv)


@right("gae")
def gae_as_a_matrix(rewards, values, response_mask, discount, gae_lambda):
    m = response_mask.to(values.dtype)
    number = m.cumsum(1)
    lag = number[:, None, :] - number[:, :, None]
    later = (lag >= 0) * m[:, None, :] * m[:, :, None]
    one_later = (lag == 1) * m[:, None, :] * m[:, :, None]
    next_value = (one_later @ values[..., None])[..., 0]
    delta = (rewards + discount * next_value - values) * m
    trace = later * (discount * gae_lambda) ** lag.clamp(min=0)
    return (trace @ delta[..., None])[..., 0]


@right("gae_whitened")
def gae_as_verl(token_level_rewards, values, response_mask, gamma, lam):
    with torch.no_grad():
        nextvalues, lastgaelam, reverse = 0, 0, []
        for t in reversed(range(token_level_rewards.shape[-1])):
            delta = token_level_rewards[:, t] + gamma * nextvalues - values[:, t]
            candidate = delta + gamma * lam * lastgaelam
            m = response_mask[:, t]
            nextvalues = values[:, t] * m + (1 - m) * nextvalues
            lastgaelam = candidate * m + (1 - m) * lastgaelam
            reverse.append(lastgaelam)
        advantages = torch.stack(reverse[::-1], dim=1)
        returns = advantages + values
        advantages = masked_whiten(advantages, response_mask)
    return advantages, returns


@right("gae")
def gae_with_bootstrap(rewards, values, mask, bootstrap, gamma, lam):
    return {"advantages": skip_scan(rewards, values, mask, gamma, lam, bootstrap)}


@right("discounted_returns")
def returns_in_numpy(scores, loss_mask, gamma=1.0):
    x, m = scores.numpy(), loss_mask.numpy().astype(bool)
    out = np.zeros_like(x)
    for i, row in enumerate(m):
        run = 0.0
        for t in np.flatnonzero(row)[::-1]:
            run = x[i, t] + gamma * run
            out[i, t] = run
    return torch.from_numpy(out)


@right("turns_normalized_discounted")
def turns_by_prompt(turn_rewards, turn_mask, uid, gamma=0.95, eps=1e-6):
    m = turn_mask.bool()
    found = defaultdict(list)
    for i, t in m.nonzero().tolist():
        found[int(uid[i])].append(turn_rewards[i, t])
    norm = torch.zeros_like(turn_rewards)
    for i, t in m.nonzero().tolist():
        x = torch.stack(found[int(uid[i])])
        if len(x) > 1:
            norm[i, t] = (turn_rewards[i, t] - x.mean()) / (x.std() + eps)
    return returns_to_go(norm, m, gamma)


@right("turn_index_discounted_normalized")
def turns_by_number(turn_rewards, turn_mask, group_ids, gamma):
    m = turn_mask.to(turn_rewards.dtype)
    G = returns_to_go(turn_rewards, turn_mask, gamma)
    # the k-th turn of a response is its k-th trained slot
    k = turn_mask.bool().long().cumsum(1) - 1
    out = torch.zeros_like(G)
    for g in torch.as_tensor(group_ids).unique():
        rows = (torch.as_tensor(group_ids) == g)[:, None] & turn_mask.bool()
        for number in range(turn_mask.shape[1]):
            cells = rows & (k == number)
            x = G[cells]
            if x.numel() > 1:
                out[cells] = (x - x.mean()) / (x.std() + 1e-6)
    return out * m


@right("gigpo")
def gigpo_of_dictionaries(
    step_rewards, step_mask, uid, anchor_obs, gamma=0.95, omega=1.0
):
    m = step_mask.bool()
    steps = _steps(returns_to_go(step_rewards, m, gamma), m, uid, anchor_obs)
    return (_episodes(step_rewards, m, uid)[:, None] + omega * steps) * m


@right("minillm")
def minillm_by_division(log_prob, teacher_log_prob, mask, gamma=1.0):
    m = mask.to(log_prob.dtype)
    decay = gamma ** (m.cumsum(1) - 1).clamp(min=0)
    pulls = (teacher_log_prob - log_prob) * m
    return (pulls * decay).flip(1).cumsum(1).flip(1) / decay * m


@right("distillation")
def distilled_by_kl_penalty(
    advantages, student_logprobs, teacher_logprobs, response_mask, kl_coef
):
    reverse_kl = student_logprobs - teacher_logprobs
    return torch.where(response_mask.bool(), advantages - kl_coef * reverse_kl, 0.0)
