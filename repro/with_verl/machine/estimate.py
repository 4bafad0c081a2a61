# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory and how many tokens a run needs: arithmetic on the configuration, with what it assumes."""

from dataclasses import dataclass

from omegaconf import DictConfig

from repro.with_verl.config.compose import Scale

GB = 1e9
ASSUMES = (
    "the scale's model; fp32 weights, gradients and Adam's two moments (16 bytes a parameter) spread over all GPUs; "
    "bf16 activations kept once a layer (gradient checkpointing); bf16 logits and fp32 softmax; vLLM asleep while "
    "training and bf16 in it; 3 GB for CUDA and NCCL; all responses of full length"
)


@dataclass
class Estimate:
    """Bytes per GPU and tokens per step; `problem` is a sentence if it cannot fit."""

    train: float
    rollout: float
    kv_tokens: float
    step_tokens: int
    validation_tokens: int
    checkpoint: float
    problem: str = ""

    def __str__(self) -> str:
        return (
            f"training {self.train / GB:.0f} GB a GPU, vLLM {self.rollout / GB:.0f} GB a GPU with room for "
            f"{self.kv_tokens:,.0f} cached tokens a replica; at most {self.step_tokens:,} rollout tokens a step and "
            f"{self.validation_tokens:,} a validation; {self.checkpoint / GB:.0f} GB a checkpoint. Assumes: {ASSUMES}."
        )


def estimate(scale: Scale, cfg: DictConfig, gpu_bytes: float, val_rows: int) -> Estimate:
    """gpu_bytes: memory of one GPU; val_rows: prompts in the validation files."""
    shape = scale.model["shape"]
    actor, rollout = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.rollout
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    tp = rollout.tensor_model_parallel_size
    megatron = actor.get("megatron")
    split = megatron.tensor_model_parallel_size if megatron else actor.get("ulysses_sequence_parallel_size", 1)

    tokens = actor.ppo_max_token_len_per_gpu / (split if megatron else 1)
    activations = tokens * shape["layers"] * shape["hidden"] * 2 + tokens * shape["vocab"] * (2 + 4)
    offload = (megatron or actor.fsdp_config).optimizer_offload
    state = shape["params"] * (8 if offload else 16) / gpus  # offloaded moments come back for the optimizer's step
    peak = max(state + activations, shape["params"] * 16 / gpus) + 3 * GB

    weights = shape["params"] * 2 / tp
    vllm = rollout.gpu_memory_utilization * gpu_bytes
    kv_token = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * 2 / tp
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    kv_tokens = (vllm - weights - 2 * GB) / kv_token
    e = Estimate(
        peak,
        vllm,
        max(kv_tokens, 0.0),
        cfg.data.train_batch_size * rollout.n * cfg.data.max_response_length,
        val_rows * rollout.val_kwargs.n * cfg.data.max_response_length,
        shape["params"] * 12,
    )
    if peak > gpu_bytes:
        e.problem = (
            f"training needs about {peak / GB:.0f} GB on each GPU, which has {gpu_bytes / GB:.0f}: take more GPUs "
            "(trainer.nnodes), or set actor_rollout_ref.actor.ppo_max_token_len_per_gpu lower."
        )
    elif kv_tokens < longest:
        e.problem = (
            f"vLLM gets {vllm / GB:.0f} GB of each GPU, too little for the weights and one sequence of {longest} "
            "tokens: raise actor_rollout_ref.rollout.gpu_memory_utilization or tensor_model_parallel_size."
        )
    return e
