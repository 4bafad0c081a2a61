# SPDX-License-Identifier: Apache-2.0
"""`upref step FILE.py:step`: a training step of one's own from the command line, also
on several ranks of torchrun.
"""

import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from upref.cli.output import answer
from upref.cli.verb import hyperparameters
from upref.errors import InputError
from upref.step.check import StepReport, check_step
from upref.user_code.load import load
from upref.verify.group import on_loopback

WAIT = timedelta(minutes=5)  # for another rank, before a rank ends
# seconds that a silent rank outlives the one that says why: torchrun ends all at once
PAUSE = 2.0
TEMPERATURE_MISSING = "temperature-missing"
NO_TEMPERATURE = (
    "a loop that has no temperature takes `--temperature 1 --without temperature`"
)


@dataclass(frozen=True)
class Rank:
    """This process among those that torchrun started.

    Attributes:
        number: of the rank, from 0 on.
        store: what all ranks write to; None where there is one process.
    """

    number: int = 0
    store: dist.Store | None = None

    def is_first_to_refuse(self) -> bool:
        """Return whether this rank is the first to call this; it prints the reason.

        Returns:
            True for one rank alone, also where there is one process.
        """
        return self.store is None or self.store.add("refusals", 1) == 1


def command(args: Namespace) -> int:
    """Check the step of a file; print the report, on several ranks once.

    Args:
        args: of `upref step FILE.py:step`.

    Returns:
        The exit status: 0 if the gradients agree, 1 if not, 2 if another rank prints
        why there is no answer. Of several ranks each has it.

    Raises:
        InputError: the file has no such step or model, or the step cannot be checked;
            on several ranks raised by the first that refuses.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are small: more threads wait for each other
    try:
        with ranks_of_torchrun() as rank, redirect_stdout(sys.stderr):
            try:
                report = _report_on_step(args)
            except InputError:
                if rank.is_first_to_refuse():
                    raise
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it ends without a word
                time.sleep(PAUSE)
                return 2
    finally:
        torch.set_num_threads(threads)
    if rank.number > 0:
        return 0 if report else 1
    status = answer(args, report)
    lacks_temperature = any(TEMPERATURE_MISSING in f.fault_ids for f in report.failures)
    if lacks_temperature and not args.json:
        _say(NO_TEMPERATURE)
    return status


def _say(sentence: str) -> None:
    """Print a line after the report; do nothing if the reader has closed the pipe."""
    try:
        print(sentence)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None


def _report_on_step(args: Namespace) -> StepReport:
    """Load the step and the model that the arguments name, and return the report of
    check_step. Raise InputError for what is no hyperparameter.
    """
    hp = hyperparameters(args.hp)
    for name in ("step", "model", "objective", "temperature", "without"):
        if name in hp:
            raise InputError(f"--hp {name}: {name} is not a hyperparameter.")
    step = load(args.trainer)  # a step of one's own is given in the trainer's place
    objective = args.name
    file, _, _ = args.trainer.rpartition(":")
    model: Any = load(args.model if ":" in args.model else f"{file}:{args.model}")
    model_to_check = model if isinstance(model, torch.nn.Module) else model()
    report: StepReport = check_step(
        step,
        model_to_check,
        objective,
        temperature=args.temperature,
        without=args.without,
        **hp,
    )
    return report


@contextmanager
def ranks_of_torchrun() -> Iterator[Rank]:
    """Join the process group of the processes that torchrun started, over gloo.

    Yields:
        This process among them. Where there is one process, or a group exists already,
        rank 0 without a store.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield Rank()
        return
    # all ranks are on this machine
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.update(on_loopback())
    store, number, size = next(dist.rendezvous("env://", timeout=WAIT))
    store.set_timeout(WAIT)
    of_group = dist.PrefixStore("group", store)
    dist.init_process_group(
        "gloo", store=of_group, rank=number, world_size=size, timeout=WAIT
    )
    try:
        yield Rank(number, store)
    finally:
        dist.destroy_process_group()
