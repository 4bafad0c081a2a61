# SPDX-License-Identifier: Apache-2.0
"""The gallery's pictures are those of its entries, and replay names each as the page
says.
"""

import pytest

from docs import gallery, record as records
from tests.replay.simulator import FAULTS, HELD_OUT
from tests.support.daily import daily

FAULTS_DRAWN = [entry.fault for entry in gallery.entries()]
PAGE = gallery.HERE / "howto" / "find-your-picture.md"


def record():
    return records.rows(gallery.RECORD)


def test_each_entry_is_a_fault_with_a_picture_on_the_page():
    page = PAGE.read_text(encoding="utf-8")
    files = sorted(file.name for file in gallery.PICTURES.iterdir())
    assert files == sorted(entry.file for entry in gallery.entries())
    assert (
        set(FAULTS_DRAWN) == set(record()) <= {*FAULTS, *HELD_OUT, gallery.OVER_STEPS}
    )
    for entry in gallery.entries():
        # in the plate and in its section
        assert page.count(f"](pictures/{entry.file})") == 2
        assert f"](#{gallery.anchor(entry.title)})" in page


def test_titles_are_told_apart():
    titles = [gallery.anchor(entry.title) for entry in gallery.entries()]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("fault", daily(FAULTS_DRAWN, every=5))
def test_replay_names_what_the_page_shows(fault):
    if fault == gallery.OVER_STEPS:
        found = gallery.finding_of_run(gallery.runs()["never"])
    else:
        found = gallery.finding_of_step(gallery.columns(fault))
    kept = record()[fault]
    assert (found["severity"], found["cause"]) == (kept["severity"], kept["cause"])


def test_a_scatter_shows_the_tokens_that_train():
    held = gallery.columns("tool_output_nan")
    figure = gallery.scatter("title", held)
    (ax,) = figure.axes
    (points,) = ax.collections
    drawn = held["mask"] & held["sampler"].isfinite()
    assert len(points.get_offsets()) == min(int(drawn.sum()), gallery.POINTS)


def test_the_command_draws_each_entry_and_records_what_replay_says(
    tmp_path, monkeypatch
):
    few = [entry for entry in gallery.entries() if entry.fault == "divided"]
    monkeypatch.setattr(gallery, "entries", lambda: few)
    gallery.main(tmp_path / "pictures", tmp_path / "gallery.json")
    drawn = (tmp_path / "pictures" / "divided.svg").read_text(encoding="utf-8")
    assert drawn.startswith("<?xml") and "<image" in drawn
    assert records.rows(tmp_path / "gallery.json")["divided"]["cause"] == "factor"
