# SPDX-License-Identifier: Apache-2.0
"""The judge of an exercise: right, or the smallest batch on which it is wrong, the
mistake where it is a known one, and a hint that fits.

A mistake is known if its function (the change of a Fault) gives the student's numbers
on every batch: what is recognized is what was computed, however it was written. Where
none does so, one that gives them on every batch on which the student is wrong, and on
the ones before the first of these, is named with a `perhaps`.

One file: measuring, comparing and naming all work on the same ValueAndGradient.
"""

import math
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.result import Result
from upref.tensors import describe, is_materialized
from upref.user_code.guard import call_guarded
from upref.verify.faults import Fault, fitting
from upref.verify.finding import Number
from upref.verify.render import describe_pair
from upref.verify.report import Finding, short
from upref.verify.shrink import make_rollouts
from upref_course.exercise import Exercise, ExerciseBatch

TOL = 1e-6
NOTHING = "it returns None"


@dataclass(frozen=True)
class ExerciseVerdict(Result):
    """The verdict on a student's function. Truth value: it is right."""

    lesson: int
    title: str
    file: str
    ok: bool
    batch: str = ""  # copyable Python
    shows: str = ""  # what one sees on that batch
    expected: str = ""
    found: str = ""
    mistake: str = ""
    hint: str = ""
    fault_ids: tuple[str, ...] = ()  # of the known faults that the mistake names
    # for which values it is proved on small batches, in words; "" where it is not
    proved_for: str = ""

    def __bool__(self) -> bool:
        return self.ok

    @property
    def proved(self) -> bool:
        """Whether it is proved for the values of `proved_for`."""
        return bool(self.proved_for)

    def data(self) -> dict[str, Any]:
        """Return the fields, and `proved`.

        Returns:
            Their values by name.
        """
        return asdict(self) | {"proved": self.proved}

    def text(self, verbose: bool = False) -> str:
        """Return the verdict, the batch, the mistake and the hint.

        Args:
            verbose: not read: all is printed.

        Returns:
            Lines, without a line break at the end.
        """
        verdict = "not yet"
        if self.ok:
            verdict = "right"
            if self.proved:
                verdict += f", and proved {self.proved_for}"
        lines = [f"lesson {self.lesson}, {self.title}: {verdict}   {self.file}"]
        if self.batch:
            lines += [
                "",
                f"on this batch ({self.shows}):",
                textwrap.indent(self.batch, "    "),
                "",
            ]
        if self.expected:
            lines += [f"expected  {self.expected}", f"found     {self.found}", ""]
        if self.mistake:
            lines.append(_wrapped("mistake   ", self.mistake))
        if self.hint:
            key = "notice    " if self.ok else "hint      "
            lines.append(_wrapped(key, self.hint))
        return "\n".join(lines)

    @property
    def head_style(self) -> str:
        """Return yellow, not red, for an exercise that is not solved yet."""
        return "bold green" if self.ok else "bold yellow"


def _wrapped(key: str, text: str) -> str:
    """Return a key and its text, wrapped and indented under the key."""
    return textwrap.fill(text, 86, initial_indent=key, subsequent_indent=" " * len(key))


# ---- what a function does on a batch -------------------------------------------------
@dataclass(frozen=True)
class ValueAndGradient:
    """Value and gradient, as far as the exercise looks at them; or, in words, why there
    are none.
    """

    value: Any = None
    gradient: Tensor | None = None
    amiss: str = ""


def outcome(
    exercise: Exercise, fn: Callable[..., Any], batch: ExerciseBatch
) -> ValueAndGradient:
    """Run a function on a batch of an exercise, and find the gradient that the exercise
    compares.

    Args:
        exercise: whether it compares values, gradients or both.
        fn: the student's function, the right one or a known mistake.
        batch: its arguments; the function gets copies.

    Returns:
        Its value and gradient, each None where the exercise does not compare it; or, in
        words, why there are none.

    Raises:
        Exception: whatever the function raises.
    """
    inputs: dict[str, Any] = {
        k: v.clone() if isinstance(v, Tensor) else v for k, v in batch.inputs.items()
    }
    if exercise.gradient:
        inputs[exercise.gradient].requires_grad_()
    answer = fn(*inputs.values())
    if answer is None and not exercise.none_is_an_answer:
        return ValueAndGradient(amiss=NOTHING)
    if isinstance(answer, Tensor) and not is_materialized(answer):
        return ValueAndGradient(
            amiss=f"it returns {describe(answer)}, a tensor that does not hold its numbers"
        )
    value = answer.detach() if isinstance(answer, Tensor) else answer
    if not exercise.gradient:
        return ValueAndGradient(value=value)
    if amiss := _why_no_gradient(exercise, answer):
        return ValueAndGradient(amiss=amiss)
    (gradient,) = torch.autograd.grad(
        answer.sum(), inputs[exercise.gradient], allow_unused=True
    )
    if gradient is None:
        return ValueAndGradient(
            amiss=f"the result does not depend on {exercise.gradient}"
        )
    if not exercise.value:  # the gradient alone is compared
        return ValueAndGradient(gradient=gradient)
    return ValueAndGradient(value=value, gradient=gradient)


def _why_no_gradient(exercise: Exercise, answer: Any) -> str:
    """Return in words why an answer has no gradient that can be compared; "" where it
    may have one.
    """
    if not isinstance(answer, Tensor):
        return f"it returns a {type(answer).__name__}, not a tensor: so there is no gradient"
    if answer.numel() != 1 and not exercise.value:
        return f"it returns {answer.numel()} numbers, {list(answer.shape)}: reduce them to one"
    if not answer.requires_grad:
        return (
            "the result has no gradient: it is detached, or does not depend on "
            + exercise.gradient
        )
    return ""


def equal(one: ValueAndGradient, other: ValueAndGradient) -> bool:
    """Tell whether two outcomes have the same numbers.

    Args:
        one: an outcome.
        other: another one, on the same batch.

    Returns:
        True within a tolerance of TOL, relative and absolute; NaN is equal to NaN.
    """
    return (
        one.amiss == other.amiss
        and _same(one.value, other.value)
        and _same(one.gradient, other.gradient)
    )


def _same(x: Any, y: Any) -> bool:
    """Return whether two answers are equal: numbers within TOL and of one shape,
    without axes of length 1; and a text or None, which no tensor can hold, exactly.
    """
    if isinstance(x, str) or isinstance(y, str) or x is None or y is None:
        return x is y or x == y
    try:
        x = torch.as_tensor(x, dtype=torch.float64).squeeze()
        y = torch.as_tensor(y, dtype=torch.float64).squeeze()
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError):
        return False
    return x.shape == y.shape and torch.allclose(
        x, y, rtol=TOL, atol=TOL, equal_nan=True
    )


# ---- the verdict ---------------------------------------------------------------------
def _fields_of_exercise(exercise: Exercise) -> dict[str, Any]:
    """Return the fields of a verdict that name the exercise."""
    return {
        "lesson": exercise.number,
        "title": exercise.title,
        "file": f"{exercise.file}:{exercise.function}",
    }


def judge_hole(exercise: Exercise) -> ExerciseVerdict:
    """Return the verdict on a file as the student got it.

    Args:
        exercise: whose file.
    """
    hint = f"fill the line with `...`; the lesson is {exercise.lesson}."
    return ExerciseVerdict(
        **_fields_of_exercise(exercise),
        ok=False,
        mistake="the hole is still open",
        hint=hint,
    )


def judge_function(exercise: Exercise, fn: Callable[..., Any]) -> ExerciseVerdict:
    """Judge a student's function.

    Args:
        exercise: that it is meant to solve.
        fn: the function.

    Returns:
        The verdict: right, or the first batch on which it is wrong, with the mistake
        where it is a known one.

    Raises:
        InputError: the function raises an error, or ends the program.
    """
    yours = _outcomes_of_student(exercise, fn)
    right = [outcome(exercise, exercise.right, batch) for batch in exercise.batches]
    wrong = []  # the numbers of the wrong batches
    for at, (expected, found) in enumerate(zip(right, yours, strict=True)):
        if not equal(found, expected):
            wrong.append(at)
    if wrong:
        return _judge_wrong_batch(exercise, wrong, right[wrong[0]], yours)
    report = exercise.proof(fn) if exercise.proof else None
    if report is not None and not report:
        return _judge_failed_check(exercise, fn, report.failures[0])
    return ExerciseVerdict(
        **_fields_of_exercise(exercise),
        ok=True,
        hint=exercise.notice,
        proved_for=getattr(report, "proved_for", ""),
    )


def _outcomes_of_student(
    exercise: Exercise, fn: Callable[..., Any]
) -> list[ValueAndGradient]:
    """Return what the student's function does on each batch.

    Raises:
        InputError: the function raises an error, or ends the program; with the batch.
    """
    name = _fields_of_exercise(exercise)["file"]
    outcomes = []
    for batch in exercise.batches:
        run = partial(outcome, exercise, fn, batch)
        try:
            outcomes.append(call_guarded(name, run)[0])
        except InputError as error:
            slips = [told for said, told in SLIPS.items() if said in str(error)]
            slip = slips[0] if slips else ""
            raise InputError(
                f"{slip}{error}, on the batch {_call_as_python(exercise, batch, '; ')}"
            ) from error
    return outcomes


_OF_ONE_ELEMENT = (
    "float(), int(), .item(), the functions of math and a list in torch.tensor() take "
    "tensors of one element: for more there are the functions of torch, such as "
    "torch.exp and torch.stack. "
)
# words of PyTorch, and what is true of every code that raises them
SLIPS = {
    "shape mismatch: value tensor": (
        "what is assigned has another shape than its place: if one side selects "
        "elements, the other must select the same ones. "
    ),
    "Boolean value of Tensor with more than one value": (
        "Python's if, and, or, not, min, max and a < b < c need one truth value, and a "
        "tensor of several elements has none: use torch.where, &, |, ~, torch.minimum "
        "or torch.maximum. "
    ),
    "backward through the graph a second time": (
        "upref finds the gradient: return the loss without .backward() or "
        "torch.autograd.grad() of your own, and without tensors of an earlier call. "
    ),
    "Can't call numpy() on Tensor that requires grad": (
        "numpy has no gradient: compute with torch. "
    ),
    "cannot be converted to Scalar": _OF_ONE_ELEMENT,
    "converted to Python scalars": _OF_ONE_ELEMENT,
}


def _judge_wrong_batch(
    exercise: Exercise,
    wrong: list[int],
    right: ValueAndGradient,
    yours: list[ValueAndGradient],
) -> ExerciseVerdict:
    """Return the verdict on a function that is wrong on a batch of the exercise.

    Args:
        exercise: the exercise.
        wrong: the numbers of the wrong batches.
        right: the right outcome on the first of them.
        yours: the outcomes of the student's function on all batches.
    """
    at = wrong[0]
    batch = exercise.batches[at]
    expected, found = _expected_and_found(exercise, right, yours[at])
    fault, is_sure = _known_mistake(exercise, yours, wrong)
    if fault:
        mistake = fault.words if is_sure else f"perhaps: {fault.words}"
        hint = fault.hint
    else:
        mistake = yours[at].amiss or pattern(right, yours[at])
        hint = exercise.hint(batch, yours[at].value) or _hint_of_place(
            exercise, at, yours[at].amiss
        )
    return ExerciseVerdict(
        **_fields_of_exercise(exercise),
        ok=False,
        batch=_call_as_python(exercise, batch),
        shows=batch.shows,
        expected=expected,
        found=found,
        mistake=mistake,
        hint=hint,
        fault_ids=fault.cause.ids if fault else (),
    )


def _judge_failed_check(
    exercise: Exercise, fn: Callable[..., Any], failure: Finding
) -> ExerciseVerdict:
    """Return the verdict on a function that is right on the batches of the exercise and
    fails `upref check`: with the failure's batch as arguments of the exercise where it
    fits, else as the check shows it.

    Args:
        exercise: the exercise.
        fn: the student's function.
        failure: the first failure of the check.
    """
    about = _fields_of_exercise(exercise)
    if failure.oracle == "dead-hyperparameter":
        return ExerciseVerdict(
            **about,
            ok=False,
            mistake=f"{failure.subject} changes nothing: its value is fixed",
            hint="compute the bounds from the function's arguments.",
        )
    mistake = failure.cause or f"`upref check` fails: {failure.oracle}"
    if shown := _finding_as_exercise(exercise, fn, failure):
        batch, expected, found = shown
        return ExerciseVerdict(
            **about,
            ok=False,
            batch=_call_as_python(exercise, batch, digits=8),
            shows=batch.shows,
            expected=expected,
            found=found,
            mistake=mistake,
            fault_ids=failure.fault_ids,
        )
    hint = ""
    if isinstance(failure.expected, Number) and failure.expected.unit == "weight":
        hint = "a weight is minus the gradient of the loss by lp, times N."
    expected, found = describe_pair(failure.expected, failure.found)
    return ExerciseVerdict(
        **about,
        ok=False,
        batch=failure.batch,
        shows=failure.regime,
        expected=expected,
        found=found,
        mistake=mistake,
        hint=hint,
        fault_ids=failure.fault_ids,
    )


def _finding_as_exercise(
    exercise: Exercise, fn: Callable[..., Any], finding: Finding
) -> tuple[ExerciseBatch, str, str] | None:
    """Return the batch of a finding of `upref check` as arguments of the exercise, with
    what is expected and found; None where these are equal or the batch does not fit.
    """
    example = finding.example
    if not (exercise.arguments and example and example.rollouts and example.inputs):
        return None
    place = replace(finding.place, numbers={}) if finding.place else None
    shows = replace(finding, place=place).regime
    batch = ExerciseBatch(shows, exercise.arguments(make_rollouts(example)))
    try:
        right = outcome(exercise, exercise.right, batch)
        yours, _ = call_guarded(exercise.file, partial(outcome, exercise, fn, batch))
    except InputError:
        return None
    if equal(right, yours):
        return None
    return batch, *_expected_and_found(exercise, right, yours)


def _known_mistake(
    exercise: Exercise, yours: list[ValueAndGradient], wrong: list[int]
) -> tuple[Fault[Callable[..., Any]] | None, bool]:
    """Return the known mistake that gives these numbers on the most batches, and
    whether it gives them on all.

    It has to give them on all wrong batches and on those before the first of them. A
    mistake whose gradients agree only where they are 0 does not count, unless it gives
    the numbers of all batches.

    Args:
        exercise: whose mistakes are tried.
        yours: the outcomes of the student's function on all batches.
        wrong: the numbers of the wrong batches, ascending.

    Returns:
        The mistake; None, and False, where there is none.
    """
    needed = {*range(wrong[0]), *wrong}

    def fit(fault: Fault[Callable[..., Any]]) -> int | None:
        """Return on how many batches the mistake gives these numbers; None where it is
        not known by them.
        """
        alike = []  # of each batch
        is_distinctive = False
        for own, batch in zip(yours, exercise.batches, strict=True):
            is_same = equal(own, outcome(exercise, fault.change, batch))
            alike.append(is_same)
            if is_same and (own.gradient is None or own.gradient.any()):
                is_distinctive = True
        fits_needed = all(alike[at] for at in needed)
        is_known = fits_needed and (is_distinctive or all(alike))
        return sum(alike) if is_known else None

    found = fitting(exercise.faults, fit)
    best_fault, most_alike = max(found, key=lambda pair: pair[1], default=(None, 0))
    return best_fault, most_alike == len(yours)


def _hint_of_place(exercise: Exercise, at: int, amiss: str) -> str:
    """Return a hint that needs no known mistake.

    Args:
        exercise: the exercise.
        at: the number of the first wrong batch.
        amiss: why there is no value or gradient on it, in words; "" where there is one:
            then the hint is what is new on that batch.
    """
    if amiss == NOTHING:
        return "a function that ends without `return` returns None too."
    if "reduce them" in amiss:
        return "a loss is one number: average as the exercise says. The gradient is found by PyTorch, not by you."
    if amiss:
        return (
            f"answer with one number, a tensor made of {exercise.gradient}: "
            ".item(), .tolist(), .detach(), numpy cut that."
        )
    if not at:
        return "this is the smallest batch there is: work it out by hand, with the table of the lesson."
    before = "the smaller batch" if at == 1 else f"the {at} smaller batches"
    return (
        f"you are right on {before}: what is new here is {exercise.batches[at].shows}."
    )


def pattern(right: ValueAndGradient, yours: ValueAndGradient) -> str:
    """Say in words how numbers differ where no known mistake gives them.

    Args:
        right: the outcome of the right function.
        yours: that of the student's function.

    Returns:
        The shape, NaN, zeros, the sign or a constant factor; "" where it is none of
        these.
    """
    zero_gradient = "everything is 0: the gradient cancels, or is cut"
    of_gradient = _pattern_of(right.gradient, yours.gradient, zero_gradient)
    return of_gradient or _pattern_of(right.value, yours.value, "everything is 0")


def _pattern_of(want: Any, got: Any, all_zero: str) -> str:
    """Say in words how the numbers of two tensors differ; "" where they are the same, in
    no way that has words, or one of them is no tensor.

    Args:
        want: the right numbers.
        got: the student's.
        all_zero: the words for a `got` of zeros alone.
    """
    if not (isinstance(want, Tensor) and isinstance(got, Tensor)) or _same(want, got):
        return ""
    if want.shape != got.shape:
        return f"the shape is {list(got.shape)} where it should be {list(want.shape)}"
    if got.isnan().any():
        return "there is a NaN: 0/0, 0 * inf, or something that was masked too late"
    if not got.any():
        return all_zero
    if _same(-want, got):
        return "every sign is the wrong way round"
    factors = (got / want)[want != 0]
    if not factors.numel():
        return ""
    is_constant = torch.allclose(factors, factors[:1].expand_as(factors), rtol=TOL)
    if is_constant and _same(got, want * factors[0]):
        times = factors[0].item()
        digits = 4 if abs(times - 1) > 1e-3 else 8  # four would print 1
        return f"every number is {times:.{digits}g} times what it should be"
    return ""


# ---- in words ------------------------------------------------------------------------
def _expected_and_found(
    exercise: Exercise, right: ValueAndGradient, yours: ValueAndGradient
) -> tuple[str, str]:
    """Return in words what is expected and what was found: the first of gradient and
    value that differs.
    """
    if exercise.gradient and (yours.amiss or not _same(right.gradient, yours.gradient)):
        what = f"gradient by {exercise.gradient} "
        want, got = _numbers(right.gradient, yours.gradient)
        return what + want, yours.amiss or what + got
    want, got = _numbers(right.value, yours.value)
    return "another answer" if exercise.answer_kept_back else want, yours.amiss or got


def _numbers(*values: Any) -> list[str]:
    """Return each value as text, with four digits; with eight where four do not tell
    them apart. Long texts are cut.
    """
    lists = [x.tolist() if isinstance(x, Tensor) else x for x in values]
    texts = [_short(x) for x in lists]
    if len(set(texts)) < len(texts):
        texts = [_short(x, 8) for x in lists]
    return [short(text) for text in texts]


def _short(x: Any, digits: int = 4, depth: int = 9) -> str:
    """Return Python code of a value, with this many digits and levels of lists."""
    if isinstance(x, list):
        if not depth:
            return "..."  # it may hold itself
        return "[" + ", ".join(_short(v, digits, depth - 1) for v in x) + "]"
    if isinstance(x, float):
        text = f"{x + 0.0:.{digits}g}" if math.isfinite(x) else f"float('{x}')"
        return f"{text}.0" if text.lstrip("-").isdigit() else text
    return repr(x)


def _call_as_python(
    exercise: Exercise, batch: ExerciseBatch, between: str = "\n", digits: int = 4
) -> str:
    """Return Python code that calls the exercise's function on a batch: an assignment
    for each argument, then the call, with `between` them.
    """
    statements = []
    for name, value in batch.inputs.items():
        if isinstance(value, Tensor):
            code = f"torch.tensor({_short(value.tolist(), digits)})"
        else:
            code = _short(value, digits)
        statements.append(f"{name} = {code}")
    statements.append(f"{exercise.function}({', '.join(batch.inputs)})")
    return between.join(statements)
