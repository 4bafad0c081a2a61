# SPDX-License-Identifier: Apache-2.0
"""Claims of Section 3: REINFORCE, importance sampling, clipping, Cap. What is derived
is in derivations/.
"""

import operator
from itertools import pairwise, product
from math import exp, prod

import torch

import upref
from tests.support.on_tokens import F64, T, flow, gradient, weight


# ---- REINFORCE -----------------------------------------------------------------------
def test_the_gradient_of_eq_1_is_not_eq_2(counterexample, holds):
    """Two arms, equally likely, A = (1, 0): the smallest."""
    z, A = T(0.0, 0.0), T(1.0, 0.0)
    fn = upref.get("reinforce").fn
    pi = torch.softmax(z, 0)
    eq_2 = gradient(lambda z: (pi * A * torch.log_softmax(z, 0)).sum(), z)
    eq_1 = gradient(
        lambda z: (torch.softmax(z, 0) * fn(torch.log_softmax(z, 0), None, A)).sum(), z
    )
    frozen = gradient(lambda z: (pi * fn(torch.log_softmax(z, 0), None, A)).sum(), z)
    holds("∂/∂z_1 of Eq. 1, its samples held fixed", eq_2[0].item(), frozen[0].item())
    counterexample(
        "∂/∂z_1 of Eq. 1, π = (1/2, 1/2), A = (1, 0)", eq_2[0].item(), eq_1[0].item()
    )


# ---- importance sampling -------------------------------------------------------------
def responses():
    return list(product((0, 1), repeat=2))


def test_a_token_ratio_estimates_the_target_for_one_token_only(counterexample, holds):
    """Two binary tokens, π_old uniform, R = 1 for (1, 1) alone: E_old[Σ r_t R ∇log π_t]
    against ∇E_π[R].
    """
    # logits of a 1 in the first and, whatever the first was, in the second place
    z = T(1.0, 1.0)

    def lp(z, o):
        one = torch.nn.functional.logsigmoid
        return torch.stack([one(z[t] if o[t] else -z[t]) for t in (0, 1)])

    fn, old = upref.get("is_pg").fn, T(0.5, 0.5).log()
    R = {o: float(o == (1, 1)) for o in responses()}

    def expected_reward(z):
        return sum(lp(z, o).sum().exp() * R[o] for o in responses())

    # under π_old each of the four responses has the probability 0.25
    def by_token_ratios(z):
        return sum(0.25 * fn(lp(z, o), old, T(R[o])).sum() for o in responses())

    def by_whole_ratio(z):
        return sum(
            0.25 * fn(lp(z, o).sum(), old.sum(), T(R[o])).sum() for o in responses()
        )

    target = gradient(expected_reward, z)[0].item()
    tokens = gradient(by_token_ratios, z)[0].item()
    whole = gradient(by_whole_ratio, z)[0].item()
    holds("∂/∂z_1 by the ratio of the whole response", target, whole)
    words = "∂/∂z_1 by token ratios, two tokens, π_old uniform"
    counterexample(words, target, tokens)


def test_the_factor_r_is_what_makes_it_right(counterexample):
    """One step, three arms: with r the mean under π_old is the gradient of E_π[A];
    without, as UP has it, it is not.
    """
    z, A, mu = T(0.0, 0.0, 0.693147), T(1.0, 0.0, 0.0), T(1.0, 1.0, 1.0) / 3
    target = gradient(lambda z: (torch.softmax(z, 0) * A).sum(), z)

    def gradient_by_logits(name):
        """Return the gradient by the logits of the expectation of an objective's
        function.
        """
        return gradient(
            lambda z: (
                mu * upref.get(name).fn(torch.log_softmax(z, 0), mu.log(), A)
            ).sum(),
            z,
        )

    assert torch.allclose(gradient_by_logits("is_pg"), target, atol=1e-15)
    counterexample(
        "∂/∂z_1 without the factor r",
        target[0].item(),
        gradient_by_logits("up_grpo")[0].item(),
    )


def test_r_explodes_when_marginal_means_absolute(holds, counterexample):
    """Find a large r for an increase of π by 0.001, and none for an increase by a tenth
    of itself.
    """
    mu = 1e-6
    holds(
        "r after π rises by 0.001 from π_old = 1e-6",
        100,
        (mu + 0.001) / mu,
        operator.gt,
    )
    counterexample(
        "r after π rises by a tenth of itself, whatever π_old",
        100,
        1.1 * mu / mu,
        operator.gt,
    )


def test_the_weight_is_at_most_one_over_pi_old(holds):
    for mu in (1e-1, 1e-3, 1e-6):
        holds(
            f"largest weight at π_old = {mu:g}, A = 1",
            1 / mu,
            weight("is_pg", 1 / mu, 1.0),
        )


def test_the_geometric_mean_tames_long_responses(holds):
    """Token ratios 1.2 or 0.8, equally likely and independent: variances by listing
    all, T = 1 to 10.
    """
    spread = []
    for length in range(1, 11):
        r = torch.tensor(list(product((1.2, 0.8), repeat=length)), dtype=F64)
        whole, s = r.prod(1), r.log().mean(1).exp()
        assert torch.allclose(s, whole ** (1 / length))
        spread.append((whole.var(correction=0).item(), s.var(correction=0).item()))
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(spread))
    holds(
        "variance of s over that of the whole ratio at T = 10",
        1,
        spread[-1][1] / spread[-1][0],
        operator.lt,
    )


# ---- equations 4 to 6 by hand --------------------------------------------------------
LP = [[-0.5, -3.0, -0.2], [-1.2, -0.4, 0.0], [-2.0, -0.1, -0.7]]
OLD = [[-0.6, -3.5, -0.2], [-0.7, -0.4, 0.0], [-1.0, -0.9, -0.9]]
LENGTHS, ADV = [3, 2, 3], [1.0, -0.5, 1.5]


def batch():
    """Return the batch of the claims, [B, 3], with its mask."""
    mask = torch.tensor([[t < n for t in range(3)] for n in LENGTHS])
    return upref.Rollouts(
        torch.tensor(LP, dtype=F64),
        torch.tensor(OLD, dtype=F64),
        T(*ADV)[:, None],
        mask,
    )


def clipped(r, A, low, high):
    return min(r * A, min(max(r, 1 - low), 1 + high) * A)


def test_eq_4_by_hand(holds):
    rows = [
        [clipped(exp(LP[i][t] - OLD[i][t]), A, 0.2, 0.2) for t in range(LENGTHS[i])]
        for i, A in enumerate(ADV)
    ]
    by_hand = sum(sum(x) / len(x) for x in rows) / 3
    holds(
        "J_GRPO of three responses, summed as Eq. 4 is printed",
        by_hand,
        upref.get("grpo")(batch()).item(),
    )


def test_eqs_5_and_6_by_hand(holds):
    s = [prod(torch.tensor(LP[i][:n], dtype=F64).sub(torch.tensor(OLD[i][:n], dtype=F64)).exp().tolist()) ** (1 / n)
         for i, n in enumerate(LENGTHS)]  # fmt: skip
    by_hand = sum(clipped(x, A, 3e-4, 4e-4) for x, A in zip(s, ADV, strict=True)) / 3
    found = upref.get("gspo")(batch(), eps_low=3e-4, eps_high=4e-4).item()
    holds("J_GSPO of three responses, as Eqs. 5 and 6 are printed", by_hand, found)


def test_dapo_has_two_bounds_and_no_kl_term():
    o = upref.get("dapo")
    assert (
        {"eps_low", "eps_high"} <= set(o.hyperparameters)
        and "beta" not in o.hyperparameters
        and not o.kl
    )


# ---- clipping and Cap ----------------------------------------------------------------
def test_clipping_ends_a_token_s_own_push_and_does_not_keep_its_ratio(
    holds, counterexample
):
    """Two arms: beyond the bound a token has no gradient of its own, and one large step
    goes beyond the bound.
    """
    holds("weight of a right token at r = 1.21, ε = 0.2", 0, weight("grpo", 1.21, 1.0))
    holds("weight of a wrong token at r = 0.79, ε = 0.2", 0, weight("grpo", 0.79, -1.0))
    r = flow(1, 2.0, (0.5, 0.5), (1.0, -1.0), "grpo")[0]
    counterexample(
        "π_θ/π_old after one step, lr 2, π_old = (1/2, 1/2), A = (1, -1)",
        1.2,
        r,
        operator.le,
    )


# ---- Section 2 -----------------------------------------------------------------------
def test_in_which_sense_dapo_clips_symmetrically(holds, counterexample):
    holds("weight of a right token under GRPO, r = 50", 0, weight("grpo", 50.0, 1.0))
    holds("weight of a wrong token under GRPO, r = 0.02", 0, weight("grpo", 0.02, -1.0))
    gspo = upref.get("gspo")
    right = weight("gspo", 50.0, 1.0)
    wrong = weight("gspo", 0.02, -1.0)
    assert gspo.level == "sequence_mean" and right == wrong == 0
    holds("weight of a right token under DAPO, r = 50", 0, weight("dapo", 50.0, 1.0))
    holds("weight of a wrong token under DAPO, r = 0.02", 0, weight("dapo", 0.02, -1.0))
    for name in ("dapo", "gspo"):
        bounds = upref.get(name).hyperparameters
        counterexample(
            f"ε_high of {name.upper()}, as ε_low", bounds["eps_low"], bounds["eps_high"]
        )


def test_ppo_clips_and_trpo_does_not(holds, counterexample):
    """TRPO's surrogate is E[r A] (its Eq. 14); the constraint is on the mean KL
    divergence.
    """
    holds(
        "weight of a right token under PPO's clip, r = 50",
        0,
        weight("ppo_clip", 50.0, 1.0),
    )
    counterexample(
        "weight of a right token in TRPO's surrogate r A, r = 50",
        0,
        weight("is_pg", 50.0, 1.0),
    )


def test_the_room_that_methods_with_pi_old_leave(holds, counterexample):
    """SAPO's weight fades, and never ends."""

    def cap(name):
        return upref.capacity(name, 0.01, 0.01, 1.0).item()

    for name in ("bandpo_kl", "gmpo"):
        where = f"Cap of {name} at π_θ = π_old = 0.01, against UP-DAPO's"
        holds(where, cap("up_dapo"), cap(name), operator.lt)
    where = "Cap of sapo at π_θ = π_old = 0.01, against UP-DAPO's"
    counterexample(where, cap("up_dapo"), cap("sapo"), operator.lt)
    assert 0 < weight("sapo", 20.0, 1.0) < 1e-3


def test_the_methods_of_section_2_read_the_old_policy(holds):
    """One right response of two tokens under the same π_θ, at two old policies."""
    now, mask = T(0.5, 0.4).log()[None], torch.ones(1, 2, dtype=torch.bool)
    for name in ("bandpo_kl", "sapo", "gmpo", "m2po"):

        def gradient_of_name(old, name=name):
            return gradient(
                lambda lp: upref.get(name)(upref.Rollouts(lp, old, T(1.0)[None], mask)),
                now,
            )

        apart = (
            (gradient_of_name(now) - gradient_of_name(now + 0.05)).abs().max().item()
        )
        holds(
            f"largest change of the gradient of {name} with the old policy",
            1e-6,
            apart,
            operator.gt,
        )


def test_the_derivative_at_the_kink(holds, counterexample):
    def J(x):
        return upref.get("grpo").fn(T(x), T(0.0), T(1.0), eps=1.0).item()

    at, h = torch.log(T(2.0)).item(), 1e-7

    def near(found, claimed):
        return abs(found - claimed) < 1e-5

    holds("left derivative at r = 1+ε = 2", 2, (J(at) - J(at - h)) / h, near)
    counterexample("right derivative at r = 1+ε = 2", 2, (J(at + h) - J(at)) / h, near)


def test_one_large_step_passes_the_bound(counterexample):
    r = flow(1, 2.0, (0.5, 0.5), (1.0, -1.0))[0]
    counterexample(
        "π_θ/π_old after one step, lr 2, π_old = (1/2, 1/2), A = (1, -1)",
        1.28,
        r,
        operator.le,
    )


def test_small_steps_pass_the_bound(counterexample):
    mu = (0.01, 0.495, 0.495)
    r = flow(1000, 0.1, mu, (1.0, -1.0, -1.0))[0]
    counterexample(
        "π_θ after 1000 small steps, π_old = 0.01",
        min(1, 1.28 * 0.01),
        r * 0.01,
        operator.le,
    )


def test_cap_is_linear_only_while_the_bound_is_below_1(counterexample, holds):
    def cap(mu):
        return upref.capacity("dapo", mu, mu, 1.0).item()

    holds("Cap at π_θ = π_old = 0.02 over that at 0.01", 2, cap(0.02) / cap(0.01))
    counterexample("Cap at π_θ = π_old = 0.9", 0.28 * 0.9, cap(0.9))


def test_no_advantage_helps_beyond_the_clip(holds):
    for A in (1.0, 1e6):
        holds(f"weight at r = 1.29, A = {A:g}", 0, weight("dapo", 1.29, A))


def test_the_example_of_section_3_3(holds):
    at_old, at_bound = upref.capacity("dapo", [0.01, 0.0128], 0.01, 1.0).tolist()
    holds("DAPO's Cap at π_θ = π_old = 0.01", 0.0028, at_old)
    holds("DAPO's Cap at π_θ = 0.0128, π_old = 0.01", 0, at_bound)
