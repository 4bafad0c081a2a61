# SPDX-License-Identifier: Apache-2.0
"""Records: rows, with the command, commit, date, machine and seeds that made them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs import record

ROOT = Path(record.__file__).parents[1]
FIELDS = {"command", "commit", "date", "machine", "seeds", "rows"}
# written by other programs, or closed before there were records
OTHERS = {
    "repro/with_verl/config/facts/vllm_args.json",
    "repro/mini/round2/base_tries.json",
    "repro/mini/stale/difficulty.json",
    "tests/replay/files/written_by.json",
}
FOLDERS = ("upstream/", "repro/lm/run/", "repro/mini/bases/")
BESIDE = (
    "manifest.json",
    "registration.json",
    "rates.json",
)  # records.py, registration.py


def tracked():
    """Return the paths of the checkout's JSON files."""
    git = ["git", "ls-files", "*.json"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_every_file_of_results_is_a_list_of_records():
    """Find a list of records, each with the fields and none of them empty, in every
    file that is our own.
    """
    own = []
    for name in tracked():
        path = Path(name)
        is_of_others = name in OTHERS or name.startswith(FOLDERS)
        if path.name not in BESIDE and not is_of_others:
            own.append(name)
    assert len(own) > 40
    for name in own:
        data = json.loads((ROOT / name).read_text(encoding="utf-8"))
        assert isinstance(data, list), name
        for one in data:
            assert one.keys() == FIELDS, name
            assert all(one[key] for key in FIELDS - {"seeds"}), name


def test_what_is_recorded_again_takes_the_place_of_its_name(tmp_path):
    file = tmp_path / "rows.json"
    assert record.read(file) == [] and record.rows(file) == {}
    record.add(file, "first", {"a": 1, "b": 2}, seeds=[0])
    record.add(file, "second", {"b": 3})
    assert record.rows(file) == {"a": 1, "b": 3}
    first, second = record.read(file)
    assert (first.command, first.rows, first.seeds) == ("first", {"a": 1}, [0])
    assert (second.command, second.rows) == ("second", {"b": 3})
    record.add(file, "third", {"a": 4, "b": 5})
    assert [one.command for one in record.read(file)] == ["third"]


def test_a_list_takes_the_place_of_all(tmp_path):
    file = tmp_path / "rows.json"
    record.add(file, "first", [1, 2])
    record.add(file, "second", [3])
    assert record.rows(file) == [3]


@pytest.mark.parametrize(
    ("code", "rows"), [("print('[1, 2]')", [1, 2]), ("print('one line')", ["one line"])]
)
def test_a_command_is_recorded_with_what_it_prints(tmp_path, code, rows):
    file = tmp_path / "rows.json"
    words = [sys.executable, "-c", code, "--seed", "3"]
    assert record.main([str(file), *words]) == 0
    (kept,) = record.read(file)
    assert kept.rows == rows and kept.seeds == [3]
    assert kept.command.startswith(f"{Path(sys.executable).name} -c ")
    assert kept.commit and kept.machine and kept.date


def test_what_cannot_be_recorded_is_one_sentence(capsys):
    assert record.main([]) == 2
    assert "Give a FILE and a COMMAND" in capsys.readouterr().err


def test_a_file_of_another_form_is_one_sentence(tmp_path):
    file = tmp_path / "old.json"
    file.write_text('{"a": 1}')
    with pytest.raises(record.InputError, match="holds no records"):
        record.read(file)
