# SPDX-License-Identifier: Apache-2.0
"""A sample of tests/support/fuzz.py, the same every time; the whole run is
`python -m tests.support.fuzz 20000`.
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from docs import coverage, record
from tests.support import entries, fuzz, typed
from upref import cli, plugins
from upref.cli import commands

ROOT = Path(__file__).parents[2]


def test_a_sample_of_bad_inputs():
    """In a process of its own: it watches for children that an input leaves behind."""
    ran = subprocess.run(
        [sys.executable, "-m", fuzz.__name__, "150", "7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    kinds = ran.stdout.splitlines()[-1].split(", ")
    assert ran.returncode == 0 and len(kinds) > 20, ran.stdout + ran.stderr


def test_no_public_function_is_missing():
    assert not entries.there_is() - {*entries.PUBLIC}


@pytest.mark.nightly
def test_what_each_takes_is_what_it_accepts():
    """Else junk in one argument would be seen to be refused for another."""
    for name, (fn, good) in entries.PUBLIC.items():
        if name != "upref_course.explorer.write":
            fn(
                *([good["*"]] if "*" in good else []),
                **{k: v for k, v in good.items() if k != "*"},
            )


def test_no_verb_and_no_option_is_missing():
    """The fuzzer's words have every verb of both commands, and every option of each."""

    def subparsers_of(p):
        return next(
            a for a in p._actions if isinstance(a, argparse._SubParsersAction)
        ).choices

    verbs, paper = subparsers_of(cli._parser()), subparsers_of(typed.paper_parser())
    attached = {*plugins.commands()}
    assert {*verbs} == {*commands.RUN} | attached
    assert {*plugins.VERBS} <= attached
    assert {*paper} == {*typed.PAPER}
    assert {*verbs, *paper} == {*typed.VERBS} == {*typed.FIT}
    for verb, parser in (verbs | paper).items():
        words = set()
        for word in typed.VERBS[verb] + typed.ALL:
            # `--option=value`, or `-ovalue`
            is_long = word.startswith("--")
            words.add(word.partition("=")[0] if is_long else word[:2])
        options = {o for a in parser._actions for o in a.option_strings}
        assert options <= words, f"{verb}: no word for {options - words}"


def test_each_is_among_the_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file of a student is written where it is asked for
    kinds = {fuzz.tries(random.Random(f"0 {i}"))[0] for i in range(8000)}
    assert {entries.qualified(name) for name in entries.PUBLIC} <= kinds
    assert {f"command {verb}" for verb in typed.VERBS} | {
        "child learn",
        "process learn",
    } <= kinds


def test_a_complete_run_is_recorded_as_the_page_counts_it(tmp_path, monkeypatch):
    """What still breaks a rule is asked again when it is recorded."""
    file = tmp_path / "fuzz.json"
    found = {"a loss: no end": ["3 1", "3 2"]}
    monkeypatch.setattr(fuzz, "tries", lambda rng: ("a loss", rng))
    monkeypatch.setattr(
        fuzz, "broken", lambda kind, rng: rng.getstate() == state_of("3 2")
    )
    fuzz.record_run(file, Counter({"a loss": 3}), found, 3, 3)
    (recorded,) = record.read(file)
    assert recorded.seeds == [3] and recorded.rows["seed 3"]["again"] == 1
    line = coverage._run(recorded)
    assert "3 inputs of seed 3 over 1 entry points" in line
    assert "2 got something else" in line and "1 of these still did on" in line


def state_of(seed):
    """The state of a generator of this seed."""
    return random.Random(seed).getstate()
