# SPDX-License-Identifier: Apache-2.0
"""What a framework computes beside its losses, on fixed inputs: advantages, KL terms,
log-probabilities, aggregation; GAE, a critic's loss and a teacher's (token_parts.py).

As with losses, a difference is accounted for by reasons: what the reference becomes
with each of them, until nothing is left. Values are compared and, but for advantages,
gradients.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from upref import advantages, kl
from upref.aggregation import aggregate
from upref.errors import InputError
from upref.logprobs import token_log_probs
from upref.verify.faults import Fault
from upref.weights.batches import typical_batch
from upref_frameworks.audits import token_parts
from upref_frameworks.audits.case import TOL
from upref_frameworks.audits.compare import (
    ComparisonRow,
    Example,
    FaultEffect,
    difference,
)

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Component:
    """A framework's function, what it is compared with, and why they differ.

    Attributes:
        kind: a key of KINDS.
        mode: the framework's name of the function.
        found: calls the framework's function, in the signature of the reference.
        promise: a reference of its kind by name, or a function in that signature.
        hp: hyperparameters of the reference.
        reasons: why they differ; the change of each is the reference with this and all
            earlier reasons in it.
        leaves_out: cases that the function's signature cannot express, by their words.
        tol: the largest difference that counts as rounding.
        words: the promise in words, where it is a function.
    """

    kind: str
    mode: str
    found: Function
    promise: str | Function
    hp: dict[str, Any] = field(default_factory=dict)
    reasons: tuple[Fault[Function], ...] = ()
    leaves_out: tuple[str, ...] = ()
    tol: float = TOL
    words: str = ""

    @property
    def label(self) -> str:
        """Return the kind and the name, as the ledger records them: `kl:k3`."""
        return f"{self.kind}:{self.mode}"

    @property
    def promise_text(self) -> str:
        """Return the promise in words, with its hyperparameters."""
        return ", ".join(
            [
                self.words or str(self.promise),
                *(f"{k}={v:g}" for k, v in self.hp.items()),
            ]
        )

    def reference(self) -> Function:
        """Return the function that the framework's is compared with.

        Returns:
            A function in the signature of the cases, with the hyperparameters in it.
        """
        if callable(self.promise):
            return self.promise
        f = KINDS[self.kind].references[self.promise]
        hp = self.hp
        return lambda *args: f(*args, **hp)


def kls(
    found: Callable[[Tensor, Tensor, str], Tensor],
    promises: dict[str, str],
    reasons: dict[str, tuple[Any, ...]] | None = None,
    tol: float = TOL,
) -> tuple[Component, ...]:
    """Make a Component for each KL estimator of a framework.

    Args:
        found: (log π_θ, log π_ref, name) -> the estimate on each token, in the shape of
            the two tensors.
        promises: the framework's name of an estimator -> a name of kl.ESTIMATORS.
        reasons: the framework's name -> why it differs; None: none does.
        tol: the largest difference that counts as rounding.

    Returns:
        The components, in the order of `promises`.
    """

    def term(name: str) -> Function:
        """Return the term of this name, in the signature of a Component's function."""
        return lambda lp, ref: found(lp, ref, name)

    return tuple(
        Component(
            "kl", k, term(k), promise, reasons=(reasons or {}).get(k, ()), tol=tol
        )
        for k, promise in promises.items()
    )


# ---- on what -------------------------------------------------------------------------
def _float64(*x: float) -> Tensor:
    """Return these numbers as a tensor of float64."""
    return torch.tensor(x, dtype=torch.float64)


def _reward_cases() -> dict[str, tuple[Any, ...]]:
    """Return cases of advantages by their name: (rewards [N], group [N]).

    The rows of a group stand next to each other. All groups of a case have one size,
    except in `uneven` and `one`.
    """
    four = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    return {
        "two groups of four": (_float64(1, 0, 0, 1, 0.25, 1, 0, 0), four),
        "large rewards": (_float64(100, -20, 30, 7, 4, 8, 15, 16), four),
        "equal rewards": (_float64(1, 1, 1, 1, 0, 1, 0, 0), four),
        "equal rewards that do not round alike": (
            _float64(0.1, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.7),
            four,
        ),
        "rewards 1e-4 apart": (_float64(0.5, 0.5001, 0.5, 0.5001, 0, 1, 0, 1), four),
        "uneven": (
            _float64(1, 0, 0, 1, 0.5, 0.25, 1),
            torch.tensor([0, 0, 1, 1, 1, 1, 1]),
        ),
        "one": (_float64(1, 0, 1, 0, 0.5), torch.tensor([0, 1, 1, 1, 1])),
    }


def _kl_cases() -> dict[str, tuple[Any, ...]]:
    """Return cases of a KL term by their name: (log π_θ, log π_ref), each [1, 1]. The
    difference of the two is from -25 to 25.
    """
    lp = _float64(-2)[None]
    cases = {}
    for gap in (0.0, 0.1, -0.1, 1.0, -1.0, 1.9, -5.0, -12.0, -25.0):
        words = f"log π_ref - log π_θ = {gap:g}"
        cases[words] = (lp.clone(), lp + gap)
    # log π_θ is lowered: log π_ref may not be above 0
    cases["log π_ref - log π_θ = 25"] = (lp - 25, lp.clone())
    return cases


def _logit_cases() -> dict[str, tuple[Any, ...]]:
    """Return cases of log-probabilities by their name: (logits [B, T, V], tokens [B,
    T], temperature). logits[:, t] predict tokens[:, t].
    """
    n = torch.arange(2 * 5 * 7, dtype=torch.float64).reshape(2, 5, 7)
    z = 3 * (1.7 * n).sin()
    tokens = (torch.arange(10).reshape(2, 5) * 3) % 7
    far_logits = {"logits of ±300": (100 * z, tokens, 1.0)}
    return {
        "temperature 1": (z, tokens, 1.0),
        "temperature 0.6": (z, tokens, 0.6),
    } | far_logits


def _mask_cases() -> dict[str, tuple[Any, ...]]:
    """Return cases of an aggregation by their name: (x [B, T], mask [B, T])."""
    mask = torch.arange(6) < torch.tensor([1, 6, 3, 2])[:, None]
    x = (0.3 * torch.arange(24, dtype=torch.float64)).sin().reshape(4, 6)
    holes = mask & (torch.arange(6) != 1)
    return {
        "responses of 1, 6, 3 and 2 tokens": (x, mask),
        "a tool's tokens inside": (x, holes),
    }


def _typical_rewards() -> tuple[Tensor, Tensor]:
    """Return the rewards and the groups of the typical batch: 1 for a right response."""
    batch = typical_batch()
    assert batch.group is not None
    return (batch.adv[:, 0] > 0).to(batch.adv), batch.group


def _typical_log_probs() -> tuple[Tensor, Tensor]:
    """Return log π_θ and log π_ref of the typical batch's tokens, each [1, n]."""
    batch = typical_batch()
    assert batch.logp_ref is not None
    return batch.logp[batch.mask][None], batch.logp_ref[batch.mask][None]


def _typical_terms() -> tuple[Tensor, Tensor]:
    """Return a number for each token of the typical batch, and its mask."""
    batch = typical_batch()
    return batch.logp * batch.adv, batch.mask


def _masked_terms(function: Function) -> Function:
    """Return the function of terms that are 0 on masked slots and have no gradient
    there, as in a trainer: its advantages and KL terms are 0 on padding.
    """
    return lambda x, mask: function(x * mask, mask)


@dataclass(frozen=True)
class Kind:
    """On what functions of one kind are compared, and with what.

    Attributes:
        references: the functions with which they are compared, by name.
        cases: makes the inputs, by the words of each: the arguments of a reference.
        typical: makes the arguments on which the effect of a reason is measured; None:
            the first of the cases, whose numbers are of ordinary size.
        in_training: makes of a function the one whose effect is measured on these
            arguments; None: the function itself.
        label: how a number of the result is called, by its place.
        has_gradient: whether the gradient by the first argument is compared too.
    """

    references: dict[str, Function]
    cases: Callable[[], dict[str, tuple[Any, ...]]]
    typical: Callable[[], tuple[Any, ...]] | None = None
    in_training: Callable[[Function], Function] | None = None
    label: str = "value"
    has_gradient: bool = True

    def typical_case(self) -> dict[str, tuple[Any, ...]]:
        """Return the one case on which the effect of a reason is measured."""
        if self.typical is not None:
            return {"a typical batch": self.typical()}
        return {"a typical batch": next(iter(self.cases().values()))}


def _token_log_probs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return `token_log_probs` in the signature of the cases, [B, T]."""
    return token_log_probs(logits, tokens, temperature=temperature)


KINDS = {
    "advantages": Kind(
        advantages.ADVANTAGES,
        _reward_cases,
        _typical_rewards,
        label="advantage of response {}",
        has_gradient=False,
    ),
    "kl": Kind(kl.ESTIMATORS, _kl_cases, _typical_log_probs),
    "logprobs": Kind(
        {"token_log_probs": _token_log_probs}, _logit_cases, label="log π of token {}"
    ),
    "aggregation": Kind(
        {
            name: partial(aggregate, agg=name)
            for name in (
                "token-mean",
                "seq-mean-token-mean",
                "seq-mean-token-sum",
                "seq-mean-token-sum-norm",
            )
        },
        _mask_cases,
        _typical_terms,
        _masked_terms,
    ),
    "token_advantages": Kind(
        token_parts.ADVANTAGES,
        token_parts.advantage_cases,
        token_parts.typical_advantage_arguments,
        label="slot {}",
        has_gradient=False,
    ),
    "value": Kind(token_parts.VALUES, token_parts.value_cases),
    "distillation": Kind(token_parts.DIVERGENCES, token_parts.divergence_cases),
}


def rows(framework: str, parts: tuple[Component, ...]) -> list[ComparisonRow]:
    """Compare parts of a framework with their references.

    Args:
        framework: its name.
        parts: each with what it is compared with.

    Returns:
        A row for each part, in this order.

    Raises:
        InputError: there is no reference of the name that a part promises.
    """
    return [_row(framework, p) for p in parts]


def _row(framework: str, part: Component) -> ComparisonRow:
    """Compare a part of a framework with its reference, and with the reference that has
    one reason after the other in it. Raise InputError where there is no such reference.
    """
    kind = KINDS.get(part.kind)
    is_named = isinstance(part.promise, str)
    if kind is None or (is_named and part.promise not in kind.references):
        raise InputError(
            f"{part.label}: there is no {part.promise!r} to compare it with."
        )
    cases = {k: v for k, v in kind.cases().items() if k not in part.leaves_out}
    # the reference, and what it becomes with the first reason, the first two, and so on
    steps = [part.reference(), *(f.change for f in part.reasons)]
    labels, theirs = _labels_and_numbers(part, part.found, cases)
    numbers_of_steps = [_labels_and_numbers(part, f, cases)[1] for f in steps]
    papers = numbers_of_steps[0]
    largest = _finite_difference(theirs, papers).max().item()
    worst_example = _worst_example(labels, theirs, papers)
    reasons = part.reasons if largest > part.tol else ()
    changes = []
    for number, why in enumerate(reasons):
        before, after = numbers_of_steps[number], numbers_of_steps[number + 1]
        # where this reason moves most: the paper's number there, and the framework's
        i = int(_finite_difference(after, before).argmax())
        here = slice(i, i + 1)
        example = _worst_example(labels[here], theirs[here], papers[here])
        changes.append((why.words, example))
    typical_numbers = []
    if reasons:
        typical_case = kind.typical_case()
        functions = steps[: len(reasons) + 1]
        if kind.in_training is not None:
            functions = [kind.in_training(f) for f in functions]
        typical_numbers = [
            _labels_and_numbers(part, f, typical_case)[1] for f in functions
        ]
    effects = [
        FaultEffect.between(new, old)
        for old, new in itertools.pairwise(typical_numbers)
    ]
    remains = _finite_difference(theirs, numbers_of_steps[len(reasons)]).max().item()
    return ComparisonRow(
        setting="default",
        mode=part.mode,
        label=part.label,
        objective="",
        promise=part.promise_text,
        command=f"upref audit {framework}",
        micro_batches=1,
        difference=largest,
        spot=worst_example,
        reasons=changes,
        remains=remains,
        tol=part.tol,
        kind=part.kind,
        effects=effects,
    )


def _labels_and_numbers(
    part: Component, function: Function, cases: dict[str, tuple[Any, ...]]
) -> tuple[list[str], Tensor]:
    """Call a function on all cases.

    Returns a label for each number, and all numbers in one vector: for each case the
    values, then their gradient by the first argument unless these are advantages.
    """
    kind = KINDS[part.kind]
    labels: list[str] = []
    numbers: list[Tensor] = []
    for words, args in cases.items():
        arguments = [a.clone() if isinstance(a, Tensor) else a for a in args]
        if kind.has_gradient:
            arguments[0].requires_grad_()
        value = function(*arguments)
        flat = value.detach().double().reshape(-1)
        labels += [f"{words}: {kind.label.format(i)}" for i in range(len(flat))]
        numbers.append(flat)
        if kind.has_gradient:
            if value.requires_grad:
                gradient = torch.autograd.grad(value.sum(), arguments[0])[0].double()
            else:
                gradient = torch.zeros_like(arguments[0])
            labels += [f"{words}: gradient"] * gradient.numel()
            numbers.append(gradient.reshape(-1))
    return labels, torch.cat(numbers)


def _finite_difference(found: Tensor, expected: Tensor) -> Tensor:
    """Return the relative difference of each number: 0 where both are equal or NaN, and
    1e30 where the difference is not finite.
    """
    same = (found == expected) | (found.isnan() & expected.isnan())
    return torch.where(
        same, 0, difference(found, expected).nan_to_num(nan=1e30, posinf=1e30)
    )


def _worst_example(labels: list[str], found: Tensor, expected: Tensor) -> Example:
    """Return the number that differs most as an example, the first of several."""
    differences = _finite_difference(found, expected)
    i = int(differences.argmax())
    return Example(
        differences[i].item(),
        labels[i],
        expected[i].item() + 0.0,
        found[i].item() + 0.0,
    )
