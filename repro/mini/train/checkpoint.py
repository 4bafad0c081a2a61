# SPDX-License-Identifier: Apache-2.0
"""What changes while a run goes on, how it is saved and found again, and what is left
when it is done.
"""

import copy
import io
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini import files, provenance, tasks
from repro.mini.policy import bases, models
from repro.mini.policy.tokens import tokenizer
from repro.mini.train.settings import Settings
from upref.errors import InputError

MOST_SEEN = 20_000  # tokens in seen.npz
TRAINER = "trainer.safetensors"
# done.json has their digests
LOGS = ("steps.jsonl", "evals.jsonl", "times.jsonl")
FINAL = ("settings.json", *LOGS, "seen.npz")


class Run:
    """A run between two steps: its policy, optimizer, and what it has logged so far.

    Attributes:
        s: settings.
        base: the policy before training, which stays.
        step: how many steps are done.
        seen: of some steps, [n, 3] of tokens: π_old(o_t), π_θ(o_t), A (measure.Tally.last).
        ring: the weights at the last `staleness` + 1 rollouts, the oldest first.
        seconds: part of a step ("sample", "update") -> processor time so far.
    """

    def __init__(self, s: Settings):
        """Begin at the base, before the first step.

        Raises:
            InputError: there is no such task or base.
        """
        self.s, self.task, self.objective = s, tasks.get(s.task), s.target()
        self.base = bases.load(s.base, s.task).to(torch.get_default_device())
        self.policy = copy.deepcopy(self.base)
        self.tokenizer = (
            tokenizer(self.task) if self.task.words else bases.tokenizer_of(s.base)
        )
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=s.lr,
            weight_decay=s.weight_decay,
            fused=True,
            betas=(0.9, 0.999),
        )
        self.step = 0
        self.seen: list[np.ndarray] = []
        self.ring: list[dict[str, Tensor]] = []
        self.seconds: dict[str, float] = defaultdict(float)

    def sampler(self) -> PreTrainedModel:
        """Return the policy of `staleness` rollouts ago, as a copy; in the first steps,
        where there is none yet, the base. Without staleness, return the policy itself.

        It keeps the weights of this rollout, so it must be called once a step.
        """
        if not self.s.staleness:
            return self.policy
        self.ring = [
            *self.ring,
            {k: w.clone() for k, w in self.policy.state_dict().items()},
        ][-self.s.staleness - 1 :]
        stale = copy.deepcopy(self.base)
        stale.load_state_dict(self.ring[0])
        return stale

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Add the processor time that the `with` block takes to a part's seconds."""
        start = time.process_time()
        yield
        self.seconds[part] += time.process_time() - start


def require_no_run(out: Path) -> None:
    """Raise InputError where the folder, which has no settings, has a file of a name
    that a run replaces or removes: it is of something else.
    """
    for name in (*LOGS, "seen.npz", "done.json", "checkpoints"):
        if (out / name).exists():
            raise InputError(
                f"{out / name} is not of a run of this program, which would replace it: choose another folder with --out."
            )


def resume(
    run: Run,
    out: Path,
    logs: dict[str, files.Log],
    say: Callable[[str], object],
) -> None:
    """Change the run in place to its last whole checkpoint, and cut the logs to what
    they were then; without one, leave the run at its start and empty the logs.

    Args:
        run: before its first step.
        out: its folder.
        logs: by name.
        say: called with a sentence on what happened.

    Raises:
        InputError: a log is not what it was at the checkpoint.
    """
    folder = latest(out, say)
    if folder is None:
        for log in logs.values():
            log.back_to(0)
        return
    kept = files.load_tree(folder / TRAINER)
    run.policy.load_state_dict(models.load(folder, run.task).state_dict())
    run.optimizer.load_state_dict(kept["optimizer"])
    run.step = kept["step"]
    run.seen = [x.numpy() for x in kept["seen"]]
    run.ring = kept["ring"]
    run.seconds |= kept["seconds"]
    for name, log in logs.items():
        log.back_to(*kept["logs"][name])
    say(f"{out.name}: going on from step {run.step}.")


def checkpoints(out: Path) -> list[Path]:
    """Return the folders of the checkpoints, oldest first."""
    return sorted(
        (out / "checkpoints").glob("step-*[0-9]"),
        key=lambda p: int(p.name.removeprefix("step-")),
    )


def latest(out: Path, say: Callable[[str], object]) -> Path | None:
    """Return the folder of the last whole checkpoint, None if there is none.

    Delete those after it, which are damaged, each with a sentence to `say`, and drafts
    that a killed run left.
    """
    for draft in (out / "checkpoints").glob(".step-*"):
        shutil.rmtree(draft)
    for folder in reversed(checkpoints(out)):
        try:
            if TRAINER not in files.checked(folder)["sha256"]:
                raise InputError(f"{folder} was made by another version.")
            return folder
        except InputError as e:
            say(f"{e} Going on from the checkpoint before it.")
            shutil.rmtree(folder)
    return None


def save(run: Run, out: Path, logs: dict[str, files.Log]) -> None:
    """Write a checkpoint: a folder that transformers and vLLM load, with all else that
    changes; delete all but the last two.

    Random generators are made afresh from the seed at every step, so they need no
    saving.
    """
    trainer = {
        "step": run.step,
        "optimizer": run.optimizer.state_dict(),
        "seen": [torch.from_numpy(x) for x in run.seen],
        "seconds": run.seconds,
        "ring": run.ring,
        "logs": {name: log.here() for name, log in logs.items()},
    }

    def write(folder: Path) -> None:
        """Save the policy, its tokenizer and the trainer's state into the folder."""
        models.save(folder, run.policy, run.tokenizer)
        files.save_tree(folder / TRAINER, trainer)

    files.publish(out / "checkpoints" / f"step-{run.step}", write, step=run.step)
    for old in checkpoints(out)[:-2]:
        shutil.rmtree(old)


def finish(run: Run, out: Path) -> None:
    """Write seen.npz, then done.json: once that is there, the run is never started
    again.
    """
    seen = np.concatenate(run.seen)[:MOST_SEEN].astype(np.float32)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, pi_old=seen[:, 0], pi=seen[:, 1], adv=seen[:, 2])
    files.write_atomically(out / "seen.npz", arrays.getvalue())
    seconds = {k: round(v, 2) for k, v in run.seconds.items()}
    facts = {
        "key": run.s.key,
        **provenance.of_this_machine(),
        "seconds": seconds | {"all": round(sum(seconds.values()), 2)},
        "sha256": {
            name: files.sha256(out / name) for name in FINAL if (out / name).exists()
        },
    }
    facts["digest"] = files.facts_digest(facts)
    files.write_atomically(
        out / "done.json", (json.dumps(facts, indent=1) + "\n").encode()
    )
