# SPDX-License-Identifier: Apache-2.0
"""Is all as it was registered? `python -m repro.mini.experiment [NAME] --verify`.

It trains nothing. Of each experiment it holds every record against its digest, every
registered file against its own, the names of all runs against runs.sha256, and what this
engine computes against the registered rule (frozen.py) and against the numbers that the
committed report prints. The rule of the second round computes its claims itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repro.mini.experiment import frozen, records, registration, standing, suite, words
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.plan import Plan, load
from repro.mini.experiment.questions import SHARES, RunRecord

Known = dict[str, RunRecord]  # name of a run -> record
# absolute tolerance: two ways to compute the same number differ by rounding alone
CLOSE = 1e-9
# an effect as words.shown prints it: +2.1 [+1.6, +2.6]
PRINTED = re.compile(r"[×+-][\d.]+ \[[+-]?[\d.]+, [+-]?[\d.]+\]")


class Checked:
    """What was compared, and what differs.

    Attributes:
        counts: kind of thing ("effects") -> how many were compared.
        wrong: kind -> the names of those that differ.
        known: folder of results -> its records.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: dict[str, list[str]] = {}
        self.known: dict[Path, Known] = {}

    def compare(self, what: str, name: str, same: bool) -> None:
        """Count one comparison; keep its name if the two differ."""
        self.counts[what] += 1
        if not same:
            self.wrong.setdefault(what, []).append(name)

    def records_of(self, plan: Plan) -> Known:
        """Return the records of a plan by name.

        When a folder of results is first asked for, its records are loaded and counted,
        each compared with its digest, and its registered files are compared.

        Raises:
            InputError: a record differs from its digest.
        """
        if plan.results not in self.known:
            self.known[plan.results] = records.load(plan.results)
            self.counts["records"] += len(self.known[plan.results])
            _compare_registered_files(plan, self)
        return self.known[plan.results]


def main(names: Iterable[str]) -> int:
    """Verify the experiments; print a line for each, and what differs.

    Args:
        names: of plans.

    Returns:
        0 if all is as registered, else 1.

    Raises:
        InputError: a record is not what it was.
    """
    total = Checked()
    for name in names:
        before = Counter(total.counts)
        _verify(load(name), total)
        new = total.counts - before
        said = ", ".join(f"{n} {what}" for what, n in new.items())
        suite.say(f"{name:28} {said}", markup=False)
    for what, n in total.counts.items():
        wrong = total.wrong.get(what, [])
        for sentence in wrong:
            suite.say(f"Differs, of {what}: {sentence}", markup=False)
        suite.say(f"{len(wrong)} of {n} {what} differ.", markup=False)
    return 1 if total.wrong else 0


def _verify(plan: Plan, total: Checked) -> None:
    """Compare what is known of one experiment with what was registered: the list of its
    runs, and its effects or claims.
    """
    known = total.records_of(plan)
    names = plan.folder / "runs.sha256"
    if names.exists() and not plan.others:
        same = names.read_text(encoding="utf-8").strip() == plan.digest()
        total.compare("lists of runs", plan.name, same)
    if plan.others:
        _compare_post_hoc(plan, known, total)
    elif plan.folder.parent.name == "round2":
        _compare_claims(plan, known, total)
    elif plan.stopping:
        _compare_intervals(plan, known, total)
    # the first round is closed: its rule is in the history, its words are committed


def _compare_registered_files(plan: Plan, total: Checked) -> None:
    """Compare each file that is registered beside the plan's results with its digest,
    in `total`.
    """
    folder = plan.results.parent
    changed = registration.changed(folder)
    for name in registration.load(folder).get("sha256", {}):
        total.compare("registered files", name, name not in changed)


# ---- the second round ----------------------------------------------------------------
def _compare_claims(plan: Plan, known: Known, total: Checked) -> None:
    """Compare the claims of an experiment of the second round: what its rule says of
    today's records, what was kept of each claim, and the row of the report.
    """
    kept = standing.of_plan(plan)
    rows = _rows_of_report(plan.results / "report.md", f"| {plan.name}<br>")
    verdicts = frozen.verdicts(plan, known)
    of_families = plan.by_family(plan.effects(known))
    for verdict, (claim, effects) in zip(verdicts, of_families, strict=True):
        name = f"{plan.name}/{claim.name}"
        for e, theirs in zip(effects, verdict.found, strict=True):
            values = _scale(e) * np.array(theirs.values)
            same = np.allclose(e.values, values, rtol=1e-12, atol=CLOSE)
            total.compare("effects", f"{name} {e.question.name}", bool(same))
        if not effects:
            continue
        s = kept[name]
        facts = s["word"], s["why"], s["seeds"], s["of"]
        same = facts == (verdict.word, verdict.why, verdict.n, verdict.of)
        total.compare("claims", name, same)
        row = next((row for row in rows if row[1] == claim.title), None)
        is_printed = row is not None and _is_printed(row, s, verdict, effects)
        total.compare("printed effects", name, is_printed)
        if row is not None:
            rows.remove(row)


def _is_printed(
    row: list[str], s: dict[str, Any], verdict: Any, effects: Sequence[Effect]
) -> bool:
    """Return whether a row of the report has the verdict and the words that were kept
    of a claim, its rule's p, and the mean of each effect that it shows.

    Args:
        row: the cells of the row.
        s: what was kept, as standing.py describes it.
        verdict: of the registered rule.
        effects: of the claim.
    """
    shown = [e for e in effects if e.n]
    means = [words.rounded(e.question, e.mean) for e in shown]
    few = len(shown) <= 3  # of more, the row has the weakest alone
    return (
        row[2].startswith(f"**{s['limit'] or s['verdict']}**")
        and row[3] == s["shown"]
        and row[5] in ("", f"{verdict.p_for:.2g}")
        and (not few or all(mean in row[3] for mean in means))
    )


def _scale(e: Effect) -> int:
    """Return the factor from shares to points; 1 for other numbers."""
    is_share = e.question.metric in SHARES and not e.question.ratio
    return 100 if is_share else 1


def _rows_of_report(report: Path, start: str) -> list[list[str]]:
    """Return the cells of the rows of a report that begin with `start`."""
    lines = report.read_text(encoding="utf-8").splitlines()
    return [
        line.strip("|").strip().split(" | ") for line in lines if line.startswith(start)
    ]


# ---- experiments with families of intervals ----------------------------------------------
def _compare_intervals(plan: Plan, known: Known, total: Checked) -> None:
    """Compare each effect with the rule, where one was registered beside the plan, and
    with what the report prints.
    """
    found = plan.effects(known)
    if theirs := frozen.intervals(plan, known):
        for family, effects in plan.by_family(found):
            for e in effects:
                q = e.question
                key = family.name, q.name, q.other, q.group
                total.compare("effects", "/".join(key), _is_same(e, theirs.pop(key)))
        for key in theirs:
            total.compare("effects", "/".join(key), False)
    report = plan.results / plan.page_name
    if report.exists():
        text = report.read_text(encoding="utf-8").partition("## Every effect")[2]
        _compare_printed(plan, found, text, total)


def _is_same(e: Effect, old: Any) -> bool:
    """Return whether an effect and the rule's have the same seeds, word and numbers."""
    mine = e.mean, e.low, e.high, e.sd, *e.by_base
    theirs = old.mean, old.low, old.high, old.sd, *old.by_base
    numbers = np.allclose(mine, theirs, rtol=1e-12, atol=CLOSE, equal_nan=True)
    return bool(numbers) and (e.n, e.word) == (old.n, old.word)


def _compare_printed(
    plan: Plan, found: Sequence[Effect], text: str, total: Checked
) -> None:
    """Compare what the report prints with the effects: every one with an interval is
    there, as often as it is found, and no other.

    Args:
        plan: of the report.
        found: its effects.
        text: of the report.
        total: takes the comparisons.
    """
    printed = Counter(PRINTED.findall(text))
    for e in found:
        said = words.shown(e)
        if not PRINTED.fullmatch(said):
            continue
        total.compare("printed effects", f"{plan.name} {said}", printed[said] > 0)
        printed[said] -= 1
    for said in +printed:  # what is left, counts above 0
        total.compare("printed effects", f"{plan.name} {said}", False)


# ---- what nobody registered ----------------------------------------------------------
def _compare_post_hoc(plan: Plan, known: Known, total: Checked) -> None:
    """Compare facts that nobody registered with the committed page that prints them."""
    printed: set[str] = set()
    for name in ("report.md", "unregistered.md"):
        page = plan.results / name
        if page.exists():
            printed |= set(PRINTED.findall(page.read_text(encoding="utf-8")))
    for e in plan.effects(known):
        said = words.shown(e)
        total.compare("facts not registered", f"{plan.name} {said}", said in printed)
