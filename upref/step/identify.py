# SPDX-License-Identifier: Apache-2.0
"""`upref.identify_step`: which objective a training step has, read off its gradients.

The weight of each token is read off the gradient (upref/step/explain/weights.py), on rows beside
the bounds of DAPO and on rows beside those of GSPO. An objective is a match where its own
weights, aggregation included, are those up to one constant. `check_step` then confirms it
on rows of its own, to the precision of float32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from upref.errors import InputError
from upref.registry import names
from upref.result import Result
from upref.step.check import check_step
from upref.step.compare.case import (
    FLOAT32_BOUND,
    RowOptions,
    StepCase,
    build_case,
    make_goal,
    perturbed,
    run_step,
)
from upref.step.compare.forward import MAX_RESIDUAL
from upref.step.compare.goal import Goal, Statistics
from upref.step.compare.ranks import world_size
from upref.step.explain.causes import USUAL_BOUNDS
from upref.step.explain.weights import read_weights
from upref.step.inputs.reference import TorchModel
from upref.step.inputs.rows import Row
from upref.user_code.guard import state_restored

TRIED_FIRST = ("dapo", "grpo", "dr_grpo", "ppo_clip", "gspo", "cispo", "reinforce")
OBJECTIVES_OF_ROWS = ("dapo", "gspo")  # objectives beside whose bounds the rows are
TOLERANCE = 1e-3  # of a weight, relative to the largest
NORMS_EQUAL = 1e-4  # relative; a clip adds 1e-6 to the norm by which it divides
MOST_CONFIRMED = 6  # matches that check_step is asked about
USUAL_DUAL_BOUNDS = (3.0, 10.0)  # bounds of the ratio where A < 0


@dataclass(frozen=True)
class StepMatch:
    """An objective that a step has.

    Attributes:
        name: of the objective.
        hp: its numbers that differ from the defaults.
        on_policy: the step takes r = 1, whatever the old log-probabilities are.
        scale: a constant factor of the loss; 1 where a clip of the norm hides it.
        error: of the gradient, relative to its norm, as `check_step` has it.
        not_reached: `name = value` of a number that the rows do not exercise -> other
            values with which the gradient is the same.
        clip: the bound of the gradient's norm, where the step clips it.
    """

    name: str
    hp: dict[str, float]
    on_policy: bool
    scale: float
    error: float = float("inf")
    not_reached: dict[str, str] = field(default_factory=dict)
    clip: float | None = None

    def options(self, temperature: float) -> str:
        """Return the arguments with which `check_step` expects this match.

        Args:
            temperature: of the sampler.

        Returns:
            Python, such as `'dapo', temperature=1, without=["ratio"]`.
        """
        arguments = [repr(self.name), f"temperature={temperature:g}"]
        arguments += [f"{k}={v:g}" for k, v in self.hp.items()]
        if self.scale != 1:
            arguments.append(f"scale={self.scale:.6g}")
        if self.clip is not None:
            arguments.append(f"clip={self.clip:g}")
        if self.on_policy:
            arguments.append('without=["ratio"]')
        return ", ".join(arguments)

    def __str__(self) -> str:
        """Return the name, and in parentheses the hyperparameters and what differs from
        them: a factor, a clip of the norm, no ratio.
        """
        facts = [f"{k}={v:g}" for k, v in self.hp.items()]
        if self.scale != 1:
            facts.append(f"times {self.scale:.6g}")
        if self.clip is not None:
            facts.append(f"the gradient's norm is clipped to {self.clip:g}")
        if self.on_policy:
            facts.append("without ratio")
        return f"{self.name} ({', '.join(facts)})" if facts else self.name


@dataclass(frozen=True)
class StepIdentification(Result):
    """What `identify_step` answers. Truth value: a registered objective has this gradient.

    Attributes:
        step: its name.
        temperature: of the sampler, as it was told.
        matches: the objectives that have this gradient, the commonest first.
        why: in words, where there is none.
        passed: names of further arguments that `check_step` needs as well.
    """

    step: str
    temperature: float
    matches: list[StepMatch] = field(default_factory=list)
    why: str = ""
    passed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.matches)

    def data(self) -> dict[str, Any]:
        """Return the fields, and `identified`: whether an objective has this gradient.

        Returns:
            Their values by name.
        """
        return {"identified": bool(self)} | asdict(self)

    def text(self, verbose: bool = False) -> str:
        """Return the objective of the step with the call of `check_step` that holds the
        step to it, or why there is none.
        """
        if not self.matches:
            return f"{self.step} is none of these objectives: {self.why}"
        first, *others = self.matches
        lines = [f"{self.step} is {first}"]
        if others:
            lines.append(f"the same here: {', '.join(map(str, others))}")
        if first.not_reached and not first.on_policy:
            numbers = [f"{n} ({same})" for n, same in first.not_reached.items()]
            lines.append(f"its numbers that may be others: {'; '.join(numbers)}")
        options = [first.options(self.temperature), *(f"{k}={k}" for k in self.passed)]
        call = f"upref.check_step(step, model, {', '.join(options)})"
        return "\n".join(
            [*lines, f"error of the gradient: {first.error:.2g}", f"next: {call}"]
        )

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Draw:
    """The weights of a step on one draw of rows.

    Attributes:
        case: the rows, and the forward pass of the reference.
        found: [B, T], the derivative of the loss by each token's log-probability; nan
            where the gradient does not tell.
        residual: the part of the gradient that no weights of these tokens make.
        norm: of the gradient.
        statistics: log-probabilities, entropies and squared log-normalizers, [B, T].
    """

    case: StepCase
    found: Tensor
    residual: float
    norm: float
    statistics: Statistics

    def factor(self, goal: Goal, on_policy: bool) -> float | None:
        """Return the factor by which these weights are multiples of the goal's; None
        where they are no multiples.

        Args:
            goal: the objective with its numbers.
            on_policy: compare as if the old policy were the current one.
        """
        batch = replace(self.case.padded, old=None) if on_policy else self.case.padded
        lp = self.statistics.lp.clone().requires_grad_()
        statistics = self.statistics._replace(lp=lp)
        loss = goal.loss(goal.parts(statistics, batch))
        (slope,) = torch.autograd.grad(loss, lp, materialize_grads=True)
        is_known = batch.is_token & ~self.found.isnan()
        expected = slope[is_known]
        found = self.found[is_known]
        # least squares: found = k · expected
        k = float(expected @ found / (expected @ expected).clamp(min=1e-300))
        error = float((found - k * expected).abs().max())
        has_same_weights = error <= TOLERANCE * float(found.abs().max())
        return k if has_same_weights and k != 0 else None


def identify_step(
    step: Callable[[Any, list[Row]], Any],
    model: nn.Module,
    *,
    temperature: float,
    without: Sequence[str] = (),
    seed: int = 0,
    group_size: int | None = None,
    rewards: Sequence[float] | None = None,
    advantages: Sequence[float] | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> StepIdentification:
    """Tell which registered objective a training step has, without a KL term or bonus.

    Args:
        step: `(model, rows)`, as for `check_step`.
        model: the nn.Module that the step trains, a small one.
        temperature: of the sampler.
        without: what the step cannot do: lengths, temperature, ratio, holes.
        seed: of the rows.
        group_size: so many responses in a row share a prompt; None: prompts differ.
        rewards, advantages: as for `check_step`.

    Returns:
        A StepIdentification: true where an objective has this gradient, with up to six
        that do.

    Raises:
        InputError: the step fails or leaves no gradient, the case could hide bugs, or
            there are several ranks.
    """
    if world_size() > 1:
        raise InputError(
            "identify_step runs in one process: start it without torchrun."
        )
    name = getattr(step, "__name__", type(step).__name__)
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be an nn.Module, got {type(model).__name__}.")
    row_options = RowOptions(group_size, rewards, advantages)
    with state_restored(), perturbed(model, True):
        reference = TorchModel(model)

        def draw(objective: str, seed: int) -> Draw:
            """Return the step's weights on rows beside the bounds of the objective."""
            goal = make_goal(objective, {}, temperature)
            return _read_weights_of_draw(
                step, model, reference, goal, without, seed, row_options
            )

        draws = [draw(objective, seed) for objective in OBJECTIVES_OF_ROWS]
        if _clip_bound(draws) is not None:
            # without ratios the two have the same rows
            draws.append(draw(OBJECTIVES_OF_ROWS[0], seed + 1))
    # do weights of the response tokens make the gradients at all?
    residual = max(draw.residual for draw in draws)
    if residual > MAX_RESIDUAL:
        why = (
            f"no weights of the response tokens make this gradient, {residual:.2g} of it is "
            "left. The forward pass differs, other tokens train, or there is a bonus: "
            "check_step names what differs from the objective that is meant"
        )
        return StepIdentification(name, temperature, why=why)
    clip = _clip_bound(draws)
    # which objectives have these weights, and to the precision of float32 too?
    candidates = list(_candidates(draws, temperature, "ratio" in without, clip))
    confirmed = []
    for match in candidates[:MOST_CONFIRMED]:
        without_ratio = [*{*without, *(["ratio"] if match.on_policy else [])}]
        report = check_step(
            step,
            model,
            match.name,
            temperature=temperature,
            scale=match.scale,
            seed=seed,
            explain=False,
            without=without_ratio,
            group_size=group_size,
            rewards=rewards,
            advantages=advantages,
            clip=match.clip,
            **match.hp,
        )
        if report:
            confirmed.append(
                replace(match, error=report.error, not_reached=report.not_reached)
            )
    if confirmed:
        row_arguments = {
            "group_size": group_size,
            "rewards": rewards,
            "advantages": advantages,
        }
        passed = tuple(k for k, v in row_arguments.items() if v is not None)
        return StepIdentification(name, temperature, confirmed, passed=passed)
    # why there is none
    reason = "no objective with the usual numbers has its weights"
    if candidates:
        reason = f"{candidates[0]} has nearly its weights, but a different gradient"
    why = f"{reason} ({_describe_bounds(draws[0])}): give check_step the numbers of the loop"
    if rewards is None:
        why += (
            ". If it makes its advantages itself, of the rewards or of `adv`, pass "
            "rewards= and advantages="
        )
    return StepIdentification(name, temperature, why=why)


def _read_weights_of_draw(
    step: Callable[[Any, list[Row]], Any],
    model: nn.Module,
    reference: TorchModel,
    goal: Goal,
    without: Sequence[str],
    seed: int,
    row_options: RowOptions,
) -> Draw:
    """Run the step on rows beside the bounds of the goal, and read its weights."""
    case = build_case(reference, goal, None, without, seed, row_options=row_options)
    gradient, _ = run_step(step, model, case)
    reading = read_weights(case.forward, reference.flat(gradient))
    # weights begin with that of the row's second token
    of_responses = [
        w[len(row.prompt) - 1 :]
        for w, row in zip(reading.weights, case.rows, strict=True)
    ]
    weights = nn.utils.rnn.pad_sequence(of_responses, batch_first=True)
    lp, H, Z, _ = case.forward.statistics()
    statistics = Statistics(lp.detach(), H.detach(), Z.detach())
    norm = float(reference.flat(gradient).norm())
    # a weight is that of J: the loss is minimized, and has the opposite sign
    return Draw(case, -weights, reading.residual, norm, statistics)


def _clip_bound(draws: list[Draw]) -> float | None:
    """Return the bound to which a step clips the gradient's norm: the norm that all
    draws have, in three digits where these suffice. None where their norms differ.
    """
    first, *others = [draw.norm for draw in draws]
    if any(abs(norm / first - 1) > NORMS_EQUAL for norm in others):
        return None
    return _short_number(first)


def _candidates(
    draws: list[Draw], temperature: float, all_on_policy: bool, clip: float | None
) -> Iterator[StepMatch]:
    """Yield the objectives whose weights these are on all draws, the commonest first.

    Args:
        draws: of the step.
        temperature: of the sampler.
        all_on_policy: whether all ratios are 1.
        clip: the bound of the gradient's norm. It makes the constant factor differ from
            draw to draw, and no more than 1.
    """

    def place(name: str) -> int:
        """Return where an objective stands among those that are tried first."""
        return TRIED_FIRST.index(name) if name in TRIED_FIRST else len(TRIED_FIRST)

    order = sorted(names(), key=place)
    for on_policy, name in product([True] if all_on_policy else [False, True], order):
        with suppress(InputError, RuntimeError, ArithmeticError):
            defaults = make_goal(name, {}, temperature).hp
            for hp in _hyperparameters_to_try(defaults, on_policy):
                scale = _shared_scale(
                    draws, make_goal(name, hp, temperature), on_policy, clip
                )
                if scale is not None:
                    yield StepMatch(name, hp, on_policy, scale, clip=clip)
                    break  # other numbers with these weights: not_reached has them


def _shared_scale(
    draws: list[Draw], goal: Goal, on_policy: bool, clip: float | None
) -> float | None:
    """Return the constant factor of the weights, if they are those of a goal on all
    draws; else None.

    Args:
        draws: of the step.
        goal: the objective with its numbers.
        on_policy: the step takes all ratios for 1.
        clip: as of `_candidates`: with a clip, the factor itself is not known, and is 1.
    """
    first, *others = draws
    factor = first.factor(goal, on_policy)
    if factor is None:
        return None
    other_factors = [draw.factor(goal, on_policy) for draw in others]
    if clip is not None:
        if any(x is None or not 0 < x <= 1 for x in [factor, *other_factors]):
            return None
        return 1.0
    if any(x is None or abs(x / factor - 1) > TOLERANCE for x in other_factors):
        return None
    return _short_number(factor)


def _hyperparameters_to_try(
    defaults: dict[str, Any], on_policy: bool
) -> Iterator[dict[str, float]]:
    """Yield hyperparameters to try: the defaults, then bounds as people set them."""
    yield {}  # the defaults
    if on_policy:
        return
    keys: list[str] = [k for k in ("eps", "eps_low", "eps_high") if k in defaults]
    values: list[Sequence[float]] = [(defaults[k], *USUAL_BOUNDS) for k in keys]
    if "c" in defaults:
        keys.append("c")
        values.append((defaults["c"], *USUAL_DUAL_BOUNDS))
    for values_of_keys in product(*values):
        hp = dict(zip(keys, values_of_keys, strict=True))
        changed = {k: v for k, v in hp.items() if v != defaults[k] and v is not None}
        if changed:
            yield changed


def _short_number(k: float) -> float:
    """Return the factor in three digits where the check cannot tell that from k; else k.

    A user means 1 or another short number.
    """
    short = float(f"{k:.3g}")
    return short if abs(short / k - 1) < FLOAT32_BOUND else k


def _describe_bounds(draw: Draw) -> str:
    """Return in words, for each sign of A and each side of r = 1, the two ratios between
    which the weights end: that of the farthest token with a weight, and that of the
    nearest without. A side where a token farther out has a weight is left out; where all
    are, a sentence says so. Tokens whose weight was not found (NaN) do not count.
    """
    batch = draw.case.padded
    lp = draw.statistics.lp
    assert batch.old is not None
    r = (lp - batch.old).exp()
    weight_sizes = draw.found.nan_to_num(0).abs()
    live = weight_sizes > TOLERANCE * float(weight_sizes.max())
    parts = []
    for sign, words in ((1, "A > 0"), (-1, "A < 0")):
        of_sign = batch.mask & (batch.adv * sign > 0) & ~draw.found.isnan()
        for side, side_word in ((1, "above"), (-1, "below")):
            dead = r[of_sign & ~live & ((r - 1) * side > 0)]
            if not len(dead):
                continue
            nearest_dead = float(dead.min() if side > 0 else dead.max())
            trained = r[of_sign & live]
            if not len(trained) or ((trained - nearest_dead) * side > 0).any():
                continue
            farthest_live = float(trained.max() if side > 0 else trained.min())
            low, high = sorted((farthest_live, nearest_dead))
            parts.append(
                f"{words}: none {side_word} r between {low:.4g} and {high:.4g}"
            )
    return "; ".join(parts) or "no ratio beyond which no token has a weight"
