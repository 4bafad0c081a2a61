# SPDX-License-Identifier: Apache-2.0
"""The report of a replay as lines of text. What a finding means is in words.py."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice

import torch

from upref.replay.advantages import Advantages
from upref.replay.checks import RunChecks, StepChecks
from upref.replay.compare import HeavyToken, ObjectiveWeights
from upref.replay.findings import STEPS_NAMED, Checked, ReplayFinding
from upref.replay.gap import Gap
from upref.replay.loss import LoggedLoss
from upref.replay.schema import UNTOLD, RecordedBatch
from upref.replay.zero import MOST_SHAPES, ZeroMismatch
from upref.result import name_first
from upref.verify.report import counted

SHOWN = 4  # findings of one check that are printed
WIDTH = 118
COUNT = re.compile(r"\b[\d.,]*\d ")  # of tokens or responses, another one at each step
NO_ROUNDING = 1.0  # nats, of one token: rounding makes no such difference


def report_lines(found: RunChecks, verbose: bool) -> Iterator[str]:
    """Yield the lines of a report: of a run, first what was found and at which steps;
    then the checks that did not run, and the tables of objectives and of the heaviest
    tokens.

    Args:
        found: the result of a replay.
        verbose: of a run, each step as well.

    Yields:
        Lines, without their ends; one that is folded holds newlines.
    """
    unused = _never_exercised(found)
    is_run = len(found.steps) > 1
    if is_run:
        first, last = found.steps[0].step, found.steps[-1].step
        yield _fold(f"{len(found.steps)} steps, {first} to {last}. {heading(found)}.")
        yield from _run_lines(found, unused)
    if verbose or not is_run:
        for s in found.steps:
            yield s.summary
            yield from _step_lines(s, unused)
    if is_run:
        for s in found.steps:
            if s.untold:
                yield _fold(f"      step {s.step}: {s.untold}")
    for check, why in found.not_run.items():
        yield _fold(f"not run  {check}: {why}")
    if found.table is not None:
        if is_run:
            yield _fold(_words_for_table_step(found))
        yield from _table_lines(found.table)
    if found.table is not None and found.heaviest:
        yield from _heavy_lines(found.heaviest, found.table.rows[0].name)


def heading(found: RunChecks) -> str:
    """Say in one line what the checks of a replay found; of a run, at which steps.

    Args:
        found: the replay.
    """
    parts = []
    for severity, words in (("failure", "Failed"), ("note", "notes on")):
        if named := _checks_with_steps(found, severity):
            parts.append(f"{words}: {'; '.join(named)}")
    if not found.failures:
        parts.insert(0, f"Nothing failed{_words_for_other_gradient(found)}")
    if found.not_run:
        parts.append(f"not checked: {', '.join(found.not_run)}")
    return "; ".join(parts)


def _words_for_other_gradient(found: RunChecks) -> str:
    """Say that the recorded gradient is not the named objective's, and of a run at which
    steps; "" where no step has such a gradient.
    """
    steps = [s.step for s in found.steps if s.has_other_gradient]
    if not steps:
        return ""
    words = f", but the recorded gradient is not {found.objective}'s as named"
    if len(found.steps) > 1:
        words += f" {_where(found, steps)}"
    return words


def _checks_with_steps(found: RunChecks, severity: str) -> list[str]:
    """Name the checks that have a finding of this severity, in the order of the steps,
    and of a run where: "loss at all 3 steps". "run" stands for the series and comes
    first.
    """
    steps_of_check: dict[str, list[int]] = {}
    for s in found.steps:
        checks = [f.check for f in s.findings if f.severity == severity]
        for check in dict.fromkeys(checks):  # a check may have several findings
            steps_of_check.setdefault(check, []).append(s.step)
    names = []
    for check, numbers in steps_of_check.items():
        where = f" {_where(found, numbers)}" if len(found.steps) > 1 else ""
        names.append(check + where)
    of_run = found.series.findings if found.series is not None else ()
    if any(f.severity == severity for f in of_run):
        names.insert(0, "run")
    return names


def _where(found: RunChecks, numbers: list[int]) -> str:
    """Say at which steps of a run something is: "at all 9 steps", "from step 4 on (6 of
    9 steps)", or the first STEPS_NAMED of them.

    Args:
        found: the replay.
        numbers: of the steps, in their order.
    """
    order = [s.step for s in found.steps]
    count = len(numbers)
    if count == len(order):
        return f"at all {count} steps"
    if count > 1 and order[-count:] == numbers:
        return f"from step {numbers[0]} on ({count} of {len(order)} steps)"
    return f"at {count} of {len(order)} steps: {name_first(numbers, STEPS_NAMED)}"


def _run_lines(found: RunChecks, unused: tuple[str, ...]) -> Iterator[str]:
    """Yield what was found in a run: each cause once, with its steps, failures first;
    then its sizes, and the checks that found nothing.

    Args:
        found: the replay of several steps.
        unused: hyperparameters that no step exercises.
    """
    of_run = found.series.findings if found.series is not None else ()
    of_steps = _findings_by_kind(found)
    for severity in ("failure", "note"):
        yield from _finding_lines("run", [f for f in of_run if f.severity == severity])
        for first, numbers in of_steps:
            if first.severity == severity:
                yield _line_of_kind(found, first, numbers)
    for s in found.steps:
        if s.zero is not None and s.zero.differ:
            yield f"      zero: at step {s.step}, the first one:"
            yield from _zero_lines(s.zero)
            break
    yield from _size_lines(found)
    yield from _agreement_lines(found, unused)


def _findings_by_kind(found: RunChecks) -> list[tuple[ReplayFinding, list[int]]]:
    """Return the first finding of each kind, and the numbers of the steps that have one
    of that kind: what few steps have is before what many have.

    Findings of one severity, check and cause are of one kind.
    """
    kinds: dict[tuple[str, str, str], tuple[ReplayFinding, list[int]]] = {}
    for s in found.steps:
        for f in s.findings:
            kind = (f.severity, f.check, f.cause)
            _, numbers = kinds.setdefault(kind, (f, []))
            numbers.append(s.step)
    return sorted(kinds.values(), key=lambda one: len(one[1]))


def _line_of_kind(found: RunChecks, first: ReplayFinding, numbers: list[int]) -> str:
    """Return the line of a kind of finding, with its steps.

    Args:
        found: the replay.
        first: the finding that is quoted, that of the first of these steps.
        numbers: of the steps.
    """
    word = "FAIL" if first.severity == "failure" else "note"
    where = _where(found, numbers)
    where = where[0].upper() + where[1:]
    of_first = ""
    if len(numbers) > 1 and first.numbers:
        of_first = f" Its numbers are of step {numbers[0]}."
    return _fold(f"{word}  {first.check}: {first} {where}.{of_first}")


def _size_lines(found: RunChecks) -> Iterator[str]:
    """Yield the sizes of the gap at the first, the last and the worst step of a run,
    and the numbers of the worst; nothing for fewer than two steps with a sampler's
    column.
    """
    if found.series is None:
        return
    sizes = [s.size for s in found.series.steps]
    largest = max(found.series.steps, key=lambda s: s.size)
    gaps = [s.sampler for s in found.steps if s.sampler is not None]
    if found.series.findings or any(gap.findings for gap in gaps):
        word = "      run"
    elif max(gap.largest for gap in gaps) > NO_ROUNDING:
        word = "      run: rounding explains the means, and not the largest"
    else:
        word = "ok    run: no more than rounding"
    yield (
        f"{word}; KL(μ ‖ π_old) by capped k2 {sizes[0]:.2g} at first, {sizes[-1]:.2g} at last, "
        f"at most {largest.size:.2g} at step {largest.step}"
    )
    of_largest = next(s.sampler for s in found.steps if s.step == largest.step)
    if of_largest is not None:
        yield f"      step {largest.step}: {_gap_numbers(of_largest)}"


def _agreement_lines(found: RunChecks, unused: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for each estimator, and for each sum that the loss is, with the
    steps that agree.

    Args:
        found: the replay of several steps.
        unused: hyperparameters that no step exercises.
    """
    agreements: dict[tuple[str, str], list[int]] = {}
    for s in found.steps:
        for agreement in _agreements(s, unused):
            agreements.setdefault(agreement, []).append(s.step)
    for (words, more), numbers in agreements.items():
        yield _fold(f"ok    {words} {_where(found, numbers)}{more}")


def _agreements(s: StepChecks, unused: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts: what agrees in a step, in words that are the same at other
    steps, and what follows the list of these steps in the line ("" or the
    hyperparameters that are not exercised).
    """
    if s.zero is not None and not s.zero.differ:
        yield "zero: all tokens are equal bit by bit", ""
    advantages = s.advantages
    if advantages is not None and advantages.estimator and not advantages.findings:
        yield f"advantages: {advantages.estimator} of {advantages.grouping}", ""
    if s.loss is None:
        return
    terms = COUNT.sub("", _terms(s.loss))
    if _is_right(s.loss):
        yield f"loss: it is the {terms}", _not_exercised(unused)
    if s.loss.gradient == s.loss.expected:
        yield f"loss: dL/dlp of the recorded tokens is that of the {terms}", ""


def _words_for_table_step(found: RunChecks) -> str:
    """Say of which step the table of a run is, the last one or that where π_θ is
    farthest from π_old, and describe the step.
    """
    batch = found.exercised
    rest = "the last one"
    if batch.now is not None and batch.old is not None:
        is_moved = not torch.equal(batch.now[batch.mask], batch.old[batch.mask])
        if is_moved:
            rest = "where π_θ is farthest from π_old"
    return f"the table is of one step, {rest}: {summary_line(batch)}"


def _never_exercised(found: RunChecks) -> tuple[str, ...]:
    """Return the hyperparameters that no step whose loss is right exercises; () where
    no loss is right.
    """
    unused_in_steps = []
    for s in found.steps:
        if s.loss is not None and s.loss.found == s.loss.expected:
            unused_in_steps.append(s.loss.unused)
    if not unused_in_steps:
        return ()
    in_first = unused_in_steps[0]
    return tuple(
        name for name in in_first if all(name in unused for unused in unused_in_steps)
    )


def summary_line(batch: RecordedBatch) -> str:
    """Say in one line where the step was read, its size, its columns, and what is
    missing or uncertain.

    Args:
        batch: a recorded step.
    """
    lengths = batch.mask.sum(1)
    lengths = lengths[lengths > 0]
    step = "" if batch.step is None else f", step {batch.step}"
    responses = counted(len(batch.mask), "response")
    parts = [
        f"{batch.file}{step}: {responses}, {batch.tokens:,} trained "
        f"tokens, lengths {int(lengths.min())} to {int(lengths.max())}",
        f"has {', '.join(batch.recorded)}",
    ]
    if batch.now is None and "now" not in batch.dropped:
        parts.append("no now, so r = 1")
    if batch.old is not None and batch.beside_sampler() is batch.now:
        parts.append("old is the sampler's own column, so now is compared with it")
    for name, file in batch.dropped.items():
        parts.append(f"{name} is left out, because {file} lacks it")
    if UNTOLD in batch.meta:
        parts.append(batch.meta[UNTOLD])
    return "; ".join(parts)


def _step_lines(s: StepChecks, unused: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one step: of each check its findings, its sizes and what
    agrees. Checks that failed come first, and a finding on the column old last.

    Args:
        s: the step.
        unused: hyperparameters of which an agreement of its loss says nothing.
    """
    checks: list[tuple[Checked, Iterable[str]]] = []
    if s.zero is not None:
        checks.append((s.zero, _zero_check_lines(s.zero)))
    if s.sampler is not None:
        checks.append((s.sampler, _sampler_lines(s.sampler)))
    if s.advantages is not None:
        checks.append((s.advantages, _advantage_lines(s.advantages)))
    if s.loss is not None:
        checks.append((s.loss, _loss_lines(s.loss, unused)))
    for _, lines in sorted(checks, key=lambda check: not check[0].failures):
        yield from lines
    if s.old is not None:
        yield from _finding_lines("old", (s.old,))


def _zero_check_lines(zero: ZeroMismatch) -> Iterator[str]:
    """Yield the lines of the check of equal bits."""
    yield from _finding_lines("zero", zero.findings)
    yield from _zero_lines(zero)


def _sampler_lines(gap: Gap) -> Iterator[str]:
    """Yield the lines of the sampler's gap."""
    yield from _finding_lines("sampler", gap.findings)
    word = "      sampler"
    if not gap.findings:
        if gap.largest > NO_ROUNDING:
            word = "      sampler: rounding explains the mean, and not the largest"
        else:
            word = "ok    sampler: no more than rounding"
    yield f"{word}; {_gap_numbers(gap)}"


def _advantage_lines(advantages: Advantages) -> Iterator[str]:
    """Yield the findings on the advantages, or that an estimator gives them."""
    yield from _finding_lines("advantages", advantages.findings)
    if advantages.estimator and not advantages.findings:
        also = f" (so do {', '.join(advantages.also)})" if advantages.also else ""
        yield _fold(
            f"ok    advantages: {advantages.estimator} of {advantages.grouping}{also}"
        )


def _loss_lines(loss: LoggedLoss, unused: tuple[str, ...]) -> Iterator[str]:
    """Yield the first findings on the logged loss, and what of it and of dL/dlp agrees.
    dL/dlp may agree where the loss does not.

    Args:
        loss: the check of the loss; `expected` and `gradient` are names of losses.
        unused: hyperparameters of which an agreement says nothing.
    """
    yield from _finding_lines("loss", loss.findings)
    is_right = _is_right(loss)
    if is_right:
        yield _fold(
            f"ok    loss: {loss.logged:.6g} is the {_terms(loss)}{_not_exercised(unused)}"
        )
    if loss.gradient == loss.expected:
        gradient = "dL/dlp of the recorded tokens"
        if is_right:
            sentence = f"so is {gradient}"
        else:
            sentence = f"{gradient} is that of the {_terms(loss)}"
        precise = f"to {loss.gradient_tolerance:.2%}"
        yield _fold(
            f"ok    loss: {sentence}, {precise}, whatever the micro-batches and ranks"
        )


def _is_right(loss: LoggedLoss) -> bool:
    """Return whether the logged number is the objective's, and its terms do not cancel
    to 0.
    """
    says_nothing = any(f.cause == "uninformative" for f in loss.findings)
    return loss.found == loss.expected and not says_nothing


def _zero_lines(zero: ZeroMismatch) -> Iterator[str]:
    """Yield where the tokens are whose numbers differ, or that all are equal."""
    if not zero.differ:
        yield f"ok    zero: {zero.tokens:,} tokens are equal bit by bit"
        return
    tails = ", ".join(f"{share:.2%} beyond {t:g}" for t, share in zero.beyond.items())
    quarters = ", ".join(f"{share:.0%}" for share in zero.quarters)
    yield f"      zero: {tails} nats; differing by quarter of the response: {quarters}"
    if zero.shapes:
        shapes = [
            f"{rows} x {width}: {share:.0%}"
            for (rows, width), share in zero.shapes.items()
        ]
        named = name_first(shapes, MOST_SHAPES)
        yield _fold(f"      zero: differing by shape of the micro-batch: {named}")
    ids = ", ".join(
        f"{number} ({off} of {of})" for number, (off, of) in zero.ids.items()
    )
    yield f"      zero: differing most often: id {ids}"


def _gap_numbers(gap: Gap) -> str:
    """Return the sizes of one step's gap, in one line."""
    return (
        f"{gap.tokens:,} tokens, mean |log ρ| {gap.mean_abs:.3g}, largest {gap.largest:.3g}, "
        f"E[ρ] {gap.rho_mean:.4f} ± {gap.rho_se:.4f}, KL by k3 {gap.k3:.2g}, effective {gap.effective:.0%}"
    )


def _terms(found: LoggedLoss) -> str:
    """Name the sum that a loss was expected to be: "token-mean of dapo's terms"."""
    return f"{found.expected} of {found.objective}'s terms"


def _not_exercised(unused: tuple[str, ...]) -> str:
    """Name the hyperparameters of which an agreement says nothing; "" without any."""
    return f"; not exercised: {', '.join(unused)}" if unused else ""


def _finding_lines(check: str, findings: Iterable[ReplayFinding]) -> Iterator[str]:
    """Yield a line, FAIL or note, for each of the first SHOWN findings of a check; the
    others are left out without a word.
    """
    for f in islice(findings, SHOWN):
        word = "FAIL" if f.severity == "failure" else "note"
        yield _fold(f"{word}  {check}: {f}")


def _table_lines(table: ObjectiveWeights) -> Iterator[str]:
    """Yield the table of objectives: a head, and a row for each. The column cosine is
    there if the objective that ran is known, and shares by turn if turns are recorded.
    """
    has_cosine = any(row.cosine is not None for row in table.rows) and table.ran
    if table.ran in table.skipped:
        yield _fold(f"{table.ran} is left out: {table.skipped[table.ran]}")
    head = f"{'what each would do':22} {'dead A>0':>9} {'dead A<0':>9} {'effective':>10} {'top 1 %':>8} {'longest':>8}"
    if has_cosine:
        head += f" {'cosine':>7}"
    if table.rows and table.rows[0].turns:
        head += "  by turn"
    yield head
    for row in table.rows:
        line = (
            f"{row.name[:22]:22} {row.dead_positive:>9.1%} {row.dead_negative:>9.1%} {row.effective:>10,.0f} "
            f"{row.heaviest:>8.1%} {row.longest:>8.2f}"
        )
        if has_cosine and row.cosine is not None:
            line += f" {row.cosine:>7.3f}"
        if row.turns:
            line += "  " + " ".join(f"{t}:{v:.0%}" for t, v in row.turns.items())
        yield line


def _heavy_lines(heaviest: tuple[HeavyToken, ...], name: str) -> Iterator[str]:
    """Yield the table of the heaviest tokens of an objective: two lines of head, and a
    row for each.
    """
    yield f"heaviest tokens of {name}"
    yield f"{'':22} {'share':>9} {'p_old':>9} {'p_sampler':>10} {'r':>8} {'A':>8}"
    for t in heaviest:
        where = f"response {t.response}, token {t.token}"
        old = _probability(t.old)
        sampler = "" if t.sampler is None else _probability(t.sampler)
        yield (
            f"{where:22} {t.share:>9.2%} {old:>9} {sampler:>10} {t.ratio:>8.3f} {t.advantage:>8.3f}  id {t.id}"
            + (f" {t.text!r}" if t.text else "")
        )


def _probability(p: float) -> str:
    """Return a probability with four decimals, or below 0.001 with two digits."""
    return f"{p:.4f}" if p >= 0.001 or p == 0 else f"{p:.1e}"


def _fold(line: str) -> str:
    """Wrap a line at WIDTH characters, and indent what follows its first line by 6."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 6)
