# SPDX-License-Identifier: Apache-2.0
"""The weight of every token, read off a gradient: g = -Σ_t w_t ∇_θ log π(o_t).

With more parameters than tokens the w_t are determined. The Jacobian [∇_θ log π(o_t)] has a column for every token,
prompts and masked tokens included; its columns are scaled to norm 1, and its SVD gives the weights and the residual.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from upref.step.forward import Forward
from upref.step.reference import Gradient

COORDINATES = 30_000  # of the gradient that are read; chosen at random where there are more
SMALL = 1e-10  # singular values below this part of the largest are zero


@dataclass(frozen=True)
class Reading:
    """w_t of every token but the first of each row, and how much of the gradient they leave unexplained."""

    weights: list[Tensor]  # [S - 1] of each row, nan where the gradient does not determine it
    residual: float  # |g + Σ w ∇log π| / |g|
    extra: Tensor  # coefficients of the columns beside the tokens'


class Coordinates:
    """Which entries of a gradient are compared: all, or a random choice of them."""

    def __init__(self, like: Gradient, names: Sequence[str]):
        self.names = [n for n in names if n in like]
        size = sum(like[n].numel() for n in self.names)
        self.chosen = None
        if size > COORDINATES:
            self.chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:COORDINATES]

    def __call__(self, g: Gradient) -> Tensor:
        return self.some(torch.cat([g[n].reshape(-1) for n in self.names]))

    def some(self, flat: Tensor) -> Tensor:
        return flat if self.chosen is None else flat[..., self.chosen]


def columns(forward: Forward, at: Coordinates) -> Tensor:
    """[∇ log π(o_t)] of every token but the first of each row."""
    out = []
    for i, (z, row) in enumerate(zip(forward.z, forward.rows, strict=True)):
        one = torch.eye(len(row.ids) - 1, dtype=torch.float64)
        with torch.enable_grad():
            lp = forward.scored(i, 1)
        (dz,) = torch.autograd.grad(lp, forward.leaves[i], one, is_grads_batched=True)
        out += [at.some(g) for g in forward.model.pulls(z, dz, row.ids, at.names)]
    return torch.cat(out).T


def solved(A: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """x of A x = y, how far each x_t is determined (its error over the residual's), and |A x - y| / |y|."""
    size = A.norm(dim=0)
    live = size > 1e-12 * size.max().clamp(min=1e-300)
    U, S, Vh = torch.linalg.svd(A[:, live] / size[live], full_matrices=False)
    keep = S > SMALL * S[0]
    inverse = (Vh[keep].T / S[keep]) @ U[:, keep].T
    x = torch.zeros(A.shape[1], dtype=A.dtype)
    error = torch.full_like(x, torch.inf)
    x[live] = inverse @ y / size[live]
    error[live] = inverse.norm(dim=1) / size[live]
    lost = 1 - (Vh[keep] ** 2).sum(0)  # a part in the null space is not determined
    error[live] = torch.where(lost > 1e-8, torch.inf, error[live])
    rest = (A @ x - y).norm() / y.norm().clamp(min=1e-300)
    return x, error * rest * y.norm(), float(rest)


def read(forward: Forward, g: Gradient, names: Sequence[str], extra: Sequence[Gradient] = ()) -> Reading:
    """The weights that make g of this forward pass; extra: more gradients that may be part of it."""
    at = Coordinates(g, names)
    A = columns(forward, at)
    tokens = A.shape[1]
    if extra:
        A = torch.cat([A, torch.stack([at({n: e[n].expand_as(g[n]) for n in names}) for e in extra], 1)], 1)
    x, error, residual = solved(A, -at(g))
    x = torch.where(error > 1e-3 * x[:tokens].abs().max().clamp(min=1e-300), torch.nan, x)
    weights = x[:tokens].split([len(r.ids) - 1 for r in forward.rows])
    return Reading([*weights], residual, x[tokens:])
