# SPDX-License-Identifier: Apache-2.0
"""The oracle of unusual inputs: each of the AXES by itself, every two of them together,
all at once.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from upref.errors import InputError, OutOfMemory, TooManyLines
from upref.registry import REDUCE
from upref.rollouts import Rollouts
from upref.verify.explain import cause_if_confirmed_at
from upref.verify.faults.batch_reading import LARGE, clipped, left_out
from upref.verify.faults.corrections import corrected
from upref.verify.faults.losses import LossFault
from upref.verify.finding import NO_CAUSE, Cause, Example, TokenPlace
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import gradient_distance, tolerance
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import (
    cut,
    example,
    gradient_pair,
    make_example,
    sampler_ratio,
    shrink,
    worst,
)
from upref.weights.batches import LOG_R, on_policy_batch
from upref.weights.stress import AXES, GAPS, NEGATIVE, relabel_groups

TOO_LONG = 0.8  # seconds: a loss that would take longer for a batch is not asked for it
MOST_TOKENS = 100_000  # more than any batch has
LINES = 100_000  # of Python, for a loss that goes through all ids up to the largest


@oracle(
    "unusual-inputs",
    145,
    lambda case: "the weights are wrong already" if case.wrong else "",
)
def unusual_inputs(case: LossCase) -> list[Finding]:
    """The weights on batches that are unusual in one way, then in every two, then in
    all.
    """
    rate = 0.0  # seconds a token
    ids: tuple[str, ...] = ()
    notes: list[Finding] = []
    for name, axis in AXES.items():
        if not applies(case, name):
            continue
        # from here on with the ids that it takes
        if name == "every two" and "group" in case.loss.reads:
            found, ids = groups(case)
            if any(f.severity == "failure" for f in found):
                return [*notes, *found]
            notes += found
        batch = case.stress_batch(name, ids)
        tokens = int(batch.mask.sum())
        if rate * tokens > TOO_LONG:
            slow = note(
                "unusual-inputs", f"{axis.words}: not tested, it would take too long"
            )
            if slow not in notes:
                notes.append(slow)
            continue
        start = time.process_time()
        found = stress_findings(case, name, batch, ids)
        if any(f.severity == "failure" for f in found):
            return [*notes, *found]
        notes += [f for f in found if f not in notes]
        case.covered[:] = dict.fromkeys((*case.covered, axis.words))
        if name == "lengths":
            rate = (time.process_time() - start) / tokens
            if rate * MOST_TOKENS > TOO_LONG:
                start = time.process_time()
                # once more: what is slow the first time alone is no slow loss
                case.gradient(batch)
                rate = (time.process_time() - start) / tokens
    return notes


def applies(case: LossCase, name: str) -> bool:
    """Whether the weights depend on what is unusual on this axis.

    Args:
        case: the loss and its objective.
        name: a key of AXES.
    """
    match name:
        case "reference":
            return bool(case.hp.get("beta"))
        case "sampler":
            return case.objective.sampler is not None
        case "advantages of tokens":
            return not case.one_adv
        case "entropies":
            return "entropy" in case.objective.reads
    return True


def stress_findings(
    case: LossCase, name: str, batch: Rollouts, ids: tuple[str, ...]
) -> list[Finding]:
    """Its weights there; where the axis says so, in float32 too, or alone."""
    notes: list[Finding] = []
    if AXES[name].single != "alone":
        try:
            if (errors := _errors(case, batch)).max() > 10 * case.tol:
                if case.single or not _in_part(case, batch):
                    return [
                        _finding(case, name, batch, errors, case.weights(batch), ids)
                    ]
                notes = [note("unusual-inputs", f"{AXES[name].words}: {PARTLY}")]
        except InputError as e:
            return [fail("unusual-inputs", AXES[name].words, "a finite loss", str(e))]
    if not AXES[name].single:
        return notes
    try:
        single_case, found = case.singly(batch)
    except InputError as e:
        return [
            *notes,
            note("unusual-inputs", "float32 inputs are refused", found=str(e)),
        ]
    if (errors := _errors(single_case, batch, found)).max() > 10 * single_case.tol:
        return [_finding(single_case, name, batch, errors, found, ids, ", in float32")]
    return notes


def _finding(
    case: LossCase,
    name: str,
    batch: Rollouts,
    errors: Tensor,
    found: Tensor,
    ids: tuple[str, ...],
    dtype: str = "",
) -> Finding:
    """The finding; its numbers are those of the batch that is shown: one token or one
    response where that still shows it, else how the whole batch is made."""
    i, t = worst(errors)
    why = NO_CAUSE
    if not dtype:
        why = _cause_of_size(case, name, batch, (i, t), found[i, t].item())
    smaller = None if dtype else _small_batch(case, batch, i, t)
    shown: Example | None
    if smaller is not None:
        batch, errors = smaller
        found = case.weights(batch)
        i, t = worst(errors)
        shown = example(case, batch)
    else:
        hp = "".join(f", {k}={v!r}" for k, v in case.plain_hp.items() if v is not None)
        arguments = (
            f"{name!r}, upref.get({case.objective.name!r})"
            + (f", ids={ids!r}" if ids else "")
            + hp
        )
        dtype_comment = "  # every number of it in float32" if dtype else ""
        code = f"from upref.weights.stress import stress_batch\nb = stress_batch({arguments}){dtype_comment}"
        shown = Example(code=code, rollouts=True)
    n = int(batch.mask[i].sum())
    where = {
        "A": batch.adv[i, t].item(),
        "π_old": batch.logp_old[i, t].exp().item(),
    } | sampler_ratio(case, batch, (i, t))
    where_words = (
        f"column {t + 1}, in a response of {n} token{'s' if n > 1 else ''}{dtype}"
    )
    return fail(
        "unusual-inputs",
        AXES[name].words,
        case.expected(batch)[i, t].item(),
        found[i, t].item(),
        shown,
        why,
        place=TokenPlace(numbers=where, remark=where_words),
    )


def _small_batch(
    case: LossCase, batch: Rollouts, i: int, t: int
) -> tuple[Rollouts, Tensor] | None:
    """One token of a batch, else its response, as a batch of up to 32 slots whose
    weights are wrong too, and the errors; None where there is none.
    """
    response = list(range(int(batch.mask[i].nonzero().max()) + 1))
    without_groups = replace(batch, group=None)
    for columns in ([t], response):
        part = cut(without_groups, [i], columns)
        if part is None:
            continue
        small = case.ready(part)
        if small.mask.numel() > 32:
            continue
        errors = _errors(case, small)
        if errors.max() > 10 * case.tol:
            return small, errors
    return None


def _cause_of_size(
    case: LossCase, name: str, batch: Rollouts, at: tuple[int, int], found: float
) -> Cause:
    """The cause of a wrong weight, among faults that ordinary batches do not show."""
    for known_fault in _of_size(case, name):
        cause = cause_if_confirmed_at(case, known_fault, batch, at, found)
        if cause:
            return cause
    return NO_CAUSE


def _of_size(case: LossCase, name: str) -> Iterator[LossFault]:
    """Faults that ordinary batches do not show."""
    if name == "sampler":
        yield from corrected(case)
        return
    yield clipped(case, LARGE)
    yield from left_out(case)


PARTLY = "right up to what rounding its inputs to float32 makes of them"


def _in_part(case: LossCase, batch: Rollouts) -> bool:
    """Whether a part in float32 explains it, which only many tokens show; then it is so
    compared from here on.
    """
    single = replace(case)
    single.in_float32()
    if _errors(single, batch).max() > 10 * single.tol:
        return False
    case.in_float32()
    return True


def _errors(case: LossCase, batch: Rollouts, found: Tensor | None = None) -> Tensor:
    """Tokens beside a bound, and those where the objective itself has no weight, count
    nothing.
    """
    found = case.weights(batch) if found is None else found
    # one sum over a batch of float32 rounds at each step
    sums = 4 if case.single and case.objective.level in REDUCE else 1
    errors = case.weight_error(batch, found, 1e-12, sums)
    if not errors.max() > 10 * case.tol:
        return errors
    errors = errors.masked_fill(beyond_range(case, batch, found), 0)
    expected = case.expected(batch)
    edge = case.rounding_effect(batch, expected, sums) > 1e-3 * torch.maximum(
        expected.abs(), batch.adv.abs()
    )
    if "extremes" in case.failed:  # said already, with the clamp
        edge |= case.ratio(batch).log().abs() > LOG_R[-1]
    return errors.masked_fill(edge | ~expected.isfinite(), 0)


def beyond_range(case: LossCase, batch: Rollouts, found: Tensor) -> Tensor:
    """Tokens at NaN of responses of which the product of the ratios is beyond what its
    dtype holds: some write the geometric mean as a root of it.

    Args:
        case: the loss and its objective.
        batch: the batch.
        found: its weights, [B, T].

    Returns:
        A mask, [B, T].
    """
    if case.objective.level not in ("sequence_mean", "custom"):
        return torch.zeros_like(batch.mask)
    log_r = torch.where(batch.mask, batch.logp - batch.logp_old, 0)
    most = math.log(torch.finfo(torch.float32 if case.single else batch.logp.dtype).max)
    return (log_r.abs().sum(1, keepdim=True) > most / 2) & ~found.isfinite()


PLAIN_IDS = "as with ids 0, 1, 2"


def _with_plain_ids(batch: Rollouts) -> Rollouts:
    """The batch with group ids 0, 1, 2, in the order of its own."""
    assert batch.group is not None
    return replace(batch, group=batch.group.unique(return_inverse=True)[1], totals=None)


class Relabeled:
    """A loss on batches whose group ids are other numbers."""

    def __init__(self, case: LossCase) -> None:
        # a loop over all ids ends after so many lines
        self.case = replace(case, loss=replace(case.loss, lines=LINES))
        self.tol = tolerance(case, 1e-7)

    def difference(self, batch: Rollouts, gradient: Tensor) -> Tensor:
        """How far the gradient is from this one, [B, T]; 0 where it is near."""
        return gradient_distance(
            self.case.gradient(batch), gradient, batch.mask, self.tol
        )

    def gradients(self, batch: Rollouts) -> tuple[Tensor, Tensor]:
        """The gradients with the batch's ids, and with plain ones."""
        return self.case.gradient(batch), self.case.gradient(_with_plain_ids(batch))

    def differs(self, batch: Rollouts) -> bool:
        """Whether the ids change the gradient."""
        if batch.group is None:
            return False
        found, plain = self.gradients(batch)
        return bool(gradient_distance(found, plain, batch.mask, self.tol).max() > 0)


def groups(case: LossCase) -> tuple[list[Finding], tuple[str, ...]]:
    """A failure, or notes and the keys of NAMED that it takes."""
    return case.cached(("groups", case.tol), lambda: _groups(case))


def _groups(case: LossCase) -> tuple[list[Finding], tuple[str, ...]]:
    """Compute what `groups` returns. A loss may loop over all ids up to 2^40, so that
    its lines are limited.
    """
    batch = case.ready(on_policy_batch())
    relabeled = Relabeled(case)
    gradient = case.gradient(batch)
    notes = []
    taken = []
    for words, (every_group, all_but_one) in relabel_groups(batch).items():
        is_taken = True
        for renamed in (every_group, all_but_one):
            try:
                distances = relabeled.difference(renamed, gradient)
            except TooManyLines as e:
                if is_taken:
                    text = f"group ids {words} were not tested"
                    notes.append(note("unusual-inputs", text, found=str(e)))
                is_taken = False
                continue
            except (InputError, OutOfMemory) as e:  # a table of 2^40 ids needs memory
                if words == GAPS:
                    text = f"group ids {words}"
                    due = "the same gradient"
                    return [fail("unusual-inputs", text, due, str(e))], ()
                if is_taken:
                    text = f"group ids {words} are refused"
                    notes.append(note("unusual-inputs", text, found=str(e)))
                is_taken = False
                continue
            if distances.max() > 0:
                i, t = worst(distances)
                expected_number, found_number = gradient_pair(
                    gradient, case.gradient(renamed), (i, t), PLAIN_IDS
                )
                if renamed.group is not None:
                    ids = f"{renamed.group.unique().tolist()}"
                else:
                    ids = ""
                # dropped beside others: who numbers prompts from 0 never has them
                if words == NEGATIVE and renamed is all_but_one:
                    notes.append(
                        note(
                            "unusual-inputs",
                            f"group ids {words} count otherwise: {ids}",
                            expected_number,
                            found_number,
                        )
                    )
                    is_taken = False
                    continue
                renamed = shrink(renamed, relabeled.differs)
                found, expected = relabeled.gradients(renamed)
                i, t = worst((found - expected).abs())
                expected_number, found_number = gradient_pair(
                    expected, found, (i, t), PLAIN_IDS
                )
                text = f"group ids {words}: {renamed.group.unique().tolist()}"  # type: ignore[union-attr]
                return [
                    fail(
                        "unusual-inputs",
                        text,
                        expected_number,
                        found_number,
                        make_example(renamed, expected, found, case.loss.reads),
                    )
                ], ()
        if is_taken:
            taken.append(words)
    case.covered.append("group ids " + ", ".join(taken))
    return notes, tuple(taken)


def covered(case: LossCase) -> str:
    """What was looked at, in one sentence; what is not in it was not.

    Args:
        case: the loss and its objective, after all oracles.
    """
    return "covered: " + "; ".join(["every bound, |log r| up to 800", *case.covered])
