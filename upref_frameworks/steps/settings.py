# SPDX-License-Identifier: Apache-2.0
"""What `upref step` tries: settings x model families, each with the gradient that is
meant.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from upref.step.inputs.families import FAMILIES


@dataclass(frozen=True)
class Setting:
    """One run of a trainer, and the objective whose gradient its step should be.

    Attributes:
        name: as the table prints it.
        family: of the model, a key of FAMILIES.
        fields: of the trainer's configuration.
        model: of the model's configuration.
        objective: the name of the one that is meant.
        hp: hyperparameters of the objective.
        goal: beta, entropy_coef, clip and scale, as of `check_step`.
        rows: `truncated`, `holes` or `prompts`: how the rows are made.
        step: number of the optimizer step that is compared, from 0; at 1, r is off 1.
        half: whether the trainer computes in bfloat16.
    """

    name: str
    family: str = "qwen3"
    fields: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    objective: str = "dapo"
    hp: dict[str, Any] = field(default_factory=dict)
    goal: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    step: int = 1
    half: bool = False


PPO = dict(eps_high=0.2)  # TRL's epsilon on both sides
# transformers has no sdpa for them
EAGER = ("gptj", "codegen", "bloom", "mpt", "mamba2", "recurrent_gemma")
LORA = dict(
    r=4,
    lora_alpha=8,
    target_modules="all-linear",
    lora_dropout=0.0,
    init_lora_weights=False,
)


def attention_of(family: str) -> str:
    """Return the attention of transformers that computes a model family in full.

    Args:
        family: a key of FAMILIES in upref/step/inputs/families.py.

    Returns:
        `eager` for families that have no other, and for Gemma 2, whose softcap sdpa
        leaves out; else `sdpa`.
    """
    return "eager" if family in (*EAGER, "gemma2") else "sdpa"


def make_ppo_setting(name: str, *more: Any, **given: Any) -> Setting:
    """Make a setting whose hyperparameters are PPO's, unless others are given.

    Args:
        name: as the table prints it.
        *more: the next fields of Setting, in their order.
        **given: fields of Setting; `hp` replaces PPO's as a whole.

    Returns:
        The setting.
    """
    return Setting(name, *more, **dict(hp=PPO) | given)


# One setting takes one or two lines.
# fmt: off
def trl() -> Iterator[Setting]:
    """Yield the settings of TRL's unmodified GRPOTrainer; fields are of GRPOConfig."""
    s = make_ppo_setting
    grpo = dict(objective="grpo", hp={})
    yield s("loss_type=dapo, epsilon_high=0.28", fields=dict(epsilon_high=0.28), hp={})
    yield s("loss_type=grpo", fields=dict(loss_type="grpo"), **grpo)
    yield s("loss_type=dr_grpo", fields=dict(loss_type="dr_grpo"), objective="dr_grpo", hp={}, goal=dict(scale=1 / 16))
    yield s("loss_type=bnpo", fields=dict(loss_type="bnpo"))
    yield s("loss_type=cispo, epsilon_high=2", fields=dict(loss_type="cispo", epsilon_high=2.0), objective="cispo",
            hp=dict(eps_high=1.0))
    yield s("loss_type=sapo", fields=dict(loss_type="sapo"), objective="sapo", hp={})
    yield s("loss_type=vespo", fields=dict(loss_type="vespo"), objective="vespo", hp={})
    sequence_fields = dict(learning_rate=2e-6, loss_type="grpo", importance_sampling_level="sequence")
    yield s("importance_sampling_level=sequence (GSPO)", fields=sequence_fields | dict(epsilon=3e-4, epsilon_high=4e-4),
            objective="gspo", hp={})
    yield s("loss_type=luspo, importance_sampling_level=sequence", objective="luspo", hp={},
            fields=sequence_fields | dict(loss_type="luspo", epsilon=2e-3, epsilon_high=2.5e-3))
    yield s("delta=2 (dual clip for A > 0 and A < 0)", fields=dict(delta=2.0), hp=PPO | dict(c=2.0))
    for key in ("group", "batch"):
        yield s(f"scale_rewards={key}", fields=dict(scale_rewards=key))
    for T in (1.0, 1.5):
        yield s(f"temperature={T:g}", fields=dict(temperature=T))
    yield s("beta=0.04", fields=dict(beta=0.04, loss_type="grpo"), **grpo, goal=dict(beta=0.04))
    yield s("beta=0.04, use_bias_correction_kl=True (default; the reference is unbiased_kl(grpo))",
            objective="unbiased_kl(grpo)", hp={}, goal=dict(beta=0.04),
            fields=dict(beta=0.04, loss_type="grpo", use_bias_correction_kl=True))
    yield s("beta=0.04, loss_type=dapo", fields=dict(beta=0.04), goal=dict(beta=0.04))
    yield s("entropy_coef=0.01", fields=dict(entropy_coef=0.01), goal=dict(entropy_coef=0.01))
    yield s("entropy_coef=0.01, one micro-batch", goal=dict(entropy_coef=0.01),
            fields=dict(entropy_coef=0.01, per_device_train_batch_size=4, gradient_accumulation_steps=1,
                        steps_per_generation=2))
    yield s("num_iterations=2", fields=dict(num_iterations=2), step=3)
    yield s("one optimizer step a generation batch", fields=dict(gradient_accumulation_steps=4), step=0)
    yield s("four micro-batches of one response", fields=dict(per_device_train_batch_size=1,
            gradient_accumulation_steps=4, steps_per_generation=8))
    yield s("the same, loss_type=grpo", **grpo, fields=dict(per_device_train_batch_size=1, loss_type="grpo",
            gradient_accumulation_steps=4, steps_per_generation=8))
    yield s("no holes in the masks", rows=dict(holes=False))
    yield s("truncated completions", rows=dict(truncated=True))
    yield s("mask_truncated_completions", fields=dict(mask_truncated_completions=True), rows=dict(truncated=True))
    yield s("mask_truncated_completions, loss_type=grpo", rows=dict(truncated=True), **grpo,
            fields=dict(mask_truncated_completions=True, loss_type="grpo"))
    yield s("pad_to_multiple_of=8", fields=dict(pad_to_multiple_of=8))
    yield s("gradient_checkpointing", fields=dict(gradient_checkpointing=True))
    yield s("max_grad_norm=0.5", fields=dict(max_grad_norm=0.5), goal=dict(clip=0.5))
    yield s("cast_lm_head_to_fp32", fields=dict(cast_lm_head_to_fp32=True))
    yield s("bf16", fields=dict(bf16=True), half=True)
    yield s("eager attention", model=dict(attn_implementation="eager"))
    yield s("LoRA", fields=dict(peft_config=LORA))
    yield s("LoRA, gradient_checkpointing", fields=dict(peft_config=LORA, gradient_checkpointing=True))
    for family in FAMILIES:
        yield s("loss_type=dapo", family)
    for family in ("gemma2", "gemma3"):
        yield s("eager attention", family, model=dict(attn_implementation="eager"))
    for family in ("opt", "falcon_h1"):
        yield s("gradient_checkpointing", family, fields=dict(gradient_checkpointing=True))
    yield s("without a logit softcap", "recurrent_gemma", model=dict(logits_soft_cap=1e9))
    yield s("prompts of one length", "recurrent_gemma", rows=dict(prompts=4))
    yield s("prompts of one length", "gpt2", rows=dict(prompts=4))
    yield s("prompts of one length, without a logit softcap", "recurrent_gemma", rows=dict(prompts=4),
            model=dict(logits_soft_cap=1e9))


def verl() -> Iterator[Setting]:
    """Yield the settings of verl's unmodified TrainingWorker: FSDP2 over gloo.

    Fields are grouped by the configuration that they are of.
    """

    Fields = dict[str, Any] | None

    def s(name: str, family: str = "qwen3", actor: Fields = None, engine: Fields = None, model_config: Fields = None,
          more: Fields = None, **k: Any) -> Setting:
        """Make a setting of verl with PPO's hyperparameters, unless others are given;
        the fields of `more` are of none of its three configurations.
        """
        fields = dict(actor=actor or {}, engine=engine or {}, model_config=model_config or {}) | (more or {})
        return Setting(name, family, fields, **dict(hp=PPO) | k)

    packed = dict(use_remove_padding=True)
    fused = dict(use_fused_kernels=True)
    torch_fused = fused | dict(fused_kernel_options=dict(impl_backend="torch"))
    for agg, objective in {"seq-mean-token-mean": "grpo", "seq-mean-token-sum": "dr_grpo"}.items():
        yield s(f"loss_agg_mode={agg}", actor=dict(loss_agg_mode=agg), objective=objective, hp={})
    yield s("loss_agg_mode=seq-mean-token-sum-norm, loss_scale_factor=16", objective="dr_grpo", hp={},
            actor=dict(loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=16), goal=dict(scale=1 / 16))
    yield s("clip_ratio_high=0.28", actor=dict(clip_ratio_high=0.28), hp={})
    yield s("clip_ratio_c=3 (default)", actor=dict(clip_ratio_c=3.0), hp=PPO | dict(c=3.0))
    gspo = dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4, policy_loss=dict(loss_mode="gspo"))
    yield s("loss_mode=gspo", actor=gspo | dict(loss_agg_mode="seq-mean-token-mean"), objective="gspo", hp={})
    yield s("loss_mode=sapo", objective="sapo", hp={},
            actor=dict(policy_loss=dict(loss_mode="sapo"), loss_agg_mode="seq-mean-token-mean"))
    yield s("use_kl_loss, kl_loss_type=k3", actor=dict(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="k3"),
            goal=dict(beta=0.04))
    yield s("use_kl_loss, kl_loss_type=low_var_kl (default)", goal=dict(beta=0.04),
            actor=dict(use_kl_loss=True, kl_loss_coef=0.04, kl_loss_type="low_var_kl"))
    yield s("entropy_coeff=0.01", actor=dict(entropy_coeff=0.01), goal=dict(entropy_coef=0.01))
    for size in (1, 2, 8):
        yield s(f"micro_batch_size_per_gpu={size}", engine=dict(micro_batch_size_per_gpu=size))
    yield s("use_dynamic_bsz", engine=dict(use_dynamic_bsz=True, max_token_len_per_gpu=40))
    yield s("use_remove_padding, eager attention", model_config=packed, more=dict(attention="eager"))
    yield s("use_remove_padding, use_dynamic_bsz", model_config=packed,
            engine=dict(use_dynamic_bsz=True, max_token_len_per_gpu=40))
    yield s("use_remove_padding, pad_to_length", model_config=packed, engine=dict(pad_to_length=True,
            pad_to_length_bucket=64))
    yield s("use_remove_padding, entropy_coeff=0.01", model_config=packed, actor=dict(entropy_coeff=0.01),
            goal=dict(entropy_coef=0.01))
    yield s("entropy_from_logits_with_chunking", engine=dict(entropy_from_logits_with_chunking=True,
            entropy_from_logits_chunk_size=8), actor=dict(entropy_coeff=0.01), goal=dict(entropy_coef=0.01))
    yield s("entropy_checkpointing", engine=dict(entropy_checkpointing=True), actor=dict(entropy_coeff=0.01),
            goal=dict(entropy_coef=0.01))
    yield s("enable_gradient_checkpointing", model_config=dict(enable_gradient_checkpointing=True))
    yield s("clip_grad=0.5", more=dict(clip=0.5), goal=dict(clip=0.5))
    yield s("eager attention", more=dict(attention="eager"))
    yield s("use_fused_kernels (torch)", model_config=torch_fused | packed)
    yield s("use_fused_kernels (torch)", "qwen3_tied", model_config=torch_fused | packed)
    yield s("use_fused_kernels (torch), with padding", "qwen3_tied", model_config=torch_fused)
    yield s("lora_rank=4", model_config=dict(lora_rank=4, lora_alpha=8))
    yield s("mixed_precision: bf16 (default)", engine=dict(mixed_precision=None), half=True)
    for T in (1.0, 1.5):
        yield s(f"temperature={T:g}", more=dict(temperature=T))
    two = dict(ranks=2)  # 27 and 16 tokens train
    yield s("two ranks", more=two)
    yield s("two ranks, seq-mean-token-mean, use_kl_loss, entropy_coeff=0.01, clip_grad=0.5", objective="grpo", hp={},
            more=two | dict(clip=0.5), goal=dict(beta=0.04, entropy_coef=0.01, clip=0.5), actor=dict(use_kl_loss=True,
            loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.04, kl_loss_type="k3", entropy_coeff=0.01))
    yield s("two ranks, use_remove_padding, use_dynamic_bsz", more=two, model_config=packed,
            engine=dict(use_dynamic_bsz=True, max_token_len_per_gpu=40))
    for family in FAMILIES:
        how = dict(attention="eager") if family in EAGER else {}
        yield s("loss_agg_mode=token-mean" + (", eager attention" if how else ""), family, more=how)
    for family in (f for f in FAMILIES if f not in EAGER):
        yield s("use_remove_padding", family, model_config=packed)
    # FSDP2 shards a head of its own
    for family in ("gemma", "gemma2", "gemma3", "granite", "cohere", "falcon_h1"):
        yield s("use_fused_kernels (torch), tied heads, with padding", family, model_config=torch_fused,
                model=dict(tie_word_embeddings=True), more=dict(attention="eager"))
    yield s("eager attention", "gemma2", more=dict(attention="eager"))


def openrlhf() -> Iterator[Setting]:
    """Yield the settings of OpenRLHF's unmodified ActorPPOTrainer.

    Fields are those of upref_frameworks/openrlhf/step.py.
    """
    s = make_ppo_setting
    eager = dict(attention="eager")
    mean = dict(loss_agg_mode="seq-mean-token-mean")
    yield s("loss_agg_mode=seq-mean-token-mean", fields=mean, objective="grpo", hp={})
    yield s("eps_clip_low_high=0.2 0.28", fields=dict(eps_clip_low_high=(0.2, 0.28)), hp={})
    yield s("dual_clip=3", fields=dict(dual_clip=3.0), hp=PPO | dict(c=3.0))
    yield s("policy_loss_type=gspo, seq-mean-token-mean", objective="gspo", hp={}, fields=mean | dict(
        policy_loss_type="gspo", eps_clip_low_high=(3e-4, 4e-4)))
    yield s("kl.use_loss, kl.estimator=k3", fields=dict(beta=0.04), goal=dict(beta=0.04))
    yield s("kl.use_loss, seq-mean-token-mean", objective="grpo", hp={}, goal=dict(beta=0.04),
            fields=mean | dict(beta=0.04))
    yield s("entropy_coef=0.01", fields=dict(entropy_coef=0.01), goal=dict(entropy_coef=0.01))
    yield s("entropy_coef=0.01, seq-mean-token-mean", objective="grpo", hp={}, goal=dict(entropy_coef=0.01),
            fields=mean | dict(entropy_coef=0.01))
    for size in (1, 4, 8):
        yield s(f"micro_batch_size={size}", fields=dict(micro=size))
    yield s("dynamic_batch_enable", fields=dict(max_tokens=40))
    yield s("dynamic_batch_enable, seq-mean-token-mean", objective="grpo", hp={},
            fields=mean | dict(max_tokens=40))
    yield s("max_norm=0.5", fields=dict(clip=0.5), goal=dict(clip=0.5))
    for T in (1.0, 1.5):
        yield s(f"temperature={T:g}", fields=dict(temperature=T))
    yield s("eager attention", fields=eager)
    for family in FAMILIES:
        if attention_of(family) == "eager":
            yield s("loss_agg_mode=token-mean, eager attention", family, fields=eager)
        else:
            yield s("loss_agg_mode=token-mean", family)


TRAINERS = {"trl": trl, "verl": verl, "openrlhf": openrlhf}
