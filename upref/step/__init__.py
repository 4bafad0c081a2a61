# SPDX-License-Identifier: Apache-2.0
"""One whole training step compared with the objective: is what the optimizer gets its gradient?

rows.py       the responses of a step, without tensors
goal.py       the objective with its KL term, bonuses and clip
reference.py  a model in float64, one row at a time
forward.py    the gradient that the step should have
record.py     the gradients that any torch trainer hands to its optimizer
weights.py    the weight of every token, read off a gradient
causes.py     the fault that makes these weights
forwards.py   what is fed otherwise, attended to otherwise, or left out of the configuration
scores.py     log-probabilities made of the right hidden states in a wrong way
diagnose.py   why a gradient differs
changed.py    clips and weight decay on the way to the optimizer
check.py      check_step, check_recorded
"""

from upref.step.check import StepReport, check_recorded, check_step
from upref.step.record import Recorded, Step, record_step
from upref.step.reference import Functions, TorchModel
from upref.step.rows import Row

__all__ = [
    "Functions",
    "Recorded",
    "Row",
    "Step",
    "StepReport",
    "TorchModel",
    "check_recorded",
    "check_step",
    "record_step",
]
