# SPDX-License-Identifier: Apache-2.0
"""What a check is made of: the goal, the rows, the perturbed model, and the gradient that
the step makes.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from upref import advantages
from upref.aggregation import KEPT_MEAN
from upref.errors import InputError
from upref.interrupt import Terminated
from upref.registry import REDUCE, Objective, get
from upref.step.compare.forward import (
    Forward,
    assign_sides,
    changes_across_bounds,
    clip_norm,
    gradients_by_row,
)
from upref.step.compare.goal import Goal
from upref.step.compare.moved import Moved, named_arrays
from upref.step.compare.ranks import lead, train, world_size
from upref.step.compare.record import Step
from upref.step.compare.value_term import ValueTerm, add_values
from upref.step.inputs import rows as step_rows
from upref.step.inputs.model_errors import as_input_error
from upref.step.inputs.reference import (
    Gradient,
    Model,
    PerturbedOperations,
    RoundedOperations,
    TorchModel,
    as_float64,
    gather_tensor,
    unwrapped,
)
from upref.step.inputs.routes import draw_routes, own_experts, routes_of
from upref.step.inputs.rows import CASE_AXES, Padded, Row
from upref.user_code.guard import one_line, refuse_exit

FLOAT32_BOUND = 2e-5  # of |g - g*| / |g*| in float32
LARGEST_WIDENED = 1e-3  # rounding to float32 is not tried as the cause of more
ROUNDING_DRAWS = 6  # draws of the rounding errors of all operations
ALLOWED_ROUNDINGS = 6  # the allowed error, as a multiple of the draws' root mean square
HALF_PRECISIONS = (torch.bfloat16, torch.float16)


class HiddenGradientError(InputError):
    """The step moved the weights, and its engine keeps the gradients to itself."""


@dataclass
class StepCase:
    """Rows, the reference's forward pass over them, and what the rows do not vary."""

    rows: list[Row]
    padded: Padded
    forward: Forward
    unvaried: dict[str, str]
    shift: float = 2e-5  # how far rounding moves log r; the default is float32's
    # the distance of the gradients of two ranks, relative to their norm
    apart: float = 0.0
    moved: Moved | None = None  # how the gradient was read from the weights
    # whether the step counts tokens per group: it was run on the same rows in other
    # groups; None: it was not
    reads_groups: bool | None = None


@dataclass(frozen=True)
class RowOptions:
    """What a user sets of the rows that upref makes: groups that share a prompt,
    rewards, advantages.
    """

    group_size: int | None = None
    rewards: Sequence[float] | None = None
    advantages: Sequence[float] | Callable[[Tensor, Tensor], Tensor] | None = None
    routes: bool | None = None  # None: the rows have none

    def refuse_beside(self, other: str) -> None:
        """Raise InputError if any option is set.

        Args:
            other: the user's argument that these options do not go with.
        """
        options_set = [k for k, v in vars(self).items() if v is not None]
        if options_set:
            raise InputError(
                f"{options_set[0]} is of the rows that upref makes: with {other}=, give each row its own."
            )

    def reward(self, rows: list[Row], estimator: str) -> None:
        """Give the rows their rewards, and the advantages that these make; neither,
        where the user gave none.

        Args:
            rows: they are changed.
            estimator: the name of the objective's own advantages.

        Raises:
            InputError: rewards or advantages are not one finite number for each row, or
                advantages are a function and there are no rewards.
        """
        if self.rewards is None and self.advantages is None:
            return
        group = torch.tensor([r.group for r in rows])
        A = self.advantages
        if self.rewards is not None:
            R = torch.tensor(
                _one_number_per_row("rewards", self.rewards, len(rows)),
                dtype=torch.float64,
            )
            for row, reward in zip(rows, R.tolist(), strict=True):
                row.reward = reward
            if A is None:
                A = advantages.get(estimator)
            if callable(A):
                A = A(R, group).tolist()
        elif callable(A):
            raise InputError(
                "advantages is a function of rewards and groups: pass rewards= as well."
            )
        row_advantages = _one_number_per_row("advantages", A, len(rows))
        for row, adv in zip(rows, row_advantages, strict=True):
            row.adv = adv


def _one_number_per_row(name: str, values: Any, n: int) -> list[float]:
    """Return the values as floats; raise InputError where they are not one finite number
    for each row.
    """
    try:
        numbers = [float(v) for v in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != n or not all(math.isfinite(v) for v in numbers):
        raise InputError(
            f"{name} are {n} finite numbers, one for each response, got {repr(values)[:60]}."
        )
    return numbers


def draw_old_policy(
    rows: list[Row],
    model: Model,
    goal: Goal,
    *,
    seed: int = 0,
    on_policy: bool = False,
    coarse: bool = False,
    routes: bool = False,
) -> Forward:
    """Give made rows the log-probabilities of an older policy, so that each number of
    the objective acts on them.

    Args:
        rows: they are changed. Where the objective bounds the change of a probability,
            they get probable tokens too.
        model: the policy that is trained.
        goal: its objective with its numbers, and the temperature of the sampler.
        seed: of the ratios.
        on_policy: r = 1 everywhere.
        coarse: no token is beside a bound, for a step in half precision.
        routes: the rows get routes of experts, which the reference takes.

    Returns:
        The forward pass of the model over the rows.

    Raises:
        InputError: the model fails on a row.
    """
    choosing = _without_routes(model)
    with as_input_error(_longest(rows)):
        if goal.objective.reads_mu and not on_policy:
            step_rows.make_probable(
                rows,
                lambda ids: choosing.without_values(choosing.logits(ids)),
                choosing.end,
            )
        if routes:
            drawn = draw_routes(choosing.logits, [row.ids for row in rows], seed)
            for row, experts in zip(rows, drawn, strict=True):
                row.routes = experts
            take_routes(model, rows)
        forward = Forward(model, rows, goal.temperature)
    entropy = (
        [*forward.statistics().H.detach()]
        if "entropy" in goal.objective.reads
        else None
    )
    step_rows.add_log_probs(
        rows,
        forward.lp(),
        goal.objective,
        goal.hp,
        seed=seed,
        on_policy=on_policy,
        coarse=coarse,
        entropy=entropy,
    )
    return forward


def take_routes(model: Model, rows: Sequence[Row]) -> None:
    """Let the reference take the routes of rows, if they have any.

    Args:
        model: the reference.
        rows: of the step.

    Raises:
        InputError: it is no torch module, or the routes are of another form.
    """
    routes = routes_of(rows)
    if not routes:
        return
    if not isinstance(model, TorchModel):
        raise InputError(
            "routes need a torch module: functions of (params, ids) take none."
        )
    model.routes = model.routes | routes


def _without_routes(model: Model) -> Model:
    """Return a reference whose routers choose: a case before this one may have left it
    routes to replay.
    """
    if not isinstance(model, TorchModel):
        return model
    choosing = copy.copy(model)
    choosing.routes = {}
    return choosing


def are_routes_own(case: StepCase) -> bool:
    """Tell whether the routes of the rows are those that the model takes anyway, so that a
    step which does not replay them has the same gradient. The order of a token's experts
    does not matter.

    Args:
        case: whose rows have routes.
    """
    model = case.forward.model
    assert isinstance(model, TorchModel)  # others have no routes
    choosing = _without_routes(model)
    for row in case.rows:
        own = torch.stack(own_experts(choosing.logits, row.ids)[0], 1)
        if not torch.equal(
            own.sort(-1).values, model.routes[tuple(row.ids)].experts.sort(-1).values
        ):
            return False
    return True


def build_case(
    model: Model,
    goal: Goal,
    rows: Sequence[Row] | None,
    without: Sequence[str],
    seed: int = 0,
    coarse: bool = False,
    row_options: RowOptions | None = None,
) -> StepCase:
    """Make or validate the rows, and run the reference on them. Raise InputError where
    they could hide bugs.

    Args:
        model: the reference.
        goal: the objective with its numbers.
        rows: the rows; None: eight are made.
        without: what the rows do not vary, of CASE_AXES.
        seed: of the rows that are made.
        coarse: keep ratios away from bounds, for a step in half precision.
        row_options: what the user sets of the rows that are made.

    Returns:
        The case.
    """
    if isinstance(without, str) or (bad := [w for w in without if w not in CASE_AXES]):
        what = without if isinstance(without, str) else bad[0]
        raise InputError(
            f"without takes a list of {', '.join(CASE_AXES)}, got {what!r}."
        )
    row_options = row_options or RowOptions()
    if goal.value is not None and not isinstance(model, TorchModel):
        raise InputError(
            "value= needs a torch module: functions of (params, ids) return logits alone."
        )
    model.reads_values = goal.value is not None
    if rows is None:
        case_rows = step_rows.make_rows(
            model.vocabulary, seed, without, model.end, row_options.group_size
        )
        row_options.reward(case_rows, goal.objective.adv)
        forward = draw_old_policy(
            case_rows,
            model,
            goal,
            seed=seed,
            on_policy="ratio" in without,
            coarse=coarse,
            routes=row_options.routes is not None,
        )
        if goal.value is not None:
            values = forward.statistics().V
            assert values is not None  # the model reads values
            add_values(case_rows, values, goal.value.clip, seed)
    else:
        row_options.refuse_beside("rows")
        case_rows = step_rows.validate_rows(rows, model.vocabulary)
        if goal.value is not None:
            goal.value.require(case_rows)
        if goal.objective.sampler is not None and any(
            r.sampler is None for r in case_rows
        ):
            raise InputError(
                f"{goal.objective.name} needs the log-probabilities of the engine that sampled: "
                "give every row `sampler`."
            )
        take_routes(model, case_rows)
        with as_input_error(_longest(case_rows)):
            forward = Forward(model, case_rows, goal.temperature)
    unvaried = step_rows.find_unvaried_axes(case_rows, goal.temperature, forward.lp())
    if bad := [k for k in unvaried if k not in without]:
        raise InputError(
            f"this case could hide bugs: {unvaried[bad[0]]}. Vary it, or pass without={bad!r} and read what is left "
            "unexercised."
        )
    return StepCase(case_rows, Padded.of(case_rows), forward, unvaried)


def _longest(rows: Sequence[Row]) -> list[int]:
    """Return the token ids of the longest row: a model that has too few positions fails
    on it.
    """
    return max((row.ids for row in rows), key=len)


def make_goal(
    objective: str | Objective,
    hp: dict[str, Any],
    temperature: float,
    beta: float = 0.0,
    entropy_coef: float = 0.0,
    z_loss_coef: float = 0.0,
    clip: float | None = None,
    scale: float = 1.0,
    value: ValueTerm | None = None,
) -> Goal:
    """Make the goal, and check its numbers.

    Args:
        objective: its name, or an Objective.
        hp: its hyperparameters; the rest have their defaults.
        temperature: of the sampler.
        beta: coefficient of the KL term.
        entropy_coef: coefficient of the entropy bonus.
        z_loss_coef: coefficient of the token mean of (log Σ exp z)².
        clip: bound of the gradient's norm; None: it is not clipped.
        scale: a constant factor of the loss.
        value: the value loss; None: the step trains no critic.

    Returns:
        The goal.

    Raises:
        InputError: a number is not possible, or the objective cannot be checked in a
            step.
    """
    o = objective if isinstance(objective, Objective) else get(objective)
    if o.agg == KEPT_MEAN:
        raise InputError(
            f"a step is not compared with {KEPT_MEAN}: check the loss with upref.check."
        )
    if "group" in o.reads:
        raise InputError(
            f"{o.name} needs {o.needs[0]} and its share of the group, which rounding decides on the "
            "random models of a step check: check the loss with upref.check."
        )
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0 < temperature < 1e6
    ):
        raise InputError(
            f"temperature must be a finite number above 0, the sampler's, got {temperature!r}."
        )
    if beta and not o.kl:
        o = replace(o, kl="k3")
    resolved = {k: v for k, v in o.resolve(hp).items() if k != "beta"}
    return Goal(
        o,
        resolved,
        float(temperature),
        beta,
        entropy_coef,
        z_loss_coef,
        clip,
        scale,
        value=value,
    )


def with_weights(model: TorchModel, step: Step) -> TorchModel:
    """Load the weights that the model had before a recorded step into the reference.

    Args:
        model: the reference, changed in place.
        step: the recorded step; without recorded weights nothing is loaded.

    Returns:
        The same reference.

    Raises:
        InputError: a parameter of the reference was not recorded.
    """
    if step.weights:
        missing = model.net.load_state_dict(step.weights, strict=False).missing_keys
        if set(missing) & set(model.shapes):
            raise InputError(
                f"the recorded weights lack {missing[0]}: record the module that is trained."
            )
    return model


def half_of(model: Any) -> torch.dtype | None:
    """Return the half precision of a model's trained parameters, if they have one.

    Args:
        model: a module, or anything else, which has none.

    Returns:
        bfloat16, float16 or None.
    """
    if isinstance(model, nn.Module):
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    else:
        dtypes = set()
    return next((dtype for dtype in HALF_PRECISIONS if dtype in dtypes), None)


def allowed_error(
    goal: Goal, case: StepCase, requested: torch.dtype | float | None
) -> float:
    """Return the error of the gradient that rounding may make: 2e-5 in float32. In half
    precision it is twice the change of the reference's gradient where the result of each
    of its operations is rounded, although a trainer keeps some results in float32.

    Tokens that rounding may move over a clip bound do not count: `assign_sides` allows
    either side for tokens within `case.shift` of the bound. In half precision that is
    three standard deviations of what rounding adds to log r.

    Args:
        goal: the objective with its numbers.
        case: the rows and the reference's forward pass, changed in place: in half
            precision this function sets its `shift`.
        requested: an error that the user allows, or the half precision of the step; None:
            the step computes in float32.

    Returns:
        The bound, relative to the gradient's norm.

    Raises:
        InputError: the request is none of these.
    """
    if requested is None:
        return FLOAT32_BOUND
    if (
        isinstance(requested, int | float)
        and not isinstance(requested, bool)
        and requested > 0
    ):
        return float(requested)
    if not isinstance(requested, torch.dtype) or requested not in HALF_PRECISIONS:
        raise InputError(
            f"bound is a number above 0, torch.bfloat16 or torch.float16, got {str(requested)[:60]!r}."
        )
    with RoundedOperations(requested):
        rounded_forward = Forward(case.forward.model, case.rows, goal.temperature)
        rounded_gradient = gradients_by_row(goal, rounded_forward, case.padded).sum(0)
        rounded_lp = rounded_forward.statistics().lp
    exact_lp = case.forward.statistics().lp
    log_ratio_error = (rounded_lp - exact_lp).detach()
    mask = case.padded.mask
    if goal.objective.level in REDUCE:
        # a clip of a sequence-level objective acts on one ratio per response
        log_ratio_error = REDUCE[goal.objective.level](log_ratio_error, mask)[
            mask.any(1)
        ]
    else:
        log_ratio_error = log_ratio_error[mask]
    case.shift = 3 * float(log_ratio_error.pow(2).mean().sqrt())
    alternatives = changes_across_bounds(goal, case.forward, case.padded, case.shift)
    exact_rows, _crossed = assign_sides(
        gradients_by_row(goal, case.forward, case.padded),
        alternatives,
        rounded_gradient,
    )
    exact = exact_rows.sum(0)
    return 2 * float((rounded_gradient - exact).norm() / exact.norm().clamp(min=1e-300))


def widen_bound(goal: Goal, case: StepCase, bound: float, error: float) -> float:
    """Return a larger bound for a model in float32 whose gradient moves by more than the
    bound where the result of each operation is rounded. Rounding grows where a norm
    divides by a vector near 0, as in linear attention. It is measured only if the error
    is above the bound and near it.

    Args:
        goal: what the step is meant to maximize.
        case: the rows and the reference's forward pass.
        bound: what is allowed of any model.
        error: of the gradient.

    Returns:
        The bound, or the larger one that rounding gives.
    """
    if not bound < error <= LARGEST_WIDENED:
        return bound
    rows = gradients_by_row(goal, case.forward, case.padded)
    alternatives = changes_across_bounds(goal, case.forward, case.padded, case.shift)
    squares = []
    for seed in range(ROUNDING_DRAWS):
        with PerturbedOperations(seed):
            perturbed_forward = Forward(case.forward.model, case.rows, goal.temperature)
            perturbed_gradient = gradients_by_row(
                goal, perturbed_forward, case.padded
            ).sum(0)
        exact_rows, _crossed = assign_sides(rows, alternatives, perturbed_gradient)
        exact = exact_rows.sum(0)
        distance = (perturbed_gradient - exact).norm() / exact.norm().clamp(min=1e-300)
        squares.append(float(distance) ** 2)
    return max(bound, ALLOWED_ROUNDINGS * math.sqrt(sum(squares) / ROUNDING_DRAWS))


@dataclass(frozen=True)
class GradientComparison:
    """A gradient beside the one that it should be."""

    goal: Goal
    rows: Tensor  # [B, P]: what each row brings, before any clip of the norm
    want: Tensor  # [P]
    found: Tensor
    error: float  # |g - g*| / |g*|
    at_bound: int
    other_side: int


def compare(
    goal: Goal, case: StepCase, found: Gradient, bound: float
) -> GradientComparison:
    """Compare a step's gradient to the reference's.

    Tokens are counted over the whole step; or per group, where only that agrees and the
    step is not known to read no groups.

    Args:
        goal: the objective with its numbers.
        case: the rows and the reference's forward pass.
        found: the gradient of the step, by the names of the parameters.
        bound: the error up to which it agrees.

    Returns:
        Both gradients, their error, and the goal that they were compared under.

    Raises:
        InputError: the objective's gradient on these rows is not finite, or is 0.
    """
    comparisons = []
    for tried_goal in (
        [goal, replace(goal, grouped=True)]
        if goal.objective.agg == "group-token-mean" and case.reads_groups is not False
        else [goal]
    ):
        alternatives = changes_across_bounds(
            tried_goal, case.forward, case.padded, case.shift
        )
        rows = gradients_by_row(tried_goal, case.forward, case.padded)
        gradient = case.forward.model.flat(found)
        rows, other_side = assign_sides(rows, alternatives, gradient)
        want = clip_norm(rows.sum(0), tried_goal.clip)
        if not want.isfinite().all():
            bad = [
                n
                for n, part in case.forward.model.split(want).items()
                if not part.isfinite().all()
            ]
            raise InputError(
                f"the objective's gradient on these rows is not finite, in {bad[0]} first: look for NaN or infinity in "
                "the model's weights and logits."
            )
        if not want.any():
            raise InputError(
                "the objective's gradient is 0 on these rows: no row can show anything."
            )
        error = float((gradient - want).norm() / want.norm())
        comparisons.append(
            GradientComparison(
                tried_goal,
                rows,
                want,
                gradient,
                float("inf") if math.isnan(error) else error,
                len(alternatives),
                other_side,
            )
        )
        if comparisons[-1].error <= bound:
            return comparisons[-1]
    return comparisons[0]


@torch.no_grad()
def perturb(net: nn.Module) -> nn.Module:
    """Enlarge the matrices and perturb the vectors, in place: attention and biases
    hardly act in a fresh model.

    Args:
        net: the model.

    Returns:
        The same model.
    """
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        if p.is_floating_point() and not p.is_meta:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            # a single number counts as a vector: it has no standard deviation
            is_vector = p.ndim < 2 or p.numel() < 2
            # of a matrix, so that its output has 1.4 times the size of its input
            target_std = 0.1 if is_vector else 1.4 / p.shape[-1] ** 0.5
            std = 0.0 if is_vector else float(p.float().std())
            least_noise_std = 0.1 * target_std
            noise_std = max(target_std**2 - std**2, least_noise_std**2) ** 0.5
            p.add_((noise_std * noise).to(p))
    return net


@contextmanager
def perturbed(model: nn.Module, perturb_weights: bool) -> Iterator[None]:
    """Perturb the weights if `perturb_weights`, and restore the whole model at the end."""
    net = unwrapped(model)
    before = {n: v.detach().clone() for n, v in net.state_dict().items()}
    grads = {n: p.grad for n, p in net.named_parameters()}
    modes = {m: m.training for m in net.modules()}
    try:
        for p in net.parameters():
            p.grad = None
        if perturb_weights:
            perturb(net)
        yield
    finally:
        _restore(net, before)
        for n, p in net.named_parameters():
            p.grad = grads.get(n)
        for m, mode in modes.items():
            m.training = mode


def _restore(net: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load these weights into the model again; raise InputError where its parameters
    have other names or shapes.
    """
    try:
        with torch.no_grad():
            net.load_state_dict(weights)
    except RuntimeError as e:
        raise InputError(
            "the step replaces or shards the model's parameters, and they cannot be restored: use record_step, which "
            "gathers FSDP2's."
        ) from e


def run_step(
    step: Callable[..., Any], model: Any, case: StepCase, learning_rate: float = 0.0
) -> tuple[Gradient, int]:
    """Run the step on copies of the rows, and return its gradient and its number of
    backward passes.

    Args:
        step: the user's function (model, rows).
        model: the module, or upref.step.Functions.
        case: the rows.
        learning_rate: of the step's own SGD, whose gradient is read from what the
            weights moved; 0: it is not read from the weights.

    Returns:
        The gradient by the names of the parameters, and the number of backward passes,
        which is 0 for functions.

    Raises:
        InputError: the step raises, or leaves no gradient.
    """
    rows = copy.deepcopy(case.rows)
    if not isinstance(model, nn.Module):
        params = model.params if hasattr(model, "params") else model
        return _as_gradient(call_step(step, params, rows)), 0
    net = unwrapped(model)
    weights = {n: v.detach().clone() for n, v in net.state_dict().items()}
    run = lead if world_size() > 1 else train
    recorded = run(step, model, rows, call_step, learning_rate)
    case.forward.locate_rows(recorded.fed)
    case.apart = recorded.apart
    case.moved = recorded.moved
    if recorded.steps > 1:
        raise InputError(
            f"the step made {recorded.steps} optimizer steps on these rows: let it make one, or use record_step."
        )
    found = recorded.gradients
    has_moved = not found and _has_moved(net, weights)
    if not found:
        returned = named_arrays(recorded.out, net)
        found = _as_gradient(returned) if returned else {}
    _restore(net, weights)
    for p in net.parameters():
        p.grad = None
    if not found and has_moved:
        raise HiddenGradientError(
            "the step moved the weights and left no gradient. An engine that keeps gradients in buffers of its own, as "
            "DeepSpeed's ZeRO, FSDP1 and Megatron's distributed optimizer do, is checked by what the weights moved: "
            "pass moved=True. Or return {name: array}, the gradient."
        )
    if not found:
        raise InputError(
            "the step left no gradient: it must leave .grad, let an optimizer step, or return {name: array}; and train "
            "the very model that it is handed."
        )
    return found, recorded.backwards


def _has_moved(net: nn.Module, weights: dict[str, Tensor]) -> bool:
    """Tell whether a parameter is not what it was before the step, in value or in
    shape.
    """
    return any(
        p.shape != weights[name].shape
        or not torch.equal(gather_tensor(p), gather_tensor(weights[name]))
        for name, p in net.named_parameters()
        if name in weights
    )


def call_step(step: Callable[..., Any], model: Any, rows: list[Row]) -> Any:
    """Call the step, and return what it returns; InputError where it raises anything.

    Args:
        step: the user's function (model, rows).
        model: what it trains.
        rows: what it trains on.
    """
    try:
        with refuse_exit("the step"), torch.enable_grad():
            return step(model, rows)
    except (InputError, KeyboardInterrupt, Terminated):
        raise
    except BaseException as e:
        raise InputError(
            f"the step fails on these rows: {type(e).__name__}: {one_line(e)}"
        ) from e


def _as_gradient(out: Any) -> Gradient:
    """Return what a step returned as a gradient in float64, by parameter; raise
    InputError unless it is a dict that is not empty.
    """
    if not isinstance(out, dict) or not out:
        raise InputError(
            "a step whose model is not torch's must return {name of a parameter: its gradient}."
        )
    return {name: as_float64(array) for name, array in out.items()}
