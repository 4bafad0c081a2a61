# SPDX-License-Identifier: Apache-2.0
"""Claims of Section 4 and Appendices B and C: UP, the negative branch, the sequence
level.
"""

import operator
from dataclasses import replace
from itertools import product

import pytest
import torch

import upref
from tests.support.on_tokens import F64, T, flow, gradient, weight
from upref.advantages import group_norm
from upref.rollouts import autograd_gradient
from upref.weights.batches import batch

RATIOS = (1e-3, 0.5, 0.8, 1.0, 1.28, 2.0, 50.0, 1e3)


# ---- Section 4.1 ---------------------------------------------------------------------
@pytest.mark.parametrize("name", ["up_grpo", "up_dapo", "up_gspo"])
def test_every_positive_token_keeps_its_weight(name, holds):
    assert {weight(name, r, 1.0) for r in RATIOS} == {1.0}
    holds(f"weight of a right token under {name}, r = 1000", 1, weight(name, 1e3, 1.0))


def test_cap_of_up_is_1_minus_p(holds):
    for p, mu in product((0.01, 0.5, 0.99), repeat=2):
        assert upref.capacity("up_dapo", p, mu, 1.0).item() == pytest.approx(1 - p)
    holds(
        "UP-DAPO's Cap at π_θ = 0.0128, π_old = 0.01",
        0.9872,
        upref.capacity("up_dapo", 0.0128, 0.01, 1.0).item(),
    )


def test_the_sign_of_an_advantage_and_correctness(holds, counterexample):
    """A third reward, here of wrong and too long answers, gives wrong ones A > 0."""

    def above(*rewards):
        group = torch.zeros(len(rewards), dtype=torch.int64)
        return (group_norm(T(*rewards), group) > 0).sum().item()

    holds("rollouts with A > 0, two of four right", 2, above(1.0, 0.0, 0.0, 1.0))
    counterexample(
        "rollouts with A > 0, all four wrong, two of them too long: rewards -1 and -2",
        0,
        above(-1.0, -1.0, -2.0, -2.0),
    )
    assert above(1.0, 1.0, 1.0, 1.0) == 0


def with_dual_clip(c):
    """Return the size of UP-DAPO's weight of a wrong token, A = -1, by ratio."""
    return {r: -weight("up_dapo", r, -1.0, c=c) for r in (*RATIOS, 0.999 * c)}


def test_only_the_positive_branch_is_without_a_ratio(holds, counterexample):
    holds(
        "weight of a right token under UP-DAPO, r = 50, A = 1",
        1,
        weight("up_dapo", 50.0, 1.0),
    )
    counterexample(
        "weight of a wrong token under UP-DAPO, r = 50, A = -1",
        -1,
        weight("up_dapo", 50.0, -1.0),
    )
    of_wrong = with_dual_clip(3.0)
    assert max(of_wrong.values()) == pytest.approx(2.997) and of_wrong[50.0] == 0


def test_grpo_clips_both_signs_by_one_epsilon(holds):
    assert "eps" in upref.get("grpo").hyperparameters
    for eps in (0.1, 0.2, 0.3):
        inside = (
            weight("grpo", 1 + 0.9 * eps, 1.0, eps=eps),
            weight("grpo", 1 - 0.9 * eps, -1.0, eps=eps),
        )
        assert inside == pytest.approx((1 + 0.9 * eps, -(1 - 0.9 * eps)))
        for r, A in ((1 + 1.1 * eps, 1.0), (1 - 1.1 * eps, -1.0)):
            where = f"GRPO's weight at ε = {eps:g}, r = {r:g}, A = {A:g}"
            holds(where, 0, weight("grpo", r, A, eps=eps))


def ascend(z, J, steps=2000, lr=0.5):
    for _ in range(steps):
        z = z + lr * gradient(lambda z: J(z, z.detach()), z)
    return torch.softmax(z, 0)


def test_up_is_not_reinforce_on_old_samples(counterexample):
    """Two arms, π_old = (1/2, 1/2), A = (1, 3): Eq. 13 rests at π_old A, normalized;
    Eq. 2 goes to the better arm.
    """
    A, mu, fn = T(1.0, 3.0), T(0.5, 0.5), torch.log_softmax
    up = ascend(
        mu.log(),
        lambda z, _: (mu * upref.get("up_grpo").fn(fn(z, 0), mu.log(), A)).sum(),
    )
    reinforce = ascend(
        mu.log(),
        lambda z, at: (
            torch.softmax(at, 0) * upref.get("reinforce").fn(fn(z, 0), None, A)
        ).sum(),
    )
    assert up.tolist() == pytest.approx([0.25, 0.75])
    counterexample(
        "π of the better of two arms after 2000 steps, A = (1, 3)",
        reinforce[1].item(),
        up[1].item(),
    )


def test_up_amplifies_where_r_is_below_1_or_clipped(holds, counterexample):
    """Find a greater weight at r = 0.5 and at 2, and not at 1.2, where DAPO does not
    clip.
    """
    for r in (0.5, 2.0):
        holds(
            f"UP-DAPO's weight at r = {r:g}, against DAPO's",
            weight("dapo", r, 1.0),
            weight("up_dapo", r, 1.0),
            operator.gt,
        )
    counterexample(
        "UP-DAPO's weight at r = 1.2, against DAPO's",
        weight("dapo", 1.2, 1.0),
        weight("up_dapo", 1.2, 1.0),
        operator.gt,
    )


def test_a_wrong_token_is_pushed_down(holds):
    for name in ("up_grpo", "up_dapo", "up_gspo"):
        assert weight(name, 1.1, 2.0) > 0 > weight(name, 1.1, -2.0)
    holds(
        "weight of a wrong token under UP-DAPO, r = 1.1, A = -2",
        0,
        weight("up_dapo", 1.1, -2.0),
        operator.lt,
    )


# ---- Section 4.2 ---------------------------------------------------------------------
def test_wrong_rollouts_are_the_base_s_own(holds):
    for base in ("grpo", "dapo", "gspo"):
        assert all(
            weight(base, r, -1.0) == weight(f"up_{base}", r, -1.0) for r in RATIOS
        )
    holds(
        "weight of a wrong token at r = 0.9, UP-DAPO against DAPO",
        weight("dapo", 0.9, -1.0),
        weight("up_dapo", 0.9, -1.0),
    )


def test_what_bounds_the_push_on_an_over_probable_wrong_token(holds, counterexample):
    """Find by Eq. 14 no weight at r = 0.79, and one above 1.28 at r = 1000; with a dual
    clip none above c.
    """
    holds(
        "|weight| of a wrong token by Eq. 14, r = 0.79, A = -1",
        0,
        -weight("up_dapo", 0.79, -1.0),
    )
    found = -weight("up_dapo", 1000.0, -1.0)
    counterexample(
        "|weight| of a wrong token by Eq. 14, r = 1000, A = -1, ε_high = 0.28",
        1.28,
        found,
        operator.le,
    )
    of_wrong = with_dual_clip(3.0)
    assert of_wrong[50.0] == of_wrong[1000.0] == 0
    holds(
        "largest |weight| of a wrong token with a dual clip c = 3, A = -1",
        3,
        max(of_wrong.values()),
        operator.le,
    )


def test_up_grpo_has_grpo_s_kl_term_for_both_signs(holds):
    """The gradient at beta = 0.5 less that at 0 is the same in UP-GRPO and GRPO, and
    not 0 for either sign of A.
    """
    o, base = upref.get("up_grpo"), upref.get("grpo")
    b = batch(o)
    b = replace(b, logp_ref=torch.where(b.mask, b.logp_old - 0.1, 0))

    def term(f):
        return autograd_gradient(lambda x: f(x, beta=0.5), b) - autograd_gradient(
            lambda x: f(x, beta=0.0), b
        )

    ours, theirs = term(o), term(base)
    assert torch.allclose(ours, theirs, atol=1e-15)
    A = b.adv.expand(b.mask.shape)
    for sign in (1, -1):
        largest = ours[b.mask & (A * sign > 0)].abs().max().item()
        holds(
            f"largest gradient of the KL term of UP-GRPO, A {'>' if sign > 0 else '<'} 0",
            1e-6,
            largest,
            operator.gt,
        )


def test_granularity_is_left_in_the_negative_branch_only(holds, counterexample):
    """Off-policy responses of 1 to 4 tokens: gradients of UP-GRPO and UP-GSPO, at one
    lower bound.
    """
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(4) < torch.tensor([1, 2, 3, 4])[:, None]
    old = torch.rand(4, 4, generator=g, dtype=F64).log()
    now = (old + 0.2 * torch.randn(4, 4, generator=g, dtype=F64)).clamp(max=-1e-3)

    def apart(sign, one, other):
        """Return the largest difference of two objectives' gradients at advantages of
        this sign.
        """
        b = upref.Rollouts(now, old, sign * T(1.0, 2.0, 0.5, 1.0)[:, None], mask)
        return (
            (
                autograd_gradient(lambda x: one(x, eps=0.2), b)
                - autograd_gradient(lambda x: other(x, eps_low=0.2), b)
            )
            .abs()
            .max()
            .item()
        )

    up = (upref.get("up_grpo"), upref.get("up_gspo"))
    holds(
        "largest difference of the gradients of UP-GRPO and UP-GSPO, A < 0",
        1e-3,
        apart(-1, *up),
        operator.gt,
    )
    counterexample("the same, A > 0", 1e-12, apart(1, *up), operator.gt)


# ---- Appendix B ----------------------------------------------------------------------
def test_dual_clip_does_not_bound_the_ratio(counterexample):
    """Beyond c the gradient is 0, so the ratio stays where it is."""
    lp, fn = T(5.0).log().requires_grad_(), upref.get("dapo").fn
    for _ in range(100):
        lp = (
            (
                lp
                + torch.autograd.grad(fn(lp, T(1.0).log(), T(-1.0), c=3.0).sum(), lp)[0]
            )
            .detach()
            .requires_grad_()
        )
    counterexample(
        "r of a wrong token that began at 5, after 100 steps with c = 3",
        3,
        lp.exp().item(),
        operator.le,
    )


def test_dual_clip_takes_away_a_correction(counterexample):
    """Just below c an update lowers the token, back towards π_old: what vanishes beyond
    c is that.
    """
    found = weight("dapo", 2.99, -1.0, c=3.0)
    counterexample(
        "change of log π_θ by a unit step at r = 2.99, c = 3: away from π_old",
        0,
        found,
        operator.ge,
    )


def test_the_dual_clip_and_the_whole_policy(holds, counterexample):
    """The push that c cuts overshoots where the step is large, by one distance of
    three. A wrong token has r = 50: π_old = 0.01, and π_θ = 0.5 of two arms.
    """
    old = torch.tensor([0.01, 0.99], dtype=F64)
    # what c cuts: the weight times ∇ log π of the wrong token at π_θ = (1/2, 1/2)
    cut = weight("dapo", 50.0, -1.0) * torch.tensor([0.5, -0.5], dtype=F64)
    assert weight("dapo", 50.0, -1.0, c=3.0) == 0

    def forward(logits):
        return (old * (old.log() - logits.log_softmax(0))).sum().item()

    def backward(logits):
        return (logits.softmax(0) * (logits.log_softmax(0) - old.log())).sum().item()

    def variation(logits):
        return (logits.softmax(0) - old).abs().sum().item() / 2

    rates = [k / 100 for k in range(1, 501)]
    overshoots = [forward(lr * cut) > forward(0 * cut) for lr in rates]
    first = rates[overshoots.index(True)]
    assert all(lr >= first for lr, over in zip(rates, overshoots, strict=True) if over)
    moved = f"a step that moves a logit by {first * cut.abs().max().item():.0f}"
    was = "KL(π_old ‖ π_θ), r = 50, π_old = 0.01, before the step that c = 3 cuts and"
    holds(
        f"{was} after {moved}, the smallest found",
        forward(0 * cut),
        forward(first * cut),
        operator.gt,
    )
    counterexample(
        f"{was} after one that moves a logit by 1",
        forward(0 * cut),
        forward(cut / cut.abs().max()),
        operator.gt,
    )
    for distance in (backward, variation):
        assert all(distance(lr * cut) < distance(0 * cut) for lr in rates)


def test_lower_clip_does_not_keep_the_probability(counterexample):
    r = flow(1, 2.0, (0.5, 0.5), (1.0, -1.0))[1]
    counterexample(
        "π_θ/π_old of the wrong arm after one step, lr 2, ε_low = 0.2",
        0.8,
        r,
        operator.ge,
    )


def test_at_zero_advantage_there_is_no_cap(holds, counterexample):
    """By Eq. A3 the Cap is 0.1 - 0.8 · 0.1 at π_θ = π_old = 0.1, ε_low = 0.2."""
    for A, say in ((-1.0, holds), (0.0, counterexample)):
        found = upref.capacity("dapo", 0.1, 0.1, A, c=3.0).item()
        say(f"Cap at π_θ = π_old = 0.1, A = {A:g}, by Eq. A3", 0.02, round(found, 8))
    assert weight("dapo", 1.0, 0.0, c=3.0) == 0


def test_cap_is_largest_at_the_dual_clip(holds, counterexample):
    p = torch.linspace(0.001, 1, 1000, dtype=F64).numpy()

    def best(mu):
        return float(p[upref.capacity("dapo", p, mu, -1.0, c=3.0).argmax()])

    def near(found, claimed):
        return abs(found - claimed) < 0.002

    holds("π_θ at which Cap is largest, π_old = 0.1, c = 3", 0.3, best(0.1), near)
    counterexample(
        "π_θ at which Cap is largest, π_old = 0.5, c = 3", 1.5, best(0.5), near
    )


# ---- Appendix C ----------------------------------------------------------------------
def test_averaging_over_tokens_reduces_the_variance_of_a_response(holds):
    """Independent score terms: the gradient of a response, by Eq. A6, has 1/T of the
    variance of one token's.
    """
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(20000, 8, generator=g, dtype=F64)
    lp = torch.zeros(1, 8, dtype=F64, requires_grad=True)
    J = upref.get("up_gspo_anchored").fn(lp.mean(1), T(0.0), T(1.0))
    w = torch.autograd.grad(J.sum(), lp)[0]  # 1/T each

    def near(found, claimed):
        return abs(found / claimed - 1) < 0.05

    holds(
        "variance of a response's gradient over that of a token's, T = 8",
        1 / 8,
        (scores * w).sum(1).var().item(),
        near,
    )


# ---- what the first author's code does -----------------------------------------------
def test_the_first_author_s_code_and_eq_15(holds, counterexample):
    """verl pull request 7022: c = 3, token-mean."""
    code, eq_15 = upref.get("up_grpo_verl"), upref.get("up_grpo")
    assert (code.agg, eq_15.agg) == (
        "token-mean",
        "seq-mean-token-mean",
    ) and code.hyperparameters["c"] == 3.0
    near = [
        abs(weight("up_grpo_verl", r, A) - weight("up_grpo", r, A))
        for r in RATIOS
        if r < 3
        for A in (1.0, -1.0)
    ]
    holds("largest difference of a token's weights, r < 3", 0, max(near))
    holds(
        "weight of a right token in both, r = 50",
        weight("up_grpo", 50.0, 1.0),
        weight("up_grpo_verl", 50.0, 1.0),
    )
    found = weight("up_grpo_verl", 50.0, -1.0)
    counterexample(
        "weight of a wrong token in the code, r = 50, as in Eq. 15",
        weight("up_grpo", 50.0, -1.0),
        found,
    )
