# SPDX-License-Identifier: Apache-2.0
"""A seeded sample of tests/support/mutants; that the sample can fail; and what the
whole run found, each as a test.
"""

import math
from unittest import mock

import numpy as np
import pytest
import torch

import upref
from tests.support.daily import daily
from tests.support.mutants import (
    batches,
    estimators,
    figure,
    judge,
    naming,
    run,
    search,
)
from tests.support.mutants.losses import (
    Subject,
    differs_by_overflow_alone,
    judged,
    of,
    wrong,
)
from tests.support.mutants.rewritings import rewritings
from tests.support.mutants.styles import (
    STYLES,
    Config,
    arguments,
    compiled,
    configs,
    fits,
    write,
)

# mutants of a style
SAMPLE = {"dapo": 2, "gspo": 2, "up_grpo": 1, "topr": 1, "aspo_code": 1, "bandpo_tv": 1}
pytestmark = pytest.mark.filterwarnings("ignore")  # what mutants warn of
MISSED = 2  # survivors that the checker misses: it must not grow


def rows(tmp_path, names=SAMPLE, seed=5):
    """Yield a row with truth and verdict for `n` mutants of each of these objectives in
    each style.
    """
    for name, n in names.items():
        c = configs(upref.get(name))[-1]
        for style in STYLES:
            for s in of(c, style, n, seed) if fits(style, c) else ():
                yield judged(s, tmp_path, seed, 1, large=0, few=60)


def test_what_differs_is_rejected(tmp_path):
    seen = [r for r in rows(tmp_path) if r["truth"] == "differs"]
    assert len(seen) > 40 and not [r for r in seen if wrong(r)]


@pytest.mark.parametrize("left_out", ["gradient", "aggregation"])
def test_a_checker_without_one_of_its_oracles_is_caught(tmp_path, left_out):
    near = (
        left_out,
        "unusual-inputs",
        "extremes",
        "on-policy",
        "one-response",
        "data-parallel",
        "every-value",
    )  # these see much of it too
    weak = [o for o in judge.every() if o.name not in near]
    few = {"dapo": 3, "grpo": 2} if left_out == "aggregation" else {"dapo": 2}
    with mock.patch.object(judge, "every", lambda: weak):
        assert any(wrong(r) == "missed" for r in rows(tmp_path, few, seed=3))


@pytest.mark.parametrize("n", [1, pytest.param(12, marks=pytest.mark.nightly)])
def test_what_keeps_the_meaning_is_accepted(tmp_path, n):
    seen = [
        judged(s, tmp_path, 5, large=0, few=40) for s in rewritings(n, 5, compiled=0)
    ]
    assert sum(r["truth"] == "equal" for r in seen) > 0.75 * n and not [
        r for r in seen if wrong(r)
    ]


@pytest.mark.nightly
def test_the_short_verdict_is_the_reports():
    for name, style in (("dapo", "verl"), ("gspo", "packed")):
        c = configs(upref.get(name))[0]
        for s in of(c, style, 3, 11):
            loss = compiled(s.text)
            assert judge.verdict(loss, c).accepted == judge.whole(loss, c, []).accepted


def test_a_cause_that_is_printed_is_put_into_the_objective():
    """Else the share of true causes on the page is one of no causes at all."""
    c = configs(upref.get("dapo"))[0]
    text = write(c, "ratio").replace("torch.exp(lp - old)", "torch.exp(old - lp)")
    drawn = batches.small(c, False, 5, 8)[:8]
    some = [b for b in drawn if b.of["mask"].any(1).all()]
    judged_whole = judge.whole(compiled(text), c, some)
    assert judged_whole.cause == "the ratio is inverted: exp(old - new)"
    assert judged_whole.true == "yes"


def test_the_search_sees_what_is_rare():
    """Find that a change after 500 tokens is seen only with large batches."""
    c = configs(upref.get("dapo"))[0]
    source = write(c, "ratio")

    def truth(text, **how):
        return search.truth(
            compiled(text), c, arguments(c, "ratio"), "BT", 0, few=30, **how
        ).kind

    late = source.replace(
        "J = torch.where(mask, J, 0.0)",
        "J = torch.where(mask & (mask.cumsum(1) < 500), J, 0.0)",
    )
    assert late != source
    assert truth(source, large=2) == "equal"
    assert truth(late, large=0) == "equal" and truth(late, large=2) == "differs"


@pytest.mark.parametrize("name", upref.names())
def test_every_objective_is_written_in_every_style(name):
    for c in configs(upref.get(name)):
        for style in (style for style in STYLES if fits(style, c)):
            assert callable(compiled(write(c, style)))


def test_a_helper_with_a_number_of_its_own_is_written_as_it_is():
    """The one of FIPO takes log c, where there is a c."""
    c = configs(upref.get("fipo"))[0]
    text = write(c, "ratio")
    assert "if c is None" in text
    loss = compiled(text)
    truth = search.truth(loss, c, arguments(c, "ratio"), "BT", 0, few=6, large=0)
    assert truth.kind == "equal"


def test_survivors_do_not_grow():
    missed = [row for row in figure.survivors() if row["kind"] == "missed"]
    assert len(missed) <= MISSED
    assert all("not covered" in row["reason"] for row in missed)


def test_an_alarm_is_a_rejection_that_is_right():
    """The search does not look where such a loss differs; its reason says where."""
    alarms = [row for row in figure.survivors() if row["kind"] == "alarm"]
    assert all(row["reason"].startswith("the rejection is right:") for row in alarms)


def test_a_habit_is_accepted_and_nothing_else():
    """Find that to accept a clamp is right under GSPO and a miss under DAPO, and to
    reject it the other way round.
    """
    clamped = {
        "operator": "clamp",
        "what": "lp - old -> torch.clamp((lp) - (old), -10, 10)",
        "truth": "differs",
    }

    def said(name, quick):
        return figure.misjudged(clamped | {"objective": name, "quick": quick})

    assert (said("gspo", True), said("gspo", False)) == ("", "alarm")
    assert (said("dapo", True), said("dapo", False)) == ("missed", "")


def test_a_loss_that_only_overflows_is_a_habit():
    """Take the guard against overflow out of a loss, and then change its weight by a
    thousandth too.
    """
    c = configs(upref.get("up_grpo_verl"))[-1]
    source = write(c, "ratio")
    overflows = source.replace("torch.where(A > 0, 0.0, lp - old)", "lp - old")
    also_wrong = overflows.replace("A * torch.exp", "1.001 * A * torch.exp")
    assert len({source, overflows, also_wrong}) == 3

    def alone(text):
        subject = Subject(c, "ratio", "dropped", "", text)
        return differs_by_overflow_alone(compiled(text), subject, 0, 60)

    assert alone(overflows) and not alone(also_wrong)
    row = {"operator": "dropped", "what": "", "truth": "differs", "overflow": True}
    assert figure.misjudged(row | {"quick": True}) == ""


# ---- what it found -------------------------------------------------------------------
def calm(mask, *xs):
    return [torch.where(mask, x, 0.0) for x in xs]


def gspo_of(high, by=len, dtype=torch.float64):
    """Return GSPO's loss with this distance of the upper bound from 1, divided by
    by(mask); log-probabilities are rounded to dtype.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return the loss."""
        lp, old = (x.to(dtype).double() for x in calm(mask, log_prob, old_log_prob))
        s, A = (
            ((lp - old).sum(-1) / mask.sum(-1)).exp(),
            advantages.gather(1, mask.int().argmax(1, keepdim=True))[:, 0],
        )
        return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + high) * A).sum() / by(mask)

    return loss


def test_a_bound_that_is_off_by_a_hair_is_no_rounding():
    assert not upref.check(gspo_of(4.004e-4), "gspo")
    assert upref.check(gspo_of(4e-4, dtype=torch.float32), "gspo")
    c = configs(upref.get("bandpo_tv"))[0]
    moved = write(c, "ratio").replace(
        "torch.clamp(r, low, high)", "torch.clamp(r, low, high + 1e-5)"
    )
    assert not upref.check(compiled(moved), "bandpo_tv")


def test_a_habit_in_a_denominator_is_one_on_every_rank_too():
    assert upref.check(gspo_of(4e-4, by=lambda mask: len(mask) + 1e-6), "gspo")


def test_a_part_in_float32_that_only_long_responses_show():
    """A loss that rounds log π_θ to float32 in its ratio agrees: that is a habit."""

    def loss(log_prob, old_log_prob, advantages):
        """Return TOPR's loss of whole responses, with log π_θ rounded to float32 in the
        ratio.
        """
        A = advantages
        S = log_prob.float().double() - old_log_prob
        return -torch.where(
            A >= 0, A * log_prob, S.exp().clamp(max=1).detach() * A * log_prob
        ).mean()

    def topr(log_prob, old_log_prob, advantages, mask):
        lp, old = (x.sum(-1) for x in calm(mask, log_prob, old_log_prob))
        return loss(
            lp, old, advantages.gather(1, mask.int().argmax(1, keepdim=True))[:, 0]
        )

    report = upref.check(topr, "topr")
    assert report, str(report)


@pytest.mark.nightly
def test_bounds_of_an_uncertain_token_are_visited():
    c = configs(upref.get("aspo_code"))[0]
    moved = write(c, "ratio").replace("r <= 1 + 0.4", "r <= 1.001 + 0.4")
    assert moved != write(c, "ratio") and not upref.check(compiled(moved), "aspo_code")


MOVED = [  # objective, hyperparameters, what is written, what should be
    (
        "bandpo_chi2",
        {"delta": 0.1},
        "torch.clamp(r, low, high)",
        "torch.clamp(r, low + 1e-5, high)",
    ),
    ("dppo_kl", {}, "lp - old, old - lp) <= 0", "lp - old, old - lp) <= 0.01"),
    ("dppo_kl_verl", {}, "q_old > 0", "q_old > 0.01"),
    ("dppo_kl_verl", {}, "* (old - lp)", "* torch.clamp(old - lp, -3, 3)"),
    ("m2po", {}, "lp - old", "torch.clamp(lp - old, -10, 10)"),
]


@pytest.mark.parametrize(
    ("name", "hp", "right", "slip"),
    daily(MOVED, 3),
    ids=[f"{m[0]}: {m[3]}" for m in MOVED],
)
def test_what_only_some_tokens_show(name, hp, right, slip):
    """Of some probabilities alone: nearly certain ones, or those between the grid's at
    far ratios.
    """
    source = write(Config(upref.get(name), tuple(hp.items())), "ratio")
    assert source.count(right) == 1 and upref.check(compiled(source), name, **hp)
    assert not upref.check(compiled(source.replace(right, slip)), name, **hp)


@pytest.mark.parametrize("dim", daily([0, 1], 2))
def test_a_habit_in_the_denominator_of_a_chunk(dim):
    """1e-8 there weighs otherwise where rows or columns stand in other chunks."""

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return DAPO's loss by chunks, each with 1e-8 in its denominator."""
        total = 0.0
        for given in zip(
            *(x.split(3, dim) for x in (log_prob, old_log_prob, advantages, mask)),
            strict=True,
        ):
            (lp, old, A), m = calm(given[-1], *given[:-1]), given[-1]
            r = (lp - old).exp()
            J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A) * m
            total = total - J.sum() / (m.sum() + 1e-8) * m.sum() / mask.sum()
        return total

    report = upref.check(loss, "dapo")
    assert report, str(report)


def test_a_batch_of_one_token_is_a_batch():
    """A denominator of at least 2, a std over the rows of a batch."""
    for name, right, slip in (
        ("dapo", "mask.sum()", "mask.sum().clamp(min=2)"),
        ("topr", "A >= 0", "A / A.std() >= 0"),
    ):
        source = write(configs(upref.get(name))[0], "ratio")
        assert right in source and not upref.check(
            compiled(source.replace(right, slip)), name
        )


def test_identify_sees_what_check_sees_at_far_ratios():
    c = configs(upref.get("sapo"))[0]
    source = write(c, "ratio")
    assert naming.named(compiled(source), c, "equal").right
    clamped = compiled(source.replace("lp - old", "torch.clamp(lp - old, -10, 10)"))
    who = upref.identify(clamped)
    assert who.kind == "pitfall" and "log r is clamped to -10 and above" in who.why
    assert (
        naming.named(clamped, c, "differs").right
        and not naming.named(clamped, c, "equal").right
    )


def test_another_seed_is_another_search():
    a, b = (
        search.small(configs(upref.get("gspo"))[0], False, seed, 3) for seed in (0, 1)
    )
    assert all(
        not np.array_equal(x.of["log_prob"], y.of["log_prob"])
        for x, y in zip(a, b, strict=True)
    )
    assert all(math.isfinite(float(x.g.sum())) for x in a)


def test_rewards_that_are_no_halves():
    def rounded(rewards, group):
        return rewards.bfloat16().to(rewards.dtype)

    assert not upref.check_advantages(rounded, "reward")
    assert upref.check_advantages(
        lambda rewards, group: rewards.float().double(), "reward"
    )


@pytest.mark.parametrize("name", ["group_norm", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("least", [0.01, 1e-9])
def test_small_rewards_are_rewards(name, least):
    def gated(rewards, group):
        """Return the estimator's advantages, but 0 for a prompt whose rewards differ by
        at most `least`.
        """
        out = torch.zeros_like(rewards)
        for g in group.unique():
            x = rewards[group == g]
            if x.max() > x.min() + least:
                out[group == g] = upref.advantages.get(name)(
                    x, torch.zeros(len(x), dtype=torch.int64)
                )
        return out

    assert bool(upref.check_advantages(gated, name)) == (least < 1e-6)


def test_rewards_of_any_size():
    assert not upref.check_advantages(
        lambda rewards, group: rewards * (rewards.abs() > 0.01), "reward"
    )


@pytest.mark.nightly
def test_estimators():
    seen = [estimators.judged(*s, 5) for s in estimators.subjects(5, each=2)]
    assert sum(r["truth"] == "differs" for r in seen) > 10 and not [
        r for r in seen if wrong(r)
    ]


@pytest.mark.parametrize(("eps", "other"), daily([("0.2", "0.4"), ("0.4", "0.2")], 2))
def test_some_bounds_off_by_a_hair_are_no_rounding(eps, other):
    """Calm tokens, and uncertain ones, whose bound is another."""
    source = write(configs(upref.get("aspo_code"))[0], "ratio")
    assert f"r <= 1 + {eps}" in source
    assert not upref.check(
        compiled(source.replace(f"r <= 1 + {eps}", f"r <= 1 + {eps} + 1e-05")),
        "aspo_code",
    )


def test_tiny_advantages_of_rare_tokens_are_asked():
    c = Config(upref.get("bandpo_chi2"), (("c", 3.0), ("delta", 0.1)))
    source = write(c, "ratio")
    assert "A < 0" in source and upref.check(
        compiled(source), "bandpo_chi2", **dict(c.hp)
    )
    assert not upref.check(
        compiled(source.replace("A < 0", "A < 1e-05")), "bandpo_chi2", **dict(c.hp)
    )


def test_identify_names_an_objective_with_a_rounded_bound():
    c = configs(upref.get("reinforce_pp"))[0]
    source = write(c, "ratio")
    one = source.replace(
        "torch.clamp(r, 1 - 0.2,", "torch.clamp(r, torch.tensor(1 - 0.2),"
    )
    assert one != source and naming.named(compiled(one), c, "equal").right


def test_identify_tries_clamps_before_float32():
    c = configs(upref.get("gppo"))[1]
    clamped = compiled(
        write(c, "ratio").replace("lp - old", "torch.clamp(lp - old, -10, 10)")
    )
    assert naming.named(clamped, c, "differs").right


def test_every_configuration_has_its_share_of_the_whole_search():
    few = [
        Subject(c, "ratio", "", "", str(n))
        for c in configs(upref.get("dapo"))
        for n in range(run.LOT + 3)
    ]
    by = dict(run.drawn(few, 0))
    assert set(by) == set(configs(upref.get("dapo"))) and all(
        len(of) == run.LOT + 3 for of in by.values()
    )
    assert [s.text for s in by[few[0].config]] != [
        s.text for s in dict(run.drawn(few, 1))[few[0].config]
    ]


def test_sums_of_long_responses_may_round_apart_in_float32():
    """Σ log π_θ and Σ log π_old, each summed by itself."""

    def vespo(log_prob, old_log_prob, advantages, mask):
        """Return VESPO's loss of packed tokens, with sums by index_add."""
        rows, n = mask.nonzero()[:, 0], mask.sum(-1)

        def total(x):
            return torch.zeros(len(mask), dtype=x.dtype).index_add(0, rows, x[mask])

        lp, A = total(log_prob), advantages[mask][n.cumsum(0) - n]
        log_W = lp - total(old_log_prob)
        φ = torch.where(
            A > 0,
            (2 * log_W + 3 * (1 - log_W.exp())).exp(),
            (3 * log_W + 2 * (1 - log_W.exp())).exp(),
        )
        return -(φ.detach() * A * lp).mean()

    assert upref.check(vespo, "vespo")


@pytest.mark.parametrize("by, right", [(1e-5, True), (1e-3, False)])
def test_a_cap_is_asked_far_out_as_closely_as_near(by, right):
    def cispo(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return (
            -((lp - old).exp().clamp(max=5.4 + by).detach() * A * lp).sum() / mask.sum()
        )

    assert bool(upref.check(cispo, "cispo", eps_high=4.4)) is right


@pytest.mark.nightly
def test_a_bound_that_depends_on_a_rare_token_is_asked_too():
    """Newton's method with a step clamped: only below π_old = 6e-4 it does not arrive."""
    c = configs(upref.get("bandpo_kl"))[-1]
    text = write(c, "weights")
    short = text.replace("(log_1_p - log_q)", "torch.clamp(log_1_p - log_q, -5, 5)")
    assert short != text and not upref.check(compiled(short), c.o, **dict(c.hp))


def test_overflow_is_noted_at_tiny_advantages_too():
    """A ratio that overflows only where 0 < A <= 1e-3 is a note."""

    def up_dapo_anchored(log_prob, old_log_prob, advantages, mask):
        """Return UP-DAPO's loss whose ratio overflows in the branch not taken where 0 <
        A <= 1e-3.
        """
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        # infinite for 0 < A <= 1e-3, in the branch that is not taken
        r = torch.where(A > 1e-3, 0.0, lp - old).exp()
        low = torch.where(A > 0, 0.0, lp - old).clamp(min=math.log(0.8)).exp()
        J = torch.where(
            A > 0, A * (lp - lp.detach()).exp(), torch.minimum(r * A, low * A)
        )
        return -torch.where(mask, J, 0.0).sum() / mask.sum()

    report = upref.check(up_dapo_anchored, "up_dapo_anchored")
    assert report and "overflows" in str(
        [f.cause for f in report.notes if f.oracle == "extremes"]
    )


@pytest.mark.parametrize("at, right", [(88.7, True), (79.0, False)])
def test_nan_is_forgiven_only_beyond_what_a_sampler_draws(at, right):
    def w_reinforce_code(log_prob, old_log_prob, advantages, mask):
        """Return a loss of w_reinforce_code's form that is NaN where A is 0 and log r
        above `at`.
        """
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        r = (lp - old).exp()
        w = torch.where(torch.where(A > 0, r <= 1.15, r >= 0.85), A, 0.0)
        w = w + 0 * torch.where((A == 0) & (lp - old > at), math.inf, 1.0)
        return -torch.where(mask, w.detach() * lp, 0.0).sum() / mask.sum()

    report = upref.check(w_reinforce_code, "w_reinforce_code", lam=1.0, eps=0.15)
    assert right is not any(
        f.oracle == "extremes" and "A = 0, log r" in f.regime for f in report.failures
    )


@pytest.mark.parametrize("name", daily(["clip_cov", "kl_cov", "m2po"], 3))
def test_a_selection_that_rounding_to_float32_decides_is_not_compared(name):
    """log π_old + log r rounds to another float32 than log π: two tokens of clip_cov
    change places in the order of the batch, and another one is drawn.
    """
    for c in configs(upref.get(name)):
        assert judge.verdict(compiled(write(c, "weights")), c).said == ""


def test_a_wrong_selection_is_rejected_still():
    c = configs(upref.get("clip_cov"))[0]
    text = write(c, "weights").replace("cov < 5.0", "cov < 4.0")
    assert not judge.verdict(compiled(text), c).accepted


@pytest.mark.parametrize("wrong_factor", [2.0, math.nan])
def test_rounding_does_not_explain_that_every_weight_is_wrong_in_float32(wrong_factor):
    right_loss = compiled(write(configs(upref.get("kl_cov"))[0], "weights"))

    def kl_cov(log_prob, old_log_prob, advantages, mask):
        """Return the right loss; times a wrong factor in float32 on large batches."""
        loss = right_loss(log_prob, old_log_prob, advantages, mask)
        is_large = len(mask) > 40 and mask.shape[1] > 2
        return (
            loss * wrong_factor
            if is_large and log_prob.dtype == torch.float32
            else loss
        )

    report = upref.check(kl_cov, "kl_cov")
    assert [f.oracle for f in report.failures] == ["unusual-inputs"]


def test_nan_in_float32_at_a_small_ratio_is_a_failure():
    """Where log r is -60, π_old is 0.6: exp(-2 log r) overflows on an ordinary token."""

    def dapo(log_prob, old_log_prob, advantages, mask):
        """Return DAPO's loss that is NaN in float32 where the gradient of a branch not
        taken overflows.
        """
        log_r = log_prob - old_log_prob
        r = log_r.exp()
        J = torch.minimum(r * advantages, r.clamp(0.8, 1.28) * advantages)
        J = torch.where(log_r < 1e9, J, torch.exp(-2 * log_r))
        return -torch.where(mask, J, 0).sum() / mask.sum()

    report = upref.check(dapo, "dapo")
    assert [f.oracle for f in report.failures] == ["extremes"]
