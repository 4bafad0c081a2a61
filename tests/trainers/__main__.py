# SPDX-License-Identifier: Apache-2.0
"""Check the loops in a folder of checkouts: `python -m tests.trainers FOLDER [NAME...]`.

FOLDER holds a checkout of each repository, in a folder of its name. Nothing is fetched.
With --record the table of docs/thirteen-trainers.md gets what was found.
"""

import argparse
import inspect
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from docs import record
from docs.thirteen_trainers import VERDICTS, readings
from tests.trainers.cases import CASES, Case
from upref.step import check_step

SEEDS = (0, 1, 2)
KEYS = ("repository", "variant", "objective")


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, or of a file `.commit` beside an exported tree."""
    if (file := folder / ".commit").exists():
        return file.read_text(encoding="utf-8").strip()
    git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(
        git, capture_output=True, text=True, check=True
    ).stdout.strip()


def glue_lines(function: Any) -> int:
    """The lines of a glue function that are not blank."""
    return sum(bool(x.strip()) for x in inspect.getsource(function).splitlines())


def found(one: Case, folder: Path, seed: int) -> dict[str, Any]:
    """Return the verdict of one case on one draw of rows."""
    torch.manual_seed(0)
    start = time.process_time()
    try:
        step, model = one.step_and_model(folder)
        report = check_step(step, model, one.objective, seed=seed, **one.options)
    except Exception as error:
        return {
            "refused": f"{type(error).__name__}: {error}",
            "seconds": time.process_time() - start,
        }
    causes = [f.cause for f in report.failures if f.cause]
    return {
        "agrees": bool(report),
        "error": report.error,
        "causes": causes,
        "seconds": time.process_time() - start,
    }


def is_expected(one: Case, its: dict[str, Any]) -> bool:
    """Return whether the verdict is the one that was read in the code."""
    if "refused" in its:
        return False
    if not one.found:
        return its["agrees"]
    return not its["agrees"] and one.found in " ".join(its["causes"])


def misquoted(folder: Path) -> list[str]:
    """Return the quotes of the page that do not stand in the line that it names."""
    out = []
    for read in readings():
        checkout = folder / read["repository"].split("/")[1]
        for file, line, text in read["quotes"] if checkout.is_dir() else ():
            path = checkout / file
            there = path.read_text(encoding="utf-8").splitlines()[line - 1]
            if text not in there:
                out.append(f"{path}:{line} has no {text!r}")
    return out


def merged(new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was recorded, with what ran in its place, in the order of the cases."""
    found = {tuple(x[k] for k in KEYS): x for x in [*record.rows(VERDICTS), *new]}
    keys = [(x.repository, x.variant, x.objective) for x in CASES]
    return [found[key] for key in keys if key in found]


def without_seconds(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict without its time, which differs from run to run."""
    return {k: v for k, v in verdict.items() if k != "seconds"}


def main(args: list[str]) -> int:
    """Print one line a case and seed; 1 where a verdict is not the expected one."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="repositories; all unless named")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(args)
    false = misquoted(options.folder)
    if false:
        print("\n".join(false))
    new, wrong = [], len(false)
    for one in CASES:
        name = one.repository.split("/")[1]
        folder = options.folder / name
        is_named = not options.names or name in options.names
        if not is_named or not folder.is_dir():
            continue
        verdicts = []
        for seed in options.seeds:
            its = found(one, folder.resolve(), seed)
            verdicts.append(its)
            mark = "      "
            if not is_expected(one, its):
                mark = "WRONG "
                wrong += 1
            said = its.get("refused") or "; ".join(its["causes"]) or "agrees"
            where = f"{name}, {one.variant}, as {one.objective}, seed {seed}"
            print(f"{mark}{where} ({its['seconds']:.1f} s): {said}", flush=True)
        new.append(
            {
                "repository": one.repository,
                "commit": commit_of(folder),
                "glue": glue_lines(one.glue),
                "variant": one.variant,
                "objective": one.objective,
                "verdicts": [without_seconds(its) for its in verdicts],
            }
        )
    if options.record:
        command = "python -m tests.trainers FOLDER --record"
        record.add(VERDICTS, command, merged(new), options.seeds)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
