# SPDX-License-Identifier: Apache-2.0
"""What many cases share, and none of them is about."""

import torch


def zeroed(mask, *tensors):
    """The tensors with 0 in masked slots."""
    return [torch.where(mask, x, 0) for x in tensors]


def ratios(mask, log_prob, old_log_prob, advantages):
    """Return the ratio and the advantage of each token; 1 and 0 in masked slots."""
    log_ratio, a = zeroed(mask, log_prob - old_log_prob, advantages)
    return log_ratio.exp(), a


def clipped(r, a, low, high):
    """PPO's terms of these ratios, of tokens or of responses, and advantages."""
    return torch.minimum(r * a, r.clamp(low, high) * a)


def by_prompt(estimate):
    """Return an estimator that applies `estimate` to the rewards of each prompt."""

    def estimator(rewards, group):
        out = torch.zeros_like(rewards)
        for g in group.unique():
            out[group == g] = estimate(rewards[group == g])
        return out

    estimator.__name__ = estimate.__name__
    return estimator
