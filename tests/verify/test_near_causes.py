# SPDX-License-Identifier: Apache-2.0
"""Causes of losses that differ from a right one in a single choice: which tokens are
penalized, over which a factor sums, what a bound acts on, what a mean is over. Each loss
here takes that choice, and the right choice agrees.
"""

import math
from functools import partial

import pytest
import torch

import upref

QUICK = ("unusual-inputs", "one-response", "every-value")  # oracles left out


def ready(mask, *tensors):
    return [torch.where(mask, x, 0) for x in tensors]


def pessimistic(r, A, low, high):
    return torch.minimum(r * A, r.clamp(low, high) * A)


def kl_cov(log_prob, old_log_prob, advantages, mask, *, score):
    """Return KL-Cov's loss, which penalizes the tokens with the largest
    score(covariance).
    """
    lp, old, A = ready(mask, log_prob, old_log_prob, advantages)
    n = mask.sum()
    centered = [x.detach() - x.sum().detach() / n for x in (A, lp)]
    scores = score(centered[0] * centered[1]).masked_fill(~mask, -math.inf)
    chosen = scores.flatten().topk(max(1, int(0.0002 * n))).indices
    penalized = torch.zeros_like(mask).flatten().index_fill(0, chosen, True)
    penalty = (lp - old).abs() * penalized.view_as(mask)
    terms = (lp - old).exp() * A - penalty
    return -torch.where(mask, terms, 0).sum() / n


def fipo(log_prob, old_log_prob, advantages, mask, *, counts):
    """Return FIPO's loss, whose factor sums over the tokens for which counts(columns
    behind) is 1.
    """
    lp, old, A = ready(mask, log_prob, old_log_prob, advantages)
    log_r = (lp - old).detach()
    columns = torch.arange(mask.shape[1])
    behind = columns - columns[:, None]  # of the second token, seen from the first
    kernel = 0.5 ** (behind.abs() / 32) * counts(behind)
    sums = torch.where(log_r <= math.log(10), log_r, 0) @ kernel.to(lp.dtype).T
    f = sums.exp().clamp(1, 1.2)
    r = (lp - old).exp()
    r = torch.where(A < 0, r.clamp(max=10), r)
    return -(f * pessimistic(r, A, 0.8, 1.28)).sum() / mask.sum()


def w_reinforce_code(log_prob, old_log_prob, advantages, mask, *, before_clip):
    """Return a weighted loss whose weight is inside the clip (before_clip) or outside."""
    lp, old, A = ready(mask, log_prob, old_log_prob, advantages)
    lam = torch.where(A > 0, 0.1, 1.0)
    r = (lp - old).exp()
    if before_clip:
        terms = pessimistic(lam * r, A, 0.8, 1.2)
    else:
        terms = lam * pessimistic(r, A, 0.8, 1.2)
    return -terms.sum() / mask.sum()


def icepop(
    log_prob, old_log_prob, rollout_log_probs, advantages, mask, *, bounded, weighed=1
):
    """Return IcePop's loss, whose band bounds exp(bounded(lp, old, log μ)). weighed:
    the power of the ratio to the sampler.
    """
    lp, old, mu, A = ready(mask, log_prob, old_log_prob, rollout_log_probs, advantages)
    log_bounded = bounded(lp, old, mu).detach()
    kept = (log_bounded >= math.log(0.5)) & (log_bounded <= math.log(5))
    weights = (weighed * (old - mu)).exp() * kept
    terms = pessimistic((lp - old).exp(), A, 0.8, 1.28) * weights
    return -terms.sum() / mask.sum()


def capped(log_prob, old_log_prob, rollout_log_probs, advantages, mask, *, ratio):
    lp, old, mu, A = ready(mask, log_prob, old_log_prob, rollout_log_probs, advantages)
    weights = ratio(lp, old, mu).detach().exp().clamp(max=2)
    terms = pessimistic((lp - old).exp(), A, 0.8, 1.28) * weights
    return -terms.sum() / mask.sum()


def of_sampler(lp, old, mu):
    return old - mu


def of_update(lp, old, mu):
    return lp - old


def of_both(lp, old, mu):
    return lp - mu


def grpo(log_prob, old_log_prob, advantages, mask, *, apart):
    """Return GRPO's loss; or, with `apart`, the mean over good responses plus the mean
    over the others.
    """
    lp, old, A = ready(mask, log_prob, old_log_prob, advantages)
    J = pessimistic((lp - old).exp(), A, 0.8, 1.2).sum(1) / mask.sum(1)
    good = A.sum(1) > 0
    if not apart:
        return -J.mean()
    return -sum((J * x).sum() / x.sum().clamp(min=1) for x in (good, ~good))


WRONG = [
    (partial(fipo, counts=lambda n: n <= 0), "fipo", "window-over-past"),
    (
        partial(fipo, counts=lambda n: n < 0),
        "fipo",
        "window-over-past-without-token",
    ),
    (partial(fipo, counts=lambda n: n > 0), "fipo", "window-without-token"),
    (
        partial(w_reinforce_code, before_clip=True),
        "w_reinforce_code",
        "factor-before-clip",
    ),
    (
        partial(icepop, bounded=of_update),
        "icepop(dapo)",
        "sampler-bounds-on-other-ratio",
    ),
    (
        partial(icepop, bounded=of_both, weighed=0),
        "icepop(dapo)",
        "sampler-bounds-on-other-ratio",
    ),
    (partial(capped, ratio=of_update), "tis(dapo)", "sampler-ratio-of-update"),
]
BY_NIGHT = [
    (
        partial(kl_cov, score=torch.neg),
        "kl_cov",
        "smallest-covariances-penalized",
    ),
    (partial(kl_cov, score=torch.abs), "kl_cov", "covariances-penalized-by-size"),
    (partial(grpo, apart=True), "grpo", "signs-averaged-over-own-responses"),
]
RIGHT = [
    (partial(kl_cov, score=lambda x: x), "kl_cov"),
    (partial(fipo, counts=lambda n: n >= 0), "fipo"),
    (partial(w_reinforce_code, before_clip=False), "w_reinforce_code"),
    (partial(icepop, bounded=of_sampler), "icepop(dapo)"),
    (partial(capped, ratio=of_sampler), "tis(dapo)"),
    (partial(grpo, apart=False), "grpo"),
]


def check(loss, name):
    agg = "token-mean" if name == "icepop(dapo)" else ""
    return upref.check(loss, name, skip=QUICK, agg=agg)


@pytest.mark.parametrize(
    ("loss", "name", "fault_id"),
    [*WRONG, *(pytest.param(*case, marks=pytest.mark.nightly) for case in BY_NIGHT)],
)
def test_the_choice_is_named(loss, name, fault_id):
    report = check(loss, name)
    assert report.failures[0].fault_ids == (fault_id,), report.text()


@pytest.mark.parametrize(("loss", "name"), RIGHT)
def test_the_right_choice_agrees(loss, name):
    report = check(loss, name)
    assert report, report.text()


def test_a_cap_without_a_band_is_no_band_on_another_ratio():
    """It keeps every token, as a band on a ratio that never leaves it would."""
    report = check(partial(icepop, bounded=lambda lp, old, mu: 0 * lp), "icepop(dapo)")
    assert report.failures
    assert "sampler-bounds-on-other-ratio" not in report.failures[0].fault_ids


def dapo_of(log_prob, old_log_prob, advantages, mask, *, keeps):
    """Return DAPO's loss of the tokens whose ratios `keeps` keeps; the divisor counts
    all.
    """
    lp, old, A = ready(mask, log_prob, old_log_prob, advantages)
    r = (lp - old).exp()
    kept = mask & keeps(r.detach(), mask)
    return -torch.where(kept, pessimistic(r, A, 0.8, 1.28), 0).sum() / mask.sum()


def test_a_cause_has_each_bound_that_was_found():
    """A bound of |log r| at log 0.3 leaves out what is above 3.3, and not above 2.9: few
    batches have a ratio between the two.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        def keeps(r, _):
            return (r >= 0.3) & (r <= 2.9)

        return dapo_of(log_prob, old_log_prob, advantages, mask, keeps=keeps)

    said = upref.check(loss, "dapo", skip=QUICK).failures[0].cause
    assert "is below 0.3 or above 2.9 are rejected" in said


def test_a_ratio_beside_the_batch_s_median_is_no_bound_of_a_token():
    """A token alone is its own median."""

    def loss(log_prob, old_log_prob, advantages, mask):
        def keeps(r, mask):
            return r <= 3 * r[mask].median()

        return dapo_of(log_prob, old_log_prob, advantages, mask, keeps=keeps)

    finding = upref.check(loss, "dapo", skip=QUICK).failures[0]
    assert finding.cause_kind != "why" and "rejected" not in finding.cause
