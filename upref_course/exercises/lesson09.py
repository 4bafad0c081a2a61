# SPDX-License-Identifier: Apache-2.0
"""Lesson 9: the estimator k3.

Fill the hole, the line with `...`, then run `upref learn 9` in this folder.
"""

import torch


def k3(lp, lp_ref):
    """Return e^d - 1 - d of each of N tokens that π_θ has drawn.

    Args:
        lp: [N], log π_θ of each token; this carries the gradient.
        lp_ref: [N], log π_ref of each token.

    Returns:
        [N].
    """
    return ...


if __name__ == "__main__":  # `python lesson09.py` tries it
    lp = torch.tensor([0.2, 0.4]).log().requires_grad_()
    value = k3(lp, torch.tensor([0.4, 0.2]).log())
    print("k3:", value)
    value.sum().backward()
    print("gradient by lp:", lp.grad)
