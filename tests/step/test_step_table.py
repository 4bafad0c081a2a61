# SPDX-License-Identifier: Apache-2.0
"""docs/steps.md: its records are of the settings that there are, and every difference has a note."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from docs.steps import note_of
from upref.audits import framework
from upref.audits.isolated.pin import place
from upref.step import table
from upref.step.families import FAMILIES

RECORDS = Path(__file__).parents[2] / "docs" / "steps"
SEVERITIES = {"breaks", "weakens", "rescales", "cosmetic"}
WORDS = {"bug", "surprising default", "documented choice", "numerical"}


@pytest.mark.parametrize("trainer", ["trl", "verl", "openrlhf"])
def test_the_records_are_of_the_settings(trainer):
    records = json.loads((RECORDS / f"{trainer}.json").read_text(encoding="utf-8"))
    assert [(r["setting"], r["family"]) for r in records] == [(s.name, s.family) for s in table.chosen(trainer)]
    for r in records:
        if r["error"] is not None and r["cause"]:
            note = note_of(trainer, r)
            assert note and note["status"] in WORDS and note["severity"] in SEVERITIES, r
    assert len(FAMILIES) >= 15
    what = [replace(s, name="") for s in table.chosen(trainer)]
    assert all(s not in what[:i] for i, s in enumerate(what)), "two settings are the same"


@pytest.mark.trl
def test_trl_agrees_where_it_is_recorded_to():
    pytest.importorskip("trl")
    assert table.run("trl", "qwen3 loss_type=dapo, epsilon")[0].agrees


def test_openrlhf_agrees_where_it_is_recorded_to(monkeypatch):
    """Unmodified, in the folder that its audit makes."""
    pytest.importorskip("peft", reason="OpenRLHF imports it")
    for path in place("openrlhf", framework("openrlhf").pin).paths:
        monkeypatch.syspath_prepend(path)
    outcomes = table.run("openrlhf", "qwen3 dynamic_batch")
    assert [o.agrees for o in outcomes] == [True, True], outcomes


@pytest.mark.verl
def test_verl_agrees_where_it_is_recorded_to(monkeypatch):
    platform = pytest.importorskip("verl.plugin.platform.platform_manager")
    cuda = platform.PlatformRegistry.get("nvidia")()
    monkeypatch.setattr(platform, "_current_platform", cuda)  # as after other code of verl, which looks once
    monkeypatch.setattr("verl.models.transformers.monkey_patch.is_trl_available", lambda: True)  # and that it has TRL
    (outcome,) = table.run("verl", "qwen3 use_remove_padding, use_dynamic")
    if outcome.cause and "does not import here" in outcome.cause:
        pytest.skip("verl's trainer is not installed: `repro/venv.sh smoke`")
    assert outcome.agrees
    assert platform.get_platform() is cuda
