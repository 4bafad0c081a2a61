# SPDX-License-Identifier: Apache-2.0
"""Aggregations, right and wrong ones, as one factor a response: what a token's weight
is multiplied by.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN, row_weights
from upref.registry import Objective
from upref.rollouts import Rollouts

Factor = Callable[[Rollouts], Tensor]
MEAN_OVER_WIDTH = "mean-over-width"  # what verl calls seq-mean-token-sum-norm
TOKEN_SUM = "sum"  # token-sum, as an unwanted aggregation
SAME_FACTOR = 1e-5  # relative: factors that are one number
# the right aggregations: the name of each, and what it divides
MEANING = {
    "token-mean": "the sum over all tokens is divided by their number",
    "group-token-mean": (
        "the sum over the tokens of each group is divided by their number, and the sum over "
        "the groups by the number of groups"
    ),
    "seq-mean-token-mean": (
        "the sum over the tokens of each response is divided by their number, and the sum "
        "over the responses by the number of responses"
    ),
    "seq-mean-token-sum": (
        "the sum over all tokens is divided by the number of responses"
    ),
}


def declared_aggregation(objective: Objective) -> str:
    """Return the name of the objective's aggregation, as one of terms per token: the mean
    of one term per response (seq-mean) is the mean of each response's token mean, or of
    its token sum where the term is of the product of ratios.

    Args:
        objective: the objective.

    Returns:
        A key of FACTORS, or kept-mean, whose factor depends on the objective.
    """
    if objective.level == "sequence_product":
        of_response = "seq-mean-token-sum"
    else:
        of_response = "seq-mean-token-mean"
    other_names = {"seq-mean": of_response, "token-sum": TOKEN_SUM}
    return other_names.get(objective.agg, objective.agg)


def _row_weights_of(agg: str) -> Factor:
    """Return the function from a batch to the row weights of an aggregation, [B]."""

    def factor(batch: Rollouts) -> Tensor:
        """Return one number for each response, [B]."""
        weights = row_weights(agg, batch.mask, batch.counts)
        return torch.as_tensor(weights, dtype=torch.float64).expand(len(batch.mask))

    return factor


def _ones(batch: Rollouts) -> Tensor:
    """Return the factor of a plain sum: 1 for each response, [B]."""
    return torch.ones(len(batch.mask), dtype=torch.float64)


def _lengths(batch: Rollouts) -> Tensor:
    """Return the number of trained tokens of each response, [B]."""
    return batch.mask.sum(-1).double()


class WrongAggregation(NamedTuple):
    """An aggregation that a loss may have by mistake.

    Attributes:
        id: its key in FACTORS, and part of the id of the fault.
        words: its name, as reports print it.
        factor: the factor of each response.
    """

    id: str
    words: str
    factor: Factor


WRONG_AGGREGATIONS = (
    WrongAggregation(
        MEAN_OVER_WIDTH,
        "the mean over the padded width (seq-mean-token-sum-norm by it)",
        lambda batch: _ones(batch) / batch.mask.numel(),
    ),
    WrongAggregation(TOKEN_SUM, "a plain sum over all tokens", _ones),
    WrongAggregation(
        "sum-of-token-means",
        "the sum, not the mean, of the responses' token means",
        lambda batch: 1 / _lengths(batch),
    ),
    WrongAggregation(
        "token-mean-over-responses",
        "token-mean divided once more by the number of responses",
        lambda batch: _row_weights_of("token-mean")(batch) / len(batch.mask),
    ),
    WrongAggregation(
        "token-means-over-tokens",
        "the responses' token means, divided by all tokens",
        lambda batch: 1 / (_lengths(batch) * batch.mask.sum()),
    ),
    WrongAggregation(
        "sum-of-group-means",
        "token-mean of each group, not divided by the number of groups",
        lambda batch: (
            _row_weights_of("group-token-mean")(batch)
            * (1 if batch.group is None else len(batch.group.unique()))
        ),
    ),
    WrongAggregation(
        "sum-over-longest",
        "the sum over tokens by the longest response",
        lambda batch: _ones(batch) / (len(batch.mask) * _lengths(batch).max()),
    ),
    WrongAggregation(
        "sum-over-length-squared",
        "the sum over each response divided by the square of its length",
        lambda batch: 1 / (len(batch.mask) * _lengths(batch) ** 2),
    ),
    WrongAggregation(
        "sum-over-root-of-length",
        "the sum over each response divided by the square root of its length",
        lambda batch: 1 / (len(batch.mask) * _lengths(batch).sqrt()),
    ),
    WrongAggregation(
        "length-weighted-seq-mean",
        "the mean over responses of length-weighted terms",
        lambda batch: _lengths(batch) / len(batch.mask),
    ),
    WrongAggregation(
        "token-mean-over-root-of-length",
        "token-mean of terms divided by the square root of their response's length",
        lambda batch: 1 / (batch.mask.sum() * _lengths(batch).sqrt()),
    ),
    WrongAggregation(
        "length-weighted-token-mean",
        "token-mean of length-weighted terms",
        lambda batch: _lengths(batch) / batch.mask.sum(),
    ),
)
FACTORS: dict[str, Factor] = {name: _row_weights_of(name) for name in MEANING}
FACTORS |= {wrong.id: wrong.factor for wrong in WRONG_AGGREGATIONS}
WORDS = {wrong.id: wrong.words for wrong in WRONG_AGGREGATIONS}


def aggregation_id(name: str) -> str:
    """Return the id of the fault that terms are aggregated by this.

    Args:
        name: a key of FACTORS, or a declared aggregation.
    """
    return f"aggregated-by-{name}"


def aggregation_words(name: str) -> str:
    """Return what reports call an aggregation: a right one by its name.

    Args:
        name: a key of FACTORS, or a declared aggregation.
    """
    return WORDS.get(name, name)


def own_factor(objective: Objective) -> Factor:
    """Return the factor of the objective's own aggregation; of kept-mean, which depends
    on more than lengths, that of token-mean: both are one number for all responses.

    Args:
        objective: the objective.
    """
    return FACTORS.get(declared_aggregation(objective), FACTORS["token-mean"])


def names(first: str) -> list[str]:
    """Return the names of all aggregations of FACTORS, this one before the others. It may
    be kept-mean, which is left out otherwise.

    Args:
        first: a key of FACTORS, kept-mean, or "" for the order of FACTORS.
    """
    every = [*FACTORS, KEPT_MEAN] if first == KEPT_MEAN else FACTORS
    return sorted(every, key=lambda name: name != first)


def common_value(x: Tensor) -> float | None:
    """Find the number that all elements equal, to SAME_FACTOR.

    Args:
        x: of any shape.

    Returns:
        The number, or None where there is none, or where it is 0.
    """
    if x.numel() == 0 or not x.isfinite().all():
        return None
    k = x.mean()
    if k.abs() > 1e-9 and (x - k).abs().max() <= SAME_FACTOR * k.abs():
        return k.item()
    return None


def is_one(factor: float | None) -> bool:
    """Tell whether a factor is 1, to SAME_FACTOR.

    Args:
        factor: a number, or None where there is none.

    Returns:
        False for None.
    """
    return factor is not None and abs(factor - 1) < SAME_FACTOR
