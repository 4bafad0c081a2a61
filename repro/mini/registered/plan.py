# SPDX-License-Identifier: Apache-2.0
"""Reads a plan.toml, and says which runs it asks for and which of them come next.

question, command     what is asked; the command that trains and reports
note, limits          what was known before the registration; what the experiment cannot say
settings              of every run; what the arm, the group and the stage say is laid over them
[arms.NAME]           settings: objective, hp, ...; and, where a coefficient is searched, coefficient = {setting, start,
                      grid, rates}: rates are searched at `start`, then the other
                      coefficients at the chosen rate
[[groups]]            name, arms, bases, settings: a cell is one arm in one group, and has a rate of its own
[search]              rates, more_rates (where the choice is at an edge, the next one on that side), seeds, settings,
                      score: "reward" or "exchange" (rule.py), exchange
[main]                seeds, settings
[stopping]            first = {seeds, level}, final = {seeds, most, level}, power
[[stages]]            kind ("search" or "main"), groups, seeds (main: the first so many; 0: all that are due)
[[families]]          name, metrics, first, others, groups, and margins {metric: points}; primary, slope, title
[answer]              what a plan's own verdict needs (rule.py)
"""

import hashlib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from repro.mini.registered import rule
from repro.mini.study.results import Record
from repro.mini.train.settings import Settings
from upref.errors import InputError


class Cell(NamedTuple):
    arm: str
    group: str

    def __str__(self) -> str:
        return f"{self.arm}, {self.group}"


class Choice(NamedTuple):
    """What the search chooses for a cell."""

    rate: float
    coefficient: float | None = None  # None: the arm has none


class Run(NamedTuple):
    key: str  # of its settings, and the name of its folder
    settings: Settings


@dataclass(frozen=True, eq=False)
class Plan:
    folder: Path
    question: str
    command: str
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    search: dict[str, Any]
    main: dict[str, Any]
    stopping: dict[str, Any]
    stages: list[dict[str, Any]]
    families: list[dict[str, Any]]
    answer: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    limits: str = ""

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def cells(self, groups: Sequence[str] | None = None) -> list[Cell]:
        """The cells of these groups, or of all, in the order of the plan."""
        return [
            Cell(arm, group["name"])
            for group in self.groups
            if groups is None or group["name"] in groups
            for arm in group["arms"]
        ]

    def group(self, name: str) -> dict[str, Any]:
        """The table of the group of that name."""
        return next(group for group in self.groups if group["name"] == name)

    def bases(self, cell: Cell) -> list[str]:
        """The bases that the cell is trained from."""
        return self.group(cell.group)["bases"]

    @cache  # noqa: B019  a process has few plans
    def run(self, stage: str, cell: Cell, base: str, choice: Choice, seed: int) -> Run:
        """The run of "search" or "main"."""
        arm = {
            name: value
            for name, value in self.arms[cell.arm].items()
            if name != "coefficient"
        }
        chosen: dict[str, Any] = {"lr": choice.rate}
        if choice.coefficient is not None:
            chosen[self.arms[cell.arm]["coefficient"]["setting"]] = choice.coefficient
        of_stage = (
            self.search["settings"] if stage == "search" else self.main["settings"]
        )
        mine = {"base": base, "seed": seed}
        s = Settings(
            **self.settings
            | of_stage
            | self.group(cell.group)["settings"]
            | arm
            | chosen
            | mine
        )
        return Run(s.key, s)

    # ---- the search ------------------------------------------------------------------
    def rates(self, arm: str) -> list[float]:
        """The rates that are tried in any case."""
        return self.arms[arm].get("coefficient", {}).get("rates", self.search["rates"])

    def every_rate(self, arm: str) -> list[float]:
        """Those, and the ones beyond an edge."""
        return sorted([*self.rates(arm), *self.search["more_rates"]])

    def search_runs(self, cell: Cell, choice: Choice) -> list[Run]:
        """The runs that say how good a choice is for a cell."""
        return [
            self.run("search", cell, base, choice, seed)
            for seed in self.search["seeds"]
            for base in self.bases(cell)
        ]

    def score(
        self, cell: Cell, choice: Choice, records: dict[str, Record]
    ) -> float | None:
        """How good a choice is; None while a run of it is missing."""
        runs = [records.get(run.key) for run in self.search_runs(cell, choice)]
        return rule.score([r for r in runs if r], self.search) if all(runs) else None

    def scores(
        self, cell: Cell, records: dict[str, Record]
    ) -> dict[Choice, float | None]:
        """The score of every choice in reach, in the order of the search; coefficients
        once the rate is known.
        """
        coefficient = self.arms[cell.arm].get("coefficient", {})
        start = coefficient.get("start")
        found = {
            choice: self.score(cell, choice, records)
            for choice in (Choice(rate, start) for rate in self.every_rate(cell.arm))
        }
        rate = self._rate(cell, found)[0]
        if rate is not None:
            for value in coefficient.get("grid", ()):
                found[Choice(rate, value)] = self.score(
                    cell, Choice(rate, value), records
                )
        return found

    def _rate(
        self, cell: Cell, scores: dict[Choice, float | None]
    ) -> tuple[float | None, list[float]]:
        """The rate at the starting coefficient, or None and the rates that must be
        tried before it can be told.
        """
        start = self.arms[cell.arm].get("coefficient", {}).get("start")
        by_rate = {
            rate: scores[Choice(rate, start)] for rate in self.every_rate(cell.arm)
        }
        return rule.choose(by_rate, self.rates(cell.arm))

    def choice(self, cell: Cell, records: dict[str, Record]) -> Choice | None:
        """The rate and coefficient of the cell; None while they cannot be told."""
        return self._search(cell, records)[0]

    def _search(
        self, cell: Cell, records: dict[str, Record]
    ) -> tuple[Choice | None, list[Choice]]:
        """The choice, or None and the choices that must be tried before it can be told."""
        coefficient = self.arms[cell.arm].get("coefficient")
        scores = self.scores(cell, records)
        rate, wanted = self._rate(cell, scores)
        if rate is None:
            return None, [
                Choice(r, coefficient and coefficient["start"]) for r in wanted
            ]
        if coefficient is None:
            return Choice(rate), []
        by_value = {value: scores[Choice(rate, value)] for value in coefficient["grid"]}
        value, missing = rule.choose_coefficient(by_value)
        return (None if value is None else Choice(rate, value)), [
            Choice(rate, x) for x in missing
        ]

    def next_search(self, cell: Cell, records: dict[str, Record]) -> list[Run]:
        """The runs to make before the choice for the cell can be told, seed by seed."""
        wanted = self._search(cell, records)[1]
        turns = zip(*(self.search_runs(cell, choice) for choice in wanted), strict=True)
        return [run for turn in turns for run in turn if run.key not in records]

    # ---- what comes next -------------------------------------------------------------
    def todo(self, records: dict[str, Record]) -> list[Run]:
        """What to train next: the missing runs of the first stage that has any; []
        where all is done.
        """
        for stage in self.stages:
            cells = self.cells(stage.get("groups"))
            if stage["kind"] == "search":
                turns = [self.next_search(cell, records) for cell in cells]
                longest = max(map(len, turns))
                missing = [
                    turn[i] for i in range(longest) for turn in turns if i < len(turn)
                ]
            else:
                due = rule.seeds_due(self, records)
                seeds = self.main["seeds"][: min(stage.get("seeds", due), due)]
                runs = self.main_runs(cells, seeds, records).values()
                missing = [run for run in runs if run.key not in records]
            if missing:
                return missing
        return []

    def main_runs(
        self, cells: Sequence[Cell], seeds: Sequence[int], records: dict[str, Record]
    ) -> dict[tuple[Cell, str, int], Run]:
        """(cell, base, seed) -> run, seed by seed, of the cells whose choice is known."""
        choices = {cell: self.choice(cell, records) for cell in cells}
        return {
            (cell, base, seed): self.run("main", cell, base, choice, seed)
            for seed in seeds
            for cell, choice in choices.items()
            if choice
            for base in self.bases(cell)
        }

    def every_choice(self, cell: Cell) -> Iterator[Choice]:
        """All that the search can choose."""
        grid = self.arms[cell.arm].get("coefficient", {}).get("grid", [None])
        for rate, coefficient in product(self.every_rate(cell.arm), grid):
            yield Choice(rate, coefficient)

    def reachable(self, records: dict[str, Record]) -> list[Run]:
        """All runs that may be made, or may have been made, given what is finished."""
        search = [
            run
            for cell in self.cells()
            for choice in self.every_choice(cell)
            for run in self.search_runs(cell, choice)
        ]
        return [
            *search,
            *self.main_runs(self.cells(), self.main["seeds"], records).values(),
        ]

    def expected(self, records: dict[str, Record]) -> int:
        """How many runs there will be, as far as it is known now."""
        search = main = 0
        for cell in self.cells():
            made = {
                choice
                for choice, score in self.scores(cell, records).items()
                if score is not None
            }
            coefficient = self.arms[cell.arm].get("coefficient")
            first = {
                Choice(rate, coefficient and coefficient["start"])
                for rate in self.rates(cell.arm)
            }
            late = (
                len(coefficient["grid"]) - 1
                if coefficient and not self.choice(cell, records)
                else 0
            )
            search += (
                (len(made | first) + late)
                * len(self.search["seeds"])
                * len(self.bases(cell))
            )
            main += len(self.bases(cell)) * rule.seeds_due(self, records)
        return search + main

    def digest(self) -> str:
        """Of the names of all runs that the plan can ask for, so that no setting
        changes unnoticed: runs.sha256.
        """
        keys = [
            run.key
            for cell in self.cells()
            for choice in self.every_choice(cell)
            for run in self.search_runs(cell, choice)
        ]
        for cell in self.cells():
            for base, choice in product(self.bases(cell), self.every_choice(cell)):
                keys += [
                    self.run("main", cell, base, choice, seed).key
                    for seed in self.main["seeds"]
                ]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def load(path: Path) -> Plan:
    """The plan of that file. InputError, saying where, if it cannot be read or does not
    fit together.
    """
    try:
        plan = Plan(
            folder=path.parent, **tomllib.loads(path.read_text(encoding="utf-8"))
        )
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"{path.name}: {error}") from error
    known = {group["name"] for group in plan.groups}
    for group in plan.groups:
        if unknown := [arm for arm in group["arms"] if arm not in plan.arms]:
            raise InputError(
                f"{path.name}: the group {group['name']!r} has no table for the arm {unknown[0]!r}."
            )
    for table in (*plan.stages, *plan.families):
        if unknown := [name for name in table.get("groups", ()) if name not in known]:
            raise InputError(
                f"{path.name}: there is no group {unknown[0]!r}: choose from {', '.join(sorted(known))}."
            )
    for family in plan.families:
        for name in family["groups"]:
            arms = plan.group(name)["arms"]
            if unknown := [
                arm for arm in (family["first"], *family["others"]) if arm not in arms
            ]:
                where = f"the family {family['name']!r}"
                raise InputError(
                    f"{path.name}: {where} names {unknown[0]!r}, which is not in the group {name!r}."
                )
    return plan
