# SPDX-License-Identifier: Apache-2.0
"""The inputs on which a log-probability function is compared."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from upref.foreign.logprobs import Kernel, Problem

# N, V, H: tokens, columns and hidden sizes a little beyond a tile, for each usual tile
TILES = [(35, 5, 3), (131, 7, 3), (515, 5, 2), (1027, 5, 2), (4099, 4, 2)]
TILES += [*((3, v, 2) for v in (9, *(2**k + 3 for k in range(5, 18)))), *((3, 5, h) for h in (35, 131, 1027))]


def drawn(k: Kernel, N: int = 6, V: int = 5, H: int = 2, seed: int = 0, **settings: Any) -> Problem:
    """[2, N/2] tokens, or [1, N], with both ends of the vocabulary; upstream gradients of both signs and 0."""
    gen = torch.Generator().manual_seed(seed)
    shape = (2, N // 2) if N % 2 == 0 else (1, N)
    eighths = lambda *s: (8 * torch.randn(*s, generator=gen, dtype=torch.float64)).round() / 8  # exact in bfloat16
    size = 1.0 if k.softcap is None else max(1.0, k.softcap / 2)
    x, W = eighths(*shape, H) * size, eighths(V, H) * 0.5 ** round(math.log2(H / 2) / 2)
    tokens = torch.randint(V, shape, generator=gen)
    tokens.view(-1)[:2] = torch.tensor([V - 1, 0])[: tokens.numel()]
    g, g_H = eighths(*shape), eighths(*shape)
    g[g == 0] = 0.5
    if N > 2:
        g.view(-1)[-2] = 0  # it has an entropy gradient alone
    bias = eighths(V) if "bias" in k.settings else None
    p = Problem(x, W, tokens, g, g_H if k.has_entropy else None, 1.0, bias, k.softcap, k.logit_scale)
    return replace(p if k.kind == "hidden" else of_logits(p), **settings)


def of_logits(p: Problem) -> Problem:
    """The same, its states being the logits."""
    assert p.weight is not None
    return replace(p, x=p.x @ p.weight.T, weight=None)


def plain(k: Kernel) -> dict[str, Problem]:
    """What every cause is verified on, by the oracle that asks it and its words."""
    seen, none = drawn(k), dict[str, Any](g=None, g_H=None)
    out = {"values: temperature 1": replace(seen, **none)}
    out |= {"values: one token": drawn(k, 1, **none), "values: 10 tokens, 19 ids": drawn(k, 10, 19, 6, 1, **none)}
    only: dict[str, dict[str, Any]] = {"gradient": {"g_H": None}, "entropy-gradient": {"g": None}, "gradients": {}}
    for oracle, left_out in only.items():
        if k.has_entropy or oracle == "gradient":
            out[f"{oracle}: temperature 1"] = replace(seen, **left_out)
    if "temperature" in k.settings:
        out |= {f"temperature: {t:g}": replace(drawn(k, seed=2), temperature=t, **none) for t in (0.6, 1.7)}
        for oracle, left_out in only.items():
            if k.has_entropy or oracle == "gradient":
                out[f"{oracle}: temperature 0.6"] = drawn(k, 10, 7, 3, 3, temperature=0.6, **left_out)
    return out


def offset(k: Kernel, by: float, turns: bool = False) -> Problem:
    """A constant added to all logits, or by turns to and from a row's: in float32 it rounds little in each factor."""
    p = drawn(k, 6, 37, 3, 4, temperature=0.5 if "temperature" in k.settings else 1.0)
    sign = (-1.0) ** torch.arange(p.tokens.numel()).reshape(p.tokens.shape) if turns else torch.ones(())
    if p.weight is None:
        return replace(p, x=p.x + by * sign.double()[..., None])
    x, W = p.x.clone(), p.weight.clone()
    x[..., 0] = 2.0 ** round(math.log2(abs(by)) / 2) * sign
    W[:, 0] = by / x[..., 0].max()
    return replace(p, x=x, weight=W)


def peak(k: Kernel, V: int, at: int, height: float, N: int = 6) -> Problem:
    """One logit that far above where the rest is, of its own token in every other row."""
    p = drawn(k, N, V, 3, 5)
    tokens = torch.where(torch.arange(N).reshape(p.tokens.shape) % 2 == 0, at, p.tokens)
    if p.weight is None:
        x = p.x / 2
        x[..., at] = height
        return replace(p, x=x, tokens=tokens)
    x, W = p.x.clone(), p.weight / 2
    x[..., 0], W[:, 0], W[at] = 1, 0, 0
    W[at, 0] = height
    return replace(p, x=x, weight=W, tokens=tokens)


def forbidden(k: Kernel) -> Problem | None:
    """Two ids with a logit of -inf, which no token has."""
    p = drawn(k, 6, 9, 3, 6)
    tokens = p.tokens.clamp(max=6)
    if p.weight is None:
        x = p.x.clone()
        x[..., 7:] = -math.inf
        return replace(p, x=x, tokens=tokens)
    if p.bias is None or p.softcap is not None:
        return None
    return replace(p, bias=torch.where(torch.arange(9) < 7, p.bias, -math.inf), tokens=tokens)


def ignored(k: Kernel) -> tuple[Problem, Tensor]:
    """Ids of -100 without upstream gradient, and which tokens are others."""
    p = drawn(k, 6, 9, 3, 7)
    keep = torch.tensor([[False, True, True], [True, True, False]])
    cut = lambda u: None if u is None else u * keep
    return replace(p, tokens=torch.where(keep, p.tokens, -100), g=cut(p.g), g_H=cut(p.g_H)), keep


def strided(k: Kernel) -> dict[str, Problem]:
    """Inputs and upstream gradients that are not contiguous."""
    p = drawn(k, 6, 9, 3, 8)
    turned: Any = lambda u: None if u is None else u.mT.contiguous().mT
    spread = lambda u: None if u is None else u[:, :1].expand_as(u)
    return {
        "transposed inputs": replace(p, x=turned(p.x), weight=turned(p.weight), tokens=turned(p.tokens)),
        "transposed upstream gradients": replace(p, g=turned(p.g), g_H=turned(p.g_H)),
        "expanded upstream gradients (stride 0)": replace(p, g=spread(p.g), g_H=spread(p.g_H)),
    }
