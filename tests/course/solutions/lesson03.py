# SPDX-License-Identifier: Apache-2.0
import torch


def loss(lp, lp_old, A):
    return -(torch.exp(lp - lp_old) * A).mean()
