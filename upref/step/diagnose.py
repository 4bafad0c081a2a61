# SPDX-License-Identifier: Apache-2.0
"""Why a gradient is not the objective's: parameters, then token weights, then the forward pass; each claim verified."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upref.step.causes import Tokens, factors, named, observed
from upref.step.forward import Forward, added, expected, norm
from upref.step.forwards import others, quick, tried
from upref.step.goal import Goal
from upref.step.reference import Gradient
from upref.step.rows import Padded
from upref.step.shares import factor_words
from upref.step.terms import Terms
from upref.step.weights import Reading, read
from upref.verify.report import Finding, fail

SPAN = 5e-5  # a gradient in float32 is one of these log-probabilities if they leave no more of it
READ = 2  # forward passes whose token weights are read where one factor a response does not suffice


class _Halves(TorchDispatchMode):
    """Which half-precision products are computed."""

    def __init__(self):
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16):
                self.kinds.add(x.dtype)
        return func(*args, **(kwargs or {}))


def half_precision(run: Callable[[], object]) -> torch.dtype | None:
    """The half precision in which a step computes, if any."""
    with _Halves() as seen:
        run()
    return next((k for k in (torch.bfloat16, torch.float16) if k in seen.kinds), None)


def parameters(found: Gradient, want: Gradient, bound: float) -> list[str]:
    """Parameters whose gradient is wrong beyond a thousandth of itself."""
    size = norm(want)
    out = []
    for n, w in want.items():
        g = found.get(n)
        off = float((g.reshape(w.shape) - w).norm()) if g is not None else float(w.norm())
        if not off <= max(50 * bound * float(w.norm()), 0.25 * bound * size) * (1 if bound < 1e-2 else 1e9):
            out.append(n)
    return out


def diagnosed(
    goal: Goal, forward: Forward, b: Padded, rows: list[Gradient], want: Gradient, found: Gradient, error: float,
    bound: float, again: Callable[[], Gradient] | None,
) -> list[Finding]:  # fmt: skip
    """Findings on a gradient that differs, the cause in the first one."""
    size = norm({n: found[n] for n in want if n in found})
    numbers = f"a gradient of norm {norm(want):.6g}", f"norm {size:.6g}, {error:.2g} of it away"
    say = lambda cause, *more: [fail("gradient", "over all parameters", *numbers, cause=cause), *more]
    if not all(g.isfinite().all() for g in found.values()):
        bad = [n for n, g in found.items() if not g.isfinite().all()]
        return say(f"the gradient is not finite, in {bad[0]} first")
    if size == 0:
        return say("no gradient reaches the parameters: the loss is detached from them")
    if again is not None:
        second = again()
        apart = norm({n: second[n] - found[n] for n in found if n in second}) / size
        if apart > 10 * bound:
            return say("two runs of the step on the same rows have different gradients: dropout or sampling is active")
    if goal.clip is not None and _near(found, added(rows), bound):
        return say("the clip of the gradient's norm does not act")
    wrong = parameters(found, want, bound)
    right = [n for n in want if n not in wrong]
    alone = any(float(want[n].norm()) > 1e-6 * norm(want) for n in right)
    if alone and wrong and (of := _of_parameters(found, want, wrong, bound)):
        return say(of)
    return say(*_explained(goal, forward, b, rows, want, found, wrong, right, bound))


def _near(found: Gradient, want: Gradient, bound: float) -> bool:
    apart = {n: (found[n].reshape(w.shape) if n in found else 0) - w for n, w in want.items()}
    return norm(apart) <= bound * norm(want)


def _of_parameters(found: Gradient, want: Gradient, wrong: list[str], bound: float) -> str:
    """What is wrong with these parameters alone, the others being right."""
    zero = [n for n in wrong if n not in found or not found[n].any()]
    parts = [f"no gradient: {_some(zero)}"] if zero else []
    for n in (n for n in wrong if n not in zero):
        g, w = found[n].reshape(-1), want[n].reshape(-1)
        k = float(g @ w / (w @ w).clamp(min=1e-300))
        if (g - k * w).norm() > 100 * bound * w.norm():
            return ""
        parts.append(f"{n} has {k:.5g} times its gradient")
    return "the other parameters are right; " + "; ".join(parts[:4])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- weights and forward passes --------------------------------------------------------------------------------------
def _explained(goal, forward, b, rows, want, found, wrong, right, bound) -> list:
    """[cause, *more findings]."""
    g = {n: found[n].reshape(w.shape) if n in found else torch.zeros_like(w) for n, w in want.items()}
    if goal.clip is not None:  # the norm that was clipped is not known
        g = {n: v * (norm(added(rows)) / max(norm(want), 1e-300)) for n, v in g.items()}
    plain = Terms.of(goal, forward, b)
    span = max(SPAN, 3 * bound)
    if cause := plain.coefficients(g, bound):
        return [cause]
    near: list[tuple[float, str, Forward]] = []

    def among(variants) -> list:
        for words, one in tried(forward, variants):
            try:
                its = expected(goal, one, b)
            except (RuntimeError, ValueError):
                continue
            residual = _by_row(its, g)
            near.append((residual, words, one))
            if _near(g, added(its), bound):
                return [words]
            if residual <= span and not (goal.entropy_coef or goal.z_loss_coef):
                return _said(goal, one, b, read(one, g, [*want]), Terms.of(goal, one, b), g, bound, words)
        return []

    by_row = _by_row(rows, g) <= span
    if not by_row and (said := among(quick)):
        return said
    reading = read(forward, plain.without_bonus(g), [*want])
    if reading.residual <= span:
        return _said(goal, forward, b, reading, plain, g, bound, "")
    if said := among(others):
        return said
    near.sort(key=lambda x: x[0])
    for _, words, one in near[:READ]:
        terms = Terms.of(goal, one, b)
        its = read(one, terms.without_bonus(g), [*want])
        if its.residual <= span:
            return _said(goal, one, b, its, terms, g, bound, words)
    if cause := _bonus_by_row(goal, forward, b, plain, g, bound):
        return [cause]
    bonus = read(forward, g, [*want], plain.bonuses)
    if bonus.residual <= span:
        return [f"the gradient has a term that is no Σ w ∇log π: an entropy bonus or a z-loss with coefficients "
                f"{', '.join(f'{-x:.4g}' for x in bonus.extra)} (H, Z)"]  # fmt: skip
    if right and len(wrong) <= len(want) // 4:
        only = read(forward, {n: g[n] for n in right}, right)
        if only.residual <= span:
            return [f"all is right but the gradients of {_some(wrong)}"]
    return [
        f"no known cause fits; no weights of these tokens give the gradient: {reading.residual:.2g} of it is left, so "
        "the forward pass differs, or other tokens train"
    ]


def _bonus_by_row(goal: Goal, forward: Forward, b: Padded, plain: Terms, g: Gradient, bound: float) -> str:
    """Whether the entropy bonus is right up to one factor per response, and which aggregation gives these factors."""
    c = goal.coefficients
    if not c["H"]:
        return ""
    rest = {n: v - goal.scale * sum(c[k] * plain.each[k][n] for k in plain.each if k != "H") for n, v in g.items()}
    rows = forward.by_row(-torch.where(b.mask, forward.statistics()[1], 0).sum())
    k, left = _least(rows, rest)
    if left * norm(rest) > bound * norm(g):
        return ""
    words = factor_words(goal, forward.rows, b, k / (goal.scale * c["H"]), [], 1e-2)
    return f"the entropy bonus: {words or 'one factor a response that no known aggregation has'}"


def _by_row(rows: list[Gradient], g: Gradient) -> float:
    """What is left of g by the one factor a row that comes nearest to it."""
    return _least(rows, g)[1]


def _least(rows: list[Gradient], g: Gradient) -> tuple[Tensor, float]:
    """One factor a row that comes nearest to g, and what is left of it."""
    dot = lambda x, y: sum(float((x[n] * y[n]).sum()) for n in y)
    G = torch.tensor([[dot(x, y) for y in rows] for x in rows], dtype=torch.float64)
    y = torch.tensor([dot(x, g) for x in rows], dtype=torch.float64)
    scale = G.diagonal().clamp(min=1e-300).sqrt()
    k = torch.linalg.pinv(G / scale / scale[:, None], hermitian=True, rtol=1e-12) @ (y / scale) / scale
    left = {n: v - sum(k[i] * rows[i][n] for i in range(len(rows))) for n, v in g.items()}
    return k, norm(left) / norm(g)


def _said(goal, forward, b, reading: Reading, terms: Terms, g, bound, words: str) -> list:
    """The words for a forward pass and the weights that were read with it."""
    width = b.mask.shape[1]
    grow = lambda x: torch.nn.functional.pad(x, (0, width - len(x)))
    found, prompts = [], []
    for r, x in zip(forward.rows, reading.weights, strict=True):
        p = len(r.prompt) - 1
        prompts.append(x[:p])
        found.append(grow(x[p:]))
    noise = max(1e-4, 30 * reading.residual, 20 * bound)
    w = Tokens(goal, forward.rows, b, terms.lp, torch.stack(found), prompts, terms.slope, noise)
    more = [fail("weights", what, want, got) for what, want, got in observed(w)]
    prompt = any(bool((~w.zero(p)).any()) for p in prompts)
    said = [words] if words else []
    if w.same(torch.where(w.here, w.found, torch.nan), torch.where(b.mask, terms.slope, 0)):
        said += ["prompt tokens train"] * prompt
    elif cause := (_clip_of_parts(w, goal, forward, b) or named(w)):
        said += ["prompt tokens train"] * prompt + [cause]
    elif more:
        said += [f.regime for f in more[:3]]
    return ["; ".join(said), *more] if said else ["no known cause fits", *more]


def _clip_of_parts(w: Tokens, goal: Goal, forward: Forward, b: Padded) -> str:
    """Whether each micro-batch's gradient is clipped to one norm, or the whole is."""

    k = factors(w, w.expected)
    if k is None or k.isnan().all() or (k.nan_to_num(1) > 1 + 1e-4).any():
        return ""
    rows = expected(goal, forward, b)
    n, k = len(rows), k.nan_to_num(0)
    for m in [n, *range(1, n)]:
        part = [range(i, min(i + m, n)) for i in range(0, n, m)]
        if any(k[list(p)].max() - k[list(p)].min() > 1e-3 * k.max() for p in part):
            continue
        norms = [norm(added([{q: v * k[i] for q, v in rows[i].items()} for i in p])) for p in part]
        live = [x for x, p in zip(norms, part, strict=True) if x > 0 and k[list(p)].max() < 1 - 1e-3]
        if m < n and len(live) > 1 and max(live) / min(live) - 1 < 1e-3:
            return f"each micro-batch's gradient (of {m} responses) is clipped to norm {live[0]:.4g}"
        if m == n and live and abs(live[0] - float(f"{live[0]:.2g}")) < 1e-4 * live[0] and abs(k[0] - 0.5) > 1e-3:
            return f"the gradient's norm is clipped to {live[0]:.4g}: pass clip={live[0]:.4g} if that is meant"
    return ""
