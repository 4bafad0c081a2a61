# SPDX-License-Identifier: Apache-2.0
"""Reads the registered experiments, experiments/NAME.toml and
round2/experiments/NAME.toml: runs and claims.

question, answers     what is asked, and the figures or tables of the paper it answers
note                  what a reader must know before believing the answer
core, queue           one of those that `suite --core` runs; the place in the queue, 1 first
seeds, settings       of every arm; the rest is the default of settings.py
[arms.NAME]           objective and whatever else differs
[[claims]]            id, figure, says; source = "paper" or "ours" (a control that the paper lacks), and either
                      not_testable = "why", or contrasts, all of which must hold:
  arms                two: the first minus (or over) the second, paired by seed; one: its own number
  metric, at          a key of steps.jsonl at "mean" (all steps), "last" (their last fifth), "max", "max25" (of the
                      first 25), "change" (last fifth minus the first five steps) or
                      "gain" (last fifth minus first fifth); or one of evals.jsonl at
                      the "last" evaluation, its "peak" (the untrained policy's left
                      out) or its "area" (the mean over training), with set ("average":
                      the mean over the sets by difficulty) and decoding
  more_than, less_than   the bound that the effect must pass;  ratio = true: the effect is first / second
  within              round 2: the effect is "comparable", between -within and within (ratio: 1/within and within)
  effect              round 2: the effect that the number of seeds was calculated for
gate                  round 2: an arm whose reward must rise, or the claim is not testable here
[[figures]], [table]  what report.py draws
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.mini.train.settings import Settings
from upref.errors import InputError

FOLDERS = {
    1: Path(__file__).parents[1] / "experiments",
    2: Path(__file__).parents[1] / "round2" / "experiments",
}
STEP_METRICS = [
    "reward",
    "valid",
    "length",
    "entropy",
    "kl_base",
    "kl_old",
    "grad_norm",
    "grad_norm_max",
    "clip_pos_high",
    "clip_neg_low",
    "clip_pos_low",
    "clip_neg_high",
    "alive",
    "overflow",
]
EVAL_METRICS = ["avg", "maj", "best", "best_bootstrap", "pass1"]
ATS = ["mean", "last", "max", "max25", "change", "gain"]
EVAL_ATS = ["last", "peak", "area"]
# round 2 takes ratios of these only
POSITIVE = {"kl_base", "kl_old", "grad_norm", "grad_norm_max"}


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
    within: float | None = None
    effect: float | None = None

    @property
    def bound(self) -> float:
        return next(
            x for x in (self.more_than, self.less_than, self.within) if x is not None
        )

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
    gate: str = ""
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
    round: int = 1
    rates_from: str = ""  # the experiment that chose a learning rate for each arm
    rates: dict[str, float] = field(default_factory=dict)

    def run(self, arm: str, seed: int) -> Settings:
        rate = {"lr": self.rates[arm]} if self.rates_from else {}
        return Settings(**(self.settings | self.arms[arm] | rate | {"seed": seed}))

    def runs(self) -> list[tuple[str, int, Settings]]:
        """All its runs, seed by seed, so that an interrupted suite has as many seeds of
        one arm as of another.

        None while the learning rates are not chosen.
        """
        if self.rates_from and not self.rates:
            return []
        return [
            (arm, seed, self.run(arm, seed)) for seed in self.seeds for arm in self.arms
        ]


def names(core: bool = False, round: int = 1) -> list[str]:
    """The experiments of a round in the order of their queue."""
    files = sorted(FOLDERS[round].glob("*.toml"))
    raw = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in files}
    return [
        n
        for n in sorted(raw, key=lambda n: raw[n]["queue"])
        if not core or raw[n].get("core")
    ]


def load(name: str) -> Experiment:
    """The experiment of that name. InputError, saying where, if there is none or if it
    does not fit together.
    """
    path = next(
        (p for f in FOLDERS.values() if (p := f / f"{name}.toml").exists()), None
    )
    if path is None:
        known = ", ".join([*names(), *names(round=2)])
        raise InputError(
            f"there is no experiment named {name!r}: choose one of {known}."
        )
    try:
        return read(path)
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"{path.name}: {error}") from error


def queue(names: Iterable[str]) -> dict[str, Settings]:
    """Folder name -> settings of every run of the experiments, in order, shared ones
    once.

    Experiments at the same place in the queue take turns, seed by seed.
    """
    turns = [
        (e.queue, e.seeds.index(seed) if e.round == 2 else 0, s)
        for e in map(load, names)
        for _, seed, s in e.runs()
    ]
    return {s.key: s for _, _, s in sorted(turns, key=lambda turn: turn[:2])}


def read(path: Path) -> Experiment:
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    claims = tuple(_claim(c, path.name) for c in raw.pop("claims", []))
    chosen = path.parent.parent / "results" / "rates.json"
    if raw.get("rates_from") and chosen.exists():
        raw["rates"] = json.loads(chosen.read_text(encoding="utf-8"))
    round = next((n for n, folder in FOLDERS.items() if folder == path.parent), 1)
    e = Experiment(
        name=path.stem,
        claims=claims,
        figures=tuple(raw.pop("figures", [])),
        round=round,
        **raw,
    )
    for claim in claims:
        for arm in [a for c in claim.contrasts for a in c.arms] + (
            [claim.gate] if claim.gate else []
        ):
            if arm not in e.arms:
                raise InputError(
                    f"{path.name}: claim {claim.id} names the arm {arm!r}, which is not there."
                )
    e.runs()  # every setting is one that Settings knows
    return e


def _claim(raw: dict[str, Any], where: str) -> Claim:
    contrasts = tuple(
        Contrast(**c | {"arms": tuple(c["arms"])}) for c in raw.pop("contrasts", [])
    )
    claim = Claim(contrasts=contrasts, **raw)
    if bool(contrasts) == bool(claim.not_testable) or claim.source not in (
        "paper",
        "ours",
    ):
        raise InputError(
            f"{where}: claim {claim.id} needs contrasts or not_testable, and source paper or ours."
        )
    for c in contrasts:
        known = (c.metric in STEP_METRICS and c.at in ATS) or (
            c.metric in EVAL_METRICS and c.at in EVAL_ATS
        )
        bounds = [x for x in (c.more_than, c.less_than, c.within) if x is not None]
        if not known or len(c.arms) not in (1, 2) or len(bounds) != 1:
            raise InputError(
                f"{where}: claim {claim.id} has a contrast that cannot be computed: {c}."
            )
    return claim
