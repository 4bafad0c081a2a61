# SPDX-License-Identifier: Apache-2.0
"""One whole training step compared with the objective: is what the optimizer gets its
gradient?

Three rooms, and each imports only from those before it: `inputs` (the rows and the
model), `compare` (the two gradients) and `explain` (the cause). Above them are the
verdicts: check.py, dump.py and identify.py.
"""

from upref.step.check import StepReport, check_recorded, check_step
from upref.step.compare.record import Recorded, Step, record_step
from upref.step.dump import check_dump, dump_step
from upref.step.identify import StepIdentification, identify_step
from upref.step.inputs.reference import Functions, TorchModel
from upref.step.inputs.rows import Row

__all__ = [
    "Functions",
    "Recorded",
    "Row",
    "Step",
    "StepIdentification",
    "StepReport",
    "TorchModel",
    "check_dump",
    "check_recorded",
    "check_step",
    "dump_step",
    "identify_step",
    "record_step",
]
