# SPDX-License-Identifier: Apache-2.0
"""Estimators of tokens, value losses and distillation losses as verl and TRL release
them, through the checks that a user runs.
"""

import pytest
import torch

import upref


def verl_algorithms():
    pytest.importorskip("verl")
    from verl.trainer.ppo import core_algos

    return core_algos


def verl_estimator(name):
    return verl_algorithms().get_adv_estimator_fn(name)


def gae(token_level_rewards, values, response_mask, gamma, lam):
    compute = verl_algorithms().compute_gae_advantage_return
    return compute(token_level_rewards, values, response_mask, gamma, lam)


def opo(token_level_rewards, response_mask, index):
    return verl_estimator("opo")(token_level_rewards.clone(), response_mask, index)


def remax(token_level_rewards, reward_baselines, response_mask):
    return verl_estimator("remax")(token_level_rewards, reward_baselines, response_mask)


def gpg(token_level_rewards, response_mask, index):
    return verl_estimator("gpg")(token_level_rewards.clone(), response_mask, index)


def pass_at_k(token_level_rewards, response_mask, index):
    config = {"norm_adv_by_std_in_grpo": False}
    best = verl_estimator("grpo_passk")
    return best(token_level_rewards, response_mask, index, config=config)


def token_baseline(
    token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared
):
    """Return verl's advantages of the optimal token baseline."""
    return verl_algorithms().compute_optimal_token_baseline_advantage(
        token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared
    )


@pytest.mark.parametrize(
    ("function", "estimator"),
    [
        (gae, "gae_whitened"),
        (opo, "opo"),
        (remax, "remax"),
        (pass_at_k, "pass_at_k"),
        (token_baseline, "optimal_token_baseline"),
    ],
)
def test_verls_estimators_are_the_references(function, estimator):
    report = upref.check_advantages(function, estimator)
    assert report, str(report)


def test_verls_gpg_has_the_factor_that_its_ledger_records():
    report = upref.check_advantages(gpg, "gpg")
    assert report.failures[0].fault_ids == ("gpg-factor-of-nonzero-rewards",)


def test_verls_value_loss_is_the_clipped_one():
    def loss(vpreds, returns, values, response_mask, cliprange_value):
        compute = verl_algorithms().compute_value_loss
        return compute(vpreds, returns, values, response_mask, cliprange_value)

    report = upref.check_value(loss, "clipped")
    assert report, str(report)


def gkd(student_logits, teacher_logits, labels, beta, temperature):
    """Return TRL's generalized JSD loss. Skip without TRL."""
    pytest.importorskip("trl")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    compute = GKDTrainer.generalized_jsd_loss
    return compute(student_logits, teacher_logits, labels, beta, temperature)


def gkd_at_0(student_logits, teacher_logits, labels, temperature):
    return gkd(student_logits, teacher_logits, labels, 0.0, temperature)


def gkd_at_1(student_logits, teacher_logits, labels, temperature):
    return gkd(student_logits, teacher_logits, labels, 1.0, temperature)


def chunked(student_logits, teacher_logits, mask, beta, temperature):
    """Return TRL's distillation loss of hidden states, with heads that copy the logits."""
    pytest.importorskip("trl")
    from trl.trainer.distillation_trainer import _chunked_divergence_loss as compute

    head = torch.eye(student_logits.shape[-1], dtype=student_logits.dtype)
    inputs = (student_logits, teacher_logits, head, head, mask, beta)
    return compute(*inputs, temperature=temperature)[0]


@pytest.mark.parametrize(
    ("function", "divergence"),
    [
        (gkd, "jsd"),
        (gkd_at_0, "forward_kl"),
        (gkd_at_1, "reverse_kl"),
        (chunked, "jsd"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_trls_distillation_losses_are_the_divergences(function, divergence):
    report = upref.check_distillation(function, divergence)
    assert report, str(report)
