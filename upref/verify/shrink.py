# SPDX-License-Identifier: Apache-2.0
"""The smallest batch that still shows a finding, with both gradients."""

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.factors import declared_aggregation
from upref.verify.finding import Example, Number, number_pair
from upref.verify.measure import LossCase
from upref.verify.render import GRADIENT_DIGITS, digits_apart

MOST_SLOTS = 160  # of a batch that is printed
READ = ("logp_ref", "entropy", "logp_sampler")  # printed where the loss reads them


def shrink(
    batch: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None
) -> Rollouts:
    """Make a batch smaller while `bad` holds.

    The totals of its mini-batch and its group ids are dropped, then rows, then tokens,
    greedily; at last numbers are rounded.

    Args:
        batch: a batch for which `bad` holds.
        bad: whether a batch still shows the difference.
        at: the response and the column of a token that shows it.

    Returns:
        A batch for which `bad` holds, as small as was found.
    """

    def still_shows(x: Rollouts | None) -> bool:
        try:
            return x is not None and bad(x)
        except InputError:
            return False

    if batch.totals is not None and still_shows(_try(batch, totals=None)):
        batch = replace(batch, totals=None)
    else:
        batch = batch
    if batch.group is not None and still_shows(_try(batch, group=None)):
        batch = replace(batch, group=None)
    if at is not None:
        i, column = at
        for guess in (cut(batch, [i], [column]), cut(batch, [i], None)):
            if still_shows(guess):
                assert guess
                batch = guess
                break
    size = (len(batch.mask) + 1) // 2
    while size and len(batch.mask) > 1:
        rows = list(range(len(batch.mask)))
        for start in range(0, len(rows), size):
            guess = cut(batch, rows[:start] + rows[start + size :], None)
            if still_shows(guess):
                assert guess
                batch = guess
                break
        else:
            size = size // 2 if size > 1 else 0
    if batch.mask.numel() > MOST_SLOTS:
        batch = next(
            (guess for guess in _groups_or_rows(batch) if guess and still_shows(guess)),
            batch,
        )
    column = 0
    while column < batch.mask.shape[1] and batch.mask.shape[1] > 1:
        guess = cut(
            batch,
            list(range(len(batch.mask))),
            [
                kept_column
                for kept_column in range(batch.mask.shape[1])
                if kept_column != column
            ],
        )
        if still_shows(guess):
            assert guess
            batch = guess
        else:
            column += 1
    for digits in (1, 2, 3, 4, 6):
        if still_shows(guess := _rounded(batch, digits)):
            assert guess
            return guess
    return batch


def _groups_or_rows(batch: Rollouts) -> Iterator[Rollouts | None]:
    """The rows of a few groups, or a few rows: where no single one can be left out,
    many can be at once.
    """
    generator = random.Random(0)
    ids = list(range(len(batch.mask))) if batch.group is None else batch.group.tolist()
    for n in (2, 3, 4, 6):
        for _ in range(40):
            picked = generator.sample(sorted(set(ids)), min(n, len(set(ids))))
            yield cut(
                batch, [i for i, gradient in enumerate(ids) if gradient in picked], None
            )


def _try(batch: Rollouts, **change: Any) -> Rollouts | None:
    try:
        return replace(batch, **change)
    except InputError:
        return None


def cut(batch: Rollouts, rows: list[int], columns: list[int] | None) -> Rollouts | None:
    """These rows and columns; None where they are no batch.

    Args:
        batch: the batch.
        rows: numbers of responses.
        columns: numbers of columns; None: all.
    """
    if not rows or columns == []:
        return None
    try:
        return batch.take(rows, columns)
    except InputError:
        return None


def _rounded(batch: Rollouts, digits: int) -> Rollouts | None:
    rounded = {
        name: (x * 10**digits).round() / 10**digits
        for name, x in batch.tensors().items()
        if x.is_floating_point()
    }
    return _try(batch, **rounded)


def gradient_pair(
    expected: Tensor, found: Tensor, token: tuple[int, int], remark: str = ""
) -> tuple[Number, Number]:
    """Return the expected and the found dJ/dlp of one token, for a finding.

    Args:
        expected, found: [B, T] each.
        token: its row and its column.
        remark: what the reader should know of the expected one.
    """
    return number_pair("dJ/dlp", expected[token].item(), found[token].item(), remark)


def make_example(
    batch: Rollouts,
    expected: Tensor | None = None,
    found: Tensor | None = None,
    reads: Collection[str] = (),
) -> Example | None:
    """Return a batch as an example with the two gradients dJ/dlp, [B, T] each.

    None: the gradients are equal in all digits that are printed, so the batch shows no
    difference.

    Args:
        batch: the batch.
        expected, found: the gradients, where there are two to compare.
        reads: fields of the batch that the loss reads.
    """
    gradients = [
        None if gradient is None else gradient.double().tolist()
        for gradient in (expected, found)
    ]
    right, wrong = gradients
    if right is not None and wrong is not None and digits_apart(right, wrong) is None:
        return None
    if batch.mask.numel() > MOST_SLOTS:
        responses, tokens = batch.mask.shape
        return Example(rollouts=True, size=(responses, tokens))
    names = [
        "logp",
        "logp_old",
        "adv",
        *(n for n in READ if n in reads and getattr(batch, n) is not None),
    ]
    inputs = {name: getattr(batch, name).double().tolist() for name in names} | {
        "mask": batch.mask.tolist()
    }
    if batch.group is not None:
        inputs["group"] = batch.group.tolist()
    dtype = str(batch.logp.dtype).removeprefix("torch.")
    return Example(inputs, dtype, rollouts=True, expected=right, found=wrong)


def make_rollouts(example: Example) -> Rollouts:
    """Return the batch of an example that has its inputs.

    Args:
        example: as printed.
    """
    dtype = getattr(torch, example.dtype)
    fields: dict[str, Any] = {}
    for name, numbers in example.inputs.items():
        x = torch.tensor(numbers)
        fields[name] = (
            torch.tensor(numbers, dtype=dtype) if x.is_floating_point() else x
        )
    return Rollouts(**fields)


def example(
    case: LossCase, batch: Rollouts, dtype: torch.dtype | None = None
) -> Example | None:
    """Return the batch with the objective's gradient and the loss's, or None if these
    are equal.

    Args:
        case: the loss and its objective.
        batch: the batch, [B, T].
        dtype: of the numbers that the loss gets; None: as they are.
    """
    low = batch if dtype is None else batch.floats(dtype)
    try:
        right = case.expected(batch) * case.factors(
            batch, declared_aggregation(case.objective)
        )
        return make_example(low, right, case.gradient(low), case.loss.reads)
    except InputError:
        return make_example(low, reads=case.loss.reads)


def differ(case: LossCase, batch: Rollouts) -> Tensor:
    """The tokens of a batch whose printed dJ/dlp, the objective's and the loss's, are
    not the same number.

    Args:
        case: the loss and its objective.
        batch: the batch.

    Returns:
        [B, T].
    """
    right = case.expected(batch) * case.factors(
        batch, declared_aggregation(case.objective)
    )
    found = case.gradient(batch)
    same = torch.isclose(
        found, right, rtol=10.0 ** (1 - GRADIENT_DIGITS[-1]), atol=0, equal_nan=True
    )
    return batch.mask & ~same


def sampler_ratio(
    case: LossCase, batch: Rollouts, at: tuple[int, int]
) -> dict[str, float]:
    """Return {"ρ": π_old/μ} of this token where the objective corrects for its sampler,
    else nothing.

    Args:
        case: the loss and its objective.
        batch: the batch.
        at: the response and the column.
    """
    if case.objective.sampler is None or batch.logp_sampler is None:
        return {}
    return {"ρ": (batch.logp_old - batch.logp_sampler)[at].exp().item()}


def token_numbers(
    case: LossCase, batch: Rollouts, at: tuple[int, int]
) -> dict[str, float]:
    """Return what the weight of this token depends on, by its symbol: A, r, and ρ where
    the objective has one.

    Args:
        case: the loss and its objective.
        batch: the batch.
        at: the response and the column.
    """
    return {
        "A": batch.adv[at].item(),
        "r": case.ratio(batch)[at].item(),
    } | sampler_ratio(case, batch, at)


def smallest(
    case: LossCase, batch: Rollouts, at: tuple[int, int]
) -> tuple[Rollouts, int, int]:
    """The smallest batch in which a weight is wrong, and its worst token: a finding's
    numbers are of this batch.

    Args:
        case: the loss and its objective.
        batch: a batch with a wrong weight.
        at: a token that has it.

    Returns:
        The batch, the response and the column.
    """
    small = shrink(batch, wrong(case), at)
    return small, *worst(case.weight_error(small))


def numbers(case: LossCase, batch: Rollouts, i: int, t: int) -> tuple[float, float]:
    """The expected weight of a token of a batch, and the found one.

    Args:
        case: the loss and its objective.
        batch: the batch.
        i: the response.
        t: the column.
    """
    return case.expected(batch)[i, t].item(), case.weights(batch)[i, t].item()


def wrong(case: LossCase) -> Callable[[Rollouts], bool]:
    """Whether some token of a batch has another weight than expected.

    Args:
        case: the loss and its objective.

    Returns:
        A function from a batch to the answer, for `shrink`.
    """
    return lambda batch: bool(case.weight_error(batch).max() > 10 * case.tol)


def worst(off: Tensor) -> tuple[int, int]:
    """Find the token that is off most.

    Args:
        off: a distance for each token, [B, T].

    Returns:
        Its row and its column.
    """
    return divmod(int(off.argmax()), off.shape[1])
