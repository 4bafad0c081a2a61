# SPDX-License-Identifier: Apache-2.0
"""Lesson 12: are two weights equal for every ratio?

Fill the hole, the line with `...`, then run `upref learn 12` in this folder.
"""

from math import inf


def formula(weight, r):
    """Return [a, b] of the piece that holds just below the ratio r."""
    return next([a, b] for end, a, b in weight if end >= r)


def first_difference(f, g):
    """Return (low, high), the first interval on which two weights differ; None if they
    are equal for every ratio r > 0.

    Cut at the ends of both. Between two neighboring ends (0 is the first) each weight is
    one formula.

    Args:
        f, g: the weights of a token with A = 1. Each is a list of pieces [end, a, b],
            with growing ends: up to that end, from the one before, the weight is
            a + b r. The last end is inf.
    """
    return ...


if __name__ == "__main__":  # `python lesson12.py` tries it
    dapo = [[1.28, 0, 1], [inf, 0, 0]]
    print(first_difference(dapo, [[1.28, 0, 1], [1.5, 1.28, 0], [inf, 0, 0]]))
