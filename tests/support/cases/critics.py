# SPDX-License-Identifier: Apache-2.0
"""Value losses as frameworks and people write them: RIGHT with the reference and the
aggregation that each has, and WRONG with the id of the fault.
"""

import torch


def _mean(x, mask):
    return (x * mask).sum() / mask.sum()


# ---- right ---------------------------------------------------------------------------
def as_in_verl(vpreds, returns, values, response_mask, cliprange_value):
    """Return verl's clipped value loss, and the share of clipped tokens."""
    near = torch.minimum(
        torch.maximum(vpreds, values - cliprange_value), values + cliprange_value
    )
    losses = torch.max((vpreds - returns) ** 2, (near - returns) ** 2)
    return 0.5 * _mean(losses, response_mask), (near != vpreds).float().mean()


class ValueLoss(torch.nn.Module):
    """As in OpenRLHF: an instance with settings."""

    def __init__(self, clip_eps):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, values, old_values, returns, action_mask):
        near = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
        losses = torch.max((near - returns) ** 2, (values - returns) ** 2)
        return 0.5 * _mean(losses, action_mask)


def as_in_rsl_rl(value_batch, target_values_batch, returns_batch, clip_param=0.2):
    """Return rsl_rl's clipped value loss: a mean over all slots, with no mask and no
    half.
    """
    moved = (value_batch - target_values_batch).clamp(-clip_param, clip_param)
    near = target_values_batch + moved
    return torch.max(
        (value_batch - returns_batch) ** 2, (near - returns_batch) ** 2
    ).mean()


def of_responses(values, old_values, returns, mask, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    x = torch.max((values - returns) ** 2, (near - returns) ** 2) * mask
    return 0.5 * (x.sum(1) / mask.sum(1)).mean()


def unreduced(values, old_values, returns, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)


def in_float32(values, old_values, returns, mask, clip):
    return of_tokens(values.float(), old_values.float(), returns.float(), mask, clip)


def of_tokens(values, old_values, returns, mask, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * _mean(torch.max((values - returns) ** 2, (near - returns) ** 2), mask)


def with_guarded_mean(values, old_values, returns, mask, cliprange_value=0.2, eps=1e-8):
    near = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    x = torch.max((values - returns) ** 2, (near - returns) ** 2) * mask
    return 0.5 * x.sum() / (mask.sum() + eps)


def of_predictions(value_preds, values, returns, mask, clip):
    """Return the clipped loss, whose new values are called predictions."""
    return of_tokens(value_preds, values, returns, mask, clip)


def squared(values, returns, mask):
    return 0.5 * torch.nn.functional.mse_loss(values[mask], returns[mask])


def squared_whole(values, returns, mask):
    return {"value_loss": torch.nn.functional.mse_loss(values[mask], returns[mask])}


RIGHT = [
    (as_in_verl, "clipped", "token-mean"),
    (ValueLoss(0.2), "clipped", "token-mean"),
    (as_in_rsl_rl, "clipped", "token-mean"),
    (of_responses, "clipped", "seq-mean-token-mean"),
    (unreduced, "clipped", "token-mean"),
    (in_float32, "clipped", "token-mean"),
    (of_tokens, "clipped", "token-mean"),
    (with_guarded_mean, "clipped", "token-mean"),
    (of_predictions, "clipped", "token-mean"),
    (squared, "mse", "token-mean"),
    (squared_whole, "mse", "token-mean"),
]


# ---- wrong ---------------------------------------------------------------------------
def _clipped(values, old_values, returns, mask, clip, combine=torch.max, near=None):
    if near is None:
        near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * _mean(combine((values - returns) ** 2, (near - returns) ** 2), mask)


def smaller_error(values, old_values, returns, mask, clip):
    return _clipped(values, old_values, returns, mask, clip, torch.min)


def clipped_alone(values, old_values, returns, mask, clip):
    return _clipped(values, old_values, returns, mask, clip, lambda e, near: near)


def not_clipped(values, old_values, returns, mask, clip):
    return squared(values, returns, mask)


def averaged(values, old_values, returns, mask, clip):
    return _clipped(
        values, old_values, returns, mask, clip, lambda e, near: (e + near) / 2
    )


def around_return(values, old_values, returns, mask, clip):
    near = returns + (values - returns).clamp(-clip, clip)
    return _clipped(values, old_values, returns, mask, clip, near=near)


def value_clipped(values, old_values, returns, mask, clip):
    near = values.clamp(-clip, clip)
    return _clipped(values, old_values, returns, mask, clip, near=near)


def absolute(values, old_values, returns, mask, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * _mean(
        torch.max((values - returns).abs(), (near - returns).abs()), mask
    )


def padding_counts(values, old_values, returns, mask, clip):
    return of_tokens(values, old_values, returns, torch.ones_like(mask), clip)


def over_width(values, old_values, returns, mask, clip):
    near = old_values + (values - old_values).clamp(-clip, clip)
    return (
        0.5 * (torch.max((values - returns) ** 2, (near - returns) ** 2) * mask).mean()
    )


def one_late(values, old_values, returns, mask, clip):
    return of_tokens(values.roll(-1, 1), old_values, returns, mask, clip)


def of_advantages(values, old_values, returns, mask, clip):
    return of_tokens(values, old_values, returns - old_values, mask, clip)


def to_old_values(values, old_values, returns, mask):
    return squared(values, old_values, mask)


def detached(values, old_values, returns, mask, clip):
    return of_tokens(values.detach(), old_values, returns, mask, clip)


def negative(values, old_values, returns, mask, clip):
    return -of_tokens(values, old_values, returns, mask, clip)


def tripled(values, old_values, returns, mask, clip):
    return 3 * of_tokens(values, old_values, returns, mask, clip)


def huber(values, returns, mask):
    return 0.5 * torch.nn.functional.smooth_l1_loss(values[mask], returns[mask])


def clip_unused(values, old_values, returns, mask, clip):
    return of_tokens(values, old_values, returns, mask, 0.2)


WRONG = [
    (smaller_error, "clipped", "value-minimum"),
    (clipped_alone, "clipped", "value-maximum-missing"),
    (not_clipped, "clipped", "value-clip-missing"),
    (averaged, "clipped", "value-errors-averaged"),
    (around_return, "clipped", "value-clip-missing"),
    (value_clipped, "clipped", "value-clipped-itself"),
    (absolute, "clipped", "value-error-absolute"),
    (padding_counts, "clipped", "padding-trains"),
    (over_width, "clipped", "aggregated-by-mean-over-width"),
    (of_responses, "clipped", "aggregated-by-seq-mean-token-mean"),
    (one_late, "clipped", "value-one-token-late"),
    (of_advantages, "clipped", "advantage-as-target"),
    (to_old_values, "mse", "old-value-as-target"),
    (detached, "clipped", "no-gradient"),
    (negative, "clipped", "value-sign-flipped"),
    (tripled, "clipped", "numbers-scaled"),
    (huber, "mse", "smooth-l1"),
    (of_tokens, "mse", "value-clipped"),
    (smaller_error, "mse", "value-minimum"),
]
