# SPDX-License-Identifier: Apache-2.0
"""Known bugs of trainers: the suite kills each, but those whose record gives the reason
why nothing can.
"""

import pytest

from tests.conformance.known_bugs import SKYRL_NEEDS, bugs, killers, load, main
from upref.conformance import CASES

FRAMEWORKS = [
    pytest.param("trl", marks=pytest.mark.trl),
    pytest.param("verl", marks=pytest.mark.verl),
    pytest.param("openrlhf"),
    pytest.param("skyrl"),
]
ONE_BY_DAY = {
    "trl": "huggingface/trl#6024",
    "verl": "verl-project/verl#5417",
    "openrlhf": "OpenRLHF/OpenRLHF#1249",
    "skyrl": "NovaSky-AI/SkyRL#1353",
}


def _adapter(name):
    needed = {"openrlhf": ["peft"], "skyrl": SKYRL_NEEDS}
    for package in needed.get(name, [name]):
        pytest.importorskip(package, reason="docs/howto/conformance.md says how")
    return load(name)


def test_each_record_is_there_once_and_has_a_case():
    every = bugs()
    assert len(every) == 86
    assert len({(bug.framework, bug.source, bug.what) for bug in every}) == 86
    assert not [bug.source for bug in every if bug.case not in CASES]
    assert sum(not bug.survives for bug in every) == 84
    assert sum(bug.case.startswith("prepare/") for bug in every) == 42


def test_each_killed_bug_of_the_four_frameworks_preparation_counts_once():
    """By source, whichever frameworks it is planted in."""
    homes = ("huggingface/trl", "verl-project/", "OpenRLHF/", "NovaSky-AI/")
    sources = {
        bug.source
        for bug in bugs()
        if bug.case.startswith("prepare/")
        and bug.source.startswith(homes)
        and not bug.survives
    }
    assert len(sources) == 24


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_bug_of_each_framework_is_killed_by_its_case(name):
    if name == "verl":
        pytest.importorskip(
            "pydantic", reason="`repro/venv.sh smoke` installs verl's trainer"
        )
    adapter = _adapter(name)
    (bug,) = (one for one in bugs(name) if one.source == ONE_BY_DAY[name])
    assert killers(bug, adapter) == [bug.case]


def test_the_command_names_the_case_that_kills_a_bug(capsys, monkeypatch):
    bug = next(one for one in bugs("openrlhf") if one.source == ONE_BY_DAY["openrlhf"])
    _adapter("openrlhf")
    monkeypatch.setattr("sys.argv", ["known_bugs", "openrlhf", "--only", "1249"])
    assert main() == 0
    said = capsys.readouterr().out
    assert f"{bug.what}\n    {bug.case}\n" in said
    assert "1 of 1 killed" in said


@pytest.mark.nightly
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_bug_ends_as_recorded(name):
    pytest.importorskip("peft", reason="a case trains a model with adapters")
    if name == "verl":
        pytest.importorskip("tensordict", reason="verl's trainer imports it")
    adapter = _adapter(name)
    ends = {bug.source: killers(bug, adapter) for bug in bugs(name)}
    assert ends == {
        bug.source: [] if bug.survives else [bug.case] for bug in bugs(name)
    }
