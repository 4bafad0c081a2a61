# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's unmodified ActorPPOTrainer as a step: its own Actor, replay buffer and
loss.

DeepSpeed's engine, which needs a build of its own, is replaced by what it does with a
loss: it divides each by the number of micro-batches of an optimizer step. Ray, vLLM and
FlashAttention are not called.
"""

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from upref.errors import InputError, NotInstalled, importing
from upref.step.compare.record import Recorded, Step, watched
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import Padded, Row
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
        self.args = args
        self.accumulated_gradient = micro_batches
        self.clip = clip
        self.done = 0
        self.ds_device_mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (1,), mesh_dim_names=("dp",)
        )

    def backward(self, loss: torch.Tensor, *_: Any) -> None:
        # then OpenRLHF sets gradient_accumulation_steps to 1
        """Add the gradient of a micro-batch's loss to the parameters' gradients.

        Args:
            loss: a scalar. It is divided by the number of micro-batches, unless batches
                are dynamic: OpenRLHF divides those itself.
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


def record_training(
    model: Any,
    rows: Sequence[Row],
    temperature: float,
    *,
    micro: int = 2,
    clip: float = 0.0,
    attention: str = "sdpa",
    beta: float = 0.0,
    max_tokens: int = 0,
    updates: int = 1,
    dtype: torch.dtype = torch.float32,
    **actor: Any,
) -> Recorded:
    """Let OpenRLHF's trainer take optimizer steps on rows, and record them.

    Args:
        model: a small causal language model of transformers; OpenRLHF loads a copy of
            it.
        rows: with old and reference log-probabilities.
        temperature: by which OpenRLHF divides logits.
        micro: responses of a micro-batch.
        clip: bound of the gradient's norm; 0: it is not clipped.
        attention: the implementation of attention, as transformers names it.
        beta: kl.init_coef, with kl.use_loss and estimator k3.
        max_tokens: tokens of a dynamic micro-batch; 0: micro-batches have `micro`
            responses.
        updates: optimizer steps, on equally many rows each, which its loader shuffles.
        dtype: of the parameters that it loads.
        **actor: arguments of its section `actor`: eps_clip_low_high, dual_clip,
            loss_agg_mode, policy_loss_type, ...

    Returns:
        The steps, and this model as the reference.

    Raises:
        InputError: OpenRLHF is not installed, or its trainer fails, or it took no step.
    """
    imported = _import_classes()
    reference = TorchModel(model)
    steps = list[Step]()
    n = len(rows)
    args = SimpleNamespace(
        train=SimpleNamespace(
            max_epochs=1,
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
    with (
        process_group("OpenRLHF's trainer", "openrlhf"),
        tempfile.TemporaryDirectory() as folder,
        ExitStack() as stack,
    ):
        model.save_pretrained(folder)
        for name, value in {"synchronize": None, "current_device": 0}.items():
            stack.enter_context(patch(f"torch.cuda.{name}", return_value=value))
        # it has halves only
        with patch("openrlhf.utils.utils.convert_to_torch_dtype", return_value=dtype):
            actor_model = imported.Actor(
                folder, attn_implementation=attention, temperature=temperature
            )
        optimizer = torch.optim.SGD(actor_model.parameters(), lr=0.0)
        trainer = imported.ActorPPOTrainer(
            Engine(args, n // micro // updates, clip),
            actor_model,
            None,
            optimizer,
            MagicMock(),
            micro_train_batch_size=micro,
            dataloader_pin_memory=False,
            buffer_cpu_offload=False,
        )
        trainer.replay_buffer.append(_experience(imported.Experience, rows))
        stack.enter_context(patch("torch.cuda.current_device", return_value="cpu"))
        # one more than it should take, so that an extra step is noticed
        with watched(actor_model.model, steps, updates + 1):
            trainer.ppo_train(beta)
    if not steps:
        raise InputError("OpenRLHF took no optimizer step on these rows.")
    return Recorded(reference, steps)


def _experience(kind: Any, rows: Sequence[Row]) -> Any:
    """Return the rows as OpenRLHF's samples generator makes them.

    Sequences are padded right. Masks and arrays are shifted by one, and so one token
    shorter.
    """
    width = max(len(r.ids) for r in rows)
    batch = Padded.of(rows)

    def place(x: torch.Tensor | None) -> torch.Tensor | None:
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
    """Import and return OpenRLHF's classes. Meanwhile stand-ins replace the modules
    that are not called here.
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
        with patch("torch.compile", lambda f, **_: f):
            from openrlhf.models import Actor
            from openrlhf.trainer.ppo_utils.experience import Experience
            from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
    except ImportError as e:
        raise NotInstalled(f"OpenRLHF does not import here: {e}") from e
    finally:
        for name in absent:  # whoever asks for DeepSpeed from here on finds none
            del sys.modules[name]
    return SimpleNamespace(
        Actor=Actor, Experience=Experience, ActorPPOTrainer=ActorPPOTrainer
    )
