# SPDX-License-Identifier: Apache-2.0
"""The audit of a results table: sound on tables that can be, and it finds a digit that
was altered.
"""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import comb, sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console

from paper.__main__ import main as paper
from paper.grim import audit
from paper.grim.averages import mean_fits
from paper.grim.counts import numerators, possible
from paper.grim.digits import consistent, mend, one_digit_off
from paper.grim.read import PAPER, read
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
TEX = next(
    (
        p
        for p in (ROOT.parent / "shared/up_paper.tex", ROOT / "shared/up_paper.tex")
        if p.exists()
    ),
    None,
)
TABLE = read(PAPER.read_text(encoding="utf-8"))
FOUND = audit(TABLE)
N = [960, 40, 500, 272, 672]


def main(argv):
    return paper(["audit-table", *argv])


# ---- the paper's table ---------------------------------------------------------------
@pytest.mark.skipif(
    TEX is None, reason="the paper's LaTeX, ../shared/up_paper.tex, is not here"
)
def test_the_data_are_the_latex():
    tex = TEX.read_text(encoding="utf-8")
    body = tex[tex.index(r"\label{tab:baseline_comparison}") :]
    body = body[: body.index(r"\bottomrule")]
    clean = lambda cell: re.sub(
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
    untold = audit(replace(TABLE, counts=[[]] * 5))
    assert [c.n for c in untold.columns] == N == [c.n for c in FOUND.columns]
    assert all(not c.misfits and c.accident < 1e-9 for c in untold.columns) and FOUND
    # not 674, not 675
    assert [n for n in possible([row[4] for row in TABLE.cells], 1000) if n > 600] == [
        672
    ]


def test_the_averages_are_of_the_unrounded_numbers():
    """UP-GRPO's printed columns have mean 61.304; 394/960, 35/40, 442/500, 85/272,
    392/672 have 61.305, a tie.
    """
    up, average = TABLE.cells[-1], TABLE.averages[-1]
    assert sum(map(Fraction, up)) / 5 == Fraction("61.304")
    ks = [numerators(t, n) for t, n in zip(up, N, strict=True)]
    assert [list(k) for k in ks] == [[394], [35], [442], [85], [392]]
    assert sum(
        Fraction(100 * k[0], n) for k, n in zip(ks, N, strict=True)
    ) / 5 == Fraction("61.305")
    assert (
        mean_fits(average, up, N)
        and not mean_fits("61.32", up, N)
        and not mean_fits("61.29", up, N)
    )
    assert all(r.follows for r in FOUND.rows)
    assert FOUND.lead == pytest.approx(1.15, abs=1e-3)


@pytest.mark.slow
def test_an_altered_digit_is_found():
    """Every digit of the table, in turn, to every other. The one that cannot be found
    makes 61.31 into 61.30: the mean is 61.305 exactly, and either is a rounding of it.
    """
    tried = unseen = alone = 0
    for i, (cells, average) in enumerate(zip(TABLE.cells, TABLE.averages, strict=True)):
        for j, name in enumerate([*TABLE.columns, "average"]):
            right = [*cells, average][j]
            for wrong in one_digit_off(right):
                tried += 1
                *row, a = [
                    wrong if k == j else t for k, t in enumerate([*cells, average])
                ]
                if consistent(row, a, N):
                    unseen += 1
                    assert (TABLE.rows[i], name, wrong) == (
                        "UP-GRPO",
                        "average",
                        "61.30",
                    )
                    continue
                swap = lambda kept, new, i=i: [*kept[:i], new, *kept[i + 1 :]]
                altered = replace(
                    TABLE,
                    cells=swap(TABLE.cells, row),
                    averages=swap(TABLE.averages, a),
                )
                found = mend(altered, i, N)
                assert f"{name} {wrong} -> {right}" in found
                alone += len(found) == 1
    assert tried == 12 * 6 * 4 * 9 and unseen == 1
    assert alone > 0.75 * tried  # in the others a second digit could be the altered one


def test_an_altered_digit_is_found_by_the_command(tmp_path, capsys):
    file = tmp_path / "altered.csv"
    for told in (True, False):
        text = PAPER.read_text(encoding="utf-8").replace("88.20", "88.30")
        file.write_text(text if told else re.sub("(?m)^n,.*$", "", text))
        assert main([str(file)]) == 1
        out = capsys.readouterr().out
        assert "MATH500 88.30 -> 88.20" in out
        # untold, n = 1000 makes 88.30 possible; the average does not
        assert not told or "cannot be: GSPO" in out


# ---- one number ----------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 7, 40, 272, 960, 3000])
@pytest.mark.parametrize("places", [0, 1, 2])
def test_what_is_printed_of_k_of_n_is_possible(n, places):
    for k in range(0, n + 1, max(1, n // 150)):
        text = f"{100 * k / n:.{places}f}"
        assert k in numerators(text, n)
        far = [j for j in (k - n // 2 - 2, k + n // 2 + 2) if 0 <= j <= n]
        assert all(j not in numerators(text, n) for j in far)


def test_numerators_by_hand():
    assert (
        list(numerators("33.33", 3)) == [1]
        and list(numerators("33.3", 30)) == [10]
        and not numerators("35.73", 40)
    )
    assert list(numerators("0.5", 100)) == [] or list(numerators("0.5", 200)) == [1]
    # 11.5 and 12.5 may both be rounded to 12
    assert list(numerators("12", 1000)) == list(range(115, 126))
    assert 3 in possible(["66.67", "33.33"]) and 4 not in possible(["66.67", "33.33"])


counts = st.integers(1, 1500)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(counts, min_size=1, max_size=4),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_a_true_table_fits(ns, rows, rng, weighted):
    """Whatever was counted and rounded: nothing is found where nothing is wrong."""
    header = ["name", *[f"c{j}" for j in range(len(ns))], "avg"]
    lines = [header, ["n", *map(str, ns), ""]]
    for i in range(rows):
        p = [Fraction(100 * rng.randint((n + 1) // 2, n), n) for n in ns]
        w = [Fraction(n) if weighted else Fraction(1) for n in ns]
        mean = sum(x * v for x, v in zip(p, w, strict=True)) / sum(w)
        lines.append([f"row{i}", *[f"{float(x):.2f}" for x in p], f"{float(mean):.2f}"])
    found = audit(read("\n".join(",".join(line) for line in lines)), draws=50)
    assert not any(c.misfits for c in found.columns)
    # a lone row may fit both ways only by chance
    assert found or (weighted != found.weighted)
    if weighted == found.weighted:
        assert found


# ---- errors and luck -----------------------------------------------------------------
def test_standard_errors_by_hand():
    row = FOUND.rows[-1]
    p = [394 / 960, 0.875, 0.884, 0.3125, 392 / 672]
    by_hand = lambda ns: (
        100 * sqrt(sum(q * (1 - q) / n for q, n in zip(p, ns, strict=True))) / 5
    )
    assert row.se == pytest.approx(by_hand(N), rel=1e-3)
    assert row.se_problems == pytest.approx(by_hand([30, *N[1:]]), rel=1e-3)
    assert (
        max(r.se_problems for r in FOUND.rows) == pytest.approx(2.3, abs=0.1)
        and row.se < row.se_problems
    )


def test_luck_against_all_outcomes_of_a_small_table():
    found = audit(read("name,x\nn,5\na,80\nb,60"), draws=40_000).chances[0]
    P = lambda p: [comb(5, k) * p**k * (1 - p) ** (5 - k) for k in range(6)]
    first = sum(x * y * (1 if i > j else 0.5 if i == j else 0) for (i, x), (j, y) in
                product(enumerate(P(0.8)), enumerate(P(0.6))))  # fmt: skip
    by_one = sum(
        x * y for (i, x), (j, y) in product(enumerate(P(0.7)), repeat=2) if i - j >= 1
    )
    assert found.again_first == pytest.approx(first, abs=4 * 0.5 / 200)
    assert found.lead_of_two == pytest.approx(by_one, abs=4 * 0.5 / 200)
    assert found.lead_if_equal == pytest.approx(2 * by_one, abs=4 * 0.5 / 200)
    assert found.contenders == ["a", "b"]


def test_equals_win_half_the_time():
    """Of two equal rows each is first in half of all draws: sums equal but for
    float64's last digit are ties.
    """
    luck = audit(
        read("m,x,y,z\nn,10,20,30\na,70,70,70\nb,70,70,70"), draws=200_000
    ).chances[0]
    assert luck.again_first == pytest.approx(0.5, abs=4 * 0.5 / sqrt(200_000))


def test_the_seed_decides_the_draws():
    assert audit(TABLE).json() == FOUND.json()
    other = audit(TABLE, seed=1)
    assert other.json() != FOUND.json() and other.chances[
        0
    ].again_first == pytest.approx(FOUND.chances[0].again_first, abs=0.02)


# ---- anybody's table -----------------------------------------------------------------
def test_markdown_with_what_people_put_in():
    text = """Our results:

| Method | GSM8K | MATH | Avg. |
|:---|---:|:---:|---|
| n | 1319 | 500 / 5000 | |
| base | 75.06% | 34.2 | 54.6 |
| **ours** | **80.97** | - | – |
"""
    table = read(text)
    assert table.rows == ["base", "ours"] and table.cells == [
        ["75.06", "34.2"],
        ["80.97", None],
    ]
    assert [[c.n for c in cs] for cs in table.counts] == [
        [1319],
        [500, 5000],
    ] and table.averages == ["54.6", None]
    found = audit(table)
    assert found and not found.chances and "follows" in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "m;x;y\na;50.1;2",
        "m\tx\ty\na\t50.1 ± 0.3\t2 %",
        "m,x,y\n# told by mail\na,50.1%,**2**",
    ],
)
def test_other_ways_to_write_it(text):
    assert read(text).cells == [["50.1", "2"]]


def test_latex_with_what_people_put_in():
    text = r"""
\begin{table}[t] \centering
\begin{tabular}{l|cc|c}
\toprule
& \multicolumn{2}{c}{Benchmarks} & \\
\cmidrule(lr){2-3}
Method & GSM8K & MATH500 & Avg. \\ \midrule % all of them
n & 1319 & 500x4 & \\
Base \cite{me} & 75.06 & $34.20_{}$ & 54.63 \\[2pt]
\rowcolor{gray!10} \textbf{Ours} & \textbf{80.97}\% & \underline{40.10} {\scriptsize $\pm$ 0.3} & -- \\
\bottomrule
\end{tabular}
\end{table}"""
    table = read(text)
    assert table.columns == ["GSM8K", "MATH500"] and [
        [c.n for c in cs] for cs in table.counts
    ] == [[1319], [2000]]
    assert (
        table.rows[1] == "Ours"
        and table.cells[1] == ["80.97", "40.10"]
        and table.averages == ["54.63", None]
    )
    assert audit(table) is not None


def test_the_paper_s_table_as_latex_is_the_same_audit():
    cells = lambda i: [TABLE.rows[i], *TABLE.cells[i], TABLE.averages[i]]
    body = [cells(i) for i in range(len(TABLE.rows))]
    n = [
        "n",
        *(
            "/".join(f"{c.n // c.samples}x{c.samples}" for c in cs)
            for cs in TABLE.counts
        ),
        "",
    ]
    text = "\n".join(
        " & ".join(row) + r" \\" for row in [["m", *TABLE.columns, "Average"], n, *body]
    )
    assert read(text) == TABLE


def test_markdown_whose_last_cells_are_empty():
    assert read("|m|x|y||\n|-|-|-|-|\n|n|40|||\n|a|50|||").cells == [["50", None, None]]


def test_one_row_and_a_clear_winner():
    assert audit(read("m,x\nn,40\na,50")).chances == []
    clear = audit(read("m,x\nn,100\na,100\nb,0"))
    assert clear.chances[0].contenders == ["a"] and "those 1" not in str(clear)


def test_too_few_numbers_tell_no_n():
    found = audit(read("name,x\na,50.00\nb,25.00"))
    assert 4 in found.columns[0].fit and 8 in found.columns[0].fit
    assert (
        found
        and found.columns[0].n is None
        and "too few numbers" in str(found)
        and "±" not in str(found)
    )


def test_no_n_is_no_crash():
    found = audit(read("name,x,y,avg\na,50.01,1,25.5\nb,25.03,2,13.5\nc,99.99,100,100"))
    assert found.columns[0].n is None and str(found)
    assert found.rows[2].follows
    # NaN is no JSON
    assert json.loads(found.json(), parse_constant=pytest.fail)["rows"][0]["se"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a table"),
        ("a\nb", "not a table"),
        ("name,x\na,1,2", "has 3 cells"),
        ("name,x\na,one", "is not a number"),
        ("name,x\na,101", "not a percentage"),
        ("name,x\na,-3.5", "not a percentage"),
        ("name,x\na,1e1", "not a percentage"),
        ("name,x\na,NaN", "not a percentage"),
        ("name,x\nn,lots\na,1", "whole number"),
        ("name,x\nn,0\na,1", "1 or more"),
        ("name,x\nn,999999999999999999999999999999\na,1", "at most"),
        (f"name,x\nn,{'9' * 5000}\na,1", "whole number"),
        ("name,x\nn,10\nn,20\na,1", "one row called n"),
        ("name,x\nn,10", "at least one row|one row of results"),
        ("name,x\na,1\na,2", "the same name"),
        ("name,avg,mean\na,1,2", "called an average"),
        ("name,avg\na,1", "one column of numbers"),
        ("name,x\na,0.53\nb,0.61", "give percentages"),
    ],
)
def test_bad_tables_are_one_sentence(text, says, tmp_path, capsys):
    with pytest.raises(InputError, match=says):
        read(text)
    file = tmp_path / "t.csv"
    file.write_text(text)
    assert main([str(file)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "t.csv" in err


def test_files_that_cannot_be_read(tmp_path, capsys):
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "none.csv", tmp_path, binary):
        assert main([str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["--seed", "-1"]) == 2 and main([""]) == 2


def test_a_terminal_shows_names_in_brackets_as_they_are():
    console = Console(width=160, force_terminal=True, no_color=True)
    with console.capture() as shown:
        console.print(audit(read("m,x\nn,40\n[b] ours,50")))
    assert "[b] ours" in shown.get()


def test_help_imports_nothing_heavy():
    heavy = "print({'numpy', 'torch', 'paper.grim'} & set(sys.modules))"
    script = f"import atexit, sys; atexit.register(lambda: {heavy})\n"
    script += "from paper.__main__ import main; main(['audit-table', '-h'])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "30x32" in done.stdout and done.stdout.endswith("\nset()\n")


def test_it_runs_as_a_module():
    argv = [sys.executable, "-m", "paper", "audit-table", "none.csv"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (
        done.returncode == 2
        and done.stderr
        == "python -m paper: cannot read none.csv: No such file or directory.\n"
    )


def test_the_command_without_a_file_audits_the_paper(capsys):
    assert main([]) == 0
    assert (
        "UP-GRPO leads GSPO by 1.150 points (as printed, 1.16)"
        in capsys.readouterr().out
    )
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
