# SPDX-License-Identifier: Apache-2.0
"""Two functions on all small batches: equal for every value, or a batch on which they
differ, or no proof.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from upref.proof.domain import Domain, Pattern, patterns
from upref.proof.paths import Counterexample, Limits, Outcome, Outputs, Path, Search
from upref.proof.sizes import Bound
from upref.proof.solver import Answer, ask, cpu_seconds
from upref.proof.values import Values
from upref.rollouts import Rollouts

Status = Literal["proved", "differs", "no proof"]
ROUNDING = 2e-6  # of a difference, relative: as a weight in float64 of `check`
NO_LIMITS = Limits()
TINY = 1e-9  # of the largest number of a batch


@dataclass
class Comparison:
    """What was found.

    Attributes:
        status: of the comparison.
        reason: why there is no proof.
        counterexample: where they differ.
        where: of a counterexample, its pattern.
        patterns: those that were proved.
        paths: how many paths there are, of all patterns.
        bounds: numbers with which the code compares sizes.
        per_response: whether a response has one advantage.
        bounds_mean: as of a Domain.
        reads: optional inputs that are variables.
        operators: those that computed.
        is_rounded: whether a part was computed in less than float64.
        ties_at_one: tokens of probability 1 are no part of the proof: `_is_tie`.
        seconds: of CPU time that it took.
    """

    status: Status
    reason: str = ""
    counterexample: Counterexample | None = None
    where: Pattern | None = None
    patterns: list[Pattern] = field(default_factory=list)
    paths: int = 0
    bounds: list[Bound] = field(default_factory=list)
    per_response: bool = False
    bounds_mean: bool = False
    reads: frozenset[str] = frozenset()
    operators: set[str] = field(default_factory=set)
    is_rounded: bool = False
    ties_at_one: bool = False
    seconds: float = 0.0

    @property
    def batches_in_words(self) -> str:
        """For which batches it is proved, in words."""
        rows, columns = (
            max(sizes) for sizes in zip(*(p.shape for p in self.patterns), strict=True)
        )
        return (
            f"{len(self.patterns)} batches of at most {rows} rows and {columns} columns"
        )


def sizes_up_to(
    rows: int, columns: int, with_groups: bool, with_reference: bool = False
) -> list[Pattern]:
    """Return the patterns of a proof, the smallest first.

    Sizes of 1 are proved for themselves: code may treat them apart.

    Args:
        rows, columns: the largest batch.
        with_groups: the ways to divide the rows into prompts, too.
        with_reference: equal policies beside another reference policy, too.
    """
    shapes = dict.fromkeys([(1, 1), (1, columns), (rows, 1), (rows, columns)])
    out = [
        pattern
        for shape in shapes
        for pattern in patterns(*shape, with_groups, with_reference)
    ]
    return sorted(out, key=lambda pattern: pattern.tokens)


def is_different(expected: Tensor, found: Tensor, batch: Rollouts) -> bool:
    """Tell whether two gradients differ by more than rounding, as `check` does: relative
    to the gradient, or to the advantage where that is larger.

    Args:
        expected, found: outputs.
        batch: the batch that they are of.
    """
    share = batch.adv.abs() / batch.mask.numel()
    return _exceeds(expected, found, share)


def is_different_anywhere(expected: Tensor, found: Tensor, batch: Rollouts) -> bool:
    """Tell whether two outputs differ by more than rounding, relative to themselves.

    Args:
        expected, found: outputs.
        batch: the batch that they are of.
    """
    return _exceeds(expected, found, torch.zeros(()))


def _exceeds(expected: Tensor, found: Tensor, least: Tensor) -> bool:
    """Tell whether a gap is above rounding, relative to the numbers and to these."""
    if not found.isfinite().all():
        return bool(expected.isfinite().all())
    size = torch.maximum(torch.maximum(expected.abs(), found.abs()), least)
    gap = (expected - found).abs()
    return bool((gap > ROUNDING * size + TINY * size.max()).any())


def compare(
    function: Outputs,
    reference: Outputs,
    among: Sequence[Pattern],
    per_response: bool,
    reads: Iterable[str],
    seconds: float,
    bounds_mean: bool = False,
    limits: Limits = NO_LIMITS,
    differs: Callable[[Tensor, Tensor, Rollouts], bool] = is_different,
    domain_of: type[Domain] = Domain,
) -> Comparison:
    """Compare two functions on each pattern, up to the first that is not proved.

    Args:
        function, reference: of a batch to numbers.
        among: the patterns, the smallest first.
        per_response: one advantage for each response.
        reads: optional inputs that are variables: logp_ref, logp_sampler, entropy.
        seconds: the limit of CPU time.
        bounds_mean: as of a Domain.
        limits: how much work it may be.
        differs: whether two outputs differ by more than rounding.
        domain_of: makes the variables of a pattern.

    Returns:
        The Comparison.
    """
    start = cpu_seconds()
    values = Values()
    out = Comparison(
        "proved",
        per_response=per_response,
        bounds_mean=bounds_mean,
        reads=frozenset(reads),
    )
    bounds: dict[Bound, None] = {}
    # a path of the first pattern that is proved: both functions run on it once more
    first: tuple[Search, Path] | None = None
    for chunk in _chunks(among):
        outcomes = []
        for pattern in chunk:
            domain = domain_of(values, pattern, per_response, out.reads, bounds_mean)
            search = Search(
                domain,
                function,
                reference,
                differs,
                start + seconds,
                limits,
                number=among.index(pattern),
            )
            outcome = search.explore()
            outcomes.append((search, outcome))
            for trace in outcome.traces:
                bounds |= trace.sizes.bounds
                out.operators |= trace.seen
                out.is_rounded |= trace.is_rounded
            if outcome.reason:
                break
        # the solver starts once for all patterns of a chunk
        _conclude(values, outcomes, start + seconds - cpu_seconds(), limits)
        for search, outcome in outcomes:
            is_proved = _add_outcome(out, search, outcome)
            if is_proved and first is None:
                first = (search, outcome.paths[0])
            if out.status != "proved":
                break
        if out.status != "proved":
            break
    if out.status == "proved" and first is not None:
        search, path = first
        if not search.is_repeated(path):
            out.status = "no proof"
            out.reason = (
                "it answers differently when it is called again: it keeps a state"
            )
    out.bounds = list(bounds)
    out.seconds = cpu_seconds() - start
    return out


def _add_outcome(out: Comparison, search: Search, outcome: Outcome) -> bool:
    """Add what was found on one pattern to a comparison; return whether the functions
    are proved equal on it. A tie where the policies are certain changes no status.
    """
    out.paths += len(outcome.paths)
    pattern = search.domain.pattern
    if pattern.certain and _is_tie(search.function, outcome.counterexample):
        out.ties_at_one = True
        return False
    if outcome.counterexample:
        out.status = "differs"
        out.counterexample = outcome.counterexample
        out.where = pattern
        return False
    if outcome.reason:
        out.status = "no proof"
        out.reason = outcome.reason
        return False
    out.patterns.append(pattern)
    return True


def _is_tie(function: Outputs, counterexample: Counterexample | None) -> bool:
    """Tell whether each token that differs has half of the reference's gradient because
    two arguments of a minimum or maximum are equal there: once one of the two gets
    the whole gradient, the token has that of the reference.

    A bound such as 1/π_old is met by every token of probability 1. The points beside it
    belong to other patterns.

    Args:
        function: of the user.
        counterexample: None where there is none.
    """
    if counterexample is None:
        return False
    expected = counterexample.expected

    def is_near(found: Tensor) -> Tensor:
        return (found - expected).abs() <= ROUNDING * expected.abs()

    is_equal = is_near(counterexample.found)
    is_half = is_near(2 * counterexample.found)
    if not (is_equal | is_half).all():
        return False
    scale = torch.tensor(counterexample.point["scale"], dtype=torch.float64)
    for to_first in (True, False):
        with _Ties(to_first):
            is_equal |= is_near(function(counterexample.batch, scale))
    return bool(is_equal.all())


class _Ties(TorchFunctionMode):
    """Gives the whole gradient of equal arguments of a minimum or maximum to one of them;
    torch gives each a part.

    Attributes:
        to_first: that one is the first, else the last.
    """

    def __init__(self, to_first: bool) -> None:
        super().__init__()
        self.to_first = to_first

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function; a minimum or maximum as a choice between its arguments."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        x, y = (*args, None, None)[:2]
        other = kwargs.get("other", y)
        dim = kwargs.get("dim", y)
        sign = -1 if name in ("min", "minimum", "amin") else 1
        if name in ("min", "max", "minimum", "maximum") and _are_tensors(x, other):
            above = sign * x - sign * other
            return torch.where(above >= 0 if self.to_first else above > 0, x, other)
        if name in ("amin", "amax") and _are_tensors(x) and isinstance(dim, int):
            ordered = x if self.to_first else x.flip(dim)
            keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            of_least = torch.min if sign < 0 else torch.max
            return of_least(ordered, dim, keepdim=keepdim).values
        return func(*args, **kwargs)


def _are_tensors(*values: Any) -> bool:
    """Tell whether all values are tensors."""
    return all(isinstance(x, Tensor) for x in values)


def _chunks(among: Sequence[Pattern]) -> list[Sequence[Pattern]]:
    """Return the smallest pattern by itself, then those of few tokens, then the rest: the
    solver is started once for each.
    """
    return [part for part in (among[:1], among[1:8], among[8:]) if part]


def _conclude(
    values: Values,
    outcomes: list[tuple[Search, Outcome]],
    seconds: float,
    limits: Limits,
) -> None:
    """Ask the solver the questions of all outcomes at once."""
    asked = [(s, o) for s, o in outcomes if not o.reason]
    questions = [q for _, o in asked for q in o.questions]
    if seconds <= 0:
        answers = [Answer("unknown")] * len(questions)
    else:
        answers = ask(values, questions, seconds, limits.solver)
    for search, outcome in asked:
        count = len(outcome.questions)
        search.conclude(outcome, answers[:count])
        answers = answers[count:]
