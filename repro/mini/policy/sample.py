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
    """Responses, N = prompts · responses, those of one prompt side by side.

    A state is a prompt with a beginning of its responses. Responses that begin alike share
    it, so that there are S states, and not N · T.
    """

    tokens: Tensor  # int64 [N, T], <pad> after the end
    mask: Tensor  # bool [N, T], True on the response, its end included
    # float32 [S, V] of the policy in each state, before temperature and top-p
    logits: Tensor
    state: Tensor  # int64 [N, T], row of `logits` of each token; 0 on padding


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
    """Return `responses` samples of at most `length` tokens for each prompt.

    Args:
        model: a policy.
        prompts: from models.inputs.
        responses: to each prompt.
        length: of a response, T.
        generator: on the CPU.
        temperature: the logits are divided by it.
        top_p: 1 for all tokens.
        keep: without it `logits` is empty and `state` is 0.
        end: the token that ends a response.
    """
    # the state of each response that goes on
    state = torch.arange(len(prompts["input_ids"])).repeat_interleave(responses)
    # made outside inference_mode: they are to be trained on
    tokens = torch.full((len(state), length), PAD)
    words = model.config.get_text_config().vocab_size
    said: list[Tensor] = []  # logits of the states, position by position
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
            going = going[on]
            # one number for a state and the token after it
            pairs = (state * words + drawn)[on]
            new_states, state = pairs.unique(return_inverse=True)
            seen = reader.read(new_states // words, new_states % words)
    return Samples(
        tokens,
        response_mask(tokens, end),
        torch.cat(said) if keep else torch.empty(0),
        at,
    )


def draw(p: Tensor, of: Tensor, generator: torch.Generator) -> Tensor:
    """Return one token drawn from each p[of], int64 [len(of)], by inverting the
    distribution function; p [S, V] need not add up to 1.

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
    """Return p [S, V] with everything set to 0 outside the fewest tokens that hold
    top_p of it; it is not renormalized.

    The token that reaches top_p is kept.
    """
    if top_p >= 1:
        return p
    largest = p.amax(-1, keepdim=True)
    kept = p * (p == largest)
    # sorting is slow, and these rows alone need it: in the others one token holds top_p
    hard = ((largest < top_p) | (largest <= 0.5))[:, 0].nonzero()[:, 0]
    ordered, which = p[hard].sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept[hard] = torch.zeros_like(ordered).scatter(
        -1, which, ordered.masked_fill(before >= top_p, 0)
    )
    return kept
