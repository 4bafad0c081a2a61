# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's unmodified ActorPPOTrainer as a step: its own Actor, replay buffer and
loss. With rewards, its own experience maker before.

DeepSpeed's engine, which needs a build of its own, is replaced by what it does with a
loss: it divides each by the number of micro-batches of an optimizer step. Ray's groups
of workers are replaced by one worker of this process. vLLM and FlashAttention are not
called.
"""

import copy
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from upref.errors import InputError, NotInstalled, importing
from upref.step.compare.record import Recorded, Step, watched
from upref.step.inputs.families import END
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import Padded, Row
from upref_frameworks.steps.adapters import fill_adapters
from upref_frameworks.steps.host import process_group

ABSENT = (
    "deepspeed",
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils.distributed",
    "vllm",
    "ray",
    "ray.util.placement_group",
    "ray.util.scheduling_strategies",
    "torchdata.stateful_dataloader",
    "openrlhf.trainer.ray.vllm_engine",
    "openrlhf.utils.deepspeed",
    "openrlhf.utils.deepspeed.deepspeed_utils",
)


class Engine:
    """What OpenRLHF's strategy does with DeepSpeed, without it.

    The methods are those of its DeepspeedStrategy that the trainer calls.

    Args:
        args: OpenRLHF's settings.
        micro_batches: of an optimizer step, by which each loss is divided.
        clip: bound of the gradient's norm; 0: it is not clipped.
    """

    ring_attn_group = None

    def __init__(self, args: Any, micro_batches: int, clip: float):
        """Keep the settings, and make a mesh of this one process."""
        self.args = args
        self.accumulated_gradient = micro_batches
        self.clip = clip
        self.done = 0
        self.ds_device_mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (1,), mesh_dim_names=("dp",)
        )

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        """Add the gradient of a micro-batch's loss to the parameters' gradients.

        Args:
            loss: a scalar. It is divided by the number of micro-batches, unless batches
                are dynamic: OpenRLHF divides those itself, and sets DeepSpeed's
                gradient_accumulation_steps to 1.
            *_: what else the trainer passes.
        """
        dynamic = self.args.train.dynamic_batch_enable
        (loss if dynamic else loss / self.accumulated_gradient).backward()

    def optimizer_step(
        self, optimizer: Any, actor: nn.Module, *_: Any, **__: Any
    ) -> None:
        """Let the optimizer step after the last micro-batch of each step.

        Args:
            optimizer: of the actor.
            actor: whose gradients are clipped before, and set to 0 afterwards.
            *_, **__: what else the trainer passes.
        """
        self.done += 1
        if (
            self.args.train.dynamic_batch_enable
            or self.done % self.accumulated_gradient == 0
        ):
            torch.nn.utils.clip_grad_norm_(actor.parameters(), self.clip or torch.inf)
            optimizer.step()
            optimizer.zero_grad()

    def is_rank_0(self) -> bool:
        """Return False: what rank 0 alone does is left out."""
        return False

    def all_reduce(self, x: Any, op: str = "mean") -> Any:
        """Return x, since there is one process."""
        return x

    def get_grad_norm(self, model: Any) -> float:
        """Return 0: the norm is not measured here."""
        return 0.0


class WorkerGroup:
    """One worker of this process, in the place of ray's group of workers."""

    def __init__(self, worker: Any):
        self.worker = worker

    def async_run_method_batch(self, method_name: str, **columns: Any) -> list[Any]:
        """Call a method of the worker on each element of the columns.

        Args:
            method_name: of the worker.
            **columns: argument -> its value in each call.

        Returns:
            A list of what each worker returns: of one, the results of its calls.
        """
        return [self.worker.execute_batch(method_name, columns, 0, None)]

    def async_run_method(self, method_name: str, **arguments: Any) -> list[Any]:
        """Call a method of the worker once.

        Args:
            method_name: of the worker.
            **arguments: of the method.

        Returns:
            A list of what each worker returns.
        """
        return [getattr(self.worker, method_name)(**arguments)]


@dataclass
class Opened:
    """OpenRLHF's trainer of the actor, before it trains.

    Attributes:
        trainer: an ActorPPOTrainer.
        actor: the Actor that it trains.
        args: OpenRLHF's settings.
        classes: OpenRLHF's own.
        steps: the optimizer steps that it takes.
        load: loads a model as an Actor.
    """

    trainer: Any
    actor: Any
    args: SimpleNamespace
    classes: SimpleNamespace
    steps: list[Step]
    load: Callable[..., Any]


def _arguments(
    n: int, beta: float, max_tokens: int, epochs: int, actor: dict[str, Any]
) -> SimpleNamespace:
    """Return the arguments that OpenRLHF's trainer reads, by section. Those of this
    function are as for `opened_trainer`.
    """
    return SimpleNamespace(
        train=SimpleNamespace(
            max_epochs=epochs,
            dynamic_batch_enable=bool(max_tokens),
            batch_size=n,
            max_tokens_per_gpu=max_tokens,
            colocate_all=False,
            async_enable=False,
        ),
        actor=SimpleNamespace(
            **dict(
                eps_clip_low_high=(0.2, 0.2),
                dual_clip=None,
                loss_agg_mode="token-mean",
                policy_loss_type="ppo",
                aux_loss_coef=0.0,
                entropy_coef=None,
            )
            | actor
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                is_correction_level="off",
                is_correction_mode="mask",
                is_correction_gating="ratio",
                is_correction_threshold=(0.5, 5.0),
            ),
            kl=SimpleNamespace(
                use_loss=beta > 0,
                init_coef=beta,
                estimator="k3",
                unbiased_gradient=False,
            ),
        ),
        ds=SimpleNamespace(
            packing_samples=False, tensor_parallel_size=1, ring_attn_size=1
        ),
        rollout=SimpleNamespace(batch_size=n, n_samples_per_prompt=1),
        vllm=SimpleNamespace(sync_backend="gloo"),
    )


@contextmanager
def opened_trainer(
    model: Any,
    n: int,
    temperature: float,
    *,
    micro: int = 2,
    clip: float = 0.0,
    attention: str = "sdpa",
    beta: float = 0.0,
    max_tokens: int = 0,
    updates: int = 1,
    dtype: torch.dtype = torch.float32,
    epochs: int = 1,
    rate: float = 0.0,
    lora_rank: int = 0,
    **actor: Any,
) -> Iterator[Opened]:
    """Make OpenRLHF's trainer of the actor, and record its steps in this context.

    Args:
        model: a small causal language model of transformers; OpenRLHF loads a copy of
            it.
        n: the number of rows.
        temperature: by which OpenRLHF divides logits.
        micro: responses of a micro-batch.
        clip: bound of the gradient's norm; 0: it is not clipped.
        attention: the implementation of attention, as transformers names it.
        beta: kl.init_coef, with kl.use_loss and estimator k3.
        max_tokens: tokens of a dynamic micro-batch; 0: micro-batches have `micro`
            responses.
        updates: optimizer steps of an epoch, on equally many rows each, which its
            loader shuffles.
        dtype: of the parameters that it loads.
        epochs: passes over the rows.
        rate: the learning rate of SGD.
        lora_rank: of adapters, which are not 0 at first; 0: there are none.
        **actor: arguments of its section `actor`: eps_clip_low_high, dual_clip,
            loss_agg_mode, policy_loss_type, ...

    Raises:
        InputError: OpenRLHF is not installed, or its trainer fails.
    """
    classes = _import_classes()
    args = _arguments(n, beta, max_tokens, epochs, actor)
    steps = list[Step]()
    with (
        process_group("OpenRLHF's trainer", "openrlhf"),
        ExitStack() as stack,
    ):
        for name in ("synchronize", "empty_cache"):
            stack.enter_context(patch(f"torch.cuda.{name}", return_value=None))

        def load(weights: Any, **more: Any) -> Any:
            """Load a model as OpenRLHF's Actor."""
            with (
                tempfile.TemporaryDirectory() as folder,
                # it has halves only
                patch(
                    "openrlhf.utils.utils.convert_to_torch_dtype", return_value=dtype
                ),
            ):
                weights.save_pretrained(folder)
                return classes.Actor(
                    folder,
                    attn_implementation=attention,
                    temperature=temperature,
                    **more,
                )

        # at the default of 16 the KL estimate of a token passes 10, where OpenRLHF clamps it
        lora = dict(lora_rank=lora_rank, lora_alpha=8, target_modules="all-linear")
        actor_model = load(model, **lora if lora_rank else {})
        fill_adapters(actor_model)
        optimizer = torch.optim.SGD(actor_model.parameters(), lr=rate)
        with patch("torch.cuda.current_device", return_value=0):
            trainer = classes.ActorPPOTrainer(
                Engine(args, n // micro // updates, clip),
                actor_model,
                None,
                optimizer,
                MagicMock(),
                micro_train_batch_size=micro,
                dataloader_pin_memory=False,
                buffer_cpu_offload=False,
            )
        stack.enter_context(patch("torch.cuda.current_device", return_value="cpu"))
        # one more than it should take, so that an extra step is noticed
        with watched(actor_model.model, steps, updates * epochs + 1):
            yield Opened(trainer, actor_model, args, classes, steps, load)


def record_training(
    model: Any, rows: Sequence[Row], temperature: float, **settings: Any
) -> Recorded:
    """Let OpenRLHF's trainer take optimizer steps on rows, and record them.

    Args:
        model: a small causal language model of transformers; OpenRLHF loads a copy of
            it.
        rows: with old and reference log-probabilities.
        temperature: by which OpenRLHF divides logits.
        **settings: the other arguments of `opened_trainer`.

    Returns:
        The steps, and this model as the reference.

    Raises:
        InputError: OpenRLHF is not installed, or its trainer fails, or it took no step.
    """
    reference = TorchModel(model)
    with opened_trainer(model, len(rows), temperature, **settings) as opened:
        experience = _experience(opened.classes.Experience, rows)
        opened.trainer.replay_buffer.append(experience)
        opened.trainer.ppo_train(settings.get("beta", 0.0))
    if not opened.steps:
        raise InputError("OpenRLHF took no optimizer step on these rows.")
    return Recorded(reference, opened.steps)


def record_from_rewards(
    model: Any,
    rows: Sequence[Row],
    temperature: float,
    estimator: str,
    *,
    group_size: int = 4,
    reference: Any = None,
    **settings: Any,
) -> Recorded:
    """Let OpenRLHF's trainer make experiences of rows and train on them, and record its
    steps.

    Args:
        model: a small causal language model of transformers; OpenRLHF loads a copy of
            it.
        rows: with rewards and the sampler's log-probabilities.
        temperature: of the sampler.
        estimator: its option algo.advantage.estimator.
        group_size: responses to a prompt.
        reference: the reference model; None: there is none.
        **settings: the other arguments of `opened_trainer`.

    Returns:
        The steps, and this model as the one that is compared.

    Raises:
        InputError: OpenRLHF is not installed, or its trainer fails, or it took no step.
    """
    before = TorchModel(model)
    if settings.get("lora_rank"):
        reference = model  # OpenRLHF loads it without adapters
    with opened_trainer(model, len(rows), temperature, **settings) as opened:
        _set_for_rewards(opened.args, len(rows), group_size, estimator)
        _train_on_rewards(opened, rows, reference)
        adapters = getattr(opened.actor.model, "peft_config", None)
    if not opened.steps:
        raise InputError("OpenRLHF took no optimizer step on these rows.")
    if adapters:
        before = TorchModel(_with_adapters(model, adapters["default"]))
    return Recorded(before, opened.steps)


def _set_for_rewards(args: Any, n: int, group_size: int, estimator: str) -> None:
    """Set the options that OpenRLHF's PPO trainer reads and its actor's does not.

    Args:
        args: the options of the actor's trainer.
        n: responses.
        group_size: responses to a prompt.
        estimator: of the advantages.
    """
    args.rollout.batch_size = n // group_size
    args.rollout.n_samples_per_prompt = group_size
    args.rollout.micro_batch_size = group_size // 2
    args.train.colocate_actor_ref = False
    args.algo.advantage.estimator = estimator
    args.algo.advantage.gamma = 1.0
    args.algo.kl.target = None
    args.reward = SimpleNamespace(clip_range=None)
    args.critic = SimpleNamespace(freezing_steps=-1)
    args.ds.enable_sleep = False
    args.logger = SimpleNamespace(wandb=SimpleNamespace(key=None), tensorboard_dir=None)
    args.ckpt = SimpleNamespace(best_metric_key="none")


def _train_on_rewards(opened: Opened, rows: Sequence[Row], reference: Any) -> None:
    """Let OpenRLHF's PPO trainer make experiences of rows, and train on them. The steps
    are recorded in `opened.steps`.

    Args:
        opened: the actor's trainer.
        rows: with rewards.
        reference: the reference model, or None.
    """
    classes = opened.classes
    strategy = opened.trainer.strategy
    policy: Any = object.__new__(classes.PolicyModelActor)
    policy.trainer = opened.trainer
    policy.actor = opened.actor
    policy.strategy = strategy
    others = None
    if reference is not None:
        other: Any = object.__new__(classes.ReferenceModelActor)
        other.model = opened.load(reference).eval()
        other.strategy = strategy
        others = WorkerGroup(other)
    tokenizer = MagicMock(pad_token_id=END)
    with patch_ray(classes):
        trainer = classes.BasePPOTrainer(
            strategy, WorkerGroup(policy), None, None, others, None, tokenizer
        )
        generator = object.__new__(classes.SamplesGenerator)
        samples = [
            generator._process_response_into_experience(_response(row)) for row in rows
        ]
        trainer.train_step(samples, 1)


def _with_adapters(model: Any, config: Any) -> Any:
    """Return a copy of a model with adapters of PEFT.

    Args:
        model: without adapters.
        config: of the adapters that OpenRLHF made.
    """
    from peft import get_peft_model

    config = copy.copy(config)
    config.base_model_name_or_path = None  # the folder that OpenRLHF loaded is gone
    adapted: Any = get_peft_model(copy.deepcopy(model), config)
    return adapted


def patch_ray(classes: Any) -> ExitStack:
    """Let what OpenRLHF's modules get from ray be the thing itself.

    Args:
        classes: OpenRLHF's own.

    Returns:
        A context.
    """
    here = SimpleNamespace(get=_itself, put=_itself)
    stack = ExitStack()
    for cls in (classes.BasePPOTrainer, classes.RemoteExperienceMaker):
        stack.enter_context(patch(f"{cls.__module__}.ray", here))
    return stack


def _itself(x: Any) -> Any:
    """Return the argument."""
    return x


def _undecorated(cls: Any = None, **_: Any) -> Any:
    """Return a class as it is, as a decorator with or without arguments."""
    return cls or _itself


def _response(row: Row) -> dict[str, Any]:
    """Return a row as OpenRLHF's vLLM engine returns a response; each trained token is
    an action of its own.
    """
    start = len(row.prompt)
    ranges = [
        (start + i, start + i + 1) for i, trains in enumerate(row.trains) if trains
    ]
    return dict(
        prompt=str(row.group),
        label="",
        observation_tokens=row.ids,
        action_ranges=ranges,
        reward=row.reward,
        scores=row.reward,
        rollout_log_probs=[0.0] * start + list(row.sampler or []),
        truncated=row.response[-1] != END,
    )


def _experience(kind: Any, rows: Sequence[Row]) -> Any:
    """Return the rows as OpenRLHF's samples generator makes them.

    Sequences are padded right. Masks and arrays are shifted by one, and so one token
    shorter.
    """
    width = max(len(r.ids) for r in rows)
    batch = Padded.of(rows)

    def place(x: torch.Tensor | None) -> torch.Tensor | None:
        """Put the numbers of each response at its tokens' slots of the shifted
        sequence; 0 elsewhere. None stays None.
        """
        if x is None:
            return None
        out = torch.zeros(len(rows), width - 1)
        for i, r in enumerate(rows):
            p = len(r.prompt)
            n = len(r.response)
            out[i, p - 1 : p - 1 + n] = x[i, :n]
        return out

    def pad(f: Callable[[Row], list[int]]) -> torch.Tensor:
        """Return f of each row, padded right to the longest row."""
        return torch.tensor([f(r) + [0] * (width - len(r.ids)) for r in rows])

    return kind(
        sequences=pad(lambda r: r.ids),
        attention_mask=pad(lambda r: [1] * len(r.ids)),
        action_mask=place(batch.mask),
        action_log_probs=place(batch.old),
        base_action_log_probs=place(batch.ref),
        advantages=place(batch.adv),
        total_length=torch.tensor([len(r.ids) for r in rows]),
    )


def _import_classes() -> SimpleNamespace:
    """Import and return OpenRLHF's classes. Stand-ins replace the modules that are not
    called here, until these classes are imported. Raise NotInstalled where OpenRLHF or
    PEFT cannot be imported.
    """
    with importing("peft"):
        import peft  # noqa: F401
        import transformers.integrations.deepspeed  # noqa: F401
    if importlib.util.find_spec("openrlhf") is None:
        raise NotInstalled(
            "OpenRLHF is not installed: `pip install --no-deps openrlhf==0.11.2`."
        )
    absent = {name: MagicMock() for name in ABSENT if name not in sys.modules}
    sys.modules.update(absent)
    try:
        with (
            patch("torch.compile", lambda f, **_: f),
            # its workers are then classes of this process
            patch.object(sys.modules["ray"], "remote", _undecorated),
        ):
            from openrlhf.models import Actor
            from openrlhf.trainer.ppo_trainer import BasePPOTrainer
            from openrlhf.trainer.ppo_utils.experience import Experience
            from openrlhf.trainer.ppo_utils.experience_maker import (
                RemoteExperienceMaker,
            )
            from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
            from openrlhf.trainer.ray.launcher import ReferenceModelActor
            from openrlhf.trainer.ray.ppo_actor import (
                ActorPPOTrainer,
                PolicyModelActor,
            )
    except ImportError as e:
        raise NotInstalled(f"OpenRLHF does not import here: {e}") from e
    finally:
        for name in absent:  # whoever asks for DeepSpeed from here on finds none
            del sys.modules[name]
    return SimpleNamespace(
        Actor=Actor,
        ActorPPOTrainer=ActorPPOTrainer,
        BasePPOTrainer=BasePPOTrainer,
        Experience=Experience,
        PolicyModelActor=PolicyModelActor,
        ReferenceModelActor=ReferenceModelActor,
        RemoteExperienceMaker=RemoteExperienceMaker,
        SamplesGenerator=SamplesGenerator,
    )
