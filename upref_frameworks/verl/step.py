# SPDX-License-Identifier: Apache-2.0
"""verl's unmodified TrainingWorker as a step: FSDP2 over gloo in this process, without
Ray.

One file, because the twin of a run is the same step.
verl takes the old log-probabilities from its batch, so that one optimizer step shows
every regime.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from upref.aggregation import verl_name
from upref.errors import InputError, importing
from upref.registry import Objective, get
from upref.step.check import StepReport
from upref.step.compare.record import Recorded, Step, watched
from upref.step.inputs.reference import TorchModel, unwrapped
from upref.step.inputs.rows import Padded, Row
from upref_frameworks.steps.host import process_group, report
from upref_frameworks.steps.twin import twin

ENGINE = dict(
    strategy="fsdp2",
    mixed_precision=dict(param_dtype="fp32", reduce_dtype="fp32"),
    use_torch_compile=False,
    micro_batch_size_per_gpu=4,
    use_dynamic_bsz=False,
    max_token_len_per_gpu=4096,
)
MODEL = dict(
    load_tokenizer=False, enable_gradient_checkpointing=False, use_remove_padding=False
)
ACTOR = dict(
    strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=4, clip_ratio_c=1e9
)


def record_training(
    model: Any,
    rows: Sequence[Row],
    temperature: float,
    *,
    model_config: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    actor: dict[str, Any] | None = None,
    clip: float = 1e9,
    attention: str = "sdpa",
    updates: int = 1,
    mini_batches: int = 1,
    rate: float = 1e-3,
) -> Recorded:
    """Let verl's worker take optimizer steps on rows, and record them.

    Args:
        model: a small causal language model of transformers; verl loads a copy of it.
        rows: with old and reference log-probabilities; of this rank, where a process
            group is initialized.
        temperature: by which verl divides logits.
        model_config, engine, actor: fields of HFModelConfig, FSDPEngineConfig,
            ActorConfig, over MODEL, ENGINE, ACTOR.
        clip: bound of the gradient's norm.
        attention: the implementation of attention, as transformers names it.
        updates: number of passes over all rows.
        mini_batches: steps of a pass, on equally many rows each, in their order.
        rate: the learning rate.

    Returns:
        The steps, and the reference with which they are compared: this model, with the
        worker's adapters if it has any.

    Raises:
        InputError: verl is not installed, or its worker fails, or it took no step.
    """
    reference = TorchModel(model)
    steps: list[Step] = []
    with (
        process_group("verl's worker", "verl"),
        _restored(model),
        tempfile.TemporaryDirectory() as folder,
    ):
        with importing("verl"):
            from verl.workers.config import ActorConfig

            from upref_frameworks.verl import cpu as verl_cpu
        model.save_pretrained(folder)
        with verl_cpu.on_cpu():
            every = len(rows) * torch.distributed.get_world_size()
            size = dict(ppo_mini_batch_size=every // mini_batches)
            settings = ActorConfig(**ACTOR | size | (actor or {}))
            worker = make_worker(
                folder,
                settings,
                model_config=model_config,
                engine=engine,
                attention=attention,
                optimizer=dict(lr=rate, total_training_steps=updates, clip_grad=clip),
            )
            module = worker.engine.module
            # one more would be another number of steps than was asked for
            with watched(module, steps, updates * mini_batches + 1):
                for _ in range(updates):
                    worker.train_mini_batch(_batch(rows, temperature, settings))
        reference = adapted_like(module, model) or reference
    if not steps:
        raise InputError(
            "verl took no optimizer step: the norm of its gradient was not finite."
        )
    return Recorded(reference, steps)


def make_worker(
    folder: str,
    actor: Any,
    *,
    model_config: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    attention: str = "sdpa",
    optimizer: dict[str, Any] | None = None,
) -> Any:
    """Make verl's TrainingWorker of a model, on this CPU.

    Args:
        folder: where the model is saved.
        actor: verl's ActorConfig, of which it makes its loss; None: it has no loss.
        model_config, engine: fields of HFModelConfig and FSDPEngineConfig, over MODEL
            and ENGINE.
        attention: the implementation of attention, as transformers names it.
        optimizer: fields of FSDPOptimizerConfig.

    Returns:
        The worker, before its first step.

    Raises:
        NotInstalled: verl's worker, or what it imports, is missing.
    """
    with importing("verl"):
        from verl.workers.config import (
            FSDPEngineConfig,
            FSDPOptimizerConfig,
            HFModelConfig,
        )
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
        from verl.workers.utils.losses import ppo_loss

    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=folder,
                override_config={"attn_implementation": attention},
                **MODEL | (model_config or {}),
            ),
            engine_config=FSDPEngineConfig(**ENGINE | (engine or {})),
            optimizer_config=FSDPOptimizerConfig(
                **dict(lr=0.0, total_training_steps=1) | (optimizer or {})
            ),
            checkpoint_config=None,
        )
    )
    worker.reset()
    if actor is not None:
        worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def adapted_like(module: Any, model: nn.Module) -> TorchModel | None:
    """Return the reference of a model with adapters like those of a worker's module.
    Their weights are not the worker's: they come from its record.

    Args:
        module: which the worker trains.
        model: which it was made of; it gets the adapters.

    Returns:
        The reference; None where the module has no adapters.
    """
    adapted: Any = unwrapped(module)
    if not hasattr(adapted, "peft_config"):
        return None
    from peft import get_peft_model

    made: Any = get_peft_model(model, adapted.peft_config["default"])
    return TorchModel(made)


@dataclass(frozen=True)
class TwinSettings:
    """What a two-layer twin takes over of the configuration of a run.

    Attributes:
        objective: a name of `upref list`.
        hp: its hyperparameters but beta, the KL term's coefficient, which the actor has.
        config: the model's configuration of transformers, or the model's path.
        attention: the implementation of attention, as transformers names it.
        actor: fields of verl's ActorConfig: those of the KL term and of the entropy.
        engine: fields of its FSDPEngineConfig: how micro-batches and entropies are made.
        model: fields of its HFModelConfig: padding, fused heads, adapters.
    """

    objective: str
    hp: dict[str, Any]
    config: Any
    attention: str
    actor: dict[str, Any]
    engine: dict[str, Any]
    model: dict[str, Any]


def check_twin(settings: TwinSettings) -> StepReport:
    """Check one training step of a two-layer model that is set up as a run is.

    A setting that changes the gradient then shows before the run starts. The twin
    trains in float32, on this CPU, in verl's own worker.

    Args:
        settings: from `settings_of_twin`.

    Returns:
        The report of check_step.

    Raises:
        InputError: no twin of this kind of model can be made, or verl's worker fails.
    """
    objective = get(settings.objective)
    beta = settings.actor["kl_loss_coef"] if settings.actor["use_kl_loss"] else 0.0
    meant = replace(objective, kl=_kl_estimator(settings.actor)) if beta else objective
    model: Any = twin(settings.config, attn_implementation=settings.attention)
    return report(
        record_training,
        model,
        meant,
        settings.hp,
        dict(beta=beta, entropy_coef=settings.actor["entropy_coeff"]),
        actor=_actor_of_twin(settings, objective),
        engine=settings.engine | _micro_batches_of_twin(objective),
        model_config=settings.model,
        attention=model.config._attn_implementation,  # noqa: SLF001
    )


def _kl_estimator(actor: dict[str, Any]) -> str:
    """Return upref's name of the KL estimator that these settings name; a name that is
    not verl's own is returned as it is.
    """
    names = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
    return names.get(actor["kl_loss_type"], actor["kl_loss_type"])


def _actor_of_twin(settings: TwinSettings, objective: Objective) -> dict[str, Any]:
    """Return the fields of ActorConfig with which verl trains by the objective of
    upref.
    """
    parity = {"first": 0, "every": 0}  # check_twin compares the step itself
    return settings.actor | dict(
        clip_ratio_c=3.0,
        loss_agg_mode=verl_name(objective.level, objective.agg),
        policy_loss=dict(
            loss_mode=f"upref/{objective.name}",
            upref=settings.hp | {"parity": parity},
        ),
    )


def _micro_batches_of_twin(objective: Objective) -> dict[str, Any]:
    """Return the fields of FSDPEngineConfig that divide the eight rows of a check. All
    rows are in one micro-batch where the objective couples them; else two or so are in
    each.
    """
    if objective.batch_coupled:
        return dict(micro_batch_size_per_gpu=8, use_dynamic_bsz=False)
    return dict(micro_batch_size_per_gpu=2, max_token_len_per_gpu=40)


DIFFERS = 3  # exit status of a twin whose gradient is another; 1 is an error of Python
ACTOR_KEPT = ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff")
ENGINE_KEPT = (
    "use_dynamic_bsz",
    "entropy_from_logits_with_chunking",
    "entropy_checkpointing",
)
MODEL_KEPT = (
    "use_remove_padding",
    "use_fused_kernels",
    "enable_gradient_checkpointing",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
)


def _values_of(section: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return those of these names that a section has, with their values; None counts as
    absent.
    """
    return {k: section.get(k) for k in names if section.get(k) is not None}


def settings_of_twin(
    objective: str, hp: dict[str, Any], actor: Any, model: Any
) -> TwinSettings:
    """Read what a twin takes over of an actor's and a model's configuration.

    Args:
        objective: a name of `upref list`.
        hp: its hyperparameters, resolved.
        actor: verl's ActorConfig, or the section of hydra's configuration.
        model: verl's HFModelConfig, or the section of hydra's configuration.

    Returns:
        The settings, for `check_twin` or `stop_unless_twin_agrees`.

    Raises:
        InputError: the actor does not train by FSDP.
    """
    if (strategy := actor.get("strategy")) not in ("fsdp", "fsdp2"):
        raise InputError(
            f"step_check runs verl's FSDP worker, and strategy={strategy}: leave step_check out."
        )
    engine = actor.get("engine") or actor.get("fsdp_config") or {}
    kept_of_model = _values_of(model, MODEL_KEPT)
    if model.get("lora_rank"):
        kept_of_model["lora_rank"] = 4
    if kept_of_model.get("use_fused_kernels"):  # Triton's need a GPU
        kept_of_model["fused_kernel_options"] = {"impl_backend": "torch"}
    override = dict(model.get("override_config") or {})
    return TwinSettings(
        objective=objective,
        hp={name: value for name, value in hp.items() if name != "beta"},
        config=model.get("hf_config") or model.get("path"),
        attention=override.get("attn_implementation", "flash_attention_2"),
        actor=_values_of(actor, ACTOR_KEPT),
        engine=_values_of(engine, ENGINE_KEPT) | _values_of(actor, ENGINE_KEPT[:1]),
        model=kept_of_model,
    )


def stop_unless_twin_agrees(settings: TwinSettings) -> str:
    """Run `check_twin` in a process of its own, without GPUs and ranks.

    Args:
        settings: from `settings_of_twin`.

    Returns:
        The printed report.

    Raises:
        RuntimeError: the gradient is not the objective's; with the report.
        InputError: no twin of this run can be made.
    """
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    clean |= {
        "CUDA_VISIBLE_DEVICES": "",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "upref_frameworks.verl.training",
    }
    child = subprocess.run(
        [sys.executable, "-m", "upref_frameworks.verl.step"],
        input=pickle.dumps(settings),
        env=clean,
        capture_output=True,
    )
    said = child.stdout.decode().strip()
    wrong = child.stderr.decode().strip()
    if child.returncode == DIFFERS:
        raise RuntimeError(
            f"step_check: a two-layer twin of this run has a different gradient.\n{said}"
        )
    if child.returncode:
        raise InputError(
            f"step_check could not run: {wrong.splitlines()[-1][:300] if wrong else 'it was killed'}"
        )
    return said


def _batch(rows: Sequence[Row], temperature: float, settings: Any) -> Any:
    """Return the rows as verl's trainer hands them to its workers, with what it reads
    off the actor's configuration.

    Prompts are padded left and responses right; then the padding is taken out.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    batch = Padded.of(rows)
    prompt_width = max(len(row.prompt) for row in rows)
    width = batch.mask.shape[1]
    prompts = torch.zeros(len(rows), prompt_width, dtype=torch.long)
    is_prompt = torch.zeros_like(prompts)
    responses = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        prompts[i, prompt_width - len(row.prompt) :] = torch.tensor(row.prompt)
        is_prompt[i, prompt_width - len(row.prompt) :] = 1
        responses[i, : len(row.response)] = torch.tensor(row.response)
    attention = torch.cat([is_prompt, batch.is_token.long()], 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": batch.mask.long(),
        "advantages": batch.adv.float(),
    }
    if batch.old is not None:
        tensors["old_log_probs"] = batch.old.float()
    if batch.ref is not None:
        tensors["ref_log_prob"] = batch.ref.float()
    size = settings.ppo_mini_batch_size * settings.rollout_n
    plain = dict(
        temperature=temperature,
        calculate_entropy=settings.calculate_entropy or settings.entropy_coeff != 0,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=size,
        mini_batch_size=size,
        epochs=settings.ppo_epochs,
        seed=settings.data_loader_seed,
        dataloader_kwargs={"shuffle": settings.shuffle},
        compute_loss=True,
    )
    data = left_right_2_no_padding(tu.get_tensordict(tensors, {}))
    tu.assign_non_tensor(data, **plain)
    return data


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Undo at the end what verl replaces in the model's classes and modules of
    transformers. Otherwise the reference would be patched too.
    """
    classes = set()
    for layer in model.modules():
        for base in type(layer).__mro__:
            if base.__module__.startswith("transformers."):
                classes.add(base)
    modules = {cls.__module__ for cls in classes}
    modules.add("transformers.integrations.flash_attention")
    attributes_before = {cls: dict(vars(cls)) for cls in classes}
    names_before = {}  # of modules
    for module in modules:
        if module in sys.modules:
            names_before[module] = dict(vars(sys.modules[module]))
    try:
        yield
    finally:
        for cls, before in attributes_before.items():
            for name, value in vars(cls).copy().items():
                if name not in before:
                    delattr(cls, name)
                elif before[name] is not value:
                    setattr(cls, name, before[name])
        for module, before in names_before.items():
            vars(sys.modules[module]).update(before)


if __name__ == "__main__":
    try:
        its_report = check_twin(pickle.loads(sys.stdin.buffer.read()))
    except InputError as e:
        sys.exit(print(e, file=sys.stderr) or 2)
    print(its_report)
    sys.exit(0 if its_report else DIFFERS)
