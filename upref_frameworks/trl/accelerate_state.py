# SPDX-License-Identifier: Apache-2.0
"""The state that accelerate shares between all trainers of a process: the device, the
ranks, the precision and the gradient accumulation.

Each trainer that is built overwrites it, and each GRPOConfig that is made clears it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

State = list[dict[str, Any]]


def copy_of_state() -> State:
    """Return a copy of accelerate's state as it is now."""
    return [dict(part) for part in _parts()]


@contextmanager
def restored_state(inside: State | None = None) -> Iterator[None]:
    """Restore accelerate's state when the block ends.

    Args:
        inside: the state of the block, as `copy_of_state` returned it; None: that of
            the process.
    """
    before = copy_of_state()
    try:
        if inside is not None:
            _fill(inside)
        yield
    finally:
        _fill(before)


def _parts() -> State:
    """Return the three dictionaries themselves."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    return [c._shared_state for c in classes]  # noqa: SLF001


def _fill(state: State) -> None:
    """Give accelerate this state, in place."""
    for part, kept in zip(_parts(), state, strict=True):
        part.clear()
        part.update(kept)
