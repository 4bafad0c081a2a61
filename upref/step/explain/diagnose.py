# SPDX-License-Identifier: Apache-2.0
"""Why a gradient is not the objective's: parameters, then token weights, then the
forward pass; each claim verified.

In every function, `gradient` and `found` are what the step has, [P] over all parameters,
and `want` and `right` what it should have; `rows` is the right gradient by row, [B, P].
`terms` are the parts of the objective, `forward` is the reference's forward pass over the
rows, and `batch` or `padded` are these rows as tensors. `bound` is the relative error
that rounding may make. A Cause is false where none is found.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.result import name_first
from upref.step.compare.case import HALF_PRECISIONS, GradientComparison, StepCase
from upref.step.compare.forward import (
    MAX_RESIDUAL,
    Forward,
    best_factors,
    clip_norm,
    gradients_by_row,
    is_near,
    reproduces,
)
from upref.step.compare.goal import Goal
from upref.step.explain.causes import find_fault
from upref.step.explain.forwards import model_variants, run_variants
from upref.step.explain.gradient_clipping import divided_after, find_change
from upref.step.explain.normalizers import (
    aggregations,
    explain_factors,
    right_factors,
)
from upref.step.explain.scores import Variant, log_prob_variants
from upref.step.explain.value_causes import ValueSearch
from upref.step.explain.weights import (
    WEIGHT_TOLERANCE,
    Tokens,
    TokenWeights,
    constant_between,
    gradient_of_weights,
    head_residual,
    left_out_cause,
    observe_weights,
    read_weights,
)
from upref.step.inputs.reference import Gradient, Model, TorchModel, text_config
from upref.step.inputs.rows import Padded, Row, locate
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause, Number, join_causes
from upref.verify.report import NOTHING_FITS, UNKNOWN, Finding, fail

PARAMETERS_NAMED = 3  # of several, in a cause
TOKENS_BEHIND = 16  # tokens behind a row that may train
# forward passes whose token weights are read where one factor a response does not
# suffice
PASSES_READ = 2
ON_POLICY = 1e-6  # a log r below that is 0
NOTICEABLE_NORM = 1e-6  # of a parameter's gradient, relative to that of the whole
MOST_VARIANTS = 150  # forward passes with a fault that are tried
PROMPTS = measured.PROMPTS_TRAIN.cause()
# [cause, *more findings]; [] where no cause is found
CauseAndMore: TypeAlias = list[Any]

OTHER_WEIGHTS = Cause("with it the weights of tokens differ too, by no known cause")


class _Dtypes(TorchDispatchMode):
    """Collects the dtypes of all tensors that operations inside get, and of those among
    them that have a gradient.
    """

    def __init__(self) -> None:
        """Begin with no dtype."""
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.with_gradient: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the dtypes of the tensors among the positional arguments, and call
        `func`.
        """
        tensors = [x for x in args if isinstance(x, Tensor)]
        self.dtypes |= {x.dtype for x in tensors}
        self.with_gradient |= {x.dtype for x in tensors if x.requires_grad}
        return func(*args, **(kwargs or {}))


def half_precision(run: Callable[[], object]) -> tuple[torch.dtype | None, bool]:
    """Run a step, and return the half precision that it uses.

    Args:
        run: the step.

    Returns:
        bfloat16 if any operation gets it, else float16 if any does, else None; and
        whether a tensor with a gradient has it. Others may be the logger's alone, or of
        a kernel with a backward pass of its own.
    """
    with _Dtypes() as mode:
        run()
    for dtype in HALF_PRECISIONS:
        if dtype in mode.dtypes:
            return dtype, dtype in mode.with_gradient
    return None, False


def wrong_parameters(
    model: Model, found: Tensor, right: Tensor, bound: float
) -> list[str]:
    """Return the parameters whose gradient is wrong: by more than 50 times the bound
    relative to itself, and by more than a quarter of it relative to the whole gradient.

    Args:
        model: the reference.
        found, right: gradients, [P].
        bound: the relative error that is allowed.

    Returns:
        Names of parameters. In half precision, a bound of 0.01 or more, only a gradient
        that is not finite, or 1e9 times as far away, is wrong.
    """
    size = float(right.norm())
    found_parts = model.split(found)

    def tolerance(part: Tensor) -> float:
        """Return the error that is allowed of one parameter's gradient; a huge one in
        half precision.
        """
        # a parameter has a larger relative error than the whole; in float32 it is 1e-3
        least = max(50 * bound * float(part.norm()), 0.25 * bound * size)
        is_half_precision = bound >= 1e-2
        return 1e9 * least if is_half_precision else least

    return [
        name
        for name, part in model.split(right).items()
        if not float((found_parts[name] - part).norm()) <= tolerance(part)
    ]


def diagnose(
    comparison: GradientComparison,
    case: StepCase,
    bound: float,
    run_again: Callable[[], Gradient] | None,
    only: Cause = NO_CAUSE,
) -> list[Finding]:
    """Return findings on a gradient that differs, the cause in the first one.

    Causes that show in the gradient alone are tried first, then those of single
    parameters and terms, and last those of token weights and forward passes.

    Args:
        comparison: the gradient beside the right one.
        case: the rows and the reference's forward pass.
        bound: the relative error that is allowed.
        run_again: runs the step once more.
        only: a cause that was found on other rows. Of the last group of causes, only
            what it names is tried.
    """
    model = case.forward.model
    found = comparison.found
    want = comparison.want
    cause = (
        _cause_of_missing_gradient(model, found)
        or _cause_of_changed_run(model, found, run_again, bound)
        or _cause_of_other_loss(comparison, case.forward, bound)
        or _cause_in_clip(comparison, case, bound)
        or find_change(comparison.goal, model, comparison.rows, want, found, bound)
    )
    if measured.NORM_CLIPPED.id in cause.ids:
        # a norm of two digits may be chance, and the very factor of an aggregation is not
        cause = _aggregation_of_factor(comparison, case, bound) or cause
    if cause:
        return _gradient_findings(comparison, cause)
    goal, unclipped = _before_clip(comparison)
    terms = Terms.of(goal, case.forward, case.padded)
    critic = [] if goal.value is None else _parameters_of_critic(case.forward)
    # before the parameters: a small term is beyond the bound in some of them alone
    cause = (
        _find_wrong_term(terms, case.forward, case.padded, unclipped, bound)
        or _find_term_aggregation(
            goal, case.forward, case.padded, terms, unclipped, bound
        )
        or _find_value_fault(comparison, critic, terms, case, unclipped, bound)
        or _cause_of_some_parameters(comparison, model, bound)
    )
    if cause:
        return _gradient_findings(comparison, cause)
    of_policy = comparison
    if (
        goal.value is not None
        and goal.clip is None
        and not _is_critic_wrong(comparison, critic, case.forward.model, bound)
    ):
        of_policy = _without_value_loss(comparison, terms, case)
        unclipped = of_policy.found
        terms = Terms.of(of_policy.goal, case.forward, case.padded)
    return _gradient_findings(
        comparison,
        *_explain_by_weights(
            of_policy, terms, unclipped, case.forward, case.padded, bound, only
        ),
    )


def _aggregation_of_factor(
    comparison: GradientComparison, case: StepCase, bound: float
) -> Cause:
    """Return the wrong aggregation that multiplies the right gradient by the factor that
    was found; none where no aggregation does.

    Args:
        comparison: the gradient beside the right one, of which it is a multiple.
        case: the rows.
        bound: the relative error that is allowed.
    """
    goal = comparison.goal
    right = comparison.rows.sum(0)
    factor = comparison.found @ right / (right @ right)
    trains = case.padded.mask.any(1)
    factors = factor.double() * right_factors(goal, case.padded)
    for cause, candidate in aggregations(goal, case.rows, case.padded, factors, []):
        relative_errors = (candidate / factors - 1)[trains].abs()
        if cause and bool((relative_errors <= 10 * bound).all()):
            return cause
    return NO_CAUSE


def _parameters_of_critic(forward: Forward) -> list[str]:
    """Return the parameters that only the critic's values depend on."""
    return _without_effect_on_logits(forward, [*forward.model.shapes])


def _is_critic_wrong(
    comparison: GradientComparison, critic: list[str], model: Model, bound: float
) -> bool:
    """Tell whether the gradient of a parameter of the critic alone is wrong, or there is
    no such parameter. If none is wrong, the value loss is right, but for what it gives
    the layers that policy and critic share.

    Args:
        comparison: the gradient beside the right one.
        critic: the parameters that only the critic's values depend on.
        model: the reference.
        bound: the relative error that is allowed.
    """
    wrong = wrong_parameters(model, comparison.found, comparison.want, bound)
    return not critic or not set(critic).isdisjoint(wrong)


def _without_value_loss(
    comparison: GradientComparison, terms: "Terms", case: StepCase
) -> GradientComparison:
    """Return the comparison of the other terms, where the value loss is right."""
    goal = comparison.goal
    value_rows = gradients_by_row(goal, case.forward, case.padded) - gradients_by_row(
        replace(goal, value=None), case.forward, case.padded
    )
    rows = comparison.rows - value_rows
    return replace(
        comparison,
        goal=replace(goal, value=None),
        rows=rows,
        want=rows.sum(0),
        found=terms.without(comparison.found, "V"),
    )


def _find_value_fault(
    comparison: GradientComparison,
    critic: list[str],
    terms: "Terms",
    case: StepCase,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Return what is wrong with the value loss, if the other terms are right.

    Args:
        comparison: the gradient beside the right one.
        critic: the parameters that only the critic's values depend on.
        terms: of the goal.
        case: the rows and the reference's forward pass.
        gradient: the gradient that was found, before a clip, [P].
        bound: the relative error that is allowed.
    """
    goal = terms.goal
    if goal.value is None:
        return NO_CAUSE
    model = case.forward.model
    of_critic = model.flat({name: torch.ones(model.shapes[name]) for name in critic})
    others = [term for term in goal.coefficients if term != "V"]
    search = ValueSearch(
        goal=goal,
        forward=case.forward,
        batch=case.padded,
        rest=terms.without(gradient, *others),
        allowed=2 * bound * float(gradient.norm()),
        of_critic=of_critic,
    )
    cause = search.find()
    if cause or not _is_critic_wrong(comparison, critic, model, bound):
        return cause
    return search.by_values()


def _gradient_findings(
    comparison: GradientComparison, cause: Cause, *more: Finding
) -> list[Finding]:
    """Return the failure of the gradient with this cause, and further findings."""
    expected = Number(float(comparison.want.norm()), "norm")
    norm_found = float(comparison.found.norm())
    distance = f"{comparison.error * expected.value:.3g}"
    found: Number | str
    if math.isclose(norm_found, expected.value, rel_tol=SAME_NORM):
        found = f"the same norm in another direction: the difference of the two gradients has norm {distance}"
    else:
        remark = f"and the difference of the two gradients has norm {distance}"
        found = Number(norm_found, "norm", remark)
    where = "over all parameters"
    return [fail("gradient", where, expected, found, cause=cause), *more]


SAME_NORM = 1e-6  # relative: two norms so near are printed as one


def _cause_of_missing_gradient(model: Model, found: Tensor) -> Cause:
    """Return the cause that the gradient is not finite, or 0; none where it is
    neither.
    """
    if not found.isfinite().all():
        not_finite = [
            name
            for name, part in model.split(found).items()
            if not part.isfinite().all()
        ]
        return measured.GRADIENT_NOT_FINITE.cause(parameter=not_finite[0])
    if float(found.norm()) == 0:
        return measured.NO_GRADIENT.cause()
    return NO_CAUSE


def _cause_of_changed_run(
    model: Model, found: Tensor, run_again: Callable[[], Gradient] | None, bound: float
) -> Cause:
    """Return the cause that the same step has another gradient when it runs again, by
    chance or by state that it keeps; none where it has the same one.
    """
    if run_again is None or is_near(model.flat(run_again()), found, 10 * bound):
        return NO_CAUSE
    first = _run_seeded(run_again)
    second = _run_seeded(run_again)
    if is_near(model.flat(first), model.flat(second), 10 * bound):
        return measured.RANDOM_STEP.cause()
    return measured.STEP_KEEPS_STATE.cause()


def _cause_of_other_loss(
    comparison: GradientComparison, forward: Forward, bound: float
) -> Cause:
    """Return the cause that parameters without effect on any logit have a gradient;
    none where there is no such parameter.
    """
    least_norm = 10 * bound * float(comparison.found.norm())
    found_parts = forward.model.split(comparison.found)
    outside_objective = [
        name
        for name, part in forward.model.split(comparison.want).items()
        if not part.any() and float(found_parts[name].norm()) > least_norm
    ]
    if not outside_objective:
        return NO_CAUSE
    of_other_loss = _without_effect_on_logits(forward, outside_objective)
    if not of_other_loss:
        return NO_CAUSE
    named = name_first(of_other_loss, PARAMETERS_NAMED)
    return measured.LOSS_OF_OTHER_PARAMETERS.cause(parameters=named)


def _cause_in_clip(
    comparison: GradientComparison, case: StepCase, bound: float
) -> Cause:
    """Return the cause that the norm is not clipped, or clipped before a division; none
    otherwise, and where the step is not meant to clip.
    """
    clip = comparison.goal.clip
    if clip is None:
        return NO_CAUSE
    unclipped = comparison.rows.sum(0)
    if is_near(comparison.found, unclipped, bound):
        return measured.NORM_NOT_CLIPPED.cause()
    counts = {
        "tokens that train": int(case.padded.mask.sum()),
        "responses": len(case.rows),
    }
    return divided_after(clip, unclipped, comparison.found, counts, bound)


def _cause_of_some_parameters(
    comparison: GradientComparison, model: Model, bound: float
) -> Cause:
    """Return the cause that the gradients of some parameters are wrong and those of
    others right; none where all are wrong, or many in no simple way.
    """
    found_parts = model.split(comparison.found)
    right_parts = model.split(comparison.want)
    wrong = wrong_parameters(model, comparison.found, comparison.want, bound)
    right = [name for name in model.shapes if name not in wrong]
    least_norm = NOTICEABLE_NORM * float(comparison.want.norm())
    has_right_part = any(float(right_parts[name].norm()) > least_norm for name in right)
    if not (has_right_part and wrong):
        return NO_CAUSE
    if cause := _cause_in_parameters(found_parts, right_parts, wrong, bound):
        return cause
    if len(wrong) <= len(right_parts) // 4:
        named = name_first(wrong, PARAMETERS_NAMED)
        return measured.SOME_PARAMETERS_WRONG.cause(parameters=named)
    return NO_CAUSE


def _run_seeded(run: Callable[[], Gradient]) -> Gradient:
    """Run with all random generators at one seed, and return the gradient."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return run()


def _without_effect_on_logits(forward: Forward, names: list[str]) -> list[str]:
    """Return the parameters on which no logit of any token depends: another loss must
    have made their gradient.
    """
    generator = torch.Generator().manual_seed(0)
    parameter_gradient = torch.zeros(())
    for z, ids in zip(forward.z, forward.ids, strict=True):
        dz = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        if forward.model.reads_values:
            dz[:, -1] = 0  # a value is no logit
        parameter_gradient = parameter_gradient + forward.model.pull(z, dz, ids).abs()
    parts = forward.model.split(parameter_gradient)
    return [name for name in names if not parts[name].any()]


def _before_clip(comparison: GradientComparison) -> tuple[Goal, Tensor]:
    """Return the goal, and the gradient as it was before the clip of its norm.

    A clip that did not act is removed from the goal. The norm before a clip that acted
    is not known; the right gradient's norm stands for it.
    """
    goal = comparison.goal
    gradient = comparison.found
    if goal.clip is None:
        return goal, gradient
    # a clip that acts leaves a norm equal to its bound
    if float(gradient.norm()) < (1 - 1e-3) * goal.clip:
        return replace(goal, clip=None), gradient
    return goal, gradient * float(
        comparison.rows.sum(0).norm() / comparison.want.norm()
    )


def _cause_in_parameters(
    found: Gradient, want: Gradient, wrong: list[str], bound: float
) -> Cause:
    """Return the cause that these parameters have no gradient, or a multiple of it;
    none where one of them has another gradient.
    """
    without_gradient = [name for name in wrong if not found[name].any()]
    words = []
    if without_gradient:
        words = [f"no gradient: {name_first(without_gradient, PARAMETERS_NAMED)}"]
    for name in wrong:
        if name in without_gradient:
            continue
        gradient = found[name]
        right = want[name]
        times = float(gradient @ right / (right @ right).clamp(min=1e-300))
        tolerance = 100 * bound
        if (gradient - times * right).norm() > tolerance * right.norm():
            return NO_CAUSE  # it is no multiple
        if abs(times - 1) < tolerance:
            return NO_CAUSE  # it is right
        words.append(f"{name} has {times:.5g} times its gradient")
    return measured.SOME_PARAMETERS_SCALED.cause(each="; ".join(words[:4]))


# ---- weights and forward passes ------------------------------------------------------
def _explain_by_weights(
    comparison: GradientComparison,
    terms: "Terms",
    gradient: Tensor,
    forward: Forward,
    padded: Padded,
    bound: float,
    only: Cause = NO_CAUSE,
) -> CauseAndMore:
    """Find the faulty forward pass, or the token weights, that give a gradient.

    Args:
        comparison: the gradient beside the right one.
        terms: the terms of the right forward pass.
        gradient: the gradient that was found, before a clip.
        forward: the right forward pass.
        padded: its rows.
        bound: the relative error that is allowed.
        only: a cause that was found on other rows; only what it names is tried.

    Returns:
        [cause, *more findings]; the cause is UNKNOWN where nothing gives the gradient.
    """
    search = _Search(comparison, terms, gradient, forward, padded, bound, only)
    return search.explain()


@dataclass(frozen=True)
class _Candidate:
    """A forward pass that may have made the gradient, and its rows as the step has
    them.
    """

    cause: Cause  # the fault of the forward pass; empty where it has none
    forward: Forward
    batch: Padded


@dataclass
class _Search:
    """The search for the forward pass and the token weights that give a gradient.

    The arguments are those of `_explain_by_weights`. Each method returns
    [cause, *more findings], or [] where it finds no cause.
    """

    comparison: GradientComparison
    terms: "Terms"
    gradient: Tensor
    forward: Forward
    padded: Padded
    bound: float
    only: Cause
    # candidates with the part of the gradient that no factors of their rows explain
    by_residual: list[tuple[float, _Candidate]] = field(default_factory=list)
    # the same for candidates that the head's gradient already refutes, with a lower
    # bound of that part
    by_head_residual: list[tuple[float, _Candidate]] = field(default_factory=list)
    # the part that no token weights explain, of each forward pass that was read
    residuals: list[float] = field(default_factory=list)
    is_stopped: bool = False  # there were more variants than MOST_VARIANTS

    @property
    def goal(self) -> Goal:
        """The objective, without a clip that did not act."""
        return self.terms.goal

    @property
    def max_residual(self) -> float:
        """The part of a gradient that may be left where an explanation fits, relative."""
        return max(MAX_RESIDUAL, 3 * self.bound)

    @property
    def has_bonus(self) -> bool:
        """Whether the objective has a term that token weights do not describe."""
        goal = self.goal
        return bool(goal.entropy_coef or goal.z_loss_coef or goal.value)

    def explain(self) -> CauseAndMore:
        """Try each explanation in turn, the cheapest first."""
        factors, residual = best_factors(self.comparison.rows, self.gradient)
        if residual <= self.bound:
            cause = _find_shared_aggregation(
                self.comparison,
                self.terms,
                self.forward,
                self.padded,
                factors,
                self.bound,
            )
            if cause:
                return [cause]
        return (
            self._explain_by_log_probs(residual)
            or self._explain_right_forward(factors, residual)
            or self._explain_with_padding()
            or self._explain_by_variants(model_variants)
            or self._explain_nearest()
            or self._explain_bonus()
            or [self._unknown()]
        )

    def _explain_by_log_probs(self, residual: float) -> CauseAndMore:
        """Try faults of the log-probabilities, if the right ones do not fit.

        Args:
            residual: the part of the gradient that the right log-probabilities leave
                with any factors of the rows.
        """
        rows = gradients_by_row(self.goal, self.forward, self._on_policy())
        _, on_policy_residual = best_factors(rows, self.gradient)
        if min(residual, on_policy_residual) > self.max_residual:
            return self._explain_by_variants(log_prob_variants)
        return []

    def _on_policy(self) -> Padded:
        """Return the rows without old log-probabilities, so that r = 1."""
        return replace(self.padded, old=None)

    def _explain_right_forward(self, factors: Tensor, residual: float) -> CauseAndMore:
        """Explain the gradient by the token weights that are read with the right forward
        pass.

        Args:
            factors: of the rows, which fit the gradient best, [B].
            residual: the part of the gradient that they leave.
        """
        candidate = _Candidate(NO_CAUSE, self.forward, self.padded)
        factors_fit = residual <= self.max_residual
        return self._explain_candidate(
            candidate, row_factors=factors if factors_fit else None
        )

    def _explain_with_padding(self) -> CauseAndMore:
        """Explain the gradient by token weights that are read with the tokens that were
        fed behind each row: they may train too.
        """
        fed_behind = _without_other_responses(self.forward)
        if not any(fed_behind):
            return []
        longer = [
            replace(row, response=row.response + behind[:TOKENS_BEHIND])
            for row, behind in zip(self.forward.rows, fed_behind, strict=False)
        ]
        for z in _padding_logits(self.forward, longer):
            forward = Forward(self.forward.model, longer, self.goal.temperature, z)
            candidate = _Candidate(NO_CAUSE, forward, self.padded)
            if findings := self._explain_candidate(candidate, scored=self.forward):
                return findings
        return []

    def _explain_by_variants(
        self, variants: Callable[[Forward], Iterator[Variant]]
    ) -> CauseAndMore:
        """Find the first faulty forward pass that explains the gradient.

        A loop that makes its old log-probabilities itself makes them with its fault, so
        r is 1: each fault of the log-probabilities is tried with the old
        log-probabilities of the rows, and with r = 1.

        Args:
            variants: makes the faults to try.
        """
        batches = [(self.padded, NO_CAUSE)]
        if variants is log_prob_variants:
            batches.append((self._on_policy(), self._on_policy_cause()))
        faulty = run_variants(self.forward, variants, self.only)
        for number, (fault, variant) in enumerate(faulty):
            if number == MOST_VARIANTS:
                self.is_stopped = True
                return []
            for batch, ratio_cause in batches:
                candidate = _Candidate(join_causes(fault, ratio_cause), variant, batch)
                head_left = _least_residual(self.goal, variant, batch, self.gradient)
                if head_left > 2 * self.max_residual:
                    self.by_head_residual.append((head_left, candidate))
                    if variants is model_variants and (
                        findings := self._explain_by_head(candidate)
                    ):
                        return findings
                    continue
                try:
                    rows = gradients_by_row(self.goal, variant, batch)
                except InputError:
                    break  # no backward pass: of a cache that is written in place
                if findings := self._explain_by_rows(candidate, rows):
                    return findings
        return []

    def _on_policy_cause(self) -> Cause:
        """Return the cause that r is always 1; none where the rows are on policy
        anyway.
        """
        if self.padded.old is None:
            return NO_CAUSE
        log_r = (self.terms.lp - self.padded.old) * self.padded.mask
        if log_r.abs().max() < ON_POLICY:
            return NO_CAUSE
        return measured.RATIO_ALWAYS_ONE.cause()

    def _explain_by_head(self, candidate: _Candidate) -> CauseAndMore:
        """Read the weights of a candidate whose token weights may give the head's part
        of the gradient, though no factors of its rows do.
        """
        if self.has_bonus:
            return []
        if head_residual(candidate.forward, self.gradient) <= 2 * self.max_residual:
            return self._explain_candidate(candidate)
        return []

    def _explain_by_rows(self, candidate: _Candidate, rows: Tensor) -> CauseAndMore:
        """Compare the gradient with that of a candidate, then with factors of its rows.

        Args:
            candidate: the forward pass.
            rows: its gradient by row, [B, P].

        Returns:
            The candidate's cause alone where its own gradient is the one that was
            found; what its token weights show where factors of its rows give that;
            else [].
        """
        _, residual = best_factors(rows, self.gradient)
        self.by_residual.append((residual, candidate))
        found = self.comparison.found
        expected = clip_norm(rows.sum(0), self.goal.clip)
        if is_near(found, expected, self.bound):
            return [candidate.cause]
        factors_fit = residual <= self.max_residual
        if self.has_bonus or not factors_fit:
            return []
        findings = self._explain_candidate(candidate)
        share_left = float((found - expected).norm() / found.norm())
        if findings == [candidate.cause] and share_left > 3 * self.bound:
            return [join_causes(candidate.cause, _smaller_fault(share_left))]
        return findings

    def _explain_candidate(
        self,
        candidate: _Candidate,
        scored: Forward | None = None,
        row_factors: Tensor | None = None,
    ) -> CauseAndMore:
        """Explain the gradient by the token weights that are read with a forward pass.

        Args:
            candidate: the forward pass.
            scored: the pass whose tokens the explanation is about, where the candidate
                has more tokens; None: the candidate's own.
            row_factors: the factor of each response, where these alone give the
                gradient, [B].
        """
        scored = scored or candidate.forward
        if scored is self.forward:
            terms = self.terms
        else:
            terms = Terms.of(self.goal, candidate.forward, candidate.batch)
        policy = terms.without(self.gradient, "H", "Z", "V")
        reading = read_weights(candidate.forward, policy)
        self.residuals.append(reading.residual)
        if reading.residual > self.max_residual:
            return []
        if candidate.cause:
            wrong_term = _find_wrong_term(
                terms, candidate.forward, candidate.batch, self.gradient, self.bound
            )
            if wrong_term:
                return [join_causes(candidate.cause, wrong_term)]

        def give_the_gradient(weights: list[Tensor]) -> bool:
            """Tell whether these weights of all tokens give the policy term's gradient."""
            gradient = gradient_of_weights(candidate.forward, weights)
            return reproduces(gradient, policy, 2 * self.max_residual)

        return _explain_reading(
            scored,
            candidate.batch,
            reading,
            terms,
            self.bound,
            candidate.cause,
            give_the_gradient,
            row_factors,
            self.only,
        )

    def _explain_nearest(self) -> CauseAndMore:
        """Explain the gradient by token weights that are read with the candidates that
        left the least of it.
        """
        by_head = sorted(self.by_head_residual, key=itemgetter(0))
        for _, candidate in by_head[: 2 * PASSES_READ]:
            with suppress(InputError):
                rows = gradients_by_row(self.goal, candidate.forward, candidate.batch)
                _, residual = best_factors(rows, self.gradient)
                self.by_residual.append((residual, candidate))
        nearest = sorted(self.by_residual, key=itemgetter(0))
        for _, candidate in nearest[:PASSES_READ]:
            if findings := self._explain_candidate(candidate):
                return findings
        return []

    def _explain_bonus(self) -> CauseAndMore:
        """Try an entropy bonus and a z-loss of any coefficients."""
        bonus_gradients = [self.terms.gradients["H"], self.terms.gradients["Z"]]
        reading = read_weights(self.forward, self.gradient, bonus_gradients)
        fits = reading.residual <= self.max_residual
        if not fits:
            return []
        coefficients = ", ".join(f"{-number:.4g}" for number in reading.extra)
        return [measured.ENTROPY_BONUS_OR_Z_LOSS.cause(coefficients=coefficients)]

    def _unknown(self) -> Cause:
        """Return the cause that is named where nothing explains the gradient."""
        left_over = f"{self.residuals[0]:.2g} of it is left"
        router = _router_words(self.forward.model)
        words = (
            f"{UNKNOWN}; no weights of these tokens give the gradient: {left_over}, so "
            f"the forward pass differs, or other tokens train{router}"
        )
        if self.goal.value is not None:
            words += ", or the value loss is wrong as well"
        if self.is_stopped:
            words += f"; the search stopped after {MOST_VARIANTS} forward passes"
        return Cause(words, kind="unknown")


def _least_residual(
    goal: Goal, forward: Forward, padded: Padded, gradient: Tensor
) -> float:
    """Return a lower bound of what any factors of the rows leave of the gradient,
    relative to its norm: what they leave of the head's part. 0 where the model has no head
    of its own.
    """
    try:
        head_rows = forward.of_head(goal.loss(goal.parts(forward.statistics(), padded)))
    except InputError:
        return 0.0
    model = forward.model
    if (
        head_rows is None
        or not isinstance(model, TorchModel)
        or not head_rows.isfinite().all()
    ):
        return 0.0
    parts = model.split(gradient)
    found = torch.cat([parts[n] for n in model.head_names])
    if len(found) != head_rows.shape[1]:  # projections of the gradient alone are known
        return 0.0
    size = float(found.norm())
    if size:
        return best_factors(head_rows, found)[1] * size / float(gradient.norm())
    return 0.0


def _router_words(model: Model) -> str:
    """Return in words what a model with experts may add to its loss; "" for any other."""
    if not isinstance(model, TorchModel):
        return ""
    coefficient = getattr(text_config(model.net), "router_aux_loss_coef", 0)
    if not coefficient:
        return ""
    return (
        f", or the router's auxiliary loss is in it (router_aux_loss_coef = {coefficient:g}): "
        "check_step does not compare that loss, so set it to 0 for the check"
    )


SAME_COEFFICIENT = 1e-3  # relative: two coefficients so near are one
LOST_HALF = "the value loss of a token is 1/2 (V - R)²: without the 1/2, value_coef is twice its factor"

TERMS = {
    "J": "the policy term",
    "KL": "the KL term",
    "H": "the entropy bonus",
    "Z": "the z-loss",
    "V": "the value loss",
}
TERM_IDS = {
    "J": "policy-term",
    "KL": "kl",
    "H": "entropy-bonus",
    "Z": "z-loss",
    "V": "value-loss",
}


@dataclass
class Terms:
    """The gradient of each term of the goal by itself, negative as a loss has it."""

    goal: Goal
    # J, KL, H, Z and V -> the gradient without its coefficient, [P]
    gradients: dict[str, Tensor]
    slope: Tensor  # d(J - β KL)/dlp
    lp: Tensor

    @classmethod
    def of(cls, goal: Goal, forward: Forward, padded: Padded) -> "Terms":
        """Differentiate each term of the goal on these rows.

        Args:
            goal: the objective with its numbers.
            forward: the reference's forward pass over the rows.
            padded: the rows, padded.

        Returns:
            The terms.
        """
        statistics = forward.statistics()
        lp = statistics.lp
        parts = goal.parts(statistics, padded)
        c = goal.coefficients
        gradients = {k: forward.by_row(-part).sum(0) for k, part in parts.items()}
        policy = parts["J"] + (c["KL"] * parts["KL"] if "KL" in parts else 0)
        (slope,) = torch.autograd.grad(goal.scale * policy, lp, retain_graph=True)
        return cls(goal, gradients, slope.detach(), lp.detach())

    def without(self, gradient: Tensor, *names: str) -> Tensor:
        """Return the gradient less these terms with the goal's coefficients.

        Args:
            gradient: a gradient, [P].
            *names: J, KL, H, Z or V.
        """
        c = self.goal.coefficients
        return gradient - self.goal.scale * sum(
            c[k] * self.gradients[k] for k in names if k in self.gradients
        )

    def _constant(self, fitted: float) -> float:
        """Return the constant factor of a gradient. It is 1, but after a clip of the norm
        it is not known, and the fitted one stands for it.
        """
        return fitted if self.goal.clip is not None and fitted > 0 else 1.0

    def total(self) -> Tensor:
        """Return the gradient of the goal, all terms together, before a clip, [P]."""
        c = self.goal.coefficients
        return self.goal.scale * sum(
            (c[k] * gradient for k, gradient in self.gradients.items()),
            torch.zeros(()),
        )

    def in_its_units(self, gradient: Tensor, added: Tensor) -> Tensor:
        """Return the gradient without the factor that an acting clip of the norm gave
        it, if it is the sum of the goal's gradient and a multiple of another one.

        Args:
            gradient: the gradient that was found, [P].
            added: the other gradient, [P].
        """
        terms = torch.stack([self.total(), added], 1)
        fitted = torch.linalg.lstsq(terms, gradient[:, None], driver="gelsd").solution
        return gradient / self._constant(float(fitted[0]))

    def find_wrong_coefficients(self, gradient: Tensor, bound: float) -> Cause:
        """Return the coefficients that are not the goal's, where the terms of the
        objective with other coefficients add up to the gradient; else no cause.

        Args:
            gradient: the gradient that was found, [P].
            bound: the relative error that is allowed.
        """
        terms = [*self.gradients]
        columns = torch.stack([self.gradients[term] for term in terms], 1)
        unscaled = gradient / self.goal.scale
        norms = columns.norm(dim=0).clamp(min=1e-300)
        solution = torch.linalg.lstsq(
            columns / norms, unscaled[:, None], driver="gelsd"
        ).solution
        fitted = solution[:, 0] / norms
        residual = (columns @ fitted - unscaled).norm() / unscaled.norm()
        times = self._constant(float(fitted[0]))
        # J is the first term, and its coefficient is 1
        if residual > bound or abs(fitted[0] / times - 1) > 1e-3:
            return NO_CAUSE
        fitted = fitted / times
        # of each term with the coefficient 1, relative to the gradient
        sizes = norms * times / unscaled.norm()
        causes = []
        for term, found, term_size in zip(terms, fitted.tolist(), sizes, strict=True):
            right = self.goal.coefficients[term]
            if abs(found - right) * term_size <= 2 * bound:
                continue
            if abs(found) * term_size <= 2 * bound and abs(found) < 0.1 * abs(right):
                words = f"{TERMS[term]} has no gradient"
                causes.append(Cause(words, (f"{TERM_IDS[term]}-missing",)))
                continue
            # J has -β KL, -c Z and -c_V V; users give β, c and c_V. Adding 0.0 removes the
            # sign of -0.
            sign = -1 if term in ("KL", "Z", "V") else 1
            words = (
                f"the coefficient of {TERMS[term]} is {sign * found + 0.0:.4g}, "
                f"not {sign * right + 0.0:.4g}"
            )
            if term == "V" and abs(found / right - 2) < SAME_COEFFICIENT:
                words += f" ({LOST_HALF})"
            causes.append(Cause(words, (f"other-coefficient-of-{TERM_IDS[term]}",)))
        return join_causes(*causes)


def _smaller_fault(left: float) -> Cause:
    """Return the cause that names how much of a gradient one fault leaves."""
    return Cause(f"{left:.2g} of the gradient is left, by another and smaller fault")


def _find_wrong_term(
    terms: Terms, forward: Forward, batch: Padded, gradient: Tensor, bound: float
) -> Cause:
    """Return the cause that a term has another coefficient, or that a KL term was
    added, if that gives the gradient.
    """
    wrong_coefficients = terms.find_wrong_coefficients(gradient, bound)
    return wrong_coefficients or _find_kl_term(
        terms.goal, forward, batch, terms, gradient, bound
    )


def _find_kl_term(
    goal: Goal,
    forward: Forward,
    batch: Padded,
    terms: Terms,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Return the cause that the loss has a KL term that the goal lacks, if that makes
    the difference.

    The term that is tried is that of the old policy. The term of k1 has the same gradient
    whatever the other policy is.
    """
    if batch.old is None:
        return NO_CAUSE
    log_r = (terms.lp - batch.old) * batch.mask
    if float(log_r.abs().max()) < ON_POLICY:
        return NO_CAUSE
    for name in ESTIMATORS:
        goal_with_kl = replace(goal, objective=replace(goal.objective, kl=name))
        parts = goal_with_kl.parts(forward.statistics(), replace(batch, ref=batch.old))
        # the KL term's part of the gradient of the loss, for β = 1
        kl_gradient = goal.scale * forward.by_row(parts["KL"]).sum(0)
        unclipped = terms.in_its_units(gradient, kl_gradient)
        rest = unclipped - terms.total()
        beta = float(rest @ kl_gradient / (kl_gradient @ kl_gradient).clamp(min=1e-300))
        tolerance = _relative_bound(bound, unclipped, rest)
        if beta > 0 and is_near(rest, beta * kl_gradient, tolerance):
            whose = "" if name == "k1" else " of the old policy"
            return measured.KL_NOT_OF_OBJECTIVE.cause(
                whose=whose, estimator=name, beta=beta
            )
    return NO_CAUSE


def _relative_bound(bound: float, gradient: Tensor, rest: Tensor) -> float:
    """Return the error that is allowed of a part of the gradient, relative to the part.

    It is at most a tenth: otherwise a part hardly larger than the bound fits any term.
    """
    return min(0.1, bound * float(gradient.norm() / rest.norm()))


def _find_term_aggregation(
    goal: Goal,
    forward: Forward,
    batch: Padded,
    terms: Terms,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Return what is wrong with the KL term, the entropy bonus or the value loss, if the
    other terms are right: its temperature, its tokens or its aggregation.
    """
    coefficients = goal.coefficients
    for key in ("H", "KL", "V"):
        if not coefficients[key]:
            continue
        other_terms = [other for other in coefficients if other != key]
        # what the gradient has of this term
        rest = terms.without(gradient, *other_terms)
        at_temperature_1 = Forward(forward.model, forward.rows, 1.0, forward.z)
        parts = goal.parts(at_temperature_1.statistics(), batch)
        unscaled_term = (
            at_temperature_1.by_row(-parts[key]).sum(0) * goal.scale * coefficients[key]
        )
        reads_temperature = key != "V"
        tolerance = _relative_bound(bound, gradient, rest)
        if reads_temperature and is_near(rest, unscaled_term, tolerance):
            words = f"{TERMS[key]} is taken at temperature 1"
            return Cause(words, (f"{TERM_IDS[key]}-at-temperature-1",))
        if key == "H":
            cause = _find_bonus_over_prompts(
                goal, forward, batch, rest, gradient, bound
            )
            if cause:
                return cause
        cause = _find_aggregation_of_term(
            key, goal, forward, batch, rest, bound * gradient.norm()
        )
        if cause:
            return cause
    return NO_CAUSE


def _find_aggregation_of_term(
    key: str,
    goal: Goal,
    forward: Forward,
    batch: Padded,
    rest: Tensor,
    largest_error: Tensor,
) -> Cause:
    """Return the cause that a term has another aggregation, if one factor for each
    response makes what the gradient has of it.

    Args:
        key: of the term: H, KL or V.
        goal: the objective with its terms.
        forward: the right forward pass.
        batch: its rows.
        rest: what the gradient has of the term, [P].
        largest_error: that is allowed, as a norm.
    """
    name = TERMS[key]
    term_id = TERM_IDS[key]
    sums = goal.parts(forward.statistics(), batch, "seq-mean-token-sum")
    # the term of each response, summed over its tokens, [B, P]
    term_rows = forward.by_row(-len(forward.rows) * sums[key])
    factors, residual = best_factors(term_rows, rest)
    if not residual * rest.norm() <= largest_error:  # not a number either
        return NO_CAUSE
    times = goal.scale * goal.coefficients[key]
    explanation = explain_factors(
        goal,
        forward.rows,
        batch,
        factors / times,
        without_weight=[],
        tolerance=1e-2,
    )
    if explanation is not None and explanation[0]:
        aggregation, row_factors = explanation
        left = rest - times * row_factors @ term_rows
        if left.norm() <= 2 * largest_error:
            ids = tuple(f"{term_id}-{id_}" for id_ in aggregation.ids)
            return Cause(f"{name}: {aggregation}", ids)
    words = f"{name}: one factor a response that no known aggregation has"
    return Cause(words, (f"{term_id}-by-unknown-aggregation",))


def _find_bonus_over_prompts(
    goal: Goal,
    forward: Forward,
    batch: Padded,
    rest: Tensor,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Return the cause that the entropy bonus counts tokens of prompts and masked tokens
    too, if that gives the rest of the gradient.
    """
    with torch.enable_grad():
        entropy = torch.zeros(())
        for i in range(len(forward.rows)):
            logp = (forward.logits(i, 1) / forward.temperature).log_softmax(-1)
            entropy = entropy - (logp.exp() * logp).sum()
    entropy_gradient = forward.by_row(-goal.scale * goal.entropy_coef * entropy).sum(0)
    counts = {
        "averaged": sum(len(row.ids) - 1 for row in forward.rows),
        "summed": int(batch.mask.sum()),
    }
    for how, number in counts.items():
        tolerance = _relative_bound(bound, gradient, rest)
        if is_near(rest, entropy_gradient / number, tolerance):
            return measured.ENTROPY_BONUS_OVER_PROMPTS.cause(how=how)
    return NO_CAUSE


def _find_shared_aggregation(
    comparison: GradientComparison,
    terms: Terms,
    forward: Forward,
    batch: Padded,
    factors: Tensor,
    bound: float,
) -> Cause:
    """Return the wrong aggregation that the policy term shares with the entropy bonus
    or z-loss, if it gives the gradient.

    Without such a term the weights of the tokens show the aggregation.

    Args:
        comparison: the gradient beside the right one.
        terms: the terms of the right forward pass.
        forward: the right forward pass.
        batch: its rows.
        factors: the factors that fit best, [B].
        bound: the relative error that is allowed.
    """
    goal = comparison.goal
    if not (goal.entropy_coef or goal.z_loss_coef or goal.value):
        return NO_CAUSE
    right_row_factors = right_factors(goal, batch)
    least = WEIGHT_TOLERANCE * factors.abs().max()
    without_weight = [i for i, factor in enumerate(factors) if abs(factor) <= least]
    weights_of_rows = (factors * right_row_factors).where(batch.mask.any(1), torch.nan)
    weights_of_rows[without_weight] = torch.nan
    moving = int((batch.mask & (terms.slope != 0)).sum())
    aggregation = explain_factors(
        goal,
        forward.rows,
        batch,
        weights_of_rows,
        without_weight,
        tolerance=1e-4,
        moving=moving,
    )
    if aggregation is None:
        return NO_CAUSE
    cause, aggregation_factors = aggregation
    multiples = aggregation_factors / right_row_factors
    row_multiples = multiples.where(~weights_of_rows.isnan(), 0)
    expected = clip_norm(row_multiples @ comparison.rows, goal.clip)
    if not is_near(comparison.found, expected, 2 * bound):
        return NO_CAUSE
    left_out = left_out_cause(without_weight) if without_weight else NO_CAUSE
    return join_causes(left_out, cause)


def _without_other_responses(forward: Forward) -> list[list[int]]:
    """Return the tokens that were fed behind each row, up to the response of the next
    row in the same sequence: tokens of that response train as tokens of the next row.
    """
    tails = []
    for tokens in forward.after:
        response_starts = [
            place[1] + len(other.prompt)
            for other in forward.rows
            if (place := locate([tokens], other))
        ]
        tails.append(tokens[: min(response_starts, default=len(tokens))])
    return tails


def _padding_logits(forward: Forward, longer: list[Row]) -> Iterator[list[Tensor]]:
    """Yield the logits of the longer rows, first with the added tokens attended to, and
    then with an attention mask that excludes them, if the model takes one.
    """
    logits = forward.model.logits
    yield [logits(row.ids) for row in longer]
    with suppress(TypeError, ValueError, RuntimeError, IndexError):
        masked = []
        for row, ids in zip(longer, forward.ids, strict=True):
            mask = torch.arange(len(row.ids))[None] < len(ids)
            positions = mask.cumsum(1) - 1
            masked.append(
                logits(row.ids, attention_mask=mask.long(), position_ids=positions)
            )
        yield masked


def _explain_reading(
    forward: Forward,
    batch: Padded,
    reading: TokenWeights,
    terms: Terms,
    bound: float,
    cause: Cause,
    give_the_gradient: Callable[[list[Tensor]], bool],
    row_factors: Tensor | None = None,
    only: Cause = NO_CAUSE,
) -> CauseAndMore:
    """Explain the token weights that were read with a forward pass.

    Args:
        forward: the pass whose tokens the weights are of.
        batch: its rows.
        reading: the weights.
        terms: of the objective, with that forward pass.
        bound: the relative error that is allowed.
        cause: the fault of the forward pass; empty where it has none.
        give_the_gradient: tells whether weights of all tokens give the gradient. A fault
            whose weights do not is not named.
        row_factors: the factor of each response, where these alone give the gradient.
        only: a cause that was found on other rows; only what it names is tried.

    Returns:
        [cause, *more findings]: the faults of the forward pass and of the weights, and
        what the weights show.
    """
    # one more column, so that what is moved by one place does not wrap around
    batch = batch.widened()

    def widen(values: Tensor) -> Tensor:
        """Pad [T] or [B, T] with 0 to the width of the widened batch."""
        missing = batch.mask.shape[1] - values.shape[-1]
        return torch.nn.functional.pad(values, (0, missing))

    prompts, responses, behind = _split_weights(forward.rows, reading.weights)
    expected = widen(terms.slope)
    found = torch.stack([widen(weights) for weights in responses])
    # after a clip of the norm, no constant factor of the weights is known
    times = 1.0 if terms.goal.clip is None else constant_between(found, expected)
    # weights are known less exactly than the gradient from which they are read
    noise = max(WEIGHT_TOLERANCE, 30 * reading.residual, 20 * bound)
    at_temperature_1 = Forward(forward.model, forward.rows, 1.0, forward.z)
    tokens = Tokens(
        goal=terms.goal,
        rows=forward.rows,
        padded=batch,
        lp=widen(terms.lp),
        found=times * found,
        prompts=[times * weights for weights in prompts],
        expected=expected,
        lp_at_temperature_1=widen(at_temperature_1.statistics().lp.detach()),
        largest=times * float(torch.cat(reading.weights).nan_to_num(0).abs().max()),
        tol=noise,
        row_factors=None if row_factors is None else times * row_factors,
    )
    observations = observe_weights(tokens)
    findings_of_weights = [
        fail("weights", what.words, want, got) for what, want, got in observations
    ]
    causes = [cause]
    trained_behind = [~tokens.has_no_weight(times * weights) for weights in behind]
    if count := int(sum(trained.sum() for trained in trained_behind)):
        causes.append(measured.TOKENS_BEHIND_RESPONSES_TRAIN.cause(tokens=count))
    prompts_train = any(
        bool((~tokens.has_no_weight(weights)).any()) for weights in tokens.prompts
    )
    prompt_cause = PROMPTS if prompts_train else NO_CAUSE
    weights_are_right = tokens.same(
        torch.where(tokens.is_token, tokens.found, torch.nan),
        torch.where(batch.mask, tokens.expected, 0),
    )
    fault = None if weights_are_right else find_fault(tokens, only)
    if weights_are_right:
        causes.append(prompt_cause)
    elif fault is not None and give_the_gradient(
        _join_weights(prompts, fault[1] / times, behind, forward.rows)
    ):
        causes += [prompt_cause, fault[0]]
    elif observations:
        causes += [what for what, _, _ in observations[:3]]
    elif cause:
        causes.append(OTHER_WEIGHTS)
    return [join_causes(*causes) or NOTHING_FITS, *findings_of_weights]


def _split_weights(
    rows: Sequence[Row], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the weights of each row's prompt, of its response, and of what was fed
    behind it.
    """
    prompts = []
    responses = []
    behind = []
    for row, row_weights in zip(rows, weights, strict=True):
        # weights begin with that of the row's second token
        start = len(row.prompt) - 1
        stop = len(row.ids) - 1
        prompts.append(row_weights[:start])
        responses.append(row_weights[start:stop])
        behind.append(row_weights[stop:])
    return prompts, responses, behind


def _join_weights(
    prompts: list[Tensor], responses: Tensor, beyond: list[Tensor], rows: Sequence[Row]
) -> list[Tensor]:
    """Return the weights of each row's tokens in one tensor: of the prompt, the response
    and the tokens that were fed behind the response.
    """
    joined = []
    for prompt, response, behind, row in zip(
        prompts, responses, beyond, rows, strict=True
    ):
        joined.append(torch.cat([prompt, response[: len(row.response)], behind]))
    return joined
