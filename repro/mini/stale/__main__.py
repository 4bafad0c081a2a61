# SPDX-License-Identifier: Apache-2.0
"""Trains what is missing of the experiment on stale data, and reports:
`python -m repro.mini.stale` (-h for options).

The next runs depend on the finished ones: rates come first, and each cell is then
trained at its own. Stop it at any
moment and start it again: finished runs are kept, begun ones go on from their last
checkpoint. Each finished run is
added to repro/mini/stale/results/runs.jsonl at once. Exit status: 0 all ran, 1 some run
failed, 2 could not start, 130 interrupted.
"""

import argparse
import sys
import time
from pathlib import Path

from repro.mini.stale import design, report
from repro.mini.study import results, suite
from upref.errors import InputError

OUT = suite.ROOT / "repro" / "out" / "stale"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m repro.mini.stale", description=__doc__.split("\n\n")[0]
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
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the runs")
    parser.add_argument(
        "--results",
        type=Path,
        default=design.RESULTS,
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
    args = parser.parse_args(argv)
    d = design.load()

    def take() -> dict[str, results.Record]:
        """The records, with those of finished runs, whichever cell's rate they make
        known.
        """
        known = results.load(args.results)
        while new := {
            s.key
            for s in d.reachable(known)
            if s.key not in known and results.status(args.out / s.key)
        }:
            known = results.collect(args.out, new, args.results)
        return known

    def work() -> int:
        if args.list:
            print(report.progress(d, results.load(args.results)))
            return 0
        if args.collect:
            report.write(d, take(), args.results)
            print(f"wrote {args.results / 'report.md'}")
            return 0
        if args.jobs < 1 or args.hours <= 0:
            raise InputError("--jobs must be at least 1 and --hours more than 0.")
        end = time.monotonic() + 3600 * args.hours
        failures: list[str] = []
        with suite.alone(args.out) as lock:
            try:
                while (
                    (todo := d.todo(take()))
                    and not failures
                    and (left := end - time.monotonic()) > 0
                ):
                    known = results.load(args.results)
                    wanted = dict(todo)
                    failures = suite.run_all(
                        wanted,
                        args.out,
                        args.jobs,
                        lock,
                        left / 3600,
                        known=known,
                        ended=take,
                    )
            finally:
                report.write(d, take(), args.results)
        for sentence in failures:
            print(sentence, file=sys.stderr)
        print(report.progress(d, results.load(args.results)))
        return 1 if failures else 0

    return suite.said(work, "stale")


if __name__ == "__main__":
    sys.exit(main())
