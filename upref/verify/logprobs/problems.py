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
# beside 1 too: a function may take what is near 1 for it
TEMPERATURES = (0.1, 4.0, 0.97, 1.001)
EXACT_TEMPERATURES = (1.0, 0.5, 2.0)  # rounding does not change their inverse
LOWEST = 0.02  # below the floors of 0.05 and 0.1 that samplers have
# of a peak above the rest: e^-87 is a normal number of float32, e^-104 is 0 in float32,
# and e^-746 in float64
HEIGHTS = (40.0, 80.0, 120.0, 800.0)


def random_problem(
    kernel: Kernel, N: int = 6, V: int = 5, H: int = 2, seed: int = 0, **settings: Any
) -> Problem:
    """Make a problem of [2, N/2] tokens, or [1, N], with both ends of the vocabulary.
    Its upstream gradients have both signs and a 0.

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
        """Return random multiples of 1/8, which are exact in bfloat16, in float64."""
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
    """Return a temperature of 0.5 where the function takes one, else 1.

    Args:
        kernel: the function, whose kind of inputs is made.
    """
    return 0.5 if "temperature" in kernel.settings else 1.0


def at_both_temperatures(
    kernel: Kernel, problems: dict[str, Problem]
) -> dict[str, Problem]:
    """Return problems of temperature 1, and then the same at `low_temperature`, with it
    in their words. A branch for unusual inputs may leave out the temperature.

    Args:
        kernel: the function that will get them.
        problems: by their words.
    """
    low = low_temperature(kernel)
    if low == 1:
        return problems
    return problems | {
        f"{words}, temperature {low:g}": replace(problem, temperature=low)
        for words, problem in problems.items()
    }


def masked(problem: Problem, keep: list[list[int]], **changes: Any) -> Problem:
    """Return the problem with some tokens masked: their upstream gradient is 0, and
    they are not compared.

    Args:
        problem: the problem.
        keep: for each token of each row, 1 if it is compared, else 0.
        **changes: other fields of the Problem.
    """
    is_kept = torch.tensor(keep, dtype=torch.bool)

    def zero_masked(upstream: Tensor | None) -> Tensor | None:
        """Return an upstream gradient that is 0 on masked tokens."""
        return None if upstream is None else upstream * is_kept

    return replace(
        problem,
        g=zero_masked(problem.g),
        g_H=zero_masked(problem.g_H),
        keep=is_kept,
        **changes,
    )


def plain(kernel: Kernel) -> dict[str, dict[str, Problem]]:
    """Make the problems on which every cause is confirmed, for each oracle.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Name of the oracle -> words -> problem.
    """
    no_gradients = dict[str, Any](g=None, g_H=None)
    # by the name of the oracle: of what the gradient is taken, and what that leaves out
    gradients: dict[str, tuple[str, dict[str, Any]]] = {
        "gradient": ("backward from the log-probs", {"g_H": None})
    }
    if kernel.has_entropy:
        gradients["entropy-gradient"] = ("backward from the entropy", {"g": None})
        gradients["gradients"] = ("backward from log-probs and entropy", {})
    small = random_problem(kernel, 1, **no_gradients)
    larger = random_problem(kernel, 10, 19, 6, 1, **no_gradients)
    problems = {
        "values": {
            "temperature 1": random_problem(kernel, **no_gradients),
            "one token": small,
            "10 tokens, 19 ids": larger,
        }
    }
    if "temperature" in kernel.settings:
        problems["temperature"] = {
            f"{temperature:g}": random_problem(
                kernel, seed=2, temperature=temperature, **no_gradients
            )
            for temperature in (0.6, 1.7)
        }
    for name, (words, unused) in gradients.items():
        problems[name] = {f"{words}, temperature 1": random_problem(kernel, **unused)}
        if "temperature" in kernel.settings:
            problems[name][f"{words}, temperature 0.6"] = random_problem(
                kernel, 10, 7, 3, 3, temperature=0.6, **unused
            )
    return problems


def tiles(kernel: Kernel) -> dict[str, Problem]:
    """Make problems a little larger than each usual tile of a GPU kernel.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    problems = {
        f"{N} tokens, {V} ids, hidden size {H}": random_problem(kernel, N, V, H, 9)
        for N, V, H in [*SQUARE, *TILES]
    }
    if not kernel.flat:
        B = 130
        of_two = random_problem(kernel, 2 * B, 5, 2, 9)
        problems[f"{B} responses of 2 tokens"] = in_rows(of_two, B)
    return at_both_temperatures(kernel, problems)


def in_rows(problem: Problem, B: int) -> Problem:
    """Return the problem with its tokens in so many responses of equal length.

    Args:
        problem: the problem.
        B: the number of responses.
    """

    def dealt(x: Tensor) -> Tensor:
        """Return a tensor [B, T, ...] of the tokens."""
        return x.reshape(B, -1, *x.shape[2:])

    return replace(
        problem,
        x=dealt(problem.x),
        tokens=dealt(problem.tokens),
        g=None if problem.g is None else dealt(problem.g),
        g_H=None if problem.g_H is None else dealt(problem.g_H),
    )


def temperatures(kernel: Kernel) -> dict[str, Problem]:
    """Make problems at lower and higher temperatures than the plain ones, and beside 1.
    The lowest has values alone: its gradients are 50 times what a logit's rounding is.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Problems by their words.
    """
    problems = {
        f"temperature {t:g}": random_problem(kernel, 6, 9, 3, 15, temperature=t)
        for t in TEMPERATURES
    }
    problems[f"temperature {LOWEST:g}"] = random_problem(
        kernel, 6, 9, 3, 15, temperature=LOWEST, g=None, g_H=None
    )
    return problems


def offset(kernel: Kernel) -> dict[str, Problem]:
    """Make problems with a constant added to all logits, or added to one row and
    subtracted from the next. In float32 it rounds little in each factor.

    Args:
        kernel: the function, whose kind of inputs is made.

    Returns:
        Problems by their words.
    """
    problem = random_problem(kernel, 6, 37, 3, 4, temperature=low_temperature(kernel))
    alternating_signs = (-1.0) ** torch.arange(6.0).reshape(2, 3).double()

    def with_added(amount: float, sign: Tensor) -> Problem:
        """Return the problem with this amount, times each token's sign, added to all
        logits of the token.
        """
        if problem.weight is None:
            return replace(problem, x=problem.x + amount * sign[..., None])
        x = problem.x.clone()
        W = problem.weight.clone()
        x[..., 0] = 2.0 ** round(math.log2(abs(amount)) / 2) * sign
        W[:, 0] = amount / x[..., 0].max()
        return replace(problem, x=x, weight=W)

    problems = {
        f"{amount:+g} added to all logits": with_added(amount, alternating_signs**2)
        for amount in (3000.0, -3000.0, 90.0, -90.0)
    }
    problems["+3000 and -3000 added to the logits of one row and the next"] = (
        with_added(3000.0, alternating_signs)
    )
    return problems if kernel.softcap is None else {}


def peak(kernel: Kernel, V: int, at: int, height: float, N: int = 6) -> Problem:
    """Make a problem in which one logit is far above the rest. Every other token is the
    one of this logit.

    Args:
        kernel: the function that will get it.
        V: size of the vocabulary.
        at: the token of that logit.
        height: of the logit, above a rest of half the usual size.
        N: number of tokens.
    """
    problem = random_problem(kernel, N, V, 3, 5)
    tokens = torch.where(
        torch.arange(N).reshape(problem.tokens.shape) % 2 == 0, at, problem.tokens
    )
    if problem.weight is None:
        x = problem.x / 2
        x[..., at] = height
        return replace(problem, x=x, tokens=tokens)
    x = problem.x.clone()
    W = problem.weight / 2
    # the logit of token `at` is `height`, from the first hidden unit alone
    x[..., 0] = 1
    W[:, 0] = 0
    W[at] = 0
    W[at, 0] = height
    return replace(problem, x=x, weight=W, tokens=tokens)


def peaks(kernel: Kernel) -> dict[str, Problem]:
    """Make problems whose softmax overflows or underflows if no maximum is subtracted.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    places = [
        (height, V, i)
        for height in HEIGHTS
        for V in (9, 1029)
        for i in (0, V // 2, V - 1)
    ]
    problems = {
        f"the logit of token {i} of {V} is {height:g} above the rest": peak(
            kernel, V, i, height
        )
        for height, V, i in places
    }
    return at_both_temperatures(kernel, problems)


def large(kernel: Kernel, V: int = 151_936) -> dict[str, Problem]:
    """Make problems with the vocabulary of Qwen in float32, one token near p = 0.9 at
    temperature 1.

    Args:
        kernel: the function that will get them.
        V: size of the vocabulary.

    Returns:
        Problems by their words.
    """

    def high(place: int) -> Problem:
        """Make a problem whose token `place` has a probability near 0.9."""
        p = peak(kernel, V, place, math.log(V) + 2.8, 4)
        return replace(p, g=None, g_H=None).to(torch.float32)

    problems = {
        f"{V:,} ids in float32, token {place} with p near 0.9": high(place)
        for place in (0, V - 1)
    }
    return at_both_temperatures(kernel, problems)


def largest(kernel: Kernel, V: int = 262_208) -> dict[str, Problem]:
    """Make a problem with the vocabulary of Gemma 3 in float32, with gradients. Its
    tokens are from all parts of the vocabulary, the last id among them.

    Args:
        kernel: the function that will get it.
        V: size of the vocabulary.

    Returns:
        The problem at each temperature by its words.
    """
    problem = random_problem(kernel, 6, V, 2, 16)
    places = torch.arange(5, -1, -1) / 5
    tokens = ((V - 1) * places.double()).round().long().reshape(problem.tokens.shape)
    problem = replace(problem, tokens=tokens, g=torch.ones_like(tokens).double())
    return at_both_temperatures(
        kernel, {f"{V:,} ids in float32": problem.to(torch.float32)}
    )


def in_dtype(kernel: Kernel, dtype: torch.dtype) -> dict[str, Problem]:
    """Make problems whose inputs have a dtype, at temperatures of 1, 0.5 and 2, whose
    inverse has no rounding: small logits, one logit far above the rest, and with values
    alone a large vocabulary. An entropy has an upstream gradient at small logits alone:
    half precision rounds it by a part that grows with the logits.

    Args:
        kernel: the function that will get them.
        dtype: of hidden states and weight, or of logits.

    Returns:
        Problems by their words.
    """
    V = 151_936
    small = random_problem(kernel, 64, 37, 3, 17)
    small = replace(small, x=0.375 * small.x)
    high = replace(peak(kernel, 1029, 7, 40.0), g_H=None)
    name = str(dtype).removeprefix("torch.")
    problems = {
        f"{name}, 37 ids": small,
        f"{name}, one logit of 1,029 is 40 above the rest": high,
        f"{name}, {V:,} ids": random_problem(kernel, 4, V, 2, 18, g=None, g_H=None),
    }
    temperatures = EXACT_TEMPERATURES if "temperature" in kernel.settings else (1.0,)
    return {
        f"{words}, temperature {t:g}": replace(problem.to(dtype), temperature=t)
        for words, problem in problems.items()
        for t in temperatures
    }


def forbidden(kernel: Kernel) -> dict[str, Problem]:
    """Make problems in which two ids that no token has have a logit of -inf.

    Args:
        kernel: the function that will get it.

    Returns:
        Problems by their words. None for hidden states without a bias, or with a
            softcap.
    """
    problem = random_problem(kernel, 6, 9, 3, 6)
    forbidden_logits = torch.where(torch.arange(9) < 7, 0.0, -math.inf).double()
    problem = replace(problem, tokens=problem.tokens.clamp(max=6))
    if problem.weight is None:
        return at_both_temperatures(
            kernel,
            {
                "two ids have a logit of -inf": replace(
                    problem, x=problem.x + forbidden_logits
                )
            },
        )
    if problem.bias is not None and not problem.softcap:
        return at_both_temperatures(
            kernel,
            {
                "two ids have a bias of -inf": replace(
                    problem, bias=problem.bias + forbidden_logits
                )
            },
        )
    return {}


def ignored(kernel: Kernel) -> Problem:
    """Make a problem whose masked tokens have the id -100, of a vocabulary of more than
    100 ids: for whoever counts from the end it is an id.

    Args:
        kernel: the function that will get it.
    """
    problem = masked(random_problem(kernel, 6, 131, 3, 7), [[0, 1, 1], [1, 1, 0]])
    assert problem.keep is not None
    return replace(problem, tokens=torch.where(problem.keep, problem.tokens, -100))


def layout(kernel: Kernel) -> dict[str, Problem]:
    """Make problems whose inputs or upstream gradients are not contiguous."""
    problem = random_problem(kernel, 6, 9, 3, 8)

    def transposed_in_memory(tensor: Any) -> Any:
        """Return the same numbers, stored as the transpose of a contiguous tensor."""
        return None if tensor is None else tensor.mT.contiguous().mT

    def expanded_from_first(tensor: Tensor | None) -> Tensor | None:
        """Return the first number of each row, expanded to all its tokens."""
        return None if tensor is None else tensor[:, :1].expand_as(tensor)

    def strided(tensor: Tensor | None) -> Tensor | None:
        """Return the same numbers, stored with another number between any two."""
        return None if tensor is None else torch.stack([tensor, 1 + tensor], -1)[..., 0]

    problems = {
        "transposed inputs": replace(
            problem,
            x=transposed_in_memory(problem.x),
            weight=transposed_in_memory(problem.weight),
            tokens=transposed_in_memory(problem.tokens),
        ),
        "transposed upstream gradients": replace(
            problem,
            g=transposed_in_memory(problem.g),
            g_H=transposed_in_memory(problem.g_H),
        ),
        "upstream gradients with a stride of 2": replace(
            problem, g=strided(problem.g), g_H=strided(problem.g_H)
        ),
        "expanded upstream gradients (stride 0)": replace(
            problem,
            g=expanded_from_first(problem.g),
            g_H=expanded_from_first(problem.g_H),
        ),
    }
    return at_both_temperatures(kernel, problems)


def frozen(kernel: Kernel) -> dict[str, Problem]:
    """Make problems in which one input needs no gradient.

    Args:
        kernel: the function that will get them.

    Returns:
        Problems by their words.
    """
    problems = {
        f"the {name} needs no gradient": random_problem(kernel, seed=11, frozen=name)
        for name in ("weight", "hidden")
    }
    return at_both_temperatures(kernel, problems)
