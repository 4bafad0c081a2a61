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
