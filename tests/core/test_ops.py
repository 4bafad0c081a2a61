# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
import sympy
import torch

from upref import ops
from upref.symbolic import forget_sg


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_exp_is_torchs_up_to_the_largest_finite_number(dtype):
    """Find torch's exp where that is finite, the largest number beyond it, and no
    gradient there.
    """
    edge = math.log(torch.finfo(dtype).max)
    x = (
        torch.linspace(-edge - 9, edge + 9, 4001, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )
    y = ops.exp(x)
    plain = x.detach().exp()
    assert y.isfinite().all() and torch.equal(
        y[plain.isfinite()], plain[plain.isfinite()]
    )
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, torch.where(plain < torch.finfo(dtype).max, plain, 0))


def test_exp_differentiates_twice():
    x = torch.tensor([0.3, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ops.exp, x)
    assert torch.equal(
        torch.func.grad(lambda x: ops.exp(x).sum())(x.detach()), x.detach().exp()
    )


def test_exp_saturates_with_zero_gradient():
    x = torch.tensor([1000.0, 0.5, -1000.0], requires_grad=True)
    y = ops.exp(x)
    assert y[0] > 3e38 and y.isfinite().all()
    torch.where(torch.tensor([False, True, False]), y, x * 0).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, math.exp(0.5), 0.0]))
    naive = torch.tensor([1000.0], requires_grad=True)
    torch.where(torch.tensor([True]), naive * 0, torch.exp(naive)).sum().backward()
    assert naive.grad.isnan(), "torch mended where: the saturation is no longer needed"


POINTS = np.array([-3.0, -0.7, 0.3, 1.0, 2.5])


@pytest.mark.parametrize(
    "f",
    [
        ops.exp,
        ops.expm1,
        ops.sigmoid,
        lambda x: ops.log(x * x),
        lambda x: ops.sqrt(x * x),
        lambda x: ops.clip(x, -1, 1),
        lambda x: ops.minimum(x, 0.5),
        lambda x: ops.maximum(0.5, x),
        lambda x: ops.minimum(x, -x),
        lambda x: ops.where(x > 0, x * x, 1 - x),
        lambda x: ops.when(x > 0, x),
        lambda x: ops.sg(x) * x,
        lambda x: ops.dual_clip(x * x, x, 3),
    ],
)
def test_the_three_readers_agree(f):
    x = torch.tensor(POINTS, requires_grad=True)
    y = f(x)
    np.testing.assert_allclose(f(POINTS), y.detach(), rtol=1e-14)
    (g,) = torch.autograd.grad(y.sum(), x)
    s = sympy.Symbol("x", real=True)
    value, slope = forget_sg(f(s)), forget_sg(f(s).diff(s).doit())
    np.testing.assert_allclose(
        [float(value.subs(s, v)) for v in POINTS], y.detach(), rtol=1e-14
    )
    np.testing.assert_allclose([float(slope.subs(s, v)) for v in POINTS], g, rtol=1e-13)


def test_ties_pass_the_whole_gradient():
    """At a bound the gradient is the one inside: Eq. 10 counts r = 1 + eps as inside, and
    App. B both ends.
    """
    for f in (
        lambda x: ops.clip(x, 0, 1),
        lambda x: ops.minimum(x, 1.0),
        lambda x: ops.maximum(x, 1.0),
    ):
        x = torch.tensor(1.0, requires_grad=True)
        f(x).backward()
        assert x.grad == 1
    x = torch.tensor(3.0, requires_grad=True)
    (-ops.dual_clip(x, torch.tensor(-1.0), 3.0)).backward()
    assert x.grad == -1


def test_mean_t_ignores_the_masked_and_survives_an_empty_row():
    x = torch.tensor(
        [[1.0, math.nan, 3.0], [math.inf, 5.0, 7.0], [math.nan] * 3], requires_grad=True
    )
    mask = torch.tensor([[True, False, True], [False, True, False], [False] * 3])
    m = ops.mean_t(x, mask)
    assert torch.equal(m, torch.tensor([2.0, 5.0, 0.0]))
    m.sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]]))


def test_sg_is_recorded_and_used_again():
    x = torch.tensor(2.0)
    with ops.recorded_sg([]) as values:
        assert ops.sg(x) == 2
    with ops.recorded_sg(values):
        assert ops.sg(x + 1) == 2
    assert ops.sg(x + 1) == 3


def test_numpy_saturates_and_stays_quiet(recwarn):
    x = np.array([-1000.0, 0.0, 1000.0])
    assert ops.exp(x)[2] == ops.expm1(x)[2] == np.finfo(np.float64).max
    np.testing.assert_array_equal(ops.sigmoid(x), [0, 0.5, 1])
    assert not recwarn.list
