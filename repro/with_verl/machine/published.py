# SPDX-License-Identifier: Apache-2.0
"""The estimate's formulas beside published runs:
`python -m repro.with_verl.machine.published` writes ESTIMATES.md.

published.toml has the runs, each with its source. A length that a source does not give
is set so that the training phase agrees; then the other phases are what the formulas
predict (marked *).
"""

import tomllib
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from repro.with_verl.config.model import shape_of
from repro.with_verl.machine import estimate as e
from upref import markdown
from upref.files import write_atomically

COLUMNS = ("run", "source", "GPUs", "mean response", "phase")
SECONDS = ("published, s", "formula, s", "ratio")


def phases(run: dict[str, Any], length: float) -> dict[str, float]:
    """Seconds of a run's phases by the formulas of estimate.py."""
    shape, gpu, n = shape_of(run["model"]), e.gpu_of(run["gpu"]), run["gpus"]
    longest, prompt, tp = run["longest"], run.get("prompt", e.PROMPT), run["tp"]
    kv_tokens = (0.7 * gpu.memory * e.GB - 2 * shape.params / tp) / (
        4 * shape.layers * shape.kv_heads * shape.head_dim / tp
    )
    at_once = min(run.get("at_once", 1024), kv_tokens / (prompt + 0.7 * length))
    forwards, passes = run.get("forwards", 1), run.get("passes", 4)
    found = {
        "sampling": e.sampling(
            shape, gpu, tp, run["responses"], n // tp, at_once, prompt, length, longest
        ),
        **e.updating(
            shape, gpu, n, run["responses"], prompt, length, longest, forwards, passes
        ),
    }
    return found | {"step": sum(found.values()) + 2 * shape.params / e.LINK + e.BETWEEN}


def implied(run: dict[str, Any]) -> float:
    """The length at which the training phase takes what was published."""
    low, high = 1.0, float(run["longest"])
    for _ in range(50):
        mid = (low + high) / 2
        low, high = (
            (mid, high)
            if phases(run, mid)["training"] < run["seconds"]["training"]
            else (low, mid)
        )
    return low


def compare() -> list[tuple[dict[str, Any], float, str, float, float]]:
    """(run, length, phase, published seconds, formula's seconds) of all that is not
    fitted.
    """
    runs = tomllib.loads(
        Path(__file__).with_name("published.toml").read_text(encoding="utf-8")
    )["run"]
    rows = []
    for run in runs:
        length = run.get("length") or implied(run)
        found = phases(run, length)
        wanted = [p for p in run["seconds"] if "length" in run or p != "training"]
        rows += [(run, length, p, run["seconds"][p], found[p]) for p in wanted]
    return rows


def table() -> str:
    rows = []
    for run, length, phase, there, here in compare():
        said = f"{length:,.0f}{'' if 'length' in run else ' *'}"
        cells = (
            run["name"],
            run["source"],
            f"{run['gpus']} x {run['gpu']}",
            said,
            phase,
        )
        seconds = f"{there:,.0f}", f"{here:,.0f}", f"{here / there:.2f}"
        rows.append([*cells, *seconds])
    return markdown.table([*COLUMNS, *SECONDS], rows)


def summary() -> str:
    """How far the formulas are from the whole steps."""
    ratios = [here / there for *_, phase, there, here in compare() if phase == "step"]
    mid = geometric_mean(ratios)
    return f"Whole steps: {len(ratios)}, ratios {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mid:.2f}."


SCALES = (
    "gpu1_24gb",
    "gpu1",
    "gpu8",
    "paper_math",
    "paper_geo3k",
    "paper_gspo",
    "paper_dapo",
)


def scales() -> str:
    """What each scale costs before it starts, with the objective of this project that
    it is for.
    """
    from repro.with_verl.config.compose import compose
    from repro.with_verl.config.scales import load_scale
    from repro.with_verl.config.validate import validate
    from repro.with_verl.machine.costs import price, save_hourly

    columns = ["scale", "GPUs", "seconds a step", "steps", "hours", "GPU-hours"]
    columns += ["dollars", "GB to train", "GB to sample"]
    rows = []
    scales = [
        (name, flash)
        for name in SCALES
        for flash in ((True, False) if load_scale(name).without_flash else (True,))
    ]
    for name, flash in scales:
        objective = {
            "paper_math": "up_grpo",
            "paper_geo3k": "up_grpo",
            "paper_gspo": "up_gspo",
        }.get(name, "up_dapo")
        gpu = e.gpu_of("4090" if name == "gpu1_24gb" else "H100")
        run = compose(objective, name, flash=flash)
        cfg = validate(run)
        # as a dry run prints it
        x = save_hourly(run, cfg, price(cfg, gpu, load_scale(name).gpu_gb * e.GB))
        title = f"`{name}`, {objective}" + ("" if flash else ", without flash-attn")
        cells = [
            title,
            f"{x.gpus} x {gpu.name}",
            f"{x.step_seconds:,.0f}",
            f"{x.steps:,}",
        ]
        cells += [
            f"{n:,.0f}"
            for n in (x.hours, x.gpu_hours, x.dollars, x.train / e.GB, x.rollout / e.GB)
        ]
        rows.append(cells)
    return markdown.table(columns, rows)


PAGE = """# What a run costs, by arithmetic

Written by `python -m repro.with_verl.machine.published`. **Nothing here was measured by this project**: the formulas of
[machine/estimate.py](machine/estimate.py) assume responses of half the longest length, and after two steps a run prints
the prediction again from what it measured. Prices are those of [machine/gpus.toml](machine/gpus.toml); edit them.
The rung `trl`, which is no scale of verl, did run on an H100, with random weights:
[its memory and seconds, with its own arithmetic](../../docs/gpu.md#training-in-trl). It took less memory than that.

{scales}

## The formulas beside published runs

Sources: [machine/published.toml](machine/published.toml). A length with * is not published: it is the one at which the
training phase agrees, and the other phases are then predictions. The shares of the peak were set on these same runs.

{table}

{summary}
"""

if __name__ == "__main__":
    page = Path(__file__).resolve().parents[1] / "ESTIMATES.md"
    write_atomically(
        page, PAGE.format(scales=scales(), table=table(), summary=summary())
    )
    print(f"{page.name}: {summary()}")
