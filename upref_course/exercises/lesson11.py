# SPDX-License-Identifier: Apache-2.0
"""Lesson 11: a step with three bugs.

The function runs and its loss goes down. Three of its lines are wrong. Repair them,
delete the line `todo = ...`, then run `upref learn 11` in this folder.
"""

import torch


def loss(logits, ids, prompt, trains, old, A, tokens, temperature):
    """Return DAPO's loss of one response, as its part of the whole step.

    The loss is -(1 / tokens) Σ_t min(r_t A, clip(r_t, 0.8, 1.28) A).

    Args:
        logits: [S, V], of the model; logits[s] predict the token after ids[s].
        ids: [S], the prompt's tokens, then the response's.
        prompt: how many of them are the prompt's.
        trains: [n], of each response token, whether it trains: a tool's output does
            not.
        old: [n], the response tokens' log-probabilities when they were sampled, at the
            temperature.
        A: the advantage.
        tokens: how many tokens train in the whole step, of which this response is a
            part.
        temperature: of the sampler.
    """
    todo = ...
    log_prob = logits.log_softmax(-1)
    lp = log_prob[prompt:].gather(-1, ids[prompt:, None])[:, 0]
    r = (lp - old).exp()
    J = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
    return -(J * trains).sum() / trains.sum()


if __name__ == "__main__":  # `python lesson11.py` tries it
    z = torch.zeros(4, 3, requires_grad=True)
    value = loss(
        z,
        torch.tensor([0, 1, 2, 0]),
        2,
        torch.tensor([True, False]),
        torch.tensor([-1.0, -1.2]),
        1.0,
        8,
        0.7,
    )
    value.backward()
    print("loss:", value.item())
    print(
        "gradient by the logits; row 1 predicts the first response token:",
        z.grad,
        sep="\n",
    )
