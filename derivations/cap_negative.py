# SPDX-License-Identifier: Apache-2.0
"""Eqs. A1-A3: gradient window and Probability Capacity for A < 0, lower clip and dual clip.

Claim. With dual clip J is max(min(r A, clip(r) A), c A). Its weight is A r in 1-ε_low <= r <= c and 0 outside, so
Cap = p - (1-ε_low) mu inside and 0 outside. The Cap rises to (c-1+ε_low) mu at the dual clip and drops to 0 there;
over the unit square its supremum is 1 - (1-ε_low)/c.

Not true as written: that beyond c the gradient vanishes "to prevent the policy from moving further away". Just below c
the weight is negative: an update *lowers* p, back towards π_old. The dual clip bounds the loss; it leaves an
over-probable wrong token without correction. And A = 0 has no gradient anywhere, hence no Cap ("A <= 0").
"""

from sympy import Rational, Symbol, log, simplify, symbols

from upref import get
from upref.symbolic import in_regime

A = Symbol("A", negative=True)
r, p, mu, eps_low, c = symbols("r p mu eps_low c", positive=True)
lp, lp_old = symbols("lp lp_old", real=True)
UP = get("up_dapo")
AT = {eps_low: Rational(1, 5), c: 3, A: -1}


def main(base=UP, direction=-1):
    J = base.fn(lp, lp_old, A, eps_low=eps_low, c=c)
    alive = []
    regimes = ("r < 1-ε_low", Rational(1, 2), (1 - eps_low) * A), ("inside", 2, A * r), ("r > c", 4, c * A)
    for name, ratio, value in regimes:
        at = AT | {lp: log(ratio), lp_old: 0}
        branch = in_regime(J, at)
        weight = simplify(branch.diff(lp).subs(lp, lp_old + log(r)))
        by_hand = in_regime(base.closed_form(r, A, eps_low=eps_low, c=c), AT | {r: ratio})
        dual = max(min(-ratio, -max(ratio, Rational(4, 5))), -3)  # max(min(r A, clip(r) A), c A) at the numbers of AT
        print(f"{name:12} J = {branch}   dJ/dlp = {weight}")
        assert simplify(branch.subs(lp, lp_old + log(r)) - value) == 0 and weight == by_hand
        assert dual == branch.subs(at)
        alive.append(weight != 0)
    assert alive == [False, True, False]

    cap = p - (1 - eps_low) * mu
    print("Cap inside the window:", cap, "  just below c:", cap.subs(p, c * mu).factor(mu))
    step = Symbol("step", positive=True)
    change = (step * A * r).subs(r, c)  # gradient ascent moves lp by step x weight
    print("ascent just below c moves lp by", change, "< 0: towards π_old, as log c > 0")
    assert change.is_negative == (direction < 0)

    on_edge = cap.subs(p, c * mu)  # grows with mu until p = c mu = 1
    top = simplify(on_edge.subs(mu, 1 / c))
    print("supremum over the unit square:", top, "at mu = 1/c, p = 1;  beyond, Cap(p = 1) =", cap.subs(p, 1), "falls")
    assert simplify(on_edge.diff(mu)) == c - 1 + eps_low and cap.subs(p, 1).diff(mu) == eps_low - 1
    assert simplify(top - (1 - (1 - eps_low) / c)) == 0


if __name__ == "__main__":
    main()
