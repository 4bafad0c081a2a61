# SPDX-License-Identifier: Apache-2.0
"""The divisor of a loss that rejects tokens: both conventions have a name, and `check`
tells them apart.
"""

import pytest
import torch

import upref
from tests.support.cases import kept
from tests.support.daily import daily
from upref.rollouts import Rollouts


def ids(x):
    return getattr(x, "__name__", None)


@pytest.mark.parametrize(
    ("loss", "objective", "agg", "hp"), daily(kept.RIGHT, 2), ids=ids
)
def test_a_right_loss_is_accepted(loss, objective, agg, hp):
    report = upref.check(loss, objective, agg=agg, **hp)
    assert report, str(report)


@pytest.mark.parametrize(("loss", "objective", "agg", "hp", "id"), kept.WRONG, ids=ids)
def test_a_wrong_divisor_has_its_cause(loss, objective, agg, hp, id):
    report = upref.check(loss, objective, agg=agg, **hp)
    assert not report
    assert report.failures[0].fault_ids == (id,), str(report)


@pytest.mark.parametrize(
    ("loss", "objective", "agg", "hp", "id"), daily(kept.NOT_COUNTED, 2), ids=ids
)
def test_tokens_that_are_not_counted_are_named(loss, objective, agg, hp, id):
    report = upref.check(loss, objective, agg=agg, **hp)
    assert report.failures[0].fault_ids == (id,), str(report)


def test_a_sum_without_divisor_is_not_said_to_divide_by_all_tokens():
    report = upref.check(kept.mis_dropped, "mis(dapo)", agg="token-sum")
    causes = [failure.cause for failure in report.failures]
    assert causes and not any("not by all trained" in cause for cause in causes)


def test_another_correction_is_named_with_the_divisor_that_stays():
    report = upref.check(kept.tis_over_kept, "mis(dapo)", agg="kept-mean")
    assert "tokens that mis(dapo) keeps" in report.failures[0].cause


def test_entropies_of_16_bits_have_a_quantile():
    b = batch().floats(torch.bfloat16)
    assert 0 < upref.get("top_entropy(dapo)").kept(b).sum() < b.mask.sum()


@pytest.mark.nightly
def test_a_search_of_the_quantile_stays_within_its_range():
    assert not upref.check(kept.fifth_of_tokens, "top_entropy(dapo)", agg="kept-mean")


def test_tokens_of_low_entropy_alone_are_wrong():
    assert not upref.check(kept.low_trains, "top_entropy(dapo)", agg="kept-mean")


def test_the_report_says_which_divisor_it_is():
    for loss, agg, words in (
        (kept.icepop_counted, "token-mean", "rejected tokens count in the divisor"),
        (kept.icepop_dropped, "kept-mean", "are left out of the divisor"),
    ):
        report = upref.check(loss, kept.ICEPOP, agg=agg)
        assert any(words in sentence for sentence in report.assumptions)


HP = {
    "seq_mask(dapo)": {"is_min": 0.9, "is_max": 1.2},
    "opsm(dapo)": {"opsm_delta": 0.05},
}


# ---- the reference -------------------------------------------------------------------
def batch(seed=0, rows=4, columns=6):
    """Return a random batch of four responses of up to six tokens, with entropies and a
    sampler's log-probabilities.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, columns, generator=rng, dtype=torch.float64)

    mask = torch.rand(rows, columns, generator=rng) < 0.8
    mask[:, 0] = True
    old = -1 - normal().abs()
    return Rollouts(
        (old + normal() / 3).clamp(max=-0.01),
        old,
        normal(),
        mask,
        entropy=normal().abs(),
        logp_sampler=(old + normal()).clamp(max=-0.01),
    )


@pytest.mark.parametrize(
    "name",
    ["icepop(dapo)", "mis(grpo)", "seq_mask(dapo)", "opsm(dapo)", "top_entropy(dapo)"],
)
def test_kept_mean_is_token_mean_of_the_kept_tokens(name):
    """Compare the loss and its gradient with `token-mean` times all tokens over the
    kept ones.
    """
    o = upref.get(name)
    hp = HP.get(name, {})
    b = batch()
    keep = o.kept(b, **hp)
    assert 0 < keep.sum() < b.mask.sum()
    all_tokens, kept_alone = (o.aggregated(a) for a in ("token-mean", "kept-mean"))
    expected = all_tokens(b, **hp) * b.mask.sum() / keep.sum()
    torch.testing.assert_close(kept_alone(b, **hp), expected)
    logp = b.logp.clone().requires_grad_()
    kept_alone(b.but(logp=logp), **hp).backward()
    torch.testing.assert_close(logp.grad, kept_alone.gradient(b, **hp))


def test_a_selection_by_entropy_keeps_the_top_of_the_batch():
    b = batch(rows=10, columns=10)
    o = upref.get("top_entropy(dapo)")
    for quantile in (0.0, 0.5, 0.8):
        keep = o.kept(b, entropy_quantile=quantile)
        share = keep.sum() / b.mask.sum()
        assert abs(share - (1 - quantile)) < 0.02
        if quantile:
            assert b.entropy[keep].min() > b.entropy[b.mask & ~keep].max()


def test_what_has_no_kept_mean_is_refused():
    with pytest.raises(upref.InputError, match="rejects no token"):
        upref.get("dapo").aggregated("kept-mean")
    with pytest.raises(upref.InputError, match="rejects no token"):
        upref.get("tis(dapo)").aggregated("kept-mean")
    o = upref.get("icepop(dapo)").aggregated("kept-mean")
    first, _ = batch().split(2)
    with pytest.raises(upref.InputError, match="of a micro-batch"):
        o(first)
    with pytest.raises(upref.InputError, match="one ratio per token"):
        upref.get("top_entropy(gspo)")
