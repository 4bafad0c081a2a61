# SPDX-License-Identifier: Apache-2.0
"""Does `upref prove` prove a wrong loss? Mutants drawn at random, their truth by the
independent search on small batches, and what the proof says.

    python -m tests.support.mutants.proofs [--seed S] [--cpu SECONDS]

It prints a line for each mutant that differs and is proved, and one for each that the
search does not tell apart and that is said to differ; then it writes proofs.md.
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import upref
from upref.errors import InputError

from . import search
from .losses import Subject, every_config, of
from .run import FIRST
from .styles import STYLES, compiled, fits

PAGE = Path(__file__).with_name("proofs.md")
SECONDS = 10.0  # of one proof
EACH = 3  # mutants of one objective in one style, of which one is drawn


def drawn(seed: int) -> list[Subject]:
    """One mutant for each objective, setting and style, in a random order."""
    chance = random.Random(seed)
    places = [(c, s) for c in every_config() for s in STYLES if fits(s, c)]
    chance.shuffle(places)
    return [chance.choice(found) for c, s in places if (found := of(c, s, EACH, seed))]


def judged(s: Subject, seed: int) -> dict[str, Any]:
    """The truth of one mutant, and what the proof says of it."""
    loss = compiled(s.text)
    truth = search.truth(
        loss, s.config, s.names, s.adv, seed, few=FIRST, large=0, single=s.single
    )
    try:
        proof = upref.prove(
            loss, s.config.o, columns=2, seconds=SECONDS, **dict(s.config.hp)
        )
        status, reason = proof.status, proof.reason
    except InputError as error:
        status, reason = "refused", str(error)
    return {"truth": truth.kind, "apart": truth.apart, "status": status, "reason": reason}  # fmt: skip


def write(rows: list[dict[str, Any]], seed: int, spent: float) -> None:
    """Write the page."""
    counts = Counter((r["truth"], r["status"]) for r in rows)
    kinds = [k for k in ("differs", "unclear", "equal") if any(r["truth"] == k for r in rows)]  # fmt: skip
    words = {
        "differs": "differ by values, on one of 60 small batches",
        "unclear": "between the two tolerances (2e-6 and 2e-5)",
        "equal": "are not told apart by these",
    }
    statuses = ("differs", "no proof", "refused", "proved")
    lines = [
        "# Does `upref prove` prove a wrong loss?",
        "",
        f"`python -m tests.support.mutants.proofs --seed {seed}`: {len(rows)} mutants, batches"
        f" up to [2, 2], at most {SECONDS:g} s for each; {spent:.0f} CPU seconds beside z3's.",
        f"Python {sys.version.split()[0]}, torch {torch.__version__}, one thread, a machine shared with other work.",
        "",
        f"| mutants that | {' | '.join(statuses)} |",
        f"|---|{'---|' * len(statuses)}",
        *(
            f"| {words[k]} | {' | '.join(str(counts[k, s]) for s in statuses)} |"
            for k in kinds
        ),
        "",
    ]
    PAGE.write_text("\n".join(lines))


def main() -> int:
    take = argparse.ArgumentParser(description=__doc__)
    take.add_argument("--seed", type=int, default=0)
    take.add_argument("--cpu", type=float, default=600.0)
    args = take.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    start = time.process_time()
    for s in drawn(args.seed):
        try:
            row = judged(s, args.seed)
        except Exception as error:  # a mutant that does not run is none
            print(f"left out: {s.config} {s.style}: {error!r}"[:150], flush=True)
            continue
        rows.append(row)
        pair = row["truth"], row["status"]
        if pair in (("differs", "proved"), ("equal", "differs")):
            print(*pair, row["apart"], s.config, s.style, s.what, "|", row["reason"])
            print(s.text, flush=True)
        if len(rows) % 10 == 0:
            print(len(rows), Counter((r["truth"], r["status"]) for r in rows), flush=True)  # fmt: skip
            write(rows, args.seed, time.process_time() - start)
        if time.process_time() - start > args.cpu:
            break
    write(rows, args.seed, time.process_time() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
