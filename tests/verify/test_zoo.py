# SPDX-License-Identifier: Apache-2.0
"""The zoo: every wrong loss is shown to be wrong without the checker.

`witnesses` is the second opinion: a handful of batches on which the loss is compared
with the registry's closed form.
"""

import functools
import inspect
import math
from dataclasses import replace

import pytest
import torch

import upref
from tests.support import zoo
from upref.aggregation import Totals
from upref.rollouts import Rollouts
from upref.weights.batches import batch

EDGES = (-1e-9, 1e-9)  # exactly on a bound, rounding decides for whoever compares logs
TOL = 1e-6  # of the largest weight: beyond it a gradient is wrong
# 1e-8 in a denominator is right, and so is a constant in float32
RIGHT = dict(rtol=2e-7, atol=1e-9)


# ---- the two sides -------------------------------------------------------------------
def inputs(b: Rollouts, fill: float = 0.0) -> dict[str, torch.Tensor]:
    """Return the arguments of a loss: the batch with `fill` in masked slots, advantages
    [B, T], the old policy for a missing reference.
    """

    def filled(x):
        return torch.where(b.mask, x, fill)

    x = dict(
        log_prob=filled(b.logp),
        old_log_prob=filled(b.logp_old),
        advantages=filled(b.adv.expand_as(b.logp)),
        mask=b.mask,
    )
    x["ref_log_prob"] = filled(b.logp_ref if b.logp_ref is not None else b.logp_old)
    return x | {
        "group": b.group
        if b.group is not None
        else torch.zeros(len(b.mask), dtype=torch.long)
    }


def found(case, x: dict[str, torch.Tensor], **hp):
    """Return (value, gradient by log_prob) of the case's loss on copies of those inputs
    that it takes.
    """
    takes = inspect.signature(case.function).parameters
    x = {k: v.clone() for k, v in x.items() if k in takes}
    lp = x["log_prob"].requires_grad_()
    known = (
        hp
        if any(p.kind is p.VAR_KEYWORD for p in takes.values())
        else {k: v for k, v in hp.items() if k in takes}
    )
    value = case.function(**(x | {"log_prob": lp}), **known)
    return value.detach(), torch.autograd.grad(value, lp)[0]


def expected(case, b: Rollouts, **hp):
    """Return the gradient of the objective that the case promises; one group if the
    loss takes no `group`.
    """
    if "group" not in inspect.signature(case.function).parameters:
        b = replace(b, group=None, totals=b.totals and Totals.of(b.mask))
    lp = b.logp.detach().clone().requires_grad_()
    return torch.autograd.grad(
        upref.get(case.objective).loss(replace(b, logp=lp), **hp), lp
    )[0]


def differs(a: torch.Tensor, b: torch.Tensor) -> bool:
    # a NaN differs
    return not bool(((a - b).abs() <= TOL * b.abs().max().clamp(min=1e-6)).all())


# ---- batches -------------------------------------------------------------------------
def grid(case, **hp) -> Rollouts:
    b = batch(upref.get(case.objective), edges=EDGES, **hp)
    return replace(
        b, logp_ref=b.logp_old - 0.3 * torch.arange(len(b.mask))[:, None] / len(b.mask)
    )


def build(log_r, old, A, mask=None, group=None) -> Rollouts:
    """Return a batch of log-ratios, old log-probabilities and advantages that are
    broadcast to one shape; every slot trains unless a mask is given.
    """
    log_r, old, A = (torch.as_tensor(x, dtype=torch.float64) for x in (log_r, old, A))
    shape = torch.broadcast_shapes(log_r.shape, old.shape, A.shape)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    old = old.expand(shape)
    return Rollouts(
        old + log_r, old, A.expand(shape).contiguous(), mask, group, logp_ref=old - 0.5
    )


def spread(shape, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=g, dtype=torch.float64)


ADV = torch.tensor([[1.0], [-1.0], [0.5], [-2.0], [1.5], [-0.5]], dtype=torch.float64)
GROUP = torch.tensor([0, 1, 0, 1, 1, 0])
LENGTHS = torch.tensor([[1], [5], [3], [8], [2], [4]])


def full(r=1.0) -> Rollouts:
    """Return six responses of eight tokens, all inside every bound, or with r = 0 at a
    ratio of 1.
    """
    return build(
        r * spread((6, 8), 1, 0.4), -3 - spread((6, 8), 2).abs(), ADV, group=GROUP
    )


def ragged(prefix=True) -> Rollouts:
    """Return an on-policy batch of six responses of one to eight tokens.

    prefix=False: padded on the left, with a hole in the longest response.
    """
    t = torch.arange(8)
    mask = t < LENGTHS if prefix else t >= 8 - LENGTHS
    mask = mask & ((t != 4) | (LENGTHS < 8)) if not prefix else mask
    return build(0.0, -3 - spread((6, 8), 2).abs(), ADV, mask, GROUP)


# ---- one probe per oracle ------------------------------------------------------------
def off(case, b: Rollouts, **hp) -> bool:
    return differs(found(case, inputs(b), **hp)[1], expected(case, b, **hp))


def bigger(hp: dict) -> list[dict]:
    """Return the hyperparameters with each one moved by itself, so far that it must
    matter; a dict for each.
    """

    def moved(k, v):
        """Return another value of the hyperparameter: 2 for None, a larger one for
        bounds that a step up reaches, a smaller one for others.
        """
        return (
            2.0
            if v is None
            else (v * 1.3 if k in ("c", "tau_pos", "tau_neg", "beta") else v * 0.6)
        )

    return [{k: moved(k, v)} for k, v in hp.items()]


def poisoned(case, hp) -> bool:
    """Return whether 30 or -30 in masked slots changes the value or the gradient, or
    gives them one.
    """
    b = grid(case, **hp)
    clean = found(case, inputs(b), **hp)
    for bad in (30.0, -30.0):
        x = inputs(b, fill=bad)
        # a difference of the two must show
        x["old_log_prob"] = torch.where(b.mask, x["old_log_prob"], 0.0)
        value, g = found(case, x, **hp)
        if (
            not torch.allclose(value, clean[0])
            or differs(g, clean[1])
            or g[~b.mask].any()
        ):
            return True
    return False


def padded(case, hp) -> bool:
    """Return whether columns of padding change the gradient; and, of a mean over tokens
    without groups, whether a masked row does.
    """
    b = full()

    def pad(x, v):
        return torch.nn.functional.pad(x, (3, 2), value=v)

    x = inputs(b)
    wide = {
        k: pad(v, 0.7 if k == "advantages" else -2.0)
        for k, v in x.items()
        if v.ndim == 2 and k != "mask"
    }
    wide |= {"mask": pad(b.mask, False), "group": x["group"]}
    if differs(pad(found(case, x, **hp)[1], 0.0), found(case, wide, **hp)[1]):
        return True
    if (
        upref.get(case.objective).agg not in ("token-mean", "group-token-mean")
        or "group" in inspect.signature(case.function).parameters
    ):
        return False
    # a masked row has no tokens to count
    more = {k: torch.cat([v, torch.zeros_like(v[:1])]) for k, v in x.items()}
    return differs(found(case, x, **hp)[1], found(case, more, **hp)[1][:-1])


def split(case, hp) -> bool:
    """Return whether halves of a batch of equal lengths do not average to the whole."""
    x = inputs(replace(full(), group=torch.zeros(6, dtype=torch.long)))
    halves = [
        found(case, {k: v[i] for k, v in x.items()}, **hp)[1] / 2
        for i in (slice(0, 3), slice(3, 6))
    ]
    return differs(torch.cat(halves), found(case, x, **hp)[1])


def permuted(case, hp) -> bool:
    b = ragged()
    x, order = inputs(b), torch.tensor([3, 0, 5, 1, 4, 2])
    there = found(case, {k: v[order] for k, v in x.items()}, **hp)[1]
    return differs(there, found(case, x, **hp)[1][order])


def extreme(case, hp) -> bool:
    """Return whether the gradient is wrong at |log r| up to 800 in float64, where the
    reference has a finite weight; beyond e^20 anything finite is right.
    """
    rare = build(
        0.0,
        torch.tensor([[-800.0], [-12.0], [-30.0], [-1.0]]),
        torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]),
    )
    if off(case, rare, **hp):
        return True
    token = upref.get(case.objective).level not in ("sequence_mean", "sequence_product")
    sides = [
        (A, x)
        for A in (1.0, -1.0)
        for x in (-800, -12, -5, 5, 12, 19, 800)
        if token or abs(x) < 500
    ]
    A, log_r = torch.tensor(sides, dtype=torch.float64).T[:, :, None]
    b = build(log_r, torch.where(log_r > 0, -log_r - 1, -1.0), A)
    want = expected(case, b, **hp)
    # at e^800 only a weight that has no ratio in it is asked for: textbook code has 0 *
    # inf on clipped tokens
    asked = (log_r < 500) | (want != 0) & (A > 0) & (want.abs() < 10)
    b = build(log_r[asked][:, None], b.logp_old[asked][:, None], A[asked][:, None])
    g, want = found(case, inputs(b), **hp)[1], expected(case, b, **hp)
    return not bool(((g - want).abs() <= TOL * (1e-3 + want.abs())).all())


def mutates(case, hp) -> bool:
    """Return whether the loss writes into an argument."""
    x = inputs(grid(case, **hp), fill=7.0)
    x["old_log_prob"][0, 0] = -750.0
    takes = inspect.signature(case.function).parameters
    x = {k: v for k, v in x.items() if k in takes}
    before = {k: v.clone() for k, v in x.items()}
    case.function(**x, **({} if "c" not in takes else hp))
    return any(not torch.equal(before[k], x[k]) for k in x)


def random(case, hp) -> bool:
    x = inputs(grid(case, **hp))
    first = found(case, x, **hp)[1]
    return any(not torch.equal(first, found(case, x, **hp)[1]) for _ in range(2))


def scales(case, hp) -> bool:
    """Return whether the gradient of 0.01 or 100 times the advantages is not that
    multiple.
    """
    x = inputs(full())
    base = found(case, x, **hp)[1]
    return any(
        differs(found(case, x | {"advantages": k * x["advantages"]}, **hp)[1] / k, base)
        for k in (0.01, 100.0)
    )


def unscaled(case, hp) -> bool:
    """Return whether the gradient of twice the loss is not twice its gradient."""
    x = inputs(full())
    twice = functools.wraps(case.function)(lambda **given: 2 * case.function(**given))
    return differs(
        found(replace(case, function=twice), x, **hp)[1] / 2, found(case, x, **hp)[1]
    )


def zero(case, hp) -> bool:
    x = inputs(full())
    return bool(found(case, x | {"advantages": 0 * x["advantages"]}, **hp)[1].any())


def value_of_padding(case, hp) -> bool:
    b = grid(case, **hp)
    return not torch.allclose(
        found(case, inputs(b, fill=-30.0), **hp)[0], found(case, inputs(b), **hp)[0]
    )


PROBES = {
    "gradient": lambda case, hp: off(case, grid(case, **hp), **hp),
    "aggregation": lambda case, hp: off(case, ragged(), **hp) or off(case, ragged(prefix=False), **hp),
    "on-policy": lambda case, hp: off(case, full(r=0.0), **hp),
    "dead-hyperparameter": lambda case, hp: any(
        off(case, grid(case, **(hp | new)), **(hp | new))
        for new in bigger(upref.get(case.objective).hyperparameters | hp)
        if not {"beta", "c"} & new.keys() - hp.keys()
    ),
    "micro-batches": split, "padding": padded, "masked-values": poisoned, "extremes": extreme, "scaling": scales,
    "value": value_of_padding, "permutation": permuted, "determinism": random, "mutation": mutates,
    "zero-advantage": zero, "loss-scale": unscaled,
}  # fmt: skip
# a declared KL term is no defect of these
KL = {"zero-advantage", "on-policy", "scaling", "extremes"}


def witnesses(case, among=frozenset(PROBES)) -> set[str]:
    """Return those of these oracles whose probe finds something wrong with the case."""
    skip = KL if case.hp.get("beta") else set()
    return {
        name
        for name, probe in PROBES.items()
        if name in among - skip and probe(case, case.hp)
    }


# ---- without the checker -------------------------------------------------------------
@pytest.mark.parametrize("case", zoo.WRONG, ids=str)
def test_wrong_is_wrong(case):
    assert case.why and case.oracles
    assert witnesses(case, case.oracles)


@pytest.mark.parametrize(
    "case", zoo.RIGHT, ids=lambda c: f"{c}-{c.objective}-{sorted(c.hp)}"
)
def test_right_is_right(case):
    for b in (grid(case, **case.hp), full(), ragged(), ragged(prefix=False)):
        _, g = found(case, inputs(b, fill=0.0 if case.leaks else math.nan), **case.hp)
        want = expected(case, b, **case.hp)
        torch.testing.assert_close(g, want, **RIGHT)
    assert not witnesses(case)


def test_the_zoo_is_large_and_its_names_are_its_own():
    assert len(zoo.WRONG) >= 45 and len(
        {c.function.__name__ for c in zoo.WRONG}
    ) == len(zoo.WRONG)
    assert len({c.function for c in zoo.RIGHT}) >= 8
    assert all(c.objective in upref.names() for c in zoo.ALL)
