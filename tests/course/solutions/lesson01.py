# SPDX-License-Identifier: Apache-2.0
import torch


def loss(logits, action, reward):
    log_prob = torch.log_softmax(logits, dim=0)
    return -(reward * log_prob[action]).mean()
