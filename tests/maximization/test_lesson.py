# SPDX-License-Identifier: Apache-2.0
"""The factor that lesson 2 draws is the one that `upref.maximizes` computes."""

import numpy as np
import pytest

import upref
from docs.course.draw import factor_of_gradient
from upref import advantages


def test_the_lesson_s_factor_is_that_of_upref_maximizes():
    """There, the mean over tokens halves the gradient of responses of two tokens."""
    said = str(upref.maximizes("grpo"))
    rates, factors = (
        [float(x) for x in line.split()[start:]]
        for line, start in zip(said.splitlines()[-4:-2], (2, 1), strict=True)
    )
    expected = factor_of_gradient(advantages.get("group_norm"), np.array(rates), 4)
    assert factors == pytest.approx(expected / 2, abs=1e-4)
