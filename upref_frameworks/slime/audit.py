# SPDX-License-Identifier: Apache-2.0
"""slime's policy losses as the audit compares them with the papers, and why they
differ.
"""

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.kl import k3
from upref.verify.faults.losses import GROUPS, aggregated, with_hp
from upref_frameworks.audits.components import kls
from upref_frameworks.audits.framework import Comparison, Component, Framework, Pin
from upref_frameworks.audits.shared import BETA, CLAMP_K3, FLOOR, K1, clamp_kl
from upref_frameworks.audits.sources import defaults, options

ARGUMENTS = "slime.utils.arguments"
PIN = Pin(
    repository="https://github.com/THUDM/slime",
    commit="624b824a898ab0ec1fcb4d373004c7f3852bf515",
    date="2026-08-21",
    files={
        "slime/utils/ppo_utils.py": "0f0ad5ee55ceb27ac7160a8665e324a2",
        "slime/utils/arguments.py": "434f78ffce7829fb23854729f11d9af6",
    },
    skip_init=(
        "slime",
        "slime.utils",
        "slime.backends",
        "slime.backends.megatron_utils",
    ),
    stubs=("megatron", "transformer_engine"),
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
)


def _ppo() -> ModuleType:
    """Return slime's module of losses, imported where an audit runs."""
    return importlib.import_module("slime.utils.ppo_utils")


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
    """Return the value of policy_loss_function, with its KL term if that is on.
    Sequences stand one after the other, each without its padding; the sum is divided by
    the tokens or the responses of the mini-batch.
    """
    eps = config["eps_clip"]
    high = config["eps_clip_high"]
    c = config["eps_clip_c"]
    high = eps if high is None else high  # as slime does when it validates arguments
    ppo = _ppo()
    per_token = config["calculate_per_token_loss"]

    def rows(x: Tensor) -> list[Tensor]:
        """Return each row without its padding."""
        return [r[: _length(m)] for r, m in zip(x, mask, strict=True)]

    lp = rows(log_prob)
    old = rows(old_log_prob)
    masks = rows(mask)
    if mode == "gspo":
        log_ratio_old_to_new = ppo.compute_gspo_kl(lp, old, lp, masks)
    else:
        log_ratio_old_to_new = torch.cat(old) - torch.cat(lp)
    A = torch.cat(rows(advantages))
    flat_lp = torch.cat(lp)
    if mode == "cispo":
        terms = ppo.compute_cispo_loss(log_ratio_old_to_new, flat_lp, A, eps, high)
    else:
        terms = ppo.compute_policy_loss(log_ratio_old_to_new, A, eps, high, c)
    lengths = [len(r) for r in lp]
    reduced = _reducer()(lengths, lengths, masks, calculate_per_token_loss=per_token)
    value = reduced(terms[0])
    if config["use_kl_loss"]:
        kls = ppo.compute_approx_kl(
            flat_lp, torch.cat(rows(ref_log_prob)), config["kl_loss_type"]
        )
        value = value + config["kl_loss_coef"] * reduced(kls)
    return value / (totals.tokens if per_token else totals.sequences)


def _reducer() -> Any:
    """Return slime's function that makes a reducer, set up for one process."""
    cp = importlib.import_module("slime.backends.megatron_utils.cp_utils")
    # true here: the audit is one process
    vars(cp)["mpu"] = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    return cp.get_sum_of_sample_mean


def _length(mask: Tensor) -> int:
    """Return the length of a response: up to its last token that counts."""
    return int(mask.nonzero().max()) + 1


TOKENS = {"calculate_per_token_loss": True}
MEANS = aggregated("seq-mean-token-mean")
KL = {"use_kl_loss": True, "kl_loss_coef": BETA}
COMPARISONS = (
    Comparison("default", "grpo", {}, "grpo", {}),
    Comparison("default", "grpo", KL, "grpo", {"beta": BETA}, (K1,)),
    Comparison(
        "default", "gspo", {}, "gspo", {}, (with_hp(eps_low=0.2, eps_high=0.2),)
    ),
    Comparison("default", "cispo", {}, "cispo", {}, (FLOOR, MEANS)),
    Comparison("paper", "grpo", {}, "grpo", {}),
    Comparison("paper", "grpo", KL | {"kl_loss_type": "k3"}, "grpo", {"beta": BETA}),
    Comparison(
        "paper",
        "grpo",
        KL | {"kl_loss_type": "low_var_kl"},
        "grpo",
        {"beta": BETA},
        (CLAMP_K3,),
    ),
    Comparison(
        "paper", "grpo", TOKENS | {"eps_clip_high": 0.28}, "dapo", {}, (GROUPS,)
    ),
    Comparison(
        "paper",
        "grpo",
        TOKENS | {"eps_clip_high": 0.28, "eps_clip_c": 10.0},
        "dapo",
        {"c": 10.0},
        (GROUPS,),
    ),
    Comparison("paper", "gspo", {"eps_clip": 3e-4, "eps_clip_high": 4e-4}, "gspo", {}),
    Comparison(
        "paper",
        "cispo",
        TOKENS | {"eps_clip": 1.0, "eps_clip_high": 4.0},
        "cispo",
        {},
        (GROUPS,),
    ),
)


def _log_probs(z: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return slime's log-probabilities of logits [B, T, V], row by row, [B, T]."""
    f = vars(_ppo())["_calculate_log_probs_and_entropy_chunk"]
    rows = [
        f(x / temperature, t, None, with_entropy=False, log_prob_keep_mask=None)[0]
        for x, t in zip(z, tokens, strict=True)
    ]
    return torch.stack(rows).squeeze(-1)


def _parts() -> tuple[Component, ...]:
    """Return the parts of slime that are compared by themselves, such as its KL terms."""
    return (
        *kls(
            _ppo().compute_approx_kl,
            {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"},
            {"low_var_kl": (clamp_kl(k3),)},
            tol=1e-5,
        ),
        Component(
            "logprobs",
            "vocab-parallel, one rank",
            _log_probs,
            "token_log_probs",
            tol=1e-4,
        ),
    )


REMARKS = (
    "The losses as policy_loss_function puts them together, on sequences without padding; the sum is divided by "
    "the responses of the global batch, with --calculate-per-token-loss by its tokens. KL terms are in float32.",
    "Not covered: context parallelism, OPSM, truncated importance sampling, advantages (they want Megatron), "
    "compiled code.",
)
SLIME = Framework(
    "slime",
    pin=PIN,
    modes=lambda: list(options(ARGUMENTS)["--advantage-estimator"]["choices"]),
    defaults=lambda mode: defaults(ARGUMENTS, READ),
    loss_by_names=_loss,
    comparisons=COMPARISONS,
    parts=_parts,
    remarks=REMARKS,
    tol=3e-6,
    out_of_scope={
        "reinforce_plus_plus": "an advantage estimator: its loss is grpo's",
        "reinforce_plus_plus_baseline": "an advantage estimator: its loss is grpo's",
        "ppo": "an advantage estimator with a critic: its loss is grpo's",
    },
)
