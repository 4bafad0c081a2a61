# SPDX-License-Identifier: Apache-2.0
"""Log-probability functions in pages: `python -m docs.logprobs NAME...` writes what
`upref audit NAME --logprobs` finds into docs/logprobs.json. docs.make makes tables of
that file and of benchmarks/hidden.json."""

import re
import sys
from pathlib import Path
from typing import Any

from docs import record
from upref import markdown

FILE = Path(__file__).with_suffix(".json")
FULL = "2048 +151936"  # a pattern of N tokens and V ids, in columns of the benchmark
MEASURED = Path(__file__).parents[1] / "benchmarks/hidden.json"


def field_logprobs(*names: str) -> str:
    """Return the table of what check_logprobs finds in each framework's functions; of
    all frameworks, unless some are named.
    """
    columns = ["framework", "function", "verdict"]
    columns.append("notes: what rounds, and what is NaN or refused")
    rows = []
    for name, framework in sorted(record.rows(FILE).items()):
        if names and name not in names:
            continue
        for function, result in framework["functions"].items():
            notes = "; ".join(result["notes"]) or "none"
            cells = (
                f"{name} {framework['version']}",
                function,
                result["verdict"],
                notes,
            )
            rows.append(cells)
    return markdown.table(columns, rows)


def peers() -> str:
    """Return the table that compares upref.hidden with what it can stand for, from what
    the benchmark printed; "-" where that has no number.
    """
    text = "\n".join(record.rows(MEASURED))
    # heading -> pattern of the number, behind the name at the beginning of a line
    columns = {
        "CPU time, of naive's": FULL + r" +\d+ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)",
        "memory beyond dh and dW, MB": FULL + r" +\d+ +(\d+)",
        "entropy off by": r"log-prob \S+ +entropy (\S+)",
        "dW off by, in roundings to bfloat16": r"([\d.]+)$",
    }
    rows = []
    for name in ("naive", "TRL chunked", "verl fused", "upref.hidden"):
        cells = [name]
        for line in columns.values():
            match = re.search(rf"^{name} +{line}", text, re.M)
            cells.append(match[1] if match else "-")
        rows.append(cells)
    return markdown.table(["", *columns], rows)


def where_it_helps() -> str:
    """Return a sentence on the times at full size and at the miniature's."""
    text = "\n".join(record.rows(MEASURED))
    # the last column: CPU seconds, of those of naive
    large = re.search(rf"^upref.hidden +{FULL} .* ([\d.]+)$", text, re.M)
    # a heading with the size, then a line with the same number
    small = re.search(
        r"N = (\d+), V = (\d+), H = (\d+);.*?^upref.hidden +([\d.]+) \(",
        text,
        re.M | re.S,
    )
    assert large and small
    size = "N = {}, V = {}, H = {}".format(*small.groups())
    full = f"{large[1]} of the CPU time of naive at N = 2048, V = 151,936, H = 896"
    return f"`upref.hidden` takes {full}, and {small[4]} at {size}."


def brief(report: Any) -> dict[str, Any]:
    """Return verdict and notes of a report, or of a function that could not run.

    Args:
        report: the report, or the reason why there is none.
    """
    if isinstance(report, str):
        return {"verdict": f"not run: {report}", "notes": []}
    if report.failures:
        failures = [
            f"{f.oracle}: {f.regime}" + (f" ({f.cause})" if f.cause else "")
            for f in report.failures
        ]
        verdict = "differs: " + "; ".join(failures)
    elif any("no entropy" in x for x in report.assumptions):
        verdict = "agrees"
    else:
        verdict = "agrees, with entropy"
    return {"verdict": verdict, "notes": [note_text(note) for note in report.notes]}


def note_text(note: Any) -> str:
    """Return a note with its cause, and without the message of a refusal."""
    text = note.regime
    if "refused" in text:
        text = text.partition(" (")[0]
    if note.cause in ("", "rounding"):
        return text
    return f"{text} ({note.cause})"


def main(*names: str) -> None:
    """Audit the log-probability functions of the frameworks, and record the results."""
    from upref_frameworks.audits.kernels import kernels

    for name in names:
        audited = kernels(name)
        functions = {key: brief(report) for key, report in audited.reports.items()}
        row = {"version": audited.version, "functions": functions}
        record.add(FILE, f"python -m docs.logprobs {name}", {name: row})
        print(name, functions, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
