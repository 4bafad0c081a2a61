# SPDX-License-Identifier: Apache-2.0
"""The drafts of pull requests: their counts are those of the recorded results, and
their lists are the tested ones.
"""

import json
import re
from pathlib import Path

import pytest

from upref.conformance import cases
from upref.conformance.results import read_badge, read_expected_failures

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[1] / "upstream"
FRAMEWORKS = ("trl", "verl", "openrlhf")


def say_counts(results, listed):
    """Return the sentence on the counts of a results file."""
    ends = [one["status"] for one in results["cases"].values()]
    tried = [one for one in ends if one != "skipped"]
    skipped = len(ends) - len(tried)
    return f"Of {len(tried)} cases {tried.count('passed')} agree, {listed} are listed, and {skipped} are skipped."


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_draft_says_what_was_recorded(name):
    """The draft of a pull request has the recorded counts, and the failures are those
    that are listed as expected.
    """
    results = json.loads((UPSTREAM / name / "results.json").read_text(encoding="utf-8"))
    expected = read_expected_failures(HERE / f"{name}_xfails.toml")
    listed = expected.keys() & results["cases"].keys()  # the suite has grown since
    text = re.sub(
        r"\s+", " ", (UPSTREAM / name / "PULL_REQUEST.md").read_text(encoding="utf-8")
    )
    assert [*results["cases"]] == [case.id for case in cases(suite="2026.11")]
    assert {
        case
        for case, one in results["cases"].items()
        if one["status"] in ("failed", "could not run")
    } == listed
    assert (
        say_counts(results, len(listed)).replace("1 are listed", "1 is listed") in text
    )
    assert "not on PyPI yet" in text
    assert str(read_badge(UPSTREAM / name / "results.json")).startswith(
        "upref 2026.11, level 3, "
    )


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_workflow_is_yaml_and_says_that_it_cannot_run_yet(name):
    yaml = pytest.importorskip("yaml")
    text = (UPSTREAM / name / "upref.yml").read_text(encoding="utf-8")
    assert "upref-rl is not on PyPI yet" in text
    assert set(yaml.safe_load(text)["jobs"]) == {"upref"}
