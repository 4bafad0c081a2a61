# SPDX-License-Identifier: Apache-2.0
"""The conformance suite on released trainers: its verdicts on several seeds of rows, how
long it takes green and red, and the cases of two ranks.

    python -m benchmarks.conformance                          trl, verl, openrlhf, skyrl
    python -m benchmarks.conformance verl --seeds 1 2         these runs alone
    python -m benchmarks.conformance trl --red                with a bug planted in it
    python -m benchmarks.conformance megatron skyrl --ranks   levels 4 and 5
    python -m benchmarks.conformance torchtune --seeds 0      of a checkout on PYTHONPATH
    python -m benchmarks.conformance plain                    no framework, eight seeds

Each run is one pytest of its own, as a framework's CI runs it. The figures go to
benchmarks/conformance.json, in place of those of the same run before; others stay. Where
docs/steps/suite has a framework's results, the run of seed 0 writes them anew. The exit
status is 1 where an unmodified trainer has a case that ends otherwise than its
list of known failures says.

Without a framework the loop of docs/howto/conformance.md trains: what its gradient
misses is rounding. Of the families with a recurrent state the record has its error and
what was allowed.

Times are CPU seconds of the process and its children, imports included: other work on
the machine disturbs them less than what one waits.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmarks import cpu
from docs import record
from tests.conformance.known_bugs import ADAPTERS, target
from tests.conformance.megatron_parallel import rank_errors
from tests.conformance.megatron_ranks import measure
from upref.conformance import CASES, Case, load_adapter, run
from upref.conformance.results import read_expected_failures
from upref.user_code.guard import one_thread
from upref.verify.group import on_loopback
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import place

HERE = Path(__file__).parent
FILE = HERE / "conformance.json"
SUITE = HERE.parent / "tests/conformance"
# two values, three values with the setting that they need, and three values without it
MEGATRON = ("Megatron", "MegatronPerToken", "MegatronThreeValues")
RELEASED = tuple(name for name in ADAPTERS if name != "torchtune")  # has no wheel
SEEDS = (0, 1, 2)
GREEN, RANKS = 3, 5  # levels
DEADLINE = 900  # seconds, of a case of ranks: other work may share the machine
SHOWN = HERE.parent / "docs/steps/suite"  # results of seed 0 that a page shows whole
PAGE = HERE.parent / "docs/howto/conformance.md"
RECURRENT = ("qwen3_next", "mamba2", "falcon_h1")
PLAIN_SEEDS = range(8)


def run_suite(
    name: str,
    adapter: str,
    seed: int,
    level: int,
    chosen: str = "",
    listed: bool = True,
) -> dict[str, Any]:
    """Run the suite in a process of its own.

    Args:
        name: of the framework.
        adapter: what --adapter takes.
        seed: of the rows.
        level: the highest one.
        chosen: what pytest's -k takes; "": every case.
        listed: whether the list of known failures holds.

    Returns:
        What the record holds of the run.

    Raises:
        RuntimeError: pytest wrote no results, because the framework cannot be imported
            for example.
    """
    expected = SUITE / f"{name}_xfails.toml"
    known = read_expected_failures(expected) if expected.exists() and listed else {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["--pyargs", "upref.conformance", "--adapter", adapter]
        command += ["--level", str(level), "--upref-seed", str(seed)]
        command += ["--upref-results", str(file), "--upref-deadline", str(DEADLINE)]
        if known:
            command += ["--upref-xfails", str(expected)]
        if chosen:
            command += ["-k", chosen]
        before = cpu.of_children()
        done = subprocess.run(
            command, capture_output=True, text=True, env=_environment(name), check=False
        )
        seconds = cpu.of_children() - before
        if not file.exists():
            raise RuntimeError(f"{adapter}: {(done.stdout + done.stderr)[-2000:]}")
        results = json.loads(file.read_text(encoding="utf-8"))
        shown = SHOWN / f"{name}.json"
        if level == GREEN and seed == 0 and listed and shown.exists():
            record.add(shown, f"python -m benchmarks.conformance {name}", results, [0])
    return {
        "adapter": results["adapter"],
        "suite": results["suite"],
        "level": level,
        "seed": seed,
        **_ends_of_cases(results["cases"], known.keys()),
        "cpu seconds": round(seconds, 1),
    }


def _ends_of_cases(
    cases: dict[str, dict[str, Any]], known: Collection[str]
) -> dict[str, Any]:
    """Return how the cases of a run ended.

    Args:
        cases: the results of the suite, by the id of the case.
        known: ids of the cases that are on the list of known failures.
    """
    counts = Counter(result["status"] for result in cases.values())
    known_failures, unexpected = [], []
    could_not_run, errors = {}, {}
    for case, result in cases.items():
        status = result["status"]
        is_bad = status in ("failed", "could not run")
        is_known = case in known
        if is_bad and is_known:
            known_failures.append(case)
        if status != "skipped" and is_bad != is_known:
            unexpected.append(case)
        if status == "could not run":
            could_not_run[case] = result["reason"]
        if "error" in result:
            errors[case] = float(f"{result['error']:.2g}")
    return {
        "counts": dict(sorted(counts.items())),
        "known failures": sorted(known_failures),
        "unexpected": sorted(unexpected),
        "could not run": could_not_run,
        "errors": errors,
    }


def run_plain(case: Case, seed: int) -> dict[str, Any]:
    """Run a case with the loop of the page, in this process.

    Args:
        case: one that the loop supports.
        seed: of the rows.

    Returns:
        The error of the gradient, what was allowed, and how the case ended.
    """
    source = re.search(r"```python\n(# adapter\.py\n.*?)```", PAGE.read_text(), re.S)
    assert source is not None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter.py").write_text(source[1], encoding="utf-8")
        loop = load_adapter(f"{folder}/adapter.py:Plain")
    outcome = run(loop, case, seed=seed, explain=False)
    assert outcome.report is not None
    return {
        "error": float(f"{outcome.report.error:.2g}"),
        "allowed": float(f"{outcome.report.tolerances['gradient, relative']:.2g}"),
        "status": str(outcome.status),
    }


def _environment(name: str) -> dict[str, str]:
    """The environment of the run; OpenRLHF lies in the folder that its audit makes."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    if name == "openrlhf":
        paths += place(name, framework(name).pin).paths
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def keep(name: str, run: dict[str, Any], file: Path) -> None:
    """Record a run, in place of the one of the same name.

    Args:
        name: KIND/RUN.
        run: what is kept of it.
        file: of the records.
    """
    command = shlex.join(["python", "-m", "benchmarks.conformance", *sys.argv[1:]])
    record.add(file, command, {name: run})


def _print(key: str, run: dict[str, Any]) -> None:
    """Print how the cases of a run ended, and those that ended otherwise than listed."""
    counts = ", ".join(f"{count} {end}" for end, count in run["counts"].items())
    print(f"{key}: {counts}; {run['cpu seconds']} CPU seconds", flush=True)
    if key.startswith("green"):
        for case in run["unexpected"]:
            print(f"    {case}: not as the list of known failures says")


def main() -> int:
    """Run the suite, and record each run; 1 where an unmodified trainer has a case that
    ends otherwise than listed.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names", nargs="*", choices=[*ADAPTERS, "megatron", "plain"], metavar="NAME"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--red", action="store_true", help="with a bug planted in it")
    parser.add_argument("--ranks", action="store_true", help="levels 4 and 5")
    parser.add_argument("--only", default="", help="of the cases of ranks, as -k takes")
    parser.add_argument(
        "--out", type=Path, default=FILE, metavar="FILE", help="where the runs are kept"
    )
    options = parser.parse_args()
    wrong = False
    for name in options.names or RELEASED:
        if name == "plain":
            wrong |= _plain(options.out)
            continue
        for part, key, arguments in _runs(name, options):
            found = run_suite(name, *arguments)
            keep(f"{part}/{key}", found, options.out)
            _print(f"{part}: {key}", found)
            wrong |= part == "green" and bool(found["unexpected"])
        if name == "megatron" and options.ranks and not options.only:
            os.environ |= on_loopback()
            errors = {way: float(f"{e:.2g}") for way, e in measure(rank_errors).items()}
            print(f"ranks: GPTModel: {errors}")
            keep("layers/GPTModel", {"errors": errors}, options.out)
    return int(wrong)


def _plain(file: Path) -> bool:
    """Record the loop of the page; whether a case of it did not pass."""
    wrong = False
    with one_thread():
        for family in RECURRENT:
            case = CASES[f"family/{family}"]
            runs = {str(seed): run_plain(case, seed) for seed in PLAIN_SEEDS}
            worst = max(runs.values(), key=lambda run: run["error"])
            print(f"{case.id}: {worst}", flush=True)
            keep(f"plain/{family}", {"seeds": runs}, file)
            wrong |= any(run["status"] != "passed" for run in runs.values())
    return wrong


def _runs(name: str, options: argparse.Namespace) -> Iterator[tuple[str, str, tuple]]:
    """The part of the record, the name of the run there, and what `run_suite` takes."""
    for kind in MEGATRON if name == "megatron" else (ADAPTERS[name],):
        adapter = target(name, kind)
        if options.red:
            broken = f"{SUITE}/broken_adapters.py:Broken{kind}"
            yield "red", kind, (broken, 0, GREEN, "", False)
        elif options.ranks:
            key = f"{kind}, {options.only}" if options.only else kind
            yield "ranks", key, (adapter, 0, RANKS, options.only or "ranks")
        else:
            for seed in options.seeds:
                yield "green", f"{kind}, seed {seed}", (adapter, seed, GREEN)


if __name__ == "__main__":
    sys.exit(main())
