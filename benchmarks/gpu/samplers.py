# SPDX-License-Identifier: Apache-2.0
"""`upref.replay.gap` on a sampler and a trainer that compute on the GPU.

The sampler draws in bfloat16 with a cache of keys and values; the trainer scores whole
rows. Both have Qwen2.5-0.5B's architecture with random weights, whose logits are made
sharper. The faults are those of real pipelines: numbers of before the temperature, a
cut by top_p, a column one slot off, a wrong sign.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import SEED, PartSetup
from benchmarks.gpu.training import CONFIG, TRIAL
from repro.mini.policy.sample import nucleus
from upref.replay import gap, make_batch

TAU, TOP_P = 0.7, 0.9
PROMPT = 16  # tokens
SHARPER = 10.0  # times the logits of random weights, which are nearly uniform
UPDATE = 0.01  # the noise of another update, in standard deviations of each weight


@dataclass(frozen=True)
class Drawn:
    """Responses, and the log-probability of each token by the sampler.

    Args:
        ids: [B, T] tokens of prompt and response.
        raw: [B, T] log-probabilities of before temperature and cut; 0 in the prompt.
        sampled: [B, T] those of the distribution that was drawn from.
    """

    ids: Tensor
    raw: Tensor
    sampled: Tensor


def make_model(place: PartSetup) -> Any:
    """Return the trainer's model in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    sizes = TRIAL if place.small else CONFIG
    with torch.device(place.device):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0))
    model.model.norm.weight.data.mul_(SHARPER)
    return model.eval().requires_grad_(False)


def draw(
    model: Any, prompts: Tensor, length: int, temperature: float, top_p: float
) -> Drawn:
    """Draw responses token by token with the model's cache.

    Args:
        model: a causal language model.
        prompts: [B, P] token ids.
        length: tokens of each response.
        temperature: divides the logits.
        top_p: mass that is kept; 1 keeps all.

    Returns:
        Tokens and log-probabilities, each [B, P + length]. The same seed is used in
        every call.
    """
    generator = torch.Generator(prompts.device).manual_seed(SEED)
    zeros = torch.zeros(prompts.shape, device=prompts.device)
    ids, raw, sampled = [prompts], [zeros], [zeros]
    cache = None
    for _ in range(length):
        given = prompts if cache is None else ids[-1]
        out = model(given, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        p = (logits / temperature).softmax(-1)
        lp = nucleus(p, top_p).log().log_softmax(-1)
        token = torch.multinomial(lp.exp(), 1, generator=generator)
        ids.append(token)
        raw.append(logits.log_softmax(-1).gather(1, token))
        sampled.append(lp.gather(1, token))
    return Drawn(torch.cat(ids, 1), torch.cat(raw, 1), torch.cat(sampled, 1))


def score(model: Any, ids: Tensor, padding: int = 0) -> Tensor:
    """Return the trainer's log-probabilities [B, T] of each token at the temperature; 0
    for the first.

    Args:
        model: a causal language model.
        ids: [B, T] token ids.
        padding: tokens to the left of each row.
    """
    parts = []
    for rows in ids.split(8):
        padded = torch.nn.functional.pad(rows, (padding, 0))
        attention = torch.ones_like(padded)
        attention[:, :padding] = 0
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        out = model(padded, attention_mask=attention, position_ids=positions)
        lp = (out.logits[:, padding:-1].float() / TAU).log_softmax(-1)
        parts.append(lp.gather(-1, rows[:, 1:, None])[..., 0])
    return torch.nn.functional.pad(torch.cat(parts), (1, 0))


def other_update(model: Any) -> Any:
    """Return a copy of the model with noise on each weight matrix, of UPDATE times that
    matrix's standard deviation.
    """
    changed = copy.deepcopy(model)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(SEED + 1)
    for weight in changed.parameters():
        if weight.ndim < 2:
            continue
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.data += UPDATE * weight.float().std().to(weight.dtype) * noise
    return changed


@dataclass(frozen=True)
class Pair:
    """The columns of a sampler and a trainer for the same tokens.

    Args:
        name: of the pair, in the table of docs/gpu.md.
        ids: [B, T] tokens of prompt and response.
        sampler: [B, T] log-probabilities that the sampler reports.
        trainer: [B, T] those that the trainer computes.
    """

    name: str
    ids: Tensor
    sampler: Tensor
    trainer: Tensor


@torch.no_grad()
def make_pairs(place: PartSetup) -> list[Pair]:
    """Draw and score; return the healthy pairs first, then one of another update, then
    the faults.
    """
    responses, length = (8, 24) if place.small else (64, 256)
    trainer = make_model(place)
    engine = copy.deepcopy(trainer).bfloat16()
    words = trainer.config.vocab_size
    generator = torch.Generator(place.device).manual_seed(SEED)
    shape = (responses, PROMPT)
    prompts = torch.randint(words, shape, generator=generator, device=place.device)

    exact = draw(trainer, prompts, length, TAU, 1.0)
    whole = draw(engine, prompts, length, TAU, 1.0)
    short = draw(engine, prompts, length, TAU, TOP_P)
    in_float32 = score(trainer, whole.ids)
    padded = score(trainer, whole.ids, padding=40)
    in_bfloat16 = score(engine, whole.ids)
    updated = score(other_update(trainer), whole.ids)
    of_short = score(trainer, short.ids)
    with torch.autocast(place.device, torch.bfloat16):
        in_autocast = score(trainer, whole.ids)
    late = whole.sampled.roll(1, 1)
    return [
        Pair("float32 | float32", exact.ids, exact.sampled, score(trainer, exact.ids)),
        Pair("bfloat16 | float32", whole.ids, whole.sampled, in_float32),
        Pair("bfloat16 | autocast", whole.ids, whole.sampled, in_autocast),
        Pair("bfloat16 | bfloat16", whole.ids, whole.sampled, in_bfloat16),
        Pair("bfloat16 | float32, padded", whole.ids, whole.sampled, padded),
        Pair("an older update", whole.ids, whole.sampled, updated),
        Pair("before the temperature", whole.ids, whole.raw, in_autocast),
        Pair("top_p 0.9, renormalized", short.ids, short.sampled, of_short),
        Pair("top_p 0.9, before temperature and cut", short.ids, short.raw, of_short),
        Pair("one slot late", whole.ids, late, in_autocast),
        Pair("negated", whole.ids, -whole.sampled, in_autocast),
    ]


def main(place: PartSetup) -> None:
    """Write a row for each pair, with what the report of its gap says."""
    for pair in make_pairs(place):
        with place.row(sampler=pair.name) as row:
            row |= judge(pair)


def judge(pair: Pair) -> dict[str, Any]:
    """Compare the columns of a pair with `upref.replay.gap`; return the report's
    verdict, cause, numbers and sentences.
    """
    mask = torch.ones_like(pair.ids, dtype=torch.bool)
    mask[:, :PROMPT] = False
    columns = {
        "ids": pair.ids,
        "mask": mask,
        "sampler": pair.sampler,
        "old": pair.trainer,
    }
    found = gap(make_batch(columns, file="the recorded step"))
    return {
        "tokens": found.tokens,
        "healthy": bool(found),  # the report has no failure
        "cause": found.cause,
        "mean_abs": found.mean_abs,
        "largest": found.largest,
        "rho_mean": found.rho_mean,
        "rho_se": found.rho_se,
        "said": [str(f) for f in found.findings],
    }
