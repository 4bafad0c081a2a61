# SPDX-License-Identifier: Apache-2.0
"""upref: reference and verification of the policy-gradient objectives that train reasoning LLMs."""

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
    "names",
    "objective",
    "row_weights",
    "up",
    "up_anchored",
]


def __getattr__(name: str):
    """Looked up late: matplotlib and sympy are slow to import, and a trainer does not need the checks."""
    if name == "cap_map":
        from upref.plots import cap_map

        return cap_map
    if name == "derive":
        from upref.derivation import derive

        return derive
    if name == "check_advantages":
        from upref.check.advantages import check_advantages

        return check_advantages
    if name == "check_kl":
        from upref.check.kl import check_kl

        return check_kl
    raise AttributeError(f"module 'upref' has no attribute {name!r}")
