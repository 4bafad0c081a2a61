# SPDX-License-Identifier: Apache-2.0
"""The scripts that make `.venv` leave an environment alone that they did not make."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("repro/venv.sh", "repro/run.sh", "docs/build.sh", "tests/run.sh")
COMMANDS = [
    "repro/venv.sh",
    "repro/venv.sh mini verl",
    "repro/venv.sh which",
    "repro/run.sh up_dapo mini",
    "repro/run.sh up_dapo smoke",
    "docs/build.sh",
    "tests/run.sh",
    "tests/run.sh quick",
    "tests/run.sh save",
]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo 3.11.2 && exit
echo "no module named venv"
exit 1
"""


@pytest.fixture
def checkout(tmp_path):
    """Make a checkout of the scripts alone, and return it: what they would install is
    not there.
    """
    place = tmp_path / "checkout"
    for name in SCRIPTS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    return place


@pytest.fixture
def python(tmp_path):
    """Make a Python of the right version that makes no environment; return its path."""
    path = tmp_path / "python"
    path.write_text(PYTHON)
    path.chmod(0o755)
    return path


def run(place: Path, command: str, python: Path) -> tuple[int, str]:
    """Run a script by bash with this Python; return its exit status and what it
    printed.
    """
    done = subprocess.run(
        ["bash", *command.split()],
        cwd=place,
        env=os.environ | {"PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=600,  # against hanging
    )
    return done.returncode, done.stdout + done.stderr


def files(folder: Path) -> dict[str, str]:
    """Return the text of every file of a folder by its path."""
    return {
        str(p.relative_to(folder)): p.read_text()
        for p in folder.rglob("*")
        if p.is_file()
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_an_environment_of_ones_own_stays(checkout, python, command):
    own = checkout / ".venv"
    (own / "lib").mkdir(parents=True)
    (own / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (own / "lib" / "notes.txt").write_text("mine")
    before = files(own)
    status, said = run(checkout, command, python)
    assert status == 2 and files(own) == before
    (sentence,) = said.splitlines()
    assert ".venv is here and was not made by this script" in sentence


def test_an_environment_of_ones_own_without_ruff_is_named(checkout, python):
    own = checkout / ".venv" / "bin"
    own.mkdir(parents=True)
    shutil.copy(python, own / "pytest")
    status, said = run(checkout, "tests/run.sh save", python)
    assert status == 2 and ".venv is here and was not made by this script" in said


def test_a_link_to_another_environment_is_not_followed(checkout, python, tmp_path):
    """Not even to one that the script made, in another checkout."""
    other = tmp_path / "other" / ".venv"
    (other / "bin").mkdir(parents=True)
    for name in ("made", "stamp-base"):
        (other / name).write_text("of another checkout")
    before = files(other)
    (checkout / ".venv").symlink_to(other)
    status, said = run(checkout, "repro/venv.sh mini", python)
    assert status == 2 and "not made by this script" in said
    assert (checkout / ".venv").is_symlink() and files(other) == before


def test_the_environment_for_gpus_has_the_same_rule(checkout, python):
    own = checkout / ".venv-gpu"
    own.mkdir()
    (own / "notes.txt").write_text("mine")
    for command in ("repro/venv.sh which gpu", "repro/venv.sh gpu"):
        status, said = run(checkout, command, python)
        assert status == 2 and ".venv-gpu is here" in said
    assert files(own) == {"notes.txt": "mine"}


@pytest.mark.parametrize("mark", ["made", "begun"])
def test_its_own_is_made_anew_whole_or_not(checkout, python, mark):
    """And the mark of it stays wherever that ends."""
    own = checkout / ".venv"
    (own / "lib").mkdir(parents=True)
    for name in (mark, "lib/left"):
        (own / name).write_text("")
    status, said = run(checkout, "repro/venv.sh", python)
    assert status == 2 and "-m venv' failed: no module named venv" in said
    assert list(files(own)) == ["begun"]


def test_an_empty_folder_is_taken(checkout, python):
    (checkout / ".venv").mkdir()
    assert "-m venv' failed" in run(checkout, "repro/venv.sh", python)[1]
