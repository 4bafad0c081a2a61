# SPDX-License-Identifier: Apache-2.0
"""Eqs. 4, 5: which function of the pass rate the advantages of a group maximize.

Claim. Rewards are 0 or 1, right with probability p, responses independent and on policy. In 1/G Σ_i A_i ∇log π(o_i)
a right response has the mean E[∇log π | right] = ∇p/p, a wrong one -∇p/(1-p). So the expected gradient is w(p) ∇p with

    w(p) = Σ_k C(G, k) p^k (1-p)^(G-k) [k A_k/p - (G-k) B_k/(1-p)] / G

for advantages A_k of a right and B_k of a wrong response among k right ones. Leave-one-out: w = 1, the gradient of p.
R - mean: w = (G-1)/G. MaxRL, (R - mean)/mean: w = (1 - (1-p)^(G-1))/p, the derivative of Σ_{k<G} pass@k/k, which is,
up to a constant, the series of log p up to k = G - 1. GRPO, (R - mean)/std:
w = 1/G Σ_k C(G, k) p^(k-1) (1-p)^(G-k-1) √(k (G-k) (G-1)/G).
It is constant for G = 2 and 3, and smallest at p = 1/2 for G = 4.

The paper does not say what GRPO's advantages maximize. Only for groups of two or three is it the pass rate.
"""

import torch
from sympy import Rational, binomial, diff, simplify, sqrt, symbols

from upref import advantages

p = symbols("p", positive=True)
SIZES = (2, 3, 4, 5)
HALF = Rational(1, 2)


def advantage(name, k, G):
    """Return the advantages of a right and of a wrong response among k right
    ones of G.
    """
    mean = Rational(k, G)
    right, wrong = 1 - mean, -mean
    if name == "group_mean":
        return right, wrong
    if name == "leave_one_out":
        return right * Rational(G, G - 1), wrong * Rational(G, G - 1)
    if k == 0 or (name == "group_norm" and k == G):
        return Rational(0), Rational(0)
    divisor = mean if name == "maxrl" else sqrt(Rational(k * (G - k), G * (G - 1)))
    return right / divisor, wrong / divisor


def factor(name, G):
    """Return w(p), summed over the number of right responses."""
    total = 0
    for k in range(G + 1):
        A, B = advantage(name, k, G)
        chance = binomial(G, k) * p**k * (1 - p) ** (G - k)
        total += chance * (k * A / p - (G - k) * B / (1 - p)) / G
    return total


def of_group_norm(G):
    """Return w(p) of GRPO's advantages by the claim."""
    return (
        sum(
            binomial(G, k)
            * p ** (k - 1)
            * (1 - p) ** (G - k - 1)
            * sqrt(Rational(k * (G - k) * (G - 1), G))
            for k in range(1, G)
        )
        / G
    )


def harmonic_pass_at(most):
    """Return Σ pass@k / k for k from 1 to most."""
    return sum((1 - (1 - p) ** k) / k for k in range(1, most + 1))


def claims(G):
    """Return name of an estimator -> its w(p) by the claim."""
    return {
        "leave_one_out": Rational(1),
        "group_mean": Rational(G - 1, G),
        "maxrl": diff(harmonic_pass_at(G - 1), p),
        "group_norm": of_group_norm(G),
    }


def difference_from_code(name, G):
    """Return the largest difference of the advantages above from those of
    upref.advantages, over all groups with right and wrong responses.
    """
    largest = 0.0
    for k in range(1, G):
        rewards = torch.tensor([1.0] * k + [0.0] * (G - k), dtype=torch.float64)
        A = advantages.get(name)(rewards, torch.zeros(G, dtype=torch.int64))
        right, wrong = map(float, advantage(name, k, G))
        largest = max(largest, abs(A[0].item() - right), abs(A[-1].item() - wrong))
    return largest


def main(claims=claims, smallest_at=HALF):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    for G in SIZES:
        for name, claim in claims(G).items():
            apart = simplify(factor(name, G) - claim)
            assert apart == 0, (name, G, apart)
            # group_norm adds eps = 1e-6 to the deviation
            assert difference_from_code(name, G) < (
                1e-5 if name == "group_norm" else 1e-12
            )
        print(
            f"G = {G}:  leave_one_out, group_mean, maxrl, group_norm: w(p) - claim = 0, 0, 0, 0"
        )
    for G in SIZES[:3]:
        w = simplify(of_group_norm(G))
        print(f"group_norm, G = {G}:  w(p) = {w}")
        assert (w.diff(p) == 0) == (G < 4)
    w = of_group_norm(4)
    curvature = w.diff(p, 2).subs(p, smallest_at)
    assert simplify(w.diff(p).subs(p, smallest_at)) == 0 and curvature > 0
    values = {q: float(w.subs(p, Rational(str(q)))) for q in (0.1, 0.5, 0.9)}
    print(
        "group_norm, G = 4:  "
        + ", ".join(f"w({q}) = {v:.4f}" for q, v in values.items())
    )


if __name__ == "__main__":
    main()
