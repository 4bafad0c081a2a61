# SPDX-License-Identifier: Apache-2.0
"""Forward passes with one fault each: what a trainer may do between the rows and their
log-probabilities.

Each fault is put into the reference. It is named only where the gradient that was found
is the gradient of the log-probabilities that the reference then has.

In every function, `right` is the forward pass without a fault. A Variant is a Fault whose
`change` makes the faulty one. "In front" of a row is what precedes it in the sequence that
is fed: padding, or other rows of a pack. Logits are [S, V], of all tokens that are fed.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from upref.errors import InputError
from upref.step.compare.forward import Forward
from upref.step.explain.normalizers import longest
from upref.step.explain.scores import (
    Variant,
    head_variants,
    repeat_first_logits,
    with_logits,
)
from upref.step.explain.weights import is_named
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.routes import Routes, shifted
from upref.step.inputs.rows import Row, locate, micro_batch
from upref.verify.faults import Fault
from upref.verify.finding import NO_CAUSE, Cause

# log-probabilities in float64 that differ by less are the same
LOG_PROB_TOLERANCE = 1e-11
# numbers of responses in a micro-batch that are tried, where a fault depends on it
MICRO_BATCH_SIZES = (8, 4, 2)


def model_variants(right: Forward) -> Iterator[Variant]:
    """Make the faults that change the logits, so that the model runs again.

    Args:
        right: the right forward pass.

    Yields:
        Variants, whose change makes the forward pass that has the fault.
    """
    if isinstance(model := right.model, TorchModel):
        # first: of two faults with the same log-probabilities the later one is left out
        yield from _route_variants(model, right)
        if any(right.before):
            yield from _pack_variants(model, right)
        yield from head_variants(model, right)
        yield from _input_variants(Remembering.of(model, right), right)
        yield from _configuration_variants(model, right)
        yield from _attention_variants(model, right)


def _route_variants(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the faults of a step that replays recorded routes of experts."""
    routes_of_rows = {
        ids: model.routes[ids] for ids in map(tuple, right.ids) if ids in model.routes
    }

    def with_routes(change: Callable[[Routes], Routes | None]) -> Forward:
        """Return the forward pass whose rows have changed routes; None: the routers
        choose.
        """
        other = copy.copy(model)
        changed = {ids: change(routes) for ids, routes in routes_of_rows.items()}
        other.routes = {ids: routes for ids, routes in changed.items() if routes}
        return with_logits(right, [other.logits(row.ids) for row in right.rows])

    if not routes_of_rows:
        return
    yield Fault(
        "the recorded routes are not replayed: routers choose experts again",
        lambda: with_routes(lambda routes: None),
        id="routes-not-replayed",
    )
    yield Fault(
        "the scores of replayed experts have no gradient, so that no router trains",
        lambda: with_routes(lambda routes: replace(routes, has_gradient=False)),
        id="routes-without-gradient",
    )
    for words, by in (("before", 1), ("behind", -1)):
        yield Fault(
            f"each layer of experts has the routes of the layer {words} it",
            partial(with_routes, partial(shifted, layers=by)),
            id="routes-of-other-layers",
        )
        yield Fault(
            f"each token has the routes of the token {words} it",
            partial(with_routes, partial(shifted, tokens=by)),
            id="routes-of-other-tokens",
        )


SMALL_MODEL = 5_000_000  # parameters of a model whose logits are kept


@dataclass(frozen=True)
class Remembering:
    """A model that computes the logits of one input once: many faults feed the same
    tokens for a row.
    """

    model: TorchModel
    known: dict[Any, Tensor]  # (tokens, further arguments) -> logits

    @classmethod
    def of(cls, model: TorchModel, right: Forward) -> "Remembering":
        """Make one that has the logits of the right forward pass.

        Args:
            model: the reference.
            right: its forward pass.
        """
        known = {}
        for ids, z in zip(right.ids, right.z, strict=True):
            known[tuple(ids), ()] = z
        return cls(model, known)

    @property
    def net(self) -> torch.nn.Module:
        return self.model.net

    @property
    def end(self) -> int | None:
        return self.model.end

    @property
    def takes_mask(self) -> bool:
        return self.model.takes_mask

    def logits(self, ids: Sequence[int], **how: Tensor) -> Tensor:
        """Return the model's logits, which are kept if the model is small.

        Args:
            ids: the tokens.
            how: further tensors that the model takes, such as its attention mask.
        """
        arguments = sorted((k, str(v.dtype), str(v.tolist())) for k, v in how.items())
        key = tuple(ids), tuple(arguments)
        if key not in self.known:
            z = self.model.logits(ids, **how)
            if sum(p.numel() for p in self.model.params.values()) >= SMALL_MODEL:
                return z
            self.known[key] = z
        return self.known[key]


# ---- what is fed ---------------------------------------------------------------------
# of each row: the tokens in front of it in the sequence that is fed to the model
TokensBefore: TypeAlias = list[list[int]]


def _possible_tokens_before(right: Forward) -> list[TokensBefore]:
    """Return the tokens in front of each row, once for each possibility.

    Where it is known what was fed to the model, that is the only possibility. Otherwise
    it is guessed: padding on the left, or the earlier rows of a pack, in micro-batches of
    several sizes.
    """
    if any(right.before):
        return [right.before]
    rows = right.rows
    guesses: list[TokensBefore] = []
    for size in MICRO_BATCH_SIZES:
        batches = [micro_batch(rows, i, size) for i in range(len(rows))]
        for pad in dict.fromkeys((right.model.end or 0, 0)):
            for part_of_row in (attrgetter("ids"), attrgetter("prompt")):
                lengths = [
                    longest(batch, part_of_row) - len(part_of_row(row))
                    for batch, row in zip(batches, rows, strict=True)
                ]
                guesses.append([[pad] * length for length in lengths])
        packed = []
        for i, batch in enumerate(batches):
            earlier = batch[: i % size]
            packed.append([token for row in earlier for token in row.ids])
        guesses.append(packed)
    return [
        guess
        for number, guess in enumerate(guesses)
        if any(guess) and guess not in guesses[:number]
    ]


def _input_variants(model: Remembering, right: Forward) -> Iterator[Variant]:
    """Make the faults of the tokens, masks and positions that are fed to the model."""
    rows = right.rows
    end_token = model.end or 0

    def make_variant(
        words: str, row_logits: Callable[..., Tensor], *arguments: Any, id: str
    ) -> Variant:
        """Make a fault from the logits that it gives to each row.

        Args:
            words: of the fault.
            row_logits: (number of the row, row, *arguments) -> its logits.
            *arguments: further arguments of `row_logits`.
            id: of the fault.
        """
        return Fault(
            words,
            lambda: with_logits(
                right, [row_logits(i, row, *arguments) for i, row in enumerate(rows)]
            ),
            id=id,
        )

    yield from _value_mask_variants(model, right, make_variant)
    yield from _prompt_variants(model, rows, make_variant, end_token)
    for tokens_before in _possible_tokens_before(right):
        yield from _tokens_before_variants(model, right, make_variant, tokens_before)

    def attend_to_trained(i: int, row: Row) -> Tensor:
        """Return the logits where only tokens that train, and prompts, are attended to."""
        mask = torch.tensor([[1] * len(row.prompt) + [int(t) for t in row.trains]])
        return model.logits(
            row.ids, attention_mask=mask, position_ids=_positions_from(0, row)
        )

    def start_again(i: int, row: Row) -> Tensor:
        """Return the logits where the first response token has position 0."""
        positions = torch.cat(
            [torch.arange(len(row.prompt)), torch.arange(len(row.response))]
        )[None]
        return model.logits(
            row.ids, position_ids=positions, **_full_mask(model, len(row.ids))
        )

    words = "the mask of the loss stands for the attention mask: masked tokens are not attended to"
    yield make_variant(words, attend_to_trained, id="loss-mask-for-attention-mask")
    yield make_variant(
        "positions start again with the response",
        start_again,
        id="positions-start-again",
    )
    yield make_variant(
        "every position is 0",
        lambda i, row: model.logits(row.ids, position_ids=0 * _positions_from(0, row)),
        id="positions-zero",
    )
    yield make_variant(
        "positions start at 1",
        lambda i, row: model.logits(row.ids, position_ids=_positions_from(1, row)),
        id="positions-start-at-one",
    )


def _full_mask(model: Remembering, n: int) -> dict[str, Tensor]:
    """Return the attention mask of a row without padding, as an argument of the model.

    Without a mask, transformers takes positions that start again for a pack of rows.
    """
    return {"attention_mask": torch.ones(1, n)} if model.takes_mask else {}


def _value_mask_variants(
    model: Remembering, right: Forward, make_variant: Callable[..., Variant]
) -> Iterator[Variant]:
    """Make the faults of a loop that takes each token equal to its padding for
    padding.
    """

    def mask_of(row: Row, value: int) -> Tensor:
        """Return the attention mask, [1, S]: 0 on the tokens that equal the value."""
        return (torch.tensor(row.ids) != value).long()[None]

    def mask_value(i: int, row: Row, value: int) -> Tensor:
        """Return the logits where no token that equals the value is attended to."""
        return model.logits(row.ids, attention_mask=mask_of(row, value))

    def mask_and_skip_value(i: int, row: Row, value: int) -> Tensor:
        """Return the same, where positions do not count these tokens either."""
        mask = mask_of(row, value)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return model.logits(row.ids, attention_mask=mask, position_ids=positions)

    fed_around = [tokens[0] for tokens in right.before + right.after if tokens]
    for value in dict.fromkeys((model.end or 0, 0, *fed_around)):
        if any(value in row.ids[:-1] for row in right.rows):
            words = "the attention mask is made of token values: it cuts out tokens that equal"
            yield make_variant(
                f"{words} {value}",
                mask_value,
                value,
                id="attention-mask-by-token-value",
            )
            words = "the attention mask and the positions are made of token values"
            yield make_variant(
                f"{words} ({value} is taken for padding)",
                mask_and_skip_value,
                value,
                id="attention-mask-and-positions-by-token-value",
            )


def _tokens_before_variants(
    model: Remembering,
    right: Forward,
    make_variant: Callable[..., Variant],
    tokens_before: TokensBefore,
) -> Iterator[Variant]:
    """Make the faults of rows behind other tokens: behind padding, or behind earlier rows
    of a pack.

    Args:
        model: the reference.
        right: its forward pass.
        make_variant: makes a fault from the logits of each row.
        tokens_before: the tokens in front of each row.
    """

    def attend_to_tokens_before(i: int, row: Row) -> Tensor:
        """Return the logits where the tokens in front are attended to and counted."""
        return model.logits(tokens_before[i] + row.ids)

    def restart_positions(i: int, row: Row) -> Tensor:
        """Return the logits where the tokens in front are attended to, and each row's
        positions start at 0.
        """
        positions = _restarted_positions(tokens_before[i], row, right.rows)
        return model.logits(tokens_before[i] + row.ids, position_ids=positions)

    def count_tokens_before(i: int, row: Row) -> Tensor:
        """Return the logits where positions count the tokens in front, which are not
        attended to.
        """
        return model.logits(
            row.ids, position_ids=_positions_from(len(tokens_before[i]), row)
        )

    def mask_tokens_before(i: int, row: Row) -> Tensor:
        """Return the logits where an attention mask excludes the tokens in front."""
        mask = torch.tensor([[0] * len(tokens_before[i]) + [1] * len(row.ids)])
        return model.logits(tokens_before[i] + row.ids, attention_mask=mask)

    def attend_without_counting(i: int, row: Row, padding_position: int) -> Tensor:
        """Return the logits where the tokens in front are attended to, and all have
        this position.
        """
        ids = tokens_before[i] + row.ids
        positions = torch.cat(
            [
                torch.full((1, len(tokens_before[i])), padding_position),
                _positions_from(0, row),
            ],
            1,
        )
        return model.logits(ids, position_ids=positions, **_full_mask(model, len(ids)))

    def attend_to_one_token(i: int, row: Row, first: int) -> Tensor:
        """Return the logits where only the last of the tokens in front is attended to,
        and the row's positions start at `first`, or at 0 where nothing is in front.
        """
        last_token_before = tokens_before[i][-1:]
        start = first if last_token_before else 0
        positions = torch.cat(
            [
                torch.zeros(1, len(last_token_before)).long(),
                _positions_from(start, row),
            ],
            1,
        )
        ids = last_token_before + row.ids
        return model.logits(ids, position_ids=positions, **_full_mask(model, len(ids)))

    is_one_token = {*map(tuple, tokens_before)} == {tuple(tokens_before[0][:1])}
    if is_one_token:
        yield make_variant(
            "1 more token is put before each prompt",
            attend_to_tokens_before,
            id="token-before-prompt",
        )
    else:
        words = "what precedes a row is attended to: padding without a mask, or rows of its pack"
        yield make_variant(words, attend_to_tokens_before, id="padding-attended-to")
    state = "they attend to the rows before them"
    if hasattr(model.net, "config"):
        state = "the state of recurrent layers runs on from row to row"
    yield make_variant(
        f"rows of a pack are not apart: {state}",
        restart_positions,
        id="pack-restarted-not-apart",
    )
    yield make_variant(
        "positions count what precedes a row: padding, or rows of its pack",
        count_tokens_before,
        id="positions-count-padding",
    )
    if not _has_rows_before(tokens_before, right):
        for first in (0, 1):
            yield make_variant(
                "the attention mask stands one place early: a token of padding is attended to",
                attend_to_one_token,
                first,
                id="attention-mask-one-place-early",
            )
        # loops fill the positions that they do not need with 0 or 1
        for padding_position in (0, 1):
            yield make_variant(
                "padding is attended to, and positions do not count it",
                attend_without_counting,
                padding_position,
                id="padding-attended-to-but-not-counted",
            )
    yield make_variant(
        "padding is masked in attention, and the state of recurrent layers runs over it",
        mask_tokens_before,
        id="recurrent-state-over-padding",
    )


MOST_KEPT = 16  # tokens of a prompt that may be kept of a longer one, and are tried


def _prompt_variants(
    model: Remembering,
    rows: Sequence[Row],
    make_variant: Callable[..., Variant],
    end_token: int,
) -> Iterator[Variant]:
    """Make the faults of prompts with a token less or more, or with few tokens."""

    def from_token(row: Row, start: int) -> Tensor:
        """Return the logits of the row without its first `start` tokens, [S, V]: the
        first ones left stand for theirs.
        """
        return repeat_first_logits(model.logits(row.ids[start:]), start)

    def keep_last(i: int, row: Row, kept_tokens: int) -> Tensor:
        """Return the logits with the last tokens of the prompt alone."""
        return from_token(row, max(len(row.prompt) - kept_tokens, 0))

    yield make_variant(
        "the first token of each prompt is missing",
        lambda i, row: from_token(row, min(1, len(row.prompt) - 1)),
        id="first-prompt-token-missing",
    )
    yield make_variant(
        "a token is put before each prompt",
        lambda i, row: model.logits([end_token, *row.ids]),
        id="token-before-prompt",
    )
    longest_prompt = max(len(row.prompt) for row in rows)
    for kept_tokens in range(2, min(longest_prompt, MOST_KEPT)):
        yield make_variant(
            f"prompts are cut to their last {kept_tokens} tokens",
            keep_last,
            kept_tokens,
            id="prompts-cut",
        )
    yield make_variant(
        "responses are scored without their prompts",
        lambda i, row: from_token(row, len(row.prompt) - 1),
        id="prompts-missing",
    )


# ---- who attends to whom -------------------------------------------------------------
class AttentionBias(TorchFunctionMode):
    """Adds a bias, [S, S], to the attention scores in place of a model's own masks.

    Attributes:
        bias: what is added: -inf where a token does not attend to another.
        acted: whether any attention function ran inside.
    """

    def __init__(self, bias: Tensor):
        """Begin with this bias, before any attention ran."""
        super().__init__()
        self.bias = bias
        self.acted = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`. Attention of torch gets the bias in place of its masks and of
        `is_causal`; `scaled_dot_product_attention` only if the bias has its number of
        queries.
        """
        options = dict(kwargs or {})
        if func is F.multi_head_attention_forward:
            self.acted = True
            options |= {"attn_mask": self.bias.to(args[0].device), "is_causal": False}
        elif func is F.scaled_dot_product_attention and args[0].shape[-2] == len(
            self.bias
        ):
            self.acted = True
            bias = self.bias.to(args[0].device)
            args = args[:3]
            options = options | {"attn_mask": bias, "is_causal": False}
        return func(*args, **options)


# of a row and its number: token ids, what is added to the attention scores [S, S], and
# positions [1, S]
AttentionOfRow: TypeAlias = Callable[[int, Row], tuple[list[int], Tensor, Tensor]]


def _causal_bias(n: int) -> Tensor:
    """Return the bias of causal attention, [n, n]: -inf where a token would attend to a
    later one, else 0.
    """
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)


def _attention_variant(
    model: TorchModel,
    right: Forward,
    words: str,
    attention_of_row: AttentionOfRow,
    *,
    id: str,
) -> Variant:
    """Make a fault from what the tokens of each row attend to.

    Its change raises InputError where the model has no attention that takes a mask.
    """

    def row_logits(i: int, row: Row) -> Tensor:
        """Return the logits of a row under this attention mask, without positions where
        the model takes none; raise InputError where it has no attention that takes a
        mask.
        """
        ids, bias, positions = attention_of_row(i, row)
        bias = bias.double()
        options = {"attention_mask": bias[None, None]} if model.takes_mask else {}
        with AttentionBias(bias) as mode:
            try:
                logits = model.logits(ids, position_ids=positions, **options)
            except TypeError:  # its forward takes no positions
                logits = model.logits(ids, **options)
        if not (mode.acted or options):
            raise InputError("no attention of this model can be given a mask.")
        return logits

    return Fault(
        words,
        lambda: with_logits(
            right, [row_logits(i, row) for i, row in enumerate(right.rows)]
        ),
        id=id,
    )


def _attention_variants(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the faults of what a token attends to: later tokens, a window, padding, or
    other rows of its pack.
    """
    make_variant = partial(_attention_variant, model, right)

    def attend_everywhere(i: int, row: Row) -> tuple[list[int], Tensor, Tensor]:
        """Let every token attend to all tokens of the row; return ids, bias and
        positions.
        """
        length = len(row.ids)
        return row.ids, torch.zeros(length, length), _positions_from(0, row)

    def attend_to_window(
        size: int, i: int, row: Row
    ) -> tuple[list[int], Tensor, Tensor]:
        """Let every token attend to the last `size` tokens, itself included."""
        length = len(row.ids)
        outside = torch.full((length, length), -torch.inf, dtype=torch.float64).tril(
            -size
        )
        return row.ids, _causal_bias(length) + outside, _positions_from(0, row)

    yield make_variant(
        "tokens attend to later tokens of their row",
        attend_everywhere,
        id="attention-to-later-tokens",
    )
    for size in (2, 4, 8, 16):
        yield make_variant(
            f"tokens attend to the last {size} tokens only",
            partial(attend_to_window, size),
            id="attention-window",
        )

    def add_mask_to_scores(
        tokens_before: TokensBefore, i: int, row: Row
    ) -> tuple[list[int], Tensor, Tensor]:
        """Add 1 to the scores of the row's tokens, and leave padding in."""
        ids = tokens_before[i] + row.ids
        is_own = (torch.arange(len(ids)) >= len(tokens_before[i])).double()
        positions = (is_own.cumsum(0).long() - 1).clamp(min=0)
        return ids, _causal_bias(len(ids)) + is_own, positions[None]

    for tokens_before in _possible_tokens_before(right):
        if not _has_rows_before(tokens_before, right):
            yield make_variant(
                "the attention mask is added to the scores as 0 and 1",
                partial(add_mask_to_scores, tokens_before),
                id="attention-mask-added",
            )
    for pack in _largest_packs(right):
        yield make_variant(
            "rows of one group attend to each other in a pack: nothing else tells them apart",
            _attention_by_group(pack, right),
            id="ids-of-pack-by-group",
        )
        yield from _repeated_id_variants(model, right, pack)


@dataclass(frozen=True)
class Pack:
    """The rows of a step as each stands behind other rows in one sequence.

    Attributes:
        tokens_before: of each row, the tokens in front of it.
        numbers_before: of each row, for each of these tokens the number of the row to
            which it belongs. Rows are numbered in their order in the sequence, from 0.
            -1 is the number of a token that belongs to no row.
    """

    tokens_before: TokensBefore
    numbers_before: list[list[int]]

    def number(self, i: int) -> int:
        """Return the number of row i: it follows all rows in front of it.

        Args:
            i: the index of the row in the step.
        """
        return max(self.numbers_before[i], default=-1) + 1

    @property
    def last_number(self) -> int:
        """The largest number of a row."""
        return max(map(self.number, range(len(self.numbers_before))))


def _largest_packs(right: Forward) -> Iterator[Pack]:
    """Yield the packs that the rows may have been in with the most tokens in front of a
    row.
    """
    possible = _possible_tokens_before(right)
    most_tokens = max(
        (len(tokens) for tokens_before in possible for tokens in tokens_before),
        default=0,
    )
    for tokens_before in possible:
        is_largest = max(map(len, tokens_before)) >= most_tokens
        if is_largest and _has_rows_before(tokens_before, right):
            numbers = [_row_numbers(tokens, right.rows) for tokens in tokens_before]
            yield Pack(tokens_before, numbers)


def _has_rows_before(tokens_before: TokensBefore, right: Forward) -> bool:
    """Tell whether any of the tokens in front of the rows belong to other rows."""
    return any(
        number >= 0
        for tokens in tokens_before
        for number in _row_numbers(tokens, right.rows)
    )


def _row_numbers(tokens: list[int], rows: Sequence[Row]) -> list[int]:
    """Return for each token of a sequence which row it belongs to: 0 for a token of the
    row that comes first, 1 for the second; -1 where it belongs to none.
    """
    places = []
    for row in rows:
        place = locate([tokens], row)
        if place:
            _, start = place
            places.append((start, len(row.ids)))
    numbers = [-1] * len(tokens)
    for number, (start, length) in enumerate(sorted(places)):
        numbers[start : start + length] = [number] * length
    return numbers


def _repeated_id_variants(
    model: TorchModel, right: Forward, pack: Pack
) -> Iterator[Variant]:
    """Make the faults of a pack whose row ids start at 0 again after some rows, so that
    two rows have the same id.

    The ids start again once, or each time that so many rows have passed. In a pack that
    ends before they start again a second time, both are one fault. It is made once, with
    the id `ids-of-pack-start-again-once`.
    """

    def start_again_once(period: int, row_number: int) -> int:
        """Return the id of a row. Ids start at 0 again after `period` rows, and count
        on from there.
        """
        return row_number - period if row_number >= period else row_number

    def start_again_always(period: int, row_number: int) -> int:
        """Return the id of a row. Ids start at 0 again after every `period` rows."""
        return row_number % period

    numbers = range(pack.last_number + 1)
    for period in range(1, pack.last_number + 1):
        where = f"the ids of rows start again after {period} rows of a pack"
        schemes = [("ids-of-pack-start-again-once", f"{where}, once", start_again_once)]
        if 2 * period <= pack.last_number:
            schemes.append(("ids-of-pack-start-again", where, start_again_always))
        for fault_id, words, scheme in schemes:
            id_of_row = partial(scheme, period)
            if not any(map(id_of_row, numbers)):
                continue  # all rows have the same id, a fault of `_pack_variants`
            yield _attention_variant(
                model,
                right,
                f"{words}: rows with one id attend to each other",
                _attention_by_id(pack, right, id_of_row),
                id=fault_id,
            )


def _pack_variants(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the commonest fault of a pack: nothing separates its rows, and their
    positions are right.

    If a mask between the rows mends it, it is a fault of the attention alone. Otherwise
    the state of recurrent layers, which read no such mask, runs on too.
    """
    attention = "the rows of a pack attend to each other: nothing separates them in the attention"
    state = f"{attention}, and the state of recurrent layers runs on from row to row"

    def joined_by(pack: Pack, id_of_row: Callable[[int], int]) -> Forward:
        """Return the forward pass of rows that attend to each other where their ids are
        equal.
        """
        attention_of_row = _attention_by_id(pack, right, id_of_row)
        return _attention_variant(model, right, "", attention_of_row, id="").change()

    def has_same_log_probs(forward: Forward, other: Forward) -> bool:
        """Tell whether two passes give the same log-probabilities."""
        lp = forward.statistics().lp
        other_lp = other.statistics().lp
        return torch.allclose(lp, other_lp, rtol=0, atol=LOG_PROB_TOLERANCE)

    def join_rows(pack: Pack, attention_alone: bool) -> Forward:
        """Return the forward pass of rows that attend to each other.

        Raises:
            InputError: the fault is not of the attention alone, or it is, against
                `attention_alone`; or joining the rows changes nothing.
        """
        separated = joined_by(pack, lambda row_number: row_number)
        joined = joined_by(pack, lambda row_number: 0)
        mask_mends_it = has_same_log_probs(separated, right)
        if attention_alone != mask_mends_it or has_same_log_probs(separated, joined):
            raise InputError("the attention has another part in it.")
        return joined

    for pack in _largest_packs(right):
        yield Fault(
            attention,
            partial(join_rows, pack, True),
            id="pack-rows-attend-to-each-other",
        )
        yield Fault(
            state,
            partial(join_rows, pack, False),
            id="pack-rows-attend-and-state-runs-on",
        )


def _attention_by_id(
    pack: Pack, right: Forward, id_of_row: Callable[[int], int]
) -> AttentionOfRow:
    """Return what each row of a pack attends to: rows attend to each other where their
    ids are equal.

    Args:
        pack: the tokens in front of each row, and the rows that they belong to.
        right: the right forward pass.
        id_of_row: the number of a row in its pack, or -1 -> its id.
    """

    def attention_of_row(i: int, row: Row) -> tuple[list[int], Tensor, Tensor]:
        """Return the tokens, the bias of the scores and the positions of one row."""
        ids = pack.tokens_before[i] + row.ids
        row_numbers = pack.numbers_before[i] + [pack.number(i)] * len(row.ids)
        row_ids = torch.tensor([id_of_row(row_number) for row_number in row_numbers])
        bias = torch.where(row_ids[:, None] == row_ids, 0.0, -torch.inf)
        positions = _restarted_positions(pack.tokens_before[i], row, right.rows)
        return ids, _causal_bias(len(ids)) + bias, positions

    return attention_of_row


def _attention_by_group(pack: Pack, right: Forward) -> AttentionOfRow:
    """Return what each row of a pack attends to: rows attend to each other where they
    are of one group.
    """

    def attention_of_row(i: int, row: Row) -> tuple[list[int], Tensor, Tensor]:
        """Return the tokens, the bias of the scores and the positions of one row."""
        placed = [
            (place, other.group)
            for other in right.rows
            if (place := locate([pack.tokens_before[i]], other))
        ]
        placed.sort(key=itemgetter(0))
        groups = [*(group for _, group in placed), row.group]

        def group_of(row_number: int) -> int:
            """Return the group of a row; -1 for a token of no row."""
            return groups[row_number] if row_number >= 0 else -1

        return _attention_by_id(pack, right, group_of)(i, row)

    return attention_of_row


def _restarted_positions(
    tokens_before: list[int], row: Row, rows: Sequence[Row]
) -> Tensor:
    """Return the positions of the tokens in front and of the row, [1, S]. They start at
    0 with every row. Tokens of no row are counted from the beginning.
    """
    row_numbers = _row_numbers(tokens_before, rows)
    positions = []
    for place, row_number in enumerate(row_numbers):
        start = 0 if row_number < 0 else row_numbers.index(row_number)
        positions.append(place - start)
    return torch.tensor([positions + list(range(len(row.ids)))])


def _positions_from(start: int, row: Row) -> Tensor:
    """Return the positions of a row's tokens, from `start` on, [1, S]."""
    return torch.arange(start, start + len(row.ids))[None]


# ---- the configuration ---------------------------------------------------------------
# field of a configuration -> the value that leaves it out
CHANGES: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
}


def _configuration_variants(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the faults that leave a field of the model's configuration out."""
    config = getattr(model.net, "config", None)
    for name, value in CHANGES.items():
        if getattr(config, name, value) not in (value, None):

            def forward_without(
                name: str = name, value: float | None = value
            ) -> Forward:
                """Return the forward pass of a model with another value in its
                configuration.
                """
                changed = copy.deepcopy(config)
                setattr(changed, name, value)
                changed_net = type(model.net)(changed).to(model.device)
                changed_net.load_state_dict(model.net.state_dict(), strict=False)
                for parameter, copied in zip(
                    model.net.parameters(), changed_net.parameters(), strict=True
                ):
                    copied.requires_grad_(parameter.requires_grad)
                changed_model = model.like(changed_net)
                return with_logits(
                    right,
                    [changed_model.logits(row.ids) for row in right.rows],
                    changed_model,
                )

            yield Fault(
                f"the model's {name} is left out",
                forward_without,
                id=f"{name.replace('_', '-')}-missing",
            )


def run_variants(
    right: Forward,
    variants: Callable[[Forward], Iterator[Variant]],
    only: Cause = NO_CAUSE,
) -> Iterator[tuple[Cause, Forward]]:
    """Run the model with each fault, and leave out those that it cannot run and, of
    `model_variants`, those with the log-probabilities of an earlier one.

    Args:
        right: the right forward pass.
        variants: makes the faults from the right forward pass.
        only: a cause; faults that it does not name are left out.

    Yields:
        The cause of each, and its forward pass.
    """
    known_log_probs: list[Tensor] = []
    for fault in variants(right):
        if not is_named(fault, only):
            continue
        try:
            variant = fault.change()
            lp = variant.statistics().lp.detach()
            if variants is model_variants and any(
                torch.allclose(lp, known, rtol=0, atol=LOG_PROB_TOLERANCE)
                for known in known_log_probs
            ):
                continue  # positions of rotary models, a window that does not act
            known_log_probs.append(lp)
            yield fault.cause, variant
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
            IndexError,
            InputError,
        ):
            # its forward takes no positions or mask, has too few positions, or returns
            # no cache
            continue
