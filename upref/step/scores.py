# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities made of the right hidden states in a wrong way: head, temperature,
labels, columns, normalizer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from upref.step.forward import Forward, log_prob
from upref.step.reference import Model, TorchModel, text_config
from upref.step.rows import Row, micro_batch
from upref.verify.faults import Fault

EARLIER = 8  # places by which labels may stand too early
Variant: TypeAlias = Fault[Callable[[], Forward]]


def quick(right: Forward) -> Iterator[Variant]:
    """Make the faults of log-probabilities that need no further run of the model.

    Args:
        right: the right forward pass.

    Yields:
        Variants, whose change makes the forward pass that has the fault.
    """
    T = right.temperature
    z = right.z
    rows = right.rows

    def made(
        t: float = T, rows: Sequence[Row] = rows, **how: Any
    ) -> Callable[[], Forward]:
        """What makes the forward pass that has these changes."""
        return lambda: Forward(right.model, rows, t, z, ids=right.ids, **how)

    for id, words, t in (
        ("temperature-missing", "the temperature is left out (it is 1)", 1.0),
        ("temperature-twice", "the temperature is applied twice", T * T),
        (
            "temperature-multiplied",
            "logits are multiplied by the temperature, not divided",
            1 / T,
        ),
    ):
        if t != T:
            yield Fault(words, made(t), id=id)
    yield Fault(
        "labels are not shifted: logits are read at the token that they should predict",
        made(shift=0),
        id="labels-not-shifted",
    )
    yield Fault("labels are shifted twice", made(shift=2), id="labels-shifted-twice")
    next_ = [
        replace(r, prompt=r.prompt[1:] + r.response[:1], response=[*r.response[1:], 0])
        for r in rows
    ]
    yield Fault(
        "labels stand one token too late", made(rows=next_), id="labels-one-token-late"
    )
    for by in range(1, 1 + min(EARLIER, *(len(r.prompt) for r in rows))):
        tokens = "token" if by == 1 else "tokens"
        yield Fault(
            f"labels stand {by} {tokens} too early",
            made(rows=[_labels_earlier(r, by) for r in rows]),
            id="labels-early",
        )
    for id, words, score in scores(right.model.vocabulary, right.model.end):
        yield Fault(words, made(score=score), id=id)
    if isinstance(model := right.model, TorchModel):

        def cached() -> Forward:
            """With prompts that are run without a gradient."""
            return Forward(model, rows, T, [_cached(model, r) for r in rows])

        yield Fault(
            "prompts are run without a gradient", cached, id="prompts-without-gradient"
        )
    yield from _columns(right)


def _labels_earlier(row: Row, by: int) -> Row:
    """The row with the tokens that stand so many places before those of its response."""
    start = len(row.prompt) - by
    return replace(row, response=row.ids[start : start + len(row.response)])


def again(right: Forward, z: list[Tensor], model: Model | None = None) -> Forward:
    """Score the rows of a forward pass with other logits.

    Args:
        right: the forward pass.
        z: other logits of each row.
        model: another reference; None for the same one.

    Returns:
        The forward pass with these logits.
    """
    return Forward(model or right.model, right.rows, right.temperature, z)


def fronted(z: Tensor, n: int) -> Tensor:
    """Repeat the first row of logits in front of them, without a graph.

    Args:
        z: [S, V].
        n: how often.

    Returns:
        [n + S, V].
    """
    return torch.cat([z[:1].detach().expand(n, -1), z])


def _cached(model: TorchModel, row: Row) -> Tensor:
    """The logits with a prefix cache that has no gradient."""
    *first, last = row.prompt
    if not first:
        return model.logits(row.ids)
    with torch.no_grad():
        past = model.run(first, use_cache=True).past_key_values
    return fronted(
        model.logits([last, *row.response], past_key_values=past, use_cache=True),
        len(first),
    )


def _columns(right: Forward) -> Iterator[Variant]:
    """The last T columns of micro-batches that are padded right, T the longest
    response.
    """
    model, rows, n = right.model, right.rows, len(right.rows)
    end = next((x[0] for x in right.after if x), right.model.end or 0)
    for m in range(n, 0, -1):
        parts = [micro_batch(rows, i, m) for i in range(n)]
        width = [max(len(r.ids) for r in x) for x in parts]
        starts = [
            w - max(len(r.response) for r in x)
            for w, x in zip(width, parts, strict=True)
        ]
        behind = [w - len(r.ids) for w, r in zip(width, rows, strict=True)]
        if starts == [len(r.prompt) for r in rows]:
            continue  # these are the responses

        def window(behind: list[int] = behind, starts: list[int] = starts) -> Forward:
            z = []
            is_response = []
            for r, k, start in zip(rows, behind, starts, strict=True):
                if model.masked:
                    mask = {
                        "attention_mask": torch.tensor([[1] * len(r.ids) + [0] * k])
                    }
                else:
                    mask = {}
                ids = r.ids + [end] * k
                stop = start + len(r.response)
                z.append(model.logits(ids, **mask)[:stop])
                is_response.append(
                    replace(r, prompt=ids[:start], response=ids[start:stop])
                )
            return Forward(model, is_response, right.temperature, z)

        yield Fault(
            "the last columns are taken for the response, where short rows are padded",
            window,
            id="last-columns-for-response",
        )


def _at_labels(x: Tensor, y: Tensor) -> Tensor:
    """[N]: of each row of x [N, V] the number at its label."""
    return x.gather(1, y[:, None])[:, 0]


# what a vocabulary may be padded to a multiple of
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)


def scores(
    V: int, end: int | None = None
) -> Iterator[tuple[str, str, Callable[[Tensor, Tensor, float], Tensor]]]:
    """An id, words, and a function of logits, labels and temperature."""

    def smooth(z: Tensor, y: Tensor, temperature: float, e: float) -> Tensor:
        return (1 - e) * log_prob(z, y, temperature) + e * (
            z / temperature
        ).log_softmax(-1).mean(-1)

    def among(z: Tensor, y: Tensor, temperature: float, k: int) -> Tensor:
        kept_logits = (
            torch.zeros_like(z)
            .scatter(1, z.topk(k).indices, 1.0)
            .scatter(1, y[:, None], 1.0)
        )
        return log_prob(z.masked_fill(kept_logits == 0, -torch.inf), y, temperature)

    def sharded(z: Tensor, y: Tensor, temperature: float, n: int) -> Tensor:
        size = -(-V // n)
        is_own_shard = torch.arange(z.shape[1]) // size == (y // size)[:, None]
        return log_prob(z.masked_fill(~is_own_shard, -torch.inf), y, temperature)

    def padded(z: Tensor, y: Tensor, temperature: float, more: int) -> Tensor:
        x = z / temperature
        log_sum = torch.nn.functional.pad(x, (0, more)).logsumexp(-1)
        return _at_labels(x, y) - log_sum

    def without_end(z: Tensor, y: Tensor, temperature: float, end: int) -> Tensor:
        never = (torch.arange(z.shape[1]) == end) & (y != end)[:, None]
        return log_prob(z.masked_fill(never, -torch.inf), y, temperature)

    for size in dict.fromkeys(-(-V // m) * m for m in MULTIPLES):
        if size > V:
            yield (
                "vocabulary-padded",
                f"the vocabulary is padded to {size} with logits of 0",
                partial(padded, more=size - V),
            )
    if end is not None:
        yield (
            "end-token-left-out",
            f"the softmax leaves the end token ({end}) out wherever it is not the label",
            partial(without_end, end=end),
        )
    yield (
        "log-softmax-over-temperature",
        "log-probabilities are divided by the temperature, not logits",
        lambda z, y, T: log_prob(z, y, 1) / T,
    )
    yield (
        "probabilities-for-log-probs",
        "probabilities stand for log-probabilities",
        lambda z, y, T: log_prob(z, y, T).exp(),
    )
    yield (
        "normalizer-detached",
        "the log-normalizer has no gradient",
        lambda z, y, T: _at_labels(z / T, y) - (z / T).logsumexp(-1).detach(),
    )
    for n in (2, 4, 8):
        yield (
            "normalized-over-shard",
            f"the log-softmax is over the label's shard of the vocabulary, of {n}",
            partial(sharded, n=n),
        )
    for k in (k for k in (5, 10, 20, 40, 50, 100) if k < V):
        yield (
            "normalized-over-largest",
            f"log-probabilities are normalized over the {k} largest",
            partial(among, k=k),
        )
    for e in (0.1, 0.05, 0.2, 0.01):
        yield "labels-smoothed", f"label smoothing of {e} is on", partial(smooth, e=e)


# ---- the head ------------------------------------------------------------------------
def heads(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the faults of the head, the layer that makes logits of hidden states.

    Args:
        model: the reference.
        right: its forward pass.

    Yields:
        Variants; none for a model whose head is not found.
    """
    net: Any = model.net

    def as_wide(kind: type, size: str) -> list[Any]:
        """The modules of that kind which have the size of the vocabulary."""
        return [
            m
            for m in net.modules()
            if isinstance(m, kind) and getattr(m, size) == model.vocabulary
        ]

    tables = as_wide(torch.nn.Embedding, "num_embeddings")
    linear = as_wide(torch.nn.Linear, "out_features")
    head: Any
    if hasattr(net, "get_output_embeddings"):
        head = net.get_output_embeddings()
    else:
        head = next(iter(linear), None)
    if head is None:
        return

    def otherwise(out: Callable[[Any, Tensor, Tensor], Tensor | None]) -> Forward:
        """out: the head, what it gets, and its output, to what it gives instead."""
        handle = head.register_forward_hook(lambda m, args, y: out(m, args[0], y))
        try:
            return again(right, [model.logits(r.ids) for r in right.rows])
        finally:
            handle.remove()

    raw: list[Tensor] = []
    otherwise(lambda m, h, y: raw.append(y[0].cpu()))
    if all(
        x.shape == z.shape for x, z in zip(raw, right.z, strict=False)
    ) and not torch.allclose(raw[0], right.z[0]):
        yield Fault(
            "the head's raw output is taken: the model's logit scale or softcap is left out",
            lambda: again(right, raw),
            id="raw-head-output",
        )
        if c := getattr(text_config(net), "final_logit_softcapping", None):
            yield Fault(
                "the final softcap is x tanh(x / c), not c tanh(x / c)",
                lambda: again(right, [x * torch.tanh(x / c) for x in raw]),
                id="softcap-inside-out",
            )
            yield Fault(
                "the final softcap is applied twice",
                lambda: again(right, [c * torch.tanh(z / c) for z in right.z]),
                id="softcap-twice",
            )
    if getattr(head, "bias", None) is not None:
        yield Fault(
            "the head's bias is left out",
            lambda: otherwise(lambda m, h, y: y - m.bias),
            id="head-bias-missing",
        )
    for w in (
        t.weight
        for t in tables
        if t.weight is not head.weight and t.weight.shape == head.weight.shape
    ):
        stands = partial(otherwise, partial(lambda w, m, h, y: h @ w.T, w))
        yield Fault(
            "the input embedding stands for the head",
            stands,
            id="input-embedding-for-head",
        )
