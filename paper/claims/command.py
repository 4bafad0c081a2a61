# SPDX-License-Identifier: Apache-2.0
"""The verb `python -m paper claims`: the verdicts of the last run, or of one made now."""

import argparse

from paper.claims import as_computed, last, page
from paper.claims.evidence import compute
from upref.errors import InputError


def run(args: argparse.Namespace) -> int:
    """Print the verdicts that the options ask for; return 1 where a claim is red, else
    0.

    Args:
        args: section, verdict, run, save, verbose and json.

    Raises:
        InputError: --save without --run, or no such section or verdict.
    """
    if args.save and not args.run:
        raise InputError("--save goes with --run.")
    computed, judged = last(), page.chosen(as_computed(), args.section, args.verdict)
    if args.run:
        judged, computed = compute([j.claim for j in judged], save=args.save)
    print(
        page.as_json(judged, computed)
        if args.json
        else page.text(judged, page.made(computed), args.verbose)
    )
    return 0 if all(judged) else 1
