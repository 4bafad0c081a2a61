# SPDX-License-Identifier: Apache-2.0
"""Every requirement list is valid for every Python that it is meant for."""

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

FOLDER = Path(__file__).parents[2] / "repro/requirements"
MEANT_FOR = re.compile(r"Python 3\.11 (?:to 3\.13|and 3\.12)")
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
LISTS = sorted(p.with_suffix("").name for p in FOLDER.glob("*.in"))


def pins(name):
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_says_which_python_it_is_for_and_pins_every_version(name):
    head = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("# Compiled by")[0]
    assert MEANT_FOR.search(head) and head.startswith("#")
    assert all(str(pin.specifier).startswith("==") for pin in pins(name))


def misfits(pin, needs, platform):
    """The Pythons of which this pin's marker allows one that its package refuses."""
    allows = [v for v in PYTHONS if not pin.marker or pin.marker.evaluate({**platform, "python_full_version": v})]
    return [v for v in allows if v not in SpecifierSet(needs)]


def test_what_is_installed_here_may_be_installed_on_every_python():
    """A package that another patch version of Python refuses: one that needs 3.11.5 stopped every test on 3.11.2."""
    platform = {"sys_platform": "linux", "platform_machine": "x86_64", "os_name": "posix"}
    looked = 0
    for pin in pins("constraints"):
        try:
            package = metadata.distribution(pin.name)
        except metadata.PackageNotFoundError:
            continue
        if package.version.split("+")[0] in pin.specifier:
            looked += 1
            needs = package.metadata["Requires-Python"] or ""
            assert not misfits(pin, needs, platform), f"{pin} needs Python {needs}"
    assert looked > 20
    assert misfits(Requirement("a==1"), ">=3.11.5", platform) == ["3.11.0"]
    assert misfits(Requirement("a==1; python_full_version < '3.13'"), "<3.13", platform) == []


@pytest.mark.nightly
def test_the_lists_resolve_to_what_is_pinned():
    """With the index: the resolver finds every pin, for every Python, and nothing else."""
    uv = shutil.which("uv", path=f"{FOLDER.parents[1] / '.venv/bin'}{os.pathsep}{os.environ['PATH']}")
    if not uv:
        pytest.skip("uv is not installed: `repro/venv.sh` installs it")
    done = subprocess.run(["bash", FOLDER / "compile.sh", "--check"], capture_output=True, text=True)
    if done.returncode == 2 and re.search(r"error sending request|dns error|Failed to fetch|tcp connect", done.stderr):
        pytest.skip("the package index does not answer")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
