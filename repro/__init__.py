# SPDX-License-Identifier: Apache-2.0
"""Experiments; run.sh starts them.

On import, Ctrl-C and SIGTERM end the program with one sentence (`upref.interrupt`).
"""

import argparse
from typing import NoReturn

from upref import interrupt
from upref.errors import InputError

interrupt.handled()


class Parser(argparse.ArgumentParser):
    """A command line that ends with one sentence and status 2 on wrong arguments."""

    def error(self, message: str) -> NoReturn:
        """Print the message in one line on stderr, and exit with status 2.

        Args:
            message: what argparse says of the arguments.

        Raises:
            SystemExit: always.
        """
        self.exit(
            2, f"{self.prog}: {message} (`-h` in its place shows what it takes).\n"
        )


def parse_seeds(text: str) -> list[str]:
    """Return the seeds of an option such as --seeds 1,2,3, in this order.

    Raises:
        InputError: they are no different whole numbers.
    """
    seeds = text.split(",")
    if not all(seed.isdecimal() for seed in seeds) or len(set(seeds)) != len(seeds):
        raise InputError(
            f"--seeds must be different whole numbers with commas between them, got {text!r}."
        )
    return seeds
