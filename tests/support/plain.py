# SPDX-License-Identifier: Apache-2.0
"""A plain DAPO loss, which tests of `upref prove` change."""

import torch


def dapo(lp, old, A, mask):
    """Return DAPO's loss at the paper's bounds, a mean over tokens."""
    r = (lp - old).exp()
    return (torch.max(-A * r, -A * r.clamp(0.8, 1.28)) * mask).sum() / mask.sum()
