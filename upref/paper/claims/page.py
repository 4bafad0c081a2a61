# SPDX-License-Identifier: Apache-2.0
"""The claims in print: for a terminal, as JSON, as the table of docs/claims.md and the lines of README."""

import json
import textwrap
from collections import Counter
from collections.abc import Sequence

from upref.errors import InputError
from upref.paper.claims import RED, VERDICTS, Judged, Outcome, as_computed, last

HEADINGS = {
    "3": "Section 3: the dilemma",
    "4": "Section 4: UP",
    "5": "Section 5: experiments",
    "A": "Appendix A: settings",
    "B": "Appendix B: Cap for negative advantages",
    "C": "Appendix C: the gradient of UP-GSPO",
}
FILES = {
    "derivations": "derivations/{0}.py",
    "exact": "repro/exact/results/report.md#{0}",
    1: "repro/mini/results/verdicts.md#{0}",
    2: "repro/mini/round2/results/report.md#{0}",
}
ROUND_2 = ("dose_low", "dose_middle", "dose_high", "universality", "family_tuned", "papers_settings", "moe", "pictures")


def chosen(judged: Sequence[Judged], section: str | None = None, verdict: str | None = None) -> list[Judged]:
    """Those of a section (3, 4.1, B) and of a verdict; InputError where there is no such section or verdict."""
    sections = sorted({j.claim.section for j in judged})
    if section and not any(s == section or s.startswith(f"{section}.") for s in sections):
        raise InputError(f"no claim is of section {section!r}: choose one of {', '.join(sections)}.")
    if verdict and not any(v.startswith(verdict) for v in (*VERDICTS, RED)):
        raise InputError(f"no verdict is called {verdict!r}: choose one of {', '.join((*VERDICTS, RED))}.")
    here = lambda s: not section or s == section or s.startswith(f"{section}.")
    return [j for j in judged if here(j.claim.section) and j.verdict.startswith(verdict or "")]


def right_first(judged: Sequence[Judged]) -> list[Judged]:
    """Section by section, in each what is right before what is open and what is wrong; else in the paper's order."""
    rank = lambda j: (list(HEADINGS).index(j.claim.section[0]), (*VERDICTS, RED).index(j.verdict))
    return sorted(judged, key=rank)


def tally(judged: Sequence[Judged]) -> str:
    """`88 statements: 20 proved, ...`, in the order of VERDICTS."""
    count = Counter(j.verdict for j in judged)
    head = f"{len(judged)} statement{'s' * (len(judged) != 1)}"
    return (f"{head}: " if count else head) + ", ".join(f"{count[v]} {v}" for v in (*VERDICTS, RED) if count[v])


def made(computed: dict) -> str:
    """When and at which commits these entries of computed.json were made."""
    dates, commits = (sorted({c[key] for c in computed.values()}) for key in ("date", "commit"))
    return f"Computed on {' and '.join(dates)} at commit {', '.join(commits)}." if dates else "Never computed."


def text(judged: Sequence[Judged], head: str, verbose: bool = False) -> str:
    out = [f"{tally(judged)}.", head, ""]
    for j in right_first(judged):
        out.append(f"{j.verdict.upper() if not j else j.verdict}   {j.claim.place}   [{j.claim.id}]")
        said = [j.claim.says]
        if j.why:
            said.append(f"{'because' if not j else 'if'}: {j.why}")
        said += (
            shown(j)
            if not verbose
            else [f"{o.kind} {o.pointer}: {' and '.join(o.finds)}  {o.text}" for o in j.outcomes]
        )
        out += [line for s in said for line in textwrap.wrap(s, 150, initial_indent="    ", subsequent_indent="      ")]
    return "\n".join(out)


def shown(j: Judged) -> list[str]:
    """Numbers and effects: what is found by more than a proof's or a test's passing."""
    said = [o for o in j.outcomes if o.text and o.kind != "derivations" and o.text != j.why]
    where = lambda o: f"{o.pointer.partition('/')[0]}: " if o.kind in ("mini", "exact") else ""
    return list(dict.fromkeys(where(o) + o.text for o in said))


def as_json(judged: Sequence[Judged], computed: dict) -> str:
    when = lambda j: {k: computed.get(j.claim.id, {}).get(k) for k in ("date", "commit")}
    facts = {"count": Counter(j.verdict for j in judged), "claims": [j.json() | when(j) for j in judged]}
    return json.dumps(facts, indent=1, ensure_ascii=False)


# ---- pages -----------------------------------------------------------------------------------------------------------
def markdown() -> str:
    """The tables of docs/claims.md, one a section."""
    judged = as_computed()
    out = [f"{tally(judged)}. {made(last())}", ""]
    for letter, heading in HEADINGS.items():
        mine = [j for j in right_first(judged) if j.claim.section.startswith(letter)]
        if mine:
            out += [f"## {heading}", "", "| where | the paper says | verdict | evidence |", "|---|---|---|---|"]
            out += [f"| {' | '.join(map(cell, row(j)))} |" for j in mine] + [""]
    return "\n".join(out)


def row(j: Judged) -> list[str]:
    word = f"**{j.verdict}**" + (f"<br>{j.why}" if j.why else "")
    return [
        j.claim.place,
        j.claim.says,
        word,
        "<br>".join(dict.fromkeys([*shown(j), " · ".join(dict.fromkeys(map(link, j.outcomes)))])),
    ]


def link(o: Outcome) -> str:
    name, _, _ = o.pointer.partition("/")
    if o.kind == "absent":
        return "a search of the LaTeX"
    if o.kind == "tests":
        file, _, test = o.pointer.partition("::")
        return f"[{test.removeprefix('test_')}](../{file})"
    key = o.kind if o.kind != "mini" else 2 if name in ROUND_2 else 1
    return f"[{name}](../{FILES[key].format(name)})"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def summary() -> str:
    """Two lines for README."""
    every = "What the paper states in Sections 3 to 5 and Appendices A to C, [statement by statement](docs/claims.md)"
    return f"{every}, as `upref claims --run` computes it:\n{tally(as_computed())}."
