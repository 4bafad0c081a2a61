# SPDX-License-Identifier: Apache-2.0
"""The text of a finding, made here for every report."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from upref.verify.finding import Example, Interval, Number, TokenPlace

SIGNS = {1.0: "A > 0", -1.0: "A < 0", 0.0: "A = 0"}
DECIDED_BY = {
    "ρ": "at some tokens (ρ = π_old/μ may tell which)",
    "others": "at some tokens beside others (each one that was tried as the only token of a batch is right)",
    "|A|": "at some tokens (|A| may tell which)",
    "π_old": "at some tokens (π_old may tell which)",
    "scattered": "at some tokens; tokens of lower or higher ratio are right",
}
DIGITS = (6, 9, 12, 17)  # of two numbers: as few as tell them apart
GRADIENT_DIGITS = (6, 9, 12)  # of two printed gradients
SAME_IN_ANOTHER_CALL = "in another call: its answers differ"
RESULT_DIGITS = 9  # of two printed results of an advantage or KL function
BOUND_DIGITS = 5
EQUATED = ("A", "KL(π_θ ‖ π_ref)")  # units that are printed as "A = 1"
EXACT = 17  # digits of a float64 that is read back as it was
LONGEST = 3000  # characters of an input that is printed


# ---- numbers -------------------------------------------------------------------------
def describe_pair(expected: Number | str, found: Number | str) -> tuple[str, str]:
    """Return what is expected and what was found, in words.

    Two numbers have as many digits as tell them apart. If nothing does, the found one
    is of another call than the one that differed.

    Args:
        expected, found: Numbers, or words.
    """
    digits = DIGITS[0]
    if isinstance(expected, Number) and isinstance(found, Number):
        digits = next(
            (n for n in DIGITS if f"{expected.value:.{n}g}" != f"{found.value:.{n}g}"),
            DIGITS[0],
        )
        if expected.unit == found.unit and expected.value == found.value:
            remark = ", ".join(filter(None, (found.remark, SAME_IN_ANOTHER_CALL)))
            found = replace(found, remark=remark)
    return _describe_number(expected, digits), _describe_number(found, digits)


def _describe_number(x: Number | str, digits: int) -> str:
    """Return a number with its unit and its remark; words stay as they are."""
    if isinstance(x, str):
        return x
    text = f"{x.value + 0.0:.{digits}g}"  # + 0.0 turns -0.0 into 0.0
    if x.unit in EQUATED:
        text = f"{x.unit} = {text}"
    elif x.unit:
        text = f"{x.unit} {text}"
    if x.remark:
        text = f"{text}, {x.remark}"
    return text


# ---- places --------------------------------------------------------------------------
def describe_places(place: TokenPlace, also: Sequence[TokenPlace] = ()) -> str:
    """Return the tokens in words: `A > 0, r > 1.28   (here A = 1, r = 1.49)`.

    Args:
        place: the tokens, with the one that is shown.
        also: other tokens.
    """
    shown = [f"{symbol} = {number:.6g}" for symbol, number in place.numbers.items()]
    remark = [place.remark] if place.remark else []
    if not (place.intervals or place.decided_by):
        return ", ".join([*_sign_words(place), *shown, *remark])
    texts = list(_tokens_of_places([place, *also]))
    text = ", ".join(["; ".join(texts), *remark])
    return f"{text}   (here {', '.join(shown)})" if shown else text


def _tokens_of_places(places: Sequence[TokenPlace]) -> Iterator[str]:
    """Yield the tokens that differ, in words: once for neighbors that only the sign of A
    tells apart and that no intervals describe.
    """
    for decided_by, neighbors in groupby(places, lambda place: place.decided_by):
        if decided_by:
            signs = [word for place in neighbors for word in _sign_words(place)]
            yield ", ".join(filter(None, [" or ".join(signs), DECIDED_BY[decided_by]]))
            continue
        for place in neighbors:
            tokens = " or ".join(map(describe_interval, place.intervals))
            yield ", ".join([*_sign_words(place), tokens])


def _sign_words(place: TokenPlace) -> list[str]:
    """Return the sign of A in words; an empty list where it does not matter."""
    return [] if place.sign is None else [SIGNS[place.sign]]


def describe_interval(interval: Interval) -> str:
    """Return ratios in words: `r > 1.28`, `0.8 < r < 1.28`, `any r`.

    The two bounds have as many digits as tell them apart.

    Args:
        interval: its bounds.
    """
    low = interval.low
    high = interval.high
    ratio = interval.symbol
    if low is None and high is None:
        return f"any {ratio}"
    if low is None:
        return f"{ratio} < {high:.{BOUND_DIGITS}g}"
    if high is None:
        return f"{ratio} > {low:.{BOUND_DIGITS}g}"
    digits = BOUND_DIGITS
    while digits < EXACT and f"{low:.{digits}g}" == f"{high:.{digits}g}":
        digits += 1
    if low == high:
        return f"{ratio} = {low:.{BOUND_DIGITS}g} alone"
    return f"{low:.{digits}g} < {ratio} < {high:.{digits}g}"


# ---- examples ------------------------------------------------------------------------
def describe_example(example: Example) -> str:
    """Return the input as Python that can be pasted, with both results as comments; a
    comment alone where that takes more than LONGEST characters.

    Args:
        example: as data.
    """
    lines = _rollouts_lines(example) if example.rollouts else _argument_lines(example)
    text = "\n".join(lines)
    if example.then:
        text = f"{text}\n{example.then}"
    if len(text) > LONGEST:
        return f"# the smallest batch that shows it takes {len(text):,} characters: too many to print"
    return text


def _rollouts_lines(example: Example) -> Iterator[str]:
    """Yield lines of Python that make the batch of an example."""
    if example.code:
        yield example.code
        return
    if example.size:
        yield (
            f"# no small batch shows it; the smallest found has "
            f"{_describe_size(*example.size)}, too many to print"
        )
        return
    yield "b = upref.Rollouts("
    for name, numbers in example.inputs.items():
        yield f"    {name}={_tensor_code(numbers, example.dtype)},"
    yield ")"
    digits = GRADIENT_DIGITS[0]
    if example.expected is not None and example.found is not None:
        digits = digits_apart(example.expected, example.found) or GRADIENT_DIGITS[-1]
    if example.expected is not None:
        yield f"# expected dJ/dlp: {_list_code(example.expected, digits)}"
    if example.found is not None:
        yield f"# found    dJ/dlp: {_list_code(example.found, digits)}"


def _describe_size(responses: int, tokens: int) -> str:
    """Return the size of a batch that is too large to print, in words."""
    if responses == 1:
        return f"1 response of {tokens} tokens"
    return f"{responses} responses of up to {tokens} tokens"


def _argument_lines(example: Example) -> Iterator[str]:
    """Yield lines of Python that make the arguments of an example."""
    if example.code:
        yield example.code
    for name, numbers in example.inputs.items():
        if isinstance(numbers, list):
            yield f"{name} = {_tensor_code(numbers, example.dtype)}"
        else:
            yield f"{name} = {numbers:g}"
    if example.expected is not None:
        yield f"# expected  {_list_code(example.expected, RESULT_DIGITS)}"
    if example.found is not None:
        yield f"# found     {_list_code(example.found, RESULT_DIGITS)}"


def _tensor_code(numbers: list[Any], dtype: str) -> str:
    """Return Python that makes a tensor: of this dtype if it holds floats."""
    first_number: Any = numbers
    while isinstance(first_number, list) and first_number:
        first_number = first_number[0]
    if isinstance(first_number, float):
        return f"torch.tensor({_list_code(numbers, EXACT)}, dtype=torch.{dtype})"
    return f"torch.tensor({numbers})"


def digits_apart(x: list[Any], y: list[Any]) -> int | None:
    """Return the digits in which two gradients differ when they are printed.

    None: they are equal in all digits that are ever printed.

    Args:
        x, y: nested lists of numbers.
    """
    differing = (n for n in GRADIENT_DIGITS if _list_code(x, n) != _list_code(y, n))
    return next(differing, None)


def _list_code(x: Any, digits: int) -> str:
    """Return Python for a number or for nested lists of numbers."""
    if isinstance(x, list):
        return "[" + ", ".join(_list_code(entry, digits) for entry in x) + "]"
    if not math.isfinite(x):
        return f'float("{x}")'
    return repr(x) if digits == EXACT else f"{x + 0.0:.{digits}g}"
