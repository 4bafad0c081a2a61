# SPDX-License-Identifier: Apache-2.0
"""The table of docs/thirteen-trainers.md, from thirteen_trainers.json, which `python -m
tests.trainers FOLDER --record` writes, and from what was read, thirteen_trainers.toml.

A case is the training loop of a repository, compared with an objective; glue is the code
that was written to run it. Each of its verdicts is of another draw of rows: it agrees, with
an error, or differs, with causes, or was refused.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from docs import record
from upref import markdown

VERDICTS = Path(__file__).with_suffix(".json")
READ = Path(__file__).with_suffix(".toml")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")


def cases() -> list[dict[str, Any]]:
    """Return what was measured of each loop, one table a loop."""
    return list(record.rows(VERDICTS))


def readings() -> list[dict[str, Any]]:
    """Return what was read in each repository, one table a repository."""
    tables = tomllib.loads(READ.read_text(encoding="utf-8"))
    trainers: list[dict[str, Any]] = tables["trainer"]
    return trainers


def verdict(case: dict[str, Any]) -> str:
    """Return the verdict of a case over its draws of rows, in words: it agrees if it
    does on every draw, else the causes that were found.
    """
    each = case["verdicts"]
    if all(draw.get("agrees") for draw in each):
        return f"agrees, {max(draw['error'] for draw in each):.1e} at most"
    causes: dict[str, str] = {}  # without its numbers -> the cause
    # on other rows a cause may have other numbers: those of the first draw are shown
    for draw in reversed(each):
        cause = draw["causes"][0]
        causes[NUMBER.sub("#", cause)] = cause
    return f"differs: {'; or: '.join(causes.values())}"


def thirteen_trainers() -> str:
    """Return the table of the repositories: their loops, the verdicts, and what
    differs.
    """
    rows = []
    for reading in readings():
        repository = reading["repository"]
        loops = [case for case in cases() if case["repository"] == repository]
        home = f"https://github.com/{repository}"
        commit = loops[0]["commit"]
        verdicts = [
            f"{loop['variant']}, as {loop['objective']}: **{verdict(loop)}**"
            for loop in loops
        ]
        differs = [reading["differs"]] if reading["differs"] else []
        for file, line, text in reading["quotes"]:
            link = f"{home}/blob/{commit}/{file}#L{line}"
            differs.append(f"[{Path(file).name}:{line}]({link}) `{text}`")
        cells = (
            f"[{repository}]({home}/tree/{commit}) {commit[:7]}",
            f"{loops[0]['glue']} lines",
            "<br>".join(verdicts),
            "<br>".join(differs) or "-",
            reading["says"] or "-",
        )
        rows.append(cells)
    columns = ["repository", "glue", "loop, objective: verdict", "what differs"]
    return markdown.table([*columns, "it says"], rows)


def thirteen_counts() -> str:
    """Return in a sentence how many verdicts there are, and how many of which kind."""
    each = [draw for case in cases() for draw in case["verdicts"]]
    agree = sum(bool(draw.get("agrees")) for draw in each)
    refused = sum("refused" in draw for draw in each)
    first_causes = [draw["causes"][0] for draw in each if draw.get("causes")]
    named = sum(not cause.startswith("no known cause") for cause in first_causes)
    repositories = len({case["repository"] for case in cases()})
    return (
        f"{len(each)} checks of {len(cases())} loops from {repositories} repositories, "
        f"each on {len(cases()[0]['verdicts'])} draws of rows: {agree} agree, "
        f"{len(each) - agree - refused} differ, {refused} could not run. "
        f"A cause is named in {named}."
    )
