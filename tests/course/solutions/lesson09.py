# SPDX-License-Identifier: Apache-2.0
import torch


def k3(lp, lp_ref):
    d = lp_ref - lp
    return torch.exp(d) - 1 - d
