# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses that compare the responses to a prompt with a target distribution over them: TPO."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.verify.faults import Catalogue
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import unit_weights

ETAS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # as people set them


def faults(o: Objective, hp: dict[str, Any], bounds: list[float]) -> Iterator[LossFault]:
    """Of an objective with a temperature η of its target, of groups."""
    if "group" not in o.reads or "eta" not in hp:
        return
    for eta in ETAS:
        if abs(eta - hp["eta"]) > 1e-9:
            yield fault(f"eta is {eta:g}, not {hp['eta']:g}", "hyperparameter", hp={"eta": eta}, whole=True)
    zero = lambda b: torch.zeros_like(b.logp)
    mean = lambda x, b: x / b.mask.sum(1, keepdim=True)
    q, p = (lambda b, x: _target(b, x, hp["eta"])), _shares
    for words, f in (
        ("the target is softmax(A/η) alone: π_old is left out", lambda b: q(b, zero(b)) - p(b, b.logp)),
        ("the target is made of π_θ, not of π_old", lambda b: q(b, b.logp) - p(b, b.logp)),
        ("the share of a response is that of π_old, not of π_θ", lambda b: q(b, b.logp_old) - p(b, b.logp_old)),
        ("the target has the advantage with the opposite sign",
         lambda b: q(b.but(adv=-b.adv), b.logp_old) - p(b, b.logp)),
        ("log π of a response is the mean over its tokens, not the sum",
         lambda b: (q(b, mean(b.logp_old, b)) - p(b, mean(b.logp, b))) / b.mask.sum(1, keepdim=True)),
        ("the shares of π_θ are missing: the term is the target's alone", lambda b: q(b, b.logp_old)),
    ):  # fmt: skip
        yield fault(words, "objective", weigh=f, whole=True)
    yield fault("the target and the shares are over the batch, not over each prompt", "batches",
                weigh=lambda b: unit_weights(o, b.but(group=torch.zeros_like(_group(b))), hp), whole=True)  # fmt: skip
    yield fault("each prompt has the same weight, whatever the number of its responses", "aggregation",
                weigh=lambda b: unit_weights(o, b, hp) / _size(b) * len(b.mask) / len(_group(b).unique()),
                whole=True)  # fmt: skip
    yield fault("the term of a response is not multiplied by the number of responses to its prompt", "aggregation",
                weigh=lambda b: unit_weights(o, b, hp) / _size(b), whole=True)  # fmt: skip


def _group(b: Rollouts) -> Tensor:
    return torch.zeros(len(b.mask), dtype=torch.long) if b.group is None else b.group


def _size(b: Rollouts) -> Tensor:
    group = _group(b)
    return (group[:, None] == group).sum(1, keepdim=True)


def _shares(b: Rollouts, x: Tensor) -> Tensor:
    """G softmax of the sums of x [B, T] over the responses to one prompt, on each token."""
    group = _group(b)
    total = torch.where(b.mask, x, 0).sum(1)
    peers = group[:, None] == group
    share = total - total.expand_as(peers).masked_fill(~peers, -torch.inf).logsumexp(1)
    return (_size(b) * share.exp()[:, None]).expand_as(b.mask)


def _target(b: Rollouts, x: Tensor, eta: float) -> Tensor:
    """The same of x with A/η in it."""
    first = b.mask & (b.mask.cumsum(1) == 1)  # the advantage of a response counts once
    return _shares(b, x + torch.where(first, b.adv.expand_as(x) / eta, 0))


TPO = Catalogue("losses", faults)
