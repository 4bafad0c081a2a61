# SPDX-License-Identifier: Apache-2.0
"""Lesson 6: UP-DAPO.

Fill the hole, the line with `...`, then run `upref learn 6` in this folder.
"""

import torch


def loss(lp, lp_old, A, eps_low=0.2):
    """Minus the mean over N tokens of Eq. 14: A log π_θ where A > 0, else min(r A,
    clip(r) A).

    lp, lp_old  [N]  log π_θ and log π_old of each token; lp carries the gradient.
    lp_old may be very low where A > 0
    A           [N]  their advantages
    """
    return ...


if __name__ == "__main__":  # `python lesson06.py` tries it
    lp = torch.tensor([0.2, 0.2]).log().requires_grad_()
    # r = 2, good and bad
    value = loss(lp, torch.tensor([0.1, 0.1]).log(), torch.tensor([1.0, -1.0]))
    print("loss:", value)
    value.backward()
    print("gradient by lp:", lp.grad)
