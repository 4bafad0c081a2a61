# SPDX-License-Identifier: Apache-2.0
"""Paths against closed forms: what a softmax does under these gradients is known, and
not from a run of this code.
"""

from itertools import islice
from math import comb, log, sqrt

import numpy as np
import pytest
import torch

import upref
from repro.exact import flow
from repro.exact.task import F64, bandit
from upref.errors import InputError
from upref.user_code.guard import one_thread

pytestmark = pytest.mark.slow
UP, DAPO, IS, OFF = (
    upref.get(n) for n in ("up_dapo", "dapo", "is_pg", "reinforce_off_policy")
)


@pytest.fixture(autouse=True, scope="module")
def in_one_thread():
    """Run each test in one thread: the tensors are small, and threads would wait for
    each other.
    """
    with one_thread():
        yield


def last(path, n):
    return next(islice(path, n, None))


# ---- one π_old -----------------------------------------------------------------------
@pytest.mark.parametrize("start", [0.05, 0.9])
def test_up_with_constant_advantages_is_this_curve(start):
    """Two arms, S = Σ mu A, q = mu_1 A_1 / S: dp/dt = 2 S p (1-p) (q-p), so F(p(t)) -
    F(p(0)) = 2 S t with F = ln p / q + ln(1-p) / (1-q) - ln|q-p| / (q (1-q))."""
    mu, A, lr, n = (
        torch.tensor([start, 1 - start], dtype=F64),
        torch.tensor([3.0, 1.0], dtype=F64),
        0.02,
        300,
    )
    S, q = float(mu @ A), float(mu[0] * A[0] / (mu @ A))

    def F(p):
        return log(p) / q + log(1 - p) / (1 - q) - log(abs(q - p)) / (q * (1 - q))

    task = bandit(A.tolist())
    p = float(
        last(
            flow.path(
                task, UP, task.start([mu.tolist()]), lr=lr, k=0, G=None, adv="reward"
            ),
            n,
        ).pi[0, 0]
    )
    assert abs(p - start) > 0.02
    assert F(p) - F(start) == pytest.approx(2 * S * lr * n, rel=2e-2)


def test_importance_sampling_is_the_gradient_of_the_reward():
    """dp/dt = 2 (A_1 - A_2) p² (1-p)², whatever π_old: 1/(1-p) - 1/p + 2 logit p = 2
    (A_1 - A_2) t + const.
    """
    task, lr, n = bandit([2.0, 1.0]), 1e-3, 2000
    theta = task.start([[0.3, 0.7]])

    def F(p):
        return 1 / (1 - p) - 1 / p + 2 * log(p / (1 - p))

    p = float(
        last(flow.path(task, IS, theta, lr=lr, k=0, G=None, adv="reward"), n).pi[0, 0]
    )
    assert F(p) - F(0.3) == pytest.approx(2 * lr * n, rel=2e-3)


def test_off_policy_reinforce_moves_the_logits_at_constant_speed():
    """Advantages of mean 0 cancel the normalizer: z_a(t) = z_a(0) + t mu_a E[A | a],
    for ever.
    """
    mu, G, lr, n = [0.1, 0.3, 0.6], 5, 0.3, 700
    task = bandit([1.0, 0, 0])
    theta = task.start([mu])
    end = last(flow.path(task, OFF, theta, lr=lr, k=0, G=G), n).theta
    # of a right and a wrong response: by the definition of the group's statistics
    A = {}
    for right in (0, 1):
        A[right] = 0.0
        for K in range(G):
            k = K + right
            sd = sqrt(k * (G - k) / G / (G - 1))
            if sd:
                A[right] += (
                    comb(G - 1, K)
                    * mu[0] ** K
                    * (1 - mu[0]) ** (G - 1 - K)
                    * (right - k / G)
                    / (sd + 1e-6)
                )
    speed = torch.tensor(
        [m * A[r] for m, r in zip(mu, (1, 0, 0), strict=True)], dtype=F64
    )
    assert speed.sum() == pytest.approx(0, abs=1e-15)
    assert torch.allclose((end - theta)[0, 0], lr * n * speed, atol=1e-9)


# ---- π_old renewed -------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dapo", "up_dapo", "is_pg", "cispo"])
def test_first_order_rise_time(name):
    """On-policy all of them are one flow, of log-odds: dx/dt = 2 p (1-p) (E[A | right]
    - E[A | wrong]); the time to 1/2 is an integral, here by Simpson's rule."""
    mu, size, lr = 0.02, 8, 0.05

    def speed(p):
        """Return the speed at which the probability p of the right arm rises, by its
        formula.
        """
        e = [0.0, 0.0]
        for right in (0, 1):
            for K in range(size):
                k = K + right
                sd = sqrt(k * (size - k) / size / (size - 1))
                binomial = comb(size - 1, K) * p**K * (1 - p) ** (size - 1 - K)
                e[right] += binomial * (right - k / size) / (sd + 1e-6) if sd else 0
        return 2 * p * (1 - p) * (e[1] - e[0])

    x = np.linspace(log(mu / (1 - mu)), 0, 2001)
    f = [1 / speed(1 / (1 + np.exp(-v))) for v in x]
    T = (x[1] - x[0]) / 3 * (f[0] + f[-1] + 4 * sum(f[1:-1:2]) + 2 * sum(f[2:-1:2]))
    task = bandit([1.0, 0.0])
    states = flow.path(
        task, upref.get(name), task.start([[mu, 1 - mu]]), lr=lr, k=1, G=size
    )
    found = next(s.update for s in states if s.pi[0, 0] >= 0.5) * lr
    assert found == pytest.approx(T, rel=5e-3)


def test_a_clip_of_zero_drift_changes_nothing():
    """k = 1: every update is on-policy, and DAPO, UP and importance sampling are the
    same, update by update.
    """
    task = bandit([1.0, 1, 0, 0])
    theta = task.start([[0.05, 0.2, 0.5, 0.25]])
    end = [
        last(flow.path(task, o, theta, lr=3.0, k=1), 40).theta
        for o in (DAPO, UP, upref.get("cispo"))
    ]
    assert torch.allclose(end[0], end[1], atol=1e-12) and torch.allclose(
        end[0], end[2], atol=1e-12
    )


def test_common_right_answers_win_on_policy():
    """d log(p_a/p_b)/dt = A (p_a - p_b): the rare one of two right answers loses to the
    common one at that rate.
    """
    task = bandit([1.0, 1, 0])
    theta, lr = task.start([[0.3, 0.1, 0.6]]), 1e-4
    s0, s1 = islice(flow.path(task, UP, theta, lr=lr, k=1, G=None), 2)
    A = sqrt((1 - 0.4) / 0.4)

    def log_ratio(s):
        return float((s.pi[0, 0] / s.pi[0, 1]).log())

    assert (log_ratio(s1) - log_ratio(s0)) / lr == pytest.approx(
        A * (0.3 - 0.1), rel=1e-3
    )


# ---- one layer -----------------------------------------------------------------------
def test_a_corner_that_is_wrong_is_for_ever():
    task = bandit([1.0, 0, 0])
    theta = torch.tensor([[[-60.0, 60.0, -60.0]]], dtype=F64)
    for o in (UP, DAPO, OFF):
        s = last(flow.path(task, o, theta, lr=100.0, k=4), 9)
        assert float(s.gradient.norm()) < 1e-40 and float(s.pi[0, 0]) < 1e-40


def test_bad_input_is_one_sentence():
    task = bandit([1.0, 0])
    with pytest.raises(InputError, match="learning rate > 0"):
        next(flow.path(task, UP, task.start([[0.5, 0.5]]), lr=0.0, k=1))
