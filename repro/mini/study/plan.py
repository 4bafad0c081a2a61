# SPDX-License-Identifier: Apache-2.0
"""Reads the pre-registered experiments, experiments/NAME.toml: which runs they need and which claims decide them.

question, answers     what is asked, and the figures or tables of the paper it answers
note                  what a reader must know before believing the answer
core, queue           one of those that `suite --core` runs; the place in the queue, 1 first
seeds, settings       of every arm; the rest is the default of settings.py
[arms.NAME]           objective and whatever else differs
[[claims]]            id, figure, says; source = "paper" or "ours" (a control that the paper lacks), and either
                      not_testable = "why", or contrasts, all of which must hold:
  arms                two: the first minus (or over) the second, paired by seed; one: its own number
  metric, at          a key of steps.jsonl at "mean" (all steps), "last" (their last fifth), "max", "max25" (of the
                      first 25) or "change" (last fifth minus the first five steps); or one of evals.jsonl at the
                      last evaluation, with set ("average": the mean over the sets by difficulty) and decoding
  more_than, less_than   the bound that the effect must pass;  ratio = true: the effect is first / second
[[figures]], [table]  what report.py draws
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.mini.train.settings import Settings
from upref.errors import InputError

FOLDER = Path(__file__).parents[1] / "experiments"
STEP_METRICS = [
    "reward", "valid", "length", "entropy", "kl_base", "kl_old", "grad_norm", "grad_norm_max",
    "clip_pos_high", "clip_neg_low", "clip_pos_low", "clip_neg_high", "alive", "overflow",
]  # fmt: skip
EVAL_METRICS = ["avg", "maj", "best", "best_bootstrap", "pass1"]
ATS = ["mean", "last", "max", "max25", "change"]


@dataclass(frozen=True)
class Contrast:
    arms: tuple[str, ...]
    metric: str
    at: str = "last"
    set: str = "test"
    decoding: str = "top_p_0.7"
    more_than: float | None = None
    less_than: float | None = None
    ratio: bool = False

    @property
    def bound(self) -> float:
        return self.more_than if self.more_than is not None else self.less_than  # type: ignore[return-value]

    @property
    def side(self) -> int:
        return 1 if self.more_than is not None else -1


@dataclass(frozen=True)
class Claim:
    id: str
    figure: str
    says: str
    source: str = "paper"
    not_testable: str = ""
    contrasts: tuple[Contrast, ...] = ()


@dataclass(frozen=True)
class Experiment:
    name: str
    question: str
    answers: list[str]
    seeds: list[int]
    arms: dict[str, dict[str, Any]]
    claims: tuple[Claim, ...]
    queue: int
    note: str = ""
    core: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    figures: tuple[dict[str, Any], ...] = ()
    table: dict[str, Any] = field(default_factory=dict)

    def run(self, arm: str, seed: int) -> Settings:
        return Settings(**(self.settings | self.arms[arm] | {"seed": seed}))

    def runs(self) -> list[tuple[str, int, Settings]]:
        """All its runs, seed by seed, so that an interrupted suite has as many seeds of one arm as of another."""
        return [(arm, seed, self.run(arm, seed)) for seed in self.seeds for arm in self.arms]


def names(core: bool = False) -> list[str]:
    """The experiments in the order of their queue."""
    raw = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
    return [n for n in sorted(raw, key=lambda n: raw[n]["queue"]) if not core or raw[n].get("core")]


def load(name: str) -> Experiment:
    """The experiment of that name. InputError, saying where, if there is none or if it does not fit together."""
    path = FOLDER / f"{name}.toml"
    if not path.exists():
        raise InputError(f"no experiment is called {name!r}: choose one of {', '.join(names())}.")
    try:
        return read(path)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"{path.name}: {error}") from error


def queue(names: Iterable[str]) -> dict[str, Settings]:
    """Folder name -> settings of every run of the experiments, in order, shared ones once."""
    return {s.key: s for name in names for _, _, s in load(name).runs()}


def read(path: Path) -> Experiment:
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = tuple(_claim(c, path.name) for c in raw.pop("claims", []))
    e = Experiment(name=path.stem, claims=claims, figures=tuple(raw.pop("figures", [])), **raw)
    for claim in claims:
        for arm in (a for c in claim.contrasts for a in c.arms):
            if arm not in e.arms:
                raise InputError(f"{path.name}: claim {claim.id} names the arm {arm!r}, which is not there.")
    e.runs()  # every setting is one that Settings knows
    return e


def _claim(raw: dict[str, Any], where: str) -> Claim:
    contrasts = tuple(Contrast(**c | {"arms": tuple(c["arms"])}) for c in raw.pop("contrasts", []))
    claim = Claim(contrasts=contrasts, **raw)
    if bool(contrasts) == bool(claim.not_testable) or claim.source not in ("paper", "ours"):
        raise InputError(f"{where}: claim {claim.id} needs contrasts or not_testable, and source paper or ours.")
    for c in contrasts:
        known = c.metric in (STEP_METRICS if c.at != "last" else STEP_METRICS + EVAL_METRICS) and c.at in ATS
        if not known or len(c.arms) not in (1, 2) or (c.more_than is None) == (c.less_than is None):
            raise InputError(f"{where}: claim {claim.id} has a contrast that cannot be computed: {c}.")
    return claim
