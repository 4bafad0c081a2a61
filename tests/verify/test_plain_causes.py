# SPDX-License-Identifier: Apache-2.0
"""Causes that say why: what is counted for a token, powers of the ratio, and edits of a
formula that people make.
"""

import math

import pytest
import torch

import upref

QUICK = ("unusual-inputs", "one-response", "every-value")  # oracles left out


def filled(x, mask):
    return torch.where(mask, x, 0)


def ppo(log_prob, old_log_prob, advantages, mask):
    r = filled(log_prob - old_log_prob, mask).exp()
    A = filled(advantages, mask)
    return torch.minimum(r * A, r.clamp(0.8, 1.2) * A)


def holes_in_lengths(log_prob, old_log_prob, advantages, mask):
    terms = ppo(log_prob, old_log_prob, advantages, mask)
    began = mask.cumsum(1) > 0
    goes_on = mask.flip(1).cumsum(1).flip(1) > 0
    return -(terms.sum(1) / (began & goes_on).sum(1)).mean()


def left_padding_in_count(log_prob, old_log_prob, advantages, mask):
    terms = ppo(log_prob, old_log_prob, advantages, mask)
    before = (mask.cumsum(1) == 0) & mask.any(1, keepdim=True)
    return -terms.sum() / (mask | before).sum()


def up_to_last_token(log_prob, old_log_prob, advantages, mask):
    terms = ppo(log_prob, old_log_prob, advantages, mask)
    columns = torch.arange(1, mask.shape[1] + 1)
    return -(terms.sum(1) / (columns * mask).amax(1)).mean()


def empty_row_as_token(log_prob, old_log_prob, advantages, mask):
    terms = ppo(log_prob, old_log_prob, advantages, mask)
    return -terms.sum() / mask.sum(1).clamp(min=1).sum()


def tempered(log_prob, old_log_prob, advantages, mask):
    r = (filled(log_prob - old_log_prob, mask) / 0.9).exp()
    return -(r * filled(advantages, mask)).sum() / len(mask)


def over_mean_length(log_prob, old_log_prob, advantages, mask):
    length = mask.sum() / len(mask)
    s = (filled(log_prob - old_log_prob, mask).sum(1) / length).exp()
    A = filled(advantages, mask).sum(1) / mask.sum(1)
    return -torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A).mean()


def gmpo_with_bounds_of_ppo(log_prob, old_log_prob, advantages, mask):
    """Return GMPO's loss with the bounds 0.6 and 1.4 of r in place of ±0.4 of log r."""
    A = advantages[:, 0]
    log_r = filled(log_prob - old_log_prob, mask)
    high = log_r.clamp(max=math.log(1.4))
    low = log_r.clamp(min=math.log(0.6))
    clipped = torch.where(A[:, None] > 0, high, low)
    return -(A * (filled(clipped, mask).sum(1) / mask.sum(1)).exp()).mean()


def dro_of_ratios(log_prob, old_log_prob, advantages, mask):
    lp = filled(log_prob, mask)
    r = (lp - filled(old_log_prob, mask)).exp()
    return -(filled(advantages, mask) * lp - 0.05 * (r - 1) ** 2).sum() / mask.sum()


def sampled_term_alone(log_prob, old_log_prob, advantages, mask):
    """Return DPPO-KL's loss with only the sampled token's term of the divergence."""
    lp, old, A = (filled(x, mask) for x in (log_prob, old_log_prob, advantages))
    divergence = old.exp() * (old - lp).detach()
    grows = torch.where(A > 0, lp > old, lp < old)
    terms = (lp - old).exp() * A * ~(grows & (divergence > 0.05))
    return -terms.sum() / len(mask)


def entropies_of_batch(log_prob, old_log_prob, advantages, mask, entropy):
    """Return ASPO's loss with one quantile of the entropies over the whole batch."""
    lp, old, A = (filled(x, mask) for x in (log_prob, old_log_prob, advantages))
    is_calm = entropy <= entropy[mask].double().quantile(0.8)
    eps = torch.where(is_calm, torch.full_like(lp, 0.2), torch.full_like(lp, 0.4))
    r = (lp - old).exp().detach()
    trains = torch.where(A > 0, r <= 1 + eps, r >= 1 - eps)
    weight = torch.where(A > 0, 1 / r, r).clamp(max=3)
    return -(filled(weight * A * trains, mask) * lp).sum() / mask.sum()


def over_one_response_less(log_prob, advantages, mask):
    terms = filled(log_prob, mask) * filled(advantages, mask)
    return -terms.sum() / max(len(mask) - 1, 1)


def mean_of_parts_of_two_rows(log_prob, old_log_prob, advantages, mask):
    terms = ppo(log_prob, old_log_prob, advantages, mask)
    parts = zip(terms.split(2), mask.split(2), strict=True)
    means = [part.sum() / m.sum().clamp(min=1) for part, m in parts]
    return -torch.stack(means).mean()


def tapered_by_token(log_prob, old_log_prob, advantages, mask):
    lp, A = filled(log_prob, mask), filled(advantages, mask)
    r = (lp - filled(old_log_prob, mask)).exp().detach()
    return -(torch.where(A >= 0, 1, r.clamp(max=1)) * A * lp).sum(1).mean()


def weighted_up_to_10(log_prob, old_log_prob, advantages, mask):
    r = filled(log_prob - old_log_prob, mask).exp().clamp(max=10)
    return -(r * filled(advantages, mask)).sum() / len(mask)


CASES = [
    (tapered_by_token, "topr", "ratio-of-token"),
    (weighted_up_to_10, "is_pg", "ratio-capped"),
    (over_one_response_less, "rloo", "divided-by-one-response-less"),
    (left_padding_in_count, "ppo_clip", "columns-before-response-counted"),
    (tempered, "is_pg", "log-ratio-scaled"),
]
BY_NIGHT = [
    (mean_of_parts_of_two_rows, "ppo_clip", "parts-averaged"),
    (holes_in_lengths, "reinforce_pp", "holes-counted"),
    (up_to_last_token, "reinforce_pp", "columns-to-last-token-counted"),
    (over_mean_length, "gspo", "log-ratio-over-mean-length"),
    (entropies_of_batch, "aspo_code", "entropies-of-batch"),
]
EDITS = [
    (gmpo_with_bounds_of_ppo, "gmpo", "the bounds of the ratio are 1 - ε and 1 + ε"),
    (dro_of_ratios, "dro", "r - 1 for log r"),
    (sampled_term_alone, "dppo_kl", "the term of the sampled token alone"),
]


@pytest.mark.parametrize(
    ("loss", "name", "fault_id"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in BY_NIGHT)],
)
def test_the_cause_is_the_fault(loss, name, fault_id):
    report = upref.check(loss, name, skip=QUICK)
    assert report.failures[0].fault_ids == (fault_id,), report.text()


def test_a_row_without_tokens_that_counts_as_one_is_named():
    report = upref.check(empty_row_as_token, "ppo_clip", skip=QUICK)
    assert [f.oracle for f in report.failures] == ["padding"]
    assert "a row without tokens counts as one token" in report.text()


@pytest.mark.nightly
@pytest.mark.parametrize(("loss", "name", "words"), EDITS)
def test_an_edit_that_people_make_is_named(loss, name, words):
    report = upref.check(loss, name, skip=QUICK)
    assert words in report.text(), report.text()


def kl_cov_over_all_slots(log_prob, old_log_prob, advantages, mask):
    """Return KL-Cov's loss with means over all slots, masked ones (which hold 0)
    included.
    """
    lp, old, A = (filled(x, mask) for x in (log_prob, old_log_prob, advantages))
    covariance = (A - A.mean()) * (lp - lp.mean()).detach()
    covariance = covariance.masked_fill(~mask, -math.inf)
    k = max(1, int(0.0002 * mask.sum()))
    is_penalized = covariance >= covariance.flatten().topk(k).values[-1]
    terms = (lp - old).exp() * A - (lp - old).abs() * (is_penalized & mask)
    return -filled(terms, mask).sum() / mask.sum()


@pytest.mark.nightly
def test_a_mean_over_all_slots_is_not_called_an_inverse():
    text = upref.check(kl_cov_over_all_slots, "kl_cov", skip=QUICK).text()
    assert "an inverse" not in text
    assert "all slots are counted, padding included" in text


def test_a_loss_without_a_ratio_has_no_factor_on_it():
    def doubled(log_prob, advantages, mask):
        return -2 * filled(log_prob * advantages, mask).sum() / len(mask)

    report = upref.check(doubled, "reinforce", skip=QUICK)
    assert "2 times" in report.text()
    assert "log r" not in report.failures[0].cause
