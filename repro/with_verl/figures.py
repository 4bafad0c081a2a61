# SPDX-License-Identifier: Apache-2.0
"""The paper's Figures 2 to 8 of what runs have logged, one line a run and the mean of
several seeds.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from repro.with_verl.logged import ENTROPY, KL, NORM, SCORE, Kept, named, validation
from upref.files import write_atomically


@dataclass
class Panel:
    title: str
    wanted: Callable[[str], bool]
    log: bool = False
    percent: bool = False


ACCURACY = Panel("accuracy (avg)", validation("mean"), percent=True)
FIGURES = {  # number -> (of which scale, the paper's caption in short, panels)
    2: (
        "paper_dapo",
        "validation while training",
        [ACCURACY, Panel("majority", validation("maj"), percent=True)],
    ),
    3: (
        "paper_dapo",
        "exploration",
        [
            Panel("entropy", named(ENTROPY)),
            Panel("best", validation("best"), percent=True),
        ],
    ),
    4: (
        "paper_dapo",
        "stability",
        [Panel("gradient norm", named(NORM)), Panel("KL to the base", named(KL))],
    ),
    5: (
        "paper_dapo",
        "stability of the ablations",
        [
            Panel("gradient norm", named(NORM), True),
            Panel("KL to the base", named(KL), True),
        ],
    ),
    6: (
        "paper_math",
        "the family of GRPO",
        [Panel("entropy", named(ENTROPY)), Panel("KL to the base", named(KL), True)],
    ),
    7: (
        "paper_gspo",
        "validation and KL",
        [ACCURACY, Panel("KL to the base", named(KL))],
    ),
    8: (
        "paper_geo3k",
        "validation and KL, Geometry3K",
        [ACCURACY, Panel("KL to the base", named(KL))],
    ),
}
OURS = (
    "score",
    "reward while training",
    [
        Panel("score", named(SCORE)),
        Panel("alive gradients", named("actor/upref/alive")),
    ],
)


def figures(runs: list[Kept], out: Path) -> list[str]:
    """Each of the paper's figures of which the runs have logged something."""
    parts = ["## Figures"]
    wanted = [(f"Figure {n}", *FIGURES[n]) for n in FIGURES] + [("Ours", *OURS)]
    scales = {r.scale for r in runs}
    skipped: list[str] = []
    same: dict[tuple[str, ...], str] = {}
    for name, scale, caption, panels in wanted:
        mine = [r for r in runs if r.scale == scale] if scale in scales else runs
        if (
            scales & {s for s, *_ in FIGURES.values()}
            and scale.startswith("paper_")
            and scale not in scales
        ):
            continue  # another experiment of the paper
        key = tuple(p.title for p in panels)
        if not any(r.series(p.wanted)[0] for r in mine for p in panels):
            skipped.append(
                f"{name} ({caption}): none of {' and '.join(key)} was logged"
            )
            continue
        if key in same and not any(p.log for p in panels):
            parts.append(
                f"{name} of the paper ({caption}) has the panels of {same[key]} above."
            )
            continue
        same.setdefault(key, name)
        file = f"{name.lower().replace(' ', '-')}.svg"
        draw(name, caption, panels, mine, out / file)
        absent = [
            p.title for p in panels if not any(r.series(p.wanted)[0] for r in mine)
        ]
        note = f" Not logged: {', '.join(absent)}." if absent else ""
        if name == "Ours":
            parts.append(f"![{caption}]({file})\n\nNot in the paper: {caption}.")
        else:
            words = f"What {name} of the paper shows, {caption}, of these runs.{note}"
            parts.append(f"![{name}: {caption}]({file})\n\n{words}")
    if skipped:
        parts.append("Not drawn: " + "; ".join(skipped) + ".")
    return parts


def draw(
    name: str, caption: str, panels: list[Panel], runs: list[Kept], path: Path
) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "upref"
    groups: dict[str, list[Kept]] = {}
    for r in runs:
        groups.setdefault(r.objective, []).append(r)
    fig, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.2), squeeze=False
    )
    for ax, panel in zip(axes[0], panels, strict=True):
        for i, (objective, group) in enumerate(groups.items()):
            lines = [r.series(panel.wanted) for r in group]
            lines = [line for line in lines if line[0]]
            scale = 100 if panel.percent else 1
            for x, y in lines:
                alone = len(lines) == 1
                ax.plot(
                    x,
                    [scale * v for v in y],
                    color=f"C{i}",
                    lw=1.6 if alone else 0.8,
                    alpha=1 if alone else 0.5,
                    marker="." if len(x) < 30 else None,
                    label=objective if alone else None,
                )
            if len(lines) > 1:  # seeds: their mean where all have logged
                at = sorted(set.intersection(*(set(x) for x, _ in lines)))
                mid = [
                    scale * mean(dict(zip(x, y, strict=True))[s] for x, y in lines)
                    for s in at
                ]
                ax.plot(
                    at,
                    mid,
                    color=f"C{i}",
                    lw=2,
                    label=f"{objective}, mean of {len(lines)}",
                )
        drawn = [v for line in ax.lines for v in line.get_ydata()]
        if panel.log and drawn and min(drawn) > 0:
            ax.set_yscale("log")
        ax.set_title(panel.title + (" (%)" if panel.percent else ""), fontsize=10)
        ax.set_xlabel("step", fontsize=9)
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8, frameon=False)
        else:
            ax.text(
                0.5,
                0.5,
                "not logged",
                transform=ax.transAxes,
                ha="center",
                color="gray",
            )
    fig.suptitle(
        f"as {name} of the paper: {caption}" if name != "Ours" else caption, fontsize=11
    )
    fig.tight_layout()
    picture = io.BytesIO()
    fig.savefig(picture, format=path.suffix[1:], metadata={"Date": None})
    write_atomically(path, picture.getvalue())
    plt.close(fig)
