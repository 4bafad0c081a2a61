# SPDX-License-Identifier: Apache-2.0
"""`upref.check_step`: whether what a training step hands to its optimizer is the
gradient of the objective.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from upref.errors import InputError
from upref.registry import REDUCE, Objective
from upref.step.compare.case import (
    ALLOWED_ROUNDINGS,
    HALF_PRECISIONS,
    GradientComparison,
    RowOptions,
    StepCase,
    allowed_error,
    are_routes_own,
    build_case,
    call_step,
    compare,
    half_of,
    make_goal,
    perturbed,
    run_step,
    widen_bound,
    with_weights,
)
from upref.step.compare.goal import Goal
from upref.step.compare.ranks import conclude, follow, is_follower, world_size
from upref.step.compare.reach import not_reached, reach
from upref.step.compare.record import Passed, Recorded
from upref.step.compare.value_term import ValueTerm, make_value_term
from upref.step.explain.diagnose import diagnose, half_precision, wrong_parameters
from upref.step.explain.divisors import divisor_of_all_steps, name_single_passes
from upref.step.explain.halves import (
    NO_HALVES,
    ONE_PASS,
    UNFIT,
    Halves,
    fits,
    halves_of,
)
from upref.step.explain.value_causes import SEPARATE_CRITIC, shares_layers
from upref.step.inputs import rows as batch
from upref.step.inputs.reference import Gradient, Model, TorchModel, unwrapped
from upref.step.inputs.rows import CASE_AXES, Padded, Row
from upref.user_code.guard import one_line, outer_threads
from upref.verify.faults.measured import OBSERVATIONS, OF_PARAMETERS
from upref.verify.finding import NO_CAUSE, Cause, Number
from upref.verify.report import UNKNOWN, Finding, Report, fail, note, restores_state

LARGE = 5_000_000  # parameters of a model that threads make faster
NOT_SEARCHED = "the cause was not searched"
# times the bound: below that, rounding fits terms with coefficients too
CLOSE_TO_BOUND = 3
TOO_CLOSE = Cause(
    f"{UNKNOWN}: the difference is less than {CLOSE_TO_BOUND} times what rounding may make, "
    "which is too little to tell a cause from",
    kind="unknown",
)


@dataclass(frozen=True)
class StepReport(Report):
    """The verdict on one training step, with the relative error of its gradient and
    what the case exercised.
    """

    error: float = 0.0
    exercised: list[str] = field(default_factory=list)
    unexercised: list[str] = field(default_factory=list)
    # tokens, or responses, that rounding may put on either side of a clip bound
    at_bound: int = 0
    other_side: int = 0  # those of them that are not on float64's side
    # number of the objective -> what agrees in its place
    not_reached: dict[str, str] = field(default_factory=dict)
    reach: str = ""  # how far the rows go in what the objective reads
    computed_in: str = ""  # the half precision of a step whose model is in float32
    moved: str = ""  # how the gradient was read from the weights, in words

    def text(self, verbose: bool = False) -> str:
        """Return the report, the error of the gradient, and what was exercised and what
        was not. What another number would leave unchanged is listed only if the step
        agrees.
        """
        lines = [
            super().text(verbose),
            f"error of the gradient: {self.error:.2g} of its norm",
        ]
        lines += [f"read {self.moved}"] if self.moved else []
        lines += [f"exercised: {', '.join(self.exercised)}"] if self.exercised else []
        # what else would agree is of interest where this agrees
        others = {} if self.failures else self.not_reached
        numbers = [f"{number} ({same})" for number, same in others.items()]
        if self.reach:
            unreached = [f"clamps and bounds beyond the rows' range ({self.reach})"]
        else:
            unreached = []
        not_exercised = [*numbers, *unreached, *self.unexercised]
        lines += [f"not exercised: {'; '.join(not_exercised)}"] if not_exercised else []
        return "\n".join(lines)

    def numbers_not_reached(self) -> str:
        """Return in words the numbers of the objective that another value could replace
        on these rows, and how far the rows reach; "" where every number has an effect.
        """
        numbers = [f"{number} ({same})" for number, same in self.not_reached.items()]
        return f"{', '.join(numbers)}: {self.reach}" if numbers else ""


@dataclass(frozen=True)
class Attempt:
    """A step on one draw of rows."""

    comparison: GradientComparison
    case: StepCase
    bound: float
    run_again: Callable[[], Gradient] | None = None

    def findings(self, among: Cause = NO_CAUSE) -> list[Finding]:
        """Diagnose why its gradient differs; call it only where it does.

        Args:
            among: a cause that was found on other rows. Of the causes in token weights
                and forward passes, only what it names is tried.

        Returns:
            Findings, the cause in the first one.
        """
        return diagnose(self.comparison, self.case, self.bound, self.run_again, among)


@contextmanager
def threads_for(model: Any) -> Iterator[None]:
    """Compute inside in all threads that the process had, where the model is large."""
    large = isinstance(model, nn.Module) and (
        sum(p.numel() for p in model.parameters()) >= LARGE
    )
    with outer_threads() if large else nullcontext():
        yield


@restores_state
def check_step(
    step: Callable[[Any, list[Row]], Any],
    model: Any,
    objective: str | Objective,
    *,
    temperature: float,
    rows: Sequence[Row] | None = None,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    value: str | None = None,
    value_coef: float | None = None,
    value_clip: float = 0.2,
    clip: float | None = None,
    scale: float = 1.0,
    without: Sequence[str] = (),
    perturb_weights: bool = True,
    seed: int = 0,
    group_size: int | None = None,
    rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | Callable[[Tensor, Tensor], Tensor] | None = None,
    routes: bool = False,
    explain: bool = True,
    moved: bool | float = False,
    **hp: Any,
) -> StepReport:
    """Check whether a training step computes the gradient of an objective.

    The reference is g = -∇_θ scale (J - β KL + c H - c_Z Z - c_V L) at the given
    temperature, clipped to the norm `clip` if one is given, with the mean Z of
    (log Σ exp z)² and the value loss L: one unpadded row at a time, in float64.

    Args:
        step: `(model, rows)`: your forward, loss and backward on these rows. It leaves
            gradients in `.grad`, lets an optimizer step, or returns {name: array}, the
            gradient.
        model: the nn.Module that the step trains, a small one; or upref.step.Functions.
            Its weights are the same after the check as before.
        objective: a name of `upref list`, or an Objective.
        temperature: of the sampler; log-probabilities are taken at it.
        rows: responses with distinct tokens; None: upref makes eight.
        beta: coefficient of the KL term, of the objective's estimator, or k3.
        entropy_coef: coefficient of an entropy bonus, averaged as the objective is.
        z_loss_coef: coefficient of the token mean of (log Σ exp z)², subtracted from J.
        value: the value loss of a step that trains a critic as well: `mse` or `clipped`,
            of `upref.critic`, averaged as the objective is. The model returns (logits,
            values), with the value of token t at the place whose logits predict it. Rows
            have `returns` and `old_values`.
        value_coef: c_V, the factor of 1/2 (V - R)² in the loss.
        value_clip: ε of `clipped`, in the unit of V.
        clip: bound of the gradient's norm, where the step clips it.
        scale: a constant factor of the loss that you mean.
        without: what the step cannot do, and the case leaves out: lengths, temperature,
            ratio, holes.
        perturb_weights: enlarge and disturb the weights first, so that attention, biases and norms
            have an effect.
        seed: of the rows.
        group_size: 2, 4 or 8: so many responses in a row share a prompt and a group;
            None: prompts differ.
        rewards: eight numbers, in each row's `reward`, for a step that makes the
            advantages itself.
        advantages: what the step should make of the rewards: eight numbers, or a
            function of (rewards [8], group [8]); None: the objective's own. Without
            rewards the eight numbers are the advantages of the rows.
        routes: give each row the experts that its tokens take, in `routes`, for a step
            that replays what the sampler recorded. About a third of them are not those that
            the model would choose. A router is a call of `topk` in the model's forward pass.
        explain: search for the cause of a difference, which may take longer than the
            step.
        moved: read the gradient from what the weights moved, for an engine that hides
            it: (θ - θ') / η, of the weights before and after the step. While the step
            runs, SGD takes the place of the update of each torch optimizer. A step that
            uses none in this process trains by SGD itself, at η = 1, without momentum,
            weight decay and clip; another η is passed as this number. Such a step, and
            one whose engine does not leave the weights in the model, returns the
            weights after it as {name: array}.
        **hp: the objective's hyperparameters.

    Returns:
        A Report: true where the gradients agree, with the cause where they do not.

    Raises:
        InputError: the step fails or leaves no gradient, or the case could hide bugs.
    """
    learning_rate = _learning_rate(moved, model)
    if is_follower():
        report: StepReport = follow(step, model, call_step, learning_rate)
        return report
    row_options = RowOptions(group_size, rewards, advantages, routes or None)

    def check() -> StepReport:
        """Make the rows, do the step on them, and compare its gradient."""
        goal = make_goal(
            objective,
            hp,
            temperature,
            beta,
            entropy_coef,
            z_loss_coef,
            clip,
            scale,
            make_value_term(value, value_coef, value_clip),
        )
        if temperature == 1 and "temperature" not in without:
            raise InputError(
                "at temperature 1 a forgotten temperature does not show: pass temperature=0.7, or "
                'without=["temperature"].'
            )
        with (
            threads_for(model),
            perturbed(model, perturb_weights)
            if isinstance(model, nn.Module)
            else nullcontext(),
        ):
            return _run_and_report(
                step,
                model,
                goal,
                row_options,
                rows,
                without,
                seed,
                explain,
                learning_rate,
            )

    return conclude(check) if world_size() > 1 else check()


def _learning_rate(moved: Any, model: Any) -> float:
    """Return η of the step's own SGD; 0 where the gradient is not read from the
    weights.

    Raises:
        InputError: `moved` is no number from 0 on, or the model is no torch module.
    """
    is_number = isinstance(moved, int | float) and 0 <= moved < float("inf")
    if not is_number:
        raise InputError(
            "moved is True, or the learning rate of the step's own SGD, a number above 0, "
            f"got {repr(moved)[:60]}."
        )
    if moved and not isinstance(model, nn.Module):
        raise InputError(
            "moved reads the weights of a torch module: a step on functions returns its gradient."
        )
    return float(moved)


def _run_and_report(
    step: Callable[[Any, list[Row]], Any],
    model: Any,
    goal: Goal,
    row_options: RowOptions,
    rows: Sequence[Row] | None,
    without: Sequence[str],
    seed: int,
    explain: bool,
    learning_rate: float,
) -> StepReport:
    """Run the step on rows, compare its gradient, and return the report.

    Of several ranks, rank 0 does this. A step of a float32 model whose gradient is off
    runs once more, which shows whether it computes in half precision. If it does, that
    precision's rounding is allowed, and the rows keep away from clip bounds.
    """
    start = time.perf_counter()
    reference = model if isinstance(model, Model) else TorchModel(model)
    half = half_of(model)

    def make_case(coarse: bool) -> StepCase:
        """Make the rows; coarse ones have no token beside a bound."""
        return build_case(reference, goal, rows, without, seed, coarse, row_options)

    def run(case: StepCase) -> tuple[Gradient, int]:
        """Run the step on the rows of a case; return its gradient and its number of
        backward passes.
        """
        return run_step(step, model, case, learning_rate)

    case = make_case(coarse=half is not None)
    found, passes = run(case)
    bound = _allowed_error(goal, case, half)
    half_inside = None
    is_float32 = not half and isinstance(model, nn.Module)
    if is_float32 and compare(goal, case, found, bound).error > bound:
        half_inside = _half_inside(model, goal, case, found, bound, run, make_case)
    if half_inside:
        case = make_case(coarse=True)
        found, passes = run(case)
        bound = _allowed_error(goal, case, half_inside)

    if rows is None and row_options == RowOptions():
        comparison = compare(goal, case, found, bound)
        if comparison.goal.grouped and comparison.error <= bound:
            case.reads_groups = _reads_groups(goal, case, run, bound)

    def repeat_step() -> Gradient:
        """Run the step on the same rows again, and return its gradient."""
        return run(case)[0]

    def attempt_on_other_rows() -> Attempt:
        """Run the step on other rows, to confirm a cause."""
        other_case = build_case(
            reference,
            goal,
            None,
            without,
            seed + 1,
            bool(half or half_inside),
            row_options,
        )
        other_case.reads_groups = case.reads_groups
        other_found, _ = run(other_case)
        other_bound = _allowed_error(goal, other_case, half or half_inside)
        return Attempt(
            compare(goal, other_case, other_found, other_bound),
            other_case,
            other_bound,
            lambda: run(other_case)[0],
        )

    name = getattr(step, "__name__", type(step).__name__)
    # a user's own rows have no second draw
    make_other_attempt = attempt_on_other_rows if rows is None else None
    in_float32 = not half and not half_inside and isinstance(model, nn.Module)
    return report_step(
        name,
        goal,
        case,
        found,
        passes,
        bound,
        start,
        run_again=repeat_step,
        half=half_inside,
        explain=explain,
        make_other_attempt=make_other_attempt,
        in_float32=in_float32,
    )


def _allowed_error(goal: Goal, case: StepCase, half: torch.dtype | None) -> float:
    """Return the error of the gradient that rounding may make, that of the weights from
    which it was read included.
    """
    bound = allowed_error(goal, case, half)
    return bound + case.moved.allowed if case.moved else bound


def _half_inside(
    model: nn.Module,
    goal: Goal,
    case: StepCase,
    found: Gradient,
    bound: float,
    run: Callable[[StepCase], tuple[Gradient, int]],
    make_case: Callable[[bool], StepCase],
) -> torch.dtype | None:
    """Return the half precision in which a step of a float32 model computes its gradient;
    None where it computes it in float32. A step may round numbers of its rows, or use
    half precision beside the gradient, as for a metric: then its rounding explains no
    error.

    Args:
        model: what the step trains.
        goal: what the step is meant to maximize.
        case: the rows, on which the gradient is off.
        found: the gradient of the step.
        bound: the relative error that rounding may make in float32.
        run: runs the step on the rows of a case.
        make_case: makes rows, from whether they have no token beside a bound.
    """
    dtype, has_gradient = half_precision(lambda: run(case))
    if dtype is None or _agrees_with_rounded_rows(goal, case, found, bound):
        return None
    if has_gradient or world_size() > 1:
        return dtype
    coarse = make_case(True)
    return None if _is_smooth(model, lambda: run(coarse)[0], bound) else dtype


OTHER_GROUPS = (0, 1, 2, 0, 2, 0, 2, 1)  # of the eight rows: no group is a run of rows


def _reads_groups(
    goal: Goal,
    case: StepCase,
    run: Callable[[StepCase], tuple[Gradient, int]],
    bound: float,
) -> bool | None:
    """Return whether the step still counts tokens per group where the same rows are in
    other groups: micro-batches of rows that were groups do not follow. None where the
    step refuses these rows.
    """
    regrouped = [
        replace(row, group=group)
        for row, group in zip(case.rows, OTHER_GROUPS, strict=True)
    ]
    other = replace(case, rows=regrouped, padded=Padded.of(regrouped))
    try:
        found, _ = run(other)
    except InputError:
        return None
    return compare(goal, other, found, bound).error <= bound


NUDGE = 3e-4  # of each weight, relative: far less than half precision's spacing
MOST_BEND = 5  # times the allowed error, of a gradient that no rounding disturbs


def _is_smooth(model: nn.Module, run: Callable[[], Gradient], bound: float) -> bool:
    """Return whether the gradient of a step hardly bends where the weights move a little:
    half precision on its path would make it jump.

    Args:
        model: what the step trains, with the weights at which it is checked.
        run: runs the step, and returns its gradient.
        bound: the relative error that rounding may make in float32.
    """
    weights = [p for p in unwrapped(model).parameters() if p.is_floating_point()]
    before = [p.detach().clone() for p in weights]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator) for p in weights]
    gradients = []
    for nudge in (-NUDGE, 0.0, NUDGE):
        with torch.no_grad():
            for p, own, direction in zip(weights, before, directions, strict=True):
                p.copy_(own * (1 + nudge * direction.to(own)))
        gradients.append(run())
    with torch.no_grad():
        for p, own in zip(weights, before, strict=True):
            p.copy_(own)
    below, at, above = (
        torch.cat([g[name].flatten() for name in sorted(g)]) for g in gradients
    )
    return bool((below - 2 * at + above).norm() <= MOST_BEND * bound * at.norm())


def _agrees_with_rounded_rows(
    goal: Goal, case: StepCase, found: Gradient, bound: float
) -> bool:
    """Return whether the reference has the gradient that was found, once numbers of the
    rows are rounded to half precision and nothing else is.
    """
    for kind in HALF_PRECISIONS:
        for names in (("old",), ("adv",), ("ref",), ("old", "adv", "ref")):
            columns = {n: getattr(case.padded, n) for n in names}
            rounded = {
                n: x.to(kind).double() for n, x in columns.items() if x is not None
            }
            if rounded:
                rounded_case = replace(case, padded=replace(case.padded, **rounded))
                if compare(goal, rounded_case, found, bound).error <= bound:
                    return True
    return False


@restores_state
def check_recorded(
    seen: Recorded,
    rows: Sequence[Row] | Sequence[Sequence[Row]],
    objective: str | Objective,
    *,
    temperature: float,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    value: str | None = None,
    value_coef: float | None = None,
    value_clip: float = 0.2,
    clip: float | None = None,
    scale: float = 1.0,
    without: Sequence[str] = (),
    bound: float | torch.dtype | None = None,
    explain: bool = True,
    **hp: Any,
) -> StepReport:
    """Check the optimizer steps that `record_step` recorded.

    Args:
        seen: what `record_step` yielded.
        rows: the rows of each step, a list per step. Of one plain list each step has
            those that it was fed.
        bound: the relative error that is allowed; or the half precision in which the
            step computes, whose rounding is allowed; None: float32's, 2e-5, or more
            where the model's own rounding is larger.
        objective, temperature, beta, entropy_coef, z_loss_coef, value, value_coef,
            value_clip, clip, scale, without, explain, **hp: as for `check_step`.

    Returns:
        A Report on all steps; findings name theirs where there are several.

    Raises:
        InputError: there are fewer steps than lists of rows, or the case could hide
            bugs.
    """
    start = time.perf_counter()
    goal = make_goal(
        objective,
        hp,
        temperature,
        beta,
        entropy_coef,
        z_loss_coef,
        clip,
        scale,
        make_value_term(value, value_coef, value_clip),
    )
    rows_of_steps = _rows_of_steps(seen, rows)
    reports = []
    for n, (recorded_step, step_rows) in enumerate(
        zip(seen.steps, rows_of_steps, strict=False)
    ):
        reference = with_weights(seen.model, recorded_step)
        # the first step shows what the case varies; later ones may leave out any axis
        step_without = without if n == 0 else CASE_AXES
        case = build_case(reference, goal, step_rows, step_without, 0)
        case.forward.locate_rows(recorded_step.fed)
        step_bound = allowed_error(goal, case, bound)
        name = f"step {n}"
        reports.append(
            report_step(
                name,
                goal,
                case,
                recorded_step.gradients,
                recorded_step.backwards,
                step_bound,
                start,
                explain=explain,
                in_float32=bound is None,
                doubts=partial(_doubt_of_halves, recorded_step.passes),
            )
        )
    if len(reports) == 1:
        return reports[0]
    tokens = [sum(sum(row.trains) for row in step_rows) for step_rows in rows_of_steps]
    shared = divisor_of_all_steps(reports, [r.error for r in reports], tokens, goal)
    return _report_all_steps(reports, shared)


def _rows_of_steps(
    seen: Recorded, rows: Sequence[Row] | Sequence[Sequence[Row]]
) -> list[Sequence[Row]]:
    """Return the rows of each recorded step. Where the rows are one plain list, a step has
    those of them that it was fed.

    Raises:
        InputError: nothing was recorded, or the rows are not those of the recorded steps.
    """
    if not isinstance(seen, Recorded):
        raise InputError(
            f"seen is what `record_step` yielded, not a {type(seen).__name__}."
        )
    if not isinstance(rows, list | tuple) or not rows:
        raise InputError(
            "rows are a list of upref.step.Row, or a list of such lists, one per step."
        )
    if not seen.steps:
        raise InputError(
            "record_step recorded nothing: no optimizer step ran inside it."
        )
    is_plain_list = isinstance(rows[0], Row)
    if is_plain_list and world_size() > 1:
        raise InputError(
            "each rank was fed its share of the rows, so a plain list does not say which "
            "rows a step had: pass a list per step, with the rows of all ranks: [rows]."
        )
    rows_of_steps: list[Any] = (
        [s.rows(rows) for s in seen.steps] if is_plain_list else [*rows]
    )
    if not all(rows_of_steps):
        raise InputError(
            "a recorded step got none of these rows: pass the rows that it trained on."
        )
    if len(rows_of_steps) > len(seen.steps):
        raise InputError(
            f"there are rows of {len(rows_of_steps)} steps, and {len(seen.steps)} were recorded."
        )
    return rows_of_steps


def _report_all_steps(reports: list[StepReport], shared_cause: str) -> StepReport:
    """Return the reports of several steps as one, with the numbers of the worst step.

    Args:
        reports: of the steps, in order.
        shared_cause: the cause that all steps show together, in words; it replaces that
            of each step's first failure. "" where there is none.
    """
    first = reports[0]
    worst = max(reports, key=lambda report: report.error)
    findings = []
    for n, report in enumerate(reports):
        for finding in report.findings:
            cause = finding.cause
            if shared_cause and finding is report.failures[0]:
                cause = shared_cause
            about = f"step {n}: {finding.about}"
            findings.append(replace(finding, about=about, cause=cause))
    not_reached_in_any_step = {
        name: bound
        for name, bound in first.not_reached.items()
        if all(name in report.not_reached for report in reports)
    }
    return replace(
        worst,
        loss=f"{len(reports)} steps",
        findings=findings,
        exercised=first.exercised,
        unexercised=first.unexercised,
        at_bound=sum(report.at_bound for report in reports),
        other_side=sum(report.other_side for report in reports),
        not_reached=not_reached_in_any_step,
        reach=first.reach,
    )


# ---- the verdict ---------------------------------------------------------------------
def report_step(
    name: str,
    goal: Goal,
    case: StepCase,
    found: Gradient,
    passes: int,
    bound: float,
    start: float,
    run_again: Callable[[], Gradient] | None = None,
    half: torch.dtype | None = None,
    explain: bool = True,
    make_other_attempt: Callable[[], Attempt] | None = None,
    in_float32: bool = False,
    doubts: Callable[[Attempt, Cause], str] | None = None,
) -> StepReport:
    """Compare a step's gradient to the reference's, and report whether it agrees; if it
    does not, report why.

    Args:
        name: the step in the report.
        goal: the objective with its numbers.
        case: the rows and the reference's forward pass.
        found: the gradient of the step, by the names of the parameters.
        passes: the number of its backward passes; 0: unknown.
        bound: the relative error that is allowed.
        start: when the check began, by time.perf_counter.
        run_again: runs the step once more.
        half: the half precision in which the step computes; None: none.
        explain: search for the cause of a difference.
        make_other_attempt: runs the step on other rows, to confirm a cause.
        in_float32: allow what rounding to float32 moves the gradient by.
        doubts: from the step and a cause to words that speak against it.
    """
    comparison = compare(goal, case, found, bound)
    goal = comparison.goal
    bound_before = bound
    if in_float32:
        bound = widen_bound(goal, case, bound, comparison.error)
    findings = _findings_beside_gradient(goal, case, found, bound, half)
    if goal.grouped and case.reads_groups is None:
        groups = [row.group for row in case.rows]
        findings.append(
            note(
                "gradient",
                "tokens are counted per group, not over the whole step (groups of the "
                f"rows: {groups})",
                cause="micro-batches of these groups, each with its own mean, have the "
                "same gradient",
            )
        )
    is_wrong = not comparison.error <= bound or wrong_parameters(
        case.forward.model, comparison.found, comparison.want, bound
    )
    if is_wrong and not explain:
        not_searched = Cause(NOT_SEARCHED, kind="unknown")
        findings.append(_difference_finding(comparison, not_searched))
    elif is_wrong and not half and bound < comparison.error < CLOSE_TO_BOUND * bound:
        findings.append(_difference_finding(comparison, TOO_CLOSE))
    elif is_wrong:
        attempt = Attempt(comparison, case, bound, run_again)
        causes = _findings_with_cause(attempt, make_other_attempt, doubts)
        findings += name_single_passes(causes, goal, passes, len(case.rows))
    has_failure = any(f.severity == "failure" for f in findings)
    exercised = _exercised(goal, case, passes)
    unexercised = _unexercised(goal, case, passes)
    if case.rows[0].routes is not None:
        if are_routes_own(case):
            unexercised.append("the replay of routes (they are what the model chooses)")
        else:
            exercised.append("replayed routes of experts")
    return StepReport(
        loss=name,
        objective=goal.objective.name,
        hp=_hyperparameters(goal),
        findings=findings,
        read_as="",  # a step is called with a model and rows, whatever their names
        assumptions=_assumptions(comparison, case, bound, bound_before),
        oracles={"gradient": "failure" if has_failure else "ok"},
        tolerances={"gradient, relative": bound},
        seconds=time.perf_counter() - start,
        error=comparison.error,
        exercised=exercised,
        unexercised=unexercised,
        at_bound=comparison.at_bound,
        other_side=comparison.other_side,
        reach=reach(goal, case.forward, case.padded),
        not_reached=_not_reached(goal, case, bound, comparison),
        computed_in=_dtype_name(half) if half else "",
        moved=str(case.moved) if case.moved else "",
    )


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _hyperparameters(goal: Goal) -> dict[str, Any]:
    """Return the numbers of the objective, with the temperature, the KL coefficient and
    the value loss.
    """
    hp = goal.hp | {"temperature": goal.temperature}
    hp = hp | {"beta": goal.beta} if goal.beta else hp
    if goal.value is None:
        return hp
    hp = hp | {"value_coef": goal.value.coef}
    return hp | {"value_clip": goal.value.clip} if goal.value.reads_old_values else hp


def _assumptions(
    comparison: GradientComparison, case: StepCase, bound: float, bound_before: float
) -> list[str]:
    """Return in words what the comparison assumes.

    Args:
        comparison: the gradient beside the right one.
        case: the rows and the reference's forward pass.
        bound: the relative error that is allowed.
        bound_before: the same, before rounding to float32 widened it.
    """
    goal = comparison.goal
    assumptions = [f"allowed error of the gradient: {bound:.2g} of its norm"]
    if bound > bound_before:
        assumptions[0] += (
            f", {ALLOWED_ROUNDINGS} times what rounding to float32 moves it"
        )
    if goal.objective.agg == "group-token-mean":
        where = "per group" if goal.grouped else "over the whole step, not per group"
        assumptions.append(f"tokens are counted {where}")
    if comparison.at_bound:
        what = "responses" if goal.objective.level in REDUCE else "tokens"
        assumptions.append(
            f"{what} within {case.shift:.2g} of a clip bound, which rounding may cross: "
            f"{comparison.at_bound}; either side is right, "
            f"and on another side than float64: {comparison.other_side}"
        )
    return assumptions


def _findings_beside_gradient(
    goal: Goal, case: StepCase, found: Gradient, bound: float, half: torch.dtype | None
) -> list[Finding]:
    """Return the findings that need no reference: half precision, gradients of frozen
    parameters, ranks that differ, a critic that shares no layer.
    """
    findings: list[Finding] = []
    if goal.value is not None and not shares_layers(case.forward):
        findings.append(note("value", SEPARATE_CRITIC))
    if half:
        kind = _dtype_name(half)
        text = f"the step computes in {kind}: compared to {bound:.2g} of the norm only"
        findings.append(
            note(
                "gradient",
                text,
                cause="check it in float32: there 2e-5 shows",
                subject=kind,
            )
        )
    if unnamed := sorted(set(found) - set(case.forward.model.shapes)):
        findings.append(
            note(
                "parameters",
                f"{len(unnamed)} frozen parameters have a gradient, {unnamed[0]} first",
            )
        )
    if case.apart > bound:
        findings.append(
            fail(
                "gradient",
                "between the ranks",
                "one gradient on every rank",
                f"gradients that are {case.apart:.2g} of their norm apart",
                cause="the ranks do not share one gradient",
            )
        )
    return findings


def _exercised(goal: Goal, case: StepCase, passes: int) -> list[str]:
    """Return in words what the rows and the step's backward passes exercise."""
    exercised = batch.describe_rows(case.rows, goal.temperature, case.forward.lp())
    if goal.value is not None:
        exercised.append(f"the value loss {goal.value.loss}")
    if passes == 1:
        exercised.append("one backward pass")
    elif passes > 1:
        exercised.append(f"{passes} backward passes")
    return exercised


def _unexercised(goal: Goal, case: StepCase, passes: int) -> list[str]:
    """Return in words what the step was not tested with."""
    unexercised = [f"{k} ({why})" for k, why in case.unvaried.items()]
    if goal.value is not None and not _values_leave_their_range(goal.value, case):
        unexercised.append("the clip of values (no value has left its range)")
    if passes == 1:
        unexercised.append("micro-batches")
    if world_size() == 1:
        unexercised.append("several ranks")
    return unexercised + batch.find_unusual_values_missing(case.rows)


def _values_leave_their_range(value: ValueTerm, case: StepCase) -> bool:
    """Tell whether the clip of the value loss acts on a token that trains."""
    V, old = case.forward.statistics().V, case.padded.old_values
    if not value.reads_old_values or V is None or old is None:
        return True
    return bool(((V - old).abs() > value.clip)[case.padded.mask].any())


def _findings_with_cause(
    attempt: Attempt,
    make_other_attempt: Callable[[], Attempt] | None,
    doubts: Callable[[Attempt, Cause], str] | None = None,
) -> list[Finding]:
    """Return findings that name the cause of a difference.

    The verdict is known: an error in the search for a cause becomes words, and is not
    raised. A second draw of rows tests a cause: it is not named if the step differs there
    for another reason, and it is called possible if the step agrees there. A recorded
    step has no second draw, and `doubts` tells what speaks against a cause.
    """
    try:
        findings = attempt.findings()
    except Exception as e:
        return [
            _difference_finding(
                attempt.comparison,
                Cause(
                    f"{UNKNOWN}: the search for one ends in {type(e).__name__}: {one_line(e)}",
                    kind="unknown",
                ),
            )
        ]
    cause = Cause(findings[0].cause, findings[0].fault_ids)
    if {*cause.ids} <= OBSERVATIONS:
        return findings
    if make_other_attempt is None:
        if {*cause.ids} <= OF_PARAMETERS:
            return findings
        doubt = doubts(attempt, cause) if doubts else ""
        return [replace(findings[0], cause=f"{doubt}{cause}"), *findings[1:]]
    try:
        other_attempt = make_other_attempt()
        if other_attempt.comparison.error <= other_attempt.bound:
            words = f"possible, though the step agrees on other rows: {cause}"
            return [replace(findings[0], cause=words), *findings[1:]]
        if {*cause.ids} <= {*other_attempt.findings(cause)[0].fault_ids}:
            return findings
    except Exception:
        words = f"possible, and not tested on other rows: {cause}"
        return [replace(findings[0], cause=words), *findings[1:]]
    unknown = replace(
        findings[0],
        cause=f"{UNKNOWN} on two draws of rows",
        fault_ids=(),
        cause_kind="unknown",
    )
    return [unknown, *findings[1:]]


def _doubt_of_halves(passes: Sequence[Passed], first: Attempt, cause: Cause) -> str:
    """Return words to put in front of a cause that two halves of the rows do not
    confirm; "" where both confirm it.

    Args:
        passes: the backward passes of the step.
        first: the step.
        cause: what was found on all its rows.
    """
    if len(passes) == 1:
        return ONE_PASS
    halves = halves_of(passes, first.case.rows)
    return NO_HALVES if halves is None else doubt_of(halves, first, cause)


def doubt_of(halves: Halves, first: Attempt, cause: Cause) -> str:
    """Return words to put in front of a cause that these halves do not confirm; ""
    where both confirm it.

    Args:
        halves: of the rows of the step.
        first: the step.
        cause: what was found on all its rows.
    """
    try:
        fit = fits(halves, first.comparison, first.case, first.bound, cause)
    except Exception:  # an error in the search is not the verdict
        return NO_HALVES
    return {True: "", False: UNFIT, None: NO_HALVES}[fit]


def _not_reached(
    goal: Goal, case: StepCase, bound: float, comparison: GradientComparison
) -> dict[str, str]:
    """Return the numbers that the rows do not exercise.

    An error while another value of a number is tried becomes words, and is not raised.
    """
    try:
        return not_reached(goal, case.forward, case.padded, bound, comparison.rows)
    except Exception as e:
        return {
            "the objective's numbers": f"trying other values ends in {type(e).__name__}"
        }


def with_cause(report: StepReport, cause: str) -> StepReport:
    """Return the report with a cause of its first failure.

    Args:
        report: one that fails.
        cause: in words.
    """
    first = report.failures[0]
    findings = [replace(f, cause=cause) if f is first else f for f in report.findings]
    return replace(report, findings=findings)


def _difference_finding(comparison: GradientComparison, cause: str | Cause) -> Finding:
    """Return the finding that the gradients differ, and nothing beyond that."""
    right = Number(float(comparison.want.norm()), "norm")
    found = Number(comparison.error, "distance", "of that norm")
    return fail("gradient", "over all parameters", right, found, cause=cause)
