# SPDX-License-Identifier: Apache-2.0
"""What the plug-in reads of verl's configuration and what it refuses; how a fresh verl
finds it.
"""

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
from plugged import RUNS, call, config, core_algos, forget  # noqa: F401

import upref
from upref import InputError, Totals
from upref.aggregation import verl_name
from upref.weights.batches import batch
from upref_frameworks.verl import training as verl_plugin

pytestmark = pytest.mark.verl


# ---- configuration -------------------------------------------------------------------


def test_verls_defaults_do_not_leak():
    """ActorConfig always has clip_ratio_low = high = 0.2 and clip_ratio_c = 3."""
    for name in RUNS:
        o = upref.get(name)
        assert verl_plugin.hyperparameters(o, config()) == {
            k: v for k, v in o.hyperparameters.items() if k != "beta"
        }


def test_hyperparameters_have_a_section_and_are_logged_once(caplog):
    b = batch(upref.get("up_dapo"), thin=9)
    for _ in range(3):
        call("up_dapo", b, config({"c": 10.0}))
    said = [r.getMessage() for r in caplog.records if "eps_low" in r.getMessage()]
    assert (
        len(said) == 1
        and "eps_low=0.2 (default), c=10.0 (policy_loss.upref)" in said[0]
    )


@pytest.mark.parametrize(
    ("name", "c", "match"),
    [
        ("up_dapo", lambda: config({"eps_high": 0.28}), "no hyperparameter 'eps_high'"),
        ("up_dapo", lambda: config({"eps_low": "0.2"}), "eps_low must be"),
        ("up_grpo", lambda: config({"beta": 0.1}), "use_kl_loss"),
        (
            "up_dapo",
            lambda: config(clip_ratio_c=10.0),
            "actor.clip_ratio_c=10.0 and uses c=None",
        ),
        (
            "gspo",
            lambda: config(clip_ratio_low=1e-4),
            "actor.clip_ratio_low=0.0001 and uses eps_low=0.0003",
        ),
        ("sapo", lambda: config(tau_neg=1.1), "actor.tau_neg=1.1"),
        ("aspo_code", config, "entropy per token, which verl does not"),
        ("tpo", config, "prompt of each response, which verl does not"),
    ],
)
def test_what_nothing_would_read_is_refused(name, c, match):
    with pytest.raises(InputError, match=match):
        call(name, batch(upref.get(name), thin=9), c())


def test_a_verl_key_that_agrees_or_is_overridden_is_fine():
    b = batch(upref.get("dapo"), thin=9)
    call("dapo", b, config(clip_ratio_high=0.28))
    call("dapo", b, config({"c": 5.0}, clip_ratio_c=10.0))
    call("up_dapo", b, config(clip_ratio_high=0.28))


def test_no_config():
    with pytest.raises(InputError, match="config"):
        call("up_dapo", batch(upref.get("up_dapo"), thin=9), config=None)


def test_another_aggregation_is_warned_of_once_and_ignored(caplog):
    """Find the loss of the objective's own aggregation whatever the config says, with
    one warning for each other one.
    """
    caplog.set_level(logging.WARNING)
    b = replace(batch(upref.get("up_gspo"), thin=9), group=None)
    own = call("up_gspo", b, config(agg="seq-mean-token-mean"))[0]
    assert not caplog.records
    for agg in ("token-mean", "token-mean", "seq-mean-token-sum", "token-mean"):
        assert torch.equal(call("up_gspo", b, config(agg=agg))[0], own)
    assert [r.getMessage().count("seq-mean-token-mean") for r in caplog.records] == [
        2,
        2,
    ]
    call("up_grpo", b, config(agg="token-mean"))
    assert len(caplog.records) == 3


def test_every_aggregation_has_a_name_verl_accepts(caplog):
    for name in RUNS:
        o = upref.get(name)
        agg = verl_name(o.level, o.agg)
        # ActorConfig refuses unknown names
        call(name, batch(o, thin=9), config(agg=agg))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("dapo", "clip_ratio", 0.3),
        ("cispo", "clip_ratio_low", 0.3),
        ("aspo", "clip_ratio_c", 10.0),
    ],
)
def test_a_key_of_verls_that_nothing_would_read_stops_the_run(name, field, value):
    if name == "cispo":  # it has no lower bound to contradict
        call(name, batch(upref.get(name)), config(**{field: value}))
        return
    with pytest.raises(InputError, match=f"does not read actor.{field}"):
        call(name, batch(upref.get(name)), config(**{field: value}))


# ---- through verl --------------------------------------------------------------------

CONFIG = """
from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    c = compose("ppo_trainer", overrides=[
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.policy_loss.loss_mode=upref/up_dapo",
        "actor_rollout_ref.actor.policy_loss._target_=upref_frameworks.verl.training.PolicyLoss",
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
    """Run code in a new Python without verl's environment variables, and return the
    completed process. path: folders behind the checkout.
    """
    root = str(Path(upref.__file__).parents[1])
    path = os.pathsep.join([root, *env.pop("path", [])])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={k: v for k, v in os.environ.items() if not k.startswith("VERL_")} | {"PYTHONPATH": path} | env,
    )  # fmt: skip


@pytest.mark.nightly
def test_a_fresh_verl_finds_it_by_VERL_USE_EXTERNAL_MODULES():
    done = python(
        CONFIG + RUN, VERL_USE_EXTERNAL_MODULES="upref_frameworks.verl.training"
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("loss ")[1]) == 1.0  # A = -1 at r = 1: J = r A = -1
    assert "eps_low=0.1 (policy_loss.upref), c=10 (policy_loss.upref)" in done.stderr


def test_a_fresh_verl_finds_it_by_entry_point(tmp_path):
    """With the metadata an installed upref has; the name of the group is verl's."""
    info = tmp_path / "upref_rl-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: upref-rl\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[verl.plugins]\nupref = upref_frameworks.verl.training\n"
    )
    ask = "from verl.trainer.ppo.core_algos import get_policy_loss_fn as g; print(g('upref/up_dapo').__name__)"
    done = python(ask, path=[str(tmp_path)])
    assert done.returncode == 0 and done.stdout.strip() == "upref/up_dapo", done.stderr
    done = python(
        "import sys, upref_frameworks.audits; assert 'verl' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


def test_without_verl_one_sentence():
    done = python(
        "import sys; sys.modules['verl'] = None\nimport upref_frameworks.verl.training"
    )
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("ImportError: verl is not installed")
    )


def test_end_to_end_through_verls_ppo_loss(monkeypatch):
    """verl's own ppo_loss on a nested TensorDict: shift by one token, padding, global
    counts, KL and entropy added.
    """
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    for unused in ("datasets", "pandas"):  # imported beside the loss, to read data sets
        if importlib.util.find_spec(unused) is None:
            monkeypatch.setitem(sys.modules, unused, MagicMock())
    from verl.workers.utils.losses import ppo_loss

    torch.manual_seed(0)
    prompts, responses = (3, 2, 4), (2, 5, 1)

    def nested(lengths, make):
        return torch.nested.as_nested_tensor(
            [make(n) for n in lengths], layout=torch.jagged
        )

    def floats(n):
        return -torch.rand(n, dtype=torch.float64)

    mask = nested(responses, lambda n: torch.ones(n, dtype=torch.long))
    fields = {
        "prompts": nested(prompts, lambda n: torch.ones(n, dtype=torch.long)),
        "responses": nested(responses, lambda n: torch.ones(n, dtype=torch.long)),
        "response_mask": mask,
        "old_log_probs": nested(responses, floats),
        "ref_log_prob": nested(responses, floats),
        "advantages": nested(
            responses, lambda n: torch.randn((), dtype=torch.float64).expand(n).clone()
        ),
    }
    data = TensorDict(fields, batch_size=[3])
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=20, global_batch_size=6)
    flat = -torch.rand(sum(prompts) + sum(responses), dtype=torch.float64)
    flat.requires_grad_()
    offsets = torch.tensor(
        [0, *(p + r for p, r in zip(prompts, responses, strict=True))]
    ).cumsum(0)
    log_probs = torch.nested.nested_tensor_from_jagged(flat, offsets)
    actor = replace_loss_mode(
        config({"eps_low": 0.1}, use_kl_loss=True, kl_loss_coef=0.5)
    )
    loss, metrics = ppo_loss(actor, {"log_probs": log_probs}, data)
    loss.backward()

    ends = offsets[1:].tolist()
    pieces = [
        flat.detach()[e - r - 1 : e - 1] for e, r in zip(ends, responses, strict=True)
    ]

    def pad(xs):
        return torch.nn.utils.rnn.pad_sequence(list(xs), batch_first=True)

    lp = pad(pieces).requires_grad_()
    old, ref, A = (
        pad(fields[k].unbind()) for k in ("old_log_probs", "ref_log_prob", "advantages")
    )
    m = pad(mask.unbind()).bool()
    J = upref.get("up_dapo").J(lp, old, A, m, totals=Totals(20, 6, 1, 20), eps_low=0.1)
    kl = core_algos.kl_penalty(lp, ref, "low_var_kl")
    expected = -2 * J + 0.5 * core_algos.agg_loss(kl, m, "token-mean", 2, 20, 6)
    (g,) = torch.autograd.grad(expected, lp)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    found = torch.cat(
        [flat.grad[e - r - 1 : e - 1] for e, r in zip(ends, responses, strict=True)]
    )
    torch.testing.assert_close(
        found, g[m], rtol=1e-12, atol=1e-12 * g[m].abs().max().item()
    )
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(
        -2 * J.item(), rel=1e-6
    )
    assert "upref/alive" in metrics


def replace_loss_mode(c):
    # verl's configurations are frozen
    c.policy_loss.__dict__["loss_mode"] = "upref/up_dapo"
    return c
