# SPDX-License-Identifier: Apache-2.0
"""`upref replay`: status, report, JSON and sheets."""

import html
import io
import json
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from tests.replay.simulator import FAULTS, World, count_as_delivered, run_of_steps
from upref.cli import main
from upref.replay import loss, make_batch, read, write
from upref.replay.series import StepGap
from upref.replay.sheet import _draw_over_steps

FILES = Path(__file__).parent / "files"
WORLD = World("qwen3", 51, responses=32, length=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write dumps of a healthy step, a shifted one, and a run of several steps; return
    their folder.
    """
    at = tmp_path_factory.mktemp("dumps")
    for name in ("healthy_bfloat16", "shifted"):
        write(
            at / f"{name}.npz",
            make_batch(FAULTS[name](WORLD), file="f", step=4, logged={}),
        )
    (at / "run").mkdir()
    for step, columns in enumerate(count_as_delivered(run_of_steps(WORLD, "never"))):
        write(at / "run" / f"step{step}.npz", make_batch(columns, file="f", step=step))
    return at


def run(capsys, *arguments):
    status = main(["replay", *map(str, arguments)])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_healthy_step_has_status_0(folder, capsys):
    status, out, _ = run(
        capsys, folder / "healthy_bfloat16.npz", "--as", "dapo", "--hp", "eps_high=0.28"
    )
    assert status == 0 and "FAIL" not in out
    assert "ok    sampler" in out and "ok    advantages: group_norm" in out
    assert "up_dapo" in out and "tis(dapo)" in out and "heaviest tokens" in out


def test_a_failure_has_status_1_and_a_report_of_a_screen(folder, capsys):
    status, out, _ = run(capsys, folder / "shifted.npz", "--as", "dapo")
    assert status == 1 and "FAIL  sampler: in 2" in out and "stands +1 slots" in out
    assert len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 200


def test_a_missing_column_has_status_2_and_the_setting(capsys):
    status, out, _ = run(capsys, FILES / "miles_7_0.pt", "--as", "dapo")
    assert status == 2 and "not run  advantages" in out
    status, out, _ = run(capsys, FILES / "miles_7_0.pt", "--only", "sampler")
    assert status == 0


def test_a_run_of_steps_is_judged_as_a_whole(folder, capsys):
    status, out, _ = run(capsys, folder / "run", "--only", "sampler")
    assert status == 1 and "FAIL  run" in out and "6 steps, 0 to 5" in out


def test_a_report_names_its_two_estimates_of_the_kl(folder, capsys):
    """They differ on one step where the gap is large."""
    _, out, _ = run(capsys, folder / "run", "--only", "sampler")
    numbers = r"by capped k2 .* at most (\S+) at step 5\n.*KL by k3 (\S+),"
    found = re.search(numbers, out)
    last = np.load(folder / "run" / "step5.npz")
    drawn = np.isfinite(last["sampler"]) & last["mask"]
    log_rho = (last["old"] - last["sampler"])[drawn].astype(float)
    k3 = (np.expm1(log_rho) - log_rho).mean()
    capped_k2 = (log_rho.clip(-1, 1) ** 2).mean() / 2
    assert found and float(found[1]) == pytest.approx(capped_k2, rel=0.06)
    assert float(found[2]) == pytest.approx(k3, rel=0.06)


def test_the_logged_loss_is_compared(folder, capsys):
    file = folder / "healthy_bfloat16.npz"
    status, out, _ = run(
        capsys, file, "--as", "dapo", "--loss", "0.5", "--only", "loss"
    )
    # a note: no sum of the terms is it
    assert status == 0 and "is not the token-mean" in out
    status, _, err = run(capsys, folder / "run", "--as", "dapo", "--loss", "0.5")
    assert status == 2 and "one step" in err


def test_files_of_other_programs_in_the_folder_are_named(folder, capsys, tmp_path):
    (tmp_path / "a.npz").write_bytes((folder / "healthy_bfloat16.npz").read_bytes())
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    status, out, err = run(capsys, tmp_path, "--only", "sampler", "--json")
    assert status == 0 and json.loads(out)["ok"]
    assert err == (
        f"upref: left out, because another program wrote it: {tmp_path / 'model.pt'}\n"
    )


def test_json_has_the_numbers(folder, capsys):
    status, out, _ = run(capsys, folder / "shifted.npz", "--as", "dapo", "--json")
    found = json.loads(out)
    assert (status, found["status"], found["ok"]) == (1, 1, False)
    step = found["steps"][0]
    assert (
        step["sampler"]["cause"] == "shift"
        and step["findings"][0]["numbers"]["shift"] == 1
    )
    assert found["table"]["rows"][0]["name"] == "dapo" and len(found["heaviest"]) == 5


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_sheet_is_written(folder, capsys, tmp_path, suffix):
    sheet = tmp_path / f"sheet{suffix}"
    assert run(capsys, folder / "run", "--as", "dapo", "-o", sheet)[0] == 1
    text = sheet.read_text(encoding="utf-8")
    assert (
        "the two engines" in text
        and "the gap over the steps" in text
        and "</svg>" in text
    )
    words = " ".join(text.split())
    assert ("never received new weights" in words) == (suffix == ".html")
    if suffix == ".html":
        assert "<h1>Failed: " in text and "(Σ|w|)²/Σw²" in text
        assert "users' texts" in html.unescape(text)


def test_the_heading_of_a_sheet_names_what_was_not_checked(folder, capsys, tmp_path):
    b = read(folder / "healthy_bfloat16.npz")
    write(tmp_path / "few.npz", replace(b, adv=None))
    assert run(capsys, tmp_path / "few.npz", "-o", tmp_path / "sheet.html")[0] == 2
    text = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "<h1>Nothing failed; not checked: " in text
    assert text.count("no advantages are recorded") == 2


def test_the_gap_over_the_steps_is_drawn_as_it_is(tmp_path):
    """A gap below what float32 can hold is no constant of the drawing."""
    gaps = [StepGap(step=n, size=n * 1e-14, ref_size=None, lags={}) for n in (1, 2)]
    found = SimpleNamespace(series=SimpleNamespace(steps=gaps), steps=())
    ax = Figure().subplots()
    _draw_over_steps(ax, found)
    assert ax.lines[0].get_ydata().tolist() == [1e-14, 2e-14]
    assert ax.texts[0].get_text() == "rounding: no gap"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.npz"], "there is no file"),
        (["{healthy}", "--as", "dappo"], "no objective named"),
        (["{healthy}", "--as", "dapo", "--hp", "x=1"], "no hyperparameter"),
        (["{healthy}", "--agg", "token-mean"], "--as"),
        (["{healthy}", "--loss", "many", "--as", "dapo"], "not a number"),
        (["{healthy}", "--loss", "0.1"], "--as"),
        (["{healthy}", "--only", "all"], "no check"),
        (["{healthy}", "--against", "dappo"], "no objective named"),
        (["{healthy}", "-o", "sheet.docx"], "sheet"),
        (["{healthy}", "--tokenizer", "nowhere"], "tokenizer"),
    ],
)
def test_bad_input_is_one_sentence(folder, capsys, arguments, words):
    given = [a.format(healthy=folder / "healthy_bfloat16.npz") for a in arguments]
    status, _, err = run(capsys, *given)
    assert status == 2 and words in err and err.count("\n") == 1


def bad_files(folder):
    """Write files that are cut, lack a column, announce 10 GB or hold Python objects;
    return {name: what the sentence says}.
    """
    small = {
        "schema": 1,
        "ids": np.array([[5, 8]]),
        "mask": np.array([[0, 1]]),
        "old": np.array([[0, -0.5]]),
    }
    np.savez(folder / "whole.npz", **small)
    whole = (folder / "whole.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(
        folder / "column.npz",
        **{name: value for name, value in small.items() if name != "mask"},
    )
    np.savez(
        folder / "objects.npz", **small | {"now": np.array([[None, 1]], dtype=object)}
    )
    torch.save({"rollout_id": 1, "samples": [folder]}, folder / "objects.pt")
    header = io.BytesIO()
    shape = (100_000, 12_500)
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": shape}
    )
    with zipfile.ZipFile(folder / "large.npz", "w") as archive:
        archive.writestr("ids.npy", header.getvalue())
    (folder / "large.safetensors").write_bytes(struct.pack("<Q", 10**10) + b"{}")
    return {
        "cut.npz": "damaged or cut off",
        "column.npz": "lacks the column mask",
        "objects.npz": "a pickle that may run code",
        "objects.pt": "a pickle that may run code",
        "large.npz": "announces 9.3 GiB",
        "large.safetensors": "damaged or cut off",
    }


def test_a_bad_file_is_one_sentence(tmp_path, capsys):
    for name, words in bad_files(tmp_path).items():
        status, out, err = run(capsys, tmp_path / name, "--as", "dapo")
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1, (
            name,
            err,
        )
        assert "\x1b" not in err  # a parser's colors


def test_a_missing_column_does_not_hide_the_other_checks(tmp_path, capsys):
    """Find that a logged loss of NaN leaves the check of the loss out, and no other."""
    batch = make_batch(
        FAULTS["healthy_bfloat16"](WORLD),
        file="f",
        step=1,
        logged={"loss": float("nan")},
    )
    write(tmp_path / "nan.npz", batch)
    status, out, _ = run(capsys, tmp_path / "nan.npz", "--as", "dapo")
    assert (
        status == 2
        and "not run  loss: the loss that the run logged is nan" in out
        and "ok    advantages" in out
    )


def test_an_agreement_says_what_it_did_not_exercise(tmp_path, capsys):
    columns = FAULTS["healthy"](WORLD)
    value = loss(make_batch(columns, file="f"), "dapo", 1.0).value
    write(tmp_path / "first.npz", make_batch(columns, file="f", logged={"loss": value}))
    _, out, _ = run(capsys, tmp_path / "first.npz", "--as", "dapo", "--only", "loss")
    assert "ok    loss" in out and "not exercised: eps_low, eps_high" in " ".join(
        out.split()
    )


def test_the_example_of_the_page_is_read(tmp_path, capsys, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/dump.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python\n")[1].split("```")[0], {})
    status, out, _ = run(capsys, "step000012.npz", "--as", "dapo")
    assert status == 0 and "note" not in out
    checks = ("sampler", "advantages", "loss")
    assert all(f"\nok    {check}:" in out for check in checks)


def test_a_finding_of_an_earlier_step_is_printed(tmp_path, capsys):
    """Of eight steps, the third and the fourth have other weights in the engine."""
    for step in range(8):
        fault = "stale_by_four" if step in (3, 4) else "healthy"
        columns = FAULTS[fault](WORLD)
        write(tmp_path / f"s{step}.npz", make_batch(columns, file="f", step=step))
    status, out, _ = run(capsys, tmp_path)
    lines = " ".join(out.split())
    assert status == 0 and "note sampler:" in lines
    assert "At 2 of 8 steps: 3, 4. Its numbers are of step 3." in lines
    assert "ok run" not in lines and "ok advantages" in lines
    # a note of several steps is said once
    columns = FAULTS["stale_by_four"](WORLD)
    write(tmp_path / "s7.npz", make_batch(columns, file="f", step=7))
    lines = " ".join(run(capsys, tmp_path)[1].split())
    assert "At 3 of 8 steps: 3, 4, 7." in lines
    assert lines.count("two normalized policies") == 1


def test_what_an_earlier_step_exercises_is_exercised(tmp_path, capsys):
    columns = FAULTS["healthy"](WORLD)
    moved = columns | {"now": (columns["old"] - 0.6).clamp(max=0)}
    for step, made in enumerate((columns, moved, columns)):
        value = loss(make_batch(made, file="f"), "dapo", 1.0).value
        batch = make_batch(made, file="f", step=step, logged={"loss": value})
        write(tmp_path / f"s{step}.npz", batch)
    said = " ".join(run(capsys, tmp_path, "--as", "dapo", "--only", "loss")[1].split())
    assert "not exercised: eps_high" in said and "eps_low" not in said


def test_without_an_advantage_no_objective_is_compared(folder, tmp_path, capsys):
    """A table of zeros, and a loss of 0 that agrees, say nothing."""
    columns = FAULTS["healthy"](WORLD)
    columns["adv"] = torch.zeros_like(columns["adv"])
    batch = make_batch(columns, file="f", step=4, logged={"loss": 0.0})
    write(tmp_path / "step4.npz", batch)
    status, out, _ = run(capsys, tmp_path / "step4.npz", "--as", "dapo")
    assert status == 0 and "the loss says nothing here" in out
    assert "ok    loss" not in out and "what each would do" not in out


def test_a_check_that_failed_stands_before_the_others(tmp_path, capsys):
    columns = FAULTS["stale_by_four"](WORLD)
    batch = make_batch(columns, file="f", step=4, logged={})
    logged = {"loss": 4 * loss(batch, "dapo", 1.0).value}
    write(tmp_path / "step4.npz", replace(batch, logged=logged))
    status, out, _ = run(capsys, tmp_path / "step4.npz", "--as", "dapo")
    assert status == 1 and out.index("FAIL  loss") < out.index("note  sampler"), out


def test_a_run_names_the_step_whose_files_may_be_of_two_runs(tmp_path, capsys):
    for number, step in enumerate((1, 2, 2)):
        columns = FAULTS["healthy"](replace(WORLD, seed=60 + number))
        batch = make_batch(columns, file="f", step=step)
        write(tmp_path / f"run{number}-step{step}.npz", batch)
    _, out, _ = run(capsys, tmp_path, "--only", "sampler")
    assert "step 2: its 2 files name no rank, and are joined" in out
