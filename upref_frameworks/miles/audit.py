# SPDX-License-Identifier: Apache-2.0
"""The policy losses of miles, a fork of slime, as the audit holds them against the
papers, and why they differ.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.verify.faults import Fault
from upref.verify.faults.losses import GROUPS, with_hp
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.components import Component, kls
from upref_frameworks.audits.framework import Comparison, Framework, Pin
from upref_frameworks.audits.shared import (
    BETA,
    CLAMP,
    CLAMP_K3,
    CLAMP_S20,
    K1,
    NARROW_K3,
)
from upref_frameworks.audits.sources import defaults, options

UTILS = "miles.backends.training_utils."
ARGUMENTS = "miles.utils.arguments"
PIN = Pin(
    repository="https://github.com/radixark/miles",
    commit="31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    date="2026-08-21",
    files={
        "miles/backends/training_utils/loss_hub/losses.py": "9ee2f34ea64208fbbcf9ffd6d6a40c17",
        "miles/backends/training_utils/loss_hub/math_utils.py": "0306b2cdadaa4effcf483b7d8e0d3a5d",
        "miles/backends/training_utils/cp_utils.py": "2757d9da461f6dc2f0a19df219c7a698",
        "miles/backends/training_utils/loss_hub/opd.py": "8517e85153310c7d3d1309900158fb67",
        "miles/rollout/on_policy_distillation.py": "c9d6c0fe84c083e0134132ea516b7aa3",
        "miles/utils/arguments.py": "b0260a00f76ee56b532cd1bff4c6e71e",
    },
    skip_init=(
        "miles",
        "miles.utils",
        "miles.backends",
        "miles.backends.training_utils",
        "miles.backends.training_utils.loss_hub",
        "miles.rollout",
    ),
    stubs=(
        UTILS + "parallel",
        UTILS + "loss_hub.logit_processors",
        UTILS + "loss_hub.corrections",
        "miles.utils.misc",
        "miles.utils.types",
        "fla",
        "aiohttp",
    ),
    # its losses are compiled: the plain functions are audited
    env={"TORCHDYNAMO_DISABLE": "1"},
)
READ = (
    "--eps-clip",
    "--eps-clip-high",
    "--eps-clip-c",
    "--calculate-per-token-loss",
    "--use-kl-loss",
    "--kl-loss-coef",
    "--kl-loss-type",
    "--use-unbiased-kl",
)
OFF = dict.fromkeys(
    (
        "use_rollout_logprobs",
        "skip_actor_forward_only",
        "observe_training_entropy",
        "use_opsm",
        "use_tis",
        "get_mismatch_metrics",
        "custom_pg_loss_reducer_function_path",
    ),
    None,
)


def _modules() -> tuple[Any, Any, Any]:
    """Return the modules losses, math_utils and cp_utils, set up for one process."""
    alone = SimpleNamespace(cp=SimpleNamespace(size=1, rank=0, group=None))
    modules = [
        importlib.import_module(UTILS + m)
        for m in ("loss_hub.losses", "loss_hub.math_utils", "cp_utils")
    ]
    for module in modules:
        vars(module)["get_parallel_state"] = lambda: alone
    return modules[0], modules[1], modules[2]


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
    """Return the value of policy_loss_function on responses without padding, its sum
    divided as loss_function and Megatron do: by the tokens or the responses of the
    mini-batch.
    """
    # as miles does when it validates its arguments
    if config["eps_clip_high"] is None:
        high = config["eps_clip"]
    else:
        high = config["eps_clip_high"]
    args = SimpleNamespace(
        **OFF | config | {"eps_clip_high": high},
        advantage_estimator=mode,
        entropy_coef=0.0,
        qkv_format="thd",
    )
    losses, _, cp = _modules()
    # up to the last token that counts
    lengths = [int(m.nonzero().max()) + 1 for m in mask]

    def rows(x: Tensor) -> list[Tensor]:
        """Return each row up to its last token that counts."""
        return [row[:k] for row, k in zip(x, lengths, strict=True)]

    batch: dict[str, Any] = {
        "advantages": rows(advantages),
        "log_probs": rows(old_log_prob),
    }
    batch |= {"ref_log_probs": rows(ref_log_prob), "loss_masks": rows(mask)}
    batch |= {
        "response_lengths": lengths,
        "total_lengths": lengths,
        "unconcat_tokens": None,
    }
    vars(losses)["get_log_probs_and_entropy"] = lambda *_, **__: {
        "log_probs": rows(log_prob)
    }
    per_token = config["calculate_per_token_loss"]
    reduced = cp.get_sum_of_sample_mean(
        lengths, lengths, batch["loss_masks"], per_token
    )
    value, _ = losses.policy_loss_function(args, batch, log_prob, reduced)
    return value / (totals.tokens if per_token else totals.sequences)


def _gae(which: int, hp: dict[str, float], chunked: bool) -> Callable[..., Tensor]:
    """Return miles's GAE (which = 0) or its returns (which = 1), as a function of
    rewards, values and mask.
    """

    def answer(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return the advantages or returns, with a reward on any token beside the one
        that it puts on the last.
        """
        lengths = [mask.shape[1]] * len(mask)
        both = _modules()[1].get_advantages_and_returns_batch(
            total_lengths=lengths,
            response_lengths=lengths,
            values_list=list(values),
            rewards_list=list(rewards),
            terminal_rewards=[0.0] * len(mask),
            qkv_format="thd",
            max_seq_lens=None,
            loss_masks=list(mask),
            gamma=hp["gamma"],
            lambd=hp["lam"],
            chunked=chunked,
        )
        return torch.stack(both[which])

    return token_parts.on_trained(answer)


def _gae_parts(gamma: float, lam: float) -> tuple[Component, ...]:
    """Return miles's GAE and its returns, with these settings, in one scan and in
    chunks.
    """
    hp = {"gamma": gamma, "lam": lam}
    return tuple(
        Component(
            "token_advantages",
            f"{name}, gamma={gamma:g}, lambd={lam:g}, chunked={chunked}",
            _gae(which, hp, chunked),
            name,
            hp,
            tol=1e-6,
        )
        for which, name in enumerate(("gae", "gae_returns"))
        for chunked in (True, False)
    )


def _value_loss(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return value_loss_function at value_clip = 0.2, divided by the responses."""
    losses, _, cp = _modules()
    lengths = [mask.shape[1]] * len(mask)
    reduced = cp.get_sum_of_sample_mean(lengths, lengths, list(mask.to(values)), False)
    vars(losses)["get_values"] = lambda *_, **__: {"values": list(values)}
    batch = {"values": list(old), "returns": list(returns), "unconcat_tokens": None}
    batch |= {"total_lengths": lengths, "response_lengths": lengths}
    args = SimpleNamespace(value_clip=0.2)
    value, _ = losses.value_loss_function(args, batch, values, reduced)
    return value / len(mask)


def _log_probs(first: Tensor) -> Tensor:
    """Return the log-probabilities [T, 2] of a vocabulary of two tokens, of which the
    first one has `first`, [1, T].
    """
    return torch.stack([first[0], torch.log(-torch.expm1(first[0]))], -1)


def _distillation(top_k: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the expected advantage of on-policy distillation with
    --opd-log-prob-top-k where the policy has not moved, as a function of the student's
    and the teacher's log-probability of the first of two tokens, both [1, T].
    """

    def expected(lp: Tensor, teacher: Tensor) -> Tensor:
        """Return the expected advantage of a token, [1, T]; its gradient is the
        expectation of the advantage times the gradient of the sampled token's
        log-probability.
        """
        rollout = importlib.import_module("miles.rollout.on_policy_distillation")
        opd = importlib.import_module(UTILS + "loss_hub.opd")
        args = SimpleNamespace(
            opd_log_prob_top_k=top_k, opd_kl_coef=1.0, opd_type="sglang"
        )
        students, teachers = _log_probs(lp), _log_probs(teacher)
        T = len(students)

        def both(log_probs: Tensor) -> list[Any]:
            """Return pairs of log-probability and id, as SGLang lists them."""
            return [[[x, i] for i, x in enumerate(row)] for row in log_probs.tolist()]

        total = torch.zeros_like(students[:, 0])
        for sampled in range(2):
            teacher_of_sampled = [[x, sampled] for x in teachers[:, sampled].tolist()]
            answer = {
                "input_token_logprobs": [None, *teacher_of_sampled],
                "input_token_ids_logprobs": [None, *both(teachers)],
            }
            of_teacher = {"meta_info": answer}
            reward = of_teacher | {"teacher": of_teacher}
            sample = SimpleNamespace(
                tokens=[sampled] * T,
                response_length=T,
                metadata={"opd_student_top_logprobs": both(students)},
                get_reward_value=lambda args, reward=reward: reward,
            )
            rollout.post_process_rewards(args, [sample])
            if top_k:
                data = {"opd_reverse_kl": [sample.opd_reverse_kl]}
            else:
                data = {"teacher_log_probs": [sample.teacher_log_probs]}
            now = students[:, sampled]
            old = now.detach()
            advantages = [torch.zeros(T)]
            opd.apply_opd_kl_to_advantages(args, data, advantages, [old])
            # the last factor is 1, with the gradient of the sampled token's log π
            total = total + old.exp() * advantages[0] * (1 + now - old)
        return total[None]

    return expected


def _negative_kl(lp: Tensor, teacher: Tensor) -> Tensor:
    """Return -KL(student || teacher) over both tokens, [1, T]."""
    students, teachers = _log_probs(lp), _log_probs(teacher)
    return -(students.exp() * (students - teachers)).sum(-1)[None]


def _constant_negative_kl(lp: Tensor, teacher: Tensor) -> Tensor:
    """Return the value of `_negative_kl` with a gradient of 0."""
    return _negative_kl(lp, teacher).detach() + 0 * lp


def _distillations() -> tuple[Component, ...]:
    """Return on-policy distillation by the sampled token and by the top 2 of 2 tokens."""
    same_for_all = Fault(SAME_FOR_ALL, _constant_negative_kl)
    return tuple(
        Component(
            "kl",
            f"opd_log_prob_top_k={top_k}",
            _distillation(top_k),
            _negative_kl,
            words="-KL(student || teacher) in expectation",
            reasons=reasons,
            tol=1e-5,
        )
        for top_k, reasons in ((0, ()), (2, (same_for_all,)))
    )


SAME_FOR_ALL = (
    "the advantage is the same whichever token was sampled: no gradient in expectation"
)
TOKENS = {"calculate_per_token_loss": True, "eps_clip_high": 0.28}
KL = {"use_kl_loss": True, "kl_loss_coef": BETA}
C = {"eps_clip_c": 10.0}
LOW = {"kl_loss_type": "low_var_kl"}
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}, (CLAMP,)),
    Comparison("default", "grpo", KL | C, "grpo", {"beta": BETA, "c": 10.0}, (K1,)),
    Comparison(
        "default",
        "gspo",
        {},
        "gspo",
        {},
        (with_hp(eps_low=0.2, eps_high=0.2), CLAMP_S20),
    ),
    Comparison(
        "paper",
        "grpo",
        KL | C | {"kl_loss_type": "k3"},
        "grpo",
        {"beta": BETA, "c": 10.0},
    ),
    Comparison(
        "paper", "grpo", KL | C | LOW, "grpo", {"beta": BETA, "c": 10.0}, (CLAMP_K3,)
    ),
    Comparison("paper", "grpo", TOKENS, "dapo", {}, (GROUPS, CLAMP)),
    Comparison("paper", "grpo", TOKENS | C, "dapo", {"c": 10.0}, (GROUPS,)),
    Comparison(
        "paper",
        "gspo",
        {"eps_clip": 3e-4, "eps_clip_high": 4e-4},
        "gspo",
        {},
        (CLAMP_S20,),
    ),
)


REMARKS = (
    "policy_loss_function on responses without padding; the sum is divided by the responses of the global batch, "
    "with --calculate-per-token-loss by its tokens. Ratios and KL terms are in float32. A token whose "
    "log-probability is NaN counts as on policy, without a word.",
    "On-policy distillation: each token of a vocabulary of two is sampled once, and weighted by its probability.",
    "Not covered: context parallelism, OPSM, truncated importance sampling, other advantages, compiled code.",
)
MILES = Framework(
    "miles",
    pin=PIN,
    modes=lambda: list(options(ARGUMENTS)["--advantage-estimator"]["choices"]),
    defaults=lambda mode: defaults(ARGUMENTS, READ),
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    remarks=REMARKS,
    tol=3e-6,
    parts=lambda: (
        *kls(
            _modules()[1].compute_approx_kl,
            {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"},
            {"low_var_kl": (NARROW_K3,)},
            tol=1e-5,
        ),
        *_distillations(),
        *_gae_parts(1.0, 1.0),
        *_gae_parts(0.9, 0.8),
        Component(
            "value",
            "value_loss_function, value_clip=0.2",
            _value_loss,
            "clipped, seq-mean-token-mean",
            {"clip": 0.2, "scale": 1.0},
            tol=1e-6,
        ),
    ),
    out_of_scope=dict.fromkeys(
        ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"),
        "an advantage estimator: its loss is grpo's",
    ),
)
