# SPDX-License-Identifier: Apache-2.0
"""What is asked of a log-probability function, an oracle each, and why it is wrong where it is.

One file: a catalogue is read as one.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from upref.errors import InputError
from upref.foreign.logprobs import Kernel, Outcome, Problem
from upref.verify.logprobs import problems
from upref.verify.logprobs import ranks as distributed
from upref.verify.logprobs.faults import KNOWN, RIGHT, Fault, in_tiles, solved
from upref.verify.oracle import Oracle, oracle
from upref.verify.report import Finding, apart, fail, note

DOUBLE, SINGLE, HALF = 1e-8, 1e-4, 0.06  # how near is equal, for what computes in float64, float32 and half precision
ONE_ROUNDING, MANY = 2.0, 5.0  # of dW in bfloat16, in errors of rounding the exact one once: a note, a failure


@dataclass
class Case:
    """What the oracles read. tol: by the name of a number."""

    kernel: Kernel
    tol: dict[str, float]
    ranks: int = 1
    failed: set[str] = field(default_factory=set)
    plain: dict[str, tuple[Problem, Outcome]] = field(default_factory=dict)

    @property
    def wrong(self) -> str:
        return "wrong on plain batches already" if self.failed & set(PLAIN) else ""

    def ask(self, words: str) -> tuple[Problem, Outcome]:
        """A plain problem and what the function said, asked once."""
        if words not in self.plain:
            p = problems.plain(self.kernel)[words]
            self.plain[words] = p, self.kernel(p)
        return self.plain[words]

    def off(self, p: Problem, done: Outcome, want: Outcome, least: float = 0.0, rows: Tensor | None = None):
        """(how often the tolerance, name of the number, where, expected, found) of the worst number."""
        worst: tuple[float, str, tuple[int, ...], float, float] = (0.0, "", (), 0.0, 0.0)
        for key, found in done.numbers.items():
            y = want.numbers[key]
            if rows is not None and found.shape == rows.shape:
                found, y = (torch.where(rows, v, 0) for v in (found, y))
            size = 1e-3 if key.startswith("gradient") else 1.0
            size = max([size, *y[y.isfinite()].abs().sort().values[-1:].tolist()])
            gap = torch.where((found == y) | (found.isnan() & y.isnan()), 0, (found - y).abs()).nan_to_num(nan=math.inf)
            if not gap.numel():
                continue
            at = int(gap.argmax())
            times = gap.flatten()[at].item() / size / max(self.tol[key], least)
            if times > worst[0]:
                index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), y.shape))
                worst = (times, key, index, y.flatten()[at].item(), found.flatten()[at].item())
        return worst

    def is_fault(self, f: Fault, p: Problem, done: Outcome, keys: set[str], most: float = 3.0) -> bool:
        if f.inner and keys != {"log-prob"}:
            return False
        rows = torch.arange(p.tokens.shape[-1]).expand_as(p.tokens)
        inner = (rows > 0) & (rows < rows.max()) if f.inner else None
        try:
            part = replace(done, numbers={k: v for k, v in done.numbers.items() if k in keys})
            return self.off(p, part, solved(p, f), rows=inner)[0] <= most
        except (RuntimeError, IndexError):  # a stage that this problem has not
            return False

    def cause(self, p: Problem, done: Outcome, also: tuple[Problem, ...] = ()) -> str:
        """The first known fault that gives the numbers of p and of the plain problems, which the reference does not:
        all of them, else those of one name that is off, a gradient with the values that it belongs to."""
        want, values = solved(p), {"log-prob", "entropy"}
        off = {k: self.off(p, replace(done, numbers={k: v}), want)[0] for k, v in done.numbers.items()}
        asked = [*(self.ask(words) for words in problems.plain(self.kernel)), *((q, self.kernel(q)) for q in also)]
        names = {"": set(done.numbers)} | {k: {k} if k in values else {k, *values} for k, x in off.items() if x > 1}
        for name, keys in names.items():
            most = min(3.0, off[name] / 3 if name else max(off.values()) / 3)
            for f in (*KNOWN, *in_tiles(p)):
                if self.is_fault(f, p, done, keys, most) and all(self._same(f, *one, keys) for one in asked):
                    return f.words + f" (by the {name} alone)" * bool(name and len(done.numbers) > 1)
        return ""

    def _same(self, f: Fault, p: Problem, done: Outcome, keys: set[str]) -> bool:
        # some code cuts tiles above a size alone
        same = {g.words: g for g in in_tiles(p)}.get(f.words, RIGHT)
        here = [f] if f in KNOWN else [RIGHT, same]
        return any(self.is_fault(g, p, done, keys) for g in here)

    def compare(self, name: str, regime: str, p: Problem, done: Outcome | None = None, least: float = 0.0,
                rows: Tensor | None = None, also: tuple[Problem, ...] = ()) -> Iterator[Finding]:  # fmt: skip
        done = self.kernel(p) if done is None else done
        times, key, at, want, found = self.off(p, done, solved(p), least, rows)
        if times > 1:
            said = apart(f"{key}{list(at)} {{}}", want, found)
            why = ""
            with contextlib.suppress(InputError):
                why = self.cause(p, done, also)
            yield fail(name, regime, *said, python(p, self.kernel), why)


def python(p: Problem, k: Kernel) -> str:
    """The problem as Python, where it is small."""
    if p.x.numel() + (0 if p.weight is None else p.weight.numel()) > 40:
        return ""
    rows = {"logits" if p.weight is None else "hidden": p.x, "weight": p.weight, "tokens": p.tokens, "bias": p.bias}
    rows |= {"upstream": p.g, "upstream_entropy": p.g_H}
    dtype = lambda v: "" if v.dtype == torch.int64 else ", dtype=torch.float64"
    lines = [f"{k} = torch.tensor({v.tolist()}{dtype(v)})" for k, v in rows.items() if v is not None]
    return "\n".join([*lines, f"temperature = {p.temperature:g}"])


# ---- plain batches ---------------------------------------------------------------------------------------------------
PLAIN = ("values", "temperature", "gradient", "entropy-gradient", "gradients")


def _plain(name: str) -> Oracle:
    mine = lambda case: [w for w in problems.plain(case.kernel) if w.startswith(f"{name}: ")]

    def look(case: Case) -> Iterable[Finding]:
        for words in mine(case):
            p, done = case.ask(words)
            found = list(case.compare(name, words.partition(": ")[2], p, done))
            if found:
                return found
        return []

    why = "no temperature among its arguments" if name == "temperature" else "it returns no entropy"
    return Oracle(name, look, lambda case: "" if mine(case) else why)


wrong = lambda case: case.wrong


@oracle("tiles", not_run=wrong)
def tiles(case: Case) -> Iterator[Finding]:
    least = 0.0 if max(case.tol.values()) == DOUBLE else 20 * SINGLE  # float32 sums over 131,075 columns
    for N, V, H in problems.TILES:
        p = problems.drawn(case.kernel, N, V, H, 9)
        also = (problems.drawn(case.kernel, 4099, 4, 2, 10),) * (N > 3)
        found = list(case.compare("tiles", f"{N} tokens, {V} ids, hidden size {H}", p, least=least, also=also))
        yield from found
        if found:
            return


@oracle("offset", not_run=lambda case: case.wrong or "it computes in half precision" * (max(case.tol.values()) >= HALF))
def offset(case: Case) -> Iterator[Finding]:
    if case.kernel.softcap is not None:
        return
    least = 0.05 if max(case.tol.values()) > DOUBLE else 1e-6
    asked = {f"{by:+g} added to all logits": problems.offset(case.kernel, by) for by in (3000.0, -3000.0, 90.0, -90.0)}
    asked["+3000 and -3000 added to the logits of one row and the next"] = problems.offset(case.kernel, 3000.0, True)
    for words, p in asked.items():
        yield from case.compare("offset", words, p, least=least, also=tuple(asked.values()))


@oracle("peak", not_run=wrong)
def peak(case: Case) -> Iterator[Finding]:
    for V in (9, 1029):
        for at in (0, V // 2, V - 1):
            regime = f"the logit of token {at} of {V} is 40 above the rest"
            found = list(case.compare("peak", regime, problems.peak(case.kernel, V, at, 40.0)))
            yield from found
            if found:
                return


@oracle("forbidden", not_run=lambda case: case.wrong or "no logit can be -inf" * (not problems.forbidden(case.kernel)))
def forbidden(case: Case) -> Iterator[Finding]:
    p = problems.forbidden(case.kernel)
    assert p is not None
    done = case.kernel(p)
    loud = {k for k, v in done.numbers.items() if v.isnan().any()}
    if loud and "log-prob" not in loud:
        yield note("forbidden", f"a logit is -inf: NaN in the {', '.join(sorted(loud))}", cause="0 times -inf")
        done = replace(done, numbers={k: v for k, v in done.numbers.items() if k not in loud})
    yield from case.compare("forbidden", "two ids have a logit of -inf", p, done)


@oracle("ignored-ids", not_run=wrong)
def ignored(case: Case) -> Iterator[Finding]:
    p, keep = problems.ignored(case.kernel)
    try:
        done = case.kernel(p)
    except InputError as e:
        yield note("ignored-ids", f"ids of -100 are refused: give padding any valid id ({str(e)[:80]})")
        return
    regime = "masked tokens have the id -100 and no upstream gradient"
    yield from case.compare("ignored-ids", regime, p, done, rows=keep)


@oracle("layout", not_run=wrong)
def layout(case: Case) -> Iterator[Finding]:
    for words, p in problems.strided(case.kernel).items():
        try:
            done = case.kernel(p)
        except InputError as e:
            yield note("layout", f"{words} are refused ({str(e)[:120]})")
            continue
        yield from case.compare("layout", words, p, done)


@oracle("repeated-backward", not_run=wrong)
def repeated(case: Case) -> Iterator[Finding]:
    again = case.kernel(problems.drawn(case.kernel), twice=True).again
    if again == "other numbers":
        why = "the backward changes a buffer that it reads"
        yield fail("repeated-backward", "the backward, twice", "the same gradients", "other gradients", cause=why)
    elif again:
        yield note("repeated-backward", f"a second backward is refused ({again[:120]})")


@oracle("frozen", not_run=lambda case: case.wrong or "one input" * (case.kernel.kind == "logits"))
def frozen(case: Case) -> Iterator[Finding]:
    p = problems.drawn(case.kernel, seed=11)
    for name in ("weight", "hidden"):
        yield from case.compare("frozen", f"the {name} needs no gradient", p, case.kernel(p, frozen=name))


@oracle("padding", not_run=wrong)
def padding(case: Case) -> Iterator[Finding]:
    p = problems.drawn(case.kernel, 6, 9, 3, 12)
    keep = torch.tensor([[True, True, True], [True, False, False]])
    cut = lambda u: None if u is None else u * keep
    p = replace(p, g=cut(p.g), g_H=cut(p.g_H))
    want, done = solved(p), case.kernel(replace(p, x=torch.where(keep[..., None], p.x, math.nan)))
    values = {k: torch.where(keep, v, 0) for k, v in done.numbers.items() if v.shape == keep.shape}
    right = Outcome({k: torch.where(keep, want.numbers[k], 0) for k in values})
    times, key, *_ = case.off(p, Outcome(values), right)
    if times > 1:
        yield fail("padding", "NaN in the states of a masked token", f"{key} of other tokens unchanged", "it changes")
    if any(v.isnan().any() for k, v in done.numbers.items() if k == "gradient of weight"):
        why = "NaN in the states of a masked token reaches the gradient of the weight"
        yield note("padding", why, cause="0 times NaN")


@oracle("determinism")
def determinism(case: Case) -> Iterator[Finding]:
    p = problems.drawn(case.kernel)
    one, two = case.kernel(p), case.kernel(p)
    if any(not torch.equal(v.nan_to_num(), two.numbers[k].nan_to_num()) for k, v in one.numbers.items()):
        yield fail("determinism", "the same tokens twice", "the same numbers", "other numbers")


@oracle("mutation")
def mutation(case: Case) -> Iterator[Finding]:
    done = case.kernel(problems.drawn(case.kernel, temperature=0.5 if "temperature" in case.kernel.settings else 1.0))
    for name in sorted(done.wrote):
        yield fail("mutation", f"{name} is changed in place", "inputs left alone", "other numbers after the call")
    if done.printed:
        yield note("mutation", "it prints")


# ---- precision -------------------------------------------------------------------------------------------------------
@oracle("large-vocabulary", not_run=lambda case: case.wrong or "wrong on tiles already" * ("tiles" in case.failed))
def large(case: Case) -> Iterator[Finding]:
    V = 151_936
    worst: dict[str, float] = {}
    for at in (0, V - 1):
        p = problems.peak(case.kernel, V, at, math.log(V) + 2.8, N=4)
        p = replace(p, g=None, g_H=None).to(torch.float32)
        done, want = case.kernel(p), solved(p)
        regime = f"{V:,} ids in float32, token {at} with p near 0.9"
        yield from case.compare("large-vocabulary", regime, p, done, least=0.05)
        for k, v in done.numbers.items():
            worst[k] = max(worst.get(k, 0.0), (v - want.numbers[k]).abs().max().item())
    if said := [f"{k} off by {v:.1e}" for k, v in worst.items() if v > 2e-5]:
        yield note("large-vocabulary", f"{', '.join(said)} in float32 beside a peak at V = {V:,}", cause="rounding")


@oracle("bfloat16", not_run=wrong)
def bfloat16(case: Case) -> Iterator[Finding]:
    p = problems.drawn(case.kernel, 8191, 7, 8, 13)
    p = replace(p, g=torch.ones_like(p.g) if p.g is not None else None, g_H=None)
    p = p.to(torch.bfloat16)
    try:
        done = case.kernel(p)
    except InputError as e:
        yield note("bfloat16", f"bfloat16 is refused ({str(e)[:120]})")
        return
    want = solved(p)
    size = want.numbers["log-prob"].abs().max().item()
    off = {k: (done.numbers[k] - want.numbers[k]).abs().max().item() for k in done.numbers}
    if not max(off["log-prob"], off.get("entropy", 0.0)) / size <= HALF:
        yield from case.compare("bfloat16", "hidden states and weight in bfloat16", p, done, least=HALF)
    elif said := [f"{k} off by {off[k]:.1e}" for k in ("log-prob", "entropy") if off.get(k, 0) > 1e-4]:
        yield note("bfloat16", f"{', '.join(said)} for bfloat16 inputs", cause="rounding")
    if "gradient of weight" in done.numbers:
        exact = want.numbers["gradient of weight"]
        once = (exact.bfloat16().double() - exact).abs().max().item()
        times = off["gradient of weight"] / once
        regime = f"8,191 tokens: dW is off by {times:.1f} times what rounding the exact one once costs"
        if not times <= MANY:
            limit = f"at most {MANY:g} times"
            yield fail("bfloat16", regime, limit, f"{times:.1f} times", cause=_summed(p, done, exact))
        elif times > ONE_ROUNDING:
            yield note("bfloat16", regime, cause="rounding")


def _summed(p: Problem, done: Outcome, exact: Tensor) -> str:
    """Whether adding dW up in bfloat16, n tokens at a time, gives these numbers."""
    assert p.weight is not None
    x, W = p.x.double().flatten(0, 1), p.weight.double()
    bias = 0 if p.bias is None else p.bias.double()
    dx = torch.nn.functional.one_hot(p.tokens.flatten(), len(W)) - (x @ W.T + bias).softmax(-1)
    found = done.numbers["gradient of weight"]
    gaps: dict[int, float] = {}
    for n in (2**k for k in range(11)):
        total = torch.zeros_like(W, dtype=torch.bfloat16)
        for i in range(0, len(x), n):
            total += (dx[i : i + n].T @ x[i : i + n]).bfloat16()
        gaps[n] = (found - total.double()).abs().max().item()
    n = min(gaps, key=gaps.__getitem__)
    like = gaps[n] <= 0.35 * (found - exact).abs().max()
    return f"dW is added up in bfloat16, {n} token{'s' * (n > 1)} at a time" if like else ""


@oracle("ranks", not_run=lambda case: case.wrong or "on one rank" * (case.ranks == 1))
def ranks(case: Case) -> Iterator[Finding]:
    p = problems.drawn(case.kernel, 6, 4 * case.ranks, 3, 14)
    yield from distributed.compared(case.kernel, p, case.ranks, max(SINGLE, *case.tol.values()))


ORACLES: tuple[Oracle, ...] = (
    determinism, *map(_plain, PLAIN), tiles, peak, offset, forbidden, ignored, layout, repeated, frozen, padding,
    mutation, large, bfloat16, ranks,
)  # fmt: skip
