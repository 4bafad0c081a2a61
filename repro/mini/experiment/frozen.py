# SPDX-License-Identifier: Apache-2.0
"""The rules that were registered, byte for byte, run on today's records.

A rule is the file rule.py of a closed experiment. It imports modules of its day. Those
that are gone are given to it under their old names, made of this engine's parts: what a
run's number is in the second round, which runs there are, Holm's procedure. What the
rules themselves compute, they compute.

What a rule returns has the types of its own module, and is `Any` here.
"""

import functools
import importlib.util
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

from repro.mini.experiment.plan import MINI, Cell, Plan
from repro.mini.experiment.questions import SHARES, RunRecord, Term, number

# always positive: these may be compared as ratios
POSITIVE = {"kl_base", "kl_old", "grad_norm", "grad_norm_max"}
Known = dict[str, RunRecord]  # name of a run -> record


@dataclass(frozen=True)
class Contrast:
    """A contrast as the second round's rule reads it, in shares and not in points: one
    arm's number, or one minus that of a second arm.

    Attributes:
        arms: one or two.
        metric: as of a Term of questions.py, likewise `at`; set/decoding is its
            `where`.
        more_than: the bound, if the claim is that the contrast is above it.
        less_than: the bound, if the claim is that it is below it.
        within: the bound, if the claim is that its size is below it.
        ratio: logarithms are subtracted.
        effect: the size that was expected, if one was registered.
    """

    arms: tuple[str, ...]
    metric: str
    at: str = "last"
    set: str = "test"
    decoding: str = "top_p_0.7"
    more_than: float | None = None
    less_than: float | None = None
    ratio: bool = False
    within: float | None = None
    effect: float | None = None

    @property
    def bound(self) -> float:
        """The first that is given of more_than, less_than and within."""
        given = (self.more_than, self.less_than, self.within)
        return next(x for x in given if x is not None)


def _value(run: RunRecord, c: Contrast) -> float:
    """Return the number of one run that a contrast is of: a share where it is one."""
    where = f"{c.set}/{c.decoding}"
    scale = 100 if c.metric in SHARES else 1
    return number(run, Term("", "", c.metric, c.at, where)) / scale


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the given order: for the i-th smallest of m
    it is the maximum over j <= i of min(1, (m - j + 1) p_(j)) (Holm 1979).
    """
    adjusted = [0.0] * len(ps)
    worst = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = worst
    return adjusted


@cache
def _rule(name: str) -> ModuleType:
    """Return the module of a registered rule.py, run once with the modules of its day
    in sys.modules; these are restored afterwards.

    Args:
        name: its folder below repro/mini.
    """
    lent: dict[str, ModuleType | SimpleNamespace] = {
        "repro.mini.study.plan": SimpleNamespace(
            POSITIVE=POSITIVE, Contrast=Contrast, Claim=object, Experiment=object
        ),
        "repro.mini.study.results": SimpleNamespace(Record=RunRecord, value=_value),
        "repro.mini.study.stats": SimpleNamespace(holm=holm),
    }
    if name == "registered":  # it builds on the one before
        lent["repro.mini.stale.rule"] = _rule("stale")
    path = MINI / name / "rule.py"
    spec = importlib.util.spec_from_file_location(f"registered_rule_{name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before = {key: sys.modules.get(key) for key in lent}
    sys.modules.update(lent | {spec.name: module})  # type: ignore[arg-type]
    try:
        spec.loader.exec_module(module)
    finally:
        for key, was in before.items():
            if was is None:
                del sys.modules[key]
            else:
                sys.modules[key] = was
    return module


# ---- the second round ----------------------------------------------------------------
def verdicts(plan: Plan, known: Known) -> list[Any]:
    """Return what the second round's rule finds for each claim, in the order of the
    plan.

    Args:
        plan: one of its experiments.
        known: its records, by name.
    """
    runs = plan.main_runs(plan.cells(), plan.main["seeds"], known)
    experiment = SimpleNamespace(
        arms=plan.arms,
        seeds=plan.main["seeds"],
        claims=[_old_claim(table) for table in plan.claims],
        runs=lambda: [(cell.arm, seed, run) for (cell, _, seed), run in runs.items()],
    )
    found: list[Any] = _rule("round2").judge(experiment, known)
    return found


def _old_claim(table: dict[str, Any]) -> SimpleNamespace:
    """Return a claim with its contrasts as that rule reads it, with its defaults."""
    contrasts = [
        Contrast(**contrast | {"arms": tuple(contrast["arms"])})
        for contrast in table.get("contrasts", ())
    ]
    defaults = {"source": "paper", "not_testable": "", "gate": ""}
    return SimpleNamespace(**defaults | table | {"contrasts": contrasts})


# ---- stale data, and UP's controls -----------------------------------------------------
# family, number, arm that is subtracted, group; as in this engine's plan
Key = tuple[str, str, str, str]


def intervals(plan: Plan, known: Known) -> dict[Key, Any]:
    """Return the effects by the registered rule of an experiment with intervals, by
    this engine's names; {} for a plan without such a rule.

    Args:
        plan: "stale", whose rule reads design.toml, or "controls", whose rule reads
            plan.toml.
        known: its records, by name.
    """
    if plan.name == "stale":
        return {_key_of_stale(e): e for e in _of_stale(plan, known)}
    if plan.name == "controls":
        raw = tomllib.loads((plan.folder / "plan.toml").read_text(encoding="utf-8"))
        its_plan = SimpleNamespace(**raw, group=plan.group)
        found = _effects(_rule("registered"), its_plan, plan, known, lambda cell: cell)
        return {(e.family, e.metric, e.other, e.group): e for e in found}
    return {}


def _of_stale(plan: Plan, known: Known) -> list[Any]:
    """Return the effects by the rule of the experiment on stale data."""
    rule = _rule("stale")
    design = tomllib.loads((plan.folder / "design.toml").read_text(encoding="utf-8"))

    def cell_of(cell: Cell) -> Any:
        """Return a cell of this engine as one of the rule."""
        settings = plan.group(cell.group)["settings"]
        old = settings.get("old_log_probs", "sampler")
        return rule.Cell(cell.arm, settings["staleness"], old)

    return _effects(rule, SimpleNamespace(**design), plan, known, cell_of)


def _key_of_stale(e: Any) -> Key:
    """Return the key of an effect of that rule; its group is "" where the rule names no
    staleness.
    """
    group = "" if e.staleness is None else f"s{e.staleness}"
    if e.family == "recomputed":
        group = "recomputed"
    return e.family, e.metric, e.other, group


def _effects(
    rule: ModuleType,
    its_plan: SimpleNamespace,
    plan: Plan,
    known: Known,
    cell_of: Callable[[Cell], Any],
) -> list[Any]:
    """Return a rule's effects of a plan.

    Args:
        rule: the module.
        its_plan: the plan as the rule reads it; its runs and cells are added here.
        plan: the same in this engine, which names the runs.
        known: the records, by name.
        cell_of: a cell of this engine -> one of the rule.
    """
    runs = plan.main_runs(plan.cells(), plan.main["seeds"], known)
    theirs = {(cell_of(cell), b, seed): run for (cell, b, seed), run in runs.items()}

    def runs_of_seeds(cells: Any, seeds: Any, records: Any) -> dict[Any, Any]:
        """Return the runs of these seeds, with the arguments that the rule passes."""
        return {at: run for at, run in theirs.items() if at[2] in seeds}

    its_plan.main_runs = runs_of_seeds
    its_plan.cells = functools.partial(map, cell_of, plan.cells())
    found: list[Any] = rule.effects(its_plan, known)
    return found
