# SPDX-License-Identifier: Apache-2.0
"""The statements about a run's logged scalars, each with its arithmetic.

A *scalar* is a quantity of `upref.logs.names.SCALARS`, and a *column* holds it in the
log under the framework's name. Each function of LAWS yields the statements that one law
allows, and nothing where the log lacks a scalar that it needs, or no step contradicts
it.

A `failure` is a contradiction: numbers that cannot all be true. A `note` is a reading
that the numbers support and another setting could explain too; it says so. A `fact`
follows from the numbers and accuses nobody.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from upref.errors import InputError
from upref.logs.digits import Numbers
from upref.logs.names import ORDERED, SCALARS, bare, family, recognize
from upref.logs.read import Run, Steps
from upref.result import Result, name_first

Severity = Literal["failure", "note", "fact"]
SINGLE = 1e-5  # relative error of a mean that float32 computes of many tokens
ROUNDED_KL = 1e-6  # how far float32 rounds a KL of 0 by k3 below 0
HALF_KL = 2.0**-8  # the same in bfloat16, of one token
UNDERFLOW = 103.0  # exp(-x) is 0 in float32 from this x on
# nats: ln of the largest vocabulary in use, about 262,000 tokens, is 12.5
MOST_ENTROPY = 20.0
STEPS_NAMED = 8
WIDTH = 118  # of a line of the report
PROPORTIONAL = 0.02  # relative spread of a ratio that is taken as constant
FOLLOWS = 0.3  # of the spread of changes, that is left of those that follow others
VARIED = 0.03  # relative spread of a number that varies
# scalars of any sign that a law relates to another one
RELATED = (
    "pg_loss",
    "kl_loss",
    "kl",
    "kl_old",
    "sampler_k1",
    "ref_log_ratio",
    "log_probs",
    "ref_log_probs",
)
BY_K3 = ("kl_k3", "sampler_k3", "gap_js")
OF_CLAMP = ("ratio_min", "ratio_max", "clamped_min", "clamped_max")
ONE_TOKEN = 1e-6  # about the share of one token of a step
ONE_RESPONSE = 1e-4  # the same of one response
ONE_PROMPT = 1e-3  # the same of one prompt
PERCENT = 100.0
OFTEN = 0.25  # share of the steps from which on a fact is worth a note
NEGATED_ENTROPY = "entropy_loss"  # some trainers log minus the entropy under this name
UNLESS_ROUNDED = ", unless {} is rounded"
FEWEST = 4  # steps from which a relation of two columns is read off


@dataclass(frozen=True)
class Statement:
    """One thing that the logged numbers say.

    Args:
        severity: "failure", "note" or "fact".
        name: which law it is.
        text: the statement, with its numbers.
        steps: at which it holds.
        columns: of the log, that it rests on.
    """

    severity: Severity
    name: str
    text: str
    steps: tuple[float, ...]
    columns: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class LogReport(Result):
    """What the scalars of one run say. bool() is False where they contradict each
    other.

    Args:
        run: name of the run, where the file has several.
        file: where it was read.
        steps: how many.
        recognized: scalar of `upref.logs.names.SCALARS` -> column.
        columns: how many columns the log has.
        statements: contradictions first, then notes, then facts.
        rows: how many; more than steps where a step has several.
    """

    run: str
    file: str
    steps: int
    first: float
    last: float
    recognized: dict[str, str]
    columns: int
    statements: tuple[Statement, ...] = field(default=())
    rows: int = 0

    def __bool__(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Statement]:
        return [s for s in self.statements if s.severity == "failure"]

    @property
    def notes(self) -> list[Statement]:
        return [s for s in self.statements if s.severity == "note"]

    @property
    def facts(self) -> list[Statement]:
        """What follows from the numbers and accuses nobody."""
        return [s for s in self.statements if s.severity == "fact"]

    def data(self) -> dict[str, Any]:
        """Return the report as numbers and sentences: what `upref logs --json` prints
        for each run.
        """
        return {"ok": bool(self)} | asdict(self)

    def text(self, verbose: bool = False) -> str:
        """Return the report in words.

        Args:
            verbose: also which column was read as which scalar.

        Returns:
            Lines: what was read, that nothing contradicts where no failure and no note
            is there, then one for each statement.
        """
        span = f", {self.first:g} to {self.last:g}" if self.steps > 1 else ""
        name = f"{self.file}, {self.run}" if self.run else self.file
        noun = "logged step" if self.steps == 1 else "logged steps"
        rows = f", in {self.rows} rows" if self.rows > self.steps else ""
        lines = [
            f"{name}: {self.steps} {noun}{span}{rows}; {len(self.recognized)} of {self.columns} columns are known scalars"
        ]
        if verbose:
            lines += [
                f"      {column} is {SCALARS[key].words}"
                for key, column in self.recognized.items()
            ]
        if not self.failures and not self.notes:
            lines.append("ok    no contradiction among them")
        heads = {"failure": "FAIL", "note": "note", "fact": "    "}
        for s in self.statements:
            line = f"{heads[s.severity]}  {s.name}: {s.text}"
            lines.append(textwrap.fill(line, WIDTH, subsequent_indent=" " * 6))
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Known:
    """The known scalars of a run, by their keys of SCALARS."""

    run: Run
    column: dict[str, str]  # scalar -> column
    given: frozenset[str] = frozenset()  # scalars whose column the user named

    def has(self, *keys: str) -> bool:
        """Return whether the log has all of these scalars."""
        return all(key in self.column for key in keys)

    def are_of_one_family(self, *keys: str) -> bool:
        """Return whether the log has all of these scalars, in columns of one family:
        `reward` and `critic/score/max` may be two quantities. A column that the user
        named is of every family.
        """
        if not self.has(*keys):
            return False
        families = {family(self.column[key]) for key in keys if key not in self.given}
        return len(families) <= 1

    def lone(self) -> bool:
        """Return whether no law applies: one scalar that may be any number, or several
        of which no two are related.
        """
        related = sum(key in RELATED for key in self.column)
        has_sign = self.has("kl_loss") or self.has("kl")
        are_unbounded = all(SCALARS[key].kind == "any" for key in self.column)
        are_ordered = self.has(*OF_CLAMP)
        for group in ORDERED:
            for pair in pairwise(filter(self.has, group)):
                are_ordered = are_ordered or self.are_of_one_family(*pair)
        return related < 2 and not has_sign and are_unbounded and not are_ordered

    def is_negated(self, key: str) -> bool:
        """Return whether an entropy is logged as a loss, with the other sign."""
        if bare(self.column[key]) != NEGATED_ENTROPY:
            return False
        x = self.values(key)
        return bool((x[np.isfinite(x)] <= 0).all())

    def values(self, key: str) -> Numbers:
        """Return the numbers of a scalar, one for each row, [N]; NaN where a row has
        none.
        """
        return self.run.columns[self.column[key]]

    def error(self, key: str) -> Numbers:
        """Return how far each number of a scalar may be from what was computed, [N]:
        half its own last digit, and the rounding of float32.
        """
        column = self.column[key]
        error: Numbers = self.run.half_digit[column] + SINGLE * np.abs(self.values(key))
        return error

    def errors(self, keys: Sequence[str]) -> Numbers:
        """Return the sum of the errors of several scalars, [N]."""
        total: Numbers = np.sum([self.error(key) for key in keys], axis=0)
        return total

    def shows(self, keys: Sequence[str], digit: float) -> Steps:
        """Return whether the columns of all these scalars show so small a difference as
        `digit`, [N]: then a 0 or a 1 is no rounded number.
        """
        halves = [self.run.shown[self.column[key]] for key in keys]
        shows: Steps = np.max(halves, axis=0) < digit
        return shows

    def may_show(self, keys: Sequence[str], digit: float) -> Steps:
        """Return whether the columns of all these scalars may show so small a
        difference, as nothing in them hints at coarser digits, and another number of
        that row is not rounded, [N].
        """
        hinted = [self.run.hinted[self.column[key]] for key in keys]
        may_be = [(half < digit) | np.isinf(half) for half in hinted]
        may_show: Steps = np.all(may_be, axis=0) & self.run.unrounded
        return may_show

    def state(
        self,
        severity: Severity,
        name: str,
        where: Steps,
        keys: Sequence[str],
        text: str,
        **numbers: Numbers | float | str,
    ) -> list[Statement]:
        """State what holds at some steps.

        Args:
            severity: of Statement.
            name: of the law.
            where: [N], True at the steps where it holds.
            keys: the scalars on which it rests.
            text: the statement; {0} is the column of the first scalar, {step} the first
                step, {steps} words for all of them, and {name} a number of that step.
                " ({steps})" is left out where there is one step.
            **numbers: for the text: [N], or one for all steps.

        Returns:
            A list of the statement; [] where it holds at no step.
        """
        if not where.any():
            return []
        first = int(np.argmax(where))
        columns = tuple(self.column[key] for key in keys)
        of_first: dict[str, Any] = {}
        for key, number in numbers.items():
            if isinstance(number, np.ndarray):
                of_first[key] = number[first]
            else:
                of_first[key] = number
        steps = self.run.steps
        if (
            len({s for s, w in zip(steps, where, strict=True) if w}) == 1
        ):  # the text names it as {step}
            text = text.replace(" ({steps})", "")
        sentence = text.format(
            *columns,
            step=f"{steps[first]:g}",
            steps=name_steps(steps, where),
            **of_first,
        )
        at = tuple(dict.fromkeys(s for s, w in zip(steps, where, strict=True) if w))
        return [Statement(severity, name, sentence, at, columns)]


def audit(run: Run, names: dict[str, str] | None = None) -> LogReport:
    """Compare the scalars of a run with each other.

    Args:
        run: of `read`.
        names: scalar -> column, where the run's names are its own.

    Returns:
        The report.

    Raises:
        InputError: the log has no known scalar, or `names` is wrong.
    """
    found = recognize(run.columns, names or {})
    if not found:
        first = ", ".join(list(run.columns)[:8])
        raise InputError(
            f"{run.file} has no scalar that upref logs knows: its columns are {first}, .... Name them, for example "
            "--map kl_loss=COLUMN --map entropy=COLUMN."
        )
    known = Known(run, found, frozenset(names or {}))
    if known.lone():
        raise InputError(
            f"{run.file}: of its columns upref logs knows {', '.join(found.values())}, and no law relates them: export "
            "more scalars, or name columns with --map SCALAR=COLUMN."
        )
    statements = [s for law in LAWS for s in law(known)]
    order = {"failure": 0, "note": 1, "fact": 2}
    statements.sort(key=lambda s: order[s.severity])
    steps = run.steps
    return LogReport(
        run.name,
        run.file,
        len(steps) - run.further,
        min(steps, default=math.nan),
        max(steps, default=math.nan),
        found,
        len(run.columns),
        tuple(statements),
        len(steps),
    )


def name_steps(steps: Sequence[float], where: Steps) -> str:
    """Say at which steps: "at step 3", "at all 9 steps", or how many and the first
    ones.

    Args:
        steps: of the run, [N].
        where: [N], True at those that are meant.
    """
    at = list(dict.fromkeys(s for s, w in zip(steps, where, strict=True) if w))
    count = len(set(steps))
    if len(at) == 1:
        return f"at step {at[0]:g}"
    if len(at) == count:
        return f"at all {count} steps"
    listed = name_first([f"{s:g}" for s in at], STEPS_NAMED)
    return f"at {len(at)} of {count} steps: {listed}"


# ---- each number by itself -----------------------------------------------------------
def possible_numbers(known: Known) -> Iterator[Statement]:
    """Yield a failure where a share is outside [0, 1], or a length, a deviation or a
    norm is below its least value; a note where a share may be in percent.
    """
    for key in known.column:
        kind = SCALARS[key].kind
        x = known.values(key)
        error = known.error(key)
        if kind == "any" or key in BY_K3:  # `negative_k3` judges these
            continue
        if known.is_negated(key):
            continue
        least = 1.0 if kind == "at least 1" else 0.0
        below = x < least - error - 1e-6
        above = np.zeros(len(x), dtype=bool)
        if kind == "share":
            above = _above_one(known, key)
        may_be_percent = above.any() and not below.any() and not (x > PERCENT).any()
        is_usual = above.sum() >= np.isfinite(x).sum() / 2
        yield from known.state(
            "note" if may_be_percent and is_usual else "failure",
            "range",
            below | above,
            [key],
            "{0} is {x:.6g} at step {step}, and {words} is {kind}{percent} ({steps}).",
            x=x,
            words=SCALARS[key].words,
            kind="in [0, 1]" if kind == "share" else kind,
            percent=", unless the column is in percent" if may_be_percent else "",
        )


def _above_one(known: Known, key: str) -> Steps:
    """Return where a share is above 1, as one in percent may be, [N]."""
    above: Steps = known.values(key) > 1 + known.error(key) + 1e-6
    return above


def negative_k3(known: Known) -> Iterator[Statement]:
    """Yield a failure where a KL by k3 is below 0, or a note where rounding in half
    precision may be the cause: exp(x) - 1 - x is at least 0 for every x, so its mean
    is.
    """
    for key in BY_K3:
        if not known.has(key):
            continue
        x = known.values(key)
        below = x < -ROUNDED_KL - known.error(key)
        is_small = bool((x[below] > -HALF_KL).all())
        cause = " or was computed in half precision, whose rounding is as large"
        yield from known.state(
            "note" if is_small else "failure",
            "negative KL",
            below,
            [key],
            "{0} is {x:.4g} at step {step} ({steps}): by k3, exp(x) - 1 - x, it is at least 0 for each token. So it is "
            "the mean of a signed log-ratio (k1){cause}.",
            x=x,
            cause=cause if is_small else ", or another number",
        )


def not_numbers(known: Known) -> Iterator[Statement]:
    """Yield a note where the loss or the norm of the gradient is NaN or infinite."""
    for key in ("loss", "pg_loss", "grad_norm"):
        if not known.has(key):
            continue
        steps = known.run.not_finite.get(known.column[key], ())
        yield from known.state(
            "note",
            "not a number",
            np.isin(known.run.steps, steps),
            [key],
            "{0} is NaN or infinite {steps}.",
        )


def one_run(known: Known) -> Iterator[Statement]:
    """Yield a note that a step has two numbers in a column, and one that the tokens
    since the start fall.
    """
    # an evaluation of the same step repeats times and the like, which are no scalars here
    repeated = {
        step
        for column in known.column.values()
        for step in known.run.repeated.get(column, ())
    }
    yield from known.state(
        "note",
        "rows of a step",
        np.isin(known.run.steps, sorted(repeated)),
        [],
        "a column has two different numbers for one step {steps}. The rows may be of mini-batches, epochs, phases or an "
        "evaluation, of two runs in one file, or of one that was resumed. Each row is judged by itself.",
    )
    if known.has("tokens_seen"):
        x = known.values("tokens_seen")
        there = np.flatnonzero(np.isfinite(x))
        falls = np.zeros(len(x), bool)
        falls[there[1:][np.diff(x[there]) < 0]] = True
        yield from known.state(
            "note",
            "two runs",
            falls,
            ["tokens_seen"],
            "{0} counts the tokens since the start and falls {steps}: two runs in one file, or a restart without the "
            "trainer's state.",
        )


# ---- several numbers of one quantity -------------------------------------------------
def in_order(known: Known) -> Iterator[Statement]:
    """Yield a failure where the smallest number is above the mean, or the mean above
    the largest: of each pair of neighbors in a row of ORDERED that the log has.
    """
    for group in ORDERED:
        there = [k for k in group if known.has(k) and not known.is_negated(k)]
        if len(there) == 3 and not known.are_of_one_family(*there):
            there = [there[0], there[2]]  # the mean may be of another quantity
        for low, high in pairwise(there):
            if not known.are_of_one_family(low, high):
                continue
            x, y = known.values(low), known.values(high)
            yield from known.state(
                "failure",
                "order",
                x > y + known.errors([low, high]),
                [low, high],
                "{0} is {x:.6g} and {1} is {y:.6g} at step {step}: {low} is at most {high} ({steps}).",
                x=x,
                y=y,
                low=SCALARS[low].words,
                high=SCALARS[high].words,
            )


def spread_of_rewards(known: Known) -> Iterator[Statement]:
    """Yield a failure where the standard deviation of the rewards is above 0.7072 of
    their range, which it is at most (n = 2, divided by n - 1).
    """
    keys = ("reward_std", "reward_min", "reward_max")
    if known.are_of_one_family(*keys):
        std, low, high = map(known.values, keys)
        yield from known.state(
            "failure",
            "spread",
            std > (high - low) / math.sqrt(2) + known.errors(keys),
            keys,
            "{0} is {std:.6g} at step {step}, where the rewards lie in [{low:.6g}, {high:.6g}]: a standard deviation is "
            "at most 0.7072 times the range ({steps}).",
            std=std,
            low=low,
            high=high,
        )


def none_was_cut(known: Known) -> Iterator[Statement]:
    """Yield a failure where no response was cut off, and the lengths of the responses
    that ended are not those of all responses.
    """
    if not known.has("truncated"):
        return
    whole = (known.values("truncated") == 0) & known.shows(["truncated"], ONE_RESPONSE)
    for end in ("mean", "min", "max"):
        keys = ("truncated", f"ended_{end}", f"length_{end}")
        if known.are_of_one_family(*keys):
            x, y = known.values(keys[1]), known.values(keys[2])
            yield from known.state(
                "failure",
                "lengths",
                whole & (np.abs(x - y) > known.errors(keys[1:])),
                keys,
                "{0} is 0 at step {step}, so all responses ended, but {1} is {x:.6g} and {2} is {y:.6g} ({steps}).",
                x=x,
                y=y,
            )


# ---- clipping ------------------------------------------------------------------------
def shares_of_clipped(known: Known) -> Iterator[Statement]:
    """Yield a failure where the shares of tokens clipped below and above do not add up
    to that of clipped tokens: no token is clipped on both sides at once.
    """
    keys = ("clip_low", "clip_high", "clip_fraction")
    if known.are_of_one_family(*keys):
        low, high, both = map(known.values, keys)
        yield from known.state(
            "failure",
            "clipped shares",
            np.abs(low + high - both) > known.errors(keys),
            keys,
            "{0} {low:.6g} + {1} {high:.6g} = {total:.6g}, and {2} is {both:.6g} at step {step} ({steps}).",
            low=low,
            high=high,
            total=low + high,
            both=both,
        )


def clipped_at_one(known: Known) -> Iterator[Statement]:
    """Yield a failure where tokens are clipped although all ratios are 1, which is
    inside every clip range; a note where only the mean of log r shows that they are.
    """
    if not known.has("clip_fraction"):
        return
    share = known.values("clip_fraction")
    is_clipped = share > known.error("clip_fraction")
    extremes = ("ratio_min", "ratio_max")
    if known.has(*extremes) and known.shows(extremes, 1e-5).any():
        distances = np.stack([np.abs(known.values(key) - 1) for key in extremes])
        are_one = (distances < 1e-6).all(0) & known.shows(extremes, 1e-5)
        yield from known.state(
            "failure",
            "clip",
            is_clipped & are_one,
            ("clip_fraction", *extremes),
            "{0} is {share:.4g}, and {1} and {2} are 1 at step {step}: a ratio of 1 is never clipped ({steps}).",
            share=share,
        )
    elif known.has("kl_old"):
        is_zero = (known.values("kl_old") == 0) & known.shows(["kl_old"], 1e-9)
        yield from known.state(
            "note",
            "clip",
            is_clipped & is_zero,
            ["clip_fraction", "kl_old"],
            "{0} is {share:.4g}, and {1}, the mean of log π_old - log π_θ, is exactly 0 at step {step}: with ratios "
            "other than 1 a mean is 0 by chance alone, and a ratio of 1 is never clipped. The two may be of different "
            "updates ({steps}).",
            share=share,
        )


def never_clipped(known: Known) -> Iterator[Statement]:
    """Yield the fact that no token was clipped, where the share is 0 at all steps, of
    which there are FEWEST at least.
    """
    keys = ["clip_fraction"]
    if not known.has(*keys):
        return
    x = known.values(keys[0])
    there = np.isfinite(x)
    if there.sum() < FEWEST or (x[there] != 0).any():
        return
    is_shown = known.shows(keys, ONE_TOKEN)[there].all()
    if not is_shown and not known.may_show(keys, ONE_TOKEN)[there].all():
        return  # a clipped token may have been rounded away
    has_moved = False
    if known.has("kl_old"):
        has_moved = bool((np.abs(known.values("kl_old")) > ROUNDED_KL).any())
    text = "{0} is 0 at all {count} steps: no token was clipped{unless}."
    if not has_moved:
        text += " With one update for each batch, r is 1 and this is always so."
    yield from known.state(
        "fact",
        "clip",
        there,
        keys,
        text,
        count=int(there.sum()),
        unless="" if is_shown else UNLESS_ROUNDED.format(known.column[keys[0]]),
    )


def clamped_ratios(known: Known) -> Iterator[Statement]:
    """Yield a failure where clamped ratios reach farther from 1 than the ratios, or
    their sums differ although the extremes are equal: a clamp to an interval around 1
    moves a ratio towards 1, and moves nothing where the extremes stay.
    """
    keys = OF_CLAMP
    if not known.has(*keys):
        return
    low, high, clamped_low, clamped_high = map(known.values, keys)
    # NeMo-RL writes -1 for no token, and log-probabilities where the ratio is disabled
    is_ratio = (low >= 0) & (clamped_low >= 0)
    error = known.errors(keys)
    too_low = clamped_low < np.minimum(low, 1) - error
    too_high = clamped_high > np.maximum(high, 1) + error
    yield from known.state(
        "failure",
        "clip",
        is_ratio & (too_low | too_high),
        keys,
        "the ratios lie in [{low:.6g}, {high:.6g}] and the clamped ones in [{clamped_low:.6g}, {clamped_high:.6g}] at "
        "step {step}: a clamp to an interval around 1 moves a ratio towards 1 ({steps}).",
        low=low,
        high=high,
        clamped_low=clamped_low,
        clamped_high=clamped_high,
    )
    sums = ("ratio_sum", "clamped_sum")
    if known.has(*sums):
        x, y = map(known.values, sums)
        is_inside = (low == clamped_low) & (high == clamped_high)
        # extremes that are equal in the digits that were written may still differ, and
        # each ratio is clamped by that difference at most; a sum of U means is about U
        hidden = known.errors(keys) * np.maximum(np.abs(x), 1)
        yield from known.state(
            "failure",
            "clip",
            is_ratio & is_inside & (np.abs(x - y) > known.errors(sums) + hidden),
            [*sums, *keys],
            "{2} and {3} are inside the clip range at step {step}, so no ratio is clamped, but {0} is {x:.6g} and {1} is "
            "{y:.6g} ({steps}).",
            x=x,
            y=y,
        )


# ---- the sampler ---------------------------------------------------------------------
def sampler_divergences(known: Known) -> Iterator[Statement]:
    """Yield a failure where the divergences from the sampler cannot be of one ratio ρ =
    π_old/μ: k3 = E[ρ] - 1 + k1, E[ρ] is above 0, and E[ρ²] is at least E[ρ]².
    """
    keys = ("sampler_k1", "sampler_k3")
    if not known.has(*keys):
        return
    k1, k3 = map(known.values, keys)
    error = known.errors(keys) + ROUNDED_KL
    mean = 1 + k3 - k1
    yield from known.state(
        "failure",
        "divergences",
        mean < -error,
        keys,
        "{1} - {0} + 1 = {k3:.4g} - {k1:.4g} + 1 = {mean:.4g} is the mean of ρ = π_old/μ, which is above 0, at step "
        "{step} ({steps}).",
        k1=k1,
        k3=k3,
        mean=mean,
    )
    if known.has("sampler_chi2"):
        second = 1 + known.values("sampler_chi2")
        error = 2 * np.abs(mean) * error + known.error("sampler_chi2")
        yield from known.state(
            "failure",
            "divergences",
            (second < mean**2 - error) & (k3 < 1e3),  # verl bounds log ρ by 20 in ρ²
            [*keys, "sampler_chi2"],
            "with ρ = π_old/μ, {1} - {0} + 1 = {mean:.6g} is the mean of ρ, and {2} + 1 = {second:.6g} that of ρ², at "
            "step {step}: the second is at least the square of the first ({steps}).",
            mean=mean,
            second=second,
        )


def perplexities(known: Known) -> Iterator[Statement]:
    """Yield a failure where the difference of the two log perplexities is not that
    which is logged, or a mean perplexity is below exp of the mean log perplexity.
    """
    keys = ("trainer_log_ppl", "sampler_log_ppl", "log_ppl_diff")
    if known.has(*keys):
        trainer, sampler, diff = map(known.values, keys)
        yield from known.state(
            "failure",
            "perplexity",
            np.abs(trainer - sampler - diff) > known.errors(keys),
            keys,
            "{0} {trainer:.6g} - {1} {sampler:.6g} = {right:.6g}, and {2} is {diff:.6g} at step {step} ({steps}).",
            trainer=trainer,
            sampler=sampler,
            right=trainer - sampler,
            diff=diff,
        )
    for logarithm, whole in (
        ("trainer_log_ppl", "trainer_ppl"),
        ("sampler_log_ppl", "sampler_ppl"),
        ("log_ppl_diff", "ppl_ratio"),
    ):
        if known.has(logarithm, whole):
            least, x = np.exp(known.values(logarithm)), known.values(whole)
            error = least * known.error(logarithm) + known.error(whole)
            yield from known.state(
                "failure",
                "perplexity",
                x < least - error - SINGLE * least,
                [logarithm, whole],
                "{1} is {x:.6g} and exp({0}) is {least:.6g} at step {step}: the mean of exp is at least exp of the mean "
                "({steps}).",
                x=x,
                least=least,
            )


def averages_apart(known: Known) -> Iterator[Statement]:
    """Yield a note where two averages cannot be over the same tokens: abs of a mean is
    at most the mean of abs, and the mean of exp is at least exp of the mean.
    """
    keys: tuple[str, ...] = ("log_probs", "sampler_log_probs", "gap_mean")
    if known.has(*keys):
        trainer, sampler, gap = map(known.values, keys)
        apart = np.abs(trainer - sampler)
        yield from known.state(
            "note",
            "two averages",
            apart > gap + known.errors(keys) + 1e-6,
            keys,
            "abs({0} - {1}) = {apart:.4g} is more than {2}, {gap:.4g}, at step {step}. Of the same tokens, with the same "
            "weights, it is at most that. So one is a mean over tokens and the other over responses, or they are of "
            "other tokens ({steps}).",
            apart=apart,
            gap=gap,
        )
    keys = ("ratio_mean", "kl_old")
    if known.has(*keys):
        r, least = known.values("ratio_mean"), np.exp(-known.values("kl_old"))
        error = known.error("ratio_mean") + least * known.error("kl_old")
        yield from known.state(
            "note",
            "two averages",
            r < least - error - ROUNDED_KL,
            keys,
            "{0} is {r:.6g} and exp(-{1}) is {least:.6g} at step {step}. The mean of a ratio is at least exp of its mean "
            "logarithm. So one is a mean over tokens and the other over responses, or they are of other tokens "
            "({steps}).",
            r=r,
            least=least,
        )


def factor_of_zero(known: Known) -> Iterator[Statement]:
    """Yield the fact that a sampler correction drops tokens: its smallest factor is
    exactly 0, which exp is not unless it underflows.
    """
    keys = ["sampler_ratio_min", "gap_mean", "length_max"]
    if not known.has(*keys):
        return
    x, gap, length = map(known.values, keys)
    usual = gap * length
    yield from known.state(
        "fact",
        "dropped",
        (x == 0) & known.shows(keys[:1], 1e-6) & (usual < UNDERFLOW / 4),
        keys,
        "{0} is exactly 0 {steps}. At step {step} the gap of a token is {gap:.3g} nats on average and the longest response "
        "has {length:.0f} tokens, so its log ratio is about {usual:.2g} nats or less; float32 rounds exp to 0 from "
        "-{limit:.0f} nats on. So the 0 was set, very likely: a correction that masks drops that token or response "
        "from the loss. A process without trained tokens logs 0 too.",
        gap=gap,
        length=length,
        usual=usual,
        limit=UNDERFLOW,
    )


def factor_of_responses(known: Known) -> Iterator[Statement]:
    """Yield the fact that the factors of the sampler correction are of whole responses:
    the largest is above exp of the largest gap of a token.
    """
    keys = ("sampler_ratio_max", "gap_max")
    if known.has(*keys):
        x, most = known.values(keys[0]), np.exp(known.values(keys[1]))
        error = known.error(keys[0]) + most * (known.error(keys[1]) + 1e-3)
        yield from known.state(
            "fact",
            "of responses",
            x > most + error,
            keys,
            "{0} is {x:.4g} at step {step}, and a token's ratio is at most "
            "exp({1}) = {most:.4g}: the factors are of whole responses, products over "
            "their tokens, or both numbers are means over several batches ({steps}).",
            x=x,
            most=most,
        )


# ---- the loss ------------------------------------------------------------------------
def kl_that_is_k1(known: Known) -> Iterator[Statement]:
    """Yield a note where a KL term of the loss is k1, or a fact where the KL is no
    term: below 0, it is not k2, k3 or the exact KL. The gradient of k1 as a term is 0
    on average.
    """
    for key in ("kl_loss", "kl"):
        if not known.has(key):
            continue
        x = known.values(key)
        below = x < -ROUNDED_KL - known.error(key)
        equal_to, keys = _as_log_ratio(known, key)
        reading = "a signed estimate, as k1, the mean of log π_θ - log π_ref"
        if equal_to:
            reading = f"k1, the mean of log π_θ - log π_ref ({equal_to})"
        elif (x[below] > -HALF_KL).all():
            reading += ", or a KL in half precision"
        weight = _weight_in_loss(known, key)
        is_in_loss = key == "kl_loss" or bool(weight)
        if is_in_loss:
            severity: Severity = "note"
            name = "k1 in the loss"
            in_loss = weight + OF_K1
        else:
            severity = "fact"
            name = "k1"
            in_loss = ""
        yield from known.state(
            severity,
            name,
            below,
            [key, *keys],
            "{0} is below 0 {steps}; at step {step} it is {x:.4g}. k2, k3 and the exact KL are at least 0 for each batch, "
            "so it is {reading}.{in_loss}",
            x=x,
            reading=reading,
            in_loss=in_loss,
        )


OF_K1 = (
    " On tokens that the policy itself sampled, the gradient of k1 is 0 on average: as a term of a loss it adds noise and "
    "does not hold the policy at the reference. Two settings keep this number and repair the gradient: verl's k1+, and a "
    "factor π_θ/π_old on the term (slime's --use-unbiased-kl). Without them, take k2."
)


def _as_log_ratio(known: Known, key: str) -> tuple[str, tuple[str, ...]]:
    """Return words and scalars that show that a scalar is the mean of log π_θ - log
    π_ref at every step; ("", ()) where it is not, or fewer than FEWEST steps tell.
    """
    keys: tuple[str, ...] = ("log_probs", "ref_log_probs")
    if known.has("ref_log_ratio"):
        keys = ("ref_log_ratio",)
        other = known.values("ref_log_ratio")
    elif known.has(*keys):
        other = known.values(keys[0]) - known.values(keys[1])
    else:
        return "", ()
    x = known.values(key)
    there = np.isfinite(x) & np.isfinite(other)
    apart = np.abs(x - other)[there]
    error = known.errors([key, *keys])[there] + ROUNDED_KL
    if there.sum() < FEWEST or (apart > error).any():
        return "", ()
    names = " - ".join(known.column[k] for k in keys)
    return f"it is {names} to {apart.max():.1g} at {there.sum()} steps", keys


def _weight_in_loss(known: Known, key: str) -> str:
    """Return a sentence with β, where loss = pg_loss + β KL at every step, to rounding;
    "" where it is not, fewer than FEWEST steps tell, or the term is below the digits.
    """
    keys = ("loss", "pg_loss", key)
    if not known.has(*keys):
        return ""
    loss = known.values("loss")
    pg_loss = known.values("pg_loss")
    kl = known.values(key)
    there = np.isfinite(loss) & np.isfinite(pg_loss) & np.isfinite(kl)
    rest = (loss - pg_loss)[there]
    kl = kl[there]
    error = known.errors(["loss", "pg_loss"])[there]
    # β by least squares, each step weighted by its precision
    precision = 1 / np.maximum(error, 1e-30) ** 2
    square = float((precision * kl**2).sum())
    if there.sum() < FEWEST or not square:
        return ""
    beta = float((precision * rest * kl).sum()) / square
    error = error + abs(beta) * known.error(key)[there]
    if (np.abs(rest - beta * kl) > error).any():
        return ""
    if (np.abs(beta * kl) <= 3 * error).all():
        return ""  # the term is below the digits
    loss_name, pg_name, kl_name = (known.column[k] for k in keys)
    return f" It is a term of the loss: {loss_name} = {pg_name} + {beta:.4g} {kl_name} at {there.sum()} steps."


def equal_rewards(known: Known) -> Iterator[Statement]:
    """Yield the fact that the rewards of each prompt are equal at some steps, where a
    group-relative advantage is 0. It is a note where that is so at OFTEN of the steps
    or more, and the gradient is not 0 there.
    """
    keys: tuple[str, ...]
    # frameworks take a deviation over all rewards, or average those of the prompts: a 0
    # has this consequence in either case
    what = "the rewards of each prompt are equal"
    if known.has("equal_groups"):
        keys = ("equal_groups",)
        equal = known.values("equal_groups") == 1
        if _above_one(known, "equal_groups").any():
            return  # it is in percent
    elif known.are_of_one_family("reward_min", "reward_max"):
        keys = ("reward_min", "reward_max")
        equal = known.values("reward_min") == known.values("reward_max")
        what = "all rewards are equal"
    elif known.has("reward_std"):
        keys = ("reward_std",)
        equal = known.values("reward_std") == 0
    else:
        return
    # else one prompt with different rewards may have been rounded away
    is_shown = known.shows(keys, ONE_PROMPT)
    may_be_exact = known.may_show(keys, ONE_PROMPT)
    if known.are_of_one_family("reward_mean", *keys) and len(keys) == 2:
        mean = known.values("reward_mean")
        is_off = np.abs(mean - known.values("reward_max")) > known.error("reward_mean")
        equal = equal & ~is_off
        # a mean that is the largest reward, to digits of its own
        is_shown |= np.isfinite(mean) & known.shows(["reward_mean"], ONE_RESPONSE)
    equal = equal & (is_shown | may_be_exact)
    unless = ""
    if (equal & ~is_shown).any():
        unless = UNLESS_ROUNDED.format(known.column[keys[-1]])
    if known.has("advantage_min", "advantage_max"):
        for key in ("advantage_min", "advantage_max"):  # a KL may be part of the reward
            equal = equal & ~(np.abs(known.values(key)) > known.error(key))
    text = (
        what
        + " {steps}{unless}: an advantage within the group (GRPO, RLOO) is 0 there."
    )
    severity: Severity = "fact"
    named: list[str] = [*keys]
    # median norm of the gradient at these steps, and at the others
    at = math.nan
    elsewhere = math.nan
    if known.has("grad_norm"):
        norm = known.values("grad_norm")
        there = np.isfinite(norm)
        at = _median(norm[equal & there])
        elsewhere = _median(norm[~equal & there])
    if at > 0:
        named.append("grad_norm")
        text += " {grad} is {at:.3g} there in the median"
        if math.isfinite(elsewhere):
            text += ", and {elsewhere:.3g} at the other steps"
        text += ". With such advantages that gradient comes from other terms, such as KL, entropy or a value loss"
        if known.has("reward_min"):
            least = known.values("reward_min")[equal]
            if (least[np.isfinite(least)] % 1).any():
                text += ", or from rounding: (R - mean)/std of equal rewards of 0.9 need not be 0 in float32"
        text += "."
        if equal.sum() >= OFTEN * np.isfinite(known.values(keys[0])).sum():
            severity = "note"
    yield from known.state(
        severity,
        "equal rewards",
        equal,
        named,
        text,
        unless=unless,
        grad=known.column.get("grad_norm", ""),
        at=at,
        elsewhere=elsewhere,
    )


def _median(x: Numbers) -> float:
    """Return the median; NaN of no number."""
    return float(np.median(x)) if len(x) else math.nan


def entropy_of_length(known: Known) -> Iterator[Statement]:
    """Yield that the entropy is a sum over a response: the fact that it is above
    MOST_ENTROPY, more than the logarithm of any vocabulary; the note that it is
    proportional to the mean length at all steps.
    """
    if not known.has("entropy"):
        return
    x = known.values("entropy")
    yield from known.state(
        "fact",
        "entropy",
        x > MOST_ENTROPY,
        ["entropy"],
        "{0} is {x:.4g} at step {step}: as a mean over tokens it needs a vocabulary of e^{x:.0f} tokens. So it is a sum "
        "over the tokens of a response, and grows with the length ({steps}).",
        x=x,
    )
    if not known.has("length_mean") or known.is_negated("entropy"):
        return
    length = known.values("length_mean")
    there = np.isfinite(x) & np.isfinite(length) & (length > 0)
    if there.sum() < 2 * FEWEST:
        return
    share = x[there] / length[there]
    spread = _relative_spread(share)
    varied = min(_relative_spread(x[there]), _relative_spread(length[there]))
    changes = np.diff(x[there])
    # two smooth trends of one slope have one ratio too, but not the same changes
    left = changes - share.mean() * np.diff(length[there])
    follows = left.std() < FOLLOWS * changes.std()
    is_constant = spread < min(PROPORTIONAL, varied / 5)
    if is_constant and follows and varied > VARIED:
        yield from known.state(
            "note",
            "entropy",
            there,
            ["entropy", "length_mean"],
            "{0} is {share:.4g} times {1} at all {count} steps, to {spread:.1f} %, while both vary by {varied:.0f} % and "
            "more, and their changes from step to step agree. It may be a sum over the tokens of a response, or be "
            "multiplied by the length: a mean over tokens seldom follows the length so closely.",
            share=float(share.mean()),
            count=int(there.sum()),
            spread=100 * spread,
            varied=100 * varied,
        )


def _relative_spread(x: Numbers) -> float:
    """Return the standard deviation over the absolute mean."""
    return float(x.std() / max(abs(float(x.mean())), 1e-30))


LAWS = (
    possible_numbers,
    negative_k3,
    in_order,
    spread_of_rewards,
    none_was_cut,
    shares_of_clipped,
    clipped_at_one,
    clamped_ratios,
    sampler_divergences,
    perplexities,
    averages_apart,
    kl_that_is_k1,
    equal_rewards,
    entropy_of_length,
    not_numbers,
    one_run,
    factor_of_zero,
    factor_of_responses,
    never_clipped,
)
