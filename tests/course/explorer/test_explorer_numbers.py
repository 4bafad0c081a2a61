# SPDX-License-Identifier: Apache-2.0
"""The explorer's numbers, computed by V8, are numpy's: weight and Cap of every
objective, on 10,000 points each.
"""

import json

import numpy as np
import pytest

from tests.support.daily import daily
from upref.registry import get, names
from upref.weights.capacity import capacity
from upref.weights.curve import make_curve
from upref_course.explorer.formulas import formulas

POINTS, SETTINGS = 10_000, 4  # the default hyperparameters, and three drawn
READ = [n for n in names() if not get(n).not_symbolic]  # by sympy
# what the page draws
DRAWN = [*READ, *(f"up({n})" for n in READ if not n.startswith("up_"))]
ASK = """(() => {{ const w = weigher({name}, {hp}), known = new Map(), reads = OBJECTIVES[{name}].readsMu;
return {points}.map(([p, m, A, r]) => {{
  const key = `${{A}},${{reads ? m : 0}}`;
  if (!known.has(key)) known.set(key, ends(w, A, m, reads));
  return [w(r, A, m), goal(known.get(key), p, m, A).cap];
}}); }})()"""


def settings(name: str, rng) -> list[dict]:
    """Return SETTINGS dicts of hyperparameters of an objective: none, then random ones."""

    def draw(k, of):
        """Draw a hyperparameter; `c` is off three times in ten."""
        return (
            None
            if k == "c" and rng.random() < 0.3
            else float(rng.uniform(of["low"], of["high"]))
        )

    return [
        {},
        *(
            {k: draw(k, of) for k, of in formulas()[name]["hp"].items()}
            for _ in range(SETTINGS - 1)
        ),
    ]


def points(name: str, hp: dict, rng, n: int):
    """Return p, mu and A of n tokens, and which of them lie on a bound to the last bit.

    Tokens are anywhere in the square and near the diagonal, with a probability down to
    1e-8; every fifth is on the first bound or just beside it.
    """
    mu = np.where(
        rng.random(n) < 0.5,
        (rng.integers(0, 40, n) + 0.5) / 40,
        10.0 ** rng.integers(-8, 0, n),
    )
    p = np.where(
        rng.random(n) < 0.5,
        rng.random(n),
        np.minimum(mu * np.exp(rng.normal(0, 0.4, n)), 1),
    )
    A = rng.choice([1.0, -1.0, 1.7, -0.6, 0.0], n)
    A[::5] = rng.choice([1.0, -1.0], n // 5)  # a bound times 1 is the bound
    ends, _ = make_curve(name, **hp).ends(A[::5], mu[::5])
    first = np.c_[ends, np.full(len(ends), np.inf)][:, 0]
    beside, has = rng.choice([0.0, 1e-9, -1e-9], n // 5), first * mu[::5] < 0.999
    p[::5] = np.where(has, np.where(has, first, 1) * mu[::5] * (1 + beside), p[::5])
    on = np.zeros(n, dtype=bool)
    on[::5] = has & (beside == 0)
    return p, mu, A, on


@pytest.mark.parametrize("name", daily(DRAWN, 3))
def test_weight_and_cap_are_numpys(js, name):
    """On a bound itself only Cap is held: there rounding decides what the weight of r =
    p/mu is.
    """
    rng = np.random.default_rng(DRAWN.index(name))
    for hp in settings(name, rng):
        p, mu, A, on = points(name, hp, rng, POINTS // SETTINGS)
        table = json.dumps(np.transpose([p, mu, A, p / mu]).tolist())
        w, cap = np.transpose(
            js(ASK.format(name=json.dumps(name), hp=json.dumps(hp), points=table))
        )
        close = {"rtol": 1e-9, "atol": 1e-12, "err_msg": f"{name} {hp}"}
        np.testing.assert_allclose(
            w[~on], make_curve(name, **hp)(p / mu, A, mu)[~on], **close
        )
        np.testing.assert_allclose(
            cap,
            capacity(name, p, mu, A, **hp),
            rtol=0,
            atol=1e-9,
            err_msg=f"{name} {hp}",
        )


@pytest.mark.parametrize("axis", ["linear", "log"])
def test_the_map_is_made_of_the_same_caps(js, axis):
    """A cell of the map is the capacity that numpy computes; it is below 0 where that
    is 0.
    """
    n, x = 60, (np.arange(60) + 0.5) / 60
    x = x if axis == "linear" else 10 ** (4 * (x - 1))
    mu, p = np.meshgrid(x, x)
    for name, A in (
        ("dapo", 1),
        ("dapo", -1),
        ("dppo_kl", 1),
        ("bandpo_chi2", -1),
        ("up(sapo)", 1),
        ("dapo", 0),
    ):
        cells = np.reshape(
            js(
                f"Array.from(capSquare({json.dumps(name)}, {{}}, {A}, {n}, AXES.{axis}))"
            ),
            (n, n),
        )
        expected = capacity(name, p, mu, A)
        np.testing.assert_array_equal(cells < 0, expected == 0)
        np.testing.assert_allclose(np.maximum(cells, 0), expected, atol=1e-6)  # float32


@pytest.mark.parametrize(
    "name", ["dapo", "sapo", "is_pg", "dppo_kl", "gspo", "up(bandpo_tv)", "aspo"]
)
def test_the_curves_are_made_of_the_same_weights(js, name):
    """Beyond r = 1/mu, too, where the objective does not read mu; with both sides of
    every end.
    """
    reach, mu = js(f"halfWidth({json.dumps(name)}, {{}}, 0.4)"), 0.4
    for A in (1.0, -1.0):
        r, w = np.transpose(
            js(f"weightLine({json.dumps(name)}, {{}}, {A}, {mu}, {reach})")
        )
        np.testing.assert_allclose(w, make_curve(name)(r, A, mu), rtol=1e-9, atol=1e-12)
        ends = make_curve(name).ends(A, mu)[0][0]
        for end in ends[abs(np.log(ends)) < reach]:
            assert (
                (w[(r < end * (1 + 1e-10)) & (r > end * (1 - 2e-9))] != 0)
                != (w[(r > end) & (r < end * (1 + 2e-9))] != 0)
            ).all()
    assert (reach < 0.01) == (name == "gspo")


def test_every_objective_that_sympy_reads_is_there(js):
    left_out = js("LEFT_OUT")
    assert js("Object.keys(OBJECTIVES)") == list(formulas()) == DRAWN
    assert set(left_out) == {n for n in names() if get(n).not_symbolic}
    assert all(left_out.values())
