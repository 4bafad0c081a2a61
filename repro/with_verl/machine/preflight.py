# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the machine, checked before verl starts. Every refusal is one sentence with its cure."""

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig

from repro.with_verl.config.compose import Run
from repro.with_verl.machine.estimate import GB, Estimate, estimate
from repro.with_verl.place import ROOT
from upref import InputError

VERL = "0.9.1"
FLASH = "2.8.3"  # verl's own pin
PREPARE = "-m repro.with_verl.data.prepare"
PACKAGES = ("verl", "vllm", "torch", "transformers", "ray", "TransferQueue", "flash-attn")


@dataclass
class Machine:
    """What is here. `look` fills it in; tests make their own."""

    gpus: int = 0
    gpu_bytes: float = 0.0
    gpu_name: str = ""
    free_disk: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    nodes: int = 1


def look(where: Path = ROOT) -> Machine:
    """GPUs by the driver (nvidia-smi), so that torch is not imported; packages by their metadata."""
    m = Machine(versions={p: _version(p) for p in PACKAGES})
    where = next(p for p in [where, *where.parents] if p.exists())
    m.free_disk = shutil.disk_usage(where).free
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return m
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        rows = rows[: len(visible.split(","))]
    m.gpus = len(rows)
    if rows:
        m.gpu_name, _, mib = rows[0].rpartition(", ")
        m.gpu_bytes = float(mib) * 2**20
    return m


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check(run: Run, cfg: DictConfig, machine: Machine) -> Estimate:
    """All checks that need nothing but this machine, the cheapest first. Raises InputError on the first that fails."""
    check_gpus(run, cfg, machine)
    check_versions(machine)
    check_attention(cfg, machine)
    model = check_model(cfg)
    val_rows = check_data(cfg)
    e = estimate(run.scale, cfg, machine.gpu_bytes, val_rows)
    if e.problem:
        raise InputError(e.problem)
    need = e.checkpoint * ((cfg.trainer.max_actor_ckpt_to_keep or 5) + 1) if cfg.trainer.save_freq > 0 else 1 * GB
    if machine.free_disk < need:
        raise InputError(
            f"{run.directory} has {machine.free_disk / GB:.0f} GB free and checkpoints need {need / GB:.0f}: set "
            "trainer.default_local_dir elsewhere or trainer.max_actor_ckpt_to_keep lower."
        )
    run.notes.append(f"model: {model}")
    return e


def check_versions(m: Machine) -> None:
    verl = m.versions.get("verl")
    if verl != VERL:
        raise InputError(
            f"needs verl {VERL} and finds {verl or 'none'}: pip install 'verl[vllm]=={VERL}' into this environment."
        )
    for package in ("vllm", "torch", "ray", "TransferQueue"):
        if package in m.versions and not m.versions[package]:
            extra = f"'verl[vllm]=={VERL}'" if package != "TransferQueue" else "TransferQueue==0.1.11"
            raise InputError(f"{package} is not installed, and verl's trainer needs it: pip install {extra}.")


def check_attention(cfg: DictConfig, m: Machine) -> None:
    """verl's FSDP models attend by flash-attn unless told otherwise; without it they fail late, in a worker."""
    fsdp = str(cfg.actor_rollout_ref.actor.strategy).startswith("fsdp")
    wanted = cfg.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    if fsdp and wanted == "flash_attention_2" and "flash-attn" in m.versions and not m.versions["flash-attn"]:
        raise InputError(
            f"flash-attn is not installed, and verl's models want it: pip install flash-attn=={FLASH} "
            "--no-build-isolation (it is compiled, and needs nvcc), or run in verl's own image (UPREF_PYTHON=python)."
        )


def check_gpus(run: Run, cfg: DictConfig, m: Machine) -> None:
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
    if nodes > m.nodes:
        raise InputError(
            f"{run.scale.name} needs {nodes} machines and Ray knows {m.nodes}: `ray start --head` on the first and "
            "`ray start --address=FIRST:6379` on the others (repro/with_verl/PAPER.md), or set trainer.nnodes."
        )


def check_model(cfg: DictConfig) -> str:
    """Where the model's files are: a directory, or the hub's cache."""
    path = cfg.actor_rollout_ref.model.path
    if Path(path).expanduser().is_dir():
        found = Path(path).expanduser()
    else:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            config = try_to_load_from_cache(path, "config.json")
        except HFValidationError:
            config = None
        if not isinstance(config, str):
            raise InputError(f"the model {path} is not on this machine: `hf download {path}`, or give a directory.")
        found = Path(config).parent
    if not (found / "config.json").exists() or not list(found.glob("*.safetensors")):
        raise InputError(f"{found} holds no config.json with *.safetensors: `hf download {path}` again.")
    return str(found)


def check_data(cfg: DictConfig) -> int:
    """Every file is there and in verl's format; the number of validation prompts."""
    from repro.with_verl.data.schema import check_file

    rows = 0
    for key in ("train_files", "val_files"):
        files = cfg.data[key]
        for name in [files] if isinstance(files, str) else files:
            path = Path(name).expanduser()
            if not path.exists():
                raise InputError(f"{path} is missing: {sys.executable} {PREPARE} {path.stem}.")
            n = check_file(path)
            rows += n if key == "val_files" else 0
    return rows


def check_plugin(run: Run, loss: str, estimator: str) -> None:
    """A fresh process with the run's environment has the loss and the estimator, as driver and workers must."""
    code = (
        "import verl.trainer.ppo.core_algos as c, sys; "
        f"sys.exit(0 if {loss!r} in c.POLICY_LOSS_REGISTRY and {estimator!r} in c.ADV_ESTIMATOR_REGISTRY else 3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | run.env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it is not registered"])[-1]
        raise InputError(
            f"a fresh process does not have {loss} ({last[:200]}): pip install -e {ROOT} on every machine."
        )


def check_cluster(run: Run, loss: str) -> int:
    """The number of machines in the Ray cluster; each must find the plug-in. 1 where no cluster runs."""
    import ray

    try:
        ray.init(address="auto", runtime_env={"env_vars": run.env}, logging_level=logging.ERROR)
    except ConnectionError:
        return 1

    @ray.remote(num_cpus=0)
    def has() -> bool:
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

        return loss in POLICY_LOSS_REGISTRY

    nodes = [n for n in ray.nodes() if n["Alive"]]
    try:
        for n in nodes:
            ip = n["NodeManagerAddress"]
            if not ray.get(has.options(resources={f"node:{ip}": 0.001}).remote(), timeout=300):
                raise InputError(f"the machine {ip} does not load {loss}: put this checkout at {ROOT} there too.")
    except ray.exceptions.RayError as e:
        raise InputError(f"a machine of the Ray cluster cannot import verl: {str(e).splitlines()[-1][:200]}.") from e
    finally:
        ray.shutdown()
    return len(nodes)
