# SPDX-License-Identifier: Apache-2.0
"""What runs have shown: report.md and its figure, from steps.jsonl alone.

    python -m repro.with_verl.report RUN... [--out DIR]       RUN: a folder under runs/, or one of the smoke scale's

What to look at first, the health of each run, its curves with the mean of several seeds,
and the numbers that were logged, beside what was estimated before the start. The paper's
numbers are in config/paper.toml. Exit status 2: nothing to read.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from figures.make import save
from repro import Parser
from repro.mini.experiment import curves
from repro.with_verl import health
from repro.with_verl.health import ALARMS, BLIND, BOUND, FAILURES, STEPS, number
from repro.with_verl.run import records
from upref import InputError
from upref.files import write_atomically
from upref.markdown import table

SCORE, KL, ENTROPY, NORM = (
    "critic/score/mean",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
)
PANELS = {
    SCORE: "score",
    ENTROPY: "entropy",
    KL: "KL to the base",
    NORM: "gradient norm",
    "mean@": "validation: accuracy",
    "maj@": "validation: majority",
    "best@": "validation: best",
}
NUMBERS = {
    "actor/upref/alive": "share of tokens whose gradient is not clipped",
    "actor/upref/above_high": "share of tokens above the upper bound",
    "actor/upref/mass_above_high": "share of the gradient's weight there",
    "actor/upref/ratio/max": "largest ratio",
    "actor/upref/kl_old": "KL to the old policy",
    "actor/upref/overflow": "ratios that overflow",
    "actor/upref/parity_max_abs": "parity: largest difference of the largest weight",
    "actor/upref/parity_of_bound": "parity: in units of what rounding explains",
    "actor/upref/parity_blind": "parity: tokens within rounding of a bound",
    "actor/upref/parity_alarms": "parity: alarms",
    "actor/upref/normalizer": "whole steps: gradient over the reference's",
    "actor/upref/failures": "whole steps: loss or gradient is another sum, or a multiple",
    "timing_s/step": "seconds a step",
    "perf/throughput": "tokens a second and GPU",
    "perf/total_num_tokens": "tokens a step",
    "actor/perf/max_memory_allocated_gb": "GB allocated on a GPU",
}
# what was estimated before the start
ESTIMATED = {
    "timing_s/step": "step_seconds",
    "perf/total_num_tokens": "step_tokens",
    "actor/perf/max_memory_allocated_gb": "train_gb",
}


@dataclass
class Kept:
    """A run as it lies in its folder.

    Attributes:
        folder: of the run.
        objective: its name.
        scale: its name.
        rows: {"step", "data"}, what was logged.
        saved: overrides.json, what the launcher knew.
    """

    folder: Path
    objective: str
    scale: str
    rows: list[dict[str, Any]]
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Return the objective, and the seed where one was given."""
        given = [row["override"].lstrip("+") for row in self.saved.get("overrides", [])]
        seeds = [x.partition("=")[2] for x in given if x.startswith("data.seed=")]
        return f"{self.objective} seed {seeds[-1]}" if seeds else self.objective

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric was logged as a finite number, and its
        values.

        Args:
            key: a metric of verl; one that ends in "@", as "best@", is a validation's,
                of which the mean over its sets is taken.
        """
        kept = []
        for row in self.rows:
            value = row["data"].get(key)
            if key.endswith("@"):
                value = validation(row["data"], key)
            if number(value):
                kept.append((row["step"], value))
        return [step for step, _ in kept], [value for _, value in kept]

    def largest(self, key: str) -> float:
        """Return the largest value of a metric; 0 where there is none."""
        return max(self.series(key)[1], default=0.0)


def validation(data: dict[str, Any], kind: str) -> float | None:
    """Return the mean over the validation sets of one kind of accuracy.

    Args:
        data: the metrics of a step by verl's names, such as val-core/aime24/acc/mean@32
            and val-core/aime24/acc/best@32/mean.
        kind: as "best@". Of each set the value with the most answers counts.

    Returns:
        None where the step had no validation.
    """
    most: dict[str, tuple[int, float]] = {}
    for key, value in data.items():
        name, at, rest = key.partition(f"/acc/{kind}")
        wanted = key.startswith("val-") and at and not key.endswith("/std")
        if wanted and number(value):
            answers = int(rest.partition("/")[0])
            most[name] = max(most.get(name, (-1, 0.0)), (answers, value))
    return mean(value for _, value in most.values()) if most else None


def read(folder: Path) -> Kept:
    """Read the run in a folder.

    Raises:
        InputError: nothing was logged there.
    """
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


# ---- the report ----------------------------------------------------------------------
def write(runs: list[Kept], out: Path) -> str:
    """Return the report's text as Markdown, and write its figure, curves.svg, to `out`."""
    scales = ", ".join(sorted({r.scale for r in runs}))
    parts = [
        "# " + ", ".join(dict.fromkeys(r.objective for r in runs)),
        f"Scale {scales}.",
        table_of(runs),
    ]
    if warnings := [w for r in runs for w in alarms(r)]:
        parts += ["## To look at first", "\n".join(f"* {w}" for w in warnings)]
    for r in runs:
        page = health.page(r.folder, records.training(r.rows), r.saved)
        parts.append(f"## Health of {r.label}\n\n{page}")
    parts += [draw(runs, out), numbers(runs)]
    return "\n\n".join(parts) + "\n"


def table_of(runs: list[Kept]) -> str:
    """Return a table with a row for each run: how far it is, and its mean score over
    the first and the last steps.
    """
    rows = []
    for r in runs:
        steps = records.training(r.rows)
        k = max(1, min(5, len(steps) // 3))
        scores = r.series(SCORE)[1]
        said = f"{mean(scores[:k]):.3f} -> {mean(scores[-k:]):.3f}" if scores else "-"
        total = r.saved.get("total")
        done = f"{len(steps)} of {total}" if total else len(steps)
        rows.append([r.label, r.scale, done, said, f"`{r.folder.name}`"])
    return table(["run", "scale", "steps", "score, first and last", "folder"], rows)


def alarms(r: Kept) -> list[str]:
    """Return sentences on what a reader must know before the curves: parity alarms,
    steps that differ, steps that are missing, and gradient norms that are no number.
    """
    found = []
    if r.largest(ALARMS) > 0:
        found.append(
            f"{r.label}: PARITY ALARM. The loss that trained was not the reference (up to "
            f"{r.largest(BOUND):.3g} times what rounding explains); it trained on, by "
            "parity.on_fail=warn. To see what trained, start it again with "
            "UPREF_REPLAY=FOLDER, and replay the FOLDER: docs/howto/replay.md."
        )
    if (failed := r.largest(FAILURES)) > 0:
        found.append(
            f"{r.label}: STEP ALARM. In {failed:g} of the steps that were judged, the loss or the gradient over all ranks "
            f"was not the objective's. `upref replay {r.folder}/{STEPS} --as {r.objective}` names it; give it "
            "the hyperparameters of policy_loss.upref by --hp."
        )
    if r.largest(BLIND) > 0.5:
        found.append(
            f"{r.label}: parity proves little here: up to {r.largest(BLIND):.0%} of the tokens of a micro-batch lie "
            "within the dtype's rounding of a clip bound."
        )
    trained = records.training(r.rows)
    steps = [row["step"] for row in trained]
    if steps and (gaps := sorted(set(range(steps[0], steps[-1])) - set(steps))):
        found.append(
            f"{r.label}: {len(gaps)} steps were not logged, the first is {gaps[0]}."
        )
    nan = [row["step"] for row in trained if not number(row["data"].get(NORM))]
    if nan:
        found.append(
            f"{r.label}: the gradient norm is no number in {len(nan)} steps, the first is {nan[0]}."
        )
    return found


def draw(runs: list[Kept], out: Path) -> str:
    """Draw each metric of PANELS that was logged to curves.svg, with one color for each
    objective. Return the section of the report.
    """
    panels, drawn = [], []
    for key, label in PANELS.items():
        by_objective: curves.Series = {}
        for r in runs:
            steps, values = r.series(key)
            if steps:
                curve = np.array(steps), np.array(values)
                by_objective.setdefault(r.objective, []).append(curve)
        if by_objective:
            panels.append({"metric": key, "label": label})
            drawn.append(by_objective)
    if not panels:
        return "## Curves\n\nNothing to draw was logged."
    names = " and ".join(dict.fromkeys(r.objective for r in runs))
    save(curves.draw(panels, drawn, names, each="run"), out / "curves.svg")
    return f"## Curves\n\n![{', '.join(p['label'] for p in panels)}](curves.svg)"


def numbers(runs: list[Kept]) -> str:
    """Return the section with each metric of NUMBERS that was logged: its mean, its
    largest value, and what was estimated.
    """
    rows = []
    for r in runs:
        estimate = r.saved.get("estimate", {})
        for key, words in NUMBERS.items():
            if values := r.series(key)[1]:
                was = estimate.get(ESTIMATED.get(key, ""))
                guess = "" if was is None else f"{was:,.0f}"
                cells = f"{mean(values):,.4g}", f"{max(values):,.4g}", guess
                rows.append([r.label, words, *cells])
    columns = ["run", "", "mean over steps", "largest", "estimated"]
    return f"## Numbers\n\n{table(columns, rows)}"


def main(argv: list[str] | None = None) -> int:
    """Write the report of the runs that the command line names. Return exit status 0; 2
    if there is nothing to read.
    """
    p = Parser(
        prog="report",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    p.add_argument(
        "--out", type=Path, help="where to write (report/ in the first run's folder)"
    )
    args = p.parse_args(argv)
    try:
        runs = [read(folder) for folder in args.runs]
    except InputError as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    out = args.out or args.runs[0] / "report"
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "report.md", write(runs, out))
    print(f"{out / 'report.md'}: {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
