# SPDX-License-Identifier: Apache-2.0
"""What code found in the wild does and upref could not read or misjudged:
docs/in-the-wild.md. A class a test.
"""

import pytest
import torch

import upref
from tests.support.daily import daily
from upref.errors import InputError
from upref.verify.explain import GRADIENT_LEFT, GRADIENT_RETURNED, GRADIENT_TWICE
from upref.verify.faults.losses import MAXIMUM_TAKEN
from upref.verify.oracles.side_effects import OWN_GRADIENT_ADDED


def per_token(log_prob, old_log_prob, advantages, clip):
    r = (log_prob - old_log_prob).exp()
    return -torch.minimum(r * advantages, r.clamp(1 - clip, 1 + clip) * advantages)


def seq_mean(x, mask):
    return ((x * mask).sum(1) / mask.sum(1)).mean()


# ---- a training step: it goes back itself --------------------------------------------
def step(policy_log_probs, response_mask, advantages, old_log_probs, cliprange=0.2):
    """Compute the gradient of PPO's loss, and return the loss with a metric."""
    r = (policy_log_probs - old_log_probs).exp()
    loss = seq_mean(
        per_token(policy_log_probs, old_log_probs, advantages, cliprange), response_mask
    )
    loss.backward()
    return loss, {"ratio": r.detach()}


def detached(log_prob, old_log_prob, advantages, mask):
    loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
    loss.backward()
    return loss.detach()


def two_steps(log_prob, old_log_prob, advantages, mask):
    """Run the backward passes of the first and the second half of the batch, and return
    the value: the gradients add up.
    """
    x = (
        per_token(log_prob, old_log_prob, advantages, 0.2)
        * mask
        / mask.sum(1, keepdim=True)
        / len(mask)
    )
    n = len(mask) // 2
    x[:n].sum().backward(retain_graph=True)
    x[n:].sum().backward()
    return x.sum().detach()


def first_half_left(log_prob, old_log_prob, advantages, mask):
    """Run the backward pass of the first half of the batch, and return the loss of the
    second.
    """
    x = (
        per_token(log_prob, old_log_prob, advantages, 0.2)
        * mask
        / mask.sum(1, keepdim=True)
        / len(mask)
    )
    n = len(mask) // 2
    x[:n].sum().backward(retain_graph=True)
    return x[n:].sum()


def halved_twice(log_prob, old_log_prob, advantages, mask):
    loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask) / 2
    loss.backward(retain_graph=True)
    return loss


def summed_step(log_prob, old_log_prob, advantages, mask):
    loss = (per_token(log_prob, old_log_prob, advantages, 0.2) * mask).sum()
    loss.backward()
    return loss


def unreduced_step(log_prob, old_log_prob, advantages, mask):
    x = per_token(log_prob, old_log_prob, advantages, 0.2) * mask
    x.sum().backward()
    return x


@pytest.mark.parametrize(
    "loss", [step, detached, two_steps, first_half_left, halved_twice]
)
def test_a_training_step_is_judged_by_the_gradient_it_leaves(loss):
    report = upref.check(loss, "grpo", eps=0.2)
    assert report, report
    assert any(".backward() itself" in c for c in report.assumptions)
    assert str(upref.identify(loss)).partition("\n")[0].endswith("is grpo(eps=0.2)")
    assert upref.capacity(loss, 0.1, 0.1) == pytest.approx(0.02)


def test_and_a_wrong_step_is_rejected():
    assert not upref.check(step, "dapo", eps_low=0.2, eps_high=0.28)
    report = upref.check(summed_step, "grpo", eps=0.2)
    assert any(
        f.oracle == "aggregation" and "plain sum" in f.cause for f in report.failures
    ), report


# ---- ... and returns a loss from which its caller goes back again --------------------
def left(part):
    """Return a loss that leaves the gradients of each of part(terms) in .grad, and
    returns the sum of the terms.
    """

    def loss(log_prob, old_log_prob, advantages, mask):
        x = (
            per_token(log_prob, old_log_prob, advantages, 0.2)
            * mask
            / mask.sum(1, keepdim=True)
            / len(mask)
        )
        for y in part(x):
            y.sum().backward(retain_graph=True)
        return x.sum()

    return loss


def recomputed(log_prob, old_log_prob, advantages, mask):
    seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask).backward()
    return seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)


def other_returned(log_prob, old_log_prob, advantages, mask):
    loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
    loss.backward(retain_graph=True)
    return 0.01 * seq_mean(log_prob * mask, mask)


DOUBLED = [
    (left(lambda x: [x]), GRADIENT_TWICE),
    (left(list), GRADIENT_TWICE),  # each row goes back by itself
    (recomputed, GRADIENT_TWICE),
    (left(lambda x: [0.5 * x]), GRADIENT_LEFT),  # a copy that is scaled
    (left(lambda x: [x[: len(x) // 2]]), GRADIENT_LEFT),  # half of the rows
    (left(lambda x: [x[:, ::2]]), GRADIENT_LEFT),  # every other token
    (other_returned, GRADIENT_RETURNED),
]


@pytest.mark.parametrize(("loss", "cause"), daily(DOUBLED, 7))
def test_a_gradient_that_is_left_adds_to_the_returned_one(loss, cause):
    """Only what it left was compared, and each of these agreed."""
    report = upref.check(loss, "grpo", eps=0.2)
    assert not report and cause in {f.cause for f in report.failures}, report
    assert "plus that of the loss that it returns" in report.read_as
    assert not upref.identify(loss) or ".backward()" in upref.identify(loss).why


def test_the_gradient_of_one_input_alone_is_added_too():
    """Of the entropy, where it has one."""

    def loss(log_prob, old_log_prob, advantages, mask, entropy):
        if entropy.requires_grad:
            (0.01 * seq_mean(entropy, mask)).backward()
        return seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)

    report = upref.check(loss, "grpo", eps=0.2)
    assert any(
        f.oracle == "stop-gradient" and "entropy" in f.regime for f in report.failures
    ), report


def cleared(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss after a backward pass of its own, whose gradient by log_prob is
    removed: those of the network stay.
    """
    log_prob.retain_grad()
    loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
    loss.backward(retain_graph=True)
    log_prob.grad = None
    return loss


def test_a_gradient_that_is_left_in_the_network_alone():
    (found,) = upref.check(cleared, "grpo", eps=0.2).failures
    assert found.oracle == "in-training" and found.cause == OWN_GRADIENT_ADDED


def measured(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss after measuring its gradient by autograd.grad, which leaves
    nothing.
    """
    loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
    torch.autograd.grad(loss, log_prob, retain_graph=True)[0].norm()
    return loss


def test_a_gradient_that_is_measured_leaves_nothing():
    report = upref.check(measured, "grpo", eps=0.2)
    assert report and ".backward()" not in report.text(verbose=True)


def measured_on_a_copy(log_prob, old_log_prob, advantages, mask):
    """Return PPO's loss after a backward pass of a copy, for the norm of its gradient."""
    copy = log_prob.detach().clone().requires_grad_()
    seq_mean(per_token(copy, old_log_prob, advantages, 0.2), mask).backward()
    copy.grad.norm()
    return seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)


def test_a_gradient_that_is_measured_on_a_copy_leaves_nothing():
    """Where old_log_prob wants a gradient too, the copy's backward pass frees what the
    two share: no training does.
    """
    report = upref.check(measured_on_a_copy, "grpo", eps=0.2)
    assert report and ".backward()" not in report.text(verbose=True)


def test_a_gradient_that_is_left_with_its_graph():
    """It was refused: such a gradient is a number like any other."""

    def loss(log_prob, old_log_prob, advantages, mask):
        loss = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
        loss.backward(create_graph=True)
        return loss

    report = upref.check(loss, "grpo", eps=0.2)
    assert not report and GRADIENT_TWICE in {f.cause for f in report.failures}, report


def test_but_not_one_that_leaves_the_sum_to_its_caller():
    with pytest.raises(
        InputError, match=r"calls \.backward\(\) itself and returns unreduced numbers"
    ):
        upref.check(unreduced_step, "grpo", eps=0.2)


# ---- a guard against numbers that are not finite -------------------------------------
def guarded(log_prob, old_log_prob, advantages, mask):
    if not (log_prob - old_log_prob).exp()[mask].isfinite().all():
        raise RuntimeError("the ratio is not finite")
    return seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)


def narrow(log_prob, old_log_prob, advantages, mask):
    if (log_prob - old_log_prob)[mask].abs().max() > 20:
        raise RuntimeError("the policy is far away")
    return seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)


def test_a_loss_may_refuse_a_ratio_that_overflows():
    report = upref.check(guarded, "grpo", eps=0.2)
    assert report, report
    assert [
        f
        for f in report.notes
        if f.oracle == "extremes" and "the ratio is not finite" in f.found
    ]


def test_what_a_narrow_loss_refuses_is_noted():
    report = upref.check(narrow, "grpo", eps=0.2)
    assert report, report
    (said,) = [f for f in report.notes if f.oracle == "extremes"]
    assert "refused, so not tested" in said.about
    assert "the policy is far away" in said.found


# ---- what is said where nothing fits -------------------------------------------------
def one_a_response(log_prob, old_log_prob, advantages, mask, clip_eps=None):
    x = per_token(log_prob, old_log_prob, advantages.unsqueeze(-1), clip_eps)
    return seq_mean(x, mask)


def test_the_reason_of_every_shape_is_told():
    """[B, T] fails as it must; that another would do but for a setting that is None is
    what its author needs.
    """
    with pytest.raises(
        InputError, match=r"size of tensor.*NoneType.*advantages \[B, 1\]"
    ):
        upref.identify(one_a_response)


# ---- a KL term that the objective does not have, or of another size ------------------
def k3(log_prob, ref_log_prob):
    d = ref_log_prob - log_prob
    return d.exp() - 1 - d


def dapo_and_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    """Return DAPO's loss with an upper bound of 1.3 and a KL term k3 of 0.01."""
    r = (log_prob - old_log_prob).exp()
    x = torch.minimum(r * advantages, r.clamp(0.8, 1.3) * advantages) - 0.01 * k3(
        log_prob, ref_log_prob
    )
    return -(x * mask).sum() / mask.sum()


def gspo_and_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    """Return GSPO's loss of advantages [B] with a KL term of 0.04."""
    n = mask.sum(1)
    s = (((log_prob - old_log_prob) * mask).sum(1) / n).exp()
    x = torch.minimum(s * advantages, s.clamp(0.8, 1.2) * advantages)
    return -(x - 0.04 * (k3(log_prob, ref_log_prob) * mask).sum(1) / n).mean()


def half_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    """Return PPO's loss with half of k3 times 0.04, averaged over all tokens."""
    x = per_token(log_prob, old_log_prob, advantages, 0.2) + 0.04 * 0.5 * k3(
        log_prob, ref_log_prob
    )
    return (x * mask).sum() / mask.sum()


def reinforce_and_k1(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    return seq_mean(-advantages * log_prob + 0.04 * (log_prob - ref_log_prob), mask)


def grpo_and_k1_flipped(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x = per_token(log_prob, old_log_prob, advantages, 0.2)
    return seq_mean(x + 0.01 * (ref_log_prob - log_prob), mask)


def ppo_and_k1_to_old(log_prob, old_log_prob, advantages, mask):
    x = per_token(log_prob, old_log_prob, advantages, 0.2) + 0.01 * (
        log_prob - old_log_prob
    )
    return (x * mask).sum() / mask.sum()


def grpo_and_k3_exchanged(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x = per_token(log_prob, old_log_prob, advantages, 0.2) + 0.04 * k3(
        ref_log_prob, log_prob
    )
    return seq_mean(x, mask)


def grpo_and_k3_added(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x = per_token(log_prob, old_log_prob, advantages, 0.2) - 0.04 * k3(
        log_prob, ref_log_prob
    )
    return seq_mean(x, mask)


def gradient(report):
    return next(f.cause for f in report.failures if f.oracle == "gradient")


def test_a_kl_term_that_does_not_belong_there_is_named():
    report = upref.check(dapo_and_k3, "dapo", eps_low=0.2, eps_high=0.3)
    assert (
        gradient(report) == "a KL term is subtracted that dapo does not have: 0.01 k3"
    )
    report = upref.check(gspo_and_k3, "gspo", eps_low=0.2, eps_high=0.2)
    assert (
        gradient(report) == "a KL term is subtracted that gspo does not have: 0.04 k3"
    )


def test_another_size_and_aggregation_are_both_named():
    report = upref.check(half_k3, "grpo", eps=0.2, beta=0.04)
    assert gradient(report) == "beta is 0.02, not 0.04"
    assert [f.cause for f in report.failures if f.oracle == "aggregation"] == [
        "token-mean: the sum over all tokens is divided by their number"
    ]


LACKS = "a KL term is subtracted that {} does not have: {}"
# which is 1
K1 = "0.0{} k1, to any policy; {} of the sampled tokens has this gradient too"
KL = {
    reinforce_and_k1: "meant as reinforce, but: "
    + LACKS.format("reinforce", K1.format(4, "an entropy bonus")),
    grpo_and_k1_flipped: "meant as grpo(eps=0.2), but: a KL term is added to J that is not grpo's k3: "
    + K1.format(1, "a bonus on the likelihood"),
    grpo_and_k3_exchanged: "meant as grpo(eps=0.2), but: a KL term is subtracted that is not grpo's k3: "
    "0.04 k3 (π_θ and π_ref exchanged)",
    grpo_and_k3_added: "meant as grpo(eps=0.2), but: the KL term is added to J, not subtracted: 0.04 k3",
    ppo_and_k1_to_old: "meant as ppo_clip(eps=0.2), but: "
    + LACKS.format("ppo_clip", K1.format(1, "an entropy bonus")),
    dapo_and_k3: "meant as dapo(eps_low=0.2, eps_high=0.3), but: "
    + LACKS.format("dapo", "0.01 k3"),
}


@pytest.mark.parametrize("loss", KL)
def test_identify_names_the_objective_beside_any_kl_term(loss):
    assert (
        str(upref.identify(loss)).partition("\n")[0] == f"{loss.__name__} is {KL[loss]}"
    )


def test_half_of_k3_is_named():
    """A 1/2 that belongs to k2."""
    report = upref.check_kl(
        lambda log_prob, ref_log_prob: 0.5 * k3(log_prob, ref_log_prob), "k3"
    )
    assert [f.cause for f in report.failures if f.oracle in ("value", "gradient")] == [
        "half of k3"
    ] * 2


# ---- two slips, and a KL term that is averaged otherwise than the rest ---------------
def product_and_kl(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    r = ((log_prob - old_log_prob) * mask).sum(1).exp()
    x = torch.minimum(r * advantages, r.clamp(0.75, 1.25) * advantages)
    return -x.mean() + 0.04 * (k3(log_prob, ref_log_prob) * mask).sum(1).mean()


def kl_by_tokens(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x = seq_mean(per_token(log_prob, old_log_prob, advantages, 0.2), mask)
    return x + 0.04 * (k3(log_prob, ref_log_prob) * mask).sum() / mask.sum()


def maximum_and_k3(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    """Return DAPO's loss with a maximum in place of the minimum, and a KL term of 0.01."""
    r = (log_prob - old_log_prob).exp()
    x = torch.maximum(r * advantages, r.clamp(0.8, 1.28) * advantages) - 0.01 * k3(
        log_prob, ref_log_prob
    )
    return -(x * mask).sum() / mask.sum()


def kl_by_width(log_prob, old_log_prob, advantages, mask, ref_log_prob):
    x = seq_mean(-advantages * log_prob, mask)
    return x + 0.02 * seq_mean(log_prob - ref_log_prob, mask) * mask.shape[1]


OLD = "old_log_prob has no effect: every weight is as where the ratio is 1"
SUMMED = "the product of the response's ratios replaces the token's: one term for each response"
TWO = {
    product_and_kl: ("grpo", {"eps": 0.25, "beta": 0.04}, SUMMED),
    kl_by_tokens: ("grpo", {"eps": 0.2, "beta": 0.04},
                   "the KL term has another aggregation than the rest: token-mean"),
    reinforce_and_k1: ("grpo", {"eps": 0.2, "beta": 0.04},
                       f"two faults together: {OLD}; and the KL term has the gradient of k1, not of k3: another "
                       "estimator, or a part of it is detached"),
    maximum_and_k3: ("dapo", {},
                     f"two faults together: {MAXIMUM_TAKEN}; and a KL term is subtracted "
                     "that dapo does not have: 0.01 k3"),
}  # fmt: skip


@pytest.mark.parametrize("loss", TWO)
def test_two_slips_that_together_give_the_numbers_are_the_cause(loss):
    name, hp, cause = TWO[loss]
    assert gradient(upref.check(loss, name, **hp)) == cause


def test_what_gives_the_numbers_of_one_batch_alone_is_no_cause():
    """Its KL term has no coefficient: it grows with the width of the batch."""
    assert gradient(upref.check(kl_by_width, "grpo", eps=0.2)).startswith(
        "no known cause fits"
    )


def test_identify_tells_a_kl_term_beside_a_slip():
    found = upref.identify(product_and_kl)
    assert found.why == SUMMED and found.matches[0].hp["beta"] == pytest.approx(0.04)
