# SPDX-License-Identifier: Apache-2.0
"""What the second round says: `python -m repro.mini.round2.report`, from results/runs.jsonl; it runs nothing.

Writes results/report.md with its figures: a page, then the tables. Every number in it is computed here.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from math import exp
from pathlib import Path

from figures.make import save
from repro.mini import files
from repro.mini.round2 import doses, explore, registration, rule
from repro.mini.round2.rule import Found, Verdict
from repro.mini.study import plan, report, results
from repro.mini.study.plan import EVAL_METRICS, Contrast, Experiment
from repro.mini.study.results import Record
from upref.errors import InputError

POINTS = {"reward", *EVAL_METRICS}
SETTING = """
| | here | the paper |
|---|---|---|
| policy, task | 112k weights; four numbers to a target | 8B to 30B; mathematics |
| minibatches of a step | 16, each once (low) or twice (middle, high) | 16 (DAPO), 8 (GSPO), 4 (GRPO), each once |
| learning rate | 3e-4 (low, middle), 6e-4 (high), AdamW | 1e-6 |
| dynamic sampling | none (its effect: papers_settings) | not said; DAPO's own paper has it |
| dual clip | none (c = 10: papers_settings) | in Fig. 1, no value given |
| denominators | per prompt, as Eqs. 14 to 16 print them | not said; verl's are over the batch |
| KL term | none (its effect: papers_settings) | in the equations, its coefficient is not given |
| W-REINFORCE, RLOO, ASPO | as printed and as trained by their authors or verl (family_tuned) | not said |
| what is compared | the end of every run, paired by seed; peak and area beside it | peaks of one run |
"""


def judge(e: Experiment, records: dict[str, Record]) -> list[Verdict]:
    """The rule's verdicts. It asks the gate first and of the seeds that are there: here no claim is closed by a few."""
    done = {arm: 0 for arm in e.arms}
    for arm, _, settings in e.runs():
        done[arm] += settings.key in records
    found = []
    for v in rule.judge(e, records):
        n = min(v.n, done.get(v.claim.gate, v.n))
        waits = n < v.of and v.word != "not finished"
        found.append(replace(v, word="not finished", why=f"{n} of {v.of} seeds so far") if waits else v)
    return found


def write(records: dict[str, Record], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    experiments = [plan.load(name) for name in plan.names(round=2)]
    judged = {e.name: judge(e, records) for e in experiments}
    drawn = {e.name: report.figures(e, records, folder) for e in experiments}
    if fig := doses.figure(records):
        save(fig, folder / "doses.svg")
    parts = [
        "# The second round: what holds, at which dose, and what is not settled\n",
        head(experiments, records),
        "## In short\n",
        *in_short(experiments, judged, records),
        "\n## By dose\n",
        doses.table(records),
        "![Effects by dose, every seed a dot, 95 % intervals](doses.svg)\n" if fig else "",
        "## What differs from the paper's setting",
        SETTING,
        "## The paper's claims\n",
        verdicts(experiments, judged, "paper"),
        "## What we ask\n",
        verdicts(experiments, judged, "ours"),
        universality(records),
        explore.section(records),
        *(section(e, records, drawn[e.name]) for e in experiments),
    ]
    files.write_atomically(folder / "report.md", "\n".join(p for p in parts if p).encode())


def head(experiments: Iterable[Experiment], records: dict[str, Record]) -> str:
    wanted = plan.queue(e.name for e in experiments)
    left = results.forecast([s for name, s in wanted.items() if name not in records], records) / 3600
    made = report.made_with(records)
    hours = f", {made['hours of one core'][0]} hours of one core" if records else ""
    commit = registration.load().get("commit", "none yet")
    waits = [e.name for e in experiments if not e.runs()]
    more = f" ({', '.join(waits)} comes on top, once its learning rates are chosen)" if waits else ""
    return f"""Written by `python -m repro.mini.round2.report`. Rule, claims, bounds, gates and seeds were registered in
commit `{commit}`, before any run ([rule.py](../rule.py),
[experiments](../experiments), [power](../power.md), [pilot](../pilot.md)).

**{len(records)} of {len(wanted)} runs are finished**{hours}. The rest takes about {left:.0f} hours of one core
as busy as it was, beside other work and at the lowest priority; a quiet one is faster
([benchmarks](../../../../benchmarks/mini.txt)){more}:
`python -m repro.mini.study.suite --missing`.
A claim gets its verdict when all its seeds are there; until then this page says what the finished ones show, and that
is no verdict. The first round stands in [../../results/verdicts.md](../../results/verdicts.md). These are tiny
transformers on toy tasks.
"""


# ---- the page --------------------------------------------------------------------------------------------------------
def in_short(experiments: list[Experiment], judged: dict[str, list[Verdict]], records: dict[str, Record]) -> list[str]:
    words: dict[str, list[str]] = {}
    for e in experiments:
        for v in judged[e.name]:
            if v.found:
                words.setdefault(v.word, []).append(f"{e.name}/{v.claim.id}")
    lines = ["* Verdicts: " + "; ".join(f"{len(names)} {word}" for word, names in words.items()) + "."]
    order = ("reproduced", "holds", "refuted", "in part", "undecided", "not testable here")
    lines += [f"* {word.capitalize()}: {', '.join(words[word])}." for word in order if word in words]
    lines += [line for name in doses.NAMES if (line := doses.sentence(name, records))]
    begun = [e for e in experiments if any(s.key in records for *_, s in e.runs())]
    rest = [e.name for e in experiments if e not in begun]
    if rest:
        lines.append(f"* Not begun: {', '.join(rest)}. Nothing is said of them.")
    return lines


# ---- tables ----------------------------------------------------------------------------------------------------------
def verdicts(experiments: Iterable[Experiment], judged: dict[str, list[Verdict]], source: str) -> str:
    rows = ["| | claim | verdict | effect [95 %] | seeds | p | power | seeds for 0.8 |", "|---" * 8 + "|"]
    for e in experiments:
        for v in judged[e.name]:
            if v.claim.source == source:
                rows.append(row(e, v))
    rows.append(
        "\np is Holm's over the experiment's claims of this kind. Power and seeds for 0.8 are for the registered effect"
    )
    rows.append("at the spread seen so far and the strictest level of the correction.\n")
    return "\n".join(rows)


def row(e: Experiment, v: Verdict) -> str:
    final = v.word not in ("not finished", "not testable here")
    cells = [
        f"{e.name}<br>{v.claim.figure}",
        v.claim.says,
        f"**{v.word}**" + (f"<br>{v.why}" if v.why else ""),
        effects(v),
        f"{v.n} of {v.of}" if v.of else "",
        f"{v.p_for:.2g}" if final else "",
        f"{v.power:.2f}" if v.power == v.power else "",
        f"{v.seeds_needed}" if v.seeds_needed else "",
    ]
    return f"| {' | '.join(cells)} |"


def effects(v: Verdict) -> str:
    found = [f for f in v.found if f.n]
    if len(found) > 3:
        worst = max(found, key=lambda f: f.p_for)
        return f"{sum(f.p_for < rule.ALPHA for f in found)} of {len(found)} hold; weakest: {one(worst)}"
    return "<br>".join(one(f) for f in found)


def one(f: Found) -> str:
    return f"{show(f)}: {what(f.contrast)}"


def what(c: Contrast) -> str:
    arms = (" / " if c.ratio else " − ").join(c.arms)
    where = f" ({c.set})" if c.set != "test" else ""
    claimed = f"within ×{c.within:g}" if c.within else f"{'>' if c.more_than is not None else '<'} {c.bound:g}"
    return f"{c.metric}{where} {c.at} {arms} {claimed}"


def show(f: Found) -> str:
    """The mean and its interval: points of 100 for shares, ×-factors for ratios."""
    c = f.contrast
    if not f.n:
        return "no run"
    k, form = (1, ".3g") if c.ratio else (100, "+.1f") if c.metric in POINTS else (1, "+.3f")
    number = lambda x: f"{k * (exp(min(x, 700)) if c.ratio else x):{form}}"
    return f"{'×' * c.ratio}{number(f.mean)}" + (f" [{number(f.low)}, {number(f.high)}]" if f.n > 1 else "")


def section(e: Experiment, records: dict[str, Record], drawn: list[str]) -> str:
    done = sum(s.key in records for *_, s in e.runs())
    lines = [f"## {e.name}\n", f"{e.question} ({', '.join(e.answers)}.) {e.note.strip()}\n"]
    lines += [f"`{report.COMMAND.format(e.name)}`: {done} of {len(e.runs())} runs finished.\n"]
    lines += [
        f"* {r['name']} {r['status']}" for *_, s in e.runs() if (r := records.get(s.key)) and r["status"] != "done"
    ]
    lines += [f"![{name}]({name}.svg)\n" for name in drawn]
    if e.table and done:
        lines.append(report.table(e, records))
    return "\n".join(lines)


def universality(records: dict[str, Record]) -> str:
    """Per objective what UP does, and whether it does less where the objective itself clips less."""
    e = plan.load("universality")
    known: rule.Runs = {(arm, seed): records.get(s.key) for arm, seed, s in e.runs()}
    bases = [arm for arm in e.arms if f"up_{arm}" in e.arms]
    of = lambda arms, metric, at: rule.measure(Contrast(arms, metric, at, more_than=0.0), known, e.seeds)
    dead = {b: of((b,), "clip_pos_high", "mean") for b in bases}
    found = {b: [of((f"up_{b}", b), *m) for m in (("entropy", "mean"), ("avg", "last"))] for b in bases}
    if not any(f.n for fs in found.values() for f in fs):
        return ""
    rows = ["## UP on other objectives\n"]
    rows += [
        "| base | positive tokens it clips, % | entropy, up − base | Avg@32, up − base | seeds |",
        "|---" * 5 + "|",
    ]
    for b in (b for b in bases if found[b][0].n):
        rows.append(f"| {b} | {100 * dead[b].mean:.1f} | {' | '.join(map(show, found[b]))} | {found[b][0].n} |")
    whole = [b for b in bases if b != "dapo" and min(f.n for f in found[b]) == len(e.seeds)]
    if len(whole) == len(bases) - ("dapo" in bases):
        for i, name in enumerate(("entropy", "Avg@32")):
            rho, p = rule.ranks([dead[b].mean for b in whole], [found[b][i].mean for b in whole])
            rows.append(f"\nRanks of the clipped share and of UP's effect on {name}: ρ = {rho:+.2f}, p = {p:.2g}.")
    else:
        rows.append("\nThe rank correlation is computed when all seeds are there.")
    return "\n".join(rows) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m repro.mini.round2.report", description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=results.folder_of(2), help="folder with runs.jsonl")
    parser.add_argument("--runs", type=Path, help="take over the finished runs in this folder first")
    args = parser.parse_args(argv)
    try:
        if args.runs:
            results.collect(args.runs, set(plan.queue(plan.names(round=2))), args.results)
        write(results.load(args.results), args.results)
    except (InputError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.results / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
