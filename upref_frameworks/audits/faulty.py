# SPDX-License-Identifier: Apache-2.0
"""A promised objective with faults put into it, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from upref.registry import REDUCE, Objective
from upref.verify.factors import declared_aggregation
from upref.verify.faults.losses import LossFault


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
    # a level of REDUCE has one ratio for each response
    levels = [objective.level, faulty.objective.level]
    level = next((level for level in levels if level in REDUCE), objective.level)
    return Explanation(promised, faulty, repaired, level)


def _with_faults(
    objective: Objective, hp: dict[str, Any], faults: Sequence[LossFault]
) -> FaultyObjective:
    """Put faults into an objective one after the other. The last fault with another
    aggregation decides which one is left.
    """
    faulty = objective
    agg = declared_aggregation(objective)
    for added in faults:
        faulty, hp = added.change.put_into(faulty, hp)
        agg = added.change.agg or agg
    return FaultyObjective(faulty, hp, tuple(faults), agg, declared_aggregation(faulty))
