# SPDX-License-Identifier: Apache-2.0
"""Lesson 4: the clipped loss of PPO and DAPO.

Fill the hole, the line with `...`, then run `upref learn 4` in this folder.
"""

import torch


def loss(lp, lp_old, A, eps_low=0.2, eps_high=0.28):
    """Minus the mean over N tokens of min(r A, clip(r, 1 - eps_low, 1 + eps_high) A).

    lp, lp_old  [N]  log π_θ and log π_old of each token; lp carries the gradient
    A           [N]  their advantages
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
