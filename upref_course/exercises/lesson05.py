# SPDX-License-Identifier: Apache-2.0
"""Lesson 5: the Probability Capacity of a token under DAPO's clip.

Fill the hole, the line with `...`, then run `upref learn 5` in this folder.
"""


def cap(p, mu, A, eps_low, eps_high):
    """Return how far its own gradient can still carry a token.

    That is up where A > 0 (Eq. 11), and down where A < 0 (Eq. A3, without c). All
    arguments are plain numbers.

    Args:
        p: its probability now, π_θ.
        mu: its probability when it was drawn, π_old.
        A: its advantage, not 0.
        eps_low: how far the lower bound of r = p / mu is from 1.
        eps_high: how far the upper bound of r is from 1.

    Returns:
        A plain number: a difference of probabilities, 0 or more.
    """
    return ...


if __name__ == "__main__":  # `python lesson05.py` tries it
    print(cap(0.01, 0.01, 1.0, 0.2, 0.28))
