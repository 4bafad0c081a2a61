# SPDX-License-Identifier: Apache-2.0
"""Eq. 11: the Probability Capacity for A > 0.

Claim. dJ/dlp of DAPO is A r up to r = 1+ε_high, that is up to p = (1+ε_high) mu, and 0 above; p <= 1. So
Cap = min(1, (1+ε_high) mu) - p below and 0 above. At mu = 0.01, ε_high = 0.28: gone at 0.0128, 0.0028 from mu. UP's
dJ/dlp is A at every ratio: Cap = 1 - p.

Holds under a condition: the Cap is linear in mu while (1+ε_high) mu < 1. From mu = 1/1.28 = 0.78 on DAPO never clips a
positive token, and its Cap is UP's.
"""

from sympy import Min, Rational, Symbol, oo, symbols

from upref import get
from upref.symbolic import pieces

A, r, p, mu = symbols("A r p mu", positive=True)
lp, lp_old = symbols("lp lp_old", real=True)
eps_high = Symbol("eps_high", positive=True)
AT = {eps_high: Rational(28, 100), A: 1}


def ceiling(name, weight, bound, **hp):
    """Return the largest p at which the function that trains has a gradient.

    Raises:
        AssertionError: dJ/dlp is not `weight` below the ratio `bound`, or not 0 above.
    """
    J = get(name).fn(lp, lp_old, A, eps_low=Rational(1, 5), c=None, **hp)
    alive = []
    for low, high, [(_, found)] in pieces([J], lp, lp_old, r, AT):
        print(f"{name}: dJ/dlp = {found} for {low} < r < {high}")
        below = bool(high.subs(AT) <= bound.subs(AT))
        assert found == (weight if below else 0), f"{name}, {low} < r < {high}: {found}"
        alive += [high] if below else []
    return Min(1, mu * alive[-1])


def main(bound=1 + eps_high):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    dapo, up = (
        ceiling("dapo", A * r, bound, eps_high=eps_high),
        ceiling("up_dapo", A, oo),
    )
    print("largest p with a gradient:  DAPO", dapo, "  UP-DAPO", up)
    assert dapo == Min(1, bound * mu) and up == 1

    rare = {mu: Rational(1, 100), eps_high: Rational(28, 100)}
    print(
        "mu = 0.01, ε_high = 0.28:  gone at",
        dapo.subs(rare),
        "=",
        float(dapo.subs(rare)),
        end=",  ",
    )
    print(
        "Cap at p = mu is", (dapo - mu).subs(rare), "=", float((dapo - mu).subs(rare))
    )
    assert dapo.subs(rare) == Rational(128, 10000) and (dapo - mu).subs(
        rare
    ) == Rational(28, 10000)

    common = {mu: Rational(8, 10), eps_high: Rational(28, 100)}
    print(
        "mu = 0.8:  Cap is",
        dapo.subs(common) - p,
        "for DAPO and",
        up - p,
        "for UP-DAPO",
    )
    assert dapo.subs(common) == up


if __name__ == "__main__":
    main()
