# SPDX-License-Identifier: Apache-2.0
"""Which losses of the frameworks are proved to be which objectives, from docs/proved.json,
and what proofs know of torch's operators. `python -m docs.proved NAME...` compares
frameworks anew.
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from docs import record
from upref import markdown
from upref.errors import InputError
from upref.proof.operators import WORDS, operators_of
from upref_frameworks.audits.proofs import OPEN, PROVED, WITH_FAULTS, proofs

RECORD = Path(__file__).with_name("proved.json")
LINE = re.compile(r"^\S+\.py:\d+ ")  # of the code that calls the framework, too
NOT_ALL = "not each recorded difference is part of the formula that was compared"
NOT_READ = "differs; nobody has read why"


@cache
def recorded() -> dict[str, Any]:
    """Return what was found: framework -> version and rows."""
    return dict(sorted(record.rows(RECORD).items()))


def status(row: dict[str, Any]) -> str:
    """Return the status of a row in the words of the page: PROVED, WITH_FAULTS (proved
    with the recorded differences), or OPEN for any other.
    """
    if row["status"] in (PROVED, WITH_FAULTS):
        return str(row["status"])
    return OPEN


def cell(name: str) -> str:
    """Return how many comparisons of a framework are proved, for the table of the field.

    Args:
        name: of the framework.
    """
    if name not in recorded():
        return "not run"
    rows = recorded()[name]["rows"]
    said = [status(row) for row in rows]
    counts = [(said.count(PROVED), ""), (said.count(WITH_FAULTS), " as recorded")]
    words = ", ".join(f"{n}{more}" for n, more in counts if n) or "0"
    version = recorded()[name]["version"]
    return f"[{words}](#proved-for-every-value) of {len(rows)}<br>*{version[:9]}*"


def operators() -> str:
    """Return a row for each kind of operators of torch: what a proof knows of them."""
    rows = []
    for kind, words in WORDS.items():
        public = [name for name in operators_of(kind) if not name.startswith("_")]
        rows.append([words, markdown.codes(public)])
    return markdown.table(["a proof knows", "operators"], rows)


def mutants() -> str:
    """Return what the proofs say of mutants, as tests/support/mutants/proofs.md has it."""
    page = Path(__file__).parents[1] / "tests/support/mutants/proofs.md"
    return page.read_text(encoding="utf-8").partition("\n\n")[2]


def counts() -> str:
    """Return in a sentence how many comparisons have a proof."""
    said = [status(row) for of in recorded().values() for row in of["rows"]]
    return (
        f"  Of {len(said)} comparisons in {len(recorded())} frameworks, {said.count(PROVED)} are proved, "
        f"{said.count(WITH_FAULTS)} are proved with the recorded differences, and {said.count(OPEN)} have no proof."
    )


def losses() -> str:
    """Return the table of the comparisons: the proof, the recorded differences, and
    where they are or why there is no proof.
    """
    rows = []
    for name, found in recorded().items():
        for row in found["rows"]:
            said = status(row)
            faults = "" if said == PROVED else "; ".join(row["faults"])
            cells = [
                f"`{name}:{row['label']}`",
                f"`{row['promise']}`",
                said,
                faults,
                _where_or_why_not(row).replace("|", "\\|"),
            ]
            rows.append(cells)
    heads = ["loss", "promise", "proof", "recorded differences", "where, or why not"]
    return markdown.table(heads, rows)


def _where_or_why_not(row: dict[str, Any]) -> str:
    """Return where a loss that is proved with recorded differences has them; for another
    one the recorded reason why there is no proof, "" where there is a proof.
    """
    said = status(row)
    if said == WITH_FAULTS:
        return str(row["at"])
    reason = LINE.sub("it ", row["reason"])
    if said == OPEN and not reason:
        return NOT_ALL if row["faults"] else NOT_READ
    return reason


def objectives() -> str:
    """Return the table of the objectives that a loss was proved to be, with
    the losses.
    """
    losses_of: dict[str, list[str]] = {}  # objective -> losses, maybe several times
    for name, found in recorded().items():
        for row in found["rows"]:
            if row["status"] == PROVED:
                objective = row["promise"].partition(",")[0]
                losses_of.setdefault(objective, []).append(f"{name}:{row['label']}")
    rows = []
    for objective, proved in sorted(losses_of.items()):
        rows.append([f"`{objective}`", markdown.codes(dict.fromkeys(proved))])
    return markdown.table(["objective", "losses with a proof"], rows)


def main(names: list[str]) -> int:
    """Prove the losses of these frameworks, record what is found and print it; return
    0. One that cannot be proved here is reported and left out.
    """
    for name in names:
        try:
            found = proofs(name)
        except InputError as error:
            print(f"{name}: {error}", flush=True)
            continue
        record.add(RECORD, f"python -m docs.proved {name}", {name: found})
        for row in found["rows"]:
            words = [name, row["setting"], row["label"], "|", row["promise"], "|"]
            print(*words, row["status"], *row["faults"], row["reason"], row["at"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
