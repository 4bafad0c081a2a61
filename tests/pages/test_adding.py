# SPDX-License-Identifier: Apache-2.0
"""The newcomer's four changes of docs/adding.md: each is one new file in a copy of the
library, and nothing else.
"""

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest

from docs.make import put, run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text(encoding="utf-8")
FILES = {
    b.split()[1]: b
    for b in re.findall(r"```python\n(.*?)```", PAGE, re.S)
    if b.startswith("# ")
}
ADDED = [name for name in FILES if name.startswith(("upref/", "upref_frameworks/"))]

pytestmark = pytest.mark.slow


def digests(folder):
    """Return the digest of every file of a folder by its path, caches left out."""
    files = (
        f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts
    )
    return {
        f.relative_to(folder): hashlib.sha256(f.read_bytes()).digest() for f in files
    }


SEVERAL = """import contextlib, io, json, shlex, sys
from upref.cli import main

def said(command):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(shlex.split(command)[1:])
    return out.getvalue()

print(json.dumps([said(command) for command in sys.argv[1:]]))
"""


@pytest.fixture
def added(tmp_path):
    """Return a function that puts one of the page's files into a copy of its package,
    and asserts that no other file of the copy differs from the checkout's.
    """

    def add(name):
        put(name, FILES[name], tmp_path)
        package = name.partition("/")[0]
        ours, theirs = digests(ROOT / package), digests(tmp_path / package)
        assert {k for k in ours | theirs if ours.get(k) != theirs.get(k)} == {
            Path(name).relative_to(package)
        }
        (tmp_path / "several.py").write_text(SEVERAL)

    return add


@pytest.fixture
def upref_says(tmp_path):
    """Return a function that runs commands in one process that imports the copy, and
    returns what each prints.
    """
    return lambda *commands: json.loads(
        run(shlex.join(["python", "several.py", *commands]), tmp_path)
    )


def test_the_page_adds_one_file_for_each():
    """Of objectives it has two: of a token, and of a response."""
    assert [str(Path(name).parent) for name in ADDED] == [
        "upref/objectives",
        "upref/objectives",
        "upref/verify/oracles",
        "upref/verify/faults",
        "upref_frameworks/plain",
    ]


def test_an_objective_whose_weight_depends_on_its_response(added, upref_says):
    added("upref/objectives/response_pg.py")
    (derived,) = upref_says("upref derive response_pg")
    assert "equal to the weight written by hand: yes" in derived


def test_an_objective(added, upref_says, tmp_path):
    """The page's objective is listed, checked, told from another, identified and
    derived.
    """
    added("upref/objectives/root_pg.py")
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef loss(log_prob, old_log_prob, advantages, mask):\n"
        "    x = torch.where(mask, log_prob - old_log_prob, 0)\n"
        "    return -(2 * torch.where(mask, advantages, 0) * (x / 2).exp()).sum() / mask.sum()\n"
    )
    listed, right, wrong, which, derived = upref_says(
        "upref list --json",
        "upref check mine.py:loss --as root_pg --json",
        "upref check mine.py:loss --as is_pg --json",
        "upref identify mine.py:loss",
        "upref derive root_pg",
    )
    assert "root_pg" in [o["name"] for o in json.loads(listed)]
    assert json.loads(right)["ok"] and not json.loads(wrong)["ok"]
    assert (
        which.startswith("mine.py:loss is root_pg")
        and "equal to the weight written by hand: yes" in derived
    )


def test_the_judges_pass_what_the_page_adds(tmp_path):
    """With the license line, which the page leaves out, in place of the file's name."""
    for name in ADDED:
        text = (
            "# SPDX-License-Identifier: Apache-2.0\n" + FILES[name].partition("\n")[2]
        )
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    config = shlex.quote(str(ROOT / "pyproject.toml"))
    check = run(f"python -m ruff check --no-cache --config {config} .", tmp_path)
    layout = run(f"python -m ruff format --check --config {config} .", tmp_path)
    assert "All checks passed" in check, check
    assert f"{len(ADDED)} files already formatted" in layout, layout


def test_an_objective_passes_the_tests_of_each_objective(added, tmp_path):
    """Every law, and the rules for its record: it is in no paper."""
    added("upref/objectives/root_pg.py")
    laws = [
        str(ROOT / "tests/core"),
        str(ROOT / "tests/verify/test_cli.py"),
        "-k",
        "root_pg",
    ]
    options = [
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    said = run(shlex.join(["python", "-m", "pytest", *options, *laws]), tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed and int(passed[1]) >= 25 and "failed" not in said, said


def test_an_oracle(added, upref_says, tmp_path):
    """The page's oracle fails the page's wrong loss, passes a right one, runs last, and
    can be skipped.
    """
    added("upref/verify/oracles/single.py")
    put("whitened.py", FILES["whitened.py"], tmp_path)
    (tmp_path / "right.py").write_text(
        (tmp_path / "whitened.py").read_text().replace("(A / std) * std", "A")
    )
    check = "upref check {}.py:loss --as is_pg --json"
    commands = [
        check.format("whitened"),
        check.format("right"),
        check.format("right") + " --skip single-response",
    ]
    wrong, right, skipped = (
        json.loads(text)["oracles"] for text in upref_says(*commands)
    )
    assert (
        wrong["single-response"] == "failure" and list(wrong)[-1] == "single-response"
    ), "its rank is the highest"
    assert (
        right["single-response"] == "ok"
        and skipped["single-response"] == "skipped on request"
    )


def test_a_fault(added, upref_says, tmp_path):
    put("halved.py", FILES["halved.py"], tmp_path)
    check = "upref check halved.py:loss --as dapo --json"

    def causes(text):
        return {f["cause"] for f in json.loads(text)["findings"]}

    added("upref/verify/faults/halved.py")
    assert "negative advantages are halved" in causes(upref_says(check)[0])
    (tmp_path / "upref/verify/faults/halved.py").unlink()
    assert "negative advantages are halved" not in causes(upref_says(check)[0])


def test_a_framework(added, upref_says, tmp_path):
    """It is explained and recorded, or the audit fails; the page's ledger is what it
    lacks.
    """
    put("plainrl.py", FILES["plainrl.py"], tmp_path)
    added("upref_frameworks/plain/audit.py")
    command = "upref audit plain --source . --json"
    usage, bare = upref_says("upref audit -h", command)
    (tmp_path / "upref_frameworks/plain/ledger.toml").write_text(
        re.search(r"```toml\n(.*?)```", PAGE, re.S)[1]
    )
    whole, proofs = upref_says(command, command.replace("--json", "--proofs"))
    bare, whole = json.loads(bare), json.loads(whole)
    assert (
        "plain" in usage
        and bare["unaudited"] == []
        and bare["out_of_scope"] == {"vanilla": "it is empty"}
    )
    assert (
        not bare["ok"] and "not recorded: without its 1/2" in bare["against_ledger"][0]
    )
    assert whole["ok"] and whole["rows"][0]["verdict"] == "agrees exactly", whole[
        "against_ledger"
    ]
    assert proofs.startswith("as recorded  plain-kl-double")
