# SPDX-License-Identifier: Apache-2.0
"""How many losses of the tests' tables `upref prove` proves, disproves, and leaves open.

    python -m tests.proof.table [--verdict right] [--rows 2] [--columns 2] [--every N]

It prints a line for each loss that is answered otherwise than its table says, then the
counts, the reasons for "no proof", and the CPU time of a proof, z3 included.
"""

import argparse
import itertools
import re
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import upref
from tests.support.cases import ACCEPTED, NOTED, REJECTED, Case, objective
from tests.support.cases.table import ALL
from upref.errors import InputError
from upref.proof.solver import cpu_seconds

VERDICTS = {"right": (ACCEPTED, NOTED), "wrong": (REJECTED,)}
LINE = re.compile(r"^(\S+\.py:\d+|of a batch) ")
NUMBER = re.compile(r"\d[\d.e+-]*")


def cases(verdict: str, every: int = 1) -> Iterator[Case]:
    """Yield the losses of the table, one in so many.

    Args:
        verdict: right or wrong.
        every: of how many one is yielded.
    """
    of = (c for c in ALL if c.kind == "loss" and c.verdict in VERDICTS[verdict])
    return itertools.islice(of, 0, None, every)


def answer(case: Case, rows: int, columns: int) -> tuple[str, str, Any]:
    """Return what a proof says of a case: a status, a reason, and the result.

    Args:
        case: a loss.
        rows, columns: the largest batch.
    """
    try:
        proof = upref.prove(
            case.function,
            objective(case.objective),
            rows=rows,
            columns=columns,
            **case.hp,
        )
    except InputError as error:
        return "refused", str(error), None
    return proof.status, proof.reason, proof


def kind_of(reason: str) -> str:
    """Return a reason without its line and its numbers, to count it.

    Args:
        reason: of a proof.
    """
    return NUMBER.sub("N", LINE.sub("", reason)).partition(" at ")[0][:100]


def main() -> int:
    """Prove the losses of a table, and print those that are answered otherwise than it
    says, the counts, the reasons and the CPU seconds; return 0.
    """
    take = argparse.ArgumentParser(description=__doc__)
    take.add_argument("--verdict", choices=VERDICTS, default="right")
    take.add_argument("--rows", type=int, default=2)
    take.add_argument("--columns", type=int, default=2)
    take.add_argument("--every", type=int, default=1, help="run one loss in so many")
    args = take.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seconds: list[float] = []
    for case in cases(args.verdict, args.every):
        before = cpu_seconds()
        status, reason, proof = answer(case, args.rows, args.columns)
        seconds.append(cpu_seconds() - before)
        counts[status] += 1
        if reason:
            reasons[f"{status}: {kind_of(reason)}"] += 1
        if (status == "proved") != (args.verdict == "right"):
            shown = f"{reason or proof.place}; {seconds[-1]:.1f} CPU s"
            print(f"{status}: {case} as {case.objective}: {shown}", flush=True)
    total = sum(counts.values())
    said = ", ".join(f"{n} {status}" for status, n in counts.most_common())
    print(f"\n{total} {args.verdict} losses at [{args.rows}, {args.columns}]: {said}")
    print(
        f"CPU seconds: median {statistics.median(seconds):.1f}, largest {max(seconds):.1f}"
    )
    for reason, n in reasons.most_common():
        print(f"{n:5}  {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
