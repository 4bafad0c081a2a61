# SPDX-License-Identifier: Apache-2.0
"""Whole runs that must be the same run: few steps of verl's trainer, compared step by
step.

    python -m repro.with_verl.trials.equivalence [--steps 3] [--keep] [RUN...]

Every response is sampled with a seed of its own (seeded.py), and each update takes the
whole batch, four times over: then the order in which verl collects what vLLM finishes
is no part of the result, and three of four updates are off-policy. What rounding leaves
is bounded by BOUND, relative. `--keep` writes results/equivalence.json. A run that is
there already is not repeated. Exit status 1 where two differ.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from repro.with_verl.cpu import smoke
from repro.with_verl.place import RESULTS, ROOT
from repro.with_verl.run import watch
from upref.files import write_atomically

OUT = ROOT / "repro" / "out" / "equivalence"
EPOCHS = 4
BOUND = 1e-5
LOGGED = {
    "score": smoke.SCORE,
    "pg_loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
}
RANKS = ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2"]
MICRO = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="
# verl's own PPO loss; its dual clip cannot be switched off, only moved away
VANILLA = [
    "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla",
    "actor_rollout_ref.actor.clip_ratio_low=0.2",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.clip_ratio_c=1e9",
]
TURNS = ["actor_rollout_ref.actor.policy_loss.loss_mode=upref/turns"]
RUNS = {  # objective, settings, what upref/turns is
    "up_dapo": ("up_dapo", [MICRO + "8"], ""),
    "again": ("up_dapo", [MICRO + "8"], ""),
    "up(dapo), micro-batch 1": ("up_dapo", [MICRO + "1", *TURNS], "up(dapo)"),
    "two ranks": ("up_dapo", [MICRO + "8", *RANKS], ""),
    "dapo": ("dapo", [MICRO + "8"], ""),
    "vanilla": ("dapo", [MICRO + "8", *VANILLA], ""),
}
PAIRS = [
    ("up_dapo", "again"),
    ("up_dapo", "up(dapo), micro-batch 1"),
    ("up_dapo", "two ranks"),
    ("dapo", "vanilla"),
]


def train(name: str, steps: int) -> None:
    """One run; what it logged is written beside it."""
    objective, settings, turns = RUNS[name]
    out = place(name).with_suffix("")
    os.environ |= {"UPREF_TURNS": turns, "UPREF_TURN": str(10**9)}
    OUT.mkdir(parents=True, exist_ok=True)
    write_atomically(
        OUT / "agent.yaml",
        "- name: seeded\n  _target_: repro.with_verl.trials.seeded.SeededAgentLoop\n",
    )
    extra = [
        *settings,
        "trainer.save_freq=-1",
        f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={smoke.PROMPTS}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=seeded",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={OUT / 'agent.yaml'}",
    ]
    smoke.main(
        objective,
        steps,
        out,
        extra,
        modules=("repro.with_verl.trials.turns",) if turns else (),
    )
    rows = [r["data"] for r in watch.steps(sorted(out.glob("steps-*.jsonl"))[-1])]
    logged: dict = {k: [float(d[key]) for d in rows] for k, key in LOGGED.items()}
    logged["parity_max_abs"] = max(
        (d[smoke.PARITY] for d in rows if smoke.PARITY in d), default=None
    )
    write_atomically(place(name), json.dumps(logged | {"settings": settings}) + "\n")


def place(name: str) -> Path:
    return OUT / ("".join(c if c.isalnum() else "_" for c in name) + ".json")


def apart(a: dict, b: dict) -> dict[str, list[float]]:
    """For each step, how far apart, relative to the larger one."""
    size = lambda x, y: abs(x - y) / max(abs(x), abs(y), 1e-9)
    return {k: [size(x, y) for x, y in zip(a[k], b[k], strict=True)] for k in LOGGED}


def compare(found: dict[str, dict], steps: int) -> list[dict]:
    rows = []
    for a, b in PAIRS:
        if a in found and b in found:
            off = apart(found[a], found[b])
            same = all(len(x) == steps and max(x) <= BOUND for x in off.values())
            rows.append(
                {
                    "pair": [a, b],
                    "same": same,
                    **{k: [float(f"{x:.1e}") for x in v] for k, v in off.items()},
                }
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", nargs="*", choices=(*RUNS, []))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    for name in args.runs or RUNS:
        if not place(name).exists():
            train(name, args.steps)
    found = {
        name: json.loads(place(name).read_text())
        for name in RUNS
        if place(name).exists()
    }
    rows = compare(found, args.steps)
    text = json.dumps({"bound": BOUND, "pairs": rows, "runs": found}, indent=1)
    if args.keep:
        write_atomically(RESULTS / "equivalence.json", text + "\n")
    for row in rows:
        worst = max(max(row[k], default=float("inf")) for k in LOGGED)
        print(
            f"{' = '.join(row['pair'])}: {'same' if row['same'] else 'DIFFER'}, at most {worst:.1e} apart"
        )
    sys.exit(not rows or not all(row["same"] for row in rows))
