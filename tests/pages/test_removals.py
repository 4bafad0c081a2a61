# SPDX-License-Identifier: Apache-2.0
"""No command of ours removes a file that it did not write. `.venv`: test_venv.py."""

import ast
import importlib
from pathlib import Path

import pytest

from docs.site import __main__ as site
from upref import get
from upref.errors import InputError
from upref.files import MARK, own_folder

ROOT = Path(__file__).parents[2]
REMOVALS = ("rmtree", "unlink", "rmdir", "remove", "removedirs")
# The files that remove anything, and why that is never somebody else's.
KNOWN = {
    "docs/lm.py": "the recorded run of the repository, which git keeps",
    "docs/site/__main__.py": "own_folder",
    "repro/fork.py": "a socket of its own, and folders of dead processes by their name",
    "repro/mini/experiment/suite.py": "checkpoints of an experiment's finished runs",
    "repro/mini/files.py": "drafts, and what stands where a draft is to go",
    "repro/mini/train/checkpoint.py": "require_no_run",
    "repro/with_verl/data/prepare.py": "a folder of tempfile",
    "repro/with_verl/gpu_trial.py": "own_folder",
    "repro/with_verl/pack.py": "own_folder",
    "repro/with_verl/machine/processes.py": "a mark of its own",
    "upref/files.py": "own_folder; drafts by their name",
    "upref_frameworks/audits/isolated/pin.py": "a cache of its own",
}


def removes(file: Path) -> bool:
    """Return whether a file's code may remove files; `remove` counts only as os.remove."""
    calls = (
        node.func
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    )
    return any(
        isinstance(f, ast.Attribute)
        and f.attr in REMOVALS
        and not (f.attr == "remove" and getattr(f.value, "id", "") != "os")
        for f in calls
    ) or "shutil.rmtree," in file.read_text(encoding="utf-8")


def test_every_file_that_removes_anything_is_known():
    folders = ("benchmarks", "docs", "paper", "repro")
    packages = ("upref", "upref_course", "upref_frameworks")
    found = {
        str(file.relative_to(ROOT))
        for folder in (*folders, *packages)
        for file in (ROOT / folder).rglob("*.py")
        if removes(file)
    }
    assert found == set(KNOWN)


@pytest.fixture
def own(tmp_path):
    """Make a folder of a user's, with what our commands write and remove in theirs;
    return it.
    """
    folder = tmp_path / "own"
    for name in ("source", "old", "checkpoints/step-1", "wandb", "model"):
        (folder / name).mkdir(parents=True)
        (folder / name / "notes.txt").write_text("mine")
    (folder / "steps.jsonl").write_text("mine")
    return folder


def content(folder: Path) -> dict[Path, str]:
    return {p: p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("empty", [False, True])
def test_a_folder_of_somebody_else_is_not_taken(own, empty):
    before = content(own)
    with pytest.raises(InputError, match="removes none of them"):
        own_folder(own, empty=empty)
    assert content(own) == before


def test_a_folder_that_it_made_is_emptied(tmp_path, own):
    """What a link in it leads to stays."""
    made = tmp_path / "made"
    own_folder(made)
    (made / "sub").mkdir()
    (made / "sub" / "file").write_text("")
    (made / "link").symlink_to(own)
    own_folder(made)
    assert (made / "sub" / "file").exists()
    before = content(own)
    own_folder(made, empty=True)
    assert [p.name for p in made.iterdir()] == [MARK] and content(own) == before


def test_an_empty_folder_is_taken(tmp_path):
    own_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [MARK]


def test_the_site_is_not_built_among_somebodys_files(own, capsys):
    before = content(own)
    assert site.main(str(own)) == 2
    assert "removes none of them" in capsys.readouterr().err
    assert content(own) == before


@pytest.mark.parametrize("name", ["checkpoints", "steps.jsonl"])
def test_the_miniature_does_not_train_among_somebodys_files(
    tmp_path, own, name, capsys
):
    command = importlib.import_module("repro.mini.train.command")
    place = tmp_path / "place"
    place.mkdir()
    (own / name).rename(place / name)
    before = content(place)
    assert command.main(["--out", str(place), "--steps", "1"]) == 2
    assert f"{place / name} is not of a run" in capsys.readouterr().err
    assert content(place) == before


def test_the_comparison_leaves_a_report_that_it_did_not_write(tmp_path, capsys):
    compare = importlib.import_module("repro.mini.compare")
    report = tmp_path / "compare" / "up_dapo"
    report.mkdir(parents=True)
    (report / "notes.md").write_text("mine")
    assert compare.main(["up_dapo", "--out", str(tmp_path)]) == 2
    assert "removes none of them" in capsys.readouterr().err
    assert content(report) == {report / "notes.md": "mine"}


def test_the_packer_does_not_work_among_somebodys_files(own, tmp_path):
    """Its folder WORK/site goes at each run."""
    pack = importlib.import_module("repro.with_verl.pack")
    (own / "old").rename(own / "site")
    before = content(own)
    with pytest.raises(InputError, match="removes none of them"):
        pack.main(own, tmp_path / "out")
    assert content(own) == before and not (tmp_path / "out").exists()


def test_the_trials_of_verl_leave_a_folder_of_somebody(own, monkeypatch):
    pytest.importorskip("psutil", reason="`repro/venv.sh smoke` installs it")
    pytest.importorskip("verl", reason="`repro/venv.sh verl` installs it")
    smoke = importlib.import_module("repro.with_verl.cpu.smoke")
    trial = importlib.import_module("repro.with_verl.gpu_trial")
    before = content(own)
    for command in (
        lambda: trial.main(get("up_dapo"), own, 1, "toy", False, []),
        lambda: smoke.main("up_dapo", 1, own),
    ):
        with pytest.raises(InputError, match="removes none of them"):
            command()
    assert content(own) == before
