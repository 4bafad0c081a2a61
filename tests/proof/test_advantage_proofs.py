# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators, proved for every reward: right ones are, wrong ones are not, and no
right one is said to differ.
"""

import pytest
import torch

import upref
from tests.support.cases.estimators import by_group, std
from tests.support.daily import daily
from upref import InputError
from upref.cli import main
from upref.verify.advantages.proof import prove_advantages


def normed(r, ddof=1, eps=1e-6):
    return (r - r.mean()) / (std(r, ddof) + eps)


# ---- right ones ------------------------------------------------------------------------
def a_loop(rewards, group):
    return by_group(rewards, group, normed)


def squares_less_square(rewards, group):
    """Return group_norm's advantages with the variance as the mean of squares less the
    square of the mean.
    """

    def of(r):
        variance = (r * r).mean() - r.mean() ** 2
        return (r - r.mean()) / (variance.clamp(min=0).sqrt() + 1e-6)

    return by_group(rewards, group, of)


def scattered(rewards, group):
    """Return group_mean's advantages by scatter_reduce."""
    ids, g, _ = group.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(ids), dtype=rewards.dtype).scatter_reduce(
        0, g, rewards, "mean", include_self=False
    )
    return rewards - mean[g]


def others(rewards, group):
    same = (group[:, None] == group).to(rewards)
    n = same.sum(1)
    baseline = (same @ rewards - rewards) / (n - 1).clamp(min=1)
    return torch.where(n > 1, rewards - baseline, 0)


def whitened(rewards):
    return (rewards - rewards.mean()) / (rewards.var(correction=0).sqrt() + 1e-8)


def two_steps(rewards, group):
    x = by_group(rewards, group, lambda r: r - r.mean())
    return x / (x.std(correction=0) + 1e-8)


def over_mean(rewards, group):
    """Return the rewards less their prompt's mean, over that mean; 0 where it is not
    positive.
    """

    def of(r):
        m = r.mean()
        return (r - m) / m if m > 0 else 0 * r

    return by_group(rewards, group, of)


def signs(rewards):
    return 2.0 * (rewards > 0) - 1.0


def of_tokens(token_level_rewards, response_mask, index):
    """Return group_mean's advantages for each token, with verl's arguments."""
    scores = token_level_rewards.sum(-1)
    groups = {}
    for i, prompt in enumerate(index):
        groups.setdefault(prompt, []).append(scores[i])
    baselines = {p: torch.stack(found).mean() for p, found in groups.items()}
    out = torch.stack([x - baselines[p] for x, p in zip(scores, index, strict=True)])
    return out.unsqueeze(-1) * response_mask


RIGHT = [
    (a_loop, "group_norm", {}),
    (squares_less_square, "group_norm", {"ddof": 0}),
    (scattered, "group_mean", {}),
    (others, "leave_one_out", {}),
    (whitened, "whiten", {}),
    (two_steps, "group_mean_whiten", {}),
    (over_mean, "maxrl", {}),
    (signs, "signed", {}),
    (of_tokens, "group_mean", {}),
]


@pytest.mark.parametrize(
    ("fn", "name", "hp"), daily(RIGHT, 3), ids=lambda x: getattr(x, "__name__", None)
)
def test_a_right_one_is_proved(fn, name, hp):
    proof = prove_advantages(fn, name, responses=3, **hp)
    assert proof, proof
    assert not proof.bounds
    words = "for rewards of 0 and 1" if name == "signed" else "for every reward"
    assert words in str(proof)


# ---- wrong ones ------------------------------------------------------------------------
def wrong_ddof(rewards, group):
    return by_group(rewards, group, lambda r: normed(r, 0))


def eps_under_the_root(rewards, group):
    def of(r):
        return (r - r.mean()) / (std(r) ** 2 + 1e-6).sqrt()

    return by_group(rewards, group, of)


def no_eps(rewards, group):
    return by_group(rewards, group, lambda r: (r - r.mean()) / std(r))


def eps_as_a_floor(rewards, group):
    def of(r):
        return (r - r.mean()) / std(r).clamp(min=1e-6)

    return by_group(rewards, group, of)


def variance(rewards, group):
    def of(r):
        return (r - r.mean()) / (std(r) ** 2 + 1e-6)

    return by_group(rewards, group, of)


def of_the_batch(rewards, group):
    return normed(rewards)


def mean_of_group_std_of_batch(rewards, group):
    return by_group(rewards, group, lambda r: r - r.mean()) / (std(rewards) + 1e-6)


def singletons_keep_their_reward(rewards, group):
    return by_group(rewards, group, lambda r: normed(r) if len(r) > 1 else r)


def clamped(rewards, group):
    return a_loop(rewards, group).clamp(-1, 1)


def rewards_clamped(rewards, group):
    return a_loop(rewards.clamp(-10, 10), group)


def pairs_dropped(rewards, group):
    return by_group(rewards, group, lambda r: normed(r) if len(r) > 2 else 0 * r)


def branch_on_the_best(rewards, group):
    def of(r):
        return normed(r) if r.max() < 3 else normed(r) / 2

    return by_group(rewards, group, of)


def branch_on_all_right(rewards, group):
    def of(r):
        return r if bool((r == 1).all()) else normed(r)

    return by_group(rewards, group, of)


def each_prompt_is_contiguous(rewards, group):
    """Return group_norm's advantages of runs of equal ids: wrong where a prompt is in
    two runs.
    """
    parts, start = [], 0
    for n in torch.unique_consecutive(group, return_counts=True)[1].tolist():
        parts.append(normed(rewards[start : start + n]))
        start += n
    return torch.cat(parts)


def prompts_are_next_to_each_other(rewards, n):
    """Return group_norm's advantages with a stride: response i belongs to prompt i
    modulo the number of prompts.
    """
    x = rewards.view(n, -1)
    return ((x - x.mean(0)) / (x.std(0).nan_to_num() + 1e-6)).view(-1)


def sorted_rewards(rewards, group):
    return by_group(rewards, group, lambda r: normed(r.sort().values))


def own_reward_in_the_baseline(rewards, group):
    return by_group(rewards, group, lambda r: r - r.mean())


def others_over_all(rewards, group):
    return by_group(rewards, group, lambda r: r - (r.sum() - r) / len(r))


def best_of_the_others(rewards, group):
    def of(r):
        return r - r.max() if len(r) > 1 else 0 * r

    return by_group(rewards, group, of)


def median(rewards, group):
    return by_group(rewards, group, lambda r: r - r.median())


def equal_rewards_counted_once(rewards, group):
    """Return the rewards less the mean of their prompt's distinct rewards."""

    def of(r):
        distinct = [x for i, x in enumerate(r) if not any(x == y for y in r[:i])]
        return r - torch.stack(distinct).mean()

    return by_group(rewards, group, of)


def zeros_left_out(rewards, group):
    def of(r):
        return r - r.sum() / (r != 0).sum().clamp(min=1)

    return by_group(rewards, group, of)


def mean_stays(rewards):
    return rewards / (rewards.std(correction=0) + 1e-8)


def baseline_missing(rewards, group):
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)


def eps_beside_the_mean(rewards, group):
    return by_group(rewards, group, lambda r: (r - r.mean()) / (r.mean() + 1e-3))


def zero_stays(rewards):
    return rewards.sign()


def clamped_reward(rewards):
    return rewards.clamp(-5, 5)


WRONG = [
    *(
        (fn, "group_norm")
        for fn in (
            wrong_ddof,
            eps_under_the_root,
            no_eps,
            eps_as_a_floor,
            variance,
            of_the_batch,
            mean_of_group_std_of_batch,
            singletons_keep_their_reward,
            clamped,
            rewards_clamped,
            pairs_dropped,
            branch_on_the_best,
            branch_on_all_right,
            each_prompt_is_contiguous,
            sorted_rewards,
        )
    ),
    (own_reward_in_the_baseline, "leave_one_out"),
    (others_over_all, "leave_one_out"),
    (best_of_the_others, "leave_one_out"),
    (median, "group_mean"),
    (equal_rewards_counted_once, "group_mean"),
    (zeros_left_out, "group_mean"),
    (mean_stays, "whiten"),
    (baseline_missing, "group_mean_whiten"),
    (eps_beside_the_mean, "maxrl"),
    (zero_stays, "signed"),
    (clamped_reward, "reward"),
]


@pytest.mark.parametrize(
    ("fn", "name"), daily(WRONG, 2), ids=lambda x: getattr(x, "__name__", None)
)
def test_a_wrong_one_differs(fn, name):
    hp = {"ddof": 1, "eps": 1e-6} if name == "group_norm" else {}
    proof = prove_advantages(fn, name, responses=3, **hp)
    assert proof.status == "differs", proof
    assert proof.example is not None
    assert proof.example.expected != proof.example.found


def test_a_wrong_stride_differs():
    proof = prove_advantages(prompts_are_next_to_each_other, "group_norm", responses=4)
    assert proof.status == "differs", proof


# ---- what is left open -----------------------------------------------------------------
def numbers_of_python(rewards, group):
    mean = sum(float(x) for x in rewards) / len(rewards)
    return rewards - mean


def cut_at_16(rewards, group):
    def of(r):
        return torch.cat([normed(r[:16]), 0 * r[16:]])

    return by_group(rewards, group, of)


def test_numbers_of_python_end_in_a_line():
    proof = prove_advantages(numbers_of_python, "group_mean", responses=2)
    assert proof.status == "no proof"
    assert "test_advantage_proofs.py:" in proof.reason


def test_a_size_is_a_bound():
    proof = prove_advantages(cut_at_16, "group_norm", responses=2)
    assert proof
    assert [number for number, _ in proof.bounds] == [16]


def test_a_state_is_no_proof():
    memory = {"calls": 0}

    def counted(rewards, group):
        memory["calls"] += 1
        baseline = by_group(rewards, group, lambda r: r * 0 + r.mean())
        return rewards - baseline * (memory["calls"] < 10_000)

    proof = prove_advantages(counted, "group_mean", responses=2)
    assert proof.status == "no proof"
    assert "state" in proof.reason


def test_what_the_first_call_sets_is_a_state():
    memory = {}

    def first_is_remembered(rewards, group):
        first = memory.setdefault("largest", float(rewards.abs().max()) > 1e9)
        return by_group(rewards, group, lambda r: r - r.mean()) * (1 - first)

    proof = prove_advantages(first_is_remembered, "group_mean", responses=2)
    assert proof.status == "no proof"


@pytest.mark.nightly
def test_five_responses_have_ids_of_five_prompts():
    assert prove_advantages(whitened, "whiten", responses=5)


def test_settings_that_were_not_given_are_measured():
    def biased(rewards, group):
        return by_group(rewards, group, lambda r: normed(r, 0, 1e-4))

    proof = prove_advantages(biased, "group_norm", responses=2)
    assert proof.reference == "group_norm(ddof=0, eps=0.0001)"
    assert proof


@pytest.mark.parametrize("eps", [2.0**-23, 1.2345e-6])
def test_an_eps_of_many_digits_is_measured_whole(eps):
    def normalized(rewards, group):
        return by_group(rewards, group, lambda r: normed(r, 1, eps))

    assert prove_advantages(normalized, "group_norm", responses=2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: upref.prove_advantages(a_loop, "group_nrm"), "group_norm"),
        (lambda: upref.prove_advantages(a_loop, "gae"), "of tokens"),
        (lambda: upref.prove_advantages(a_loop, "group_mean", eps=1.0), "no setting"),
        (
            lambda: upref.prove_advantages(a_loop, "group_mean", responses=0),
            "responses",
        ),
    ],
    ids=["a typo", "of tokens", "a setting", "no responses"],
)
def test_what_cannot_be_proved_is_one_sentence(call, said):
    with pytest.raises(InputError, match=said):
        call()


FILE = """
def mine(rewards, group):
    same = (group[:, None] == group).double()
    return rewards - same @ rewards / same.sum(1)
"""


def test_the_command(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    command = ["prove", f"{file}:mine", "--rows", "2", "--as-advantage"]
    assert main([*command, "group_mean"]) == 0
    assert "mine is group_mean: PROVED" in capsys.readouterr().out
    assert main([*command, "leave_one_out"]) == 1
    assert "FAIL" in capsys.readouterr().out
