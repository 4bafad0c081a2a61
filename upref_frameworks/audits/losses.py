# SPDX-License-Identifier: Apache-2.0
"""The losses of a framework, each compared with the objective that it promises: the
comparison is made ready, the framework computes, and the numbers are compared.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from upref.aggregation import row_weights
from upref.registry import REDUCE, Objective, get
from upref.rollouts import Rollouts
from upref.verify.faults.losses import LossFault, fault
from upref.weights.batches import (
    BOUND_EDGES,
    SINGLE_EDGES,
    batch,
    clamped_batch,
    concatenate,
    reference_logp,
    typical_batch,
)
from upref_frameworks.audits.case import MICRO, TOL, Comparison, ComparisonCase
from upref_frameworks.audits.compare import ComparisonRow, compare
from upref_frameworks.audits.faulty import Explanation, make_explanation
from upref_frameworks.audits.framework import Framework

NO_REASON_KNOWN = fault("no reason known", "term")


def rows(
    framework: Framework,
    comparisons: list[Comparison],
    with_defaults: Collection[str],
) -> tuple[list[ComparisonRow], list[str]]:
    """Compare losses of a framework with what they promise.

    Args:
        framework: its tables.
        comparisons: those of its table that are made.
        with_defaults: the losses whose config has defaults.

    Returns:
        The rows of the comparisons, in their order; and the losses that are NaN when a
        masked slot holds NaN, in alphabetical order.

    Raises:
        InputError: the framework cannot compute a loss with these settings.
    """
    rows = []
    nan_in_padding = set()
    for comparison in comparisons:
        mode = comparison.mode
        case = make_comparison_case(
            comparison,
            framework.split_reasons,
            one_adv=framework.one_adv,
            single=framework.tol > TOL,
        )
        # read again for each loss: a framework may write to the objects in its config
        defaults = framework.defaults(mode) if mode in with_defaults else {}
        measured = framework.measure(comparison, defaults, case.batch)
        rows += compare(
            framework.name, case, measured.in_one, measured.split, framework.tol
        )
        if measured.nan_in_padding:
            words = [v for v in comparison.config.values() if isinstance(v, str)]
            nan_in_padding.add(f"{mode} ({', '.join(words)})" if words else mode)
    return rows, sorted(nan_in_padding)


def make_comparison_case(
    comparison: Comparison,
    split_reasons: Mapping[str, LossFault],
    one_adv: bool = False,
    single: bool = False,
) -> ComparisonCase:
    """Look up what a comparison names, once, and make its batch.

    Args:
        comparison: of the framework's table. It is compared in micro-batches if it has a
            paper's settings and its objective does not couple the tokens of a batch.
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
    compared_batch = make_grid(explanation, one_adv=needs_one_adv, single=single)
    typical = typical_batch()
    mask = compared_batch.mask
    weights = row_weights(objective.agg, mask, compared_batch.counts)
    unit = torch.as_tensor(weights, dtype=torch.float64)
    return ComparisonCase(
        comparison=comparison,
        label=label,
        promise=comparison.promise,
        without_faults=make_explanation(objective, comparison.hp, ()),
        explanation=explanation,
        split_explanation=split_explanation,
        batch=compared_batch,
        typical=typical,
        unit=unit.expand(len(mask))[:, None],
    )


def make_grid(
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
    grid = concatenate(parts, multiple_of=MICRO)
    # masked slots hold what could pass for tokens, as a tool's answer in a multi-turn
    # response does
    grid = replace(
        grid,
        logp=grid.logp.masked_fill(~grid.mask, -1.0),
        logp_old=grid.logp_old.masked_fill(~grid.mask, -2.0),
        adv=grid.adv.masked_fill(~grid.mask, 0.5),
    )
    return replace(grid, logp_ref=reference_logp(grid))


def _with_one_adv(objective: Objective) -> Objective:
    """Return an objective for which `batch` gives all tokens of a response one
    advantage: this one if it acts on responses, else this one with the aggregation
    seq-mean.
    """
    if objective.level in REDUCE:
        return objective
    return replace(objective, agg="seq-mean")
