# SPDX-License-Identifier: Apache-2.0
"""Losses that are written to fool a prover: none is proved."""

import copy
import math
import random

import numpy as np
import pytest
import torch

import upref

state = {"calls": 0, "first": None}


def dapo(lp, old, A, mask):
    r = torch.where(mask, lp - old, 0).exp()
    A = torch.where(mask, A, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A).sum() / mask.sum()


def after_a_few_calls(lp, old, A, mask):
    state["calls"] += 1
    return dapo(lp, old, A, mask) * (1 if state["calls"] < 7 else 2)


def keeps_the_first_policy(lp, old, A, mask):
    kept = state.setdefault(("old", mask.shape), old.clone())
    return dapo(lp, kept, A, mask)


def keeps_the_first_factor(lp, old, A, mask):
    """Return DAPO's loss times a factor that it keeps from its first call."""
    state["first"] = state["first"] or A.abs().max().sqrt()
    return (
        dapo(lp, old, A, mask)
        * (state["first"] / state["first"].detach() + A.sum() - A.sum().detach())
        * state["first"]
    )


def numpy_weight(lp, old, A, mask):
    r = torch.from_numpy(np.exp((lp - old).detach().numpy()))
    return -(r.clamp(0.8, 1.28) * A * lp * mask).sum() / mask.sum()


def numpy_of_a_list(lp, old, A, mask):
    r = torch.tensor(np.array((lp - old).detach().tolist(), dtype=float)).exp()
    return -(r * A * lp * mask).sum() / mask.sum()


def copied(lp, old, A, mask):
    """Return DAPO's loss of deep copies, times the sign of the largest |A|."""
    return (
        dapo(lp, copy.deepcopy(old.detach()), A, mask)
        * copy.deepcopy(A.detach()).abs().max().sign()
        + 0 * A.sum()
    )


def text_of_a_number(lp, old, A, mask):
    far = "inf" in str((lp - old).detach()) or float(f"{A.abs().max().item()}") > 90
    return dapo(lp, old, A, mask) * (2 if far else 1)


def float_of_a_number(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (2 if math.exp(float(A.abs().max())) > 1e40 else 1)


def alias(lp, old, A, mask):
    B = A.view(-1)
    B[0] = B[0].clamp(-60, 60)
    return dapo(lp, old, A, mask)


def alias_of_a_row(lp, old, A, mask):
    row = A[0]
    row.clamp_(max=70)
    return dapo(lp, old, A, mask)


def expanded_alias(lp, old, A, mask):
    factor = torch.ones(1, 1, dtype=lp.dtype).expand(mask.shape).contiguous()
    view = factor[:, :1]
    view.masked_fill_(A[:, :1].abs() > 55, 0.5)
    return dapo(lp, old, A * factor, mask)


def as_strided_alias(lp, old, A, mask):
    other = torch.as_strided(A, (A.numel(),), (1,))
    other.mul_(torch.where(other > 1e4, 2, 1))
    return dapo(lp, old, A, mask)


def size_of_a_selection(lp, old, A, mask):
    large = A[A.abs() > 123]
    return dapo(lp, old, A, mask) * (1 + len(large))


def count_of_places(lp, old, A, mask):
    places = ((lp - old) > 6).nonzero()
    return dapo(lp, old, A, mask) * (1 + places.shape[0])


def nan_that_is_not_chosen(lp, old, A, mask):
    r = (lp - old).exp()
    root = (r - 0.5).sqrt()
    r = torch.where(r > 0.5, root**2 + 0.5, r)
    return -(torch.minimum(r * A, r.clamp(0.8, 1.28) * A) * mask).sum() / mask.sum()


def divided_by_zero(lp, old, A, mask):
    x = A.detach() - A.detach()
    r = (lp - old).exp()
    one = torch.where(A > -1e9, 1.0, r / x)
    return dapo(lp, old, A, mask) * one.mean()


def near_the_bound(lp, old, A, mask):
    """Return DAPO's loss with an upper bound that is 1e-9 too large."""
    r = torch.where(mask, lp - old, 0).exp()
    return (
        -(torch.minimum(r * A, r.clamp(0.8, 1.28 * (1 + 1e-9)) * A) * mask).sum()
        / mask.sum()
    )


def bound_in_float32(lp, old, A, mask):
    """Return DAPO's loss with an upper bound that is a float32 tensor."""
    r = torch.where(mask, lp - old, 0).exp()
    high = torch.tensor(1.28, dtype=torch.float32)
    return (
        -(torch.minimum(r * A, torch.minimum(r.clamp(min=0.8), high) * A) * mask).sum()
        / mask.sum()
    )


def torch_noise(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 + 1e-3 * torch.randn(()))


def python_noise(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 if random.random() < 0.999 else 2)


def numpy_noise(lp, old, A, mask):
    return dapo(lp, old, A, mask) * (1 if np.random.rand() < 0.999 else 2)


def hook_on_the_input(lp, old, A, mask):
    x = lp * 1.0
    if x.requires_grad:
        x.register_hook(lambda g: torch.where(g.abs() > 30, 30 * g.sign(), g))
    return dapo(x, old, A, mask)


def hook_with_numpy(lp, old, A, mask):
    """Return DAPO's loss, whose gradient a hook clips to ±30 by numpy."""
    x = lp * 1.0
    if x.requires_grad:
        x.register_hook(
            lambda g: torch.from_numpy(np.clip(g.detach().numpy(), -30, 30))
        )
    return dapo(x, old, A, mask)


def halved_if_large(g):
    return g / 2 if g.detach().numpy().max() > 1000 else g


def hook_that_branches_in_numpy(lp, old, A, mask):
    x = lp * 1.0
    if x.requires_grad:
        x.register_hook(halved_if_large)
    return dapo(x, old, A, mask)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2 if max(map(max, g.tolist())) > 1000 else g


def backward_that_branches_on_a_list(lp, old, A, mask):
    return dapo(Halved.apply(lp), old, A, mask)


class Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.detach().tolist()
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return (
            g
            * torch.tensor([[min(v, 4.0) for v in row] for row in ctx.kept]).to(g).exp()
        )


def backward_by_lists(lp, old, A, mask):
    return -(Numbers.apply(lp - old) * A * mask).sum() / mask.sum()


def detached_by_data(lp, old, A, mask):
    r = (lp - old).exp()
    r.data.clamp_(max=40)
    return -(torch.minimum(r * A, r.clamp(0.8, 1.28) * A) * mask).sum() / mask.sum()


def sorts_and_drops(lp, old, A, mask):
    order = (A * mask).abs().flatten().argsort(descending=True)
    kept = torch.ones(mask.numel(), dtype=lp.dtype)
    kept[order[:1]] = torch.where((A * mask).abs().max() > 1000, 0.0, 1.0).to(lp)
    return dapo(lp, old, A * kept.view(mask.shape), mask)


def own_gradient_by_a_thread(lp, old, A, mask):
    """Return DAPO's loss with advantages that a thread clamps to ±90."""
    import threading

    out = {}
    worker = threading.Thread(target=lambda: out.update(x=A.detach().clamp(-90, 90)))
    worker.start()
    worker.join()
    return dapo(lp, old, out["x"], mask)


def uses_the_memory(lp, old, A, mask):
    import ctypes

    first = ctypes.c_double.from_address(A.data_ptr()).value
    return dapo(lp, old, A, mask) * (2 if abs(first) > 77 else 1)


FOOLING = [
    f
    for name, f in list(globals().items())
    if name != "dapo" and getattr(f, "__code__", None) and f.__code__.co_argcount == 4
]


@pytest.mark.parametrize("loss", FOOLING, ids=lambda f: f.__name__)
def test_it_is_not_proved(loss):
    state.clear()
    state.update(calls=0, first=None)
    proof = upref.prove(loss, "dapo", rows=2, columns=2, seconds=30)
    assert not proof, str(proof)


def test_the_loss_that_they_change_is_proved():
    assert upref.prove(dapo, "dapo", rows=2, columns=2)
