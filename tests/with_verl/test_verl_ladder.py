# SPDX-License-Identifier: Apache-2.0
"""What `repro/run.sh` decides before it installs anything: the scale, its packages, and
whether the GPUs carry it.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro.with_verl.machine import here, ladder
from repro.with_verl.machine.here import Machine
from tests.support.hanging import HANGING
from upref import InputError

ROOT = Path(__file__).parents[2]
H100 = Machine(1, 85e9, "H100", driver="580.95.05", cuda=13000)
EIGHT = Machine(8, 85e9, "H100", driver="580.95.05", cuda=13000)


@pytest.fixture(autouse=True)
def _python(monkeypatch):
    monkeypatch.setattr(
        ladder.platform, "python_version_tuple", lambda: ("3", "12", "1")
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def card(gb, name="card"):
    return Machine(1, gb * 1e9, name, driver="580.95.05")


@pytest.mark.parametrize(
    ("machine", "objective", "scale", "chosen"),
    [
        (Machine(), "up_dapo", "", "mini mini"),
        (card(8), "up_dapo", "", "mini mini"),
        (card(12.88), "up_dapo", "", "trl verl trl"),
        (card(17.2), "up_dapo", "", "trl verl trl"),
        (card(25.7), "up_dapo", "", "gpu1_24gb gpu flash"),
        (H100, "up_dapo", "", "gpu1 gpu flash"),
        (EIGHT, "up_grpo", "", "paper_math gpu flash"),
        (EIGHT, "up_gspo", "paper", "paper gpu megatron"),
        (Machine(), "up_dapo", "trl", "trl verl trl"),
    ],
)
def test_the_scale_and_its_packages(machine, objective, scale, chosen):
    """A card of 12 GB got verl and vLLM, 11 GB, and then the miniature."""
    words = ["--tiny"] if scale == "trl" else []
    assert ladder.choose(objective, scale, words, machine) == chosen


def test_without_the_wheels_python_one_gpu_goes_without_flash_attn(monkeypatch, capsys):
    monkeypatch.setattr(
        ladder.platform, "python_version_tuple", lambda: ("3", "11", "2")
    )
    assert ladder.choose("up_dapo", "gpu1", [], H100) == "gpu1 gpu"
    assert (
        "flash-attn's wheel is for Python 3.12 and this one is 3.11"
        in capsys.readouterr().err
    )
    with pytest.raises(
        InputError, match=r"gpu8 needs flash-attn, whose wheel is for Python 3\.12, and"
    ):
        ladder.choose("up_dapo", "gpu8", [], EIGHT)


@pytest.mark.parametrize(
    ("machine", "scale", "words", "said"),
    [
        (
            Machine(),
            "gpu1",
            [],
            "no GPU is visible here, and gpu1 needs 1 x 1 GPUs of 80 GB.*--dry-run prices it",
        ),
        (
            Machine(),
            "trl",
            [],
            "no GPU is visible here, and trl needs .*--tiny takes the same path",
        ),
        (
            card(25.7),
            "gpu1",
            [],
            "gpu1 needs 1 x 1 GPUs of 80 GB, and 1 x card with 26 GB are here: without a scale",
        ),
        (card(85), "gpu8", [], "gpu8 needs 1 x 8 GPUs"),
        (
            Machine(1, 85e9, "H100", driver="570.86"),
            "gpu1",
            [],
            "570.86 is too old .* 580 or newer.*cuda-compat-13-0",
        ),
        (
            Machine(1, 13e9, "3060", driver="570.86"),
            "",
            [],
            "the driver 570.86 is too old",
        ),
        (H100, "trl", ["--dry-run"], "trl has no dry run: --tiny takes its path"),
        (H100, "gpu9", [], "there is no scale named 'gpu9': did you mean gpu"),
        (
            Machine(),
            "gpu8",
            ["--dry-run", "actor_rollout_ref.hybrid_engine=false"],
            "hybrid_engine=false asks for GP",
        ),
    ],
)
def test_what_cannot_be_started_is_refused_before_an_installation(
    machine, scale, words, said
):
    with pytest.raises(InputError, match=said):
        ladder.choose("up_dapo", scale, words, machine)


def test_settings_may_make_a_small_card_do(capsys):
    assert (
        ladder.choose("up_dapo", "gpu1", ["data.max_response_length=1024"], card(50))
        == "gpu1 gpu flash"
    )
    assert (
        "note: gpu1 needs 1 x 1 GPUs of 80 GB, and 1 x card with 50 GB are here"
        in capsys.readouterr().err
    )


def test_a_dry_run_needs_no_gpu_and_says_what_a_kill_would_lose(capsys):
    assert (
        ladder.choose(
            "up_dapo", "gpu8", ["trainer.save_freq=-1", "--dry-run"], Machine()
        )
        == "gpu8 dry"
    )
    assert "trainer.save_freq=-1: no checkpoint is saved" in capsys.readouterr().err


def test_nvidias_compatibility_package_stands_in_for_a_newer_driver():
    old = Machine(1, driver="570.86", cuda=12080)
    assert not list(here.old_driver(Machine(1, driver="570.86", cuda=13000), "13.0.2"))
    assert not list(here.old_driver(old, "12.8.1"))
    assert "too old" in next(here.old_driver(old, "13.0.2"))
    assert here.newest_cuda() >= 0


SMI = """#!/bin/sh
case "$*" in
    -L) echo "GPU 0: {name} (UUID: GPU-0)" ;;
    *) echo "{driver}, {name}, {mib}" ;;
esac
"""


@pytest.mark.parametrize(
    ("card", "scale", "said"),
    [
        (
            ("NVIDIA GeForce RTX 4090", "580.95.05", 24564),
            "gpu1",
            "gpu1 needs 1 x 1 GPUs of 80 GB, and 1 x NVIDIA Ge",
        ),
        (
            ("NVIDIA H100 80GB HBM3", "570.86.15", 81559),
            "gpu1",
            "the driver 570.86.15 is too old",
        ),
        (None, "gpu1", "no GPU is visible here, and gpu1 needs"),
    ],
)
def test_run_sh_looks_at_gpu_and_driver_first(card, scale, said, tmp_path):
    """It installed 11 GB, and then refused the driver."""
    if card:
        name, driver, mib = card
        (tmp_path / "nvidia-smi").write_text(
            SMI.format(name=name, driver=driver, mib=mib)
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    env.pop("UPREF_PYTHON", None)
    command = ["bash", "repro/run.sh", "up_dapo", scale]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANGING
    )
    assert (
        done.returncode == 2
        and said in done.stderr
        and "making .venv" not in done.stderr
    )


@pytest.fixture
def checkout(tmp_path):
    """Make a checkout with stand-ins for installer, environments and driver, which
    print how they are called; return it.
    """
    for folder in ("repro", "bin", ".venv/bin", ".venv-gpu/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for path in (ROOT / "repro").iterdir():
        if path.name not in ("run.sh", "venv.sh"):
            (tmp_path / "repro" / path.name).symlink_to(path)
    (tmp_path / "upref").symlink_to(ROOT / "upref")
    shutil.copy(ROOT / "repro/run.sh", tmp_path / "repro")

    def program(name, text):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    program(
        "repro/venv.sh",
        f'[[ $1 == which ]] && echo "{sys.executable}" || echo "install $*"',
    )
    for name in (".venv", ".venv-gpu"):
        program(f"{name}/bin/python", f'echo "start {name} $*"')
    return tmp_path, program


@pytest.mark.parametrize(
    ("card", "words", "installed", "started"),
    [
        (("3060", 12288), [], "verl trl", ".venv -m repro.with_trl.train up_dapo"),
        (
            ("H100", 81559),
            ["gpu1"],
            "gpu",
            ".venv-gpu -m repro.with_verl.run.launch up_dapo gpu1",
        ),
        (
            ("H100", 81559),
            ["gpu8", "--dry-run"],
            "verl",
            ".venv -m repro.with_verl.run.launch up_dapo gpu8 --dry-run",
        ),
    ],
)
def test_run_sh_installs_what_the_card_can_use(
    card, words, installed, started, checkout
):
    """A card of 12 GB got the packages of verl and vLLM, and then the miniature."""
    folder, program = checkout
    name, mib = card
    program(
        "bin/nvidia-smi",
        SMI.format(name=name, driver="580.95.05", mib=mib).partition("\n")[2],
    )
    env = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    for variable in ("UPREF_PYTHON", "RAY_ADDRESS"):
        env.pop(variable, None)
    command = ["bash", "repro/run.sh", "up_dapo", *words]
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=HANGING
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert (
        first.removesuffix(" flash") == f"install {installed}"
        and last == f"start {started}"
    )
