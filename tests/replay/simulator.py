# SPDX-License-Identifier: Apache-2.0
"""Recorded batches with a known fault: tiny models of transformers that sample and are
scored as a trainer scores.

It knows nothing of the diagnosis and imports nothing of it. The sampler draws every
token from its own distribution; the trainer scores the same tokens with its own
weights, precision and temperature.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from upref.step.inputs.families import GATED, tiny

VOCABULARY = 96
PROMPT = 3  # tokens
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {  # more mixtures of experts
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": ("Olmoe", dict(num_experts=8, num_experts_per_tok=2)),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {}  # families of other readers
# mean nats per token to which the logits are sharpened, as language models are
ENTROPY = 0.8


@dataclass(frozen=True)
class World:
    """What a run consists of: a family of models, its size, and a seed."""

    family: str
    seed: int = 0
    responses: int = 64
    length: int = 32  # tokens of the longest response
    group: int = 8
    temperature: float = 1.0
    entropy: float = ENTROPY
    engine_bfloat16: bool = False  # the engine computes in bfloat16


@dataclass(eq=False)  # by identity, so that what was drawn from one can be kept
class Policy:
    """Weights, the factor on the logits, and how they are computed."""

    model: nn.Module
    sharpness: float
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    # log-probabilities -> which tokens may be drawn
    keep: Callable[[Tensor], Tensor] | None = None
    experts_noise: float = 0.0

    def log_probs(self, ids: Tensor, *, raw: bool = False) -> Tensor:
        """Return the log-softmax of every position, [B, T, V], of the next token. raw:
        before the temperature.
        """
        with torch.no_grad(), _noisy_routers(self.model, self.experts_noise):
            logits = self.model(ids, use_cache=False).logits.float() * self.sharpness
        logits = logits if raw else logits / self.temperature
        return logits.log_softmax(-1)


class _noisy_routers:
    """Inside, the routers of a mixture of experts see noise: near ties go to other
    experts.
    """

    def __init__(self, model: nn.Module, size: float):
        self.routers = (
            [m for n, m in model.named_modules() if n.endswith((".gate", ".router"))]
            if size
            else []
        )
        self.size = size

    def __enter__(self) -> None:
        """Add noise to the inputs of every router, always the same for a number of
        inputs.
        """

        def shake(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            """Return the inputs with noise added to the first, of `size` times its
            deviation.
            """
            x = inputs[0]
            noise = torch.randn(
                x.shape,
                generator=torch.Generator().manual_seed(x.numel()),
                dtype=torch.float32,
            )
            return (x + self.size * x.std() * noise.to(x.dtype), *inputs[1:])

        self.handles = [m.register_forward_pre_hook(shake) for m in self.routers]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def has_experts(family: str) -> bool:
    """Return whether the family is a mixture of experts; all of MORE are."""
    return family in ("qwen3_moe", *EXPERTS, *MORE)


def make_model(family: str, seed: int) -> nn.Module:
    """Return a tiny model of a family of `upref.step.inputs.families`, of EXPERTS, or
    of MORE.
    """
    transformers = pytest.importorskip("transformers")
    if family not in EXPERTS | MORE:
        return tiny(family, seed=seed, vocab_size=VOCABULARY)
    transformers.logging.set_verbosity_error()
    name, fields = (EXPERTS | MORE)[family]
    config = getattr(transformers, name + "Config")(**GATED | fields)
    return getattr(transformers, name + "ForCausalLM")(config)


@functools.lru_cache(maxsize=4)
def make_policy(world: World, **fields: Any) -> Policy:
    """Return a model of the family whose logits are sharpened until its mean entropy is
    the world's.
    """
    torch.manual_seed(world.seed)
    model = make_model(world.family, world.seed).eval().requires_grad_(False)
    ids = torch.randint(
        3, VOCABULARY, (16, 12), generator=torch.Generator().manual_seed(world.seed)
    )
    low, high = 0.0, 2000.0
    logits = model(ids, use_cache=False).logits.float()
    for _ in range(40):
        middle = (low + high) / 2
        lp = (logits * middle / world.temperature).log_softmax(-1)
        entropy = -(lp.exp() * lp).sum(-1).mean()
        low, high = (middle, high) if entropy > world.entropy else (low, middle)
    return Policy(model, low, world.temperature, **fields)


def shifted_weights(policy: Policy, size: float, seed: int, only: str = "") -> Policy:
    """Return the policy some optimizer steps later: every matrix has moved by `size` of
    its standard deviation. only: a part of the names of the matrices that move.
    """
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim >= 2 and only in name:
            noise = torch.randn(p.shape, generator=generator)
            p.data += (size * float(p.data.float().std()) * noise).to(p.dtype)
    return replace(policy, model=model)


@functools.lru_cache(maxsize=4)
def in_bfloat16(policy: Policy) -> Policy:
    """Return the policy with its weights in bfloat16, computed in bfloat16."""
    return replace(
        policy, model=copy.deepcopy(policy.model).bfloat16(), dtype=torch.bfloat16
    )


def quantized(policy: Policy, bits: int = 6) -> Policy:
    """Return the policy with weights rounded to `bits` bits per output row, as a
    quantized engine holds them.
    """
    model = copy.deepcopy(policy.model)
    for p in model.parameters():
        if p.ndim >= 2:
            step = p.data.abs().amax(-1, keepdim=True).clamp(min=1e-9) / (
                2 ** (bits - 1) - 1
            )
            p.data = (p.data / step).round() * step
    return replace(policy, model=model)


def nucleus(mass: float) -> Callable[[Tensor], Tensor]:
    """Keep the smallest set of tokens whose mass is at least this."""

    def keep(lp: Tensor) -> Tensor:
        order = lp.argsort(-1, descending=True)
        p = lp.exp().gather(-1, order)
        kept = p.cumsum(-1) - p < mass
        return torch.zeros_like(kept).scatter(-1, order, kept)

    return keep


def top_k(k: int) -> Callable[[Tensor], Tensor]:
    """Keep the k likeliest tokens."""
    return lambda lp: lp >= lp.topk(k, -1).values[..., -1:]


def min_p(share: float) -> Callable[[Tensor], Tensor]:
    """Keep the tokens of at least this share of the likeliest one's probability."""
    return lambda lp: lp >= lp.amax(-1, keepdim=True) + torch.tensor(share).log()


@dataclass
class Sampled:
    """What the sampler hands over: ids with the prompt, the mask of the response, and
    its log-probabilities.
    """

    ids: Tensor
    mask: Tensor
    sampler: Tensor
    group: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


@functools.lru_cache(maxsize=4)
def sample(
    world: World, policy: Policy, *, record_raw: bool = False, seed: int = 0
) -> Sampled:
    """Draw responses; record the log-probability of every drawn token as the engine
    reports it.
    """
    if world.engine_bfloat16:
        policy = in_bfloat16(policy)
    generator = torch.Generator().manual_seed(1000 * world.seed + seed)
    prompts = torch.randint(
        3, VOCABULARY, (world.responses // world.group, PROMPT), generator=generator
    )
    ids = prompts.repeat_interleave(world.group, 0)
    group = torch.arange(len(prompts)).repeat_interleave(world.group)
    lengths = torch.randint(
        world.length // 3, world.length + 1, (len(ids),), generator=generator
    )
    columns = []
    for _ in range(world.length):
        lp = policy.log_probs(ids)[:, -1]
        if policy.keep is not None:
            lp = torch.where(policy.keep(lp), lp, -torch.inf).log_softmax(-1)
        token = torch.multinomial(lp.exp(), 1, generator=generator)
        reported = policy.log_probs(ids, raw=True)[:, -1] if record_raw else lp
        columns.append(reported.gather(-1, token)[:, 0])
        ids = torch.cat([ids, token], 1)
    mask = torch.arange(ids.shape[1])[None, :] - PROMPT < lengths[:, None]
    mask[:, :PROMPT] = False
    sampler = torch.cat([torch.zeros(len(ids), PROMPT), torch.stack(columns, 1)], 1)
    return Sampled(ids, mask, sampler * mask, group)


def score(policy: Policy, ids: Tensor, *, raw: bool = False) -> Tensor:
    """Return the trainer's log-probability of every token, 0 for the first, [B, T]."""
    lp = policy.log_probs(ids, raw=raw)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return torch.cat([torch.zeros(len(ids), 1), lp], 1)


def columns(world: World, drawn: Sampled, old: Tensor) -> dict[str, Tensor]:
    """Return the columns of docs/dump.md, with rewards and GRPO's advantages."""
    generator = torch.Generator().manual_seed(77 + world.seed)
    reward = (torch.rand(len(old), generator=generator) < 0.4).double()
    groups = reward.view(-1, world.group)
    adv = (
        (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
    ).flatten()
    return {
        "ids": drawn.ids,
        "mask": drawn.mask,
        "sampler": drawn.sampler * drawn.mask,
        "old": old * drawn.mask,
        "adv": adv[:, None] * drawn.mask,
        "reward": reward,
        "group": drawn.group,
        **drawn.extra,
    }


# ---- the faults ----------------------------------------------------------------------
Fault = Callable[[World], dict[str, Tensor]]
FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    FAULTS[make.__name__] = make
    return make


def _unchanged(policy: Policy) -> Policy:
    return policy


def _usual(
    world: World, change: Callable[[Policy], Policy] = _unchanged
) -> dict[str, Tensor]:
    """Return a batch in which the trainer has the world's policy; the sampler has what
    `change` makes of it.
    """
    trainer = make_policy(world)
    drawn = sample(world, change(trainer))
    return columns(world, drawn, score(trainer, drawn.ids))


@fault
def healthy(world: World) -> dict[str, Tensor]:
    return _usual(world)


@fault
def healthy_bfloat16(world: World) -> dict[str, Tensor]:
    """The engine computes in bfloat16, the trainer in float32."""
    return _usual(world, in_bfloat16)


@fault
def healthy_both_bfloat16(world: World) -> dict[str, Tensor]:
    """Return a batch in which both compute in bfloat16, on other shapes: the engine
    token by token, the trainer whole responses.
    """
    trainer = in_bfloat16(make_policy(world))
    drawn = sample(world, trainer)
    return columns(world, drawn, score(trainer, drawn.ids))


@fault
def stale_by_one(world: World) -> dict[str, Tensor]:
    return _usual(world, lambda p: shifted_weights(p, 0.02, world.seed + 5))


@fault
def stale_by_four(world: World) -> dict[str, Tensor]:
    return _usual(world, lambda p: shifted_weights(p, 0.05, world.seed + 6))


def _with_temperature(world: World) -> World:
    """The world with a temperature that matters."""
    return replace(world, temperature=0.7) if world.temperature == 1.0 else world


@fault
def before_temperature(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine samples at T and reports log-probabilities
    before T; the trainer divides its logits by T.
    """
    world = _with_temperature(world)
    trainer = make_policy(world)
    drawn = sample(world, trainer, record_raw=True)
    return columns(world, drawn, score(trainer, drawn.ids))


@fault
def trainer_without_temperature(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine samples at T and reports it; the trainer
    forgets T.
    """
    world = _with_temperature(world)
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    return columns(world, drawn, score(trainer, drawn.ids, raw=True))


@fault
def divided(world: World) -> dict[str, Tensor]:
    """Return a batch whose engine's column has log-probabilities divided by T, in place
    of logits.
    """
    out = _usual(world)
    return out | {"sampler": out["old"] / 0.7}


@fault
def divided_in_trainer(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer divides log-probabilities by T in place of
    logits; the engine is right.
    """
    world = _with_temperature(world)
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    return columns(
        world, drawn, score(trainer, drawn.ids, raw=True) / world.temperature
    )


@fault
def nucleus_cut(world: World) -> dict[str, Tensor]:
    return _usual(world, lambda p: replace(p, keep=nucleus(0.9)))


@fault
def top_k_cut(world: World) -> dict[str, Tensor]:
    return _usual(world, lambda p: replace(p, keep=top_k(5)))


@fault
def min_p_cut(world: World) -> dict[str, Tensor]:
    return _usual(world, lambda p: replace(p, keep=min_p(0.1)))


def _shifted(out: dict[str, Tensor], column: str, slots: int) -> dict[str, Tensor]:
    """Return the columns with one of them some slots later (above 0) or earlier, within
    the response.
    """
    return out | {column: out[column].roll(slots, 1) * out["mask"]}


@fault
def shifted(world: World) -> dict[str, Tensor]:
    return _shifted(_usual(world), "sampler", 1)


@fault
def shifted_back(world: World) -> dict[str, Tensor]:
    """In the trainer's column, with bfloat16 beside it."""
    return _shifted(healthy_bfloat16(world), "old", -1)


@fault
def exchanged_rows(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's answers come back in another order within
    each group; the column is padded with zeros.
    """
    out = _usual(world)
    order = torch.arange(world.responses).view(-1, world.group).flip(1).flatten()
    return out | {"sampler": out["sampler"][order]}


@fault
def exchanged_two(world: World) -> dict[str, Tensor]:
    """Return a batch in which two responses are exchanged, under bfloat16."""
    out = healthy_bfloat16(world)
    order = torch.arange(world.responses)
    order[[3, 4]] = order[[4, 3]]
    return out | {"sampler": out["sampler"][order]}


def _with_tool(world: World, value: float) -> dict[str, Tensor]:
    """Return a batch in which a tool's answer of six tokens stands in half of the
    responses, and trains. value: in the sampler's column there.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    generator = torch.Generator().manual_seed(world.seed + 9)
    ids, sampler = drawn.ids.clone(), drawn.sampler.clone()
    start = PROMPT + 4
    rows = torch.arange(0, world.responses, 2)
    ids[rows, start : start + 6] = torch.randint(
        3, VOCABULARY, (len(rows), 6), generator=generator
    )
    after = ids.clone()
    # what follows is drawn again, after the tool's answer
    for t in range(start + 6, ids.shape[1]):
        lp = trainer.log_probs(after[:, :t])[:, -1]
        token = torch.multinomial(lp.exp(), 1, generator=generator)
        after[rows, t] = token[rows, 0]
        sampler[rows, t] = lp.gather(-1, token)[rows, 0]
    sampler[rows, start : start + 6] = value
    drawn = replace(drawn, ids=after, sampler=sampler)
    return columns(world, drawn, score(trainer, after))


@fault
def tool_output(world: World) -> dict[str, Tensor]:
    return _with_tool(world, 0.0)


@fault
def tool_output_nan(world: World) -> dict[str, Tensor]:
    out = _with_tool(world, torch.nan)
    return out | {"sampler": torch.where(out["mask"], out["sampler"], 0.0)}


def _retokenized(world: World) -> dict[str, Tensor]:
    """Return a batch whose text is tokenized again: one token in forty is another one,
    and the engine's numbers stay.

    The column sampler_ids holds the engine's own ids.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    generator = torch.Generator().manual_seed(world.seed + 11)
    other = (torch.rand(drawn.ids.shape, generator=generator) < 1 / 40) & drawn.mask
    others = torch.randint(3, VOCABULARY, other.shape, generator=generator)
    ids = torch.where(other, others, drawn.ids)
    out = columns(world, replace(drawn, ids=ids), score(trainer, ids))
    return out | {"sampler_ids": drawn.ids}


@fault
def retokenized(world: World) -> dict[str, Tensor]:
    """Return a batch whose text is tokenized again, and the engine's own ids are not
    recorded.
    """
    out = _retokenized(world)
    del out["sampler_ids"]
    return out


@fault
def retokenized_with_ids(world: World) -> dict[str, Tensor]:
    """The text is tokenized again, and the engine's own ids are recorded."""
    return _retokenized(world)


@fault
def other_experts(world: World) -> dict[str, Tensor]:
    """Return a batch in which near ties of the router go to other experts; of a dense
    model, one in bfloat16.
    """
    noise = 0.1 if has_experts(world.family) else 0.0
    return _usual(world, lambda p: replace(in_bfloat16(p), experts_noise=noise))


@fault
def other_weights(world: World) -> dict[str, Tensor]:
    """The engine holds quite other weights."""
    return _usual(world, lambda p: shifted_weights(p, 0.3, world.seed + 13))


@fault
def quantized_weights(world: World) -> dict[str, Tensor]:
    return _usual(world, quantized)


@fault
def clamped(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's column has a floor, under bfloat16."""
    out = healthy_bfloat16(world)
    return out | {"sampler": out["sampler"].clamp(min=-2.0)}


@fault
def bfloat16_column(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's log-probabilities are kept in bfloat16."""
    out = _usual(world)
    return out | {"sampler": out["sampler"].bfloat16().float()}


@fault
def probabilities(world: World) -> dict[str, Tensor]:
    """Return a batch whose sampler's column holds probabilities."""
    out = _usual(world)
    return out | {"sampler": out["sampler"].exp() * out["mask"]}


@fault
def copied_column(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer's own log-probabilities stand in the engine's
    column.
    """
    out = _usual(world)
    return out | {"sampler": out["old"].clone()}


# ---- several steps -------------------------------------------------------------------
def run_of_steps(
    world: World, delivery: str, steps: int = 6, size: float = 0.02
) -> list[dict[str, Tensor]]:
    """Return the batches of a run whose weights move at every step, and of an engine
    that gets them: "now", "late" by one step, or "never".
    """
    policies = [make_policy(world)]
    for step in range(1, steps):
        policies.append(shifted_weights(policies[-1], size, world.seed + 100 * step))
    out = []
    for step, trainer in enumerate(policies):
        held = {"now": step, "late": max(0, step - 1), "never": 0}[delivery]
        drawn = sample(world, policies[held], seed=step)
        ref = score(policies[0], drawn.ids) * drawn.mask
        version = torch.full((world.responses,), held)
        out.append(
            columns(world, drawn, score(trainer, drawn.ids))
            | {"ref": ref, "version": version}
        )
    return out


def count_as_delivered(steps: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the steps of a run with the versions that the engine would have had, if
    each update had reached it.
    """
    return [
        columns | {"version": torch.full_like(columns["version"], number)}
        for number, columns in enumerate(steps)
    ]


# ---- faults that no rule was tuned on ------------------------------------------------
HELD_OUT: dict[str, Fault] = {}


def held_out(make: Fault) -> Fault:
    HELD_OUT[make.__name__] = make
    return make


@held_out
def eight_bit_floats(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's weights are float8 with one scale a matrix."""

    def rounded(policy: Policy) -> Policy:
        """Return a copy of the policy with float8 weights."""
        model = copy.deepcopy(policy.model)
        for p in model.parameters():
            if p.ndim >= 2:
                scale = p.data.abs().amax().clamp(min=1e-9) / 448
                p.data = (p.data / scale).to(torch.float8_e4m3fn).float() * scale
        return replace(policy, model=model)

    return _usual(world, rounded)


@held_out
def temperature_in_trainer_only(world: World) -> dict[str, Tensor]:
    """Return a batch whose trainer scores at 0.6 of the temperature at which it was
    sampled.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    return columns(
        world,
        drawn,
        score(replace(trainer, temperature=0.6 * trainer.temperature), drawn.ids),
    )


@held_out
def mask_past_the_end(world: World) -> dict[str, Tensor]:
    """Return a batch in which the mask is one token too long: an appended token trains,
    for which the engine has no number.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    ends = torch.cat([drawn.mask[:, :1] & False, drawn.mask[:, :-1]], 1) & ~drawn.mask
    ends[:, : PROMPT + 1] = False  # the first slot of a response follows its prompt
    ids = torch.where(ends, 2, drawn.ids)
    sampler = torch.where(ends, torch.nan, drawn.sampler)
    return columns(
        world,
        replace(drawn, ids=ids, sampler=sampler, mask=drawn.mask | ends),
        score(trainer, ids),
    )


@held_out
def shifted_nucleus(world: World) -> dict[str, Tensor]:
    """Two faults: a nucleus, and its numbers one token late."""
    return _shifted(nucleus_cut(world), "sampler", 1)


@held_out
def likeliest_token(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine's column holds the likeliest token's number in
    place of the drawn one's.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    best = trainer.log_probs(drawn.ids)[:, :-1].amax(-1)
    sampler = torch.cat([torch.zeros(len(best), 1), best], 1)
    return columns(world, replace(drawn, sampler=sampler), score(trainer, drawn.ids))


# ---- faults of a sceptic who had not read the rules ----------------------------------
SCEPTICS: dict[str, Fault] = {}


def sceptic(make: Fault) -> Fault:
    SCEPTICS[make.__name__] = make
    return make


def _column(
    world: World, change: Callable[[dict[str, Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Return a healthy batch whose sampler's column is what `change` makes of its
    columns.
    """
    out = _usual(world)
    return out | {"sampler": change(out) * out["mask"]}


@sceptic
def logarithm_to_base_two(world: World) -> dict[str, Tensor]:
    return _column(world, lambda out: out["sampler"] / torch.tensor(2.0).log())


@sceptic
def running_sum(world: World) -> dict[str, Tensor]:
    """The column holds the log-probability of the response up to each token."""
    return _column(world, lambda out: out["sampler"].cumsum(1))


@sceptic
def mean_of_the_response(world: World) -> dict[str, Tensor]:
    """Return a batch in which each token has the mean log-probability of its response."""

    def mean(out: dict[str, Tensor]) -> Tensor:
        lengths = out["mask"].sum(1, keepdim=True)
        return (out["sampler"].sum(1, keepdim=True) / lengths).expand_as(out["sampler"])

    return _column(world, mean)


@sceptic
def two_decimals(world: World) -> dict[str, Tensor]:
    """Log-probabilities were printed with two decimals."""
    return _column(world, lambda out: (100 * out["sampler"]).round() / 100)


@sceptic
def first_token_missing(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine returns no number for the first token, and 0
    stands there.
    """

    def without_first(out: dict[str, Tensor]) -> Tensor:
        first = out["mask"].cumsum(1) == 1
        return torch.where(first, 0.0, out["sampler"])

    return _column(world, without_first)


@sceptic
def last_token_missing(world: World) -> dict[str, Tensor]:
    """Return a batch in which the last token's number is NaN."""
    out = _usual(world)
    last = out["mask"].cumsum(1) == out["mask"].sum(1, keepdim=True)
    return out | {"sampler": torch.where(last & out["mask"], torch.nan, out["sampler"])}


@sceptic
def minus_entropy(world: World) -> dict[str, Tensor]:
    """Return a batch in which the column holds the negative entropy of the
    distribution.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    lp = trainer.log_probs(drawn.ids)[:, :-1]
    column = torch.nn.functional.pad((lp.exp() * lp).sum(-1), (1, 0))
    return columns(world, replace(drawn, sampler=column), score(trainer, drawn.ids))


@sceptic
def greedy(world: World) -> dict[str, Tensor]:
    """The engine is greedy: temperature 0."""
    return _usual(world, lambda p: replace(p, keep=top_k(1)))


@sceptic
def draft_model(world: World) -> dict[str, Tensor]:
    """Return a batch of speculative decoding: the target draws, and the draft's
    log-probabilities are recorded.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    draft = shifted_weights(trainer, 0.1, world.seed + 21)
    return columns(
        world,
        replace(drawn, sampler=score(draft, drawn.ids)),
        score(trainer, drawn.ids),
    )


@sceptic
def padded_vocabulary(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer's softmax has 32 more logits, of 0, than the
    engine's.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    with torch.no_grad():
        logits = (
            trainer.model(drawn.ids, use_cache=False).logits.float()
            * trainer.sharpness
            / trainer.temperature
        )
    wide = torch.nn.functional.pad(logits, (0, 32)).log_softmax(-1)[:, :-1]
    old = wide.gather(-1, drawn.ids[:, 1:, None])[..., 0]
    return columns(world, drawn, torch.nn.functional.pad(old, (1, 0)))


@sceptic
def grammar(world: World) -> dict[str, Tensor]:
    """Return a batch whose guided decoding allows the tokens of an even id, and
    renormalizes.
    """

    def even(lp: Tensor) -> Tensor:
        return (torch.arange(lp.shape[-1]) % 2 == 0).expand_as(lp)

    return _usual(world, lambda p: replace(p, keep=even))


@sceptic
def banned_token(world: World) -> dict[str, Tensor]:
    """Return a batch in which the engine never draws token 2, the end, as with
    min_tokens.
    """

    def others(lp: Tensor) -> Tensor:
        return (torch.arange(lp.shape[-1]) != 2).expand_as(lp)

    return _usual(world, lambda p: replace(p, keep=others))


@sceptic
def missing_first_token(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer's prompt lacks its first token, a BOS that
    the engine adds.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    old = torch.nn.functional.pad(score(trainer, drawn.ids[:, 1:]), (1, 0))
    return columns(world, drawn, old)


@sceptic
def dropout(world: World) -> dict[str, Tensor]:
    """Return a batch in which the trainer is in training mode: its logits have noise of
    a tenth of their deviation.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    with torch.no_grad():
        logits = (
            trainer.model(drawn.ids, use_cache=False).logits.float()
            * trainer.sharpness
            / trainer.temperature
        )
    generator = torch.Generator().manual_seed(world.seed)
    noise = torch.randn(logits.shape, generator=generator) * logits.std() * 0.1
    lp = (
        (logits + noise)
        .log_softmax(-1)[:, :-1]
        .gather(-1, drawn.ids[:, 1:, None])[..., 0]
    )
    return columns(world, drawn, torch.nn.functional.pad(lp, (1, 0)))


@sceptic
def weights_change_within_a_response(world: World) -> dict[str, Tensor]:
    """Return a batch during whose generation an update arrived: the numbers of the
    second half are the new policy's.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    stale = score(shifted_weights(trainer, 0.05, world.seed + 23), drawn.ids)
    early = torch.arange(drawn.ids.shape[1]) < PROMPT + world.length // 2
    return columns(
        world,
        replace(drawn, sampler=torch.where(early, stale, drawn.sampler)),
        score(trainer, drawn.ids),
    )


@sceptic
def temperatures_of_requests(world: World) -> dict[str, Tensor]:
    """Return a batch in which half of the requests have another temperature, which
    their numbers have and the trainer ignores.
    """
    trainer = make_policy(world)
    halves = [
        sample(world, replace(trainer, temperature=t * trainer.temperature))
        for t in (1.0, 0.7)
    ]
    rows = torch.arange(world.responses) % 2 == 0
    ids = torch.where(rows[:, None], halves[0].ids, halves[1].ids)
    sampler = torch.where(rows[:, None], halves[0].sampler, halves[1].sampler)
    drawn = replace(halves[0], ids=ids, sampler=sampler)
    return columns(world, drawn, score(trainer, ids))


@sceptic
def reference_column(world: World) -> dict[str, Tensor]:
    """Return a batch in which the reference model's numbers stand in the engine's
    column, and the column ref is there.
    """
    trainer = make_policy(world)
    drawn = sample(world, trainer)
    ref = score(shifted_weights(trainer, 0.1, world.seed + 25), drawn.ids) * drawn.mask
    return columns(world, replace(drawn, sampler=ref), score(trainer, drawn.ids)) | {
        "ref": ref
    }


@sceptic
def one_rank_is_shifted(world: World) -> dict[str, Tensor]:
    """Return a batch in which a quarter of the responses are shifted by a token, those
    of one rank.
    """
    out = healthy_bfloat16(world)
    mine = (torch.arange(world.responses) < world.responses // 4)[:, None]
    return out | {
        "sampler": torch.where(
            mine, out["sampler"].roll(1, 1) * out["mask"], out["sampler"]
        )
    }
