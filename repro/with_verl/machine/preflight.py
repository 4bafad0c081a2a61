# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the machine, checked before verl starts.

CHECKS is the table, the cheapest check first. Each is a function that yields one
sentence, with its cure, for each thing that is missing.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from repro.with_verl.config.compose import Run
from repro.with_verl.config.model import download, local
from repro.with_verl.data.sources import SOURCES
from repro.with_verl.machine import here
from repro.with_verl.machine.costs import price
from repro.with_verl.machine.estimate import GB, Estimate, flash, gpu_of, offloads
from repro.with_verl.machine.here import MEGATRON, OURS, Machine
from repro.with_verl.refuse import refuse
from upref import InputError

VERL = "0.9.1"
GET_VERL = f"pip install 'verl[vllm]=={VERL}'"
TRANSFORMERS = SpecifierSet("!=5.6.0,<5.11,>=5.5.3")  # as verl's metadata has it
GET_TRANSFORMERS = "pip install transformers==5.9.0"  # verl's own pin beside vLLM
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
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


@dataclass
class Start:
    """A run that is about to start: what is asked for, and where."""

    run: Run
    cfg: DictConfig
    machine: Machine

    @cached_property
    def estimate(self) -> Estimate:
        """Return the estimate of memory and hours on this machine's GPUs, which is made
        once.
        """
        m = self.machine
        return price(self.cfg, gpu_of(m.gpu_name), m.gpu_bytes)

    @property
    def scale(self) -> str:
        return self.run.scale.name


def gpus(s: Start) -> Iterator[str]:
    """Yield a sentence if this machine has fewer GPUs than the scale needs of each."""
    want = s.cfg.trainer.n_gpus_per_node
    nodes = s.cfg.trainer.nnodes
    m = s.machine
    if not m.gpus:
        yield f"no GPU is visible here, and {s.scale} needs {nodes} x {want}: take the scale mini or smoke."
    if m.gpus < want:
        yield (
            f"{s.scale} needs {want} GPUs a machine and {m.gpus} are visible: set "
            f"trainer.n_gpus_per_node={m.gpus}, or take a smaller scale."
        )


def machines(s: Start) -> Iterator[str]:
    """Yield a sentence if the Ray cluster has fewer machines than the scale needs."""
    want, have = s.cfg.trainer.nnodes, s.machine.nodes
    if want > have:
        yield (
            f"{s.scale} needs {want} machines and Ray knows {have}: `ray start --head` on the first and "
            "`ray start --address=FIRST:6379` on the others (.venv-gpu/bin/ray; repro/with_verl/PAPER.md), or set "
            "trainer.nnodes."
        )


def packages(s: Start) -> Iterator[str]:
    """Yield a sentence if verl or transformers has another version than is needed, and
    for each group of packages that are not installed.
    """
    have = s.machine.versions
    found = have.get("verl")
    if found != VERL:
        yield f"verl {VERL} is needed, and {found or 'none'} is installed: {GET_VERL} into this environment."
    found = have.get("transformers")
    if "transformers" in have and not (found and Version(found) in TRANSFORMERS):
        yield (
            f"verl {VERL} needs transformers {TRANSFORMERS}, and {found or 'none'} is installed: "
            f"{GET_TRANSFORMERS} into this environment."
        )
    trainer = ("vllm", "torch", "ray", "TransferQueue")
    megatron = MEGATRON if s.cfg.actor_rollout_ref.actor.get("megatron") else ()
    chosen = "attn_implementation" in s.cfg.actor_rollout_ref.model.override_config
    needs_flash = flash(s.cfg) and (chosen or not s.run.scale.without_flash)
    for names, who, cure in (
        (trainer, "verl's trainer needs", f"{GET_VERL} TransferQueue==0.1.11"),
        (OURS, "upref and its rewards need", GET_OURS),
        (megatron, f"{s.scale}, with Megatron, needs", GET_MEGATRON),
        (("flash-attn",) if needs_flash else (), "verl's models need", GET_FLASH),
    ):
        absent = [name for name in names if name in have and not have[name]]
        be, them = ("are", "them") if len(absent) > 1 else ("is", "it")
        if absent:
            yield f"{', '.join(absent)} {be} not installed, and {who} {them}: {cure}."


def driver(s: Start) -> Iterator[str]:
    """Yield a sentence if the driver cannot run the CUDA of this environment."""
    return here.old_driver(s.machine, s.machine.versions.get("cuda-toolkit") or "")


def model(s: Start) -> Iterator[str]:
    """Yield a sentence if the model's files are not on this machine, in a directory or
    in the hub's cache.
    """
    path = s.cfg.actor_rollout_ref.model.path
    found = local(path)
    if found is None:
        yield f"the model {path} is not on this machine: `{download(path)}`, or give a directory."
    elif not (found / "config.json").exists() or not list(found.glob("*.safetensors")):
        yield f"{found} holds no config.json with *.safetensors: `{download(path)}` again."


def data(s: Start) -> Iterator[str]:
    """Yield a sentence for each data file that is not there or not in verl's format."""
    from repro.with_verl.data.schema import check_file

    for files in (s.cfg.data.train_files, s.cfg.data.val_files):
        for name in [files] if isinstance(files, str) else files:
            path = Path(name).expanduser()
            try:
                if path.exists():
                    check_file(path)
                elif path.stem in SOURCES:
                    yield f"{path} is missing: {sys.executable} {PREPARE} {path.stem}."
                else:
                    yield f"{path} is missing: name another."
            except InputError as e:
                yield str(e)


def memory_of_gpu(s: Start) -> Iterator[str]:
    """Yield a sentence if training or sampling does not fit a GPU, by the estimate."""
    if s.estimate.problem:
        yield s.estimate.problem


def memory_of_host(s: Start) -> Iterator[str]:
    """Yield a sentence if what is offloaded does not fit the machine's memory, beside
    20 GB, and 4 GB for each GPU.
    """
    have = s.machine.memory
    trainer = s.cfg.trainer
    shares = offloads(s.cfg, "param") / 3 + offloads(s.cfg, "optimizer") * 2 / 3
    held = s.estimate.checkpoint * shares / trainer.nnodes
    need = held + 20 * GB + 4 * GB * trainer.n_gpus_per_node
    if have < need:
        yield (
            f"this machine has {have / GB:.0f} GB of memory and the run needs {need / GB:.0f}, {held / GB:.0f} of "
            "them for what is offloaded: take a larger machine, or turn an offload off."
        )


def shared_memory(s: Start) -> Iterator[str]:
    """Yield a sentence if /dev/shm is too small for NCCL's buffers."""
    if (have := s.machine.shared) < 1 * GB:
        yield f"/dev/shm has {have / GB:.2f} GB, too little for NCCL: start the container with --shm-size=16g."


def cores(s: Start) -> Iterator[str]:
    """Yield a sentence if the machine has fewer cores than verl requests of Ray."""
    have = s.machine.cores
    need = 3 * s.cfg.trainer.n_gpus_per_node
    if have < need:
        yield (
            f"this machine has {have} cores, and verl requests 3 per GPU ({need}): "
            "Ray would wait forever; take more cores or set trainer.n_gpus_per_node lower."
        )


def disk(s: Start) -> Iterator[str]:
    """Yield a sentence if the disk has no room for the checkpoints that are kept and
    the next one.
    """
    trainer = s.cfg.trainer
    have = s.machine.free_disk
    kept = (trainer.max_actor_ckpt_to_keep or 5) + 1
    need = s.estimate.checkpoint * kept if trainer.save_freq > 0 else 1 * GB
    if have < need:
        yield (
            f"{trainer.default_local_dir} has {have / GB:.0f} GB free and checkpoints need "
            f"{need / GB:.0f}: set trainer.default_local_dir elsewhere or trainer.max_actor_ckpt_to_keep lower."
        )


INSTALLED = (packages, model, data)  # what a dry run checks too
CHECKS = (
    gpus,
    machines,
    packages,
    driver,
    model,
    data,
    memory_of_gpu,
    memory_of_host,
    shared_memory,
    cores,
    disk,
)


def check(s: Start) -> None:
    """Run all checks. Raise InputError with the first sentence."""
    for one in CHECKS:
        refuse(one(s))


def missing(s: Start) -> list[str]:
    """Return all sentences about packages, model and data that are not here."""
    return [sentence for one in INSTALLED for sentence in one(s)]


def use_local_files(s: Start) -> None:
    """Have verl read the model that was found and not ask the hub, where a node without
    a network would wait for time-outs. Print the folder; the overrides and the
    environment of the run are changed.
    """
    path = s.cfg.actor_rollout_ref.model.path
    found = str(local(path))
    print(f"model: {found}")
    if found != path:  # a name, which verl would look up at another commit
        s.run.overrides.append(f'actor_rollout_ref.model.path="{found}"')
        s.run.sources["actor_rollout_ref.model.path"] = (
            "ours: the commit of the hub to which the model is pinned"
        )
    _set_everywhere(s.run, "HF_HUB_OFFLINE", "1", "ours: every file is here")


def choose_sampler(s: Start) -> None:
    """Have vLLM sample by itself where flashinfer is not installed: its sampler of
    Qwen3 and Llama would import flashinfer, and fail a minute after the start.

    Raises:
        InputError: the user asks for flashinfer's sampler, and it is not installed.
    """
    have = s.machine.versions
    # a package that the machine's list leaves out counts as installed
    if not have.get("vllm") or have.get("flashinfer-python", "unknown"):
        return
    if os.environ.get(FLASHINFER_SAMPLER, "0") != "0":
        raise InputError(
            f"{FLASHINFER_SAMPLER}={os.environ[FLASHINFER_SAMPLER]} is set and flashinfer-python is not installed: "
            "set it to 0, or install flashinfer-python as repro/requirements/gpu.txt has it."
        )
    why = "ours: flashinfer is not installed, and vLLM's sampler would import it"
    _set_everywhere(s.run, FLASHINFER_SAMPLER, "0", why)


def _set_everywhere(run: Run, name: str, value: str, why: str) -> None:
    """Set an environment variable for every process of a run, by its `env` and by an
    override for Ray's workers.
    """
    run.env[name] = value
    key = f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}"
    run.overrides.append(f'{key}="{value}"')
    run.sources[key] = why
