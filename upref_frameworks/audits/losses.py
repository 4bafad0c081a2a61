# SPDX-License-Identifier: Apache-2.0
"""The losses of a framework, each compared with the objective that it promises: the
comparison is made ready, the framework computes, and the numbers are compared.
"""

from collections.abc import Collection, Mapping

import torch

from upref.aggregation import row_weights
from upref.registry import get
from upref.verify.faults.losses import LossFault, fault
from upref.weights.batches import typical_batch
from upref_frameworks.audits.case import TOL, Comparison, ComparisonCase
from upref_frameworks.audits.compare import ComparisonRow, compare
from upref_frameworks.audits.faulty import make_explanation
from upref_frameworks.audits.framework import Framework
from upref_frameworks.audits.grid import grid

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
    compared_batch = grid(explanation, one_adv=needs_one_adv, single=single)
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
