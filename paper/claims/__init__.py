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
    tests             tests/FILE.py::NAME, which passes: finds what it says (evidence.FINDS_OF_TESTS); an identity if it
                      says nothing
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
        record = asdict(self)
        del record["second"]
        text = json.dumps(record, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


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
    kept = []
    for o in outcomes:
        speaks_beside_runs = o.kind != "mini" and o.finds != ("undecided",)
        if o.decides or speaks_beside_runs:
            kept.append(o)
    return kept


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
    verdict, why = _verdict_if_incomplete(outcomes, last) or _verdict(claim, outcomes)
    return Judged(claim, verdict, why, tuple(outcomes))


def _finds(outcomes: list[Outcome]) -> set[str]:
    """Return all that some pieces of evidence found."""
    return {find for outcome in outcomes for find in outcome.finds}


def _verdict_if_incomplete(
    outcomes: list[Outcome], last: str
) -> tuple[str, str] | None:
    """Return the verdict and why, where evidence failed, is missing or could not run;
    None where all of it is there.
    """
    found = _finds(outcomes)
    if "failed" in found:
        failed = [o for o in outcomes if "failed" in o.finds]
        return RED, "; ".join(f"{o.pointer}: {o.text}" for o in failed)
    if not found:
        return RED, "no evidence"
    if "not run" in found:
        why = "; ".join(o.text for o in outcomes if "not run" in o.finds)
        return (last if last in VERDICTS else RED), why
    return None


def _verdict(claim: Claim, outcomes: list[Outcome]) -> tuple[str, str]:
    """Return what the evidence, which is complete, makes of a claim: the verdict, and
    its condition or why it is red.
    """
    found = _finds(deciding(outcomes))
    good = found & {"proof", "identity", "reproduced"}
    bad = found & {"counterexample", "contradicted", "not seen"}
    if "reproduced" in good:  # shown by one experiment, excluded by another
        bad |= found & {"excluded"}
    of_evidence = "; ".join(o.condition for o in outcomes if o.condition)
    condition = claim.condition or of_evidence
    if good and bad:
        if not condition:
            return RED, "evidence for and against, and no condition"
        return words.CONDITION, condition
    if condition:
        lacks = "that it is needed" if good else "that it is enough"
        return RED, f"a condition, and no evidence {lacks}"
    if found == {"unspecified"}:
        return words.UNSPECIFIED, ""
    if "unspecified" in found:
        return RED, "said to be unspecified, and tested"
    return next(verdict for find, verdict in FINDS.items() if find in found), ""


def raw(text: str | None = None) -> dict[str, Any]:
    """Return claims.toml, or this text, as tables: claim, question, source, exceptions.

    Raises:
        InputError: it is no TOML.
    """
    if text is None:
        file = resources.files("paper.claims").joinpath("claims.toml")
        text = file.read_text(encoding="utf-8")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the claims cannot be read: {error}") from error


def read(text: str | None = None) -> list[Claim]:
    """Return the claims and then our questions of claims.toml, or of this text.

    Raises:
        InputError: a record is not whole, an id is used twice, or a source is unknown.
    """
    tables = raw(text)
    claims = [_claim(record, ours=False) for record in tables.get("claim", [])]
    for question in tables.get("question", []):
        claims.append(_claim({"quote": ""} | question, ours=True))
    seen: set[str] = set()
    for c in claims:
        has_place = c.place.startswith(("Sec. ", "App. "))
        is_whole = c.id not in seen and has_place and c.says
        # a claim of the paper has a quote, a question of ours has none
        if not is_whole or bool(c.quote) == c.ours:
            raise InputError(
                f"claim {c.id!r}: it needs its own id, a place (Sec. or App.), says and, of a claim, a quote."
            )
        for said in c.elsewhere:
            source = said.partition(":")[0]
            if source not in tables.get("source", {}):
                raise InputError(
                    f"claim {c.id!r}: there is no source named {source!r}."
                )
        seen.add(c.id)
    return claims


def _claim(record: dict[str, Any], *, ours: bool) -> Claim:
    """Return the claim of a table of claims.toml, with tuples in place of its lists.

    Args:
        record: the table.
        ours: whether it is a question of ours.

    Raises:
        InputError: it lacks a key, or has one that a claim has not.
    """
    fields = dict(record)
    for key in (*KINDS, "elsewhere"):
        if key in fields:
            fields[key] = tuple(fields[key])
    try:
        return Claim(**fields | {"ours": ours})
    except TypeError as error:
        raise InputError(f"the claims cannot be read: {error}") from error


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
    entries = {}
    for made in record.read(COMPUTED):
        for name, entry in made.rows.items():
            entries[name] = entry | {"date": made.date, "commit": made.commit}
    return entries


def as_computed(
    claims: list[Claim] | None = None, computed: dict[str, Any] | None = None
) -> list[Judged]:
    """Return the claims with the verdicts of the last run; red where the record has
    changed since, or was never judged.

    Args:
        claims: all if not given.
        computed: what `last` returns, if not given.
    """
    if computed is None:
        computed = last()
    if claims is None:
        claims = read()
    judged = []
    for c in claims:
        entry = computed.get(c.id)
        if not entry or entry["record"] != c.digest:
            why = "not computed since its record was written: python -m paper claims --run --save"
            judged.append(Judged(c, RED, why, ()))
            continue
        outcomes = tuple(
            Outcome(**fields | {"finds": tuple(fields["finds"])})
            for fields in entry["outcomes"]
        )
        judged.append(Judged(c, entry["verdict"], entry["why"], outcomes))
    return judged


def saved(judged: list[Judged]) -> dict[str, Any]:
    """Return the rows of computed.json for these claims, by id."""
    return {
        j.claim.id: {
            "record": j.claim.digest,
            "verdict": j.verdict,
            "why": j.why,
            "outcomes": [asdict(o) for o in j.outcomes],
        }
        for j in judged
    }
