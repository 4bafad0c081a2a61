# SPDX-License-Identifier: Apache-2.0
"""What a report prints as Python runs as it is printed, after `import torch, upref`,
and shows what the report says.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import upref
from tests.support.cases import REJECTED, Case
from tests.support.cases.bodies import clipped, mean
from tests.support.cases.table import ALL
from tests.support.daily import daily
from tests.verify.test_cases import strangers
from upref.verify.render import describe_example, describe_pair
from upref.verify.shrink import make_example

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^from (upref[\w.]*) import (\w+(?:, \w+)*)$", re.M)


def test_every_import_that_is_printed_is_there():
    """Those in strings: they make a batch that is too long to print, or load a plug-in."""
    printed = set()
    packages = ("upref", "upref_frameworks", "upref_course")
    for file in (f for package in packages for f in (ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        printed |= {
            (m, name)
            for text in texts
            for m, names in IMPORT.findall(text)
            for name in names.split(", ")
        }
    assert ("upref.weights.stress", "stress_batch") in printed
    for module, name in printed:
        assert name in names_at_the_top_of(module), (module, name)


def names_at_the_top_of(module):
    """Return the names that a module defines or imports, read without running it: it
    may import a framework that is not installed.
    """
    file = importlib.util.find_spec(module).origin
    found = set()
    for node in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    return found


@pytest.mark.parametrize(
    "case", daily([c for c in ALL if c.verdict == REJECTED], 60), ids=lambda c: c.name
)
def test_a_printed_batch_runs(case):
    printed = [f.batch for f in case.judged().findings if f.batch]
    for batch in printed:
        exec(batch, {"torch": torch, "upref": upref})
        assert shows_a_difference(batch), batch


def shows_a_difference(batch):
    """Return whether the two gradients printed below a batch differ; true if there are
    not two.
    """
    said = re.findall(r"# (?:expected|found   ) dJ/dlp: (.*)", batch)
    return len(said) != 2 or said[0] != said[1]


def positives_over_the_width(log_prob, old_log_prob, advantages, mask):
    """Return UP-GSPO's loss whose good responses are divided by the padded width."""
    A, s = mean(advantages, mask), mean(log_prob - old_log_prob, mask).exp()
    good = A * torch.where(mask, log_prob, 0).sum(1) / mask.shape[1]
    return -torch.where(
        A > 0, good, torch.minimum(s * A, s.clamp(min=1 - 3e-4) * A)
    ).mean()


def width_in_place_of_length(log_prob, old_log_prob, advantages, mask):
    """Return LUSPO's loss with the padded width in place of the length."""
    A, s = mean(advantages, mask), mean(log_prob - old_log_prob, mask).exp()
    return -(
        mask.shape[1] * torch.minimum(s * A, s.clamp(1 - 2e-3, 1 + 2.5e-3) * A)
    ).mean()


def prompts_in_a_table(log_prob, old_log_prob, advantages, mask, group):
    """Return DAPO's loss of at most 16 responses to a prompt."""
    J = torch.where(mask, clipped(log_prob - old_log_prob, advantages), 0)
    rows = [(group == i).nonzero()[:16, 0] for i in group.unique()]
    return -torch.stack([J[i].sum() / mask[i].sum() for i in rows]).mean()


def advantages_below_2(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with |A| of at most 2, which shows where a batch's advantages
    are tripled.
    """
    J = clipped(log_prob - old_log_prob, advantages.clamp(-2, 2))
    return -torch.where(mask, J, 0).sum() / mask.sum()


def a_denominator_of_its_own(log_prob, old_log_prob, advantages, mask, totals):
    """Return GRPO's loss, in which micro-batches and ranks divide by their own number
    of responses.
    """
    J = torch.where(mask, clipped(log_prob - old_log_prob, advantages, 0.8, 1.2), 0)
    return -(J.sum(1) / mask.sum(1)).mean()


def rows_weighed_in_their_order(log_prob, old_log_prob, advantages, mask):
    J = torch.where(mask, clipped(log_prob - old_log_prob, advantages), 0)
    rank = torch.arange(len(mask), dtype=J.dtype)[:, None]
    return -(J * (1 + rank)).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "objective", "oracles"),
    [
        (positives_over_the_width, "up_gspo", {"gradient", "on-policy", "padding"}),
        (width_in_place_of_length, "luspo", {"gradient"}),
        (prompts_in_a_table, "dapo", {"extremes"}),
        (advantages_below_2, "dapo", {"scaling"}),
        (a_denominator_of_its_own, "grpo", {"micro-batches", "data-parallel"}),
        (rows_weighed_in_their_order, "dapo", {"permutation"}),
    ],
)
def test_a_printed_batch_shows_the_difference(loss, objective, oracles):
    """Equal numbers under a failure are no evidence; these losses are right on the
    batches that were printed once.
    """
    report = upref.check(loss, objective, skip=("unusual-inputs", "one-response"))
    shown = {
        f.oracle for f in report.failures if f.batch.startswith("b = upref.Rollouts(")
    }
    assert oracles <= shown, str(report)
    assert all(shows_a_difference(f.batch) for f in report.findings), str(report)
    both = [describe_pair(f.expected, f.found) for f in report.failures if f.expected]
    assert all(expected != found for expected, found in both), str(report)


def test_the_sign_that_is_right_is_not_blamed():
    report = upref.check(
        positives_over_the_width, "up_gspo", skip=("unusual-inputs", "one-response")
    )
    regimes = [
        f.regime
        for f in report.failures
        if f.oracle in ("gradient", "on-policy", "aggregation")
    ]
    assert regimes and all(r.startswith("A > 0") for r in regimes), str(report)


def test_gradients_that_print_as_one_number_are_no_batch():
    b = upref.Rollouts(
        *(-torch.ones(3, 1, 1, dtype=torch.float64)), torch.ones(1, 1, dtype=torch.bool)
    )
    one = torch.ones(1, 1, dtype=torch.float64)
    assert make_example(b, one, one * (1 + 1e-15)) is None
    text = describe_example(make_example(b, one, one * (1 + 1e-10)))
    assert "expected dJ/dlp: [[1]]" in text
    assert shows_a_difference(text)


def off_beyond(tokens, objective, only_in=torch.float64):
    """Return the objective's loss, and twice of it where a batch of dtype `only_in` has
    more than `tokens` tokens.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        value = upref.get(objective).loss(
            upref.Rollouts(log_prob, old_log_prob, advantages, mask)
        )
        return 2 * value if mask.sum() > tokens and log_prob.dtype == only_in else value

    return loss


def off_beyond_by_group(tokens, objective):
    """Return the objective's loss with groups, and twice of it where a batch has more
    than `tokens` tokens.
    """

    def loss(log_prob, old_log_prob, advantages, mask, group):
        value = upref.get(objective).loss(
            upref.Rollouts.unchecked(
                logp=log_prob,
                logp_old=old_log_prob,
                adv=advantages,
                mask=mask,
                group=group,
            )
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
