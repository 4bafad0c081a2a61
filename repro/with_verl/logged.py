# SPDX-License-Identifier: Apache-2.0
"""A run as it lies in its folder: what it has logged, from steps.jsonl alone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from repro.with_verl.health import number
from repro.with_verl.run import records
from upref import InputError

SCORE, KL, ENTROPY, NORM = (
    "critic/score/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
)


@dataclass
class Kept:
    """A run as it lies in its folder."""

    folder: Path
    objective: str
    scale: str
    rows: list[dict[str, Any]]  # {"step", "data"}
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.objective} {self.seed}".strip()

    @property
    def seed(self) -> str:
        pairs = [
            r["override"].lstrip("+").partition("=")
            for r in self.saved.get("overrides", [])
        ]
        seeds = [value for key, _, value in pairs if key == "data.seed"]
        return f"seed {seeds[-1]}" if seeds else ""

    def series(self, wanted: Callable[[str], bool]) -> tuple[list[int], list[float]]:
        """Steps and the mean of the metrics that are wanted, where there are any."""
        found = [
            (
                r["step"],
                of_most(
                    {k: v for k, v in r["data"].items() if wanted(k) and number(v)}
                ),
            )
            for r in self.rows
        ]
        kept = [(step, mean(values)) for step, values in found if values]
        return [s for s, _ in kept], [v for _, v in kept]


def of_most(found: dict[str, float]) -> list[float]:
    """Of mean@2 and mean@4 the second: verl logs the smaller numbers of answers too."""
    most: dict[str, tuple[int, float]] = {}
    for key, value in found.items():
        name, _, rest = key.partition("@")
        k = int(rest.partition("/")[0] or 0)
        most[name] = max(most.get(name, (-1, 0.0)), (k, value))
    return [value for _, value in most.values()]


def named(key: str) -> Callable[[str], bool]:
    return lambda k: k == key


def validation(kind: str) -> Callable[[str], bool]:
    """verl's names: val-core/aime24/acc/mean@32, .../maj@32/mean, .../best@32/mean."""
    return lambda k: (
        k.startswith(("val-core/", "val-aux/"))
        and "/acc/" in k
        and f"/{kind}@" in k
        and not k.endswith("/std")
    )


def read(folder: Path) -> Kept:
    """InputError where nothing was logged."""
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no folder: name one that a run has made, under runs/."
        )
    rows = records.merged(folder)
    if not rows:
        raise InputError(
            f"{folder} has no steps.jsonl with a step in it: has the run logged one yet?"
        )
    try:
        saved = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        saved = {}
    # the smoke scale: repro/out/OBJECTIVE/smoke
    objective = saved.get("objective") or folder.parent.name
    return Kept(folder, objective, saved.get("scale", "smoke"), rows, saved)
