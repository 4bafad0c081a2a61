# SPDX-License-Identifier: Apache-2.0
"""What was done to the right gradient, or to its parts, before the optimizer got it: clips and weight decay."""

import torch

from upref.step.forward import SPAN, Forward, added, clipped, least, near, norm
from upref.step.goal import Goal
from upref.step.reference import Gradient, TorchModel


def changed(goal: Goal, forward: Forward, rows: list[Gradient], want: Gradient, found: Gradient, bound: float) -> str:
    """In words, where the gradient that was found is then reproduced; or nothing."""
    whole = added(rows)
    g = {n: found[n].reshape(w.shape) if n in found else torch.zeros_like(w) for n, w in want.items()}
    if isinstance(forward.model, TorchModel):
        theta = {n: p.detach() for n, p in forward.model.params.items()}
        off = {n: g[n] - w for n, w in want.items()}
        rate = sum(float((off[n] * p).sum()) for n, p in theta.items()) / norm(theta) ** 2
        if near(g, {n: w + rate * theta[n] for n, w in want.items()}, bound):
            return f"weight decay is in the gradient: {rate:.4g} times the parameters"
    top = max(float(v.abs().max()) for v in g.values())
    if near(g, {n: v.clamp(-top, top) for n, v in whole.items()}, bound):
        return f"each entry of the gradient is clipped to {top:.4g}"
    for c in dict.fromkeys((goal.clip or 0.0, max(float(v.norm()) for v in g.values()))):
        each = {n: clipped({n: v}, c)[n] for n, v in whole.items()}
        if sum(float(v.norm()) > c for v in whole.values()) > 1 and near(g, each, bound):
            return f"the gradient of each parameter is clipped to norm {c:.4g} by itself"
    n = len(rows)
    for c in dict.fromkeys((goal.clip or 0.0, norm(g))):
        for m in range(1, n):
            inside, acts = added(rows[:m]), 0
            for i in range(m, n, m):
                acts += norm(inside) > c
                inside = added([clipped(inside, c), *rows[i : i + m]])
            if acts and near(g, clipped(inside, c), bound):
                return f"the norm of what has accumulated is clipped to {c:.4g} after each micro-batch of {m}"
    k, left = least(rows, g)
    if left > max(SPAN, 3 * bound) or not (k < 1 + 1e-4).all():
        return ""
    for m in range(1, n):
        part = [slice(i, i + m) for i in range(0, n, m)]
        norms = [norm(added([{q: v * x for q, v in r.items()} for r, x in zip(rows[p], k[p], strict=True)]))
                 for p in part if k[p].max() < 1 - 1e-3]  # fmt: skip
        if len(norms) > 1 and near(g, added([clipped(added(rows[p]), max(norms)) for p in part]), bound):
            return f"each micro-batch's gradient (of {m} responses) is clipped to norm {max(norms):.4g}"
    c = float(f"{norm(g):.2g}")
    if goal.clip is None and near(g, clipped(whole, c), bound) and abs(k[0] - 0.5) > 1e-3:
        return f"the gradient's norm is clipped to {c:.4g}: pass clip={c:.4g} if that is meant"
    return ""
