# SPDX-License-Identifier: Apache-2.0
"""What TRL logs, in the files and under the names that the report of verl's runs reads."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from repro.with_verl.run import records
from upref.files import write_atomically

NAMES = {  # TRL's metric -> the report's
    "reward": "critic/score/mean",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "kl": "actor/kl_loss",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "completions/mean_length": "response_length/mean",
    "frac_reward_zero_std": "training/groups_without_signal",
    "eval_reward": "val-core/gsm8k/acc/mean@1",
}


class StepLog(TrainerCallback):
    """Writes RUN/steps-TIME.jsonl, one {"step", "data"} a line, overrides.json, and the
    last scored answers.
    """

    def __init__(self, folder: Path):
        """Log the steps of this start to a new file in the folder of the run."""
        self.folder = folder
        self.part = records.new_part(folder)  # the file that is written
        self.at = time.monotonic()  # when the step began
        self.step = 0  # number of the step that runs, from 1

    def begin(
        self, objective: str, seed: int, steps: int, args: Any, kept: int
    ) -> None:
        """Write overrides.json with what was asked for, and print from which step a run
        goes on.

        Args:
            objective: its name.
            seed: of the run.
            steps: how many optimizer steps it has.
            args: the options of the command, of which the model is written down.
            kept: step of the checkpoint from which it goes on, whose later steps are
                logged again; 0: it starts at the beginning.
        """
        given = {"data.seed": seed, "model": args.model, "steps": steps}
        rows = [
            {"override": f"{k}={v}", "source": "repro/with_trl/train.py"}
            for k, v in given.items()
        ]
        saved = {
            "objective": objective,
            "scale": "trl",
            "total": steps,
            "overrides": rows,
        }
        write_atomically(
            self.folder / "overrides.json", json.dumps(saved, indent=1) + "\n"
        )
        if kept:
            print(f"  resumes from step {kept}", flush=True)

    def scored(self, reward: Callable) -> Callable:
        """Return the reward function, changed to write the answers of each call to
        RUN/answers/STEP.jsonl, in place of those of an earlier call in that step.
        """

        def scored(
            prompts: list, completions: list, answer: list[str], **more: Any
        ) -> list[float]:
            """Score the completions, write them down with their right answers and
            scores, and return the scores.
            """
            scores = reward(prompts, completions, answer, **more)
            texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
            rows = zip(texts, answer, scores, strict=True)
            lines = (
                json.dumps({"output": t, "gts": a, "score": s}) + "\n"
                for t, a, s in rows
            )
            (self.folder / "answers").mkdir(exist_ok=True)
            write_atomically(
                self.folder / "answers" / f"{self.step}.jsonl", "".join(lines)
            )
            return scores

        return scored

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step, self.at = state.global_step + 1, time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **_: Any
    ) -> None:
        """Append what TRL logs to the file of this start, under verl's names, and write
        steps.jsonl anew. Print the score if there is one. A row of training has its
        step, its seconds and the memory of the GPU too.
        """
        import torch

        logs = logs or {}
        data = {NAMES[k]: v for k, v in logs.items() if k in NAMES}
        data |= {f"actor/{k}": v for k, v in logs.items() if k.startswith("upref/")}
        if "loss" in logs:
            data |= {
                records.STEP: state.global_step,
                "timing_s/step": time.monotonic() - self.at,
            }
            if torch.cuda.is_available():
                data["actor/perf/max_memory_allocated_gb"] = (
                    torch.cuda.max_memory_allocated() / 1e9
                )
        if "reward" in logs:  # of a generation, which several steps train on
            print(
                f"  step {state.global_step:4} of {state.max_steps}  score {logs['reward']:.3f}",
                flush=True,
            )
        if data:
            with open(self.part, "a", encoding="utf-8") as f:
                f.write(json.dumps({"step": state.global_step, "data": data}) + "\n")
            records.collect(self.folder)
