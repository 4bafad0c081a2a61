# SPDX-License-Identifier: Apache-2.0
"""Forward passes with one fault each: what a trainer may do between the rows and their
log-probabilities.

Each is put into the reference, and named only where the gradient that was found is one
of *its* log-probabilities.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from upref.errors import InputError
from upref.step.forward import Forward
from upref.step.normalizers import longest
from upref.step.reference import TorchModel
from upref.step.rows import Row, locate, micro_batch
from upref.step.scores import Variant, again, fronted, heads
from upref.step.weights import is_named
from upref.verify.faults import Fault
from upref.verify.finding import NO_CAUSE, Cause

SAME = 1e-11  # log-probabilities in float64 that differ by less are the same
# responses of a micro-batch that are tried where a fault depends on it
BATCHES = (8, 4, 2)


def others(right: Forward) -> Iterator[Variant]:
    """Those that compute other logits."""
    if isinstance(model := right.model, TorchModel):
        if any(right.before):
            yield from _together(model, right)
        yield from heads(model, right)
        yield from _inputs(Remembering.of(model, right), right)
        yield from _configured(model, right)
        yield from _attention(model, right)


SMALL = 5_000_000  # parameters of a model whose logits are kept


@dataclass(frozen=True)
class Remembering:
    """A model that computes the logits of one input once: many faults feed the same
    tokens to a row.
    """

    model: TorchModel
    known: dict[Any, Tensor]

    @classmethod
    def of(cls, model: TorchModel, right: Forward) -> "Remembering":
        """It has the logits of the right forward pass already."""
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
    def masked(self) -> bool:
        return self.model.masked

    def logits(self, ids: Sequence[int], **how: Tensor) -> Tensor:
        """As of the model.

        Args:
            ids: the tokens.
            how: tensors, as of the model.
        """
        words = sorted((k, str(v.dtype), str(v.tolist())) for k, v in how.items())
        key = tuple(ids), tuple(words)
        if key not in self.known:
            z = self.model.logits(ids, **how)
            if sum(p.numel() for p in self.model.params.values()) >= SMALL:
                return z
            self.known[key] = z
        return self.known[key]


# ---- what is fed ---------------------------------------------------------------------
Front: TypeAlias = list[list[int]]  # of each row: the tokens in front of it


def _fronts(right: Forward) -> list[Front]:
    """What stood in front of each row: as it was fed, else guesses, padding and packs
    of micro-batches.
    """
    if any(right.before):
        return [right.before]
    rows = right.rows
    guesses: list[Front] = []
    for size in BATCHES:
        batches = [micro_batch(rows, i, size) for i in range(len(rows))]
        for pad in dict.fromkeys((right.model.end or 0, 0)):
            for part in (attrgetter("ids"), attrgetter("prompt")):
                lengths = [
                    longest(batch, part) - len(part(row))
                    for batch, row in zip(batches, rows, strict=True)
                ]
                guesses.append([[pad] * length for length in lengths])
        packed = []
        for i, batch in enumerate(batches):
            earlier = batch[: i % size]
            packed.append([token for row in earlier for token in row.ids])
        guesses.append(packed)
    return [
        front
        for n, front in enumerate(guesses)
        if any(front) and front not in guesses[:n]
    ]


def _inputs(model: Remembering, right: Forward) -> Iterator[Variant]:
    """Faults of what is fed to the model."""
    rows = right.rows
    end = model.end or 0

    def fed(words: str, each: Callable[..., Tensor], *more: Any, id: str) -> Variant:
        """A fault by the logits of each row, a function of its number, the row, and
        `more`.
        """
        return Fault(
            words,
            lambda: again(right, [each(i, r, *more) for i, r in enumerate(rows)]),
            id=id,
        )

    yield from _masks_of_values(model, right, fed)
    yield from _cut_prompts(model, rows, fed, end)
    for front in _fronts(right):
        yield from _behind(model, right, fed, front)

    def attend_to_trained(i: int, r: Row) -> Tensor:
        mask = torch.tensor([[1] * len(r.prompt) + [int(t) for t in r.trains]])
        return model.logits(r.ids, attention_mask=mask, position_ids=_from(0, r))

    def start_again(i: int, r: Row) -> Tensor:
        positions = torch.cat(
            [torch.arange(len(r.prompt)), torch.arange(len(r.response))]
        )[None]
        return model.logits(
            r.ids, position_ids=positions, **_seeing_all(model, len(r.ids))
        )

    words = "the mask of the loss stands for the attention mask: masked tokens are not attended to"
    yield fed(words, attend_to_trained, id="loss-mask-for-attention-mask")
    yield fed(
        "positions start again with the response",
        start_again,
        id="positions-start-again",
    )
    yield fed(
        "every position is 0",
        lambda i, r: model.logits(r.ids, position_ids=0 * _from(0, r)),
        id="positions-zero",
    )
    yield fed(
        "positions start at 1",
        lambda i, r: model.logits(r.ids, position_ids=_from(1, r)),
        id="positions-start-at-one",
    )


def _seeing_all(model: Remembering, n: int) -> dict[str, Tensor]:
    """The mask of a batch without padding: without one, transformers takes positions
    that start again for a pack.
    """
    return {"attention_mask": torch.ones(1, n)} if model.masked else {}


def _masks_of_values(
    model: Remembering, right: Forward, fed: Callable[..., Variant]
) -> Iterator[Variant]:
    """A loop that takes each token equal to its padding for padding."""

    def mask_of(r: Row, value: int) -> Tensor:
        return (torch.tensor(r.ids) != value).long()[None]

    def masked(i: int, r: Row, value: int) -> Tensor:
        return model.logits(r.ids, attention_mask=mask_of(r, value))

    def masked_and_counted(i: int, r: Row, value: int) -> Tensor:
        mask = mask_of(r, value)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return model.logits(r.ids, attention_mask=mask, position_ids=positions)

    around = [x[0] for x in right.before + right.after if x]
    for v in dict.fromkeys((model.end or 0, 0, *around)):
        if any(v in r.ids[:-1] for r in right.rows):
            words = "the attention mask is made of token values: it cuts out tokens that equal"
            yield fed(f"{words} {v}", masked, v, id="attention-mask-by-token-value")
            words = "the attention mask and the positions are made of token values"
            yield fed(
                f"{words} ({v} is taken for padding)",
                masked_and_counted,
                v,
                id="attention-mask-and-positions-by-token-value",
            )


def _behind(
    model: Remembering,
    right: Forward,
    fed: Callable[..., Variant],
    front: list[list[int]],
) -> Iterator[Variant]:
    """What may happen to rows behind other tokens: padding, or the rows before them in
    a pack.
    """

    def attended(i: int, r: Row) -> Tensor:
        return model.logits(front[i] + r.ids)

    def restarted(i: int, r: Row) -> Tensor:
        positions = _restarted(front[i], r, right.rows)
        return model.logits(front[i] + r.ids, position_ids=positions)

    def counted(i: int, r: Row) -> Tensor:
        return model.logits(r.ids, position_ids=_from(len(front[i]), r))

    def masked(i: int, r: Row) -> Tensor:
        mask = torch.tensor([[0] * len(front[i]) + [1] * len(r.ids)])
        return model.logits(front[i] + r.ids, attention_mask=mask)

    def positioned(i: int, r: Row, of_padding: int) -> Tensor:
        ids = front[i] + r.ids
        positions = torch.cat(
            [torch.full((1, len(front[i])), of_padding), _from(0, r)], 1
        )
        return model.logits(ids, position_ids=positions, **_seeing_all(model, len(ids)))

    def early(i: int, r: Row, first: int) -> Tensor:
        last = front[i][-1:]
        start = first if last else 0
        positions = torch.cat([torch.zeros(1, len(last)).long(), _from(start, r)], 1)
        ids = last + r.ids
        return model.logits(ids, position_ids=positions, **_seeing_all(model, len(ids)))

    if {*map(tuple, front)} == {tuple(front[0][:1])}:
        yield fed(
            "1 more token is put before each prompt", attended, id="token-before-prompt"
        )
    else:
        words = "what precedes a row is attended to: padding without a mask, or rows of its pack"
        yield fed(words, attended, id="padding-attended-to")
    state = "they attend to the rows before them"
    if hasattr(model.net, "config"):
        state = "the state of recurrent layers runs on from row to row"
    yield fed(
        f"rows of a pack are not apart: {state}",
        restarted,
        id="pack-restarted-not-apart",
    )
    yield fed(
        "positions count what precedes a row: padding, or rows of its pack",
        counted,
        id="positions-count-padding",
    )
    if not _holds_rows(front, right):
        for first in (0, 1):
            yield fed(
                "the attention mask stands one place early: a token of padding is attended to",
                early,
                first,
                id="attention-mask-one-place-early",
            )
        for of_padding in (0, 1):  # as loops fill the positions that they do not need
            yield fed(
                "padding is attended to, and positions do not count it",
                positioned,
                of_padding,
                id="padding-attended-to-but-not-counted",
            )
    yield fed(
        "padding is masked in attention, and the state of recurrent layers runs over it",
        masked,
        id="recurrent-state-over-padding",
    )


KEPT = 16  # tokens of a prompt that may be kept of a longer one, and are tried


def _cut_prompts(
    model: Remembering, rows: Sequence[Row], fed: Callable[..., Variant], end: int
) -> Iterator[Variant]:
    """Prompts with a token less or more, or with a few tokens only."""

    def from_token(r: Row, first: int) -> Tensor:
        return fronted(model.logits(r.ids[first:]), first)

    def keep_last(i: int, r: Row, keep: int) -> Tensor:
        return from_token(r, max(len(r.prompt) - keep, 0))

    yield fed(
        "the first token of each prompt is missing",
        lambda i, r: from_token(r, min(1, len(r.prompt) - 1)),
        id="first-prompt-token-missing",
    )
    yield fed(
        "a token is put before each prompt",
        lambda i, r: model.logits([end, *r.ids]),
        id="token-before-prompt",
    )
    longest_prompt = max(len(row.prompt) for row in rows)
    for keep in range(2, min(longest_prompt, KEPT)):
        yield fed(
            f"prompts are cut to their last {keep} tokens",
            keep_last,
            keep,
            id="prompts-cut",
        )
    yield fed(
        "responses are scored without their prompts",
        lambda i, r: from_token(r, len(r.prompt) - 1),
        id="prompts-missing",
    )


# ---- who attends to whom -------------------------------------------------------------
class Attending(TorchFunctionMode):
    """What is added to the attention scores, [S, S], in place of a model's own masks."""

    def __init__(self, bias: Tensor):
        super().__init__()
        self.bias = bias
        self.acted = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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
Attended: TypeAlias = Callable[[int, Row], tuple[list[int], Tensor, Tensor]]


def _causal(n: int) -> Tensor:
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)


def _attending(
    model: TorchModel, right: Forward, words: str, each: Attended, *, id: str
) -> Variant:
    """A fault by what the tokens of each row attend to."""

    def one(i: int, r: Row) -> Tensor:
        """The logits of a row under this attention mask."""
        ids, bias, positions = each(i, r)
        bias = bias.double()
        options = {"attention_mask": bias[None, None]} if model.masked else {}
        with Attending(bias) as mode:
            try:
                z = model.logits(ids, position_ids=positions, **options)
            except TypeError:  # its forward takes no positions
                z = model.logits(ids, **options)
        if not (mode.acted or options):
            raise InputError("no attention of this model can be given a mask.")
        return z

    return Fault(
        words,
        lambda: again(right, [one(i, r) for i, r in enumerate(right.rows)]),
        id=id,
    )


def _attention(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Faults of the attention mask and of positions."""
    attending = partial(_attending, model, right)

    def everywhere(i: int, r: Row) -> tuple[list[int], Tensor, Tensor]:
        n = len(r.ids)
        return r.ids, torch.zeros(n, n), _from(0, r)

    def window(most: int, i: int, r: Row) -> tuple[list[int], Tensor, Tensor]:
        n = len(r.ids)
        outside = torch.full((n, n), -torch.inf, dtype=torch.float64).tril(-most)
        return r.ids, _causal(n) + outside, _from(0, r)

    yield attending(
        "tokens attend to later tokens of their row",
        everywhere,
        id="attention-to-later-tokens",
    )
    for k in (2, 4, 8, 16):
        yield attending(
            f"tokens attend to the last {k} tokens only",
            partial(window, k),
            id="attention-window",
        )
    for front in _fronts(right):
        if not _holds_rows(front, right):

            def added(
                i: int, r: Row, front: list[Any] = front
            ) -> tuple[list[int], Tensor, Tensor]:
                ids = front[i] + r.ids
                is_own = (torch.arange(len(ids)) >= len(front[i])).double()
                return (
                    ids,
                    _causal(len(ids)) + is_own,
                    (is_own.cumsum(0).long() - 1).clamp(min=0)[None],
                )

            yield attending(
                "the attention mask is added to the scores as 0 and 1",
                added,
                id="attention-mask-added",
            )
    for front, owner in _packs(right):
        yield _attending(
            model,
            right,
            "rows of one group attend to each other in a pack: nothing else tells them apart",
            _with_groups(right, front, owner),
            id="ids-of-pack-by-group",
        )
        yield from _repeated_ids(model, right, front, owner)


def _repeated_ids(
    model: TorchModel, right: Forward, front: list[list[int]], owner: list[list[int]]
) -> Iterator[Variant]:
    """Ids of the rows of a pack that start again after some of them."""

    def once(m: int, k: int) -> int:
        return k - m if k >= m else k

    def always(m: int, k: int) -> int:
        return k % m

    last = max(max(x, default=0) for x in owner) + 1  # number of the last row of a pack
    for m in range(1, last + 1):
        where = f"the ids of rows start again after {m} rows of a pack"
        ids = (
            ("ids-of-pack-start-again-once", f"{where}, once", once),
            ("ids-of-pack-start-again", where, always),
        )
        for id, words, of in ids:
            if not any(of(m, k) for k in range(last + 1)):
                continue  # every row has one id: what `_together` has
            apart = _with_ids(right, front, owner, partial(of, m))
            yield _attending(
                model,
                right,
                f"{words}: rows with one id attend to each other",
                apart,
                id=id,
            )


def _together(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """The commonest fault of a pack: nothing separates its rows, and their positions
    are right.

    It is one of the attention alone where a mask between the rows mends it. Layers with
    a state read no such mask.
    """
    attention = "the rows of a pack attend to each other: nothing separates them in the attention"
    state = f"{attention}, and the state of recurrent layers runs on from row to row"
    for front, owner in _packs(right):

        def together(
            alone: bool,
            front: list[list[int]] = front,
            owner: list[list[int]] = owner,
        ) -> Forward:
            def joined_by(document: Callable[[int], int]) -> Forward:
                ids = _with_ids(right, front, owner, document)
                return _attending(model, right, "", ids, id="").change()

            def same(one: Forward, other: Forward) -> bool:
                lp, *_ = one.statistics()
                other_lp, *_ = other.statistics()
                return torch.allclose(lp, other_lp, rtol=0, atol=SAME)

            apart = joined_by(lambda k: k)
            joined = joined_by(lambda k: 0)
            if alone != same(apart, right) or same(apart, joined):
                raise InputError("the attention has another part in it.")
            return joined

        yield Fault(
            attention, partial(together, True), id="pack-rows-attend-to-each-other"
        )
        yield Fault(
            state, partial(together, False), id="pack-rows-attend-and-state-runs-on"
        )


def _holds_rows(front: list[list[int]], right: Forward) -> bool:
    return any(k >= 0 for x in front for k in _owners(x, right.rows))


def _packs(right: Forward) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """What stands in front of each row where that is rows, and which row each token
    there is of; the largest packs.
    """
    fronts = _fronts(right)
    longest = max((len(x) for y in fronts for x in y), default=0)
    for front in fronts:
        if max(map(len, front)) >= longest and _holds_rows(front, right):
            yield front, [_owners(x, right.rows) for x in front]


def _with_ids(
    right: Forward,
    front: list[list[int]],
    owner: list[list[int]],
    document: Callable[[int], int],
) -> Attended:
    """Rows of a pack that are apart where their ids differ: document, of the number of
    a row in its pack.
    """

    def each(i: int, r: Row) -> tuple[list[int], Tensor, Tensor]:
        ids = front[i] + r.ids
        whose = owner[i] + [max(owner[i], default=-1) + 1] * len(r.ids)
        of = torch.tensor([document(k) for k in whose])
        apart = torch.where(of[:, None] == of, 0.0, -torch.inf)
        return ids, _causal(len(ids)) + apart, _restarted(front[i], r, right.rows)

    return each


def _with_groups(
    right: Forward, front: list[list[int]], owner: list[list[int]]
) -> Attended:
    """Rows of a pack that are apart where their groups differ."""

    def each(i: int, r: Row) -> tuple[list[int], Tensor, Tensor]:
        before = [q for q in right.rows if locate([front[i]], q)]
        before.sort(key=lambda q: (locate([front[i]], q) or (0, 0))[1])
        group = [*(q.group for q in before), r.group]
        apart = _with_ids(right, front, owner, lambda k: group[k] if k >= 0 else -1)
        return apart(i, r)

    return each


def _owners(front: list[int], rows: Sequence[Row]) -> list[int]:
    """Which row of its pack each token belongs to, from 0 on; -1: to none."""
    places = sorted(
        (place[1], len(q.ids)) for q in rows if (place := locate([front], q))
    )
    out = [-1] * len(front)
    for k, (start, n) in enumerate(places):
        out[start : start + n] = [k] * n
    return out


def _restarted(front: list[int], r: Row, rows: Sequence[Row]) -> Tensor:
    """Positions that start anew with every row that stands in front."""
    whose = [*_owners(front, rows), len(rows)]
    first = [whose.index(k) for k in whose]
    positions = [
        i if k < 0 else i - start
        for i, (k, start) in enumerate(zip(whose, first, strict=True))
    ][:-1]
    return torch.tensor([positions + list(range(len(r.ids)))])


def _from(start: int, r: Row) -> Tensor:
    return torch.arange(start, start + len(r.ids))[None]


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


def _configured(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Faults of the model's configuration."""
    config = getattr(model.net, "config", None)
    for name, value in CHANGES.items():
        if getattr(config, name, value) not in (value, None):

            def other(name: str = name, value: float | None = value) -> Forward:
                """The forward pass of a model with another value in its
                configuration.
                """
                changed = copy.deepcopy(config)
                setattr(changed, name, value)
                net = type(model.net)(changed).to(model.device)
                net.load_state_dict(model.net.state_dict(), strict=False)
                for parameter, copied in zip(
                    model.net.parameters(), net.parameters(), strict=True
                ):
                    copied.requires_grad_(parameter.requires_grad)
                changed_model = model.like(net)
                return again(
                    right,
                    [changed_model.logits(r.ids) for r in right.rows],
                    changed_model,
                )

            yield Fault(
                f"the model's {name} is left out",
                other,
                id=f"{name.replace('_', '-')}-missing",
            )


def tried(
    right: Forward,
    variants: Callable[[Forward], Iterator[Variant]],
    among: Cause = NO_CAUSE,
) -> Iterator[tuple[Cause, Forward]]:
    """The variants that this model can run, each log-probability once; with `among`
    those that this cause names.

    Args:
        right: the right forward pass.
        variants: from it to the faults that may be tried.
        among: a cause; faults that it does not name are left out.

    Yields:
        The cause of each, and its forward pass.
    """
    seen: list[Tensor] = []
    for fault in variants(right):
        if not is_named(fault, among):
            continue
        try:
            variant = fault.change()
            lp = variant.statistics()[0].detach()
            if variants is others and any(
                torch.allclose(lp, x, rtol=0, atol=SAME) for x in seen
            ):
                continue  # positions of rotary models, a window that does not act
            seen.append(lp)
            yield fault.cause, variant
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
            IndexError,
            InputError,
            NotImplementedError,
        ):
            # its forward takes no positions or mask, has too few positions, or returns
            # no cache
            continue
