# SPDX-License-Identifier: Apache-2.0
"""The batch on which a framework's loss is compared with what it promises."""

from dataclasses import replace

from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts
from upref.weights.batches import (
    BOUND_EDGES,
    SINGLE_EDGES,
    batch,
    clamped_batch,
    concatenate,
    reference_logp,
)
from upref_frameworks.audits.faulty import Explanation

MICRO = 8  # micro-batches into which the batch is split


def grid(
    explanation: Explanation, one_adv: bool = False, single: bool = False
) -> Rollouts:
    """Make the batch on which a framework's loss is compared with its promise.

    Args:
        explanation: the regimes of the promised objective are in the batch, and those
            of the objective that the faults leave.
        one_adv: give all tokens of a response one advantage.
        single: for a framework that computes in float32 (single precision); ratios keep
            a larger distance from the bounds.

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
    """Return an objective for which `batch` gives all tokens of a response one
    advantage: this one if it acts on responses, else this one with the aggregation
    seq-mean.
    """
    if objective.level in REDUCE:
        return objective
    return replace(objective, agg="seq-mean")
