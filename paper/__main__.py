# SPDX-License-Identifier: Apache-2.0
"""`python -m paper claims`: the statements of fan2026up, with verdicts.
`python -m paper audit-table`: GRIM.
"""

import argparse
import sys

from upref.cli import command_line, execute
from upref.cli.verb import Verb


def _claims_arguments(c: argparse.ArgumentParser) -> None:
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
    from paper.claims.command import run

    return run(args)


def _table_arguments(c: argparse.ArgumentParser) -> None:
    c.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="the table; without it, Table 1 of fan2026up",
    )
    c.add_argument(
        "--seed", type=int, default=0, help="seed of the random draws (default 0)"
    )
    c.epilog = """FILE is CSV or markdown, in per cent: a header `method,AIME24,AMC23,Average`, then one row a method.
        An optional row named n gives the number of answers: 30x32 (problems x samples), or the candidates 674|675."""


def _table(args: argparse.Namespace) -> int:
    from paper.grim import audit
    from paper.grim.read import read_file
    from upref.cli.output import answer

    return answer(args, audit(read_file(args.file), seed=args.seed))


VERBS = {
    "claims": Verb(
        "list the statements of the paper, with verdicts and evidence",
        _claims_arguments,
        _claims,
    ),
    "audit-table": Verb(
        "test a results table for impossible values (GRIM test), and the leader's margin for chance",
        _table_arguments,
        _table,
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of both verbs."""
    p, add = command_line("python -m paper", "Checks of the paper fan2026up.")
    for name, verb in VERBS.items():
        add(name, verb)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run one verb; `python -m paper -h` lists them."""
    return execute(parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
