# SPDX-License-Identifier: Apache-2.0
"""The page says what the code says, and its Python blocks run, in order, in one namespace."""

import re
from pathlib import Path

import pytest

import upref
from upref.cli import main
from upref.commands import markdown_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_blocks_run():
    blocks, namespace = re.findall(r"```python\n(.*?)```", README, re.S), {}
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    first = namespace["report"].failures[0]
    assert first.regime.startswith("A > 0, r <= 0.8 ") and "the minimum is missing" in first.cause
    grad = namespace["b"].logp.grad  # what the first block's comments promise, of UP
    assert grad[0, 0] == grad[0, 1] != 0 and grad[1, 0] == 0


def test_the_table_is_the_registry():
    assert markdown_table() in README, "paste the output of `upref list --markdown`"


def test_links_and_named_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
    for script in re.findall(r"(?:bash|python) ((?:repro|tests|figures|benchmarks)/\S+?\.\w+)", README):
        assert (ROOT / script).exists(), script


def test_ci_runs_the_readmes_test_command():
    assert "bash tests/run.sh" in README and "bash repro/run.sh up_dapo" in README
    assert "bash tests/run.sh" in (ROOT / ".ci/run").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    upref (\w+(?: [\w.:]+)*)", README, re.M))
def test_commands_of_the_page_are_understood(line, capsys):
    words = line.split()
    if words[0] in ("derive", "audit", "check", "identify", "doctor"):  # slow, and tested elsewhere
        words = [words[0], "-h"]
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0
    else:
        assert main([w for w in words if w != "cap.svg"]) == 0
    assert capsys.readouterr().out


def test_the_speed_table_is_the_committed_run():
    assert (ROOT / "benchmarks" / "speed.txt").read_text(encoding="utf-8").strip() in README


def test_every_verdict_on_the_paper_is_there_as_it_is_committed():
    verdicts = (ROOT / "repro" / "mini" / "results" / "verdicts.md").read_text(encoding="utf-8")
    table = [x for x in verdicts.partition("## Controls")[0].splitlines() if x.startswith("| ") and "[`--only" in x]
    expected = ["|".join(x.split(" | ")[:4]) for x in table if "**not testable here**" not in x]
    _, _, after = README.partition("| | claim | verdict |")
    rows = [x for x in after.partition("\n\n")[0].splitlines()[2:]]
    assert ["|".join(x.removesuffix(" |").split(" | ")) for x in rows] == expected and len(rows) >= 20
    assert f"{re.search(r'^[0-9]+ runs', verdicts, re.M)[0]} (" in README


def test_every_public_name_is_there():
    for name in upref.__all__:
        assert callable(getattr(upref, name))
