# SPDX-License-Identifier: Apache-2.0
"""Lesson 7: GSPO, one ratio for the whole response.

Fill the hole, the line with `...`, then run `upref learn 7` in this folder.
"""

import torch


def loss(lp, lp_old, A, mask, eps_low=3e-4, eps_high=4e-4):
    """Return minus Eq. 6: the mean over B responses of min(s A, clip(s) A).

    s is as in Eq. 5, and the clip is to 1 - eps_low and 1 + eps_high.

    Args:
        lp: [B, T], log π_θ of each token; this carries the gradient.
        lp_old: [B, T], log π_old of each token.
        A: [B], one advantage for each response.
        mask: [B, T], True on the tokens of the response, False on padding, where lp and
            lp_old may be any numbers.
        eps_low: how far the lower bound of s is from 1.
        eps_high: how far the upper bound of s is from 1.
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
