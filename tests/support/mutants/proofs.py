# SPDX-License-Identifier: Apache-2.0
"""Does `upref prove` prove a wrong loss? Mutants, their truth by the independent search
on small batches, and what the proof says.

    python -m tests.support.mutants.proofs [--mutants N] [--seed S] [--cpu SECONDS]

The mutants stand in a random order, and the run ends when its CPU seconds are spent: what
it has judged by then is a random sample. Answers are kept, so that the next run goes on.
Where a mutant that differs is proved, it looks for a difference in random batches within
the sizes and numbers that the report states. It prints each mutant that differs and is
proved, and each that the search does not tell apart and that is said to differ; then it
writes proofs.md.
"""

import argparse
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import upref
from upref import markdown
from upref.errors import InputError
from upref.proof.solver import cpu_seconds
from upref.verify.proof import OTHER_ADVANTAGES

from . import search
from .batches import draw, made
from .losses import Subject, subjects
from .run import FIRST
from .store import Store, digest
from .styles import compiled

PAGE = Path(__file__).with_name("proofs.md")
SECONDS = 10.0  # of one proof
COLUMNS = 2  # of the largest batch
TRUTHS = {
    "differs": "differ by values, on one of 60 small batches",
    "outside": "the same, but on none of 200 random batches within what the report of the proof states",
    "rounds": "differ there by rounding: the slip computes a part in a shorter float",
    "unclear": "between the two tolerances (2e-6 and 2e-5)",
    "equal": "are not told apart by these",
    "stillborn": "run on no batch",
}
DOUBTFUL = (("differs", "proved"), ("outside", "proved"), ("equal", "differs"))
PER_RESPONSE = "with advantages that differ within a response it is another loss"
STATUSES = ("differs", "no proof", "refused", "proved")
Row = dict[str, Any]


def drawn(mutants: int, seed: int) -> list[Subject]:
    """Return the mutants of the whole run, in a random order."""
    found = list(subjects(mutants, seed))
    random.Random(seed).shuffle(found)
    return found


def judged(s: Subject, seed: int) -> Row:
    """Return the truth of one mutant by the small batches, the status and reason of its
    proof, and the proof's CPU seconds.

    A mutant that is no Python or runs on no batch has only its truth, "stillborn".
    Where a mutant that differs is proved, `inside` is the difference within what the
    proof states.
    """
    try:
        loss = compiled(s.text)
    except Exception:  # no Python
        return {"truth": "stillborn"}
    truth = search.truth(
        loss, s.config, s.names, s.adv, seed, few=FIRST, large=0, single=s.single
    )
    row: Row = {"truth": truth.kind, "apart": truth.apart}
    if truth.kind == "stillborn":
        return row
    start = cpu_seconds()
    try:
        hp = dict(s.config.hp)
        proof = upref.prove(loss, s.config.o, columns=COLUMNS, seconds=SECONDS, **hp)
        row |= {"status": proof.status, "reason": proof.reason}
        if truth.kind == "differs" and proof.status == "proved":
            row["inside"] = apart_inside(loss, s, str(proof), seed)
    except InputError as error:
        row |= {"status": "refused", "reason": str(error)}
    return row | {"seconds": cpu_seconds() - start}


def apart_inside(loss: Callable[..., Any], s: Subject, report: str, seed: int) -> float:
    """Return the largest relative difference of the gradients on 200 random batches
    within what a proof states.

    Args:
        loss: the mutant.
        s: its configuration and style.
        report: of the proof. It states whether a response has one advantage, and
            whether its masked slots have it too.
        seed: of the batches.
    """
    per_response = PER_RESPONSE in report
    rng = np.random.default_rng([seed, 4])
    grouped = "group" in s.names
    worst, ran = 0.0, 0
    while ran < 200:
        shape = (int(rng.integers(1 + grouped, 3)), int(rng.integers(1, COLUMNS + 1)))
        b = made(s.config, draw(s.config, rng, shape), rng, False, grouped, False)
        mask, old = b.of["mask"], b.of["old_log_prob"]
        if OTHER_ADVANTAGES in report and b.one_adv:
            first_token = mask.int().argmax(1, keepdim=True)
            of_response = b.of["advantages"].gather(1, first_token)
            b.of["advantages"] = of_response.expand(mask.shape).clone()
        log_r = torch.where(mask, b.of["log_prob"] - old, 0)
        mean = log_r.sum(1) / mask.sum(1)
        is_of_response = s.config.o.level == "sequence_mean"
        is_inside = log_r.abs().max() <= 20 and old[mask].min() >= -200
        is_inside &= not is_of_response or mean.abs().max() <= 10
        if is_inside and (b.one_adv or not (per_response or s.adv == "B")):
            ran += 1
            worst = max(worst, search.apart(loss, s.config, b, s.names, s.adv))
    return worst


def kept(row: Row, s: Subject) -> Row:
    """Return the row with its truth corrected: "rounds" where the slip is a shorter
    float, "outside" where the mutant differs only outside of what the proof states.
    """
    if row["truth"] == "differs" and s.kind == "dtype":
        return row | {"truth": "rounds"}
    if row.get("inside", math.inf) <= search.SAME:
        return row | {"truth": "outside"}
    return row


def has_no_look_inside(row: Row) -> bool:
    """Return whether the row is of a proved mutant that differs, from before the random
    batches were added.
    """
    pair = row["truth"], row.get("status")
    return pair == ("differs", "proved") and "inside" not in row


def kind_of(reason: str) -> str:
    """Return the first line of a reason without the lines and the numbers of one loss,
    at most 120 characters.
    """
    short = re.sub(r"\S*\.py:\d+|the loss's code", "a line", reason.partition("\n")[0])
    short = re.sub(r"\(r = .*?\)", "", short)
    short = re.sub(r" at [x. ]+:", ":", short)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", short).strip()[:120]


def page(rows: list[Row], mutants: int, seed: int) -> str:
    """Return the page in markdown: a table of truth by status, and how often each
    reason was given for no proof.
    """
    ran = [row for row in rows if row["truth"] != "stillborn"]
    times = sorted(row["seconds"] for row in ran)
    median, largest = times[len(times) // 2], times[-1]
    return "\n".join(
        [
            "# Does `upref prove` prove a wrong loss?",
            "",
            f"`python -m tests.support.mutants.proofs --mutants {mutants} --seed {seed}`: {len(rows)} of {mutants} mutants,"
            f" in a random order; {len(rows) - len(ran)} of them run on no batch. Batches",
            f"up to [2, {COLUMNS}], at most {SECONDS:g} s for each. CPU seconds of a proof, with the solver's:"
            f" median {median:.1f}, largest {largest:.1f}.",
            f"Python {sys.version.split()[0]}, torch {torch.__version__}, one thread, a machine shared with other work.",
            "",
            markdown.table(["mutants that", *STATUSES], statuses_by_truth(ran)),
            "",
            "Why there is no proof:",
            "",
            markdown.table(
                ["reason", "of those that differ", "of the others"],
                reasons_for_no_proof(ran),
            ),
            "",
        ]
    )


def statuses_by_truth(ran: list[Row]) -> list[list[str]]:
    """Return a row for each truth that occurs: its words, and how many mutants of it
    have each of STATUSES.
    """
    counts = Counter((row["truth"], row["status"]) for row in ran)
    table = []
    for truth, words in TRUTHS.items():
        if any(row["truth"] == truth for row in ran):
            table.append([words, *(str(counts[truth, status]) for status in STATUSES)])
    return table


def reasons_for_no_proof(ran: list[Row]) -> list[list[str]]:
    """Return rows [reason, how many mutants that differ have it, how many others], the
    most frequent reason first.
    """
    unproved = [row for row in ran if row["status"] in ("no proof", "refused")]
    every = Counter(kind_of(row["reason"]) for row in unproved)
    differing = Counter(
        kind_of(row["reason"]) for row in unproved if row["truth"] == "differs"
    )
    return [
        [reason, str(differing[reason]), str(n - differing[reason])]
        for reason, n in every.most_common()
    ]


def main() -> int:
    """Judge mutants in a random order until the CPU seconds are spent, print the
    doubtful ones, and write proofs.md; return 0. Answers that are kept cost nothing.
    """
    take = argparse.ArgumentParser(description=__doc__)
    take.add_argument("--mutants", type=int, default=5900)
    take.add_argument("--seed", type=int, default=0)
    take.add_argument("--cpu", type=float, default=3600.0)
    take.add_argument("--scratch", type=Path, default=Path("mutants.scratch"))
    args = take.parse_args()
    torch.set_num_threads(1)
    store = Store(args.scratch / "proofs.jsonl")
    rows: list[Row] = []
    for s in drawn(args.mutants, args.seed):
        key = digest(s.key, str(args.seed))
        if key not in store.known and cpu_seconds() > args.cpu:
            break
        made_anew = store.get(key, lambda s=s: judged(s, args.seed), has_no_look_inside)
        row = kept(made_anew, s)
        rows.append(row)
        pair = row["truth"], row.get("status")
        if pair in DOUBTFUL:
            print(*pair, row["apart"], s.config, s.style, s.what)
            print(s.text, flush=True)
        if len(rows) % 50 == 0:
            counts = Counter((r["truth"], r.get("status")) for r in rows)
            print(len(rows), f"{cpu_seconds():.0f} s", counts, flush=True)
    PAGE.write_text(page(rows, args.mutants, args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
