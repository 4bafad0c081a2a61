# SPDX-License-Identifier: Apache-2.0
"""The oracles: each looks at a Case from one side and answers with Findings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from upref.check.adapters import ROLES
from upref.check.fit import Case, promised
from upref.check.report import Finding
from upref.check.shrink import as_python, shrink
from upref.errors import InputError
from upref.regimes import off
from upref.rollouts import Rollouts

ORACLES: dict[str, Callable[[Case], list[Finding]]] = {}
FIELDS = ("logp", "logp_old", "adv", "mask", "group", "logp_ref", "entropy")


def oracle(name: str):
    def wrap(f):
        ORACLES[name] = f
        return f

    return wrap


def fail(oracle: str, regime: str, expected: Any, found: Any, batch: str = "", cause: str = "") -> Finding:
    return Finding(oracle, "failure", regime, _say(expected), _say(found), batch, cause)


def note(oracle: str, regime: str, expected: Any = "", found: Any = "", cause: str = "") -> Finding:
    return Finding(oracle, "note", regime, _say(expected), _say(found), "", cause)


def _say(x: Any) -> str:
    return x if isinstance(x, str) else f"weight {x + 0.0:.6g}"


def example(case: Case, b: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None) -> str:
    """The smallest batch on which `bad` holds, with the promised and the found gradient."""
    b = shrink(b, bad, at)
    try:
        expected = case.expected(b) * case.factors(b, promised(case.o))
        return as_python(b, expected, case.loss.gradient(b))
    except InputError:
        return as_python(b)


def worst(off: Tensor) -> tuple[int, int]:
    return divmod(int(off.argmax()), off.shape[1])


def wrong(case: Case, tol: float = 0.0) -> Callable[[Rollouts], bool]:
    """Whether some token of a batch has another weight than expected."""
    return lambda b: bool(case.off(b).max() > max(10 * case.tol, tol))


def moved(x: Tensor, y: Tensor, mask: Tensor, tol: float) -> Tensor:
    """Relative difference on unmasked slots; infinite where one is not finite and the other is."""
    far = off(x, y, floor=y.abs().amax().clamp(min=1e-30))
    return torch.where(mask & (far > tol), far, 0)


def role_name(k: str) -> str:
    return ROLES[k].split()[0]
