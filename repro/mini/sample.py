# SPDX-License-Identifier: Apache-2.0
"""Sampling from a policy: one prefill a prompt, then one forward pass a token over all responses at once."""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini import policies
from repro.mini.tasks import EOS, PAD, response_mask


class Samples(NamedTuple):
    tokens: Tensor  # int64 [N, T], <pad> after <eos>
    mask: Tensor  # bool [N, T], True on the response, <eos> included
    logits: Tensor  # float32 [N, T, V], what the policy said of each token, before temperature and top-p


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: dict[str, Tensor],
    responses: int,
    length: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Samples:
    """`responses` samples of at most `length` tokens for each prompt, those of one prompt side by side."""
    of = torch.arange(len(prompts["input_ids"])).repeat_interleave(responses)
    seen, cache = policies.read_prompts(model, prompts, of)
    done = torch.zeros(len(seen), dtype=torch.bool)
    tokens, logits = torch.full((len(seen), length), PAD), seen.new_zeros(len(seen), length, seen.shape[-1])
    for t in range(length):
        logits[:, t] = seen
        p = nucleus((seen / temperature).softmax(-1), top_p)
        tokens[:, t] = torch.multinomial(p, 1, generator=generator)[:, 0].masked_fill(done, PAD)
        done |= tokens[:, t] == EOS
        if done.all() or t == length - 1:
            break
        seen = model(input_ids=tokens[:, t, None], past_key_values=cache, use_cache=True).logits[:, -1]
    return Samples(tokens, response_mask(tokens), logits)


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """p with everything outside the fewest tokens that hold top_p of it set to 0 (not renormalised)."""
    if top_p >= 1:
        return p
    ordered, which = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(p).scatter(-1, which, ordered.masked_fill(before >= top_p, 0))
