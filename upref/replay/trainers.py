# SPDX-License-Identifier: Apache-2.0
"""What a package tells of a trainer: how its files are read as recorded batches, and how
its steps are recorded while it runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from upref.errors import InputError
from upref.replay.schema import RecordedBatch
from upref.user_code.frameworks import from_plugins

EVERY = 50
# It takes a step of this rank and the process group of the data-parallel ranks (None:
# the default one), and returns metrics to log. The step is None on a rank that could
# not record it: the others may be waiting for it.
Sink = Callable[[RecordedBatch | None, Any], Mapping[str, float] | None]


@dataclass(frozen=True)
class Schedule:
    """The steps that are recorded: number 1, and each whose number is a multiple of
    `every`.
    """

    every: int = EVERY

    def __post_init__(self) -> None:
        """Refuse what is not a whole number of 1 or more."""
        if (
            not isinstance(self.every, int)
            or isinstance(self.every, bool)
            or self.every < 1
        ):
            wanted = "the number of steps between two records, 1 or more"
            raise InputError(f"every is {wanted}, not {self.every!r}.")

    def due(self, step: int) -> bool:
        """Return whether this step is recorded."""
        return step == 1 or step % self.every == 0


class DumpReader(Protocol):
    """Files of one trainer as recorded batches (docs/dump.md): a module with these
    names.
    """

    SUFFIXES: tuple[str, ...]  # of the names of its files

    def recognizes(self, path: Path) -> bool:
        """Tell whether a file with one of these suffixes is of this trainer.

        Args:
            path: of a file.
        """

    def step_of(self, path: Path) -> int | None:
        """Return the number of the optimizer step, where it is known.

        Args:
            path: of a file.
        """

    def read(self, path: Path) -> RecordedBatch:
        """Return the recorded batch. Raises InputError where the file is damaged.

        Args:
            path: of a file.
        """


class Recorder(Protocol):
    """How the steps of one kind of trainer are recorded while it runs (docs/dump.md): a
    module with these names.
    """

    TRAINER: str  # the name of that kind of trainer, for a message

    def recognizes(self, trainer: Any) -> bool:
        """Tell whether the object is a trainer of that kind; imports nothing.

        Args:
            trainer: any object.
        """

    def attach(
        self, trainer: Any, schedule: Schedule, sink: Sink
    ) -> Callable[[], None]:
        """Hand each step of the schedule to the sink from now on.

        Args:
            trainer: an object that `recognizes` accepts.
            schedule: which steps are recorded.
            sink: takes each recorded step.

        Returns:
            A function that ends the recording and leaves the trainer as it was.
        """


@cache
def dump_readers() -> list[DumpReader]:
    """Return the readers of trainers' own files of all installed packages; the list is
    made once.
    """
    return list(chain.from_iterable(from_plugins("dump_readers")))


@cache
def recorders() -> list[Recorder]:
    """Return the recorders of trainers' steps of all installed packages; the list is
    made once.
    """
    return list(chain.from_iterable(from_plugins("recorders")))
