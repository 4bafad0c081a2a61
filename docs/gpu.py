# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/gpu.md, from benchmarks/gpu/results.json."""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "benchmarks/gpu/results.json"
Rows = list[dict[str, Any]]


def results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def rows(kind: str, **wanted: Any) -> Rows:
    """The rows of a kind with these values."""
    return [
        r
        for r in results()["rows"]
        if r["kind"] == kind and all(r.get(k) == v for k, v in wanted.items())
    ]


def table(head: list[str], body: list[list[Any]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in body]
    return "\n".join(lines)


def cell(x: Any) -> str:
    return str(x).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def size(x: float) -> str:
    return f"{x:.1e}"


# ---- the tables ----------------------------------------------------------------------
def machine() -> str:
    """Which machine, when, and with which versions."""
    found = results()
    it = rows("facts", fact="machine")[0]
    versions = ", ".join(f"{k} {v}" for k, v in it["versions"].items() if v)
    runs = "; ".join(
        f"run {n}, {r['date']}, commit {r['commit']}"
        for n, r in enumerate(found["runs"], 1)
    )
    smi = rows("facts", fact="nvidia-smi")[0]["out"].split(", ")
    return (
        f"One {it['gpu']} ({it['bytes'] / 2**30:.1f} GiB), driver {smi[2]}, CUDA {it['cuda']}, {it['cores']} cores, "
        f"Python {it['python']}, {versions}, seed {it['seed']}. {runs.capitalize()}."
    )


def tests() -> str:
    """How many tests passed, and which did not."""
    every = rows("tests")
    bad = [r["test"] for r in every if r["outcome"] not in ("passed", "skipped")]
    passed = sum(r["outcome"] == "passed" for r in every)
    said = f"{passed} of {len(every)} tests of tests/gpu passed"
    return f"{said}{': ' + ', '.join(bad) + ' did not' if bad else ''}."


def steps() -> str:
    """Verdicts on training steps of models on the GPU."""
    body = []
    for r in rows("steps"):
        if "agrees" not in r:
            continue
        verdict = "agrees" if r["agrees"] else "differs"
        verdict += "" if r["agrees"] == r["right"] else ": wrong"
        body.append(
            [
                r["part"],
                r["model"],
                r["step"],
                verdict,
                size(r["error"]) if "error" in r else "",
                r.get("cause", ""),
                f"{r['seconds']:.1f}",
            ]
        )
    head = ["by", "model", "step", "verdict", "error", "cause", "seconds"]
    tf32 = rows("steps", part="TF32")[0]["error"]
    return f"{table(head, body)}\n\nIn TF32 the gradient of the recurrent model is off by {size(tf32)}."


def kernels() -> str:
    """Verdicts of check_logprobs on functions that compute on the GPU."""
    body = []
    for r in rows("kernels"):
        if "failed" in r:
            said = r["failed"].removeprefix("InputError: ")
            body.append([r["function"], r["dtype"], "not checked", said])
            continue
        lines = r["text"].splitlines()
        notes = [
            line.removeprefix("note  ").removeprefix("FAIL  ")
            for line in lines
            if line.startswith(("note", "FAIL"))
        ]
        body.append([r["function"], r["dtype"], judged(r), "; ".join(notes)])
    return table(["function", "dtype", "verdict", "what the report notes"], body)


def judged(r: dict[str, Any]) -> str:
    """The verdict; an exception on a batch is none on numbers."""
    raised = re.search(r"found +.* raised (\w+)", r["text"])
    if raised and "on a batch of this oracle" in r["text"]:
        return f"stopped by {raised[1]}"
    return "agrees" if r["agrees"] else "differs"


def losses() -> str:
    """Largest errors of all objectives on the GPU, eager and compiled."""
    every = [r for r in rows("losses") if "liger" not in r and "failed" not in r]
    lines = []
    for key, words in (
        ("float64", "float64, eager"),
        ("traced", "float64, compiled without a code generator"),
        ("float32", "float32, eager"),
        ("compiled", "float32, compiled"),
    ):
        have = [r for r in every if key in r]
        worst = max(have, key=lambda r: max(r[key]), default=None)
        if worst is None:
            continue
        lines.append([words, len(have), size(max(worst[key])), worst["objective"]])
    head = ["", "objectives", "largest error of loss or gradient", "of"]
    return table(head, lines)


def liger() -> str:
    """Liger's Triton loss by upref.check."""
    body = []
    for r in rows("losses"):
        if "liger" not in r or r["objective"] == "identify":
            continue
        verdict = (r.get("text") or r.get("failed", "")).splitlines()
        causes = [
            line.split("likely", 1)[1].strip() for line in verdict if "likely" in line
        ]
        known = [c for c in causes if not c.startswith("no known cause")]
        found = "agrees" if r.get("agrees") else f"differs: {'; '.join(known)}"
        given = [f"{k}={v}" for k, v in r["settings"].items()]
        body.append([", ".join([r["liger"], *given]), r["objective"], found])
    return table(["loss_type", "compared with", "verdict"], body)


def sizes() -> str:
    """Time, memory and error of log-probability heads at real sizes."""
    parts = []
    cases: dict[tuple, Rows] = {}
    for r in rows("sizes"):
        if "failed" not in r and "milliseconds" in r:
            cases.setdefault((r["dtype"], r["H"], r["N"]), []).append(r)
    for (dtype, H, N), every in sorted(cases.items()):
        body = []
        for r in every:
            errors = [r.get(f"error of {k}") for k in ("log-prob", "entropy", "dW")]
            body.append(
                [
                    r["who"],
                    r["of"] + 1,
                    f"{r['milliseconds']:.1f}",
                    f"{r['peak_bytes'] / 1e9:.2f}",
                    *("" if e is None else size(e) for e in errors),
                ]
            )
        head = [
            f"{dtype}, H = {H:,}, {N:,} tokens", "run", "ms", "GB", "log-prob off by", "entropy off by", "dW off by",
        ]  # fmt: skip
        parts.append(table(head, body))
    return "\n\n".join(parts)


def launchers() -> str:
    """What the launchers of repro/ choose on this machine."""
    body = []
    for name in (
        "ladder",
        "repro/run.sh up_dapo --dry-run",
        "repro/run.sh up_dapo gpu1",
    ):
        r = rows("facts", fact=name)[0]
        said = (r["err"] if r["err"].strip() else r["out"]).strip().splitlines()
        body.append([f"`{name}`", r["status"], said[-1][:300] if said else ""])
    return table(["command", "status", "last line"], body)


def training() -> str:
    """What the rung `trl` took at its real size, beside its estimate."""
    every = {r["run"]: r for r in rows("training") if "run" in r}
    estimate = rows("training", estimate="memory.py")[0]
    first, again = every["up_dapo, killed"], every["up_dapo, the same command again"]
    phases = [*first["phases"], *again["phases"]]

    def most(phase: str, what: str = "allocated") -> float:
        return max(p[what] for p in phases if p["phase"] == phase) / 1e9

    steps = {s["step"]: s["data"] for s in again["steps"]}
    took = [s["timing_s/step"] for n, s in steps.items() if n % train_every() != 1]
    generation = [p["seconds"] for p in phases if p["phase"] == "generation"]
    bound = max(s["actor/upref/parity_of_bound"] for s in steps.values())
    reserved = max(most(k, "reserved") for k in ("training", "generation"))
    body = [
        [
            "GB to train, at most",
            f"{most('training'):.1f}",
            f"{estimate['training'] / 1e9:.1f}",
        ],
        [
            "GB to generate 256 responses together, at most",
            f"{most('generation'):.1f}",
            f"{estimate['generating'] / 1e9:.1f}",
        ],
        ["GB that the allocator reserved, at most", f"{reserved:.1f}", ""],
        [
            "seconds to generate 256 responses of up to 512 tokens",
            ", ".join(f"{s:.0f}" for s in generation),
            "",
        ],
        [
            "seconds of an optimizer step without generation",
            f"{min(took):.1f} to {max(took):.1f}",
            "",
        ],
        ["parity, of what rounding allows", f"{bound:.3f}", "below 1"],
        ["steps of the killed process", len(first["steps"]), ""],
        [
            "steps of the same command, started again",
            len(steps) - len(first["steps"]),
            "",
        ],
    ]
    return table(
        ["Qwen2.5-0.5B's architecture, random weights", "measured", "estimate"], body
    )


def train_every() -> int:
    """Optimizer steps of a generation."""
    from repro.with_trl import train

    return train.UPDATES
