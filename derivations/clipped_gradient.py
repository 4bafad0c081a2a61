# SPDX-License-Identifier: Apache-2.0
"""Eqs. 9-10: the clipped objective for A > 0, its gradient, and its value at the kink.

Claim. min(r, 1+ε) A has derivative A r below the kink and 0 above (by lp). At r = 1+ε it has none: the one-sided ones
are A (1+ε) and 0. Eq. 10 chooses the left one ("if r <= 1+ε"), and so do torch and this library's `clip`; Eq. 11 calls
the same point exhausted (Cap = 0), which is no contradiction: the gradient is alive, the room above is nil.
"""

import torch
from sympy import Rational, Symbol, exp, log, simplify, symbols

from upref import get
from upref.symbolic import in_regime, pieces

A, r, eps = (
    Symbol("A", positive=True),
    Symbol("r", positive=True),
    Symbol("eps", positive=True),
)
lp, lp_old = symbols("lp lp_old", real=True)
GRPO = get("grpo")


def main(base=GRPO):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    J, at = base.fn(lp, lp_old, A, eps=eps, c=None), {eps: Rational(1, 5), A: 1}
    for low, high, [found] in pieces([J], lp, lp_old, r, at):
        print(f"{low} < r < {high}:  J = {found[0]}   dJ/dlp = {found[1]}")
        below = bool(high.subs(at) <= Rational(6, 5))
        assert found == (
            (A * exp(lp - lp_old), A * r) if below else (A * (1 + eps), 0)
        ), f"{low} < r < {high}: {found}"
    at_kink = (
        in_regime(J, at | {lp: log(Rational(6, 5)), lp_old: 0})
        .diff(lp)
        .subs(lp, lp_old + log(1 + eps))
    )
    print("r = 1+ε:  left", A * (1 + eps), "  right 0   chosen", simplify(at_kink))
    assert simplify(at_kink - A * (1 + eps)) == 0

    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    old = -torch.tensor([2.0], dtype=torch.float64).log()
    (gradient,) = torch.autograd.grad(
        base.fn(x, old, torch.ones(1), eps=1.0, c=None).sum(), x
    )
    print("torch at r = 1+ε = 2, A = 1:", (x - old).exp().item(), "->", gradient.item())
    assert (x - old).exp().item() == 2 == gradient.item()


if __name__ == "__main__":
    main()
