# SPDX-License-Identifier: Apache-2.0
"""Run upref in empty environments and record what passed:
`python tests/matrix.py PYTHON [WHAT]`, or `python tests/matrix.py PYTHON tests COUNT`.

    checkout   a copy of this checkout in a folder whose name has a space and a letter that is not ASCII, with LC_ALL=C:
               `tests/run.sh quick`; `repro/run.sh up_dapo mini`, of two steps; every
               requirement list, resolved
    lowest     the wheel in an empty folder, with the lowest versions that pyproject.toml allows and PYTHON has;
               then what README and the ten minutes print, by copy and paste
    newest     the same with the newest of everything, and the sdist
    tests      a sample of the tests with the packages that PYTHON already has, by
               `pip install -e ".[test]"`; where TRL is one of them, the conformance suite
               with its adapter too. COUNT is the number of tests, 1500 without it
    places     both commands without .git, HOME, a network or the rights of root. Needs Linux, and root at first
    stopped    an install that a full disk and a lost network stop, and that goes on. Needs Linux, root, and a mount
               namespace of its own:
               `unshare --mount python tests/matrix.py PYTHON stopped`

PYTHON is an interpreter: a name or a path. The row goes to tests/matrix.json, from
which `python -m docs.make docs/environments.md` writes the page. Needs a package index;
nothing else outside a temporary folder is written. Exit
status: 0 if every step passed. It imports nothing but the standard library and what needs
no more, so any Python can start it.
"""

import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from docs import record  # noqa: E402  of the standard library alone
from upref import markdown  # noqa: E402

RECORDS = ROOT / "tests/matrix.json"
PACKAGES = ("torch", "numpy", "sympy")
LIBRARIES = ("transformers", "trl")  # where a row has them
LISTS = ("torch", "base", "mini", "verl", "trl", "docs", "release", "smoke", "gpu")
PLACES = ("places", "stopped")
SAMPLE = 1500  # tests
SAMPLED = (  # the folders of tests whose result depends on no pinned version
    "core",
    "course",
    "exact",
    "logs",
    "maximization",
    "proof",
    "replay",
    "step",
    "user_code",
    "verify",
)
MARKED = "not (slow or nightly or verl or trl or smoke or site)"
UP_TO_312 = ("smoke", "gpu")  # verl 0.9.1 stops there
QUIET = "-m pip --disable-pip-version-check install -q"
AWKWARD = "a folder, accentué/upref"
TRAIN = "bash repro/run.sh up_dapo mini steps=2"
MY_LOSS = next(
    b
    for b in re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S
    )
    if "my.py" in b
)
WHEEL = {  # a command, its exit status and what it prints
    "upref --version": (0, "upref "),
    "python -m upref --version": (0, "upref "),
    # its notes depend on how torch rounds exp
    "upref check my.py:loss --as dapo": (1, "NOT dapo: 1 failure"),
    "upref identify my.py:loss": (0, "meant as dapo(eps_low=0.2, eps_high=0.28)"),
    "upref derive up_dapo": (0, ""),
    "upref cap up_dapo": (0, ""),
    "upref recipe dapo --in verl": (0, "# dapo in verl"),  # of upref_frameworks
    "upref learn": (0, "`upref learn 1` writes"),  # of upref_course
}


class Steps:
    """The commands of a row, in one folder and environment, and what became of each."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env = folder, env
        self.done: dict[str, dict[str, Any]] = {}
        self.sizes: dict[str, int] = {}  # KB of what was built

    def run(self, command: str, status: int = 0, says: str = "", name: str = "") -> str:
        """Run a command, keep whether it ended as expected, and return its output.

        status: the expected one. says: what the output must contain. name: of the
        record; by default the command.
        """
        start = time.time()
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        got = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.env,
            encoding="utf-8",
            **both,
        )
        passed = got.returncode == status and says in got.stdout
        counted = re.findall(r"\d+ (?:passed|x?failed|skipped|errors?)", got.stdout)
        step: dict[str, Any] = {
            "passed": passed,
            "seconds": round(time.time() - start),
            "tests": _once(", ".join(counted)),
        }
        self.done[name or command] = step
        mark = "ok  " if passed else "FAIL"
        print(f"{mark} {name or command} {step}", flush=True)
        if passed and status:  # it failed as it should: its sentence
            lines = got.stdout.splitlines()
            step["said"] = next(line for line in lines if says in line)
        if not passed:
            print(got.stdout[-3000:], flush=True)
        return got.stdout


def checkout(folder: Path, python: str) -> tuple[Steps, str]:
    """Run both commands of README in a copy of the checkout, and resolve each list;
    return the steps and the Python that they made.
    """
    place = folder / AWKWARD
    keep = shutil.ignore_patterns(
        ".venv*", ".git", "__pycache__", ".mypy_cache", ".hypothesis", "build", "out"
    )
    shutil.copytree(ROOT, place, ignore=keep)
    steps = Steps(place, os.environ | {"PYTHON": python, "LC_ALL": "C"})
    # first, in an environment that no other command has completed
    steps.run("bash tests/run.sh quick")
    steps.run(TRAIN)
    version = steps.run(".venv/bin/python -V", name="python -V").split()[-1]
    for name in LISTS:
        if name not in UP_TO_312 or version < "3.13":
            which = f"--dry-run --no-deps --python .venv/bin/python -r repro/requirements/{name}.txt"
            steps.run(
                f".venv/bin/uv pip install --quiet {which}", name=f"resolve {name}.txt"
            )
    return steps, ".venv/bin/python"


def archived(folder: Path, python: str) -> Steps:
    """Unpack what `git archive` holds into a folder, and return the steps to run there,
    in the C locale.
    """
    place = folder / AWKWARD
    place.mkdir(parents=True)
    unpack = (
        f'chmod 755 "{folder}" && git -C "{ROOT}" archive HEAD | tar -x -C "{place}"'
    )
    subprocess.run(["bash", "-c", unpack], check=True)
    return Steps(
        place,
        os.environ | {"PYTHON": python, "LC_ALL": "C", "PYTEST_ADDOPTS": "-k test_ops"},
    )


def places(folder: Path, python: str) -> tuple[Steps, str]:
    """Run both commands in one environment after the other kind of place; return the
    steps and the Python that they made.
    """
    steps, both = (
        archived(folder, python),
        f"bash -c '{TRAIN} && bash tests/run.sh quick'",
    )
    steps.run(
        both, name="from `git archive`, in a path with a space and an accent, LC_ALL=C"
    )
    steps.run(f"env -u HOME {both}", name="HOME is unset")
    steps.run(f"HOME=/proc {both}", name="HOME cannot be written")
    steps.run(f"unshare --net {both}", name="offline after the first run")
    user = "setpriv --reuid 65534 --regid 65534 --clear-groups"
    steps.run(f"chown -R 65534:65534 . && HOME=$PWD {user} {both}", name="not root")
    return steps, ".venv/bin/python"


def stopped(folder: Path, python: str) -> tuple[Steps, str]:
    """Stop an install on a disk of its own twice, and let it go on; return the steps
    and the Python that they made. It needs to mount a disk.
    """
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300m", "upref", disk], check=True
    )
    steps = archived(disk, python)
    go_on = "Run the same command again to continue"
    steps.run(
        TRAIN, 2, f"the disk is full. {go_on}", "the disk is full during the install"
    )
    subprocess.run(["mount", "-o", "remount,size=8g", disk], check=True)
    steps.run(
        f"unshare --net {TRAIN}",
        2,
        f"did not answer. {go_on}",
        "then the network is lost",
    )
    steps.run(TRAIN, name="then the same command again")
    return steps, ".venv/bin/python"


def wheel(folder: Path, python: str, which: str) -> tuple[Steps, str]:
    """Install the wheel and the sdist by that Python's own pip, in a folder with
    nothing but a loss; return the steps and the Python.
    """
    steps = Steps(folder, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    steps.env["PATH"] = f"{folder / 'env/bin'}{os.pathsep}{os.environ['PATH']}"
    (folder / "my.py").write_text(MY_LOSS)
    steps.run(
        f'"{python}" -m venv env && python {QUIET} build twine',
        name="make an environment",
    )
    steps.run(f'python -m build -o dist "{ROOT}"', says=".whl", name="python -m build")
    steps.run("twine check --strict dist/*", says="PASSED")
    if which == "lowest":
        limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
            "dependencies"
        ]
        (folder / "limits.in").write_text("\n".join(limits))
        resolve = "uv pip compile -q --resolution lowest-direct --only-binary :all: --no-header limits.in -o limits.txt"
        steps.run(f"python {QUIET} uv && {resolve}", name="the lowest versions")
    steps.run(
        f"python {QUIET} dist/*.whl {'-c limits.txt' if which == 'lowest' else ''}",
        name="pip install",
    )
    for command, (status, says) in WHEEL.items():
        steps.run(command, status, says)
    if which == "newest":
        again = f"python {QUIET} --force-reinstall --no-deps dist/*.tar.gz"
        steps.run(
            f"{again} && upref --version", says="upref ", name="pip install the sdist"
        )
    paste = f'python {QUIET} z3-solver pytest && python "{ROOT}/tests/newest.py" "$PWD/env/bin/python"'
    steps.run(paste, name="README and the ten minutes, by copy and paste")
    steps.sizes = {
        f.suffix.strip("."): f.stat().st_size // 1024
        for f in (folder / "dist").iterdir()
    }
    return steps, "env/bin/python"


def sampled(names: list[str], count: int = SAMPLE) -> list[str]:
    """Return a sample of the names of tests, the same for the same names, sorted. A
    smaller one is part of a larger one.
    """
    drawn = random.Random(0).sample(sorted(names), len(names))
    return sorted(drawn[:count])


def tests(folder: Path, python: str, count: int) -> tuple[Steps, str]:
    """Run a sample of the tests, and the suite with TRL's adapter where TRL is
    installed; return the steps and the Python.
    """
    steps = Steps(ROOT, os.environ | {"PYTHONPATH": str(ROOT)})
    pytest = f'"{python}" -m pytest -q -p no:cacheprovider'
    places = " ".join(f"tests/{name}" for name in SAMPLED)
    listed = subprocess.run(
        ["bash", "-c", f"{pytest} --collect-only -m {shlex.quote(MARKED)} {places}"],
        cwd=ROOT,
        env=steps.env,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout
    names = [line for line in listed.splitlines() if "::" in line]
    chosen = sampled(names, count)
    (folder / "sample").write_text("\n".join(chosen), encoding="utf-8")
    steps.run(f'{pytest} "@{folder}/sample"', name=f"a sample of {len(chosen)} tests")
    if "trl" in versions(python):
        adapter = "--adapter upref_frameworks.trl.adapter:TRL"
        known = "--upref-xfails tests/conformance/trl_xfails.toml"
        steps.run(
            f"{pytest} --pyargs upref.conformance {adapter} {known}",
            name="the conformance suite with TRL's adapter",
        )
    return steps, python


def versions(python: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that an interpreter has, by
    name.
    """
    ask = (
        "import json, platform, importlib.metadata as m; "
        "there = {d.name.lower(): d.version for d in m.distributions()}; "
        "there['python'] = platform.python_version(); print(json.dumps(there))"
    )
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout
    there = json.loads(said or "{}")
    return {
        name: there[name] for name in ("python", *PACKAGES, *LIBRARIES) if name in there
    }


def recorded() -> list[dict[str, Any]]:
    """Return the rows with their dates, by the version of Python."""
    found = [
        row | {"date": one.date}
        for one in record.read(RECORDS)
        for row in one.rows.values()
    ]
    return sorted(found, key=_version_and_name)


def _version_and_name(row: dict[str, Any]) -> tuple[list[int], str]:
    """What a row is sorted by: 3.9 comes before 3.11."""
    return [int(part) for part in row["python"].split(".")], row["what"]


def _once(counts: str) -> str:
    """Counts without those that a suite printed twice."""
    return ", ".join(dict.fromkeys(counts.split(", ")))


def table() -> str:
    """Return the rows of interpreters and versions, in markdown."""
    rows = []
    for r in recorded():
        if r["what"] in PLACES:
            continue
        failed = [name for name, step in r["steps"].items() if not step["passed"]]
        if failed:
            result = f"**failed**: {', '.join(failed)}"
        else:
            count = len(r["steps"])
            result = f"{count} of {count} steps pass"
        tested = []
        for step in r["steps"].values():
            if step["tests"]:
                minutes = f"{step['seconds'] / 60:.0f} minutes"
                tested.append(f"{_once(step['tests'])} in {minutes}")
        if tested:
            result += f" ({'; '.join(tested)})"
        libraries = [f"{name} {r[name]}" for name in LIBRARIES if name in r]
        what = ", ".join([r["what"], *libraries])
        cells = [r.get(k, "?") for k in ("python", *PACKAGES)]
        rows.append([*cells, what, r["date"], result])
    return markdown.table(["Python", *PACKAGES, "what", "date", "result"], rows)


def awkward() -> str:
    """Return what happened in each awkward place, and to an install that is stopped, in
    markdown.
    """
    rows = []
    for r in recorded():
        for name, step in r["steps"].items() if r["what"] in PLACES else ():
            ends = "status 0" if "said" not in step else f"status 2: {step['said']}"
            said = ends if step["passed"] else "**failed**"
            rows.append([r["python"], name, said, step["seconds"]])
    return markdown.table(["Python", "place", "what happened", "seconds"], rows)


def main(python: str = "python3", what: str = "checkout", count: str = "") -> int:
    """Run one kind of trial in empty environments, and record what passed; return 1 if
    a step failed, else 0.
    """
    python = shutil.which(python) or python
    with tempfile.TemporaryDirectory(prefix="upref-") as folder:
        run: Callable[..., tuple[Steps, str]]
        run = {
            "checkout": checkout,
            "places": places,
            "stopped": stopped,
            "tests": functools.partial(tests, count=int(count or SAMPLE)),
        }.get(what, functools.partial(wheel, which=what))
        steps, inside = run(Path(folder), python)
        row: dict[str, Any] = versions(str(steps.folder / inside)) | {"what": what}
        if what == "stopped":
            subprocess.run(["umount", "--lazy", f"{folder}/disk"], check=True)
    row |= {"steps": steps.done} | ({"KB": steps.sizes} if steps.sizes else {})
    command = f"python tests/matrix.py {Path(python).name} {what} {count}".strip()
    name = f"{row['python']} {what}"
    if what == "tests":
        name += f" torch {row['torch']}"
    record.add(RECORDS, command, {name: row})
    return int(not all(step["passed"] for step in steps.done.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
