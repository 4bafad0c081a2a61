# SPDX-License-Identifier: Apache-2.0
"""The recorded batch: what a real run wrote of one step, checked once at the boundary.

docs/dump.md is this schema for people. B responses of at most T tokens;
log-probabilities in nats at the temperature that trains. A dump holds the texts of
users, as token ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from upref.errors import InputError
from upref.pages import locate_page
from upref.rollouts import Rollouts

SCHEMA = 1  # version of docs/dump.md
PAGE = "docs/dump.md"
# in meta, where a reader took the groups from the prompts' tokens
PROMPTS_READ = "group"
# in meta, before the name of a column: how the framework is made to record it
HINT = "hint: "
MOST_SLOTS = 2**27  # B x T of a step: 1 GiB for a column of float64
LARGEST = 1e39  # of a number: above every float32, whose least fills masked logits
SAME = 1e-12  # nats, between two copies of a number
# in meta, where the files of a step log different numbers: two of them
SEVERAL_LOSSES = "several_losses"
# in meta, where nothing tells the files of a step from files of two runs: the sentence
UNTOLD = "untold"
ROUNDING = 1e-3  # how far a fused log-softmax in half precision overshoots 0

# What is stored per token, [B, T] or ragged, and what per response, [B].
LOG_PROBS = {
    "old": "log π_old of the trainer before the update",
    "sampler": "log μ of the engine that sampled; NaN: the sampler did not draw this token",
    "now": "log π_θ of the trainer in this micro-batch",
    "ref": "log π_ref of the reference model",
}
TOKEN_FLOATS = LOG_PROBS | {
    "adv": "advantage",
    "entropy": "entropy of π_θ in nats",
    "correction": "factor by which the trainer's correction of the sampler multiplies the token's term",
    "grad": "dL/dlog π_θ, where L is the loss of the whole step",
}
TOKEN_INTEGERS = {
    "ids": "token id",
    "sampler_ids": "the ids as the sampler drew them",
    "turn": "number of the turn or source of the token",
}
RESPONSE_COLUMNS = {
    "reward": "reward of the response",
    "group": "prompt of the response",
    "version": "step of the weights that sampled the response, or each token",
    "micro": "micro-batch of the response",
    "rank": "data-parallel rank of the response",
}
# Numbers of a step that the checks know; a file may hold others.
LOGGED = {
    "loss": "the loss of the step",
    "tokens": "the count of tokens that the framework states as the step's, over all ranks",
    "responses": "the count of responses, the same; it may count responses of which no token trains",
    "generation_tokens": "the count of tokens of the generation batch, of which the step is a part",
    "length": "a constant by which the framework divides the sum over a response's tokens",
    "divisor": "the number by which the framework divides the sum over responses, where that is no count of them",
    "ranks": "how many data-parallel ranks the step has",
}
COUNTS = tuple(name for name in LOGGED if name != "loss")
COLUMNS = (
    TOKEN_INTEGERS
    | {"mask": "true on the tokens that train"}
    | TOKEN_FLOATS
    | RESPONSE_COLUMNS
)


def expect_batch(x: Any, purpose: str) -> None:
    """Raise InputError unless it is a RecordedBatch.

    Args:
        x: anything.
        purpose: what needs it, for the message.
    """
    if not isinstance(x, RecordedBatch):
        raise InputError(
            f"{purpose} takes a recorded batch, for example upref.replay.read(FILE), not {type(x).__name__}."
        )


@dataclass(frozen=True, eq=False)
class RecordedBatch:
    """One step of a run, or what one file holds of it. A column that was not recorded
    is None.

    Args:
        ids: token ids, [B, T].
        mask: [B, T], True on the tokens that train. A response may have none.
        adv: advantages, [B, T].
        old, sampler, now, ref: log-probabilities in nats, [B, T]; see LOG_PROBS.
        entropy: nats, [B, T].
        correction: the factor of a sampler correction, as the trainer multiplied by it,
            [B, T].
        grad: dL/dlog π_θ of the whole step's loss, as backward left it, averaged over
            ranks, [B, T].
        sampler_ids: [B, T].
        turn: [B, T].
        reward, group, micro, rank: one number per response, [B].
        version: one number per response, [B], or per token, [B, T].
        step: number of the optimizer step, where it is known.
        logged: numbers of this step from the run: LOGGED.
        meta: facts about the run, in words.
        hints: column -> how the framework is made to record it, where the reader of the
            file knows.
        dropped: column -> the file of this step that lacks it, where others have it.
        file: where it was read.
    """

    ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    adv: Float[Tensor, "B T"] | None = None
    old: Float[Tensor, "B T"] | None = None
    sampler: Float[Tensor, "B T"] | None = None
    now: Float[Tensor, "B T"] | None = None
    ref: Float[Tensor, "B T"] | None = None
    entropy: Float[Tensor, "B T"] | None = None
    correction: Float[Tensor, "B T"] | None = None
    grad: Float[Tensor, "B T"] | None = None
    sampler_ids: Int[Tensor, "B T"] | None = None
    turn: Int[Tensor, "B T"] | None = None
    reward: Float[Tensor, " B"] | None = None
    group: Int[Tensor, " B"] | None = None
    version: Int[Tensor, " B"] | Int[Tensor, "B T"] | None = None
    micro: Int[Tensor, " B"] | None = None
    rank: Int[Tensor, " B"] | None = None
    step: int | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    meta: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    file: str = ""

    @property
    def tokens(self) -> int:
        """How many tokens train."""
        return int(self.mask.sum())

    @property
    def recorded(self) -> list[str]:
        """Names of the columns that are there."""
        return [name for name in COLUMNS if getattr(self, name) is not None]

    def require(self, *names: str, purpose: str) -> None:
        """Raise InputError unless all these columns are there, in all files of the
        step. The message says how the framework is made to record the first one that is
        missing, where that is known.

        Args:
            *names: of columns.
            purpose: what needs them, for the message.
        """
        self.expect_whole(*names, purpose=purpose)
        missing = [name for name in names if getattr(self, name) is None]
        if missing:
            first = missing[0]
            written = self.meta.get(
                HINT + first, f"record it as {locate_page(PAGE)} describes."
            )
            hint = self.hints.get(first, written)
            raise InputError(
                f"{purpose} needs the column {first} ({COLUMNS[first]}), which {self.file} lacks: {hint}"
            )

    def expect_whole(self, *names: str, purpose: str) -> None:
        """Raise InputError where some files of the step have one of these columns and
        others lack it: without it the answer would be that of another run. A column
        that all lack is no error.
        """
        for name in names:
            if name in self.dropped:
                raise InputError(
                    f"{purpose} needs the column {name} of all files of the step, and {self.dropped[name]} lacks it."
                )

    def trainer(self) -> Float[Tensor, "B T"]:
        """Return the trainer's log-probabilities before the update: `old`, else `now`;
        InputError where neither is recorded.
        """
        self.expect_whole("old", purpose="every check of log-probabilities")
        column = self.old if self.old is not None else self.now
        if column is None:
            self.require("old", purpose="every check of log-probabilities")
        assert column is not None
        return column

    def old_is_sampler(self) -> bool:
        """Return whether `old` equals the sampler's column on all trained tokens that
        it drew, to SAME, as where a run takes the engine's numbers as π_old: two
        engines differ by more on some token. False where either is not recorded.
        """
        if self.old is None or self.sampler is None:
            return False
        drawn = self.mask & self.sampler.isfinite()
        return bool(((self.old - self.sampler)[drawn].abs() <= SAME).all())

    def beside_sampler(self) -> Float[Tensor, "B T"]:
        """Return the trainer's log-probabilities that are compared with the sampler's:
        `trainer()`, but `now` where old is the sampler's own column and the weights that
        sampled are not known to be older.
        """
        if self.now is None or not self.old_is_sampler():
            return self.trainer()
        if self.version is not None and self.step is not None:
            is_late = bool((self.lags()[self.mask] > 0).any())
            return self.trainer() if is_late else self.now
        return self.now

    def lags(self) -> Int[Tensor, "B T"]:
        """Return by how many steps the weights that sampled each token are older than
        those of this step, [B, T]. The columns version and step must be there.
        """
        assert self.version is not None and self.step is not None
        version = self.version if self.version.ndim == 2 else self.version[:, None]
        return (self.step - version).expand_as(self.mask)

    def rows(self, index: Tensor) -> "RecordedBatch":
        """Return the responses of that index.

        Args:
            index: numbers of responses, or a mask [B].

        Returns:
            A batch of these rows.
        """
        columns = {name: getattr(self, name)[index] for name in self.recorded}
        return replace(self, **columns)

    def rollouts(self, *, sampler: bool = False) -> Rollouts:
        """Return the responses that train, as the input of an objective; π_θ is `now`,
        else π_old: the first optimizer step.

        Args:
            sampler: with the sampler's log-probabilities.

        Returns:
            A checked batch [B, T]. It has no groups where one of them has a single
            response: the rest of that group may be in another file.

        Raises:
            InputError: a column is missing or is not a log-probability.
        """
        self.require("adv", purpose="an objective")
        self.expect_whole("now", "ref", "entropy", "group", purpose="an objective")
        b = self.rows(self.mask.any(1))
        assert b.adv is not None
        old = b.trainer()
        mu = None
        if sampler:
            b.require("sampler", purpose="a sampler correction")
            assert b.sampler is not None
            mu = torch.where(b.sampler <= ROUNDING, b.sampler.clamp(max=0), b.sampler)
        group = b.group
        if group is not None and bool((group.unique(return_counts=True)[1] == 1).any()):
            group = None  # the rest of the group was dropped, or lies in another file
        return Rollouts(
            logp=old if b.now is None else b.now,
            logp_old=old,
            adv=b.adv,
            mask=b.mask,
            group=group,
            logp_ref=b.ref,
            entropy=b.entropy,
            logp_sampler=mu,
        )
