# SPDX-License-Identifier: Apache-2.0
"""Eqs. A1-A3: gradient window and Probability Capacity for A < 0, lower clip and dual clip.

Claim. With dual clip J is max(min(r A, clip(r) A), c A). Its weight is A r in 1-ε_low <= r <= c and 0 outside, so
Cap = p - (1-ε_low) mu inside and 0 outside. The Cap rises to (c-1+ε_low) mu at the dual clip and drops to 0 there;
over the unit square its supremum is 1 - (1-ε_low)/c.

Not so of a token: that beyond c the gradient vanishes "to prevent the policy from moving further away". Just below c
the weight is negative: an update *lowers* p, back towards π_old. The dual clip bounds the loss; it leaves an
over-probable wrong token without correction. For the policy as a whole the sentence holds where one step is
so large that it overshoots π_old by far (tests/claims/test_up.py). And A = 0 has no gradient anywhere, hence no Cap
("A <= 0").
"""

from sympy import Rational, Symbol, exp, simplify, symbols

from upref import get
from upref.symbolic import pieces

A = Symbol("A", negative=True)
r, p, mu, eps_low, c, step = symbols("r p mu eps_low c step", positive=True)
lp, lp_old = symbols("lp lp_old", real=True)
UP = get("up_dapo")
AT = {eps_low: Rational(1, 5), c: 3, A: -1}


def main(base=UP, direction=-1):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    J = base.fn(lp, lp_old, A, eps_low=eps_low, c=c)
    window = []
    for low, high, [found] in pieces([J], lp, lp_old, r, AT):
        print(f"{low} < r < {high}:  J = {found[0]}   dJ/dlp = {found[1]}")
        if high.subs(AT) <= Rational(4, 5):
            claimed = ((1 - eps_low) * A, 0)
        elif low.subs(AT) >= 3:
            claimed = (c * A, 0)
        else:
            claimed = (A * exp(lp - lp_old), A * r)
            window.append((low, high, found[1]))
        assert all(simplify(x - y) == 0 for x, y in zip(found, claimed, strict=True)), (
            f"{low} < r < {high}: {found}"
        )
    lower, upper, weight = window[0][0], window[-1][1], window[-1][2]
    assert (lower, upper) == (1 - eps_low, c)

    cap = p - lower * mu
    print(
        "Cap inside the window:",
        cap,
        "  just below c:",
        cap.subs(p, upper * mu).factor(mu),
    )
    change = step * weight.subs(r, upper)  # gradient ascent moves lp by step x weight
    print("ascent just below c moves lp by", change, "< 0: towards π_old, as log c > 0")
    assert change.is_negative == (direction < 0)

    on_edge = cap.subs(p, upper * mu)  # grows with mu until p = c mu = 1
    top = simplify(on_edge.subs(mu, 1 / upper))
    print(
        "supremum over the unit square:",
        top,
        "at mu = 1/c, p = 1;  beyond, Cap(p = 1) =",
        cap.subs(p, 1),
        "falls",
    )
    assert (
        simplify(on_edge.diff(mu)) == c - 1 + eps_low
        and cap.subs(p, 1).diff(mu) == eps_low - 1
    )
    assert simplify(top - (1 - (1 - eps_low) / c)) == 0


if __name__ == "__main__":
    main()
