# SPDX-License-Identifier: Apache-2.0
"""verl's unmodified PPOTrainer from rewards to its optimizer steps: its `_step_once`
makes the old and reference log-probabilities and the advantages.

Three parts of a run are stand-ins: the replay buffer hands over the rows, TransferQueue
is a table in this process, and the worker groups of ray call workers of this process.
"""

import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from upref.errors import importing
from upref.step.compare.record import Recorded, Step, watched
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import Row
from upref_frameworks.steps.adapters import fill_adapters
from upref_frameworks.steps.host import process_group
from upref_frameworks.verl.step import ACTOR, _restored, adapted_like, make_worker


class Table:
    """What verl's trainer calls of TransferQueue, as a table in this process."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: Any = None
    ) -> Any:
        """Return fields of the rows that have these keys, those that there are.

        Args:
            keys: of the rows.
            partition_id: not read: there is one partition.
            select_fields: names of fields; None: all.
        """
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        picked = [
            {k: v for k, v in self.rows[key].items() if k in (select_fields or [k])}
            for key in keys
        ]
        return list_of_dict_to_tensordict(picked)

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any, tags: Any = None
    ) -> Any:
        """Write fields of rows.

        Args:
            keys: of the rows.
            partition_id: not read: there is one partition.
            fields: a TensorDict with a row for each key.
            tags: of the rows; None: none.

        Returns:
            What verl passes on of the batch.
        """
        from verl.utils.transferqueue_utils import KVBatchMeta

        for name, column in fields.items():
            entries = column.unbind() if isinstance(column, torch.Tensor) else column
            for key, entry in zip(keys, entries, strict=True):
                self.rows.setdefault(key, {})[name] = entry
        tags = tags or [{} for _ in keys]
        return KVBatchMeta(keys=[*keys], tags=tags, partition_id=partition_id)


class WorkerGroup:
    """A worker of this process in the place of ray's group of workers."""

    def __init__(self, worker: Any, table: Table):
        self.worker = worker
        self.table = table
        self._dispatch_info = {"actor": [0]}

    def _read(self, batch: Any) -> Any:
        """Return the rows of a batch from the table, with what the trainer notes beside
        them.
        """
        from verl.utils import tensordict_utils as tu

        data = self.table.kv_batch_get(batch.keys, batch.partition_id)
        tu.assign_non_tensor(data, **batch.extra_info)
        return data

    def compute_log_prob(self, batch: Any) -> Any:
        """Let the worker compute log-probabilities, and write them to the table.

        Args:
            batch: keys of the rows.

        Returns:
            The batch.
        """
        output = self.worker.infer_batch(self._read(batch))
        columns = [k for k in output.keys() if isinstance(output[k], torch.Tensor)]  # noqa: SIM118
        self.table.kv_batch_put(batch.keys, batch.partition_id, output.select(*columns))
        return batch

    compute_ref_log_prob = compute_log_prob

    def update_actor(self, batch: Any) -> Any:
        """Let the worker train.

        Args:
            batch: keys of the rows.

        Returns:
            Its metrics.
        """
        from verl.utils import tensordict_utils as tu

        output = self.worker.train_mini_batch(self._read(batch))
        return {"metrics": {"mfu": 0.0} | tu.get(output, "metrics")}


def record_from_rewards(
    model: Any,
    rows: Sequence[Row],
    temperature: float,
    *,
    algorithm: dict[str, Any],
    actor: dict[str, Any],
    engine: dict[str, Any],
    updates: int = 1,
    group_size: int = 4,
    reference: Any = None,
    lora_rank: int = 0,
    rate: float = 0.005,
) -> Recorded:
    """Let verl's trainer prepare a batch and train on it, and record its steps.

    Args:
        model: a small causal language model of transformers; verl loads a copy of it.
        rows: with rewards and the sampler's log-probabilities.
        temperature: of the sampler.
        algorithm: fields of verl's section `algorithm`.
        actor: fields of ActorConfig, over ACTOR.
        engine: fields of FSDPEngineConfig.
        updates: mini-batches of a pass.
        group_size: responses to a prompt.
        reference: the reference model; None: there is none, or it is the model without
            its adapters.
        lora_rank: of adapters, which are not 0 at first; 0: there are none.
        rate: the learning rate of SGD.

    Returns:
        The steps, and the reference with which they are compared.

    Raises:
        InputError: verl is not installed, or its trainer fails.
    """
    before = TorchModel(model)
    steps: list[Step] = []
    with (
        process_group("verl's trainer", "verl"),
        _restored(model),
        tempfile.TemporaryDirectory() as folder,
    ):
        with importing("verl"):
            # the modules below ask for a platform when they are imported
            from upref_frameworks.verl import cpu as verl_cpu  # isort: skip
            from verl.trainer.ppo.v1 import trainer_base
            from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
            from verl.workers.config import ActorConfig
        model.save_pretrained(f"{folder}/model")
        size = len(rows) // group_size // updates
        fields = actor | dict(rollout_n=group_size, ppo_mini_batch_size=size)
        table = Table()
        with verl_cpu.on_cpu(), patch.object(trainer_base, "tq", table):
            settings = ActorConfig(**ACTOR | fields)
            adapters = dict(lora_rank=lora_rank, lora_alpha=8) if lora_rank else {}
            infers = dict(infer_micro_batch_size_per_gpu=len(rows) // 2)
            worker = make_worker(
                f"{folder}/model",
                settings,
                model_config=adapters,
                engine=engine | infers,
                optimizer=dict(optimizer="SGD", lr=rate, clip_grad=1e9),
            )
            fill_adapters(worker.engine.module)
            trainer: Any = object.__new__(PPOTrainerSync)
            trainer.config = _config(settings, temperature, algorithm)
            trainer.actor_rollout_wg = WorkerGroup(worker, table)
            trainer.use_critic = False
            trainer.use_reference_policy = settings.use_kl_loss
            trainer.ref_in_actor = bool(lora_rank)
            if reference is not None:
                reference.save_pretrained(f"{folder}/reference")
                other = make_worker(f"{folder}/reference", None, engine=engine | infers)
                trainer.ref_policy_wg = WorkerGroup(other, table)
            trainer.global_steps = 1
            trainer.curr_step_profile = False
            trainer.distillation_config = None
            trainer.checkpoint_manager = MagicMock()
            trainer.reward_loop_manager = MagicMock()
            batch = _put_samples(table, rows)
            trainer.replay_buffer = SimpleNamespace(sample=lambda **_: (batch, {}))
            trainer.tokenizer = SimpleNamespace(eos_token_id=2)
            expected = updates * settings.ppo_epochs
            with watched(worker.engine.module, steps, expected + 1):
                trainer._step_once({}, {}, len(rows) // group_size)  # noqa: SLF001
        adapted = adapted_like(worker.engine.module, model)
    return Recorded(adapted or before, steps)


def _config(settings: Any, temperature: float, algorithm: dict[str, Any]) -> Any:
    """Return the part of a run's configuration that the trainer reads."""
    from omegaconf import OmegaConf

    names = (
        "ppo_mini_batch_size",
        "ppo_epochs",
        "data_loader_seed",
        "shuffle",
        "calculate_entropy",
        "entropy_coeff",
        "loss_agg_mode",
        "loss_scale_factor",
        "use_kl_loss",
    )
    defaults = dict(
        adv_estimator="grpo",
        gamma=1.0,
        lam=1.0,
        use_kl_in_reward=False,
        rollout_correction=None,
    )
    rollout = dict(
        temperature=temperature, n=settings.rollout_n, calculate_log_probs=True
    )
    return OmegaConf.create(
        dict(
            algorithm=defaults | algorithm,
            actor_rollout_ref=dict(
                actor={name: getattr(settings, name) for name in names},
                rollout=rollout,
            ),
            trainer=dict(critic_warmup=0),
        )
    )


def _put_samples(table: Table, rows: Sequence[Row]) -> Any:
    """Write the rows to the table as verl's agent loop does, and return the batch."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    keys = []
    samples = []
    tags = []
    for i, row in enumerate(rows):
        output = AgentLoopOutput(
            prompt_ids=row.prompt,
            response_ids=row.response,
            response_mask=[int(t) for t in row.trains],
            response_logprobs=row.sampler,
            reward_score=row.reward,
            num_turns=2,
            metrics={},
        ).as_dict()
        uid = f"prompt{row.group}"
        keys.append(f"{uid}_{i}_0")
        names = ("prompts", "responses", "response_mask", "rollout_log_probs")
        sample = {name: output[name] for name in (*names, "rm_scores")}
        sample["loss_mask"] = sample["response_mask"]
        sample["input_ids"] = torch.tensor(row.ids)
        sample["position_ids"] = torch.arange(len(row.ids))
        sample["uid"] = uid
        samples.append(sample)
        tags.append(dict(seq_len=len(row.ids)))
    return table.kv_batch_put(keys, "train", list_of_dict_to_tensordict(samples), tags)
