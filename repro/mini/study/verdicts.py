# SPDX-License-Identifier: Apache-2.0
"""The decision rule, the same for every experiment and written before any run.

A contrast holds where its whole 95 % interval (t, paired by seed) lies on the claimed side of its bound.
A claim is all its contrasts at once, so its p is their largest; Holm corrects over the claims of an experiment.

    reproduced             corrected p of the claim < 0.05
    partly                 not that, but some contrast holds after Holm over the contrasts of the claim
    not reproduced         neither; "refuted" is added where some contrast's whole interval lies on the other side of
                           the bound, "undecided" where none does: the seeds at hand cannot tell
    not testable here      the miniature has nothing that corresponds
    not finished           some of its seeds are still to run: what they say so far is shown, but it is no verdict

Every finished seed counts; none is left out. A ratio below 1/1000 counts as 1/1000, because a policy that earns nothing
at all has no logarithm (added when the first run did so; it can only widen an interval).
"""

from dataclasses import asdict, dataclass
from typing import Any

from repro.mini.study.plan import Claim, Contrast, Experiment
from repro.mini.study.results import Record, value
from repro.mini.study.stats import Effect, effect, holm

ALPHA = 0.05
LEAST = 1e-3  # of a ratio


@dataclass(frozen=True)
class Finding:
    """One contrast and what the seeds say of it; None where no seed has finished."""

    contrast: Contrast
    effect: Effect | None
    p: float = 1.0  # Holm over the contrasts of the claim

    @property
    def refuted(self) -> bool:
        e, c = self.effect, self.contrast
        return e is not None and (e.high < c.bound if c.side > 0 else e.low > c.bound)


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    word: str
    why: str
    findings: tuple[Finding, ...]
    p: float = 1.0  # Holm over the claims of the experiment
    seeds: int = 0
    of: int = 0

    def json(self) -> dict[str, Any]:
        found = [
            _of_round_1(f.contrast) | {"effect": asdict(f.effect) if f.effect else None, "p_holm": f.p}
            for f in self.findings
        ]
        c = self.claim
        head = {"id": c.id, "figure": c.figure, "says": c.says, "source": c.source}
        return head | {"verdict": self.word, "why": self.why, "p_holm": self.p, "seeds": self.seeds, "of": self.of,
                       "contrasts": found}  # fmt: skip


def _of_round_1(c: Contrast) -> dict[str, Any]:
    return {k: v for k, v in asdict(c).items() if k not in ("within", "effect")}


def judge(e: Experiment, records: dict[str, Record]) -> list[Verdict]:
    """A verdict for each claim of the experiment."""
    runs = {(arm, seed): records.get(s.key) for arm, seed, s in e.runs()}
    found = {c.id: _findings(c, runs, e.seeds) for c in e.claims}
    testable = [c.id for c in e.claims if found[c.id] and all(f.effect for f in found[c.id])]
    raw = [max(f.effect.p for f in found[i] if f.effect) for i in testable]
    corrected = dict(zip(testable, holm(raw), strict=True))
    return [_verdict(c, found[c.id], corrected.get(c.id, 1.0), len(e.seeds)) for c in e.claims]


def _findings(claim: Claim, runs, seeds) -> tuple[Finding, ...]:
    effects = [_effect(c, runs, seeds) for c in claim.contrasts]
    corrected = holm([e.p if e else 1.0 for e in effects])
    return tuple(Finding(*x) for x in zip(claim.contrasts, effects, corrected, strict=True))


def _effect(c: Contrast, runs, seeds) -> Effect | None:
    values = []
    for seed in seeds:
        pair = [runs[arm, seed] for arm in c.arms]
        if any(r is None for r in pair):
            continue
        x = [value(r, c) for r in pair]
        if c.ratio:
            values.append(max(LEAST, x[0] / x[1] if len(x) == 2 else x[0]))
        else:
            values.append(x[0] - x[1] if len(x) == 2 else x[0])
    return effect(values, c.bound, c.side, c.ratio) if values else None


def _verdict(claim: Claim, found: tuple[Finding, ...], p: float, of: int) -> Verdict:
    if claim.not_testable:
        return Verdict(claim, "not testable here", claim.not_testable, ())
    seeds = min(f.effect.n if f.effect else 0 for f in found)
    if seeds < of:
        return Verdict(claim, "not finished", f"{seeds} of {of} seeds so far", found, p, seeds, of)
    held, against = sum(f.p < ALPHA for f in found), sum(f.refuted for f in found)
    share = f"{held} of {len(found)} contrasts hold"
    if p < ALPHA:
        word, why = "reproduced", "every contrast holds"
    elif held:
        word, why = "partly", share if held < len(found) else "it holds, but not after correction over the claims"
    else:
        word, why = "not reproduced", "undecided" if not against else "refuted"
    if held and against:
        why += f", {against} are refuted"
    return Verdict(claim, word, why, found, p, seeds, of)
