# SPDX-License-Identifier: Apache-2.0
"""Recorded batches with a known fault, written by a second reader. Each function that
`fault` enters returns the columns of docs/dump.md.

Each fault has a `Truth`: what a true answer holds. It was fixed before the first run.
"""

import copy
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.replay.simulator import (
    MORE,
    PROMPT,
    Policy,
    World,
    columns,
    make_policy,
    sample,
    score,
    shifted_weights,
)
from upref.step.inputs.families import GATED

SENTENCE = "A second reader draws these seeds before the rules of replay are read."
# of the model families that the list of the simulator lacks
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # sinks in the attention, experts with a clamped gate
    "gpt_oss": (
        "GptOss",
        dict(
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    # latent attention, experts chosen by a sigmoid and a bias
    "deepseek_v3": (
        "DeepseekV3",
        dict(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            n_routed_experts=4,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        ),
    ),
}
FAMILIES = {k: (name, GATED | fields) for k, (name, fields) in FAMILIES.items()}
MORE.update(FAMILIES)

Fault = Callable[[World], dict[str, Tensor]]


@dataclass(frozen=True)
class Truth:
    """What a true answer to a fault holds.

    Attributes:
        words: each finding that is not "ok" holds one of them, and there is one.
        fails: whether it must be a failure; None: it may be.
    """

    words: tuple[str, ...]
    fails: bool | None


FAULTS: dict[str, Fault] = {}
TRUTHS: dict[str, Truth] = {}


def fault(*words: str, fails: bool | None = False) -> Callable[[Fault], Fault]:
    """Return a decorator that enters a fault under its name, with its truth.

    words: of which a finding must hold one. fails: whether the dump must fail; None:
    either.
    """

    def enter(make: Fault) -> Fault:
        FAULTS[make.__name__] = make
        TRUTHS[make.__name__] = Truth(words, fails)
        return make

    return enter


def drawn_seed(number: int) -> int:
    """Return a seed out of the digest of SENTENCE: 0 is for the first sight, 1 and more
    for later.
    """
    digest = hashlib.sha256(SENTENCE.encode()).hexdigest()
    return int(digest[4 * number : 4 * number + 4], 16)


def drawn_families(families: tuple[str, ...], number: int) -> tuple[str, ...]:
    """FAMILIES, and so many of the given ones, drawn by SENTENCE."""
    return (*FAMILIES, *random.Random(SENTENCE).sample(families, number))


def worlds(families: tuple[str, ...], seed: int) -> list[World]:
    """Return a float32 and a bfloat16 world for each family, whose seed, sizes,
    temperature and entropy are drawn.
    """
    out = []
    for family in families:
        draw = random.Random(f"{seed} {family}")
        world = World(
            family,
            draw.randrange(2**16),
            responses=draw.choice((32, 64, 96)),
            length=draw.choice((20, 28, 36)),
            temperature=draw.choice((0.6, 0.7, 0.8, 1.0, 1.0, 1.2, 1.3)),
            entropy=draw.choice((0.3, 0.5, 0.8, 1.2)),
        )
        out += [world, replace(world, engine_bfloat16=True)]
    return out


# ---- the faults ----------------------------------------------------------------------
class Penalized(Policy):
    """An engine with a repetition penalty of 1.3, as transformers and vLLM define it."""

    def log_probs(self, ids: Tensor, *, raw: bool = False) -> Tensor:
        """Return the log-probabilities after the last position, [B, 1, V], with a
        penalty of 1.3 on tokens that were there before.
        """
        with torch.no_grad():
            z = self.model(ids, use_cache=False).logits[:, -1].float() * self.sharpness
        seen = torch.zeros_like(z, dtype=torch.bool).scatter(1, ids, True)
        z = torch.where(seen, torch.where(z > 0, z / 1.3, z * 1.3), z)
        return (z / self.temperature).log_softmax(-1)[:, None]


class Forgetful(Policy):
    """An engine whose cache holds the last eight tokens."""

    def log_probs(self, ids: Tensor, *, raw: bool = False) -> Tensor:
        """Of the last eight positions, [B, 8, V]."""
        return super().log_probs(ids[:, -8:], raw=raw)


class Structured(Policy):
    """A grammar leaves one token at every fourth position: the policy's second
    choice.
    """

    def log_probs(self, ids: Tensor, *, raw: bool = False) -> Tensor:
        """Return the log-probabilities after the last position, [B, 1, V]; every fourth
        token is the second most likely one.
        """
        lp = super().log_probs(ids, raw=raw)[:, -1]
        if ids.shape[1] % 4 == 0:
            second = lp.topk(2, -1).indices[:, 1:]
            lp = torch.full_like(lp, -torch.inf).scatter(1, second, 0.0)
        return lp[:, None]


@dataclass(eq=False)
class Capped(Policy):
    """A policy with a softcap on its logits."""

    cap: float = 1.0

    def log_probs(self, ids: Tensor, *, raw: bool = False) -> Tensor:
        """Return the log-probabilities at every position, [B, T, V], with a softcap on
        the logits.
        """
        with torch.no_grad():
            z = self.model(ids, use_cache=False).logits.float() * self.sharpness
        return (self.cap * (z / self.cap).tanh() / self.temperature).log_softmax(-1)


def _as(kind: type[Policy], policy: Policy, **fields: Any) -> Policy:
    """Return the policy as another kind of policy."""
    return kind(
        policy.model, policy.sharpness, policy.temperature, policy.dtype, **fields
    )


def _of_engine(world: World, kind: type[Policy]) -> dict[str, Tensor]:
    """Return a batch in which the engine is of that kind, the trainer is plain."""
    trainer = make_policy(world)
    drawn = sample(world, _as(kind, trainer))
    return columns(world, drawn, score(trainer, drawn.ids))


def _plain(world: World) -> dict[str, Tensor]:
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    return columns(world, drawn, score(trainer, drawn.ids))


@fault("penalt")
def repetition_penalty(world: World) -> dict[str, Tensor]:
    """The engine has a repetition penalty, in its draws and in its numbers."""
    return _of_engine(world, Penalized)


@fault("context", "cache")
def forgotten_context(world: World) -> dict[str, Tensor]:
    """The engine's cache drops all but the last eight tokens."""
    return _of_engine(world, Forgetful)


@fault("shift", "padded", fails=None)
def left_padded(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's numbers are at the right end of each row,
    the ids at the left.
    """
    out = _plain(world)
    lengths, width = out["mask"].sum(1), out["ids"].shape[1]
    rows = [
        row.roll(width - PROMPT - int(n))
        for row, n in zip(out["sampler"], lengths, strict=True)
    ]
    return out | {"sampler": torch.stack(rows)}


@fault("grammar", "guided", fails=None)
def structured_output(world: World) -> dict[str, Tensor]:
    """A grammar leaves a single token at some positions, whose number is 0."""
    return _of_engine(world, Structured)


def _with_adapter(policy: Policy, factor: float, seed: int) -> Policy:
    """Return the policy with an adapter of rank one on every matrix, times `factor`."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim == 2:
            left = torch.randn(p.shape[0], 1, generator=generator)
            right = torch.randn(1, p.shape[1], generator=generator)
            p.data += factor * 0.05 * float(p.data.std()) * left @ right
    return replace(policy, model=model)


@fault("weights")
def adapter_twice(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine adds the adapter with twice its scale; the
    column ref is the base's.
    """
    base = make_policy(world)
    trainer = _with_adapter(base, 1.0, world.seed + 31)
    drawn = sample(world, _with_adapter(base, 2.0, world.seed + 31))
    ref = score(base, drawn.ids) * drawn.mask
    return columns(world, drawn, score(trainer, drawn.ids)) | {"ref": ref}


@fault("in place of the drawn")
def outside_the_top(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine returns the five largest numbers of a slot; a
    token outside of them has the fifth.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    fifth = trainer.log_probs(drawn.ids)[:, :-1].topk(5, -1).values[..., -1]
    fifth = torch.nn.functional.pad(fifth, (1, 0))
    drawn = replace(drawn, sampler=drawn.sampler.maximum(fifth))
    return columns(world, drawn, score(trainer, drawn.ids))


@fault("softcap", "two normalized policies")
def softcap_missing(world: World) -> dict[str, Tensor]:
    """Return a batch in which the model has a softcap on its logits, which the engine
    leaves out.
    """
    engine = make_policy(world)
    drawn = sample(world, engine)
    with torch.no_grad():
        z = engine.model(drawn.ids, use_cache=False).logits.float() * engine.sharpness
    trainer = _as(Capped, engine, cap=float(z.max()))
    return columns(world, drawn, score(trainer, drawn.ids))


@fault("rows", "responses", fails=True)
def sorted_rows(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer sorts its rows by length, and the engine's
    numbers keep their order.
    """
    out = _plain(world)
    order = out["mask"].sum(1).argsort(stable=True)
    return out | {"sampler": out["sampler"][order]}


@fault("order", "not the distribution that sampled", fails=None)
def context_parallel(world: World) -> dict[str, Tensor]:
    """Return a batch in which two context-parallel ranks hold chunks 0 and 3, 1 and 2
    of each row; the numbers stay in that order.
    """
    out = _plain(world)
    width = out["ids"].shape[1]
    padded = torch.nn.functional.pad(out["sampler"], (0, -width % 4))
    chunks = padded.chunk(4, 1)
    column = torch.cat([chunks[k] for k in (0, 3, 1, 2)], 1)[:, :width]
    return out | {"sampler": column * out["mask"]}


@fault("draft", "specul", "not the distribution that sampled")
def accepted_draft(world: World) -> dict[str, Tensor]:
    """Return a batch of speculative decoding that draws right, and reports the draft's
    number for each token that it accepts.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    draft = score(shifted_weights(trainer, 0.2, world.seed + 33), drawn.ids)
    generator = torch.Generator().manual_seed(world.seed + 35)
    chance = torch.rand(draft.shape, generator=generator)
    accepted = chance < (drawn.sampler - draft).exp()
    drawn = replace(drawn, sampler=torch.where(accepted, draft, drawn.sampler))
    return columns(world, drawn, score(trainer, drawn.ids))
