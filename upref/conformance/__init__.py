# SPDX-License-Identifier: Apache-2.0
"""A suite that a framework's own CI runs: is the step of its trainer the gradient of
the objective?

The framework owns a small adapter and the list of its known failures; upref owns the
cases:

    pytest --pyargs upref.conformance --adapter tests/upref_adapter.py:Mine \\
        --upref-xfails tests/upref_xfails.toml
"""

from upref.conformance.adapter import Adapter, load_adapter
from upref.conformance.cases import CASES, LEVELS, SUITES, Case, cases
from upref.conformance.ranks import run_ranks
from upref.conformance.runner import Outcome, Status, run

__all__ = [
    "CASES",
    "LEVELS",
    "SUITES",
    "Adapter",
    "Case",
    "Outcome",
    "Status",
    "cases",
    "load_adapter",
    "run",
    "run_ranks",
]
