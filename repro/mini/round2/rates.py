# SPDX-License-Identifier: Apache-2.0
"""The learning rate of each method, by the rule of family_rates.toml:
`python -m repro.mini.round2.rates`.
"""

import json
import sys

import numpy as np

from repro.mini import files
from repro.mini.study import plan, results
from repro.mini.study.plan import Contrast
from upref.weights.plots import PALETTE, STYLE


def ends(records: dict[str, results.Record]) -> dict[str, dict[float, list[float]]]:
    """Method -> rate -> where the training reward ends, of each seed that finished; 0
    if it stopped before.
    """
    e = plan.load("family_rates")
    found: dict[str, dict[float, list[float]]] = {}
    for arm, settings in e.arms.items():
        reward = Contrast((arm,), "reward", "last", more_than=0)
        there = [r for seed in e.seeds if (r := records.get(e.run(arm, seed).key))]
        end = [
            results.value(r, reward) if r["status"] == "done" else 0.0 for r in there
        ]
        found.setdefault(arm.rpartition("_")[0], {})[settings["lr"]] = end
    return found


def choose(records: dict[str, results.Record]) -> dict[str, float]:
    """Method -> the rate whose training reward ends highest, the mean over the seeds;
    {} while runs are missing.
    """
    found, seeds = ends(records), len(plan.load("family_rates").seeds)
    if any(len(end) < seeds for rates in found.values() for end in rates.values()):
        return {}
    return {
        method: max(rates, key=lambda rate: float(np.mean(rates[rate])))
        for method, rates in found.items()
    }


def section(records: dict[str, results.Record]) -> str:
    """What was chosen, in words."""
    found, chosen = ends(records), choose(records)
    if not chosen:
        return ""
    by_rate: dict[float, list[str]] = {}
    for method, rate in chosen.items():
        by_rate.setdefault(rate, []).append(method)
    said = "; ".join(
        f"{rate:g} for {', '.join(by_rate[rate])}" for rate in sorted(by_rate)
    )
    tied = [
        m
        for m, rates in found.items()
        if len({float(np.mean(x)) for x in rates.values()}) == 1
    ]
    equal = (
        f" Equal at every rate, so that the first is taken: {', '.join(tied)}."
        if tied
        else ""
    )
    lowest = sum(rate == min(found[m]) and m not in tied for m, rate in chosen.items())
    edge = (
        f" The lowest rate was the best of {lowest} of {len(chosen)}: a lower one may be better."
        if lowest
        else ""
    )
    return f"Chosen: {said}.{equal}{edge}\n"


def figure(records: dict[str, results.Record]):
    """A matplotlib Figure, every seed a dot, what was chosen ringed; None while there
    is no run.
    """
    found, chosen = ends(records), choose(records)
    if not any(end for rates in found.values() for end in rates.values()):
        return None
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        fig = Figure(figsize=(11.5, 3.8), layout="constrained")
        fig.suptitle(
            "Training reward at the end, three learning rates a method",
            fontsize=11,
            fontweight="bold",
        )
        ax = fig.subplots()
        for x, (method, rates) in enumerate(found.items()):
            for i, (rate, end) in enumerate(sorted(rates.items())):
                at, label = (
                    [x + 0.22 * (i - 1)] * len(end),
                    f"{rate:g}" if x == 0 else "",
                )
                ax.plot(
                    at,
                    end,
                    "o",
                    ms=4.5,
                    color=PALETTE[i],
                    alpha=0.7,
                    mew=0,
                    label=label,
                )
                if chosen.get(method) == rate:
                    ax.plot(at, end, "o", ms=8, mfc="none", mec="#000000", mew=0.8)
        ax.set_xticks(
            range(len(found)), list(found), rotation=30, ha="right", fontsize=8
        )
        ax.spines[["top", "right"]].set_visible(False)
        fig.legend(
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
            title="learning rate (ringed: taken)",
        )
    return fig


def main() -> int:
    folder = results.folder_of(2)
    rates = choose(results.load(folder))
    if not rates:
        print(
            "rates: runs of family_rates are missing: python -m repro.mini.study.suite --only family_rates",
            file=sys.stderr,
        )
        return 2
    files.write_atomically(
        folder / "rates.json", (json.dumps(rates, indent=1) + "\n").encode()
    )
    print(rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
