# SPDX-License-Identifier: Apache-2.0
import torch


def loss(logits, ids, prompt, trains, old, A, tokens, temperature):
    log_prob = (logits / temperature).log_softmax(-1)
    lp = log_prob[prompt - 1 : -1].gather(-1, ids[prompt:, None])[:, 0]
    r = (lp - old).exp()
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    return -(J * trains).sum() / tokens
