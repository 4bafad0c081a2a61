# SPDX-License-Identifier: Apache-2.0
"""The gradients that any torch trainer hands to its optimizer, and the weights that it
had before.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from upref.errors import InputError
from upref.step.compare.sketch import project_some
from upref.step.inputs.reference import (
    Gradient,
    TorchModel,
    as_float64,
    gather_tensor,
    to_dense,
    unwrapped,
)
from upref.step.inputs.rows import Row, locate


@dataclass(frozen=True)
class Passed:
    """One backward pass: the sequences that were fed since the pass before, and
    sketches of what was in the gradients before it and after it.
    """

    fed: list[list[int]]
    before: Gradient
    after: Gradient


@dataclass
class Step:
    """One optimizer step: the weights before it, and the gradients that the optimizer
    was handed.
    """

    weights: dict[str, Tensor]
    gradients: Gradient
    backwards: int = 0  # backward passes that made it
    # the sequences, padded or packed, that were trained on
    fed: list[list[int]] = field(default_factory=list)
    # its backward passes; none where several ranks share the gradients
    passes: list[Passed] = field(default_factory=list)

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return those of the rows that this step trained on, recognized by their
        tokens, in the order of its forwards.

        Args:
            rows: any rows.

        Returns:
            Some of them; [] where none was fed.
        """
        places = sorted(
            (place, i) for i, r in enumerate(rows) if (place := locate(self.fed, r))
        )
        return [rows[i] for _, i in places]


@dataclass
class Recorded:
    """What `record_step` collects. `model` is a float64 copy of the model, made before
    the trainer touched it.
    """

    model: TorchModel
    steps: list[Step] = field(default_factory=list)


@contextmanager
def record_step(model: nn.Module, first: int = 8) -> Iterator[Recorded]:
    """Record each optimizer step of any torch trainer that trains this model.

    Enter it before the trainer is built: the reference is a copy of the model as it was
    then. Gradients are gathered from FSDP2's sharded tensors. They are what the
    optimizer gets, that is after a clip of their norm: switch the clip off, or name its
    bound to `check_recorded`.

    Args:
        model: the nn.Module that is trained, in place.
        first: how many steps to keep.

    Yields:
        Recorded, whose `steps` fill up while the trainer runs.

    Raises:
        InputError: no optimizer step was taken, the optimizer's parameters are not the
            model's, or the model does not tell the size of its vocabulary.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"record_step takes the nn.Module that is trained, not a {type(model).__name__}."
        )
    if not isinstance(first, int) or first < 1:
        raise InputError(
            f"first is the number of steps to keep, a whole number from 1 on, got {repr(first)[:60]}."
        )
    seen = Recorded(TorchModel(model))
    with watched(model, seen.steps, first, by_pass=True):
        yield seen
    if not seen.steps:
        raise InputError(
            "no optimizer step was taken inside record_step: train for at least one step."
        )
    if not any(s.gradients for s in seen.steps):
        raise InputError(
            "the optimizer does not hold this model's parameters: record the module that is trained. DeepSpeed's ZeRO "
            "and FSDP1 train flat copies, whose gradients are not read: check_step(..., moved=True) reads what the "
            "weights moved; or check the same loop under DDP or FSDP2."
        )


class Feed:
    """A hook that keeps the sequences that a model is fed; a model that carries it can
    be handed to another process.
    """

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Make an empty Feed in the other process."""
        return Feed, ()

    def __call__(self, module: nn.Module, args: Any, kw: Any) -> None:
        """Keep the ids of a forward pass that has gradients, if they are [B, S]
        integers.
        """
        ids = kw.get("input_ids", args[0] if args else None)
        if (
            torch.is_grad_enabled()
            and isinstance(ids, Tensor)
            and ids.ndim == 2
            and not ids.is_floating_point()
        ):
            # inside torch.func.vmap a tensor has no numbers
            with suppress(RuntimeError):
                self.sequences.extend(ids.tolist())


@contextmanager
def watched(
    model: nn.Module,
    steps: list[Step],
    first: int,
    weights: bool = True,
    by_pass: bool = False,
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Append to steps whenever an optimizer steps; yields the counter of backward
    passes, and what was fed since.

    Args:
        model: the module whose gradients are kept.
        steps: the list that gets a Step for each optimizer step.
        first: the number of optimizer steps that are kept.
        weights: keep the weights from before each step too.
        by_pass: keep a sketch of the gradients after each backward pass too.

    Yields:
        The counter, in a list of one; the lists of tokens.
    """
    recorder = _Recorder(model, steps, first, weights, by_pass)
    with recorder.hooks():
        yield recorder.count, recorder.feed.sequences


class _Recorder:
    """Adds a Step to a list whenever an optimizer steps, until there are enough.

    Args:
        model, steps, first, weights, by_pass: those of `watched`.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: list[Step],
        first: int,
        weights: bool,
        by_pass: bool,
    ):
        """Begin with no pass and no step; `hooks` starts to watch."""
        self.model, self.steps, self.first = model, steps, first
        self.keeps_weights, self.sketches_passes = weights, by_pass
        self.is_closed = False  # a step began that is not kept
        # since the last optimizer step
        self.count = [0]  # backward passes, in a list that the caller can watch
        self.feed = Feed()
        self.passes: list[Passed] = []
        # the parameters that the optimizers of the last step train
        self.trained: set[str] = set()
        self.state_after_pass: list[Any] = []
        self.handed: dict[str, Tensor | None] = {}  # to the optimizer that steps now
        self.nesting = Nesting()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the model, torch's backward passes and every optimizer."""
        plain_backward = torch.autograd.backward

        def backward(*args: Any, **kw: Any) -> Any:
            return self._backward(plain_backward, *args, **kw)

        model = unwrapped(self.model)
        self.feed_hook = model.register_forward_pre_hook(self.feed, with_kwargs=True)
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = plain_backward
            for handle in [*handles, self.feed_hook]:
                handle.remove()

    def _backward(
        self, plain_backward: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """Run the backward pass, and record which sequences it was of."""
        self.count[0] += 1
        if self.is_closed or not self.sketches_passes or not is_alone():
            return plain_backward(*args, **kw)
        untouched = state_of_gradients(self.model) == self.state_after_pass
        if self.passes and untouched:
            before = self.passes[-1].after
        else:
            before = sketched(self.model)
        result = plain_backward(*args, **kw)
        already_recorded = sum(len(one_pass.fed) for one_pass in self.passes)
        fed = self.feed.sequences[already_recorded:]
        self.passes.append(Passed(fed, before, sketched(self.model)))
        self.state_after_pass = state_of_gradients(self.model)
        return result

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the gradients that the optimizer finds, in a new Step; in the last
        one, where the last step has none of its parameters yet. After `first` steps no
        more are recorded, nor is what is fed.
        """
        signs = self._signs(optimizer)
        if not self.nesting.begins(optimizer) or self.is_closed or not signs:
            return
        # one optimizer per parameter makes one step together
        if not self.steps or self.trained & signs.keys():
            self.trained.clear()
            if len(self.steps) >= self.first:
                self.is_closed = True
                self.feed_hook.remove()
                return
            state = unwrapped(self.model).state_dict() if self.keeps_weights else {}
            weights = {k: gather_tensor(v).cpu().clone() for k, v in state.items()}
            self.steps.append(Step(weights, {}))
            self._take_passes()
        self.trained |= signs.keys()
        self._take_gradients(optimizer, signs)
        self.handed = self._gradient_tensors()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the gradients of a step that made them itself, by a closure. What
        `_before_step` recorded was of the step before, or nothing.
        """
        if not self.nesting.ends(optimizer):
            return
        handed, self.handed = self.handed, {}
        signs = self._signs(optimizer)
        if self.is_closed or not signs or not self.steps:
            return
        now = self._gradient_tensors()
        replaced = [
            n for n in signs if now[n] is not None and now[n] is not handed.get(n)
        ]
        if replaced or self.count[0]:
            self._take_gradients(optimizer, signs)
            self._take_passes()

    def _signs(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Return 1 for each of the model's parameters that the optimizer trains, by
        name; -1 where it maximizes, because what is minimized is then the negative.
        """
        names = {id(p): n for n, p in unwrapped(self.model).named_parameters()}
        return {
            names[id(p)]: -1 if group.get("maximize") else 1
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in names
        }

    def _gradient_tensors(self) -> dict[str, Tensor | None]:
        """Return each parameter's `.grad` itself, not a copy; None where it has none."""
        return {n: p.grad for n, p in unwrapped(self.model).named_parameters()}

    def _take_gradients(
        self, optimizer: torch.optim.Optimizer, signs: dict[str, int]
    ) -> None:
        """Copy the gradients of these parameters, as the optimizer uses them, into the
        last step.
        """
        scale = loss_scale(optimizer)
        self.steps[-1].gradients |= {
            n: signs[n] * g / scale
            for n, g in gradients(self.model).items()
            if n in signs
        }

    def _take_passes(self) -> None:
        """Hand the backward passes since the last optimizer step, and what was fed, to
        the last recorded step; count anew from here.
        """
        step = self.steps[-1]
        step.backwards, self.count[0] = self.count[0], 0
        step.fed = self.feed.sequences[:]
        step.passes = self.passes[:]
        self.feed.sequences.clear()
        self.passes.clear()


class Nesting:
    """Tells a step of an optimizer from one inside it: torch runs the hooks once for
    each class whose `step` it has wrapped, and a subclass may call that of its base.
    """

    def __init__(self) -> None:
        self.depths: Counter[int] = Counter()  # of running steps, by optimizer

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether this step is not inside another one of the optimizer."""
        self.depths[id(optimizer)] += 1
        return self.depths[id(optimizer)] == 1

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the step that ends was not inside another one of the optimizer."""
        self.depths[id(optimizer)] -= 1
        return self.depths[id(optimizer)] == 0


def loss_scale(optimizer: torch.optim.Optimizer) -> float:
    """Return the loss scale that the optimizer takes out itself, 1 where there is none:
    GradScaler hands it to a fused optimizer, and leaves it in the gradients.

    Args:
        optimizer: while it steps.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return float(scale) if isinstance(scale, Tensor) else 1.0


def is_alone() -> bool:
    """Return whether this process has the whole gradient: no other ranks share it."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return True
    return distributed.get_world_size() == 1


def state_of_gradients(model: nn.Module) -> list[Any]:
    """Return the identity and the version of each gradient: they differ once anybody
    has written to a gradient.
    """
    grads = (p.grad for p in unwrapped(model).parameters())
    return [None if g is None else (id(g), g._version) for g in grads]  # noqa: SLF001


def sketched(model: nn.Module) -> Gradient:
    """Return sketches of what is in `.grad`, by the names of the parameters that have
    one.
    """
    return {
        n: project_some(n, to_dense(gather_tensor(p.grad)))
        for n, p in unwrapped(model).named_parameters()
        if p.grad is not None
    }


def gradients(model: nn.Module) -> Gradient:
    """Copy what is in `.grad`.

    Args:
        model: the module.

    Returns:
        In float64, by the names of the parameters that have one.
    """
    return {
        n: as_float64(p.grad)
        for n, p in unwrapped(model).named_parameters()
        if p.grad is not None
    }
