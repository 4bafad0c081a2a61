# SPDX-License-Identifier: Apache-2.0
"""Two halves of the rows of a recorded step, each with a gradient of its own: whether a
cause that fits the whole gradient fits both of them.

After each backward pass the recorder keeps a sketch of what has accumulated. The
differences of these sketches are the gradients of the passes. A reference whose rows
have their gradients in two halves of one vector is searched for the cause again: what
is found there makes the gradient of each half.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from upref.step.compare.case import GradientComparison, StepCase, compare
from upref.step.compare.record import Passed
from upref.step.compare.sketch import DIRECTIONS, KEPT, project_some
from upref.step.explain.diagnose import diagnose
from upref.step.inputs.reference import Gradient, TorchModel, to_dense
from upref.step.inputs.rows import Row, locate
from upref.verify.faults.measured import AFTER_BACKWARD
from upref.verify.finding import Cause

ONE_PASS = (
    "possible, for one backward pass made this gradient, and no half of the rows has "
    "one of its own to test it on: "
)
NO_HALVES = "possible, and not tested on halves of the rows: "
UNFIT = "possible, though it does not fit two halves of the rows, each by itself: "
# a sketch keeps a norm to some percent, and a half is less than the whole
WIDER_BOUND = 2.0
PROPORTIONAL_TOL = 1e-4  # how near two sketches of one direction are


@dataclass(frozen=True)
class Halves:
    """Which half each row is in, and the sketch of the gradient of each half, by the
    names of the parameters.
    """

    of_row: list[int]
    gradients: tuple[Gradient, Gradient]


class HalvedGradient(dict[str, Tensor]):
    """Sketches of both halves, one behind the other, by the names of the parameters."""


class HalvedModel(TorchModel):
    """A reference whose gradients are sketches in two halves: that of a row stands in
    the half that the row is in, and the other half is 0.
    """

    def __init__(
        self, whole: TorchModel, of_row: Sequence[int], half: int | None = None
    ):
        """Take all of the whole model, with shapes twice as long.

        half: the half that the gradients are in; None where no row is chosen yet.
        """
        vars(self).update(vars(whole))
        self.whole = whole
        self.of_row_halves = of_row
        self.half = half
        self.head = []  # its entries are among the projections
        self.shapes = {
            n: torch.Size([2 * min(s.numel(), DIRECTIONS)])
            for n, s in whole.shapes.items()
        }

    def of_row(self, i: int) -> "HalvedModel":
        """Return the model whose gradients are in the half of row i."""
        return HalvedModel(self.whole, self.of_row_halves, self.of_row_halves[i])

    def like(self, net: nn.Module) -> TorchModel:
        """Return the same reference of another module."""
        return HalvedModel(self.whole.like(net), self.of_row_halves)

    def flat(self, g: Gradient) -> Tensor:
        """Join sketches of both halves to one vector on the CPU.

        Args:
            g: gradients of this row, or of no certain one, which count in both halves;
                or a HalvedGradient.

        Returns:
            [P], in the order of the parameters; 0 where one has no gradient.
        """
        parts = []
        for name, shape in self.shapes.items():
            out = torch.zeros(2, shape.numel() // 2, dtype=torch.float64)
            if name in g and isinstance(g, HalvedGradient):
                out = g[name]
            elif name in g:
                out[slice(None) if self.half is None else self.half] = project_some(
                    name, to_dense(g[name])
                )
            parts.append(out.reshape(-1))
        return torch.cat(parts)

    def pull_each(self, z: Tensor, dz: Tensor, ids: Sequence[int]):  # type: ignore[no-untyped-def]
        """Yield the sketch of one gradient at a time, [1, P]."""
        for dz_row in dz:
            yield self.pull(z, dz_row, ids)[None]


def halves_of(passes: Sequence[Passed], rows: Sequence[Row]) -> Halves | None:
    """Cut the backward passes of a step where about half of the tokens have trained.

    Args:
        passes: of the step, in their order.
        rows: of the step.

    Returns:
        The halves; None where there are less than two passes, or a row was fed to no
            pass, or to several, or the gradients were changed between two passes.
    """
    of_pass = []  # the number of the pass to which each row was fed
    for row in rows:
        fed_to = [n for n, one_pass in enumerate(passes) if locate(one_pass.fed, row)]
        if len(fed_to) != 1:
            return None
        of_pass.append(fed_to[0])
    counts = [0] * len(passes)  # tokens that train in each pass
    for row, n in zip(rows, of_pass, strict=True):
        counts[n] += sum(row.trains)
    cut = _middle_of(counts)
    if cut is None:
        return None
    gradients: tuple[Gradient, Gradient] = ({}, {})
    for n, one_pass in enumerate(passes):
        if not _holds(one_pass.before):  # what had accumulated was dropped
            gradients = ({}, {})
        elif n == 0 or not _equal(one_pass.before, passes[n - 1].after):
            return None
        half = gradients[int(n >= cut)]
        for name, x in one_pass.after.items():
            added = x - one_pass.before.get(name, torch.zeros_like(x))
            half[name] = half.get(name, torch.zeros_like(x)) + added
    return Halves([int(n >= cut) for n in of_pass], gradients)


def _middle_of(counts: list[int]) -> int | None:
    """Return the place at which a cut makes the sums on both sides most alike, the first
    of several; None where every cut leaves a side without any.
    """
    cuts = []
    for place in range(1, len(counts)):
        if any(counts[:place]) and any(counts[place:]):
            unevenness = abs(2 * sum(counts[:place]) - sum(counts))
            cuts.append((unevenness, place))
    if not cuts:
        return None
    _, best = min(cuts)
    return best


def _holds(gradient: Gradient) -> bool:
    """Return whether anything has accumulated."""
    return any(bool(x.any()) for x in gradient.values())


def _equal(one: Gradient, other: Gradient) -> bool:
    """Return whether two sketches are the same numbers."""
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


def fits(
    halves: Halves,
    comparison: GradientComparison,
    case: StepCase,
    bound: float,
    cause: Cause,
) -> bool | None:
    """Return whether a cause that was found for a gradient is found for its two halves;
    None where the optimizer got another gradient than had accumulated.

    Args:
        halves: of its rows.
        comparison: the gradient beside the right one.
        case: its rows and the reference's forward pass.
        bound: the relative error that is allowed of the gradient.
        cause: what was found.
    """
    whole_model = case.forward.model
    assert isinstance(whole_model, TorchModel)
    model = HalvedModel(whole_model, halves.of_row)
    forward = replace(case.forward, model=model)
    halved = replace(case, forward=forward)
    goal = replace(comparison.goal, clip=None)
    bound = WIDER_BOUND * bound

    def beside(times: float) -> GradientComparison:
        """Return the halves, multiplied, beside those that they should be."""
        multiplied = {}
        for name in model.shapes:
            sketches = [g.get(name, _zeros(model, name)) for g in halves.gradients]
            multiplied[name] = times * torch.stack(sketches)
        return compare(goal, halved, HalvedGradient(multiplied), bound)

    accumulated = beside(1.0)
    if accumulated.error <= bound and {*cause.ids} <= AFTER_BACKWARD:
        return True  # both are right before the optimizer
    times = _times(halves, model, whole_model.split(comparison.found))
    if times is None:
        return None
    if comparison.goal.clip is not None and 0 < times < 1:
        times = 1.0  # the clip of the norm
    scaled = accumulated if times == 1 else beside(times)
    ids = {*diagnose(scaled, halved, bound, None, cause)[0].fault_ids}
    return {*cause.ids} <= ids


def _zeros(model: HalvedModel, name: str) -> Tensor:
    """Return the sketch of a parameter without a gradient."""
    return torch.zeros(model.shapes[name].numel() // 2, dtype=torch.float64)


def _times(halves: Halves, model: HalvedModel, found: Gradient) -> float | None:
    """Return what the accumulated gradient was multiplied by before the optimizer got
    it; None where it was changed otherwise, and 1 where nothing can be compared.
    """
    first, second = halves.gradients
    expected = []
    got = []
    for name, g in found.items():
        zero = _zeros(model, name)
        size = model.params[name].numel()
        if len(g) < size and size > KEPT:
            continue  # a file has projections of all its entries
        expected.append(first.get(name, zero) + second.get(name, zero))
        got.append(g if len(g) < size else project_some(name, g))
    if not got:
        return 1.0
    x = torch.cat(expected)
    y = torch.cat(got)
    # least squares: y = times · x
    times = float(x @ y / (x @ x).clamp(min=1e-300))
    is_proportional = float((y - times * x).norm()) <= PROPORTIONAL_TOL * y.norm()
    return times if is_proportional else None
