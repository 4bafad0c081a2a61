# SPDX-License-Identifier: Apache-2.0
"""Random projections of a parameter's gradient: they are kept where the gradient itself
is too large.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

DIRECTIONS = 64  # of each parameter; one with fewer entries is kept whole
ENTRIES = 2**22  # of a parameter that are projected at once
KEPT = 2**18  # entries of a parameter whose draws are kept, one byte each; and of a
# larger one, entries that `project_some` has


def project(name: str, gradient: Tensor) -> Tensor:
    """Return the projections of one parameter's gradient.

        s_k = Σ_i [bucket(i) = k] sign(i) g_i,   E |s|² = |g|²

    Args:
        name: of the parameter; buckets and signs follow from it.
        gradient: of any shape, dtype and device.

    Returns:
        [64] in float64 on the CPU; the entries themselves where there are no more.
    """
    g = gradient.reshape(-1)
    if len(g) <= DIRECTIONS:
        return g.to("cpu", torch.float64)
    out = torch.zeros(DIRECTIONS, dtype=torch.float64)
    if len(g) <= KEPT:
        draws = iter((_cached_draws(name, len(g)),))
    else:
        draws = _draws(name, len(g))
    for part, numbers in zip(g.split(ENTRIES), draws, strict=True):
        # the last bit of a number is the sign, and the rest is the bucket
        signs = 1.0 - 2.0 * (numbers % 2)
        out.index_add_(0, numbers.long() // 2, part.to("cpu", torch.float64) * signs)
    return out


def project_some(name: str, gradient: Tensor) -> Tensor:
    """Return the projections of some entries of one parameter's gradient, evenly spaced
    and few enough to be made after each backward pass.

    Args:
        name: of the parameter.
        gradient: of any shape, dtype and device.

    Returns:
        As of `project`, which has all entries; the same for a small parameter.
    """
    g = gradient.reshape(-1)
    every = -(-len(g) // KEPT)  # rounded up
    return project(name, g[::every])


def _draws(name: str, n: int) -> Iterator[Tensor]:
    """Yield numbers with the buckets and signs of n entries, at most ENTRIES at a time."""
    digest = hashlib.sha256(name.encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    for start in range(0, n, ENTRIES):
        size = (min(ENTRIES, n - start),)
        yield torch.randint(2 * DIRECTIONS, size, generator=random)


@lru_cache(1024)
def _cached_draws(name: str, n: int) -> Tensor:
    """Return the numbers of `_draws` in one tensor, and keep them for the next call."""
    return torch.cat([*_draws(name, n)]).to(torch.uint8)
