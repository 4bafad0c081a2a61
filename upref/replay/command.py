# SPDX-License-Identifier: Apache-2.0
"""What the command `upref replay` does. Its arguments are in upref/cli/__init__.py."""

import math
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from upref.definition import Objective
from upref.errors import InputError
from upref.registry import get
from upref.replay.files import other_files, read_steps
from upref.replay.run import CHECKS, replay
from upref.result import name_first

NAMED = 3  # files that a sentence names


def run(args: Any, hp: dict[str, Any]) -> int:
    """Run `upref replay`: print the report, as JSON with --json, and write the sheet if
    one is wanted. Files that were left out are named on standard error.

    Args:
        args: the parsed arguments.
        hp: hyperparameters of the objective.

    Returns:
        The exit status: 0 no failure, 1 a failure, 2 no failure, but a check could not run.

    Raises:
        InputError: as `replay`; or an argument is not what it should be.
    """
    # matplotlib is slow to import
    from upref.replay.sheet import check_suffix, write_sheet

    if args.file:
        check_suffix(args.file)
    if args.agg and not args.name:
        raise InputError(
            "--agg is the aggregation of an objective: give it with --as NAME."
        )
    objective: str | Objective = args.name
    if args.agg:
        objective = get(args.name).aggregated(args.agg)
    logged, digits = _number(args.loss)
    found = replay(
        read_steps(args.files),
        objective,
        hp=hp,
        logged=logged,
        digits=digits,
        only=args.only.split(",") if args.only else CHECKS,
        others=args.against,
        tokenizer=_tokenizer(args.tokenizer),
        zero=args.zero,
    )
    print(found.json() if args.json else found.text(args.verbose))
    if others := other_files(args.files):
        print(_left_out(others), file=sys.stderr)
    if args.file:
        write_sheet(args.file, found)
    return found.status


def _left_out(others: list[Path]) -> str:
    """Say in one sentence which files of a folder are no recorded batches."""
    named = name_first(others, NAMED)
    return f"upref: left out, because another program wrote it: {named}"


def _number(text: str) -> tuple[float | None, float]:
    """Return the number, and half a unit of its last printed digit: "0.12" gives
    (0.12, 0.005), and "" gives (None, 0.0).

    Raises:
        InputError: the text is no finite number.
    """
    if not text:
        return None, 0.0
    try:
        value = Decimal(text)
        exponent = value.as_tuple().exponent
        if not isinstance(exponent, int) or not math.isfinite(float(value)):
            raise InvalidOperation
    except InvalidOperation:
        raise InputError(f"--loss {text!r} is not a number.") from None
    return float(value), 0.5 * 10.0**exponent


def _tokenizer(folder: str) -> Any:
    """Load the tokenizer of a folder, without the network; None where no folder is
    given.

    Raises:
        InputError: transformers is not installed, or the folder has no tokenizer.
    """
    if not folder:
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError:
        raise InputError(
            "--tokenizer needs transformers: pip install transformers."
        ) from None
    except Exception as e:
        why = (str(e).splitlines() or [""])[0][:160]
        raise InputError(
            f"--tokenizer {folder!r} is no folder with a tokenizer of transformers ({why})."
        ) from e
