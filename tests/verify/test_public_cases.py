# SPDX-License-Identifier: Apache-2.0
"""Edits of public losses: each verdict, and the causes that were wrong or missing at first sight. A sample by day."""

import pytest
from public_cases import BASES, BOXES, EDITS, ESTIMATORS, HARMLESS, edited

import upref
from tests.support.daily import daily

CAUSES = {
    ("vanilla", "max in the dual clip"): "the dual clip takes the other one of its two terms",
    ("vanilla", "ratio inverted"): "the ratio is inverted",
    ("sequence", "padded width"): "divided by the padded width",
    ("sequence", "whole batch"): "over the whole batch",
    ("grpo", "KL's exponential detached"): "has the gradient of k1, not of k3",
    ("grpo", "k1 for k3, twice as strong"): "has the gradient of 0.08 k1, not of 0.04 k3",
    ("grpo", "KL to the old policy"): "the KL term (k3) is to π_old, not to π_ref",
    ("grpo", "ratio to the reference"): "the ratio is to π_ref, not to π_old",
    ("cispo", "masked beyond the cap"): "beyond the cap no gradient is left",
    ("cispo", "cap for winners alone"): "truncated only where A > 0",
    ("unclipped_positives", "losers unclipped"): "the clip has no lower side where A <= 0",
    ("unclipped_positives", "branches exchanged"): "the branches are exchanged",
    ("with_engine", "inverted"): "the sampler's ratio is inverted",
    ("with_engine", "of the current policy"): "the sampler's ratio is of π_θ, not of π_old",
    ("with_engine", "masked"): "it is mis(dapo)",
    ("with_engine", "no correction"): "the sampler's ratio has no effect",
    ("with_engine", "KL to the sampler"): "0.01 k2 (to μ)",
    ("areal", "behaviour by the current policy"): "the sampler's ratio is of π_θ, not of π_old",
}


def check(base, edit):
    on, hp = BASES[base]
    return upref.check(edited(base, edit), on, **hp)


ORDER = sorted(EDITS, key=lambda row: row[:2] not in CAUSES)  # every second one of these by day


@pytest.mark.parametrize("base, name, edit", [*daily(ORDER[: len(CAUSES)], 2), *daily(ORDER[len(CAUSES) :], 12)])
def test_an_edit_is_rejected(base, name, edit):
    if (base, name) == ("vanilla", "ratio detached"):
        with pytest.raises(upref.InputError, match="detached"):
            check(base, edit)
        return
    report = check(base, edit)
    assert not report and CAUSES.get((base, name), "") in str([f.cause for f in report.failures]), report


SAME = [(base, "", []) for base in BASES] + HARMLESS
ROUNDED = [row for row in SAME if row[:2] in (("grpo", "einsum"), ("preserved", ""))]  # the KL term, A / (N r)


@pytest.mark.parametrize("base, name, edit", [*ROUNDED, *daily([row for row in SAME if row not in ROUNDED], 7)])
def test_a_harmless_edit_is_accepted(base, name, edit):
    report = check(base, edit)
    assert report, report


def test_an_unchecked_correction_is_said():
    """DAPO has no sampler: π_old stands for μ, where a correction, right or wrong, is 1."""
    report, right = upref.check(edited("with_engine", []), "dapo"), check("with_engine", [])
    said = [any("corrects for it is not checked" in line for line in r.contract) for r in (report, right)]
    assert report and right and said == [True, False]


@pytest.mark.parametrize("base, edit, names, hp", daily(BOXES, 6))
def test_a_box_is_named(base, edit, names, hp):
    if names == "refused":
        with pytest.raises(upref.InputError, match="no gradient on a good batch"):
            upref.identify(edited(base, edit))
        return
    identity = upref.identify(edited(base, edit))
    if not names:
        assert not identity or identity.kind == "pitfall", identity
        return
    match = next(m for m in identity.matches if m.name in names.split())
    assert identity and {k: match.hp[k] for k in hp} == pytest.approx(hp, rel=1e-3), identity


@pytest.mark.parametrize("base, edit, on, hp, cause", daily(ESTIMATORS, 5))
def test_an_estimator(base, edit, on, hp, cause):
    report = upref.check_advantages(edited(base, edit), on, **hp)
    assert bool(report) == (not cause), report


@pytest.mark.parametrize("name", daily(upref.names(), 6))
def test_every_objective_is_itself(name):
    report = upref.check(upref.get(name), name)
    assert report, report
