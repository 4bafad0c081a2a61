# SPDX-License-Identifier: Apache-2.0
"""Losses of named tensors: a number per token, summed in one of several ways. The
gradient is compared, and the value beside it. Distillation and value losses share it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from upref.aggregation import aggregate
from upref.errors import InputError, describe_kind
from upref.user_code.function import Called
from upref.user_code.guard import call_guarded
from upref.verify.faults import Fault
from upref.verify.formulas.case import (
    STATE,
    WRITES,
    Formula,
    FormulaCase,
    Inputs,
    Settings,
    alike,
)
from upref.verify.oracle import Oracle, oracle, untouched_on
from upref.verify.report import Finding, fail, note

# one number per token, [B, T]
PerToken = Callable[[Inputs, Settings], Tensor]


class WrongLoss(NamedTuple):
    """A loss of each token that does something otherwise than the right one.

    Attributes:
        words: what it does, for a report.
        id: of the fault.
        per_token: the loss.
    """

    words: str
    id: str
    per_token: PerToken


UNREDUCED = "unreduced"  # the function returns [B, T]: its caller sums
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "token-sum",
)
WIDTH = "the mean over all slots, padding included"
SEQ_MEANS_SUMMED = "the sum of the responses' token means"
LENGTHS = "the mask is read as lengths: the first slots train, as many as are trained"
BY_ROWS_AND_TOKENS = "the token mean, divided by the number of responses once more"


def total(x: Tensor, mask: Tensor, agg: str) -> Tensor:
    """Return the scalar of a number per token.

    Args:
        x: [B, T].
        mask: [B, T].
        agg: one of AGGREGATIONS, UNREDUCED for the plain sum, or a wrong one.
    """
    if agg in AGGREGATIONS:
        return aggregate(x, mask, agg)
    kept = torch.where(mask, x, 0)
    if agg == WIDTH:
        return kept.sum() / mask.numel()
    if agg == SEQ_MEANS_SUMMED:
        return (kept.sum(1) / mask.sum(1).clamp(min=1)).sum()
    if agg == BY_ROWS_AND_TOKENS:
        return kept.sum() / (mask.sum() * len(mask))
    return kept.sum()


def gradient_formula(per_token: PerToken, role: str, agg: str = "") -> Formula:
    """Return the gradient of a loss by one input, as a formula.

    Args:
        per_token: the loss of each token.
        role: the input.
        agg: how it is summed; "" for the setting "agg".
    """

    def formula(inputs: Inputs, settings: Settings) -> Tensor:
        """Return d loss / d input, of the shape of the input."""
        leaf = inputs[role].detach().double().clone().requires_grad_()
        x = per_token({**inputs, role: leaf}, settings)
        loss = total(x, inputs["mask"], agg or settings["agg"])
        if not loss.requires_grad:
            return torch.zeros_like(leaf)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        return torch.zeros_like(leaf) if gradient is None else gradient

    return formula


def scalar(name: str, outcome: Called, inputs: Inputs) -> Tensor:
    """Return the loss that a function returned; of one number per token their sum over
    trained tokens.

    Args:
        name: of the function.
        outcome: of a call.
        inputs: of that call.

    Raises:
        InputError: it returned something else.
    """
    returned = _loss_in(outcome.returned)
    mask = inputs["mask"]
    if isinstance(returned, Tensor) and returned.is_floating_point():
        if returned.numel() == 1:
            return returned.reshape(())
        if returned.shape == mask.shape:
            return torch.where(mask, returned, 0).sum()
    got = (
        f"shape {list(returned.shape)}"
        if isinstance(returned, Tensor)
        else describe_kind(returned)
    )
    raise InputError(
        f"{name} returns {got} for a mask {list(mask.shape)}: return a scalar, or one number per token."
    )


def _loss_in(returned: Any) -> Any:
    """Return the loss in what a function returned: the value itself, the first of a
    tuple, or the entry "loss" of a dictionary; without that entry, the first whose name
    contains "loss", or None.
    """
    if isinstance(returned, tuple) and returned:
        return returned[0]
    if isinstance(returned, dict):
        keys = [k for k in returned if isinstance(k, str) and "loss" in k]
        key = "loss" if "loss" in returned else next(iter(keys), "")
        return returned.get(key)
    return returned


def is_unreduced(outcome: Called, inputs: Inputs) -> bool:
    """Tell whether a function returned one number per token.

    Args:
        outcome: of a call.
        inputs: of that call.
    """
    returned = _loss_in(outcome.returned)
    return isinstance(returned, Tensor) and returned.shape == inputs["mask"].shape


def gradient_of_outcome(
    name: str, role: str, outcome: Called, inputs: Inputs
) -> Tensor:
    """Return the gradient of what a function returned.

    Args:
        name: of the function.
        role: the input by which it is taken.
        outcome: of a call.
        inputs: of that call.

    Returns:
        Of the shape of the input, 0 where nothing flows.
    """
    loss = scalar(name, outcome, inputs)
    leaf = inputs[role]
    if not loss.requires_grad:
        return torch.zeros_like(leaf)
    (gradient,), _ = call_guarded(
        name, lambda: torch.autograd.grad(loss, leaf, allow_unused=True)
    )
    return torch.zeros_like(leaf) if gradient is None else gradient.double()


# ---- faults of the sum ---------------------------------------------------------------
def aggregation_faults(
    per_token: PerToken, role: str, own: str
) -> Iterator[Fault[Formula]]:
    """Yield the faults that the numbers are summed in another way, or over other slots;
    none for a loss that is unreduced.

    Args:
        per_token: the loss of each token.
        role: the input by which gradients are taken.
        own: the aggregation that the loss should have.
    """
    if own == UNREDUCED:
        return
    for agg in AGGREGATIONS:
        if agg != own:
            yield Fault(
                f"aggregated by {agg}: --agg {agg} agrees",
                gradient_formula(per_token, role, agg),
                id=f"aggregated-by-{agg}",
            )
    for agg, fault_id in (
        (WIDTH, "aggregated-by-mean-over-width"),
        (SEQ_MEANS_SUMMED, "aggregated-by-sum-of-token-means"),
        (BY_ROWS_AND_TOKENS, "aggregated-by-token-mean-over-responses"),
    ):
        yield Fault(agg, gradient_formula(per_token, role, agg), id=fault_id)
    yield Fault(
        LENGTHS,
        _by_lengths(gradient_formula(per_token, role, own)),
        id="mask-read-as-lengths",
    )
    for agg in (own, *AGGREGATIONS):
        words = "the mask is ignored: padding and untrained tokens count"
        if agg != own:
            words += f"; aggregated by {agg}"
        formula = _with_full_mask(gradient_formula(per_token, role, agg))
        yield Fault(words, formula, id="padding-trains")


def _by_lengths(formula: Formula) -> Formula:
    """Return a formula on a batch whose first slots train, as many as the mask has."""
    return lambda inputs, settings: formula(
        {**inputs, "mask": first_slots(inputs["mask"])}, settings
    )


def first_slots(mask: Tensor) -> Tensor:
    """Return a mask of as many slots of each response as this one has, but from the first
    column on, [B, T].

    Args:
        mask: [B, T].
    """
    return torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)


def _with_full_mask(formula: Formula) -> Formula:
    """Return a formula on a batch whose slots all count."""
    return lambda inputs, settings: formula(
        {**inputs, "mask": torch.ones_like(inputs["mask"])}, settings
    )


def shift_faults(
    per_token: PerToken, role: str, own: str, called: dict[str, tuple[str, ...]]
) -> Iterator[Fault[Formula]]:
    """Yield the faults that inputs are shifted by a token against each other, as logits
    are against labels that are not aligned with them.

    Args:
        per_token: the loss of each token.
        role: the input by which gradients are taken.
        own: the aggregation that the loss should have.
        called: inputs that are shifted together, by what they are called in words.
    """
    groups = [*called]
    every_role = {input_role for name in groups for input_role in called[name]}
    for choice in itertools.product((False, True), repeat=len(groups)):
        late = [name for name, is_late in zip(groups, choice, strict=True) if is_late]
        rest = [name for name in groups if name not in late]
        late_roles = {input_role for name in late for input_role in called[name]}
        if late and rest:
            words = f"{' and '.join(late)} of the next token, beside {' and '.join(rest)} of this one"
            fault_id = "shifted-by-one-token"
        else:
            end = "first" if late else "last"
            words = f"the {end} slot of every response is left out"
            fault_id = "slot-left-out"
        right = gradient_formula(per_token, role, own)
        yield Fault(words, _shifted(right, role, late_roles, every_role), id=fault_id)


def _shifted(formula: Formula, role: str, late: set[str], every: set[str]) -> Formula:
    """Return a formula of inputs without their first slot (late) or their last one.

    Args:
        formula: the gradient of a loss by the input `role`.
        role: that input.
        late: the inputs that lose their first slot.
        every: all inputs that lose a slot.
    """

    def shifted(inputs: Inputs, settings: Settings) -> Tensor:
        """Return the gradient, 0 on the slot that is left out."""
        cut = dict(inputs)
        for name in every & inputs.keys():
            x = inputs[name]
            cut[name] = x[:, 1:] if name in late else x[:, :-1]
        gradient = formula(cut, settings)
        out = torch.zeros_like(inputs[role], dtype=torch.float64)
        kept = slice(1, None) if role in late else slice(None, -1)
        out[:, kept] = gradient
        return out

    return shifted


# ---- oracles -------------------------------------------------------------------------
def wrong_already(case: FormulaCase) -> str:
    """Return why nothing more is compared; "" where it is."""
    return "the gradient is wrong already" if case.wrong else ""


def value_oracle(expected: Callable[[Inputs, Settings], float]) -> Oracle:
    """Make the oracle that compares the value of a loss whose gradient is right. A
    difference is a note: it changes no update.

    Args:
        expected: the value of a batch.
    """

    @oracle("value", not_run=wrong_already)
    def value(case: FormulaCase) -> Iterator[Finding]:
        """Note the value on the first problem where it differs."""
        for problem in case.problems:
            outcome, inputs = case.call(problem)
            found = scalar(case.function.name, outcome, inputs).item()
            right = expected(inputs, case.settings)
            if not math.isclose(found, right, rel_tol=10 * case.tol, abs_tol=1e-6):
                yield note(
                    "value",
                    f"{problem.words}: the value differs, the gradient is right",
                    f"{right:.6g}",
                    f"{found:.6g}",
                    "a constant without effect on the gradient",
                )
                return

    return value


@oracle("determinism")
def determinism(case: FormulaCase) -> Iterator[Finding]:
    """Report another gradient for the same batch."""
    first, second = (case.found(case.problems[0]) for _ in range(2))
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        words = "the same batch twice"
        yield fail(
            "determinism", words, "the same gradient", "another one", cause=STATE
        )


@oracle("mutation")
def mutation(case: FormulaCase) -> Iterator[Finding]:
    """Report what the function changes or prints on the first three problems, with padding
    and without.
    """
    calls = (case.call(problem)[0] for problem in case.problems[:3])
    yield from untouched_on(calls, WRITES)


@oracle("gradient", needed=True)
def gradient(case: FormulaCase) -> Iterator[Finding]:
    """Compare on a batch without padding."""
    yield from case.compare("gradient", case.problems[0])


@oracle("batches", not_run=wrong_already)
def batches(case: FormulaCase) -> Iterator[Finding]:
    """Compare on the other batches, with padding, holes or other sizes, up to the first
    that differs.
    """
    for problem in case.problems[1:]:
        yield from case.compare("batches", problem)
        if case.failed or case.differs(problem):
            return


def constant_input(role: str, called: str) -> Oracle:
    """Make the oracle that reports a gradient into an input that is a constant.

    Args:
        role: the input.
        called: what it is called in words.
    """

    @oracle("stop-gradient", not_run=wrong_already)
    def stop_gradient(case: FormulaCase) -> Iterator[Finding]:
        """Note that a gradient would flow, if the function takes the input and returns a
        loss that depends on it.
        """
        if role not in case.function.reads:
            return
        inputs = dict(case.inputs(case.problems[0]))
        if case.derive is not None:
            inputs = dict(case.derive(inputs, case.settings))
        leaf = inputs[role].detach().clone().requires_grad_()
        outcome = case.function({**inputs, role: leaf}, case.settings)
        loss = scalar(case.function.name, outcome, inputs)
        if not loss.requires_grad:
            return
        try:
            (gradient,), _ = call_guarded(
                case.function.name,
                lambda: torch.autograd.grad(loss, leaf, allow_unused=True),
            )
        except InputError:
            return  # a loss that writes into this input has no gradient by it
        if gradient is not None and bool(gradient.any()):
            text = f"a gradient would flow into {called}"
            why = "harmless as long as callers pass it without requires_grad; add .detach() to be safe"
            yield note("stop-gradient", text, cause=why)

    return stop_gradient


def nan_oracle(roles: Sequence[str]) -> Oracle:
    """Make the oracle that reports NaN on untrained slots that reaches the gradient.

    Args:
        roles: the inputs that are filled.
    """

    @oracle("masked-values", not_run=wrong_already)
    def masked_values(case: FormulaCase) -> Iterator[Finding]:
        """Note for each input that NaN in it reaches trained tokens, on the first problem
        with padding. An input with which the function raises is left out.
        """
        padded = [p for p in case.problems if not bool(p.inputs["mask"].all())]
        if not case.has_mask or not padded:
            return
        base = padded[0]
        mask = base.inputs["mask"]
        for role in roles:
            x = base.inputs[role]
            wide = mask if x.ndim == 2 else mask[..., None]
            filled = base.but(base.words, **{role: torch.where(wide, x, torch.nan)})
            try:
                found = case.found(filled)
            except InputError:
                continue
            inside = mask if found.ndim == 2 else mask[..., None].expand_as(found)
            if not alike(case.expected(base)[inside], found[inside], case.tol):
                text = f"NaN among the {role} of untrained slots reaches trained ones"
                yield note("masked-values", text, cause="0 times NaN is NaN: fill them")

    return masked_values
