# SPDX-License-Identifier: Apache-2.0
"""Run upref in empty environments and record what passed: `python tests/matrix.py PYTHON [checkout|lowest|newest]`.

    checkout   a copy of this checkout in a folder whose name has a space and a letter that is not ASCII, with LC_ALL=C:
               the first command of README.md, tiny; `tests/run.sh quick`; every requirement list, resolved
    lowest     the wheel in an empty folder, with the lowest torch, numpy, ... that pyproject.toml allows
    newest     the wheel with the newest of everything

PYTHON is an interpreter: a name or a path. The row goes to tests/matrix.json, from which `python -m docs.make
docs/environments.md` writes the page. Needs a package index; nothing else outside a temporary folder is written. Exit
status: 0 if every step passed. It imports nothing but the standard library, so any Python can start it.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests/matrix.json"
PACKAGES = ("torch", "numpy", "sympy", "matplotlib")
LISTS = ("base", "mini", "verl", "trl", "docs", "release", "smoke", "gpu")
UP_TO_312 = ("smoke", "gpu")  # verl 0.9.1 stops there
MY_LOSS = next(
    b for b in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S) if "my.py" in b
)
WHEEL = {  # a command, its exit status and what it prints
    "upref --version": (0, "upref "),
    "python -m upref -h": (0, "identify"),
    "upref check my.py:loss --as dapo": (1, "NOT dapo: 2 failures, 2 notes"),
    "upref identify my.py:loss": (0, "meant as dapo(eps_low=0.2, eps_high=0.28)"),
    "upref derive up_dapo": (0, ""),
    "upref cap up_dapo": (0, ""),
}


class Steps:
    """The commands of a row, in one folder and environment, and what became of each."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env, self.done = folder, env, {}

    def run(self, command: str, status: int = 0, says: str = "", name: str = "") -> str:
        start = time.time()
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        got = subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.env, encoding="utf-8", **both)
        passed = got.returncode == status and says in got.stdout
        counted = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", got.stdout)
        self.done[name or command] = {
            "passed": passed,
            "seconds": round(time.time() - start),
            "tests": ", ".join(counted),
        }
        print(f"{'ok  ' if passed else 'FAIL'} {name or command} {self.done[name or command]}", flush=True)
        if not passed:
            print(got.stdout[-3000:], flush=True)
        return got.stdout


def checkout(folder: Path, python: str) -> tuple[Steps, str]:
    """Both README commands, and each list's resolution."""
    place = folder / "a folder, accentué" / "upref"
    keep = shutil.ignore_patterns(".venv*", ".git", "__pycache__", ".mypy_cache", ".hypothesis", "build", "out")
    shutil.copytree(ROOT, place, ignore=keep)
    steps = Steps(place, os.environ | {"PYTHON": python, "LC_ALL": "C"})
    steps.run("bash repro/run.sh up_dapo mini steps=2")
    steps.run("bash tests/run.sh quick")
    version = steps.run(".venv/bin/python -V", name="python -V").split()[-1]
    for name in LISTS:
        if name not in UP_TO_312 or version < "3.13":
            which = f"--dry-run --no-deps --python .venv/bin/python -r repro/requirements/{name}.txt"
            steps.run(f".venv/bin/uv pip install --quiet {which}", name=f"resolve {name}.txt")
    return steps, str(place / ".venv/bin/python")


def wheel(folder: Path, python: str, which: str) -> tuple[Steps, str]:
    """The wheel, built and installed by that Python's own pip, in a folder with nothing but a loss."""
    steps = Steps(folder, {k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    steps.env["PATH"] = f"{folder / 'env/bin'}{os.pathsep}{os.environ['PATH']}"
    (folder / "my.py").write_text(MY_LOSS)
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    lowest = [d.replace(">=", "==") + ".*" for d in limits if d.split(">")[0] in PACKAGES]
    quiet = "-m pip --disable-pip-version-check install -q"
    steps.run(f'"{python}" -m venv env && python -m pip wheel -q --no-deps -w dist "{ROOT}"', name="build the wheel")
    wanted = " ".join(f'"{d}"' for d in lowest) if which == "lowest" else ""
    steps.run(f"python {quiet} --upgrade dist/*.whl {wanted}", name="pip install")
    for command, (status, says) in WHEEL.items():
        steps.run(command, status, says)
    return steps, str(folder / "env/bin/python")


def versions(python: str) -> dict[str, str]:
    ask = f"import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {PACKAGES}))"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.split()
    return dict(zip(("python", *PACKAGES), said, strict=False))


def table() -> str:
    """The records as rows of markdown."""
    rows = ["| Python | torch | numpy | sympy | matplotlib | what | result |", "|---|---|---|---|---|---|---|"]
    for r in json.loads(RECORDS.read_text("utf-8")):
        failed = [name for name, step in r["steps"].items() if not step["passed"]]
        tests = next((s["tests"] for s in r["steps"].values() if s["tests"]), "")
        result = f"**failed**: {', '.join(failed)}" if failed else f"{len(r['steps'])} of {len(r['steps'])} steps pass"
        cells = [r.get(k, "?") for k in ("python", *PACKAGES)] + [r["what"], result + (f" ({tests})" if tests else "")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main(python: str = "python3", what: str = "checkout") -> int:
    python = shutil.which(python) or python
    with tempfile.TemporaryDirectory(prefix="upref-") as folder:
        steps, inside = checkout(Path(folder), python) if what == "checkout" else wheel(Path(folder), python, what)
        row: dict[str, Any] = versions(inside) | {
            "what": what,
            "machine": platform.platform(),
            "date": time.strftime("%Y-%m-%d"),
        }
    row["steps"] = steps.done
    old = json.loads(RECORDS.read_text("utf-8")) if RECORDS.exists() else []
    key = lambda r: (*map(int, r["python"].split(".")), r["what"])
    rows = sorted([r for r in old if key(r) != key(row)] + [row], key=key)
    RECORDS.write_text(json.dumps(rows, indent=1) + "\n")
    return int(not all(step["passed"] for step in steps.done.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
