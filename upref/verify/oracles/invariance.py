# SPDX-License-Identifier: Apache-2.0
"""Oracles that need no reference: what must not change a loss's gradient, or change it
in a known way.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.user_code.names import CALLED
from upref.verify.explain import (
    cause_if_confirmed_at,
    first_confirmed,
    holds_on_other_batches,
)
from upref.verify.faults import measured
from upref.verify.faults.batch_reading import LARGE, clipped
from upref.verify.faults.denominators import group_order_faults
from upref.verify.finding import NO_CAUSE, Cause, Number, number_pair
from upref.verify.measure import HABIT, LossCase
from upref.verify.oracle import oracle
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import example, gradient_pair, make_example, shrink, worst
from upref.weights.batches import OFF_EDGES

# causes that are read off a gradient at once, without a search
MASK_IGNORED = measured.MASK_IGNORED.cause()
OVER_WIDTH = measured.PADDED_WIDTH_FOR_LENGTH.cause()
OVER_SLOTS = "it divides by the number of all slots of the batch, padding included"
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


def gradient_distance(x: Tensor, y: Tensor, mask: Tensor, tol: float) -> Tensor:
    """How far two gradients are apart, relative to the largest number of the second, on
    unmasked slots.

    Args:
        x: [B, T].
        y: the gradient that x should be.
        mask: of the tokens that train.
        tol: distances up to this are 0.

    Returns:
        [B, T], infinite where one is not finite and the other is.
    """
    distance = ((x - y).abs() / y.abs().amax().clamp(min=1e-30)).nan_to_num(
        nan=math.inf
    )
    return torch.where(mask & (distance > tol), distance, 0)


def tolerance(case: LossCase, least: float = HABIT) -> float:
    """By default 1e-6 in a denominator is let pass: of a chunk, other rows or columns
    make another one.

    Args:
        case: the loss and its objective.
        least: what is let pass in float64.

    Returns:
        The relative error that is let pass.
    """
    return max(least, case.tol if case.single else 0)


def grid_off_bounds(case: LossCase) -> Rollouts:
    """The grid without its bounds: on a bound, the order of a sum would decide.

    Args:
        case: the loss and its objective.

    Returns:
        The batch, made once: do not write to it.
    """
    return case.cached(
        ("off bounds", *case.plain_hp.items()),
        lambda: case.grid(thin=3, edges=OFF_EDGES).but(totals=None),
    )


@oracle("padding", 60)
def padding(case: LossCase) -> list[Finding]:
    """Further masked slots, on either side, change nothing, and have no gradient.

    Args:
        case: the loss and its objective.

    Returns:
        Failures with the smallest batch.
    """
    b = grid_off_bounds(case)
    value, gradient = case.kept_value_and_gradient(b)
    out = []
    leak = torch.where(b.mask, 0, gradient.abs().nan_to_num(nan=math.inf))
    if leak.max() > 0:

        def bad(batch: Rollouts) -> bool:
            """Whether a masked slot has a gradient."""
            return bool((case.gradient(batch)[~batch.mask] != 0).any())

        def unmasked_batch(batch: Rollouts) -> Rollouts:
            """The batch without its mask."""
            return batch.but(mask=torch.ones_like(batch.mask), totals=None)

        def unmasked(batch: Rollouts) -> tuple[Tensor, Tensor]:
            """The gradient, and that of the reference which ignores the mask."""
            return case.gradient(batch), case.expected(
                unmasked_batch(batch)
            ) * case.factors(unmasked_batch(batch))

        text = "masked slots that hold ordinary numbers"
        batch = example(case, shrink(b, bad))
        why = MASK_IGNORED if holds_on_other_batches(case, unmasked) else NO_CAUSE
        out.append(
            fail(
                "padding",
                text,
                Number(0, "weight"),
                "a gradient flows into them",
                batch,
                why,
            )
        )
    for left_columns, right_columns in ((0, 3), (2, 0)):
        out += _padded_side(case, b, value, gradient, left_columns, right_columns)
    return out + _empty_row(case, b, gradient)


def _padded_side(
    case: LossCase, batch: Rollouts, value: Tensor, g: Tensor, left: int, right: int
) -> list[Finding]:
    """What columns of padding on one side change, where they should change nothing.

    Args:
        case: the loss and its objective.
        batch: a batch.
        value, g: of the loss on it: a scalar and [B, T].
        left, right: columns on either side; one of them is 0.
    """
    columns = left + right
    side = f"{columns} columns of padding on the {'left' if left else 'right'}"

    def padded(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The value and the gradient of the wider batch, without the new columns."""
        value, gradient = case.value_and_gradient(_widened(batch, left, right))
        return value, gradient[:, left : left + batch.mask.shape[1]]

    def difference(batch: Rollouts) -> Tensor:
        """How much the gradient of each token changes, [B, T]."""
        return gradient_distance(
            padded(batch)[1], case.gradient(batch), batch.mask, tolerance(case)
        )

    def by_width(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The two gradients, each times the width of its batch."""
        width = batch.mask.shape[1]
        return padded(batch)[1] * (width + columns), case.gradient(batch) * width

    wider, of_padded = padded(batch)
    distances = gradient_distance(of_padded, g, batch.mask, tolerance(case))
    if distances.max() == 0:
        if not (wider - value).abs() > 1e-6 * value.abs().clamp(min=1e-3):
            return []
        text = f"the value moves with {side}, the gradient does not"
        expected_number, found_number = number_pair("value", value.item(), wider.item())
        return [note("padding", text, expected_number, found_number)]
    small = shrink(batch, lambda c: bool(difference(c).max() > 0), worst(distances))
    token = worst(difference(small))
    why = OVER_WIDTH if holds_on_other_batches(case, by_width) else NO_CAUSE
    if left and not why and _reads_first_column(case, left):
        why = FIRST_COLUMN
    expected = case.gradient(small)
    found = padded(small)[1]
    expected_number, found_number = gradient_pair(expected, found, token, "as without")
    wide = _widened(small, left, right)
    narrow = torch.nn.functional.pad(expected, (left, right))
    shown = make_example(wide, narrow, case.gradient(wide), case.loss.reads)
    return [fail("padding", f"with {side}", expected_number, found_number, shown, why)]


def _widened(batch: Rollouts, left: int, right: int = 0) -> Rollouts:
    """The batch with so many more columns of padding on either side."""

    def pad(field: str, x: Tensor) -> Tensor:
        if field == "group":
            return x
        return torch.nn.functional.pad(
            x, (left, right), value=-0.7 if x.is_floating_point() else 0
        )

    return batch.map(pad)


def _reads_first_column(case: LossCase, left: int) -> bool:
    """Whether the advantage of a response is that of the first column, of padding too,
    as it is or set to 0 there; behind one column of padding and behind so many: else it
    is that of another column."""

    def first_column(
        batch: Rollouts, columns: int, zeroed: bool
    ) -> tuple[Tensor, Tensor]:
        widened = _widened(batch, columns)
        A = torch.where(widened.mask, widened.adv, 0) if zeroed else widened.adv
        read = widened.but(adv=A[:, :1].expand_as(widened.mask))
        return case.gradient(widened), case.expected(read) * case.factors(read)

    def holds(zeroed: bool) -> bool:
        return all(
            holds_on_other_batches(
                case, partial(first_column, columns=n, zeroed=zeroed)
            )
            for n in (1, left)
        )

    return holds(False) or holds(True)


def _empty_row(case: LossCase, batch: Rollouts, gradient: Tensor) -> list[Finding]:
    """A fully masked row, as frameworks pad batches with, counts nothing in a mean over
    tokens. What it counts in a mean over responses nobody says; that it is NaN there
    must only be known."""
    if case.loss.form == "unreduced":
        return []

    def longer(batch: Rollouts) -> tuple[Tensor, Tensor]:
        rows = {name: torch.cat([x, x[:1]]) for name, x in batch.tensors().items()}
        rows["mask"][-1] = False
        # Rollouts itself refuses such a row
        return case.value_and_gradient(Rollouts.unchecked(**rows))

    try:
        value, longer_gradient = longer(batch)
    except InputError:
        return []
    text = "with a row that is masked throughout"
    if case.objective.agg not in ("token-mean", "group-token-mean"):
        nan = note(
            "padding",
            text,
            "a number",
            "NaN",
            "drop such rows, or divide by lengths of at least 1",
        )
        return [] if value.isfinite() and longer_gradient.isfinite().all() else [nan]
    distances = gradient_distance(
        longer_gradient[:-1], gradient, batch.mask, tolerance(case)
    )
    if distances.max() == 0 and (longer_gradient[-1] == 0).all():
        return []
    if distances.max() == 0:
        own_gradient = longer_gradient[-1]
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
    i, t = worst(distances)
    expected_number, found_number = gradient_pair(
        gradient, longer_gradient, (i, t), "as without"
    )

    def by_rows(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The gradients with and without that row, each times its number of rows."""
        found = longer(batch)[1][:-1] * (len(batch.mask) + 1)
        return found, case.gradient(batch) * len(batch.mask)

    def by_slots(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The gradients with that row and one more column and without them, each times
        its number of slots."""
        found = longer(_widened(batch, 0, 1))[1][:-1, :-1]
        slots = batch.mask.numel() + sum(batch.mask.shape) + 1
        return found * slots, case.gradient(batch) * batch.mask.numel()

    why = ""
    if holds_on_other_batches(case, by_slots):
        why = OVER_SLOTS
    elif holds_on_other_batches(case, by_rows):
        why = OVER_ROWS
    return [fail("padding", text, expected_number, found_number, cause=why)]


# what padding may hold: a log-probability of anything, an advantage of any size
JUNK = (0.0, -30.0, 30.0)
NOT_NUMBERS = (math.nan, math.inf, -math.inf, 1e30)
LEAK = "{} in a masked slot reaches the gradient; select with torch.where(mask, x, 0) before you multiply"


MASKED_VALUES = ("logp", "logp_old", "adv", "logp_ref", "entropy", "logp_sampler")


@oracle("masked-values", 70)
def masked_values(case: LossCase) -> list[Finding]:
    """Numbers in masked slots must count for nothing; NaN there is a note, since
    frameworks pad with numbers.

    Args:
        case: the loss and its objective.

    Returns:
        Failures and notes, with the inputs that are read.
    """
    batch = case.grid(thin=5)
    clean = case.kept_value_and_gradient(batch)
    fields = [
        field
        for field in MASKED_VALUES
        if field in case.loss.reads and getattr(batch, field) is not None
    ]
    if case.loss.adv_shape != "BT" and "adv" in fields:
        fields.remove("adv")
    # in all arguments at a time, and in one at a time only to name it
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
            change = _changes(batch, clean, case.value_and_gradient(fill(batch)))
        except InputError as e:
            make = fail if number in JUNK else note
            return [make("masked-values", regime, "no effect", str(e))]
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


def _filled(batch: Rollouts, field: str, number: float) -> Rollouts:
    """The batch with this number in the masked slots of one field."""
    values = getattr(batch, field).masked_fill(~batch.mask, number)
    return batch.but(**{field: values})


def _filled_in_turn(batch: Rollouts, fields: list[str], turn: int) -> Rollouts:
    """The batch with the NOT_NUMBERS in the masked slots of all fields, in turn."""
    for place, field in enumerate(fields, turn):
        batch = _filled(batch, field, NOT_NUMBERS[place % len(NOT_NUMBERS)])
    return batch


def _ignores_nan(
    case: LossCase, batch: Rollouts, clean: tuple[Tensor, Tensor], fields: list[str]
) -> bool:
    """Whether NaN in each argument, and each of NOT_NUMBERS in all arguments at a time,
    change nothing. A clamp of log r may hide the one or the other.
    """
    try:
        for field in fields:
            filled = _filled(batch, field, math.nan)
            if _changes(batch, clean, case.value_and_gradient(filled)):
                return False
        for turn in range(len(NOT_NUMBERS)):
            filled = _filled_in_turn(batch, fields, turn)
            if _changes(batch, clean, case.value_and_gradient(filled)):
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
    """The failure of a loss that numbers in masked slots change."""

    def change(smaller: Rollouts) -> str:
        """What changes with these numbers in the masked slots."""
        clean = case.value_and_gradient(smaller)
        return _changes(smaller, clean, case.value_and_gradient(fill(smaller)))

    def still_changes(smaller: Rollouts) -> bool:
        """Whether anything changes."""
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
    batch: Rollouts, clean: tuple[Tensor, Tensor], filled: tuple[Tensor, Tensor]
) -> str:
    """What other numbers in masked slots change, in words; "" if nothing."""
    value, gradient = clean
    filled_value, filled_gradient = filled
    changes = []
    if not torch.equal(filled_value, value):
        changes.append(
            f"the loss is {filled_value.item():.4g} instead of {value.item():.4g}"
        )
    if not torch.equal(filled_gradient[batch.mask], gradient[batch.mask]):
        changes.append("the gradient of unmasked tokens changes")
    if not (filled_gradient[~batch.mask] == 0).all():
        changes.append("the gradient of the masked slots is not 0")
    return " and ".join(changes)


def _depends_on_order(
    case: LossCase, batch: Rollouts, gradient: Tensor, order: Tensor
) -> bool:
    """Whether the gradient of these rows in this order is not this gradient in that order."""
    reordered = case.gradient(batch.take(order))
    return bool(
        gradient_distance(
            reordered, gradient[order], batch.mask[order], tolerance(case)
        ).max()
        > 0
    )


def _rolled(count: int) -> Tensor:
    """The last response first."""
    return torch.arange(count).roll(1)


def _reversed(count: int) -> Tensor:
    """The responses from the last to the first."""
    return torch.arange(count).flip(0)


def _shuffled(count: int) -> Tensor:
    """The responses in a random order, the same in each process."""
    return torch.randperm(count, generator=torch.Generator())


ORDERS = (_rolled, _reversed, _shuffled)


@oracle("permutation", 130)
def permutation(case: LossCase) -> list[Finding]:
    """The responses in another order have the same gradients.

    Args:
        case: the loss and its objective.

    Returns:
        One failure with the smallest batch, or nothing.
    """
    batch = grid_off_bounds(case)
    _, gradient = case.kept_value_and_gradient(batch)
    for order in ORDERS:
        if _depends_on_order(case, batch, gradient, order(len(batch.mask))):
            return [_order_failure(case, batch, order)]
    return []


def _order_failure(
    case: LossCase, batch: Rollouts, order: Callable[[int], Tensor]
) -> Finding:
    """The failure of a loss whose gradients are others in this order."""

    def still_depends(smaller: Rollouts) -> bool:
        """Whether a part of the batch shows it too."""
        return _depends_on_order(
            case, smaller, case.gradient(smaller), order(len(smaller.mask))
        )

    small = shrink(batch, still_depends)
    permuted = order(len(small.mask))
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
        "another gradient",
        shown,
        first_confirmed(case, group_order_faults(case), batch, *larger),
    )


def _kl(case: LossCase) -> str:
    if case.hp.get("beta"):
        return "the KL term does not scale with A"
    return case.objective.scale_exception


@oracle("scaling", 110, _kl, implied=True)
def scaling(case: LossCase) -> list[Finding]:
    """Three times the advantages make three times the gradient.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the smallest batch.
    """
    batch = grid_off_bounds(case)

    def tripled(batch: Rollouts) -> Tensor:
        """The gradient at 3 times the advantages."""
        return case.gradient(replace(batch, adv=3 * batch.adv))

    def distance_of(batch: Rollouts) -> Tensor:
        """How far a third of it is from the gradient."""
        return gradient_distance(
            tripled(batch) / 3, case.gradient(batch), batch.mask, tolerance(case, 1e-7)
        )

    gradient = case.kept_value_and_gradient(batch)[1]
    if (
        distances := gradient_distance(
            tripled(batch) / 3, gradient, batch.mask, tolerance(case, 1e-7)
        )
    ).max() == 0:
        return []
    small = shrink(batch, lambda c: bool(distance_of(c).max() > 0), worst(distances))
    token = worst(distance_of(small))
    due_gradient = 3 * case.gradient(small)
    found_gradient = tripled(small)
    expected_number, found_number = gradient_pair(
        due_gradient, found_gradient, token, "3 times the gradient"
    )

    def times(k: float) -> Callable[[Rollouts], tuple[Tensor, Tensor]]:
        """The change that makes the gradient k times as large at 3 times A."""
        return lambda batch: (
            case.gradient(batch.but(adv=3 * batch.adv)),
            k * case.gradient(batch),
        )

    why = SIZE_DIVIDED_OUT if holds_on_other_batches(case, times(1)) else NO_CAUSE
    why = SQUARED if holds_on_other_batches(case, times(9)) else why
    clipped_far = clipped(case, LARGE)
    at_3 = replace(small, adv=3 * small.adv)
    why = why or cause_if_confirmed_at(
        case,
        clipped_far,
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
    """The batch with advantages of 0."""
    return replace(batch, adv=torch.zeros_like(batch.adv))


@oracle("zero-advantage", 120, _kl, implied=True)
def zero_advantage(case: LossCase) -> list[Finding]:
    """Without an advantage there is no gradient.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the smallest batch.
    """
    batch = grid_off_bounds(case)

    def pushed(batch: Rollouts) -> bool:
        """Whether there is a gradient without an advantage."""
        return bool((case.gradient(_at_zero(batch)) != 0).any())

    if not pushed(batch):
        return []
    small = _at_zero(shrink(batch, pushed))
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
