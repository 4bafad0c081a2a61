# SPDX-License-Identifier: Apache-2.0
"""Does the installed verl take these overrides? Its own hydra configuration and config
classes say, without a GPU.
"""

import contextlib
import copy
import dataclasses
import difflib
import functools
import io
import math
import tomllib
import traceback
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import upref
from repro.with_verl.config import sizes
from repro.with_verl.config.compose import ACTOR, Run, extra
from repro.with_verl.config.model import Shape
from repro.with_verl.refuse import refuse
from upref import InputError

NAMES = (
    f"{ACTOR}.policy_loss.loss_mode=",
    "trainer.experiment_name=",
    "trainer.default_local_dir=",
    "+ray_kwargs.ray_init.runtime_env.env_vars.",
)
_NAMES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OPEN: dict[str, str] = _NAMES["open"]
NEAR: list[str] = _NAMES["near"]
WHOLE: list[str] = _NAMES["whole"]
UNREAD: dict[str, str] = _NAMES["unread"]
HYDRA = ("hydra.run.", "hydra.output_subdir", "hydra.job.")
MICRO = f"{ACTOR}.ppo_micro_batch_size"  # and ..._per_gpu
USUAL = {
    "learning_rate": "lr",
    "batch_size": "train_batch_size",
    "steps": "total_training_steps",
    "epochs": "total_epochs",
}
FIRST = (
    ACTOR,
    "actor_rollout_ref.rollout",
    "data",
    "algorithm",
    "trainer",
    "actor_rollout_ref",
    "reward",
)
# Instantiated as verl does; the model's class reads the model's files, the others exist
# for other backends.
SECTIONS = ("actor_rollout_ref.rollout", "algorithm")


def validate(run: Run, shape: Shape | None = None) -> DictConfig:
    """Compose a run's configuration as verl does, and check it.

    Args:
        run: the run. Of each line that the user gave, `sources` gets what reads it.
        shape: of the model, where its files are not made yet; None: by its config.json.

    Returns:
        The configuration.

    Raises:
        InputError: verl would refuse an override, or would never read it; the sentence
            names it.
    """
    own = run.overrides[: len(run.overrides) - len(run.given)]
    for line in run.given:
        if line.startswith("model_engine=") and line not in own:
            raise InputError(
                f"{line} is another engine than the scale's, and its settings are for that one alone."
            )
    names = [o for o in run.overrides if o.startswith(NAMES)]
    cfg, actor = _checked(tuple(o for o in run.overrides if o not in names))
    # every run has them all, so that none is left from another
    for key, _, name in (o.partition("=") for o in names):
        OmegaConf.update(cfg, key.lstrip("+"), name, force_add=True)
    sizes.check(cfg, shape)
    _check_loss(cfg, actor)
    for line in run.given:
        key = line.partition("=")[0].lstrip("+~")
        refuse(unread(cfg, key))
        who = reader(cfg, key) or "hydra"
        run.sources[line] = f"given on the command line, read by {who}"
    return cfg


def unread(cfg: DictConfig, key: str) -> Iterator[str]:
    """Yield a sentence if verl has this setting and nothing reads it in a run of these
    scales; nothing where it is read.
    """
    actor = cfg.actor_rollout_ref.actor
    steps = cfg.trainer.total_training_steps
    warmup = actor.optim.lr_warmup_steps
    mode = actor.policy_loss.loss_mode
    section, _, rest = key.partition(".")
    if section == "critic":
        yield f"nothing reads {key}: no scale trains a critic."
    if section == "global_profiler" and rest != "tool" and not cfg.global_profiler.tool:
        yield f"nothing reads {key} without global_profiler.tool: set that too."
    if key in UNREAD:
        yield f"nothing reads {key} in a run of these scales: {UNREAD[key]}."
    if key.startswith(MICRO) and actor.use_dynamic_bsz:
        yield f"nothing reads {key} with {ACTOR}.use_dynamic_bsz=true: set {ACTOR}.ppo_max_token_len_per_gpu."
    # a scale's own may be, in a shakedown
    if key == f"{ACTOR}.optim.lr_warmup_steps" and steps and warmup > steps:
        yield f"{key}={warmup} is more than the run's {steps} steps: its learning rate would never be reached; lower it."
    if key == "trainer.resume_from_path" and cfg.trainer.resume_mode != "resume_path":
        yield f"nothing reads {key} with trainer.resume_mode={cfg.trainer.resume_mode}: set resume_path."
    of_loss = f"{ACTOR}.policy_loss."
    own = key.removeprefix(of_loss).partition(".")[0]
    others = key.startswith(of_loss) and own not in ("loss_mode", "_target_", "upref")
    if others and mode.startswith("upref/"):
        yield f"{mode} does not read {key}: its hyperparameters are set under {of_loss}upref."


@functools.lru_cache(100)
def _checked(overrides: tuple[str, ...]) -> tuple[DictConfig, Any]:
    """Compose overrides, and check the types and verl's own classes. It is cached: all
    objectives share the settings without NAMES, so that checking many is quick.

    Args:
        overrides: all lines but those that begin with one of NAMES.

    Returns:
        The configuration, and verl's ActorConfig. Both are shared: see `validate`.

    Raises:
        InputError: an override cannot be read, has another type, or verl refuses it.
    """
    cfg = _compose(overrides)
    _check_types(cfg, overrides)
    return cfg, _classes(OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)))


@functools.lru_cache
def _base(groups: tuple[str, ...]) -> DictConfig:
    """Return verl's configuration with these `model_engine=` lines. It is cached: copy
    it before a change.
    """
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(groups))


@functools.lru_cache(1000)
def _parsed(line: str):
    """Return an override as hydra parses it. Raise InputError if it lists several
    values.
    """
    parsed = OverridesParser.create().parse_override(line)
    if parsed.is_sweep_override():
        raise InputError(
            f"{line!r} lists several values: one run takes one; write a list as key=[a,b]."
        )
    return parsed


def _compose(overrides: tuple[str, ...]) -> DictConfig:
    """Apply overrides one by one to verl's configuration, as hydra does. verl's files,
    which take half a second, are read once for each backend. Raise InputError for a
    line that hydra refuses or that nothing reads.
    """
    groups = tuple(o for o in overrides if o.startswith("model_engine="))
    cfg = copy.deepcopy(_base(groups))

    def value_of(key: str) -> Any:
        """Return the value at a key; None where there is none."""
        return OmegaConf.select(cfg, key, throw_on_missing=False)

    for line in overrides:
        name = line.partition("=")[0].strip()
        key = name.lstrip("+~")
        if name.startswith("+") and not reader(cfg, key):
            raise InputError(f"nothing in verl reads {key!r}: {_hint(cfg, key)}")
        if name.startswith("hydra.") and not name.startswith(HYDRA):
            raise InputError(
                f"{key} is not a setting of a run: of hydra's, hydra.run.dir is."
            )
        if line in groups or name.startswith("hydra."):
            continue
        try:
            before = value_of(key)
            ConfigLoaderImpl._apply_overrides_to_config([_parsed(line)], cfg)  # noqa: SLF001  one line at a time
        except (HydraException, OmegaConfBaseException) as e:
            raise InputError(_refusal(line, cfg, e)) from e
        after = value_of(key)
        if isinstance(before, DictConfig) and not isinstance(after, DictConfig | None):
            raise InputError(
                f"{key} holds {', '.join(map(str, before))}: set one of them, got {after!r}."
            )
    return cfg


def _refusal(line: str, cfg: DictConfig, e: Exception) -> str:
    """Return the sentence for an override that hydra refuses.

    line: the override. e: what hydra raised.
    """
    name, equals, text = (s.strip() for s in line.partition("="))
    key = name.lstrip("+~")
    if not equals:
        return f"{line!r} is no override: write key=value."
    if line.partition("=")[0] != name:
        return f"{line!r} has a blank before '=': write {name}={text}."
    known = OmegaConf.select(cfg, key, throw_on_missing=False) is not None
    if not known and not name.startswith("+"):
        return f"verl has no setting {key!r}: {_hint(cfg, key)}"
    if text.startswith("{"):
        return f"{key} takes its settings one by one: write ++{key}.NAME=VALUE."
    if name.startswith("+") and "already at" in str(e):
        return f"{key} is set already: write it without the plus, {key}={text}."
    said = str(e).splitlines()[0]
    if "token recognition" in said:
        said += f"; a text with blanks or signs goes into quotes: '{name}=\"{text}\"'"
    return f"hydra cannot read {name}={text}: {said}"


def reader(cfg: DictConfig, key: str) -> str:
    """Return what reads this key; "" if nothing does. A key under OPEN counts, unless
    it is nearly one that is known there.
    """
    for place, who in OPEN.items():
        if f"{key}.".startswith(f"{place}."):
            parts = key[len(place) + 1 :].split(".")
            near = [difflib.get_close_matches(part, NEAR, 1, 0.8) for part in parts]
            typo = any(n and n[0] != part for n, part in zip(near, parts, strict=True))
            return "" if typo else who
    cls, leaf = _class(cfg, key)
    if cls and leaf in {f.name for f in dataclasses.fields(cls)}:
        return f"verl's {cls.__name__}"
    return "verl" if key in _keys(cfg) else ""


def _hint(cfg: DictConfig, key: str) -> str:
    """Return a question with the key that was probably meant, or where keys go that
    verl does not list.
    """
    if meant := _meant(cfg, key):
        return f"did you mean {meant}?"
    return f"a key that verl does not list goes under {', '.join(OPEN)}."


def _meant(cfg: DictConfig, key: str) -> str:
    """Return the key that was probably meant; "" where none is like this one. It has
    the same last component elsewhere, or that component is a hyperparameter of an
    objective, or its name is similar.
    """
    parent, _, leaf = key.rpartition(".")
    leaf = USUAL.get(leaf, leaf)
    known = [k for k in _keys(cfg) if "critic" not in k and "profiler" not in k]
    known.sort(key=_rank)
    # last component -> the first key that has it
    key_of = {k.rpartition(".")[2]: k for k in reversed(known)}
    if leaf in key_of:
        return key_of[leaf]
    if any(leaf in upref.get(name).hyperparameters for name in upref.names()):
        return f"++{ACTOR}.policy_loss.upref.{leaf}"
    beside = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(leaf, beside, 1, 0.75)
    if not near and any(parent.startswith(place) for place in OPEN):
        near = difflib.get_close_matches(leaf, NEAR, 1, 0.8)
    if near:
        return f"{parent}.{near[0]}".lstrip(".")
    near = difflib.get_close_matches(leaf, list(key_of), 1, 0.8)
    return key_of[near[0]] if near else ""


def _rank(key: str) -> tuple[int, int]:
    """Return by what keys are sorted, those that people set more often first: how deep
    a key is, and the place of its section in FIRST, 99 for others.
    """
    sections = [i for i, x in enumerate(FIRST) if key.startswith(x)]
    return key.count("."), sections[0] if sections else 99


def _keys(node: DictConfig, prefix: str = "") -> list[str]:
    """Return the dotted names of all settings, as in data.seed, those of tables too."""
    found = []
    for key in node:
        found.append(f"{prefix}{key}")
        child = node._get_node(key)  # noqa: SLF001  node[key] would raise where the value is missing
        if isinstance(child, DictConfig) and not child._is_none():  # noqa: SLF001
            found += _keys(child, f"{prefix}{key}.")
    return found


def _check_types(cfg: DictConfig, overrides: tuple[str, ...]) -> None:
    """Raise InputError for an override whose value has not the type of verl's class or
    default, or is not finite. verl's YAML takes any type, and a worker would fail
    later.
    """
    for line in overrides:
        name = line.partition("=")[0]
        key = name.lstrip("+")
        if name.startswith("~") or "=" not in line or key == "model_engine":
            continue
        value = OmegaConf.select(cfg, key)
        want = _annotation(cfg, key)
        if want is not None and not _fits(value, want):
            raise InputError(f"{key} must be {_words(want)}, got {value!r}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{key} must be a finite number, got {value}.")


def _annotation(cfg: DictConfig, key: str) -> Any:
    """Return the type of a key by verl's class, by verl's default where no class has
    it, or None.
    """
    cls, leaf = _class(cfg, key)
    if cls and leaf in {f.name for f in dataclasses.fields(cls)}:
        return typing.get_type_hints(cls).get(leaf)
    if key in WHOLE:
        return int | None
    default = OmegaConf.select(_base(()), key)
    return type(default) if isinstance(default, bool | int | float | str) else None


def _class(cfg: DictConfig, key: str) -> tuple[Any, str]:
    """Return verl's configuration class of the section that a key is in, and the key's
    last component. The class is None where the section has none or it cannot be
    imported.
    """
    from hydra.utils import get_class

    parent, _, leaf = key.rpartition(".")
    section = OmegaConf.select(cfg, parent) if parent else cfg
    target = section.get("_target_") if isinstance(section, DictConfig) else None
    with contextlib.suppress(Exception):  # a class of a backend that is not installed
        return (get_class(target) if target else None), leaf
    return None, leaf


def _fits(value: Any, want: Any) -> bool:
    """Tell whether a value of the configuration has a type. A whole number is a float
    too, a bool is no number, and a list stands for a str: a file may be one of several.
    """
    origin = typing.get_origin(want)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, w) for w in typing.get_args(want))
    want = origin or want
    if want is Any:
        return True
    if want is type(None):
        return value is None
    if want is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if want is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if want is str:  # a file may be one of several
        return isinstance(value, str) or OmegaConf.is_list(value)
    if want in (list, tuple):
        return OmegaConf.is_list(value)
    if want is bool:
        return isinstance(value, bool)
    return True


def _words(want: Any) -> str:
    """Describe a type in words, such as "a whole number or null"."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
    }
    parts = (
        typing.get_args(want)
        if typing.get_origin(want) in (typing.Union, types.UnionType)
        else (want,)
    )
    return " or ".join(words.get(p, str(p)) for p in parts)


def _classes(cfg: DictConfig):
    """Run verl's own checks without their output; return its ActorConfig. Raise
    InputError with verl's words where one refuses the configuration.
    """
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            reference = (
                cfg.actor_rollout_ref.actor.use_kl_loss
                or cfg.algorithm.use_kl_in_reward
            )
            validate_config(cfg, use_reference_policy=bool(reference), use_critic=False)
            for section in SECTIONS:
                omega_conf_to_dataclass(OmegaConf.select(cfg, section))
            return omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    except (
        Exception
    ) as e:  # whatever verl's checks raise, mostly AssertionError and ValueError
        cause = e.__cause__ or e
        # an assert without words
        said = str(cause) or str(traceback.extract_tb(cause.__traceback__)[-1].line)
        if "vllm version None" in said:  # of LoRA's rank
            raise InputError(
                "verl checks this configuration with vLLM, which is not installed here: do the dry run where it is, "
                "UPREF_PYTHON=... repro/run.sh."
            ) from e
        raise InputError(
            f"verl refuses the configuration: {' '.join(said.split())[:400]}"
        ) from e


def _require_registered(kind: str, name: str, known: Collection[Any]) -> None:
    """Raise InputError, with the nearest name, where verl has none of this name."""
    if name not in known:
        near = difflib.get_close_matches(name, [str(k) for k in known], 1, 0.5)
        hint = f": did you mean {near[0]!r}?" if near else "."
        raise InputError(f"there is no {kind} named {name!r}{hint}")


def _check_loss(cfg: DictConfig, actor) -> None:
    """Raise InputError for a loss or an advantage estimator that is not registered, and
    for settings that a loss of upref does not read, or that replace it.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.workers.config import ActorConfig

    import repro.with_verl.plugins.estimators  # noqa: F401  registers
    from upref.aggregation import verl_name
    from upref_frameworks.verl.training import VERL_KEYS, hyperparameters, monitor_of

    mode = cfg.actor_rollout_ref.actor.policy_loss.loss_mode
    if not mode.startswith("upref/up("):  # UP of any registered one
        _require_registered("policy loss", mode, POLICY_LOSS_REGISTRY)
    estimator = cfg.algorithm.adv_estimator
    _require_registered("advantage estimator", estimator, ADV_ESTIMATOR_REGISTRY)
    if not mode.startswith("upref/"):
        return
    default = {f.name: f.default for f in dataclasses.fields(ActorConfig)}
    for key, ours in VERL_KEYS.items():
        if actor.get(key) not in (None, default[key]):
            raise InputError(
                f"{mode} does not read actor.{key}: write '++{ACTOR}.policy_loss.upref.NAME={actor.get(key)}' with the "
                f"objective's own name for it ({', '.join(ours)})."
            )
    if cfg.algorithm.rollout_correction.get("bypass_mode"):
        raise InputError(
            "rollout_correction.bypass_mode replaces every loss_mode by verl's own: leave it false."
        )
    name = mode.removeprefix("upref/")
    objective = extra(name) if name == "grpo_clip_higher" else upref.get(name)
    own = verl_name(objective.level, objective.agg)
    if actor.loss_agg_mode != own:
        raise InputError(
            f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode} would change only verl's KL and entropy terms: {mode} "
            f"aggregates by itself: leave it at {own}."
        )
    hyperparameters(objective, actor)
    monitor_of(objective, actor)
