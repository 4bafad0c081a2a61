# SPDX-License-Identifier: Apache-2.0
"""overrides.json: what a run was asked for and why, for its next start and for the
report.
"""

import json
from pathlib import Path
from typing import Any

from repro.with_verl.config.compose import Run
from upref.files import write_atomically


def checkpoints(folder: Path) -> Path:
    """Return where a run keeps its checkpoints: the last trainer.default_local_dir of
    its overrides.json, else `checkpoints` in its folder.
    """
    key = "trainer.default_local_dir="
    try:
        saved = json.loads((folder / "overrides.json").read_text(encoding="utf-8"))
        lines = [row["override"] for row in saved["overrides"]]
    except (OSError, ValueError, KeyError):
        lines = []
    given = [line.removeprefix(key) for line in lines if line.startswith(key)]
    if not given:
        return folder / "checkpoints"
    return Path(given[-1].strip("'\"")).expanduser()


def save(run: Run, where: Path, **facts: Any) -> Path:
    """Write the settings of a run and further facts to overrides.json in the folder,
    and return its path.
    """
    rows = [{"override": line, "source": run.source(line)} for line in run.overrides]
    saved = {
        "objective": run.objective,
        "scale": run.scale.name,
        "name": run.name,
        "env": run.env,
    } | facts
    where.mkdir(parents=True, exist_ok=True)
    path = where / "overrides.json"
    write_atomically(
        path,
        json.dumps(saved | {"overrides": rows}, indent=1, ensure_ascii=False) + "\n",
    )
    return path
