# SPDX-License-Identifier: Apache-2.0
"""dJ/dlp of every registered objective: the derivative of the function that trains is the weight written by hand.

Claim. In every regime (sign of A, r between the breakpoints) their difference simplifies to 0. An objective whose clip
depends on the whole batch or on a bisection, which sympy cannot read, is held to its weight by autograd. Bounds that
move with mu = π_old(o_t) are ordered at two values of it.
"""

from upref import get, names
from upref.derivation import derive


def main(which=None):
    """Print the derivation of each objective, all that are registered unless some are
    given; raise AssertionError at the first whose weight is another.
    """
    for o in which or map(get, names()):
        ok = True
        for mu in (0.25, 0.5) if o.reads_mu else (0.25,):
            d = derive(o, mu=mu)
            print(d if mu == 0.25 else f"also at mu = {mu}: {d.steps[-1]}")
            ok = ok and d.ok
        print()
        assert ok, o.name


if __name__ == "__main__":
    main()
