# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's clipped policy-gradient loss as the audit compares it with the papers, and
why it differs.
"""

import importlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from upref.aggregation import Totals
from upref.kl import k3
from upref.ops import exp, sg
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, LossFault, aggregated, with_hp
from upref.verify.group import on_loopback
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import CLAMP_K3, FLOOR, NARROW, kl_term

HOME = "nemo_rl/algorithms/"
PIN = Pin(
    packages=(
        "pydantic==2.12.5",
        "pydantic-core==2.41.5",
        "annotated-types==0.7.0",
        "typing-inspection==0.4.2",
        "pyyaml==6.0.3",
    ),
    repository="https://github.com/NVIDIA-NeMo/RL",
    commit="7ea279abfbeb698b092856d0dab61e7cf39bc909",
    date="2026-08-22",
    files={
        HOME + "loss/loss_functions.py": "e0687539c27bf6c89c2e5c75219d2318",
        HOME + "advantage_estimator.py": "694e004dc8ff6f065e3259edd3172d63",
        HOME + "utils.py": "4b9014d79b5e2ce3246d7cda7b367ae9",
    },
    skip_init=("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.x_token"),
    stubs=(
        "transformers",
        "nemo_rl.models.dtensor",
        "nemo_rl.models.policy",
        "nemo_rl.utils.logger",
        "nemo_rl.data.multimodal_utils",
        "nemo_rl.algorithms.x_token.token_aligner",
    ),
)
# what run_grpo.py takes where nothing is said
RECIPE = "examples/configs/grpo_math_1B.yaml"


def _module(name: str) -> ModuleType:
    """Return this module of NeMo RL, imported where an audit runs."""
    return importlib.import_module(f"nemo_rl.{name}")


def _losses() -> ModuleType:
    """Return NeMo RL's module of losses."""
    return _module("algorithms.loss.loss_functions")


def _recipe_settings() -> dict[str, Any]:
    """Return the configuration file RECIPE of NeMo RL's checkout, as a dict."""
    root = Path(inspect.getfile(_module("algorithms.utils"))).parents[2]
    return importlib.import_module("yaml").safe_load(
        (root / RECIPE).read_text(encoding="utf-8")
    )


def _documented_algorithms() -> dict[str, dict[str, bool]]:
    """Return algorithm -> {field: value}: the algorithms that the docstring of
    ClippedPGLossFn lists, each with the fields that it tells to set.
    """
    text = _losses().ClippedPGLossFn.__doc__
    listed = text.partition("This implements:")[2].partition("Formula:")[0]
    algorithms = {}
    for name, words in re.findall(r"- ([^(]+?) (?:\(|- )(.*)", listed):
        settings = re.findall(r"(\w+) = (True|False)", words)
        algorithm = re.sub(r"\W+", "-", name.lower())
        algorithms[algorithm] = {field: value == "True" for field, value in settings}
    return algorithms


def _modes() -> list[str]:
    """Return the algorithms that the docstring lists, then the classes of the other
    losses.
    """
    others = [
        k for k in vars(_losses()) if k.endswith("LossFn") and k != "ClippedPGLossFn"
    ]
    return [*_documented_algorithms(), *others]


def _defaults(mode: str) -> dict[str, Any]:
    """Return the loss's settings in RECIPE, with the fields that the docstring tells to
    set.
    """
    return (
        _losses().ClippedPGLossConfig(**_recipe_settings()["loss_fn"]).model_dump()
        | _documented_algorithms()[mode]
    )


def _loss(
    mode: str,
    config: dict[str, Any],
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_log_prob: Tensor,
    totals: Totals,
) -> Tensor:
    """Return the value of the loss as the worker calls it: every tensor but `log_prob`
    has one more place in front, which predicts nothing, and the denominators are those
    of the whole batch.
    """
    data = {
        "advantages": advantages,
        "token_mask": mask.to(log_prob.dtype),
        "prev_logprobs": old_log_prob,
        "generation_logprobs": old_log_prob,
        "reference_policy_logprobs": ref_log_prob,
    }
    data = {k: pad(x, (1, 0)) for k, x in data.items()} | {
        "sample_mask": torch.ones(len(mask)).to(log_prob)
    }
    made = _losses().ClippedPGLossFn(_losses().ClippedPGLossConfig(**config))
    return made(
        log_prob,
        data,
        torch.as_tensor(totals.sequences),
        torch.as_tensor(totals.tokens),
    )[0]


def _sampled_k3(beta: float) -> LossFault:
    """Return the fault of a KL term k3 times e^(lp - sg(lp)), a weight that is 1 and
    has a gradient.
    """
    words = "the KL term has the gradient of the sampling too: log π_θ - log π_ref in all, k2's"
    return kl_term(words, lambda lp, ref, old: k3(lp, ref) * exp(lp - sg(lp)), beta)


NO_KL = {"reference_policy_kl_penalty": 0.0}
MEANS = NO_KL | {"token_level_loss": False}
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_type": "tis",
}
TOKENS = aggregated("token-mean")
NO_SUM = replace(
    TOKENS,
    words="aggregated by token-mean; the other setting is the mean of means, and neither is a sum",
)
COMPARISONS = (
    Comparison(
        "default",
        "grpo",
        {},
        "grpo",
        {},
        (with_hp(beta=0.01), _sampled_k3(0.01), CLAMP_K3, TOKENS),
    ),
    Comparison("default", "ppo", NO_KL, "ppo_clip", {}),
    Comparison("default", "reinforce-rloo", NO_KL, "rloo", {}, (NO_SUM,)),
    Comparison(
        "default", "gspo", NO_KL, "gspo", {}, (with_hp(eps_low=0.2, eps_high=0.2),)
    ),
    Comparison("default", "cispo", NO_KL, "cispo", {}, (FLOOR, GROUPS)),
    Comparison("default", "truly-on-policy", NO_KL, "reinforce", {}, (NO_SUM,)),
    Comparison("paper", "grpo", MEANS, "grpo", {}),
    Comparison(
        "paper",
        "grpo",
        {"token_level_loss": False, "reference_policy_kl_penalty": 0.04},
        "grpo",
        {"beta": 0.04},
        (_sampled_k3(0.04), CLAMP_K3),
    ),
    Comparison(
        "paper", "grpo", NO_KL | {"ratio_clip_max": 0.28}, "dapo", {}, (GROUPS,)
    ),
    Comparison(
        "paper",
        "grpo",
        NO_KL | {"ratio_clip_max": 0.28, "ratio_clip_c": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "gspo",
        NO_KL | {"ratio_clip_min": 3e-4, "ratio_clip_max": 4e-4},
        "gspo",
        {},
    ),
    Comparison(
        "paper",
        "cispo",
        NO_KL | {"ratio_clip_min": 1.0, "ratio_clip_max": 4.0},
        "cispo",
        {},
        (GROUPS,),
    ),
    Comparison(
        "paper",
        "truly-on-policy",
        NO_KL | {"use_importance_sampling_correction": True},
        "is_pg",
        {},
        (NO_SUM,),
    ),
    Comparison(
        "paper",
        "truly-on-policy",
        NO_KL | TIS | {"truncated_importance_sampling_ratio": 5.0},
        "cispo",
        {},
        (GROUPS,),
    ),
)


def _advantages(name: str, **settings: bool) -> Callable[..., Tensor]:
    """Return NeMo RL's advantages of this name, as a function of rewards and groups."""

    def advantages(rewards: Tensor, group: Tensor) -> Tensor:
        """Return the advantages. The baselines are in float32, and so are the rewards."""
        module = _module("algorithms.advantage_estimator")
        configs = module.AdvEstimatorConfig(**settings), _losses().ClippedPGLossConfig()
        ones = torch.ones(len(rewards), 1)
        return getattr(module, name)(*configs).compute_advantage(
            group[:, None], rewards.float(), ones
        )[:, 0]

    return advantages


def _normalized_by_peers(
    with_own_reward: bool, in_float32: bool
) -> Callable[..., Tensor]:
    """Return an advantage estimator: (R - mean) / (std + 1e-6), or R - mean where std
    is 0.

    With `with_own_reward`, mean and std are of the whole group; else of the other
    responses in it. With `in_float32`, it computes in float32, and the variance as mean
    of squares minus squared mean.
    """

    def advantages(R: Tensor, group: Tensor) -> Tensor:
        """Return the advantage of each response; 0 for the only one in its group."""
        A = torch.zeros_like(R)
        rewards = R.float() if in_float32 else R
        in_a_group = (torch.bincount(group)[group] > 1).nonzero()[:, 0]
        for i in in_a_group:
            is_other = torch.arange(len(R)) != i
            peers = rewards[(group == group[i]) & (with_own_reward | is_other)]
            n = torch.tensor(len(peers))
            moments = (peers**2).mean() - peers.mean() ** 2
            std = (moments * (n / (n - 1))).sqrt() if in_float32 else peers.std()
            std = std.nan_to_num(0)  # of one peer, or of a variance below 0
            A[i] = (rewards[i] - peers.mean()) / (std + 1e-6 if std > 0 else 1)
        return A

    return advantages


def _clamped_kl(
    f: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a KL estimator whose log-ratio is clamped to 20 and whose value to 10."""
    return lambda lp, ref: f(lp, lp + (ref - lp).clamp(-20, 20)).clamp(-10, 10)


def _log_probs(chunk: int | None) -> Callable[..., Tensor]:
    """Return NeMo RL's log-probabilities of logits, tokens and temperature, in chunks
    of this size; None: in one piece.
    """

    def log_probs(z: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Return the log-probabilities with the vocabulary on one rank: the path
        without ranks calls .cuda().
        """
        dist = torch.distributed
        if not dist.is_initialized():
            with patch.dict(os.environ, on_loopback()):
                dist.init_process_group(
                    "gloo", store=dist.HashStore(), rank=0, world_size=1
                )
        f = _module("distributed.model_utils").get_next_token_logprobs_from_logits
        logits = pad(z / temperature, (0, 0, 0, 1))
        return f(
            pad(tokens, (1, 0)),
            logits,
            vocab_parallel_rank=0,
            vocab_parallel_group=dist.group.WORLD,
            chunk_size=chunk,
        )

    return log_probs


def _gae(name: str, gamma: float, lam: float) -> Callable[..., Tensor]:
    """Return NeMo RL's GAE of tokens, whitened or not, or its returns, as a function of
    rewards, values and mask.
    """
    settings: dict[str, Any] = {"gae_lambda": lam, "gae_gamma": gamma}
    settings["length_adaptive_alpha"] = 0.0
    settings["normalize_advantages"] = name == "gae_whitened"
    off = {"gae_lambda_value": None, "gae_lambda_policy": None}

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return NeMo RL's advantages or returns, with a reward on any token in place of
        one on the last.
        """
        of_module = _module("algorithms.advantage_estimator")
        estimator = of_module.GeneralizedAdvantageEstimator(
            settings | off, _losses().ClippedPGLossConfig()
        )
        vars(estimator)["_build_token_level_rewards"] = lambda *_: rewards
        both = estimator.compute_advantage(None, None, mask, values)
        return both[1 if name == "gae_returns" else 0]

    return token_parts.on_trained(answer)


def _gae_parts(gamma: float, lam: float) -> tuple[Component, ...]:
    """Return NeMo RL's GAE and its returns, with these settings."""
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gae_gamma={gamma:g}, gae_lambda={lam:g}",
            _gae(name, gamma, lam),
            name,
            {"gamma": gamma, "lam": lam},
            tol=1e-6,
        )
        for name in token_parts.ADVANTAGES
    )


def _value_loss(clip: float | None) -> Callable[..., Tensor]:
    """Return NeMo RL's loss of a critic, as a function of values, old values, returns and
    mask.
    """

    def loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """Return the loss, divided by the tokens of the batch."""
        config = _losses().MseValueLossConfig(cliprange=clip)
        data = {"token_mask": mask.to(values), "sample_mask": torch.ones(len(mask))}
        data |= {"returns": returns, "values": old}
        counts = (torch.tensor(len(mask)), mask.sum())
        value, _ = _losses().MseValueLossFn(config)(values, data, *counts)
        return value

    return loss


def _distillation(kl_type: str, zero_outside_topk: bool) -> Callable[..., Tensor]:
    """Return NeMo RL's distillation over the teacher's 3 most likely tokens, as a
    function of the student's logits, the teacher's and the mask.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the loss, divided by the tokens of the batch. Its functions shift: the
        logits get a last place, and the mask a first one.
        """
        top = pad(teacher, (0, 0, 0, 1)).topk(3, -1)
        prepare = _module(
            "distributed.model_utils"
        ).get_distillation_topk_logprobs_from_logits
        of_tokens = prepare(
            pad(student, (0, 0, 0, 1)),
            top.values,
            top.indices,
            zero_outside_topk,
            zero_outside_topk and kl_type != "forward",
        )
        config = _losses().DistillationLossConfig(
            kl_type=kl_type, zero_outside_topk=zero_outside_topk
        )
        data = {"token_mask": pad(mask.to(student), (1, 0)), "input_ids": mask}
        data |= {"sample_mask": torch.ones(len(mask))}
        counts = (torch.tensor(len(mask)), mask.sum())
        value, _ = _losses().DistillationLossFn(config)(*of_tokens, data, *counts)
        return value

    return loss


def _mixed_kl(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return half the forward and half the reverse KL over the teacher's 3 most likely
    tokens, both normalized over them.
    """
    both = [
        token_parts.DIVERGENCES[f"teacher_top_k_renormalized({name})"](
            student, teacher, mask, k=3
        )
        for name in ("forward_kl", "reverse_kl")
    ]
    return (both[0] + both[1]) / 2


def _kl_to_top(kl_type: str) -> Callable[..., Tensor]:
    """Return a KL between the student and the teacher's 3 most likely tokens,
    normalized over them, as a function of the student's logits, the teacher's and the
    mask. The teacher's log-probability of all other tokens is -100.

    Args:
        kl_type: `forward` weights by the teacher's probabilities, any other one by the
            student's.
    """

    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        """Return the mean over the tokens."""
        top = teacher.topk(3, -1)
        lp_teacher = torch.full_like(teacher, -100.0)
        lp_teacher.scatter_(-1, top.indices, top.values.log_softmax(-1))
        lp = student.log_softmax(-1)
        if kl_type == "forward":
            terms = lp_teacher.exp() * (lp_teacher - lp)
        else:
            terms = lp.exp() * (lp - lp_teacher)
        return terms.sum(-1)[mask].mean()

    return loss


def _sampled_distillation(student: Tensor, teacher: Tensor, tokens: Tensor) -> Tensor:
    """Return -A log π of sampled tokens, A the advantage of OPDAdvantageEstimator."""
    at = tokens[..., None]
    lp = student.log_softmax(-1).gather(-1, at)[..., 0]
    lp_teacher = teacher.log_softmax(-1).gather(-1, at)[..., 0]
    of_class = _module("algorithms.advantage_estimator").OPDAdvantageEstimator
    A = of_class({}, {}).compute_advantage(
        None, None, torch.ones_like(lp), teacher_logprobs=lp_teacher, prev_logprobs=lp
    )
    return -A * lp


def _distillations() -> tuple[Component, ...]:
    """Return NeMo RL's losses of a teacher."""

    def part(mode: str, found: Any, promise: Any, words: str = "") -> Component:
        """Return a loss of a teacher, and what it is compared with."""
        hp = {"k": 3} if "top_k" in str(promise) and not words else {}
        return Component(
            "distillation", mode, found, promise, hp, tol=1e-5, words=words
        )

    outside = "KL over the vocabulary, the teacher's log-probability outside its top 3 is -100"
    return (
        *(
            part(
                f"DistillationLossFn, kl_type={name}",
                _distillation(name, False),
                f"teacher_top_k_renormalized({name}_kl)",
            )
            for name in ("forward", "reverse")
        ),
        part(
            "DistillationLossFn, kl_type=mixed",
            _distillation("mixed", False),
            _mixed_kl,
            "half of each KL over the teacher's top 3, normalized",
        ),
        *(
            part(
                f"DistillationLossFn, kl_type={name}, zero_outside_topk=True",
                _distillation(name, True),
                _kl_to_top(name),
                f"{name} {outside}",
            )
            for name in ("forward", "reverse")
        ),
        part(
            "OPDAdvantageEstimator",
            token_parts.in_expectation(_sampled_distillation),
            "sampled_reverse_kl",
        ),
    )


def _parts() -> tuple[Component, ...]:
    """Return the parts of NeMo RL that are compared by themselves, such as its
    advantages.
    """
    kl = importlib.import_module("upref.kl")
    utils = _module("algorithms.utils")
    return (
        Component(
            "advantages",
            "grpo",
            _advantages("GRPOAdvantageEstimator"),
            "group_norm",
            tol=1e-5,
            reasons=(
                Fault(
                    "mean and std are of the other responses; where these have one reward, it is not divided",
                    _normalized_by_peers(with_own_reward=False, in_float32=False),
                ),
                Fault(
                    SINGLE, _normalized_by_peers(with_own_reward=False, in_float32=True)
                ),
            ),
        ),
        Component(
            "advantages",
            "grpo, use_leave_one_out_baseline=False",
            _advantages("GRPOAdvantageEstimator", use_leave_one_out_baseline=False),
            "group_norm",
            tol=1e-5,
            reasons=(
                Fault(
                    SINGLE, _normalized_by_peers(with_own_reward=True, in_float32=True)
                ),
            ),
        ),
        Component(
            "advantages",
            "grpo, normalize_rewards=False",
            _advantages("GRPOAdvantageEstimator", normalize_rewards=False),
            "leave_one_out",
            tol=1e-6,
        ),
        Component(
            "advantages",
            "reinforce_plus_plus",
            _advantages("ReinforcePlusPlusAdvantageEstimator"),
            "group_mean_whiten",
            tol=1e-5,
        ),
        Component(
            "advantages",
            "reinforce_plus_plus, minus_baseline=False",
            _advantages("ReinforcePlusPlusAdvantageEstimator", minus_baseline=False),
            "whiten",
            tol=1e-5,
        ),
        *kls(
            utils.calculate_kl,
            {k: k for k in kl.ESTIMATORS},
            {k: (Fault(NARROW, _clamped_kl(f)),) for k, f in kl.ESTIMATORS.items()},
        ),
        Component("aggregation", "masked_mean", utils.masked_mean, "token-mean"),
        Component(
            "logprobs",
            "vocab-parallel, one rank",
            _log_probs(None),
            "token_log_probs",
            tol=1e-4,
        ),
        Component(
            "logprobs",
            "vocab-parallel, one rank, in chunks",
            _log_probs(2),
            "token_log_probs",
            tol=1e-4,
        ),
        *_gae_parts(1.0, 1.0),
        *_gae_parts(0.9, 0.8),
        Component(
            "value",
            "MseValueLossFn, cliprange=0.2",
            _value_loss(0.2),
            "clipped, token-mean",
            {"clip": 0.2},
            tol=1e-6,
        ),
        Component(
            "value",
            "MseValueLossFn, cliprange=None",
            _value_loss(None),
            "mse, token-mean",
            tol=1e-6,
        ),
        *_distillations(),
    )


SINGLE = "the variance is E[R²] - E[R]² in float32"
ELSE = "no policy-gradient loss: it reads no advantages"
REMARKS = (
    f"Defaults are those of {RECIPE} over the config class; the fields of an algorithm are those that the "
    "docstring of ClippedPGLossFn says to set. Denominators are those of the global batch; a mean "
    "divides by n + 1e-8, so that weights are compared to 1e-6.",
    "Not covered: several ranks, packed sequences, icepop and seq-mask-tis, VAPO's positive-example loss, "
    "KL in the reward, the GDPO estimator, cross-tokenizer distillation. Dr. GRPO's constant denominator is not offered.",
)
NEMO_RL = Framework(
    "nemo_rl",
    pin=PIN,
    modes=_modes,
    defaults=_defaults,
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    remarks=REMARKS,
    tol=1e-6,
    out_of_scope=dict.fromkeys(
        (
            "DraftCrossEntropyLossFn",
            "NLLLossFn",
            "PreferenceLossFn",
            "DPOLossFn",
            "CrossTokenizerDistillationLossFn",
        ),
        ELSE,
    )
    | dict.fromkeys(
        ("DistillationLossFn", "MseValueLossFn"), "no policy loss: a row of its own"
    ),
)
