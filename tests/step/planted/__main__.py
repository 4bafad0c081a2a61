# SPDX-License-Identifier: Apache-2.0
"""Print a row for each step: the verdict, the named cause, whether that is the planted
one: `python -m tests.step.planted`.

Below it stand the counts at first sight, of first_sight.json, and those of today.
"""

import argparse
import re
import time
import warnings
from pathlib import Path
from typing import Any

import upref
from docs import record
from tests.step.planted import padded, ragged
from tests.step.planted.case import CASES, Case
from upref import markdown
from upref.verify.faults.measured import OBSERVATIONS
from upref.verify.report import UNKNOWN

MODULES = (padded, ragged)
FIRST_SIGHT = Path(__file__).with_name("first_sight.json")
TODAY = Path(__file__).with_name("today.json")


def run(case: Case) -> dict[str, Any]:
    """Run check_step on a step, and return its verdict and the cause that it names.

    Args:
        case: the step.

    Returns:
        agrees, cause, judged (see `judge`) and CPU seconds; the last is not recorded.
    """
    options = dict(case.options)
    model = case.model()
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = upref.check_step(case.step, model, options.pop("objective"), **options)
    seconds = time.process_time() - start
    finding = report.failures[0] if report.failures else None
    cause = finding.cause if finding else ""
    observed = finding is not None and {*finding.fault_ids} <= OBSERVATIONS
    return {
        "id": case.id,
        "agrees": bool(report),
        "cause": cause,
        "judged": judge(case, bool(report), cause, observed),
        "seconds": seconds,
    }


def judge(case: Case, agrees: bool, cause: str, observed: bool) -> str:
    """Return what an answer is worth.

    Args:
        case: the step.
        agrees: the verdict.
        cause: what the report names.
        observed: the cause says only which tokens train, without a hypothesis.

    Returns:
        Of a right step: accepted or false alarm. Of a bug: missed, right (the planted
        cause), seen (what was read of the weights, without a cause), none, or false.
    """
    if case.right:
        return "accepted" if agrees else "false alarm"
    if agrees:
        return "missed"
    if re.search(case.words, cause):
        return "right"
    if not cause or cause.startswith(UNKNOWN):
        return "none"
    return "seen" if observed else "false"


def table(results: list[dict[str, Any]]) -> str:
    """Return a row for each step, as Markdown.

    Args:
        results: of `run`.
    """
    rows = []
    for its in results:
        case = CASES[its["id"]]
        verdict = "agrees" if its["agrees"] else "differs"
        cause = its["cause"] or "-"
        rows.append([case.loop, case.truth, verdict, cause, its["judged"]])
    columns = ["loop", "what is done", "verdict", "named cause", "cause"]
    return markdown.table(columns, rows)


def counts(results: list[dict[str, Any]]) -> str:
    """Return how many bugs are rejected and named, and how many right loops are
    accepted.

    Args:
        results: of `run`.
    """
    bugs = [x for x in results if not CASES[x["id"]].right]
    rights = [x for x in results if CASES[x["id"]].right]
    rejected = sum(not x["agrees"] for x in bugs)
    accepted = sum(x["agrees"] for x in rights)
    causes = {
        word: sum(x["judged"] == word for x in bugs)
        for word in ("right", "seen", "none", "false")
    }
    return (
        f"{rejected} of {len(bugs)} bugs are rejected, {accepted} of {len(rights)} "
        f"right loops are accepted; of the causes {causes['right']} are the planted one, "
        f"{causes['seen']} say only which tokens train, {causes['none']} are none, "
        f"{causes['false']} are false"
    )


def recorded(file: Path) -> list[dict[str, Any]]:
    """What a file keeps of a run."""
    return list(record.rows(file))


def first_sight_and_today() -> str:
    """Return the counts of both recorded runs, as two lines of a list."""
    return "\n".join(
        f"* {when}: {counts(recorded(file))}."
        for when, file in (("at first sight", FIRST_SIGHT), ("today", TODAY))
    )


def main() -> int:
    """Run the steps, and print the table and the counts; return 1 where a verdict or a
    cause is false. --record writes today.json, unless only some steps were run.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.step.planted")
    parser.add_argument("ids", nargs="*", help="steps to run; all by default")
    parser.add_argument("--record", action="store_true", help="write today.json")
    options = parser.parse_args()
    results = []
    for case in CASES.values():
        if options.ids and case.id not in options.ids:
            continue
        results.append(its := run(case))
        print(
            f"{its['judged']:11} {its['seconds']:5.1f} s  {case.id}: {its['cause']}",
            flush=True,
        )
    print(table(results))
    if not options.ids:
        print(f"first sight: {counts(recorded(FIRST_SIGHT))}")
    print(f"today: {counts(results)}")
    if options.record and not options.ids:
        kept = [{k: v for k, v in x.items() if k != "seconds"} for x in results]
        record.add(TODAY, "python -m tests.step.planted --record", kept)
    bad = {"missed", "false alarm", "false"}
    return int(any(x["judged"] in bad for x in results))


if __name__ == "__main__":
    raise SystemExit(main())
