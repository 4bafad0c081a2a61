# SPDX-License-Identifier: Apache-2.0
"""What other processes of a run find: a fresh one can import what verl's driver and
workers import, and each machine of a Ray cluster has this checkout and the folder.
"""

import json
import logging
import os
import subprocess
import sys

from omegaconf import DictConfig

from repro.with_verl.config.compose import Run
from repro.with_verl.machine.estimate import flash
from repro.with_verl.place import ROOT
from upref import InputError

CANNOT_IMPORT, NOT_REGISTERED = 3, 4  # exit statuses of the fresh process
IMPORT_ALL = f"""
import importlib, json, sys

asked = json.loads(sys.argv[1])

def end(status, sentence):
    print(sentence, file=sys.stderr)
    sys.exit(status)

try:
    import verl.trainer.ppo.core_algos as algos  # this imports the plug-in too
except Exception as e:
    end({NOT_REGISTERED}, f"verl cannot be imported ({{type(e).__name__}}: {{e}})")
if asked["loss"] not in algos.POLICY_LOSS_REGISTRY:
    end({NOT_REGISTERED}, f"it does not have the loss {{asked['loss']}}")
if asked["estimator"] not in algos.ADV_ESTIMATOR_REGISTRY:
    end({NOT_REGISTERED}, f"it does not have the estimator {{asked['estimator']}}")
for name in asked["modules"]:
    try:
        importlib.import_module(name)
    except Exception as e:
        end({CANNOT_IMPORT}, f"{{name}} cannot be imported ({{type(e).__name__}}: {{e}})")
"""


def modules(cfg: DictConfig) -> list[str]:
    """Return the modules that driver and workers of this run import; those that take
    longest come last.
    """
    engine = ["verl.workers.engine.fsdp.transformer_impl"]
    if cfg.actor_rollout_ref.actor.get("megatron"):
        engine = ["megatron.bridge", "verl.workers.engine.megatron.transformer_impl"]
    attention = ["flash_attn.bert_padding", "flash_attn.ops.triton.cross_entropy"]
    return [
        "transfer_queue",
        "repro.with_verl.reward.score",
        "math_verify",
        *engine,
        *(attention if flash(cfg) else []),
        "verl.trainer.main_ppo",
        "verl.trainer.ppo.v1",
        "verl.experimental.reward_loop",
        "vllm",
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
    ]


def check_imports(run: Run, cfg: DictConfig) -> None:
    """Import in a fresh process, with the run's environment, what its driver and
    workers import hours later.

    Names in metadata do not show that a package can be imported.

    Args:
        run: the run, whose environment the process gets.
        cfg: its configuration.

    Raises:
        InputError: a module cannot be imported, or the loss or the estimator is not
            registered then.
    """
    asked = {
        "loss": cfg.actor_rollout_ref.actor.policy_loss.loss_mode,
        "estimator": cfg.algorithm.adv_estimator,
        "modules": modules(cfg),
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, json.dumps(asked)],
        env=os.environ | run.env,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return
    said = done.stderr.strip().splitlines()
    last = said[-1][:300] if said else f"it ended with status {done.returncode}"
    part = "megatron" if cfg.actor_rollout_ref.actor.get("megatron") else "flash"
    cure = f"pip install -e {ROOT} on every machine"
    if done.returncode == CANNOT_IMPORT:
        cure = (
            f"`repro/venv.sh gpu {part}` installs what it needs into .venv-gpu; elsewhere install it, as "
            "repro/requirements/gpu.txt has it"
        )
    raise InputError(f"a fresh process cannot start {run.scale.name}: {last}: {cure}.")


def check_cluster(run: Run, loss: str) -> int:
    """Join the Ray cluster, and check that each of its machines finds the plug-in and
    the run's folder.

    Args:
        run: the run, whose environment the machines get.
        loss: name of the policy loss that must be registered there.

    Returns:
        How many machines the cluster has; 1 where none runs.

    Raises:
        InputError: a machine cannot import verl, has no such loss, or not the folder.
    """
    import ray

    try:
        ray.init(
            address="auto",
            runtime_env={"env_vars": run.env},
            logging_level=logging.ERROR,
        )
    except ConnectionError:
        return 1

    @ray.remote(num_cpus=0)
    def finds(path: str) -> tuple[bool, bool]:
        """Return whether this machine has the loss, and whether it has the file."""
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        return loss in POLICY_LOSS_REGISTRY, os.path.exists(path)

    mark = run.directory / f"seen-from-everywhere-{os.getpid()}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    nodes = [n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]]
    try:
        for ip in nodes:
            # Ray gives each machine a resource of this name: the task runs on that one
            there = finds.options(resources={f"node:{ip}": 0.001}).remote(str(mark))
            has_loss, has_folder = ray.get(there, timeout=300)
            if not has_loss:
                raise InputError(
                    f"the machine {ip} does not load {loss}: put this checkout at {ROOT} there too."
                )
            if not has_folder:
                raise InputError(
                    f"the machine {ip} does not have {run.directory}: checkpoints, logs and data must be on storage "
                    "that all machines share."
                )
    except ray.exceptions.RayError as e:
        raise InputError(
            f"a machine of the Ray cluster cannot import verl: {str(e).splitlines()[-1][:200]}."
        ) from e
    finally:
        mark.unlink(missing_ok=True)
        ray.shutdown()
    return len(nodes)
