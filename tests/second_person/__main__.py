# SPDX-License-Identifier: Apache-2.0
"""Print what the set showed at first sight; with --run, what it shows today too.

`python -m tests.second_person` reads first_sight.json. `--run` takes minutes.
"""

import argparse
import re
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import upref
from docs import record
from tests.second_person import critics, distillation, kept, tokens
from tests.second_person.case import CASES, Case
from upref import markdown
from upref.verify.finding import NO_CAUSE

MODULES = (tokens, kept, distillation, critics)
PARTS = tuple(module.__name__.rpartition(".")[2] for module in MODULES)
# of each case: whether the verdict was as meant; of a wrong one also what its first
# cause said, and whether a reader judged that true, empty, false or none
FIRST_SIGHT: dict[str, Any] = record.rows(Path(__file__).with_name("first_sight.json"))


def report(case: Case) -> Any:
    """Return what upref answers about a case."""
    agg = {"agg": case.agg} if case.agg else {}
    match case.part:
        case "tokens":
            return upref.check_advantages(case.function, case.target, **case.hp)
        case "kept":
            return upref.check(case.function, case.target, **agg, **case.hp)
        case "distillation":
            check = upref.check_distillation
            return check(case.function, case.target, **agg, **case.hp)
    return upref.check_value(case.function, case.target, **agg, **case.hp)


def run(case: Case) -> dict[str, Any]:
    """Run one case.

    Returns:
        as_meant: whether the verdict is the true one. cause: of a wrong function "true"
        if its first cause has the words of a true one, else "other" or "none". said:
        that cause. text: the report. seconds: of the CPU.
    """
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = report(case)
    except upref.InputError as error:
        return {"as_meant": False, "cause": "none", "said": "", "text": str(error)}
    said = got.failures[0].cause if got.failures else ""
    is_named = bool(said) and said != NO_CAUSE.words
    is_true = is_named and re.search(case.cause, said) is not None
    return {
        "as_meant": bool(got) == (not case.fault),
        "cause": "true" if is_true else "other" if is_named else "none",
        "said": said,
        "text": str(got),
        "seconds": round(time.process_time() - start, 1),
    }


def table(results: dict[str, Any]) -> str:
    """Return the table of results by id, as Markdown."""
    rows = []
    for part in PARTS:
        of_part = [case for case in CASES.values() if case.part == part]
        wrong = [results[case.id] for case in of_part if case.fault]
        right = [results[case.id] for case in of_part if not case.fault]
        causes = Counter(result["cause"] for result in wrong)
        rows.append(
            [
                part,
                f"{sum(result['as_meant'] for result in wrong)} of {len(wrong)}",
                ", ".join(f"{n} {word}" for word, n in causes.items()),
                f"{sum(result['as_meant'] for result in right)} of {len(right)}",
            ]
        )
    return markdown.table(["part", "wrong: fail", "causes", "right: agree"], rows)


def main() -> None:
    """Print the table of first sight; with --run, that of today."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.second_person", description=__doc__
    )
    parser.add_argument("--run", action="store_true", help="run the cases")
    args = parser.parse_args()
    print("first sight", table(FIRST_SIGHT), sep="\n")
    if args.run:
        results = {name: run(case) for name, case in CASES.items()}
        print("today", table(results), sep="\n")


if __name__ == "__main__":
    main()
