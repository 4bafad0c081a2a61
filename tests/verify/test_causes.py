# SPDX-License-Identifier: Apache-2.0
"""What a report says of a cause: laws over many losses. Single losses are rows of
tests/support/cases/causes.py.
"""

import inspect
import math
import re
import types
from dataclasses import replace

import pytest
import torch

import upref
from tests.seventh_set.losses import make
from tests.support.cases.bodies import calm
from tests.support.cases.causes import J, dapo
from tests.support.daily import daily
from upref import ops
from upref.ops import sg
from upref.verify.faults.losses import shape_of
from upref.verify.finding import Interval, TokenPlace
from upref.verify.oracles.state import _describe_turn
from upref.verify.pattern import MeasuredWeights, pattern
from upref.verify.regions import Region
from upref.verify.report import NOTHING_FITS, UNKNOWN


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_a_note_in_float64_hides_no_failure_in_another_dtype(low):
    """J itself has a note there: exp(800) overflows."""

    def far(lp, old):
        return (lp.dtype is low) & ((lp - old).abs() > 15)

    loss = dapo(
        lambda lp, old, A: J(lp, old, A) * torch.where(far(lp, old), math.nan, 1.0)
    )
    report = upref.check(loss, "dapo", skip=("unusual-inputs", "one-response"))
    assert [f.oracle for f in report.failures] == ["extremes"]


@pytest.mark.parametrize("name", daily(upref.names(), 4))
def test_what_no_sampler_draws_is_a_note_for_every_objective(name):
    """Its own function, with an exp that overflows, and with every branch multiplied by
    0 or 1: 0 * inf is NaN.
    """
    o, skip = (
        upref.get(name),
        (
            "unusual-inputs",
            "one-response",
            "padding",
            "masked-values",
            "permutation",
            "in-training",
        ),
    )
    indicators = {"where": by_indicator, "when": lambda c, x: by_indicator(c, x, 0)}
    for words in ({}, indicators):
        mine = replace(
            o, fn=written(o.fn, {"exp": torch.exp, "saturate": lambda x: x} | words)
        )

        def loss(
            log_prob,
            old_log_prob,
            advantages,
            mask,
            group,
            ref_log_prob,
            entropy,
            mine=mine,
        ):
            """Return the loss of `mine`, with a reference and an entropy."""
            given = dict(
                logp=log_prob,
                logp_old=old_log_prob,
                adv=advantages,
                mask=mask,
                group=group,
            )
            return mine.loss(
                upref.Rollouts.unchecked(
                    **given, logp_ref=ref_log_prob, entropy=entropy
                )
            )

        report = upref.check(loss, name, skip=skip)
        assert report, str(report)


def by_indicator(c, x, y):
    """Return where(c, x, y) as c x + (1 - c) y; `where` itself if x or y is a truth
    value.
    """
    if any(
        v is True
        or v is False
        or (isinstance(v, torch.Tensor) and v.dtype is torch.bool)
        for v in (x, y)
    ):
        return ops.where(c, x, y)
    c = torch.as_tensor(c)

    def as_number(on):
        """Return the condition as 0 and 1, in the dtype of the tensors."""
        return on.to(
            next(
                (v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), torch.float64
            )
        )

    return as_number(c) * x + as_number(~c) * y


def written(fn, words):
    """Return a copy of the function, and of those of the objectives that it calls, with
    other functions in place of the named words.
    """
    names = dict(fn.__globals__)
    made = types.FunctionType(
        fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__
    )
    made.__kwdefaults__, made.__signature__ = fn.__kwdefaults__, inspect.signature(fn)
    for n in {*fn.__code__.co_names} & names.keys():
        f = names[n]
        ours = (
            isinstance(f, types.FunctionType)
            and f.__module__.startswith("upref.objectives")
            and f is not fn
        )
        names[n] = words.get(n) or (written(f, words) if ours else f)
    return made


def test_a_value_in_float32_has_the_gradient_of_its_value():
    """A finite difference of a rounded value is no derivative."""
    o = upref.get("cispo")

    def loss(total):
        return lambda log_prob, old_log_prob, advantages, mask: total(
            o.loss(
                upref.Rollouts(log_prob, old_log_prob, advantages, mask), eps_high=0.28
            )
        )

    assert upref.check(loss(lambda x: x.float()), "cispo", eps_high=0.28)

    def undeclared(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        x = (lp - old).exp().clamp(max=1.28).detach() * A * lp + 0 * sg(lp)
        return -torch.where(mask, x, 0).sum() / mask.sum()

    report = upref.check(undeclared, "cispo", eps_high=0.28)
    assert [
        f.cause.startswith("its gradient is not the derivative")
        for f in report.failures
    ] == [True], str(report)


def test_where_no_cause_is_known_the_report_says_so():
    """Check two odd losses, and find the cause given as unknown and not as likely."""
    odd = dapo(
        lambda lp, old, A: J(lp, old, A) * torch.where((lp - old).abs() > 5, 1.1, 1.0)
    )
    for loss in (
        odd,
        dapo(
            lambda lp, old, A: J(lp, old, A) + 0.1 * lp * torch.where(A > 0, A.sin(), A)
        ),
    ):
        report = upref.check(loss, "dapo")
        assert not report and f"      unknown   {UNKNOWN}" in str(report)
        assert f"likely    {UNKNOWN}" not in str(report)


def test_a_gradient_lost_on_one_batch_is_not_called_lost():
    """Lose the gradient of advantages that are multiples of a half, and then of all."""

    # such are all that the grid holds
    def halves(lp, old, A):
        return J(lp, old, torch.where(2 * A % 1 == 0, 0.0, A))

    said = [f.cause for f in upref.check(dapo(halves), "dapo").failures]
    assert said and not any("no gradient reaches" in s for s in said)

    def nowhere(lp, old, A):
        return J(lp.detach(), old, A) + 0 * lp

    assert any(
        "no gradient reaches" in f.cause
        for f in upref.check(dapo(nowhere), "dapo").failures
    )


# ---- state, and what looks like another cause on some batches ------------------------
def after(n):
    """Return DAPO's loss, whose terms are multiplied by 1.5 from call n + 1 on."""
    calls = [0]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * (1.5 if calls[0] > n else 1)

    return dapo(change)


def calls_said(report):
    """Return the range of calls that a report names, at one of which an answer has
    changed.

    Raises:
        AssertionError: the report has another failure, or the range is longer than
            twelve calls.
    """
    (failure,) = report.failures
    assert failure.oracle == "determinism" and "keeps state" in failure.cause, str(
        report
    )
    numbers = [int(n) for n in re.findall(r"\d+", failure.cause.partition(" at ")[2])]
    # calls in between have no gradient, whatever their state
    assert numbers[-1] - numbers[0] <= 12, failure.cause
    return range(numbers[0], numbers[-1] + 1)


@pytest.mark.parametrize("n", daily([2, 1, 3, 7, 6, 8, 200, 13, 50, 77, 103], 3))
def test_the_call_at_which_an_answer_changes_is_said(n):
    said = calls_said(upref.check(after(n), "dapo"))
    # further on, many calls have no gradient
    assert n + 1 in said and (len(said) == 1 or n in (6, 7) or n > 109), said


def test_a_call_is_said_where_few_tokens_show_the_change():
    calls = [0]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * torch.where(
            (lp - old).abs() > 0.3, 1.5 if calls[0] > 77 else 1, 1
        )

    (failure,) = upref.check(dapo(change), "dapo").failures
    assert "changes at call 78," in failure.cause


COUNTERS = {
    **{f"period {p} at {at}{more}": lambda k, p=p, at=at, often=often: 1.1 if (k % p == at) != often else 1
       for p, at in [(2, 0), (3, 0), (4, 0), (7, 0), (7, 3), (11, 5), (31, 4), (40, 7), (50, 0), (100, 0), (103, 7)]
       for more, often in (("", False), (", often", True))},
    **{f"blocks of {n}": lambda k, n=n: 1.1 if k // n % 2 else 1 for n in (5, 30, 50, 100)},
    **{f"steps of {n}": lambda k, n=n: 1 + k // n / 10 for n in (1, 5, 30, 50, 100)},
    "one call": lambda k: 1.1 if k == 100 else 1,
}  # fmt: skip


@pytest.mark.parametrize("name", daily(COUNTERS, 2))
def test_a_counter_is_not_randomness(name):
    """A loss that depends on its call number keeps state; the calls that the cause
    names are calls at which the answer changes.
    """
    calls, by = [0], COUNTERS[name]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * by(calls[0])

    report = upref.check(dapo(change), "dapo")
    (failure,) = report.failures
    assert failure.oracle == "determinism" and "keeps state" in failure.cause
    if "changes at" in failure.cause:
        said = calls_said(report)
        assert any(by(k) != by(k - 1) for k in said), said
        return
    if "asked twice" in failure.cause:
        assert all(by(k) != by(k + 1) for k in range(10)), failure.cause
        return
    asked, kinds = map(int, re.findall(r"\d+", failure.cause))
    some = {by(k) for k in range(calls[0] + 1)}
    assert 2 <= kinds <= len(some), failure.cause
    for start in range(300):  # whoever asks so often meets two answers, at any call
        assert len({by(start + k) for k in range(asked)}) > 1, failure.cause


def test_a_moving_average_is_not_dated_by_a_call_of_the_check():
    """The calls of a check are nobody else's: what is printed can be tried."""
    mean = [0.0]

    def change(lp, old, A):
        mean[0] = 0.99 * mean[0] + 0.01 * float(A.mean())
        return J(lp, old, A - mean[0])

    (failure,) = upref.check(dapo(change), "dapo").failures
    assert "asked twice in a row with this batch" in failure.cause
    assert not re.search(r"calls? \d", failure.cause), failure.cause


class AverageForLogger:
    """DAPO's gradient, with the moving average of its values as the value."""

    def __init__(self):
        self.average = None

    def __call__(self, log_prob, old_log_prob, advantages, mask):
        value = right(log_prob, old_log_prob, advantages, mask)
        now = value.detach()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return value + (self.average - now)


right = dapo(J)


def with_noise(log_prob, old_log_prob, advantages, mask):
    return right(log_prob, old_log_prob, advantages, mask) + torch.rand(())


def in_random_order(dtype):
    """Return DAPO's loss in this dtype, of rows in a random order: no gradient depends
    on it, and the value does within rounding.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        order = torch.randperm(len(mask))
        lp, old, A = (x[order].to(dtype) for x in (log_prob, old_log_prob, advantages))
        return right(lp, old, A, mask[order])

    return loss


@pytest.mark.parametrize(
    "loss", [AverageForLogger(), with_noise], ids=["mean", "noise"]
)
def test_a_value_that_changes_without_its_gradient_is_a_note(loss):
    report = upref.check(loss, "dapo")
    assert report, str(report)
    (note,) = [n for n in report.notes if n.oracle == "determinism"]
    assert "the value differs, the gradient does not" in note.regime
    assert note.expected.value != note.found.value
    assert not {n.oracle for n in report.notes} & {"value", "padding", "masked-values"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_value_that_changes_within_rounding_is_no_finding(dtype):
    for seed in range(3):
        torch.manual_seed(seed)
        report = upref.check(in_random_order(dtype), "dapo", skip=("unusual-inputs",))
        assert report, str(report)
        assert not {"determinism", "masked-values"} & {
            f.oracle for f in report.findings
        }


def test_a_value_that_changes_hides_no_gradient_that_does():
    """The one is random, the other one keeps state."""
    calls = [0]

    def loss(log_prob, old_log_prob, advantages, mask):
        calls[0] += 1
        factor = 1.5 if calls[0] > 77 else 1
        return factor * with_noise(log_prob, old_log_prob, advantages, mask)

    (failure,) = upref.check(loss, "dapo").failures
    assert "changes at call 78," in failure.cause


def test_a_value_that_changes_hides_no_masked_slot():
    average = AverageForLogger()

    def loss(log_prob, old_log_prob, advantages, mask):
        leak = 0.1 * (log_prob * ~mask).mean()
        return average(log_prob, old_log_prob, advantages, mask) + leak

    report = upref.check(loss, "dapo")
    assert {"padding", "masked-values"} <= {f.oracle for f in report.failures}


def test_no_call_is_named_where_all_calls_had_another_gradient():
    assert _describe_turn([(3, True), (9, True)]) == "after call 9"
    assert _describe_turn([(3, True), (9, False)]) == "at one of the calls 4 to 9"


SKIPS = {
    "wide ratios": lambda lp, old, A: (lp - old).exp().max() < 2,
    "large advantages": lambda lp, old, A: A.abs().mean() < 0.3,
    "few tokens": lambda lp, old, A: lp.numel() > 300,
}


@pytest.mark.parametrize("skip", SKIPS)
def test_a_batch_that_is_skipped_is_not_said_to_be_detached(skip):
    report = upref.check(
        dapo(lambda lp, old, A: J(lp, old, A) * SKIPS[skip](lp, old, A)), "dapo"
    )
    assert not report and "no gradient reaches" not in str(report)


def test_an_addition_on_one_batch_is_not_said_of_another():
    """Its size is that of the batch: a part of its largest advantage, or 1 by its rows."""
    for less in (lambda A: A.max() / 7, lambda A: 1 / len(A)):

        def loss(log_prob, advantages, less=less):
            return -((advantages[:, 0] - less(advantages)) * log_prob.sum(1)).mean()

        said = str([f.cause for f in upref.check(masked(loss), "rloo").failures])
        assert "is added" not in said, said


def masked(loss):
    return lambda log_prob, advantages, mask: loss(
        torch.where(mask, log_prob, 0), advantages
    )


CLAMPS = {
    "to ±6": lambda x: x.clamp(-6, 6),
    "to ±10": lambda x: x.clamp(-10, 10),
    "at 9": lambda x: x.clamp(max=9),
    "to [-8, 12]": lambda x: x.clamp(-8, 12),
}


@pytest.mark.parametrize("said", daily(CLAMPS, 4))
def test_a_clamp_is_named_by_its_bounds(said):
    """A clamp of log r is named in DAPO and in UP's branch of bad tokens, and not where
    another change is there too.
    """
    clamp = CLAMPS[said]
    causes = [
        f.cause
        for f in upref.check(
            dapo(lambda lp, old, A: J(old + clamp(lp - old), old, A)), "dapo"
        ).failures
    ]
    assert any(f"log r is clamped {said}" in c for c in causes), causes
    # which clips what is below itself
    causes = [f.cause for f in upref.check(up_dapo_of(clamp), "up_dapo").failures]
    assert any(
        f"log r is clamped at {clamp(torch.tensor(99.0)):g} where A <= 0" in c
        for c in causes
    ), causes
    torn = dapo(
        lambda lp, old, A: (
            torch.where((A > 0) & (old < -3), 0.9, 1) * J(old + clamp(lp - old), old, A)
        )
    )
    assert not any("is clamped" in f.cause for f in upref.check(torn, "dapo").failures)


def up_dapo_of(clamp):
    """Return UP-DAPO's loss with clamp(log r) in the branch of bad tokens."""

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return the loss."""
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return (
            -torch.where(
                mask, torch.where(A > 0, A * lp, J(old + clamp(lp - old), old, A)), 0
            ).sum()
            / mask.sum()
        )

    return loss


@pytest.mark.parametrize(
    ("name", "of", "cause"),
    [
        ("dapo", lambda d, old, A: J(old + d, old, A), "log r is clamped to ±10"),
        (
            "cispo",
            lambda d, old, A: sg(d.exp().clamp(max=5)),
            "log r is clamped to -10 and above in a constant weight",
        ),
    ],
)
def test_a_clamp_is_said_once_and_its_bound_is_round(name, of, cause):
    """By the oracle that looks for it, not by those whose batches have far ratios too."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages[:, None])
        J = of((lp - old).clamp(-10, 10), old, A)
        return (
            -torch.where(mask, J if name == "dapo" else J * A * lp, 0).sum()
            / mask.sum()
        )

    hp = {} if name == "dapo" else {"eps_high": 4.0}
    assert [(f.oracle, f.cause) for f in upref.check(loss, name, **hp).failures] == [
        ("extremes", cause)
    ]


# ---- a fault of what the objective does not have is no cause -------------------------
def by_tokens(change, total):
    """Return a loss: minus total(change(r, lp, old, A), mask)."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages.expand_as(mask))
        return -total(torch.where(mask, change((lp - old).exp(), lp, old, A), 0), mask)

    return loss


def token_mean(x, m):
    return x.sum() / m.sum()


def mean_of_means(x, m):
    return (x.sum(1) / m.sum(1)).mean()


def mean_of_sums(x, m):
    return x.sum(1).mean()


def within_delta(r, lp, old, A):
    """Return CPPO's terms without its budget."""
    return torch.where(
        (A * (lp - old) <= 0) | ((lp.exp() - old.exp()).abs() <= 0.15), r * A, 0
    )


def rootless_gmpo(log_prob, old_log_prob, advantages, mask):
    x, A = torch.where(mask, log_prob - old_log_prob, 0), advantages[:, :1]
    clipped = torch.where(A > 0, x.clamp(max=0.4), x.clamp(min=-0.4))
    return -(A[:, 0] * torch.where(mask, clipped, 0).sum(1).exp()).mean()


def corrected(change):
    """Return a loss: minus the mean over tokens of change(r, lp, old, A), weighted by
    the ratio to the sampler, at most 2.
    """

    def loss(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
        lp, old, A, mu = calm(
            mask, log_prob, old_log_prob, advantages, rollout_log_probs
        )
        w = (old - mu).exp().clamp(max=2).detach()
        return (
            -torch.where(mask, w * change((lp - old).exp(), lp, old, A), 0).sum()
            / mask.sum()
        )

    return loss


alone = "alone: what else {} has is missing".format
OF_NO_CLIP = {  # objective, what is wrong -> the loss, and what is said
    ("kl_cov", "no penalty"): (by_tokens(lambda r, lp, old, A: r * A, token_mean), alone("kl_cov")),
    ("cfpo", "no penalty"): (by_tokens(lambda r, lp, old, A: r * A, mean_of_means), alone("cfpo")),
    ("drpo", "no penalty"): (by_tokens(lambda r, lp, old, A: r * A, token_mean), alone("drpo")),
    ("sapo", "no gate"): (by_tokens(lambda r, lp, old, A: r * A, mean_of_means), alone("sapo")),
    ("dro", "no penalty"): (by_tokens(lambda r, lp, old, A: A * lp, token_mean), alone("dro")),
    ("dro", "+ for -"): (
        by_tokens(lambda r, lp, old, A: A * lp + 0.05 * (lp - old) ** 2, token_mean), "has the opposite sign"),
    ("cfpo", "+ for -"): (
        by_tokens(lambda r, lp, old, A: r * A + A.abs() / 0.4 * (r - 1) ** 2, mean_of_means), "has the opposite sign"),
    ("wapo", "losers"): (
        by_tokens(lambda r, lp, old, A: r.clamp(max=10) * A, mean_of_sums), "there is the term of the other sign of A"),
    ("wapo", "no bound"): (
        by_tokens(lambda r, lp, old, A: torch.where(A > 0, r * A, 0), mean_of_sums), "no bound has an effect"),
    ("cppo", "no budget"): (by_tokens(within_delta, mean_of_sums), "its gradient is that of dppo_tv(delta=0.15)"),
    ("gmpo", "no root"): (
        rootless_gmpo, "exp(sum_over_response(clipped)), where gmpo has A[..., 0] * exp(mean_over_response(clipped))"),
}  # fmt: skip
OF_A_CLIP = (
    "bound",
    "clip",
    "minimum",
    "maximum",
    "branches",
    "bandpo",
    "seq-mean-token-sum",
)


@pytest.mark.parametrize(("name", "what"), OF_NO_CLIP)
def test_a_fault_of_what_an_objective_lacks_is_no_cause(name, what):
    """A clip, branches, a minimum; causes of two findings for each."""
    loss, says = OF_NO_CLIP[name, what]
    causes = [
        f.cause
        for f in upref.check(
            loss, name, skip=("unusual-inputs", "one-response")
        ).failures
        if f.cause
    ]
    assert causes and (says in causes[0]), causes
    others = [c for c in causes if not says or says not in c]
    assert not [c for c in others if any(word in c for word in OF_A_CLIP)], causes


@pytest.mark.parametrize(("name", "aggregate", "says"), [
    ("vespo", mean_of_means, "its gradient is that of is_pg, aggregated by seq-mean-token-mean"),
    ("vespo", mean_of_sums, "its gradient is that of is_pg"),
])  # fmt: skip
def test_an_objective_is_named_with_the_aggregation_of_the_loss(name, aggregate, says):
    """is_pg sums over the tokens: a mean of means is not it, and upref.check(loss,
    "is_pg") says so.
    """
    report = upref.check(
        by_tokens(lambda r, lp, old, A: r * A, aggregate),
        name,
        skip=("unusual-inputs",),
    )
    assert says in {f.cause for f in report.failures}, report


# objective inside -> a wrong term of it, and what is said of it with and without the
# correction
UNDER_TIS = {
    "up_dapo": (
        lambda r, lp, old, A: torch.where(A > 0, A * lp, r * A),
        "the clip has no lower side where A <= 0",
    ),
    "dapo": (
        lambda r, lp, old, A: torch.minimum(A / r, (1 / r).clamp(0.8, 1.28) * A),
        "the ratio is inverted",
    ),
    "cispo": (lambda r, lp, old, A: r.clamp(max=5) * A * lp, "is not detached"),
    "sapo": (lambda r, lp, old, A: r * A, alone("tis(sapo)")),
}


@pytest.mark.parametrize("name", UNDER_TIS)
def test_a_cause_is_found_behind_a_correction_of_the_sampler(name):
    """Decided by the prefix of a name, and put in without the sampler's factor, none
    was.
    """
    change, says = UNDER_TIS[name]
    for mine, of in (
        (corrected(change), f"tis({name})"),
        (by_tokens(change, token_mean), name),
    ):
        o = upref.get(of).aggregated("token-mean")
        causes = [
            f.cause
            for f in upref.check(
                mine, o, skip=("unusual-inputs", "one-response")
            ).failures
            if f.cause
        ]
        assert causes and says.replace("tis(sapo)", of) in causes[0], (of, causes)


@pytest.mark.parametrize("name", upref.names())
def test_what_an_objective_has_is_measured(name):
    """Of some it is known; of a correction it is that of the objective inside."""
    o = upref.get(name)
    has, inside = shape_of(o, o.hyperparameters), upref.get(f"tis({name})")
    assert shape_of(inside, inside.hyperparameters) == has
    smooth = {"cfpo", "drpo", "dro", "dppo_tv_prime_rl", "ipo", "kl_cov", "sapo"}
    smooth |= {"vespo"}
    by_mask = {"cppo", "dppo_kl", "dppo_tv", "m2po"}
    assert has.is_smooth == (name in smooth) and (
        has.is_pessimistic and has.value_is_masked and not has.has_constant_weight
    ) == (name in by_mask)
    assert has.has_constant_weight == name.startswith(
        ("cispo", "dppo_kl_verl", "dppo_tv_verl")
    )
    assert (has.ignores_ratio[1.0] and has.follows_ratio[-1.0]) == (
        name.startswith("up") or name == "topr"
    )


def test_a_pattern_is_said_of_tokens_that_show_it():
    """None of no token, and none that the printed batch contradicts."""
    ones = torch.ones(2, 3, dtype=torch.float64)
    b = upref.Rollouts(-ones, -ones, ones, ones.bool())

    def at(found, expected):
        return MeasuredWeights(b, found, expected, ones, "r", b.mask)

    off = ones.clone()
    off[0, 0] += 1e-6
    assert "0 of" not in str(pattern(at(off, ones), at(off, ones), 1e-9, False))
    assert pattern(at(6 * ones, ones), at(2 * ones, ones), 1e-9, False) == NOTHING_FITS
    said = pattern(at(6 * ones, ones), at(6 * ones, ones), 1e-9, False)
    assert said.words == "every weight of the tested batch is 6 times what it should be"
    assert said.kind == "pattern" and said.ids == ()
    off[0, 0] = 0
    lost = pattern(at(off, ones), at(off, ones), 1e-9, False)
    assert lost.words.startswith("1 of 6 tokens has no gradient")
    assert pattern(at(off, ones), at(ones, ones), 1e-9, False) == NOTHING_FITS
    falling = ones * torch.tensor([1, 0.99, 0.98], dtype=torch.float64)
    of_column = pattern(at(falling, ones), at(falling, ones), 1e-9, True)
    assert of_column.words.endswith("1 in column 0, 0.99 in column 1, 0.98 in column 2")
    flipped = falling.flip(-1)
    assert pattern(at(falling, ones), at(flipped, ones), 1e-9, True) == NOTHING_FITS
    in_one_row = ones.clone()
    in_one_row[0] = falling[0]
    by_row = at(in_one_row, ones)
    assert pattern(by_row, by_row, 1e-9, True) == NOTHING_FITS


SLOW = ("unusual-inputs", "one-response", "in-training")


def test_a_factor_of_small_batches_is_not_said_of_all():
    """The weights of the larger grid are right."""
    plain = dapo()

    def loss(log_prob, old_log_prob, advantages, mask):
        k = 0.25 if len(mask) <= 64 else 1.0
        return k * plain(log_prob, old_log_prob, advantages, mask)

    report = upref.check(loss, "dapo", skip=SLOW)
    assert {f.oracle: f.cause for f in report.failures} == {
        "gradient": "",
        "on-policy": "",
    }


def test_no_bound_is_named_that_the_objective_does_not_have():
    """UP has no upper bound that the loss could have missed."""

    def clipped_at_5(lp, old, A):
        r = (lp - old).exp()
        negative = torch.minimum(r * A, r.clamp(min=0.8) * A)
        return torch.where(A > 0, A * lp * (r < 5), negative)

    (finding,) = upref.check(dapo(clipped_at_5), "up_dapo", skip=SLOW).failures
    assert finding.regime.startswith("A > 0, r > 5 ")
    assert finding.cause == (
        "the tokens of A > 0 are clipped too, or left out beyond the bound (with bounds "
        "0.8 and 5)"
    )


def test_no_interval_of_the_ratio_is_named_where_other_tokens_decide():
    """The mean of the other tokens pushes a token of A = 0, below a bound of the loss
    that lies between the ratios of the batch.
    """
    plain = dapo()

    def loss(log_prob, old_log_prob, advantages, mask):
        A = torch.where(mask, advantages, 0.0)
        return plain(log_prob, old_log_prob, A - A.sum() / mask.sum(), mask)

    finding, *_ = upref.check(loss, "dapo", skip=SLOW).failures
    (at_zero,) = [place for place in finding.also if place.sign == 0]
    assert at_zero.decided_by == "others" and not at_zero.intervals


def core(log_prob, old_log_prob, advantages, mask):
    """Return the terms of DAPO, [B, T]."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def without_sure_tokens(log_prob, old_log_prob, advantages, mask):
    is_sure = log_prob.detach() > -0.105
    terms = core(log_prob, old_log_prob, advantages, mask & ~is_sure)
    return -terms.sum() / mask.sum()


def clamped_terms(log_prob, old_log_prob, advantages, mask):
    terms = core(log_prob, old_log_prob, advantages, mask)
    return -terms.clamp(-50, 50).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "number"), [(without_sure_tokens, "π_old"), (clamped_terms, "|A|")]
)
def test_no_interval_of_the_ratio_is_named_where_another_number_decides(loss, number):
    report = upref.check(loss, "dapo", skip=(*SLOW, "every-value"))
    finding, *_ = report.failures
    for place in (finding.place, *finding.also):
        assert place.decided_by == number and not place.intervals
    assert f"at some tokens ({number} may tell which)" in str(report)


def test_a_region_contains_the_ratios_of_its_intervals_and_all_without_one():
    r = torch.tensor([0.5, 1.0, 1.2, 3.0], dtype=torch.float64)
    bounded = TokenPlace(1.0, (Interval(None, 0.8), Interval(1.2, None)))
    anywhere = TokenPlace(1.0, decided_by="|A|")
    inside = Region(bounded, 1.0, r > 0).contains(r)
    assert inside.tolist() == [True, False, True, True]
    assert Region(anywhere, 1.0, r > 0).contains(r).all()


# ---- words that claim no more than the batches tell apart ----------------------------
def first_order(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss with 1 + log r in place of r."""
    r = 1 + torch.where(mask, log_prob - old_log_prob, 0)
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A).sum() / mask.sum()


def test_log_r_and_one_plus_log_r_are_not_told_apart_by_a_gradient():
    (failure,) = upref.check(first_order, "ppo_clip").failures
    assert failure.cause.startswith("log r, or 1 + log r, replaces the ratio"), failure
    # where A > 0 there is no lower bound, and the words name none
    assert "up to log r = 0.2 where A > 0" in failure.cause


def rootless_ripo(log_prob, old_log_prob, advantages, mask):
    """Return RIPO's loss without the root in its band, averaged over all tokens, not
    within groups.
    """
    A = torch.where(mask, advantages, 0)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    e = 0.05 / torch.where(mask, old_log_prob, 0).exp()
    c = torch.maximum(torch.minimum(r, 1 + e), 1 - e)
    return -torch.minimum(r * A, c * A).sum() / mask.sum()


def test_a_loss_without_groups_is_not_said_to_average_over_groups():
    (failure,) = upref.check(rootless_ripo, "ripo").failures
    assert failure.cause == (
        "its gradient is that of bandpo_tv(delta=0.05), aggregated by token-mean"
    )


def quantile_of_the_batch(log_prob, old_log_prob, advantages, mask, entropy):
    """Return ASPO's loss with one quantile of the entropies over the whole batch, and
    bounds that are float32 tensors.
    """
    x, A, lp = (
        torch.where(mask, v, 0) for v in (log_prob - old_log_prob, advantages, log_prob)
    )
    calm = entropy <= torch.where(mask, entropy, torch.nan).flatten().nanquantile(0.8)
    eps, r = torch.where(calm, 0.2, 0.4), x.exp().detach()
    w = torch.where(A > 0, 1 / r, r).clamp(max=3)
    alive = torch.where(A > 0, r <= 1 + eps, r >= 1 - eps)
    return -(torch.where(alive, w, 0) * A * lp).sum() / mask.sum()


@pytest.mark.nightly
def test_the_printed_batch_shows_more_than_a_bound_in_float32():
    failures = upref.check(quantile_of_the_batch, "aspo_code").failures
    assert failures
    for failure in failures:
        r = failure.place.numbers["r"]
        assert all(abs(r / bound - 1) > 1e-4 for bound in (0.6, 0.8, 1.2, 1.4)), r
    # what is printed depends on other responses
    b = failures[0].example.inputs
    assert len(b["entropy"]) > 1


def masked_beyond(bounds):
    """Return DAPO's loss without a clip, its terms multiplied by bounds(A, log r)."""

    def loss(log_prob, old_log_prob, advantages, mask):
        A, x = (torch.where(mask, v, 0) for v in (advantages, log_prob - old_log_prob))
        return -(x.exp() * A * bounds(A, x) * mask).sum() / mask.sum()

    return loss


def of_log_r(A, x):
    return ~(((A > 0) & (x > 0.28)) | ((A < 0) & (x < -0.2)))


def of_r_and_five(A, x):
    r = x.exp()
    return torch.where(A > 0, r <= 1.28, (r >= 0.8) & (r <= 5))


def plain_policy_gradient(log_prob, old_log_prob, advantages, mask):
    A, lp = (torch.where(mask, v, 0) for v in (advantages, log_prob))
    return -(A * lp).sum() / mask.sum()


BY_GRADIENT_ALONE = [
    (
        masked_beyond(of_log_r),
        "eps_low is 0.181269, not 0.2; eps_high is 0.32313, not 0.28: the bounds are on "
        "log r, not on r",
    ),
    (
        masked_beyond(of_r_and_five),
        "c is 5, not absent: where A < 0 no gradient is left beyond r = 5",
    ),
    (
        plain_policy_gradient,
        "old_log_prob has no effect: every weight is as where the ratio is 1",
    ),
]


@pytest.mark.parametrize(("loss", "cause"), BY_GRADIENT_ALONE)
def test_a_mask_or_a_missing_ratio_is_not_called_a_clip_or_a_ratio(loss, cause):
    assert upref.check(loss, "dapo").failures[0].cause == cause


def left_out_kl(keep):
    """Return GRPO's loss whose KL term is left out unless keep(log π_ref - log π_θ)."""

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        A, x, d = (
            torch.where(mask, v, 0)
            for v in (advantages, log_prob - old_log_prob, ref_log_prob - log_prob)
        )
        r, kl = x.exp(), torch.where(keep(d), d.exp() - 1 - d, 0)
        J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A) - 0.04 * kl
        return -(torch.where(mask, J, 0).sum(1) / mask.sum(1)).mean()

    return loss


@pytest.mark.parametrize(
    ("keep", "cause"),
    [
        (lambda d: d.exp() - 1 - d <= 1, "clamped at 1, or left out beyond it"),
        (lambda d: d.abs() <= 5, "clamped to ±5, or the term is left out beyond it"),
    ],
)
def test_a_kl_term_that_is_left_out_is_not_said_to_be_clamped(keep, cause):
    failure = upref.check(left_out_kl(keep), "grpo", beta=0.04).failures[0]
    assert cause in failure.cause, failure.cause


def test_a_weight_that_survives_the_clip_lacks_the_minimum_and_no_stop_gradient():
    """GPPO bounds its constant weight on one side for each sign of A."""

    def loss(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        bounded = r.clamp(0.8, 1.28).detach() / r.detach() * r
        return -(bounded * A).sum() / mask.sum()

    report = upref.check(loss, "gppo")
    said = " ".join(f.cause for f in report.failures)
    assert "the minimum is missing" in said and "stop-gradient" not in said, said
    assert not [f for f in report.failures if f.oracle == "stop-gradient"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds_that_are_exchanged_for_bad_responses_alone_are_not_swapped(dtype):
    """The cause names one bound, and does not say that the two are swapped."""

    def bound(A, of_bad, of_good):
        bounds = (torch.tensor(x, dtype=dtype) for x in (of_bad, of_good))
        return torch.where(A < 0, *bounds)

    def loss(log_prob, old_log_prob, advantages, mask):
        log_r = torch.where(mask, log_prob - old_log_prob, 0)
        s = (log_r.sum(1) / mask.sum(1)).exp()
        A = advantages[:, 0]
        low = bound(A, 1 - 4e-4, 1 - 3e-4)
        high = bound(A, 1 + 3e-4, 1 + 4e-4)
        clipped = torch.maximum(torch.minimum(s, high), low)
        return -torch.minimum(s * A, clipped * A).mean()

    report = upref.check(loss, "gspo")
    said = " ".join(f.cause for f in report.failures)
    assert "swapped" not in said and "eps_low is 0.0004" in said, report.text()


def test_both_bounds_exchanged_are_swapped():
    def loss(log_prob, old_log_prob, advantages, mask):
        log_r = torch.where(mask, log_prob - old_log_prob, 0)
        s = (log_r.sum(1) / mask.sum(1)).exp()
        A = advantages[:, 0]
        return -torch.minimum(s * A, s.clamp(1 - 4e-4, 1 + 3e-4) * A).mean()

    report = upref.check(loss, "gspo")
    assert "the two sides of the clip are swapped" in report.failures[0].cause


# of each: the objective, the body of the loss, and of what its cause speaks; None: of
# nothing, since a fault that resembles it is not it
LOOKALIKES = {
    "whitened over slots": (
        "ppo_clip",
        "A=(A-A.mean())/(A.std()+1e-8)",
        "tok(torch.minimum(r*A,r.clamp(.8,1.2)*A))",
        "masked ones count, as 0",
    ),
    "centered over slots": (
        "ppo_clip",
        "A=torch.where(m,advantages-advantages.mean(),0.)",
        "tok(torch.minimum(r*A,r.clamp(.8,1.2)*A))",
        "all slots of each batch: masked ones count",
    ),
    "whitened over columns": (
        "ppo_clip",
        "A=(A-A.mean(1,keepdim=True))/(A.std(1,keepdim=True)+1e-8)",
        "tok(torch.minimum(r*A,r.clamp(.8,1.2)*A))",
        None,
    ),
    "floor where A > 0": (
        "up_dapo",
        "x=A*lp.clamp(min=-8)",
        "tok(torch.where(A>0,x,torch.minimum(r*A,r.clamp(min=.8)*A)))",
        "below -8",
    ),
    "floor of losses": (
        "dapo",
        "r=torch.where(A<0,(lp.clamp(min=-8)-old).exp(),r)",
        "tok(torch.minimum(r*A,r.clamp(.8,1.28)*A))",
        None,
    ),
    "cap on the product": (
        "wapo",
        "x=(r*A).clamp(max=10.)",
        "tsum(torch.where(A>0,x,0.))",
        "the bound acts on the product with A",
    ),
    "cap on some products": (
        "wapo",
        "x=torch.where(A<1,(r*A).clamp(max=10.),r.clamp(max=10.)*A)",
        "tsum(torch.where(A>0,x,0.))",
        None,
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_cause_is_not_said_of_what_resembles_it(name):
    objective, first, last, says = LOOKALIKES[name]
    report = upref.check(make(f"{first}\nreturn {last}"), objective)
    explained = [f.cause for f in report.failures if f.is_explained]
    assert report.failures
    if says is None:
        assert not explained, str(report)
    else:
        assert any(says in cause for cause in explained), str(report)
