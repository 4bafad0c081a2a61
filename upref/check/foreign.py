# SPDX-License-Identifier: Apache-2.0
"""A loss by its name, as `upref.capacity`, `cap_map` and `weights` draw it."""

from collections.abc import Callable

from torch import Tensor

from upref.check.adapters import load
from upref.registry import get
from upref.rollouts import Rollouts


def named(target: str) -> Callable[..., Tensor]:
    """The loss `(log_prob, old_log_prob, advantages, mask, **its own keywords) -> scalar` of that name.

    path/to/file.py:function, package.module:function, or verl:loss_mode and trl:loss_type at the framework's defaults;
    fields of its config follow the name, `verl:vanilla,clip_ratio_c=10`. Raises InputError where there is none.
    """
    framework, _, rest = target.partition(":")
    if framework not in ("verl", "trl"):
        return load(target)
    from upref.check import frameworks

    mode, *fields = (word for word in rest.split(",") if word != "defaults")
    theirs = frameworks.named(f"{framework}:{','.join([mode, 'defaults', *fields])}", get("grpo"), {})

    def loss(log_prob, old_log_prob, advantages, mask):
        b = Rollouts(logp=log_prob.detach(), logp_old=old_log_prob, adv=advantages, mask=mask)
        return theirs.run(theirs.inputs(b, log_prob), b)

    loss.__name__ = target
    return loss
