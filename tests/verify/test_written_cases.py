# SPDX-License-Identifier: Apache-2.0
"""Losses, boxes and estimators written before the checker ran on them: each verdict, and what is misjudged.

Some 500 checks, minutes: a sample by day, the rest nightly.
"""

import inspect
import itertools

import pytest
import torch
import unseen_cases as unseen
from box_cases import BOXES
from estimator_cases import CASES
from loss_cases import WRONG, loss
from right_losses import RIGHT

import upref
from tests.support.daily import daily
from upref import Rollouts, transforms

WRONG, RIGHT, BOXES, CASES = WRONG + unseen.WRONG, RIGHT + unseen.RIGHT, BOXES + unseen.BOXES, CASES + unseen.ESTIMATORS
EVERY = 40  # by day, one of so many
CAUSES = {  # of what was misnamed at first sight: what is said now, or -what is not
    "WAPO losers": "where A < 0 the ratio multiplies A, though wapo has no term there",
    "sampled entropy": "an entropy bonus of the sampled tokens has this gradient too",
    "GSPO root": "-square root of its length",
    "product": "-seq-mean-token-sum",
}
MISSED = {
    "micro-batches": "without totals, num_micro_batches is read as a setting and keeps its default, 1",
    "first advantage": "it is read as a loss of one advantage per response, which the report says",
}
REJECTED = {
    "it calls backward itself": "refused, because it returns nothing",
}
UNNAMED = {
    "ce_gppo": "the factors beyond the clip keep their defaults, and the bounds are fitted to make up for them",
}


def objective(name):
    made, _, base = name.rstrip(")").rpartition("(")
    return getattr(transforms, made)(upref.get(base)) if made else upref.get(base)


def marked(rows, reasons, name=lambda row: row[0]):
    mark = lambda why: [pytest.mark.xfail(strict=True, reason=why)] if why else []
    late = lambda n, row: [pytest.mark.nightly] * bool(n % EVERY and row[0] not in CAUSES)
    marks = lambda n, row: late(n, row) + mark(reasons.get(name(row)))
    return [pytest.param(*row, id=name(row), marks=marks(n, row)) for n, row in enumerate(rows)]


# ---- without the checker --------------------------------------------------------------------------------------------
def masks(kind, B, T, g):
    t, m, ends = torch.arange(T), torch.ones(B, T, dtype=torch.bool), torch.randint(T, (B, 1), generator=g)
    return {"full": m, "right": t < T - ends, "left": t >= ends, "turns": (t // 3 % 2 == 0).expand(B, T),
            "hole": m & ((t < T // 8) | (t >= T // 8 + T // 2))}[kind]  # fmt: skip


def batches():
    """Sizes, masks and compositions at which the wrong losses are wrong."""
    sizes = [(1, 5), (4, 8), (5, 5), (65, 6), (130, 5), (3, 63), (3, 128), (4, 130), (3, 600)]
    kinds, compositions = ("hole", "full", "right", "left", "turns"), ("mixed", "zeros", "positive", "far")
    g = torch.Generator().manual_seed(0)
    for (B, T), kind, composition in itertools.product(sizes, kinds, compositions):
        some = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
        old = (-some(B, T).abs() * 3 - 0.002) * (1 + 4 * (some(B, T) > 2))
        lp = (old + (3.0 if composition == "far" else 0.25) * some(B, T)).clamp(max=-1e-3)
        A = {"zeros": some(B, 1) * (some(B, 1) > 1), "positive": some(B, 1).abs()}.get(composition, 2 * some(B, 1))
        if composition == "mixed":
            A[0], A[-1] = 37.0, -5e-4
        m = masks(kind, B, T, g)
        group = torch.arange(B) * 2 // 5 * 8 % 104 if B % 5 == 0 else torch.zeros(B, dtype=torch.long)
        yield Rollouts(lp, old, A.expand(B, T).clone(), m & m.any(1, keepdim=True), group if B > 1 else None,
                       logp_ref=(lp + 0.3 * some(B, T)).clamp(max=-1e-3), entropy=some(B, T).abs(),
                       logp_sampler=(old + 0.4 * some(B, T)).clamp(max=-1e-3))  # fmt: skip


ARGUMENTS = dict(log_prob="logp", old_log_prob="logp_old", advantages="adv", mask="mask", ref_log_prob="logp_ref",
                 group="group", entropy="entropy", rollout_log_probs="logp_sampler")  # fmt: skip


def error(fn, o, hp, b):
    takes = inspect.signature(fn).parameters
    lp = b.logp.clone().requires_grad_()
    given = {k: getattr(b, v) for k, v in ARGUMENTS.items() if k in takes} | {"log_prob": lp}
    found = torch.autograd.grad(fn(**given), lp)[0]
    fields = {f: getattr(b, f) for f in ("logp_old", "adv", "mask", "logp_ref", "entropy")}
    fields |= {"group": b.group if "group" in takes else None, "logp_sampler": b.logp_sampler if o.sampler else None}
    want = torch.autograd.grad(o.loss(Rollouts(lp, **fields), **hp), lp)[0]
    return float(torch.where(b.mask, found - want, 0).norm() / (want.norm() + 1e-12))


@pytest.mark.parametrize("name, on, hp, cause, body", marked(WRONG, {}))
def test_wrong_is_wrong(name, on, hp, cause, body):
    if name in ("first advantage", "micro-batches"):
        pytest.skip("wrong for one advantage per token, or for micro-batches, which these batches do not have")
    fn, o = loss(body), objective(on)
    grouped = "group" in inspect.signature(fn).parameters
    assert any(not error(fn, o, hp, b) < 1e-4 for b in batches() if b.group is not None or not grouped), cause


@pytest.mark.parametrize("names, hp, body", marked([b for b in BOXES if b[0]], {}, lambda row: row[0].split()[0]))
def test_a_box_is_what_it_is(names, hp, body):
    o = upref.get(names.split()[0])
    assert all(error(loss(body), o, hp, b) < 1e-5 for b in itertools.islice(batches(), 0, None, 7))


# ---- with it --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, on, hp, cause, body", marked(WRONG, MISSED))
def test_rejected(name, on, hp, cause, body):
    report, said = upref.check(loss(body), objective(on), **hp), CAUSES.get(name, "")
    assert not report, cause
    assert (said.lstrip("-") in str([f.cause for f in report.failures])) == (said[:1] != "-"), report


@pytest.mark.parametrize("name, on, hp, fn", marked(RIGHT, REJECTED))
def test_accepted(name, on, hp, fn):
    report = upref.check(fn, objective(on), **hp)
    assert report, report


@pytest.mark.parametrize("names, hp, body", marked(BOXES, UNNAMED, lambda row: row[0].partition(" ")[0]))
def test_named(names, hp, body):
    identity = upref.identify(loss(body))
    if not names:
        assert not identity, identity
        return
    assert identity, identity
    match = next(m for m in identity.matches if m.name in names.split())
    assert {k: match.hp[k] for k in hp} == pytest.approx(hp, rel=1e-3), identity


@pytest.mark.parametrize("name, estimator, hp, fn, cause", marked(CASES, {}))
def test_an_estimator(name, estimator, hp, fn, cause):
    report = upref.check_advantages(fn, estimator, **hp)
    assert bool(report) == (not cause), f"{cause}\n{report}"


@pytest.mark.parametrize("name, estimator, fn, cause", marked(unseen.KLS, {}))
def test_a_kl_term(name, estimator, fn, cause):
    report = upref.check_kl(fn, estimator)
    assert bool(report) == (not cause), f"{cause}\n{report}"


@pytest.mark.parametrize("cause, ends, body", daily(unseen.NEAR, 5))
def test_a_cause_of_identify_says_where_it_ends(cause, ends, body):
    why = upref.identify(loss(body)).why
    assert cause in why and "it differs elsewhere" in why and ends in why.partition("elsewhere")[2], why
