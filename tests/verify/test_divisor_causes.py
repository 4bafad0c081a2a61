# SPDX-License-Identifier: Apache-2.0
"""Causes of losses whose divisor is wrong: rounded, of parts, of some batches alone, or
of responses with holes.
"""

from functools import partial

import pytest
import torch

import upref

QUICK = ("unusual-inputs", "one-response", "every-value")  # oracles left out


def terms(log_prob, old_log_prob, advantages, mask, high=1.2):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return torch.minimum(r * A, r.clamp(0.8, high) * A)


def grpo(log_prob, old_log_prob, advantages, mask, *, inverse):
    J = terms(log_prob, old_log_prob, advantages, mask)
    return -(J.sum(1) * inverse(mask)).mean()


def dapo(log_prob, old_log_prob, advantages, mask, *, mean):
    return -mean(terms(log_prob, old_log_prob, advantages, mask, 1.28), mask)


def gspo(log_prob, old_log_prob, advantages, mask, *, length):
    log_r = torch.where(mask, log_prob - old_log_prob, 0).sum(1)
    s = (log_r / length(mask)).exp()
    A = torch.where(mask, advantages, 0).sum(1) / mask.sum(1)
    return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()


def of_length(mask, dtype):
    return (1 / mask.sum(1).to(dtype)).double()


def of_width_where_equal(mask):
    lengths = mask.sum(1)
    is_equal = (lengths == lengths[0]).all()
    return 1 / torch.where(is_equal, mask.shape[1], lengths).double()


def over_count(x, mask, dtype):
    return x.sum() * (1 / mask.sum().to(dtype)).to(x.dtype)


def of_rows(x, mask, size):
    return of_parts(x.split(size), mask.split(size))


def of_columns(x, mask, size):
    return of_parts(x.split(size, 1), mask.split(size, 1))


def of_parts(parts, masks):
    means = [p.sum() / m.sum().clamp(min=1) for p, m in zip(parts, masks, strict=True)]
    return torch.stack(means).mean()


def of_a_fifth_of_the_rows(x, mask):
    parts = max(len(x) // 5, 1)
    return of_parts(x.chunk(parts), mask.chunk(parts))


def up_to_hole(x, mask):
    return (x * mask.cumprod(1)).sum() / mask.sum()


def first_columns(x, mask):
    is_first = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return (x * is_first).sum() / mask.sum()


def before_hole(mask):
    return mask.cumprod(1).sum(1).clamp(min=1)


def with_holes(mask):
    columns = torch.arange(1, mask.shape[1] + 1)
    last = (mask * columns).amax(1)
    first = torch.where(mask, columns, mask.shape[1]).amin(1)
    return last - first + 1


def rejecting(log_prob, old_log_prob, advantages, mask, *, clips):
    """Return DAPO's loss (without the clip unless `clips`) over tokens with a ratio in
    [0.5, 2], divided by these alone.
    """
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    kept = mask & (r >= 0.5) & (r <= 2)
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A) if clips else r * A
    return -(J * kept).sum() / kept.sum().clamp(min=1)


low = torch.bfloat16
WRONG = [
    (partial(grpo, inverse=partial(of_length, dtype=low)), "divisor-in-low-precision"),
    (
        partial(dapo, mean=partial(over_count, dtype=torch.float16)),
        "divisor-in-low-precision",
    ),
    (partial(grpo, inverse=of_width_where_equal), "padded-width-where-lengths-equal"),
    (partial(gspo, length=before_hole), "log-ratio-over-tokens-before-hole"),
    (partial(gspo, length=with_holes), "log-ratio-over-columns-with-holes"),
    (partial(dapo, mean=up_to_hole), "tokens-behind-hole-left-out-but-counted"),
    (
        partial(dapo, mean=first_columns),
        "tokens-behind-first-columns-left-out-but-counted",
    ),
]
BY_NIGHT = [
    (partial(dapo, mean=partial(of_rows, size=3)), "parts-averaged"),
    (partial(dapo, mean=partial(of_columns, size=4)), "column-parts-averaged"),
]
RIGHT = [
    partial(grpo, inverse=partial(of_length, dtype=torch.float64)),
    partial(dapo, mean=partial(over_count, dtype=torch.float64)),
    partial(dapo, mean=partial(of_rows, size=10**4)),
    partial(dapo, mean=partial(of_columns, size=10**4)),
    partial(gspo, length=lambda mask: mask.sum(1)),
]


@pytest.mark.parametrize(
    ("loss", "fault_id"),
    [*WRONG, *(pytest.param(*case, marks=pytest.mark.nightly) for case in BY_NIGHT)],
)
def test_the_divisor_is_named(loss, fault_id):
    report = upref.check(loss, loss.func.__name__, skip=QUICK)
    assert report.failures[0].fault_ids == (fault_id,), report.text()


@pytest.mark.parametrize(
    ("clips", "fault_id"),
    [
        (True, "rejected-by-ratio"),
        pytest.param(
            False, "rejected-by-ratio-without-clip", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_rejection_by_the_ratio_of_the_update_is_named(clips, fault_id):
    report = upref.check(partial(rejecting, clips=clips), "dapo", skip=QUICK)
    assert report.failures[0].fault_ids == (fault_id,), report.text()
    assert "below 0.5 or above 2" in report.failures[0].cause


@pytest.mark.parametrize("loss", RIGHT)
def test_a_right_divisor_agrees(loss):
    report = upref.check(loss, loss.func.__name__, skip=QUICK)
    assert report, report.text()


def test_tokens_lost_behind_a_masked_slot_are_no_advantage_of_the_first_column():
    report = upref.check(partial(dapo, mean=up_to_hole), "dapo", skip=QUICK)
    causes = {id for finding in report.failures for id in finding.fault_ids}
    assert "advantage-of-first-column" not in causes, report.text()


def weighed_mean(log_prob, old_log_prob, advantages, mask, totals, *, least):
    J = terms(log_prob, old_log_prob, advantages, mask, 1.28)
    share = mask.sum() / totals.tokens
    return -J.sum() / mask.sum().clamp(min=least) * share


def note_on_micro_batches(loss):
    """Return the only note on micro-batches of a loss that agrees."""
    report = upref.check(loss, "dapo", skip=QUICK)
    assert report, report.text()
    [found] = [f for f in report.notes if f.oracle == "micro-batches"]
    return found


def test_the_value_of_a_micro_batch_without_tokens_may_be_nan():
    """Its gradient is 0: torch.where cuts it from the NaN."""
    found = note_on_micro_batches(partial(weighed_mean, least=0))
    assert found.regime.endswith("has the value nan, not 0")


def test_a_gradient_of_a_micro_batch_without_tokens_that_is_nan_is_noted():
    def loss(log_prob, old_log_prob, advantages, mask, totals):
        J = terms(log_prob, old_log_prob, advantages, mask, 1.28)
        mean = J.sum() / mask.sum() + 0 * log_prob.sum() / mask.sum()
        return -mean * mask.sum() / totals.tokens

    found = note_on_micro_batches(loss)
    assert found.regime.endswith("has the gradient nan")
    assert "unless the trainer leaves such micro-batches out" in found.cause


def test_a_tiny_gradient_of_a_micro_batch_without_tokens_is_none():
    def loss(log_prob, old_log_prob, advantages, mask, totals):
        J = terms(log_prob, old_log_prob, advantages, mask, 1.28)
        return -J.sum() / totals.tokens + 1e-12 * log_prob.mean()

    report = upref.check(loss, "dapo", skip=QUICK)
    assert "micro-batches" not in [f.oracle for f in report.findings], report.text()


def test_a_right_loss_takes_a_micro_batch_without_tokens():
    report = upref.check(partial(weighed_mean, least=1), "dapo", skip=QUICK)
    assert report, report.text()
    assert "micro-batches" not in [f.oracle for f in report.findings]


@pytest.mark.nightly
def test_that_the_order_of_the_rows_matters_is_said_without_a_cause():
    loss = partial(dapo, mean=of_a_fifth_of_the_rows)
    text = upref.check(loss, "dapo", skip=QUICK).text()
    assert "change with its place among the rows" in text
    assert "likely" not in text


@pytest.mark.nightly
def test_factors_near_1_are_said_to_be_as_small_as_rounding():
    def guarded(mask):
        return 1 / (mask.sum(1) + 1e-3 * mask.sum(1) ** 0.5)

    text = upref.check(partial(grpo, inverse=guarded), "grpo", skip=QUICK).text()
    assert "rounding to bfloat16" in text
    assert "likely" not in text
