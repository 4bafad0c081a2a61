# SPDX-License-Identifier: Apache-2.0
"""What each objective and sampler correction would do with the recorded tokens: who
carries the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from upref.definition import Objective
from upref.errors import InputError
from upref.replay.clipping import clipping, fraction
from upref.replay.findings import Checked
from upref.replay.schema import RecordedBatch, expect_batch
from upref.replay.terms import objective_as_run
from upref.rollouts import Rollouts

HEAVIEST_SHARE = 0.01  # of the tokens
LONGEST_SHARE = 0.25  # of the responses
MOST_TURNS = 20


@dataclass(frozen=True)
class ObjectiveRow:
    """One objective on these tokens. w is its gradient dJ/dlp of every token,
    aggregation included.

    Args:
        name: of the objective.
        dead_positive, dead_negative: share of the tokens with A > 0 (A < 0) whose w is
            0.
        effective: (Σ |w|)² / Σ w², in tokens.
        heaviest: share of Σ |w| on the heaviest 1 % of the tokens.
        longest: share of Σ |w| on the longest quarter of the responses, over their
            share of the tokens.
        clipping: which tokens the policy term alone clips, on each side of r = 1, as
            `upref.replay.clipping` counts them.
        turns: share of Σ |w| of each turn or source; empty without the column turn.
        cosine: with the gradient of the objective that ran; None without one.
        gradient: w, [B, T], over all responses of the batch.
    """

    name: str
    dead_positive: float
    dead_negative: float
    effective: float
    heaviest: float
    longest: float
    clipping: dict[str, float]
    turns: dict[int, float]
    cosine: float | None
    gradient: Float[Tensor, "B T"] = field(repr=False, compare=False)

    def data(self) -> dict[str, Any]:
        """Return its numbers, without the gradient."""
        return {k: v for k, v in vars(self).items() if k != "gradient"}


@dataclass(frozen=True)
class HeavyToken:
    """One of the tokens with the largest |w|. Probabilities, not their logarithms."""

    response: int
    token: int
    id: int
    text: str
    share: float
    weight: float
    ratio: float
    old: float
    sampler: float | None
    advantage: float


@dataclass(frozen=True, kw_only=True)
class ObjectiveWeights(Checked):
    """A row for each objective; `skipped` says which cannot be computed, and why."""

    rows: tuple[ObjectiveRow, ...]
    skipped: dict[str, str]
    ran: str = ""

    def __getitem__(self, name: str) -> ObjectiveRow:
        """Return the row of the objective of that name; StopIteration without one."""
        return next(row for row in self.rows if row.name == name)

    def data(self) -> dict[str, Any]:
        """Return the numbers of the table."""
        return {
            "ran": self.ran,
            "rows": [row.data() for row in self.rows],
            "skipped": self.skipped,
        }


def weights(
    batch: RecordedBatch,
    names: Sequence[str | Objective],
    *,
    ran: str | Objective = "",
    agg: str = "",
    **hp: Any,
) -> ObjectiveWeights:
    """Compute the gradient weight of every token under several objectives.

    Args:
        batch: with the columns adv and old; `now` gives ratios other than 1, `sampler`
            the corrections.
        names: objectives, for example ["dapo", "up_dapo", "tis(dapo)"]. One that is
            given by its name is that of frameworks, as `loss` compares it.
        ran: the objective that ran, with which the others are compared. By its name it
            is that of frameworks, as `loss` compares it.
        agg: one aggregation for all, in place of each objective's own.
        **hp: hyperparameters; each objective takes those that it has.

    Returns:
        The table, `ran` first, then `names` in their order. An objective that lacks a
        column or refuses a hyperparameter is in `skipped`, with the reason.

    Raises:
        InputError: adv or the log-probabilities are missing, or an objective does not
            exist.
    """
    expect_batch(batch, "the table of objectives")
    batch.rollouts()
    objective_ran: Objective | None = None
    name_ran = ""
    objectives: list[Objective] = []
    if ran:
        objective_ran = objective_as_run(ran, {})
        name_ran = objective_ran.name
        objectives.append(objective_ran)
    for given in names:
        other = objective_as_run(given, {})
        if other.name != name_ran:
            objectives.append(other)
    reference: Tensor | None = None
    rows: list[ObjectiveRow] = []
    skipped: dict[str, str] = {}
    for o in objectives:
        own_hp = {k: v for k, v in hp.items() if k in o.hyperparameters}
        try:
            aggregated = o.aggregated(agg) if agg else o
            w = token_gradient(batch, aggregated, own_hp)
            clipped = clipping(o, batch, **own_hp)
        except InputError as e:
            skipped[o.name] = str(e)
            continue
        if o is objective_ran:
            reference = w
        rows.append(_objective_row(batch, o.name, w, clipped, reference))
    return ObjectiveWeights(rows=tuple(rows), skipped=skipped, ran=name_ran)


def token_gradient(
    batch: RecordedBatch, o: Objective, hp: dict[str, Any]
) -> Float[Tensor, "B T"]:
    """Compute dJ/dlp of every token of the batch; 0 where a token does not train.

    Args:
        batch: with old log-probabilities, advantages and masks.
        o: the objective.
        hp: hyperparameters of the objective.

    Returns:
        [B, T].
    """
    b: Rollouts = batch.rollouts(sampler=o.sampler is not None)
    gradient = torch.zeros(batch.mask.shape, dtype=torch.float64)
    gradient[batch.mask.any(1)] = o.gradient(b, **hp).double()
    return gradient


def _objective_row(
    batch: RecordedBatch,
    name: str,
    w: Tensor,
    clipped: dict[str, float],
    ran: Tensor | None,
) -> ObjectiveRow:
    """Summarize the weights w of one objective.

    Args:
        batch: the batch.
        name: of the objective.
        w: [B, T].
        clipped: as of `clipping`.
        ran: the weights of the objective that ran, of which `cosine` is the cosine with
            w; None where it is not known.
    """
    mask = batch.mask
    assert batch.adv is not None
    absolute_weights = w.abs()
    total = float(absolute_weights.sum()) or 1.0  # 1: shares of 0 are 0
    trained_weights = absolute_weights[mask]
    positive = mask & (batch.adv > 0)
    negative = mask & (batch.adv < 0)
    number_heaviest = max(1, round(HEAVIEST_SHARE * len(trained_weights)))
    lengths = mask.sum(1)
    number_longest = max(1, round(LONGEST_SHARE * int((lengths > 0).sum())))
    longest = lengths.argsort(descending=True, stable=True)[:number_longest]
    token_share_of_longest = float(lengths[longest].sum() / lengths.sum())
    squares = float((trained_weights**2).sum())
    return ObjectiveRow(
        name=name,
        dead_positive=float(fraction(w == 0, positive)),
        dead_negative=float(fraction(w == 0, negative)),
        effective=total**2 / squares if squares else 0.0,
        heaviest=float(trained_weights.topk(number_heaviest).values.sum()) / total,
        longest=float(absolute_weights[longest].sum()) / total / token_share_of_longest,
        clipping=clipped,
        turns=_share_by_turn(batch, absolute_weights, total),
        cosine=None if ran is None else _cosine(ran, w),
        gradient=w,
    )


def _cosine(ran: Tensor, w: Tensor) -> float:
    """Return the cosine of two tables of weights: 1 of a table with itself, 0 where one
    of them is 0 everywhere.
    """
    if ran is w:
        return 1.0
    norm = float(ran.norm() * w.norm())
    if not norm:
        return 0.0
    return float((ran * w).sum()) / norm


def _share_by_turn(
    batch: RecordedBatch, absolute_weights: Tensor, total: float
) -> dict[int, float]:
    """Return turn -> its share of Σ |w|, of the first MOST_TURNS turns; {} without the
    column turn.
    """
    if batch.turn is None:
        return {}
    turns = batch.turn[batch.mask].unique().tolist()[:MOST_TURNS]
    return {
        int(t): float(absolute_weights[batch.mask & (batch.turn == t)].sum()) / total
        for t in turns
    }


def heaviest_tokens(
    batch: RecordedBatch, row: ObjectiveRow, count: int = 5, tokenizer: Any = None
) -> list[HeavyToken]:
    """Return the tokens with the largest |w| of an objective.

    Args:
        batch: the batch of the row.
        row: of `weights`.
        count: how many.
        tokenizer: of transformers, for the texts; None: no texts.

    Returns:
        At most `count` tokens with a gradient, heaviest first.

    Raises:
        InputError: the tokenizer has no such token.
    """
    absolute_weights = torch.where(batch.mask, row.gradient.abs(), 0.0)
    total = float(absolute_weights.sum()) or 1.0
    old = batch.trainer()
    now = batch.now if batch.now is not None else batch.trainer()
    assert batch.adv is not None
    heaviest = []
    number_shown = min(count, int((absolute_weights > 0).sum()))
    for position in absolute_weights.flatten().topk(number_shown).indices.tolist():
        i, t = divmod(position, absolute_weights.shape[1])
        if batch.sampler is None or batch.sampler[i, t].isnan():
            sampler = None
        else:
            sampler = float(batch.sampler[i, t].exp())
        token = int(batch.ids[i, t])
        heaviest.append(
            HeavyToken(
                response=i,
                token=t,
                id=token,
                text="" if tokenizer is None else _text(tokenizer, token),
                share=float(absolute_weights[i, t]) / total,
                weight=float(row.gradient[i, t]),
                ratio=float((now[i, t] - old[i, t]).exp()),
                old=float(old[i, t].exp()),
                sampler=sampler,
                advantage=float(batch.adv[i, t]),
            )
        )
    return heaviest


def _text(tokenizer: Any, token: int) -> str:
    """Return the text of a token id; InputError where the tokenizer fails."""
    try:
        return str(tokenizer.decode([token]))
    except Exception as e:  # whatever a tokenizer raises
        raise InputError(
            f"the tokenizer cannot decode token {token} of the run "
            f"({type(e).__name__}: {e}): give the run's own."
        ) from e
