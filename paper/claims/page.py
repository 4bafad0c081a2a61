# SPDX-License-Identifier: Apache-2.0
"""The claims in print: for a terminal, as JSON, as the tables of docs/claims.md and the line
of README.

A claim is right where it holds, open where that is undecided or not testable, and wrong
where the opposite is found: ORDER has the verdicts in this order.
"""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paper.claims import RED, VERDICTS, Judged, Outcome, as_computed, last, raw, sources
from paper.claims.words import MEANINGS
from upref.errors import InputError
from upref.markdown import table

# the first letter of a section -> its heading in docs/claims.md
HEADINGS = {
    "2": "Section 2: related work",
    "3": "Section 3: the dilemma",
    "4": "Section 4: UP",
    "5": "Section 5: experiments",
    "A": "Appendix A: settings",
    "B": "Appendix B: Cap for negative advantages",
    "C": "Appendix C: the gradient of UP-GSPO",
}
# a kind of evidence, or the round or name of an experiment -> the file that has it
FILES = {
    "derivations": "derivations/{0}.py",
    "exact": "repro/exact/results/report.md#{0}",
    1: "repro/mini/results/verdicts.md#{0}",
    2: "repro/mini/round2/results/report.md#{0}",
    "stale": "repro/mini/stale/results/report.md",
    "controls": "repro/mini/controls/results/report.md",
}
FIRST_AUTHOR = "verl-7022"  # the source that is code of the paper's first author
ROUND_2 = (  # experiments of the second round
    "dose_low",
    "dose_middle",
    "dose_high",
    "universality",
    "family_tuned",
    "papers_settings",
    "moe",
    "pictures",
)


def chosen(
    judged: Sequence[Judged], section: str | None = None, verdict: str | None = None
) -> list[Judged]:
    """Return the claims of a section, its subsections included, and of a verdict.

    Args:
        judged: all claims.
        section: "3", "4.1", "B"; None for all.
        verdict: the beginning of one; None for all.

    Raises:
        InputError: there is no such section or verdict.
    """
    found = list(judged)
    if section:
        found = [j for j in judged if f"{j.claim.section}.".startswith(f"{section}.")]
        if not found:
            sections = sorted({j.claim.section for j in judged})
            raise InputError(
                f"there is no claim in section {section!r}: choose one of {', '.join(sections)}."
            )
    if verdict:
        verdicts = (*VERDICTS, RED)
        if not any(known.startswith(verdict) for known in verdicts):
            raise InputError(
                f"there is no verdict named {verdict!r}: choose one of {', '.join(verdicts)}."
            )
        found = [j for j in found if j.verdict.startswith(verdict)]
    return found


ORDER = (
    "proved",
    "holds numerically",
    "reproduced",
    "holds under a condition",
    "excluded",
    "undecided",
    "not testable",
    "unspecified",
    "not seen here",
    "contradicted",
    "false as written",
    RED,
)


def _rank(j: Judged) -> tuple[bool, int, int]:
    """Return the sort key of right_first: questions of ours last, then section, then
    verdict.
    """
    return (
        j.claim.ours,
        list(HEADINGS).index(j.claim.section[0]),
        ORDER.index(j.verdict),
    )


def right_first(judged: Sequence[Judged]) -> list[Judged]:
    """Return the claims section by section, in each by ORDER; else in the order given.
    Our questions come last.
    """
    return sorted(judged, key=_rank)


def tally(judged: Sequence[Judged]) -> str:
    """Return `Of 88 statements of the paper, 20 are proved, ... and 2 are undecided. Of
    12 details that were looked for in its text, 12 are unspecified. Of 35 questions of
    ours, ...`, by ORDER; "0 statements" for none.
    """
    details = [j for j in judged if j.claim.absent]
    stated = [j for j in judged if not j.claim.ours and not j.claim.absent]
    asked = [j for j in judged if j.claim.ours]
    sentences = []
    for mine, one, several in (
        (stated, "statement of the paper", "statements of the paper"),
        (
            details,
            "detail that was looked for in its text",
            "details that were looked for in its text",
        ),
        (asked, "question of ours", "questions of ours"),
    ):
        if not mine:
            continue
        count = Counter(j.verdict for j in mine)
        *most, final = [_counted(count[v], v) for v in ORDER if count[v]]
        verdicts = f"{', '.join(most)} and {final}" if most else final
        what = one if len(mine) == 1 else several
        sentences.append(f"Of {len(mine)} {what}, {verdicts}")
    return ". ".join(sentences) or "0 statements"


def _counted(n: int, verdict: str) -> str:
    """Return how many have a verdict: `1 is proved`, `2 hold numerically`."""
    if n == 1:
        return f"1 {verdict}" if verdict.startswith("holds") else f"1 is {verdict}"
    if verdict.startswith("holds"):
        return f"{n} {verdict.replace('holds', 'hold')}"
    return f"{n} are {verdict}"


def made(computed: dict) -> str:
    """Return when and at which commits these entries of computed.json were made."""
    dates = sorted({entry["date"] for entry in computed.values()})
    commits = sorted({entry["commit"] for entry in computed.values()})
    if not dates:
        return "Never computed."
    at = "commit" if len(commits) == 1 else "commits"
    return f"Computed on {', '.join(dates)} at {at} {', '.join(commits)}."


def text(judged: Sequence[Judged], head: str, verbose: bool = False) -> str:
    """Return the claims as lines for a terminal, each with its verdict and evidence.

    Args:
        judged: the claims.
        head: a line after the tally.
        verbose: print every piece of evidence, derivations and tests included.
    """
    out = [f"{tally(judged)}.", head, ""]
    for j in right_first(judged):
        verdict = j.verdict if j else j.verdict.upper()
        out.append(f"{verdict}   {j.claim.place}   [{j.claim.id}]")
        evidence = _all_evidence(j) if verbose else shown(j)
        for sentence in [*_sentences(j), *evidence]:
            out += textwrap.wrap(
                sentence, 150, initial_indent=" " * 4, subsequent_indent=" " * 6
            )
    return "\n".join(out)


def _sentences(j: Judged) -> list[str]:
    """Return what the terminal shows of a claim between its verdict and its evidence."""
    c = j.claim
    said = [f"“{plain(c.quote)}”", f"reading: {c.says}"] if c.quote else [c.says]
    if j.why:
        # of a red one it is the reason, of the others the condition
        said.append(f"if: {j.why}" if j else f"because: {j.why}")
    if c.note:
        said.append(f"note: {c.note}")
    said += [f"elsewhere: {words}" for words in c.elsewhere]
    if c.second:
        said.append(f"second reader: {c.second}")
    return said


def _all_evidence(j: Judged) -> list[str]:
    """Return a sentence on each piece of evidence: what it is, and what it found."""
    return [
        f"{o.kind} {o.pointer}: {' and '.join(o.finds)}  {o.text}" for o in j.outcomes
    ]


def _where(o: Outcome) -> str:
    """Return the experiment's name as a prefix if the outcome is of an experiment, else
    "".
    """
    if o.kind not in ("mini", "exact"):
        return ""
    return f"{o.pointer.partition('/')[0]}: "


def shown(j: Judged) -> list[str]:
    """Return the texts of the evidence, each once, without those of derivations and
    without the condition that is shown already.
    """
    said: dict[str, None] = {}
    for o in j.outcomes:
        if o.text and o.kind != "derivations" and o.text != j.why:
            said[_where(o) + o.text] = None
    return list(said)


def as_json(judged: Sequence[Judged], computed: dict) -> str:
    """Return the claims as JSON, with the date and commit at which each was judged."""

    def when(j: Judged) -> dict[str, Any]:
        """Return the date and the commit at which the claim was judged, else None."""
        entry = computed.get(j.claim.id, {})
        return {"date": entry.get("date"), "commit": entry.get("commit")}

    facts = {
        "count": Counter(j.verdict for j in judged),
        "claims": [j.json() | when(j) for j in judged],
    }
    return json.dumps(facts, indent=1, ensure_ascii=False)


# ---- pages ---------------------------------------------------------------------------
def counts() -> str:
    """Return how many statements have each verdict, and when that was computed."""
    return f"{tally(as_computed())}. {made(last())}"


def markdown() -> str:
    """Return the tables of docs/claims.md: the paper's statements, one table a section;
    our questions; sources; exceptions.
    """
    judged = right_first(as_computed())
    ours = [j for j in judged if j.claim.ours]
    out = []
    for letter, heading in HEADINGS.items():
        mine = [
            j for j in judged if j.claim.section.startswith(letter) and not j.claim.ours
        ]
        if mine:
            reading = "the paper, and the reading tested"
            out += [f"## {heading}", "", _table(reading, mine), ""]
    out += [
        "## Questions of ours",
        "",
        "None of these is a statement of the paper in the form tested here. *Where* names the section that they bear on.",
        "",
        _table("question", ours),
        "",
        "## What others wrote and measured",
        "",
    ]
    for key, source in sources().items():
        name = f"[{source['name']}]({source['url']})"
        out.append(f'* **{key}**: {name}. "{source["quote"]}"')
    out += ["", "## Registered claims that are evidence for no statement", ""]
    for key, why in raw()["exceptions"].items():
        out.append(f"* `{key}`: {why}.")
    return "\n".join([*out, ""])


def _table(what: str, judged: Sequence[Judged]) -> str:
    """Return a table with a row for each claim.

    Args:
        what: the heading of the second column.
        judged: the claims.
    """
    rows = [list(map(cell, row(j))) for j in judged]
    return table(["where", what, "verdict", "evidence"], rows)


def row(j: Judged) -> list[str]:
    """Return the four cells of a claim: where it is, what it says with its notes, its
    verdict, its evidence.
    """
    c = j.claim
    says = [f"“{plain(c.quote)}”<br>*Reading:* {c.says}" if c.quote else c.says]
    if c.note:
        says.append(f"*Note:* {c.note}")
    if c.second:
        says.append(f"*Second reader:* {c.second}.")
    for elsewhere in c.elsewhere:
        source, _, words = elsewhere.partition(": ")
        if source == FIRST_AUTHOR:
            words = f"not in the paper; in the first author's code: {words}"
        link_to_source = f"[{source}](#what-others-wrote-and-measured)"
        says.append(f"*Elsewhere:* {words} ({link_to_source})")
    verdict = f"**{j.verdict}**"
    if j.why:
        # of a red one it is the reason, of the others the condition
        verdict += f"<br>if: {j.why}" if j else f"<br>{j.why}"
    links = " · ".join(dict.fromkeys(map(link, j.outcomes)))
    evidence = dict.fromkeys([*shown(j), links])
    return [c.place, "<br>".join(says), verdict, "<br>".join(evidence)]


def plain(quote: str) -> str:
    """Return a quote of the LaTeX without its commands, with the Greek letters."""
    quote = re.sub(r"\\text\{([^{}]*)\}", r"\1", quote)
    # these may have had a \text inside
    quote = re.sub(r"\\(?:text|mathcal|textbf)\{([^{}]*)\}", r"\1", quote)
    letters = {
        r"\epsilon": "ε",
        r"\pi": "π",
        r"\theta": "θ",
        r"\le": "≤",
        "$": "",
        "\\": "",
        "{": "",
        "}": "",
    }
    for tex, letter in letters.items():
        quote = quote.replace(tex, letter)
    return quote


def meanings() -> str:
    """Return a table of the verdicts and what was found for each."""
    rows = [[f"**{verdict}**", meaning] for verdict, meaning in MEANINGS.items()]
    return table(["verdict", "what was found"], rows)


def link(o: Outcome) -> str:
    """Return the Markdown link from docs/claims.md to what holds a piece of
    evidence.
    """
    name, _, _ = o.pointer.partition("/")
    if o.kind == "absent":
        return "a search of the printed text"
    if o.kind == "tests":
        file, _, test = o.pointer.partition("::")
        return f"[{test.removeprefix('test_')}](../{file})"
    key: str | int
    if o.kind != "mini":
        key = o.kind
    elif name in FILES:
        key = name
    else:
        key = 2 if name in ROUND_2 else 1
    return f"[{name}](../{FILES[key].format(name)})"


def cell(text: str) -> str:
    """Return it with every `|` escaped, for a cell of a table."""
    return text.replace("|", "\\|")


def summary() -> str:
    """Return the line of README on the claims: how many have each verdict."""
    every = "[Claims](docs/claims.md) tests the paper statement by statement"
    meant = (
        "*Not seen here*: the tiny transformers do not show the bound or the direction "
        "that our reading names. *Contradicted*: their runs show the opposite, or exact "
        "expectations differ from the reading. What a large model does is another "
        "question."
    )
    known = f"{tally(as_computed())}. {meant}"
    return f"{every}; `python -m paper claims --run` computes verdicts. {known}"
