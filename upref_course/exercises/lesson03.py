# SPDX-License-Identifier: Apache-2.0
"""Lesson 3: a loss for samples that an older policy has drawn.

Fill the hole, the line with `...`, then run `upref learn 3` in this folder.
"""

import torch


def loss(lp, lp_old, A):
    """Return one number for an optimizer that goes downhill.

    It is minus the objective of Eq. 7, by N samples of π_old.

    Args:
        lp: [N], log π_θ of each sampled token: the policy that is trained; this carries
            the gradient.
        lp_old: [N], log π_old of the same tokens: the policy that drew them.
        A: [N], their advantages.
    """
    return ...


if __name__ == "__main__":  # `python lesson03.py` tries it
    lp = torch.tensor([0.5]).log().requires_grad_()
    value = loss(lp, torch.tensor([0.25]).log(), torch.tensor([1.0]))
    print("loss:", value)
    value.backward()
    print("gradient by lp:", lp.grad)
