# SPDX-License-Identifier: Apache-2.0
"""A loss that is to be identified: what was measured of it, the objectives that it may
be, and how far each of them is.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import BY_LENGTH
from upref.identification.identification import Match
from upref.registry import Objective, get, parts
from upref.rollouts import Rollouts
from upref.user_code import Loss
from upref.verify.factors import aggregation_words, declared_aggregation
from upref.verify.match import (
    Candidate,
    best_candidate,
    in_range,
    uncoupled_candidates,
)
from upref.verify.measure import LossCase, unit_weights
from upref.verify.oracles.weights import BESIDE_BOUND
from upref.verify.probe import SIGNS, BlackBox, Measured, measure_batches
from upref.weights.batches import is_near_bound
from upref.weights.black_box import relative_error

# bounds that agree so far are the same bound, moved by a constant in a logarithm
LOOSE_BOUND = 1e-3
MOST_CANDIDATES = 6  # whose distance is measured, where none fits
WORTH_A_REFIT = (
    0.1  # the largest share of wrong points of a candidate that is tried again
)


@dataclass(frozen=True)
class Subject:
    """A loss beside the objectives that it may be.

    Attributes:
        box: what was measured of the loss before any objective is tried.
        batches: batches with its gradients: of tokens first, random ones last.
        candidates: the objectives, each with the hyperparameters that fit best.
    """

    box: BlackBox
    batches: list[Measured]
    candidates: list[Candidate]

    @property
    def loss(self) -> Loss:
        return self.box.loss

    @property
    def first_batch(self) -> Rollouts:
        """The batch of tokens."""
        return self.batches[0].batch

    @property
    def bounds(self) -> list[float]:
        """The ratios at which the weight jumps for a sign of A, ascending."""
        return sorted({round(r, 9) for A in SIGNS for r in self.box.bounds(A)})

    @property
    def is_loose(self) -> bool:
        """Whether bounds are compared to LOOSE_BOUND alone."""
        return self.box.resolution >= LOOSE_BOUND

    @property
    def has_rounded_bounds(self) -> bool:
        """Whether bounds are compared no nearer than float32 rounds them."""
        return self.box.resolution >= BESIDE_BOUND

    @property
    def divides_by_length(self) -> bool:
        """Whether its factor is one over a fixed length, as in Dr. GRPO's code."""
        return self.box.agg == "seq-mean-token-sum" and 0 < self.box.scale < 1

    @property
    def length(self) -> float | None:
        """The fixed length by which it divides, None where it divides by none."""
        return 1 / self.box.scale if self.divides_by_length else None

    @property
    def aggregation(self) -> str:
        """Its aggregation in words, with the fixed length; "" where none was recognized."""
        if self.length:
            return f"{BY_LENGTH}, L = {self.length:.7g}"
        return aggregation_words(self.box.agg)

    def has_aggregation_of(self, objective: Objective, agg: str = "") -> bool:
        """Tell whether its aggregation is the objective's, or both are token means and
        the loss takes no group ids: it gets a batch of one group, where these are
        equal.

        Args:
            objective: the objective.
            agg: the aggregation where none was recognized on policy.
        """
        aggregations = {declared_aggregation(objective), self.box.agg or agg}
        return len(aggregations) == 1 or (
            "group" not in self.loss.reads
            and aggregations == {"token-mean", "group-token-mean"}
        )

    def has_kl_of(self, objective: Objective) -> bool:
        """Tell whether the loss has no KL term, or the objective's own.

        Args:
            objective: the objective.
        """
        box = self.box
        return not box.kl or (objective.kl == box.kl and box.beta > 0)

    def case_of(self, match: Match) -> LossCase:
        """Return the case of the loss and a match.

        Args:
            match: the match.
        """
        objective = get(match.name)
        hp = objective.resolve({k: v for k, v in match.hp.items() if v is not None})
        agg = self.box.agg or declared_aggregation(objective)
        return replace(self.box.case, objective=objective, hp=hp, agg=agg)

    # ---- other readings of the same loss ---------------------------------------------
    def refitted(self, box: BlackBox) -> "Subject":
        """Return the subject with another box, to which the candidates are fitted anew.

        Args:
            box: of the same loss.
        """
        candidates = [best_candidate(c.objective, box) for c in self.candidates]
        return replace(self, box=box, candidates=candidates)

    def loosened(self, near: float) -> "Subject":
        """Return the subject as it is measured at a distance from each bound, with the
        candidates that are wrong at few of the points. They are fitted anew.

        Args:
            near: the relative distance.
        """
        box = self.box.loosened(near)
        worth = [c for c in self.candidates if c.miss[0] < WORTH_A_REFIT]
        fewer = replace(self, batches=measure_batches(box), candidates=worth)
        return fewer.refitted(box)

    # ---- the objectives that fit, and the nearest ------------------------------------
    @cached_property
    def matches(self) -> list[Match]:
        """The candidates that agree on the curve and on every batch, to 10 times the
        tolerance of the box, the simplest first.
        """
        found = [self.compare(c) for c in self.candidates if c.fits]
        fitting = [match for match in found if match.distance <= 10 * self.box.tol]
        return sorted(fitting, key=simplicity)

    @cached_property
    def nearest(self) -> Match:
        """The match that is nearest on the batches, among the MOST_CANDIDATES that are
        nearest on the curve.
        """
        candidates = self.candidates
        if self.box.batch_coupled:
            candidates = candidates + uncoupled_candidates(self.box)
        on_curve = sorted(candidates, key=_distance_on_curve)[:MOST_CANDIDATES]
        compared = map(self.compare, on_curve)
        return min(compared, key=lambda match: (match.mean, match.distance))

    def compare(self, candidate: Candidate) -> Match:
        """Compare a candidate with the loss on all batches.

        Args:
            candidate: an objective with hyperparameters.

        Returns:
            The candidate as a match, which may be far.
        """
        objective = candidate.objective
        errors = [
            self._errors(candidate, measured)
            for measured in self.batches
            if not (measured.advantages_differ and objective.one_adv)
        ]
        tokens = sum(int(measured.batch.mask.sum()) for measured in self.batches)
        in_total = sum(error.clamp(max=1).sum().item() for error in errors)
        hp = candidate.effective_hp() if in_range(objective, candidate.hp) else {}
        same_kl = self.has_kl_of(objective)
        if objective.kl and same_kl:
            hp["beta"] = self.box.beta
        return Match(
            objective.name,
            hp,
            self.aggregation,
            self.has_aggregation_of(objective),
            same_kl,
            distance=max(error.max().item() for error in errors),
            mean=in_total / tokens,
            length=self.length,
        )

    def _errors(self, candidate: Candidate, measured: Measured) -> Tensor:
        """Return the relative difference of the weights on each token, 0 on masked slots.
        The hyperparameters have no beta: the KL term is the one measured of the loss.
        """
        box = self.box
        objective = candidate.objective
        batch = measured.batch
        expected = unit_weights(objective, batch, candidate.hp) + box.kl_weights(batch)
        agg = box.agg or declared_aggregation(objective)
        found = measured.gradient / box.case.factors(batch, agg) / box.scale
        errors = relative_error(found, expected, batch.adv)
        if box.case.single:
            weights = partial(unit_weights, objective, hp=candidate.hp)
            errors = errors.masked_fill(is_near_bound(weights, batch), 0)
        return torch.where(batch.mask, errors, 0)


def _distance_on_curve(candidate: Candidate) -> tuple[Any, ...]:
    """Return a key for sorting by what speaks against a candidate: extreme
    hyperparameters, impossible ones, and the distance from the curve of the loss.
    """
    is_possible = in_range(candidate.objective, candidate.hp)
    unexplained = candidate.unexplained
    return candidate.is_extreme, not is_possible, unexplained, candidate.miss


def simplicity(match: Match) -> tuple[bool | int | str, ...]:
    """Return a key for sorting: an objective that has this aggregation itself goes
    first, then one whose KL term fits, then one that is no up(...), then the one with
    fewer hyperparameters. The name comes last.

    Args:
        match: the match.
    """
    hyperparameter_count = sum(
        value is not None and name != "beta" for name, value in match.hp.items()
    )
    without_effect = len(get(match.name).hyperparameters) - len(match.hp)
    return (
        not match.own,
        not match.same_kl,
        not match.same_kl and not get(match.name).kl,
        is_up(match),
        hyperparameter_count,
        without_effect,
        len(match.hp.keys() - {"beta"}),
        "anchored" in match.name,
        match.name,
    )


def is_up(match: Match) -> bool:
    """Tell whether a match is up(...) of an objective.

    Args:
        match: the match.
    """
    transform, _ = parts(match.name)
    return transform == "up"
