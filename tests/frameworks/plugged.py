# SPDX-License-Identifier: Apache-2.0
"""Calls the plug-in as verl's actor does."""

import pytest

NEED = "`repro/venv.sh verl` installs what verl's losses need"
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEED)
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402

import upref  # noqa: E402
from upref_frameworks.verl import training as verl_plugin  # noqa: E402

# verl hands no entropy and no groups to a loss
RUNS = [n for n in upref.names() if not upref.get(n).needs]


def config(hp=None, agg="token-mean", info=None, **fields):
    """Return verl's configuration of an actor for the plug-in. hp: hyperparameters;
    info: of the global batch.
    """
    section = verl_plugin.PolicyLoss(upref=hp) if hp is not None else PolicyLossConfig()
    fields |= {"policy_loss": section, "loss_agg_mode": agg}
    c = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields
    )
    c.global_batch_info.update(info or {})
    return c


def call(name, b, c=None, **kw):
    """Return the loss and the metrics of the plug-in's objective on a batch, as verl's
    actor calls it.

    It asserts that four metrics of parity are there and raise no alarm, and leaves them
    out.
    """
    c = c or config()
    args = dict(
        old_log_prob=b.logp_old, log_prob=b.logp, advantages=b.adv, response_mask=b.mask
    )
    loss, metrics = core_algos.get_policy_loss_fn(f"upref/{name}")(
        **args
        | {"loss_agg_mode": c.loss_agg_mode, "config": c, "rollout_is_weights": None}
        | kw
    )
    # not of this batch alone
    so_far = {k: v for k, v in metrics.items() if k.startswith("upref/parity_")}
    assert (
        len(so_far) == 4
        and so_far["upref/parity_of_bound"] <= 1
        and so_far["upref/parity_alarms"] == 0
    )
    return loss, {k: v for k, v in metrics.items() if k not in so_far}


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Let the plug-in forget what it has logged and compared in another test."""
    monkeypatch.setattr(verl_plugin, "_logged", set())
    monkeypatch.setattr(verl_plugin, "_monitors", {})
