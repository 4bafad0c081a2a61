# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses that compare the responses to a prompt with a target
distribution over them: TPO.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.registry import Objective
from upref.rollouts import Rollouts
from upref.verify.faults import Catalogue, hyperparameter_id
from upref.verify.faults.losses import LossFault, fault
from upref.verify.measure import unit_weights

ETAS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # as people set them


def faults(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    """Of an objective with a temperature η of its target, of groups."""
    if "group" not in objective.reads or "eta" not in hp:
        return
    for eta in ETAS:
        if abs(eta - hp["eta"]) > 1e-9:
            yield fault(
                f"eta is {eta:g}, not {hp['eta']:g}",
                "hyperparameter",
                id=hyperparameter_id("eta"),
                hp={"eta": eta},
                whole=True,
            )
    for id, words, weigh in SHARES:
        yield fault(
            words, "objective", id=id, weigh=partial(weigh, eta=hp["eta"]), whole=True
        )
    for id, words, kind, change in GROUPS:
        yield fault(
            words, kind, id=id, weigh=partial(change, objective, hp), whole=True
        )


# ---- other shares --------------------------------------------------------------------
def _without_old(batch: Rollouts, eta: float) -> Tensor:
    return _target(batch, torch.zeros_like(batch.logp), eta) - _shares(
        batch, batch.logp
    )


def _target_of_new(batch: Rollouts, eta: float) -> Tensor:
    return _target(batch, batch.logp, eta) - _shares(batch, batch.logp)


def _share_of_old(batch: Rollouts, eta: float) -> Tensor:
    return _target(batch, batch.logp_old, eta) - _shares(batch, batch.logp_old)


def _opposite(batch: Rollouts, eta: float) -> Tensor:
    return _target(batch.but(adv=-batch.adv), batch.logp_old, eta) - _shares(
        batch, batch.logp
    )


def _of_means(batch: Rollouts, eta: float) -> Tensor:
    n = batch.mask.sum(1, keepdim=True)
    return (
        _target(batch, batch.logp_old / n, eta) - _shares(batch, batch.logp / n)
    ) / n


def _target_alone(batch: Rollouts, eta: float) -> Tensor:
    return _target(batch, batch.logp_old, eta)


SHARES: tuple[tuple[str, str, Callable[..., Tensor]], ...] = (
    (
        "target-without-old-policy",
        "the target is softmax(A/η) alone: π_old is left out",
        _without_old,
    ),
    (
        "target-of-current-policy",
        "the target is made of π_θ, not of π_old",
        _target_of_new,
    ),
    (
        "share-of-old-policy",
        "the share of a response is that of π_old, not of π_θ",
        _share_of_old,
    ),
    (
        "target-of-opposite-advantages",
        "the target has the advantage with the opposite sign",
        _opposite,
    ),
    (
        "log-prob-averaged-over-response",
        "log π of a response is the mean over its tokens, not the sum",
        _of_means,
    ),
    (
        "target-alone",
        "the shares of π_θ are missing: the term is the target's alone",
        _target_alone,
    ),
)


# ---- other groups --------------------------------------------------------------------
def _of_batch(objective: Objective, hp: dict[str, Any], batch: Rollouts) -> Tensor:
    return unit_weights(
        objective, batch.but(group=torch.zeros_like(_group_ids(batch))), hp
    )


def _mean_of_groups(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """The weights as a mean over groups of means over their responses."""
    return (
        unit_weights(objective, batch, hp)
        / _group_size(batch)
        * len(batch.mask)
        / len(_group_ids(batch).unique())
    )


def _without_size(objective: Objective, hp: dict[str, Any], batch: Rollouts) -> Tensor:
    return unit_weights(objective, batch, hp) / _group_size(batch)


GROUPS: tuple[
    tuple[str, str, str, Callable[[Objective, dict[str, Any], Rollouts], Tensor]], ...
] = (
    (
        "groups-ignored",
        "the target and the shares are over the batch, not over each prompt",
        "batches",
        _of_batch,
    ),
    (
        "prompts-weigh-alike",
        "each prompt has the same weight, whatever the number of its responses",
        "aggregation",
        _mean_of_groups,
    ),
    (
        "group-size-missing",
        "the term of a response is not multiplied by the number of responses to its prompt",
        "aggregation",
        _without_size,
    ),
)


# ---- what they are made of -----------------------------------------------------------
def _group_ids(batch: Rollouts) -> Tensor:
    """The ids of the groups; a batch without ids is one group."""
    if batch.group is None:
        return torch.zeros(len(batch.mask), dtype=torch.long)
    return batch.group


def _group_size(batch: Rollouts) -> Tensor:
    """The number of responses to the prompt of each response, [B, 1]."""
    group = _group_ids(batch)
    return (group[:, None] == group).sum(1, keepdim=True)


def _shares(batch: Rollouts, x: Tensor) -> Tensor:
    """G softmax of the sums of x [B, T] over the responses to one prompt, on each
    token.
    """
    group = _group_ids(batch)
    total = torch.where(batch.mask, x, 0).sum(1)
    peers = group[:, None] == group
    share = total - total.expand_as(peers).masked_fill(~peers, -torch.inf).logsumexp(1)
    return (_group_size(batch) * share.exp()[:, None]).expand_as(batch.mask)


def _target(batch: Rollouts, x: Tensor, eta: float) -> Tensor:
    """The same of x with A/η in it."""
    first = batch.mask & (
        batch.mask.cumsum(1) == 1
    )  # the advantage of a response counts once
    return _shares(batch, x + torch.where(first, batch.adv.expand_as(x) / eta, 0))


TPO = Catalogue("losses", faults)
