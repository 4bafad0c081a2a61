# SPDX-License-Identifier: Apache-2.0
"""The finder of jumps finds what was put there, to the last bit; and a loss's curve is
the objective's.
"""

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
from upref.weights.batches import breakpoints
from upref.weights.curve import (
    Curve,
    make_curve,
    make_curve_of_loss,
    words_for_one_token,
)
from upref.weights.jumps import GRID


def piecewise(bounds, heights, slopes):
    """Return a weight that on each piece between two bounds is height * (1 + slope log
    r), or 0; bounds belong below.
    """
    bounds = np.array(bounds)

    def weight(r, A, mu):
        r, A, mu = np.broadcast_arrays(r, A, mu)
        piece = np.searchsorted(bounds, r)
        return A * np.take(heights, piece) * (1 + np.take(slopes, piece) * np.log(r))

    return Curve("drawn", weight, reads_mu=False)


BOUND = st.floats(-2.5, 2.5).map(np.exp) | st.sampled_from(GRID[(GRID > 0.1) & (GRID < 10)].tolist()) | st.sampled_from(
    [1.0, 0.8, 1.28, 1 - 3e-4, 1 + 4e-4, float(np.exp(0.25)), float(np.exp(-0.25)), 0.5]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_jump_is_found_and_nothing_else(data):
    """On curves with up to four jumps, whose weights may slope between them."""
    bounds = sorted(data.draw(st.lists(BOUND, max_size=4, unique=True)))

    def apart(x, y):
        """Tell whether two ratios are wider apart than the scan, whose steps are 2 %, and
        than a quarter of r - 1 near 1.
        """
        return y / x > 1.05 or y - x > max(1e-11, 0.3 * abs(x - 1), 0.3 * abs(y - 1))

    bounds = [b for n, b in enumerate(bounds) if not n or apart(bounds[n - 1], b)]
    height = st.sampled_from([0.0, 1.0, 1.3, 0.2, 3.0, -1.0])
    heights = [data.draw(height) for _ in range(len(bounds) + 1)]
    slope = st.sampled_from([0.0, 0.1, -0.15, 0.3])
    slopes = [data.draw(slope) for _ in heights]
    curve = piecewise(bounds, heights, slopes)
    A = data.draw(st.sampled_from([1.0, -2.5]))

    def value(n, r):
        """Return the weight by the formula of the n-th piece."""
        return heights[n] * (1 + slopes[n] * np.log(r)) * A

    true = []  # (bound, [below, above]) of what counts as a jump
    too_small = []  # bounds at which a jump may be found or not
    for n, bound in enumerate(bounds):
        below, above = value(n, bound), value(n + 1, bound)
        least = 0.05 * max(abs(below), abs(above))
        if abs(above - below) > least:
            true.append((bound, [below, above]))
        elif abs(above - below) > 0:
            too_small.append(bound)
    r = GRID[(GRID > 0.05) & (GRID < 20)]
    found = []
    for jump in curve.jumps(A, r=r):
        if not any(abs(jump.r / bound - 1) < 1e-12 for bound in too_small):
            found.append(jump)
    true_bounds = [bound for bound, _ in true]
    assert [j.r for j in found] == pytest.approx(true_bounds, rel=1e-15, abs=0)
    both_sides = [pytest.approx(sides) for _, sides in true]
    assert [(j.below, j.above) for j in found] == both_sides
    ends, alive = curve.ends([A, 2 * A])
    for row in ends:
        assert [e for e in row if 0.05 < e < 20] == [j.r for j in found if j.end]
    assert (alive == (heights[0] != 0)).all()


def test_the_bound_is_the_inclusive_one():
    dapo = make_curve("dapo", c=3)
    assert [j.r for j in dapo.jumps(1.0)] == [1.28]
    assert [j.r for j in dapo.jumps(-1.0)] == [0.8, 3.0]
    assert [j.end for j in make_curve("w_reinforce_code").jumps(1.0)] == [True]


@pytest.mark.parametrize(
    "bounds",
    [(np.exp(-0.25), np.exp(0.25)), (0.999, 1.0), (0.3, 0.9), (1 - 3e-4, 1 + 4e-4)],
)
def test_bounds_on_the_scan_at_1_and_caps_below_1(bounds):
    low, high = bounds
    found = piecewise([low, high], [0.0, 1.0, 0.4], [0, 0, 0]).jumps(1.0)
    assert [j.r for j in found] == pytest.approx([low, high], rel=1e-15, abs=0)
    assert [j.end for j in found] == [True, False]


def test_a_value_on_the_bound_alone_is_no_jump_of_its_own():
    """torch.min and clamp share the gradient at a tie; a weight that crosses 0 is dead
    nowhere.
    """
    tie = Curve(
        "tie",
        lambda r, A, mu: (
            A * np.where(r < 1.28, 1, np.where(r == 1.28, 0.5, 0)) + 0 * mu
        ),
        False,
    )
    (jump,) = tie.jumps(1.0)
    assert jump.r == pytest.approx(1.28, rel=1e-15, abs=0) and (
        jump.below,
        jump.above,
    ) == (1, 0)
    assert (
        Curve("crossing", lambda r, A, mu: A * (r - 1) + 0 * mu, False).jumps(1.0) == []
    )


@pytest.mark.parametrize("mu", [1e-4, 0.02, 0.3, 0.9])
def test_bounds_that_depend_on_mu(mu):
    """A band around π_old gives bounds of r that depend on mu: none where a probability
    would leave [0, 1].
    """
    for delta in (0.05, 0.15):
        high, low = (mu + delta) / mu, (mu - delta) / mu
        assert [
            j.r for j in make_curve("dppo_tv", delta=delta).jumps(1.0, mu)
        ] == pytest.approx([high] if mu + delta < 1 else [])
        assert [
            j.r for j in make_curve("dppo_tv", delta=delta).jumps(-1.0, mu)
        ] == pytest.approx([low] if low > 0 else [])
    for name in ("bandpo_kl", "bandpo_chi2", "dppo_kl"):
        ends, alive = make_curve(name).ends([1.0, -1.0], mu)
        # a band that reaches down to 0 has no end
        assert alive.tolist() == [True, ends[1, 0] == np.inf]
        for A, row in zip((1.0, -1.0), ends, strict=True):
            assert [j.r for j in make_curve(name).jumps(A, mu)] == [
                e for e in row if e < np.inf
            ]


@pytest.mark.parametrize(
    "name", [n for n in upref.names() if not upref.get(n).batch_coupled]
)
def test_breakpoints_bound_the_regimes_within_the_unit_square(name):
    for A, mu in ((1.0, 0.02), (-1.0, 0.9)):
        assert all(
            k * mu < 1 and 3e-4 < k < 3e3 for k in breakpoints(upref.get(name), A, mu)
        )


# ---- losses nobody here wrote --------------------------------------------------------
def ppo(log_prob, old_log_prob, advantages, mask, eps=0.25):
    """Return PPO's loss as a mean over tokens."""
    r = torch.exp(log_prob - old_log_prob)
    return (
        -(
            torch.min(r * advantages, r.clamp(1 - eps, 1 + eps) * advantages) * mask
        ).sum()
        / mask.sum()
    )


def other_order(old_log_prob, log_prob, advantages, mask):
    return ppo(log_prob, old_log_prob, advantages, mask)


def single(log_prob, old_log_prob, advantages, mask):
    return ppo(log_prob.float(), old_log_prob.float(), advantages.float(), mask)


def by_length(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss with each token weighted by the length of its response."""
    r, n = (log_prob - old_log_prob).exp(), mask.sum(1, keepdim=True)
    return (
        -(torch.min(r * advantages, r.clamp(0.75, 1.25) * advantages) * mask * n).sum()
        / (n * mask).sum()
    )


def one_a_response(log_prob, old_log_prob, advantages, mask):
    return ppo(log_prob, old_log_prob, advantages[:, None], mask)


def with_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    return (
        ppo(log_prob, old_log_prob, advantages, mask)
        + 0.1 * (log_prob - ref_log_prob)[mask].mean()
    )


def whitened(log_prob, old_log_prob, advantages, mask):
    return ppo(log_prob, old_log_prob, advantages / advantages.abs().mean(), mask)


R = np.exp(np.linspace(-3, 3, 50))


@pytest.mark.parametrize("loss", [ppo, other_order, by_length, one_a_response, with_kl])
def test_a_losses_curve_is_the_objectives(loss):
    curve, grpo = make_curve(loss), make_curve("grpo", eps=0.25)
    for A in (1.0, -0.5):
        np.testing.assert_allclose(curve(R, A), grpo(R, A), rtol=1e-12)
        assert [j.r for j in curve.jumps(A)] == pytest.approx(
            [j.r for j in grpo.jumps(A)], rel=1e-14
        )
    assert not curve.reads_mu and not curve.batch_coupled


def test_float32_finds_its_bounds_as_far_as_it_tells():
    curve = make_curve(single)
    assert [j.r for j in curve.jumps(1.0)] == pytest.approx([1.25], rel=1e-5)
    assert [j.r for j in curve.jumps(-1.0)] == pytest.approx([0.75], rel=1e-5)


def test_a_bound_on_probabilities_reads_mu():
    """Find that a curve of a user's bound on π - π_old has the jumps of DPPO-TV at each
    mu.
    """

    def tv(log_prob, old_log_prob, advantages, mask):
        p, mu = log_prob.exp(), old_log_prob.exp()
        keep = torch.where(advantages > 0, p - mu <= 0.15, mu - p <= 0.15)
        return -((log_prob - old_log_prob).exp() * advantages * keep)[mask].mean()

    curve, dppo = make_curve(tv), make_curve("dppo_tv")
    assert curve.reads_mu
    for mu in (0.01, 0.3):
        assert [j.r for j in curve.jumps(1.0, mu)] == pytest.approx(
            [j.r for j in dppo.jumps(1.0, mu)], rel=1e-13
        )


def test_coupled_tokens_have_no_weight_by_themselves():
    with pytest.raises(
        upref.InputError,
        match=r"whitened has no weight of a single token: .*other tokens",
    ):
        make_curve(whitened)


def gated(log_prob, old_log_prob, advantages, mask):
    """Clip each response at a ratio of its own, 1.05."""
    d = torch.where(mask, log_prob - old_log_prob, 0)
    s = (d.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().detach()
    A = torch.where(mask, advantages, 0)
    return -(((A < 0) | (s <= 1.05)) * A * d.exp()).sum() / mask.sum()


def by_factor(log_prob, old_log_prob, advantages, mask):
    """Multiply each response by a power of its ratio."""
    d = torch.where(mask, log_prob - old_log_prob, 0)
    s = (d.sum(1, keepdim=True) / mask.sum(1, keepdim=True)).exp().detach()
    return -(s**0.5 * torch.where(mask, advantages, 0) * d.exp()).sum() / mask.sum()


def test_a_weight_says_that_it_is_measured_on_one_token():
    """One token tells nothing of a response of several, where s is not r."""
    own = [make_curve(loss) for loss in (gated, by_factor)]
    of_objectives = [make_curve(name) for name in ("gspo", "gmpo", "topr", "dapo")]
    of_tokens = [make_curve(loss) for loss in (ppo, by_length, one_a_response, with_kl)]
    assert words_for_one_token(own + of_tokens + of_objectives) == (
        "gated, by_factor, gmpo: of a response of one token, where its ratio = r; "
        "gspo: of a response of one token, where s = r; "
        "topr: of a response of one token, where S = r"
    )
    assert words_for_one_token(of_objectives[:1], "s") == ""
    of_prefix = words_for_one_token([make_curve("cppo")])  # only later tokens change
    assert of_prefix == "cppo: of a response of one token, where its ratio = r"


class Seen:
    """A loss as the curve asks for it, that remembers how much it was asked at once."""

    name = "seen"
    rows: list[int] = []  # noqa: RUF012

    def gradient(self, b):
        self.rows.append(len(b.mask))
        A = b.adv[:, 0]
        return (A - 0 * A[:, None]).mean(0)[:, None] / len(A)  # a [B, B] on the way


def test_memory_is_bounded():
    curve = make_curve_of_loss(Seen())
    tracemalloc.start()
    curve(np.full((400, 400), 1.1), 1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(Seen.rows) <= 1000 and peak < 50e6


def test_a_ratio_of_0_has_a_weight_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_curve("ppo_clip")(0.0, 1.0) == 0.0
