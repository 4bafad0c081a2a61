# SPDX-License-Identifier: Apache-2.0
"""Recorded batches of a third reader, who wrote them before reading the rules of
`upref.replay.suspects`: peaked policies with an end token, long-tailed lengths, tools,
lists padded with -1, and groups from which rows are missing.

    python -m tests.replay.third --seed 3               # every fault, and healthy dumps
    python -m tests.replay.third --seed 3 --healthy 500

A policy is a recurrent model of one layer: its sharpness depends on the context, so that
about 60 % of the tokens have a probability above 0.9 and the numbers of many are exactly
0 in float32. A fault counts where it moves the recorded difference by 0.03 nats on
average, or 1 token in 200 by 0.5 nats.
"""

import argparse
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref.replay.advantages import advantages
from upref.replay.batch import make_batch
from upref.replay.findings import Checked, ReplayFinding
from upref.replay.gap import gap

END = 1  # id of the end token
HIDDEN = 24  # numbers in the state of a policy
WEAK_MEAN, WEAK_SHARE, FAR = 0.03, 0.005, 0.5
PRECISE = torch.float64
Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Place:
    """What a run consists of.

    Args:
        seed: of everything that is drawn.
        vocabulary: size.
        prompts: how many; each has four to nine responses.
        longest: most tokens of a response, tools included.
        temperature: of the policy.
        experts: whether the layer is chosen from four by a router.
        engine_bfloat16, trainer_bfloat16: who computes in bfloat16.
        tools: whether half of the responses have answers of tools, which do not train.
        empty: what stands in the sampler's slots that do not train.
        missing: share of the rows that a filter took out.
        left: whether the rows end at the right.
    """

    seed: int
    vocabulary: int = 800
    prompts: int = 8
    longest: int = 120
    temperature: float = 1.0
    experts: bool = False
    engine_bfloat16: bool = False
    trainer_bfloat16: bool = False
    tools: bool = False
    empty: float = 0.0
    missing: float = 0.0
    left: bool = False

    def generator(self, purpose: int) -> torch.Generator:
        """Random numbers of one purpose."""
        return torch.Generator().manual_seed(1009 * self.seed + purpose)


def draw_place(seed: int) -> Place:
    """Return a place whose every attribute is drawn."""
    draw = torch.Generator().manual_seed(seed + 77)

    def choose(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=draw))]

    return Place(
        seed,
        vocabulary=choose(200, 800, 2000),
        prompts=choose(5, 8, 12),
        longest=choose(60, 120, 240),
        temperature=choose(1.0, 1.0, 0.7, 0.6, 1.2),
        experts=choose(False, False, True),
        engine_bfloat16=choose(False, True),
        trainer_bfloat16=choose(False, False, True),
        tools=choose(False, True),
        empty=choose(0.0, -1.0, math.nan),
        missing=choose(0.0, 0.0, 0.2),
        left=choose(False, False, True),
    )


# ---- a policy ------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Policy:
    """Weights, and how they are computed."""

    embedding: Tensor  # [V, H]
    layers: Tensor  # [experts, H, H]
    router: Tensor  # [H, experts]
    head: Tensor  # [H, V]
    bias: Tensor  # [V]
    peak: Tensor  # [H]: how sharp a context is
    level: float  # of sharpness
    temperature: float = 1.0
    exact: bool = False  # kernels of another summation: float64, then float32
    bfloat16: bool = False
    dropout: float = 0.0
    router_noise: float = 0.0
    memory: float = 0.75  # how much of the state a token keeps
    offset: int = 0  # of the positions
    change: Callable[["Policy", Tensor, Tensor], Tensor] | None = field(default=None)

    def rounded(self, x: Tensor) -> Tensor:
        """In the precision of the policy."""
        return x.bfloat16().float() if self.bfloat16 else x

    def step(self, state: Tensor, ids: Tensor, position: int, chance: Any) -> Tensor:
        """Return the state [B, H] after one more token of each row."""
        x = self.embedding[ids] + 0.3 * _wave(position + self.offset)
        scores = state @ self.router
        if self.router_noise:
            noise = torch.randn(scores.shape, generator=chance)
            scores = scores + self.router_noise * noise
        mixed = torch.einsum("bh,bhk->bk", state, self.layers[scores.argmax(-1)])
        state = self.rounded(torch.tanh(x + self.memory * mixed))
        if self.dropout:
            kept = torch.rand(state.shape, generator=chance) >= self.dropout
            state = state * kept / (1 - self.dropout)
        return state

    def logits(self, state: Tensor, left: Tensor) -> Tensor:
        """Return the logits before the temperature, [B, V]. left: [B], tokens until the
        end is near.
        """
        sharpness = (self.level + 1.8 * (state @ self.peak)).clamp(-2, 4).exp()
        dtype = PRECISE if self.exact else torch.float32
        z = (state.to(dtype) @ self.head.to(dtype)).float()
        z = self.rounded(z * sharpness[:, None] + self.bias)
        z[:, END] += (-0.7 * left).clamp(-25, 25)
        return self.rounded(z)


def _wave(position: int) -> Tensor:
    """Return a token's position as a state [H]."""
    k = torch.arange(HIDDEN)
    return torch.sin(position / 1.7 ** (k / 3) + k)


PEAKED = 0.6  # share of tokens above a probability of 0.9


@functools.lru_cache(maxsize=8)
def make_policy(place: Place) -> Policy:
    """Return a policy whose tokens are peaked as those of a model that was trained: the
    level of its sharpness is found by bisection.
    """
    small = replace(place, prompts=4, longest=30, tools=False)
    low, high = -1.0, 4.0
    for _ in range(7):
        level = (low + high) / 2
        rows = draw(small, _policy_of(small, level))
        likely = (rows.sampler[rows.kind == 1] > math.log(0.9)).double().mean()
        low, high = (low, level) if likely > PEAKED else (level, high)
    return _policy_of(place, high)


def _policy_of(place: Place, level: float) -> Policy:
    """Return the weights of a recurrent policy of a place, at this level of its
    log-probabilities.
    """
    g, V = place.generator(1), place.vocabulary

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    peak = normal(HIDDEN) / HIDDEN**0.5
    bias = -0.6 * torch.log(1.0 + torch.arange(V)[torch.randperm(V, generator=g)])
    return Policy(
        normal(V, HIDDEN),
        normal(4 if place.experts else 1, HIDDEN, HIDDEN) / HIDDEN**0.5,
        normal(HIDDEN, 4 if place.experts else 1),
        normal(HIDDEN, V) / HIDDEN**0.5,
        bias,
        peak,
        level=level,
        temperature=place.temperature,
    )


def engine_of(place: Place) -> Policy:
    """The policy as the engine computes it."""
    return replace(make_policy(place), bfloat16=place.engine_bfloat16, exact=True)


def trainer_of(place: Place) -> Policy:
    """The policy as the trainer computes it."""
    return replace(make_policy(place), bfloat16=place.trainer_bfloat16)


def moved(policy: Policy, size: float, seed: int) -> Policy:
    """Return the policy some updates later: each matrix has moved by a share of its
    deviation.
    """
    g = torch.Generator().manual_seed(seed)

    def move(x: Tensor) -> Tensor:
        return x + size * x.std() * torch.randn(x.shape, generator=g)

    return replace(
        policy,
        embedding=move(policy.embedding),
        layers=move(policy.layers) if policy.layers.numel() else policy.layers,
        head=move(policy.head),
    )


# ---- drawing and scoring -------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Rows:
    """Responses [B, T] with their prompts, before a file is made of them."""

    ids: Tensor
    kind: Tensor  # 0 prompt, 1 drawn by the engine, 2 of a tool, -1 padding
    group: Tensor
    ends: Tensor  # [B]: about where the end token becomes likely
    sampler: Tensor


@dataclass(frozen=True)
class Plan:
    """What is given before anything is drawn: prompts, tools and about their lengths."""

    group: Tensor  # [B]
    prompt: Tensor  # [B, P]
    ends: Tensor  # [B]
    tool: Tensor  # [B, T]: ids of tools, -1 elsewhere


def make_plan(place: Place) -> Plan:
    """Return the plan of the rows: long-tailed lengths, and in half of the rows of
    tools one to three answers.
    """
    g, V = place.generator(2), place.vocabulary
    sizes = torch.randint(4, 10, (place.prompts,), generator=g)
    group = torch.repeat_interleave(torch.arange(place.prompts), sizes)
    B, T = len(group), place.longest
    prompt = torch.randint(2, V, (place.prompts, 6), generator=g)[group]
    spread = torch.randn(place.prompts, generator=g)[group]
    own = torch.randn(B, generator=g)
    ends = ((T / 4) * torch.exp(0.5 * spread + 0.4 * own)).clamp(3, 0.9 * T)
    tool = torch.full((B, T), -1)
    if place.tools:
        for b in range(0, B, 2):
            for _ in range(int(torch.randint(1, 4, (), generator=g))):
                start = int(torch.randint(2, max(3, int(ends[b])), (), generator=g))
                size = int(torch.randint(3, 12, (), generator=g))
                piece = tool[b, start : start + size]
                piece[:] = torch.randint(2, V, piece.shape, generator=g)
    return Plan(group, prompt, ends, tool)


def draw(place: Place, engine: Policy, *, keep: Any = None) -> Rows:
    """Draw the responses from the engine, token by token.

    Args:
        place: the run.
        engine: that draws.
        keep: log-probabilities [B, V] -> which tokens may be drawn; None: all.
    """
    plan, chance = make_plan(place), place.generator(3)
    B, P, T = len(plan.group), plan.prompt.shape[1], place.longest
    state = torch.zeros(B, HIDDEN)
    for t in range(P):
        state = engine.step(state, plan.prompt[:, t], t, chance)
    ids, kind = torch.zeros(B, T, dtype=torch.long), torch.full((B, T), -1)
    sampler = torch.zeros(B, T, dtype=PRECISE)
    alive = torch.ones(B, dtype=torch.bool)
    seen = torch.zeros(B, place.vocabulary).scatter(1, plan.prompt, 1.0)
    for t in range(T):
        z = engine.logits(state, plan.ends - t)
        if engine.change is not None:
            z = engine.change(engine, z, seen)
        lp = (z / engine.temperature).log_softmax(-1)
        if keep is not None:
            lp = lp.masked_fill(~keep(lp), -torch.inf).log_softmax(-1)
        drawn = torch.multinomial(lp.exp(), 1, generator=chance)[:, 0]
        is_tool = plan.tool[:, t] >= 0
        ids[:, t] = torch.where(is_tool, plan.tool[:, t], drawn)
        sampler[:, t] = lp.gather(1, drawn[:, None])[:, 0].to(PRECISE)
        kind[:, t] = torch.where(alive, torch.where(is_tool, 2, 1), -1)
        alive = alive & (is_tool | (drawn != END))
        seen = seen.scatter_add(1, ids[:, t : t + 1], torch.ones(B, 1))
        state = engine.step(state, ids[:, t], P + t, chance)
    return Rows(
        torch.cat([plan.prompt, ids], 1),
        torch.cat([torch.zeros(B, P, dtype=torch.long), kind], 1),
        plan.group,
        plan.ends,
        torch.nn.functional.pad(sampler, (P, 0)),
    )


def score(place: Place, rows: Rows, trainer: Policy, *, skip: int = 0) -> Tensor:
    """Return the trainer's log-probabilities of the rows, [B, T]; skip: tokens of the
    prompt that the trainer lacks.
    """
    chance = place.generator(4)
    B, P = len(rows.ids), make_plan(place).prompt.shape[1]
    out = torch.zeros(rows.ids.shape, dtype=PRECISE)
    state = torch.zeros(B, HIDDEN)
    for t in range(skip, rows.ids.shape[1]):
        if t >= P:
            z = trainer.logits(state, rows.ends - (t - P))
            lp = (z / trainer.temperature).log_softmax(-1)
            out[:, t] = lp.gather(1, rows.ids[:, t : t + 1])[:, 0].to(PRECISE)
        state = trainer.step(state, rows.ids[:, t], t - skip, chance)
    return out


@functools.lru_cache(maxsize=2)
def drawn_rows(place: Place) -> tuple[Rows, Tensor]:
    """Return rows of the healthy engine, and the trainer's log-probabilities of them."""
    rows = draw(place, engine_of(place))
    return rows, score(place, rows, trainer_of(place))


def columns(place: Place, rows: Rows, old: Tensor) -> Columns:
    """Return the columns of a file, with rewards and GRPO's advantages."""
    g = place.generator(5)
    mask = rows.kind == 1
    reward = torch.bernoulli(torch.full((len(mask),), 0.5), generator=g).to(PRECISE)
    adv = torch.zeros_like(reward)
    for k in rows.group.unique():
        own = rows.group == k
        adv[own] = (reward[own] - reward[own].mean()) / (reward[own].std() + 1e-6)
    out = {
        "ids": rows.ids,
        "mask": mask,
        "old": old.masked_fill(rows.kind < 0, 0.0),
        "sampler": rows.sampler.masked_fill(~mask, place.empty),
        "adv": adv[:, None] * mask,
        "reward": reward,
        "group": rows.group,
    }
    return out


def finish(place: Place, columns: Columns) -> Columns:
    """Take rows out, and move them to the right, as the place has it."""
    g = place.generator(6)
    B = len(columns["ids"])
    kept = torch.rand(B, generator=g) >= place.missing
    out = {name: x[kept] for name, x in columns.items()}
    if place.left:
        end = out["mask"].shape[1] - 1 - out["mask"].int().flip(1).argmax(1)
        shift = out["mask"].shape[1] - 1 - end
        for name, x in out.items():
            if x.ndim == 2:
                rows = [r.roll(int(k)) for r, k in zip(x, shift, strict=True)]
                out[name] = torch.stack(rows)
    return out


def plain(place: Place) -> Columns:
    """The columns of a healthy run."""
    return columns(place, *drawn_rows(place))


# ---- faults --------------------------------------------------------------------------
@dataclass(frozen=True)
class Truth:
    """What a true answer holds.

    Attributes:
        words: each finding holds one of them, and there is one.
        fails: whether it must be a failure; None: it may be.
        of_advantages: whether the advantages are wrong, and not the sampler's column.
    """

    words: tuple[str, ...]
    fails: bool | None = False
    of_advantages: bool = False


Fault = Callable[[Place], Columns]
FAULTS: dict[str, Fault] = {}
TRUTHS: dict[str, Truth] = {}
POLICIES = ("weights", "experts", "precision", "two normalized policies", "quantiz")


def fault(*words: str, fails: bool | None = False) -> Callable[[Fault], Fault]:
    """Return a decorator that enters a fault under its name, with its truth."""

    def enter(make: Fault) -> Fault:
        FAULTS[make.__name__] = make
        TRUTHS[make.__name__] = Truth(words, fails)
        return make

    return enter


def advantage_fault(*words: str) -> Callable[[Fault], Fault]:
    """Return a decorator that enters a fault of the advantages under its name, with its
    truth.
    """

    def enter(make: Fault) -> Fault:
        FAULTS[make.__name__] = make
        TRUTHS[make.__name__] = Truth(words, None, of_advantages=True)
        return make

    return enter


def by_engine(place: Place, engine: Policy, **options: Any) -> Columns:
    """Return the columns of a batch that another engine drew; the trainer is the
    healthy one.
    """
    rows = draw(place, engine, **options)
    return columns(place, rows, score(place, rows, trainer_of(place)))


def by_trainer(place: Place, trainer: Policy, **options: Any) -> Columns:
    """Return the columns of a batch that the healthy engine drew, and another trainer
    scores.
    """
    rows, _ = drawn_rows(place)
    return columns(place, rows, score(place, rows, trainer, **options))


def of_sampler(place: Place, change: Callable[[Columns], Tensor]) -> Columns:
    """Return the columns of a healthy run whose sampler's column is changed."""
    made = plain(place)
    return made | {"sampler": change(made)}


def ends_of(mask: Tensor) -> Tensor:
    """[B]: the last trained slot of each row."""
    return mask.shape[1] - 1 - mask.int().flip(1).argmax(1)


NOT_DRAWN = ("did not draw", "not drawn", "no log-probability of the sampler")


def _at_the_end(place: Place, value: float) -> Columns:
    """Return columns whose sampler has this value at the last token of each response."""

    def put(made: Columns) -> Tensor:
        rows = torch.arange(len(made["mask"]))
        changed = made["sampler"].clone()
        changed[rows, ends_of(made["mask"])] = value
        return changed

    return of_sampler(place, put)


@fault(*NOT_DRAWN, fails=None)
def end_token_zero(place: Place) -> Columns:
    """Return a batch in which the engine's list lacks the end token; the slot has 0."""
    made = plain(place)
    last = ends_of(made["mask"])
    rows = torch.arange(len(last))
    more = made["old"].clone()
    chance = torch.rand(len(last), generator=place.generator(9), dtype=PRECISE)
    more[rows, last] = -3.0 - 4 * chance
    return made | {"old": more, "sampler": _at_the_end(place, 0.0)["sampler"]}


@fault(*NOT_DRAWN, "-1", fails=None)
def end_token_minus_one(place: Place) -> Columns:
    """A list that is one short and padded with -1."""
    return _at_the_end(place, -1.0)


@fault(*NOT_DRAWN, "-1", fails=None)
def short_lists(place: Place) -> Columns:
    """Return a batch whose engine's lists are a tenth short and padded with -1."""

    def cut(made: Columns) -> Tensor:
        count = made["mask"].sum(1, keepdim=True)
        at = made["mask"].cumsum(1)
        late = made["mask"] & (at > 0.9 * count)
        return made["sampler"].masked_fill(late, -1.0)

    return of_sampler(place, cut)


def _tools_train(place: Place, value: float) -> Columns:
    """Return columns in which tokens of tools train, with this value in the sampler's
    column.
    """
    place = replace(place, tools=True)
    rows, old = drawn_rows(place)
    made = columns(place, rows, old)
    tool = rows.kind == 2
    A = made["adv"].sum(1, keepdim=True) / made["mask"].sum(1, keepdim=True)
    return made | {
        "mask": made["mask"] | tool,
        "adv": A * (made["mask"] | tool),
        "sampler": made["sampler"].masked_fill(tool, value),
    }


@fault(*NOT_DRAWN, fails=None)
def tools_train_zero(place: Place) -> Columns:
    """Answers of tools train; the engine's slots have 0."""
    return _tools_train(place, 0.0)


@fault(*NOT_DRAWN, fails=True)
def tools_train_nan(place: Place) -> Columns:
    """Answers of tools train; the engine's slots have NaN."""
    return _tools_train(place, math.nan)


@fault(*NOT_DRAWN, "-1", fails=None)
def tools_train_minus_one(place: Place) -> Columns:
    """Answers of tools train; the engine's slots have -1."""
    return _tools_train(place, -1.0)


@fault("shift", "slots from the trainer's", fails=None)
def shifted(place: Place) -> Columns:
    """The engine's numbers stand one slot late."""
    return of_sampler(place, lambda made: made["sampler"].nan_to_num(0).roll(1, 1))


@fault("shift", "slots from the trainer's", fails=None)
def shifted_back(place: Place) -> Columns:
    """The engine's numbers stand one slot early."""
    return of_sampler(place, lambda made: made["sampler"].nan_to_num(0).roll(-1, 1))


@fault("rows", "responses", fails=None)
def next_row(place: Place) -> Columns:
    """Each row has the numbers of the next one."""
    return of_sampler(place, lambda made: made["sampler"].nan_to_num(0).roll(1, 0))


@fault("rows", "responses", fails=None)
def exchanged_in_groups(place: Place) -> Columns:
    """Return a batch in which the engine's rows of each prompt are in the reverse
    order.
    """

    def exchange(made: Columns) -> Tensor:
        """Return the sampler's column with the responses of each group in reverse
        order.
        """
        changed = made["sampler"].nan_to_num(0).clone()
        for k in made["group"].unique():
            own = (made["group"] == k).nonzero()[:, 0]
            changed[own] = changed[own.flip(0)]
        return changed

    return of_sampler(place, exchange)


@fault("temperature", fails=None)
def raw_numbers(place: Place) -> Columns:
    """Return a batch in which the engine draws at T = 0.6 and reports the numbers of T
    = 1.
    """
    place = replace(place, temperature=0.6)
    rows, old = drawn_rows(place)
    raw = score(place, rows, replace(engine_of(place), temperature=1.0))
    return columns(place, replace(rows, sampler=raw), old)


@fault("temperature", fails=None)
def trainer_at_one(place: Place) -> Columns:
    """Return a batch in which everything is drawn at T = 0.6, and the trainer takes T =
    1.
    """
    place = replace(place, temperature=0.6)
    return by_trainer(place, replace(trainer_of(place), temperature=1.0))


def nucleus(top_p: float) -> Callable[[Tensor], Tensor]:
    """Return a function that says which tokens top_p keeps."""

    def keep(lp: Tensor) -> Tensor:
        p, order = lp.exp().sort(-1, descending=True)
        kept = p.cumsum(-1) - p < top_p
        return torch.zeros_like(kept).scatter(1, order, kept)

    return keep


CUT = ("top_p", "nucleus", "cut", "mass")


@fault(*CUT)
def nucleus_cut(place: Place) -> Columns:
    """The engine draws with top_p 0.9 and reports the renormalized numbers."""
    return by_engine(place, engine_of(place), keep=nucleus(0.9))


@fault(*CUT)
def top_k_cut(place: Place) -> Columns:
    """Return a batch in which the engine draws from the four likeliest tokens,
    renormalized.
    """

    def keep(lp: Tensor) -> Tensor:
        return lp >= lp.topk(4, -1).values[:, -1:]

    return by_engine(place, engine_of(place), keep=keep)


def _penalize(policy: Policy, z: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen > 0, torch.where(z > 0, z / 1.2, z * 1.2), z)


def _frequency(policy: Policy, z: Tensor, seen: Tensor) -> Tensor:
    return z - 0.5 * seen


@fault("penalt")
def repetition_penalty(place: Place) -> Columns:
    """The engine has a repetition penalty of 1.2."""
    return by_engine(place, replace(engine_of(place), change=_penalize))


@fault("penalt")
def frequency_penalty(place: Place) -> Columns:
    """The engine has a frequency penalty of 0.5."""
    return by_engine(place, replace(engine_of(place), change=_frequency))


@fault("weights")
def stale(place: Place) -> Columns:
    """The engine has the weights of some updates ago."""
    return by_engine(place, moved(engine_of(place), 0.15, place.seed))


@fault("weights")
def half_stale(place: Place) -> Columns:
    """Return a batch in which every second response was drawn by the weights of some
    updates ago.
    """
    new = plain(place)
    rows = draw(place, moved(engine_of(place), 0.3, place.seed))
    old = columns(place, rows, score(place, rows, trainer_of(place)))
    late = torch.arange(len(rows.ids)) % 2 == 1
    out = dict(new)
    for name in ("ids", "mask", "old", "sampler"):
        out[name] = torch.where(late[:, None], old[name], new[name])
    A = new["adv"].sum(1, keepdim=True) / new["mask"].sum(1, keepdim=True)
    return out | {"adv": A * out["mask"]}


@fault("context", "prompt", "cache")
def prompt_lost(place: Place) -> Columns:
    """The trainer lacks the prompt."""
    return by_trainer(place, trainer_of(place), skip=6)


@fault("context", "cache", "window", "position")
def short_memory(place: Place) -> Columns:
    """The engine keeps less of what came before."""
    return by_engine(place, replace(engine_of(place), memory=0.4))


@fault("position", "context", "cache", *POLICIES)
def positions_off(place: Place) -> Columns:
    """The trainer counts the positions from another start."""
    return by_trainer(place, replace(trainer_of(place), offset=3))


@fault("dropout", *POLICIES)
def dropout(place: Place) -> Columns:
    """The trainer is in training mode, with dropout 0.1."""
    return by_trainer(place, replace(trainer_of(place), dropout=0.1))


@fault("experts", "rout", *POLICIES)
def other_experts(place: Place) -> Columns:
    """Return a batch in which the engine's router sends near ties to other experts."""
    place = replace(place, experts=True)
    return by_engine(place, replace(engine_of(place), router_noise=0.3))


@fault(*POLICIES)
def quantized(place: Place) -> Columns:
    """Return a batch in which the engine has weights of four bits."""

    def few(x: Tensor) -> Tensor:
        scale = x.abs().max() / 7
        return (x / scale).round() * scale

    e = engine_of(place)
    e = replace(e, head=few(e.head), layers=few(e.layers))
    return by_engine(place, e)


@fault("log2", "factor", "divided", fails=None)
def in_bits(place: Place) -> Columns:
    """The column is in bits."""
    return of_sampler(place, lambda made: made["sampler"] / math.log(2))


@fault("probabilities", fails=None)
def probabilities(place: Place) -> Columns:
    """The column has probabilities."""
    return of_sampler(place, lambda made: made["sampler"].exp())


@fault("sum", "up to each token", "neighbors", fails=None)
def running_sum(place: Place) -> Columns:
    """Return a batch whose sampler's column has the sum up to each token."""

    def add(made: Columns) -> Tensor:
        return (made["sampler"].nan_to_num(0) * made["mask"]).cumsum(1)

    return of_sampler(place, add)


@fault("mean", "sum", "one number", fails=None)
def means(place: Place) -> Columns:
    """Return a batch in which each token has the mean of its response."""

    def average(made: Columns) -> Tensor:
        mask = made["mask"]
        total = (made["sampler"].nan_to_num(0) * mask).sum(1) / mask.sum(1)
        return total[:, None].expand_as(made["sampler"]).clone()

    return of_sampler(place, average)


@fault("constant", "one number", "same number", "no log-prob", "-1", fails=None)
def constant(place: Place) -> Columns:
    """The column is -1 everywhere."""
    return of_sampler(place, lambda made: torch.full_like(made["sampler"], -1.0))


@fault("all 0", "zero", "is 0", "of nothing", fails=None)
def all_zero(place: Place) -> Columns:
    """The column is 0 everywhere."""
    return of_sampler(place, lambda made: torch.zeros_like(made["sampler"]))


@fault("floor", "clamp", "smallest", fails=None)
def floor(place: Place) -> Columns:
    """No number is below -3."""
    return of_sampler(place, lambda made: made["sampler"].clamp(min=-3.0))


@fault("other ids", "tokens of its own", "retoken", "ids", fails=None)
def other_ids(place: Place) -> Columns:
    """Return a batch in which one token in forty is another one than the engine drew,
    as after a text is made into tokens anew; the engine's ids are not recorded.
    """
    rows, _ = drawn_rows(place)
    g = place.generator(11)
    off = (torch.rand(rows.ids.shape, generator=g) < 1 / 40) & (rows.kind == 1)
    other = torch.randint(2, place.vocabulary, rows.ids.shape, generator=g)
    rows = replace(rows, ids=torch.where(off, other, rows.ids))
    return columns(place, rows, score(place, rows, trainer_of(place)))


@fault("copied", "copy", "of the reference", "reference", fails=None)
def of_reference(place: Place) -> Columns:
    """Return a batch in which the engine has the weights of the reference model."""
    base = moved(engine_of(place), 0.3, place.seed + 5)
    made = by_engine(place, base)
    rows = draw(place, base)
    ref = score(place, rows, replace(base, bfloat16=place.trainer_bfloat16))
    return made | {"ref": ref.masked_fill(~made["mask"], 0.0)}


@fault("padded", "end", "left", "right", "shift", fails=None)
def other_end(place: Place) -> Columns:
    """Return a batch in which the numbers stand at the right end of each row, the ids
    at the left.
    """
    place = replace(place, left=False, tools=False)

    def move(made: Columns) -> Tensor:
        width = made["mask"].shape[1]
        by = width - 1 - ends_of(made["mask"])
        x = made["sampler"].nan_to_num(0)
        return torch.stack([r.roll(int(k)) for r, k in zip(x, by, strict=True)])

    return of_sampler(place, move)


@fault("draft", "specul", "not the distribution that sampled", *POLICIES)
def draft(place: Place) -> Columns:
    """Return a batch whose engine's numbers are those of a draft model."""
    rows, old = drawn_rows(place)
    of_draft = score(place, rows, moved(engine_of(place), 0.25, place.seed + 8))
    return columns(place, replace(rows, sampler=of_draft), old)


@fault("largest", "likeliest", "not the distribution that sampled", "in place of")
def of_the_top(place: Place) -> Columns:
    """Return a batch in which each slot has the number of its likeliest token."""
    rows, old = drawn_rows(place)
    engine, P = engine_of(place), 6
    best = torch.zeros(rows.ids.shape, dtype=PRECISE)
    state, chance = torch.zeros(len(rows.ids), HIDDEN), place.generator(4)
    for t in range(rows.ids.shape[1]):
        if t >= P:
            z = engine.logits(state, rows.ends - (t - P)) / engine.temperature
            best[:, t] = z.log_softmax(-1).max(-1).values.to(PRECISE)
        state = engine.step(state, rows.ids[:, t], t, chance)
    return columns(place, replace(rows, sampler=best), old)


@fault("responses", "rows", "precision", "rounded", "bfloat16")
def in_bfloat16(place: Place) -> Columns:
    """The column is stored in bfloat16."""
    return of_sampler(place, lambda made: made["sampler"].bfloat16().to(PRECISE))


# ---- faults of the advantages ---------------------------------------------------------
def with_advantages(
    place: Place, change: Callable[[Tensor, Columns], Tensor]
) -> Columns:
    """Return a healthy run with all its rows, whose advantages [B] are changed."""
    made = plain(replace(place, missing=0.0))
    A = made["adv"].sum(1) / made["mask"].sum(1)
    return made | {"adv": change(A, made)[:, None] * made["mask"]}


def of_groups(reward: Tensor, group: Tensor, *, divide: bool = True) -> Tensor:
    """Return GRPO's advantages [B] over any groups; without dividing, Dr. GRPO's."""
    out = torch.zeros_like(reward)
    for k in group.unique():
        own = group == k
        out[own] = reward[own] - reward[own].mean()
        if divide and own.sum() > 1:
            out[own] /= reward[own].std() + 1e-6
    return out


@advantage_fault("minus", "other sign")
def negated(place: Place) -> Columns:
    """The advantages have the other sign."""
    return with_advantages(place, lambda A, made: -A)


@advantage_fault("of the row")
def of_the_next_row(place: Place) -> Columns:
    """Each response has the advantage of the next row."""
    return with_advantages(place, lambda A, made: A.roll(1))


@advantage_fault("times")
def doubled(place: Place) -> Columns:
    """The advantages are counted twice."""
    return with_advantages(place, lambda A, made: 2 * A)


@advantage_fault("whole batch", "fixed baseline")
def over_the_batch(place: Place) -> Columns:
    """Return a batch whose advantages are normalized by the mean and deviation of all
    rows.
    """

    def change(A: Tensor, made: Columns) -> Tensor:
        return of_groups(made["reward"], torch.zeros_like(made["group"]))

    return with_advantages(place, change)


@advantage_fault("consecutive rows", "mix prompts")
def of_eight_rows(place: Place) -> Columns:
    """Return a batch whose advantages are of groups of eight rows, where the prompts
    have from four to nine responses.
    """

    def change(A: Tensor, made: Columns) -> Tensor:
        return of_groups(made["reward"], torch.arange(len(A)) // 8)

    return with_advantages(place, change)


@advantage_fault("clipped", "shaped")
def clipped_advantages(place: Place) -> Columns:
    """The advantages are clipped at 0.8."""
    return with_advantages(place, lambda A, made: A.clamp(-0.8, 0.8))


@advantage_fault("shaped")
def shaped_rewards(place: Place) -> Columns:
    """Return a batch whose rewards had a penalty of the length subtracted after they
    were recorded.
    """

    def change(A: Tensor, made: Columns) -> Tensor:
        penalty = 0.3 * made["mask"].sum(1) / made["mask"].sum(1).max()
        return of_groups(made["reward"] - penalty, made["group"])

    return with_advantages(place, change)


# ---- healthy runs --------------------------------------------------------------------
def slightly_stale(place: Place) -> Columns:
    """The engine is one small update behind."""
    return by_engine(place, moved(engine_of(place), 0.01, place.seed))


def second_update(place: Place) -> Columns:
    """Return a healthy batch at a later optimizer step on it."""
    rows, old = drawn_rows(place)
    now = score(place, rows, moved(trainer_of(place), 0.02, place.seed))
    return columns(place, rows, old) | {"now": now.masked_fill(rows.kind < 0, 0.0)}


def bypass(place: Place) -> Columns:
    """Return a healthy batch of a run that takes the engine's numbers as π_old."""
    made = second_update(place)
    return made | {"old": made["sampler"].masked_fill(~made["mask"], 0.0)}


def nearly_greedy(place: Place) -> Columns:
    """A very low temperature."""
    return plain(replace(place, temperature=0.15))


def some_router_noise(place: Place) -> Columns:
    """Return a healthy batch of a mixture of experts in which one near tie in many goes
    another way.
    """
    place = replace(place, experts=True)
    return by_engine(place, replace(engine_of(place), router_noise=0.02))


def both_cut(place: Place) -> Columns:
    """Return a healthy batch in which engine and trainer renormalize over the same kept
    tokens.
    """
    rows = draw(place, engine_of(place), keep=nucleus(0.95))
    noise = 1e-3 * torch.randn(rows.sampler.shape, generator=place.generator(12))
    return columns(place, rows, (rows.sampler + noise.to(PRECISE)).clamp(max=0))


def without_deviation(place: Place) -> Columns:
    """Return a healthy batch with Dr. GRPO's advantages."""

    def change(A: Tensor, made: Columns) -> Tensor:
        return of_groups(made["reward"], made["group"], divide=False)

    return with_advantages(place, change)


def filtered_rows(place: Place) -> Columns:
    """Return a healthy batch of which a third of the rows was taken out after the
    advantages were computed.
    """
    made = plain(place)
    kept = torch.rand(len(made["mask"]), generator=place.generator(13)) < 2 / 3
    return {name: x[kept] for name, x in made.items()}


def one_token(place: Place) -> Columns:
    """Return a healthy batch in which only the first token of each response trains."""
    made = plain(place)
    first = made["mask"] & (made["mask"].cumsum(1) == 1)
    return made | {"mask": first, "adv": made["adv"] * first}


HEALTHY: Mapping[str, Fault] = {
    make.__name__: make
    for make in (
        plain,
        slightly_stale,
        second_update,
        bypass,
        nearly_greedy,
        some_router_noise,
        both_cut,
        without_deviation,
        filtered_rows,
        one_token,
    )
}


# ---- grading -------------------------------------------------------------------------
@dataclass(frozen=True)
class Cell:
    """What replay said of one dump."""

    fault: str
    seed: int
    findings: tuple[ReplayFinding, ...]
    weak: bool  # the fault moves too little to count
    right: bool
    false: bool  # a finding that is not true
    alarm: bool  # a failure that is not true

    @property
    def listed(self) -> bool:
        """Whether the true finding has a list of causes."""
        return any("causes" in f.numbers for f in self.findings)


def effect(place: Place, made: Columns) -> bool:
    """Return whether a fault moves the difference of the columns enough to count:
    against the healthy run where the tokens are the same, else by itself.
    """
    m = made["mask"]
    d = (made["sampler"] - made["old"])[m]
    if not bool(d.isfinite().all()):
        return True
    healthy = plain(place)
    same = torch.equal(healthy["mask"], m)
    if same and bool((healthy["ids"] == made["ids"])[m].all()):
        d = d - (healthy["sampler"] - healthy["old"])[m]
    d = d.abs()
    return float(d.mean()) > WEAK_MEAN or float((d > FAR).double().mean()) > WEAK_SHARE


def cell(name: str, place: Place) -> Cell:
    """Make a dump and grade what replay says of it."""
    make = (FAULTS | dict(HEALTHY))[name]
    made = make(place)
    if name in HEALTHY:
        return healthy_cell(name, place, made)
    truth = TRUTHS[name]
    found: Checked
    if truth.of_advantages:
        whole = replace(place, missing=0.0)
        found = advantages(make_batch(finish(whole, made), file=name))
    else:
        found = gap(make_batch(finish(place, made), file=name))
    findings = found.findings

    def holds(f: ReplayFinding) -> bool:
        return any(word in str(f).lower() for word in truth.words)

    def true(f: ReplayFinding) -> bool:
        """Return whether a finding is true of what was planted, or of how the place
        computes.
        """
        if f.severity == "failure" and truth.fails is False:
            return False
        # an engine and a trainer that compute otherwise are two policies
        two = place.engine_bfloat16 or place.trainer_bfloat16 or place.experts
        if two and f.severity == "note" and any(w in str(f) for w in POLICIES):
            return True
        return holds(f) or f.cause == "bfloat16_column"

    wrong = [f for f in findings if not true(f)]
    named = any(holds(f) for f in findings)
    right = named and not wrong and truth.fails in (None, not found)
    alarm = any(f.severity == "failure" for f in wrong)
    is_weak = not truth.of_advantages and not effect(place, made)
    return Cell(name, place.seed, findings, is_weak, right, bool(wrong), alarm)


def healthy_cell(name: str, place: Place, made: Columns) -> Cell:
    """Grade what replay says of a healthy dump: right without a failure."""
    batch = make_batch(finish(place, made), file=name)
    failures = (*gap(batch).failures, *advantages(batch).failures)
    ok = not failures
    return Cell(name, place.seed, failures, False, ok, not ok, not ok)


def named_instead(c: Cell) -> str:
    """Return the causes of a cell that is not right, in words: "nothing" where there is
    none.
    """
    causes = "+".join(f.cause for f in c.findings)
    if c.false:
        causes += " (false)"
    return causes or "nothing"


def report(cells: list[Cell], verbose: bool) -> str:
    """Return a line for each fault, and the totals."""
    lines = []
    for name in FAULTS:
        row = [c for c in cells if c.fault == name and not c.weak]
        if not row:
            continue
        not_right = [c for c in row if not c.right]
        told = Counter(named_instead(c) for c in not_right)
        words = "; ".join(f"{named} x{n}" for named, n in told.items())
        right = len(row) - len(not_right)
        lines.append(f"{name:24} {right:>3}/{len(row):<3} {words}")
        if verbose:
            for c in not_right:
                for f in c.findings:
                    lines.append(f"    seed {c.seed}: {f.severity}: {f}")
    counted = [c for c in cells if c.fault in FAULTS and not c.weak]
    healthy = [c for c in cells if c.fault in HEALTHY]
    for c in healthy:
        if c.alarm:
            lines.append(f"healthy {c.fault} seed {c.seed}: {c.findings[0]}")
    right = sum(c.right for c in counted)
    alone = sum(c.right and not c.listed for c in counted)
    share = 100 * right / max(1, len(counted))
    lines.append(
        f"named {right}/{len(counted)} ({share:.1f} %), without a list {alone}; "
        f"false causes {sum(c.false for c in counted)}, "
        f"of them failures {sum(c.alarm for c in counted)}; "
        f"healthy failures {sum(c.alarm for c in healthy)}/{len(healthy)}"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the grades."""
    torch.set_num_threads(1)
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--places", type=int, default=6)
    p.add_argument("--healthy", type=int, default=24)
    p.add_argument("--faults", default="")
    p.add_argument("-v", action="store_true")
    a = p.parse_args(arguments)
    faults = a.faults.split(",") if a.faults else list(FAULTS)
    cells = []
    for n in range(a.places):
        place = draw_place(1000 * a.seed + n)
        cells += [cell(name, place) for name in faults]
    names = list(HEALTHY)
    for n in range(a.healthy):
        place = draw_place(1000 * a.seed + 500 + n // len(names))
        cells.append(cell(names[n % len(names)], place))
    print(report(cells, a.v))
    return int(any(c.alarm for c in cells))


if __name__ == "__main__":
    raise SystemExit(main())
