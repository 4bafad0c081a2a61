# SPDX-License-Identifier: Apache-2.0
"""The names of the objectives, and what `upref list` prints of them, read from their
files without running these (description.py).

Importing an objective imports torch, which takes seconds; a name with a typo gets its
answer before that.

Objectives have two tiers. The first holds those of fan2026up, its baselines, every
objective that the audit of a trainer compares a loss with (trainers.toml, generated
from the audits' records), and those that this process has registered itself. The second
tier, *paper only*, holds the others: no audited trainer has them.
"""

import ast
import difflib
import re
import sys
import tomllib
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

from upref import description
from upref.errors import InputError
from upref.files import require_readable

BY_LENGTH = "seq-mean-token-sum-norm"  # divides by a length that no objective has
KEPT_MEAN = "kept-mean"  # divides by the tokens that a rejection keeps
FIELDS = ("level", "agg", "paper")
TRAINERS = Path(__file__).parent / "trainers.toml"
PAPER = "fan2026up"
BASELINES = (  # the papers of its baselines
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
    """Return the fields "level", "agg" and "paper" of each objective, by its name, in
    alphabetical order.

    The objectives are those of the folder `objectives`, and those that this process has
    registered itself.
    """
    # until the module is imported, nothing is registered
    definition = sys.modules.get("upref.definition")
    registered = definition.OBJECTIVES if definition else {}
    fields_of_registered = {
        name: {field: getattr(objective, field) for field in FIELDS}
        for name, objective in registered.items()
    }
    return dict(sorted({**fields_of_registered, **_fields_of_shipped()}.items()))


@cache
def trainers() -> dict[str, list[str]]:
    """Return which frameworks have a loss that an audit compares with an objective.

    Returns:
        The names of the frameworks, by the name of the objective.
    """
    return tomllib.loads(TRAINERS.read_text(encoding="utf-8"))


def first_tier() -> list[str]:
    """Return the names of the objectives that are not *paper only*, in alphabetical
    order. The head of this file defines the tiers.
    """
    paper_only = {
        name
        for name, fields in _fields_of_shipped().items()
        if name not in trainers() and fields["paper"] not in (PAPER, *BASELINES)
    }
    return [name for name in facts() if name not in paper_only]


@cache
def _fields_of_shipped() -> dict[str, dict[str, str]]:
    """Return the fields of each objective of the folder `objectives`, by its name."""
    return {
        name: {field: description.fact(objective, field) for field in FIELDS}
        for name, objective in description.written().items()
    }


def require(*names: str) -> None:
    """Raise InputError for a word that is not the name of an objective. A name with
    parentheses, as up(dapo), passes: `get` reads it.

    Args:
        *names: words that a user typed.

    Raises:
        InputError: the message lists the nearest names.
    """
    for name in names:
        known = facts()
        if "(" not in name and name not in known:
            raise unknown(name, known)


def require_distillation(name: str) -> None:
    """Raise InputError for a word that names no divergence from a teacher.

    Args:
        name: the word that a user typed, or "".
    """
    if not name:
        return
    known = _divergences()
    if name not in known:
        raise unknown_distillation(name, known)


def _option_of(name: str) -> str:
    """Return the option of `upref check` that takes a name, "" if none does.

    Args:
        name: the word that a user typed.
    """
    options = {
        "--as-distillation": _divergences(),
        "--as-kl": description.names_of("kl", "ESTIMATORS"),
        "--as-advantage": _advantage_estimators(),
        "--as-value": description.names_of("critic", "VALUE_LOSSES"),
    }
    return next((option for option, names in options.items() if name in names), "")


def _divergences() -> list[str]:
    """Return the names of the divergences from a teacher."""
    divergences = description.names_of("distillation", "DIVERGENCES")
    truncations = description.names_of("distillation", "TRUNCATIONS")
    truncated = [f"{t}({d})" for t in truncations for d in divergences]
    sampled = description.names_of("distillation", "SAMPLED")
    return [*divergences, *truncated, *sampled]


def _advantage_estimators() -> list[str]:
    """Return the names of the advantage estimators of responses, tokens and turns."""
    return [
        *description.names_of("advantages", "ADVANTAGES"),
        *description.names_of("token_advantages", "TOKEN_ADVANTAGES"),
    ]


def require_estimators(kl: str, advantage: str, agg: str) -> None:
    """Raise InputError for a word that names no estimator, or no aggregation.

    Args:
        kl: the name of a KL estimator, or "".
        advantage: the name of an advantage estimator, or "".
        agg: the name of an aggregation, or "".

    Raises:
        InputError: the message lists the names, or the nearest.
    """
    if kl:
        kl_estimators = description.names_of("kl", "ESTIMATORS")
        if kl not in kl_estimators:
            raise unknown_kl(kl, kl_estimators)
    if ":" in (advantage or ""):
        raise InputError(
            f"--as-advantage takes the name of an estimator, not {advantage}: no command compares two advantage functions "
            "with each other. Check each of them against one name, such as group_norm."
        )
    if advantage:
        advantage_estimators = _advantage_estimators()
        if advantage not in advantage_estimators:
            raise unknown_advantage(advantage, advantage_estimators)
    if agg:
        aggregations = description.names_of("aggregation", "AGGREGATIONS")
        if agg not in aggregations:
            raise unknown_aggregation(agg, aggregations)


def unknown_kl(name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no KL estimator has.

    Args:
        name: the word that a user typed.
        known: names of estimators.
    """
    return InputError(
        f"there is no KL estimator named {name!r}: choose one of {', '.join(known)}."
    )


# what people type -> the estimator's name here
USUAL_ADVANTAGES = {"rloo": "leave_one_out", "grpo": "group_norm"}


def unknown_advantage(name: str, known: Collection[str]) -> InputError:
    """Return the error for a name that no advantage estimator has.

    Args:
        name: the word that a user typed.
        known: names of estimators.
    """
    spelled_like_names = str(name).lower().replace("-", "_")
    near = difflib.get_close_matches(spelled_like_names, known, n=1)
    usual = USUAL_ADVANTAGES.get(spelled_like_names, "")
    if usual in known:
        near = [usual]
    hint = (
        f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}."
    )
    return InputError(f"there is no advantage named {name!r}: {hint}")


def unknown_distillation(name: str, known: Collection[str]) -> InputError:
    """Return the error for a name that no divergence from a teacher has.

    Args:
        name: the word that a user typed.
        known: names of divergences.
    """
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"choose one of {', '.join(known)}."
    )
    return InputError(f"there is no divergence named {name!r}: {hint}")


def require_value_loss(name: str) -> None:
    """Raise InputError for a word that names no loss of a critic.

    Args:
        name: the word that a user typed, or "".
    """
    if not name:
        return
    known = description.names_of("critic", "VALUE_LOSSES")
    if name not in known:
        raise unknown_value_loss(name, known)


def unknown_value_loss(name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no loss of a critic has.

    Args:
        name: the word that a user typed.
        known: names of losses.
    """
    return InputError(
        f"there is no value loss named {name!r}: choose one of {', '.join(known)}."
    )


def unknown_aggregation(name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no aggregation has.

    Args:
        name: the word that a user typed.
        known: names of aggregations.
    """
    usable = ", ".join(one for one in known if one != BY_LENGTH)
    return InputError(f"unknown aggregation {name!r}: choose from {usable}.")


def require_loss(word: str) -> None:
    """Raise InputError for a word that names no loss: neither an objective, nor a
    function in a file that exists and may have it.

    Args:
        word: the word that a user typed.

    Raises:
        InputError: what is wrong, and how a loss is named.
    """
    where, colon, function = word.rpartition(":")
    if where.endswith(".py"):
        require_readable(Path(where))
        _require_function(Path(where), function.partition(".")[0])
    if colon:
        return
    try:
        require(word)
    except InputError as e:
        raise no_loss(word, e) from e


# in a file that may have a name which its text does not have
MAKES_NAMES = (
    "import *",
    "globals",
    "locals",
    "vars",
    "setattr",
    "exec",
    "__getattr__",
    "__dict__",
)


def _require_function(file: Path, name: str) -> None:
    """Raise InputError where a file has functions, and its text nowhere has this name. The
    file is not run, and a pipe is not read: its text comes once.
    """
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8", errors="replace")
    has_name = re.search(rf"\b{re.escape(name)}\b", text)
    if not name.isascii() or has_name or any(word in text for word in MAKES_NAMES):
        return
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):  # the import says so
        return
    if names := [x.name for x in statements if isinstance(x, ast.FunctionDef)]:
        raise no_function_named(name, str(file), names)


def no_function_named(name: str, where: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that no function of a file or module has.

    Args:
        name: the name.
        where: of the file or module.
        known: names that are there; those that begin with _ are not shown.
    """
    public = [x for x in known if not x.startswith("_")]
    if "," in name:
        return InputError(
            f"{where} has no {name!r}: a function of a file takes no settings behind a "
            "comma; set them in the file, as defaults or with functools.partial."
        )
    if similar := difflib.get_close_matches(name, public, 3, 0.5):
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = f"it has {', '.join(public[:8]) or 'no function'}."
    return InputError(f"{where} has no {name!r}: {hint}")


def no_loss(word: str, why: InputError) -> InputError:
    """Return the error for a word that is neither an objective nor the name of a
    function.

    Args:
        word: the word that a user typed.
        why: the error that there is no objective of that name.
    """
    if word.endswith(".py"):
        return why
    ways = "package.module:function, path/to/file.py:function, verl:loss_mode or trl:loss_type"
    reason = str(why)
    return InputError(
        f"{word!r} is not a loss: write {ways}, or an objective's name. "
        f"{reason[:1].upper()}{reason[1:]}"
    )


def unknown(name: str, known: Collection[str]) -> InputError:
    """Return the error for a name that no objective has.

    Args:
        name: the word that a user typed.
        known: names of objectives.
    """
    if name.endswith(".py"):
        return InputError(f"{name} is a file: name its function, as in {name}:loss.")
    if option := _option_of(name):
        return InputError(
            f"{name} is no objective: `upref check FILE.py:function {option} {name}` compares with it."
        )
    spelled_like_names = name.lower().replace("-", "_")
    if spelled_like_names in known:
        similar = [spelled_like_names]
    else:  # ppo is a word of ppo_clip, and spelled like gppo
        near = difflib.get_close_matches(spelled_like_names, known, n=3, cutoff=0.5)
        longer = [one for one in known if spelled_like_names in one.split("_")]
        similar = (longer or near)[:3]
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    else:
        hint = "`upref list --all` shows all."
    return InputError(f"there is no objective named {name!r}: {hint}")
