# SPDX-License-Identifier: Apache-2.0
"""One comparison, made ready before the framework computes anything: the objective that
its loss promises, with the faults put into it, and the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals, row_weights
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.verify.factors import declared_aggregation
from upref.verify.faults.losses import LossFault, fault
from upref.weights.batches import (
    BOUND_EDGES,
    SINGLE_EDGES,
    batch,
    clamped_batch,
    concatenate,
    reference_logp,
)
from upref_frameworks.settings import loss_name

TOL = 1e-7
MICRO = 8
NO_REASON_KNOWN = fault("no reason known", "term")


@dataclass(frozen=True)
class Comparison:
    """A loss of a framework, what it is compared with, and why the two differ.

    Attributes:
        setting: `default` or `paper`: whose hyperparameters the loss has.
        mode: the framework's name of the loss.
        config: fields of the framework's config, over its defaults.
        objective: the name of the objective that the loss promises.
        hp: hyperparameters of the objective.
        reasons: the faults that account for the difference.
        one_adv: whether the loss takes one advantage per response.
    """

    setting: str
    mode: str
    config: dict[str, Any]
    objective: str
    hp: dict[str, Any]
    reasons: tuple[LossFault, ...] = ()
    one_adv: bool = False

    @property
    def label(self) -> str:
        """Return the loss as `upref check FRAMEWORK:LABEL` reads it: MODE,FIELD=VALUE."""
        return loss_name(self.mode, self.config)

    @property
    def promise(self) -> str:
        """Return the objective with its hyperparameters, such as `dapo, eps_high=0.28`."""
        return self.objective + "".join(f", {k}={v:g}" for k, v in self.hp.items())


@dataclass(frozen=True)
class FaultyObjective:
    """An objective with faults put into it, one after the other.

    Attributes:
        objective: with the faults in its formula.
        hp: its hyperparameters.
        faults: in the order in which they were put in; () for what a comparison
            promises.
        agg: the aggregation that the faults leave.
        agg_of_objective: the one that `objective` computes by itself.
    """

    objective: Objective
    hp: dict[str, Any]
    faults: tuple[LossFault, ...]
    agg: str
    agg_of_objective: str


@dataclass(frozen=True)
class Explanation:
    """What a loss promises, and the faults that should explain its difference.

    Attributes:
        promised: the objective without a fault.
        faulty: with all faults.
        repaired: for each fault of `faulty` the objective with all faults but this one.
        level: whose ratio a regime is printed in: the response's, where either
            objective acts on it.
    """

    promised: FaultyObjective
    faulty: FaultyObjective
    repaired: tuple[FaultyObjective, ...]
    level: str


@dataclass(frozen=True)
class ComparisonCase:
    """All that a comparison needs beside the numbers of the framework.

    Attributes:
        comparison: a row of the framework's table.
        label: the loss as `upref check FRAMEWORK:LABEL` reads it.
        promise: the promised objective with its hyperparameters, in words.
        without_faults: what explains a loss that agrees.
        explanation: explained by the faults of the comparison.
        split_explanation: explained by these and by what micro-batches change; None
            where the loss is not compared in micro-batches.
        batch: where the gradients are compared, [B, T]; see `grid`.
        unit: the weight that the promised aggregation gives to each token; see `unit`.
    """

    comparison: Comparison
    label: str
    promise: str
    without_faults: Explanation
    explanation: Explanation
    split_explanation: Explanation | None
    batch: Rollouts
    unit: Tensor


def make_comparison_case(
    comparison: Comparison,
    split_reasons: Mapping[str, LossFault],
    one_adv: bool = False,
    single: bool = False,
) -> ComparisonCase:
    """Look up what a comparison names, once, and make its batch.

    Args:
        comparison: of the framework's table.
        split_reasons: label or mode of a loss -> why the gradient of micro-batches
            differs.
        one_adv: whether the framework's losses take one advantage per response.
        single: whether the framework computes in float32.

    Returns:
        The case.
    """
    objective = get(comparison.objective)
    label = comparison.label
    faults = comparison.reasons
    explanation = make_explanation(objective, comparison.hp, faults)
    split_explanation = None
    # what couples the tokens of a batch is another objective in each micro-batch,
    # whoever computes it
    if comparison.setting == "paper" and not objective.batch_coupled:
        by_label = split_reasons.get(label)
        by_mode = split_reasons.get(comparison.mode)
        split_reason = by_label or by_mode or NO_REASON_KNOWN
        split_explanation = make_explanation(
            objective, comparison.hp, (*faults, split_reason)
        )
    needs_one_adv = one_adv or comparison.one_adv or objective.one_adv
    compared_batch = grid(explanation, one_adv=needs_one_adv, single=single)
    return ComparisonCase(
        comparison=comparison,
        label=label,
        promise=comparison.promise,
        without_faults=make_explanation(objective, comparison.hp, ()),
        explanation=explanation,
        split_explanation=split_explanation,
        batch=compared_batch,
        unit=unit(objective, compared_batch),
    )


def make_explanation(
    objective: Objective, hp: dict[str, Any], faults: Sequence[LossFault]
) -> Explanation:
    """Put faults into a promised objective: all of them, and all but each one.

    Args:
        objective: the promised one.
        hp: its hyperparameters.
        faults: they are put into it one after the other.

    Returns:
        The explanation.
    """
    promised = _with_faults(objective, hp, ())
    faulty = _with_faults(objective, hp, faults)
    repaired = tuple(
        _with_faults(
            objective, hp, [other for other in faults if other is not left_out]
        )
        for left_out in faults
    )
    levels = [objective.level, faulty.objective.level]
    level = next((level for level in levels if level in REDUCE), objective.level)
    return Explanation(promised, faulty, repaired, level)


def _with_faults(
    objective: Objective, hp: dict[str, Any], faults: Sequence[LossFault]
) -> FaultyObjective:
    """Put faults into an objective one after the other."""
    faulty = objective
    agg = declared_aggregation(objective)
    for added in faults:
        faulty, hp = added.change.put_into(faulty, hp)
        agg = added.change.agg or agg
    return FaultyObjective(faulty, hp, tuple(faults), agg, declared_aggregation(faulty))


def grid(
    explanation: Explanation, one_adv: bool = False, single: bool = False
) -> Rollouts:
    """Make the batch on which a framework's loss is compared with its promise.

    Args:
        explanation: the regimes of the promised objective are in the batch, and those
            of the objective that the faults leave.
        one_adv: give all tokens of a response one advantage.
        single: for a framework that computes in float32; ratios keep a larger distance
            from the bounds.

    Returns:
        Rollouts [B, T] in float64; B is a multiple of MICRO. Also in it are responses
        far from π_old. Masked slots hold numbers that could pass for tokens.
    """
    promised = explanation.promised
    faulty = explanation.faulty
    objectives = [promised.objective, faulty.objective]
    if one_adv:
        objectives = [_with_one_adv(objective) for objective in objectives]
    edges: tuple[float, ...] = BOUND_EDGES
    if single:
        edges = SINGLE_EDGES
    elif promised.objective.level != "token":
        # a framework sums a response's ratio in another order: on a bound, rounding
        # would decide
        edges = tuple(edge for edge in BOUND_EDGES if edge)
    of_promised = batch(objectives[0], edges=edges, seed=0, **promised.hp)
    of_faulty = batch(objectives[1], edges=edges, seed=1, **faulty.hp)
    # some rows twice, so that micro-batches are of one size, as TRL's are
    parts = [of_promised, of_faulty, clamped_batch()]
    rows = concatenate(parts, multiple_of=MICRO)
    # masked slots hold what could pass for tokens, as a tool's answer in a multi-turn
    # response does
    rows = replace(
        rows,
        logp=rows.logp.masked_fill(~rows.mask, -1.0),
        logp_old=rows.logp_old.masked_fill(~rows.mask, -2.0),
        adv=rows.adv.masked_fill(~rows.mask, 0.5),
    )
    return replace(rows, logp_ref=reference_logp(rows))


def _with_one_adv(objective: Objective) -> Objective:
    """Return an objective whose batch has one advantage per response: this one, or it
    with another aggregation.
    """
    if objective.level in REDUCE:
        return objective
    return replace(objective, agg="seq-mean")


def unit(objective: Objective, batch: Rollouts) -> Tensor:
    """Return the weight that the promised aggregation gives to each token.

    Args:
        objective: the promised one.
        batch: token tensors [B, T].

    Returns:
        [B, 1]. A gradient of J divided by it is the token's own weight dJ_t/dlp.
    """
    rows = row_weights(objective.agg, batch.mask, Totals.of(batch.mask, batch.group))
    return torch.as_tensor(rows, dtype=batch.logp.dtype).expand(len(batch.mask))[
        :, None
    ]
