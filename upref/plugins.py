# SPDX-License-Identifier: Apache-2.0
"""What other packages add to upref, by two groups of entry points.

upref.commands     A verb of the command. The entry point has the name of the verb and loads a `upref.cli.verb.Verb`.
upref.frameworks   Losses by names such as `verl:vanilla`, and objects that the package recognizes. The entry point has
                   the name of the package and loads a `Frameworks`: an object, or a
                   module with these functions.

upref itself imports none of these packages. An entry point that does not load is left
out: in silence where its package is not there, else with a warning.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from upref.cli.verb import Verb
    from upref.registry import Objective
    from upref.replay.record import Schedule, Sink
    from upref.replay.schema import RecordedBatch
    from upref.user_code.loss import Loss

VERBS = {  # of packages of the same distribution, which an installation may lack
    "audit": "upref_frameworks",
    "recipe": "upref_frameworks",
    "step": "upref_frameworks",
    "explorer": "upref_course",
    "learn": "upref_course",
}


class Frameworks(Protocol):
    """Losses of trainers, which upref checks and identifies by their names."""

    def names(self) -> Collection[str]:
        """Return the frameworks: `verl`, for names such as `verl:vanilla`.

        Returns:
            Words that may stand in front of a colon.
        """

    def needs_process(self, framework: str) -> bool:
        """Tell whether a process that has a loss of this framework can import nothing
        else afterwards.

        Args:
            framework: one of `names()`.
        """

    def find(
        self, name: str, objective: "Objective", hp: Mapping[str, Any]
    ) -> "Loss | Callable[..., Any]":
        """Return the loss of that name, set up for the objective where the name asks
        for that.

        Args:
            name: `FRAMEWORK:MODE`, with whatever the package reads after it.
            objective: what the loss is compared with; one named "nothing" where it is
                compared with none.
            hp: hyperparameters of the objective.

        Returns:
            A Loss, or a callable, which upref reads as any other.

        Raises:
            InputError: there is no such loss, or the framework is not installed.
        """

    def recognize(
        self, name: str, loss: Any, objective: "Objective", hp: Mapping[str, Any]
    ) -> "Loss | None":
        """Return the Loss of an object of a framework's own kind, such as a trainer's
        class; None for any other.

        Args:
            name: of the loss, for messages.
            loss: the object.
            objective: what it is compared with.
            hp: hyperparameters of that.
        """

    def tested_versions(self) -> Mapping[str, str]:
        """Return the version of each distribution with which the package was tested,
        for `upref doctor`.

        Returns:
            Distribution -> version.
        """

    def dump_readers(self) -> "Collection[DumpReader]":
        """Return the readers of what trainers write themselves, for `upref replay`; a
        package may lack this.
        """

    def recorders(self) -> "Collection[Recorder]":
        """Return what records the steps of a trainer, for `upref.replay.record`; a
        package may lack this.
        """


class DumpReader(Protocol):
    """Files of one trainer as recorded batches (docs/dump.md): a module with these
    names.
    """

    SUFFIXES: tuple[str, ...]  # of the names of its files

    def recognizes(self, path: "Path") -> bool:
        """Tell whether a file with such a suffix is of this trainer.

        Args:
            path: of a file.
        """

    def step_of(self, path: "Path") -> int | None:
        """Return the number of the optimizer step, where it is known.

        Args:
            path: of a file.
        """

    def read(self, path: "Path") -> "RecordedBatch":
        """Return the recorded batch. Raises InputError where the file is damaged.

        Args:
            path: of a file.
        """


class Recorder(Protocol):
    """How the steps of one trainer are recorded while it runs (docs/dump.md): a module
    with these names.
    """

    TRAINER: str  # what it records, for a message

    def recognizes(self, trainer: Any) -> bool:
        """Tell whether this is its trainer; imports nothing.

        Args:
            trainer: any object.
        """

    def attach(
        self, trainer: Any, schedule: "Schedule", sink: "Sink"
    ) -> Callable[[], None]:
        """Hand each step of the schedule to the sink from now on; return what leaves
        the trainer as it was.

        Args:
            trainer: as recognized.
            schedule: which steps are recorded.
            sink: takes each recorded step.
        """


@cache
def commands() -> "dict[str, Verb]":
    """Return the verbs that installed packages add.

    Returns:
        Each by the word that is typed.
    """
    return _load_entry_points("upref.commands")


@cache
def frameworks() -> list[Frameworks]:
    """What installed packages know of frameworks.

    Returns:
        One object for each entry point of the group `upref.frameworks`.
    """
    return list(_load_entry_points("upref.frameworks").values())


@cache
def dump_readers() -> "list[DumpReader]":
    """What installed packages read of trainers' own files.

    Returns:
        Those of all packages.
    """
    return [
        reader for f in frameworks() for reader in getattr(f, "dump_readers", tuple)()
    ]


@cache
def recorders() -> "list[Recorder]":
    """What installed packages record of trainers.

    Returns:
        Those of all packages.
    """
    return [
        recorder for f in frameworks() for recorder in getattr(f, "recorders", tuple)()
    ]


def provider(framework: str) -> Frameworks | None:
    """Return the plug-in that knows the losses of this framework.

    Args:
        framework: a word in front of a colon.

    Returns:
        The plug-in, or None.
    """
    return next((f for f in frameworks() if framework in f.names()), None)


def absent(package: str) -> str:
    """Say why an installation lacks what a package of this distribution adds, and what to
    do.

    Args:
        package: the name of a package of this distribution.

    Returns:
        A sentence.
    """
    if find_spec(package):
        return f"{package} is here, but upref-rl was installed before it was: install upref-rl again"
    return f"{package} is not in this installation: install upref-rl whole"


def _load_entry_points(group: str) -> dict[str, Any]:
    """Load what other packages add to this group, by name; warn of one that does not
    load.
    """
    found = {}
    for entry in entry_points(group=group):
        try:
            found[entry.name] = entry.load()
        except Exception as e:
            is_absent = (
                isinstance(e, ModuleNotFoundError)
                and e.name == entry.module.partition(".")[0]
            )
            if not is_absent:
                warnings.warn(
                    f"{entry.value} ({group}) does not load: {type(e).__name__}: {e}",
                    stacklevel=2,
                )
    return found
