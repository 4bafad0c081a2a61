# SPDX-License-Identifier: Apache-2.0
"""The gradients that any torch trainer hands to its optimizer, and the weights that it
had before.
"""

from collections.abc import Iterator, Sequence
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
from upref.step.reference import (
    Gradient,
    TorchModel,
    as_float64,
    dense,
    unwrapped,
    whole,
)
from upref.step.rows import Row, locate
from upref.step.sketch import project_some


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
        """Those of the rows that this step trained on, recognized by their tokens, in
        the order of its forwards.

        Args:
            rows: any rows.

        Returns:
            Some of them.
        """
        found = sorted(
            (where, i) for i, r in enumerate(rows) if (where := locate(self.fed, r))
        )
        return [rows[i] for _, i in found]


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
        InputError: no optimizer step was taken, or the optimizer's parameters are not
            the model's.
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
            "and FSDP1 train flat copies, whose gradients are not read: check the same loop under DDP or FSDP2."
        )


class Feed:
    """A hook that keeps the sequences that a model is fed; a model that carries it can
    be handed to another process.
    """

    def __init__(self) -> None:
        self.sequences: list[list[int]] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Feed, ()

    def __call__(self, module: nn.Module, args: Any, kw: Any) -> None:
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
    count, open_ = [0], set[str]()
    backward = torch.autograd.backward

    passes: list[Passed] = []
    state: list[Any] = []  # of the gradients after the last pass

    def counting(*args: Any, **kw: Any) -> Any:
        """Go back, and record which sequences this backward pass was of."""
        count[0] += 1
        if not by_pass or len(steps) > first or not is_alone():
            return backward(*args, **kw)
        untouched = passes and state_of_gradients(model) == state
        before = passes[-1].after if untouched else sketched(model)
        out = backward(*args, **kw)
        known = sum(len(one_pass.fed) for one_pass in passes)
        passes.append(Passed(fed[known:], before, sketched(model)))
        state[:] = state_of_gradients(model)
        return out

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record the gradients that the optimizer finds."""
        named = {id(p): n for n, p in unwrapped(model).named_parameters()}
        # what is minimized is then the negative
        signs = {
            named[id(p)]: -1 if g.get("maximize") else 1
            for g in optimizer.param_groups
            for p in g["params"]
            if id(p) in named
        }
        # one optimizer per parameter makes one step together
        if not steps or open_ & signs.keys() or not signs:
            open_.clear()
            if len(steps) >= first:
                return
            state = unwrapped(model).state_dict() if weights else {}
            steps.append(
                Step(
                    {k: whole(v).cpu().clone() for k, v in state.items()},
                    {},
                    count[0],
                    fed[:],
                    passes[:],
                )
            )
            count[0] = 0
            fed.clear()
            passes.clear()
        open_.update(signs)
        steps[-1].gradients |= {
            n: signs[n] * g for n, g in gradients(model).items() if n in signs
        }

    def late(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """The gradients of a step that makes them itself, by a closure."""
        if steps and not steps[-1].gradients:
            steps[-1].gradients |= gradients(model)
            steps[-1].backwards, steps[-1].fed = count[0], fed[:]
            steps[-1].passes = passes[:]

    feed = Feed()
    fed = feed.sequences
    forward = unwrapped(model).register_forward_pre_hook(feed, with_kwargs=True)
    handles = [
        register_optimizer_step_pre_hook(look),
        register_optimizer_step_post_hook(late),
        forward,
    ]
    torch.autograd.backward = counting
    try:
        yield count, fed
    finally:
        torch.autograd.backward = backward
        for handle in handles:
            handle.remove()


def is_alone() -> bool:
    """Whether this process has the whole gradient: no other ranks share it."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return True
    return distributed.get_world_size() == 1


def state_of_gradients(model: nn.Module) -> list[Any]:
    """What tells whether anybody wrote to the gradients meanwhile."""
    each = (p.grad for p in unwrapped(model).parameters())
    return [None if g is None else (id(g), g._version) for g in each]  # noqa: SLF001


def sketched(model: nn.Module) -> Gradient:
    """Sketches of what is in `.grad`, by the names of the parameters."""
    return {
        n: project_some(n, dense(whole(p.grad)))
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
