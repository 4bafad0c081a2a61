# SPDX-License-Identifier: Apache-2.0
"""Lesson 8: GRPO's aggregation, for a part of a mini-batch.

Fill the hole, the line with `...`, then run `upref learn 8` in this folder.
"""

import torch


def J(x, mask, responses):
    """Return this part's share of Eq. 4's mean; the shares of all parts add up to it.

    The mean is (1 / responses) Σ_i (1 / |o_i|) Σ_t x_it.

    Args:
        x: [B, T], what each token adds to the objective; padding may hold anything, NaN
            too.
        mask: [B, T], True on the tokens of the response; every response has one at
            least.
        responses: how many responses the whole mini-batch has; B of them are here.
    """
    return ...


if __name__ == "__main__":  # `python lesson08.py` tries it
    x = torch.tensor([[1.0, 3.0], [4.0, 7.0]], requires_grad=True)
    value = J(x, torch.tensor([[True, True], [True, False]]), 2)
    print("J:", value)
    value.backward()
    print("what each token counts:", x.grad)
