# SPDX-License-Identifier: Apache-2.0
"""Lesson 6: UP-DAPO.

Fill the hole, the line with `...`, then run `upref learn 6` in this folder.
"""

import torch


def loss(lp, lp_old, A, eps_low=0.2):
    """Return minus the mean of Eq. 14 over N tokens.

    Its terms are A log π_θ where A > 0, else min(r A, clip(r) A).

    Args:
        lp: [N], log π_θ of each token; this carries the gradient.
        lp_old: [N], log π_old of each token; it may be very low where A > 0.
        A: [N], their advantages.
        eps_low: how far the lower bound of r is from 1.
    """
    return ...


if __name__ == "__main__":  # `python lesson06.py` tries it
    lp = torch.tensor([0.2, 0.2]).log().requires_grad_()
    # r = 2, good and bad
    value = loss(lp, torch.tensor([0.1, 0.1]).log(), torch.tensor([1.0, -1.0]))
    print("loss:", value)
    value.backward()
    print("gradient by lp:", lp.grad)
