# SPDX-License-Identifier: Apache-2.0
"""The committed runs of verl's trainer show what results/README.md says they show."""

from pathlib import Path

import pytest

import upref
from docs import record

pytest.importorskip(
    "psutil", reason="`repro/venv.sh smoke` installs what watches a trainer"
)
RESULTS = Path(__file__).parents[2] / "repro" / "with_verl" / "results"
RUNS = record.rows(RESULTS / "smoke.json")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_was_whole_and_agreed_with_the_reference(name):
    run = RUNS[name]
    assert (
        run["objective"] == name.split("-")[0]
        and run["wrong"] == []
        and run["steps"] == run["asked"]
    )
    assert 0 < run["parity_of_bound"] <= 1 and 0 < run["parity_max_abs"] < 1e-5
    if name == run["objective"]:
        first, last = sum(run["score"][:3]) / 3, sum(run["score"][-3:]) / 3
        assert run["steps"] >= 20 and last > first + 0.05


def test_every_objective_took_two_steps_or_says_why_not():
    table = record.rows(RESULTS / "every.json")
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


def test_the_broken_run_went_on_each_time():
    runs = record.rows(RESULTS / "faults.json")
    # something came after it
    survived = {row["fault"] for run in runs for row in run[:-1]}
    assert len(survived) == 6
    assert all(run[-1]["status"] == 0 for run in runs)


def test_the_launcher_survived_what_a_run_of_days_meets():
    found = record.rows(RESULTS / "restart.json")
    assert {*found} == {"terminated", "sabotaged", "nodes"} and not any(
        t["wrong"] for t in found.values()
    )
    first, second = found["terminated"]["starts"]
    assert first["status"] == 143 and first["left"] == 0 and "SIGTERM" in first["last"]
    assert second["status"] == 0 and 1 < second["steps"][0] <= first["steps"][-1] + 1
    assert max(found["sabotaged"]["alarms"]) > 0 and found["sabotaged"]["kept"] > 0
    assert "trainer.nnodes=2" in found["nodes"]["starts"][0]["settings"]


def test_the_matrix_of_gpu_settings_ran_as_expected():
    found = record.rows(RESULTS / "matrix.json")
    assert len(found) > 10 and all(row["as_expected"] for row in found.values())
    for row in found.values():
        assert row["wrong"] or 0 < row["gradient_error"] <= row["gradient_bound"]
