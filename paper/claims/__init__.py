# SPDX-License-Identifier: Apache-2.0
"""What fan2026up says, statement by statement, and what became of each:
`python -m paper claims`.

claims.toml holds the statements and points at their evidence; evidence.py runs that. No
verdict is written by hand: each piece of evidence finds something, and `judge` makes
one word of it, of words.py. computed.json is what the last run said.

    [[claim]]         a statement of the paper;  [[question]]  one of ours, with no quote
    id, place, quote  its name; section and equation; words of the paper's LaTeX that
    stand there, in print
    says              the reading of the quote that is tested
    condition         under which it holds: asks for evidence that it does, and for some that without it it does not
    note              what a reader must know before believing the verdict
    second            what a second reader, who did not write the record, finds of a verdict against a statement, or of
                      one that was too strong or too weak
    elsewhere         "SOURCE: words": what others wrote or measured; [source.SOURCE] has name, url and quote
    derivations       derivations/NAME.py, which passes: finds a proof
    tests             tests/FILE.py::NAME, which passes: finds what it says, a counterexample, an identity or that the
                      matter is undecided; an identity if it says nothing
    mini              EXPERIMENT/CLAIM of repro/mini, of either round, on stale data or on UP's controls
                      (repro/mini/experiment/standing.py names those): what its registered rule finds. `deciding` says which
                      of them decides
    exact             EXPERIMENT/first words of a finding of repro/exact, where nothing is sampled
    absent            patterns that the paper's printed text does not contain: finds that it is unspecified

    [exceptions]      EXPERIMENT/CLAIM = why no record points at this registered claim
"""

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from docs import record
from paper.claims import words
from paper.claims.words import VERDICTS
from upref.errors import InputError

COMPUTED = Path(__file__).parent / "computed.json"

RED = "red"
FINDS = {  # what a piece of evidence may find, and the verdict where it stands alone
    "counterexample": words.FALSE,
    "contradicted": words.CONTRADICTED,
    "not seen": words.NOT_SEEN,
    "reproduced": words.REPRODUCED,
    "undecided": words.UNDECIDED,
    "excluded": words.EXCLUDED,
    "not testable": words.NOT_TESTABLE,
    "proof": words.PROVED,
    "identity": words.NUMERIC,
    "unspecified": words.UNSPECIFIED,
    "failed": RED,
    "not run": RED,
}
KINDS = ("derivations", "tests", "mini", "exact", "absent")


@dataclass(frozen=True)
class Claim:
    id: str
    place: str
    quote: str
    says: str
    condition: str = ""
    note: str = ""
    second: str = ""
    elsewhere: tuple[str, ...] = ()
    derivations: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    mini: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    ours: bool = False

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
        """Changes with the record, so that no verdict outlives what it was computed
        for.
        """
        record = {k: v for k, v in asdict(self).items() if k != "second"}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[
            :12
        ]


@dataclass(frozen=True)
class Outcome:
    """What one piece of evidence found: some of FINDS, in words, with the condition
    that it itself states.
    """

    kind: str
    pointer: str
    finds: tuple[str, ...]
    text: str = ""
    condition: str = ""
    # of an experiment: it searched a learning rate for each method, and registered the
    # size of this effect
    decides: bool = False


@dataclass(frozen=True)
class Judged:
    claim: Claim
    verdict: str  # one of VERDICTS, or RED
    why: str  # the condition, or why it is red
    outcomes: tuple[Outcome, ...]

    def __bool__(self) -> bool:
        return self.verdict != RED

    def json(self) -> dict[str, Any]:
        facts = asdict(self.claim) | {
            "section": self.claim.section,
            "verdict": self.verdict,
            "why": self.why,
        }
        return facts | {"evidence": [asdict(o) for o in self.outcomes]}


def deciding(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the evidence that decides, where training runs speak of a statement.

    Three experiments searched a learning rate for each method: the one on stale data,
    the one on UP's controls, and family_tuned. Where one of them registered the size of an effect, it decides: at one
    rate for all, a difference may be one of tuning. What else was seen in training runs
    stands beside it: other experiments, and effects that nobody registered. The rule
    was made after the results.

    Args:
        outcomes: all evidence of one statement.

    Returns:
        The outcomes of which `judge` makes one word; all of them where no such
        experiment is among them.
    """
    if not any(o.decides for o in outcomes):
        return outcomes
    return [
        o
        for o in outcomes
        if o.decides or (o.kind != "mini" and o.finds != ("undecided",))
    ]


def judge(claim: Claim, outcomes: list[Outcome], last: str = "") -> Judged:
    """One word from what the evidence found. last: the verdict computed before, which
    stands where some could not run.

    Evidence for and against makes a condition, and asks for one; a condition asks for
    evidence for and against.
    """

    def said(verdict: str, why: str = "") -> Judged:
        """Return the claim with this verdict and all outcomes."""
        return Judged(claim, verdict, why, tuple(outcomes))

    found = {f for o in outcomes for f in o.finds}
    if failed := [o for o in outcomes if "failed" in o.finds]:
        return said(RED, "; ".join(f"{o.pointer}: {o.text}" for o in failed))
    if not found:
        return said(RED, "no evidence")
    if "not run" in found:
        why = "; ".join(o.text for o in outcomes if "not run" in o.finds)
        return said(last, why) if last in VERDICTS else said(RED, why)
    found = {f for o in deciding(outcomes) for f in o.finds}
    good, bad = (
        found & {"proof", "identity", "reproduced"},
        found & {"counterexample", "contradicted", "not seen"},
    )
    # shown by one experiment, excluded by another
    bad |= found & {"excluded"} if "reproduced" in good else set()
    condition = claim.condition or "; ".join(
        o.condition for o in outcomes if o.condition
    )
    if good and bad:
        if not condition:
            return said(RED, "evidence for and against, and no condition")
        return said(words.CONDITION, condition)
    if condition:
        return said(
            RED,
            f"a condition, and no evidence {'that it is needed' if good else 'that it is enough'}",
        )
    if "unspecified" in found:
        return (
            said(words.UNSPECIFIED)
            if found == {"unspecified"}
            else said(RED, "said to be unspecified, and tested")
        )
    return said(next(verdict for f, verdict in FINDS.items() if f in found))


def raw(text: str | None = None) -> dict[str, Any]:
    """claims.toml, or this text, as it stands: claim, question, source, exceptions."""
    if text is None:
        text = (
            resources.files("paper.claims")
            .joinpath("claims.toml")
            .read_text(encoding="utf-8")
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the claims cannot be read: {error}") from error


def read(text: str | None = None) -> list[Claim]:
    """The claims and then our questions of claims.toml, or of this text; InputError
    where a record is not whole.
    """
    all_of_it = raw(text)
    listed = {*KINDS, "elsewhere"}
    whole: list[dict[str, Any]] = [
        r | {"ours": False} for r in all_of_it.get("claim", [])
    ]
    whole += [{"quote": ""} | r | {"ours": True} for r in all_of_it.get("question", [])]
    records: list[dict[str, Any]] = [
        {k: tuple(v) if k in listed else v for k, v in r.items()} for r in whole
    ]
    try:
        claims = [Claim(**r) for r in records]
    except TypeError as error:
        raise InputError(f"the claims cannot be read: {error}") from error
    seen: set[str] = set()
    for c in claims:
        there = c.id not in seen and c.place.startswith(("Sec. ", "App. ")) and c.says
        if not there or bool(c.quote) == c.ours:
            raise InputError(
                f"claim {c.id!r}: it needs its own id, a place (Sec. or App.), says and, of a claim, a quote."
            )
        for known in (e.partition(":")[0] for e in c.elsewhere):
            if known not in all_of_it.get("source", {}):
                raise InputError(f"claim {c.id!r}: there is no source named {known!r}.")
        seen.add(c.id)
    return claims


def sources() -> dict[str, dict[str, str]]:
    """What others wrote or measured: name, url and quote of each."""
    return raw().get("source", {})


# ---- what the last run said ----------------------------------------------------------
def last() -> dict[str, Any]:
    """computed.json: id -> verdict, outcomes, date, commit, and the digest of the
    statement that they are of.
    """
    return {
        name: entry | {"date": made.date, "commit": made.commit}
        for made in record.read(COMPUTED)
        for name, entry in made.rows.items()
    }


def as_computed(
    claims: list[Claim] | None = None, computed: dict[str, Any] | None = None
) -> list[Judged]:
    """The verdicts of the last run; red where the record has changed since."""
    known = last() if computed is None else computed
    found = []
    for c in read() if claims is None else claims:
        k = known.get(c.id)
        if not k or k["record"] != c.digest:
            found.append(
                Judged(
                    c,
                    RED,
                    "not computed since its record was written: python -m paper claims --run --save",
                    (),
                )
            )
            continue
        outcomes = tuple(
            Outcome(**o | {"finds": tuple(o["finds"])}) for o in k["outcomes"]
        )
        found.append(Judged(c, k["verdict"], k["why"], outcomes))
    return found


def saved(judged: list[Judged]) -> dict[str, Any]:
    """Their rows of computed.json."""

    def entry(j: Judged) -> dict[str, Any]:
        """Return what is kept of a judged claim, without its outcomes."""
        return {
            "record": j.claim.digest,
            "verdict": j.verdict,
            "why": j.why,
        }

    return {
        j.claim.id: entry(j) | {"outcomes": [asdict(o) for o in j.outcomes]}
        for j in judged
    }
