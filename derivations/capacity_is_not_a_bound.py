# SPDX-License-Identifier: Apache-2.0
"""Sec. 3.3: "the policy is strictly upper-bounded by π_θ <= (1+ε_high) π_old" is false.

Claim. Clipping removes a token's own gradient; it does not bound the policy. A softmax over three tokens, one rare and
positive (π_old = 0.01), two negative: in the flow of DAPO's exact gradient the positive token's own term stops at r =
1.28, then the negatives, pushed down to 1-ε_low, leave it their mass by normalisation. It ends at
(1 - (1-ε_low)(1-π_old))/π_old = 20.8. The Cap says where a gradient lives, not what the policy can reach.
"""

import numpy as np

from upref import get

MU = np.array([0.01, 0.495, 0.495])
A = np.array([1.0, -1.0, -1.0])
DAPO = get("dapo").weight


def flow(weight, step=0.02, most=20_000):
    """Euler steps on z, dJ/dz_b = Σ_a mu_a w_a (δ_ab - p_b): the ratios, steps till the first is dead, till all are."""
    z, left = np.log(MU), None
    for i in range(most):
        p = np.exp(z) / np.exp(z).sum()
        w = MU * weight(p / MU, A)
        if not w.any():
            break
        if left is None and w[0] == 0:
            left = i
        z = z + step * (w - p * w.sum())
    return p / MU, left, i


def main(bound=1.28, weight=DAPO):
    r, left, last = flow(weight)
    print(f"own gradient of the positive token gone after {left} steps, all gradients after {last}")
    print("ratios at the end:", np.round(r, 2).tolist())
    limit = (1 - 0.8 * (1 - MU[0])) / MU[0]
    print(f"bound of the paper: {bound}; normalisation allows {limit:.1f}")
    assert left is not None and r[0] > 10 * bound and abs(r[0] - limit) < 0.5


if __name__ == "__main__":
    main()
