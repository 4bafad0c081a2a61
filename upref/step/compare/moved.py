# SPDX-License-Identifier: Apache-2.0
"""The gradient of a step whose engine hides it, read from what the weights moved.

Under SGD without momentum, decay and clip the weights move by η g, whatever engine
computed g. Each of torch's optimizers that steps in this process gets that update in
place of its own, so that a loop keeps its optimizer. η is large: what a weight was
before is then far below what it moves, and costs the gradient no digits.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from upref.errors import InputError
from upref.step.compare.record import Feed, Nesting, Step, loss_scale
from upref.step.inputs.reference import (
    Gradient,
    as_float64,
    gather_tensor,
    to_dense,
    unwrapped,
)
from upref.verify.report import counted

# η of the optimizers that are replaced: a power of two, by which no digit is lost
LEARNING_RATE = 2.0**40
LEARNING_RATE_OF_FLOAT16 = 1.0  # whose largest number is 65504
# η of several optimizer steps: the second has to see weights at which a model works
LEARNING_RATE_OF_SEVERAL = 2.0**-7
LARGEST_ROUNDING = 0.03  # of the gradient's norm: beyond, no verdict is made
FINE_ROUNDING = 1e-5  # below float32's own bound
# times the rounding: a parameter that has all of it is allowed a quarter of the bound
ALLOWED_ROUNDINGS = 3
SMALLEST_SHARE = 1e-6  # of what the replaced optimizers move
FINER = (
    "let the step train with a larger lr, such as 1024, and pass moved=1024; an adapter "
    "whose engine makes one update says learning_rate = 1024"
)
SGD = "SGD with lr=1, momentum 0, weight decay 0 and no clip of the gradient"
# of more weights than MANY, a share above MOST moves by one amount: these are signs
MANY = 8
MOST = 0.9


class StaleWeightsError(Exception):
    """The optimizer stepped, and the next forward passes had the weights from before."""


@dataclass(frozen=True)
class Moved:
    """How a gradient was read from the weights.

    Attributes:
        learning_rate: by which the moves were divided.
        replaced: the classes of torch's optimizers whose update was replaced.
        rounding: the largest error that the rounding of the weights can make, relative
            to the norm of the gradient.
    """

    learning_rate: float
    replaced: tuple[str, ...]
    rounding: float

    def __str__(self) -> str:
        """Describe how the gradient was read: by replaced optimizers, or else by the
        step's own update, which is then taken for plain SGD.
        """
        said = f"from what the weights moved, to {self.rounding:.1g} of its norm"
        if self.replaced:
            return (
                f"{said}: SGD at a large learning rate takes the place of the update of "
                f"{', '.join(self.replaced)}"
            )
        said += f" ({FINER})" if self.rounding > FINE_ROUNDING else ""
        return (
            f"{said}. No optimizer of torch steps in this process, so upref replaces none: "
            f"the verdict holds if the step trains by SGD with lr={self.learning_rate:g}, momentum 0, "
            "weight decay 0 and no clip of the gradient"
        )

    @property
    def allowed(self) -> float:
        """Return the error of the gradient that this rounding may make."""
        return ALLOWED_ROUNDINGS * self.rounding


@dataclass(frozen=True)
class _Handed:
    """A parameter that an optimizer is about to change.

    Attributes:
        parameter: itself.
        weights: a copy of it.
        gradient: what is in its `.grad`.
        copy: a copy of that.
        sign: -1 where the optimizer maximizes.
    """

    parameter: Tensor
    weights: Tensor
    gradient: Tensor | None
    copy: Tensor | None
    sign: float


class WeightReader:
    """Reads the gradient of one run of a step from the weights before and after it.

    Args:
        model: what the step trains, before it.
        learning_rate: of the step's own SGD, where upref can replace no optimizer.
        steps: optimizer steps that are read.
    """

    def __init__(self, model: nn.Module, learning_rate: float, steps: int = 1):
        """Copy the trained weights, and choose the learning rate that replaced
        optimizers get.
        """
        self.model = unwrapped(model)
        self.learning_rate = learning_rate
        self.steps = steps
        # of the trained parameters, in their own dtype
        self.before = {
            name: gather_tensor(p).clone()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        is_float16 = any(p.dtype == torch.float16 for p in self.before.values())
        self.rate = LEARNING_RATE_OF_FLOAT16 if is_float16 else LEARNING_RATE
        if steps > 1:
            self.rate = LEARNING_RATE_OF_SEVERAL
        self.names: list[str] = []  # of the optimizers that stepped
        self.squares = 0.0  # the sum of squares of all gradients that they had
        self.times: Counter[int] = Counter()  # how often each parameter stepped
        # the weights that the model's forward passes had, wherever they had changed
        self.fed_weights: list[dict[str, Tensor]] = []
        self.feeds = [Feed()]  # what was fed at the first weights, at the next, ...
        self.forwards = 0  # between the first optimizer step and the last
        # what the optimizer that steps now is about to change
        self.handed: list[_Handed] = []
        # weights of all optimizers, which may be copies that the engine has
        self.own_weights: list[tuple[Tensor, Tensor]] = []
        self.nesting = Nesting()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Replace the update of every optimizer of torch by that of SGD inside; then
        give all that they train its weights back.
        """
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # an engine that lives longer than the step may have copies of the model's
            with torch.no_grad():
                for p, weights in reversed(self.own_weights):
                    p.copy_(weights)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep what the optimizer is about to change."""
        if not self.nesting.begins(optimizer):
            return
        self.handed = [
            _Handed(
                p,
                p.detach().clone(),
                p.grad,
                None if p.grad is None else p.grad.clone(),
                -1.0 if group.get("maximize") else 1.0,
            )
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        self.own_weights += [(one.parameter, one.weights) for one in self.handed]

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Undo what the optimizer did, and move the weights by SGD.

        Raises:
            InputError: a parameter has made more steps than are read.
        """
        if not self.nesting.ends(optimizer):
            return
        scale = loss_scale(optimizer)
        name = type(optimizer).__name__
        if name not in self.names:
            self.names.append(name)
        for one in self.handed:
            p = one.parameter
            # a closure makes the gradient inside the step
            is_new = p.grad is not None and p.grad is not one.gradient
            gradient = p.grad if is_new else one.copy
            p.copy_(one.weights)
            if gradient is None:
                continue
            self.times[id(p)] += 1
            if self.times[id(p)] > self.steps:
                made = self.steps + 1
                wanted = "one" if self.steps == 1 else str(self.steps)
                raise InputError(
                    f"the step made {made} optimizer steps on these rows: let it make {wanted}."
                )
            dense = to_dense(gradient) / scale
            self.squares += float(dense.double().pow(2).sum())
            p.sub_(dense.to(p.dtype), alpha=one.sign * self.rate)
        self.handed = []

    def gradient(self, out: Any) -> tuple[Gradient, Moved]:
        """Return the gradient, and how it was read.

        Args:
            out: what the step returned: the weights after it by name, where the model
                that it was handed does not have them.

        Raises:
            InputError: no weight moved, or all moved by one amount, or a weight is
                missing, or rounding hides the gradient.
        """
        return self._read(self.before, self._weights_after(out))

    def read_steps(self, out: Any) -> list[tuple[Step, Moved]]:
        """Return several optimizer steps, and how the gradient of each was read.

        Args:
            out: what the steps returned: a list of the weights after each, by name;
                None: the model has them.

        Raises:
            InputError: as `gradient`, or there are more or fewer steps.
            StaleWeightsError: the optimizer stepped, and the model was fed with the
                weights from before.
        """
        weights: list[dict[str, Any]] = [self.before]
        is_list = isinstance(out, list | tuple)
        if is_list:
            weights += [self._weights_after(one) for one in out]
        else:
            weights += self.fed_weights
            last = self._weights_after(out)
            if _differ(weights[-1], last):
                weights.append(last)
        changes = len(weights) - 1
        made = max(self.times.values(), default=0)
        is_stale = changes < self.steps and made == self.steps and self.forwards
        if is_stale and not is_list:
            raise StaleWeightsError(
                f"the optimizer made {made} steps, and the model's weights changed {counted(changes, 'time')}: forward "
                "passes after a step had the weights from before it"
            )
        if changes != self.steps:
            raise InputError(
                f"the weights of the model changed {counted(changes, 'time')}, and there are {self.steps} optimizer "
                "steps: let the model have the weights after each, or return a list of {name: array}, one for each step."
            )
        feeds = [feed.sequences for feed in self.feeds]
        fed = feeds if len(feeds) == self.steps else [[]] * self.steps
        steps = []
        for (before, after), sequences in zip(pairwise(weights), fed, strict=True):
            gradient, moved = self._read(before, after)
            tensors = {name: torch.as_tensor(array) for name, array in before.items()}
            steps.append((Step(tensors, gradient, fed=sequences), moved))
        return steps

    @contextmanager
    def following(self) -> Iterator[None]:
        """Keep what the model's forward passes are fed, and the weights that they have,
        inside.
        """

        def keep(module: nn.Module, args: Any, kw: Any) -> None:
            """Keep what is fed, and the weights where they are not the last ones."""
            now = {
                name: p.detach().clone()
                for name, p in self.model.named_parameters()
                if name in self.before and p.shape == self.before[name].shape
            }
            made = max(self.times.values(), default=0)
            if 0 < made < self.steps:
                self.forwards += 1
            known = self.fed_weights[-1] if self.fed_weights else self.before
            if now.keys() == self.before.keys() and _differ(known, now):
                self.fed_weights.append(now)
                self.feeds.append(Feed())
            self.feeds[-1](module, args, kw)

        handle = self.model.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _read(
        self, before: dict[str, Any], after: dict[str, Any]
    ) -> tuple[Gradient, Moved]:
        """Return the gradient that moved weights to others, and how it was read.

        Raises:
            InputError: as `gradient`, but for missing weights.
        """
        rate = self.rate if self.names else self.learning_rate
        moved = {
            name: as_float64(before[name]) - as_float64(after[name])
            for name in self.before
        }
        every = torch.cat([x.flatten() for x in moved.values()])
        if not every.isfinite().all():
            raise InputError(
                "the weights are not finite after the step: its gradient is not, or its engine cannot "
                f"move them by {rate:g} times the gradient; return {{name: gradient}}."
            )
        if not every.any():
            raise InputError(
                "the step moved no weight of the model: train the model that it is handed, or return its weights "
                "after the step as {name: array}; and let the optimizer step."
            )
        if not self.names:
            _refuse_sign_updates(every)
        norm = float(every.norm())
        if self.names and norm < SMALLEST_SHARE * self.rate * math.sqrt(self.squares):
            raise InputError(
                f"the weights of the model did not move with those that {', '.join(self.names)} trains: keep that "
                f"optimizer out of the step, and let the engine train by {SGD}."
            )
        rounding = self._rounding(before, after) / norm
        if rounding > LARGEST_ROUNDING:
            raise InputError(
                f"the weights moved so little that rounding them hides {100 * min(rounding, 1):.0f} % of the gradient: "
                f"{FINER}."
            )
        gradient = {name: x / rate for name, x in moved.items() if x.any()}
        return gradient, Moved(rate, tuple(self.names), rounding)

    def _weights_after(self, out: Any) -> dict[str, Any]:
        """Return the weights after the step, by the names of the model's parameters:
        those that the step returned, or else the model's.

        Raises:
            InputError: a trained parameter is missing, or has another shape.
        """
        after = named_arrays(out, self.model) or dict(self.model.named_parameters())
        for name, weights in self.before.items():
            found = getattr(after.get(name), "shape", None)
            if found is None or tuple(found) != tuple(weights.shape):
                what = "is gone" if found is None else f"has shape {tuple(found)}"
                raise InputError(
                    f"parameter {name} of the model {what} after the step: let the step gather the weights from its "
                    "engine, and return them as {name: array}."
                )
        return after

    def _rounding(self, before: dict[str, Any], after: dict[str, Any]) -> float:
        """Return the norm of the largest errors that rounding can make of the moves:
        half a unit in the last place of each weight after the step.
        """
        squares = 0.0
        for name, own in self.before.items():
            weights = after[name]
            is_torch = isinstance(weights, Tensor) and weights.is_floating_point()
            dtype = weights.dtype if is_torch else own.dtype
            unit = torch.finfo(dtype).eps / 2
            largest = torch.maximum(
                as_float64(before[name]).abs(), as_float64(weights).abs()
            )
            squares += float((unit * largest).pow(2).sum())
        return math.sqrt(squares)


def named_arrays(out: Any, model: nn.Module) -> dict[str, Any]:
    """Return what a step returned, by the names of the model's parameters; nothing where
    it names none of them, as a dict of metrics does.

    Args:
        out: what the step returned.
        model: what it trains.
    """
    if not isinstance(out, dict):
        return {}
    by_name = {
        name.removeprefix("_orig_mod.").removeprefix("module."): array
        for name, array in out.items()
        if isinstance(name, str)
    }
    names = {name for name, _ in model.named_parameters()}
    return by_name if names & by_name.keys() else {}


def _differ(some: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether any weight differs."""
    return any(
        not torch.equal(as_float64(some[name]), as_float64(other[name]))
        for name in some
    )


def _refuse_sign_updates(moves: Tensor) -> None:
    """Raise InputError where nearly all weights move by one amount, as at the first step
    of Adam: those are signs, and the gradient cannot be read from them.
    """
    sizes = moves[moves != 0].abs()
    middle = sizes.median()
    alike = float(((sizes - middle).abs() < 0.01 * middle).double().mean())
    if len(sizes) > MANY and alike > MOST:
        raise InputError(
            f"nearly every weight moved by {float(middle):.3g}, as Adam's first step moves it: that is the sign of the "
            f"gradient and not its size. Let the step train by {SGD}."
        )
