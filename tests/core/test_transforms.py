# SPDX-License-Identifier: Apache-2.0
"""The paper's plug-in claim, bit for bit, and the relations between the family's
members.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

import upref
from upref.registry import get
from upref.rollouts import autograd_gradient
from upref.transforms import opsm
from upref.weights.batches import batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("base", "hand"), [("grpo", "up_grpo"), ("dapo", "up_dapo"), ("gspo", "up_gspo")]
)
@pytest.mark.parametrize("suffix", ["", "_anchored"])
def test_up_of_base_is_the_hand_written_one_bit_for_bit(base, hand, suffix, dtype):
    """The plug-in and the hand-written objective have the same value and gradient,
    which the base does not have.
    """
    plugged, written = (
        (upref.up_anchored if suffix else upref.up)(get(base)),
        get(hand + suffix),
    )
    for hp in ({}, {"c": 3.0}) if "c" in written.hyperparameters else ({},):
        b = batch(get(base), **hp)
        b = replace(
            b,
            **{
                k: getattr(b, k).to(dtype)
                for k in ("logp", "logp_old", "adv", "entropy")
            },
        )
        assert torch.equal(plugged(b, **hp), written(b, **hp))
        assert torch.equal(
            autograd_gradient(partial(plugged, **hp), b),
            autograd_gradient(partial(written, **hp), b),
        )
        assert not torch.equal(
            autograd_gradient(partial(plugged, **hp), b),
            autograd_gradient(partial(get(base), **hp), b),
        )


@pytest.mark.parametrize("base", ["grpo", "dapo", "gspo", "sapo", "cispo", "gmpo"])
def test_up_changes_nothing_on_policy(base):
    """Not in the paper, and the whole point: all of UP's effect is off-policy drift."""
    o = get(base)
    b = batch(o)
    b = replace(b, logp=b.logp_old)
    torch.testing.assert_close(
        autograd_gradient(upref.up(o), b), autograd_gradient(o, b), rtol=1e-14, atol=0
    )


def test_anchored_differs_in_value_only():
    for name in ("up_dapo", "up_grpo", "up_gspo"):
        a, o = get(name + "_anchored"), get(name)
        b = batch(o)
        torch.testing.assert_close(
            autograd_gradient(a, b), autograd_gradient(o, b), rtol=1e-13, atol=1e-18
        )
        assert abs(a(b) - o(b)) > 0.1


def test_positive_branches_of_up_topr_and_flat_cispo_are_one():
    """w = A: UP+ = TOPR+ = REINFORCE, and CISPO's code with both bounds at 0."""
    r = torch.linspace(0.1, 9, 50, dtype=torch.float64)
    A = torch.full_like(r, 0.7)
    for name in ("up_dapo", "up_grpo", "up_gspo", "topr", "reinforce", "rloo"):
        assert torch.equal(get(name).weight(r, A), A)
    assert torch.equal(get("cispo_verl").weight(r, A, eps_low=0, eps_high=0), A)


def test_up_of_a_name_by_name():
    b = batch(get("sapo"))
    assert torch.equal(get("up(sapo)")(b), upref.up(get("sapo"))(b))
    assert get("up(up(dapo))").name == "up(up(dapo))"
    with pytest.raises(upref.InputError):
        get("up(nothing)")


def test_objectives_survive_pickling():
    import pickle

    for name in ("dapo", "up(sapo)", "up_anchored(gspo)"):
        o = pickle.loads(pickle.dumps(get(name)))
        assert o.name == name and torch.equal(o(batch(o)), get(name)(batch(get(name))))


# ---- sampler corrections -------------------------------------------------------------
CORRECTIONS = (
    "decoupled",
    "tis",
    "tis_seq",
    "mis",
    "mis_seq",
    "icepop",
    "seq_mask",
    "kpop",
)


def three_policies(ratios):
    """Return one response on policy (r = 1, A = 1) whose tokens have these ratios ρ =
    π_old/μ.
    """
    rho = torch.tensor([ratios], dtype=torch.float64)
    lp = torch.full_like(rho, -3.0)
    one = torch.ones_like(rho)
    return upref.Rollouts(lp, lp.clone(), one, one.bool(), logp_sampler=lp - rho.log())


@pytest.mark.parametrize(
    ("name", "hp", "expected"),
    [
        ("decoupled", {}, [0.25, 1.0, 3.0, 8.0]),
        ("tis", {"is_max": 2.0}, [0.25, 1.0, 2.0, 2.0]),
        ("mis", {"is_max": 3.5}, [0.25, 1.0, 3.0, 0.0]),
        ("icepop", {}, [0.0, 1.0, 3.0, 0.0]),
        ("tis_seq", {"is_max": 5.0}, [5.0] * 4),
        ("mis_seq", {"is_max": 5.0}, [0.0] * 4),
        ("mis_seq", {"is_max": 7.0}, [6.0] * 4),
        ("seq_mask", {"is_min": 1.5, "is_max": 1.6}, [1.0] * 4),
        ("seq_mask", {}, [0.0] * 4),
        # KL(Bern(e^-3) ‖ Bern(e^-3/ρ)) = 0.0935, 0, 0.0221, 0.0609; the other way round
        # 0.139, 0, 0.0155, 0.0316
        ("kpop", {"phi": 0.1}, [0.0, 1.0, 3.0, 8.0]),
        ("kpop", {"phi": 0.05}, [0.0, 1.0, 3.0, 0.0]),
    ],
)
def test_the_factor_of_each_correction_by_hand(name, hp, expected):
    # S = 6, s = 1.565
    o, b = get(f"{name}(reinforce)"), three_policies([0.25, 1.0, 3.0, 8.0])
    assert autograd_gradient(partial(o, **hp), b)[0].tolist() == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("base", ["dapo", "gspo"])
def test_up_and_a_correction_commute(name, base):
    one, other = get(f"up({name}({base}))"), get(f"{name}(up({base}))")
    b = batch(one)
    assert torch.equal(autograd_gradient(one, b), autograd_gradient(other, b))
    assert not torch.equal(
        autograd_gradient(one, b), autograd_gradient(get(f"up({base})"), b)
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_nothing_is_corrected_where_the_sampler_is_old(name):
    b = batch(get("dapo"))
    torch.testing.assert_close(
        autograd_gradient(get(f"{name}(dapo)"), replace(b, logp_sampler=b.logp_old)),
        autograd_gradient(get("dapo"), b),
    )


def test_a_correction_needs_the_sampler_and_there_is_one():
    with pytest.raises(upref.InputError, match="needs logp_sampler"):
        get("tis(dapo)")(batch(get("dapo")))
    with pytest.raises(upref.InputError, match="corrects for its sampler already"):
        get("tis(mis(dapo))")


def tis_dapo(log_prob, old_log_prob, advantages, mask, rollout_log_probs=None, cap=2.0):
    """Return DAPO's loss, times the truncated ratio to the sampler if its
    log-probabilities are given.
    """
    r, A = (
        torch.where(mask, log_prob - old_log_prob, 0).exp(),
        torch.where(mask, advantages, 0),
    )
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    if rollout_log_probs is not None:
        J = J * torch.where(mask, old_log_prob - rollout_log_probs, 0).exp().clamp(
            max=cap
        )
    return -J.sum() / mask.sum()


@pytest.mark.nightly
def test_check_knows_three_policies():
    assert upref.check(tis_dapo, "tis(dapo)")
    assert upref.check(tis_dapo, "dapo")  # its argument stays None: two policies
    assert not upref.check(partial(tis_dapo, cap=3.0), "tis(dapo)")
    assert not upref.check(tis_dapo, "icepop(dapo)")

    def required(log_prob, old_log_prob, advantages, mask, vllm_logprobs):
        return tis_dapo(log_prob, old_log_prob, advantages, mask, vllm_logprobs)

    assert upref.check(required, "tis(dapo)") and upref.check(required, "dapo")


# ---- off-policy sequence masking -----------------------------------------------------
def drifted(adv):
    """Return two responses whose mean log(π_old/π_θ) is 0.4 and 0.6, with one masked
    slot each.
    """
    log_r = torch.tensor([[-1.0, 0.2, -9.0], [-1.4, 0.2, 9.0]], dtype=torch.float64)
    old = torch.full_like(log_r, -9.5)
    mask = torch.tensor([[True, True, False]] * 2)
    return upref.Rollouts(
        old + log_r, old, torch.tensor(adv, dtype=torch.float64), mask
    )


@pytest.mark.parametrize(
    ("adv", "delta", "dropped"),
    [
        ([[-1.0], [-1.0]], 0.5, [1]),
        ([[-1.0], [-1.0]], 0.3, [0, 1]),
        ([[-1.0], [-1.0]], 0.7, []),
        ([[1.0], [1.0]], 0.3, []),
        ([[0.0], [-1.0]], 0.3, [1]),
    ],
)
def test_a_bad_response_that_drifted_adds_nothing(adv, delta, dropped):
    b = drifted(adv)
    base, found = (
        get("is_pg").token_weights(b),
        get("opsm(is_pg)").token_weights(b, opsm_delta=delta),
    )
    base[dropped] = 0
    assert torch.equal(found, base)


def test_a_token_with_its_own_advantage_is_masked_by_itself():
    b = drifted([[-1.0, 1.0, 0.0], [-1.0, 1.0, 0.0]])
    alive = get("opsm(is_pg)").token_weights(b, opsm_delta=0.5) != 0
    assert alive.tolist() == [[True, True, False], [False, True, False]]


@pytest.mark.parametrize(("delta", "dropped"), [(0.5, [1]), (0.3, [0, 1]), (0.7, [])])
def test_a_response_of_gspo_that_drifted_adds_nothing(delta, dropped):
    b, wide = drifted([[-1.0], [-1.0]]), dict(eps_low=9.0, eps_high=9.0)
    base = get("gspo").token_weights(b, **wide)
    found = get("opsm(gspo)").token_weights(b, **wide, opsm_delta=delta)
    base[dropped] = 0
    assert torch.equal(found, base)


@pytest.mark.parametrize(
    ("base", "words"),
    [("topr", "product of a response's ratios"), (None, "takes an Objective")],
)
def test_masking_of_responses_needs_the_mean_of_their_ratios(base, words):
    with pytest.raises(upref.InputError, match=words):
        opsm(get(base) if base else None)
