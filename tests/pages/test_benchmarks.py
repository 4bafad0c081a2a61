# SPDX-License-Identifier: Apache-2.0
"""The commands whose output is docs/speed.md: they run, and what they compare is one
loss.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import upref.hidden
from benchmarks import check, conformance, speed, tests as seconds
from benchmarks.gpu import keep, limits, place
from docs import gpu, record
from tests import conftest

ROOT = Path(__file__).parents[2]

NEED = "`repro/venv.sh verl trl` installs what it is compared with"


def test_the_start_of_the_command_is_measured():
    """It asked for a module that is not there, so that the whole benchmark ended
    without its last table.
    """
    assert 0 < check.starting() < 60


@pytest.mark.verl
@pytest.mark.trl
@pytest.mark.parametrize(
    "pair", speed.PAIRS, ids=lambda pair: "-".join(part for part in pair[:3] if part)
)
def test_all_that_stand_in_one_row_have_one_gradient(pair):
    """The losses whose times a row of the benchmark compares have upref's gradient."""
    pytest.importorskip("verl", reason=NEED)
    pytest.importorskip("trl", reason=NEED)
    lp, *rest = speed.batch(6, 16)
    lp = lp.detach().double().requires_grad_()
    rest = [x.double() if x.is_floating_point() else x for x in rest]
    found = {}
    for who, loss in speed.losses(pair, rest[-1]).items():
        (found[who],) = torch.autograd.grad(loss(lp, *rest), lp)
    for who, gradient in found.items():
        torch.testing.assert_close(
            gradient,
            found["upref"],
            rtol=1e-5,
            atol=1e-9,
            msg=lambda s, who=who: f"{who}: {s}",
        )


@pytest.mark.nightly
def test_a_run_of_the_suite_is_recorded_with_what_is_otherwise_than_listed(
    tmp_path, monkeypatch
):
    """The loop of the page passes; with half of the temperature a case is otherwise."""
    pytest.importorskip("transformers", reason="it makes the suite's models")
    page = conformance.PAGE.read_text(encoding="utf-8")
    source = re.search(r"```python\n(# adapter\.py\n.*?)```", page, re.S)[1]
    wrong = source.replace("/ temperature", "/ (temperature / 2)")
    assert wrong != source
    (tmp_path / "right.py").write_text(source)
    (tmp_path / "wrong.py").write_text(wrong)
    found = {
        name: conformance.run_suite(
            "plain", f"{tmp_path}/{name}.py:Plain", 0, 1, "temperature and 1.5"
        )
        for name in ("right", "wrong")
    }
    assert found["right"]["counts"] == {"passed": 1}
    assert found["right"]["unexpected"] == []
    assert max(found["right"]["errors"].values()) < 2e-5
    assert found["wrong"]["unexpected"] == ["temperature/1.5"]
    file = tmp_path / "runs.json"
    for kind in ("right", "wrong"):
        conformance.keep(f"green/{kind}", found[kind], file)
    kept = record.rows(file)
    assert list(kept) == ["green/right", "green/wrong"]
    assert kept["green/wrong"]["counts"] == {"failed": 1}


def test_the_rows_of_a_gpu_run_name_no_folder_of_the_machine(tmp_path):
    rows = tmp_path / "rows.jsonl"
    said = f"{ROOT}/repro/run.sh, {torch.__file__}, {sys.executable} in {ROOT}"
    place.PartSetup("cpu", True, rows, tmp_path).write(out=said)
    text = rows.read_text(encoding="utf-8")
    assert str(ROOT) not in text and sys.prefix not in text, text
    assert (
        "repro/run.sh, SITE_PACKAGES/torch/__init__.py" in text and "CHECKOUT" in text
    )
    kept = keep.RESULTS.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.\-/])/(work|opt|home|root|tmp)/", kept)


# each benchmark at its smallest: what follows its name, and the exit statuses that a
# busy machine may have
COMMANDS: dict[str, tuple[str, set[int]]] = {
    "check": ("", {0, 1}),  # 1: slower than a limit
    "gpu": ("--out {folder} --trial kernels-11 steps-7", {0}),
    "hidden": ("--quick accuracy memory", {0}),
    "conformance": ("plain --out {folder}/runs.json", {0}),
    "step": ("--only padding_filled rounded_down", {0, 1}),  # 1: slower than a limit
    "proof": ("dapo", {0}),
    "replay": ("", {0}),
    "startup": ("--rounds 1 list", {0}),
    "speed": ("--rows 4 --tokens 64 --rounds 1", {0}),
    "tests": ("tests/core/test_kl.py", {0}),
    "verdicts": ("dump {folder}/verdicts.json estimators", {0}),
}


def test_every_benchmark_has_a_command_that_is_run():
    started = {
        p.stem
        for p in (ROOT / "benchmarks").glob("*.py")
        if "__main__" in p.read_text(encoding="utf-8")
    }
    folders = {p.parent.name for p in (ROOT / "benchmarks").glob("*/__main__.py")}
    assert started | folders == {*COMMANDS}


def test_a_row_of_a_new_gpu_run_takes_the_place_of_its_name():
    """Add three runs, and find of each objective the row of its last run."""

    def run(seconds, objective):
        row = {"objective": objective, "seconds": seconds}
        return {"date": "2026-11-26", "parts": {}, "rows": {"losses-0": [row]}}

    first = keep.added([], run(1.0, "dapo"), "a")
    both = keep.added(first, run(2.0, "grpo"), "b")
    again = keep.added(both, run(3.0, "dapo"), "c")
    assert [one.commit for one in again] == ["a", "b", "c"]
    found = [
        (r["objective"], r["seconds"], r["of"])
        for one in again
        for r in one.rows.values()
        if "objective" in r
    ]
    assert found == [("grpo", 2.0, 1), ("dapo", 3.0, 2)]


def test_a_gpu_row_that_lacks_a_package_takes_no_place():
    def run(**more):
        row = {"who": "verl", "N": 512} | more
        return {"date": "2026-11-26", "parts": {}, "rows": {"sizes": [row]}}

    def sizes(records):
        rows = [row for one in records for row in one.rows.values()]
        return [row for row in rows if row["kind"] == "sizes"]

    first = keep.added([], run(milliseconds=8.6), "a")
    lacks = keep.added(first, run(failed="ModuleNotFoundError: ray"), "b")
    assert [r["milliseconds"] for r in sizes(lacks)] == [8.6]
    broken = keep.added(first, run(failed="RuntimeError: no kernel"), "b")
    assert [r["failed"] for r in sizes(broken)] == ["RuntimeError: no kernel"]


def test_the_tests_that_took_longest_begin(tmp_path, monkeypatch):
    """Record three durations, and find that the slow tests come first, the slowest at
    the head.
    """
    monkeypatch.setattr(seconds, "RECORD", tmp_path / "seconds.tsv")
    seconds.record([(seconds.SLOW, "x::slow"), (9.0, "x::slower"), (0.1, "x::fast")])
    assert seconds.RECORD.read_text() == f"9.0\tx::slower\n{seconds.SLOW}\tx::slow\n"
    monkeypatch.setattr(conftest, "RECORD", seconds.RECORD)
    given = [
        SimpleNamespace(nodeid=f"x::{name}") for name in ("a", "slow", "b", "slower")
    ]
    ordered = [
        item.nodeid.removeprefix("x::") for item in conftest.longest_first(given)
    ]
    assert ordered == ["slower", "slow", "a", "b"]


def test_what_is_recorded_as_slow_is_there():
    lines = conftest.RECORD.read_text(encoding="utf-8").splitlines()
    files = {line.partition("\t")[2].partition("::")[0] for line in lines}
    assert len(lines) > 50 and all((ROOT / file).is_file() for file in files)


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_to_its_end(name, tmp_path):
    arguments, statuses = COMMANDS[name]
    words = [
        sys.executable,
        "-m",
        f"benchmarks.{name}",
        *arguments.format(folder=tmp_path).split(),
    ]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode in statuses and "Traceback" not in done.stderr, (
        done.stdout + done.stderr
    )


def test_a_part_of_the_suite_keeps_the_rows_of_the_rest(tmp_path, monkeypatch):
    """A row goes where its test is faster now, and where its file is gone."""
    (tmp_path / "tests").mkdir()
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / "tests" / name).touch()
    record = tmp_path / "tests/seconds.tsv"
    record.write_text(
        "9.0\ttests/test_a.py::slow\n8.0\ttests/test_a.py::faster\n"
        "7.0\ttests/gone.py::test\n3.0\ttests/test_b.py::other\n"
    )
    monkeypatch.setattr(seconds, "RECORD", record)
    seconds.record([(5.0, "tests/test_a.py::slow"), (0.1, "tests/test_a.py::faster")])
    assert record.read_text() == (
        "5.0\ttests/test_a.py::slow\n3.0\ttests/test_b.py::other\n"
    )


def gpu_rows(kind):
    return [row for row in record.rows(keep.RESULTS).values() if row["kind"] == kind]


def test_the_page_says_that_no_token_of_the_recorded_steps_was_clipped():
    """And that parity saw r = 1 alone: the logged value changes in steps 1 and 5."""
    steps = [step for row in gpu_rows("training") for step in row.get("steps", [])]
    assert len(steps) == 12
    ratios, parity = [], {}
    for step in steps:
        data = {k.removeprefix("actor/upref/"): v for k, v in step["data"].items()}
        assert data["clip/pos_high"] == data["clip/neg_low"] == data["above_high"] == 0
        ratios += [data["ratio/min"], data["ratio/max"]]
        parity.setdefault(data["parity_of_bound"], []).append(step["step"])
        if step["step"] in (1, 5):
            assert data["ratio/min"] == data["ratio/max"] == 1
    assert [min(same) for same in parity.values()] == [1, 5]
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert f"every ratio lies in [{min(ratios):.3f}, {max(ratios):.3f}]" in page
    assert "Parity was compared in steps 1 and 5 alone" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "with random weights and no clipped token; verl with vLLM started" in readme


def test_the_pages_say_that_verl_logged_no_step_on_a_gpu():
    assert all(row["steps"] == [] for row in gpu_rows("verl"))
    for page, said in (
        ("README.md", "verl with vLLM started there and logged no step"),
        ("docs/gpu.md", "It started, and did not log a step."),
        ("docs/verl.md", "has not taken a step on a GPU"),
        ("repro/with_verl/PAPER.md", "started on one and logged no step"),
    ):
        assert said in (ROOT / page).read_text(encoding="utf-8"), page


def test_what_is_asked_of_a_gpu_fits_into_its_minutes():
    lines = gpu.asks().splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(cells) > 2
    for minutes, _, needed in cells:
        assert 30 * int(minutes) < int(needed) < 60 * int(minutes)


def test_no_page_says_that_one_run_had_all_parts():
    """Find that no recorded run ended well in all parts, and that the page says so."""
    runs = gpu_rows("run")
    names = {name for run in runs for name in run["parts"]}
    kinds = {name.partition("-")[0] for name in names}
    for run in runs:
        ended_well = {
            n.partition("-")[0] for n, p in run["parts"].items() if p["status"] == 0
        }
        assert ended_well != kinds
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    source = (ROOT / "benchmarks/gpu/__main__.py").read_text(encoding="utf-8")
    assert "nine minutes" not in page + source
    assert "No recorded run had all parts in one call" in page


def test_the_time_of_the_head_in_bfloat16_is_that_of_the_rows():
    """Compute the page's range of times over verl's from the recorded rows."""
    times = {
        (row["who"], row["H"], row["N"]): row["milliseconds"]
        for row in gpu_rows("sizes")
        if row.get("dtype") == "bfloat16" and "milliseconds" in row
    }
    verls = {at[1:]: ms for at, ms in times.items() if at[0].startswith("verl Fused")}
    of_verls = [times["upref.hidden", *at] / ms for at, ms in verls.items()]
    said = (
        f"it takes {min(of_verls):.1f} to {max(of_verls):.1f} times the time of verl's"
    )
    assert said in (ROOT / "docs/verl.md").read_text(encoding="utf-8")


# ---- what upref.hidden asks of a GPU -------------------------------------------------
def test_the_products_and_passes_of_hidden_are_counted_on_its_path_for_a_gpu():
    H, N, V = 64, 32, 4096
    work = limits.count(H, N, limits._Head(0.8, 1.0, None, N * V), words=V)
    # x twice; dh and dW from two parts of the gradient each
    assert work.flop == 6 * 2 * N * V * H
    # at least 16 passes of 4 bytes; and each is counted once
    assert 64 < work.passes / (N * V) < 400
    assert not upref.hidden._multiplies_bfloat16(torch.ones(1, 1), torch.ones(1, 1))


def test_the_limit_of_a_head_is_the_longer_of_products_and_memory():
    """By hand, for one token: W is read and its gradient written, 2 bytes a number."""
    W = limits.V * 4096
    for_one = limits.least_milliseconds("bfloat16", 4096, 1)
    assert for_one == pytest.approx(1e3 * 4 * (W + 4096) / 3.35e12)
    for_many = limits.least_milliseconds("float32", 4096, 4096)
    assert for_many == pytest.approx(1e3 * 6 * 4096 * W / 67e12)


def test_no_recorded_head_is_faster_than_the_card():
    for row in gpu_rows("sizes"):
        if "milliseconds" in row:
            least = limits.least_milliseconds(row["dtype"], row["H"], row["N"])
            assert row["milliseconds"] > least, row["who"]


def test_narrow_tiles_pass_over_the_gradient_of_the_states_more_often():
    sizes = {"hidden_size": 256, "tokens": 128, "words": 4096}
    narrow, wide = (
        limits.count(head=limits._Head(0.8, 1.0, None, 128 * w), **sizes)
        for w in (32, 256)
    )
    assert narrow.flop == wide.flop
    more = (narrow.passes - wide.passes) / (4096 / 32 - 4096 / 256)
    assert more > 2 * 8 * 256 * 128  # a tile reads and writes dh twice, in float32


def test_kernels_pass_less_often_and_kept_logits_save_a_product():
    sizes = {"hidden_size": 64, "tokens": 512, "words": 8192}
    plain, triton, kept = (
        limits.count(head=limits.WAYS[f"upref.hidden{way}"], **sizes)
        for way in (", chunk 2^26", ", Triton", ", Triton, logits kept")
    )
    assert triton.flop == plain.flop == 6 / 5 * kept.flop
    assert triton.passes < plain.passes / 3
    # a tile is read twice, and its gradient written in two parts of two bytes
    assert kept.passes == triton.passes > (4 + 4 + 2 * 2) * 512 * 8192


def test_a_view_and_an_expanded_tensor_are_not_read_as_if_they_were_whole():
    work = limits.Work()
    x = torch.empty(8, 4, device="meta")
    with limits._Counter(work):
        x.T[:2]
        x.add_(torch.empty(1, 1, device="meta").expand(8, 4))
    assert work.passes == 2 * x.nbytes + 4
