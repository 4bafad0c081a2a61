# SPDX-License-Identifier: Apache-2.0
"""The scales beside the scripts of verl's that they follow: every difference, with its
reason.

    python -m repro.with_verl.upstream

config/facts/upstream.json has what each script hands to verl on an NVIDIA machine, at
the commit that it names. Exit status: 1 where a difference has no reason.
"""

import json
import sys
from pathlib import Path

from repro.with_verl.config.scales import load_scale

FACTS = Path(__file__).resolve().parent / "config" / "facts" / "upstream.json"
# A key that only names things, or that the scale cannot share.
UNSHARED = (
    "data.train_files",
    "data.val_files",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.default_local_dir",
    "ray_kwargs.ray_init.runtime_env.py_executable",
    "data.prompt_key",
)
# Why a scale leaves out, or has another value than, what its script sets; the sources
# of config/scales say the rest.
REASONS = {
    "actor_rollout_ref.actor.policy_loss.loss_mode": "the objective's own, by upref",
    "actor_rollout_ref.actor.loss_agg_mode": "the objective's own",
    "actor_rollout_ref.actor.clip_ratio_low": "the objective's own, policy_loss.upref",
    "actor_rollout_ref.actor.clip_ratio_high": "the objective's own, policy_loss.upref",
    "actor_rollout_ref.actor.clip_ratio_c": "the objective's own, policy_loss.upref",
    "algorithm.adv_estimator": "the objective's own",
    "algorithm.use_kl_in_reward": "verl 0.9.1 default: false",
    "algorithm.kl_ctrl.kl_coef": "read only with use_kl_in_reward",
    "algorithm.filter_groups.max_num_gen_batches": "verl 0.9.1's trainer ignores it",
    "data.gen_batch_size": "verl 0.9.1 refills filtered groups prompt by prompt",
    "actor_rollout_ref.actor.megatron.grad_offload": "no setting of verl 0.9.1: param_offload frees gradients",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "verl 0.9.1 default: -1",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.ref.megatron.use_mbridge": "verl 0.9.1 default: the actor's",
    "actor_rollout_ref.rollout.enforce_eager": "verl 0.9.1 default: false",
    "actor_rollout_ref.rollout.free_cache_engine": "verl 0.9.1 default: true",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "verl 0.9.1 default: true",
    "trainer.balance_batch": "verl 0.9.1 default: true",
    "trainer.critic_warmup": "verl 0.9.1 default: 0",
    "trainer.resume_mode": "verl 0.9.1 default: auto",
    "trainer.n_gpus_per_node": "eight, as there",
    "actor_rollout_ref.model.override_config.attention_dropout": "0 in Qwen3's config.json",
    "actor_rollout_ref.model.override_config.embd_pdrop": "no setting of Qwen3",
    "actor_rollout_ref.model.override_config.resid_pdrop": "no setting of Qwen3",
    "data.shuffle": "verl 0.9.1 default: true",
    "actor_rollout_ref.actor.use_torch_compile": "verl 0.9.1 default: true; the script is for Ascend NPUs",
    "actor_rollout_ref.ref.use_torch_compile": "verl 0.9.1 default: true; the script is for Ascend NPUs",
    "actor_rollout_ref.actor.entropy_checkpointing": "verl 0.9.1 default: false; of an entropy of coefficient 0",
    "actor_rollout_ref.ref.entropy_checkpointing": "verl 0.9.1 default: false; the reference has no backward pass",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "verl 0.9.1 default: false; FSDP1 reads it",
    "actor_rollout_ref.ref.fsdp_config.forward_prefetch": "verl 0.9.1 default: false; FSDP1 reads it",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "verl 0.9.1 default: 1; 10,240 tokens fit one GPU",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "verl 0.9.1 default: 1, as the actor's",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "verl 0.9.1 default: 8,192, with chunked prefill",
}


def plain(value: object) -> str:
    text = str(value).strip("'\"").lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def facts() -> dict[str, dict]:
    return json.loads(FACTS.read_text(encoding="utf-8"))


def differences(scale: str, fact: dict) -> list[tuple[str, str, str, str]]:
    """(key, there, here, why); why is "" where nobody has said."""
    s = load_scale(scale.split()[0])
    here = {k.lstrip("+"): (value, source) for k, (value, source) in s.values.items()}
    rows = []
    for key, there in fact["settings"].items():
        if key in UNSHARED:
            continue
        if key not in here:
            rows.append((key, there, "(not set)", REASONS.get(key, "")))
        elif plain(here[key][0]) != there:
            value, source = here[key]
            script = Path(fact["script"]).name
            claims = script in source and "where" not in source and "has" not in source
            rows.append((key, there, plain(value), "" if claims else source))
    return rows


def report(found: dict[str, dict]) -> tuple[str, int]:
    """A table for each scale; how many differences have no reason."""
    parts, unsaid = [], 0
    for scale, fact in found.items():
        rows = differences(scale, fact)
        same = len(fact["settings"]) - len(rows)
        parts.append(
            f"## {scale}: {fact['repository']} {fact['commit'][:8]}, {fact['script']}"
        )
        parts.append(
            f"{same} settings of {len(fact['settings'])} are the script's, or name things."
        )
        line = lambda cells: "| " + " | ".join(cells) + " |"
        parts.append(
            "\n".join(
                [
                    line(("key", "there", "here", "why")),
                    line(("---",) * 4),
                    *map(line, rows),
                ]
            )
        )
        unsaid += sum(not why for *_, why in rows)
    return "\n\n".join(parts) + "\n", unsaid


def main() -> int:
    """Print the tables; the exit status."""
    text, unsaid = report(facts())
    print(text)
    if unsaid:
        print(f"{unsaid} differences have no reason.")
    return 1 if unsaid else 0


if __name__ == "__main__":
    sys.exit(main())
