# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages` and `upref.check_kl` on functions of other people, right and
wrong.
"""

import itertools
import math
import sys
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
from tests.support.cases.kl import clamped, far_clamp, k3_by_hand
from tests.support.zoo import advantages as zoo
from tests.support.zoo.advantages import (
    WRONG,
    loop_over_prompts,
    over_the_batch,
    single_precision,
)
from upref import advantages, kl
from upref.cli import main
from upref.logprobs import token_log_probs
from upref.pytest_plugin import _assert_advantages, _assert_kl  # noqa: F401  the fixtures, as pytest finds them
from upref.verify import faults, kl as kl_check
from upref.verify.exact import Denominator, RewardBatch, advantage
from upref.verify.finding import Number


def ids(x):
    return getattr(x, "__name__", None)


# ---- advantages ----------------------------------------------------------------------
def std_of(x):
    return x.std() if len(x) > 1 else torch.zeros_like(x[0])


def by_prompt(change):
    """Return an advantage function that applies `change` to the rewards of each prompt."""

    def advantages_of(rewards, group):
        out = torch.zeros_like(rewards)
        for g in group.unique():
            out[group == g] = change(rewards[group == g])
        return out

    return advantages_of


def of_tokens(power):
    """Return an estimator of token rewards: group_norm of each response's sum times its
    length to this power.
    """
    normed = by_prompt(lambda x: (x - x.mean()) / (std_of(x) + 1e-6))

    def advantages_of(token_level_rewards, response_mask, group):
        rewards = (token_level_rewards * response_mask).sum(-1)
        lengths = response_mask.sum(-1).double()
        return normed(rewards * lengths**power, group)[:, None] * response_mask

    return advantages_of


def reshaped(*shape):
    """Return group_norm of a batch that is reshaped to equal prompts: in blocks of rows
    for ("prompts", -1), else dealt like cards. Where the prompts do not divide the
    batch, it is right.
    """

    def advantages_of(rewards, group):
        prompts = len(group.unique())
        if len(rewards) % prompts:
            return by_prompt(lambda x: (x - x.mean()) / (std_of(x) + 1e-6))(
                rewards, group
            )
        x = (
            rewards.view(prompts, -1)
            if shape == ("prompts", -1)
            else rewards.view(-1, prompts).T
        )
        std = x.std(1, keepdim=True) if x.shape[1] > 1 else torch.zeros_like(x)
        x = (x - x.mean(1, keepdim=True)) / (std + 1e-6)
        return (x if shape == ("prompts", -1) else x.T).reshape(-1)

    return advantages_of


@pytest.mark.parametrize(
    ("estimator", "function", "words"),
    [
        (
            "group_norm",
            by_prompt(lambda x: (x - x.median()) / (std_of(x) + 1e-6)),
            "the lower median (torch.median) of its prompt is subtracted, divided by the std",
        ),
        (
            "group_norm",
            by_prompt(lambda x: (x - x.mean()) / (std_of(x) / len(x) ** 0.5 + 1e-6)),
            "divided by the standard error of its prompt, std / √n",
        ),
        ("group_norm", reshaped("prompts", -1), "reshaped to [prompts, responses]"),
        ("group_norm", reshaped(-1, "prompts"), "reshaped to [responses, prompts]"),
        (
            "leave_one_out",
            by_prompt(lambda x: x - (x.sum() - x) / len(x)),
            "the sum of the others, divided by G and not by G - 1, of its prompt",
        ),
        (
            "group_mean",
            by_prompt(lambda x: (x - x.mean()) * (x > 0)),
            "responses with a reward of 0 or less have the advantage 0",
        ),
        (
            "group_norm",
            by_prompt(lambda x: (x - x.mean()) / (std_of(x) + 1e-6) * (1 - 1 / len(x))),
            "it is multiplied by (G - 1)/G, with G responses to its prompt",
        ),
        ("group_norm", of_tokens(1), "the reward of a response is multiplied by its"),
        ("group_norm", of_tokens(-1), "the reward of a response is divided by its"),
    ],
)
def test_a_wrong_baseline_or_divisor_has_its_words(estimator, function, words):
    report = upref.check_advantages(function, estimator)
    assert not report and words in report.failures[0].cause


def test_an_accepted_std_is_no_cause():
    """The eps that is fitted makes up for the rounding of a quotient in float16."""

    def in_half(x):
        return ((x - x.mean()).half() / (std_of(x) + 1e-6).half()).to(x.dtype)

    report = upref.check_advantages(by_prompt(in_half), "group_norm")
    assert not report and "Bessel" not in str(report)


rows = st.lists(
    st.tuples(st.integers(-8, 8).map(lambda k: Fraction(k, 4)), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=60)
@given(rows, st.sampled_from([0, 1]))
def test_two_witnesses_agree(batch, ddof):
    """Each estimator is the one that exact rationals give."""
    R, group = map(list, zip(*batch, strict=True))
    r, g = torch.tensor([float(x) for x in R], dtype=torch.float64), torch.tensor(group)
    for name, f in advantages.ADVANTAGES.items():
        if name != "signed":
            hp = (
                {"ddof": ddof, "eps": 1e-6}
                if name in ("group_norm", "whiten", "group_mean_whiten")
                else {}
            )
            want = advantage(
                name, RewardBatch(tuple(R), tuple(group)), Denominator(**hp)
            )
            torch.testing.assert_close(
                f(r, g, **hp),
                torch.tensor(want, dtype=torch.float64),
                rtol=1e-10,
                atol=1e-12,
            )


@pytest.mark.parametrize("name", advantages.ADVANTAGES)
def test_the_reference_is_accepted(name):
    report = upref.check_advantages(advantages.get(name), name)
    assert report.assert_ok() is report


def test_the_wrong_advantages_are_wrong_and_a_batch_shows_it():
    fn = WRONG[0][0]
    f = upref.check_advantages(fn, "group_norm").failures[0]
    scope = {"torch": torch}
    exec(f.batch, scope)
    theirs, ours = (
        h(scope["rewards"], scope["group"]) for h in (fn, advantages.group_norm)
    )
    assert (theirs - ours).abs().max() > 0.1 and len(ours) <= 4


def test_ddof_and_eps_are_read_off_or_held_to():
    """Settings of group_norm are read off the function where none is given, and
    compared where they are.
    """
    assert upref.check_advantages(loop_over_prompts, "group_norm").hp == {
        "ddof": 1,
        "eps": pytest.approx(1e-6),
    }
    assert upref.check_advantages(
        advantages.group_norm, "group_norm", ddof=0, eps=0.25
    ).hp == {"ddof": 0, "eps": 0.25}
    wrong = upref.check_advantages(loop_over_prompts, "group_norm", ddof=0)
    assert "G - 1 (Bessel)" in wrong.failures[0].cause
    assert not upref.check_advantages(
        partial(advantages.group_norm, eps=0.3), "group_norm"
    )
    assert (
        upref.check_advantages(single_precision, "group_norm").tolerances[
            "advantage, relative"
        ]
        > 1e-6
    )


def test_a_report_says_of_the_denominator_only_what_was_seen():
    """Check an estimator that clips rewards, one without advantages below a std, and
    one with eps = 1e-12.
    """
    report = upref.check_advantages(zoo.rewards_clipped_at_ten, "group_norm")
    assert not report.hp and not any(
        "denominator" in x or "float32" in x for x in report.assumptions
    ), str(report)
    (low,) = [
        n for n in upref.check_advantages(zoo.nothing_below_a_std, "group_norm").notes
    ]
    assert low.oracle == "shift-and-scale" and low.found == Number(0.0, "A")
    small = partial(zoo.each, divide=lambda c, std: c / (std + 1e-12))
    assert any("eps = 1e-12 is too small" in f.cause for f in upref.check_advantages(
        lambda rewards, group: small(rewards.float(), group), "group_norm").failures)  # fmt: skip


def penalty(c, std):
    return torch.full_like(c, -1.0) if std < 1e-9 else c / (std + 1e-6)


def test_a_cause_holds_where_the_function_is_right_too():
    """A number of its own for equal rewards is no rounding; a mean of the batch, only
    where groups are uneven.
    """
    failures = upref.check_advantages(
        partial(zoo.each, divide=penalty), "group_norm"
    ).failures
    assert [f.cause for f in failures if f.oracle == "equal-rewards"] == [""]

    def are_equally_large(group):
        return len(set(torch.unique(group, return_counts=True)[1].tolist())) == 1

    def by_prompts_if_even(rewards, group):
        return (
            zoo.loop_over_prompts if are_equally_large(group) else zoo.over_the_batch
        )(rewards, group)

    causes = [
        f.cause
        for f in upref.check_advantages(by_prompts_if_even, "group_norm").failures
        if f.oracle == "uneven-groups"
    ]
    assert causes == [""]


def causes_of(fn, name):
    """The causes that a report on an estimator names."""
    return [f.cause for f in upref.check_advantages(fn, name).failures if f.cause]


def test_of_two_rewards_the_two_advantages_are_said_and_no_formula():
    """`signed` has no negative reward, by which dropped advantages could be told."""
    assert causes_of(lambda rewards: rewards.sign(), "signed") == [
        "a response with reward 0 has the advantage 0, not -1"
    ]
    assert causes_of(lambda rewards: rewards.new_ones(len(rewards)), "signed") == [
        "a response with reward 0 has the advantage 1, not -1"
    ]

    def by_sign(rewards):
        return torch.where(rewards > 0, 1.0, -1.0)

    assert causes_of(lambda rewards: -by_sign(rewards), "signed") == [
        "the sign is flipped: bad answers are reinforced"
    ]
    assert causes_of(lambda rewards: by_sign(rewards) / 2, "signed") == [
        "every advantage is 0.5 times what it should be"
    ]


def test_a_spread_is_said_to_be_of_the_rewards_or_of_the_differences():
    """The right one divides by that of the differences."""

    def by_raw_rewards(rewards, group):
        centered = zoo.each(rewards, group, divide=lambda c, std: c)
        return centered / (rewards.std(correction=0) + 1e-8)

    assert causes_of(by_raw_rewards, "group_mean_whiten") == [
        "the mean of its prompt is subtracted, divided by the std of the rewards of the "
        "whole batch (over n)"
    ]


def test_a_bound_of_one_side_is_not_said_of_both():
    """No advantage of these batches is below -4."""

    def capped(rewards, group):
        return zoo.loop_over_prompts(rewards, group).clamp(max=4)

    assert causes_of(capped, "group_norm") == ["advantages are clipped to at most 4"]


def test_a_factor_of_large_batches_is_not_said_of_all():
    """Even groups have the right advantages."""

    def halved(rewards, group):
        factor = 0.5 if len(rewards) > 64 else 1
        return zoo.loop_over_prompts(rewards, group) * factor

    assert not causes_of(halved, "group_norm")


@pytest.mark.parametrize("name", ["n", "num_generations"])
def test_whitening_may_take_the_size_of_a_group(name):
    """It is of the whole batch, so equal rewards of one prompt beside others have
    advantages.
    """

    def whiten(rewards, size):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    source = f"lambda rewards, {name}: whiten(rewards, {name})"
    assert upref.check_advantages(eval(source, {"whiten": whiten}), "whiten")


def test_the_advantage_that_is_farthest_from_0_is_printed():
    def first_is_right(rewards, group):
        A = zoo.loop_over_prompts(rewards, group)
        if len(rewards) == 10 and len(set(rewards[:7].tolist())) == 1:
            A[1:7] = 0.5
        return A

    report = upref.check_advantages(first_is_right, "group_norm")
    (finding,) = [f for f in report.failures if f.oracle == "equal-rewards"]
    assert float(finding.found.value) == 0.5


def test_what_is_not_finite_is_a_std_of_0_only_where_rewards_are_equal():

    def logs(rewards, group):
        return zoo.loop_over_prompts(rewards, group).log()

    assert not [
        c for c in causes_of(logs, "group_norm") if c.startswith("0/0: the std")
    ]


def test_refused_prompt_ids_are_a_note_and_loops_over_them_end():
    (note,) = [
        n
        for n in upref.check_advantages(zoo.population_by_bincount, "group_norm").notes
        if n.oracle == "group-ids"
    ]
    assert "below 0 or" in note.regime and "above 2^53" in note.regime
    (note,) = [
        n
        for n in upref.check_advantages(zoo.ids_are_counted_up_to, "group_mean").notes
        if n.oracle == "group-ids"
    ]
    assert note.regime.endswith(" or above 2^53 were not tested")
    assert "was stopped after 100000 lines of Python" in note.cause


REWARDS, GROUP = ("rewards", "scores", "token_returns"), ("group", "uid", "prompt_ids")


@pytest.mark.parametrize(
    "names", [*itertools.product(REWARDS, GROUP), *itertools.product(GROUP, REWARDS)]
)
def test_names_in_any_order_give_one_answer(names):
    R, g = names if names[0] in REWARDS else names[::-1]
    scope = {"f": loop_over_prompts, "wrong": over_the_batch, "torch": torch, "np": np}
    ids = f"torch.as_tensor(np.unique({g}, return_inverse=True)[1])"
    exec(f"def right({', '.join(names)}): return f({R}, {ids})\n"
         f"def bad({', '.join(names)}): return wrong({R}, {ids})", scope)  # fmt: skip
    assert upref.check_advantages(scope["right"], "group_norm", skip=("random",))
    failed = upref.check_advantages(
        scope["bad"], "group_norm", skip=("random",)
    ).failures
    assert "over the batch" in failed[0].cause


@pytest.mark.verl
@pytest.mark.parametrize(
    ("name", "estimator", "fails"),
    [("grpo", "group_norm", {"singletons"}), ("rloo", "leave_one_out", set()),
     ("reinforce_plus_plus_baseline", "group_mean_whiten", {"values"})],
)  # fmt: skip
def test_verls_estimators(name, estimator, fails):
    pytest.importorskip("verl")
    report = upref.check_advantages(f"verl:{name}", estimator)
    assert {f.oracle for f in report.failures} == fails, str(report)
    assert name == "rloo" or report.failures[0].cause in (
        "the reward itself, without a baseline",
        "whitened over tokens, where a long response counts more",
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: upref.check_advantages(loop_over_prompts, "group_nrm"), "group_norm"),
        (lambda: upref.check_advantages(loop_over_prompts, "group_mean", eps=1e-6), "no setting 'eps'"),
        (lambda: upref.check_advantages(loop_over_prompts, "group_norm", skip=("x",)), "no oracle"),
        (lambda: upref.check_advantages(3, "group_norm"), "not an advantage function"),
        (lambda: upref.check_advantages(lambda rewards, group, tokenizer: rewards, "group_norm"), "tokenizer"),
        (lambda: upref.check_advantages(lambda rewards, group: rewards[:2], "group_norm"), "returns shape"),
        (lambda: upref.check_advantages(lambda rewards, group: "A", "group_norm"), "returns a str"),
        (lambda: upref.check_advantages(lambda rewards, group: rewards / missing, "group_norm"), "raised NameError"),  # noqa: F821  
        (lambda: upref.check_advantages(lambda rewards, group: sys.exit(0), "group_norm"), "SystemExit"),
        (lambda: upref.check_advantages(zoo.Estimator, "group_norm"), "is a class"),
        (lambda: upref.check_advantages(lambda rewards, group: rewards * 1j, "group_norm"), "one real number"),
        (lambda: upref.check_advantages(lambda rewards, group: rewards.to("meta"), "group_norm"), "one real number"),
        (lambda: upref.check_advantages(lambda group, n: group, "group_norm"), "rewards"),
        (lambda: upref.check_advantages(lambda model, tokenizer: 0, "group_norm"), "model"),
        (lambda: upref.check_kl(kl.k1, "k4"), "no KL estimator"),
        (lambda: upref.check_kl(kl.k1, "k1", skip=("x",)), "no oracle"),
        (lambda: upref.check_kl(lambda lp, ref: (lp - ref).sum(), "k1"), "one per token"),
        (lambda: upref.check_kl(lambda lp, ref, beta: lp, "k1"), "beta"),
        (lambda: upref.check_kl("math:pi", "k1"), "not a function"),
        (lambda: upref.check_kl(lambda lp, ref: lp.foo(), "k1"), "raised AttributeError"),
        (lambda: upref.check_kl(lambda lp, ref: sys.exit(0), "k1"), "SystemExit"),
        (lambda: upref.check_kl(lambda new, old: new - old, "k1"), "cannot tell which argument is ref_log_prob"),
        (lambda: upref.check_kl(lambda probs, ref_probs: probs, "k1"), "probs"),
    ],
)  # fmt: skip
def test_what_is_no_estimator_is_one_sentence(call, said):
    with pytest.raises(upref.InputError, match=said) as e:
        call()
    assert "\n" not in str(e.value)


# ---- KL ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_right_kl(name, assert_kl):
    assert assert_kl(kl.ESTIMATORS[name], name)


def test_a_far_clamp_is_a_note():
    far = upref.check_kl(far_clamp, "k3")
    assert far and any(n.oracle == "clamp" for n in far.notes)


@pytest.mark.parametrize("fn, name, said", [
    (clamped, "k3", "a clamp that bites: the tokens furthest from the reference are not pulled back (its value stays at"),
    (lambda lp, ref: k3_by_hand(lp, ref.clamp(min=-12)), "k3", "a clamp that bites"),
    (lambda lp, ref: torch.where((lp - ref).abs() < 3, kl.k3(lp, ref), kl.k2(lp, ref)), "k3", ""),
    (lambda lp, ref: torch.nn.functional.huber_loss(lp, ref, reduction="none", delta=2.2), "k2", ""),
])  # fmt: skip
def test_a_far_fault_is_a_clamp_where_it_is_one(fn, name, said):
    report = upref.check_kl(fn, name)
    (cause,) = [f.cause for f in report.failures if f.oracle == "clamp"]
    assert cause.startswith(said) and bool(cause) == bool(said)


def k3_but_near_the_reference(replacement, threshold, dtype):
    """Return k3, computed in a dtype, with other numbers where |d| is below a threshold."""

    def term(log_prob, ref_log_prob):
        d = (ref_log_prob - log_prob).to(dtype)
        return torch.where(d.abs() < threshold, replacement(d), d.expm1() - d)

    return term


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("threshold", [0.05, 0.01, 0.004])
@pytest.mark.parametrize(
    "replacement", [torch.zeros_like, lambda d: d * d / 2], ids=["0", "d²/2"]
)
def test_a_k3_that_is_another_function_near_the_reference_is_rejected(
    replacement, threshold, dtype
):
    term = k3_but_near_the_reference(replacement, threshold, dtype)
    report = upref.check_kl(term, "k3")
    gradient = [f for f in report.failures if f.oracle == "gradient"]
    assert gradient, str(report)
    assert abs(gradient[0].place.numbers["log π_ref - log π_θ"]) < threshold


SPELLINGS = {
    "k1 of log-probabilities": ("k1", lambda lp, ref: lp - ref),
    "k1 of probabilities": ("k1", lambda lp, ref: (lp.exp() / ref.exp()).log()),
    "k2": ("k2", lambda lp, ref: 0.5 * (lp - ref) ** 2),
    "k2 of a ratio": ("k2", lambda lp, ref: 0.5 * (lp - ref).exp().log().square()),
    "k3": ("k3", lambda lp, ref: (ref - lp).exp() - 1 - (ref - lp)),
    "k3 by expm1": ("k3", lambda lp, ref: (ref - lp).expm1() - (ref - lp)),
    "k3 of log π_θ/π_ref": ("k3", lambda lp, ref: (lp - ref).neg().exp() - 1 + lp - ref),
    "k3 of a ratio": ("k3", lambda lp, ref: k3_of_ratio((ref - lp).exp())),
    "k3 of probabilities": ("k3", lambda lp, ref: k3_of_ratio(ref.exp() / lp.exp())),
    "k3 of at least 0": ("k3", lambda lp, ref: k3_by_hand(lp, ref).clamp(min=0)),
}  # fmt: skip


def k3_of_ratio(ratio):
    return (ratio - 1) - ratio.log()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rounding_near_the_reference_is_no_difference(spelling, dtype):
    """In float32, e^d - d - 1 is wrong by 1e-7, which is more than its value there."""
    estimator, term = SPELLINGS[spelling]
    report = upref.check_kl(
        lambda log_prob, ref_log_prob: term(log_prob.to(dtype), ref_log_prob.to(dtype)),
        estimator,
    )
    assert report, str(report)


@pytest.mark.parametrize(
    ("term", "cause"),
    [
        (lambda lp, ref: torch.nn.functional.huber_loss(lp, ref, reduction="none", delta=2.2),
         "near the reference alone: k2 itself"),
        (lambda lp, ref: (lp - ref).clamp(-3, 3), "near the reference alone: k1 itself"),
        (lambda lp, ref: (lp - ref).clamp(-20, 20), "k1 itself"),
        (lambda lp, ref: 2 * kl.k3(lp, ref).clamp(max=10), "near the reference alone: 2 times k3"),
    ],
)  # fmt: skip
def test_a_cause_fits_far_from_the_reference_or_says_that_it_does_not(term, cause):
    report = upref.check_kl(term, "k3")
    assert report.failures[0].cause == cause, str(report)


def test_nan_twice_is_no_state():
    def k3_series(log_prob, ref_log_prob):
        d = ref_log_prob - log_prob
        return d * (torch.expm1(d) / d - 1)

    names = [f.oracle for f in upref.check_kl(k3_series, "k3").failures]
    assert "determinism" not in names and "value" in names


def test_whose_gradient_it_is():
    """The table in upref/kl.py, by enumeration; and off policy none of the three has
    the gradient of a divergence.
    """
    want = {"k1": "zero", "k2": "reverse", "k3": "forward"}
    assert {n: kl_check.divergence_of(f) for n, f in kl.ESTIMATORS.items()} == want
    assert not any(
        kl_check.divergence_of(f, off_policy=True) for f in kl.ESTIMATORS.values()
    )
    assert kl_check.divergence_of(lambda lp, ref: -kl.k2(lp, ref)) == "-reverse"
    reverse = kl_check.divergences()["reverse"][0]
    for n in ("k1", "k3"):
        assert math.isclose(
            kl_check.expectation(kl.ESTIMATORS[n])[0], reverse, rel_tol=1e-12
        )
    assert "reverse divergence" in upref.check_kl(kl.k2, "k2").text(verbose=True)


# ---- the ways in ---------------------------------------------------------------------
def test_command(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\ndef adv(rewards, group):\n    return rewards - rewards.mean()\n\n"
                    "def kl(lp, ref):\n    return lp - ref\n")  # fmt: skip
    assert main(["check", f"{file}:adv", "--as-advantage", "group_mean"]) == 1
    assert "whole batch" in capsys.readouterr().out
    assert main(["check", f"{file}:kl", "--as-kl", "k1", "--json"]) == 0
    assert main(["check", f"{file}:kl", "--as-kl", "k1", "--hp", "beta=1"]) == 2
    with pytest.raises(SystemExit) as e:
        main(["check", f"{file}:kl"])
    assert e.value.code == 2


def test_plugin(assert_advantages, assert_kl):
    assert assert_advantages(loop_over_prompts, "group_norm")
    with pytest.raises(pytest.fail.Exception, match="values"):
        assert_advantages(loop_over_prompts, "leave_one_out")
    with pytest.raises(pytest.fail.Exception, match="forward divergence"):
        assert_kl(kl.k3, "k2")


def test_a_dictionary_by_elements_of_a_tensor_makes_no_estimator_without_prompts():
    """Each element is an object of its own, so that no prompt has two responses."""

    def leave_one_out(rewards, group):
        of_prompt = {}
        for reward, prompt in zip(rewards, group, strict=True):
            of_prompt.setdefault(prompt, []).append(reward)
        out = []
        for reward, prompt in zip(rewards, group, strict=True):
            others = len(of_prompt[prompt]) - 1
            mean = (sum(of_prompt[prompt]) - reward) / others if others else 0
            out.append(reward - mean)
        return torch.stack(out)

    assert not upref.check_advantages(leave_one_out, "reward")
    assert upref.check_advantages(leave_one_out, "leave_one_out")


@pytest.mark.parametrize("n", [2, 7, 32, 64, 100, 1024])
def test_ids_that_collide_modulo_a_number(n):
    """A table of n places, as of a hash, mixes the groups of some prompts."""

    def hashed(rewards, group):
        same = (group[:, None] - group[None]) % n == 0
        return rewards - (same * rewards).sum(1) / same.sum(1)

    report = upref.check_advantages(hashed, "group_mean")
    assert any(
        f.oracle in ("group-ids", "values", "uneven-groups") for f in report.failures
    ), str(report)
    if any(f.oracle == "group-ids" for f in report.failures):
        assert f"ids are equal modulo {n:,} count as one" in str(report)


MINE = """
from upref.verify.faults import Catalogue, Fault
from upref.verify.faults.advantages import AdvantageChange
from upref.verify.faults.logprobs import fault

KL = Catalogue("kl", lambda: [Fault("seven times k1", lambda lp, ref: 7 * (lp - ref))])
ADVANTAGES = Catalogue("advantages", lambda: [Fault("cubes", AdvantageChange(lambda b, right, k: [x**3 for x in right]))])
LOGPROBS = Catalogue("logprobs", lambda p: [fault("thirteen too much", id="thirteen-too-much", lp=lambda lp, p: lp + 13)])
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Put a file with a known fault of a user's own into the folder of known faults,
    and take it out at the end.
    """
    (tmp_path / "mine_of_a_test.py").write_text(MINE)
    monkeypatch.setattr(faults, "__path__", [*faults.__path__, str(tmp_path)])
    yield
    sys.modules.pop("upref.verify.faults.mine_of_a_test", None)


def test_a_file_adds_a_fault_of_any_kind_of_function(mine):
    def tripled(rewards, group):
        return advantages.group_mean(rewards, group) ** 3

    def shifted(logits, tokens, temperature):
        return token_log_probs(logits, tokens, temperature=temperature) + 13

    assert "seven times k1" in str(
        upref.check_kl(
            lambda log_prob, ref_log_prob: 7 * (log_prob - ref_log_prob), "k3"
        )
    )
    assert "cubes" in str(upref.check_advantages(tripled, "group_mean"))
    assert "thirteen too much" in str(upref.check_logprobs(shifted))


def test_a_name_of_another_input_is_no_reward():
    def of_teacher(student_logps, teacher_logps, mask):
        return student_logps

    with pytest.raises(upref.InputError, match="student_logps is no reward"):
        upref.check_advantages(of_teacher, "group_norm")


def _whitened(rewards, sample_mask):
    kept = rewards[sample_mask.bool()]
    return (rewards - kept.mean()) / (kept.std() + 1e-8) * sample_mask


def _whitened_with_masked(rewards, sample_mask):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8) * sample_mask


def _centered_with_zeros(rewards, group, sample_mask):
    r = rewards * sample_mask
    return torch.stack([r[i] - r[group == group[i]].mean() for i in range(len(r))])


def test_a_mask_of_responses_leaves_them_out_of_every_mean():
    assert upref.check_advantages(_whitened, "whiten")
    for function, estimator, fault_id in (
        (_whitened_with_masked, "whiten", "masked-responses-count"),
        (_centered_with_zeros, "group_mean", "masked-responses-count-as-zero"),
    ):
        report = upref.check_advantages(function, estimator)
        assert report.failures[0].fault_ids == (fault_id,), str(report)
