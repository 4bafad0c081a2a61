# SPDX-License-Identifier: Apache-2.0
"""Eqs. A4-A6: the gradient of UP-GSPO for A > 0, at a symbolic length T.

Claim. d/dπ (π / sg π)^(1/T) = (1/T) π^(-1/T + 1/T - 1) = 1/(T π): the exponents of App. C cancel. With
log π(o) = Σ_t log π(o_t) each token's weight is A/T, for the anchored as for the log form.

Not true as written: that 1/|o| "preserves the variance-reducing properties" of GSPO's. There it tames a ratio; here is
none left, and UP-GSPO, A > 0, is UP-GRPO, A > 0, token for token.
"""

from sympy import IndexedBase, Rational, Sum, Symbol, powsimp, symbols

from upref import get
from upref.symbolic import StopGradient, forget_sg

A = Symbol("A", positive=True)
T, t, k = symbols("T t k", integer=True, positive=True)
LOG, ANCHORED = get("up_gspo"), get("up_gspo_anchored")


def main(exponent=-1, anchored=ANCHORED, log_form=LOG):
    x = Symbol("pi", positive=True)
    powers = powsimp(forget_sg(((x / StopGradient(x)) ** (1 / T)).diff(x)))
    print("d/dπ (π/sg π)^(1/T) =", powers)
    assert powers == x**exponent / T

    token = IndexedBase("lp")
    mean = Sum(token[t], (t, 1, T)) / T
    for o in (anchored, log_form):
        J = o.fn(mean, 0, A, eps_low=Rational(3, 10000))
        gradient = forget_sg(J.diff(token[k])).doit().subs(T >= k, True)
        print(f"{o.name}:  J = {J},  dJ/dlp_k = {gradient}")
        assert gradient == A / T

    grpo = get("up_grpo").fn(token[k], 0, A).diff(token[k]) / T  # Eq. 15's 1/|o|
    print("up_grpo, with the 1/|o| of Eq. 15:", grpo)
    assert grpo == gradient


if __name__ == "__main__":
    main()
