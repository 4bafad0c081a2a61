# SPDX-License-Identifier: Apache-2.0
"""From results/runs.jsonl to figures, tables and verdicts: `python -m repro.mini.study.report`, which runs nothing."""

import argparse
import html
import json
import re
import sys
from pathlib import Path

from figures.make import save
from repro.mini import files
from repro.mini.study import curves, plan, results
from repro.mini.study.plan import Contrast, Experiment
from repro.mini.study.results import Record
from repro.mini.study.stats import Effect, at_level, effect, levels
from repro.mini.study.verdicts import Finding, Verdict, judge
from upref.errors import InputError
from upref.paper.claims import words

COMMAND = "python -m repro.mini.study.suite --only {}"
POINTS = {"reward", "valid", "alive", "overflow", *plan.EVAL_METRICS}  # fractions, shown in points of 100
HEAD = """# What the miniature says of the paper's claims

Written by `python -m repro.mini.study.report` from `runs.jsonl`, which names settings, seed, commit, versions and
machine class of every run. The rule was fixed before the runs ([verdicts.py](../study/verdicts.py)), and so were the
claims, bounds and settings ([experiments/](../experiments)). Effects are means over seeds, paired by seed: differences
in points of 100 (answers, reward) or nats (entropy), or ratios (×). p is Holm's, over the claims of an experiment; each
interval stands at the level at which Holm's procedure tests its claim, so it is the interval that decides. The words
are those of [the claims](../../../docs/claims.md): *reproduced* says that the effect shows here, *contradicted* that
the opposite shows or that a bound is not reached, *undecided* that neither does. None of them says what a large model
does: these are tiny transformers on toy tasks. The rule's own words ("partly", "not reproduced") stand in
verdicts.json. The commands are options of `python -m repro.mini.study.suite`.
"""


def write(records: dict[str, Record], folder: Path) -> None:
    """verdicts.md, verdicts.json and the figures of every experiment that has a finished run of each arm."""
    folder.mkdir(parents=True, exist_ok=True)
    experiments = [plan.load(name) for name in plan.names()]
    judged = {e.name: judge(e, records) for e in experiments}
    drawn = {e.name: figures(e, records, folder) for e in experiments}
    made = made_with(records)
    runs = f"{len(records)} runs. " + ". ".join(f"{k.capitalize()}: {'; '.join(v)}" for k, v in made.items()) + ".\n"
    text = [HEAD, runs, verdict_table(experiments, judged, "paper", "The paper's claims")]
    text += [verdict_table(experiments, judged, "ours", "Controls that the paper lacks")]
    for e in experiments:
        text += [section(e, records, judged[e.name], drawn[e.name])]
    files.write_atomically(folder / "verdicts.md", "\n".join(text).encode())
    found = {name: [v.json() for v in verdicts] for name, verdicts in judged.items()}
    facts = json.dumps({"made with": made, "experiments": found}, indent=1) + "\n"
    files.write_atomically(folder / "verdicts.json", facts.encode())


def made_with(records: dict[str, Record]) -> dict[str, list[str]]:
    """Every commit, machine class and version that some run names, and the seeds."""
    seen = [r["provenance"] for r in records.values() if r["provenance"]]
    words = lambda d: ", ".join(f"{k} {v}" for k, v in d.items())
    found = {
        "commit": sorted({str(p["commit"]["id"])[:10] + (" and changes" * bool(p["commit"]["dirty"])) for p in seen}),
        "machine": sorted({words(p["machine"]) for p in seen}),
        "versions": sorted({words(p["versions"]) for p in seen}),
        "seeds": sorted({str(r["settings"]["seed"]) for r in records.values()}),
        "hours of one core": [f"{sum(p['seconds']['all'] for p in seen) / 3600:.1f}"],
    }
    return {key: [as_text(x) for x in those] for key, those in found.items()}


def as_text(words: str) -> str:
    """A record's own words in a page: somebody may have sent the record, and its HTML and links are to be letters."""
    return re.sub(r"[\\`|[\]]", r"\\\g<0>", html.escape(" ".join(words.split()), quote=False))


# ---- verdicts --------------------------------------------------------------------------------------------------------
def verdict_table(experiments: list[Experiment], judged: dict[str, list[Verdict]], source: str, title: str) -> str:
    rows = [
        f"## {title}\n",
        "| | claim | verdict | effect [interval that decides] | p | seeds | command |",
        "|---" * 7 + "|",
    ]
    for e in experiments:
        at = decisive(judged[e.name])
        for v in judged[e.name]:
            if v.claim.source == source:
                p = f"{v.p:.2g}" if v.seeds and v.seeds == v.of else ""
                seeds = str(v.seeds or "")
                cells = [
                    v.claim.figure,
                    v.claim.says,
                    word(v),
                    effects(v, at[v.claim.id]),
                    p,
                    seeds,
                    f"[`--only {e.name}`](#{e.name})",
                ]
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def word(v: Verdict) -> str:
    """The verdict, and what the word leaves open."""
    found = words.of_rule(v.word, v.why)
    why = v.why if "contrasts hold" in v.why or found in (words.NOT_TESTABLE, "not finished") else ""
    if v.word == "partly" and not why:
        why = "the 95 % interval leaves out the bound, the one corrected over the claims does not"
    return f"**{found}**" + (f"<br>{why}" if why else "")


def decisive(verdicts: list[Verdict]) -> dict[str, float]:
    """Claim -> the level at which Holm's procedure tests it, over the claims of its experiment."""
    tested = [v for v in verdicts if v.findings and all(f.effect for f in v.findings)]
    raw = [max(f.effect.p for f in v.findings if f.effect) for v in tested]
    return dict.fromkeys((v.claim.id for v in verdicts), 0.05) | dict(
        zip((v.claim.id for v in tested), levels(raw), strict=True)
    )


def effects(v: Verdict, level: float = 0.05) -> str:
    """Each contrast if there are few, else how many hold and the one that speaks most against the claim."""
    found = [f for f in v.findings if f.effect]
    if len(found) > 3:
        worst = max(found, key=lambda f: f.effect.p if f.effect else 0)
        return f"{sum(f.p < 0.05 for f in found)} of {len(found)} hold; weakest: {_one(worst, level)}"
    return "<br>".join(_one(f, level) for f in found)


def _one(f: Finding, level: float) -> str:
    decides = at_level(f.effect, level, f.contrast.ratio) if f.effect else None
    return f"{show(decides, f.contrast)}: {contrast(f.contrast)}"


def contrast(c: Contrast) -> str:
    """`avg up_dapo − dapo > 0`, in words short enough for a table."""
    where = "" if c.metric not in plan.EVAL_METRICS else f" ({c.set})" if c.set != "test" else ""
    arms = (" / " if c.ratio else " − ").join(c.arms)
    at = "" if c.at == "last" else f" {c.at}"
    return f"{c.metric}{where}{at} {arms} {'>' if c.side > 0 else '<'} {c.bound:g}"


def show(e: Effect | None, c: Contrast) -> str:
    if e is None:
        return "no run"
    k, form = (1, ".3g") if c.ratio else (100, "+.1f") if c.metric in POINTS else (1, "+.3f")
    interval = f" [{k * e.low:{form}}, {k * e.high:{form}}]" if e.n > 1 else ""
    return f"{'×' * c.ratio}{k * e.mean:{form}}{interval}"


def section(e: Experiment, records: dict[str, Record], judged: list[Verdict], drawn: list[str]) -> str:
    done = sum(s.key in records for _, _, s in e.runs())
    text = [f"## {e.name}\n", f"{e.question} ({', '.join(e.answers)}.) {e.note.strip()}\n"]
    text += [f"`{COMMAND.format(e.name)}`: {done} of {len(e.runs())} runs finished.\n"]
    there = [r for _, _, s in e.runs() if (r := records.get(s.key))]
    text += [f"* {r['name']} {as_text(r['status'])}" for r in there if r["status"] != "done"]
    text += [f"![{name}]({name}.svg)\n" for name in drawn]
    if e.table and done:
        text += [table(e, records)]
    many = [f for v in judged for f in v.findings if len(v.findings) > 3 and f.effect]
    if many:
        text += ["| contrast | effect [95 %] | seeds for it | p (Holm, within the claim) |", "|---|---|---|---|"]
        text += [f"| {contrast(f.contrast)} | {show(f.effect, f.contrast)} | {f.effect.seeds_for} of {f.effect.n} "
                 f"| {f.p:.2g} |" for f in many if f.effect]  # fmt: skip
    return "\n".join(text) + "\n"


def table(e: Experiment, records: dict[str, Record]) -> str:
    """The paper's Table 1: a row an arm, a column a held-out set, the mean over seeds, the best of a column in bold."""
    metric, sets = e.table["metric"], e.table["sets"]
    how = "t_1" if e.settings.get("lean_eval") else Contrast.decoding  # the only one of the sets by difficulty there
    cells: dict[str, list[Effect]] = {}
    for arm in e.arms:
        found = [r for seed in e.seeds if (r := records.get(e.run(arm, seed).key))]
        if found:
            at = [Contrast((arm,), metric, set=s, decoding=how, more_than=0) for s in [*sets, "average"]]
            cells[arm] = [effect([100 * results.value(r, c) for r in found]) for c in at]
    best = [max(round(row[j].mean, 1) for row in cells.values()) for j in range(len(sets) + 1)]
    rows = [f"{e.table['title']}, %, mean over seeds ± half of its 95 % interval; the best of a column in bold.\n"]
    rows += ["| method | " + " | ".join([*sets, "average"]) + " | seeds |", "|---" * (len(sets) + 3) + "|"]
    for arm, row in cells.items():
        bold = ["**" if round(x.mean, 1) == best[j] else "" for j, x in enumerate(row)]
        half = [f" ± {x.high - x.mean:.1f}" if x.n > 1 else "" for x in row]
        numbers = [f"{b}{x.mean:.1f}{b}{h}" for b, x, h in zip(bold, row, half, strict=True)]
        rows.append(f"| {arm} | " + " | ".join(numbers) + f" | {row[0].n} |")
    return "\n".join(rows) + "\n"


# ---- figures ---------------------------------------------------------------------------------------------------------
def figures(e: Experiment, records: dict[str, Record], folder: Path) -> list[str]:
    """Draw the experiment's figures as SVG; returns their names, none while an arm has no finished run."""
    names: list[str] = []
    if not {arm for arm, _, s in e.runs() if s.key in records} >= set(e.arms):
        return names
    for f in e.figures:
        found = [curves.series(e, records, panel) for panel in f["panels"]]
        if any(found):
            save(curves.draw(f["panels"], found, f["title"], f.get("highlight", "")), folder / f"{f['name']}.svg")
            names.append(f["name"])
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m repro.mini.study.report", description=__doc__)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="folder with runs.jsonl")
    parser.add_argument("--runs", type=Path, help="take over the finished runs in this folder first")
    args = parser.parse_args(argv)
    folder = args.results
    try:
        if args.runs:
            results.collect(args.runs, set(plan.queue(plan.names())), folder)
        records = results.load(folder)
        if not records:
            raise InputError(f"there is no run in {folder}: python -m repro.mini.study.suite makes some.")
        write(records, folder)
    except (InputError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {folder / 'verdicts.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
