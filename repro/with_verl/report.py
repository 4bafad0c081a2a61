# SPDX-License-Identifier: Apache-2.0
"""What runs have shown, beside what the paper prints: report.md and its figures, from
steps.jsonl alone.

    python -m repro.with_verl.report RUN... [--out DIR]       RUN: a folder under runs/, or one of the smoke scale's

Draws the paper's Figures 2 to 8 of what these runs have logged, one line a run and the
mean of several seeds; Table 1 for the runs of its family; parity, Cap statistics, and
the estimate against what happened. The paper's numbers stand beside, as printed there,
where a run is of one of its methods. Exit status 2: nothing to read.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean

from repro import Parser
from repro.with_verl import health
from repro.with_verl.config.scales import paper
from repro.with_verl.figures import figures
from repro.with_verl.health import ALARMS, BLIND, BOUND, FAILURES, STEPS, number
from repro.with_verl.logged import NORM, SCORE, Kept, named, read, validation
from repro.with_verl.run import records
from upref import InputError
from upref.files import write_atomically
from upref.markdown import table


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        prog="report",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    p.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    p.add_argument(
        "--out", type=Path, help="where to write (report/ in the first run's folder)"
    )
    args = p.parse_args(argv)
    try:
        runs = [read(folder) for folder in args.runs]
    except InputError as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    out = args.out or args.runs[0] / "report"
    out.mkdir(parents=True, exist_ok=True)
    text = write(runs, out)
    write_atomically(out / "report.md", text)
    print(f"{out / 'report.md'}: {len(runs)} runs, {text.count('![')} figures")
    return 0


def write(runs: list[Kept], out: Path) -> str:
    """The report's text; its figures go to `out`."""
    parts = [
        "# " + ", ".join(dict.fromkeys(r.objective for r in runs)),
        where(runs),
        table_of(runs),
    ]
    if warnings := [w for r in runs for w in alarms(r)]:
        parts += ["## To look at first", "\n".join(f"* {w}" for w in warnings)]
    parts += [
        f"## Health of {r.label}\n\n{health.page(r.folder, records.training(r.rows), r.saved)}"
        for r in runs
    ]
    parts += [
        *figures(runs, out),
        *printed(runs),
        table1(runs),
        statistics(runs),
        throughput(runs),
    ]
    return "\n\n".join(x for x in parts if x) + "\n"


def where(runs: list[Kept]) -> str:
    scales = sorted({r.scale for r in runs})
    if all(s.startswith("paper_") for s in scales):
        return f"At the paper's scale ({', '.join(scales)}): the paper's numbers can be compared."
    return (
        f"Scale {', '.join(scales)}: not the paper's experiment. Its figures are drawn from these runs; the paper's "
        "printed numbers are shown for orientation and belong to other models."
    )


def table_of(runs: list[Kept]) -> str:
    rows = []
    for r in runs:
        steps = records.training(r.rows)
        k = max(1, min(5, len(steps) // 3))
        scores = [row["data"][SCORE] for row in steps if number(row["data"].get(SCORE))]
        said = f"{mean(scores[:k]):.3f} -> {mean(scores[-k:]):.3f}" if scores else "-"
        total = r.saved.get("total")
        rows.append(
            [
                r.label,
                r.scale,
                f"{len(steps)}{f' of {total}' if total else ''}",
                said,
                f"`{r.folder.name}`",
            ]
        )
    return table(["run", "scale", "steps", "score, first and last", "folder"], rows)


def alarms(r: Kept) -> list[str]:
    """What a reader must know before the curves."""
    found = []
    top = largest(r, ALARMS)
    if top > 0:
        bound = largest(r, BOUND)
        found.append(
            f"{r.label}: PARITY ALARM. The loss that trained was not the reference (up to {bound:.3g} times what "
            "rounding explains); it trained on, by parity.on_fail=warn. To see what trained, start it again with "
            "UPREF_REPLAY=FOLDER, and replay the FOLDER: docs/howto/replay.md."
        )
    if (failed := largest(r, FAILURES)) > 0:
        found.append(
            f"{r.label}: STEP ALARM. In {failed:g} of the steps that were judged, the loss or the gradient over all ranks "
            f"was not the objective's. `upref replay {r.folder}/{STEPS} --as {r.objective}` names it; give it "
            "the hyperparameters of policy_loss.upref by --hp."
        )
    if largest(r, BLIND) > 0.5:
        found.append(
            f"{r.label}: parity proves little here: up to {largest(r, BLIND):.0%} of the tokens of a micro-batch lie "
            "within the dtype's rounding of a clip bound."
        )
    steps = [row["step"] for row in records.training(r.rows)]
    if steps and (gaps := sorted(set(range(steps[0], steps[-1])) - set(steps))):
        found.append(
            f"{r.label}: {len(gaps)} steps were not logged, the first is {gaps[0]}."
        )
    nan = [
        row["step"]
        for row in records.training(r.rows)
        if not number(row["data"].get(NORM))
    ]
    if nan:
        found.append(
            f"{r.label}: the gradient norm is no number in {len(nan)} steps, the first is {nan[0]}."
        )
    return found


def largest(r: Kept, key: str) -> float:
    return max(
        (row["data"][key] for row in r.rows if number(row["data"].get(key))),
        default=0.0,
    )


PEAKS = {
    "avg32": ("mean", "Avg@32 of AIME24"),
    "maj32": ("maj", "Maj@32"),
    "best32": ("best", "Best@32"),
    "geometry3k": ("mean", "accuracy on Geometry3K"),
}


def methods(data: dict) -> dict[str, str]:
    """The paper's name of an objective, in whichever form it is trained."""
    return {v: k for k, v in data["names"].items()} | {
        k: v["method"] for k, v in data["forms"].items()
    }


def printed(runs: list[Kept]) -> list[str]:
    """The peaks that the paper prints, beside the peaks of these runs."""
    data = paper()
    names = methods(data)
    rows = []
    for metric, values in data["peaks"].items():
        kind, words = PEAKS[metric]
        for r in runs:
            method = names.get(r.objective, "")
            ours = r.series(validation(kind))[1]
            same_task = r.scale != "trl" and (metric == "geometry3k") == (
                r.scale == "paper_geo3k"
            )
            if method in values and ours and same_task:
                here = (
                    words
                    if r.scale.startswith("paper_")
                    else f"{kind}, of the validation of {r.scale}"
                )
                rows.append(
                    [
                        r.label,
                        here,
                        f"{100 * max(ours):.2f}",
                        f"{values[method]:.2f}, {words}",
                    ]
                )
    head = ["run", "peak of", "here", "printed in the paper"]
    return ["## Peaks", table(head, rows)] if rows else []


BENCHMARKS = {
    "AIME24": "aime24",
    "AMC23": "amc23",
    "MATH500": "math500",
    "Minerva": "minerva",
    "OlympiadBench": "olympiad",
}


def table1(runs: list[Kept]) -> str:
    """The family's last validation, beside Table 1."""
    data = paper()
    names = methods(data)
    printed_rows = {r[0]: r[1:] for r in data["table1"]["rows"]}
    rows = []
    for r in (r for r in runs if r.scale == "paper_math"):
        cells = []
        for source in BENCHMARKS.values():
            mine = r.series(
                lambda k, s=source: validation("mean")(k) and s in k.lower()  # type: ignore[misc]
            )[1]
            cells.append(f"{100 * mine[-1]:.2f}" if mine else "-")
        method = names.get(r.objective, "")
        rows.append([r.label, *cells])
        if method in printed_rows:
            rows.append(
                [f"{method}, printed", *(f"{x:.2f}" for x in printed_rows[method][:5])]
            )
    if not rows:
        return ""
    return "## Table 1\n\nThe last validation here, in per cent.\n\n" + table(
        ["run", *BENCHMARKS], rows
    )


STATISTICS = {  # of the Cap: what of the gradient is left
    "alive": "share of tokens whose gradient is not clipped",
    "above_high": "share of tokens above the upper bound",
    "mass_above_high": "share of the gradient's weight there",
    "ratio/max": "largest ratio",
    "kl_old": "KL to the old policy",
    "overflow": "ratios that overflow",
    "parity_max_abs": "parity: largest difference of the largest weight",
    "parity_of_bound": "parity: in units of what rounding explains",
    "parity_blind": "parity: tokens within rounding of a bound",
    "parity_alarms": "parity: alarms",
    "normalizer": "whole steps: gradient over the reference's",
    "failures": "whole steps: loss or gradient is another sum, or a multiple",
}


def statistics(runs: list[Kept]) -> str:
    rows = []
    for r in runs:
        for key, words in STATISTICS.items():
            values = r.series(named(f"actor/upref/{key}"))[1]
            if values:
                rows.append(
                    [r.label, words, f"{mean(values):.3g}", f"{max(values):.3g}"]
                )
    return (
        "## Cap and parity\n\n" + table(["run", "", "mean over steps", "largest"], rows)
        if rows
        else ""
    )


def throughput(runs: list[Kept]) -> str:
    """What happened, and beside it what was estimated before the start."""
    rows = []
    for r in runs:
        e = r.saved.get("estimate", {})
        timed = {
            k: r.series(named(k))[1]
            for k in (
                "timing_s/step",
                "perf/throughput",
                "actor/perf/max_memory_allocated_gb",
            )
        }
        tokens = r.series(named("perf/total_num_tokens"))[1]
        was = lambda key, form="{:,.0f}", e=e: (
            form.format(e[key]) if e.get(key) is not None else "-"
        )
        if seconds := timed["timing_s/step"]:
            hours = sum(seconds) / 3600
            rows.append(
                [
                    r.label,
                    "seconds a step",
                    f"{mean(seconds):,.1f}",
                    was("step_seconds"),
                ]
            )
            rows.append(
                [
                    r.label,
                    "GPU-hours so far; of all steps",
                    f"{hours * e.get('gpus', 1):,.2f}",
                    was("gpu_hours"),
                ]
            )
        if tokens:
            rows.append(
                [
                    r.label,
                    "tokens a step (most, estimated)",
                    f"{mean(tokens):,.0f}",
                    was("step_tokens"),
                ]
            )
        if per := timed["perf/throughput"]:
            rows.append([r.label, "tokens a second and GPU", f"{mean(per):,.0f}", "-"])
        if memory := timed["actor/perf/max_memory_allocated_gb"]:
            rows.append(
                [
                    r.label,
                    "most GB allocated on a GPU",
                    f"{max(memory):,.1f}",
                    was("train_gb"),
                ]
            )
    return (
        "## Throughput\n\n" + table(["run", "", "here", "estimated"], rows)
        if rows
        else ""
    )


if __name__ == "__main__":
    sys.exit(main())
