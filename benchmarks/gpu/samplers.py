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


def cut(lp: Tensor, top_p: float) -> Tensor:
    """Return the log-probabilities [B, V] of the likeliest tokens, renormalized: as many
    as have the mass top_p.
    """
    ordered, places = lp.sort(-1, descending=True)
    mass_before = ordered.exp().cumsum(-1) - ordered.exp()
    ordered = ordered.masked_fill(mass_before >= top_p, -torch.inf)
    return torch.empty_like(lp).scatter_(-1, places, ordered).log_softmax(-1)


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
        lp = (logits / temperature).log_softmax(-1)
        if top_p < 1:
            lp = cut(lp, top_p)
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
    """Return a copy with noise on each weight."""
    changed = copy.deepcopy(model)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(SEED + 1)
    for weight in changed.parameters():
        if weight.ndim < 2:
            continue
        noise = torch.empty_like(weight).normal_(generator=generator)
        weight.data += UPDATE * weight.float().std().to(weight.dtype) * noise
    return changed


def main(place: PartSetup) -> None:
    """Draw, score and compare: healthy pairs first, then the faults."""
    responses, length = (8, 24) if place.small else (64, 256)
    trainer = make_model(place)
    engine = copy.deepcopy(trainer).bfloat16()
    words = trainer.config.vocab_size
    generator = torch.Generator(place.device).manual_seed(SEED)
    shape = (responses, PROMPT)
    prompts = torch.randint(words, shape, generator=generator, device=place.device)
    with torch.no_grad():
        plain = draw(engine, prompts, length, TAU, 1.0)
        exact = draw(trainer, prompts, length, TAU, 1.0)
        short = draw(engine, prompts, length, TAU, TOP_P)
        old = score(trainer, plain.ids)
        with torch.autocast(place.device, torch.bfloat16):
            old_half = score(trainer, plain.ids)
        half = score(engine, plain.ids)
        pairs = {
            # sampler, trainer -> (ids, sampler's column, trainer's column, fault)
            "float32 | float32": (exact, exact.sampled, score(trainer, exact.ids), ""),
            "bfloat16 | float32": (plain, plain.sampled, old, ""),
            "bfloat16 | autocast": (plain, plain.sampled, old_half, ""),
            "bfloat16 | bfloat16": (plain, plain.sampled, half, ""),
            "bfloat16 | float32, padded": (
                plain, plain.sampled, score(trainer, plain.ids, 40), "",
            ),
            "an older update": (
                plain, plain.sampled, score(other_update(trainer), plain.ids), "",
            ),
            "before the temperature": (plain, plain.raw, old_half, "column"),
            "top_p 0.9, renormalized": (short, short.sampled, score(trainer, short.ids), "cut"),
            "top_p 0.9, before the cut": (short, short.raw, score(trainer, short.ids), "column"),
            "one slot late": (plain, plain.sampled.roll(1, 1), old_half, "shift"),
            "negated": (plain, -plain.sampled, old_half, "sign"),
        }  # fmt: skip
    for name, (drawn, sampler, of_trainer, fault) in pairs.items():
        with place.row(sampler=name, fault=fault) as row:
            row |= judge(drawn.ids, sampler, of_trainer)


def judge(ids: Tensor, sampler: Tensor, of_trainer: Tensor) -> dict[str, Any]:
    """Return what the report of one pair of columns says."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :PROMPT] = False
    columns = {"ids": ids, "mask": mask, "sampler": sampler, "old": of_trainer}
    found = gap(make_batch(columns, file="the recorded step"))
    return {
        "tokens": found.tokens,
        "healthy": bool(found),
        "cause": found.cause,
        "mean_abs": found.mean_abs,
        "largest": found.largest,
        "rho_mean": found.rho_mean,
        "rho_se": found.rho_se,
        "said": [str(f) for f in found.findings],
    }
