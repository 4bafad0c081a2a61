# SPDX-License-Identifier: Apache-2.0
"""The terms of an objective on a recorded step, and the counts by which their sum may
be divided.

A framework may divide by other counts than those of the tokens of the step: TRL by the
mean over the steps of a generation batch. Where the file states them, both are the
objective's loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import KEPT_MEAN, Totals, aggregate
from upref.definition import Objective, weighed
from upref.errors import InputError
from upref.registry import get
from upref.replay.schema import RecordedBatch
from upref.rollouts import Rollouts

EXTRA_TERMS = "extra_terms"  # in meta: what the logged loss has beside the objective
# accumulation steps, ranks, micro-batches
USUAL_MULTIPLES = (2.0, 4.0, 8.0, 1 / 2, 1 / 4, 1 / 8)
OR_ELSE = ", or "  # between names of one number
AGGREGATIONS_BY_UNIT = {
    "tokens": ("token-mean",),
    "responses": ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean"),
}


@dataclass(frozen=True, eq=False)
class StepTerms:
    """An objective on the responses of a step that train.

    Args:
        objective: the Objective.
        rollouts: the responses; their `totals` are the counts that divide.
        correction: factor of each term by the trainer's sampler correction [B, T], or
            None.
        micro, rank: of each response [B], or None.
        logged: numbers of the step.
        hp: hyperparameters.
        scale: factor of the whole loss.
    """

    objective: Objective
    rollouts: Rollouts
    correction: Tensor | None
    micro: Tensor | None
    rank: Tensor | None
    logged: dict[str, float]
    hp: dict[str, Any]
    scale: float = 1.0

    @property
    def count(self) -> tuple[float, str]:
        """The number by which the sum is divided, and of what: of the step's tokens, or
        of its responses.
        """
        totals = self.rollouts.totals
        if totals is None:
            totals = Totals.of(self.rollouts.mask)
        if self.objective.agg in AGGREGATIONS_BY_UNIT["tokens"]:
            return float(totals.tokens), "tokens"
        return float(totals.sequences), "responses"

    @property
    def terms(self) -> Tensor:
        """J of every token [B, T], or of every response [B], before aggregation and
        without KL; masked slots 0.
        """
        own = {k: v for k, v in self.objective.resolve(self.hp).items() if k != "beta"}
        b = self.rollouts
        terms = self.objective.unreduced(
            b.logp, b.logp_old, b.adv, b.mask, b.entropy, b.logp_sampler, b.group, **own
        )
        if self.correction is not None:
            terms = weighed(terms, self.correction, b.mask)
        return torch.where(b.mask if terms.ndim == 2 else b.mask.any(1), terms, 0.0)

    def total(self, terms: Tensor) -> Tensor:
        """Aggregate such terms as the objective aggregates its own, by the counts of
        `rollouts`.

        Args:
            terms: [B, T], or [B] of an objective of responses.

        Returns:
            A scalar: of the objective's own `terms`, J without its KL term.
        """
        return self.scale * aggregate(
            terms,
            self.rollouts.mask,
            self.objective.agg,
            self.rollouts.group,
            self.rollouts.totals,
        )

    def loss(self) -> float:
        """Return the loss of the step, with its KL term."""
        return float(self._loss(self.rollouts.logp))

    def gradient(self, logp: Tensor | None = None) -> Tensor:
        """Compute dL/dlp at log-probabilities, by default those of the step.

        Args:
            logp: log-probabilities, [B, T]; None: those of the step.

        Returns:
            [B, T], 0 on masked slots.
        """
        if logp is None:
            logp = self.rollouts.logp
        leaf = logp.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(leaf), leaf)
        return torch.where(self.rollouts.mask, gradient, 0.0)

    def _loss(self, logp: Tensor) -> Tensor:
        """Return the loss at these log-probabilities, [B, T], as a scalar with a graph."""
        b = self.rollouts
        J = self.objective.J(
            logp,
            b.logp_old,
            b.adv,
            b.mask,
            b.group,
            b.logp_ref,
            b.entropy,
            b.totals,
            self.correction,
            b.logp_sampler,
            **self.hp,
        )
        return -self.scale * J

    # ---- the same terms under other counts -------------------------------------------
    def by_recorded_counts(self) -> "StepTerms":
        """Divide by the counts of the recorded responses."""
        return replace(self, rollouts=self.rollouts.but(totals=None), scale=1.0)

    def under(self, agg: str) -> "StepTerms":
        """Aggregate the same terms in another way.

        Args:
            agg: a name of an aggregation.

        Returns:
            The terms of the objective with it.
        """
        return replace(self, objective=self.objective.aggregated(agg))

    def by_counts(self) -> "Iterator[tuple[str, StepTerms]]":
        """Yield what is accepted as the objective's loss: by the framework's length of
        a response (of a token sum), by the counts that the file states, and, last and
        always, by the counts of the recorded responses.

        Yields:
            The name of the sum, and the terms that are divided by its count.
        """
        stated = self._stated()
        own = self.by_recorded_counts()
        length = self.logged.get("length")
        if length and self.objective.agg == "seq-mean-token-sum":
            counted = own if stated is None else stated
            yield (
                f"{self.objective.agg}, divided by the framework's {length:g}",
                replace(counted, scale=1 / length),
            )
        if stated is not None:
            yield self._name(stated), stated
        yield self.objective.agg, own

    def _stated(self) -> "StepTerms | None":
        """Return the terms divided by the counts that the file states; None where it
        states none other than those of the recorded responses, or the aggregation
        divides by neither. A stated divisor takes the place of the count of responses.
        """
        own = Totals.of(self.rollouts.mask)
        tokens = self.logged.get("tokens", float(own.tokens))
        responses = self.logged.get(
            "divisor", self.logged.get("responses", float(own.sequences))
        )
        if tokens == float(own.tokens) and responses == float(own.sequences):
            return None
        if self.objective.agg not in (
            *AGGREGATIONS_BY_UNIT["tokens"],
            *AGGREGATIONS_BY_UNIT["responses"],
        ):
            return None
        totals = Totals(
            torch.tensor(tokens), torch.tensor(responses), 1, torch.tensor(tokens)
        )
        return replace(self, rollouts=self.rollouts.but(totals=totals))

    def _name(self, stated: "StepTerms") -> str:
        """Name the aggregation over the counts that the file states.

        Args:
            stated: the terms of `_stated`.
        """
        counts = stated.rollouts.totals
        assert counts is not None
        if self.objective.agg in AGGREGATIONS_BY_UNIT["tokens"]:
            return f"{self.objective.agg} over the framework's count of {float(counts.tokens):g} tokens"
        if "divisor" in self.logged:
            return f"sum over responses, divided by the framework's {float(counts.sequences):g},"
        return f"{self.objective.agg} over the framework's count of {float(counts.sequences):g} responses"

    def by_other_counts(self) -> "Iterator[tuple[str, StepTerms]]":
        """Yield the terms divided by counts that the objective's loss should not have:
        those of the whole generation batch, where it is logged, and of all slots, where
        there is padding; nothing for an aggregation that does not divide by tokens.

        Yields:
            The name of the count, and the terms that are divided by it.
        """
        if self.objective.agg not in AGGREGATIONS_BY_UNIT["tokens"]:
            return
        tokens = self.logged.get("generation_tokens")
        if tokens:
            name = f"the {tokens:g} tokens of the whole generation batch"
            yield f"{self.objective.agg} over {name}", self._over(tokens)
        slots = float(self.rollouts.mask.numel())
        if slots != float(self.rollouts.mask.sum()):
            name = f"all {slots:g} slots (padding included)"
            yield f"{self.objective.agg} over {name}", self._over(slots)

    def _over(self, tokens: float) -> "StepTerms":
        """Return the terms divided by another number of tokens."""
        count = torch.tensor(tokens)
        totals = Totals(count, len(self.rollouts.mask), 1, count)
        return replace(self, rollouts=self.rollouts.but(totals=totals))

    def parts(self) -> "Iterator[tuple[str, Tensor, list[StepTerms]]]":
        """Yield the terms of each micro-batch, and then those of each rank, where there
        are several.

        Yields:
            "micro-batches" or "ranks", the number of each response's part [B], and the
            terms of each part by its own counts, in the order of the numbers.
        """
        for column, words in ((self.micro, "micro-batches"), (self.rank, "ranks")):
            if column is not None and len(column.unique()) > 1:
                rows = [(column == value).nonzero()[:, 0] for value in column.unique()]
                yield words, column, [self._rows(part) for part in rows]

    def _rows(self, i: Tensor) -> "StepTerms":
        """Return the terms of the responses of index i, divided by their own counts."""
        b = self.rollouts.rows(i, Totals.of(self.rollouts.mask[i]))
        correction = None if self.correction is None else self.correction[i]
        return replace(self, rollouts=b, correction=correction, micro=None, rank=None)


def objective_as_run(objective: Objective | str, hp: dict[str, Any]) -> Objective:
    """Return an objective as frameworks run it.

    An objective that is given by its name has a token mean in place of
    group-token-mean; an Objective keeps its aggregation. Where hp has beta, and the
    paper has no KL term, it is k3, verl's default. TRL's default multiplies it by the ratio:
    name `unbiased_kl(...)` for that.

    Args:
        objective: its name, or an Objective.
        hp: hyperparameters of the run.
    """
    if isinstance(objective, str):
        as_run = get(objective)
        if as_run.agg == "group-token-mean":
            as_run = as_run.aggregated("token-mean")
    else:
        as_run = objective
    if "beta" in hp and not as_run.kl:
        return replace(as_run, kl="k3")
    return as_run


def terms_of(
    batch: RecordedBatch, objective: Objective, hp: dict[str, Any]
) -> StepTerms:
    """Return the terms of an objective on a recorded step.

    Args:
        batch: all ranks of the step.
        objective: what ran.
        hp: its hyperparameters.

    Raises:
        InputError: a column is missing, or the file of a rank; or the aggregation is
            KEPT_MEAN, with which a replay compares by itself.
    """
    if objective.agg == KEPT_MEAN:
        raise InputError(
            f"a replay compares the loss with {KEPT_MEAN} by itself: leave --agg out."
        )
    ranks = batch.logged.get("ranks", 1.0)
    held_ranks = 1 if batch.rank is None else len(batch.rank.unique())
    if held_ranks < ranks:
        raise InputError(
            f"{batch.file} holds {held_ranks} of {ranks:g} ranks: give the files of all ranks, for example their folder."
        )
    batch.expect_whole("correction", purpose="the check of the loss")
    rollouts = batch.rollouts(sampler=objective.sampler is not None)
    trains = batch.mask.any(1)
    micro, rank, correction = (
        None if column is None else column[trains]
        for column in (batch.micro, batch.rank, batch.correction)
    )
    if objective.sampler is not None:
        correction = None  # the objective computes its own
    return StepTerms(
        objective, rollouts, correction, micro, rank, dict(batch.logged), hp
    )


def join_names(names: list[str]) -> str:
    """Join the names of sums that give the same number: "a, or b"."""
    return OR_ELSE.join(names)
