# SPDX-License-Identifier: Apache-2.0
"""`python -m paper claims`: the statements of fan2026up, with verdicts."""

import argparse
import sys

from upref.cli import command_line, execute
from upref.cli.verb import Verb


def _claims_arguments(c: argparse.ArgumentParser) -> None:
    """Add the options of `python -m paper claims`."""
    c.add_argument("--section", metavar="3|4.1|B", help="only this section or appendix")
    c.add_argument(
        "--verdict",
        metavar="WORD",
        help="only this verdict: proved, false, undecided, ...",
    )
    c.add_argument(
        "--run",
        action="store_true",
        help="compute the verdicts again from their evidence",
    )
    c.add_argument(
        "--save",
        action="store_true",
        help="with --run: store them for `python -m paper claims` (--verdict red: new and changed records only)",
    )
    c.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also print what each piece of evidence found",
    )
    c.epilog = """Exit status: 1 if a claim is red, that is if its evidence is missing, fails or is inconsistent."""


def _claims(args: argparse.Namespace) -> int:
    """Run the verb `claims`, whose imports are slow, and return its exit status."""
    from paper.claims.command import run

    return run(args)


VERBS = {
    "claims": Verb(
        "list the statements of the paper, with verdicts and evidence",
        _claims_arguments,
        _claims,
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of `python -m paper` with its verbs."""
    p, add = command_line("python -m paper", "Checks of the paper fan2026up.")
    for name, verb in VERBS.items():
        add(name, verb)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the verb that the command line names, and return its exit status."""
    return execute(parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
