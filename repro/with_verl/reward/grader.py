# SPDX-License-Identifier: Apache-2.0
"""Compares answers with math-verify, for score.py: reads a line [truth, pred], writes a
line true or false.

A process of its own (`python -m repro.with_verl.reward.grader`), with few imports,
because it is killed when an answer takes too long.
"""

import json
import os
import sys

from math_verify import parse, verify

from repro.with_verl.reward.reading import pairs


def expressions(answer: str):
    """Parse an answer as LaTeX mathematics; return the expressions that math-verify
    finds in it.
    """
    return parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)


def equal(truth: str, pred: str) -> bool:
    """Tell whether two answers are equal; False where math-verify raises an error on
    them.
    """
    try:
        asked = pairs(truth, pred)
        if isinstance(asked, bool):
            return asked

        def same(a, b):
            """Tell whether math-verify finds two answers equal."""
            return bool(verify(expressions(a), expressions(b), timeout_seconds=None))

        return any(same(a, b) for a, b in asked)
    except Exception:  # math-verify, sympy and ANTLR raise anything; RecursionError and MemoryError too
        return False


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(equal(*json.loads(line))), file=out, flush=True)
