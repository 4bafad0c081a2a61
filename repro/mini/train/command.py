# SPDX-License-Identifier: Apache-2.0
"""The command line of repro.mini.train: flags or a file, progress with the time left,
one sentence on errors.
"""

import argparse
import ast
import sys
import time
import traceback
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from repro.mini.train import loop
from repro.mini.train.failed_minibatch import NotFinite
from repro.mini.train.settings import Settings
from upref import interrupt
from upref.errors import InputError

OUT = Path(__file__).parents[2] / "out" / "mini"
SHOWN = "reward {reward:.3f}  entropy {entropy:.3f}  KL to the base {kl_base:.4f}  largest gradient {grad_norm_max:.2g}"


def main(argv: list[str] | None = None) -> int:
    """Train, or repeat a kept minibatch, as the options say.

    Returns:
        0; 1 if a number was not finite; 2, with a sentence or a traceback on stderr, if
        the run cannot start or go on.
    """
    args = arguments().parse_args(argv)
    interrupt.then("the same command goes on from the last checkpoint")
    try:
        if args.minibatch:
            loop.repeat_minibatch(args.minibatch)
            return 0
        given = asdict(Settings.read(args.settings)) if args.settings else {}
        given |= {
            f.name: value(getattr(args, f.name))
            for f in fields(Settings)
            if getattr(args, f.name) is not None
        }
        s = Settings.of(given)
        loop.require_device(args.device)
        out = args.out or OUT / s.key
        with Live(s) as live:
            loop.train(s, out, live.watch, live.say, device=args.device)
        print(f"done: {out}")
        return 0
    except NotFinite as e:
        print(f"train: {e}", file=sys.stderr)
        return 1
    except InputError as e:
        print(f"train: {e}", file=sys.stderr)
    except OSError as e:
        print(
            f"train: cannot write or read {e.filename or 'the run'}: {e.strerror or e}.",
            file=sys.stderr,
        )
    except MemoryError:
        print(
            "train: not enough memory; the same command goes on from the last checkpoint.",
            file=sys.stderr,
        )
    except (
        Exception
    ):  # a bug; Python's own status for it, 1, says here that the loss was not finite
        traceback.print_exc()
    return 2


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the options, one for each setting among them."""
    parser = argparse.ArgumentParser(
        prog="python -m repro.mini.train",
        description=loop.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--settings", type=Path, help="a JSON file of settings; flags go before it"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="default: a folder of repro/out/mini/, named by the settings",
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu (default), or a GPU as torch names it"
    )
    parser.add_argument("--minibatch", type=Path, help="a minibatch-*.safetensors file")
    for f in fields(Settings):
        parser.add_argument(
            f"--{f.name.replace('_', '-')}",
            metavar="VALUE",
            help=f"default: {Settings().__dict__[f.name]}",
        )
    return parser


def value(text: str) -> object:
    """Return a number, a table or True that Python would read, else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


class Live:
    """A bar with the time left in a terminal; a line every tenth of the run elsewhere."""

    def __init__(self, s: Settings):
        """Make the bar of the run; `with` shows it."""
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.s, self.say = s, console.print
        columns = (
            TextColumn(s.objective),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task(s.objective, total=s.steps, now="")
        self.first = 0  # the first step of this process
        self.start = 0.0  # when it ended

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def watch(self, step: int, numbers: dict) -> None:
        """Show the numbers of a step: in the bar, or as a line at every tenth of the
        run where there is no terminal.

        Args:
            step: how many are done.
            numbers: of steps.jsonl.
        """
        if not self.first:
            self.first, self.start = step, time.monotonic()
        now = SHOWN.format(**numbers)
        self.bar.update(self.task, completed=step, now=now)
        if self.bar.disable and (step % max(1, self.s.steps // 10) == 0):
            self.say(
                f"{self.s.objective} step {step} of {self.s.steps}: {now}{self.left(step)}"
            )

    def left(self, step: int) -> str:
        """Return in words how many minutes are left, by the time of this process's
        steps after its first; "" for less than one, or at its first step.
        """
        if step == self.first:
            return ""
        each = (time.monotonic() - self.start) / (step - self.first)
        minutes = each * (self.s.steps - step) / 60
        return f"  about {minutes:.0f} minutes left" if minutes >= 1 else ""
