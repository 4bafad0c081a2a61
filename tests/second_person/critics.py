# SPDX-License-Identifier: Apache-2.0
"""Losses of a critic: twenty wrong ones, ten right ones."""

import torch
import torch.nn.functional as F

from tests.second_person.case import right, wrong


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def within(values, old_values, clip):
    return old_values + (values - old_values).clamp(-clip, clip)


def larger(values, old_values, returns, clip):
    near = within(values, old_values, clip)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2)


# ---- wrong ---------------------------------------------------------------------------
@wrong("clipped", "the smaller of the two errors counts", "min|smaller")
def smaller_error(values, old_values, returns, mask, clip=0.2):
    near = within(values, old_values, clip)
    errors = torch.min((values - returns).square(), (near - returns).square())
    return 0.5 * masked_mean(errors, mask)


@wrong("clipped", "the value is clipped around the return, which is no clip", "mse")
def clipped_around_returns(values, old_values, returns, mask, clip=0.2):
    near = returns + (values - returns).clamp(-clip, clip)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * masked_mean(errors, mask)


@wrong(
    "clipped", "the range is relative: old times 1 ± clip", "relative|times|1 ±|multipl"
)
def relative_range(values, old_values, returns, mask, clip=0.2):
    low = torch.minimum(old_values * (1 - clip), old_values * (1 + clip))
    high = torch.maximum(old_values * (1 - clip), old_values * (1 + clip))
    near = torch.maximum(torch.minimum(values, high), low)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * masked_mean(errors, mask)


@wrong("clipped", "only the clipped error counts", "clipped (value|error)|alone|only")
def clipped_error_alone(values, old_values, returns, mask, clip=0.2):
    near = within(values, old_values, clip)
    return 0.5 * masked_mean((near - returns) ** 2, mask)


@wrong("clipped", "a factor of a quarter: halved twice", "0.5 times")
def halved_twice(values, old_values, returns, mask, cliprange_value=0.2):
    loss = 0.5 * larger(values, old_values, returns, cliprange_value)
    return 0.5 * masked_mean(loss, mask)


@wrong("clipped", "the mean is over the padded width", "padded|padding|width|all slots")
def over_the_width(values, old_values, returns, mask, clip=0.2):
    return 0.5 * (larger(values, old_values, returns, clip) * mask).mean()


@wrong("clipped", "a mean over responses", "seq-mean-token-mean")
def over_responses(values, old_values, returns, action_mask, clip=0.2):
    loss = larger(values, old_values, returns, clip) * action_mask
    return 0.5 * (loss.sum(-1) / action_mask.sum(-1).clamp(min=1)).mean()


@wrong("clipped", "old and new values are exchanged in the clip", "old|exchang|swap")
def clip_of_the_old_value(values, old_values, returns, mask, clip=0.2):
    near = values + (old_values - values).clamp(-clip, clip)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * masked_mean(errors, mask)


@wrong("mse", "the error is absolute, not squared", "absolute|L1|not square|sign")
def absolute_error(values, returns, mask):
    return 0.5 * masked_mean((values - returns).abs(), mask)


@wrong("mse", "it is Huber's loss: large errors are cut", "Huber|linear|large|cut")
def smooth_l1(values, returns, mask):
    return masked_mean(F.smooth_l1_loss(values, returns, reduction="none"), mask)


@wrong("clipped", "no value is clipped", r"\bmse\b|not clipped|no clip|without")
def not_clipped(values, old_values, returns, mask, clip=0.2):
    return 0.5 * masked_mean((values - returns) ** 2, mask)


@wrong("mse", "values are clipped", "clip")
def clipped_for_mse(values, old_values, returns, mask):
    return 0.5 * masked_mean(larger(values, old_values, returns, 0.2), mask)


@wrong("mse", "the value is read one slot late", "one slot|late|shift|next")
def one_slot_late(values, returns, mask):
    return 0.5 * masked_mean((values[:, 1:] - returns[:, :-1]) ** 2, mask[:, :-1])


@wrong("mse", "the square root of the mean", "root|sqrt|RMS|one factor|factor")
def root_mean_square(values, returns, mask):
    return masked_mean((values - returns) ** 2, mask).sqrt()


@wrong("mse", "a sum over tokens, a mean over responses", "seq-mean-token-sum")
def sum_of_tokens(values, returns, mask):
    return 0.5 * ((values - returns) ** 2 * mask).sum(1).mean()


@wrong(
    "mse",
    "returns are whitened inside the loss",
    "return.*(whiten|normal)|whiten|normal",
)
def whitened_returns(values, returns, mask):
    m = mask.bool()
    r = (returns - returns[m].mean()) / (returns[m].std() + 1e-8)
    return 0.5 * masked_mean((values - r) ** 2, mask)


@wrong("clipped", "the range has no lower bound", "below|lower|one side|upper")
def upper_bound_alone(values, old_values, returns, mask, clip=0.2):
    near = old_values + (values - old_values).clamp(max=clip)
    errors = torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return 0.5 * masked_mean(errors, mask)


@wrong("mse", "padding trains", "mask|padding|untrained")
def padding_trains(values, returns, mask):
    return 0.5 * F.mse_loss(values, returns)


@wrong(
    "mse", "the old values are compared, so nothing trains", "old|no gradient|gradient"
)
def old_values_trained(values, old_values, returns, mask):
    return 0.5 * masked_mean((old_values - returns) ** 2, mask) + 0.0 * values.sum()


@wrong(
    "clipped",
    "a value outside of the range gets no gradient, whichever error is larger",
    "outside|range|no gradient|left",
)
def nothing_outside(values, old_values, returns, mask, clip=0.2):
    inside = ((values - old_values).abs() <= clip) * mask
    return 0.5 * ((values - returns) ** 2 * inside).sum() / mask.sum()


# ---- right ---------------------------------------------------------------------------
@right("clipped")
def as_verl(vpreds, returns, values, response_mask, cliprange_value=0.5):
    """Return verl's clipped value loss, and the share of tokens that the clip changes."""
    low, high = values - cliprange_value, values + cliprange_value
    clipped = torch.max(torch.min(vpreds, high), low)
    losses = torch.max((vpreds - returns) ** 2, (clipped - returns) ** 2)
    loss = 0.5 * masked_mean(losses, response_mask)
    fraction = masked_mean((losses > (vpreds - returns) ** 2).float(), response_mask)
    return loss, fraction


@right("clipped", agg="seq-mean-token-mean")
def as_openrlhf(values, old_values, returns, action_mask, clip_eps=0.2):
    near = old_values + (values - old_values).clamp(-clip_eps, clip_eps)
    loss = torch.max((near - returns) ** 2, (values - returns) ** 2)
    per_row = (loss * action_mask).sum(-1) / action_mask.sum(-1).clamp(min=1)
    return 0.5 * per_row.mean()


@right("clipped")
def by_where(values, old_values, returns, mask, value_clip=0.2):
    """Return the clipped value loss in which a token that the clip stops has no
    gradient.
    """
    far = (values - old_values).abs() > value_clip
    near = torch.where(
        far, old_values + value_clip * (values - old_values).sign(), values
    )
    plain, moved = (values - returns).square(), (near.detach() - returns).square()
    errors = torch.where(far & (moved > plain), moved, plain)
    return 0.5 * masked_mean(errors, mask)


@right("clipped")
def by_indexing(values, old_values, returns, loss_mask, clip=0.2):
    m = loss_mask.bool()
    return 0.5 * larger(values[m], old_values[m], returns[m], clip).mean()


@right("clipped", agg="token-sum")
def summed(values, old_values, returns, mask, clip=0.2):
    return 0.5 * (larger(values, old_values, returns, clip) * mask).sum()


@right("mse")
def masked_mse(values, returns, mask):
    target = torch.where(mask.bool(), returns, values.detach())
    return F.mse_loss(values, target, reduction="sum") / mask.sum()


@right("mse", agg="seq-mean-token-sum")
def by_row(values, returns, mask):
    """Return the mean over responses of their sums of squared errors, halved."""
    rows = [
        ((v - r)[m] ** 2).sum()
        for v, r, m in zip(values, returns, mask.bool(), strict=True)
    ]
    return 0.5 * torch.stack(rows).mean()


@right("mse")
def unreduced(values, returns, mask):
    return 0.5 * (values - returns).pow(2) * mask


@right("clipped")
def unreduced_clipped(values, old_values, returns, mask, eps_clip=0.2):
    return torch.where(mask.bool(), larger(values, old_values, returns, eps_clip), 0.0)


@right("clipped")
def a_dictionary(new_values, old_values, returns, mask, clip=0.2):
    loss = 0.5 * masked_mean(larger(new_values, old_values, returns, clip), mask)
    return {"loss": loss, "mean_value": new_values.mean().detach()}
