# SPDX-License-Identifier: Apache-2.0
"""A sentence about the cause stands where it is true, and not where another fault trips the same oracle."""

import inspect
import math
import re
import types
from dataclasses import replace

import pytest
import torch

import upref
from tests.support.cases.bodies import calm
from upref import ops
from upref.ops import sg
from upref.verify.report import UNKNOWN


def J(lp, old, A, low=0.2, high=0.28):
    r = (lp - old).exp()
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def dapo(change=J, total=lambda x, m: -torch.where(m, x, 0).sum() / m.sum()):
    """`change`: the surrogate of (lp, old, A); total: its sum."""
    return lambda log_prob, old_log_prob, advantages, mask: total(
        change(*calm(mask, log_prob, old_log_prob, advantages)), mask
    )


def unmasked(total):
    return lambda log_prob, old_log_prob, advantages, mask: total(J(log_prob, old_log_prob, advantages), mask)


def up_dapo(ids):
    def loss(log_prob, old_log_prob, advantages, mask, group):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        r = torch.where(A > 0, lp - lp.detach(), lp - old).exp()
        x = torch.where(A > 0, r * A, torch.minimum(r * A, r.clamp(min=0.8) * A))
        g = ids(group, len(mask))
        each = [torch.where(mask, x, 0)[g == i].sum() / mask[g == i].sum() for i in g.unique()]
        return -torch.stack(each).mean()

    return loss


def by_row(log_prob, old_log_prob, advantages, mask, group):
    weight = 1 + torch.arange(len(mask), dtype=log_prob.dtype)[:, None] / 10
    return up_dapo(lambda g, n: g)(log_prob, old_log_prob, weight * advantages, mask, group)


def counted(n):
    return lambda x, m: -torch.where(m, x, 0).sum() / n(m.sum(1), len(m))


def stateful():
    calls = [0]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * (1 + calls[0] / 1000)

    return change


def entropy(of):
    def loss(log_prob, old_log_prob, advantages, mask, entropy):
        lp, old, A, H = calm(mask, log_prob, old_log_prob, advantages, entropy)
        return -torch.where(mask, of(J(lp, old, A), H), 0).sum() / mask.sum()

    return loss


def micro(n):
    """Unreduced by a denominator of its own, though it is told the mini-batch's totals."""

    def loss(log_prob, old_log_prob, advantages, mask, totals):
        x = J(*calm(mask, log_prob, old_log_prob, advantages))
        return -torch.where(mask, x, 0).sum() / n(mask, totals)

    return loss


def quotient(lp, old, A):
    r = lp.exp() / old.exp()
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def ranked(by):
    """Told the totals and the number of ranks n, multiplied by what it makes of these and of its mask."""

    def loss(log_prob, old_log_prob, advantages, mask, totals, num_ranks=1):
        x = J(*calm(mask, log_prob, old_log_prob, advantages))
        return -torch.where(mask, x, 0).sum() * by(num_ranks, mask) / totals.tokens

    return loss


class Passed(torch.autograd.Function):
    """A backward pass that makes something of its own of grad_output."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return ctx.by(g), None


def passed(by):
    return dapo(total=lambda x, m: Passed.apply(-torch.where(m, x, 0).sum() / m.sum(), by))


def eps_high(acts):
    """The argument counts only where this holds of log r and the mask."""

    def loss(log_prob, old_log_prob, advantages, mask, eps_high=0.28):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return -torch.where(mask, J(lp, old, A, 0.2, eps_high if acts(lp - old, mask) else 0.28), 0).sum() / mask.sum()

    return loss


def by_length(where):
    """Each response's own mean where this holds of the mask, one mean of all tokens elsewhere."""
    mean = lambda x, m: (x.sum(1) / m.sum(1).clamp(min=1)).mean() if where(m) else x.sum() / m.sum()
    return dapo(total=lambda x, m: -mean(torch.where(m, x, 0), m))


def bonus(of):
    def loss(log_prob, old_log_prob, advantages, mask, entropy):
        lp, old, A, H = calm(mask, log_prob, old_log_prob, advantages, entropy)
        return -torch.where(mask, J(lp, old, A) + of(H, lp - old), 0).sum() / mask.sum()

    return loss


def up_nan(where):
    """UP whose terms are NaN where this holds of (log π, log r, A); no exp of it overflows."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        r = (lp - old).clamp(max=60).exp()
        x = torch.where(A > 0, lp * A, torch.minimum(r * A, r.clamp(min=0.8) * A))
        return -torch.where(mask, x * torch.where(where(lp, lp - old, A), math.nan, 1.0), 0).sum() / mask.sum()

    return loss


def up_where(log_prob, old_log_prob, advantages, mask):
    """UP as nearly everybody writes it."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    r = (lp - old).exp()
    x = torch.where(A > 0, (lp - lp.detach()).exp() * A, torch.minimum(r * A, r.clamp(min=0.8) * A))
    return -torch.where(mask, x, 0).sum() / mask.sum()


def rare(below, times=math.nan):
    """DAPO, and other weights of tokens rarer than that whose ratio is near 1."""
    hit = lambda lp, old: (lp < below) & ((lp - old).abs() < 1)
    return dapo(lambda lp, old, A: J(lp, old, A) * torch.where(hit(lp, old), times, 1.0))


def whitened(where=lambda m: True, eps=1e-8):
    """As verl whitens: with a variance that divides by the number of tokens, and eps under its root."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        mean, var = A[mask].mean(), A[mask].var(correction=0)
        A = (A - mean) * torch.rsqrt(var + eps) if where(mask) else A
        return -torch.where(mask, J(lp, old, A), 0).sum() / mask.sum()

    return loss


def cut(columns, where=lambda m: True):
    """Some columns alone, in the numerator and in the denominator."""
    mean = lambda x, m: -torch.where(m, x, 0).sum() / m.sum().clamp(min=1)
    return dapo(total=lambda x, m: mean(x[:, columns], m[:, columns]) if where(m) else mean(x, m))


OWN, RANKS = "own tokens or responses", "not scaled by the number of ranks"
HAS_NO, LEAVES = "has no effect", "leaves out what comes from above"
NEAR = {  # (a cause, a loss of which it holds, losses of which it holds on some batches only)
    "bonus": ("a bonus of", bonus(lambda H, x: 0.01 * H), [
        bonus(lambda H, x: 0.01 * H**2), bonus(lambda H, x: 0.01 * H.clamp(max=1.5)),
        bonus(lambda H, x: 0.01 * H * (len(H) > 20)), bonus(lambda H, x: 0.01 * H * x.abs().max().clamp(min=0.5)),
        bonus(lambda H, x: 0.01 * H * (H.shape[1] < 30)),
    ]),
    "dead": (HAS_NO, eps_high(lambda x, m: False), [
        eps_high(lambda x, m: 1 < len(m) < 8), eps_high(lambda x, m: m.shape[1] > 30),
        eps_high(lambda x, m: x.abs().max() < 1), eps_high(lambda x, m: len(m) > 60),
        eps_high(lambda x, m: m.sum() == 1),
    ]),
    "micro-batches": (OWN, micro(lambda m, t: m.sum()), [
        micro(lambda m, t: m.sum() if 2 * len(m) >= t.sequences else t.tokens),
        micro(lambda m, t: m.sum() if len(m) == 4 else t.tokens),
        micro(lambda m, t: m.sum() if m.shape[1] == 9 else t.tokens),
        micro(lambda m, t: m.sum() if m.shape[1] < 30 else t.tokens),
    ]),
    "ranks": (RANKS, ranked(lambda n, m: 1), [
        ranked(lambda n, m: 1 if n == 2 else n), ranked(lambda n, m: 1 if n == 4 else n),
        ranked(lambda n, m: n if m.sum() > 25 else 1), ranked(lambda n, m: n if m.shape[1] > 30 else 1),
    ]),
    "loss-scale": (LEAVES, passed(torch.ones_like), [
        passed(lambda g: g.clamp(min=1)), passed(torch.sign), passed(lambda g: g.clamp(max=1) * 2 if g < 1 else g),
    ]),
    "empty row": ("counted among the responses", dapo(total=counted(lambda n, B: B * n[n > 0].double().mean())), [
        dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / m.sum()
             * ((len(m) - 1) / len(m) if (m.sum(1) == 0).any() and x.abs().max() > 1 else 1)),
        dapo(total=counted(lambda n, B: n.sum() * (55 / 54 if (n == 0).any() else 1))),
    ]),
    "aggregation": ("seq-mean-token-mean", by_length(lambda m: True), [
        by_length(lambda m: m.shape[1] == 9), by_length(lambda m: m.sum(1).max() < 10), by_length(lambda m: len(m) > 7),
    ]),
    "blocks": ("groups are taken for blocks of", up_dapo(lambda g, n: torch.arange(n) // 4), [
        up_dapo(lambda g, n: torch.arange(n) // ((n + 1) // 2)), up_dapo(lambda g, n: torch.arange(n) // 4 % 3),
    ]),
    "overflow": ("overflows", up_where, [
        *(up_nan(lambda lp, x, A, at=at: x > at) for at in (80, 87, 89.5, 95, 700, 712)),
        up_nan(lambda lp, x, A: (x > 88.723) & (A > 0.5)), up_nan(lambda lp, x, A: (x > 88.723) & (lp > -100)),
    ]),
    "whitened": ("whitened again", whitened(), [
        whitened(lambda m: len(m) > 7), whitened(lambda m: m.shape[1] < 30), whitened(eps=0.3),
    ]),
    "power": ("the ratio is taken to the power 1.5", dapo(lambda lp, old, A: J(1.5 * lp, 1.5 * old, A)), [
        dapo(lambda lp, old, A: 1.5 * J(lp, old, A)), dapo(lambda lp, old, A: 1.5 * J(lp, old, A, 0.2, 0.3)),
        dapo(lambda lp, old, A: J(lp * (k := torch.where(A > 0, 1.5, 1)), old * k, A)),
    ]),
    "first column": ("the first column of the batch is not trained, and not counted", cut(slice(1, None)), [
        cut(slice(2, None)), cut(slice(1, None), lambda m: len(m) > 7), cut(slice(1, None), lambda m: m.shape[1] < 30),
    ]),
    "last column": ("the last column of the batch is not trained, and not counted", cut(slice(-1)), [
        cut(slice(-2)), cut(slice(-1), lambda m: len(m) > 7), cut(slice(-1), lambda m: m.shape[1] < 30),
    ]),
    "underflow": ("underflows", dapo(quotient), [rare(-110), rare(-85), rare(-80, 0.5), rare(-700), rare(-750)]),
}  # fmt: skip
MEANT = {"blocks": "up_dapo", "overflow": "up_dapo"}
CASES = [(name, n) for name, (_, _, near) in NEAR.items() for n in range(-1, len(near))]


@pytest.mark.parametrize("name, n", CASES)
def test_a_cause_holds_on_every_batch_or_is_not_said(name, n):
    words, true, near = NEAR[name]
    more = {"eps_high": 0.28} if name == "dead" else {}
    report = upref.check(true if n < 0 else near[n], MEANT.get(name, "dapo"), **more)
    assert any(words in f.cause for f in report.findings) == (n < 0), str(report)


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
def test_a_note_in_float64_hides_no_failure_in_another_dtype(low):
    """J itself has a note there: exp(800) overflows."""
    far = lambda lp, old: (lp.dtype is low) & ((lp - old).abs() > 50)
    loss = dapo(lambda lp, old, A: J(lp, old, A) * torch.where(far(lp, old), math.nan, 1.0))
    assert [f.oracle for f in upref.check(loss, "dapo", skip=("unusual-inputs", "one-response")).failures] == [
        "extremes"
    ]


@pytest.mark.parametrize("name", upref.names())
def test_what_no_sampler_draws_is_a_note_for_every_objective(name):
    """Its own function, with an exp that overflows, and with every branch multiplied by 0 or 1: 0 * inf is NaN."""
    o, skip = (
        upref.get(name),
        ("unusual-inputs", "one-response", "padding", "masked-values", "permutation", "in-training"),
    )
    indicators = {"where": by_indicator, "when": lambda c, x: by_indicator(c, x, 0)}
    for words in ({}, indicators):
        mine = replace(o, fn=written(o.fn, {"exp": torch.exp, "saturate": lambda x: x} | words))

        def loss(log_prob, old_log_prob, advantages, mask, group, ref_log_prob, entropy, mine=mine):
            given = dict(logp=log_prob, logp_old=old_log_prob, adv=advantages, mask=mask, group=group)
            return mine.loss(upref.Rollouts.unchecked(**given, logp_ref=ref_log_prob, entropy=entropy))

        report = upref.check(loss, name, skip=skip)
        assert report, str(report)


def by_indicator(c, x, y):
    if any(v is True or v is False or (isinstance(v, torch.Tensor) and v.dtype is torch.bool) for v in (x, y)):
        return ops.where(c, x, y)
    c = torch.as_tensor(c)
    number = lambda on: on.to(next((v.dtype for v in (x, y) if isinstance(v, torch.Tensor)), torch.float64))
    return number(c) * x + number(~c) * y


def written(fn, words):
    """The function, and those of its module that it calls, with other words."""
    names = dict(fn.__globals__)
    made = types.FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__, made.__signature__ = fn.__kwdefaults__, inspect.signature(fn)
    for n in {*fn.__code__.co_names} & names.keys():
        f = names[n]
        ours = isinstance(f, types.FunctionType) and f.__module__.startswith("upref.objectives") and f is not fn
        names[n] = words.get(n) or (written(f, words) if ours else f)
    return made


def test_a_value_in_float32_has_the_gradient_of_its_value():
    """A finite difference of a rounded value is no derivative."""
    o = upref.get("cispo")
    loss = lambda total: (
        lambda log_prob, old_log_prob, advantages, mask: total(
            o.loss(upref.Rollouts(log_prob, old_log_prob, advantages, mask), eps_high=0.28)
        )
    )
    assert upref.check(loss(lambda x: x.float()), "cispo", eps_high=0.28)

    def undeclared(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        x = (lp - old).exp().clamp(max=1.28).detach() * A * lp + 0 * sg(lp)
        return -torch.where(mask, x, 0).sum() / mask.sum()

    report = upref.check(undeclared, "cispo", eps_high=0.28)
    assert [f.cause.startswith("its gradient is not the derivative") for f in report.failures] == [True], str(report)


MEAN = lambda x, m: (x * m).sum() / m.sum()
FLOOR = lambda x, at: torch.where(x.abs() > at, 0.5 * x + 0.5 * x.detach(), x)
CAUSES = {  # oracle -> (sentence, a loss of which it is true, one that trips the oracle for another reason)
    "padding: leak": ("padding", "the mask is ignored", unmasked(lambda x, m: -x.mean()),
                      unmasked(lambda x, m: -(x * (m | m.roll(1, 1))).sum() / m.sum())),
    "padding: width": ("padding", "it divides by the padded width",
                       dapo(total=lambda x, m: -torch.where(m, x, 0).mean()),
                       dapo(total=lambda x, m: -torch.where(m, x, 0).sum() / (m.sum() + m.shape[1]))),
    "padding: row": ("padding", "counted among the responses",
                     dapo(total=counted(lambda n, B: B * n[n > 0].double().mean())),
                     dapo(total=counted(lambda n, B: n.clamp(min=1).sum()))),
    "permutation": ("permutation", "blocks of", up_dapo(lambda g, n: torch.arange(n) // 4), by_row),
    "determinism: drawn": ("determinism", "it draws random numbers",
                           dapo(lambda lp, old, A: J(lp, old, A) * (1 + torch.rand_like(lp) / 9)), dapo(stateful())),
    "determinism: state": ("determinism", "keeps state", dapo(stateful()),
                           dapo(lambda lp, old, A: J(lp, old, A) * (1 + torch.rand_like(lp) / 9))),
    "scaling: divided": ("scaling", "it is divided out",
                         dapo(lambda lp, old, A: J(lp, old, A / A.abs().max().clamp(min=1e-9))),
                         dapo(lambda lp, old, A: J(lp, old, A.clamp(-1.5, 1.5)))),
    "scaling: squared": ("scaling", "A enters squared", dapo(lambda lp, old, A: J(lp, old, A * A.abs())),
                         dapo(lambda lp, old, A: J(lp, old, A**3))),
    "micro-batches": ("micro-batches", "by the micro-batch's own", micro(lambda m, t: m.sum()),
              micro(lambda m, t: t.tokens + 0.1 * (t.tokens - m.sum()))),
    "data-parallel: ranks": ("data-parallel", "by the rank's own", micro(lambda m, t: m.sum()),
                             micro(lambda m, t: t.tokens + 0.1 * (t.tokens - m.sum()))),
    "extremes: clamp": ("extremes", "log r is clamped to ±10",
                        dapo(lambda lp, old, A: J((lp - old).clamp(-10, 10), 0 * old, A)),
                        dapo(lambda lp, old, A: J(FLOOR(lp - old, 10), 0 * old, A))),
    "stop-gradient: bonus": ("stop-gradient", "a bonus of 0.01 times the entropy", entropy(lambda x, H: x + 0.01 * H),
                             entropy(lambda x, H: x * (1 + H - H.detach()))),
    "on-policy": ("on-policy", "every weight is 3 times", dapo(lambda lp, old, A: 3 * J(lp, old, A)),
                  dapo(lambda lp, old, A: torch.where(A > 0, 3, 2) * J(lp, old, A))),
}  # fmt: skip
OBJECTIVE = {"permutation": "up_dapo"}
SKIPPED = {"scaling", "on-policy"}  # what follows from wrong weights is still said there


def said(name, loss):
    oracle, sentence, *_ = CAUSES[name]
    report = upref.check(loss, OBJECTIVE.get(name, "dapo"))
    hit = [f for f in report.failures if f.oracle == oracle]
    return report, hit, any(sentence in f.cause for f in hit)


@pytest.mark.parametrize("name", CAUSES)
def test_where_it_is_true(name):
    report, _, found = said(name, CAUSES[name][2])
    assert found, str(report)


@pytest.mark.parametrize("name", CAUSES)
def test_where_another_fault_trips_the_same_oracle(name):
    report, hit, found = said(name, CAUSES[name][3])
    assert hit and not found, str(report)


def test_where_no_cause_is_known_the_report_says_so():
    odd = dapo(lambda lp, old, A: J(lp, old, A) * torch.where((lp - old).abs() > 5, 1.1, 1.0))
    for loss in (odd, dapo(lambda lp, old, A: J(lp, old, A) + 0.1 * lp * torch.where(A > 0, A.sin(), A))):
        report = upref.check(loss, "dapo")
        assert not report and UNKNOWN in str(report)


def test_a_gradient_lost_on_one_batch_is_not_called_lost():
    halves = lambda lp, old, A: J(lp, old, torch.where(2 * A % 1 == 0, 0.0, A))  # such are all that the grid holds
    said = [f.cause for f in upref.check(dapo(halves), "dapo").failures]
    assert said and not any("no gradient reaches" in s for s in said)
    nowhere = lambda lp, old, A: J(lp.detach(), old, A) + 0 * lp
    assert any("no gradient reaches" in f.cause for f in upref.check(dapo(nowhere), "dapo").failures)


# ---- state, and what looks like another cause on some batches --------------------------------------------------------
def after(n):
    """Another answer from call n + 1 on."""
    calls = [0]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * (1.5 if calls[0] > n else 1)

    return dapo(change)


def calls_said(report):
    """The calls that a report names: an answer has changed at one of them."""
    (failure,) = report.failures
    assert failure.oracle == "determinism" and "keeps state" in failure.cause, str(report)
    numbers = [int(n) for n in re.findall(r"\d+", failure.cause.partition(" at ")[2])]
    assert numbers[-1] - numbers[0] <= 12, failure.cause  # calls in between have no gradient, whatever their state
    return range(numbers[0], numbers[-1] + 1)


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 8, 13, 50, 77, 103, 200])
def test_the_call_at_which_an_answer_changes_is_said(n):
    said = calls_said(upref.check(after(n), "dapo"))
    assert n + 1 in said and (len(said) == 1 or n in (6, 7) or n > 109), said  # further on, many calls have no gradient


def test_a_call_is_said_where_few_tokens_show_the_change():
    calls = [0]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * torch.where((lp - old).abs() > 0.3, 1.5 if calls[0] > 77 else 1, 1)

    (failure,) = upref.check(dapo(change), "dapo").failures
    assert "changes after call 77" in failure.cause


COUNTERS = {
    **{f"period {p} at {at}{more}": lambda k, p=p, at=at, often=often: 1.1 if (k % p == at) != often else 1
       for p, at in [(2, 0), (3, 0), (4, 0), (7, 0), (7, 3), (11, 5), (31, 4), (40, 7), (50, 0), (100, 0), (103, 7)]
       for more, often in (("", False), (", often", True))},
    **{f"blocks of {n}": lambda k, n=n: 1.1 if k // n % 2 else 1 for n in (5, 30, 50, 100)},
    **{f"steps of {n}": lambda k, n=n: 1 + k // n / 10 for n in (1, 5, 30, 50, 100)},
    "one call": lambda k: 1.1 if k == 100 else 1,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_is_not_randomness(name):
    calls, by = [0], COUNTERS[name]

    def change(lp, old, A):
        calls[0] += 1
        return J(lp, old, A) * by(calls[0])

    said = calls_said(upref.check(dapo(change), "dapo"))
    assert any(by(k) != by(k - 1) for k in said), said


SKIPS = {
    "wide ratios": lambda lp, old, A: (lp - old).exp().max() < 2,
    "large advantages": lambda lp, old, A: A.abs().mean() < 0.3,
    "few tokens": lambda lp, old, A: lp.numel() > 300,
}


@pytest.mark.parametrize("skip", SKIPS)
def test_a_batch_that_is_skipped_is_not_said_to_be_detached(skip):
    report = upref.check(dapo(lambda lp, old, A: J(lp, old, A) * SKIPS[skip](lp, old, A)), "dapo")
    assert not report and "no gradient reaches" not in str(report)


def test_what_is_added_on_one_batch_is_said_of_that_batch():
    """Its size is that of the batch: a mean of its advantages, or 1 by its rows."""
    for less in (lambda A: A.mean(), lambda A: 1 / len(A)):
        loss = lambda log_prob, advantages, less=less: -((advantages[:, 0] - less(advantages)) * log_prob.sum(1)).mean()
        said = str([f.cause for f in upref.check(masked(loss), "rloo").failures])
        assert "is added to every weight of this batch" in said, said


def masked(loss):
    return lambda log_prob, advantages, mask: loss(torch.where(mask, log_prob, 0), advantages)


CLAMPS = {
    "to ±6": lambda x: x.clamp(-6, 6),
    "to ±10": lambda x: x.clamp(-10, 10),
    "at 9": lambda x: x.clamp(max=9),
    "to [-8, 12]": lambda x: x.clamp(-8, 12),
}


@pytest.mark.parametrize("said", CLAMPS)
def test_a_clamp_is_named_by_its_bounds(said):
    clamp = CLAMPS[said]
    causes = [f.cause for f in upref.check(dapo(lambda lp, old, A: J(old + clamp(lp - old), old, A)), "dapo").failures]
    assert any(f"log r is clamped {said}" in c for c in causes), causes
    causes = [f.cause for f in upref.check(up_dapo_of(clamp), "up_dapo").failures]  # which clips what is below itself
    assert any(f"log r is clamped at {clamp(torch.tensor(99.0)):g} where A <= 0" in c for c in causes), causes
    torn = dapo(lambda lp, old, A: torch.where((A > 0) & (old < -3), 0.9, 1) * J(old + clamp(lp - old), old, A))
    assert not any("is clamped" in f.cause for f in upref.check(torn, "dapo").failures)


def up_dapo_of(clamp):
    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return -torch.where(mask, torch.where(A > 0, A * lp, J(old + clamp(lp - old), old, A)), 0).sum() / mask.sum()

    return loss


@pytest.mark.parametrize(
    ("name", "of", "cause"),
    [
        ("dapo", lambda d, old, A: J(old + d, old, A), "log r is clamped to ±10"),
        ("cispo", lambda d, old, A: sg(d.exp().clamp(max=5)), "log r is clamped to -10 and above in a constant weight"),
    ],
)
def test_a_clamp_is_said_once_and_its_bound_is_round(name, of, cause):
    """By the oracle that looks for it, not by those whose batches have far ratios too."""

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages[:, None])
        J = of((lp - old).clamp(-10, 10), old, A)
        return -torch.where(mask, J if name == "dapo" else J * A * lp, 0).sum() / mask.sum()

    hp = {} if name == "dapo" else {"eps_high": 4.0}
    assert [(f.oracle, f.cause) for f in upref.check(loss, name, **hp).failures] == [("extremes", cause)]
