# SPDX-License-Identifier: Apache-2.0
"""A step on several ranks: rank 0 makes the rows and compares; every rank trains on its
share of them.

Rank 0 checks as it does alone. Whenever the step is to run, it sends the weights and
the rows to the others, and all run the step at the same time: rank r of n has every
n-th row from row r on. Each rank trains a copy of the model, for FSDP2 replaces the
parameters of the module that it shards.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed as dist, nn

from upref.errors import InputError
from upref.step.compare.moved import Moved, WeightReader
from upref.step.compare.record import Step, gradients, watched
from upref.step.inputs.reference import Gradient, unwrapped
from upref.step.inputs.rows import Row

# "run", weights, rows; "report", the report, None; or "refused", the reason, None
Message = tuple[str, Any, Any]
UserStep = Callable[[Any, list[Row]], Any]
# (step, model, rows) -> what the step returns
Caller = Callable[[UserStep, Any, list[Row]], Any]


class StepFailedError(InputError):
    """The step fails on this rank: the others may wait for it inside the step."""


@dataclass(frozen=True)
class Trained:
    """What one run of a step left behind.

    Attributes:
        gradients: of the optimizer step, or what is in `.grad` where the step made
            none.
        steps: how many optimizer steps it made.
        backwards: how many backward passes it made on this rank.
        fed: the sequences that the model was fed, on all ranks.
        out: what the step returned.
        apart: how far the gradient of any rank is from this one's, relative to its
            norm.
        moved: how the gradient was read from the weights; None: it is that of the
            optimizer step, or of `.grad`.
    """

    gradients: Gradient
    steps: int
    backwards: int
    fed: list[list[int]]
    out: Any
    apart: float = 0.0
    moved: Moved | None = None


def world_size() -> int:
    """Return the number of ranks of the process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_follower() -> bool:
    """Tell whether another rank than this one compares."""
    return world_size() > 1 and dist.get_rank() > 0


@contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 numbers in float32 on a GPU inside, and restore the setting.

    TF32 rounds them to 10 bits, and the bound of the comparison is for float32.

    Yields:
        Once; on a host without a GPU nothing changes.
    """
    backends: Any = torch.backends  # whose newer names torch does not type
    matmul = backends.cuda.matmul
    cudnn = backends.cudnn
    with ExitStack() as stack:
        try:
            for owner in (matmul, cudnn):
                stack.enter_context(_set_to(owner, "allow_tf32", False))
        except RuntimeError:  # who set the newer names may not read the older
            for newer in (matmul, cudnn.conv, cudnn.rnn):
                stack.enter_context(_set_to(newer, "fp32_precision", "ieee"))
        yield


@contextmanager
def _set_to(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute where it is another, and set it back at the end."""
    before = getattr(owner, name)
    if before == value:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def train(
    step: UserStep,
    model: nn.Module,
    rows: list[Row],
    call: Caller,
    learning_rate: float = 0.0,
) -> Trained:
    """Run the step in this process, and take what it leaves behind.

    Args:
        step: `(model, rows)`.
        model: what the step trains; gradients that it has are cleared first.
        rows: of this process.
        call: calls the step, and makes an InputError of what it raises.
        learning_rate: of the step's own SGD, whose gradient is read from what the
            weights moved; 0: it is not read from the weights.

    Returns:
        The gradients of the first optimizer step, or of `.grad`, and what was fed.

    Raises:
        InputError: the step fails, or no gradient can be read from the weights.
    """
    steps: list[Step] = []
    for p in unwrapped(model).parameters():
        p.grad = None
    reader = WeightReader(model, learning_rate) if learning_rate else None
    replacing = reader.replacing() if reader else nullcontext()
    moved = None
    with (
        without_tf32(),
        watched(model, steps, 9, weights=False) as (count, fed),
        replacing,
    ):
        out = call(step, model, rows)
        if reader:
            gradients_left, moved = reader.gradient(out)
    if not reader:
        gradients_left = steps[0].gradients if steps else gradients(model)
    sequences = [x for s in steps for x in s.fed] + fed
    return Trained(
        gradients_left,
        len(steps),
        count[0] + sum(s.backwards for s in steps),
        sequences,
        out,
        moved=moved,
    )


def lead(
    step: UserStep,
    model: nn.Module,
    rows: list[Row],
    call: Caller,
    learning_rate: float = 0.0,
) -> Trained:
    """Run the step on all ranks, as rank 0.

    Args:
        step: `(model, rows)`.
        model: its weights are sent to every rank.
        rows: of all ranks.
        call: calls the step, and makes an InputError of what it raises.
        learning_rate: as for `train`.

    Returns:
        What rank 0 is left with, and the sequences of all ranks.

    Raises:
        InputError: there are more ranks than rows, or the step fails on this rank.
    """
    if world_size() > len(rows):
        raise InputError(
            f"{len(rows)} rows cannot be shared by {world_size()} ranks: start {len(rows)} at most."
        )
    weights = {n: v.detach().cpu() for n, v in unwrapped(model).state_dict().items()}
    _send(("run", weights, rows))
    return _train_share(step, model, rows, call, learning_rate)


def follow(
    step: UserStep, model: nn.Module, call: Caller, learning_rate: float = 0.0
) -> Any:
    """Run the step whenever rank 0 does, as any other rank.

    Args:
        step: `(model, rows)`.
        model: it gets the weights of rank 0.
        call: calls the step, and makes an InputError of what it raises.
        learning_rate: as for `train`.

    Returns:
        The report of rank 0.

    Raises:
        InputError: rank 0 cannot check the step, or the step fails on this rank.
    """
    while True:
        kind, content, rows = _receive()
        if kind == "report":
            return content
        if kind == "refused":
            raise InputError(content)
        unwrapped(model).load_state_dict(content)
        _train_share(step, model, rows, call, learning_rate)


Answer = TypeVar("Answer")


def conclude(check: Callable[[], Answer]) -> Answer:
    """Check as rank 0, and hand the report, or the reason why there is none, to the
    other ranks.

    Where the step itself fails the others get nothing: they end with this process.

    Args:
        check: makes the report.

    Returns:
        That report.

    Raises:
        InputError: the check is refused, or the step fails on this rank.
    """
    try:
        report = check()
    except StepFailedError:
        raise
    except InputError as error:
        _send(("refused", str(error), None))
        raise
    _send(("report", report, None))
    return report


def _train_share(
    step: UserStep,
    model: nn.Module,
    rows: list[Row],
    call: Caller,
    learning_rate: float,
) -> Trained:
    """Train on this rank's rows, and return what that left behind; the sequences and
    the distance are those of all ranks. A model without a wrapper is copied before.

    Raises:
        StepFailedError: the step fails on this rank.
    """
    is_wrapped = unwrapped(model) is not model
    share = rows[dist.get_rank() :: world_size()]
    try:
        own_step = train(
            step,
            model if is_wrapped else copy.deepcopy(model),
            share,
            call,
            learning_rate,
        )
    except InputError as error:
        raise StepFailedError(
            f"rank {dist.get_rank()} of {world_size()}: {error}"
        ) from error
    results_of_ranks: list[Any] = [None] * world_size()
    dist.all_gather_object(results_of_ranks, (own_step.fed, own_step.gradients))
    fed = [sequence for sequences, _ in results_of_ranks for sequence in sequences]
    apart = max(_distance(theirs, own_step.gradients) for _, theirs in results_of_ranks)
    return replace(own_step, fed=fed, apart=apart)


def _distance(a: Gradient, b: Gradient) -> float:
    """Return |a - b| / |b|: infinite where they have other parameters, 0 where both
    have none.
    """
    if a.keys() != b.keys():
        return float("inf")
    if not b:
        return 0.0
    vectors: list[Tensor] = [
        torch.cat([gradient[n].flatten() for n in b]) for gradient in (a, b)
    ]
    return float((vectors[0] - vectors[1]).norm() / vectors[1].norm().clamp(min=1e-300))


def _send(message: Message) -> None:
    """Send a message from rank 0 to the other ranks."""
    dist.broadcast_object_list([message], src=0)


def _receive() -> Message:
    """Wait for a message of rank 0, and return it."""
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0)
    message: Message = box[0]
    return message
