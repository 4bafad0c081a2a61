# SPDX-License-Identifier: Apache-2.0
"""The normalizer of a step from dL/dlp of its tokens: right ones pass, wrong ones are
named, others are notes.
"""

import pytest
import torch

from tests.replay.test_loss import COLUMNS, B, T, batch
from upref.errors import InputError
from upref.replay import loss, make_batch, normalizer
from upref.replay.terms import objective_as_run, terms_of

MASK = COLUMNS["mask"]


def gradient(name="dapo", agg="", **hp):
    """Return dL/dlp [B, T] of the objective under an aggregation."""
    o = objective_as_run(name, hp)
    return (
        terms_of(batch(), o.aggregated(agg) if agg else o, hp)
        .by_recorded_counts()
        .gradient()
    )


def of_parts(column, scale=1.0):
    """Return dL/dlp [B, T] where each micro-batch or rank takes the mean over its own
    tokens.
    """
    whole = gradient() * MASK.sum()
    out = torch.zeros_like(whole)
    for value in column.unique():
        rows = column == value
        out[rows] = whole[rows] / MASK[rows].sum() * scale
    return out


def asked(grad, name="dapo", logged=None, **hp):
    b = make_batch(COLUMNS | {"grad": grad}, file="f", logged=logged or {})
    return normalizer(b, name, **hp)


def causes(found):
    return [f.cause for f in found.findings]


@pytest.mark.parametrize(
    "name", ["dapo", "grpo", "gspo", "cispo", "dr_grpo", "up_dapo", "sapo", "reinforce"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_of_the_objective_is_its_own(name, dtype):
    found = asked(gradient(name).to(dtype), name)
    assert found and not found.findings and found.factor == pytest.approx(1, abs=1e-6)


def test_a_gradient_that_float32_cannot_hold_is_no_other_sum():
    """Of a response whose weight underflows the trainer has 0, the reference 1e-60."""
    adv = COLUMNS["adv"].double().clone()
    adv[0] = 1e-60
    columns = COLUMNS | {"adv": adv}
    step = terms_of(make_batch(columns, file="f"), objective_as_run("dapo", {}), {})
    recorded = step.by_recorded_counts().gradient().float().double()
    assert not recorded[0].any() and step.by_recorded_counts().gradient()[0].any()
    found = normalizer(make_batch(columns | {"grad": recorded}, file="f"), "dapo")
    assert found and not found.findings


@pytest.mark.parametrize(
    "agg", ["seq-mean-token-mean", "seq-mean-token-sum", "group-token-mean"]
)
def test_another_sum_is_named(agg):
    found = asked(gradient(agg=agg))
    assert not found and found.found == agg


@pytest.mark.parametrize(
    ("column", "words"), [("micro", "micro-batches"), ("rank", "ranks")]
)
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_the_mean_of_micro_batches_and_of_ranks_is_named(column, words, how):
    parts = len(COLUMNS[column].unique())
    found = asked(of_parts(COLUMNS[column], 1 / parts if how == "mean" else 1.0))
    assert not found and found.found == f"{how} over {words} of their own token-mean"


@pytest.mark.parametrize("factor", [2.0, 4.0, 0.5, 0.25])
def test_a_count_too_often_is_named(factor):
    found = asked(factor * gradient())
    assert (
        causes(found) == ["gradient_multiple"]
        and not found
        and found.factor == pytest.approx(factor)
    )


def test_an_unknown_divisor_is_a_note_with_its_number():
    tokens = int(MASK.sum())
    found = asked(gradient() * tokens / (tokens + 5))
    assert found and causes(found) == ["gradient_scaled"]
    assert found.findings[0].numbers["divisor"] == pytest.approx(tokens + 5)


def test_the_whole_generation_batch_is_named():
    tokens = int(MASK.sum())
    logged = {"tokens": tokens, "generation_tokens": 3.0 * tokens}
    found = asked(gradient() / 3, logged=logged)
    assert (
        not found
        and f"{3 * tokens} tokens of the whole generation batch" in found.found
    )


def test_the_counts_of_the_framework_are_right_too():
    tokens = int(MASK.sum())
    stated = {"tokens": tokens + 1.5}
    found = asked(gradient() * tokens / (tokens + 1.5), logged=stated)
    assert found and not found.findings and "framework's count" in found.found
    # and so are those of the tokens that are there
    assert not asked(gradient(), logged=stated).findings


def test_the_other_sign_is_no_divisor():
    found = asked(-2 * gradient())
    assert (
        found
        and causes(found) == ["gradient_sign"]
        and "divisor" not in str(found.findings[0])
    )
    # it alone is undone exactly
    found = asked(-gradient())
    assert not found and causes(found) == ["gradient_sign"]


def test_a_column_of_zeros_is_no_multiple():
    found = asked(0 * gradient())
    assert found and causes(found) == ["gradient_zero"] and found.factor is None


def test_a_factor_of_each_rank_is_one_of_ranks():
    """It is one number in each micro-batch too; the rank says more."""
    # as `merge` numbers those of several files
    numbered = {"micro": COLUMNS["micro"] + 4 * COLUMNS["rank"]}
    scale = torch.where(COLUMNS["rank"] == 1, 0.7, 1.0)[:, None]
    found = normalizer(
        make_batch(COLUMNS | numbered | {"grad": gradient() * scale}, file="f"), "dapo"
    )
    assert causes(found) == ["gradient_parts"] and "in each rank" in str(
        found.findings[0]
    )


def test_a_correction_of_zero_leaves_no_gradient():
    zeros = torch.zeros(B, T)
    found = normalizer(
        make_batch(COLUMNS | {"correction": zeros, "grad": zeros}, file="f"), "dapo"
    )
    assert causes(found) == ["no_gradient"] and "correction" in str(found.findings[0])


def test_a_micro_batch_with_another_factor_is_a_note():
    scale = torch.where(COLUMNS["micro"] == 2, 0.7, 1.0)[:, None]
    found = asked(gradient() * scale)
    assert (
        found
        and causes(found) == ["gradient_parts"]
        and "micro-batch" in str(found.findings[0])
    )


def test_responses_with_their_own_factors_are_a_note():
    found = asked(
        gradient() * torch.linspace(0.5, 1.5, B, dtype=torch.float64)[:, None]
    )
    assert found and causes(found) == ["gradient_rows"]


def test_another_objective_is_a_note():
    found = asked(gradient("cispo"))
    assert found and causes(found) == ["gradient_other"] and not found.found
    assert causes(asked(gradient("dapo", eps_high=0.05), eps_high=0.28)) == [
        "gradient_other"
    ]


def test_without_a_gradient_nothing_is_told():
    b = make_batch(
        COLUMNS | {"grad": torch.zeros(B, T), "adv": torch.zeros(B)}, file="f"
    )
    assert causes(normalizer(b, "dapo")) == ["no_gradient"]
    with pytest.raises(InputError, match="grad"):
        normalizer(batch(), "dapo")


def test_a_kl_term_and_a_correction_enter():
    """The recorded gradient fits with the KL term and the factor of the sampler, and
    not without either.
    """
    ref = COLUMNS["old"] - 0.3
    factors = (
        torch.rand(
            B, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        )
        + 0.5
    )
    more = {"ref": ref, "correction": factors}
    b = make_batch(COLUMNS | more, file="f")
    o = objective_as_run("dapo", {"beta": 0.1})
    g = terms_of(b, o, {"beta": 0.1}).gradient()
    right = make_batch(COLUMNS | more | {"grad": g}, file="f")
    assert not normalizer(right, "dapo", beta=0.1).findings
    assert causes(normalizer(right, "dapo")) == ["gradient_other"]
    without = make_batch(COLUMNS | {"ref": ref, "grad": g}, file="f")
    assert causes(normalizer(without, "dapo", beta=0.1)) == ["gradient_other"]


def test_bfloat16_is_no_fault():
    """In bfloat16 each token's gradient is off by some 2^-8, and the sums are the same."""
    now = COLUMNS["now"].bfloat16()
    b = make_batch(COLUMNS | {"now": now}, file="f")
    g = terms_of(b, objective_as_run("dapo", {}), {}).gradient().bfloat16()
    found = normalizer(make_batch(COLUMNS | {"now": now, "grad": g}, file="f"), "dapo")
    assert found and not found.findings


def test_a_rank_that_is_missing_is_asked_for():
    b = make_batch(COLUMNS | {"grad": gradient()}, file="f", logged={"ranks": 4.0})
    with pytest.raises(InputError, match="holds 2 of 4 ranks"):
        normalizer(b, "dapo")


def test_a_number_that_the_gradient_does_not_bear_out_is_no_failure():
    """Tokens left out at r = 1 can give the loss of another divisor by chance; dL/dlp
    shows that it is not.
    """
    half = torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.5
    columns = COLUMNS | {"now": COLUMNS["old"], "grad": gradient() * half}
    step = terms_of(make_batch(columns, file="f"), objective_as_run("dapo", {}), {})
    b = make_batch(columns, file="f", logged={"loss": 0.5 * step.loss()})
    found = loss(b, "dapo")
    assert found and causes(found) == ["divided", "gradient_other"]
    without = make_batch(
        {k: v for k, v in columns.items() if k != "grad"}, file="f", logged=b.logged
    )
    assert [f.cause for f in loss(without, "dapo").failures] == ["multiple"]
