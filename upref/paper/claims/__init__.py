# SPDX-License-Identifier: Apache-2.0
"""What fan2026up says, statement by statement, and what became of each: `upref claims`.

claims.toml holds the statements and points at their evidence; evidence.py runs that. No verdict is written by hand:
each piece of evidence finds something, and `judge` makes one word of it. computed.json is what the last run said.

    [[claim]]
    id, place, quote  its name; section and equation; words of the paper's LaTeX that stand there
    says              the statement in our words
    condition         under which it holds: asks for evidence that it does, and for some that without it it does not
    derivations       derivations/NAME.py, which passes: finds a proof
    tests             tests/FILE.py::NAME, which passes: finds what it says, a counterexample, an identity or that the
                      matter is undecided; an identity if it says nothing
    mini              EXPERIMENT/CLAIM of repro/mini, of either round: what its registered rule finds
    exact             EXPERIMENT/first words of a finding of repro/exact, where nothing is sampled
    absent            patterns that the paper's LaTeX does not contain: finds that it is unspecified
"""

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any

from upref.errors import InputError

VERDICTS = (
    "proved",
    "holds numerically",
    "holds under a stated condition",
    "reproduced in miniature",
    "undecided",
    "not reproduced",
    "false as written",
    "unspecified in the paper",
)
RED = "red"
FINDS = (
    "proof",
    "identity",
    "reproduced",
    "counterexample",
    "refuted",
    "undecided",
    "unspecified",
    "failed",
    "not run",
)
KINDS = ("derivations", "tests", "mini", "exact", "absent")


@dataclass(frozen=True)
class Claim:
    id: str
    place: str
    quote: str
    says: str
    condition: str = ""
    derivations: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    mini: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """3.1, 4.2, B: what `place` begins with."""
        return self.place.split(",")[0].removeprefix("Sec. ").removeprefix("App. ")

    @property
    def pointers(self) -> list[tuple[str, str]]:
        """(kind, pointer) of all its evidence."""
        return [(kind, x) for kind in KINDS for x in getattr(self, kind)]

    @property
    def digest(self) -> str:
        """Changes with the record, so that no verdict outlives what it was computed for."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Outcome:
    """What one piece of evidence found: some of FINDS, in words, with the condition that it itself states."""

    kind: str
    pointer: str
    finds: tuple[str, ...]
    text: str = ""
    condition: str = ""


@dataclass(frozen=True)
class Judged:
    claim: Claim
    verdict: str  # one of VERDICTS, or RED
    why: str  # the condition, or why it is red
    outcomes: tuple[Outcome, ...]

    def __bool__(self) -> bool:
        return self.verdict != RED

    def json(self) -> dict[str, Any]:
        facts = asdict(self.claim) | {"section": self.claim.section, "verdict": self.verdict, "why": self.why}
        return facts | {"evidence": [asdict(o) for o in self.outcomes]}


def judge(claim: Claim, outcomes: list[Outcome], last: str = "") -> Judged:
    """One word from what the evidence found. last: the verdict computed before, which stands where some could not run.

    Evidence for and against makes a condition, and asks for one; a condition asks for evidence for and against.
    """
    said = lambda verdict, why="": Judged(claim, verdict, why, tuple(outcomes))
    found = {f for o in outcomes for f in o.finds}
    if failed := [o for o in outcomes if "failed" in o.finds]:
        return said(RED, "; ".join(f"{o.pointer}: {o.text}" for o in failed))
    if not found:
        return said(RED, "no evidence")
    if "not run" in found:
        why = "; ".join(o.text for o in outcomes if "not run" in o.finds)
        return said(last, why) if last in VERDICTS else said(RED, why)
    good, bad = found & {"proof", "identity", "reproduced"}, found & {"counterexample", "refuted"}
    condition = claim.condition or "; ".join(o.condition for o in outcomes if o.condition)
    if good and bad:
        return said(VERDICTS[2], condition) if condition else said(RED, "evidence for and against, and no condition")
    if condition:
        return said(RED, f"a condition, and no evidence {'that it is needed' if good else 'that it is enough'}")
    if "unspecified" in found:
        return said(VERDICTS[7]) if found == {"unspecified"} else said(RED, "said to be unspecified, and tested")
    order = {"counterexample": 6, "refuted": 5, "reproduced": 3, "undecided": 4, "proof": 0, "identity": 1}
    return said(VERDICTS[next(i for f, i in order.items() if f in found)])


def read(text: str | None = None) -> list[Claim]:
    """The claims of claims.toml, or of this text; InputError where a record is not whole."""
    if text is None:
        text = resources.files("upref.paper.claims").joinpath("claims.toml").read_text(encoding="utf-8")
    try:
        records = tomllib.loads(text).get("claim", [])
        listed = {f.name for f in fields(Claim)} & set(KINDS)
        whole: list[dict[str, Any]] = [{k: tuple(v) if k in listed else v for k, v in r.items()} for r in records]
        claims = [Claim(**r) for r in whole]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise InputError(f"the claims cannot be read: {error}") from error
    seen: set[str] = set()
    for c in claims:
        if c.id in seen or not c.place.startswith(("Sec. ", "App. ")) or not c.quote or not c.says:
            raise InputError(f"claim {c.id!r}: an id of its own, a place (Sec. or App.), quote and says are needed.")
        seen.add(c.id)
    return claims


# ---- what the last run said ------------------------------------------------------------------------------------------
def last() -> dict[str, Any]:
    """computed.json: id -> verdict, outcomes, date, commit, and the digest of the record that they are of."""
    file = resources.files("upref.paper.claims").joinpath("computed.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def as_computed(claims: list[Claim] | None = None, computed: dict[str, Any] | None = None) -> list[Judged]:
    """The verdicts of the last run; red where the record has changed since."""
    known = last() if computed is None else computed
    found = []
    for c in read() if claims is None else claims:
        k = known.get(c.id)
        if not k or k["record"] != c.digest:
            found.append(Judged(c, RED, "not computed since its record was written: upref claims --run --save", ()))
            continue
        outcomes = tuple(Outcome(**o | {"finds": tuple(o["finds"])}) for o in k["outcomes"])
        found.append(Judged(c, k["verdict"], k["why"], outcomes))
    return found


def saved(judged: list[Judged], date: str, commit: str) -> dict[str, Any]:
    """Their entries of computed.json."""
    entry = lambda j: {"date": date, "commit": commit, "record": j.claim.digest, "verdict": j.verdict, "why": j.why}
    return {j.claim.id: entry(j) | {"outcomes": [asdict(o) for o in j.outcomes]} for j in judged}
