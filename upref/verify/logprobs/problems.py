# SPDX-License-Identifier: Apache-2.0
"""The inputs on which a log-probability function is compared."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from upref.user_code.logprobs import Kernel, Problem

# N, V, H: tokens, columns and hidden sizes a little beyond a tile, for each usual tile
TILES = [(35, 5, 3), (131, 7, 3), (515, 5, 2), (1027, 5, 2), (4099, 4, 2)]
TILES += [
    *((3, v, 2) for v in (9, *(2**k + 3 for k in range(5, 18)))),
    *((3, 5, h) for h in (35, 131, 1027)),
]


# as many tokens as ids, columns as ids, ids as hidden sizes
SQUARE = [(6, 6, 2), (6, 3, 2), (6, 5, 5)]
TEMPERATURES = (0.1, 4.0)
HEIGHTS = (40.0, 80.0)  # of a peak: float32 holds e^-87


def random_problem(
    kernel: Kernel, N: int = 6, V: int = 5, H: int = 2, seed: int = 0, **settings: Any
) -> Problem:
    """[2, N/2] tokens, or [1, N], with both ends of the vocabulary; upstream gradients
    of both signs and 0.

    Args:
        kernel: the function, whose kind of inputs is made.
        N: tokens.
        V: ids of the vocabulary.
        H: hidden size.
        seed: of all numbers.
        **settings: other fields of the Problem.
    """
    gen = torch.Generator().manual_seed(seed)
    shape = (2, N // 2) if N % 2 == 0 else (1, N)

    def eighths(*size: int) -> Tensor:
        """Random multiples of 1/8, which are exact in bfloat16."""
        normal = torch.randn(*size, generator=gen, dtype=torch.float64)
        return (8 * normal).round() / 8

    size = 1.0 if kernel.softcap is None else max(1.0, kernel.softcap / 2)
    x = eighths(*shape, H) * size
    W = eighths(V, H) * 0.5 ** round(math.log2(H / 2) / 2)
    tokens = torch.randint(V, shape, generator=gen)
    tokens.view(-1)[:2] = torch.tensor([V - 1, 0])[: tokens.numel()]
    gradient = eighths(*shape)
    g_H = eighths(*shape)
    gradient[gradient == 0] = 0.5
    if N > 2:
        gradient.view(-1)[-2] = 0  # it has an entropy gradient alone
    bias = eighths(V) if "bias" in kernel.settings else None
    p = Problem(
        x,
        W,
        tokens,
        gradient,
        g_H if kernel.has_entropy else None,
        1.0,
        bias,
        kernel.softcap,
        kernel.logit_scale,
    )
    return replace(
        p if kernel.kind == "hidden" else replace(p, x=x @ W.T, weight=None), **settings
    )


def low_temperature(kernel: Kernel) -> float:
    """A temperature of 0.5, where one can be set.

    Args:
        kernel: the function, whose kind of inputs is made.
    """
    return 0.5 if "temperature" in kernel.settings else 1.0


def masked(problem: Problem, keep: list[list[int]], **changes: Any) -> Problem:
    """Tokens without upstream gradient, which are not compared.

    Args:
        problem: the problem.
        keep: for each row, the tokens that are compared.
        **changes: other fields of the Problem.
    """
    is_kept = torch.tensor(keep, dtype=torch.bool)

    def cut(u: Tensor | None) -> Tensor | None:
        """An upstream gradient, 0 on the other tokens."""
        return None if u is None else u * is_kept

    return replace(
        problem, g=cut(problem.g), g_H=cut(problem.g_H), keep=is_kept, **changes
    )


def plain(kernel: Kernel) -> dict[str, dict[str, Problem]]:
    """What every cause is verified on, by the oracle that asks it and in words.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Words -> what is asked.
    """
    none = dict[str, Any](g=None, g_H=None)
    used: dict[str, dict[str, Any]] = {"gradient": {"g_H": None}}
    used |= (
        {"entropy-gradient": {"g": None}, "gradients": {}} if kernel.has_entropy else {}
    )
    small = random_problem(kernel, 1, **none)
    larger = random_problem(kernel, 10, 19, 6, 1, **none)
    out = {
        "values": {
            "temperature 1": random_problem(kernel, **none),
            "one token": small,
            "10 tokens, 19 ids": larger,
        }
    }
    if "temperature" in kernel.settings:
        out["temperature"] = {
            f"{t:g}": random_problem(kernel, seed=2, temperature=t, **none)
            for t in (0.6, 1.7)
        }
    for name, left_out in used.items():
        out[name] = {"temperature 1": random_problem(kernel, **left_out)}
        if "temperature" in kernel.settings:
            out[name]["temperature 0.6"] = random_problem(
                kernel, 10, 7, 3, 3, temperature=0.6, **left_out
            )
    return out


def tiles(kernel: Kernel) -> dict[str, Problem]:
    """Make problems a little larger than each usual tile of a GPU kernel.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    return {
        f"{N} tokens, {V} ids, hidden size {H}": random_problem(kernel, N, V, H, 9)
        for N, V, H in [*SQUARE, *TILES]
    }


def temperatures(kernel: Kernel) -> dict[str, Problem]:
    """Lower and higher ones than those of the plain problems.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Words -> what is asked.
    """
    return {
        f"temperature {t:g}": random_problem(kernel, 6, 9, 3, 15, temperature=t)
        for t in TEMPERATURES
    }


def offset(kernel: Kernel) -> dict[str, Problem]:
    """A constant added to all logits, or by turns to and from a row's: in float32 it
    rounds little in each factor.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Words -> what is asked.
    """
    p = random_problem(kernel, 6, 37, 3, 4, temperature=low_temperature(kernel))
    turns = (-1.0) ** torch.arange(6.0).reshape(2, 3).double()

    def added(by: float, sign: Tensor) -> Problem:
        """The problem with this number added to all logits."""
        if p.weight is None:
            return replace(p, x=p.x + by * sign[..., None])
        x = p.x.clone()
        W = p.weight.clone()
        x[..., 0] = 2.0 ** round(math.log2(abs(by)) / 2) * sign
        W[:, 0] = by / x[..., 0].max()
        return replace(p, x=x, weight=W)

    out = {
        f"{by:+g} added to all logits": added(by, turns**2)
        for by in (3000.0, -3000.0, 90.0, -90.0)
    }
    out["+3000 and -3000 added to the logits of one row and the next"] = added(
        3000.0, turns
    )
    return out if kernel.softcap is None else {}


def peak(kernel: Kernel, V: int, at: int, height: float, N: int = 6) -> Problem:
    """One logit that far above where the rest is, of its own token in every other row.

    Args:
        kernel: the function that will get it.
        V: size of the vocabulary.
        at: the token of that logit.
        height: of the logit, above a rest of half the usual size.
        N: number of tokens.
    """
    p = random_problem(kernel, N, V, 3, 5)
    tokens = torch.where(torch.arange(N).reshape(p.tokens.shape) % 2 == 0, at, p.tokens)
    if p.weight is None:
        x = p.x / 2
        x[..., at] = height
        return replace(p, x=x, tokens=tokens)
    x = p.x.clone()
    W = p.weight / 2
    x[..., 0], W[:, 0], W[at] = 1, 0, 0
    W[at, 0] = height
    return replace(p, x=x, weight=W, tokens=tokens)


def peaks(kernel: Kernel) -> dict[str, Problem]:
    """Make problems whose softmax overflows or underflows if no maximum is subtracted.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    places = [(h, V, i) for h in HEIGHTS for V in (9, 1029) for i in (0, V // 2, V - 1)]
    return {
        f"the logit of token {i} of {V} is {h:g} above the rest": peak(kernel, V, i, h)
        for h, V, i in places
    }


def large(kernel: Kernel, V: int = 151_936) -> dict[str, Problem]:
    """Make two problems with the vocabulary of Qwen in float32, one token near p = 0.9.

    Args:
        kernel: the function that will get them.
        V: size of the vocabulary.

    Returns:
        Problems by their words.
    """

    def high(place: int) -> Problem:
        """A problem whose token `at` has a p near 0.9."""
        p = peak(kernel, V, place, math.log(V) + 2.8, 4)
        return replace(p, g=None, g_H=None).to(torch.float32)

    return {
        f"{V:,} ids in float32, token {place} with p near 0.9": high(place)
        for place in (0, V - 1)
    }


def forbidden(kernel: Kernel) -> dict[str, Problem]:
    """Two ids with a logit of -inf, which no token has.

    Args:
        kernel: the function that will get it.

    Returns:
        One problem by its words. None for hidden states without a bias, or with a
            softcap.
    """
    p = random_problem(kernel, 6, 9, 3, 6)
    low = torch.where(torch.arange(9) < 7, 0.0, -math.inf).double()
    p = replace(p, tokens=p.tokens.clamp(max=6))
    if p.weight is None:
        return {"two ids have a logit of -inf": replace(p, x=p.x + low)}
    if p.bias is not None and not p.softcap:
        return {"two ids have a bias of -inf": replace(p, bias=p.bias + low)}
    return {}


def ignored(kernel: Kernel) -> dict[str, Problem]:
    """Make problems whose masked tokens have the id -100.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words, of a vocabulary below and above 100.
    """
    out = {}
    for V in (9, 131):  # of the second, -100 is an id for whoever counts from the end
        p = masked(random_problem(kernel, 6, V, 3, 7), [[0, 1, 1], [1, 1, 0]])
        assert p.keep is not None
        words = f"masked tokens with an id of -100, of {V} ids"
        out[words] = replace(p, tokens=torch.where(p.keep, p.tokens, -100))
    return out


def layout(kernel: Kernel) -> dict[str, Problem]:
    """Inputs and upstream gradients that are not contiguous."""
    p = random_problem(kernel, 6, 9, 3, 8)

    def turned(u: Any) -> Any:
        """The same numbers, in memory as those of the transpose."""
        return None if u is None else u.mT.contiguous().mT

    def spread(u: Tensor | None) -> Tensor | None:
        """The first of each row, expanded to all its tokens."""
        return None if u is None else u[:, :1].expand_as(u)

    def strided(u: Tensor | None) -> Tensor | None:
        """The same numbers, between others in memory."""
        return None if u is None else torch.stack([u, 1 + u], -1)[..., 0]

    return {
        "transposed inputs": replace(
            p, x=turned(p.x), weight=turned(p.weight), tokens=turned(p.tokens)
        ),
        "transposed upstream gradients": replace(p, g=turned(p.g), g_H=turned(p.g_H)),
        "upstream gradients with a stride of 2": replace(
            p, g=strided(p.g), g_H=strided(p.g_H)
        ),
        "expanded upstream gradients (stride 0)": replace(
            p, g=spread(p.g), g_H=spread(p.g_H)
        ),
    }


def frozen(kernel: Kernel) -> dict[str, Problem]:
    """Make problems in which one input needs no gradient.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    return {
        f"the {name} needs no gradient": random_problem(kernel, seed=11, frozen=name)
        for name in ("weight", "hidden")
    }
