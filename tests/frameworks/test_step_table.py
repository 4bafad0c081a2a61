# SPDX-License-Identifier: Apache-2.0
"""docs/steps.md: its records are of the settings that there are, and every difference
has a note.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from docs import record
from docs.steps import note_of
from upref.cli import main
from upref.errors import InputError, NotInstalled
from upref.step import StepReport, record_step
from upref.step.inputs.families import FAMILIES
from upref.step.inputs.reference import as_float64
from upref.verify.report import fail
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import place
from upref_frameworks.steps import table
from upref_frameworks.steps.host import (
    Refused,
    TrainerFailedError,
    mute_trainer,
    report,
)

RECORDS = Path(__file__).parents[2] / "docs" / "steps"
SEVERITIES = {"breaks", "weakens", "rescales", "cosmetic"}
WORDS = {"bug", "surprising default", "documented choice", "numerical"}


@pytest.mark.parametrize("trainer", ["trl", "verl", "openrlhf"])
def test_the_records_are_of_the_settings(trainer):
    """Find one record for each setting, in order, a note for each cause, and no setting
    twice.
    """
    records = record.rows(RECORDS / f"{trainer}.json")
    assert [(r["setting"], r["family"]) for r in records] == [
        (s.name, s.family) for s in table.select_settings(trainer)
    ]
    for r in records:
        if r["error"] is not None and r["cause"]:
            note = note_of(trainer, r)
            assert (
                note and note["status"] in WORDS and note["severity"] in SEVERITIES
            ), r
    assert len(FAMILIES) >= 15
    what = [replace(s, name="") for s in table.select_settings(trainer)]
    assert all(s not in what[:i] for i, s in enumerate(what)), (
        "two settings are the same"
    )


# ---- the exit status -----------------------------------------------------------------
RIGHT = StepReport("step", "dapo", {}, [], "", [], {}, {}, 0.0, error=1e-6)
WRONG = replace(
    RIGHT,
    findings=[
        fail("gradient", "over all parameters", cause="the temperature is left out")
    ],
)


def answered(monkeypatch, capsys, *answers, arguments=()):
    """Return the exit status and the output of `upref step trl` where its settings have
    these reports, or raise these exceptions.
    """
    names = [f"setting {i}" for i, _ in enumerate(answers)]
    settings = [table.Setting(name) for name in names]

    def one(trainer, setting):
        answer = answers[names.index(setting.name)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(table, "select_settings", lambda *_: settings)
    monkeypatch.setattr(table, "run_setting", one)
    status = main(["step", "trl", *arguments])
    said = capsys.readouterr()
    return status, said.out + said.err


REFUSED, ABSENT, CRASH = (
    Refused("TRL's trainer fails: ValueError"),
    NotInstalled("trl does not import"),
    TypeError("it"),
)


@pytest.mark.parametrize(("answers", "status"), [
    ([RIGHT], 0), ([RIGHT, REFUSED], 0), ([RIGHT, WRONG], 1), ([WRONG, REFUSED], 1), ([REFUSED], 2),
    ([ABSENT, ABSENT], 2), ([CRASH], 2), ([RIGHT, CRASH], 2), ([RIGHT, InputError("mask must be a boolean tensor")], 2),
])  # fmt: skip
def test_the_status_says_whether_anything_ran(monkeypatch, capsys, answers, status):
    found, said = answered(monkeypatch, capsys, *answers)
    assert found == status, said
    assert ("upref itself fails" in said) == any(
        type(a) in (TypeError, InputError) for a in answers
    ), said


@pytest.mark.parametrize(("answers", "status", "words"), [
    ([RIGHT, WRONG, REFUSED], 0, ""),
    ([REFUSED, WRONG, REFUSED], 1, "setting 0: agrees, now does not run TRL's trainer fails"),
    ([RIGHT, RIGHT, REFUSED], 1, "setting 1: differs, now agrees"),
    ([RIGHT, WRONG, CRASH], 2, ""),
    ([RIGHT, WRONG, REFUSED, RIGHT], 1, "setting 3: not recorded, now agrees"),
])  # fmt: skip
def test_against_records_what_changes_fails(
    monkeypatch, capsys, tmp_path, answers, status, words
):
    """The run is compared with three recorded settings: one agrees, one has a cause,
    one could not run.
    """
    ends = [
        (1e-6, ""),
        (0.5, "the temperature is left out"),
        (None, "TRL's trainer fails: ValueError"),
    ]
    records = [
        dict(setting=f"setting {i}", family="qwen3", error=e, cause=c)
        for i, (e, c) in enumerate(ends)
    ]
    (tmp_path / "before.json").write_text(json.dumps(records))
    found, said = answered(
        monkeypatch,
        capsys,
        *answers,
        arguments=["--against", str(tmp_path / "before.json")],
    )
    assert found == status, said
    assert words in said


def test_half_a_batch_that_never_trains_differs():
    """The rows that a trainer was fed are not another batch: those that it leaves out
    are missing.
    """
    loops = pytest.importorskip(
        "tests.step.loops", reason="the model is made by transformers"
    )

    def trained(model, rows, temperature, share):
        with record_step(model) as seen:
            loops.policy_step(model, rows[:share], size=2, temperature=temperature)
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        return seen

    judged = [
        report(trained, loops.qwen3(), "dapo", {}, {}, share=share) for share in (8, 4)
    ]
    assert judged[0], judged[0]
    assert not judged[1]
    assert "do not train" in judged[1].failures[0].cause


def test_what_the_trainer_raises_is_not_a_refusal(monkeypatch, capsys):
    _, said = answered(
        monkeypatch,
        capsys,
        TrainerFailedError("TRL's trainer fails: ValueError"),
        RIGHT,
    )
    assert said.startswith("fails ")
    assert "1 could not be run (1 because the trainer raised an error)" in said


def test_a_number_that_is_not_exercised_stands_in_its_line(monkeypatch, capsys):
    reached = replace(
        RIGHT,
        not_reached={"c = 3": "300 agrees too"},
        reach="r from 0.5 to 2, |A| up to 2",
    )
    _, said = answered(monkeypatch, capsys, reached)
    assert "not exercised: c = 3 (300 agrees too): r from 0.5 to 2, |A| up to 2" in said


def test_an_error_of_upref_is_not_the_trainer_s():
    """Find that only what the trainer's own code raises is turned into `Refused`."""
    with (
        pytest.raises(Refused, match="the trainer fails: FileNotFoundError"),
        mute_trainer("the trainer", "numpy"),
    ):
        numpy.load("no such file")
    with pytest.raises(TypeError), mute_trainer("the trainer", "numpy"):
        as_float64(object)  # upref's own function
    with (
        pytest.raises(AttributeError, match="family"),
        mute_trainer("the trainer", "numpy"),
    ):
        # called by the trainer
        numpy.apply_along_axis(
            lambda _: table.run_setting("trl", None), 0, numpy.zeros(1)
        )


def test_a_package_that_all_settings_need_is_named_once(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["step", "trl"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "transformers does not import here" in err
    # the part of venv.sh that has it
    assert "`repro/venv.sh trl`" in err


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
    """Run one setting of verl after the platform was looked up, and find that platform
    afterwards.
    """
    platform = pytest.importorskip("verl.plugin.platform.platform_manager")
    cuda = platform.PlatformRegistry.get("nvidia")()
    # as after other code of verl, which looks once
    monkeypatch.setattr(platform, "_current_platform", cuda)
    # and that it has TRL
    monkeypatch.setattr(
        "verl.models.transformers.monkey_patch.is_trl_available", lambda: True
    )
    (outcome,) = table.run("verl", "qwen3 use_remove_padding, use_dynamic")
    if outcome.cause and "does not import here" in outcome.cause:
        pytest.skip("verl's trainer is not installed: `repro/venv.sh smoke`")
    assert outcome.agrees
    assert platform.get_platform() is cuda


@pytest.mark.trl
def test_a_step_of_several_generation_batches_is_refused():
    pytest.importorskip("trl")
    from tests.step import loops
    from upref_frameworks.trl import step as trl

    fields = {"steps_per_generation": 1, "gradient_accumulation_steps": 2}
    with pytest.raises(InputError, match="at most steps_per_generation=1"):
        trl.report(loops.qwen3(), fields, trl.batch(), "dapo", {}, {})


@pytest.mark.trl
def test_a_verdict_names_the_step_that_was_compared():
    pytest.importorskip("trl")
    from tests.step import loops
    from upref_frameworks.trl import step as trl

    for number in (0, 1):
        verdict = trl.report(
            loops.qwen3(), {}, trl.batch(), "dapo", {}, {}, step=number
        )
        assert verdict.loss == f"step {number}"


@pytest.mark.trl
def test_a_bound_that_differs_is_named_with_all_values_that_rows_leave_open():
    """TRL's own upper bound is 0.2. The ratios of these tokens leave open whether it is
    0.1 or 0.2.
    """
    pytest.importorskip("trl")
    from tests.step import loops
    from upref_frameworks.trl import step as trl

    verdict = trl.report(loops.qwen3(), {}, trl.batch(), "dapo", {}, {}, step=1)
    assert not verdict
    cause = verdict.failures[0].cause
    assert cause == "eps_high is between 0.0783 and 0.256 (such as 0.1, 0.2), not 0.28"
