# SPDX-License-Identifier: Apache-2.0
"""Sampling from a policy: one prefill a prompt, then one forward pass a token over all
responses at once.

Responses to one prompt that have said the same so far are one state, and are read once.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from repro.mini.policy import models
from repro.mini.tasks import EOS, PAD, response_mask


class Samples(NamedTuple):
    tokens: Tensor  # int64 [N, T], <pad> after the end
    mask: Tensor  # bool [N, T], True on the response, its end included
    # float32 [S, V], what the policy said in each state it was in, before temperature
    # and top-p
    logits: Tensor
    state: Tensor  # int64 [N, T], the one in which each token was drawn; 0 on padding


def sample(
    model: PreTrainedModel,
    prompts: dict[str, Tensor],
    responses: int,
    length: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_p: float = 1.0,
    keep: bool = True,
    end: int = EOS,
) -> Samples:
    """`responses` samples of at most `length` tokens for each prompt, those of one
    prompt side by side; `end` ends a response.

    Without `keep` the policy's logits are forgotten.
    """
    # of each response that goes on
    state = torch.arange(len(prompts["input_ids"])).repeat_interleave(responses)
    # made outside inference_mode: they are to be trained on
    tokens = torch.full((len(state), length), PAD)
    words = model.config.get_text_config().vocab_size
    said: list[Tensor] = []
    at = torch.zeros_like(tokens)
    with torch.inference_mode():
        reader = models.reader(model, prompts, length)
        going, seen = torch.arange(len(tokens)), reader.first
        for t in range(length):
            drawn = draw(
                nucleus((seen / temperature).softmax(-1), top_p), state, generator
            )
            tokens[going, t] = drawn
            if keep:
                at[going, t] = state + sum(map(len, said))
                said.append(seen)
            on = (drawn != end).nonzero()[:, 0]
            if not len(on) or t == length - 1:
                break
            going, (said_so_far, state) = (
                going[on],
                (state * words + drawn)[on].unique(return_inverse=True),
            )
            seen = reader.read(said_so_far // words, said_so_far % words)
    return Samples(
        tokens,
        response_mask(tokens, end),
        torch.cat(said) if keep else torch.empty(0),
        at,
    )


def draw(p: Tensor, of: Tensor, generator: torch.Generator) -> Tensor:
    """One token from each p[of], by inverting the distribution function; p need not add
    up to 1.

    `multinomial` would draw V numbers for each.
    """
    up_to = p.double().cumsum(-1)[of]
    # on the CPU: the same numbers for every device
    u = torch.rand(
        len(of), 1, dtype=torch.float64, generator=generator, device="cpu"
    ).to(p.device)
    u = u * up_to[:, -1:]
    return torch.searchsorted(up_to, u, right=True)[:, 0].clamp(max=p.shape[-1] - 1)


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """p with everything outside the fewest tokens that hold top_p of it set to 0 (not
    renormalized).
    """
    if top_p >= 1:
        return p
    largest = p.amax(-1, keepdim=True)
    kept = p * (p == largest)
    # else one token does; sorting is slow
    hard = ((largest < top_p) | (largest <= 0.5))[:, 0].nonzero()[:, 0]
    ordered, which = p[hard].sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept[hard] = torch.zeros_like(ordered).scatter(
        -1, which, ordered.masked_fill(before >= top_p, 0)
    )
    return kept
