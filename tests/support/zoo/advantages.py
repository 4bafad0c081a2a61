# SPDX-License-Identifier: Apache-2.0
"""Advantage functions `(rewards, group) -> A` as people write them, and what is wrong
with each.
"""

from collections import defaultdict

import numpy as np
import torch

from tests.support.cases.bodies import named as N


# ---- right ---------------------------------------------------------------------------
def loop_over_prompts(rewards, group):
    """Return group_norm's advantages by a loop over prompts; 0 for a single response."""
    out = torch.empty_like(rewards)
    for g in group.unique():
        rows = group == g
        x = rewards[rows]
        std = x.std() if len(x) > 1 else x.new_zeros(())
        out[rows] = (x - x.mean()) / (std + 1e-6)
    return out


def population_by_bincount(rewards, group):
    """Return group_norm's advantages with the population's deviation and 1e-4, by
    counts of ids.
    """
    n = torch.bincount(group)
    total = torch.zeros(len(n), dtype=rewards.dtype).index_add(0, group, rewards)
    centered = rewards - (total / n)[group]
    squares = torch.zeros(len(n), dtype=rewards.dtype).index_add(0, group, centered**2)
    return centered / ((squares / n).sqrt()[group] + 1e-4)


def dictionary_of_lists(scores, index):
    """Return group_mean's advantages as a list, by plain Python as reward managers have
    it: ids may be strings.
    """
    by_prompt = defaultdict(list)
    for s, i in zip(scores, index, strict=True):
        by_prompt[i].append(float(s))
    means = {k: sum(v) / len(v) for k, v in by_prompt.items()}
    return [float(s) - means[i] for s, i in zip(scores, index, strict=True)]


def numpy_population(rewards: np.ndarray, groups: np.ndarray):
    """Return group_norm's advantages with the population's deviation and 1e-8, as
    numpy.
    """
    out = np.zeros_like(rewards)
    for g in np.unique(groups):
        rows = groups == g
        out[rows] = (rewards[rows] - rewards[rows].mean()) / (
            rewards[rows].std() + 1e-8
        )
    return out


def single_precision(rewards, group):
    return loop_over_prompts(rewards.float(), group)


def view_of_prompts(rewards, num_generations):
    """Return group_norm's advantages of a batch in which each `num_generations`
    consecutive rewards are one prompt.
    """
    grouped = rewards.view(-1, num_generations)
    return (
        (grouped - grouped.mean(1, keepdim=True))
        / (grouped.std(1, keepdim=True) + 1e-4)
    ).view(-1)


def rectangular(rewards):
    return rewards - rewards.mean(dim=-1, keepdim=True)


def sum_of_the_others(rewards, group):
    """Return leave_one_out's advantages by a matrix of equal ids; 0 for a single
    response.
    """
    same = (group[:, None] == group[None, :]).to(rewards.dtype)
    n = same.sum(1)
    return torch.where(
        n > 1, rewards - (same @ rewards - rewards) / (n - 1).clamp(min=1), 0.0
    )


def onto_tokens(token_level_rewards, response_mask, index, epsilon=1e-6):
    """Return group_norm's advantages [B, T] twice, with verl's signature: rewards of
    tokens in, advantages and returns out.
    """
    scores = token_level_rewards.sum(-1)
    ids = np.unique(index, return_inverse=True)[1]
    A = loop_over_prompts(scores, torch.as_tensor(ids))
    A = A[:, None] * response_mask
    return A, A


def batch_z_score(rewards):
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)


def refuses_missing(rewards, group):
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is missing")
    return loop_over_prompts(rewards, group)


def each(rewards, group, divide):
    """Return divide(rewards less their mean, their deviation) of each prompt; the
    deviation of a single response is 0.
    """
    out = torch.zeros_like(rewards)
    for g in group.unique():
        x = rewards[group == g]
        out[group == g] = divide(
            x - x.mean(), x.std() if len(x) > 1 else x.new_zeros(())
        )
    return out


def floor_under_the_std(rewards, group):
    return each(rewards, group, lambda c, std: c / std.clamp(min=1e-6))


def nothing_below_a_std(rewards, group):
    return each(rewards, group, lambda c, std: c / std if std > 1e-6 else 0 * c)


def eps_in_the_root(rewards, group):
    return each(rewards, group, lambda c, std: c / (std**2 + 1e-8).sqrt())


def smallest_eps(rewards, group):
    return each(rewards, group, lambda c, std: c / (std + 1e-12))


def drops_the_prompt_of_a_missing_reward(rewards, group):
    A = loop_over_prompts(rewards.nan_to_num(0.0), group)
    return torch.where(torch.isin(group, group[rewards.isnan()]), 0.0, A)


def prompts_first(prompt_ids, scores):
    return loop_over_prompts(scores, prompt_ids)


def without_names(x, y):
    return loop_over_prompts(x, y)


def onto_a_float_mask(rewards, group, mask):
    return loop_over_prompts(rewards, group)[:, None] * mask.float()


class Estimator:
    def __call__(self, rewards, group):
        return loop_over_prompts(rewards, group)

    def method(self, rewards, group, n=8):
        print("a method")
        return loop_over_prompts(rewards, group)


RIGHT = [
    (loop_over_prompts, "group_norm", "Bessel"), (population_by_bincount, "group_norm", "population"),
    (dictionary_of_lists, "group_mean", ""), (numpy_population, "group_norm", "numpy"),
    (single_precision, "group_norm", "float32"), (view_of_prompts, "group_norm", "contiguous"),
    (rectangular, "group_mean", "[prompts, n]"), (sum_of_the_others, "leave_one_out", ""),
    (onto_tokens, "group_norm", "strings"), (batch_z_score, "whiten", "population"),
    (refuses_missing, "group_norm", "Bessel"),
    (floor_under_the_std, "group_norm", "is max(std, eps) with eps = 1e-06"),
    (nothing_below_a_std, "group_norm", "the std alone, seen beside a std of 0.00049 and more"),
    (eps_in_the_root, "group_norm", "√(var + eps) with eps = 1e-08"),
    (smallest_eps, "group_norm", "std + eps with eps = 1e-12"),
    (drops_the_prompt_of_a_missing_reward, "group_norm", ""),
    (prompts_first, "group_norm", "prompt_ids -> group; scores -> rewards"),
    (without_names, "group_norm", "x -> rewards, by position; y -> group, by position"),
    (onto_a_float_mask, "group_norm", "Bessel"), (Estimator(), "group_norm", "Bessel"),
    (Estimator().method, "group_norm", "it prints"), (lambda *a: loop_over_prompts(*a), "group_norm", "*args"),
]  # fmt: skip


# ---- wrong ---------------------------------------------------------------------------
def over_the_batch(rewards, group):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def std_of_the_batch(rewards, group):
    out = rewards.clone()
    for g in group.unique():
        out[group == g] -= rewards[group == g].mean()
    return out / (rewards.std() + 1e-6)


def fixed_stride(rewards, group):
    n = int((group == group[0]).sum())
    x = rewards.view(-1, n)
    return ((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)).flatten()


def one_group_if_uneven(rewards, group):
    counts = torch.bincount(group)
    n = int(counts[0]) if (counts == counts[0]).all() else len(rewards)
    x = rewards.view(-1, n)
    return ((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)).flatten()


def contiguous_by_counts(rewards, group):
    parts = rewards.split(torch.bincount(group).tolist())
    return torch.cat(
        [(x - x.mean()) / (x.std() + 1e-6) if len(x) > 1 else x * 0 for x in parts]
    )


def normalised_twice(rewards, group):
    A = loop_over_prompts(rewards, group)
    return (A - A.mean()) / (A.std() + 1e-8)


def includes_itself(rewards, group):
    return sum_of_the_others(rewards, group) * 0 + torch.tensor(
        dictionary_of_lists(rewards, group.tolist())
    )


def one_too_few(rewards, group):
    same = (group[:, None] == group[None, :]).to(rewards.dtype)
    return rewards - (same @ rewards) / (same.sum(1) - 1).clamp(min=1)


def nan_for_one(rewards, group):
    """Return group_norm's advantages, NaN for a single response."""
    out = torch.empty_like(rewards)
    for g in group.unique():
        x = rewards[group == g]
        out[group == g] = (x - x.mean()) / (x.std() + 1e-6)
    return out


def no_eps(rewards, group):
    """Return group_norm's advantages without an epsilon: NaN where all rewards of a
    prompt are equal.
    """
    out = torch.zeros_like(rewards)
    for g in group.unique():
        x = rewards[group == g]
        out[group == g] = (x - x.mean()) / x.std() if len(x) > 1 else 0.0
    return out


def large_eps(rewards, group):
    A = dictionary_of_lists(rewards, group.tolist())
    std = torch.stack([rewards[group == g].std(correction=0) for g in group])
    return torch.tensor(A) / (std + 0.1)


def variance_for_deviation(rewards, group):
    A = torch.tensor(dictionary_of_lists(rewards, group.tolist()))
    var = torch.stack([rewards[group == g].var(correction=0) for g in group])
    return A / (var + 1e-6)


def median_baseline(rewards, group):
    return rewards - torch.stack([rewards[group == g].quantile(0.5) for g in group])


def divided_not_centered(rewards, group):
    return rewards / (
        torch.stack([rewards[group == g].std(correction=0) for g in group]) + 1e-6
    )


def no_division(rewards, group):
    return torch.tensor(dictionary_of_lists(rewards, group.tolist()))


def missing_is_zero(rewards, group):
    return loop_over_prompts(rewards.nan_to_num(0.0), group)


def loser_takes_nothing(rewards, group):
    return loop_over_prompts(rewards, group).clamp(min=0)


def clipped_at_one(rewards, group):
    return loop_over_prompts(rewards, group).clamp(-1, 1)


def baseline_minus_reward(rewards, group):
    return -loop_over_prompts(rewards, group)


def in_place(rewards, group):
    for g in group.unique():
        rewards[group == g] -= rewards[group == g].mean()
    return rewards


def jitter(rewards, group):
    return loop_over_prompts(rewards, group) + 1e-3 * torch.randn(
        len(rewards), dtype=rewards.dtype
    )


def averaged_over_tokens(token_level_rewards, response_mask, index):
    scores = (token_level_rewards * response_mask).sum(-1) / response_mask.sum(-1)
    ids = torch.as_tensor(np.unique(index, return_inverse=True)[1])
    A = loop_over_prompts(scores, ids)[:, None] * response_mask
    return A, A


def clipped_at_five(rewards, group):
    """One success among 30 has an advantage above 5."""
    return loop_over_prompts(rewards, group).clamp(-5, 5)


def ids_through_floats(rewards, group):
    return loop_over_prompts(rewards, group.double())


def ids_are_counted_up_to(rewards, group):
    """Return group_mean's advantages by a loop over all ids from 0 to the largest: 0
    for negative ids, and endless for large ones.
    """
    out = torch.zeros_like(rewards)
    # none is below 0, and up to 2^60 it takes a while
    for g in range(int(group.max()) + 1):
        rows = group == g
        if rows.any():
            out[rows] = rewards[rows] - rewards[rows].mean()
    return out


def as_many_ids_as_prompts(rewards, group):
    out = torch.zeros_like(rewards)
    for g in range(len(group.unique())):
        out[group == g] = rewards[group == g] - rewards[group == g].mean()
    return out


def rewards_clipped_at_ten(rewards, group):
    return loop_over_prompts(rewards.clamp(-10, 10), group)


def rounded_to_64ths(rewards, group):
    rewards = (rewards * 64).round() / 64
    return rewards - torch.stack([rewards[group == g].mean() for g in group])


def large_floor(rewards, group):
    return each(rewards, group, lambda c, std: c / std.clamp(min=0.2))


def changed(change):
    return lambda rewards, group: change(loop_over_prompts(rewards, group), group)


def peers_of_none(rewards, group):
    """Return leave_one_out's advantages, NaN for a single response."""
    out = torch.empty_like(rewards)
    for g in group.unique():
        x = rewards[group == g]
        out[group == g] = x - (x.sum() - x) / (len(x) - 1)
    return out


WRONG = [  # function, estimator, oracle, cause
    (over_the_batch, "group_norm", "values", "over the batch"),
    (std_of_the_batch, "group_norm", "values", "divided by the std of the rewards of the whole batch"),
    (fixed_stride, "group_norm", "uneven-groups", ""),
    (one_group_if_uneven, "group_norm", "uneven-groups", ""),
    (contiguous_by_counts, "group_norm", "interleaving", "contiguous"),
    (normalised_twice, "group_norm", "values", "twice"),
    (includes_itself, "leave_one_out", "values", "includes the response itself"),
    (one_too_few, "leave_one_out", "values", "G/(G - 1) times the mean of its prompt"),
    (nan_for_one, "group_norm", "singletons", "division by 0"),
    (peers_of_none, "leave_one_out", "singletons", "by G - 1"),
    (no_eps, "group_norm", "equal-rewards", "eps"),
    (large_eps, "group_norm", "values", "shrinks"),
    (variance_for_deviation, "group_norm", "values", "variance"),
    (median_baseline, "group_mean", "values", "median"),
    (divided_not_centered, "group_norm", "values", "nothing is subtracted"),
    (no_division, "group_norm", "values", "it is group_mean"),
    (missing_is_zero, "group_norm", "missing-reward", "before the baseline"),
    (loser_takes_nothing, "group_norm", "values", "negative advantages are dropped"),
    (clipped_at_one, "group_norm", "values", "clipped to ±1"),
    (baseline_minus_reward, "group_norm", "values", "sign"),
    (in_place, "group_mean", "mutation", "in-place"),
    (jitter, "group_norm", "determinism", "random"),
    (averaged_over_tokens, "group_norm", "values", ""),
    (clipped_at_five, "group_norm", "large-groups", "clipped to at most 5"),
    (ids_through_floats, "group_norm", "group-ids", "values of the ids"),
    (ids_are_counted_up_to, "group_mean", "group-ids", "values of the ids"),
    (as_many_ids_as_prompts, "group_mean", "group-ids", "values of the ids"),
    (rewards_clipped_at_ten, "group_norm", "shift-and-scale", ""),
    (rounded_to_64ths, "group_mean", "shift-and-scale", ""),
    (large_floor, "group_norm", "values", "a floor"),
    *((N(name, changed(change)), "group_norm", "values", says) for name, change, says in (
        ("clipped_from_above", lambda A, group: A.clamp(max=1), "clipped to at most 1"),
        ("clipped_from_below", lambda A, group: A.clamp(min=-0.8), "clipped to at least -0.8"),
        ("losers_by_half", lambda A, group: A.where(A > 0, A / 2), "advantages below 0 are 0.5 times"),
        ("winners_by_three", lambda A, group: A.where(A < 0, 3 * A), "advantages above 0 are 3 times"),
        ("losers_squared", lambda A, group: A.where(A > 0, -(A**2)), ""),
        ("a_tenth_added", lambda A, group: A + 0.1, "0.1 is added to every advantage"),
        ("tanh", lambda A, group: A.tanh(), "tanh of it"),
        ("by_group_size", lambda A, group: A / group.bincount()[group], "by the number of responses of its prompt"),
        ("by_root_of_size", lambda A, group: A / group.bincount()[group].sqrt(), "by the square root of the number"),
        ("row_in_front", lambda A, group: A.roll(1), "the row in front"),
        ("row_behind", lambda A, group: A.roll(-1), "the row behind"),
    )),
]  # fmt: skip
