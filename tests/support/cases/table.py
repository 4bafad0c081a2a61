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
    return [
        replace(c, nightly=bool(n % every) and not keep(c)) for n, c in enumerate(cases)
    ]


def number(cases):
    """Return the cases; where several have one name, the position in the list is added
    to it.
    """
    names = [c.name for c in cases]
    return [
        replace(c, name=f"{c.name} {n}") if names.count(c.name) > 1 else c
        for n, c in enumerate(cases)
    ]


def both(name, first):
    """Return (file, row) of a table of the first set, and of the same table of the
    unseen one.
    """
    return [
        (m.__name__.rpartition(".")[2], row)
        for m in (first, unseen)
        for row in getattr(m, name)
    ]


def written():
    """Yield the cases that were written before the checker ran on them: losses, boxes,
    estimators and KL terms. A sample runs by day.
    """
    known, x = (lambda c: c.name in CAUSES), MISSED.get
    lost = [Case(loss(body), on, hp, file=f, name=name, why=why, verdict=REJECTED, says=CAUSES.get(name, ""),
                 xfail=x(name, "")) for f, (name, on, hp, why, body) in both("WRONG", wrong)]  # fmt: skip
    kept = [Case(fn, on, hp, file=f"{f}: right" if f == "unseen" else f, name=name, xfail=x(name, ""))
            for f, (name, on, hp, fn) in both("RIGHT", right)]  # fmt: skip
    named = [Case(loss(body), names, hp, kind="box", file=f"{f}: box" if f == "unseen" else f,
                  name=names.partition(" ")[0] or "none", verdict=NAMED if names else UNKNOWN,
                  xfail=x(names.partition(" ")[0], "")) for f, (names, hp, body) in both("BOXES", boxes)]  # fmt: skip
    estimates = [
        (f, row)
        for f, rows in (("estimators", estimators.CASES), ("unseen", unseen.ESTIMATORS))
        for row in rows
    ]
    made = [Case(fn, on, hp, kind="advantages", file=f, name=name, why=why, verdict=judged(why))
            for f, (name, on, hp, fn, why) in estimates]  # fmt: skip
    terms = [Case(fn, on, kind="kl", file="unseen", name=name, why=why, verdict=judged(why))
             for name, on, fn, why in unseen.KLS]  # fmt: skip
    ends = [Case(loss(body), kind="box", file="unseen: ends", name=says, verdict=ENDS, says=says, text=where)
            for says, where, body in unseen.NEAR]  # fmt: skip
    for cases in (lost, kept, named, made, terms):
        yield from sample(cases, 40, known)
    yield from sample(ends, 5)


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

    wrongs = sorted(public.EDITS, key=lambda r: r[:2] not in public.CAUSES)
    n = len(public.CAUSES)
    for rows, every in ((wrongs[:n], 2), (wrongs[n:], 12)):
        of = [row(*r, REFUSED, "detached") if r[:2] == ("vanilla", "ratio detached") else
              row(*r, REJECTED, public.CAUSES.get(r[:2], "")) for r in rows]  # fmt: skip
        yield from sample(of, every)
    same = [
        row(*r, ACCEPTED)
        for r in [(base, "", []) for base in public.BASES] + public.HARMLESS
    ]
    first = ("grpo, einsum", "preserved, itself")  # the KL term, A / (N r)
    yield from (c for c in same if c.name in first)
    yield from sample([c for c in same if c.name not in first], 7)
    named = [
        Case(public.edited(base, edit), names, hp, kind="box", file="public: box",
             name=f"{base}, {names.partition(' ')[0] or 'none'}", **meant(names))
        for base, edit, names, hp in public.BOXES
    ]  # fmt: skip
    made = [
        Case(public.edited(base, edit), on, hp, kind="advantages", file="public", name=f"{base}, {why or on}", why=why,
             verdict=judged(why))
        for base, edit, on, hp, why in public.ESTIMATORS
    ]  # fmt: skip
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
    # thousands of Python loops in each check: as long as twenty other losses
    yield from (
        replace(c, nightly=c.function is zoo.right.python_loops) for c in zoo.ALL
    )
    yield from (
        *habits.HABITS,
        *blind_spots.WRONG,
        *blind_spots.RIGHT,
        *blind_spots.CAUSES,
        *blind_spots.NAMED,
    )

    def advantage_case(fn, on, **more):
        return Case(
            fn,
            on,
            kind="advantages",
            file="advantages",
            name=getattr(fn, "__name__", "object"),
            **more,
        )

    yield from (advantage_case(fn, on, text=text) for fn, on, text in advantages.RIGHT)
    yield from (
        advantage_case(fn, on, oracles={oracle}, says=says)
        for fn, on, oracle, says in advantages.WRONG
    )
    yield from causes.CASES
    yield from sample(beyond.ROWS, 2)
    yield from sample(denominators.ROWS, 2, lambda c: c.name in denominators.BY_DAY)
    yield from (Case(loss(body), on, file="batch_reading", name=name, verdict=REJECTED, says=says)
                for name, on, says, body in batch_reading.CASES)  # fmt: skip

    def style_case(name, fn, on, hp=None, **more):
        return Case(fn, on, hp or {}, file="styles", name=name, **more)

    yield from (style_case(*row) for row in styles.RIGHT)
    yield from (style_case(name, fn, "dapo", oracles={oracle}, regime=regime, says=says, why=name)
                for name, fn, oracle, regime, says in styles.WRONG)  # fmt: skip

    def kl_case(fn, of, **more):
        return Case(
            fn, kind="kl", file="kl", name=fn.__name__.replace("<lambda>", of), **more
        )

    yield from (
        kl_case(
            fn, text.replace(", by position", "") or "plain", objective=on, text=text
        )
        for fn, on, text in kl.RIGHT
    )
    yield from (
        kl_case(fn, says or oracle, objective=on, oracles={oracle}, says=says)
        for fn, on, oracle, says in kl.WRONG
    )

    def is_long(name):
        return bool(re.search(logprobs.LONG, name))

    kept = [
        Case(fn, "", hp, kind="logprobs", file="logprobs", name=name)
        for name, fn, hp in logprobs.RIGHT
    ]
    yield from sample(kept, 2)

    def logprob_case(name, fn, hp=None, **more):
        return Case(
            fn, "", hp or {}, kind="logprobs", file="changes", name=name, **more
        )

    yield from (logprob_case(*row) for row in logprob_changes.RIGHT)
    yield from (
        logprob_case(name, *row, verdict=REJECTED, says=cause)
        for name, cause, *row in logprob_changes.WRONG
    )
    yield from (Case(fn, "", hp, kind="logprobs", file="logprobs", name=name, verdict=REJECTED,
                     says=logprobs.CAUSE.get(name, ""), nightly=is_long(name))
                for name, fn, hp in logprobs.WRONG)  # fmt: skip


def every():
    files = {}
    for c in (*others(), *written(), *edits()):
        files.setdefault((c.kind, c.file), []).append(c)
    return [c for cases in files.values() for c in number(cases)]


ALL = every()
