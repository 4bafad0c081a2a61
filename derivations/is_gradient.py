# SPDX-License-Identifier: Apache-2.0
"""Eqs. 7-8: the importance-sampling gradient, and when it is the on-policy one.

Claim. ∇(A r) = A r ∇log π (Eq. 8). For one step, its mean under any π_old that gives every arm a probability
above 0 is *exactly* ∇E_{π_θ}[A]: the factor r, which the paper calls the mathematical flaw, is what makes IS unbiased.
The mean of A ∇log π under π_old (Eq. 13, UP) is off by Σ_a (π_old - π)(a) A_a ∇log π(a),
which is 0 for every A only at π = π_old.

What r costs may be variance, but need not: the second moment of one term is Σ_a π²/π_old A² s², on policy it is
Σ_a π A² s². It grows without bound where π_old -> 0, and is smaller than on policy where π_old ∝ π |A s|.

For two steps the token ratio is biased off-policy, in the first token (its future is still π_old's) as in the second
(its past is). Prefix products r_1 ... r_t mend the second only; the whole product r_1 r_2 is exact.
The two tokens are 0 or 1: the first has π(1) = p and π_old(1) = q, the second, after a first one a, π(1|a) = p_a and
π_old(1|a) = q_a. R_ab is the return of the response ab.
"""

from itertools import product

from sympy import Rational, cancel, exp, factor, limit, log, oo, simplify, symbols

from upref import get

IS, UP = get("is_pg").fn, get("up_grpo").fn
ARMS = symbols("x1:4 mu1:4 A1:4", positive=True)
X, MU, ADV = ARMS[:3], ARMS[3:6], ARMS[6:]
PI = [k / sum(X) for k in X]  # x = e^z
# ∂log π(a)/∂z_1; the other logits follow by symmetry
SCORE = [log(p).diff(X[0]) * X[0] for p in PI]
lp, lp_old = symbols("lp lp_old", real=True)


def weights(fn):
    """Return dJ/dlp of the function that trains, at each arm."""
    at = zip(PI, MU, ADV, strict=True)
    return [
        fn(lp, lp_old, a).diff(lp).subs({lp: log(p), lp_old: log(m)}) for p, m, a in at
    ]


def one_step(fn):
    """Return E_old[w ∇log π] - ∇E_π[A], its part in z_1; w = A r for importance
    sampling, A for UP.
    """
    target = sum(p * a for p, a in zip(PI, ADV, strict=True)).diff(X[0]) * X[0]
    return simplify(
        sum(m * w * s for m, w, s in zip(MU, weights(fn), SCORE, strict=True)) - target
    )


def second_moment(fn):
    """Return E_old[(w ∂log π/∂z_1)²]."""
    return sum(m * (w * s) ** 2 for m, w, s in zip(MU, weights(fn), SCORE, strict=True))


def bern(k, p):
    """Return the probability of a token k, 0 or 1, where 1 has the probability p."""
    return p if k else 1 - p


def two_steps(weights):
    """Return the bias of the gradient of two binary tokens, in π(1) and in π(1|1).

    Args:
        weights: the ratios r1, r2 of the tokens -> the weights of their scores.
    """
    p, p0, p1, q, q0, q1 = symbols("p p0 p1 q q0 q1", positive=True)
    R = dict(zip(product((0, 1), repeat=2), symbols("R00 R01 R10 R11"), strict=True))
    bias = [0, 0]
    for (a, b), reward in R.items():
        first, second = bern(a, p), bern(b, p1 if a else p0)
        first_old, second_old = bern(a, q), bern(b, q1 if a else q0)
        w1, w2 = weights(first / first_old, second / second_old)
        for i, theta in enumerate((p, p1)):
            score = w1 * log(first).diff(theta) + w2 * log(second).diff(theta)
            bias[i] += reward * (
                first_old * second_old * score - (first * second).diff(theta)
            )
    return [factor(cancel(x)) for x in bias]


def main(base=IS, up=UP):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    A = ADV[0]
    print(
        "∂/∂lp of Eq. 7 =",
        base(lp, lp_old, A).diff(lp),
        "  of UP, A > 0:",
        up(lp, lp_old, A).diff(lp),
    )
    assert (
        base(lp, lp_old, A).diff(lp) == A * exp(lp - lp_old)
        and up(lp, lp_old, A).diff(lp) == A
    )

    print(
        f"one step: E_old[A r ∇log π] - ∇E_π[A] = {one_step(base)} for every π_old > 0"
    )
    bias = one_step(up)
    apart = simplify(
        bias
        - sum((m - p) * a * s for m, p, a, s in zip(MU, PI, ADV, SCORE, strict=True))
    )
    print(
        "          E_old[A ∇log π] - ∇E_π[A] - Σ_a (π_old - π)(a) A_a ∇log π(a) =",
        apart,
    )
    assert one_step(base) == 0 == apart

    excess = simplify(
        second_moment(base)
        - sum(
            p**2 / m * (a * s) ** 2
            for p, m, a, s in zip(PI, MU, ADV, SCORE, strict=True)
        )
    )
    print("          E_old[(A r s)²] - Σ_a π²/π_old A² s² =", excess)
    third = dict.fromkeys(X, 1) | dict(zip(ADV, (1, 0, 0), strict=True))
    moment, policy = (
        second_moment(base).subs(third),
        second_moment(base).subs(dict(zip(MU, PI, strict=True))).subs(third),
    )
    rare, good = moment.subs(MU[0], Rational(1, 100)), moment.subs(MU[0], 1)
    print(
        f"          at uniform π, A = (1, 0, 0): {policy} on policy, {rare} at π_old(1) = 1/100, {good} at π_old(1) = 1"
    )
    assert excess == 0 and rare > policy > good and limit(moment, MU[0], 0, "+") == oo

    # of the function, at that ratio
    w = lambda r: base(lp, lp_old, 1).diff(lp).subs({lp: log(r), lp_old: 0})
    token, prefix = (
        two_steps(lambda r1, r2: (w(r1), w(r2))),
        two_steps(lambda r1, r2: (w(r1), w(r1 * r2))),
    )
    whole = two_steps(lambda r1, r2: (w(r1 * r2), w(r1 * r2)))
    print("two steps, bias in π(1) and in π(1|1)")
    print("  token ratios r_t:     ", token)
    print("  prefix products:      ", prefix)
    print("  the whole product:    ", whole)
    assert 0 not in token and prefix[0] != 0 and prefix[1] == 0 and whole == [0, 0]


if __name__ == "__main__":
    main()
