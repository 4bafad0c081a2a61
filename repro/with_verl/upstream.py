# SPDX-License-Identifier: Apache-2.0
"""The scales beside the scripts of verl's that they follow: every difference, with its reason.

    python -m repro.with_verl.upstream                the recorded scripts' settings (config/facts/upstream.json)
    python -m repro.with_verl.upstream --record DIR   read them anew: DIR holds clones verl and verl-recipe
    python -m repro.with_verl.upstream --fetch        clone both (needs a network), and tell what has changed upstream

A script's settings are what it would hand to verl on an NVIDIA machine: it is run by a restricted bash whose only
programs are stand-ins that print their arguments. Exit status: 1 where a difference has no reason, or upstream changed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from repro.with_verl.config.scales import load_scale
from upref import InputError
from upref.files import write_atomically

FACTS = Path(__file__).resolve().parent / "config" / "facts" / "upstream.json"
SCRIPTS = {  # scale -> the script that is its model's; behind a blank, another one
    "paper_dapo": ("verl-recipe", "dapo/run_dapo_qwen2.5_32b.sh"),
    "paper_dapo Qwen3-14B": ("verl-recipe", "dapo/run_dapo_qwen3_14b_base_npu.sh"),
    "gpu8 Qwen3-8B": ("verl-recipe", "dapo/run_dapo_qwen3_8b_base_npu.sh"),
    "paper_gspo": ("verl", "examples/gspo_trainer/run_qwen3_30b_a3b_megatron.sh"),
    "paper_math": ("verl", "examples/grpo_trainer/run_qwen3_8b_fsdp.sh"),
    "paper_geo3k": ("verl", "examples/grpo_trainer/run_qwen3_vl_8b_fsdp.sh"),
}
URL = "https://github.com/verl-project/{}"
# A key that only names things, or that the scale cannot share.
UNSHARED = (
    "data.train_files", "data.val_files", "trainer.project_name", "trainer.experiment_name", "trainer.logger",
    "trainer.default_local_dir", "ray_kwargs.ray_init.runtime_env.py_executable", "data.prompt_key",
)  # fmt: skip
RENAMED = {  # verl-recipe pins an older verl
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.overlong_buffer.enable": "reward.reward_kwargs.overlong_buffer_cfg.enable",
    "reward_model.overlong_buffer.len": "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.overlong_buffer.penalty_factor": "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
}
# Why a scale leaves out, or has another value than, what its script sets; the sources of config/scales say the rest.
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
STAND_INS = """
python3() { printf 'ARG %s\\n' "$@"; }
uv() { printf 'ARG %s\\n' "$@"; }
ray() { printf 'ARG %s\\n' "$@"; }
date() { :; }
source /dev/stdin
"""


def settings_of(script: str) -> dict[str, str]:
    """key -> value of a script. InputError where it hands nothing to verl."""
    env = {"DEVICE": "gpu", "VERL_USE_UV": "0", "HOME": "~", "PATH": "/nonexistent", "PWD": "."}
    shell = STAND_INS.replace("source /dev/stdin", script)
    done = subprocess.run(
        ["/bin/bash", "--restricted", "-c", shell], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    given = [line.removeprefix("ARG ") for line in done.stdout.splitlines() if line.startswith("ARG ")]
    pairs = [line.lstrip("+").partition("=") for line in given if "=" in line and not line.startswith("-")]
    if not pairs:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InputError(f"the script hands nothing to verl; bash said: {said[:200]}")
    return {RENAMED.get(key, key): plain(value) for key, _, value in pairs}


def plain(value: object) -> str:
    text = str(value).strip("'\"").lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def record(clones: Path) -> dict[str, dict]:
    """From clones, at what they have checked out, or at HEAD of a bare one."""
    found = {}
    for scale, (repository, path) in SCRIPTS.items():
        git = ["git", "-C", str(clones / repository)]
        try:
            commit = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip()
            text = subprocess.run([*git, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.SubprocessError) as e:
            raise InputError(f"{clones / repository} is no clone with {path}.") from e
        found[scale] = {"repository": repository, "commit": commit, "script": path, "settings": settings_of(text)}
    return found


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
        parts.append(f"## {scale}: {fact['repository']} {fact['commit'][:8]}, {fact['script']}")
        parts.append(f"{same} settings of {len(fact['settings'])} are the script's, or name things.")
        line = lambda cells: "| " + " | ".join(cells) + " |"
        parts.append("\n".join([line(("key", "there", "here", "why")), line(("---",) * 4), *map(line, rows)]))
        unsaid += sum(not why for *_, why in rows)
    return "\n\n".join(parts) + "\n", unsaid


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="upstream", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--record", type=Path, metavar="DIR")
    p.add_argument("--fetch", action="store_true")
    args = p.parse_args(argv)
    try:
        if args.record:
            found = record(args.record)
            rows = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
            write_atomically(FACTS, "{\n" + ",\n".join(rows) + "\n}\n")
            print(f"recorded: {FACTS}")
        found, changed = facts(), 0
        if args.fetch:
            with tempfile.TemporaryDirectory() as folder:
                for name in {repository for repository, _ in SCRIPTS.values()}:
                    clone = ["git", "clone", "--quiet", "--depth", "1", URL.format(name), f"{folder}/{name}"]
                    done = subprocess.run(clone, capture_output=True, text=True, check=False)
                    if done.returncode:
                        raise InputError(
                            f"{URL.format(name)} cannot be cloned; without --fetch the recorded facts are used."
                        )
                new = record(Path(folder))
            for scale, fact in new.items():
                old, now = found[scale]["settings"], fact["settings"]
                for key in sorted(old.keys() | now.keys()):
                    if old.get(key) != now.get(key):
                        changed += 1
                        print(f"changed upstream: {scale}: {key}: {old.get(key, '-')} -> {now.get(key, '-')}")
            found = new
        text, unsaid = report(found)
    except InputError as e:
        print(f"upstream: {e}", file=sys.stderr)
        return 2
    print(text)
    if unsaid:
        print(f"{unsaid} differences have no reason.")
    return 1 if unsaid or changed else 0


if __name__ == "__main__":
    sys.exit(main())
