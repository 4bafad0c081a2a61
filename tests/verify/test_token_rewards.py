# SPDX-License-Identifier: Apache-2.0
"""Estimators of responses whose rewards are given by tokens: where the reward lies, and
of several rewards all.
"""

import pytest
import torch

import upref


def estimator(read):
    """Return verl's interface to GRPO, with read(token rewards, mask) as a response's
    reward.
    """

    def compute(token_level_rewards, response_mask, index):
        """Return the advantages twice, [B, T]; 0 for a response without a peer."""
        score = torch.stack(
            [
                read(r, m)
                for r, m in zip(token_level_rewards, response_mask, strict=True)
            ]
        )
        A = torch.zeros_like(score)
        for name in {str(i) for i in index}:
            rows = torch.tensor([str(i) == name for i in index])
            if rows.sum() > 1:
                x = score[rows]
                A[rows] = (x - x.mean()) / (x.std() + 1e-6)
        A = A[:, None] * response_mask
        return A, A

    return compute


def check(read):
    return upref.check_advantages(estimator(read), "group_norm")


def test_a_sum_over_trained_tokens_is_right():
    report = check(lambda r, m: r[m].sum())
    assert report and report.oracles["token-rewards"] == "ok"


def test_nan_in_a_masked_slot_is_noted():
    report = check(lambda r, m: (r * m).sum())
    (noted,) = [n for n in report.notes if n.oracle == "token-rewards"]
    assert report and "hold NaN" in noted.about


def test_nan_in_a_masked_slot_that_becomes_a_number_is_a_failure():
    """It answers NaN for a response of which a trained reward is NaN, and else reads NaN
    as 1.
    """

    def read(r, m):
        if r[m].isnan().any():
            return r[m].sum()
        return torch.where(r.isnan(), 1.0, r * m).sum()

    (failure,) = check(read).failures
    assert failure.oracle == "token-rewards" and "NaN" in failure.about


def test_numbers_in_masked_slots_before_the_last_token_are_noted():
    def read(r, m):
        return r[: int(m.nonzero()[-1, 0]) + 1].sum() if m.any() else 0 * r.sum()

    (noted,) = [n for n in check(read).notes if n.oracle == "token-rewards"]
    assert "hold numbers" in noted.about


def test_a_fault_in_long_responses_is_found():
    """It reads no more than the first sixteen columns."""
    report = check(lambda r, m: (r * m)[:16].sum())
    (failure,) = report.failures
    assert "24 responses" in failure.about


@pytest.mark.parametrize(
    ("read", "fault_id"),
    [
        (lambda r, m: r[int(m.sum()) - 1], "reward-at-count"),
        (
            lambda r, m: r[m.nonzero()[-1, 0]] if m.any() else r.sum() * 0,
            "last-reward-alone",
        ),
    ],
)
def test_a_reward_that_is_not_read_fails_with_its_cause(read, fault_id):
    report = check(read)
    (failure,) = report.failures
    assert failure.oracle == "token-rewards"
    assert failure.fault_ids == (fault_id,), str(report)


def test_a_reward_of_a_response_without_tokens_is_noted():
    notes = [
        n for n in check(lambda r, m: r.sum()).notes if n.oracle == "token-rewards"
    ]
    assert len(notes) == 1 and "untrained token counts" in notes[0].about


def test_a_response_without_tokens_that_spoils_its_peers_is_noted():
    report = check(lambda r, m: (r[m] / m.sum()).sum() * m.sum() + 0 / m.sum())
    (noted,) = [n for n in report.notes if n.oracle == "token-rewards"]
    assert report and "its peers become NaN" in noted.about


def test_one_reward_per_response_is_not_asked():
    report = upref.check_advantages(upref.advantages.group_norm, "group_norm")
    assert report.oracles["token-rewards"] == "it takes no mask of tokens"


# ---- each trained token has the advantage of its response ----------------------------
def spread(over):
    """Return verl's interface to GRPO, with the advantages A [N, 1] of responses as
    over(A, mask [N, T]).
    """
    of_responses = estimator(lambda r, m: torch.where(m, r, 0).sum())

    def compute(token_level_rewards, response_mask, index):
        A, _ = of_responses(token_level_rewards, response_mask, index)
        A = A.gather(1, response_mask.int().argmax(1, keepdim=True))
        A = over(A, response_mask)
        return A, A

    return compute


def first_token_only(A, mask):
    return torch.where(mask & (mask.cumsum(1) == 1), A, 0)


def decaying(A, mask):
    return A * 0.5 ** (mask.cumsum(1) - 1) * mask


def up_to_a_hole(A, mask):
    """Give no advantage behind the first untrained slot."""
    is_unbroken = torch.where(mask.cumsum(1) > 0, mask, True).cumprod(1).bool()
    return torch.where(mask & is_unbroken, A, 0)


def nan_behind_the_first(A, mask):
    return torch.where(mask.cumsum(1) > 1, torch.nan, A)


@pytest.mark.parametrize(
    ("over", "oracle"),
    [
        (first_token_only, "values"),
        (decaying, "values"),
        (nan_behind_the_first, "values"),
        (up_to_a_hole, "token-rewards"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_token_with_another_advantage_than_the_first_is_a_failure(over, oracle):
    report = upref.check_advantages(spread(over), "group_norm")
    assert report.failures[0].oracle == oracle
    assert report.failures[0].fault_ids == ("advantages-of-tokens-differ",)


def test_one_advantage_on_all_tokens_is_right():
    assert upref.check_advantages(spread(lambda A, m: A * m), "group_norm")
    assert upref.check_advantages(
        spread(lambda A, m: torch.where(m, A, torch.nan)), "group_norm"
    )


def test_one_reward_per_response_is_tried_on_masks_with_holes():
    def compute(rewards, response_mask, group):
        A = upref.advantages.group_mean(rewards, group)
        return up_to_a_hole(A[:, None], response_mask)

    def refusing(rewards, response_mask, group):
        if (response_mask.diff(dim=1) & response_mask[:, 1:]).any():
            raise ValueError("a hole")
        A = upref.advantages.group_mean(rewards, group)
        return A[:, None] * response_mask

    (failure,) = upref.check_advantages(compute, "group_mean").failures
    assert failure.oracle == "token-rewards"
    assert failure.fault_ids == ("advantages-of-tokens-differ",)
    report = upref.check_advantages(refusing, "group_mean")
    assert report and "tool's tokens) are refused" in str(report)
