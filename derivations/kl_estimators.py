# SPDX-License-Identifier: Apache-2.0
"""Eqs. 4, 15: "D_KL(π_θ ‖ π_ref)" by samples of π_θ: three estimators, three gradients.

Claim. As values, k1 and k3 are unbiased for KL(π ‖ ref), k2 is not. As losses, that is with the samples held fixed,
the expected gradient of k1 is 0, of k2 it is ∇KL(π ‖ ref), of k3 it is ∇KL(ref ‖ π): another divergence.

The paper names no estimator. All of this is on-policy; with samples of another policy none of the three gradients is
the claimed one. Shown by enumerating a three-armed softmax, x = e^z, against an arbitrary reference y: one token, after
a given prefix. For responses of several tokens only the values add up, and not the gradients (upref/kl.py).
"""

from sympy import log, simplify, symbols

from upref.kl import ESTIMATORS

x, y = symbols("x1:4", positive=True), symbols("y1:4", positive=True)
pi, ref = [k / sum(x) for k in x], [k / sum(y) for k in y]
lp, lp_ref = [log(k) - log(sum(x)) for k in x], [log(k) - log(sum(y)) for k in y]


def grad(f):
    """Return ∂f/∂z of each logit: z = log x, so ∂/∂z = x ∂/∂x."""
    return [k * f.diff(k) for k in x]


def mean(values):
    """Return the mean of a value of each arm under π."""
    return sum(p * v for p, v in zip(pi, values, strict=True))


FORWARD = mean([p - q for p, q in zip(lp, lp_ref, strict=True)])  # KL(π ‖ ref)
# KL(ref ‖ π)
REVERSE = sum(m * (q - p) for m, p, q in zip(ref, lp, lp_ref, strict=True))
GRADIENTS = {
    "k1": ("0", [0, 0, 0]),
    "k2": ("∇KL(π ‖ ref)", grad(FORWARD)),
    "k3": ("∇KL(ref ‖ π)", grad(REVERSE)),
}
UNBIASED = {"k1": True, "k2": False, "k3": True}


def main(gradients=GRADIENTS):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    at = dict(zip((*x, *y), (1, 2, 3, 3, 1, 1), strict=True))
    for name, k in ESTIMATORS.items():
        values = [k(p, q) for p, q in zip(lp, lp_ref, strict=True)]
        bias = mean(values) - FORWARD
        exact = simplify(bias) == 0 if UNBIASED[name] else False
        shown = (
            "0"
            if exact
            else f"{float(bias.subs(at)):+.4f} at π = (1,2,3)/6, ref = (3,1,1)/5"
        )
        print(f"{name}:  E[{name}] - KL(π ‖ ref) = {shown}")
        assert exact == UNBIASED[name] and (exact or abs(bias.subs(at)) > 1e-3)

        says, claim = gradients[name]
        slopes = [grad(v) for v in values]
        apart = [simplify(mean([s[i] for s in slopes]) - claim[i]) for i in range(3)]
        stale = [
            float((sum(s[i] for s in slopes) / 3 - claim[i]).subs(at)) for i in range(3)
        ]
        print(
            f"     E[∇{name}] - {says} = {apart};  with uniform samples {[round(v, 3) for v in stale]}"
        )
        assert apart == [0, 0, 0] and max(map(abs, stale)) > 1e-3


if __name__ == "__main__":
    main()
