# SPDX-License-Identifier: Apache-2.0
"""What the finished runs say, on one page: report.md and its figures. It runs nothing."""

from dataclasses import replace
from pathlib import Path

from figures.make import save
from repro.mini import files
from repro.mini.stale import rule
from repro.mini.stale.design import HERE, Design
from repro.mini.stale.rule import Cell, Effect
from repro.mini.study import curves, registration, results
from repro.mini.study.results import Record
from upref.weights.plots import PALETTE, STYLE

PRIMARY = ("dapo", "neighbours")
UNITS = {
    "avg": "points",
    "best": "points",
    "entropy": "nats",
    "malformed": "points",
    "survival": "steps",
}
TITLES = {
    "avg": "Avg@32",
    "best": "Best@32",
    "entropy": "entropy",
    "malformed": "malformed answers",
    "survival": "survival",
}
FAMILIES = {
    "dapo": "Right answers at the end: UP-DAPO minus DAPO",
    "neighbours": "Right answers at the end: UP-DAPO minus its neighbors",
    "entropy": "Entropy",
    "malformed": "Malformed answers",
    "survival": "Survival: the step at which the reward falls below half of its peak",
    "slope": "Slope in the staleness, per 16 rollouts",
    "passes": "Pass@k at the greatest staleness",
    "recomputed": "Where lp_old is recomputed",
}
# the same sentences are in docs/findings.md and docs/glossary.md
BRACKETS = (
    "Brackets hold an interval. That of a registered effect is widened for the number of tests in its family: the "
    "chance of any wrong verdict among them is at most 5 %. One with *95 %* or *not registered* beside it is a plain "
    "95 % interval."
)
LIMITS = """
## Limits

Tiny transformers (112k weights), one toy task, two bases that share their architecture and were trained on
demonstrations of the same kind: effects are of these two bases, and nothing is said of bases in general. A rate is
chosen on a grid of half decades by runs of half the length, for both bases together. Where lp_old is recomputed, no
weight corrects for the difference between sampler and policy. The sampler's numbers are the trainer's: there is no
mismatch between engines or precisions."""


def progress(d: Design, records: dict[str, Record]) -> str:
    """What is finished, what comes next, and how long it takes."""
    todo, done = (
        d.todo(records),
        sum(run.key in records for run in d.reachable(records)),
    )
    finished = f"{done} of {d.expected(records)} runs are finished."
    if not todo:
        return finished
    searching = todo[0].settings.steps == d.search["settings"]["steps"]
    searches = sum(
        run.settings.steps == d.search["settings"]["steps"]
        for c in d.cells()
        for run in d.next_search(c, records)
    )
    mains = d.expected(records) - done - searches
    example = d.run(
        "main", d.cells()[0], d.bases[0], d.rates[0], d.main["seeds"][0]
    ).settings
    hours = results.forecast([run.settings for run in todo], records) / 3600
    whole = results.forecast(
        [replace(example, steps=d.search["settings"]["steps"])] * searches
        + [example] * mains,
        records,
    )
    stage = "of the search for rates" if searching else "of the experiment proper"
    return (
        f"{finished} Next are {len(todo)} runs {stage}, about {hours:.1f} hours of one core;\n"
        f"all that is left takes about {whole / 3600:.0f} hours: `python -m repro.mini.stale`."
    )


def write(d: Design, records: dict[str, Record], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = rule.effects(d, records)
    parts = [f"# {d.question}\n", head(d, records), "## The answer\n", answer(d, found)]
    if any(e.n for e in found):
        save(effect_figure(d, found), folder / "effects.svg")
        parts.append(
            "![UP minus each other method against staleness](effects.svg)\n\n*Dots: means over both bases; bars: "
            "their intervals, once there are any. Gray: smaller than the smallest effect of interest.*\n"
        )
    if drawn := curve_figure(d, records):
        save(drawn, folder / "curves.svg")
        parts.append(
            "![Reward and entropy while training](curves.svg)\n\n*Thin lines: runs; thick lines: their means.*\n"
        )
    parts += [
        "## Every effect\n",
        tables(found),
        "## Learning rates\n",
        rates(d, records),
        LIMITS.strip(),
    ]
    files.write_atomically(folder / "report.md", ("\n".join(parts) + "\n").encode())


def head(d: Design, records: dict[str, Record]) -> str:
    commit = registration.load(HERE).get("commit", "none yet")
    hours = (
        sum(
            r["provenance"]["seconds"]["all"]
            for r in records.values()
            if r["provenance"]
        )
        / 3600
    )
    updates = d.settings["minibatches"]
    return f"""Written by `python -m repro.mini.stale --collect`. Rule, arms, rates, seeds, stopping and margins were
registered in commit `{commit}`, before any run
([rule.py](../rule.py), [design.toml](../design.toml), [power.md](../power.md)).

{progress(d, records)}

The finished runs took {hours:.2f} hours of one core.

Responses are sampled by the policy of s rollouts ago; a rollout is {updates} updates. Each method trains at its own
learning rate, which is chosen for each s on other seeds. Effects are UP-DAPO minus another method at the same s, the
mean over the bases {" and ".join(d.bases)}. {BRACKETS}
The words follow from the intervals.
"""


def answer(d: Design, found: list[Effect]) -> str:
    """In words: what is decided, what is not."""
    primary = [e for e in found if e.family in PRIMARY]
    decided: dict[str, list[str]] = {}
    for e in found:
        if e.family in (*PRIMARY, "recomputed") and known(e):
            where = ", lp_old recomputed" if e.family == "recomputed" else ""
            start = f"* {TITLES[e.metric]}{where}: UP-DAPO {said(e)} {e.other}"
            decided.setdefault(start, []).append(
                f"{shown(e)} points at s = {e.staleness}"
            )
    lines = [f"{start}: {', '.join(those)}." for start, those in decided.items()]
    left: dict[str, list[str]] = {}
    for e in primary:
        if not known(e):
            left.setdefault(e.word, []).append(
                f"{TITLES[e.metric]} against {e.other} at s = {e.staleness}"
            )
    for word, which in left.items():
        start = {
            "not finished": "Too few seeds are finished to decide",
            "undecided": "The seeds do not decide",
        }[word]
        none = word == "not finished" and len(which) == len(primary)
        first = d.stopping["first"]["seeds"]
        nothing = f"Nothing is decided yet: no comparison has the {first} seeds of its first look"
        lines.append(f"* {nothing if none else start + ': ' + '; '.join(which)}.")
    return "\n".join(lines) + "\n"


def known(e: Effect) -> bool:
    return e.word not in ("not finished", "undecided")


def said(e: Effect) -> str:
    if e.word == "no difference":
        return f"differs by less than {e.margin:g} points from"
    return f"{e.word.split()[0]} against"


def shown(e: Effect) -> str:
    return f"{rounded(e, e.mean)} [{rounded(e, e.low)}, {rounded(e, e.high)}]"


def rounded(e: Effect, x: float) -> str:
    digits = 0 if e.metric == "survival" else 3 if e.metric == "entropy" else 1
    return f"{round(x, digits) + 0.0:+.{digits}f}"


def neutral(e: Effect) -> str:
    """The rule's word, without praise where more is not better and no margin is
    registered.
    """
    if e.family not in rule.SECONDARY:
        return e.word
    words = {"gains": "higher", "loses": "lower", "undecided": "not decided"}
    return (
        "no difference in any run"
        if e.low == e.high == 0
        else words.get(e.word, e.word)
    )


def tables(found: list[Effect]) -> str:
    text = ""
    for family, title in FAMILIES.items():
        rows = [e for e in found if e.family == family and e.n]
        if not rows:
            continue
        text += (
            f"### {title}\n\n| metric | minus | s | seeds | effect, simultaneous interval | on each base | |\n"
            + "|---" * 7
            + "|\n"
        )
        for e in rows:
            unit = "points" if e.metric.startswith("pass") else UNITS[e.metric]
            interval = (
                "interval at the first look"
                if e.word == "not finished"
                else f"{shown(e)} {unit}"
            )
            bases = ", ".join(rounded(e, x) for x in e.by_base)
            s = "slope" if e.staleness is None else e.staleness
            cells = [
                TITLES.get(e.metric, e.metric),
                e.other,
                s,
                e.n,
                interval,
                bases,
                neutral(e),
            ]
            text += f"| {' | '.join(map(str, cells))} |\n"
        text += "\n"
    return (
        text
        or "No run of the experiment proper has finished on both sides of a comparison.\n"
    )


def rates(d: Design, records: dict[str, Record]) -> str:
    """What was chosen, and the scores."""
    tried = sorted(
        {
            rate
            for c in d.cells()
            for rate, x in d.scores(c, records).items()
            if x is not None
        }
        | set(d.rates)
    )
    rows = [
        "Mean training reward in the last fifth of a run, in %. These runs choose a rate for each method and are too "
        "few to compare methods.\nWhere lp_old is *sampler*, it is the log-probability under the policy that sampled; "
        "*recomputed*, under the policy at the rollout's first use.",
        "",
        "| method | s | lp_old | chosen | "
        + " | ".join(f"{r:g}" for r in tried)
        + " |",
        "|---" * (4 + len(tried)) + "|",
    ]
    for c in d.cells():
        scores, rate = d.scores(c, records), d.rate(c, records)
        cells = " | ".join(
            "" if (x := scores[r]) is None else f"{100 * x:.1f}" for r in tried
        )
        rows.append(
            f"| {c.arm} | {c.staleness} | {c.old} | {f'{rate:g}' if rate else 'not yet'} | {cells} |"
        )
    return "\n".join(rows) + "\n"


# ---- figures -------------------------------------------------------------------------
def effect_figure(d: Design, found: list[Effect]):
    """Effects against s, one panel a metric; bars are simultaneous intervals, small
    marks the single bases.
    """
    import matplotlib
    from matplotlib.figure import Figure

    levels, others = sorted(d.staleness), d.arms[1:]
    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(9, 3.4), layout="constrained")
        fig.suptitle(
            "UP-DAPO minus each other method, each at its own learning rate",
            fontsize=11,
            fontweight="bold",
        )
        for ax, metric in zip(
            fig.subplots(1, len(rule.PRIMARY)), rule.PRIMARY, strict=True
        ):
            ax.axhspan(
                -d.interest[metric], d.interest[metric], color="#EEEEEE", zorder=0
            )
            ax.axhline(0, color="#888888", lw=0.8)
            for i, other in enumerate(others):
                for e in found:
                    if (
                        e.family in PRIMARY
                        and (e.metric, e.other) == (metric, other)
                        and e.n
                        and e.staleness is not None
                    ):
                        x = levels.index(e.staleness) + 0.2 * (i - 1)
                        bar = (
                            [[e.mean - e.low], [e.high - e.mean]]
                            if e.word != "not finished"
                            else None
                        )
                        label = f"minus {other}" if e.staleness == levels[0] else None
                        ax.errorbar(
                            [x],
                            [e.mean],
                            bar,
                            fmt="o",
                            ms=5,
                            color=PALETTE[i],
                            capsize=3,
                            label=label,
                        )
                        for y, mark in zip(e.by_base, "v^", strict=True):
                            ax.plot(
                                [x + 0.06],
                                [y],
                                mark,
                                ms=4,
                                mfc="none",
                                color=PALETTE[i],
                            )
            ax.set_xticks(range(len(levels)), [str(s) for s in levels])
            ax.set(xlabel="staleness s, rollouts", title=f"{TITLES[metric]}, points")
            ax.spines[["top", "right"]].set_visible(False)
        names = ", ".join(
            f"{mark} {base}" for mark, base in zip("▽△", d.bases, strict=True)
        )
        fig.legend(
            *ax.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
            title=names,
            title_fontsize=8,
        )
    return fig


def curve_figure(d: Design, records: dict[str, Record]):
    """Mean curves over seeds and bases at the greatest staleness; None while there is
    none.
    """
    runs = d.main_runs(
        [Cell(arm, max(d.staleness)) for arm in d.arms], d.main["seeds"], records
    )
    panels = [
        {"metric": "reward", "label": "training reward"},
        {"metric": "entropy", "label": "entropy, nats"},
    ]
    found: list[curves.Series] = [{} for _ in panels]
    for (cell, _, _), s in runs.items():
        if (r := records.get(s.key)) and r["status"] == "done":
            for series, panel in zip(found, panels, strict=True):
                series.setdefault(cell.arm, []).append(curves.curve(r, panel))
    return (
        curves.draw(
            panels, found, f"{max(d.staleness)} rollouts stale, both bases", each="run"
        )
        if found[0]
        else None
    )
