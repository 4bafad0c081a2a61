# SPDX-License-Identifier: Apache-2.0
import torch


def J(x, mask, responses):
    means = torch.where(mask, x, 0).sum(1) / mask.sum(1)
    return means.sum() / responses
