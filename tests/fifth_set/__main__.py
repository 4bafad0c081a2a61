# SPDX-License-Identifier: Apache-2.0
"""Print what the set showed at first sight; with --run, what it shows today, beside it.

`python -m tests.fifth_set` reads first_sight.json. `--run` takes four CPU minutes.
"""

import argparse
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import upref
from docs import record
from tests.fifth_set import (
    aimed_losses,
    boxes,
    estimators,
    kl_terms,
    log_probs,
    right_losses,
    wrong_other,
    wrong_token,
)
from tests.fifth_set.case import CASES, Case
from upref import markdown

MODULES = (
    aimed_losses,
    boxes,
    estimators,
    kl_terms,
    log_probs,
    right_losses,
    wrong_other,
    wrong_token,
)
LIMIT = 60  # CPU seconds for a case
# of each case: whether the answer was as meant, what its cause was judged to be, why
# the verdict is debatable, and which line stopped the reader of its report
FIRST_SIGHT = record.rows(Path(__file__).with_name("first_sight.json"))


class Late(Exception):
    """A case took too long."""


def stop(*_: Any) -> None:
    """Raise where the timer goes off."""
    raise Late


def answer(case: Case) -> Any:
    """Return what upref answers about a case."""
    match case.kind:
        case "loss":
            return upref.check(case.function, case.target, **case.hp)
        case "box":
            return upref.identify(case.function)
        case "advantage":
            return upref.check_advantages(case.function, case.target)
        case "kl":
            return upref.check_kl(case.function, case.target)
    return upref.check_logprobs(case.function, **case.hp)


def is_named(case: Case, identity: Any) -> bool:
    """Return whether identify gave a true name, with the hyperparameters of the box."""
    if identity.kind == "none":
        return "none" in case.target.split("|")
    pitfall = identity.kind == "pitfall"
    first = f"pitfall of {identity.name}" if pitfall else identity.name
    names = {first, *identity.also, *identity.elsewhere}
    found = identity.hp
    near = (
        abs(float(found.get(key) or 0) - value) <= 0.02 * abs(value)
        for key, value in case.hp.items()
    )
    return bool(names & set(case.target.split("|"))) and all(near)


def is_as_meant(case: Case, got: Any) -> bool:
    """Return whether the answer is the true one."""
    return is_named(case, got) if case.kind == "box" else bool(got) == case.right


def causes(report: Any) -> list[str]:
    """The causes that a report names."""
    return [finding.cause for finding in report.failures if finding.cause]


def run(case: Case) -> dict[str, Any]:
    """Run one case: its answer, whether that is the true one, and the CPU seconds."""
    start = time.process_time()
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    error, got = "", None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = answer(case)
    except Late:
        error = "timeout"
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {
        "id": case.id,
        "good": got is not None and is_as_meant(case, got),
        "error": error,
        "causes": [] if got is None or case.kind == "box" else causes(got),
        "text": str(error if got is None else got),
        "seconds": round(time.process_time() - start, 2),
    }


def table(good: dict[str, bool]) -> str:
    """Return the table of verdicts, as Markdown; good: by id, of the cases that ran."""
    rows = []
    ran = [case for case in CASES.values() if case.id in good]
    for kind in ("loss", "advantage", "kl", "logprobs"):
        of_kind = [case for case in ran if case.kind == kind]
        parts = (
            [case for case in of_kind if case.fault and not case.aimed],
            [case for case in of_kind if case.aimed],
            [case for case in of_kind if case.right],
        )
        cells = [f"{sum(good[c.id] for c in part)} of {len(part)}" for part in parts]
        rows.append([kind, *cells])
    named = [good[case.id] for case in ran if case.kind == "box"]
    rows.append(["identify", "", "", f"{sum(named)} of {len(named)}"])
    return markdown.table(["part", "wrong, blind", "wrong, aimed", "right"], rows)


def first_sight() -> Iterator[str]:
    """Yield what was recorded at first sight: verdicts, causes, reports, debatable
    cases.
    """
    yield table({name: entry["as_meant"] for name, entry in FIRST_SIGHT.items()})
    judged = Counter(e["cause"] for e in FIRST_SIGHT.values() if "cause" in e)
    words = ("true", "empty", "false", "none")
    yield "causes: " + ", ".join(f"{judged[word]} {word}" for word in words)
    reads = {name: e["read"] for name, e in FIRST_SIGHT.items() if "read" in e}
    stopped = {name: line for name, line in reads.items() if line != "understood"}
    yield f"reports: {len(reads) - len(stopped)} of {len(reads)} understood in a minute"
    for name, line in stopped.items():
        yield f"  stopped at {name}: {line}"
    for name, entry in FIRST_SIGHT.items():
        if why := entry.get("why"):
            yield f"  a false cause, {name}: {why}"
        if why := entry.get("debatable"):
            yield f"  debatable, {name}: {why}"


def main() -> None:
    """Print the record; run the named cases, or all with --run."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fifth_set", description=__doc__
    )
    parser.add_argument("ids", nargs="*", help="cases to run; all by default")
    parser.add_argument("--run", action="store_true", help="run the cases")
    parser.add_argument(
        "--truth",
        action="store_true",
        help="compare the losses with their objectives on private batches instead",
    )
    parser.add_argument("--reports", help="a file for the reports, as JSON lines")
    args = parser.parse_args()
    cases = [CASES[name] for name in args.ids] or list(CASES.values())
    if args.truth:
        from tests.fifth_set.truth import disagreements

        print("\n".join(disagreements(cases)) or "every statement holds")
        return
    print("first sight", *first_sight(), sep="\n")
    if not (args.run or args.ids):
        return
    results = []
    for case in cases:
        results.append(result := run(case))
        if args.reports:
            with open(args.reports, "a", encoding="utf-8") as f:
                print(json.dumps(result, ensure_ascii=False), file=f)
        if not result["good"]:
            print(f"{case.id} ({case.target}): {result['error'] or 'not as meant'}")
    print("today", table({r["id"]: r["good"] for r in results}), sep="\n")
    print(f"{sum(r['seconds'] for r in results):.0f} CPU seconds")


if __name__ == "__main__":
    main()
