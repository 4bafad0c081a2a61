# SPDX-License-Identifier: Apache-2.0
"""What losses and upref.hidden take beside their peers, at an earlier commit and now.

    python -m benchmarks.before fa2bc552
    python -m benchmarks.before fa2bc552 gmpo   one row

A figure is the CPU time of forward and backward of upref over that of the peer: below 1
upref takes less. Both are measured in one process, where all take turns, as in
benchmarks.speed and benchmarks.hidden. Each version has processes of its own, and one of
each run at the same time. A figure is the median over the processes. `best` compares the
faster form of upref, eager or compiled, with the faster form of the peer. upref.hidden
has no compiled form.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import hidden, speed, startup
from docs import record

ROOT = Path(__file__).parents[1]
FORMS = ("eager", "compiled", "best")
HEAD = "upref.hidden"
TOKENS, IDS = 512, hidden.V // 8
Ratios = dict[str, dict[str, float]]


# ---- one process ---------------------------------------------------------------------
def of_losses(names: list[str], rounds: int) -> Ratios:
    """Return the ratios of the losses that have a peer, by row and form."""
    tensors = speed.batch(64, 4096)
    found: Ratios = {}
    for pair in speed.PAIRS:
        if pair[2] not in names:
            continue
        torch.compiler.reset()
        runs = speed.runs_of(pair, tensors)
        peers = [who for who in speed.PEERS if who in runs]
        wanted = {
            key: run
            for key, run in runs.items()
            if key.removesuffix(" compiled") in ("upref", *peers)
        }
        if not peers:
            continue
        times = speed.measured(wanted, tensors[0].detach(), rounds)
        for peer in peers:
            found[f"{pair[2]} beside {peer}"] = ratios(times, peer)
    return found


def ratios(times: dict[str, float], peer: str) -> dict[str, float]:
    """Return the time of upref over that of a peer, by form."""
    of_both = []
    for who in ("upref", peer):
        eager, compiled = times[who], times[f"{who} compiled"]
        of_both.append((eager, compiled, min(eager, compiled)))
    ours, theirs = of_both
    return {form: a / b for form, a, b in zip(FORMS, ours, theirs, strict=True)}


def of_head(rounds: int) -> Ratios:
    """Return the ratios of upref.hidden to the heads that need no other package."""
    peers = ("naive", "TRL chunked", "verl fused")
    seconds = hidden.seconds(TOKENS, IDS, (HEAD, *peers), rounds)
    return {
        f"{HEAD} beside {peer}": {
            "eager": statistics.median(
                a / b for a, b in zip(seconds[HEAD], seconds[peer], strict=True)
            )
        }
        for peer in peers
    }


# ---- both versions -------------------------------------------------------------------
def turn(folders: list[Path], names: list[str], rounds: int) -> list[Ratios]:
    """Return the ratios of the upref in each folder, by one fresh process in each. They
    run at the same time, so that what else the machine does disturbs them alike.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.before"]
    processes = [
        subprocess.Popen(
            [*command, "--here", "--rounds", str(rounds), *names],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("a process failed: what it printed is above")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def table(versions: dict[str, list[Ratios]]) -> list[str]:
    """Return the lines of the table: the median of each figure over the turns."""
    above = "".join(f"{version:>30}" for version in versions)
    heads = "".join(f"{form:>10}" for _ in versions for form in FORMS)
    lines = [f"{'':30}{above}", f"{'':30}{heads}"]
    for row in next(iter(versions.values()))[0]:
        cells = []
        for turns in versions.values():
            for form in FORMS:
                figures = [turn[row][form] for turn in turns if form in turn[row]]
                cells.append(f"{statistics.median(figures):.2f}" if figures else "-")
        lines.append(f"{row:30}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def main() -> None:
    """Print the table, or with --here the ratios of this process."""
    names = [*dict.fromkeys(pair[2] for pair in speed.PAIRS), HEAD]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="COMMIT, then ROWS")
    parser.add_argument("--rounds", type=int, default=3, help="of a process")
    parser.add_argument(
        "--turns", type=int, default=2, help="processes of each version"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.here:
        found = of_losses(args.names, args.rounds)
        if HEAD in args.names:
            found |= of_head(args.rounds)
        print(json.dumps(found))
        return
    if not args.names:
        parser.error("name a commit")
    commit, *rows = args.names
    if unknown := [name for name in rows if name not in names]:
        parser.error(f"no row {unknown[0]!r}: {', '.join(names)}")
    print(f"{record.machine()}; {speed.versions()}")
    print(
        f"losses: [64, 4096] float32; {HEAD}: {TOKENS} tokens, {IDS:,} ids, H = {hidden.H}, float32\n"
        f"{args.turns} processes of each version, {args.rounds} rounds in each; "
        f"load {os.getloadavg()[0]:.1f} at the start\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        startup.unpack(commit, folder)
        versions: dict[str, list[Ratios]] = {commit: [], "now": []}
        for _ in range(args.turns):
            both = turn([folder, ROOT], rows or names, args.rounds)
            for found, one in zip(versions.values(), both, strict=True):
                found.append(one)
    print("\n".join(table(versions)))
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
