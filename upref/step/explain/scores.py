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

from upref.step.compare.forward import Forward, log_prob
from upref.step.inputs.reference import Model, TorchModel, text_config
from upref.step.inputs.rows import Row, micro_batch
from upref.verify.faults import Fault

MOST_PLACES_EARLY = 8  # places by which labels may stand too early
Variant: TypeAlias = Fault[Callable[[], Forward]]


def log_prob_variants(right: Forward) -> Iterator[Variant]:
    """Make the faults of log-probabilities that need no further run of the model.

    Args:
        right: the right forward pass.

    Yields:
        Variants, whose change makes the forward pass that has the fault.
    """
    T = right.temperature
    rows = right.rows

    def make_pass(
        temperature: float = T, rows: Sequence[Row] = rows, **options: Any
    ) -> Callable[[], Forward]:
        """Return a function that makes the right forward pass with these changes."""
        return lambda: Forward(
            right.model, rows, temperature, right.z, ids=right.ids, **options
        )

    wrong_temperatures = (
        ("temperature-missing", "the temperature is left out (it is 1)", 1.0),
        ("temperature-twice", "the temperature is applied twice", T * T),
        (
            "temperature-multiplied",
            "logits are multiplied by the temperature, not divided",
            1 / T,
        ),
    )
    for fault_id, words, temperature in wrong_temperatures:
        if temperature != T:
            yield Fault(words, make_pass(temperature), id=fault_id)
    yield Fault(
        "labels are not shifted: logits are read at the token that they should predict",
        make_pass(shift=0),
        id="labels-not-shifted",
    )
    yield Fault(
        "labels are shifted twice", make_pass(shift=2), id="labels-shifted-twice"
    )
    one_later = [
        replace(
            row,
            prompt=row.prompt[1:] + row.response[:1],
            response=[*row.response[1:], 0],
        )
        for row in rows
    ]
    yield Fault(
        "labels stand one token too late",
        make_pass(rows=one_later),
        id="labels-one-token-late",
    )
    shortest_prompt = min(len(row.prompt) for row in rows)
    for places in range(1, 1 + min(MOST_PLACES_EARLY, shortest_prompt)):
        tokens = "token" if places == 1 else "tokens"
        yield Fault(
            f"labels stand {places} {tokens} too early",
            make_pass(rows=[_labels_earlier(row, places) for row in rows]),
            id="labels-early",
        )
    for fault_id, words, score in wrong_scores(right.model.vocabulary, right.model.end):
        yield Fault(words, make_pass(score=score), id=fault_id)
    if isinstance(model := right.model, TorchModel):

        def run_with_cache() -> Forward:
            """Return the forward pass whose prompts have no gradient."""
            logits = [_logits_with_cache(model, row) for row in rows]
            return Forward(model, rows, T, logits)

        yield Fault(
            "prompts are run without a gradient",
            run_with_cache,
            id="prompts-without-gradient",
        )
    yield from _column_variants(right)


def _labels_earlier(row: Row, places: int) -> Row:
    """Return the row with other labels: the tokens so many places before its response's."""
    start = len(row.prompt) - places
    return replace(row, response=row.ids[start : start + len(row.response)])


def with_logits(right: Forward, z: list[Tensor], model: Model | None = None) -> Forward:
    """Score the rows of a forward pass with other logits.

    Args:
        right: the forward pass.
        z: other logits of each row.
        model: another reference; None for the same one.

    Returns:
        The forward pass with these logits.
    """
    return Forward(model or right.model, right.rows, right.temperature, z)


def repeat_first_logits(z: Tensor, n: int) -> Tensor:
    """Repeat the first row of logits in front of them, without a graph.

    Args:
        z: [S, V].
        n: how often.

    Returns:
        [n + S, V].
    """
    return torch.cat([z[:1].detach().expand(n, -1), z])


def _logits_with_cache(model: TorchModel, row: Row) -> Tensor:
    """Compute the logits with a prefix cache that has no gradient, [S, V].

    All prompt tokens but the last are in the cache. They have no logits of their own, and
    get those of the last prompt token: no label of a response is predicted there.
    """
    *first, last = row.prompt
    if not first:
        return model.logits(row.ids)
    with torch.no_grad():
        out = model.run(first, use_cache=True)
    # its name from transformers 5.24 on, and before
    name = "cache" if hasattr(out, "cache") else "past_key_values"
    held = {name: getattr(out, name)}
    return repeat_first_logits(
        model.logits([last, *row.response], use_cache=True, **held),
        len(first),
    )


def _column_variants(right: Forward) -> Iterator[Variant]:
    """Make the faults of a loop that pads micro-batches on the right, and takes their
    last T columns for the responses, T being the length of the longest one.
    """
    rows = right.rows
    count = len(rows)
    for size in range(count, 0, -1):
        padding_lengths = []
        first_columns = []
        for i, row in enumerate(rows):
            batch = micro_batch(rows, i, size)
            width = max(len(other.ids) for other in batch)
            longest_response = max(len(other.response) for other in batch)
            padding_lengths.append(width - len(row.ids))
            first_columns.append(width - longest_response)
        if first_columns == [len(row.prompt) for row in rows]:
            continue  # these are the responses
        yield Fault(
            "the last columns are taken for the response, where short rows are padded",
            partial(_score_columns, right, padding_lengths, first_columns),
            id="last-columns-for-response",
        )


def _score_columns(
    right: Forward, padding_lengths: list[int], first_columns: list[int]
) -> Forward:
    """Return the forward pass over padded rows whose responses begin at other columns.

    Args:
        right: the right forward pass.
        padding_lengths: how many tokens of padding stand behind each row.
        first_columns: where the response of each row is taken to begin.
    """
    model = right.model
    fed_behind = [tokens[0] for tokens in right.after if tokens]
    padding_token = fed_behind[0] if fed_behind else model.end or 0
    z = []
    window_rows = []
    for row, padding, start in zip(
        right.rows, padding_lengths, first_columns, strict=True
    ):
        mask = {}
        if model.takes_mask:
            is_token = [1] * len(row.ids) + [0] * padding
            mask["attention_mask"] = torch.tensor([is_token])
        ids = row.ids + [padding_token] * padding
        stop = start + len(row.response)
        z.append(model.logits(ids, **mask)[:stop])
        window_rows.append(replace(row, prompt=ids[:start], response=ids[start:stop]))
    return Forward(model, window_rows, right.temperature, z)


def _at_labels(z: Tensor, y: Tensor) -> Tensor:
    """Return the entry of each row of z [N, V] at its label y [N], [N]."""
    return z.gather(1, y[:, None])[:, 0]


# a vocabulary may be padded to a multiple of one of these
MULTIPLES = (8, 16, 32, 64, 128, 256, 512)


def wrong_scores(
    V: int, end: int | None = None
) -> Iterator[tuple[str, str, Callable[[Tensor, Tensor, float], Tensor]]]:
    """Make the wrong functions from logits to log-probabilities.

    Args:
        V: the size of the vocabulary.
        end: the token that ends a sequence, if known.

    Yields:
        An id, words, and a function of logits [N, V], labels [N] and the temperature.
    """

    def smooth_labels(z: Tensor, y: Tensor, temperature: float, share: float) -> Tensor:
        """Return the label's log-probability, of which a share is the mean over all
        tokens'.
        """
        logp = (z / temperature).log_softmax(-1)
        return (1 - share) * log_prob(z, y, temperature) + share * logp.mean(-1)

    def score_among_largest(
        z: Tensor, y: Tensor, temperature: float, count: int
    ) -> Tensor:
        """Return the label's log-probability in the softmax over the largest logits and
        its own.
        """
        is_largest = torch.zeros_like(z).scatter(1, z.topk(count).indices, 1.0)
        is_kept = is_largest.scatter(1, y[:, None], 1.0)
        return log_prob(z.masked_fill(is_kept == 0, -torch.inf), y, temperature)

    def score_in_shard(z: Tensor, y: Tensor, temperature: float, shards: int) -> Tensor:
        """Return the label's log-probability in the softmax over its part of the
        vocabulary.
        """
        size = -(-V // shards)
        is_own_shard = torch.arange(z.shape[1]) // size == (y // size)[:, None]
        return log_prob(z.masked_fill(~is_own_shard, -torch.inf), y, temperature)

    def score_padded(z: Tensor, y: Tensor, temperature: float, padding: int) -> Tensor:
        """Return the label's log-probability in a softmax with further logits of 0."""
        scaled = z / temperature
        log_sum = torch.nn.functional.pad(scaled, (0, padding)).logsumexp(-1)
        return _at_labels(scaled, y) - log_sum

    def score_without_end(z: Tensor, y: Tensor, temperature: float, end: int) -> Tensor:
        """Return the label's log-probability in the softmax without the end token,
        unless that is the label.
        """
        is_excluded = (torch.arange(z.shape[1]) == end) & (y != end)[:, None]
        return log_prob(z.masked_fill(is_excluded, -torch.inf), y, temperature)

    padded_sizes = [-(-V // multiple) * multiple for multiple in MULTIPLES]
    for size in dict.fromkeys(padded_sizes):
        if size > V:
            yield (
                "vocabulary-padded",
                f"the vocabulary is padded to {size} with logits of 0",
                partial(score_padded, padding=size - V),
            )
    if end is not None:
        yield (
            "end-token-left-out",
            f"the softmax leaves the end token ({end}) out wherever it is not the label",
            partial(score_without_end, end=end),
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
    for shards in (2, 4, 8):
        yield (
            "normalized-over-shard",
            f"the log-softmax is over the label's shard of the vocabulary, of {shards}",
            partial(score_in_shard, shards=shards),
        )
    for count in (5, 10, 20, 40, 50, 100):
        if count < V:
            yield (
                "normalized-over-largest",
                f"log-probabilities are normalized over the {count} largest",
                partial(score_among_largest, count=count),
            )
    for share in (0.1, 0.05, 0.2, 0.01):
        yield (
            "labels-smoothed",
            f"label smoothing of {share} is on",
            partial(smooth_labels, share=share),
        )


# ---- the head ------------------------------------------------------------------------
def head_variants(model: TorchModel, right: Forward) -> Iterator[Variant]:
    """Make the faults of the head, the layer that makes logits of hidden states.

    Args:
        model: the reference.
        right: its forward pass.

    Yields:
        Variants; none for a model whose head is not found.
    """
    net: Any = model.net
    head = _find_head(model)
    if head is None:
        return

    def replace_output(
        replacement: Callable[[Any, Tensor, Tensor], Tensor | None],
    ) -> Forward:
        """Make the forward pass with another output of the head.

        Args:
            replacement: (head, its input, its output) -> another output; None keeps it.
        """

        def hook(module: Any, args: Any, output: Tensor) -> Tensor | None:
            """Replace what the head returns."""
            return replacement(module, args[0], output)

        handle = head.register_forward_hook(hook)
        try:
            return with_logits(right, [model.logits(row.ids) for row in right.rows])
        finally:
            handle.remove()

    def use_embedding(weight: Tensor) -> Forward:
        """Make the forward pass with this table of embeddings as the head."""
        return replace_output(lambda module, hidden, output: hidden @ weight.T)

    raw_outputs: list[Tensor] = []
    replace_output(lambda module, hidden, output: raw_outputs.append(output[0].cpu()))
    pairs = zip(raw_outputs, right.z, strict=False)
    have_same_shape = all(raw_output.shape == z.shape for raw_output, z in pairs)
    if have_same_shape and not torch.allclose(raw_outputs[0], right.z[0]):
        softcap = getattr(text_config(net), "final_logit_softcapping", None)
        yield from _output_variants(right, raw_outputs, softcap)
    if getattr(head, "bias", None) is not None:
        yield Fault(
            "the head's bias is left out",
            lambda: replace_output(lambda module, hidden, output: output - module.bias),
            id="head-bias-missing",
        )
    for table in _modules_of_vocabulary(model, torch.nn.Embedding, "num_embeddings"):
        is_own = table.weight is head.weight
        if not is_own and table.weight.shape == head.weight.shape:
            yield Fault(
                "the input embedding stands for the head",
                partial(use_embedding, table.weight),
                id="input-embedding-for-head",
            )


def _find_head(model: TorchModel) -> Any:
    """Return the layer that makes logits of hidden states; None where it is not found."""
    net: Any = model.net
    if hasattr(net, "get_output_embeddings"):
        return net.get_output_embeddings()
    linear = _modules_of_vocabulary(model, torch.nn.Linear, "out_features")
    return next(iter(linear), None)


def _modules_of_vocabulary(model: TorchModel, kind: type, size: str) -> list[Any]:
    """Return the modules of a kind whose attribute `size` is that of the vocabulary."""
    net: Any = model.net
    return [
        module
        for module in net.modules()
        if isinstance(module, kind) and getattr(module, size) == model.vocabulary
    ]


def _output_variants(
    right: Forward, raw_outputs: list[Tensor], softcap: float | None
) -> Iterator[Variant]:
    """Make the faults of what a model does to the head's output.

    Args:
        right: the right forward pass.
        raw_outputs: of the head, for each row.
        softcap: c of the model's c tanh(x / c); None or 0: it has none.
    """
    yield Fault(
        "the head's raw output is taken: the model's logit scale or softcap is left out",
        lambda: with_logits(right, raw_outputs),
        id="raw-head-output",
    )
    if not softcap:
        return

    def cap_inside_out() -> Forward:
        """Return the forward pass whose logits are x tanh(x / c)."""
        return with_logits(right, [x * torch.tanh(x / softcap) for x in raw_outputs])

    def cap_twice() -> Forward:
        """Return the forward pass whose logits are capped a second time."""
        return with_logits(right, [softcap * torch.tanh(z / softcap) for z in right.z])

    yield Fault(
        "the final softcap is x tanh(x / c), not c tanh(x / c)",
        cap_inside_out,
        id="softcap-inside-out",
    )
    yield Fault("the final softcap is applied twice", cap_twice, id="softcap-twice")
