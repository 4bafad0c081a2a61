# SPDX-License-Identifier: Apache-2.0
"""CPU seconds of the processes that a benchmark starts."""

import resource


def of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
