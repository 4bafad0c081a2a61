# SPDX-License-Identifier: Apache-2.0
"""A table of results, audited: could these numbers be, and what does the winner's lead mean?

    method,AIME24,AMC23,Average        CSV (or tab, or semicolon) or a markdown table; per cent, all decimals
    n,30x32,40,                        optional: how many answers, PROBLEMSxSAMPLES, or several to choose from: 674|675
    GRPO,35.73,75.00,55.37             no number: an empty cell, a dash; left out: lines with # first, all after ±

A column called Average (avg, mean) is the mean of the others. Told are: which numbers of answers make a column possible
(a printed p is some k/n, rounded), whether the averages follow, the standard error of each, how often chance makes such
a lead, and, where a row cannot be, which one digit put back would mend it.

Exit status: 0 everything fits, 1 something cannot be, 2 could not read (one sentence on stderr).
"""

import argparse
import csv
import json
import sys
from dataclasses import asdict, dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil, floor, log, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from upref.errors import InputError

PAPER = Path(__file__).parent / "fan2026up_table1.csv"
MOST = 2000  # answers, where n is searched for
# An n that was searched for is believed if numbers at random would fit some n as small more rarely than TELLING, and if
# there are DISTINCT numbers at least: that all their k share a factor with a true n of 2, 3, ... times as many answers
# has a probability of about Σ f^-DISTINCT, 4 % for five.
TELLING, DISTINCT = 1e-3, 5
DRAWS, SEED = 20_000, 0
AVERAGE = {"average", "avg", "avg.", "mean"}
BLANK = {"", "-", "–", "—", "n/a"}


@dataclass(frozen=True)
class Count:
    """n answers, `samples` of them to each of n / samples problems."""

    n: int
    samples: int = 1

    def __str__(self):
        return f"{self.n} ({self.n // self.samples} x {self.samples})" if self.samples > 1 else str(self.n)


@dataclass(frozen=True)
class ResultsTable:
    """What was printed; counts: candidates for each column, none where n is unknown."""

    columns: list[str]
    rows: list[str]
    cells: list[list[str | None]]
    counts: list[list[Count]]
    averages: list[str | None] | None


# ---- reading ---------------------------------------------------------------------------------------------------------
def read(text: str) -> ResultsTable:
    """The table in a CSV or markdown text. Raises InputError on what is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if any(line.startswith("|") for line in lines):
        lines = [line for line in lines if line.startswith("|")]
        grid = [[c.strip().strip("*_` ") for c in line.strip("|").split("|")] for line in lines]
        grid = [row for row in grid if not all(set(c) <= set(":- ") and "-" in c for c in row)]
        grid = [[c.replace("¦", "|") for c in row] for row in grid]
    else:
        comma = next((c for c in ",\t;" if lines and c in lines[0]), ",")
        grid = [[c.strip() for c in row] for row in csv.reader(lines, delimiter=comma)]
    if len(grid) < 2 or len(grid[0]) < 2:
        raise InputError("this is no table: give a header, a column of names, and at least one row of percentages.")
    head = grid[0]
    for row in grid[1:]:
        if len(row) != len(head):
            raise InputError(f"row {row[0]!r} has {len(row)} cells, the header has {len(head)}.")
    average = [i for i, name in enumerate(head) if i and name.lower() in AVERAGE]
    if len(average) > 1:
        raise InputError(f"two columns are called an average: {head[average[0]]} and {head[average[1]]}.")
    at = [i for i in range(1, len(head)) if i not in average]
    said = [row for row in grid[1:] if row[0].lower() == "n"]
    body = [row for row in grid[1:] if row[0].lower() != "n"]
    if len(said) > 1 or not body or not at:
        raise InputError("a table needs one column of numbers, one row of results, and at most one row called n.")
    if len({row[0] for row in body}) < len(body):
        raise InputError("two rows have one name: call them differently.")
    counts = [_candidates(said[0][i], head[i]) if said else [] for i in at]
    cells = [[_printed(row[i], row[0], head[i]) for i in at] for row in body]
    values = {Decimal(t) for row in cells for t in row if t}
    if values and max(values) <= 1 and len(values - {Decimal(0), Decimal(1)}) > 1:
        raise InputError("no number is above 1: these look like shares, give per cent.")
    averages = [_printed(row[average[0]], row[0], "average") for row in body] if average else None
    return ResultsTable([head[i] for i in at], [row[0] for row in body], cells, counts, averages)


def _candidates(text: str, column: str) -> list[Count]:
    if text.lower() in BLANK | {"?"}:
        return []
    found = []
    for part in text.replace("/", "|").split("|"):
        problems, _, samples = part.strip().lower().replace("×", "x").partition("x")
        if not problems.strip().isdecimal() or not (samples or "1").strip().isdecimal():
            raise InputError(f"n of {column} is {text!r}: give a whole number, 30x32, or several as 674|675.")
        n, s = int(problems), int(samples or 1)
        if n * s < 1:
            raise InputError(f"n of {column} is {text!r}: it must be 1 or more.")
        found.append(Count(n * s, s))
    return found


def _printed(text: str, row: str, column: str) -> str | None:
    text = text.partition("±")[0].strip().strip("*_` ").removesuffix("%").removesuffix("\\").strip()
    if text.lower() in BLANK:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise InputError(f"{row}, {column}: {text!r} is no number.") from None
    if not text.replace(".", "", 1).isdecimal() or not 0 <= value <= 100:
        raise InputError(f"{row}, {column}: {text} is no percentage from 0 to 100, printed as 12.34.")
    return text


# ---- one number ------------------------------------------------------------------------------------------------------
def half(text: str) -> Fraction:
    """Half a unit of the last place: what rounding may have taken or given."""
    return Fraction(1, 2 * 10 ** len(text.partition(".")[2]))


@lru_cache(maxsize=100_000)
def numerators(text: str, n: int) -> range:
    """All k with 100 k/n rounded to that, a tie either way."""
    v, h = Fraction(text), half(text)
    return range(max(0, ceil((v - h) * n / 100)), min(n, floor((v + h) * n / 100)) + 1)


def possible(texts: list[str], most: int = MOST) -> list[int]:
    """All n up to `most` for which every one of these percentages is some k/n."""
    return [n for n in range(1, most + 1) if all(numerators(t, n) for t in texts)]


def _range(text: str, n: int | None) -> tuple[Fraction, Fraction]:
    """From where to where the unrounded percentage can be."""
    if n and (k := numerators(text, n)):
        return Fraction(100 * k[0], n), Fraction(100 * k[-1], n)
    return Fraction(text) - half(text), Fraction(text) + half(text)


def mean_fits(average: str, cells: list[str], counts: list[int | None], weighted: bool = False) -> bool:
    """Whether the printed average is the mean of the unrounded cells, or of the printed ones; weighted: by n."""
    w = [Fraction(n or 0) if weighted else Fraction(1) for n in counts]
    if not sum(w):
        return False
    rough = sum(float(t) * float(v) for t, v in zip(cells, w, strict=True)) / float(sum(w))
    if abs(rough - float(average)) > float(half(average) + max(map(half, cells))) + 1e-9:
        return False  # neither can be; the rest is exact, and slow
    mean = lambda xs: sum((x * v for x, v in zip(xs, w, strict=True)), Fraction(0)) / sum(w)
    ends = [_range(t, n) for t, n in zip(cells, counts, strict=True)]
    a, h = Fraction(average), half(average)
    unrounded = mean([e[0] for e in ends]) <= a + h and mean([e[1] for e in ends]) >= a - h
    return unrounded or abs(mean(list(map(Fraction, cells))) - a) <= h


# ---- the table -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Column:
    """given: n that was said; n: what is taken; fit: every n up to MOST that fits all rows; misfits: rows that n does
    not fit."""

    name: str
    given: list[str]
    n: int | None
    samples: int
    fit: list[int]
    misfits: list[str]
    accident: float | None  # how probable it is that as many distinct numbers taken at random would fit this n


@dataclass(frozen=True)
class Row:
    """se: of the average, if all answers are independent; se_problems: if all answers to a problem are one answer."""

    name: str
    average: str | None
    from_cells: str
    follows: bool | None
    se: float
    se_problems: float
    mended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Chance:
    """The same drawn again. se_lead: of the difference of first and second, rows independent."""

    model: str
    se_lead: float
    contenders: list[str]  # rows within two standard errors (of a difference) of the winner, the winner among them
    again_first: float  # the rows being as good as printed
    lead_if_equal: float  # the contenders being equally good, the first leads the second by as much
    lead_of_two: float  # winner and second being equally good, the winner leads by as much


@dataclass(frozen=True)
class Audit:
    columns: list[Column]
    weighted: bool
    rows: list[Row]
    winner: str
    second: str | None
    lead: float | None
    chances: list[Chance]
    seed: int = SEED
    draws: int = DRAWS

    def __bool__(self) -> bool:
        return not any(c.misfits for c in self.columns) and all(r.follows is not False for r in self.rows)

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"fits": bool(self)}

    def __str__(self) -> str:
        return "\n".join(_text(self))


def audit(table: ResultsTable, draws: int = DRAWS, seed: int = SEED) -> Audit:
    """Everything at once; nothing is read or written."""
    columns = [_column(table, j) for j in range(len(table.columns))]
    counts = [c.n for c in columns]
    weighted = _weighted(table, counts)
    rows = [_row(table, i, columns, weighted) for i in range(len(table.rows))]
    order = sorted(range(len(rows)), key=lambda i: -_mean(table, i, counts, weighted))
    lead = _mean(table, order[0], counts, weighted) - _mean(table, order[1], counts, weighted) if rows[1:] else None
    chances = []
    if lead is not None and all(counts) and all(None not in row for row in table.cells):
        models = [("answers independent", [Count(c.n or 1) for c in columns])]
        if any(c.samples > 1 for c in columns):
            models.append(("all answers to one problem alike", [Count((c.n or 1) // c.samples) for c in columns]))
        chances = [_chance(table, counts, m, [c.n for c in units], weighted, draws, seed) for m, units in models]
    second = table.rows[order[1]] if rows[1:] else None
    return Audit(columns, weighted, rows, table.rows[order[0]], second, None if lead is None else float(lead), chances,
                 seed, draws)  # fmt: skip


def _column(table: ResultsTable, j: int) -> Column:
    printed = [(row, cells[j]) for row, cells in zip(table.rows, table.cells, strict=True)]
    texts = {name: t for name, t in printed if t is not None}
    said, distinct = table.counts[j], set(texts.values())
    misfits = lambda n: [name for name, t in texts.items() if not numerators(t, n)]
    best = max(said or map(Count, range(1, MOST + 1)), key=lambda c: _likelihood(distinct, c.n))
    accident = _accident(distinct, best.n)
    name, given, fit = table.columns[j], [str(c) for c in said], possible(list(distinct))
    if not said and (len(distinct) < DISTINCT or best.n * accident > TELLING or len(misfits(best.n)) > 1):
        return Column(name, given, None, 1, fit, [], None)
    return Column(name, given, best.n, best.samples, fit, misfits(best.n), accident)


def _likelihood(texts: set[str], n: int) -> float:
    """Log-probability of these distinct numbers: one of the n + 1 that n makes possible, or, once in 200, a slip."""
    slip = lambda t: log(0.005 / (100 * 10 ** len(t.partition(".")[2]) + 1))
    return sum(-log(n + 1) if numerators(t, n) else slip(t) for t in texts)


def _accident(texts: set[str], n: int) -> float:
    """∏ over the distinct numbers of the share of all numbers so printed that are some k/n."""
    share = 1.0
    for t in texts:
        places = len(t.partition(".")[2])
        share *= min(1.0, (n + 1) / (100 * 10**places + 1))
    return share


def _weighted(table: ResultsTable, counts: list[int | None]) -> bool:
    """Whether the averages are weighted by n: only if more of them follow so."""
    if table.averages is None or None in counts:
        return False
    hits = [sum(_follows(table, i, counts, w) is True for i in range(len(table.rows))) for w in (False, True)]
    return hits[1] > hits[0]


def _follows(table: ResultsTable, i: int, counts: list[int | None], weighted: bool) -> bool | None:
    average = table.averages[i] if table.averages else None
    cells = table.cells[i]
    if average is None or None in cells:
        return None
    return mean_fits(average, [c for c in cells if c], counts, weighted)


def _mean(table: ResultsTable, i: int, counts: list[int | None], weighted: bool) -> Fraction:
    """The mean of the unrounded cells, where n says what they are."""
    there = [(t, n) for t, n in zip(table.cells[i], counts, strict=True) if t is not None]
    w = [Fraction(n or 1) if weighted else Fraction(1) for _, n in there]
    middle = [sum(_range(t, n), Fraction(0)) / 2 for t, n in there]
    return sum((m * v for m, v in zip(middle, w, strict=True)), Fraction(0)) / (sum(w) or 1)


def _row(table: ResultsTable, i: int, columns: list[Column], weighted: bool) -> Row:
    counts = [c.n for c in columns]
    follows = _follows(table, i, counts, weighted)
    wrong = follows is False or any(table.rows[i] in c.misfits for c in columns)
    return Row(
        table.rows[i],
        table.averages[i] if table.averages else None,
        f"{float(_mean(table, i, counts, weighted)):.3f}",
        follows,
        _standard_error(table.cells[i], columns, weighted, problems=False),
        _standard_error(table.cells[i], columns, weighted, problems=True),
        mend(table, i, counts, weighted) if wrong else [],
    )


def _standard_error(cells: list[str | None], columns: list[Column], weighted: bool, problems: bool) -> float:
    """Of the mean in points: binomial in each cell, columns independent; NaN where an n is unknown."""
    total = variance = 0.0
    for text, c in zip(cells, columns, strict=True):
        if text is None:
            continue
        if c.n is None:
            return float("nan")
        p, w = float(text) / 100, float(c.n if weighted else 1)
        variance += w**2 * p * (1 - p) / (c.n / c.samples if problems else c.n)
        total += w
    return 100 * sqrt(variance) / total if total else float("nan")


def _chance(table, counts, model: str, units: list[int], weighted: bool, draws: int, seed: int) -> Chance:
    """Binomial in each cell, cells independent; the numbers drawn are compared unrounded."""
    n = np.array(units)
    w = np.array(counts, float) if weighted else np.ones(len(n))
    w = w / w.sum()
    p = np.array(
        [[float(sum(_range(t, c), Fraction(0)) / 200) for t, c in zip(row, counts, strict=True)] for row in table.cells]
    )
    means = p @ w
    order = np.argsort(-means, kind="stable")
    first, second = order[:2]
    lead = means[first] - means[second]
    se = np.sqrt((p * (1 - p) / n) @ w**2)
    near = [int(i) for i in order if means[first] - means[i] <= 2 * sqrt(se[first] ** 2 + se[i] ** 2)]
    rng = np.random.default_rng(seed)
    draw = lambda q: rng.binomial(n, q, size=(draws, *q.shape)) / n @ w  # [draws, rows]
    again = draw(p)
    best = np.delete(again, first, 1).max(1)
    wins = (again[:, first] > best) + 0.5 * np.isclose(again[:, first], best)
    equal = np.sort(draw(np.repeat(p[near].mean(0, keepdims=True), max(2, len(near)), 0)), 1)
    two = draw(np.repeat(p[[first, second]].mean(0, keepdims=True), 2, 0))
    return Chance(
        model,
        100 * float(np.hypot(se[first], se[second])),
        [table.rows[i] for i in near],
        float(wins.mean()),
        float((equal[:, -1] - equal[:, -2] >= lead - 1e-12).mean()),
        float((two[:, 0] - two[:, 1] >= lead - 1e-12).mean()),
    )


# ---- altered digits --------------------------------------------------------------------------------------------------
def one_digit_off(text: str) -> list[str]:
    """All percentages that differ from this one in exactly one digit."""
    edits = (text[:i] + d + text[i + 1 :] for i, c in enumerate(text) if c.isdigit() for d in "0123456789" if d != c)
    return [t for t in edits if Fraction(t) <= 100]


def consistent(cells: list[str], average: str | None, counts: list[int | None], weighted: bool = False) -> bool:
    """Whether one row can be: every cell some k/n, and the average their mean."""
    if any(n and not numerators(t, n) for t, n in zip(cells, counts, strict=True)):
        return False
    return average is None or mean_fits(average, cells, counts, weighted)


def mend(table: ResultsTable, i: int, counts: list[int | None], weighted: bool = False) -> list[str]:
    """Every change of one digit after which the row can be: "Minerva 31.52 -> 31.25"."""
    cells, average = table.cells[i], table.averages[i] if table.averages else None
    if None in cells:
        return []
    texts, found = [c for c in cells if c], []
    wrong = [j for j, (t, n) in enumerate(zip(texts, counts, strict=True)) if n and not numerators(t, n)]
    for j in range(len(texts)):
        if set(wrong) <= {j}:
            for t in one_digit_off(texts[j]):
                if consistent([*texts[:j], t, *texts[j + 1 :]], average, counts, weighted):
                    found.append(f"{table.columns[j]} {texts[j]} -> {t}")
    if average and not wrong:
        found += [f"average {average} -> {t}" for t in one_digit_off(average) if consistent(texts, t, counts, weighted)]
    return found


# ---- words -----------------------------------------------------------------------------------------------------------
def _text(a: Audit) -> list[str]:
    out = ["Numbers of answers"]
    for c in a.columns:
        n = f"{Count(c.n, c.samples)}" if c.n else "?"
        said = "" if c.given else " (searched for)"
        fits = "fits all rows" if not c.misfits else f"cannot be: {', '.join(c.misfits)}"
        others = [k for k in c.fit if k != c.n]
        more = f"; {'also' if not c.misfits else 'all rows fit'} {_listed(others)}" if others else ""
        chance = f"; by accident with probability {c.accident:.1g}" if c.accident is not None and not c.misfits else ""
        if c.n:
            out.append(f"  {c.name}: n = {n}{said}, {fits}{chance}{more}")
        elif c.fit:
            out.append(f"  {c.name}: n unknown, too few numbers to tell; possible: {_listed(c.fit)}")
        else:
            out.append(f"  {c.name}: n unknown, none up to {MOST} makes all rows possible")
    out += ["", f"Averages{', weighted by n' if a.weighted else ''}, and their standard errors in points"]
    width = max(len(r.name) for r in a.rows)
    for r in a.rows:
        follows = {None: "", True: "follows", False: "does not follow"}[r.follows]
        se = f"± {r.se:.2f}" + (f" to {r.se_problems:.2f}" if r.se_problems > r.se else "") if r.se == r.se else ""
        line = f"  {r.name:{width}}  {r.average or '':>6}  from the cells {r.from_cells}  {follows:8}  {se}"
        out.append(line.rstrip())
        if r.mended:
            out.append(f"  {'':{width}}  one digit put back would mend it: {'; or '.join(r.mended)}")
    if a.lead is not None:
        printed = {r.name: r.average for r in a.rows}
        as_printed = printed[a.winner] and printed[a.second or ""]
        as_printed = f" (as printed, {Decimal(printed[a.winner] or 0) - Decimal(as_printed)})" if as_printed else ""
        out += ["", f"{a.winner} leads {a.second} by {a.lead:.3f} points{as_printed}"]
    if len(a.chances) > 1:
        out.append("  from: answers independent; to: all answers to one problem alike. The truth lies between.")
    for luck in a.chances:
        rows = len(luck.contenders)
        out += [
            f"  {luck.model}: standard error of that difference {luck.se_lead:.2f}; "
            f"{rows - 1} other row{'s' * (rows != 2)} within two of its kind "
            f"({', '.join(luck.contenders[1:]) or 'none'})",
            f"    drawn again, the rows as good as printed, {a.winner} is first in {luck.again_first:.1%}",
            f"    {a.winner} and {a.second} equally good, it leads by as much in {luck.lead_of_two:.1%}",
        ]
        if rows > 1:
            out.append(
                f"    those {rows} equally good, whoever is first leads the next by as much in "
                f"{luck.lead_if_equal:.1%}, and it is {a.winner} in {1 / rows:.1%}"
            )
    if a.chances:
        out.append(
            f"  Binomial in every cell, cells and rows independent, {a.draws} draws, seed {a.seed}. Rows that answer "
            "the same problems differ less by chance than that; the choice of a checkpoint and the training seed add "
            "to it."
        )
    return out


def _listed(ns: list[int], most: int = 8) -> str:
    """The first few, runs of neighbours joined."""
    runs: list[list[int]] = [[ns[0], ns[0]]] if ns else []
    for a, b in pairwise(ns):
        if b == a + 1:
            runs[-1][1] = b
        else:
            runs.append([b, b])
    text = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:most]]
    return ", ".join(text) + (f" and {len(runs) - most} more" if len(runs) > most else "")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (`{self.prog} -h` shows what it takes).\n")


def main(argv: list[str] | None = None, prog: str = "upref audit-table") -> int:
    p = _Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", nargs="?", type=Path, default=PAPER, help="the table; without it, Table 1 of fan2026up")
    p.add_argument("--json", action="store_true")
    p.add_argument("--seed", type=int, default=SEED, help="of the draws, %(default)s if not given")
    args = p.parse_args(argv)
    try:
        if args.seed < 0:
            raise InputError(f"--seed must be 0 or more, got {args.seed}.")
        found = audit(read(args.file.read_text(encoding="utf-8-sig")), seed=args.seed)
    except (InputError, csv.Error, UnicodeDecodeError) as e:
        print(f"{prog}: {args.file.name}: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"{prog}: cannot read {args.file}: {e.strerror}.", file=sys.stderr)
        return 2
    print(json.dumps(found.json(), indent=1, ensure_ascii=False) if args.json else found)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(prog="python -m upref.table_audit"))
