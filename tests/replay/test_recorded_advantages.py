# SPDX-License-Identifier: Apache-2.0
"""Estimator and grouping are named from rewards and advantages."""

import re

import pytest
import torch

from upref import advantages as estimators
from upref.replay import advantages, make_batch
from upref.replay.advantages import _whiten
from upref.replay.schema import PROMPTS_READ

B, G, T = 32, 8, 6
generator = torch.Generator().manual_seed(0)
REWARD = torch.rand(B, generator=generator, dtype=torch.float64).round(decimals=2)
GROUP = torch.arange(B) // G
MASK = torch.rand(B, T, generator=generator) < 0.8
MASK[:, 0] = True


def batch(adv, dtype=torch.float32, **more):
    """Return a recorded batch with these advantages, [B] or [B, T]; `more` replaces
    columns, None removes one.
    """
    adv = adv if adv.ndim == 2 else adv[:, None].expand(B, T)
    fields = {
        "ids": torch.ones(B, T).long(),
        "mask": MASK,
        "adv": adv.to(dtype),
        "reward": REWARD,
        "group": GROUP,
    }
    return make_batch(
        {k: v for k, v in (fields | more).items() if v is not None}, file="f"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["group_norm", "group_mean", "leave_one_out", "group_mean_whiten"]
)
def test_an_estimator_over_the_prompts_is_named(name, dtype):
    found = advantages(batch(estimators.get(name)(REWARD, GROUP), dtype))
    assert found and not found.notes
    assert found.estimator.startswith(name) and found.grouping == "each prompt"


def test_advantages_over_mixed_prompts_fail():
    found = advantages(batch(estimators.group_norm(REWARD, torch.arange(B) // 16)))
    assert not found and found.failures[0].cause == "wrong_grouping"
    assert "16 consecutive rows" in str(found.failures[0])


RIGHT = estimators.group_norm(REWARD, GROUP)


@pytest.mark.parametrize(
    ("adv", "cause", "words"),
    [
        (-RIGHT, "negated_advantages", "minus group_norm(ddof=1, eps=1e-06)"),
        (RIGHT.roll(-1), "moved_advantages", "of the row 1 behind."),
        (RIGHT.roll(1), "moved_advantages", "of the row 1 before."),
        (RIGHT.roll(G), "moved_advantages", "of the row 8 before, which is of another"),
        (
            RIGHT.view(-1, G).roll(-1, 1).flatten(),
            "moved_advantages",
            "of the row 1 behind, within each prompt.",
        ),
        (RIGHT.view(-1, G).T.flatten(), "moved_advantages", "a 4 x 8 table"),
        (RIGHT.view(G, -1).T.flatten(), "moved_advantages", "a 8 x 4 table"),
        (RIGHT.flip(0), "moved_advantages", "of the rows in reverse order."),
        (REWARD.roll(1), "moved_advantages", "are reward of no group, exactly"),
    ],
)
def test_what_can_be_undone_exactly_fails_with_its_name(adv, cause, words):
    found = advantages(batch(adv))
    assert [f.cause for f in found.failures] == [cause]
    assert words in str(found.failures[0])


def test_advantages_in_any_other_order_fail():
    generator = torch.Generator().manual_seed(0)
    reward = torch.rand(B, generator=generator, dtype=torch.float64)
    right = estimators.group_norm(reward, GROUP)
    order = torch.randperm(B, generator=generator)
    shuffled = batch(right[order], reward=reward)
    assert [f.cause for f in advantages(shuffled).failures] == ["shuffled_advantages"]
    two_sizes = batch(torch.sign(right)[order], reward=torch.sign(right))
    assert not advantages(two_sizes).failures


def test_advantages_that_are_0_on_some_responses_are_named():
    """Those that were cut off at the longest length, for example."""
    cut_off = torch.arange(B) % 3 == 0
    found = advantages(batch(RIGHT.masked_fill(cut_off, 0.0)))
    assert found and [f.cause for f in found.notes] == ["masked_advantages"]
    kept = int((~cut_off | (RIGHT == 0)).sum())
    assert f"on {kept} of {B} responses" in str(found.notes[0])


def test_advantages_over_rows_at_one_distance_fail():
    strided = estimators.group_norm(REWARD, torch.arange(B) % 4)
    (finding,) = advantages(batch(strided)).failures
    assert finding.cause == "wrong_grouping" and "rows that stand 4 apart" in str(
        finding
    )


def test_a_multiple_is_named_and_accuses_nobody():
    """The weights of a sum of rewards give it as well."""
    found = advantages(batch(2 * RIGHT))
    assert found and [f.cause for f in found.notes] == ["multiple_advantages"]
    assert "2 times group_norm" in str(found.notes[0])


def test_few_advantages_in_another_order_accuse_nobody():
    """Of one prompt, whose rewards are 0 and 1: the other order is a matter of chance."""
    reward = torch.tensor([1.0, 0.0] * 4, dtype=torch.float64)
    columns = {"ids": torch.ones(8, T).long(), "mask": MASK[:8], "reward": reward}
    columns |= {"group": torch.zeros(8).long()}
    adv = estimators.group_norm(reward.roll(1), columns["group"])
    found = advantages(make_batch(columns | {"adv": adv}, file="f"))
    assert found and [f.cause for f in found.notes] == ["no_estimator"]


def test_advantages_that_are_whitened_without_a_mask_of_tokens():
    """The lengths alone give what the tokens give."""
    A = estimators.group_mean(REWARD, GROUP)
    tokens = estimators.whiten_tokens(A[:, None].expand(B, T).contiguous(), MASK)
    _, of_lengths = _whiten(A, MASK.sum(1))
    first = MASK.int().argmax(1)
    torch.testing.assert_close(of_lengths, tokens[torch.arange(B), first])


def test_a_fixed_baseline_is_no_grouping():
    """Runs of eight rows have the mean 0.5 by chance, and mix two prompts each."""
    reward = torch.tensor([1.0, 0.0]).repeat_interleave(4).repeat(B // 8)
    found = advantages(batch(reward - 0.5, reward=reward, group=torch.arange(B) // 4))
    assert found and [f.cause for f in found.notes] == ["fixed_baseline"]


def test_interleaved_prompts_show_a_stride():
    """Rows of one prompt stand eight apart, and the estimator takes eight neighbours."""
    found = advantages(
        batch(estimators.group_norm(REWARD, GROUP), group=torch.arange(B) % (B // G))
    )
    assert [f.cause for f in found.failures] == ["wrong_grouping"]


def test_groups_that_were_read_off_varied_prompts_accuse_nobody():
    """An agent's first prompt differs between the responses of a group."""
    varied = GROUP * 100 + torch.arange(B) % 3
    columns = {
        "ids": torch.ones(B, T).long(),
        "mask": MASK,
        "reward": REWARD,
        "group": varied,
    }
    columns["adv"] = estimators.group_norm(REWARD, GROUP)
    found = advantages(
        make_batch(columns, file="f", meta={PROMPTS_READ: "equal prompts"})
    )
    assert found and [f.cause for f in found.notes] == ["wrong_grouping"]


def test_groups_within_a_prompt_are_a_note():
    found = advantages(batch(estimators.group_norm(REWARD, torch.arange(B) // 4)))
    assert found and [f.cause for f in found.notes] == ["subgroups"]


def test_the_whole_batch_is_a_note():
    found = advantages(batch(estimators.whiten(REWARD)))
    assert found and [f.cause for f in found.notes] == ["whole_batch"]


def test_without_groups_any_grouping_is_fine():
    found = advantages(
        batch(estimators.group_norm(REWARD, torch.arange(B) // 4), group=None)
    )
    assert found and found.grouping == "4 consecutive rows" and not found.findings


def test_advantages_whitened_over_tokens_are_named():
    A = estimators.group_mean(REWARD, GROUP)[:, None].expand(B, T).contiguous()
    found = advantages(batch(estimators.whiten_tokens(A, MASK)))
    assert found.estimator == "group_mean, whitened over tokens"
    n = int(MASK.sum())  # OpenRLHF divides the variance by n, not n - 1
    by_n = estimators.whiten_tokens(A, MASK) * (n / (n - 1)) ** 0.5
    assert advantages(batch(by_n)).estimator.endswith("over tokens (ddof=0)")


def test_unknown_advantages_are_a_note_and_no_failure():
    found = advantages(batch(estimators.group_norm(REWARD, GROUP).clamp(-0.5, 0.5)))
    assert found and [f.cause for f in found.notes] == ["no_estimator"]
    found = advantages(batch(torch.rand(B, T, generator=generator)))
    assert found and [f.cause for f in found.notes] == ["per_token"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"although the rewards of \d+ of \d+ prompts differ"),
        ({"reward": torch.ones(B)}, "all rewards are 1"),
        ({"reward": GROUP.double()}, "the rewards of each prompt are equal"),
        ({"group": torch.arange(B)}, "each prompt has one response"),
        ({"group": None}, "although the rewards differ"),
    ],
)
def test_advantages_of_zero_are_a_note_that_says_why(changes, words):
    (found,) = advantages(batch(torch.zeros(B), **changes)).notes
    assert found.cause == "no_signal" and re.search(words, str(found)), found


def test_groups_that_a_mini_batch_cuts_are_told():
    """Three responses of one prompt, five of the other: advantages are of the whole
    groups.
    """
    rows = torch.cat([torch.arange(3), torch.arange(G, G + 5)])
    adv = estimators.group_norm(REWARD, GROUP)[rows]
    fields = {
        "ids": torch.ones(8, T).long(),
        "mask": MASK[rows],
        "adv": adv,
        "reward": REWARD[rows],
    }
    found = advantages(make_batch(fields | {"group": GROUP[rows]}, file="f"))
    assert (
        found
        and [f.cause for f in found.notes] == ["split_groups"]
        and "from 3 to 5" in str(found.notes[0])
    )


@pytest.mark.parametrize(("lone", "is_noted"), [(1.0, True), (0.0, False)])
def test_prompts_that_lost_the_reward_that_differed_are_noted(lone, is_noted):
    """Of the third and the fourth prompt the first response is missing; where the next
    one has another reward too, a part of the difference is left.
    """
    reward = REWARD.clone()
    reward[2 * G :] = 1.0
    reward[[2 * G + 1, 3 * G + 1]] = lone
    rows = torch.tensor([n for n in range(B) if n not in (2 * G, 3 * G)])
    fields = {
        "ids": torch.ones(len(rows), T).long(),
        "mask": MASK[rows],
        "adv": estimators.leave_one_out(reward[rows], GROUP[rows]),
        "reward": reward[rows],
        "group": GROUP[rows],
    }
    found = advantages(make_batch(fields, file="f"))
    assert found.estimator.startswith("leave_one_out")
    causes = [note.cause for note in found.notes]
    assert causes == (["rests_of_prompts"] if is_noted else [])
    assert not is_noted or "2 of 4 prompts" in str(found.notes[0])


def test_the_standard_deviation_of_all_rewards_is_named():
    """Advantages that are centered by prompt and divided by the deviation of all
    rewards are named with ddof and eps.
    """
    reward = torch.randn(
        32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    groups = reward.view(8, 4)
    adv = ((groups - groups.mean(1, keepdim=True)) / (reward.std() + 1e-4)).flatten()
    found = advantages(
        make_batch(
            {
                "ids": torch.ones(32, 3).long(),
                "mask": torch.ones(32, 3),
                "adv": adv.float(),
                "reward": reward,
                "group": torch.arange(32) // 4,
            },
            file="f",
        )
    )
    assert (
        found.estimator
        == "group_mean over the standard deviation of all rewards (ddof=1, eps=0.0001)"
    )
    assert (found.grouping, found.findings) == ("each prompt", ())
