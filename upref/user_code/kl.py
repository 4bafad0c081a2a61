# SPDX-License-Identifier: Apache-2.0
"""Anybody's KL estimator as one frozen type: two log-probabilities in, one number per
token out.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code import names
from upref.user_code.function import (
    UserFunction,
    first_that_runs,
    load_function,
    refuse_needed,
)
from upref.user_code.signature import Reading, read as read_signature

# not exact in float32
PROBE = torch.tensor([[-1.1, -0.7, -2.3], [-0.2, -3.1, -1.9]], dtype=torch.float64)


@dataclass(frozen=True)
class TermOutcome:
    """What one call did. k: one number per token, in float64."""

    k: Tensor
    single: bool  # it answered in float32
    wrote: frozenset[str]  # arguments whose values it changed
    printed: bool


@dataclass(frozen=True)
class Term(UserFunction):
    """Call it on log-probabilities [B, T] in float64; `outcome` tells the rest. dtype:
    what it is given.
    """

    reading: Reading
    dtype: torch.dtype = torch.float64
    tol: float = 1e-5

    def __call__(self, lp: Tensor, ref: Tensor) -> Tensor:
        return self.outcome(lp, ref).k

    def outcome(self, lp: Tensor, ref: Tensor) -> TermOutcome:
        """Call the function once.

        Args:
            lp: log π_θ, [B, T].
            ref: log π_ref, [B, T].

        Returns:
            One number per token in float64, and what else the call did.

        Raises:
            InputError: the function raises, or returns something else.
        """
        arguments = {"logp": lp.to(self.dtype), "logp_ref": ref.to(self.dtype)}
        called = self.watched(
            lambda: self.reading.call(self.fn, arguments, {}),
            arguments,
            self.reading.passed(arguments, {}),
        )
        k = called.returned
        is_one_per_token = (
            isinstance(k, Tensor)
            and k.shape == lp.shape
            and k.is_floating_point()
            and not k.is_meta
        )
        if not is_one_per_token:
            if isinstance(k, Tensor) and k.shape != lp.shape:
                got = str(list(k.shape))
            else:
                got = type(k).__name__
            complaint = (
                f"{self.name} returns {got} for log-probabilities {list(lp.shape)}"
            )
            raise InputError(f"{complaint}: return one per token.")
        wrote = frozenset(names.CALLED[role] for role in called.wrote)
        return TermOutcome(k.double(), k.dtype == torch.float32, wrote, called.printed)


def read(fn: Any) -> Term:
    """Make a Term from a callable or its name, with the dtype and the tolerance at which
    it runs.

    Args:
        fn: a function of (log_prob, ref_log_prob), or its name.

    Raises:
        InputError: it takes other things, or runs in no dtype.
    """
    name, fn = load_function(fn, "a KL estimator")
    reading = read_signature(fn, name, _role_of_argument, ("logp", "logp_ref"))
    of_old_policy = [p for p, r in reading.roles.items() if r == "logp_old"]
    refuse_needed(name, [*reading.needed, *of_old_policy])
    return _with_dtype(Term(name, fn, reading))


def _role_of_argument(name: str) -> str:
    """Return the role of an argument of a KL estimator; "" for any other. The role of the
    old log-probabilities is known, so that they are never taken for the reference.
    """
    role = names.role(name)
    return role if role in ("logp", "logp_ref", "logp_old") else ""


def _with_dtype(term: Term) -> Term:
    """Return the term with the dtype that it takes, float64 before float32, and with the
    tolerance of the dtype in which it computes.
    """
    lp = PROBE
    ref = PROBE.roll(1)
    ways = [replace(term, dtype=dtype) for dtype in (torch.float64, torch.float32)]
    term, outcome = first_that_runs(ways, lambda way: way.outcome(lp, ref))
    # inputs rounded to float32 give the same answer where it rounds them itself
    rounds = torch.equal(outcome.k, term(lp.float().double(), ref.float().double()))
    return replace(term, tol=1e-3) if outcome.single or rounds else term
