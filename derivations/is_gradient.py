# SPDX-License-Identifier: Apache-2.0
"""Eqs. 7-8: the importance-sampling gradient, and when it is the on-policy one.

Claim. ∇(A r) = A r ∇log π (Eq. 8). For one step, its mean under any π_old is *exactly* ∇E_{π_θ}[A]: the factor r, which
the paper calls the mathematical flaw, is what makes IS unbiased. The mean of A ∇log π under π_old (Eq. 13, UP) is not.
What r costs is variance.

For two steps the token ratio is biased off-policy, in the first token (its future is still π_old's) as in the second
(its past is). Prefix products r_1 ... r_t mend the second only; the whole product r_1 r_2 is exact.
"""

from itertools import product

from sympy import Rational, cancel, factor, log, simplify, symbols

from upref import get

J = get("is_pg").fn
UP = get("up_grpo").fn
ARMS = symbols("x1:4 mu1:4 A1:4", positive=True)


def one_step(r_power):
    """E_old[A r^power ∇log π] - ∇E_π[A] in the first logit of three, x = e^z."""
    x, mu, A = ARMS[:3], ARMS[3:6], ARMS[6:]
    pi = [k / sum(x) for k in x]
    target = sum(p * a for p, a in zip(pi, A, strict=True)).diff(x[0]) * x[0]
    estimate = sum(m * a * (p / m) ** r_power * log(p).diff(x[0]) * x[0] for p, m, a in zip(pi, mu, A, strict=True))
    return simplify(estimate - target)


def bern(k, p):
    return p if k else 1 - p


def two_steps(weights):
    """The same for two binary tokens, in π(1) and π(1|1); weights(r1, r2) are those of either token's score."""
    p, p0, p1, q, q0, q1 = symbols("p p0 p1 q q0 q1", positive=True)
    R = dict(zip(product((0, 1), repeat=2), symbols("R00 R01 R10 R11"), strict=True))
    bias = [0, 0]
    for (a, b), reward in R.items():
        first, second = bern(a, p), bern(b, p1 if a else p0)
        first_old, second_old = bern(a, q), bern(b, q1 if a else q0)
        w1, w2 = weights(first / first_old, second / second_old)
        for i, theta in enumerate((p, p1)):
            score = w1 * log(first).diff(theta) + w2 * log(second).diff(theta)
            bias[i] += reward * (first_old * second_old * score - (first * second).diff(theta))
    return [factor(cancel(x)) for x in bias]


def main(power=1):
    lp, lp_old, A = symbols("lp lp_old A", positive=True)
    print("∂/∂lp of Eq. 7 =", J(lp, lp_old, A).diff(lp), "  of UP, A > 0:", UP(lp, lp_old, A).diff(lp))
    assert J(lp, lp_old, A).diff(lp) == get("is_pg").closed_form(J(lp, lp_old, 1), A)

    print(f"one step: E_old[A r ∇log π] - ∇E_π[A] = {one_step(power)} for every π_old")
    bias = one_step(0)
    at = dict(zip(ARMS, (1, 1, 2, *[Rational(1, 3)] * 3, 1, 0, 0), strict=True))
    print("          E_old[A ∇log π] - ∇E_π[A] =", bias.subs(at), "at π = (1, 1, 2)/4, π_old uniform, A = (1, 0, 0)")
    assert one_step(power) == 0 and bias.subs(at) != 0

    token, prefix = two_steps(lambda r1, r2: (r1, r2)), two_steps(lambda r1, r2: (r1, r1 * r2))
    whole = two_steps(lambda r1, r2: (r1 * r2, r1 * r2))
    print("two steps, bias in π(1) and in π(1|1)")
    print("  token ratios r_t:     ", token)
    print("  prefix products:      ", prefix)
    print("  the whole product:    ", whole)
    assert 0 not in token and prefix[0] != 0 and prefix[1] == 0 and whole == [0, 0]


if __name__ == "__main__":
    main()
