# SPDX-License-Identifier: Apache-2.0
"""Compares answers with math-verify, for rewards.py: reads a line [truth, pred], writes a line true or false.

A process of its own, with few imports, because it is killed when an answer takes too long.
"""

import json
import os
import sys

from math_verify import parse, verify


def expressions(answer: str):
    return parse(f"${answer.strip().strip('$')}$", parsing_timeout=None)


def equal(truth: str, pred: str) -> bool:
    try:
        return bool(verify(expressions(truth), expressions(pred), timeout_seconds=None))
    except Exception:  # math-verify, sympy and ANTLR raise anything; RecursionError and MemoryError too
        return False


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(equal(*json.loads(line))), file=out, flush=True)
