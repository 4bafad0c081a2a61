# SPDX-License-Identifier: Apache-2.0
"""Lesson 7: GSPO, one ratio for the whole response.

Fill the hole, the line with `...`, then run `upref learn 7` in this folder.
"""

import torch


def loss(lp, lp_old, A, mask, eps_low=3e-4, eps_high=4e-4):
    """Minus Eq. 6: the mean over B responses of min(s A, clip(s, 1 - eps_low, 1 +
    eps_high) A), s as in Eq. 5.

    lp, lp_old  [B, T]  log π_θ and log π_old of each token; lp carries the gradient
    A           [B]     one advantage for each response
    mask        [B, T]  True on the tokens of the response, False on padding, where lp and lp_old may be any numbers
    """
    log_r = torch.where(mask, lp - lp_old, 0)
    return ...


if __name__ == "__main__":  # `python lesson07.py` tries it
    lp = torch.tensor([[0.5, 0.3]]).log().requires_grad_()
    lp_old = torch.tensor([[0.4, 0.4]]).log()
    value = loss(lp, lp_old, torch.tensor([1.0]), torch.tensor([[True, True]]))
    print("loss:", value)
    value.backward()
    print("gradient by lp:", lp.grad)
