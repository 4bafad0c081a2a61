# SPDX-License-Identifier: Apache-2.0
"""Oracles of a loss as a function: what it reads, what it changes, and into which inputs
its gradient flows.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.user_code.names import CALLED
from upref.verify.explain import confirmation_batches, holds_on_other_batches
from upref.verify.factors import common_value
from upref.verify.finding import Number
from upref.verify.measure import EXACT_TOL, LossCase
from upref.verify.oracle import oracle, refused
from upref.verify.oracles.invariance import gradient_distance
from upref.verify.report import HARMLESS_IF_DETACHED, Finding, fail, note
from upref.verify.shrink import cut, gradient_pair, make_example, shrink, worst
from upref.weights.batches import OFF_EDGES

CONSTANT_ROLES = ("logp_old", "adv", "logp_ref")  # no gradient may flow into them
NETWORK = "the gradient differs when log_prob is the output of a network, as in training, from that of a leaf tensor"
UNDETACHED = "the gradient by log_prob differs with requires_grad set on {} as well"
OWN_GRADIENT_ADDED = (
    "its own .backward() leaves a gradient in the network, which is added to that of the "
    "loss that it returns"
)
GRAPH_FREED = "its own .backward() frees the graph of the network: a backward pass of the loss that it returns raises"


@oracle("in-training", 5)
def in_training(case: LossCase) -> list[Finding]:
    """Compare the gradient with that of a training step, where log_prob is the output
    of a network and other inputs may require a gradient too.

    Args:
        case: the loss and its objective.

    Returns:
        A failure where the gradient differs, or the loss refuses a computed log_prob.
    """
    batch = case.grid(thin=5)
    roles = [role for role in (*CONSTANT_ROLES, "entropy") if role in case.loss.reads]
    _, leaf_gradient = case.kept_value_and_gradient(batch)
    try:
        if findings := _differs(case, batch, leaf_gradient, (), NETWORK):
            return findings
    except InputError as e:
        return [
            fail(
                "in-training",
                "it raises when log_prob is the output of a network",
                "an answer",
                str(e),
            )
        ]
    with contextlib.suppress(InputError):
        if _moved_gradient(case, batch, leaf_gradient, tuple(roles)) is None:
            return []
    for role in roles:
        words = UNDETACHED.format(CALLED[role])
        # a loss may refuse an input that requires a gradient
        with contextlib.suppress(InputError):
            if findings := _differs(case, batch, leaf_gradient, (role,), words):
                return findings
    return []


def _moved_gradient(
    case: LossCase,
    batch: Rollouts,
    leaf_gradient: Tensor,
    require_gradient: tuple[str, ...],
) -> Tensor | None:
    """Return the gradient by a computed log_prob, or None where it is the same as by a
    leaf.

    Args:
        case: the loss and its objective.
        batch: the batch.
        leaf_gradient: the gradient by log_prob as a leaf tensor, [B, T].
        require_gradient: the roles of other inputs that require a gradient too.
    """
    gradient = case.gradient(batch, wanting=require_gradient)
    distance = gradient_distance(
        gradient,
        leaf_gradient,
        torch.ones_like(batch.mask),
        case.allowed_error(EXACT_TOL),
    )
    return gradient if distance.max() > 0 else None


def _differs(
    case: LossCase,
    batch: Rollouts,
    leaf_gradient: Tensor,
    require_gradient: tuple[str, ...],
    words: str,
) -> list[Finding]:
    """Return the failure that the gradient by a computed log_prob differs from that by
    a leaf; or, if the loss answers one batch with several gradients, that failure; []
    where the two are the same.

    Args:
        case: the loss and its objective.
        batch: the batch.
        leaf_gradient: the gradient by log_prob as a leaf tensor, [B, T].
        require_gradient: the roles of other inputs that require a gradient too.
        words: the words for the difference.
    """
    gradient = _moved_gradient(case, batch, leaf_gradient, require_gradient)
    if gradient is None:
        return []
    # a loss that counts its calls answers otherwise when the order changes
    for roles in (
        None,
        require_gradient,
        require_gradient,
        None,
        None,
        require_gradient,
    ):
        first_gradient = leaf_gradient if roles is None else gradient
        if not torch.equal(case.gradient(batch, wanting=roles), first_gradient):
            return [
                fail(
                    "determinism",
                    "the same batch again",
                    "the same numbers",
                    "different numbers",
                )
            ]

    def still_differs(smaller: Rollouts) -> bool:
        """Return whether the gradient of a smaller batch differs too."""
        of_leaf = case.gradient(smaller)
        return _moved_gradient(case, smaller, of_leaf, require_gradient) is not None

    batch = shrink(batch, still_differs)
    leaf_gradient = case.gradient(batch)
    gradient = case.gradient(batch, wanting=require_gradient)
    token = worst((gradient - leaf_gradient).abs().nan_to_num(nan=1e30))
    expected, found = gradient_pair(leaf_gradient, gradient, token)
    return [
        fail(
            "in-training",
            words,
            expected,
            found,
            make_example(batch, leaf_gradient, gradient, case.loss.reads),
            _cause_of_own_backward(case, batch, require_gradient),
        )
    ]


def _cause_of_own_backward(
    case: LossCase, batch: Rollouts, require_gradient: tuple[str, ...]
) -> str:
    """Return the cause of a loss that calls .backward() for one kind of log_prob alone,
    a leaf or the output of a network; "" for another loss.
    """
    calls_backward_on_leaf = (
        case.loss.outcome(batch, wanting=None)[0].own_gradient is not None
    )
    calls_backward_on_network = (
        case.loss.outcome(batch, wanting=require_gradient)[0].own_gradient is not None
    )
    if calls_backward_on_leaf and not calls_backward_on_network:
        return GRAPH_FREED
    if calls_backward_on_network and not calls_backward_on_leaf:
        return OWN_GRADIENT_ADDED
    return ""


@oracle("stop-gradient", 80)
def stop_gradient(case: LossCase) -> list[Finding]:
    """Report gradients that flow into constants of the objective.

    Args:
        case: the loss and its objective.

    Returns:
        A failure, and nothing else, where one flows into the entropy. Else a failure of a
        stop-gradient that is not declared, and a note where one would flow into the old or
        the reference log-probabilities or into the advantages: the loss may be given them
        detached.
    """
    batch = case.grid(thin=5)
    names = []
    for role in CONSTANT_ROLES:
        has_no_kl = role == "logp_ref" and not case.hp.get("beta")
        if role not in case.loss.reads or has_no_kl:
            continue
        if _flows_into(case, batch, role):
            names.append(CALLED[role])
    if "entropy" in case.loss.reads and not case.entropy_coef:
        gradient = case.loss.ask("gradient_by_input", batch, "entropy")
        if gradient is not None and (gradient != 0).any():
            return [_gradient_into_entropy(case, batch, gradient)]
    notes = []
    if names:
        text = f"a gradient would flow into {', '.join(names)}"
        notes = [note("stop-gradient", text, cause=HARMLESS_IF_DETACHED)]
    return _undeclared_stop_gradient(case) + notes


def _flows_into(case: LossCase, batch: Rollouts, role: str) -> bool:
    """Return whether a gradient flows into the input of this role."""
    gradient = case.loss.ask("gradient_by_input", batch, role)
    return gradient is not None and bool((gradient != 0).any())


def _gradient_into_entropy(
    case: LossCase, batch: Rollouts, gradient: Tensor
) -> Finding:
    """Return the failure that this gradient flows into the entropy. Its cause is an
    entropy bonus where one has the gradient.
    """
    bonus = common_value(-(gradient / case.factors(batch))[batch.mask])
    why = ""
    if bonus is not None and holds_on_other_batches(
        case, partial(_gradients_of_bonus, case, bonus)
    ):
        why = f"a bonus of {bonus:.4g} times the entropy of each token"
        if bonus > 0:
            why += f": if it is meant, declare it, --hp entropy_coef={bonus:.4g}"
    small = shrink(batch, lambda smaller: _flows_into(case, smaller, "entropy"))
    small_gradient = case.loss.ask("gradient_by_input", small, "entropy")
    found = "a gradient"
    if small_gradient is not None:
        found = f"a gradient of up to {small_gradient.abs().max().item():.3g}"
    return fail(
        "stop-gradient",
        "the entropy, which depends on the policy",
        "no gradient into it",
        found,
        make_example(small, reads=case.loss.reads),
        why,
    )


def _gradients_of_bonus(
    case: LossCase, coefficient: float, batch: Rollouts
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss by the entropy, and that of a bonus in J of this
    coefficient times the entropy of each token.
    """
    found = case.loss.ask("gradient_by_input", batch, "entropy")
    expected = -coefficient * case.factors(batch) * batch.mask
    if found is None:
        found = torch.zeros_like(expected)
    return found, expected


STEPS = (1e-6, 1e-4)  # of finite differences; the larger one shows a rounded value
DIRECTIONS = 4


def _undeclared_stop_gradient(case: LossCase) -> list[Finding]:
    """Return the failure that the gradient of a loss in the words of upref.ops is not
    the derivative of its value with every sg(x) held at its value.

    The derivative is a finite difference in a random direction. Where the differences
    of two steps disagree, the value is rounded or jumps, and nothing is compared.
    """
    if case.single or case.objective.batch_coupled:
        return []
    # on a bound, a finite difference means nothing
    batch = case.grid(thin=3, edges=OFF_EDGES)
    rng = torch.Generator().manual_seed(0)
    directions = [
        torch.where(
            batch.mask,
            torch.randn(batch.mask.shape, generator=rng, dtype=batch.logp.dtype),
            0,
        )
        for _ in range(DIRECTIONS)
    ]
    differences = case.loss.ask(
        "differences", batch, [h * direction for h in STEPS for direction in directions]
    )
    if not differences:  # the loss does not use upref.ops
        return []
    slopes = torch.tensor(differences).reshape(len(STEPS), -1)
    slopes = slopes / torch.tensor(STEPS)[:, None]
    gradient = -case.gradient(batch)
    for direction, (fine_slope, coarse_slope) in zip(
        directions, slopes.T.tolist(), strict=True
    ):
        derivative = (gradient * direction).sum().item()
        error = abs(fine_slope - derivative)
        rounding = 1e-5 * (gradient * direction).abs().sum().item() + 1e-9
        steps_agree = abs(fine_slope - coarse_slope) <= 0.1 * error
        if (error > rounding and steps_agree) or not math.isfinite(error):
            why = (
                "its gradient is not the derivative of its value: a stop-gradient not declared with sg, such as "
                ".detach() or round(), or a custom backward pass"
            )
            regime = "finite differences in a random direction, every sg(x) held at its value"
            return [
                fail(
                    "stop-gradient",
                    regime,
                    Number(fine_slope, "derivative"),
                    Number(derivative, "autograd"),
                    cause=why,
                )
            ]
    return []


@oracle("mutation", 160)
def mutation(case: LossCase) -> list[Finding]:
    """Report what the calls so far have changed or printed.

    Args:
        case: the loss and its objective.

    Returns:
        A failure for each input that was changed, and a note where the loss printed.
    """
    names = sorted(
        {CALLED[k] for call in case.noted_calls for k in call.wrote if k in CALLED}
    )
    findings = [
        fail(
            "mutation",
            f"{name} is changed in place",
            "inputs left alone",
            "different numbers after the call",
            cause="it writes into the tensor that it was given",
            subject=name,
        )
        for name in names
    ]
    if any(call.printed for call in case.noted_calls):
        findings.append(note("mutation", "the loss prints while it computes"))
    return findings


@oracle("dead-hyperparameter", 100)
def dead_hyperparameter(case: LossCase) -> list[Finding]:
    """Report each hyperparameter that has no effect on the gradient, or another than in
    the objective. One that the loss does not take is left out, unless it takes **kwargs.
    """
    return [finding for key in case.hp for finding in _effect_of(case, key)]


def _other_values(key: str, value: float | None) -> list[float]:
    """Return other values of a hyperparameter, in the order in which they are tried. A
    value may have no effect on the batch: a share may be less than one token of it.
    """
    if key == "c":
        return [2.0 if value != 2.0 else 3.0]
    if key == "beta":
        return [0.1 + (value or 0)]
    if key == "seed":
        return [1 + (value or 0)]
    if not value:
        return [0.1]
    return [value * factor for factor in (1.5, 0.5, 30.0, 0.01)]


def _effect_of(case: LossCase, key: str) -> list[Finding]:
    """Pass another value of one hyperparameter to the loss, and return a finding where
    its gradient does not become the objective's at that value; [] where it does, where the
    loss does not take the hyperparameter, and where no value changes the objective.
    """
    if not _is_declared(case, key) and not case.loss.accepts_kwargs:
        return []
    if key == "beta" and "logp_ref" not in case.loss.reads:
        return []
    value = case.hp[key]
    changed_case = _case_at_other_value(case, key)
    if changed_case is None:
        return []
    new_value = changed_case.hp[key]
    batch = changed_case.grid()
    name = case.objective.name
    try:
        changed_gradient = _gradient_at(case, key, new_value, batch)
        has_effect = not torch.equal(
            _gradient_at(case, key, value, batch), changed_gradient
        )
    except InputError as e:
        return [refused("dead-hyperparameter", f"{key} = {new_value:g}", e)]
    if not has_effect:
        return [_finding_of_dead_argument(case, changed_case, key, batch)]
    if _is_right_or_wrong_before(changed_case, batch, changed_gradient):
        return []
    return [
        fail(
            "dead-hyperparameter",
            f"{key} from {_number_or_absent(value)} to {new_value:g}",
            f"the gradient of {name} at {key} = {new_value:g}",
            "a different gradient",
            cause=f"{key} has an effect, but another one than in {name}",
            subject=key,
        )
    ]


def _is_declared(case: LossCase, key: str) -> bool:
    """Tell whether the loss is known to take the hyperparameter: by an argument, or
    through **kwargs as the user set it.
    """
    loss = case.loss
    return key in loss.accepts or (loss.accepts_kwargs and key in loss.bound_args)


def _case_at_other_value(case: LossCase, key: str) -> LossCase | None:
    """Return the case with the first other value of the hyperparameter that changes the
    objective's weights on its grid; None where no value does.
    """
    for value in _other_values(key, case.hp[key]):
        changed_case = replace(case, hp=case.hp | {key: value})
        if _differing_tokens(case, changed_case, changed_case.grid()).any():
            return changed_case
    return None


def _differing_tokens(case: LossCase, other: LossCase, batch: Rollouts) -> Tensor:
    """Mark the tokens on which the weights of the objective differ in two cases,
    [B, T].
    """
    change = case.expected(batch) - other.expected(batch)
    return change.nan_to_num().abs() > 1e-9


def _gradient_at(
    case: LossCase, key: str, value: float | None, batch: Rollouts
) -> Tensor:
    """Return the loss's gradient at this value of the hyperparameter, [B, T]; at None,
    without the argument.
    """
    arguments = {} if value is None else {key: value}
    return case.gradient(batch, 1, **arguments)


def _finding_of_dead_argument(
    case: LossCase, changed_case: LossCase, key: str, batch: Rollouts
) -> Finding:
    """Return the finding that the loss has the same gradient at two values of a
    hyperparameter: a failure where it takes the argument, else a note.
    """
    value = case.hp[key]
    new_value = changed_case.hp[key]

    def effect(batch: Rollouts) -> tuple[Tensor, Tensor]:
        """Return the change of the gradient, and the change 0 of a dead argument."""
        change = _gradient_at(case, key, new_value, batch) - _gradient_at(
            case, key, value, batch
        )
        return change, torch.zeros_like(batch.logp)

    differ = _differing_tokens(case, changed_case, batch)
    parts = _parts_that_differ(batch, differ)
    found = "the same gradient, bit for bit"
    if not holds_on_other_batches(case, effect, *parts):
        why = ""
        if _any_effect(effect, [*confirmation_batches(case), *parts]):
            found += ", though it has an effect on other batches"
    elif key in case.loss.accepts:
        why = "the argument has no effect on any batch that was tried"
    else:
        why = "it goes into **kwargs, and has no effect on any batch that was tried"
    make = fail if _is_declared(case, key) else note
    return make(
        "dead-hyperparameter",
        f"{key} from {_number_or_absent(value)} to {new_value:g}",
        "a different gradient",
        found,
        cause=why,
        subject=key,
    )


def _any_effect(
    effect: Callable[[Rollouts], tuple[Tensor, Tensor]], batches: list[Rollouts]
) -> bool:
    """Return whether the gradient changes on any of these batches.

    Args:
        effect: from a batch to the change, and the change 0.
        batches: the batches; those that the loss refuses show nothing.
    """
    for batch in batches:
        with contextlib.suppress(InputError):
            change, _ = effect(replace(batch, totals=None))
            if change.any():
                return True
    return False


LEAST_SHARE_WRONG = 0.01  # of the weights of a grid: fewer are no other formula
MOST_ROWS = 70  # of a batch of repeated responses
TIMES_WIDER = 9  # the longest responses that are tried


def _parts_that_differ(batch: Rollouts, differ: Tensor) -> list[Rollouts]:
    """Return batches of the responses with a token that differs: a few of these tokens
    alone and with their response, and all such responses, repeated up to 70 rows, and
    once as 70 rows that are 9 times as long. A loss may read an argument only from some
    number of rows or some length on.

    Args:
        batch: the batch.
        differ: the tokens that differ, [B, T], at least one.
    """
    batch = replace(batch, group=None)
    places = differ.nonzero().tolist()
    few_places = places[:: max(1, len(places) // 4)][:4]
    rows = list(dict.fromkeys(row for row, _ in places)) * MOST_ROWS
    single_responses = [
        cut(batch, [row], columns)
        for row, column in few_places
        for columns in ([column], None)
    ]
    repeated = [cut(batch, rows[:count], None) for count in (2, 3, 5, MOST_ROWS)]
    batches = [c for c in (*single_responses, *repeated) if c is not None]
    longest = batches[-1]
    tokens_repeated = {
        name: torch.cat([x] * TIMES_WIDER, 1) for name, x in longest.tensors().items()
    }
    return [*batches, longest.but(**tokens_repeated, totals=None)]


def _is_right_or_wrong_before(
    case: LossCase, batch: Rollouts, gradient: Tensor
) -> bool:
    """Return whether the gradient at a changed hyperparameter is right, or the gradient
    at the loss's own values was wrong already, which the oracle `gradient` reports.

    Args:
        case: the loss beside the objective at the changed value.
        batch: the batch.
        gradient: the loss's gradient at the changed value, [B, T].
    """
    errors = case.weight_error(batch, gradient / case.factors(batch))
    share_wrong = (errors > 10 * case.tol).double().mean()
    if share_wrong < LEAST_SHARE_WRONG:
        return True
    own_values = {k: v for k, v in case.hp.items() if k in case.loss.bound_args}
    unchanged_case = replace(case, hp=case.objective.resolve(own_values))
    return bool(unchanged_case.weight_error(batch).max() > 10 * case.tol)


def _number_or_absent(x: float | None) -> str:
    """Return the number in words; None is "absent"."""
    return "absent" if x is None else f"{x:g}"
