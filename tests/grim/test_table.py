# SPDX-License-Identifier: Apache-2.0
"""Table 1 of the paper: its numbers are possible, and its averages follow from them."""

import re
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest

from tests.support.table1 import likeliest, mean, mean_fits, numerators, possible, read

ROOT = Path(__file__).parents[2]
TEX = next(
    (
        p
        for p in (ROOT.parent / "shared/up_paper.tex", ROOT / "shared/up_paper.tex")
        if p.exists()
    ),
    None,
)
TABLE = read()
N = [960, 40, 500, 272, 672]


@pytest.mark.skipif(
    TEX is None, reason="the paper's LaTeX, ../shared/up_paper.tex, is not here"
)
def test_the_data_are_the_latex():
    """The twelve rows of the data are those of the paper's LaTeX table, cell by cell."""
    tex = TEX.read_text(encoding="utf-8")
    body = tex[tex.index(r"\label{tab:baseline_comparison}") :]
    body = body[: body.index(r"\bottomrule")]

    def clean(cell):
        return re.sub(
            r"\\cite\{[^}]*\}|\\textbf|\\rowcolor\{[^}]*\}|[{}]|\(Ours\)", "", cell
        )

    lines = [
        line.rstrip().removesuffix(r"\\")
        for line in body.splitlines()
        if line.count("&") == 6
    ]
    rows = [
        [" ".join(clean(c).replace(r"\,", " ").split()) for c in line.split("&")]
        for line in lines
    ]
    assert [c for c in rows[0][1:6]] == TABLE.columns and rows[0][6] == "Average"
    ours = [
        [n, *c, a]
        for n, c, a in zip(TABLE.rows, TABLE.cells, TABLE.averages, strict=True)
    ]
    assert ours == rows[1:] and len(ours) == 12


def test_it_is_the_table_that_the_gpu_scales_are_held_to():
    path = next(ROOT.glob("repro/with_verl/**/paper.toml"))
    kept = tomllib.loads(path.read_text(encoding="utf-8"))["table1"]
    ours = [
        [n, *map(float, c), float(a)]
        for n, c, a in zip(TABLE.rows, TABLE.cells, TABLE.averages, strict=True)
    ]
    assert ours == kept["rows"] and kept["answers"] == N


def test_the_numbers_of_answers_are_found_without_being_told():
    columns = [list(column) for column in zip(*TABLE.cells, strict=True)]
    found = [likeliest(column) for column in columns]
    assert [n for n, _ in found] == N == TABLE.answers
    assert all(accident < 1e-9 for _, accident in found)
    # not 674, not 675
    assert [n for n in possible(columns[4], 1000) if n > 600] == [672]


def test_the_averages_are_of_the_unrounded_numbers():
    """UP-GRPO's printed columns have mean 61.304; 394/960, 35/40, 442/500, 85/272,
    392/672 have 61.305, a tie.
    """
    up, average = TABLE.cells[-1], TABLE.averages[-1]
    assert sum(map(Fraction, up)) / 5 == Fraction("61.304")
    ks = [numerators(t, n) for t, n in zip(up, N, strict=True)]
    assert [list(k) for k in ks] == [[394], [35], [442], [85], [392]]
    assert mean(up, N) == Fraction("61.305")
    assert mean_fits(average, up, N)
    assert not mean_fits("61.32", up, N) and not mean_fits("61.29", up, N)
    for cells, printed in zip(TABLE.cells, TABLE.averages, strict=True):
        assert mean_fits(printed, cells, N)
    gspo = TABLE.cells[TABLE.rows.index("GSPO")]
    assert float(mean(up, N) - mean(gspo, N)) == pytest.approx(1.15, abs=1e-3)


def test_numerators_by_hand():
    assert list(numerators("33.33", 3)) == [1] and list(numerators("33.3", 1000)) == [
        333
    ]
    assert not numerators("33.33", 4)
    # a tie, either way
    assert list(numerators("12", 8)) == [1] and list(numerators("13", 8)) == [1]
