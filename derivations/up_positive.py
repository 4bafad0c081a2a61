# SPDX-License-Identifier: Apache-2.0
"""Eqs. 12-13: the self-anchored ratio and the log form have one gradient, not one value nor one Hessian.

Claim. ∇ A π/sg(π) = A ∇log π = ∇ A log π. The values are A and A log π, and the Hessians in any parameters differ by
H(A log π) - H(A π/sg(π)) = -A ∇log π ∇log πᵀ, so losses, line searches and second-order methods can tell them apart.

True on policy only: "equivalent to maximizing the REINFORCE objective (Eq. 1)". Eqs. 12-13 average over π_old, so that
holds for every A at θ = θ_old only (is_gradient.py has the bias, fixed_point.py what is maximized instead).
"""

from sympy import Function, Matrix, Symbol, simplify, symbols

from upref import get
from upref.symbolic import forget_sg

A = Symbol("A", positive=True)
theta = symbols("theta1 theta2", real=True)
lp = Function("lp", real=True)(*theta)
LOG, ANCHORED = get("up_grpo"), get("up_grpo_anchored")


def main(log_form=LOG, anchored=ANCHORED, difference=-1):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    J, J_sg = (
        o.fn(lp, Symbol("lp_old"), A, eps=Symbol("eps"), c=None)
        for o in (log_form, anchored)
    )
    print("values:   ", J, " and ", J_sg, "=", forget_sg(J_sg))
    assert forget_sg(J_sg) == A != J

    gradient = [forget_sg(J_sg.diff(t)) for t in theta]
    print("gradients:", gradient)
    assert gradient == [J.diff(t) for t in theta] == [A * lp.diff(t) for t in theta]

    H, H_sg = (
        Matrix(2, 2, lambda i, j: forget_sg(f.diff(theta[i], theta[j])))  # noqa: B023
        for f in (J, J_sg)
    )
    g = Matrix([lp.diff(t) for t in theta])
    print(
        f"Hessians:  H(log) - H(anchored) = {difference} A ∇lp ∇lpᵀ;  the first entry:",
        (H - H_sg)[0].expand(),
    )
    assert simplify(H - H_sg - difference * A * g * g.T).is_zero_matrix


if __name__ == "__main__":
    main()
