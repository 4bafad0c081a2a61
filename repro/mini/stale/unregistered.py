# SPDX-License-Identifier: Apache-2.0
"""What the records on stale data show and nobody registered:
`python -m repro.mini.stale.unregistered`.

It writes results/unregistered.md and its figure from results/runs.jsonl, and runs
nothing. The registered report is report.md. An effect here is a mean over the two
bases, paired by seed, with a plain 95 % t-interval over the seeds: no correction for
many comparisons, no margin, no verdict.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from figures.make import save
from repro.mini import files
from repro.mini.stale import design, rule
from repro.mini.stale.design import Design
from repro.mini.stale.rule import Cell
from repro.mini.study import results
from repro.mini.study.results import Record
from upref.errors import InputError
from upref.weights.plots import PALETTE, STYLE

TOP_P, T_1 = rule.WHERE, "test/t_1"
DECODINGS = {TOP_P: "top-p 0.7", T_1: "T = 1"}
METRICS = {"best": "Best@32", "avg": "Avg@32", "maj": "Maj@32"}
NAMES = {
    "up_dapo": "UP-DAPO",
    "dapo": "DAPO",
    "dapo_no_upper_clip": "DAPO without its upper clip",
    "cispo": "CISPO",
}
PAIRS = (
    ("up_dapo", "dapo"),
    ("up_dapo", "dapo_no_upper_clip"),
    ("dapo_no_upper_clip", "dapo"),
)
DRAWS = 10_000  # of the bootstrap over seeds

Number = Callable[[Record], float]


class Effect(NamedTuple):
    mean: float
    low: float
    high: float
    above: int  # the seeds whose effect is above 0
    below: int
    n: int

    def __str__(self) -> str:
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


def signed(x: float) -> str:
    return f"{round(x, 1) + 0.0:+.1f}"


def effect(per_seed: np.ndarray) -> Effect:
    """The mean over seeds and its 95 % t-interval."""
    # a tie is 0, and not the rounding error of its two sums
    per_seed = np.round(per_seed, 9)
    low, high = rule.interval(per_seed, 0.05)
    above, below = int((per_seed > 0).sum()), int((per_seed < 0).sum())
    return Effect(float(per_seed.mean()), low, high, above, below, len(per_seed))


# ---- one number of one run -----------------------------------------------------------
def at_end(metric: str, decoding: str = TOP_P) -> Number:
    """Of the trained policy, in points."""
    return lambda r: 100 * r["evals"][decoding][metric][-1]


def at_start(metric: str) -> Number:
    """Of the base policy, at top-p 0.7, in points."""
    return lambda r: 100 * r["evals"][TOP_P][metric][0]


def at_peak(metric: str) -> Number:
    """The highest of all evaluations at top-p 0.7, that of the base among them, in
    points.
    """
    return lambda r: 100 * max(r["evals"][TOP_P][metric])


# ---- all of them ---------------------------------------------------------------------
@dataclass(frozen=True)
class Runs:
    """The finished experiment: the runs of every cell, base and seed."""

    design: Design
    records: dict[str, Record]

    @cached_property
    def by_place(self) -> dict[tuple[Cell, str, int], Record]:
        return {
            place: r
            for place, r in rule.values(self.design, self.records).items()
            if r is not None
        }

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of which every cell has a run on every base."""
        everywhere = [
            (cell, base) for cell in self.design.cells() for base in self.design.bases
        ]
        return [
            k
            for k in self.design.main["seeds"]
            if all((*place, k) in self.by_place for place in everywhere)
        ]

    def per_seed(self, cell: Cell, number: Number) -> np.ndarray:
        """The mean over the bases, for each seed."""
        runs = self.by_place
        return np.array(
            [
                np.mean([number(runs[cell, base, k]) for base in self.design.bases])
                for k in self.seeds
            ]
        )

    def on_base(self, base: str, cell: Cell, number: Number) -> np.ndarray:
        """[seeds]: of the runs from one base."""
        runs = self.by_place
        return np.array([number(runs[cell, base, k]) for k in self.seeds])

    def mean(self, cell: Cell, number: Number) -> float:
        return float(self.per_seed(cell, number).mean())

    def difference(self, one: Cell, other: Cell, number: Number) -> Effect:
        return effect(self.per_seed(one, number) - self.per_seed(other, number))

    def since_the_base(self, cell: Cell, metric: str) -> Effect:
        """How far training has changed a metric, at top-p 0.7."""
        return effect(
            self.per_seed(cell, at_end(metric)) - self.per_seed(cell, at_start(metric))
        )

    def decoding(self, cell: Cell, metric: str) -> Effect:
        """A metric of the trained policy at T = 1 minus that at top-p 0.7."""
        return effect(
            self.per_seed(cell, at_end(metric, T_1))
            - self.per_seed(cell, at_end(metric))
        )

    def exchange_rate(self, s: int) -> float:
        """How many points of Best@32 DAPO gains by T = 1 for each of Avg@32 that this
        decoding costs it.
        """
        best, avg = (self.decoding(Cell("dapo", s), m).mean for m in ("best", "avg"))
        return -best / avg

    def base(self, metric: str) -> float:
        """Of the untrained policies, at top-p 0.7: the mean over all runs."""
        return float(
            np.mean([self.mean(cell, at_start(metric)) for cell in self.design.cells()])
        )

    def paths(self, cell: Cell, metric: str) -> np.ndarray:
        """[seeds, evaluations]: a metric along training at top-p 0.7, the mean over the
        bases, in points.
        """
        runs, bases = self.by_place, self.design.bases
        return (
            np.array(
                [
                    np.mean(
                        [runs[cell, b, k]["evals"][TOP_P][metric] for b in bases],
                        axis=0,
                    )
                    for k in self.seeds
                ]
            )
            * 100
        )

    def at_equal_average(self, s: int) -> tuple[float, float, float]:
        """UP-DAPO's Best@32 at the end minus DAPO's at the moment of training at which
        it had the same Avg@32.

        DAPO's path is the mean over seeds, with straight lines between evaluations. The
        interval: percentiles of a bootstrap over seeds.
        """
        up, dapo = Cell("up_dapo", s), Cell("dapo", s)
        ends = {metric: self.per_seed(up, at_end(metric)) for metric in ("avg", "best")}
        path = {metric: self.paths(dapo, metric) for metric in ("avg", "best")}

        def gain(rows: np.ndarray | slice) -> float:
            avg, best = path["avg"][rows].mean(0), path["best"][rows].mean(0)
            order = np.argsort(avg)
            return float(
                ends["best"][rows].mean()
                - np.interp(ends["avg"][rows].mean(), avg[order], best[order])
            )

        rng = np.random.default_rng(0)
        drawn = [
            gain(rng.integers(len(self.seeds), size=len(self.seeds)))
            for _ in range(DRAWS)
        ]
        low, high = np.percentile(drawn, [2.5, 97.5])
        return gain(slice(None)), float(low), float(high)

    def entropy_and_best(self) -> tuple[float, int]:
        """The correlation over cells of the final entropy and Best@32 (means over bases
        and seeds), and the cells.
        """
        cells = self.design.cells()
        entropy = [self.mean(c, lambda r: rule.last_fifth(r, "entropy")) for c in cells]
        best = [self.mean(c, at_end("best")) for c in cells]
        return float(np.corrcoef(entropy, best)[0, 1]), len(cells)


def load() -> Runs:
    """The committed records.

    Raises:
        InputError: no seed has a run of every method, staleness and base.
    """
    runs = Runs(design.load(), results.load(design.RESULTS))
    if not runs.seeds:
        raise InputError(
            "no seed of the experiment on stale data is finished: python -m repro.mini.stale --list."
        )
    return runs


# ---- the page ------------------------------------------------------------------------
def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [list(head), ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def page(runs: Runs) -> str:
    levels, oldest = sorted(runs.design.staleness), max(runs.design.staleness)
    n = len(runs.seeds)
    parts = [
        "# Stale data: what the records show and nobody registered\n",
        "Written by `python -m repro.mini.stale.unregistered`. Rule and measures of [the registered report](report.md) "
        "were fixed before the runs; those of this page were chosen after them. An effect is the mean over both bases, "
        f"paired by seed ({n} seeds), in points of 100, with a plain 95 % interval: no correction for many "
        "comparisons, and no verdict. Top-p 0.7 is the registered decoding. T = 1 is sampling without top-p, "
        "and is measured at the end of a run only.\n",
        "![Training paths in the plane of Avg@32 and Best@32](paths.svg)\n",
        "*From the base (star) through every 50th step to step 400 (large dot), at top-p 0.7; means over bases and "
        "seeds. Training raises Avg@32. Best@32 ends below the highest point of each path; the two bases differ, see "
        "below.*\n",
        "## Both decodings, with Maj@32\n",
        table(
            [
                "difference",
                "s",
                "decoding",
                *METRICS.values(),
                "seeds above 0: Best, Avg, Maj",
            ],
            [
                _difference_row(runs, pair, s, where)
                for pair in PAIRS
                for s in levels
                for where in DECODINGS
            ],
        ),
        "## Where each method ends\n",
        "In %. The base was not evaluated at T = 1.\n",
        table(
            [
                "policy",
                "s",
                "lp_old",
                *(f"{m}, {d}" for d in DECODINGS.values() for m in METRICS.values()),
            ],
            [
                [
                    "the base",
                    "",
                    "",
                    *(f"{runs.base(m):.1f}" for m in METRICS),
                    "",
                    "",
                    "",
                ],
                *(_end_row(runs, cell) for cell in runs.design.cells()),
            ],
        ),
        _choice(runs),
        "## The decoding against the method\n",
        "The same policy at T = 1 minus at top-p 0.7: the decoding changes Best@32 and Avg@32 more than the method "
        "does.\n",
        table(
            ["policy", "s", "Best@32", "Avg@32"],
            [
                [
                    NAMES[arm],
                    s,
                    runs.decoding(Cell(arm, s), "best"),
                    runs.decoding(Cell(arm, s), "avg"),
                ]
                for s in levels
                for arm in ("dapo", "up_dapo")
            ],
        ),
        "## Against the base\n",
        "Best@32 and Avg@32 at the end minus those of the base, at top-p 0.7.\n",
        table(
            ["policy", "s", "Best@32", "Avg@32"],
            [
                [
                    NAMES[arm],
                    s,
                    runs.since_the_base(Cell(arm, s), "best"),
                    runs.since_the_base(Cell(arm, s), "avg"),
                ]
                for s in levels
                for arm in ("dapo", "up_dapo")
            ],
        ),
        "## Each base apart\n",
        _bases_differ(runs),
        table(["base", "policy", "s", "begins", "ends", "change"], _base_rows(runs)),
        "UP-DAPO minus DAPO, Best@32 at the end, top-p 0.7:\n",
        table(
            ["s", *runs.design.bases],
            [
                [s, *(_on_base(runs, base, s) for base in runs.design.bases)]
                for s in levels
            ],
        ),
        "## Both measures in one number\n",
        _worth(runs),
        table(["s", *DECODINGS.values()], [_worth_row(runs, s) for s in levels]),
        "## Where lp_old is recomputed\n",
        _recomputed(runs),
        table(
            ["policy", *METRICS.values()],
            [
                [
                    NAMES[arm],
                    *(
                        runs.difference(
                            Cell(arm, oldest, "recomputed"),
                            Cell(arm, oldest),
                            at_end(m),
                        )
                        for m in METRICS
                    ),
                ]
                for arm in runs.design.recomputed["arms"]
            ],
        ),
        "## Peaks in place of ends\n",
        "UP-DAPO minus DAPO: the highest of a run's evaluations at top-p 0.7, the base's own included.\n",
        table(
            ["s", *METRICS.values()],
            [
                [
                    s,
                    *(
                        runs.difference(Cell("up_dapo", s), Cell("dapo", s), at_peak(m))
                        for m in METRICS
                    ),
                ]
                for s in levels
            ],
        ),
        "## Is it early stopping?\n",
        "Late in training Best@32 falls while Avg@32 rises, so a run that has learned less has more Best@32. UP-DAPO's "
        "Best@32 at the end minus DAPO's at the moment of training at which DAPO had the same Avg@32 (straight lines "
        "between evaluations; bootstrap over seeds):\n",
        table(["s", "Best@32"], [[s, _equal_average(runs, s)] for s in levels if s]),
        "## Entropy\n",
        _entropy(runs),
        "## The pilot\n",
        _pilot(),
    ]
    return "\n".join(parts)


def _difference_row(
    runs: Runs, pair: tuple[str, str], s: int, where: str
) -> list[object]:
    one, other = pair
    found = [
        runs.difference(Cell(one, s), Cell(other, s), at_end(m, where)) for m in METRICS
    ]
    above = ", ".join(str(e.above) for e in found)
    return [f"{NAMES[one]} − {NAMES[other]}", s, DECODINGS[where], *found, above]


def _end_row(runs: Runs, cell: Cell) -> list[object]:
    ends = (
        f"{runs.mean(cell, at_end(m, where)):.1f}"
        for where in DECODINGS
        for m in METRICS
    )
    return [NAMES[cell.arm], cell.staleness, cell.old, *ends]


def _on_base(runs: Runs, base: str, s: int) -> Effect:
    """UP-DAPO minus DAPO on one base: Best@32 at the end, top-p 0.7."""
    up, dapo = (
        runs.on_base(base, Cell(arm, s), at_end("best")) for arm in ("up_dapo", "dapo")
    )
    return effect(up - dapo)


def _bases_differ(runs: Runs) -> str:
    begin = {
        base: runs.on_base(base, Cell("dapo", 16), at_start("best")).mean()
        for base in runs.design.bases
    }
    said = " and ".join(f"{value:.1f} % ({base})" for base, value in begin.items())
    return (
        f"The two bases begin at {said} of Best@32, and training brings them nearer to each other. "
        "A mean over both hides that. Best@32 in %, at top-p 0.7.\n"
    )


def _base_rows(runs: Runs) -> list[list[object]]:
    rows: list[list[object]] = []
    for base in runs.design.bases:
        for s in sorted(runs.design.staleness):
            for arm in ("dapo", "up_dapo"):
                start, end = (
                    runs.on_base(base, Cell(arm, s), number)
                    for number in (at_start("best"), at_end("best"))
                )
                ends = [f"{start.mean():.1f}", f"{end.mean():.1f}"]
                rows.append([base, NAMES[arm], s, *ends, effect(end - start)])
    return rows


def _worth(runs: Runs) -> str:
    s = max(runs.design.staleness)
    return (
        f"From top-p 0.7 to T = 1 DAPO itself gains {runs.exchange_rate(s):.1f} points of Best@32 for each point of "
        f"Avg@32 that it loses (s = {s}). UP-DAPO minus DAPO in Best@32 plus that many times Avg@32: what is left "
        "of the gain where DAPO may change its decoding. It counts on a straight line between the two decodings.\n"
    )


def worth(runs: Runs, s: int, where: str) -> Effect:
    """UP-DAPO minus DAPO in Best@32 + rate · Avg@32, at DAPO's own exchange rate."""
    rate = runs.exchange_rate(max(runs.design.staleness))

    def number(r: Record) -> float:
        return at_end("best", where)(r) + rate * at_end("avg", where)(r)

    return runs.difference(Cell("up_dapo", s), Cell("dapo", s), number)


def _worth_row(runs: Runs, s: int) -> list[object]:
    return [s, *(worth(runs, s, where) for where in DECODINGS)]


def _rates(runs: Runs, s: int, old: str) -> str:
    """The learning rates of UP-DAPO and DAPO."""
    cells = [Cell(arm, s, old) for arm in runs.design.recomputed["arms"]]
    return " and ".join(
        sorted({f"{runs.design.rate(cell, runs.records):g}" for cell in cells})
    )


def _recomputed(runs: Runs) -> str:
    s = max(runs.design.staleness)
    own = {old: _rates(runs, s, old) for old in ("recomputed", "sampler")}
    return (
        f"At s = {s}, lp_old recomputed minus lp_old of the sampler, top-p 0.7. Each is trained at its own learning "
        f"rate: {own['recomputed']} where lp_old is recomputed, {own['sampler']} where it is the sampler's. Both "
        "methods answer worse on average where it is recomputed.\n"
    )


def _choice(runs: Runs) -> str:
    """How the rates were chosen, and what the seeds have in common."""
    asked = {r["settings"]["eval_problems"] for r in runs.by_place.values()}
    levels = sorted(runs.design.staleness)
    rates = "; ".join(f"s = {s}: {_rates(runs, s, 'sampler')}" for s in levels)
    return (
        "A rate was chosen by the training reward, which is sampled at T = 1 and so favors Avg@32; none was chosen "
        f"for Best@32. UP-DAPO and DAPO have the same rates ({rates}). All seeds answer the same "
        f"{' or '.join(map(str, sorted(asked)))} test problems.\n"
    )


def _equal_average(runs: Runs, s: int) -> str:
    mean, low, high = runs.at_equal_average(s)
    return f"{signed(mean)} [{signed(low)}, {signed(high)}]"


def _entropy(runs: Runs) -> str:
    r, cells = runs.entropy_and_best()
    return (
        f"Over the {cells} cells (method, staleness, source of lp_old) the mean entropy of the last fifth of training "
        f"and Best@32 at the end have the correlation {r:.3f}. No run of this experiment compares UP with another way "
        "to keep as much entropy.\n"
    )


def _pilot() -> str:
    pilot = results.read_lines(design.HERE / "pilot.jsonl")
    made = Counter((r["settings"]["objective"], r["settings"]["base"]) for r in pilot)
    listed = ", ".join(
        f"{NAMES[objective]} on {base}: {n}"
        for (objective, base), n in sorted(made.items())
    )
    stale = {r["settings"]["staleness"] for r in pilot}
    return (
        f"Before the registration {len(pilot)} pilot runs of both methods were made at s = "
        f"{', '.join(map(str, sorted(stale)))} ({listed}), where power.md speaks of 2 seeds a base. The registered "
        "tests are two-sided, and no pilot run is in them.\n"
    )


# ---- the figure ----------------------------------------------------------------------
def paths_figure(runs: Runs) -> Figure:
    """Training paths: Avg@32 against Best@32, one line per method and staleness, from
    the base.
    """
    styles = {0: ":", 4: "--", 16: "-"}
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(6.4, 4), layout="constrained")
        ax = fig.add_subplot()
        for color, arm in zip(PALETTE, ("dapo", "up_dapo"), strict=False):
            for s in sorted(runs.design.staleness):
                avg, best = (
                    runs.paths(Cell(arm, s), m).mean(0) for m in ("avg", "best")
                )
                age = "fresh data" if s == 0 else f"{s} rollouts stale"
                ax.plot(
                    avg,
                    best,
                    styles[s],
                    marker="o",
                    ms=2.5,
                    color=color,
                    label=f"{NAMES[arm]}, {age}",
                )
                ax.plot(avg[-1:], best[-1:], "o", ms=7, color=color)
        ax.plot(
            [runs.base("avg")],
            [runs.base("best")],
            "*",
            ms=14,
            color="#444444",
            label="the base",
        )
        ax.set(
            xlabel="Avg@32: solved on average, %",
            ylabel="Best@32: solved at least once in 32 tries, %",
        )
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8, loc="lower left")
    return fig


def write(runs: Runs, folder: Path) -> None:
    save(paths_figure(runs), folder / "paths.svg")
    files.write_atomically(folder / "unregistered.md", page(runs).encode())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m repro.mini.stale.unregistered",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=design.RESULTS,
        help="folder of the page and its figure",
    )
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        write(load(), args.out)
    except (InputError, OSError) as error:
        print(f"unregistered: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.out / 'unregistered.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
