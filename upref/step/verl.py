# SPDX-License-Identifier: Apache-2.0
"""verl's unmodified TrainingWorker as a step: FSDP2 over gloo in this process, without Ray.

verl takes the old log-probabilities from its batch, so that one optimizer step shows every regime.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from upref.errors import InputError, importing
from upref.step.record import Recorded, Step, watched
from upref.step.reference import TorchModel, unwrapped
from upref.step.rows import Padded, Row

ENGINE = dict(strategy="fsdp2", mixed_precision=dict(param_dtype="fp32", reduce_dtype="fp32"), use_torch_compile=False,
              micro_batch_size_per_gpu=4, use_dynamic_bsz=False, max_token_len_per_gpu=4096)  # fmt: skip
MODEL = dict(load_tokenizer=False, enable_gradient_checkpointing=False, use_remove_padding=False)
ACTOR = dict(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=4, clip_ratio_c=1e9)


def trained(
    model: Any, rows: Sequence[Row], temperature: float, *, model_config: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None, actor: dict[str, Any] | None = None, clip: float = 1e9,
    attention: str = "sdpa",
) -> Recorded:  # fmt: skip
    """One optimizer step of verl's worker on these rows, recorded.

    Args:
        model: a small causal language model of transformers; verl loads a copy of it.
        rows: with old and reference log-probabilities.
        model_config, engine, actor: fields of HFModelConfig, FSDPEngineConfig, ActorConfig, over MODEL, ENGINE, ACTOR.
        clip: bound of the gradient's norm.

    Raises:
        InputError: verl is not installed, or its worker fails.
    """
    reference = TorchModel(model)
    steps: list[Step] = []
    with _alone(), _restored(model), tempfile.TemporaryDirectory() as folder:
        with importing("verl"):
            from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
            from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
            from verl.workers.utils.losses import ppo_loss

            from upref.step import verl_cpu  # noqa: F401  before verl asks for a device
        model.save_pretrained(folder)
        try:
            settings = ActorConfig(**ACTOR | (actor or {}))
            worker = TrainingWorker(TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(path=folder, override_config={"attn_implementation": attention},
                                           **MODEL | (model_config or {})),
                engine_config=FSDPEngineConfig(**ENGINE | (engine or {})),
                optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1, clip_grad=clip),
                checkpoint_config=None,
            ))  # fmt: skip
            worker.reset()
            worker.set_loss_fn(lambda **kw: ppo_loss(config=settings, **kw))
            module = worker.engine.module
            with watched(module, steps, 1):
                worker.train_mini_batch(_batch(rows, temperature, settings))
        except InputError:
            raise
        except Exception as e:
            raise InputError(f"verl's worker fails: {type(e).__name__}: {' '.join(str(e).split())[:200]}") from e
        if (model_config or {}).get("lora_rank"):
            reference = TorchModel(_adapted(model, unwrapped(module)))
    if not steps:
        raise InputError("verl took no optimizer step: the norm of its gradient was not finite.")
    return Recorded(reference, steps)


def _adapted(model: nn.Module, module: Any) -> nn.Module:
    """The model with adapters like the worker's; their weights come from the record."""
    from peft import get_peft_model

    return get_peft_model(model, module.peft_config["default"])


def _batch(rows: Sequence[Row], temperature: float, settings: Any) -> Any:
    """As verl's trainer hands it to its workers: prompts padded left, responses right, then without padding."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    b = Padded.of(rows)
    P, width = max(len(r.prompt) for r in rows), b.mask.shape[1]
    prompts = torch.tensor([[0] * (P - len(r.prompt)) + r.prompt for r in rows])
    responses = torch.tensor([r.response + [0] * (width - len(r.response)) for r in rows])
    before = torch.tensor([[0] * (P - len(r.prompt)) + [1] * len(r.prompt) for r in rows])
    attention = torch.cat([before, b.here.long()], 1)
    tensors = {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": b.mask.long(), "advantages": b.adv.float(),
    }  # fmt: skip
    tensors |= {k: v.float() for k, v in {"old_log_probs": b.old, "ref_log_prob": b.ref}.items() if v is not None}
    n = len(rows)
    plain = dict(
        temperature=temperature, calculate_entropy=settings.entropy_coeff != 0, distillation_use_topk=False,
        distillation_only=False, global_batch_size=n, mini_batch_size=n, epochs=1, seed=0,
        dataloader_kwargs={"shuffle": False}, compute_loss=True,
    )  # fmt: skip
    data = left_right_2_no_padding(tu.get_tensordict(tensors, {}))
    tu.assign_non_tensor(data, **plain)
    return data


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A process group of one rank, if there is none; quiet."""
    before = os.environ.copy()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "HF_HUB_OFFLINE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "VERL_PLATFORM": "cpu",
                   "VERL_ENGINE_DEVICE": "cuda",  # verl's FSDP engine is registered for cuda and npu
                    "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    mine = not torch.distributed.is_initialized()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if mine:
                torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        if mine and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """verl replaces forwards on the classes of transformers: set back, or the reference would be patched too."""
    classes = {c for m in model.modules() for c in type(m).__mro__ if c.__module__.startswith("transformers.")}
    kept = {c: dict(vars(c)) for c in classes}
    modules = {c.__module__ for c in classes} | {"transformers.integrations.flash_attention"}
    names = {m: dict(vars(sys.modules[m])) for m in modules if m in sys.modules}
    try:
        yield
    finally:
        for c, had in kept.items():
            for k, v in vars(c).copy().items():
                if k not in had:
                    delattr(c, k)
                elif had[k] is not v:
                    setattr(c, k, had[k])
        for m, had in names.items():
            vars(sys.modules[m]).update(had)
