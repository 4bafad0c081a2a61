# SPDX-License-Identifier: Apache-2.0
"""Eqs. 14-16: ε_high does nothing for A <= 0, so UP has no such hyperparameter.

Claim. For A < 0, min(r A, clip(r) A) = A max(r, clip(r)), and clip(r) <= r wherever r >= 1-ε_low. Value and gradient
are therefore free of ε_high, dual clip included, as soon as 1+ε_high >= 1-ε_low; and UP's terms are the base's. Proved
in every order of r, 1-ε_low, 1+ε_high and c; for A = 0 both are 0.

Eq. 14 still prints ε_high, Eqs. 15 and 16 a symmetric ε: their upper bound is the inert one. The condition is needed:
below 1-ε_low the upper bound would decide.
"""

from itertools import product

from sympy import Rational, Symbol, log, simplify, symbols

from upref import get
from upref.symbolic import in_regime, pieces

lp, lp_old = symbols("lp lp_old", real=True)
eps_low, c = symbols("eps_low c", positive=True)
eps_high, r = Symbol("eps_high", real=True), Symbol("r", positive=True)
PAIRS = {"dapo": "up_dapo", "gspo": "up_gspo", "grpo": "up_grpo"}
LOW = Rational(1, 5)


def terms(name, A):
    """Return J of the base and of its UP variant; GRPO's one ε is used as both
    bounds.
    """
    both = {
        "dapo": {"eps_low": eps_low, "c": c},
        "gspo": {"eps_low": eps_low},
        "grpo": {"eps": eps_low, "c": c},
    }[name]
    own = {} if name == "grpo" else {"eps_high": eps_high}
    return get(name).fn(lp, lp_old, A, **both, **own), get(PAIRS[name]).fn(
        lp, lp_old, A, **both
    )


def main(smallest=-LOW):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    A = Symbol("A", negative=True)
    highs = [smallest, 0, Rational(28, 100), 3, 10**9]
    for base, variant in PAIRS.items():
        read = set()
        for high, bound in product(highs, (Rational(6, 5), 4)):
            at = {eps_low: LOW, eps_high: high, c: bound, A: -1}
            for low, up_to, [(J, w), (J_up, w_up)] in pieces(
                terms(base, A), lp, lp_old, r, at
            ):
                where = f"{base}, {low} < r < {up_to} at ε_high = {high}"
                assert not J.has(eps_high) and simplify(J - J_up) == 0 == simplify(
                    w - w_up
                ), f"{where}: {J}, {J_up}"
                read.add(str(J))
        print(
            f"{base} = {variant} for A < 0 in every order of the bounds; J there: {', '.join(sorted(read))}"
        )
        point = at | {lp: log(2), lp_old: 0}
        assert {in_regime(f, point) for f in terms(base, 0 * A)} == {0}

    J, _ = terms("dapo", A)
    crossed = {
        lp: log(Rational(7, 10)),
        lp_old: 0,
        eps_low: LOW,
        eps_high: -Rational(2, 5),
        c: 4,
        A: -1,
    }
    print(
        "with 1+ε_high = 0.6 < 0.8 = 1-ε_low, at r = 0.7:",
        in_regime(J, crossed),
        " instead of ",
        end="",
    )
    print(in_regime(J, crossed | {eps_high: LOW}))
    assert in_regime(J, crossed) != in_regime(J, crossed | {eps_high: LOW})


if __name__ == "__main__":
    main()
