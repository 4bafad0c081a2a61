# SPDX-License-Identifier: Apache-2.0
"""What installed packages know of the losses of trainers."""

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import chain
from typing import Any, Protocol

from upref import plugins
from upref.registry import Objective
from upref.user_code.loss import Loss


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
        self, name: str, objective: Objective, hp: Mapping[str, Any]
    ) -> Loss | Callable[..., Any]:
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
        self, name: str, loss: Any, objective: Objective, hp: Mapping[str, Any]
    ) -> Loss | None:
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

    def dump_readers(self) -> Collection[Any]:
        """Return the readers of what trainers write themselves, for `upref replay`, each a
        `upref.replay.trainers.DumpReader`; a package may lack this.
        """

    def recorders(self) -> Collection[Any]:
        """Return what records the steps of a trainer, for `upref.replay.record`, each a
        `upref.replay.trainers.Recorder`; a package may lack this.
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


@cache
def framework_plugins() -> list[FrameworkPlugin]:
    """Return what installed packages know of frameworks.

    Returns:
        One plug-in for each entry point of the group `upref.frameworks`.
    """
    return list(plugins.load_entry_points("upref.frameworks").values())


def from_plugins(member: str, *args: Any) -> list[Any]:
    """Return what this function of each package returns, where a package has it.

    Args:
        member: its name.
        *args: what it is called with.
    """
    return [
        getattr(plugin, member)(*args)
        for plugin in framework_plugins()
        if hasattr(plugin, member)
    ]


def closing_settings(a: Any, b: Any) -> list[str]:
    """Return settings with which one of two losses is the other one.

    Args:
        a, b: two losses that differ, as a user named them.

    Returns:
        Sentences of all installed packages.
    """
    return list(chain.from_iterable(from_plugins("closing_settings", a, b)))


def adapters() -> dict[str, str]:
    """Return where the adapters of the conformance suite are.

    Returns:
        Framework -> `package.module:CLASS`, of all installed packages.
    """
    return dict(ChainMap(*from_plugins("adapters")))


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
