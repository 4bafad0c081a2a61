# SPDX-License-Identifier: Apache-2.0
"""Eq. 11: the Probability Capacity for A > 0.

Claim. dJ/dlp of DAPO is alive up to r = 1+ε_high, that is up to p = (1+ε_high) mu, and p <= 1, so
Cap = min(1, (1+ε_high) mu) - p below and 0 above. At mu = 0.01, ε_high = 0.28: gone at 0.0128, 0.0028 from mu. UP's
is A, alive everywhere: Cap = 1 - p.

Only in part as written: the Cap is linear in mu only while (1+ε_high) mu < 1. From mu = 1/1.28 = 0.78 on DAPO never
clips a positive token, and its Cap is UP's.
"""

from sympy import Min, Rational, Symbol, log, symbols

from upref import get
from upref.symbolic import in_regime, kinks

A, r, p, mu = symbols("A r p mu", positive=True)
lp, eps_high = Symbol("lp", real=True), Symbol("eps_high", positive=True)


def ceiling(o, **hp):
    """The largest p at which dJ/dlp of the function that trains, alive at r = 1, is not yet 0."""
    gradient = o.fn(lp, 0, A, eps_low=Rational(1, 5), c=None, **hp).diff(lp).subs(lp, log(r))
    at = {eps_high: Rational(28, 100), A: 1}
    assert in_regime(gradient, at | {r: 1}) != 0
    past = [k for k in kinks(gradient, r) if k.subs(at) > 1 and in_regime(gradient, at | {r: k.subs(at) * 2}) == 0]
    return Min(1, *(mu * k for k in past))


def main(bound=1 + eps_high):
    dapo, up = ceiling(get("dapo"), eps_high=eps_high), ceiling(get("up_dapo"))
    print("largest p with a gradient:  DAPO", dapo, "  UP-DAPO", up)
    assert dapo == Min(1, bound * mu) and up == 1

    rare = {mu: Rational(1, 100), eps_high: Rational(28, 100)}
    print("mu = 0.01, ε_high = 0.28:  gone at", dapo.subs(rare), "=", float(dapo.subs(rare)), end=",  ")
    print("Cap at p = mu is", (dapo - mu).subs(rare), "=", float((dapo - mu).subs(rare)))
    assert dapo.subs(rare) == Rational(128, 10000) and (dapo - mu).subs(rare) == Rational(28, 10000)

    common = {mu: Rational(8, 10), eps_high: Rational(28, 100)}
    print("mu = 0.8:  Cap is", dapo.subs(common) - p, "for DAPO and", up - p, "for UP-DAPO")
    assert dapo.subs(common) == up


if __name__ == "__main__":
    main()
