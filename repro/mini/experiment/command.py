# SPDX-License-Identifier: Apache-2.0
"""Trains what is missing of an experiment, and reports.

The next runs may depend on the finished ones: rates and coefficients come first, and
each cell is then trained at its own. Stop it at any moment and start it again: finished
runs are kept, begun ones go on from their last checkpoint. Each finished run is added to
results/runs.jsonl at once, and its checkpoints are deleted. Exit status: 0 all ran, 1
some run failed or something is not what was registered, 2 could not start, 130
interrupted.
"""

import json
import sys
import time
from pathlib import Path

from repro import Parser
from repro.mini.experiment import (
    page,
    power,
    records,
    registration,
    standing,
    suite,
    verify,
)
from repro.mini.experiment.plan import Plan, load, paths
from repro.mini.experiment.questions import RunRecord
from repro.mini.train import loop
from upref.errors import InputError


def _parser() -> Parser:
    """Return the parser of the options."""
    parser = Parser(
        prog="python -m repro.mini.experiment",
        description=(__doc__ or "").split("\n\n")[0],
    )
    add = parser.add_argument
    add("name", nargs="?", help="of an experiment; without it they are listed")
    add("--list", action="store_true", help="what is finished, what comes next")
    add("--collect", action="store_true", help="take over finished runs, and report")
    add("--power", metavar="FROM", help="of its looks, by the spread in another one")
    add("--register", metavar="COMMIT", help="once, before any run")
    add("--verify", action="store_true", help="is all as registered? trains nothing")
    add("--standing", action="store_true", help="every claim, as JSON for a program")
    add("--hours", type=float, default=float("inf"), help="then begin no new run")
    add("--jobs", type=int, default=1, help="runs at a time (default 1)")
    add("--device", default="cpu", help="cpu (default), or a GPU as torch names it")
    add("--out", type=Path, help="folder of the runs")
    add("--results", type=Path, help="folder of what is to be committed")
    return parser


@suite.exit_status_of("experiment")
def main(argv: list[str] | None = None) -> int:
    """Do what the options ask for, the first of them that is given, in this order:
    --verify, --standing, a list where there is no name, --power, --register, --list,
    --collect; else train.

    Returns:
        The exit status: 0, or 1 if a run failed or something differs.

    Raises:
        InputError: the options or the plan do not allow it.
    """
    args = _parser().parse_args(argv)
    if args.verify:
        return verify.main([args.name] if args.name else list(paths()))
    if args.standing:
        # the caller reads the last line: libraries may print when they are loaded
        print(json.dumps(standing.everything(), ensure_ascii=False))
        return 0
    if not args.name:
        for name in paths():
            suite.say(f"{name:28} {load(name).question}", markup=False)
        return 0
    plan = load(args.name)
    results: Path = args.results or plan.results
    out: Path = args.out or suite.OUT / args.name
    if args.power:
        power.write(plan, load(args.power))
        suite.say(f"wrote power.md and runs.sha256 in {plan.folder}", markup=False)
        return 0
    if args.register:
        suite.say(f"wrote {registration.register(plan, args.register)}")
        return 0
    if args.list:
        suite.say(plan.progress(records.load(results)), markup=False)
        return 0
    if _is_closed(plan) and results == plan.results:
        raise InputError(
            f"{plan.name} is finished, and its report stays as it is: choose another folder with --results."
        )
    if args.collect:
        page.write(plan, _take(plan, out, results), results)
        suite.say(f"wrote {results / plan.page_name}")
        return 0
    if args.jobs < 1 or args.hours <= 0:
        raise InputError("--jobs must be at least 1 and --hours more than 0.")
    if plan.stopping and not registration.load(plan.folder):
        raise InputError(
            f"{plan.folder / 'registration.json'} is not there: register the plan before the first run."
        )
    loop.require_device(args.device)
    return _train(plan, out, results, args.jobs, args.hours, args.device)


def _is_closed(plan: Plan) -> bool:
    """Return whether all runs of a plan are in its committed records, so that its
    report is final. False for a plan that reads other plans' runs.
    """
    known = records.load(plan.results)
    return bool(known) and not plan.others and not plan.todo(known)


def _take(plan: Plan, out: Path, results: Path) -> dict[str, RunRecord]:
    """Return the records by name, with those of finished runs under `out` added to
    `results`.

    A new record may make a choice known, and so other runs reachable: repeat until
    there is none.
    """
    known = records.load(results)
    while new := {
        run.key
        for run in plan.reachable(known)
        if run.key not in known and records.status(out / run.key)
    }:
        known = records.collect(out, new, results)
    return known


def _train(
    plan: Plan, out: Path, results: Path, jobs: int, hours: float, device: str
) -> int:
    """Train stage after stage until all is done, a run fails or the hours are over.

    In any case, write the page at the end; print a sentence for each failure, and the
    progress.

    Returns:
        1 if a run failed, else 0.
    """
    end = time.monotonic() + 3600 * hours
    failures: list[str] = []

    def take() -> dict[str, RunRecord]:
        """Take the records, and delete the checkpoints that nothing reads any more."""
        known = _take(plan, out, results)
        suite.delete_checkpoints(out, known)
        return known

    with suite.alone(out) as lock:
        try:
            while todo := plan.todo(take()):
                left = (end - time.monotonic()) / 3600
                if failures or left <= 0:
                    break
                failures = suite.run_all(
                    dict(todo),
                    out,
                    jobs,
                    lock,
                    left,
                    device=device,
                    ended=take,
                )
        finally:
            page.write(plan, _take(plan, out, results), results)
    for sentence in failures:
        print(sentence, file=sys.stderr)
    suite.say(plan.progress(records.load(results)), markup=False)
    return 1 if failures else 0
