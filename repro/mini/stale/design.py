# SPDX-License-Identifier: Apache-2.0
"""From design.toml to runs: the cells, the settings of each run, and what to train next
given what has finished.
"""

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from repro.mini.stale import rule
from repro.mini.stale.rule import Cell
from repro.mini.study.results import Record
from repro.mini.train.settings import Settings

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Run(NamedTuple):
    key: str  # of its settings, and the name of its folder
    settings: Settings


@dataclass(frozen=True, eq=False)
class Design:
    question: str
    bases: list[str]
    arms: list[str]
    staleness: list[int]
    recomputed: dict[str, Any]
    rates: list[float]
    more_rates: list[float]
    settings: dict[str, Any]
    search: dict[str, Any]
    main: dict[str, Any]
    stopping: dict[str, Any]
    interest: dict[str, float]

    def cells(self) -> list[Cell]:
        """In the order of the runs: the most stale column first, those with recomputed
        log-probabilities last.
        """
        plain = [Cell(arm, s) for s in self.staleness for arm in self.arms]
        again = self.recomputed
        return plain + [
            Cell(arm, s, "recomputed")
            for s in again["staleness"]
            for arm in again["arms"]
        ]

    @cache  # noqa: B019  there is one design
    def run(self, stage: str, cell: Cell, base: str, rate: float, seed: int) -> "Run":
        """The run of "search" or "main"."""
        mine = {
            "objective": cell.arm,
            "staleness": cell.staleness,
            "old_log_probs": cell.old,
            "base": base,
        }
        s = Settings(
            **self.settings
            | getattr(self, stage)["settings"]
            | mine
            | {"lr": rate, "seed": seed}
        )
        return Run(s.key, s)

    def search_runs(self, cell: Cell, rate: float) -> list["Run"]:
        """The runs that say how good a rate is for a cell."""
        return [
            self.run("search", cell, base, rate, seed)
            for seed in self.search["seeds"]
            for base in self.bases
        ]

    def scores(
        self, cell: Cell, records: dict[str, Record]
    ) -> dict[float, float | None]:
        """Rate -> how good it is, for every rate in reach; None while a run of it is
        missing.
        """
        found: dict[float, float | None] = {}
        for rate in sorted([*self.rates, *self.more_rates]):
            runs = [records.get(s.key) for s in self.search_runs(cell, rate)]
            found[rate] = rule.score([r for r in runs if r]) if all(runs) else None
        return found

    def rate(self, cell: Cell, records: dict[str, Record]) -> float | None:
        """The cell's own learning rate; None while it cannot be told."""
        return rule.choose(self.scores(cell, records), self.rates)[0]

    def next_search(self, cell: Cell, records: dict[str, Record]) -> list[Run]:
        """The runs to make before the cell's rate can be told, seed by seed."""
        wanted = rule.choose(self.scores(cell, records), self.rates)[1]
        turns = zip(*(self.search_runs(cell, rate) for rate in wanted), strict=True)
        return [s for turn in turns for s in turn if s.key not in records]

    def stages(self) -> list[tuple[str, list[Cell], int]]:
        """In the order of the runs: "search" or "main", cells, and up to how many seeds
        of "main".
        """
        columns = {
            s: [c for c in self.cells() if c.staleness == s and c.old == "sampler"]
            for s in self.staleness
        }
        again = [c for c in self.cells() if c.old == "recomputed"]
        first, second, *rest = columns.values()
        others = [c for column in rest for c in column] + again
        look, most = self.stopping["first"]["seeds"], self.stopping["final"]["most"]
        return [
            ("search", first, 0),
            ("search", second, 0),
            ("main", first + second, look),
            ("search", others, 0),
            ("main", others, look),
            ("main", self.cells(), most),
        ]

    def todo(self, records: dict[str, Record]) -> list[Run]:
        """What to train next: the missing runs of the first stage that has any; []
        where all is done.
        """
        for kind, cells, upto in self.stages():
            if kind == "search":
                turns = [self.next_search(c, records) for c in cells]
                missing = [
                    turn[i]
                    for i in range(max(map(len, turns)))
                    for turn in turns
                    if i < len(turn)
                ]
            else:
                seeds = self.main["seeds"][: min(upto, rule.seeds_due(self, records))]
                missing = [
                    s
                    for s in self.main_runs(cells, seeds, records).values()
                    if s.key not in records
                ]
            if missing:
                return missing
        return []

    def main_runs(
        self, cells: list[Cell], seeds, records: dict[str, Record]
    ) -> dict[tuple, Run]:
        """(cell, base, seed) -> run, seed by seed, of the cells whose rate is known."""
        rates = {c: self.rate(c, records) for c in cells}
        return {
            (cell, base, seed): self.run("main", cell, base, rate, seed)
            for seed in seeds
            for cell, rate in rates.items()
            if rate
            for base in self.bases
        }

    def reachable(self, records: dict[str, Record]) -> list[Run]:
        """All runs that may be made, or may have been made, given what is finished."""
        every = sorted([*self.rates, *self.more_rates])
        search = [
            s for c in self.cells() for rate in every for s in self.search_runs(c, rate)
        ]
        return [
            *search,
            *self.main_runs(self.cells(), self.main["seeds"], records).values(),
        ]

    def expected(self, records: dict[str, Record]) -> int:
        """How many runs there will be, as far as it is known now."""
        search = 0
        for cell in self.cells():
            made = {
                rate
                for rate, score in self.scores(cell, records).items()
                if score is not None
            }
            search += (
                len(made | set(self.rates))
                * len(self.search["seeds"])
                * len(self.bases)
            )
        return search + len(self.cells()) * len(self.bases) * rule.seeds_due(
            self, records
        )

    def digest(self) -> str:
        """Of the names of all runs that the design can ask for, so that no setting
        changes unnoticed: runs.sha256.
        """
        every = sorted([*self.rates, *self.more_rates])
        keys = [
            s.key
            for c in self.cells()
            for rate in every
            for s in self.search_runs(c, rate)
        ]
        for cell, base, rate in product(self.cells(), self.bases, every):
            keys += [
                self.run("main", cell, base, rate, seed).key
                for seed in self.main["seeds"]
            ]
        return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def load() -> Design:
    return Design(**tomllib.loads((HERE / "design.toml").read_text(encoding="utf-8")))
