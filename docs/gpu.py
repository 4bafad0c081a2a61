# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/gpu.md, from benchmarks/gpu/results.json.

Its rows, made by benchmarks/gpu, have a `kind` ("steps", "suite", "sizes", ...), the number
`of` the recorded run that made them, from 0, and fields of the kind.
"""

import heapq
import re
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu import __main__ as gpu
from docs import record
from upref import markdown

RESULTS = Path(__file__).parent.parent / "benchmarks/gpu/results.json"
Rows = list[dict[str, Any]]


def rows(kind: str, **fields: Any) -> Rows:
    """Return the rows of a kind with these fields."""
    wanted = {"kind": kind} | fields
    found = []
    for row in record.rows(RESULTS).values():
        if all(row.get(name) == value for name, value in wanted.items()):
            found.append(row)
    return found


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
    # these say themselves on which GPU they ran
    apart = {row["of"] for row in rows("run") if "gpu" in row}
    runs = []
    for number, run in enumerate(record.read(RESULTS)):
        if number not in apart:
            runs.append(f"run {number + 1}, {run.date}, commit {run.commit}")
    # name, memory, driver, ...: the QUERY of benchmarks/gpu/facts.py
    driver = rows("facts", fact="nvidia-smi")[0]["out"].split(", ")[2]
    return (
        f"One {facts['gpu']} ({facts['bytes'] / 2**30:.1f} GiB), driver {driver}, CUDA {facts['cuda']}, "
        f"{facts['cores']} cores, Python {facts['python']}, {in_words(facts['versions'])}, "
        f"seed {facts['seed']}. {'; '.join(runs).capitalize()}."
    )


def in_words(versions: dict[str, str]) -> str:
    """Return the versions of packages as text, without those that were not installed."""
    return ", ".join(f"{name} {v}" for name, v in versions.items() if v)


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
    ends = ", ".join(f"{count} {status}" for status, count in counts.items())
    passed = [row for row in every if row["status"] == "passed"]
    failed = [row for row in every if row["status"] in ("failed", "could not run")]
    largest = max(passed, key=lambda row: row["error"])
    return "\n".join(
        [
            f"* Of {len(every)} cases: {ends}.",
            f"* Failed here and on a CPU: {case_ids(failed, fails_on_cpu=True)}.",
            f"* Failed here alone: {case_ids(failed, fails_on_cpu=False)}.",
            f"* Passed here alone: {case_ids(passed, fails_on_cpu=True)}.",
            f"* The largest error of a case that passed is {size(largest['error'])}, of "
            f"`{largest['case']}`.",
        ]
    )


def case_ids(cases: Rows, *, fails_on_cpu: bool) -> str:
    """Return the ids, as code, of the cases that fail on a CPU or of those that do not;
    "none" without one.
    """
    ids = [f"`{row['case']}`" for row in cases if row["fails_on_cpu"] == fails_on_cpu]
    return ", ".join(ids) or "none"


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
    every = [row for row in rows("losses") if not {"liger", "failed"} & row.keys()]
    ways = {
        "float64": "float64, eager",
        "traced": "float64, compiled without a code generator",
        "float32": "float32, eager",
        "compiled": "float32, compiled",
    }
    body = []
    for way, words in ways.items():
        errors = {row["objective"]: max(row[way]) for row in every if way in row}
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
        settings = [f"{name}={value}" for name, value in row["settings"].items()]
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


def measured_sizes(**fields: Any) -> Rows:
    """Return the rows of log-probability heads that have a time."""
    return [row for row in rows("sizes", **fields) if "milliseconds" in row]


def sizes() -> str:
    """Return tables of time, memory and error of log-probability heads at real sizes,
    and the time that the card leaves to all of them: one for each dtype, hidden size H
    and number N of tokens.
    """
    cases: dict[tuple[str, int, int], Rows] = {}
    for row in measured_sizes():
        cases.setdefault((row["dtype"], row["H"], row["N"]), []).append(row)
    tables = [heads_at(*case, measured) for case, measured in sorted(cases.items())]
    return "\n\n".join(tables)


def heads_at(dtype: str, hidden_size: int, tokens: int, measured: Rows) -> str:
    """Return the table of the heads that were measured at one size."""
    from benchmarks.gpu.limits import least_milliseconds

    limit = least_milliseconds(dtype, hidden_size, tokens)
    body = []
    for row in measured:
        cells = [
            row["who"],
            row["of"] + 1,
            f"{row['milliseconds']:.1f}",
            f"{row['milliseconds'] / limit:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
        ]
        for what in ("log-prob", "entropy", "dW"):
            error = row.get(f"error of {what}")
            cells.append("" if error is None else size(error))
        body.append(cells)
    head = [
        f"{dtype}, H = {hidden_size:,}, {tokens:,} tokens",
        "run",
        "ms",
        f"times the limit of {limit:.2g} ms",
        "GB",
        "log-prob off by",
        "entropy off by",
        "dW off by",
    ]
    return table(head, body)


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

    def most(what: str, phase: str) -> float:
        """Return the most bytes "allocated" or "reserved" in a phase of any process."""
        return max(row[what] for row in phases if row["phase"] == phase)

    steps = {step["step"]: step["data"] for step in again["steps"]}
    # the first step after a generation contains it
    step_seconds = [
        data["timing_s/step"]
        for number, data in steps.items()
        if number % train_every() != 1
    ]
    generation_seconds = [
        f"{row['seconds']:.0f}" for row in phases if row["phase"] == "generation"
    ]
    parity = max(data["actor/upref/parity_of_bound"] for data in steps.values())
    reserved = max(most("reserved", "training"), most("reserved", "generation"))
    body = [  # what, measured, estimate
        [
            "GB to train, at most",
            gigabytes(most("allocated", "training")),
            gigabytes(estimate["training"]),
        ],
        [
            "GB to generate 256 responses together, at most",
            gigabytes(most("allocated", "generation")),
            gigabytes(estimate["generating"]),
        ],
        ["GB that the allocator reserved, at most", gigabytes(reserved), ""],
        [
            "seconds to generate 256 responses of up to 512 tokens",
            ", ".join(generation_seconds),
            "",
        ],
        [
            "seconds of an optimizer step without generation",
            f"{min(step_seconds):.1f} to {max(step_seconds):.1f}",
            "",
        ],
        ["parity, of what rounding allows", f"{parity:.3f}", "below 1"],
        ["steps of the killed process", len(killed["steps"]), ""],
        [
            "steps of the same command, started again",
            len(steps) - len(killed["steps"]),
            "",
        ],
    ]
    head = ["Qwen2.5-0.5B's architecture, random weights", "measured", "estimate"]
    return f"{table(head, body)}\n\n{training_ratios()}"


def gigabytes(size: float) -> str:
    """Return a number of bytes in GB as text."""
    return f"{size / 1e9:.1f}"


def training_ratios() -> str:
    """Return a paragraph on the range of the ratios of the recorded steps, and on where
    parity was compared.

    Raises:
        AssertionError: no token is clipped, and parity was compared where a ratio is
            not 1.
    """
    steps = [step for row in rows("training") for step in row.get("steps", [])]
    logged = [step["data"] for step in steps]
    least = min(data["actor/upref/ratio/min"] for data in logged)
    most = max(data["actor/upref/ratio/max"] for data in logged)
    clips = [
        f"actor/upref/clip/{side}"
        for side in ("pos_high", "pos_low", "neg_high", "neg_low")
    ]
    clipped = sum(any(data[clip] for clip in clips) for data in logged)
    if clipped:
        return (
            f"Tokens are clipped in {clipped} of {len(logged)} recorded steps, whose ratios lie in "
            f"[{least:.3f}, {most:.3f}]; parity was compared on each micro-batch."
        )
    parity = {
        step["step"]: step["data"]["actor/upref/parity_of_bound"] for step in steps
    }
    # a step without a comparison repeats the last one
    compared = [n for n in sorted(parity) if parity[n] != parity.get(n - 1)]
    for step in steps:
        if step["step"] in compared:
            data = step["data"]
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

    Raises:
        ValueError: they ran on several GPUs.
    """
    every = rows("verl")
    [card] = {row["gpu"] for row in every}
    parts = [f"On {card}, with {in_words(every[0]['versions'])}."]
    trained = [row for row in every if row["steps"]]
    ended = [row for row in every if not row["steps"]]
    if trained:
        parts.append(trials_that_trained(trained))
    if ended:
        parts.append(trials_that_ended(ended))
    errors: dict[str, float] = {}
    for row in every:
        errors |= row.get("kernels", {})
    if errors:
        said = ", ".join(f"{name} by {size(error)}" for name, error in errors.items())
        parts.append(
            f"vLLM's kernels, launched by themselves, are off in bfloat16: {said}."
        )
    return "\n\n".join(parts)


def trials_that_trained(trained: Rows) -> str:
    """Return the table of the trials that logged a step, with what replay found."""
    body = []
    for row in trained:
        reports, wrong = "; ".join(row["report"]), "; ".join(row["wrong"])
        body.append([row["run"], len(row["steps"]), reports, wrong])
    return table(["trial", "steps", "what it reports", "wrong"], body)


def trials_that_ended(ended: Rows) -> str:
    """Return the table of the trials that logged no step: a row for each stage of the
    start, with its seconds in each trial.
    """
    stages = dict.fromkeys(stage for row in ended for stage in row["start"])
    body = []
    for stage in stages:
        body.append([stage, *(row["start"].get(stage, "") for row in ended)])
    body.append(["it was ended", *(row["seconds"] for row in ended)])
    head = ["seconds after the start of verl", *(row["run"] for row in ended)]
    return table(head, body)


def asks() -> str:
    """Return the table of what to ask of benchmarks.gpu in so many minutes, by the
    times of recorded runs.

    Raises:
        AssertionError: what is asked takes longer than its minutes.
    """
    took: dict[str, float] = {}
    for run in rows("run"):
        took |= {name: part["seconds"] for name, part in run["parts"].items()}
    body = []
    for minutes, asked in gpu.ASKS.items():
        seconds = seconds_of(asked, took)
        assert seconds < 60 * minutes, (minutes, seconds)
        command = " ".join(["python -m benchmarks.gpu --out FOLDER", *asked])
        body.append([minutes, f"`{command}`", f"{seconds:.0f}"])
    return table(["minutes", "command", "seconds"], body)


def seconds_of(asked: tuple[str, ...], took: dict[str, float]) -> float:
    """Return how long a run of some parts takes on the machine of the records.

    Args:
        asked: the beginnings of the names of the parts; () for all.
        took: name of a part -> its seconds in a recorded run.
    """
    parts = gpu.parts()
    names = [name for name in parts if not asked or name.startswith(asked)]
    cores = rows("facts", fact="machine")[0]["cores"]
    free = [0.0] * cores  # when each core is free; the next part goes to the first
    for name in names:
        if name not in gpu.ALONE and name in took:
            heapq.heappush(free, heapq.heappop(free) + took[name])
    # one that was ended at its limit may take its new one
    alone = [max(took[n], parts[n].limit) for n in gpu.ALONE if n in names]
    return max(free) + sum(alone)


def in_bfloat16() -> dict[tuple[str, int, int], float]:
    """Return (head, hidden size, tokens) -> milliseconds, in bfloat16."""
    return {
        (row["who"], row["H"], row["N"]): row["milliseconds"]
        for row in measured_sizes(dtype="bfloat16")
    }


def limits() -> str:
    """Return the table of what upref.hidden needs of the card, counted, beside what it
    took.
    """
    from benchmarks.gpu.limits import counted

    return counted(in_bfloat16())


def times_of_verl(head: str) -> list[float]:
    """Return the time of a head beside that of verl's fused one, in bfloat16, at each
    size that both have.
    """
    milliseconds = in_bfloat16()
    ratios = []
    for (name, hidden_size, tokens), own in milliseconds.items():
        of_verl = milliseconds.get(("verl FusedLinearForPPO", hidden_size, tokens))
        if name == head and of_verl is not None:
            ratios.append(own / of_verl)
    return ratios


def hidden_in_bfloat16() -> str:
    """Return the sentence of docs/verl.md on the time of upref.hidden in bfloat16."""
    plain = times_of_verl("upref.hidden")
    chunked = times_of_verl("upref.hidden, chunk 2^26")
    return (
        f"In bfloat16, in which verl trains, it takes {min(plain):.1f} to {max(plain):.1f} times "
        "the time of verl's fused head by default, and "
        f"{min(chunked):.1f} to {max(chunked):.1f} times with `chunk=2**26`."
    )


def train_every() -> int:
    """Return how many optimizer steps train on one generation."""
    from repro.with_trl import train

    return train.UPDATES
