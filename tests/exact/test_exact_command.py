# SPDX-License-Identifier: Apache-2.0
"""The command, its exit statuses, and that what is committed is what the code finds."""

import json
import re
from pathlib import Path

import pytest
import torch

from paper.claims import words
from repro.exact import __main__ as command, flow
from repro.exact.experiments import (
    collapse,
    coverage,
    drawn,
    entropy,
    fixed_points,
    rise,
    strings,
)
from repro.exact.result import Finding, Result, Table, markdown, shown

FOLDER = Path(command.__file__).parent
KEPT = json.loads((FOLDER / "results/results.json").read_text(encoding="utf-8"))
REPORT = (FOLDER / "results/report.md").read_text(encoding="utf-8")


def kept(experiment: str, title: str, row: str) -> list:
    """That row of the first table whose title has these words."""
    table = next(t for t in KEPT[experiment]["tables"] if title in t["title"])
    return next(r[1:] for r in table["rows"] if r[0] == row)


def same(found, committed):
    assert [float(x) for x in found] == pytest.approx(
        [float("inf") if x is None else x for x in committed], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["up_dapo", pytest.param("dapo", marks=pytest.mark.nightly)]
)
def test_the_committed_numbers_are_what_the_code_finds(name):
    """One row an experiment: the whole of it takes minutes."""
    _, o, hp = flow.arm(name)
    same(
        rise.on_a_batch(o, rise.DOSES[3:], hp),
        kept("rise", "infinitely many", name)[3:],
    )
    same([rise.on_a_group(o, 1.0)], [kept("rise", "one group", name)[4]])
    same(
        [drawn.measure(o, float(d), hp)[0] for d in drawn.DOSES[::2]],
        kept("drawn", "Expected KL", name),
    )
    start = torch.tensor([entropy.MU], dtype=torch.float64)
    doses = entropy.DOSES[8::2]
    same(
        entropy.kept(o, start.expand(len(doses), -1), doses, hp)[0],
        kept("entropy", "among the right", name)[4:],
    )
    q = entropy.reached(o, start.expand(len(doses), -1), doses, hp)[0]
    same(coverage.effective(q), kept("coverage", "Effective number", name)[4:])
    same(
        strings.rise(o, strings.DOSES[3:], hp),
        kept("strings", "Rollouts until", name)[3:],
    )
    end, _ = collapse.grid(o, hp, doses=collapse.DOSES[-1:])
    same([end.mean()], kept("collapse", "Mean reward", name)[-1:])
    case = list(fixed_points.CASES)[1]
    p, _ = fixed_points.trajectory(o, case, hp)
    same(p[-1], kept("fixed_points", case, name)[:3])


def test_the_report_has_every_experiment_and_every_number():
    assert list(KEPT) == command.EXPERIMENTS
    for name, facts in KEPT.items():
        assert f"## {name}\n" in REPORT and f"]({name}.svg)" in REPORT
        assert (FOLDER / f"results/{name}.svg").stat().st_size < 500_000
        for f in facts["findings"]:
            assert (
                f"**{words.of_rule(f['verdict'])}**" in REPORT
                and f["because"] in REPORT
            )
        for t in facts["tables"]:
            table = Table(**t)
            assert table.markdown() in REPORT


def test_the_readme_names_what_is_there():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name in command.EXPERIMENTS:
        assert f"`{name}`" in readme
    for path in re.findall(r"\]\(([\w./]+)\)", readme):
        assert (FOLDER / path).exists(), path


def test_one_experiment_with_arms_of_ones_own(tmp_path, capsys):
    assert (
        command.main(
            ["drawn", "--arms", "up(sapo)", "dapo:eps_high=1", "--out", str(tmp_path)]
        )
        == 0
    )
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.md",
        "results.json",
        "drawn.svg",
    }
    text = (tmp_path / "report.md").read_text()
    assert "up(sapo)" in text and "dapo:eps_high=1" in text and "| claim |" not in text
    assert "done:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["drawn", "--arms", "dapoo"],
        ["drawn", "--arms", "dapo:eps_high=-1"],
        ["drawn", "--arms"],
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(argv, capsys, tmp_path):
    try:
        status = command.main(
            [*argv, "--out", str(tmp_path)] if argv[-1] != "--arms" else argv
        )
    except SystemExit as e:  # argparse's own
        status = e.code
    assert status == 2 and capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(drawn, "DOSES", drawn.DOSES[:5])
    assert (
        command.main(["drawn", "--arms", "up_dapo", "--out", str(tmp_path / "file")])
        == 2
    )
    assert "cannot write" in capsys.readouterr().err


def test_numbers_as_they_are_shown():
    assert [shown(x) for x in (None, 0.0, 0.12345, 1234.5, 1e-5, 12345.0, "a|b", 3)] == [
        "–", "0", "0.123", "1.23e+03", "1.00e-05", "1.23e+04", "a|b", "3",
    ]  # fmt: skip
    finding = Finding("x", "", "holds", "y")
    result = Result("n", "T.", "S.", [Table("t", ["a|b"], [[1.0]])], None, [finding])
    assert "a\\|b" in markdown(
        [result]
    ) and "| x | ours | **reproduced** | y |" in markdown([result])
