# SPDX-License-Identifier: Apache-2.0
"""`repro/run.sh OBJECTIVE`: the right pair, the right words, a report one can look at."""

import re
import subprocess
from pathlib import Path

import mini_fake_train as fake
import numpy as np
import pytest
from PIL import Image

import upref
from repro.mini import compare
from repro.mini.experiment import curves, records, suite
from upref.errors import InputError

ROOT = Path(__file__).parents[2]
SHORT = {"steps": 30, "eval_every": 10}


@pytest.mark.parametrize("name", [*upref.names(), "up(sapo)", "up(gppo)"])
def test_every_objective_has_its_other_half(name):
    e = compare.experiment(name, 2, SHORT)
    base, up = e.arms
    assert (
        name in (base, up) and up.startswith("up") and upref.get(base) and upref.get(up)
    )
    assert all(compare.settings_of(e, arm, 1).objective == arm for arm in e.arms)


@pytest.mark.parametrize(
    ("name", "base", "up"),
    [
        ("up_dapo", "dapo", "up_dapo"),
        ("dapo", "dapo", "up_dapo"),
        ("sapo", "sapo", "up(sapo)"),
        ("up(sapo)", "sapo", "up(sapo)"),
        ("dapo_no_upper_clip", "dapo_no_upper_clip", "up(dapo_no_upper_clip)"),
    ],
)
def test_the_pair(name, base, up):
    assert list(compare.experiment(name, 1, {}).arms) == [base, up]


def test_another_baseline_takes_the_place_of_the_other_half():
    e = compare.experiment("cispo", 2, SHORT, against="dapo")
    assert list(e.arms) == ["dapo", "cispo"]
    assert {run.settings.objective for run in e.todo({})} == {"dapo", "cispo"}
    with pytest.raises(InputError, match="is the objective itself"):
        compare.experiment("dapo", 2, SHORT, against="dapo")


def test_an_unknown_objective_names_the_nearest():
    for pair in (("up_dappo", ""), ("up_dapo", "dappo")):
        with pytest.raises(InputError, match="did you mean"):
            compare.experiment(pair[0], 1, {}, pair[1])


def written(name, shift, folder):
    """Write the report of two seeds whose numbers differ by `shift`; return its text
    and its folder.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake, "SHIFT", shift)
        e = compare.experiment(name, 2, SHORT)
        for key, s in e.todo({}):
            fake.write(s, folder / key)
    known = {key: records.record(folder / key) for key, _ in e.todo({})}
    return compare.write(e, known, folder, folder / "report"), folder / "report"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Write a report of two made-up arms, and return what `written` returns."""
    return written(
        "up_dapo",
        {"up_dapo": {"avg": 0.05, "entropy": -0.1, "kl_base": 0.3}},
        tmp_path_factory.mktemp("r"),
    )


def test_the_report_says_what_showed(report):
    """Both seeds of a stand-in for training show higher and lower numbers; two seeds
    alone prove nothing, and the report says so.
    """
    text, folder = report
    rows = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in text.splitlines()
        if line.startswith("| ")
    }
    higher, lower = r"\+[\d.]+, \+[\d.]+ \|$", r"-[\d.]+, -[\d.]+ \|$"
    assert re.search(higher, rows["avg (%), last"])
    assert re.search(lower, rows["entropy, mean"])
    assert re.search(higher, rows["kl_base, last"])
    assert (
        "These 2 seeds cannot tell an effect from chance" in text
        and "probability 0.5." in text
    )
    assert "cannot tell" in compare.chance(1) and "cannot tell" not in compare.chance(9)
    assert "bash repro/run.sh up_dapo reference" in text
    metrics = [metric for metric, _ in compare.ROWS]
    assert all(f"`{metric}`" in compare.LEGEND for metric in metrics)
    assert compare.LEGEND in text
    assert sorted(p.name for p in folder.iterdir()) == [
        "cap.png",
        "cap.svg",
        "curves.png",
        "curves.svg",
        "report.md",
    ]


def test_the_map_is_lit_by_the_tokens(report):
    """Compare the share of clipped tokens in the text with the kept tokens, and find
    both colors in the picture.
    """
    text, folder = report
    dead = float(text.split("* dapo, A > 0: ")[1].split(" %")[0])
    seen = np.load(next(folder.parent.glob("dapo-*-s0-*")) / "seen.npz")
    ratio, positive = seen["pi"] / seen["pi_old"], seen["adv"] > 0
    assert (
        dead == pytest.approx(100 * (ratio > 1.28)[positive].mean(), abs=0.5)
        and dead > 3
    )
    assert "* up_dapo, A > 0: 0.00 %" in text
    picture = np.asarray(Image.open(folder / "cap.png").convert("RGB"), float)
    orange = (abs(picture - [0xE6, 0x9F, 0x00]).sum(-1) < 60).mean()
    red = (abs(picture - [0xCC, 0, 0]).sum(-1) < 60).mean()
    assert orange > 1e-4 and red > 1e-5


def test_what_has_no_map_of_tokens_says_why(tmp_path):
    text, folder = written("up_gspo", {}, tmp_path)
    assert (
        "no map of tokens, it acts on whole responses" in text
        and not (folder / "cap.png").exists()
    )


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command with the fake trainer: (exit status,
    stdout, stderr).
    """
    monkeypatch.setattr(suite, "TRAIN", "mini_fake_train")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'mini'}")

    def call(*words):
        code = compare.main([*words, "--out", str(tmp_path)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_command_trains_reports_and_reuses(command, tmp_path):
    code, out, err = command("up_dapo", "steps=6", "eval_every=3", "--seeds", "1")
    assert (
        (code, err) == (0, "")
        and "cannot tell an effect from chance" in out
        and "0 of 2 runs are finished" in out
    )
    assert (tmp_path / "compare" / "up_dapo" / "curves.png").stat().st_size > 10_000
    code, out, _ = command("dapo", "steps=6", "eval_every=3", "--seeds", "1")
    assert code == 0 and "2 of 2 runs are finished; 0 to go" in out


@pytest.mark.nightly
def test_settings_may_follow_an_option(command):
    code, out, err = command(
        "cispo", "--against", "dapo", "steps=6", "--seeds", "1", "eval_every=3"
    )
    assert (code, err) == (0, "") and "0 of 2 runs are finished" in out


def test_no_panel_of_a_short_run_is_empty(tmp_path):
    """Steps are logged in bins, of which three steps make one."""
    e = compare.experiment("up_dapo", 2, {"steps": 3, "eval_every": 3})
    for key, s in e.todo({}):
        fake.write(s, tmp_path / key)
    known = {key: records.record(tmp_path / key) for key, _ in e.todo({})}
    for panel in compare.PANELS:
        found = curves.series(e, known, panel)
        (ax,) = curves.draw([panel], [found], "").axes
        of_runs = [line for line in ax.lines if len(line.get_xdata()) != 2]
        assert of_runs
        for line in of_runs:
            values = np.asarray(line.get_ydata(), float)
            assert np.isfinite(values).all()
            assert len(values) > 2 or line.get_marker() == "o", panel


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up_dappo"], "did you mean"),
        (["up_dapo", "step=6"], "there is no 'step'; did you mean 'steps'?"),
        (["up_dapo", "steps"], "is not name=value"),
        (["up_dapo", "seed=3"], "seeds by --seeds"),
        (["up_dapo", "--seeds", "0"], "at least 1"),
    ],
)
def test_bad_words_are_one_sentence(command, words, says):
    code, out, err = command(*words)
    assert code == 2 and says in err and err.count("\n") == 1 and not out


def test_a_failed_run_is_told(command, monkeypatch):
    monkeypatch.setenv("FAKE", "fail-dapo")
    code, _, err = command("up_dapo", "steps=6", "--seeds", "1")
    assert code == 1 and "no space left" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "usage:"),
        (["--help"], "usage:"),
        (["up_dapo", "reference", "steps=5"], "no settings to change"),
        (
            ["UPREF_PYTHON=/nonexistent", "up_dapo", "gpu1"],
            "UPREF_PYTHON=/nonexistent lacks an interpreter",
        ),
        (
            ["UPREF_PYTHON=/bin/false", "up_dapo", "cpu"],
            "UPREF_PYTHON=/bin/false lacks an interpreter",
        ),
    ],
)
def test_run_sh_refuses_in_one_line(words, says):
    given = [w for w in words if w.startswith("UPREF")]
    command = [
        "env",
        *given,
        "bash",
        str(ROOT / "repro" / "run.sh"),
        *words[len(given) :],
    ]
    p = subprocess.run(command, capture_output=True, text=True, check=False)
    assert p.returncode == 2 and says in p.stderr and p.stderr.count("\n") == 1


def test_pictures_are_not_blank(report):
    for name in ("curves.png", "cap.png"):
        assert np.asarray(Image.open(report[1] / name), float).std() > 10


def test_what_is_shown_loses_no_word(capsys):
    claim = "up_dapo ends with a higher Avg@32 than dapo, after as many words as two lines hold. (+0.8 [-21.9, +23.4])"
    compare.print_report(f"* Fig. 2a: **showed in 1 of 2 seeds**. {claim}")
    assert claim in " ".join(capsys.readouterr().out.split())
