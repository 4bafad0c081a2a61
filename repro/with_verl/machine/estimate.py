# SPDX-License-Identifier: Apache-2.0
"""Memory, tokens, steps and GPU-hours of a run: arithmetic on the configuration, by formulas that say what they assume.

Memory of a GPU while it trains is the larger of

    forward and backward   weights and gradients + what is kept of each layer + one layer anew + logits
    the optimizer's step   weights, gradients and Adam's state, which comes back from the CPU for it

and 3 GB for CUDA and NCCL. FSDP spreads 16 bytes a parameter over all GPUs. Megatron holds 6 (bf16 weights, fp32
gradients) of the parameters that a GPU has - the experts' divided by pipeline and expert parallel sizes, the others' by
pipeline and tensor - and 12 more divided over the GPUs that hold the same. Without recomputation each layer keeps 34
bytes a token and hidden unit, and an expert layer what its experts take.

Time of a step: FLOPs of a token, 2 N + 4 layers hidden context, once to sample it, once for each log-probability, and
four times to train on it (backward is two, recomputation one), over GPUs times their peak times the share of it that is
reached: DECODE while sampling, TRAIN else. The share is what the runs are to correct: the report prints both.
"""

from dataclasses import dataclass

from omegaconf import DictConfig

from repro.with_verl.config.compose import Scale

GB = 1e9
PEAK = {  # bf16 without sparsity, by the makers' data sheets; the first that the name contains
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40": 181e12,
    "4090": 165e12, "3090": 71e12,
}  # fmt: skip
UNKNOWN = 312e12
DECODE, TRAIN = 0.06, 0.35
LENGTH = 0.5  # the mean response, of the longest allowed
REFILL = 1.5  # responses sampled for one that is trained on, where groups of one reward are left out
BETWEEN = 30.0  # seconds of a step: weights to vLLM, offloading, rewards
ASSUMES = (
    f"the scale's model, responses of {LENGTH:.0%} of the longest on average, {DECODE:.0%} of the GPUs' peak while "
    f"sampling and {TRAIN:.0%} while training, {REFILL} responses sampled for each kept by dynamic sampling; memory as "
    "machine/estimate.py says"
)


@dataclass
class Estimate:
    """Bytes per GPU, tokens and seconds per step, the whole run; `problem` is a sentence if it cannot fit."""

    train: float
    rollout: float
    kv_tokens: float
    step_tokens: int
    validation_tokens: int
    checkpoint: float
    gpus: int
    step_seconds: float
    steps: int | None
    validation_seconds: float
    validations: int
    problem: str = ""

    @property
    def gpu_hours(self) -> float:
        return ((self.steps or 0) * self.step_seconds + self.validations * self.validation_seconds) * self.gpus / 3600

    def __str__(self) -> str:
        hours = self.gpu_hours / self.gpus
        length = (
            f"{self.steps:,} steps, {hours:,.0f} hours, {self.gpu_hours:,.0f} GPU-hours" if self.steps else "no end set"
        )
        return (
            f"training {self.train / GB:.0f} GB a GPU, vLLM {self.rollout / GB:.0f} GB a GPU with room for "
            f"{self.kv_tokens:,.0f} cached tokens a replica; at most {self.step_tokens:,} rollout tokens a step and "
            f"{self.validation_tokens:,} a validation; {self.step_seconds:,.0f} s a step; {length}; "
            f"{self.checkpoint / GB:.0f} GB a checkpoint. Assumes: {ASSUMES}."
        )


def estimate(
    scale: Scale, cfg: DictConfig, gpu_bytes: float, val_rows: int, train_rows: int = 0, gpu: str = ""
) -> Estimate:
    """gpu_bytes: memory of one GPU; *_rows: prompts in the files; gpu: its name."""
    shape = scale.model["shape"]
    rollout, tp = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.rollout.tensor_model_parallel_size
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    peak = memory(shape, cfg, gpus)

    weights = shape["params"] * 2 / tp
    vllm = rollout.gpu_memory_utilization * gpu_bytes
    kv_token = 2 * shape["layers"] * shape["kv_heads"] * shape["head_dim"] * 2 / tp
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    kv_tokens = (vllm - weights - 2 * GB) / kv_token
    steps = cfg.trainer.total_training_steps
    if steps is None and train_rows:
        steps = train_rows // cfg.data.train_batch_size * cfg.trainer.total_epochs
    val_tokens = val_rows * rollout.val_kwargs.n * cfg.data.max_response_length
    checks = cfg.trainer.test_freq
    e = Estimate(
        train=peak, rollout=vllm, kv_tokens=max(kv_tokens, 0.0),
        step_tokens=cfg.data.train_batch_size * rollout.n * cfg.data.max_response_length,
        validation_tokens=val_tokens, checkpoint=shape["params"] * 12, gpus=gpus,
        step_seconds=seconds(shape, cfg, gpus, gpu), steps=steps,
        validation_seconds=val_tokens * LENGTH * flops(shape, cfg) / (gpus * peak_flops(gpu) * DECODE),
        validations=((steps or 0) // checks if checks > 0 else 0) + bool(cfg.trainer.val_before_train),
    )  # fmt: skip
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


def memory(shape: dict, cfg: DictConfig, gpus: int) -> float:
    """Bytes on a GPU while it trains, at their most."""
    actor = cfg.actor_rollout_ref.actor
    megatron = actor.get("megatron")
    tokens, hidden, layers = actor.ppo_max_token_len_per_gpu, shape["hidden"], shape["layers"]
    chosen = shape.get("experts_per_token", 0) * (2 * hidden + 3 * shape.get("expert_hidden", 0)) * 2
    anew = tokens * (34 * hidden + chosen)  # one layer, all that its backward needs
    if megatron:
        tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
        ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
        experts = shape.get("expert_params", 0.0)
        mine, theirs = (shape["params"] - experts) / (tp * pp), experts / (ep * etp * pp)
        state = 6 * (mine + theirs)
        moments = 12 * (mine * tp * pp / gpus + theirs * ep * etp * pp / gpus)
        override = megatron.get("override_transformer_config") or {}
        full = override.get("recompute_granularity") == "full"
        kept = (tokens * hidden * 2 if full else anew) * layers / (tp * pp)
        logits, anew = tokens * shape["vocab"] * (2 + 4) / tp, anew / tp
        offload = megatron.optimizer_offload
    else:
        state, moments = shape["params"] * 8 / gpus, shape["params"] * 8 / gpus
        checkpointing = cfg.actor_rollout_ref.model.enable_gradient_checkpointing
        kept = (tokens * hidden * 2 if checkpointing else anew) * layers
        logits, offload = tokens * shape["vocab"] * (2 + 4), actor.fsdp_config.optimizer_offload
    forward = state + kept + anew + logits + (0 if offload else moments)
    return max(forward, state + moments) + 3 * GB


def flops(shape: dict, cfg: DictConfig) -> float:
    """Of one token forward, at half the length of a mean sequence."""
    context = (cfg.data.max_prompt_length + LENGTH * cfg.data.max_response_length) / 2
    return 2 * shape.get("active_params", shape["params"]) + 4 * shape["layers"] * shape["hidden"] * context


def peak_flops(gpu: str) -> float:
    return next((peak for name, peak in PEAK.items() if name in gpu), UNKNOWN)


def seconds(shape: dict, cfg: DictConfig, gpus: int, gpu: str) -> float:
    """Of a step, without validation."""
    actor = cfg.actor_rollout_ref.actor
    tokens = cfg.data.train_batch_size * cfg.actor_rollout_ref.rollout.n * cfg.data.max_response_length * LENGTH
    sampled = tokens * (REFILL if cfg.algorithm.filter_groups and cfg.algorithm.filter_groups.enable else 1)
    passes = 4 * actor.ppo_epochs + 1 + bool(actor.use_kl_loss)
    work = sampled / DECODE + tokens * passes / TRAIN
    return work * flops(shape, cfg) / (gpus * peak_flops(gpu)) + BETWEEN
