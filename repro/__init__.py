# SPDX-License-Identifier: Apache-2.0
"""Experiments; run.sh starts them."""

import argparse

from upref import interrupt

interrupt.handled()


class Parser(argparse.ArgumentParser):
    """Words that it does not take are refused in one line, status 2."""

    def error(self, message):
        self.exit(
            2, f"{self.prog}: {message} (`-h` in its place shows what it takes).\n"
        )
