# SPDX-License-Identifier: Apache-2.0
"""Whether the set's statements about its own losses hold, on private batches.

The checker is not used. The batches are not those of upref.weights: other lengths,
ratios, prompts and samplers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.fifth_set.case import Case
from upref.registry import get
from upref.rollouts import Rollouts
from upref.user_code import read


def private(seed: int, spread: float, rows: int = 14, columns: int = 23) -> Rollouts:
    """Return a ragged batch with holes, prompts of uneven sizes, a reference and a
    sampler.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(1, columns, (rows,), generator=g)
    mask = torch.arange(columns) < lengths[:, None]
    mask &= (torch.rand(rows, columns, generator=g) > 0.15) | (
        torch.arange(columns) == 0
    )
    old = -normal(rows, columns).abs() * 2 - 0.05
    step = normal(rows, columns) * spread
    lp = torch.minimum(old + step, torch.full_like(old, -1e-4))
    A = (
        normal(rows, 1).expand(rows, columns)
        * torch.where(torch.arange(rows) % 7 == 3, 0, 1.7)[:, None]
    )
    A = torch.where(torch.arange(rows)[:, None] == 5, 8.0, A)
    group = torch.tensor([0] * 2 + [1] * 5 + [2] * 3 + [3] * 4)[
        torch.randperm(rows, generator=g)
    ]
    ref = (
        lp
        - 0.4 * normal(rows, columns)
        - torch.where(torch.rand(rows, columns, generator=g) < 0.1, 2.0, 0)
    )
    ref = ref.clamp(max=-1e-4)
    near = torch.where(torch.arange(rows)[:, None] % 3 == 0, 1e-4, 0.5)
    mu = torch.minimum(old - normal(rows, columns) * near, torch.full_like(old, -1e-4))
    H = torch.rand(rows, columns, generator=g, dtype=torch.float64) * 4
    b = Rollouts(lp, old, A.contiguous(), mask, group, ref, H, logp_sampler=mu)
    return replace(b, logp=torch.where(mask, lp, -1.0))


BATCHES = [(1, 0.3), (2, 1.0), (3, 2.5), (4, 3e-4), (5, 0.02)]


def reference(case: Case, b: Rollouts) -> Tensor:
    """Return dJ/dlp of the objective."""
    hp = dict(case.hp)
    o = get(case.target)
    o = o.aggregated(agg) if (agg := hp.pop("agg", "")) else o
    x = b.logp.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(o.loss(replace(b, logp=x), **hp), x)
    return -g


def gap(case: Case) -> float:
    """Return how far a loss's gradients are from its objective's, of the largest
    gradient.
    """
    hp = dict(case.hp)
    o = get(case.target)
    o = o.aggregated(agg) if (agg := hp.pop("agg", "")) else o
    loss = read(case.function, o, hp)
    worst = 0.0
    for seed, spread in BATCHES:
        b = loss.visible_batch(private(seed, spread))
        want, got = reference(case, b), loss.gradient(b)
        size = want.abs().max().clamp(min=1e-12)
        off = torch.where(b.mask, (got - want).abs() / size, 0).nan_to_num(nan=9.0)
        worst = max(worst, off.max().item())
    return worst


def disagreements(cases: Iterable[Case]) -> Iterator[str]:
    """Yield a line for each loss of which the set says something else than these
    batches show.
    """
    for case in cases:
        if case.kind != "loss" or case.shows != "gradient":
            continue
        off = gap(case)
        if (off < 1e-5) != case.right:
            yield f"{case.id}: {case.fault or 'right'}, yet its gap is {off:.1e}"
