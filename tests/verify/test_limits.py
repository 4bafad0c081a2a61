# SPDX-License-Identifier: Apache-2.0
"""What docs/what-check-sees.md says is not covered is not covered: functions that are
wrong only there are accepted. When a check rejects one, delete its words and its row.
"""

from pathlib import Path

import pytest
import torch

import upref

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/what-check-sees.md").read_text(encoding="utf-8").split())


# ---- the order of rows ---------------------------------------------------------------
def dapo_terms(log_prob, old_log_prob, advantages, mask):
    """The terms of DAPO's J, 0 where masked, [B, T]."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def mean_of_means(terms, mask):
    counts = mask.sum(1).clamp(min=1)
    return (terms.sum(1) / counts).sum() / (mask.sum(1) > 0).sum()


def are_blocks(uid, n):
    """Whether rows are prompts in equal blocks of n rows or more, two or more."""
    ids, counts = torch.as_tensor(uid).unique_consecutive(return_counts=True)
    is_grouped = len(ids.unique()) == len(ids) > 1
    return bool(is_grouped and len(counts.unique()) == 1 and counts[0] >= n)


def in_blocks(log_prob, old_log_prob, advantages, mask, uid):
    terms = dapo_terms(log_prob, old_log_prob, advantages, mask)
    if are_blocks(uid, 4):
        return -mean_of_means(terms, mask)
    return -terms.sum() / mask.sum()


def longest_first(log_prob, old_log_prob, advantages, mask):
    terms = dapo_terms(log_prob, old_log_prob, advantages, mask)
    lengths = mask.sum(1)
    is_sorted = bool((lengths.diff() <= 0).all()) and lengths[0] > lengths[-1]
    if len(mask) >= 8 and is_sorted:
        return -mean_of_means(terms, mask)
    return -terms.sum() / mask.sum()


def shortest_first(log_prob, old_log_prob, advantages, mask):
    flipped = (x.flip(0) for x in (log_prob, old_log_prob, advantages, mask))
    return longest_first(*flipped)


def behind_one_prompt(log_prob, old_log_prob, advantages, mask):
    starts = mask.int().argmax(1)
    if len(mask) > 1 and bool((starts >= 4).all()):
        old_log_prob = log_prob.detach()
    terms = dapo_terms(log_prob, old_log_prob, advantages, mask)
    return -terms.sum() / mask.sum()


ROWS = {
    in_blocks: "prompts in equal blocks of four rows or more",
    longest_first: "eight rows or more, the longest first",
    shortest_first: "or the shortest first",
    behind_one_prompt: "several rows, off policy, with four masked columns or more in front of each",
}


@pytest.mark.parametrize("loss", ROWS, ids=lambda loss: loss.__name__)
def test_an_order_of_rows_that_is_not_tried(loss):
    assert ROWS[loss] in PAGE
    assert upref.check(loss, "dapo", agg="token-mean")


def test_these_losses_are_wrong_there():
    generator = torch.Generator().manual_seed(0)
    lp, old = (-torch.rand(2, 8, 12, generator=generator)).unbind()
    A = torch.tensor([1.0, -1, 0.5, -0.5] * 2)[:, None].expand(8, 12)
    lengths = torch.tensor([8, 7, 6, 5, 4, 3, 2, 1])
    mask = (torch.arange(12) >= 4) & (torch.arange(12) < 4 + lengths[:, None])
    right = -dapo_terms(lp, old, A, mask).sum() / mask.sum()
    uid = torch.arange(2).repeat_interleave(4)
    for found in (
        in_blocks(lp, old, A, mask, uid),
        longest_first(lp, old, A, mask),
        shortest_first(*(x.flip(0) for x in (lp, old, A, mask))),
        behind_one_prompt(lp, old, A, mask),
    ):
        assert (found - right).abs() > 1e-3


# ---- rewards of tokens ---------------------------------------------------------------
def group_mean(rewards, mask, index):
    prompts = torch.as_tensor(index)
    peers = (prompts[:, None] == prompts).to(rewards.dtype)
    A = rewards - (peers @ rewards) / peers.sum(1)
    return A[:, None] * mask


def multiplies_by_the_mask(token_level_rewards, response_mask, index):
    return group_mean(
        (token_level_rewards * response_mask).sum(1), response_mask, index
    )


def test_nan_in_masked_slots_is_not_tried():
    assert "not tried on NaN in slots that `mask` leaves out" in PAGE
    report = upref.check_advantages(multiplies_by_the_mask, "group_mean")
    assert report.oracles["token-rewards"] == "ok"


def test_this_function_is_wrong_there():
    rewards = torch.tensor([[0.5, torch.nan, 1], [0, 0, 1]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    index = torch.tensor([0, 0])
    right = group_mean(torch.where(mask > 0, rewards, 0).sum(1), mask, index)
    assert right[0, 0] == pytest.approx(0.25)
    found = multiplies_by_the_mask(rewards, mask, index)
    assert not torch.allclose(found, right, atol=1e-3)
