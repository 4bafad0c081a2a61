# SPDX-License-Identifier: Apache-2.0
"""Memory, time, GPU-hours and dollars of a run, by arithmetic on its configuration and
the model's config.json.

Time of a step:

    sampling           each decoding step reads the weights and the cache of all running responses; it takes the longer
                       of that (at READ of the bandwidth) and its FLOPs, plus LATENCY.
                       As many responses run as the cache holds; the last of them end
                       one after another, down to the longest response
    log-probabilities  one forward pass for the old policy and one for the reference
    training           three forward passes' FLOPs, four with recomputation, for each epoch
    weights            to vLLM, and what is offloaded to the CPU and back
    other              rewards, data, checks; without flash-attn also verl's Python loop over tokens

Lengths follow (1 - x / longest)^a, whose mean is LENGTH of the longest unless the
caller says more. The shares of the peak were set once, from published runs
(ESTIMATES.md has them side by side).

Memory of a GPU while it trains is the larger of forward-and-backward (weights,
gradients, activations, logits, the bf16 copies of two layers and of the head) and the
optimizer's step; FSDP spreads 16 bytes a parameter over all GPUs, Megatron holds 6 of
what its parallelism gives a GPU and 12 over the replicas. While sampling it is vLLM's
share and what is not offloaded. vLLM gives its share back while the GPU trains, unless
the run says otherwise (free_cache_engine, enable_sleep_mode). Not counted: the scores
of sdpa's math kernel, heads x tokens^2, which torch takes where no other kernel fits.
"""

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from repro.with_verl.config.model import Shape, shape_of

GB = 1e9
READ = 0.7  # of the memory bandwidth, while decoding
# of the peak FLOPs: decoding and prefill, training, log-probabilities
DECODE, TRAIN, FORWARD = 0.3, 0.35, 0.22
EXPERTS = 0.4  # of all these, for a mixture of experts
# seconds of a decoding step: launch and scheduling, and one exchange of a layer between
# GPUs
LATENCY = 6e-3, 5e-5
LENGTH = 0.5  # the mean response, of the longest allowed
PROMPT = 200  # tokens, the mean; no more than half of the longest allowed
# responses sampled for one that is trained on, where groups of one reward are left out
REFILL = 1.5
# bytes a second: between GPUs or to the host; of one machine to shared storage
LINK, DISK = 10 * GB, 1 * GB
BETWEEN = 15.0  # seconds of a step for rewards, data and bookkeeping
# seconds a token for verl's log_softmax in a Python loop, forward and backward, without
# flash-attn
LOOP = 1.5e-4
CONTEXT = 3 * GB  # CUDA, NCCL


@dataclass(frozen=True)
class GPU:
    """One row of gpus.toml.

    Attributes:
        name: a part of the name by which the driver calls it.
        tflops: dense bf16, in 1e12 a second.
        bandwidth: of its memory, in 1e12 bytes a second.
        memory: in GB.
        dollars: an hour.
    """

    name: str
    tflops: float
    bandwidth: float
    memory: float
    dollars: float


@cache
def gpus() -> dict[str, GPU]:
    """Return the rows of gpus.toml by name."""
    raw = tomllib.loads(
        Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8")
    )
    return {name: GPU(name, **row) for name, row in raw.items()}


def gpu_of(name: str) -> GPU:
    """Return the row whose name the GPU's own contains; an unknown one counts as an
    A100, and its name says so.
    """
    found = next((g for key, g in gpus().items() if key in name), None)
    return found or replace(
        gpus()["A100"], name=f"{name or 'GPU'} (not in gpus.toml, priced as an A100)"
    )


@dataclass
class Estimate:
    """Bytes of a GPU, seconds of a step by part, the whole run; `problem` is a sentence
    if it cannot fit.
    """

    gpu: GPU
    gpus: int
    train: float  # bytes of a GPU while it trains
    vllm: float  # bytes of vLLM
    resident: float  # bytes that stay beside vLLM
    kv_tokens: float  # that one vLLM replica can cache
    step_tokens: int  # of responses, at most
    checkpoint: float
    parts: dict[str, float]
    steps: int | None
    validation_seconds: float
    validations: int
    checkpoint_seconds: float
    saves: int
    problem: str = ""
    assumes: dict[str, float] = field(default_factory=dict)

    @property
    def rollout(self) -> float:
        return self.vllm + self.resident

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def hours(self) -> float:
        """Return the wall-clock hours of all steps, validations and checkpoints."""
        rest = (
            self.validations * self.validation_seconds
            + self.saves * self.checkpoint_seconds
        )
        return ((self.steps or 0) * self.step_seconds + rest) / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.gpus

    @property
    def dollars(self) -> float:
        return self.gpu_hours * self.gpu.dollars

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name, sizes in GB and times in seconds. A run keeps them,
        and its report compares those of time and memory with what happened.
        """
        return {
            "train_gb": self.train / GB,
            "rollout_gb": self.rollout / GB,
            "step_tokens": self.step_tokens,
            "step_seconds": self.step_seconds,
            "parts": self.parts,
            "validation_seconds": self.validation_seconds,
            "steps": self.steps,
            "gpu_hours": self.gpu_hours,
            "gpus": self.gpus,
            "dollars": self.dollars,
        }

    def __str__(self) -> str:
        """Return time, price and memory of the run, and what they assume, in words."""
        parts = ", ".join(
            f"{name} {seconds:,.0f}" for name, seconds in self.parts.items()
        )
        end = "the run has no end"
        if self.steps:
            end = (
                f"{self.steps:,} steps and {self.validations} validations of {self.validation_seconds:,.0f} s: "
                f"{self.hours:,.0f} hours, {self.gpu_hours:,.0f} GPU-hours, {self.dollars:,.0f} dollars at "
                f"{self.gpu.dollars:.2f} an hour (machine/gpus.toml)"
            )
        return (
            f"{self.gpus} x {self.gpu.name}, {self.step_seconds:,.0f} s a step ({parts}); {end}. Memory of a GPU: "
            f"{self.train / GB:.0f} GB to train, {self.rollout / GB:.0f} GB to sample (vLLM {self.vllm / GB:.0f}, room "
            f"for {self.kv_tokens:,.0f} cached tokens a replica); {self.checkpoint / GB:.0f} GB a checkpoint. Assumes "
            f"responses of {self.assumes['length']:,.0f} tokens on average. This project has measured no run of verl on "
            "a GPU; published runs lie within a factor of 1.8 of these formulas (ESTIMATES.md)."
        )


def estimate(
    cfg: DictConfig,
    gpu: GPU,
    gpu_bytes: float,
    val_rows: int,
    train_rows: int = 0,
    length: float | None = None,
) -> Estimate:
    """Estimate the memory, the time and the price of a run.

    Args:
        cfg: the configuration of the run.
        gpu: speed and price of each GPU.
        gpu_bytes: memory of each GPU.
        val_rows: prompts of the validation files.
        train_rows: prompts of the training files; 0: not known.
        length: tokens of a mean response; None: LENGTH of the longest.

    Returns:
        The estimate. Its `problem` is a sentence if the run cannot fit, or if the data
        ends before the steps do.
    """
    shape = shape_of(cfg.actor_rollout_ref.model.path)
    rollout = cfg.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    n_gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    longest = cfg.data.max_response_length
    mean = length or LENGTH * longest
    prompt = min(PROMPT, cfg.data.max_prompt_length / 2)

    vllm = rollout.gpu_memory_utilization * gpu_bytes
    # bytes of a token's keys and values, 2 each
    kv_token = 4 * shape.layers * shape.kv_heads * shape.head_dim / tp
    kv_tokens = (vllm - shape.params * 2 / tp - 2 * GB) / kv_token
    train, resident = memory(shape, cfg, n_gpus)
    sleeps = rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)
    keeps = 0.0 if sleeps else vllm  # bytes of vLLM while the GPU trains

    responses = cfg.data.train_batch_size * rollout.n
    filters = cfg.algorithm.filter_groups and cfg.algorithm.filter_groups.enable
    refill = REFILL if filters else 1
    # the cache of a running response holds its prompt and, on average, 0.7 of the mean
    # response
    at_once = max(1.0, min(rollout.max_num_seqs, kv_tokens / (prompt + 0.7 * mean)))
    replicas = n_gpus // tp

    def sample(count: float) -> float:
        """Return the seconds in which so many responses are sampled."""
        return sampling(shape, gpu, tp, count, replicas, at_once, prompt, mean, longest)

    parts = {
        "sampling": sample(responses * refill),
        **_training_seconds(cfg, shape, gpu, n_gpus, responses, prompt, mean),
    }
    steps = cfg.trainer.total_training_steps
    if steps is None and train_rows:
        steps = train_rows // cfg.data.train_batch_size * cfg.trainer.total_epochs
    answers = val_rows * rollout.val_kwargs.n
    checks = cfg.trainer.test_freq  # steps between validations
    saves = cfg.trainer.save_freq  # steps between checkpoints
    checkpoint = shape.params * 12  # float32 weights and Adam's two moments
    validations = (steps or 0) // checks if checks > 0 else 0
    e = Estimate(
        gpu=gpu,
        gpus=n_gpus,
        train=train + keeps,
        vllm=vllm,
        resident=resident,
        kv_tokens=max(kv_tokens, 0.0),
        step_tokens=responses * longest,
        checkpoint=checkpoint,
        parts=parts,
        steps=steps,
        validation_seconds=sample(answers) if answers else 0.0,
        validations=validations + bool(cfg.trainer.val_before_train),
        checkpoint_seconds=checkpoint / DISK / cfg.trainer.nnodes,
        saves=(steps or 0) // saves if saves > 0 else 0,
        assumes={"length": mean, "prompt": prompt},
    )
    e.problem = problem(e, gpu_bytes, cfg.data.max_prompt_length + longest, keeps)
    passes = train_rows // cfg.data.train_batch_size * cfg.trainer.total_epochs
    if train_rows and steps and passes < steps and not e.problem:
        e.problem = (
            f"trainer.total_epochs={cfg.trainer.total_epochs} of {train_rows:,} prompts ends the run after {passes} of "
            f"its {steps} steps: set trainer.total_training_steps={passes}, or more epochs."
        )
    return e


def _training_seconds(
    cfg: DictConfig,
    shape: Shape,
    gpu: GPU,
    n_gpus: int,
    responses: float,
    prompt: float,
    mean: float,
) -> dict[str, float]:
    """Return the seconds of a step's parts that follow the sampling, by the part's
    name.

    Args:
        cfg: the configuration of the run.
        shape: of the model.
        gpu: speed of each GPU.
        n_gpus: how many there are.
        responses: of the step.
        prompt: tokens of a mean prompt.
        mean: tokens of a mean response.
    """
    actor = cfg.actor_rollout_ref.actor
    tokens = responses * (prompt + mean)
    recompute = (
        actor.get("megatron") is not None
        or cfg.actor_rollout_ref.model.enable_gradient_checkpointing
    )
    forwards = 1 + bool(actor.use_kl_loss)  # old policy, reference policy
    offloaded_bytes = 4 * offloads(cfg, "param") + 8 * offloads(cfg, "optimizer")
    offloaded = shape.params * offloaded_bytes / n_gpus
    loop = 0.0 if flash(cfg) else LOOP * tokens / n_gpus * (1 + forwards) / 2
    update = updating(
        shape,
        gpu,
        n_gpus,
        responses,
        prompt,
        mean,
        cfg.data.max_response_length,
        forwards,
        (3 + recompute) * actor.ppo_epochs,
    )
    weights = (2 * shape.params + 2 * offloaded) / LINK
    return update | {"weights": weights, "other": BETWEEN + loop}


def problem(e: Estimate, gpu_bytes: float, sequence: int, keeps: float) -> str:
    """Return a sentence that says why a run cannot fit its GPUs; "" if it can.

    Args:
        e: the estimate.
        gpu_bytes: memory of each GPU.
        sequence: tokens of the longest prompt and response.
        keeps: bytes of vLLM that stay on a GPU while it trains.
    """
    if keeps and e.train > gpu_bytes:
        return (
            f"vLLM keeps its {keeps / GB:.0f} GB of each GPU while it trains, which needs about "
            f"{(e.train - keeps) / GB:.0f} GB more, of {gpu_bytes / GB:.0f}: leave "
            "actor_rollout_ref.rollout.free_cache_engine and enable_sleep_mode true."
        )
    if e.train > gpu_bytes:
        return (
            f"training needs about {e.train / GB:.0f} GB on each GPU, which has {gpu_bytes / GB:.0f}: take more GPUs "
            "(trainer.nnodes), or set actor_rollout_ref.actor.ppo_max_token_len_per_gpu lower."
        )
    if e.kv_tokens < sequence:
        return (
            f"vLLM gets {e.vllm / GB:.0f} GB of each GPU, too little for the weights and one sequence of {sequence} "
            "tokens: raise actor_rollout_ref.rollout.gpu_memory_utilization or tensor_model_parallel_size."
        )
    if e.rollout > gpu_bytes:
        return (
            f"vLLM takes {e.vllm / GB:.0f} GB of each GPU and {e.resident / GB:.0f} GB stay beside it, of "
            f"{gpu_bytes / GB:.0f}: lower actor_rollout_ref.rollout.gpu_memory_utilization, or set "
            "actor_rollout_ref.actor.fsdp_config.param_offload and optimizer_offload to true."
        )
    return ""


def updating(
    shape: Shape,
    gpu: GPU,
    gpus: int,
    responses: float,
    prompt: float,
    mean: float,
    longest: int,
    forwards: float,
    passes: float,
) -> dict[str, float]:
    """Return the seconds of log-probabilities and of training, by these two names.

    Args:
        shape: of the model.
        gpu: speed of each GPU.
        gpus: how many.
        responses: of a step.
        prompt: tokens of a mean prompt.
        mean: tokens of a mean response.
        longest: tokens of a response, at most.
        forwards: forward passes for log-probabilities.
        passes: training, as a number of forward passes with the same operations.
    """
    context = prompt + longest / (1 + longest / mean)  # attended by a mean token
    per_token = (
        2 * shape.active + 4 * shape.layers * shape.heads * shape.head_dim * context
    )
    work = responses * (prompt + mean) * per_token
    pace = gpus * gpu.tflops * 1e12 * (EXPERTS if shape.experts else 1.0)
    return {
        "log-probabilities": forwards * work / (pace * FORWARD),
        "training": passes * work / (pace * TRAIN),
    }


def sampling(
    shape: Shape,
    gpu: GPU,
    tp: int,
    count: float,
    replicas: int,
    at_once: float,
    prompt: float,
    mean: float,
    longest: int,
) -> float:
    """Return the seconds in which responses are sampled.

    Args:
        shape: of the model.
        gpu: speed of each GPU.
        tp: GPUs of a replica, the tensor-parallel size.
        count: responses, of all replicas together.
        replicas: copies of the model that sample.
        at_once: responses that run on a replica at a time, at most.
        prompt: tokens of a mean prompt.
        mean: tokens of a mean response.
        longest: tokens of a response, at most.
    """
    moe = EXPERTS if shape.experts else 1.0
    flops = tp * gpu.tflops * 1e12 * DECODE * moe  # operations a second
    bandwidth = tp * gpu.bandwidth * 1e12 * READ * moe  # bytes a second
    latency = LATENCY[0] + (LATENCY[1] * 2 * shape.layers if tp > 1 else 0)
    # bytes of a token's keys and values, 2 each
    kv = 4 * shape.layers * shape.kv_heads * shape.head_dim

    def step(running: float, cached: float) -> float:
        """Return the seconds in which each of `running` responses gets one token, with
        `cached` tokens of each in the cache.
        """
        read = 2 * shape.read(running) + running * cached * kv
        return max(read / bandwidth, running * 2 * shape.active / flops) + latency

    full = min(count / replicas, at_once)
    # while responses wait, `full` of them run: on average each is half done
    waiting = max(count / replicas - full, 0)
    body = waiting * mean / full * step(full, prompt + mean / 2)
    # of the last `full` responses (1 - x)^a are left at x * longest; at least one runs to
    # the end, because in every step some response reaches the limit
    a = max(longest / mean - 1, 1e-6)
    parts = 64  # of the integral over x
    at = [(i + 0.5) / parts for i in range(parts)]
    seconds = [step(max(full * (1 - x) ** a, 1), prompt + x * longest) for x in at]
    drain = sum(seconds) * longest / parts
    prefill = count / replicas * prompt * 2 * shape.active / flops
    return body + drain + prefill


def offloads(cfg: DictConfig, what: str) -> bool:
    """Return whether the configuration offloads `what`, "param" or "optimizer", to the
    CPU.
    """
    actor = cfg.actor_rollout_ref.actor
    return bool((actor.get("megatron") or actor.fsdp_config).get(f"{what}_offload"))


def flash(cfg: DictConfig) -> bool:
    """Return whether a run uses flash-attn: verl's models attend by it unless told
    otherwise, and then fail without it, late, in a worker.
    """
    override = cfg.actor_rollout_ref.model.override_config or {}
    default = "flash_attention_2"
    chosen = override.get("attn_implementation", default)
    return bool(cfg.actor_rollout_ref.actor.get("megatron")) or chosen == default


def memory(shape: Shape, cfg: DictConfig, gpus: int) -> tuple[float, float]:
    """Return the bytes on a GPU: the most while it trains; and what stays beside vLLM
    while it samples.

    Args:
        shape: of the model.
        cfg: the configuration of the run.
        gpus: of the whole run.
    """
    actor = cfg.actor_rollout_ref.actor
    m = actor.get("megatron")
    tokens = actor.ppo_max_token_len_per_gpu
    hidden = shape.hidden
    layers = shape.layers
    # bf16 activations of a token in the experts that it passes through
    chosen = shape.experts_per_token * (2 * hidden + 3 * shape.expert_hidden) * 2
    anew = tokens * (34 * hidden + chosen)  # one layer, all that its backward needs
    # without flash-attn log_softmax saves float32
    logits = tokens * shape.vocab * (6 if flash(cfg) else 16)
    if m:
        tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
        ep, etp = m.expert_model_parallel_size, m.expert_tensor_parallel_size or tp
        # parameters on a GPU: those that all tokens pass through, and the experts'
        mine = (shape.params - shape.expert_params) / (tp * pp)
        theirs = shape.expert_params / (ep * etp * pp)
        weights = 2 * (mine + theirs)  # bf16
        state = 6 * (mine + theirs)  # weights, and gradients in float32
        moments = 12 * (mine * tp * pp / gpus + theirs * ep * etp * pp / gpus)
        transformer = m.get("override_transformer_config") or {}
        full = transformer.get("recompute_granularity") == "full"
        # activations of all layers: their inputs alone if each is computed again
        kept = (tokens * hidden * 2 if full else anew) * layers / (tp * pp)
        logits = logits / tp
        anew = anew / tp
    else:
        weights = shape.params * 4 / gpus  # float32
        state = shape.params * 8 / gpus  # weights and gradients
        moments = shape.params * 8 / gpus  # Adam's two
        # activations of all layers: their inputs alone if each is computed again
        again = cfg.actor_rollout_ref.model.enable_gradient_checkpointing
        kept = (tokens * hidden * 2 if again else anew) * layers
        words = shape.vocab * hidden
        # FSDP's bf16 copies: the head and two layers
        kept += 2 * words + 2 * 2 * (shape.params - words) / layers
        # the mask that keeps packed answers apart
        kept += 0 if flash(cfg) else 2 * tokens**2
    moments_here = 0 if offloads(cfg, "optimizer") else moments
    weights_here = 0 if offloads(cfg, "param") else weights
    forward = state + kept + anew + logits + moments_here
    optimizer_step = state + moments
    return max(forward, optimizer_step) + CONTEXT, weights_here + moments_here + CONTEXT
