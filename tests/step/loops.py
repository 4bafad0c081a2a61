# SPDX-License-Identifier: Apache-2.0
"""Bare training steps, right ones, and ones with one bug each: a table to which rows
can be added. Shapes: B rows, S columns, and S - 1 predicted tokens.

A row of BUGS is `(name, cause, step)`:

name   what was planted, in words; unique
cause  words that `report.failures[0].cause` must hold; "" where the step must be
rejected and no cause is promised
step   `(model, rows) -> None`: forward, loss and backward of a Qwen3 of two layers on
       eight rows (upref/step/inputs/rows.py), meant to be DAPO at temperature T, with
       the bug in it; it leaves gradients in `.grad`

test_check_step.py asks that every row is rejected with its cause. `policy_step` has
switches for most of what a bug needs (`with_(...)` makes a step of them); a bug that
needs something else is a function of its own.
"""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

T = 0.7


def qwen3(seed=0, **changes):
    """Return a Qwen3 of two layers with weights of this seed; `changes` are settings of
    its config.
    """
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, eos_token_id=2, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**settings | changes))


def collated(rows, left=False, pad=2):
    """Return ids, attention mask, trains, old, adv and ref of rows, each [B, S].

    The last four are 0 outside of the responses. left: pad on the left.
    """
    width = max(len(r.ids) for r in rows)
    ids = torch.full((len(rows), width), pad)
    seen = torch.zeros(len(rows), width)
    trains, old, adv, ref = (torch.zeros(len(rows), width) for _ in range(4))
    for i, r in enumerate(rows):
        at = slice(width - len(r.ids), width) if left else slice(0, len(r.ids))
        tail = slice(at.stop - len(r.response), at.stop)
        ids[i, at], seen[i, at] = torch.tensor(r.ids), 1
        trains[i, tail], adv[i, tail] = (
            torch.tensor(r.trains).float(),
            torch.as_tensor(r.adv).float(),
        )
        old[i, tail], ref[i, tail] = torch.tensor(r.old), torch.tensor(r.ref)
    return ids, seen, trains, old, adv, ref


def log_probs(model, ids, seen, temperature=T, positions=True, shift=True):
    """Return the log-probabilities of the tokens behind the first, [B, S - 1].

    seen: the attention mask. positions: count positions from it. shift: if False, each
    token is scored by its own logits (the bug of a forgotten shift).
    """
    where = (seen.cumsum(1) - 1).clamp(min=0).long() if positions else None
    z = (
        model(input_ids=ids, attention_mask=seen, position_ids=where).logits.float()
        / temperature
    )
    z, labels = (z[:, :-1], ids[:, 1:]) if shift else (z[:, 1:], ids[:, 1:])
    return z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def surrogate(lp, old, adv, low=0.2, high=0.28):
    """Return DAPO's terms; low and high are the distances of the bounds from 1."""
    r = (lp - old).exp()
    return torch.minimum(r * adv, r.clamp(1 - low, 1 + high) * adv)


def policy_step(
    model, rows, *, size=4, left=False, temperature=T, normalizer="step", mask=lambda m, *_: m, low=0.2, high=0.28,
    old=lambda o, lp: o, after=lambda model: None, seen=lambda s, ids: s, **forward,
):  # fmt: skip
    """Compute the gradient of DAPO's loss in micro-batches; without switches, it is
    right.

    Args:
        model, rows: of the step.
        size: rows of a micro-batch.
        left: pad on the left.
        temperature: of the logits.
        normalizer: "step" divides by all tokens, "micro-batch" averages the means of
            micro-batches, and "twice" divides by their number once more.
        mask: of (trains, attention mask, ids), what trains.
        low, high: distances of the bounds from 1.
        old: of (old, lp), the old log-probabilities.
        after: is called with the model after each backward pass.
        seen: of (attention mask, ids), what is attended to.
        forward: settings of `log_probs`.
    """
    total = sum(sum(r.trains) for r in rows)
    parts = [rows[i : i + size] for i in range(0, len(rows), size)]
    for part in parts:
        ids, there, trains, lp_old, adv, _ = collated(part, left)
        lp = log_probs(model, ids, seen(there, ids), temperature, **forward)
        m = mask(trains, there, ids)[:, 1:]
        J = surrogate(lp, old(lp_old[:, 1:], lp), adv[:, 1:], low, high)
        n = {
            "step": total,
            "micro-batch": m.sum() * len(parts),
            "twice": total * len(parts),
        }[normalizer]
        (-(J * m).sum() / n).backward()
        after(model)


def right(model, rows):
    policy_step(model, rows)


def with_(**switches):
    return lambda model, rows: policy_step(model, rows, **switches)


def last_only(model, rows):
    policy_step(model, rows[:4])
    model.zero_grad()
    policy_step(model, rows[4:])


def zeroed(model, rows):
    """Run the step twice, and leave the sum of both gradients: twice the right one."""
    policy_step(model, rows, after=lambda model: None)
    kept = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    policy_step(model, rows)
    for n, p in model.named_parameters():
        p.grad = p.grad + kept[n]


RIGHT = [
    ("padded right", right),
    ("padded left", with_(left=True)),
    ("row by row", with_(size=1)),
    ("one batch", with_(size=8)),
    ("uneven micro-batches", with_(size=3)),
]
BUGS = [
    ("temperature forgotten", "the temperature is left out", with_(temperature=1.0)),
    ("times the temperature", "multiplied by the temperature", with_(temperature=1 / T)),
    ("divided by accumulation steps again", "1/2", with_(normalizer="twice")),
    ("mean of micro-batch means", "token-mean is taken over micro-batches of 4", with_(normalizer="micro-batch")),
    ("labels not shifted", "labels are not shifted", with_(shift=False)),
    ("old log-probs are the current ones", "the old log-probabilities are the current ones",
     with_(old=lambda o, lp: lp.detach())),
    ("mask from token values", "the attention mask", with_(seen=lambda s, ids: (ids != 2).float())),
    ("no attention mask", "padding without a mask", with_(left=True, seen=lambda s, ids: torch.ones_like(s))),
    ("gradients zeroed in the loop", "responses 0, 1, 2, 3 do not train", last_only),
    ("an old gradient is left", "every weight is 2 times", zeroed),
    ("head without gradient", "lm_head", with_(after=lambda model: model.lm_head.weight.grad.zero_())),
]  # fmt: skip
