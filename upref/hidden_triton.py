# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels for upref.hidden: one pass over a tile of logits where torch makes many.

`sum_tile` reads each logit once. `gradient_of_tile` reads each logit once and writes its
gradient in the dtype of the products that follow. Both take the float32 logits of a
matrix product, so what they round is what float32 rounds.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG_OF_ZERO = tl.constexpr(-1e4)  # as in upref.hidden
BLOCK = 1024  # columns of a row at once
# Triton runs the kernels on a CPU, in numpy: it reads this when it decorates them
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _not_below(x, least: tl.constexpr):
    """The larger of both. Unlike tl.maximum it keeps NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def _sum_row(
    x_ptr,
    scale,
    m_ptr,
    s_ptr,
    t_ptr,
    best_ptr,
    best_column_ptr,
    width,
    n_blocks,
    BLOCK: tl.constexpr,
):
    """Add a row of the tile to m, s and t of its token; note each block's best."""
    row = tl.program_id(0).to(tl.int64)
    m = tl.load(m_ptr + row)
    s = tl.load(s_ptr + row)
    t = tl.load(t_ptr + row)
    for block in range(n_blocks):
        column = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(
            x_ptr + row * width + column, mask=column < width, other=-float("inf")
        )
        x = x * scale
        of_numbers = tl.where(x == x, x, -float("inf"))  # NaN is in s and t
        best, place = tl.max(of_numbers, 0, return_indices=True)
        tl.store(best_ptr + row * n_blocks + block, best)
        tl.store(best_column_ptr + row * n_blocks + block, block * BLOCK + place)
        new_m = tl.where(best > m, best, m)
        log_rescale = _not_below(m - new_m, LOG_OF_ZERO)
        shifted = _not_below(x - new_m, LOG_OF_ZERO)
        exp_shifted = tl.exp(shifted)
        t = tl.exp(log_rescale) * (t + s * log_rescale)  # of the s before this block
        t += tl.sum(shifted * exp_shifted, 0)
        s = tl.exp(log_rescale) * s + tl.sum(exp_shifted, 0)
        m = new_m
    tl.store(m_ptr + row, m)
    tl.store(s_ptr + row, s)
    tl.store(t_ptr + row, t)


def sum_tile(
    x: Tensor, scale: float, m: Tensor, s: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """Add a tile to the sums of its tokens, in place.

    Args:
        x: the tile, [N, columns], contiguous.
        scale: what its numbers are multiplied by.
        m, s, t: of `upref.hidden`, [N].

    Returns:
        The largest logit of each block of columns, and its column; [N, blocks]. A second
        large one in the same block is not among them.
    """
    n, width = x.shape
    n_blocks = triton.cdiv(width, BLOCK)
    best = x.new_empty(n, n_blocks)
    best_column = torch.empty_like(best, dtype=torch.long)
    if n:
        _sum_row[(n,)](
            x, scale, m, s, t, best, best_column, width, n_blocks, BLOCK=BLOCK
        )
    return best, best_column


@triton.jit
def _gradient_of_block(
    x_ptr,
    scale,
    outer,
    row_ptr,
    id_ptr,
    log_z_ptr,
    H_ptr,
    g_ptr,
    g_H_ptr,
    large_ptr,
    rest_ptr,
    start,
    width,
    HAS_ENTROPY: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient by a block of a row's logits, as one number or two parts."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row_of_x = tl.load(row_ptr + row)
    x = tl.load(x_ptr + row_of_x * width + column, mask=inside, other=0.0) * scale
    g = tl.load(g_ptr + row)
    log_p = _not_below(x - tl.load(log_z_ptr + row), LOG_OF_ZERO)
    factor = -g
    if HAS_ENTROPY:
        factor -= tl.load(g_H_ptr + row) * (log_p + tl.load(H_ptr + row))
    dx = tl.exp(log_p) * factor
    dx += tl.where(column + start == tl.load(id_ptr + row), g, 0.0)
    if HAS_CAP:
        dx *= outer * (1 - (x / outer) * (x / outer))
    large = dx.to(large_ptr.dtype.element_ty)
    tl.store(large_ptr + row * width + column, large, mask=inside)
    if HAS_REST:
        rest = (dx - large.to(tl.float32)).to(rest_ptr.dtype.element_ty)
        tl.store(rest_ptr + row * width + column, rest, mask=inside)


def gradient_of_tile(
    x: Tensor,
    scale: float,
    outer: float,
    rows: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    start: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the gradient by the products of a tile, [n, columns]: in bfloat16 as two
    parts, whose sum is exact to 2^-17.

    Args:
        x: the tile, contiguous, which is not written to.
        scale: what its numbers are multiplied by.
        outer: of the softcap; 0 where there is none.
        rows: which rows of x have a gradient, [n].
        numbers: of these tokens, n each: their ids, log Z, H, and the upstream gradients
            of log π and of H; None for 0.
        start: of the tile in the vocabulary.
        dtype: of the products that follow.
    """
    n, width = len(rows), x.shape[1]
    n_parts = 2 if dtype == torch.bfloat16 else 1
    parts = [x.new_empty(n, width, dtype=dtype) for _ in range(n_parts)]
    if n:
        ids, log_z, H, g, g_H = (
            None if number is None else number.contiguous() for number in numbers
        )
        _gradient_of_block[(n, triton.cdiv(width, BLOCK))](
            x,
            scale,
            outer,
            rows,
            ids,
            log_z,
            H,
            g,
            g_H,
            parts[0],
            parts[-1],
            start,
            width,
            HAS_ENTROPY=g_H is not None,
            HAS_CAP=outer != 0,
            HAS_REST=n_parts == 2,
            BLOCK=BLOCK,
        )
    return parts
