# SPDX-License-Identifier: Apache-2.0
"""Every row of tests/support/cases/table.py has the verdict that it says; by day a
sample of what takes minutes.

One file: the one test of all verdicts, what it compares, and a second opinion on the
written rows.
"""

import inspect
import itertools
import json
from dataclasses import replace

import pytest
import torch

import upref
from tests.support.cases import (
    ACCEPTED,
    ENDS,
    NAMED,
    NOTED,
    REFUSED,
    REJECTED,
    UNKNOWN,
    objective,
)
from tests.support.cases.bodies import loss
from tests.support.cases.table import ALL
from upref import Rollouts
from upref.user_code import read
from upref.verify.factors import declared_aggregation
from upref.verify.finding import Number
from upref.verify.measure import make_case
from upref.verify.oracles.batches import SCALES
from upref.verify.report import LABELS
from upref.verify.shrink import cut

EVERY = 60  # one case in so many runs by day


def by_day(cases):
    """Return the cases of a sample: one in EVERY, and the first of each file, kind and
    verdict. The others run by night.
    """
    kept, classes = [], set()
    for n, case in enumerate(cases):
        kind = case.file, case.kind, case.verdict
        if n % EVERY == 0 or kind not in classes:
            kept.append(case)
        classes.add(kind)
    return kept


def parameter(case, daily=True):
    marks = [] if daily and not case.nightly else [pytest.mark.nightly]
    if case.xfail:
        marks.append(pytest.mark.xfail(strict=True, reason=case.xfail))
    return pytest.param(case, id=f"{case.file}: {case.name}", marks=marks)


def identified(case, identity):
    """Assert that an identity is what a box's case says: none, one up to an input, or
    one of its names at its hyperparameters.
    """
    if case.verdict == UNKNOWN:
        assert not identity or (
            case.file.startswith("public") and identity.kind == "pitfall"
        ), identity
    elif case.verdict == ENDS:
        why = identity.why
        assert (
            case.says in why
            and "it differs elsewhere" in why
            and case.text in why.partition("elsewhere")[2]
        ), why
    else:
        assert identity and case.says in identity.why, identity
        match = next(m for m in identity.matches if m.name in case.objective.split())
        assert {k: match.hp[k] for k in case.hp} == pytest.approx(
            case.hp, **case.within
        ), identity


def _without_padding(case, b):
    """Return the gradient of the batch without its columns of padding, in the columns
    of the whole batch; 0 in the padding.
    """
    used, g = b.mask.any(0), torch.zeros_like(b.logp)
    g[:, used] = case.gradient(
        cut(b, list(range(len(b.mask))), used.nonzero().flatten().tolist())
    )
    return g


def numbers_on(one, b, g, unit, remark):
    """Return what the objective has at each token and what the loss has, in this unit.

    The second is None where the loss gets another batch, which the remark of a finding
    says.
    """
    if unit == "weight":
        return one.expected(b), g / one.factors(b)
    if unit == "factor":
        return one.factors(b, declared_aggregation(one.objective)), one.factors(b)
    if remark == "3 times the gradient":
        return 3 * one.gradient(b.but(adv=b.adv / 3)), g
    for times, (words, _) in SCALES.items():
        if remark == f"{words} times the gradient":
            return times * g, None
    if remark == "as without":
        return _without_padding(one, b), g
    return g, None


def near(x, value):
    """Where the tensor has the number that a report prints, with six digits of it."""
    return torch.isclose(x, torch.full_like(x, value), 2e-5, 1e-9, equal_nan=True)


def strangers(case, report) -> list[str]:
    """Return the findings whose two numbers no token of their printed batch has."""
    o, out = upref.get(case.objective), []
    one = make_case(read(case.function, o, case.hp), o, o.resolve(case.hp))
    for f in report.failures:
        prints_a_batch = "\nb = " in f"\n{f.batch}"
        if not prints_a_batch or not isinstance(f.expected, Number):
            continue
        variables = {"upref": upref, "torch": torch}
        exec(f.batch, variables)
        printed = variables["b"]
        b = printed.floats(torch.float64)
        given = b.floats(torch.float32) if "in float32" in f.batch else printed
        g = one.gradient(given).double()
        right, found = numbers_on(one, b, g, f.expected.unit, f.expected.remark)
        hit = near(right, f.expected.value)
        if isinstance(f.found, Number) and found is not None:
            hit = hit & near(found, f.found.value)
        if not hit.any():
            out.append(str(f))
    return out


def ordered(case):
    """By objective: the batches of unusual inputs are kept for the last two."""
    return case.kind, case.objective, str(case.hp)


CASES = sorted(ALL, key=ordered)
SAMPLE = {id(case) for case in by_day([case for case in CASES if not case.nightly])}


@pytest.mark.parametrize("case", [parameter(c, id(c) in SAMPLE) for c in CASES])
def test_case(case):
    """The verdict is that of the case, with its oracle, regime and words."""
    if case.verdict == REFUSED:
        with pytest.raises(upref.InputError, match=case.says):
            case.judged()
        return
    report = case.judged()
    if case.kind == "box":
        identified(case, report)
        return
    assert bool(report) == (case.verdict != REJECTED), f"{case.why}\n{report}"
    assert case.text in report.text(verbose=True), report.text(verbose=True)
    has_words_of_the_case(case, report)
    if case.kind == "loss" and case.oracles:
        labels = [f"      {label:9} " for label in LABELS.values()]
        assert any(label in str(report) for label in labels)
        assert strangers(case, report) == []
    if case.file == "kl" and report:
        is_wide = report.tolerances["per token, relative"] > 1e-5
        assert is_wide == (case.text == "float32")
    noted = {f.oracle for f in report.notes}
    if case.leaks is not None and report:
        assert case.leaks == ("masked-values" in noted), str(report)
    if case.verdict == ACCEPTED and case.file == "habits" and case.kind == "loss":
        # these two have something to say of every short loss
        assert noted <= {"stop-gradient", "extremes"}, report.text(verbose=True)


def has_words_of_the_case(case, report):
    """Assert that the findings have the regime and the cause that the case names, and
    not the cause that it excludes.
    """
    is_excluded = case.says.startswith("-")
    oracles = case.oracles or {f.oracle for f in report.findings}
    if case.verdict == REJECTED:
        hit = [f for f in report.failures if f.oracle in oracles]
        if case.kind == "logprobs":
            hit = hit[:1]
        assert hit and any(case.regime in f.regime for f in hit), str(report)
        assert is_excluded or any(case.says in f.cause for f in hit), str(report)
    elif case.kind == "loss" and case.says:
        causes = [f.cause for f in report.notes]
        assert is_excluded or any(case.says in cause for cause in causes), str(report)
    if is_excluded:
        among = [f for f in report.findings if f.oracle in oracles]
        assert not any(case.says[1:] in f.cause for f in among), str(report)


def test_each_case_has_a_name_of_its_own():
    names = [(c.kind, c.file, c.name) for c in ALL]
    assert len(set(names)) == len(names)
    assert {c.verdict for c in ALL} >= {ACCEPTED, REJECTED, NAMED}
    assert [c for c in ALL if len(f"{c.file}: {c.name}") > 60] == []


def test_each_habit_is_decided_once_and_has_a_reason():
    habits = [c for c in ALL if c.words]
    assert len({c.words for c in habits}) == len(habits)
    assert all(c.why and (c.text or c.verdict != NOTED) for c in habits)


def test_an_unchecked_correction_is_said():
    """DAPO has no sampler: π_old stands for μ, where a correction, right or wrong, is
    1.
    """
    (case,) = [c for c in ALL if c.name == "with_engine, itself"]
    report, right = upref.check(case.function, "dapo"), case.judged()
    said = [any("sampler" in line for line in r.not_checked) for r in (report, right)]
    assert report and right and said == [True, False]
    assert "not checked: what it makes of the sampler's log-probabilities" in str(
        report
    )
    assert "sampler" in json.loads(report.json())["not_checked"][0]
    identity = upref.identify(case.function)
    assert identity.name == "tis(dapo)" and not identity.on_sampler, str(identity)
    assert not any("sampler" in line for line in identity.not_checked)


def test_an_optional_correction_that_is_left_out_is_said():
    def loss(
        log_prob,
        old_log_prob,
        advantages,
        mask,
        rollout_is_weights=None,
        ref_scale=None,
    ):
        """Return DAPO's loss, times weights if they are given."""
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
        if rollout_is_weights is not None:
            J = J * rollout_is_weights
        return -J.sum() / mask.sum()

    for answer in (upref.check(loss, "dapo", skip=SLOW), upref.identify(loss)):
        assert answer
        assert (
            "what it makes of rollout_is_weights, which is left at None"
            in answer.not_checked
        )
        assert not any("ref_scale" in line for line in answer.not_checked)


@pytest.mark.nightly
def test_a_correction_in_a_whole_batch_is_said():
    def of_batch(name):
        return lambda b: upref.get(name).loss(b)

    for name, due in (("icepop(dapo)", True), ("dapo", False)):
        for mine in (name, of_batch(name)):
            report, identity = (
                upref.check(mine, "dapo", skip=SLOW),
                upref.identify(mine),
            )
            assert (
                report and any("sampler" in line for line in report.not_checked) == due
            ), report
            assert [match.name for match in identity.matches][:1] == [name], identity


SLOW = ["unusual-inputs", "one-response", "extremes"]


@pytest.mark.nightly
def test_what_was_not_checked_is_always_said():
    """A line of the short report, too."""

    def of_tokens(log_prob, old_log_prob, advantages, mask):
        """Return GRPO's loss without reduction, [B, T]."""
        return (
            torch.where(
                mask, upref.get("grpo").surrogate(log_prob, old_log_prob, advantages), 0
            )
            * -1
        )

    def of_batch(log_prob, old_log_prob, advantages, mask):
        return (
            of_tokens(log_prob, old_log_prob, advantages, mask).sum(1) / mask.sum(1)
        ).mean()

    def line(answer):
        return [x for x in str(answer).splitlines() if x.startswith("not checked: ")]

    assert line(upref.check(of_batch, "grpo")) == ["not checked: micro-batches"]
    assert line(upref.identify(of_batch)) == ["not checked: micro-batches"]
    assert line(upref.check(of_tokens, "grpo")) == [
        "not checked: the aggregation, which its caller does"
    ]
    (said,) = line(upref.check(of_batch, "grpo", skip=SLOW))
    assert said == "not checked: micro-batches, one-response, extremes, unusual-inputs"
    of_prompts = upref.get("dapo").aggregated("token-mean")
    assert line(upref.check(of_prompts, of_prompts, skip=["unusual-inputs"])) == [
        "not checked: unusual-inputs"
    ]
    assert line(upref.check("grpo", "grpo")) == []


# ---- without the checker -------------------------------------------------------------
def masks(kind, B, T, g):
    """Return a mask [B, T] of this kind: full, right or left (each row padded at random
    there), turns of three columns, or one hole of half the columns.

    g: the generator of the paddings.
    """
    t, m, ends = (
        torch.arange(T),
        torch.ones(B, T, dtype=torch.bool),
        torch.randint(T, (B, 1), generator=g),
    )
    return {"full": m, "right": t < T - ends, "left": t >= ends, "turns": (t // 3 % 2 == 0).expand(B, T),
            "hole": m & ((t < T // 8) | (t >= T // 8 + T // 2))}[kind]  # fmt: skip


def batches():
    """Yield batches of sizes, masks and compositions at which the wrong losses are
    wrong.
    """
    sizes = [
        (1, 5),
        (4, 8),
        (5, 5),
        (65, 6),
        (130, 5),
        (3, 63),
        (3, 128),
        (4, 130),
        (3, 600),
    ]
    kinds = ("hole", "full", "right", "left", "turns")
    compositions = ("mixed", "zeros", "positive", "far")
    g = torch.Generator().manual_seed(0)
    for (B, T), kind, composition in itertools.product(sizes, kinds, compositions):

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        old = (-normal(B, T).abs() * 3 - 0.002) * (1 + 4 * (normal(B, T) > 2))
        spread = 3.0 if composition == "far" else 0.25
        lp = (old + spread * normal(B, T)).clamp(max=-1e-3)
        # all are drawn: the next numbers depend on how many were
        mostly_zero = normal(B, 1) * (normal(B, 1) > 1)
        positive = normal(B, 1).abs()
        A = 2 * normal(B, 1)
        if composition == "zeros":
            A = mostly_zero
        if composition == "positive":
            A = positive
        if composition == "mixed":
            A[0], A[-1] = 37.0, -5e-4
        mask = masks(kind, B, T, g)
        group = torch.zeros(B, dtype=torch.long)
        if B % 5 == 0:
            group = torch.arange(B) * 2 // 5 * 8 % 104
        yield Rollouts(
            lp,
            old,
            A.expand(B, T).clone(),
            mask & mask.any(1, keepdim=True),
            group if B > 1 else None,
            logp_ref=(lp + 0.3 * normal(B, T)).clamp(max=-1e-3),
            entropy=normal(B, T).abs(),
            logp_sampler=(old + 0.4 * normal(B, T)).clamp(max=-1e-3),
        )


ARGUMENTS = dict(log_prob="logp", old_log_prob="logp_old", advantages="adv", mask="mask", ref_log_prob="logp_ref",
                 group="group", entropy="entropy", rollout_log_probs="logp_sampler")  # fmt: skip


def error(fn, o, hp, b):
    """Return the norm of the difference of a loss's gradient and the objective's at
    tokens, relative to the objective's norm.
    """
    takes = inspect.signature(fn).parameters
    lp = b.logp.clone().requires_grad_()
    given = {k: getattr(b, v) for k, v in ARGUMENTS.items() if k in takes} | {
        "log_prob": lp
    }
    found = torch.autograd.grad(fn(**given), lp)[0]
    fields = {
        f: getattr(b, f) for f in ("logp_old", "adv", "mask", "logp_ref", "entropy")
    }
    fields |= {
        "group": b.group if "group" in takes else None,
        "logp_sampler": b.logp_sampler if o.sampler else None,
    }
    want = torch.autograd.grad(o.loss(Rollouts(lp, **fields), **hp), lp)[0]
    return float(torch.where(b.mask, found - want, 0).norm() / (want.norm() + 1e-12))


WRITTEN = [c for c in ALL if hasattr(c.function, "body")]


@pytest.mark.parametrize(
    "case",
    [parameter(replace(c, xfail="")) for c in WRITTEN if c.kind == "loss" and c.why],
)
def test_wrong_is_wrong(case):
    if case.name in ("first advantage", "micro-batches"):
        pytest.skip(
            "wrong for one advantage per token, or for micro-batches, which these batches do not have"
        )
    fn, o = loss(case.function.body), objective(case.objective)
    grouped = "group" in inspect.signature(fn).parameters
    assert any(
        not error(fn, o, case.hp, b) < 1e-4
        for b in batches()
        if b.group is not None or not grouped
    ), case.why


@pytest.mark.parametrize(
    "case", [parameter(replace(c, xfail="")) for c in WRITTEN if c.verdict == NAMED]
)
def test_a_box_is_what_it_is(case):
    o, fn = upref.get(case.objective.split()[0]), loss(case.function.body)
    assert all(
        error(fn, o, case.hp, b) < 1e-5 for b in itertools.islice(batches(), 0, None, 7)
    )
