# SPDX-License-Identifier: Apache-2.0
"""Every claim under derivations/ holds and can fail; `derive` tells right objectives
from wrong ones.
"""

import functools
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import upref
from repro import fork
from tests.support.daily import daily
from upref import advantages
from upref.derivation import derive, sympy_gradient
from upref.kl import ESTIMATORS
from upref.ops import exp, where
from upref.rollouts import autograd_gradient
from upref.weights.batches import OFF_EDGES, batch

DERIVATIONS = Path(__file__).parents[2] / "derivations"
ENV = os.environ | {"PYTHONPATH": str(DERIVATIONS.parent)}
spec = importlib.util.spec_from_file_location("make_page", DERIVATIONS / "make_page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)


def wrong(o, factor=2):
    """Return the objective with its function multiplied by a factor, and its
    hand-written weight as it is.
    """
    return replace(
        o, fn=functools.wraps(o.fn)(lambda *args, **hp: factor * o.fn(*args, **hp))
    )


def no_negatives(lp, lp_old, A):
    return where(A > 0, upref.get("dapo").fn(lp, lp_old, A), 0 * lp)


# What each claim is perturbed to, so that its script must fail: a false statement, or a
# wrong objective.
FALSE = {
    "log_derivative": [lambda m: {"left_over": lambda A, lp: 0}],
    "is_gradient": [lambda m: {"base": m.UP}, lambda m: {"up": m.IS}],
    "clipped_gradient": [
        lambda m: {"base": upref.get("up_grpo")},
        lambda m: {"base": wrong(m.GRPO)},
    ],
    "cap_positive": [lambda m: {"bound": 1 - m.eps_high}],
    "up_positive": [
        lambda m: {"difference": 1},
        lambda m: {"anchored": m.LOG},
        lambda m: {"log_form": wrong(m.LOG)},
    ],
    "up_gspo": [
        lambda m: {"exponent": -2},
        lambda m: {"anchored": upref.get("gspo")},
        lambda m: {"log_form": replace(m.LOG, level="token")},
        lambda m: {"anchored": replace(m.ANCHORED, level="token")},
        lambda m: {"log_form": replace(m.LOG, level="sequence_product")},
        lambda m: {"log_form": replace(m.LOG, agg="seq-mean-token-mean")},
        lambda m: {"of_tokens": replace(m.GRPO, level="sequence_mean")},
        lambda m: {"of_tokens": replace(m.GRPO, agg="token-mean")},
    ],
    "cap_negative": [lambda m: {"direction": 1}, lambda m: {"base": wrong(m.UP)}],
    "eps_high_inert": [lambda m: {"smallest": -2 * m.LOW}],
    "up_is_base_on_policy": [lambda m: {"ratio": 2}],
    "kl_estimators": [lambda m: {"gradients": m.GRADIENTS | {"k3": m.GRADIENTS["k2"]}}],
    "stability": [
        lambda m: {"sign": 1},
        lambda m: {"symmetric": wrong(m.SYMMETRIC)},
        lambda m: {"up": wrong(m.UP)},
    ],
    "fixed_point": [lambda m: {"target": lambda mu, A: A}],
    "capacity_is_not_a_bound": [
        lambda m: {"fn": no_negatives},
        lambda m: {"bound": 2.8},
    ],
    "pass_rate": [
        lambda m: {"claims": lambda G: m.claims(G) | {"maxrl": 1 / m.p}},
        lambda m: {"claims": lambda G: m.claims(G) | {"group_norm": 1}},
        lambda m: {"smallest_at": 0.4},
    ],
    "weights": [
        lambda m: {"which": [wrong(upref.get("up_gspo"))]},
        lambda m: {"which": [wrong(upref.get("m2po"))]},
    ],
}


@pytest.mark.parametrize("name, has_one", [("dapo", True), ("is_pg", False)])
def test_a_dual_clip_that_the_formula_lacks_is_said(name, has_one):
    text = str(derive(name))
    assert ("c is a dual clip. The formula has none" in text) == has_one
    assert ("r > c" in text) == has_one
    assert "(G prompts" not in text


README = (DERIVATIONS / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(
    zip([*page.CLAIMS, "mutants"], re.split(r"(?=\n## )", README)[1:], strict=True)
)


@functools.cache
def shown(name):
    """Return a derivation's section of the page, and the objectives whose function it
    asks for.
    """
    asked, get = [], upref.get
    with mock.patch.object(upref, "get", lambda o: asked.append(o) or get(o)):
        return page.section(name), sorted(set(asked))


@pytest.mark.slow
@pytest.mark.parametrize("name", page.CLAIMS)
def test_the_claim_holds_and_the_page_shows_its_steps(name):
    assert shown(name)[0] == SECTIONS[name], "run: python derivations/make_page.py"


@pytest.mark.parametrize(
    ("name", "i"),
    [(name, i) for name, changes in FALSE.items() for i in range(len(changes))],
)
def test_the_claim_can_fail(name, i):
    module = page.load(name)
    with pytest.raises(AssertionError):
        module.main(**FALSE[name][i](module))


def alive(fn):
    """Return the function with A lp added: its gradient is larger by A everywhere."""
    return functools.wraps(fn)(
        lambda lp, lp_old, A, *more, **hp: fn(lp, lp_old, A, *more, **hp) + A * lp
    )


def dead(fn):
    """Return the function with no gradient above r = e^0.1."""

    @functools.wraps(fn)
    def mutant(lp, lp_old, A, *more, **hp):
        return where(
            lp <= (0 * lp if lp_old is None else lp_old) + 0.1,
            fn(lp, lp_old, A, *more, **hp),
            0 * A,
        )

    return mutant


@pytest.mark.slow
@pytest.mark.parametrize("name", daily(page.CLAIMS, 2))
def test_the_derivation_fails_where_its_objective_is_another(name, monkeypatch):
    """Each function it reads, mutated alone: so it is derived from the function that
    trains, and from each of them.
    """
    objectives = ["aspo", "m2po"] if name == "weights" else shown(name)[1]
    assert objectives or name in ("kl_estimators", "pass_rate")
    for o in map(upref.get, objectives):
        seen = any(
            fails(name, replace(o, fn=mutate(o.fn)), monkeypatch)
            for mutate in (alive, dead)
        )
        assert seen, (
            f"derivations/{name}.py does not see that {o.name} is another function"
        )


def fails(name, mutant, monkeypatch):
    """Return whether the derivation fails with this mutant in place of the objective of
    its name.
    """
    get = upref.get
    monkeypatch.setattr(
        upref, "get", lambda one: mutant if one == mutant.name else get(one)
    )
    try:
        page.load(name).main(**({"which": [mutant]} if name == "weights" else {}))
    except AssertionError:
        return True
    finally:
        monkeypatch.undo()
    return False


@pytest.mark.parametrize("name", ["leave_one_out", "group_mean", "maxrl", "group_norm"])
def test_the_derivation_of_pass_rates_fails_where_an_estimator_is_another(
    name, monkeypatch
):
    estimator = advantages.get(name)
    monkeypatch.setitem(
        advantages.ADVANTAGES,
        name,
        lambda rewards, group: 2 * estimator(rewards, group),
    )
    with pytest.raises(AssertionError):
        page.load("pass_rate").main()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_derivation_of_kl_terms_fails_where_one_is_another(name, monkeypatch):
    k = ESTIMATORS[name]
    monkeypatch.setitem(ESTIMATORS, name, lambda lp, lp_ref: 2 * k(lp, lp_ref))
    with pytest.raises(AssertionError):
        page.load("kl_estimators").main()


def test_every_file_is_a_claim_on_the_page():
    assert (
        {p.stem for p in DERIVATIONS.glob("*.py")}
        == {*page.CLAIMS, "make_page"}
        == {*FALSE, "make_page"}
    )
    assert page.HEAD + "".join(SECTIONS.values()) == README, (
        "run: python derivations/make_page.py"
    )
    assert SECTIONS["mutants"] == page.table(), "run: python derivations/make_page.py"


@pytest.mark.slow
def test_a_script_says_so_by_its_exit_status(tmp_path):
    """Run a derivation as it is and with a wrong exponent, and find the statuses 0 and
    1.
    """
    script = tmp_path / "up_gspo.py"
    text = (DERIVATIONS / "up_gspo.py").read_text(encoding="utf-8")
    for exponent, status in (("-1", 0), ("-2", 1)):
        script.write_text(
            text.replace("exponent=-1", f"exponent={exponent}"), encoding="utf-8"
        )
        done = subprocess.run(
            [*fork.executable(), script],
            capture_output=True,
            cwd=DERIVATIONS.parent,
            env=ENV | fork.environment(),
        )
        assert done.returncode == status and done.stdout


@pytest.mark.parametrize("name", [*upref.names(), "up(gmpo)", "up_anchored(sapo)"])
@pytest.mark.parametrize("factor", [1, 2])
def test_derive_tells_right_from_wrong(name, factor):
    o = (
        upref.up_anchored(upref.get("sapo"))
        if name == "up_anchored(sapo)"
        else upref.get(name)
    )
    d = derive(wrong(o, factor))
    assert d.ok == (factor == 1)
    assert d.name in str(d) and ("not read by sympy" in str(d)) == bool(o.not_symbolic)
    assert ("MISMATCH" in str(d) or "NO" in d.steps[-1]) == (factor == 2)


def test_derive_finds_a_kink_that_the_weight_does_not_know():
    o = upref.get("is_pg")
    d = derive(
        replace(
            o,
            fn=lambda lp, lp_old, A: where(
                exp(lp - lp_old) > 7, A * lp, o.fn(lp, lp_old, A)
            ),
        )
    )
    assert not d.ok and any("r > 7" in step and "MISMATCH" in step for step in d.steps)


def test_derive_takes_numbers_for_hyperparameters():
    assert any("r > 3/2" in step for step in derive("dapo", eps_high=0.5).steps)
    assert not any("r > c" in step for step in derive("dapo", c=None).steps)
    with pytest.raises(upref.InputError, match="eps_high"):
        derive("up_dapo", eps_high=0.28)


@pytest.mark.parametrize("name", ["grpo", "up_grpo", "reinforce_pp_baseline"])
def test_sympy_gradient_has_the_kl_term(name):
    o = upref.get(name)
    b = batch(o, edges=OFF_EDGES, thin=15)
    b = replace(b, logp_ref=torch.where(b.mask, b.logp_old - 0.1, 0))
    kl = torch.tensor(sympy_gradient(o, b, beta=0.5))
    assert (kl - autograd_gradient(lambda x: o(x, beta=0.5), b)).abs().max() < 1e-12
    assert (kl - o.gradient(b)).abs().max() > 1e-6


def test_sympy_gradient_says_what_it_cannot_read():
    o = upref.get("m2po")
    with pytest.raises(upref.InputError, match="sorts the tokens"):
        sympy_gradient(o, batch(o))


def test_importing_upref_leaves_sympy_alone():
    """But for checkpoint of torch 2.4, which imports it."""
    code = (
        "import sys, torch.utils.checkpoint; by_torch = 'sympy.core' in sys.modules; "
        "import upref; upref.get('up_dapo').weight(1.5, -1.0); "
        "sys.exit('sympy.core' in sys.modules and not by_torch)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=ENV, cwd=DERIVATIONS.parent
        ).returncode
        == 0
    )
