# SPDX-License-Identifier: Apache-2.0
"""Steps of three policies: the sampler, the policy before the update, and the one that
trains.
"""

import pytest
import torch
from loops import T, collated, log_probs, qwen3, surrogate
from torch.nn.utils.rnn import pad_sequence

import upref
from upref.errors import InputError
from upref.step import Row, check_step


def log_rho(rows, width):
    """Return log π_old - log μ of each predicted token, [B, width - 1]; 0 in prompts
    and padding.
    """
    each = [torch.zeros(len(r.prompt)) for r in rows]
    own = [torch.tensor(r.old) - torch.tensor(r.sampler) for r in rows]
    whole = [torch.cat(pair) for pair in zip(each, own, strict=True)]
    padded = pad_sequence(whole, batch_first=True)
    return torch.nn.functional.pad(padded, (0, width - padded.shape[1]))[:, 1:]


def make_step(factor):
    """Return a DAPO step whose terms are multiplied by factor(log ρ, mask)."""

    def step(model, rows):
        ids, there, trains, old, adv, _ = collated(rows)
        mask = trains[:, 1:]
        x = log_rho(rows, ids.shape[1]) * mask
        J = surrogate(log_probs(model, ids, there), old[:, 1:], adv[:, 1:])
        (-(J * factor(x, mask) * mask).sum() / mask.sum()).backward()

    return step


def truncated(x, mask, most=2.0):
    return x.exp().clamp(max=most)


def masked_outside(x, mask):
    return x.exp() * ((x.exp() >= 0.5) & (x.exp() <= 5.0))


def masked_product(x, mask):
    product = x.sum(1, keepdim=True).exp()
    return product * (product <= 3.0)


def ones(x, mask):
    return torch.ones_like(x)


RIGHT = {
    "tis(dapo)": truncated,
    "icepop(dapo)": masked_outside,
    "mis_seq(dapo)": masked_product,
}
WRONG = {
    "the correction is left out": (ones, "tis(dapo)"),
    "C is 3": (lambda x, mask: truncated(x, mask, 3.0), "tis(dapo)"),
    "C is 2.2": (lambda x, mask: truncated(x, mask, 2.2), "tis(dapo)"),
    "the ratio is the other way round": (
        lambda x, mask: truncated(-x, mask),
        "tis(dapo)",
    ),
    "no lower bound": (lambda x, mask: x.exp() * (x.exp() <= 5.0), "icepop(dapo)"),
    "the product is truncated": (
        lambda x, mask: x.sum(1, keepdim=True).exp().clamp(max=3.0),
        "mis_seq(dapo)",
    ),
    "the product runs over tokens alone": (masked_outside, "mis_seq(dapo)"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_with_a_correction_agrees(name):
    report = check_step(make_step(RIGHT[name]), qwen3(), name, temperature=T)
    assert report, report
    assert not [x for x in report.not_reached if x.startswith("is_")]
    assert "rho from" in str(report)


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_correction_is_rejected(fault):
    factor, name = WRONG[fault]
    report = check_step(make_step(factor), qwen3(), name, temperature=T, explain=False)
    assert not report, report


def test_the_bound_of_a_correction_is_named():
    step = make_step(lambda x, mask: truncated(x, mask, 3.0))
    report = check_step(step, qwen3(), "tis(dapo)", temperature=T)
    assert report.failures[0].cause == (
        "is_max is 2.04 or more (such as 3, 5, 8, 10), not 2"
    )


def test_rows_without_the_sampler_are_refused():
    rows = [
        Row([3, 4], [5, 6, 7], [True, False, True], 1.0, old=[-3.0, -3.5, -3.4]),
        Row([8, 9, 1], [11, 12], [True, True], -1.0, old=[-3.2, -4.1]),
    ]
    with pytest.raises(InputError, match=r"give every row `sampler`"):
        check_step(make_step(ones), qwen3(), "tis(dapo)", temperature=T, rows=rows)


def test_a_sampler_column_of_another_length_is_refused():
    row = Row([3, 4], [5, 6], [True, True], 1.0, old=[-3.0, -3.5], sampler=[-3.0])
    with pytest.raises(InputError, match="sampler has 1 entries"):
        upref.check_step(
            make_step(ones), qwen3(), "tis(dapo)", temperature=T, rows=[row]
        )
