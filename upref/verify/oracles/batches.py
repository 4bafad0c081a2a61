# SPDX-License-Identifier: Apache-2.0
"""Oracles of a mini-batch that is cut up: micro-batches that add up, a loss that is
scaled for it, averaged ranks, one response by itself."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.verify.explain import cause_if_confirmed_at, holds_on_other_batches
from upref.verify.faults import measured
from upref.verify.faults.batch_reading import LARGE, clipped
from upref.verify.finding import NO_CAUSE, Cause
from upref.verify.measure import LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import gradient_distance, tolerance
from upref.verify.oracles.unusual import beyond_range, groups
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import example, gradient_pair, make_example, shrink, worst
from upref.weights.batches import CLAMPS, on_policy_batch
from upref.weights.black_box import single_token_batch


def _batch(case: LossCase) -> Rollouts:
    """A batch near on policy, one object for a case and its copies."""

    def make() -> Rollouts:
        """On policy, but for a little."""
        batch = case.ready(on_policy_batch())
        return replace(batch, logp=batch.logp - 0.05 * batch.logp.cos().abs())

    batch: Rollouts = case.cached("near on policy", make)
    return batch


def not_split(case: LossCase) -> str:
    """Say why this loss cannot be asked about micro-batches.

    Args:
        case: the loss and its objective.

    Returns:
        The reason; "" where it can be asked.
    """
    if not case.loss.micro_batchable:
        return "the loss is one call on the whole mini-batch: it takes no `totals`"
    return case.objective.batch_coupled


@oracle("micro-batches", 40, not_split)
def micro_batches(case: LossCase) -> list[Finding]:
    """The losses of micro-batches add up to that of the mini-batch.

    Args:
        case: the loss and its objective.

    Returns:
        A failure at the first way to cut the mini-batch that differs.
    """
    # of eight responses
    batch = _batch(case)
    counts = (2, 4, 8) if case.loss.equal_cuts else (2, 3, 8)
    value, gradient = case.kept_value_and_gradient(batch)
    for n in counts:
        parts = [case.value_and_gradient(part) for part in batch.split(n)]
        summed_gradient = torch.cat([p[1] for p in parts])
        summed_value = sum(p[0] for p in parts)
        distances = gradient_distance(
            summed_gradient, gradient, batch.mask, tolerance(case)
        )
        if distances.max() > 0:

            def cut_up(batch: Rollouts, n: int = n) -> Tensor:
                count = min(n, len(batch.mask))
                if count < 2 or (case.loss.equal_cuts and len(batch.mask) % count):
                    raise InputError("it has no equal parts")
                return torch.cat([case.gradient(part) for part in batch.split(count)])

            small = shrink(batch, lambda c, f=cut_up: _differ(case, c, f(c)))  # type: ignore[misc]
            whole_gradient = case.gradient(small)
            added = cut_up(small)
            row, column = worst(
                gradient_distance(added, whole_gradient, small.mask, tolerance(case))
            )

            def by_own_counts(batch: Rollouts) -> tuple[Tensor, Tensor]:
                """The gradients found, and as each part divides by its own counts."""
                cuts = [
                    part
                    for n in counts
                    if len(batch.mask) % n == 0 or not case.loss.equal_cuts
                    for part in batch.split(n)
                ]
                if not cuts:
                    raise InputError("it has no equal parts")
                told = [_right(case, replace(part, totals=None)) for part in cuts]
                return torch.cat(list(map(case.gradient, cuts))), torch.cat(told)

            why = NO_CAUSE
            if holds_on_other_batches(case, by_own_counts, batch):
                why = divides_by_its_own(case, "micro-batch")
            regime = f"{min(n, len(small.mask))} micro-batches of unequal lengths, their losses added up"
            expected_number, found_number = gradient_pair(
                whole_gradient, added, (row, column), "as of the whole"
            )
            shown = make_example(small, whole_gradient, added, case.loss.reads)
            return [
                fail("micro-batches", regime, expected_number, found_number, shown, why)
            ]
        if (summed_value - value).abs() > 1e-6 * value.abs().clamp(min=1e-3):
            return [
                note(
                    "micro-batches",
                    f"the value of {n} micro-batches does not add up, the gradient does",
                )
            ]
    return []


def _differ(case: LossCase, batch: Rollouts, gradient: Tensor) -> bool:
    """Whether this gradient is another than that of the batch in one call."""
    return bool(
        gradient_distance(
            gradient, case.gradient(batch), batch.mask, tolerance(case)
        ).max()
        > 0
    )


@oracle(
    "loss-scale",
    42,
    lambda case: "it calls .backward() itself" if case.loss.calls_backward else "",
)
def loss_scale(case: LossCase) -> list[Finding]:
    """The loss times a number, as where gradients are accumulated: a backward pass of
    its own has to pass that on.

    Args:
        case: the loss and its objective.

    Returns:
        A failure where the gradient does not scale with the loss.
    """
    batch = _batch(case)
    loss = case.loss
    _, gradient = case.kept_value_and_gradient(batch)
    for times, (words, why_times) in SCALES.items():
        into = loss.ask("gradient_by_input", batch, "logp", times)
        if into is None:
            return []
        if (
            gradient_distance(
                -into,
                times * gradient,
                batch.mask & gradient.isfinite(),
                tolerance(case, 1e-7),
            ).max()
            > 0
        ):
            return [_scaled_otherwise(case, batch, times, words, why_times)]
    return []


def _scaled_otherwise(
    case: LossCase, batch: Rollouts, times: float, words: str, why_times: str
) -> Finding:
    """The finding of a loss whose gradient is not so many times as large where the loss
    is.
    """
    loss = case.loss

    def scaled(batch: Rollouts) -> Tensor:
        into = loss.ask("gradient_by_input", batch, "logp", times)
        return torch.zeros_like(batch.logp) if into is None else -into

    def errors_of(batch: Rollouts) -> Tensor:
        return gradient_distance(
            scaled(batch),
            times * case.gradient(batch),
            batch.mask,
            tolerance(case, 1e-7),
        )

    def of_all(batch: Rollouts) -> tuple[Tensor, Tensor]:
        gradients = [
            loss.ask("gradient_by_input", batch, "logp", factor) for factor in TIMES
        ]
        if any(one_gradient is None for one_gradient in gradients):
            raise InputError("no gradient")
        return -torch.cat(gradients), torch.cat([case.gradient(batch)] * len(TIMES))

    small = shrink(batch, lambda c: bool(errors_of(c).max() > 0))
    due_gradient = times * case.gradient(small)
    found = scaled(small)
    i, t = worst(errors_of(small))
    expected_number, found_number = gradient_pair(
        due_gradient, found, (i, t), f"{words} times the gradient"
    )
    if holds_on_other_batches(case, of_all, batch):
        why = "its backward pass leaves out what comes from above (grad_output)"
    else:
        why = ""
    shown = make_example(small, due_gradient, found, loss.reads)
    return fail(
        "loss-scale",
        f"the loss times {words}, as {why_times}",
        expected_number,
        found_number,
        shown,
        why,
    )


SCALES = {  # of a loss -> in words, and where it comes from
    0.5: ("1/2", "for accumulated gradients"),
    1 / 3: ("1/3", "for three micro-batches"),
    65536.0: ("65,536", "by a gradient scaler"),
}
TIMES = (0.5, 2.0, 100.0, -1.0)  # of a loss, where grad_output is left out


@oracle("one-response", 45)
def one_response(case: LossCase) -> list[Finding]:
    """Batches of one response: a denominator of at least 2 shows, a std over rows, what
    one sign of A hides.

    Args:
        case: the loss and its objective.

    Returns:
        Findings; none after wrong weights on larger batches.
    """
    if case.wrong:
        return []

    def ask(batch: Rollouts, dtype: torch.dtype | None) -> tuple[LossCase, Tensor]:
        """The case and its weights of a batch, in float32 where a dtype is given."""
        return case.singly(batch) if dtype else (case, case.weights(batch))

    def errors_of(batch: Rollouts, dtype: torch.dtype | None) -> Tensor:
        """How far each weight is off, [B, T]; 0 where rounding or a clamp may be why."""
        asked_case, found = ask(batch, dtype)
        errors = asked_case.weight_error(batch, found)
        if not errors.max() > 10 * asked_case.tol:
            return torch.zeros_like(errors)
        # what a clamp of log r is asked for
        extreme = asked_case.ratio(batch).log().abs() > CLAMPS[0]
        forgiven = (
            asked_case.rounded(batch) | beyond_range(asked_case, batch, found) | extreme
        )
        errors = errors.masked_fill(forgiven, 0)
        return torch.where(errors > 10 * asked_case.tol, errors, 0)

    def is_off(batch: Rollouts, dtype: torch.dtype | None) -> bool:
        """Whether a weight is off."""
        return bool(errors_of(batch, dtype).max() > 0)

    for n, (regime, batch) in enumerate(_single(case)):
        dtype = None if n % 2 or case.single else torch.float32
        try:
            errors = errors_of(batch, dtype)
        except InputError as e:  # one that asks for several responses, or for whole groups, says so itself
            return [note("one-response", f"{regime} is refused", found=str(e))]
        if errors.max() > 0:
            batch = shrink(batch, partial(is_off, dtype=dtype), worst(errors))
            i, t = worst(errors_of(batch, dtype))
            _, weights = ask(batch, dtype)
            expected = case.expected(batch)[i, t].item()
            found = weights[i, t].item()
            large = clipped(case, LARGE)
            why = cause_if_confirmed_at(case, large, batch, (i, t), found)
            return [
                fail(
                    "one-response",
                    regime,
                    expected,
                    found,
                    example(case, batch, dtype),
                    why,
                )
            ]
    case.covered.append(ONE_RESPONSE)
    return []


def _single(case: LossCase) -> Iterator[tuple[str, Rollouts]]:
    """One token; then responses of the batch of every two axes, and some of which most
    tokens are A = 0 or clipped.
    """
    for A, r in ((0.7, 1.1), (-0.7, 1.1), (0.7, 0.4), (-0.7, 0.4)):
        for _ in ("float32", "float64"):
            yield (
                "a batch of one token",
                case.ready(replace(single_token_batch(A, [r], [0.3]), logp_ref=None)),
            )
    if case.objective.batch_coupled:
        return
    ids = groups(case)[1] if "group" in case.loss.reads else ()
    for axis, count in SOME.items():
        all_responses = case.stress_batch(axis, ids)
        for n in range(0, 7 * count, 7):
            i = n % len(all_responses.mask)
            t = all_responses.mask[n % len(all_responses.mask)].nonzero().max() + 2
            fields = all_responses.but(group=None).tensors()
            row = {name: x[i : i + 1, :t] for name, x in fields.items()}
            if n % 4 == 1 and not case.one_adv:
                row["adv"] = row["adv"] * (torch.arange(row["adv"].shape[1]) % 13 == 0)
            if all_responses.group is not None and ids:
                group = all_responses.group[i : i + 1]
            else:
                group = torch.zeros(1, dtype=torch.long)
            yield "a batch of one response", Rollouts.unchecked(**row, group=group)


# responses of the batches of AXES, each alone
SOME = {"every two": 20, "64 x 64, clipped": 8}
ONE_RESPONSE = (
    f"batches of one token; {sum(SOME.values())} responses of the batches below, each as a batch of its own: they "
    "have every level of every axis, and most of their tokens are clipped or have A = 0; float64 and float32 in turn"
)


def divides_by_its_own(case: LossCase, part: str) -> Cause:
    """The cause of a part of a mini-batch, `micro-batch` or `rank`, that is averaged by
    itself.

    Args:
        case: the loss and its objective.
        part: one of these words.
    """
    passed = case.loss.counts_from and f", which {case.loss.counts_from}"
    fault = {
        "micro-batch": measured.OWN_DENOMINATOR_OF_MICRO_BATCH,
        "rank": measured.OWN_DENOMINATOR_OF_RANK,
    }[part]
    return fault.cause(counts=passed)


def _right(case: LossCase, batch: Rollouts) -> Tensor:
    """dJ/dlp of the objective itself, aggregated as this loss does."""
    return case.expected(batch) * case.factors(batch)


def not_parallel(case: LossCase) -> str:
    """Why this loss cannot be asked.

    Args:
        case: the loss and its objective.

    Returns:
        The reason; "" where it can be asked.
    """
    if not case.loss.micro_batchable and (
        not case.objective.agg.startswith("seq-mean") or "group" in case.loss.reads
    ):
        return "it takes no `totals`: the ranks' own token means, averaged, are not the mini-batch's"
    return case.objective.batch_coupled


def rank_counts(case: LossCase) -> str:
    """What a rank is taken to be told, in words.

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
    """K ranks with rows dealt out in turn, so that groups lie on several; the framework
    averages their gradients.

    Args:
        case: the loss and its objective.

    Returns:
        A failure with the first number of ranks that differs.
    """
    batch = _batch(case)
    _, gradient = case.kept_value_and_gradient(batch)
    for ranks in RANKS:
        mean = _mean(case, batch, ranks)
        distances = gradient_distance(mean, gradient, batch.mask, tolerance(case))
        if distances.max() > 0:

            def dealt(batch: Rollouts, ranks: int = ranks) -> Tensor:
                if len(batch.mask) % ranks:
                    raise InputError("it has no equal parts")
                return _mean(case, batch, ranks)

            small = shrink(batch, lambda c, f=dealt: _differ(case, c, f(c)))  # type: ignore[misc]
            whole_gradient = case.gradient(small)
            mean = dealt(small)
            i, t = worst(
                gradient_distance(mean, whole_gradient, small.mask, tolerance(case))
            )
            each = len(whole_gradient) // ranks
            responses = f"{each} responses" if each > 1 else "one response"
            text = (
                f"{ranks} ranks of {responses}, gradients averaged: {rank_counts(case)}"
            )
            expected_number, found_number = gradient_pair(
                whole_gradient, mean, (i, t), "as on one rank"
            )
            shown = make_example(small, whole_gradient, mean, case.loss.reads)
            return [
                fail(
                    "data-parallel",
                    text,
                    expected_number,
                    found_number,
                    shown,
                    _why(case, batch),
                )
            ]
    return []


RANKS = (2, 4)


def _dealt(batch: Rollouts, ranks: int) -> list[Tensor]:
    return [torch.arange(k, len(batch.mask), ranks) for k in range(ranks)]


def _mean(case: LossCase, batch: Rollouts, ranks: int) -> Tensor:
    """The gradients of the ranks, averaged."""
    loss = case.loss
    mean = torch.zeros_like(batch.logp)
    totals = batch.counts
    for rows in _dealt(batch, ranks):
        part = batch.rows(rows, totals)
        if not loss.micro_batchable:
            part = replace(part, totals=None, group=None)
        told = loss.reads_ranks or not loss.micro_batchable
        mean[rows] = case.gradient(part, ranks) / ranks * (1 if told else ranks)
    return mean


def _why(case: LossCase, batch: Rollouts) -> str | Cause:
    """The change to the reference that gives this mean, whatever the number of ranks."""

    def by_own_counts(batch: Rollouts, ranks: int) -> Tensor:
        """The gradients of the ranks, averaged, as each divides by its own counts."""
        out = torch.zeros_like(batch.logp)
        for rows in _dealt(batch, ranks):
            out[rows] = (
                _right(
                    case,
                    replace(batch.rows(rows, Totals.of(batch.mask[rows])), totals=None),
                )
                / ranks
            )
        return out

    for words, change in (
        (
            "it is not scaled by the number of ranks",
            lambda c, ranks: _right(case, c) / ranks,
        ),
        (divides_by_its_own(case, "rank"), by_own_counts),
        (
            divides_by_its_own(case, "rank"),
            lambda c, ranks: by_own_counts(c, ranks) * ranks,
        ),
    ):

        def found_and_changed(
            batch: Rollouts, change: Callable[[Rollouts, int], Tensor] = change
        ) -> tuple[Tensor, Tensor]:
            """The averaged gradients, found and as the change gives them, for each
            number of ranks.
            """
            # of equally many responses each
            count = [ranks for ranks in RANKS if len(batch.mask) % ranks == 0]
            if not count:
                raise InputError("it has no equal parts")
            pairs = [
                (_mean(case, batch, ranks), change(batch, ranks)) for ranks in count
            ]
            return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

        if holds_on_other_batches(case, found_and_changed, batch):
            return words
    return ""
