# SPDX-License-Identifier: Apache-2.0
"""`upref/turns`, a policy loss of verl that is one objective after another, so that
every.py starts verl once.

UPREF_TURNS="dapo grpo": their names; UPREF_TURN="8": how many micro-batches each of
them has. The loss that is called is the registered one, `upref/NAME`; the metric
`upref/turn` says which.
"""

import os

from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

import upref
from upref_frameworks.verl.training import register

NAMES, TURN = os.environ["UPREF_TURNS"].split(), int(os.environ["UPREF_TURN"])
# up(dapo) is new
LOSSES = [
    POLICY_LOSS_REGISTRY.get(f"upref/{name}") or register(upref.get(name))
    for name in NAMES
]
_calls = 0


@register_policy_loss("upref/turns")
def turns(**batch):
    """verl calls it with keywords, once a micro-batch."""
    global _calls
    turn = _calls // TURN
    _calls += 1
    loss, metrics = LOSSES[turn](**batch)
    return loss, metrics | {"upref/turn": float(turn)}
