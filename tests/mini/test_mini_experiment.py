# SPDX-License-Identifier: Apache-2.0
"""The engine of experiments computes what the registered rules compute, and notices what
is not as it was registered.
"""

import json
import re
import shutil

import pytest

from repro.mini.experiment import (
    effects,
    page,
    plan,
    records,
    registration,
    standing,
    verify,
)
from upref.errors import InputError
from upref.markdown import table


def test_every_effect_and_claim_is_that_of_the_registered_rules(capsys):
    """The command that verifies the experiments finds no record, registered file,
    effect or claim that differs.
    """
    assert verify.main(plan.paths()) == 0
    said = capsys.readouterr().out
    lines = sum(
        path.read_bytes().count(b"\n") for path in plan.MINI.rglob("runs.jsonl")
    )
    registered = [
        name
        for path in plan.MINI.rglob("registration.json")
        for name in json.loads(path.read_text(encoding="utf-8"))["sha256"]
    ]
    assert lines >= 2728
    for line in (
        f"0 of {lines} records differ.",
        f"0 of {len(registered)} registered files differ.",
        "0 of 324 effects differ.",
        "0 of 98 claims differ.",
        "0 of 119 facts not registered differ.",
    ):
        assert line in said
    # those of the finished experiments, and of what is reported of the others
    (printed,) = re.findall(r"^0 of (\d+) printed effects differ", said, re.MULTILINE)
    assert int(printed) >= 284


def test_a_changed_number_is_noticed_twice(monkeypatch, capsys):
    """By the registered rule it is another effect, and it is not what is printed."""
    real = effects.number
    monkeypatch.setattr(effects, "number", lambda run, term: 1.01 * real(run, term))
    assert verify.main(["dose_low"]) == 1
    said = capsys.readouterr().out
    assert "Differs, of effects: dose_low/" in said
    assert "Differs, of printed effects: dose_low/" in said
    monkeypatch.undo()

    monkeypatch.setattr(effects, "interval", lambda D, level: (D.mean() - 1, D.mean()))
    assert verify.main(["stale"]) == 1
    said = capsys.readouterr().out
    assert "71 of 71 effects differ." in said
    assert "Differs, of printed effects: stale" in said


def test_a_claim_that_was_changed_by_hand_is_noticed(monkeypatch, capsys):
    kept = standing.of_plan(plan.load("dose_low"))
    name = next(iter(kept))
    wrong = kept | {name: kept[name] | {"word": "reproduced, surely"}}
    monkeypatch.setattr(standing, "of_plan", lambda plan: wrong)
    assert verify.main(["dose_low"]) == 1
    assert f"Differs, of claims: {name}" in capsys.readouterr().out


def test_a_changed_registered_file_is_named(tmp_path):
    folder = tmp_path / "stale"
    shutil.copytree(plan.MINI / "stale", folder, ignore=lambda *_: ["results"])
    assert registration.changed(folder) == []
    with (folder / "design.toml").open("a") as design:
        design.write("\n")
    (folder / "power.md").unlink()
    assert registration.changed(folder) == ["design.toml", "power.md"]


def test_the_page_of_the_controls_is_the_committed_one(tmp_path):
    """Written by the engine before this one, and drawn by it."""
    controls = plan.load("controls")
    page.write(controls, records.load(controls.results), tmp_path)
    for name in ("report.md", "curves.svg"):
        committed = (controls.results / name).read_bytes()
        assert (tmp_path / name).read_bytes() == committed


def test_a_page_of_facts_that_nobody_registered_says_so(tmp_path):
    post_hoc = plan.load("round2/post_hoc")
    page.write(post_hoc, records.load(post_hoc.results), tmp_path)
    text = (tmp_path / "post_hoc.md").read_text(encoding="utf-8")
    assert "Nobody registered what is on this page" in text
    assert "no verdict" in text


def test_a_table_has_a_cell_for_each_column():
    assert table(["", "b"], [["x", 1]]) == "| | b |\n|---|---|\n| x | 1 |"
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        table(["a", "b"], [["x"]])


def test_an_unknown_experiment_names_the_others():
    with pytest.raises(InputError, match="no experiment named 'fresh': choose one of"):
        plan.load("fresh")
