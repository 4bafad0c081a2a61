# SPDX-License-Identifier: Apache-2.0
"""Random projections of a parameter's gradient, which stand for it where the gradient
itself is too large to be kept.
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
    draws = iter((_kept(name, len(g)),)) if len(g) <= KEPT else _drawn(name, len(g))
    for part, drawn in zip(g.split(ENTRIES), draws, strict=True):
        # one number has the bucket, and in its last bit the sign
        signs = 1.0 - 2.0 * (drawn % 2)
        out.index_add_(0, drawn.long() // 2, part.to("cpu", torch.float64) * signs)
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
    return project(name, g[:: -(-len(g) // KEPT)])


def _drawn(name: str, n: int) -> Iterator[Tensor]:
    """The buckets and signs of n entries, in parts."""
    digest = hashlib.sha256(name.encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    for start in range(0, n, ENTRIES):
        size = (min(ENTRIES, n - start),)
        yield torch.randint(2 * DIRECTIONS, size, generator=random)


@lru_cache(1024)
def _kept(name: str, n: int) -> Tensor:
    """The same of a parameter that is projected again and again."""
    return torch.cat([*_drawn(name, n)]).to(torch.uint8)
