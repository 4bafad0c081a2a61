# SPDX-License-Identifier: Apache-2.0
"""A verb of the command: what another package adds by an entry point of the group
`upref.commands`.

Only the standard library is imported here, and so it is in a module that has a Verb:
`upref -h` loads all of them.
"""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upref.errors import InputError


def _refuse_nothing(args: argparse.Namespace) -> None:
    """Leave all of it to the run."""


@dataclass(frozen=True)
class Verb:
    """What a word after `upref` stands for.

    Attributes:
        help: one line for `upref -h`.
        arguments: adds its arguments to a parser, which has --json and --debug already.
        run: the parsed arguments in, the exit status out: 0 equal or done, 1 different.
            It imports what is heavy.
        refuse: raises InputError for parsed arguments that are wrong, before anything
            heavy is imported.
        user_code: what it runs of a user, in words ("your function"); then `arguments`
            adds a time limit, and it runs in a child process. "": nothing.
    """

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    user_code: str = ""
    refuse: Callable[[argparse.Namespace], None] = _refuse_nothing


def parse_number(text: str) -> int | float | None:
    """Read a number: a whole number as an int, as a call from Python has it, any other
    as a float, "nan" and "inf" included.

    Args:
        text: as typed.

    Returns:
        The number; None where the text is none.
    """
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return None


# a value that is text, as loss_agg_mode=seq-mean
WORD = re.compile(r"[A-Za-z][\w.-]*")


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """Read the values of `--hp NAME=VALUE`; InputError where one is not of that form.

    Args:
        pairs: each NAME=VALUE, a number, None, True, False, or a word, which only an
            argument of the user's function may be.

    Returns:
        Name -> value.
    """
    constants = {"None": None, "True": True, "False": False}
    hp: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        number = parse_number(value)
        if number is None and value not in constants:
            if not key.isidentifier() or not WORD.fullmatch(value):
                raise InputError(f"--hp {pair!r} is not NAME=NUMBER or NAME=WORD.")
            hp[key] = value
            continue
        if number is not None and not math.isfinite(number):
            raise InputError(f"--hp {pair!r} is not NAME=NUMBER: {value} is none.")
        hp[key] = constants[value] if number is None else number
    return hp


def add_hyperparameters(c: argparse.ArgumentParser) -> None:
    """Add --hp, which `hyperparameters` reads.

    Args:
        c: the parser of a verb.
    """
    text = "a hyperparameter, e.g. eps_high=0.28, or another argument of the loss"
    c.add_argument("--hp", action="append", default=[], metavar="K=V", help=text)


def add_time_limit(c: argparse.ArgumentParser, seconds: float = 600) -> None:
    """Add --timeout, after which a verb that runs user code is stopped.

    Args:
        c: the parser of a verb.
        seconds: the default limit.
    """
    text = f"time limit (default {seconds:g})"
    c.add_argument(
        "--timeout", type=_seconds, default=seconds, metavar="SECONDS", help=text
    )


def _seconds(text: str) -> float:
    """Read the value of --timeout: seconds above 0 and below a million; argparse's
    error for anything else.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds between 0 and a million"
        )
    return seconds
