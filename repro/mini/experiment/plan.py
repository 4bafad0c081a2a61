# SPDX-License-Identifier: Apache-2.0
"""Reads a plan, and says which runs it asks for and which of them come next.

question, command     what is asked; the command that trains and reports
note, limits          what was known before the registration; what the experiment cannot say
settings              of every run; what the arm, the group and the stage say is laid over them
[arms.NAME]           settings: objective, hp, ...; and, where a coefficient is searched, coefficient = {setting, start,
                      grid, rates}: rates are searched at `start`, then the other
                      coefficients at the chosen rate
[[groups]]            name, arms, bases, settings: a cell is one arm in one group, and has a rate of its own
[search]              search.py: rates, more_rates, seeds, settings, score, exchange
[main]                seeds, settings; problems = "by seed": each seed is evaluated on problems of its own draw
[stopping]            first = {seeds, level}, final = {seeds, most, level}, power: the looks; without it an interval
                      is a plain one, and there is no verdict
[[stages]]            kind ("search" or "main"), groups, seeds (main: the first so many; 0: all that are due)
[[families]]          name, title, primary, bases (all of the groups if none is named), and what is asked, where a NUMBER is
                      METRIC, METRIC@AT, METRIC/DECODING or METRIC@AT/DECODING:
  metrics             NUMBERs of `first` minus those of each of `others`, in each of `groups`, with margins {NUMBER:
                      points}; slope = true: the slope of that difference in the staleness of the groups
  numbers             NUMBERs of each of `arms` in each of `groups`, as they are
  changes             [NUMBER, NUMBER] of each of `arms` in each of `groups`: the first minus the second
  questions           {name, says, ratio, margin, terms = [[weight, arm, group, NUMBER], ...]}
[answer]              family, group and controls of the plan's own verdict (answer.py)
page, page_name       the sections of its page, in order (page.py), and the name of its file
[[figures]]           name, title, highlight, panels = [{metric, label, log}]: mean curves
standing.toml         beside it: how its effects stand as claims of a paper (standing.py)
of                    instead of runs of its own, the names of plans whose runs are read: for facts that nobody
                      registered

The plans of the two closed rounds have arms, seeds, settings and [[claims]] instead: id, figure, says, source,
contrasts or not_testable. Their only group has their own name, and a claim is a family that asks for its contrasts.
What was said of each claim, by a rule that is closed too, is in results/standing.json.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from repro.mini.experiment import effects, records as recorded
from repro.mini.experiment.effects import Effect, Look, Runs
from repro.mini.experiment.questions import (
    Question,
    RunRecord,
    contrast,
    questions_of,
)
from repro.mini.experiment.search import (
    Choice,
    Scores,
    Search,
    choose_rate,
    choose_value,
)
from repro.mini.train.settings import Settings
from upref.errors import InputError

MINI = Path(__file__).parents[1]
# the two closed rounds: folder of their plans -> folder of their results
ROUNDS = {
    MINI / "experiments": MINI / "results",
    MINI / "round2" / "experiments": MINI / "round2" / "results",
}


# sections of a page that names none
PAGE = (
    "answer",
    "claims",
    "plane",
    "curves",
    "effects",
    "choices",
    "stopped",
    "limits",
)


class Cell(NamedTuple):
    """One arm in one group."""

    arm: str
    group: str


class Searched(NamedTuple):
    """How far the search of a cell is.

    Attributes:
        choice: None while a run is missing that decides it.
        wanted: the choices whose runs are missing; [] once `choice` is known.
        scores: of the rates at the first coefficient, and, once these are known, of the
            other coefficients at the best rate; None while a run of it is missing.
    """

    choice: Choice | None
    wanted: list[Choice]
    scores: dict[Choice, float | None]


class Run(NamedTuple):
    """A run that a plan asks for; `key` is the name of its folder and of its record."""

    key: str
    settings: Settings


@dataclass(frozen=True)
class Family:
    """Questions that are judged together.

    Attributes:
        primary: whether its spread at the first look decides the number of seeds.
    """

    name: str
    title: str
    questions: tuple[Question, ...]
    primary: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """An experiment as data; the keys are described at the top of this file.

    `records`, an argument of many methods, is name -> record of the runs that are
    finished.
    """

    name: str
    folder: Path
    results: Path
    question: str
    settings: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    main: dict[str, Any] = field(default_factory=lambda: {"seeds": []})
    families: tuple[Family, ...] = ()
    claims: tuple[dict[str, Any], ...] = ()
    search: Search | None = None
    stopping: dict[str, Any] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=lambda: [{"kind": "main"}])
    answer: dict[str, Any] = field(default_factory=dict)
    standing: dict[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    page: tuple[str, ...] = PAGE
    page_name: str = "report.md"
    others: tuple["Plan", ...] = ()
    given_rates: dict[str, float] = field(default_factory=dict)
    command: str = ""
    note: str = ""
    limits: str = ""

    # ---- cells and runs --------------------------------------------------------------
    def cells(self, groups: Sequence[str] | None = None) -> list[Cell]:
        """Return the cells of these groups, or of all, in the order of the plan."""
        return [
            Cell(arm, group["name"])
            for group in self.groups
            if groups is None or group["name"] in groups
            for arm in group["arms"]
        ]

    def group(self, name: str) -> dict[str, Any]:
        """Return the table of the group of that name. A base "" in it is the base of
        the settings.

        Raises:
            StopIteration: there is none.
        """
        return next(group for group in self.groups if group["name"] == name)

    def bases_of(self, question: Question) -> list[str]:
        """Return the bases that a question is about: its own, or else those of its
        first group.
        """
        return list(question.bases or self.group(question.groups[0])["bases"])

    @cache  # noqa: B019  a process has few plans
    def run(self, stage: str, cell: Cell, base: str, choice: Choice, seed: int) -> Run:
        """Return the run of a stage, with its settings.

        The settings of the stage, the group and the arm replace those of the plan, in
        this order; the choice, the base and the seed come last.

        Args:
            stage: "search" or "main".
            cell: an arm in a group.
            base: "" for that of the settings.
            choice: rate and coefficient; None in it leaves that of the settings.
            seed: of the training.
        """
        arm = dict(self.arms[cell.arm])
        coefficient = arm.pop("coefficient", None)
        of_stage = self.main.get("settings", {})
        if stage == "search" and self.search:
            of_stage = self.search.settings
        of_group = self.group(cell.group).get("settings", {})
        settings = self.settings | of_stage | of_group | arm
        if choice.rate is not None:
            settings["lr"] = choice.rate
        if coefficient and choice.coefficient is not None:
            settings[coefficient["setting"]] = choice.coefficient
        if base:
            settings["base"] = base
        if stage == "main" and self.main.get("problems") == "by seed":
            settings["eval_seed"] = seed
        s = Settings(**settings | {"seed": seed})
        return Run(s.key, s)

    # ---- the search ------------------------------------------------------------------
    def rates(self, arm: str) -> list[float]:
        """Return the rates that are tried for an arm in any case: its own, or those of
        the search.
        """
        assert self.search
        found: list[float] = self._coefficient(arm).get("rates", self.search.rates)
        return found

    def every_rate(self, arm: str) -> list[float]:
        """Return those, and the ones beyond an edge that may be tried, sorted."""
        assert self.search
        return sorted([*self.rates(arm), *self.search.more_rates])

    def _coefficient(self, arm: str) -> dict[str, Any]:
        """Return how the arm's coefficient is searched; {} where it has none."""
        found: dict[str, Any] = self.arms[arm].get("coefficient", {})
        return found

    def every_choice(self, cell: Cell) -> Iterator[Choice]:
        """Yield every rate with every coefficient: all that the search can choose."""
        grid = self._coefficient(cell.arm).get("grid", [None])
        for rate, coefficient in product(self.every_rate(cell.arm), grid):
            yield Choice(rate, coefficient)

    def search_runs(self, cell: Cell, choice: Choice) -> list[Run]:
        """Return the runs whose mean is the score of a choice, one for each seed and
        base; [] without a search.
        """
        if self.search is None:
            return []
        return [
            self.run("search", cell, base, choice, seed)
            for seed in self.search.seeds
            for base in self.group(cell.group)["bases"]
        ]

    def score(
        self, cell: Cell, choice: Choice, records: dict[str, RunRecord]
    ) -> float | None:
        """Return the score of a choice, higher is better; None while a run is
        missing.
        """
        assert self.search
        runs = [records.get(run.key) for run in self.search_runs(cell, choice)]
        there = [run for run in runs if run]
        return self.search.score_of(there) if len(there) == len(runs) else None

    def searched(self, cell: Cell, records: dict[str, RunRecord]) -> Searched:
        """Return how far the search of a cell is: first the rates at the starting
        coefficient, then the coefficients at the chosen rate.
        """
        coefficient = self._coefficient(cell.arm)
        start = coefficient.get("start")
        of_rates: Scores = {}
        for rate in self.every_rate(cell.arm):
            of_rates[rate] = self.score(cell, Choice(rate, start), records)
        scores = {Choice(rate, start): score for rate, score in of_rates.items()}
        best, missing = choose_rate(of_rates, self.rates(cell.arm))
        if best is None:
            return Searched(None, [Choice(rate, start) for rate in missing], scores)
        if not coefficient:
            return Searched(Choice(best), [], scores)
        of_values: Scores = {}
        for value in coefficient["grid"]:
            of_values[value] = self.score(cell, Choice(best, value), records)
        scores |= {Choice(best, value): score for value, score in of_values.items()}
        chosen, missing = choose_value(of_values)
        if chosen is None:
            return Searched(None, [Choice(best, value) for value in missing], scores)
        return Searched(Choice(best, chosen), [], scores)

    def choice(self, cell: Cell, records: dict[str, RunRecord]) -> Choice | None:
        """Return the rate and coefficient of the cell; None while the search is not
        done. Without a search: the rate that another plan chose, or that of the
        settings.
        """
        if self.search:
            return self.searched(cell, records).choice
        return Choice(self.given_rates.get(cell.arm))

    def next_search(self, cell: Cell, records: dict[str, RunRecord]) -> list[Run]:
        """Return the missing runs that the choice for the cell waits for: for one seed
        and base the runs of all wanted choices, then for the next.
        """
        wanted = self.searched(cell, records).wanted
        by_choice = [self.search_runs(cell, choice) for choice in wanted]
        turns = zip(*by_choice, strict=True)
        return [run for turn in turns for run in turn if run.key not in records]

    # ---- what comes next -------------------------------------------------------------
    def todo(self, records: dict[str, RunRecord]) -> list[Run]:
        """Return what to train next: the missing runs of the first stage that has any;
        [] where all is done.
        """
        for stage in self.stages:
            cells = self.cells(stage.get("groups"))
            if stage["kind"] == "search":
                missing = _in_turns([self.next_search(c, records) for c in cells])
            else:
                due = self.seeds_due(records)
                of_stage = stage.get("seeds") or due  # 0: all that are due
                seeds = self.main["seeds"][: min(of_stage, due)]
                runs = self.main_runs(cells, seeds, records).values()
                missing = [run for run in runs if run.key not in records]
            if missing:
                return missing
        return []

    def main_runs(
        self, cells: Sequence[Cell], seeds: Sequence[int], records: dict[str, RunRecord]
    ) -> dict[tuple[Cell, str, int], Run]:
        """Return (cell, base, seed) -> run of the experiment proper, seed by seed;
        without the cells whose choice is not known yet.
        """
        choices = {cell: self.choice(cell, records) for cell in cells}
        return {
            (cell, base, seed): self.run("main", cell, base, choice, seed)
            for seed in seeds
            for cell, choice in choices.items()
            if choice
            for base in self.group(cell.group)["bases"]
        }

    def reachable(self, records: dict[str, RunRecord]) -> list[Run]:
        """Return every run of the search, and of the experiment proper for all seeds of
        the plan where the choice is known: all that may be in the records.
        """
        main = self.main_runs(self.cells(), self.main["seeds"], records)
        return [*self._every_search_run(), *main.values()]

    def _every_search_run(self) -> list[Run]:
        """Return the runs of every choice of every cell; [] without a search."""
        if self.search is None:
            return []
        return [
            run
            for cell in self.cells()
            for choice in self.every_choice(cell)
            for run in self.search_runs(cell, choice)
        ]

    def expected(self, records: dict[str, RunRecord]) -> int:
        """Return how many runs there will be in all, as far as it is known now."""
        due = self.seeds_due(records)
        total = 0
        for cell in self.cells():
            seeds = due
            if self.search:
                tried = self._choices_to_try(cell, records)
                seeds += tried * len(self.search.seeds)
            total += seeds * len(self.group(cell.group)["bases"])
        return total

    def _choices_to_try(self, cell: Cell, records: dict[str, RunRecord]) -> int:
        """Return how many choices the search of a cell tries, as far as it is known
        now: those that have a score or are tried in any case, and the rest of the grid.
        """
        coefficient = self._coefficient(cell.arm)
        scores = self.searched(cell, records).scores
        tried = {choice for choice, score in scores.items() if score is not None}
        tried |= {Choice(x, coefficient.get("start")) for x in self.rates(cell.arm)}
        if coefficient and not self.choice(cell, records):
            # one of the grid is the starting coefficient, which is counted
            return len(tried) + len(coefficient["grid"]) - 1
        return len(tried)

    def own_records(self, records: dict[str, RunRecord]) -> list[RunRecord]:
        """Return the records of the plan's own runs, those of the search first."""
        keys = dict.fromkeys(run.key for run in self.reachable(records))
        return [records[key] for key in keys if key in records]

    def progress(self, records: dict[str, RunRecord]) -> str:
        """Say what is finished, what comes next, and how many hours that takes."""
        todo = self.todo(records)
        done = len(self.own_records(records))
        finished = f"{done} of {self.expected(records)} runs are finished."
        if not todo:
            return finished
        searching = self.search and todo[0].settings.seed in self.search.seeds
        stage = "of the search" if searching else "of the experiment proper"
        hours = recorded.forecast([run.settings for run in todo], records) / 3600
        time = "" if math.isnan(hours) else f", about {hours:.1f} hours of one core"
        return f"{finished} Next are {len(todo)} runs {stage}{time}: `{self.command}`."

    def digest(self) -> str:
        """Return the sha256 of the names of all runs that the plan can ask for:
        runs.sha256. A name changes with any setting, so that none changes unnoticed.
        """
        keys = [run.key for run in self._every_search_run()]
        for cell in self.cells():
            choices = self.every_choice(cell) if self.search else [Choice()]
            bases = self.group(cell.group)["bases"]
            for base, choice in product(bases, choices):
                for seed in self.main["seeds"]:
                    keys.append(self.run("main", cell, base, choice, seed).key)
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()

    # ---- effects ---------------------------------------------------------------------
    def runs(self, records: dict[str, RunRecord]) -> Runs:
        """Return (arm, group, base, seed) -> record, of the finished runs of the
        experiment proper; those of `others` where the plan reads these.
        """
        if self.others:
            found: Runs = {}
            for plan in self.others:
                found |= plan.runs(records)
            return found
        asked = self.main_runs(self.cells(), self.main["seeds"], records)
        return {
            (cell.arm, cell.group, base, seed): records[run.key]
            for (cell, base, seed), run in asked.items()
            if run.key in records
        }

    def looks(self, records: dict[str, RunRecord]) -> tuple[Look, Look]:
        """Return the first look, and the final one with the seeds that are due."""
        first = Look(**self.stopping["first"])
        level = self.stopping["final"]["level"]
        return first, Look(self.seeds_due(records), level)

    def effects(self, records: dict[str, RunRecord]) -> list[Effect]:
        """Return the effect of each question, family by family in the order of the
        plan: by looks where the plan has them, else with a plain interval.

        An effect whose seeds are too few has an infinite interval.
        """
        runs = self.runs(records)
        seeds = self.main["seeds"]
        looks = self.looks(records) if self.stopping else None
        found = []
        for family in self.families:
            size = len(family.questions)
            for q in family.questions:
                bases = self.bases_of(q)
                if looks is None:
                    found.append(effects.plain(q, runs, seeds, bases))
                else:
                    found.append(effects.at_looks(q, runs, seeds, bases, looks, size))
        return found

    def by_family(self, found: Sequence[Effect]) -> list[tuple[Family, list[Effect]]]:
        """Return each family with its effects.

        Args:
            found: the effects of the whole plan, in its order.
        """
        left = iter(found)
        return [
            (family, [next(left) for _ in family.questions]) for family in self.families
        ]

    def seeds_due(self, records: dict[str, RunRecord]) -> int:
        """Return the final number of seeds: as planned until every run of the first
        look is there, then by the spread that was found there (`effects.seeds_due`).
        """
        if not self.stopping:
            return len(self.main["seeds"])
        final = self.stopping["final"]
        planned: int = final["seeds"]
        if final["most"] <= planned:
            return planned
        seeds = self.main["seeds"][: self.stopping["first"]["seeds"]]
        runs = self.runs(records)
        asked = []
        primary = [family for family in self.families if family.primary]
        for family in primary:
            for question in family.questions:
                bases = self.bases_of(question)
                if effects.finished(question, runs, seeds, bases) != seeds:
                    return planned
                d = effects.differences(question, runs, seeds, bases)
                asked.append((question, d))
        level = final["level"] / max(len(family.questions) for family in primary)
        power = self.stopping["power"]
        return effects.seeds_due(asked, planned, final["most"], level, power)


def _in_turns(turns: Sequence[Sequence[Run]]) -> list[Run]:
    """Return the first run of each list, then the second of each, and so on."""
    longest = max(map(len, turns), default=0)
    return [turn[i] for i in range(longest) for turn in turns if i < len(turn)]


# ---- reading -------------------------------------------------------------------------
def paths() -> dict[str, Path]:
    """Return name -> file of every plan.

    A name is FOLDER for its plan.toml, FOLDER/post_hoc, or the name of a file of the
    two closed rounds.
    """
    found = {}
    for path in sorted(MINI.glob("*/plan.toml")):
        found[path.parent.name] = path
    for path in sorted(MINI.glob("*/post_hoc.toml")):
        found[f"{path.parent.name}/post_hoc"] = path
    for folder in ROUNDS:
        for path in sorted(folder.glob("*.toml")):
            found[path.stem] = path
    return found


def load(name: str) -> Plan:
    """Return the plan of that name.

    Raises:
        InputError: there is none, or it does not fit together; the message says where.
    """
    there = paths()
    if name not in there:
        raise InputError(
            f"there is no experiment named {name!r}: choose one of {', '.join(there)}."
        )
    return read(there[name], name)


def read(path: Path, name: str = "") -> Plan:
    """Return the plan in a file, translated and completed.

    A standing.toml beside a plan.toml belongs to it. Results are in the folder
    `results` beside the plan unless it is of a closed round.

    Args:
        path: of the file.
        name: of the plan; that of its folder if it is not given.

    Raises:
        InputError: it cannot be read or does not fit together.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        raw["name"] = name or path.parent.name
        raw["folder"] = path.parent
        raw.setdefault("results", ROUNDS.get(path.parent, path.parent / "results"))
        of_effects = path.parent / "standing.toml"
        if path.name == "plan.toml" and of_effects.exists():
            text = of_effects.read_text(encoding="utf-8")
            raw["standing"] = tomllib.loads(text)
        if "seeds" in raw:  # a plan of a closed round
            _translate_claims(raw)
        if "of" in raw:
            _take_runs_of(raw)
        if "search" in raw:
            raw["search"] = Search(**raw["search"])
        _check_groups(raw)
        groups = {group["name"]: group for group in raw["groups"]}
        tables = raw.pop("families", [])
        raw["families"] = (
            *(_family(table, groups) for table in tables),
            *(_claim(table, raw["name"]) for table in raw.get("claims", ())),
        )
        return Plan(**raw)
    except (InputError, OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"{path.name}: {error}") from error
    except LookupError as error:
        raise InputError(f"{path.name} lacks {error}.") from error


def _translate_claims(raw: dict[str, Any]) -> None:
    """Change a plan of a closed round in place into the words of this file: one group,
    named after the plan, and one stage. Tables that only its old engine read are
    dropped.

    Raises:
        OSError: rates of another plan are wanted, and its results have no rates.json.
    """
    for unused in ("answers", "queue", "core", "table"):
        raw.pop(unused, None)
    if raw.pop("rates_from", ""):  # another plan of that round chose them
        text = (raw["results"] / "rates.json").read_text(encoding="utf-8")
        raw["given_rates"] = json.loads(text)
    raw.setdefault("command", f"python -m repro.mini.experiment {raw['name']}")
    raw["main"] = {"seeds": raw.pop("seeds")}
    raw["groups"] = [
        {"name": raw["name"], "arms": list(raw["arms"]), "bases": [""]},
    ]
    raw["claims"] = tuple(raw.get("claims", ()))


def _take_runs_of(raw: dict[str, Any]) -> None:
    """Give a plan of facts that nobody registered, in place, the groups, arms, seeds
    and results of the plans that it reads, which `of` names.
    """
    others = tuple(load(name) for name in raw.pop("of"))
    groups: list[dict[str, Any]] = []
    arms: dict[str, dict[str, Any]] = {}
    seeds: set[int] = set()
    for plan in others:
        groups += plan.groups
        arms |= {arm: {} for arm in plan.arms}  # their settings are not needed
        seeds |= set(plan.main["seeds"])
    raw["others"] = others
    raw["results"] = others[0].results
    raw["groups"] = groups
    raw["arms"] = arms
    raw["main"] = {"seeds": sorted(seeds)}


def _check_groups(raw: dict[str, Any]) -> None:
    """Raise InputError where a group names an arm, or a stage or family a group, that
    has no table.
    """
    there = {group["name"]: group["arms"] for group in raw["groups"]}
    for name, arms in there.items():
        if unknown := [arm for arm in arms if arm not in raw["arms"]]:
            raise InputError(
                f"the group {name!r} has no table for the arm {unknown[0]!r}."
            )
    for table in (*raw.get("stages", ()), *raw.get("families", ())):
        if unknown := [name for name in table.get("groups", ()) if name not in there]:
            known_names = ", ".join(sorted(there))
            raise InputError(
                f"there is no group {unknown[0]!r}: choose from {known_names}."
            )


def _family(table: dict[str, Any], groups: dict[str, dict[str, Any]]) -> Family:
    """Return a family of a plan, with its questions written out."""
    title = table.get("title", table["name"])
    asked = questions_of(table, groups)
    return Family(table["name"], title, asked, table.get("primary", False))


def _claim(table: dict[str, Any], group: str) -> Family:
    """Return a claim of a closed round as a family with one question for each contrast;
    it has none where the claim was not testable.
    """
    asked = [contrast(c, group) for c in table.get("contrasts", ())]
    return Family(table["id"], table["says"], tuple(asked))
