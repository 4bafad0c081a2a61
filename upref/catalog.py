# SPDX-License-Identifier: Apache-2.0
"""The names of the objectives, and what `upref list` prints of them, read from their
files without running these (description.py).

Importing an objective imports torch, which takes seconds; a name with a typo gets its
answer before that.

Objectives have two tiers. The first holds those of fan2026up, its baselines, every
objective that the audit of a trainer compares a loss with (trainers.toml, generated
from the audits' records), and those that this process has registered itself. The second
tier, *paper only*, holds the others.
"""

import difflib
import sys
import tomllib
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from upref import description
from upref.errors import InputError
from upref.files import require_readable

BY_LENGTH = "seq-mean-token-sum-norm"  # divides by a length that no objective has
FIELDS = ("level", "agg", "paper")
TRAINERS = Path(__file__).parent / "trainers.toml"
PAPER = "fan2026up"
BASELINES = (  # those of its experiments
    "yu2025dapo",
    "shao2024deepseekmath",
    "zheng2025group",
    "liu2025understanding",
    "chen2025minimax",
    "qi2026rethinking",
    "zhao2025geometric",
    "gao2025soft",
    "hu2025reinforce++",
    "ahmadian2024back",
    "zhu2025surprising",
    "wang2025aspo",
)


def facts() -> dict[str, dict[str, str]]:
    """Return name -> {"level", "agg", "paper"} of each objective, in alphabetical
    order.

    Those of the folder `objectives`, and those that this process has registered itself.
    """
    # nothing is registered where it is not imported
    definition = sys.modules.get("upref.definition")
    registered = definition.OBJECTIVES if definition else {}
    fields_of = {
        name: {field: getattr(o, field) for field in FIELDS}
        for name, o in registered.items()
    }
    return dict(sorted({**fields_of, **_of_files()}.items()))


@cache
def trainers() -> dict[str, list[str]]:
    """Return objective -> the frameworks whose audits compare a loss with it.

    Returns:
        The names of the frameworks, by the name of the objective.
    """
    return tomllib.loads(TRAINERS.read_text(encoding="utf-8"))


def first_tier() -> list[str]:
    """Return the names of the first tier, in alphabetical order."""
    known = facts()
    shipped = _of_files()
    return [
        name
        for name, fact in known.items()
        if name not in shipped or not _paper_only(name, fact["paper"])
    ]


def _paper_only(name: str, paper: str) -> bool:
    return name not in trainers() and paper not in (PAPER, *BASELINES)


@cache
def _of_files() -> dict[str, dict[str, str]]:
    return {
        name: {field: description.fact(objective, field) for field in FIELDS}
        for name, objective in description.written().items()
    }


def require(*names: str) -> None:
    """Refuse a word that is not the name of an objective; a name with parentheses, as
    up(dapo), is left to `get`.

    Args:
        *names: words that a user typed.

    Raises:
        InputError: the message lists the nearest names.
    """
    for name in names:
        known = facts()
        if "(" not in name and name not in known:
            raise unknown(name, known)


def require_estimators(kl: str, advantage: str, agg: str) -> None:
    """Refuse a word that names no estimator, or no aggregation.

    Args:
        kl: of a KL estimator, or "".
        advantage: of an advantage estimator, or "".
        agg: of an aggregation, or "".

    Raises:
        InputError: the message lists the names, or the nearest.
    """
    if kl and kl not in (known := description.names_of("kl", "ESTIMATORS")):
        raise unknown_kl(kl, known)
    known = description.names_of("advantages", "ADVANTAGES")
    if advantage and advantage not in known:
        raise unknown_advantage(advantage, known)
    if agg and agg not in (
        known := description.names_of("aggregation", "AGGREGATIONS")
    ):
        raise unknown_aggregation(agg, known)


def unknown_kl(name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no KL estimator has.

    Args:
        name: that a user typed.
        known: names of estimators.
    """
    return InputError(
        f"there is no KL estimator named {name!r}: choose one of {', '.join(known)}."
    )


def unknown_advantage(name: str, known: Collection[str]) -> InputError:
    """Return the error for a name that no advantage estimator has.

    Args:
        name: that a user typed.
        known: names of estimators.
    """
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = (
        f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}."
    )
    return InputError(f"there is no advantage named {name!r}: {hint}")


def unknown_aggregation(name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no aggregation has.

    Args:
        name: that a user typed.
        known: names of aggregations.
    """
    able = ", ".join(one for one in known if one != BY_LENGTH)
    return InputError(f"unknown aggregation {name!r}: choose from {able}.")


def require_loss(word: str) -> None:
    """Refuse a word that names no loss: no objective, or a file that is not there.
    Functions of it are not looked up.

    Args:
        word: that a user typed.

    Raises:
        InputError: what is wrong, and how a loss is named.
    """
    where, colon, _ = word.rpartition(":")
    if where.endswith(".py"):
        require_readable(Path(where))
    if colon:
        return
    try:
        require(word)
    except InputError as e:
        raise no_loss(word, e) from e


def no_loss(word: str, why: InputError) -> InputError:
    """Return the error for a word that is neither an objective nor the name of a
    function.

    Args:
        word: that a user typed.
        why: there is no objective of that name.
    """
    ways = "package.module:function, path/to/file.py:function, verl:loss_mode or trl:loss_type"
    return InputError(
        f"{word!r} is not a loss: write {ways}, or an objective's name. {str(why).capitalize()}"
    )


def unknown(name: str, known: Collection[str]) -> InputError:
    """Return the error for a name that no objective has.

    Args:
        name: that a user typed.
        known: names of objectives.
    """
    plain = name.lower().replace("-", "_")
    similar = (
        [plain] if plain in known else difflib.get_close_matches(plain, known, 3, 0.5)
    )
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = "`upref list --all` shows all."
    return InputError(f"there is no objective named {name!r}: {hint}")
