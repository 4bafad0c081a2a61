# SPDX-License-Identifier: Apache-2.0
"""An adapter for a training loop of a few lines. It needs no import of upref."""

import torch
from torch.nn.utils.rnn import pad_sequence

EPSILON = {"ppo_clip": (0.2, 0.2), "dapo": (0.2, 0.28), "grpo": (0.2, 0.2)}


class Plain:
    """A loop in plain PyTorch: padded rows, a clipped ratio, a mean over tokens or over responses."""

    name = "plain loop 1.0"

    def supports(self, case):
        if case.objective not in EPSILON:
            return f"the loop has no {case.objective}"
        if case.entropy_coef:
            return "the loop has no entropy bonus"
        return ""

    def scale(self, case):
        return 1.0

    def settings(self, case):
        low, high = EPSILON[case.objective]
        return {"eps_low": str(low), "eps_high": str(high), "temperature": str(case.temperature)}

    def step(self, model, rows, case):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for update in chunks(rows, case.updates):
            tokens = sum(sum(row.trains) for row in update)
            for part in chunks(update, case.micro_batches):
                self.loss(model, part, case, tokens, len(update)).backward()
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, model, rows, case, tokens, responses):
        lp = log_probs(model, rows, case.temperature)
        old, ref = (pad([getattr(row, name) for row in rows]) for name in ("old", "ref"))
        mask = pad([row.trains for row in rows]).bool()
        adv = torch.tensor([row.adv for row in rows])[:, None]
        low, high = EPSILON[case.objective]
        ratio = (lp - old).exp()
        per_token = torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
        if case.beta:
            per_token = per_token - case.beta * ((ref - lp).exp() - (ref - lp) - 1)
        per_token = per_token * mask
        if case.objective == "grpo":
            return -(per_token.sum(1) / mask.sum(1)).sum() / responses
        return -per_token.sum() / tokens


def log_probs(model, rows, temperature):
    """The log-probabilities of the response tokens, padded on the right."""
    ids = [torch.tensor(row.ids) for row in rows]
    attention = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    padded = pad_sequence(ids, batch_first=True)
    logits = model(padded, attention_mask=attention).logits[:, :-1].float() / temperature
    every = logits.log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
    parts = [lp[len(row.prompt) - 1 : len(row.ids) - 1] for lp, row in zip(every, rows, strict=True)]
    return pad_sequence(parts, batch_first=True)


def pad(lists):
    return pad_sequence([torch.tensor(x, dtype=torch.float32) for x in lists], batch_first=True)


def chunks(rows, n):
    size = len(rows) // n
    return [rows[i : i + size] for i in range(0, len(rows), size)]
