# SPDX-License-Identifier: Apache-2.0
"""Losses as framework engineers write them, most of them wrong, each with the oracles
that must notice.

A loss is `(log_prob, old_log_prob, advantages, mask, *, hyperparameters) ->
scalar`, to be minimized; `ref_log_prob` and `group` are passed where the signature has
them. RIGHT are the correct ones, ALL is everything.
"""

from tests.support import cases


def Case(
    function, objective, hp=None, oracles=frozenset(), why="", source="", leaks=False
):
    """Return a case of the zoo, with arguments in the order of its tables. leaks:
    whether a NaN in a masked slot reaches its gradient.
    """
    return cases.Case(function, objective, hp or {}, oracles, why, leaks, source)


from . import (  # noqa: E402
    aggregation,
    clipping,
    family,
    gradients,
    hygiene,
    masking,
    numerics,
    right,
    sequence,
)

WRONG = [
    c
    for m in (
        clipping,
        aggregation,
        masking,
        gradients,
        sequence,
        family,
        numerics,
        hygiene,
    )
    for c in m.ZOO
]
RIGHT = right.ZOO
ALL = WRONG + RIGHT
