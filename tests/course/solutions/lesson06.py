# SPDX-License-Identifier: Apache-2.0
import torch


def loss(lp, lp_old, A, eps_low=0.2):
    good = A > 0
    r = torch.where(good, 0, lp - lp_old).exp()
    clipped = torch.minimum(r * A, r.clamp(min=1 - eps_low) * A)
    return -torch.where(good, A * lp, clipped).mean()
