# SPDX-License-Identifier: Apache-2.0
"""What each release of a framework changed in its losses: the tables of docs/upgrading.md,
from upgrades.json, which docs/upgrades.py of commit 3fd30ed9 made, and from the ledgers.
"""

from operator import itemgetter
from pathlib import Path

from docs import record
from docs.framework_pages import link
from upref import markdown
from upref_frameworks import names as frameworks
from upref_frameworks.ledger import read

FILE = Path(__file__).parent / "upgrades.json"


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
