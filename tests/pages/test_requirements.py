# SPDX-License-Identifier: Apache-2.0
"""Every requirement list is valid for every Python that it is meant for."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[2] / "repro/requirements"
MEANT_FOR = re.compile(r"Python 3\.11 (?:to 3\.13|and 3\.12)")
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
LISTS = sorted(p.with_suffix("").name for p in FOLDER.glob("*.in"))


def pins(name):
    lines = [re.split("#| --hash=", line)[0] for line in read(name).splitlines()]
    return [Requirement(line) for line in lines if line.strip()]


def read(name):
    return (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_its_python_and_pins_every_version(name):
    head = read(name).split("# Compiled by")[0]
    assert MEANT_FOR.search(head) and head.startswith("#")
    assert all(str(pin.specifier).startswith("==") for pin in pins(name))
    assert not [
        line
        for line in read(name).splitlines()
        if line[:1] not in "# " and " --hash=sha256:" not in line
    ]


def test_pip_verifies_every_list_or_its_header_says_why_not():
    """The CPU builds of torch are on an index of their own: their list is kept by hand."""
    script = (FOLDER.parent / "venv.sh").read_text(encoding="utf-8")
    lines = [
        line for line in script.splitlines() if re.search(r"^ *install .* -r ", line)
    ]
    assert [line for line in lines if "--require-hashes" not in line] == [
        '        install "what $part needs" --no-deps -r "$lists/$part.txt"'
    ]
    assert "== @(flash|megatron)" in script and all(
        "No hash" in read(name) for name in ("flash", "megatron")
    )
    (torch,) = (pin for pin in pins("constraints") if pin.name == "torch")
    cpu = read("torch-cpu").replace("\\\n", "").splitlines()[-1]
    assert (
        cpu.startswith(f"torch{torch.specifier}+cpu ")
        and cpu.count(" --hash=sha256:") == 6
    ), "3 Pythons, 2 machines"


CPU, SMOKE = ("cpu-excludes",), ("smoke-excludes",)
# a list -> the lists whose packages are there too, and the files of what is left out on
# purpose
TOGETHER = {
    "base": (("torch",), CPU), "mini": (("torch", "base"), CPU), "verl": (("torch", "base"), CPU),
    "lm": (("torch", "base", "mini"), CPU),
    "trl": (("torch", "base", "mini"), CPU), "docs": (("torch", "base"), CPU), "smoke": (("torch", "base"), SMOKE),
    "gpu": ((), ()), "release": ((), ()), "torch": ((), ()),
}  # fmt: skip


def unmet(name, requirements):
    """Return what the packages of a list need that the lists do not have, and how many
    packages were looked at.
    """
    below, excludes = TOGETHER[name]
    versions = {}  # by package: what is pinned
    for listed in (*below, name):
        for pin in pins(listed):
            version = str(pin.specifier).removeprefix("==")
            versions[canonicalize_name(pin.name)] = version
    left_out = set()
    for listed in excludes:
        left_out |= {canonicalize_name(pin.name) for pin in pins(listed)}
    looked, missing = 0, []
    for pin in pins(name):
        texts = requirements(pin)
        if texts is None:
            continue
        looked += 1
        for need in map(Requirement, texts):
            needed = canonicalize_name(need.name)
            if not is_needed(need, pin.extras) or needed in left_out:
                continue
            version = versions.get(needed, "")
            if not version or version not in need.specifier:
                pinned = version or "none"
                missing.append(f"{pin.name} needs {need}, and pinned is {pinned}")
    return missing, looked


def is_needed(need, extras):
    """Return whether a requirement holds here, with one of the extras or without."""
    if not need.marker:
        return True
    return any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def as_installed(pin):
    """Return what a package says that it needs; None where its pinned version is not
    installed here.
    """
    try:
        package = metadata.distribution(pin.name)
    except metadata.PackageNotFoundError:
        return None
    return (
        (package.requires or [])
        if package.version.split("+")[0] in pin.specifier
        else None
    )


@pytest.mark.parametrize("name", TOGETHER)
def test_every_requirement_of_a_list_is_met(name):
    """Of the packages that are installed here;
    `test_the_lists_resolve_to_what_is_pinned` asks the index for all.
    """
    missing, looked = unmet(name, as_installed)
    assert not missing
    if looked <= 0.4 * len(pins(name)):
        pytest.skip(
            f"{looked} of {len(pins(name))} packages are installed here: too few to say anything"
        )
    (first, *_) = pins(name)

    def worse(pin):
        return ["no-such-package>=1"] if pin.name == first.name else None

    assert unmet(name, worse) == (
        [f"{first.name} needs no-such-package>=1, and pinned is none"],
        1,
    )


def test_every_list_is_looked_at():
    by_hand = {
        "constraints",
        "cpu-excludes",
        "smoke-excludes",
        "torch-cpu",
        "flash",
        "megatron",
    }
    assert {p.stem for p in FOLDER.glob("*.txt")} == TOGETHER.keys() | by_hand


def needs(name):
    """Return what each package of a list that pip installs without requirements needs,
    by the comment below its line.
    """
    found = {}
    package = ""
    for line in read(name).splitlines():
        if line.startswith("# needs "):
            listed = line.removeprefix("# needs ").partition(";")[0]
            found[package] = (
                []
                if listed == "nothing"
                else [Requirement(text) for text in listed.split(",")]
            )
        elif line[:1] not in "#-":
            package = Requirement(line).name
            found[package] = None
    return found


def test_the_lists_have_all_that_megatrons_packages_need():
    """pip installs them without their requirements: Megatron-Bridge died at
    `import pulp`, hours after the start.
    """
    packages = needs("flash") | needs("megatron")
    assert len(packages) == 7 and None not in packages.values(), (
        "every package has a line `# needs`"
    )
    there = {pin.name: pin for pin in pins("gpu")}
    missing = [
        f"{package} needs {need}"
        for package, required in packages.items()
        for need in required
        if need.name not in packages
        if need.name not in there
        or str(there[need.name].specifier).removeprefix("==") not in need.specifier
    ]
    assert not missing


def test_a_package_that_pip_left_half_is_installed_again(tmp_path):
    """pip takes what has metadata for whole, and leaves old files where it was killed
    while it replaced a package: venv.sh removes what lacks a file, what pip had set
    aside, and nothing else."""
    script = re.search(
        r"<<'END'\n(.*?)END\n",
        (FOLDER.parent / "venv.sh").read_text(encoding="utf-8"),
        re.S,
    )[1]
    for name, record, there in (
        ("whole", "whole/a.py,,\nwhole/a.pyc,,\n", "whole/a.py"),
        ("half", "half/a.py,,\nhalf/b.py,,\n", "half/a.py"),
        ("begun", None, "begun/a.py"),
        ("shares", "shares/a.py,,\nhalf/a.py,,\n", "shares/a.py"),
    ):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (tmp_path / name).mkdir()
        (tmp_path / there).touch()
        (info / "METADATA").touch()
        if record:
            (info / "RECORD").write_text(record)
    (tmp_path / "~ackage").mkdir()
    (tmp_path / "~ackage" / "a.py").touch()
    subprocess.run([sys.executable, "-I", "-c", script, tmp_path], check=True)
    assert [p.name for p in tmp_path.glob("*.dist-info")] == ["whole-1.dist-info"]
    assert sorted(p.parent.name for p in tmp_path.rglob("*.py")) == [
        "begun",
        "whole",
    ], "what has no record stays"


FAKE = """#!/usr/bin/env bash
case "$*" in
    *platform*) echo 3.11.2 ;;
    "-m venv "*) mkdir -p "$3"/{bin,lib/python3.11/site-packages} && cp "$0" "$3/bin/python" ;;
    *" -r repro/requirements/docs.txt") touch lib/docs-begun; eval "$PIP" ;;
    "-m pip"*) echo base >lib/base; touch .venv/lib/python3.11/site-packages/_upref_rl.pth ;;
esac
"""


@pytest.fixture
def venv_sh(tmp_path):
    """Return a function that starts repro/venv.sh with a Python that installs nothing,
    beside a made .venv; and its folder.
    """
    for folder in ("repro", "lib"):
        (tmp_path / folder).mkdir()
    shutil.copy(FOLDER.parent / "venv.sh", tmp_path / "repro")
    shutil.copytree(FOLDER, tmp_path / "repro/requirements")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "fake").write_text(FAKE)
    (tmp_path / "fake").chmod(0o755)

    def start(*parts, pip=""):
        """Start repro/venv.sh in a process group of its own, with a fake Python and a
        fake pip.
        """
        env = os.environ | {"PYTHON": str(tmp_path / "fake"), "PIP": pip}

        # a command in the background has it ignored
        def heard():
            return signal.signal(signal.SIGINT, signal.SIG_DFL)

        return subprocess.Popen(["bash", "repro/venv.sh", *parts], cwd=tmp_path, env=env, text=True, preexec_fn=heard,
                                stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip

    assert start().wait(60) == 0 and (tmp_path / "lib/base").exists()
    return start, tmp_path


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_an_interrupted_installation_leaves_no_pip(number, status, venv_sh):
    """Interrupt the script while pip runs, find one sentence and pip ended, and run it
    again to its end.
    """
    start, folder = venv_sh
    run = start("docs", pip="exec sleep 60")
    while not (folder / "lib/docs-begun").exists():
        time.sleep(0.02)
    run.send_signal(number)
    said = run.communicate(timeout=300)[1]  # pip has the pipe too: it has ended
    assert (
        run.returncode == status
        and said.endswith("ed; the same command continues.\n")
        and said.count("\n") == 1
    )
    assert start("docs").wait(60) == 0


def test_an_interrupt_and_no_network_leave_the_environment(venv_sh):
    """The sentence names the network, and not the conflicts between packages that pip
    lists as well.
    """
    start, folder = venv_sh
    run = start("docs", pip="exec sleep 60")
    while not (folder / "lib/docs-begun").exists():
        time.sleep(0.02)
    run.kill()
    os.killpg(run.pid, signal.SIGKILL)
    made = (folder / "lib/base").stat().st_mtime_ns
    for cause, sentence in {
        "WARNING: NewConnectionError": "the package index did not answer.",
        "ERROR: No matching distribution found for x": "ERROR: No matching distribution found for x.",
    }.items():
        run = start(
            "docs",
            pip=f"echo '{cause}'; echo 'ERROR: The following dependency conflicts'; exit 1",
        )
        said = run.communicate(timeout=300)[1]
        assert (
            run.returncode == 2
            and f"could not install what docs needs: {sentence}" in said
        )
    assert (folder / ".venv/stamp-base").exists() and not (
        folder / ".venv/stamp-docs"
    ).exists()
    assert (folder / "lib/base").stat().st_mtime_ns == made and start().wait(60) == 0, (
        "base was installed again"
    )


def misfits(pin, needs, platform):
    """Return the Pythons of which this pin's marker allows one that its package
    refuses.
    """
    allows = [
        v
        for v in PYTHONS
        if not pin.marker or pin.marker.evaluate({**platform, "python_full_version": v})
    ]
    return [v for v in allows if v not in SpecifierSet(needs)]


def test_what_is_installed_here_may_be_installed_on_every_python():
    """A package that another patch version of Python refuses: one that needs 3.11.5
    stopped every test on 3.11.2.
    """
    platform = {
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
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
    assert (
        misfits(Requirement("a==1; python_full_version < '3.13'"), "<3.13", platform)
        == []
    )


@pytest.mark.nightly
def test_the_lists_resolve_to_what_is_pinned():
    """With the index: the resolver finds every pin, for every Python, and nothing else."""
    uv = shutil.which(
        "uv", path=f"{FOLDER.parents[1] / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"
    )
    if not uv:
        pytest.skip("uv is not installed: `repro/venv.sh` installs it")
    done = subprocess.run(
        ["bash", FOLDER / "compile.sh", "--check"], capture_output=True, text=True
    )
    if done.returncode == 2 and re.search(
        r"error sending request|dns error|Failed to fetch|tcp connect", done.stderr
    ):
        pytest.skip("the package index does not answer")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_ci_runs_where_not_every_python_is_installed(tmp_path):
    """`type -a` fails if one of several names is missing, as on a stock Debian."""
    for name in (".ci", "tests", "bin"):
        (tmp_path / name).mkdir()
    shutil.copy(Path(__file__).parents[2] / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "tests" / "run.sh").write_text('echo "with $PYTHON $*"\n')
    (tmp_path / "bin" / "python3.11").symlink_to(sys.executable)
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run"), "quick"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "") and re.match(
        r"with \S*python\S* quick$", done.stdout.strip()
    )


# ---- the judges at a commit ----------------------------------------------------------
ROOT = FOLDER.parents[1]
TOOL = ROOT / "tests/tool.sh"


def test_the_environment_has_what_contributing_says_to_run():
    """`pre-commit install` failed: it was in no list."""
    assert "pre-commit install" in (ROOT / "CONTRIBUTING.md").read_text(
        encoding="utf-8"
    )
    assert "pre-commit" in {pin.name for pin in pins("base")}


@pytest.mark.parametrize("where", ["active", ".venv", "PATH"])
def test_the_hooks_find_the_tools_of_any_environment(where, tmp_path):
    """They asked for .venv, which an environment of one's own has not."""
    (tmp_path / "tests").mkdir()
    shutil.copy(TOOL, tmp_path / "tests")
    folders = {
        "active": tmp_path / "mine/bin",
        ".venv": tmp_path / ".venv/bin",
        "PATH": tmp_path / "bin",
    }
    # the first of these that there are is the one
    some = list(folders)[list(folders).index(where) :]
    for name in some:
        folders[name].mkdir(parents=True)
        for tool in ("python", "lint-imports"):
            (folders[name] / tool).write_text(f"#!/bin/sh\necho {name} {tool} $*\n")
            (folders[name] / tool).chmod(0o755)
    other = tmp_path / "other/bin"  # an environment that is active and has no tools
    other.mkdir(parents=True)
    active = folders["active"].parent if where == "active" else other.parent
    env = {"PATH": f"{folders['PATH']}:/usr/bin:/bin", "VIRTUAL_ENV": str(active)}
    for entry in hooks():
        program, script, tool, *rest = shlex.split(entry)
        done = subprocess.run(
            [program, script, tool, *rest],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert (script, done.returncode, done.stderr) == ("tests/tool.sh", 0, "")
        assert done.stdout.split()[:2] == [where, tool]


def hooks():
    """Return the commands of .pre-commit-config.yaml."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    return re.findall(r"entry: (.*?)(?:, language|\n)", text)
