# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages` of tokens and turns, on functions that are right and wrong."""

import functools
import inspect

import pytest
import torch

import upref
from tests.support.cases import tokens
from upref import token_advantages
from upref.verify.advantages.oracles import ORACLES as OF_RESPONSES
from upref.verify.formulas.token_faults import SETTINGS
from upref.verify.formulas.tokens import ORACLES as OF_TOKENS


def name(value):
    return getattr(value, "__name__", None) or getattr(
        getattr(value, "func", None), "__name__", None
    )


@pytest.mark.parametrize(("fn", "estimator", "hp"), tokens.RIGHT, ids=name)
def test_a_right_function_is_accepted(fn, estimator, hp):
    report = upref.check_advantages(fn, estimator, **hp)
    assert report, str(report)


@pytest.mark.parametrize(("fn", "estimator", "fault_id"), tokens.WRONG, ids=name)
def test_a_wrong_function_fails_with_its_cause(fn, estimator, fault_id):
    report = upref.check_advantages(fn, estimator)
    assert not report
    assert report.failures[0].fault_ids == (fault_id,), str(report)


@pytest.mark.parametrize("estimator", token_advantages.TOKEN_ADVANTAGES)
def test_the_reference_is_accepted(estimator):
    reference = token_advantages.get(estimator)

    @functools.wraps(reference)
    def renamed(*args, **kwargs):
        return reference(*args, **kwargs)

    if estimator == "distillation":  # its arguments have other names

        def renamed(log_prob, teacher_log_prob, mask, advantages, coef):
            return reference(log_prob, teacher_log_prob, mask, advantages, coef=coef)

    assert upref.check_advantages(renamed, estimator)
    assert set(SETTINGS) == set(token_advantages.TOKEN_ADVANTAGES)


@pytest.mark.parametrize("estimator", token_advantages.TOKEN_ADVANTAGES)
def test_the_reference_without_a_mask_is_accepted(estimator):
    if estimator == "distillation":  # its arguments have other names
        return
    reference = token_advantages.get(estimator)
    signature = inspect.signature(reference)
    others = [p for p in signature.parameters.values() if p.name != "mask"]

    def of_full_responses(**given):
        slots = given["log_prob"] if "log_prob" in given else given["rewards"]
        return reference(mask=torch.ones_like(slots, dtype=torch.bool), **given)

    of_full_responses.__signature__ = signature.replace(parameters=others)
    report = upref.check_advantages(of_full_responses, estimator)
    assert report, str(report)
    assert report.oracles["groups"] == "ok"


def blocks_for_prompts(rewards, group, gamma, eps=1e-6):
    """Return turns that are normalized, then discounted. Prompts are taken for blocks of
    equally many rows.
    """
    x = rewards.view(len(group.unique()), -1)
    A = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + eps)
    every = torch.ones_like(rewards, dtype=torch.bool)
    return tokens.returns_by_matrix(A.view_as(rewards), every, gamma)


def nan_for_equal_rewards(rewards, group, gamma):
    """Return turns that are normalized without a guard, then discounted."""
    A = torch.zeros_like(rewards)
    for prompt in group.unique():
        x = rewards[group == prompt]
        A[group == prompt] = (x - x.mean()) / x.std()
    every = torch.ones_like(rewards, dtype=torch.bool)
    return tokens.returns_by_matrix(A, every, gamma)


def gpg_without_factor(rewards, group):
    R = rewards.sum(1)
    same = (group[:, None] == group).to(R.dtype)
    A = R - same @ R / same.sum(1)
    return A[:, None].expand_as(rewards)


@pytest.mark.parametrize(
    ("fn", "estimator", "oracle"),
    [
        (blocks_for_prompts, "turns_normalized_discounted", "groups"),
        (nan_for_equal_rewards, "turns_normalized_discounted", "equal-rewards"),
        (gpg_without_factor, "gpg", "equal-rewards"),
    ],
    ids=name,
)
def test_a_function_without_a_mask_is_tried_on_prompts(fn, estimator, oracle):
    (failure,) = upref.check_advantages(fn, estimator).failures
    assert failure.oracle == oracle


def test_equal_rewards_are_not_said_to_be_tried_where_they_are_not():
    report = upref.check_advantages(tokens.gae_of_lists, "gae")
    assert "no batch of equal rewards" in report.oracles["equal-rewards"]


def test_settings_are_found_or_held_to():
    report = upref.check_advantages(tokens.gae_fixed, "gae")
    assert report.hp == {"gamma": 0.97, "lam": 0.9}
    assert not upref.check_advantages(tokens.gae_fixed, "gae", gamma=0.9)
    assert upref.check_advantages(tokens.gae_of_lists, "gae", gamma=0.5, lam=0.25)


def test_an_unknown_name_is_an_error_and_no_position():
    def unknown(rewards, foo, mask):
        return rewards * foo

    with pytest.raises(upref.InputError, match="what is foo") as error:
        upref.check_advantages(unknown, "discounted_returns")
    assert "names alone" in str(error.value)
    with pytest.raises(upref.InputError, match="no argument is called values"):
        upref.check_advantages(tokens.to_go, "gae")

    def twice(rewards, scores, mask):
        return rewards

    with pytest.raises(upref.InputError, match="rewards and scores both mean rewards"):
        upref.check_advantages(twice, "discounted_returns")


def test_an_exception_says_what_was_passed():
    def breaks(rewards, values, mask, gamma, lam):
        return rewards[:, 99]

    with pytest.raises(upref.InputError) as error:
        upref.check_advantages(breaks, "gae")
    assert "rewards = float64[6, 5]" in str(error.value)
    assert "gamma = 0.9" in str(error.value)


def test_a_reward_behind_the_last_trained_slot_is_counted_dropped_or_wrong():
    """To count it is right, to drop it is a note, and to let it decay is wrong."""

    def moved(rewards, mask, gamma):
        """Return the returns, with the rewards of untrained slots moved to the trained
        slot in front of them.
        """
        rewards = rewards.clone()
        for k in reversed(range(1, rewards.shape[1])):
            is_left_out = ~mask[:, k]
            rewards[is_left_out, k - 1] += rewards[is_left_out, k]
        return tokens.returns_by_matrix(rewards, mask, gamma)

    def decays(rewards, mask, gamma):
        """Return the returns; only trained slots discount, but a reward behind the last
        one decays once.
        """
        total, out = torch.zeros(len(rewards), dtype=rewards.dtype), rewards.clone()
        for k in reversed(range(rewards.shape[1])):
            m = mask[:, k]
            total = torch.where(m, rewards[:, k] + gamma * total, total + rewards[:, k])
            out[:, k] = total
        return out * mask

    report = upref.check_advantages(moved, "discounted_returns")
    assert report and not report.notes, str(report)
    (dropped,) = upref.check_advantages(tokens.gae_of_lists, "gae").notes
    assert dropped.oracle == "untrained-rewards"
    (found,) = upref.check_advantages(decays, "discounted_returns").failures
    assert found.oracle == "untrained-rewards" and "it decays" in found.cause


def test_the_command_takes_them(capsys, tmp_path):
    from upref.cli import main

    file = tmp_path / "adv.py"
    file.write_text(
        "import torch\n\n\ndef wrong(rewards, mask, gamma):\n    return (rewards * mask).cumsum(1) * mask\n",
        encoding="utf-8",
    )
    assert main(["check", f"{file}:wrong", "--as-advantage", "discounted_returns"]) == 1
    assert "NOT discounted_returns" in capsys.readouterr().out
    assert main(["check", f"{file}:wrong", "--as-advantage", "gaee"]) == 2
    assert "did you mean 'gae'" in capsys.readouterr().err


def turns_with_absent_ones(rewards, group, mask, eps=1e-6):
    """Return the advantages of turns, in which a turn that a response does not have
    counts as a reward of 0. A prompt of one response has no deviation: NaN.
    """
    to_go = (rewards * mask).flip(1).cumsum(1).flip(1)
    A = torch.zeros_like(to_go)
    for prompt in group.unique():
        rows = group == prompt
        x = to_go[rows]
        A[rows] = (x - x.mean(0)) / (x.std(0) + eps)
    return A * mask


def test_the_example_shows_the_fault_that_the_report_names():
    report = upref.check_advantages(
        turns_with_absent_ones, "turn_index_discounted_normalized", gamma=1.0
    )
    first = report.failures[0]
    assert "a turn that a response does not have" in str(first.cause)
    assert "nan" not in str(first.example)
    assert first.example.inputs["mask"].count([False]) == 1


def test_a_wrong_function_is_told_at_which_settings_it_was_compared():
    def own_reward_discounted(rewards, mask):
        return 0.5 * token_advantages.discounted_returns(rewards, mask, gamma=0.5) ** 2

    report = upref.check_advantages(own_reward_discounted, "discounted_returns")
    assert not report and report.guessed == ("gamma",)
    assert "give yours with --hp gamma=VALUE" in str(report)
    assert "float32" not in str([a for a in report.assumptions if "right" in a])
    assert not upref.check_advantages(
        own_reward_discounted, "discounted_returns", gamma=0.5
    ).guessed


def test_returns_have_no_value_behind_the_last_slot():
    def with_bootstrap(rewards, mask, bootstrap, gamma=1.0):
        last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
        here = torch.arange(mask.shape[1]) == last[:, None]
        r = rewards + torch.where(here, gamma * bootstrap[:, None], 0)
        return token_advantages.discounted_returns(r, mask, gamma=gamma)

    report = upref.check_advantages(with_bootstrap, "discounted_returns")
    assert report, str(report)
    assert "which discounted_returns does not have: they are 0" in str(report)


@pytest.mark.parametrize("is_detached", [True, False])
def test_a_gradient_through_the_advantages_of_a_teacher_is_a_note(is_detached):
    def advantages(log_prob, teacher_log_prob, mask):
        A = (teacher_log_prob - log_prob) * mask
        return A.detach() if is_detached else A

    report = upref.check_advantages(advantages, "distillation")
    assert report
    assert ("stop-gradient" in str(report)) is not is_detached


def test_outputs_beside_the_advantages_are_called_unchecked():
    """Return a second output, and find it called unchecked only then."""

    def with_targets(rewards, values, mask, gamma=1.0, lam=0.95):
        A = token_advantages.gae(rewards, values, mask, gamma=gamma, lam=lam)
        return A, A - values

    skip = [o.name for o in OF_TOKENS if o.name != "determinism"]
    said = upref.check_advantages(with_targets, "gae", skip=skip).not_checked
    assert said[0] == "its second output"

    def alone(rewards, values, mask, gamma=1.0, lam=0.95):
        return with_targets(rewards, values, mask, gamma, lam)[0]

    said = upref.check_advantages(alone, "gae", skip=skip).not_checked
    assert "its second output" not in said


def test_outputs_beside_the_advantages_of_responses_are_called_unchecked():
    def of_groups(rewards, group):
        A = upref.advantages.group_mean(rewards, group)
        return {"advantages": A, "returns": rewards}

    skip = [o.name for o in OF_RESPONSES if o.name != "determinism"]
    said = upref.check_advantages(of_groups, "group_mean", skip=skip).not_checked
    assert said[0] == "what else it returns, 'returns'"
