# SPDX-License-Identifier: Apache-2.0
"""Log-probability functions in pages: `python -m docs.logprobs NAME...` writes what
`upref audit NAME --logprobs` finds into docs/logprobs.json. docs.make makes tables of
that file and of benchmarks/hidden.txt."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from upref.files import write_atomically

FILE = Path(__file__).with_suffix(".json")
FULL = "2048 +151936"  # tokens, ids
MEASURED = Path(__file__).parents[1] / "benchmarks/hidden.txt"


def found() -> dict[str, Any]:
    """What was committed, by framework."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def field_logprobs(*names: str) -> str:
    """Each framework's functions through check_logprobs; all frameworks, unless named."""
    out = [
        "| framework | function | verdict | notes: what rounds, and what is NaN or refused |",
        "|---|---|---|---|",
    ]
    for name, f in found().items():
        for k, r in f["functions"].items() if not names or name in names else ():
            out.append(
                f"| {name} {f['version']} | {k} | {r['verdict']} | {'; '.join(r['notes']) or 'none'} |"
            )
    return "\n".join(out)


def peers() -> str:
    """upref.hidden beside what it can stand for."""
    text = MEASURED.read_text(encoding="utf-8")
    said = lambda name, line: (
        m[1] if (m := re.search(rf"^{name} +{line}", text, re.M)) else "-"
    )
    columns = {
        "CPU time, of naive's": FULL + r" +\d+ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)",
        "memory beyond dh and dW, MB": FULL + r" +\d+ +(\d+)",
        "entropy off by": r"log-prob \S+ +entropy (\S+)",
        "dW off by, in roundings to bfloat16": r"([\d.]+)$",
    }
    out = ["| | " + " | ".join(columns) + " |", "|---" * 5 + "|"]
    for name in ("naive", "TRL chunked", "verl fused", "upref.hidden"):
        out.append(
            f"| {name} | "
            + " | ".join(said(name, line) for line in columns.values())
            + " |"
        )
    return "\n".join(out)


def where_it_helps() -> str:
    """The times at full size and at the miniature's."""
    text = MEASURED.read_text(encoding="utf-8")
    large = re.search(rf"^upref.hidden +{FULL} .* ([\d.]+)$", text, re.M)
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
    if isinstance(report, str):
        return {"verdict": f"not run: {report}", "notes": []}
    wrong = [
        f"{f.oracle}: {f.regime}" + (f" ({f.cause})" if f.cause else "")
        for f in report.failures
    ]
    short = lambda n: n.regime.partition(" (")[0] if "refused" in n.regime else n.regime
    notes = [
        short(n) + (f" ({n.cause})" if n.cause not in ("", "rounding") else "")
        for n in report.notes
    ]
    entropy = (
        "" if any("no entropy" in c for c in report.assumptions) else ", with entropy"
    )
    return {
        "verdict": "differs: " + "; ".join(wrong) if wrong else f"agrees{entropy}",
        "notes": notes,
    }


def main(*names: str):
    from upref_frameworks.audits.kernels import kernels

    for name in names:
        k = kernels(name)
        functions = {f: brief(r) for f, r in k.reports.items()}
        every = dict(
            sorted(
                (
                    found() | {name: {"version": k.version, "functions": functions}}
                ).items()
            )
        )
        write_atomically(FILE, json.dumps(every, indent=1, ensure_ascii=False) + "\n")
        print(name, functions, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
