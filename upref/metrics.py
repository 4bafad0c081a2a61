# SPDX-License-Identifier: Apache-2.0
"""What P problems with n sampled answers each say about a policy: Avg@k, Pass@1, Maj@k, Best@k, all fractions in [0, 1].

    c = number of correct answers among the n of a problem;    a metric is the mean over problems of one number per problem

Every function returns an `Estimate` whose 95 % interval is over *problems*: how far the value might lie from that of
another draw of P such problems (and of their samples). Two policies on the same problems are compared pairwise, problem
by problem, and not by looking whether two such intervals overlap. InputError on anything but a bool table [P, n].
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb, sqrt

import numpy as np

_Z = 1.959963984540054  # Φ(_Z) = 0.975


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % interval, fractions in [0, 1] with low <= value <= high."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, per_problem) -> "Estimate":
        """Mean m of P numbers x in [0, 1], and Wilson's interval at an effective number of problems N:

            (m + z²/2N ± z √(m(1-m)/N + z²/4N²)) / (1 + z²/N)        N = P · max(1, m(1-m) / s²),  s² = Σ(x-m)²/(P-1)

        m(1-m) is the largest variance that a mean of m allows, reached by answers that are right or wrong: then N = P
        and this is Wilson's interval. Averaging over n samples spreads less and counts as more problems. Where s² says
        nothing (one problem, or all alike) N = P. Of a handful of problems s² is itself uncertain: read with care.
        """
        x = np.asarray(per_problem, dtype=np.float64)
        P, m = len(x), x.mean()
        s2 = x.var(ddof=1) if P > 1 else 0.0
        N = P * max(1.0, m * (1 - m) / s2) if np.ptp(x) > 0 else P
        middle, half = m + _Z**2 / (2 * N), _Z * sqrt(m * (1 - m) / N + _Z**2 / (4 * N**2))
        low, high = (middle - half) / (1 + _Z**2 / N), (middle + half) / (1 + _Z**2 / N)
        return cls(float(m), float(max(0.0, min(low, m))), float(min(1.0, max(high, m))))
