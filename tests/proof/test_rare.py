# SPDX-License-Identifier: Apache-2.0
"""Losses that are right almost everywhere, and hide from a prover where they are not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import upref


def terms(lp, old, A):
    r = torch.exp(lp - old)
    return torch.max(-A * r, -A * r.clamp(0.8, 1.28))


def mean(values, mask):
    return (values * mask).sum() / mask.sum()


# ---- what integers and truths hold ---------------------------------------------------
def truth_plus_truth(lp, old, A, mask):
    large = A > 50
    once = (large + large).double()
    return mean(terms(lp, old, A) * (1 + once - 2 * large.double()), mask)


def integer_that_wraps(lp, old, A, mask):
    large = (A > 50).to(torch.uint8)
    wrapped = (large * 255 + large).double()
    return mean(terms(lp, old, A) * (1 + wrapped - 256 * large.double()), mask)


def cast_that_wraps(lp, old, A, mask):
    count = (A > 50).long() * 300
    gap = count.double() - count.to(torch.uint8).double()
    return mean(terms(lp, old, A) * (1 + gap), mask)


def copy_that_rounds(lp, old, A, mask):
    half = (A > 50).double() * 0.5
    whole = torch.zeros_like(half, dtype=torch.int64)
    whole.copy_(half)
    return mean(terms(lp, old, A) * (1 + half - whole), mask)


def bits_of_a_float(lp, old, A, mask):
    bits = torch.exp(lp - old).detach().contiguous().view(torch.int64)
    most = torch.tensor(1e5, dtype=torch.float64).view(torch.int64)
    return mean(terms(lp, old, A) * (bits < most), mask)


def negative_view(lp, old, A, mask):
    return mean(terms(lp, old, torch.where(A > 50, torch._neg_view(A), A)), mask)


# ---- what torch's operators do not pass through ---------------------------------------
def type_of_a_number(lp, old, A, mask):
    most = A.max().item()
    keep = 0 if isinstance(most, float) and most > 50 else 1
    return mean(terms(lp, old, A), mask) * keep


def memory_of_another_library(lp, old, A, mask):
    other = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(A.detach()))
    return mean(terms(lp, old, A) * (other < 50), mask)


def text_of_a_list(lp, old, A, mask):
    """Return DAPO's loss, doubled where an advantage is printed with an exponent."""
    values = terms(lp, old, A)
    return mean(2 * values if "e+" in repr(A.tolist()) else values, mask)


def another_thread(lp, old, A, mask):
    with ThreadPoolExecutor(1) as pool:
        keep = pool.submit(lambda: A < 50).result()
    return mean(terms(lp, old, A) * keep, mask)


# ---- values that are no open set, and common ------------------------------------------
def equal_within_a_response(lp, old, A, mask):
    same = A.shape[1] > 1 and bool((A == A[:, :1]).all())
    return mean(terms(lp, old, A), mask) * (2 if same else 1)


def equal_responses(lp, old, A, mask):
    same = len(A) > 1 and bool((A[0] == A[1]).all())
    return mean(terms(lp, old, A), mask) * (0 if same else 1)


def without_spread(lp, old, A, mask):
    return mean(terms(lp, old, A), mask) * (0 if A.std() == 0 else 1)


def advantage_of_one(lp, old, A, mask):
    return mean(terms(lp, old, A) * (A != 1), mask)


def advantage_of_minus_one(lp, old, A, mask):
    return mean(terms(lp, old, A) * (A != -1), mask)


def looked_up(lp, old, A, mask):
    return mean(terms(lp, old, A), mask) * {1.0: 0}.get(A[0, 0].item(), 1)


def mask_of_the_old_policy(lp, old, A, mask):
    return mean(terms(lp, old, A) * (old != 0), mask)


def mask_of_the_new_policy(lp, old, A, mask):
    return mean(terms(lp, old, A) * (lp != 0), mask)


NOT_SEEN = (
    truth_plus_truth,
    integer_that_wraps,
    cast_that_wraps,
    copy_that_rounds,
    bits_of_a_float,
    negative_view,
    type_of_a_number,
    memory_of_another_library,
    text_of_a_list,
    another_thread,
)
SPECIAL = (
    equal_within_a_response,
    equal_responses,
    without_spread,
    advantage_of_one,
    advantage_of_minus_one,
    looked_up,
    mask_of_the_old_policy,
    mask_of_the_new_policy,
)
# each of them takes five seconds and more
COUPLED = (equal_within_a_response, equal_responses, without_spread)


@pytest.mark.parametrize("loss", NOT_SEEN, ids=lambda loss: loss.__name__)
def test_it_is_not_proved(loss):
    assert upref.prove(loss, "dapo", columns=2).status != "proved"


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, marks=pytest.mark.nightly) if loss in COUPLED else loss
        for loss in SPECIAL
    ],
    ids=lambda loss: loss.__name__,
)
def test_it_differs(loss):
    assert upref.prove(loss, "dapo", columns=3).status == "differs"


def saturated(lp, old, A, mask):
    tau = torch.where(A > 0, 1.0, torch.full_like(A, 1.05))
    gate = torch.sigmoid(tau * (torch.exp(lp - old) - 1)) * 4 / tau
    return -((gate * A * mask).sum(-1) / mask.sum(-1)).mean()


def test_digits_that_cancel_far_away_are_no_state():
    found = upref.prove(saturated, "sapo", columns=2)
    assert found.status == "proved", found.reason
