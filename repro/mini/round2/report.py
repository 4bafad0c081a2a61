# SPDX-License-Identifier: Apache-2.0
"""What the second round says: `python -m repro.mini.round2.report`, from
results/runs.jsonl; it runs nothing.

Writes results/report.md with its figures: a page, then the tables. Every number in it
is computed here.
"""

import argparse
import html
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from figures.make import save
from repro.mini import files
from repro.mini.round2 import (
    doses,
    explore,
    page,
    rates,
    reach,
    rule,
    tables,
    unregistered,
)
from repro.mini.round2.rule import Verdict
from repro.mini.round2.sound import sound, unsound
from repro.mini.study import curves, plan, registration, results
from repro.mini.study.plan import Contrast, Experiment
from repro.mini.study.results import Record
from upref.errors import InputError

COMMAND = "python -m repro.mini.study.suite --only {}"
SETTING = """
| | here | the paper |
|---|---|---|
| policy, task | 112k weights; four numbers to a target | 8B to 30B; mathematics |
| minibatches | 16, once (low) or twice (middle, high); 4, 8: papers_settings | 16 (DAPO), 8 (GSPO), 4 (GRPO), once |
| learning rate | 3e-4 (low, middle), 6e-4 (high), each method's own in family_tuned; AdamW | 1e-6 |
| dynamic sampling | none (its effect: papers_settings) | not said; DAPO's own paper has it |
| dual clip | none (c = 10: papers_settings) | in Fig. 1, no value given |
| denominators | per prompt, as Eqs. 14 to 16 print them | not said; verl's are over the batch |
| KL term | none (its effect: papers_settings) | in the equations, its coefficient is not given |
| W-REINFORCE, RLOO, ASPO | as printed and as trained by their authors or verl (family_tuned) | not said |
| what is compared | the end of every run, paired by seed; peak and area beside it | peaks of one run |
"""


def judge(e: Experiment, records: dict[str, Record]) -> list[Verdict]:
    """The rule's verdicts. It asks the gate first and of the seeds that are there: here
    no claim is closed by a few.
    """
    records = sound(e, records)
    done = {arm: 0 for arm in e.arms}
    for arm, _, settings in e.runs():
        done[arm] += settings.key in records
    found = []
    for v in rule.judge(e, records):
        n = min(v.n, done.get(v.claim.gate, v.n))
        waits = n < v.of and v.word != "not finished"
        found.append(
            replace(v, word="not finished", why=f"{n} of {v.of} seeds so far")
            if waits
            else v
        )
    return found


def write(records: dict[str, Record], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    experiments = [plan.load(name) for name in plan.names(round=2)]
    judged = {e.name: tables.decisive(judge(e, records)) for e in experiments}
    odd = {
        key
        for e in experiments
        for key in unsound(e, records, doses.asked() if e.name in doses.NAMES else ())
    }
    everything, records = (
        records,
        {key: r for key, r in records.items() if key not in odd},
    )
    drawn = {e.name: figures(e, records, folder) for e in experiments}
    parts = [
        "# The second round: what holds, at which dose, and what is not settled\n",
        head(experiments, everything),
        "## In short\n",
        "\n".join(page.in_short(experiments, judged, records, everything)),
        "\n## What differs from the paper's setting",
        SETTING,
        "## By dose\n",
        doses.table(records),
        shown(
            "doses",
            doses,
            records,
            folder,
            "Effects by dose, every seed a dot, 95 % intervals",
        ),
        "## The paper's claims\n",
        tables.verdicts(experiments, judged, "paper"),
        "## Questions of ours\n",
        tables.verdicts(experiments, judged, "ours"),
        unregistered.section(records),
        reach.section(records),
        shown(
            "reach", reach, records, folder, "UP on other objectives, every seed a dot"
        ),
        explore.section(records),
        shown(
            "explore",
            explore,
            records,
            folder,
            "Entropy kept, Best@32 kept, rarely solved problems: every run",
        ),
        *(section(e, everything, records, drawn[e.name]) for e in experiments),
    ]
    files.write_atomically(
        folder / "report.md", "\n".join(p for p in parts if p).encode()
    )


def figures(e: Experiment, records: dict[str, Record], folder: Path) -> list[str]:
    """Its figures drawn, none while an arm has no finished run; returns their names.

    Fifty-one curves of the search for learning rates would be one knot: it has its own.
    """
    if e.name == "family_rates":
        return [e.name] if shown(e.name, rates, records, folder) else []
    names: list[str] = []
    if not {arm for arm, _, s in e.runs() if s.key in records} >= set(e.arms):
        return names
    for f in e.figures:
        found = [curves.series(e, records, panel) for panel in f["panels"]]
        if any(found):
            save(
                curves.draw(f["panels"], found, f["title"], f.get("highlight", "")),
                folder / f"{f['name']}.svg",
            )
            names.append(f["name"])
    return names


def shown(
    name: str, module, records: dict[str, Record], folder: Path, says: str = ""
) -> str:
    """The module's figure, saved, as Markdown; "" if there is nothing to draw yet."""
    fig = module.figure(records)
    if not fig:
        return ""
    save(fig, folder / f"{name}.svg")
    return f"![{says}]({name}.svg)\n"


def made_with(records: dict[str, Record]) -> dict[str, list[str]]:
    """Every commit, machine class and version that some run names, and the seeds."""
    seen = [r["provenance"] for r in records.values() if r["provenance"]]
    words = lambda d: ", ".join(f"{k} {v}" for k, v in d.items())

    def commit(c: dict) -> str:
        short = str(c["id"])[:10]
        return f"{short} and changes" if c["dirty"] else short

    found = {
        "commit": sorted({commit(p["commit"]) for p in seen}),
        "machine": sorted({words(p["machine"]) for p in seen}),
        "versions": sorted({words(p["versions"]) for p in seen}),
        "seeds": sorted({str(r["settings"]["seed"]) for r in records.values()}),
        "hours of one core": [f"{sum(p['seconds']['all'] for p in seen) / 3600:.1f}"],
    }
    return {key: [as_text(x) for x in those] for key, those in found.items()}


def as_text(words: str) -> str:
    """A record's own words in a page: somebody may have sent the record, and its HTML
    and links are to be letters.
    """
    return re.sub(
        r"[\\`|[\]]", r"\\\g<0>", html.escape(" ".join(words.split()), quote=False)
    )


def table(e: Experiment, records: dict[str, Record]) -> str:
    """The paper's Table 1: a row an arm, a column a held-out set, the mean over seeds,
    the best of a column in bold.
    """
    metric, sets = e.table["metric"], e.table["sets"]
    # the only one of the sets by difficulty there
    how = "t_1" if e.settings.get("lean_eval") else Contrast.decoding
    cells: dict[str, list[rule.Found]] = {}
    for arm in e.arms:
        found = [r for seed in e.seeds if (r := records.get(e.run(arm, seed).key))]
        if found:
            at = [
                Contrast((arm,), metric, set=s, decoding=how, more_than=0)
                for s in [*sets, "average"]
            ]
            cells[arm] = [
                rule.test(c, [100 * results.value(r, c) for r in found]) for c in at
            ]
    best = [
        max(round(row[j].mean, 1) for row in cells.values())
        for j in range(len(sets) + 1)
    ]
    rows = [
        f"{e.table['title']}, %, mean over seeds ± half of its 95 % interval; the best of a column in bold.\n"
    ]
    rows += [
        "| method | " + " | ".join([*sets, "average"]) + " | seeds |",
        "|---" * (len(sets) + 3) + "|",
    ]
    for arm, row in cells.items():
        bold = ["**" if round(x.mean, 1) == best[j] else "" for j, x in enumerate(row)]
        half = [f" ± {x.high - x.mean:.1f}" if x.n > 1 else "" for x in row]
        numbers = [
            f"{b}{x.mean:.1f}{b}{h}" for b, x, h in zip(bold, row, half, strict=True)
        ]
        rows.append(f"| {arm} | " + " | ".join(numbers) + f" | {row[0].n} |")
    return "\n".join(rows) + "\n"


def head(experiments: Iterable[Experiment], records: dict[str, Record]) -> str:
    wanted = plan.queue(e.name for e in experiments)
    left = (
        results.forecast(
            [s for name, s in wanted.items() if name not in records], records
        )
        / 3600
    )
    made = made_with(records)
    hours = f", {made['hours of one core'][0]} hours of one core" if records else ""
    commit = registration.load(plan.FOLDERS[2].parent).get("commit", "none yet")
    waits = [e.name for e in experiments if not e.runs()]
    more = (
        f" ({', '.join(waits)} comes on top, once its learning rates are chosen)"
        if waits
        else ""
    )
    rest = f""" The rest takes about {left:.0f} hours of one core
as busy as it was, beside other work and at the lowest priority; a quiet one is faster
([benchmarks](../../../../benchmarks/mini.txt)){more}:
`python -m repro.mini.study.suite --missing`.
A claim gets its verdict when all its seeds are there; until then this page says what the finished ones show, and that
is no verdict."""
    return f"""Written by `python -m repro.mini.round2.report`. Rule, claims, bounds, gates and seeds were registered in
commit `{commit}`, before any run ([rule.py](../rule.py),
[experiments](../experiments), [power](../power.md), [pilot](../pilot.md)).

**{len(records)} of {len(wanted)} runs are finished**{hours}.{rest if left or waits else ""}
The correction for many claims runs within one experiment, and not across them. Printed intervals are the ones that
decide, corrected over the claims; where a table says 95 %, they are not. The words are those of
[the claims](../../../../docs/claims.md). These are tiny transformers on toy tasks. The first round is in
[../../results/verdicts.md](../../results/verdicts.md).
"""


def section(
    e: Experiment,
    everything: dict[str, Record],
    records: dict[str, Record],
    drawn: list[str],
) -> str:
    mine = [r for *_, s in e.runs() if (r := everything.get(s.key))]
    lines = [
        f"## {e.name}\n",
        f"{e.question} ({', '.join(e.answers)}.) {e.note.strip()}\n",
    ]
    lines += [
        f"`{COMMAND.format(e.name)}`: {len(mine)} of {len(e.runs())} runs finished{by_commit(mine)}.\n"
    ]
    for r in mine:
        left_out = (
            ""
            if r["name"] in records
            else ": left out, it has no number for some question"
        )
        if r["status"] != "done" or left_out:
            lines.append(f"* {r['name']} {as_text(r['status'])}{left_out}")
    lines += [f"![{name}]({name}.svg)\n" for name in drawn]
    if e.name == "family_rates":
        lines.append(rates.section(records))
    if e.table and mine:
        lines.append(table(e, records))
    return "\n".join(lines)


def by_commit(records: Iterable[Record]) -> str:
    """How many runs are of which commit's code, in the order of the runs."""
    made = Counter(
        as_text(str(p["commit"]["id"])[:7]) for r in records if (p := r["provenance"])
    )
    return (
        f", by the code of {', '.join(f'{commit} ({n})' for commit, n in made.items())}"
        if made
        else ""
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m repro.mini.round2.report", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=results.folder_of(2),
        help="folder with runs.jsonl",
    )
    parser.add_argument(
        "--runs", type=Path, help="take over the finished runs in this folder first"
    )
    args = parser.parse_args(argv)
    try:
        if args.runs:
            results.collect(
                args.runs, set(plan.queue(plan.names(round=2))), args.results
            )
        write(results.load(args.results), args.results)
    except (InputError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.results / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
