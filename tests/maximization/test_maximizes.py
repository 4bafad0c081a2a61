# SPDX-License-Identifier: Apache-2.0
"""What losses, advantage estimators and KL terms maximize on average."""

import math

import numpy as np
import pytest
import torch

import upref
from upref import InputError, advantages
from upref.cli import main
from upref.maximization import expected
from upref.maximization.functions import FUNCTIONS, MEAN_REWARD, Point, gradient
from upref.maximization.maximizes import (
    FUNCTIONS_OF_RATE,
    GROUP_SIZE,
    PASS_RATES,
    _at_pass_rate,
    _settings,
    maximizes,
)
from upref.maximization.policy import DIFFERENT_LENGTHS, ONE_LENGTH

BOTH = (ONE_LENGTH, DIFFERENT_LENGTHS)


# ---- the tiny policy -----------------------------------------------------------------
@pytest.mark.parametrize("responses", BOTH, ids=lambda r: r.words)
def test_the_responses_are_all_there_are(responses):
    z = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
    assert len(set(responses.tokens)) == 4
    assert responses.probabilities(z).sum().item() == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("responses", BOTH, ids=lambda r: r.words)
def test_slopes_are_derivatives_of_the_log_probabilities(responses):
    z = torch.tensor([0.3, -1.2, 0.8], dtype=torch.float64)
    by_autograd = torch.autograd.functional.jacobian(responses.log_probs, z)
    torch.testing.assert_close(responses.slopes(z), by_autograd)


def test_lengths_differ_where_they_should():
    assert ONE_LENGTH.lengths.tolist() == [2, 2, 2, 2]
    assert DIFFERENT_LENGTHS.lengths.tolist() == [1, 2, 3, 3]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_in_any_order_stand_for_all_orders(size):
    unordered = sum(map(expected.orders, expected.groups_of(4, size, ordered=False)))
    assert unordered == 4**size == len(list(expected.groups_of(4, size, ordered=True)))


# ---- known answers -------------------------------------------------------------------
MAXIMIZE_THE_MEAN_REWARD = {"rloo": 1, "dr_grpo": 2 / 3, "reinforce": 1}


@pytest.mark.parametrize("name", MAXIMIZE_THE_MEAN_REWARD)
def test_an_unbiased_loss_maximizes_the_mean_reward(name):
    answer = maximizes(name, group_size=3)
    assert answer
    for row in answer.answers:
        (term,) = row.terms
        assert term.function == FUNCTIONS[MEAN_REWARD].words
        assert term.times == pytest.approx(MAXIMIZE_THE_MEAN_REWARD[name], 1e-4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_self_inclusive_baseline_shortens_the_gradient(size):
    answer = maximizes("group_mean", kind="advantage", group_size=size)
    assert {row.terms[0].times for row in answer.answers} == {
        float(f"{(size - 1) / size:.5g}") if size == 3 else (size - 1) / size
    }


@pytest.mark.nightly
def test_lengths_are_why_grpo_has_no_function():
    kinds = {row.setting: row.kind for row in maximizes("grpo").answers}
    assert kinds["0 or 1", "one length"] == "pass rate"
    assert kinds["0 or 1", "different lengths"] == "no function"
    assert kinds["graded", "one length"] == "no function"


def test_reward_over_length_has_its_own_name():
    answer = maximizes("reinforce_pp", advantages="reward", group_size=2)
    assert [row.signed_functions for row in answer.answers] == [
        ((1, FUNCTIONS[MEAN_REWARD].words),),
        ((1, "the mean of reward / length"),),
    ] * 2


def test_maxrl_maximizes_a_truncated_logarithm():
    # MaxRL's own theorem (arXiv 2602.02710): the logarithm's series up to G - 1
    answer = maximizes("maxrl", kind="advantage", group_size=5)
    assert answer.answers[0].signed_functions == ((1, "Σ pass@k / k, k = 1 to 4"),)


def binomial_factor(p, G, deviation):
    """Return the factor of ∇p for (R - mean) / deviation(k), k right ones in a group of
    G.

    A right response has E[∇log π] = ∇p / p, a wrong one -∇p / (1 - p).
    """
    total = 0.0
    for k in range(1, G):
        probability = math.comb(G, k) * p**k * (1 - p) ** (G - k)
        spread = k * (G - k) / G**2
        total += probability * spread / (deviation(k, G) * p * (1 - p))
    return total


@pytest.mark.parametrize("size", [4, 6])
def test_the_factor_of_group_norm_is_a_sum_over_binomials(size):
    answer = maximizes("group_norm", kind="advantage", group_size=size).answers[0]
    assert answer.kind == "pass rate"

    def deviation(k, G):
        return math.sqrt(k * (G - k) / (G * (G - 1))) + 1e-6

    for p, factor in answer.factors.items():
        assert factor == pytest.approx(binomial_factor(p, size, deviation), rel=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_small_groups_have_one_deviation(size):
    answer = maximizes("group_norm", kind="advantage", group_size=size).answers[0]
    assert answer.kind == "functions"
    assert answer.signed_functions == ((1, FUNCTIONS[MEAN_REWARD].words),)


KL = {
    ("k1", "loss"): None,
    ("k1", "reward"): (-1, "KL(π ‖ π_ref) of responses"),
    ("k1", "advantage"): (-1, "KL(π ‖ π_ref) per prefix"),
    ("k2", "loss"): (-1, "KL(π ‖ π_ref) per prefix"),
    ("k3", "loss"): (-1, "KL(π_ref ‖ π) per prefix"),
}


@pytest.mark.parametrize(("name", "use"), KL)
def test_kl_terms(name, use):
    answer = maximizes(name, kind=f"kl-{use}")
    assert bool(answer) == (KL[name, use] is not None)
    for row in answer.answers:
        assert row.signed_functions == ((KL[name, use],) if KL[name, use] else ())


def test_a_kl_term_in_a_loss_is_found_with_its_coefficient():
    """Find that k2 in an on-policy loss is 0.1 times the KL divergence per prefix."""

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        k2 = (log_prob - ref_log_prob) ** 2 / 2
        J = (log_prob - old_log_prob).exp() * advantages - 0.1 * k2
        return -(J * mask).sum() / len(mask)

    answer = maximizes(loss, group_size=2)
    assert answer
    for row in answer.answers:
        found = {term.function: term.times for term in row.terms}
        assert found == {
            FUNCTIONS[MEAN_REWARD].words: 1,
            "KL(π ‖ π_ref) per prefix": -0.1,
        }


# ---- wrong ones ----------------------------------------------------------------------
def negated(rewards, group):
    return rewards.mean() - rewards


def of_the_next_row(rewards, group):
    return rewards.roll(-1) - rewards.mean()


def constant(rewards, group):
    return torch.ones_like(rewards)


def without_a_gradient_on_average(rewards, group):
    return rewards.sum() - 0 * rewards


def of_nobody(rewards, group):
    return rewards * 0 + torch.arange(len(rewards)).to(rewards)


WRONG = {
    negated: "lowers the mean reward",
    of_the_next_row: "lowers the mean reward",
    constant: "the expected gradient is 0",
    of_nobody: "the expected gradient is 0",
}


@pytest.mark.parametrize("estimator", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_estimator_fails(estimator):
    answer = maximizes(estimator, kind="advantage")
    assert not answer
    assert all(WRONG[estimator] in failure for failure in answer.failures)


def test_a_sum_in_place_of_a_mean_still_maximizes_the_mean_reward():
    answer = maximizes(without_a_gradient_on_average, kind="advantage")
    assert answer.headline.endswith("maximizes the mean reward")


def test_a_loss_with_the_wrong_sign_fails():
    def loss(log_prob, old_log_prob, advantages, mask):
        return ((log_prob - old_log_prob).exp() * advantages * mask).sum() / len(mask)

    answer = maximizes(loss, group_size=2)
    assert not answer
    assert answer.headline.endswith("minimizes the mean reward")
    assert "FAIL" in str(answer)


CLAMPED = {
    "rewards": lambda rewards, group: rewards.clamp(0, 1),
    "rewards of both signs": lambda rewards, group: advantages.leave_one_out(
        rewards.clamp(-1, 1), group
    ),
    "large advantages": lambda rewards, group: advantages.leave_one_out(
        rewards, group
    ).clamp(-8, 8),
    "small rewards": lambda rewards, group: torch.where(
        rewards.abs() < 0.25, 0, rewards
    ),
}


@pytest.mark.parametrize("estimator", CLAMPED.values(), ids=CLAMPED)
def test_a_clamp_of_graded_rewards_shows(estimator):
    """Such an estimator maximizes the mean of rewards that are 0 or 1, and not of other
    rewards.
    """
    answers = maximizes(estimator, kind="advantage").answers
    assert [row.kind == "functions" for row in answers] == [True, True, False, False]


def test_graded_rewards_have_both_signs_at_each_policy():
    graded = _settings()[-1].rewards
    assert (graded.min(1).values < -2).all() and (graded.max(1).values > 2).all()
    assert graded.abs().max() > 9 and graded.abs().min() < 0.2


@pytest.mark.parametrize("kind", ["advantage", "loss"])
def test_tokens_of_a_response_with_different_advantages_are_refused(kind):
    def first_token_only(token_level_rewards, response_mask, index):
        R = (token_level_rewards * response_mask).sum(1)
        A = torch.zeros_like(token_level_rewards)
        A[:, 0] = R - R.mean()
        return A

    with pytest.raises(InputError, match="tokens of a response different advantages"):
        if kind == "advantage":
            maximizes(first_token_only, kind=kind)
        else:
            maximizes("rloo", advantages=first_token_only)


def test_clamped_advantages_are_no_failure():
    def positive(rewards, group):
        return (rewards - rewards.mean()).clamp(min=0)

    answer = maximizes(positive, kind="advantage")
    assert answer
    assert {row.kind for row in answer.answers} == {"pass rate", "no function"}


def test_a_loss_that_reads_the_order_gets_each_order():
    def loss(log_prob, old_log_prob, advantages, mask):
        w = torch.arange(1, len(mask) + 1)[:, None]
        return -(w * log_prob * advantages * mask).sum()

    answer = maximizes(loss, group_size=2)
    assert answer.groups == 16
    assert answer.headline.endswith("maximizes the mean reward")


def test_a_loss_of_pairs_of_rows_gets_each_order():
    """The advantage of a row is half its reward minus half that of another response, so
    its expected gradient is half that of the mean reward. The reverse of a batch has the
    same gradient.
    """

    def by_pairs(batch):
        """Return the slope of a policy gradient whose pairs of rows are centered."""
        pairs = batch.adv.reshape(2, 2, -1)
        A = (pairs - pairs.mean(1, keepdim=True)).reshape(batch.adv.shape)
        return torch.where(batch.mask, A, 0) / len(A)

    reward = advantages.get("reward")
    for point in _settings()[-1].points():
        ordered = expected.depends_on_order(by_pairs, point, reward, 4)
        found = expected.of_loss(by_pairs, point, reward, 4, ordered=ordered).gradient
        torch.testing.assert_close(found, gradient(MEAN_REWARD, point) / 2)


BLOCKINGS = (  # of four rows, of six and of eight: the block of each row
    *("0011", "0101", "0110", "0001", "0100"),
    *("000111", "010101", "001122", "011110", "010000"),
    *("00001111", "01010101", "00112233", "01233210", "00000001"),
)


@pytest.mark.parametrize("blocks", BLOCKINGS)
def test_every_blocking_of_rows_is_found(blocks):
    block = torch.tensor([int(c) for c in blocks])
    same = (block[:, None] == block).double()

    def token_gradient(batch):
        """Return advantages from which the mean of their block is subtracted."""
        return batch.adv - same @ batch.adv / same.sum(1, keepdim=True)

    def centered_by_block(rewards, group):
        return rewards - same @ rewards / same.sum(1)

    size = len(blocks)
    point = _settings()[0].points()[0]
    reward = advantages.get("reward")
    assert expected.depends_on_order(token_gradient, point, reward, size)
    assert expected.is_order_read(centered_by_block, point.R, size)
    mean = advantages.get("group_mean")
    assert not expected.is_order_read(mean, point.R, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_a_small_group_are_compared(size):
    for group in expected.groups_of(4, size, ordered=False):
        found = {tuple(group[i] for i in o) for o in expected.reorderings(group)}
        assert len(found) == expected.orders(group) - 1


# ---- an independent recomputation ----------------------------------------------------
def group_std(R):
    return (R - R.mean(1, keepdims=True)) / (R.std(1, ddof=1, keepdims=True) + 1e-6)


def leave_one_out(R):
    return R - (R.sum(1, keepdims=True) - R) / (R.shape[1] - 1)


def centered(R):
    return R - R.mean(1, keepdims=True)


SAMPLED = {  # objective: its advantages, and the weight of a token of length L
    "rloo": (leave_one_out, lambda L: np.ones_like(L) / L.shape[1]),
    "dr_grpo": (centered, lambda L: np.ones_like(L) / L.shape[1]),
    "grpo": (group_std, lambda L: 1 / L / L.shape[1]),
    "dapo": (group_std, lambda L: np.ones_like(L) / L.sum(1, keepdims=True)),
    "up_grpo": (group_std, lambda L: 1 / L / L.shape[1]),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_agrees(name):
    """200,000 sampled groups, with scores and advantages by hand, have the exact
    expected gradient within five standard errors.
    """
    advantage_of, weight_of = SAMPLED[name]
    point = _settings()[-1].points()[1]
    rng = np.random.default_rng(7)
    z = point.z.numpy()
    lengths = np.array([1, 2, 3, 3])
    go_on = 1 / (1 + np.exp(-z))
    P = np.array(
        [
            1 - go_on[0],
            go_on[0] * (1 - go_on[1]),
            go_on[0] * go_on[1] * (1 - go_on[2]),
            go_on.prod(),
        ]
    )
    # d log P(o) / dz of each response, by hand
    score = np.array(
        [
            [-go_on[0], 0, 0],
            [1 - go_on[0], -go_on[1], 0],
            [1 - go_on[0], 1 - go_on[1], -go_on[2]],
            [1 - go_on[0], 1 - go_on[1], 1 - go_on[2]],
        ]
    )
    groups = rng.choice(4, size=(200_000, GROUP_SIZE), p=P)
    weight = advantage_of(point.R.numpy()[groups]) * weight_of(lengths[groups])
    gradients = np.einsum("ng,ngk->nk", weight, score[groups])
    objective = upref.get(name)
    found = expected.of_loss(
        lambda batch: _gradient_of(objective, batch),
        point,
        advantages.get(objective.adv),
        GROUP_SIZE,
    )
    error = gradients.std(0) / math.sqrt(len(gradients))
    assert np.all(np.abs(gradients.mean(0) - found.gradient.numpy()) < 5 * error)
    assert np.all(error < 0.02 * np.linalg.norm(found.gradient.numpy()))


def _gradient_of(objective, batch):
    lp = batch.logp.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(batch.but(logp=lp)), lp)
    return slope


@pytest.mark.parametrize("p", PASS_RATES)
def test_the_pass_rate_is_set_exactly(p):
    point = _at_pass_rate(_settings()[1].points()[0], p)
    assert float((point.responses.probabilities(point.z) * point.R).sum()) == (
        pytest.approx(p, abs=1e-12)
    )


def pass_at(k, p):
    """Return pass@k at the pass rate p."""
    return 1 - (1 - p) ** k


def harmonic_pass_at(most, p):
    """Return Σ pass@k / k for k from 1 to `most`."""
    return sum(pass_at(k, p) / k for k in range(1, most + 1))


def function_of_rate(id, p):
    """Return the function of this id at the pass rate p, by its own formula."""
    if id == "log":
        return math.log(p)
    if id == "log-odds":
        return math.log(p / (1 - p))
    if id == "arcsine":
        return 2 * math.asin(math.sqrt(p))
    family, _, k = id.rpartition("-")
    formulas = {"pass-at": pass_at, "harmonic-pass-at": harmonic_pass_at}
    return formulas[family](int(k), p)


@pytest.mark.parametrize("id", FUNCTIONS_OF_RATE)
def test_a_factor_is_the_derivative_of_its_function(id):
    h = 1e-6
    slope = (function_of_rate(id, 0.3 + h) - function_of_rate(id, 0.3 - h)) / (2 * h)
    assert FUNCTIONS_OF_RATE[id].derivative(0.3) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("id", FUNCTIONS_OF_RATE)
def test_the_words_of_a_function_of_the_pass_rate_are_its_own(id):
    words = FUNCTIONS_OF_RATE[id].words
    of_another = {other.words for k, other in FUNCTIONS_OF_RATE.items() if k != id}
    assert words not in of_another
    family, _, k = id.rpartition("-")
    if family == "pass-at":
        assert words == f"pass@{k}"
    if family == "harmonic-pass-at":
        assert words == f"Σ pass@k / k, k = 1 to {k}"


@pytest.mark.parametrize("id", FUNCTIONS)
def test_a_function_has_a_gradient_somewhere(id):
    point = _settings()[-1].points()[0]
    assert isinstance(point, Point)
    assert gradient(id, point).norm() > 1e-3


# ---- input ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "losses"}, "kind must be one of"),
        ({"group_size": 1}, "from 2 to 8"),
        ({"group_size": True}, "from 2 to 8"),
        ({"kind": "advantage", "advantages": "reward"}, "leave them out"),
        ({"kind": "kl-loss", "beta": 1}, "no setting"),
        ({"advantages": "no_such"}, "no_such"),
        ({"eps_hgh": 1}, "eps_hgh"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_bad_input_is_one_sentence(arguments, words):
    name = {"advantage": "reward", "kl-loss": "k1"}.get(arguments.get("kind"), "dapo")
    with pytest.raises(InputError, match=words):
        maximizes(name, **arguments)


def test_a_random_loss_is_refused():
    def loss(log_prob, old_log_prob, advantages, mask):
        return -(log_prob * advantages * mask * torch.rand(())).sum()

    with pytest.raises(InputError, match="two gradients"):
        maximizes(loss)


def test_rewards_that_an_estimator_refuses_are_left_out():
    answer = maximizes("signed", kind="advantage")
    assert answer
    assert len(answer.answers) == 2
    assert "graded" in answer.left_out[0]


def test_a_loss_runs_with_the_rewards_that_its_estimator_takes():
    answer = maximizes("w_reinforce", group_size=2)
    assert len(answer.answers) == 2
    assert "graded" in answer.left_out[0]


def test_the_command(tmp_path, capsys):
    file = tmp_path / "my.py"
    file.write_text(
        "def k(lp, ref_lp):\n    return lp - ref_lp\n\n"
        "def loss(log_prob, old_log_prob, advantages, mask):\n"
        "    return -(log_prob * advantages * mask).sum() / len(mask)\n",
        encoding="utf-8",
    )
    assert main(["maximizes", f"{file}:k", "--as-kl", "loss"]) == 1
    assert "maximizes nothing" in capsys.readouterr().out
    assert main(["maximizes", f"{file}:loss", "--group-size", "2"]) == 0
    assert "maximizes the mean reward" in capsys.readouterr().out
    assert main(["maximizes", "k4", "--as-kl", "loss"]) == 2
    assert "no KL estimator" in capsys.readouterr().err


def test_the_json_has_the_numbers():
    data = maximizes("leave_one_out", kind="advantage", group_size=2).data()
    assert data["ok"]
    assert data["answers"][0]["terms"] == (
        {"times": 1.0, "function": FUNCTIONS[MEAN_REWARD].words},
    )
