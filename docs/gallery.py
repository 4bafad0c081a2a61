# SPDX-License-Identifier: Apache-2.0
"""The gallery of docs/howto/find-your-picture.md: what a fault of the sampler looks
like.

    python -m docs.gallery [FOLDER]

draws a picture for each entry of gallery.toml into FOLDER, by default
docs/howto/pictures, and writes gallery.json beside this file: what `upref replay` says
of the same tokens. The runs come from the simulator of the tests, whose sampler and
trainer are tiny models. `python -m docs.make` then writes the page. Look at what you
have drawn.
"""

import sys
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from docs import record
from figures.make import save
from tests.replay.simulator import FAULTS, HELD_OUT, World, run_of_steps
from upref.replay.batch import make_batch
from upref.replay.findings import ReplayFinding
from upref.replay.gap import gap
from upref.replay.series import StepGap, measure_step, series
from upref.weights.plots import DOWN, GREY, STYLE, UP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURES = HERE / "howto" / "pictures"
RECORD = HERE / "gallery.json"
WORLD = World("qwen3", 700, responses=48, length=32, entropy=1.2)
RUN = World("qwen3", 704, responses=64, length=24, entropy=1.2)
STEPS = 10  # of that run
OVER_STEPS = "never_delivered"  # the entry whose picture needs several steps
POINTS = 1000  # of a picture
SIZE = 2.4  # inches
SHARP = 160  # pixels per inch of the points


@dataclass(frozen=True)
class Entry:
    """A picture and what the page says of it.

    Args:
        fault: name of the simulator's fault.
        title: the shape, in a word or two.
        shape: what one looks at.
        meaning: what makes it.
        cost: what it cost, with the thread; "" where we know of none.
        change: the setting to change.
    """

    fault: str
    title: str
    shape: str
    meaning: str
    change: str
    cost: str = ""

    @property
    def file(self) -> str:
        """Name of its picture."""
        return f"{self.fault.replace('_', '-')}.svg"


@cache
def entries() -> tuple[Entry, ...]:
    """Return the entries of gallery.toml, in their order."""
    tables = tomllib.loads((HERE / "gallery.toml").read_text(encoding="utf-8"))
    return tuple(Entry(fault=name, **fields) for name, fields in tables.items())


# ---- the pictures --------------------------------------------------------------------
def columns(fault: str) -> dict[str, torch.Tensor]:
    """Return the recorded columns of one step with this fault, from the simulator."""
    return (FAULTS | HELD_OUT)[fault](WORLD)


def runs() -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return the recorded columns of each step of two runs: "never", in which new
    weights do not reach the engine, and "late", in which they do one step later.
    """
    return {when: run_of_steps(RUN, when, STEPS) for when in ("never", "late")}


def empty(title: str) -> tuple["Figure", Any]:
    """Return a square figure with one panel, and the panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE, SIZE), layout="constrained")
    ax = figure.subplots()
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, fontsize=9, fontweight="bold")
    return figure, ax


def scatter(title: str, step: dict[str, torch.Tensor]) -> "Figure":
    """Draw probability by the sampler against probability by the trainer, a point for
    each of at most POINTS tokens, evenly chosen.

    Args:
        title: of the figure.
        step: columns mask, sampler and old (the trainer's), as logarithms.
    """
    figure, ax = empty(title)
    trained = step["mask"] & step["sampler"].isfinite()
    x = step["old"][trained].exp()
    y = step["sampler"][trained].exp()
    some = torch.linspace(0, len(x) - 1, min(len(x), POINTS)).long()
    top = max(1.0, float(y.max()))
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    ax.scatter(
        x[some], y[some], s=4, color=DOWN, alpha=0.45, linewidths=0, rasterized=True
    )
    ax.set(xlabel="by the trainer", ylabel="by the sampler")
    ax.set(xlim=(-0.03, 1.03), ylim=(-0.03 * top, 1.03 * top))
    return figure


def over_steps(title: str, runs: dict[str, list[dict[str, torch.Tensor]]]) -> "Figure":
    """Draw the gap of each step: weights that never arrive, beside weights one step
    late.
    """
    figure, ax = empty(title)
    for when, color, words in (
        ("never", UP, "never delivered"),
        ("late", DOWN, "one step late"),
    ):
        sizes = [gap_of(step, n).size for n, step in enumerate(runs[when])]
        ax.plot(
            range(len(sizes)), sizes, color=color, marker="o", markersize=3, label=words
        )
    ax.set(xlabel="step", ylabel="gap, nats", xticks=range(0, STEPS, 3))
    ax.legend(fontsize=7, frameon=False)
    return figure


def gap_of(step: dict[str, torch.Tensor], number: int) -> StepGap:
    """Return what upref.replay.series keeps of a step: the gap of sampler and
    trainer.
    """
    return measure_step(make_batch(step, file="run", step=number), number)


def finding_of_step(step: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return severity, cause and text of what replay finds first in a step; severity
    "ok" if it finds nothing.
    """
    result = gap(make_batch(step, file="gallery"))
    if not result.findings:
        return {
            "severity": "ok",
            "cause": result.cause,
            "text": "no more than rounding.",
        }
    return facts_of(result.findings[0])


def finding_of_run(steps: list[dict[str, torch.Tensor]]) -> dict[str, str]:
    """Return severity, cause and text of what replay finds first over the steps of a
    run.
    """
    result = series([gap_of(step, n) for n, step in enumerate(steps)])
    return facts_of(result.findings[0])


def facts_of(finding: ReplayFinding) -> dict[str, str]:
    """Return what the page needs of a finding: severity, cause, text."""
    return {
        "severity": finding.severity,
        "cause": finding.cause,
        "text": str(finding),
    }


def main(folder: Path = PICTURES, file: Path = RECORD) -> None:
    """Draw the picture of every entry, and record what replay finds in each.

    Args:
        folder: of the pictures; it is made.
        file: of the record.
    """
    import matplotlib

    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    out = {}
    with matplotlib.rc_context(STYLE | {"savefig.dpi": SHARP}):
        for entry in entries():
            if entry.fault == OVER_STEPS:
                both_runs = runs()
                figure = over_steps(entry.title, both_runs)
                out[entry.fault] = finding_of_run(both_runs["never"])
            else:
                step = columns(entry.fault)
                figure = scatter(entry.title, step)
                out[entry.fault] = finding_of_step(step)
            save(figure, folder / entry.file)
    record.add(file, "python -m docs.gallery", out)


# ---- the page ------------------------------------------------------------------------
WORD = {"failure": "FAIL", "note": "note", "ok": "ok"}


def anchor(title: str) -> str:
    """Return the address of a heading, as GitHub and the site make it."""
    text = "".join(c for c in title.lower() if c.isalnum() or c in " -")
    return text.replace(" ", "-")


def plate() -> str:
    """Return all pictures in Markdown, each a link to its section."""
    return "\n".join(
        f"[![{entry.title}](pictures/{entry.file})](#{anchor(entry.title)})"
        for entry in entries()
    )


def sections() -> str:
    """Return a section for each picture, in Markdown."""
    said = record.rows(RECORD)
    return "\n\n".join(section(entry, said[entry.fault]) for entry in entries())


def section(entry: Entry, finding: dict[str, str]) -> str:
    """Return the section of a picture: what one looks at, what it means, what it cost,
    what to change, what replay prints.
    """
    lines = [
        f"### {entry.title}",
        "",
        f"![{entry.title}](pictures/{entry.file})",
        "",
        f"{entry.shape}",
        "",
        f"* **What it means.** {entry.meaning}",
    ]
    if entry.cost:
        lines.append(f"* **What it cost.** {entry.cost}")
    lines.append(f"* **What to change.** {entry.change}")
    word = WORD[finding["severity"]]
    lines.append(f"* **`upref replay`:** `{word}` {finding['text']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
