# SPDX-License-Identifier: Apache-2.0
"""Sec. 3.3: "the policy is strictly upper-bounded by π_θ <= (1+ε_high) π_old" is false.

Claim. Clipping removes a token's own gradient; it does not bound the policy. A softmax over three tokens, one rare and
positive (π_old = 0.01), two negative: in the flow of DAPO's exact gradient the positive token's own term stops at r =
1.28, then the negatives, pushed down to 1-ε_low, leave it their mass by normalization. The continuous
flow ends at (1 - (1-ε_low)(1-π_old))/π_old = 20.8; finite steps overshoot 1-ε_low a little, and end above it.
The Cap says where a gradient lives, not what the policy can reach.
This is one run of small steps: a counterexample, and no statement about every task.
"""

import torch

from upref import get

MU = torch.tensor([0.01, 0.495, 0.495], dtype=torch.float64)
A = torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
DAPO = get("dapo").fn


def flow(fn, step=0.1, most=4000):
    """Make Euler steps on the logits z, up J = Σ_a mu_a fn(lp_a).

    Returns:
        The ratios at the end, the steps until the first token's own gradient is 0 (None
        if it never is), and those until all are.
    """
    z, left = MU.log(), None
    for i in range(most):
        lp = torch.log_softmax(z, 0).requires_grad_()
        # mu_a dJ/dlp_a
        (own,) = torch.autograd.grad((MU * fn(lp, MU.log(), A)).sum(), lp)
        p = lp.detach().exp()
        if not own.any():
            break
        if left is None and own[0] == 0:
            left = i
        z = z + step * (own - p * own.sum())  # dJ/dz_b = Σ_a own_a (δ_ab - p_b)
    return p / MU, left, i


def main(bound=1.28, fn=DAPO):
    """Print the steps; raise AssertionError where the claim is false. The arguments are
    parts of the claim: with others a test finds it false.
    """
    r, left, last = flow(fn)
    print(
        f"own gradient of the positive token gone after {left} steps, all gradients after {last}"
    )
    print("ratios at the end:", [round(x, 2) for x in r.tolist()])
    limit = (1 - 0.8 * (1 - MU[0].item())) / MU[0].item()
    print(f"bound of the paper: {bound}; the continuous flow ends at {limit:.1f}")
    assert left is not None and r[0] > 10 * bound and abs(r[0] - limit) < 0.5


if __name__ == "__main__":
    main()
