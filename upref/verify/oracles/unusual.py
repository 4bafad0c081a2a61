# SPDX-License-Identifier: Apache-2.0
"""The oracle of unusual inputs: each of the AXES by itself, every two of them together,
all at once.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError, OutOfMemory, TooManyLines
from upref.registry import REDUCE
from upref.rollouts import Rollouts
from upref.verify.explain import cause_if_confirmed_at
from upref.verify.extent import bound_of_token
from upref.verify.faults.batch_reading import LARGE, clipped, left_out
from upref.verify.faults.corrections import corrected
from upref.verify.faults.denominators import capped_lengths
from upref.verify.faults.losses import LossFault
from upref.verify.finding import NO_CAUSE, Cause, Example, TokenPlace
from upref.verify.measure import FLOAT32_ROUNDING, LossCase, unit_weights
from upref.verify.oracle import oracle, refused
from upref.verify.oracles.invariance import gradient_distance
from upref.verify.report import COVERED, Finding, fail, note
from upref.verify.shrink import (
    cut,
    example,
    gradient_pair,
    make_example,
    sampler_ratio,
    shrink,
    worst,
)
from upref.weights.batches import LOG_R
from upref.weights.stress import AXES, NEGATIVE, Axis, relabel_groups

TOO_LONG = 0.8  # seconds: a loss that would take longer for a batch is not asked for it
MOST_TOKENS = 100_000  # more than any batch has
# of Python, for a loss that goes through all ids up to the largest
MOST_LINES = 100_000
TIMED = "lengths"  # the axis whose batch tells how long a token takes
WITH_IDS = (
    "every two"  # from this axis on, batches have the group ids that a loss takes
)


@oracle(
    "unusual-inputs",
    145,
    lambda case: "the weights are wrong already" if case.wrong else "",
)
def unusual_inputs(case: LossCase) -> list[Finding]:
    """Compare the weights on batches that are unusual in one way, then in every two, then
    in all.

    Args:
        case: the loss and its objective. The words for what was right are added to
            `case.covered`.

    Returns:
        The failure on the first axis that is wrong, which ends the comparison. Else
        notes: of batches that would take too long, of float32, and one of all refusals.
    """
    seconds_per_token = 0.0
    ids: tuple[str, ...] = ()
    notes: list[Finding] = []
    refusals: dict[str, InputError] = {}  # of axes, in words
    for name, axis in AXES.items():
        if not _has_what_it_needs(case, axis):
            continue
        if name == WITH_IDS and "group" in case.loss.reads:
            findings, ids = groups(case)
            if any(f.severity == "failure" for f in findings):
                return [*notes, *findings]
            notes += findings
        batch = case.stress_batch(name, ids)
        token_count = int(batch.mask.sum())
        if seconds_per_token * token_count > TOO_LONG:
            too_slow = note(
                "unusual-inputs", f"{axis.words}: not tested, it would take too long"
            )
            if too_slow not in notes:
                notes.append(too_slow)
            continue
        start = time.process_time()
        try:
            findings = stress_findings(case, name, batch, ids)
        except InputError as e:
            refusals.setdefault(axis.words, e)
            continue
        if any(f.severity == "failure" for f in findings):
            return [*notes, *_failures_of_ids(case), *findings]
        # a refusal of float32 has other words for each batch
        noted = {finding.about for finding in notes}
        notes += [finding for finding in findings if finding.about not in noted]
        case.covered[:] = dict.fromkeys((*case.covered, axis.words))
        if name == TIMED:
            seconds_per_token = (time.process_time() - start) / token_count
            if seconds_per_token * MOST_TOKENS > TOO_LONG:
                start = time.process_time()
                # measure again: the first call may be slow by itself
                case.gradient(batch)
                seconds_per_token = (time.process_time() - start) / token_count
    if refusals:
        words, error = next(iter(refusals.items()))
        if len(refusals) > 1:
            words += f"; and {len(refusals) - 1} more kinds of batches"
        notes.append(refused("unusual-inputs", words, error))
    return notes


def _has_what_it_needs(case: LossCase, axis: Axis) -> bool:
    """Return whether the weights depend on what is unusual on this axis.

    Args:
        case: the loss and its objective.
        axis: the axis.
    """
    match axis.needs:
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
    """Return a failure or notes of the weights on the batch of one axis. The axis says
    whether they are compared in float32 too, or in float32 alone.
    """
    notes: list[Finding] = []
    if AXES[name].in_float32 != "alone":
        errors = _unforgiven_errors(case, batch)
        if errors.max() > 10 * case.tol:
            if case.single or not _switch_to_float32_if_that_explains(case, batch):
                found = case.weights(batch)
                return [_failure_on_axis(case, name, batch, errors, found, ids)]
            notes = [note("unusual-inputs", f"{AXES[name].words}: {PARTLY}")]
    if not AXES[name].in_float32:
        return notes
    try:
        single_case, found = case.singly(batch)
    except InputError as e:
        if AXES[name].in_float32 == "alone":
            case.gradient(batch)  # raises if the loss refuses the batch in float64 too
        return [
            *notes,
            note("unusual-inputs", "float32 inputs are refused", found=str(e)),
        ]
    errors = _unforgiven_errors(single_case, batch, found)
    if not errors.max() > 10 * single_case.tol:
        return notes
    is_wrong = errors > 10 * single_case.tol
    if _may_select_other_tokens(single_case, batch, found[is_wrong]):
        return [*notes, note("unusual-inputs", f"{AXES[name].words}: {NOT_IN_FLOAT32}")]
    return [
        _failure_on_axis(single_case, name, batch, errors, found, ids, ", in float32")
    ]


NOT_IN_FLOAT32 = (
    "not compared in float32, where rounding decides which tokens are selected"
)


def _may_select_other_tokens(
    case: LossCase, batch: Rollouts, wrong_weights: Tensor
) -> bool:
    """Return whether a right loss may have these weights, because rounding to float32
    selects other tokens. It makes no weight infinite or NaN, and changes no more weights
    of the loss than of the objective itself.

    Args:
        case: the loss and its objective.
        batch: the batch.
        wrong_weights: of the weights found in float32, those that are wrong, [n].
    """
    if not case.objective.batch_coupled or not wrong_weights.isfinite().all():
        return False
    return len(wrong_weights) <= _count_of_changed_weights(case, batch)


def _count_of_changed_weights(case: LossCase, batch: Rollouts) -> int:
    """Return how many weights of the objective itself change where rounding to float32
    moves the log-probabilities, added up over three random moves. One token that moves
    in the order of a batch can decide about any other.
    """

    def surrogate_weights(batch: Rollouts) -> Tensor:
        """Return the weights without the KL term, which selects nothing, [B, T]."""
        return unit_weights(case.objective, batch, case.hp_without_kl)

    expected = surrogate_weights(batch)
    size = torch.maximum(batch.logp.abs(), batch.logp_old.abs()).clamp(min=1)
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(3):
        noise = (
            torch.from_numpy(rng.uniform(-1, 1, size.shape)) * size * FLOAT32_ROUNDING
        )
        logp = (batch.logp + noise).clamp(max=0)
        change = (surrogate_weights(batch.but(logp=logp)) - expected).abs()
        count += int((change > 1e-3 * batch.adv.abs()).sum())
    return count


def _failure_on_axis(
    case: LossCase,
    axis: str,
    batch: Rollouts,
    errors: Tensor,
    found: Tensor,
    ids: tuple[str, ...],
    dtype_words: str = "",
) -> Finding:
    """Return the failure of the worst weight. It shows a batch of one token or one
    response where such a batch fails too, else how the whole batch is made. Its numbers
    are those of the batch that it shows.
    """
    i, t = worst(errors)
    why = NO_CAUSE
    if not dtype_words:
        why = _cause_on_axis(case, axis, batch, (i, t), found[i, t].item())
    smaller = None if dtype_words else _smaller_batch(case, batch, i, t)
    shown: Example | None
    extent = ""  # of what is wrong, where the whole batch is shown
    if smaller is not None:
        batch, errors = smaller
        why = why or bound_of_token(case, batch)
        found = case.weights(batch)
        i, t = worst(errors)
        shown = example(case, batch)
    else:
        code = _code_of_batch(case, axis, ids, is_float32=bool(dtype_words))
        shown = Example(code=code, rollouts=True)
        is_wrong = errors > 10 * case.tol
        is_right = ~is_wrong & (case.expected(batch).abs() > case.tol)
        extent += _length_words(batch.mask.sum(1), is_wrong.any(1), is_right)
        extent += _range_words("row", is_wrong.any(1), is_right.any(1))
        extent += _range_words("column", is_wrong.any(0), is_right.any(0))
    length = int(batch.mask[i].sum())
    tokens = "tokens" if length > 1 else "token"
    where = f"column {t + 1}, in a response of {length} {tokens}{dtype_words}{extent}"
    numbers: dict[str, float] = {
        "A": batch.adv[i, t].item(),
        "π_old": batch.logp_old[i, t].exp().item(),
    }
    numbers |= sampler_ratio(case, batch, (i, t))
    return fail(
        "unusual-inputs",
        AXES[axis].words,
        case.expected(batch)[i, t].item(),
        found[i, t].item(),
        shown,
        why,
        place=TokenPlace(numbers=numbers, remark=where),
    )


def _code_of_batch(
    case: LossCase, axis: str, ids: tuple[str, ...], is_float32: bool
) -> str:
    """Write the code that makes the whole batch of an axis."""
    arguments = [repr(axis), f"upref.get({case.objective.name!r})"]
    if ids:
        arguments.append(f"ids={ids!r}")
    for name, value in case.hp_without_kl.items():
        if value is not None:
            arguments.append(f"{name}={value!r}")
    code = (
        "from upref.weights.stress import stress_batch\n"
        f"b = stress_batch({', '.join(arguments)})"
    )
    if is_float32:
        code += "  # every number of it in float32"
    return code


def _length_words(lengths: Tensor, has_wrong: Tensor, is_right: Tensor) -> str:
    """Return from which length on responses have wrong weights, in words; "" where a
    longer one is right, or no response is.

    Args:
        lengths: of the responses, [B].
        has_wrong: whether a response has a wrong weight, [B].
        is_right: the weights that are right and not 0, [B, T].
    """
    is_whole = is_right.any(1) & ~has_wrong
    if not is_whole.any():
        return ""
    longest_right, shortest_wrong = lengths[is_whole].max(), lengths[has_wrong].min()
    if longest_right >= shortest_wrong:
        return ""
    return (
        f"; responses of up to {longest_right:,} tokens are right, "
        f"those of {shortest_wrong:,} and more are not"
    )


def _range_words(name: str, has_wrong: Tensor, has_right: Tensor) -> str:
    """Return the range of the rows or columns with wrong weights, in words; "" where right
    ones lie within it, or nowhere.

    Args:
        name: "row" or "column".
        has_wrong: whether each of them has a wrong weight.
        has_right: whether it has a right one that is not 0.
    """
    numbers = has_wrong.nonzero()[:, 0].tolist()
    first, last = numbers[0], numbers[-1]
    if not has_right.any() or has_right[first : last + 1].any():
        return ""
    where = f"{first + 1:,} to {last + 1:,}" if first < last else f"{first + 1:,}"
    return f"; of {len(has_wrong):,} {name}s only {where} have wrong weights"


def _smaller_batch(
    case: LossCase, batch: Rollouts, i: int, t: int
) -> tuple[Rollouts, Tensor] | None:
    """Return a batch of this token alone, else of its response, and the errors there.
    It has at most 32 slots, and a weight in it is wrong too. None where neither is so.
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
        errors = _unforgiven_errors(case, small)
        if errors.max() > 10 * case.tol:
            return small, errors
    return None


def long_batches(case: LossCase) -> list[Rollouts]:
    """Return batches of long responses, with holes and behind masked columns: there a
    limit on tokens is none on columns.

    Args:
        case: the loss and its objective.
    """
    return [case.stress_batch("lengths"), case.stress_batch("masks")]


def _cause_on_axis(
    case: LossCase, axis: str, batch: Rollouts, token: tuple[int, int], found: float
) -> Cause:
    """Return the cause of a wrong weight, of the faults that this axis may show."""
    for known_fault in _faults_of_unusual_inputs(case, axis, batch):
        cause = cause_if_confirmed_at(
            case, known_fault, batch, token, found, *long_batches(case)
        )
        if cause:
            return cause
    return NO_CAUSE


def _faults_of_unusual_inputs(
    case: LossCase, axis: str, batch: Rollouts
) -> Iterator[LossFault]:
    """Yield the known faults that show on this axis, and not on ordinary batches."""
    if AXES[axis].needs == "sampler":
        yield from corrected(case)
        return
    yield clipped(case, LARGE)
    yield from left_out(case)
    yield from left_out(case, batch)
    yield from capped_lengths(case, batch)


PARTLY = "right up to what rounding its inputs to float32 makes of them"


def _switch_to_float32_if_that_explains(case: LossCase, batch: Rollouts) -> bool:
    """Tell whether a computation partly in float32, which only many tokens show,
    explains the errors. If so, the case is compared as float32 from here on.
    """
    single = replace(case)
    single.in_float32()
    if _unforgiven_errors(single, batch).max() > 10 * single.tol:
        return False
    case.in_float32()
    return True


def _unforgiven_errors(
    case: LossCase, batch: Rollouts, found: Tensor | None = None
) -> Tensor:
    """Return the relative error of each weight, [B, T]. Where some error is above 10 times
    the tolerance, it is 0 beside a bound, and where the objective itself has no finite
    weight.

    Args:
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights, [B, T]; None: they are measured.
    """
    found = case.weights(batch) if found is None else found
    # one sum over a batch of float32 rounds at each step
    rounding_allowance = 4 if case.single and case.objective.level in REDUCE else 1
    errors = case.weight_error(batch, found, 1e-12, rounding_allowance)
    if not errors.max() > 10 * case.tol:
        return errors
    errors = errors.masked_fill(beyond_range(case, batch, found), 0)
    expected = case.expected(batch)
    is_near_bound = case.rounding_effect(
        batch, expected, rounding_allowance
    ) > 1e-3 * torch.maximum(expected.abs(), batch.adv.abs())
    if "extremes" in case.failed:  # its finding names the clamp already
        is_near_bound |= case.ratio(batch).log().abs() > LOG_R[-1]
    return errors.masked_fill(is_near_bound | ~expected.isfinite(), 0)


def beyond_range(case: LossCase, batch: Rollouts, found: Tensor) -> Tensor:
    """Mark tokens whose weight is not finite because the product of their response's
    ratios overflows: some losses write the geometric mean as a root of this product.

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
    largest_log = math.log(
        torch.finfo(torch.float32 if case.single else batch.logp.dtype).max
    )
    return (log_r.abs().sum(1, keepdim=True) > largest_log / 2) & ~found.isfinite()


PLAIN_IDS = "as with ids 0, 1, 2"


def _with_plain_ids(batch: Rollouts) -> Rollouts:
    """Return the batch with group ids 0, 1, 2, in the order of its own ids."""
    assert batch.group is not None
    return replace(batch, group=batch.group.unique(return_inverse=True)[1], totals=None)


class Relabeled:
    """Compare the gradient of a loss on one batch with those under other group ids."""

    def __init__(self, case: LossCase, batch: Rollouts) -> None:
        # a loss that loops over all ids up to the largest is stopped
        self.case = replace(case, loss=replace(case.loss, lines=MOST_LINES))
        self.tol = case.allowed_error(1e-7)
        self.gradient = case.gradient(batch)

    def difference(self, renamed: Rollouts) -> Tensor:
        """Return how far the gradient with other ids is from that of the batch, [B, T];
        0 where it is near.
        """
        return gradient_distance(
            self.case.gradient(renamed), self.gradient, renamed.mask, self.tol
        )

    def gradients(self, batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradients with the batch's ids, and with plain ones, [B, T] each."""
        return self.case.gradient(batch), self.case.gradient(_with_plain_ids(batch))

    def differs(self, batch: Rollouts) -> bool:
        """Return whether the ids change the gradient."""
        if batch.group is None:
            return False
        found, plain = self.gradients(batch)
        return bool(gradient_distance(found, plain, batch.mask, self.tol).max() > 0)


def groups(case: LossCase) -> tuple[list[Finding], tuple[str, ...]]:
    """Return a failure, or notes; and in words the kinds of group ids that the loss
    takes, none after a failure. They are measured once for a case, and what was right is
    added to `case.covered`.
    """
    return case.cached(("groups", case.tol), lambda: _measure_groups(case))


def _failures_of_ids(case: LossCase) -> list[Finding]:
    """Return the failure of a loss that confuses group ids, which shows the ids: a batch
    of many prompts can be wrong for that alone, and shows none.
    """
    if "group" not in case.loss.reads:
        return []
    return [f for f in groups(case)[0] if f.severity == "failure"]


def _measure_groups(case: LossCase) -> tuple[list[Finding], tuple[str, ...]]:
    """Compute what `groups` returns. A loss may loop over all ids up to 2^40: Relabeled
    limits its lines.
    """
    batch = case.on_policy()
    relabeled = Relabeled(case, batch)
    notes: list[Finding] = []
    kinds_taken = []
    for kind, (every_group, all_but_one) in relabel_groups(batch).items():
        findings = _findings_of_ids(relabeled, kind, every_group, all_but_one)
        if any(f.severity == "failure" for f in findings):
            return findings, ()
        if not findings:
            kinds_taken.append(kind)
        notes += findings
    case.covered.append("group ids " + ", ".join(kinds_taken))
    return notes, tuple(kinds_taken)


def _findings_of_ids(
    relabeled: Relabeled, kind: str, every_group: Rollouts, all_but_one: Rollouts
) -> list[Finding]:
    """Return one failure, or notes, where the loss refuses group ids of this kind or
    its gradient changes with them; nothing where it takes them.

    Args:
        relabeled: compares gradients with that of the plain ids.
        kind: the ids in words.
        every_group: the batch with such ids for every group.
        all_but_one: the batch with such ids for all groups but one.
    """
    notes: list[Finding] = []
    for renamed in (every_group, all_but_one):
        try:
            distances = relabeled.difference(renamed)
        except (InputError, OutOfMemory) as e:  # a table of 2^40 ids needs memory
            # one note of a refusal is enough
            if not notes:
                notes.append(_note_of_refused_ids(kind, e))
            continue
        if not distances.max() > 0:
            continue
        # dropped beside others: who numbers prompts from 0 never has them
        if kind == NEGATIVE and renamed is all_but_one:
            notes.append(_note_of_dropped_group(relabeled, kind, renamed, distances))
        else:
            return [_failure_of_ids(relabeled, kind, renamed)]
    return notes


def _note_of_refused_ids(kind: str, error: Exception) -> Finding:
    """Return the note of a loss that raises this error on group ids of this kind."""
    if isinstance(error, TooManyLines):
        about = f"group ids {kind} were not tested"
        return note("unusual-inputs", about, found=str(error))
    return refused("unusual-inputs", f"group ids {kind}", error)


def _note_of_dropped_group(
    relabeled: Relabeled, kind: str, renamed: Rollouts, distances: Tensor
) -> Finding:
    """Return the note that the gradient is another one where some groups have ids of
    this kind; it shows the token that differs most.
    """
    expected, found = gradient_pair(
        relabeled.gradient,
        relabeled.case.gradient(renamed),
        worst(distances),
        PLAIN_IDS,
    )
    about = f"group ids {kind} count otherwise: {_distinct_ids(renamed)}"
    return note("unusual-inputs", about, expected, found)


def _failure_of_ids(relabeled: Relabeled, kind: str, renamed: Rollouts) -> Finding:
    """Return the failure of a loss whose gradient changes with group ids of this kind;
    it shows a small batch.
    """
    small = shrink(renamed, relabeled.differs)
    found, expected = relabeled.gradients(small)
    expected_number, found_number = gradient_pair(
        expected, found, worst((found - expected).abs()), PLAIN_IDS
    )
    return fail(
        "unusual-inputs",
        f"group ids {kind}: {_distinct_ids(small)}",
        expected_number,
        found_number,
        make_example(small, expected, found, relabeled.case.loss.reads),
    )


def _distinct_ids(batch: Rollouts) -> list[int]:
    """Return the group ids of a batch, each once."""
    assert batch.group is not None
    ids: list[int] = batch.group.unique().tolist()
    return ids


def covered(case: LossCase) -> str:
    """Return in one sentence all that was tested.

    Args:
        case: the loss and its objective, after all oracles.
    """
    return COVERED + "; ".join(["every bound, |log r| up to 800", *case.covered])
