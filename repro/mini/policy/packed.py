# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3, computed from the weights of transformers' own class, several times as
fast as by it.

At 100k weights the time goes into many small operations on padding and on what was read
before. Here what responses have in common, their prompt and the tokens they begin with,
is read once; all tokens stand in one long row without padding, and only attention,
which is small, sees them row by row. tests/mini/test_mini_packed.py holds logits and
gradients against transformers.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from repro.mini.policy.fused import Attend, Gate, Rms, RmsTurn, softmax


class Layer(NamedTuple):
    """Weights that read the same input side by side, with those of the norm before them
    multiplied in.
    """

    qkv: Tensor
    turn: Tensor  # [H + G, D], of the norms of H heads of queries and G of keys
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen3:
    """The weights as they are now: made anew after every update."""

    def __init__(self, model: PreTrainedModel):
        """Take the weights of the model. Those that are applied to the same input are
        joined, and the weights of a norm go into the matrix behind it.
        """
        c, m = model.config, model.model
        self.heads, self.kv, self.width = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        self.eps = c.rms_norm_eps
        self.share, self.scale = self.heads // self.kv, self.width**-0.5
        self.frequencies, self.words = m.rotary_emb.inv_freq, m.embed_tokens.weight
        self.last = self.words * m.norm.weight
        self.layers = []
        for layer in m.layers:
            a, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                Layer(
                    torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
                    * layer.input_layernorm.weight,
                    torch.cat(
                        [
                            a.q_norm.weight.expand(self.heads, -1),
                            a.k_norm.weight.expand(self.kv, -1),
                        ]
                    ),
                    a.o_proj.weight,
                    torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
                    * layer.post_attention_layernorm.weight,
                    mlp.down_proj.weight,
                )
            )

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE of tokens at these positions: x·cos + roll(x)·sin, the sign of half a
        rotation in sin.
        """
        angles = positions[:, None, None].float() * self.frequencies
        sin = angles.sin()
        return angles.cos().repeat(1, 1, 2), torch.cat([-sin, sin], -1)

    def read(
        self, x: Tensor, layer: Layer, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [n, H, D], keys and values [n, G, D] of tokens x [n, d]."""
        qkv = linear(Rms.apply(x, self.eps), layer.qkv).view(len(x), -1, self.width)
        qk, v = qkv.split([self.heads + self.kv, self.kv], 1)
        q, k = RmsTurn.apply(qk, layer.turn, *turns, self.eps).split(
            [self.heads, self.kv], 1
        )
        return q, k, v

    def go_on(self, x: Tensor, layer: Layer, attended: Tensor) -> Tensor:
        x = x + linear(attended, layer.out)
        return x + linear(
            Gate.apply(linear(Rms.apply(x, self.eps), layer.gate_up)), layer.down
        )

    def logits(self, x: Tensor) -> Tensor:
        return linear(Rms.apply(x, self.eps), self.last)

    def rows(self, slots: Tensor, T: int, heads: int) -> Tensor:
        """[rows · T, heads · D] to [rows · G, heads / G · T, D]: query heads that share
        keys stand in one row.
        """
        x = slots.view(-1, T, heads, self.width).transpose(1, 2)
        return x.reshape(len(x) * self.kv, -1, self.width)


def fits(model: PreTrainedModel) -> bool:
    return model.config.model_type == "qwen3"


class Places(NamedTuple):
    """Where tokens stand: in one long row, the prompts' first; and for attention in
    rows of T slots.

    A prompt's row looks at itself, a response's at its prompt's L slots and at itself.
    Equal responses share a row (R of N are left), and what follows the same prompt and
    the same tokens is one token of the long row, at home where it stands first. A slot
    without a token holds token 0: only such slots look at it, and nobody reads what
    they see.
    """

    tokens: Tensor  # [n], the long row
    positions: Tensor  # [n]
    queries: Tensor  # [P + R, T] -> long row
    keys: Tensor  # [P + R, L + T] -> long row
    home: Tensor  # [n] -> its slot among the queries
    hide: Tensor  # [P + R, T, L + T], 0 or the least number
    # [mask.sum()] -> logits of each prompt's last token, then of the responses' tokens
    order: Tensor


def places(prompts: Tensor, of: Tensor, tokens: Tensor, mask: Tensor) -> Places:
    """Arrange prompts and responses so that a token stands once for all responses of a
    prompt that begin alike up to it.

    of: the prompt of each response. mask: the tokens whose logits are asked for.
    """
    (P, L), width = prompts.shape, mask.shape[1]
    # what comes after a response's last token is nobody's business
    lengths = (mask * torch.arange(width)).amax(1)
    T = max(int(lengths.max()), L)
    read = pad(
        tokens.masked_fill(torch.arange(width) >= lengths[:, None], -1),
        (0, T),
        value=-1,
    )[:, :T]
    # sorted, so that responses that begin alike stand together
    rows, row_of = torch.cat([of[:, None], read], 1).unique(dim=0, return_inverse=True)
    of_row, read, R = rows[:, 0], rows[:, 1:], len(rows)
    # from the row before, up to here
    differs = (rows[1:] != rows[:-1]).cummax(1).values[:, 1:]
    first = (read >= 0) & torch.cat([differs.new_ones(1, T), differs])
    # among first
    at = (
        (first.flatten().cumsum(0).view(R, T) - 1)
        .masked_fill_(~first, -1)
        .cummax(0)
        .values
    )
    at = (at + P * L).masked_fill_(read < 0, 0)
    prompt = torch.arange(P * L).view(P, L)
    queries = torch.cat([pad(prompt, (0, T - L)), at])
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    sees = torch.stack(
        [torch.cat([causal.new_full((T, L), who), causal], 1) for who in (False, True)]
    )
    hide = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
    return Places(
        torch.cat([prompts.flatten(), read[first]]),
        torch.cat(
            [torch.arange(L).repeat(P), (L + torch.arange(T)).expand(R, T)[first]]
        ),
        queries,
        torch.cat([torch.cat([prompt.new_zeros(P, L), prompt[of_row]]), queries], 1),
        torch.cat([(torch.arange(T) < L).expand(P, T), first])
        .flatten()
        .nonzero()[:, 0],
        hide.repeat_interleave(torch.tensor([P, R]), 0),
        torch.cat([of[:, None], at[row_of] - P * L + P], 1)[:, :width][
            mask[:, : T + 1]
        ],
    )


def response_logits(
    model: PreTrainedModel, prompts: Tensor, of: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """Logits [mask.sum(), V], in the order of tokens[mask], of what predicts them; row
    i follows prompt of[i].
    """
    net, at = Qwen3(model), places(prompts, of, tokens, mask)
    x, turns = net.words[at.tokens], net.turns(at.positions)
    n, T, K = len(x), at.queries.shape[1], at.keys.shape[1]
    hide = at.hide.repeat(1, net.share, 1).repeat_interleave(net.kv, 0)
    for layer in net.layers:
        q, k, v = (y.reshape(n, -1) for y in net.read(x, layer, turns))
        q = net.rows(q.index_select(0, at.queries.flatten()), T, net.heads)
        k, v = (
            net.rows(y.index_select(0, at.keys.flatten()), K, net.kv) for y in (k, v)
        )
        seen = Attend.apply(q, k, v, hide, net.scale).view(-1, net.heads, T, net.width)
        seen = seen.transpose(1, 2).reshape(-1, net.heads * net.width)
        x = net.go_on(x, layer, seen.index_select(0, at.home))
    ends, P = prompts.numel(), len(prompts)
    found = net.logits(torch.cat([x[:ends].view(P, -1, x.shape[1])[:, -1], x[ends:]]))
    return found.index_select(0, at.order)


class Reader:
    """Reads prompts, then one token a row at a time; its cache has a place for all of
    them from the start.
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, length: int):
        """Read the prompts, and leave room for `length` more tokens."""
        self.net, self.done = Qwen3(model), prompts.shape[1]
        net, (P, L) = self.net, prompts.shape
        self.rope = net.turns(torch.arange(L + length))
        x, turns = net.words[prompts.flatten()], net.turns(torch.arange(L).repeat(P))
        hide = (
            torch.ones(L, L)
            .triu(1)
            .mul_(torch.finfo(torch.float32).min)
            .repeat(net.share, 1)
        )
        self.cache = []
        for layer in net.layers:
            q, k, v = (y.reshape(P * L, -1) for y in net.read(x, layer, turns))
            k, v = (net.rows(y, L, net.kv) for y in (k, v))
            self.cache.append(
                [
                    pad(y, (0, 0, 0, length)).view(P, net.kv, L + length, net.width)
                    for y in (k, v)
                ]
            )
            seen = Attend.apply(net.rows(q, L, net.heads), k, v, hide, net.scale)
            seen = seen.view(P, net.heads, L, net.width).transpose(1, 2)
            x = net.go_on(x, layer, seen.reshape(P * L, -1))
        self.first = net.logits(x.view(P, L, -1)[:, -1])

    def read(self, after: Tensor, tokens: Tensor) -> Tensor:
        """Logits [n, V] of tokens [n], each after row after[i] of what was read last."""
        net, n, at = self.net, len(tokens), self.done
        if n != len(self.cache[0][0]) or not torch.equal(after, torch.arange(n)):
            self.cache = [
                [slots.index_select(0, after) for slots in room] for room in self.cache
            ]
        x, turns = net.words[tokens], (self.rope[0][at], self.rope[1][at])
        for layer, room in zip(net.layers, self.cache, strict=True):
            q, k, v = net.read(x, layer, turns)
            for slots, y in zip(room, (k, v), strict=True):
                slots[:, :, at] = y
            k, v = (slots.flatten(0, 1)[:, : at + 1] for slots in room)
            q = q.reshape(n * net.kv, net.share, net.width).mul_(net.scale)
            x = net.go_on(x, layer, softmax(q.bmm(k.mT)).bmm(v).view(n, -1))
        self.done += 1
        return net.logits(x)
