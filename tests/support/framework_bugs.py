# SPDX-License-Identifier: Apache-2.0
"""Wrong losses with bugs of the kinds that public fixes of frameworks repair.

Each is a loss `(log_prob, old_log_prob, advantages, mask, ...) -> scalar`; its
decorator says which objective it is meant as, and what is wrong. The first sixty were
written before the catalogue of known faults was read, and before any check ran on them.
tests/verify/test_framework_bugs.py runs them; `python -m tests.support.framework_bugs`
prints what causes said of them at first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from upref import markdown

BUGS: dict[str, "Bug"] = {}


@dataclass(frozen=True)
class Bug:
    """A wrong loss.

    Attributes:
        loss: the loss.
        objective: the objective that it is meant as.
        fault: what is wrong, in a sentence.
        says: words that its cause has if it says why; "" if none says so.
        first: what the first report of it said: why, where, nothing, or something false.
        part: the set that it belongs to, of PARTS.
        hp: hyperparameters of the objective.
    """

    loss: Callable[..., Any]
    objective: str
    fault: str
    says: str
    first: str
    part: str
    hp: dict[str, Any] = field(default_factory=dict)


def bug(
    objective: str,
    fault: str,
    says: str = "",
    first: str = "",
    *,
    part: str = "fixes",
    **hp: Any,
) -> Callable[[Any], Any]:
    """Return a decorator that adds a loss to BUGS under its own name, and returns it
    unchanged.

    Args:
        objective: the objective that it is meant as.
        fault: what is wrong, in a sentence.
        says: words that its cause has if it says why.
        first: what the first report of it said.
        part: the set that it belongs to.
        hp: hyperparameters of the objective.

    Raises:
        ValueError: two losses have one name.
    """

    def add(loss: Any) -> Any:
        if loss.__name__ in BUGS:
            raise ValueError(f"two losses are called {loss.__name__}")
        BUGS[loss.__name__] = Bug(loss, objective, fault, says, first, part, hp)
        return loss

    return add


def ratio_of(log_prob, other, mask):
    """Return the ratio of two policies from their log-probabilities, [B, T]; 1 in
    masked slots.
    """
    return torch.where(mask, log_prob - other, 0).exp()


def clipped(r, a, low=0.8, high=1.2):
    """Return PPO's terms min(r a, clip(r) a); low and high are the bounds themselves."""
    return torch.minimum(r * a, r.clamp(low, high) * a)


def token_mean(x, mask):
    """Return the mean over the tokens of the batch."""
    return torch.where(mask, x, 0).sum() / mask.sum()


def response_mean(x, mask):
    """Return the mean of each response, [B]; 0 where it has no token."""
    return torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp(min=1)


def first(x, mask):
    """Return the value at the first token of each response, 0 where it has none."""
    at = mask.int().argmax(1, keepdim=True)
    return torch.where(mask.any(1), x.gather(1, at)[:, 0], 0)


def k3(log_prob, ref_log_prob, mask):
    """Return k3 of log π_θ and log π_ref for each token, [B, T]; 0 in masked slots."""
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    return d.exp() - d - 1


# ---- what the sum is divided by --------------------------------------------------------
@bug(
    "dapo",
    "the mean runs over padding too: (x * mask).mean()",
    "the mean over the padded width (seq-mean-token-sum-norm by it)",
    "why",
)
def mean_after_the_mask(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28)
    return -(terms * mask).mean()


@bug(
    "grpo",
    "each response is divided by the width of the batch",
    "the mean over the padded width (seq-mean-token-sum-norm by it)",
    "why",
)
def divided_by_the_width(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0)) * mask
    return -(terms.sum(-1) / mask.shape[-1]).mean()


@bug(
    "grpo",
    "the mean over the tokens of the batch, not over those of each response",
    "token-mean",
    "why",
)
def one_masked_mean(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0)), mask)


@bug(
    "dr_grpo",
    "the sum of all responses is divided by the number of tokens",
    "token-mean",
    "why",
)
def length_bias_is_back(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0)), mask)


@bug(
    "dapo",
    "tokens of responses with A = 0 are not counted",
    "tokens with A = 0 are not counted in the denominator",
    "why",
)
def only_informative_tokens(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    informative = mask & (a != 0)
    return -(clipped(r, a, 0.8, 1.28) * mask).sum() / informative.sum().clamp(min=1)


@bug(
    "gspo",
    "the term of a response is counted once for each of its tokens",
    "token-mean",
    "why",
)
def sequence_term_on_each_token(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()[:, None]
    a = torch.where(mask, advantages, 0)
    return -token_mean(clipped(s, a, 1 - 3e-4, 1 + 4e-4), mask)


@bug("luspo", "the term is divided by the length", "seq-mean-token-mean", "why")
def length_unbiased_but_divided(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()
    a = first(advantages, mask)
    return -clipped(s, a, 1 - 0.002, 1 + 0.0025).mean()


@bug(
    "grpo",
    "lengths [B, 1] divide sums [B]: [B, B]",
    "sums [B] are divided by lengths [B, 1], which makes [B, B]",
    "where",
)
def lengths_with_keepdim(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0)) * mask
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    return -(terms.sum(1) / lengths).mean()


@bug(
    "gspo",
    "ratios [B] times advantages [B, 1]: [B, B]",
    "ratios [B] meet advantages [B, 1], and make [B, B]",
    "nothing",
)
def ratios_beside_a_column(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()
    a = first(advantages, mask)[:, None]
    return -clipped(s, a, 1 - 3e-4, 1 + 4e-4).mean()


@bug(
    "dapo",
    "the gradient is divided by 4 accumulation steps once more",
    "its gradient is 0.25 times that of dapo(eps_low=0.2, eps_high=0.28)",
    "why",
)
def divided_by_accumulation(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28)
    return -token_mean(terms, mask) / 4


@bug(
    "grpo",
    "responses that reach the last column count as truncated, and are dropped",
    "every response that reaches the last column of the batch is not",
    "nothing",
)
def overlong_rows_are_dropped(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -torch.where(mask[:, -1], 0, response_mean(terms, mask)).mean()


@bug(
    "dapo",
    "the last token of each response, the end of text, is not trained",
    "the last token of each response is not trained, though counted in the",
    "why",
)
def end_of_text_is_masked(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28)
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return -(terms * (mask & ~is_last)).sum() / mask.sum()


@bug(
    "icepop(dapo)",
    "rejected tokens leave the denominator",
    "it divides by the tokens that were kept, not by all trained tokens",
    "why",
)
def rejected_tokens_uncounted(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    r = ratio_of(log_prob, old_log_prob, mask)
    rho = ratio_of(old_log_prob, rollout_log_probs, mask)
    kept = mask & (rho >= 0.5) & (rho <= 5)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28) * rho
    return -torch.where(kept, terms, 0).sum() / kept.sum().clamp(min=1)


# ---- the minimum, the clip and its sign -------------------------------------------------
@bug(
    "ppo_clip",
    "the minus sign went through the minimum: min(-r A, -clip(r) A)",
    "the maximum is taken where the minimum belongs",
    "why",
)
def sign_through_the_minimum(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return token_mean(torch.min(-r * a, -r.clamp(0.8, 1.2) * a), mask)


@bug("dapo", "the dual clip at 3 acts for both signs of A", "c is 3, not absent", "why")
def dual_clip_for_both_signs(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    loss = torch.maximum(-a * r, -a * r.clamp(0.8, 1.28))
    return token_mean(torch.minimum(loss, 3 * a.abs()), mask)


@bug(
    "dapo",
    "the bounds are 1/1.28 and 1.28, symmetric in the logarithm",
    "eps_low is 0.21875, not 0.2",
    "why",
)
def bounds_in_the_logarithm(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(clipped(r, a, 1 / 1.28, 1.28), mask)


@bug(
    "dapo",
    "the term r A is clamped to (1 - ε) A, (1 + ε) A: exchanged for A < 0",
    "r A is clamped to [(1 - eps_low) A, (1 + eps_high) A], which is empty",
    "where",
)
def clamped_products(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(torch.clamp(r * a, min=0.8 * a, max=1.28 * a), mask)


@bug(
    "dapo",
    "ratios above 8 count as outliers, and are set to 0, for A < 0 too",
    "c is 8, not absent",
    "why",
)
def large_ratios_are_dropped(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(torch.where(r > 8, 0, clipped(r, a, 0.8, 1.28)), mask)


@bug(
    "ppo_clip",
    "the log-ratio is clamped to ±1 before the exponential",
    "no token has a gradient where |log r| > 1",
    "why",
)
def log_ratio_is_clamped(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).clamp(-1, 1)
    return -token_mean(clipped(d.exp(), torch.where(mask, advantages, 0)), mask)


@bug(
    "ppo_clip",
    "the ratio is linear: 1 + log π_θ - log π_old",
    "log r, or 1 + log r, replaces the ratio",
    "why",
)
def linear_ratio(log_prob, old_log_prob, advantages, mask):
    r = 1 + torch.where(mask, log_prob - old_log_prob, 0)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0)), mask)


@bug(
    "gmpo",
    "the log-ratio is clamped on both sides, whatever the sign of A",
    "both bounds act in both cases: clip(log_r, -0.4, 0.4)",
    "why",
)
def geometric_without_sign(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).clamp(-0.4, 0.4)
    return -(first(advantages, mask) * response_mean(d, mask).exp()).mean()


@bug(
    "gmpo",
    "the mean of the logarithms runs over all columns",
    "another function: A[..., 0] * exp(mean_over_width(clipped))",
    "where",
)
def geometric_over_padding(log_prob, old_log_prob, advantages, mask):
    a = first(advantages, mask)
    sign = a.sign()[:, None]
    d = torch.where(mask, log_prob - old_log_prob, 0)
    d = torch.minimum(sign * d, (sign * d).clamp(-0.4, 0.4)) * sign
    return -torch.where(mask.any(1), a * d.mean(1).exp(), 0).mean()


@bug(
    "decoupled(ppo_clip)",
    "the clip acts on π_θ/μ, not on π_θ/π_old",
    "the clip acts on π_θ/μ, not on π_θ/π_old",
    "nothing",
)
def clip_against_the_sampler(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    r = ratio_of(log_prob, rollout_log_probs, mask)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0)), mask)


@bug(
    "dppo_tv",
    "a token is stopped on both sides, whatever the sign of A",
    "an absolute value too many",
    "where",
)
def divergence_without_sign(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    p = torch.where(mask, log_prob, 0).exp()
    mu = torch.where(mask, old_log_prob, 0).exp()
    near = ((p - mu).abs() <= 0.15).detach()
    return -(torch.where(mask, advantages, 0) * r * near * mask).sum(1).mean()


# ---- the ratio of a response ------------------------------------------------------------
@bug(
    "gspo",
    "the log-ratios of a response are summed, not averaged",
    "the response's log-ratio is summed, not averaged over its tokens",
    "why",
)
def summed_log_ratios(log_prob, old_log_prob, advantages, mask):
    s = torch.where(mask, log_prob - old_log_prob, 0).sum(1).exp()
    return -clipped(s, first(advantages, mask), 1 - 3e-4, 1 + 4e-4).mean()


@bug(
    "gspo",
    "the log-ratios are averaged over all columns",
    "the response's log-ratio is divided by the padded width",
    "why",
)
def log_ratios_over_the_width(log_prob, old_log_prob, advantages, mask):
    s = torch.where(mask, log_prob - old_log_prob, 0).mean(1).exp()
    return -clipped(s, first(advantages, mask), 1 - 3e-4, 1 + 4e-4).mean()


@bug(
    "gspo",
    "the ratios of a response are averaged, not their logarithms",
    "the response's ratio is the mean of its tokens' ratios, not their",
    "why",
)
def mean_of_ratios(log_prob, old_log_prob, advantages, mask):
    s = response_mean(ratio_of(log_prob, old_log_prob, mask), mask)
    return -clipped(s, first(advantages, mask), 1 - 3e-4, 1 + 4e-4).mean()


@bug(
    "gspo",
    "log-ratios are centered over the batch, column by column, before the mean",
    "log-probabilities are centered over the rows of each column",
    "nothing",
)
def centered_columns(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    d = d - d.mean(0, keepdim=True)
    s = response_mean(d, mask).exp()
    return -clipped(s, first(advantages, mask), 1 - 3e-4, 1 + 4e-4).mean()


@bug(
    "gspo",
    "in GSPO-token the response's ratio is not detached: it is trained twice",
    "the response's ratio is not detached beside the token's own",
    "where",
)
def sequence_ratio_on_the_tape(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask)[:, None]
    s = (s + torch.where(mask, log_prob - log_prob.detach(), 0)).exp()
    terms = clipped(s, torch.where(mask, advantages, 0), 1 - 3e-4, 1 + 4e-4)
    return -response_mean(terms, mask).mean()


@bug(
    "tis_seq(grpo)",
    "the sampler's log-ratios are averaged over the response, not summed",
    "the sampler's correction is another function of ρ = π_old/μ of the",
    "why",
)
def correction_by_the_mean(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = response_mean(old_log_prob - rollout_log_probs, mask).exp().clamp(max=2)
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -(w * response_mean(terms, mask)).mean()


@bug(
    "opsm(grpo)",
    "a response's drift is the sum over its tokens, not the mean",
    "another function: (A >= 0) | (-sum_over_response(log_r) <= delta)",
    "where",
)
def drift_by_the_sum(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    drift = torch.where(mask, old_log_prob - log_prob, 0).sum(1, keepdim=True)
    kept = (a >= 0) | (drift <= 0.5)
    return -response_mean(clipped(r, a) * kept, mask).mean()


@bug(
    "opsm(grpo)",
    "drifted responses are dropped whatever the sign of A",
    "a part is missing: -mean_over_response(log_r) <= delta",
    "where",
)
def drifted_good_ones_dropped(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    kept = response_mean(old_log_prob - log_prob, mask) <= 0.5
    return -(response_mean(clipped(r, a), mask) * kept).mean()


# ---- detach ------------------------------------------------------------------------------
@bug(
    "dapo",
    "π_old is the policy itself, detached: the ratio is always 1",
    "old_log_prob has no effect",
    "why",
)
def ratio_is_always_one(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, log_prob.detach(), mask)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask)


@bug("cispo", "the weight is not detached", "stop-gradient", "why")
def weight_on_the_tape(log_prob, old_log_prob, advantages, mask):
    w = ratio_of(log_prob, old_log_prob, mask).clamp(max=5)
    return -token_mean(w * torch.where(mask, advantages * log_prob, 0), mask)


@bug("cispo", "the bound is eps_high, not 1 + eps_high", "eps_high is 3, not 4", "why")
def bound_without_the_one(log_prob, old_log_prob, advantages, mask):
    w = ratio_of(log_prob, old_log_prob, mask).clamp(max=4).detach()
    return -token_mean(w * torch.where(mask, advantages * log_prob, 0), mask)


@bug(
    "cispo",
    "tokens above the bound are dropped, not weighted by the bound",
    "beyond the cap no gradient is left",
    "why",
)
def tokens_above_are_dropped(log_prob, old_log_prob, advantages, mask):
    w = ratio_of(log_prob, old_log_prob, mask).detach()
    w = torch.where(w > 5, 0, w)
    return -token_mean(w * torch.where(mask, advantages * log_prob, 0), mask)


@bug(
    "vespo",
    "the weight of a response is not detached",
    "not detached: φ * A * log_prob, where vespo has detach(φ) * A *",
    "nothing",
)
def response_weight_on_the_tape(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).sum(1)
    a = first(advantages, mask)
    c1, c2 = torch.where(a > 0, 2.0, 3.0), torch.where(a > 0, 3.0, 2.0)
    phi = (c1 * d + c2 * (1 - d.clamp(max=80).exp())).exp()
    return -(phi * a * torch.where(mask, log_prob, 0).sum(1)).mean()


@bug(
    "topr",
    "the ratio of good responses is truncated too",
    "one formula for both cases: detach(min(S, 1)) * A * log_prob",
    "nothing",
)
def truncated_for_both_signs(log_prob, old_log_prob, advantages, mask):
    w = torch.where(mask, log_prob - old_log_prob, 0).sum(1).exp().clamp(max=1)
    lp = torch.where(mask, log_prob, 0).sum(1)
    return -(w.detach() * first(advantages, mask) * lp).mean()


@bug(
    "up_dapo",
    "good tokens have the weight r A of plain importance sampling",
    "the ratio still multiplies A where A > 0",
    "why",
)
def ratio_on_good_tokens(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(torch.where(a > 0, a * r, clipped(r, a, 0.8, 1.28)), mask)


@bug(
    "reinforce",
    "the gradient has the ratio π_θ/π_old as a weight",
    "the term is multiplied by the ratio once more, as a constant",
    "why",
)
def reinforce_with_a_ratio(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -(torch.where(mask, advantages, 0) * r * mask).sum(1).mean()


@bug(
    "sapo",
    "the gate lacks its factor 4/τ",
    "the factor is missing in both cases",
    "where",
)
def gate_without_its_factor(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1)
    return -response_mean(torch.sigmoid(tau * (r - 1)) * a, mask).mean()


@bug(
    "sapo",
    "the two temperatures are exchanged",
    "tau_pos is 1.05, not 1; tau_neg is 1, not 1.05: they are swapped",
    "why",
)
def temperatures_exchanged(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    tau = torch.ones_like(a).masked_fill(a > 0, 1.05)
    return -response_mean(4 / tau * torch.sigmoid(tau * (r - 1)) * a, mask).mean()


# ---- the sampler's correction ------------------------------------------------------------
@bug(
    "tis(dapo)",
    "the correction is μ/π_old, upside down",
    "the sampler's ratio is inverted",
    "why",
)
def correction_upside_down(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(rollout_log_probs, old_log_prob, mask).clamp(max=2)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@bug(
    "tis(dapo)",
    "the correction is not truncated",
    "its gradient is that of decoupled(dapo)(eps_low=0.2, eps_high=0.28)",
    "why",
)
def correction_without_a_cap(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(old_log_prob, rollout_log_probs, mask)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@bug(
    "tis(dapo)",
    "the correction has a floor of 1/2",
    "the sampler's correction is another function of ρ = π_old/μ of each",
    "why",
)
def correction_with_a_floor(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(old_log_prob, rollout_log_probs, mask).clamp(0.5, 2)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@bug(
    "tis(dapo)",
    "the correction is of π_θ/μ, and on the tape",
    "π_θ for π_old: tis(log_prob - rollout_log_probs) * dapo(log_prob,",
    "nothing",
)
def correction_of_the_policy(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(log_prob, rollout_log_probs, mask).clamp(max=2)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@bug(
    "icepop(dapo)",
    "the correction is clamped into its band, not dropped outside of it",
    "the sampler's correction is another function of ρ = π_old/μ of each",
    "why",
)
def clamped_into_the_band(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(old_log_prob, rollout_log_probs, mask).clamp(0.5, 5)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


# ---- the KL term -------------------------------------------------------------------------
@bug(
    "grpo",
    "k3 of the wrong direction: π_θ/π_ref - log(π_θ/π_ref) - 1",
    "π_θ and π_ref are exchanged in the KL term (k3)",
    "why",
    beta=0.04,
)
def k3_upside_down(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    kl = k3(ref_log_prob, log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0)) - 0.04 * kl
    return -response_mean(terms, mask).mean()


@bug(
    "grpo",
    "the KL term has the wrong sign",
    "the KL term is added to J, not subtracted",
    "why",
    beta=0.04,
)
def divergence_is_rewarded(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    terms = terms + 0.04 * k3(log_prob, ref_log_prob, mask)
    return -response_mean(terms, mask).mean()


@bug(
    "grpo",
    "the KL term is k1, whose gradient does not know π_ref",
    "the KL term has the gradient of k1, not of k3",
    "why",
    beta=0.04,
)
def k1_in_the_loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    kl = torch.where(mask, log_prob - ref_log_prob, 0)
    terms = clipped(r, torch.where(mask, advantages, 0)) - 0.04 * kl
    return -response_mean(terms, mask).mean()


@bug(
    "grpo",
    "the KL term is averaged over all columns, padding included",
    "the KL term has another aggregation than the rest",
    "why",
    beta=0.04,
)
def unmasked_mean_of_the_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    kl = k3(log_prob, ref_log_prob, mask).mean()
    return 0.04 * kl - response_mean(terms, mask).mean()


@bug(
    "grpo",
    "the KL term is added to the advantage, inside of the clip",
    "the KL term is subtracted from A, inside of the clip",
    "nothing",
    beta=0.04,
)
def kl_inside_of_the_clip(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    a = a - 0.04 * k3(log_prob, ref_log_prob, mask)
    return -response_mean(clipped(r, a), mask).mean()


@bug(
    "grpo",
    "the squared log-ratio, without its half, in place of k3",
    "the KL term has the gradient of 0.08 k2, not of 0.04 k3",
    "why",
    beta=0.04,
)
def square_for_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    d = torch.where(mask, log_prob - ref_log_prob, 0)
    terms = clipped(r, torch.where(mask, advantages, 0)) - 0.04 * d**2
    return -response_mean(terms, mask).mean()


@bug(
    "grpo",
    "the ratio is π_θ/π_ref",
    "the ratio is to π_ref, not to π_old",
    "why",
    beta=0.04,
)
def ratio_to_the_reference(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, ref_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    terms = terms - 0.04 * k3(log_prob, ref_log_prob, mask)
    return -response_mean(terms, mask).mean()


@bug(
    "tis(grpo)",
    "the correction multiplies the KL term too",
    "the sampler's correction multiplies the KL term too",
    "nothing",
    beta=0.04,
)
def corrected_kl(
    log_prob, old_log_prob, advantages, mask, ref_log_prob, rollout_log_probs
):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(old_log_prob, rollout_log_probs, mask).clamp(max=2)
    terms = clipped(r, torch.where(mask, advantages, 0))
    terms = w * (terms - 0.04 * k3(log_prob, ref_log_prob, mask))
    return -response_mean(terms, mask).mean()


@bug("dro", "the penalty lacks its factor 1/2", "tau is 0.2, not 0.1", "why", tau=0.1)
def penalty_without_its_half(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    terms = torch.where(mask, advantages * log_prob, 0) - 0.1 * d**2
    return -token_mean(terms, mask)


# ---- advantages and number formats -------------------------------------------------------
@bug(
    "grpo",
    "advantages are whitened once more, over the tokens of the batch",
    "the advantages are whitened again, over the tokens of each batch",
    "why",
)
def whitened_again(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    inside = advantages[mask]
    a = torch.where(mask, (advantages - inside.mean()) / (inside.std() + 1e-8), 0)
    return -response_mean(clipped(r, a), mask).mean()


@bug(
    "grpo",
    "bad responses push half as hard",
    "every weight is 0.5 times what it should be where A < 0",
    "why",
)
def bad_ones_weigh_half(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    terms = clipped(r, a)
    return -response_mean(torch.where(a < 0, terms / 2, terms), mask).mean()


@bug(
    "dapo",
    "an entropy bonus of -log π_θ with coefficient 0.01 is in the loss",
    "a KL term is subtracted that dapo does not have",
    "why",
)
def surprisal_bonus(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28)
    return -token_mean(terms - 0.01 * torch.where(mask, log_prob, 0), mask)


@bug("dapo", "the ratio is computed in float16", "computed in float16", "nothing")
def ratio_in_half_precision(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    r = d.half().exp().to(log_prob.dtype)
    return -token_mean(clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask)


# ---- the table: faults whose causes an earlier reading of reports missed ------------------
def table(*words: str, **hp: Any) -> Callable[..., Any]:
    """Decorator: a loss of the table."""
    return bug(*words, part="table", **hp)


def binary_kl(lp, lp_old):
    """Return KL(Bern(π_old), Bern(π_θ))."""
    q, q_old = -lp.expm1(), -lp_old.expm1()
    rest = torch.where(q_old > 0, q_old * (q_old.log() - q.log()), 0)
    return lp_old.exp() * (lp_old - lp) + rest


@table(
    "dapo_no_upper_clip",
    "the minimum is missing: clamp(min=0.8)",
    "the minimum is missing",
    "where",
)
def floor_without_minimum(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(r.clamp(min=0.8) * torch.where(mask, advantages, 0), mask)


@table(
    "opsm(dapo)",
    "tokens of dropped responses leave the denominator",
    "it divides by the tokens that were kept, not by all trained tokens",
    "why",
)
def dropped_ones_uncounted(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    drift = response_mean(old_log_prob - log_prob, mask)[:, None]
    kept = mask & ((a >= 0) | (drift <= 0.5))
    terms = torch.where(kept, clipped(r, a, 0.8, 1.28), 0)
    return -terms.sum() / kept.sum().clamp(min=1)


@table(
    "dppo_tv_verl",
    "masked tokens leave the denominator",
    "the denominator counts only the tokens of the condition",
    "where",
)
def stopped_tokens_uncounted(log_prob, old_log_prob, advantages, mask):
    lp, old = torch.where(mask, log_prob, 0), torch.where(mask, old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    gain = lp.exp() - old.exp()
    kept = mask & (torch.where(a > 0, gain, -gain) <= 0.2)
    w = (lp - old).exp().clamp(max=3).detach()
    return -torch.where(kept, w * a * lp, 0).sum() / kept.sum().clamp(min=1)


@table(
    "dppo_kl_verl",
    "the truncated ratio is not detached",
    "not detached: when(M, min(exp(log_prob - old_log_prob), 3.0) * A) * log_prob",
    "nothing",
)
def truncated_ratio_on_the_tape(log_prob, old_log_prob, advantages, mask):
    lp, old = torch.where(mask, log_prob, -1), torch.where(mask, old_log_prob, -1)
    a = torch.where(mask, advantages, 0)
    kept = (binary_kl(lp, old) <= 0.2) | (torch.where(a > 0, lp - old, old - lp) <= 0)
    terms = torch.where(kept, (lp - old).exp().clamp(max=3) * a * lp, 0)
    return -token_mean(terms, mask)


@table(
    "topr",
    "the truncated ratio of bad responses is not detached",
    "not detached: where(A >= 0, A * log_prob, min(S, 1) * A * log_prob),",
    "nothing",
)
def tapered_weight_on_the_tape(log_prob, old_log_prob, advantages, mask):
    w = torch.where(mask, log_prob - old_log_prob, 0).sum(1).exp().clamp(max=1)
    lp = torch.where(mask, log_prob, 0).sum(1)
    a = first(advantages, mask)
    return -torch.where(a >= 0, a * lp, w * a * lp).mean()


def influence_of(log_ratio, mask, half_life=32.0, skip=0, gamma=None):
    """Return FIPO's factor of each token, [B, T], between 1 and 1.2: exp of the
    discounted sum of log-ratios from this token on.

    Log-ratios above log 10 are left out of the sum. skip: how many tokens from this one
    on are left out. gamma: the discount, given instead of its half-life in tokens.
    """
    counts = mask & (log_ratio <= torch.tensor(10.0, dtype=log_ratio.dtype).log())
    x = torch.where(counts, log_ratio, 0)
    gamma = 2 ** (-1 / half_life) if gamma is None else gamma
    t = torch.arange(x.shape[1])
    away = t[None, :] - t[:, None]
    decay = torch.where(away >= skip, gamma ** away.clamp(min=0).double(), 0.0)
    return (x.double() @ decay.T).exp().clamp(1.0, 1.2).to(x.dtype)


def fipo_of(log_prob, old_log_prob, advantages, mask, factor):
    """Return FIPO's loss with this factor: DAPO's clip of r times the factor, with r at
    most 10 where A < 0.
    """
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    r = torch.where(a < 0, r.clamp(max=10), r)
    terms = torch.minimum(r * a * factor, r.clamp(0.8, 1.28) * a * factor)
    return -token_mean(terms, mask)


@table(
    "fipo",
    "the factor is not detached",
    "not detached: log_prob - old_log_prob, where fipo has detach(log_prob",
    "nothing",
)
def influence_on_the_tape(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    return fipo_of(log_prob, old_log_prob, advantages, mask, influence_of(d, mask))


@table(
    "fipo",
    "the half-life is a time constant: e^(-1/32)",
    "a power of e: sums[..., t + 1] / exp(1 / half_life), where fipo has",
    "nothing",
)
def half_life_as_time_constant(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).detach()
    factor = influence_of(d, mask, gamma=math.exp(-1 / 32))
    return fipo_of(log_prob, old_log_prob, advantages, mask, factor)


@table(
    "fipo",
    "the token itself is left out of its future",
    "the token's own part is left out",
    "nothing",
)
def future_without_itself(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).detach()
    return fipo_of(
        log_prob, old_log_prob, advantages, mask, influence_of(d, mask, skip=1)
    )


@table(
    "grpo",
    "advantages are in bfloat16",
    "rounded to bfloat16: grpo(log_prob, old_log_prob, A.to(bfloat16))",
    "nothing",
)
def advantages_in_bfloat16(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0).bfloat16().to(log_prob.dtype)
    return -response_mean(clipped(r, a), mask).mean()


@table(
    "sapo", "the sigmoid is computed in bfloat16", "right but for rounding", "nothing"
)
def gate_in_bfloat16(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1)
    gate = (tau * (r - 1)).bfloat16().sigmoid().to(a.dtype)
    return -response_mean(4 / tau * gate * a, mask).mean()


@table(
    "topr",
    "the sum of the log-ratios is in float16",
    "",
    "nothing",
)
def summed_in_float16(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).half().sum(1)
    w = d.to(log_prob.dtype).exp().clamp(max=1).detach()
    lp = torch.where(mask, log_prob, 0).sum(1)
    a = first(advantages, mask)
    return -torch.where(a >= 0, a * lp, w * a * lp).mean()


@table(
    "up_dapo",
    "log π_θ is at least -8",
    "tokens with a log_prob below -8 have no gradient",
    "why",
)
def log_prob_is_floored(log_prob, old_log_prob, advantages, mask):
    lp = log_prob.clamp(min=-8)
    r = ratio_of(lp, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    bad = torch.minimum(r * a, r.clamp(min=0.8) * a)
    return -token_mean(torch.where(a > 0, a * torch.where(mask, lp, 0), bad), mask)


@table(
    "luspo",
    "lengths count as at most 512",
    "a length |o| counts as at most 512",
    "nothing",
)
def lengths_are_capped(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()
    terms = clipped(s, first(advantages, mask), 1 - 0.002, 1 + 0.0025)
    return -(terms * mask.sum(1).clamp(max=512)).mean()


@table(
    "grpo",
    "the KL term of π_old where A > 0",
    "π_old for π_ref where A > 0",
    "nothing",
    beta=0.04,
)
def reference_is_old_where_good(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    ref = torch.where(a > 0, old_log_prob, ref_log_prob)
    return -response_mean(clipped(r, a) - 0.04 * k3(log_prob, ref, mask), mask).mean()


@table(
    "grpo",
    "the KL term is in the parenthesis that A multiplies",
    "a factor A too many",
    "nothing",
    beta=0.04,
)
def kl_times_the_advantage(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    kl = 0.04 * k3(log_prob, ref_log_prob, mask)
    terms = torch.minimum((r - kl) * a, (r.clamp(0.8, 1.2) - kl) * a)
    return -response_mean(terms, mask).mean()


@table(
    "grpo",
    "k3 is multiplied by the clipped ratio",
    "a factor clip(r) too many",
    "nothing",
    beta=0.04,
)
def kl_times_clipped_ratio(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    kl = r.clamp(0.8, 1.2) * k3(log_prob, ref_log_prob, mask)
    return -response_mean(terms - 0.04 * kl, mask).mean()


@table(
    "unbiased_kl(grpo)",
    "the ratio on k3 is detached",
    "the KL term (k3) is multiplied by the ratio, which is a constant",
    "why",
    beta=0.04,
)
def ratio_of_kl_is_detached(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    kl = r.detach() * k3(log_prob, ref_log_prob, mask)
    return -response_mean(terms - 0.04 * kl, mask).mean()


@table(
    "unbiased_kl(grpo)",
    "k3 is multiplied by the clipped ratio",
    "a clip too many",
    "nothing",
    beta=0.04,
)
def unbiased_kl_of_clipped_ratio(
    log_prob, old_log_prob, advantages, mask, ref_log_prob
):
    return kl_times_clipped_ratio(
        log_prob, old_log_prob, advantages, mask, ref_log_prob
    )


def prime_rl(log_prob, old_log_prob, advantages, mask, penalty):
    """Return prime-rl's loss: r A where π_θ - π_old is at most 0.2 in the direction of
    A, less 1e-3 times penalty(log r, kept).
    """
    lp, old = torch.where(mask, log_prob, 0), torch.where(mask, old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    gain = lp.exp() - old.exp()
    kept = torch.where(a > 0, gain, -gain) <= 0.2
    terms = torch.where(kept, (lp - old).exp() * a, 0) - 1e-3 * penalty(lp - old, kept)
    return -token_mean(terms, mask)


@table(
    "dppo_tv_prime_rl",
    "the penalty is |log r|, not its square",
    "an absolute value: when(M, exp(log_prob - old_log_prob) * A) - 0.001",
    "nothing",
)
def penalty_is_absolute(log_prob, old_log_prob, advantages, mask):
    return prime_rl(log_prob, old_log_prob, advantages, mask, lambda d, kept: d.abs())


@table(
    "dppo_tv_prime_rl",
    "the penalty acts inside of the region alone",
    "the second part has the condition too",
    "where",
)
def penalty_inside_alone(log_prob, old_log_prob, advantages, mask):
    return prime_rl(
        log_prob, old_log_prob, advantages, mask, lambda d, kept: d**2 * kept
    )


@table(
    "cfpo",
    "the penalty has A² for |A|",
    "a square: r * A - A * A / 0.4 * (r - 1) * (r - 1), where cfpo has r *",
    "nothing",
)
def penalty_of_squared_advantage(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(r * a - a**2 / 0.4 * (r - 1) ** 2, mask)


@table(
    "drpo",
    "the penalty has r - 1 for π_θ - π_old",
    "its gradient is that of cfpo(eps=12.5), aggregated by token-mean",
    "why",
)
def penalty_without_old_policy(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(r * a - a.abs() / 25 * (r - 1) ** 2, mask)


@table(
    "ipo",
    "the penalty acts inside of the region alone",
    "the second part has the condition too",
    "where",
)
def squared_penalty_inside_alone(log_prob, old_log_prob, advantages, mask):
    lp, old = torch.where(mask, log_prob, 0), torch.where(mask, old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    kept = (lp.exp() - old.exp()).abs() <= 0.1
    d = lp - old
    return -token_mean(torch.where(kept, d.exp() * a - 1e-3 * d**2, 0), mask)


@table(
    "kl_cov",
    "the penalty is the square of log r, not |log r|",
    "a square: exp(log_prob - old_log_prob) * A - when(penalized, 1.0 *",
    "nothing",
)
def covariance_penalty_squared(log_prob, old_log_prob, advantages, mask):
    lp, old = torch.where(mask, log_prob, 0), torch.where(mask, old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    n = mask.sum()

    def centered(x):
        x = torch.where(mask, x, 0).double()
        return torch.where(mask, x - x.sum() / n, 0)

    cov = (centered(a) * centered(lp.detach())).masked_fill(~mask, -torch.inf)
    k = max(1, int(0.0002 * int(n)))
    cut = cov.flatten().sort(descending=True).values[k - 1]
    d = lp - old
    return -token_mean(d.exp() * a - torch.where(mask & (cov >= cut), d**2, 0), mask)


@table(
    "tis(dapo)",
    "the correction is a quotient of the logarithms",
    "",
    "false",
)
def quotient_of_logarithms(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = torch.where(mask, old_log_prob, 1) / torch.where(mask, rollout_log_probs, 1)
    w = w.clamp(max=2)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@table(
    "icepop(dapo)",
    "the band is of π_θ/μ",
    "the sampler's ratio is of π_θ, not of π_old",
    "why",
)
def band_of_the_policy(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    rho = ratio_of(log_prob.detach(), rollout_log_probs, mask)
    w = torch.where((rho >= 0.5) & (rho <= 5), rho, 0)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


@table(
    "tis_seq(grpo)",
    "the product of truncated ratios of tokens",
    "the bound is on each factor, not on the product",
    "where",
)
def product_of_truncated(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    rho = ratio_of(old_log_prob, rollout_log_probs, mask).clamp(max=2)
    w = torch.where(mask, rho, 1).prod(1)
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -(w * response_mean(terms, mask)).mean()


@table(
    "kpop(dapo)",
    "one direction of the two",
    "a part is missing: binary_kl(old_log_prob, rollout_log_probs) <= 2.0",
    "nothing",
)
def one_direction_of_kpop(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    old = torch.where(mask, old_log_prob, -1)
    mu = torch.where(mask, rollout_log_probs, -1)
    w = torch.where(binary_kl(old, mu) <= 2, (old - mu).exp(), 0)
    return -token_mean(
        w * clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28), mask
    )


def by_prompt(x, mask, group, combine):
    """Return the sum over prompts of combine(sum of terms, number of tokens, number of
    rows).
    """
    total = 0
    for g in group.unique():
        rows = group == g
        total = total + combine(
            torch.where(mask, x, 0)[rows].sum(), mask[rows].sum(), rows.sum()
        )
    return total


@table(
    "dapo",
    "the mean of a prompt counts once for each of its responses",
    "the mean of a prompt counts once for each of its responses, not once",
    "where",
)
def prompt_counts_for_each_response(log_prob, old_log_prob, advantages, mask, group):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0), 0.8, 1.28)
    J = by_prompt(terms, mask, group, lambda x, n, rows: rows * x / n.clamp(min=1))
    return -J / len(mask)


@table(
    "cispo",
    "prompts of which no response is good are dropped",
    "prompts of which no response has A > 0 are not trained, and not",
    "where",
)
def winnerless_prompts_dropped(log_prob, old_log_prob, advantages, mask, group):
    w = ratio_of(log_prob, old_log_prob, mask).clamp(max=5).detach()
    a = torch.where(mask, advantages, 0)
    terms = w * a * torch.where(mask, log_prob, 0)
    total, count = 0, 0
    for g in group.unique():
        rows = group == g
        if (a[rows] > 0).any():
            n = mask[rows].sum().clamp(min=1)
            total = total + torch.where(mask, terms, 0)[rows].sum() / n
            count += 1
    return -total / max(count, 1) + 0 * torch.where(mask, log_prob, 0).sum()


@table(
    "reinforce_off_policy",
    "blocks of two rows are taken for the prompts",
    "groups are taken for blocks of 2 rows, whatever their ids",
    "why",
)
def blocks_for_prompts(log_prob, old_log_prob, advantages, mask, group):
    terms = torch.where(mask, advantages * log_prob, 0)
    blocks = torch.arange(len(mask)) // 2
    J = by_prompt(terms, mask, blocks, lambda x, n, rows: x / n.clamp(min=1))
    return -J / len(blocks.unique())


@table(
    "gppo",
    "the minimum is missing: clip(r) for both signs",
    "the weight is clip(r, 1 - eps_low, 1 + eps_high) whatever the sign of",
    "why",
)
def bounded_for_both_signs(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    w = (r.clamp(0.8, 1.28) / r.detach()).detach() * r
    return -token_mean(w * a, mask)


@table(
    "gspo",
    "the bounds are exchanged where A < 0 alone",
    "eps_low is 0.0004, not 0.0003",
    "false",
)
def bounds_exchanged_for_bad_ones(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()
    a = first(advantages, mask)
    low = torch.where(a < 0, 1 - 4e-4, 1 - 3e-4)
    high = torch.where(a < 0, 1 + 3e-4, 1 + 4e-4)
    return -torch.minimum(s * a, s.clamp(low, high) * a).mean()


# ---- a second set, written when the search was finished, and before it ran on them --------
def unseen(*words: str, **hp: Any) -> Callable[..., Any]:
    """Decorator: a loss of the second set."""
    return bug(*words, part="unseen", **hp)


@unseen(
    "ppo_clip",
    "the clipped term is detached",
    "the clipped term of the minimum is detached",
    "why",
)
def clip_of_a_detached_ratio(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(torch.minimum(r * a, r.detach().clamp(0.8, 1.2) * a), mask)


@unseen(
    "cispo",
    "the bound acts on r A, not on r",
    "the bound acts on the product with A",
    "nothing",
)
def bound_on_the_product(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    w = (ratio_of(log_prob, old_log_prob, mask) * a).clamp(max=5).detach()
    return -token_mean(w * torch.where(mask, log_prob, 0), mask)


@unseen(
    "gspo",
    "one is added to each length",
    "the response's log-ratio is divided by its length plus 1",
    "nothing",
)
def length_plus_one(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).sum(1) / (mask.sum(1) + 1)
    return -clipped(d.exp(), first(advantages, mask), 1 - 3e-4, 1 + 4e-4).mean()


@unseen(
    "sapo",
    "the gate is of r, not of r - 1",
    "a part is missing: exp(log_prob - old_log_prob)",
    "why",
)
def gate_without_its_center(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1)
    return -response_mean(4 / tau * torch.sigmoid(tau * r) * a, mask).mean()


@unseen("sapo", "the gate is of log r, not of r - 1", "log r for r - 1", "nothing")
def gate_of_the_log_ratio(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0)
    a = torch.where(mask, advantages, 0)
    tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1)
    return -response_mean(4 / tau * torch.sigmoid(tau * d) * a, mask).mean()


def vespo_of(log_prob, old_log_prob, advantages, mask, weight):
    """Return VESPO's loss with weight(log W, c1, c2), detached, on the log-probability
    of each response. W is the product of its ratios.
    """
    d = torch.where(mask, log_prob - old_log_prob, 0).sum(1)
    a = first(advantages, mask)
    c1, c2 = torch.where(a > 0, 2.0, 3.0), torch.where(a > 0, 3.0, 2.0)
    phi = weight(d, c1, c2).detach()
    return -(phi * a * torch.where(mask, log_prob, 0).sum(1)).mean()


@unseen(
    "vespo",
    "the power of W has the wrong sign",
    "another sign in both cases",
    "nothing",
)
def power_with_the_wrong_sign(log_prob, old_log_prob, advantages, mask):
    return vespo_of(
        log_prob,
        old_log_prob,
        advantages,
        mask,
        lambda d, c1, c2: (-c1 * d + c2 * (1 - d.clamp(max=80).exp())).exp(),
    )


@unseen(
    "vespo",
    "the exponential damping is missing",
    "a part is missing in both cases: where(A > 0, exp(2.0 * log_W),",
    "where",
)
def damping_is_missing(log_prob, old_log_prob, advantages, mask):
    return vespo_of(
        log_prob, old_log_prob, advantages, mask, lambda d, c1, c2: (c1 * d).exp()
    )


@unseen(
    "topr",
    "the truncation is at 2",
    "another number: where(A >= 0, A * log_prob, detach(min(S, 2.0)) * A *",
    "why",
)
def truncated_at_two(log_prob, old_log_prob, advantages, mask):
    w = torch.where(mask, log_prob - old_log_prob, 0).sum(1).exp().clamp(max=2)
    lp = torch.where(mask, log_prob, 0).sum(1)
    a = first(advantages, mask)
    return -torch.where(a >= 0, a * lp, w.detach() * a * lp).mean()


@unseen(
    "topr",
    "the ratio is the geometric mean, not the product",
    "divided by the length",
    "nothing",
)
def tapered_by_the_mean(log_prob, old_log_prob, advantages, mask):
    w = response_mean(log_prob - old_log_prob, mask).exp().clamp(max=1)
    lp = torch.where(mask, log_prob, 0).sum(1)
    a = first(advantages, mask)
    return -torch.where(a >= 0, a * lp, w.detach() * a * lp).mean()


@unseen(
    "dppo_tv", "the region is of r - 1, not of π_θ - π_old", "divided by π_old", "why"
)
def region_of_the_ratio(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    gain = r.detach() - 1
    near = torch.where(a > 0, gain, -gain) <= 0.15
    return -(a * r * near * mask).sum(1).mean()


@unseen(
    "dppo_tv",
    "the region is on the wrong side",
    "the branches of the two signs of A are exchanged",
    "why",
)
def region_on_the_wrong_side(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    gain = (
        torch.where(mask, old_log_prob, 0).exp() - torch.where(mask, log_prob, 0).exp()
    )
    near = (torch.where(a > 0, gain, -gain) <= 0.15).detach()
    return -(a * r * near * mask).sum(1).mean()


@unseen(
    "dppo_kl",
    "the divergence has the other direction",
    "two arguments are exchanged: binary_kl(old_log_prob, log_prob) <= 0.05",
    "nothing",
)
def divergence_the_other_way(log_prob, old_log_prob, advantages, mask):
    lp, old = torch.where(mask, log_prob, -1), torch.where(mask, old_log_prob, -1)
    a = torch.where(mask, advantages, 0)
    kept = (binary_kl(old, lp) <= 0.05) | (torch.where(a > 0, lp - old, old - lp) <= 0)
    return -(torch.where(kept, (lp - old).exp() * a, 0) * mask).sum(1).mean()


@unseen(
    "cfpo",
    "the penalty is added, not subtracted",
    "what cfpo has beside r A has the opposite sign",
    "why",
)
def penalty_is_a_reward(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    return -token_mean(r * a + a.abs() / 0.4 * (r - 1) ** 2, mask)


@unseen(
    "drpo", "the penalty is the square of π_θ - π_old", "a factor π_old too many", "why"
)
def penalty_of_probabilities(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    gap = (
        torch.where(mask, log_prob, 0).exp() - torch.where(mask, old_log_prob, 0).exp()
    )
    return -token_mean(r * a - a.abs() / 25 * gap**2, mask)


@unseen(
    "dro",
    "the penalty is of log π_θ alone",
    "a part is missing: A * log_prob - 0.05 * log_prob ** 2",
    "why",
    tau=0.1,
)
def penalty_without_the_old_policy(log_prob, old_log_prob, advantages, mask):
    lp = torch.where(mask, log_prob, 0)
    return -token_mean(torch.where(mask, advantages, 0) * lp - 0.05 * lp**2, mask)


@unseen(
    "ripo",
    "the root is missing from the bound",
    "its gradient is that of bandpo_tv(delta=0.05), aggregated by",
    "where",
)
def bound_without_its_root(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    eps = 0.05 / torch.where(mask, old_log_prob, 0).exp()
    terms = torch.minimum(r * a, torch.clamp(r, 1 - eps, 1 + eps) * a)
    return -token_mean(terms, mask)


@unseen(
    "gppo",
    "the bounded ratio is not detached",
    "not detached: A * bounded * exp(log_prob - detach(log_prob))",
    "why",
)
def bounded_ratio_on_the_tape(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    bounded = torch.where(a > 0, r.clamp(max=1.28), r.clamp(min=0.8))
    own = torch.where(mask, log_prob - log_prob.detach(), 0).exp()
    return -token_mean(a * bounded * own, mask)


@unseen(
    "ce_gppo",
    "the two shares are exchanged",
    "share_low is 1, not 0.75; share_high is 0.75, not 1",
    "why",
)
def shares_exchanged(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    w = torch.where(
        a > 0,
        torch.where(r > 1.2, 0.75 * 1.2, r),
        torch.where(r < 0.8, 0.8, r),
    )
    own = torch.where(mask, log_prob - log_prob.detach(), 0).exp()
    return -token_mean(w.detach() * a * own, mask)


@unseen(
    "w_reinforce",
    "bad responses weigh λ, not good ones",
    "the branches of the two signs of A are exchanged",
    "why",
)
def wrong_ones_weigh_less(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    a = torch.where(a > 0, a, 0.1 * a)
    return -(a * torch.where(mask, log_prob, 0)).sum(1).mean()


@unseen(
    "aspo",
    "the ratio of good tokens is not flipped",
    "one formula for both cases: min(exp(log_prob - old_log_prob), cap)",
    "why",
)
def ratio_is_not_flipped(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    alive = torch.where(a > 0, r <= 1.2, r >= 0.8)
    own = torch.where(mask, log_prob - log_prob.detach(), 0).exp()
    return -token_mean(torch.where(alive, r.clamp(max=3).detach() * a * own, 0), mask)


@unseen(
    "icepop(grpo)",
    "the band is of log ρ: |log ρ| <= 0.5",
    "is_min is 0.606531, not 0.5; is_max is 1.64872, not 5",
    "why",
)
def band_of_the_logarithm(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    d = torch.where(mask, old_log_prob - rollout_log_probs, 0)
    w = torch.where(d.abs() <= 0.5, d.exp(), 0)
    terms = w * clipped(r, torch.where(mask, advantages, 0))
    return -response_mean(terms, mask).mean()


@unseen(
    "seq_mask(grpo)",
    "the mask is of the product, not of the geometric mean",
    "the sampler's correction is another function of ρ = π_old/μ of the",
    "why",
)
def kept_by_the_product(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    s = torch.where(mask, old_log_prob - rollout_log_probs, 0).sum(1).exp()
    kept = (s >= 0.999) & (s <= 1.001)
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -(kept * response_mean(terms, mask)).mean()


@unseen(
    "mis_seq(grpo)",
    "rejected responses are truncated, not dropped",
    "its gradient is that of tis_seq(grpo)(eps=0.2, is_max=3)",
    "why",
)
def truncated_not_rejected(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = torch.where(mask, old_log_prob - rollout_log_probs, 0).sum(1).exp()
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -(w.clamp(max=3) * response_mean(terms, mask)).mean()


@unseen(
    "grpo",
    "the KL term is clamped at 1",
    "the KL term is clamped at 1, or left out beyond it",
    "why",
    beta=0.04,
)
def kl_is_clamped(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    kl = k3(log_prob, ref_log_prob, mask).clamp(max=1)
    terms = clipped(r, torch.where(mask, advantages, 0)) - 0.04 * kl
    return -response_mean(terms, mask).mean()


@unseen(
    "grpo",
    "the KL term is there for bad responses alone",
    "the KL term is there only where A < 0",
    "why",
    beta=0.04,
)
def kl_for_bad_responses(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    kl = 0.04 * k3(log_prob, ref_log_prob, mask) * (a < 0)
    return -response_mean(clipped(r, a) - kl, mask).mean()


@unseen("luspo", "lengths are divided by their mean", "token-mean", "why")
def relative_lengths(log_prob, old_log_prob, advantages, mask):
    s = response_mean(log_prob - old_log_prob, mask).exp()
    terms = clipped(s, first(advantages, mask), 1 - 0.002, 1 + 0.0025)
    n = mask.sum(1).to(terms.dtype)
    return -(terms * n / n.mean()).mean()


@unseen(
    "gmpo",
    "the bound of good responses is used for bad ones too",
    "one formula for both cases: min(log_r, 0.4)",
    "why",
)
def one_bound_for_both_signs(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).clamp(max=0.4)
    return -(first(advantages, mask) * response_mean(d, mask).exp()).mean()


@unseen(
    "dr_grpo",
    "the sum is divided by a fixed length of 1,000",
    "every weight is 1/1000 times what it should be",
    "why",
)
def fixed_length(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0)) * mask
    return -(terms.sum(1) / 1000).mean()


@unseen(
    "tis(grpo)",
    "the square root of the ratio is the correction",
    "sqrt too many",
    "why",
)
def root_of_the_correction(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    r = ratio_of(log_prob, old_log_prob, mask)
    w = ratio_of(old_log_prob, rollout_log_probs, mask).sqrt().clamp(max=2)
    return -response_mean(w * clipped(r, torch.where(mask, advantages, 0)), mask).mean()


# ---- a third set, after later fixes: written before any check ran on it ------------------
def later(*words: str, **hp: Any) -> Callable[..., Any]:
    """Decorator: a loss of the third set."""
    return bug(*words, part="later", **hp)


@later(
    "dapo",
    "the dual clip acts where A > 0 too",
    "as by a dual clip that acts where A > 0 too",
    "why",
    c=3.0,
)
def dual_clip_at_good_tokens(log_prob, old_log_prob, advantages, mask, c=3.0):
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a, 0.8, 1.28)
    return -token_mean(torch.maximum(terms, c * a), mask)


@later(
    "grpo",
    "the loss is negated twice, its KL term too",
    "the sign of the whole loss is flipped, of the KL term too",
    "why",
    beta=0.04,
)
def negated_twice(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a)
    return response_mean(terms - 0.04 * k3(log_prob, ref_log_prob, mask), mask).mean()


@later("gspo", "token ratios are centered over the rows of the batch", "", "nothing")
def centered_over_the_rows(log_prob, old_log_prob, advantages, mask):
    d = log_prob - old_log_prob
    return -token_mean((d - d.mean(0, keepdim=True)).exp() * advantages, mask)


@later(
    "grpo",
    "responses without an advantage lose their KL term",
    "the KL term is left out of responses of which every A is 0",
    "where",
    beta=0.04,
)
def no_kl_without_an_advantage(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    a = torch.where(mask, advantages, 0)
    has_advantage = (a != 0).any(1, keepdim=True)
    kl = torch.where(has_advantage, 0.04 * k3(log_prob, ref_log_prob, mask), 0.0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a) - kl
    return -response_mean(terms, mask).mean()


@later(
    "gmpo",
    "the advantage of a response is its sum over the width",
    "the mean over the padded width",
    "why",
)
def advantage_over_the_width(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0).mean(1)
    d = torch.where(mask, log_prob - old_log_prob, 0)
    bounded = torch.where(a[:, None] > 0, d.clamp(max=0.4), d.clamp(min=-0.4))
    return -(a * response_mean(bounded, mask).exp()).mean()


@later(
    "tis(dapo)",
    "the cap of 2 is on the logarithm",
    "is_max is 7.38906, not 2: the bound is on log ρ, not on ρ",
    "why",
)
def cap_on_the_logarithm(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    w = torch.where(mask, old_log_prob - rollout_log_probs, 0).clamp(max=2.0).exp()
    a = torch.where(mask, advantages, 0)
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(w * clipped(r, a, 0.8, 1.28), mask)


@later(
    "grpo",
    "the log-ratio of the KL term overwrites that of the policy",
    "the ratio is π_ref/π_θ, as in the KL term, not π_θ/π_old",
    "nothing",
    beta=0.04,
)
def log_ratio_is_overwritten(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ratio_of(ref_log_prob, log_prob, mask)
    terms = clipped(r, torch.where(mask, advantages, 0))
    return -response_mean(terms - 0.04 * k3(log_prob, ref_log_prob, mask), mask).mean()


@later(
    "grpo",
    "k3 is of summed log-probabilities, and the other way round",
    "the KL term is k3 the other way round of the response's summed log-probabilities",
    "nothing",
    beta=0.04,
)
def kl_of_the_response(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    d = torch.where(mask, log_prob - ref_log_prob, 0).sum(1)
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a)
    return 0.04 * (d.exp() - d - 1).mean() - response_mean(terms, mask).mean()


@later(
    "cispo",
    "the truncated ratio multiplies A, without log π",
    "the truncated ratio multiplies A itself",
    "why",
)
def truncated_ratio_times_advantage(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(r.clamp(max=5.0) * advantages, mask)


@later(
    "cispo",
    "the cap is epsilon_high, not 1 + epsilon_high",
    "eps_high is 3, not 4: taken as absolute, not as a distance from 1",
    "why",
)
def cap_without_the_one(log_prob, old_log_prob, advantages, mask):
    w = ratio_of(log_prob, old_log_prob, mask).clamp(max=4.0).detach()
    return -token_mean(w * advantages * log_prob, mask)


@later(
    "drpo",
    "masked terms are averaged over all slots",
    "the mean over the padded width",
    "why",
)
def mean_over_all_slots(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    mu = torch.where(mask, old_log_prob, 0).exp()
    return -(r * a - a.abs() * mu * (r - 1) ** 2 / 25).mean()


@later(
    "dapo",
    "the mean is divided by the accumulation steps once more",
    "its gradient is 0.25 times that of dapo",
    "why",
)
def divided_by_steps_too(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a, 0.8, 1.28)
    return -token_mean(terms, mask) / 4


@later("ppo_clip", "A is whitened for the clipped term alone", "", "nothing")
def whitened_between_the_terms(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    a = torch.where(mask, advantages, 0)
    std = a[mask].std(correction=0).clamp(min=1e-6)
    white = torch.where(mask, (a - a[mask].mean()) / std, 0)
    return -token_mean(torch.minimum(r * a, r.clamp(0.8, 1.2) * white), mask)


@later(
    "ppo_clip",
    "A multiplies after the minimum",
    "where A < 0 the maximum is taken where the minimum belongs",
    "why",
)
def minimum_of_the_ratios(log_prob, old_log_prob, advantages, mask):
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(torch.minimum(r, r.clamp(0.8, 1.2)) * advantages, mask)


@later(
    "dapo",
    "the old log-probabilities are one column to the left",
    "old_log_prob is one token too early",
    "nothing",
)
def old_policy_is_shifted(log_prob, old_log_prob, advantages, mask):
    old = torch.cat([old_log_prob[:, 1:], old_log_prob[:, -1:]], 1)
    a = torch.where(mask, advantages, 0)
    return -token_mean(clipped(ratio_of(log_prob, old, mask), a, 0.8, 1.28), mask)


@later(
    "tis(dapo)",
    "the sampler's log-probabilities are one column to the right",
    "the sampler's log-probabilities are one token too late",
    "nothing",
)
def sampler_is_shifted(log_prob, old_log_prob, advantages, mask, rollout_log_probs):
    w = ratio_of(old_log_prob, rollout_log_probs.roll(1, 1), mask).clamp(max=2.0)
    a = torch.where(mask, advantages, 0)
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(w * clipped(r, a, 0.8, 1.28), mask)


@later(
    "seq_mask(dapo)",
    "the mean of log ρ is over the width",
    "another function: exp(mean_over_width(log_rho))",
    "why",
)
def geometric_mean_over_the_width(
    log_prob, old_log_prob, advantages, mask, rollout_log_probs
):
    log_rho = torch.where(mask, old_log_prob - rollout_log_probs, 0)
    g = log_rho.mean(1, keepdim=True).exp()
    a = torch.where(mask, advantages, 0) * ((g >= 0.999) & (g <= 1.001))
    r = ratio_of(log_prob, old_log_prob, mask)
    return -token_mean(clipped(r, a, 0.8, 1.28), mask)


@later(
    "rloo",
    "PPO's clip stands beside the leave-one-out baseline",
    "the term is PPO's, min(r A, clip(r, 0.8, 1.2) A): rloo has no clip",
    "why",
)
def clip_beside_leave_one_out(log_prob, old_log_prob, advantages, mask):
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a)
    return -torch.where(mask, terms, 0).sum(1).mean()


@later(
    "dapo",
    "the dual clip has another name, and **kwargs takes the setting",
    "c is absent, not 3",
    "why",
    c=3.0,
)
def setting_is_swallowed(
    log_prob, old_log_prob, advantages, mask, c_clip=None, **kwargs
):
    a = torch.where(mask, advantages, 0)
    terms = clipped(ratio_of(log_prob, old_log_prob, mask), a, 0.8, 1.28)
    if c_clip is not None:
        terms = torch.where(a < 0, torch.maximum(terms, c_clip * a), terms)
    return -token_mean(terms, mask)


@later(
    "gmpo",
    "log r is clipped on both sides",
    "both bounds act in both cases: clip(log_r, -0.4, 0.4)",
    "nothing",
)
def clipped_on_both_sides(log_prob, old_log_prob, advantages, mask):
    d = torch.where(mask, log_prob - old_log_prob, 0).clamp(-0.4, 0.4)
    return -(first(advantages, mask) * response_mean(d, mask).exp()).mean()


# ---- the record ---------------------------------------------------------------------------
PARTS = {
    "fixes": "as frameworks have fixed them",
    "table": "others, of kinds whose cause earlier reports missed",
    "unseen": "written after the search",
    "later": "as frameworks have fixed them later",
}
JUDGED = ("why", "where", "nothing", "false")


def table_of_causes() -> str:
    """Return a markdown table: for each set of losses, what their causes said at first,
    and how many say why today.
    """
    rows = []
    for part, words in PARTS.items():
        bugs = [bug for bug in BUGS.values() if bug.part == part]
        at_first = [str(sum(b.first == word for b in bugs)) for word in JUDGED]
        today = sum(bool(b.says) for b in bugs)
        rows.append([words, str(len(bugs)), *at_first, str(today)])
    head = [f"at first: {word}" for word in JUDGED]
    return markdown.table(["losses", "number", *head, "today: why"], rows)


if __name__ == "__main__":
    print(table_of_causes())
