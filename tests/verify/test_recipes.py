# SPDX-License-Identifier: Apache-2.0
"""What `upref recipe` prints was run: typed back into the config, the framework's own loss does what it says."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import upref
from upref import InputError, audits as A
from upref.audits.compare import Comparison, _reference, difference, typical, unit
from upref.audits.recipe import reached, recipe
from upref.cli import main
from upref.weights.batches import grad

JSON = Path(__file__).parents[2] / "docs/frameworks"
EVERY = [(o, n) for n in A.frameworks() for o in reached(n, {})]


def comparison(objective: str, name: str) -> Comparison:
    """The audit's comparison of which the recipe speaks."""
    label = recipe(objective, name).command.split()[2].partition(":")[2]
    return next(c for c in A.framework(name).comparisons if (c.label, c.objective) == (label, objective))


def test_each_recipe_is_of_an_explained_comparison():
    """At least eight objectives, in all frameworks that reach them."""
    assert len({o for o, _ in EVERY}) >= 8 and {n for _, n in EVERY} == {*A.frameworks()}
    for o, n in EVERY:
        r, c = recipe(o, n), comparison(o, n)
        rows = json.loads((JSON / f"{n}.json").read_text(encoding="utf-8"))["rows"]
        row = next(x for x in rows if (x["label"], x["promise"], x["micro_batches"]) == (c.label, c.promise, 1))
        assert row["ok"] and {k: c.config[k] for k in r.fields} == r.fields
        assert len(r.differs) >= len(row["reasons"]) and r.settings == [line for line in r.settings if line.strip()]
        assert set(r.beside) == {"group normalization", "dynamic sampling", "overlong shaping"}


def typed_back(lines: list[str]) -> dict:
    """The fields of the framework's config, from the lines as one types them."""
    found = {}
    for line in lines:
        if m := re.fullmatch(r"(?:actor_rollout_ref\.actor\.)?(\w+)=(.+?),?", line):
            try:
                found[m[1]] = ast.literal_eval(m[2])
            except (ValueError, SyntaxError):
                found[m[1]] = m[2]
    return found


@pytest.mark.parametrize(
    ("name", "objective"),
    [pytest.param(n, o, marks=getattr(pytest.mark, n)) for o, n in EVERY if n in ("verl", "trl")],
)
def test_the_frameworks_own_loss_with_the_typed_settings(name, objective):
    """Equal to the objective with what the recipe says still differs, and to no other."""
    pytest.importorskip(name, reason=f"`repro/venv.sh {name}` installs it")
    f, c, b = A.framework(name), comparison(objective, name), typical()
    typed = typed_back(recipe(objective, name).settings)
    typed.pop("loss_type", None)
    scale = {k: v for k, v in c.config.items() if k == "max_completion_length"}
    b = replace(b, totals=upref.Totals.of(b.mask))
    found = -grad(lambda x: f.of(replace(c, config=typed | scale), x, None), b)
    each = unit(c, b)
    expected = _reference(c, c.reasons, typical())
    assert difference(found / each, expected / each).max() < 1e-6


def test_a_kl_term_that_is_on_beside_the_loss_is_switched_off():
    """Unless the recipe is one with a KL term."""
    said = {n: recipe("dapo", n).settings[-1] for n in ("openrlhf", "areal", "easyr1", "trinity")}
    off = ["--algo.kl.init_coef 0", "actor.kl_ctl=0.0", "algorithm.disable_kl=true", "algorithm.kl_loss_fn: none"]
    assert [*said.values()] == off
    assert off[2] not in recipe("grpo", "easyr1", beta=0.04).settings


def test_the_command(capsys):
    assert main(["recipe", "dapo", "--in", "verl"]) == 0
    out = capsys.readouterr().out
    assert "\nactor_rollout_ref.actor.clip_ratio_high=0.28\n" in out and "still differs: one denominator" in out
    assert str(upref.recipe("dapo", "verl")) + "\n" == out
    assert main(["recipe", "up_dapo", "--in", "trl"]) == 0
    assert 'objective="up_dapo"' in capsys.readouterr().out
    assert main(["recipe", "vespo", "--in", "areal"]) == 2
    assert "trl" in capsys.readouterr().err
    assert json.loads(upref.recipe("gspo", "skyrl").json())["mode"] == "gspo"
    with pytest.raises(InputError, match="at these settings"):
        upref.recipe("dapo", "areal", c=3.5)
