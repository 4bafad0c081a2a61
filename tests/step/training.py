# SPDX-License-Identifier: Apache-2.0
"""What training loops share: models, a collator, log-probabilities and a surrogate; and
the two tables of loops.

A row of BUGS is (the planted cause, words that the printed cause must hold, model,
step, options of check_step). The words are "" where the checker rejects the step and
names no cause. A row of RIGHT is (name, model, step, options).
"""

import math
from types import SimpleNamespace as Batch

import torch
import transformers
from torch import nn

T, V = 0.7, 128
SMALL = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
)


# ---- models ----
def qwen(**more):
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, num_key_value_heads=2, **more)
    )


def gpt2(drop=0.0):
    """Return a GPT-2 of two layers, whose dropouts are `drop`."""
    c = transformers.GPT2Config(
        vocab_size=V, n_positions=256, n_embd=32, n_layer=2, n_head=4
    )
    c.resid_pdrop = c.embd_pdrop = c.attn_pdrop = drop
    return transformers.GPT2LMHeadModel(c)


def gemma():
    """Return a Gemma-2 whose logits have a softcap of 5."""
    c = transformers.Gemma2Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=5.0,
        attn_implementation="eager",
    )  # sdpa drops the softcap of the attention
    return transformers.Gemma2ForCausalLM(c)


def cohere():
    return transformers.CohereForCausalLM(
        transformers.CohereConfig(**SMALL, logit_scale=0.25)
    )


class Own(nn.Module):
    """A transformer of one's own: learned positions, a head with a bias. allowed: [B,
    S, S], who attends to whom.
    """

    def __init__(self, h=32):
        super().__init__()
        self.embed, self.pos = nn.Embedding(V, h), nn.Embedding(512, h)
        self.norm, self.head = nn.LayerNorm(h), nn.Linear(h, V)

        def block():
            return nn.TransformerEncoderLayer(
                h, 4, 2 * h, 0.0, "gelu", batch_first=True, norm_first=True
            )

        self.blocks = nn.ModuleList(block() for _ in range(2))
        nn.init.normal_(self.head.bias, std=0.3)

    def hidden(self, ids, allowed=None, positions=None, causal=True, bias=None):
        """Return hidden states [B, S, h].

        allowed: which tokens attend to which, beside causality. bias: is added to the
        scores in place of a mask. A token always attends to itself.
        """
        S = ids.shape[1]
        ok = torch.ones(len(ids), S, S, dtype=torch.bool)
        ok = (ok.tril() if causal else ok) & (
            ok if allowed is None else allowed
        ) | torch.eye(S, dtype=torch.bool)
        mask = (
            torch.zeros(ok.shape).masked_fill(~ok, float("-inf"))
            if bias is None
            else bias
        )
        x = self.embed(ids) + self.pos(
            torch.arange(S).expand_as(ids) if positions is None else positions
        )
        for block in self.blocks:
            x = block(x, mask.to(x.dtype).repeat_interleave(4, 0))
        return self.norm(x)

    def forward(self, ids, allowed=None, positions=None):
        return self.head(self.hidden(ids, allowed, positions))


# ---- what trainers share ----
def collate(rows, side="right", pad=0, multiple=1):
    """Return a batch of rows: ids, attn and pos; and mask, resp (the response with its
    holes), old, ref and adv in the columns of ids, [B, S].

    side: of the padding. multiple: S is a multiple of it.
    """
    longest = max(len(row.ids) for row in rows)
    columns = math.ceil(longest / multiple) * multiple

    def place(of, fill=0.0):
        """Return of(row) of all rows, padded with `fill`."""
        out = torch.full((len(rows), columns), fill)
        for i, row in enumerate(rows):
            x = torch.tensor(of(row))
            at = columns - len(x) if side == "left" else 0
            out[i, at : at + len(x)] = x
        return out

    def place_after_prompt(of):
        """Return of(row) of all rows, with 0 at the prompt and in the padding."""
        return place(lambda row: [0.0] * len(row.prompt) + [float(x) for x in of(row)])

    attn = place(lambda row: [1] * len(row.ids), 0)
    return Batch(
        ids=place(lambda row: row.ids, pad),
        attn=attn,
        pos=(attn.cumsum(1) - 1).clamp(min=0),
        mask=place_after_prompt(lambda row: row.trains),
        old=place_after_prompt(lambda row: row.old),
        ref=place_after_prompt(lambda row: row.ref),
        resp=place_after_prompt(lambda row: [1] * len(row.response)),
        adv=place_after_prompt(lambda row: [row.adv] * len(row.response)),
    )


def pack(rows):
    """Return a batch [1, N] of all rows behind each other. doc is the number of each
    token's row, same where two tokens have the same.
    """
    each = [vars(collate([row])) for row in rows]
    joined = {}
    for name in each[0]:
        joined[name] = torch.cat([of_row[name] for of_row in each], 1)
    b = Batch(**joined)
    b.doc = torch.tensor([[i for i, r in enumerate(rows) for _ in r.ids]])
    b.same = b.doc[:, :, None] == b.doc[:, None, :]
    return b


def tokens(rows):
    return sum(sum(r.trains) for r in rows)


def parts(rows, n):
    return [rows[i : i + n] for i in range(0, len(rows), n)]


def hf(model, b, **kw):
    return model(input_ids=b.ids, attention_mask=b.attn, **kw).logits


def log_probs(z, ids, temperature=T):
    """Return the log-probabilities of the tokens behind the first, [B, S - 1]."""
    return (
        (z[:, :-1].float() / temperature)
        .log_softmax(-1)
        .gather(-1, ids[:, 1:, None])[..., 0]
    )


def surrogate(lp, old, A, low=0.8, high=1.28):
    r = (lp - old).exp()
    return torch.min(r * A, r.clamp(low, high) * A)


def term(lp, b, total=None, J=None, mask=None):
    """Return DAPO's loss of log-probabilities [B, S - 1].

    total: the denominator in place of the trained tokens. J: terms in place of DAPO's.
    mask: [B, S], in place of the batch's.
    """
    m = (b.mask if mask is None else mask)[:, 1:]
    J = surrogate(lp, b.old[:, 1:], b.adv[:, 1:]) if J is None else J
    return -(J * m).sum() / (m.sum() if total is None else total)


def row_term(lp, r, total):
    """Return DAPO's loss of one row, divided by `total`."""
    return (
        -(
            surrogate(lp, torch.tensor(r.old), torch.tensor(r.adv))
            * torch.tensor(r.trains)
        ).sum()
        / total
    )


def row_logits(model, r):
    z = model(torch.tensor([r.ids]))
    return getattr(z, "logits", z)[0, len(r.prompt) - 1 : -1] / T


def picked(z, y):
    return z.log_softmax(-1)[range(len(y)), y]


# ---- the cases: step_cases.py and right_steps.py add to them ----
BUGS, RIGHT = [], []


def bug(cause, words, model, **options):
    return lambda f: BUGS.append((cause, words, model, f, options)) or f


def right(name, model, **options):
    return lambda f: RIGHT.append((name, model, f, options)) or f
