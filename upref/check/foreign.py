# SPDX-License-Identifier: Apache-2.0
"""A loss by its name, as `upref.capacity`, `cap_map` and `weights` draw it."""

import dataclasses
import inspect
from collections.abc import Callable

from torch import Tensor

from upref.aggregate import Totals
from upref.check.adapters import _Bare, load


def named(target: str) -> Callable[..., Tensor]:
    """The loss `(log_prob, old_log_prob, advantages, mask, **its own settings) -> scalar` of that name.

    `path/to/file.py:function`, `package.module:function`, or `verl:loss_mode`, whose settings are ActorConfig's fields.

    Raises InputError where there is none.
    """
    if not target.startswith("verl:"):
        return load(target)

    from upref.check.verl import verl, verl_loss

    def loss(log_prob, old_log_prob, advantages, mask, **config):
        b = _Bare(log_prob, old_log_prob, advantages, mask, Totals.of(mask))
        return verl_loss(target.removeprefix("verl:"), b, padding=None, **config)  # type: ignore[arg-type]

    loss.__name__ = target
    fields = ["log_prob", "old_log_prob", "advantages", "mask", *(f.name for f in dataclasses.fields(verl()[1]))]
    loss.__signature__ = inspect.Signature([inspect.Parameter(f, inspect.Parameter.KEYWORD_ONLY) for f in fields])  # type: ignore[attr-defined]
    return loss
