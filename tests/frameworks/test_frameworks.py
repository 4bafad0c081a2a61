# SPDX-License-Identifier: Apache-2.0
"""Every framework with a folder of its own is what its ledger says, where that folder
is at hand; no network is used.

`upref audit NAME` makes the folder; verl and TRL are installed here, and test_ledger.py
has their audits. The ledgers' form is held for all of them, wherever this runs.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from upref.errors import InputError
from upref.verify.faults.losses import fault
from upref.weights.batches import on_policy_batch
from upref_frameworks import audits, names
from upref_frameworks.audits.case import Comparison
from upref_frameworks.audits.compare import compare
from upref_frameworks.audits.framework import Framework
from upref_frameworks.audits.isolated import pin as pins
from upref_frameworks.audits.losses import make_comparison_case
from upref_frameworks.audits.report import Proofs, proofs, report
from upref_frameworks.ledger import FRAMEWORKS, read

ENTRY = """[[deviation]]
key = "x-a"
status = "{status}"
effect = ["weakens", 0.1]
reason = "r"
bib = "b"
paper = "p"
code = "c"
proof = "print(1)"
prints = "1"
evidence = [{{ loss = "l", held_against = "o" }}]
"""
ALL = names()
APART = [name for name in ALL if audits.framework(name).pin]
MARKED = [
    pytest.param(name, marks=getattr(pytest.mark, "nightly" if name in APART else name))
    for name in ALL
]


def at_hand(name: str):
    """Return the framework. Skip if something would have to be fetched for it."""
    f = audits.framework(name)
    if not f.pin:
        pytest.importorskip(name, reason=f"`repro/venv.sh {name}` installs it")
    elif not any(pins.cache().glob(f"{name}-{f.pin.version}*")):
        pytest.skip(
            f"`upref audit {name}` makes the folder that this needs, from a network"
        )
    return f


@pytest.mark.nightly
@pytest.mark.parametrize("name", APART)
def test_the_audit_is_the_ledger(name):
    at_hand(name)
    table = audits.audit(name)
    assert table, str(table)
    assert not table.unaudited and table.defaults


@pytest.mark.parametrize("name", MARKED)
def test_every_deviation_is_proved_by_a_script_too(name):
    said = proofs(at_hand(name))
    assert said, str(said)


@pytest.mark.parametrize("name", ALL)
def test_the_ledger_is_whole(name):
    """Each entry has what an entry of its status needs: a script, a fix, a line,
    upstream's words.
    """
    for e in read(name):
        blamed = e.status in ("bug", "surprising default")
        most_lines = 15 if blamed else 17
        assert len(e.proof.strip().splitlines()) <= most_lines, e.key
        assert "upref" not in e.proof, e.key
        assert e.severity and e.searched, f"{e.key}: a size, and what was searched"
        if e.status != "numerical":
            needs = f"{e.key}: a script, what it prints, a fix"
            assert e.proof and e.prints and e.fix, needs
        if blamed:
            assert e.line, f"{e.key}: the line of code"
        both_or_none = f"{e.key}: upstream's words, and where they stand"
        assert bool(e.words) == bool(e.link), both_or_none
        if e.status == "bug":
            assert not e.words, f"{e.key}: what a framework says itself is no bug"
        if e.status == "documented choice":
            assert e.words, f"{e.key}: where the framework says so"
        said = report(name, e.key)
        assert e.paper in said and e.at in said
        assert e.prints.partition(" found ")[2] in said


def test_a_second_reader_judged_what_is_blamed(monkeypatch):
    """Every entry that blames has a second reader; a report says so where there is one
    reader only.
    """
    once = [
        e.key
        for e in read()
        if e.status in ("bug", "surprising default") and not e.twice
    ]
    assert not once, f"who did not write these entries reads the sources: {once}"
    once = '[ledger]\nversion = "1"\n' + ENTRY.format(status="bug")
    assert (
        not read("x", once)[0].twice
        and read("x", once.replace("\n", '\ntwice = "a b"\n', 1))[0].twice
    )
    [e, *_] = (e for e in read() if e.twice)
    assert "by one reader so far" not in report(e.framework, e.key)
    monkeypatch.setattr(
        "upref_frameworks.ledger.read", lambda name: [replace(e, twice=False)]
    )
    assert "by one reader so far" in report(e.framework, e.key)


def test_a_bug_is_not_what_the_framework_warns_of():
    for status, said in ("bug", False), ("surprising default", True):
        [e] = read("x", '[ledger]\nversion = "1"\n' + ENTRY.format(status=status))
        assert (
            Proofs([(e, "1\n")])
            and bool(Proofs([(e, "1\n\nwarned: that is not GSPO")])) is said
        )


def test_the_same_fact_has_the_same_status_everywhere():
    """By reason and size: what a token's weight is with this repaired, and as it is,
    against the same objective.
    """
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    entries = read()
    for e in entries:
        for x in e.evidence:
            fact = (e.reason, x.held_against, x.where, x.expected, x.found)
            seen.setdefault(fact, {})[e.status] = e.key
    of_two_statuses = [by for by in seen.values() if len(by) > 1]
    assert not of_two_statuses, of_two_statuses
    shared = set()
    for reason, *_ in seen:
        frameworks = {e.framework for e in entries if e.reason == reason}
        if len(frameworks) > 1:
            shared.add(reason)
    assert len(shared) > 10, "the comparison would compare nothing"


def test_the_ledgers_stay_readable():
    lines = sum(
        len(f.read_text(encoding="utf-8").splitlines())
        for f in FRAMEWORKS.glob("**/*.toml")
    )
    assert lines <= 21 * len(read())


def test_a_number_that_json_has_no_word_for_is_a_string():
    a = audits.Audit(
        "plain",
        "1.0",
        [],
        [],
        [],
        {},
        [],
        [],
        [],
        {"ppo": {"clip": math.nan, "high": [math.inf]}},
    )
    assert json.loads(a.json(), parse_constant=pytest.fail)["defaults"]["ppo"] == {
        "clip": "nan",
        "high": ["inf"],
    }


def test_an_argument_that_an_audit_lacks_is_one_sentence():
    def loss(mode, config, log_prob, logits):
        return log_prob.sum()

    framework = Framework("x", modes=list, comparisons=(), loss_by_names=loss)
    words = (
        "the loss of x takes 'logits', which an audit does not have: it has log_prob, "
    )
    with pytest.raises(InputError, match=words):
        framework.compute_loss("m", {}, on_policy_batch(), None)


def test_a_gradient_of_nan_has_no_reason():
    reasons = (fault("another aggregation", "term"),)
    comparison = Comparison("default", "ppo", {}, "ppo_clip", {}, reasons)
    case = make_comparison_case(comparison, {})
    nan = torch.full_like(case.batch.logp, math.nan)
    [row] = compare("x", case, nan, nan)
    assert not row.ok
    assert row.reasons == []
