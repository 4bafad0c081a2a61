# SPDX-License-Identifier: Apache-2.0
"""Which scale this machine carries and what it needs, before anything is installed:
`repro/run.sh` starts it.

    python3 -m repro.with_verl.machine.ladder OBJECTIVE SCALE [WORDS...]      SCALE "": the largest

Prints the scale and the parts of `repro/venv.sh` that it needs, or `dry` where nothing
is to be trained. Exit status 2, with one sentence, where the GPUs, the driver or the
words do not allow the run. Needs Python and no package.
"""

import os
import platform
import re
import sys
from dataclasses import dataclass

from repro.with_verl.config.scales import HANDED_OVER, load_scale, paper_scale
from repro.with_verl.machine.here import Machine, look, old_driver
from repro.with_verl.place import ROOT
from repro.with_verl.refuse import refuse
from upref import InputError

GB = 1e9
SOLD_AS = 0.95  # what is sold as 80 GB reports 79.6 GiB or 81.6 GB
TRL_GB = 12.0  # what `repro/with_trl` needs of a GPU, by its own estimate
TRL_ABOUT = "Qwen2.5-0.5B-Instruct on GSM8K in TRL"
WHEEL = "3.12"  # the Python of the wheels in requirements/flash.txt and megatron.txt
WITHOUT_FLASH = ("gpu1", "gpu1_24gb")  # these go without flash-attn where there is none
OFF = ("false", "False", "0", "no", "off")


def largest(objective: str, m: Machine) -> tuple[str, str]:
    """Choose the largest scale that the machine or the Ray cluster carries.

    Args:
        objective: its name; the scale `paper` depends on it.
        m: the machine.

    Returns:
        The scale's name, and why it is this one.
    """
    if not m.gpus:
        why = "no GPU is visible here (the scale smoke runs verl and vLLM on the CPU, after an install of 3 GB)"
        return "mini", why
    found = (
        f"{m.nodes} x {m.gpus} x {m.gpu_name or 'GPU'} with {m.gpu_bytes / GB:.0f} GB"
    )
    too_small: list[str] = []
    for name in (paper_scale(objective)[0], "gpu8", "gpu1", "gpu1_24gb", "trl"):
        needed = needs(name)
        if m.nodes >= needed.nodes and needed.are_met_by(m.gpus, m.gpu_bytes):
            why = f"{found} carry {needed} ({needed.about})"
            return name, "; ".join([why, *too_small])
        too_small.append(f"{name} needs {needed}")
    return "mini", f"{found} are too small: {'; '.join(too_small)}"


@dataclass(frozen=True)
class Needs:
    """The machines on which a scale runs.

    Attributes:
        nodes: machines.
        gpus: of each machine.
        gpu_gb: memory of each GPU, in GB.
        about: what the scale trains, in words.
    """

    nodes: int
    gpus: int
    gpu_gb: float
    about: str

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus} GPUs of {self.gpu_gb:.0f} GB"

    def are_met_by(self, gpus: int, gpu_bytes: float) -> bool:
        """Return whether a machine has as many GPUs, and as much memory on each."""
        return gpus >= self.gpus and gpu_bytes >= SOLD_AS * self.gpu_gb * GB


def needs(scale: str) -> Needs:
    """Return what a scale needs.

    Args:
        scale: `trl`, or a name of a scale of verl, such as `gpu1`.
    """
    if scale == "trl":
        return Needs(nodes=1, gpus=1, gpu_gb=TRL_GB, about=TRL_ABOUT)
    s = load_scale(scale)
    return Needs(
        nodes=s.values["trainer.nnodes"][0],
        gpus=s.values["trainer.n_gpus_per_node"][0],
        gpu_gb=s.gpu_gb,
        about=s.about,
    )


def parts(scale: str) -> list[str]:
    """Return what `repro/venv.sh` installs for a scale with this Python. Print a note
    if flash-attn is left out, on stderr.

    Raises:
        InputError: the scale needs flash-attn, and its wheel is for another Python.
    """
    if scale == "trl":
        return ["verl", "trl"]
    if scale == "mini":
        return ["mini"]
    here = ".".join(platform.python_version_tuple()[:2])
    if here == WHEEL:
        return ["gpu", "megatron" if scale == "paper_gspo" else "flash"]
    if scale in WITHOUT_FLASH:
        print(
            f"{scale}: flash-attn's wheel is for Python {WHEEL} and this one is {here}, so verl goes without it: the "
            "same steps at up to twice the price, which the launcher prints.",
            file=sys.stderr,
        )
        return ["gpu"]
    raise InputError(
        f"{scale} needs flash-attn, whose wheel is for Python {WHEEL}, and this Python is {here}: install Python "
        f"{WHEEL} and remove .venv-gpu if it is there, or compile flash-attn into a Python of your own and name that "
        "one, UPREF_PYTHON=..."
    )


def check_gpus(scale: str, m: Machine, changed: bool) -> None:
    """Refuse a scale that these GPUs cannot run.

    Args:
        scale: its name.
        m: the machine.
        changed: whether the user changes settings, which may make the scale fit: then a
            note on stderr takes the place of the error, unless there is no GPU.

    Raises:
        InputError: there is no GPU, or too few or too small ones.
    """
    needed = needs(scale)
    want = f"{scale} needs {needed}"
    if not m.gpus:
        cure = (
            "--tiny takes the same path on the CPU"
            if scale == "trl"
            else "--dry-run prices it without one"
        )
        raise InputError(
            f"no GPU is visible here, and {want}: take the scale mini or smoke; {cure}."
        )
    if needed.are_met_by(m.gpus, m.gpu_bytes):
        return
    said = f"{want}, and {m.gpus} x {m.gpu_name or 'GPU'} with {m.gpu_bytes / GB:.0f} GB are here"
    if not changed:
        raise InputError(
            f"{said}: without a scale, repro/run.sh takes the largest that they carry."
        )
    print(
        f"note: {said}; the launcher will say whether your settings make it fit.",
        file=sys.stderr,
    )


def check_words(words: list[str]) -> None:
    """Check overrides as far as verl's configuration is not needed. Print a note, on
    stderr, if no checkpoint is saved.

    Raises:
        InputError: an override asks for what no scale has.
    """
    for word in words:
        key, _, value = word.partition("=")
        key = key.lstrip("+~")
        if key == "actor_rollout_ref.hybrid_engine" and value in OFF:
            raise InputError(
                f"{key}={value} asks for GPUs that sample alone, and no scale has them: leave it true."
            )
        if key == "trainer.save_freq" and re.fullmatch(r"-\d+|0", value):
            print(
                f"note: {word}: no checkpoint is saved, and a run that is interrupted starts over.",
                file=sys.stderr,
            )


def choose(objective: str, scale: str, words: list[str], m: Machine) -> str:
    """Decide what `repro/run.sh` installs and starts. Where no scale is given, print
    why the one chosen is the largest.

    Args:
        objective: its name, which only the launcher checks.
        scale: its name; "": the largest that the machine carries.
        words: the rest of the command line.
        m: the machine.

    Returns:
        The scale and the parts of its environment, with blanks between them.

    Raises:
        InputError: nothing here can be started.
    """
    if scale and scale != "paper" and scale not in HANDED_OVER:
        load_scale(scale)
    check_words(words)
    if scale == "trl" and "--dry-run" in words:
        raise InputError(
            "trl has no dry run: --tiny takes its path on the CPU, and docs/trl.md has its memory."
        )
    if {"--dry-run", "-h", "--help"} & set(words):
        return f"{scale or '-'} dry"
    cluster = bool(os.environ.get("RAY_ADDRESS")) or m.nodes > 1
    if not scale and not (cluster and m.gpus):
        scale, why = largest(objective, m)
        print(f"{scale}: {why}", file=sys.stderr)
    # a cluster's size, only Ray knows
    named = paper_scale(objective)[0] if scale in ("paper", "") else scale
    if named == "mini":
        return "mini mini"
    on_gpu = "--tiny" not in words
    if on_gpu and scale:
        check_gpus(named, m, changed=any("=" in word for word in words))
    if on_gpu:
        requirements = "torch" if named == "trl" else "gpu"
        refuse(old_driver(m, pinned_cuda(requirements)))
    return " ".join([scale or "-", *parts(named)])


def pinned_cuda(name: str) -> str:
    """Return the version of CUDA that a list of requirements pins, "" where it pins
    none.
    """
    text = (ROOT / f"repro/requirements/{name}.txt").read_text(encoding="utf-8")
    found = re.search(r"^cuda-toolkit(?:\[.*?\])?==(\S+)", text, re.M)
    return found[1] if found else ""


def main(argv: list[str]) -> int:
    """Print what `choose` returns; return 0. Where it refuses, print why on stderr and
    return 2.
    """
    try:
        print(choose(argv[0], argv[1], argv[2:], look()))
        return 0
    except InputError as e:
        print(f"run.sh: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
