# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the machine, checked before verl starts. Every refusal is one
sentence with its cure.
"""

import copy
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from repro.with_verl.config.compose import Run
from repro.with_verl.config.model import download, local
from repro.with_verl.config.scales import Scale, paper
from repro.with_verl.data.sources import SOURCES
from repro.with_verl.machine.estimate import GB, GPU, Estimate, estimate, gpu_of
from repro.with_verl.machine.here import (
    MEGATRON,
    OURS,
    PACKAGES,
    Machine,
    check_driver,
    version_of,
)
from repro.with_verl.place import ROOT
from upref import InputError

VERL = "0.9.1"
GET_VERL = f"pip install 'verl[vllm]=={VERL}'"
GET_OURS = "pip install jaxtyping==0.3.11 math-verify==0.9.0 sympy==1.14.0 (`pip install --no-deps -e .` leaves them out)"
GET_MEGATRON = (
    "`repro/venv.sh gpu megatron` adds what it needs to .venv-gpu, elsewhere pip install --no-deps -r "
    "repro/requirements/megatron.txt (Python 3.12), and pip install 'pulp<4' scipy onnxscript nvdlfw-inspect"
)
GET_FLASH = (  # verl's own pin
    "`repro/venv.sh gpu flash` adds it to .venv-gpu, elsewhere pip install wheel ninja && pip install "
    "flash-attn==2.8.3 --no-build-isolation"
)
PREPARE = "-m repro.with_verl.data.prepare"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
ROLLOUT = ("vllm", "verl.workers.rollout.vllm_rollout.vllm_async_server")
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


def check(run: Run, cfg: DictConfig, machine: Machine) -> Estimate:
    """All checks that need nothing but this machine, the cheapest first. Raises
    InputError on the first that fails.
    """
    check_gpus(run, cfg, machine)
    if missing := missing_packages(cfg, run.scale, machine):
        raise InputError(missing[0])
    check_driver(machine, machine.versions.get("cuda-toolkit") or "")
    model = check_model(cfg)
    if missing := missing_data(cfg):
        raise InputError(missing[0])
    e = price(cfg, gpu_of(machine.gpu_name), machine.gpu_bytes)
    if e.problem:
        raise InputError(e.problem)
    check_host(cfg, machine, e)
    need = (
        e.checkpoint * ((cfg.trainer.max_actor_ckpt_to_keep or 5) + 1)
        if cfg.trainer.save_freq > 0
        else 1 * GB
    )
    if machine.free_disk < need:
        raise InputError(
            f"{cfg.trainer.default_local_dir} has {machine.free_disk / GB:.0f} GB free and checkpoints need "
            f"{need / GB:.0f}: set trainer.default_local_dir elsewhere or trainer.max_actor_ckpt_to_keep lower."
        )
    print(f"model: {model}")
    # a name, which verl would look up at another commit
    if model != cfg.actor_rollout_ref.model.path:
        run.overrides.append(f'actor_rollout_ref.model.path="{model}"')
        run.sources["actor_rollout_ref.model.path"] = (
            "ours: the commit of the hub to which the model is pinned"
        )
    # everything was found; a node without a network would wait for time-outs
    run.env["HF_HUB_OFFLINE"] = "1"
    run.overrides.append('+ray_kwargs.ray_init.runtime_env.env_vars.HF_HUB_OFFLINE="1"')
    return e


def price(cfg: DictConfig, gpu: GPU, gpu_bytes: float) -> Estimate:
    """The estimate, with as many prompts as the files have, or, before they are
    prepared, as their sources have.
    """
    return estimate(
        cfg,
        gpu,
        gpu_bytes,
        count_rows(cfg.data.val_files),
        count_rows(cfg.data.train_files),
    )


def save_hourly(run: Run, cfg: DictConfig, e: Estimate) -> Estimate:
    """Checkpoints often enough that a machine which goes away takes an hour of work;
    verl saves between steps only.
    """
    often = max(1, int(3600 // max(e.step_seconds, 1)))
    if (
        not any(line.startswith("trainer.save_freq=") for line in run.given)
        and 0 < often < cfg.trainer.save_freq
    ):
        cfg.trainer.save_freq = often
        run.overrides.append(f"trainer.save_freq={often}")
        run.sources["trainer.save_freq"] = (
            "ours: an hour of work between checkpoints at most, by the estimate"
        )
        e.saves = (e.steps or 0) // often
    return e


def check_host(cfg: DictConfig, m: Machine, e: Estimate) -> None:
    """Memory, shared memory and cores of the host, which verl, Ray and NCCL take for
    granted.
    """
    actor = cfg.actor_rollout_ref.actor
    offload = actor.get("megatron") or actor.fsdp_config
    held = (
        e.checkpoint
        * (offload.param_offload / 3 + offload.optimizer_offload * 2 / 3)
        / cfg.trainer.nnodes
    )
    need = held + 20 * GB + 4 * GB * cfg.trainer.n_gpus_per_node
    if m.memory < need:
        raise InputError(
            f"this machine has {m.memory / GB:.0f} GB of memory and the run needs {need / GB:.0f}, {held / GB:.0f} of "
            "them for what is offloaded: take a larger machine, or turn an offload off."
        )
    if m.shared < 1 * GB:
        raise InputError(
            f"/dev/shm has {m.shared / GB:.2f} GB, too little for NCCL: start the container with --shm-size=16g."
        )
    if m.cores < 3 * cfg.trainer.n_gpus_per_node:
        raise InputError(
            f"this machine has {m.cores} cores, and verl requests 3 per GPU ({3 * cfg.trainer.n_gpus_per_node}): "
            "Ray would wait forever; take more cores or set trainer.n_gpus_per_node lower."
        )


def missing_packages(
    cfg: DictConfig, scale: Scale, m: Machine | None = None
) -> list[str]:
    """A sentence for each group of packages that this run needs and this environment
    lacks, with its cure.
    """
    have = m.versions if m else {p: version_of(p) for p in PACKAGES}
    found = []
    if have.get("verl") != VERL:
        found.append(
            f"needs verl {VERL} and finds {have.get('verl') or 'none'}: {GET_VERL} into this environment."
        )
    megatron = MEGATRON if cfg.actor_rollout_ref.actor.get("megatron") else ()
    goes_without = (
        scale.without_flash
        and "attn_implementation" not in cfg.actor_rollout_ref.model.override_config
    )
    flash = ("flash-attn",) if wants_flash(cfg) and not goes_without else ()
    for packages, whose, cure in (
        (
            ("vllm", "torch", "ray", "TransferQueue"),
            "verl's trainer needs",
            f"{GET_VERL} TransferQueue==0.1.11",
        ),
        (OURS, "upref and its rewards need", GET_OURS),
        (megatron, f"{scale.name}, with Megatron, needs", GET_MEGATRON),
        (flash, "verl's models want", GET_FLASH),
    ):
        absent = [p for p in packages if p in have and not have[p]]
        if absent:
            be, them = ("are", "them") if len(absent) > 1 else ("is", "it")
            found.append(
                f"{', '.join(absent)} {be} not installed, and {whose} {them}: {cure}."
            )
    return found


def wants_flash(cfg: DictConfig) -> bool:
    """verl's models attend by flash-attn unless told otherwise; without it they fail
    late, in a worker.
    """
    wanted = cfg.actor_rollout_ref.model.override_config.get(
        "attn_implementation", "flash_attention_2"
    )
    return (
        bool(cfg.actor_rollout_ref.actor.get("megatron"))
        or wanted == "flash_attention_2"
    )


def check_gpus(run: Run, cfg: DictConfig, m: Machine, alone: bool = False) -> None:
    """alone: leave the number of machines for later, when Ray was asked."""
    want, nodes = cfg.trainer.n_gpus_per_node, cfg.trainer.nnodes
    if not m.gpus:
        raise InputError(
            f"no GPU is visible here, and {run.scale.name} needs {nodes} x {want}: take the scale mini or smoke."
        )
    if m.gpus < want:
        raise InputError(
            f"{run.scale.name} needs {want} GPUs a machine and {m.gpus} are visible: set "
            f"trainer.n_gpus_per_node={m.gpus}, or take a smaller scale."
        )
    if nodes > m.nodes and not alone:
        raise InputError(
            f"{run.scale.name} needs {nodes} machines and Ray knows {m.nodes}: `ray start --head` on the first and "
            "`ray start --address=FIRST:6379` on the others (.venv-gpu/bin/ray; repro/with_verl/PAPER.md), or set "
            "trainer.nnodes."
        )


def check_model(cfg: DictConfig) -> str:
    """Where the model's files are: a directory, or the hub's cache."""
    path = cfg.actor_rollout_ref.model.path
    found = local(path)
    if found is None:
        raise InputError(
            f"the model {path} is not on this machine: `{download(path)}`, or give a directory."
        )
    if not (found / "config.json").exists() or not list(found.glob("*.safetensors")):
        raise InputError(
            f"{found} holds no config.json with *.safetensors: `{download(path)}` again."
        )
    return str(found)


def missing_data(cfg: DictConfig) -> list[str]:
    """A sentence for each file that is not there or not in verl's format, with its
    cure.
    """
    from repro.with_verl.data.schema import check_file

    found = []
    for key in ("train_files", "val_files"):
        files = cfg.data[key]
        for name in [files] if isinstance(files, str) else files:
            path = Path(name).expanduser()
            if not path.exists():
                cure = (
                    f"{sys.executable} {PREPARE} {path.stem}"
                    if path.stem in SOURCES
                    else "name another"
                )
                found.append(f"{path} is missing: {cure}.")
                continue
            try:
                check_file(path)
            except InputError as e:
                found.append(str(e))
    return found


def missing_here(cfg: DictConfig, scale: Scale) -> list[str]:
    """A sentence for each package, model and data file that this machine lacks, with
    its cure.
    """
    found = missing_packages(cfg, scale)
    try:
        check_model(cfg)
    except InputError as e:
        found.append(str(e))
    return found + missing_data(cfg)


def price_of_flash(run: Run, cfg: DictConfig, gpu: GPU, gpu_bytes: float) -> str:
    """A sentence with what the run costs with and without flash-attn; "" where the
    scale needs it.
    """
    if not run.scale.without_flash or any(
        "attn_implementation" in line for line in run.given
    ):
        return ""
    other = copy.deepcopy(cfg)
    here = wants_flash(cfg)
    OmegaConf.update(
        other, ATTENTION, "sdpa" if here else "flash_attention_2", force_add=True
    )
    e = price(other, gpu, gpu_bytes)
    cost = f"the same steps take {e.hours:,.0f} hours and {e.dollars:,.0f} dollars"
    if here:
        return (
            f"where flash-attn is not installed (its wheel is for Python 3.12), {cost}."
        )
    return f"flash-attn is not installed; with it {cost}: `repro/venv.sh gpu flash`, with Python 3.12."


def count_rows(files: Any) -> int:
    """Of prepared files; of those that are not there yet, what their sources have; 0 of
    others.
    """
    paths = [
        Path(f).expanduser() for f in ([files] if isinstance(files, str) else files)
    ]
    known = [
        SOURCES[p.stem].count if p.stem in SOURCES else 0
        for p in paths
        if not p.exists()
    ]
    there = [p for p in paths if p.exists()]
    if there:
        from repro.with_verl.data.schema import check_file

    return sum(check_file(p) for p in there) + sum(known)


def epochs_in_print(scale: Scale) -> str:
    """Both readings of the epochs that the LaTeX of the paper's Table A1 has commented
    out; "" for other scales.
    """
    data = paper()
    experiment = data["experiments"].get(scale.experiment or "", {"tables": []})
    if "A1" not in experiment["tables"]:
        return ""
    rows = {row[0]: row[1:] for row in data["A1"]["commented"]}
    epochs = rows["Total epochs"][data["A1"]["columns"].index(experiment["methods"][0])]
    source, batch = SOURCES["dapo_math_17k"], scale.values["data.train_batch_size"][0]
    whole, unique = (
        epochs * (count // batch)
        for count in (source.count * source.copies, source.count)
    )
    return (
        f"Table A1 prints no steps; its LaTeX has `Total epochs {epochs}` commented out. With {batch} prompts a step "
        f"that is {whole:,} steps on the published file, which has each problem {source.copies} times, or {unique:,} "
        f"on its {source.count:,} problems; dynamic sampling draws more prompts a step, so that an epoch has fewer. "
        f"{scale.name} trains {scale.values['trainer.total_training_steps'][0]:,}."
    )


def at_risk(cfg: DictConfig, e: Estimate) -> str:
    """A sentence where a machine that goes away takes all of the run, or more than an
    hour of it; "" elsewhere.
    """
    often, steps = cfg.trainer.save_freq, e.steps or 0
    if often <= 0:
        return f"trainer.save_freq={often}: no checkpoint is saved, and a run that is interrupted starts over."
    hours = min(often, steps) * e.step_seconds / 3600
    if often > 1 and hours > 1:
        return f"trainer.save_freq={often}: a run that is interrupted loses up to {hours:.0f} hours of work."
    return ""


def modules(cfg: DictConfig) -> list[str]:
    """What driver and workers of this run import, heaviest last."""
    found = ["transfer_queue", "repro.with_verl.reward.score", "math_verify"]
    megatron = ["megatron.bridge", "verl.workers.engine.megatron.transformer_impl"]
    found += (
        megatron
        if cfg.actor_rollout_ref.actor.get("megatron")
        else ["verl.workers.engine.fsdp.transformer_impl"]
    )
    if wants_flash(cfg):
        found += ["flash_attn.bert_padding", "flash_attn.ops.triton.cross_entropy"]
    return [
        *found,
        "verl.trainer.main_ppo",
        "verl.trainer.ppo.v1",
        "verl.experimental.reward_loop",
        *ROLLOUT,
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
    names = {
        "loss": cfg.actor_rollout_ref.actor.policy_loss.loss_mode,
        "estimator": cfg.algorithm.adv_estimator,
    }
    asked = json.dumps(names | {"modules": modules(cfg)})
    env = os.environ | run.env
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, asked],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return
    last = (
        done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
    )[-1][:300]
    part = "megatron" if cfg.actor_rollout_ref.actor.get("megatron") else "flash"
    cure = f"pip install -e {ROOT} on every machine"
    if done.returncode == CANNOT_IMPORT:
        cure = (
            f"`repro/venv.sh gpu {part}` installs what it needs into .venv-gpu; elsewhere install it, as "
            "repro/requirements/gpu.txt has it"
        )
    raise InputError(f"a fresh process cannot start {run.scale.name}: {last}: {cure}.")


def check_cluster(run: Run, loss: str) -> int:
    """How many machines the Ray cluster has, 1 where none runs; each must find the
    plug-in and the run's folder.
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
    def has() -> bool:
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        return loss in POLICY_LOSS_REGISTRY

    @ray.remote(num_cpus=0)
    def sees(path: str) -> bool:
        return os.path.exists(path)

    mark = run.directory / f"seen-from-everywhere-{os.getpid()}"
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    nodes = [n for n in ray.nodes() if n["Alive"]]
    try:
        for n in nodes:
            ip = n["NodeManagerAddress"]
            if not ray.get(
                has.options(resources={f"node:{ip}": 0.001}).remote(), timeout=300
            ):
                raise InputError(
                    f"the machine {ip} does not load {loss}: put this checkout at {ROOT} there too."
                )
            if not ray.get(
                sees.options(resources={f"node:{ip}": 0.001}).remote(str(mark)),
                timeout=300,
            ):
                raise InputError(
                    f"the machine {ip} does not see {run.directory}: checkpoints, logs and data must be on storage "
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
