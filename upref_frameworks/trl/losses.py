# SPDX-License-Identifier: Apache-2.0
"""TRL's own losses on a batch of ours: real trainers, whose model answers with the
log-probabilities it is given; and as `Loss`: `trl:LOSS_TYPE` (settings.py; also
trl:rloo, trl:gmpo), or a trainer class.

Everything between `training_step` and `accelerator.backward` is TRL's, transformers'
and accelerate's code. Only the model is a stand-in, no reference model is made, and
what would reach for the network (telemetry) is silent.
"""

import contextlib
import dataclasses
import importlib
import inspect
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from upref.aggregation import Totals
from upref.errors import InputError, importing
from upref.registry import Objective
from upref.rollouts import Rollouts, per_response
from upref.user_code.guard import state_restored
from upref.user_code.loss import MAIN, Loss, OtherInputs
from upref.user_code.settings import describe_fields
from upref_frameworks.settings import Bare, clip_bounds, split_name
from upref_frameworks.trl.accelerate_state import copy_of_state, restored_state


def import_trl() -> ModuleType:
    """Import the installed TRL with its trainers.

    Returns:
        The module trl.

    Raises:
        InputError: TRL is not installed.
    """
    with importing("trl"):
        import trl
        from trl.trainer import grpo_trainer, rloo_trainer  # noqa: F401  trl itself loads them lazily
    return trl


@lru_cache(1)
def loss_types() -> list[str]:
    """Return the loss types of the installed GRPOTrainer, read off its source.

    Returns:
        Values of GRPOConfig.loss_type, in alphabetical order.
    """
    source = inspect.getsource(import_trl().GRPOTrainer._compute_loss)
    tests = re.findall(r'self\.loss_type (?:==|in) ("\w+"|\[[^]]*\])', source)
    return sorted({name for test in tests for name in re.findall(r'"(\w+)"', test)})


@lru_cache(32)
def trainer_of(name: str | type) -> tuple[type, dict[str, Any]]:
    """Return the trainer class of a loss, and the fields that select the loss.

    Args:
        name: a loss_type, `rloo`, the name of a package of trl.experimental, or a
            trainer class.

    Returns:
        The class, and fields of its config.

    Raises:
        InputError: TRL is not installed, or has no such loss.
    """
    trl = import_trl()
    if isinstance(name, type):
        return name, {}
    if name in loss_types():
        return trl.GRPOTrainer, {"loss_type": name}
    if name == "rloo":
        return trl.RLOOTrainer, {}
    trainers = []
    package = None
    if name.isidentifier():
        with contextlib.suppress(ModuleNotFoundError):
            package = importlib.import_module(f"trl.experimental.{name}")
    if package is not None:
        trainers = [value for value in vars(package).values() if is_trainer(value)]
    if not trainers:
        raise InputError(
            f"trl {trl.__version__} has no loss {name!r} that upref can run: {', '.join(loss_types())}, "
            "rloo, or an experimental GRPOTrainer such as gmpo."
        )
    return trainers[0], {}


def is_trainer(candidate: Any) -> bool:
    """Tell whether this is a class derived from TRL's GRPOTrainer or RLOOTrainer.

    TRL is not imported.

    Args:
        candidate: any object.

    Returns:
        False for an instance.
    """
    known = {
        ("trl.trainer.grpo_trainer", "GRPOTrainer"),
        ("trl.trainer.rloo_trainer", "RLOOTrainer"),
    }
    return isinstance(candidate, type) and any(
        (c.__module__, c.__name__) in known for c in candidate.__mro__
    )


def is_rloo(cls: type) -> bool:
    """Tell whether a class is derived from TRL's RLOOTrainer.

    Args:
        cls: a trainer class.
    """
    return issubclass(cls, import_trl().RLOOTrainer)


def token_advantages(cls: type) -> bool:
    """Tell whether the loss of a trainer takes advantages [B, T] too.

    Args:
        cls: a trainer class.

    Returns:
        True for GRPOTrainer's own loss; RLOO's and those of subclasses take [B].
    """
    return getattr(cls, "_compute_loss", None) is import_trl().GRPOTrainer._compute_loss


def config_of(cls: type) -> type:
    """Return the config class of a trainer.

    Args:
        cls: a trainer class.

    Returns:
        The one in its package: GMPOConfig for GMPOTrainer; where there is none, that of
        the trainer it is derived from.
    """
    package = sys.modules.get(cls.__module__.rpartition(".")[0], None)
    return getattr(package, cls.__name__.replace("Trainer", "Config"), None) or (
        import_trl().RLOOConfig if is_rloo(cls) else import_trl().GRPOConfig
    )


def _tiny_model_and_tokenizer() -> tuple[Any, Any]:
    """Return a model and a tokenizer that TRL's constructors accept. They are made in
    memory and never run.
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
    """Return a real trainer, built by its own constructor, with these fields of its
    config. It is cached: callers share it. Raise InputError where TRL refuses a field.
    """
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
    except (TypeError, ValueError) as e:
        raise InputError(
            f"trl refuses {', '.join(f'{k}={v}' for k, v in fields.items())}: {e}"
        ) from e
    quiet = {
        "_send_telemetry": lambda self: None,
        "_prepare_inputs": lambda self, inputs: inputs,  # else it would generate
    }
    model, words = _tiny_model_and_tokenizer()
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
    trainer.accelerate_state = copy_of_state()
    return trainer


class _StandIn(torch.nn.Module):
    """A model whose every forward pass returns the same log-probabilities and entropies
    [B, T].
    """

    def __init__(self, log_probs: Tensor, entropy: Tensor) -> None:
        super().__init__()
        self.out = SimpleNamespace(log_probs=log_probs, entropy=entropy, aux_loss=None)

    def forward(self, **_: Any) -> SimpleNamespace:
        """Return the same namespace in each call: log_probs, entropy, and no aux_loss."""
        return self.out


def trl_loss(
    name: str | type,
    batch: Rollouts | Bare,
    padding: float | None = 0.0,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **settings: Any,
) -> Tensor:
    """Compute the scalar on which TRL calls backward() for one micro-batch of one rank.

    One generation batch makes one optimizer step, as by TRL's default.

    Args:
        name: as of `trainer_of`.
        batch: token tensors [B, T]; gradients flow into `batch.logp`. Its totals count
            the generation batch, which is cut into micro-batches of this size; without
            them it is the only micro-batch.
        padding: what masked slots hold; None: what the batch has there.
        change: makes other inputs of `_compute_loss` out of the usual ones. Where they
            have importance ratios, the trainer's loss is told that vLLM sampled.
        **settings: fields of the trainer's config.

    Returns:
        What TRL's training_step passes to `accelerator.backward`, divided as accelerate
        divides it.

    Raises:
        InputError: TRL is not installed or refuses a setting, or the responses of the
            totals do not split into such micro-batches.
    """
    cls, fields = trainer_of(name)
    trainer = _trainer(cls, tuple(sorted((fields | settings).items())))
    # the trainer is shared: what is set on it here is set again in each call, or restored
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
    if batch.adv.ndim == 2:
        adv = padded(batch.adv.expand_as(batch.mask))
    else:
        adv = padded(batch.adv[:, None])
    # without a reference policy, its log-probabilities are the old ones
    ref = padded(old if batch.logp_ref is None else batch.logp_ref)
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    tokens = batch.mask.long()
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": 0 * tokens,
        "completion_mask": tokens,
        "advantages": adv if token_advantages(cls) else per_response(adv, batch.mask),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": torch.tensor(int(totals.tokens)),
    }
    if is_rloo(cls):
        # as _generate_and_score_completions does
        inputs["old_logps"] = (old * tokens).sum(1)
    if change:
        inputs = change(inputs)
    entropy = torch.ones_like(old) if batch.entropy is None else padded(batch.entropy)
    kept_terms: list[Tensor] = []
    accelerator = trainer.accelerator
    accelerator.backward = lambda loss, **_: kept_terms.append(
        loss / accelerator.gradient_accumulation_steps
    )
    used_vllm = trainer.use_vllm
    trainer.use_vllm = used_vllm or "importance_sampling_ratio" in inputs
    try:
        # a GRPOConfig that was made since has cleared the state
        with restored_state(trainer.accelerate_state):
            trainer.training_step(_StandIn(padded(batch.logp), entropy), inputs, None)
    finally:
        del accelerator.backward
        trainer.use_vllm = used_vllm
        trainer._metrics["train"].clear()
    return kept_terms[0]


# ---- other inputs --------------------------------------------------------------------
OF_TOKENS = (
    "advantages [B, T]"  # which TRL's own loss takes, and a class of one's own may
)


def _with_tool_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with the holes of responses in `tool_mask`, and each response
    whole in `completion_mask`, as TRL gives them where tools answer within a response.
    """
    tokens = inputs["completion_mask"]
    ends = tokens.flip(1).cumsum(1).flip(1)
    is_between = (tokens.cumsum(1) > 0) & (ends > 0)
    return inputs | {"completion_mask": is_between.long(), "tool_mask": tokens}


def _without_old(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without old log-probabilities, as TRL gives them on policy."""
    return {k: x for k, x in inputs.items() if k != "old_per_token_logps"}


def _of_one_advantage(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with advantages [B]: that of each response's first token."""
    first = inputs["completion_mask"].argmax(1, keepdim=True)
    return inputs | {"advantages": inputs["advantages"].gather(1, first)[:, 0]}


def _importance_ratios(rows: int) -> Tensor:
    """Return importance ratios of responses, [B, 1]: 0.5, 1, 1.5, 2, 0.5, ..."""
    return 0.5 + torch.arange(rows, dtype=torch.float64)[:, None] % 4 / 2


def _with_ratios(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs with what TRL adds where vLLM sampled: log-probabilities of the
    sampler and importance ratios.
    """
    old = inputs["old_per_token_logps"]
    return inputs | {
        "sampling_per_token_logps": old,
        "importance_sampling_ratio": _importance_ratios(len(old)).to(old),
    }


def _with_holes(batch: Rollouts) -> Rollouts:
    """Return the batch without the second token of each response of three or more."""
    place = batch.mask.cumsum(1)
    has_hole = (place == 2) & (batch.mask.sum(1, keepdim=True) > 2)
    return batch.but(mask=batch.mask & ~has_hole)


def _at_old_policy(batch: Rollouts) -> Rollouts:
    """Return the batch with π_θ = π_old."""
    return batch.but(logp_old=batch.logp)


def _with_one_advantage(batch: Rollouts) -> Rollouts:
    """Return the batch with one advantage for each response, [B, T]."""
    A = per_response(batch.adv.expand_as(batch.mask), batch.mask)
    return batch.but(adv=A[:, None].expand(batch.mask.shape).clone())


def _ratios_of(batch: Rollouts) -> Tensor:
    """Return the importance ratio of each response, [B, 1]."""
    return _importance_ratios(len(batch.mask)).to(batch.logp)


def _ways(
    call_with: Callable[..., Callable[..., Any]],
    takes_tokens: bool,
    of_grpo: bool,
    multiplies: bool,
) -> tuple[OtherInputs, ...]:
    """Return the other ways in which TRL may give a loss a batch.

    Args:
        call_with: makes `Loss.call` of a change of the inputs.
        takes_tokens: whether it takes advantages [B, T].
        of_grpo: whether the trainer is one of GRPO, which has tools; RLOO's has none,
            and reads old log-probabilities of responses.
        multiplies: whether each term of the loss is multiplied by the importance ratio.
    """
    if not of_grpo:
        return ()
    ways = [
        OtherInputs(
            "tool_mask, with the tokens of tools in completion_mask",
            call_with(_with_tool_mask),
            "tokens of tools train, or count, where the trainer has tools",
            prepare=_with_holes,
        ),
        OtherInputs(
            "no old_per_token_logps, on policy",
            call_with(_without_old),
            "TRL leaves them out where each batch is trained on once",
            prepare=_at_old_policy,
        ),
    ]
    if takes_tokens:
        ways.append(
            OtherInputs(
                "advantages [B]",
                call_with(_of_one_advantage),
                "TRL gives one advantage for each response",
                prepare=_with_one_advantage,
            )
        )
    if multiplies:
        ways.append(
            OtherInputs(
                "sampling_per_token_logps and importance_sampling_ratio, as from vLLM",
                call_with(_with_ratios),
                "GRPOTrainer multiplies each token's term by the ratio",
                factor=_ratios_of,
            )
        )
    return tuple(ways)


# ---- as a Loss -----------------------------------------------------------------------
def settings_for(
    mode: str | type, objective: Objective, hp: dict[str, Any]
) -> dict[str, Any]:
    """Translate the hyperparameters of an objective into fields of TRL's config.

    Args:
        mode: a loss_type, another name of `trainer_of`, or a trainer class.
        objective: the objective.
        hp: hyperparameters; the others have the objective's defaults.

    Returns:
        Field -> value, of those fields that the trainer's config has.
    """
    resolved = objective.resolve(hp)
    low, high = clip_bounds(resolved)
    if mode == "cispo" and high is not None:
        high = 1 + high  # TRL's is the cap itself
    fields = {
        "epsilon": low,
        "epsilon_high": high,
        "delta": resolved.get("c"),
        "beta": resolved.get("beta"),
    }
    for side in ("pos", "neg"):
        fields[f"sapo_temperature_{side}"] = resolved.get(f"tau_{side}")
    if resolved.get("beta"):
        # on by default, and in no paper before DeepSeek-V3.2's
        fields["use_bias_correction_kl"] = False
    if objective.level == "sequence_mean":
        fields["importance_sampling_level"] = "sequence"
    if mode == "dr_grpo":
        # the constant by which TRL divides the sum over tokens
        fields["max_completion_length"] = 1
    config = config_of(trainer_of(mode)[0])
    return {k: v for k, v in fields.items() if v is not None and hasattr(config, k)}


def load_loss(name: str, mode: str, objective: Objective, hp: dict[str, Any]) -> Loss:
    """Return one of TRL's losses by its name.

    Args:
        name: the whole name, `trl:MODE...`, for messages.
        mode: what follows the colon: `MODE[@matched][,FIELD=VALUE...]`.
        objective: at whose settings a loss `@matched` is set up.
        hp: its hyperparameters.

    Returns:
        The Loss.

    Raises:
        InputError: the name cannot be read, TRL is not installed, or has no such loss.
    """
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
    """Make a Loss of a loss_type of TRL, or of a trainer class.

    Args:
        name: of the loss, for messages.
        mode: as of `settings_for`.
        objective: what it is compared with.
        hp: hyperparameters of the objective.
        fields: of the trainer's config, over all others.
        matched: whether the fields follow from the objective; else they are TRL's
            defaults.

    Returns:
        The Loss. A matched one has the loss as shipped in `shipped`.
    """

    def settings(hp: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the trainer's config at these hyperparameters."""
        own = dict(fields or {})
        if not matched:
            return own
        return settings_for(mode, objective, hp) | own

    def call_with(change: Any) -> Callable[..., Tensor]:
        """Return the call with inputs that are changed in this way."""
        return partial(call, change=change)

    def call(full: dict[str, Any], moved: dict[str, Any], change: Any = None) -> Tensor:
        """Return TRL's loss of a batch.

        Args:
            full: the tensors and counts of the batch, by name.
            moved: hyperparameters over `hp`.
            change: of the inputs, as of `trl_loss`.
        """
        batch = Bare(
            logp=full["logp"],
            logp_old=full["logp_old"],
            adv=full["adv"],
            mask=full["mask"],
            totals=full["totals"],
            logp_ref=full["logp_ref"],
            entropy=full["entropy"],
        )
        return trl_loss(
            mode, batch, padding=None, change=change, **settings(hp | moved)
        )

    assumptions = (
        f"TRL's contract: {describe_fields(settings(hp))}; an optimizer step is one generation batch, cut into equal "
        "micro-batches; num_items_in_batch counts its tokens, current_gradient_accumulation_steps its micro-batches, "
        "so that the losses that training_step hands to backward add up; masked slots hold finite numbers",
    )
    reads = frozenset({*MAIN, "totals", "logp_ref", "entropy"})
    takes_tokens = token_advantages(trainer_of(mode)[0])
    shape = "BT" if takes_tokens else "B"
    is_own_class = isinstance(mode, type) and not takes_tokens
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
        never_given=(OF_TOKENS,) if is_own_class else (),
        given_otherwise=_ways(
            call_with,
            takes_tokens,
            not is_rloo(trainer_of(mode)[0]),
            not settings(hp).get("beta")
            and (trainer_of(mode)[1] | settings(hp)).get("loss_type") != "vespo",
        ),
        shipped=make_loss(name, mode, objective, hp, None, False) if matched else None,
    )
