# SPDX-License-Identifier: Apache-2.0
"""Every framework at its newest version against what was committed.

`python -m docs.nightly [NAME...]` prints what changed, a line each, and needs a
network. Exit status 1 where something did change, 2 where one could not be audited.
verl and TRL are audited as they are installed.
"""

import json
import subprocess
import sys
from typing import Any

from docs import record
from docs.framework_pages import FOLDER
from upref_frameworks import names as frameworks
from upref_frameworks.audits import framework
from upref_frameworks.audits.isolated.pin import NEWEST


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return sentences on what the second audit finds otherwise than the first: the
    version, rows that changed or are new, new losses, and what differs from the ledger.
    """
    out = []
    if then["version"] != now["version"]:
        out.append(f"{then['version']} -> {now['version']}")
    before = {key(row): verdict(row) for row in then["rows"]}
    for row in now["rows"]:
        old, new = before.get(key(row), "not there"), verdict(row)
        if old != new:
            out.append(f"{row['label']} against {row['promise']}: {old} -> {new}")
    out += [f"new loss: {m}" for m in now["unaudited"] if m not in then["unaudited"]]
    return out + now["against_ledger"]


def key(row: dict[str, Any]) -> tuple[str, str, int]:
    """Return what a row of an audit is of: loss, promise, and number of
    micro-batches.
    """
    return row["label"], row["promise"], row["micro_batches"]


def verdict(row: dict[str, Any]) -> str:
    """Return the verdict of a row; "agrees" within its tolerance, without the
    difference, which varies from machine to machine.
    """
    return "agrees" if row["difference"] <= row["tol"] else row["verdict"]


def main(names: list[str]) -> int:
    """Audit the frameworks, all if none is named, and print what changed.

    Returns:
        2 where one cannot be audited, else 1 where one has changed, else 0.
    """
    worst = 0
    for name in names or frameworks():
        newest = ["--version", NEWEST] if framework(name).pin else []
        command = [sys.executable, "-m", "upref", "audit", name, "--json", *newest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            print(f"{name}: {done.stderr.strip()}")
            worst = 2
            continue
        then = record.rows(FOLDER / f"{name}.json")
        lines = changes(then, json.loads(done.stdout))
        for line in lines or ["as it was"]:
            print(f"{name}: {line}", flush=True)
        worst = max(worst, int(bool(lines)))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
