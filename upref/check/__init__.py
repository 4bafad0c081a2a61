# SPDX-License-Identifier: Apache-2.0
"""Verification: the regime grid, adapters to frameworks, oracles, audits. The module itself is `upref.check(...)`."""

import sys
from types import ModuleType
from typing import Any


class _Check(ModuleType):
    def __call__(self, loss: Any, objective: Any, **options) -> Any:
        """See upref.check.verdict.check."""
        from upref.check.verdict import check

        return check(loss, objective, **options)


sys.modules[__name__].__class__ = _Check
