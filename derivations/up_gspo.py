# SPDX-License-Identifier: Apache-2.0
"""Eqs. A4-A6: the gradient of UP-GSPO for A > 0, at a symbolic length T.

Claim. d/dπ (π / sg π)^(1/T) = (1/T) π^(-1/T + 1/T - 1) = 1/(T π): the exponents of App. C cancel. With
log π(o) = Σ_t log π(o_t) each token's weight is A/T, for the anchored as for the log form.

Of the remark that 1/|o| "preserves the variance-reducing properties" this proves nothing. An average over the tokens of
a response has less variance here as in GSPO (tests/claims/test_up.py). In GSPO 1/|o| also tames
the ratio. UP-GSPO has no ratio where A > 0: there it is UP-GRPO without its KL term, token for token.
"""

from sympy import IndexedBase, Rational, Sum, Symbol, powsimp, symbols

from upref import get
from upref.symbolic import StopGradient, forget_sg

A = Symbol("A", positive=True)
T, t, k = symbols("T t k", integer=True, positive=True)
token = IndexedBase("lp")
LOG, ANCHORED, GRPO = get("up_gspo"), get("up_gspo_anchored"), get("up_grpo")
SUM = Sum(token[t], (t, 1, T))
# what each level passes to J as log π
AT_LEVEL = {"token": token[k], "sequence_mean": SUM / T, "sequence_product": SUM}


def main(exponent=-1, anchored=ANCHORED, log_form=LOG, of_tokens=GRPO):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    x = Symbol("pi", positive=True)
    powers = powsimp(forget_sg(((x / StopGradient(x)) ** (1 / T)).diff(x)))
    print("d/dπ (π/sg π)^(1/T) =", powers)
    assert powers == x**exponent / T

    for o in (anchored, log_form):
        assert o.agg == "seq-mean"  # J is of a response: no further 1/|o|
        J = o.fn(AT_LEVEL[o.level], 0, A, eps_low=Rational(3, 10000))
        gradient = forget_sg(J.diff(token[k])).doit().subs(T >= k, True)
        print(f"{o.name}:  J = {J},  dJ/dlp_k = {gradient}")
        assert gradient == A / T

    assert of_tokens.agg == "seq-mean-token-mean"  # Eq. 15's 1/|o|
    J = of_tokens.fn(AT_LEVEL[of_tokens.level], 0, A)
    grpo = J.diff(token[k]).doit().subs(T >= k, True) / T
    print("up_grpo, with the 1/|o| of Eq. 15:", grpo)
    assert grpo == gradient


if __name__ == "__main__":
    main()
