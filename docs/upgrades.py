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
from collections.abc import Iterable, Iterator
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
    env = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="upref-") as folder:
        if framework(name).pin:
            command += ["--version", version]
        else:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
            where = ["--target", folder, f"{name}=={version}"]
            subprocess.run([*pip, *where], check=True)
            others = env.get("PYTHONPATH", "").split(os.pathsep)
            env["PYTHONPATH"] = os.pathsep.join([folder, *others])
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
    before = says(then) if then else "not compared"
    after = says(now) if now else "not compared"
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
    found = {}
    for comparison in keys:
        loss, promise, _ = comparison
        of_whole_batch = rows.get((loss, promise, 1))
        found[comparison] = rows.get(comparison, of_whole_batch)
    return found


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return sentences in Markdown on what an audit says otherwise than the one of the
    release before: losses, defaults, and what is compared in both.

    One sentence names all losses of which it holds.
    """
    # loss -> setting -> its default
    old, new = then["defaults"], now["defaults"]
    lines = [f"the loss `{loss}` is gone" for loss in sorted(old.keys() - new.keys())]
    lines += [f"the loss `{loss}` is new" for loss in sorted(new.keys() - old.keys())]
    defaults: dict[str, list[str]] = {}  # a sentence -> its losses
    for loss in sorted(old.keys() & new.keys()):
        for said in _changed_defaults(old[loss], new[loss]):
            defaults.setdefault(said, []).append(loss)
    lines += [f"{said} ({markdown.codes(losses)})" for said, losses in defaults.items()]
    for said, losses in _changed_verdicts(then, now).items():
        lines.append(f"{markdown.codes(dict.fromkeys(losses))} {said}")
    return lines


def _changed_defaults(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence on each setting of a loss that is gone, has another default or is
    new.

    Args:
        old: setting -> its default, in the release before.
        new: the same in the release after.
    """
    for setting, was in old.items():
        if setting not in new:
            yield f"the setting `{setting}` is gone"
        elif new[setting] != was:
            yield f"the default of `{setting}` is {new[setting]}, was {was}"
    for setting in sorted(new.keys() - old.keys()):
        yield f"the setting `{setting}` is new, its default is {new[setting]}"


def _changed_verdicts(
    then: dict[str, Any], now: dict[str, Any]
) -> dict[str, list[str]]:
    """Return what two audits say otherwise of their comparisons: the end of a sentence
    -> the losses of which it holds, one of them several times where it has several
    comparisons.
    """
    every = dict.fromkeys(key(row) for row in then["rows"] + now["rows"])
    before, after = row_of_each(then, every), row_of_each(now, every)
    losses_of: dict[str, list[str]] = {}
    for comparison in every:
        loss, promise, micro_batches = comparison
        said = otherwise(before[comparison], after[comparison])
        if not said:
            continue
        split = f"in {micro_batches} micro-batches " if micro_batches > 1 else ""
        losses_of.setdefault(f"{split}against {promise}: {said}", []).append(loss)
    return losses_of


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
    audits: dict[str, Any] = {}
    refused: dict[str, str] = {}  # version -> why it has no audit
    for version in versions:
        try:
            audits[version] = audit(name, version)
        except ValueError as error:
            refused[version] = str(error)
    rows = {}
    for before, version in pairwise(versions):
        row = {"framework": name, "before": before, "version": version}
        why = refused.get(before) or refused.get(version)
        if why:
            row |= {"refused": why, "changes": []}
        else:
            said = changes(audits[before], audits[version])
            row |= {"refused": "", "changes": said}
        rows[f"{name} {version}"] = row
    record.add(FILE, f"python -m docs.upgrades {name} {' '.join(versions)}", rows)
    print(json.dumps(rows, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
