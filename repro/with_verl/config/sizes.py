# SPDX-License-Identifier: Apache-2.0
"""What verl, its workers and vLLM assert of a configuration hours later, or never: said
before anything starts.

One file: tables of the values that are possible, and one function for each kind of
conflict between two settings.
"""

import ast
import difflib
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from repro.with_verl.config import vllm_args
from repro.with_verl.config.compose import ACTOR, ROOT, SEEDS
from repro.with_verl.config.model import Shape, shape_of
from upref import InputError

ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
LOGGERS = (
    "console",
    "file",
    "wandb",
    "tensorboard",
    "mlflow",
    "swanlab",
    "vemlp_wandb",
    "clearml",
    "trackio",
    "rl_insight",
)
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # and each with a + behind
STRATEGIES = {"dp": ("fsdp", "fsdp2"), "megatron": ("megatron",)}
MANAGERS = ("naive", "dapo")  # the two whose rewards upref's function answers
# estimators that compare the responses to one prompt
GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline")
# vLLM's load formats
LOAD = (
    "auto",
    "dummy",
    "safetensors",
    "hf",
    "pt",
    "npcache",
    "mistral",
    "runai_streamer",
)
# what reward/score.py returns as numbers, and verl's sum of the token rewards
METRICS = ("acc", "score", "reward")
AT_LEAST = dict.fromkeys(
    (
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        f"{ROLLOUT}.n",
        f"{ROLLOUT}.val_kwargs.n",
        f"{ROLLOUT}.tensor_model_parallel_size",
        f"{ACTOR}.ppo_mini_batch_size",
        f"{ACTOR}.ppo_epochs",
        "trainer.nnodes",
        "trainer.n_gpus_per_node",
        "trainer.total_epochs",
        f"{ROLLOUT}.max_num_seqs",
        "trainer.total_training_steps",
        "trainer.max_actor_ckpt_to_keep",
        "reward.num_workers",
        f"{ROLLOUT}.agent.num_workers",
        "data.filter_overlong_prompts_workers",
        f"{ACTOR}.loss_scale_factor",
        f"{ACTOR}.ulysses_sequence_parallel_size",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    ),
    1,
) | dict.fromkeys(
    (
        *SEEDS,
        f"{ACTOR}.optim.weight_decay",
        f"{ACTOR}.kl_loss_coef",
        "data.dataloader_num_workers",
        f"{ROLLOUT}.val_kwargs.temperature",
        "algorithm.kl_ctrl.kl_coef",
        "actor_rollout_ref.model.lora_rank",
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    ),
    0,
)
SHARES = (  # numbers from 0 to 1
    f"{ACTOR}.optim.lr_warmup_steps_ratio",
    f"{ACTOR}.optim.min_lr_ratio",
    "algorithm.gamma",
    "algorithm.lam",
)
FIXED: dict[str, tuple[Any, str]] = {  # what every scale needs as it is, and why
    "actor_rollout_ref.hybrid_engine": (
        True,
        "false asks for GPUs that sample alone, and no scale has them",
    ),
    f"{ACTOR}.fsdp_config.forward_only": (
        False,
        "an actor that runs forward only cannot be trained",
    ),
    "actor_rollout_ref.model.use_liger": (False, "the environment has no liger-kernel"),
    "reward.reward_model.enable": (False, "no scale has a reward model"),
    "trainer.val_only": (False, "a run that only validates trains no step"),
    "trainer.del_local_ckpt_after_load": (
        False,
        "a run that is interrupted again would have nothing to go on from",
    ),
}
# verl's default is a reference, and what reads the second knows nothing of the first
FOLLOWS = {
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
}
# Adam moves a weight by about the learning rate at each step, and weights are near 0.02
LARGE_RATE = 0.1
# Adam moves a weight by the learning rate; of a weight of 0.02, bf16 has steps of
# 1.2e-4
SMALL_RATE = 1e-4
# parts of a checkpoint; hf_model is a copy of the weights for others
RESUMED = ("model", "optimizer", "extra")
HALF = ("fp16", "float16", "bf16", "bfloat16", "fp32", "float32")
KNOWN: dict[str, tuple[str, ...]] = {
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.device": ("cuda", "cpu"),
    "data.truncation": ("error", "left", "right", "middle"),
    "data.prompt_key": ("prompt",),  # of the files that data.prepare writes
    "data.reward_fn_key": ("data_source",),
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    # separate_async needs GPUs that sample alone
    "trainer.v1.trainer_mode": ("sync", "colocate_async"),
    f"{ROLLOUT}.load_format": LOAD,
    f"{ROLLOUT}.dtype": ("auto", "half", "float16", "bfloat16", "float", "float32"),
    f"{ROLLOUT}.logprobs_mode": (
        "raw_logits",
        "raw_logprobs",
        "processed_logits",
        "processed_logprobs",
    ),
    f"{ACTOR}.fsdp_config.model_dtype": HALF,
    f"{REF}.fsdp_config.model_dtype": HALF,
}


def check(cfg: DictConfig, shape: Shape | None = None) -> None:
    """Raises InputError on the first that cannot work. shape: of the model; None: by
    its config.json.
    """
    for key, (value, why) in FIXED.items():
        if get(cfg, key) not in (None, value):
            raise InputError(f"{key} must be {str(value).lower()}: {why}.")
    ranges(cfg)
    names(cfg)
    files(cfg)
    rewards(cfg)
    engine(cfg)
    checkpoints(cfg)
    shape = shape or shape_of(cfg.actor_rollout_ref.model.path)
    batches(cfg, parallel(cfg, shape))
    budgets(cfg, shape)


def get(cfg: DictConfig, key: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(cfg, key)


def ranges(cfg: DictConfig) -> None:
    for key, least in AT_LEAST.items():
        value = get(cfg, key)
        if value is not None and value < least:
            raise InputError(f"{key} must be at least {least}, got {value}.")
    for key in SHARES:
        value = get(cfg, key)
        if value is not None and not 0 <= value <= 1:
            raise InputError(f"{key} must be from 0 to 1, got {value}.")
    gpus = cfg.trainer.n_gpus_per_node
    for key, least in (("num_gpus", gpus), ("num_cpus", 3 * gpus)):
        value = get(cfg, f"ray_kwargs.ray_init.{key}")
        if value is not None and value < least and cfg.trainer.device == "cuda":
            raise InputError(
                f"ray_kwargs.ray_init.{key}={value} is less than the {least} that verl requests for {gpus} GPUs: Ray "
                "would wait forever; leave it out."
            )
    share = get(cfg, f"{ROLLOUT}.gpu_memory_utilization")
    if not 0 < share < 1:
        raise InputError(
            f"{ROLLOUT}.gpu_memory_utilization is a share of the GPU, between 0 and 1, got {share}."
        )
    for part in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        if not 0 < get(cfg, f"{part}.top_p") <= 1:
            raise InputError(
                f"{part}.top_p must be above 0 and at most 1, got {get(cfg, f'{part}.top_p')}."
            )
    if not get(cfg, f"{ROLLOUT}.temperature") > 0:
        raise InputError(
            f"{ROLLOUT}.temperature must be above 0: at 0 the answers of a group are one answer."
        )
    for part in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        if (k := get(cfg, f"{part}.top_k")) < -1:
            raise InputError(
                f"{part}.top_k must be at least 1, or -1 for all tokens, got {k}."
            )
    if get(cfg, f"{ROLLOUT}.n") < 2 and cfg.algorithm.adv_estimator in GROUPED:
        raise InputError(
            f"{ROLLOUT}.n must be at least 2 with adv_estimator={cfg.algorithm.adv_estimator}: a group of one "
            "has nothing to compare with."
        )
    if cfg.actor_rollout_ref.nccl_timeout < 60:
        raise InputError(
            f"actor_rollout_ref.nccl_timeout is in seconds, at least 60, got {cfg.actor_rollout_ref.nccl_timeout}."
        )
    for key in (f"{ACTOR}.optim.lr", f"{ACTOR}.optim.clip_grad"):
        if not get(cfg, key) > 0:
            raise InputError(f"{key} must be above 0, got {get(cfg, key)}.")
    rate = get(cfg, f"{ACTOR}.optim.lr")
    if rate > LARGE_RATE:
        raise InputError(
            f"{ACTOR}.optim.lr must be at most {LARGE_RATE}, got {rate}: each step would move every weight by it."
        )
    threshold = get(cfg, "algorithm.rollout_correction.rollout_is_threshold")
    if isinstance(threshold, int | float) and threshold <= 0:
        raise InputError(
            f"algorithm.rollout_correction.rollout_is_threshold must be above 0, got {threshold}: it caps a ratio of "
            "probabilities."
        )
    betas = get(cfg, f"{ACTOR}.optim.betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= b < 1 for b in betas)):
        raise InputError(
            f"{ACTOR}.optim.betas are two numbers from 0 to below 1, got {betas}."
        )
    if cfg.trainer.critic_warmup > 0:
        raise InputError(
            "trainer.critic_warmup would leave the policy as it is for so many steps, and no critic trains."
        )


def one_of(
    key: str, value: Any, known: tuple[str, ...] | set[str], what: str = ""
) -> None:
    if value not in known:
        near = difflib.get_close_matches(str(value), sorted(known), 1, 0.5)
        rest = (
            f"did you mean {near[0]}?"
            if near
            else f"it is one of {', '.join(sorted(known))}."
        )
        raise InputError(f"{key} has no {what or 'value'} {value!r}: {rest}")


def names(cfg: DictConfig) -> None:
    for key in ("data.train_files", "data.val_files"):
        if not get(cfg, key):
            raise InputError(f"{key} names no file: leave it out, or name one.")
    loggers = cfg.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        one_of("trainer.logger", name, LOGGERS, "logger")
    if "file" not in loggers:
        raise InputError(
            "trainer.logger must have file: the report and the watchdog read what it writes."
        )
    for key, known in KNOWN.items():
        if (value := get(cfg, key)) is not None:
            one_of(key, value, known)
    optim = cfg.actor_rollout_ref.actor.optim
    if optim.get("optimizer_impl") == "torch.optim":
        one_of(
            f"{ACTOR}.optim.optimizer",
            optim.optimizer,
            tuple(x for x in vars(torch.optim) if x[0].isupper()),
        )
    if cfg.trainer.resume_mode == "resume_path" and not (
        "global_step_" in (where := str(cfg.trainer.resume_from_path))
        and Path(where).is_dir()
    ):
        raise InputError(
            f"trainer.resume_from_path={where} is not a folder global_step_N of checkpoints."
        )
    if get(cfg, f"{ACTOR}.use_kl_loss"):
        one_of(
            f"{ACTOR}.kl_loss_type",
            get(cfg, f"{ACTOR}.kl_loss_type").removesuffix("+"),
            KL,
        )
    vllm = get(cfg, f"{ROLLOUT}.engine_kwargs.vllm") or {}
    for name in vllm:
        one_of(
            f"{ROLLOUT}.engine_kwargs.vllm",
            str(name),
            vllm_args.known(),
            "argument of the pinned vLLM",
        )
    if get(cfg, f"{ROLLOUT}.name") != "vllm":
        raise InputError(
            f"{ROLLOUT}.name must be vllm, which the environment has, got {get(cfg, f'{ROLLOUT}.name')!r}."
        )
    if cfg.algorithm.adv_estimator == "gae":
        raise InputError(
            "algorithm.adv_estimator=gae needs a critic, which no scale has: set grpo or another outcome estimator."
        )


def files(cfg: DictConfig) -> None:
    """Files and samples that the driver reads when it starts."""
    if not get(cfg, "trainer.default_local_dir"):
        raise InputError(
            "trainer.default_local_dir names no folder: leave it out, or name one."
        )
    for key in ("data.custom_cls.path", "actor_rollout_ref.model.tokenizer_path"):
        path = str(get(cfg, key) or "")
        if path.startswith(("/", "~", ".")) or path.endswith(".py"):
            there = ROOT / Path(path).expanduser()
            if not there.exists():
                raise InputError(
                    f"{key}={path} is not there: name a file or folder that is."
                )
    batch, most = cfg.data.train_batch_size, get(cfg, "data.train_max_samples")
    if most is not None and 0 <= most < batch:
        raise InputError(
            f"data.train_max_samples={most} is less than one batch of data.train_batch_size={batch}: raise it, or "
            "leave it at -1 for all."
        )
    if get(cfg, "data.val_max_samples") == 0:
        raise InputError(
            "data.val_max_samples=0 leaves nothing to validate on: leave it at -1 for all."
        )


def defines(path: Path, name: str) -> bool:
    """Whether a Python file has a function or a name of that name at its top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    names = (
        target
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    found |= {target.id for target in names if isinstance(target, ast.Name)}
    imports = (
        node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
    )
    return name in found | {
        alias.asname or alias.name for node in imports for alias in node.names
    }


def rewards(cfg: DictConfig) -> None:
    path = cfg.reward.custom_reward_function.path
    ours = str(path).endswith("repro.with_verl.reward.score")
    module = (
        ROOT / path.removeprefix("pkg://").replace(".", "/")
        if path and path.startswith("pkg://")
        else None
    )
    file = (
        module.with_suffix(".py")
        if module
        else ROOT / Path(path).expanduser()
        if path
        else None
    )
    if file and not module and not file.is_file():
        raise InputError(
            f"reward.custom_reward_function.path={path} is not a file: name one, or a module as pkg://NAME."
        )
    name = cfg.reward.custom_reward_function.name
    if file and file.is_file() and not defines(file, name):
        raise InputError(
            f"reward.custom_reward_function.name={name} is not in {file.name}: name a function of it."
        )
    groups = cfg.algorithm.filter_groups
    if groups and groups.enable and not cfg.trainer.use_v1:
        raise InputError(
            "trainer.use_v1=false is a trainer that reads no algorithm.filter_groups: leave it true."
        )
    if groups and groups.enable and ours:
        one_of("algorithm.filter_groups.metric", groups.metric, METRICS, "metric")
    if ours:
        one_of(
            "reward.reward_manager.name",
            cfg.reward.reward_manager.name,
            MANAGERS,
            "manager",
        )
    buffer = get(cfg, "reward.reward_kwargs.overlong_buffer_cfg")
    if cfg.reward.reward_manager.name == "dapo" and buffer and buffer.enable:
        longest, response = (
            cfg.reward.reward_kwargs.max_resp_len,
            cfg.data.max_response_length,
        )
        if longest != response:
            raise InputError(
                f"reward.reward_kwargs.max_resp_len={longest} and data.max_response_length={response} differ: the "
                "penalty for long answers is counted back from the first, so set both."
            )
        if not 0 < buffer.len <= longest:
            raise InputError(
                f"overlong_buffer_cfg.len={buffer.len} must be above 0 and at most max_resp_len={longest}."
            )


def engine(cfg: DictConfig) -> None:
    backend = "megatron" if cfg.actor_rollout_ref.actor.get("megatron") else "dp"
    strategy = cfg.actor_rollout_ref.actor.strategy
    if strategy not in STRATEGIES[backend]:
        raise InputError(
            f"{ACTOR}.strategy={strategy} has no engine in this configuration: set one of "
            f"{', '.join(STRATEGIES[backend])}."
        )
    if (
        strategy == "fsdp2"
        and cfg.actor_rollout_ref.model.use_fused_kernels
        and "-VL-" not in cfg.actor_rollout_ref.model.path
    ):
        raise InputError(
            f"actor_rollout_ref.model.use_fused_kernels=true fails at the first log-probability with {ACTOR}.strategy="
            "fsdp2 (verl multiplies a tensor by a sharded one): leave it false, or set the strategy to fsdp."
        )
    dtype, rate = (
        get(cfg, f"{ACTOR}.fsdp_config.model_dtype"),
        get(cfg, f"{ACTOR}.optim.lr"),
    )
    if (
        dtype not in (None, "fp32", "float32")
        and rate < SMALL_RATE
        and not cfg.actor_rollout_ref.actor.get("megatron")
    ):
        raise InputError(
            f"{ACTOR}.fsdp_config.model_dtype={dtype} rounds updates of {ACTOR}.optim.lr={rate} away: leave it at "
            "fp32, in which Adam works; the forward pass is bf16 in any case."
        )
    dynamic = (
        get(cfg, f"{ACTOR}.use_dynamic_bsz"),
        get(cfg, f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
    )
    if dynamic[0] != dynamic[1]:
        raise InputError(
            f"{ACTOR}.use_dynamic_bsz and {ROLLOUT}.log_prob_use_dynamic_bsz must be the same."
        )


def checkpoints(cfg: DictConfig) -> None:
    """A checkpoint must hold all that the same command goes on from."""
    for part in ("save_contents", "load_contents"):
        kept = get(cfg, f"{ACTOR}.checkpoint.{part}")
        if absent := [
            name for name in RESUMED if kept is not None and name not in kept
        ]:
            raise InputError(
                f"{ACTOR}.checkpoint.{part}=[{','.join(map(str, kept))}] leaves out {', '.join(absent)}, and a run "
                "that was interrupted would not go on from its checkpoint: name model, optimizer and extra."
            )


def parallel(cfg: DictConfig, shape: Shape) -> int:
    """How many GPUs share a sequence while training; the sizes must divide what they
    split.
    """
    gpus = cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node
    tp = get(cfg, f"{ROLLOUT}.tensor_model_parallel_size")
    divides(
        tp * get(cfg, f"{ROLLOUT}.data_parallel_size"),
        gpus,
        f"{ROLLOUT}.tensor_model_parallel_size",
        "GPUs",
    )
    divides(tp, shape.heads, f"{ROLLOUT}.tensor_model_parallel_size", "attention heads")
    if tp > cfg.trainer.n_gpus_per_node:
        raise InputError(
            f"{ROLLOUT}.tensor_model_parallel_size={tp} spans machines of {cfg.trainer.n_gpus_per_node} GPUs."
        )
    m = cfg.actor_rollout_ref.actor.get("megatron")
    if m:
        key = f"{ACTOR}.megatron"
        split = (
            m.tensor_model_parallel_size
            * m.pipeline_model_parallel_size
            * m.context_parallel_size
        )
        divides(
            split, gpus, f"{key}: tensor x pipeline x context parallel size", "GPUs"
        )
        for of, heads in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
            divides(
                m.tensor_model_parallel_size,
                heads,
                f"{key}.tensor_model_parallel_size",
                of,
            )
        divides(
            m.pipeline_model_parallel_size,
            shape.layers,
            f"{key}.pipeline_model_parallel_size",
            "layers",
        )
        etp = m.expert_tensor_parallel_size or m.tensor_model_parallel_size
        ep = m.expert_model_parallel_size
        if ep > 1:
            divides(
                ep, shape.experts or 1, f"{key}.expert_model_parallel_size", "experts"
            )
            expert = ep * etp * m.pipeline_model_parallel_size
            divides(
                expert,
                gpus,
                f"{key}: expert x expert tensor x pipeline parallel size",
                "GPUs",
            )
        return split
    size = get(cfg, f"{ACTOR}.fsdp_config.fsdp_size")
    if size != -1:
        divides(size, gpus, f"{ACTOR}.fsdp_config.fsdp_size", "GPUs")
    sp = max(
        get(cfg, f"{ACTOR}.ulysses_sequence_parallel_size"),
        get(cfg, f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"),
    )
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    divides(sp, gpus, key, "GPUs")
    divides(sp, shape.heads, key, "attention heads")
    kv = shape.kv_heads
    if kv % sp and sp % kv:
        raise InputError(
            f"{key}={sp} must divide the model's {kv} heads of keys and values, or be a multiple of them."
        )
    return sp


def divides(size: int, whole: int, key: str, of: str) -> None:
    if size < 1 or whole % size:
        raise InputError(f"{key}={size} does not divide {whole} {of}: change one.")


def batches(cfg: DictConfig, split: int) -> None:
    batch, mini = (
        cfg.data.train_batch_size,
        cfg.actor_rollout_ref.actor.ppo_mini_batch_size,
    )
    if batch % mini:
        raise InputError(
            f"data.train_batch_size={batch} must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}: change one."
        )
    ranks, n = (
        cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node // split,
        cfg.actor_rollout_ref.rollout.n,
    )
    if mini * n % ranks:
        raise InputError(
            f"a mini-batch of {mini} prompts x {n} responses does not divide over {ranks} data-parallel ranks "
            f"({cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} GPUs, {split} to a sequence): change "
            f"trainer.nnodes or {ACTOR}.ppo_mini_batch_size."
        )


def budgets(cfg: DictConfig, shape: Shape) -> None:
    """A token budget must hold one whole sequence, of which each GPU that shares it has
    a part.
    """
    for key, of in FOLLOWS.items():
        if get(cfg, key) != get(cfg, of):
            raise InputError(
                f"{key}={get(cfg, key)} and {of}={get(cfg, of)} differ: set {of} alone, and {key} follows it."
            )
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    override = cfg.actor_rollout_ref.model.override_config or {}
    stretched = {"max_position_embeddings", "rope_scaling", "rope_parameters"} & {
        *override
    }
    if 0 < shape.context < longest and not stretched:
        raise InputError(
            f"a prompt and response of {longest} tokens are longer than the model's context of {shape.context} "
            "(max_position_embeddings of its config.json): lower data.max_response_length."
        )
    rollout, actor = cfg.actor_rollout_ref.rollout, cfg.actor_rollout_ref.actor
    m = actor.get("megatron")
    split = (
        m.context_parallel_size
        if m
        else max(
            actor.ulysses_sequence_parallel_size,
            actor.fsdp_config.ulysses_sequence_parallel_size,
        )
    )
    keys = [
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    ]
    if actor.use_kl_loss or cfg.algorithm.use_kl_in_reward:
        keys.append(f"{REF}.log_prob_max_token_len_per_gpu")
    for key in keys if actor.use_dynamic_bsz else []:
        if get(cfg, key) * split < longest:
            raise InputError(
                f"{key}={get(cfg, key)} x {split} GPUs to a sequence is less than one prompt and response "
                f"({longest} tokens): raise it."
            )
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise InputError(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is less than {longest} tokens."
        )
    if (
        rollout.max_model_len is not None
        and 0 < shape.context < rollout.max_model_len
        and not stretched
    ):
        raise InputError(
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} is more than the model's context of {shape.context} "
            "(max_position_embeddings of its config.json), which vLLM refuses: lower it."
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise InputError(
            f"{ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than max_num_seqs="
            f"{rollout.max_num_seqs}, which vLLM refuses: raise it."
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        raise InputError(
            f"{ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than one sequence of {longest} "
            "tokens, which vLLM needs without chunked prefill: raise it, or set enable_chunked_prefill=true."
        )
