# SPDX-License-Identifier: Apache-2.0
"""Sec. 4.1: what UP's positive branch converges to on a fixed batch, and what importance sampling does.

Claim. E_old[A log π] with A > 0 is, up to the factor E_old[A], minus the cross-entropy of π to π* ∝ π_old A:
J(π*) - J(π) = E_old[A] KL(π* ‖ π) >= 0. So π* is its only maximum, stochastic wherever several arms are rewarded.
E_old[A r] = E_π[A] is stationary inside the simplex only if all A are equal: its maximum is the best arm, with
probability 1.

True on policy only: "equivalent to maximizing the REINFORCE objective". Off-policy it is advantage-weighted maximum
likelihood on stale data, with a target that keeps entropy. Nor is a baseline free there: E_old[∂ log π/∂z_a] is
π_old(a) - π(a), which is 0 for all a only at π = π_old.
"""

from sympy import Rational, expand_log, log, simplify, symbols

from upref import get

x, mu, A = (
    symbols("x1:4", positive=True),
    symbols("mu1:4", positive=True),
    symbols("A1:4", positive=True),
)
lp = [log(k) - log(sum(x)) for k in x]


def expected(o):
    """Return Σ_a mu_a times the objective's own function over three arms: E_old, up to
    the sum of mu, which need not be 1.
    """
    return sum(m * o.fn(p, log(m), a) for m, p, a in zip(mu, lp, A, strict=True))


def main(target=lambda mu, A: mu * A):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    J = expected(get("up_grpo"))
    goal = [target(m, a) for m, a in zip(mu, A, strict=True)]
    at = dict(zip(x, goal, strict=True))
    gradient = [simplify((k * J.diff(k)).subs(at)) for k in x]
    print("∇J_UP at π ∝ π_old A:", gradient)
    assert gradient == [0, 0, 0]

    star = [g / sum(goal) for g in goal]
    kl = sum(s * (log(s) - p) for s, p in zip(star, lp, strict=True))
    gap = simplify(expand_log(J.subs(at) - J - sum(goal) * kl))
    print("J(π*) - J(π) - E_old[A] KL(π* ‖ π) =", gap)
    assert gap == 0

    J_is = expected(get("is_pg"))
    mean = sum(k * a for k, a in zip(x, A, strict=True)) / sum(x)
    pull = [
        simplify(k * J_is.diff(k) - k / sum(x) * (a - mean))
        for k, a in zip(x, A, strict=True)
    ]
    print(
        "∂J_IS/∂z_a - π_a (A_a - E_π[A]) =",
        pull,
        " so inside the simplex it is 0 only where all A are equal",
    )
    assert pull == [0, 0, 0] and simplify(J_is - mean) == 0

    numbers = dict(
        zip(
            (*mu, *A),
            (Rational(1, 2), Rational(3, 10), Rational(1, 5), 1, 2, 4),
            strict=True,
        )
    )
    best = max(
        range(3),
        key=lambda k: mean.subs(numbers).subs(
            {y: 0 for j, y in enumerate(x) if j != k}
        ),
    )
    # A_best - E_π[A] = Σ_k π_k short_k
    short = [numbers[A[best]] - numbers[a] for a in A]
    print(
        "π_old = (.5, .3, .2), A = (1, 2, 4):  UP ends at",
        [s.subs(numbers) for s in star],
        end="; ",
    )
    print(
        f"IS at arm {best + 1} alone: A_{best + 1} - E_π[A] = Σ_k π_k {short}_k, 0 there only"
    )
    rest = J_is.subs(at).subs(numbers)  # E_π[A] where UP rests
    assert (
        all((d == 0) == (k == best) and d >= 0 for k, d in enumerate(short))
        and rest < numbers[A[best]]
    )

    # mu not normalized
    drift = [sum(m * k * p.diff(k) for m, p in zip(mu, lp, strict=True)) for k in x]
    apart = [
        simplify(d - (m - sum(mu) * k / sum(x)))
        for d, m, k in zip(drift, mu, x, strict=True)
    ]
    print("E_old[∂ log π/∂z_a] - (π_old(a) - π(a)) =", apart)
    assert apart == [0, 0, 0]


if __name__ == "__main__":
    main()
