# SPDX-License-Identifier: Apache-2.0
"""What the passes of a step, or the steps of a generation batch, tell of a divisor that
one gradient cannot.
"""

from collections.abc import Sequence
from dataclasses import replace

from upref.step.compare.goal import Goal
from upref.verify.factors import aggregation_id, declared_aggregation
from upref.verify.finding import Number
from upref.verify.report import Finding, Report

# a step that has one of these faults alone is right up to a constant
CONSTANT = ("weights-scaled", "sum-divided-by-a-number")
NEAR = 1e-4  # how near a constant must be to a quotient of numbers of tokens
MEAN_OF_MEANS = aggregation_id("seq-mean-token-mean")


def name_single_passes(
    findings: Sequence[Finding], goal: Goal, passes: int, responses: int
) -> list[Finding]:
    """Return the findings; where each backward pass has one response, a mean over
    responses is named as a mean over passes too.

    Args:
        findings: on a step.
        goal: what it is meant to maximize.
        passes: backward passes of the step.
        responses: of the step.
    """
    if passes != responses or responses == 1 or not _counts_tokens(goal):
        return [*findings]
    words = (
        "each backward pass has one response, so it is also the mean of the passes' "
        "own token means"
    )
    return [
        replace(finding, cause=f"{finding.cause}; {words}")
        if MEAN_OF_MEANS in finding.fault_ids
        else finding
        for finding in findings
    ]


def divisor_of_all_steps(
    reports: Sequence[Report],
    errors: Sequence[float],
    tokens: Sequence[int],
    goal: Goal,
) -> str:
    """Return in words that each step is divided by the tokens of the whole generation
    batch; "" where that does not explain every step.

    Args:
        reports: one for each step.
        errors: of their gradients, relative.
        tokens: that train in each step.
        goal: what each is meant to maximize.
    """
    tokens_of_all_steps = sum(tokens)
    steps = len(tokens)
    if not _counts_tokens(goal) or goal.clip is not None or len({*tokens}) == 1:
        return ""
    factors = [
        _factor_of_step(report, error)
        for report, error in zip(reports, errors, strict=True)
    ]
    for multiple, divided_by in ((1, ""), (steps, f" / {steps}")):
        expected = [count * multiple / tokens_of_all_steps for count in tokens]
        if all(
            found is not None and abs(found / expected_factor - 1) < NEAR
            for found, expected_factor in zip(factors, expected, strict=True)
        ):
            counts = " and ".join(map(str, tokens))
            return (
                f"the sum over tokens is divided by {tokens_of_all_steps}{divided_by} in each optimizer "
                f"step: {tokens_of_all_steps} is the number of tokens of all {steps} steps "
                f"together, which have {counts}"
            )
    return ""


def _counts_tokens(goal: Goal) -> bool:
    """Tell whether the objective divides by the number of tokens of a step."""
    agg = declared_aggregation(goal.objective)
    return agg == "token-mean" or (agg == "group-token-mean" and not goal.grouped)


def is_scaled(finding: Finding) -> bool:
    """Tell whether the finding's one cause is a constant factor.

    Args:
        finding: the first failure of a step.
    """
    ids = finding.fault_ids
    return bool(ids) and all(id_.startswith("weights-scaled") for id_ in ids)


def _factor_of_step(report: Report, error: float) -> float | None:
    """Return the positive constant by which a gradient is off; None where it is not off
    by one.
    """
    if report:
        return 1.0
    first = report.failures[0]
    ids = first.fault_ids
    expected = first.expected
    found = first.found
    if not ids or not all(id_.startswith(CONSTANT) for id_ in ids):
        return None
    if not isinstance(expected, Number) or not isinstance(found, Number):
        return None
    factor = found.value / expected.value
    # a negative one has the same norm and another error
    return factor if abs(abs(factor - 1) - error) < NEAR else None
