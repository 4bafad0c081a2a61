# SPDX-License-Identifier: Apache-2.0
"""Functions on which upref has a verdict to give, right and wrong, as one record;
`table.ALL` has every row.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import upref
from upref import transforms

# noted: accepted, and the report says so
ACCEPTED, NOTED, REJECTED, REFUSED = "accepted", "noted", "rejected", "refused"
# of a box, which `identify` is given
NAMED, UNKNOWN, ENDS = "named", "unknown", "named up to an input"
ORACLES = (
    "gradient", "value", "aggregation", "micro-batches", "data-parallel", "padding", "masked-values", "on-policy",
    "stop-gradient", "extremes", "dead-hyperparameter", "scaling", "permutation", "determinism", "mutation",
    "zero-advantage", "unusual-inputs", "one-response", "loss-scale", "layout",
    "every-value",
)  # fmt: skip


def objective(name):
    """Return the objective of that name, or of a name such as `tis(dapo)`, to which the
    transform is applied.
    """
    made, _, base = name.rstrip(")").rpartition("(")
    return getattr(transforms, made)(upref.get(base)) if made else upref.get(base)


JUDGES = {
    "loss": lambda fn, on, **hp: upref.check(fn, objective(on), **hp),
    "advantages": upref.check_advantages,
    "kl": upref.check_kl,
    "logprobs": lambda fn, on, **hp: upref.check_logprobs(fn, **hp),
    "box": lambda fn, on, **hp: upref.identify(fn),
}


@dataclass(frozen=True)
class Case:
    """A function with the verdict that upref must have on it."""

    function: Callable
    # what its author believes it to be; an estimator; of a box, every name that is
    # right
    objective: str = ""
    hp: dict[str, Any] = field(default_factory=dict)  # of a box: those to be found
    oracles: Set[str] = frozenset()  # one of these at least must fire
    why: str = ""  # what its author did
    # a NaN in a masked slot reaches its gradient: a note, or no note; None: either
    leaks: bool | None = None
    # project#thread where it was made, mended or asked about in public; "": only likely
    source: str = ""
    kind: str = "loss"  # of JUDGES
    verdict: str = ""
    says: str = ""  # words of a cause; after a "-", words of none
    regime: str = ""  # words of where it differs
    # words of the whole report; of a box that is named up to an input, of that input
    text: str = ""
    # hyperparameters of a box
    within: dict[str, float] = field(default_factory=lambda: {"rel": 1e-3})
    words: str = ""  # of a habit: what people do
    file: str = ""
    name: str = ""
    xfail: str = ""  # the reason
    nightly: bool = False

    def __post_init__(self):
        """Fill in what was left out: the file is the function's module, the name the
        function's, the verdict "rejected" if oracles are named, else "accepted".

        Raises:
            AssertionError: an oracle of a loss that there is not.
        """
        put = partial(object.__setattr__, self)
        put("file", self.file or self.function.__module__.rpartition(".")[2])
        put("name", self.name or self.function.__name__)
        put("verdict", self.verdict or (REJECTED if self.oracles else ACCEPTED))
        assert self.kind != "loss" or self.oracles <= set(ORACLES), self.oracles - set(
            ORACLES
        )

    def judged(self):
        """Run the check of its kind, and return the report (an identity for a box). It
        raises InputError where the check refuses.
        """
        return JUDGES[self.kind](self.function, self.objective, **self.hp)

    def __str__(self):
        return f"{self.file}.{self.name}"
