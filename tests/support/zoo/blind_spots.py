# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
"""Blind spots: losses that only an unusual input tells apart from their objective, and
right ones that look wrong.

WRONG: each with what its author did. RIGHT: what a checker must let pass. NAMED: what
identify must answer. CAUSES: what the report must say. None of them is in the zoo's
ALL, whose witnesses look at ordinary batches.
"""

import math
from dataclasses import replace

import torch

from tests.support.cases import NAMED as IS, REJECTED, Case
from tests.support.cases.bodies import calm, named

BOX = {"kind": "box", "verdict": IS, "within": {"abs": 1e-6}}


def Spot(function, objective, why="", hp=None, **more):
    """Return a case of this file."""
    return Case(function, objective, hp or {}, why=why, file="blind_spots", **more)


def clipped(log_r, A, low=0.2, high=0.28):
    """Return PPO's terms of log r; low and high are the distances of the bounds from 1."""
    r = log_r.exp()
    return torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)


def mean(x, mask):
    """Return minus the mean over the tokens of the batch."""
    return -torch.where(mask, x, 0).sum() / mask.sum()


def per_row(x, mask):
    """Return minus the mean over responses of their means over tokens."""
    return -(torch.where(mask, x, 0).sum(1) / mask.sum(1)).mean()


def token(J, agg=mean):
    """Return a loss: agg(J(lp, log r, A, mask), mask), with inputs that are 0 in masked
    slots.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
        return agg(J(lp, lp - old, A, mask), mask)

    return loss


def gspo_of(low, high, dtype=torch.float64):
    """Return GSPO's loss with these distances of the bounds from 1, computed in this
    dtype.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = (
            x.to(dtype) for x in calm(mask, log_prob, old_log_prob, advantages)
        )
        s = ((lp - old).sum(1) / mask.sum(1)).exp()
        A = A[torch.arange(len(A)), mask.int().argmax(1)]
        return -torch.minimum(s * A, s.clamp(1 - low, 1 + high) * A).mean()

    return loss


# ---- wrong, seen on unusual inputs only ----------------------------------------------
def advantages_in_bfloat16(log_prob, old_log_prob, advantages, mask):
    lp, A = calm(mask, log_prob, advantages)
    return -(A.bfloat16().to(lp.dtype) * lp).sum(1).mean()


def float32_and_a_factor(log_prob, old_log_prob, advantages, mask):
    lp, old, A = (x.float() for x in calm(mask, log_prob, old_log_prob, advantages))
    return mean(1.0012 * clipped(lp - old, A), mask)


def entropy_bonus(log_prob, old_log_prob, advantages, mask, entropy):
    lp, old, A, H = calm(mask, log_prob, old_log_prob, advantages, entropy)
    return mean(clipped(lp - old, A) + 0.01 * H, mask)


def certain_tokens_dropped(lp, log_r, A, mask):
    return clipped(log_r, A) * ((lp - log_r).detach() < math.log(0.95))


def certain_tokens_to_nan(lp, log_r, A, mask):
    odds = (lp - log_r).exp().detach()
    return clipped(log_r, A) * (1 - odds) / (1 - odds)


def probabilities_floored(lp, log_r, A, mask):
    """Return DAPO's terms with log π_old at most -0.02, at the ratio that this gives
    and with log r's gradient.
    """
    old = (lp - log_r).clamp(max=-0.02)
    return clipped(
        torch.where(
            old < lp - log_r, lp - log_r.detach() - lp.detach() + log_r, lp - old
        ),
        A,
    )


def first_16_tokens(lp, log_r, A, mask):
    return clipped(log_r, A) * (mask.cumsum(1) <= 16)


def first_200_tokens(lp, log_r, A, mask):
    return clipped(log_r, A) * (mask.cumsum(1) <= 200)


def lengths_in_uint8(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1).to(torch.uint8)
    return -(clipped(lp - old, A, 0.2, 0.2).where(mask, 0).sum(1) / n).mean()


def lengths_in_bfloat16(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    n = mask.sum(1).bfloat16().double()
    return -(clipped(lp - old, A, 0.2, 0.2).where(mask, 0).sum(1) / n).mean()


def tokens_in_float16(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -clipped(lp - old, A).where(mask, 0).sum() / mask.half().sum()


def log_ratio_summed_then_clamped(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    n, x = mask.sum(1).clamp(max=64), (lp - old).sum(1)
    s, A = (x / n).exp(), A[torch.arange(len(A)), mask.int().argmax(1)]
    return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()


def groups_counted_by_the_largest_id(log_prob, old_log_prob, advantages, mask, group):
    """Return DAPO's means of prompts, summed and divided by the largest id plus 1."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    J = clipped(lp - old, A).where(mask, 0).sum(1)
    tokens = torch.zeros(len(mask), dtype=J.dtype)
    for g in group.unique():
        tokens[group == g] = mask[group == g].sum().to(J.dtype)
    return -(J / tokens).sum() / (group.max() + 1)


def groups_in_float32(log_prob, old_log_prob, advantages, mask, group):
    """Return DAPO's mean over prompts, whose ids are told apart in float32."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    group = group.float()
    J, ids, out = clipped(lp - old, A).where(mask, 0).sum(1), group.unique(), 0.0
    for g in ids:
        out = out + J[group == g].sum() / mask[group == g].sum()
    return -out / len(ids)


def groups_in_int8(log_prob, old_log_prob, advantages, mask, group):
    return groups_in_float32(
        log_prob, old_log_prob, advantages, mask, group.to(torch.int8)
    )


def groups_in_int32(log_prob, old_log_prob, advantages, mask, group):
    of = group.int().unique(return_inverse=True)[1]
    return groups_in_float32(log_prob, old_log_prob, advantages, mask, of)


def large_advantages_clipped(lp, log_r, A, mask):
    return clipped(log_r, A.clamp(-8, 8))


def tiny_advantages_dropped(lp, log_r, A, mask):
    return clipped(log_r, A) * (A.abs() > 1e-5)


def positive_beyond_a_threshold(lp, log_r, A, mask):
    r = (lp - lp.detach()).exp()  # UP's anchored form
    return torch.where(
        A > 1e-4, r * A, torch.minimum(log_r.exp() * A, log_r.exp().clamp(min=0.8) * A)
    )


def empty_row_makes_nan(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -(clipped(lp - old, A, 0.2, 0.2).where(mask, 0).sum(1) / mask.sum(1)).mean()


def kl_on_one_sign(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    lp, old, A, ref = calm(mask, log_prob, old_log_prob, advantages, ref_log_prob)
    k3 = (ref - lp).exp() - (ref - lp) - 1
    return per_row(clipped(lp - old, A, 0.2, 0.2) - beta * k3 * (A <= 0), mask)


def kl_clamped(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    lp, old, A, ref = calm(mask, log_prob, old_log_prob, advantages, ref_log_prob)
    k3 = ((ref - lp).exp() - (ref - lp) - 1).clamp(-10, 10)
    return per_row(clipped(lp - old, A, 0.2, 0.2) - beta * k3, mask)


def wrong_spot(name, J, objective, why, agg=mean, **hp):
    """Make the Spot of a wrong loss, from its term of each token."""
    return Spot(named(name, token(J, agg)), objective, why, hp)


WRONG = [
    Spot(advantages_in_bfloat16, "reinforce", "the advantages are rounded to 0.4 %"),
    Spot(float32_and_a_factor, "dapo", "every weight is 1.0012 times too large, in float32"),
    Spot(named("gspo_of_2e_4", gspo_of(3e-4, 2e-4, torch.float32)), "gspo", "eps_high is 2e-4, in float32"),
    Spot(named("gspo_swapped", gspo_of(4e-4, 3e-4, torch.float32)), "gspo", "its sides are swapped, in float32"),
    Spot(named("gspo_of_3_5e_4", gspo_of(3e-4, 3.5e-4)), "gspo", "eps_high is 3.5e-4"),
    Spot(entropy_bonus, "dapo", "an entropy bonus that reaches the policy through `entropy`"),
    wrong_spot("certain_tokens_dropped", certain_tokens_dropped, "dapo", "tokens with π_old > 0.95 count nothing"),
    wrong_spot("certain_tokens_to_nan", certain_tokens_to_nan, "dapo", "0 / 0 at π_old = 1"),
    wrong_spot("first_16_tokens", first_16_tokens, "dapo", "tokens after the 16th count nothing"),
    wrong_spot("first_200_tokens", first_200_tokens, "dapo", "tokens after the 200th count nothing"),
    Spot(lengths_in_uint8, "grpo", "a length of 256 is 0"),
    Spot(lengths_in_bfloat16, "grpo", "a length of 257 is 256"),
    Spot(tokens_in_float16, "dapo", "more than 65,504 tokens are infinitely many"),
    Spot(log_ratio_summed_then_clamped, "gspo", "a length beyond 64 counts as 64"),
    Spot(groups_counted_by_the_largest_id, "up_dapo", "ids with gaps are counted as if they had none"),
    Spot(groups_in_float32, "up_dapo", "large ids are one"),
    Spot(groups_in_int8, "up_dapo", "ids beyond 127 collide"),
    Spot(groups_in_int32, "up_dapo", "ids that are equal in their lower 32 bits collide"),
    wrong_spot("large_advantages_clipped", large_advantages_clipped, "dapo", "|A| is at most 8"),
    wrong_spot("tiny_advantages_dropped", tiny_advantages_dropped, "dapo", "|A| below 1e-5 counts nothing"),
    wrong_spot("positive_beyond_a_threshold", positive_beyond_a_threshold, "up_dapo", "A = 1e-5 is clipped as if negative"),
    Spot(kl_on_one_sign, "grpo", "the KL term where A <= 0 alone", {"beta": 0.04}),
    Spot(kl_clamped, "grpo", "the KL term is clamped at 10", {"beta": 0.04}),
]  # fmt: skip
# the two groups' losses above are UP-DAPO's with the clip of DAPO where A > 0: put UP
# in


def _up(f):
    """Return the loss f with UP's terms in place of the clipped ones of this module,
    which it exchanges while f runs.
    """

    def loss(log_prob, old_log_prob, advantages, mask, group):
        global clipped
        keep, clipped = (
            clipped,
            lambda x, A, *_: torch.where(
                A > 0, A * x, torch.minimum(x.exp() * A, x.exp().clamp(min=0.8) * A)
            ),
        )
        try:
            return f(log_prob, old_log_prob, advantages, mask, group)
        finally:
            clipped = keep

    return named(f.__name__, loss)


WRONG = [
    replace(
        s,
        function=_up(s.function) if s.name.startswith("groups_") else s.function,
        verdict=REJECTED,
    )
    for s in WRONG
]


# ---- right ---------------------------------------------------------------------------
def ratio_in_float32(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return mean(clipped((lp - old).float().double(), A), mask)


def logs_in_float32(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return mean(clipped((lp.float() - old.float()).double(), A), mask)


def advantages_in_float32(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return mean(clipped(lp - old, A.float().double()), mask)


def bounds_in_float32(log_prob, old_log_prob, advantages, mask):
    """Return DAPO's loss with bounds that are float32 tensors."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    low, high = torch.tensor(1 - 0.2), torch.tensor(1.28)
    r = (lp - old).exp()
    return mean(
        torch.minimum(r * A, torch.minimum(torch.maximum(r, low), high) * A), mask
    )


def denominator_in_float32(log_prob, old_log_prob, advantages, mask):
    """Return GRPO's loss with 1/length in float32."""
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -(
        clipped(lp - old, A, 0.2, 0.2).where(mask, 0)
        * (1 / mask.float().sum(1, keepdim=True))
    ).sum() / len(mask)


def kl_in_float32(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
    lp, old, A, ref = calm(mask, log_prob, old_log_prob, advantages, ref_log_prob)
    x = (ref.float() - lp.float()).double()
    return per_row(clipped(lp - old, A, 0.2, 0.2) - beta * (x.exp() - x - 1), mask)


def small_constant(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -clipped(lp - old, A).where(mask, 0).sum() / (mask.sum() + 1e-6)


def small_constant_per_row(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -(
        clipped(lp - old, A, 0.2, 0.2).where(mask, 0).sum(1) / (mask.sum(1) + 1e-6)
    ).mean()


def one_number_a_response(log_prob, old_log_prob, advantages, mask):
    lp, old, A = calm(mask, log_prob, old_log_prob, advantages)
    return -clipped(lp - old, A, 0.2, 0.2).where(mask, 0).sum(1) / mask.sum(1)


def gspo_in_float32(log_prob, old_log_prob, advantages, mask):
    return gspo_of(3e-4, 4e-4, torch.float32)(log_prob, old_log_prob, advantages, mask)


RIGHT = [
    Spot(ratio_in_float32, "dapo", "log r in float32"), Spot(logs_in_float32, "dapo", "log-probabilities in float32"),
    Spot(advantages_in_float32, "dapo", "advantages in float32"), Spot(bounds_in_float32, "dapo", "bounds in float32"),
    Spot(denominator_in_float32, "grpo", "a denominator in float32"),
    Spot(kl_in_float32, "grpo", "the KL term in float32", {"beta": 0.04}),
    Spot(small_constant, "dapo", "1e-6 in the denominator"),
    Spot(small_constant_per_row, "grpo", "1e-6 in each denominator"),
    Spot(one_number_a_response, "grpo", "[B], unreduced"), Spot(gspo_in_float32, "gspo", "float32"),
]  # fmt: skip


def partly(objective, part, agg=mean):
    """Return a case of an objective whose surrogate, part(lp, log r, A, mask), has a
    factor in float32.
    """
    return Spot(
        named(f"{objective}_in_part", token(part, agg)),
        objective,
        "a factor of it in float32",
    )


def _s_in_float32(lp, log_r, A, mask):
    """Return GSPO's terms for each token, [B, T], with the ratio computed in float32."""
    s = (
        (torch.where(mask, log_r, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True))
        .float()
        .exp()
        .double()
    )
    return (torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)).expand_as(lp)


PARTLY = [
    partly("gspo", _s_in_float32, per_row),
    partly("cispo", lambda lp, x, A, m: x.float().exp().clamp(max=5.0).double().detach() * A * lp),
    partly("sapo", lambda lp, x, A, m: 4 * torch.where(
        A > 0, torch.sigmoid((x.exp() - 1).float()), torch.sigmoid(1.05 * (x.exp() - 1).float()) / 1.05).double() * A, per_row),
    partly("reinforce", lambda lp, x, A, m: A.float().double() * lp, lambda x, m: -torch.where(m, x, 0).sum(1).mean()),
]  # fmt: skip
RIGHT += PARTLY


# ---- what identify must say ----------------------------------------------------------
def named_spot(name, J, objective, says="", agg=mean, **hp):
    """Make the Spot of a loss that identify must name, from its term of each token."""
    return Spot(named(name, token(J, agg)), objective, says, hp)


e = math.exp


def gmpo_of(eps):
    import upref

    return named(f"gmpo_{eps}", lambda log_prob, old_log_prob, advantages, mask: upref.get("gmpo").loss(
        upref.Rollouts(log_prob, old_log_prob, advantages, mask), eps=eps))  # fmt: skip


def aspo_capped(log_prob, old_log_prob, advantages, mask):
    """Return ASPO's loss with a cap of 0.5."""
    import upref

    return upref.get("aspo").loss(
        upref.Rollouts(log_prob, old_log_prob, advantages, mask), cap=0.5
    )


def quarter(x, mask):
    return per_row(x, mask) / 4


def with_constant(x, mask):
    return -(torch.where(mask, x, 0).sum(1) / (mask.sum(1) + 1e-6)).mean()


NAMED = [
    named_spot("bounds_of_e_0_25", lambda lp, x, A, m: clipped(x, A, 1 - e(-0.25), e(0.25) - 1), "dapo", eps_low=1 - e(-0.25), eps_high=e(0.25) - 1),
    *(Spot(gmpo_of(x), "gmpo", "", {"eps": x}) for x in (0.25, 0.3, 0.5, 0.75, 1.0)),
    named_spot("bound_at_1", lambda lp, x, A, m: clipped(x, A, 0.2, 0.0), "dapo", eps_low=0.2, eps_high=0.0),
    named_spot("quarter_of_grpo", lambda lp, x, A, m: clipped(x, A, 0.2, 0.2), "grpo", "0.25 times", quarter, eps=0.2),
    named_spot("constant_in_grpo", lambda lp, x, A, m: clipped(x, A, 0.2, 0.2), "grpo", "", with_constant, eps=0.2),
    named_spot("inverted", lambda lp, x, A, m: clipped(-x, A, 0.2, 0.2), "grpo", "inverted", per_row),
    Spot(aspo_capped, "aspo", "", {"cap": 0.5}),
]  # fmt: skip
NAMED = [replace(s, says=s.why, **BOX) for s in NAMED]


# ---- what the report must say --------------------------------------------------------
def stateful():
    """Return a surrogate that grows by 0.1 % with each call."""
    calls = [0]

    def J(lp, x, A, m):
        """Return DAPO's terms times 1 + (the number of the call)/1000."""
        calls[0] += 1
        return clipped(x, A) * (1 + 0.001 * calls[0])

    return J


def klx(f, agg=per_row):
    """Return a loss: agg(f(lp, log r, A, log π_ref - log π_θ, beta), mask)."""

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
        lp, old, A, ref = calm(mask, log_prob, old_log_prob, advantages, ref_log_prob)
        return agg(f(lp, lp - old, A, ref - lp, beta), mask)

    return loss


def k3(x):
    return x.exp() - x - 1


def K(name, f, why):
    return Spot(named(name, klx(f)), "grpo", why, {"beta": 0.04})


def ppo(x, A):
    return clipped(x, A, 0.2, 0.2)


CAUSES = [
    Spot(named("stateful", token(stateful())), "dapo", "keeps state"),
    named_spot("cap_absolute", lambda lp, x, A, m: x.exp().clamp(max=4.0).detach() * A * lp, "cispo", "absolute"),
    named_spot("soft_gate_detached", lambda lp, x, A, m: torch.sigmoid(x.exp() - 1).detach() * 4 * A * lp, "sapo", "detach", per_row, tau_pos=1.0, tau_neg=1.0),
    named_spot("token_ratio_in_gspo", lambda lp, x, A, m: clipped(x, A, 3e-4, 4e-4), "gspo", "ratio of the token", per_row),
    named_spot("max_for_a_negative", lambda lp, x, A, m: torch.where(A < 0, torch.maximum(x.exp() * A, x.exp().clamp(0.8, 1.28) * A), clipped(x, A)), "dapo", "maximum"),
    named_spot("max_for_a_positive", lambda lp, x, A, m: torch.where(A > 0, torch.maximum(x.exp() * A, x.exp().clamp(0.8, 1.28) * A), clipped(x, A)), "dapo", "maximum"),
    named_spot("whole_batch_sum", lambda lp, x, A, m: clipped((x.where(m, 0).sum() / m.sum()).expand_as(x), A, 3e-4, 4e-4), "gspo", "whole batch", per_row),
    named_spot("missing_stop_gradient", lambda lp, x, A, m: x.exp().clamp(max=5.0) * A * lp, "cispo", "not detached"),
    K("kl_clamped_low", lambda lp, x, A, d, beta: ppo(x, A) - beta * k3(d).clamp(max=1.0), "clamped"),
    K("kl_in_the_advantage", lambda lp, x, A, d, beta: ppo(x, A - beta * k3(d).detach()), "advantage"),
    K("kl_times_the_ratio", lambda lp, x, A, d, beta: ppo(x, A) - beta * k3(d) * x.exp(), "multiplied by the ratio"),
    K("kl_of_k1", lambda lp, x, A, d, beta: ppo(x, A) + beta * d, "estimator"),
    K("kl_of_k2", lambda lp, x, A, d, beta: ppo(x, A) - beta * d**2 / 2, "estimator"),
    K("kl_where_positive", lambda lp, x, A, d, beta: ppo(x, A) - beta * k3(d) * (A > 0), "A > 0"),
    K("kl_without_gradient", lambda lp, x, A, d, beta: ppo(x, A) - beta * k3(d).detach(), "KL"),
]  # fmt: skip
CAUSES = [replace(s, says=s.why, verdict=REJECTED) for s in CAUSES]
