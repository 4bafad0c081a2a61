# SPDX-License-Identifier: Apache-2.0
"""`upref step FILE.py:step`: a training step of one's own from the command line, also
on several ranks of torchrun.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from upref.cli.output import answer
from upref.cli.verb import hyperparameters
from upref.foreign.load import load
from upref.step.check import check_step
from upref.verify.group import on_loopback

WAIT = timedelta(minutes=5)  # for another rank, before a rank ends


def command(args: Namespace) -> int:
    """Check the step of a file; print the report, on several ranks once.

    Returns:
        The exit status: 0 if the gradients agree, 1 if not. Of several ranks each has
            it.

    Raises:
        InputError: the file has no such step or model, or the step cannot be checked.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models are small: more threads wait for each other
    try:
        with ranks_of_torchrun() as rank, redirect_stdout(sys.stderr):
            step = load(args.trainer)
            file, _, _ = args.trainer.rpartition(":")
            model: Any = load(
                args.model if ":" in args.model else f"{file}:{args.model}"
            )
            made = model if isinstance(model, torch.nn.Module) else model()
            own = hyperparameters(args.hp)
            report = check_step(
                step,
                made,
                args.name,
                temperature=args.temperature,
                without=args.without,
                **own,
            )
    finally:
        torch.set_num_threads(threads)
    if rank > 0:
        return 0 if report else 1
    return answer(args, report)


@contextmanager
def ranks_of_torchrun() -> Iterator[int]:
    """A process group over gloo where torchrun has started several processes; yields
    the rank of this one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield 0
        return
    # all on this machine
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.update(on_loopback())
    dist.init_process_group("gloo", timeout=WAIT)
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
