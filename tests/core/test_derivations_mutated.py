# SPDX-License-Identifier: Apache-2.0
"""Each derivation rejects exactly those mutants of its objectives that its claim
excludes.

An objective is changed in twenty ways. A claim speaks of some signs of A, some ratios,
and of the gradient or of J too: SCOPE. Whether a mutant differs there is asked of
torch, on a grid; whether the script fails, of sympy.

`python tests/core/test_derivations_mutated.py` runs them all and writes
derivations/mutants.txt, the table on the page of the derivations.
"""

import contextlib
import functools
import importlib.util
import io
import itertools
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

import upref
from upref.ops import exp, where

FOLDER = Path(__file__).parents[2] / "derivations"
RECORD = FOLDER / "mutants.txt"
spec = importlib.util.spec_from_file_location("make_page", FOLDER / "make_page.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)

SIGNS = {"+": 1.0, "-": -1.0}
BETWEEN = [(0.0, 0.5), (0.5, 0.8), (0.8, 1.0), (1.0, 1.2), (1.2, 2.0), (2.0, inf)]
# one between every two of these and all bounds
RATIOS = [0.3, 0.65, 0.9, 0.9999, 1.0002, 1.1, 1.24, 1.5, 2.5, 6.0]


def changed(sign, low=0.0, high=inf, to=lambda lp, lp_old, A, J: 0 * lp):
    """Return a change of a function: its J is to(lp, lp_old, A, J), 0 by default, for
    this sign of A and low < r < high.
    """

    def mutate(fn):
        """Return the function with J changed."""

        @functools.wraps(fn)
        def mutant(lp, lp_old, A, *more, **hp):
            """Return J, changed where A has the sign and the ratio lies between low and
            high.
            """
            J, d = (
                fn(lp, lp_old, A, *more, **hp),
                lp - (0 * lp if lp_old is None else lp_old),
            )
            J2 = (
                where(A > 0, to(lp, lp_old, A, J), J)
                if sign == "+"
                else where(A < 0, to(lp, lp_old, A, J), J)
            )
            J2 = where(exp(d) > low, J2, J) if low else J2
            return where(exp(d) < high, J2, J) if high < inf else J2

        return mutant

    return mutate


EVERYWHERE = {
    "twice": lambda lp, lp_old, A, J: 2 * J,
    "half": lambda lp, lp_old, A, J: J / 2,
    "A r": lambda lp, lp_old, A, J: (
        A * exp(lp - (0 * lp if lp_old is None else lp_old))
    ),
    "A log π": lambda lp, lp_old, A, J: A * lp,
}
MUTANTS = {
    f"A {s} dead in {a:g} < r < {b:g}": changed(s, a, b)
    for s in SIGNS
    for a, b in BETWEEN
} | {
    f"A {s} {name}": changed(s, to=to) for s in SIGNS for name, to in EVERYWHERE.items()
}
PAIRS = ("grpo", "up_grpo", "dapo", "up_dapo", "gspo", "up_gspo")
# what a claim speaks of: objective -> signs, with the largest r of each; "J": of the
# value too, where r has no limit; hyperparameters
SCOPE = {
    "log_derivative": ({"reinforce": {"+": inf, "-": inf}}, "J", {}),
    "is_gradient": ({"is_pg": {"+": inf}, "up_grpo": {"+": inf}}, "", {}),
    "clipped_gradient": ({"grpo": {"+": inf}}, "J", {}),
    "cap_positive": ({"dapo": {"+": inf}, "up_dapo": {"+": inf}}, "", {}),
    "up_positive": ({"up_grpo": {"+": inf}, "up_grpo_anchored": {"+": inf}}, "J", {}),
    "up_gspo": (
        {"up_gspo": {"+": inf}, "up_gspo_anchored": {"+": inf}, "up_grpo": {"+": inf}},
        "",
        {},
    ),
    "cap_negative": ({"up_dapo": {"-": inf}}, "J", {"c": 3.0}),
    "eps_high_inert": ({name: {"-": inf} for name in PAIRS}, "J", {"c": 4.0}),
    "up_is_base_on_policy": ({name: {"+": inf, "-": inf} for name in PAIRS}, "", {}),
    "stability": (
        {
            "up_dapo": {"+": inf},
            "dapo_no_upper_clip": {"+": inf},
            "reinforce_off_policy": {"-": inf},
        },
        "J",
        {},
    ),
    "fixed_point": ({"up_grpo": {"+": inf}, "is_pg": {"+": inf}}, "J", {}),
}
NO_SCOPE = {
    "kl_estimators": "of KL terms: tests/core/test_derivations.py",
    "capacity_is_not_a_bound": "one run of small steps, and not a statement about a weight",
    "pass_rate": "of advantages: tests/core/test_derivations.py",
    "weights": "of every objective: tests/core/test_derivations.py",
}


def at(fn, A, hp):
    """Return J and dJ/dlp of tokens at RATIOS, with π_old = e^-8."""
    lp = (torch.tensor(RATIOS, dtype=torch.float64).log() - 8).requires_grad_()
    J = fn(lp, torch.full_like(lp, -8.0), torch.full_like(lp, A), **hp)
    return J.detach(), torch.autograd.grad(J.sum(), lp)[0]


def excluded(script, name, mutate):
    """Return whether the mutant differs from the objective where the script's claim
    speaks of it.
    """
    scope, value, hp = SCOPE[script]
    o = upref.get(name)
    hp = {k: v for k, v in hp.items() if k in o.hyperparameters}
    for sign, most in scope[name].items():
        apart = [
            (x - y).abs() > 1e-9
            for x, y in zip(
                at(o.fn, SIGNS[sign], hp),
                at(mutate(o.fn), SIGNS[sign], hp),
                strict=True,
            )
        ]
        spoken_of = torch.tensor(RATIOS) < most
        if ((apart[1] | apart[0]) if value and most == inf else apart[1])[
            spoken_of
        ].any():
            return True
    return False


def rejected(script, name, mutate):
    """Return whether the script fails with the objective's function changed by
    `mutate`.
    """
    get = upref.get
    mutant = replace(get(name), fn=mutate(get(name).fn))
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(upref, "get", lambda one: mutant if one == name else get(one))
        try:
            page.load(script).main()
        except AssertionError:
            return True
    return False


ROWS = [(script, name) for script, (scope, _, _) in SCOPE.items() for name in scope]


def legend():
    return [f"{chr(97 + i)}  {label}" for i, label in enumerate(MUTANTS)] + [""]


def line(script, name, judge):
    """Return the row of the record: a letter for each mutant that this judge,
    `rejected` or `excluded`, selects, and a dot for each other.
    """
    verdicts = "".join(
        chr(97 + i) if judge(script, name, m) else "."
        for i, m in enumerate(MUTANTS.values())
    )
    return f"{script:22}{name:22}{verdicts}"


FEW = [  # one that the claim excludes, then one that it does not
    ("cap_positive", "up_dapo", "A + dead in 0 < r < 0.5"),
    ("cap_positive", "up_dapo", "A + dead in 1.2 < r < 2"),
    ("cap_positive", "up_dapo", "A + A r"),
    ("cap_positive", "dapo", "A + half"),
    ("cap_positive", "dapo", "A - A r"),
    ("up_is_base_on_policy", "up_dapo", "A + dead in 1.2 < r < 2"),
    ("up_is_base_on_policy", "dapo", "A - half"),
    ("stability", "up_dapo", "A - dead in 1.2 < r < 2"),
    ("cap_negative", "up_dapo", "A - dead in 1 < r < 1.2"),
    ("cap_negative", "up_dapo", "A + A r"),
]


@pytest.mark.parametrize(("script", "name", "mutant"), FEW)
def test_a_derivation_rejects_what_its_claim_excludes(script, name, mutant):
    assert rejected(script, name, MUTANTS[mutant]) == excluded(
        script, name, MUTANTS[mutant]
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("script", "name"), ROWS)
def test_a_derivation_rejects_exactly_what_its_claim_excludes(script, name):
    assert line(script, name, rejected) == line(script, name, excluded)


def test_the_recorded_table_is_what_the_claims_exclude():
    assert RECORD.read_text().splitlines() == legend() + [
        line(*row, excluded) for row in ROWS
    ]


def test_there_are_twenty_mutants_and_every_script_has_a_scope():
    assert len(MUTANTS) == 20
    assert {*SCOPE, *NO_SCOPE} == set(page.CLAIMS)
    some = {m for _, _, m in FEW}
    assert some <= set(MUTANTS)
    for script, (scope, _, _) in SCOPE.items():
        every = [excluded(script, name, m) for name in scope for m in MUTANTS.values()]
        assert any(every) and not all(every), script


if __name__ == "__main__":
    with RECORD.open("w") as out:
        for text in itertools.chain(legend(), (line(*row, rejected) for row in ROWS)):
            print(text, file=out, flush=True)
