# SPDX-License-Identifier: Apache-2.0
"""Advantages of tokens and turns, by laws and by numbers worked out in the comments."""

import pytest
import torch

import upref
from upref import advantages, token_advantages as ta
from upref.errors import InputError

REWARDS = torch.tensor(
    [[0.0, 9.0, 9.0, 1.0], [0.5, 0.0, -1.0, 9.0]], dtype=torch.float64
)
MASK = torch.tensor([[True, False, False, True], [True, True, True, False]])
VALUES = torch.tensor([[0.3, 9.0, 9.0, 0.2], [0.1, 0.2, 0.3, 9.0]], dtype=torch.float64)
GROUP = torch.tensor([5, 5])
STATE = torch.tensor([[1, 0, 0, 2], [1, 2, 1, 0]])


def close(found, expected):
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_gae_by_hand():
    # row 0: 1 - 0.2 = 0.8; 0 + 0.9 * 0.2 - 0.3 + 0.72 * 0.8 = 0.456
    # row 1: -1 - 0.3 = -1.3; 0.9 * 0.3 - 0.2 - 0.72 * 1.3 = -0.866; 0.5 + 0.18 - 0.1 - 0.62352
    found = ta.gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.8)
    close(found, [[0.456, 0, 0, 0.8], [-0.04352, -0.866, -1.3, 0]])


def test_gae_has_its_two_ends():
    """λ = 1: the return less the value. λ = 0: the temporal difference."""
    returns = ta.discounted_returns(REWARDS, MASK, gamma=0.9)
    one = ta.gae(REWARDS, VALUES, MASK, gamma=0.9, lam=1.0)
    close(one, torch.where(MASK, returns - VALUES, 0).tolist())
    # 0.9 * 0.2 - 0.3; 1 - 0.2
    zero = ta.gae(REWARDS, VALUES, MASK, gamma=0.9, lam=0.0)
    close(zero[0], [-0.12, 0, 0, 0.8])


def test_a_bootstrap_is_the_value_behind_the_last_trained_slot():
    longer = torch.nn.functional.pad
    behind = torch.tensor([0.5, 0.25], dtype=torch.float64)
    found = ta.gae(REWARDS, VALUES, MASK, behind, gamma=0.9, lam=0.8)
    # the same as a slot more whose reward is its value
    rewards = torch.cat([torch.where(MASK, REWARDS, 0), behind[:, None]], 1)
    values = torch.cat([VALUES, behind[:, None]], 1)
    mask = longer(MASK, (0, 1), value=True)
    close(found, ta.gae(rewards, values, mask, gamma=0.9, lam=0.8)[:, :4].tolist())


@pytest.mark.parametrize("name", ta.TOKEN_ADVANTAGES)
def test_untrained_slots_are_neither_read_nor_answered(name):
    """NaN in untrained slots changes nothing, they get 0, and without them the
    advantages are the same (but where columns number the turns).
    """
    from upref.verify.formulas.token_faults import SETTINGS, compute
    from upref.verify.formulas.tokens import HOLES

    inputs = HOLES.inputs
    other = {
        role: torch.where(inputs["mask"], x, torch.nan)
        if x.shape == inputs["mask"].shape and x.is_floating_point()
        else x
        for role, x in inputs.items()
    }
    found = compute(name, other, SETTINGS[name])
    assert torch.equal(found, compute(name, inputs, SETTINGS[name]))
    assert not found[~inputs["mask"]].any()
    # without the untrained slots it is the same
    if not name.startswith("turn_index"):
        packed = compute(name, {**inputs, **_packed(inputs)}, SETTINGS[name])
        left = torch.arange(6) < inputs["mask"].sum(1, keepdim=True)
        torch.testing.assert_close(packed[left], found[inputs["mask"]])


def _packed(inputs):
    """Return the inputs with the trained slots of each response in front."""
    order = (~inputs["mask"]).int().argsort(dim=1, stable=True)
    return {r: x.gather(1, order) for r, x in inputs.items() if x.ndim == 2}


def test_one_turn_each_is_the_estimator_of_responses():
    """Find that with one turn the estimators of turns are `group_norm`, and GiGPO is 1
    + omega times it.
    """
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 1])
    one = torch.ones(4, 1, dtype=torch.bool)
    expected = advantages.group_norm(rewards, group).tolist()
    for name in ta.TOKEN_ADVANTAGES:
        if name.startswith("turn"):
            found = ta.get(name)(rewards[:, None], one, group, gamma=0.5)
            close(found[:, 0], expected)
    same_state = torch.zeros(4, 1, dtype=torch.int64)
    found = ta.gigpo(rewards[:, None], one, group, same_state, omega=0.5)
    close(found[:, 0], [1.5 * x for x in expected])


def test_the_two_orders_of_turns_by_hand():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    group = torch.zeros(2, dtype=torch.int64)
    # rewards 1, 0, 0, 0: mean 1/4, std 1/2 -> 1.5, -0.5; discounted by 1/2
    found = ta.turns_normalized_discounted(rewards, mask, group, gamma=0.5, eps=0.0)
    close(found, [[1.25, -0.5], [-0.75, -0.5]])
    # the returns are the rewards here, for the reward comes first
    found = ta.turns_discounted_normalized(rewards, mask, group, gamma=0.5, eps=0.0)
    close(found, [[1.5, -0.5], [-0.5, -0.5]])
    # the first turns are 1 and 0: ±1/√2; the second ones are equal: 0
    found = ta.turn_index_normalized_discounted(
        rewards, mask, group, gamma=0.5, eps=0.0
    )
    close(found, [[0.5**0.5, 0], [-(0.5**0.5), 0]])
    found = ta.turn_index_discounted_normalized(
        rewards, mask, group, gamma=0.5, eps=0.0
    )
    close(found, [[0.5**0.5, 0], [-(0.5**0.5), 0]])


def test_a_step_without_a_peer_has_no_step_part():
    found = ta.step_group_norm(REWARDS, MASK, GROUP, STATE, gamma=1.0, eps=0.0)
    # state 1: returns 1, -0.5 and -1; state 2: 1 and -1
    mean, std = -1 / 6, (13 / 12) ** 0.5
    close(found[0], [(1 - mean) / std, 0, 0, 0.5**0.5])
    other = ta.step_group_norm(REWARDS, MASK, torch.tensor([0, 1]), STATE)
    assert not other[0].any()


def test_a_response_without_a_trained_slot_enters_no_mean():
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    rewards = torch.cat([REWARDS, torch.full((1, 4), 7.0).double()])
    state = torch.cat([STATE, STATE[:1]])
    group = torch.tensor([5, 5, 5])
    found = ta.gigpo(rewards, mask, group, state)
    close(found[:2], ta.gigpo(REWARDS, MASK, GROUP, STATE).tolist())
    assert not found[2].any()


SHORT = torch.tensor([[True, False], [True, True], [True, True], [True, False]])
SCORES = torch.tensor([[3.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]]).double()
PROMPTS = torch.tensor([0, 0, 1, 1])


def test_baselines_of_responses_by_hand():
    # rewards 3, 1 of lengths 1, 2: (3 + 2) / 3; rewards 2, 2: no advantage
    third = 1 / 3
    expected = [[4 * third, 0], [-2 * third, -2 * third], [0, 0], [0, 0]]
    close(ta.opo(SCORES, SHORT, PROMPTS), expected)
    # the mean is 2; 2 of 4 responses have no gradient: 4 / 2
    close(ta.gpg(SCORES, SHORT, PROMPTS), [[2, 0], [-2, -2], [0, 0], [0, 0]])
    # the best exceeds the second best by 2
    close(ta.pass_at_k(SCORES, SHORT, PROMPTS), [[2, 0], [0, 0], [0, 0], [0, 0]])
    greedy = torch.tensor([1.0, 1.0, 0.5, 0.5]).double()
    expected = [[2, 0], [0, 0], [1.5, 0.5], [1.5, 0]]
    close(ta.remax(SCORES, greedy, SHORT), expected)


def test_tokens_that_were_certain_have_no_optimal_baseline():
    """Their gradient is 0, so that every weight of the baseline is."""
    certain = torch.zeros_like(SCORES)
    ones = torch.ones_like(SCORES)
    found = ta.optimal_token_baseline(SCORES, certain, ones, SHORT, PROMPTS)
    returns = ta.discounted_returns(SCORES, SHORT)
    assert torch.equal(found, returns)


def test_a_batch_without_a_trained_slot_is_refused_in_one_sentence():
    with pytest.raises(InputError, match="mask is False everywhere"):
        ta.discounted_returns_whitened(REWARDS, torch.zeros_like(MASK))


def test_the_optimal_token_baseline_by_hand():
    half = torch.full((4, 2), 0.5).double()
    # 1 - 2 * 0.5 + Σ π²: 0.5 and 1 of the first tokens, so that returns 3 and 1 have the
    # mean (0.5 * 3 + 1 * 1) / 1.5; of equal returns the mean is the return
    squares = torch.tensor([[0.5, 0.5], [1.0, 0.5], [0.5, 0.5], [0.5, 0.5]]).double()
    found = ta.optimal_token_baseline(SCORES, half.log(), squares, SHORT, PROMPTS)
    mean = 2.5 / 1.5
    # no other response of the prompt has a second token: nothing is subtracted there
    close(found, [[3 - mean, 0], [1 - mean, 1], [0, 1], [0, 0]])


def test_minillm_is_the_discounted_sum_of_differences():
    difference = torch.where(MASK, VALUES - REWARDS, 0)
    found = ta.minillm(REWARDS, VALUES, MASK, gamma=0.5)
    close(found, ta.discounted_returns(difference, MASK, gamma=0.5).tolist())
    normalized = ta.minillm_length_normalized(REWARDS, VALUES, MASK, gamma=0.5)
    # the weights of the three tokens of the second response are 1 + 1/2 + 1/4
    close(normalized[1, 0], found[1, 0].item() / 1.75)
    close(normalized[0, 3], found[0, 3].item())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ta.gae(REWARDS, VALUES[:1], MASK), "values must be float32"),
        (lambda: ta.gae(REWARDS, VALUES, MASK.double()), "mask must be a bool"),
        (lambda: ta.gae(REWARDS, VALUES, MASK, gamma=1.5), "gamma must be"),
        (lambda: ta.gae(REWARDS, VALUES, MASK, VALUES), "bootstrap must be 2"),
        (lambda: ta.gigpo(REWARDS, MASK, GROUP, STATE.double()), "state must be"),
        (lambda: ta.gigpo(REWARDS, MASK, GROUP.double(), STATE), "group must be"),
        (
            lambda: ta.discounted_returns(REWARDS / 0, MASK),
            r"rewards is inf at \(0, 3\)|rewards is nan at \(0, 0\)",
        ),
        (lambda: ta.get("gaee"), "did you mean 'gae'"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(upref.InputError, match=words):
        call()
