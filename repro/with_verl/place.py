# SPDX-License-Identifier: Apache-2.0
"""Where this checkout is, and how a process that is started from here, or by Ray on
another machine, finds it.
"""

import os
from collections.abc import Collection
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = ROOT / "runs"  # not in git
RESULTS = HERE / "results"
EXTERNAL_MODULES = "VERL_USE_EXTERNAL_MODULES"  # what every process of verl imports


def pythonpath() -> str:
    """Return a PYTHONPATH with this checkout first, and then the user's own entries."""
    given = [
        p
        for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if p and p != str(ROOT)
    ]
    return os.pathsep.join([str(ROOT), *given])


def modules_of_user(ours: Collection[str]) -> list[str]:
    """Return the modules that the user has every process of verl import, in order,
    without those of `ours`.
    """
    given = os.environ.get(EXTERNAL_MODULES, "").split(",")
    return [module for module in given if module and module not in ours]
