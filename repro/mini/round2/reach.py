# SPDX-License-Identifier: Apache-2.0
"""UP on other objectives: what it does to each, and whether it does less where the
objective itself clips less.
"""

from typing import NamedTuple

from repro.mini.round2 import rule
from repro.mini.round2.rule import Found
from repro.mini.round2.tables import show
from repro.mini.study import plan
from repro.mini.study.plan import Contrast
from repro.mini.study.results import Record
from upref.weights.plots import PALETTE, STYLE

EFFECTS = {"entropy, nats": ("entropy", "mean"), "Avg@32, points": ("avg", "last")}


class Base(NamedTuple):
    name: str
    dead: Found  # its share of positive tokens without gradient
    gain: Found  # of its own reward in training
    effects: list[Found]  # up(x) minus x, as in EFFECTS
    whole: bool  # all seeds of both are there


def bases(records: dict[str, Record]) -> list[Base]:
    e = plan.load("universality")
    known: rule.Runs = {(arm, seed): records.get(s.key) for arm, seed, s in e.runs()}
    of = lambda arms, metric, at: rule.measure(
        Contrast(arms, metric, at, more_than=0.0), known, e.seeds
    )
    found = []
    for b in (arm for arm in e.arms if f"up_{arm}" in e.arms):
        effects = [of((f"up_{b}", b), *m) for m in EFFECTS.values()]
        own = of((b,), "clip_pos_high", "mean"), of((b,), "reward", "gain")
        found.append(Base(b, *own, effects, effects[0].n == len(e.seeds)))
    return found


def section(records: dict[str, Record]) -> str:
    every = bases(records)
    there = [b for b in every if b.effects[0].n]
    if not there:
        return ""
    rows = ["## UP on other objectives\n"]
    rows += [
        "| base | positive tokens it clips, % | its gain in reward | entropy, up − base | Avg@32, up − base | seeds |",
        "|---" * 6 + "|",
    ]
    for b in there:
        numbers = [f"{100 * b.dead.mean:.1f}", *map(show, [b.gain, *b.effects])]
        rows.append(f"| {b.name} | {' | '.join(numbers)} | {b.effects[0].n} |")
    others = [b for b in every if b.name != "dapo"]
    if not all(b.whole for b in others):
        rows.append("\nThe rank correlation is computed when all seeds are there.")
        return "\n".join(rows) + "\n"
    for i, name in enumerate(EFFECTS):
        x, y = [b.dead.mean for b in others], [b.effects[i].mean for b in others]
        if len(set(x)) == 1 or len(set(y)) == 1:
            rows.append(
                f"\nClipped share and UP's effect on {name}: no ranks, all are equal."
            )
            continue
        rho, p = rule.ranks(x, y)
        rows.append(
            f"\nRanks of the clipped share and of UP's effect on {name}: ρ = {rho:+.2f}, p = {p:.2g}."
        )
    rows += [f"\n{line.removeprefix('* ')}" for line in sentence(every)]
    return "\n".join(rows) + "\n"


def sentence(every: list[Base]) -> list[str]:
    """What the two effects have to do with one another: seen when all was there, and
    not registered.
    """
    others = [b for b in every if b.name != "dapo"]
    H, avg = ([b.effects[i].mean for b in others] for i in range(2))
    if not all(b.whole for b in others) or len(set(H)) == 1 or len(set(avg)) == 1:
        return []
    flat = [f"{b.name} {show(b.gain)}" for b in others if b.gain.low <= 0 < b.gain.mean]
    hardly = (
        f" Not shown to learn by itself, though its gate is open: {', '.join(flat)} points."
        if flat
        else ""
    )
    gain = rule.ranks([b.gain.mean for b in others], avg)[0]
    apart = sum(h * a < 0 for h, a in zip(H, avg, strict=True))
    return [
        f"* On {apart} of {len(others)} other objectives UP's effects on entropy and on Avg@32 have opposite signs: "
        f"rank correlation {rule.ranks(H, avg)[0]:+.2f} (described, not registered). "
        f"The correlation of UP's effect on Avg@32 with what the objective gains by itself is {gain:+.2f}, in part "
        f"because the objective's own end is in both.{hardly}"
    ]


def figure(records: dict[str, Record]):
    """A matplotlib Figure, every seed a dot; None before three objectives have two
    seeds each.
    """
    there = [b for b in bases(records) if b.effects[0].n > 1]
    if len(there) < 3:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11.5, 3.6), layout="constrained")
        fig.suptitle(
            "UP on other objectives: every seed, means, 95 % intervals",
            fontsize=11,
            fontweight="bold",
        )
        for i, (ax, name) in enumerate(zip(fig.subplots(1, 2), EFFECTS, strict=True)):
            # evenly, in the order of the share: several objectives clip nothing, and
            # would lie on each other
            for x, b in enumerate(sorted(there, key=lambda b: b.dead.mean)):
                f, k = b.effects[i], 100 if i else 1
                ax.plot(
                    [x] * f.n,
                    [k * v for v in f.values],
                    "o",
                    ms=3.5,
                    color=PALETTE[1],
                    alpha=0.4,
                    mew=0,
                )
                ax.plot([x - 0.15, x + 0.15], [k * f.mean] * 2, color=PALETTE[1], lw=2)
                ax.plot([x, x], [k * f.low, k * f.high], color=PALETTE[1], lw=1)
            labels = [
                f"{b.name}\n{100 * b.dead.mean:.1f} %"
                for b in sorted(there, key=lambda b: b.dead.mean)
            ]
            ax.set_xticks(range(len(there)), labels, fontsize=7.5)
            ax.axhline(0, color="#888888", lw=0.8, zorder=0)
            ax.set_xlabel("objective, and the share of positive tokens that it clips")
            ax.set_title(f"{name}: up(x) − x", loc="left", fontsize=9)
            ax.spines[["top", "right"]].set_visible(False)
    return fig
