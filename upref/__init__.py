# SPDX-License-Identifier: Apache-2.0
"""upref: reference and verification of the policy-gradient objectives that train reasoning LLMs."""

from upref.aggregate import Totals, aggregate, row_weights
from upref.errors import InputError
from upref.registry import Objective, get, names, objective
from upref.rollouts import Rollouts
from upref.transforms import up, up_anchored

__version__ = "0.1.0"
__all__ = [
    "InputError", "Objective", "Rollouts", "Totals", "aggregate", "get", "names", "objective", "row_weights", "up", "up_anchored",
]  # fmt: skip
