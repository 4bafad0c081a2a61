# SPDX-License-Identifier: Apache-2.0
"""The third reader's simulator: its policies are as peaked as it says, and what replay
says of its faults and of its healthy runs.
"""

import re
from pathlib import Path

import pytest

from tests.replay.third import (
    FAULTS,
    HEALTHY,
    PEAKED,
    TRUTHS,
    Place,
    cell,
    draw_place,
    effect,
    main,
    plain,
)

PLACE = Place(3, vocabulary=200, prompts=5, longest=60)
TABLE = Path(__file__).parent / "table.txt"
PAGE = Path(__file__).parents[2] / "docs" / "dump.md"
QUICK = ("end_token_minus_one", "shifted", "half_stale", "of_eight_rows")


def test_most_tokens_are_likely_and_lengths_have_a_tail():
    made = plain(PLACE)
    likely = (made["old"][made["mask"]].exp() > 0.9).double().mean()
    lengths = made["mask"].sum(1)
    assert abs(float(likely) - PEAKED) < 0.15
    assert int(lengths.max()) > 1.5 * float(lengths.double().median())


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_is_named(fault):
    graded = cell(fault, PLACE)
    assert graded.right and not graded.false, [str(f) for f in graded.findings]


@pytest.mark.parametrize("run", HEALTHY)
def test_a_healthy_run_does_not_fail(run):
    assert not cell(run, PLACE).alarm


def test_each_fault_has_a_truth_and_most_move_the_column():
    assert set(FAULTS) == set(TRUTHS) and all(TRUTHS[f].words for f in FAULTS)
    assert effect(PLACE, FAULTS["shifted"](PLACE)) and not effect(PLACE, plain(PLACE))


def test_a_place_is_drawn_by_its_seed():
    assert draw_place(4) == draw_place(4) != draw_place(5)


def test_the_page_has_the_shares_of_the_worst_seed():
    table = TABLE.read_text(encoding="utf-8")
    shares = [
        min(map(float, re.findall(rf"^{row} .* ([0-9.]+) %", table, re.MULTILINE)))
        for row in ("all", "beyond rounding")
    ]
    page = PAGE.read_text(encoding="utf-8")
    words = "On each seed at least {} % of all faults are named, and at least {} % of those beyond"
    assert words.format(*shares) in page, shares


@pytest.mark.slow
@pytest.mark.nightly
def test_nineteen_of_twenty_are_named(capsys):
    assert main(["--seed", "21", "--places", "4", "--healthy", "40"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    named, total = map(int, last.split()[1].split("/"))
    assert named >= 0.95 * total, last
