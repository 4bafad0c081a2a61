# SPDX-License-Identifier: Apache-2.0
"""Settings of a trainer with which its step is that of another one: each is run before it
is named.

An adapter names the settings to try. Where the other adapter is one of the same trainer,
its settings are tried too.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from upref.conformance.adapter import Adapter
from upref.conformance.cases import Case


@dataclass(frozen=True)
class Closing:
    """Whether settings of a trainer close a difference.

    Attributes:
        trainer: its name.
        other: the name of the trainer from which it differs.
        settings: those with which nothing differs, as Python writes their values; {}
            where none of those that were run closes the difference.
        runs: how many settings were run.
    """

    trainer: str
    other: str
    settings: dict[str, str]
    runs: int

    def text(self) -> str:
        """Return a sentence."""
        if not self.settings:
            return f"closed by none of the {self.runs} settings of {self.trainer} that were run"
        words = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"closed by {words} of {self.trainer}, as run: nothing differs from {self.other}"


def find_closing(
    adapter: Adapter,
    case: Case,
    names: tuple[str, str],
    other_settings: dict[str, str],
    is_closed: Callable[[Adapter], bool | None],
) -> Closing | None:
    """Run a case with other settings of an adapter until one closes a difference.

    Args:
        adapter: of the trainer whose settings change.
        case: the case that differs.
        names: of the trainer and of the other one.
        other_settings: of the other one, in this case.
        is_closed: runs the case with an adapter, and tells whether nothing differs from
            the other one; None where the case cannot run.

    Returns:
        The Closing: the first settings that close it, or that none does. None where the
        adapter cannot change its settings.
    """
    if not hasattr(adapter, "with_settings"):
        return None
    own = adapter.settings(case)
    is_same_trainer = names[0].split()[0] == names[1].split()[0]
    tried = [
        *_settings_of_other(own, other_settings, is_same_trainer),
        *getattr(adapter, "alternatives", lambda _: [])(case),
    ]
    runs = 0
    for changed in _distinct(tried, own):
        end = is_closed(adapter.with_settings(changed))
        runs += end is not None
        if end:
            said = {key: repr(value) for key, value in changed.items()}
            return Closing(*names, said, runs)
    return Closing(*names, {}, runs)


def _settings_of_other(
    own: dict[str, str], other: dict[str, str], is_same_trainer: bool
) -> list[dict[str, Any]]:
    """Return the settings that another trainer has otherwise: each alone, then all. One
    whose value is no Python literal is left out.

    Args:
        own, other: setting -> value, as Python writes it.
        is_same_trainer: whether a setting that only the other has is one of this
            trainer too.
    """
    found = {}
    for key, value in other.items():
        if key not in own and not is_same_trainer:
            continue
        if own.get(key, "") == value:
            continue
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            continue  # no number, word or list
    return [*({key: value} for key, value in found.items()), found]


def _distinct(
    tried: Sequence[dict[str, Any]], own: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the settings to try, each without what is set already, in their order; one
    that changes nothing, or was there before, is left out.

    Args:
        tried: changes: setting -> value.
        own: setting -> value, as Python writes it.
    """
    changes: list[dict[str, Any]] = []
    for settings in tried:
        changed = {k: v for k, v in settings.items() if own.get(k) != repr(v)}
        if changed and changed not in changes:
            changes.append(changed)
    return changes
