# SPDX-License-Identifier: Apache-2.0
"""What a wrong loss is likely to be: hypotheses, each a changed objective, of which one reproduces its weights."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from upref.check.fit import Case, unit_weights
from upref.errors import InputError
from upref.ops import clip, exp, maximum, mean_t, minimum, sg, sum_t, where
from upref.registry import get, names
from upref.rollouts import Rollouts
from upref.transforms import up

Hypothesis = tuple[str, Callable[[], Tensor]]
STOP = "stop-gradient"  # a cause that begins so is a finding of that oracle too


def cause(case: Case, b: Rollouts, found: Tensor, ignore: Tensor, bounds: list[float]) -> str:
    """The first hypothesis that reproduces the found weights on every token of the batch, in words; "" if none."""
    use = b.mask & ~ignore
    if not (found[use].abs() > 0).any():
        return "no gradient reaches log_prob: it is detached, or rounded away"
    few = slice(0, 24)  # most hypotheses fail on a few responses already
    names_ = ("logp", "logp_old", "adv", "mask", "logp_ref", "entropy")
    rows = {k: v[few] for k in names_ if (v := getattr(b, k)) is not None}
    small = replace(b, group=None, totals=None, **rows)

    def fits(weights: Callable[[], Tensor], n: slice) -> bool:
        try:
            off = (weights() - found[n]).abs() / torch.maximum(found[n].abs(), b.adv[n].abs()).clamp(min=0.1)
        except (InputError, RuntimeError):  # of other shapes: not this objective's form
            return False
        return bool((off[use[n]].nan_to_num(nan=torch.inf) < case.tol).all())

    for (words, quick), (_, full) in zip(_hypotheses(case, small, bounds), _hypotheses(case, b, bounds), strict=True):
        if fits(quick, few) and fits(full, slice(None)):
            return words
    return ""


def _hypotheses(case: Case, b: Rollouts, bounds: list[float]) -> Iterator[Hypothesis]:
    o, hp = case.o, case.hp
    yield "the sign is flipped: it ascends the loss", lambda: -case.expected(b)
    yield from _other_hyperparameters(case, b, bounds)
    lo, hi = hp.get("eps_low", hp.get("eps", 0.2)), hp.get("eps_high", hp.get("eps", hp.get("eps_low", 0.2)))
    low, high = ([1 - x for x in bounds if 0 < x < 1][:2], [x - 1 for x in bounds if 1 < x < 10][:2])
    for i, (a, e) in enumerate(dict.fromkeys(product([lo, *low], [hi, *high]))):
        for words, f in _forms(case, bounds, a, e):
            said = f"{words} (with bounds {1 - a:g} and {1 + e:g})" if i else words
            yield said, lambda f=f: _weights(f, b)  # type: ignore[misc]
    if not o.name.startswith("up("):
        yield (
            f"it is up({o.name}): log π_θ in the place of the clipped ratio where A > 0",
            lambda: unit_weights(up(o), b, case.hp),
        )
    for name in names():
        p = get(name)
        if name != o.name and not p.coupled:
            own = {k: v for k, v in hp.items() if k in p.hyperparameters and v is not None}
            for h in (own, {}):
                full = p.resolve(h)
                said = ", ".join(f"{k}={v:g}" for k, v in full.items() if v)
                yield f"it is {name}({said})", lambda p=p, full=full: unit_weights(p, b, full)  # type: ignore[misc]


def _other_hyperparameters(case: Case, b: Rollouts, bounds: list[float]) -> Iterator[Hypothesis]:
    hp = case.hp
    moves: list[tuple[str, float]] = []
    for key in hp:
        for x in bounds:
            moves += [(key, x - 1)] if key in ("eps", "eps_high", "delta") and x > 1 else []
            moves += [(key, 1 - x)] if key in ("eps", "eps_low", "delta") and x < 1 else []
            moves += [(key, x)] if key == "c" and x > 1 else []
        if key == "c" and hp[key]:
            moves.append((key, None))  # type: ignore[arg-type]
        if key in ("tau_pos", "tau_neg", "lam", "tau", "eps_high", "eps_low", "beta"):
            moves += [(key, float(v)) for v in (0.0, 0.1, 0.2, 0.28, 0.5, 1.0, 1.05, 2.0, (hp[key] and -hp[key]) or 1)]
    if {"eps_low", "eps_high"} <= hp.keys():
        swapped = hp | {"eps_low": hp["eps_high"], "eps_high": hp["eps_low"]}
        yield "the two sides of the clip are swapped (eps_low, eps_high)", lambda: unit_weights(case.o, b, swapped)
    pairs = [p for p in combinations(dict.fromkeys(moves), 2) if p[0][0] != p[1][0]][:60] if len(moves) < 24 else []
    for some in [*((m,) for m in moves), *pairs]:
        moved: dict[str, Any] = dict(some)
        if any(k in ("eps_low", "eps_high", "eps") and not 0 <= v <= 1e3 for k, v in moved.items()):
            continue
        said = " and ".join(
            f"{k} is {'absent' if v is None else f'{v:.6g}'}, not {'absent' if hp[k] is None else f'{hp[k]:g}'}"
            for k, v in moved.items()
        )
        yield said, lambda moved=moved: unit_weights(case.o, b, hp | moved)  # type: ignore[misc]


def _weights(f, b: Rollouts) -> Tensor:
    x = b.logp.detach().clone().requires_grad_()
    y = f(x, b.logp_old, b.adv.expand_as(x), b.mask)
    if not y.requires_grad:
        return torch.zeros_like(x)
    n = b.mask.sum(-1, keepdim=True) if y.ndim == 1 else 1
    (g,) = torch.autograd.grad(where(b.mask, y, 0).sum() if y.ndim == 2 else y.sum(), x)
    return torch.where(b.mask, g * n, 0)


def _forms(case: Case, bounds: list[float], lo: float, hi: float):
    """(words, unreduced J of (lp, lp_old, A, mask)); the ratio is the objective's: a token's or a response's."""
    o, hp = case.o, case.hp
    own = {k: v for k, v in hp.items() if k != "beta"}
    J = lambda lp, old, A, m: o.unreduced(lp, old, A, m, torch.ones_like(lp), **own)
    wide = o.level in ("sequence", "trajectory")

    def log_r(lp, old, m):
        x = where(m, lp - old, 0)
        return {"sequence": mean_t, "trajectory": sum_t}[o.level](x, m)[:, None].expand_as(x) if wide else x

    R = lambda lp, old, m: exp(log_r(lp, old, m))
    ppo = lambda r, A, lo=lo, hi=hi: minimum(r * A, clip(r, 1 - lo, 1 + hi) * A)
    form = lambda f: lambda lp, old, A, m: f(R(lp, old, m), A, lp)
    yield (
        "the ratio is clipped before multiplying by A: the minimum is missing",
        form(lambda r, A, lp: clip(r, 1 - lo, 1 + hi) * A),
    )
    yield (
        "the maximum is taken where the minimum belongs",
        form(lambda r, A, lp: maximum(r * A, clip(r, 1 - lo, 1 + hi) * A)),
    )
    weighs = o.name.startswith(("cispo", "dppo"))  # a constant weight on log π_θ is what these are
    if not weighs:
        yield (
            "A multiplies after the minimum: min(r, clip(r)) A, which bounds the wrong side where A < 0",
            form(lambda r, A, lp: minimum(r, clip(r, 1 - lo, 1 + hi)) * A),
        )
    if o.name.startswith("up"):
        yield "log π_θ stands in the place of the ratio where A <= 0 too", form(lambda r, A, lp: A * lp)
    yield "old_log_prob has no effect: the ratio is of the policy to itself, always 1", lambda lp, old, A, m: A * lp
    yield "no bound has an effect: the ratio is not clipped", form(lambda r, A, lp: r * A)
    yield "the ratio is inverted: exp(old - new)", lambda lp, old, A, m: ppo(R(old, lp, m), A)
    yield "the ratio is inverted: exp(old - new)", lambda lp, old, A, m: J(old, lp, A, m)
    yield "A enters by its absolute value", lambda lp, old, A, m: J(lp, old, A.abs(), m)
    yield "A enters by its sign alone", lambda lp, old, A, m: J(lp, old, A.sign(), m)
    yield "A enters squared", lambda lp, old, A, m: J(lp, old, A * A.abs(), m)
    yield "negative advantages are dropped", lambda lp, old, A, m: J(lp, old, A.clamp(min=0), m)
    yield "positive advantages are dropped", lambda lp, old, A, m: J(lp, old, A.clamp(max=0), m)
    yield "the branches of the two signs of A are exchanged", lambda lp, old, A, m: -J(lp, old, -A, m)
    yield "the clip has no lower side", form(lambda r, A, lp: minimum(r * A, r.clamp(max=1 + hi) * A))
    yield "the clip has no upper side", form(lambda r, A, lp: minimum(r * A, r.clamp(min=1 - lo) * A))
    yield "only positive advantages are clipped", form(lambda r, A, lp: where(A > 0, ppo(r, A), r * A))
    yield "only negative advantages are clipped", form(lambda r, A, lp: where(A < 0, ppo(r, A), r * A))
    yield "the clip is that of PPO on both sides", form(lambda r, A, lp: ppo(r, A))
    yield (
        "the ratio of the response stands in the place of the token's",
        lambda lp, old, A, m: ppo(exp(mean_t(lp - old, m))[:, None].expand_as(lp), A),
    )
    yield "the ratio of the token stands in the place of the response's", lambda lp, old, A, m: ppo(exp(lp - old), A)
    yield (
        "the response's log-ratio is summed, not averaged over its tokens",
        lambda lp, old, A, m: ppo(exp(sum_t(lp - old, m))[:, None].expand_as(lp), A),
    )
    yield (
        "the response's log-ratio is averaged over the padded width, padding included: the mask is ignored",
        (lambda lp, old, A, m: ppo(exp((lp - old).mean(-1, keepdim=True)).expand_as(lp), A)),
    )
    yield (
        "the response's log-ratio is divided by the padded width",
        lambda lp, old, A, m: ppo(exp(sum_t(lp - old, m) / m.shape[1])[:, None].expand_as(lp), A),
    )
    yield (
        "the bounds are taken as absolute, [eps_low, eps_high], not as 1 - eps_low and 1 + eps_high",
        form(lambda r, A, lp: minimum(r * A, clip(r, lo, max(lo, hi)) * A)),
    )
    yield (
        "the bounds are on log r: [-eps_low, eps_high]",
        form(lambda r, A, lp: minimum(r * A, exp(r.log().clamp(-lo, hi)) * A)),
    )
    yield (
        "where A > 0 the ratio to π_old stands in the place of log π_θ",
        form(lambda r, A, lp: where(A > 0, r * A, ppo(r, A))),
    )
    yield "log π_θ stands in the place of the ratio where A <= 0 too", form(lambda r, A, lp: A * lp)
    yield (
        "the weight is bounded on both sides: clip(r, 1 - eps_low, 1 + eps_high)"
        if weighs
        else f"{STOP}: the clipped ratio is a constant weight on log π_θ, though it should carry the gradient",
        form(lambda r, A, lp: sg(clip(r, 1 - lo, 1 + hi)) * A * lp),
    )
    for said, f in (("clipped", lambda r: clip(r, 1 - lo, 1 + hi)), ("truncated", lambda r: r.clamp(max=1 + hi))):
        yield f"{STOP}: the {said} ratio on log π_θ is not detached", form(lambda r, A, lp, f=f: f(r) * A * lp)
        if weighs:
            yield (
                f"the {said} ratio multiplies A itself: beyond the cap no gradient is left",
                form(lambda r, A, lp, f=f: f(r) * A),
            )
    yield (
        "the ratio is missing from the weight: 1 in its place inside the bounds",
        form(lambda r, A, lp: where((A > 0) & (r <= 1 + hi) | (A <= 0) & (r >= 1 - lo), A * lp, 0 * lp)),
    )
    yield f"{STOP}: exp(log π_θ) without an anchor", lambda lp, old, A, m: where(A > 0, A * exp(lp), J(lp, old, A, m))
    for x in sorted({round(abs(float(torch.tensor(v).log())), 4) for v in bounds if v > 0}):
        if x < 0.05:  # a bound of the response's ratio, no guard
            continue
        clamped = lambda lp, old, A, m, x=x: J(old + (lp - old).clamp(-x, x), old, A, m)
        yield f"log r is clamped to ±{x:g}", clamped
    for x in bounds:
        yield f"the ratio is capped at {x:.6g}", form(lambda r, A, lp, x=x: ppo(r.clamp(max=x), A))
        yield f"a dual clip at c = {x:.6g}", form(lambda r, A, lp, x=x: where(A < 0, ppo(r.clamp(max=x), A), ppo(r, A)))
