# SPDX-License-Identifier: Apache-2.0
"""The scale `cpu` of the launcher: the path that a run on GPUs takes, with the smoke
scale's toy model and settings.

    python -m repro.with_verl.run.launch up_dapo cpu [seed=1]
    [trainer.total_training_steps=12] [key=value ...]

For what can be seen without a GPU: a run that is ended and goes on, a second seed
beside the first, a sabotaged loss, two Ray nodes (RAY_ADDRESS), and the report of them.
"""

import json
from pathlib import Path

import upref
from repro import fork
from repro.with_verl.config import compose as composing
from repro.with_verl.config.compose import ACTOR, Run
from repro.with_verl.config.naming import name_of
from repro.with_verl.config.scales import Scale
from repro.with_verl.cpu import smoke, toy
from repro.with_verl.place import EXTERNAL_MODULES, RUNS

FIRST, STALL = 600, 120  # seconds: other work is on the machine too
STEPS = 12
ABOUT = "the toy model of the smoke scale on this CPU, by the launcher's own path"
# a loss that is not the reference's is shown in the report; the run goes on
WARN = f"+{ACTOR}.policy_loss.upref={{parity: {{on_fail: warn}}}}"
SEEN: dict[str, object] = {  # what the paper's figures show
    "trainer.test_freq": 4,
    "actor_rollout_ref.rollout.val_kwargs.n": 4,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.top_p": 0.7,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.0,
}
OF_ONE_MACHINE = tuple(
    f"{sign}ray_kwargs.ray_init.{key}="
    for sign in ("", "+")
    for key in (
        "num_gpus",
        "num_cpus",
        "object_store_memory",
        "include_dashboard",
        "runtime_env.py_executable",
    )
)


def compose(
    objective: str, overrides: list[str], address: str = ""
) -> tuple[Run, int | None]:
    """Compose a run of the toy, and let verl check it.

    Args:
        objective: its name.
        overrides: the user's, KEY=VALUE.
        address: of a running Ray cluster; "": Ray starts on this machine.

    Returns:
        The run, and its number of steps; None where the user sets it to null.

    Raises:
        InputError: verl refuses an override, or the objective is unknown.
    """
    o = upref.get(objective)
    given, name = composing.spelled_out(overrides)
    # the name of a run does not depend on where its folder is
    nowhere = smoke.as_overrides(smoke.settings(o, STEPS, Path("RUN")))
    directory = RUNS / (name or name_of(f"{objective}-cpu", nowhere, given))
    settings = smoke.as_overrides(smoke.settings(o, STEPS, directory))
    own = [line for line in settings if not line.startswith("trainer.logger")]
    own.append("trainer.logger=[console,file]")
    own += smoke.as_overrides(SEEN)
    own.append(f"data.val_files={directory / 'val.parquet'}")
    own.append(WARN)
    if address:
        own = [line for line in own if not line.startswith(OF_ONE_MACHINE)]
    env = smoke.environment(directory / "unused") | composing.environment(directory)
    modules = env[EXTERNAL_MODULES]
    env[EXTERNAL_MODULES] = f"repro.with_verl.cpu.device,{modules}"
    env.pop("VERL_FILE_LOGGER_PATH")  # each start has its own
    if address:  # Ray's machines were started by others, without it
        env.pop(fork.SOCKET)
        own += [
            f"+ray_kwargs.ray_init.runtime_env.env_vars.{k}={json.dumps(v)}"
            for k, v in env.items()
        ]
    cfg = smoke.dry_run(o, [WARN, *given])
    scale = Scale("cpu", ABOUT, {}, {}, {}, 0.0, None)
    total = STEPS
    if any(line.startswith("trainer.total_training_steps=") for line in given):
        total = cfg.trainer.total_training_steps
    sources = dict.fromkeys(own, "the smoke scale's, for this CPU")
    return Run(objective, scale, own + given, sources, [], directory, env), total


def prepare(run: Run) -> None:
    """Make the toy's weights and prompts in the folder of the run, if its model is not
    there yet.
    """
    if not (run.directory / "model").exists():
        run.directory.mkdir(parents=True, exist_ok=True)
        toy.make_model(run.directory / "model")
        toy.make_data(run.directory / "data.parquet")
        toy.make_data(run.directory / "val.parquet", 16)
