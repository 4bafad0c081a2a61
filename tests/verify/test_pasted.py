# SPDX-License-Identifier: Apache-2.0
"""What a report prints as Python runs as it is printed, after `import torch, upref`, and shows what the report says."""

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

import upref
from tests.support.cases import REJECTED, Case
from tests.support.cases.table import ALL
from tests.support.daily import daily
from tests.verify.test_cases import strangers

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^from (upref[\w.]*) import (\w+(?:, \w+)*)$", re.M)


def test_every_import_that_is_printed_is_there():
    """Those in strings: they make a batch that is too long to print, or load a plug-in."""
    printed = set()
    packages = ("upref", "upref_frameworks", "upref_course")
    for file in (f for package in packages for f in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        printed |= {(m, name) for text in texts for m, names in IMPORT.findall(text) for name in names.split(", ")}
    assert ("upref.weights.axes", "stress_batch") in printed
    for module, name in printed:
        assert hasattr(importlib.import_module(module), name), (module, name)


@pytest.mark.parametrize("case", daily([c for c in ALL if c.verdict == REJECTED], 30), ids=lambda c: c.name)
def test_a_printed_batch_runs(case):
    printed = [f.batch for f in case.judged().findings if f.batch]
    for batch in printed:
        exec(batch, {"torch": torch, "upref": upref})


def off_beyond(tokens, objective, only_in=torch.float64):
    """The objective, and twice of it where a batch has more tokens."""

    def loss(log_prob, old_log_prob, advantages, mask):
        value = upref.get(objective).loss(upref.Rollouts(log_prob, old_log_prob, advantages, mask))
        return 2 * value if mask.sum() > tokens and log_prob.dtype == only_in else value

    return loss


def off_beyond_by_group(tokens, objective):
    def loss(log_prob, old_log_prob, advantages, mask, group):
        value = upref.get(objective).loss(
            upref.Rollouts.unchecked(logp=log_prob, logp_old=old_log_prob, adv=advantages, mask=mask, group=group)
        )
        return 2 * value if mask.sum() > tokens else value

    return loss


@pytest.mark.parametrize(
    ("loss", "objective"),
    [
        (off_beyond(5000, "grpo"), "grpo"),
        (off_beyond(5000, "grpo", only_in=torch.float32), "grpo"),
        (off_beyond(30_000, "gspo"), "gspo"),
        (off_beyond(5000, "up_grpo"), "up_grpo"),
        (off_beyond_by_group(30_000, "dapo"), "dapo"),
    ],
)
def test_a_batch_too_long_to_print_is_made_by_what_is_printed(loss, objective):
    report = upref.check(loss, objective)
    made = [f for f in report.failures if "stress_batch(" in f.batch]
    assert made, report.text()
    assert strangers(Case(loss, objective), report) == []
