# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md: all paths of the map exist, all files of the library are on it;
the way of a loss is walked.
"""

import re
import tomllib
from pathlib import Path

import pytest

from docs.make import put, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
FILES = {
    b.split()[1]: b
    for b in re.findall(r"```python\n(.*?)```", README, re.S)
    if b.startswith("# ")
}
MAP, WAY = re.findall(r"```text\n(.*?)```", PAGE, re.S)


def paths():
    """Return each path of the map, whose lines are indented under their folders; "/"
    ends a folder.
    """
    above, out = [], []
    for line in MAP.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        above = [*above[:depth], name]
        assert len(above) == depth + 1, line
        out.append("".join(above))
    return out


def test_every_path_of_the_map_exists():
    for path in paths():
        if "*" in path:
            assert any(place.is_dir() for place in ROOT.glob(path)), path
        else:
            assert (
                (ROOT / path).is_dir()
                if path.endswith("/")
                else (ROOT / path).is_file()
            ), path


def test_every_file_of_the_library_is_on_the_map():
    """By its own name, by that of a folder of which nothing is listed, or as one of the
    files of every framework.
    """
    named = paths()
    folders = [path for path in named if path.endswith("/")]
    closed = []
    for folder in folders:
        if not any(path != folder and path.startswith(folder) for path in named):
            closed.append(folder)
    of_framework = ("__init__.py", "audit.py", "ledger.toml")
    for package in ("upref", "upref_frameworks", "upref_course", "paper"):
        for file in (ROOT / package).rglob("*"):
            path = str(file.relative_to(ROOT))
            if not file.is_file() or "__pycache__" in path:
                continue
            if file.name in of_framework and (file.parent / "audit.py").exists():
                continue
            listed = path in named or path.startswith(tuple(closed))
            assert listed, f"{path} is not on the map"


def test_every_folder_of_the_checkout_is_on_the_map():
    tops = {
        f.parent.relative_to(ROOT).parts[0]
        for f in ROOT.glob("*/*.*")
        if not f.parent.name.startswith((".", "_"))
    }
    assert tops <= {p.partition("/")[0] for p in paths()}


WATCH = """import contextlib, io, sys
from pathlib import Path
from upref.cli import main

root, calls = sys.argv[1], []

def watch(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(f"{root}/upref/"):
        calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

sys.setprofile(watch)
with contextlib.redirect_stdout(io.StringIO()):
    status = main(["check", "my.py:loss", "--as", "dapo"])
sys.setprofile(None)
for file, function in calls:
    print(Path(file).relative_to(root).as_posix(), function)
print("status", status)
"""


@pytest.mark.slow
def test_the_way_of_a_loss_is_the_one_it_goes(tmp_path):
    """These functions are called, in this order, in a fresh process: nothing has been
    kept from an earlier check.
    """
    way = [tuple(line.split()[:2]) for line in WAY.splitlines()]
    put("my.py", FILES["my.py"], tmp_path)
    (tmp_path / "watch.py").write_text(WATCH)
    calls = [
        tuple(line.split()[:2])
        for line in run(f"python watch.py {ROOT}", tmp_path).splitlines()
    ]
    assert calls[-1] == ("status", "1")
    at, before = 0, ""
    for step in way:
        assert step in calls[at:], f"{step} is not called after {before}"
        at, before = calls.index(step, at), step


def test_one_screen():
    assert len(WAY.splitlines()) <= 25 and max(map(len, WAY.splitlines())) <= 120


def test_a_circle_of_types_alone_is_a_circle():
    """The import contracts look at imports under TYPE_CHECKING too."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linter = settings["tool"]["importlinter"]
    assert linter["exclude_type_checking_imports"] is False
    assert any(c["type"] == "acyclic_siblings" for c in linter["contracts"])


def test_every_case_and_outcome_is_in_the_table():
    """A type of such a name has a row that says what it is of, and a row has a type."""
    packages = ("upref", "upref_frameworks", "upref_course", "paper", "repro", "tests")
    files = [file for name in packages for file in (ROOT / name).rglob("*.py")]
    types = {
        (name, file.relative_to(ROOT).as_posix())
        for file in files
        for name in re.findall(
            r"^class (\w*(?:Case|Outcome))\b", file.read_text(encoding="utf-8"), re.M
        )
    }
    assert types == set(re.findall(r"^\| `(\w+)` \| `(\S+\.py)` \|", PAGE, re.M))
