# SPDX-License-Identifier: Apache-2.0
"""Sec. 4.1: what is stable about the positive branch, and why the negative one may not be unbounded.

Claim, in the logits z of a softmax. A log π_a, A > 0, is concave (its Hessian is -A (diag p - p pᵀ)) and <= 0; its
gradient in z_a is A (1 - p) <= A. This says nothing about the parameters. With A < 0 the same term is convex and
unbounded above, and its gradient tends to -|A|, not to 0, as π_a -> 0; UP's own negative branch has weight 0 below
1-ε_low. The importance-sampling weight is A r, up to A/π_old.

Not proved by this, and not true: that instability is "completely eradicated". The gradient is bounded, the drift over
repeated mini-batches is not (fixed_point.py, capacity_is_not_a_bound.py).
"""

from sympy import Matrix, Rational, Symbol, diag, exp, limit, log, oo, simplify, symbols

from upref import get
from upref.symbolic import pieces

z, v = symbols("z1:4", real=True), Matrix(symbols("v1:4", real=True))
A, mu, p = symbols("A mu p", positive=True)
Z = sum(exp(k) for k in z)
UP, SYMMETRIC = get("up_dapo"), get("reinforce_off_policy")
pi, lp = Matrix([exp(k) / Z for k in z]), z[0] - log(Z)
q, old, r = (
    Symbol("lp", real=True),
    Symbol("lp_old", real=True),
    Symbol("r", positive=True),
)


def everywhere(objective, A_t):
    """Return J in the logits, which must be one expression for every r."""
    Js = {
        J for _, _, [(J, _)] in pieces([objective.fn(q, old, A_t)], q, old, r, {A: 1})
    }
    assert len(Js) == 1, Js
    return Js.pop().subs(q, lp)


def main(up=UP, symmetric=SYMMETRIC, sign=-1):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    J, J_neg = everywhere(up, A), everywhere(symmetric, -A)
    V = diag(*pi) - pi * pi.T
    H = Matrix(3, 3, lambda i, j: J.diff(z[i], z[j]))
    print("A > 0: H + A (diag p - p pᵀ) =", simplify(H - sign * A * V).tolist())
    pairs = sum(pi[i] * pi[j] * (v[i] - v[j]) ** 2 for i in range(3) for j in range(i))
    square = simplify((v.T * V * v)[0] - pairs)
    print(
        "vᵀ (diag p - p pᵀ) v - Σ_{i<j} p_i p_j (v_i - v_j)² =",
        square,
        " hence concave",
    )
    assert simplify(H - sign * A * V).is_zero_matrix and square == 0

    slope = simplify(J.diff(z[0]) - A * (1 - pi[0]))
    print("dJ/dz_a - A (1 - p) =", slope, "; J/A = log p <= 0")
    assert slope == 0 and simplify(J - A * log(pi[0])) == 0

    opposite = [simplify(J_neg.diff(a) + J.diff(a)) for a in z]
    print(
        "A < 0, no clip: its gradient and the one above add up to",
        opposite,
        " hence convex",
    )
    assert opposite == [0, 0, 0]
    slope_neg = simplify(J_neg.diff(z[0]) + A * (1 - pi[0]))  # so dJ/dz_a = -A (1 - p)
    rise, pull = (
        limit(symmetric.fn(log(p), None, -A), p, 0, "+"),
        limit(slope_neg - A * (1 - p), p, 0),
    )
    print(f"                as p -> 0: J -> {rise}, dJ/dz_a -> {pull}")
    assert slope_neg == 0 and rise == oo and pull == -A

    low_clip = {"eps_low": Rational(1, 5)}
    for low, high, [(_, weight)] in pieces(
        [up.fn(q, old, -A, **low_clip)], q, old, r, {A: 1}
    ):
        print(f"UP, A < 0, {low} < r < {high}: weight {weight}")
        assert weight == 0 or high > 1 - low_clip["eps_low"]
    unclipped = get("dapo_no_upper_clip").fn(q, old, A, **low_clip)
    for low, high, [(_, weight)] in pieces([unclipped], q, old, r, {A: 1}):
        certain = weight.subs(r, 1 / mu)
        print(
            f"importance sampling, A > 0, {low} < r < {high}: weight {weight}; at p = 1: {certain}"
        )
        assert weight == A * r and limit(certain, mu, 0, "+") == oo


if __name__ == "__main__":
    main()
