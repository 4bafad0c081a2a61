# SPDX-License-Identifier: Apache-2.0
"""What verl, its workers and vLLM assert of a configuration hours later, or never: said
before anything starts.

Hydra and verl's own checks run before these, and refuse more. sizes.toml has the values
that are possible. Here are rules: each yields a sentence for what cannot work, and
nothing where all is well.
"""

import difflib
import symtable
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from repro.with_verl.config import vllm_args
from repro.with_verl.config.compose import ACTOR, ROOT, SEEDS
from repro.with_verl.config.model import Shape, shape_of
from repro.with_verl.refuse import refuse

ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")  # and each with a + behind
STRATEGIES = {"dp": ("fsdp", "fsdp2"), "megatron": ("megatron",)}
MANAGERS = ("naive", "dapo")  # the two whose rewards upref's function answers
# estimators that compare the responses to one prompt
GROUPED = ("grpo", "rloo", "reinforce_plus_plus_baseline")
# what reward/score.py returns as numbers, and verl's sum of the token rewards
METRICS = ("acc", "score", "reward")
_VALUES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
AT_LEAST: dict[str, int] = _VALUES["at_least"] | dict.fromkeys(SEEDS, 0)
ABOVE_0: list[str] = _VALUES["above_0"]
SHARES: list[str] = _VALUES["shares"]
FIXED: dict[str, tuple[Any, str]] = _VALUES["fixed"]
KNOWN: dict[str, list[str]] = _VALUES["known"]
# verl's default is a reference, and what reads the second knows nothing of the first
FOLLOWS = {
    f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
    f"{ROLLOUT}.response_length": "data.max_response_length",
}
# settings of a model that move the end of its context
STRETCHED = {"max_position_embeddings", "rope_scaling", "rope_parameters"}
# token budgets; the last where there is a reference
BUDGETS = (
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_max_token_len_per_gpu",
)
# Adam moves a weight by about the learning rate at each step, and weights are near 0.02
LARGE_RATE = 0.1
# Adam moves a weight by the learning rate; of a weight of 0.02, bf16 has steps of
# 1.2e-4
SMALL_RATE = 1e-4
# parts of a checkpoint; hf_model is a copy of the weights for others
RESUMED = ("model", "optimizer", "extra")


def check(cfg: DictConfig, shape: Shape | None = None) -> None:
    """Refuse a configuration of which a rule says that it cannot work.

    Args:
        cfg: the configuration, as verl composes it.
        shape: of the model; None: by its config.json.

    Raises:
        InputError: with the first sentence of the rules.
    """
    for rule in (fixed, ranges, names, files, rewards, engine, checkpoints):
        refuse(rule(cfg))
    shape = shape or shape_of(cfg.actor_rollout_ref.model.path)
    for rule_of_model in (parallel, batches, budgets):
        refuse(rule_of_model(cfg, shape))


def get(cfg: DictConfig, key: str) -> Any:
    """Return the value of a setting; None where it is not set."""
    return OmegaConf.select(cfg, key)


def fixed(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence for each setting that every scale needs as it is and that is set
    to something else.
    """
    for key, (value, why) in FIXED.items():
        if get(cfg, key) not in (None, value):
            yield f"{key} must be {str(value).lower()}: {why}."


def ranges(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence for each number that is outside its range."""
    for key, least in AT_LEAST.items():
        value = get(cfg, key)
        if value is not None and value < least:
            yield f"{key} must be at least {least}, got {value}."
    for key in SHARES:
        value = get(cfg, key)
        if value is not None and not 0 <= value <= 1:
            yield f"{key} must be from 0 to 1, got {value}."
    gpus = cfg.trainer.n_gpus_per_node
    for key, least in (("num_gpus", gpus), ("num_cpus", 3 * gpus)):
        value = get(cfg, f"ray_kwargs.ray_init.{key}")
        if value is not None and value < least and cfg.trainer.device == "cuda":
            yield (
                f"ray_kwargs.ray_init.{key}={value} is less than the {least} that verl requests for {gpus} GPUs: Ray "
                "would wait forever; leave it out."
            )
    for key in ABOVE_0:
        value = get(cfg, key)
        if isinstance(value, int | float) and not value > 0:
            yield f"{key} must be above 0, got {value}."
    yield from _ranges_of_sampling(cfg)
    if (seconds := cfg.actor_rollout_ref.nccl_timeout) < 60:
        yield f"actor_rollout_ref.nccl_timeout is in seconds, at least 60, got {seconds}."
    optim = cfg.actor_rollout_ref.actor.optim
    if optim.lr > LARGE_RATE:
        yield (
            f"{ACTOR}.optim.lr must be at most {LARGE_RATE}, got {optim.lr}: each step would move every weight by it."
        )
    betas = optim.get("betas")
    if betas is not None and not (len(betas) == 2 and all(0 <= b < 1 for b in betas)):
        yield f"{ACTOR}.optim.betas are two numbers from 0 to below 1, got {betas}."


def _ranges_of_sampling(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence for each number of the sampling that is outside its range."""
    rollout = cfg.actor_rollout_ref.rollout
    share = rollout.gpu_memory_utilization
    estimator = cfg.algorithm.adv_estimator
    if not 0 < share < 1:
        yield f"{ROLLOUT}.gpu_memory_utilization is a share of the GPU, between 0 and 1, got {share}."
    for part, sampler in (
        (ROLLOUT, rollout),
        (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs),
    ):
        if not 0 < sampler.top_p <= 1:
            yield f"{part}.top_p must be above 0 and at most 1, got {sampler.top_p}."
        if sampler.top_k < -1:
            yield f"{part}.top_k must be at least 1, or -1 for all tokens, got {sampler.top_k}."
    if rollout.n < 2 and estimator in GROUPED:
        yield (
            f"{ROLLOUT}.n must be at least 2 with adv_estimator={estimator}: a group of one has nothing to compare with."
        )


def one_of(
    key: str, value: Any, known: Collection[str], what: str = ""
) -> Iterator[str]:
    """Yield a sentence if a value is not a known one, with the nearest of these or all
    of them.

    Args:
        key: the setting.
        value: of the setting.
        known: the values that it may have.
        what: their kind, for the sentence; "": value.
    """
    if value not in known:
        near = difflib.get_close_matches(str(value), sorted(known), 1, 0.5)
        rest = f"it is one of {', '.join(sorted(known))}."
        if near:
            rest = f"did you mean {near[0]}?"
        yield f"{key} has no {what or 'value'} {value!r}: {rest}"


def names(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence for each setting whose value is no name that verl, torch or vLLM
    knows: files, loggers, optimizers, KL terms and arguments of vLLM among them.
    """
    from verl.utils.tracking import Tracking

    for key in ("data.train_files", "data.val_files"):
        if not get(cfg, key):
            yield f"{key} names no file: leave it out, or name one."
    loggers = cfg.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        known = tuple(Tracking.supported_backend)
        yield from one_of("trainer.logger", name, known, "logger")
    if "file" not in loggers:
        yield "trainer.logger must have file: the report and the watchdog read what it writes."
    for key, allowed in KNOWN.items():
        if (value := get(cfg, key)) is not None:
            yield from one_of(key, value, allowed)
    optim = cfg.actor_rollout_ref.actor.optim
    if optim.get("optimizer_impl") == "torch.optim":
        known = tuple(x for x in vars(torch.optim) if x[0].isupper())
        yield from one_of(f"{ACTOR}.optim.optimizer", optim.optimizer, known)
    where = str(cfg.trainer.resume_from_path)
    there = "global_step_" in where and Path(where).is_dir()
    if cfg.trainer.resume_mode == "resume_path" and not there:
        yield f"trainer.resume_from_path={where} is not a folder global_step_N of checkpoints."
    if get(cfg, f"{ACTOR}.use_kl_loss"):
        kind = get(cfg, f"{ACTOR}.kl_loss_type").removesuffix("+")
        yield from one_of(f"{ACTOR}.kl_loss_type", kind, KL)
    key, what = f"{ROLLOUT}.engine_kwargs.vllm", "argument of the pinned vLLM"
    for name in get(cfg, key) or {}:
        yield from one_of(key, str(name), vllm_args.known(), what)
    if cfg.algorithm.adv_estimator == "gae":
        yield "algorithm.adv_estimator=gae needs a critic, which no scale has: set grpo or another outcome estimator."


def files(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence for each file that the driver reads at its start and that is not
    there, and for a number of samples that leaves no batch.
    """
    if not get(cfg, "trainer.default_local_dir"):
        yield "trainer.default_local_dir names no folder: leave it out, or name one."
    for key in ("data.custom_cls.path", "actor_rollout_ref.model.tokenizer_path"):
        path = str(get(cfg, key) or "")
        is_file = path.startswith(("/", "~", ".")) or path.endswith(".py")
        if is_file and not (ROOT / Path(path).expanduser()).exists():
            yield f"{key}={path} is not there: name a file or folder that is."
    batch, most = cfg.data.train_batch_size, get(cfg, "data.train_max_samples")
    if most is not None and 0 <= most < batch:
        yield (
            f"data.train_max_samples={most} is less than one batch of data.train_batch_size={batch}: raise it, or "
            "leave it at -1 for all."
        )
    if get(cfg, "data.val_max_samples") == 0:
        yield "data.val_max_samples=0 leaves nothing to validate on: leave it at -1 for all."


def defines(path: Path, name: str) -> bool:
    """Return whether a Python file assigns, defines or imports this name at its top
    level. The file is not run.
    """
    top = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    if name not in top.get_identifiers():
        return False
    found = top.lookup(name)
    return found.is_assigned() or found.is_imported()


def rewards(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence if the reward function is not there, or its manager, metric or
    penalty for length does not fit it.
    """
    path = cfg.reward.custom_reward_function.path or ""
    ours = path.endswith("repro.with_verl.reward.score")
    is_module = path.startswith("pkg://")
    file = ROOT / Path(path).expanduser()
    if is_module:
        file = ROOT / (path.removeprefix("pkg://").replace(".", "/") + ".py")
    name = cfg.reward.custom_reward_function.name
    if path and not is_module and not file.is_file():
        yield f"reward.custom_reward_function.path={path} is not a file: name one, or a module as pkg://NAME."
    if path and file.is_file() and not defines(file, name):
        yield f"reward.custom_reward_function.name={name} is not in {file.name}: name a function of it."
    groups = cfg.algorithm.filter_groups
    filters = bool(groups and groups.enable)
    if filters and not cfg.trainer.use_v1:
        yield "trainer.use_v1=false is a trainer that reads no algorithm.filter_groups: leave it true."
    if filters and ours:
        key = "algorithm.filter_groups.metric"
        yield from one_of(key, groups.metric, METRICS, "metric")
    manager = cfg.reward.reward_manager.name
    if ours:
        yield from one_of("reward.reward_manager.name", manager, MANAGERS, "manager")
    buffer = get(cfg, "reward.reward_kwargs.overlong_buffer_cfg")
    if manager == "dapo" and buffer and buffer.enable:
        longest = cfg.reward.reward_kwargs.max_resp_len
        response = cfg.data.max_response_length
        if longest != response:
            yield (
                f"reward.reward_kwargs.max_resp_len={longest} and data.max_response_length={response} differ: the "
                "penalty for long answers is counted back from the first, so set both."
            )
        if not 0 < buffer.len <= longest:
            yield f"overlong_buffer_cfg.len={buffer.len} must be above 0 and at most max_resp_len={longest}."


def engine(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence if the engine does not fit the configuration, fails with fused
    kernels, or rounds its updates away; or if training and log-probabilities pack
    sequences in two ways.
    """
    actor, model = cfg.actor_rollout_ref.actor, cfg.actor_rollout_ref.model
    megatron, strategy = bool(actor.get("megatron")), actor.strategy
    known = STRATEGIES["megatron" if megatron else "dp"]
    if strategy not in known:
        yield f"{ACTOR}.strategy={strategy} has no engine in this configuration: set one of {', '.join(known)}."
    if strategy == "fsdp2" and model.use_fused_kernels and "-VL-" not in model.path:
        yield (
            f"actor_rollout_ref.model.use_fused_kernels=true fails at the first log-probability with {ACTOR}.strategy="
            "fsdp2 (verl multiplies a tensor by a sharded one): leave it false, or set the strategy to fsdp."
        )
    dtype = get(cfg, f"{ACTOR}.fsdp_config.model_dtype")
    full = megatron or dtype in (None, "fp32", "float32")
    if not full and actor.optim.lr < SMALL_RATE:
        yield (
            f"{ACTOR}.fsdp_config.model_dtype={dtype} rounds updates of {ACTOR}.optim.lr={actor.optim.lr} away: leave "
            "it at fp32, in which Adam works; the forward pass is bf16 in any case."
        )
    if actor.use_dynamic_bsz != get(cfg, f"{ROLLOUT}.log_prob_use_dynamic_bsz"):
        yield f"{ACTOR}.use_dynamic_bsz and {ROLLOUT}.log_prob_use_dynamic_bsz must be the same."


def checkpoints(cfg: DictConfig) -> Iterator[str]:
    """Yield a sentence if checkpoints lack a part from which the same command goes on."""
    for part in ("save_contents", "load_contents"):
        kept = get(cfg, f"{ACTOR}.checkpoint.{part}")
        absent = [] if kept is None else [name for name in RESUMED if name not in kept]
        if absent:
            yield (
                f"{ACTOR}.checkpoint.{part}=[{','.join(map(str, kept))}] leaves out {', '.join(absent)}, and a run "
                "that was interrupted would not go on from its checkpoint: name model, optimizer and extra."
            )


def divides(key: str, size: int, of: str, whole: int) -> Iterator[str]:
    """Yield a sentence if a size is below 1 or does not divide the number that it
    splits.

    Args:
        key: the setting that has the size.
        size: parts.
        of: what is split, in words.
        whole: how many of these there are.
    """
    if size < 1 or whole % size:
        yield f"{key}={size} does not divide {whole} {of}: change one."


def parallel(cfg: DictConfig, shape: Shape) -> Iterator[str]:
    """Yield a sentence for each parallel size that does not divide what it splits:
    vLLM's, then those of the engine that trains.
    """
    each, gpus = cfg.trainer.n_gpus_per_node, gpus_of(cfg)
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    rollout = cfg.actor_rollout_ref.rollout
    tp = rollout.tensor_model_parallel_size
    yield from divides(key, tp * rollout.data_parallel_size, "GPUs", gpus)
    yield from divides(key, tp, "attention heads", shape.heads)
    if tp > each:
        yield f"{key}={tp} spans machines of {each} GPUs."
    m = cfg.actor_rollout_ref.actor.get("megatron")
    yield from megatron(m, shape, gpus) if m else fsdp(cfg, shape, gpus)


def megatron(m: DictConfig, shape: Shape, gpus: int) -> Iterator[str]:
    """Yield a sentence for each of Megatron's sizes that does not divide what it
    splits.

    Args:
        m: Megatron's section of the configuration.
        shape: of the model.
        gpus: of the whole run.
    """
    key = f"{ACTOR}.megatron"
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    ep, etp = m.expert_model_parallel_size, m.expert_tensor_parallel_size or tp
    all_of = f"{key}: tensor x pipeline x context parallel size"
    yield from divides(all_of, replica(m), "GPUs", gpus)
    for what, size, of, whole in (
        ("tensor", tp, "heads", shape.heads),
        ("tensor", tp, "kv_heads", shape.kv_heads),
        ("pipeline", pp, "layers", shape.layers),
        ("expert", ep, "experts", shape.experts or 1),
    ):
        yield from divides(f"{key}.{what}_model_parallel_size", size, of, whole)
    if ep > 1:
        all_of = f"{key}: expert x expert tensor x pipeline parallel size"
        yield from divides(all_of, ep * etp * pp, "GPUs", gpus)


def fsdp(cfg: DictConfig, shape: Shape, gpus: int) -> Iterator[str]:
    """Yield a sentence if FSDP's shards do not divide the GPUs, or Ulysses' size the
    GPUs and the heads.
    """
    size = cfg.actor_rollout_ref.actor.fsdp_config.fsdp_size
    sp = ulysses(cfg)
    if size != -1:
        yield from divides(f"{ACTOR}.fsdp_config.fsdp_size", size, "GPUs", gpus)
    key = f"{ACTOR}.ulysses_sequence_parallel_size"
    kv = shape.kv_heads
    yield from divides(key, sp, "GPUs", gpus)
    yield from divides(key, sp, "attention heads", shape.heads)
    if kv % sp and sp % kv:
        yield f"{key}={sp} must divide the model's {kv} heads of keys and values, or be a multiple of them."


def gpus_of(cfg: DictConfig) -> int:
    """Return all GPUs of the run."""
    return cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node


def ulysses(cfg: DictConfig) -> int:
    """Return how many GPUs share a sequence under FSDP: verl has two settings for it."""
    actor = cfg.actor_rollout_ref.actor
    return max(
        actor.ulysses_sequence_parallel_size,
        actor.fsdp_config.ulysses_sequence_parallel_size,
    )


def replica(m: DictConfig) -> int:
    """Return how many GPUs hold one copy of the model under Megatron, by its section
    `m` of the configuration.
    """
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    return tp * pp * m.context_parallel_size


def batches(cfg: DictConfig, _: Shape) -> Iterator[str]:
    """Yield a sentence if a batch is not a number of mini-batches, or a mini-batch does
    not divide over the data-parallel ranks. The shape is not read.
    """
    actor = cfg.actor_rollout_ref.actor
    n = cfg.actor_rollout_ref.rollout.n
    batch = cfg.data.train_batch_size
    mini = actor.ppo_mini_batch_size
    m = actor.get("megatron")
    if batch % mini:
        yield f"data.train_batch_size={batch} must be a multiple of {ACTOR}.ppo_mini_batch_size={mini}: change one."
    split = replica(m) if m else ulysses(cfg)
    ranks = gpus_of(cfg) // split
    if mini * n % ranks:
        yield (
            f"a mini-batch of {mini} prompts x {n} responses does not divide over {ranks} data-parallel ranks "
            f"({cfg.trainer.nnodes} x {cfg.trainer.n_gpus_per_node} GPUs, {split} to a sequence): change "
            f"trainer.nnodes or {ACTOR}.ppo_mini_batch_size."
        )


def budgets(cfg: DictConfig, shape: Shape) -> Iterator[str]:
    """Yield a sentence for each limit of tokens that does not hold one whole sequence,
    of which each GPU that shares it has a part; and for lengths beyond the model's
    context.
    """
    for key, of in FOLLOWS.items():
        if get(cfg, key) != get(cfg, of):
            yield f"{key}={get(cfg, key)} and {of}={get(cfg, of)} differ: set {of} alone, and {key} follows it."
    rollout = cfg.actor_rollout_ref.rollout
    actor = cfg.actor_rollout_ref.actor
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    context = shape.context
    limit = rollout.max_model_len
    if STRETCHED & {*(cfg.actor_rollout_ref.model.override_config or {})}:
        context = 0  # not known
    if 0 < context < longest:
        yield (
            f"a prompt and response of {longest} tokens are longer than the model's context of {context} "
            "(max_position_embeddings of its config.json): lower data.max_response_length."
        )
    m = actor.get("megatron")
    split = m.context_parallel_size if m else ulysses(cfg)
    with_reference = actor.use_kl_loss or cfg.algorithm.use_kl_in_reward
    read: tuple[str, ...] = ()
    if actor.use_dynamic_bsz:
        read = BUDGETS if with_reference else BUDGETS[:-1]
    for key in read:
        if get(cfg, key) * split < longest:
            yield (
                f"{key}={get(cfg, key)} x {split} GPUs to a sequence is less than one prompt and response "
                f"({longest} tokens): raise it."
            )
    if limit is not None and limit < longest:
        yield f"{ROLLOUT}.max_model_len={limit} is less than {longest} tokens."
    if limit is not None and 0 < context < limit:
        yield (
            f"{ROLLOUT}.max_model_len={limit} is more than the model's context of {context} "
            "(max_position_embeddings of its config.json), which vLLM refuses: lower it."
        )
    tokens, seqs = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if tokens < seqs:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}, which vLLM refuses: raise it."
        )
    if not rollout.enable_chunked_prefill and tokens < longest:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={tokens} is less than one sequence of {longest} "
            "tokens, which vLLM needs without chunked prefill: raise it, or set enable_chunked_prefill=true."
        )
