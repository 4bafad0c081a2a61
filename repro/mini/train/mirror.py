# SPDX-License-Identifier: Apache-2.0
"""UP turned around, a control: A log π_θ where A < 0, the base's own term elsewhere. Is
the asymmetry what matters?
"""

import inspect
from dataclasses import replace

import upref
from upref.errors import InputError
from upref.ops import where


def get(name: str) -> upref.Objective:
    """Return the objective mirror(NAME), or whatever the registry has of this name.

    Raises:
        InputError: there is no such objective, or it is not one of single tokens.
    """
    if not (name.startswith("mirror(") and name.endswith(")")):
        return upref.get(name)
    base = upref.get(name[7:-1])
    if base.level != "token":
        raise InputError(
            f"{name}: only objectives of single tokens are mirrored, and {base.name} is not one."
        )

    def fn(lp, lp_old, A, **hp):
        """Return J of a token."""
        return where(A < 0, A * lp, base.fn(lp, lp_old, A, **hp))

    def weight(r, A, **hp):
        """Return dJ/dlp of a token."""
        return where(A < 0, A, base.closed_form(r, A, **hp))

    fn.__signature__ = inspect.signature(base.fn)  # type: ignore[attr-defined]
    weight.__signature__ = inspect.signature(base.closed_form)  # type: ignore[attr-defined]
    return replace(
        base,
        name=name,
        fn=fn,
        closed_form=weight,
        on_policy_exception="",
        note="a control of repro/mini",
    )
