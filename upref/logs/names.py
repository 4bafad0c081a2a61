# SPDX-License-Identifier: Apache-2.0
"""The scalars that `upref logs` knows, and how frameworks name them.

Each name was read in the source that logs it: TRL 1.16.0, verl 0.9.1, and of 2026-08
OpenRLHF, SkyRL, slime, NeMo-RL and prime-rl.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from upref.errors import InputError
from upref.result import name_first

COLUMNS_NAMED = 12  # of a log, in a message
# what a number of that kind may be: a share is in [0, 1]
Kind = Literal["any", "share", "at least 0", "at least 1"]


@dataclass(frozen=True)
class Scalar:
    """One logged quantity.

    Args:
        words: what it is.
        kind: which numbers it may have.
        names: how frameworks call it, without a leading "train/".
    """

    words: str
    kind: Kind
    names: tuple[str, ...]


SCALARS: dict[str, Scalar] = {
    "loss": Scalar("the loss", "any", ("loss", "policy/final_loss", "loss/mean")),
    "pg_loss": Scalar(
        "the policy-gradient part of the loss",
        "any",
        ("pg_loss", "actor/pg_loss", "policy_loss", "policy/policy_loss"),
    ),
    "kl_loss": Scalar(
        "a KL to the reference that is a part of the loss",
        "any",
        ("kl_loss", "actor/kl_loss", "policy/policy_kl"),
    ),
    "kl": Scalar("a KL to the reference, by k1, k2 or k3", "any", ("kl", "kl_penalty")),
    "kl_k3": Scalar(
        "a KL to the reference by k3, which TRL's default multiplies by the ratio",
        "at least 0",
        (),
    ),
    "kl_old": Scalar(
        "the mean of log π_old - log π_θ", "any", ("ppo_kl", "actor/ppo_kl")
    ),
    "sampler_k1": Scalar(
        "the mean of log μ - log π_old", "any", ("rollout_corr/kl", "vllm_kl")
    ),
    "sampler_k3": Scalar(
        "KL(μ ‖ π_old) by k3",
        "at least 0",
        ("rollout_corr/k3_kl", "mismatch_kl/all/mean"),
    ),
    "sampler_k3_max": Scalar(
        "the largest ρ - 1 - log ρ of a token, where ρ = π_old/μ",
        "at least 0",
        ("mismatch_kl/all/max",),
    ),
    "sampler_chi2": Scalar(
        "the mean of ρ² - 1, where ρ = π_old/μ", "any", ("rollout_corr/chi2_token",)
    ),
    "trainer_log_ppl": Scalar(
        "the mean of -log π_old over a response's tokens, averaged over responses",
        "at least 0",
        ("rollout_corr/training_log_ppl",),
    ),
    "sampler_log_ppl": Scalar(
        "the mean of -log μ over a response's tokens, averaged over responses",
        "at least 0",
        ("rollout_corr/rollout_log_ppl",),
    ),
    "trainer_ppl": Scalar(
        "the mean perplexity of responses by the trainer",
        "at least 1",
        ("rollout_corr/training_ppl",),
    ),
    "sampler_ppl": Scalar(
        "the mean perplexity of responses by the sampler",
        "at least 1",
        ("rollout_corr/rollout_ppl",),
    ),
    "log_ppl_diff": Scalar(
        "the mean difference of the two log perplexities",
        "any",
        ("rollout_corr/log_ppl_diff",),
    ),
    "log_ppl_abs_diff": Scalar(
        "the mean absolute difference of the two log perplexities",
        "at least 0",
        ("rollout_corr/log_ppl_abs_diff",),
    ),
    "ppl_ratio": Scalar(
        "the mean ratio of the two perplexities",
        "at least 0",
        ("rollout_corr/ppl_ratio",),
    ),
    "log_probs": Scalar("the mean of log π_old", "any", ("rollout/log_probs",)),
    "ref_log_probs": Scalar("the mean of log π_ref", "any", ("rollout/ref_log_probs",)),
    "sampler_log_probs": Scalar(
        "the mean of log μ", "any", ("rollout/rollout_log_probs",)
    ),
    "ref_log_ratio": Scalar(
        "the mean of log π_θ - log π_ref", "any", ("logprobs_diff",)
    ),
    "gap_mean": Scalar(
        "the mean of abs(log π_old - log μ)",
        "at least 0",
        (
            "sampling/sampling_logp_difference/mean",
            "train_rollout_logprob_abs_diff",
            "policy/rollout_train_logprobs_abs_diff_mean",
        ),
    ),
    "gap_max": Scalar(
        "the largest abs(log π_old - log μ)",
        "at least 0",
        (
            "sampling/sampling_logp_difference/max",
            "policy/rollout_train_logprobs_abs_diff_max",
        ),
    ),
    "gap_factor": Scalar(
        "the mean of exp(abs(log π_old - log μ))",
        "at least 1",
        ("token_mult_prob_error",),
    ),
    "gap_js": Scalar(
        "a Jensen-Shannon divergence", "at least 0", ("js_divergence_error",)
    ),
    "sampler_ratio_min": Scalar(
        "the smallest factor of the sampler correction",
        "at least 0",
        ("sampling/importance_sampling_ratio/min",),
    ),
    "sampler_ratio_mean": Scalar(
        "the mean factor of the sampler correction",
        "at least 0",
        ("sampling/importance_sampling_ratio/mean",),
    ),
    "sampler_ratio_max": Scalar(
        "the largest factor of the sampler correction",
        "at least 0",
        ("sampling/importance_sampling_ratio/max",),
    ),
    "ratio_mean": Scalar("the mean of r = π_θ/π_old", "at least 0", ("ois",)),
    "ratio_min": Scalar("the smallest r", "any", ("probs_ratio_min",)),
    "ratio_max": Scalar("the largest r", "any", ("probs_ratio_max",)),
    "ratio_sum": Scalar("r, averaged or summed by NeMo-RL", "any", ("probs_ratio",)),
    "clamped_min": Scalar(
        "the smallest clamped r", "any", ("probs_ratio_clamped_min",)
    ),
    "clamped_max": Scalar("the largest clamped r", "any", ("probs_ratio_clamped_max",)),
    "clamped_sum": Scalar(
        "clamped r, averaged or summed by NeMo-RL", "any", ("probs_ratio_clamped",)
    ),
    "clip_fraction": Scalar(
        "the share of clipped tokens",
        "share",
        (
            "pg_clipfrac",
            "actor/pg_clipfrac",
            "ppo_clip_ratio",
            "clip_ratio/region_mean",
            "policy/loss_metrics/clip_ratio",
        ),
    ),
    "clip_low": Scalar(
        "the share of tokens clipped below, where A < 0",
        "share",
        ("clip_ratio/low_mean",),
    ),
    "clip_high": Scalar(
        "the share of tokens clipped above, where A > 0",
        "share",
        ("clip_ratio/high_mean",),
    ),
    "clip_lower": Scalar(
        "the share of tokens clipped by the dual clip",
        "share",
        ("actor/pg_clipfrac_lower",),
    ),
    "entropy": Scalar(
        "the entropy of the policy in nats",
        "at least 0",
        (
            "entropy",
            "actor/entropy",
            "entropy_loss",
            "policy/policy_entropy",
            "entropy/all/mean",
        ),
    ),
    "entropy_min": Scalar(
        "the smallest entropy of a token in nats", "at least 0", ("entropy/all/min",)
    ),
    "entropy_max": Scalar(
        "the largest entropy of a token in nats", "at least 0", ("entropy/all/max",)
    ),
    "reward_mean": Scalar(
        "the mean reward",
        "any",
        (
            "reward",
            "critic/score/mean",
            "rollout/raw_reward",
            "rollout/reward_mean",
            "reward/avg_raw_reward",
            "reward/mean",
        ),
    ),
    "reward_min": Scalar("the smallest reward", "any", ("critic/score/min",)),
    "reward_max": Scalar("the largest reward", "any", ("critic/score/max",)),
    "reward_std": Scalar(
        "the standard deviation of the rewards",
        "at least 0",
        ("reward_std", "rollout/reward_std"),
    ),
    "equal_groups": Scalar(
        "the share of prompts whose rewards are all equal",
        "share",
        ("frac_reward_zero_std",),
    ),
    "advantage_mean": Scalar("the mean advantage", "any", ("critic/advantages/mean",)),
    "advantage_min": Scalar(
        "the smallest advantage", "any", ("critic/advantages/min",)
    ),
    "advantage_max": Scalar("the largest advantage", "any", ("critic/advantages/max",)),
    "length_mean": Scalar(
        "the mean length of responses in tokens",
        "at least 0",
        (
            "completions/mean_length",
            "response_length/mean",
            "rollout/response_len/mean",
            "rollout/response_lengths",
            "rollout/response_length_mean",
            "generate/avg_num_tokens",
            "mean_gen_tokens_per_sample",
        ),
    ),
    "length_min": Scalar(
        "the shortest response in tokens",
        "at least 0",
        ("completions/min_length", "response_length/min", "generate/min_num_tokens"),
    ),
    "length_max": Scalar(
        "the longest response in tokens",
        "at least 0",
        ("completions/max_length", "response_length/max", "generate/max_num_tokens"),
    ),
    "ended_mean": Scalar(
        "the mean length of the responses that ended",
        "at least 0",
        ("completions/mean_terminated_length",),
    ),
    "ended_min": Scalar(
        "the shortest of the responses that ended",
        "at least 0",
        ("completions/min_terminated_length",),
    ),
    "ended_max": Scalar(
        "the longest of the responses that ended",
        "at least 0",
        ("completions/max_terminated_length",),
    ),
    "truncated": Scalar(
        "the share of responses that were cut off",
        "share",
        (
            "completions/clipped_ratio",
            "rollout/truncated_ratio",
            "rollout/truncated_rate",
        ),
    ),
    "grad_norm": Scalar(
        "the norm of the gradient",
        "at least 0",
        (
            "grad_norm",
            "actor/grad_norm",
            "policy/grad_norm",
            "actor_grad_norm",
            "optim/grad_norm",
        ),
    ),
    "tokens_seen": Scalar("the tokens since the start", "at least 0", ("num_tokens",)),
}
# names that mean another scalar where a second name stands beside them: the kl of TRL's
# GRPO is k3, and that of its RLOO, which logs no such gap, is k1
BESIDE: dict[str, tuple[str, str]] = {
    "kl": ("sampling/sampling_logp_difference/mean", "kl_k3")
}
# columns that count the steps, the most specific one first
STEPS = (
    "global_step",
    "training/global_step",
    "trainer/global_step",
    "trainer/step",
    "step",
    "Step",
    "rollout/step",
    "global_step/max_steps",
    "progress/batch",
    "_step",
)
EVALUATION = ("eval/", "eval_", "val/", "val-", "val_", "test/")
# the smallest, the mean and the largest number of a quantity: each is at most the next
ORDERED = (
    ("reward_min", "reward_mean", "reward_max"),
    ("advantage_min", "advantage_mean", "advantage_max"),
    ("length_min", "length_mean", "length_max"),
    ("ended_min", "ended_mean", "ended_max"),
    ("ended_max", "length_max"),
    ("sampler_ratio_min", "sampler_ratio_mean", "sampler_ratio_max"),
    ("gap_mean", "gap_max"),
    ("entropy_min", "entropy", "entropy_max"),
    ("sampler_k3", "sampler_k3_max"),
    ("ratio_min", "ratio_mean", "ratio_max"),
    ("clamped_min", "clamped_max"),
    ("log_ppl_diff", "log_ppl_abs_diff"),
)
# scalars that a law compares where their columns are of one family
TOGETHER = (*ORDERED, ("clip_low", "clip_high", "clip_fraction"))
BY_NAME = {name: key for key, scalar in SCALARS.items() for name in scalar.names}


def bare(column: str) -> str:
    """Return the name without a leading "train/"."""
    return column.removeprefix("train/")


def family(column: str) -> str:
    """Return the name before its last "/", as critic/score of critic/score/max: columns
    of two families may be of two quantities.
    """
    return bare(column).rpartition("/")[0]


def recognize(columns: Iterable[str], given: Mapping[str, str]) -> dict[str, str]:
    """Find which scalar each column is. Columns of evaluations are left out.

    Args:
        columns: names as the run logged them.
        given: scalar -> column, from the user; these come first.

    Returns:
        Scalar -> column. Of several columns with known names, the one of the family
        that has the most scalars of a law of TOGETHER; else the first one.

    Raises:
        InputError: no such scalar, or no such column.
    """
    there = list(columns)
    found: dict[str, str] = {}
    for key, column in given.items():
        if key not in SCALARS:
            raise InputError(
                f"--map {key}={column}: upref logs knows no scalar {key!r}. It knows {', '.join(SCALARS)}."
            )
        if column not in there:
            named = name_first(there, COLUMNS_NAMED)
            raise InputError(
                f"--map {key}={column}: the log has no column {column!r}. It has {named}."
            )
        found[key] = column
    bare_names = {bare(column) for column in there}
    candidates: dict[str, list[str]] = {}
    for column in there:
        if column.startswith(EVALUATION) or column in given.values():
            continue
        name = bare(column)
        scalar = BY_NAME.get(name)
        if name in BESIDE and BESIDE[name][0] in bare_names:
            scalar = BESIDE[name][1]
        if scalar is not None and scalar not in given:
            candidates.setdefault(scalar, []).append(column)
    of_family = _columns_of_families(candidates)
    for key, its_columns in candidates.items():
        found[key] = of_family.get(key, its_columns[0])
    return found


def _columns_of_families(candidates: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the column of each scalar of TOGETHER that stands in one family with
    another scalar of its law. The family with the most of them counts, and of several
    the first one.

    Args:
        candidates: scalar -> its columns.
    """
    chosen: dict[str, str] = {}
    for law in TOGETHER:
        families: dict[str, dict[str, str]] = {}  # family -> scalar -> column
        for scalar in law:
            for column in candidates.get(scalar, []):
                families.setdefault(family(column), {}).setdefault(scalar, column)
        largest = max(families.values(), key=len, default={})
        if len(largest) > 1:
            for scalar, column in largest.items():
                chosen.setdefault(scalar, column)
    return chosen
