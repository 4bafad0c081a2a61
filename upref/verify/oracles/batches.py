# SPDX-License-Identifier: Apache-2.0
"""Oracles of a mini-batch that is cut up: micro-batches that add up, a loss that is
scaled for it, averaged ranks, one response by itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN, OVER_RESPONSES, Totals
from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.explain import cause_if_confirmed_at, holds_on_other_batches
from upref.verify.extent import bound_of_token
from upref.verify.factors import declared_aggregation
from upref.verify.faults import measured
from upref.verify.faults.batch_reading import LARGE, clipped, left_out
from upref.verify.faults.denominators import BY_TOKENS
from upref.verify.finding import NO_CAUSE, Cause, Number
from upref.verify.measure import VALUE_ROUNDING, LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import gradient_distance
from upref.verify.oracles.unusual import beyond_range, groups, long_batches
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import example, gradient_pair, make_example, shrink, worst
from upref.weights.batches import CLAMPS
from upref.weights.black_box import single_token_batch


def _near_on_policy_batch(case: LossCase) -> Rollouts:
    """Return a batch near on policy; a case and its copies share one object."""

    def make() -> Rollouts:
        """Lower each log π_θ of the on-policy batch by at most 0.05."""
        batch = case.on_policy()
        return replace(batch, logp=batch.logp - 0.05 * batch.logp.cos().abs())

    return case.cached("near on policy", make)


def not_split(case: LossCase) -> str:
    """Say why this loss cannot be asked about micro-batches.

    Args:
        case: the loss and its objective.

    Returns:
        The reason; "" where it can be asked.
    """
    if not case.loss.micro_batchable:
        return "the loss is one call on the whole mini-batch: it takes no `totals`"
    if case.objective.agg == KEPT_MEAN:
        return "kept-mean divides by the kept tokens of the mini-batch, which `totals` does not have"
    return case.objective.batch_coupled


@oracle("micro-batches", 40, not_split)
def micro_batches(case: LossCase) -> list[Finding]:
    """Compare the summed losses of micro-batches, and their gradients, with those of the
    mini-batch.

    Args:
        case: the loss and its objective.

    Returns:
        A failure at the first way to cut the mini-batch whose gradient differs, or a note
        at the first whose value alone differs; else what `_without_tokens` reports.
    """
    batch = _near_on_policy_batch(case)
    value, gradient = case.kept_value_and_gradient(batch)
    for n in _micro_batch_counts(case):
        answers = [case.value_and_gradient(part) for part in batch.split(n)]
        summed_gradient = torch.cat([part_gradient for _, part_gradient in answers])
        summed_value = sum(part_value for part_value, _ in answers)
        distances = gradient_distance(
            summed_gradient, gradient, batch.mask, case.allowed_error()
        )
        if distances.max() > 0:
            return [_failure_of_micro_batches(case, batch, n)]
        value_tol = max(VALUE_ROUNDING, case.value_tol)
        if (summed_value - value).abs() > value_tol * value.abs().clamp(min=1e-3):
            return [
                note(
                    "micro-batches",
                    f"the value of {n} micro-batches does not add up, the gradient does",
                )
            ]
    return _without_tokens(case, batch)


def _without_tokens(case: LossCase, batch: Rollouts) -> list[Finding]:
    """Report a micro-batch of which no token is trained, as a filter leaves it, that adds
    something to the others: a gradient is a failure; a value, or a gradient that is not
    finite, is a note. Where a mean is over responses, what such rows count is not
    defined, and nothing is compared.

    Args:
        case: the loss and its objective.
        batch: the mini-batch.
    """
    if declared_aggregation(case.objective) not in BY_TOKENS or batch.group is not None:
        return []
    half = len(batch.mask) // 2
    fields = {name: x[half:] for name, x in batch.tensors().items()}
    fields["mask"] = torch.zeros_like(fields["mask"])
    # of the mini-batch, whose other half trains
    mask = batch.mask.clone()
    mask[half:] = False
    # Rollouts itself refuses such rows
    empty = Rollouts.unchecked(**fields, totals=Totals.of(mask))
    try:
        value, gradient = case.value_and_gradient(empty)
    except InputError:  # it refuses such a micro-batch
        return []
    text = "a micro-batch of which no token is trained, beside others"
    if not gradient.isfinite().all():
        found = "nan" if gradient.isnan().any() else "inf"
        why = EMPTY_IS_NOT_FINITE.format(found)
        return [note("micro-batches", f"{text}, has the gradient {found}", cause=why)]
    largest = case.gradient(case.ready(batch)).abs().max()
    if (gradient.abs() > case.tol * largest).any():
        i, t = worst(gradient.abs())
        found_number = Number(gradient[i, t].item(), "dJ/dlp")
        return [fail("micro-batches", text, Number(0, "dJ/dlp"), found_number)]
    if value.abs() > case.tol * largest or value.isnan():
        return [note("micro-batches", f"{text}, has the value {value:.6g}, not 0")]
    return []


EMPTY_IS_NOT_FINITE = (
    "the gradient of the whole step is then {} too, unless the trainer leaves such micro-batches "
    "out: divide by a count of the mini-batch, or by at least 1"
)


def _micro_batch_counts(case: LossCase) -> tuple[int, ...]:
    """Return the numbers of micro-batches that the mini-batch is cut into. It has eight
    responses: 3 cuts it into unequal parts.
    """
    return (2, 4, 8) if case.loss.equal_cuts else (2, 3, 8)


def _failure_of_micro_batches(case: LossCase, batch: Rollouts, n: int) -> Finding:
    """Return the failure of a loss whose gradients of n micro-batches differ from that
    of the whole batch; it shows a small batch.
    """
    gradient_in_parts = partial(_gradient_in_parts, case, n)
    small_batch = shrink(batch, partial(_differs_from_whole, case, gradient_in_parts))
    whole_gradient = case.gradient(small_batch)
    gradient_of_parts = gradient_in_parts(small_batch)
    place = worst(
        gradient_distance(
            gradient_of_parts, whole_gradient, small_batch.mask, case.allowed_error()
        )
    )
    expected_number, found_number = gradient_pair(
        whole_gradient, gradient_of_parts, place, "as of the whole"
    )
    if holds_on_other_batches(case, partial(_found_and_by_own_counts, case), batch):
        why = divides_by_its_own(case, "micro-batch")
    else:
        why = NO_CAUSE
    count = min(n, len(small_batch.mask))
    token_counts = {int(part.mask.sum()) for part in small_batch.split(count)}
    sizes = " of unequal lengths" if len(token_counts) > 1 else ""
    return fail(
        "micro-batches",
        f"{count} micro-batches{sizes}, their losses added up",
        expected_number,
        found_number,
        make_example(small_batch, whole_gradient, gradient_of_parts, case.loss.reads),
        why,
    )


def _gradient_in_parts(case: LossCase, n: int, batch: Rollouts) -> Tensor:
    """Return the gradients of n micro-batches, of one per response at most, below each
    other, [B, T].

    Raises:
        InputError: the batch has no two parts, or no equal ones where the loss takes
            only these.
    """
    count = min(n, len(batch.mask))
    if count < 2 or (case.loss.equal_cuts and len(batch.mask) % count):
        raise InputError("it has no equal parts")
    return torch.cat([case.gradient(part) for part in batch.split(count)])


def _found_and_by_own_counts(case: LossCase, batch: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the gradients of the micro-batches, of every number of them, and those
    that are due of parts that divide by their own counts.

    Raises:
        InputError: the loss takes equal parts only, and the batch has none.
    """
    parts = [
        part
        for n in _micro_batch_counts(case)
        if len(batch.mask) % n == 0 or not case.loss.equal_cuts
        for part in batch.split(n)
    ]
    if not parts:
        raise InputError("it has no equal parts")
    due_parts = [_due_gradient(case, replace(part, totals=None)) for part in parts]
    return torch.cat(list(map(case.gradient, parts))), torch.cat(due_parts)


def _differs_from_whole(
    case: LossCase, gradient_of: Callable[[Rollouts], Tensor], batch: Rollouts
) -> bool:
    """Tell whether a gradient differs from that of the whole batch in one call.

    Args:
        case: the loss and its objective.
        gradient_of: makes the gradient of a batch in another way, [B, T].
        batch: the batch.
    """
    distances = gradient_distance(
        gradient_of(batch), case.gradient(batch), batch.mask, case.allowed_error()
    )
    return bool(distances.max() > 0)


@oracle(
    "loss-scale",
    42,
    lambda case: "it calls .backward() itself" if case.loss.calls_backward else "",
)
def loss_scale(case: LossCase) -> list[Finding]:
    """Multiply the loss by each of SCALES, as where gradients are accumulated, and compare
    its gradient with the multiple: a backward pass of its own has to pass that on.

    Args:
        case: the loss and its objective.

    Returns:
        A failure at the first factor by which the gradient is not multiplied; nothing
        where all agree, or where the loss has no gradient.
    """
    batch = _near_on_policy_batch(case)
    loss = case.loss
    _, gradient = case.kept_value_and_gradient(batch)
    for factor, (words, purpose) in SCALES.items():
        loss_gradient = loss.ask("gradient_by_input", batch, "logp", factor)
        if loss_gradient is None:
            return []
        distances = gradient_distance(
            -loss_gradient,
            factor * gradient,
            batch.mask & gradient.isfinite(),
            case.allowed_error(1e-7),
        )
        if distances.max() > 0:
            return [_finding_of_scale(case, batch, factor, words, purpose)]
    return []


def _finding_of_scale(
    case: LossCase, batch: Rollouts, factor: float, words: str, purpose: str
) -> Finding:
    """Return the failure of a loss whose gradient is not multiplied by the factor that
    the loss is multiplied by.
    """
    loss = case.loss

    def gradient_of_scaled_loss(batch: Rollouts) -> Tensor:
        """Return dJ/dlp of the loss times the factor, [B, T]."""
        loss_gradient = loss.ask("gradient_by_input", batch, "logp", factor)
        return torch.zeros_like(batch.logp) if loss_gradient is None else -loss_gradient

    def errors_of(batch: Rollouts) -> Tensor:
        """Return how far each token is from the factor times the gradient, [B, T]."""
        return gradient_distance(
            gradient_of_scaled_loss(batch),
            factor * case.gradient(batch),
            batch.mask,
            case.allowed_error(1e-7),
        )

    def found_and_due(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the gradients found for all CONFIRMING_FACTORS, and those of a backward
        pass that leaves the factor out.
        """
        gradients = [
            loss.ask("gradient_by_input", batch, "logp", times)
            for times in CONFIRMING_FACTORS
        ]
        if any(one_gradient is None for one_gradient in gradients):
            raise InputError("no gradient")
        return -torch.cat(gradients), torch.cat(
            [case.gradient(batch)] * len(CONFIRMING_FACTORS)
        )

    small = shrink(batch, lambda c: bool(errors_of(c).max() > 0))
    due_gradient = factor * case.gradient(small)
    found = gradient_of_scaled_loss(small)
    i, t = worst(errors_of(small))
    expected_number, found_number = gradient_pair(
        due_gradient, found, (i, t), f"{words} times the gradient"
    )
    if holds_on_other_batches(case, found_and_due, batch):
        why = "its backward pass leaves out what comes from above (grad_output)"
    else:
        why = ""
    shown = make_example(small, due_gradient, found, loss.reads)
    return fail(
        "loss-scale",
        f"the loss times {words}, as {purpose}",
        expected_number,
        found_number,
        shown,
        why,
    )


# a factor of the loss -> the factor in words, and what trainers use it for
SCALES = {
    0.5: ("1/2", "for accumulated gradients"),
    1 / 3: ("1/3", "for three micro-batches"),
    65536.0: ("65,536", "by a gradient scaler"),
}
# the factors of the loss at which the cause, a missing grad_output, is confirmed
CONFIRMING_FACTORS = (0.5, 2.0, 100.0, -1.0)


@oracle("one-response", 45)
def one_response(case: LossCase) -> list[Finding]:
    """Compare the weights on batches of one response. They show a denominator of at least
    2, a std over rows, and what one sign of A hides.

    Args:
        case: the loss and its objective.

    Returns:
        A failure on the first batch that is wrong, or one note if batches are refused.
        Nothing after wrong weights on larger batches.
    """
    if case.wrong:
        return []
    refusals: dict[str, Finding] = {}  # by dtype
    for index, (regime, batch) in enumerate(_single_batches(case)):
        # float32 and float64 in turn
        dtype = None if index % 2 or case.single else torch.float32
        try:
            errors = _unforgiven_errors(case, dtype, batch)
        except InputError as e:  # one that asks for several responses, or for whole groups, says so itself
            in_float32 = ", in float32," if dtype else ""
            words = f"{regime}{in_float32} is refused"
            refusals.setdefault(in_float32, note("one-response", words, found=str(e)))
            continue
        if errors.max() > 0:
            is_wrong = partial(_has_wrong_weight, case, dtype)
            small_batch = shrink(batch, is_wrong, worst(errors))
            why = _cause_of_one_response(case, dtype, batch, small_batch)
            return [_failure_of_one_response(case, dtype, regime, small_batch, why)]
    if refusals:
        return [refusals[min(refusals)]]  # in float64, if there is one
    case.covered.append(ONE_RESPONSE)
    return []


def _case_and_weights(
    case: LossCase, dtype: torch.dtype | None, batch: Rollouts
) -> tuple[LossCase, Tensor]:
    """Return a case and its weights on a batch, [B, T]: the same case where dtype is None;
    else a copy that is compared as float32, and its weights in float32.
    """
    return case.singly(batch) if dtype else (case, case.weights(batch))


def _unforgiven_errors(
    case: LossCase, dtype: torch.dtype | None, batch: Rollouts
) -> Tensor:
    """Return the relative error of each weight, [B, T]; 0 where it is at most 10 times the
    tolerance, or where rounding or a clamp may be the reason.
    """
    compared_case, found = _case_and_weights(case, dtype, batch)
    errors = compared_case.weight_error(batch, found)
    if not errors.max() > 10 * compared_case.tol:
        return torch.zeros_like(errors)
    # a clamp of log r, which the oracle `extremes` reports, may change these weights
    is_extreme = compared_case.ratio(batch).log().abs() > CLAMPS[0]
    forgiven = (
        compared_case.rounded(batch)
        | beyond_range(compared_case, batch, found)
        | is_extreme
    )
    errors = errors.masked_fill(forgiven, 0)
    return torch.where(errors > 10 * compared_case.tol, errors, 0)


def _has_wrong_weight(
    case: LossCase, dtype: torch.dtype | None, batch: Rollouts
) -> bool:
    """Tell whether a weight of the batch is wrong."""
    return bool(_unforgiven_errors(case, dtype, batch).max() > 0)


def _cause_of_one_response(
    case: LossCase, dtype: torch.dtype | None, batch: Rollouts, small_batch: Rollouts
) -> Cause:
    """Return the cause of a wrong weight in a batch of one response.

    Args:
        case: the loss and its objective.
        dtype: in which it is wrong, where that is not float64.
        batch: the batch.
        small_batch: the smallest part of it with a wrong weight.
    """
    i, t = worst(_unforgiven_errors(case, dtype, small_batch))
    _, weights = _case_and_weights(case, dtype, small_batch)
    at = (small_batch, (i, t), weights[i, t].item())
    cause = cause_if_confirmed_at(case, clipped(case, LARGE), *at)
    for known_fault in () if cause else left_out(case, batch):
        cause = cause_if_confirmed_at(case, known_fault, *at, *long_batches(case))
        if cause:
            return cause
    return cause or bound_of_token(case, small_batch)


def _failure_of_one_response(
    case: LossCase,
    dtype: torch.dtype | None,
    regime: str,
    batch: Rollouts,
    why: Cause,
) -> Finding:
    """Return the failure of the worst weight of a batch of one response.

    Args:
        case: the loss and its objective.
        dtype: in which it is wrong; None for float64.
        regime: the words for the batch.
        batch: the batch, which is shown.
        why: its cause.
    """
    i, t = worst(_unforgiven_errors(case, dtype, batch))
    _, weights = _case_and_weights(case, dtype, batch)
    found = weights[i, t].item()
    return fail(
        "one-response",
        regime,
        case.expected(batch)[i, t].item(),
        found,
        example(case, batch, dtype),
        why,
    )


def _single_batches(case: LossCase) -> Iterator[tuple[str, Rollouts]]:
    """Yield, in words and as Rollouts, batches of one token; then single responses of
    the batch of every two axes, and of one whose tokens mostly have A = 0 or are
    clipped.
    """
    for A, r in ((0.7, 1.1), (-0.7, 1.1), (0.7, 0.4), (-0.7, 0.4)):
        for _ in ("float32", "float64"):
            yield (
                "a batch of one token",
                case.ready(replace(single_token_batch(A, [r], [0.3]), logp_ref=None)),
            )
    if case.objective.batch_coupled:
        return
    id_kinds = groups(case)[1] if "group" in case.loss.reads else ()
    for axis, count in RESPONSES_OF_AXIS.items():
        all_responses = case.stress_batch(axis, id_kinds)
        for position in range(0, 7 * count, 7):
            # every seventh response, from the beginning again after the last one
            i = position % len(all_responses.mask)
            # one masked slot behind the last token stays
            width = all_responses.mask[i].nonzero().max() + 2
            fields = all_responses.but(group=None).tensors()
            row = {name: x[i : i + 1, :width] for name, x in fields.items()}
            if position % 4 == 1 and not case.one_adv:
                # every 13th token keeps its advantage, the others get A = 0
                row["adv"] = row["adv"] * (torch.arange(row["adv"].shape[1]) % 13 == 0)
            if all_responses.group is not None and id_kinds:
                group = all_responses.group[i : i + 1]
            else:
                group = torch.zeros(1, dtype=torch.long)
            regime = "one response of the unusual inputs, as a batch of its own"
            yield regime, Rollouts.unchecked(**row, group=group)


# responses of the batches of AXES, each alone
RESPONSES_OF_AXIS = {"every two": 20, "64 x 64, clipped": 8}
ONE_RESPONSE = (
    f"batches of one token; {sum(RESPONSES_OF_AXIS.values())} responses of the batches below, "
    "each as a batch of its own: they have every level of every axis, and most of their tokens "
    "are clipped or have A = 0; float64 and float32 in turn"
)


def divides_by_its_own(case: LossCase, part: str) -> Cause:
    """Return the cause of a gradient in which a part of the mini-batch divides by its
    own counts.

    Args:
        case: the loss and its objective.
        part: `micro-batch` or `rank`.
    """
    passed_counts = case.loss.counts_from and f", which {case.loss.counts_from}"
    fault = {
        "micro-batch": measured.OWN_DENOMINATOR_OF_MICRO_BATCH,
        "rank": measured.OWN_DENOMINATOR_OF_RANK,
    }[part]
    return fault.cause(counts=passed_counts)


def _due_gradient(case: LossCase, batch: Rollouts) -> Tensor:
    """Return dJ/dlp of the objective, with the aggregation of this loss, [B, T]."""
    return case.expected(batch) * case.factors(batch)


def not_parallel(case: LossCase) -> str:
    """Say why this loss cannot be tested on data-parallel ranks.

    Args:
        case: the loss and its objective.

    Returns:
        The reason; "" where it can be tested.
    """
    if not case.loss.micro_batchable and (
        case.objective.agg not in OVER_RESPONSES or "group" in case.loss.reads
    ):
        return "it takes no `totals`: the ranks' own token means, averaged, are not the mini-batch's"
    return case.objective.batch_coupled


def rank_counts(case: LossCase) -> str:
    """Return in words which counts each rank is assumed to get.

    Args:
        case: the loss and its objective.
    """
    if not case.loss.micro_batchable:
        return "each rank has equally many responses and gets only its own counts"
    if case.loss.reads_ranks:
        return (
            "each rank gets the counts of the whole mini-batch and the number of ranks"
        )
    return "each rank gets the counts of the whole mini-batch, and its loss is multiplied by the number of ranks"


@oracle("data-parallel", 50, not_parallel)
def data_parallel(case: LossCase) -> list[Finding]:
    """Compare the gradient of the mini-batch with the average over data-parallel ranks.
    Rows are dealt out in turn, so that groups lie on several ranks.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the first number of ranks that differs, in the smallest batch.
    """
    batch = _near_on_policy_batch(case)
    _, gradient = case.kept_value_and_gradient(batch)
    for ranks in RANK_COUNTS:
        averaged = _averaged_gradient(case, batch, ranks)
        distances = gradient_distance(
            averaged, gradient, batch.mask, case.allowed_error()
        )
        if distances.max() > 0:

            def averaged_if_equal(batch: Rollouts, ranks: int = ranks) -> Tensor:
                """Return the averaged gradient, where all ranks have equal parts."""
                if len(batch.mask) % ranks:
                    raise InputError("it has no equal parts")
                return _averaged_gradient(case, batch, ranks)

            small = shrink(
                batch,
                partial(_differs_from_whole, case, averaged_if_equal),
            )
            whole_gradient = case.gradient(small)
            averaged = averaged_if_equal(small)
            i, t = worst(
                gradient_distance(
                    averaged, whole_gradient, small.mask, case.allowed_error()
                )
            )
            responses_of_rank = len(whole_gradient) // ranks
            responses = (
                f"{responses_of_rank} responses"
                if responses_of_rank > 1
                else "one response"
            )
            about = (
                f"{ranks} ranks of {responses}, gradients averaged: {rank_counts(case)}"
            )
            expected_number, found_number = gradient_pair(
                whole_gradient, averaged, (i, t), "as on one rank"
            )
            shown = make_example(small, whole_gradient, averaged, case.loss.reads)
            return [
                fail(
                    "data-parallel",
                    about,
                    expected_number,
                    found_number,
                    shown,
                    _cause_of_average(case, batch),
                )
            ]
    return []


RANK_COUNTS = (2, 4)


def _rows_of_ranks(batch: Rollouts, ranks: int) -> list[Tensor]:
    """Return the indices of each rank's responses: they are dealt out in turn."""
    return [torch.arange(k, len(batch.mask), ranks) for k in range(ranks)]


def _averaged_gradient(case: LossCase, batch: Rollouts, ranks: int) -> Tensor:
    """Return the average of the ranks' gradients, [B, T]."""
    loss = case.loss
    averaged = torch.zeros_like(batch.logp)
    totals = batch.counts
    for rows in _rows_of_ranks(batch, ranks):
        part = batch.rows(rows, totals)
        if not loss.micro_batchable:
            part = replace(part, totals=None, group=None)
        # a loss that gets the whole batch's counts, and not the number of ranks, is
        # multiplied by that number before the average
        is_multiplied = loss.micro_batchable and not loss.reads_ranks
        times = ranks if is_multiplied else 1
        averaged[rows] = case.gradient(part, ranks) / ranks * times
    return averaged


def _cause_of_average(case: LossCase, batch: Rollouts) -> str | Cause:
    """Return the known mistake that gives this average for every number of ranks; ""
    for none.
    """

    def by_own_counts(batch: Rollouts, ranks: int) -> Tensor:
        """Return the average of the ranks' gradients if each divides by its own
        counts.
        """
        averaged = torch.zeros_like(batch.logp)
        for rows in _rows_of_ranks(batch, ranks):
            part = batch.rows(rows, Totals.of(batch.mask[rows]))
            due = _due_gradient(case, replace(part, totals=None))
            averaged[rows] = due / ranks
        return averaged

    def found_and_changed(
        batch: Rollouts, change: Callable[[Rollouts, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the averaged gradients for each number of ranks: those found, and those
        that the change gives.
        """
        # numbers of ranks that have equally many responses each
        equal_ranks = [ranks for ranks in RANK_COUNTS if len(batch.mask) % ranks == 0]
        if not equal_ranks:
            raise InputError("it has no equal parts")
        found = []
        changed = []
        for ranks in equal_ranks:
            found.append(_averaged_gradient(case, batch, ranks))
            changed.append(change(batch, ranks))
        return torch.cat(found), torch.cat(changed)

    own_counts = divides_by_its_own(case, "rank")
    for words, change in (
        (
            "it is not scaled by the number of ranks",
            lambda batch, ranks: _due_gradient(case, batch) / ranks,
        ),
        (own_counts, by_own_counts),
        (own_counts, lambda batch, ranks: by_own_counts(batch, ranks) * ranks),
    ):
        if holds_on_other_batches(
            case, partial(found_and_changed, change=change), batch
        ):
            return words
    return ""
