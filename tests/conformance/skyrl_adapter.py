# SPDX-License-Identifier: Apache-2.0
"""An adapter for SkyRL: the unmodified `forward_backward` and `optim_step` of its
policy worker, after its trainer's own scaling of the advantages. From rewards, its
trainer's own preparation before. It needs no import of upref.

It runs where skyrl 0.3.0, skyrl-gym, ray, omegaconf, loguru, peft and cloudpathlib can
be imported.
"""

import contextlib
import copy
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
import types
import typing
import warnings

import torch
import typing_extensions
from loguru import logger
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

LENGTH = 16  # max_seq_len: what dr_grpo divides a sum over tokens by
PAD = 2  # the end token
FIXED_CLIP = dict(eps_clip_low=0.2, eps_clip_high=0.2)

# objective -> the fields of AlgorithmConfig that ask for it
FIELDS = {
    "ppo_clip": FIXED_CLIP,
    "dapo": dict(eps_clip_low=0.2, eps_clip_high=0.28),
    "grpo": FIXED_CLIP | dict(loss_reduction="sequence_mean"),
    "dr_grpo": FIXED_CLIP | dict(loss_reduction="seq_mean_token_sum_norm"),
    "gspo": dict(
        policy_loss_type="gspo",
        loss_reduction="sequence_mean",
        eps_clip_low=3e-4,
        eps_clip_high=4e-4,
    ),
    "sapo": dict(policy_loss_type="sapo", loss_reduction="sequence_mean"),
    "cispo": dict(policy_loss_type="cispo"),
}
# estimator of advantages -> the fields of AlgorithmConfig that ask for it
ESTIMATORS = {
    "group_mean": dict(grpo_norm_by_std=False),
    "group_norm": dict(grpo_norm_by_std=True),
    "leave_one_out": dict(advantage_estimator="rloo"),
}
# settings that `upref diff` tries where the step differs from another trainer's
ALTERNATIVES = (
    dict(loss_reduction="token_mean"),
    dict(loss_reduction="sequence_mean"),
    dict(temperature=1.0),
    dict(eps_clip_high=0.2),
    dict(eps_clip_high=0.28),
    dict(policy_loss_type="gspo"),
    dict(use_kl_loss=False),
    dict(use_entropy_loss=False),
    dict(max_grad_norm=0.0),
    dict(max_grad_norm=1.0),
)
# where it makes the advantages, these too
PREPARING = (
    dict(grpo_norm_by_std=True),
    dict(grpo_norm_by_std=False),
    dict(advantage_estimator="rloo"),
)
# CISPO has no lower bound: a ratio is never below 0.
CISPO_CLIP = dict(cispo_eps_clip_low=1.0, cispo_eps_clip_high=4.0)


def prepare_imports():
    """Let SkyRL be imported on Python 3.11 and without flash-attn, of which a padded
    batch calls nothing.
    """
    if sys.version_info < (3, 12):  # pydantic refuses typing's own there
        typing.TypedDict = typing_extensions.TypedDict
    if importlib.util.find_spec("flash_attn") is None:
        for name in ("flash_attn", "flash_attn.bert_padding"):
            spec = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = importlib.util.module_from_spec(spec)
        padding = sys.modules["flash_attn.bert_padding"]
        padding.pad_input = padding.unpad_input = need_flash_attention


def need_flash_attention(*_, **__):
    """Stand for a function of flash-attn, which is not installed."""
    raise ImportError("this call needs flash-attn, which is not installed")


prepare_imports()
from skyrl.backends.skyrl_train.distributed import fsdp_strategy
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.distributed.ulysses import (
    set_ulysses_sequence_parallel_group,
)
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase, RefWorkerBase
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.utils import apply_overlong_filtering
from skyrl.train.trainer import RayPPOTrainer


class SkyRL:
    """The policy worker of the installed SkyRL: alone, or as one of two ranks of FSDP
    that divide the rows or, by Ulysses, the tokens of each row.
    """

    name = f"skyrl {importlib.metadata.version('skyrl')}"
    changed = types.MappingProxyType({})  # over the settings of each case

    def supports(self, case):
        """Return "" for a case that SkyRL can run, else why not."""
        if case.objective not in FIELDS:
            return f"SkyRL has no policy_loss_type of {case.objective}"
        if case.parallel not in ("data", "sequence"):
            return f"the FSDP worker has no {case.parallel} parallelism"
        if case.advantages and case.advantages not in ESTIMATORS:
            return f"SkyRL has no estimator of {case.advantages}"
        if case.ddof != 1:
            return "the standard deviation divides by G - 1"
        return ""

    def scale(self, case):
        # seq_mean_token_sum_norm divides by max_seq_len, as its documentation says.
        return 1 / LENGTH if case.objective == "dr_grpo" else 1.0

    def algorithm(self, case):
        """Return SkyRL's settings of the algorithm for a case."""
        fields = dict(FIELDS[case.objective]) | dict(
            temperature=case.temperature,
            max_seq_len=LENGTH,
            use_kl_loss=case.beta > 0,
            kl_loss_coef=case.beta,
            kl_estimator_type="k3",
            use_entropy_loss=case.entropy_coef > 0,
            entropy_loss_coef=case.entropy_coef,
        )
        if "c" in case.hp:
            fields |= dict(policy_loss_type="dual_clip", clip_ratio_c=case.hp["c"])
        if case.advantages:
            fields |= ESTIMATORS[case.advantages]
        return fields

    def settings(self, case):
        """Return the settings in which a case runs, as texts, changed ones included."""
        said = self.algorithm(case)
        said["micro_train_batch_size_per_gpu"] = self.micro_batch(case)
        said["max_grad_norm"] = case.clip or 0.0
        if case.advantages:
            said["apply_overlong_filtering"] = case.drop_truncated
            said["update_epochs_per_batch"] = case.iterations
        said.update(self.changed)
        return {key: repr(value) for key, value in said.items()}

    def alternatives(self, case):
        ranks = case.ranks if case.parallel == "data" else 1
        one_pass = dict(micro_train_batch_size_per_gpu=8 // (case.updates * ranks))
        return [one_pass, *ALTERNATIVES, *(PREPARING if case.advantages else ())]

    def with_settings(self, changed):
        other = copy.copy(self)
        other.changed = {**self.changed, **changed}
        return other

    def micro_batch(self, case):
        ranks = case.ranks if case.parallel == "data" else 1
        return 8 // (case.micro_batches * case.updates * ranks)

    def config(self, case):
        """Return SkyRL's configuration for a case, with what is changed."""
        config = SkyRLTrainConfig()
        for key, value in self.algorithm(case).items():
            setattr(config.trainer.algorithm, key, value)
        for key, value in CISPO_CLIP.items():
            setattr(config.trainer.algorithm.cispo, key, value)
        config.trainer.micro_train_batch_size_per_gpu = self.micro_batch(case)
        optimizer = config.trainer.policy.optimizer_config
        optimizer.max_grad_norm = case.clip or 0.0
        places = {
            "max_grad_norm": optimizer,
            "micro_train_batch_size_per_gpu": config.trainer,
        }
        for key, value in self.changed.items():
            setattr(places.get(key, config.trainer.algorithm), key, value)
        config.trainer.policy_mini_batch_size = 8 // case.updates
        return config

    def step(self, model, rows, case):
        """Let SkyRL's trainer normalize the advantages, and its worker train on this
        rank's share of the rows.
        """
        config = self.config(case)
        with on_cpu(), group_of_one():
            every, share_of_rank = share(rows, case)
            size = config.trainer.policy_mini_batch_size
            boundaries = [(i, i + size) for i in range(0, len(every), size)]
            trainer = object.__new__(RayPPOTrainer)
            trainer.cfg = config
            data = trainer._normalize_advantages(batch(every), boundaries)[
                share_of_rank
            ]
            worker = make_worker(model, config, case)
            mine = size * len(rows) // len(every)
            for _ in range(config.trainer.update_epochs_per_batch):
                for start in range(0, len(rows), mine):
                    worker.forward_backward(data[start : start + mine])
                    worker.optim_step()

    def train(self, model, rows, case, reference):
        """Let SkyRL's trainer do all that follows generation, with workers in this
        process.
        """
        config = self.config(case)
        config.trainer.train_batch_size = len({row.group for row in rows})
        config.trainer.policy_mini_batch_size = (
            config.trainer.train_batch_size // case.updates
        )
        config.trainer.update_epochs_per_batch = case.iterations
        config.generator.n_samples_per_prompt = (
            len(rows) // config.trainer.train_batch_size
        )
        if case.reference == "adapter":
            reference = copy.deepcopy(model)  # by default of the policy's own path
            model = add_adapters(model)
        with on_cpu(), group_of_one():
            workers = {"policy": make_worker(model, config, case, rate=0.005)}
            if reference is not None:
                workers["ref"] = make_reference_worker(reference, config)
            trainer = make_trainer(config, workers)
            # what follows generation in the trainer's own loop
            output, uids = trainer.postprocess_generator_output(
                generator_output(rows, case.drop_truncated),
                [str(row.group) for row in rows],
            )
            data = trainer.convert_to_training_input(output, uids)
            data = trainer.fwd_logprobs_values_reward(data)
            data = trainer.compute_advantages_and_returns(data)
            trainer.train_critic_and_policy(data)


class Dispatch:
    """Workers of this process, in the place of WorkerDispatch and its groups of ray."""

    def __init__(self, workers):
        self.workers = workers

    def get_lcm_dp_size(self):
        return 1

    def empty_cache(self, _=None):
        pass

    def forward(self, name, data):
        return self.workers[name].forward(data)

    def stage_data(self, _, data, boundaries):
        return [data[start:end] for start, end in boundaries]

    def forward_from_staged(self, name, chunk):
        return self.workers[name].forward(chunk)

    def forward_backward_from_staged(self, name, chunk):
        return self.workers[name].forward_backward(chunk)

    def optim_step(self, name):
        return self.workers[name].optim_step()


def make_trainer(config, workers):
    """Return a trainer that was not set up by ray, with its workers."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg = config
    trainer.tokenizer = types.SimpleNamespace(pad_token_id=PAD)
    trainer.dispatch = Dispatch(workers)
    trainer.ref_model = workers.get("ref")
    trainer.critic_model = None
    trainer.all_metrics = {}
    trainer.all_timings = {}
    trainer.global_step = 1
    return trainer


def make_reference_worker(model, config):
    """Return a worker of the reference model that was not set up by ray."""
    worker = object.__new__(RefWorkerBase)
    worker.cfg = config.trainer
    worker.model = HFModelWrapper(model, bf16=False).eval()
    return worker


@torch.no_grad()
def add_adapters(model):
    """Return the model with LoRA adapters, as HFModelWrapper adds them.

    Their second matrices are not 0, and small: the KL estimate of no token reaches 10,
    where SkyRL clamps it.
    """
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    adapted = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.03 * torch.randn(parameter.shape, generator=generator))
    return adapted


def generator_output(rows, drop_truncated):
    """Return the rows as SkyRL's generator returns them."""
    masks = [[int(t) for t in row.trains] for row in rows]
    ends = ["stop" if row.response[-1] == PAD else "length" for row in rows]
    return dict(
        prompt_token_ids=[row.prompt for row in rows],
        response_ids=[row.response for row in rows],
        rewards=[row.reward for row in rows],
        loss_masks=apply_overlong_filtering(masks, ends) if drop_truncated else masks,
        stop_reasons=ends,
        rollout_logprobs=[row.sampler for row in rows],
    )


def share(rows, case):
    """Return all rows of the mini-batch, whose advantages the trainer scales before it
    divides them, and the slice of this rank.
    """
    if case.ranks == 1 or case.parallel != "data":
        return rows, slice(0, len(rows))
    gathered = [None] * case.ranks
    dist.all_gather_object(gathered, rows)
    start = dist.get_rank() * len(rows)
    return [row for part in gathered for row in part], slice(start, start + len(rows))


def make_worker(model, config, case, rate=1e-6):
    """Return a policy worker that was not set up by ray: with a model, an optimizer,
    and the strategy that steps it.
    """
    ulysses = case.ranks if case.parallel == "sequence" else 1
    if case.ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (case.ranks,)))
        set_ulysses_sequence_parallel_group(dist.group.WORLD if ulysses > 1 else None)
    worker = object.__new__(PolicyWorkerBase)
    worker.cfg = config.trainer
    worker.model = HFModelWrapper(model, bf16=False, sequence_parallel_size=ulysses)
    trained = [p for p in model.parameters() if p.requires_grad]
    worker.optimizer = torch.optim.SGD(trained, lr=rate)
    worker.scheduler = torch.optim.lr_scheduler.ConstantLR(worker.optimizer, factor=1.0)
    worker.policy_loss_fn = PolicyLossRegistry.get(
        config.trainer.algorithm.policy_loss_type
    )
    worker.mesh_rank = MeshRank(
        dp=dist.get_rank() // ulysses,
        sp=dist.get_rank() % ulysses,
        tp=0,
        pp=0,
        world_size=case.ranks,
        dp_size=case.ranks // ulysses,
        pp_size=1,
    )
    worker.device_mesh = types.SimpleNamespace(get_group=lambda _: dist.group.WORLD)
    worker.strategy = object.__new__(fsdp_strategy.FSDPStrategy)
    worker.strategy.max_norm = config.trainer.policy.optimizer_config.max_grad_norm
    worker.strategy.world_size = case.ranks
    return worker


def batch(rows):
    """Return the rows as the trainer's batch: prompts padded on the left, responses on
    the right.
    """
    prompts = pad([row.prompt for row in rows], PAD, "left")
    responses = pad([row.response for row in rows], PAD)
    there = [
        pad([[1] * len(row.prompt) for row in rows], 0, "left"),
        pad([[1] * len(row.response) for row in rows], 0),
    ]
    trains = pad([[float(t) for t in row.trains] for row in rows], 0.0)
    advantages = torch.tensor([row.adv for row in rows])[:, None]
    made = TrainingInputBatch(
        {
            "sequences": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat(there, 1),
            "response_mask": there[1],
            "loss_mask": trains,
            "action_log_probs": pad([row.old for row in rows], 0.0),
            "base_action_log_probs": pad([row.ref for row in rows], 0.0),
            "advantages": advantages.expand_as(trains).clone(),
        }
    )
    made.metadata = {"response_length": responses.shape[1]}
    return made


def pad(lists, value, side="right"):
    tensors = [torch.tensor(each) for each in lists]
    return pad_sequence(
        tensors, batch_first=True, padding_value=value, padding_side=side
    )


@contextlib.contextmanager
def on_cpu():
    """Let the worker ask for the current device, and print no warnings."""
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")
    logging.disable(logging.WARNING)
    logger.disable("skyrl")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.cuda.current_device = before
        logging.disable(logging.NOTSET)
        logger.enable("skyrl")


@contextlib.contextmanager
def group_of_one():
    """Make a process group of this process alone while the context lasts, unless there
    is one: the worker reduces its metrics over one.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
