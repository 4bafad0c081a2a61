# SPDX-License-Identifier: Apache-2.0
"""Record optimizer steps of a running trainer as files of docs/dump.md.

    upref.replay.record(trainer, "dumps", every=50)        # one line before trainer.train()

What is known of a trainer comes from a package that attaches to upref (trainers.py).
Here is what all of them share: which steps are recorded, how a gradient is kept, and
how a step is written. **The files hold users' texts, as token ids.** A file is written
beside its place and renamed, so that an interruption leaves no half file. What fails
here stops the recording with one warning, never the training.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from upref.errors import InputError
from upref.files import write_atomically
from upref.replay.batch import make_batch
from upref.replay.files import write
from upref.replay.schema import HINT, RESPONSE_COLUMNS, RecordedBatch
from upref.replay.trainers import EVERY, Recorder, Schedule, Sink, recorders

log = logging.getLogger(__name__)
NOTICE = (
    "The files of this folder hold users' texts, as token ids. Keep them as you keep the data of the run.\n"
    "`upref replay` reads them.\n"
)


class Stopped(RuntimeError):
    """A watched run that ends, because one of its steps failed."""


class Recording:
    """A trainer that is being recorded, until `stop`; it may stand in a `with`
    statement.
    """

    def __init__(self, detach: Callable[[], None]):
        self._detach: Callable[[], None] | None = detach

    def stop(self) -> None:
        """Leave the trainer as it was."""
        if self._detach is not None:
            self._detach()
        self._detach = None

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.stop()


def record(trainer: Any, folder: str | Path, *, every: int = EVERY) -> Recording:
    """Record optimizer steps of a trainer: a file for each recorded step and
    data-parallel rank.

    The files hold users' texts, as token ids. Call it on every rank, before the
    training starts.

    Args:
        trainer: a GRPOTrainer of TRL, or of a class derived from it.
        folder: where the files go; it is made if it is not there.
        every: number of optimizer steps between two that are recorded; the first one is
            recorded too.

    Returns:
        The Recording, whose `stop` ends it. It may stand in a `with` statement, or be
        left alone.

    Raises:
        InputError: no installed package knows such a trainer, or the folder cannot be
            made.
    """
    recorder = recorder_of(trainer)
    place = open_folder(folder)
    return Recording(recorder.attach(trainer, Schedule(every), file_sink(place)))


def recorder_of(trainer: Any) -> Recorder:
    """Return the first installed recorder that recognizes this trainer.

    Args:
        trainer: the object.

    Raises:
        InputError: none does.
    """
    found = next((r for r in recorders() if r.recognizes(trainer)), None)
    if found is None:
        known = ", ".join(r.TRAINER for r in recorders()) or "none"
        raise InputError(
            f"an object of class {type(trainer).__name__} cannot be recorded: the trainers that can are {known}. "
            "docs/dump.md says what another trainer has to write."
        )
    return found


def open_folder(folder: str | Path) -> Path:
    """Make the folder if it is not there, write a file that says what it holds, and log
    what is written and where.

    Args:
        folder: its path.

    Returns:
        The folder as a Path.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(place / "README.txt", NOTICE)
    except OSError as e:
        why = e.strerror or e
        raise InputError(
            f"{place} cannot hold recorded steps ({why}): name another folder."
        ) from e
    log.warning(
        "upref records optimizer steps in %s; the files hold users' texts, as token ids",
        place.absolute(),
    )
    return place


def file_sink(folder: Path) -> Sink:
    """Return a sink that writes each step into the folder, under a name of its step and
    rank. An older file of that name is replaced.

    Args:
        folder: where the files go.
    """

    def keep(batch: RecordedBatch | None, group: Any = None) -> None:
        """Write the step; nothing for None."""
        if batch is None:
            return
        rank = 0 if batch.rank is None else int(batch.rank[0])
        write(folder / f"step{batch.step:06d}-rank{rank:04d}.npz", batch)

    return keep


def keep_gradient(
    kept: MutableMapping[str, Tensor],
    lp: Tensor,
    shape: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:
    """Let the trainer's own backward pass leave dL/dlp in the columns of a micro-batch,
    as kept["grad"]. Nothing happens where lp needs no gradient.

    The gradient stays on its device until `step_batch`: a copy would stall the backward
    pass.

    Args:
        kept: columns of the micro-batch.
        lp: log-probabilities, as the trainer's loss reads them.
        shape: makes [B, T] of a gradient that has the shape of lp.
    """

    def arrived(gradient: Tensor) -> None:
        """Keep the gradient of one backward pass; a later pass replaces it."""
        kept["grad"] = shape(gradient.detach())

    if lp.requires_grad:
        lp.register_hook(arrived)


def loss_scale(scaler: Any) -> float:
    """Return the factor of the loss in mixed precision: that of a GradScaler, or 1
    where there is None.

    Args:
        scaler: the trainer's.
    """
    return 1.0 if scaler is None else float(scaler.get_scale())


def step_batch(
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    step: int,
    rank: int,
    logged: Mapping[str, float],
    meta: Mapping[str, str],
    gradient_scale: float = 1.0,
    hints: Mapping[str, str] | None = None,
    file: str = "the recorded step",
) -> RecordedBatch:
    """Join the micro-batches of one step and rank: rows in their order, padded with 0
    on the right to the widest.

    Args:
        micro_batches: name -> column, [B, T] or [B]; widths may differ. A column that
            one of them lacks is dropped. `grad` is as backward left it on this rank.
        step: number of the optimizer step, from 1.
        rank: of the process.
        logged: numbers that the run logged for the step.
        meta: facts about the run, in words.
        gradient_scale: divisor of `grad`: the ranks times the scale of the loss in
            mixed precision.
        hints: column -> how the framework is made to record it. Those of columns that
            are missing go into `meta`.
        file: a name for messages.

    Returns:
        The batch, with the columns micro (numbers from 0) and rank.

    Raises:
        InputError: there is no micro-batch, or a column holds what docs/dump.md does
            not allow.
    """
    if not micro_batches:
        raise InputError("the step has no micro-batch.")
    width = max(part["mask"].shape[1] for part in micro_batches)
    columns: dict[str, Tensor] = {}
    for name in micro_batches[0]:
        if not all(name in part for part in micro_batches):
            continue
        pieces = [part[name] for part in micro_batches]
        if name not in RESPONSE_COLUMNS:
            pieces = [pad(piece, (0, width - piece.shape[1])) for piece in pieces]
        columns[name] = torch.cat(pieces)
    if "grad" in columns:
        columns["grad"] = columns["grad"].cpu().float() / gradient_scale
    sizes = [len(part["mask"]) for part in micro_batches]
    numbers = torch.arange(len(sizes))
    columns["micro"] = torch.repeat_interleave(numbers, torch.tensor(sizes))
    columns["rank"] = torch.full((sum(sizes),), rank)
    facts = dict(meta)
    for name, how in (hints or {}).items():
        if name not in columns:
            facts[HINT + name] = how
    return make_batch(columns, file=file, step=step, logged=dict(logged), meta=facts)


def hand_over(
    make: Callable[[], RecordedBatch], sink: Sink, group: Any
) -> Mapping[str, float]:
    """Give a step of this rank to the sink. Where the step cannot be made, the sink
    gets None, so that it does not wait for this rank.

    Args:
        make: makes the step.
        sink: takes it.
        group: the process group of the data-parallel ranks; None: the default one.

    Returns:
        Metrics to log; {} where the sink has none.

    Raises:
        Exception: of `make`, after the sink has been told that there is no step.
        Stopped: from the sink.
    """
    try:
        batch = make()
    except Exception:
        with contextlib.suppress(InputError):
            sink(None, group)
        raise
    return sink(batch, group) or {}


def finish(work: Callable[[], None], stop: Callable[[], None], group: Any) -> None:
    """Do the work that ends a recorded step. Call it on every rank.

    Where it fails on one rank, the recording stops on all of them: a rank that goes on
    alone would wait for the others in the next step.

    Args:
        work: hands the step over.
        stop: ends the recording of this rank.
        group: the process group of the data-parallel ranks; None: the default one.

    Raises:
        Stopped: what the work is there to report.
    """
    failed: list[bool] = []
    guarded(work, lambda: failed.append(True))
    if any(gather_ranks(bool(failed), group)):
        if not failed:
            log.warning("upref records no more steps: another rank could not")
        stop()


def gather_ranks(mine: Any, group: Any) -> list[Any]:
    """Return what each rank has, in the order of the ranks: [mine] without torch's
    process groups. All ranks must call it, and each waits for the others.

    Args:
        mine: of this rank; it can be pickled.
        group: the process group; None: the default one.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [mine]
    everybodys: list[Any] = [None] * torch.distributed.get_world_size(group)
    if len(everybodys) == 1:
        return [mine]
    torch.distributed.all_gather_object(everybodys, mine, group=group)
    return everybodys


def guarded(work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Do the work of a recorder. Where it fails, log one warning, stop the recording,
    and let the training go on.

    Args:
        work: records.
        stop: ends the recording.

    Raises:
        Stopped: what the work is there to report.
    """
    try:
        work()
    except Stopped:
        raise
    except Exception as e:
        # a full disk, a column of another shape: no reason to end a run of days
        why = (str(e).splitlines() or [""])[0]
        log.warning(
            "upref records no more steps of this run (%s: %s)", type(e).__name__, why
        )
        stop()
