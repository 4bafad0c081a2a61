# SPDX-License-Identifier: Apache-2.0
"""The paper's tables as data, compared with the LaTeX and against arithmetic; the
scales against the tables.
"""

import re
from pathlib import Path

import pytest

import upref
from repro.with_verl.config.scales import load_scale, paper, scale_names

ROOT = Path(__file__).parents[2]
TEX = next(
    (
        p
        for p in (ROOT.parent / "shared/up_paper.tex", ROOT / "shared/up_paper.tex")
        if p.exists()
    ),
    None,
)
PAPER = paper()
TABLES = ["A1", "A2", "A3", "A4", "A5", "A6"]
GREEK = {
    r"\epsilon_{\text{low}}": "ε_low",
    r"\epsilon_{\text{high}}": "ε_high",
    r"\,": " ",
    "~": " ",
}


def plain(cell: str) -> str:
    """Return a cell of a LaTeX table as plain text."""
    for tex, text in GREEK.items():
        cell = cell.replace(tex, text)
    cell = re.sub(
        r"\\cite\{[^}]*\}|\\textbf|\\rowcolor\{[^}]*\}|[${}]|\(Ours\)", "", cell
    )
    return " ".join(cell.split())


def value(text: str):
    """Return a cell as a number, as a list of numbers if it has " / ", or as it is."""
    if " / " in text and text.replace(",", "").replace(" / ", "").isdigit():
        return [value(t) for t in text.split(" / ")]
    if m := re.fullmatch(r"(\d+) \\times 10\^(-\d+)", text):
        return float(f"{m[1]}e{m[2]}")
    try:
        number = text.replace(",", "")
        return float(number) if "." in number else int(number)
    except ValueError:
        return text


def rows_of(label: str) -> tuple[list[list], list[list]]:
    """Return the rows printed and those commented out, of the LaTeX table with that
    label.
    """
    tex = TEX.read_text(encoding="utf-8")
    body = tex[tex.index(r"\label{" + label + "}") :]
    body = body[body.index(r"\midrule") : body.index(r"\bottomrule")]
    printed, commented = [], []
    for line in body.splitlines():
        cells = [
            plain(c)
            for c in line.lstrip("% ")
            .removesuffix(r"\\")
            .strip()
            .removesuffix(r"\\")
            .split("&")
        ]
        if len(cells) > 1 and cells[0]:
            (commented if line.startswith("%") else printed).append(
                [cells[0], *map(value, cells[1:])]
            )
    return printed, commented


@pytest.mark.skipif(
    TEX is None, reason="the paper's LaTeX, ../shared/up_paper.tex, is not here"
)
@pytest.mark.parametrize("name", [*TABLES, "table1"])
def test_the_data_file_is_the_latex(name):
    table = PAPER[name]
    printed, commented = rows_of(table["label"])
    assert table["rows"] == printed
    assert table.get("commented", []) == commented


@pytest.mark.skipif(
    TEX is None, reason="the paper's LaTeX, ../shared/up_paper.tex, is not here"
)
def test_the_peaks_are_in_the_text():
    tex = TEX.read_text(encoding="utf-8")
    for metric in PAPER["peaks"].values():
        for percent in metric.values():
            assert f"{percent:.2f}" in tex


def fits(percent: float, n: int) -> bool:
    return any(abs(100 * k / n - percent) <= 0.005 + 1e-9 for k in range(n + 1))


def test_table_1_fits_its_numbers_of_answers():
    table = PAPER["table1"]
    for method, *scores, average in table["rows"]:
        for score, n in zip(scores, table["answers"], strict=True):
            assert fits(score, n), (method, score, n)
        assert abs(sum(scores) / 5 - average) <= 0.011, method
    olympiad = [r[5] for r in table["rows"]]
    other = [n for n in range(600, 700) if all(fits(p, n) for p in olympiad)]
    assert other == [672]


def test_the_peaks_fit_or_do_not():
    peaks = PAPER["peaks"]
    assert all(fits(p, 960) for p in peaks["avg32"].values())
    # bootstrapped
    assert not any(
        fits(p, 30) for metric in ("maj32", "best32") for p in peaks[metric].values()
    )
    assert not any(fits(p, 601) for p in peaks["geometry3k"].values())


def test_names_are_registered():
    assert set(PAPER["names"].values()) <= set(upref.names())
    methods = {m for e in PAPER["experiments"].values() for m in e["methods"]}
    assert methods == set(PAPER["names"])
    assert {r[0] for r in PAPER["table1"]["rows"]} == set(
        PAPER["experiments"]["math"]["methods"]
    )


def from_table(source: str, method: str):
    """Return what the source names in that method's column: 'Table A1: Prompt /
    Response max, first'.
    """
    table, label = re.match(r"Table (A\d)(?:, commented)?: ([^;]+)", source).groups()
    data = PAPER[table]
    label, part = re.fullmatch(r"(.*?)(?:, (first|second))?", label).groups()
    rows = {r[0]: r[1:] for r in data["rows"] + data.get("commented", [])}
    column = next(i for i, c in enumerate(data["columns"]) if method in c.split(" / "))
    got = rows[label][column]
    return got if part is None else got[part == "second"]


CITED = [
    (name, key, value, source)
    for name in scale_names()
    for key, (value, source) in load_scale(name).values.items()
    if re.match(r"Table A\d: ", source)
]


@pytest.mark.parametrize(
    ("name", "key", "value", "source"),
    CITED,
    ids=lambda x: str(x).rpartition(".")[2][:30],
)
def test_a_value_said_to_be_of_a_table_is(name, key, value, source):
    experiment = PAPER["experiments"][load_scale(name).experiment or "math"]
    table = source[6:8]
    named = [
        m
        for m in experiment["methods"]
        if any(m in c.split(" / ") for c in PAPER[table]["columns"])
    ]
    assert named
    for method in named:
        assert from_table(source, method) == value


@pytest.mark.parametrize("name", [n for n in scale_names() if n.startswith("paper_")])
def test_no_row_of_the_tables_is_forgotten(name):
    """Every row of the tables of a scale's experiment is the source of one of its
    settings.
    """
    scale = load_scale(name)
    experiment = PAPER["experiments"][scale.experiment]
    sources = " | ".join(
        [s for _, s in scale.values.values()]
        + [s for hp in scale.hyperparameters.values() for _, s in hp.values()]
    )
    for table in experiment["tables"]:
        for label, *_ in PAPER[table]["rows"]:
            if label == "Max generation tokens":
                assert (
                    from_table(f"Table {table}: {label}", experiment["methods"][0])
                    == (scale.values["data.max_response_length"][0])
                )
            elif not (
                name == "paper_math" and "high" in label
            ):  # grpo has one eps, checked below
                assert f"Table {table}: {label}" in sources, label


def test_clip_bounds_are_the_tables():
    """Every hyperparameter whose source is a table has that table's number; GRPO's one
    eps is both of its bounds.
    """
    names = {v: k for k, v in PAPER["names"].items()}
    seen = 0
    for scale in map(load_scale, scale_names()):
        for objective, hp in scale.hyperparameters.items():
            for key, (value, source) in hp.items():
                if source.startswith("Table") and names[objective] in " ".join(
                    PAPER[source[6:8]]["columns"]
                ):
                    assert from_table(source, names[objective]) == value, (
                        scale.name,
                        objective,
                        key,
                    )
                    seen += 1
    assert seen >= 9
    for method in ("GRPO",):  # one eps stands for two equal bounds
        bounds = [
            from_table(f"Table A3: {b}", method)
            for b in ("Lower Clip ε_low", "Upper Clip ε_high")
        ]
        assert (
            bounds == [load_scale("paper_math").hyperparameters["grpo"]["eps"][0]] * 2
        )


SOURCE = r"Table A\d(, commented)?: |Table 1: |Section 5|Figure \d: |not given in the paper: \S|verl 0\.9\.1 default|ours"


@pytest.mark.parametrize("name", scale_names())
def test_every_value_has_a_source(name):
    scale = load_scale(name)
    hps = [pair for hp in scale.hyperparameters.values() for pair in hp.values()]
    for value, source in [*scale.values.values(), *hps, *scale.loss.values()]:
        assert re.match(SOURCE, source), (value, source)


@pytest.mark.parametrize("name", [n for n in scale_names() if n.startswith("paper_")])
def test_models_and_data_are_the_papers(name):
    scale = load_scale(name)
    experiment = PAPER["experiments"][scale.experiment]
    assert (
        scale.values["actor_rollout_ref.model.path"][0] == f"Qwen/{experiment['model']}"
    )
    val = " ".join(scale.values["data.val_files"][0]).lower()
    assert all(v.lower()[:6] in val for v in experiment["validation"])
