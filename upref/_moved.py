# SPDX-License-Identifier: Apache-2.0
"""Old import paths: each still works in 0.x, with a DeprecationWarning, until the next minor version."""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "upref.atlas": "upref.weights.atlas",
    "upref.cap": "upref.weights.capacity",
    "upref.claims": "upref.paper.claims",
    "upref.curve": "upref.weights.curve",
    "upref.learn": "upref.course",
    "upref.losses": "upref.foreign",
    "upref.parity": "upref.integrations.parity",
    "upref.plots": "upref.weights.plots",
    "upref.regimes": "upref.weights.batches",
    "upref.table": "upref.paper.grim",
    "upref.trl": "upref.integrations.trl",
    "upref.verify.audit": "upref.audits",
    "upref.verify.identify": "upref.identification.identify",
    "upref.verify.identity": "upref.identification.identification",
    "upref.verify.pytest_plugin": "upref.integrations.pytest_plugin",
    "upref.verify.slips": "upref.verify.faults.losses",
    "upref.verl_plugin": "upref.integrations.verl",
}


class Moved(MetaPathFinder, Loader):
    """Finds the modules of MOVED, and what is in them, under their old names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new(fullname) else None

    def create_module(self, spec: ModuleSpec) -> None:
        """The default module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        new = _new(module.__name__)
        assert new
        warnings.warn(f"{module.__name__} has moved to {new}", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def _new(name: str) -> str | None:
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def install() -> None:
    """Put the finder first: `upref.losses.load` must not be found a second time beside `upref.foreign.load`."""
    if not any(isinstance(f, Moved) for f in sys.meta_path):
        sys.meta_path.insert(0, Moved())
