# SPDX-License-Identifier: Apache-2.0
"""The command of a registered experiment: trains what is missing of a plan, and
reports.

The next runs depend on the finished ones: rates and coefficients come first, and each
cell is then trained at its own.
Stop it at any moment and start it again: finished runs are kept, begun ones go on from
their last checkpoint. Each
finished run is added to results/runs.jsonl at once. Exit status: 0 all ran, 1 some run
failed, 2 could not start, 130 interrupted.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from repro.mini import files
from repro.mini.registered import plan, report
from repro.mini.study import registration, results, suite
from upref.errors import InputError

# beside the plan's own files
DECIDE = ("registered/rule.py", "stale/rule.py", "train/halves.py")
OWN = ("plan.toml", "power.md", "runs.sha256")


def main(folder: Path, argv: list[str] | None = None) -> int:
    """The command line of the experiment in `folder`."""
    name = folder.name
    parser = argparse.ArgumentParser(
        prog=f"python -m repro.mini.{name}",
        description=(__doc__ or "").split("\n\n")[0],
    )
    parser.add_argument(
        "--hours",
        type=float,
        default=float("inf"),
        help="begin no new run after so many hours",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time (default 1)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=suite.ROOT / "repro" / "out" / name,
        help="folder of the runs",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=folder / "results",
        help="folder of what is to be committed",
    )
    parser.add_argument(
        "--list", action="store_true", help="what is finished, what comes next"
    )
    parser.add_argument(
        "--collect",
        action="store_true",
        help="take over the finished runs of --out, and report",
    )
    parser.add_argument(
        "--register",
        metavar="COMMIT",
        help="write registration.json, once, before any run",
    )
    args = parser.parse_args(argv)

    def take(p: plan.Plan) -> dict[str, results.Record]:
        """The records, with those of finished runs, whichever choice they make known."""
        known = results.load(args.results)
        while new := {
            s.key
            for s in p.reachable(known)
            if s.key not in known and results.status(args.out / s.key)
        }:
            known = results.collect(args.out, new, args.results)
        return known

    def work() -> int:
        p = plan.load(folder / "plan.toml")
        if args.register:
            return register(p, args.register)
        if args.list:
            print(report.progress(p, results.load(args.results)))
            return 0
        if args.collect:
            report.write(p, take(p), args.results)
            print(f"wrote {args.results / 'report.md'}")
            return 0
        if args.jobs < 1 or args.hours <= 0:
            raise InputError("--jobs must be at least 1 and --hours more than 0.")
        if not registration.load(folder):
            raise InputError(
                f"{folder / 'registration.json'} is not there: register the plan before the first run."
            )
        return train(p)

    def train(p: plan.Plan) -> int:
        """Run stage after stage until all is done, a run fails or the hours are over."""
        end = time.monotonic() + 3600 * args.hours
        failures: list[str] = []
        with suite.alone(args.out) as lock:
            try:
                while (
                    (todo := p.todo(take(p)))
                    and not failures
                    and (left := end - time.monotonic()) > 0
                ):
                    known = results.load(args.results)
                    hours = left / 3600
                    failures = suite.run_all(
                        dict(todo),
                        args.out,
                        args.jobs,
                        lock,
                        hours,
                        known=known,
                        ended=lambda: take(p),
                    )
            finally:
                report.write(p, take(p), args.results)
        for sentence in failures:
            print(sentence, file=sys.stderr)
        print(report.progress(p, results.load(args.results)))
        return 1 if failures else 0

    return suite.said(work, name)


def digests(folder: Path) -> dict[str, str]:
    """Path below repro/mini -> sha256 of every file that decides what the experiment
    is.
    """
    root = folder.parent
    paths = [*(root / name for name in DECIDE), *(folder / name for name in OWN)]
    return {path.relative_to(root).as_posix(): files.sha256(path) for path in paths}


def register(p: plan.Plan, commit: str) -> int:
    """Write registration.json: the commit that holds plan and rule, and the digest of
    each file.
    """
    path = p.folder / "registration.json"
    if path.exists() or results.load(p.results):
        raise InputError(
            f"{p.folder} is registered or has runs already: a registration is made once, before any run."
        )
    text = json.dumps({"commit": commit, "sha256": digests(p.folder)}, indent=1) + "\n"
    files.write_atomically(path, text.encode())
    print(f"wrote {path}")
    return 0
