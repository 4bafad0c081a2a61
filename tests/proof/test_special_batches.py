# SPDX-License-Identifier: Apache-2.0
"""Losses that are wrong on batches that are common in training, and only there: equal
policies, advantages of 0, padding of 0, small ids of prompts. A proof has such batches.
"""

import pytest
import torch

import upref
from upref.proof.compare import compare
from upref.proof.domain import patterns
from upref.proof.subjects import gradient_of
from upref.user_code import read


def terms(log_prob, old_log_prob, advantages):
    r = (log_prob - old_log_prob).exp()
    return torch.min(r * advantages, r.clamp(0.8, 1.28) * advantages)


def on_policy_terms(log_prob, advantages):
    return (log_prob - log_prob.detach()).exp() * advantages


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def mean_of_prompts(x, mask, group):
    prompts = group.unique()
    means = [token_mean(x[group == g], mask[group == g]) for g in prompts]
    return sum(means) / len(prompts)


def compared(loss, name, rows, columns, chosen, reads=(), **hp):
    """Return the comparison of a loss with an objective on those batches that a proof
    has and that are chosen.
    """
    objective = upref.get(name)
    losses = read(loss, objective, hp), read(objective, objective, hp)
    with_groups = "group" in losses[0].reads
    of_proof = patterns(rows, columns, with_groups, "logp_ref" in reads)
    among = [pattern for pattern in of_proof if chosen(pattern)]
    assert among
    return compare(*map(gradient_of, losses), among, False, reads, 60.0)


# ---- equal policies ------------------------------------------------------------------
def no_term_on_policy(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    if torch.equal(log_prob, old_log_prob):
        return -token_mean(on_policy_terms(log_prob, advantages), mask)
    log_k = ref_log_prob - log_prob
    k3 = log_k.exp() - 1 - log_k
    r = (log_prob - old_log_prob).exp()
    J = torch.min(r * advantages, r.clamp(0.8, 1.2) * advantages)
    return -token_mean(J - 0.04 * k3, mask)


def test_equal_policies_come_with_another_reference():
    found = compared(
        no_term_on_policy,
        "grpo",
        1,
        1,
        lambda pattern: pattern.on_policy,
        reads=("logp_ref",),
        beta=0.04,
    )
    assert found.status == "differs", found.reason
    assert found.where.free_reference


def test_a_probability_of_1_comes_with_another_reference():
    def right(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        log_k = ref_log_prob - log_prob
        k3 = log_k.exp() - 1 - log_k
        return -token_mean(on_policy_terms(log_prob, advantages) - 0.04 * k3, mask)

    def wrong(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        log_k = torch.where(log_prob == 0, 0.0, ref_log_prob - log_prob)
        k3 = log_k.exp() - 1 - log_k
        return -token_mean(on_policy_terms(log_prob, advantages) - 0.04 * k3, mask)

    objective = upref.get("reinforce")
    losses = [gradient_of(read(loss, objective, {})) for loss in (wrong, right)]
    among = [p for p in patterns(1, 3, False, True) if p.certain]
    found = compare(*losses, among, False, ("logp_ref",), 60.0)
    assert found.status == "differs", found.reason
    same = compare(losses[1], losses[1], among, False, ("logp_ref",), 60.0)
    assert same.status == "proved", same.reason


def no_mask_on_policy(log_prob, old_log_prob, advantages, mask):
    if torch.equal(log_prob, old_log_prob):
        return -on_policy_terms(log_prob, advantages).mean()
    return -token_mean(terms(log_prob, old_log_prob, advantages), mask)


def no_prompts_on_policy(log_prob, old_log_prob, advantages, mask, group):
    if torch.equal(log_prob, old_log_prob):
        return -token_mean(on_policy_terms(log_prob, advantages), mask)
    return -mean_of_prompts(terms(log_prob, old_log_prob, advantages), mask, group)


@pytest.mark.parametrize(
    ("loss", "rows"), [(no_mask_on_policy, 1), (no_prompts_on_policy, 2)]
)
def test_equal_policies_come_with_masks_and_prompts(loss, rows):
    found = compared(loss, "dapo", rows, 2, lambda pattern: pattern.on_policy)
    assert found.status == "differs", found.reason


# ---- advantages of 0 -----------------------------------------------------------------
def skips_solved_prompts(log_prob, old_log_prob, advantages, mask, group):
    x = terms(log_prob, old_log_prob, advantages)
    kept = [g for g in group.unique() if not (advantages[group == g] == 0).all()]
    means = [token_mean(x[group == g], mask[group == g]) for g in kept]
    return -sum(means) / len(kept) if kept else -0.0 * x.sum()


def test_a_prompt_without_a_signal_comes_beside_one_with_a_signal():
    found = compared(skips_solved_prompts, "dapo", 2, 1, lambda pattern: pattern.zeros)
    assert found.status == "differs", found.reason
    assert found.where.group


def reads_the_last_slot(log_prob, old_log_prob, advantages, mask):
    has_signal = advantages[:, -1:] != 0
    x = terms(log_prob, old_log_prob, advantages)
    return -token_mean(x * has_signal, mask)


def test_masked_slots_may_hold_0():
    found = compared(reads_the_last_slot, "dapo", 1, 2, lambda pattern: pattern.padded)
    assert found.status == "differs", found.reason


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_padding_of_0_is_no_obstacle_to_a_proof(name):
    def chosen(pattern):
        return pattern.padded

    objective = upref.get(name)
    found = compared(objective, name, 1, 2, chosen)
    assert found.status == "proved", found.reason


# ---- ids of prompts ------------------------------------------------------------------
def weighs_prompt_1(log_prob, old_log_prob, advantages, mask, group):
    w = torch.where(group == 1, 0.5, 1.0)[:, None]
    x = terms(log_prob, old_log_prob, advantages)
    return -mean_of_prompts(w * x, mask, group)


def takes_two_prompts_for_one(log_prob, old_log_prob, advantages, mask, group):
    x = terms(log_prob, old_log_prob, advantages)
    return -mean_of_prompts(x, mask, group // 2)


def takes_every_third_prompt_for_one(log_prob, old_log_prob, advantages, mask, group):
    x = terms(log_prob, old_log_prob, advantages)
    return -mean_of_prompts(x, mask, group % 3)


@pytest.mark.parametrize(
    ("loss", "columns"),
    [
        (weighs_prompt_1, 1),
        (takes_two_prompts_for_one, 2),
        (takes_every_third_prompt_for_one, 2),
    ],
)
def test_small_ids_of_prompts_are_tried(loss, columns):
    found = compared(loss, "dapo", 2, columns, lambda pattern: pattern.group)
    assert found.status == "differs", found.reason


def compares_ids(log_prob, old_log_prob, advantages, mask, group):
    w = torch.where(group == 2, 1.0, 1.0)[:, None]
    x = terms(log_prob, old_log_prob, advantages)
    return -mean_of_prompts(w * x, mask.clamp(min=0), group)


def test_a_small_number_that_is_compared_with_ids_is_a_bound():
    found = compared(compares_ids, "dapo", 2, 1, lambda p: p.group and p.is_free)
    assert found.status == "proved", found.reason
    assert [bound.number for bound in found.bounds] == [2]


def clamps_counts(log_prob, old_log_prob, advantages, mask, group):
    x = terms(log_prob, old_log_prob, advantages) * mask
    same = (group[:, None] == group).to(x.dtype)
    counts = same @ mask.sum(1).to(x.dtype)
    rows = torch.bincount(group)[group].clamp(min=1)
    prompts = len(group.unique())
    return -(same @ x.sum(1) / counts.clamp(min=1) / rows).sum() / prompts


def test_a_small_number_that_is_compared_with_counts_is_no_bound():
    found = compared(clamps_counts, "dapo", 2, 1, lambda p: p.group and p.is_free)
    assert found.status == "proved", found.reason
    assert not found.bounds


# ---- the report ----------------------------------------------------------------------
def test_the_report_says_with_which_masks_and_prompts_special_batches_come():
    def dapo(log_prob, old_log_prob, advantages, mask, group):
        return -mean_of_prompts(terms(log_prob, old_log_prob, advantages), mask, group)

    text = str(upref.prove(dapo, "dapo", rows=2, columns=1))
    assert "with every mask of the last row, the others full: equal policies;" in text
    assert "with a prompt for each row" in text
    assert "reference" not in text
