# SPDX-License-Identifier: Apache-2.0
"""Eqs. 14-16 at θ = θ_old: UP's gradient is its base's.

Claim. At r = 1 (s = 1) both weights are A, for either sign; level, aggregation and the KL term are common. So strictly
on-policy, and in the first mini-batch of every rollout, UP changes nothing: all of its effect is off-policy drift.

Not said in the paper. Off-policy, A > 0, UP weighs 1 where the base weighs r: less than the base for 1 < r <= 1+ε_high,
more for r < 1, and above 1+ε_high it alone is alive. For A < 0 the two are equal at every ratio.
"""

from sympy import Rational, Symbol, log, simplify, symbols

from upref import get, up
from upref.symbolic import in_regime, pieces

lp, lp_old = symbols("lp lp_old", real=True)
A = Symbol("A", real=True, nonzero=True)
r = Symbol("r", positive=True)
# ε_high of each base
HIGH = {"grpo": Rational(1, 5), "dapo": Rational(28, 100), "gspo": Rational(4, 10000)}
LOW = {"grpo": Rational(1, 5), "dapo": Rational(1, 5), "gspo": Rational(3, 10000)}


def J(o):
    """Return the function that trains, at the base's bounds as exact numbers."""
    bounds = {"eps": LOW, "eps_low": LOW, "eps_high": HIGH}
    base = o.name.removeprefix("up_")
    return o.fn(
        lp, lp_old, A, **{k: bounds[k][base] for k in o.hyperparameters if k in bounds}
    )


def weight(o, sign, at_r):
    """Return dJ/dlp from the function that trains, in the regime of r = at_r, as an
    expression in r.
    """
    J = in_regime(o.fn(lp, lp_old, A), {A: sign, lp: log(at_r), lp_old: 0})
    return simplify(J.diff(lp).subs(lp, lp_old + log(r)))


def main(ratio=1):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    for name in ("grpo", "dapo", "gspo"):
        base = get(name)
        for variant in (get(f"up_{name}"), up(base)):
            here = [
                weight(o, sign, ratio).subs(r, ratio)
                for sign in (1, -1)
                for o in (base, variant)
            ]
            print(
                f"r = {ratio}:  {name}, {variant.name}: A > 0 {here[:2]}, A < 0 {here[2:]}"
            )
            assert here == [A] * 4
            assert (base.level, base.agg, base.kl) == (
                variant.level,
                variant.agg,
                variant.kl,
            )

    for name, high in HIGH.items():
        base, variant = get(name), get(f"up_{name}")
        for sign in (1, -1):
            for low, up_to, read in pieces(
                [J(base), J(variant)], lp, lp_old, r, {A: sign}
            ):
                gain = simplify(read[1][1] - read[0][1])
                claimed = 0 if sign < 0 else A * (1 - r) if up_to <= 1 + high else A
                print(
                    f"{name}, A {'>' if sign > 0 else '<'} 0, {low} < r < {up_to}: UP minus base = {gain}"
                )
                assert simplify(gain - claimed) == 0


if __name__ == "__main__":
    main()
