# SPDX-License-Identifier: Apache-2.0
"""What each loss of losses.toml needs before upref can call it: (the repository's folder) -> a loss. No line is theirs.

A function that stands alone is taken as it is, or with its own settings bound. One that asks for a model, or that
stands in the middle of a training loop, is run from the line where its log-probabilities are known.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Of

import torch

from docs.in_the_wild.fetched import Fetched

PAD = Of(pad_token_id=0)
CPU = Of(device="cpu")


def given(logp, mask, **more):
    """The names that a step in the style of simple_GRPO has at hand once its log-probabilities are known."""
    made = {
        "inputs": mask.int(),
        "prompt_length": 0,
        "tokenizer": PAD,
        "engine": CPU,
        "per_token_logps": logp,
    }
    return made | {"clip_param": 0.2, "beta": 0.04} | more


def flat(advantages):
    """[B], as its training loop has them."""
    if advantages.ndim != 1:
        raise ValueError("one advantage per response")
    return advantages


def rows(one, mask, *tensors):
    """The mean of one(...) on the unmasked tokens of each response."""
    return (
        sum(one(*(x[i][m] for x in tensors)) for i, m in enumerate(mask) if m.any())
        / mask.any(1).sum()
    )


# ---- grpo-from-scratch ---------------------------------------------------------------
def feld_ppo(code: Fetched):
    ppo_loss = code.take("src/losses.py", "ppo_loss").ppo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        return rows(ppo_loss, mask, old_log_prob, log_prob, advantages)

    return loss


def feld_grpo(code: Fetched):
    grpo_loss = code.take(
        "src/losses.py", "compute_kl_divergence", "grpo_loss"
    ).grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        one = lambda *x: grpo_loss(*x, epsilon=0.2, beta=0.01)[0]
        return rows(one, mask, old_log_prob, log_prob, ref_log_prob, advantages)

    return loss


def nick(code: Fetched):
    file = "3_grpo/08_grpo_modular.py"
    cal_k1 = code.take(file, "cal_k1").cal_k1

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        old = (mask * old_log_prob).sum(-1)
        had = {
            "new_logp": log_prob,
            "ref_logp": ref_log_prob,
            "old_seq_logp": old,
            "advantages": advantages,
        }
        return code.lines(
            file,
            89,
            97,
            **had,
            completion_mask=mask.long(),
            cal_k1=cal_k1,
            E=0.25,
            beta=0.04,
        ).loss

    return loss


def kaip(code: Fetched):
    pg = code.take(
        "grpo/policy_gradient.py",
        "reinforce_loss",
        "clipped_surrogate_loss",
        "compute_pg_loss",
    )
    mean = code.take("grpo/utils.py", "masked_mean").masked_mean
    step = code.take(
        "grpo/training.py",
        "grpo_step",
        compute_pg_loss=pg.compute_pg_loss,
        masked_mean=mean,
    ).grpo_step
    return partial(
        step, grad_accum_steps=1, variant="clipped", raw_rewards=None, clip_eps=0.2
    )


def yuanxuns(code: Fetched):
    def loss(
        log_prob,
        old_log_prob,
        advantages,
        mask,
        ref_log_prob,
        eps_low=0.2,
        eps_high=0.3,
        beta=0.01,
    ):
        had = {
            "per_token_logps": log_prob,
            "batch_old_per_token_log_probs": old_log_prob,
            "target_masks": mask,
        }
        had |= {
            "batch_ref_per_token_log_probs": ref_log_prob,
            "batch_advantages": advantages,
        }
        config = {"training": {"eps_low": eps_low, "eps_high": eps_high, "beta": beta}}
        return code.lines(
            "src/models/grpo/grpo.py",
            464,
            489,
            **had,
            config=config,
            entropy_mask=torch.ones(()),
            num_target_tokens=mask.sum(),
        ).loss

    return loss


# ---- tiny-grpo -----------------------------------------------------------------------
def nikhil(code: Fetched):
    masked_mean = code.take("grpo.py", "masked_mean").masked_mean

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
        policy = code.lines(
            "grpo.py",
            334,
            334,
            policy_token_logprobs=log_prob,
            completion_mask=mask,
            masked_mean=masked_mean,
        ).policy_sequence_logprobs
        pg = code.lines(
            "grpo.py", 344, 344, advantages=advantages, policy_sequence_logprobs=policy
        ).policy_loss
        had = {
            "policy_token_logprobs": log_prob,
            "reference_token_logprobs": ref_log_prob,
            "completion_mask": mask,
        }
        return code.lines(
            "grpo.py",
            364,
            368,
            policy_loss=pg,
            masked_mean=masked_mean,
            GRPO=Of(kl_beta=beta),
            **had,
        ).total_loss

    return loss


def ratio_then_loss(
    code: Fetched,
    file: str,
    ratio: tuple[int, int],
    loss: tuple[int, int],
    policy: str,
    beta: float,
):
    """A loss of which a file has the ratio at some lines and the rest at others. `policy`: its name of log π_θ."""

    def in_two_parts(
        log_prob, old_log_prob, advantages, mask, ref_log_prob, epsilon=0.2, beta=beta
    ):
        had = {policy: log_prob}
        first = code.lines(file, *ratio, **had, old_log_probs=old_log_prob)
        return code.lines(
            file,
            *loss,
            **had,
            ref_log_probs=ref_log_prob,
            completion_mask=mask,
            ratio=first.ratio,
            advantages=advantages,
            epsilon=epsilon,
            beta=beta,
        ).loss

    return in_two_parts


def gameof(code: Fetched):
    return ratio_then_loss(
        code, "loss.py", (211, 212), (228, 233), "token_log_probs", beta=0.01
    )


def fangyuan(code: Fetched):
    return ratio_then_loss(
        code, "grpo.py", (166, 166), (183, 186), "new_log_probs", beta=0.1
    )


def r20213(code: Fetched):
    compute_loss = code.take("grpo.py", "compute_kl_k3", "compute_loss").compute_loss
    return partial(compute_loss, cfg=Of(clip_eps=0.2, beta=0.04))


# ---- simple_grpo ---------------------------------------------------------------------
def kalinplus(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        batch = {"refs": ref_log_prob, "gen_logps": old_log_prob}
        had = given(log_prob, mask, advantages=advantages, batch=batch)
        return code.lines("grpo_vllm_one.py", 159, 174, **had).loss

    return loss


def kalinplus_rf(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = given(
            log_prob,
            mask,
            gen_per_token_logps=old_log_prob,
            per_token_advantage=advantages,
        )
        return code.lines(
            "simple-reinforce++/rf++_vllm_one.py",
            65,
            71,
            **had,
            num_items_in_batch=mask.sum(),
        ).loss

    return loss


def tcapelle(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = given(
            log_prob, mask, advantages=advantages, gen_logps=old_log_prob, beta=0.0
        )
        return code.lines("grpo_vllm_dr.py", 155, 173, **had).loss

    return loss


def anglee_grpo(code: Fetched, kind="grpo"):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        batch = {"refs": ref_log_prob, "gen_logps": old_log_prob}
        had = given(
            log_prob,
            mask,
            advantages=advantages,
            batch=batch,
            loss_type=kind,
            compute_gen_logps=True,
        )
        return code.lines("grpo.py", 262, 292, **had).loss

    return loss


def anglee_gspo(code: Fetched):
    return anglee_grpo(code, "gspo")


def lsdefine(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        had = given(log_prob, mask, advantages=advantages, batch={"refs": ref_log_prob})
        return code.lines("regroup_ver/grpo_regroup.py", 169, 176, **had).loss

    return loss


# ---- simple-grpo ---------------------------------------------------------------------
def heineman(code: Fetched):
    masked_mean = code.take("simple_grpo/grpo_utils.py", "masked_mean").masked_mean

    def loss(
        log_prob,
        old_log_prob,
        advantages,
        mask,
        ref_log_prob,
        clip_lower=0.2,
        clip_higher=0.2,
        beta=0.0,
    ):
        train = Of(
            clip_lower=clip_lower,
            clip_higher=clip_higher,
            beta=beta,
            masked_mean_axis=None,
        )
        had = {
            "mb_new_logprobs": log_prob,
            "mb_old_logprobs": old_log_prob,
            "mb_ref_logprob": ref_log_prob,
        }
        A = torch.cat([advantages[:, :1], advantages], 1)  # it drops the first
        return code.lines(
            "simple_grpo/simple_trainer.py",
            401,
            421,
            **had,
            mb_advantages=A,
            masked_mean=masked_mean,
            mb_response_masks_bool=mask,
            self=Of(config=Of(train=train)),
        ).loss

    return loss


def gamendez(code: Fetched):
    def reduce(x, how, by):
        return x.sum(-1)

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        config = Of(objective_clip_band=0.2, dkl_weight=0.01, drgrpo=True)
        had = {
            "log_probs": log_prob,
            "old_log_probs": old_log_prob,
            "advantages": advantages,
        }
        one = code.lines(
            "grpo/GRPO.py", 315, 323, **had, self=Of(config=config)
        ).unaggregated_objective
        both = code.lines(
            "grpo/GRPO.py",
            333,
            336,
            log_probs=log_prob,
            ref_log_probs=ref_log_prob,
            unaggregated_objective=one,
            self=Of(config=config),
        )
        return code.lines(
            "grpo/GRPO.py",
            338,
            345,
            unaggregated_objective=both.unaggregated_objective,
            reduce=reduce,
            batch_group_generation_mask=mask,
            self=Of(config=config),
        ).objective

    return loss


def anderson(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
        had = {
            "per_token_logps": log_prob,
            "ref_per_token_logps": ref_log_prob,
            "completion_mask": mask,
        }
        return code.lines(
            "main.py",
            312,
            317,
            **had,
            advantages=advantages,
            args=Of(kl_weight_beta=beta),
        ).loss

    return loss


def wangitu(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        batch = {"ref_logps": ref_log_prob, "gen_logps": old_log_prob}
        had = given(
            log_prob,
            mask,
            advantages=advantages,
            batch=batch,
            args=Of(clip_param=0.2, beta=0.04),
        )
        return code.lines("train_grpo.py", 91, 101, **had).loss

    return loss


# ---- mini-grpo, nanogrpo -------------------------------------------------------------
def robotsail(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, eps=0.1, beta=1.0):
        had = {
            "new_logprobs": log_prob,
            "old_logprobs": old_log_prob,
            "ref_logprobs": ref_log_prob,
        }
        comps = Of(hyperparams=Of(eps=eps, kl_penalty_strength=beta))
        return code.lines(
            "cli.py",
            546,
            577,
            **had,
            advantages=advantages,
            comps=comps,
            grpo_logit_mask=mask,
            rollout_lens=mask.sum(1),
        ).grpo_loss

    return loss


def tianyi(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        had = given(
            log_prob, mask, advantages=advantages, ref_per_token_logps=ref_log_prob
        )
        return code.lines(
            "minigrpo.py", 296, 340, **had, batch={"gen_logps": old_log_prob}
        ).loss

    return loss


def asimkadav(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        had = {
            "logp_tokens": log_prob,
            "logp_ref": ref_log_prob.sum(-1),
            "adv": advantages,
        }
        return code.lines("grpo.py", 22, 24, **had, self=Of(kl_coef=0.02)).loss

    return loss


def ojus(code: Fetched):
    compute_loss = code.take("grpo.py", "GRPO.compute_loss").compute_loss

    def loss(log_prob, old_log_prob, advantages, mask, eps=0.1):
        trainer = Of(
            get_per_token_logps=lambda model, x: x, model=None, epsilon=eps, beta=0.0
        )
        A = advantages * (1 + 1e-4)  # it divides by std + 1e-4
        return compute_loss(
            trainer,
            log_prob,
            old_log_prob,
            A,
            torch.zeros_like(A),
            torch.ones_like(A),
            mask,
        )[0]

    return loss


def sandesh(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {"token_log_probs": log_prob, "completion_mask": mask}
        sums = code.lines("src/grpo_trainer.py", 257, 257, **had).sequence_log_probs
        return code.lines(
            "src/grpo_trainer.py", 279, 279, log_probs=sums, flat_advantages=advantages
        ).pg_loss

    return loss


def zhili(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "log_probs": log_prob,
            "batch_advantages": flat(advantages),
            "target_masks": mask,
        }
        return code.lines("grpo.py", 282, 284, **had, num_target_tokens=mask.sum()).loss

    return loss


# ---- rlhf-from-scratch ---------------------------------------------------------------
def manuhalapeth(code: Fetched):
    ppo = code.take("rlhf/ppo.py", "policy_ratio", "clipped_surrogate")

    def loss(log_prob, old_log_prob, advantages, mask):
        one = lambda new, old, A: ppo.clipped_surrogate(
            ppo.policy_ratio(new, old), A, clip_eps=0.2
        )
        return rows(one, mask, log_prob, old_log_prob, advantages)

    return loss


def zyl_ppo(code: Fetched):
    compute_loss = code.take(
        "instructgpt/ppo.py", "masked_mean", "compute_loss"
    ).compute_loss
    return partial(compute_loss, vpreds=torch.zeros(()), returns=torch.zeros(()))


def zyl_grpo(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "log_probs": log_prob,
            "batch_advantages": advantages,
            "target_masks": mask,
        }
        return code.lines(
            "grpo/grpo.py", 294, 297, **had, num_target_tokens=mask.sum()
        ).loss

    return loss


# ---- -gspo, -dapo --------------------------------------------------------------------
def linxinrong(code: Fetched, name, **hp):
    folder = "src/post_training_contrast/algorithms/"
    classes = code.take(folder + "base.py", "PolicyLossBatch", dataclass=dataclass)
    every = (
        "validate_policy_loss_batch",
        "masked_mean",
        "compute_sequence_ratio",
        "compute_clip_fraction",
    )
    base = code.take(folder + "base.py", *every, "compute_reference_kl")
    had = vars(base) | {"build_loss_output": lambda batch, loss, **more: loss}
    compute = getattr(
        code.take(f"{folder}{name}.py", f"compute_{name}_loss", **had),
        f"compute_{name}_loss",
    )

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        return compute(
            classes.PolicyLossBatch(
                log_prob, old_log_prob, advantages, mask, ref_log_prob
            ),
            **hp,
        )

    return loss


def linxinrong_grpo(code: Fetched):
    return linxinrong(code, "grpo", kl_beta=0.04)


def linxinrong_gspo(code: Fetched):
    return linxinrong(code, "gspo")


def linxinrong_dapo(code: Fetched):
    return linxinrong(code, "dapo")


def malice(code: Fetched, **config):
    file = "src/gepa_dapo_grn/dapo_core.py"
    names = (
        "_clip_advantages",
        "_soft_ratio_weights",
        "DAPOTrainer._compute_policy_loss",
    )
    compute = vars(code.take(file, *names))["_compute_policy_loss"]
    defaults = {
        "clip_ratio": 0.2,
        "clip_advantage": 5.0,
        "use_soft_gating": False,
        "gating_temperature": 1.0,
    }
    trainer = Of(config=Of(**defaults | config))
    return lambda log_prob, old_log_prob, advantages, mask: compute(
        trainer, log_prob[mask], old_log_prob[mask], advantages[mask]
    )


def malice_soft(code: Fetched):
    return malice(code, use_soft_gating=True)


def gmongaras(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "new_probs": log_prob.exp(),
            "old_probs": old_log_prob.exp(),
            "adv": advantages,
        }
        masks = torch.cat([mask, mask[:, :1]], 1)  # it drops the last
        return code.lines(
            "script.py",
            283,
            293,
            **had,
            loss_masks=masks,
            loss_weight=1 / mask.sum(),
            eps_low=0.2,
            eps_high=0.28,
        ).reward

    return loss


# ---- nanorl --------------------------------------------------------------------------
def jimyma(code: Fetched):
    calculate = code.take(
        "nanorl/rl/grpo_loss.py", "calculate_grpo_loss"
    ).calculate_grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        per_token = calculate(
            log_prob, old_log_prob, ref_log_prob, advantages, 0.2, 0.2, 0.04, 0.0
        )[0]
        return code.lines(
            "nanorl/actors/train.py", 444, 446, per_token=per_token, loss_mask=mask
        ).scalar

    return loss


def vegaction(code: Fetched):
    file, as_given = "nanorllm/trainer/loss.py", lambda logits, labels, args: logits
    compute = code.take(
        file, "loss_agg", "compute_policy_loss", compute_token_logprobs=as_given
    ).compute_policy_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        batch = {
            "labels": None,
            "old_logprobs": old_log_prob,
            "advantages": advantages,
            "loss_mask": mask,
        }
        return compute(
            log_prob, batch, Of(clip_eps=0.2, loss_agg_mode="seq-mean-token-mean")
        )

    return loss


def briefgpt(code: Fetched):
    file, as_given = "nanorllm/trainer/loss.py", lambda logits, labels, args: logits
    compute = code.take(
        file, "compute_policy_loss", compute_token_logprobs=as_given
    ).compute_policy_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        batch = {
            "labels": None,
            "old_logprobs": old_log_prob,
            "advantages": advantages,
            "loss_mask": mask,
        }
        return compute(log_prob, batch, Of(clip_eps=0.2, use_kl=True, kl_coef=0.01))

    return loss


def jeevan_rloo(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        sums = code.lines(
            "nano_rl/rloo.py", 69, 69, token_log_probs=log_prob, mask=mask
        ).sum_log_probs
        return code.lines(
            "nano_rl/rloo.py", 111, 111, logprobs=sums, advantages=flat(advantages)
        ).loss

    return loss


def jeevan_actor(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {"token_log_probs": log_prob, "advantages": advantages, "mask": mask}
        return code.lines("nano_rl/actorcritic.py", 119, 120, **had).actor_loss

    return loss


# ---- r1-zero, nano-r1 ----------------------------------------------------------------
def torchtune(code: Fetched, name):
    means = vars(code.take("torchtune/rlhf/rewards.py", "masked_mean", "masked_sum"))
    taken = code.take("torchtune/dev/rl/loss.py", name, rlhf=Of(**means), **means)
    return getattr(taken, name)(epsilon=0.1, kl_coeff=0.1)


def joecummings(code: Fetched):
    module = torchtune(code, "GRPOLoss")
    return lambda log_prob, old_log_prob, advantages, mask, ref_log_prob: module(
        old_log_prob, log_prob, ref_log_prob, advantages, mask
    )


def joecummings_completion(code: Fetched):
    module = torchtune(code, "GRPOCompletionLoss")
    return lambda log_prob, old_log_prob, advantages, mask, ref_log_prob: module(
        old_log_prob, log_prob, ref_log_prob, advantages, mask
    )


def joecummings_simple(code: Fetched):
    module = torchtune(code, "GRPOSimpleLoss")
    return lambda log_prob, old_log_prob, advantages, mask, ref_log_prob: module(
        old_log_prob, log_prob, ref_log_prob, advantages, mask
    )


def skandml(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        had = {
            "per_token_logps": log_prob,
            "ref_per_token_logps": ref_log_prob,
            "completion_mask": mask,
        }
        return code.lines(
            "llama_r1_zero/grpo.py",
            129,
            133,
            **had,
            advantages=advantages,
            self=Of(beta=0.01),
        ).loss

    return loss


def bary(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "old_log_probs": old_log_prob,
            "new_log_probs": log_prob,
            "advantage": flat(advantages),
        }
        self = Of(epsilon=0.2, beta=0.01)
        loss = code.lines("nano_r1.py", 64, 66, **had, self=self).loss
        kl_div = code.lines("nano_r1.py", 68, 68, **had).kl_div
        return loss + self.beta * kl_div

    return loss


# ---- assignment5-alignment -----------------------------------------------------------
def ymzhang(code: Fetched):
    file, pg = (
        "cs336_alignment/grpo.py",
        ("compute_grpo_clip_loss", "compute_policy_gradient_loss"),
    )
    step = code.take(
        file, *pg, "masked_mean", "grpo_microbatch_train_step"
    ).grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


def damek(code: Fetched):
    file, pg = (
        "cs336_alignment/grpo.py",
        ("assert_finite", "compute_grpo_clip_loss", "compute_policy_gradient_loss"),
    )
    step = code.take(
        file, *pg, "masked_mean", "grpo_microbatch_train_step"
    ).grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


def gzsiceberg(code: Fetched, kind="grpo_clip"):
    def rearrange(x, how):
        return x[:, None]

    file, pg = (
        "cs336_alignment/grpo.py",
        ("compute_gspo_clip_loss", "compute_grpo_clip_loss"),
    )
    mean = vars(
        code.take("cs336_alignment/sft_helper.py", "masked_normalize", "masked_mean")
    )
    names = *pg, "compute_policy_gradient_loss", "grpo_microbatch_train_step"
    step = code.take(
        file, *names, **mean, rearrange=rearrange
    ).grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type=kind,
        raw_rewards=None,
        cliprange=0.2,
    )


def gzsiceberg_gspo(code: Fetched):
    return gzsiceberg(code, "gspo_clip")


def libassignment(code: Fetched):
    file = "cs336_alignment/rl/utils.py"
    compute = code.take(
        file,
        "ComputePolicyGradientLossResult",
        "compute_policy_gradient_loss",
        "aggregate_loss_across_microbatch",
        dataclass=dataclass,
    )

    def loss(log_prob, old_log_prob, advantages, mask):
        one = compute.compute_policy_gradient_loss(
            advantages, log_prob, response_mask=mask
        )
        return compute.aggregate_loss_across_microbatch(
            one.per_token_policy_gradient_loss, mask
        )

    return loss


def guochen(code: Fetched):
    pg = (
        "run_compute_grpo_clip_loss",
        "run_compute_policy_gradient_loss",
        "run_masked_normalize",
    )
    step = code.take(
        "tests/adapters.py", *pg, "run_grpo_microbatch_train_step"
    ).run_grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


# ---- UP, and objectives of 2026 by their authors -------------------------------------
def between(code: Fetched, file: str, first: str, last: str, **given):
    """What the lines from the one with `first` to the next one with `last` make of the names given."""
    text = (code.folder / file).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(text) if first in line)
    end = next(i for i, line in enumerate(text) if i > start and last in line)
    return code.lines(file, start + 1, end + 1, **given)


def up_trl(code: Fetched):
    args = Of(delta=None, steps_per_generation=1)
    me = Of(
        importance_sampling_level="token",
        beta=0.0,
        args=args,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        off_policy_mask_threshold=None,
        model=Of(training=False),
        accelerator=Of(num_processes=1),
    )

    def loss(log_prob, old_log_prob, advantages, mask):
        A = flat(advantages)[:, None]
        given = {
            "per_token_logps": log_prob,
            "old_per_token_logps": old_log_prob,
            "advantages": A,
            "mask": mask.int(),
        }
        given |= {
            "self": me,
            "entropy_mask": None,
            "inputs": {"num_items_in_batch": mask.sum()},
        }
        file = "trl/experimental/up/up_trainer.py"
        return between(
            code,
            file,
            "log_ratio = per_token_logps - old",
            "loss = (per_token_loss * mask)",
            **given,
        ).loss

    return loss


def up_blog(code: Fetched):
    mean = lambda x, mask: (x * mask).sum() / (mask.sum() + 1e-8)
    agg_loss = lambda loss_mat, loss_mask, loss_agg_mode: mean(loss_mat, loss_mask)
    file = "_posts/2026-02-26-UP-GRPO.md"
    made = between(
        code,
        file,
        "def compute_policy_loss(",
        "return pg_loss, pg_clipfrac",
        agg_loss=agg_loss,
        verl_F=Of(masked_mean=mean),
    )

    def loss(log_prob, old_log_prob, advantages, response_mask):
        return made.compute_policy_loss(
            old_log_prob, log_prob, advantages, response_mask.double(), cliprange=0.2
        )[0]

    return loss


def drpo(code: Fetched):
    theirs = vars(code.take("unirl/algorithms/drpo.py", "_drpo_loss"))["_drpo_loss"]

    def loss(log_prob, old_log_prob, advantages, mask):
        packed = {
            "new_logp": log_prob[mask],
            "old_logp": old_log_prob[mask],
            "advantages": advantages[mask],
        }
        return theirs(epsilon=12.5, **packed)[0].mean()

    return loss


WAPO = "verifiers/rl/trainer/trainer.py"


def wapo_repo(kind: str, share, **settings):
    """One loss_type of their trainer; share: what their orchestrator hands over as seq_loss_weights, by the mask."""

    def wrap(code: Fetched):
        me = Of(
            loss_type=kind,
            use_importance_sampling=True,
            clip_eps=0.2,
            mask_negative_advantages=kind == "wapo",
            mask_positive_advantages=False,
            token_bin_counting=False,
            normalize_by_kept_tokens=False,
        )
        vars(me).update(settings)

        def loss(log_prob, old_log_prob, advantages, mask):
            A = flat(advantages)[:, None].expand(mask.shape)
            inputs = {
                "loss_mask": mask.int(),
                "entropies": None,
                "trainer_logprobs": log_prob,
                "advantages": A,
                "inference_logprobs": old_log_prob,
                "seq_loss_weights": share(mask),
            }
            text = (code.folder / WAPO).read_text(encoding="utf-8").splitlines()
            first = next(
                i
                for i, line in enumerate(text)
                if 'loss_mask = inputs["loss_mask"].bool()' in line
            )
            last = next(
                i for i, line in enumerate(text) if "# Count clipped tokens" in line
            )
            return code.lines(WAPO, first + 1, last, self=me, inputs=inputs).loss

        return loss

    return wrap


each = lambda mask: 1 / (mask.sum(1) * len(mask))
together = lambda mask: (1 / mask.sum()).expand(len(mask))
wapo = wapo_repo("wapo", lambda mask: torch.ones(len(mask)) / len(mask), clip_eps=9.0)
wapo_grpo = wapo_repo("grpo", each)
wapo_gspo = wapo_repo("gspo", each, clip_eps=3e-4)
wapo_dr_dapo = wapo_repo("dr_dapo", together, mask_ratio_low=0.8, mask_ratio_high=1.28)
wapo_dr_grpo = wapo_repo(
    "dr_grpo", lambda mask: (1 / (mask.sum(1).max() * len(mask))).expand(len(mask))
)


# ---- rlvr ----------------------------------------------------------------------------
def laguna(mode):
    def wrap(code: Fetched):
        theirs = vars(code.take("src/laguna_rlvr/visual/gspo.py", "_surrogate_loss"))[
            "_surrogate_loss"
        ]

        def loss(log_prob, old_log_prob, advantages, mask):
            A, m = flat(advantages), mask.to(log_prob.dtype)
            return theirs(
                log_prob, old_log_prob, m, A, mode=mode, clip=0.2, max_logratio=10.0
            )

        return loss

    return wrap


laguna_gspo, laguna_grpo = laguna("gspo"), laguna("grpo")


def laguna_tool(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        lps = iter([row[m] for row, m in zip(log_prob, mask, strict=True)])
        me = Of(_cur_logp=lambda *_: next(lps), max_logratio=10.0, clip=0.2)
        old = [row[m] for row, m in zip(old_log_prob, mask, strict=True)]
        had = {
            "self": me,
            "turns_list": old,
            "old_logps": old,
            "adv": flat(advantages),
            "items": [0],
        }
        had |= dict.fromkeys(("image", "image_id", "question"))
        return code.lines(
            "src/laguna_rlvr/visual/vision_tool_gspo.py", 200, 206, **had
        ).loss

    return loss


def influence(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        A, lp, old, ref, m = (
            x[None]
            for x in (flat(advantages), log_prob, old_log_prob, ref_log_prob, mask)
        )
        had = {
            "per_token_logps": lp,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "response_mask": m,
        }
        had |= {"advantages": A, "epsilon": 0.2, "beta": 0.01}
        return code.lines(
            "influence_rlvr/gradients.py", 204, 227, **had
        ).policy_loss_vector[0]

    return loss


META = Of(
    use_importance_ratio=True,
    use_clipping=True,
    clip_epsilon_low=0.2,
    clip_epsilon_high=0.2,
    kl_coefficient=0.0,
    token_normalization="per_response",
)


def meta(code: Fetched):
    grpo = code.take(
        "src/meta_rlvr/losses.py", "grpo_policy_loss", GRPOLossOutput=Of
    ).grpo_policy_loss
    return lambda log_prob, old_log_prob, advantages, mask: (
        grpo(log_prob, old_log_prob, mask, advantages, META).loss
    )


def meta_tokens(code: Fetched):
    grpo = code.take(
        "src/meta_rlvr/losses.py", "token_grpo_policy_loss", GRPOLossOutput=Of
    ).token_grpo_policy_loss
    return lambda log_prob, old_log_prob, advantages, mask: (
        grpo(log_prob, old_log_prob, mask, advantages, META).loss
    )


def history(name, **settings):
    def wrap(code: Fetched):
        file, function = (
            f"src/history_of_rlvr/rl/algorithms/{name}/{name}.py",
            f"{name}_loss",
        )
        names = (
            (function,) if name in ("dr_grpo", "gspo") else ("_reduce_loss", function)
        )
        theirs = vars(code.take(file, *names))[function]

        def loss(log_prob, old_log_prob, advantages, mask):
            return theirs(log_prob, old_log_prob, flat(advantages), mask, **settings)[0]

        return loss

    return wrap


history_grpo, history_dapo, history_cispo, history_gspo = map(
    history, ("grpo", "dapo", "cispo", "gspo")
)
history_dr_grpo = history("dr_grpo", max_tokens=1)


# ---- grpo ----------------------------------------------------------------------------
RANGO = "src/tactic_gen/grpo.py"


def rango(function):
    def wrap(code: Fetched):
        theirs = vars(code.take(RANGO, "kl_unbiased", function))[function]

        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            return theirs(log_prob, old_log_prob, ref_log_prob, advantages, mask)[0]

        return loss

    return wrap


def per_row(one):
    """Where it takes one advantage per response."""

    def wrap(code: Fetched):
        theirs = one(code)

        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            return theirs(log_prob, old_log_prob, flat(advantages), mask, ref_log_prob)

        return loss

    return wrap


rango_grpo, rango_dapo = (
    per_row(rango("grpo_batch_loss")),
    per_row(rango("dapo_batch_loss")),
)
rango_steps = rango("grpo_batch_loss_perstep")


def rango_ppo(code: Fetched):
    ppo = code.take(RANGO, "ppo_batch_loss").ppo_batch_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        A = flat(advantages)
        return ppo(log_prob, old_log_prob, torch.zeros_like(A), A, mask)[0]

    return loss


def eblanca(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        B, T = mask.shape
        me = Of(
            delta=1.5, clip_epsilon=0.2, epsilon_high=0.3, use_kl=False, group_size=B
        )
        had = {
            "log_probs_target": log_prob,
            "old_log_probs_target": old_log_prob,
            "advantages": flat(advantages),
        }
        had |= {
            "self": me,
            "seq_len": T,
            "entropy_mask": None,
            "attention_mask": mask,
            "reference_logits": None,
        }
        return code.lines("src/grpo/algorithm.py", 189, 235, **had).loss

    return loss


# ---- agentic-rl ----------------------------------------------------------------------
YUYU = "scripts/grpo/grpo_update.py"


def yuyu(code: Fetched):
    def one(lp, A):
        had = {
            "logp": lp,
            "mshift": torch.ones_like(lp),
            "n_asst": len(lp),
            "advantage": A[0],
            "lata": False,
        }
        made = code.lines(YUYU, 264, 265, **had)
        return -made.sum_logp * A[0] / made.norm

    return lambda log_prob, old_log_prob, advantages, mask: rows(
        one, mask, log_prob, advantages
    )


def yuyu_batch(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "nll": -log_prob,
            "mshift": mask,
            "advs": flat(advantages),
            "lata": False,
            "device": "cpu",
        }
        return code.lines(YUYU, 300, 304, **had).loss

    return loss


def bird(code: Fetched):
    theirs = code.take(
        "mini_agent_lighting/algorithm/mini_grpo.py", "MiniGRPO.compute_grpo_loss"
    ).compute_grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        return theirs(Of(beta=0.1), log_prob, old_log_prob, flat(advantages))

    return loss


def liuls(code: Fetched):
    given = {
        "create_shifted_targets": lambda *_: None,
        "selected_logprobs": lambda logits, targets: logits,
    }
    theirs = code.take("rl/loss.py", "grpo_loss", GRPOLossOutput=Of, **given).grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        had = {
            "logits": log_prob,
            "tokens": None,
            "generator_logprobs": old_log_prob,
            "loss_mask": mask,
        }
        return theirs(**had, advantages=advantages).loss

    return loss


def listed(mask, *tensors):
    """The unmasked tokens of each response, as lists of tensors."""
    return [[row[m] for row, m in zip(x, mask, strict=True)] for x in tensors]


def kmno_cispo(code: Fetched):
    make = code.take("01-grpo/01-demo-sync.py", "make_cispo_loss_fn").make_cispo_loss_fn

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = listed(mask, log_prob, old_log_prob, advantages)
        return make([x.tolist() for x in old], [x.tolist() for x in A], 0.0, 4.0)(
            lp, lp
        )[0]

    return loss


def kmno(high, reduction):
    def wrap(code: Fetched):
        make = code.take(
            "06-dapo/train.py", "_tensor_values", "make_ppo_loss_fn"
        ).make_ppo_loss_fn

        def loss(log_prob, old_log_prob, advantages, mask):
            lp, old, A = listed(mask, log_prob, old_log_prob, advantages)
            fields = [
                {"logprobs": Of(data=x), "advantages": Of(data=a)}
                for x, a in zip(old, A, strict=True)
            ]
            every = [
                Of(
                    datum=Of(loss_fn_inputs=f),
                    completion_mask=[True] * len(x),
                    completion_tokens=len(x),
                )
                for f, x in zip(fields, old, strict=True)
            ]
            return make(every, Of(clip_low=0.8, clip_high=high, reduction=reduction))(
                every, lp
            )[0]

        return loss

    return wrap


kmno_grpo, kmno_dapo = kmno(1.2, "sample"), kmno(1.28, "token")


def kmno_gspo(code: Fetched):
    make = code.take("07-gspo/loss.py", "make_gspo_loss_fn").make_gspo_loss_fn

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old = listed(mask, log_prob, old_log_prob)
        metas = [
            Of(
                sampling_logprobs=x.tolist(),
                advantage=a.item(),
                completion_tokens=len(x),
            )
            for x, a in zip(old, flat(advantages), strict=True)
        ]
        return make(metas, Of(clip_ratio_low=3e-4, clip_ratio_high=4e-4))(lp, lp)[0]

    return loss


# ---- post-training -------------------------------------------------------------------
def uygarkurt(file, first, last, **settings):
    def wrap(code: Fetched):
        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            had = {
                "new_logprobs": log_prob,
                "old_logprobs": old_log_prob,
                "advantage": flat(advantages)[:, None],
            }
            had |= {"reference_logprobs": ref_log_prob, "rollout_masks": mask}
            return code.lines(file, first, last, **had, **settings).grpo_loss

        return loss

    return wrap


uygar_cuda = uygarkurt(
    "cuda_backend/grpo_train.py", 365, 381, args=Of(clip_eps=0.2, kl_coef=0.02)
)
uygar = uygarkurt(
    "tutorials/grpo_minimal_pytorch.py", 512, 528, CLIP_EPSILON=0.2, KL_COEFFICIENT=0.02
)


def summed(file, name):
    """A loss on the log-probability of whole responses."""

    def wrap(code: Fetched):
        theirs = vars(code.take(file, name))[name]
        total = lambda x, mask: torch.where(mask, x, 0).sum(-1)

        def loss(log_prob, old_log_prob, advantages, mask):
            return theirs(
                total(log_prob, mask), total(old_log_prob, mask), flat(advantages)
            )

        return loss

    return wrap


ars = summed("src/core/ppo/loss.py", "ppo_loss")
bobodict = summed("scripts/grpo_core.py", "clipped_grpo_loss")
