# SPDX-License-Identifier: Apache-2.0
"""From an objective and a scale to the overrides of `python -m verl.trainer.main_ppo`,
each with its source.
"""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import upref
from repro.with_verl.config.naming import name_of
from repro.with_verl.config.scales import Scale, load_scale, paper_scale
from repro.with_verl.health import STEPS
from repro.with_verl.place import (
    EXTERNAL_MODULES,
    ROOT,
    RUNS,
    modules_of_user,
    pythonpath,
)
from upref import InputError
from upref.replay.record import EVERY
from upref_frameworks.verl.record import FOLDER, HOW_OFTEN, WATCHED

ACTOR = "actor_rollout_ref.actor"
MODULES = (
    "upref_frameworks.verl.training",
    "repro.with_verl.plugins.estimators",
    "repro.with_verl.plugins.grpo_clip_higher",
)
SEEDS = (
    "data.seed",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.actor.data_loader_seed",
)

# upref.advantages -> verl's estimator, its settings, and what verl does differently
ESTIMATORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "group_norm": (
        "grpo",
        {"algorithm.norm_adv_by_std_in_grpo": True},
        "the same; a group of one keeps its reward",
    ),
    "group_mean": (
        "grpo",
        {"algorithm.norm_adv_by_std_in_grpo": False},
        "the same; a group of one keeps its reward",
    ),
    "leave_one_out": ("rloo", {}, "the same; a group of one keeps its reward"),
    "whiten": (
        "reinforce_plus_plus",
        {},
        "verl whitens over tokens, so that long responses count more",
    ),
    "group_mean_whiten": (
        "reinforce_plus_plus_baseline",
        {},
        "verl whitens over tokens, so that long responses count more",
    ),
    "signed": (
        "upref/signed",
        {},
        "not in verl: plugins/estimators.py; a shaped reward counts by its sign",
    ),
    "reward": ("upref/reward", {}, "not in verl: plugins/estimators.py"),
}


@dataclass
class Run:
    """All that a launch needs.

    Attributes:
        objective: its name.
        scale: where the settings come from.
        overrides: the words that verl is given, KEY=VALUE; of one key the last counts.
        sources: line or key -> why it is so.
        notes: sentences for the user.
        directory: the folder of the run.
        env: environment variables of every process of the run.
        given: those of the overrides that the user typed.
    """

    objective: str
    scale: Scale
    overrides: list[str]
    sources: dict[str, str]
    notes: list[str] = field(default_factory=list)
    directory: Path = RUNS
    env: dict[str, str] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)

    def source(self, line: str) -> str:
        """Return why an override is what it is: the source of this line, else that of
        its key, else that it was given on the command line.
        """
        return self.sources.get(line) or self.sources.get(
            line.partition("=")[0], "given on the command line"
        )

    @property
    def name(self) -> str:
        return self.directory.name


def environment(directory: Path) -> dict[str, str]:
    """Return the environment variables of every process of a run, on every machine.
    What the user has verl import is imported too, after the modules of this project.
    """
    return {
        EXTERNAL_MODULES: ",".join([*MODULES, *modules_of_user(MODULES)]),
        "PYTHONPATH": pythonpath(),
        **watched(directory),
    }


def watched(directory: Path) -> dict[str, str]:
    """Return the environment variables by which whole optimizer steps are judged over
    all ranks, and those that differ are recorded in `steps` of the run's folder. What
    the user has set stays; in a folder of the user's, every judged step is recorded.
    """
    keep = "" if FOLDER in os.environ else " keep=failed"
    ours = {
        FOLDER: str(directory / STEPS),
        HOW_OFTEN: str(EVERY),
        WATCHED: f"own on_fail=warn{keep}",
    }
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def spelled_out(overrides: list[str]) -> tuple[list[str], str]:
    """Replace two short forms: seed=N by the three seeds that a run has, and name=NAME
    by nothing.

    Args:
        overrides: KEY=VALUE.

    Returns:
        The overrides, and NAME, the name of the folder; "" if none is given.

    Raises:
        InputError: NAME cannot be the name of a folder.
    """
    lines, name = [], ""
    for line in overrides:
        key, _, value = line.partition("=")
        if key == "name":
            if not re.fullmatch(r"[\w.+-][\w.+=-]*", value):
                raise InputError(
                    f"name={value!r} is not a valid folder name: letters, digits, . _ - only."
                )
            name = value
        elif key == "seed":
            lines += [f"{seed}={value}" for seed in SEEDS]
        else:
            lines.append(line)
    return lines, name


def compose(
    objective: str,
    scale: str,
    overrides: list[str] | None = None,
    data: Path | None = None,
    flash: bool = True,
) -> Run:
    """Compose the overrides of one run. The user's come last, so that they count.

    Args:
        objective: its name.
        scale: its name; "paper" is the experiment of the paper that the objective is
            of.
        overrides: what the user typed, KEY=VALUE.
        data: the folder of the data files; None: runs/data.
        flash: whether flash-attn is installed; without it the scales for one GPU use
            another attention.

    Returns:
        The run. Nothing is written, and verl does not check it yet.

    Raises:
        InputError: the objective or the scale is unknown, or verl cannot run the
            objective.
    """
    given, name = spelled_out(overrides or [])
    o = upref.get(objective)
    if objective not in upref.names():
        raise InputError(
            f"{objective} is not registered with verl: add "
            "upref_frameworks.verl.training.register(upref.get(...)) there."
        )
    if o.needs:
        raise InputError(
            f"{objective} needs {o.needs[0]}, which verl does not pass to a loss."
        )
    notes = []
    if scale == "paper":
        scale, why = paper_scale(objective)
        notes.append(why)
    s = load_scale(scale)
    rows = dict(s.values)
    if not flash:
        typed = {line.partition("=")[0].lstrip("+") for line in given}
        rows |= {
            key: row
            for key, row in s.without_flash.items()
            if key.lstrip("+") not in typed
        }
    rows |= _rows_of_objective(o, s)
    estimator, _, difference = ESTIMATORS[o.adv]
    notes.append(f"advantages: {o.adv} = verl's {estimator} ({difference})")
    if o.batch_coupled:
        notes.append(
            f"{objective} couples the batch and sees one micro-batch at a time: {o.batch_coupled}"
        )

    def own(places: dict[str, Any]) -> list[str]:
        """Return the overrides of this run, with these folders and names in them."""
        return [
            f"{key}={_hydra(_fill(value, places))}" for key, (value, _) in rows.items()
        ]

    # the name of a run does not depend on where its folders are
    nowhere = dict.fromkeys(("root", "data", "run", "name"), "")
    directory = RUNS / (name or name_of(f"{objective}-{scale}", own(nowhere), given))
    env = environment(directory)
    for key, value in env.items():
        rows[f"+ray_kwargs.ray_init.runtime_env.env_vars.{key}"] = (
            value,
            "ours: every worker loads the plug-in, and finds this checkout",
        )
    places = {
        "root": ROOT,
        "data": data or RUNS / "data",
        "run": directory,
        "name": directory.name,
    }
    sources = {key: source for key, (_, source) in rows.items()}
    return Run(objective, s, own(places) + given, sources, notes, directory, env, given)


def _rows_of_objective(o: upref.Objective, s: Scale) -> dict[str, tuple[Any, str]]:
    """Return the overrides that make verl train an objective at a scale: the loss with
    its hyperparameters, and the advantages.

    Returns:
        Key -> (value, why it is so).

    Raises:
        InputError: a hyperparameter of the scale is not one of the loss.
    """
    loss, why = s.loss.get(o.name, (o.name, "the objective"))
    o_loss = o if loss == o.name else extra(loss)
    estimator, settings, difference = ESTIMATORS[o.adv]
    hp = s.hyperparameters.get(o.name, {})
    values = {key: value for key, (value, _) in hp.items()}
    o_loss.resolve(values)
    why_parity = "parity: ours: a run of days is not ended by one alarm, which the report shows (stop ends it)"
    return {
        f"{ACTOR}.policy_loss._target_": (
            "upref_frameworks.verl.training.PolicyLoss",
            "ours: a place for hyperparameters",
        ),
        f"{ACTOR}.policy_loss.loss_mode": (f"upref/{loss}", why),
        f"{ACTOR}.loss_agg_mode": (
            _aggregation(o_loss),
            "the objective's own, for verl's KL and entropy terms",
        ),
        "algorithm.adv_estimator": (
            estimator,
            f"{o.adv} of upref.advantages in verl: {difference}",
        ),
        **{
            key: (value, f"makes verl's {estimator} {o.adv}")
            for key, value in settings.items()
        },
        f"+{ACTOR}.policy_loss.upref": (
            values | {"parity": {"on_fail": "warn"}},
            "; ".join(
                [*(f"{key}: {source}" for key, (_, source) in hp.items()), why_parity]
            ),
        ),
    }


def extra(name: str) -> upref.Objective:
    """Return an objective that is registered with verl alone, by its name in
    OBJECTIVES.
    """
    from repro.with_verl.plugins.grpo_clip_higher import OBJECTIVES

    return OBJECTIVES[name]


def _aggregation(o: upref.Objective) -> str:
    """Return verl's loss_agg_mode that aggregates as the objective does."""
    from upref.aggregation import verl_name

    return verl_name(o.level, o.agg)


def _fill(value: Any, places: dict[str, Any]) -> Any:
    """Replace {root}, {data}, {run} and {name} in a text, or in the texts of a list;
    return everything else as it is.
    """
    if isinstance(value, list):
        return [_fill(v, places) for v in value]
    return value.format(**places) if isinstance(value, str) else value


def _hydra(value: Any) -> str:
    """Return a value in hydra's grammar: a plain word as it is, any other text in
    quotes.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_hydra(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_hydra, value)) + "]"
    if isinstance(value, str) and re.sub("[_./-]", "", value).isalnum():
        return value
    return json.dumps(value)
