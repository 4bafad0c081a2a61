# SPDX-License-Identifier: Apache-2.0
"""Eq. 1 -> Eq. 2: the log-derivative trick, and what the gradient of Eq. 1 is not.

Claim. ∇π = π ∇log π. Hence Σ_a π(a) A(a) ∇log π(a) is the gradient of E_{a~π}[A], and also that of Eq. 1 with its
sampling distribution held fixed.

Under that condition alone: Eq. 2 is not the gradient of Eq. 1 as it is printed, whose expectation is itself under π_θ.
Differentiating that as well leaves E[(A log π) ∇log π] over. Shown by enumerating a four-armed softmax, x_a = e^{z_a}.
"""

from sympy import Rational, log, simplify, symbols

from upref import get

x = symbols("x1:5", positive=True)
A = symbols("A1:5", real=True)
pi = [k / sum(x) for k in x]
lp = [log(k) - log(sum(x)) for k in x]
J = get("reinforce").fn


def grad(f):
    """Return ∂f/∂z of the first and second logit: z = log x, so ∂/∂z = x ∂/∂x; the
    other two follow by symmetry.
    """
    return [k * f.diff(k) for k in x[:2]]


def mean(values, under=pi):
    """Return the mean of a value of each arm, under π or other probabilities."""
    return sum(q * v for q, v in zip(under, values, strict=True))


def main(left_over=lambda A, lp: A * lp):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    trick = [
        simplify(p.diff(x[0]) - p * q.diff(x[0])) for p, q in zip(pi, lp, strict=True)
    ]
    print("∇π - π ∇log π =", trick)
    assert trick == [0] * 4

    score = [grad(q) for q in lp]
    eq_2 = [mean([a * s[i] for a, s in zip(A, score, strict=True)]) for i in (0, 1)]

    frozen = symbols("q1:5", positive=True)
    surrogate = grad(mean([J(p, None, a) for p, a in zip(lp, A, strict=True)], frozen))
    apart = [
        simplify(g.subs(dict(zip(frozen, pi, strict=True))) - e)
        for g, e in zip(surrogate, eq_2, strict=True)
    ]
    print("∇ Eq. 1, sampler frozen at π_θ, minus Eq. 2 =", apart)
    assert apart == [0, 0]

    apart = [simplify(g - e) for g, e in zip(grad(mean(A)), eq_2, strict=True)]
    print("∇ E[A] minus Eq. 2 =", apart)
    assert apart == [0, 0]

    extra = [
        mean([left_over(a, p) * s[i] for a, p, s in zip(A, lp, score, strict=True)])
        for i in (0, 1)
    ]
    full = grad(mean([J(p, None, a) for p, a in zip(lp, A, strict=True)]))
    apart = [simplify(f - e - k) for f, e, k in zip(full, eq_2, extra, strict=True)]
    print("∇ Eq. 1 as written, minus Eq. 2, minus E[(A log π) ∇log π] =", apart)
    at = dict(zip((*x, *A), (1, 2, 3, 4, 1, 0, 0, Rational(-1, 2)), strict=True))
    print(
        "the left-over term at x = (1, 2, 3, 4), A = (1, 0, 0, -1/2):",
        [round(float(k.subs(at)), 3) for k in extra],
    )
    assert apart == [0, 0] and max(abs(k.subs(at)) for k in extra) > Rational(1, 10)


if __name__ == "__main__":
    main()
