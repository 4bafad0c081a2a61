# SPDX-License-Identifier: Apache-2.0


def cap(p, mu, A, eps_low, eps_high):
    if A > 0:
        return max(0, min(1, (1 + eps_high) * mu) - p)
    return max(0, p - (1 - eps_low) * mu)
