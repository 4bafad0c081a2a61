# SPDX-License-Identifier: Apache-2.0
"""UP as the paper sells it: a plug-in for any objective (fan2026up, Sec. 4.2)."""

import inspect
from dataclasses import replace

from upref.errors import InputError
from upref.ops import exp, mean_t, sg, where
from upref.registry import Objective, transform


@transform
def up(base: Objective) -> Objective:
    """UP(base) = A log π_θ where A > 0, the base's own term where A <= 0. Eqs. 14-16: up(dapo), up(grpo), up(gspo)."""
    return _asymmetric(base, "up", lambda lp: lp)


@transform
def up_anchored(base: Objective) -> Objective:
    """The same with the self-anchored ratio π_θ/sg(π_θ) of Eqs. 12 and A4: equal gradient, other value and Hessian."""
    return _asymmetric(base, "up_anchored", lambda lp: exp(lp - sg(lp)))


def _asymmetric(base: Objective, prefix: str, positive) -> Objective:
    """where(A > 0, A positive(lp), base): lp is reduced as the base reduces it."""
    if not isinstance(base, Objective):
        raise InputError(f"up(...) is made of an Objective, e.g. upref.get('dapo'), not of a {type(base).__name__}.")
    mean = base.level == "free" and base.agg == "seq-mean"  # one term per response: the positive branch averages too

    def fn(lp, lp_old, A, *args, **hp):
        negative = base.fn(lp, lp_old, A, *args, **hp)
        if mean:
            mask = args[0] if args else hp["mask"]
            lp, A = mean_t(lp, mask), A[..., 0]
        return where(A > 0, A * positive(lp), negative)

    def weight(r, A, *args, **hp):
        negative = base.closed_form(r, A, *args, **hp)
        if mean:
            mask = args[0] if args else hp["mask"]
            return where(A > 0, A / mask.sum(-1)[..., None], negative)
        return where(A > 0, A, negative)

    fn.__signature__ = inspect.signature(base.fn)  # type: ignore[attr-defined]
    weight.__signature__ = inspect.signature(base.closed_form)  # type: ignore[attr-defined]
    return replace(
        base,
        equation=f"J_t = A log π_θ where A > 0;  J_t of {base.name} where A <= 0",
        name=f"{prefix}({base.name})",
        fn=fn,
        closed_form=weight,
        paper="fan2026up",
        eq="Sec. 4.2",
        off_anchor="",
        note=f"The plug-in on {base.name}. {base.note}".strip(),
    )
