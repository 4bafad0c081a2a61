# SPDX-License-Identifier: Apache-2.0
"""`upref.check_logprobs`: does this function compute log-probabilities and entropies,
and their gradients?
"""

import time
from dataclasses import replace
from typing import Any

import torch

from upref import nucleus
from upref.errors import InputError
from upref.user_code.logprobs import Kernel, Problem, probe, read
from upref.verify.faults.logprobs import solved
from upref.verify.logprobs import cuts
from upref.verify.logprobs.oracles import (
    DOUBLE_TOL,
    HALF_TOL,
    ORACLES,
    SINGLE_TOL,
    KernelCase,
)
from upref.verify.oracle import run, validate_names
from upref.verify.report import Finding, Report, not_run, note, restores_state


@restores_state
def check_logprobs(
    fn: Any,
    *,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ranks: int = 1,
    top_k: int | None = None,
    top_p: float | None = None,
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
        top_k: how many tokens the sampler leaves. fn then computes the log-probabilities
            of `upref.nucleus`: it gets the number if it has an argument `top_k`, and has
            it built in otherwise.
        top_p: the mass of tokens that the sampler leaves, likewise.
        skip: oracles not to run.

    Returns:
        The Report; true where nothing fails.

    Raises:
        InputError: where fn cannot be run, or answers with other things.
    """
    start = time.perf_counter()
    if softcap is not None:
        _require_positive("softcap", softcap)
    _require_positive("logit_scale", logit_scale)
    if type(ranks) is not int or not 1 <= ranks <= 16:
        raise InputError(
            f"ranks must be a number of processes from 1 to 16, got {repr(ranks)[:60]}."
        )
    if top_k is not None or top_p is not None:
        if softcap is not None or logit_scale != 1 or ranks != 1:
            raise InputError(
                "top_k and top_p are checked without softcap, logit_scale and ranks: check these without a cut."
            )
        return _check_nucleus(fn, top_k, top_p, skip)
    validate_names(ORACLES, skip)
    kernel = read(fn, softcap, logit_scale)
    for cut in ("top_k", "top_p"):
        if kernel.needs(cut):
            raise InputError(
                f"{kernel.name} needs {cut}: say what it is, `--hp top_k=20` or `--hp top_p=0.9`, or give it a default."
            )
    case, notes = choose_tolerances(kernel, ranks)
    if not kernel.flat and not _is_right_on_plain_problems(case):
        as_rows = _read_as_rows(kernel, ranks)
        if as_rows is not None:
            kernel, case, notes = as_rows
    oracle_findings, outcomes = run(ORACLES, case, skip)
    hp: dict[str, Any] = {}
    if softcap not in (None, 1.0):
        hp["softcap"] = softcap
    if logit_scale != 1.0:
        hp["logit_scale"] = logit_scale
    seconds = time.perf_counter() - start
    findings = [*notes, *oracle_findings]
    costly = [found for found in findings if found.oracle in COSTLY and _is_note(found)]
    return Report(
        loss=kernel.name,
        objective="log-probs",
        hp=hp,
        findings=findings,
        read_as=str(kernel.reading),
        assumptions=_assumptions(kernel),
        oracles=outcomes,
        tolerances=case.tol,
        seconds=seconds,
        not_checked=[SHIFT, *_not_run(kernel, outcomes)],
        costs="; ".join(found.about for found in costly),
    )


def _require_positive(name: str, number: Any) -> None:
    """Raise InputError for what is no finite number above 0."""
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not 0 < number < 1e300:
        raise InputError(
            f"{name} must be a finite number > 0, got {repr(number)[:60]}."
        )


def _check_nucleus(
    fn: Any, top_k: int | None, top_p: float | None, skip: tuple[str, ...]
) -> Report:
    """Return the report on a function whose sampler cuts the distribution.

    Raises:
        InputError: top_k or top_p is not possible, or the function cannot be read or run.
    """
    start = time.perf_counter()
    # refuses numbers that are not possible
    nucleus.kept(torch.zeros(1), top_k=top_k, top_p=1.0 if top_p is None else top_p)
    validate_names(cuts.ORACLES, skip)
    case = cuts.NucleusCase(read(fn), top_k, top_p)
    notes = cuts.choose_order(case)
    findings, outcomes = run(cuts.ORACLES, case, skip)
    hp = {"top_k": top_k, "top_p": top_p}
    return Report(
        case.kernel.name,
        "log-probs of a cut distribution",
        {name: value for name, value in hp.items() if value is not None},
        [*notes, *findings],
        str(case.kernel.reading),
        _assumptions(case.kernel),
        outcomes,
        {"every number": cuts.TOL},
        time.perf_counter() - start,
        not_checked=[
            SHIFT,
            *_not_run(case.kernel, outcomes),
            "what --as-logprobs checks without a cut: tiles, layouts, peaks, logits of -inf",
        ],
    )


SHIFT = "a shift of the labels in its caller: here the logits of a slot are those of its token"
NO_ENTROPY = "the entropy, which it does not return"
OF_ENTROPY = ("entropy-gradient", "gradients")  # oracles that need it
REFUSE = "`assert not report.costs` in a test refuses it"
# oracles whose notes are of numbers that training uses
COSTLY = ("values", "forbidden")


def _not_run(kernel: Kernel, outcomes: dict[str, str]) -> list[str]:
    """Return what was not run, as items of what a report says nothing about. Oracles of
    an entropy that the function does not return are called by what they need.
    """
    if kernel.has_entropy:
        return not_run(outcomes)
    others = {k: v for k, v in outcomes.items() if k not in OF_ENTROPY}
    return [NO_ENTROPY, *not_run(others)]


def _is_note(finding: Finding) -> bool:
    """Tell whether a finding changes no verdict."""
    return finding.severity == "note"


def _is_right_on_plain_problems(case: KernelCase) -> bool:
    """Tell whether the first three oracles, of plain problems, find no failure."""
    findings, _ = run(ORACLES[:3], replace(case), ())
    return not any(finding.severity == "failure" for finding in findings)


def _read_as_rows(
    kernel: Kernel, ranks: int
) -> tuple[Kernel, KernelCase, list[Finding]] | None:
    """Return the function as one of tokens [N], with its case and notes, where it is
    right as such; else None. Indexing that is meant for rows may accept [B, T] and give
    other numbers.
    """
    flat = replace(kernel, flat=True)
    try:
        flat = replace(flat, has_entropy="entropy" in flat(probe(flat)).numbers)
        case, notes = choose_tolerances(flat, ranks)
    except InputError:
        return None
    if not _is_right_on_plain_problems(case):
        return None
    advice = "it is a function of rows: flatten the batch before the call, [B, T, ...] to [N, ...]"
    differs = note(
        "layout",
        "tokens [B, T] get different numbers from the same tokens as [N]",
        cause=advice,
    )
    return flat, case, [*notes, differs]


def choose_tolerances(
    kernel: Kernel, ranks: int = 1
) -> tuple[KernelCase, list[Finding]]:
    """Return a case with a tolerance for each output, and notes. The tolerance follows
    from the error on a plain problem: float64, float32 or half precision.
    """
    problem = probe(kernel)
    problem = replace(problem, g_H=problem.g if kernel.has_entropy else None)
    outcome = kernel(problem)
    expected = solved(problem)
    exact = KernelCase(kernel, dict.fromkeys(outcome.numbers, 1.0))
    errors = {
        key: exact.worst_number(
            problem, replace(outcome, numbers={key: value}), expected
        )[0]
        for key, value in outcome.numbers.items()
    }
    tol = {
        key: DOUBLE_TOL if error <= 1e-9 else SINGLE_TOL
        for key, error in errors.items()
    }
    rough_outputs = [
        key for key, error in errors.items() if SINGLE_TOL / 5 < error < HALF_TOL / 3
    ]
    is_half_precision = (
        bool(rough_outputs)
        and not max(errors.values()) > HALF_TOL / 2
        and not _is_smooth(kernel, problem, rough_outputs)
    )
    if not is_half_precision:
        return KernelCase(kernel, tol, ranks), []
    errors_in_words = ", ".join(
        f"{key} off by {errors[key]:.1e}" for key in rough_outputs
    )
    return KernelCase(kernel, dict.fromkeys(tol, HALF_TOL), ranks), [
        note(
            "values",
            f"half precision: {errors_in_words}",
            cause=f"rounding; {REFUSE}",
        )
    ]


def _is_smooth(kernel: Kernel, problem: Problem, names: list[str]) -> bool:
    """Tell whether these outputs follow a small step of each input as the right ones
    do: then their error is no rounding.

    An output that is rounded to half precision, in whole or in part, does not change
    under such a step, or jumps by far more.
    """
    generator = torch.Generator().manual_seed(0)
    for name in ("x", "weight"):
        inputs = getattr(problem, name)
        if inputs is None:
            continue
        step = STEP * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
        neighbors = [
            replace(problem, **{name: inputs + sign * step}) for sign in (1, -1)
        ]
        found = [kernel(neighbor).numbers for neighbor in neighbors]
        expected = [solved(neighbor).numbers for neighbor in neighbors]
        for key in names:
            change = found[0][key] - found[1][key]
            expected_change = expected[0][key] - expected[1][key]
            if (
                change - expected_change
            ).abs().max() > LIKE * expected_change.abs().max():
                return False
    return True


STEP = 1e-5  # of an input: below half precision
LIKE = 0.25  # a change is like the expected one up to this relative error


def _assumptions(kernel: Kernel) -> list[str]:
    """Return in words what the comparison assumes of the function."""
    sentences = [
        f"it takes tokens [{'N' if kernel.flat else 'B, T'}], given in {str(kernel.dtype).removeprefix('torch.')}"
    ]
    if not kernel.has_entropy:
        sentences.append("it returns no entropy")
    if "temperature" not in kernel.settings:
        sentences.append("it takes no temperature: tested only at 1")
    return sentences
