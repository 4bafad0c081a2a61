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
    sections = sorted({j.claim.section for j in judged})
    if section and not any(
        s == section or s.startswith(f"{section}.") for s in sections
    ):
        raise InputError(
            f"there is no claim in section {section!r}: choose one of {', '.join(sections)}."
        )
    if verdict and not any(v.startswith(verdict) for v in (*VERDICTS, RED)):
        raise InputError(
            f"there is no verdict named {verdict!r}: choose one of {', '.join((*VERDICTS, RED))}."
        )

    def here(s: str) -> bool:
        """Return whether this section is the one asked for, or inside it."""
        return not section or s == section or s.startswith(f"{section}.")

    return [
        j
        for j in judged
        if here(j.claim.section) and j.verdict.startswith(verdict or "")
    ]


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
    """Return `Of 88 statements of the paper, 20 are proved, ... and 2 are false as
    written. Of 35 questions of ours, ...`, by ORDER; "0 statements" for none.
    """
    said = []
    for ours, what in (
        (False, "statement{} of the paper"),
        (True, "question{} of ours"),
    ):
        mine = [j for j in judged if j.claim.ours == ours]
        count = Counter(j.verdict for j in mine)
        *most, final = [_counted(count[v], v) for v in ORDER if count[v]] or [""]
        if mine:
            all_of_them = " and ".join([", ".join(most), final] if most else [final])
            said.append(
                f"Of {len(mine)} {what.format('s' if len(mine) != 1 else '')}, {all_of_them}"
            )
    return ". ".join(said) or "0 statements"


def _counted(n: int, verdict: str) -> str:
    """Return how many have a verdict: `1 is proved`, `2 hold numerically`."""
    if verdict.startswith("holds"):
        return f"{n} {verdict if n == 1 else verdict.replace('holds', 'hold')}"
    return f"{n} {'is' if n == 1 else 'are'} {verdict}"


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
        out.append(
            f"{j.verdict.upper() if not j else j.verdict}   {j.claim.place}   [{j.claim.id}]"
        )
        said = [f"“{plain(j.claim.quote)}”"] if j.claim.quote else []
        said += [f"reading: {j.claim.says}" if j.claim.quote else j.claim.says]
        if j.why:
            said.append(f"{'because' if not j else 'if'}: {j.why}")
        if j.claim.note:
            said.append(f"note: {j.claim.note}")
        said += [f"elsewhere: {e}" for e in j.claim.elsewhere]
        if j.claim.second:
            said.append(f"second reader: {j.claim.second}")
        if verbose:
            for o in j.outcomes:
                finds = " and ".join(o.finds)
                said.append(f"{o.kind} {o.pointer}: {finds}  {o.text}")
        else:
            said += shown(j)
        for sentence in said:
            out += textwrap.wrap(
                sentence, 150, initial_indent=" " * 4, subsequent_indent=" " * 6
            )
    return "\n".join(out)


def _where(o: Outcome) -> str:
    """Return the experiment's name as a prefix if the outcome is of an experiment, else
    "".
    """
    return f"{o.pointer.partition('/')[0]}: " if o.kind in ("mini", "exact") else ""


def shown(j: Judged) -> list[str]:
    """Return the texts of the evidence, each once, without those of derivations and
    without the condition that is shown already.
    """
    said = [
        o for o in j.outcomes if o.text and o.kind != "derivations" and o.text != j.why
    ]
    return list(dict.fromkeys(_where(o) + o.text for o in said))


def as_json(judged: Sequence[Judged], computed: dict) -> str:
    """Return the claims as JSON, with the date and commit at which each was judged."""

    def when(j: Judged) -> dict[str, Any]:
        """Return the date and the commit at which the claim was judged."""
        return {k: computed.get(j.claim.id, {}).get(k) for k in ("date", "commit")}

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
    judged = as_computed()
    out = []
    for letter, heading in HEADINGS.items():
        mine = [
            j
            for j in right_first(judged)
            if j.claim.section.startswith(letter) and not j.claim.ours
        ]
        if mine:
            reading = "the paper, and the reading tested"
            out += [f"## {heading}", "", _table(reading, mine), ""]
    out += [
        "## Questions of ours",
        "",
        "The paper states none of these. *Where* names the section that they bear on.",
        "",
    ]
    ours = [j for j in right_first(judged) if j.claim.ours]
    out += [_table("question", ours), ""]
    out += ["## What others wrote and measured", ""]
    out += [
        f'* **{key}**: [{s["name"]}]({s["url"]}). "{s["quote"]}"'
        for key, s in sources().items()
    ] + [""]
    out += ["## Registered claims that are evidence for no statement", ""]
    return "\n".join(
        [*out, *(f"* `{key}`: {why}." for key, why in raw()["exceptions"].items()), ""]
    )


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
    for key, _, words in (e.partition(": ") for e in c.elsewhere):
        # this source is code of the paper's first author
        code = (
            "not in the paper; in the first author's code: "
            if key == "verl-7022"
            else ""
        )
        says.append(
            f"*Elsewhere:* {code}{words} ([{key}](#what-others-wrote-and-measured))"
        )
    verdict = f"**{j.verdict}**"
    if j.why:
        # of a red one it is the reason, of the others the condition
        verdict += f"<br>if: {j.why}" if j else f"<br>{j.why}"
    evidence = dict.fromkeys(
        [*shown(j), " · ".join(dict.fromkeys(map(link, j.outcomes)))]
    )
    return [c.place, "<br>".join(says), verdict, "<br>".join(evidence)]


def plain(quote: str) -> str:
    """Return a quote of the LaTeX without its commands, with the Greek letters."""
    quote = re.sub(
        r"\\(?:text|mathcal|textbf)\{([^{}]*)\}",
        r"\1",
        re.sub(r"\\text\{([^{}]*)\}", r"\1", quote),
    )
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
    key: str | int = o.kind
    if o.kind == "mini" and name in FILES:
        key = name
    elif o.kind == "mini":
        key = 2 if name in ROUND_2 else 1
    return f"[{name}](../{FILES[key].format(name)})"


def cell(text: str) -> str:
    """Return it with every `|` escaped, for a cell of a table."""
    return text.replace("|", "\\|")


def summary() -> str:
    """Return the line of README on the claims: how many have each verdict."""
    every = "[Claims](docs/claims.md) tests the paper statement by statement"
    meant = (
        "*Not seen here*: the tiny transformers do not reach the bound that the statement "
        "names. *Contradicted*: the runs show the opposite. What a large model does is "
        "another question."
    )
    known = f"{tally(as_computed())}. {meant}"
    return f"{every}; `python -m paper claims --run` computes verdicts. {known}"
