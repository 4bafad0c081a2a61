# SPDX-License-Identifier: Apache-2.0
"""Lesson 1: a loss that makes good actions more likely.

Fill the hole, the line with `...`, then run `upref learn 1` in this folder.
"""

import torch


def loss(logits, action, reward):
    """Return one number for an optimizer that goes downhill.

    Its gradient is minus the mean of R ∇log π over the samples.

    Args:
        logits: [K], a number for each of K actions; the policy is softmax(logits).
        action: [N], N samples of the policy: which action was taken, 0 .. K - 1.
        reward: [N], what each of them earned.
    """
    log_prob = torch.log_softmax(logits, dim=0)  # [K]: log π of every action
    return ...


if __name__ == "__main__":  # `python lesson01.py` tries it
    logits = torch.zeros(2, requires_grad=True)
    value = loss(logits, torch.tensor([0]), torch.tensor([1.0]))
    print("loss:", value)
    value.backward()
    print("gradient:", logits.grad)
