# SPDX-License-Identifier: Apache-2.0
"""What other packages add to upref, by two groups of entry points.

upref.commands     A verb of the command. The entry point has the name of the verb and loads a `upref.cli.verb.Verb`.
upref.frameworks   Losses by names such as `verl:vanilla`, and objects that the package recognizes. The entry point has
                   the name of the package and loads a `upref.user_code.frameworks.FrameworkPlugin`: an object, or a
                   module with these functions.

upref itself imports none of these packages. An entry point that does not load is left
out: in silence where its package is not there, else with a warning.
"""

import warnings
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

VERBS = {  # of packages of the same distribution, which an installation may lack
    "audit": "upref_frameworks",
    "recipe": "upref_frameworks",
    "step": "upref_frameworks",
    "explorer": "upref_course",
    "learn": "upref_course",
}


@cache
def commands() -> dict[str, Any]:
    """Return the verbs that installed packages add.

    Returns:
        Each `upref.cli.verb.Verb` by the word that is typed.
    """
    return load_entry_points("upref.commands")


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


def load_entry_points(group: str) -> dict[str, Any]:
    """Load the entry points of a group, by name. Warn of one that does not load, unless
    its package is not installed.

    Args:
        group: of entry points.
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
