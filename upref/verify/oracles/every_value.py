# SPDX-License-Identifier: Apache-2.0
"""The oracle of all values: a proof on a few small batches, and batches on each side of
the sizes with which the code compares.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from upref.errors import InputError
from upref.proof.compare import Comparison
from upref.proof.domain import EVERY_MEAN, EVERY_VALUE
from upref.proof.sizes import Bound
from upref.proof.solver import find_z3
from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.user_code.arrays import NOT_EXERCISED
from upref.verify.finding import Example, TokenPlace
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.proof import compare_few, describe_bounds
from upref.verify.report import Finding, fail
from upref.verify.shrink import example, numbers, smallest, token_numbers, worst

LARGEST = 4100  # of the sizes that are tried
MOST_BOUNDS = 8


def not_proved(case: LossCase) -> str:
    """Say why no proof is tried; "" where one is.

    Args:
        case: the loss and its objective.
    """
    if not find_z3():
        return "the solver z3 is not installed"
    if case.failed or case.wrong:
        return "it differs already"
    if case.single:
        return "it has float32's precision"
    if case.loss.arrays is not None:
        return NOT_EXERCISED["every-value"]
    if case.loss.calls_backward or case.loss.framework:
        return "it is no function of tensors alone"
    return ""


@oracle("every-value", 210, not_proved, implied=True)
def every_value(case: LossCase) -> Iterator[Finding]:
    """Prove the weights on small batches, and keep the Comparison in the cache of the
    case.

    Args:
        case: the loss and its objective.

    Yields:
        A failure on the solver's batch where the weights differ, if a check finds its
        weights wrong too. Where they do not differ, a failure for each number with which
        the code compares a size, if a batch on one side of it is wrong.
    """
    found = compare_few(case.loss, case.objective, case.hp)
    case.cache["every-value"] = found
    if found.counterexample is not None:
        if not _is_of_certain_tokens(found):
            yield from _difference(case, found)
        return
    for bound in found.bounds[:MOST_BOUNDS]:
        if bound.number <= LARGEST:
            yield from _beyond(case, bound)


def _is_of_certain_tokens(found: Comparison) -> bool:
    """Tell whether finite weights differ of tokens of probability 1 alone. No logit has a
    gradient there, so that this is no failure, and no proof.
    """
    assert found.counterexample is not None
    is_certain = found.where is not None and found.where.certain
    return is_certain and bool(found.counterexample.found.isfinite().all())


def is_proved(case: LossCase) -> bool:
    """Tell whether the loss was proved.

    Args:
        case: the loss and its objective, after the oracle has run.
    """
    found = case.cache.get("every-value")
    return isinstance(found, Comparison) and found.status == "proved"


def prove_few(case: LossCase) -> tuple[Finding | None, str]:
    """Run the oracle by itself, up to its first finding.

    Args:
        case: the loss and its objective.

    Returns:
        The first difference, None where there is none; and for what the loss is proved,
        in words, "" where it is not.
    """
    if every_value.not_run(case):
        return None, ""
    for finding in every_value.findings(case):
        return finding, ""
    found: Comparison = case.cache["every-value"]
    if found.status != "proved":
        return None, ""
    return None, f"{values_in_words(case.objective)}, in {found.batches_in_words}"


def values_in_words(objective: Objective) -> str:
    """Return for which values a proof holds, in a few words.

    Args:
        objective: that of the proof.
    """
    return EVERY_MEAN if objective.level == "sequence_mean" else EVERY_VALUE


def _difference(case: LossCase, found: Comparison) -> Iterator[Finding]:
    """Yield the failure on the solver's batch, if `check` too takes it for one."""
    assert found.counterexample is not None
    batch = case.visible_batch(found.counterexample.batch)
    errors = _errors(case, batch)
    if errors is None:
        return
    small, i, t = smallest(case, batch, worst(errors))
    expected, got = numbers(case, small, i, t)
    at = token_numbers(case, small, (i, t))
    where = describe_bounds(found.counterexample)
    about = f"{where} (found by a solver)" if where else "found by a solver"
    place = TokenPlace(numbers=at)
    shown = example(case, small)
    yield fail("every-value", about, expected, got, shown, place=place)


def _errors(case: LossCase, batch: Rollouts) -> Tensor | None:
    """Return the relative errors of the weights on a batch, [B, T]; None where they are
    right to 10 times the tolerance, or where the loss refuses the batch.
    """
    try:
        errors = case.weight_error(batch)
    except InputError:
        return None
    return errors if errors.max() > 10 * case.tol else None


def _beyond(case: LossCase, bound: Bound) -> Iterator[Finding]:
    """Compare on batches a little below and above a size, in columns and in rows. Yield
    the failure on the first batch that is wrong, if there is one.
    """
    size = bound.number
    sizes = {
        "fewer columns than": (2, size - 1),
        "more columns than": (2, size + 1),
        "fewer rows than": (size - 1, 2),
        "more rows than": (size + 1, 2),
    }
    for side, (rows, columns) in sizes.items():
        batch = case.visible_batch(_long_batch(case, rows, columns))
        errors = _errors(case, batch)
        if errors is None:
            continue
        i, t = worst(errors)
        expected, got = numbers(case, batch, i, t)
        at = token_numbers(case, batch, (i, t))
        where = f", with which {bound.line} compares a size" if bound.line else ""
        about = f"{rows} rows of {columns} columns: {side} {size}{where}"
        about += _without_gradient(case, batch)
        shown = Example(rollouts=True, size=(rows, columns))
        place = TokenPlace(numbers=at)
        yield fail("every-value", about, expected, got, shown, place=place)
        return


def _without_gradient(case: LossCase, batch: Rollouts) -> str:
    """Return in words where tokens have no gradient, of those that should have one; "" if
    all have one.
    """
    is_lost = (case.gradient(batch) == 0) & (case.expected(batch) != 0) & batch.mask
    if not is_lost.any():
        return ""
    rows, columns = is_lost.nonzero(as_tuple=True)
    return (
        f"; without a gradient: {len(rows)} of {int(batch.mask.sum())} tokens, in {_range('row', rows)} and "
        f"{_range('column', columns)}, counted from 0"
    )


def _range(what: str, numbers: Tensor) -> str:
    """Return the range of numbers of rows or columns in words."""
    first, last = int(numbers.min()), int(numbers.max())
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _long_batch(case: LossCase, rows: int, columns: int) -> Rollouts:
    """Return a random batch of a size, the same in each process. The first row is full, and
    the others are masked in their second half.
    """
    generator = torch.Generator().manual_seed(rows * columns)

    def normal() -> torch.Tensor:
        """Return the next normal random numbers, [rows, columns]."""
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    log_old = -1 - normal().abs()
    lp = (log_old + 0.2 * normal()).clamp(max=-1e-3)
    adv = normal()[:, :1].expand(rows, columns).clone()
    mask = torch.ones(rows, columns, dtype=torch.bool)
    mask[1:, columns // 2 + 1 :] = False
    group = torch.arange(rows) // 2 if rows % 2 == 0 else torch.zeros(rows).long()
    return Rollouts.unchecked(
        logp=lp,
        logp_old=log_old,
        adv=adv,
        mask=mask,
        group=group,
        logp_ref=lp - 0.1 * normal(),
        entropy=normal().abs(),
        logp_sampler=log_old if case.objective.sampler is None else log_old - 0.05,
    )
