# SPDX-License-Identifier: Apache-2.0
"""The plug-in computes the reference, bit for bit, and adds up over micro-batches and
ranks as verl's own losses do.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from plugged import RUNS, call, config, core_algos, forget  # noqa: F401

import upref
from upref import InputError, aggregate
from upref.replay import clipping
from upref.rollouts import autograd_gradient
from upref.weights.batches import batch, typical_batch
from upref_frameworks.audits.compare import FaultEffect
from upref_frameworks.audits.recipe import _effects
from upref_frameworks.parity import ParityError
from upref_frameworks.verl import training as verl_plugin
from upref_frameworks.verl.losses import verl_loss

pytestmark = pytest.mark.verl
WHOLE = [n for n in RUNS if not upref.get(n).batch_coupled]


def gradient(name, b, c=None, **kw):
    return autograd_gradient(lambda b: call(name, b, c, **kw)[0], b)


def same(x, y, tol=1e-12):
    assert x.isfinite().all() and y.isfinite().all()
    assert (x - y).abs().max() <= tol * y.abs().max()


# ---- the same function ---------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_reference_bit_for_bit(name):
    o = upref.get(name)
    b = replace(batch(o), group=None)
    loss, metrics = call(name, b)
    assert torch.equal(loss, o.loss(b)) and torch.equal(
        gradient(name, b), -autograd_gradient(o, b)
    )
    assert (
        all(k.startswith("upref/") and type(v) is float for k, v in metrics.items())
        and metrics
    )


@pytest.mark.parametrize("name", ["up_dapo", "up_grpo", "up_gspo", "gppo"])
def test_the_recipe_measures_what_the_plug_in_computes(name):
    """Its typical batch, in the loss that verl calls: the reference without prompts,
    and in micro-batches the same.
    """
    o, b = upref.get(name), replace(typical_batch(), group=None)
    assert torch.equal(gradient(name, b), -autograd_gradient(o, b))
    unprompted, split = _effects(o)
    assert (
        unprompted
        == FaultEffect.between(
            -gradient(name, b), autograd_gradient(o, typical_batch())
        )
        and split.change < 1e-9
    )


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_against_verls_own_losses_through_verls_own_agg_loss(name):
    """Same objective, same settings, ours and verl's: `upref audit verl` does this
    thoroughly.
    """
    ours, agg, actor, hp = {
        "vanilla": ("dapo", "token-mean", {"clip_ratio_high": 0.28}, {"c": 3.0}),
        "gspo": ("gspo", "seq-mean-token-mean", {}, {"eps_low": 0.2, "eps_high": 0.2}),
        "cispo": ("cispo_verl", "token-mean", {}, {}),
        "sapo": ("sapo", "seq-mean-token-mean", {}, {}),
    }[name]
    b = replace(batch(upref.get(ours), edges=(-1e-9, 1e-9), **hp), group=None)
    same(
        -gradient(ours, b, config(hp, agg)),
        -autograd_gradient(lambda x: verl_loss(name, x, agg, **actor), b),
        1e-9,
    )


@pytest.mark.parametrize("name", ["up_dapo", "up_grpo", "up_gspo", "gmpo", "topr"])
def test_hyperparameters_and_is_weights_reach_the_reference(name):
    """With a bound of 0.1 and weights that are NaN in masked slots, loss and gradient
    are the reference's, bit for bit.
    """
    o = upref.get(name)
    b = replace(batch(o), group=None)
    key = next((k for k in o.hyperparameters if k.startswith("eps")), None)
    hp = {key: 0.1} if key else {}
    w = (
        torch.rand(b.mask.shape, dtype=b.logp.dtype)
        .masked_fill(~b.mask, float("nan"))
        .requires_grad_()
    )

    def weighted_objective(b):
        return o.J(b.logp, b.logp_old, b.adv, b.mask, is_weights=w, **hp)

    loss, _ = call(name, b, config(hp), rollout_is_weights=w)
    assert torch.equal(loss, -weighted_objective(b)) and not loss.requires_grad
    assert torch.equal(
        gradient(name, b, config(hp), rollout_is_weights=w),
        -autograd_gradient(weighted_objective, b),
    )
    assert not torch.equal(loss, call(name, b)[0])


def test_is_weights_multiply_token_terms_as_in_verl():
    """The gradient of cispo_verl with weights is that of verl's own CISPO."""
    b = replace(batch(upref.get("cispo_verl")), group=None)
    w = torch.rand(b.mask.shape, dtype=b.logp.dtype)

    def theirs(b):
        """Return the loss of verl's own CISPO on a batch."""
        return core_algos.get_policy_loss_fn("cispo")(
            b.logp_old.nan_to_num(),
            b.logp.nan_to_num(),
            b.adv.nan_to_num(),
            b.mask,
            "token-mean",
            config(),
            w,
        )[0]

    same(
        gradient("cispo_verl", b, rollout_is_weights=w),
        autograd_gradient(theirs, b),
        1e-9,
    )


def test_up_of_anything_and_objectives_of_ones_own():
    o = upref.up(upref.get("sapo"))
    f = verl_plugin.register(o)
    try:
        b = batch(o)
        assert core_algos.get_policy_loss_fn("upref/up(sapo)") is f and torch.equal(
            call("up(sapo)", b)[0], o.loss(b)
        )
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["upref/up(sapo)"]


# ---- verl's contract of agg_loss -----------------------------------------------------


def blank_row(b, i):
    """Return the batch with response i without a token, as verl pads batches."""
    mask = b.mask.clone()
    mask[i] = False
    x = object.__new__(type(b))  # Rollouts itself refuses such rows
    x.__dict__.update(b.__dict__, mask=mask)
    return x


def rows(b, i):
    """Return some rows of a batch, without validating them."""
    x = object.__new__(type(b))
    x.__dict__.update(
        {k: v[i] if isinstance(v, torch.Tensor) else v for k, v in b.__dict__.items()}
    )
    return x


@pytest.mark.parametrize("name", WHOLE)
def test_micro_batches_and_ranks_add_up(name):
    """1, 2, 4, 8 micro-batches on 1 or 2 ranks whose gradients verl averages; responses
    without tokens included.
    """
    b = replace(batch(upref.get(name), thin=3), group=None)
    b = blank_row(blank_row(b, 0), len(b.mask) // 2)
    info = {
        "batch_num_tokens": int(b.mask.sum()),
        "global_batch_size": len(b.mask),
        "loss_scale_factor": None,
    }
    whole = gradient_of(name, b, info | {"dp_size": 1})
    assert whole.abs().max() > 0
    for ranks in (1, 2):
        for micro in (1, 2, 4, 8):
            parts = torch.arange(len(b.mask)).tensor_split(ranks * micro)
            total = [
                gradient_of(name, rows(b, i), info | {"dp_size": ranks}) / ranks
                for i in parts
            ]
            same(torch.cat(total), whole)


def gradient_of(name, b, info):
    """Return the gradient by log_prob of the plug-in's loss on a batch."""
    x = b.logp.clone().requires_grad_()
    y = object.__new__(type(b))
    y.__dict__.update(b.__dict__, logp=x)
    (g,) = torch.autograd.grad(call(name, y, config(info=info))[0], x)
    return g


@pytest.mark.parametrize(
    "agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
)
@pytest.mark.parametrize(
    "info", [{}, {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 77}]
)
def test_totals_are_those_of_verls_agg_loss(agg, info):
    """Fully masked responses count only in verl's own global_batch_size."""
    mask = batch(upref.get("dapo"), thin=5).mask
    mask[1] = False
    x = torch.rand(mask.shape, dtype=torch.float64)
    totals, dp_size = verl_plugin.global_totals(info, mask)
    assert aggregate(x, mask, agg, totals=totals).item() * dp_size == pytest.approx(
        core_algos.agg_loss(x, mask, agg, **info).item(), rel=1e-12
    )


def test_ranks_without_the_counts_are_refused():
    with pytest.raises(InputError, match="counts of all ranks"):
        call(
            "dapo",
            batch(upref.get("dapo"), thin=9),
            config(info={"dp_size": 2, "batch_num_tokens": 5}),
        )


# ---- what verl hands over ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.int32, torch.float32])
@pytest.mark.parametrize("name", ["up_dapo", "up_gspo", "gmpo"])
def test_mask_dtypes(name, dtype):
    b = replace(batch(upref.get(name)), group=None)
    loss, metrics = call(name, b, response_mask=b.mask.to(dtype))
    assert torch.equal(loss, call(name, b)[0]) and metrics == call(name, b)[1]


@pytest.mark.parametrize("name", RUNS)
def test_masked_slots_may_hold_anything(name):
    b = replace(batch(upref.get(name), thin=3), group=None)
    expected = gradient(name, b)
    for poison in (float("nan"), float("inf"), -float("inf"), 0.0):

        def fill(x):
            return x.masked_fill(~b.mask, poison)  # noqa: B023

        c = replace(b, logp=fill(b.logp), logp_old=fill(b.logp_old), adv=fill(b.adv))
        assert torch.equal(gradient(name, c), expected)
        assert call(name, c)[1] == call(name, b)[1]


@pytest.mark.parametrize("name", RUNS)
def test_a_micro_batch_without_tokens_keeps_the_metrics_keys(name):
    b = replace(batch(upref.get(name), thin=9), group=None)
    x = torch.randn(2, 3).neg().requires_grad_()
    none = torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics = core_algos.get_policy_loss_fn(f"upref/{name}")(
        x, x, x.detach(), none, "token-mean", config()
    )
    loss.backward()
    keys = {k for k in metrics if "parity" not in k}
    assert loss == 0 and (x.grad == 0).all() and keys == call(name, b)[1].keys()


@pytest.mark.parametrize("name", ["up_dapo", "gspo"])
def test_metrics_have_no_gradient_and_cost_none(name):
    b = replace(batch(upref.get(name)), group=None)
    x = b.logp.clone().requires_grad_()
    for hp in ({}, {"eps_low": 1e-4}):
        _, metrics = call(name, replace(b, logp=x), config(hp))
        assert metrics == {
            f"upref/{k}": v for k, v in clipping(upref.get(name), b, **hp).items()
        }


@pytest.mark.parametrize("name", ["gspo", "up_gspo", "topr", "gmpo"])
def test_token_advantages_are_refused_where_a_response_has_one(name):
    lp, A = (
        torch.full((2, 3), -1.0),
        torch.tensor([[1.0, -3.0, -3.0], [float("nan"), 2.0, 2.0]]),
    )
    mask = torch.tensor([[True, True, True], [False, True, True]])
    args = dict(
        old_log_prob=lp,
        log_prob=lp.clone().requires_grad_(),
        response_mask=mask,
        config=config(),
    )
    loss = core_algos.get_policy_loss_fn(f"upref/{name}")
    with pytest.raises(InputError, match="one advantage per response"):
        loss(advantages=A, **args)
    assert loss(advantages=torch.where(A < 0, 1.0, A), **args)[0].isfinite()


def test_a_mini_batch_that_was_all_rejected_is_worth_nothing():
    b = batch(upref.get("dapo"))
    nothing = dict(batch_num_tokens=0, global_batch_size=0, dp_size=1)
    b = replace(
        b,
        logp=b.logp.nan_to_num(),
        logp_old=b.logp_old.nan_to_num(),
        adv=b.adv.nan_to_num(),
    )
    loss, _ = call(
        "dapo", b, config(info=nothing), response_mask=torch.zeros_like(b.mask)
    )
    assert loss == 0


def test_verl_loss_of_the_check_package_drives_it_too():
    b = replace(batch(upref.get("up_dapo"), thin=9), group=None)
    assert torch.equal(verl_loss("upref/up_dapo", b), upref.get("up_dapo").loss(b))


# ---- the comparison with the reference while it trains -------------------------------


def test_a_loss_that_is_not_the_objective_stops_the_run(monkeypatch):
    """Change the objective's J by a thousandth after the first micro-batch."""
    o = upref.get("up_dapo")
    b = batch(o, thin=9)
    x = b.logp.float().clone().requires_grad_()
    y = object.__new__(type(b))
    y.__dict__.update(
        b.__dict__, logp=x, logp_old=b.logp_old.float(), adv=b.adv.float(), group=None
    )
    assert call("up_dapo", y)[0].requires_grad
    right = type(o).J
    monkeypatch.setattr(type(o), "J", lambda *a, **kw: 1.001 * right(*a, **kw))
    with pytest.raises(
        ParityError,
        match=r"upref/up_dapo is not what trains: in micro-batch 2 .*float32",
    ):
        call("up_dapo", y)


def test_how_often_it_compares_is_read_from_the_config():
    b = replace(batch(upref.get("up_dapo"), thin=9), group=None)
    c = config({"eps_low": 0.1, "parity": {"first": 1, "every": 3}})
    for _ in range(7):
        call("up_dapo", b, c)
    (monitor,) = verl_plugin._monitors.values()
    assert (monitor.seen, monitor.checked) == (7, 3)  # the first, third and sixth
    with pytest.raises(
        InputError, match="no setting 'evry'; it takes: first, every, on_fail"
    ):
        call("up_dapo", b, config({"parity": {"evry": 3}}))


# ---- what a GPU does -----------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:]
)
@pytest.mark.parametrize("name", RUNS)
def test_parity_inside_verls_bf16_autocast(name, dtype):
    """verl's engines call the loss inside torch.autocast(bfloat16), its
    log-probabilities in float32 or bfloat16.
    """
    b = replace(batch(upref.get(name), thin=3), group=None)

    def cast(x):
        return x.to(dtype)

    x = object.__new__(type(b))
    x.__dict__.update(
        b.__dict__,
        logp=cast(b.logp).requires_grad_(),
        logp_old=cast(b.logp_old),
        adv=cast(b.adv),
    )
    with torch.autocast("cpu", torch.bfloat16):
        # compares itself with the reference: `call` asserts that nothing was found
        loss, _ = call(name, x)
        plain = upref.get(name).J(x.logp, x.logp_old, x.adv, x.mask)
    assert loss.isfinite() and torch.equal(loss, -plain)
    loss.backward()
    assert x.logp.grad.isfinite().all()


@pytest.mark.parametrize("name", RUNS)
def test_a_log_probability_above_0_is_rounding(name):
    """Online softmax kernels give +1e-7, also as the old one."""
    b = replace(batch(upref.get(name), thin=5), group=None)
    lp, old = (x.float().clone() for x in (b.logp, b.logp_old))
    i = b.mask.any(1).nonzero()[:2, 0]
    t = b.mask[i].int().argmax(1)
    lp[i, t] = old[i, t] = 1.2e-7
    x = object.__new__(type(b))
    x.__dict__.update(
        b.__dict__, logp=lp.requires_grad_(), logp_old=old, adv=b.adv.float()
    )
    loss, _ = call(name, x)
    loss.backward()
    assert loss.isfinite() and lp.grad.isfinite().all()


def test_one_nan_does_not_end_a_run_of_days():
    """verl leaves out a step whose gradient is not finite; the loss must get that far."""
    b = replace(batch(upref.get("up_dapo"), thin=9), group=None)
    lp = b.logp.float().clone()
    i = int(b.mask.any(1).nonzero()[0])
    lp[i, int(b.mask[i].nonzero()[0])] = float("nan")
    x = object.__new__(type(b))
    x.__dict__.update(
        b.__dict__,
        logp=lp.requires_grad_(),
        logp_old=b.logp_old.float(),
        adv=b.adv.float(),
    )
    with pytest.raises(ParityError):
        call("up_dapo", x, config({"parity": {"on_fail": "stop"}}))
    loss, metrics = core_algos.get_policy_loss_fn("upref/up_dapo")(
        old_log_prob=x.logp_old, log_prob=x.logp, advantages=x.adv, response_mask=x.mask, loss_agg_mode="token-mean",
        config=config({"parity": {"on_fail": "warn"}}), rollout_is_weights=None,
    )  # fmt: skip
    assert loss.isnan() and metrics["upref/parity_alarms"] == 1
    assert all(
        v == v and abs(v) < float("inf") for k, v in metrics.items() if "parity" in k
    )


def test_verls_rollout_correction_is_the_samplers_correction():
    """verl's own weights, on the rows of the regime grid; the plug-in refuses what it
    cannot be given.
    """
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_correction_weights as theirs,
    )

    b = batch(upref.get("tis(dapo)"))
    log_rho = torch.where(b.mask, b.logp_old - b.logp_sampler, 0)
    for name, level in (("tis", "token"), ("tis_seq", "sequence")):
        w, _ = theirs(
            log_rho, b.mask.double(), rollout_is=level, rollout_is_threshold=2.0
        )
        ours = upref.get(f"{name}(dapo)").factors(b)
        torch.testing.assert_close(w[b.mask], ours[b.mask], rtol=1e-12, atol=0)
    with pytest.raises(InputError, match="verl does not pass to a loss"):
        verl_plugin.hyperparameters(upref.get("tis(dapo)"), {})


@pytest.mark.nightly
def test_upref_hidden_stands_for_verls_fused_heads():
    """Under UPREF_HIDDEN=1 verl's fused head is upref's, with verl's numbers and
    gradients.
    """
    code = """
import torch, upref_frameworks.verl.training
from verl.utils.experimental import torch_functional as verls
h, W = torch.randn(1, 9, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
ids = torch.arange(9)[None] % 7
def step(lp, H):
    return lp, H, *torch.autograd.grad((lp.sin() + 0.1 * H).sum(), (h, W))
own = step(*verls.FusedLinearForPPOFunction.apply(h, W, ids, 0.7, 512))
ours = step(*verls.FusedLinearForPPO()(hidden_states=h, vocab_weights=W, input_ids=ids, temperature=0.7))
assert verls.FusedLinearForPPO.forward.__module__ == "upref_frameworks.hidden"
for x, y in zip(ours, own): torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
"""
    env = os.environ | {"UPREF_HIDDEN": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
