# SPDX-License-Identifier: Apache-2.0
"""Each recipe is given to the framework's own configuration and validation, where these
import on a CPU; elsewhere to what the framework's source declares: keys, types and
defaults, which docs/recipe_keys.py reads."""

import ast
import warnings
from functools import cache
from pathlib import Path

import pytest

from docs import record
from docs.recipe_keys import FILE, keys_of, lines_of
from upref_frameworks import ledger, names
from upref_frameworks.audits.recipe import (
    Recipe,
    covered_objectives,
    recipe as once,
    typed_fields,
)
from upref_frameworks.trl.accelerate_state import restored_state

recipe = cache(once)
STARTED = ("trl", "unsloth", "verl")  # configurations that this environment has
READ = [n for n in names() if n not in STARTED]


def settings(r: Recipe) -> dict:
    """Return the keys of a recipe with their values, those for the advantages included."""
    how = r.advantages.partition(": ")[2]
    lines = r.settings if "set them yourself" in r.advantages else [*r.settings, how]
    return {k: v for line in lines for k, v in typed_fields(line)}


# ---- TRL -----------------------------------------------------------------------------
@pytest.fixture
def accelerate_as_before():
    """Restore accelerate's state after each test: a configuration of TRL's sets the
    device of the process, which the trainers of other tests choose.
    """
    pytest.importorskip("accelerate", reason="`repro/venv.sh trl` installs it")
    with restored_state():
        yield


@pytest.mark.trl
@pytest.mark.usefixtures("accelerate_as_before")
@pytest.mark.parametrize("name", ["trl", "unsloth"])
def test_trls_configuration_is_made_with_each_recipe(name, tmp_path):
    """Unsloth's class is made from TRL's, with the same arguments."""
    pytest.importorskip("trl", reason="`repro/venv.sh trl` installs it")
    from trl import GRPOConfig, RLOOConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gmpo import GMPOConfig
    for o in covered_objectives(name, {}):
        r = recipe(o, name)
        kind = {"gmpo": GMPOConfig, "rloo": RLOOConfig}.get(r.mode, GRPOConfig)
        typed = settings(r)
        made = kind(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            **typed,
        )
        assert {k: getattr(made, k) for k in typed} | {"scale_rewards": ""} == typed | {
            "scale_rewards": ""
        }, o
        assert kind.__name__ in "\n".join(r.settings) or kind is GRPOConfig


# ---- verl ----------------------------------------------------------------------------
SIZES = (  # what verl wants beside any recipe
    "data.train_batch_size=256",
    *(f"actor_rollout_ref.{part}_micro_batch_size_per_gpu=1" for part in (
        "actor.ppo", "rollout.log_prob", "ref.log_prob"))
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.verl
def test_verls_configuration_and_validation_take_each_recipe(capsys):
    """Hydra refuses a key that verl's YAML does not have, its dataclasses a value,
    validate_config a combination.
    """
    verl = pytest.importorskip("verl", reason="`repro/venv.sh verl` installs it")
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    plugged = ["up_dapo", "up_gspo"]
    with hydra.initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        for o in [*covered_objectives("verl", {}), *plugged]:
            typed = settings(recipe(o, "verl"))
            typed.pop("VERL_USE_EXTERNAL_MODULES", None)  # of the environment
            lines = [f"{k}={v}" for k, v in typed.items()]
            config = hydra.compose("ppo_trainer", overrides=[*lines, *SIZES])
            validate_config(config, use_reference_policy=False, use_critic=False)
            actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
            for key, wanted in typed.items():
                found = config
                for part in key.split("."):
                    found = found[part]
                assert found == wanted, (o, key)
                if (
                    key.startswith("actor_rollout_ref.actor.")
                    and "policy_loss" not in key
                ):
                    assert getattr(actor, key.rpartition(".")[2]) == wanted, (o, key)
            assert o in plugged or actor.policy_loss.loss_mode == recipe(o, "verl").mode
            assert (
                not actor.use_kl_loss
                and not config.algorithm.use_kl_in_reward
                and actor.entropy_coeff == 0
            )


@pytest.mark.verl
def test_verl_refuses_what_is_no_recipe():
    """The test above can fail: a key, a value and a combination that verl does not
    take.
    """
    verl = pytest.importorskip("verl", reason="`repro/venv.sh verl` installs it")
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with hydra.initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer/config"), version_base=None
    ):
        with pytest.raises(
            hydra.errors.ConfigCompositionException, match="Could not override"
        ):
            hydra.compose(
                "ppo_trainer", overrides=["actor_rollout_ref.actor.clip_low=0.2"]
            )
        wrong = hydra.compose(
            "ppo_trainer",
            overrides=["actor_rollout_ref.actor.loss_agg_mode=mean", *SIZES],
        )
        with pytest.raises(
            hydra.errors.InstantiationException, match="Invalid loss_agg_mode"
        ):
            omega_conf_to_dataclass(wrong.actor_rollout_ref.actor)
        with pytest.raises(
            hydra.errors.InstantiationException, match="ppo_micro_batch_size"
        ):
            validate_config(
                hydra.compose("ppo_trainer"),
                use_reference_policy=False,
                use_critic=False,
            )


# ---- what their sources declare ------------------------------------------------------
def admits(kind: str, value: object) -> bool:
    """Return whether a declared type, as the source writes it, admits this value."""
    if not kind:  # an argument without an annotation
        return True
    if isinstance(value, str) and "Literal" in kind:
        return value in literals(kind)
    if value is None:
        return "None" in kind or "Optional" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int | float | tuple):
        return "float" in kind or (isinstance(value, int) and "int" in kind)
    return not kind.startswith(("float", "int", "bool")) or value.startswith("${")


def literals(kind: str) -> set:
    return {x.value for x in ast.walk(ast.parse(kind)) if isinstance(x, ast.Constant)}


@pytest.mark.parametrize("name", READ)
def test_each_key_is_declared_in_the_audited_source(name):
    """By docs/recipe_keys.json, which `python -m docs.recipe_keys` reads from the
    version of the ledger.
    """
    found = record.rows(FILE)[name]
    assert found["version"] == ledger.read(name)[0].version
    typed = [pair for line in lines_of(name) for pair in typed_fields(line)]
    assert found["keys"].keys() == {k for k, _ in typed}, (
        "read it again: python -m docs.recipe_keys"
    )
    for key, value in typed:
        assert admits(found["keys"][key]["type"], value), (
            key,
            value,
            found["keys"][key],
        )
    for o in covered_objectives(name, {}):
        assert "its configuration was not started" in recipe(o, name).started


def test_a_declared_type_refuses_another_value():
    assert admits("Literal['a', 'b'] | None", "a") and not admits(
        "Literal['a', 'b'] | None", "c"
    )
    assert admits("float | None", None) and not admits("float", None)
    assert (
        admits("bool", False) and not admits("float", True) and not admits("bool", 0.5)
    )
    assert not admits("float", "high") and admits("int", 3) and not admits("int", 0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", READ)
def test_the_keys_are_read_again(name):
    """From the framework's files, which are verified by hash."""
    assert keys_of(name) == record.rows(FILE)[name]["keys"]
