# SPDX-License-Identifier: Apache-2.0
import re

import pytest
import torch

import upref

GOOD = dict(
    logp=torch.tensor([[-0.5, -1.0], [-2.0, -0.1], [-1.0, -1.0]]),
    logp_old=torch.tensor([[-0.6, -1.1], [-1.0, -0.2], [-1.0, -1.0]]),
    adv=torch.tensor([[1.0], [-1.0], [0.5]]),
    mask=torch.tensor([[True, True], [True, False], [False, True]]),
)
NAN, INF = float("nan"), float("inf")


def poke(x, value, at=(0, 0)):
    x = x.clone()
    x[at] = value
    return x


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(logp=[[1.0]]), "logp must be Float"),
        (
            dict(logp=GOOD["logp"].int()),
            r"logp must be Float\[Tensor, 'B T'\], got int32\[3, 2\]",
        ),
        (dict(logp_old=GOOD["logp_old"][:2]), "logp_old must be"),
        (dict(adv=torch.ones(3)), "adv must be"),
        (dict(adv=torch.ones(3, 5)), "adv must be"),
        (dict(mask=GOOD["mask"].float()), "mask must be Bool"),
        (dict(mask=GOOD["mask"].long()), "mask must be Bool"),
        (dict(group=torch.zeros(2, dtype=torch.long)), "group must be"),
        (dict(group=torch.zeros(3)), "group must be"),
        (dict(logp=poke(GOOD["logp"], 0.3)), r"logp is 0.3 > 0 at \(0, 0\)"),
        (dict(logp_old=poke(GOOD["logp_old"], NAN)), r"logp_old is nan at \(0, 0\)"),
        (dict(logp=poke(GOOD["logp"], -INF)), r"logp is -inf at \(0, 0\)"),
        (dict(adv=poke(GOOD["adv"], NAN)), r"adv is not finite at \(0, 0\)"),
        (dict(mask=poke(GOOD["mask"], False, 1)), "response 1 has no unmasked token"),
        (dict(group=torch.tensor([4, 4, 7])), "group 7 has one response"),
        (dict(entropy=poke(GOOD["logp"].abs(), -5.0)), "entropy is -5.0 at"),
        (dict(totals=3), "totals must be the mini-batch's Totals"),
        (dict(totals=upref.Totals(9, 5, 2, torch.ones(5))), "cut to these 3 rows"),
        (dict(logp_ref=poke(GOOD["logp"], 1.0)), "logp_ref is 1 > 0"),
        ({k: v[:0] for k, v in GOOD.items()}, "the batch is empty"),
    ],
)
def test_bad_input_gets_one_sentence(change, says):
    with pytest.raises(upref.InputError, match=says) as error:
        upref.Rollouts(**GOOD | change)
    assert str(error.value).count("\n") == 0 and str(error.value).endswith((".", "?"))


def test_masked_slots_may_hold_anything():
    for value in (NAN, INF, -INF, 1e30, 5.0):
        upref.Rollouts(
            **GOOD
            | dict(
                logp=poke(GOOD["logp"], value, (1, 1)),
                adv=poke(GOOD["adv"].expand(3, 2), value, (1, 1)),
            )
        )


def test_half_precision_and_rounding_above_zero_are_accepted():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in GOOD.items()}
        assert upref.get("up_dapo").loss(upref.Rollouts(**cast)).isfinite()
    upref.Rollouts(**GOOD | dict(logp=poke(GOOD["logp"], 1e-7)))


def test_sequence_level_reads_the_first_unmasked_advantage():
    adv = torch.tensor([[1.0, 1.0], [-1.0, NAN], [NAN, 0.5]])
    f = upref.get("gspo")
    assert f(upref.Rollouts(**GOOD)) == f(upref.Rollouts(**GOOD | dict(adv=adv)))


@pytest.mark.parametrize("objective", ["dapo", "gspo", "topr", "gmpo"])
def test_one_advantage_per_response_may_be_given_once(objective):
    f = upref.get(objective)
    wide = GOOD["adv"].expand(3, 2).contiguous()
    torch.testing.assert_close(
        f(upref.Rollouts(**GOOD)), f(upref.Rollouts(**GOOD | dict(adv=wide)))
    )


@pytest.mark.parametrize(
    "name", [n for n in upref.names() if upref.get(n).agg == "seq-mean"]
)
def test_objectives_of_responses_refuse_token_advantages(name):
    b = upref.Rollouts(
        **GOOD | dict(adv=torch.tensor([[1.0, 2.0], [-1.0, NAN], [NAN, 0.5]]))
    )
    with pytest.raises(
        upref.InputError, match=re.escape(f"{name} needs one advantage per response")
    ):
        upref.get(name).loss(b)


def test_hyperparameters_are_checked():
    """A hyperparameter that an objective lacks, or a value out of its range, is refused
    with a sentence that says what it takes.
    """
    f, b = upref.get("dapo"), upref.Rollouts(**GOOD)
    for hp, says in [
        (
            dict(eps_hihg=1),
            "no hyperparameter 'eps_hihg'; it takes: eps_low, eps_high, c",
        ),
        (dict(c=0.95), "c must be None or greater than 1"),
        (dict(eps_high=[1]), "eps_high must be"),
        (dict(eps_high=True), "eps_high must be"),
        (dict(eps_low=-1), "eps_low must be a number >= 0"),
        (dict(eps_low=None), "eps_low must be"),
        (dict(eps_high="x"), "eps_high must be"),
        (dict(eps_high=NAN), "eps_high must be"),
    ]:
        with pytest.raises(upref.InputError, match=says):
            f.loss(b, **hp)
    with pytest.raises(upref.InputError, match="needs logp_ref"):
        upref.get("grpo").loss(b, beta=0.1)
    with pytest.raises(upref.InputError, match="did you mean dapo"):
        upref.get("dapoo")
    with pytest.raises(upref.InputError, match="tau_pos must be a number > 0"):
        upref.get("sapo").loss(b, tau_pos=0)


def test_only_rounding_may_exceed_zero():
    for dtype, value in (
        (torch.float32, 1e-2),
        (torch.bfloat16, 0.3),
        (torch.float64, 1e-9),
    ):
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in GOOD.items()}
        with pytest.raises(
            upref.InputError, match="log-probabilities are never positive"
        ):
            upref.Rollouts(**cast | dict(logp=poke(cast["logp"], value)))


def test_parts_of_parts_still_add_up():
    b = upref.Rollouts(**GOOD)
    for name in ("dapo", "grpo", "gspo"):
        f = upref.get(name)
        torch.testing.assert_close(
            sum(f(q) for p in b.split(2) for q in p.split(2)), f(b)
        )


def test_sampler_weights_multiply_a_token_or_a_mean():
    """Find that a sampler weight multiplies a token of DAPO, and a response of GSPO by
    its mean.
    """
    b, w = (
        upref.Rollouts(**GOOD),
        torch.tensor([[0.5, 2.0], [3.0, float("nan")], [float("nan"), 0.25]]),
    )
    args = (b.logp, b.logp_old, b.adv, b.mask)
    dapo, gspo = upref.get("dapo"), upref.get("gspo")
    token = dapo.unreduced(*args, **dapo.resolve({}))
    torch.testing.assert_close(
        dapo.J(*args, is_weights=w), (token * w)[b.mask].sum() / 4
    )
    response = gspo.unreduced(*args, **gspo.resolve({}))
    torch.testing.assert_close(
        gspo.J(*args, is_weights=w), (response * torch.tensor([1.25, 3.0, 0.25])).mean()
    )


def test_batches_and_counts_are_compared_by_identity():
    """It raised: a tensor of several numbers has no truth value."""

    def batch():
        return upref.Rollouts(
            -torch.ones(2, 3),
            -torch.ones(2, 3),
            torch.ones(2, 1),
            torch.ones(2, 3).bool(),
        )

    def of_groups():
        return upref.Totals.of(torch.ones(4, 3).bool(), torch.tensor([0, 0, 1, 1]))

    for make in (batch, of_groups):
        b, other = make(), make()
        assert b == b and b != other and b in [other, b] and other not in [b]
        assert {b: 1}[b] == 1 and other not in {b: 1}


def test_rows_and_columns_are_taken_as_a_batch_of_their_own():
    lp = -torch.arange(1.0, 13).reshape(3, 4)
    group = torch.tensor([5, 5, 7])
    A = torch.tensor([[1.0], [2.0], [3.0]])
    b = upref.Rollouts(lp, lp, A, torch.ones(3, 4).bool(), totals=None)
    part = b.but(group=group).take([1, 0], [0, 3])
    assert part.logp.tolist() == [[-5, -8], [-1, -4]]
    assert part.adv.tolist() == [[2], [1]]  # one advantage for each response
    assert part.group.tolist() == [5, 5]
    assert b.take(slice(2)).logp.equal(lp[:2])
    with pytest.raises(upref.InputError, match="no unmasked token"):
        b.but(mask=torch.eye(3, 4).bool()).take([0, 1], [1])


def test_floats_casts_numbers_and_nothing_else():
    lp = -torch.ones(2, 3, dtype=torch.float64)
    b = upref.Rollouts(lp, lp, lp, torch.ones(2, 3).bool(), entropy=-lp)
    low = b.floats(torch.bfloat16)
    assert {x.dtype for x in low.tensors().values()} == {torch.bfloat16, torch.bool}
    assert set(low.tensors()) == {"logp", "logp_old", "adv", "mask", "entropy"}


def test_a_changed_batch_is_checked_and_has_no_totals():
    lp = -torch.ones(2, 3)
    b = upref.Rollouts(lp, lp, lp, torch.ones(2, 3).bool())
    part = b.split(2)[0]
    assert part.map(lambda name, x: x).totals is None
    with pytest.raises(upref.InputError, match="log-probabilities are never positive"):
        b.map(lambda name, x: -x if name == "logp" else x)


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda:0")


@pytest.mark.parametrize("name", ["logp", "adv", "group"])
def test_a_batch_on_two_devices_is_one_sentence(name):
    x = torch.full((2, 3), -1.0)
    given = {
        "logp": x,
        "logp_old": x,
        "adv": x,
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "group": torch.zeros(2, dtype=torch.int64),
    }
    given[name] = given[name].as_subclass(Elsewhere)
    with pytest.raises(upref.InputError, match=f"{name} is on cuda:0 and mask on cpu"):
        upref.Rollouts(**given)
