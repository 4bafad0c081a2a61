# SPDX-License-Identifier: Apache-2.0
"""What the boundary asks of a tensor before it looks into it."""

from typing import Any, TypeGuard

import torch
from torch import Tensor


def is_materialized(x: Any) -> TypeGuard[Tensor]:
    """Return whether it is a tensor that holds its numbers: not sparse, not on the
    device `meta`.

    Args:
        x: anything.
    """
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta


def describe(x: Any) -> str:
    """Describe a tensor by dtype and shape, as `float32[2, 3]`, anything else by its type.

    Args:
        x: anything.

    Returns:
        Words for an error message.
    """
    if not isinstance(x, Tensor):
        return type(x).__name__
    kind = ""
    if not is_materialized(x):
        kind = "meta " if x.is_meta else "sparse "
    return f"{kind}{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
