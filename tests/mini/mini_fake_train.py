# SPDX-License-Identifier: Apache-2.0
"""Stands in for repro.mini.train in tests: writes what a run writes, with numbers of
our choice, in no time.

As a module (`python -m mini_fake_train --settings FILE --out FOLDER`) it behaves as the
environment's FAKE says: slow: a hundredth of a second a step; fail-NAME: status 2 for
that objective; nan-NAME: not finite at step 3.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

COMMIT = {"id": "0123456789abcdef", "dirty": False}
MACHINE = {"cpu": "test", "cores": 2, "threads": 1}
# objective -> metric -> what is added; tests fill it
SHIFT: dict[str, dict[str, float]] = {}


def numbers(s, step: int) -> dict:
    """Return the logged line of a step. Its noise belongs to the seed, so that arms of
    one seed differ little but for SHIFT.
    """
    noise = np.random.default_rng([s.seed, step]).normal()
    own = np.random.default_rng([s.seed, len(s.objective), step]).normal()
    more = SHIFT.get(s.objective, {})
    line = {"step": step, "reward": 0.3, "valid": 0.9, "length": 9.0, "entropy": 0.6 - 0.001 * step, "kl_base": 0.1,
            "kl_old": 0.01, "grad_norm": 0.5, "grad_norm_max": 1.0, "clip_pos_high": 0.01, "clip_neg_low": 0.02,
            "clip_pos_low": 0.0, "clip_neg_high": 0.0, "alive": 0.97, "overflow": 0.0}  # fmt: skip
    return {
        k: v if k == "step" else v * (1 + 0.05 * noise + 0.002 * own) + more.get(k, 0)
        for k, v in line.items()
    }


def evaluation(s, step: int) -> list[dict]:
    """Return made-up rows of an evaluation at this step: they depend on the seed, the
    step, and SHIFT of the objective.
    """
    base = 0.1 + 0.001 * step + 0.02 * np.random.default_rng([s.seed, step, 1]).normal()
    own = 0.001 * np.random.default_rng([s.seed, len(s.objective), step, 1]).normal()
    more = SHIFT.get(s.objective, {})

    def score(metric, plus):
        return base + own + plus + more.get(metric, 0)

    plus = {"avg": 0, "maj": 0.05, "best": 0.4, "best_bootstrap": 0.38, "pass1": 0}
    return [
        {"step": step, "set": name, "decoding": decoding, "n_problems": 256, "k": 32}
        | {metric: score(metric, p - 0.02 * i) for metric, p in plus.items()}
        for i, name in enumerate(("test", "one_step", "two_steps", "three_steps"))
        for decoding in ("top_p_0.7", "t_1")
    ]


def write(s, out: Path, pause: float = 0.0, nan: bool = False) -> None:
    """Write the files that a run of these settings would write, or those of one that
    stops at step 3 if `nan` is set.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps(vars(s)))
    with (
        (out / "steps.jsonl").open("a") as steps,
        (out / "evals.jsonl").open("a") as evals,
    ):
        for step in range((out / "steps.jsonl").read_text().count("\n"), s.steps):
            if nan and step == 3:
                (out / "minibatch-3-0.pt").touch()
                sys.exit("step 3, minibatch 0: loss nan")
            steps.write(json.dumps(numbers(s, step)) + "\n")
            steps.flush()
            if (step + 1) % s.eval_every == 0 or step + 1 == s.steps:
                evals.writelines(
                    json.dumps(line) + "\n" for line in evaluation(s, step + 1)
                )
            time.sleep(pause)
    rng = np.random.default_rng(s.seed)
    pi_old = rng.uniform(0.01, 0.99, 400)
    pi = np.clip(pi_old * rng.lognormal(0, 0.2, 400), 0.001, 1)
    np.savez(out / "seen.npz", pi_old=pi_old, pi=pi, adv=rng.choice([-1.0, 1.0], 400))
    facts = {
        "commit": COMMIT,
        "versions": {},
        "machine": MACHINE,
        "seconds": {"all": 1.0},
    }
    (out / "done.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked, fake = (
        SimpleNamespace(**json.loads(args.settings.read_text())),
        os.environ.get("FAKE", ""),
    )
    (args.out / "starts").open("a").write("x")
    if fake == f"fail-{asked.objective}":
        print("cannot write: no space left", file=sys.stderr)
        sys.exit(2)
    write(
        asked,
        args.out,
        0.01 if fake == "slow" else 0.0,
        fake == f"nan-{asked.objective}",
    )
