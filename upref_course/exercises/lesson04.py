# SPDX-License-Identifier: Apache-2.0
"""Lesson 4: the clipped loss of PPO and DAPO.

Fill the hole, the line with `...`, then run `upref learn 4` in this folder.
"""

import torch


def loss(lp, lp_old, A, eps_low=0.2, eps_high=0.28):
    """Return minus the mean of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    Args:
        lp: [N], log π_θ of each token; this carries the gradient.
        lp_old: [N], log π_old of each token.
        A: [N], their advantages.
        eps_low: how far the lower bound of r is from 1.
        eps_high: how far the upper bound of r is from 1.
    """
    r = torch.exp(lp - lp_old)
    return ...


if __name__ == "__main__":  # `python lesson04.py` tries it
    lp = torch.tensor([0.2, 0.1]).log().requires_grad_()
    # r = 2 and r = 1/2
    value = loss(lp, torch.tensor([0.1, 0.2]).log(), torch.tensor([1.0, 1.0]))
    print("loss:", value)
    value.backward()
    print("gradient by lp:", lp.grad)
