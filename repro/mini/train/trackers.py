# SPDX-License-Identifier: Apache-2.0
"""What steps.jsonl and evals.jsonl say to a tracker as well, by flag; none is needed to
train.

A tracker's folder is made anew when a run starts or goes on: from the two files, so it
has every step, and each once.
"""

import importlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from repro.mini.train.settings import Settings
from upref.errors import InputError

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Tracker:
    """Of MODULES. Raises InputError where its package is not installed."""

    def __init__(self, name: str, s: Settings, out: Path):
        try:
            self.module: Any = importlib.import_module(MODULES[name])
        except ImportError as e:
            raise InputError(
                f"--{name} needs the package {name}, which is not installed: pip install {name}."
            ) from e
        self.name, self.s, self.out = name, s, out
        self.files: list[TextIO] = []

    def update(self) -> None:
        """Hand over what the two files say since the last time."""
        if not self.files:
            self.begin()
            self.files = [
                (self.out / f).open(encoding="utf-8")
                for f in ("steps.jsonl", "evals.jsonl")
            ]
        lines = [json.loads(line) for file in self.files for line in file]
        # W&B refuses to go back
        for line in sorted(lines, key=lambda line: line["step"]):
            self.add(line["step"], scalars(line))

    def begin(self) -> None:
        folder = self.out / self.name
        shutil.rmtree(folder, ignore_errors=True)
        if self.name == "tensorboard":
            writer = self.module.SummaryWriter(folder)
            self.add = lambda step, numbers: [
                writer.add_scalar(k, v, step) for k, v in numbers.items()
            ]
            self.end = writer.close
        else:  # offline until `wandb sync`, unless the environment says otherwise
            about = {"id": self.s.key, "resume": "allow", "config": asdict(self.s)}
            mode = os.environ.get("WANDB_MODE", "offline")
            run = self.module.init(
                project="upref-mini",
                name=self.s.key,
                dir=str(self.out),
                mode=mode,
                **about,
            )
            self.add, self.end = (
                lambda step, numbers: run.log(numbers, step=step),
                run.finish,
            )

    def close(self) -> None:
        for file in self.files:
            file.close()
        if self.files:
            self.end()


def scalars(line: dict) -> dict[str, float]:
    """The numbers of one line; those of an evaluation under its set and decoding."""
    where = f"{line['set']}/{line['decoding']}/" if "set" in line else ""
    skip = ("step", "n_problems", "k")
    return {
        where + k: v
        for k, v in line.items()
        if isinstance(v, int | float) and k not in skip
    }
