# SPDX-License-Identifier: Apache-2.0
"""README's answer to "Does UP help?": a table and a few sentences. Every number stands in one of two reports."""

import re
import sys
import tomllib
from pathlib import Path

MINI = Path(__file__).parents[1] / "repro/mini"
REPORT, STALE = MINI / "round2/results/report.md", MINI / "stale/results/report.md"


class Report:
    def __init__(self, text: str):
        self.text = text

    def find(self, pattern: str) -> re.Match[str]:
        return re.search(pattern, self.text, re.M) or sys.exit(f"the report of round two has no {pattern}")

    def by_dose(self, claim: str) -> list[str]:
        """The verdict and the effect of a claim at each dose."""
        row = self.find(rf"^\| UP-DAPO ends with a higher {claim} than DAPO \| (.*) \|$")[1]
        return [re.sub(r"; .*", "", cell) for cell in row.split(" | ")]

    def seen(self, says: str) -> str:
        """An effect that nobody registered, with its interval."""
        return self.find(rf"^\| {re.escape(says)} \| (.*?) \|")[1]


def number(cell: str) -> str:
    found = re.search(r"[+-]\d[\d.]*", cell.rpartition("**")[2])
    assert found
    return found[0]


def ends(cell: str) -> list[float]:
    found = re.search(r"\[(.*), (.*)\]", cell)
    assert found
    return [float(x) for x in found.groups()]


def known(names: list[str]) -> str:
    """The names of objectives, as a reader is used to them."""
    return " and ".join(
        ", ".join(n.upper().replace("_", "-") for n in part) for part in (names[:-1], names[-1:]) if part
    )


def stale() -> list[str]:
    """What the experiment on stale data says of UP-DAPO and DAPO, of the looks that it has had."""
    text, _, recomputed = STALE.read_text(encoding="utf-8").partition("### Where lp_old is recomputed")
    effect = r"(\d+) \| (\d+) \| (\S+ \[.*?\]) points \|.*?\| ([^|]*?) \|$"
    rows = re.findall(r"^\| (Best|Avg)@32 \| dapo \| " + effect, text, re.M)
    least = tomllib.loads((STALE.parents[1] / "design.toml").read_text(encoding="utf-8"))["interest"]
    found = {(metric, int(s)): (n, shown, word) for metric, s, n, shown, word in rows}
    if not found:
        return []
    within = lambda metric: f"no difference of {least[metric.lower()]:g} points or more"

    def told(metric: str) -> str:
        by_word: dict[str, list[str]] = {}
        for s in sorted({s for m, s in found if m == metric}, reverse=True):
            _, shown, word = found[metric, s]
            by_word.setdefault(word, []).append(f"{shown} at {s} rollouts")
        words = {"gains": "a gain", "loses": "a loss", "no difference": within(metric)}
        return f"{metric}@32 " + "; ".join(f"{', '.join(x)} ({words.get(w, w)})" for w, x in by_word.items())

    ages = [str(s) for s in sorted({s for _, s in found})]
    again = re.search(r"^\| Best@32 \| dapo \| " + effect, recomputed, re.M)
    seeds = " to ".join(sorted({n for n, *_ in found.values()}, key=int)) + " seeds"
    done, all_of_them = re.findall(r"^(\d+) of (\d+) runs are finished", text, re.M)[0]
    seeds += "" if done == all_of_them else ", runs in progress"
    return [
        "* **Stale data** ([registered](repro/mini/stale/results/report.md); two base policies, 400 steps, each method "
        f"at its own learning rate; {seeds}). The policy of {', '.join(ages[:-1])} or {ages[-1]} rollouts ago samples "
        f"the responses. UP-DAPO minus DAPO, in points: {told('Best')}. {told('Avg')}."
        + (f" With lp_old recomputed by the trainer: Best@32 {again[3]} at {again[1]} rollouts." if again else "")
    ]


def text() -> str:
    r = Report(REPORT.read_text(encoding="utf-8"))
    best, avg = r.by_dose("Best@32"), r.by_dose("Avg@32")
    doses = re.findall(r"(low|middle|high): ([\d.]+) % clipped, (\d+) seeds", r.text)
    commit, fall = r.find(r"commit `(\w{7})")[1], r.find(r"end: low (\d+) → (\d+) and (\d+)")
    lowest, highest = min(ends(c)[0] for c in avg[:2]), max(ends(c)[1] for c in avg[:2])
    rate = [r.seen(f"{m}: DAPO at its own learning rate − DAPO at the common one") for m in ("Best@32", "Avg@32")]
    own = [r.seen(f"{m}: UP-DAPO − DAPO, both at their own rate") for m in ("Best@32", "Avg@32")]
    assert len(doses) == 3 and all("reproduced" in c for c in best[:2]) and all("undecided" in c for c in avg[:2])
    assert all(c.startswith("not testable") for c in (best[2], avg[2]))
    reward = re.findall(r"clipped, DAPO's reward ([+-][\d.]+) in training", r.text)
    assert [x[0] for x in reward] == ["+", "+", "-"]
    breadth = {w: re.findall(r"(\w+)_avg [+-]", r.find(rf"^\* \*\*universality.*?{w}: ([^;]*)")[1]) for w in
               ("reproduced", "contradicted")}  # fmt: skip
    heads = [f"{name} drift: DAPO clips {x} % of the tokens with A > 0 ({n} seeds)" for name, x, n in doses]
    best[2] = avg[2] = f"not testable: DAPO's own reward falls ({reward[2]})"
    row = lambda cells: f"| {' | '.join(cells)} |"
    kept = (
        f"{number(best[0])} and {number(best[1])} points of Best@32. Training raises the average reward (DAPO's by "
        f"{reward[0]} points at low drift) and makes answers less varied: Best@32 then falls"
    )
    lines = [
        "In short: where the policy has moved away from the one that sampled, UP finds a right answer in 32 tries more "
        "often. No effect on the average answer is shown. A lower learning rate helps DAPO more than UP does. "
        "Tiny transformers learn number puzzles. The tests were [registered](docs/glossary.md#results) before any run "
        f"(commit {commit}). *Drift* is how far the policy moves before new responses are sampled, measured by the "
        "share of good tokens that DAPO clips. UP-DAPO minus DAPO at the end, in percentage points, with intervals "
        "that are corrected for testing many claims:",
        "",
        row(["", *heads]),
        "|---|---|---|---|",
        row(["Best@32: solved at least once in 32 tries", *best]),
        row(["Avg@32: solved on average", *avg]),
        "",
        f"* **Variety.** UP keeps more of what 32 tries can find: {kept} from {fall[1]} % to {fall[2]} % (DAPO) and "
        f"{fall[3]} % (UP-DAPO), so UP loses less.",
        "* **Average.** Whether UP answers better on average is [undecided](docs/claims.md): neither an effect nor "
        "its absence is shown. Both intervals contain 0, and together they reach from "
        f"{lowest:+.1f} to {highest:+.1f} points.",
        "* **Learning rate** (not registered; plain 95 % intervals; 13 seeds). In each column both methods share one "
        "learning rate. A sweep chose a lower one for both, and that change alone gains DAPO "
        f"{rate[0]} points of Best@32 and {rate[1]} of Avg@32: more than UP gains. With both at the lower rate, "
        f"UP-DAPO minus DAPO is {own[0]} points of Best@32 and {own[1]} of Avg@32.",
        f"* **On other objectives** UP raises Avg@32 of {known(breadth['reproduced'])} and lowers that of "
        f"{known(breadth['contradicted'])}; for others it is undecided, excluded or not testable.",
        *stale(),
        "* **Limits.** All runs train on one task, with answers of about 13 tokens. Except for the stale data, they "
        "start from one base policy and take 100 steps. No GPU run has been made.",
        "",
        "[The report](repro/mini/round2/results/report.md) has every registered test of this round, "
        "[verdicts](docs/verdicts.md) has an earlier round with fewer seeds. Both are evidence for the counts below, "
        "which are of sentences of the paper and not of tests.",
    ]
    return "\n".join(lines)
