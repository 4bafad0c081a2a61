# SPDX-License-Identifier: Apache-2.0
"""upref.weights.batches: several batches as one."""

import torch

from upref.rollouts import Rollouts
from upref.weights.batches import concatenate


def rows_of(n: int, width: int) -> Rollouts:
    """Return n rows in groups of two."""
    logp = -1.0 - torch.arange(n * width, dtype=torch.float64).reshape(n, width)
    ones = torch.ones(n, width, dtype=torch.bool)
    return Rollouts(logp, logp - 0.1, torch.ones(n, width), ones, torch.arange(n) // 2)


def test_groups_stay_apart_and_narrow_rows_are_masked():
    both = concatenate([rows_of(4, 3), rows_of(2, 5)])
    assert both.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert both.mask.sum(1).tolist() == [3, 3, 3, 3, 5, 5]
    assert torch.equal(both.logp[4:], rows_of(2, 5).logp)
    assert torch.equal(both.logp[:4, :3], rows_of(4, 3).logp)


def test_rows_occur_twice_up_to_a_multiple():
    both = concatenate([rows_of(4, 3), rows_of(2, 3)], multiple_of=4)
    assert both.group.tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    assert torch.equal(both.logp[6:], both.logp[:2])
