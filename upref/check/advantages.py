# SPDX-License-Identifier: Apache-2.0
"""`upref.check_advantages`: is this function of rewards the advantage estimator that it is meant to be?

Expected numbers are exact rationals (upref.check.rationals), on groups that are even, uneven, interleaved, of one
response, of equal rewards. What a name leaves open, ddof and eps, is read off the function and said.
"""

import math
import time
from fractions import Fraction
from typing import Any

import numpy as np

from upref import advantages
from upref.check.oracles import fail, note
from upref.check.rationals import (
    EVEN,
    INTERLEAVED,
    NORMED,
    UNEVEN,
    Batch,
    near,
    rows,
)
from upref.check.report import Finding, Report
from upref.check.reward_case import UNCOUPLED, Case
from upref.check.rewarded import read
from upref.errors import InputError

ORACLES = (
    "values", "uneven-groups", "interleaving", "shift-and-scale", "random", "singletons", "equal-rewards",
    "missing-reward", "permutation", "determinism", "mutation",
)  # fmt: skip
LARGE_EPS = 1e-3  # beside rewards of 0 and 1, whose std is near 1/2

SINGLE = rows("3/4 1 0 1/2 2", "0 1 1 1 2")
EQUAL = rows("1/10 1/10 1/10 1/10 1/10 1/10 1/10 1 0 1", "0 0 0 0 0 0 0 1 1 1")


def check_advantages(fn: Any, estimator: str, *, skip: tuple[str, ...] = (), **hp) -> Report:
    """Whether `fn` is the advantage estimator of that name (upref.advantages): a Report, true where nothing fails.

    fn: `(rewards [N], group [N]) -> A [N]`, by these names, their usual variants or by position; it may take a mask and
    answer with [N, T]; verl's `(token_level_rewards, response_mask, index, ...) -> (adv, returns)`; `(rewards, n)` for
    contiguous groups of n; or a name as for `check`. hp: ddof and eps where the estimator has them; what is not given
    is read off the function and reported. Raises InputError where fn cannot be run at all.
    """
    start = time.perf_counter()
    advantages.get(estimator)
    if unknown := sorted(hp.keys() - ({"ddof", "eps"} if estimator in NORMED else set())):
        raise InputError(f"{estimator} has no setting {unknown[0]!r}.")
    if unknown := sorted(set(skip) - set(ORACLES)):
        raise InputError(f"no oracle is called {unknown[0]!r}: choose from {', '.join(ORACLES)}.")
    rewarded = read(fn, estimator, hp)
    case = _Case(rewarded, estimator, hp)
    found: list[Finding] = []
    ran: dict[str, str] = {}
    for oracle in ORACLES:
        if why := "skipped on request" if oracle in skip else case.not_run(oracle):
            ran[oracle] = why
            continue
        try:
            got = list(getattr(case, oracle.replace("-", "_"))())
        except InputError as e:
            got = [] if case.wrong else [fail(oracle, "on a batch of this oracle", "advantages", str(e))]
        case.wrong |= oracle in ("values", "uneven-groups") and any(f.severity == "failure" for f in got)
        found += got
        ran[oracle] = next((s for s in ("failure", "note") if any(f.severity == s for f in got)), "ok")
    tolerances = {"advantage, relative": case.f.tol}
    shown = {"ddof": case.ddof, "eps": case.eps} if estimator in NORMED and not case.wrong else hp
    seconds = time.perf_counter() - start
    return Report(rewarded.name, estimator, shown, found, case.contract(), ran, tolerances, seconds)


class _Case(Case):
    """One method an oracle."""

    def values(self):
        yield from self.compare("values", "even groups", EVEN)
        if not self.eps or "eps" in self.hp:
            return
        text = f"{self.form} with eps = {self.eps:.3g}"
        if self.eps > LARGE_EPS:
            why = "it shrinks every advantage, most where a group nearly agrees"
            yield fail("values", "the denominator", "an eps that is small beside the std", text, cause=why)
        else:
            yield note("values", f"the denominator is {text}", cause="harmless: small beside the std")

    def uneven_groups(self):
        yield from self.compare("uneven-groups", "groups of 2, 5, 3 and 2", UNEVEN)

    def interleaving(self):
        yield from self.compare("interleaving", "prompts in no order", INTERLEAVED)

    def shift_and_scale(self):
        R, group = EVEN
        yield from self.compare("shift-and-scale", "rewards times 8, plus 16", ([8 * x + 16 for x in R], group))
        small = [x / 1024 for x in R], group
        if self.name in NORMED and (i := self.differs(small)) is not None:
            want, got = self.expected(small)[i], self.f(*small)[i]
            text = "rewards a thousand times smaller: another eps, or a floor under the std"
            yield note("shift-and-scale", text, f"A = {want:.6g}", f"A = {got:.6g}")

    def random(self):
        rng = np.random.default_rng(0)
        for n in range(200):
            N = int(rng.integers(2, 13))
            group = rng.integers(0, max(1, N // 2), N)
            _, group = np.unique(group, return_inverse=True)
            R = [Fraction(int(k), 4) for k in rng.integers(-8, 9, N)]
            b = self._peers((R, group.tolist()))
            if b[0] and (got := list(self.compare("random", f"random batch {n}", b))):
                yield from got
                return

    def _peers(self, b: Batch) -> Batch:
        """Only groups whose rewards differ: the others are the business of two other oracles."""
        groups = {g: {x for x, h in zip(*b, strict=True) if h == g} for g in b[1]}
        keep = [i for i, g in enumerate(b[1]) if len(groups[g]) > 1]
        again = {g: i for i, g in enumerate(dict.fromkeys(b[1][i] for i in keep))}
        return [b[0][i] for i in keep], [again[b[1][i]] for i in keep]

    def singletons(self):
        A = self.f(*SINGLE)
        want = self.expected(SINGLE)
        for i in (0, 4):
            if abs(A[i] - want[i]) <= 1e-6:
                continue
            finite = math.isfinite(A[i])
            make = note if finite and self.name == "leave_one_out" else fail
            if self.wrong and finite:
                return
            raw = finite and abs(A[i] - float(SINGLE[0][i])) < 1e-5
            why = "the reward itself, without a baseline" if raw else "the std of one reward, with G - 1 = 0: NaN"
            said = "0: it has no peer to be better than" if make is fail else "0, or any convention that is finite"
            yield make("singletons", f"a response without a peer, reward {SINGLE[0][i]}", f"A = {said}",
                       f"A = {A[i]:.6g}", cause=why if raw or not finite else "")  # fmt: skip
            return

    def equal_rewards(self):
        regime = "seven equal rewards of 0.1 to one prompt"
        b = EQUAL if not self.f.n else ([Fraction(1, 10)] * 8 + [Fraction(k % 2) for k in range(8)], [0] * 8 + [1] * 8)
        b = b if self.name != "whiten" else ([Fraction(1, 10)] * 7, [0] * 7)
        A, mine = self.f(*b), [i for i, g in enumerate(b[1]) if g == 0]
        off = max((abs(A[i]) if math.isfinite(A[i]) else math.inf) for i in mine)
        if off <= 1e-6 or (self.wrong and math.isfinite(off)):
            return
        if off > 0.05:
            why = (
                "0/0: no eps in the denominator" if off == math.inf else "rounding divided by rounding: eps is missing"
            )
            yield fail("equal-rewards", regime, "A = 0", f"A = {A[mine[0]]:.6g}", self.python(b), why)
        else:
            yield note("equal-rewards", regime, "A = 0", f"A = {off:.2g}", "rounding of the mean, divided by eps")

    def missing_reward(self):
        """NaN may be refused, poison its own prompt, or be left out; it may not be read as a number."""
        R, group = self.batch(EVEN)
        kinds = [math.nan, None] if self.f.kind == "list" else [math.nan]
        for bad in kinds:
            try:
                A = self.f([bad, *R[1:]], group)
            except InputError:
                continue
            whole = self.name in ("whiten", "group_mean_whiten")
            own = [i for i, g in enumerate(group) if i and (g == group[0] or whole)]
            other = [i for i in range(1, len(R)) if i not in own]
            without = ([*R[1:]], [*group[1:]])
            left_out = [0.0, *self.expected(without)] if not self.f.n else []
            now = self.f(R, group)
            if any(not near([A[i]], [now[i]], self.f.tol) for i in other):
                if all(math.isnan(A[i]) for i in (*own, *other) if not near([A[i]], [now[i]], self.f.tol)):
                    yield note("missing-reward", f"one reward is {bad}: all prompts' advantages become NaN")
                    return
                what = "other prompts' advantages change"
            elif all(math.isnan(A[i]) for i in own) or near(A[1:], left_out[1:], 1e-3) or self.name in UNCOUPLED:
                continue
            else:
                zero = self.f([Fraction(0), *R[1:]], group)
                as_zero = near([A[i] for i in own], [zero[i] for i in own], self.f.tol)
                what = "it is read as 0, and so are its peers' baselines" if as_zero else "its peers' advantages change"
            if not self.wrong:
                yield fail("missing-reward", f"one reward is {bad}", "an error, NaN, or the row left out",
                           what, cause="drop or refuse responses without a reward before the baseline")  # fmt: skip
            return

    def permutation(self):
        R, group = self.batch(UNEVEN)
        A = self.f(R, group)
        order = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6]
        B = self.f([R[i] for i in order], [group[i] for i in order])
        if not near([A[i] for i in order], B, 10 * self.f.tol):
            i = max(range(len(order)), key=lambda k: abs(A[order[k]] - B[k]))
            yield fail("permutation", "the responses in another order", f"A = {A[order[i]]:.6g}, as before",
                       f"A = {B[i]:.6g}", self.python(([R[i] for i in order], [group[i] for i in order])),
                       "rows are read by position, as if groups were contiguous or of one size")  # fmt: skip

    def determinism(self):
        b = self.batch(EVEN)
        if not all(near(self.f(*b), self.f(*b), 0.0) for _ in range(3)):
            yield fail("determinism", "the same batch twice", "the same numbers", "other numbers",
                       cause="it draws random numbers or keeps state between calls")  # fmt: skip

    def mutation(self):
        for role in sorted(self.f.mutated):
            yield fail("mutation", f"{role} is changed in place", "inputs left alone", "other numbers after the call",
                       cause="an in-place operation (-=, /=, scores[i] =)")  # fmt: skip
