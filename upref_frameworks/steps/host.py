# SPDX-License-Identifier: Apache-2.0
"""What the drivers of trainers share: a quiet process, a process group of one rank or
several, and the report.
"""

import contextlib
import copy
import io
import logging
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist

from upref.errors import InputError
from upref.registry import Objective
from upref.step.check import StepReport, check_recorded
from upref.step.compare.case import build_case, make_goal
from upref.step.compare.record import Recorded
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import CASE_AXES, Row
from upref.user_code.guard import one_line
from upref.verify.group import on_loopback


class Refused(InputError):
    """The trainer cannot run here, or not with these settings: there is nothing to
    compare.
    """


class TrainerFailedError(Refused):
    """The trainer raised an error of its own: it breaks, or it does not take these
    settings.
    """


@contextlib.contextmanager
def mute_trainer(trainer: str, package: str, **environment: str) -> Iterator[None]:
    """Run a trainer without telemetry, warnings and output, and sort its errors.

    Args:
        trainer: the trainer in words, for messages.
        package: its top-level module.
        **environment: variables that are set inside; afterwards the environment is
            restored.

    Raises:
        Refused: for an InputError that was raised inside.
        TrainerFailedError: for an error of the trainer's own code. Errors of upref and
            of other callers stay as they are.
    """
    before = os.environ.copy()
    level = logging.root.manager.disable
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    } | environment
    logging.disable(logging.WARNING)
    try:
        silent = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silent),
            contextlib.redirect_stderr(silent),
        ):
            warnings.simplefilter("ignore")
            yield
    except InputError as e:
        raise Refused(str(e)) from e
    except Exception as e:
        if not _raised_by(e, package):
            raise
        raise TrainerFailedError(
            f"{trainer} fails: {type(e).__name__}: {one_line(e)}"
        ) from e
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


OURS = ("upref", "upref_frameworks")  # top-level packages whose errors stay as they are


def _raised_by(error: Exception, package: str) -> bool:
    """Return whether an error comes from this package: of the package and ours, it has
    the innermost frame in the traceback. An error of other code that the package calls
    counts as its own.
    """
    last = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        last = name if name in (*OURS, package) else last
    return last == package


@contextlib.contextmanager
def process_group(trainer: str, package: str) -> Iterator[None]:
    """Run a trainer as `mute_trainer` does, in a process group over gloo.

    A group that exists is used; otherwise one of a single rank is made, and removed
    afterwards.

    Args:
        trainer: the trainer in words, for messages.
        package: its top-level module.
    """
    is_own_group = not dist.is_initialized()
    if is_own_group:
        rank = "0"
        world = "1"
    else:
        rank = str(dist.get_rank())
        world = str(dist.get_world_size())
    where = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "VERL_PLATFORM": "cpu",
        # verl's FSDP engine is registered for cuda and npu
        "VERL_ENGINE_DEVICE": "cuda",
    }
    if is_own_group:  # another's group may span machines
        where |= on_loopback()
    with (
        mute_trainer(trainer, package, **where),
        tempfile.TemporaryDirectory() as folder,
    ):
        try:
            if is_own_group:
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/group", rank=0, world_size=1
                )
            yield
        finally:
            if is_own_group and dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def spawn_ranks(
    ranks: int, step: Callable[..., Any], model: Any, rows: list[Row], *more: Any
) -> Iterator[list[Row]]:
    """Start a group of processes, of which this one is the first, and split the rows.

    Args:
        ranks: number of processes; 1: this one alone, without a group.
        step: `(model, rows, temperature, **fields)`, which the others run once.
        model: each of the others gets a copy.
        rows: each rank takes every `ranks`-th.
        *more: temperature and fields, for the others.

    Yields:
        The rows of this process. At the end all others must have ended without an
        error.
    """
    if ranks == 1:
        yield rows
        return
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, on_loopback()):
        store = f"file://{folder}/group"
        others: Any = torch.multiprocessing.spawn(
            _rank, (store, ranks, step, model, rows, *more), ranks - 1, join=False
        )
        try:
            dist.init_process_group(
                "gloo",
                init_method=store,
                rank=0,
                world_size=ranks,
                timeout=timedelta(minutes=2),
            )
            yield rows[::ranks]
            # join returns False each time that one more process has ended without an error
            while not others.join():
                pass
        finally:
            for process in others.processes:
                process.terminate()
            if dist.is_initialized():
                dist.destroy_process_group()


def _rank(
    index: int,
    store: str,
    ranks: int,
    step: Any,
    model: Any,
    rows: list[Row],
    temperature: float,
    fields: dict[str, Any],
) -> None:
    """Join the group as rank index + 1 and do the step on the rows of that rank; what
    it returns is dropped.
    """
    torch.set_num_threads(1)
    # what is handed to a process stays in memory that both share
    model = copy.deepcopy(model)
    dist.init_process_group(
        "gloo",
        init_method=store,
        rank=index + 1,
        world_size=ranks,
        timeout=timedelta(minutes=2),
    )
    step(model, rows[index + 1 :: ranks], temperature, **fields)
    dist.destroy_process_group()


def report(
    step: Callable[..., Recorded],
    model: Any,
    objective: str | Objective,
    hp: dict[str, Any],
    goal: dict[str, Any],
    *,
    temperature: float = 0.7,
    half: bool = False,
    ranks: int = 1,
    **fields: Any,
) -> StepReport:
    """Compare one step of a trainer, on rows that upref makes, with the objective.

    Args:
        step: `(model, rows, temperature, **fields)`, which records one optimizer step.
        model: a torch module, or what TorchModel takes.
        objective: the objective that the step is meant to have.
        hp: its hyperparameters.
        goal: beta, entropy_coef, clip and scale, as of `check_step`.
        temperature: of the sampler.
        half: whether the step computes in bfloat16; its rounding is allowed then.
        ranks: number of processes, each with its share of the rows.
        **fields: settings of the trainer, for `step`.

    Returns:
        The report. A row that the trainer left out counts as a difference.

    Raises:
        InputError: a setting is wrong, or the step cannot be compared.
    """
    meaning = make_goal(objective, hp, temperature, **goal)
    case = build_case(
        TorchModel(model),
        meaning,
        rows=None,
        without=["temperature"] if temperature == 1 else [],
        coarse=half,
    )
    rows = case.rows
    with spawn_ranks(ranks, step, model, rows, temperature, fields) as rows_of_rank:
        seen = step(model, rows_of_rank, temperature, **fields)
        fed = seen.steps[0].rows(rows) if ranks == 1 else rows  # in the trainer's order
        # a row that was not fed is a difference, not another batch
        step_rows = fed if len(fed) == len(rows) else rows
        return check_recorded(
            seen,
            [step_rows],
            objective,
            temperature=temperature,
            without=CASE_AXES,
            bound=torch.bfloat16 if half else None,
            **goal,
            **hp,
        )
