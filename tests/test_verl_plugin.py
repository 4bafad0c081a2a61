# SPDX-License-Identifier: Apache-2.0
"""The plug-in computes the reference, bit for bit, and adds up over micro-batches and ranks as verl's own losses do."""

import importlib.util
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import upref
from upref import InputError, Totals, aggregate
from upref.check.regimes import batch, grad
from upref.check.verl import verl_loss, verl_weights
from upref.diagnostics import diagnose
from upref.parity import ParityError

NEED = "`repro/venv.sh verl` installs what verl's losses need"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEED)
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

from upref import verl_plugin  # noqa: E402

pytestmark = pytest.mark.verl
RUNS = [n for n in upref.names() if n != "aspo_code"]  # verl hands no entropy to a loss
WHOLE = [n for n in RUNS if not upref.get(n).coupled]


def config(hp=None, agg="token-mean", info=None, **fields):
    section = verl_plugin.PolicyLoss(upref=hp) if hp is not None else PolicyLossConfig()
    fields |= {"policy_loss": section, "loss_agg_mode": agg}
    c = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
    c.global_batch_info.update(info or {})
    return c


def call(name, b, c=None, **kw):
    c = c or config()
    args = dict(old_log_prob=b.logp_old, log_prob=b.logp, advantages=b.adv, response_mask=b.mask)
    loss, metrics = core_algos.get_policy_loss_fn(f"upref/{name}")(
        **args | {"loss_agg_mode": c.loss_agg_mode, "config": c, "rollout_is_weights": None} | kw
    )
    so_far = {k: v for k, v in metrics.items() if k.startswith("upref/parity_")}  # not of this batch alone
    assert len(so_far) == 2 and so_far["upref/parity_of_bound"] <= 1
    return loss, {k: v for k, v in metrics.items() if k not in so_far}


def gradient(name, b, c=None, **kw):
    return grad(lambda b: call(name, b, c, **kw)[0], b)


def same(x, y, tol=1e-12):
    assert x.isfinite().all() and y.isfinite().all()
    assert (x - y).abs().max() <= tol * y.abs().max()


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(verl_plugin, "_said", set())
    monkeypatch.setattr(verl_plugin, "_monitors", {})


# ---- the same function ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_reference_bit_for_bit(name):
    o = upref.get(name)
    b = replace(batch(o), group=None)
    loss, metrics = call(name, b)
    assert torch.equal(loss, o.loss(b)) and torch.equal(gradient(name, b), -grad(o, b))
    assert all(k.startswith("upref/") and type(v) is float for k, v in metrics.items()) and metrics


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "sapo"])
def test_against_verls_own_losses_through_verls_own_agg_loss(name):
    """Same objective, same settings, ours and verl's: `upref audit verl` does this thoroughly."""
    ours, agg, actor, hp = {
        "vanilla": ("dapo", "token-mean", {"clip_ratio_high": 0.28}, {"c": 3.0}),
        "gspo": ("gspo", "seq-mean-token-mean", {}, {"eps_low": 0.2, "eps_high": 0.2}),
        "cispo": ("cispo_verl", "token-mean", {}, {}),
        "sapo": ("sapo", "seq-mean-token-mean", {}, {}),
    }[name]
    b = replace(batch(upref.get(ours), edges=(-1e-9, 1e-9), **hp), group=None)
    same(-gradient(ours, b, config(hp, agg)), verl_weights(name, b, agg, **actor), 1e-9)


@pytest.mark.parametrize("name", ["up_dapo", "up_grpo", "up_gspo", "gmpo", "topr"])
def test_hyperparameters_and_is_weights_reach_the_reference(name):
    o = upref.get(name)
    b = replace(batch(o), group=None)
    key = next((k for k in o.hyperparameters if k.startswith("eps")), None)
    hp = {key: 0.1} if key else {}
    w = torch.rand(b.mask.shape, dtype=b.logp.dtype).masked_fill(~b.mask, float("nan")).requires_grad_()
    f = lambda b: o.J(b.logp, b.logp_old, b.adv, b.mask, is_weights=w, **hp)
    loss, _ = call(name, b, config(hp), rollout_is_weights=w)
    assert torch.equal(loss, -f(b)) and not loss.requires_grad
    assert torch.equal(gradient(name, b, config(hp), rollout_is_weights=w), -grad(f, b))
    assert not torch.equal(loss, call(name, b)[0])


def test_is_weights_multiply_token_terms_as_in_verl():
    b = replace(batch(upref.get("cispo_verl")), group=None)
    w = torch.rand(b.mask.shape, dtype=b.logp.dtype)
    theirs = lambda b: core_algos.get_policy_loss_fn("cispo")(
        b.logp_old.nan_to_num(), b.logp.nan_to_num(), b.adv.nan_to_num(), b.mask, "token-mean", config(), w
    )[0]
    same(gradient("cispo_verl", b, rollout_is_weights=w), grad(theirs, b), 1e-9)


def test_up_of_anything_and_objectives_of_ones_own():
    o = upref.up(upref.get("sapo"))
    f = verl_plugin.register(o)
    try:
        b = batch(o)
        assert core_algos.get_policy_loss_fn("upref/up(sapo)") is f and torch.equal(call("up(sapo)", b)[0], o.loss(b))
    finally:
        del core_algos.POLICY_LOSS_REGISTRY["upref/up(sapo)"]


# ---- verl's contract of agg_loss -----------------------------------------------------------------------------------


def blank_row(b, i):
    """Response i without a token, as verl pads batches."""
    mask = b.mask.clone()
    mask[i] = False
    x = object.__new__(type(b))  # Rollouts itself refuses such rows
    x.__dict__.update(b.__dict__, mask=mask)
    return x


def rows(b, i):
    x = object.__new__(type(b))
    x.__dict__.update({k: v[i] if isinstance(v, torch.Tensor) else v for k, v in b.__dict__.items()})
    return x


@pytest.mark.parametrize("name", WHOLE)
def test_micro_batches_and_ranks_add_up(name):
    """1, 2, 4, 8 micro-batches on 1 or 2 ranks whose gradients verl averages; responses without tokens included."""
    b = replace(batch(upref.get(name), thin=3), group=None)
    b = blank_row(blank_row(b, 0), len(b.mask) // 2)
    info = {"batch_num_tokens": int(b.mask.sum()), "global_batch_size": len(b.mask), "loss_scale_factor": None}
    whole = gradient_of(name, b, info | {"dp_size": 1})
    assert whole.abs().max() > 0
    for ranks in (1, 2):
        for micro in (1, 2, 4, 8):
            parts = torch.arange(len(b.mask)).tensor_split(ranks * micro)
            total = [gradient_of(name, rows(b, i), info | {"dp_size": ranks}) / ranks for i in parts]
            same(torch.cat(total), whole)


def gradient_of(name, b, info):
    x = b.logp.clone().requires_grad_()
    y = object.__new__(type(b))
    y.__dict__.update(b.__dict__, logp=x)
    (g,) = torch.autograd.grad(call(name, y, config(info=info))[0], x)
    return g


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 1000, "global_batch_size": 77}])
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
        call("dapo", batch(upref.get("dapo"), thin=9), config(info={"dp_size": 2, "batch_num_tokens": 5}))


# ---- what verl hands over ------------------------------------------------------------------------------------------


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
        fill = lambda x: x.masked_fill(~b.mask, poison)  # noqa: B023
        c = replace(b, logp=fill(b.logp), logp_old=fill(b.logp_old), adv=fill(b.adv))
        assert torch.equal(gradient(name, c), expected)
        assert call(name, c)[1] == call(name, b)[1]


@pytest.mark.parametrize("name", RUNS)
def test_a_micro_batch_without_tokens_costs_nothing_and_keeps_the_metrics_keys(name):
    b = replace(batch(upref.get(name), thin=9), group=None)
    x = torch.randn(2, 3).neg().requires_grad_()
    none = torch.zeros(2, 3, dtype=torch.bool)
    loss, metrics = core_algos.get_policy_loss_fn(f"upref/{name}")(x, x, x.detach(), none, "token-mean", config())
    loss.backward()
    keys = {k for k in metrics if "parity" not in k}
    assert loss == 0 and (x.grad == 0).all() and keys == call(name, b)[1].keys()


@pytest.mark.parametrize("name", ["up_dapo", "gspo"])
def test_metrics_have_no_gradient_and_cost_none(name):
    b = replace(batch(upref.get(name)), group=None)
    x = b.logp.clone().requires_grad_()
    for hp in ({}, {"eps_low": 1e-4}):
        _, metrics = call(name, replace(b, logp=x), config(hp))
        assert metrics == {f"upref/{k}": v for k, v in diagnose(upref.get(name), b, **hp).items()}


# ---- configuration -------------------------------------------------------------------------------------------------


def test_verls_defaults_do_not_leak():
    """ActorConfig always has clip_ratio_low = high = 0.2 and clip_ratio_c = 3."""
    for name in RUNS:
        o = upref.get(name)
        assert verl_plugin.hyperparameters(o, config()) == {k: v for k, v in o.hyperparameters.items() if k != "beta"}


def test_hyperparameters_come_from_their_own_section_and_are_logged_once(caplog):
    b = batch(upref.get("up_dapo"), thin=9)
    for _ in range(3):
        call("up_dapo", b, config({"c": 10.0}))
    said = [r.getMessage() for r in caplog.records if "eps_low" in r.getMessage()]
    assert len(said) == 1 and "eps_low=0.2 (default), c=10.0 (policy_loss.upref)" in said[0]


@pytest.mark.parametrize(
    ("name", "c", "match"),
    [
        ("up_dapo", lambda: config({"eps_high": 0.28}), "no hyperparameter 'eps_high'"),
        ("up_dapo", lambda: config({"eps_low": "0.2"}), "eps_low must be"),
        ("up_grpo", lambda: config({"beta": 0.1}), "use_kl_loss"),
        ("up_dapo", lambda: config(clip_ratio_c=10.0), "actor.clip_ratio_c=10.0 and uses c=None"),
        ("gspo", lambda: config(clip_ratio_low=1e-4), "actor.clip_ratio_low=0.0001 and uses eps_low=0.0003"),
        ("sapo", lambda: config(tau_neg=1.1), "actor.tau_neg=1.1"),
        ("aspo_code", config, "entropy per token, which verl does not"),
    ],
)
def test_what_nothing_would_read_is_refused(name, c, match):
    with pytest.raises(InputError, match=match):
        call(name, batch(upref.get(name), thin=9), c())


def test_a_verl_key_that_agrees_or_is_overridden_or_has_no_counterpart_is_fine():
    b = batch(upref.get("dapo"), thin=9)
    call("dapo", b, config(clip_ratio_high=0.28))
    call("dapo", b, config({"c": 5.0}, clip_ratio_c=10.0))
    call("up_dapo", b, config(clip_ratio_high=0.28))


def test_no_config():
    with pytest.raises(InputError, match="config"):
        call("up_dapo", batch(upref.get("up_dapo"), thin=9), config=None)


def test_another_aggregation_is_warned_of_once_and_ignored(caplog):
    caplog.set_level(logging.WARNING)
    b = replace(batch(upref.get("up_gspo"), thin=9), group=None)
    own = call("up_gspo", b, config(agg="seq-mean-token-mean"))[0]
    assert not caplog.records
    for agg in ("token-mean", "token-mean", "seq-mean-token-sum", "token-mean"):
        assert torch.equal(call("up_gspo", b, config(agg=agg))[0], own)
    assert [r.getMessage().count("seq-mean-token-mean") for r in caplog.records] == [2, 2]
    call("up_grpo", b, config(agg="token-mean"))
    assert len(caplog.records) == 3


def test_every_aggregation_has_a_name_verl_accepts(caplog):
    for name in RUNS:
        o = upref.get(name)
        agg = verl_plugin.VERL_AGG.get((o.level, o.agg), o.agg)
        call(name, batch(o, thin=9), config(agg=agg))  # ActorConfig refuses unknown names
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---- the comparison with the reference while it trains -------------------------------------------------------------


def test_a_loss_that_is_not_the_objective_stops_the_run(monkeypatch):
    o = upref.get("up_dapo")
    b = batch(o, thin=9)
    x = b.logp.float().clone().requires_grad_()
    y = object.__new__(type(b))
    y.__dict__.update(b.__dict__, logp=x, logp_old=b.logp_old.float(), adv=b.adv.float(), group=None)
    assert call("up_dapo", y)[0].requires_grad
    right = type(o).J
    monkeypatch.setattr(type(o), "J", lambda *a, **kw: 1.001 * right(*a, **kw))
    with pytest.raises(ParityError, match=r"upref/up_dapo is not what trains: in micro-batch 2 .*float32"):
        call("up_dapo", y)


def test_how_often_it_compares_is_read_beside_the_hyperparameters(tmp_path):
    b = replace(batch(upref.get("up_dapo"), thin=9), group=None)
    c = config({"eps_low": 0.1, "parity": {"first": 1, "every": 3, "dump": str(tmp_path)}})
    for _ in range(7):
        call("up_dapo", b, c)
    assert sorted(p.stem.rpartition("-")[2] for p in tmp_path.glob("up_dapo-*.pt")) == ["1", "3", "6"]
    assert torch.load(next(tmp_path.glob("*.pt")), weights_only=True)["hp"] == {"eps_low": 0.1, "c": None}
    with pytest.raises(InputError, match="no setting 'evry'; it takes: first, every, dump"):
        call("up_dapo", b, config({"parity": {"evry": 3}}))


# ---- through verl --------------------------------------------------------------------------------------------------

CONFIG = """
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    c = compose("ppo_trainer", overrides=[
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=upref/up_dapo",
        "actor_rollout_ref.actor.policy_loss._target_=upref.verl_plugin.PolicyLoss",
        "+actor_rollout_ref.actor.policy_loss.upref={eps_low: 0.1, c: 10}",
    ])
actor = omega_conf_to_dataclass(c.actor_rollout_ref.actor)
"""
RUN = """
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
f = get_policy_loss_fn(actor.policy_loss.loss_mode)
x = torch.full((1, 2), -1.0)
loss, _ = f(old_log_prob=x, log_prob=x, advantages=x, response_mask=x < 0, loss_agg_mode="token-mean", config=actor,
            rollout_is_weights=None)
print("loss", loss.item())
"""


def python(code, **env):
    root = str(Path(upref.__file__).parents[1])
    path = os.pathsep.join([root, *env.pop("path", [])])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={k: v for k, v in os.environ.items() if not k.startswith("VERL_")} | {"PYTHONPATH": path} | env,
    )  # fmt: skip


def test_a_fresh_verl_finds_it_by_VERL_USE_EXTERNAL_MODULES_and_reads_the_configuration():
    done = python(CONFIG + RUN, VERL_USE_EXTERNAL_MODULES="upref.verl_plugin")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("loss ")[1]) == 1.0  # A = -1 at r = 1: J = r A = -1
    assert "eps_low=0.1 (policy_loss.upref), c=10 (policy_loss.upref)" in done.stderr


def test_a_fresh_verl_finds_it_by_entry_point(tmp_path):
    """With the metadata an installed upref has; the name of the group is verl's."""
    info = tmp_path / "upref_rl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: upref-rl\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nupref = upref.verl_plugin\n")
    ask = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as g; print(g('upref/up_dapo').__name__)"
    done = python(ask, path=[str(tmp_path)])
    assert done.returncode == 0 and done.stdout.strip() == "upref/up_dapo", done.stderr
    done = python("import sys, upref.check.audit; assert 'verl' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_without_verl_one_sentence():
    done = python("import sys; sys.modules['verl'] = None\nimport upref.verl_plugin")
    assert done.stderr.strip().splitlines()[-1].startswith("ImportError: upref.verl_plugin needs verl")


def test_end_to_end_through_verls_ppo_loss(monkeypatch):
    """verl's own ppo_loss on a nested TensorDict: shift by one token, padding, global counts, KL and entropy added."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    for unused in ("datasets", "pandas"):  # imported beside the loss, to read data sets
        if importlib.util.find_spec(unused) is None:
            monkeypatch.setitem(sys.modules, unused, MagicMock())
    from verl.workers.utils.losses import ppo_loss

    torch.manual_seed(0)
    prompts, responses = (3, 2, 4), (2, 5, 1)
    nested = lambda lengths, make: torch.nested.as_nested_tensor([make(n) for n in lengths], layout=torch.jagged)
    floats = lambda n: -torch.rand(n, dtype=torch.float64)
    mask = nested(responses, lambda n: torch.ones(n, dtype=torch.long))
    fields = {
        "prompts": nested(prompts, lambda n: torch.ones(n, dtype=torch.long)),
        "responses": nested(responses, lambda n: torch.ones(n, dtype=torch.long)),
        "response_mask": mask,
        "old_log_probs": nested(responses, floats),
        "ref_log_prob": nested(responses, floats),
        "advantages": nested(responses, lambda n: torch.randn((), dtype=torch.float64).expand(n).clone()),
    }
    data = TensorDict(fields, batch_size=[3])
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=20, global_batch_size=6)
    flat = -torch.rand(sum(prompts) + sum(responses), dtype=torch.float64)
    flat.requires_grad_()
    offsets = torch.tensor([0, *(p + r for p, r in zip(prompts, responses, strict=True))]).cumsum(0)
    log_probs = torch.nested.nested_tensor_from_jagged(flat, offsets)
    actor = replace_loss_mode(config({"eps_low": 0.1}, use_kl_loss=True, kl_loss_coef=0.5))
    loss, metrics = ppo_loss(actor, {"log_probs": log_probs}, data)
    loss.backward()

    ends = offsets[1:].tolist()
    pieces = [flat.detach()[e - r - 1 : e - 1] for e, r in zip(ends, responses, strict=True)]
    pad = lambda xs: torch.nn.utils.rnn.pad_sequence(list(xs), batch_first=True)
    lp = pad(pieces).requires_grad_()
    old, ref, A = (pad(fields[k].unbind()) for k in ("old_log_probs", "ref_log_prob", "advantages"))
    m = pad(mask.unbind()).bool()
    J = upref.get("up_dapo").J(lp, old, A, m, totals=Totals(20, 6, 1, 20), eps_low=0.1)
    kl = core_algos.kl_penalty(lp, ref, "low_var_kl")
    expected = -2 * J + 0.5 * core_algos.agg_loss(kl, m, "token-mean", 2, 20, 6)
    (g,) = torch.autograd.grad(expected, lp)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    same(torch.cat([flat.grad[e - r - 1 : e - 1] for e, r in zip(ends, responses, strict=True)]), g[m], 1e-12)
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(-2 * J.item(), rel=1e-6)
    assert "upref/alive" in metrics


def replace_loss_mode(c):
    c.policy_loss.__dict__["loss_mode"] = "upref/up_dapo"  # verl's configurations are frozen
    return c


def test_verl_loss_of_the_check_package_drives_it_too():
    b = replace(batch(upref.get("up_dapo"), thin=9), group=None)
    assert torch.equal(verl_loss("upref/up_dapo", b), upref.get("up_dapo").loss(b))


@pytest.mark.parametrize("name", ["gspo", "up_gspo", "topr", "gmpo"])
def test_token_advantages_are_refused_where_a_response_has_one(name):
    lp, A = torch.full((2, 3), -1.0), torch.tensor([[1.0, -3.0, -3.0], [float("nan"), 2.0, 2.0]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    args = dict(old_log_prob=lp, log_prob=lp.clone().requires_grad_(), response_mask=mask, config=config())
    loss = core_algos.get_policy_loss_fn(f"upref/{name}")
    with pytest.raises(InputError, match="one advantage per response"):
        loss(advantages=A, **args)
    assert loss(advantages=torch.where(A < 0, 1.0, A), **args)[0].isfinite()


def test_a_mini_batch_that_was_all_rejected_is_worth_nothing():
    b = batch(upref.get("dapo"))
    nothing = dict(batch_num_tokens=0, global_batch_size=0, dp_size=1)
    b = replace(b, logp=b.logp.nan_to_num(), logp_old=b.logp_old.nan_to_num(), adv=b.adv.nan_to_num())
    loss, _ = call("dapo", b, config(info=nothing), response_mask=torch.zeros_like(b.mask))
    assert loss == 0


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("dapo", "clip_ratio", 0.3), ("cispo", "clip_ratio_low", 0.3), ("aspo", "clip_ratio_c", 10.0)],
)
def test_a_key_of_verls_that_nothing_would_read_stops_the_run(name, field, value):
    if name == "cispo":  # it has no lower bound to contradict
        call(name, batch(upref.get(name)), config(**{field: value}))
        return
    with pytest.raises(InputError, match=f"does not read actor.{field}"):
        call(name, batch(upref.get(name)), config(**{field: value}))
