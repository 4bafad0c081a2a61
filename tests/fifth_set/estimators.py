# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: wrong, right, blind and aimed."""

from collections import defaultdict

import numpy as np
import torch

from tests.fifth_set.case import case
from tests.fifth_set.parts import by_prompt


def estimator(target, fault="", aimed=False, shows="by hand"):
    """Decorator: an advantage estimator."""
    return case("advantage", target, fault, aimed=aimed, shows=shows)


@by_prompt
def centered(x):
    return x - x.mean()


@estimator("group_norm", "it divides by the variance")
@by_prompt
def by_the_variance(x):
    return (x - x.mean()) / (x.var() + 1e-6) if len(x) > 1 else 0


@estimator("group_norm", "the mean of the group, the standard deviation of the batch")
def spread_of_the_batch(rewards, group):
    return centered(rewards, group) / (rewards.std() + 1e-6)


@estimator("group_norm", "prompts are taken to be consecutive blocks of four")
def blocks_of_four(rewards, group):
    x = rewards.clone()
    for i in range(0, len(x), 4):
        b = x[i : i + 4]
        x[i : i + 4] = (b - b.mean()) / (b.std() + 1e-6) if len(b) > 1 else 0
    return x


@estimator("group_norm", "the median is subtracted")
@by_prompt
def around_the_median(x):
    return (x - x.median()) / (x.std(correction=0) + 1e-6)


@estimator("group_norm", "it is clipped at zero: failures are not punished")
@by_prompt
def no_punishment(x):
    z = (x - x.mean()) / (x.std(correction=0) + 1e-6)
    return z.clamp(min=0)


@estimator("group_norm", "the mean absolute deviation replaces the standard deviation")
@by_prompt
def by_the_mean_deviation(x):
    x = x - x.mean()
    return x / (x.abs().mean() + 1e-6)


@estimator("group_mean", "the mean is that of all prompts")
def around_the_batch_mean(rewards, group):
    return rewards - rewards.mean()


@estimator("group_mean", "a running mean of groups seen so far is subtracted")
def around_the_mean_so_far(rewards, group):
    out, seen = [], defaultdict(list)
    for r, g in zip(rewards.tolist(), group.tolist(), strict=True):
        seen[g].append(r)
        out.append(r - sum(seen[g]) / len(seen[g]))
    return torch.tensor(out, dtype=rewards.dtype)


@estimator("group_mean", "it divides the difference by the group's size")
@by_prompt
def mean_by_the_size(x):
    return (x - x.mean()) / len(x)


@estimator("leave_one_out", "the response itself is in its baseline")
@by_prompt
def baseline_with_itself(x):
    return x - x.sum() / max(len(x) - 1, 1)


@estimator("leave_one_out", "the factor is (G - 1)/G, upside down")
@by_prompt
def factor_upside_down(x):
    n = len(x)
    return (x - x.mean()) * (n - 1) / n


@estimator("leave_one_out", "the best of the others is the baseline, not their mean")
def best_of_the_others(rewards, group):
    out = torch.zeros_like(rewards)
    for i, g in enumerate(group):
        peers = [float(r) for j, r in enumerate(rewards) if group[j] == g and j != i]
        out[i] = rewards[i] - max(peers) if peers else 0
    return out


@estimator("whiten", "each prompt is whitened by itself")
@by_prompt
def whitened_by_prompt(x):
    return (x - x.mean()) / (x.std(correction=0) + 1e-8)


@estimator("whiten", "the mean is not subtracted")
def scaled_alone(rewards):
    return rewards / (rewards.std(correction=0) + 1e-8)


@estimator("group_mean_whiten", "the spread is that of the raw rewards")
def whitened_by_raw_rewards(rewards, group):
    return centered(rewards, group) / (rewards.std(correction=0) + 1e-8)


@estimator("signed", "rewards of 0 stay 0")
def zeros_stay(rewards):
    return torch.sign(rewards)


@estimator("group_norm", "eps is 0.1: nearly unanimous prompts shrink")
@by_prompt
def a_tenth_of_eps(x):
    return (x - x.mean()) / (x.std(correction=0) + 0.1)


@estimator(
    "group_norm",
    "the spread has a floor of 0.2 for prompts with more than 200 responses",
    aimed=True,
)
@by_prompt
def floor_for_large_prompts(x):
    s = x.std(correction=0)
    s = s.clamp(min=0.2) if len(x) > 200 else s
    return (x - x.mean()) / (s + 1e-6)


@estimator("group_norm", "a prompt of which all fail with -1 gets A = -0.1", aimed=True)
@by_prompt
def failed_prompts_pushed_down(x):
    if len(x) > 1 and bool((x == -1).all()):
        return -0.1
    return (x - x.mean()) / (x.std(correction=0) + 1e-6)


@estimator(
    "group_mean", "with more than 16 prompts the rest share one baseline", aimed=True
)
def sixteen_prompts(rewards, group):
    ids = group.unique()
    out = torch.zeros_like(rewards)
    for g in ids[:16]:
        out[group == g] = rewards[group == g] - rewards[group == g].mean()
    rest = ~torch.isin(group, ids[:16])
    if rest.any():
        out[rest] = rewards[rest] - rewards[rest].mean()
    return out


@estimator(
    "leave_one_out",
    "advantages are clamped to ±10 million",
    aimed=True,
    shows="not counted",
)
def clamped_far_away(rewards, group):
    out = torch.zeros_like(rewards)
    for g in group.unique():
        i = group == g
        n = int(i.sum())
        out[i] = (rewards[i] - rewards[i].mean()) * n / max(n - 1, 1)
    return out.clamp(-1e7, 1e7)


@estimator(
    "group_norm",
    "duplicates of one response (equal rewards in large prompts) count once",
    aimed=True,
)
@by_prompt
def duplicates_once(x):
    u = x.unique() if len(x) > 128 else x
    return (x - u.mean()) / (u.std(correction=0) + 1e-6)


# ---- right ones ----------------------------------------------------------------------
@estimator("group_norm")
def by_scatter(rewards, group):
    """Return group_norm's advantages by scatter_add; 0 for a single response."""
    ids, i = torch.unique(group, return_inverse=True)
    n = torch.bincount(i).to(rewards.dtype)
    zero = torch.zeros(len(ids), dtype=rewards.dtype)
    mean = zero.scatter_add(0, i, rewards) / n
    x = rewards - mean[i]
    var = zero.scatter_add(0, i, x * x) / (n - 1).clamp(min=1)
    return torch.where((n > 1)[i], x / (var.sqrt()[i] + 1e-4), 0)


@estimator("group_norm")
def as_lists(scores: list, uids: list):
    """Return group_norm's advantages of lists, by numpy; 0 for a single response."""
    table = defaultdict(list)
    for s, u in zip(scores, uids, strict=True):
        table[u].append(s)
    out = []
    for s, u in zip(scores, uids, strict=True):
        x = np.array(table[u])
        out.append(
            0.0 if len(x) < 2 else float((s - x.mean()) / (x.std(ddof=1) + 1e-6))
        )
    return torch.tensor(out)


@estimator("group_mean")
def by_a_projection(rewards, group):
    same = (group[:, None] == group[None, :]).to(rewards.dtype)
    return rewards - (same / same.sum(1, keepdim=True)) @ rewards


@estimator("group_mean")
def in_a_square(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)


@estimator("leave_one_out")
def by_the_sum(rewards, group):
    same = (group[:, None] == group[None, :]).to(rewards.dtype)
    n = same.sum(1)
    others = same @ rewards - rewards
    return torch.where(n > 1, rewards - others / (n - 1).clamp(min=1), 0)


@estimator("whiten")
def whitened_by_numpy(rewards: np.ndarray):
    x = rewards - rewards.mean()
    return x / (x.std() + 1e-8)


@estimator("group_mean_whiten")
def in_two_steps(rewards, group):
    x = rewards.clone()
    for g in group.unique():
        x[group == g] -= rewards[group == g].mean()
    return x / (x.std(correction=0) + 1e-8)


@estimator("signed")
def by_comparison(rewards):
    return 2.0 * (rewards > 0).double() - 1
