# SPDX-License-Identifier: Apache-2.0
"""From one number per token (or per response) to the scalar J: every aggregation is one weight per response.

    J = Σ_i w_i Σ_t mask_it J_it          with B responses of |o_i| tokens, G_g responses in group g

    token-mean               w_i = 1 / Σ_j |o_j|                   verl's and TRL's "DAPO" denominator
    kept-mean                w_i = 1 / Σ_j |kept tokens of o_j|    beside token-mean, where a rejection drops tokens
    token-sum                w_i = 1                               Tinker's API
    group-token-mean         w_i = 1 / (#groups · Σ_{j in g(i)} |o_j|)    Eq. 14: the mean stands inside E_q
    seq-mean-token-mean      w_i = 1 / (B |o_i|)                   Eq. 4
    seq-mean-token-sum       w_i = 1 / B                           Eq. 1
    seq-mean-token-sum-norm  w_i = 1 / (B L), L fixed beforehand   Dr. GRPO's code
    seq-mean                 w_i = 1 / B, for a J that is already one number per response   Eq. 6

The papers' E_q[1/G Σ_i ...] is 1/B Σ_i where all groups are of one size G, as in their runs; with uneven groups
seq-mean weighs every response alike, as verl and TRL do.

Where a correction or a filter gives tokens the weight 0 (icepop, a bound on staleness, a quantile of the entropy), two
means are usual. token-mean divides by all trained tokens, so that a rejection makes the step smaller. kept-mean divides
by the tokens that were kept: `aggregate` and `row_weights` get their mask. Frameworks have both.

A micro-batch or a data-parallel rank needs the counts of the *whole* mini-batch: they travel as `Totals`. Sums
accumulate in float32 at least, so J of a half-precision batch is a float32 number.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref import catalog
from upref.errors import InputError
from upref.tensors import describe, is_materialized

BY_LENGTH = catalog.BY_LENGTH  # the one that needs a number of its own
KEPT_MEAN = catalog.KEPT_MEAN
AGGREGATIONS = (
    "token-mean",
    "kept-mean",
    "token-sum",
    "group-token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean",
)
# those that divide by the number of responses, and by no count of all tokens
OVER_RESPONSES = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean",
)


def verl_name(level: str, agg: str) -> str:
    """Return verl's loss_agg_mode for an objective of that level and aggregation.

    group-token-mean becomes token-mean, which has the same gradient where all prompts have as many tokens, or there is
    one prompt. verl has no kept-mean.

    Args:
        level: of an objective: token, sequence_mean, sequence_product or custom.
        agg: its aggregation.

    Returns:
        A value of actor.loss_agg_mode; kept-mean as it is.
    """
    of_response = (
        "seq-mean-token-sum" if level == "sequence_product" else "seq-mean-token-mean"
    )
    return {"group-token-mean": "token-mean", "seq-mean": of_response}.get(agg, agg)


class Totals(NamedTuple):
    """Counts of a mini-batch: tokens, responses, groups, and the tokens of each row's group.

    Without group ids the whole batch is one group, and group_tokens is one number.
    """

    tokens: Tensor | int
    sequences: Tensor | int
    groups: Tensor | int
    group_tokens: Float[Tensor, " B"] | Int[Tensor, " B"] | Tensor | int

    def __eq__(self, other: object) -> bool:
        """Compare by identity: tensors have no one truth value."""
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def of(
        cls, mask: Bool[Tensor, "B T"], group: Int[Tensor, " B"] | None = None
    ) -> "Totals":
        """Return the counts of a batch that is all here.

        Args:
            mask: [B, T], True on response tokens.
            group: prompt id of each response, [B]; None: one prompt.

        Returns:
            The counts of these responses, which are the whole mini-batch.
        """
        _must(_is_mask(mask), "mask must be a boolean tensor [B, T]", mask)
        # float32 counts a row exactly up to 2^24 tokens and vectorises where int64 does
        # not
        return cls.of_lengths(mask.sum(-1, dtype=torch.float32), group)

    @classmethod
    def of_lengths(
        cls, lengths: Tensor, group: Int[Tensor, " B"] | None = None
    ) -> "Totals":
        """Return the counts of a mini-batch, from |o_i| and the prompt of each of its responses.

        Over data-parallel ranks, all-gather the two, count, and give each rank `.rows(its indices)`; a group may lie on
        several ranks.

        Args:
            lengths: |o_i| of every response of the mini-batch, [N].
            group: their prompt ids, [N]; None: one prompt.

        Returns:
            The counts of the mini-batch, to be cut by `rows`.
        """
        _must(
            is_materialized(lengths) and lengths.ndim == 1,
            "lengths must be a tensor [B]",
            lengths,
        )
        lengths = lengths.double()
        if group is None:
            return cls(lengths.sum(), len(lengths), 1, lengths.sum())
        fits = (
            is_materialized(group)
            and group.shape == lengths.shape
            and group.device == lengths.device
        )
        _must(
            fits,
            f"group must be one prompt id for each of the {len(lengths)} responses, on their device",
            group,
        )
        # [B, B]: no sort, no host synchronisation
        same = (group[:, None] == group[None, :]).double()
        # each response counts as 1 / the size of its group
        groups = (1 / same.sum(1)).sum().round()
        return cls(lengths.sum(), len(lengths), groups, same @ lengths)

    def rows(self, i: Tensor) -> "Totals":
        """Return the Totals of some rows: group_tokens is cut to them, and the counts stay the mini-batch's.

        Args:
            i: numbers of the responses of a part.

        Returns:
            The counts as that part needs them.

        Raises:
            InputError: there are no such rows.
        """
        fits = (
            is_materialized(i)
            and i.ndim == 1
            and i.dtype in (torch.int64, torch.int32, torch.bool)
        )
        _must(fits, "the rows must be a tensor of their numbers", i)
        per_row = self.group_tokens
        if not isinstance(per_row, Tensor) or not per_row.ndim:
            return self
        try:
            return self._replace(group_tokens=per_row[i])
        except IndexError as e:
            raise InputError(
                f"of {len(per_row)} rows these cannot be taken: {e}."
            ) from e


def row_weights(
    agg: str, mask: Bool[Tensor, "B T"], totals: Totals, length: int | None = None
) -> Float[Tensor, " B"] | Tensor | float:
    """Return w_i of the table above for each response.

    Args:
        agg: name of the aggregation, one of AGGREGATIONS.
        mask: [B, T], True on the tokens that count; of kept-mean, on those that are kept.
        totals: counts of the mini-batch.
        length: L of seq-mean-token-sum-norm, in tokens.

    Returns:
        Weights [B], or one number for all responses.

    Raises:
        InputError: the name is unknown, the length of seq-mean-token-sum-norm is missing or not above 0, or mask or totals
            are of another kind.
    """
    if not isinstance(agg, str):
        raise InputError(
            f"an aggregation is called by its name, got {describe(agg)}: {', '.join(AGGREGATIONS)}."
        )
    _must(
        isinstance(totals, Totals),
        "totals must be a Totals, e.g. Totals.of(mask, group)",
        totals,
    )
    # derivation.py asks for the weight as a formula
    symbols = not isinstance(totals.tokens, (Tensor, int, float))
    _must(symbols or _is_mask(mask), "mask must be a boolean tensor [B, T]", mask)
    match agg:
        case "token-mean" | "kept-mean":
            count = totals.tokens
        case "token-sum":
            return 1.0
        case "group-token-mean":
            count = totals.groups * totals.group_tokens
        case "seq-mean-token-mean":
            count = totals.sequences * mask.sum(-1).clamp(min=1)
        case "seq-mean-token-sum" | "seq-mean":
            count = totals.sequences
        case "seq-mean-token-sum-norm":
            if length is None:
                raise InputError(
                    "seq-mean-token-sum-norm divides by a fixed length: pass length=, not the padded width."
                )
            is_length = hasattr(length, "__float__") and 0 < float(length) < math.inf
            _must(symbols or is_length, "length must be a number above 0", length)
            count = totals.sequences * length
        case _:
            raise InputError(
                f"unknown aggregation {agg!r}: choose from {', '.join(AGGREGATIONS)}."
            )
    return 1 / count.double() if isinstance(count, Tensor) else 1 / count


def aggregate(
    x: Float[Tensor, "B T"] | Float[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    agg: str,
    group: Int[Tensor, " B"] | None = None,
    totals: Totals | None = None,
    length: int | None = None,
) -> Float[Tensor, ""]:
    """Sum Σ_i w_i Σ_t mask_it x_it: the aggregation of per-token terms into a scalar.

    Args:
        x: terms [B, T], or [B] for seq-mean. Masked slots may hold anything.
        mask: [B, T], True on the tokens that count. A response without a token adds nothing and is counted. A batch without
            a token, or with group-token-mean a prompt without one, gives NaN.
        agg: name of the aggregation, one of AGGREGATIONS.
        group: prompt id of each response [B]; None: one group.
        totals: counts of the mini-batch if this is one of its micro-batches.
        length: L of seq-mean-token-sum-norm, in tokens.

    Returns:
        A scalar in float32 or wider.

    Raises:
        InputError: as `row_weights`, or shapes do not fit.
    """
    _must(_is_mask(mask), "mask must be a boolean tensor [B, T]", mask)
    fits = (
        is_materialized(x)
        and x.shape in (mask.shape, mask.shape[:1])
        and x.device == mask.device
    )
    _must(
        fits,
        f"x must be a tensor {list(mask.shape)} as the mask, or {list(mask.shape[:1])}, on its device",
        x,
    )
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.ndim == 2:
        tokens = torch.where(mask, x, 0)
    else:
        tokens = torch.where(mask.any(-1), x, 0)[:, None]
    per_row = tokens.sum(-1, dtype=wide)
    w = row_weights(agg, mask, totals or Totals.of(mask, group), length)
    return (per_row * (w.to(wide) if isinstance(w, Tensor) else w)).sum()


def _is_mask(x: Any) -> bool:
    """Tell whether something is a bool tensor [B, T]."""
    return is_materialized(x) and x.dtype == torch.bool and x.ndim == 2


def _must(fits: bool, what: str, got: Any) -> None:
    """Raise InputError with what is expected, and what was given, unless it fits."""
    if not fits:
        raise InputError(f"{what}, got {describe(got)}.")
