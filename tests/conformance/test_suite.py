# SPDX-License-Identifier: Apache-2.0
"""The conformance suite: a right loop passes, wrong ones fail with their cause, and no
error reads as a verdict.
"""

import copy
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from repro import fork
from upref.cli import main
from upref.conformance import (
    CASES,
    LEVELS,
    SUITES,
    Adapter,
    Status,
    cases,
    load_adapter,
    run,
)
from upref.conformance.results import (
    draw_badge,
    read_badge,
    read_expected_failures,
    write_results,
)
from upref.errors import InputError
from upref.step import record_step
from upref.step.compare.case import FLOAT32_BOUND

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/howto/conformance.md"
SOURCE = re.search(
    r"```python\n(# adapter\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S
)[1]
pytest.importorskip(
    "transformers",
    reason="the suite's models are made by transformers: repro/venv.sh trl",
)


def _write_adapter(folder):
    """Write the adapter of the page, and return what `--adapter` takes."""
    (folder / "plain_adapter.py").write_text(SOURCE)
    return f"{folder / 'plain_adapter.py'}:Plain"


with tempfile.TemporaryDirectory() as written:
    Plain = type(load_adapter(_write_adapter(Path(written))))


# ---- the cases -----------------------------------------------------------------------
def test_a_suite_never_loses_or_renames_a_case():
    """A build that passed with one release of upref runs the same cases with the next."""
    for suite in SUITES:
        file = HERE / f"suite_{suite.replace('.', '_')}.txt"
        promised = file.read_text(encoding="utf-8").split()
        assert [case.id for case in cases(max(LEVELS), suite)] == promised


def test_levels_contain_the_ones_below():
    first, second, third = ([case.id for case in cases(level)] for level in (1, 2, 3))
    assert len(first) < len(second) < len(third)
    assert second[: len(first)] == first
    assert third[: len(second)] == second


@pytest.mark.parametrize("arguments", [(8, "2026.11"), (0, "2026.11"), (1, "2020.01")])
def test_an_unknown_level_or_suite_is_refused(arguments):
    with pytest.raises(InputError, match="there is no"):
        cases(*arguments)


# ---- verdicts ------------------------------------------------------------------------
class ForgetsTemperature(Plain):
    def loss(self, model, rows, case, tokens, responses):
        return super().loss(
            model, rows, replace(case, temperature=1.0), tokens, responses
        )


class AveragesMicroBatches(Plain):
    def loss(self, model, rows, case, tokens, responses):
        own = sum(sum(row.trains) for row in rows)
        return super().loss(model, rows, case, own, len(rows)) / case.micro_batches


class CountsTheGenerationBatch(Plain):
    """The divisor is the number of tokens of all updates, as TRL's once was
    (huggingface/trl#6024).
    """

    def step(self, model, rows, case):
        self.all_tokens = sum(sum(row.trains) for row in rows)
        super().step(model, rows, case)

    def loss(self, model, rows, case, tokens, responses):
        return super().loss(model, rows, case, self.all_tokens, responses)


class SharesTheGenerationBatch(CountsTheGenerationBatch):
    """Each update has its share of the generation batch's tokens for a divisor."""

    def loss(self, model, rows, case, tokens, responses):
        return super().loss(model, rows, case, tokens, responses) * case.updates


class ScalesTwice(Plain):
    """The documentation has no such factor."""

    def scale(self, case):
        return 2.0


class Raises(Plain):
    def step(self, model, rows, case):
        raise KeyError("no such engine")


class TrainsNothing(Plain):
    def step(self, model, rows, case):
        pass


class ReturnsGradients(Plain):
    """A framework that trains a copy, and returns what reached it."""

    def step(self, model, rows, case):
        """Leave the model alone, and return the gradients by name, or a recording of
        several updates.
        """
        if case.updates > 1:
            own = copy.deepcopy(model)
            with record_step(own) as seen:
                super().step(own, rows, case)
            return seen
        own = copy.deepcopy(model)
        self.loss(
            own, rows, case, sum(sum(row.trains) for row in rows), len(rows)
        ).backward()
        return {name: parameter.grad for name, parameter in own.named_parameters()}


class TrainsHalf(Plain):
    """Both updates train on the first rows, as a loader does that is never advanced."""

    def step(self, model, rows, case):
        super().step(model, rows[:4] + rows[:4], case)


class OneUpdate(Plain):
    def step(self, model, rows, case):
        super().step(model, rows[:4], replace(case, updates=1))


@pytest.mark.parametrize(
    "name",
    [
        "objective/dapo",
        "mask/cut-off-responses",
        "micro/4/token-mean",
        "generation/2/micro-2",
    ],
)
def test_a_right_loop_passes(name):
    outcome = run(Plain(), CASES[name])
    assert outcome.status is Status.PASSED, str(outcome)


@pytest.mark.parametrize("name", ["objective/dapo", "generation/2/micro-2"])
def test_a_framework_that_trains_a_copy_passes(name):
    outcome = run(ReturnsGradients(), CASES[name])
    assert outcome.status is Status.PASSED, str(outcome)


class AveragesGroups(Plain):
    """The mean of each group's token mean."""

    def loss(self, model, rows, case, tokens, responses):
        """Return the mean over groups of their means over tokens: another aggregation
        than the case's.
        """
        by_group = {row.group: [] for row in rows}
        for row in rows:
            by_group[row.group].append(row)
        means = [
            super(AveragesGroups, self).loss(
                model, own, case, sum(sum(row.trains) for row in own), len(own)
            )
            for own in by_group.values()
        ]
        return sum(means) / len(means)


@pytest.mark.parametrize(
    ("name", "status"),
    [("objective/dapo", Status.PASSED), ("objective/ppo_clip", Status.FAILED)],
)
def test_dapo_may_average_groups_or_all_tokens(name, status):
    """The plain loop, which counts all tokens, passes both."""
    assert run(AveragesGroups(), CASES[name], explain=False).status is status


class LearnsFast(Plain):
    """The first update moves each weight by 1, so that the second starts elsewhere."""

    def step(self, model, rows, case):
        """Train by AdamW at a learning rate of 1, with weight decay, on two updates."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
        for update in (rows[:4], rows[4:]):
            tokens = sum(sum(row.trains) for row in update)
            self.loss(model, update, case, tokens, len(update)).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_reference_of_a_second_update_has_the_weights_of_the_first():
    outcome = run(LearnsFast(), CASES["generation/2/token-mean"])
    assert outcome.status is Status.PASSED, str(outcome)


class HalfPrecision(Plain):
    """A float32 model in a step that autocasts: half precision's bound would let much
    pass.
    """

    def loss(self, *arguments):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(*arguments)


WRONG = [
    (HalfPrecision, "objective/dapo", "the step computes in bfloat16"),
    (
        TrainsHalf,
        "generation/2/token-mean",
        "no optimizer step of the generation batch trains on responses 4, 5, 6, 7",
    ),
    (ForgetsTemperature, "objective/grpo", "temperature"),
    (AveragesMicroBatches, "micro/4/token-mean", "micro-batches"),
    (
        CountsTheGenerationBatch,
        "generation/2/token-mean",
        "divided by 43 in each optimizer step: 43 is the number of tokens of all 2 steps "
        "together, which have 21 and 22",
    ),
    (
        SharesTheGenerationBatch,
        "generation/2/micro-2",
        "divided by 43 / 2 in each optimizer step",
    ),
    (
        ScalesTwice,
        "objective/ppo_clip",
        "every weight is 1/2 times what it should be; if your documentation says so, "
        "multiply scale(case), which is 2, by this factor",
    ),
]


@pytest.mark.parametrize(
    ("adapter", "name", "cause"),
    WRONG,
    ids=[adapter.__name__ for adapter, _, _ in WRONG],
)
def test_a_wrong_loop_fails_with_its_cause(adapter, name, cause):
    outcome = run(adapter(), CASES[name])
    assert outcome.status is Status.FAILED
    assert cause in outcome.reason, outcome.reason
    assert "eps_low = 0.2" in str(outcome), (
        "a failure prints the framework's own configuration"
    )


@pytest.mark.parametrize("adapter", [AveragesMicroBatches, CountsTheGenerationBatch])
def test_a_fault_of_splitting_passes_where_nothing_is_split(adapter):
    assert run(adapter(), CASES["objective/ppo_clip"]).status is Status.PASSED


# ---- rounding ------------------------------------------------------------------------
class OnePartIn(Plain):
    """Its gradient is right but for a factor of 1 + 1 / n."""

    n = 20_000

    def step(self, model, rows, case):
        self.loss(model, rows, case, sum(sum(r.trains) for r in rows), 8).backward()
        for parameter in model.parameters():
            parameter.grad *= 1 + 1 / self.n


class OnePartInThousand(OnePartIn):
    n = 1_100


@pytest.mark.nightly
def test_linear_attention_is_allowed_what_its_own_rounding_makes():
    """At these rows a norm divides by a vector near 0, so float32 moves the gradient by
    more than the usual bound.
    """
    case = CASES["family/qwen3_next"]
    right = run(Plain(), case, seed=1, explain=False)
    assert right.status is Status.PASSED, str(right)
    allowed = right.report.tolerances["gradient, relative"]
    assert FLOAT32_BOUND < right.report.error < allowed < 1 / OnePartInThousand.n
    assert any(
        "what rounding to float32 moves it" in a for a in right.report.assumptions
    )
    wrong = run(OnePartInThousand(), case, seed=1, explain=False)
    assert wrong.status is Status.FAILED


def test_a_model_that_rounds_little_is_allowed_no_more():
    """One part in 20,000 is twice and a half the usual bound, and fails."""
    outcome = run(OnePartIn(), CASES["objective/ppo_clip"], explain=False)
    assert outcome.status is Status.FAILED
    assert outcome.report.tolerances == {"gradient, relative": FLOAT32_BOUND}


def test_without_the_search_a_failure_names_no_cause():
    outcome = run(ForgetsTemperature(), CASES["objective/grpo"], explain=False)
    assert outcome.status is Status.FAILED
    assert outcome.reason == "the cause was not searched"


@pytest.mark.parametrize(
    ("adapter", "name", "words"),
    [
        (Raises, "objective/dapo", "KeyError: 'no such engine' (test_suite.py, line"),
        (
            Raises,
            "generation/2/token-mean",
            "KeyError: 'no such engine' (test_suite.py, line",
        ),
        (TrainsNothing, "objective/dapo", "left no gradient"),
        (OneUpdate, "generation/2/token-mean", "made 1 steps, and the case has 2"),
    ],
)
def test_what_could_not_run_is_no_verdict(adapter, name, words):
    outcome = run(adapter(), CASES[name])
    assert outcome.status is Status.COULD_NOT_RUN
    assert words in outcome.reason, outcome.reason


def test_what_the_framework_lacks_is_skipped():
    outcome = run(Plain(), CASES["objective/cispo"])
    assert (outcome.status, outcome.reason) == (Status.SKIPPED, "the loop has no cispo")


# ---- adapters and files --------------------------------------------------------------
def test_an_adapter_is_loaded_from_a_file(tmp_path):
    assert isinstance(load_adapter(_write_adapter(tmp_path)), Adapter)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("plain_adapter.py", "takes FILE.py:CLASS"),
        ("nowhere.py:Plain", "there is no file nowhere.py"),
        ("no_such_module:Plain", "there is no module no_such_module"),
        (
            "broken.py:Plain",
            "broken.py cannot be imported: ModuleNotFoundError: No module named 'no_such_framework'",
        ),
        ("json:Other", "has no Other"),
        ("json:JSONDecoder", "it lacks name, supports"),
    ],
)
def test_a_bad_adapter_gets_one_sentence(target, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import no_such_framework\n", encoding="utf-8")
    with pytest.raises(InputError, match=words):
        load_adapter(target)


def test_a_package_of_the_current_folder_is_not_found_by_pytest_alone(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_framework").mkdir()
    (tmp_path / "adapter.py").write_text("import my_framework.trainer\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with pytest.raises(InputError, match="or run `python -m pytest`"):
        load_adapter("adapter.py:Mine")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[expected_failures", "is no TOML file"),
        ("[other]", "must hold one table"),
        ('[expected_failures]\n"family/none" = "x"', "no such case"),
        ('[expected_failures]\n"family/gpt2" = " "', "gives no reason"),
    ],
)
def test_a_bad_list_of_known_failures_gets_one_sentence(text, words, tmp_path):
    file = tmp_path / "xfails.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_expected_failures(file)


def test_a_badge_counts_what_was_tried(tmp_path, capsys):
    """Of a right, a skipped and a failing case the badge counts 1 of 2; a file without
    results is refused with status 2.
    """
    names = ("objective/dapo", "objective/cispo")
    outcomes = [run(Plain(), CASES[name]) for name in names] + [
        run(Raises(), CASES["objective/grpo"])
    ]
    write_results(tmp_path / "results.json", "plain loop 1.0", "2026.11", 1, outcomes)
    badge = read_badge(tmp_path / "results.json")
    # the skipped case does not count
    assert str(badge) == "upref 2026.11, level 1, 1 of 2"
    assert "level 1, 1 of 2" in draw_badge(badge)
    assert (
        main(
            ["badge", str(tmp_path / "results.json"), "-o", str(tmp_path / "badge.svg")]
        )
        == 0
    )
    assert (tmp_path / "badge.svg").read_text() == draw_badge(badge)
    capsys.readouterr()
    (tmp_path / "bad.json").write_text("{}")
    assert main(["badge", str(tmp_path / "bad.json")]) == 2
    assert "is no results file" in capsys.readouterr().err


# ---- the command ---------------------------------------------------------------------
def _pytest(folder, *arguments):
    """Run the suite by pytest in a process of its own; return its exit status and what
    it printed.
    """
    command = [
        *fork.executable(),
        "-m",
        "pytest",
        "--pyargs",
        "upref.conformance",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=os.environ | fork.environment("transformers"),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


ADAPTER = f"""{SOURCE}

import dataclasses


class Mine(Plain):
    name = "mine 1.0"

    def step(self, model, rows, case):
        if case.objective == "dapo":
            raise RuntimeError("no engine")
        if case.id == "objective/grpo":
            rows = rows[:-1]
        super().step(model, rows, case)


class Cold(Plain):
    name = "cold 1.0"

    def loss(self, model, rows, case, *counts):
        case = dataclasses.replace(case, temperature=1.0)
        return super().loss(model, rows, case, *counts)
"""


@pytest.mark.slow
def test_the_command_and_the_list_of_known_failures(tmp_path):
    """One case passes, one fails and one cannot run: without a list, with one that
    names both, and with one that also names the case that passes.
    """
    (tmp_path / "adapter.py").write_text(ADAPTER)
    some = (
        "--adapter",
        "adapter.py:Mine",
        "--level",
        "1",
        "-k",
        "objective/grpo or objective/dapo or ppo_clip",
    )
    status, text = _pytest(tmp_path, *some, "--upref-results", "results.json")
    assert status == 1
    assert "1 passed, 1 failed, 1 could not run" in text
    assert "RuntimeError: no engine (adapter.py, line" in text
    assert "Traceback (most recent call last)" in text
    assert "pytest_options.py" not in text, "an adapter's error shows upref's lines"
    assert "runner.py" not in text, "an adapter's error shows upref's lines"
    results = json.loads((tmp_path / "results.json").read_text())
    statuses = {name: record["status"] for name, record in results["cases"].items()}
    assert statuses == {
        "objective/ppo_clip": "passed", "objective/dapo": "could not run", "objective/grpo": "failed",
    }  # fmt: skip

    known = '[expected_failures]\n"objective/grpo" = "drops a row"\n"objective/dapo" = "no engine"\n'
    (tmp_path / "known.toml").write_text(known)
    status, text = _pytest(tmp_path, *some, "--upref-xfails", "known.toml")
    assert status == 0, text
    assert "mine 1.0: 1 passed, 2 expected failures\n" in text

    (tmp_path / "known.toml").write_text(
        known + '"objective/ppo_clip" = "was wrong once"\n'
    )
    status, text = _pytest(tmp_path, *some, "--upref-xfails", "known.toml")
    assert status == 1
    assert (
        "objective/ppo_clip passes, and the list of known failures has it: take it out."
        in text
    )
    assert "2 expected failures, 1 passed that the list of known failures has" in text


@pytest.mark.slow
def test_listed_failures_leave_the_search_to_unexpected_ones(tmp_path):
    """Three listed cases fail first, and the causes of the next three are searched. The
    failure beyond them prints the command that searches its cause.
    """
    (tmp_path / "adapter.py").write_text(ADAPTER)
    listed = ("objective/ppo_clip", "objective/dapo", "objective/grpo")
    lines = [f'"{name}" = "no temperature"' for name in listed]
    (tmp_path / "known.toml").write_text("\n".join(["[expected_failures]", *lines]))
    some = ("--level", "1", "-k", f"{' or '.join(listed)} or cispo or mask")
    arguments = ("--adapter", "adapter.py:Cold", "--upref-xfails", "known.toml")
    status, text = _pytest(tmp_path, *arguments, *some, "-v", "-rs")
    assert status == 1
    assert "cold 1.0: 4 failed, 1 skipped, 3 expected failures\n" in text
    failures = re.split(r"^_+ test_step\[(.*)\] _+$", text, flags=re.MULTILINE)
    said = dict(zip(failures[1::2], failures[2::2], strict=True))
    *first, last = said.values()
    assert len(first) == 3
    for each in first:
        assert "the temperature is left out" in each
    command = "python -m pytest --pyargs upref.conformance --adapter adapter.py:Cold"
    assert f"{command} -k mask/end-inside" in last
    assert "assumed: allowed error of the gradient" in last
    assert ": objective/cispo: the loop has no cispo" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "words"), [("--help", "--upref-xfails"), ("--collect-only", "dual-clip")]
)
def test_what_runs_no_case_needs_no_adapter(option, words, tmp_path):
    status, text = _pytest(tmp_path, option)
    assert status == 0, text
    assert words in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name an adapter"),
        (("--adapter", "adapter.py:Mine", "--level", "9"), "there is no level 9"),
    ],
)
def test_a_bad_command_gets_one_sentence(arguments, words, tmp_path):
    (tmp_path / "adapter.py").write_text(ADAPTER)
    status, text = _pytest(tmp_path, *arguments)
    assert status == 4
    assert words in text
    assert "Traceback" not in text
