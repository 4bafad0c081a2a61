# SPDX-License-Identifier: Apache-2.0
"""What other packages add to upref, by two groups of entry points.

upref.commands     A verb of the command. The entry point has the name of the verb and loads a `upref.cli.verb.Verb`.
upref.frameworks   Losses by names such as `verl:vanilla`, and objects that the package recognizes. The entry point has
                   the name of the package and loads a `FrameworkPlugin`: an object, or a
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


class FrameworkPlugin(Protocol):
    """Losses of trainers, which upref checks and identifies by their names."""

    def names(self) -> Collection[str]:
        """Return the frameworks: `verl`, for names such as `verl:vanilla`.

        Returns:
            Words such as `verl`, each the part of a loss's name in front of the colon.
        """

    def needs_process(self, framework: str) -> bool:
        """Tell whether a process that loads a loss of this framework can import no other
        framework afterwards, so that it needs a process of its own.

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
            A Loss, or a callable, which upref reads as it reads any other callable.

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
            objective: what the loss is compared with.
            hp: hyperparameters of the objective.
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

    def closing_settings(self, a: Any, b: Any) -> list[str]:
        """Return settings of one of two losses with which nothing differs from the
        other one, a sentence each, for `upref.diff`; a package may lack this.

        Args:
            a, b: two losses that differ, as a user named them.
        """

    def adapters(self) -> Mapping[str, str]:
        """Return where the adapters of the conformance suite are, for `upref diff`; a
        package may lack this.

        Returns:
            Framework -> `package.module:CLASS`.
        """


class DumpReader(Protocol):
    """Files of one trainer as recorded batches (docs/dump.md): a module with these
    names.
    """

    SUFFIXES: tuple[str, ...]  # of the names of its files

    def recognizes(self, path: "Path") -> bool:
        """Tell whether a file with one of these suffixes is of this trainer.

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
        self, trainer: Any, schedule: "Schedule", sink: "Sink"
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
def commands() -> "dict[str, Verb]":
    """Return the verbs that installed packages add.

    Returns:
        Each by the word that is typed.
    """
    return _load_entry_points("upref.commands")


@cache
def framework_plugins() -> list[FrameworkPlugin]:
    """Return what installed packages know of frameworks.

    Returns:
        One plug-in for each entry point of the group `upref.frameworks`.
    """
    return list(_load_entry_points("upref.frameworks").values())


@cache
def dump_readers() -> "list[DumpReader]":
    """Return the readers of trainers' own files.

    Returns:
        Those of all installed packages.
    """
    return [
        reader
        for plugin in framework_plugins()
        for reader in getattr(plugin, "dump_readers", tuple)()
    ]


@cache
def recorders() -> "list[Recorder]":
    """Return the recorders of trainers' steps.

    Returns:
        Those of all installed packages.
    """
    return [
        recorder
        for plugin in framework_plugins()
        for recorder in getattr(plugin, "recorders", tuple)()
    ]


def closing_settings(a: Any, b: Any) -> list[str]:
    """Return settings with which one of two losses is the other one.

    Args:
        a, b: two losses that differ, as a user named them.

    Returns:
        Sentences of all installed packages.
    """
    return [
        words
        for plugin in framework_plugins()
        for words in getattr(plugin, "closing_settings", lambda *_: [])(a, b)
    ]


def adapters() -> dict[str, str]:
    """Return where the adapters of the conformance suite are.

    Returns:
        Framework -> `package.module:CLASS`, of all installed packages.
    """
    return {
        name: target
        for plugin in framework_plugins()
        for name, target in getattr(plugin, "adapters", dict)().items()
    }


def provider(framework: str) -> FrameworkPlugin | None:
    """Return the plug-in that knows the losses of this framework.

    Args:
        framework: `verl`, as in the loss name `verl:vanilla`; or any other word.

    Returns:
        The plug-in; None where no installed package knows the word.
    """
    return next(
        (plugin for plugin in framework_plugins() if framework in plugin.names()), None
    )


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
    """Load the entry points of a group, by name. Warn of one that does not load, unless
    its package is not installed.
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
