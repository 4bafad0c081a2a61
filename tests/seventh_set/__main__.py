# SPDX-License-Identifier: Apache-2.0
"""Print how many verdicts of the seventh set were as meant at first sight; with --run, how
many are today; with --prove, which losses do not differ from the plain formula as said.

`python -m tests.seventh_set` reads first_sight.json. `--run` takes five CPU minutes.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import upref
from docs import record
from tests.seventh_set.losses import CASES, FORMULAS, Case, make, reads_of

# of each case whether the verdict was as meant
FIRST_SIGHT: dict[str, Any] = record.rows(Path(__file__).with_name("first_sight.json"))
SIZES = ((6, 9), (16, 12), (64, 20), (8, 300), (3, 2), (24, 1), (1, 30), (40, 6))
SCALES = (0.3, 1.0, 0.05, 3.0)  # of log r
TOLERANCE = 1e-6  # of the largest gradient of a batch
PROVED_BY_HAND: dict[str, str] = {
    "wrong 7": "an advantage of 5e-4 adds nothing",
}


def batches() -> Iterator[tuple[tuple[Tensor, ...], dict[str, Tensor]]]:
    """Yield the four main inputs of batches in float64, padded on the right or on the
    left, and the others by the keys of ARGUMENTS.
    """
    draw = torch.Generator().manual_seed(7)
    for number, (B, T) in enumerate(SIZES * 4):
        scale = SCALES[number // len(SIZES)]
        lengths = torch.randint(1, T + 1, (B, 1), generator=draw)
        mask = torch.arange(T) < lengths
        mask = mask.flip(1) if number % 2 else mask

        def normal(rows: int = B, columns: int = T) -> Tensor:
            """Return normal numbers."""
            return torch.randn(rows, columns, generator=draw, dtype=torch.float64)

        old = -torch.rand(B, T, generator=draw, dtype=torch.float64) * 4 - 4 * scale
        log_r = scale * normal()
        if number % 3 == 1:  # the response's ratio is near 1
            log_r = log_r - (log_r * mask).sum(1, keepdim=True) / lengths
            log_r = log_r + 1e-3 * normal(B, 1)
        main = ((old + log_r).clamp(max=-1e-4), old, normal(B, 1).expand(B, T), mask)
        spread = (1e-3, 0.7)[number % 2]
        others = {
            "mu": (old - spread * normal()).clamp(max=-1e-3),
            "ref": (old + 0.3 * normal()).clamp(max=-1e-3),
            "g": torch.arange(B) // 4,
        }
        yield main, others


def gradient(loss: Any, reads: str, main: Any, others: dict[str, Tensor]) -> Tensor:
    """Return d loss / d log_prob, [B, T]."""
    log_prob, *rest = main
    log_prob = log_prob.clone().requires_grad_()
    value = loss(log_prob, *rest, *(others[name] for name in reads.split()))
    (found,) = torch.autograd.grad(value, log_prob, allow_unused=True)
    return torch.zeros_like(log_prob) if found is None else found


def distance(case: Case) -> float:
    """Return how far the gradient of a case is from the plain formula's, on the worst of
    the batches, relative to the largest number.
    """
    reads = reads_of(case.objective)
    right = make(FORMULAS[case.objective], reads)
    largest = 0.0
    for main, others in batches():
        due = gradient(right, reads, main, others)
        found = gradient(case.loss(), case.reads, main, others)
        error = (found - due)[main[-1]].abs().max() / due[main[-1]].abs().max()
        largest = max(largest, float(error.nan_to_num()))
    return largest


def disagreements() -> Iterator[str]:
    """Yield the wrong losses that do not differ, and the right ones that do. A loss that is
    aimed at one size or format differs there alone, by its own words.
    """
    for case in CASES.values():
        is_far = distance(case) > TOLERANCE if case.kind != "aimed" else None
        if case.kind == "right" and is_far:
            yield f"{case.name} differs"
        if case.kind == "wrong" and not is_far and case.name not in PROVED_BY_HAND:
            yield f"{case.name} does not differ"


def as_meant(case: Case) -> bool:
    """Tell whether upref accepts a right loss, and rejects another."""
    name, settings = case.target
    report = upref.check(case.loss(), name, skip=("every-value",), **settings)
    return bool(report) == (case.kind == "right")


def score(verdicts: dict[str, bool]) -> str:
    """Return the numbers of verdicts as meant, by kind."""
    total = Counter(name.split()[0] for name in verdicts)
    good = Counter(name.split()[0] for name, is_good in verdicts.items() if is_good)
    return ", ".join(f"{kind} {good[kind]} of {n}" for kind, n in total.items())


def main() -> int:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", action="store_true", help="judge all cases anew")
    parser.add_argument("--prove", action="store_true", help="compare with formulas")
    options = parser.parse_args()
    print(
        f"at first sight: {score({k: x['as_meant'] for k, x in FIRST_SIGHT.items()})}"
    )
    if options.run:
        today = {name: as_meant(case) for name, case in CASES.items()}
        print(f"today: {score(today)}")
        print("\n".join(name for name, is_good in today.items() if not is_good))
    if options.prove:
        print("\n".join(disagreements()) or "proved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
