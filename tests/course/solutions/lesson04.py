# SPDX-License-Identifier: Apache-2.0
import torch


def loss(lp, lp_old, A, eps_low=0.2, eps_high=0.28):
    r = torch.exp(lp - lp_old)
    return -torch.minimum(r * A, r.clamp(1 - eps_low, 1 + eps_high) * A).mean()
