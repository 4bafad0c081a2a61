# SPDX-License-Identifier: Apache-2.0
"""The command that injects faults: what it recorded, a few of its faults again, and
that it can fail.
"""

import json
import time

import pytest

from benchmarks import reliability

RECORD = json.loads(reliability.RECORD.read_text(encoding="utf-8"))
ROWS = [row for group in RECORD.values() for row in group["rows"]]


def test_nothing_was_lost_in_any_recorded_fault():
    assert all(
        lost.split(":")[0] == "nothing" and times > 0
        for _, _, times, _, _, lost in ROWS
    )
    kills = {
        name: sum(row[2] for row in RECORD[name]["rows"] if row[1] == "kill -9")
        for name in RECORD
    }
    assert sum(kills.values()) >= 50 and all(
        kills[k] for k in ("mini", "suite", "exact", "audit", "venv", "site")
    )
    ends = {row[4] for row in RECORD["interrupt"]["rows"] if row[1] != "kill -9"}
    assert ends <= {
        "130",
        "143",
        "130 or 143",
    }
    assert RECORD["threads"]["rows"][0][2] >= 1000


def test_the_record_is_of_the_command_of_today():
    """Commands were renamed in it, and rows taken out, by hand."""
    assert list(RECORD) == list(reliability.GROUPS)
    of = lambda group, fault: {
        who for who, what, *_ in RECORD[group]["rows"] if what == fault
    }
    assert of("disk", "a full disk (tmpfs)") == set(reliability.WRITES)
    typed = {
        line.removeprefix("-m ").replace("{}/", "").removesuffix(" {}")
        for line in reliability.INTERRUPTED
    }
    # what `python -m paper claims --run` was called on the day of the record
    before = {"upref claims --run"}
    assert of("interrupt", "Ctrl-C or SIGTERM") <= typed | before | {
        "repro/venv.sh docs"
    }
    assert of("venv", reliability.THEN_OFFLINE)


def test_checks_in_eight_threads_are_right(tmp_path):
    assert list(reliability.threads(tmp_path, 40))


def test_a_command_that_goes_on_from_half_a_file_is_found(tmp_path):
    """It appends to what is there: killed in between, it ends with too much."""
    out = tmp_path / "out"

    def work() -> None:
        out.mkdir(exist_ok=True)
        for i in range(20):
            with (out / "log").open("a") as f:
                f.write(f"{i}\n")
            time.sleep(0.01)

    with pytest.raises(AssertionError, match="another result"):
        reliability.killed(
            work,
            out,
            lambda: len((out / "log").read_text().splitlines()) == 20,
            20,
            0.3,
        )
