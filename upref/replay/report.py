# SPDX-License-Identifier: Apache-2.0
"""The replay of a run: every check that its columns allow, as one result whose text fits on a screen."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from upref.definition import Objective
from upref.errors import InputError
from upref.registry import get
from upref.replay.advantages import Advantages, advantages
from upref.replay.compare import HeavyToken, Weights, heaviest_tokens, weights
from upref.replay.findings import Checked, Finding, plain
from upref.replay.gap import Gap, gap
from upref.replay.loss import Loss, loss
from upref.replay.schema import RecordedBatch
from upref.replay.series import Series, StepGap, measure_step, ratio_one, series
from upref.result import Result

CHECKS = ("sampler", "advantages", "loss", "objectives")
OTHERS = ("dapo", "up_dapo", "grpo", "gspo", "cispo")
CORRECTIONS = ("tis", "icepop", "mis")
SHOWN = 4  # findings of one check that are printed
WIDTH = 118


@dataclass(frozen=True)
class StepChecks:
    """What was found in one step."""

    step: int
    summary: str
    sampler: Gap | None
    advantages: Advantages | None
    loss: Loss | None
    old: Finding | None
    not_run: dict[str, str]

    @property
    def findings(self) -> list[Finding]:
        """Of all its checks."""
        checks = [c for c in (self.sampler, self.advantages, self.loss) if c is not None]
        return [f for c in checks for f in c.findings] + ([self.old] if self.old else [])


@dataclass(frozen=True)
class Replay(Result):
    """What a run's recorded batches say. bool() is False where a check failed.

    Args:
        objective: name of the objective that ran; "" if it was not given.
        steps: the checks of each step.
        series: the gap over the steps; None for fewer than two.
        table: objectives on the tokens of the last step; None if they cannot be computed.
        heaviest: the tokens of the last step with the largest weights under the first row of the table.
    """

    objective: str
    steps: tuple[StepChecks, ...]
    series: Series | None
    table: Weights | None
    heaviest: tuple[HeavyToken, ...]

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def status(self) -> int:
        """Exit status: 0 nothing found, 1 a failure, 2 no failure, but a check could not run."""
        return 1 if self.failures else 2 if self.not_run else 0

    @property
    def findings(self) -> list[tuple[int | None, Finding]]:
        """(step, finding); step None: of the series."""
        out: list[tuple[int | None, Finding]] = [(s.step, f) for s in self.steps for f in s.findings]
        return out + [(None, f) for f in (self.series.findings if self.series is not None else ())]

    @property
    def failures(self) -> list[Finding]:
        return [f for _, f in self.findings if f.severity == "failure"]

    @property
    def notes(self) -> list[Finding]:
        return [f for _, f in self.findings if f.severity == "note"]

    @property
    def not_run(self) -> dict[str, str]:
        """Check -> the column that is missing and how it is recorded."""
        return {check: why for s in self.steps for check, why in s.not_run.items()}

    def json(self) -> str:
        steps = [
            {
                "step": s.step, "summary": s.summary, "not_run": s.not_run,
                "sampler": _data(s.sampler), "advantages": _data(s.advantages), "loss": _data(s.loss),
                "findings": [asdict(f) | {"text": str(f)} for f in s.findings],
            } for s in self.steps
        ]  # fmt: skip
        whole = {
            "ok": bool(self), "status": self.status, "objective": self.objective, "steps": steps,
            "series": _data(self.series),
            "table": _data(self.table),
            "heaviest": [asdict(t) for t in self.heaviest],
        }  # fmt: skip
        return json.dumps(plain(whole), indent=1, ensure_ascii=False)

    def text(self, verbose: bool = False) -> str:
        """The report. verbose: every step and every finding."""
        return "\n".join(self._lines(verbose))

    def __str__(self) -> str:
        return self.text()

    def _lines(self, verbose: bool) -> Iterator[str]:
        shown = self.steps if verbose or len(self.steps) < 3 else self.steps[-1:]
        if len(shown) < len(self.steps):
            yield f"{len(self.steps)} steps, {self.steps[0].step} to {self.steps[-1].step}; the last one:"
        for s in shown:
            yield s.summary
            yield from _step_lines(s)
        yield from self._earlier(shown)
        if self.series is not None:
            yield from _finding_lines("run", self.series.findings)
            k3 = [s.k3 for s in self.series.steps]
            word = "      run" if self.series.findings else "ok    run"
            yield f"{word}: KL(μ ‖ π_old) {k3[0]:.2g} at first, {k3[-1]:.2g} at last, at most {max(k3):.2g}"
        for check, why in self.not_run.items():
            yield _fold(f"not run  {check}: {why}")
        if self.table is not None:
            yield from _table_lines(self.table)
        if self.heaviest:
            yield from _heavy_lines(self.heaviest)

    def _earlier(self, shown: tuple[StepChecks, ...]) -> Iterator[str]:
        """One line for each cause of a failure in the steps that are not shown."""
        steps: dict[tuple[str, str], list[int]] = {}
        texts: dict[tuple[str, str], Finding] = {}
        for s in self.steps:
            for f in s.findings:
                if s not in shown and f.severity == "failure":
                    steps.setdefault((f.check, f.cause), []).append(s.step)
                    texts.setdefault((f.check, f.cause), f)
        for key, at in steps.items():
            yield _fold(f"FAIL  {key[0]}: {texts[key]} At {len(at)} earlier steps, first at {at[0]}.")


def replay(
    batches: Iterable[RecordedBatch], objective: str | Objective = "", *, hp: Mapping[str, Any] | None = None,
    logged: float | None = None, digits: float = 0.0, only: Iterable[str] = CHECKS, others: Iterable[str] = (),
    tokenizer: Any = None,
) -> Replay:  # fmt: skip
    """Check the recorded batches of a run, one step in memory at a time.

    Args:
        batches: steps in order, for example from `upref.replay.read_steps`.
        objective: the objective that ran.
        hp: its hyperparameters.
        logged: the loss that the run logged; for a single step.
        digits: half a unit of its last printed digit.
        only: which of CHECKS to run.
        others: objectives to compare with, in place of the usual ones.
        tokenizer: of transformers, for the texts of the heaviest tokens.

    Returns:
        The Replay.

    Raises:
        InputError: a file cannot be read, or the objective or a hyperparameter does not exist.
    """
    chosen = tuple(only)
    if unknown := [check for check in chosen if check not in CHECKS]:
        raise InputError(f"there is no check {unknown[0]!r}: choose from {', '.join(CHECKS)}.")
    settings = dict(hp or {})
    o = _objective(objective)
    if o is not None:
        o.resolve(settings)
    compared = [get(name) for name in others]
    steps: list[StepChecks] = []
    gaps: list[StepGap] = []
    last: RecordedBatch | None = None
    for position, batch in enumerate(batches):
        checks = _check(batch, position, o, settings, logged, digits, chosen)
        steps.append(checks)
        if checks.sampler is not None:
            gaps.append(measure_step(batch, checks.sampler, position))
        last = batch
    if last is None:
        raise InputError("there is no recorded batch: give at least one file.")
    if logged is not None and len(steps) > 1:
        raise InputError("one number is the loss of one step: give the files of that step alone.")
    table, heaviest = _table(last, o, settings, chosen, compared, tokenizer)
    whole = series(gaps) if len(gaps) > 1 else None
    return Replay(o.name if o else "", tuple(steps), whole, table, heaviest)


def _objective(objective: str | Objective) -> Objective | None:
    if not objective:
        return None
    return get(objective) if isinstance(objective, str) else objective


def _check(
    batch: RecordedBatch, position: int, o: Objective | None, hp: dict[str, Any], logged: float | None, digits: float,
    chosen: tuple[str, ...],
) -> StepChecks:  # fmt: skip
    done: dict[str, Any] = dict.fromkeys(CHECKS)
    not_run: dict[str, str] = {}
    wanted = [c for c in chosen if c in ("sampler", "advantages")]
    if "loss" in chosen and (logged is not None or (o is not None and "loss" in batch.logged)):
        if o is None:
            raise InputError("the check of the loss needs the objective that ran: --as NAME.")
        wanted.append("loss")
    work = {
        "sampler": lambda: gap(batch),
        "advantages": lambda: advantages(batch),
        "loss": lambda: loss(batch, o or "", logged, digits=digits, **hp),
    }
    for check in wanted:
        try:
            done[check] = work[check]()
        except InputError as e:
            not_run[check] = str(e)
    if "objectives" in chosen:
        try:
            batch.rollouts()
        except InputError as e:
            not_run["objectives"] = str(e)
    step = batch.step if batch.step is not None else position
    return StepChecks(
        step, _summary(batch), done["sampler"], done["advantages"], done["loss"], ratio_one(batch), not_run
    )


def _table(
    batch: RecordedBatch, o: Objective | None, hp: dict[str, Any], chosen: tuple[str, ...], others: list[Objective],
    tokenizer: Any,
) -> tuple[Weights | None, tuple[HeavyToken, ...]]:  # fmt: skip
    """The objectives on the last step, and its heaviest tokens; nothing where a column is missing."""
    if "objectives" not in chosen:
        return None, ()
    names = [other.name for other in others]
    if not names:
        base = o if o is not None and o.sampler is None else None
        names = [*OTHERS, *(f"up({base.name})" for base in [base] if base is not None and base.name not in ("dapo",))]
        if batch.sampler is not None and not batch.sampler.isnan().any():
            names += [f"{c}({base.name if base else 'dapo'})" for c in CORRECTIONS]
    try:
        table = weights(batch, names, ran=o or "", **hp)
    except InputError:
        return None, ()  # `not_run` says why
    return table, tuple(heaviest_tokens(batch, table.rows[0], tokenizer=tokenizer)) if table.rows else ()


def _data(checked: Checked | None) -> dict[str, Any] | None:
    return None if checked is None else checked.data()


# ---- lines -----------------------------------------------------------------------------------------------------------
def _summary(batch: RecordedBatch) -> str:
    lengths = batch.mask.sum(1)
    lengths = lengths[lengths > 0]
    step = "" if batch.step is None else f", step {batch.step}"
    return (
        f"{batch.file}{step}: {len(batch.mask)} responses, {batch.tokens:,} trained tokens, lengths "
        f"{int(lengths.min())} to {int(lengths.max())}; has {', '.join(batch.recorded)}"
    )


def _step_lines(s: StepChecks) -> Iterator[str]:
    g = s.sampler
    if g is not None:
        yield from _finding_lines("sampler", g.findings)
        word = "ok    sampler: rounding only" if not g.findings else "      sampler"
        yield (
            f"{word}; {g.tokens:,} tokens, mean |log ρ| {g.mean_abs:.3g}, largest {g.largest:.3g}, "
            f"E[ρ] {g.rho_mean:.4f} ± {g.rho_se:.4f}, KL {g.k3:.2g}, effective {g.effective:.0%}"
        )
    a = s.advantages
    if a is not None:
        yield from _finding_lines("advantages", a.findings)
        if a.estimator and not a.findings:
            also = f" (so do {', '.join(a.also)})" if a.also else ""
            yield _fold(f"ok    advantages: {a.estimator} of {a.grouping}{also}")
    if s.loss is not None:
        yield from _finding_lines("loss", s.loss.findings)
        if s.loss.found == s.loss.expected:
            yield f"ok    loss: {s.loss.logged:.6g} is the {s.loss.expected} of {s.loss.objective}'s terms"
    if s.old is not None:
        yield from _finding_lines("old", (s.old,))


def _finding_lines(check: str, findings: Iterable[Finding]) -> Iterator[str]:
    for number, f in enumerate(findings):
        if number < SHOWN:
            yield _fold(f"{'FAIL' if f.severity == 'failure' else 'note'}  {check}: {f}")


def _table_lines(table: Weights) -> Iterator[str]:
    ran = any(row.cosine is not None for row in table.rows) and table.ran
    yield (
        f"{'what each would do':22} {'dead A>0':>9} {'dead A<0':>9} {'effective':>10} {'top 1 %':>8} {'longest':>8}"
        + (f" {'cosine':>7}" if ran else "")
        + ("  by turn" if table.rows and table.rows[0].turns else "")
    )
    for row in table.rows:
        turns = " ".join(f"{t}:{v:.0%}" for t, v in row.turns.items())
        yield (
            f"{row.name[:22]:22} {row.dead_positive:>9.1%} {row.dead_negative:>9.1%} {row.effective:>10,.0f} "
            f"{row.heaviest:>8.1%} {row.longest:>8.2f}"
            + (f" {row.cosine:>7.3f}" if ran and row.cosine is not None else "")
            + (f"  {turns}" if turns else "")
        )


def _heavy_lines(heaviest: tuple[HeavyToken, ...]) -> Iterator[str]:
    yield f"{'heaviest tokens':22} {'share':>9} {'p_old':>9} {'p_sampler':>10} {'r':>8} {'A':>8}"
    for t in heaviest:
        where = f"response {t.response}, token {t.token}"
        sampler = "" if t.sampler is None else f"{t.sampler:.4f}"
        yield (
            f"{where:22} {t.share:>9.2%} {t.old:>9.4f} {sampler:>10} {t.ratio:>8.3f} {t.advantage:>8.3f}  id {t.id}"
            + (f" {t.text!r}" if t.text else "")
        )


def _fold(line: str) -> str:
    """Wrapped, with the rest under the text of the first line."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * 6)
