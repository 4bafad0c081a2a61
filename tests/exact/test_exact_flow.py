# SPDX-License-Identifier: Apache-2.0
"""Paths against closed forms: what a softmax does under these gradients is known, and
not from a run of this code.
"""

from itertools import islice, product
from math import comb, log, sqrt

import numpy as np
import pytest
import torch

import upref
from repro.exact import expected, flow
from repro.exact.expected import all_groups, group_probability
from repro.exact.experiments import (
    collapse,
    coverage,
    drawn,
    entropy,
    fixed_points,
    mass,
    rise,
)
from repro.exact.task import F64, bandit
from upref.errors import InputError
from upref.user_code.guard import one_thread

pytestmark = pytest.mark.slow
UP, DAPO, IS, OFF = (
    upref.get(n) for n in ("up_dapo", "dapo", "is_pg", "reinforce_off_policy")
)


@pytest.fixture(autouse=True, scope="module")
def in_one_thread():
    """The tensors are small: threads would wait for each other."""
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
    F = lambda p: log(p) / q + log(1 - p) / (1 - q) - log(abs(q - p)) / (q * (1 - q))
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
    F = lambda p: 1 / (1 - p) - 1 / p + 2 * log(p / (1 - p))
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


def test_up_rests_where_the_implicit_equation_says():
    """Graded rewards, so that an answer is right in one group and wrong in another: at
    rest p_a Λ = mu_a E[A+ | a] + mu_a E[A- | a] r_a [r_a >= 1 - ε_low], Λ the sum of
    the right-hand sides. E by listing the groups."""
    mu, R, G = [0.5, 0.3, 0.2], [0.0, 0.5, 1.0], 3
    task = bandit(R)
    s = last(flow.path(task, UP, task.start([mu]), lr=2.0, k=0, G=G), 2000)
    p, plus, minus = s.pi[0].numpy(), np.zeros(3), np.zeros(3)
    for group in product(range(3), repeat=G):
        r = np.array([R[a] for a in group])
        if r.std() == 0:
            continue
        P = np.prod([mu[a] for a in group])
        for a, adv in zip(group, (r - r.mean()) / (r.std(ddof=1) + 1e-6), strict=True):
            # mu_a E[A | a], added up over places
            (plus if adv > 0 else minus)[a] += P * adv / G
    ratio = p / np.array(mu)
    side = plus + minus * ratio * (ratio >= 0.8)
    assert (ratio < 0.8).any() and (plus > 0).sum() == 2 and minus[1] < -0.01
    assert p * side.sum() == pytest.approx(side, abs=5e-4)


@pytest.mark.parametrize("case", list(fixed_points.CASES))
def test_up_rests_at_pi_old_A_plus(case):
    p, _ = fixed_points.trajectory(UP, case, {}, updates=900, lr=1.0)
    assert (p[-1] - fixed_points.target(case)).abs().max() < 3e-3
    by_is, _ = fixed_points.trajectory(IS, case, {}, updates=900, lr=1.0)
    assert by_is[-1].max() > 0.95


def test_the_pushes_add_up_to_the_first_order():
    """What is left over is of second order in the step: half of it when the step is
    halved.
    """
    left = []
    for lr, n in ((0.04, 100), (0.02, 200)):
        log_ratio, own, right, wrong = mass.pushes(DAPO, {}, lr=lr, updates=n)
        left.append(float(log_ratio[-1, 0] - own[-1] - right[-1] - wrong[-1]))
        assert abs(float(own[-1])) > 30 * abs(left[-1])
    assert left[1] / left[0] == pytest.approx(0.5, abs=0.1)


# ---- π_old renewed -------------------------------------------------------------------
@pytest.mark.parametrize("name", ["dapo", "up_dapo", "is_pg", "cispo"])
def test_first_order_rise_time(name):
    """On-policy all of them are one flow, of log-odds: dx/dt = 2 p (1-p) (E[A | right]
    - E[A | wrong]); the time to 1/2 is an integral, here by Simpson's rule."""
    mu, size, lr = 0.02, 8, 0.05

    def speed(p):
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
    log_ratio = lambda s: float((s.pi[0, 0] / s.pi[0, 1]).log())
    assert (log_ratio(s1) - log_ratio(s0)) / lr == pytest.approx(
        A * (0.3 - 0.1), rel=1e-3
    )


def test_up_keeps_all_entropy_as_k_grows():
    """With k -> ∞ from one π_old UP loses nothing among the right answers: they stay as
    they were to each other.
    """
    start, dose = (
        torch.tensor([entropy.MU], dtype=F64),
        torch.tensor([3000.0], dtype=F64),
    )
    H, shares, _ = entropy.kept(UP, start, dose, {}, k=3000, aim=0.98, most=3001)
    before = entropy.entropy(start[:, :5] / start[:, :5].sum())
    assert shares[-1] >= 0.98 and float(H) == pytest.approx(float(before), abs=0.04)
    by_is, *_ = entropy.kept(IS, start, dose, {}, k=3000, aim=0.98, most=3001)
    assert float(by_is) < 0.6 * float(before)


# ---- one draw ------------------------------------------------------------------------
def test_groups_have_their_probability():
    pi = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=F64)
    groups = all_groups(3, 4)
    P = group_probability(groups, pi)
    assert torch.allclose(P.sum(1), torch.ones(2, dtype=F64), atol=1e-14)
    twice = [list(map(int, g)) for g in groups].index([0, 0, 1, 2])
    assert float(P[0, twice]) == pytest.approx(12 * 0.5**2 * 0.3 * 0.2, rel=1e-12)


def test_the_draw_of_off_policy_reinforce_is_a_straight_line():
    """θ = θ_old + lr k n_a A_a / G, so the expected KL is a sum that needs no path."""
    mu, G, k, dose = drawn.MU, 3, 16, 5.0
    found = drawn.measure(OFF, dose, {}, size=G, k=k)
    kl = 0.0
    for group in product(range(4), repeat=G):
        r = np.array([drawn.RIGHT[a] for a in group])
        z = np.log(mu)
        if r.std():
            A = (r - r.mean()) / (r.std(ddof=1) + 1e-6)
            for a, adv in zip(group, A, strict=True):
                z[a] += dose * adv / G
        pi = np.exp(z) / np.exp(z).sum()
        kl += np.prod([mu[a] for a in group]) * float(
            np.sum(mu * (np.log(mu) - np.log(pi)))
        )
    assert found[0] == pytest.approx(kl, rel=1e-9)


def test_one_group_pushes_a_rare_right_answer_no_less():
    """Each is in it once: dz_a = (w_a A - p_a S)/G, S = Σ w A over the group: 0 at
    first, so their ratios are equal; later S > 0 for these objectives, and it takes
    more from the common one. Under REINFORCE S stays 0."""
    task = bandit(drawn.RIGHT)
    theta, group = task.start([drawn.MU]), torch.tensor([[0, 1, 2, 2]])
    moved = lambda o, k: (
        task.log_probs(flow.drawn(task, o, theta, group, lr=0.1, k=k))
        - task.log_probs(theta)
    )[0, :2, 0].tolist()
    for o in (DAPO, UP, OFF):
        rare, common = moved(o, 1)
        assert rare == pytest.approx(common, abs=1e-15) and rare > 0
        rare, common = moved(o, 3)
        assert (
            rare == pytest.approx(common, abs=1e-12)
            if o is OFF
            else rare > common + 1e-4
        )
    assert moved(UP, 30)[0] > moved(UP, 30)[1] + 0.1
    rare, common = mass.passing_in_one_group(mass.MU)
    assert rare < common


def test_no_gradient_of_importance_sampling_passes_its_bound():
    """|weight| = A r (1-p) <= A/(4 mu) √2 for the term of one token in one of G places
    (p = mu r).
    """
    for mu in (0.01,):
        largest = drawn.steepest(upref.get("dapo_no_upper_clip"), mu, {})
        # A of one right answer of G, over G
        best = (1 - 1 / drawn.G) / sqrt(1 / drawn.G) / drawn.G
        assert largest < 1.3 * best / (4 * mu) * sqrt(2) + 1
    assert largest > 0.5 * best / (4 * mu) * sqrt(2)


def test_adam_moves_every_logit_alike_at_first():
    """Its first step is lr sign(g): a rare right token moves as far as a common one."""
    task = bandit([1.0, 1, 0])
    theta = task.start([[0.001, 0.3, 0.699]])
    step = last(flow.path(task, UP, theta, lr=0.01, k=1, adam=True), 1).theta - theta
    assert torch.allclose(
        step[0, 0], torch.tensor([0.01, 0.01, -0.01], dtype=F64), atol=1e-6
    )


def test_adam_is_torchs():
    task, theta = bandit([1.0, 1, 0]), torch.tensor([[[0.1, -0.5, 0.7]]], dtype=F64)
    ours = last(flow.path(task, DAPO, theta, lr=0.05, k=4, adam=True), 12).theta
    p = theta.clone().requires_grad_()
    optimizer = torch.optim.Adam([p], lr=0.05, maximize=True)
    for n in range(12):
        if n % 4 == 0:
            lp_old = task.log_probs(p.detach())
            rows = expected.rows(task, lp_old, DAPO, 8)
        p.grad = flow.gradient(task, DAPO, p, lp_old, rows)
        optimizer.step()
    assert torch.allclose(ours, p.detach(), atol=1e-12)


def test_the_chain_without_drift_is_the_waiting_time_of_the_flow():
    """A dose so small that nothing is clipped: E[rollouts] x dose is the time of the
    flow, whatever the noise.
    """
    a, b = (rise.on_a_group(UP, d, mu=0.1, k=1, points=240) * d for d in (0.02, 0.01))
    assert a == pytest.approx(b, rel=0.02)


def test_the_chain_with_one_jump_is_a_geometric_wait():
    """A dose so large that any draw of the right answer ends it: 1 / P(both kinds are
    in the group).
    """
    mu, G = 0.01, 8
    assert rise.on_a_group(OFF, 200.0) == pytest.approx(
        1 / (1 - (1 - mu) ** G - mu**G), rel=1e-6
    )


def test_rare_draws_under_the_clip_make_a_geometric_series():
    """While p is rare a draw multiplies it by ρ, a wait is 1/(G p): E[rollouts] -> Σ_j
    1/(G mu ρ^j) = (ρ/(ρ-1))/(G mu), whatever happens once it is common."""
    mu, dose, k = 1e-5, 4.0, 16
    f = rise.after(DAPO, torch.tensor([log(mu)], dtype=F64), dose / k, k, 8, {})
    rho = float((f[0, 1] - log(mu)).exp())
    assert 1.28 < rho < 1.7
    assert rise.on_a_group(DAPO, dose, mu=mu, points=300) == pytest.approx(
        rho / (rho - 1) / (8 * mu), rel=0.03
    )


def test_the_chain_is_what_simulation_finds():
    mu, dose, k, size, n = 0.1, 2.0, 4, 4, 600
    rng, x = np.random.default_rng(0), np.full(n, log(mu / (1 - mu)))
    rollouts, live = np.zeros(n), np.ones(n, bool)
    while live.any():
        at = x[live]
        right = rng.binomial(size, 1 / (1 + np.exp(-at)))
        f = rise.after(DAPO, torch.tensor(at), dose / k, k, size, {}).numpy()
        rollouts[live] += 1
        x[live] = f[np.arange(len(at)), right]
        live &= x < 0
    exact = rise.on_a_group(DAPO, dose, mu=mu, k=k, size=size)
    assert abs(rollouts.mean() - exact) < 4 * rollouts.std() / sqrt(n)


def test_the_grid_is_fine_enough():
    coarse, fine = (rise.on_a_group(DAPO, 1.0, points=n) for n in (80, 320))
    assert coarse == pytest.approx(fine, rel=0.03)


# ---- one layer -----------------------------------------------------------------------
def test_a_corner_that_is_wrong_is_for_ever():
    task = bandit([1.0, 0, 0])
    theta = torch.tensor([[[-60.0, 60.0, -60.0]]], dtype=F64)
    for o in (UP, DAPO, OFF):
        s = last(flow.path(task, o, theta, lr=100.0, k=4), 9)
        assert float(s.gradient.norm()) < 1e-40 and float(s.pi[0, 0]) < 1e-40


def test_without_drift_every_arm_is_one_flow_on_one_layer():
    ends = [
        collapse.grid(
            o, {}, angles=3, doses=torch.tensor([0.2], dtype=F64), rollouts=3
        )[0]
        for o in (UP, OFF, IS)
    ]
    assert ends[0].shape == (2, 3, 3, 1)
    assert (ends[0] - ends[1]).abs().max() < 2e-3 and (
        ends[0] - ends[2]
    ).abs().max() < 2e-3
    assert (ends[0] > 1 / 3).all()


def test_features_are_unit_vectors_the_first_is_fixed():
    task, dose, shape = collapse.tasks(
        collapse.RIGHT[0], 4, torch.tensor([1.0, 2.0], dtype=F64)
    )
    assert shape == (4, 4, 2) and len(dose) == 32
    assert torch.allclose(task.features.norm(dim=-1), torch.ones(32, 3, dtype=F64))
    assert torch.equal(
        task.features[:, 0], torch.tensor([1.0, 0.0], dtype=F64).expand(32, 2)
    )


def test_bad_input_is_one_sentence():
    task = bandit([1.0, 0])
    with pytest.raises(InputError, match="learning rate > 0"):
        next(flow.path(task, UP, task.start([[0.5, 0.5]]), lr=0.0, k=1))
    for text in ("nonsense", "dapo:eps_high", "dapo:eps_high=x", "dapo:nope=1"):
        with pytest.raises(InputError):
            flow.arm(text)
    assert flow.arm("dapo:eps_high=0.4,c=None")[2] == {"eps_high": 0.4, "c": None}


def test_importance_sampling_loses_rare_right_answers():
    """The flow with small steps, whatever the dose, against 1/x_a(0) - c; the measures
    by hand.
    """
    start = torch.tensor([entropy.MU] * 2, dtype=torch.float64)
    _, o, hp = flow.arm("is_pg")
    doses = torch.tensor([0.5, 1.0], dtype=torch.float64)
    q = entropy.reached(o, start, doses, hp, k=8)[0][:, : coverage.N]
    assert torch.allclose(
        q, coverage.importance_sampling(start[0]).expand_as(q), atol=1e-3
    )
    assert coverage.importance_sampling(start[0], aim=0.999)[0] > 0.93, (
        "in the limit the most common one has all"
    )
    even = torch.full((4,), 0.25, dtype=torch.float64)
    assert coverage.effective(even) == pytest.approx(4)
    assert coverage.count(torch.tensor([0.6, 0.2, 0.1, 0.1]), even).item() == 2
    assert coverage.distinct(torch.tensor([1.0, 0.5])) == pytest.approx(2 - 0.5**32)
