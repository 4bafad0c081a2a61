# SPDX-License-Identifier: Apache-2.0
"""verl's policy losses as the audit compares them with the papers, and why they differ."""

import functools
import math
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from upref import advantages, token_advantages
from upref.objectives.cov import covariance, cut
from upref.ops import binary_kl
from upref.registry import get
from upref.rollouts import Rollouts
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, LossFault, aggregated, fault, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.case import MICRO
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework
from upref_frameworks.audits.shared import (
    ALONE,
    CLAMP,
    CLAMP_S,
    FLOOR,
    NARROW_K3,
    SAMPLE,
    keep_singletons,
    whiten_by_sample,
)
from upref_frameworks.settings import Bare
from upref_frameworks.verl.losses import NO_DUAL_CLIP, import_verl, verl_loss


def _micro_batch_scale(batch: Rollouts) -> Tensor:
    """Return the factor of each response [B, 1] by which the sum of the micro-batches'
    means over responses differs from the mean over all: all responses over those of the
    response's micro-batch.
    """
    return torch.cat(
        [
            torch.full((len(m.mask), 1), len(batch.mask) / len(m.mask))
            for m in batch.split(MICRO)
        ]
    ).to(batch.logp)


UNUSED = (
    "torchdata.stateful_dataloader",
    "verl.utils.checkpoint.checkpoint_manager",
    "verl.workers.rollout.llm_server",
)  # by compute_advantage; the trainer imports them, and they need more than the losses
E20 = math.exp(20)
MICRO_MEAN = fault(
    "torch.mean of each micro-batch, global_batch_info unread",
    "batches",
    scale=_micro_batch_scale,
)


def _dppo_faults(kind: str, delta: float, trunc: float) -> tuple[LossFault, ...]:
    """Return the faults of verl's DPPO: it cuts the ratio at `trunc` outside of the
    derivative, its delta may not be the paper's, and its KL variant (kind "kl") adds
    1e-8 inside the logarithms.
    """
    name = f"dppo_{kind}_verl"
    words = f"ratio cut at {trunc:.4g} outside the derivative ({name})"

    def is_near_bound(batch: Rollouts) -> Tensor:
        """Return the tokens that rounding may move across the bound."""
        return (binary_kl(batch.logp, batch.logp_old) - delta).abs() < 1e-5

    reason = (
        "1e-8 inside the logarithms moves the bound by < 1e-5 (tokens there left out)"
    )
    near_kl = fault(reason, "rounding", skip=is_near_bound)
    papers = get(f"dppo_{kind}").resolve({})["delta"]
    hp = {"delta": papers, "trunc": trunc}
    faults = [fault(words, "objective", objective=name, hp=hp)]
    if delta != papers:
        faults.append(with_hp(delta=delta))
    if kind == "kl":
        faults.append(near_kl)
    return tuple(faults)


def _clip_fields(low: float, high: float, c: float | None = None) -> dict[str, float]:
    """Return verl's fields of a clip, and of a dual clip if c is given."""
    return {"clip_ratio_low": low, "clip_ratio_high": high} | (
        {"clip_ratio_c": c} if c else {}
    )


def _tied_at_the_cut(batch: Rollouts) -> Tensor:
    """Return the tokens whose covariance equals the last that is penalized, where
    several do, [B, T].
    """
    cov = covariance(batch.logp, batch.adv, batch.mask)
    score = cov.masked_fill(~batch.mask, -math.inf)
    at_the_cut = batch.mask & (
        score == cut(score, torch.tensor(2e-4), batch.mask, descending=True)
    )
    return at_the_cut & (at_the_cut.sum() > 1)


TIES = fault(
    "of tokens that tie for the last place as many as there are places (ties left out)",
    "rounding",
    skip=_tied_at_the_cut,
)
TOKENS, MEANS, SUMS = (
    {"loss_agg_mode": a}
    for a in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
)
COMPARISONS = (
    Comparison("default", "vanilla", TOKENS, "ppo_clip", {}, (with_hp(c=3.0),)),
    Comparison(
        "default",
        "gspo",
        TOKENS,
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), aggregated("token-mean"), CLAMP_S),
    ),
    Comparison("default", "cispo", TOKENS, "cispo", {}, (FLOOR, GROUPS)),
    Comparison("default", "sapo", TOKENS, "sapo", {}),
    Comparison("default", "geo_mean", TOKENS, "gmpo", {}, (with_hp(eps=0.2),)),
    Comparison(
        "default",
        "dppo_tv",
        TOKENS,
        "dppo_tv",
        {},
        (*_dppo_faults("tv", 0.2, 3.0), aggregated("token-mean")),
    ),
    Comparison(
        "default",
        "dppo_kl",
        TOKENS,
        "dppo_kl",
        {},
        (*_dppo_faults("kl", 0.2, 3.0), aggregated("token-mean")),
    ),
    Comparison("default", "gpg", TOKENS, "reinforce_off_policy", {}, (GROUPS,)),
    Comparison(
        "paper",
        "vanilla",
        TOKENS | _clip_fields(0.2, 0.28, NO_DUAL_CLIP),
        "dapo",
        {},
        (GROUPS, CLAMP),
    ),
    Comparison(
        "paper",
        "vanilla",
        TOKENS | _clip_fields(0.2, 0.28, 10.0),
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "vanilla",
        MEANS | _clip_fields(0.2, 0.2, NO_DUAL_CLIP),
        "grpo",
        {},
        (CLAMP,),
    ),
    Comparison(
        "paper",
        "vanilla",
        SUMS | _clip_fields(0.2, 0.2, NO_DUAL_CLIP),
        "dr_grpo",
        {},
        (CLAMP,),
    ),
    Comparison(
        "paper", "gspo", MEANS | _clip_fields(3e-4, 4e-4), "gspo", {}, (CLAMP_S,)
    ),
    Comparison(
        "paper", "cispo", TOKENS | _clip_fields(1.0, 4.0), "cispo", {}, (GROUPS,)
    ),
    Comparison("paper", "sapo", MEANS | {"tau_pos": 1.0, "tau_neg": 1.05}, "sapo", {}),
    Comparison("paper", "geo_mean", TOKENS | _clip_fields(0.4, 0.4), "gmpo", {}),
    Comparison(
        "paper",
        "dppo_tv",
        SUMS | _clip_fields(0.15, 0.15, NO_DUAL_CLIP),
        "dppo_tv",
        {},
        _dppo_faults("tv", 0.15, E20),
    ),
    Comparison(
        "paper",
        "dppo_kl",
        SUMS | _clip_fields(0.05, 0.05, NO_DUAL_CLIP),
        "dppo_kl",
        {},
        _dppo_faults("kl", 0.05, E20),
    ),
    Comparison("paper", "gpg", SUMS, "reinforce", {}),
    Comparison(
        "paper",
        "kl_cov",
        TOKENS | {"kl_cov_ratio": 2e-4, "ppo_kl_coef": 1.0},
        "kl_cov",
        {},
        (TIES,),
    ),
    Comparison(
        "paper",
        "clip_cov",
        TOKENS | {"clip_cov_ratio": 1.0},
        "clip_cov",
        {"share": 1.0},
    ),
    Comparison("paper", "dro", TOKENS | {"dro_beta": 0.1}, "dro", {}),
)
STILL_SCALED = (
    "over the standard deviation, which norm_adv_by_std_in_grpo=False is to switch off"
)
NO_NEGATIVE_SUM = "a sum below 0 becomes 0, and its gradient 0"
OUT_OF_SCOPE = {
    "bypass_mode": "a dispatcher: it recomputes mask and weights and calls vanilla or a REINFORCE",
}


def _loss(
    mode: str, fields: dict[str, Any], batch: Rollouts | Bare, padding: float | None
) -> Tensor:
    """Return verl's loss in this mode on a batch."""
    actor = dict(fields)
    return verl_loss(mode, batch, actor.pop("loss_agg_mode"), padding=padding, **actor)


def _remarks() -> tuple[str, ...]:
    """Return in words what no row of the table shows."""
    # as agg_loss computes it
    added = (torch.ones(1, dtype=torch.bool).sum() + 1e-8 - 1).item()
    return (
        f"The 1e-8 in the denominators of seq-mean-token-mean adds {added:g} to a count of 1 (float32).",
        "grpo_vectorized: equal rewards of 0.1 get advantages of up to 0.012, by rounding (left out of its row).",
        "Not covered: several ranks, responses without a token, rollout_is_weights, loss_scale_factor.",
    )


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the functions of verl that compute log-probabilities, by name."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO
    from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits

    def from_logits(
        logits: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of logits over the temperature, as
        verl's workers call both.
        """
        log_probs = logprobs_from_logits(logits / temperature, tokens)
        return log_probs, entropy_from_logits(logits / temperature)

    def fused(
        hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of the fused head."""
        return FusedLinearForPPO()(hidden, weight, tokens, temperature)

    return {
        "FusedLinearForPPO": fused,
        "logprobs_from_logits, entropy_from_logits": from_logits,
    }


def _advantages(name: str, **options: bool) -> Callable[..., Tensor]:
    """Return verl's advantages of this name, as a function of rewards and groups."""

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages where each response is one token. verl's function
        writes into the rewards, so it gets a copy.
        """
        estimator = import_verl().core_algos.get_adv_estimator_fn(name)
        ones = torch.ones_like(R)[:, None]
        grouped = {} if name == "reinforce_plus_plus" else {"index": group.numpy()}
        if name == "reinforce_plus_plus":
            gamma = {"config": SimpleNamespace(gamma=1.0)}
        else:
            gamma = {}
        return estimator(
            token_level_rewards=R.clone()[:, None],
            response_mask=ones,
            **grouped,
            **gamma,
            **options,
        )[0][:, 0]

    return advantages


def _centered_by_trainer(name: str) -> Callable[..., Tensor]:
    """Return the advantages of this name as verl's trainer computes them with
    norm_adv_by_std_in_grpo=False, as a function of rewards and groups.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages where each response is one token."""
        from verl import DataProto
        from verl.trainer.config import AlgoConfig

        ones = torch.ones_like(R)[:, None]
        data = DataProto.from_dict(
            tensors={"token_level_rewards": R.clone()[:, None], "response_mask": ones},
            non_tensors={"uid": group.numpy().astype(str).astype(object)},
        )
        config = AlgoConfig(adv_estimator=name, norm_adv_by_std_in_grpo=False)
        data = _compute_advantage()(
            data, name, norm_adv_by_std_in_grpo=False, config=config
        )
        return data.batch["advantages"][:, 0]

    return advantages


@functools.cache
def _compute_advantage() -> Callable[..., Any]:
    """Return compute_advantage of verl's trainer. While the trainer's module runs,
    stand-ins replace the modules that compute_advantage does not use. Neither they nor
    the trainer's module, which has names of theirs, are left in sys.modules.
    """
    unused = {name: MagicMock() for name in UNUSED if name not in sys.modules}
    sys.modules.update(unused)
    try:
        trainer = runpy.run_module("verl.trainer.ppo.ray_trainer")
    finally:
        for name in unused:
            del sys.modules[name]
    compute_advantage: Callable[..., Any] = trainer["compute_advantage"]
    return compute_advantage


def _opo(R: Tensor, group: Tensor) -> Tensor:
    """Return verl's OPO advantages [N] of responses of 1, 2, 3, 1, ... tokens, whose
    reward stands on the first token.
    """
    mask = torch.arange(3) < _lengths(R)[:, None]
    rewards = torch.nn.functional.pad(R[:, None], (0, 2))
    f = import_verl().core_algos.get_adv_estimator_fn("opo")
    return f(
        token_level_rewards=rewards, response_mask=mask.double(), index=group.numpy()
    )[0][:, 0]


def _opo_reference(R: Tensor, group: Tensor) -> Tensor:
    """Return upref's OPO advantages [N] of the same responses as `_opo`."""
    mask = torch.arange(3) < _lengths(R)[:, None]
    rewards = torch.nn.functional.pad(R[:, None], (0, 2))
    return token_advantages.opo(rewards, mask, group)[:, 0]


def _remax(R: Tensor, group: Tensor) -> Tensor:
    """Return verl's ReMax advantages of responses of 1, 2, 3, 1, ... tokens, rewarded
    on the first. GREEDY has the reward of each group's greedy response.
    """
    mask = (torch.arange(3) < _lengths(R)[:, None]).to(R.dtype)
    rewards = torch.nn.functional.pad(R[:, None], (0, 2))
    f = import_verl().core_algos.get_adv_estimator_fn("remax")
    return f(
        token_level_rewards=rewards, reward_baselines=GREEDY[group], response_mask=mask
    )[0][:, 0]


GREEDY = torch.tensor([0.25, -0.5], dtype=torch.float64)


def _passk(std: bool) -> Callable[..., Tensor]:
    """Return verl's Pass@k advantages, divided by the group's standard deviation where
    std is true, as a function of rewards and groups.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantages that verl gives these rewards."""
        f = import_verl().core_algos.get_adv_estimator_fn("grpo_passk")
        ones = torch.ones_like(R)[:, None]
        config = {"norm_adv_by_std_in_grpo": std}
        return f(
            token_level_rewards=R[:, None],
            response_mask=ones,
            index=group.numpy(),
            config=config,
        )[0][:, 0]

    return advantages


def _passk_reference(std: bool) -> Callable[..., Tensor]:
    """Return the reference of Pass@k advantages, as a function of rewards and groups."""

    def reference(R: Tensor, group: Tensor) -> Tensor:
        """Return pass_at_k, over the standard deviation of the group where std is set."""
        A = token_advantages.pass_at_k(
            R[:, None], torch.ones_like(R)[:, None] > 0, group
        )
        A = A[:, 0]
        if not std:
            return A
        for number in group.unique():
            of_group = group == number
            A[of_group] = A[of_group] / (R[of_group].std(correction=1) + 1e-6)
        return A

    return reference


def _lengths(R: Tensor) -> Tensor:
    """Return the lengths 1, 2, 3, 1, ... of the N responses, in the dtype of R."""
    return (torch.arange(len(R)) % 3 + 1).to(R.dtype)


def _gpg_reference(R: Tensor, group: Tensor) -> Tensor:
    """Return the reference of GPG: centered rewards, times N over the number of rewards
    that are not 0.
    """
    return (
        keep_singletons(advantages.group_mean)(R, group)
        * len(R)
        / R.count_nonzero().clamp(min=1)
    )


def _forward_kl_topk(lp: Tensor, teacher: Tensor) -> Tensor:
    """Return verl's distillation loss forward_kl_topk on each token, with k = 1.

    The vocabulary has two tokens. The student gives the teacher's first token the
    log-probability `lp`, and the teacher gives it `teacher`, both [1, T].
    """
    from verl.trainer.distillation import losses
    from verl.utils import tensordict_utils

    T = lp.shape[1]
    # a prompt of one token: the numbers of a response are those of the tokens before
    lp, teacher = (torch.cat([x, x[:, -1:]], 1) for x in (lp, teacher))
    logits = torch.stack([lp, torch.log(-torch.expm1(lp))], -1)
    of_topk = SimpleNamespace(topk=1, log_prob_min_clamp=None)
    config = SimpleNamespace(distillation_loss=of_topk)
    actor = SimpleNamespace(strategy="fsdp")
    of_teacher = {
        "teacher_logprobs": teacher,
        "teacher_ids": torch.zeros_like(lp).long(),
    }
    nested = {
        name: torch.nested.as_nested_tensor([x[0][:, None]], layout=torch.jagged)
        for name, x in of_teacher.items()
    }
    output = losses.compute_topk_loss(actor, config, nested, logits, "thd")
    ones = torch.ones(1, T, dtype=torch.long)
    data = {"prompts": ones[:, :1], "responses": ones, "response_mask": ones}
    data["attention_mask"] = torch.ones(1, T + 1, dtype=torch.long)
    flat = {name: x[0] for name, x in output.items()}
    batch = tensordict_utils.get_tensordict(data, {})
    loss, _ = losses.compute_forward_kl_topk(actor, config, flat, batch)
    return loss


def _truncated_kl(lp: Tensor, teacher: Tensor) -> Tensor:
    """Return the teacher's term p log(p / q) of its first token, [1, T]: the sum over
    its top k with k = 1.
    """
    return teacher.exp() * (teacher - lp)


def _truncated_kl_from_0(lp: Tensor, teacher: Tensor) -> Tensor:
    """Return `_truncated_kl`, but 0 without a gradient where it is negative."""
    return _truncated_kl(lp, teacher).clamp_min(0)


def _gae(which: int, gamma: float, lam: float) -> Callable[..., Tensor]:
    """Return verl's whitened GAE (which = 0) or its returns (which = 1), as a function
    of rewards, values and mask.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return verl's advantages or returns."""
        f = import_verl().core_algos.get_adv_estimator_fn("gae")
        both: tuple[Tensor, Tensor] = f(rewards, values, mask, gamma=gamma, lam=lam)
        return both[which]

    return token_parts.on_trained(answer)


def _gae_parts(gamma: float, lam: float) -> tuple[Component, ...]:
    """Return verl's GAE and its returns, with these settings."""
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gamma={gamma:g}, lam={lam:g}",
            _gae(which, gamma, lam),
            name,
            {"gamma": gamma, "lam": lam},
        )
        for which, name in enumerate(("gae_whitened", "gae_returns"))
    )


def _value_loss(agg: str, clip: float) -> Component:
    """Return verl's loss of a critic with this aggregation and clip."""

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Return the value of verl's loss."""
        of_verl = import_verl().core_algos.compute_value_loss
        value, _ = of_verl(values, returns, old, mask.to(values), clip, agg)
        return value

    mode = f"compute_value_loss, cliprange_value={clip:g}, {agg}"
    return Component("value", mode, loss, f"clipped, {agg}", {"clip": clip}, tol=1e-6)


def _centered(R: Tensor, group: Tensor) -> Tensor:
    """Return the advantages of REINFORCE++-baseline as verl computes them."""
    return whiten_by_sample(keep_singletons(advantages.group_mean)(R, group))


def _parts() -> tuple[Component, ...]:
    """Return the parts of verl that are compared by themselves, such as its advantages."""
    kl = import_verl().core_algos.kl_penalty
    agg = import_verl().core_algos.agg_loss

    def aggregation(mode: str) -> Callable[..., Tensor]:
        """Return verl's aggregation of this name, in the reference's signature."""
        return lambda x, mask: agg(x, mask, mode)

    groups = {
        "grpo": "group_norm",
        "grpo_vectorized": "group_norm",
        "rloo": "leave_one_out",
    }
    rounded = {"grpo_vectorized": ("equal rewards that do not round alike",)}
    return (
        *(
            Component(
                "advantages",
                n,
                _advantages(n),
                ref,
                reasons=(Fault(ALONE, keep_singletons(advantages.ADVANTAGES[ref])),),
                leaves_out=rounded.get(n, ()),
                tol=1e-3 if n in rounded else 1e-5,
            )
            for n, ref in groups.items()
        ),
        Component(
            "advantages",
            "grpo, norm_adv_by_std_in_grpo=False",
            _centered_by_trainer("grpo"),
            "group_mean",
            reasons=(Fault(ALONE, keep_singletons(advantages.group_mean)),),
        ),
        Component(
            "advantages",
            "grpo_vectorized, norm_adv_by_std_in_grpo=False",
            _centered_by_trainer("grpo_vectorized"),
            "group_mean",
            reasons=(
                Fault(ALONE, keep_singletons(advantages.group_mean)),
                Fault(STILL_SCALED, keep_singletons(advantages.group_norm)),
            ),
            leaves_out=rounded["grpo_vectorized"],
            tol=1e-3,
        ),
        Component(
            "advantages",
            "rloo_vectorized",
            _advantages("rloo_vectorized"),
            "leave_one_out",
        ),
        Component(
            "advantages",
            "reinforce_plus_plus",
            _advantages("reinforce_plus_plus"),
            "whiten",
            reasons=(Fault(SAMPLE, whiten_by_sample),),
            tol=1e-6,
        ),
        Component(
            "advantages",
            "reinforce_plus_plus_baseline",
            _advantages("reinforce_plus_plus_baseline"),
            "group_mean_whiten",
            reasons=(Fault(f"{ALONE}; {SAMPLE}", _centered),),
            tol=1e-6,
        ),
        Component(
            "advantages",
            "opo",
            _opo,
            _opo_reference,
            words="R minus the mean by length (OPO)",
            reasons=(Fault(ALONE, keep_singletons(_opo_reference)),),
            tol=1e-6,
        ),
        Component(
            "advantages",
            "gpg",
            _advantages("gpg"),
            "group_mean",
            reasons=(
                Fault(ALONE, keep_singletons(advantages.group_mean)),
                Fault(
                    "times the responses over those whose reward is not 0",
                    _gpg_reference,
                ),
            ),
            tol=1e-6,
        ),
        Component(
            "advantages",
            "remax",
            _remax,
            lambda R, group: R - GREEDY[group],
            words="R minus the greedy response's",
        ),
        *(
            Component(
                "advantages",
                f"grpo_passk, std={std}",
                _passk(std),
                _passk_reference(std),
                leaves_out=("one",),
                tol=1e-6,
                words="the maximum minus the maximum without the response"
                + (", over the sample's std" if std else ""),
            )
            for std in (True, False)
        ),
        *_gae_parts(1.0, 1.0),
        *_gae_parts(0.9, 0.8),
        *(_value_loss(agg, 0.5) for agg in ("token-mean", "seq-mean-token-mean")),
        *kls(
            kl,
            {"k1": "k1", "k2": "k2", "low_var_kl": "k3"},
            {"low_var_kl": (NARROW_K3,)},
        ),
        Component(
            "kl",
            "forward_kl_topk, k=1",
            _forward_kl_topk,
            _truncated_kl,
            words="sum of p log(p / q) over the teacher's top k",
            reasons=(Fault(NO_NEGATIVE_SUM, _truncated_kl_from_0),),
            tol=1e-6,
        ),
        *(
            Component("aggregation", n, aggregation(n), n, tol=1e-6)
            for n in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
        ),
        Component(
            "aggregation",
            "seq-mean-token-sum-norm",
            aggregation("seq-mean-token-sum-norm"),
            "seq-mean-token-sum-norm",
            {"length": 6},
        ),
    )


VERL = Framework(
    "verl",
    version=lambda: import_verl().version,
    loss=_loss,
    modes=lambda: [
        m
        for m in import_verl().core_algos.POLICY_LOSS_REGISTRY
        if not m.startswith("upref/")
    ],
    comparisons=COMPARISONS,
    parts=_parts,
    split_reasons={"geo_mean": MICRO_MEAN},
    out_of_scope=OUT_OF_SCOPE,
    remarks=_remarks(),
    kernels=_kernels,
)
