# SPDX-License-Identifier: Apache-2.0
"""upref: reference and verification of the policy-gradient objectives that train reasoning LLMs."""

from importlib import import_module

from upref import check
from upref.aggregate import Totals, aggregate, row_weights
from upref.capacity import capacity
from upref.diagnostics import diagnose
from upref.errors import InputError
from upref.registry import Objective, get, names, objective
from upref.rollouts import Rollouts
from upref.transforms import up, up_anchored

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Objective",
    "Rollouts",
    "Totals",
    "aggregate",
    "cap_map",
    "capacity",
    "check",
    "check_advantages",
    "check_kl",
    "derive",
    "diagnose",
    "get",
    "identify",
    "names",
    "objective",
    "row_weights",
    "up",
    "up_anchored",
]


LATE = {  # matplotlib and sympy are slow to import, and a trainer does not need the checks
    "cap_map": "upref.plots",
    "derive": "upref.derivation",
    "identify": "upref.check.identify",
    "check_advantages": "upref.check.advantages",
    "check_kl": "upref.check.kl",
}


def __getattr__(name: str):
    if name in LATE:
        return getattr(import_module(LATE[name]), name)
    raise AttributeError(f"module 'upref' has no attribute {name!r}")
