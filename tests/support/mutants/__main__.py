# SPDX-License-Identifier: Apache-2.0
"""The whole run: see the package. It goes on where it was cut off; --write puts the
figure and the survivors beside it.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.mutants import figure, naming, run


def main() -> int:
    """Run the mutants and the rewritings, print what the checker misjudges, and keep
    every answer in the scratch folder; return 0.

    With --write, run nothing: write the page (and beside figure.md the survivors) from
    the answers that are kept. The first part of a run in parts puts some subjects to
    `identify` too. It prints a line with its CPU seconds at every hundredth row.
    """
    take = argparse.ArgumentParser(
        prog="python -m tests.support.mutants", description=__doc__
    )
    take.add_argument("--mutants", type=int, default=5900)
    take.add_argument("--rewritings", type=int, default=1050)
    take.add_argument("--seed", type=int, default=0)
    take.add_argument("--part", default="0/1", help="0/2 and 1/2 in two processes")
    take.add_argument(
        "--scratch",
        type=Path,
        default=Path("mutants.scratch"),
        help="where answers are kept",
    )
    take.add_argument(
        "--write",
        action="store_true",
        help="write figure.md and survivors.tsv from what is known",
    )
    take.add_argument(
        "--page",
        default="figure.md",
        help="the page to write: another one, such as sample.md, leaves figure.md alone",
    )
    args = take.parse_args()
    torch.set_num_threads(1)
    plan = run.Draw(args.mutants, args.rewritings, args.seed, args.scratch)
    if args.write:
        figure.write(plan, args.page)
        return 0
    start = time.process_time()
    part, parts = map(int, args.part.split("/"))
    for n, row in enumerate(run.rows(plan, part, parts)):
        if how := figure.misjudged(row):
            print_row(how, row)
        if n % 100 == 0:
            print(f"{n} done, {time.process_time() - start:.0f} s of CPU", flush=True)
    if part == 0:
        for row in naming.rows(figure.NAMED, args.seed, args.scratch):
            if not row["right"]:
                print_row("misnamed", row)
    return 0


def print_row(how: str, row: dict[str, Any]) -> None:
    """Print a loss that was judged wrongly. how: "missed", "alarm" or "misnamed"."""
    loss = (row["config"], row["style"], row["what"])
    print(how, *loss, "|", row["said"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
