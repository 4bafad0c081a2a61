# SPDX-License-Identifier: Apache-2.0
"""A foreign advantage function held against an estimator: what is expected, what differs, the smallest batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from upref.check.oracles import fail
from upref.check.rationals import EVEN, NORMED, UNGROUPED, Batch, exact, fit_denominator, parts
from upref.check.report import Finding
from upref.check.reward_causes import cause
from upref.check.rewarded import Rewarded
from upref.errors import InputError

UNCOUPLED = ("reward", "signed")
BINARY = {"signed": lambda b: ([Fraction(int(x > Fraction(1, 2))) for x in b[0]], b[1])}


class Case:
    """A function held against an estimator, its ddof and eps found; one method an oracle."""

    def __init__(self, f: Rewarded, name: str, hp: dict[str, Any]):
        self.f, self.name, self.hp, self.wrong = f, name, hp, False
        self.ddof, self.eps, self.form = hp.get("ddof", 1), hp.get("eps", 0.0), "std + eps"
        if f.choose(lambda: self.fit() is None and self.differs(self.batch(EVEN)) is None):
            self.fit()

    def fit(self) -> str | None:
        """Read ddof, eps and their form off the function; a sentence where none fits."""
        if self.name not in NORMED:
            return None
        R, group = EVEN
        batches = [EVEN, ([8 * x for x in R], group)]  # of two sizes: eps is what does not grow with the std
        A, fits = [a for b in batches for a in self.f(*b)], []
        for ddof in [self.hp["ddof"]] if "ddof" in self.hp else (1, 0):
            each = [parts(self.name, *b, ddof) for b in batches]
            c, var = ([x for part in each for x in part[k]] for k in (0, 1))
            if got := fit_denominator(c, var, A, self.f.tol):
                fits.append((got[2], ddof, got))
        if not fits:
            return "no eps fits"
        _, self.ddof, (self.form, eps, _) = min(fits)
        self.eps = self.hp.get("eps", eps)
        return None

    def contract(self) -> list[str]:
        out = [x for x in self.f.contract if not (self.wrong and "float32" in x)]
        if self.name in NORMED and not self.wrong:
            out.append(
                f"std divides by {'G - 1 (Bessel)' if self.ddof else 'G (population)'}; the denominator is "
                + ("the std alone" if not self.eps else f"{self.form} with eps = {self.eps:.3g}")
            )
        return out

    def not_run(self, oracle: str) -> str:
        if self.f.n and oracle in ("uneven-groups", "interleaving", "random", "singletons", "permutation"):
            return "it takes no group ids: groups are contiguous and of one size"
        if self.name in UNGROUPED and oracle in ("interleaving", "singletons"):
            return f"{self.name} does not read groups"
        if self.wrong and oracle in ("uneven-groups", "interleaving", "shift-and-scale", "random"):
            return "the values are wrong already"
        if self.name in UNCOUPLED and oracle in ("shift-and-scale", "equal-rewards"):
            return f"{self.name} subtracts nothing"
        return ""

    # ---- comparing -----------------------------------------------------------------------------------------------
    def batch(self, b: Batch) -> Batch:
        return BINARY[self.name](b) if self.name in BINARY else b

    def expected(self, b: Batch) -> list[float]:
        return exact(self.name, *b, self.ddof, self.eps, self.form)

    def differs(self, b: Batch, slack: float = 1.0) -> int | None:
        """The row that differs most, if one does beyond the tolerance."""
        want, got = self.expected(b), self.f(*b)
        off = [
            abs(x - y) / max(abs(x), abs(y), 1e-3) if math.isfinite(y) else math.inf
            for x, y in zip(want, got, strict=True)
        ]
        i = max(range(len(off)), key=off.__getitem__)
        return i if off[i] > slack * self.f.tol else None

    def compare(self, oracle: str, regime: str, b: Batch) -> Iterator[Finding]:
        b = self.batch(b)
        try:
            i = self.differs(b)
        except InputError as e:
            yield fail(oracle, regime, "one advantage per response", str(e), self.python(b))
            return
        if i is None:
            return
        whole, b = b, self.shrunk(b, lambda x: self.differs(x) is not None)
        i = self.differs(b)
        assert i is not None
        want, got = self.expected(b)[i], self.f(*b)[i]
        peers = b[1].count(b[1][i])
        text = f"{regime}: response {i}, one of {peers} to its prompt, of {len(b[0])} in the batch"
        yield fail(oracle, text, f"A = {want:.6g}", f"A = {got:.6g}", self.python(b), cause(self, whole))

    def shrunk(self, b: Batch, bad: Callable[[Batch], bool]) -> Batch:
        """Rows dropped while it stays bad, whole groups where the function wants groups of n."""

        def still(x: Batch) -> bool:
            try:
                alone = any(x[1].count(g) == 1 and b[1].count(g) > 1 for g in x[1])  # no new response without a peer
                return not alone and bad(x)
            except InputError:
                return False

        prompts = [[i for i, g in enumerate(b[1]) if g == h] for h in dict.fromkeys(b[1])]
        rows = list(range(len(b[0])))
        for drop in prompts if self.f.n else [*prompts, *([i] for i in reversed(rows))]:
            less = [i for i in rows if i not in drop]
            if less and less != rows and still(([b[0][i] for i in less], [b[1][i] for i in less])):
                rows = less
        return [b[0][i] for i in rows], [b[1][i] for i in rows]

    def python(self, b: Batch) -> str:
        try:
            found = f"\n# found     {_list(self.f(*b))}"
        except InputError:
            found = ""
        lines = [f"rewards = torch.tensor({_list(b[0])}, dtype=torch.float64)", f"group = torch.tensor({list(b[1])})"]
        return "\n".join([*lines, f"# expected  {_list(self.expected(b))}"]) + found


def _list(xs: Sequence) -> str:
    return "[" + ", ".join(f"{float(x):.9g}" for x in xs) + "]"
