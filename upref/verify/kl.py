# SPDX-License-Identifier: Apache-2.0
"""`upref.check_kl`: is this function of two log-probabilities the KL estimator that it
is meant to be?

Token by token against upref.kl, and over a vocabulary small enough to be enumerated:
the expected value against the
divergence, and the expected gradient against theirs, on policy and off it. One file:
its oracles are short.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from upref import catalog, kl
from upref.user_code.kl import Term, read
from upref.verify.faults import Fault, known, measured
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
from upref.verify.report import Finding, Report, fail, not_run, note, restores_state

# d = log π_ref - log π_θ; every number is exact in float32,
# and their sum is not 0, which would hide a sum over a row
NEAR = torch.arange(-24, 33, dtype=torch.float64) / 16
FAR = torch.tensor(
    [s * x for x in (2.5, 3, 4, 6, 9, 12, 15, 19, 21, 40) for s in (1, -1)],
    dtype=torch.float64,
)
# log-probabilities of the likelier policy, a row each; those of a nearly certain token
# lie between 0 and -1
LEVELS = (0.0, -(2.0**-20), -(2.0**-10), -1.0, -8.0, -30.0)
# more columns, and more rows
WIDE = NEAR.repeat(3)[:130]
MANY = (*LEVELS, *LEVELS[:3])
PASTE = "from upref.verify.kl import {}, pair\nlog_prob, ref_log_prob = pair({})"
SHIFT = 7  # places by which rows differ, else a mean over rows shows nothing
DIFFERENCE = "log π_ref - log π_θ"
GONE = "no gradient: it is computed under no_grad, or detached"
CONSTANTS = "harmless as long as callers pass them without requires_grad; add .detach() to be safe"


# ---- a case --------------------------------------------------------------------------
@dataclass
class KlCase:
    """What the oracles read."""

    term: Term
    estimator: str
    failed: set[str] = field(default_factory=set)

    @property
    def right(self) -> Formula:
        """The formula of the estimator that the function is compared with.

        Returns:
            A function (log π_θ, log π_ref) -> one number per token.
        """
        return kl.ESTIMATORS[self.estimator]

    def differences(self, d: Tensor, which: int) -> tuple[Tensor, Tensor, Tensor]:
        """(expected, found, by how much they differ) at each d, of the value (0) or of
        the gradient (1).

        Args:
            d: log π_ref - log π_θ, [N].
            which: 0 for the value, 1 for the gradient.
        """
        want = value_and_slope(self.right, d)[which]
        found = value_and_slope(self.term, d)[which]
        return want, found, _relative_error(found, want)

    def cause(self, which: int) -> Cause:
        """The first fault that gives both value and gradient, else, in so many words,
        this one; "" where none does.

        Args:
            which: 0 where the value is wrong, 1 where the gradient is.
        """
        gone = Fault(
            GONE,
            lambda lp, ref: self.right(lp, ref).detach() + 0 * lp,
            id="no-gradient",
        )
        for parts in ((0, 1), (which,)):
            for fault in (gone, *known("kl")):
                if fault.change is not self.right and same(
                    self.term, fault.change, parts, self.term.tol
                ):
                    if len(parts) == 2 or fault is gone:
                        return fault.cause
                    part = ("value", "gradient")[which]
                    words = f"by the {part} alone: {fault.words}"
                    return Cause(words, (fault.id,))
        k = (
            value_and_slope(self.term, NEAR[-1:])[which].item()
            / value_and_slope(self.right, NEAR[-1:])[which].item()
        )
        scaled = same(
            self.term, lambda lp, ref: k * self.right(lp, ref), tol=self.term.tol
        )
        c = (
            value_and_slope(self.term, NEAR)[0] - value_and_slope(self.right, NEAR)[0]
        )[0].item()
        raised = same(
            self.term, lambda lp, ref: self.right(lp, ref) + c, tol=self.term.tol
        )
        if scaled:
            return measured.ESTIMATOR_SCALED.cause(factor=k, estimator=self.estimator)
        if raised:
            return measured.CONSTANT_ADDED_TO_ESTIMATOR.cause(
                estimator=self.estimator, constant=c
            )
        return NO_CAUSE


def pair(d: Tensor, levels: tuple[float, ...] = (-1.0,)) -> tuple[Tensor, Tensor]:
    """Log-probabilities [R, N] that are d apart: the larger of the two is a level; each
    row begins elsewhere in d.

    Args:
        d: the differences, [N].
        levels: R log-probabilities.

    Returns:
        log π_θ and log π_ref.
    """
    rows = [d.roll(SHIFT * i) for i in range(len(levels))]
    lp = torch.stack(
        [level - x.clamp(min=0) for level, x in zip(levels, rows, strict=True)]
    )
    return lp, lp + torch.stack(rows)


def value_and_slope(
    term: Formula, d: Tensor, levels: tuple[float, ...] = (-1.0,)
) -> tuple[Tensor, Tensor]:
    """Value and d/dlp at each d; of several levels, those of each level after another.

    Args:
        term: the estimator.
        d: the differences, [N].
        levels: as of `pair`.
    """
    lp, ref = pair(d, levels)
    k = term(lp.requires_grad_(), ref)
    if k.requires_grad:
        (gradient,) = torch.autograd.grad(k.sum(), lp, allow_unused=True)
    else:
        gradient = None

    def in_order(x: Tensor) -> Tensor:
        """The rows as one, each from its first place in d."""
        return torch.cat([row.roll(-SHIFT * i) for i, row in enumerate(x)])

    if gradient is None:
        return in_order(k.detach()), torch.zeros_like(d.repeat(len(levels)))
    return in_order(k.detach()), in_order(gradient)


def _relative_error(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y).abs() / y.abs().clamp(min=1e-2)).nan_to_num(nan=math.inf)


def same(
    term: Formula, other: Formula, which: tuple[int, ...] = (0, 1), tol: float = 1e-5
) -> bool:
    """Tell whether two KL functions have the same numbers near the reference.

    Args:
        term: a function (log π_θ, log π_ref) -> one number per token.
        other: another.
        which: 0 compares values, 1 gradients by log π_θ.
        tol: the relative error that is allowed.
    """
    return all(
        bool(
            _relative_error(
                value_and_slope(term, NEAR)[i], value_and_slope(other, NEAR)[i]
            ).max()
            <= tol
        )
        for i in which
    )


# ---- a vocabulary that can be enumerated ---------------------------------------------
LOGITS = torch.tensor([0.3, -0.7, 1.1, 0.0, -1.6], dtype=torch.float64)
REF = torch.tensor([-0.4, 0.5, 0.2, 0.9, -1.0], dtype=torch.float64)
OLD = torch.tensor([0.8, -0.2, 0.1, -0.9, 0.4], dtype=torch.float64)
DIVERGENCES = {
    "reverse": "KL(π_θ ‖ π_ref), the reverse divergence",
    "forward": "KL(π_ref ‖ π_θ), the forward divergence",
    "zero": "nothing: it is 0",
}


def expected(term: Formula, off_policy: bool = False) -> tuple[float, Tensor]:
    """E[k] and E[∇_θ k] over the logits θ, samples from π_θ (held fixed) or from π_old.

    Args:
        term: the estimator.
        off_policy: samples are from π_old.
    """
    theta = LOGITS.clone().requires_grad_()
    lp = theta.log_softmax(0)
    ref = REF.log_softmax(0)
    p = (OLD.log_softmax(0) if off_policy else lp.detach()).exp()
    total = (p * term(lp[None], ref[None])[0]).sum()
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, theta, allow_unused=True)
    else:
        gradient = None
    return total.item(), torch.zeros_like(LOGITS) if gradient is None else gradient


def divergences() -> dict[str, tuple[float, Tensor]]:
    """Both divergences with their gradients over θ, and zero.

    Returns:
        (value in nats, gradient by the logits [V]) by "reverse", KL(π_θ ‖ π_ref);
        "forward", KL(π_ref ‖ π_θ); and "zero".
    """
    out = {"zero": (0.0, torch.zeros_like(LOGITS))}
    theta = LOGITS.clone().requires_grad_()
    lp = theta.log_softmax(0)
    ref = REF.log_softmax(0)
    for name, p, q in (("reverse", lp, ref), ("forward", ref, lp)):
        d = (p.exp() * (p - q)).sum()
        out[name] = d.item(), torch.autograd.grad(d, theta, retain_graph=True)[0]
    return out


def divergence_of(term: Formula, off_policy: bool = False, tol: float = 1e-5) -> str:
    """A key of DIVERGENCES, `-reverse` for its negative, or "" where the expected
    gradient is that of none.

    Args:
        term: the estimator.
        off_policy: samples are from π_old.
        tol: the relative error that is allowed.
    """
    _, gradient = expected(term, off_policy)
    signed = (
        (sign, name, want)
        for name, (_, want) in divergences().items()
        for sign in ("", "-")
    )
    return next(
        (
            sign + name
            for sign, name, want in signed
            if _alike(gradient, -want if sign else want, tol)
        ),
        "",
    )


def _alike(x: Tensor, y: Tensor, tol: float) -> bool:
    return torch.allclose(x, y, rtol=tol / 10, atol=tol / 1000)


def _words(key: str) -> str:
    said = DIVERGENCES.get(key.removeprefix("-"), "neither divergence")
    if key.startswith("-"):
        return f"minus {said}: it pushes away from the reference"
    return said


# ---- the oracles ---------------------------------------------------------------------
def _pointwise(which: int, name: str, what: str) -> Oracle:
    """The oracle of the values (which = 0) or of the slopes (1) on single tokens."""

    def look(case: KlCase) -> Iterator[Finding]:
        """A failure at the token that differs most."""
        want, found, errors = case.differences(NEAR, which)
        i = int(errors.argmax())
        if errors[i] > case.term.tol:
            d = NEAR[i].item()
            right_pair, found_pair = (
                value_and_slope(f, NEAR[i : i + 1])[which]
                for f in (case.right, case.term)
            )
            # else it shows beside other tokens only
            alone = _relative_error(found_pair, right_pair).max() > case.term.tol
            single = f"log_prob, ref_log_prob = torch.tensor([[-3.0]]), torch.tensor([[{d - 3:.4f}]])"
            code = single if alone else PASTE.format("NEAR", "NEAR")
            both_numbers = number_pair(what, want[i].item(), found[i].item())
            place = TokenPlace(numbers={DIFFERENCE: d})
            yield fail(
                name,
                "",
                *both_numbers,
                Example(code=code),
                case.cause(which),
                place=place,
            )

    return Oracle(name, look)


@oracle(
    "clamp",
    not_run=lambda case: (
        "wrong near 0 already" if case.failed & {"value", "gradient"} else ""
    ),
)
def clamp(case: KlCase) -> Iterator[Finding]:
    """Values and gradients far from the reference are those of the estimator.

    Args:
        case: the function and its estimator.

    Yields:
        A failure with the first token that differs, and what clamps it.
    """
    (_, held, value), (want, found, slope) = (
        case.differences(FAR, 0),
        case.differences(FAR, 1),
    )
    bad = torch.maximum(value, slope) > case.term.tol
    sides = [held[bad & side] for side in (FAR > 0, FAR < 0) if (bad & side).any()]
    clamped = all(
        bool(((x - x[0]).abs() <= case.term.tol * x[0].abs()).all()) for x in sides
    )
    for i in bad.nonzero()[:1, 0].tolist():
        d = FAR[i].item()
        numbers = number_pair("gradient", want[i].item(), found[i].item())
        pulled = bool((found[bad] != 0).any())
        bites = "a clamp that bites"
        if not pulled:
            bites += ": the tokens furthest from the reference are not pulled back"
        make, why = (fail, bites) if abs(d) < 20 else (note, "a clamp at 20 or beyond")
        yield make(
            "clamp",
            "",
            *numbers,
            cause=why if clamped else "",
            place=TokenPlace(numbers={DIFFERENCE: d}),
        )


@oracle(
    "rows",
    not_run=lambda case: (
        "wrong in one row already" if case.failed & {"value", "gradient"} else ""
    ),
)
def rows(case: KlCase) -> Iterator[Finding]:
    """Several responses, from tokens of probability 1 to tokens of log-probability -30
    and below.

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
            want = value_and_slope(case.right, d, levels)[which]
            found = value_and_slope(case.term, d, levels)[which]
            errors = _relative_error(found, want)
            if errors.max() > case.term.tol:
                at = int(errors.argmax())
                row, column = divmod(at, len(d))
                lp = levels[row] - max(0.0, d[column].item())
                numbers = {"log π_θ": lp, "log π_ref": lp + d[column].item()}
                place = TokenPlace(
                    numbers=numbers,
                    remark=f"in a batch of {len(levels)} responses of {len(d)} tokens",
                )
                both_numbers = number_pair(what, want[at].item(), found[at].item())
                yield fail(
                    "rows",
                    "",
                    *both_numbers,
                    Example(code=PASTE.format(names, names)),
                    place=place,
                )
                return


@oracle("expected-value")
def expected_value(case: KlCase) -> Iterator[Finding]:
    """The mean over samples of π_θ is that of the estimator.

    Args:
        case: the function and its estimator.

    Yields:
        A failure with both means, where they differ.
    """
    got, _ = expected(case.term)
    want, _ = expected(case.right)
    if not abs(got - want) < case.term.tol / 10:
        target = divergences()["reverse"][0]
        expected_number = Number(target, "KL(π_θ ‖ π_ref)")
        if case.estimator == "k2":
            expected_number = Number(want, remark="the mean of k2")
        yield fail(
            "expected-value",
            "samples of π_θ, five tokens enumerated",
            expected_number,
            Number(got),
        )


def _listed(gradient: Tensor) -> str:
    """The numbers of a gradient in words."""
    return "[" + ", ".join(f"{x:.4f}" for x in gradient.tolist()) + "]"


@oracle("expected-gradient")
def expected_gradient(case: KlCase) -> Iterator[Finding]:
    """The mean gradient over samples, of π_θ and of another policy, is the estimator's.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for each policy where it is not.
    """
    tol = case.term.tol
    for off_policy, where in (
        (False, "samples of π_θ"),
        (True, "samples of another policy"),
    ):
        _, got = expected(case.term, off_policy)
        _, want = expected(case.right, off_policy)
        if not _alike(got, want, tol):
            right_divergence = divergence_of(case.right, off_policy)
            found_divergence = divergence_of(case.term, off_policy, tol)
            said = (
                f"{_listed(want)}: that of {_words(right_divergence)}",
                f"{_listed(got)}: that of {_words(found_divergence)}",
            )
            yield fail("expected-gradient", f"{where}, five tokens enumerated", *said)


@oracle("stop-gradient")
def stop_gradient(case: KlCase) -> Iterator[Finding]:
    """No gradient flows into the log-probabilities of the reference.

    Args:
        case: the function and its estimator.

    Yields:
        A note where one would.
    """
    lp, ref = pair(NEAR)
    k = case.term(lp, ref.requires_grad_())
    if (
        k.requires_grad
        and torch.autograd.grad(k.sum(), ref, allow_unused=True)[0] is not None
    ):
        yield note(
            "stop-gradient", "a gradient would flow into ref_log_prob", cause=CONSTANTS
        )


@oracle("determinism")
def determinism(case: KlCase) -> Iterator[Finding]:
    """The same log-probabilities get the same numbers twice.

    Args:
        case: the function and its estimator.

    Yields:
        A failure where they do not.
    """
    if not same(case.term, case.term, tol=0.0):
        yield fail(
            "determinism", "the same tokens twice", "the same numbers", "other numbers"
        )


@oracle("mutation")
def mutation(case: KlCase) -> Iterator[Finding]:
    """The function leaves its inputs as they are.

    Args:
        case: the function and its estimator.

    Yields:
        A failure for each input that it changes, and a note where it prints.
    """
    yield from untouched(case.term.outcome(*pair(NEAR)))


ORACLES: tuple[Oracle, ...] = (
    determinism,
    _pointwise(0, "value", "value"),
    _pointwise(1, "gradient", "gradient by log_prob"),
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
            has in expectation when it is a
        loss on samples.

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
        _words(divergence_of(term, off_policy, term.tol))
        for off_policy in (False, True)
    )
    assumptions = (
        ["it computes in float32: compared to 1e-3"] if term.tol > 1e-5 else []
    ) + [
        f"as a loss on samples of π_θ its expected gradient is that of {on_policy_words}",
        f"on samples of another policy it is that of {off_policy_words}; correct them by importance weights",
    ]
    tol = {"per token, relative": term.tol}
    took = time.perf_counter() - start
    unchecked = not_run(ran)
    return Report(
        term.name,
        estimator,
        {},
        found,
        str(term.reading),
        assumptions,
        ran,
        tol,
        took,
        not_checked=unchecked,
    )
