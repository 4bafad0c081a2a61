# SPDX-License-Identifier: Apache-2.0
"""Exact answers about objectives, without a sample and without a seed: see
repro/exact/README.md.

Writes report.md, results.json and one SVG an experiment. Exit status: 0 done, 2 could
not run (one sentence on stderr), 130 interrupted.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

import torch

from repro import Parser
from repro.exact import result
from repro.exact.flow import arm
from upref import interrupt
from upref.errors import InputError

EXPERIMENTS = [
    "rise",
    "drawn",
    "mass",
    "entropy",
    "coverage",
    "fixed_points",
    "collapse",
    "strings",
]
OUT = Path(__file__).parent / "results"


def main(argv: list[str] | None = None) -> int:
    p = Parser(
        "python -m repro.exact",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "experiments",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"{', '.join(EXPERIMENTS)}; none: all of them",
    )
    p.add_argument(
        "--arms",
        nargs="+",
        metavar="NAME[:K=V,...]",
        help="objectives of the registry in place of each experiment's own, e.g. dapo:eps_high=1 'up(sapo)'",
    )
    p.add_argument(
        "--out",
        type=Path,
        help=f"folder to write to (default with all and no --arms: {OUT.name} beside "
        "the code; else repro/out/exact)",
    )
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    interrupt.then("nothing was written")
    try:
        results = []
        for name in chosen(args.experiments):
            module, start = (
                importlib.import_module(f"repro.exact.experiments.{name}"),
                time.perf_counter(),
            )
            results.append(
                module.run([arm(a) for a in dict.fromkeys(args.arms or module.ARMS)])
            )
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        folder = args.out or (
            OUT
            if not args.experiments and not args.arms
            else OUT.parents[1] / "out" / "exact"
        )
        result.write(results, folder)
        print(f"done: {folder / 'report.md'}")
        return 0
    except InputError as e:
        print(f"{p.prog}: {e}", file=sys.stderr)
    except OSError as e:
        print(
            f"{p.prog}: cannot write {e.filename or 'the results'}: {e.strerror or e}.",
            file=sys.stderr,
        )
    return 2


def chosen(names: list[str]) -> list[str]:
    for n in names:
        if n not in EXPERIMENTS:
            raise InputError(
                f"there is no experiment named {n!r}: choose from {', '.join(EXPERIMENTS)}."
            )
    return list(dict.fromkeys(names)) or EXPERIMENTS


if __name__ == "__main__":
    sys.exit(main())
