# SPDX-License-Identifier: Apache-2.0
"""What each release of a framework changed in its losses.

`python -m docs.upgrades NAME VERSION...` audits these releases, the oldest first, and
records in upgrades.json what the audit of each says otherwise than that of the one
before. docs.make makes the table of docs/upgrading.md from it. It needs a package index.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise
from math import isclose
from operator import itemgetter
from pathlib import Path
from typing import Any

from docs import record
from docs.framework_pages import FOLDER, link
from docs.nightly import key
from upref import markdown
from upref_frameworks import names as frameworks
from upref_frameworks.audits import framework
from upref_frameworks.ledger import read

FILE = Path(__file__).parent / "upgrades.json"


def audit(name: str, version: str) -> dict[str, Any]:
    """Return the audit of a release: the committed one if it is of this release, or
    else what `upref audit --json` prints.

    Args:
        name: the framework. One without a pin is audited as it is installed, so that
            the release is installed in a temporary folder, without what it depends on.
        version: the release.

    Raises:
        ValueError: there is no verdict; the message says why.
        CalledProcessError: pip cannot install the release.
    """
    committed = record.rows(FOLDER / f"{name}.json")
    if committed["version"] == version:
        return committed
    command = [sys.executable, "-m", "upref", "audit", name, "--json"]
    with tempfile.TemporaryDirectory(prefix="upref-") as folder:
        env = dict(os.environ)
        if framework(name).pin:
            command += ["--version", version]
        else:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            where = ["--target", folder, f"{name}=={version}"]
            subprocess.run([*pip, *where], check=True)
            env["PYTHONPATH"] = os.pathsep.join(
                [folder, *env.get("PYTHONPATH", "").split(os.pathsep)]
            )
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, check=False
        )
    if done.returncode == 2:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    said = json.loads(done.stdout)
    assert said["version"] == version, said["version"]
    return said


def says(row: dict[str, Any]) -> str:
    """Return what a row of an audit says, without its numbers: "agrees", the reasons in
    alphabetical order, or its verdict where a difference has no known cause.
    """
    if row["difference"] <= row["tol"]:
        return "agrees"
    if not row["ok"]:
        return row["verdict"]
    return "; ".join(sorted(words for words, _ in row["reasons"]))


def numbers(row: dict[str, Any]) -> list[float]:
    """Return the largest difference of each reason, in the order in which `says` has
    them, then that of the row.
    """
    reasons = sorted(row["reasons"], key=itemgetter(0))
    return [*(spot["difference"] for _, spot in reasons), row["difference"]]


def otherwise(then: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    """Return what the second of two rows says otherwise than the first, "" if nothing.

    Args:
        then: a row of the audit before, or None where that has no such row.
        now: the row of the same comparison in the audit after.
    """
    before, after = (says(row) if row else "not compared" for row in (then, now))
    if before != after:
        return f"{after}; was: {before}"
    if not then or not now or after == "agrees":
        return ""
    if not now["ok"]:
        by = f"by {now['difference']:.4g}, was {then['difference']:.4g}"
        return f"not known: {after} in both, {by}"
    first, second = numbers(then), numbers(now)
    if all(map(_close, first, second)):
        return ""
    return f"{after}: {_listed(second)} in all; was: {_listed(first)} in all"


def _listed(values: list[float]) -> str:
    """Return numbers as words."""
    return ", ".join(f"{value:.7g}" for value in values)


def _close(one: float, other: float) -> bool:
    """Return whether two numbers are the same up to rounding."""
    return isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def row_of_each(
    audit: dict[str, Any], keys: Iterable[tuple[str, str, int]]
) -> dict[tuple[str, str, int], dict[str, Any] | None]:
    """Return the row of each comparison that is named, None where there is none.

    An audit has a row of micro-batches only where these change the gradient: where it
    has none, that of the whole batch counts.

    Args:
        audit: of a release.
        keys: of the comparisons, by `nightly.key`.
    """
    rows = {key(row): row for row in audit["rows"]}
    return {one: rows.get(one, rows.get((*one[:2], 1))) for one in keys}


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return sentences in Markdown on what an audit says otherwise than the one of the
    release before: losses, defaults, and what is compared in both.

    One sentence names all losses of which it holds.
    """
    # a mode is one of the framework's losses
    old_modes, new_modes = then["defaults"].keys(), now["defaults"].keys()
    lines = [f"the loss `{mode}` is gone" for mode in sorted(old_modes - new_modes)]
    lines += [f"the loss `{mode}` is new" for mode in sorted(new_modes - old_modes)]
    defaults: dict[str, list[str]] = {}  # a sentence -> its losses
    for mode in sorted(old_modes & new_modes):
        fields = now["defaults"][mode]
        for field, was in then["defaults"][mode].items():
            if field not in fields:
                said = f"the setting `{field}` is gone"
            elif fields[field] != was:
                said = f"the default of `{field}` is {fields[field]}, was {was}"
            else:
                continue
            defaults.setdefault(said, []).append(mode)
        for field in sorted(fields.keys() - then["defaults"][mode].keys()):
            said = f"the setting `{field}` is new, its default is {fields[field]}"
            defaults.setdefault(said, []).append(mode)
    lines += [f"{said} ({_codes(which)})" for said, which in defaults.items()]
    every = dict.fromkeys(key(row) for row in then["rows"] + now["rows"])
    before, after = row_of_each(then, every), row_of_each(now, every)
    compared: dict[str, list[str]] = {}  # a sentence -> its losses
    for one in every:
        label, promise, micro = one
        said = otherwise(before[one], after[one])
        if not said:
            continue
        split = f"in {micro} micro-batches " if micro > 1 else ""
        what = f"{split}against {promise}: {said}"
        compared.setdefault(what, []).append(label)
    return lines + [f"{_codes(which)} {what}" for what, which in compared.items()]


def _codes(names: Iterable[str]) -> str:
    """Return names as code, each once."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def table() -> str:
    """Return what each audited release changed in its losses, in Markdown."""
    rows = []
    for row in sorted(record.rows(FILE).values(), key=itemgetter("framework")):
        said = "<br>".join(row["changes"]) or "nothing"
        if row["refused"]:
            said = "not known"
        rows.append([link(row["framework"]), row["before"], row["version"], said])
    return markdown.table(["framework", "from", "to", "what changed"], rows)


def repairs() -> str:
    """Return the entries of the ledgers that a newer version has repaired, in
    Markdown."""
    rows = []
    for name in frameworks():
        for entry in read(name):
            if entry.fixed:
                key = f"[{entry.key}](frameworks/{name}.json#{entry.key})"
                rows.append([link(name), entry.version, key, entry.reason, entry.fixed])
    columns = ["framework", "audited", "entry", "what differs there", "repaired in"]
    return markdown.table(columns, rows)


def main() -> None:
    """Audit the releases that the command line names, record what each changed, and
    print that.

    A release that cannot be audited makes "not known" of the change to it and from it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=frameworks(), help="the framework")
    parser.add_argument("versions", nargs="+", help="its releases, the oldest first")
    arguments = parser.parse_args()
    name, versions = arguments.name, arguments.versions
    if len(versions) < 2:
        parser.error("name two releases or more")
    found: dict[str, Any] = {}
    refused = {}
    for version in versions:
        try:
            found[version] = audit(name, version)
        except ValueError as error:
            refused[version] = str(error)
    rows = {}
    for before, version in pairwise(versions):
        why = refused.get(before) or refused.get(version) or ""
        rows[f"{name} {version}"] = {
            "framework": name,
            "before": before,
            "version": version,
            "refused": why,
            "changes": [] if why else changes(found[before], found[version]),
        }
    record.add(FILE, f"python -m docs.upgrades {name} {' '.join(versions)}", rows)
    print(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
