# SPDX-License-Identifier: Apache-2.0
"""Oracles that need no reference: changes of a batch that must not change a loss's
gradient, or must change it in a known way.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts, per_response
from upref.user_code import ROWS
from upref.user_code.names import CALLED
from upref.verify.explain import (
    alike,
    cause_if_confirmed_at,
    first_confirmed,
    holds_on_other_batches,
)
from upref.verify.faults import measured
from upref.verify.faults.batch_reading import LARGE, clipped
from upref.verify.faults.denominators import group_order_faults
from upref.verify.finding import NO_CAUSE, Cause, Number, number_pair
from upref.verify.measure import VALUE_ROUNDING, LossCase
from upref.verify.oracle import oracle, refused
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import (
    cut,
    example,
    gradient_pair,
    make_example,
    shrink,
    worst,
)
from upref.weights.batches import OFF_EDGES

# causes that are read off a gradient at once, without a search
MASK_IGNORED = measured.MASK_IGNORED.cause()
OVER_WIDTH = measured.PADDED_WIDTH_FOR_LENGTH.cause()
OVER_SLOTS = "it divides by the number of all slots of the batch, padding included"
OVER_TOKENS = "a row without tokens counts as one token"
OVER_ROWS = "the row is counted among the responses of a mean"
FIRST_COLUMN = Cause(
    "the advantage of a response is read from the first column, which may be padding",
    ("advantage-of-first-column",),
)
SIZE_DIVIDED_OUT = Cause(
    "the size of A has no effect: it is divided out, or only the sign of A is read",
    ("advantage-size-divided-out",),
)
SQUARED = Cause("A enters squared", ("advantage-squared",))


def gradient_distance(found: Tensor, due: Tensor, mask: Tensor, tol: float) -> Tensor:
    """Return how far each unmasked slot of a gradient is from what it should be,
    relative to the largest finite number on unmasked slots of the right gradient.

    What the slots of padding hold has no effect: a wrong loss may have huge numbers or
    NaN there, and would fail, or pass, every oracle by them.

    Args:
        found: a gradient, [B, T].
        due: the gradient that it should be, [B, T].
        mask: of the tokens that train, [B, T].
        tol: distances up to this are 0.

    Returns:
        [B, T]: 0 on masked slots, and where neither gradient is finite; infinite where
        one of them is finite and the other is not.
    """
    due_is_finite = due.isfinite()
    found_is_finite = found.isfinite()
    scale = torch.where(mask & due_is_finite, due, 0).abs().amax().clamp(min=1e-30)
    distance = (found - due).abs() / scale
    distance = torch.where(found_is_finite & due_is_finite, distance, math.inf)
    is_compared = mask & (found_is_finite | due_is_finite)
    return torch.where(is_compared & (distance > tol), distance, 0)


def grid_off_bounds(case: LossCase) -> Rollouts:
    """Return the grid without ratios on a bound, where the order of a sum would decide.

    Args:
        case: the loss and its objective.

    Returns:
        The batch, made once: do not write to it.
    """
    return case.cached(
        ("off bounds", *case.hp_without_kl.items()),
        lambda: case.grid(thin=3, edges=OFF_EDGES).but(totals=None),
    )


@oracle("padding", 60)
def padding(case: LossCase) -> list[Finding]:
    """Report masked slots that have a gradient, and further masked columns, a row or a
    prompt that change something.

    Args:
        case: the loss and its objective.

    Returns:
        A failure for masked slots of the batch that have a gradient; what `_padded_side`
        reports of columns on the right and on the left; what `_empty_row` reports of a
        masked row, and `_empty_prompt` of a masked prompt.
    """
    batch = grid_off_bounds(case)
    value, gradient = case.kept_value_and_gradient(batch)
    findings = []
    of_masked = torch.where(batch.mask, 0, gradient.abs().nan_to_num(nan=math.inf))
    if of_masked.max() > 0:
        findings.append(_masked_gradient_failure(case, batch))
    for left_columns, right_columns in ((0, 3), (2, 0)):
        findings += _padded_side(
            case, batch, value, gradient, left_columns, right_columns
        )
    findings += _empty_row(case, batch, gradient)
    return findings + _empty_prompt(case, batch, findings)


def _masked_gradient_failure(case: LossCase, batch: Rollouts) -> Finding:
    """Return the failure that masked slots of this batch have a gradient."""

    def has_masked_gradient(batch: Rollouts) -> bool:
        """Return whether a masked slot has a gradient."""
        return bool((case.gradient(batch)[~batch.mask] != 0).any())

    def gradients_without_mask(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradient, and that of the reference which ignores the mask."""
        unmasked = batch.but(mask=torch.ones_like(batch.mask), totals=None)
        expected = case.expected(unmasked) * case.factors(unmasked)
        return case.gradient(batch), expected

    shown = example(case, shrink(batch, has_masked_gradient))
    ignores_mask = holds_on_other_batches(case, gradients_without_mask)
    return fail(
        "padding",
        "masked slots that hold ordinary numbers",
        Number(0, "weight"),
        "a gradient flows into them",
        shown,
        MASK_IGNORED if ignores_mask else NO_CAUSE,
    )


def _padded_side(
    case: LossCase, batch: Rollouts, value: Tensor, g: Tensor, left: int, right: int
) -> list[Finding]:
    """Report columns of padding on one side that change something: a failure where a
    gradient of a token changes, a note where only the value does.

    Args:
        case: the loss and its objective.
        batch: a batch.
        value, g: the loss and its gradient on the batch: a scalar and [B, T].
        left, right: the number of columns on either side; one of them is 0.
    """
    columns = left + right
    side = f"{columns} columns of padding on the {'left' if left else 'right'}"

    def padded(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the value and the gradient of the wider batch, without the new columns."""
        value, gradient = case.value_and_gradient(_widened(batch, left, right))
        return value, gradient[:, left : left + batch.mask.shape[1]]

    def difference(batch: Rollouts) -> Tensor:
        """Return how much the gradient of each token changes, [B, T]."""
        _, gradient = case.kept_value_and_gradient(batch)
        return gradient_distance(
            padded(batch)[1], gradient, batch.mask, case.allowed_error()
        )

    def by_width(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the two gradients, each times the width of its batch."""
        width = batch.mask.shape[1]
        return padded(batch)[1] * (width + columns), case.gradient(batch) * width

    wider, of_padded = padded(batch)
    distances = gradient_distance(of_padded, g, batch.mask, case.allowed_error())
    if distances.max() == 0:
        value_tol = max(VALUE_ROUNDING, case.value_tol)
        if not (wider - value).abs() > value_tol * value.abs().clamp(min=1e-3):
            return []
        expected_number, found_number = number_pair("value", value.item(), wider.item())
        text = (
            f"with {side} the value moves from {value.item():.6g} to {wider.item():.6g}, "
            "and the gradient does not"
        )
        return [note("padding", text, expected_number, found_number)]
    small = shrink(batch, lambda c: bool(difference(c).max() > 0), worst(distances))
    token = worst(difference(small))
    if holds_on_other_batches(case, by_width):
        why = OVER_WIDTH
    elif left and _reads_first_column(case, left):
        why = FIRST_COLUMN
    else:
        why = NO_CAUSE
    _, expected = case.kept_value_and_gradient(small)
    found = padded(small)[1]
    expected_number, found_number = gradient_pair(expected, found, token, "as without")
    wide = _widened(small, left, right)
    narrow = torch.nn.functional.pad(expected, (left, right))
    shown = make_example(wide, narrow, case.gradient(wide), case.loss.reads)
    return [fail("padding", f"with {side}", expected_number, found_number, shown, why)]


def _widened(batch: Rollouts, left: int, right: int = 0) -> Rollouts:
    """Return the batch with so many more columns of padding on either side."""

    def pad(field: str, x: Tensor) -> Tensor:
        """Return a field with more columns; the ids of groups have none."""
        if field == "group":
            return x
        filler = -0.7 if x.is_floating_point() else 0
        return torch.nn.functional.pad(x, (left, right), value=filler)

    return batch.map(pad)


def _reads_first_column(case: LossCase, left: int) -> bool:
    """Return whether the advantage of a response is read from the first column, which
    may be padding, as it is or set to 0. It must be so with one column of padding and
    with several: else another column is read.
    """

    def gradients_of_first_column(
        batch: Rollouts, columns: int, zeroed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the wider batch, and that of the reference whose
        advantages are those of the first column.
        """
        widened = _widened(batch, columns)
        A = torch.where(widened.mask, widened.adv, 0) if zeroed else widened.adv
        first_for_all = widened.but(adv=A[:, :1].expand_as(widened.mask))
        expected = case.expected(first_for_all) * case.factors(first_for_all)
        return case.gradient(widened), expected

    def is_right_around_hole() -> bool:
        """Return whether the cause holds where the second column is masked and the first
        one is not: a loss that loses all tokens behind a masked slot has no gradient
        either where padding that is set to 0 is first.
        """
        batch = case.on_policy()
        rows = (batch.mask[:, 0] & (batch.mask.sum(1) > 2)).nonzero()[:, 0].tolist()
        part = cut(replace(batch, totals=None), rows, None)
        if part is None:
            return False
        mask = part.mask.clone()
        mask[:, 1] = False
        holed = case.visible_batch(part.but(mask=mask))
        try:
            return alike(*gradients_of_first_column(holed, 0, zeroed=True))
        except InputError:
            return False

    def holds(zeroed: bool) -> bool:
        """Return whether the cause holds for padding that is set to 0, or that is not."""
        return all(
            holds_on_other_batches(
                case,
                partial(gradients_of_first_column, columns=columns, zeroed=zeroed),
            )
            for columns in (1, left)
        )

    return holds(zeroed=False) or (holds(zeroed=True) and is_right_around_hole())


def _empty_row(case: LossCase, batch: Rollouts, gradient: Tensor) -> list[Finding]:
    """Report a fully masked row, with which frameworks pad batches, that counts in a
    mean over tokens, or that has a gradient of its own. What it counts in a mean over
    responses is not defined; there, NaN or infinity is a note. Nothing is returned if the
    loss refuses such a row, or leaves the reduction to its caller.
    """
    if case.loss.left_to_caller:
        return []
    try:
        value, longer_gradient = _value_and_gradient_with_masked_row(case, batch)
    except InputError:
        return []
    text = "with a row that is masked throughout"
    if case.objective.agg not in ("token-mean", "group-token-mean"):
        if value.isfinite() and longer_gradient.isfinite().all():
            return []
        found = "NaN" if value.isnan() or longer_gradient.isnan().any() else "inf"
        text = f"a row that is masked throughout makes the loss or its gradient {found}"
        advice = "drop such rows, or divide by lengths of at least 1"
        return [note("padding", text, "a number", found, advice)]
    distances = gradient_distance(
        longer_gradient[:-1], gradient, batch.mask, case.allowed_error()
    )
    if distances.max() != 0:
        expected_number, found_number = gradient_pair(
            gradient, longer_gradient, worst(distances), "as without"
        )
        why = _cause_of_counted_row(case)
        if not value.isfinite():
            text += f", where the loss itself is {'NaN' if value.isnan() else 'inf'}"
        return [fail("padding", text, expected_number, found_number, cause=why)]
    own_gradient = longer_gradient[-1]
    if (own_gradient == 0).all():
        return []
    _, t = worst(own_gradient.abs().nan_to_num(nan=math.inf)[None])
    return [
        fail(
            "padding",
            text,
            Number(0, "dJ/dlp"),
            Number(own_gradient[t].item(), "dJ/dlp"),
            cause="the masked row has a gradient of its own",
        )
    ]


def _empty_prompt(
    case: LossCase, batch: Rollouts, findings: list[Finding]
) -> list[Finding]:
    """Note a prompt whose responses are all masked, as a filter leaves them, if it makes
    the loss or its gradient NaN or infinite. What it counts in a mean over prompts is not
    defined. Nothing is returned for a batch without prompts, or after a finding of NaN.
    """
    if batch.group is None or case.loss.left_to_caller:
        return []
    if any(finding.found == "NaN" for finding in findings):
        return []  # such a row alone is enough
    try:
        value, gradient = _value_and_gradient_with_masked_row(
            case, batch, is_of_own_prompt=True
        )
    except InputError:
        return []
    if value.isfinite() and gradient.isfinite().all():
        return []
    found = "NaN" if value.isnan() or gradient.isnan().any() else "inf"
    text = (
        "a prompt of which all responses are masked throughout makes the loss or its "
        f"gradient {found}"
    )
    advice = "drop such prompts, or divide by their tokens with clamp(min=1)"
    return [note("padding", text, "a number", found, advice)]


def _value_and_gradient_with_masked_row(
    case: LossCase, batch: Rollouts, is_of_own_prompt: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the value and the gradient with a masked row behind the others, [B + 1,
    T]. It belongs to the first row's prompt, or to none of the others.
    """
    longer = _with_masked_row(batch)
    if is_of_own_prompt:
        assert longer.group is not None
        longer.group[-1] = longer.group.max() + 1
    return case.value_and_gradient(longer)


def _with_masked_row(batch: Rollouts) -> Rollouts:
    """Return the batch with a masked row of the first row's prompt behind the others."""
    rows = {name: torch.cat([x, x[:1]]) for name, x in batch.tensors().items()}
    rows["mask"][-1] = False
    # Rollouts itself refuses such a row
    return Rollouts.unchecked(**rows)


def _cause_of_counted_row(case: LossCase) -> str:
    """Return in words what a masked row counts as, in its slots or as a row; "" where
    neither explains the gradients of other batches.
    """

    def by_rows(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradients with and without that row, each times its number of
        rows.
        """
        _, longer_gradient = _value_and_gradient_with_masked_row(case, batch)
        found = longer_gradient[:-1] * (len(batch.mask) + 1)
        return found, case.gradient(batch) * len(batch.mask)

    def by_tokens(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradients with and without that row, each over the factor that
        counts a token of the row, or none.
        """
        _, longer_gradient = _value_and_gradient_with_masked_row(case, batch)
        counted = _with_masked_row(batch)
        counted.mask[-1, 0] = True
        found = longer_gradient / case.factors(counted)
        return found[:-1], case.gradient(batch) / case.factors(batch)

    def by_slots(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradients with that row and one more column, and without them, each
        times its number of slots.
        """
        wider = _widened(batch, 0, 1)
        _, longer_gradient = _value_and_gradient_with_masked_row(case, wider)
        found = longer_gradient[:-1, :-1] * longer_gradient.numel()
        return found, case.gradient(batch) * batch.mask.numel()

    if holds_on_other_batches(case, by_slots):
        return OVER_SLOTS
    if holds_on_other_batches(case, by_rows):
        return OVER_ROWS
    return OVER_TOKENS if holds_on_other_batches(case, by_tokens) else ""


# the numbers that padding may hold
JUNK = (0.0, -30.0, 30.0)
NOT_NUMBERS = (math.nan, math.inf, -math.inf, 1e30)
LEAK = "{} in a masked slot reaches the gradient; select with torch.where(mask, x, 0) before you multiply"


MASKED_VALUES = ("logp", "logp_old", "adv", "logp_ref", "entropy", "logp_sampler")


@oracle("masked-values", 70)
def masked_values(case: LossCase) -> list[Finding]:
    """Report numbers in masked slots that change the result.

    Args:
        case: the loss and its objective.

    Returns:
        A failure for the first number of JUNK that does, or one note: for such a number if
        the loss is a framework's own; for the first of NOT_NUMBERS, since frameworks pad
        with numbers; or for a batch that the loss refuses. Else nothing.
    """
    batch = case.grid(thin=5)
    clean = case.kept_value_and_gradient(batch)
    fields = [
        field
        for field in MASKED_VALUES
        if field in case.loss.reads and getattr(batch, field) is not None
    ]
    if case.loss.adv_shape not in ("BT", ROWS) and "adv" in fields:
        fields.remove("adv")
    # one argument at a time is filled only where all of them at a time show a leak
    numbers: tuple[float, ...] = JUNK
    if not _ignores_nan(case, batch, clean, fields):
        numbers = (*JUNK, *NOT_NUMBERS)
    leaks: list[Finding] = []
    for number, field in product(numbers, fields):
        if leaks and number not in JUNK:
            break
        fill = partial(_filled, field=field, number=number)
        regime = f"masked slots of {CALLED[field]} hold {number:g}"
        try:
            filled = case.value_and_gradient(fill(batch))
            if not _changes(case, batch, clean, filled):
                continue
            _allow_own_changes(case, batch)
            change = _changes(case, batch, clean, filled)
        except InputError as e:
            return [refused("masked-values", regime, e)]
        if not change:
            continue
        if number in JUNK and not case.loss.framework:
            return [_masked_slots_failure(case, batch, fill, regime)]
        if not leaks:
            advice = LEAK.format(f"{number:g}".replace("nan", "NaN"))
            leaks.append(
                note("masked-values", regime, "no effect, bit for bit", change, advice)
            )
    return leaks


CALLS_ON_ONE_BATCH = 8


def _allow_own_changes(case: LossCase, batch: Rollouts) -> None:
    """Call the loss on one batch several times, so that a value that changes from call to
    call, as one of rows in a random order, is not blamed on masked slots.
    """
    answers = [case.value_and_gradient(batch) for _ in range(CALLS_ON_ONE_BATCH)]
    case.allow_values([value for value, _ in answers])


def _filled(batch: Rollouts, field: str, number: float) -> Rollouts:
    """Return the batch with this number in the masked slots of one field."""
    values = getattr(batch, field).masked_fill(~batch.mask, number)
    return batch.but(**{field: values})


def _filled_in_turn(batch: Rollouts, fields: list[str], turn: int) -> Rollouts:
    """Return the batch with the NOT_NUMBERS in the masked slots of all fields, in turn."""
    for place, field in enumerate(fields, turn):
        batch = _filled(batch, field, NOT_NUMBERS[place % len(NOT_NUMBERS)])
    return batch


def _ignores_nan(
    case: LossCase, batch: Rollouts, clean: tuple[Tensor, Tensor], fields: list[str]
) -> bool:
    """Return whether NaN in each argument, and each of NOT_NUMBERS in all arguments at a time,
    change nothing. A clamp of log r may hide the one or the other. False if the loss
    refuses such a batch.
    """
    try:
        for field in fields:
            filled = _filled(batch, field, math.nan)
            if _changes(case, batch, clean, case.value_and_gradient(filled)):
                return False
        for turn in range(len(NOT_NUMBERS)):
            filled = _filled_in_turn(batch, fields, turn)
            if _changes(case, batch, clean, case.value_and_gradient(filled)):
                return False
    except InputError:
        return False
    return True


def _masked_slots_failure(
    case: LossCase,
    batch: Rollouts,
    fill: Callable[[Rollouts], Rollouts],
    regime: str,
) -> Finding:
    """Return the failure that these numbers in masked slots change the loss."""

    def change(smaller: Rollouts) -> str:
        """Return what changes with these numbers in the masked slots, in words."""
        clean = case.value_and_gradient(smaller)
        return _changes(case, smaller, clean, case.value_and_gradient(fill(smaller)))

    def still_changes(smaller: Rollouts) -> bool:
        """Return whether anything changes."""
        return bool(change(smaller))

    small = shrink(batch, still_changes)
    what = change(small)
    shown = example(case, fill(small))
    if shown is None:
        shown = make_example(fill(small), reads=case.loss.reads)
    return fail(
        "masked-values",
        regime,
        "no effect, bit for bit",
        what,
        shown,
        "masked slots affect the result",
    )


def _changes(
    case: LossCase,
    batch: Rollouts,
    clean: tuple[Tensor, Tensor],
    filled: tuple[Tensor, Tensor],
) -> str:
    """Return what other numbers in masked slots change, in words; "" for nothing. A value
    that changes from call to call does not show it.

    Args:
        case: the loss and its objective.
        batch: the batch, of which the mask is read.
        clean: the value and the gradient without these numbers.
        filled: the value and the gradient with them.
    """
    value, gradient = clean
    filled_value, filled_gradient = filled
    changes = []
    is_same_value = _same_numbers(filled_value, value)
    if not is_same_value and not case.is_same_value(filled_value, value):
        changes.append(
            f"the loss is {filled_value.item():.4g} instead of {value.item():.4g}"
        )
    if not _same_numbers(filled_gradient[batch.mask], gradient[batch.mask]):
        changes.append("the gradient of unmasked tokens changes")
    if not (filled_gradient[~batch.mask] == 0).all():
        changes.append("the gradient of the masked slots is not 0")
    return " and ".join(changes)


def _same_numbers(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit; NaN is equal to NaN: what is NaN
    without the numbers in masked slots does not show what they do.
    """
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _depends_on_order(
    case: LossCase, batch: Rollouts, gradient: Tensor, order: Tensor
) -> bool:
    """Return whether the gradient of the rows in this order differs from the gradient
    of the batch, its rows put in the same order.
    """
    reordered = case.gradient(batch.take(order))
    return bool(
        gradient_distance(
            reordered, gradient[order], batch.mask[order], case.allowed_error()
        ).max()
        > 0
    )


def _rolled(batch: Rollouts) -> Tensor:
    """Return the order with the last response first."""
    return torch.arange(len(batch.mask)).roll(1)


def _reversed(batch: Rollouts) -> Tensor:
    """Return the order from the last response to the first."""
    return torch.arange(len(batch.mask)).flip(0)


def _shuffled(batch: Rollouts) -> Tensor:
    """Return a random order of the responses, the same in each process."""
    return torch.randperm(len(batch.mask), generator=torch.Generator())


def _shortest_first(batch: Rollouts) -> Tensor:
    """Return the order by length, the shortest response first."""
    return batch.mask.sum(1).argsort(stable=True)


def _longest_first(batch: Rollouts) -> Tensor:
    """Return the order by length, the longest response first."""
    return batch.mask.sum(1).argsort(descending=True, stable=True)


def _best_first(batch: Rollouts) -> Tensor:
    """Return the order by the advantage of the first token, the largest first."""
    A = per_response(batch.adv, batch.mask)
    return A.argsort(descending=True, stable=True)


def _prompt_by_prompt(batch: Rollouts) -> Tensor:
    """Return the order by prompt, ids ascending; that of the batch without ids."""
    if batch.group is None:
        return torch.arange(len(batch.mask))
    return batch.group.argsort(stable=True)


def _prompts_in_turn(batch: Rollouts) -> Tensor:
    """Return the order in which the first response to each prompt comes, then the
    second to each; that of the batch without ids.
    """
    if batch.group is None:
        return torch.arange(len(batch.mask))
    is_same = batch.group[:, None] == batch.group
    place_in_prompt = is_same.tril(-1).sum(1)
    ids = batch.group.unique(return_inverse=True)[1]
    # sorts by place, and by id where places are equal
    return (place_in_prompt * len(ids) + ids).argsort()


RANKS = 4  # to which `_dealt_to_ranks` deals the rows


def _dealt_to_ranks(batch: Rollouts) -> Tensor:
    """Return the order in which rows that are sorted by prompt, or as they are without
    ids, are dealt to ranks like cards: those of the first rank, then of the second.
    """
    order = _prompt_by_prompt(batch)
    return torch.cat([order[rank::RANKS] for rank in range(RANKS)])


ORDERS = (
    _rolled,
    _reversed,
    _shuffled,
    _shortest_first,
    _longest_first,
    _best_first,
    _prompt_by_prompt,
    _prompts_in_turn,
    _dealt_to_ranks,
)


@oracle("permutation", 130)
def permutation(case: LossCase) -> list[Finding]:
    """Report responses that have other gradients in another order.

    Args:
        case: the loss and its objective.

    Returns:
        One failure with the smallest batch, or nothing.
    """
    batch = grid_off_bounds(case)
    _, gradient = case.kept_value_and_gradient(batch)
    for order in ORDERS:
        if _depends_on_order(case, batch, gradient, order(batch)):
            return [_order_failure(case, batch, order)]
    return _moved_empty_row(case, batch)


def _moved_empty_row(case: LossCase, batch: Rollouts) -> list[Finding]:
    """Report that the gradient of the other rows depends on where a fully masked row
    stands: in front of all, or behind them. What the row counts in a mean is the same at
    either place.
    """
    longer = _with_masked_row(batch)
    order = _rolled(longer)
    rows = {name: x[order] for name, x in longer.tensors().items()}
    try:
        behind = case.gradient(longer)
        # Rollouts itself refuses such a row
        in_front = case.gradient(Rollouts.unchecked(**rows))[order.argsort()]
    except InputError:
        return []
    distances = gradient_distance(in_front, behind, longer.mask, case.allowed_error())
    if distances.max() == 0:
        return []
    expected_number, found_number = gradient_pair(
        behind, in_front, worst(distances), "as with it behind the others"
    )
    text = "with a row that is masked throughout in front of the others"
    return [fail("permutation", text, expected_number, found_number)]


def _order_failure(
    case: LossCase, batch: Rollouts, order: Callable[[Rollouts], Tensor]
) -> Finding:
    """Return the failure that the gradients are others in this order, shown in a small
    batch, with a fault of the order of groups as its cause if one fits.
    """

    def still_depends(smaller: Rollouts) -> bool:
        """Return whether a part of the batch shows it too."""
        return _depends_on_order(case, smaller, case.gradient(smaller), order(smaller))

    small = shrink(batch, still_depends)
    permuted = order(small)
    reordered = small.take(permuted)
    shown = make_example(
        reordered,
        expected=case.gradient(small)[permuted],
        found=case.gradient(reordered),
        reads=case.loss.reads,
    )
    larger = []
    if batch.group is not None:
        # in groups of twice the size, blocks of rows and group ids are not the same
        larger.append(batch.but(group=batch.group // 2, totals=None))
    return fail(
        "permutation",
        "rows in another order",
        "the same gradient, in that order",
        "a different gradient",
        shown,
        first_confirmed(case, group_order_faults(case), batch, *larger),
    )


def _why_not_scaled(case: LossCase) -> str:
    """Return why the gradient need not scale with A; "" where it must."""
    if case.hp.get("beta"):
        return "the KL term does not scale with A"
    return case.objective.scale_exception


@oracle("scaling", 110, _why_not_scaled, implied=True)
def scaling(case: LossCase) -> list[Finding]:
    """Report a loss whose gradient does not triple with the advantages.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the smallest batch. Its cause is that the size of A is divided out,
        that A enters squared, or that A is clipped, if one of these explains it. Nothing
        if the gradient triples.
    """
    batch = grid_off_bounds(case)

    def gradient_at_3(batch: Rollouts) -> Tensor:
        """Return the gradient at 3 times the advantages."""
        return case.gradient(replace(batch, adv=3 * batch.adv))

    def distance(batch: Rollouts, gradient: Tensor) -> Tensor:
        """Return how far a third of it is from this gradient, [B, T]."""
        return gradient_distance(
            gradient_at_3(batch) / 3, gradient, batch.mask, case.allowed_error(1e-7)
        )

    _, gradient = case.kept_value_and_gradient(batch)
    distances = distance(batch, gradient)
    if distances.max() == 0:
        return []

    def still_differs(smaller: Rollouts) -> bool:
        """Return whether a smaller batch shows it too."""
        return bool(distance(smaller, case.gradient(smaller)).max() > 0)

    small = shrink(batch, still_differs, worst(distances))
    token = worst(distance(small, case.gradient(small)))
    due_gradient = 3 * case.gradient(small)
    found_gradient = gradient_at_3(small)
    expected_number, found_number = gradient_pair(
        due_gradient, found_gradient, token, "3 times the gradient"
    )

    def gradients_times(batch: Rollouts, k: float) -> tuple[Tensor, Tensor]:
        """Return the gradient at 3 times A, and k times the gradient."""
        at_3 = case.gradient(batch.but(adv=3 * batch.adv))
        return at_3, k * case.gradient(batch)

    at_3 = replace(small, adv=3 * small.adv)
    why = NO_CAUSE
    if holds_on_other_batches(case, partial(gradients_times, k=1)):
        why = SIZE_DIVIDED_OUT
    if holds_on_other_batches(case, partial(gradients_times, k=9)):  # 3 squared
        why = SQUARED
    if not why:
        why = cause_if_confirmed_at(
            case,
            clipped(case, LARGE),
            at_3,
            token,
            case.weights(at_3)[token].item(),
            batch.but(adv=LARGE * batch.adv),
        )
    shown = make_example(at_3, due_gradient, found_gradient, case.loss.reads)
    return [
        fail(
            "scaling",
            "all advantages times 3",
            expected_number,
            found_number,
            shown,
            why,
        )
    ]


def _at_zero(batch: Rollouts) -> Rollouts:
    """Return the batch with advantages of 0."""
    return replace(batch, adv=torch.zeros_like(batch.adv))


@oracle("zero-advantage", 120, _why_not_scaled, implied=True)
def zero_advantage(case: LossCase) -> list[Finding]:
    """Report a gradient where all advantages are 0.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the smallest batch.
    """
    batch = grid_off_bounds(case)

    def has_gradient(batch: Rollouts) -> bool:
        """Return whether there is a gradient without an advantage."""
        return bool((case.gradient(_at_zero(batch)) != 0).any())

    if not has_gradient(batch):
        return []
    small = _at_zero(shrink(batch, has_gradient))
    gradient = case.gradient(small)
    if gradient.isfinite().all():
        found = f"a gradient of up to {gradient.abs().max().item():.4g}"
    else:
        found = "NaN or infinity"
    shown = make_example(small, 0 * gradient, gradient, case.loss.reads)
    return [
        fail(
            "zero-advantage",
            "A = 0 everywhere",
            Number(0, "weight"),
            found,
            shown,
        )
    ]
