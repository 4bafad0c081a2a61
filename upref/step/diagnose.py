# SPDX-License-Identifier: Apache-2.0
"""Why a gradient is not the objective's: parameters, then token weights, then the forward pass; each claim verified."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upref.step.causes import named
from upref.step.changed import changed
from upref.step.forward import SPAN, Forward, added, expected, least, near, norm
from upref.step.forwards import others, tried
from upref.step.goal import Goal
from upref.step.reference import Gradient
from upref.step.rows import Padded
from upref.step.scores import quick
from upref.step.shares import factor_words
from upref.step.terms import Terms
from upref.step.weights import Reading, Tokens, observed, read
from upref.verify.report import Finding, fail

AFTER = 16  # tokens behind a row that may train
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
    if goal.clip is not None and near(found, added(rows), bound):
        return say("the clip of the gradient's norm does not act")
    if cause := changed(goal, forward, rows, want, found, bound):
        return say(cause)
    wrong = parameters(found, want, bound)
    right = [n for n in want if n not in wrong]
    alone = any(float(want[n].norm()) > 1e-6 * norm(want) for n in right)
    if alone and wrong and (of := _of_parameters(found, want, wrong, bound)):
        return say(of)
    return say(*_explained(goal, forward, b, rows, want, found, wrong, right, bound))


def _of_parameters(found: Gradient, want: Gradient, wrong: list[str], bound: float) -> str:
    """What is wrong with these parameters alone, the others being right."""
    zero = [n for n in wrong if n not in found or not found[n].any()]
    parts = [f"no gradient: {_some(zero)}"] if zero else []
    for n in (n for n in wrong if n not in zero):
        g, w = found[n].reshape(-1), want[n].reshape(-1)
        k = float(g @ w / (w @ w).clamp(min=1e-300))
        if (g - k * w).norm() > 100 * bound * w.norm() or abs(k - 1) < 100 * bound:
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
    if cause := plain.coefficients(g, bound) or _term_by_row(goal, forward, b, plain, g, bound):
        return [cause]
    closest: list[tuple[float, str, Forward]] = []

    def among(variants) -> list:
        for words, one in tried(forward, variants):
            try:
                its = expected(goal, one, b)
            except (RuntimeError, ValueError):
                continue
            residual = least(its, g)[1]
            closest.append((residual, words, one))
            if near(g, added(its), bound):
                return [words]
            if residual <= span and not (goal.entropy_coef or goal.z_loss_coef):
                return _said(goal, one, b, read(one, g, [*want]), Terms.of(goal, one, b), bound, words)
        return []

    k, left = least(rows, g)
    if left > span and (said := among(quick)):
        return said
    reading = read(forward, plain.without_bonus(g), [*want])
    if reading.residual <= span:
        return _said(goal, forward, b, reading, plain, bound, "", k if left <= span else None)
    if said := among(others):
        return said
    closest.sort(key=lambda x: x[0])
    for _, words, one in closest[:READ]:
        terms = Terms.of(goal, one, b)
        its = read(one, terms.without_bonus(g), [*want])
        if its.residual <= span:
            return _said(goal, one, b, its, terms, bound, words)
    for z in _beyond(forward) if any(forward.after) else []:
        long = Forward(forward.model, [replace(r, response=r.response + x[:AFTER]) for r, x in
                                       zip(forward.rows, forward.after, strict=True)], goal.temperature, z)  # fmt: skip
        its = read(long, plain.without_bonus(g), [*want])
        if its.residual <= span:
            return _said(goal, forward, b, its, plain, bound, "")
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


def _term_by_row(goal: Goal, forward: Forward, b: Padded, plain: Terms, g: Gradient, bound: float) -> str:
    """Whether the KL term, or the bonus, is right up to one factor per response, and the aggregation of that."""
    c, n = goal.coefficients, len(forward.rows)
    for key, name in {"H": "the entropy bonus", "KL": "the KL term"}.items():
        if not c[key]:
            continue
        rest = {q: v - goal.scale * sum(c[k] * plain.each[k][q] for k in plain.each if k != key) for q, v in g.items()}
        cold = Forward(forward.model, forward.rows, 1.0, forward.z)
        other = added(cold.by_row(-goal.parts(*cold.statistics(), b)[key])) if key == "H" else {}
        if other and near(rest, {q: v * goal.scale * c[key] for q, v in other.items()}, bound * norm(g) / norm(rest)):
            return "the entropy bonus is taken at temperature 1"
        rows = forward.by_row(-n * goal.parts(*forward.statistics(), b, "seq-mean-token-sum")[key])
        k, left = least(rows, rest)
        if left * norm(rest) <= bound * norm(g):
            words = factor_words(goal, forward.rows, b, k / (goal.scale * c[key]), [], 1e-2)
            return f"{name}: {words or 'one factor a response that no known aggregation has'}"
    return ""


def _beyond(forward: Forward) -> Iterator[list[Tensor]]:
    """Logits of the rows with the padding, or the row, that was fed behind them."""
    each = [(r, x[:AFTER]) for r, x in zip(forward.rows, forward.after, strict=True)]
    yield [forward.model.logits(r.ids + x) for r, x in each]
    with suppress(TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        seen = [torch.tensor([[1] * len(r.ids) + [0] * len(x)]) for r, x in each]
        yield [forward.model.logits(r.ids + x, attention_mask=m, position_ids=m.cumsum(1) - 1)
               for (r, x), m in zip(each, seen, strict=True)]  # fmt: skip


def _said(goal, forward, b, reading: Reading, terms: Terms, bound, words: str, whole: Tensor | None = None) -> list:
    """The words for a forward pass and the weights that were read with it."""
    width = b.mask.shape[1]
    grow = lambda x: torch.nn.functional.pad(x, (0, width - len(x)))
    found, prompts, beyond = [], [], []
    for r, x in zip(forward.rows, reading.weights, strict=True):
        p, n = len(r.prompt) - 1, len(r.ids) - 1
        prompts.append(x[:p])
        found.append(grow(x[p:n]))
        beyond.append(x[n:])
    noise = max(1e-4, 30 * reading.residual, 20 * bound)
    plain = Forward(forward.model, forward.rows, 1.0, forward.z).statistics()[0].detach()
    w = Tokens(goal, forward.rows, b, terms.lp, torch.stack(found), prompts, terms.slope, plain, noise, whole)
    more = [fail("weights", what, want, got) for what, want, got in observed(w)]
    said = [words] if words else []
    tail = int(sum((~w.zero(x)).sum() for x in beyond))
    said += [f"{tail} tokens behind the responses train: padding, or the next row"] * (tail > 0)
    prompt = any(bool((~w.zero(p)).any()) for p in prompts)
    if w.same(torch.where(w.here, w.found, torch.nan), torch.where(b.mask, terms.slope, 0)):
        said += ["prompt tokens train"] * prompt
    elif cause := named(w):
        said += ["prompt tokens train"] * prompt + [cause]
    elif more:
        said += [f.regime for f in more[:3]]
    return ["; ".join(said), *more] if said else ["no known cause fits", *more]
