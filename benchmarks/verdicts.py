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
from pathlib import Path
from typing import Any

import pytest
import torch

import upref
from upref import advantages, hidden, kl
from upref.files import write_atomically
from upref.identification.identification import Identification
from upref.verify.report import Report
from upref_frameworks import audits

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
Subjects = Iterator[tuple[str, Callable[[], Any]]]  # a name, and what makes its verdict


def said(x: Any) -> Any:
    """Of a report: whether it agrees, and by which oracle and for which cause not; of
    an identity, its answer.
    """
    if isinstance(x, Report):
        return {
            "ok": bool(x),
            "failures": sorted({f"{f.oracle}: {f.cause}" for f in x.failures}),
            "notes": sorted({f.oracle for f in x.notes}),
        }
    if isinstance(x, Identification):
        return {
            "ok": bool(x),
            "says": str(x).partition("\n")[0],
            "names": sorted(m.name for m in x.matches),
        }
    return x


def cases(*kinds: str) -> Subjects:
    """The rows of the table of tests of these kinds."""
    for c in importlib.import_module("tests.support.cases.table").ALL:
        if c.kind in kinds:
            yield f"{c.file}: {c.name} {c.objective} {c.hp}", c.judged


def objectives() -> Subjects:
    """Every objective against itself."""
    for name in upref.names():
        yield name, lambda name=name: upref.check(upref.get(name), name)


def losses() -> Subjects:
    return cases("loss")


def estimators() -> Subjects:
    yield from cases("advantages", "kl")
    for fn, name in (
        (f, k) for k, f in kl.ESTIMATORS.items() for f in kl.ESTIMATORS.values()
    ):
        yield (
            f"{fn.__name__} as {name}",
            lambda fn=fn, name=name: upref.check_kl(fn, name),
        )


def logprobs() -> Subjects:
    return cases("logprobs")


def identify() -> Subjects:
    yield from cases("box")
    for name in upref.names():
        yield name, lambda name=name: upref.identify(upref.get(name))
    for s in importlib.import_module("tests.support.zoo.blind_spots").RIGHT:
        yield f"{s} {s.objective} {s.hp}", lambda s=s: upref.identify(s.function)


class Outcomes:
    """A plug-in of pytest that keeps each test's outcome."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.of[report.nodeid] = report.outcome


def laws() -> Subjects:
    """Each law of tests/support/laws.py on each objective."""
    kept = Outcomes()
    pytest.main(
        [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            str(ROOT / "tests/core/test_objectives.py"),
        ],
        plugins=[kept],
    )
    yield from ((k, lambda v=v: v) for k, v in kept.of.items())


def oracles() -> Subjects:
    """Every oracle of every check, by its name."""
    report = upref.check(upref.get("dapo"), "dapo")
    yield from ((f"check: {k}", lambda v=v: v) for k, v in report.oracles.items())
    ran = {
        "advantages": upref.check_advantages(
            advantages.get("group_norm"), "group_norm"
        ),
        "kl": upref.check_kl(kl.k3, "k3"),
        "logprobs": upref.check_logprobs(hidden.token_log_probs),
    }
    yield from (
        (f"{part}: {k}", lambda v=v: v)
        for part, r in ran.items()
        for k, v in r.oracles.items()
    )


def ledgers() -> Subjects:
    for name in audits.frameworks():
        for e in audits.read(name):
            yield (
                f"{name}: {e.key}",
                lambda e=e: [
                    e.status,
                    e.severity,
                    e.change,
                    e.reason,
                    [str(x) for x in e.evidence],
                ],
            )


def frameworks() -> Subjects:
    """The audit of every framework that is here or can be fetched."""

    whole = ("ok", "unaudited", "against_ledger", "out_of_scope", "defaults", "remarks")
    own = ("label", "promise", "setting", "micro_batches", "verdict")

    def rows(name: str) -> Any:
        a = json.loads(audits.audit(name).json())
        each = [
            [*(r[k] for k in own), [words for words, _ in r["reasons"]]]
            for r in a["rows"]
        ]
        return {"rows": each, **{k: a[k] for k in whole}}

    yield from ((name, lambda name=name: rows(name)) for name in audits.frameworks())


def mutants() -> Subjects:
    """The first of the mutants of every configuration, truth and verdict."""
    run = importlib.import_module("tests.support.mutants.losses")
    scratch = Path(tempfile.mkdtemp())  # nothing is kept from one version to the next
    for s in run.subjects(300, 0):
        name = f"{s.config} {s.style} {s.what} {s.key}"
        yield (
            name,
            lambda s=s: (run.judged(s, scratch, 0, large=0, few=20) or {}).get("quick"),
        )


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
    """What it makes, or which error it raises."""
    try:
        return said(make())
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def drawn(name: str, one_in: int) -> bool:
    """Whether this subject is in the sample."""
    return zlib.crc32(name.encode()) % one_in == 0


def record(file: str, *parts: str, one_in: int = 1) -> int:
    path = Path(file)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    torch.set_num_threads(1)
    for part in parts or PARTS:
        if part not in known:
            known[part] = {
                name: verdict(make)
                for name, make in PARTS[part]()
                if drawn(name, one_in)
            }
            write_atomically(
                path, json.dumps(known, indent=1, ensure_ascii=False, default=str)
            )
            print(f"{part}: {len(known[part])} verdicts", flush=True)
    return 0


def compare(old: str, new: str) -> int:
    a, b = (json.loads(Path(x).read_text(encoding="utf-8")) for x in (old, new))
    lost = 0
    for part in a.keys() & b.keys():
        x, y = a[part], b[part]
        changed = [k for k in x if k in y and x[k] != y[k]]
        gone, added = [k for k in x if k not in y], [k for k in y if k not in x]
        lost += len(changed) + len(gone)
        print(
            f"{part}: {len(x)} verdicts, {len(changed)} changed, {len(gone)} gone, {len(added)} new"
        )
        for k in gone:
            print(f"  gone: {k}")
        for k in changed:
            print(f"  {k}\n    before {x[k]}\n    after  {y[k]}")
    for part in a.keys() ^ b.keys():
        print(f"{part}: in one file only, not compared")
    return int(lost > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdicts", description=__doc__.split("\n\n")[0]
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser(
        "dump",
        help="add the verdicts of the parts to a JSON file; a part that it has is kept",
    )
    one.add_argument("file")
    one.add_argument(
        "parts",
        nargs="*",
        metavar="part",
        help=f"of {', '.join(PARTS)}; all by default",
    )
    one.add_argument(
        "--one-in",
        type=int,
        default=1,
        metavar="N",
        help="run about one subject in so many, the same ones in every version",
    )
    two = verbs.add_parser(
        "compare",
        help="print what is missing, new or judged otherwise; status 1 where one was lost or changed",
    )
    two.add_argument("old")
    two.add_argument("new")
    args = parser.parse_args()
    if unknown := sorted(set(getattr(args, "parts", ())) - PARTS.keys()):
        parser.error(f"there is no part {unknown[0]}: choose of {', '.join(PARTS)}")
    return (
        record(args.file, *args.parts, one_in=args.one_in)
        if args.verb == "dump"
        else compare(args.old, args.new)
    )


if __name__ == "__main__":
    sys.exit(main())
