# SPDX-License-Identifier: Apache-2.0
"""The table of docs/sampler-corrections.md, from samplers.json: which framework corrects
for the sampler how, read in its source and compared with `upref.transforms` once.
"""

from pathlib import Path
from typing import Any

from docs import record
from upref import markdown

FILE = Path(__file__).with_suffix(".json")
DEFAULT = "default"  # of a setting that a framework has unless another is chosen
READ = "read"  # in place of a difference: there is no function to run


def settings(repository: str = "") -> list[dict[str, Any]]:
    """Return the settings of a repository, or of all."""
    every = record.rows(FILE)
    return [row for row in every if repository in ("", row["repository"])]


def table() -> str:
    """Return a row for each setting."""
    rows = []
    for row in settings():
        repository, at = row["repository"], f"{row['commit']}/{row['file']}"
        name = repository.partition("/")[2]
        in_upref = f"`{row['transform']}(X)`" if row["transform"] else "none"
        for hyperparameter, value in row["hp"].items():
            in_upref += f", {hyperparameter}={value:.4g}"
        if "remark" in row:
            in_upref += f" ({row['remark']})"
        cells = (
            f"[{name}](https://github.com/{repository}/blob/{at})",
            f"`{row['setting']}`",
            row["default"],
            in_upref,
            row["difference"],
        )
        rows.append(cells)
    columns = ["framework", "setting", "default", "in upref", "difference"]
    return markdown.table(columns, rows)
