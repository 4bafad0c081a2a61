# SPDX-License-Identifier: Apache-2.0
"""Eqs. 14-16 at θ = θ_old: UP's gradient is its base's.

Claim. At r = 1 (s = 1) both weights are A, for either sign; level, aggregation and the KL term are common. So strictly
on-policy, and in the first mini-batch of every rollout, UP changes nothing: all of its effect is off-policy drift.

Not said in the paper. Off-policy, A > 0, UP weighs 1 where the base weighs r: less than the base for 1 < r <= 1+ε_high,
more for r < 1, and above 1+ε_high it alone is alive. "Substantially amplifies" holds for the last two only.
"""

from sympy import Rational, Symbol, log, simplify, symbols

from upref import get, up
from upref.symbolic import in_regime

lp, lp_old = symbols("lp lp_old", real=True)
A = Symbol("A", real=True, nonzero=True)
r = Symbol("r", positive=True)


def weight(o, sign, at_r):
    """dJ/dlp from the function that trains, in the regime of r = at_r, as an expression in r."""
    J = in_regime(o.fn(lp, lp_old, A), {A: sign, lp: log(at_r), lp_old: 0})
    return simplify(J.diff(lp).subs(lp, lp_old + log(r)))


def main(ratio=1):
    for name in ("grpo", "dapo", "gspo"):
        base = get(name)
        for variant in (get(f"up_{name}"), up(base)):
            here = [weight(o, sign, ratio).subs(r, ratio) for sign in (1, -1) for o in (base, variant)]
            print(f"r = {ratio}:  {name}, {variant.name}: A > 0 {here[:2]}, A < 0 {here[2:]}")
            assert here == [A] * 4
            assert (base.level, base.agg, base.kl) == (variant.level, variant.agg, variant.kl)

    inside, beyond = 1 + Rational(1, 10000), 2
    for at_r, apart in ((Rational(1, 2), A * (1 - r)), (inside, A * (1 - r)), (beyond, A)):
        for name in ("grpo", "dapo", "gspo"):
            gain = simplify(weight(get(f"up_{name}"), 1, at_r) - weight(get(name), 1, at_r))
            assert simplify(gain - apart) == 0
        print(f"A > 0, r = {at_r}: UP minus base = {apart} for all three")


if __name__ == "__main__":
    main()
