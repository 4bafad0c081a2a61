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

# in place of a verdict: the evidence is missing, fails or is inconsistent
RED = "red"
# what a piece of evidence may find, and the verdict where nothing else is found; of
# several finds that need no condition the first one here decides
FINDS = {
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
    """A statement of the paper, or a question of ours; its keys are described above."""

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
        """The number that `place` begins with: "3.1", "4.2" or "B"."""
        return self.place.split(",")[0].removeprefix("Sec. ").removeprefix("App. ")

    @property
    def pointers(self) -> list[tuple[str, str]]:
        """(kind, pointer) of all its evidence, by the order of KINDS."""
        return [(kind, x) for kind in KINDS for x in getattr(self, kind)]

    @property
    def digest(self) -> str:
        """The first 12 digits of a sha256 of the record, without what the second reader
        found. A verdict holds only for the record with the digest that it was computed
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
    """A claim with its verdict; it is true unless it is red."""

    claim: Claim
    verdict: str  # one of VERDICTS, or RED
    why: str  # the condition, or why it is red
    outcomes: tuple[Outcome, ...]

    def __bool__(self) -> bool:
        return self.verdict != RED

    def json(self) -> dict[str, Any]:
        """Return the keys of the claim, and section, verdict, why and evidence."""
        facts = asdict(self.claim) | {
            "section": self.claim.section,
            "verdict": self.verdict,
            "why": self.why,
        }
        return facts | {"evidence": [asdict(o) for o in self.outcomes]}


def deciding(outcomes: list[Outcome]) -> list[Outcome]:
    """Return the evidence that decides, where training runs speak of a statement.

    Three experiments searched a learning rate for each method: the one on stale data,
    the one on UP's controls, and family_tuned. Where one of them registered the size of
    an effect, it decides: at one rate for all, a difference may be one of tuning. What
    else was found in training runs is left out: other experiments, effects that nobody
    registered, and evidence that finds nothing but "undecided". The rule was made after
    the results.

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
    """Return the claim with one word from what the evidence found.

    It is red where evidence failed or is missing, where some could not run and there is
    no earlier verdict, where evidence for and against has no condition, and where a
    condition has evidence on one side alone. Evidence for and against, with a
    condition, makes "holds under a condition".

    Args:
        claim: what is judged.
        outcomes: all its evidence.
        last: the verdict computed before, which stays where some evidence could not
            run; "" if there is none.
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
    good = found & {"proof", "identity", "reproduced"}
    bad = found & {"counterexample", "contradicted", "not seen"}
    if "reproduced" in good:  # shown by one experiment, excluded by another
        bad |= found & {"excluded"}
    condition = claim.condition or "; ".join(
        o.condition for o in outcomes if o.condition
    )
    if good and bad:
        if not condition:
            return said(RED, "evidence for and against, and no condition")
        return said(words.CONDITION, condition)
    if condition:
        lacks = "that it is needed" if good else "that it is enough"
        return said(RED, f"a condition, and no evidence {lacks}")
    if found == {"unspecified"}:
        return said(words.UNSPECIFIED)
    if "unspecified" in found:
        return said(RED, "said to be unspecified, and tested")
    return said(next(verdict for f, verdict in FINDS.items() if f in found))


def raw(text: str | None = None) -> dict[str, Any]:
    """Return claims.toml, or this text, as tables: claim, question, source, exceptions.

    Raises:
        InputError: it is no TOML.
    """
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
    """Return the claims and then our questions of claims.toml, or of this text.

    Raises:
        InputError: a record is not whole, an id is used twice, or a source is unknown.
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
        has_place = c.place.startswith(("Sec. ", "App. "))
        is_whole = c.id not in seen and has_place and c.says
        # a claim of the paper has a quote, a question of ours has none
        if not is_whole or bool(c.quote) == c.ours:
            raise InputError(
                f"claim {c.id!r}: it needs its own id, a place (Sec. or App.), says and, of a claim, a quote."
            )
        for known in (e.partition(":")[0] for e in c.elsewhere):
            if known not in all_of_it.get("source", {}):
                raise InputError(f"claim {c.id!r}: there is no source named {known!r}.")
        seen.add(c.id)
    return claims


def sources() -> dict[str, dict[str, str]]:
    """Return what others wrote or measured: name -> its name in print, url and
    quote.
    """
    return raw().get("source", {})


# ---- what the last run said ----------------------------------------------------------
def last() -> dict[str, Any]:
    """Return computed.json: id -> verdict, why, outcomes, date, commit, and `record`,
    the digest of the claim that they are of.
    """
    return {
        name: entry | {"date": made.date, "commit": made.commit}
        for made in record.read(COMPUTED)
        for name, entry in made.rows.items()
    }


def as_computed(
    claims: list[Claim] | None = None, computed: dict[str, Any] | None = None
) -> list[Judged]:
    """Return the claims with the verdicts of the last run; red where the record has
    changed since, or was never judged.

    Args:
        claims: all if not given.
        computed: what `last` returns, if not given.
    """
    known = last() if computed is None else computed
    found = []
    for c in read() if claims is None else claims:
        k = known.get(c.id)
        if not k or k["record"] != c.digest:
            why = "not computed since its record was written: python -m paper claims --run --save"
            found.append(Judged(c, RED, why, ()))
            continue
        outcomes = tuple(
            Outcome(**o | {"finds": tuple(o["finds"])}) for o in k["outcomes"]
        )
        found.append(Judged(c, k["verdict"], k["why"], outcomes))
    return found


def saved(judged: list[Judged]) -> dict[str, Any]:
    """Return the rows of computed.json for these claims, by id."""

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
