# SPDX-License-Identifier: Apache-2.0
"""Anybody's KL estimator as one frozen type: two log-probabilities in, one number per
token out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.errors import InputError
from upref.user_code import names
from upref.user_code.guard import call_guarded
from upref.user_code.load import load, name_of
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
class Term:
    """Call it on log-probabilities [B, T] in float64; `outcome` tells the rest. dtype:
    what it is given.
    """

    name: str
    fn: Callable[..., Any]
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
        before = {role: x.detach().clone() for role, x in arguments.items()}
        k, printed = call_guarded(
            self.name,
            lambda: self.reading.call(self.fn, arguments, {}),
            passed=self.reading.passed(arguments, {}),
        )
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
        wrote = frozenset(
            names.CALLED[role]
            for role, x in before.items()
            if not torch.equal(x, arguments[role])
        )
        return TermOutcome(k.double(), k.dtype == torch.float32, wrote, printed)


def read(fn: Any) -> Term:
    """A Term from a callable or its name; InputError where it takes other things.

    Args:
        fn: a function of (log_prob, ref_log_prob), or its name.
    """
    name = name_of(fn)
    fn = load(fn) if isinstance(fn, str) else fn
    if not callable(fn) or isinstance(fn, type):
        raise InputError(
            f"a {type(fn).__name__} is not a KL estimator: pass a function or its name."
        )
    reading = read_signature(fn, name, _role_of_argument, ("logp", "logp_ref"))
    if unread := [
        *reading.needed,
        *(p for p, r in reading.roles.items() if r == "logp_old"),
    ]:
        raise InputError(
            f"{name} needs {unread[0]!r}, which upref cannot give: bind it with functools.partial."
        )
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
    try:
        outcome = term.outcome(lp, ref)
    except InputError as first:
        term = replace(term, dtype=torch.float32)
        try:
            outcome = term.outcome(lp, ref)
        except InputError:
            raise first from None
    # inputs rounded to float32 give the same answer where it rounds them itself
    rounds = torch.equal(outcome.k, term(lp.float().double(), ref.float().double()))
    return replace(term, tol=1e-3) if outcome.single or rounds else term
