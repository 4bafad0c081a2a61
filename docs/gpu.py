# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/gpu.md, from benchmarks/gpu/results.json.

Its rows, made by benchmarks/gpu, have a `kind` ("steps", "suite", "sizes", ...), the number
`of` the recorded run that made them, from 0, and fields of the kind.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu import __main__ as gpu
from docs import record
from upref import markdown

RESULTS = Path(__file__).parent.parent / "benchmarks/gpu/results.json"
Rows = list[dict[str, Any]]


def rows(kind: str, **fields: Any) -> Rows:
    """Return the rows of a kind with these fields."""
    return [
        row
        for row in record.rows(RESULTS).values()
        if row["kind"] == kind and all(row.get(k) == v for k, v in fields.items())
    ]


def table(head: list[str], body: list[list[Any]]) -> str:
    """Return a table in Markdown, with cells that are escaped."""
    return markdown.table(head, [list(map(cell, row)) for row in body])


def cell(x: Any) -> str:
    """Return the text of a cell, without what would end it."""
    return str(x).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def size(x: float) -> str:
    """Return a number with two digits, `1.5e-06`."""
    return f"{x:.1e}"


# ---- the tables ----------------------------------------------------------------------
def machine() -> str:
    """Return sentences on the machine, the days, and the versions of the runs."""
    facts = rows("facts", fact="machine")[0]
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    # these say themselves on which GPU they ran
    apart = {row["of"] + 1 for row in rows("run") if "gpu" in row}
    runs = "; ".join(
        f"run {n}, {run.date}, commit {run.commit}"
        for n, run in enumerate(record.read(RESULTS), 1)
        if n not in apart
    )
    driver = rows("facts", fact="nvidia-smi")[0]["out"].split(", ")[2]
    return (
        f"One {facts['gpu']} ({facts['bytes'] / 2**30:.1f} GiB), driver {driver}, CUDA {facts['cuda']}, "
        f"{facts['cores']} cores, Python {facts['python']}, {versions}, seed {facts['seed']}. {runs.capitalize()}."
    )


def tests() -> str:
    """Return how many tests passed, and which did not."""
    every = rows("tests")
    bad = [row["test"] for row in every if row["outcome"] not in ("passed", "skipped")]
    passed = sum(row["outcome"] == "passed" for row in every)
    text = f"{passed} of {len(every)} tests of tests/gpu passed"
    if bad:
        text += f": {', '.join(bad)} did not"
    return f"{text}."


def steps() -> str:
    """Return the table of verdicts on training steps of models on the GPU."""
    body = []
    for row in rows("steps"):
        if "agrees" not in row:
            continue
        verdict = "agrees" if row["agrees"] else "differs"
        if row["agrees"] != row["right"]:
            verdict += ": wrong"
        cells = [
            row["part"],
            row["model"],
            row["step"],
            verdict,
            size(row["error"]) if "error" in row else "",
            row.get("cause", ""),
            f"{row['seconds']:.1f}",
        ]
        body.append(cells)
    head = ["by", "model", "step", "verdict", "error", "cause", "seconds"]
    tf32 = rows("steps", part="TF32")[0]["error"]
    return f"{table(head, body)}\n\nIn TF32 the gradient of the recurrent model is off by {size(tf32)}."


def suite() -> str:
    """Return a list of how the cases of the conformance suite ended with TRL's trainer
    on the GPU.
    """
    every = rows("suite")
    counts = Counter(row["status"] for row in every)
    passed = [row for row in every if row["status"] == "passed"]
    failed = [row for row in every if row["status"] in ("failed", "could not run")]
    largest = max(passed, key=lambda row: row["error"])
    ends = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join(
        [
            f"* Of {len(every)} cases: {ends}.",
            f"* Failed here and on a CPU: {case_ids(r for r in failed if r['fails_on_cpu'])}.",
            f"* Failed here alone: {case_ids(r for r in failed if not r['fails_on_cpu'])}.",
            f"* Passed here alone: {case_ids(r for r in passed if r['fails_on_cpu'])}.",
            f"* The largest error of a case that passed is {size(largest['error'])}, of "
            f"`{largest['case']}`.",
        ]
    )


def case_ids(cases: Iterable[dict[str, Any]]) -> str:
    """Return the ids of cases as code, or "none"."""
    return ", ".join(f"`{row['case']}`" for row in cases) or "none"


def samplers() -> str:
    """Return the table of what replay's gap finds of samplers and trainers on the GPU,
    and a sentence for each cause.
    """
    body = []
    sentences: dict[str, str] = {}
    for row in rows("samplers"):
        if row["said"]:
            sentences.setdefault(row["cause"], row["said"][0])
        cells = [
            row["sampler"],
            f"{row['mean_abs']:.2g}",
            f"{row['largest']:.2g}",
            f"{row['rho_mean']:.3f} ± {row['rho_se']:.3f}",
            "none" if row["healthy"] else "fails",
            "" if row["cause"] == "agree" else f"`{row['cause']}`",
        ]
        body.append(cells)
    head = ["sampler, trainer", "mean abs(d)", "largest", "E[ρ]", "failure", "cause"]
    lines = [f"* `{cause}`: {cell(text)}" for cause, text in sentences.items()]
    return "\n".join([table(head, body), "", *lines])


def kernels() -> str:
    """Return the table of verdicts of check_logprobs on functions that compute on the
    GPU.
    """
    body = []
    for row in rows("kernels"):
        if "failed" in row:
            verdict = "not checked"
            notes = row["failed"].removeprefix("InputError: ")
        else:
            verdict = judged(row)
            notes = "; ".join(
                line.removeprefix("note  ").removeprefix("FAIL  ")
                for line in row["text"].splitlines()
                if line.startswith(("note", "FAIL"))
            )
        body.append([row["function"], row["dtype"], verdict, notes])
    return table(["function", "dtype", "verdict", "what the report notes"], body)


def judged(row: dict[str, Any]) -> str:
    """Return "agrees" or "differs"; "stopped by" the name of an exception that ended
    the check, which says nothing of numbers.
    """
    raised = re.search(r"found +.* raised (\w+)", row["text"])
    if raised and "on a batch of this oracle" in row["text"]:
        return f"stopped by {raised[1]}"
    return "agrees" if row["agrees"] else "differs"


def losses() -> str:
    """Return the table of the largest errors of all objectives, eager and compiled."""
    every = [
        row for row in rows("losses") if "liger" not in row and "failed" not in row
    ]
    body = []
    for key, words in (
        ("float64", "float64, eager"),
        ("traced", "float64, compiled without a code generator"),
        ("float32", "float32, eager"),
        ("compiled", "float32, compiled"),
    ):
        errors = {row["objective"]: max(row[key]) for row in every if key in row}
        if errors:
            worst = max(errors, key=errors.__getitem__)
            body.append([words, len(errors), size(errors[worst]), worst])
    head = ["", "objectives", "largest error of loss or gradient", "of"]
    return table(head, body)


def liger() -> str:
    """Return the table of verdicts of upref.check on Liger's Triton loss."""
    body = []
    for row in rows("losses"):
        if "liger" not in row or row["objective"] == "identify":
            continue
        settings = [f"{k}={v}" for k, v in row["settings"].items()]
        loss_type = ", ".join([row["liger"], *settings])
        body.append([loss_type, row["objective"], verdict_on_liger(row)])
    return table(["loss_type", "compared with", "verdict"], body)


def verdict_on_liger(row: dict[str, Any]) -> str:
    """Return the verdict of a row, with the known causes of a difference."""
    if row.get("agrees"):
        return "agrees"
    report = row.get("text") or row.get("failed", "")
    causes = [
        line.split("likely", 1)[1].strip()
        for line in report.splitlines()
        if "likely" in line
    ]
    known = [cause for cause in causes if not cause.startswith("no known cause")]
    return f"differs: {'; '.join(known)}"


def sizes() -> str:
    """Return tables of time, memory and error of log-probability heads at real sizes,
    and the time that the card leaves to all of them: one for each dtype, hidden size H
    and number N of tokens.
    """
    from benchmarks.gpu.limits import least_milliseconds

    parts = []
    cases: dict[tuple[str, int, int], Rows] = {}
    for row in rows("sizes"):
        if "failed" not in row and "milliseconds" in row:
            cases.setdefault((row["dtype"], row["H"], row["N"]), []).append(row)
    for (dtype, H, N), measured in sorted(cases.items()):
        body = []
        limit = least_milliseconds(dtype, H, N)
        for row in measured:
            errors = [row.get(f"error of {k}") for k in ("log-prob", "entropy", "dW")]
            cells = [
                row["who"],
                row["of"] + 1,
                f"{row['milliseconds']:.1f}",
                f"{row['milliseconds'] / limit:.1f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
                *("" if error is None else size(error) for error in errors),
            ]
            body.append(cells)
        head = [
            f"{dtype}, H = {H:,}, {N:,} tokens",
            "run",
            "ms",
            f"times the limit of {limit:.2g} ms",
            "GB",
            "log-prob off by",
            "entropy off by",
            "dW off by",
        ]
        parts.append(table(head, body))
    return "\n\n".join(parts)


def launchers() -> str:
    """Return the table of what the launchers of repro/ choose on this machine."""
    body = []
    for name in (
        "ladder",
        "repro/run.sh up_dapo --dry-run",
        "repro/run.sh up_dapo gpu1",
    ):
        row = rows("facts", fact=name)[0]
        lines = (row["err"].strip() or row["out"].strip()).splitlines()
        last_line = lines[-1][:300] if lines else ""
        body.append([f"`{name}`", row["status"], last_line])
    return table(["command", "status", "last line"], body)


def training() -> str:
    """Return the table of what the rung `trl` took at its real size, beside its
    estimate, and a paragraph on the ratios.
    """
    runs = {row["run"]: row for row in rows("training") if "run" in row}
    estimate = rows("training", estimate="memory.py")[0]
    killed = runs["up_dapo, killed"]
    again = runs["up_dapo, the same command again"]
    phases = [*killed["phases"], *again["phases"]]

    def most(phase: str, what: str = "allocated") -> float:
        """Return the most GB in a phase of any process."""
        return max(p[what] for p in phases if p["phase"] == phase) / 1e9

    steps = {step["step"]: step["data"] for step in again["steps"]}
    # the first step after a generation contains it
    step_seconds = [
        data["timing_s/step"]
        for number, data in steps.items()
        if number % train_every() != 1
    ]
    generation_seconds = [p["seconds"] for p in phases if p["phase"] == "generation"]
    parity = max(data["actor/upref/parity_of_bound"] for data in steps.values())
    reserved = max(most(phase, "reserved") for phase in ("training", "generation"))
    # what -> (measured, estimate)
    numbers = {
        "GB to train, at most": (
            f"{most('training'):.1f}",
            f"{estimate['training'] / 1e9:.1f}",
        ),
        "GB to generate 256 responses together, at most": (
            f"{most('generation'):.1f}",
            f"{estimate['generating'] / 1e9:.1f}",
        ),
        "GB that the allocator reserved, at most": (f"{reserved:.1f}", ""),
        "seconds to generate 256 responses of up to 512 tokens": (
            ", ".join(f"{seconds:.0f}" for seconds in generation_seconds),
            "",
        ),
        "seconds of an optimizer step without generation": (
            f"{min(step_seconds):.1f} to {max(step_seconds):.1f}",
            "",
        ),
        "parity, of what rounding allows": (f"{parity:.3f}", "below 1"),
        "steps of the killed process": (len(killed["steps"]), ""),
        "steps of the same command, started again": (
            len(steps) - len(killed["steps"]),
            "",
        ),
    }
    head = ["Qwen2.5-0.5B's architecture, random weights", "measured", "estimate"]
    body = [[what, *cells] for what, cells in numbers.items()]
    return f"{table(head, body)}\n\n{training_ratios()}"


def training_ratios() -> str:
    """Return a paragraph on the range of the ratios of the recorded steps, and on where
    parity was compared.
    """
    logged = [
        (step["step"], step["data"])
        for row in rows("training")
        for step in row.get("steps", [])
    ]
    least = min(data["actor/upref/ratio/min"] for _, data in logged)
    most = max(data["actor/upref/ratio/max"] for _, data in logged)
    clips = ("pos_high", "pos_low", "neg_high", "neg_low")
    outside = sum(any(d[f"actor/upref/clip/{c}"] for c in clips) for _, d in logged)
    if outside:
        return (
            f"Tokens are clipped in {outside} of {len(logged)} recorded steps, whose ratios lie in "
            f"[{least:.3f}, {most:.3f}]; parity was compared on each micro-batch."
        )
    parity = {number: data["actor/upref/parity_of_bound"] for number, data in logged}
    # a step without a comparison repeats the last one
    compared = [n for n in sorted(parity) if parity[n] != parity.get(n - 1)]
    for number, data in logged:
        if number in compared:
            assert data["actor/upref/ratio/min"] == data["actor/upref/ratio/max"] == 1
    listed = " and ".join(map(str, compared))
    return (
        f"In all recorded steps every ratio lies in [{least:.3f}, {most:.3f}], so no token is "
        "clipped: these steps show nothing of what sets UP-DAPO's clip apart from DAPO's. "
        f"Parity was compared in steps {listed} alone, on the first micro-batches of a "
        "process, where every ratio is 1 and almost all objectives have one gradient."
    )


def verl() -> str:
    """Return how far the trials of verl's trainer came, and what replay found in them:
    a table of those that trained, a table of those that did not.
    """
    every = rows("verl")
    parts = [
        f"On {of_one(every, 'gpu')}, with "
        + ", ".join(f"{k} {v}" for k, v in every[0]["versions"].items() if v)
        + "."
    ]
    trained = [row for row in every if row["steps"]]
    if trained:
        head = ["trial", "steps", "what it reports", "wrong"]
        body = [
            [r["run"], len(r["steps"]), "; ".join(r["report"]), "; ".join(r["wrong"])]
            for r in trained
        ]
        parts.append(table(head, body))
    if ended := [row for row in every if not row["steps"]]:
        names = list(dict.fromkeys(name for row in ended for name in row["start"]))
        body = [
            [name, *(row["start"].get(name, "") for row in ended)] for name in names
        ]
        body.append(["it was ended", *(row["seconds"] for row in ended)])
        head = ["seconds after the start of verl", *(row["run"] for row in ended)]
        parts.append(table(head, body))
    errors = {k: v for row in every for k, v in row.get("kernels", {}).items()}
    if errors:
        said = ", ".join(f"{name} by {size(error)}" for name, error in errors.items())
        parts.append(
            f"vLLM's kernels, launched by themselves, are off in bfloat16: {said}."
        )
    return "\n\n".join(parts)


def of_one(every: Rows, field: str) -> Any:
    """Return the value that all these rows have in a field.

    Raises:
        ValueError: they have several.
    """
    [value] = {row[field] for row in every}
    return value


def asks() -> str:
    """Return the table of what to ask of benchmarks.gpu in so many minutes, by the
    times of recorded runs.

    Raises:
        AssertionError: what is asked takes longer than its minutes.
    """
    took: dict[str, float] = {}
    for run in rows("run"):
        took |= {name: part["seconds"] for name, part in run["parts"].items()}
    cores = rows("facts", fact="machine")[0]["cores"]
    every = gpu.parts()
    body = []
    for minutes, asked in gpu.ASKS.items():
        names = [n for n in every if not asked or n.startswith(asked)]
        free = [0.0] * cores  # when each core is free; the next part goes to the first
        for name in names:
            if name not in gpu.ALONE and name in took:
                heapq.heappush(free, heapq.heappop(free) + took[name])
        # one that was ended at its limit may take its new one
        alone = [max(took[n], every[n].limit) for n in gpu.ALONE if n in names]
        seconds = max(free) + sum(alone)
        assert seconds < 60 * minutes, (minutes, seconds)
        command = " ".join(["python -m benchmarks.gpu --out FOLDER", *asked])
        body.append([minutes, f"`{command}`", f"{seconds:.0f}"])
    return table(["minutes", "command", "seconds"], body)


def in_bfloat16() -> dict[tuple[str, int, int], float]:
    """Return (head, hidden size, tokens) -> milliseconds, in bfloat16."""
    return {
        (row["who"], row["H"], row["N"]): row["milliseconds"]
        for row in rows("sizes", dtype="bfloat16")
        if "failed" not in row and "milliseconds" in row
    }


def limits() -> str:
    """Return the table of what upref.hidden needs of the card, counted, beside what it
    took.
    """
    from benchmarks.gpu.limits import counted

    return counted(in_bfloat16())


def hidden_in_bfloat16() -> str:
    """Return the sentence of docs/verl.md on the time of upref.hidden in bfloat16."""
    milliseconds = in_bfloat16()

    def times(who: str) -> list[float]:
        """Return the time of this head beside verl's, at each size that both have."""
        return [
            ms / milliseconds["verl FusedLinearForPPO", H, N]
            for (name, H, N), ms in milliseconds.items()
            if name == who and ("verl FusedLinearForPPO", H, N) in milliseconds
        ]

    plain, chunked = times("upref.hidden"), times("upref.hidden, chunk 2^26")
    return (
        f"In bfloat16, in which verl trains, it takes {min(plain):.1f} to {max(plain):.1f} times "
        "the time of verl's fused head by default, and "
        f"{min(chunked):.1f} to {max(chunked):.1f} times with `chunk=2**26`."
    )


def train_every() -> int:
    """Return how many optimizer steps train on one generation."""
    from repro.with_trl import train

    return train.UPDATES
