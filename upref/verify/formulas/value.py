# SPDX-License-Identifier: Apache-2.0
"""`upref.check_value`: is this loss of a critic the one that it is meant to be? The
gradient by the values is compared, on both sides of the clip and of the return.
"""

import itertools
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref import catalog, critic
from upref.critic import VALUE_LOSSES
from upref.errors import InputError
from upref.user_code import names
from upref.user_code.load import load
from upref.user_code.named import NamedFunction, Vocabulary, read
from upref.user_code.signature import parameters
from upref.verify.faults import Fault
from upref.verify.formulas.case import (
    CLAMPS,
    FLOAT32_TOL,
    Formula,
    FormulaCase,
    Inputs,
    Problem,
    Settings,
    choose_case,
    guessed_settings,
    precision_in_words,
)
from upref.verify.formulas.losses import (
    AGGREGATIONS,
    UNREDUCED,
    PerToken,
    WrongLoss,
    aggregation_faults,
    batches,
    constant_input,
    determinism,
    gradient,
    gradient_formula,
    gradient_of_outcome,
    is_unreduced,
    mutation,
    nan_oracle,
    shift_faults,
    total,
    value_oracle,
    wrong_already,
)
from upref.verify.oracle import Oracle, oracle, run, validate_names
from upref.verify.report import Finding, Report, not_run, restores_state

SETTINGS: dict[str, dict[str, float]] = {
    "mse": {"scale": 0.5},
    "clipped": {"clip": 0.2, "scale": 0.5},
}
USUAL: dict[str, tuple[float, ...]] = {
    "scale": (0.5, 1.0),
    "clip": (0.2, 0.5, 0.1, 0.25, 0.3, 0.4, 10.0),
}
OTHER = ({"clip": 0.5}, {"clip": 0.05})


# ---- what arguments are called -------------------------------------------------------
VALUES = {"value", "values", "v", "vpred", "vpreds", "critic"}
NEW = {"vpred", "vpreds", "pred", "preds", "predicted", "new", "current", "curr"}
# new ones by verl's use, old ones by that of ikostrikov's PPO, MAPPO and RLlib
PREDICTED = {"pred", "preds", "predicted"}
OLD = {"old", "prev", "rollout", "behavior", "mb", "sampled"}
RETURNS = {"return", "returns", "ret", "rets"}
TARGETS = {"target", "targets"}


def role(has_new: bool, has_returns: bool, name: str) -> str:
    """Return the input that a name of an argument means, or "".

    Args:
        has_new: whether another argument is called vpreds or the like, so that `values`
            alone are the old ones, as in verl and TRL.
        has_returns: whether an argument is called returns or the like, so that
            target_values are the old ones, as in rsl_rl.
        name: of an argument.
    """
    words = set(names.words(name))
    if any(w.startswith("mask") for w in words):
        return "mask"
    if words & {"clip", "cliprange", "range", "coef", "weight"}:
        return ""
    if words & RETURNS:
        return "returns"
    if words & TARGETS:
        return "old_values" if has_returns else "returns"
    if words & OLD and words & VALUES:
        return "old_values"
    if words & NEW or name in ("v_new",):
        return "values"
    if words & VALUES:
        return "old_values" if has_new else "values"
    return ""


def setting(guards: Container[str], name: str) -> str:
    """Return the setting that a name of an argument means, or "".

    Args:
        guards: the arguments that keep a denominator from 0, as `eps=1e-8` does.
        name: of an argument.
    """
    if name in guards:
        return ""
    words = names.words(name)
    if any(w.startswith(("clip", "eps")) for w in words):
        return "clip"
    return "scale" if name == "scale" else ""


def vocabulary(fn: Any) -> Vocabulary:
    """Return what the arguments of a value loss may be called: what `values` and
    `target_values` mean depends on its other arguments, and what `eps` means on its
    default.

    Args:
        fn: the loss, or its name.
    """
    function = load(fn) if isinstance(fn, str) else fn
    arguments = parameters(function) if callable(function) else []
    guards = {p.name for p in arguments if names.guards_division(p.name, p.default)}
    every = [set(names.words(p.name)) for p in arguments]
    has_new = any(words & NEW for words in every)
    has_returns = any(words & RETURNS for words in every)
    roles = ("values", "old_values", "returns", "mask")
    return Vocabulary(
        "a value loss",
        partial(role, has_new, has_returns),
        partial(setting, guards),
        roles,
    )


def unknown_roles(function: NamedFunction) -> str:
    """Return the error for a function that has `values` beside predicted ones: some
    frameworks call the new values predicted, others the old ones. "" where the names
    tell which are new.

    Args:
        function: as read.
    """
    arguments = {role: argument for argument, role in function.roles.items()}
    if not {"values", "old_values"} <= arguments.keys():
        return ""
    new, old = arguments["values"], arguments["old_values"]
    words = set(names.words(new))
    is_told = words & (NEW - PREDICTED) or set(names.words(old)) & (OLD | TARGETS)
    if is_told or not words & PREDICTED:
        return ""
    return (
        f"{function.name}: upref cannot tell which of {new} and {old} are the new values, and the loss is "
        f"not the one that you named if {new} are: rename the new ones to values and the others to old_values, "
        "or write a wrapper."
    )


# ---- batches -------------------------------------------------------------------------
def _problem(words: str, lengths: list[int], width: int, seed: int) -> Problem:
    """Make a batch whose values lie on both sides of the clips and of the returns."""
    rng = np.random.default_rng(seed)
    n = len(lengths)

    def drawn(numbers: list[float]) -> Tensor:
        """Return random ones of these numbers."""
        return torch.tensor(rng.choice(numbers, (n, width)))

    old = drawn([k / 8 for k in range(-8, 9)])
    steps = [(3 + 9 * k) / 256 for k in range(30)]  # on both sides of every usual clip
    moved = drawn([sign * x for x in steps for sign in (1, -1)])
    far = drawn(
        [
            sign * x
            for x in (1 / 64, 7 / 32, 11 / 16, 9 / 8, 37 / 16)
            for sign in (1, -1)
        ]
    )
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    inputs = {
        "values": old + moved,
        "old_values": old,
        "returns": old + far,
        "mask": mask,
    }
    return Problem(words, inputs)


PLAIN = _problem("no padding", [8] * 8, 8, 1)
PADDED = _problem("responses of several lengths", [3, 6, 1, 5], 7, 2)
_HOLES = _problem("untrained tokens between trained ones", [6] * 4, 6, 3)
HOLES = _HOLES.but(
    _HOLES.words,
    mask=torch.tensor(np.random.default_rng(0).uniform(size=(4, 6)) < 0.6)
    | (torch.arange(6) == 0),
)
LARGE = _problem(
    "40 responses of up to 30 tokens", [1 + i % 30 for i in range(40)], 30, 4
)
_SIZED = _problem("values and returns of up to 45", [5, 3, 6, 4], 6, 5)


def _far() -> Problem:
    """Return a batch with values and returns far from 0, returns of exactly 0, and large
    errors.
    """
    x = _SIZED.inputs
    level = torch.tensor([-45.0, 20.0, 45.0, -20.0]).double()[:, None].repeat(1, 6)
    level[:, 1::2] = -x["returns"][:, 1::2]
    moved = {role: x[role] + level for role in ("values", "old_values", "returns")}
    moved["returns"][:, 0] = x["returns"][:, 0]
    return _SIZED.but(_SIZED.words, **moved)


FAR = _far()
TINY = _problem("two trained tokens in all, behind untrained ones", [3, 3], 3, 6)
TINY = TINY.but(TINY.words, mask=torch.tensor([[False, False, True]] * 2))
# here the clipped errors are the larger ones in sum too
REACHED = _problem("values that are near their returns", [4, 6, 5], 6, 7)
REACHED = REACHED.but(
    REACHED.words,
    returns=REACHED.inputs["values"] + 1 / 64,
)
# rows and columns of other numbers than PLAIN's, which are equal: a function without a
# mask is compared on these two alone
RECTANGULAR = _problem("5 responses of 7 tokens, no padding", [7] * 5, 7, 8)
PROBLEMS = (PLAIN, PADDED, HOLES, LARGE, FAR, TINY, REACHED, RECTANGULAR)


# ---- faults --------------------------------------------------------------------------
# In the formulas below V is the value, R the return, `old` V when the data were sampled,
# `near` V clipped around `old`, c the width of the clip, x the inputs and s the settings.
def per_token(name: str) -> PerToken:
    """Return the right loss of each token.

    Args:
        name: a key of VALUE_LOSSES.
    """

    def loss(inputs: Inputs, settings: Settings) -> Tensor:
        """Return [B, T]."""
        own = {k: v for k, v in settings.items() if k in SETTINGS[name]}
        arguments = [inputs["values"], inputs["returns"]]
        if name == "clipped":
            arguments.append(inputs["old_values"])
        return VALUE_LOSSES[name](*arguments, **own)

    return loss


def _with_errors(
    combine: Callable[[Tensor, Tensor], Tensor], inputs: Inputs, settings: Settings
) -> Tensor:
    """Return scale times `combine` of the errors V - R and near - R, [B, T]."""
    V, R, old = inputs["values"], inputs["returns"], inputs["old_values"]
    clip = settings.get("clip", 0.2)
    near = old + (V - old).clamp(-clip, clip)
    return settings["scale"] * combine(V - R, near - R)


def _larger_in_sum(inputs: Inputs, settings: Settings, *, of_responses: bool) -> Tensor:
    """Return the squared errors of the value or those of the clipped value, whichever are
    larger in sum, times the scale, [B, T].

    Args:
        inputs: tensors by role.
        settings: clip, scale and agg.
        of_responses: whether the sums of each response are compared, or those of the
            batch.
    """
    errors = _with_errors(lambda e, near: e**2, inputs, settings)
    near = _with_errors(lambda e, near: near**2, inputs, settings)
    mask = inputs["mask"]
    if of_responses:
        sums = [torch.where(mask, x, 0).sum(1, keepdim=True) for x in (errors, near)]
    else:
        sums = [total(x, mask, settings["agg"]) for x in (errors, near)]
    return torch.where(sums[0] >= sums[1], errors, near)


def _clamped(
    name: str, clamped_role: str, bound: float, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the loss with one input clamped."""
    x = inputs[clamped_role].clamp(-bound, bound)
    return per_token(name)({**inputs, clamped_role: x}, settings)


def _with_clip(
    clamp: Callable[[Tensor, Tensor, Tensor, float], Tensor],
    inputs: Inputs,
    settings: Settings,
) -> Tensor:
    """Return the clipped loss with another clipped value, [B, T].

    Args:
        clamp: from (V, R, old, the width of the clip) to the clipped value.
        inputs: tensors by role.
        settings: clip and scale.
    """
    V, R, old = inputs["values"], inputs["returns"], inputs["old_values"]
    near = clamp(V, R, old, settings["clip"])
    return settings["scale"] * torch.maximum((V - R) ** 2, (near - R) ** 2)


def _within(x: Tensor, center: Tensor, width: Tensor | float) -> Tensor:
    """Return x, at most this far from a center."""
    return torch.minimum(torch.maximum(x, center - width), center + width)


def _whitened_target(
    name: str, ddof: int, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the loss whose returns are whitened over the trained slots; the right loss
    where too few slots train for a variance.
    """
    returns, mask = inputs["returns"], inputs["mask"]
    trained = returns[mask]
    if len(trained) <= ddof:
        return per_token(name)(inputs, settings)
    white = (returns - trained.mean()) / (trained.var(correction=ddof) + 1e-8).sqrt()
    return per_token(name)({**inputs, "returns": white}, settings)


def _root(name: str, agg: str, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the gradient of the square root of a sum of squares. Its factor is one of
    the usual ones.
    """
    gradient = gradient_formula(per_token(name), "values", agg)(inputs, settings)
    value = total(per_token(name)(inputs, settings), inputs["mask"], agg)
    return gradient / (2 * value.sqrt())


def _moved(
    name: str, role: str, places: int, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the loss with one input moved by so many slots to the right; what leaves a
    row comes in on its other side.
    """
    return per_token(name)({**inputs, role: inputs[role].roll(places, 1)}, settings)


def _wrong_losses(name: str) -> Iterator[WrongLoss]:
    """Yield what is done otherwise, in the order in which it is tried: with the clip, then
    with the inputs and the sign.
    """
    if name == "clipped":
        yield from _wrong_clips()
    else:
        yield from _wrong_errors()
    yield from _wrong_inputs(name)


def _wrong_clips() -> Iterator[WrongLoss]:
    """Yield what the clipped loss does otherwise with its two errors and with the clip."""
    yield WrongLoss(
        "the smaller of the two errors counts (min), not the larger: a value that has left the range is not led back",
        "value-minimum",
        partial(_with_errors, lambda e, near: torch.minimum(e**2, near**2)),
    )
    yield WrongLoss(
        "only the clipped value counts: the maximum is missing, and beyond the clip no gradient is left",
        "value-maximum-missing",
        partial(_with_errors, lambda e, near: near**2),
    )
    yield WrongLoss(
        "nothing is clipped: it is mse", "value-clip-missing", per_token("mse")
    )
    yield WrongLoss(
        "the maximum is taken after the sum: the larger of the two sums counts, not the larger error of each token",
        "value-maximum-of-sums",
        partial(_larger_in_sum, of_responses=False),
    )
    yield WrongLoss(
        "the maximum is taken of the two sums of each response, not of each token",
        "value-maximum-of-sums",
        partial(_larger_in_sum, of_responses=True),
    )
    yield WrongLoss(
        "the two errors are averaged, not the larger taken",
        "value-errors-averaged",
        partial(_with_errors, lambda e, near: (e**2 + near**2) / 2),
    )
    yield WrongLoss(
        "the value itself is clipped to ±ε, not its distance from the old value",
        "value-clipped-itself",
        partial(_with_clip, lambda V, R, old, c: V.clamp(-c, c)),
    )
    yield WrongLoss(
        "the clip is relative: from (1 - ε) V_old to (1 + ε) V_old",
        "value-clip-relative",
        partial(
            _with_clip,
            lambda V, R, old, c: torch.minimum(
                torch.maximum(V, old * (1 - c)), old * (1 + c)
            ),
        ),
    )
    yield WrongLoss(
        "the clip is relative: V_old (1 ± ε), whatever the sign of V_old",
        "value-clip-relative",
        partial(_with_clip, lambda V, R, old, c: _within(V, old, c * old.abs())),
    )
    yield WrongLoss(
        "old and new values are exchanged: the old value is clipped around the new one",
        "value-clip-exchanged",
        partial(_with_clip, lambda V, R, old, c: _within(old, V, c)),
    )
    yield WrongLoss(
        "the value is clipped from above alone: the lower end of the range is missing",
        "value-clip-one-sided",
        partial(_with_clip, lambda V, R, old, c: torch.minimum(V, old + c)),
    )
    yield WrongLoss(
        "the value is clipped from below alone: the upper end of the range is missing",
        "value-clip-one-sided",
        partial(_with_clip, lambda V, R, old, c: torch.maximum(V, old - c)),
    )
    yield WrongLoss(
        "the errors are not squared: their absolute values count",
        "value-error-absolute",
        partial(_with_errors, lambda e, near: torch.maximum(e.abs(), near.abs())),
    )
    yield WrongLoss(
        "the clipped value is detached",
        "value-clip-detached",
        partial(
            _with_errors,
            lambda e, near: torch.maximum(e**2, near.detach() ** 2),
        ),
    )


def _wrong_errors() -> Iterator[WrongLoss]:
    """Yield what a loss without a clip does otherwise with its error."""
    yield WrongLoss(
        "it is clipped: that is `clipped`",
        "value-clipped",
        partial(_with_errors, lambda e, near: torch.maximum(e**2, near**2)),
    )
    yield WrongLoss(
        "it is clipped, and the smaller error counts",
        "value-minimum",
        partial(_with_errors, lambda e, near: torch.minimum(e**2, near**2)),
    )
    yield WrongLoss(
        "the error is not squared: its absolute value counts",
        "value-error-absolute",
        partial(_with_errors, lambda e, near: e.abs()),
    )
    yield WrongLoss(
        "the smooth L1 (Huber) loss",
        "smooth-l1",
        partial(
            _with_errors,
            lambda e, near: torch.nn.functional.smooth_l1_loss(
                e, torch.zeros_like(e), reduction="none"
            ),
        ),
    )


def _wrong_inputs(name: str) -> Iterator[WrongLoss]:
    """Yield what any of the losses does otherwise with its inputs, and the wrong sign."""
    right = per_token(name)
    for bound in CLAMPS:
        for clamped_role in ("values", "returns"):
            yield WrongLoss(
                f"the {clamped_role} are clamped to ±{bound:g}",
                f"{clamped_role}-clamped",
                partial(_clamped, name, clamped_role, bound),
            )
    for places, where in ((1, "early"), (-1, "late")):
        neighbor = "in front" if places > 0 else "behind"
        yield WrongLoss(
            f"the return is that of the token {neighbor}",
            f"return-one-token-{where}",
            partial(_moved, name, "returns", places),
        )
        yield WrongLoss(
            f"the value is that of the token {neighbor}",
            f"value-one-token-{where}",
            partial(_moved, name, "values", places),
        )
    for ddof in (1, 0):
        yield WrongLoss(
            "the returns are whitened inside of the loss",
            "returns-whitened",
            partial(_whitened_target, name, ddof),
        )
    yield WrongLoss(
        "the target is the advantage, R - V_old, not the return",
        "advantage-as-target",
        lambda x, s: right({**x, "returns": x["returns"] - x["old_values"]}, s),
    )
    yield WrongLoss(
        "the target is the old value, not the return",
        "old-value-as-target",
        lambda x, s: right({**x, "returns": x["old_values"]}, s),
    )
    yield WrongLoss(
        "the sign is flipped: errors grow",
        "value-sign-flipped",
        lambda x, s: -right(x, s),
    )


def known(name: str, agg: str) -> tuple[Fault[Formula], ...]:
    """Return the known faults of a value loss, in the order in which they are tried.

    Args:
        name: a key of VALUE_LOSSES.
        agg: the aggregation that it should have.
    """
    no_gradient = Fault[Formula](
        "no gradient reaches the values: they are detached, computed under no_grad, or they cancel",
        lambda inputs, settings: torch.zeros_like(inputs["values"]),
        id="no-gradient",
    )
    of_terms = [
        Fault(wrong.words, gradient_formula(wrong.per_token, "values"), id=wrong.id)
        for wrong in _wrong_losses(name)
    ]
    of_sum = aggregation_faults(per_token(name), "values", agg)
    shifts = shift_faults(
        per_token(name),
        "values",
        agg,
        {
            "the value": ("values", "old_values"),
            "the return": ("returns",),
            "the mask": ("mask",),
        },
    )
    root = Fault[Formula](
        "the square root of the loss: every gradient is divided by twice its value",
        partial(_root, name, agg),
        id="root-of-loss",
    )
    return (no_gradient, *of_sum, *of_terms, *shifts, root)


# ---- oracles -------------------------------------------------------------------------
@oracle("settings", not_run=wrong_already)
def settings(case: FormulaCase) -> Iterator[Finding]:
    """Compare at other widths of the clip, if the function takes it."""
    if "clip" not in case.function.takes or "clip" not in case.settings:
        return
    for other in OTHER:
        words = f"clip = {other['clip']:g}"
        found = list(
            case.compare("settings", PLAIN.but(words), {**case.settings, **other})
        )
        yield from found
        if found:
            return


def _value(name: str, inputs: Inputs, settings: Settings) -> float:
    """Return the right value of the loss."""
    return total(
        per_token(name)(inputs, settings), inputs["mask"], settings["agg"]
    ).item()


def oracles(name: str) -> tuple[Oracle, ...]:
    """Return the oracles of a value loss.

    Args:
        name: a key of VALUE_LOSSES.
    """
    return (
        determinism,
        gradient,
        settings,
        batches,
        value_oracle(partial(_value, name)),
        constant_input("returns", "the returns"),
        nan_oracle(("values", "returns", "old_values")),
        mutation,
    )


# ---- the check -----------------------------------------------------------------------
@restores_state
def check_value(
    fn: Any,
    loss: str,
    *,
    agg: str = "token-mean",
    skip: tuple[str, ...] = (),
    **hp: Any,
) -> Report:
    """Compare the gradient of a critic's loss with that of a reference.

    Args:
        fn: a loss to minimize: a function of values, old_values, returns and mask,
            [B, T], read by the names of its arguments (beside vpreds, values are the
            old ones); or its name. It returns a scalar, or one number per token.
        loss: mse or clipped.
        agg: how the tokens are summed: token-mean, seq-mean-token-mean,
            seq-mean-token-sum or token-sum.
        skip: names of oracles not to run.
        **hp: clip, and scale, the factor of the squared error. What is not given is
            passed to a function that takes it, or found among usual values.

    Returns:
        A Report: true if nothing fails.

    Raises:
        InputError: fn cannot be read or run; or it is wrong, and its names do not tell
            which values are new.
    """
    start = time.perf_counter()
    critic.get(loss)  # raises where there is no such loss
    if agg not in AGGREGATIONS:
        raise catalog.unknown_aggregation(agg, AGGREGATIONS)
    every = oracles(loss)
    validate_names(every, skip)
    own = SETTINGS[loss]
    required = ["values", "returns"]
    if loss == "clipped":
        required.append("old_values")
    function = read(fn, vocabulary(fn), required, hp, own)
    for key in hp:
        if key not in own and key not in function.bound:
            raise InputError(
                f"{loss} has no setting {key!r}, and {function.name} no such argument; it takes {', '.join(own)}."
            )
    given = {key: number for key, number in hp.items() if key in own}
    for key, number in given.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number < 1e300:
            raise InputError(f"{key} must be a number >= 0, got {repr(number)[:60]}.")
    case, is_right = _choose_case(function, loss, agg, given)
    findings, outcomes = run(every, case, skip)
    has_failed = any(finding.severity == "failure" for finding in findings)
    if has_failed and (error := unknown_roles(function)):
        raise InputError(error)
    objective = f"value {loss}"
    if case.settings["agg"] != UNREDUCED and agg != "token-mean":
        objective += f" with {agg}"
    return Report(
        loss=function.name,
        objective=objective,
        hp={k: v for k, v in case.settings.items() if k != "agg"},
        findings=findings,
        read_as=function.read_as,
        assumptions=_assumptions(case, given, is_right),
        guessed=guessed_settings(case, given, is_right),
        oracles=outcomes,
        tolerances={"gradient, relative": case.tol},
        seconds=time.perf_counter() - start,
        not_checked=[*_not_checked(case), *not_run(outcomes)],
    )


def _choose_case(
    function: NamedFunction, loss: str, agg: str, given: Settings
) -> tuple[FormulaCase, bool]:
    """Choose how inputs are passed, and the settings, as `choose_case` does; the first way
    in which the function runs tells whether it is unreduced.

    Raises:
        InputError: the function refuses every way.
    """
    columns = []
    for key, first in SETTINGS[loss].items():
        if key in given:
            columns.append([given[key]])
        elif key in function.takes:
            columns.append([first])
        else:
            columns.append(list(USUAL[key]))
    keys = [*SETTINGS[loss]]
    for key in sorted(function.required - set(keys)):
        keys.append(key)
        columns.append([USUAL[key][0]])
    grid = [dict(zip(keys, row, strict=True)) for row in itertools.product(*columns)]
    has_mask = "mask" in function.reads
    problems = tuple(p for p in PROBLEMS if has_mask or bool(p.inputs["mask"].all()))

    def make(way: NamedFunction, settings: Settings, tol: float) -> FormulaCase:
        """Return the case of a function at these settings."""
        return FormulaCase(
            loss,
            way,
            gradient_formula(per_token(loss), "values"),
            partial(gradient_of_outcome, way.name, "values"),
            settings,
            problems,
            known(loss, settings["agg"]),
            "d loss / d V",
            gradient_of="values",
            tol=tol,
        )

    first_error: InputError | None = None
    for way in function.kinds():
        trial = make(way, {**grid[0], "agg": agg}, FLOAT32_TOL)
        try:
            outcome, inputs = trial.call(problems[0])
        except InputError as e:
            first_error = first_error or e
            continue
        own_agg = UNREDUCED if is_unreduced(outcome, inputs) else agg
        return choose_case(function, make, [{**row, "agg": own_agg} for row in grid])
    assert first_error is not None
    raise first_error


def _assumptions(case: FormulaCase, given: Settings, is_right: bool) -> list[str]:
    """Return what was assumed of the function, as sentences."""
    sentences = []
    for key, number in case.settings.items():
        if key == "agg" or key in given:
            continue
        what = "the factor of the squared error" if key == "scale" else key
        if key in case.function.takes:
            sentences.append(f"it takes {key}: compared at {number:g} and other values")
        elif is_right:
            sentences.append(f"{what} is {number:g}, found among the usual values")
    if case.settings["agg"] == UNREDUCED:
        sentences.append("it returns one number per token: its caller sums them")
    if precision := precision_in_words(case, is_right):
        sentences.append(precision)
    return sentences


def _not_checked(case: FormulaCase) -> list[str]:
    """Return what the verdict says nothing about, in words."""
    if case.settings["agg"] == UNREDUCED:
        return ["the aggregation, which its caller does"]
    return [] if case.has_mask else ["masks, which it does not take"]
