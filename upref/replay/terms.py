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

from upref.aggregation import Totals, aggregate
from upref.definition import Objective, weighed
from upref.errors import InputError
from upref.registry import get
from upref.replay.schema import RecordedBatch
from upref.rollouts import Rollouts

EXTRA = "extra_terms"  # in meta: what the logged loss has beside the objective
# accumulation steps, ranks, micro-batches
FACTORS = (2.0, 4.0, 8.0, 1 / 2, 1 / 4, 1 / 8)
OR_ELSE = ", or "  # between names of one number
SUMS = {
    "tokens": ("token-mean",),
    "responses": ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean"),
}


@dataclass(frozen=True, eq=False)
class StepTerms:
    """An objective on the responses of a step that train.

    Args:
        o: the Objective.
        b: the responses; `b.totals` are the counts that divide.
        correction: factor of each term by the trainer's sampler correction [B, T], or
            None.
        micro, rank: of each response [B], or None.
        logged: numbers of the step.
        hp: hyperparameters.
        scale: factor of the whole loss.
    """

    o: Objective
    b: Rollouts
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
        totals = self.b.totals
        if totals is None:
            totals = Totals.of(self.b.mask)
        if self.o.agg in SUMS["tokens"]:
            return float(totals.tokens), "tokens"
        return float(totals.sequences), "responses"

    @property
    def terms(self) -> Tensor:
        """J of every token [B, T], or of every response [B], before aggregation and
        without KL; masked slots 0.
        """
        own = {k: v for k, v in self.o.resolve(self.hp).items() if k != "beta"}
        b = self.b
        terms = self.o.unreduced(
            b.logp, b.logp_old, b.adv, b.mask, b.entropy, b.logp_sampler, b.group, **own
        )
        if self.correction is not None:
            terms = weighed(terms, self.correction, b.mask)
        return torch.where(b.mask if terms.ndim == 2 else b.mask.any(1), terms, 0.0)

    def total(self, terms: Tensor) -> Tensor:
        """The objective's sum of such terms.

        Args:
            terms: [B, T], or [B] of an objective of responses.

        Returns:
            J without its KL term, a scalar.
        """
        return self.scale * aggregate(
            terms, self.b.mask, self.o.agg, self.b.group, self.b.totals
        )

    def loss(self) -> float:
        """The loss, with its KL term."""
        return float(self._loss(self.b.logp))

    def gradient(self, logp: Tensor | None = None) -> Tensor:
        """dL/dlp [B, T] at log-probabilities [B, T], by default those of the step.

        Args:
            logp: log-probabilities, [B, T].

        Returns:
            [B, T], 0 on masked slots.
        """
        leaf = (self.b.logp if logp is None else logp).detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self._loss(leaf), leaf)
        return torch.where(self.b.mask, gradient, 0.0)

    def _loss(self, logp: Tensor) -> Tensor:
        b = self.b
        J = self.o.J(
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
    def own(self) -> "StepTerms":
        """By the counts of the responses that are here."""
        return replace(self, b=self.b.but(totals=None), scale=1.0)

    def under(self, agg: str) -> "StepTerms":
        """Under another aggregation.

        Args:
            agg: a name of an aggregation.

        Returns:
            The terms of the objective with it.
        """
        return replace(self, o=self.o.aggregated(agg))

    def by_counts(self) -> "Iterator[tuple[str, StepTerms]]":
        """(name, terms) of what is the objective's loss: by the numbers that the file
        states, and by its own counts.

        Yields:
            The name of the count, and the terms that are divided by it.
        """
        stated = self._stated()
        own = self.own()
        length = self.logged.get("length")
        if length and self.o.agg == "seq-mean-token-sum":
            counted = own if stated is None else stated
            yield (
                f"{self.o.agg}, divided by the framework's {length:g}",
                replace(counted, scale=1 / length),
            )
        if stated is not None:
            yield self._name(stated), stated
        yield self.o.agg, own

    def _stated(self) -> "StepTerms | None":
        """By the counts that the file states; None where they are those of its own
        tokens.
        """
        own = Totals.of(self.b.mask)
        tokens = self.logged.get("tokens", float(own.tokens))
        responses = self.logged.get(
            "divisor", self.logged.get("responses", float(own.sequences))
        )
        if tokens == float(own.tokens) and responses == float(own.sequences):
            return None
        if self.o.agg not in (*SUMS["tokens"], *SUMS["responses"]):
            return None
        totals = Totals(
            torch.tensor(tokens), torch.tensor(responses), 1, torch.tensor(tokens)
        )
        return replace(self, b=self.b.but(totals=totals))

    def _name(self, stated: "StepTerms") -> str:
        counts = stated.b.totals
        assert counts is not None
        if self.o.agg in SUMS["tokens"]:
            return f"{self.o.agg} over the framework's count of {float(counts.tokens):g} tokens"
        if "divisor" in self.logged:
            return f"sum over responses, divided by the framework's {float(counts.sequences):g},"
        return f"{self.o.agg} over the framework's count of {float(counts.sequences):g} responses"

    def by_other_counts(self) -> "Iterator[tuple[str, StepTerms]]":
        """(name, terms) of counts that the file knows and the objective's loss should
        not have: of its generation batch, and of its slots.

        Yields:
            The name of the count, and the terms that are divided by it.
        """
        if self.o.agg not in SUMS["tokens"]:
            return
        tokens = self.logged.get("generation_tokens")
        if tokens:
            name = f"the {tokens:g} tokens of the whole generation batch"
            yield f"{self.o.agg} over {name}", self._over(tokens)
        slots = float(self.b.mask.numel())
        if slots != float(self.b.mask.sum()):
            name = f"all {slots:g} slots, padding included"
            yield f"{self.o.agg} over {name}", self._over(slots)

    def _over(self, tokens: float) -> "StepTerms":
        """By another count of tokens."""
        count = torch.tensor(tokens)
        totals = Totals(count, len(self.b.mask), 1, count)
        return replace(self, b=self.b.but(totals=totals))

    def parts(self) -> "Iterator[tuple[str, Tensor, list[StepTerms]]]":
        """The micro-batches and then the ranks, where there are several.

        Yields:
            Their name, the number of each response's part [B], and the terms of each
            part by its own counts, in the order of the numbers.
        """
        for column, words in ((self.micro, "micro-batches"), (self.rank, "ranks")):
            if column is not None and len(column.unique()) > 1:
                rows = [(column == value).nonzero()[:, 0] for value in column.unique()]
                yield words, column, [self._rows(part) for part in rows]

    def _rows(self, i: Tensor) -> "StepTerms":
        b = self.b.rows(i, Totals.of(self.b.mask[i]))
        correction = None if self.correction is None else self.correction[i]
        return replace(self, b=b, correction=correction, micro=None, rank=None)


def as_run(objective: Objective | str, hp: dict[str, Any]) -> Objective:
    """The objective as frameworks run it: by its name with a token mean in place of
    group-token-mean, and with a KL term where beta is given.

    An Objective keeps its aggregation. A KL term that its paper has not is k3, the
    default of verl and TRL.
    """
    o = objective if isinstance(objective, Objective) else get(objective)
    if isinstance(objective, str) and o.agg == "group-token-mean":
        o = o.aggregated("token-mean")
    return replace(o, kl="k3") if "beta" in hp and not o.kl else o


def terms_of(batch: RecordedBatch, o: Objective, hp: dict[str, Any]) -> StepTerms:
    """The objective on a recorded step.

    Raises:
        InputError: a column is missing, or the file of a rank.
    """
    ranks = batch.logged.get("ranks", 1.0)
    here = 1 if batch.rank is None else len(batch.rank.unique())
    if here < ranks:
        raise InputError(
            f"{batch.file} holds {here} of {ranks:g} ranks: give the files of all ranks, for example their folder."
        )
    batch.expect_whole("correction", purpose="the check of the loss")
    b = batch.rollouts(sampler=o.sampler is not None)
    trains = batch.mask.any(1)
    micro, rank, correction = (
        None if x is None else x[trains]
        for x in (batch.micro, batch.rank, batch.correction)
    )
    if o.sampler is not None:
        correction = None  # it computes its own
    return StepTerms(o, b, correction, micro, rank, dict(batch.logged), hp)


def or_else(names: list[str]) -> str:
    """The first of these names, and the others where they give the same number too."""
    return OR_ELSE.join(names)
