# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen3, computed from the weights of transformers' own class, several times as fast as
by it.

At 100k weights the time goes into many small operations on padding and on what was read
before. Here what responses have in common, their prompt and the tokens they begin with,
is read once; all tokens are in one long row without padding, and only attention, which is
small, reads them row by row. tests/mini/test_mini_packed.py compares logits and gradients
with transformers.

In the shapes H is the number of query heads, G that of key-value heads (H / G query heads
share the keys of one), D the width of a head, d that of a token, P the number of prompts,
L their length, N that of responses, V the size of the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from repro.mini.policy.fused import Attend, Gate, Rms, RmsTurn, softmax


class Layer(NamedTuple):
    """The weights of one layer. Those that read the same input are side by side in one
    matrix, with the weights of the norm before them multiplied in.
    """

    qkv: Tensor
    turn: Tensor  # [H + G, D], of the norms of the heads, queries first
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Qwen3:
    """The weights as they are now: made anew after every update."""

    def __init__(self, model: PreTrainedModel):
        """Take the weights of the model. Those that are applied to the same input are
        joined. The matrix behind a norm of a whole vector is multiplied by the norm's
        weights; those of the norms of the heads, which RoPE turns, stay apart.
        """
        c, m = model.config, model.model
        self.heads = c.num_attention_heads  # H
        self.kv = c.num_key_value_heads  # G
        self.width = c.head_dim  # D
        self.eps = c.rms_norm_eps
        self.share = self.heads // self.kv  # query heads for each key-value head
        self.scale = self.width**-0.5
        self.frequencies = m.rotary_emb.inv_freq
        self.words = m.embed_tokens.weight  # [V, d]
        self.last = self.words * m.norm.weight  # output weights are tied to the input's
        self.layers = []
        for layer in m.layers:
            a, mlp = layer.self_attn, layer.mlp
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            of_queries = a.q_norm.weight.expand(self.heads, -1)
            of_keys = a.k_norm.weight.expand(self.kv, -1)
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            joined = Layer(
                qkv=qkv * layer.input_layernorm.weight,
                turn=torch.cat([of_queries, of_keys]),
                out=a.o_proj.weight,
                gate_up=gate_up * layer.post_attention_layernorm.weight,
                down=mlp.down_proj.weight,
            )
            self.layers.append(joined)

    def turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of RoPE for tokens at these positions, each [n, 1, D].

        A vector is rotated as x·cos + roll(x)·sin (fused.RmsTurn): sin has the sign of
        its first half turned.
        """
        angles = positions[:, None, None].float() * self.frequencies
        sin = angles.sin()
        return angles.cos().repeat(1, 1, 2), torch.cat([-sin, sin], -1)

    def read(
        self, x: Tensor, layer: Layer, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [n, H, D], keys and values [n, G, D] of tokens x [n, d]."""
        qkv = linear(Rms.apply(x, self.eps), layer.qkv).view(len(x), -1, self.width)
        qk, v = qkv.split([self.heads + self.kv, self.kv], 1)
        q, k = RmsTurn.apply(qk, layer.turn, *turns, self.eps).split(
            [self.heads, self.kv], 1
        )
        return q, k, v

    def go_on(self, x: Tensor, layer: Layer, attended: Tensor) -> Tensor:
        """Return x [n, d] after a layer, from what its attention gave, [n, H · D]."""
        x = x + linear(attended, layer.out)
        return x + linear(
            Gate.apply(linear(Rms.apply(x, self.eps), layer.gate_up)), layer.down
        )

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [n, V] of x [n, d] after the last layer."""
        return linear(Rms.apply(x, self.eps), self.last)

    def rows(self, slots: Tensor, T: int, heads: int) -> Tensor:
        """Return slots [rows · T, heads · D] as [rows · G, heads / G · T, D], so that
        query heads that share keys are in one row.
        """
        x = slots.view(-1, T, heads, self.width).transpose(1, 2)
        return x.reshape(len(x) * self.kv, -1, self.width)


def fits(model: PreTrainedModel) -> bool:
    """Return whether this module computes the model: a Qwen3 without experts or pictures."""
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
    """Arrange prompts and responses so that a token is read once for all responses of a
    prompt that begin alike up to it.

    Args:
        prompts: tokens, [P, L].
        of: [N], the prompt of each response.
        tokens: responses, [N, width].
        mask: bool [N, width], the tokens whose logits are needed.
    """
    (P, L), width = prompts.shape, mask.shape[1]
    # a response without its last token, after which nothing is predicted
    lengths = (mask * torch.arange(width)).amax(1)
    T = max(int(lengths.max()), L)
    is_beyond = torch.arange(width) >= lengths[:, None]
    read = pad(tokens.masked_fill(is_beyond, -1), (0, T), value=-1)[:, :T]
    # sorted, so that responses that begin alike stand together
    rows, row_of = torch.cat([of[:, None], read], 1).unique(dim=0, return_inverse=True)
    of_row, read, R = rows[:, 0], rows[:, 1:], len(rows)
    # [R - 1, T]: whether a row differs from the one before, up to here
    differs = (rows[1:] != rows[:-1]).cummax(1).values[:, 1:]
    # [R, T]: whether a token is in the long row for the first time here
    first = (read >= 0) & torch.cat([differs.new_ones(1, T), differs])
    # [R, T]: index of each token among those, that of a row before where it is not first
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
    # a prompt's row does not look at the L slots of a prompt before it; a response's does
    sees = torch.stack(
        [torch.cat([causal.new_full((T, L), who), causal], 1) for who in (False, True)]
    )
    hide = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
    of_prompts = torch.arange(L).repeat(P)
    of_responses = (L + torch.arange(T)).expand(R, T)[first]
    before = torch.cat([prompt.new_zeros(P, L), prompt[of_row]])
    is_home = torch.cat([(torch.arange(T) < L).expand(P, T), first])
    # a response's first token is predicted by its prompt, the others by the token before
    predicted_by = torch.cat([of[:, None], at[row_of] - P * L + P], 1)[:, :width]
    return Places(
        tokens=torch.cat([prompts.flatten(), read[first]]),
        positions=torch.cat([of_prompts, of_responses]),
        queries=queries,
        keys=torch.cat([before, queries], 1),
        home=is_home.flatten().nonzero()[:, 0],
        hide=hide.repeat_interleave(torch.tensor([P, R]), 0),
        order=predicted_by[mask[:, : T + 1]],
    )


def response_logits(
    model: PreTrainedModel, prompts: Tensor, of: Tensor, tokens: Tensor, mask: Tensor
) -> Tensor:
    """Return the logits of what predicts tokens[mask], [mask.sum(), V], in this order;
    row i follows prompt of[i].
    """
    net, at = Qwen3(model), places(prompts, of, tokens, mask)
    x, turns = net.words[at.tokens], net.turns(at.positions)
    n = len(x)
    T = at.queries.shape[1]  # slots of a row that look
    K = at.keys.shape[1]  # slots of a row that are looked at
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
    """Reads prompts, then one token a row at a time; its cache has a place for all
    tokens from the start.

    Attributes:
        first: logits of each prompt's next token, [P, V].
        done: how many tokens each row has.
        rope: cos and sin of all positions.
        cache: of each layer, keys and values [rows, G, L + length, D].
    """

    def __init__(self, model: PreTrainedModel, prompts: Tensor, length: int):
        """Read the prompts [P, L], and leave room for `length` more tokens."""
        self.net, self.done = Qwen3(model), prompts.shape[1]
        net, (P, L) = self.net, prompts.shape
        self.rope = net.turns(torch.arange(L + length))
        x, turns = net.words[prompts.flatten()], net.turns(torch.arange(L).repeat(P))
        least = torch.finfo(torch.float32).min
        later = torch.ones(L, L).triu(1).mul_(least)  # a token does not look ahead
        hide = later.repeat(net.share, 1)
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
        """Return logits [n, V] after tokens [n], each of which follows row after[i] of
        what was read last.
        """
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
