# SPDX-License-Identifier: Apache-2.0
"""The newcomer's three changes of docs/adding.md: each is one new file in a copy of the library, and nothing else."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from docs.make import put, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
FILES = {b.split()[1]: b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if b.startswith("# ")}
ADDED = [name for name in FILES if name.startswith("upref/")]

pytestmark = pytest.mark.slow


def digests(folder):
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {f.relative_to(folder): hashlib.sha256(f.read_bytes()).digest() for f in files}


@pytest.fixture
def added(tmp_path):
    """Puts one of the page's files into a copy of the library; no other file differs from the checkout's."""

    def add(name):
        put(name, FILES[name], tmp_path)
        ours, theirs = digests(ROOT / "upref"), digests(tmp_path / "upref")
        assert {k for k in ours | theirs if ours.get(k) != theirs.get(k)} == {Path(name).relative_to("upref")}
        return lambda command: run(command, tmp_path)

    return add


def test_the_page_adds_one_file_for_each():
    assert [str(Path(name).parent) for name in ADDED] == ["upref/objectives", "upref/verify/oracles", "upref/verify/audit"]


def test_an_objective(added, tmp_path):
    shell = added("upref/objectives/root_pg.py")
    assert "root_pg" in [o["name"] for o in json.loads(shell("upref list --json"))]
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef loss(log_prob, old_log_prob, advantages, mask):\n"
        "    x = torch.where(mask, log_prob - old_log_prob, 0)\n"
        "    return -(2 * torch.where(mask, advantages, 0) * (x / 2).exp()).sum() / mask.sum()\n"
    )
    assert json.loads(shell("upref check mine.py:loss --as root_pg --json"))["ok"]
    assert not json.loads(shell("upref check mine.py:loss --as is_pg --json"))["ok"]
    assert shell("upref identify mine.py:loss").startswith("mine.py:loss is root_pg")
    assert "equal to the weight written by hand: yes" in shell("upref derive root_pg")
    laws = f"{ROOT}/tests/core/test_objectives.py -q -p no:cacheprovider -p no:xdist -k registered"
    said = shell(f'"$PYTHON" -m pytest -c {ROOT}/pyproject.toml {laws}" and root_pg-"')
    assert re.search(r"\d\d passed|\d passed", said) and "failed" not in said, said


def test_an_oracle(added, tmp_path):
    shell = added("upref/verify/oracles/single.py")
    put("whitened.py", FILES["whitened.py"], tmp_path)
    report = json.loads(shell("upref check whitened.py:loss --as is_pg --json"))
    assert report["oracles"]["single-response"] == "failure"
    assert list(report["oracles"])[-1] == "single-response", "its rank is the highest"
    text = (tmp_path / "whitened.py").read_text().replace("(A / A.std()) * A.std()", "A * 1")
    (tmp_path / "right.py").write_text(text)
    assert json.loads(shell("upref check right.py:loss --as is_pg --json"))["oracles"]["single-response"] == "ok"
    assert "skipped on request" in shell("upref check right.py:loss --as is_pg --json --skip single-response")


def test_a_framework(added):
    shell = added("upref/verify/audit/plain.py")
    assert "plain" in shell("upref audit -h")
    audit = json.loads(shell("upref audit plain --json"))
    assert audit["ok"] and audit["version"] == "1.0" and [r["verdict"] for r in audit["rows"]] == ["agrees exactly"]
    assert audit["out_of_scope"] == {"vanilla": "not looked at yet"} and audit["unaudited"] == []


def test_a_framework_that_deviates_is_seen(added, tmp_path):
    """Its audit fails until there is a reason, and then until the ledger has it."""
    shell = added("upref/verify/audit/plain.py")
    file = tmp_path / "upref/verify/audit/plain.py"
    file.write_text(file.read_text().replace('{"clip": 0.2}', '{"clip": 0.3}'))
    audit = json.loads(shell("upref audit plain --json"))
    assert not audit["ok"] and audit["rows"][0]["verdict"] == "differs, UNEXPLAINED"


def test_the_copy_is_what_runs(added, tmp_path):
    shell = added("upref/objectives/root_pg.py")
    where = shell('"$PYTHON" -c "import upref; print(upref.__file__)"').strip()
    assert Path(where).resolve() == (tmp_path / "upref/__init__.py").resolve() and sys.executable
