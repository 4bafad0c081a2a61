# SPDX-License-Identifier: Apache-2.0
"""How many seeds, before registration: `python -m repro.mini.experiment NAME --power FROM`.

It writes power.md, and runs.sha256, the digest of the names of all runs. FROM is a
finished experiment: a number (of a question, "best/top_p_0.7") is taken to have the same
spread in NAME. Its spread is the root mean square of sd(D), the standard deviation over
seeds of an effect, over the effects on the same number. Nothing is run.
"""

from math import sqrt

import numpy as np
from scipy.stats import t

from repro.mini import files
from repro.mini.experiment import effects, records
from repro.mini.experiment.effects import Look
from repro.mini.experiment.plan import Family, Plan
from upref.errors import InputError
from upref.markdown import table

HEAD = """# Power of {name}

Written by `python -m repro.mini.experiment {name} --power {source}`, before any run. sd(D) is that of {source}, of the mean
over the bases. An interval has the level of its look over the size of its family.

"""
COLUMNS = ("family", "number", "sd(D)", "seeds", "half an interval", "margin", "power")


def spreads(source: Plan) -> dict[str, float]:
    """Return number -> its spread over seeds in a finished experiment.

    Args:
        source: the experiment. Effects of one seed, or out of reach, do not count.
    """
    variances: dict[str, list[float]] = {}
    for e in source.effects(records.load(source.results)):
        if e.n > 1 and e.reached:
            variances.setdefault(e.question.name, []).append(e.sd**2)
    return {name: sqrt(float(np.mean(found))) for name, found in variances.items()}


def rows(family: Family, look: Look, sd: dict[str, float]) -> list[list[object]]:
    """Return a row for each number of a family that has a margin, with COLUMNS.

    Args:
        family: of the plan.
        look: at how many seeds, and at which level.
        sd: number -> its spread.

    Raises:
        InputError: the spread of a number is not known.
    """
    level = look.level / len(family.questions)
    margins = {q.name: q.margin for q in family.questions if q.margin}
    found: list[list[object]] = []
    for name, margin in margins.items():
        if name not in sd:
            raise InputError(
                f"there is no effect on {name} whose spread could be taken."
            )
        quantile = float(t.ppf(1 - level / 2, look.seeds - 1))
        half = quantile * sd[name] / sqrt(look.seeds)
        power = effects.power(margin, sd[name], look.seeds, level)
        numbers = [f"{sd[name]:.2f}", look.seeds, f"{half:.2f}", f"{margin:g}"]
        found.append([family.name, name, *numbers, f"{power:.2f}"])
    return found


def text(plan: Plan, source: Plan) -> str:
    """Return the text of power.md.

    Args:
        plan: with looks.
        source: a finished experiment with the same numbers.

    Raises:
        InputError: the plan has no looks, or the source lacks a number.
    """
    if not plan.stopping:
        raise InputError(f"{plan.name} has no [stopping]: it has no looks to plan for.")
    sd = spreads(source)
    looks = plan.looks({})
    body = [row for f in plan.families for look in looks for row in rows(f, look, sd)]
    head = HEAD.format(name=plan.name, source=source.name)
    return head + table(COLUMNS, body) + "\n"


def write(plan: Plan, source: Plan) -> None:
    """Write power.md and runs.sha256 beside the plan.

    Args:
        plan: not registered yet.
        source: as for `text`.

    Raises:
        InputError: it is registered already.
    """
    if (plan.folder / "registration.json").exists():
        raise InputError(f"{plan.name} is registered: its power.md stays as it is.")
    files.write_atomically(plan.folder / "power.md", text(plan, source).encode())
    digest = plan.digest() + "\n"
    files.write_atomically(plan.folder / "runs.sha256", digest.encode())
