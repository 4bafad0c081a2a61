# SPDX-License-Identifier: Apache-2.0
"""Cap read off the weight is the paper's closed forms, for registered objectives and
for losses nobody here wrote.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import upref
from tests.support.daily import daily
from upref.weights.capacity import capacity, own_token_bound, words_for_fading
from upref.weights.curve import make_curve, obstacle

TOL = 1e-9
MU, P = np.meshgrid(np.linspace(0.005, 1, 97), np.linspace(0, 1, 101))
MAPPABLE = [n for n in upref.names() if not obstacle(upref.get(n))]
ALWAYS_ALIVE_UP = [n for n in MAPPABLE if n.startswith("up_")] + [
    "ce_gppo", "cispo", "cispo_verl", "dapo_no_upper_clip", "drpo", "gppo", "is_pg", "reinforce",
    "reinforce_off_policy", "rloo", "sapo", "topr", "up(sapo)", "up(gmpo)", "up(dppo_tv)", "w_reinforce",
]  # fmt: skip


def eq_11(p, mu, eps_high):
    return np.maximum(np.minimum(1, (1 + eps_high) * mu) - p, 0)


def eq_A3(p, mu, eps_low, c=np.inf):
    inside = ((1 - eps_low) * mu <= p) & (p <= c * mu * (1 + 1e-13))
    return np.where(inside, p - (1 - eps_low) * mu, 0)


def assert_cap(found, expected, tol=TOL):
    np.testing.assert_allclose(found, expected, rtol=0, atol=tol)


# ---- the paper's closed forms --------------------------------------------------------
@pytest.mark.parametrize("eps_high", [0, 3e-4, 0.2, 0.28, 5])
def test_eq_11(eps_high):
    assert_cap(capacity("dapo", P, MU, 1, eps_high=eps_high), eq_11(P, MU, eps_high))
    assert_cap(capacity("gspo", P, MU, 1, eps_high=eps_high), eq_11(P, MU, eps_high))


@pytest.mark.parametrize("c", [None, 1.001, 3, 10])
@pytest.mark.parametrize("eps_low", [0, 3e-4, 0.2, 1])
@pytest.mark.parametrize("name", ["dapo", "up_dapo", "dapo_no_upper_clip"])
def test_eq_A3(name, eps_low, c):
    assert_cap(
        capacity(name, P, MU, -1, eps_low=eps_low, c=c),
        eq_A3(P, MU, eps_low, c or np.inf),
    )


@pytest.mark.parametrize("name", ALWAYS_ALIVE_UP)
def test_no_clip_for_positive_advantages_leaves_all_of_1_minus_p(name):
    assert_cap(capacity(name, P, MU), 1 - P, 0)
    # SAPO's gate has underflowed there
    assert_cap(capacity(name, 1e-5, [1e-9, 1e-5, 1e-3]), 1 - 1e-5, 0)
    assert capacity(name, 0.9, 1e-9) == pytest.approx(0.1, abs=TOL)


def test_a_penalty_that_pulls_back_ends_the_capacity():
    """CFPO has no clip and the Cap of one; DRO carries a token to r = e^(A/τ)."""
    for A in (1, -1):
        assert_cap(
            capacity("cfpo", P, MU, A, eps=0.2), capacity("ppo_clip", P, MU, A, eps=0.2)
        )
    assert_cap(capacity("dro", 0.01, 0.01, 1.0, tau=2.0), 0.01 * (np.exp(0.5) - 1))


def test_a_bound_that_widens_for_rare_tokens():
    """RIPO lets a token rise to mu + √(δ mu), DPPO to mu + δ."""
    assert_cap(
        capacity("ripo", P, MU),
        np.maximum(np.minimum(1, MU + np.sqrt(0.05 * MU)) - P, 0),
    )
    assert_cap(capacity("dppo_tv", P, MU), np.maximum(np.minimum(1, MU + 0.15) - P, 0))


PROBABILITY = st.floats(0, 1) | st.floats(-12, 0).map(lambda x: 10**x)


@settings(max_examples=60, deadline=None)
@given(
    p=PROBABILITY,
    mu=PROBABILITY,
    low=st.floats(0, 1),
    high=st.floats(0, 20),
    c=st.floats(1.01, 50),
)
def test_closed_forms_anywhere(p, mu, low, high, c):
    assert_cap(capacity("dapo", p, mu, 1, eps_high=high), eq_11(p, mu, high))
    assert_cap(capacity("up_dapo", p, mu, 1), 1 - p)
    if abs(p - c * mu) > 1e-9:  # the jump
        assert_cap(
            capacity("up_dapo", p, mu, -1, eps_low=low, c=c), eq_A3(p, mu, low, c)
        )


def test_the_papers_example():
    assert capacity("dapo", 0.01, 0.01) == pytest.approx(0.0028, abs=1e-15)
    assert capacity("dapo", 0.0128, 0.01) == 0
    assert capacity("up_dapo", 0.01, 0.01) == 0.99


def test_cap_is_linear_in_pi_old_up_to_1_over_1_plus_eps_high():
    mu = np.linspace(0.79, 1, 50)  # 1/1.28 = 0.78
    assert_cap(capacity("dapo", 0.3, mu), capacity("up_dapo", 0.3, mu))
    assert_cap(capacity("dapo", mu[:25] / 2, mu[:25] / 2), 0.14 * mu[:25])


def test_the_largest_negative_cap_is_at_the_dual_clip():
    c, el, n = 4, 0.2, 400
    x = np.arange(1, n + 1) / n
    mu, p = np.meshgrid(x, x)
    cap = capacity("dapo", p, mu, -1, eps_low=el, c=c)
    best = np.unravel_index(cap.argmax(), cap.shape)
    assert (mu[best], p[best]) == (1 / c, 1)
    assert cap.max() == pytest.approx(1 - (1 - el) / c, abs=TOL)


# ---- objectives whose bounds depend on mu --------------------------------------------
@pytest.mark.parametrize("name", ["dppo_tv", "dppo_tv_verl", "bandpo_tv"])
@pytest.mark.parametrize("delta", [0.05, 0.15, 0.9])
def test_total_variation_is_an_additive_window(name, delta):
    # a point whose distance to the bound is rounding may fall on either side of it: it
    # is 1e-16 away from 0 anyway
    assert_cap(
        capacity(name, P, MU, 1, delta=delta),
        np.maximum(np.minimum(1, MU + delta) - P, 0),
    )
    low = np.maximum(MU - delta, 0)
    assert_cap(capacity(name, P, MU, -1, delta=delta), np.maximum(P - low, 0))


def bernoulli_kl(mu, p):
    return mu * np.log(mu / p) + (1 - mu) * np.log((1 - mu) / (1 - p))


@pytest.mark.parametrize("name", ["bandpo_kl", "dppo_kl", "dppo_kl_verl"])
def test_kl_band_ends_where_the_divergence_is_delta(name):
    for A, mu in (
        (1, np.array([1e-4, 0.01, 0.3, 0.9])),
        (-1, np.array([0.01, 0.3, 0.9, 0.999])),
    ):
        end = mu + A * capacity(name, mu, mu, A, delta=0.05)
        np.testing.assert_allclose(bernoulli_kl(mu, end), 0.05, rtol=1e-6)


def test_band_of_objectives_2_20():
    """At mu = .01, delta = .05: chi2 from its quadratic, KL from its equation, both
    derived here.
    """
    mu, delta = 0.01, 0.05
    # chi2: mu (r-1)^2 + (1-mu) ((1-mu r)/(1-mu) - 1)^2 = delta is a quadratic in u = r
    # - 1 without linear term
    u = np.roots([mu + mu**2 / (1 - mu), 0, -delta]).max()
    assert capacity("bandpo_chi2", mu, mu) == pytest.approx(mu * u, abs=TOL)
    assert mu * u == pytest.approx(np.sqrt(delta * mu * (1 - mu)), abs=1e-15)
    assert round(mu * u, 3) == 0.022
    r = 1 + capacity("bandpo_kl", mu, mu) / mu
    assert bernoulli_kl(mu, mu * r) == pytest.approx(delta, rel=1e-9)
    assert round(float(r), 2) == 7.81
    assert round(float(capacity("bandpo_kl", mu, mu)), 3) == 0.068
    assert round(float(capacity("bandpo_tv", mu, mu)), 3) == 0.05


def test_gmpo_clips_in_log_space():
    assert_cap(
        capacity("gmpo", P, MU, 1, eps=0.4),
        np.maximum(np.minimum(1, np.exp(0.4) * MU) - P, 0),
    )
    assert_cap(
        capacity("gmpo", P, MU, -1, eps=0.4), np.maximum(P - np.exp(-0.4) * MU, 0)
    )


def test_narrow_windows_are_found():
    def cuts(name, A, **hp):
        return [j.r for j in make_curve(name, **hp).jumps(A, 0.5) if j.end]

    assert cuts("gspo", 1.0) == pytest.approx([1 + 4e-4], abs=1e-15)
    assert cuts("gspo", -1.0, eps_low=1e-9) == pytest.approx([1 - 1e-9], abs=1e-15)
    assert cuts("dapo", -1.0, eps_low=1e-8, c=1 + 1e-7) == pytest.approx(
        [1 - 1e-8, 1 + 1e-7], abs=1e-15
    )
    assert cuts("up_dapo", 1.0) == []


# ---- conventions ---------------------------------------------------------------------
def test_breakpoints():
    mu = np.linspace(0.01, 0.3, 30)
    assert (capacity("dapo", 1.28 * mu, mu, 1) < 1e-16).all()
    assert (capacity("dapo", 0.8 * mu, mu, -1) < 1e-16).all()
    # Eq. A3 includes r = c, however 3 mu / mu rounds
    assert_cap(capacity("dapo", 3 * mu, mu, -1, c=3), 2.2 * mu)
    assert (capacity("dapo", 3.0000001 * mu, mu, -1, c=3) == 0).all()
    assert (capacity("dapo", 0.75, 0.25, -1, c=3), capacity("dapo", 0.75, 0.25, 1)) == (
        pytest.approx(0.55),
        0,
    )


@pytest.mark.parametrize("name", MAPPABLE)
def test_ends_of_the_unit_square_and_no_update(name):
    assert (capacity(name, P, MU, 0) == 0).all()
    assert (capacity(name, 1, MU, 1) == 0).all()  # nowhere to go
    assert (capacity(name, 0, MU, -1) == 0).all()
    # the limit p -> 0, where the weight A r of a ratio vanishes as a value
    assert (capacity(name, 0, MU, 1) > 0).all()
    for A in (1, -1):
        cap = capacity(name, P, MU, A)
        assert ((cap >= 0) & (cap <= (1 - P if A > 0 else P))).all()
        assert capacity(name, 0.0, 0.0, A) >= 0


def test_pi_old_0_is_a_limit():
    p = np.linspace(0, 1, 11)
    assert_cap(capacity("dapo", p, 0, 1), 0 * p)
    assert_cap(capacity("dppo_tv", p, 0, 1), np.maximum(0.15 - p, 0))
    assert_cap(capacity("up_dapo", p, 0, -1), p)
    assert_cap(capacity("up_dapo", p, 0, -1, c=3), 0 * p)


def test_shapes_broadcast_and_signs_mix():
    """Arrays of p, mu and A broadcast; numbers, empty lists and tensors are taken too."""
    p, mu, A = (
        np.full((3, 1), 0.3),
        np.array([0.2, 0.3]),
        np.array([[1.0], [-2.5], [0]]),
    )
    cap = capacity("dapo", p, mu, A)
    assert cap.shape == (3, 2) and cap.dtype == float
    assert_cap(cap, [[0, 0.084], [0.14, 0.06], [0, 0]])
    assert capacity("dapo", 0.3, 0.3).shape == ()
    assert capacity("dapo", [], []).shape == (0,)
    assert_cap(
        capacity("dapo", torch.tensor([0.3]), torch.tensor(0.3, requires_grad=True)),
        [0.084],
        1e-7,
    )
    many = np.linspace(0.001, 1, 1301)  # more rows than one block
    assert_cap(capacity("dppo_tv", many, many), np.minimum(1, many + 0.15) - many)


def test_magnitude_of_the_advantage_does_not_matter():
    for name in (n for n in MAPPABLE if not upref.get(n).scale_exception):
        for A in (1, -1):
            assert_cap(
                capacity(name, 0.2, MU[0], A),
                capacity(name, 0.2, MU[0], 7.5 * A),
                1e-15,
            )


def test_sequence_level_follows_the_geometric_mean():
    """Our definition: shift all log-probs of a response together; p̄ moves from p̄_old
    (1+ε_high) on nowhere.
    """
    gspo, mask = upref.get("gspo"), torch.ones(1, 3, dtype=torch.bool)
    old = torch.tensor([[-0.1, -2.0, -0.7]], dtype=torch.float64)
    mean = old.mean().exp().item()
    end = mean + float(capacity("gspo", mean, mean))
    shift = np.log(end / mean)
    for moved, alive in ((shift - 1e-9, True), (shift + 1e-9, False)):
        lp = (old + moved).requires_grad_()
        gspo.J(lp, old, torch.ones(1, 1, dtype=torch.float64), mask).backward()
        assert (
            bool((lp.grad != 0).all()) is alive and bool((lp.grad != 0).any()) is alive
        )


def test_one_token_of_a_sequence_goes_further():
    """Find that `own_token_bound` is where the gradient of GSPO ends for the token's
    own probability.
    """
    # x 1.49
    assert own_token_bound(0.1, 4e-4, 1000) / 0.1 == pytest.approx(1.0004**1000)
    assert own_token_bound(0.9, 4e-4, 1000) == 1
    gspo, mask = upref.get("gspo"), torch.ones(1, 3, dtype=torch.bool)
    old = torch.tensor([[-1.0, -2.0, -0.7]], dtype=torch.float64)
    others = torch.tensor([[0, 1e-4, -7e-4]], dtype=torch.float64)
    bound = own_token_bound(np.exp(-1.0), 4e-4, 3, others.sum().item())
    for factor, alive in ((1 - 1e-9, True), (1 + 1e-9, False)):
        lp = old + others
        lp[0, 0] = float(np.log(bound * factor))
        lp.requires_grad_()
        gspo.J(lp, old, torch.ones(1, 1, dtype=torch.float64), mask).backward()
        assert bool((lp.grad != 0).all()) is alive


def test_a_clipped_token_still_moves():
    """What Cap is not: in a softmax the mass taken from two others lifts a token whose
    own gradient is 0.
    """
    old = torch.tensor([0.01, 0.495, 0.495], dtype=torch.float64)
    z, A = old.log().clone(), torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64)
    dapo = upref.get("dapo")
    for _ in range(4000):
        z.requires_grad_()
        dapo.surrogate(z.log_softmax(0), old.log(), A).sum().backward()
        z = (z + 0.02 * z.grad).detach()
    p = z.softmax(0)[0].item()
    assert p > 2 * (0.01 + capacity("dapo", 0.01, 0.01))


# ---- losses nobody here wrote --------------------------------------------------------
def ppo(lp, lp_old, A, mask, eps=0.2):
    r = torch.exp(lp - lp_old)
    return -(torch.min(r * A, r.clamp(1 - eps, 1 + eps) * A) * mask).sum() / mask.sum()


def masked_tv(lp, lp_old, A, mask, delta=0.15):
    p, mu = lp.exp(), lp_old.exp()
    keep = torch.where(A > 0, p - mu <= delta, mu - p <= delta).detach()
    return -(torch.exp(lp - lp_old) * A * keep)[mask].mean()


COARSE = np.meshgrid(np.linspace(0.02, 1, 21), np.linspace(0, 1, 23))


@pytest.mark.parametrize("A", [1, -1, -0.3])
@pytest.mark.parametrize("loss, name", [(ppo, "grpo"), (masked_tv, "dppo_tv")])
def test_user_loss(loss, name, A):
    mu, p = COARSE
    assert_cap(capacity(loss, p, mu, A), capacity(name, p, mu, A))


def test_user_loss_takes_its_hyperparameters():
    assert_cap(capacity(ppo, 0.1, 0.1, 1, eps=0.5), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", daily(MAPPABLE, 4))
def test_registered_surrogate_taken_as_a_user_loss(name):
    """The weight by autograd through the code that trains, against the weight written
    by hand.
    """
    o = upref.get(name)
    # a bisection inside a bisection takes its time
    mu = np.array([0.2] if o.not_symbolic else [0.03, 0.2, 0.6])
    p = mu * [[0.5], [0.9], [1.0], [1.1], [1.6]]

    def loss(lp, lp_old, A, mask):
        return -o.J(lp, lp_old, A, mask)

    for A in (1, -1):
        assert_cap(capacity(loss, p, mu, A), capacity(o, p, mu, A))


# ---- bad input -----------------------------------------------------------------------
@pytest.mark.parametrize(
    "args, says",
    [
        (("dapo", 1.2, 0.5), r"pi is 1.2: a probability is in \[0, 1\]"),
        (("dapo", -0.7, -0.7), "pi is -0.7: .*logarithm"),
        (("dapo", 0.5, [0.1, float("nan")]), "pi_old is nan"),
        (("dapo", 0.5, 0.5, float("inf")), "adv is inf: an advantage is finite"),
        (("dapo", "half", 0.5), "pi must be numbers, got str"),
        (
            ("dapo", [0.1, 0.2], [0.1, 0.2, 0.3]),
            r"shapes \(2,\), \(3,\), \(\), which do not broadcast",
        ),
        (("dappo", 0.5, 0.5), "dapo"),
        ((7, 0.5, 0.5), "got int"),
        (
            ("m2po", 0.5, 0.5),
            "m2po has no weight of a single token: which tokens are masked depends on the whole batch",
        ),
        (
            ("aspo_code", 0.5, 0.5),
            "aspo_code has no weight of a single token: its clip depends on the token's entropy",
        ),
        (("up(m2po)", 0.5, 0.5), "whole batch"),
        (
            (lambda lp, old, A, mask: lp[:, 0, None, None], 0.5, 0.5),
            "returns shape .*return a scalar",
        ),
        ((lambda lp, old, A, mask: 0.0, 0.5, 0.5), "returns a float"),
        ((lambda lp, old, A, mask: old.sum(), 0.5, 0.5), "has no gradient"),
        (
            (lambda lp, old, A, mask: (0 * lp).sqrt().sum(), 0.5, 0.5),
            "no finite gradient in log_prob at pi=",
        ),
    ],
)
def test_bad_input(args, says):
    with pytest.raises(upref.InputError, match=says) as e:
        capacity(*args)
    assert str(e.value).count("\n") == 0


def test_unknown_or_impossible_hyperparameters():
    with pytest.raises(upref.InputError, match="no hyperparameter 'eps'"):
        capacity("dapo", 0.5, 0.5, eps=0.2)
    with pytest.raises(upref.InputError, match="eps_low must be a number >= 0"):
        capacity("dapo", 0.5, 0.5, eps_low=-2)


def test_each_missing_input_of_a_weight_is_named():
    with pytest.raises(upref.errors.InputError, match="pass mu= and mask= and group="):
        upref.get("tpo").weight(torch.ones(2, 3), torch.ones(2, 1))


def test_a_weight_that_fades_has_the_room_of_no_clip():
    """As its docstring says: also where float64 rounds the weight to 0."""

    def soft(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        weighed = (1 + torch.tanh((r - 1) / 0.5)) * torch.where(mask, advantages, 0)
        return -weighed.sum() / mask.sum()

    r = torch.tensor([50.0])
    assert float(make_curve(soft)(r.numpy(), 1.0)[0]) == 0
    assert upref.capacity(soft, 0.5, 0.01) == upref.capacity("up_dapo", 0.5, 0.01)


def test_a_weight_that_fades_is_named_beside_its_cap():
    """SAPO's row was that of UP-DAPO, and no word told the two apart."""
    curves = [make_curve(name) for name in ("sapo", "dapo", "up_dapo", "is_pg")]
    words = words_for_fading(curves)
    assert words.startswith("sapo: the weight fades without a cut")
    assert words_for_fading(curves[1:]) == ""
