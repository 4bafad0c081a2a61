# SPDX-License-Identifier: Apache-2.0
"""Logs of healthy runs under the names of seven frameworks.

A step draws responses, log-probabilities, rewards and advantages, and computes in float32
what the framework's own code logs of them: its averages, its sums over micro-batches, its
means over logging steps. It knows nothing of `upref.logs`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Row = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What a run consists of; all of it is drawn from a seed.

    Args:
        prompts, group: of a step, and responses to each.
        longest: most tokens of a response.
        gap: deviation of log π_old − log μ of a token, in nats.
        updates: optimizer steps on a batch.
        move: deviation of log π_θ − log π_old after an update.
        beta: coefficient of the KL.
        averaged: steps that one row of the log covers.
    """

    seed: int
    prompts: int
    group: int
    longest: int
    gap: float
    updates: int
    move: float
    beta: float
    averaged: int

    @property
    def random(self) -> np.random.Generator:
        """The random numbers of this run."""
        return np.random.default_rng(self.seed)


def draw_setting(seed: int) -> Setting:
    """Return the setting of a run, drawn from a seed."""
    draw = np.random.default_rng([seed, 7])
    return Setting(
        seed,
        prompts=int(draw.choice([8, 12, 16])),
        group=int(draw.choice([4, 8])),
        longest=int(draw.choice([40, 120, 400])),
        gap=float(draw.choice([0.0, 0.001, 0.01, 0.05])),
        updates=int(draw.choice([1, 1, 2, 4])),
        move=float(draw.choice([0.02, 0.1, 0.3])),
        beta=float(draw.choice([0.0, 0.001, 0.04])),
        averaged=int(draw.choice([1, 1, 5])),
    )


@dataclass(frozen=True, eq=False)
class Batch:
    """One optimizer step: columns [B, T] in float32, and [B]."""

    mask: np.ndarray
    old: np.ndarray
    sampler: np.ndarray
    ref: np.ndarray
    now: np.ndarray
    entropy: np.ndarray
    reward: np.ndarray
    group: np.ndarray
    adv: np.ndarray
    cut: np.ndarray
    beta: float
    grad_norm: float
    same_update: bool  # the first optimizer step on the batch

    def mean(self, x: np.ndarray) -> float:
        """The mean over trained tokens."""
        return float(np.float32((x * self.mask).sum() / self.mask.sum()))

    def of_responses(self, x: np.ndarray) -> float:
        """Return the mean over responses of the means over their tokens."""
        per_response = (x * self.mask).sum(1) / self.mask.sum(1)
        return float(np.float32(per_response.mean()))

    @property
    def ratio(self) -> np.ndarray:
        return np.exp(self.now - self.old)

    @property
    def pg(self) -> np.ndarray:
        """Return the clipped loss of each token, with bounds 0.2."""
        A, r = self.adv[:, None], self.ratio
        return -np.minimum(r * A, r.clip(0.8, 1.2) * A)

    @property
    def k3(self) -> np.ndarray:
        x = self.ref - self.now
        return np.exp(x) - x - 1

    @property
    def low(self) -> np.ndarray:
        return ((self.ratio < 0.8) & (self.adv[:, None] < 0)).astype(np.float32)

    @property
    def high(self) -> np.ndarray:
        return ((self.ratio > 1.2) & (self.adv[:, None] > 0)).astype(np.float32)

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(1)


def batches(setting: Setting, steps: int) -> list[list[Batch]]:
    """Return the optimizer steps of each step of the run."""
    random, out = setting.random, []
    B = setting.prompts * setting.group
    drift = 0.0
    for _ in range(steps):
        drift += 0.02 * random.random()
        raw = np.exp(random.normal(np.log(setting.longest / 4), 0.6, B))
        lengths = raw.astype(int).clip(1, setting.longest)
        T = int(lengths.max())
        mask = np.arange(T)[None] < lengths[:, None]
        old = -(random.exponential(0.25, (B, T)) * (random.random((B, T)) < 0.4))
        noise = random.normal(0, setting.gap, (B, T))
        ref = old + random.normal(0, drift, (B, T))
        group = np.repeat(np.arange(setting.prompts), setting.group)
        chance = random.uniform(0.1, 0.9, setting.prompts)[group]
        reward = (random.random(B) < chance).astype(np.float32)
        adv = np.zeros(B, np.float32)
        for k in range(setting.prompts):
            own = group == k
            adv[own] = (reward[own] - reward[own].mean()) / (reward[own].std() + 1e-6)
        entropy = random.gamma(0.5, 0.6, (B, T))
        now, updates = old, []
        for u in range(setting.updates):
            if u:
                now = now + random.normal(0, setting.move, (B, T))
            parts = (mask, old, old + noise, ref, np.minimum(now, 0), entropy)
            single = [x.astype(np.float32) for x in parts]
            single[1] = np.minimum(single[1], 0)
            if not u:
                single[4] = single[1]
            norm = float(random.gamma(4, 0.1))
            cut = lengths == setting.longest
            updates.append(
                Batch(*single, reward, group, adv, cut, setting.beta, norm, u == 0)
            )
        out.append(updates)
    return out


def _averaged(rows: list[Row]) -> Row:
    """Return the mean of each number over some rows."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {key: float(np.mean(of_rows)) for key, of_rows in values.items()}


# ---- what each framework logs --------------------------------------------------------
def trl(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return GRPOTrainer's log_history of TRL 1.16: means over the logging steps."""
    rows, out, seen = [], [], 0
    with_vllm = setting.gap > 0
    for number, updates in enumerate(steps, 1):
        for b in updates:
            ended = b.lengths[~b.cut]
            # TRL logs 0 where no response has ended
            terminated = ended if len(ended) else np.zeros(1)
            of_prompts = [b.reward[b.group == k] for k in set(b.group)]
            if b.same_update:
                seen += int(b.lengths.sum()) + 20 * len(b.lengths)
            row = {
                "loss": b.mean(b.pg + b.beta * b.k3),
                "grad_norm": b.grad_norm,
                "completions/mean_length": float(b.lengths.mean()),
                "completions/min_length": float(b.lengths.min()),
                "completions/max_length": float(b.lengths.max()),
                "completions/clipped_ratio": float(b.cut.mean()),
                "completions/mean_terminated_length": float(terminated.mean()),
                "completions/min_terminated_length": float(terminated.min()),
                "completions/max_terminated_length": float(terminated.max()),
                "reward": float(b.reward.mean()),
                "reward_std": float(b.reward.std(ddof=1)),
                "frac_reward_zero_std": float(
                    np.mean([x.std() == 0 for x in of_prompts])
                ),
                "entropy": b.mean(b.entropy),
                "clip_ratio/low_mean": b.mean(b.low),
                "clip_ratio/high_mean": b.mean(b.high),
                "clip_ratio/region_mean": b.mean(np.maximum(b.low, b.high)),
                "num_tokens": float(seen),
                "step": float(number),
            }
            if b.beta:
                row["kl"] = b.mean(b.k3)
            if with_vllm:
                d = (b.old - b.sampler) * b.mask
                factor = np.exp(d.sum(1))
                factor = np.where(factor > 3.0, 0.0, factor).astype(np.float32)
                row |= {
                    "sampling/sampling_logp_difference/mean": b.mean(np.abs(d)),
                    "sampling/sampling_logp_difference/max": float(np.abs(d).max()),
                    "sampling/importance_sampling_ratio/min": float(factor.min()),
                    "sampling/importance_sampling_ratio/mean": float(factor.mean()),
                    "sampling/importance_sampling_ratio/max": float(factor.max()),
                }
            rows.append(row)
        if number % setting.averaged == 0:
            last = {"step": float(number), "num_tokens": float(seen)}
            out.append(_averaged(rows) | last)
            rows = []
    return out


def _actor(update: Batch) -> Row:
    """Return what verl's actor logs of one update."""
    row = {
        "actor/pg_loss": update.mean(update.pg),
        "actor/pg_clipfrac": update.mean(np.maximum(update.low, update.high)),
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": update.mean(update.old - update.now),
        "actor/grad_norm": update.grad_norm,
    }
    if update.beta:
        row["actor/kl_loss"] = update.mean(update.k3)
        row["actor/kl_coef"] = update.beta
    return row


def verl(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return the log of verl's ray trainer: data metrics, rollout_corr, and the actor's
    means over updates.
    """
    out = []
    for number, updates in enumerate(steps, 1):
        b = updates[0]
        A = b.adv[:, None] * np.ones_like(b.mask)
        valid = A[b.mask > 0]
        log_ratio = b.old - b.sampler
        mean_old = (b.old * b.mask).sum(1) / b.mask.sum(1)
        mean_sampler = (b.sampler * b.mask).sum(1) / b.mask.sum(1)
        diff = mean_sampler - mean_old
        actor = [_actor(u) for u in updates]
        row = {
            "training/global_step": float(number),
            "actor/entropy": b.mean(b.entropy),
            "critic/score/mean": float(b.reward.mean()),
            "critic/score/max": float(b.reward.max()),
            "critic/score/min": float(b.reward.min()),
            "critic/advantages/mean": float(valid.mean()),
            "critic/advantages/max": float(valid.max()),
            "critic/advantages/min": float(valid.min()),
            "response_length/mean": float(b.lengths.mean()),
            "response_length/max": float(b.lengths.max()),
            "response_length/min": float(b.lengths.min()),
            "rollout_corr/training_ppl": float(np.exp(-mean_old).mean()),
            "rollout_corr/training_log_ppl": float(-mean_old.mean()),
            "rollout_corr/rollout_ppl": float(np.exp(-mean_sampler).mean()),
            "rollout_corr/rollout_log_ppl": float(-mean_sampler.mean()),
            "rollout_corr/kl": b.mean(b.sampler - b.old),
            "rollout_corr/k3_kl": b.mean(np.exp(log_ratio) - log_ratio - 1),
            "rollout_corr/log_ppl_diff": float(diff.mean()),
            "rollout_corr/log_ppl_abs_diff": float(np.abs(diff).mean()),
            "rollout_corr/ppl_ratio": float(np.exp(diff).mean()),
            "rollout_corr/chi2_token": b.mean(np.exp(2 * log_ratio)) - 1,
        }
        out.append(row | _averaged(actor))
    return out


def openrlhf(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return openRLHF's train/ scalars; the KL is in the reward, by k1."""
    out = []
    for number, updates in enumerate(steps, 1):
        row = _averaged(
            [
                {
                    "train/policy_loss": u.mean(u.pg),
                    "train/ppo_clip_ratio": u.mean(np.maximum(u.low, u.high)),
                    "train/ppo_kl": u.mean(u.old - u.now),
                    "train/actor_grad_norm": u.grad_norm,
                    "train/kl": u.of_responses(u.old - u.ref),
                    "train/logprobs_diff": u.of_responses(u.old - u.ref),
                }
                for u in updates
            ]
        )
        b = updates[0]
        out.append(
            row
            | {
                "train/vllm_kl": b.mean(b.sampler - b.old),
                "train/rollout/reward_mean": float(b.reward.mean()),
                "train/rollout/reward_std": float(b.reward.std(ddof=1)),
                "train/rollout/response_length_mean": float(b.lengths.mean()),
                "train/rollout/truncated_rate": float(b.cut.mean()),
                "train/global_step": float(number),
            }
        )
    return out


def skyrl(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return skyRL's policy/, reward/ and generate/ scalars."""
    out = []
    for number, updates in enumerate(steps, 1):
        row = _averaged(
            [
                {
                    "policy/policy_loss": u.mean(u.pg),
                    "policy/final_loss": u.mean(u.pg) + u.beta * u.of_responses(u.k3),
                    "policy/policy_entropy": u.mean(u.entropy),
                    "policy/loss_metrics/clip_ratio": u.mean(np.maximum(u.low, u.high)),
                    "policy/grad_norm": u.grad_norm,
                }
                | ({"policy/policy_kl": u.of_responses(u.k3)} if u.beta else {})
                for u in updates
            ]
        )
        b = updates[0]
        d = np.abs(b.old - b.sampler)
        out.append(
            row
            | {
                "reward/avg_raw_reward": float(b.reward.mean()),
                "generate/min_num_tokens": float(b.lengths.min()),
                "generate/max_num_tokens": float(b.lengths.max()),
                "generate/avg_num_tokens": float(b.lengths.mean()),
                "policy/rollout_train_logprobs_abs_diff_mean": b.mean(d),
                "policy/rollout_train_logprobs_abs_diff_max": float((d * b.mask).max()),
                "trainer/global_step": float(number),
            }
        )
    return out


def slime(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return slime's train/ and rollout/ scalars, each with a step of its own."""
    out, count = [], 0
    for number, updates in enumerate(steps):
        b = updates[0]
        out.append(
            {
                "rollout/step": float(number),
                "rollout/log_probs": b.of_responses(b.old),
                "rollout/ref_log_probs": b.of_responses(b.ref),
                "rollout/rollout_log_probs": b.of_responses(b.sampler),
                "rollout/raw_reward": float(b.reward.mean()),
                "rollout/response_len/mean": float(b.lengths.mean()),
                "rollout/truncated_ratio": float(b.cut.mean()),
            }
        )
        for u in updates:
            row = {
                "train/step": float(count),
                "train/loss": u.of_responses(u.pg) + u.beta * u.of_responses(u.k3),
                "train/pg_loss": u.of_responses(u.pg),
                "train/entropy_loss": u.of_responses(u.entropy),
                "train/pg_clipfrac": u.of_responses(np.maximum(u.low, u.high)),
                "train/ppo_kl": u.of_responses(u.old - u.now),
                "train/ois": u.of_responses(u.ratio),
                "train/train_rollout_logprob_abs_diff": u.of_responses(
                    np.abs(u.old - u.sampler)
                ),
                "train/grad_norm": u.grad_norm,
            }
            if u.beta:
                row["train/kl_loss"] = u.of_responses(u.k3)
            out.append(row)
            count += 1
    return out


def nemo_rl(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return neMo-RL's train/ scalars: means are summed over the updates of a step."""
    out = []
    for number, updates in enumerate(steps, 1):
        b = updates[0]
        rows = [
            {
                "train/loss": u.mean(u.pg),
                "train/probs_ratio": u.mean(u.ratio),
                "train/probs_ratio_clamped": u.mean(u.ratio.clip(0.8, 1.2)),
                "train/grad_norm": u.grad_norm,
            }
            for u in updates
        ]
        row = {key: float(sum(r[key] for r in rows)) for key in rows[0]}
        kept = [u.ratio[u.mask > 0] for u in updates]
        lowest = float(min(r.min() for r in kept))
        highest = float(max(r.max() for r in kept))
        out.append(
            row
            | {
                "train/probs_ratio_min": lowest,
                "train/probs_ratio_max": highest,
                "train/probs_ratio_clamped_min": min(max(lowest, 0.8), 1.2),
                "train/probs_ratio_clamped_max": max(min(highest, 1.2), 0.8),
                "train/token_mult_prob_error": b.mean(
                    np.exp(np.abs(b.old - b.sampler))
                ),
                "train/js_divergence_error": 0.0,
                "train/mean_gen_tokens_per_sample": float(b.lengths.mean()),
                "train/reward": float(b.reward.mean()),
                "step": float(number),
            }
        )
    return out


def prime_rl(setting: Setting, steps: list[list[Batch]]) -> list[Row]:
    """Return prime-rl's statistics of tensors."""
    out = []
    for number, updates in enumerate(steps):
        b = updates[0]
        d = b.old - b.sampler
        kl, entropy = (np.exp(d) - d - 1)[b.mask > 0], b.entropy[b.mask > 0]
        out.append(
            {
                "loss/mean": b.mean(b.pg),
                "entropy/all/mean": float(entropy.mean()),
                "entropy/all/min": float(entropy.min()),
                "entropy/all/max": float(entropy.max()),
                "mismatch_kl/all/mean": float(kl.mean()),
                "mismatch_kl/all/max": float(kl.max()),
                "optim/grad_norm": b.grad_norm,
                "step": float(number),
            }
        )
    return out


Framework = Callable[[Setting, list[list[Batch]]], list[Row]]
FRAMEWORKS: dict[str, Framework] = {
    make.__name__: make
    for make in (trl, verl, openrlhf, skyrl, slime, nemo_rl, prime_rl)
}


# ---- files ---------------------------------------------------------------------------
def rounded(rows: list[Row], digits: int) -> list[Row]:
    """The numbers with so many decimals, as a console prints them."""
    return [{k: round(v, digits) for k, v in row.items()} for row in rows]


def write(rows: list[Row], path: Path) -> Path:
    """Write a log: .csv, .jsonl, or .json with a log_history."""
    if path.suffix == ".csv":
        names = list(dict.fromkeys(k for row in rows for k in row))
        lines = [",".join(names)]
        for row in rows:
            lines.append(",".join(repr(row[n]) if n in row else "" for n in names))
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps({"log_history": rows, "global_step": len(rows)}))
    return path


def healthy(seed: int, framework: str = "", steps: int = 14) -> list[Row]:
    """Return the log of a healthy run; without a name, of the framework that the seed
    draws.
    """
    names = list(FRAMEWORKS)
    make = FRAMEWORKS[framework or names[seed % len(names)]]
    setting = draw_setting(seed)
    return make(setting, batches(setting, steps))
