# SPDX-License-Identifier: Apache-2.0
"""The committed runs of verl's trainer show what results/README.md says they show."""

import json
from pathlib import Path

import pytest

import upref

pytest.importorskip(
    "psutil", reason="`repro/venv.sh smoke` installs what watches a trainer"
)
RESULTS = Path(__file__).parents[2] / "repro" / "with_verl" / "results"
OTHERS = ("every", "faults", "restart", "matrix")
RUNS = sorted(p for p in RESULTS.glob("*.json") if p.stem not in OTHERS)


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_a_run_was_whole_and_agreed_with_the_reference(path):
    run = json.loads(path.read_text())
    assert (
        run["objective"] == path.stem.split("-")[0]
        and run["wrong"] == []
        and run["steps"] == run["asked"]
    )
    assert 0 < run["parity_of_bound"] <= 1 and 0 < run["parity_max_abs"] < 1e-5
    if path.stem == run["objective"]:
        first, last = sum(run["score"][:3]) / 3, sum(run["score"][-3:]) / 3
        assert run["steps"] >= 20 and last > first + 0.05


def test_every_objective_took_two_steps_or_says_why_not():
    table = json.loads((RESULTS / "every.json").read_text())
    assert {*table} == {*upref.names()}
    ran = {name: row for name, row in table.items() if "not run" not in row}
    assert table.keys() - ran.keys() == {"aspo_code", "tpo"}
    for row in ran.values():
        assert (
            row["steps"] == 2
            and row["wrong"] == []
            and min(row["grad_norm"]) > 0
            and max(row["parity_of_bound"]) <= 1
        )


@pytest.mark.skipif(not (RESULTS / "faults.json").exists(), reason="not run yet")
def test_the_broken_run_went_on_each_time():
    from repro.with_verl.trials import faults

    runs = json.loads((RESULTS / "faults.json").read_text())
    assert all(faults.judge(run) == [] for run in runs)
    # something came after it, and was judged
    survived = {row["fault"] for run in runs for row in run[:-1]}
    assert survived == {*faults.FAULTS}


def test_the_launcher_survived_what_a_run_of_days_meets():
    found = json.loads((RESULTS / "restart.json").read_text())
    assert {*found} == {"terminated", "sabotaged", "nodes"} and not any(
        t["wrong"] for t in found.values()
    )
    first, second = found["terminated"]["starts"]
    assert first["status"] == 143 and first["left"] == 0 and "SIGTERM" in first["last"]
    assert second["status"] == 0 and 1 < second["steps"][0] <= first["steps"][-1] + 1
    assert max(found["sabotaged"]["alarms"]) > 0 and found["sabotaged"]["kept"] > 0
    assert "trainer.nnodes=2" in found["nodes"]["starts"][0]["settings"]


def test_the_matrix_of_gpu_settings_ran_as_expected():
    from repro.with_verl.trials import matrix

    found = json.loads((RESULTS / "matrix.json").read_text())
    assert (RESULTS / "matrix.md").read_text() == matrix.table(found)
    for name, (objective, _, settings, _, must_fail) in matrix.ROWS.items():
        row = found[name]
        assert row["objective"] == objective and set(settings) <= set(row["settings"])
        assert row["as_expected"] and bool(row["wrong"]) == bool(must_fail)
        assert must_fail or (
            row["steps"] == matrix.STEPS and 0 < row["parity_of_bound"] <= 1
        )
        assert must_fail or 0 < row["gradient_error"] <= row["gradient_bound"]
