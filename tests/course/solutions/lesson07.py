# SPDX-License-Identifier: Apache-2.0
import torch


def loss(lp, lp_old, A, mask, eps_low=3e-4, eps_high=4e-4):
    log_r = torch.where(mask, lp - lp_old, 0)
    s = (log_r.sum(1) / mask.sum(1)).exp()
    return -torch.minimum(s * A, s.clamp(1 - eps_low, 1 + eps_high) * A).mean()
