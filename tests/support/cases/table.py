# SPDX-License-Identifier: Apache-2.0
"""Every case: the rows of each file as `Case`s. By day a sample of what takes minutes,
the rest nightly.
"""

import re
from dataclasses import replace

import upref
from tests.support import zoo
from tests.support.zoo import advantages, blind_spots, habits

from . import (
    ACCEPTED,
    ENDS,
    NAMED,
    REFUSED,
    REJECTED,
    UNKNOWN,
    Case,
    batch_reading,
    beyond,
    boxes,
    causes,
    denominators,
    estimators,
    kl,
    logprob_changes,
    logprobs,
    public,
    right,
    styles,
    unseen,
    wrong,
)
from .bodies import loss

CAUSES = {  # of what was misnamed at first sight: what is said now, or -what is not
    "WAPO losers": "where A < 0 the ratio multiplies A, though wapo has no term there",
    "sampled entropy": "an entropy bonus of the sampled tokens has this gradient too",
    "GSPO root": "-square root of its length",
    "product": "-seq-mean-token-sum",
}
MISSED = {
    "micro-batches": "without totals, num_micro_batches is read as a setting and keeps its default, 1",
    "first advantage": "it is read as a loss of one advantage per response, which the report says",
    "it calls backward itself": "refused, because it returns nothing",
}


def judged(cause):
    return REJECTED if cause else ACCEPTED


def sample(cases, every, keep=lambda c: False):
    """Return the cases, of which one in `every` and those to `keep` run by day, and the
    rest by night.
    """
    sampled = []
    for n, case in enumerate(cases):
        by_day = n % every == 0 or keep(case)
        sampled.append(replace(case, nightly=not by_day))
    return sampled


def number(cases):
    """Return the cases; where several have one name, the position in the list is added
    to it.
    """
    names = [case.name for case in cases]
    numbered = []
    for n, case in enumerate(cases):
        if names.count(case.name) > 1:
            case = replace(case, name=f"{case.name} {n}")
        numbered.append(case)
    return numbered


def both(name, first):
    """Return (file, row) of a table of the first set, and of the same table of the
    unseen one.
    """
    rows = []
    for module in (first, unseen):
        file = module.__name__.rpartition(".")[2]
        rows += [(file, row) for row in getattr(module, name)]
    return rows


def written():
    """Yield the cases that were written before the checker ran on them: losses, boxes,
    estimators and KL terms. A sample runs by day.
    """

    def has_cause(case):
        return case.name in CAUSES

    for cases in (
        written_wrong(),
        written_right(),
        written_boxes(),
        written_estimators(),
        written_kl_terms(),
    ):
        yield from sample(cases, 40, has_cause)
    yield from sample(written_ends(), 5)


def written_wrong():
    """Return the wrong losses of both sets."""
    return [
        Case(
            loss(body),
            on,
            hp,
            file=file,
            name=name,
            why=why,
            verdict=REJECTED,
            says=CAUSES.get(name, ""),
            xfail=MISSED.get(name, ""),
        )
        for file, (name, on, hp, why, body) in both("WRONG", wrong)
    ]


def written_right():
    """Return the right losses of both sets."""
    return [
        Case(
            fn,
            on,
            hp,
            file="unseen: right" if file == "unseen" else file,
            name=name,
            xfail=MISSED.get(name, ""),
        )
        for file, (name, on, hp, fn) in both("RIGHT", right)
    ]


def written_boxes():
    """Return the losses of both sets that are to be named; a loss without a name is to
    be unknown.
    """
    cases = []
    for file, (names, hp, body) in both("BOXES", boxes):
        first_name = names.partition(" ")[0]
        cases.append(
            Case(
                loss(body),
                names,
                hp,
                kind="box",
                file="unseen: box" if file == "unseen" else file,
                name=first_name or "none",
                verdict=NAMED if names else UNKNOWN,
                xfail=MISSED.get(first_name, ""),
            )
        )
    return cases


def written_estimators():
    """Return the advantage estimators of both sets."""
    sets = (("estimators", estimators.CASES), ("unseen", unseen.ESTIMATORS))
    cases = []
    for file, rows in sets:
        for name, on, hp, fn, why in rows:
            cases.append(
                Case(
                    fn,
                    on,
                    hp,
                    kind="advantages",
                    file=file,
                    name=name,
                    why=why,
                    verdict=judged(why),
                )
            )
    return cases


def written_kl_terms():
    """Return the KL terms of the unseen set."""
    return [
        Case(fn, on, kind="kl", file="unseen", name=name, why=why, verdict=judged(why))
        for name, on, fn, why in unseen.KLS
    ]


def written_ends():
    """Return the losses at which `identify` ends with a sentence."""
    return [
        Case(
            loss(body),
            kind="box",
            file="unseen: ends",
            name=says,
            verdict=ENDS,
            says=says,
            text=where,
        )
        for says, where, body in unseen.NEAR
    ]


def edits():
    """Yield the edits of public losses: wrong ones, harmless ones, boxes and
    estimators. A sample runs by day.
    """

    def row(base, name, edit, verdict, says=""):
        """Return the case of a base loss after an edit; an empty name stands for the
        base itself.
        """
        on, hp = public.BASES[base]
        return Case(
            public.edited(base, edit),
            on,
            hp,
            file="public",
            name=f"{base}, {name or 'itself'}",
            verdict=verdict,
            says=says,
        )

    def wrong_row(base, name, edit):
        """Return the case of an edit that makes the loss wrong."""
        if (base, name) == ("vanilla", "ratio detached"):
            return row(base, name, edit, REFUSED, "detached")
        cause = public.CAUSES.get((base, name), "")
        return row(base, name, edit, REJECTED, cause)

    # those with a cause first
    wrongs = sorted(public.EDITS, key=lambda r: r[:2] not in public.CAUSES)
    n = len(public.CAUSES)
    yield from sample([wrong_row(*r) for r in wrongs[:n]], 2)
    yield from sample([wrong_row(*r) for r in wrongs[n:]], 12)
    unedited = [(base, "", []) for base in public.BASES]
    same = [row(*r, ACCEPTED) for r in unedited + public.HARMLESS]
    first = ("grpo, einsum", "preserved, itself")  # the KL term, A / (N r)
    yield from (c for c in same if c.name in first)
    yield from sample([c for c in same if c.name not in first], 7)
    named = [
        Case(
            public.edited(base, edit),
            names,
            hp,
            kind="box",
            file="public: box",
            name=f"{base}, {names.partition(' ')[0] or 'none'}",
            **meant(names),
        )
        for base, edit, names, hp in public.BOXES
    ]
    made = [
        Case(
            public.edited(base, edit),
            on,
            hp,
            kind="advantages",
            file="public",
            name=f"{base}, {why or on}",
            why=why,
            verdict=judged(why),
        )
        for base, edit, on, hp, why in public.ESTIMATORS
    ]
    yield from (*sample(named, 6), *sample(made, 5))


def meant(names):
    if names == "refused":
        return {"verdict": REFUSED, "says": "no gradient on a good batch"}
    return {"verdict": NAMED if names else UNKNOWN}


def others():
    """Yield the objectives themselves, the zoo, habits, blind spots, estimators,
    causes, styles, KL terms and log-prob functions.
    """
    own = [
        Case(upref.get(name), name, file="objectives", name=name)
        for name in upref.names()
    ]
    yield from sample(own, 6)
    for case in zoo.ALL:
        # thousands of Python loops in each check: as long as twenty other losses
        yield replace(case, nightly=case.function is zoo.right.python_loops)
    yield from habits.HABITS
    yield from blind_spots.WRONG
    yield from blind_spots.RIGHT
    yield from blind_spots.CAUSES
    yield from blind_spots.NAMED
    yield from advantage_cases()
    yield from causes.CASES
    yield from sample(beyond.ROWS, 2)
    yield from sample(denominators.ROWS, 2, lambda c: c.name in denominators.BY_DAY)
    for name, on, says, body in batch_reading.CASES:
        yield Case(
            loss(body),
            on,
            file="batch_reading",
            name=name,
            verdict=REJECTED,
            says=says,
        )
    yield from style_cases()
    yield from kl_cases()
    yield from logprob_cases()


def advantage_cases():
    """Yield the advantage estimators of the zoo: right ones, then wrong ones."""

    def advantage_case(fn, on, **more):
        name = getattr(fn, "__name__", "object")
        return Case(fn, on, kind="advantages", file="advantages", name=name, **more)

    for fn, on, text in advantages.RIGHT:
        yield advantage_case(fn, on, text=text)
    for fn, on, oracle, says in advantages.WRONG:
        yield advantage_case(fn, on, oracles={oracle}, says=says)


def style_cases():
    """Yield the losses in unusual styles: right ones, then wrong ones of DAPO."""

    def style_case(name, fn, on, hp=None, **more):
        return Case(fn, on, hp or {}, file="styles", name=name, **more)

    for row in styles.RIGHT:
        yield style_case(*row)
    for name, fn, oracle, regime, says in styles.WRONG:
        yield style_case(
            name,
            fn,
            "dapo",
            oracles={oracle},
            regime=regime,
            says=says,
            why=name,
        )


def kl_cases():
    """Yield the KL terms: right ones, then wrong ones. A lambda has its text, or what
    is said of it, as its name.
    """

    def kl_case(fn, of_lambda, **more):
        name = fn.__name__.replace("<lambda>", of_lambda)
        return Case(fn, kind="kl", file="kl", name=name, **more)

    for fn, on, text in kl.RIGHT:
        of_lambda = text.replace(", by position", "") or "plain"
        yield kl_case(fn, of_lambda, objective=on, text=text)
    for fn, on, oracle, says in kl.WRONG:
        yield kl_case(fn, says or oracle, objective=on, oracles={oracle}, says=says)


def logprob_cases():
    """Yield the log-prob functions: right ones, changes of one that stay right or
    become wrong, and wrong ones.
    """
    kept = [
        Case(fn, "", hp, kind="logprobs", file="logprobs", name=name)
        for name, fn, hp in logprobs.RIGHT
    ]
    yield from sample(kept, 2)

    def change(name, fn, hp=None, **more):
        """Return the case of a changed function."""
        hp = hp or {}
        return Case(fn, "", hp, kind="logprobs", file="changes", name=name, **more)

    for row in logprob_changes.RIGHT:
        yield change(*row)
    for name, cause, *row in logprob_changes.WRONG:
        yield change(name, *row, verdict=REJECTED, says=cause)
    for name, fn, hp in logprobs.WRONG:
        yield Case(
            fn,
            "",
            hp,
            kind="logprobs",
            file="logprobs",
            name=name,
            verdict=REJECTED,
            says=logprobs.CAUSE.get(name, ""),
            nightly=bool(re.search(logprobs.LONG, name)),
        )


def every():
    """Return all cases file by file, with names that are unique in their file."""
    files = {}
    for case in (*others(), *written(), *edits()):
        files.setdefault((case.kind, case.file), []).append(case)
    numbered = []
    for cases in files.values():
        numbered += number(cases)
    return numbered


ALL = every()
