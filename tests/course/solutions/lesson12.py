# SPDX-License-Identifier: Apache-2.0


def formula(weight, r):
    return next([a, b] for end, a, b in weight if end >= r)


def first_difference(f, g):
    low = 0.0
    for high in sorted({end for end, _, _ in f + g}):
        if formula(f, high) != formula(g, high):
            return low, high
        low = high
    return None
