# SPDX-License-Identifier: Apache-2.0
"""What upref says of everything it is tested on, to compare two versions of it.

    python -m benchmarks.verdicts dump FILE [PART ...] [--one-in N]
    python -m benchmarks.verdicts compare OLD NEW

`dump` adds the verdicts of the parts, or of all of them, to a JSON file; a part that it
has is not run again. --one-in N runs a sample: the subjects whose names have a checksum
that N divides, the same ones in every version. `compare` prints each subject that is missing, new or judged
otherwise; its status is 1 where a verdict was lost or changed.
"""

import argparse
import importlib
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import upref
from upref import advantages, hidden, kl
from upref.files import write_atomically
from upref.identification.identification import Identification
from upref.verify.report import Report
from upref_frameworks import audits, names

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
Subjects = Iterator[tuple[str, Callable[[], Any]]]  # a name, and what makes its verdict


def as_data(result: Any) -> Any:
    """Return the verdict that a result has, as data for a JSON file.

    Of a report: whether it agrees, which oracles failed, and for which cause. Of an
    identification: its answer. Anything else is data already.
    """
    if isinstance(result, Report):
        return {
            "ok": bool(result),
            "failures": sorted({f"{f.oracle}: {f.cause}" for f in result.failures}),
            "notes": sorted({f.oracle for f in result.notes}),
        }
    if isinstance(result, Identification):
        return {
            "ok": bool(result),
            "says": str(result).partition("\n")[0],
            "names": sorted(match.name for match in result.matches),
        }
    return result


def constant(verdict: Any) -> Callable[[], Any]:
    """Return a function that returns a verdict which is there already."""
    return lambda: verdict


def cases(*kinds: str) -> Subjects:
    """Yield the rows of the table of tests of these kinds."""
    for case in importlib.import_module("tests.support.cases.table").ALL:
        if case.kind in kinds:
            yield f"{case.file}: {case.name} {case.objective} {case.hp}", case.judged


def objectives() -> Subjects:
    """Yield the check of every objective against itself."""
    for name in upref.names():
        yield name, partial(upref.check, upref.get(name), name)


def losses() -> Subjects:
    """Yield the losses of the table of tests."""
    return cases("loss")


def estimators() -> Subjects:
    """Yield the estimators of advantages and KL of the table of tests, then the check
    of every KL estimator as each of them.
    """
    yield from cases("advantages", "kl")
    for name in kl.ESTIMATORS:
        for estimator in kl.ESTIMATORS.values():
            subject = f"{estimator.__name__} as {name}"
            yield subject, partial(upref.check_kl, estimator, name)


def logprobs() -> Subjects:
    """Yield the log-probability functions of the table of tests."""
    return cases("logprobs")


def identify() -> Subjects:
    """Yield identifications: of the losses of the table of tests, of every objective,
    and of the right losses that checks once judged wrong.
    """
    yield from cases("box")
    for name in upref.names():
        yield name, partial(upref.identify, upref.get(name))
    for loss in importlib.import_module("tests.support.zoo.blind_spots").RIGHT:
        subject = f"{loss} {loss.objective} {loss.hp}"
        yield subject, partial(upref.identify, loss.function)


class Outcomes:
    """A plug-in of pytest that keeps each test's outcome."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.of[report.nodeid] = report.outcome


def laws() -> Subjects:
    """Run tests/core/test_objectives.py, which applies the laws of tests/support/laws.py to
    each objective; yield each of its tests with the outcome.
    """
    outcomes = Outcomes()
    file = str(ROOT / "tests/core/test_objectives.py")
    pytest.main(["-q", "-x", "-p", "no:cacheprovider", file], plugins=[outcomes])
    for test, outcome in outcomes.of.items():
        yield test, constant(outcome)


def oracles() -> Subjects:
    """Run each kind of check once; yield every oracle with its outcome."""
    group_norm = advantages.get("group_norm")
    reports = {
        "check": upref.check(upref.get("dapo"), "dapo"),
        "advantages": upref.check_advantages(group_norm, "group_norm"),
        "kl": upref.check_kl(kl.k3, "k3"),
        "logprobs": upref.check_logprobs(hidden.token_log_probs),
    }
    for part, report in reports.items():
        for oracle, outcome in report.oracles.items():
            yield f"{part}: {oracle}", constant(outcome)


def ledgers() -> Subjects:
    """Yield every entry of the ledger of every framework, with its facts."""
    for name in names():
        for entry in audits.read(name):
            evidence = [str(x) for x in entry.evidence]
            facts = [entry.status, entry.severity, entry.change, entry.reason, evidence]
            yield f"{name}: {entry.key}", constant(facts)


def frameworks() -> Subjects:
    """Yield the audit of every framework; one that cannot be fetched gets its error as
    the verdict.
    """
    for name in names():
        yield name, partial(audit_as_data, name)


OF_AN_AUDIT = (
    "ok",
    "unaudited",
    "against_ledger",
    "out_of_scope",
    "defaults",
    "remarks",
)
OF_A_ROW = ("label", "promise", "setting", "micro_batches", "verdict")


def audit_as_data(name: str) -> dict[str, Any]:
    """Audit a framework; return its verdicts and reasons without numbers."""
    audit = json.loads(audits.audit(name).json())
    rows = []
    for row in audit["rows"]:
        reasons = [words for words, _ in row["reasons"]]
        rows.append([*(row[key] for key in OF_A_ROW), reasons])
    return {"rows": rows} | {key: audit[key] for key in OF_AN_AUDIT}


def mutants() -> Subjects:
    """Yield the first mutants of every configuration, each with the verdict on it."""
    losses_module = importlib.import_module("tests.support.mutants.losses")
    scratch = Path(tempfile.mkdtemp())  # nothing is kept from one version to the next

    def judge(mutant: Any) -> Any:
        judged = losses_module.judged(mutant, scratch, 0, large=0, few=20)
        return judged.get("quick") if judged else None

    for mutant in losses_module.subjects(300, 0):
        name = f"{mutant.config} {mutant.style} {mutant.what} {mutant.key}"
        yield name, partial(judge, mutant)


PARTS = {
    f.__name__: f
    for f in (
        objectives,
        losses,
        estimators,
        logprobs,
        identify,
        laws,
        oracles,
        ledgers,
        frameworks,
        mutants,
    )
}


def verdict(make: Callable[[], Any]) -> Any:
    """Return the verdict that the function makes, or which error it raises."""
    try:
        return as_data(make())
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def drawn(name: str, one_in: int) -> bool:
    """Return whether this subject is in the sample."""
    return zlib.crc32(name.encode()) % one_in == 0


def record(file: str, *parts: str, one_in: int = 1) -> int:
    """Add the verdicts of the parts to a JSON file; return the exit status, 0.

    Args:
        file: the file. A part that it has is not run again.
        parts: of PARTS; all of them unless given.
        one_in: which share of the subjects is run.
    """
    path = Path(file)
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    torch.set_num_threads(1)
    for part in parts or PARTS:
        if part in recorded:
            continue
        recorded[part] = {
            name: verdict(make) for name, make in PARTS[part]() if drawn(name, one_in)
        }
        text = json.dumps(recorded, indent=1, ensure_ascii=False, default=str)
        write_atomically(path, text)
        print(f"{part}: {len(recorded[part])} verdicts", flush=True)
    return 0


def compare(old_file: str, new_file: str) -> int:
    """Print what differs between two files of verdicts.

    Returns:
        1 if a verdict was lost or changed, else 0.
    """
    old = json.loads(Path(old_file).read_text(encoding="utf-8"))
    new = json.loads(Path(new_file).read_text(encoding="utf-8"))
    lost = 0
    for part in old.keys() & new.keys():
        before, after = old[part], new[part]
        gone = [name for name in before if name not in after]
        added = [name for name in after if name not in before]
        in_both = [name for name in before if name in after]
        changed = [name for name in in_both if before[name] != after[name]]
        lost += len(changed) + len(gone)
        print(
            f"{part}: {len(before)} verdicts, {len(changed)} changed, {len(gone)} gone, {len(added)} new"
        )
        for name in gone:
            print(f"  gone: {name}")
        for name in changed:
            print(f"  {name}\n    before {before[name]}\n    after  {after[name]}")
    for part in old.keys() ^ new.keys():
        print(f"{part}: in one file only, not compared")
    return int(lost > 0)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the two verbs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdicts", description=__doc__.split("\n\n")[0]
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    dump = verbs.add_parser(
        "dump",
        help="add the verdicts of the parts to a JSON file; a part that it has is kept",
    )
    dump.add_argument("file")
    dump.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"of {', '.join(PARTS)}; all by default",
    )
    dump.add_argument(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run about one subject in so many, the same ones in every version",
    )
    comparison = verbs.add_parser(
        "compare",
        help="print what is missing, new or judged otherwise; status 1 where one was lost or changed",
    )
    comparison.add_argument("old")
    comparison.add_argument("new")
    return parser


def main() -> int:
    """Run the verb; return the exit status."""
    parser = make_parser()
    args = parser.parse_args()
    if args.verb == "compare":
        return compare(args.old, args.new)
    if unknown := sorted(set(args.parts) - PARTS.keys()):
        parser.error(f"there is no part {unknown[0]}: choose of {', '.join(PARTS)}")
    return record(args.file, *args.parts, one_in=args.one_in)


if __name__ == "__main__":
    sys.exit(main())
