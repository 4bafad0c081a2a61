# SPDX-License-Identifier: Apache-2.0
"""What each loss of losses.toml needs before upref can call it: (the repository's folder) -> a loss. No line is theirs.

A function that stands alone is taken as it is, or with its own settings bound. One that asks for a model, or that
stands in the middle of a training loop, is run from the line where its log-probabilities are known.

A wrapper has the name that its loss has in losses.toml, where the repository, the file and the reason for the wrapper
are. Its two or three parts are always the same: what is taken from the code, the names that the lines read, the call.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Of

import torch

from docs.in_the_wild.fetched import Fetched

PAD = Of(pad_token_id=0)
CPU = Of(device="cpu")


def simple_grpo_names(logp, mask, **more):
    """The names that a step in the style of simple_GRPO has at hand once its log-probabilities are known."""
    names = {
        "inputs": mask.int(),
        "prompt_length": 0,
        "tokenizer": PAD,
        "engine": CPU,
        "per_token_logps": logp,
        "clip_param": 0.2,
        "beta": 0.04,
    }
    return names | more


def flat(advantages):
    """[B], as its training loop has them."""
    if advantages.ndim != 1:
        raise ValueError("one advantage per response")
    return advantages


def mean_of_rows(row_loss, mask, *tensors):
    """The mean over responses of row_loss(...) of their unmasked tokens."""
    total = 0
    for i, m in enumerate(mask):
        if m.any():
            total += row_loss(*(x[i][m] for x in tensors))
    return total / mask.any(1).sum()


# ---- grpo-from-scratch ---------------------------------------------------------------
def feld_ppo(code: Fetched):
    ppo_loss = code.take("src/losses.py", "ppo_loss").ppo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        return mean_of_rows(ppo_loss, mask, old_log_prob, log_prob, advantages)

    return loss


def feld_grpo(code: Fetched):
    grpo_loss = code.take(
        "src/losses.py", "compute_kl_divergence", "grpo_loss"
    ).grpo_loss

    def row_loss(*tensors):
        return grpo_loss(*tensors, epsilon=0.2, beta=0.01)[0]

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        tensors = old_log_prob, log_prob, ref_log_prob, advantages
        return mean_of_rows(row_loss, mask, *tensors)

    return loss


def nick(code: Fetched):
    file = "3_grpo/08_grpo_modular.py"
    cal_k1 = code.take(file, "cal_k1").cal_k1

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        names = {
            "new_logp": log_prob,
            "ref_logp": ref_log_prob,
            "old_seq_logp": (mask * old_log_prob).sum(-1),
            "advantages": advantages,
        }
        return code.lines(
            file,
            89,
            97,
            **names,
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
        names = {
            "per_token_logps": log_prob,
            "batch_old_per_token_log_probs": old_log_prob,
            "target_masks": mask,
            "batch_ref_per_token_log_probs": ref_log_prob,
            "batch_advantages": advantages,
        }
        config = {"training": {"eps_low": eps_low, "eps_high": eps_high, "beta": beta}}
        return code.lines(
            "src/models/grpo/grpo.py",
            464,
            489,
            **names,
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
        names = {
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
            **names,
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
        names = {policy: log_prob}
        first = code.lines(file, *ratio, **names, old_log_probs=old_log_prob)
        return code.lines(
            file,
            *loss,
            **names,
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
        names = simple_grpo_names(log_prob, mask, advantages=advantages, batch=batch)
        return code.lines("grpo_vllm_one.py", 159, 174, **names).loss

    return loss


def kalinplus_rf(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = simple_grpo_names(
            log_prob,
            mask,
            gen_per_token_logps=old_log_prob,
            per_token_advantage=advantages,
        )
        return code.lines(
            "simple-reinforce++/rf++_vllm_one.py",
            65,
            71,
            **names,
            num_items_in_batch=mask.sum(),
        ).loss

    return loss


def tcapelle(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = simple_grpo_names(
            log_prob, mask, advantages=advantages, gen_logps=old_log_prob, beta=0.0
        )
        return code.lines("grpo_vllm_dr.py", 155, 173, **names).loss

    return loss


def anglee_grpo(code: Fetched, kind="grpo"):
    """One loss_type of its training loop."""

    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        batch = {"refs": ref_log_prob, "gen_logps": old_log_prob}
        names = simple_grpo_names(
            log_prob,
            mask,
            advantages=advantages,
            batch=batch,
            loss_type=kind,
            compute_gen_logps=True,
        )
        return code.lines("grpo.py", 262, 292, **names).loss

    return loss


def anglee_gspo(code: Fetched):
    return anglee_grpo(code, "gspo")


def lsdefine(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        names = simple_grpo_names(
            log_prob, mask, advantages=advantages, batch={"refs": ref_log_prob}
        )
        return code.lines("regroup_ver/grpo_regroup.py", 169, 176, **names).loss

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
        names = {
            "mb_new_logprobs": log_prob,
            "mb_old_logprobs": old_log_prob,
            "mb_ref_logprob": ref_log_prob,
        }
        A = torch.cat([advantages[:, :1], advantages], 1)  # it drops the first
        return code.lines(
            "simple_grpo/simple_trainer.py",
            401,
            421,
            **names,
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
        names = {
            "log_probs": log_prob,
            "old_log_probs": old_log_prob,
            "advantages": advantages,
        }
        unaggregated = code.lines(
            "grpo/GRPO.py", 315, 323, **names, self=Of(config=config)
        ).unaggregated_objective
        with_kl = code.lines(
            "grpo/GRPO.py",
            333,
            336,
            log_probs=log_prob,
            ref_log_probs=ref_log_prob,
            unaggregated_objective=unaggregated,
            self=Of(config=config),
        )
        return code.lines(
            "grpo/GRPO.py",
            338,
            345,
            unaggregated_objective=with_kl.unaggregated_objective,
            reduce=reduce,
            batch_group_generation_mask=mask,
            self=Of(config=config),
        ).objective

    return loss


def anderson(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, beta=0.04):
        names = {
            "per_token_logps": log_prob,
            "ref_per_token_logps": ref_log_prob,
            "completion_mask": mask,
        }
        return code.lines(
            "main.py",
            312,
            317,
            **names,
            advantages=advantages,
            args=Of(kl_weight_beta=beta),
        ).loss

    return loss


def wangitu(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        batch = {"ref_logps": ref_log_prob, "gen_logps": old_log_prob}
        names = simple_grpo_names(
            log_prob,
            mask,
            advantages=advantages,
            batch=batch,
            args=Of(clip_param=0.2, beta=0.04),
        )
        return code.lines("train_grpo.py", 91, 101, **names).loss

    return loss


# ---- mini-grpo, nanogrpo -------------------------------------------------------------
def robotsail(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob, eps=0.1, beta=1.0):
        names = {
            "new_logprobs": log_prob,
            "old_logprobs": old_log_prob,
            "ref_logprobs": ref_log_prob,
        }
        comps = Of(hyperparams=Of(eps=eps, kl_penalty_strength=beta))
        return code.lines(
            "cli.py",
            546,
            577,
            **names,
            advantages=advantages,
            comps=comps,
            grpo_logit_mask=mask,
            rollout_lens=mask.sum(1),
        ).grpo_loss

    return loss


def tianyi(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        names = simple_grpo_names(
            log_prob, mask, advantages=advantages, ref_per_token_logps=ref_log_prob
        )
        return code.lines(
            "minigrpo.py", 296, 340, **names, batch={"gen_logps": old_log_prob}
        ).loss

    return loss


def asimkadav(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        names = {
            "logp_tokens": log_prob,
            "logp_ref": ref_log_prob.sum(-1),
            "adv": advantages,
        }
        return code.lines("grpo.py", 22, 24, **names, self=Of(kl_coef=0.02)).loss

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
        names = {"token_log_probs": log_prob, "completion_mask": mask}
        sums = code.lines("src/grpo_trainer.py", 257, 257, **names).sequence_log_probs
        return code.lines(
            "src/grpo_trainer.py", 279, 279, log_probs=sums, flat_advantages=advantages
        ).pg_loss

    return loss


def zhili(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "log_probs": log_prob,
            "batch_advantages": flat(advantages),
            "target_masks": mask,
        }
        return code.lines(
            "grpo.py", 282, 284, **names, num_target_tokens=mask.sum()
        ).loss

    return loss


# ---- rlhf-from-scratch ---------------------------------------------------------------
def manuhalapeth(code: Fetched):
    ppo = code.take("rlhf/ppo.py", "policy_ratio", "clipped_surrogate")

    def row_loss(new, old, A):
        return ppo.clipped_surrogate(ppo.policy_ratio(new, old), A, clip_eps=0.2)

    def loss(log_prob, old_log_prob, advantages, mask):
        return mean_of_rows(row_loss, mask, log_prob, old_log_prob, advantages)

    return loss


def zyl_ppo(code: Fetched):
    compute_loss = code.take(
        "instructgpt/ppo.py", "masked_mean", "compute_loss"
    ).compute_loss
    return partial(compute_loss, vpreds=torch.zeros(()), returns=torch.zeros(()))


def zyl_grpo(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "log_probs": log_prob,
            "batch_advantages": advantages,
            "target_masks": mask,
        }
        return code.lines(
            "grpo/grpo.py", 294, 297, **names, num_target_tokens=mask.sum()
        ).loss

    return loss


# ---- -gspo, -dapo --------------------------------------------------------------------
def linxinrong(code: Fetched, name, **hp):
    """The loss of the algorithm of this name, with these hyperparameters."""
    folder = "src/post_training_contrast/algorithms/"
    classes = code.take(folder + "base.py", "PolicyLossBatch", dataclass=dataclass)
    functions = (
        "validate_policy_loss_batch",
        "masked_mean",
        "compute_sequence_ratio",
        "compute_clip_fraction",
        "compute_reference_kl",
    )
    helpers = vars(code.take(folder + "base.py", *functions))
    helpers |= {"build_loss_output": lambda batch, loss, **more: loss}
    function = f"compute_{name}_loss"
    compute = vars(code.take(f"{folder}{name}.py", function, **helpers))[function]

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
    """The loss of its trainer, with its defaults for other settings."""
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
        names = {
            "new_probs": log_prob.exp(),
            "old_probs": old_log_prob.exp(),
            "adv": advantages,
        }
        masks = torch.cat([mask, mask[:, :1]], 1)  # it drops the last
        return code.lines(
            "script.py",
            283,
            293,
            **names,
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


def as_logits(logits, labels, args):
    """Log-probabilities where the function asks for logits and makes them itself."""
    return logits


def vegaction(code: Fetched):
    file = "nanorllm/trainer/loss.py"
    compute = code.take(
        file, "loss_agg", "compute_policy_loss", compute_token_logprobs=as_logits
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
    file = "nanorllm/trainer/loss.py"
    compute = code.take(
        file, "compute_policy_loss", compute_token_logprobs=as_logits
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
        names = {"token_log_probs": log_prob, "advantages": advantages, "mask": mask}
        return code.lines("nano_rl/actorcritic.py", 119, 120, **names).actor_loss

    return loss


# ---- r1-zero, nano-r1 ----------------------------------------------------------------
def torchtune(code: Fetched, name):
    """The module of this name in torchtune's losses."""
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
        names = {
            "per_token_logps": log_prob,
            "ref_per_token_logps": ref_log_prob,
            "completion_mask": mask,
        }
        return code.lines(
            "llama_r1_zero/grpo.py",
            129,
            133,
            **names,
            advantages=advantages,
            self=Of(beta=0.01),
        ).loss

    return loss


def bary(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "old_log_probs": old_log_prob,
            "new_log_probs": log_prob,
            "advantage": flat(advantages),
        }
        self = Of(epsilon=0.2, beta=0.01)
        loss = code.lines("nano_r1.py", 64, 66, **names, self=self).loss
        kl_div = code.lines("nano_r1.py", 68, 68, **names).kl_div
        return loss + self.beta * kl_div

    return loss


# ---- assignment5-alignment -----------------------------------------------------------
def ymzhang(code: Fetched):
    functions = (
        "compute_grpo_clip_loss",
        "compute_policy_gradient_loss",
        "masked_mean",
        "grpo_microbatch_train_step",
    )
    step = code.take("cs336_alignment/grpo.py", *functions).grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


def damek(code: Fetched):
    functions = (
        "assert_finite",
        "compute_grpo_clip_loss",
        "compute_policy_gradient_loss",
        "masked_mean",
        "grpo_microbatch_train_step",
    )
    step = code.take("cs336_alignment/grpo.py", *functions).grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


def gzsiceberg(code: Fetched, kind="grpo_clip"):
    """One loss_type of its training step."""

    def rearrange(x, how):
        return x[:, None]

    functions = (
        "compute_gspo_clip_loss",
        "compute_grpo_clip_loss",
        "compute_policy_gradient_loss",
        "grpo_microbatch_train_step",
    )
    means = vars(
        code.take("cs336_alignment/sft_helper.py", "masked_normalize", "masked_mean")
    )
    step = code.take(
        "cs336_alignment/grpo.py", *functions, **means, rearrange=rearrange
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
        result = compute.compute_policy_gradient_loss(
            advantages, log_prob, response_mask=mask
        )
        return compute.aggregate_loss_across_microbatch(
            result.per_token_policy_gradient_loss, mask
        )

    return loss


def guochen(code: Fetched):
    functions = (
        "run_compute_grpo_clip_loss",
        "run_compute_policy_gradient_loss",
        "run_masked_normalize",
        "run_grpo_microbatch_train_step",
    )
    step = code.take("tests/adapters.py", *functions).run_grpo_microbatch_train_step
    return partial(
        step,
        gradient_accumulation_steps=1,
        loss_type="grpo_clip",
        raw_rewards=None,
        cliprange=0.2,
    )


# ---- UP, and objectives of 2026 by their authors -------------------------------------
def between(code: Fetched, file: str, first: str, last: str, **names):
    """What the lines from the one with `first` to the next one with `last` make of these names."""
    text = (code.folder / file).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(text) if first in line)
    end = next(i for i, line in enumerate(text) if i > start and last in line)
    return code.lines(file, start + 1, end + 1, **names)


def up_trl(code: Fetched):
    trainer = Of(
        importance_sampling_level="token",
        beta=0.0,
        args=Of(delta=None, steps_per_generation=1),
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        off_policy_mask_threshold=None,
        model=Of(training=False),
        accelerator=Of(num_processes=1),
    )

    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "per_token_logps": log_prob,
            "old_per_token_logps": old_log_prob,
            "advantages": flat(advantages)[:, None],
            "mask": mask.int(),
            "self": trainer,
            "entropy_mask": None,
            "inputs": {"num_items_in_batch": mask.sum()},
        }
        return between(
            code,
            "trl/experimental/up/up_trainer.py",
            "log_ratio = per_token_logps - old",
            "loss = (per_token_loss * mask)",
            **names,
        ).loss

    return loss


def up_blog(code: Fetched):
    def masked_mean(x, mask):
        return (x * mask).sum() / (mask.sum() + 1e-8)

    def agg_loss(loss_mat, loss_mask, loss_agg_mode):
        return masked_mean(loss_mat, loss_mask)

    made = between(
        code,
        "_posts/2026-02-26-UP-GRPO.md",
        "def compute_policy_loss(",
        "return pg_loss, pg_clipfrac",
        agg_loss=agg_loss,
        verl_F=Of(masked_mean=masked_mean),
    )

    def loss(log_prob, old_log_prob, advantages, response_mask):
        return made.compute_policy_loss(
            old_log_prob, log_prob, advantages, response_mask.double(), cliprange=0.2
        )[0]

    return loss


def drpo(code: Fetched):
    drpo_loss = vars(code.take("unirl/algorithms/drpo.py", "_drpo_loss"))["_drpo_loss"]

    def loss(log_prob, old_log_prob, advantages, mask):
        packed = {
            "new_logp": log_prob[mask],
            "old_logp": old_log_prob[mask],
            "advantages": advantages[mask],
        }
        return drpo_loss(epsilon=12.5, **packed)[0].mean()

    return loss


WAPO = "verifiers/rl/trainer/trainer.py"


def wapo_repo(kind: str, share, **settings):
    """One loss_type of their trainer; share: what their orchestrator hands over as seq_loss_weights, by the mask."""

    def wrap(code: Fetched):
        trainer = Of(
            loss_type=kind,
            use_importance_sampling=True,
            clip_eps=0.2,
            mask_negative_advantages=kind == "wapo",
            mask_positive_advantages=False,
            token_bin_counting=False,
            normalize_by_kept_tokens=False,
        )
        vars(trainer).update(settings)

        def loss(log_prob, old_log_prob, advantages, mask):
            inputs = {
                "loss_mask": mask.int(),
                "entropies": None,
                "trainer_logprobs": log_prob,
                "advantages": flat(advantages)[:, None].expand(mask.shape),
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
            return code.lines(WAPO, first + 1, last, self=trainer, inputs=inputs).loss

        return loss

    return wrap


def one_over_responses(mask):
    """Each response has the same weight, and its tokens are summed."""
    return torch.ones(len(mask)) / len(mask)


def one_over_own_length(mask):
    """Each response has the same weight, and its tokens are averaged."""
    return 1 / (mask.sum(1) * len(mask))


def one_over_tokens(mask):
    """Each token has the same weight."""
    return (1 / mask.sum()).expand(len(mask))


def one_over_longest(mask):
    """Each token has the same weight; the sum is divided as if all responses were as long as the longest."""
    return (1 / (mask.sum(1).max() * len(mask))).expand(len(mask))


wapo = wapo_repo("wapo", one_over_responses, clip_eps=9.0)
wapo_grpo = wapo_repo("grpo", one_over_own_length)
wapo_gspo = wapo_repo("gspo", one_over_own_length, clip_eps=3e-4)
wapo_dr_dapo = wapo_repo(
    "dr_dapo", one_over_tokens, mask_ratio_low=0.8, mask_ratio_high=1.28
)
wapo_dr_grpo = wapo_repo("dr_grpo", one_over_longest)


# ---- rlvr ----------------------------------------------------------------------------
def laguna(mode):
    """One mode of its surrogate loss."""

    def wrap(code: Fetched):
        file, name = "src/laguna_rlvr/visual/gspo.py", "_surrogate_loss"
        surrogate_loss = vars(code.take(file, name))[name]

        def loss(log_prob, old_log_prob, advantages, mask):
            A, m = flat(advantages), mask.to(log_prob.dtype)
            return surrogate_loss(
                log_prob, old_log_prob, m, A, mode=mode, clip=0.2, max_logratio=10.0
            )

        return loss

    return wrap


laguna_gspo, laguna_grpo = laguna("gspo"), laguna("grpo")


def laguna_tool(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        lps, old = listed(mask, log_prob, old_log_prob)
        next_lp = iter(lps)
        trainer = Of(_cur_logp=lambda *_: next(next_lp), max_logratio=10.0, clip=0.2)
        names = {
            "self": trainer,
            "turns_list": old,
            "old_logps": old,
            "adv": flat(advantages),
            "items": [0],
            "image": None,
            "image_id": None,
            "question": None,
        }
        return code.lines(
            "src/laguna_rlvr/visual/vision_tool_gspo.py", 200, 206, **names
        ).loss

    return loss


def influence(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
        A, lp, old, ref, m = (
            x[None]
            for x in (flat(advantages), log_prob, old_log_prob, ref_log_prob, mask)
        )
        names = {
            "per_token_logps": lp,
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "response_mask": m,
            "advantages": A,
            "epsilon": 0.2,
            "beta": 0.01,
        }
        return code.lines(
            "influence_rlvr/gradients.py", 204, 227, **names
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
    """The loss of the algorithm of this name, with these settings."""

    def wrap(code: Fetched):
        file = f"src/history_of_rlvr/rl/algorithms/{name}/{name}.py"
        function_name = f"{name}_loss"
        helpers = () if name in ("dr_grpo", "gspo") else ("_reduce_loss",)
        function = vars(code.take(file, *helpers, function_name))[function_name]

        def loss(log_prob, old_log_prob, advantages, mask):
            A = flat(advantages)
            return function(log_prob, old_log_prob, A, mask, **settings)[0]

        return loss

    return wrap


history_grpo, history_dapo, history_cispo, history_gspo = map(
    history, ("grpo", "dapo", "cispo", "gspo")
)
history_dr_grpo = history("dr_grpo", max_tokens=1)


# ---- grpo ----------------------------------------------------------------------------
RANGO = "src/tactic_gen/grpo.py"


def rango(name):
    """The loss by the function of this name."""

    def wrap(code: Fetched):
        function = vars(code.take(RANGO, "kl_unbiased", name))[name]

        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            return function(log_prob, old_log_prob, ref_log_prob, advantages, mask)[0]

        return loss

    return wrap


def per_row(wrapper):
    """Where it takes one advantage per response."""

    def wrap(code: Fetched):
        wrapped = wrapper(code)

        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            return wrapped(log_prob, old_log_prob, flat(advantages), mask, ref_log_prob)

        return loss

    return wrap


rango_grpo = per_row(rango("grpo_batch_loss"))
rango_dapo = per_row(rango("dapo_batch_loss"))
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
        trainer = Of(
            delta=1.5, clip_epsilon=0.2, epsilon_high=0.3, use_kl=False, group_size=B
        )
        names = {
            "log_probs_target": log_prob,
            "old_log_probs_target": old_log_prob,
            "advantages": flat(advantages),
            "self": trainer,
            "seq_len": T,
            "entropy_mask": None,
            "attention_mask": mask,
            "reference_logits": None,
        }
        return code.lines("src/grpo/algorithm.py", 189, 235, **names).loss

    return loss


# ---- agentic-rl ----------------------------------------------------------------------
YUYU = "scripts/grpo/grpo_update.py"


def yuyu(code: Fetched):
    def row_loss(lp, A):
        names = {
            "logp": lp,
            "mshift": torch.ones_like(lp),
            "n_asst": len(lp),
            "advantage": A[0],
            "lata": False,
        }
        made = code.lines(YUYU, 264, 265, **names)
        return -made.sum_logp * A[0] / made.norm

    return lambda log_prob, old_log_prob, advantages, mask: mean_of_rows(
        row_loss, mask, log_prob, advantages
    )


def yuyu_batch(code: Fetched):
    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "nll": -log_prob,
            "mshift": mask,
            "advs": flat(advantages),
            "lata": False,
            "device": "cpu",
        }
        return code.lines(YUYU, 300, 304, **names).loss

    return loss


def bird(code: Fetched):
    compute = code.take(
        "mini_agent_lighting/algorithm/mini_grpo.py", "MiniGRPO.compute_grpo_loss"
    ).compute_grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        return compute(Of(beta=0.1), log_prob, old_log_prob, flat(advantages))

    return loss


def liuls(code: Fetched):
    helpers = {
        "create_shifted_targets": lambda *_: None,
        "selected_logprobs": lambda logits, targets: logits,
        "GRPOLossOutput": Of,
    }
    grpo_loss = code.take("rl/loss.py", "grpo_loss", **helpers).grpo_loss

    def loss(log_prob, old_log_prob, advantages, mask):
        names = {
            "logits": log_prob,
            "tokens": None,
            "generator_logprobs": old_log_prob,
            "loss_mask": mask,
        }
        return grpo_loss(**names, advantages=advantages).loss

    return loss


def listed(mask, *tensors):
    """The unmasked tokens of each response, as lists of tensors."""
    return [[row[m] for row, m in zip(x, mask, strict=True)] for x in tensors]


def kmno_cispo(code: Fetched):
    make = code.take("01-grpo/01-demo-sync.py", "make_cispo_loss_fn").make_cispo_loss_fn

    def loss(log_prob, old_log_prob, advantages, mask):
        lp, old, A = listed(mask, log_prob, old_log_prob, advantages)
        loss_fn = make([x.tolist() for x in old], [x.tolist() for x in A], 0.0, 4.0)
        return loss_fn(lp, lp)[0]

    return loss


def kmno(high, reduction):
    """Its PPO loss, with this upper bound of the ratio and this reduction."""

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
            responses = [
                Of(
                    datum=Of(loss_fn_inputs=f),
                    completion_mask=[True] * len(x),
                    completion_tokens=len(x),
                )
                for f, x in zip(fields, old, strict=True)
            ]
            config = Of(clip_low=0.8, clip_high=high, reduction=reduction)
            return make(responses, config)(responses, lp)[0]

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
    """The loss in these lines of a file, with these settings."""

    def wrap(code: Fetched):
        def loss(log_prob, old_log_prob, advantages, mask, ref_log_prob):
            names = {
                "new_logprobs": log_prob,
                "old_logprobs": old_log_prob,
                "advantage": flat(advantages)[:, None],
                "reference_logprobs": ref_log_prob,
                "rollout_masks": mask,
            }
            return code.lines(file, first, last, **names, **settings).grpo_loss

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
        function = vars(code.take(file, name))[name]

        def loss(log_prob, old_log_prob, advantages, mask):
            lp = torch.where(mask, log_prob, 0).sum(-1)
            old = torch.where(mask, old_log_prob, 0).sum(-1)
            return function(lp, old, flat(advantages))

        return loss

    return wrap


ars = summed("src/core/ppo/loss.py", "ppo_loss")
bobodict = summed("scripts/grpo_core.py", "clipped_grpo_loss")
