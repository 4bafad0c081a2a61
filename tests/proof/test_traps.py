# SPDX-License-Identifier: Apache-2.0
"""Four ways in which a prover is wrong, each with a test that fails without its guard."""

import time

import pytest
import torch

import upref
from upref.proof import solver
from upref.proof.domain import Domain
from upref.proof.paths import Search


def dapo(log_prob, old_log_prob, advantages, mask, change=lambda d: d):
    d = change(torch.where(mask, log_prob - old_log_prob, 0))
    r, A = d.exp(), torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def half(log_prob, old_log_prob, advantages, mask):
    return dapo(log_prob, old_log_prob, advantages, mask) / 2


def test_contradictory_assumptions_prove_nothing(monkeypatch):
    """Assume r > 1 and r < 1, and find no proof, though a run at a witness still shows
    a difference.
    """

    def contradictory(domain, names):
        r = domain.values.variable("r0_0", 0.5, 2)
        one = domain.values.one
        return [domain.values.greater(r, one), domain.values.greater(one, r)]

    monkeypatch.setattr(Domain, "assumptions", contradictory)
    monkeypatch.setattr(Search, "_holds", lambda *_: True)
    proof = upref.prove(dapo, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"
    assert "model" in proof.reason
    # a run at the witness shows it, whatever is assumed
    assert upref.prove(half, "dapo", rows=1, columns=1).status == "differs"


def test_a_comparison_of_equal_sides_leaves_no_point_out():
    def loss(log_prob, old_log_prob, advantages, mask):
        r = (log_prob - old_log_prob).exp()
        is_odd = (r != r) | (r * advantages > advantages * r)
        wrong = torch.where(is_odd, 0, half(log_prob, old_log_prob, advantages, mask))
        return wrong.sum() / wrong.numel()

    assert upref.prove(loss, "dapo", rows=1, columns=1).status == "differs"


def test_values_that_are_equal_within_a_region_are_compared_there():
    """r A and clip(r) A are equal inside the clip range: no point of it is left out."""

    def loss(log_prob, old_log_prob, advantages, mask):
        """Return DAPO's loss, doubled where the clip changes nothing."""
        r = (log_prob - old_log_prob).exp()
        clipped = r.clamp(0.8, 1.28)
        inside = r * advantages == clipped * advantages
        J = torch.minimum(r * advantages, clipped * advantages)
        return -(torch.where(inside, 2 * J, J) * mask).sum() / mask.sum()

    assert upref.prove(loss, "dapo", rows=1, columns=1).status == "differs"


def test_a_point_that_only_the_solver_has_is_no_difference():
    """sin² + cos² is 1, which the solver does not know."""

    def loss(log_prob, old_log_prob, advantages, mask):
        x = advantages.detach()
        one = x.sin() ** 2 + x.cos() ** 2
        return dapo(log_prob, old_log_prob, advantages * one, mask)

    proof = upref.prove(loss, "dapo", rows=1, columns=1)
    assert proof.status == "no proof"


def test_log_ratios_are_compared_with_the_ratios():
    """A clamp of log r at ±5 is found, at a ratio outside of e^-5 = 0.0067 to e^5 =
    148.4; one at ±20 is outside of the domain, and the loss is proved.
    """

    def clamped(bound):
        """Return DAPO's loss with log r clamped to ±bound."""

        def loss(log_prob, old_log_prob, advantages, mask):
            def clamp(d):
                return d.clamp(-bound, bound)

            return dapo(log_prob, old_log_prob, advantages, mask, clamp)

        return loss

    proof = upref.prove(clamped(5), "dapo", rows=1, columns=1)
    assert proof.status == "differs"
    r = proof.numbers["r"]
    assert not 0.0068 < r < 148
    assert upref.prove(clamped(20), "dapo", rows=1, columns=1)


@pytest.mark.parametrize("exponent", [0.123456789, 1 / 7, 0.3])
def test_an_odd_power_costs_no_memory(exponent):
    """Prove a power equal to itself and different from 1.01 times it, within a minute."""

    def power(log_prob, old_log_prob, advantages, mask, times=1.0):
        r = (log_prob - old_log_prob).exp() ** (exponent * times)
        return -(torch.where(r > 2, r, r**2) * advantages * mask).sum() / mask.sum()

    def other(log_prob, old_log_prob, advantages, mask):
        return power(log_prob, old_log_prob, advantages, mask, 1.01)

    start = time.monotonic()
    assert upref.prove(power, power, rows=1, columns=1, seconds=20)
    assert not upref.prove(power, other, rows=1, columns=1, seconds=20)
    assert time.monotonic() - start < 60


def test_a_solver_without_memory_proves_nothing(monkeypatch):
    monkeypatch.setattr(solver, "MEMORY", 1)
    assert upref.prove(dapo, "dapo", rows=1, columns=1).status == "no proof"


def test_a_solver_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    slow = tmp_path / "z3"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(solver, "find_z3", lambda: str(slow))
    monkeypatch.setattr(solver, "WAIT", 1)
    start = time.monotonic()
    proof = upref.prove(dapo, "dapo", rows=1, columns=1, seconds=1)
    assert proof.status == "no proof"
    assert time.monotonic() - start < 20


def test_without_the_solver_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(solver, "find_z3", lambda: "")
    with pytest.raises(upref.InputError, match="z3-solver"):
        upref.prove(dapo, "dapo")
