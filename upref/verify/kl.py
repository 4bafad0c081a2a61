# SPDX-License-Identifier: Apache-2.0
"""`upref.check_kl`: is this function of two log-probabilities the KL estimator that it
is meant to be?

It is compared with upref.kl token by token. On a vocabulary that is small enough to
enumerate, its expected value is compared with the divergence, and its expected gradient
with those of the divergences, on policy and off it. One file: its oracles are short.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref import catalog, kl
from upref.user_code.kl import Term, read
from upref.verify.faults import Fault, first_fitting, known, measured
from upref.verify.faults.kl import Formula
from upref.verify.finding import (
    NO_CAUSE,
    Cause,
    Example,
    Number,
    TokenPlace,
    number_pair,
)
from upref.verify.oracle import Oracle, oracle, run, untouched, validate_names
from upref.verify.report import (
    HARMLESS_IF_DETACHED,
    Finding,
    Report,
    fail,
    not_run,
    note,
    restores_state,
)

# d = log π_ref - log π_θ near 0 and far from it. Every number is exact in float32. The sum
# of NEAR is not 0: else a function that sums over a row would not show.
TINY = 2.0 ** torch.arange(-12, -4, dtype=torch.float64)  # |d| where training starts
NEAR = torch.cat([torch.arange(-24, 33, dtype=torch.float64) / 16, TINY, -TINY])
NEAR = NEAR.sort().values
FAR = torch.tensor(
    [sign * size for size in (2.5, 3, 4, 6, 9, 12, 15, 19, 21, 40) for sign in (1, -1)],
    dtype=torch.float64,
)
# log-probability of the likelier of the two policies, one for each row; the first three
# are those of nearly certain tokens
LEVELS = (0.0, -(2.0**-20), -(2.0**-10), -1.0, -8.0, -30.0)
# the same for a batch of more columns, and of more rows
WIDE = NEAR.repeat(3)[:130]
MANY = (*LEVELS, *LEVELS[:3])
PASTE = "from upref.verify.kl import {}, pair\nlog_prob, ref_log_prob = pair({})"
# each row begins so many places later in d: else a mean over rows would not show
SHIFT = 7
VALUE, GRADIENT = 0, 1  # the places of a value and of a gradient in a pair
# the size that a smaller value or gradient counts as in a relative error. In float32,
# e^d - d - 1 is wrong by up to 1e-7, and its gradient 1 - e^d too.
LEAST_SIZE = {VALUE: 1e-2, GRADIENT: 2e-3}
USUAL_CLAMP = 20  # of d: a clamp there or beyond is a note
# d where a cause must give the numbers of the function, a row each
EVERYWHERE = (NEAR, FAR[FAR.abs() < USUAL_CLAMP])
DIFFERENCE = "log π_ref - log π_θ"
NO_GRADIENT = "no gradient: it is computed under no_grad, or detached"


# ---- a case --------------------------------------------------------------------------
@dataclass
class KlCase:
    """A function beside the estimator that it should be: what the oracles read.

    Attributes:
        term: the function.
        estimator: the name of the estimator.
        failed: the names of the oracles that failed so far.
    """

    term: Term
    estimator: str
    failed: set[str] = field(default_factory=set)

    @property
    def formula(self) -> Formula:
        """The formula of the estimator that the function is compared with.

        Returns:
            A function (log π_θ, log π_ref) -> one number per token.
        """
        return kl.ESTIMATORS[self.estimator]

    def differences(self, d: Tensor, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the expected and the found numbers at each d, and how much they
        differ, [N] each.

        Args:
            d: log π_ref - log π_θ, [N].
            which: VALUE or GRADIENT.
        """
        expected = value_and_slope(self.formula, d)[which]
        found = value_and_slope(self.term, d)[which]
        return expected, found, _relative_error(found, expected, which)

    def cause(self, which: int) -> Cause:
        """Return the cause that gives the numbers of the function near the reference and
        far from it; else one that gives them near the reference, with words that say so;
        else no cause.

        Args:
            which: VALUE where the value is wrong, GRADIENT where the gradient is.
        """
        cause = self._cause_at(EVERYWHERE, which)
        if cause:
            return cause
        near = self._cause_at((NEAR,), which)
        if near:
            return replace(near, words=f"near the reference alone: {near.words}")
        return NO_CAUSE

    def _cause_at(self, points: tuple[Tensor, ...], which: int) -> Cause:
        """Return the first fault that gives both the value and the gradient; else the
        first that gives this one, with words that say so; else a factor or a constant;
        else no cause.

        Args:
            points: the differences at which a cause must fit, as of `same`.
            which: VALUE where the value is wrong, GRADIENT where the gradient is.
        """
        tol = self.term.tol
        without_gradient = Fault(
            NO_GRADIENT,
            lambda lp, ref: self.formula(lp, ref).detach() + 0 * lp,
            id="no-gradient",
        )
        faults = [
            without_gradient,
            *(fault for fault in known("kl") if fault.change is not self.formula),
        ]
        for parts in ((VALUE, GRADIENT), (which,)):
            fits = partial(self._has_fault, parts=parts, points=points)
            fault = first_fitting(faults, fits)
            if fault is None:
                continue
            if len(parts) == 2 or fault is without_gradient:
                return fault.cause
            part = ("value", "gradient")[which]
            return Cause(f"by the {part} alone: {fault.words}", (fault.id,))
        # the factor of one token, and then the constant of one, if all have the same
        expected, found, _ = self.differences(NEAR[-1:], which)
        factor = found.item() / expected.item()
        if same(
            self.term,
            lambda lp, ref: factor * self.formula(lp, ref),
            tol=tol,
            points=points,
        ):
            return measured.ESTIMATOR_SCALED.cause(
                factor=factor, estimator=self.estimator
            )
        expected_values, found_values, _ = self.differences(NEAR, VALUE)
        constant = (found_values - expected_values)[0].item()
        if same(
            self.term,
            lambda lp, ref: self.formula(lp, ref) + constant,
            tol=tol,
            points=points,
        ):
            return measured.CONSTANT_ADDED_TO_ESTIMATOR.cause(
                estimator=self.estimator, constant=constant
            )
        return NO_CAUSE

    def _has_fault(
        self, fault: Fault[Formula], parts: tuple[int, ...], points: tuple[Tensor, ...]
    ) -> bool:
        """Return whether the function has the value or the gradient of a fault, or
        both, at these differences.
        """
        return same(self.term, fault.change, parts, self.term.tol, points)


def pair(d: Tensor, levels: tuple[float, ...] = (-1.0,)) -> tuple[Tensor, Tensor]:
    """Make log-probabilities of two policies that are d apart. The larger of the two is
    the level of its row. Each row begins elsewhere in d.

    Args:
        d: the differences log π_ref - log π_θ, [N].
        levels: R log-probabilities.

    Returns:
        log π_θ and log π_ref, [R, N] each.
    """
    rows = [d.roll(SHIFT * i) for i in range(len(levels))]
    lp = torch.stack(
        [level - row.clamp(min=0) for level, row in zip(levels, rows, strict=True)]
    )
    return lp, lp + torch.stack(rows)


def value_and_slope(
    term: Formula, d: Tensor, levels: tuple[float, ...] = (-1.0,)
) -> tuple[Tensor, Tensor]:
    """Return an estimator's value and its derivative by log π_θ at each d.

    Args:
        term: the estimator.
        d: the differences log π_ref - log π_θ, [N].
        levels: R log-probabilities, as of `pair`.

    Returns:
        Two tensors [R * N], the rows of `pair` one after another, each in the order of
        d.
    """
    lp, ref = pair(d, levels)
    k = term(lp.requires_grad_(), ref)
    gradient = None
    if k.requires_grad:
        (gradient,) = torch.autograd.grad(k.sum(), lp, allow_unused=True)

    def in_order_of_d(rows: Tensor) -> Tensor:
        """Undo the shifts of the rows, [R, N], and join them, [R * N]."""
        return torch.cat([row.roll(-SHIFT * i) for i, row in enumerate(rows)])

    if gradient is None:
        return in_order_of_d(k.detach()), torch.zeros_like(d.repeat(len(levels)))
    return in_order_of_d(k.detach()), in_order_of_d(gradient)


def _relative_error(found: Tensor, expected: Tensor, which: int) -> Tensor:
    """Return the errors of numbers relative to the expected ones; infinite where a
    number is NaN.

    Args:
        found: the numbers.
        expected: what they should be.
        which: VALUE or GRADIENT.
    """
    scale = expected.abs().clamp(min=LEAST_SIZE[which])
    return ((found - expected).abs() / scale).nan_to_num(nan=math.inf)


def same(
    term: Formula,
    other: Formula,
    which: tuple[int, ...] = (VALUE, GRADIENT),
    tol: float = 1e-5,
    points: tuple[Tensor, ...] = (NEAR,),
) -> bool:
    """Tell whether two KL functions have the same numbers.

    Args:
        term: a function (log π_θ, log π_ref) -> one number per token.
        other: another.
        which: VALUE compares values, GRADIENT gradients by log π_θ.
        tol: the relative error that is allowed.
        points: the differences log π_ref - log π_θ at which they are compared: a row
            [N] each.
    """
    for d in points:
        numbers = value_and_slope(term, d)
        other_numbers = value_and_slope(other, d)
        for part in which:
            error = _relative_error(numbers[part], other_numbers[part], part)
            if not error.max() <= tol:
                return False
    return True


# ---- a vocabulary that can be enumerated ---------------------------------------------
LOGITS = torch.tensor([0.3, -0.7, 1.1, 0.0, -1.6], dtype=torch.float64)
REF_LOGITS = torch.tensor([-0.4, 0.5, 0.2, 0.9, -1.0], dtype=torch.float64)
OLD_LOGITS = torch.tensor([0.8, -0.2, 0.1, -0.9, 0.4], dtype=torch.float64)
DIVERGENCES = {
    "reverse": "KL(π_θ ‖ π_ref), the reverse divergence",
    "forward": "KL(π_ref ‖ π_θ), the forward divergence",
    "zero": "nothing: it is 0",
}
NEGATIVES = {
    f"-{name}": f"minus {DIVERGENCES[name]}: it pushes away from the reference"
    for name in ("reverse", "forward")
}


def expectation(term: Formula, off_policy: bool = False) -> tuple[float, Tensor]:
    """Return the expected value E[k] and the expected gradient E[∇k] by the logits of
    π_θ, over samples from π_θ, whose probabilities are constants, or from π_old.

    Args:
        term: the estimator.
        off_policy: whether samples are from π_old.
    """
    theta = LOGITS.clone().requires_grad_()
    lp = theta.log_softmax(0)
    ref = REF_LOGITS.log_softmax(0)
    p = (OLD_LOGITS.log_softmax(0) if off_policy else lp.detach()).exp()
    total = (p * term(lp[None], ref[None])[0]).sum()
    gradient = None
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, theta, allow_unused=True)
    if gradient is None:
        gradient = torch.zeros_like(LOGITS)
    return total.item(), gradient


def divergences() -> dict[str, tuple[float, Tensor]]:
    """Return both divergences with their gradients by the logits of π_θ, and zero.

    Returns:
        (value in nats, gradient by the logits [V]) by "reverse", KL(π_θ ‖ π_ref);
        "forward", KL(π_ref ‖ π_θ); and "zero".
    """
    by_name = {"zero": (0.0, torch.zeros_like(LOGITS))}
    theta = LOGITS.clone().requires_grad_()
    lp = theta.log_softmax(0)
    ref = REF_LOGITS.log_softmax(0)
    # p, q: log-probabilities of the two policies of KL(p ‖ q)
    for name, p, q in (("reverse", lp, ref), ("forward", ref, lp)):
        divergence = (p.exp() * (p - q)).sum()
        (gradient,) = torch.autograd.grad(divergence, theta, retain_graph=True)
        by_name[name] = divergence.item(), gradient
    return by_name


def divergence_of(term: Formula, off_policy: bool = False, tol: float = 1e-5) -> str:
    """Return which divergence has the expected gradient of an estimator.

    Args:
        term: the estimator.
        off_policy: whether samples are from π_old.
        tol: the relative error that is allowed in the estimator's values. Gradients
            must agree to a tenth of it.

    Returns:
        A key of DIVERGENCES or of NEGATIVES; "" for none.
    """
    _, estimator_gradient = expectation(term, off_policy)
    for name, (_, divergence_gradient) in divergences().items():
        if _same_gradient(estimator_gradient, divergence_gradient, tol):
            return name
        if _same_gradient(estimator_gradient, -divergence_gradient, tol):
            return f"-{name}"
    return ""


def _same_gradient(x: Tensor, y: Tensor, tol: float) -> bool:
    """Return whether two expected gradients are equal up to rounding."""
    return torch.allclose(x, y, rtol=tol / 10, atol=tol / 1000)


def _divergence_in_words(key: str) -> str:
    """Return the words for an answer of `divergence_of`."""
    return (DIVERGENCES | NEGATIVES).get(key, "neither divergence")


# ---- the oracles ---------------------------------------------------------------------
def _pointwise(which: int, name: str, what: str) -> Oracle:
    """Make the oracle of the values, or of the gradients, of single tokens.

    Args:
        which: VALUE or GRADIENT.
        name: the name of the oracle.
        what: the words for the number.
    """

    def find(case: KlCase) -> Iterator[Finding]:
        """Yield a failure at the token that differs most."""
        expected, found, errors = case.differences(NEAR, which)
        worst = int(errors.argmax())
        if errors[worst] <= case.term.tol:
            return
        d = NEAR[worst].item()
        _, _, error_alone = case.differences(NEAR[worst : worst + 1], which)
        if error_alone.max() > case.term.tol:
            code = f"log_prob, ref_log_prob = torch.tensor([[-3.0]]), torch.tensor([[{d - 3}]])"
        else:  # the token differs beside others only
            code = PASTE.format("NEAR", "NEAR")
        yield fail(
            name,
            "",
            *number_pair(what, expected[worst].item(), found[worst].item()),
            Example(code=code),
            case.cause(which),
            place=TokenPlace(numbers={DIFFERENCE: d}),
        )

    return Oracle(name, find, needed=True)


@oracle(
    "clamp",
    not_run=lambda case: (
        "wrong near 0 already" if case.failed & {"value", "gradient"} else ""
    ),
)
def clamp(case: KlCase) -> Iterator[Finding]:
    """Compare values and gradients far from the reference.

    Args:
        case: the function and its estimator.

    Yields:
        A failure with the token that differs nearest to the reference, and the clamp as
        its cause if all wrong tokens of a side have one value; a note if it differs at
        USUAL_CLAMP or beyond.
    """
    _, found_values, value_errors = case.differences(FAR, VALUE)
    expected, found, gradient_errors = case.differences(FAR, GRADIENT)
    is_wrong = torch.maximum(value_errors, gradient_errors) > case.term.tol
    if not is_wrong.any():
        return
    # a clamp gives one value to all wrong tokens of a side
    is_clamp = True
    values = []
    for side in (FAR > 0, FAR < 0):
        if not (is_wrong & side).any():
            continue
        of_side = found_values[is_wrong & side]
        values.append(f"{of_side[0].item():.5g}")
        from_first = (of_side - of_side[0]).abs()
        if not (from_first <= case.term.tol * of_side[0].abs()).all():
            is_clamp = False
    nearest = int(is_wrong.nonzero()[0, 0])
    d = FAR[nearest].item()
    if abs(d) >= USUAL_CLAMP:
        make: Callable[..., Finding] = note
        why = "a clamp at 20 or beyond"
    else:
        make = fail
        why = "a clamp that bites"
        if not (found[is_wrong] != 0).any():
            why += ": the tokens furthest from the reference are not pulled back"
        why += f" (its value stays at {' or '.join(dict.fromkeys(values))} there)"
    yield make(
        "clamp",
        "",
        *number_pair("gradient", expected[nearest].item(), found[nearest].item()),
        cause=why if is_clamp else "",
        place=TokenPlace(numbers={DIFFERENCE: d}),
    )


@oracle(
    "rows",
    not_run=lambda case: (
        "wrong in one row already" if case.failed & {"value", "gradient"} else ""
    ),
)
def rows(case: KlCase) -> Iterator[Finding]:
    """Compare on several responses, from tokens of probability 1 to tokens of
    log-probability -30 and below.

    Args:
        case: the function and its estimator.

    Yields:
        A failure with the token that differs most, of values or else of gradients.
    """
    for names, d, levels in (
        ("NEAR, LEVELS", NEAR, LEVELS),
        ("WIDE, MANY", WIDE, MANY),
    ):
        for which, what in enumerate(("value", "gradient by log_prob")):
            expected = value_and_slope(case.formula, d, levels)[which]
            found = value_and_slope(case.term, d, levels)[which]
            errors = _relative_error(found, expected, which)
            if errors.max() > case.term.tol:
                worst = int(errors.argmax())
                row, column = divmod(worst, len(d))
                lp = levels[row] - max(0.0, d[column].item())
                place = TokenPlace(
                    numbers={"log π_θ": lp, "log π_ref": lp + d[column].item()},
                    remark=f"in a batch of {len(levels)} responses of {len(d)} tokens",
                )
                yield fail(
                    "rows",
                    "",
                    *number_pair(what, expected[worst].item(), found[worst].item()),
                    Example(code=PASTE.format(names, names)),
                    place=place,
                )
                return


@oracle("expected-value")
def expected_value(case: KlCase) -> Iterator[Finding]:
    """Compare the mean over samples of π_θ.

    Args:
        case: the function and its estimator.

    Yields:
        A failure with both means, where they differ.
    """
    found_mean, _ = expectation(case.term)
    expected_mean, _ = expectation(case.formula)
    if not abs(found_mean - expected_mean) < case.term.tol / 10:
        if case.estimator == "k2":  # its mean is not the divergence
            expected_number = Number(expected_mean, remark="the mean of k2")
        else:
            divergence, _ = divergences()["reverse"]
            expected_number = Number(divergence, "KL(π_θ ‖ π_ref)")
        yield fail(
            "expected-value",
            "samples of π_θ, five tokens enumerated",
            expected_number,
            Number(found_mean),
        )


def _gradient_in_words(gradient: Tensor) -> str:
    """Return the numbers of a gradient as a list in words."""
    return "[" + ", ".join(f"{x:.4f}" for x in gradient.tolist()) + "]"


@oracle("expected-gradient")
def expected_gradient(case: KlCase) -> Iterator[Finding]:
    """Compare the mean gradient over samples, of π_θ and of another policy.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for each policy where it is not the estimator's, with the divergences
        whose gradients the two are.
    """
    tol = case.term.tol
    for off_policy, where in (
        (False, "samples of π_θ"),
        (True, "samples of another policy"),
    ):
        _, found_gradient = expectation(case.term, off_policy)
        _, right_gradient = expectation(case.formula, off_policy)
        if not _same_gradient(found_gradient, right_gradient, tol):
            right = _divergence_in_words(divergence_of(case.formula, off_policy))
            found = _divergence_in_words(divergence_of(case.term, off_policy, tol))
            yield fail(
                "expected-gradient",
                f"{where}, five tokens enumerated",
                f"{_gradient_in_words(right_gradient)}: that of {right}",
                f"{_gradient_in_words(found_gradient)}: that of {found}",
            )


@oracle("stop-gradient")
def stop_gradient(case: KlCase) -> Iterator[Finding]:
    """Report that a gradient would flow into the log-probabilities of the reference.

    Args:
        case: the function and its estimator.

    Yields:
        A note where one would.
    """
    lp, ref = pair(NEAR)
    k = case.term(lp, ref.requires_grad_())
    if not k.requires_grad:
        return
    (gradient,) = torch.autograd.grad(k.sum(), ref, allow_unused=True)
    if gradient is not None:
        text = "a gradient would flow into ref_log_prob"
        yield note("stop-gradient", text, cause=HARMLESS_IF_DETACHED)


@oracle("determinism")
def determinism(case: KlCase) -> Iterator[Finding]:
    """Report that the same log-probabilities get other numbers the second time.

    Args:
        case: the function and its estimator.

    Yields:
        A failure where they do not.
    """
    once, again = (value_and_slope(case.term, NEAR) for _ in range(2))
    repeats = all(
        torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        for x, y in zip(once, again, strict=True)
    )
    if not repeats:
        yield fail(
            "determinism",
            "the same tokens twice",
            "the same numbers",
            "different numbers",
        )


@oracle("mutation")
def mutation(case: KlCase) -> Iterator[Finding]:
    """Report what the function changes or prints.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for each input that it changes, and a note where it prints.
    """
    yield from untouched(case.term.outcome(*pair(NEAR)))


ORACLES: tuple[Oracle, ...] = (
    determinism,
    _pointwise(VALUE, "value", "value"),
    _pointwise(GRADIENT, "gradient", "gradient by log_prob"),
    rows,
    clamp,
    expected_value,
    expected_gradient,
    stop_gradient,
    mutation,
)


@restores_state
def check_kl(fn: Any, estimator: str, *, skip: tuple[str, ...] = ()) -> Report:
    """Compare value and gradient of a function with a per-token KL estimator of
    upref.kl.

    Args:
        fn: `(log_prob [B, T], ref_log_prob [B, T]) -> [B, T]`, in nats, by these names,
            their usual variants or by position; or a name as for `check`.
        estimator: k1, k2 or k3.
        skip: names of oracles not to run.

    Returns:
        A Report: true if nothing fails. It also names the divergence whose gradient fn
            has in expectation when it is a loss on samples of one token.

    Raises:
        InputError: fn cannot be run.
    """
    start = time.perf_counter()
    if not isinstance(estimator, str) or estimator not in kl.ESTIMATORS:
        raise catalog.unknown_kl(estimator, kl.ESTIMATORS)
    validate_names(ORACLES, skip)
    term = read(fn)
    found, ran = run(ORACLES, KlCase(term, estimator), skip)
    on_policy_words, off_policy_words = (
        _divergence_in_words(divergence_of(term, off_policy, term.tol))
        for off_policy in (False, True)
    )
    assumptions = [
        f"as a loss on samples of π_θ its expected gradient is that of {on_policy_words}",
        f"on samples of another policy it is that of {off_policy_words}; correct them by importance weights",
        "all of this is of one token after a given prefix, not of whole responses",
    ]
    if term.tol > 1e-5:
        assumptions.insert(0, "it computes in float32: compared to 1e-3")
    return Report(
        loss=term.name,
        objective=estimator,
        hp={},
        findings=found,
        read_as=str(term.reading),
        assumptions=assumptions,
        oracles=ran,
        tolerances={"per token, relative": term.tol},
        seconds=time.perf_counter() - start,
        not_checked=not_run(ran),
    )
