# SPDX-License-Identifier: Apache-2.0
"""What the scalars that a run logged say about each other.

    run = upref.logs.read("metrics.csv")[0]
    upref.logs.audit(run)            # what cannot all be true, and what follows

No tensor of the run is needed: a mean lies between the smallest and the largest number, a
KL is at least 0, exp of a mean is at most the mean of exp.
"""

from upref.logs.audit import LogReport, audit
from upref.logs.read import Run, read

__all__ = ["LogReport", "Run", "audit", "read"]
