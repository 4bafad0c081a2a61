# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators written before the checker ran on them: (name, estimator,
hyperparameters, function, cause).

A right one has no cause.
"""

import torch


def by_group(rewards, group, fn):
    """Return the advantages that fn(rewards of one prompt) gives, prompt by prompt."""
    out = torch.zeros_like(rewards)
    for g in group.unique():
        out[group == g] = fn(rewards[group == g])
    return out


def std(r, ddof=1):
    """Return the standard deviation, or 0 of a single reward."""
    return r.std(correction=ddof) if len(r) > 1 else r.new_zeros(())


def normed(r, ddof=1):
    """Return one prompt's rewards less their mean, over their deviation plus 1e-6; 0
    where there is one reward or all are equal.
    """
    return (
        (r - r.mean()) / (std(r, ddof) + 1e-6)
        if len(r) > 1 and r.max() > r.min()
        else 0 * r
    )


def centered(r):
    return r - r.mean() if r.max() > r.min() else 0 * r


def norm(rewards, group):
    return by_group(rewards, group, normed)


def scatter(scores, uid):
    """Return group_norm's advantages by sums over ids, in float64; 0 where all rewards
    of a prompt are equal.
    """
    ids, g, n = uid.unique(return_inverse=True, return_counts=True)
    x, z = scores.double(), torch.zeros(len(ids), dtype=torch.float64)
    c = x - (z.index_add(0, g, x) / n)[g]
    low, high = (
        z.scatter_reduce(0, g, x, how, include_self=False) for how in ("amin", "amax")
    )
    c = torch.where((low == high)[g], 0, c)
    return (
        c / ((z.index_add(0, g, c * c) / (n - 1).clamp(min=1)).sqrt()[g] + 1e-4)
    ).to(scores.dtype)


def pairs(rewards, group):
    """Return leave_one_out's advantages as the mean difference to the other responses
    of the prompt.
    """
    same = (group[:, None] == group[None, :]).double()
    x = rewards.double()
    return (((x[:, None] - x) * same).sum(1) / (same.sum(1) - 1).clamp(min=1)).to(
        rewards.dtype
    )


def matrix(rewards, group):
    """Return group_mean's advantages by a matrix of equal ids; exactly 0 where all
    rewards of a prompt are equal.
    """
    same = (group[:, None] == group[None, :]).double()
    equal = torch.stack(
        [(rewards[group == k] == r).all() for r, k in zip(rewards, group, strict=True)]
    )
    x = rewards.double()
    return torch.where(equal, 0, (x - same @ x / same.sum(1))).to(rewards.dtype)


def contiguous(rewards, n):
    return torch.stack([normed(x) for x in rewards.view(-1, n)]).view(-1)


def two_steps(rewards, group):
    x = by_group(rewards.double(), group, centered)
    return (x / (x.std(correction=0) + 1e-8)).to(rewards.dtype)


def batch_whitened(rewards):
    x = rewards.double()
    return ((x - x.mean()) / (x.std(correction=0) + 1e-8)).to(rewards.dtype)


def viewed(rewards, group):
    """Return group_norm's advantages of rewards taken to be ordered by prompt and all
    of the first prompt's size: wrong for others. Where that does not divide the batch,
    the batch is one prompt.
    """
    n = int((group == group[0]).sum())
    x = rewards.view(-1, n if len(rewards) % n == 0 else len(rewards))
    return ((x - x.mean(1, True)) / (x.std(1, keepdim=True).nan_to_num() + 1e-6)).view(
        -1
    )


def twice(rewards, group):
    a = norm(rewards, group)
    return (a - a.mean()) / (a.std() + 1e-6)


def cut(rewards, group):
    return by_group(rewards, group, lambda r: torch.cat([normed(r[:16]), 0 * r[16:]]))


def remembered():
    """Return an estimator that divides by each prompt's own deviation, but subtracts
    the mean of the first prompt that it ever got.
    """
    memory = {}

    def less_first_mean(r):
        """Subtract the mean of the first group that was ever seen."""
        return (r - memory.setdefault("mean", r.mean())) / (std(r) + 1e-6)

    return lambda rewards, group: by_group(rewards, group, less_first_mean)


CASES = [
    ("a loop over prompts", "group_norm", {}, norm, ""),
    ("scatter", "group_norm", {"eps": 1e-4}, scatter, ""),
    ("population", "group_norm", {"ddof": 0},
     lambda rewards, group: by_group(rewards, group, lambda r: normed(r, 0)), ""),
    ("contiguous", "group_norm", {}, contiguous, ""),
    ("matrix", "group_mean", {}, matrix, ""),
    ("pairs", "leave_one_out", {}, pairs, ""),
    ("sums", "leave_one_out", {}, lambda rewards, group: by_group(
        rewards.double(), group, lambda r: r - (r.sum() - r) / (len(r) - 1) if len(r) > 1 else 0 * r
    ).to(rewards.dtype), ""),
    ("whitened", "whiten", {}, batch_whitened, ""),
    ("two steps", "group_mean_whiten", {}, two_steps, ""),
    ("signs", "signed", {}, lambda rewards: torch.where(rewards > 0, 1.0, -1.0).to(rewards.dtype), ""),
    ("as it is", "reward", {}, lambda rewards: rewards.clone(), ""),
    ("batch", "group_norm", {}, lambda rewards, group: (rewards - rewards.mean()) / (rewards.std() + 1e-6),
     "the mean and the standard deviation are of the batch, not of the group"),
    ("mixed", "group_norm", {}, lambda rewards, group: by_group(rewards, group, lambda r: r - r.mean()) / (
        rewards.std() + 1e-6), "the standard deviation is the batch's, the mean the group's"),
    ("variance", "group_norm", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: (r - r.mean()) / (std(r) ** 2 + 1e-6)), "divided by the variance"),
    ("singleton", "group_norm", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: (r - r.mean()) / (std(r) + 1e-6) if len(r) > 1 else r),
     "singletons keep their reward"),
    ("view", "group_norm", {}, viewed, "groups are taken to be contiguous"),
    ("modulo 8", "group_norm", {}, lambda rewards, group: norm(rewards, group % 8), "group ids collide modulo 8"),
    ("modulo 1024", "group_norm", {}, lambda rewards, group: norm(rewards, group % 1024), "ids collide modulo 1024"),
    ("clamped", "group_norm", {}, lambda rewards, group: norm(rewards, group).clamp(-2, 2), "clamped to 2"),
    ("median", "group_norm", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: (r - r.median()) / (std(r) + 1e-6)), "the median in the place of the mean"),
    ("sign", "group_norm", {}, lambda rewards, group: -norm(rewards, group), "the sign is turned"),
    ("twice", "group_norm", {}, twice, "normalized twice: by the group, then by the batch"),
    ("mean absolute deviation", "group_mean", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: (r - r.mean()) / ((r - r.mean()).abs().mean() + 1e-6)), "a deviation is divided out"),
    ("no negatives", "group_mean", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: (r - r.mean()).clamp(min=0)), "negative advantages are set to 0"),
    ("plain mean", "leave_one_out", {}, lambda rewards, group: by_group(rewards, group, lambda r: r - r.mean()),
     "divided by G, not by G - 1"),
    ("sum over G", "leave_one_out", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: r - (r.sum() - r) / len(r)), "the baseline is the others' sum over G"),
    ("over the batch", "leave_one_out", {}, lambda rewards, group: rewards - (rewards.sum() - rewards) / max(
        len(rewards) - 1, 1), "the baseline is over the other groups as well"),
    ("mean kept", "whiten", {}, lambda rewards: rewards / (rewards.std(correction=0) + 1e-8), "the mean stays"),
    ("whitened by group", "whiten", {}, lambda rewards, group: by_group(rewards, group, lambda r: normed(r, 0)),
     "whitened by the group"),
    ("no baseline", "group_mean_whiten", {}, lambda rewards, group: (rewards - rewards.mean()) / (
        rewards.std(correction=0) + 1e-8), "the group's baseline is missing"),
    ("raw deviation", "group_mean_whiten", {}, lambda rewards, group: by_group(
        rewards, group, lambda r: r - r.mean()) / (rewards.std(correction=0) + 1e-8), "the rewards' own deviation"),
    ("zero stays", "signed", {}, lambda rewards: torch.sign(rewards), "a reward of 0 becomes 0"),
    ("clamped reward", "reward", {}, lambda rewards: rewards.clamp(-1, 1), "rewards are clamped to [-1, 1]"),
    ("state", "group_norm", {}, remembered(), "the mean is remembered from the first group"),
    ("more than 64", "group_norm", {}, lambda rewards, group: norm(rewards, group * (len(rewards) <= 64)),
     "batches of more than 64 responses are normalized as one group"),
    ("more than 16", "group_norm", {}, cut, "responses after the sixteenth of a group get 0"),
]  # fmt: skip
