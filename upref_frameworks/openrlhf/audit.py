# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's policy loss, advantages, KL terms and log-probabilities as the audit
compares them with the papers.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.aggregation import Totals
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, aggregated, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import CLAMP, clamp_kl
from upref_frameworks.audits.sources import arguments

PIN = Pin(
    packages=("openrlhf==0.11.2",),
    files={
        "openrlhf/models/loss.py": "a6dd82c27e8b1711c6a33b6acd0319be",
        "openrlhf/models/utils.py": "bb0c73194c8a14173ebe15dff103f5a9",
    },
    skip_init=(
        "openrlhf",
        "openrlhf.models",
        "openrlhf.trainer",
        "openrlhf.trainer.ppo_utils",
        "openrlhf.trainer.ray",
        "openrlhf.utils",
    ),
    stubs=("deepspeed", "ray", "transformers", "openrlhf.trainer.ray.launcher"),
    decorators=("ray.remote",),
    env={"TORCHDYNAMO_DISABLE": "1"},
)


def _module(name: str) -> ModuleType:
    """Return this module of OpenRLHF, imported where an audit runs."""
    return importlib.import_module(f"openrlhf.{name}")


def _modes() -> list[str]:
    """Return the values that PolicyLoss's source compares policy_loss_type with, in
    alphabetical order.
    """
    return sorted(
        set(
            re.findall(
                r'policy_loss_type == "(\w+)"',
                inspect.getsource(_module("models.loss").PolicyLoss),
            )
        )
    )


def _defaults(mode: str) -> dict[str, Any]:
    """Return the defaults of PolicyLoss."""
    return arguments(_module("models.loss").PolicyLoss.__init__, "policy_loss_type")


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of OpenRLHF's loss in this mode on tensors, divided by the
    counts of the mini-batch.
    """
    f = _module("models.loss").PolicyLoss(policy_loss_type=mode, **config)
    counts = {
        "batch_num_tokens": float(totals.tokens),
        "global_batch_size": float(totals.sequences),
    }
    return f(log_prob, old_log_prob, advantages, action_mask=mask, **counts)[0]


SEQ = {"token_level_loss": False}
COMPARISONS = (
    Comparison("default", "ppo", {}, "ppo_clip", {}, (CLAMP,)),
    Comparison(
        "default", "gspo", {}, "gspo", {}, (with_hp(eps_low=0.2, eps_high=0.2),)
    ),
    Comparison("paper", "ppo", {"clip_eps_high": 0.28}, "dapo", {}, (GROUPS, CLAMP)),
    Comparison(
        "paper",
        "ppo",
        {"clip_eps_high": 0.28, "dual_clip": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison("paper", "ppo", SEQ, "grpo", {}, (CLAMP,)),
    Comparison("default", "ppo", {}, "dr_grpo", {}, (aggregated("token-mean"), CLAMP)),
    Comparison(
        "paper", "gspo", {"clip_eps_low": 3e-4, "clip_eps_high": 4e-4}, "gspo", {}
    ),
)


# ---- what else it computes -----------------------------------------------------------
def _advantages(name: str) -> Callable[..., Tensor]:
    """Return the advantages of OpenRLHF's experience maker, as a function of rewards
    and groups. Each response is one token, there is no KL penalty, and all groups have
    the size of the first.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that OpenRLHF gives these rewards."""
        maker = _module("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        group_size = int((group == group[0]).sum())
        advantage_settings = SimpleNamespace(
            estimator=name, gamma=1.0, no_std_norm=False
        )
        args = SimpleNamespace(
            algo=SimpleNamespace(advantage=advantage_settings),
            rollout=SimpleNamespace(n_samples_per_prompt=group_size),
            reward=SimpleNamespace(
                clip_range=None,
                stop_properly_penalty_coef=None,
                overlong_buffer_len=None,
            ),
        )
        maker_settings = SimpleNamespace(
            strategy=SimpleNamespace(args=args),
            advantage_estimator=name,
            kl_ctl=SimpleNamespace(value=0.0),
        )
        maker_settings.get_cumulative_returns = lambda *a: maker.get_cumulative_returns(
            maker_settings, *a
        )
        ones = torch.ones(len(R), 1)
        experience = SimpleNamespace(
            rewards=R.float(),
            index=list(range(len(R))),
            kl=0 * ones,
            action_mask=ones,
            info={},
        )
        with_advantages, *_ = maker.compute_advantages_and_returns(
            maker_settings, [experience]
        )
        return with_advantages.advantages[:, 0]

    return advantages


def _kl(name: str, **more: bool) -> Callable[..., Tensor]:
    """Return OpenRLHF's KL estimate of this name, as a function of log-probabilities."""
    return lambda lp, ref: _module("models.utils").compute_approx_kl(
        lp, ref, kl_estimator=name, **more
    )


def _k3_with_gradient_of_k2(lp: Tensor, ref: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    return kl.k3(lp, ref).detach() + kl.k2(lp, ref) - kl.k2(lp, ref).detach()


def _clamped_k3_with_gradient_of_k2(lp: Tensor, ref: Tensor) -> Tensor:
    """Return the value of k3 clamped to [-10, 10], with the gradient of k2."""
    return (
        _k3_with_gradient_of_k2(lp, ref)
        - kl.k3(lp, ref).detach()
        + kl.k3(lp, ref).detach().clamp(-10, 10)
    )


def _gae(which: int, gamma: float, lam: float) -> Callable[..., Tensor]:
    """Return OpenRLHF's GAE (which = 0) or its returns (which = 1), as a function of
    rewards, values and mask.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return OpenRLHF's advantages or returns. The method reads no attribute."""
        maker = _module("trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        both = maker.get_advantages_and_returns(
            SimpleNamespace(), values, rewards, mask, gamma, lam
        )
        return both[which]

    return token_parts.on_trained(answer)


def _gae_through_zeros(
    name: str, gamma: float, lam: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a reference of GAE in which each slot is a step, and the value of an
    untrained one is 0.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages or returns of trained slots."""
        every = torch.ones_like(mask)
        of_name = token_parts.ADVANTAGES[name]
        A = of_name(rewards, values * mask, every, gamma=gamma, lam=lam)
        return torch.where(mask, A, 0)

    return answer


def _gae_parts(gamma: float, lam: float) -> tuple[Component, ...]:
    """Return OpenRLHF's GAE and its returns, with these settings."""
    hp = {"gamma": gamma, "lam": lam}
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gamma={gamma:g}, lambd={lam:g}",
            _gae(which, gamma, lam),
            name,
            hp,
            (Fault(TOOL_ZERO, _gae_through_zeros(name, gamma, lam)),),
        )
        for which, name in enumerate(("gae", "gae_returns"))
    )


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    """Return OpenRLHF's loss of a critic, as a function of values, old values, returns
    and mask.
    """
    return lambda values, old, returns, mask: _module("models.loss").ValueLoss(clip)(
        values, old, returns, action_mask=mask
    )


def _parts() -> tuple[Component, ...]:
    """Return the parts of OpenRLHF that are compared by themselves, such as its
    advantages.
    """
    # groups are of one size by construction, and of one response only where all are
    square = ("uneven", "one")
    tiny = {"ddof": 0, "eps": 1e-8}
    return (
        Component(
            "advantages",
            "group_norm",
            _advantages("group_norm"),
            "group_norm",
            {"ddof": 1, "eps": 1e-9},
            leaves_out=square,
            tol=2e-3,
        ),
        Component(
            "advantages",
            "rloo",
            _advantages("rloo"),
            "leave_one_out",
            leaves_out=square,
            tol=1e-5,
        ),
        Component(
            "advantages",
            "dr_grpo",
            _advantages("dr_grpo"),
            "group_mean",
            leaves_out=square,
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforce",
            _advantages("reinforce"),
            "whiten",
            tiny,
            leaves_out=square,
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforce_baseline",
            _advantages("reinforce_baseline"),
            "group_mean_whiten",
            tiny,
            leaves_out=square,
            tol=1e-5,
        ),
        *(
            Component("kl", k, _kl(k), k, {}, (clamp_kl(f),), tol=1e-4)
            for k, f in kl.ESTIMATORS.items()
        ),
        Component(
            "kl",
            "k3, unbiased_gradient",
            _kl("k3", unbiased_gradient=True),
            _k3_with_gradient_of_k2,
            {},
            (
                Fault(
                    "its value clamped to ±10, the gradient not",
                    _clamped_k3_with_gradient_of_k2,
                ),
            ),
            tol=1e-4,
            words="the value of k3, the gradient of k2",
        ),
        Component(
            "logprobs",
            "log_probs_from_logits",
            lambda z, tokens, t: _module("models.utils").log_probs_from_logits(
                z.clone(), tokens, t
            ),
            "token_log_probs",
        ),
        Component(
            "aggregation",
            "token_level_loss",
            lambda x, m: _module("models.loss").aggregate_loss(x, m),
            "token-mean",
        ),
        Component(
            "aggregation",
            "token_level_loss=False",
            lambda x, m: _module("models.loss").aggregate_loss(
                x, m, token_level_loss=False
            ),
            "seq-mean-token-mean",
        ),
        *_gae_parts(1.0, 1.0),
        *_gae_parts(0.9, 0.8),
        Component(
            "value",
            "ValueLoss, clip_eps=0.5",
            _value_loss(0.5),
            "clipped, token-mean",
            {"clip": 0.5},
        ),
        Component(
            "value",
            "ValueLoss, clip_eps=0.2",
            _value_loss(0.2),
            "clipped, token-mean",
            {"clip": 0.2},
        ),
        Component(
            "value", "ValueLoss, clip_eps=None", _value_loss(None), "mse, token-mean"
        ),
    )


TOOL_ZERO = "a tool's token is a step of its own, and the value there is 0"
REMARKS = (
    "Micro-batches as its trainer does it: batch_num_tokens and global_batch_size are the mini-batch's, and the "
    "losses of micro-batches add up.",
    "KL terms and advantages are computed in float32: compared to 1e-4, advantages over a deviation to 2e-3.",
    "Not covered: several ranks, the correction of the sampler's probabilities, flash_reinforce.",
)
OPENRLHF = Framework(
    "openrlhf",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    remarks=REMARKS,
)
