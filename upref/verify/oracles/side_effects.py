# SPDX-License-Identifier: Apache-2.0
"""Oracles of a loss as a function: what it reads, what it writes, and where its
gradient goes.
"""

import contextlib
import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from upref.errors import InputError
from upref.rollouts import Rollouts
from upref.user_code.names import CALLED
from upref.verify.explain import holds_on_other_batches
from upref.verify.factors import common_value
from upref.verify.finding import Number
from upref.verify.measure import EXACT, LossCase
from upref.verify.oracle import oracle
from upref.verify.oracles.invariance import gradient_distance, tolerance
from upref.verify.report import Finding, fail, note
from upref.verify.shrink import cut, gradient_pair, make_example, shrink, worst
from upref.weights.batches import OFF_EDGES

FIXED = ("logp_old", "adv", "logp_ref")  # what no gradient is to flow into
NETWORK = "the gradient differs when log_prob is the output of a network, as in training, from that of a leaf tensor"
UNDETACHED = "the gradient by log_prob differs with requires_grad set on {} as well"
OWN = "its own .backward() leaves a gradient in the network, which is added to that of the loss that it returns"
FREED = "its own .backward() frees the graph of the network: a backward pass of the loss that it returns raises"
CONSTANTS = "harmless as long as callers pass them without requires_grad; add .detach() to be safe"


@oracle("in-training", 5)
def in_training(case: LossCase) -> list[Finding]:
    """The same numbers as a training step has them: log_prob computed, what was not
    detached wanting a gradient.

    Args:
        case: the loss and its objective.

    Returns:
        A failure where the numbers are others, or the loss refuses a computed log_prob.
    """
    batch = case.grid(thin=5)
    roles = [role for role in (*FIXED, "entropy") if role in case.loss.reads]
    _, leaf = case.kept_value_and_gradient(batch)
    try:
        if found := _differs(case, batch, leaf, (), NETWORK):
            return found
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
        if _moved_by(case, batch, leaf, tuple(roles)) is None:
            return []
    for role in roles:
        # it refuses what wants a gradient: louder than it needs to be
        with contextlib.suppress(InputError):
            if found := _differs(
                case, batch, leaf, (role,), UNDETACHED.format(CALLED[role])
            ):
                return found
    return []


def _finite(x: Tensor) -> Tensor:
    """The numbers, with large ones for NaN and infinities, which can be compared."""
    return x.nan_to_num(nan=1e9, posinf=2e9, neginf=-2e9)


def _moved_by(
    case: LossCase, batch: Rollouts, leaf: Tensor, wanting: tuple[str, ...]
) -> Tensor | None:
    """The gradient where it is another than with a leaf for log_prob."""
    gradient = case.gradient(batch, wanting=wanting)
    if (
        gradient_distance(
            _finite(gradient),
            _finite(leaf),
            torch.ones_like(batch.mask),
            tolerance(case, EXACT),
        ).max()
        > 0
    ):
        return gradient
    return None


def _differs(
    case: LossCase, batch: Rollouts, leaf: Tensor, wanting: tuple[str, ...], words: str
) -> list[Finding]:
    """The finding, once a loss that counts its calls is told apart."""
    gradient = _moved_by(case, batch, leaf, wanting)
    if gradient is None:
        return []
    for again in (None, wanting, wanting, None, None, wanting):
        if not torch.equal(
            case.gradient(batch, wanting=again), leaf if again is None else gradient
        ):
            return [
                fail(
                    "determinism",
                    "the same batch again",
                    "the same numbers",
                    "other numbers",
                )
            ]
    batch = shrink(
        batch, lambda c: _moved_by(case, c, case.gradient(c), wanting) is not None
    )
    leaf = case.gradient(batch)
    gradient = case.gradient(batch, wanting=wanting)
    i, t = worst((gradient - leaf).abs().nan_to_num(nan=1e30))
    expected_number, found_number = gradient_pair(leaf, gradient, (i, t))
    by_leaf, by_network = (
        case.loss.outcome(batch, wanting=w)[0].own is not None for w in (None, wanting)
    )
    if by_leaf and not by_network:
        why = FREED
    elif by_network and not by_leaf:
        why = OWN
    else:
        why = ""
    return [
        fail(
            "in-training",
            words,
            expected_number,
            found_number,
            make_example(batch, leaf, gradient, case.loss.reads),
            why,
        )
    ]


@oracle("stop-gradient", 80)
def stop_gradient(case: LossCase) -> list[Finding]:
    """No gradient flows into what is a constant of the objective."""
    batch = case.grid(thin=5)
    flowing = []
    for role in FIXED:
        if role not in case.loss.reads or (
            role == "logp_ref" and not case.hp.get("beta")
        ):
            continue
        gradient = case.loss.ask("gradient_by_input", batch, role)
        if gradient is not None and (gradient != 0).any():
            flowing.append(CALLED[role])
    if "entropy" in case.loss.reads:
        gradient = case.loss.ask("gradient_by_input", batch, "entropy")
        if gradient is not None and (gradient != 0).any():
            bonus = common_value(-(gradient / case.factors(batch))[batch.mask])
            same = bonus is not None and holds_on_other_batches(
                case, partial(_bonus, case, bonus)
            )
            if same:
                why = f"a bonus of {bonus:.4g} times the entropy of each token"
            else:
                why = ""

            def flows(batch: Rollouts) -> bool:
                """Whether a gradient flows into the entropy."""
                into = case.loss.ask("gradient_by_input", batch, "entropy")
                return into is not None and bool((into != 0).any())

            batch = shrink(batch, flows)
            gradient = case.loss.ask("gradient_by_input", batch, "entropy")
            if gradient is not None:
                found = f"a gradient of up to {gradient.abs().max().item():.3g}"
            else:
                found = "a gradient"
            text = "the entropy, which depends on the policy"
            shown = make_example(batch, reads=case.loss.reads)
            return [
                fail("stop-gradient", text, "no gradient into it", found, shown, why)
            ]
    if flowing:
        notes = [
            note(
                "stop-gradient",
                f"a gradient would flow into {', '.join(flowing)}",
                cause=CONSTANTS,
            )
        ]
    else:
        notes = []
    return _declared(case) + notes


def _bonus(
    case: LossCase, coefficient: float, batch: Rollouts
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss by the entropy, and that of k times the entropy of each
    token in J.
    """
    found = case.loss.ask("gradient_by_input", batch, "entropy")
    expected = -coefficient * case.factors(batch) * batch.mask
    return torch.zeros_like(expected) if found is None else found, expected


def _declared(case: LossCase) -> list[Finding]:
    """The surrogate against finite differences, every sg(x) held at its value: for
    losses in the words of upref.ops.
    """
    # on a bound, a finite difference means nothing
    batch = case.grid(thin=3, edges=OFF_EDGES)
    rng = torch.Generator().manual_seed(0)
    steps = [
        torch.where(
            batch.mask,
            torch.randn(batch.mask.shape, generator=rng, dtype=batch.logp.dtype),
            0,
        )
        for _ in range(4)
    ]
    sizes = (1e-6, 1e-4)  # where the two differ, the value is rounded, or jumps
    asked = not (case.single or case.objective.batch_coupled)
    if asked:
        rises = case.loss.ask(
            "differences", batch, [h * step for h in sizes for step in steps]
        )
    else:
        rises = []
    if rises:
        slopes = (
            torch.tensor(rises).reshape(len(sizes), -1) / torch.tensor(sizes)[:, None]
        )
    else:
        slopes = torch.zeros(2, 0)
    gradient = -case.gradient(batch) if rises else torch.zeros_like(batch.logp)
    for step, (difference, coarse_difference) in zip(
        steps, slopes.T.tolist(), strict=False
    ):
        derivative = (gradient * step).sum().item()
        differs = (
            abs(difference - derivative)
            > 1e-5 * (gradient * step).abs().sum().item() + 1e-9
        )
        if (
            differs
            and abs(difference - coarse_difference)
            <= 0.1 * abs(difference - derivative)
        ) or not math.isfinite(difference - derivative):
            why = (
                "its gradient is not the derivative of its value: a stop-gradient not declared with sg, such as "
                ".detach() or round(), or a custom backward pass"
            )
            regime = "finite differences in a random direction, every sg(x) held at its value"
            return [
                fail(
                    "stop-gradient",
                    regime,
                    Number(difference, "derivative"),
                    Number(derivative, "autograd"),
                    cause=why,
                )
            ]
    return []


@oracle("mutation", 160)
def mutation(case: LossCase) -> list[Finding]:
    """What all calls so far have changed or printed.

    Args:
        case: the loss and its objective.

    Returns:
        A failure for each input that was changed, and a note where the loss printed.
    """
    why = "it writes into the tensor that it was given"
    changed = sorted(
        {CALLED[k] for call in case.noted_calls for k in call.wrote if k in CALLED}
    )
    out = [
        fail(
            "mutation",
            f"{name} is changed in place",
            "inputs left alone",
            "other numbers after the call",
            cause=why,
            subject=name,
        )
        for name in changed
    ]
    printed = any(call.printed for call in case.noted_calls)
    return [
        *out,
        *([note("mutation", "the loss prints while it computes")] if printed else []),
    ]


@oracle("dead-hyperparameter", 100)
def dead_hyperparameter(case: LossCase) -> list[Finding]:
    return [f for key in case.hp for f in _effect_of(case, key)]


def _effect_of(case: LossCase, key: str) -> list[Finding]:
    """One hyperparameter is handed over, moved."""
    loss = case.loss
    objective = case.objective
    value = case.hp[key]
    asked = key in loss.accepts or (loss.accepts_kwargs and key in loss.bound_args)
    if not (asked or loss.accepts_kwargs) or (
        key == "beta" and "logp_ref" not in loss.reads
    ):
        return []
    first = {
        "c": 2.0 if value != 2.0 else 3.0,
        "beta": 0.1 + (value or 0),
        "seed": 1 + (value or 0),
    }
    other_values = (value * k for k in (0.5, 30.0, 0.01) if value and key not in first)
    # a share may be less than one token of the batch
    for new_value in (first.get(key, value * 1.5 if value else 0.1), *other_values):
        changed_case = replace(case, hp=case.hp | {key: new_value})
        batch = changed_case.grid()
        differ = (
            case.expected(batch) - changed_case.expected(batch)
        ).nan_to_num().abs() > 1e-9
        if differ.any():
            break
    else:
        return []
    text = f"{key} from {_num(value)} to {new_value:g}"

    def ask(batch: Rollouts, argument: float | None) -> Tensor:
        """The gradient with this value, or without the argument."""
        return case.gradient(batch, 1, **({} if argument is None else {key: argument}))

    try:
        changed = ask(batch, new_value)
        dead = torch.equal(ask(batch, value), changed)
    except InputError as e:
        return [
            fail(
                "dead-hyperparameter",
                f"{key} = {new_value:g}",
                "another gradient",
                str(e),
                subject=key,
            )
        ]
    if dead:

        def effect(batch: Rollouts) -> tuple[Tensor, Tensor]:
            """What the move changes, and the 0 of an argument without an effect."""
            return ask(batch, new_value) - ask(batch, value), torch.zeros_like(
                batch.logp
            )

        holds = holds_on_other_batches(case, effect, *_parts_that_differ(batch, differ))
        if key not in loss.accepts:
            why = "it goes into **kwargs and has no effect"
        else:
            why = "the argument has no effect"
        make = fail if asked else note
        return [
            make(
                "dead-hyperparameter",
                text,
                "another gradient",
                "the same gradient, bit for bit",
                cause=why if holds else "",
                subject=key,
            )
        ]
    if _explained(changed_case, batch, changed):
        return []
    want = f"the gradient of {objective.name} at {key} = {new_value:g}"
    why = f"{key} has another effect than in {objective.name}"
    return [
        fail(
            "dead-hyperparameter",
            text,
            want,
            "another gradient",
            cause=why,
            subject=key,
        )
    ]


def _parts_that_differ(batch: Rollouts, differ: Tensor) -> list[Rollouts]:
    """These tokens, their responses in batches of 1 to 70, and side by side in long
    ones: an effect may need that.
    """
    batch = replace(batch, group=None)
    places = differ.nonzero().tolist()
    few_places = places[:: max(1, len(places) // 4)][:4]
    rows = list(dict.fromkeys(i for i, _ in places)) * 70
    tokens = [
        cut(batch, [i], columns) for i, t in few_places for columns in ([t], None)
    ]
    batches = [
        c
        for c in (*tokens, *(cut(batch, rows[:n], None) for n in (2, 3, 5, 70)))
        if c is not None
    ]
    wide = {name: torch.cat([x] * 9, 1) for name, x in batches[-1].tensors().items()}
    return [*batches, batches[-1].but(**wide, totals=None)]


def _explained(case: LossCase, batch: Rollouts, gradient: Tensor) -> bool:
    """Whether the moved gradient is right, or as wrong as before the move (the gradient
    oracle's business).
    """
    unchanged_case = replace(
        case,
        hp=case.objective.resolve(
            {k: v for k, v in case.hp.items() if k in case.loss.bound_args}
        ),
    )
    errors = case.weight_error(batch, gradient / case.factors(batch))
    return bool((errors > 10 * case.tol).double().mean() < 0.01) or bool(
        unchanged_case.weight_error(batch).max() > 10 * case.tol
    )


def _num(x: float | None) -> str:
    return "absent" if x is None else f"{x:g}"
