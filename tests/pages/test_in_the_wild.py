# SPDX-License-Identifier: Apache-2.0
"""docs/in-the-wild.md: each loss has a wrapper, a formula and a verdict, and the
formula bears the verdict out.
"""

import ast
from pathlib import Path

import pytest
import torch

from docs.in_the_wild import by_hand, estimators, page, wrappers
from docs.in_the_wild.__main__ import apart, batches, reference
from docs.in_the_wild.fetched import Fetched

LOSSES, FOUND = page.read()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_a_verdict_that_its_formula_bears_out(name):
    x, found = LOSSES[name], FOUND[name]
    assert (
        callable(getattr(wrappers, name))
        and found["by_hand"] == getattr(by_hand, x["by_hand"]).__doc__
    )
    assert len(x["commit"]) == 40 and page.right(found)


def test_rounding_at_extremes_alone_makes_no_loss_another():
    failure = lambda oracle: {"oracle": oracle, "where": "log r = 40", "cause": ""}
    x, found = (
        LOSSES["gmongaras"],
        FOUND["gmongaras"] | {"check": False, "failures": [failure("extremes")]},
    )
    assert page.verdict(x, found).startswith(
        "**is dapo(eps_low=0.2, eps_high=0.28)**, but not"
    ) and page.right(found)
    other = found | {"failures": [*found["failures"], failure("gradient")]}
    assert page.verdict(x, other).startswith("**is not dapo") and not page.right(other)


def test_nothing_is_listed_that_is_not_there():
    assert FOUND.keys() == {"machine", *LOSSES, "estimators"}
    assert FOUND["estimators"].keys() == estimators.EVERY.keys()
    assert len(LOSSES) >= 30 and len({x["repo"] for x in LOSSES.values()}) >= 30


def test_formulas_by_hand_tell_objectives_apart():
    """What the figures rest on: the objective's own formula is at no distance from it,
    another's is far.
    """
    assert apart(by_hand.grpo, reference("grpo", {"eps": 0.2, "beta": 0.04})) < 1e-12
    assert (
        apart(by_hand.dapo, reference("dapo", {"eps_low": 0.2, "eps_high": 0.28}))
        < 1e-12
    )
    assert apart(by_hand.ppo, reference("grpo", {"eps": 0.3})) > 0.1
    assert apart(by_hand.ppo, reference("ppo_clip", {"eps": 0.2})) > 0.1
    r = torch.cat([(lp - old)[m] for lp, old, _, m, _ in batches()])
    assert (r == 0).any() and (r > 0.5).any() and (r < -0.5).any()


def test_of_fetched_code_only_what_is_named_is_run(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "import nowhere\nraise SystemExit\n\nclass T:\n    @nowhere.jit\n    def half(self, x: nowhere.T):\n"
        "        y = x / two\n        return y\n"
    )
    assert Fetched(tmp_path).take("theirs.py", "T.half", two=2).half(None, 3.0) == 1.5
    assert Fetched(tmp_path).lines("theirs.py", 7, 7, x=5.0, two=2).y == 2.5


def test_the_wrappers_hold_no_code_of_others():
    """They read it from a folder: no clip, no ratio, no KL of their own."""
    tree = ast.parse(Path(wrappers.__file__).read_text(encoding="utf-8"))
    called = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not called & {"clamp", "clip", "minimum", "min", "log", "backward"}
