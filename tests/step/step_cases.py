# SPDX-License-Identifier: Apache-2.0
"""Training steps with one bug each, in the styles in which loops are written.

They were written from the documentation of `check_step` and from bug reports, before
the checker ran on them. Each step leaves its gradients in the model. Its decorator says
what was planted, and which words the cause must hold. One file: a catalogue is read as
one.
"""

import functools
import tempfile
from dataclasses import replace
from types import SimpleNamespace as Batch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import (
    Own,
    T,
    V,
    bug,
    cohere,
    collate,
    gemma,
    gpt2,
    hf,
    log_probs,
    pack,
    parts,
    picked,
    qwen,
    right,
    row_logits,
    row_term,
    surrogate,
    term,
    tokens,
)


# ---- the forward pass ----
@bug("the temperature is applied twice", "twice", qwen)
def temperature_twice(model, rows):
    b = collate(rows, "left")
    term(log_probs(hf(model, b, position_ids=b.pos) / T, b.ids), b).backward()


@bug(
    "the temperature divides the log-probabilities",
    "divided by the temperature, not logits",
    qwen,
)
def temperature_on_logps(model, rows):
    b = collate(rows)
    term(log_probs(hf(model, b), b.ids, 1.0) / T, b).backward()


@bug(
    "labels are shifted by two: by the collator, and by the loss",
    "labels stand one token too late",
    Own,
)
def shifted_twice(model, rows):
    b = collate(rows)
    term(log_probs(model(b.ids), F.pad(b.ids, (0, 1))[:, 1:]), b).backward()


@bug("the mask is not shifted with the labels", "the mask is one token late", qwen)
def mask_not_shifted(model, rows):
    b = collate(rows)
    A = torch.tensor([[r.adv] for r in rows])
    lp = log_probs(hf(model, b), b.ids)
    term(lp, b, J=surrogate(lp, b.old[:, 1:], A), mask=b.mask.roll(1, 1)).backward()


@bug("positions start in the left padding", "positions count what precedes", gpt2)
def no_position_ids(model, rows):
    b = collate(rows, "left")
    term(
        log_probs(
            hf(model, b, position_ids=torch.arange(b.ids.shape[1]).expand_as(b.ids)),
            b.ids,
        ),
        b,
    ).backward()


@bug(
    "positions start again with the response",
    "positions start again with the response",
    gpt2,
)
def positions_from_response(model, rows):
    b = collate(rows)
    b.pos = torch.where(b.resp.cumsum(1) > 0, b.resp.cumsum(1) - 1, b.pos)
    term(log_probs(hf(model, b, position_ids=b.pos.long()), b.ids), b).backward()


@bug(
    "the mask of the loss stands for the attention mask",
    "masked tokens are not attended to",
    qwen,
)
def loss_mask_attends(model, rows):
    b = collate(rows)
    seen = b.attn - b.resp + b.mask
    term(
        log_probs(
            hf(model, Batch(ids=b.ids, attn=seen), position_ids=b.pos.long()), b.ids
        ),
        b,
    ).backward()


@bug(
    "a second BOS is put before each prompt",
    "1 more token is put before each prompt",
    qwen,
)
def second_bos(model, rows):
    b = collate([replace(r, prompt=[1, *r.prompt]) for r in rows])
    term(log_probs(hf(model, b), b.ids), b).backward()


@bug("position ids start at 1", "positions start at 1", gpt2)
def positions_from_one(model, rows):
    b = collate(rows, "left")
    term(log_probs(hf(model, b, position_ids=b.attn.cumsum(1)), b.ids), b).backward()


@bug(
    "packed rows attend to the rows before them",
    "the rows of a pack attend to each other",
    Own,
)
def packing_leak(model, rows):
    b = pack(rows)
    term(log_probs(model(b.ids, positions=b.pos), b.ids), b).backward()


@bug("position ids run on over packed rows", "positions count what precedes a row", Own)
def packing_positions(model, rows):
    b = pack(rows)
    term(log_probs(model(b.ids, allowed=b.same), b.ids), b).backward()


@bug(
    "packed rows attend to their own later tokens",
    "tokens attend to later tokens of their row",
    Own,
)
def packing_not_causal(model, rows):
    b = pack(rows)
    h = model.hidden(b.ids, b.same, b.pos, causal=False)
    term(log_probs(model.head(h), b.ids), b).backward()


@bug(
    "document ids of two packs collide: 0 1 2 | 0 1 2 3 4",
    "the ids of rows start again after 3 rows of a pack, once",
    Own,
)
def packing_bins(model, rows):
    b, doc = pack(rows), torch.cat([pack(rows[:3]).doc, pack(rows[3:]).doc], 1)
    term(
        log_probs(model(b.ids, doc[:, :, None] == doc[:, None, :], b.pos), b.ids), b
    ).backward()


@bug(
    "the attention mask is added as 0 and 1",
    "attention mask is added to the scores as 0 and 1",
    Own,
)
def additive_mask(model, rows):
    b = collate(rows, "left")
    S = b.ids.shape[1]
    bias = torch.full((S, S), float("-inf")).triu(1) + b.attn[:, None, :].float()
    term(
        log_probs(model.head(model.hidden(b.ids, positions=b.pos, bias=bias)), b.ids), b
    ).backward()


@bug("attention is cut to a window", "the last 4 tokens only", Own)
def windowed(model, rows):
    b, at = collate(rows), torch.arange(max(len(r.ids) for r in rows))
    near = (at[:, None] - at < 4).expand(len(rows), -1, -1)
    term(log_probs(model(b.ids, allowed=near), b.ids), b).backward()


@bug("a tied head is assumed", "the input embedding stands for the head", qwen)
def embedded_head(model, rows):
    b = collate(rows)
    h = model.model(input_ids=b.ids, attention_mask=b.attn)[0]
    term(log_probs(h @ model.model.embed_tokens.weight.T, b.ids), b).backward()


@bug("the softcap is applied twice", "softcap is applied twice", gemma)
def capped_twice(model, rows):
    b = collate(rows, "left")
    term(
        log_probs(5 * torch.tanh(hf(model, b, position_ids=b.pos.long()) / 5), b.ids), b
    ).backward()


@bug("dropout is on", "dropout or sampling", functools.partial(gpt2, 0.1))
def dropout_on(model, rows):
    b = collate(rows)
    term(log_probs(hf(model.train(), b), b.ids), b).backward()


@bug("the tied head's weight is detached", "transformer.wte.weight", gpt2)
def head_detached(model, rows):
    b = collate(rows)
    h = model.transformer(input_ids=b.ids, attention_mask=b.attn).last_hidden_state
    term(log_probs(h @ model.lm_head.weight.detach().T, b.ids), b).backward()


@bug("the chunked head forgets the bias", "the head's bias is left out", Own)
def head_without_bias(model, rows):
    b = collate(rows)
    h = model.hidden(b.ids)
    z = torch.cat(
        [h[:, i : i + 8] @ model.head.weight.T for i in range(0, h.shape[1], 8)], 1
    )
    term(log_probs(z, b.ids), b).backward()


@bug("the fused head drops the final softcap", "logit scale or softcap", gemma)
def head_without_softcap(model, rows):
    b = collate(rows)
    term(
        log_probs(
            model.lm_head(model.model(input_ids=b.ids, attention_mask=b.attn)[0]), b.ids
        ),
        b,
    ).backward()


@bug("the fused head drops the logit scale", "logit scale or softcap", cohere)
def head_without_scale(model, rows):
    for part in parts(rows, 3):
        b = collate(part)
        h = model.model(input_ids=b.ids, attention_mask=b.attn)[0]
        term(log_probs(model.lm_head(h), b.ids), b, tokens(rows)).backward()


@bug(
    "the log-softmax of a tensor-parallel rank's own half of the vocabulary",
    "shard of the vocabulary, of 2",
    qwen,
)
def vocabulary_shard(model, rows):
    b = collate(rows)
    z, y, half = hf(model, b)[:, :-1] / T, b.ids[:, 1:], V // 2
    lse = torch.where(
        y < half, z[..., :half].logsumexp(-1), z[..., half:].logsumexp(-1)
    )
    term(z.gather(-1, y[..., None])[..., 0] - lse, b).backward()


@bug("log-probabilities are renormalized over the top 20", "the 20 largest", Own)
def top_k(model, rows):
    for r in rows:
        z, y = row_logits(model, r), torch.tensor(r.response)[:, None]
        kept = (
            torch.zeros_like(z, dtype=torch.bool)
            .scatter_(1, z.topk(20).indices, True)
            .scatter_(1, y, True)
        )
        row_term(
            picked(z.masked_fill(~kept, float("-inf")), r.response), r, tokens(rows)
        ).backward()


@bug("label smoothing is left on", "label smoothing of 0.1", qwen)
def label_smoothing(model, rows):
    b = collate(rows, "left")
    z = (hf(model, b)[:, :-1] / T).transpose(1, 2)
    term(
        -F.cross_entropy(z, b.ids[:, 1:], reduction="none", label_smoothing=0.1), b
    ).backward()


def with_prefix(model, rows, grad):
    """Compute DAPO's gradient with the prompt's keys and values computed first, without
    a graph unless `grad`.
    """
    for r in rows:
        with torch.set_grad_enabled(grad):
            past = model(torch.tensor([r.prompt[:-1]]), use_cache=True).past_key_values
        z = (
            model(
                torch.tensor([r.prompt[-1:] + r.response]),
                past_key_values=past,
                use_cache=True,
            ).logits[0, :-1]
            / T
        )
        row_term(picked(z, r.response), r, tokens(rows)).backward()


bug(
    "the prompt is run without gradient, as a prefix cache",
    "prompts are run without a gradient",
    qwen,
)(functools.partial(with_prefix, grad=False))
right("a prefix cache with its gradient", qwen)(
    functools.partial(with_prefix, grad=True)
)


@bug(
    "a reentrant checkpoint around ids: nothing below the head has a gradient",
    "no gradient: embed.weight",
    Own,
)
def reentrant_checkpoint(model, rows):
    b = collate(rows)
    h = checkpoint(lambda ids: model.hidden(ids), b.ids, use_reentrant=True)
    term(log_probs(model.head(h), b.ids), b).backward()


@bug(
    "sequence shards shift their own labels: the token at each border is lost",
    "tokens at place 8 of each row",
    Own,
)
def shards_lose_border(model, rows):
    b = collate(rows, multiple=2)
    half = b.ids.shape[1] // 2
    b.mask[:, half] = 0
    term(log_probs(model(b.ids), b.ids), b, tokens(rows)).backward()


@bug("rows are cut at a maximum length", "tokens behind the first 11 of a row", qwen)
def truncated(model, rows):
    b, limit = collate(rows), max(len(r.ids) for r in rows) - 3
    b = Batch(**{k: x[:, :limit] for k, x in vars(b).items()})
    term(log_probs(hf(model, b), b.ids), b, tokens(rows)).backward()


@bug(
    "the attention mask is made of token values, and pad is in a prompt",
    "cuts out tokens that equal 2",
    qwen,
)
def mask_from_values(model, rows):
    pad = rows[1].prompt[1]
    b = collate(rows, "left", pad=pad)
    term(
        log_probs(model(b.ids, attention_mask=(b.ids != pad).long()).logits, b.ids), b
    ).backward()


# ---- masks ----
@bug("the prompt trains", "prompt tokens train", qwen)
def prompt_trains(model, rows):
    b = collate(rows)
    lp = log_probs(hf(model, b), b.ids)
    old, A = (
        torch.where(b.resp[:, 1:] > 0, b.old[:, 1:], lp.detach()),
        torch.tensor([[r.adv] for r in rows]),
    )
    term(lp, b, J=surrogate(lp, old, A), mask=b.mask + b.attn - b.resp).backward()


@bug("the holes train", "masked tokens train", Own)
def holes_train(model, rows):
    b = collate(rows)
    term(log_probs(model(b.ids), b.ids), b, mask=b.resp).backward()


@bug("the mask ends at the first hole", "no token behind the first hole", Own)
def first_hole(model, rows):
    b = collate(rows)
    holes = (b.resp - b.mask).cumsum(1)
    term(
        log_probs(model(b.ids), b.ids), b, tokens(rows), mask=b.mask * (holes == 0)
    ).backward()


@bug("only the last turn trains", "no token in front of the last hole", Own)
def last_turn(model, rows):
    b = collate(rows)
    ahead = (b.resp - b.mask).flip(1).cumsum(1).flip(1)
    term(
        log_probs(model(b.ids), b.ids), b, tokens(rows), mask=b.mask * (ahead == 0)
    ).backward()


@bug(
    "responses are taken to start behind the longest prompt",
    "tokens before place 9 of a row",
    Own,
)
def from_longest_prompt(model, rows):
    b, first = collate(rows), max(len(r.prompt) for r in rows)
    term(
        log_probs(model(b.ids), b.ids),
        b,
        tokens(rows),
        mask=b.mask * (torch.arange(b.ids.shape[1]) >= first),
    ).backward()


@bug(
    "the last token of each response is dropped",
    "the last token of each response does not train",
    qwen,
)
def eos_dropped(model, rows):
    b = collate(rows, "left")
    b.mask[:, -1] = 0
    term(log_probs(hf(model, b), b.ids), b).backward()


@bug(
    "the first token of each response is dropped",
    "the first token of each response does not train",
    gpt2,
)
def first_dropped(model, rows):
    b = collate(rows)
    first = b.resp * (b.resp.cumsum(1) == 1)
    term(
        log_probs(hf(model, b), b.ids), b, tokens(rows), mask=b.mask * (1 - first)
    ).backward()


@bug(
    "the first token after a hole is dropped",
    "the first token after each hole does not train",
    Own,
)
def mask_eroded(model, rows):
    b = collate(rows)
    after_hole = F.pad(b.resp - b.mask, (1, 0))[:, :-1] > 0
    term(
        log_probs(model(b.ids), b.ids), b, tokens(rows), mask=b.mask * ~after_hole
    ).backward()


@bug("pad tokens are targets", "behind the responses train", Own)
def padding_trains(model, rows):
    b = collate(rows)
    lp = log_probs(model(b.ids), b.ids)
    old, A = (
        torch.where(b.attn[:, 1:] > 0, b.old[:, 1:], lp.detach()),
        torch.tensor([[r.adv] for r in rows]),
    )
    term(lp, b, tokens(rows), surrogate(lp, old, A), b.mask + 1 - b.attn).backward()


@bug(
    "the end of a sequence never trains: pad is eos",
    "tokens that equal 2 do not train",
    functools.partial(qwen, eos_token_id=2),
)
def eos_is_pad(model, rows):
    eos = rows[1].response[-1]
    b = collate(rows, pad=eos)
    term(
        log_probs(hf(model, b), b.ids), b, tokens(rows), mask=b.mask * (b.ids != eos)
    ).backward()


@bug("logits_to_keep takes the last columns, where short rows have padding", "last columns are taken for the response",
     qwen)  # fmt: skip
def kept(model, rows):
    """Score the last n columns, n the longest response, where arrays start with the
    response: wrong for rows that end earlier.
    """
    for part in parts(rows, 4):
        b = collate(part)
        n = max(len(r.response) for r in part)
        z = model(
            b.ids,
            attention_mask=b.attn,
            position_ids=b.pos.long(),
            logits_to_keep=n + 1,
        ).logits[:, :-1]
        lp = (z / T).log_softmax(-1).gather(-1, b.ids[:, -n:, None])[..., 0]
        old, m = (torch.tensor([[*x, *[0] * (n - len(x))] for x in of]) for of in
                  ([r.old for r in part], [r.trains for r in part]))  # fmt: skip
        (
            -(surrogate(lp, old, torch.tensor([[r.adv] for r in part])) * m).sum()
            / tokens(rows)
        ).backward()


# ---- denominators and accumulation ----
def in_parts(
    model, rows, size=3, divide=None, after=lambda model: None, keep=lambda parts: parts
):
    """Compute DAPO's gradient in micro-batches of `size` rows.

    Args:
        divide: of (batch, rows of the part), the denominator of a part, in place of all
            tokens.
        after: is called with the model after each backward pass.
        keep: of the micro-batches, those that run.
    """
    for part in keep(parts(rows, size)):
        b = collate(part)
        z = model(b.ids)
        n = divide(b, part) if divide else tokens(rows)
        term(log_probs(getattr(z, "logits", z), b.ids), b, n).backward()
        after(model)


bug("token means of micro-batches are weighted by their rows", "each result is weighted by its responses", Own)(
    lambda model, rows: in_parts(model, rows, divide=lambda b, part: b.mask.sum() * len(rows) / len(part)))  # fmt: skip
bug("the last, smaller micro-batch is dropped", "responses 6, 7 do not train", Own)(
    lambda model, rows: in_parts(model, rows, keep=lambda p: p[: len(rows) // 3]))  # fmt: skip
bug("the denominator counts the holes", "the normalizer counts masked tokens", Own)(
    lambda model, rows: in_parts(model, rows, 8, lambda b, part: b.resp.sum()))  # fmt: skip
bug("the denominator counts the prompts", "divided by the tokens, prompts included", Own)(
    lambda model, rows: in_parts(model, rows, 8, lambda b, part: b.attn.sum()))  # fmt: skip
bug("the mean runs over padding and prompts", "slots of the padded batch", Own)(
    lambda model, rows: in_parts(model, rows, 4, lambda b, part: 2 * b.mask[:, 1:].numel()))  # fmt: skip
bug("the loss scale of mixed precision is not taken out", "every weight is 1024 times", Own)(
    lambda model, rows: in_parts(model, rows, divide=lambda b, part: tokens(rows) / 1024))  # fmt: skip
bug("the norm is clipped inside the accumulation loop", "clipped to 0.05 after each micro-batch of 3", Own, clip=0.05)(
    lambda model, rows: in_parts(
        model, rows, after=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)))  # fmt: skip
bug("the norm is clipped parameter by parameter", "of each parameter is clipped to norm 0.05", Own, clip=0.05)(
    lambda model, rows: in_parts(
        model, rows, 8, after=lambda m: [nn.utils.clip_grad_norm_([p], 0.05) for p in m.parameters()]))  # fmt: skip


bug("gradients are clipped by value", "each entry of the gradient is clipped to 0.01", Own)(
    lambda model, rows: in_parts(
        model, rows, 8, after=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01)))  # fmt: skip
bug("micro-batches are weighted by all their tokens", "weighted by its tokens, prompts included", Own)(
    lambda model, rows: in_parts(
        model, rows, 4, lambda b, part: b.mask.sum() * sum(len(r.ids) for r in rows) / b.attn.sum()))  # fmt: skip


@bug(
    "gradients are divided by the tokens of the last micro-batch",
    "divided by 10: the tokens of the last micro-batch, of 2 responses",
    Own,
)
def last_normalizer(model, rows):
    in_parts(model, rows, divide=lambda b, part: 1)
    for p in model.parameters():
        p.grad /= tokens(parts(rows, 3)[-1])


bug("the sum is divided by the number of rows and a fixed length", "divided by 128: 8 responses x 16", Own)(
    lambda model, rows: in_parts(model, rows, divide=lambda b, part: 16 * len(rows)))  # fmt: skip


@bug(
    "the mean is taken per response, then over responses",
    "aggregated by seq-mean-token-mean",
    qwen,
)
def per_response_mean(model, rows):
    b = collate(rows, "left")
    J = (
        surrogate(log_probs(hf(model, b), b.ids), b.old[:, 1:], b.adv[:, 1:])
        * b.mask[:, 1:]
    )
    (-(J.sum(1) / b.mask.sum(1)).mean()).backward()


# ---- the loss and what goes in ----
def with_loss(model, rows, J, side="right"):
    """Compute the gradient of the terms J(lp, old, A, ref, batch, logits), each [B, S -
    1], averaged over tokens. side: of the padding.
    """
    b = collate(rows, side)
    z = hf(model, b) if side == "left" else model(b.ids)
    z = getattr(z, "logits", z)
    lp = log_probs(z, b.ids)
    term(
        lp, b, J=J(lp, b.old[:, 1:], b.adv[:, 1:], b.ref[:, 1:], b, z[:, :-1] / T)
    ).backward()


def k3(d):
    return d.exp() - 1 - d


def entropy(z):
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def of(J, side="right"):
    return lambda model, rows: with_loss(model, rows, J, side)


bug("the ratio is clipped without the minimum", "the minimum is missing", qwen)(
    of(lambda lp, old, A, *_: (lp - old).exp().clamp(0.8, 1.28) * A, "left"))  # fmt: skip
bug("the upper clip is 1.2", "eps_high is between", Own)(
    of(lambda lp, old, A, *_: surrogate(lp, old, A, 0.8, 1.2))
)
bug("there is no clip", "no bound has an effect on the gradient", gpt2)(
    of(lambda lp, old, A, *_: (lp - old).exp() * A)
)
bug("the old log-probabilities are shifted by one", "one token too early", Own)(
    of(lambda lp, old, A, *_: surrogate(lp, F.pad(old, (0, 1))[:, 1:], A)))  # fmt: skip
bug("advantages are normalized once more in each batch", "the advantages are normalized again", Own)(
    of(lambda lp, old, A, ref, b, z: surrogate(
        lp, old, (A - (a := A.sum(1) / b.resp.sum(1)).mean()) / a.std())))  # fmt: skip
bug("old log-probabilities are recomputed at temperature 1", "the current ones at temperature 1", qwen)(
    of(lambda lp, old, A, ref, b, z: surrogate(lp, log_probs(T * F.pad(z.detach(), (0, 0, 0, 1)), b.ids, 1.0), A),
       "left"))  # fmt: skip
bug("the entropy bonus is taken at temperature 1", "bonus is taken at temperature 1", Own, entropy_coef=0.05)(
    of(lambda lp, old, A, ref, b, z: surrogate(lp, old, A) + 0.05 * entropy(z * T)))  # fmt: skip
bug("responses with a negative advantage do not train", "responses 1, 3, 5, 7 do not train", qwen)(
    of(lambda lp, old, A, *_: surrogate(lp, old, A) * (A > 0), "left"))  # fmt: skip
bug("UP: positive tokens keep the ratio", "the ratio still multiplies A", qwen, objective="up_dapo")(
    of(lambda lp, old, A, *_: torch.where(A > 0, (lp - old).exp() * A, surrogate(lp, old, A))))  # fmt: skip
bug("the KL term has no gradient", "the KL term has no gradient", qwen, beta=0.1)(
    of(lambda lp, old, A, ref, *_: surrogate(lp, old, A) - 0.1 * k3(ref - lp.detach())))  # fmt: skip
bug("the KL estimator has its arguments exchanged", "exchanged in the KL term", Own, beta=0.1)(
    of(lambda lp, old, A, ref, *_: surrogate(lp, old, A) - 0.1 * k3(lp - ref)))  # fmt: skip
bug("the KL term is to the old policy", "the old policy is used as the reference model", qwen, beta=0.1)(
    of(lambda lp, old, A, *_: surrogate(lp, old, A) - 0.1 * k3(old - lp), "left"))  # fmt: skip
bug("entropy is punished", "the coefficient of the entropy bonus is -0.1", qwen, entropy_coef=0.1)(
    of(lambda lp, old, A, ref, b, z: surrogate(lp, old, A) - 0.1 * entropy(z)))  # fmt: skip
bug("a z-loss that is not declared", "the coefficient of the z-loss is 0.01", Own)(
    of(lambda lp, old, A, ref, b, z: surrogate(lp, old, A) - 0.01 * z.logsumexp(-1) ** 2))  # fmt: skip


bug("the log-ratio is clamped to 0.3", "log r above 0.3", Own)(
    of(lambda lp, old, A, *_: surrogate((lp - old).clamp(-0.3, 0.3), 0, A)))  # fmt: skip
for words, at_rollout in {"now": False, "at the rollout": True}.items():
    bug(f"the KL estimate {words} is subtracted from the advantage", "folded into the advantage", qwen, beta=0.1)(
        of(lambda lp, old, A, ref, *_, at_rollout=at_rollout: surrogate(
            lp, old, A - 0.1 * ((old if at_rollout else lp.detach()) - ref)), "left"))  # fmt: skip
for side in ("left", "right"):
    bug(f"the old log-probabilities are the next row's, padded {side}", "probabilities are those of row i + 1", qwen)(
        of(lambda lp, old, A, *_: surrogate(lp, old.roll(-1, 0), A), side))  # fmt: skip


@bug(
    "rows are sorted by length, their advantages are not",
    "the advantages are those of another row: responses are sorted by length",
    qwen,
)
def advantages_not_sorted(model, rows):
    A = torch.tensor([[r.adv] for r in rows])
    with_loss(
        model,
        sorted(rows, key=lambda r: len(r.response)),
        lambda lp, old, *_: surrogate(lp, old, A),
        "left",
    )


for words, term_of, options in (
    ("the entropy bonus", lambda lp, b, z: 0.05 * entropy(z), {"entropy_coef": 0.05}),
    ("the KL term", lambda lp, b, z: -0.1 * k3(b.ref[:, 1:] - lp), {"beta": 0.1}),
):
    said = f"{words}: aggregated by seq-mean-token-mean, not by token-mean"

    @bug(f"{words} is a mean over responses", said, Own, **options)
    def averaged_otherwise(model, rows, term_of=term_of):
        """Add a term that is a mean over responses to DAPO's mean over tokens."""
        b, z = (x := collate(rows)), model(x.ids)
        lp, m = log_probs(z, b.ids), b.mask[:, 1:]
        (
            term(lp, b) - ((term_of(lp, b, z[:, :-1] / T) * m).sum(1) / m.sum(1)).mean()
        ).backward()


@bug(
    "the KL term is taken at temperature 1",
    "the KL term is taken at temperature 1",
    Own,
    beta=0.1,
)
def cold_kl_term(model, rows):
    b = collate(rows)
    z = model(b.ids)
    cold = log_probs(z, b.ids, 1.0)
    (
        term(log_probs(z, b.ids), b) + term(cold, b, J=-0.1 * k3(b.ref[:, 1:] - cold))
    ).backward()


@bug(
    "a KL term of the old policy is added",
    "KL term of the old policy (k2) is subtracted, with the coefficient 0.002",
    Own,
)
def penalty_of_the_old_policy(model, rows):
    b = collate(rows)
    lp = log_probs(model(b.ids), b.ids)
    (term(lp, b) + term(lp, b, J=-1e-3 * (lp - b.old[:, 1:]) ** 2)).backward()


@bug(
    "the advantages are shuffled",
    "the advantages are those of other responses: of 3 0 7 1 6 2 4 5",
    Own,
)
def shuffled_advantages(model, rows):
    b = collate(
        [
            replace(r, adv=rows[i].adv)
            for r, i in zip(rows, (3, 0, 7, 1, 6, 2, 4, 5), strict=True)
        ]
    )
    term(log_probs(model(b.ids), b.ids), b).backward()


@bug(
    "the advantages of a pack lack the holes",
    "laid over all response tokens, one behind the other",
    Own,
)
def advantages_without_holes(model, rows):
    b = pack(rows)
    A = torch.tensor([r.adv for r in rows for t in r.trains if t])
    places = b.resp[0].nonzero()[: len(A), 0]
    b.adv = torch.zeros_like(b.adv)
    b.adv[0, places] = A
    term(log_probs(model(b.ids, allowed=b.same, positions=b.pos), b.ids), b).backward()


@bug(
    "the end of a response is an argmax, which is 0 where there is none",
    "a response without the end token trains by its first token alone",
    functools.partial(qwen, eos_token_id=2),
)
def end_by_argmax(model, rows):
    b = collate(rows)
    for i, r in enumerate(rows):
        last = int((torch.tensor(r.response) == 2).int().argmax())
        b.mask[i, len(r.prompt) + last + 1 :] = 0
    term(log_probs(hf(model, b), b.ids), b).backward()


@bug(
    "left padding has no attention mask",
    "padding is attended to, and positions do not count it",
    Own,
)
def padding_attended_to(model, rows):
    b = collate(rows, "left")
    term(log_probs(model(b.ids, positions=b.pos.long()), b.ids), b).backward()


@bug(
    "the KL term is averaged over the holes as well",
    "masked response tokens train",
    Own,
    beta=0.1,
)
def kl_over_holes(model, rows):
    b = collate(rows)
    lp = log_probs(model(b.ids), b.ids)
    (term(lp, b) + term(lp, b, J=-0.1 * k3(b.ref[:, 1:] - lp), mask=b.resp)).backward()


@bug(
    "advantages are divided by their group's standard deviation again",
    "deviation again in each group",
    Own,
)
def group_std(model, rows):
    def deviation_in_group_of(r):
        return torch.tensor([q.adv for q in rows if q.group == r.group]).std()

    k = torch.stack([1 / deviation_in_group_of(r) for r in rows])[:, None]
    with_loss(model, rows, lambda lp, old, A, *_: surrogate(lp, old, k * A))


@bug(
    "the sum is divided by the tokens that no clip stops",
    "the tokens that no clip stops",
    Own,
)
def divided_by_active(model, rows):
    b = collate(rows)
    lp, A = log_probs(model(b.ids), b.ids), b.adv[:, 1:]
    r = (lp - b.old[:, 1:]).exp().detach()
    term(
        lp, b, (b.mask[:, 1:] * torch.where(A > 0, r < 1.28, r > 0.8)).sum()
    ).backward()


@bug(
    "old log-probabilities are kept of the tokens that train alone",
    "counted without the holes",
    Own,
)
def compressed_old(model, rows):
    b = collate(rows)
    for i, r in enumerate(rows):
        kept = [x for x, t in zip(r.old, r.trains, strict=True) if t]
        b.old[i, len(r.prompt) : len(r.ids)] = torch.tensor(
            kept + [0.0] * (len(r.old) - len(kept))
        )
    term(log_probs(model(b.ids), b.ids), b).backward()


@bug("weight decay is in the loss", "0.02 times the parameters", qwen)
def weight_decay(model, rows):
    b = collate(rows)
    (
        term(log_probs(hf(model, b), b.ids), b)
        + 0.01 * sum((p**2).sum() for p in model.parameters())
    ).backward()


def sequences(model, rows, of):
    """Compute GSPO's gradient with of(log-ratios, mask, response with holes) as the
    log-ratio of each response.
    """
    b = collate(rows, "left")
    d = log_probs(hf(model, b), b.ids) - b.old[:, 1:]
    s, A = (
        of(d, b.mask[:, 1:], b.resp[:, 1:]).exp(),
        torch.tensor([r.adv for r in rows]),
    )
    (-torch.min(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()).backward()


bug("GSPO: the log-ratio is summed", "summed, not averaged", qwen, objective="gspo")(
    lambda model, rows: sequences(model, rows, lambda d, m, R: (d * m).sum(1)))  # fmt: skip
bug("GSPO: the mean counts the holes", "masked tokens train", qwen, objective="gspo")(
    lambda model, rows: sequences(model, rows, lambda d, m, R: (d * R).sum(1) / R.sum(1)))  # fmt: skip
bug("GSPO: the mean is over the padded width", "divided by the padded width", qwen, objective="gspo")(
    lambda model, rows: sequences(model, rows, lambda d, m, R: (d * m).mean(1)))  # fmt: skip


def means(model, rows, length):
    """Compute GRPO's gradient with length(batch) as the length of each response."""
    b = collate(rows)
    J = (
        surrogate(log_probs(model(b.ids), b.ids), b.old[:, 1:], b.adv[:, 1:], 0.8, 1.2)
        * b.mask[:, 1:]
    )
    (-(J.sum(1) / length(b)).mean()).backward()


bug("GRPO: a token mean", "aggregated by token-mean", Own, objective="grpo")(
    lambda model, rows: means(model, rows, lambda b: b.mask.sum() / len(rows)))  # fmt: skip
bug("GRPO: divided by a fixed length", "divided by 192: 8 responses x 24", Own, objective="grpo")(
    lambda model, rows: means(model, rows, lambda b: 24))  # fmt: skip
bug("GRPO: divided by the length with holes", "the normalizer counts masked tokens", Own, objective="grpo")(
    lambda model, rows: means(model, rows, lambda b: b.resp.sum(1)))  # fmt: skip


# ---- ranks ----
def ranks(model, rows, shares, divide):
    """Run one backward pass for each rank's rows, and leave the mean of their
    gradients, as DDP does. divide: of a rank's batch, its denominator.
    """
    found = []
    for share in shares:
        model.zero_grad()
        b = collate(share)
        z = model(b.ids)
        term(log_probs(getattr(z, "logits", z), b.ids), b, divide(b)).backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for p, *g in zip(model.parameters(), *found, strict=True):
        p.grad = sum(g) / len(g)


bug("each rank divides by its own tokens", "token-mean is taken over 2 ranks", qwen)(
    lambda model, rows: ranks(model, rows, [rows[::2], rows[1::2]], lambda b: b.mask.sum()))  # fmt: skip
bug("DDP's mean over the ranks is not taken out", "every weight is 1/2 times", Own)(
    lambda model, rows: ranks(model, rows, [rows[:4], rows[4:]], lambda b: tokens(rows)))  # fmt: skip
bug("gradients are not reduced", "responses 4, 5, 6, 7 do not train", Own)(
    lambda model, rows: ranks(model, rows, [rows[:4]], lambda b: tokens(rows) / 2))  # fmt: skip
bug("the last rank's shard is filled up with the first row", "each response has one factor", qwen)(
    lambda model, rows: ranks(model, rows, [rows[:3], rows[3:6], rows[6:] + rows[:1]],
                              lambda b: tokens(rows + rows[:1]) / 3))  # fmt: skip


@bug(
    "DDP reduces the gradients of the last micro-batch alone",
    "only the last micro-batch, of 2 responses, is reduced",
    Own,
)
def last_reduced(model, rows):
    local, last = [], []
    for rank in (rows[::2], rows[1::2]):
        for found, part in ((local, rank[:2]), (last, rank[2:])):
            ranks(model, rows, [part], lambda b: tokens(rows) / 2)
            found.append([p.grad for p in model.parameters()])
    for p, own, a, b in zip(model.parameters(), local[0], *last, strict=True):
        p.grad = own + (a + b) / 2


def one_rank(rank, store, model, rows, local, out):
    """Run one of two ranks: compute its gradient, average it over both, and let rank 0
    write it to a file.
    """
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    b = collate(rows[:3] if rank == 0 else rows[3:])
    n = b.mask.sum()
    if not local:
        torch.distributed.all_reduce(n)
        n = n / 2
    term(log_probs(model(b.ids), b.ids), b, n).backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= 2
    if rank == 0:
        torch.save({k: p.grad for k, p in model.named_parameters()}, out)
    torch.distributed.destroy_process_group()


def gloo(model, rows, local):
    """Run the step in two processes, and leave their gradients in the model. local:
    each divides by its own tokens.
    """
    with tempfile.TemporaryDirectory() as d:
        torch.multiprocessing.spawn(
            one_rank, (f"{d}/store", model, rows, local, f"{d}/out"), nprocs=2
        )
        grads = torch.load(f"{d}/out")
    for k, p in model.named_parameters():
        p.grad = grads[k]


bug("two gloo ranks with their own means", "token-mean is taken over", Own)(
    functools.partial(gloo, local=True)
)
right("two gloo ranks, the token count all-reduced", Own)(
    functools.partial(gloo, local=False)
)
