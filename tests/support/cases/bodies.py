# SPDX-License-Identifier: Apache-2.0
"""What the bodies of the cases are made of.

A body is a function of what it names: d = log r and A, 0 where masked; m, the mask as
bool; lp and old, 0 where masked; and the arguments ref_log_prob, group, entropy,
rollout_log_probs and num_micro_batches. `loss` makes it the loss that is checked, with
a state of its own.
"""

import inspect

import torch
from torch.nn.functional import pad


def calm(mask, *xs):
    """Return each tensor with 0 in masked slots."""
    return [torch.where(mask, x, 0) for x in xs]


def named(name, fn):
    """Give the function this name, and return it."""
    fn.__name__ = name
    return fn


def tok(J, m, kept=None):
    """Return minus the mean of J over the tokens of the batch. kept: the tokens that
    train; the others stay in the denominator.
    """
    return -(J * (m if kept is None else kept)).sum() / m.sum()


def seq(J, m, kept=None):
    """Return minus the mean over responses of their means over tokens. kept: the tokens
    that train; the others stay in the denominator.
    """
    return -((J * (m if kept is None else kept)).sum(1) / m.sum(1)).mean()


def clipped(d, A, low=0.8, high=1.28):
    """Return PPO's terms min(r A, clip(r) A) of d = log r, with DAPO's bounds unless
    others are given.
    """
    r = d.exp()
    return torch.minimum(r * A, r.clamp(low, high) * A)


def even(d, A):
    """Return PPO's terms with the bounds 0.8 and 1.2."""
    return clipped(d, A, 0.8, 1.2)


def up(lp, d, A, high=1.28):
    """Return UP's terms: A lp where A > 0, else PPO's."""
    return torch.where(A > 0, A * lp, clipped(d, A, 0.8, high))


def dual(J, A, c):
    """Return the terms J, which are at least c A where A < 0: the dual clip."""
    return torch.where(A < 0, torch.maximum(J, c * A), J)


def mean(x, m):
    """Return the mean over the tokens of each response, [B]."""
    return (x * m).sum(1) / m.sum(1)


def gspo(log_s, a, low=3e-4, high=4e-4):
    """Return GSPO's loss of log s and A of each response, [B]."""
    s = log_s.exp()
    return -torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a).mean()


def span(m):
    """Return where a slot lies between the first and the last trained token of its
    response, both included.
    """
    return (m.cumsum(1) > 0) & (m.flip(1).cumsum(1).flip(1) > 0)


def turns(m):
    """Return the number of each token's turn, from 1; 0 in masked slots. A turn is a
    run of trained tokens without a hole.
    """
    return (m & ~pad(m, (1, 0))[:, :-1]).cumsum(1) * m


def last_turn(m):
    """Return where a slot belongs to the last turn of its response.

    In a response without a token that is every slot.
    """
    return turns(m) == turns(m).max(1, keepdim=True).values


def k3(lp, ref, m):
    """Return k3 of log π_θ and log π_ref for each token; 0 in masked slots."""
    x = torch.where(m, ref - lp, 0)
    return x.exp() - 1 - x


def binary_kl(x, y):
    """Return KL(Bern(e^x) ‖ Bern(e^y)), of two log-probabilities."""
    return x.exp() * (x - y) - torch.expm1(x) * (
        torch.log(-torch.expm1(x)) - torch.log(-torch.expm1(y))
    )


class Backward(torch.autograd.Function):
    """DAPO's terms with a backward pass written by hand, in which alive(r, A) says
    where a term has a gradient. scaled: whether the gradient from above multiplies it;
    if not, it is taken to be -1.
    """

    @staticmethod
    def forward(ctx, d, A, alive, scaled):
        ctx.kept = d, A, alive, scaled
        return clipped(d, A)

    @staticmethod
    def backward(ctx, g):
        d, A, alive, scaled = ctx.kept
        w = torch.where(alive(d.exp(), A), d.exp() * A, 0)
        return g * w if scaled else -w, None, None, None


def corrected(d, A, m, rho, term=clipped, over=tok):
    """Return the loss of terms times rho; `term` makes the terms of (d, A), and `over`
    aggregates them.
    """
    return over(term(d, A) * rho, m)


def ratio(m, old, mu):
    """Return π_old/μ of each token; 1 in masked slots."""
    return torch.where(m, old - mu, 0).exp()


MAIN = ("log_prob", "old_log_prob", "advantages", "mask")


def loss(body):
    """Return the body as a loss `(log_prob, old_log_prob, advantages, mask, ...)` with
    an empty memory of its own.

    Its signature has the four arguments and those of the body's names that are
    arguments. `body` is kept as its attribute.
    """
    wants, memory, calls = list(inspect.signature(body).parameters), {}, []
    own = [n for n in wants if "_" in n or n in ("group", "entropy")]

    def fn(log_prob, old_log_prob, advantages, mask, **given):
        """Call the body with what it names: inputs with 0 in masked slots, the memory,
        the number of the call, and the arguments given.
        """
        calls.append(1)
        m = mask.bool()
        lp = torch.where(m, log_prob.expand_as(m), 0)
        old = torch.where(m, old_log_prob.expand_as(m), 0)
        A = torch.where(m, advantages.expand_as(m), 0)
        here = {"lp": lp, "old": old, "A": A, "m": m, "d": lp - old}
        here |= {"memory": memory, "call": len(calls)}
        every_value = here | default | given
        return body(**{name: every_value[name] for name in wants})

    kind, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, {"num_micro_batches": 1}
    every = [
        inspect.Parameter(n, kind, default=default.get(n, inspect.Parameter.empty))
        for n in (*MAIN, *own)
    ]
    fn.__signature__, fn.body = inspect.Signature(every), body
    return fn
