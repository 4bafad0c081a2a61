# SPDX-License-Identifier: Apache-2.0
"""`upref.check_logprobs`: does this function compute log-probabilities and entropies,
and their gradients?
"""

import time
from dataclasses import replace
from typing import Any

import torch

from upref.errors import InputError
from upref.user_code.logprobs import Kernel, Problem, probe, read
from upref.verify.faults.logprobs import solved
from upref.verify.logprobs.oracles import DOUBLE, HALF, ORACLES, SINGLE, KernelCase
from upref.verify.oracle import run, validate_names
from upref.verify.report import Finding, Report, not_run, note, restores_state


@restores_state
def check_logprobs(
    fn: Any,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ranks: int = 1,
    skip: tuple[str, ...] = (),
) -> Report:
    """Check a function that computes log π(o_t), and maybe the entropy H_t, from hidden
    states or from logits.

    Values and gradients are compared with autograd in float64, at several temperatures,
    sizes, layouts and upstream gradients. What merely rounds is a note with the size of
    the error. NaN at logits of -inf, or from masked NaN states, and refusals of an id
    of -100 or of a layout are notes too.

    Args:
        fn: `(hidden [.., T, H], weight [V, H], tokens [.., T],
            temperature)` or `(logits [.., T, V], tokens, temperature)`, by these names,
            their usual variants or by position; or its name. It may take a bias. It
            returns the log-probs in nats, or (log-probs, entropies), one for each
            token.
        softcap: the cap that fn applies to the logits: its argument of that name, or
            built in.
        logit_scale: what fn multiplies the logits by before the cap.
        ranks: also run it in so many gloo processes, each with an equal part of the
            vocabulary (of weight, bias or logits) and the default process group; tokens
            are global ids.
        skip: oracles not to run.

    Returns:
        The Report; true where nothing fails.

    Raises:
        InputError: where fn cannot be run, or answers with other things.
    """
    start = time.perf_counter()
    for name, number in (
        ("softcap", 1.0 if softcap is None else softcap),
        ("logit_scale", logit_scale),
    ):
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not 0 < number < 1e300
        ):
            raise InputError(
                f"{name} must be a finite number > 0, got {repr(number)[:60]}."
            )
    if type(ranks) is not int or not 1 <= ranks <= 16:
        raise InputError(
            f"ranks must be a number of processes from 1 to 16, got {repr(ranks)[:60]}."
        )
    validate_names(ORACLES, skip)
    kernel = read(fn, softcap, logit_scale)
    case, found = choose_tolerances(kernel, ranks)
    if (
        not kernel.flat
        and not _is_right(case)
        and (rows := _of_rows(kernel, ranks)) is not None
    ):
        kernel, case, found = rows
    more, ran = run(ORACLES, case, skip)
    hp = {
        k: v
        for k, v in (("softcap", softcap), ("logit_scale", logit_scale))
        if v not in (None, 1.0)
    }
    took = time.perf_counter() - start
    findings = [*found, *more]
    read_as = str(kernel.reading)
    unchecked = not_run(ran)
    return Report(
        kernel.name,
        "log-probs",
        hp,
        findings,
        read_as,
        _assumed(kernel),
        ran,
        case.tol,
        took,
        not_checked=unchecked,
    )


def _is_right(case: KernelCase) -> bool:
    """Whether it is right on the plain problems of one number each."""
    return not any(
        f.severity == "failure" for f in run(ORACLES[:3], replace(case), ())[0]
    )


def _of_rows(
    kernel: Kernel, ranks: int
) -> tuple[Kernel, KernelCase, list[Finding]] | None:
    """The function read as one of tokens [N], where it is right as such: indexing that
    is meant for rows may accept [B, T] and then answer otherwise."""
    flat = replace(kernel, flat=True)
    try:
        flat = replace(flat, has_entropy="entropy" in flat(probe(flat)).numbers)
        case, found = choose_tolerances(flat, ranks)
    except InputError:
        return None
    if not _is_right(case):
        return None
    flatten = "it is a function of rows: flatten the batch before the call, [B, T, ...] to [N, ...]"
    differs = note(
        "layout",
        "tokens [B, T] get other numbers than the same tokens as [N]",
        cause=flatten,
    )
    return flat, case, [*found, differs]


def choose_tolerances(
    kernel: Kernel, ranks: int = 1
) -> tuple[KernelCase, list[Finding]]:
    """The case with a tolerance per output, from its error on a plain batch, and the
    notes on it.
    """
    p = probe(kernel)
    p = replace(p, g_H=p.g if kernel.has_entropy else None)
    outcome = kernel(p)
    want = solved(p)
    exact = KernelCase(kernel, dict.fromkeys(outcome.numbers, 1.0))
    errors = {
        k: exact.worst_number(p, replace(outcome, numbers={k: v}), want)[0]
        for k, v in outcome.numbers.items()
    }
    tol = {k: DOUBLE if x <= 1e-9 else SINGLE for k, x in errors.items()}
    rough = [k for k, x in errors.items() if SINGLE / 5 < x < HALF / 3]
    if not rough or max(errors.values()) > HALF / 2 or _is_smooth(kernel, p, rough):
        return KernelCase(kernel, tol, ranks), []
    said = ", ".join(f"{k} off by {errors[k]:.1e}" for k in rough)
    return KernelCase(kernel, dict.fromkeys(tol, HALF), ranks), [
        note("values", f"half precision: {said}", cause="rounding")
    ]


def _is_smooth(kernel: Kernel, problem: Problem, names: list[str]) -> bool:
    """Whether these numbers follow a small step of each input as the right ones do:
    then what is off is no rounding.

    What is rounded to half precision, in whole or in part, stands still under such a
    step or jumps by far more.
    """
    turns = torch.Generator().manual_seed(0)
    for name in ("x", "weight"):
        value = getattr(problem, name)
        if value is None:
            continue
        step = STEP * torch.randn(value.shape, generator=turns, dtype=value.dtype)
        neighbors = [
            replace(problem, **{name: value + sign * step}) for sign in (1, -1)
        ]
        found = [kernel(q).numbers for q in neighbors]
        expected = [solved(q).numbers for q in neighbors]
        for key in names:
            change = found[0][key] - found[1][key]
            right = expected[0][key] - expected[1][key]
            if (change - right).abs().max() > LIKE * right.abs().max():
                return False
    return True


# a step below half precision; how near to the right change its change is, relatively
STEP = 1e-5
LIKE = 0.25


def _assumed(kernel: Kernel) -> list[str]:
    """What the comparison has assumed, in words."""
    out = [
        f"it takes tokens [{'N' if kernel.flat else 'B, T'}], given in {str(kernel.dtype).removeprefix('torch.')}"
    ]
    if not kernel.has_entropy:
        out.append("it returns no entropy")
    if "temperature" not in kernel.settings:
        out.append("it takes no temperature: tested only at 1")
    return out
