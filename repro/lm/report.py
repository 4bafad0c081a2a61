# SPDX-License-Identifier: Apache-2.0
"""What a run of SmolLM2 shows: scores before and after with intervals, some answers, its
figure, parity with the reference, and the replay of its recorded steps.

In all functions `run` is the folder of a finished run, and `s` its settings. A line of its
evals.jsonl is an evaluation; `right` and `said` in it have for each problem its samples:
whether they are right, and what they answer.
"""

import json
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro.mini import tasks
from repro.mini.compare import save_both
from repro.mini.policy import evals
from repro.mini.tasks import NO_ANSWER
from repro.mini.train.checkpoint import checkpoints
from repro.mini.train.recorder import FOLDER
from repro.mini.train.settings import Settings
from upref import markdown, metrics
from upref.files import write_atomically
from upref.replay import read_steps, replay
from upref.weights.plots import PALETTE

METRICS = {"avg": "Avg", "maj": "Maj", "best": "Best"}
DECODINGS = {"t_1": "T = 1", "top_p_0.7": "top-p 0.7"}
SHOWN = 4  # problems whose answers are shown
CAUTION = (
    "The intervals are of these problems: another draw of problems, from the same two policies. One seed "
    "cannot tell what another run would give, and two objectives with one seed each are no comparison."
)


def write(runs: list[tuple[Settings, Path]], folder: Path) -> str:
    """Write report.md and its figure, from what the runs left; return the text.

    Args:
        runs: settings and folder of each; the figure's scores are those of the first.
        folder: where the report goes; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_both(draw(runs), folder / "training")
    text = ["# SmolLM2-135M-Instruct, trained on two-digit addition\n"]
    for s, run in runs:
        text += [
            f"## {s.objective}\n",
            table(s, run),
            answers(s, run),
            parity(run),
            replayed(s, run),
            spent(run),
        ]
    text.append(CAUTION + "\n")
    page = "\n".join(text)
    write_atomically(folder / "report.md", page)
    return page


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_step(run: Path, step: int, decoding: str) -> dict[str, Any]:
    """Return the evaluation on the test set at that step by that decoding, a key of
    DECODINGS.

    Raises:
        ValueError: there is none, or more than one.
    """
    (found,) = (
        e
        for e in _lines(run / "evals.jsonl")
        if e["step"] == step and e["set"] == "test" and e["decoding"] == decoding
    )
    return found


def per_problem(evaluation: dict[str, Any], metric: str) -> np.ndarray:
    """Return the metric of each problem, [P], from 0 to 1.

    Args:
        evaluation: of a run.
        metric: a key of METRICS.
    """
    right = np.array(evaluation["right"], dtype=bool)
    if metric == "avg":
        return right.mean(1)
    if metric == "best":
        return right.any(1).astype(float)
    said = np.array(evaluation["said"])
    rows = zip(said, right, strict=True)
    return np.array([evals.estimates(r[None], a[None])["maj"].value for a, r in rows])


def table(s: Settings, run: Path) -> str:
    """Return a table of the scores before and after, and of their difference problem by
    problem, in points of 100 with 95 % intervals over problems.
    """
    k, n = s.eval_samples, s.eval_problems
    rows = []
    for decoding, words in DECODINGS.items():
        first, last = (of_step(run, step, decoding) for step in (0, s.steps))
        for metric, name in METRICS.items():
            x, y = (per_problem(e, metric) for e in (first, last))
            before, after = (_estimate(metrics.Estimate.of(z)) for z in (x, y))
            rows.append([f"{name}@{k}, {words}", before, after, _difference(y - x)])
    head = f"{n} held-out problems, {k} answers each; points of 100 with 95 % intervals over problems."
    columns = ["", "before", "after", "after minus before"]
    return f"{head}\n\n{markdown.table(columns, rows)}\n"


def _estimate(e: metrics.Estimate) -> str:
    """Return an estimate with its interval in points: `41.2 [35.0, 47.4]`."""
    return f"{100 * e.value:.1f} [{100 * e.low:.1f}, {100 * e.high:.1f}]"


def _difference(d: np.ndarray) -> str:
    """Return the mean of differences with a normal 95 % interval, in points; the
    interval is nan for one problem.

    Args:
        d: after minus before, of each problem.
    """
    half = 1.96 * d.std(ddof=1) / sqrt(len(d)) if len(d) > 1 else float("nan")
    mean = d.mean()
    return f"{100 * mean:+.1f} [{100 * (mean - half):+.1f}, {100 * (mean + half):+.1f}]"


def answers(s: Settings, run: Path) -> str:
    """Return a table of what the first SHOWN problems were answered before and after,
    at T = 1.
    """
    task = tasks.get(s.task)
    problems = task.problems("test", s.eval_problems, seed=s.eval_seed)[:SHOWN]
    first, last = (of_step(run, step, "t_1") for step in (0, s.steps))
    rows = []
    for i, (a, b) in enumerate(problems.tolist()):
        before, after = (_counted(e["said"][i], a + b) for e in (first, last))
        rows.append([f"{a} + {b} =", before, after])
    columns = ["problem", "answers before, T = 1", "answers after, T = 1"]
    return markdown.table(columns, rows) + "\n"


def _counted(said: list[int], right: int) -> str:
    """Return answers with their counts, the most frequent first, the right one in bold:
    `**125** × 9, 115 × 4, no number × 3`.
    """
    parts = []
    for answer, count in Counter(said).most_common():
        words = "no number" if answer == NO_ANSWER else str(answer)
        words = f"**{words}**" if answer == right else words
        parts.append(f"{words} × {count}" if count > 1 else words)
    return ", ".join(parts)


def parity(run: Path) -> str:
    """Return a sentence on how far the recorded steps were from the reference; "" if
    none was recorded.
    """
    steps = [line for line in _lines(run / "steps.jsonl") if "parity_of_bound" in line]
    if not steps:
        return ""
    worst = max(line["parity_of_bound"] for line in steps)
    largest = max(line["parity_max_abs"] for line in steps)
    return (
        f"Parity: loss and gradient of every recorded optimizer step agree with the float64 reference; "
        f"the largest difference is {largest:.1e} of the largest weight, {worst:.2f} of what rounding allows.\n"
    )


def replayed(s: Settings, run: Path) -> str:
    """Return what `upref replay` prints of the recorded steps; "" if there are none."""
    folder = run / FOLDER
    if not folder.exists():
        return ""
    found = replay(read_steps([folder]), s.target(), hp=s.hyperparameters())
    return f"`upref replay` of the recorded steps:\n\n```text\n{found.text()}\n```\n"


def facts(run: Path) -> dict[str, Any]:
    """Return what done.json has: machine, versions, seconds of processor time."""
    found: dict[str, Any] = json.loads((run / "done.json").read_text())
    return found


def parts_of_time(run: Path) -> str:
    """Return the seconds of processor time of each part: `eval 40, sample 90, ...`."""
    seconds = facts(run)["seconds"]
    return ", ".join(f"{k} {v:.0f}" for k, v in seconds.items() if k != "all")


def spent(run: Path) -> str:
    """Return a sentence on the processor time, the machine, and where the model is."""
    machine = facts(run)["machine"]
    kept = checkpoints(run)
    model = str(kept[-1]) if kept else "removed"
    return (
        f"Seconds of processor time: {facts(run)['seconds']['all']:.0f} ({parts_of_time(run)}), "
        f"{machine['threads']} threads, {machine['cpu']}. Trained model: {model}\n"
    )


def draw(runs: list[tuple[Settings, Path]]) -> Figure:
    """Draw two panels: the share of right answers of each run while it trains; and the
    scores of the first run before and after, as pairs of bars with 95 % intervals.
    """
    fig = Figure(figsize=(9, 3.4), layout="constrained")
    curve, bars = fig.subplots(1, 2)
    _draw_rewards(curve, runs)
    _draw_scores(bars, *runs[0])
    return fig


def _draw_rewards(curve: Axes, runs: list[tuple[Settings, Path]]) -> None:
    """Draw the share of right answers of each run while it trains."""
    for color, (s, run) in zip(PALETTE, runs, strict=False):
        steps = _lines(run / "steps.jsonl")
        x = [line["step"] + 1 for line in steps]
        y = [100 * line["reward"] for line in steps]
        curve.plot(x, y, color=color, label=s.objective)
    curve.set_xlabel("step")
    curve.set_ylabel("right answers of the step's samples, %")
    curve.set_ylim(0, 100)
    curve.legend(frameon=False)


def _draw_scores(bars: Axes, s: Settings, run: Path) -> None:
    """Draw the scores of a run before and after, as pairs of bars with 95 %
    intervals.
    """
    labels = []
    for i, (decoding, words) in enumerate(DECODINGS.items()):
        for j, (metric, name) in enumerate(METRICS.items()):
            at = i * (len(METRICS) + 0.7) + j  # where the pair of bars is
            labels.append((at, f"{name}@{s.eval_samples}\n{words}"))
            for offset, step, color in ((-0.2, 0, "0.7"), (0.2, s.steps, PALETTE[0])):
                evaluation = of_step(run, step, decoding)
                e = metrics.Estimate.of(per_problem(evaluation, metric))
                low, high = e.value - e.low, e.high - e.value
                bars.bar(
                    at + offset,
                    100 * e.value,
                    0.38,
                    color=color,
                    yerr=[[100 * low], [100 * high]],
                    ecolor="0.3",
                )
    bars.set_xticks([at for at, _ in labels], [text for _, text in labels], fontsize=7)
    bars.set_ylim(0, 100)
    bars.set_title(
        f"{s.objective}: before (gray) and after, 95 % intervals", fontsize=9
    )
