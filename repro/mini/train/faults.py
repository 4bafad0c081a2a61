# SPDX-License-Identifier: Apache-2.0
"""Mistakes of trainers, made on purpose: what does each cost?

    python -m repro.mini.train --objective dapo --aggregation token-mean --fault no_ratio

Each is one that a framework, or a user's code in a public thread, has had. The loss is
otherwise the objective's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import upref
from upref import Totals
from upref.ops import clip, exp

MICRO_BATCHES = 4  # of a minibatch, where a fault has micro-batches
Hyperparameters = dict[str, Any]


@dataclass(frozen=True)
class Minibatch:
    """What the loss of one minibatch reads: upref/rollouts.py has the letters."""

    lp: Tensor  # [B, T]
    lp_old: Tensor  # [B, T]
    A: Tensor  # [B, 1]
    mask: Tensor  # [B, T]
    group: Tensor  # [B]
    lp_ref: Tensor | None
    H: Tensor | None
    totals: Totals

    def rows(self, which: Tensor) -> "Minibatch":
        """A micro-batch, which counts as a whole minibatch."""
        mask, group = self.mask[which], self.group[which]
        return Minibatch(
            self.lp[which],
            self.lp_old[which],
            self.A[which],
            mask,
            group,
            None if self.lp_ref is None else self.lp_ref[which],
            None if self.H is None else self.H[which],
            Totals.of(mask, group),
        )


def objective(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """J as it should be."""
    return o.J(m.lp, m.lp_old, m.A, m.mask, m.group, m.lp_ref, m.H, m.totals, **hp)


# ---- what is wrong with a minibatch's loss -----------------------------------------------
def no_ratio(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """π_old is the policy of the update itself, so that every ratio is 1."""
    return objective(o, replace(m, lp_old=m.lp.detach()), hp)


def shifted_old(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """π_old's log-probabilities are those of the token before."""
    late = m.lp_old.roll(1, 1)
    late[:, 0] = m.lp_old[:, 0]
    return objective(o, replace(m, lp_old=late), hp)


def shifted_mask(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """The mask begins one token late: the first token of a response does not train."""
    mask = m.mask.clone()
    mask[:, 0] = False
    return objective(o, replace(m, mask=mask, totals=Totals.of(mask, m.group)), hp)


def micro_batch_means(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """The mean of the micro-batches' own token means; micro-batches have rows of one length."""
    parts = [objective(o, m.rows(rows), hp) for rows in _micro_batches(m)]
    return torch.stack(parts).mean()


def last_micro_batch(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """Of four micro-batches the last one trains; the divisor is the minibatch's."""
    part = m.rows(torch.arange(len(m.mask)).chunk(MICRO_BATCHES)[-1])
    return objective(o, replace(part, totals=m.totals), hp)


def padding_counts(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """The divisor counts padding: responses times the longest of them."""
    totals = m.totals._replace(tokens=torch.tensor(float(m.mask.numel())))
    return objective(o, replace(m, totals=totals), hp)


def clip_without_minimum(
    o: upref.Objective, m: Minibatch, hp: Hyperparameters
) -> Tensor:
    """clip(r) A, without the minimum of it and r A."""

    def fn(
        lp: Any,
        lp_old: Any,
        A: Any,
        *,
        eps_low: Any = 0.2,
        eps_high: Any = 0.28,
        c: Any = None,
    ) -> Any:
        return clip(exp(lp - lp_old), 1 - eps_low, 1 + eps_high) * A

    return objective(replace(o, fn=fn), m, hp)


def penalty_added(o: upref.Objective, m: Minibatch, hp: Hyperparameters) -> Tensor:
    """The KL term has the wrong sign: distance from the base is rewarded."""
    # J = P - βK, and P + βK = 2 P - J
    return 2 * objective(o, m, hp | {"beta": 0.0}) - objective(o, m, hp)


def _micro_batches(m: Minibatch) -> tuple[Tensor, ...]:
    """Rows of similar length together, as a trainer packs them."""
    return m.mask.sum(1).argsort(stable=True).chunk(MICRO_BATCHES)


LOSSES: dict[str, Callable[[upref.Objective, Minibatch, Hyperparameters], Tensor]] = {
    fault.__name__: fault
    for fault in (
        no_ratio,
        shifted_old,
        shifted_mask,
        micro_batch_means,
        last_micro_batch,
        padding_counts,
        clip_without_minimum,
        penalty_added,
    )
}
# what is wrong before the loss
TEMPERATURE = "temperature_forgotten"  # the trainer's log-probabilities are raw
GROUPS = "other_groups"  # a reward is compared with rewards of other prompts
NAMES = (*LOSSES, TEMPERATURE, GROUPS)


def loss_of(fault: str) -> Callable[..., Tensor]:
    """J(objective, minibatch, hyperparameters) with a fault, or as it should be."""
    return LOSSES.get(fault, objective)


def temperature_of(fault: str, temperature: float) -> float:
    """By what the trainer divides its logits."""
    return 1.0 if fault == TEMPERATURE else temperature


def groups_of(fault: str, group: Tensor, prompts: int) -> Tensor:
    """The groups of the advantages: with the fault, rows are dealt to prompts in turn."""
    return torch.arange(len(group)) % prompts if fault == GROUPS else group
