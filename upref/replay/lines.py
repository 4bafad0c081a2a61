# SPDX-License-Identifier: Apache-2.0
"""The report of a replay as lines of text. What a finding means is in words.py."""

import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from upref.replay.compare import HeavyToken, ObjectiveWeights
from upref.replay.findings import ReplayFinding
from upref.replay.loss import LoggedLoss
from upref.replay.schema import RecordedBatch

if TYPE_CHECKING:
    from upref.replay.report import Replay, StepChecks

SHOWN = 4  # findings of one check that are printed
STEPS_NAMED = 8  # steps with a finding that are named
WIDTH = 118
NO_ROUNDING = 1.0  # nats, of one token: rounding makes no such difference


def report_lines(found: "Replay", verbose: bool) -> Iterator[str]:
    """Yield the lines of a report.

    Args:
        found: the result of a replay.
        verbose: every step, not the last alone.

    Yields:
        Lines.
    """
    shown = found.steps if verbose or len(found.steps) < 3 else found.steps[-1:]
    if len(shown) < len(found.steps):
        yield f"{len(found.steps)} steps, {found.steps[0].step} to {found.steps[-1].step}; the last one:"
    for s in shown:
        yield s.summary
        yield from _step_lines(s, _never_exercised(found, s))
    yield from _lines_of_hidden_steps(found, shown)
    if found.series is not None:
        yield from _finding_lines("run", found.series.findings)
        sizes = [s.size for s in found.series.steps]
        has_findings = found.series.findings or any(
            s.sampler is not None and s.sampler.findings for s in found.steps
        )
        word = "      run" if has_findings else "ok    run"
        yield (
            f"{word}: KL(μ ‖ π_old) by capped k2 {sizes[0]:.2g} at first, {sizes[-1]:.2g} at last, "
            f"at most {max(sizes):.2g}"
        )
        yield _fold(
            "      k3 of a step is the mean of ρ - 1 - log ρ; capped k2 is the mean of (log ρ)²/2 "
            "with |log ρ| at most 1, so that a few tokens do not decide."
        )
    for check, why in found.not_run.items():
        yield _fold(f"not run  {check}: {why}")
    if found.table is not None:
        yield from _table_lines(found.table)
    if found.table is not None and found.heaviest:
        yield from _heavy_lines(found.heaviest, found.table.rows[0].name)


def _lines_of_hidden_steps(
    found: "Replay", shown: "tuple[StepChecks, ...]"
) -> Iterator[str]:
    """One line for each finding of the steps that are not shown, by its cause; failures
    first.
    """
    steps: dict[tuple[str, str, str], list[int]] = {}
    first_findings: dict[tuple[str, str, str], ReplayFinding] = {}
    for s in found.steps:
        for f in s.findings if s not in shown else ():
            steps.setdefault(_kind(f), []).append(s.step)
            first_findings.setdefault(_kind(f), f)
    said = {_kind(f) for s in shown for f in s.findings}
    for kind, numbers in sorted(steps.items()):  # "failure" is before "note"
        first = first_findings[kind]
        word = "FAIL" if first.severity == "failure" else "note"
        sentence = "As at the last step." if kind in said else str(first)
        yield _fold(f"{word}  {first.check}: {sentence} {_list_steps(numbers)}.")


def _kind(f: ReplayFinding) -> tuple[str, str, str]:
    """What findings of several steps have in common where one line names them."""
    return f.severity, f.check, f.cause


def _list_steps(numbers: list[int]) -> str:
    """Name the steps that have a finding; of many, the first ones."""
    named = ", ".join(map(str, numbers[:STEPS_NAMED]))
    more = len(numbers) - STEPS_NAMED
    rest = f" and {more} more" if more > 0 else ""
    word = "step" if len(numbers) == 1 else "steps"
    return f"At {len(numbers)} earlier {word}: {named}{rest}"


def _never_exercised(found: "Replay", shown: "StepChecks") -> tuple[str, ...]:
    """The hyperparameters that a step does not exercise, nor any other step whose loss is
    right.
    """
    if shown.loss is None:
        return ()
    others = [
        s.loss.unused
        for s in found.steps
        if s.loss is not None and s.loss.found == s.loss.expected
    ]
    return tuple(
        name for name in shown.loss.unused if all(name in unused for unused in others)
    )


def summary_line(batch: RecordedBatch) -> str:
    """Say where the step was read, its size, and its columns.

    Args:
        batch: a recorded step.
    """
    lengths = batch.mask.sum(1)
    lengths = lengths[lengths > 0]
    step = "" if batch.step is None else f", step {batch.step}"
    return (
        f"{batch.file}{step}: {len(batch.mask)} responses, {batch.tokens:,} trained tokens, lengths "
        f"{int(lengths.min())} to {int(lengths.max())}; has {', '.join(batch.recorded)}"
        + (
            ""
            if batch.now is not None or "now" in batch.dropped
            else "; no now, so r = 1"
        )
        + (
            "; old is the sampler's own column, so now is compared with it"
            if batch.old is not None and batch.beside_sampler() is batch.now
            else ""
        )
        + "".join(
            f"; {name} is left out, because {file} lacks it"
            for name, file in batch.dropped.items()
        )
    )


def _step_lines(s: "StepChecks", unused: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one step: findings, and of a check without findings its sizes.

    Args:
        s: the step.
        unused: hyperparameters of which an agreement of its loss says nothing.
    """
    gap = s.sampler
    if gap is not None:
        yield from _finding_lines("sampler", gap.findings)
        word = "      sampler"
        if not gap.findings:
            if gap.largest > NO_ROUNDING:
                word = "      sampler: rounding explains the mean, and not the largest"
            else:
                word = "ok    sampler: no more than rounding"
        yield (
            f"{word}; {gap.tokens:,} tokens, mean |log ρ| {gap.mean_abs:.3g}, largest {gap.largest:.3g}, "
            f"E[ρ] {gap.rho_mean:.4f} ± {gap.rho_se:.4f}, KL by k3 {gap.k3:.2g}, effective {gap.effective:.0%}"
        )
    advantages = s.advantages
    if advantages is not None:
        yield from _finding_lines("advantages", advantages.findings)
        if advantages.estimator and not advantages.findings:
            also = f" (so do {', '.join(advantages.also)})" if advantages.also else ""
            yield _fold(
                f"ok    advantages: {advantages.estimator} of {advantages.grouping}{also}"
            )
    if s.loss is not None:
        yield from _finding_lines("loss", s.loss.findings)
        if s.loss.found == s.loss.expected:
            yield _fold(
                f"ok    loss: {s.loss.logged:.6g} is the {_terms(s.loss)}{_not_exercised(unused)}"
            )
        if s.loss.gradient == s.loss.expected:
            gradient = "dL/dlp of the recorded tokens"
            if s.loss.found == s.loss.expected:
                sentence = f"so is {gradient}"
            else:
                sentence = f"{gradient} is that of the {_terms(s.loss)}"
            precise = f"to {s.loss.gradient_tolerance:.2%}"
            yield _fold(
                f"ok    loss: {sentence}, {precise}, whatever the micro-batches and ranks"
            )
    if s.old is not None:
        yield from _finding_lines("old", (s.old,))


def _terms(found: LoggedLoss) -> str:
    """Name the sum that a loss was expected to be."""
    return f"{found.expected} of {found.objective}'s terms"


def _not_exercised(unused: tuple[str, ...]) -> str:
    """Name the hyperparameters of which an agreement says nothing; "" without any."""
    return f"; not exercised: {', '.join(unused)}" if unused else ""


def _finding_lines(check: str, findings: Iterable[ReplayFinding]) -> Iterator[str]:
    """Yield a line for each of the first SHOWN findings of a check."""
    for number, f in enumerate(findings):
        if number < SHOWN:
            yield _fold(
                f"{'FAIL' if f.severity == 'failure' else 'note'}  {check}: {f}"
            )


def _table_lines(table: ObjectiveWeights) -> Iterator[str]:
    """Yield the table of objectives; the column cosine needs the objective that ran."""
    has_cosine = any(row.cosine is not None for row in table.rows) and table.ran
    if table.ran in table.skipped:
        yield _fold(f"{table.ran} is left out: {table.skipped[table.ran]}")
    yield (
        f"{'what each would do':22} {'dead A>0':>9} {'dead A<0':>9} {'effective':>10} {'top 1 %':>8} {'longest':>8}"
        + (f" {'cosine':>7}" if has_cosine else "")
        + ("  by turn" if table.rows and table.rows[0].turns else "")
    )
    for row in table.rows:
        turns = " ".join(f"{t}:{v:.0%}" for t, v in row.turns.items())
        yield (
            f"{row.name[:22]:22} {row.dead_positive:>9.1%} {row.dead_negative:>9.1%} {row.effective:>10,.0f} "
            f"{row.heaviest:>8.1%} {row.longest:>8.2f}"
            + (f" {row.cosine:>7.3f}" if has_cosine and row.cosine is not None else "")
            + (f"  {turns}" if turns else "")
        )


def _heavy_lines(heaviest: tuple[HeavyToken, ...], name: str) -> Iterator[str]:
    """Yield the table of the heaviest tokens of an objective."""
    yield f"heaviest tokens of {name}"
    yield f"{'':22} {'share':>9} {'p_old':>9} {'p_sampler':>10} {'r':>8} {'A':>8}"
    for t in heaviest:
        where = f"response {t.response}, token {t.token}"
        sampler = "" if t.sampler is None else f"{t.sampler:.4f}"
        yield (
            f"{where:22} {t.share:>9.2%} {t.old:>9.4f} {sampler:>10} {t.ratio:>8.3f} {t.advantage:>8.3f}  id {t.id}"
            + (f" {t.text!r}" if t.text else "")
        )


def _fold(line: str) -> str:
    """Wrap a line; the lines that follow are indented under its text."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 6)
