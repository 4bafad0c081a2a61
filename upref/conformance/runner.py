# SPDX-License-Identifier: Apache-2.0
"""Run one case with an adapter: the verdict, and why there is none."""

import copy
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist

from upref.conformance.adapter import Adapter, EngineAdapter, TrainingAdapter
from upref.conformance.cases import Case
from upref.conformance.engines import (
    LEARNING_RATE,
    NO_MOVE,
    WRITE_MOVE,
    compare_moved,
    compare_moves,
)
from upref.conformance.preparation import (
    Trained,
    find_fault,
    make_reference,
    make_samples,
    meant,
)
from upref.conformance.updates import (
    UntrainedRowsError,
    numbers_of_updates,
    rows_of_updates,
)
from upref.errors import InputError
from upref.step.check import StepReport, check_recorded, check_step, with_cause
from upref.step.compare.case import (
    HiddenGradientError,
    draw_old_policy,
    make_goal,
    perturb,
)
from upref.step.compare.moved import StaleWeightsError
from upref.step.compare.record import Recorded, Step, gradients, watched
from upref.step.explain.divisors import is_scaled
from upref.step.inputs import rows as step_rows
from upref.step.inputs.families import END, V, tiny
from upref.step.inputs.reference import TorchModel, as_float64
from upref.step.inputs.rows import CASE_AXES, Row
from upref.user_code.guard import one_line

NO_TRAIN = "the adapter has no method train, which hands rewards to the trainer"


class Status(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"  # the framework has no such setting
    COULD_NOT_RUN = "could not run"  # the adapter or the framework raised an error


@dataclass(frozen=True)
class Outcome:
    """The result of one case.

    Args:
        case: the case.
        status: how it ended.
        reason: why it was skipped or could not run; of a failure its cause.
        settings: the framework's own configuration of the case.
        report: the report on the step; None where no step was compared.
        seconds: of CPU time.
        traceback: of an error that the adapter raised, from the adapter's own line on.
    """

    case: Case
    status: Status
    reason: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    report: StepReport | None = None
    seconds: float = 0.0
    traceback: str = ""

    def text(self, verbose: bool = False) -> str:
        """Return the outcome as lines: the cause, the settings and the report.

        Args:
            verbose: print the report with its assumptions.
        """
        lines = [f"{self.case.id}: {self.status}"]
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {key} = {value}" for key, value in self.settings.items()]
        if self.report is not None and self.status is Status.FAILED:
            lines.append(self.report.text(verbose))
        if self.traceback:
            lines.append(self.traceback)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def make_rows(case: Case, model: Any, seed: int = 0) -> list[Row]:
    """Return eight responses with advantages, masks and the log-probabilities of an
    older policy, so that the model's ratios reach the bounds of the case's objective.

    Args:
        case: its objective decides the ratios, its fields the masks and ends.
        model: a causal language model of transformers.
        seed: of the tokens and ratios.
    """
    without: tuple[str, ...] = ()
    if case.equal_lengths:
        without = ("lengths", "holes")
    elif not case.holes:
        without = ("holes",)
    rows = step_rows.make_rows(V, seed, without, END)
    if case.ends:
        for row in rows:
            row.response[-1] = END
    if case.end_inside:
        for row in rows:
            if len(row.response) > 4:
                row.response[len(row.response) // 2] = END
    goal = make_goal(case.objective, dict(case.hp), case.temperature)
    draw_old_policy(
        rows, TorchModel(model), goal, seed=seed, coarse=case.dtype != "float32"
    )
    return rows


def run(
    adapter: Adapter, case: Case, *, seed: int = 0, explain: bool = True
) -> Outcome:
    """Run one case and compare the gradient that the optimizer gets with the float64
    reference.

    Args:
        adapter: the framework's.
        case: what to set and to compare with.
        seed: of the rows.
        explain: search for the cause of a difference. The search may take longer than
            the case.

    Returns:
        The outcome. An error of the adapter or of the framework is an outcome; an error
        of upref is raised.

    Raises:
        InputError: the case has several ranks, and this process is none of them: use
            `run_ranks`.
    """
    if case.ranks > 1 and _world_size() != case.ranks:
        raise InputError(
            f"{case.id} has {case.ranks} ranks: run it with upref.conformance.run_ranks."
        )
    start = time.process_time()
    settings: dict[str, str] = {}
    errors_of_adapter: list[Exception] = []

    def could_not_run(reason: str, error: Exception | None = None) -> Outcome:
        """Return the outcome COULD_NOT_RUN, with the settings and the time so far, and
        the traceback of the error if one is given.
        """
        trace_text = "" if error is None else _traceback_from_adapter(error)
        seconds = time.process_time() - start
        return Outcome(
            case, Status.COULD_NOT_RUN, reason, settings, None, seconds, trace_text
        )

    if case.advantages and not hasattr(adapter, "train"):
        return Outcome(case, Status.SKIPPED, NO_TRAIN)
    if case.engine and not hasattr(adapter, "move"):
        return Outcome(case, Status.SKIPPED, NO_MOVE)
    try:
        if reason := adapter.supports(case):
            return Outcome(case, Status.SKIPPED, reason)
        settings |= adapter.settings(case)
        scale = adapter.scale(case)
    except Exception as error:
        return could_not_run(describe_error(error), error)

    def call_adapter(method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the adapter; note its error."""
        try:
            return method(*arguments)
        except Exception as error:
            errors_of_adapter.append(error)
            raise

    def step(model: Any, rows: list[Row]) -> Any:
        """Let the adapter train, by `move` in a case of an engine."""
        method = cast(EngineAdapter, adapter).move if case.engine else adapter.step
        return call_adapter(method, model, rows, case)

    def train(model: Any, rows: list[Row], reference: Any) -> Any:
        """Let the adapter prepare the rows and train."""
        method = cast(TrainingAdapter, adapter).train
        return call_adapter(method, model, rows, case, reference)

    try:
        if case.advantages:
            report = _train_and_compare_all(train, case, scale, seed, explain)
        elif case.engine:
            learning_rate = _learning_rate(adapter)
            report = _move_and_compare(step, case, learning_rate, scale, seed, explain)
        else:
            report = _train_and_compare(step, case, scale, seed, explain)
    except (UntrainedRowsError, StaleWeightsError) as error:
        return Outcome(
            case,
            Status.FAILED,
            str(error),
            settings,
            seconds=time.process_time() - start,
        )
    except Exception as error:
        if errors_of_adapter:
            return could_not_run(
                describe_error(errors_of_adapter[0]), errors_of_adapter[0]
            )
        if isinstance(error, HiddenGradientError):
            return could_not_run(WRITE_MOVE)
        if not isinstance(error, InputError):
            raise
        return could_not_run(str(error))
    seconds = time.process_time() - start
    status, reason = _status_and_reason(case, report, scale)
    return Outcome(case, status, reason, settings, report, seconds)


def _status_and_reason(
    case: Case, report: StepReport, scale: float
) -> tuple[Status, str]:
    """Return whether a case that ran passed, and why it did not, in words. A case of
    float32 fails where the step computes in half precision, even if the gradient
    agrees.

    Args:
        case: the case.
        report: the comparison of its gradient.
        scale: the factor of the loss that the adapter states.
    """
    half_precision_words = _half_precision_words(report)
    if case.dtype == "float32" and half_precision_words:
        return Status.FAILED, half_precision_words
    if report:
        return Status.PASSED, ""
    reason = report.failures[0].cause
    if case.updates == 1 and is_scaled(report.failures[0]):
        reason += (
            f"; if your documentation says so, multiply scale(case), which is {scale:g}, "
            "by this factor"
        )
    return Status.FAILED, reason


HALF_PRECISIONS = ("bfloat16", "float16")  # subjects of check_step's note


def _half_precision_words(report: StepReport) -> str:
    """Return what the report notes on a step that computes in half precision, or ""."""
    halves = (
        finding for finding in report.findings if finding.subject in HALF_PRECISIONS
    )
    return next((finding.about for finding in halves), "")


def describe_error(error: Exception) -> str:
    """Return the type and message of an error, and the line that raised it.

    Args:
        error: an exception that was raised and caught.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}, in {place.name}"
    return f"{type(error).__name__}: {one_line(error)} ({where})"


UPREF = Path(__file__).parents[1]


def _traceback_from_adapter(error: Exception) -> str:
    """Return the traceback of an error without the calls of upref that lead to the
    adapter.
    """
    trace = error.__traceback__
    while trace is not None and _is_of_upref(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace)
    return "".join(lines).rstrip()


def _is_of_upref(file: str) -> bool:
    """Tell whether a file is one of upref's."""
    return Path(file).is_relative_to(UPREF)


def _train_and_compare(
    step: Callable[[Any, list[Row]], Any],
    case: Case,
    scale: float,
    seed: int,
    explain: bool,
) -> StepReport:
    """Make the model and the rows, let the step train, and compare the gradient of each
    optimizer step with the objective's. Of several ranks, the gradient of the first
    step is compared with that on the rows of all.

    Args:
        step: the adapter's.
        case: not one of level 6 or 7.
        scale: the factor of the loss that the adapter states.
        seed: of the rows.
        explain: search for the cause of a difference.

    Raises:
        InputError: the optimizer made another number of steps than the case has.
        UntrainedRowsError: as `rows_of_updates`.
    """
    model = make_model(case)
    rows = make_rows(case, model, seed)
    check_arguments = _check_arguments(case, scale, explain)
    if case.ranks == 1 and case.updates == 1:
        return _compare_one_gradient(step, case, model, rows, check_arguments)
    if case.ranks > 1:
        recorded = _record_on_this_rank(step, case, model, rows)
        rows_of_steps = [rows]
    else:
        recorded = _record_updates(step, case, model, rows)
        rows_of_steps = rows_of_updates(recorded.steps, rows)
    return check_recorded(
        recorded,
        rows_of_steps,
        case.objective,
        without=CASE_AXES,
        **check_arguments,
    )


def _compare_one_gradient(
    step: Callable[[Any, list[Row]], Any],
    case: Case,
    model: Any,
    rows: list[Row],
    check_arguments: dict[str, Any],
) -> StepReport:
    """Let the step train once, and compare its gradient; the case has one process and
    one optimizer step.
    """

    def one_gradient(model: Any, rows: list[Row]) -> Any:
        """Run the adapter's step, and return its one gradient; InputError where it
        recorded several.
        """
        result = step(model, rows)
        if not isinstance(result, Recorded):
            return result
        if len(result.steps) != 1:
            raise InputError(_step_count_words(len(result.steps), 1))
        return result.steps[0].gradients

    return check_step(
        one_gradient,
        model,
        case.objective,
        rows=rows,
        without=CASE_AXES,
        perturb_weights=False,
        **check_arguments,
    )


def _record_updates(
    step: Callable[[Any, list[Row]], Any], case: Case, model: Any, rows: list[Row]
) -> Recorded:
    """Let the step train, and return its optimizer steps: those that the adapter
    recorded itself, or else those of torch's optimizers.

    Raises:
        InputError: there is another number of steps than the case has.
    """
    reference = TorchModel(model)
    steps: list[Step] = []
    with watched(model, steps, case.updates + 1, by_pass=True):
        result = step(model, rows)
    recorded = result if isinstance(result, Recorded) else Recorded(reference, steps)
    if len(recorded.steps) != case.updates:
        raise InputError(_step_count_words(len(recorded.steps), case.updates))
    return recorded


def _check_arguments(case: Case, scale: float, explain: bool) -> dict[str, Any]:
    """Return what a case passes to `check_step` and `check_recorded` beside the rows."""
    return dict(case.hp) | {
        "temperature": case.temperature,
        "beta": case.beta,
        "entropy_coef": case.entropy_coef,
        "clip": case.clip,
        "scale": scale,
        "explain": explain,
    }


def _learning_rate(adapter: Adapter) -> float:
    """Return the learning rate of an engine whose optimizer is not torch's: the
    adapter's `learning_rate`, or LEARNING_RATE where it has none.
    """
    return float(getattr(adapter, "learning_rate", LEARNING_RATE))


def _move_and_compare(
    move: Callable[[Any, list[Row]], Any],
    case: Case,
    learning_rate: float,
    scale: float,
    seed: int,
    explain: bool,
) -> StepReport:
    """Make the model and the rows, let an engine train, and compare what the weights
    moved. Of several ranks, each does this.
    """
    model = make_model(case)
    rows = make_rows(case, model, seed)
    compare = compare_moves if case.updates > 1 else compare_moved
    check_arguments = _check_arguments(case, scale, explain)
    return compare(move, model, rows, case, learning_rate, check_arguments)


def _train_and_compare_all(
    train: Callable[[Any, list[Row], Any], Any],
    case: Case,
    scale: float,
    seed: int,
    explain: bool,
) -> StepReport:
    """Make the model, the samples and the reference policy, let the trainer prepare its
    rows and train on them, and compare each of its optimizer steps. Where they differ
    and `explain` is set, a known fault of the preparation is the cause, if one explains
    them.

    Args:
        train: the adapter's.
        case: of level 6.
        scale: the factor of the loss that the adapter states.
        seed: of the rows.
        explain: search for the cause of a difference.

    Raises:
        InputError: the optimizer made another number of steps than the case has, or
            moved the weights too little.
        UntrainedRowsError: as `numbers_of_updates`.
    """
    model = make_model(case)
    samples = make_samples(case, model, seed)
    reference_model = make_reference(model) if case.reference == "model" else None
    before = TorchModel(model)
    steps: list[Step] = []
    with (
        watched(model, steps, case.steps + 1, by_pass=True),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(seed)  # of the first weights of adapters
        result = train(model, copy.deepcopy(samples), reference_model)
    if isinstance(result, Recorded):
        recorded = result
    elif case.reference == "adapter":
        recorded = Recorded(_adapted(model), steps)
    else:
        recorded = Recorded(before, steps)
    if len(recorded.steps) != case.steps:
        raise InputError(_step_count_words(len(recorded.steps), case.steps))
    reference = before if reference_model is None else TorchModel(reference_model)
    numbers = numbers_of_updates(recorded.steps, samples, case.iterations)
    trained = Trained(case, samples, recorded, numbers, reference, scale)
    trained.refuse_small_moves()
    report = trained.compare(meant(case), explain=False)
    if report or not explain:
        return report
    if fault := find_fault(trained):
        return with_cause(report, fault)
    return trained.compare(meant(case), explain=True)


def _adapted(model: Any) -> TorchModel:
    """Return the reference of a model to which a trainer added adapters, without the
    forward that it may have given to this very module.
    """
    own_forward = vars(model).pop("forward", None)
    try:
        return TorchModel(model)
    finally:
        if own_forward is not None:
            model.forward = own_forward


def _step_count_words(made: int, expected: int) -> str:
    """Return the sentence on a wrong number of optimizer steps.

    No driver records more than one step too many, so the adapter may have made more.
    """
    at_least = "at least " if made > expected else ""
    return f"the adapter's optimizer made {at_least}{made} steps, and the case has {expected}."


def make_model(case: Case) -> Any:
    """Make the tiny model of a case, with perturbed weights, in the case's dtype; the
    same weights in each call.
    """
    # Without "eager", transformers computes Gemma 2's attention by sdpa and drops its
    # softcap, whatever the trainer does.
    changes: dict[str, Any] = {}
    if case.family == "gemma2":
        changes["attn_implementation"] = "eager"
    if case.layers is not None:
        changes["num_hidden_layers"] = case.layers
    return perturb(tiny(case.family, **changes)).to(getattr(torch, case.dtype))


def train_on_other_rank(adapter: Adapter, case: Case, seed: int = 0) -> None:
    """Do the part of a rank other than the first: train on its rows and report nothing.

    Args:
        adapter: of the framework.
        case: a case of several ranks.
        seed: of the rows, the same on all ranks.
    """
    if case.engine:

        def move(model: Any, rows: list[Row]) -> Any:
            """Let the adapter's engine train on these rows."""
            return cast(EngineAdapter, adapter).move(model, rows, case)

        _move_and_compare(move, case, _learning_rate(adapter), 1.0, seed, False)
        return
    model = make_model(case)
    rows = make_rows(case, model, seed)

    def step(model: Any, rows: list[Row]) -> Any:
        """Let the adapter train on these rows."""
        return adapter.step(model, rows, case)

    # To record is to gather sharded gradients, in which every rank has to take part. The
    # first rank alone compares what it recorded, so this rank drops its own recording.
    _record_on_this_rank(step, case, model, rows)


def _record_on_this_rank(
    step: Callable[[Any, list[Row]], Any], case: Case, model: Any, rows: list[Row]
) -> Recorded:
    """Let the step train on this rank's rows, and record its first optimizer step.

    Ranks of data parallelism divide the rows: of n ranks, each has every n-th row. Ranks
    of any other parallelism have all rows.

    Raises:
        InputError: the step left no gradient.
    """
    reference = TorchModel(model)
    steps: list[Step] = []
    if case.parallel == "data":
        rows = rows[dist.get_rank() :: dist.get_world_size()]
    with watched(model, steps, 2):
        result = step(model, rows)
    if isinstance(result, Recorded):
        return result
    if not steps:
        # no optimizer stepped: the adapter returned the gradients, or left them in .grad
        gradients_found = result if isinstance(result, dict) else gradients(model)
        if not gradients_found:
            raise InputError(
                "the step left no gradient: it must leave .grad, let an optimizer step, or return one."
            )
        in_float64 = {name: as_float64(g) for name, g in gradients_found.items()}
        steps.append(Step({}, in_float64))
    return Recorded(reference, steps[:1])


def _world_size() -> int:
    """Return the number of ranks of the process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
