# SPDX-License-Identifier: Apache-2.0
"""What other objectives would do, against autograd and against hand-made cases."""

import math

import pytest
import torch

import upref
from tests.replay.test_loss import COLUMNS, batch
from upref.errors import InputError
from upref.replay import clipping, heaviest_tokens, make_batch, replay, weights
from upref.replay.terms import objective_as_run

NAMES = ["dapo", "up_dapo", "grpo", "gspo", "tis(dapo)", "mis_seq(dapo)"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_autograd_of_the_loss(name):
    o = objective_as_run(name, {})
    b = batch().rollouts(sampler=o.sampler is not None)
    lp = b.logp.clone().requires_grad_()
    o.loss(b.but(logp=lp)).backward()
    row = weights(batch(), [name])[name]
    assert torch.allclose(row.gradient, -lp.grad, atol=1e-12)


def test_the_shares_by_hand():
    """Three tokens of one response and one of another: weights are A, all alive but the
    clipped one.
    """
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    old = torch.full((2, 3), -1.0)
    # r = 2.46 on one token with A > 0
    now = old + torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]).mul(0.9)
    adv = torch.tensor([[1.0], [-2.0]]).expand(2, 3)
    turn = torch.tensor([[0, 0, 1], [1, 0, 0]])
    b = make_batch(
        {
            "ids": mask.long(),
            "mask": mask,
            "old": old,
            "now": now,
            "adv": adv,
            "turn": turn,
        },
        file="f",
    )
    row = weights(b, ["dapo"], ran="dapo")["dapo"]
    assert (row.dead_positive, row.dead_negative, row.cosine) == (
        pytest.approx(1 / 3),
        0.0,
        1.0,
    )
    size = torch.tensor([1.0, 0.0, 1.0, 2.0]) / 4
    assert row.effective == pytest.approx(float(size.sum() ** 2 / (size**2).sum()))
    assert row.heaviest == pytest.approx(0.5)  # one token, the heaviest, of four
    assert row.longest == pytest.approx(0.5 / 0.75)
    assert row.turns == {0: pytest.approx(0.25), 1: pytest.approx(0.75)}
    assert row.clipping["clip/pos_high"] == pytest.approx(1 / 3)
    assert row.clipping == clipping(upref.get("dapo"), b)
    first = heaviest_tokens(b, row, 1)[0]
    assert (first.response, first.token, first.advantage, first.share) == (
        1,
        0,
        -2.0,
        pytest.approx(0.5),
    )


def test_up_gives_a_gradient_to_every_token_of_a_good_response():
    table = weights(batch(), ["up_dapo"], ran="dapo", eps_high=0.28)
    assert table["up_dapo"].dead_positive == 0 < table["dapo"].dead_positive
    assert table["up_dapo"].cosine < 1


def test_what_cannot_be_computed_is_skipped_with_a_reason():
    columns = {k: v for k, v in COLUMNS.items() if k != "sampler"}
    table = weights(make_batch(columns, file="f"), ["tis(dapo)", "grpo"], ran="dapo")
    assert [row.name for row in table.rows] == ["dapo", "grpo"]
    assert "sampler" in table.skipped["tis(dapo)"]


# ---- attacks on the table and on the heaviest tokens ---------------------------------
def test_the_gradient_of_another_objective_is_not_that_which_ran():
    """What ran cannot be computed here: then no row has a cosine with it."""
    columns = {k: v for k, v in COLUMNS.items() if k != "sampler"}
    table = weights(make_batch(columns, file="f"), ["dapo", "grpo"], ran="tis(dapo)")
    assert "tis(dapo)" in table.skipped
    assert [row.cosine for row in table.rows] == [None, None]


def test_without_an_objective_that_ran_no_row_has_a_cosine():
    assert [row.cosine for row in weights(batch(), ["dapo", "grpo"]).rows] == [
        None,
        None,
    ]


def test_only_tokens_with_a_gradient_are_heavy():
    """Padding, prompts and clipped tokens are none, however few the others are."""
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[:, 4:6] = True
    adv = torch.tensor([[0.0], [2.0], [0.0]]).expand(3, 8)
    old = torch.full((3, 8), -1.0)
    columns = {"ids": mask.long(), "mask": mask, "old": old, "adv": adv}
    one = make_batch(columns, file="f")
    row = weights(one, ["dapo"])["dapo"]
    places = {(t.response, t.token) for t in heaviest_tokens(one, row)}
    assert places == {(1, 4), (1, 5)}
    assert sum(t.share for t in heaviest_tokens(one, row)) == pytest.approx(1)


def test_a_ratio_is_not_cut():
    mask = torch.ones(1, 1, dtype=torch.bool)
    columns = {"ids": mask.long(), "mask": mask, "adv": torch.ones(1, 1)}
    columns |= {"old": torch.full((1, 1), -41.0), "now": torch.full((1, 1), -1.0)}
    one = make_batch(columns, file="f")
    (token,) = heaviest_tokens(one, weights(one, ["reinforce"])["reinforce"])
    assert token.ratio == pytest.approx(math.exp(40))


def test_the_report_names_the_objective_of_the_heaviest_tokens():
    columns = {k: v for k, v in COLUMNS.items() if k != "sampler"}
    found = replay([make_batch(columns, file="f")], "tis(dapo)", only=["objectives"])
    assert "heaviest tokens of dapo" in found.text()
    assert "tis(dapo) is left out" in found.text()


def test_a_tokenizer_without_the_token_is_one_sentence():
    class Other:
        def decode(self, ids):
            raise IndexError("out of range")

    with pytest.raises(InputError, match="token 1"):
        heaviest_tokens(batch(), weights(batch(), ["dapo"])["dapo"], tokenizer=Other())


@pytest.mark.parametrize("agg", ["token-mean", "group-token-mean"])
def test_a_correction_has_the_aggregation_of_the_run(agg):
    """Beside a run of another aggregation, its row showed two differences as one."""
    ran = upref.get("up_dapo").aggregated(agg)
    recorded = batch(sampler=COLUMNS["old"])
    table = replay([recorded], ran, only=["objectives"]).table
    for name in ("tis(up_dapo)", "icepop(up_dapo)", "mis(up_dapo)"):
        gradient = table[name].gradient
        assert torch.allclose(gradient, table["up_dapo"].gradient, atol=1e-12)
