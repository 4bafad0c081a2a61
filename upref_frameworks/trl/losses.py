# SPDX-License-Identifier: Apache-2.0
"""TRL's own losses on a batch of ours: real trainers, whose model answers with the
log-probabilities it is given; and as `Loss`: `trl:LOSS_TYPE` (settings.py; also
trl:rloo, trl:gmpo), or a trainer class.

Everything between `training_step` and `accelerator.backward` is TRL's, transformers'
and accelerate's code. Only the model is a stand-in, no reference model is made, and
what would reach for the network (telemetry) is silent.
"""

import dataclasses
import importlib
import inspect
import logging
import re
import sys
import tempfile
from functools import lru_cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError, importing
from upref.registry import Objective
from upref.rollouts import Rollouts, per_response
from upref.user_code.guard import state_restored
from upref.user_code.loss import MAIN, Loss
from upref.user_code.settings import describe_fields
from upref_frameworks.settings import Bare, clip_bounds, split_name


def import_trl() -> ModuleType:
    """The installed trl with its trainers loaded; InputError where there is none."""
    with importing("trl"):
        import trl
        from trl.trainer import grpo_trainer, rloo_trainer  # noqa: F401  trl itself loads them lazily
    return trl


@lru_cache(1)
def loss_types() -> list[str]:
    """The values of GRPOConfig.loss_type that the installed GRPOTrainer knows, read off
    its source.
    """
    source = inspect.getsource(import_trl().GRPOTrainer._compute_loss)
    tests = re.findall(r'self\.loss_type (?:==|in) ("\w+"|\[[^]]*\])', source)
    return sorted({name for test in tests for name in re.findall(r'"(\w+)"', test)})


@lru_cache(32)
def trainer_of(name: str | type) -> tuple[type, dict[str, Any]]:
    """(trainer class, config fields that select the loss) of a loss_type, `rloo`,
    trl.experimental.NAME, or a class.
    """
    t = import_trl()
    if isinstance(name, type):
        return name, {}
    if name in loss_types():
        return t.GRPOTrainer, {"loss_type": name}
    if name == "rloo":
        return t.RLOOTrainer, {}
    try:
        if name.isidentifier():
            package = importlib.import_module(f"trl.experimental.{name}")
        else:
            package = None
    except ModuleNotFoundError:
        package = None
    trainers = [c for c in vars(package).values() if is_trainer(c)] if package else []
    if not trainers:
        raise InputError(
            f"trl {t.__version__} has no loss {name!r} that upref can run: {', '.join(loss_types())}, "
            "rloo, or an experimental GRPOTrainer such as gmpo."
        )
    return trainers[0], {}


def is_trainer(x: Any) -> bool:
    """Whether x is a class derived from TRL's GRPOTrainer or RLOOTrainer; imports
    nothing.
    """
    known = {
        ("trl.trainer.grpo_trainer", "GRPOTrainer"),
        ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    }
    return isinstance(x, type) and any(
        (c.__module__, c.__name__) in known for c in x.__mro__
    )


def is_rloo(cls: type) -> bool:
    return issubclass(cls, import_trl().RLOOTrainer)


def token_advantages(cls: type) -> bool:
    """Whether the loss takes advantages [B, T] too: GRPOTrainer's own does; RLOO's and
    those that subclasses write take [B].
    """
    return getattr(cls, "_compute_loss", None) is import_trl().GRPOTrainer._compute_loss


def config_of(cls: type) -> type:
    """The config class beside a trainer: GMPOConfig for GMPOTrainer, else that of the
    trainer it derives from.
    """
    package = sys.modules.get(cls.__module__.rpartition(".")[0], None)
    return getattr(package, cls.__name__.replace("Trainer", "Config"), None) or (
        import_trl().RLOOConfig if is_rloo(cls) else import_trl().GRPOConfig
    )


def _tiny() -> Any:
    """A model and a tokenizer that TRL's constructors accept, made in memory; they are
    never run.
    """
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1, "<eos>": 2}, unk_token="a"))
    size = dict(
        vocab_size=3,
        hidden_size=2,
        intermediate_size=2,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(LlamaConfig(**size))
    return model, PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )


@lru_cache(64)
def _trainer(cls: type, settings: tuple[tuple[str, Any], ...]) -> Any:
    """A real trainer, built by its own constructor, with these fields of its config."""
    from datasets import Dataset

    fields = dict(settings)
    beta = fields.pop("beta", None)
    where = dict(
        output_dir=tempfile.gettempdir(),
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    kind = config_of(cls)
    try:
        # beta comes later: with it the constructor would load a reference model
        args = kind(
            **where,
            per_device_train_batch_size=2,
            num_generations=2,
            beta=0.0,
            **fields,
        )
        if beta is None:
            beta = next(f.default for f in dataclasses.fields(kind) if f.name == "beta")
        else:
            beta = beta
    except (TypeError, ValueError) as e:
        raise InputError(
            f"trl refuses {', '.join(f'{k}={v}' for k, v in fields.items())}: {e}"
        ) from e
    quiet = {
        "_send_telemetry": lambda self: None,
        "_prepare_inputs": lambda self, inputs: inputs,  # else it would generate
    }
    model, words = _tiny()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with state_restored():  # it seeds every generator
            trainer = type(cls.__name__, (cls,), quiet)(
                model=model,
                args=args,
                processing_class=words,
                train_dataset=Dataset.from_list([{"prompt": "a"}] * 2),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
            )
    finally:
        logging.disable(level)
    trainer.beta = args.beta = beta
    return trainer


class _StandIn(torch.nn.Module):
    """Answers every forward pass with the same log-probabilities and entropies, [B, T]."""

    def __init__(self, log_probs: Tensor, entropy: Tensor) -> None:
        super().__init__()
        self.out = SimpleNamespace(log_probs=log_probs, entropy=entropy, aux_loss=None)

    def forward(self, **_: Any) -> Any:
        return self.out


def trl_loss(
    name: str | type,
    batch: Rollouts | Bare,
    padding: float | None = 0.0,
    **settings: Any,
) -> Tensor:
    """The scalar that TRL's training_step hands to backward for this micro-batch on one
    rank; gradients flow to batch.logp.

    name: see trainer_of. settings: fields of its config. Masked slots hold `padding`,
    or with None what the batch has. One generation batch is one optimizer step, as by
    TRL's default. batch.totals counts it; it is cut into micro-batches of equal size, whose
    number is gradient_accumulation_steps.
    """
    cls, fields = trainer_of(name)
    trainer = _trainer(cls, tuple(sorted((fields | settings).items())))
    totals = batch.totals or Totals.of(batch.mask)
    rows = len(batch.mask)
    steps = int(totals.sequences) // rows
    if steps * rows != int(totals.sequences):
        raise InputError(
            f"TRL's micro-batches are equal: {int(totals.sequences)} responses do not split into {rows}s."
        )
    # as transformers' training loop does
    trainer.current_gradient_accumulation_steps = steps
    trainer.args.steps_per_generation = steps

    def padded(x: Tensor) -> Tensor:
        """Return x with masked slots set to the padding, if one is given."""
        return x if padding is None else torch.where(batch.mask, x, padding)

    old = padded(batch.logp_old)
    adv = padded(
        batch.adv.expand_as(batch.mask) if batch.adv.ndim == 2 else batch.adv[:, None]
    )
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    tokens = batch.mask.long()
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": 0 * tokens,
        "completion_mask": tokens,
        "advantages": adv if token_advantages(cls) else per_response(adv, batch.mask),
        "old_per_token_logps": old,
        "ref_per_token_logps": padded(
            old if batch.logp_ref is None else batch.logp_ref
        ),
        "num_items_in_batch": torch.tensor(int(totals.tokens)),
    }
    if is_rloo(cls):
        # as _generate_and_score_completions does
        inputs["old_logps"] = (old * tokens).sum(1)
    entropy = torch.ones_like(old) if batch.entropy is None else padded(batch.entropy)
    kept_terms: list[Tensor] = []
    accelerator = trainer.accelerator
    accelerator.backward = lambda loss, **_: kept_terms.append(
        loss / accelerator.gradient_accumulation_steps
    )
    try:
        trainer.training_step(_StandIn(padded(batch.logp), entropy), inputs, None)
    finally:
        del accelerator.backward
        trainer._metrics["train"].clear()
    return kept_terms[0]


# ---- as a Loss -----------------------------------------------------------------------
def settings_for(
    mode: str | type, objective: Objective, hp: dict[str, Any]
) -> dict[str, Any]:
    """The fields of TRL's config that say what the objective's hyperparameters say."""
    h = objective.resolve(hp)
    low, high = clip_bounds(h)
    if mode == "cispo" and high is not None:
        high = 1 + high  # TRL's is the cap itself
    written = {
        "epsilon": low,
        "epsilon_high": high,
        "delta": h.get("c"),
        "beta": h.get("beta"),
    }
    written |= {
        f"sapo_temperature_{side}": h.get(f"tau_{side}") for side in ("pos", "neg")
    }
    if h.get("beta"):
        # on by default, and in no paper before DeepSeek-V3.2's
        written["use_bias_correction_kl"] = False
    if objective.level == "sequence_mean":
        written["importance_sampling_level"] = "sequence"
    if mode == "dr_grpo":
        # the constant by which TRL divides the sum over tokens
        written["max_completion_length"] = 1
    known = config_of(trainer_of(mode)[0])
    return {k: v for k, v in written.items() if v is not None and hasattr(known, k)}


def load_loss(name: str, mode: str, objective: Objective, hp: dict[str, Any]) -> Loss:
    mode, fields, matched = split_name(name, mode)
    return make_loss(name, mode, objective, hp, fields, matched)


def make_loss(
    name: str,
    mode: str | type,
    objective: Objective,
    hp: dict[str, Any],
    fields: dict[str, Any] | None = None,
    matched: bool = True,
) -> Loss:
    """The Loss of a loss_type or of a trainer class; matched: set up as the objective
    says.
    """

    def settings(hp: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the trainer's config at these hyperparameters."""
        return (settings_for(mode, objective, hp) if matched else {}) | (fields or {})

    def call(full: dict[str, Any], moved: dict[str, Any]) -> Tensor:
        batch = Bare(
            **{
                k: full[k]
                for k in (
                    "logp",
                    "logp_old",
                    "mask",
                    "totals",
                    "adv",
                    "logp_ref",
                    "entropy",
                )
            }
        )
        return trl_loss(mode, batch, padding=None, **settings(hp | moved))

    assumptions = (
        f"TRL's contract: {describe_fields(settings(hp))}; an optimizer step is one generation batch, cut into equal "
        "micro-batches; num_items_in_batch counts its tokens, current_gradient_accumulation_steps its micro-batches, "
        "so that the losses that training_step hands to backward add up; masked slots hold finite numbers",
    )
    reads = frozenset({*MAIN, "totals", "logp_ref", "entropy"})
    shape = "BT" if token_advantages(trainer_of(mode)[0]) else "B"
    config = config_of(trainer_of(mode)[0])
    defaults = {
        f.name: f.default
        for f in dataclasses.fields(config)
        if f.default is not dataclasses.MISSING
    }
    return Loss(
        name,
        call,
        objective,
        reads,
        framework="trl",
        read_as="TRL's trainer",
        assumptions=assumptions,
        adv_shape=shape,
        fields=settings(hp),
        defaults=defaults,
        shipped=make_loss(name, mode, objective, hp, None, False) if matched else None,
    )
