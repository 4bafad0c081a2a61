# SPDX-License-Identifier: Apache-2.0
"""The blocks of README and of the ten minutes by copy and paste, `test_ppo.py` too, with
the newest torch: `python tests/newest.py [PYTHON]`.

Without PYTHON it makes an environment in a temporary folder, with the newest release of
all that `pip install ".[prove]"` takes, torch among them, and pytest: a CUDA build of torch takes
some 5 GB. PYTHON is an interpreter that has these already. Exit status: 0 if the
commands print what the pages say and the test passes. It imports nothing but the
standard library, so any Python can start it.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/howto/ten-minutes.md")
COMMANDS = 'python() { "$PYTHON" "$@"; }; upref() { "$PYTHON" -m upref "$@"; }; '


def run(command: str, folder: Path, python: str) -> str:
    """Return what a command prints in a folder, both streams."""
    done = subprocess.run(
        ["bash", "-c", COMMANDS + command],
        cwd=folder,
        env=os.environ | {"PYTHON": python, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    return done.stdout


def without_ends(text: str) -> str:
    """Return a text without spaces at the ends of its lines, and without empty lines at
    its end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def differences(page: str, folder: Path, python: str) -> list[str]:
    """Return a text for each command of a page that prints something else than the page
    says, and for each test file of the page that does not pass.

    Args:
        page: its text. A block of Python that begins with `# FILE.py` is that file.
        folder: where the files are written and the commands run.
        python: the interpreter.
    """
    files = re.findall(r"```python\n(# (\S+\.py)\n.*?)```", page, re.S)
    for code, name in files:
        (folder / name).write_text(code, encoding="utf-8")
    consoles = re.findall(r"```console\n(.*?)```", page, re.S)
    found = []
    for command, said in re.findall(
        r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(consoles), re.M
    ):
        printed = run(command, folder, python)
        if without_ends(printed) != without_ends(said):
            found.append(f"$ {command}\n{printed}-- and not\n{said}")
    for _, name in files:
        if name.startswith("test_"):
            printed = run(f"python -m pytest -q {name}", folder, python)
            if not re.search(r"^\d+ passed in ", printed, re.M):
                found.append(printed)
    return found


def newest(folder: Path) -> str:
    """Make an environment with the newest release of everything, and return its
    interpreter.
    """
    python = str(folder / "env/bin/python")
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*install, f"{ROOT}[prove]", "pytest"], check=True)
    return python


def main(python: str = "") -> int:
    """Run the blocks of each page in a folder of its own, and print what differs."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="upref-") as name:
        python = python or newest(Path(name))
        version = 'python -c "import torch; print(torch.__version__)"'
        print("torch", run(version, Path(name), python), end="", flush=True)
        for page in PAGES:
            place = Path(name) / Path(page).stem
            place.mkdir()
            text = (ROOT / page).read_text(encoding="utf-8")
            found = differences(text, place, python)
            said = f"{page} prints what it says, and its tests pass."
            print("\n".join(found) or said, flush=True)
            failed += len(found)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
