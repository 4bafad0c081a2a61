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

from docs.framework_pages import FOLDER
from upref_frameworks.audits import framework, frameworks
from upref_frameworks.audits.isolated.pin import NEWEST


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Sentences: what the second audit says otherwise than the first."""
    out = []
    if then["version"] != now["version"]:
        out.append(f"{then['version']} -> {now['version']}")
    key = lambda r: (r["label"], r["promise"], r["micro_batches"])
    rows = {key(r): verdict(r) for r in then["rows"]}
    for r in now["rows"]:
        if rows.get(key(r)) != verdict(r):
            out.append(
                f"{r['label']} against {r['promise']}: {rows.get(key(r), 'not there')} -> {verdict(r)}"
            )
    out += [f"new loss: {m}" for m in now["unaudited"] if m not in then["unaudited"]]
    return out + now["against_ledger"]


def verdict(r: dict[str, Any]) -> str:
    """Without numbers that differ from machine to machine."""
    return "agrees" if r["difference"] <= r["tol"] else r["verdict"]


def main(names: list[str]) -> int:
    worst = 0
    for name in names or frameworks():
        newest = ["--version", NEWEST] if framework(name).pin else []
        command = [sys.executable, "-m", "upref", "audit", name, "--json", *newest]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 2:
            print(f"{name}: {done.stderr.strip()}")
            worst = 2
            continue
        then = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        said = changes(then, json.loads(done.stdout))
        print(
            "\n".join(f"{name}: {line}" for line in said or ["as it was"]), flush=True
        )
        worst = max(worst, int(bool(said)))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
