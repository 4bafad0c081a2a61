# SPDX-License-Identifier: Apache-2.0
"""`upref.diff`: equal losses have no difference, a planted one is found in its
quantity, and settings that close one are run before they are named.
"""

import json
from dataclasses import replace

import pytest
import torch

import upref
from upref import cli
from upref.identification.diff import compare_losses


def ppo(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A)[mask].mean()


def wider(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -torch.minimum(r * A, r.clamp(0.8, 1.28) * A)[mask].mean()


def of_responses(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A) * mask
    return -(J.sum(1) / mask.sum(1)).mean()


def halved(log_prob, old_log_prob, advantages, mask):
    return ppo(log_prob, old_log_prob, advantages, mask) / 2


def without_last(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss without the last token of each response, divided by all tokens."""
    last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
    kept = mask & ~last
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    return -(J * kept).sum() / mask.sum()


def with_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    d = torch.where(mask, ref_log_prob - log_prob, 0)
    k3 = d.exp() - d - 1
    return ppo(log_prob, old_log_prob, advantages, mask) + 0.1 * k3[mask].mean()


def kept(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss as a mean over the tokens whose ratio is at most 2."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    keep = mask & (r.detach() <= 2)
    J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    return -(J * keep).sum() / keep.sum().clamp(min=1)


def dropped(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss over the tokens whose ratio is at most 2, divided by all
    tokens.
    """
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    keep = mask & (r.detach() <= 2)
    J = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    return -(J * keep).sum() / mask.sum()


def truncated(log_prob, old_log_prob, sampler_log_prob, advantages, mask, cap=2.0):
    """Return PPO's loss times the ratio to a sampler, at most `cap`."""
    rho = torch.where(mask, old_log_prob - sampler_log_prob, 0).exp().clamp(max=cap)
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -(rho * torch.minimum(r * A, r.clamp(0.8, 1.2) * A))[mask].mean()


def with_higher_cap(log_prob, old_log_prob, sampler_log_prob, advantages, mask):
    return truncated(log_prob, old_log_prob, sampler_log_prob, advantages, mask, 5.0)


PLANTED = [
    (wider, "weight of a token", "A > 0"),
    (of_responses, "divisor", ""),
    (halved, "divisor", ""),
    (without_last, "mask", ""),
    (with_kl, "KL term", ""),
]


@pytest.mark.parametrize(
    ("loss", "quantity", "where"), PLANTED, ids=[one[0].__name__ for one in PLANTED]
)
def test_a_planted_difference_is_found_in_its_quantity(loss, quantity, where):
    found = upref.diff(ppo, loss)
    assert not found
    assert found.first is not None, found
    assert found.first.name == quantity, found
    assert where in found.first.where
    assert f"differ first in the {quantity}" in str(found)


def with_bounded_advantages(log_prob, old_log_prob, advantages, mask):
    return ppo(log_prob, old_log_prob, advantages.clamp(-5, 5), mask)


def test_losses_that_differ_for_large_advantages_alone_differ():
    found = upref.diff(ppo, with_bounded_advantages)
    assert found.first is not None, found
    assert found.first.name == "weight of a token"
    assert found.first.where == "A = 40, r < 1.2; A = -40, r > 0.8"
    assert found.first.a.startswith("40 at A = 40, r = 1;")
    assert found.first.b.startswith("5 at A = 40, r = 1;")
    assert found.example.batch == "random batch 0 with large advantages"
    assert abs(found.example.A) > 5


def divided_by(count):
    """Return PPO's loss as a sum over tokens, divided by count(advantages, mask)."""

    def loss(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        terms = torch.minimum(r * A, r.clamp(0.8, 1.2) * A) * mask
        return -terms.sum() / count(advantages, mask)

    return loss


def test_a_divisor_that_leaves_out_tokens_without_an_advantage_is_a_divisor():
    nonzero = divided_by(lambda A, mask: (mask & (A != 0)).sum().clamp(min=1))
    found = compare_losses(nonzero, ppo)
    assert found.first.name == "divisor", found
    assert "token-mean, where all ratios are 1; times " in found.first.a


def test_a_response_without_a_trained_token_that_counts_is_found():
    counts_one = divided_by(lambda A, mask: mask.sum(1).clamp(min=1).sum())
    found = compare_losses(counts_one, ppo)
    assert found.first.name == "gradient beside a response without a trained token"
    assert found.first.a.endswith(" times the other loss's"), found
    assert found.example.batch.endswith("with a response without a trained token")


def test_a_response_without_a_trained_token_that_a_loss_cannot_take_is_named():
    found = compare_losses(of_responses, of_responses)
    said = "not compared: a response without a trained token, beside which no finite"
    assert found and said in str(found)
    covered = compare_losses(ppo, ppo)
    assert "one with a response without a trained token; to" in covered.compared


def without_likely(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    keep = mask & (log_prob.detach() < -0.05)
    return -(torch.minimum(r * A, r.clamp(0.8, 1.2) * A) * keep).sum() / mask.sum()


def test_tokens_near_probability_1_have_a_weight_of_their_own():
    found = compare_losses(without_likely, ppo)
    assert found.first.name == "weight of a token", found
    assert found.first.where.startswith("A > 0, about r > 0.98")
    assert "at π_old = 0.97" in found.first.where
    assert "neither jumps" not in found.first.where
    assert found.first.a.startswith("0 at A = ")


def of_first_advantage(log_prob, old_log_prob, advantages, mask):
    A = advantages[:, :1].expand_as(advantages)
    return ppo(log_prob, old_log_prob, A, mask)


def test_advantages_within_a_response_that_one_loss_does_not_read_are_named():
    found = compare_losses(of_first_advantage, ppo)
    words = "within a response: of_first_advantage reads one for each response"
    assert found and words in str(found)
    assert "within a response" not in str(compare_losses(ppo, ppo))


def test_losses_that_differ_at_every_ratio_have_a_region():
    def twice_where_negative(log_prob, old_log_prob, advantages, mask):
        r = torch.where(mask, log_prob - old_log_prob, 0).exp()
        A = torch.where(mask, advantages, 0)
        return -(r * torch.where(A < 0, 2 * A, A))[mask].mean()

    found = compare_losses("is_pg", twice_where_negative)
    assert found.first.where == "A < 0, any r"


def test_a_divisor_that_counts_kept_tokens_alone_is_a_divisor():
    found = upref.diff(kept, dropped)
    assert found.first.name == "divisor", found
    assert "token-mean, where all ratios are 1; times 1.0" in found.first.a
    assert found.first.b == "token-mean"


@pytest.mark.parametrize("other", [ppo, with_higher_cap, "mis(ppo_clip)"])
def test_a_correction_for_a_sampler_is_a_quantity(other):
    found = upref.diff(truncated, other)
    assert found.first.name == "sampler's correction", found
    assert "where π_old/μ = " in found.first.a
    assert "of a sampler" in found.example.batch


def with_clamped_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    d = torch.where(mask, ref_log_prob - log_prob, 0).clamp(-10, 10)
    k3 = d.exp() - d - 1
    return ppo(log_prob, old_log_prob, advantages, mask) + 0.1 * k3[mask].mean()


def test_a_clamp_of_the_kl_term_far_from_the_reference_is_found():
    found = upref.diff(with_kl, with_clamped_kl)
    assert not found
    assert found.example.batch.endswith("with a far reference")
    assert "the weight on tokens by themselves" in str(found)


def test_an_objective_with_a_correction_equals_a_loss_that_is_it():
    assert compare_losses(truncated, "tis(ppo_clip)")


@pytest.mark.parametrize(
    "loss", [ppo, of_responses, with_kl, kept, truncated, "gspo", "up_dapo"]
)
def test_a_loss_does_not_differ_from_itself(loss):
    found = upref.diff(loss, loss)
    assert found, found
    assert found.a.endswith("(1)")
    assert "nothing differs between" in str(found)
    assert "not compared: long responses" in str(found)
    assert "not compared: |A| above 40" in str(found)


def test_the_numbers_of_the_clip_are_those_of_the_losses():
    found = upref.diff(ppo, wider)
    assert "1.2" in found.first.where
    assert "1.28" in found.first.where
    assert "A > 0: 1.2;" in found.first.a
    assert "A > 0: 1.28;" in found.first.b


def test_the_first_token_has_the_gradients_of_both_losses():
    token = upref.diff(ppo, halved).example
    assert token.batch == "batch on policy"
    assert token.b == pytest.approx(token.a / 2)
    assert "0.5 times as much" in str(token)


def test_a_token_without_a_gradient_has_no_negative_zero():
    token = replace(upref.diff(ppo, halved).example, a=-0.5, b=0.0)
    assert str(token).endswith(": -0.5 and 0, 0 times as much")


def test_an_objective_equals_a_loss_that_is_it():
    assert compare_losses("ppo_clip", ppo)


def test_the_ratio_of_a_response_is_a_quantity():
    found = upref.diff("gspo", "grpo")
    ratio = next(q for q in found.quantities if q.name == "ratio")
    assert (ratio.differs, ratio.b) == (True, "of the token")
    assert ratio.a.startswith("of the response")


def test_a_kl_term_makes_no_other_ratio_and_a_divisor_is_named():
    def over_width(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        tokens = mask.sum() / mask.numel()
        loss = with_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob)
        return loss * tokens

    found = compare_losses(with_kl, over_width)
    assert [q.name for q in found.quantities if q.differs] == ["divisor"]
    assert all(q.a == "of the token" for q in found.quantities if q.name == "ratio")


def of_a_response(log_prob, old_log_prob, advantages, mask, is_mean, most=10.0):
    """Return a loss with GSPO's form of a ratio: its value is the response's (the mean,
    or the product), its gradient the token's.
    """
    d = torch.where(mask, log_prob - old_log_prob, 0)
    log_s = d.sum(-1, keepdim=True)
    log_s = log_s / mask.sum(-1, keepdim=True) if is_mean else log_s
    s = (d - d.detach() + log_s.detach()).clamp(max=most).exp()
    A = torch.where(mask, advantages, 0)
    J = torch.minimum(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A) * mask
    return -(J.sum(-1) / mask.sum(-1)).mean()


def of_a_mean(log_prob, old_log_prob, advantages, mask):
    return of_a_response(log_prob, old_log_prob, advantages, mask, is_mean=True)


def of_a_product(log_prob, old_log_prob, advantages, mask):
    return of_a_response(log_prob, old_log_prob, advantages, mask, is_mean=False)


def test_the_mean_and_the_product_of_a_response_are_two_ratios():
    found = compare_losses(of_a_mean, of_a_product)
    assert found.first.name == "ratio", found
    assert "the geometric mean" in found.first.a
    assert "the product" in found.first.b


def test_two_clips_of_one_ratio_of_a_response_have_the_same_ratio():
    def clipped(eps):
        """Return a loss of responses whose ratio, a product, is clipped to 1 ± eps."""

        def loss(log_prob, old_log_prob, advantages, mask):
            log_s = torch.where(mask, log_prob - old_log_prob, 0).sum(1)
            s, A = log_s.exp(), advantages[:, 0]
            return -torch.minimum(s * A, s.clamp(1 - eps, 1 + eps) * A).mean()

        return loss

    found = {q.name: q for q in compare_losses(clipped(0.2), clipped(0.3)).quantities}
    assert found["weight of a token"].differs
    assert not found["ratio"].differs and "product" in found["ratio"].a


def test_two_unknown_ratios_of_responses_are_not_called_the_same():
    """Two ratios that no known form fits differ in the quantity "ratio". Their words are
    the same, so that the second is said to be "in another way".
    """

    def times_a_power(power):
        """Return a loss whose terms have a detached factor: the largest ratio of the
        response over the token's own, to this power.
        """

        def loss(log_prob, old_log_prob, advantages, mask):
            r = torch.where(mask, log_prob - old_log_prob, 0).exp()
            A = torch.where(mask, advantages, 0)
            largest = r.amax(-1, keepdim=True).detach() ** power
            return -(r * A * (largest / r.detach() ** power))[mask].mean()

        return loss

    found = compare_losses(times_a_power(1), times_a_power(2))
    assert found.first.name == "ratio", found
    assert found.first.b == f"{found.first.a}, in another way"


def test_the_command_answers_by_its_status_and_json(capsys):
    assert cli.main(["diff", "dapo", "dapo"]) == 0
    assert capsys.readouterr().out.startswith("nothing differs between dapo (1)")
    assert cli.main(["diff", "dapo", "up_dapo", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["same"] is False
    assert said["quantities"][1]["name"] == "weight of a token"


@pytest.mark.trl
@pytest.mark.parametrize(
    ("other", "quantity"),
    [
        ("trl:dapo,epsilon_high=0.28", "weight of a token"),
        ("trl:grpo", "divisor"),
        ("trl:dapo,importance_sampling_level=sequence", "ratio"),
    ],
)
def test_a_setting_of_trl_is_found(other, quantity):
    pytest.importorskip("trl")
    assert compare_losses("trl:dapo", other).first.name == quantity


@pytest.mark.verl
@pytest.mark.parametrize(
    ("other", "quantity"),
    [
        ("verl:vanilla,clip_ratio_c=1e9,clip_ratio_low=0.1", "weight of a token"),
        (
            "verl:vanilla,clip_ratio_c=1e9,loss_agg_mode=seq-mean-token-mean",
            "divisor",
        ),
        ("verl:gspo", "ratio"),
    ],
)
def test_a_setting_of_verl_is_found(other, quantity):
    pytest.importorskip("verl")
    assert compare_losses("verl:vanilla,clip_ratio_c=1e9", other).first.name == quantity


@pytest.mark.trl
@pytest.mark.verl
def test_the_settings_that_close_a_difference_are_named():
    for name in ("trl", "verl"):
        pytest.importorskip(name)
    found = upref.diff("verl:vanilla", "trl:dapo")
    assert "A < 0" in found.first.where
    closing = ["verl:vanilla,clip_ratio_c=1e+09", "trl:dapo,delta=3"]
    assert [words.partition(", as run")[0] for words in found.closed_by] == closing
    assert compare_losses(closing[0], "trl:dapo")
    assert compare_losses("verl:vanilla", closing[1])


def over_the_width(log_prob, old_log_prob, advantages, mask):
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    terms = torch.minimum(r * A, r.clamp(0.8, 1.2) * A)
    return -(terms * mask).sum() / mask.numel()


@pytest.mark.verl
def test_verls_name_of_the_padded_width_closes_a_difference():
    pytest.importorskip("verl")
    found = upref.diff(over_the_width, "verl:vanilla")
    [closing] = [words.partition(", as run")[0] for words in found.closed_by]
    assert closing.endswith("loss_agg_mode=seq-mean-token-sum-norm")
    assert compare_losses(over_the_width, closing)


@pytest.mark.verl
def test_nothing_is_named_where_no_setting_closes_a_difference():
    pytest.importorskip("verl")
    assert not upref.diff("verl:vanilla", with_kl).closed_by


def a_function_whose_name_is_longer_than_a_column(
    log_prob, old_log_prob, advantages, mask
):
    """Return a loss clipped on both sides of the window, as if A had one sign."""
    r = torch.where(mask, log_prob - old_log_prob, 0).exp()
    A = torch.where(mask, advantages, 0)
    return -(r.clamp(0.8, 1.2) * A)[mask].mean()


def test_a_region_leaves_its_bounds_out_and_the_columns_align():
    long = a_function_whose_name_is_longer_than_a_column
    found = compare_losses(ppo, long)
    assert found.first.where == "A > 0, r < 0.8; A < 0, r > 1.2"
    lines = found.text().splitlines()
    named = [line for line in lines if line.startswith(("      ppo ", "      a_"))]
    assert len(named) == 2
    assert named[0].index(found.first.a) == named[1].index(found.first.b)


def test_the_token_that_is_shown_has_another_weight_where_that_is_named_first():
    """Two divisors differ on every token, and the clip on few."""
    found = upref.diff(upref.get("grpo").aggregated("token-mean"), upref.get("dapo"))
    assert found.first.name == "weight of a token" and "divisor" in found.failures[-1]
    A, r = found.example.A, found.example.r
    assert 1.2 < r < 1.28 if A > 0 else r > 1, found.example


def test_an_end_at_which_neither_weight_jumps_is_no_bound():
    soft = upref.diff("is_pg", "sapo")
    assert "(near " in soft.first.where and "neither jumps" in soft.first.where
    clipped = upref.diff("is_pg", "dapo")
    assert "neither jumps" not in clipped.first.where
