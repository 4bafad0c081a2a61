# SPDX-License-Identifier: Apache-2.0
"""Bugs of the kinds that frameworks have fixed: each loss is rejected, and its cause
says why. By day a sample; all by night.
"""

from dataclasses import replace

import pytest
import torch

import upref
from tests.support.daily import daily
from tests.support.framework_bugs import BUGS, JUDGED, PARTS, table_of_causes
from upref.proof.solver import find_z3
from upref.user_code import read
from upref.verify.measure import make_case
from upref.verify.oracles.weights import (
    ALONE_IS_NOTHING,
    COUPLED,
    RIGHT_WITHOUT_HOLES,
    _right_without_holes,
)
from upref.verify.synthesis.formula import formula_of
from upref.verify.synthesis.search import EDIT_ID, edits, weights_of
from upref.weights.batches import OFF_EDGES
from upref.weights.black_box import relative_error

SAMPLE = 21  # every so many losses by day


def test_the_record_is_whole():
    assert {bug.part for bug in BUGS.values()} == set(PARTS)
    assert {bug.first for bug in BUGS.values()} <= set(JUDGED)
    assert len(table_of_causes().splitlines()) == 2 + len(PARTS)


def parameter(number, name):
    marks = [] if number % SAMPLE == 0 else [pytest.mark.nightly]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [parameter(n, name) for n, name in enumerate(BUGS)])
def test_a_bug_is_rejected_and_its_cause_says_why(name):
    bug = BUGS[name]
    report = upref.check(bug.loss, bug.objective, **bug.hp)
    assert not report
    causes = [str(finding.cause) for finding in report.failures]
    assert not bug.says or any(bug.says in cause for cause in causes), str(report)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("centered_over_the_rows", ALONE_IS_NOTHING),
        ("whitened_between_the_terms", COUPLED),
    ],
)
def test_what_is_computed_across_responses_is_a_pattern(name, words):
    bug = BUGS[name]
    first = upref.check(bug.loss, bug.objective).failures[0]
    assert (first.cause_kind, first.cause, first.fault_ids) == ("pattern", words, ())


def clipped_terms(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob.detach(), 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, 1.28) * A)


def as_if_responses_began_at_column_0(log_prob, old_log_prob, advantages, mask):
    terms = clipped_terms(log_prob, old_log_prob, advantages, mask)
    lengths = mask.sum(1, keepdim=True)
    is_read = torch.arange(mask.shape[1]) < lengths
    return -torch.where(is_read, terms, 0).sum() / mask.sum()


def over_the_width_where_all_are_as_long(log_prob, old_log_prob, advantages, mask):
    terms = clipped_terms(log_prob, old_log_prob, advantages, mask)
    lengths = mask.sum(1)
    is_one_length = len(lengths) > 1 and (lengths == lengths[0]).all()
    return -terms.sum() / (mask.numel() if is_one_length else mask.sum())


@pytest.mark.nightly
def test_masked_slots_before_a_token_are_said_where_they_alone_change_it():
    first = upref.check(as_if_responses_began_at_column_0, "dapo").failures[0]
    assert (first.cause_kind, first.cause) == ("pattern", RIGHT_WITHOUT_HOLES)
    # wrong at the front of the rows too
    other = upref.check(over_the_width_where_all_are_as_long, "dapo")
    assert not other and RIGHT_WITHOUT_HOLES not in str(other)


def test_tokens_are_moved_to_the_front_of_their_rows():
    """Find that the cause of holes is named for a loss that is right without them, and
    for no other.
    """
    mask = torch.tensor([[False, True], [False, True]])
    log_probs = torch.tensor([[-1.0, -0.5], [-2.0, -1.5]], dtype=torch.float64)
    batch = upref.Rollouts(log_probs, log_probs, torch.ones(2, 1).double(), mask)

    def cause(loss, mask):
        reference = upref.get("dapo")
        case = make_case(read(loss, reference, {}), reference, reference.resolve({}))
        return _right_without_holes(case, replace(batch, mask=mask)).words

    assert cause(as_if_responses_began_at_column_0, mask) == RIGHT_WITHOUT_HOLES
    assert cause(as_if_responses_began_at_column_0, mask.flip(1)) == ""
    assert cause(over_the_width_where_all_are_as_long, mask) == ""


def case_of(objective, hp):
    reference = upref.get(objective)
    resolved = reference.resolve(hp)
    return make_case(read(reference, reference, hp), reference, resolved)


@pytest.mark.parametrize(
    "name",
    [
        *daily(upref.names(), 6),
        "tis(dapo)",
        pytest.param("up(opsm(grpo))", marks=pytest.mark.nightly),
        pytest.param("mis_seq(gspo)", marks=pytest.mark.nightly),
    ],
)
def test_the_formula_of_an_objective_has_its_gradient(name):
    beta = {"beta": 0.04} if "beta" in upref.get(name).resolve({}) else {}
    case = case_of(name, beta)
    formula = formula_of(case.objective, case.hp)
    assert formula is not None
    batch = case.grid(edges=OFF_EDGES)
    found = weights_of(formula.compiled(), case, case.agg, batch)
    errors = relative_error(found, case.expected(batch), batch.adv)
    assert errors[batch.mask].max() < 1e-9


def test_an_edit_leaves_the_formula_as_it_was():
    case = case_of("vespo", {})
    formula = formula_of(case.objective, case.hp)
    batch = case.grid(edges=OFF_EDGES)
    before = weights_of(formula.compiled(), case, case.agg, batch)
    texts = [edit.text() for edit in edits(formula, [])]
    assert (
        "not detached: φ * A * log_prob, where vespo has detach(φ) * A * log_prob"
        in texts
    )
    assert torch.equal(weights_of(formula.compiled(), case, case.agg, batch), before)


def vespo(phi_of):
    """Return VESPO's loss with phi_of(φ, length), which is not detached, on the
    log-probabilities of responses.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return the loss."""
        d = torch.where(mask, log_prob - old_log_prob, 0).sum(1)
        a = advantages[:, 0]
        c1, c2 = torch.where(a > 0, 2.0, 3.0), torch.where(a > 0, 3.0, 2.0)
        phi = (c1 * d + c2 * (1 - d.clamp(max=80).exp())).exp()
        phi = phi_of(phi, mask.sum(1))
        return -(phi * a * torch.where(mask, log_prob, 0).sum(1)).mean()

    return loss


def ids_of(report):
    return [fault_id for finding in report.failures for fault_id in finding.fault_ids]


def test_an_edit_that_fails_on_long_responses_is_no_cause():
    """The batches that the search compares have none."""
    not_detached = upref.check(vespo(lambda phi, n: phi), "vespo")
    assert EDIT_ID in ids_of(not_detached)
    if find_z3():
        assert "(proved for every value)" in not_detached.text()
    of_short = vespo(lambda phi, n: torch.where(n > 200, phi.detach(), phi))
    assert EDIT_ID not in ids_of(upref.check(of_short, "vespo"))


def test_a_number_without_effect_is_no_cause():
    """A bound that never acts fits whatever its number: the part is named as missing."""
    o = upref.get("kpop(dapo)")

    def loss(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
        """Return DAPO's loss times the objective's factors, but times the ratio to the
        sampler where binary_kl(old, mu) is at most 2 and binary_kl(mu, old) is not.
        """
        lp, old, mu = (
            torch.where(mask, x, -1)
            for x in (log_prob, old_log_prob, rollout_log_probs)
        )
        batch = upref.Rollouts(lp, old, advantages, mask, logp_sampler=mu)
        one = upref.ops.binary_kl(old, mu) <= 2
        far = ~(upref.ops.binary_kl(mu, old) <= 2)
        w = torch.where(one & far, (old - mu).exp(), o.factors(batch, phi=2.0))
        r = (lp - old).exp()
        a = torch.where(mask, advantages, 0)
        terms = w * torch.minimum(r * a, r.clamp(0.8, 1.28) * a)
        return -torch.where(mask, terms, 0).sum() / mask.sum()

    (cause, *_) = [str(f.cause) for f in upref.check(loss, "kpop(dapo)").failures]
    assert cause.startswith("a part is missing: binary_kl("), cause
