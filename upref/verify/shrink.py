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
OPTIONAL_FIELDS = (
    "logp_ref",
    "entropy",
    "logp_sampler",
)  # printed if the loss reads them
DIGITS = (1, 2, 3, 4, 6)  # behind the point, to which numbers are rounded at last


def shrink(
    batch: Rollouts, bad: Callable[[Rollouts], bool], at: tuple[int, int] | None = None
) -> Rollouts:
    """Make a batch smaller while `bad` holds.

    The totals of its mini-batch and its group ids are dropped, then rows, then tokens,
    greedily; at last numbers are rounded.

    Args:
        batch: a batch for which `bad` holds.
        bad: whether a batch still shows the difference. A batch on which it raises
            InputError does not.
        at: the response and the column of a token that shows it: this token alone, then
            its response alone, is tried first.

    Returns:
        A batch for which `bad` holds, as small as was found.
    """

    def still_shows(smaller: Rollouts) -> bool:
        """Return whether a smaller batch still shows the difference."""
        try:
            return bad(smaller)
        except InputError:
            return False

    for field in ("totals", "group"):
        if getattr(batch, field) is not None:
            without = _with_fields(batch, **{field: None})
            if without is not None and still_shows(without):
                batch = without
    if at is not None:
        batch = _only_token_or_response(batch, at, still_shows)
    batch = _with_fewer_rows(batch, still_shows)
    if batch.mask.numel() > MOST_SLOTS:
        for some_rows in _random_rows(batch):
            if some_rows is not None and still_shows(some_rows):
                batch = some_rows
                break
    batch = _with_fewer_columns(batch, still_shows)
    for digits in DIGITS:
        rounded = _rounded(batch, digits)
        if rounded is not None and still_shows(rounded):
            return rounded
    return batch


def _only_token_or_response(
    batch: Rollouts, at: tuple[int, int], still_shows: Callable[[Rollouts], bool]
) -> Rollouts:
    """Return the token at this row and column alone, else its response alone, else the
    batch: the first that still shows the difference.
    """
    row, column = at
    for columns in ([column], None):
        part = cut(batch, [row], columns)
        if part is not None and still_shows(part):
            return part
    return batch


def _with_fewer_rows(
    batch: Rollouts, still_shows: Callable[[Rollouts], bool]
) -> Rollouts:
    """Drop blocks of rows while the difference still shows: half of the rows, then a
    quarter, down to one row.
    """
    size = (len(batch.mask) + 1) // 2
    while size and len(batch.mask) > 1:
        rows = list(range(len(batch.mask)))
        for start in range(0, len(rows), size):
            part = cut(batch, rows[:start] + rows[start + size :], None)
            if part is not None and still_shows(part):
                batch = part
                break
        else:
            size = size // 2 if size > 1 else 0
    return batch


def _with_fewer_columns(
    batch: Rollouts, still_shows: Callable[[Rollouts], bool]
) -> Rollouts:
    """Drop single columns while the difference still shows, from the first to the last."""
    column = 0
    while column < batch.mask.shape[1] and batch.mask.shape[1] > 1:
        rows = list(range(len(batch.mask)))
        other_columns = [i for i in range(batch.mask.shape[1]) if i != column]
        part = cut(batch, rows, other_columns)
        if part is not None and still_shows(part):
            batch = part
        else:
            column += 1
    return batch


def _random_rows(batch: Rollouts) -> Iterator[Rollouts | None]:
    """Yield the rows of a few random groups, or a few random rows of a batch without
    groups. Where no block of rows can be dropped, most rows at once may be.
    """
    generator = random.Random(0)
    ids = list(range(len(batch.mask))) if batch.group is None else batch.group.tolist()
    distinct_ids = sorted(set(ids))
    for count in (2, 3, 4, 6):
        for _ in range(40):
            kept_ids = generator.sample(distinct_ids, min(count, len(distinct_ids)))
            rows = [row for row, group_id in enumerate(ids) if group_id in kept_ids]
            yield cut(batch, rows, None)


def _with_fields(batch: Rollouts, **change: Any) -> Rollouts | None:
    """Return the batch with other fields, or None where these are no batch."""
    try:
        return replace(batch, **change)
    except InputError:
        return None


def cut(batch: Rollouts, rows: list[int], columns: list[int] | None) -> Rollouts | None:
    """Return these rows and columns of a batch, or None where they are no batch, such as
    where a row keeps no token.

    Args:
        batch: the batch.
        rows: the rows that are kept.
        columns: the columns that are kept; None keeps all.
    """
    if not rows or columns == []:
        return None
    try:
        return batch.take(rows, columns)
    except InputError:
        return None


def _rounded(batch: Rollouts, digits: int) -> Rollouts | None:
    """Return the batch with numbers of so many digits behind the point, or None where
    these are no batch.
    """
    rounded = {
        name: (x * 10**digits).round() / 10**digits
        for name, x in batch.tensors().items()
        if x.is_floating_point()
    }
    return _with_fields(batch, **rounded)


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
    """Return a batch as an example with the two gradients dJ/dlp, [B, T] each, or None
    where these are equal in all digits that are printed.

    Args:
        batch: the batch.
        expected, found: the gradients, where there are two to compare.
        reads: the fields of the batch that the loss reads.
    """
    right = None if expected is None else expected.double().tolist()
    wrong = None if found is None else found.double().tolist()
    if right is not None and wrong is not None and digits_apart(right, wrong) is None:
        return None
    if batch.mask.numel() > MOST_SLOTS:
        responses, tokens = batch.mask.shape
        return Example(rollouts=True, size=(responses, tokens))
    names = [
        "logp",
        "logp_old",
        "adv",
        *(n for n in OPTIONAL_FIELDS if n in reads and getattr(batch, n) is not None),
    ]
    inputs = {name: getattr(batch, name).double().tolist() for name in names}
    inputs["mask"] = batch.mask.tolist()
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
        if x.is_floating_point():
            x = torch.tensor(numbers, dtype=dtype)
        fields[name] = x
    return Rollouts(**fields)


def example(
    case: LossCase, batch: Rollouts, dtype: torch.dtype | None = None
) -> Example | None:
    """Return the batch with the objective's gradient and the loss's, or None if these
    are equal in all digits that are printed; without gradients if the loss refuses it.

    Args:
        case: the loss and its objective.
        batch: the batch, [B, T].
        dtype: the dtype of the numbers that the loss gets; None keeps the batch's own.
    """
    inputs = batch if dtype is None else batch.floats(dtype)
    try:
        right = _expected_gradient(case, batch)
        _, found = case.kept_value_and_gradient(inputs)
        return make_example(inputs, right, found, case.loss.reads)
    except InputError:
        return make_example(inputs, reads=case.loss.reads)


def _expected_gradient(case: LossCase, batch: Rollouts) -> Tensor:
    """Return the objective's dJ/dlp on a batch, [B, T]."""
    factors = case.factors(batch, declared_aggregation(case.objective))
    return case.expected(batch) * factors


def differ(case: LossCase, batch: Rollouts) -> Tensor:
    """Mark the tokens of a batch at which the objective's dJ/dlp and the loss's differ in
    the digits that are printed. NaN equals NaN.

    Args:
        case: the loss and its objective.
        batch: the batch.

    Returns:
        [B, T].
    """
    right = _expected_gradient(case, batch)
    _, found = case.kept_value_and_gradient(batch)
    printed_precision = 10.0 ** (1 - GRADIENT_DIGITS[-1])
    is_same = torch.isclose(
        found, right, rtol=printed_precision, atol=0, equal_nan=True
    )
    return batch.mask & ~is_same


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
    """Return the numbers on which the weight of this token depends, by their symbols:
    A, the ratio on which the objective acts, and ρ where it has one.

    Args:
        case: the loss and its objective.
        batch: the batch.
        at: the response and the column.
    """
    return {
        "A": batch.adv[at].item(),
        case.objective.ratio_symbol: case.ratio(batch)[at].item(),
    } | sampler_ratio(case, batch, at)


def smallest(
    case: LossCase, batch: Rollouts, at: tuple[int, int]
) -> tuple[Rollouts, int, int]:
    """Return the smallest batch in which a weight is wrong, and the token that differs
    most in it. A finding prints the numbers of this batch.

    Args:
        case: the loss and its objective.
        batch: a batch with a wrong weight.
        at: a token that has it.

    Returns:
        The batch, the response and the column.
    """
    small = shrink(batch, wrong(case), at)
    return small, *worst(case.weight_error(small, case.kept_weights(small)))


def numbers(case: LossCase, batch: Rollouts, i: int, t: int) -> tuple[float, float]:
    """Return the expected and the found weight of a token of a batch.

    Args:
        case: the loss and its objective.
        batch: the batch.
        i: the response.
        t: the column.
    """
    return case.expected(batch)[i, t].item(), case.kept_weights(batch)[i, t].item()


def wrong(case: LossCase) -> Callable[[Rollouts], bool]:
    """Make the condition, for `shrink`, that some token of a batch has another weight
    than expected, beyond 10 times the tolerance.

    Args:
        case: the loss and its objective.

    Returns:
        A function from a batch to whether it holds.
    """

    def is_wrong(batch: Rollouts) -> bool:
        """Return whether some token of this batch has another weight."""
        errors = case.weight_error(batch, case.kept_weights(batch))
        return bool(errors.max() > 10 * case.tol)

    return is_wrong


def worst(errors: Tensor) -> tuple[int, int]:
    """Find the token with the largest error.

    Args:
        errors: an error for each token, [B, T].

    Returns:
        Its row and its column.
    """
    return divmod(int(errors.argmax()), errors.shape[1])
