# SPDX-License-Identifier: Apache-2.0
"""The page before the tables: what holds, at which dose and by how much; what is not
settled, and what it would take.

Every word is chosen by the registered verdicts; nothing here decides.
"""

from collections import Counter

from paper.claims import words
from repro.mini.round2 import doses, explore, reach, tables
from repro.mini.round2.rule import Verdict
from repro.mini.round2.tables import FINAL
from repro.mini.study.plan import Experiment
from repro.mini.study.results import Record

Judged = dict[str, list[Verdict]]
ORDER = (
    words.REPRODUCED,
    words.CONTRADICTED,
    words.EXCLUDED,
    words.UNDECIDED,
    words.NOT_TESTABLE,
    "not finished",
)
BREAKS = {  # an ablation and the registered claim that says that it breaks
    "DAPO without its upper clip": "no_upper_clip_explodes",
    "importance sampling without any clip (it ends below DAPO)": "is_pg",
    "off-policy REINFORCE": "reinforce_collapses",
}


def in_short(
    experiments: list[Experiment],
    judged: Judged,
    records: dict[str, Record],
    everything: dict[str, Record],
) -> list[str]:
    """`everything`: also the runs that are left out of the numbers."""
    lines = [counts(judged), *undecided(judged), "", *by_dose(judged, records), ""]
    lines += [line for line in (least_dose(judged), coverage(records)) if line]
    lines += [
        rest(e, judged[e.name], records)
        for e in experiments
        if e.name not in doses.NAMES and begun(e, everything)
    ]
    lines += reach.sentence(reach.bases(records)) + explore.sentence(records)
    waiting = [e.name for e in experiments if not begun(e, everything)]
    return lines + (
        [f"* Not begun: {', '.join(waiting)}. Nothing is said of them."]
        if waiting
        else []
    )


def begun(e: Experiment, records: dict[str, Record]) -> bool:
    return any(s.key in records for *_, s in e.runs())


def counts(judged: Judged) -> str:
    said = []
    for source, whose in (("paper", "the paper's"), ("ours", "our")):
        mine = [
            v
            for vs in judged.values()
            for v in vs
            if v.claim.source == source and v.claim.contrasts
        ]
        count = Counter(map(tables.verdict, mine))
        said.append(
            f"of {whose} {len(mine)} {'claims' if source == 'paper' else 'questions'} "
            f"{', '.join(f'{count[w]} {w}' for w in ORDER if count[w])}"
        )
    return f"* Verdicts: {'; '.join(said)}."


def undecided(judged: Judged) -> list[str]:
    """For which of these the registered budget was too small, and for which the effect
    is.
    """
    open_ = [
        v
        for vs in judged.values()
        for v in vs
        if v.word == "undecided" and v.seeds_needed
    ]
    less = [v for v in open_ if tables.verdict(v) == words.EXCLUDED]
    short, close = (
        [v for v in open_ if v not in less and tables.enough(v) == was]
        for was in (False, True)
    )
    lines = []
    if less:
        lines.append(
            f"* Excluded: {len(less)} claims. Their effect is not shown, and the interval that decides leaves out the "
            "effect that their seeds were counted for."
        )
    if short:
        needed, powers = (
            sorted(v.seeds_needed or 0 for v in short),
            sorted(v.power for v in short),
        )
        most = (
            f"more than {tables.MOST}" if needed[-1] >= tables.MOST else str(needed[-1])
        )
        lines.append(
            f"* Undecided for lack of seeds: {len(short)} claims. At the spread seen the registered seeds had power "
            f"{powers[0]:.2f} to {powers[-1]:.2f} for the registered effect; {needed[0]} to {most} would have 0.8."
        )
    if close:
        claims = f"{len(close)} claim{'s' if len(close) > 1 else ''}"
        lines.append(f"* Undecided despite enough power, too close to call: {claims}.")
    return lines


def by_dose(judged: Judged, records: dict[str, Record]) -> list[str]:
    """One row a claim, one column a dose: the verdict, or how far it is, and the
    effect.
    """
    names = [name for name in doses.NAMES if name in judged]
    rows = [
        f"| | {' | '.join(doses.heading(name, records) for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for source, title in (
        ("paper", "**the paper claims**"),
        ("ours", "**questions of ours**"),
    ):
        rows.append(f"| {title} |" + " |" * len(names))
        ids = dict.fromkeys(
            v.claim.id
            for name in names
            for v in judged[name]
            if v.claim.source == source
        )
        for id in ids:
            found = [
                next((v for v in judged[name] if v.claim.id == id), None)
                for name in names
            ]
            says = next(v.claim.says for v in found if v).removesuffix(".")
            rows.append(f"| {says} | {' | '.join(cell(v) for v in found)} |")
    return rows


def cell(v: Verdict | None) -> str:
    if v is None:
        return ""
    effect = ", ".join(tables.show(f) for f in v.found if f.n)
    if not effect:
        return "no run"
    if v.word == "not finished":
        return f"{v.n} of {v.of} seeds: {effect}"
    word = tables.verdict(v)
    if word == words.NOT_TESTABLE:
        return f"{word}: {effect}"
    more = f"; {tables.lacks(v)}" if word == words.UNDECIDED and v.seeds_needed else ""
    return f"**{tables.limit(v) if word == words.EXCLUDED else word}** {effect}{more}"


def least_dose(judged: Judged) -> str:
    """The lowest dose at which the registered claim that an ablation breaks is
    reproduced.
    """
    parts = []
    for what, id in BREAKS.items():
        word = {
            n: tables.verdict(v)
            for n in doses.NAMES
            for v in judged.get(n, [])
            if v.claim.id == id
        }
        broke = [n for n in word if word[n] == words.REPRODUCED]
        if not broke:
            first = "at none" + (" so far" if "not finished" in word.values() else "")
        elif any(
            word[n] == "not finished" for n in list(word)[: list(word).index(broke[0])]
        ):
            first = f"at **{doses.short(broke[0])}**, perhaps below"
        else:
            whole = broke == list(word)[list(word).index(broke[0]) :]
            at = " and ".join(f"**{doses.short(n)}**" for n in broke)
            first = f"from **{doses.short(broke[0])}** on" if whole else f"at {at}"
        others = [f"{doses.short(n)}: {w}" for n, w in word.items() if n not in broke]
        parts.append(f"{what} {first}" + (f" ({', '.join(others)})" if others else ""))
    return f"* The least dose at which an ablation breaks, by its registered claim: {'; '.join(parts)}."


def coverage(records: dict[str, Record]) -> str:
    """Best@32 of the untrained policy and at the end."""
    parts, less, falls = [], True, True
    for name in doses.NAMES:
        start, dapo, up, n = doses.coverage(name, records)
        if n:
            parts.append(
                f"{doses.short(name)} {start:.0f} → {dapo:.0f} and {up:.0f} ({doses.n_seeds(n)})"
            )
            falls, less = falls and max(dapo, up) < start, less and up > dapo
    if not parts:
        return ""
    said = "Coverage falls in training" if falls else "Coverage"
    said += ", and UP-DAPO loses less of it" if falls and less else ""
    return f"* {said}: Best@32, %, from the untrained policy to DAPO's and UP-DAPO's end: {', '.join(parts)}."


def rest(e: Experiment, found: list[Verdict], records: dict[str, Record]) -> str:
    runs = [s.key in records for *_, s in e.runs()]
    effect = lambda v: (
        f" {tables.show(v.found[0])}" if v.word in FINAL and len(v.found) == 1 else ""
    )
    ids = lambda word: ", ".join(
        v.claim.id + effect(v)
        for v in found
        if tables.verdict(v) == word and v.claim.contrasts
    )
    said = [
        f"{word}: {ids(word)}" for word in ORDER if word != "not finished" and ids(word)
    ]
    if not any(v.claim.contrasts for v in found):
        said = ["it has no claim"]
    return f"* **{e.name}**, {sum(runs)} of {len(runs)} runs: {'; '.join(said) or 'no verdict yet'}."
