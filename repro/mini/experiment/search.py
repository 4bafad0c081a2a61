# SPDX-License-Identifier: Apache-2.0
"""How a cell gets its own learning rate, and coefficient where its arm has one.

    "reward"      the score of a choice: the mean over bases and seeds of the training
                  reward in the last fifth of the steps
    "exchange"    max over the decodings of Best@32 + exchange · Avg@32 (points; at the
                  end, mean over bases and seeds): what the choice is worth to someone who
                  takes the best decoding and gives `exchange` points of Best@32 for one
                  of Avg@32

A run that stopped scores 0. The highest score is taken, the lower value where two are
equal. If that is the lowest or highest rate tried, the next one on that side is tried as
well, as far as there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from repro.mini.experiment.questions import RunRecord, curve, last_fifth

Scores = dict[float, float | None]  # a rate or coefficient -> score


class Choice(NamedTuple):
    """What is chosen for a cell.

    Attributes:
        rate: None: that of the settings.
        coefficient: None: the arm has none.
    """

    rate: float | None = None
    coefficient: float | None = None

    def __str__(self) -> str:
        if self.coefficient is None:
            return f"{self.rate:g}"
        return f"{self.rate:g} with {self.coefficient:g}"


@dataclass(frozen=True)
class Search:
    """The search of a plan.

    Attributes:
        rates: tried in any case.
        more_rates: tried only where the best rate is at the edge of those tried so far.
        seeds: of its runs; the experiment proper has others.
        settings: of its runs.
        score: "reward" or "exchange", as described above.
        exchange: points of Best@32 that one point of Avg@32 is worth.
    """

    rates: list[float]
    more_rates: list[float]
    seeds: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    score: str = "reward"
    exchange: float = 0.0

    def score_of(self, runs: Sequence[RunRecord]) -> float:
        """Return the score of one choice, from all runs of its search; higher is
        better.
        """
        if self.score == "reward":
            return float(np.mean([_reward(run) for run in runs]))
        points = np.mean([curve(run)[-1] for run in runs], axis=0)
        return float(np.max(points[:, 1] + self.exchange * points[:, 0]))


def _reward(run: RunRecord) -> float:
    """Return the mean reward in the last fifth of the steps where it is finite; 0 for a
    run that stopped.
    """
    if run["status"] != "done":
        return 0.0
    reward = np.array(run["steps"]["reward"])
    return last_fifth(reward[np.isfinite(reward)])


def choose_rate(
    scores: Scores, grid: Sequence[float]
) -> tuple[float | None, list[float]]:
    """Return the rate with the highest score and []; or None and the rates whose scores
    are missing.

    Starts with the grid, and adds the next rate on a side while the best is at this
    edge.

    Args:
        scores: of every rate that may be tried; None while a run is missing.
        grid: the rates that are tried in any case.
    """
    order = sorted(scores)
    tried = [rate for rate in order if rate in grid]
    while True:
        best, missing = choose_value({rate: scores[rate] for rate in tried})
        if best is None:
            return None, missing
        at = order.index(best)
        if best == tried[0] and at > 0:
            tried = [order[at - 1], *tried]
        elif best == tried[-1] and at < len(order) - 1:
            tried = [*tried, order[at + 1]]
        else:
            return best, []


def choose_value(scores: Scores) -> tuple[float | None, list[float]]:
    """Return the value with the highest score, the lower of equal ones, and []; or None
    and the values whose scores are missing, sorted.
    """
    told = {value: score for value, score in scores.items() if score is not None}
    missing = sorted(scores.keys() - told.keys())
    if missing:
        return None, missing
    return max(told, key=lambda value: (told[value], -value)), []
