# SPDX-License-Identifier: Apache-2.0
"""Right training steps in unusual forms: each leaves the right gradient in the model,
or returns it by name.
"""

import threading

import torch
import torch.nn.functional as F
from step_cases import entropy, in_parts, k3, of, sequences
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    Own,
    T,
    collate,
    gemma,
    hf,
    log_probs,
    pack,
    parts,
    picked,
    qwen,
    right,
    surrogate,
    term,
    tokens,
)


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x):
        return self.base(x) + 2.0 * self.b(self.a(x))


def adapted():
    model = Own().requires_grad_(False)
    model.head = Lora(model.head)
    return model


@right("packed with positions and a block mask", Own)
@right("LoRA written by hand", adapted)
def packed(model, rows):
    b = pack(rows)
    term(log_probs(model(b.ids, b.same, b.pos), b.ids), b).backward()


@right("the softcap in the head by hand", gemma)
def softcapped(model, rows):
    b = collate(rows, "left")
    z = model.lm_head(
        model.model(input_ids=b.ids, attention_mask=b.attn, position_ids=b.pos)[0]
    )
    term(log_probs(torch.tanh(z / 5.0) * 5.0, b.ids), b).backward()


@right("a chunked head with recomputation", Own)
def chunked(model, rows):
    b = collate(rows)
    later = (x[:, 1:] for x in (b.ids, b.old, b.adv, b.mask))
    flat = [x.flatten(0, 1) for x in (model.hidden(b.ids)[:, :-1], *later)]

    def one(h, y, old, A, m):
        z = model.head(h) / T
        return -(
            surrogate(z.gather(1, y[:, None])[:, 0] - z.logsumexp(1), old, A) * m
        ).sum() / tokens(rows)

    each = zip(*(x.split(16) for x in flat), strict=True)
    sum(checkpoint(one, *x, use_reentrant=False) for x in each).backward()


class Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, y):
        logp = z.log_softmax(-1)
        ctx.save_for_backward(logp, y)
        return logp.gather(-1, y[..., None])[..., 0]

    @staticmethod
    def backward(ctx, g):
        logp, y = ctx.saved_tensors
        return g[..., None] * (F.one_hot(y, logp.shape[-1]) - logp.exp()), None


@right("a backward of the log-probability by hand", qwen)
def own_backward(model, rows):
    b = collate(rows, "left")
    term(Selected.apply(hf(model, b)[:, :-1] / T, b.ids[:, 1:]), b).backward()


@right("padded to 64, the head only where tokens train", Own)
def selected_positions(model, rows):
    b = collate(rows, multiple=64)
    at = b.mask[:, 1:] > 0
    lp = picked(model.head(model.hidden(b.ids)[:, :-1][at]) / T, b.ids[:, 1:][at])
    (-surrogate(lp, b.old[:, 1:][at], b.adv[:, 1:][at]).mean()).backward()


@right("each sign of A in a backward pass of its own", qwen)
def two_backwards(model, rows):
    for part in ([r for r in rows if r.adv > 0], [r for r in rows if r.adv <= 0]):
        b = collate(part)
        term(log_probs(hf(model, b), b.ids), b, tokens(rows)).backward()


@right("gradients are kept in main_grad, then copied", Own)
def main_grad(model, rows):
    kept = {p: torch.zeros_like(p) for p in model.parameters()}
    for part in parts(rows, 2):
        b = collate(part)
        term(log_probs(model(b.ids), b.ids), b, tokens(rows)).backward()
        for p in kept:
            kept[p] += p.grad
            p.grad = None
    for p, g in kept.items():
        p.grad = g


@right("parameters of a functional call", Own)
def functional(model, rows):
    params = {
        k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()
    }
    b = collate(rows)
    term(
        log_probs(torch.func.functional_call(model, params, (b.ids,)), b.ids), b
    ).backward()
    return {k: p.grad for k, p in params.items()}


@right("a gradient for each row, by torch.func.vmap", Own)
def vmapped(model, rows):
    b, params = (
        collate(rows),
        {k: p.detach().clone() for k, p in model.named_parameters()},
    )

    def loss(params, ids, old, A, m):
        lp = log_probs(
            torch.func.functional_call(model, params, (ids[None],)), ids[None]
        )
        return -(surrogate(lp, old[1:], A[1:]) * m[1:]).sum() / tokens(rows)

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0, 0, 0))(
        params, b.ids, b.old, b.adv, b.mask
    )
    return {k: g.sum(0) for k, g in each.items()}


@right("the backward pass in two parts, at the hidden states", Own)
def split_backward(model, rows):
    b = collate(rows)
    h = model.hidden(b.ids)
    at = h.detach().requires_grad_()
    term(log_probs(model.head(at), b.ids), b).backward()
    h.backward(at.grad)


@right("threads, one for each micro-batch", Own)
def threads(model, rows):
    def one(part):
        b = collate(part)
        term(log_probs(model(b.ids), b.ids), b, tokens(rows)).backward()

    each = [threading.Thread(target=one, args=(part,)) for part in parts(rows, 4)]
    for t in each:
        t.start()
        t.join()


@right("a loss scale that GradScaler takes out", Own)
def scaled(model, rows):
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), 0.1),
        torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    b = collate(rows)
    scaler.scale(term(log_probs(model(b.ids), b.ids), b)).backward()
    scaler.step(optimizer)


@right("the loss is a closure of the optimizer's step", Own)
def closure(model, rows):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss():
        optimizer.zero_grad()
        in_parts(model, rows)

    optimizer.step(loss)


right("a declared entropy bonus", Own, entropy_coef=0.05)(
    of(lambda lp, old, A, ref, b, z: surrogate(lp, old, A) + 0.05 * entropy(z)))  # fmt: skip
right("a declared KL term", Own, beta=0.1)(
    of(lambda lp, old, A, ref, *_: surrogate(lp, old, A) - 0.1 * k3(ref - lp)))  # fmt: skip
right("GSPO", qwen, objective="gspo")(
    lambda model, rows: sequences(model, rows, lambda d, m, R: (d * m).sum(1) / m.sum(1)))  # fmt: skip
