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
from typing import Any

from omegaconf import DictConfig

from repro.with_verl.config.compose import Run, Scale
from repro.with_verl.config.model import local
from repro.with_verl.data.sources import SOURCES
from repro.with_verl.machine.estimate import GB, GPU, Estimate, estimate, gpu_of
from repro.with_verl.place import ROOT
from upref import InputError

VERL = "0.9.1"
FLASH = "2.8.3"  # verl's own pin
PREPARE = "-m repro.with_verl.data.prepare"
MEGATRON = (  # of requirements/megatron.txt, and what these import
    "megatron-core", "megatron-bridge", "transformer-engine", "mbridge", "apex", "nvidia-modelopt", "pulp", "scipy",
    "onnxscript", "nvdlfw-inspect",
)  # fmt: skip
ENGINE = ("megatron.bridge", "verl.workers.engine.megatron.transformer_impl")  # what a Megatron scale imports
OURS = ("jaxtyping", "math-verify", "sympy")  # that `pip install --no-deps -e .` leaves out in verl's image
PACKAGES = (
    "verl", "vllm", "torch", "transformers", "ray", "TransferQueue", "flash-attn", *MEGATRON, *OURS, "cuda-toolkit",
)  # fmt: skip
DRIVER = {"13": 580, "12": 525}  # CUDA -> the oldest driver, by NVIDIA's compatibility table
SOLD_AS_80 = 0.95


@dataclass
class Machine:
    """What is here. `look` fills it in; tests make their own."""

    gpus: int = 0
    gpu_bytes: float = 0.0
    gpu_name: str = ""
    free_disk: float = 0.0
    versions: dict[str, str | None] = field(default_factory=dict)
    nodes: int = 1
    driver: str = ""
    memory: float = 1e13  # of the host
    shared: float = 1e13  # bytes of /dev/shm
    cores: int = 10_000


def look(where: Path = ROOT) -> Machine:
    """GPUs by the driver (nvidia-smi), so that torch is not imported; packages by their metadata."""
    m = Machine(versions={p: _version(p) for p in PACKAGES})
    where = next(p for p in [where, *where.parents] if p.exists())
    m.free_disk = shutil.disk_usage(where).free
    m.nodes = max(1, ray_nodes())
    m.memory, m.cores = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), os.cpu_count() or 1
    m.shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader,nounits"]
        rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return m
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        rows = rows[: len(visible.split(","))]
    m.gpus = len(rows)
    if rows:
        m.driver, _, rest = rows[0].partition(", ")
        m.gpu_name, _, mib = rest.rpartition(", ")
        m.gpu_bytes = float(mib) * 2**20
    return m


def ray_nodes() -> int:
    """Machines with GPUs of the Ray cluster that a driver would join; 0 where none runs, and none is started."""
    address = os.environ.get("RAY_ADDRESS") or ("auto" if Path("/tmp/ray/ray_current_cluster").exists() else "")
    if not address:
        return 0
    code = (
        "import ray, logging, sys; ray.init(address=sys.argv[1], logging_level=logging.ERROR); "
        "print('NODES', sum(n['Alive'] and n['Resources'].get('GPU', 0) > 0 for n in ray.nodes()))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return 0
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("NODES ")]
    return int(found[-1]) if found else 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check(run: Run, cfg: DictConfig, machine: Machine) -> Estimate:
    """All checks that need nothing but this machine, the cheapest first. Raises InputError on the first that fails."""
    check_gpus(run, cfg, machine)
    if missing := missing_packages(cfg, run.scale, machine):
        raise InputError(missing[0])
    check_driver(machine)
    check_engine(run, cfg)
    model = check_model(cfg)
    check_data(cfg)
    e = price(cfg, gpu_of(machine.gpu_name), machine.gpu_bytes)
    if e.problem:
        raise InputError(e.problem)
    check_host(cfg, machine, e)
    need = e.checkpoint * ((cfg.trainer.max_actor_ckpt_to_keep or 5) + 1) if cfg.trainer.save_freq > 0 else 1 * GB
    if machine.free_disk < need:
        raise InputError(
            f"{cfg.trainer.default_local_dir} has {machine.free_disk / GB:.0f} GB free and checkpoints need "
            f"{need / GB:.0f}: set trainer.default_local_dir elsewhere or trainer.max_actor_ckpt_to_keep lower."
        )
    print(f"model: {model}")
    run.env["HF_HUB_OFFLINE"] = "1"  # everything was found; a node without a network would wait for time-outs
    run.overrides.append('+ray_kwargs.ray_init.runtime_env.env_vars.HF_HUB_OFFLINE="1"')
    return e


def price(cfg: DictConfig, gpu: GPU, gpu_bytes: float) -> Estimate:
    """The estimate, with as many prompts as the files have, or, before they are prepared, as their sources have."""
    return estimate(cfg, gpu, gpu_bytes, count_rows(cfg.data.val_files), count_rows(cfg.data.train_files))


def save_hourly(run: Run, cfg: DictConfig, e: Estimate) -> Estimate:
    """Checkpoints often enough that a machine which goes away takes an hour of work; verl saves between steps only."""
    often = max(1, int(3600 // max(e.step_seconds, 1)))
    if not any(line.startswith("trainer.save_freq=") for line in run.given) and 0 < often < cfg.trainer.save_freq:
        cfg.trainer.save_freq = often
        run.overrides.append(f"trainer.save_freq={often}")
        run.sources["trainer.save_freq"] = "ours: an hour of work between checkpoints at most, by the estimate"
        e.saves = (e.steps or 0) // often
    return e


def check_host(cfg: DictConfig, m: Machine, e: Estimate) -> None:
    """Memory, shared memory and cores of the host, which verl, Ray and NCCL take for granted."""
    actor = cfg.actor_rollout_ref.actor
    offload = actor.get("megatron") or actor.fsdp_config
    held = e.checkpoint * (offload.param_offload / 3 + offload.optimizer_offload * 2 / 3) / cfg.trainer.nnodes
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


def missing_packages(cfg: DictConfig, scale: Scale, m: Machine | None = None) -> list[str]:
    """A sentence for each package that this run needs and this environment lacks, with its cure."""
    have = m.versions if m else {p: _version(p) for p in PACKAGES}
    lacks = lambda package: package in have and not have[package]
    found = []
    if have.get("verl") != VERL:
        found.append(
            f"needs verl {VERL} and finds {have.get('verl') or 'none'}: pip install 'verl[vllm]=={VERL}' into this "
            "environment."
        )
    for package in ("vllm", "torch", "ray", "TransferQueue"):
        if lacks(package):
            extra = f"'verl[vllm]=={VERL}'" if package != "TransferQueue" else "TransferQueue==0.1.11"
            found.append(f"{package} is not installed, and verl's trainer needs it: pip install {extra}.")
    if absent := [p for p in OURS if lacks(p)]:
        found.append(
            f"{' and '.join(absent)}, which upref and its rewards need, are not installed: pip install "
            "jaxtyping==0.3.11 math-verify==0.9.0 sympy==1.14.0 (`pip install --no-deps -e .` leaves them out)."
        )
    if (absent := [p for p in MEGATRON if lacks(p)]) and cfg.actor_rollout_ref.actor.get("megatron"):
        found.append(
            f"{', '.join(absent)} {'are' if len(absent) > 1 else 'is'} not installed, and {scale.name} trains with "
            "Megatron: `repro/venv.sh gpu megatron` adds them to .venv-gpu, elsewhere pip install --no-deps -r "
            "repro/requirements/megatron.txt (Python 3.12), and pip install 'pulp<4' scipy onnxscript nvdlfw-inspect."
        )
    if lacks("flash-attn") and wants_flash(cfg):
        found.append(
            f"flash-attn is not installed, and verl's models want it: `repro/venv.sh gpu flash` adds it to .venv-gpu, "
            f"elsewhere pip install wheel ninja && pip install flash-attn=={FLASH} --no-build-isolation."
        )
    return found


def wants_flash(cfg: DictConfig) -> bool:
    """verl's models attend by flash-attn unless told otherwise; without it they fail late, in a worker."""
    wanted = cfg.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    return bool(cfg.actor_rollout_ref.actor.get("megatron")) or wanted == "flash_attention_2"


def check_driver(m: Machine) -> None:
    """CUDA says only `driver too old`, and only when a worker starts."""
    cuda = (m.versions.get("cuda-toolkit") or "").partition(".")[0]
    major = m.driver.partition(".")[0]
    if major.isdecimal() and int(major) < DRIVER.get(cuda, 0):
        raise InputError(
            f"the driver {m.driver} is too old for this environment's CUDA {cuda}, which needs {DRIVER[cuda]} or "
            "newer: update it, or run in an image for its CUDA."
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
        raise InputError(f"the model {path} is not on this machine: `hf download {path}`, or give a directory.")
    if not (found / "config.json").exists() or not list(found.glob("*.safetensors")):
        raise InputError(f"{found} holds no config.json with *.safetensors: `hf download {path}` again.")
    return str(found)


def check_data(cfg: DictConfig) -> None:
    """Every file is there and in verl's format."""
    from repro.with_verl.data.schema import check_file

    for key in ("train_files", "val_files"):
        files = cfg.data[key]
        for name in [files] if isinstance(files, str) else files:
            path = Path(name).expanduser()
            if not path.exists():
                cure = f"{sys.executable} {PREPARE} {path.stem}" if path.stem in SOURCES else "name another"
                raise InputError(f"{path} is missing: {cure}.")
            check_file(path)


def count_rows(files: Any) -> int:
    """Of prepared files; of those that are not there yet, what their sources have; 0 of others."""
    paths = [Path(f).expanduser() for f in ([files] if isinstance(files, str) else files)]
    known = [SOURCES[p.stem].count if p.stem in SOURCES else 0 for p in paths if not p.exists()]
    there = [p for p in paths if p.exists()]
    if there:
        from repro.with_verl.data.schema import check_file

    return sum(check_file(p) for p in there) + sum(known)


def at_risk(cfg: DictConfig, e: Estimate) -> str:
    """A sentence where a machine that goes away takes all of the run, or more than an hour of it; "" elsewhere."""
    often, steps = cfg.trainer.save_freq, e.steps or 0
    if often <= 0:
        return f"trainer.save_freq={often}: no checkpoint is saved, and a run that is interrupted starts over."
    hours = min(often, steps) * e.step_seconds / 3600
    if often > 1 and hours > 1:
        return f"trainer.save_freq={often}: a run that is interrupted loses up to {hours:.0f} hours of work."
    return ""


def check_engine(run: Run, cfg: DictConfig) -> None:
    """A fresh process can import what the scale's engine needs; names in metadata do not show that."""
    if not cfg.actor_rollout_ref.actor.get("megatron"):
        return
    for module in ENGINE:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], env=os.environ | run.env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
            raise InputError(
                f"a fresh process cannot import {module}, which {run.scale.name} trains with ({last[:200]}): "
                "`repro/venv.sh gpu megatron` installs what it needs into .venv-gpu; elsewhere install it, as "
                "repro/requirements/gpu.txt and megatron.txt have it."
            )


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
    """How many machines the Ray cluster has, 1 where none runs; each must find the plug-in and the run's folder."""
    import ray

    try:
        ray.init(address="auto", runtime_env={"env_vars": run.env}, logging_level=logging.ERROR)
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
            if not ray.get(has.options(resources={f"node:{ip}": 0.001}).remote(), timeout=300):
                raise InputError(f"the machine {ip} does not load {loss}: put this checkout at {ROOT} there too.")
            if not ray.get(sees.options(resources={f"node:{ip}": 0.001}).remote(str(mark)), timeout=300):
                raise InputError(
                    f"the machine {ip} does not see {run.directory}: checkpoints, logs and data must be on storage "
                    "that all machines share."
                )
    except ray.exceptions.RayError as e:
        raise InputError(f"a machine of the Ray cluster cannot import verl: {str(e).splitlines()[-1][:200]}.") from e
    finally:
        mark.unlink(missing_ok=True)
        ray.shutdown()
    return len(nodes)
