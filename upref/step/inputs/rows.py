# SPDX-License-Identifier: Apache-2.0
"""The responses of one training step, without tensors or padding: the trainer makes
those.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from upref.errors import InputError
from upref.registry import Objective
from upref.step.inputs.ratios import (
    LARGEST_LOG_PROB,
    WeightInputs,
    choose_log_ratios,
    choose_log_rho,
)

CASE_AXES = ("lengths", "temperature", "ratio", "holes")  # what a case must vary
GROUP_SIZES = (2, 4, 8)  # of groups that share a prompt


class Design(NamedTuple):
    """What a row that `make_rows` makes is like."""

    prompt_length: int
    response_length: int
    adv: float
    group: int
    holes: tuple[int, ...] = ()  # tokens of the response that do not train
    # tokens of the response that `make_probable` replaces by probable ones
    probable: tuple[int, ...] = ()


# There are eight responses, 10 holes and 43 tokens that train, a prime: a count that a
# loop divides by in error is another number. Halves, ranks and groups have distinct
# counts of tokens. No hole is the last token of a response: what ends it trains. Two
# advantages are beyond the bounds by which loops clamp them.
DESIGNS = (
    Design(3, 9, adv=1.3, group=0, holes=(3, 4), probable=(1, 5)),
    Design(7, 4, adv=-0.7, group=0),
    Design(4, 7, adv=5.5, group=0, holes=(4,), probable=(1, 3)),
    Design(6, 5, adv=-5.2, group=1, holes=(2,)),
    Design(2, 8, adv=0.9, group=1, holes=(0, 4), probable=(2, 6)),
    Design(5, 6, adv=-1.1, group=2),
    Design(3, 11, adv=2.0, group=2, holes=(5, 6, 7), probable=(1, 8)),
    Design(8, 3, adv=-0.5, group=2, holes=(1,)),
)


@dataclass
class Row:
    """One response with its prompt.

    `prompt` and `response` are token ids. `trains`, `old`, `ref` and `sampler` have one
    entry per response token; the last three are log-probabilities in nats. `adv` is one
    number, or one per token. Where `old` is None, the response is on policy, r = 1. Only
    a KL term needs `ref`. `sampler` is log μ of the engine that sampled, which an
    objective with a correction needs. A loop that computes advantages itself starts from
    `reward`, and should arrive at `adv`. A value loss reads `returns`, and `old_values` if
    it clips, one entry per response token. `routes` are the experts that the sampler took:
    routes[token][layer] is a list of them, of each token of prompt and response.
    """

    prompt: list[int]
    response: list[int]
    trains: list[bool]
    adv: float | list[float]
    old: list[float] | None = None
    ref: list[float] | None = None
    group: int = 0
    reward: float | None = None
    sampler: list[float] | None = None
    returns: list[float] | None = None
    old_values: list[float] | None = None
    routes: list[list[list[int]]] | None = None

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.response


@dataclass(frozen=True)
class Padded:
    """The rows as tensors [B, T] over the response tokens, right-padded."""

    old: Tensor | None
    adv: Tensor
    mask: Tensor
    group: Tensor
    ref: Tensor | None
    is_token: Tensor  # slots that hold a token, masked or not
    sampler: Tensor | None = None
    returns: Tensor | None = None
    old_values: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Padded":
        """Pad rows on the right to the longest response.

        Args:
            rows: of any lengths.

        Returns:
            [B, T] each; a column that some row lacks is None.
        """

        def pad(lists: Any, dtype: torch.dtype = torch.float64) -> Tensor:
            """Return lists of numbers, one per row, as a padded tensor."""
            return nn.utils.rnn.pad_sequence(
                [torch.tensor(numbers, dtype=dtype) for numbers in lists],
                batch_first=True,
            )

        def pad_field(name: str) -> Tensor | None:
            """Return a field of all rows as a padded tensor; None where a row lacks it."""
            lists = [getattr(row, name) for row in rows]
            return None if any(numbers is None for numbers in lists) else pad(lists)

        advantages = []
        for row in rows:
            if isinstance(row.adv, list):
                advantages.append(row.adv)
            else:
                advantages.append([row.adv] * len(row.response))
        return cls(
            old=pad_field("old"),
            adv=pad(advantages),
            mask=pad([row.trains for row in rows], torch.bool),
            group=torch.tensor([row.group for row in rows]),
            ref=pad_field("ref"),
            is_token=pad([[True] * len(row.response) for row in rows], torch.bool),
            sampler=pad_field("sampler"),
            returns=pad_field("returns"),
            old_values=pad_field("old_values"),
        )

    def widened(self) -> "Padded":
        """Return the same rows with one more column of padding."""
        tables = {}
        for name, value in vars(self).items():
            if value is not None and value.ndim == 2:  # the group has no columns
                tables[name] = nn.functional.pad(value, (0, 1))
        return replace(self, **tables)


def validate_rows(rows: Sequence[Row], vocabulary: int) -> list[Row]:
    """Return the rows; raise InputError where no step can have such rows.

    Args:
        rows: as passed.
        vocabulary: the number of ids.
    """
    if (
        not isinstance(rows, list | tuple)
        or not rows
        or not all(isinstance(row, Row) for row in rows)
    ):
        raise InputError("rows must be a list of upref.step.Row, one per response.")
    for i, row in enumerate(rows):
        _validate_row(i, row, vocabulary)
    if sum(row.old is None for row in rows) not in (0, len(rows)):
        raise InputError(
            "some rows have old log-probabilities and some have none: give them all, or none."
        )
    if not any(any(row.trains) for row in rows):
        raise InputError("no token of any row trains: there is no gradient to compare.")
    return list(rows)


def _validate_row(i: int, row: Row, vocabulary: int) -> None:
    """Raise InputError where no step can have this row.

    Args:
        i: the number of the row.
        row: as passed.
        vocabulary: the number of ids.
    """
    count = len(row.response)
    if not row.prompt or not count:
        raise InputError(
            f"row {i} has no {'response' if row.prompt else 'prompt'} token: leave it out."
        )
    for name in ("trains", "old", "ref", "sampler", "returns", "old_values"):
        entries = getattr(row, name)
        if entries is not None and len(entries) != count:
            raise InputError(
                f"row {i}: {name} has {len(entries)} entries, and the response has {count} tokens."
            )
    if isinstance(row.adv, list) and len(row.adv) != count:
        raise InputError(
            f"row {i}: adv must be one number, or one for each of the {count} response tokens."
        )
    if not np.isfinite(np.asarray(row.adv, dtype=float)).all():
        raise InputError(
            f"row {i}: adv is not finite: check the rewards and the group's standard deviation."
        )
    if any(not 0 <= token < vocabulary for token in row.ids):
        raise InputError(
            f"row {i} has a token id outside the vocabulary of {vocabulary}."
        )
    for name in ("returns", "old_values"):
        numbers = np.asarray(getattr(row, name) or [0.0], dtype=float)
        if not np.isfinite(numbers).all():
            raise InputError(f"row {i}: {name} must be finite numbers.")
    for name in ("old", "ref", "sampler"):
        lp = np.asarray(getattr(row, name) or [0.0], dtype=float)
        # rounding may leave a log-probability a little above 0
        if not (np.isfinite(lp) & (lp <= 1e-3)).all():
            raise InputError(
                f"row {i}: {name} must be log-probabilities: finite, and never above 0."
            )


def micro_batch(rows: Sequence[Row], i: int, size: int) -> Sequence[Row]:
    """Return the rows of the micro-batch in which row i is.

    Args:
        rows: of the step. Micro-batches take them in their order.
        i: the number of a row.
        size: rows of each micro-batch; the last one may have fewer.
    """
    start = i // size * size
    return rows[start : start + size]


def locate(fed: Sequence[list[int]], row: Row) -> tuple[int, int] | None:
    """Find where a row starts in the model's input.

    Args:
        fed: token ids of each sequence.
        row: a response with its prompt.

    Returns:
        (index of the sequence, index of the token in it); None where the row is in no
        sequence.
    """
    text_of_row = text_of(row.ids)
    for n, sequence in enumerate(fed):
        text = text_of(sequence)
        offset = text.find(text_of_row)
        if offset >= 0:
            # a space precedes each token, and `offset` is that of the row's first one
            return n, text[:offset].count(" ")
    return None


def text_of(ids: Sequence[int]) -> str:
    """Return the ids as text, with a space on both sides of each, so that no id is found
    in another.
    """
    return " ".join(map(str, ["", *ids, ""]))


def make_rows(
    vocabulary: int,
    seed: int = 0,
    without: Sequence[str] = (),
    end: int | None = None,
    group_size: int | None = None,
) -> list[Row]:
    """Make eight responses with distinct tokens and holes in their masks, still without
    log-probabilities.

    Args:
        vocabulary: its number of tokens.
        seed: of the tokens.
        without: `lengths` for responses of one length, `holes` for responses without
            holes; other words have no effect.
        end: the id that ends a sequence. As in samples it stands at the end of a
            response and nowhere else in it; only a response of the largest length lacks
            it. It stands inside most prompts, and in those that groups share.
        group_size: so many responses in a row share a prompt and a group; None: each
            has a prompt of its own.

    Raises:
        InputError: the vocabulary is too small, or group_size is none of GROUP_SIZES.
    """
    if vocabulary < 8:
        raise InputError(
            f"a vocabulary of {vocabulary} tokens is too small: give a model with at least 8."
        )
    if group_size is not None and (
        type(group_size) is not int or group_size not in GROUP_SIZES
    ):
        raise InputError(
            f"group_size is {', '.join(map(str, GROUP_SIZES))} or None, got {repr(group_size)[:60]}."
        )
    rng = np.random.default_rng(seed)
    has_one_length = "lengths" in without
    designs = [*DESIGNS]
    if has_one_length:
        designs = [
            design._replace(prompt_length=4, response_length=6) for design in designs
        ]
    longest_response = max(design.response_length for design in designs)
    total = sum(design.prompt_length + design.response_length for design in designs)
    # 0 is left out: many loops pad by it
    ordinary_ids = [token for token in range(1, vocabulary) if token != end]
    ids = np.concatenate(
        [rng.permutation(ordinary_ids) for _ in range(1 + total // len(ordinary_ids))]
    )
    rows: list[Row] = []
    offset = 0
    for i, design in enumerate(designs):
        stop = offset + design.prompt_length + design.response_length
        tokens = ids[offset:stop].tolist()
        offset = stop
        prompt = tokens[: design.prompt_length]
        response = tokens[design.prompt_length :]
        if end is not None:
            # the longest response is cut off before its end; of equally long ones,
            # every fourth is
            is_longest = design.response_length == longest_response
            is_cut_off = is_longest and not (has_one_length and i % 4)
            if not is_cut_off:
                response[-1] = end
            if (i % 4 or group_size is not None) and design.prompt_length > 2:
                # as in a chat template: an attention mask made of token values cuts it
                # out
                prompt[1] = end
        group = design.group
        if group_size is not None:
            group = i // group_size
            if i % group_size:
                prompt = list(rows[-1].prompt)
        holes = () if "holes" in without else design.holes
        trains = [t not in holes for t in range(design.response_length)]
        rows.append(Row(prompt, response, trains, design.adv, group=group))
    return rows


def make_probable(
    rows: list[Row], logits: Callable[[list[int]], Tensor], end: int | None = None
) -> list[Row]:
    """Replace some tokens of the responses by the most probable ones that no row has
    yet.

    A bound on the change of a probability acts on tokens that are probable.

    Args:
        rows: they are changed.
        logits: of token ids: [S, V].
        end: the id that ends a sequence.

    Returns:
        The same rows.
    """
    used = {0}
    if end is not None:
        used.add(end)
    for row in rows:
        used.update(row.ids)
    for row, design in zip(rows, DESIGNS, strict=False):
        for t in design.probable:
            if t >= len(row.response) - 1:
                continue  # the last token ends the response
            z = logits(row.prompt + row.response[:t])[-1].detach().clone()
            used.discard(row.response[t])  # it may be the most probable one itself
            z[[*used]] = -torch.inf
            row.response[t] = int(z.argmax())
            used.add(row.response[t])
    return rows


def add_log_probs(
    rows: list[Row],
    lp: list[Tensor],
    o: Objective,
    hp: dict[str, Any],
    *,
    seed: int = 0,
    on_policy: bool = False,
    coarse: bool = False,
    entropy: list[Tensor] | None = None,
) -> list[Row]:
    """Give the rows old and reference log-probabilities, so that r is on both sides of
    each bound of the objective; and the sampler's, where the objective corrects for it.

    Args:
        rows: they are changed.
        lp: log-probabilities of each row's response tokens, by the current weights.
        o: the objective.
        hp: its numbers, resolved.
        seed: of the ratios.
        on_policy: r = 1 everywhere.
        coarse: no token is beside a bound, for a step in half precision.
        entropy: of each response token, where the objective reads it.

    Returns:
        The same rows. The reference's log-probabilities are the current ones with
        noise; none of these numbers is above -1e-3.
    """
    rng = np.random.default_rng(seed + 1)
    padded = Padded.of(rows)
    batch = WeightInputs(
        _padded(lp),
        padded.adv,
        padded.mask,
        None if entropy is None else _padded(entropy),
    )
    log_ratios = choose_log_ratios(batch, o, hp, rng, coarse)
    for row, lp_of_row, log_ratios_of_row in zip(rows, lp, log_ratios, strict=True):
        n = len(row.response)
        current = lp_of_row.numpy()
        old = current - (0 if on_policy else log_ratios_of_row[:n])
        row.old = np.minimum(old, LARGEST_LOG_PROB).tolist()
        ref = current + rng.normal(0, 0.3, n)
        row.ref = np.minimum(ref, LARGEST_LOG_PROB).tolist()
    if o.sampler is not None:
        padded_old = Padded.of(rows).old
        assert padded_old is not None
        log_rho = choose_log_rho(padded_old, padded.mask, o, hp, rng, coarse)
        for row, log_rho_of_row in zip(rows, log_rho, strict=True):
            sampler = np.array(row.old) - log_rho_of_row[: len(row.response)]
            row.sampler = np.minimum(sampler, LARGEST_LOG_PROB).tolist()
    return rows


def _padded(rows: list[Tensor]) -> Tensor:
    """Pad one tensor [T_i] per response to [B, T], in float64 and without a graph."""
    return nn.utils.rnn.pad_sequence(
        [x.detach().double() for x in rows], batch_first=True
    )


def find_unvaried_axes(
    rows: Sequence[Row], temperature: float, lp: list[Tensor]
) -> dict[str, str]:
    """Find the axes that this case does not vary, on which it cannot show a bug.

    Args:
        rows: of the step.
        temperature: of the sampler.
        lp: log-probabilities of each response.

    Returns:
        Axis -> why.
    """
    unvaried = {}
    one_prompt = all(r.prompt == rows[0].prompt for r in rows)
    if len({len(r.response) for r in rows}) == 1 or (
        len({len(r.prompt) for r in rows}) == 1 and not one_prompt
    ):
        unvaried["lengths"] = "all responses, or all prompts, have one length"
    if temperature == 1:
        unvaried["temperature"] = "the temperature is 1"
    if all(
        r.old is None or np.allclose(r.old, lp_of_row, atol=1e-6)
        for r, lp_of_row in zip(rows, lp, strict=True)
    ):
        unvaried["ratio"] = "r = 1 everywhere"
    if all(all(r.trains) for r in rows):
        unvaried["holes"] = "every response token trains"
    return unvaried


def find_unusual_values_missing(rows: Sequence[Row]) -> list[str]:
    """Return in words what no row has, although a sample may: a loop that reads a token or
    a response by its value may fail on it.

    Args:
        rows: of the step.
    """
    missing = []
    if not any(0 in np.atleast_1d(row.adv) for row in rows):
        missing.append("an advantage of 0")
    if not any(0 in row.response for row in rows):
        missing.append("the id 0 in a response")
    if all(len(set(row.response)) == len(row.response) for row in rows):
        missing.append("a token that repeats")
    if all(any(row.trains) for row in rows):
        missing.append("a response without a trained token")
    return missing


def describe_rows(
    rows: Sequence[Row], temperature: float, lp: list[Tensor]
) -> list[str]:
    """Return what the case varies, in words.

    Args:
        rows: of the step.
        temperature: of the sampler.
        lp: log-probabilities of each response.
    """
    prompt_lengths = [len(row.prompt) for row in rows]
    response_lengths = [len(row.response) for row in rows]
    is_off_policy = []
    for row, lp_of_row in zip(rows, lp, strict=True):
        for old, current in zip(row.old or lp_of_row, lp_of_row, strict=True):
            is_off_policy.append(abs(old - current) > 1e-3)
    holes = sum(not trains for row in rows for trains in row.trains)
    prompts = f"prompts of {prompt_lengths[0]}"
    if len({*prompt_lengths}) > 1:
        prompts = f"prompts of {min(prompt_lengths)} to {max(prompt_lengths)}"
    return [
        f"temperature {temperature:g}",
        f"{len(rows)} responses of {min(response_lengths)} to {max(response_lengths)} tokens",
        prompts,
        f"{holes} masked response tokens",
        f"r != 1 on {100 * sum(is_off_policy) / len(is_off_policy):.0f} % of the tokens",
        *_sampler_words(rows, lp),
    ]


def _sampler_words(rows: Sequence[Row], lp: list[Tensor]) -> list[str]:
    """Return in words how far the sampler is from the old policy; nothing where no row
    has the sampler's log-probabilities.
    """
    rho = [
        math.exp(old - sampler)
        for r, lp_of_row in zip(rows, lp, strict=True)
        for old, sampler in zip(
            r.old or lp_of_row.tolist(), r.sampler or (), strict=False
        )
    ]
    return [f"rho from {min(rho):.3g} to {max(rho):.3g}"] if rho else []
