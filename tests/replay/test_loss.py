# SPDX-License-Identifier: Apache-2.0
"""The logged loss against the objective's, and what it is if it is another sum."""

import pytest
import torch

from upref.errors import InputError
from upref.replay import loss, make_batch
from upref.replay.terms import as_run

B, T = 16, 12
generator = torch.Generator().manual_seed(3)
OLD = -torch.rand(B, T, generator=generator, dtype=torch.float64) * 2 - 0.1
LENGTHS = torch.randint(2, T + 1, (B,), generator=generator)
COLUMNS = {
    "ids": torch.ones(B, T).long(),
    "mask": torch.arange(T)[None, :] < LENGTHS[:, None],
    "old": OLD,
    "now": (
        OLD + 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    ).clamp(max=0),
    "adv": torch.randn(B, 1, generator=generator, dtype=torch.float64).expand(B, T),
    "group": torch.arange(B) // 4,
    "sampler": OLD - 0.05,
    "micro": torch.arange(B) % 4,
    "rank": torch.arange(B) // 8,
}


def batch(**more):
    return make_batch(COLUMNS | more, file="f")


def value(name="dapo", agg="", **hp):
    o = as_run(name, hp)
    return float((o.aggregated(agg) if agg else o).loss(batch().rollouts(), **hp))


@pytest.mark.parametrize(
    "name", ["dapo", "grpo", "gspo", "cispo", "dr_grpo", "up_dapo", "reinforce"]
)
def test_the_loss_of_the_objective_is_equal(name):
    found = loss(batch(), name, value(name) * (1 + 1e-6))
    assert found and found.found == found.expected and not found.findings


def test_the_tokens_of_frameworks_are_one_mean():
    """dapo's formula has a mean within each prompt; verl and TRL have one over all
    tokens.
    """
    assert loss(batch(), "dapo", value()).expected == "token-mean"


@pytest.mark.parametrize(
    "agg", ["seq-mean-token-mean", "seq-mean-token-sum", "group-token-mean"]
)
def test_another_aggregation_is_named(agg):
    found = loss(batch(), "dapo", value(agg=agg))
    assert not found and found.found == agg


def test_the_mean_of_micro_batches_is_named():
    o, b = as_run("dapo", {}), batch()
    parts = [float(o.loss(b.rows(torch.arange(i, B, 4)).rollouts())) for i in range(4)]
    found = loss(b, "dapo", sum(parts) / 4)
    assert (
        not found and found.found == "mean over micro-batches of their own token-mean"
    )


def test_a_multiple_is_named():
    found = loss(batch(), "dapo", 4 * value())
    assert (
        not found
        and found.failures[0].cause == "multiple"
        and found.failures[0].numbers["factor"] == pytest.approx(4)
    )


def test_the_sampler_in_the_place_of_the_old_policy_is_named():
    b = batch().rollouts()
    swapped = float(as_run("dapo", {}).loss(b.but(logp_old=b.logp_old - 0.05)))
    found = loss(batch(), "dapo", swapped)
    assert not found and "sampler's column" in found.found


def test_another_divisor_is_a_note_with_its_number():
    tokens = int(COLUMNS["mask"].sum())
    found = loss(batch(), "dapo", value() * tokens / (tokens + 1))
    assert found and found.divisor == pytest.approx(tokens + 1, rel=1e-9)
    assert found.notes[0].cause == "divided"


def test_few_digits_accuse_nobody():
    near = round(value(agg="seq-mean-token-mean"), 3)
    found = loss(batch(), "dapo", near, digits=5e-4)
    assert found


def test_terms_that_cancel_say_nothing():
    adv = torch.tensor([1.0, -1.0]).repeat(B // 2)[:, None].expand(B, T).double()
    even = torch.ones(B, T, dtype=torch.bool)
    found = loss(batch(adv=adv, mask=even, now=OLD), "dapo", 0.0)
    assert found and [f.cause for f in found.notes] == ["uninformative"]


def test_hyperparameters_and_corrections_enter():
    b = batch().rollouts(sampler=True)
    o = as_run("tis(dapo)", {})
    logged = float(o.loss(b, eps_high=0.1))
    assert loss(batch(), "tis(dapo)", logged, eps_high=0.1).found == "token-mean"
    assert not loss(batch(), "tis(dapo)", logged).found


def test_the_number_is_asked_for():
    with pytest.raises(InputError, match="--loss"):
        loss(batch(), "dapo")
    assert (
        loss(make_batch(COLUMNS, file="f", logged={"loss": value()}), "dapo").found
        == "token-mean"
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_refused(number):
    with pytest.raises(InputError, match="the loss that the run logged is"):
        loss(batch(), "dapo", number)


def test_what_no_token_exercises_is_told():
    """At r = 1 no bound acts; beyond it those of which a token is."""
    first = make_batch(COLUMNS | {"now": COLUMNS["old"]}, file="f")
    assert set(loss(first, "dapo", 0.5, eps_low=0.2, eps_high=0.28).unused) >= {
        "eps_low",
        "eps_high",
    }
    assert not loss(batch(), "dapo", 0.5, eps_low=0.2, eps_high=0.28).unused
