# SPDX-License-Identifier: Apache-2.0
"""The factor that lesson 2 shows is the one that `upref.maximizes` computes."""

import math

import numpy as np
import pytest
import torch

import upref
from upref import advantages


def factor_of_gradient(estimator, p, G):
    """E[A | right] - E[A | wrong] of one of G responses: the expected gradient over that
    of the mean reward. Of a response that is right with probability p, the mean of
    ∇log π is ∇p / p, and of one that is wrong -∇p / (1 - p).
    """
    one_group = torch.zeros(G, dtype=torch.int64)
    factor = np.zeros_like(p)
    for k in range(G):  # right ones among the others
        others = [1.0] * k + [0.0] * (G - 1 - k)
        right, wrong = (
            float(estimator(torch.tensor([own, *others]).double(), one_group)[0])
            for own in (1.0, 0.0)
        )
        chance = math.comb(G - 1, k) * p**k * (1 - p) ** (G - 1 - k)
        factor += chance * (right - wrong)
    return factor


def test_the_lesson_s_factor_is_that_of_upref_maximizes():
    """There, the mean over tokens halves the gradient of responses of two tokens."""
    said = str(upref.maximizes("grpo"))
    rates, factors = (
        [float(x) for x in line.split()[start:]]
        for line, start in zip(said.splitlines()[-4:-2], (2, 1), strict=True)
    )
    expected = factor_of_gradient(advantages.get("group_norm"), np.array(rates), 4)
    assert factors == pytest.approx(expected / 2, abs=1e-4)
