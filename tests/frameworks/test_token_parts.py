# SPDX-License-Identifier: Apache-2.0
"""An audit's cases of GAE, of critics and of teachers tell right functions from wrong
ones.
"""

import pytest
import torch
from torch import Tensor

from upref_frameworks.audits import token_parts
from upref_frameworks.audits.components import Component, rows

HP = {"gamma": 0.9, "lam": 0.8}


def difference(kind, found, promise, hp=None):
    """Return how far a function is from its promise over all cases."""
    part = Component(kind, "own", found, promise, hp or {})
    [row] = rows("own", (part,))
    assert row.ok == (row.difference <= part.tol)
    return row.difference


@pytest.mark.parametrize(
    "kind, promises",
    [
        ("token_advantages", token_parts.ADVANTAGES),
        ("value", token_parts.VALUES),
        ("distillation", token_parts.DIVERGENCES),
    ],
)
def test_each_reference_is_told_from_the_others(kind, promises):
    of_kind = HP if kind == "token_advantages" else {}
    reference = {
        name: Component(kind, "own", f, name, of_kind).reference()
        for name, f in promises.items()
    }
    first, *others = list(promises)[:6]
    assert difference(kind, reference[first], first, of_kind) == 0
    for name in others:
        assert difference(kind, reference[name], first, of_kind) > 1e-3, name


def gae(r: Tensor, v: Tensor, m: Tensor, skips: bool, lam: float = 0.8) -> Tensor:
    """Return GAE in numbers. skips: the sum is carried over slots that are not trained."""
    A, next_value, total = [], torch.zeros(len(r)).to(r), torch.zeros(len(r)).to(r)
    for k in reversed(range(r.shape[1])):
        now = r[:, k] + 0.9 * next_value - v[:, k] + 0.9 * lam * total
        trained = m[:, k] if skips else torch.ones_like(m[:, k])
        total = trained * now + (1 - trained) * total
        next_value = trained * v[:, k] + (1 - trained) * next_value
        A.append(total)
    return torch.stack(A[::-1], 1)


@pytest.mark.parametrize(
    "right, settings",
    [(True, {"skips": True}), (False, {"skips": False})],
)
def test_a_tool_s_tokens_are_seen(right, settings):
    found = token_parts.on_trained(lambda r, v, m: gae(r, v, m, **settings))
    off = difference("token_advantages", found, "gae", HP)
    assert off < 1e-12 if right else off > 0.1


def test_a_gradient_is_seen_where_the_value_is_right():
    def detached(values, old, returns, mask):
        """Return the clipped loss of a critic, whose gradient is that of the plain one."""
        clipped = token_parts.VALUES["clipped, token-mean"](values, old, returns, mask)
        plain = token_parts.VALUES["mse, token-mean"](values, old, returns, mask)
        return plain - plain.detach() + clipped.detach()

    assert difference("value", detached, "clipped, token-mean") > 0.01


@pytest.mark.parametrize("right", [True, False])
def test_a_loss_of_sampled_tokens_is_judged_in_expectation(right):
    def of_tokens(student, teacher, tokens):
        """Return the loss of sampled tokens whose weight is a constant (right), or the
        log-ratio itself (k1), whose gradient is 0 on average.
        """
        at = tokens[..., None]
        lp = student.log_softmax(-1).gather(-1, at)[..., 0]
        lp_teacher = teacher.log_softmax(-1).gather(-1, at)[..., 0]
        return (lp - lp_teacher).detach() * lp if right else lp - lp_teacher

    found = token_parts.in_expectation(of_tokens)
    off = difference("distillation", found, "sampled_reverse_kl")
    assert off < 1e-9 if right else off > 0.01


def test_the_typical_batch_has_a_tool_s_tokens():
    rewards, values, mask = token_parts.typical_advantage_arguments()
    inside = ~mask & (mask.cumsum(1) > 0) & (mask.flip(1).cumsum(1).flip(1) > 0)
    assert inside.any(1).float().mean() > 0.9
    assert rewards[~mask].count_nonzero() == 0 and rewards.any()
    assert values.std() > 0.1
