# SPDX-License-Identifier: Apache-2.0
"""Trinity-RFT's policy losses, advantages and KL terms as the audit compares them with
the papers.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref import kl
from upref.advantages import get as advantage
from upref.objectives.sapo import sapo
from upref.ops import exp, minimum, sg, sigmoid, where
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, aggregated, fault, with_hp
from upref_frameworks.audits.case import MICRO
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import (
    ALONE,
    CLAMP,
    NARROW_K3,
    SAMPLE,
    whiten_by_sample,
)
from upref_frameworks.audits.sources import arguments

PIN = Pin(
    packages=("trinity-rft==0.6.0", "safetensors==0.8.0"),
    files={
        "trinity/algorithm/policy_loss_fn/__init__.py": "7aacc695978ed9e3898c5605b45fef3d",
        "trinity/algorithm/policy_loss_fn/ppo_policy_loss.py": "a4639bf00a7d88980532f1e1722a26ba",
        "trinity/algorithm/policy_loss_fn/sapo_policy_loss.py": "40dbf1f4d3fd62a441e948b84c2f281a",
        "trinity/algorithm/utils.py": "e22fc2abb211fd00e0ff2757f1c75cc0",
    },
    skip_init=(
        "trinity",
        "trinity.algorithm",
        "trinity.common",
        "trinity.buffer",
        "trinity.utils",
    ),
    stubs=("ray", "verl", "omegaconf"),
)


def _module(name: str) -> ModuleType:
    """Return this module of Trinity's algorithms, imported where an audit runs."""
    return importlib.import_module(f"trinity.algorithm.{name}")


def _losses() -> Any:
    """Return Trinity's table of losses, by name."""
    return _module("policy_loss_fn").POLICY_LOSS_FN


def _defaults(mode: str) -> dict[str, Any]:
    """Return the arguments of the loss's class with their defaults. Those of its
    default_args(), which a run without arguments gets, replace them.
    """
    cls = _losses().get(mode)
    return arguments(cls.__init__, "backend") | cls.default_args()


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
) -> Tensor:
    """Return the value of Trinity's loss in this mode."""
    loss = _losses().get(mode)(backend="verl", **config)
    value_and_metrics = loss(
        logprob=log_prob,
        old_logprob=old_log_prob,
        action_mask=mask,
        advantages=advantages,
    )
    return value_and_metrics[0]


def _token_sums(batch: Rollouts) -> Tensor:
    """Return the factor of each response [B, 1] by which the sum of the micro-batches'
    token means differs from the token mean: all tokens over those of the response's
    micro-batch.
    """
    scales = [
        (batch.mask.sum() / m.mask.sum()).expand(len(m.mask), 1)
        for m in batch.split(MICRO)
    ]
    return torch.cat(scales).to(batch.logp)


GATE = replace(
    sapo,
    name="sapo, the gate a constant weight on log π_θ",
    fn=lambda lp, lp_old, A, *, tau_pos=1.0, tau_neg=1.05: (
        sg(_gate(exp(lp - lp_old), A, tau_pos, tau_neg)) * A * lp
    ),
    closed_form=lambda r, A, *, tau_pos, tau_neg: A * _gate(r, A, tau_pos, tau_neg),
)
TOKEN = replace(
    get("topr"),
    name="topr of each token",
    level="token",
    agg="seq-mean-token-sum",
    fn=lambda lp, lp_old, A: where(
        A > 0, A * lp, sg(minimum(exp(lp - lp_old), 1)) * A * lp
    ),
    closed_form=lambda r, A: where(A > 0, A + 0 * r, A * minimum(r, 1)),
)


def _gate(r: Any, A: Any, tau_pos: Any, tau_neg: Any) -> Any:
    """Return SAPO's gate of a ratio: 4 / tau times σ(tau (r - 1)), with tau_pos where A
    > 0 and tau_neg elsewhere.
    """
    return where(
        A > 0,
        4 / tau_pos * sigmoid(tau_pos * (r - 1)),
        4 / tau_neg * sigmoid(tau_neg * (r - 1)),
    )


SOFT = fault(
    "stop-gradient: the gate is a constant weight on log π_θ",
    "stop-gradient",
    objective=GATE,
    hp={"tau_pos": 1.0, "tau_neg": 1.05},
)
HALF = fault("divided by 1 + tau = 2", "aggregation", scale=lambda batch: 0.5)
TOKENS = fault(
    "the token means of the micro-batches, added up", "batches", scale=_token_sums
)
MEANS = fault(
    "the means over the micro-batches' responses, added up",
    "batches",
    scale=lambda batch: float(MICRO),
)
SEQ = {"loss_agg_mode": "seq-mean-token-mean"}
SUM = {"loss_agg_mode": "seq-mean-token-sum"}
WIDE = {"clip_ratio_c": 1e10}  # the dual clip cannot be switched off
COMPARISONS = (
    Comparison("default", "ppo", {}, "ppo_clip", {}, (with_hp(c=3.0),)),
    # algorithm dapo
    Comparison(
        "default",
        "ppo",
        {},
        "dapo",
        {},
        (with_hp(eps_high=0.2), with_hp(c=3.0), GROUPS),
    ),
    Comparison("default", "gspo", {}, "gspo", {}),
    Comparison("default", "cispo", {}, "cispo", {}, (with_hp(eps_high=0.28), GROUPS)),
    Comparison("default", "sapo", {}, "sapo", {}, (SOFT, aggregated("token-mean"))),
    Comparison(
        "default",
        "topr",
        {},
        "topr",
        {},
        (
            fault(
                "the ratio of each token, not of the response",
                "objective",
                objective=TOKEN,
            ),
            aggregated("token-mean"),
        ),
    ),
    Comparison("default", "opmd", {}, "reinforce_off_policy", {}, (HALF, GROUPS)),
    Comparison("default", "rec", {}, "reinforce_off_policy", {}, (GROUPS,)),
    Comparison(
        "default",
        "importance_sampling",
        {},
        "is_pg",
        {},
        (aggregated("token-mean"), CLAMP),
    ),
    Comparison("paper", "ppo", WIDE, "ppo_clip", {}, (CLAMP,)),
    Comparison("paper", "ppo", SEQ | WIDE, "grpo", {}, (CLAMP,)),
    Comparison("paper", "ppo", SUM | WIDE, "dr_grpo", {}, (CLAMP,)),
    Comparison(
        "paper",
        "ppo",
        {"clip_range_low": 0.2, "clip_range_high": 0.28} | WIDE,
        "dapo",
        {},
        (GROUPS, CLAMP),
    ),
    Comparison("paper", "gspo", {}, "gspo", {}),
    Comparison("paper", "cispo", {"clip_range_high": 4.0}, "cispo", {}, (GROUPS,)),
    Comparison("paper", "sapo", SEQ, "sapo", {}, (SOFT,)),
    Comparison("paper", "importance_sampling", SUM, "is_pg", {}, (CLAMP,)),
)
SPLIT = {
    c.label: MEANS if c.config.get("loss_agg_mode") or c.mode == "gspo" else TOKENS
    for c in COMPARISONS
}


# ---- what else it computes -----------------------------------------------------------
def _advantages_of_groups(name: str) -> Callable[..., Tensor]:
    """Return Trinity's advantage function of that name that takes the Experience
    objects of one group. It reads their reward and mask alone.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that Trinity gives these rewards."""
        estimator = _module("advantage_fn").ADVANTAGE_FN.get(name)()
        A = torch.zeros_like(R)
        for group_id in group.unique().tolist():
            rows = (group == group_id).nonzero()[:, 0].tolist()
            experiences = [
                SimpleNamespace(reward=R[i].item(), action_mask=torch.ones(1))
                for i in rows
            ]
            returned, *_ = estimator.calculate_group_advantage(
                str(group_id), experiences
            )
            for i, experience in zip(rows, returned, strict=True):
                A[i] = experience.advantages[0]
        return A

    return advantages


def _advantages_of_batch(name: str) -> Callable[..., Tensor]:
    """Return Trinity's advantage function of that name that takes verl's DataProto.

    It reads two dicts of it, so a namespace with these stands in; every response is one
    token.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that Trinity gives these rewards, computed in float32."""
        estimator = _module("advantage_fn").ADVANTAGE_FN.get(name)()
        ones = torch.ones(len(R), 1)
        batch = {"token_level_rewards": R[:, None].float(), "response_mask": ones}
        data = SimpleNamespace(batch=batch, non_tensor_batch={"uid": group.tolist()})
        data_with_advantages, _ = estimator(data)
        return data_with_advantages.batch["advantages"][:, 0]

    return advantages


def _estimator_that_keeps_single_rewards(
    promise: str, **hp: float
) -> Callable[..., Tensor]:
    """Return an advantage estimator in which a response without a peer keeps its
    reward, divided by 1 + eps.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages of `promise`, but of a response without a peer its
        reward over 1 + eps.
        """
        A = advantage(promise)(R, group, **hp)
        _, index, size = group.unique(return_inverse=True, return_counts=True)
        is_alone = size[index] == 1
        return torch.where(is_alone, R / (1 + hp.get("eps", 0)), A)

    return advantages


def _kl(lp: Tensor, ref: Tensor, name: str) -> Tensor:
    """Return Trinity's KL term of this name."""
    return _module("kl_fn").KL_FN.get(name)().calculate_kl(lp, ref)


def _group_of_one(promise: str, **hp: Any) -> tuple[Fault[Any]]:
    """Return the reason why the advantage in a group of one differs from the promise."""
    return (Fault(ALONE, _estimator_that_keeps_single_rewards(promise, **hp)),)


def _parts() -> tuple[Component, ...]:
    """Return the parts of Trinity that are compared by themselves, such as its
    advantages.
    """
    norm = {"ddof": 1, "eps": 1e-6}
    agg = _module("utils").aggregate_loss
    default = _module("algorithm").GRPOAlgorithm.default_config()["kl_loss_fn"]

    def aggregation(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return Trinity's aggregation of terms and a mask, in this mode."""
        return lambda x, mask: agg(x, mask, mode)

    return (
        Component(
            "advantages",
            "grpo",
            _advantages_of_groups("grpo"),
            "group_norm",
            norm,
            _group_of_one("group_norm", **norm),
            tol=2e-3,
        ),
        Component(
            "advantages",
            "grpo_verl",
            _advantages_of_batch("grpo_verl"),
            "group_norm",
            norm,
            _group_of_one("group_norm", **norm),
            tol=2e-3,
        ),
        Component(
            "advantages",
            "opmd",
            _advantages_of_groups("opmd"),
            "group_mean",
            {},
            _group_of_one("group_mean"),
            tol=1e-5,
        ),
        Component(
            "advantages",
            "rloo",
            _advantages_of_batch("rloo"),
            "leave_one_out",
            {},
            _group_of_one("leave_one_out"),
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforce",
            _advantages_of_groups("reinforce"),
            "reward",
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforceplusplus",
            _advantages_of_batch("reinforceplusplus"),
            "whiten",
            {"ddof": 0, "eps": 1e-8},
            (Fault(SAMPLE, whiten_by_sample),),
            tol=1e-5,
        ),
        *kls(
            _kl,
            {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"},
            {"low_var_kl": (NARROW_K3,)},
        ),
        Component(
            "kl",
            "GRPOAlgorithm's default",
            lambda lp, ref: _kl(lp, ref, default),
            "k3",
            reasons=(Fault("k2 in place of k3", kl.k2),),
        ),
        *(
            Component("aggregation", mode, aggregation(mode), mode)
            for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
        ),
        Component(
            "aggregation",
            "seq-mean-token-sum-norm",
            lambda x, m: agg(x, m, "seq-mean-token-sum-norm", 6.0),
            "seq-mean-token-sum-norm",
            {"length": 6},
            (
                Fault(
                    "a sum over responses, not their mean",
                    lambda x, m: torch.where(m, x, 0).sum() / 6,
                ),
            ),
        ),
    )


PAIRS = "no policy gradient: pairs or expert data"
OTHER = "no objective of the registry"
REMARKS = (
    "Micro-batches as trainer/verl does it (verl 0.8 and later): TrinityPolicyLoss returns the mean of the "
    "micro-batch, and verl's engine calls backward on each without a division.",
    "Advantages are computed in float32: compared to 2e-3 where a standard deviation divides, else to 1e-5.",
    "Not covered: several ranks, sequence masking, the other advantages (gigpo, jsd, clipb, clipv, ...).",
)
TRINITY = Framework(
    "trinity",
    pin=PIN,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons=SPLIT,
    remarks=REMARKS,
    modes=lambda: list(_losses()._default_mapping),  # noqa: SLF001
    out_of_scope={
        **dict.fromkeys(("dpo", "sft", "sft_is", "sft_phi", "mix", "mix_chord"), PAIRS),
        "sppo": f"{OTHER}: the log-ratio, masked outside 1/1.3 to 1.3",
    },
)
