# SPDX-License-Identifier: Apache-2.0
"""What was registered, when: registration.json beside a plan.

It names the commit that holds plan and rule, and the digest of each file that decides
what the experiment is.
"""

import json
from pathlib import Path
from typing import Any

from repro.mini import files
from repro.mini.experiment.plan import MINI, Plan
from repro.mini.experiment.records import load as load_records
from upref.errors import InputError

# Beside the plan's own files: what is trained in place of an objective. What is said of the
# runs, and how rates are chosen, is this engine as it stands in the registered commit.
DECIDE = ("train/halves.py", "train/faults.py")
OWN = ("plan.toml", "power.md", "runs.sha256")


def load(folder: Path) -> dict[str, Any]:
    """Return the commit and the digests; {} if nothing is registered yet."""
    path = folder / "registration.json"
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def register(plan: Plan, commit: str) -> Path:
    """Write registration.json, once, before any run; return its path.

    Args:
        plan: of a folder of its own.
        commit: that holds plan and rule.

    Raises:
        InputError: it is registered, or has runs.
    """
    path = plan.folder / "registration.json"
    if path.exists() or load_records(plan.results):
        raise InputError(
            f"{plan.folder} is registered or has runs already: a registration is made once, before any run."
        )
    text = json.dumps({"commit": commit, "sha256": digests(plan)}, indent=1) + "\n"
    files.write_atomically(path, text.encode())
    return path


def digests(plan: Plan) -> dict[str, str]:
    """Return path -> sha256 of every file that decides what the experiment is. A path
    is below the plan's folder (OWN, where it is there), or below repro/mini (DECIDE).
    """
    found = {name: files.sha256(MINI / name) for name in DECIDE}
    for name in OWN:
        if (plan.folder / name).exists():
            found[name] = files.sha256(plan.folder / name)
    return found


def changed(folder: Path) -> list[str]:
    """Return the paths of the registered files that are gone or differ from their
    digests; [] without a registration.

    Args:
        folder: of the registration; its paths are below it, or below repro/mini.
    """
    found = []
    for name, digest in load(folder).get("sha256", {}).items():
        path = folder / name if (folder / name).exists() else MINI / name
        if not path.exists() or files.sha256(path) != digest:
            found.append(name)
    return found
