# SPDX-License-Identifier: Apache-2.0
"""What the checker says of a loss: the verdict alone, or the whole report with its
causes compared with the search's batches."""

import contextlib
import importlib
import pkgutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch import Tensor

import upref
from upref.errors import InputError
from upref.user_code import read
from upref.verify import oracles
from upref.verify.check import every
from upref.verify.finding import NO_CAUSE
from upref.verify.measure import make_case
from upref.verify.oracle import run

from .batches import Batch
from .styles import Config

SEEN = [
    importlib.import_module(f"{oracles.__name__}.{m.name}")
    for m in pkgutil.iter_modules(oracles.__path__)
]


@dataclass(frozen=True)
class Verdict:
    """accepted: the truth of check's report. said: the first failure. cause: "" or what
    is printed of why.
    """

    accepted: bool
    said: str
    seconds: float = 0.0  # of CPU
    cause: str = ""
    # of a cause that is a change of the objective: yes, no; "" where it is none
    true: str = ""


@contextlib.contextmanager
def without_words() -> Iterator[None]:
    """Patch every oracle to look for no cause and to shrink no batch while the context
    lasts. Neither changes a verdict.
    """
    plain = {
        "explain": lambda *a: None,
        "pattern": lambda *a: NO_CAUSE,
        "bound_of_token": lambda *a: NO_CAUSE,
        "shrink": lambda b, *a: b,
        "example": lambda *a: "",
        "smallest": lambda case, b, at: (b, *at),
    }
    with contextlib.ExitStack() as stack:
        for module in SEEN:
            for name, f in plain.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, f))
        yield


def verdict(loss: Callable, c: Config) -> Verdict:
    """Return the verdict of upref.check up to the first failure: the oracles run one
    after the other. A refusal is no acceptance.
    """
    start = time.process_time()
    try:
        one = read(loss, c.o, dict(c.hp))
        case = make_case(one, c.o, c.all_hp)
    except InputError as e:
        return Verdict(False, f"refused: {e}", time.process_time() - start)
    with without_words():
        for oracle in every():
            found, _ = run([oracle], case)
            failures = [f for f in found if f.severity == "failure"]
            if failures:
                first = failures[0]
                said = f"{first.oracle}: {first.regime}: {first.difference}"
                return Verdict(False, said[:300], time.process_time() - start)
    return Verdict(True, "", time.process_time() - start)


@dataclass
class Watch:
    """What explain answered inside."""

    faults: list = field(default_factory=list)


def whole(loss: Callable, c: Config, held_against: list[Batch]) -> Verdict:
    """Run upref.check itself; return its verdict, and whether the cause that it found
    is true.

    Args:
        loss: the loss.
        c: the objective at its hyperparameters.
        held_against: batches of the search. With the fault that was named put into it,
            the reference must have the loss's gradient on them.

    Of several faults the last that was found counts.
    """
    watch = Watch()

    def watched(explain: Callable) -> Callable:
        """Return an oracle's `explain` that keeps each fault with its case in `watch`."""

        def seen(case, *a):
            fault = explain(case, *a)
            watch.faults.append((fault, case))
            return fault

        return seen

    with contextlib.ExitStack() as stack:
        for module in SEEN:
            if explain := getattr(module, "explain", None):
                patch = mock.patch.object(module, "explain", watched(explain))
                stack.enter_context(patch)
        start = time.process_time()
        try:
            report = upref.check(loss, c.o, **dict(c.hp))
        except InputError as e:
            return Verdict(False, f"refused: {e}", time.process_time() - start)
        seconds = time.process_time() - start
    first = next(iter(report.failures), None)
    cause = next((f.cause for f in report.failures if f.cause), "")
    true = ""
    for fault, case in watch.faults:
        if fault is not None:
            cause, true = fault.words, _holds(fault, case, c, held_against)
    said = f"{first.oracle}: {first.regime}" if first else ""
    return Verdict(bool(report), said[:300], seconds, cause, true)


def _holds(fault, case, c: Config, held_against: list[Batch]) -> str:
    """Return "yes" if the reference with this fault in it has the loss's gradient on
    every batch, else "no".

    Within 3 times what a step of 1e-7 across a bound moves, and 1e-4 relative. Tokens
    with |log r| above 8 are not compared. Where the reference or the loss raises, the
    answer is "no".
    """
    for b in held_against:
        if case.loss.adv_shape != "BT" and not b.one_adv:
            continue
        x = b.of
        rollouts = case.loss.visible_batch(upref.Rollouts.unchecked(
            logp=x["log_prob"], logp_old=x["old_log_prob"], adv=x["advantages"], mask=x["mask"], group=x["group"],
            logp_ref=x["ref_log_prob"], entropy=x["entropy"]))  # fmt: skip
        f = case.factors(rollouts)

        def near(step: float, rollouts: upref.Rollouts) -> Tensor:
            """Return the faulty reference's weights where log π_old is moved."""
            moved = replace(rollouts, logp_old=rollouts.logp_old + step)
            return fault.change.weights(c.o, case.hp, moved)

        try:
            found, want = case.gradient(rollouts) / f, near(0.0, rollouts)
            above, below = near(1e-7, rollouts), near(-1e-7, rollouts)
            edge = (above - want).abs() + (below - want).abs()
        except (InputError, RuntimeError, TypeError):
            return "no"
        A = x["advantages"].abs()
        scale = torch.maximum(torch.maximum(want.abs(), A), torch.tensor(1e-9))
        off = ((found - want).abs() - 3 * edge) / scale
        is_far = (x["log_prob"] - x["old_log_prob"]).abs() > 8
        off = off.masked_fill(~x["mask"] | is_far, 0)
        # NaN is a difference
        if off.nan_to_num(nan=1e9).max() > 1e-4:
            return "no"
    return "yes"
