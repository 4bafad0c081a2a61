# SPDX-License-Identifier: Apache-2.0
"""The estimate's formulas beside published runs: `python -m repro.with_verl.machine.published` prints the table.

published.toml has the runs, each with its source. A length that a source does not give is set so that the training
phase agrees; then the other phases are what the formulas predict (marked *).
"""

import tomllib
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from repro.with_verl.config.model import shape_of
from repro.with_verl.machine import estimate as e

HEAD = "| run | source | GPUs | mean response | phase | published, s | formula, s | ratio |\n" + "|---" * 8 + "|"


def phases(run: dict[str, Any], length: float) -> dict[str, float]:
    """Seconds of a run's phases by the formulas of estimate.py."""
    shape, gpu, n = shape_of(run["model"]), e.gpu_of(run["gpu"]), run["gpus"]
    longest, prompt, tp = run["longest"], run.get("prompt", e.PROMPT), run["tp"]
    kv_tokens = (0.7 * gpu.memory * e.GB - 2 * shape.params / tp) / (
        4 * shape.layers * shape.kv_heads * shape.head_dim / tp
    )
    at_once = min(run.get("at_once", 1024), kv_tokens / (prompt + 0.7 * length))
    tokens = run["responses"] * (prompt + length)
    context = prompt + longest / (1 + longest / length)
    work = tokens * (2 * shape.active + 4 * shape.layers * shape.heads * shape.head_dim * context)
    pace = n * gpu.tflops * 1e12 * (e.EXPERTS if shape.experts else 1)
    found = {
        "sampling": e.sampling(shape, gpu, tp, run["responses"], n // tp, at_once, prompt, length, longest),
        "log-probabilities": run.get("forwards", 1) * work / (pace * e.FORWARD),
        "training": run.get("passes", 4) * work / (pace * e.TRAIN),
    }
    return found | {"step": sum(found.values()) + 2 * shape.params / e.LINK + e.BETWEEN}


def implied(run: dict[str, Any]) -> float:
    """The length at which the training phase takes what was published."""
    low, high = 1.0, float(run["longest"])
    for _ in range(50):
        mid = (low + high) / 2
        low, high = (mid, high) if phases(run, mid)["training"] < run["seconds"]["training"] else (low, mid)
    return low


def compare() -> list[tuple[dict[str, Any], float, str, float, float]]:
    """(run, length, phase, published seconds, formula's seconds) of all that is not fitted."""
    runs = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))["run"]
    rows = []
    for run in runs:
        length = run.get("length") or implied(run)
        found = phases(run, length)
        wanted = [p for p in run["seconds"] if "length" in run or p != "training"]
        rows += [(run, length, p, run["seconds"][p], found[p]) for p in wanted]
    return rows


def table() -> str:
    lines = [HEAD]
    for run, length, phase, there, here in compare():
        said = f"{length:,.0f}{'' if 'length' in run else ' *'}"
        cells = (run["name"], run["source"], f"{run['gpus']} x {run['gpu']}", said, phase)
        lines.append(f"| {' | '.join(map(str, cells))} | {there:,.0f} | {here:,.0f} | {here / there:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    ratios = [here / there for *_, phase, there, here in compare() if phase == "step"]
    print(table())
    print(
        f"whole steps: {len(ratios)}, ratios {min(ratios):.2f} to {max(ratios):.2f}, "
        f"geometric mean {geometric_mean(ratios):.2f}"
    )
