# SPDX-License-Identifier: Apache-2.0
"""The laws every registered objective must obey. A law takes an Objective and raises
AssertionError.

test_objectives.py runs them all on all; test_wrong_objectives.py shows that they reject
what is wrong.
"""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import upref
from upref import kl
from upref.advantages import ADVANTAGES
from upref.ops import recorded_sg
from upref.registry import REDUCE
from upref.rollouts import autograd_gradient
from upref.weights.batches import OFF_EDGES, batch

TOL = 1e-12
FLOATS = ("logp", "logp_old", "adv", "entropy", "logp_sampler")
LAWS = []


def law(f):
    """Add the function to LAWS, and return it."""
    LAWS.append(f)
    return f


def close(found, expected, tol=TOL):
    """Assert that two tensors have one shape, and differ by at most tol, relative to
    numbers above 1.
    """
    assert found.shape == expected.shape, (found.shape, expected.shape)
    worst = ((found - expected).abs() / expected.abs().clamp(min=1)).max().item()
    assert worst <= tol, f"off by {worst:.3g}"


@law
def autograd_is_weight_times_aggregation(o):
    """Assert that autograd's gradient is the hand-written weight times the
    aggregation's, over the regime grid and several hyperparameters.

    Masks are ragged, and masked slots are poisoned. The gradients are scaled up by the
    number of tokens.
    """
    for hp in settings(o):
        b = batch(o, **hp)
        scale = b.mask.sum()
        close(
            autograd_gradient(partial(o, **hp), b) * scale, o.gradient(b, **hp) * scale
        )


@law
def sympy_derivative_is_autograd(o):
    """Assert that sympy's derivative of the same source is autograd's, mask and
    aggregation included. Skip an objective that is not symbolic.
    """
    from upref.derivation import sympy_gradient

    if o.not_symbolic:
        pytest.skip(o.not_symbolic)
    b = batch(o, edges=OFF_EDGES)
    by_sympy = torch.tensor(sympy_gradient(o, b), dtype=torch.float64)
    close(by_sympy, autograd_gradient(o, b))


@law
def masked_slots_are_inert(o):
    """Assert that masked slots have no gradient, and that NaN, infinity or 1e30 in them
    changes no bit of it.
    """
    b = batch(o)
    if b.logp_sampler is None:
        b = replace(b, logp_sampler=b.logp_old)
    calm = replace(
        b,
        logp=b.logp.masked_fill(~b.mask, -1.0),
        logp_old=b.logp_old.masked_fill(~b.mask, -2.0),
        adv=b.adv.masked_fill(~b.mask, 0.5),
    )
    expected = autograd_gradient(o, calm)
    assert (expected[~b.mask] == 0).all()
    for poison in (float("nan"), float("inf"), -float("inf"), 1e30):
        bad = {}
        for name in FLOATS:
            value = getattr(b, name)
            if value is not None:
                bad[name] = value.masked_fill(~b.mask, poison)
        found = autograd_gradient(o, replace(b, **bad))
        assert torch.equal(found, expected), f"masked slots at {poison} leak"


@law
def padding_is_inert(o):
    """Assert that three columns of padding in front and two behind, with finite numbers
    that could pass for tokens, change no gradient.
    """
    b = batch(o, edges=OFF_EDGES)

    def calm(x):
        """Fill masked slots of floats with -1."""
        return x.masked_fill(~b.mask, -1.0) if x.is_floating_point() else x

    def pad(x):
        """Add the columns: -0.5 in floats, 0 or False in others."""
        return torch.nn.functional.pad(
            calm(x), (3, 2), value=-0.5 if x.is_floating_point() else 0
        )

    wide = b.map(lambda name, x: x if name == "group" else pad(x))
    close(autograd_gradient(o, wide)[:, 3:-2], autograd_gradient(o, b))


@law
def rows_commute(o):
    """Assert that rows in another order have the same gradient each."""
    b = batch(o, edges=OFF_EDGES)
    i = torch.randperm(len(b.mask), generator=torch.Generator().manual_seed(1))
    close(autograd_gradient(o, b.take(i)), autograd_gradient(o, b)[i])


@law
def micro_batches_add_up(o):
    """Assert that the losses and gradients of 2, 3 and 8 parts sum to those of the
    whole. Skip an objective that couples the batch.
    """
    if o.batch_coupled:
        pytest.skip(o.batch_coupled)
    b = batch(o)
    for n in (2, 3, 8):
        parts = b.split(n)
        close(
            torch.cat([autograd_gradient(o, part) for part in parts]),
            autograd_gradient(o, b),
        )
        close(sum(o.loss(part) for part in parts), o.loss(b))


@law
def zero_advantage_is_silent(o):
    """Assert that the gradient is 0 where every A is 0. Skip listed exceptions."""
    if o.scale_exception:
        pytest.skip(o.scale_exception)
    b = batch(o)
    g = autograd_gradient(o, replace(b, adv=torch.zeros_like(b.adv)))
    assert (g == 0).all()


@law
def scales_with_the_advantage(o):
    """Assert that three times the advantages give three times the gradient; or, for a
    listed exception, that they do not.
    """
    b = batch(o)
    found = autograd_gradient(o, replace(b, adv=3 * b.adv))
    expected = 3 * autograd_gradient(o, b)
    if o.scale_exception:
        assert not torch.allclose(found, expected), (
            f"{o.name} is listed as an exception and is none"
        )
    else:
        close(found, expected)


@law
def on_policy_weight_is_the_advantage(o):
    """Assert that at r = 1 the weight of a token is A; or, for a listed exception, that
    it is not.

    Under the mean over responses it is A / length, unless the ratio is a product.
    """
    b = batch(o)
    on = replace(b, logp=b.logp_old)
    n = b.mask.sum(-1, keepdim=True)
    w = o.token_weights(on)[b.mask]
    A = (b.adv / n if o.agg == "seq-mean" and o.level != "sequence_product" else b.adv)[
        b.mask
    ]
    if o.on_policy_exception:
        assert (w - A).abs().max() > 1e-3, (
            f"{o.name} is listed as an exception and is none"
        )
    else:
        close(w, A)


@law
def finite_differences_agree(o):
    """Assert that differences of J along two directions are the gradient, to 1e-7. What
    is detached is held where it was, and so the value of J is tied to its gradient.
    """
    b = batch(o, edges=OFF_EDGES, thin=7)
    b = replace(b, logp=b.logp - 1e-4)  # a bound may lie at r = 1 itself
    if o.batch_coupled:  # a step must not change the batch's ranking
        b = replace(b, logp=b.logp_old + (b.logp - b.logp_old) * 0.05)
    g = autograd_gradient(o, b)
    values = []
    h = 1e-6
    with recorded_sg(values):
        o(b)
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(b.mask.shape, dtype=torch.float64, generator=generator)
    every_second = every * (torch.arange(b.mask.shape[1]) % 2)
    for direction in (every, every_second):
        part = direction * (b.logp.exp() < 0.9)  # log π stays below 0
        with recorded_sg(values):
            up = o(replace(b, logp=b.logp + h * part))
        with recorded_sg(values):
            down = o(replace(b, logp=b.logp - h * part))
        found = (up - down) / (2 * h)
        expected = (g * part.masked_fill(~b.mask, 0)).sum()
        close(found, expected, 1e-7)


@law
def nothing_flows_into_constants(o):
    """Assert that old log-probabilities, advantages, entropies and the sampler's
    log-probabilities get no gradient.
    """
    b = batch(o)
    free = {
        k: v.clone().requires_grad_()
        for k in FLOATS
        if (v := getattr(b, k)) is not None
    }
    J = o(replace(b, **free, logp_ref=b.logp_old))
    grads = torch.autograd.grad(J, list(free.values()), allow_unused=True)
    assert grads[0] is not None
    assert all(g is None or (g == 0).all() for g in grads[1:]), (
        "a gradient leaks into old, advantages or entropy"
    )


@law
def inputs_are_left_alone(o):
    """Assert that the loss and its gradient change no log-probability, advantage or
    mask.
    """
    b = batch(o)
    before = [x.clone() for x in (b.logp, b.logp_old, b.adv, b.mask)]
    o(b)
    o.gradient(b)
    assert all(
        torch.equal(x.nan_to_num(), y.nan_to_num())
        for x, y in zip(before, (b.logp, b.logp_old, b.adv, b.mask), strict=True)
    )


EXTREME = (
    -1000.0,
    -100.0,
    -20.0,
    -0.5,
    0.0,
    0.5,
    2.0,
    3.0,
    20.0,
    80.0,
    87.0,
    100.0,
    1000.0,
)


@law
def extreme_ratios_never_make_nan(o):
    """Assert that for |log r| up to 1000, in four dtypes, the gradient is never NaN,
    and right wherever the exact weight is representable.
    """
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        b = extreme_batch(o, dtype)
        found = autograd_gradient(o, b)
        exact = o.gradient(widened(b))
        limit = torch.finfo(dtype).max / 4
        assert not found.isnan().any(), f"{dtype}: NaN"
        assert (found.isfinite() | (exact.abs() > limit)).all(), (
            f"{dtype}: not finite, though the weight is"
        )
        overflows = log_ratio(o, b) >= math.log(torch.finfo(dtype).max)
        inside = ~overflows & (exact.abs() < limit)
        # SAPO's gate turns an ulp of r = 20 into twenty of its weight
        tol = 64 * torch.finfo(dtype).eps
        floor = 0.01 * exact[b.mask & (log_ratio(o, b).abs() < 1)].abs().mean()
        off = (found.double() - exact).abs() / exact.abs().clamp(min=floor)
        assert (off[inside & b.mask] < tol).all(), (
            f"{dtype}: off by {off[inside & b.mask].max():.3g}"
        )
        # where the ratio overflows, what does not depend on it must still be exact: 0
        # where clipped, A for UP
        free = overflows & b.mask & (exact.abs() <= b.adv.double().abs() * 10)
        assert (off[free] < tol).all(), (
            f"{dtype}: a weight free of the ratio is lost at overflow"
        )


def log_ratio(o, b):
    """Return the log-ratio that the surrogate gets for each token, [B, T]: its own, or
    the sum or mean of its response.
    """
    log_r = (b.logp - b.logp_old).double().masked_fill(~b.mask, 0)
    if o.level not in REDUCE and o.agg != "seq-mean":
        return log_r
    total = log_r.sum(-1, keepdim=True)
    return (
        total if o.level == "sequence_product" else total / b.mask.sum(-1, keepdim=True)
    ).expand_as(log_r)


def widened(b):
    return b.floats(torch.float64)


def extreme_batch(o, dtype):
    """Return a batch in this dtype with every extreme log-ratio of EXTREME at A = 1, -1
    and 0, a row each.

    Two calm tokens stand beside it, the second one masked in every other row; where a
    response acts as one, all its tokens have the extreme ratio.
    """
    rows = [(A, x) for A in (1.0, -1.0, 0.0) for x in EXTREME]
    log_r = torch.tensor([[x, -0.5, 0.125] for _, x in rows], dtype=dtype)
    A = torch.tensor([[a] * 3 for a, _ in rows], dtype=dtype)
    if o.level in ("sequence_mean", "sequence_product"):
        log_r[:, 1:] = log_r[:, :1]
    mask = torch.ones_like(log_r, dtype=torch.bool)
    mask[::2, 2] = False
    old = torch.where(log_r > 0, -log_r - 0.5, torch.full_like(log_r, -0.5))
    group = torch.arange(len(rows)) % 5
    engine = old - 0.25 * (torch.arange(len(rows)) % 3)[:, None]
    return upref.Rollouts(
        old + log_r,
        old,
        A,
        mask,
        group,
        entropy=torch.ones_like(log_r),
        logp_sampler=engine,
    )


MOVED = {
    "c": 2.0,
    "beta": 0.1,
    "seed": 1,
    "share": 0.1,
    "high": 1.05,
    "eps_f_low": 0.2,
    "opsm_delta": 1e-4,  # above -log(1 - eps_low) the clip of gspo acts first
}


@law
def every_hyperparameter_is_alive(o):
    """Assert that moving each hyperparameter moves the gradient somewhere, and that a
    name that the objective does not have is refused.
    """
    for key, default in o.hyperparameters.items():
        other = MOVED.get(key, default * 1.5 if default else None)
        moved = {key: other}
        b = batch(o, **({} if key == "beta" else moved))
        b = replace(b, logp_ref=b.logp_old - 0.1)
        assert not torch.equal(
            autograd_gradient(o, b), autograd_gradient(partial(o, **moved), b)
        ), f"{key} is dead"
    with pytest.raises(upref.InputError, match="no hyperparameter"):
        o.loss(batch(o), no_such_thing=1.0)


@law
def record_is_complete(o):
    """Assert that the record of an objective names known estimators, an equation, and a
    source of each default where it has a paper.
    """
    assert o.adv in ADVANTAGES
    assert not o.kl or o.kl in kl.NAMES
    assert o.equation and bool(o.eq) == bool(o.paper)
    if o.paper:
        assert set(o.defaults) == set(o.hyperparameters), (
            "a default without the sentence it comes from"
        )


def settings(o):
    """The defaults, and with a dual clip where there is one."""
    return [{}, {"c": 3.0}] if "c" in o.hyperparameters else [{}]
