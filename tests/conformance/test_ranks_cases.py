# SPDX-License-Identifier: Apache-2.0
"""Cases of two ranks: a right loop passes, one that counts its own tokens fails, and no
case outlives its deadline.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from repro import fork
from tests.support.hanging import HANGING
from upref.conformance import CASES, Status, load_adapter, run, run_ranks
from upref.errors import InputError

pytest.importorskip(
    "transformers",
    reason="the suite's models are made by transformers: repro/venv.sh trl",
)
PAGE = Path(__file__).parents[2] / "docs/howto/conformance.md"
SOURCE = re.search(
    r"```python\n(# adapter\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.S
)[1]
LOOPS = """

import os
import time

from torch import distributed


class Parallel(Plain):
    def supports(self, case):
        return ""

    def count(self, rows):
        tokens = torch.tensor(float(sum(sum(row.trains) for row in rows)))
        distributed.all_reduce(tokens)
        return tokens

    def step(self, model, rows, case):
        self.loss(model, rows, case, self.count(rows), len(rows) * case.ranks).backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)


class CountsItsOwn(Parallel):
    def count(self, rows):
        return 2 * sum(sum(row.trains) for row in rows)


class Sleeps(Parallel):
    def step(self, model, rows, case):
        if distributed.get_rank() == 1:
            time.sleep(1000)
        super().step(model, rows, case)


class Raises(Parallel):
    def step(self, model, rows, case):
        if distributed.get_rank() == 1:
            raise KeyError("no such engine")
        super().step(model, rows, case)


class Ends(Parallel):
    def step(self, model, rows, case):
        os._exit(0)
"""
CASE = CASES["ranks/dp2/token-mean"]


def _load(name, folder):
    (folder / "loops.py").write_text(SOURCE + LOOPS)
    return load_adapter(f"{folder / 'loops.py'}:{name}")


@pytest.mark.nightly
def test_a_loop_that_adds_the_ranks_gradients_passes(tmp_path):
    outcome = run_ranks(_load("Parallel", tmp_path), CASE, deadline=HANGING)
    assert outcome.status is Status.PASSED, str(outcome)


@pytest.mark.nightly
def test_a_loop_that_counts_its_own_tokens_fails_with_its_cause(tmp_path):
    outcome = run_ranks(_load("CountsItsOwn", tmp_path), CASE, deadline=HANGING)
    assert outcome.status is Status.FAILED
    assert "token-mean is taken over 2 ranks" in outcome.reason, outcome.reason


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "deadline", "words"),
    [
        ("Sleeps", 30, "had not finished after 30 seconds"),
        ("Raises", HANGING, "rank 1 failed: KeyError: 'no such engine'"),
        ("Ends", HANGING, "rank 0 ended before there was an outcome"),
    ],
)
def test_a_rank_that_ends_or_hangs_is_no_verdict(name, deadline, words, tmp_path):
    outcome = run_ranks(_load(name, tmp_path), CASE, deadline=deadline)
    assert outcome.status is Status.COULD_NOT_RUN
    assert words in outcome.reason, outcome.reason


def test_the_command_takes_a_deadline(tmp_path):
    (tmp_path / "loops.py").write_text(SOURCE + LOOPS)
    command = [
        *fork.executable(),
        *("-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("--pyargs", "upref.conformance", "--adapter", "loops.py:Sleeps"),
        *("--level", "4", "-k", "dp2 and token", "--upref-deadline", "1"),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | fork.environment("transformers"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the ranks had not finished after 1 seconds" in done.stdout, done.stdout
    assert done.returncode == 1


def test_one_process_refuses_a_case_of_two(tmp_path):
    with pytest.raises(
        InputError, match=r"has 2 ranks: run it with upref\.conformance\.run_ranks"
    ):
        run(_load("Parallel", tmp_path), CASE)
    assert run_ranks(_load("Plain", tmp_path), CASE).status is Status.SKIPPED
