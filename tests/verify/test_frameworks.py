# SPDX-License-Identifier: Apache-2.0
"""Every framework with a folder of its own is what its ledger says, where that folder is at hand; no network is used.

`upref audit NAME` makes the folder; verl and TRL are installed here, and test_ledger.py has their audits. The ledgers'
form is held for all of them, wherever this runs.
"""

import json
import math

import pytest

from upref import audits
from upref.audits.isolated import pin as pins
from upref.audits.ledger import read
from upref.audits.report import proofs, report

ALL = audits.frameworks()
APART = [name for name in ALL if audits.framework(name).pin]
MARKED = [name if name in APART else pytest.param(name, marks=getattr(pytest.mark, name)) for name in ALL]


def at_hand(name: str):
    """The framework, if nothing would have to be fetched for it."""
    f = audits.framework(name)
    if not f.pin:
        pytest.importorskip(name, reason=f"`repro/venv.sh {name}` installs it")
    elif not any(pins.cache().glob(f"{name}-{f.pin.version}*")):
        pytest.skip(f"`upref audit {name}` makes the folder that this needs, from a network")
    return f


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
    for e in read(name):
        assert len(e.proof.strip().splitlines()) <= 15 and "upref" not in e.proof, e.key
        assert e.status == "numerical" or (e.proof and e.prints and e.fix), f"{e.key}: a script, what it prints, a fix"
        assert e.status != "deliberate" or (e.words and e.link), f"{e.key}: upstream's words, and where they stand"
        assert e.prints in report(name, e.key) and e.paper in report(name, e.key)


def test_a_number_that_json_has_no_word_for_is_a_string():
    a = audits.Audit("plain", "1.0", [], [], [], {}, [], [], {}, {"ppo": {"clip": math.nan, "high": [math.inf]}})
    assert json.loads(a.json(), parse_constant=pytest.fail)["defaults"]["ppo"] == {"clip": "nan", "high": ["inf"]}
