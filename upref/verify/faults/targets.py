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
    """Yield the faults of an objective whose target over a group has a temperature η;
    none for other objectives.
    """
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
    for fault_id, words, weigh in SHARES:
        yield fault(
            words,
            "objective",
            id=fault_id,
            weigh=partial(weigh, eta=hp["eta"]),
            whole=True,
        )
    for fault_id, words, kind, change in GROUPS:
        yield fault(
            words, kind, id=fault_id, weigh=partial(change, objective, hp), whole=True
        )


# ---- other shares --------------------------------------------------------------------
def _with_target_of_advantages_alone(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if π_old is missing from the target."""
    return _scaled_target(batch, torch.zeros_like(batch.logp), eta) - _scaled_shares(
        batch, batch.logp
    )


def _with_target_of_current_policy(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if the target is made of π_θ."""
    return _scaled_target(batch, batch.logp, eta) - _scaled_shares(batch, batch.logp)


def _with_share_of_old_policy(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if the share is that of π_old."""
    return _scaled_target(batch, batch.logp_old, eta) - _scaled_shares(
        batch, batch.logp_old
    )


def _with_opposite_advantages(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if the target has -A for A."""
    return _scaled_target(
        batch.but(adv=-batch.adv), batch.logp_old, eta
    ) - _scaled_shares(batch, batch.logp)


def _with_means_over_tokens(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if log π of a response is the mean over its tokens."""
    n = batch.mask.sum(1, keepdim=True)
    return (
        _scaled_target(batch, batch.logp_old / n, eta)
        - _scaled_shares(batch, batch.logp / n)
    ) / n


def _without_share(batch: Rollouts, eta: float) -> Tensor:
    """Return the weights if the share of π_θ is not subtracted."""
    return _scaled_target(batch, batch.logp_old, eta)


SHARES: tuple[tuple[str, str, Callable[..., Tensor]], ...] = (
    (
        "target-without-old-policy",
        "the target is softmax(A/η) alone: π_old is left out",
        _with_target_of_advantages_alone,
    ),
    (
        "target-of-current-policy",
        "the target is made of π_θ, not of π_old",
        _with_target_of_current_policy,
    ),
    (
        "share-of-old-policy",
        "the share of a response is that of π_old, not of π_θ",
        _with_share_of_old_policy,
    ),
    (
        "target-of-opposite-advantages",
        "the target has the advantage with the opposite sign",
        _with_opposite_advantages,
    ),
    (
        "log-prob-averaged-over-response",
        "log π of a response is the mean over its tokens, not the sum",
        _with_means_over_tokens,
    ),
    (
        "target-alone",
        "the shares of π_θ are missing: the term is the target's alone",
        _without_share,
    ),
)


# ---- other groups --------------------------------------------------------------------
def _with_one_group(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """Return the weights if the whole batch is one group."""
    return unit_weights(
        objective, batch.but(group=torch.zeros_like(_group_ids(batch))), hp
    )


def _averaged_over_groups(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """Return the weights if each group counts alike, whatever its size."""
    return (
        unit_weights(objective, batch, hp)
        / _group_size(batch)
        * len(batch.mask)
        / len(_group_ids(batch).unique())
    )


def _without_group_size(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """Return the weights if a term is not multiplied by the size of its group."""
    return unit_weights(objective, batch, hp) / _group_size(batch)


GROUPS: tuple[
    tuple[str, str, str, Callable[[Objective, dict[str, Any], Rollouts], Tensor]], ...
] = (
    (
        "groups-ignored",
        "the target and the shares are over the batch, not over each prompt",
        "batches",
        _with_one_group,
    ),
    (
        "prompts-weigh-alike",
        "each prompt has the same weight, whatever the number of its responses",
        "aggregation",
        _averaged_over_groups,
    ),
    (
        "group-size-missing",
        "the term of a response is not multiplied by the number of responses to its prompt",
        "aggregation",
        _without_group_size,
    ),
)


# ---- what they are made of -----------------------------------------------------------
def _group_ids(batch: Rollouts) -> Tensor:
    """Return the group id of each response, [B]; a batch without ids is one group."""
    if batch.group is None:
        return torch.zeros(len(batch.mask), dtype=torch.long)
    return batch.group


def _group_size(batch: Rollouts) -> Tensor:
    """Return the number of responses to the prompt of each response, [B, 1]."""
    group = _group_ids(batch)
    return (group[:, None] == group).sum(1, keepdim=True)


def _scaled_shares(batch: Rollouts, x: Tensor) -> Tensor:
    """Return the share of each response in its group, times the size G of the group,
    on each token, [B, T]. The share is the softmax over the group of the sums of x.
    """
    group = _group_ids(batch)
    sum_of_response = torch.where(batch.mask, x, 0).sum(1)
    is_same_group = group[:, None] == group
    # row i has the sums of the group of response i, and -inf for other responses
    sums_of_group = sum_of_response.expand_as(is_same_group).masked_fill(
        ~is_same_group, -torch.inf
    )
    log_share = sum_of_response - sums_of_group.logsumexp(1)
    return (_group_size(batch) * log_share.exp()[:, None]).expand_as(batch.mask)


def _scaled_target(batch: Rollouts, x: Tensor, eta: float) -> Tensor:
    """Return the target of each response, times the size of its group, [B, T]: the
    share that x with A/η in it gives.
    """
    first = batch.mask & (
        batch.mask.cumsum(1) == 1
    )  # the advantage of a response counts once
    return _scaled_shares(
        batch, x + torch.where(first, batch.adv.expand_as(x) / eta, 0)
    )


TPO = Catalogue("losses", faults)
