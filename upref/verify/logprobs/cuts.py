# SPDX-License-Identifier: Apache-2.0
"""A log-probability function of a sampler that cuts the distribution (`upref.nucleus`):
its problems, its known faults, and its oracles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from upref import nucleus
from upref.errors import InputError
from upref.user_code.logprobs import Kernel, KernelOutcome, Problem
from upref.verify.faults import Fault, first_fitting
from upref.verify.faults.logprobs import states
from upref.verify.finding import NO_CAUSE, Cause, Example, Number, number_pair
from upref.verify.oracle import Oracle, oracle, untouched
from upref.verify.report import Finding, fail, note

TOL = 1e-4  # of every number: float32 passes, and each known fault is far larger
MARGIN = 2e-4  # of a logit and of a mass, to the edge of a cut
VOCABULARIES = (9, 23, 40)
HIDDEN = 6
TOKENS = (2, 4)
TEMPERATURES = (1.0, 0.6, 1.7)
# where the function takes the number as an argument
TOP_PS = (0.9, 0.7, 0.4)
TOP_KS = (4, 7, 2)
MOST_DRAWS = 200
MOST_NUMBERS = 40  # of a problem that is printed

# the order of the two cuts -> its name in reports
JOINT = (
    "top_k and top_p both cut the whole distribution (joint), as in SGLang; in vLLM, "
    "transformers and NeMo-RL top_p cuts what top_k leaves"
)


@dataclass(frozen=True)
class Nucleus:
    """How log-probabilities are cut: what a fault replaces.

    Args:
        keep: (z, problem) -> the tokens that are kept, [.., V].
        normalized: (z, keep, problem) -> log π of every token, [.., V].
        entropy_of: the same, of which the entropy is taken; None: of `normalized`.
        gradient_of: the same, whose gradient the log-probabilities have; None: their own.
    """

    keep: Callable[[Tensor, Problem], Tensor]
    normalized: Callable[[Tensor, Tensor, Problem], Tensor]
    entropy_of: Callable[[Tensor, Tensor, Problem], Tensor] | None = None
    gradient_of: Callable[[Tensor, Tensor, Problem], Tensor] | None = None


def cut_first(z: Tensor, problem: Problem) -> Tensor:
    """Return the tokens that top-p leaves of what top-k leaves."""
    return nucleus.kept(
        z.detach(),
        temperature=problem.temperature,
        top_k=problem.top_k,
        top_p=problem.top_p or 1.0,
    )


def cut_jointly(z: Tensor, problem: Problem) -> Tensor:
    """Return the tokens that both cuts of the whole distribution leave."""
    return nucleus.kept_jointly(
        z.detach(),
        temperature=problem.temperature,
        top_k=problem.top_k,
        top_p=problem.top_p or 1.0,
    )


def over_kept(z: Tensor, keep: Tensor, problem: Problem) -> Tensor:
    """Return log π, normalized over the tokens that are kept."""
    return (z / problem.temperature).masked_fill(~keep, -torch.inf).log_softmax(-1)


def over_all(z: Tensor, keep: Tensor, problem: Problem) -> Tensor:
    """Return log π over the whole vocabulary."""
    return (z / problem.temperature).log_softmax(-1)


TOP_K_FIRST = Nucleus(cut_first, over_kept)
JOINTLY = Nucleus(cut_jointly, over_kept)


def solved(problem: Problem, how: Nucleus) -> KernelOutcome:
    """Compute outputs and gradients in float64 by autograd.

    Args:
        problem: the inputs.
        how: the cut and the normalization.
    """
    problem = problem.to(torch.float64)
    leaves = {k: v.detach().requires_grad_() for k, v in problem.leaves.items()}
    inner = replace(problem, x=next(iter(leaves.values())), weight=leaves.get("weight"))
    z = states(inner)
    keep = how.keep(z, inner)
    log_p = how.normalized(z, keep, inner)
    index = problem.tokens[..., None]
    lp = log_p.gather(-1, index)[..., 0]
    if how.gradient_of is not None:
        other = how.gradient_of(z, keep, inner).gather(-1, index)[..., 0]
        lp = lp.detach() + other - other.detach()
    log_q = (how.entropy_of or how.normalized)(z, keep, inner)
    H = -(log_q.exp() * log_q.masked_fill(log_q.isneginf(), 0)).sum(-1)
    outputs = {"log-prob": lp, "entropy": H}
    numbers = {name: output.detach() for name, output in outputs.items()}
    upstream = {"log-prob": problem.g, "entropy": problem.g_H}
    total = torch.zeros((), dtype=torch.float64)
    for name, g in upstream.items():
        if g is not None:
            total = total + (outputs[name] * g).sum()
    if total.requires_grad:
        gradients = torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            numbers[f"gradient of {name}"] = (
                torch.zeros_like(leaf) if gradient is None else gradient
            )
    return KernelOutcome(numbers)


# ---- known faults --------------------------------------------------------------------
def _without_top_p(z: Tensor, problem: Problem) -> Tensor:
    """Return the tokens that top-k leaves."""
    return cut_first(z, replace(problem, top_p=None))


def _without_top_k(z: Tensor, problem: Problem) -> Tensor:
    """Return the tokens that top-p leaves."""
    return cut_first(z, replace(problem, top_k=None))


def _one_more_or_less(change: int) -> Callable[[Tensor, Problem], Tensor]:
    """Return the cut whose k is another one."""

    def keep(z: Tensor, problem: Problem) -> Tensor:
        """Return the tokens that this k leaves."""
        k = problem.top_k
        other = None if k is None else max(1, k + change)
        return cut_first(z, replace(problem, top_k=other))

    return keep


def _by_mass(at_least_one: bool, include_next: bool) -> Callable[..., Tensor]:
    """Return a cut by mass other than the right one, after top-k. It keeps the likeliest
    tokens while their mass is at most top_p, which leaves out the token that crosses it.

    Args:
        at_least_one: whether it keeps the likeliest token in any case.
        include_next: whether it keeps the crossing token and the one behind it instead.
    """

    def keep(z: Tensor, problem: Problem) -> Tensor:
        """Return the tokens that this cut leaves."""
        in_k = cut_first(z, replace(problem, top_p=None))
        scaled = (z / problem.temperature).masked_fill(~in_k, -torch.inf)
        p, order = scaled.softmax(-1).sort(-1, descending=True)
        mass = p.cumsum(-1)
        top_p = problem.top_p or 1.0
        is_kept = mass <= top_p
        if include_next:
            # the mass in front of the token that is in front of this one
            mass_before = mass - p - p.roll(1, -1)
            is_kept = mass_before < top_p
            is_kept[..., :2] = True
        if at_least_one:
            is_kept[..., 0] = True
        return torch.zeros_like(is_kept).scatter(-1, order, is_kept) & in_k

    return keep


def _in_another_temperature(z: Tensor, problem: Problem) -> Tensor:
    """Return the tokens that the cuts leave at temperature 1."""
    return cut_first(z, replace(problem, temperature=1.0))


def _without_temperature(z: Tensor, keep: Tensor, problem: Problem) -> Tensor:
    """Return log π at temperature 1, over the tokens that are kept."""
    return over_kept(z, keep, replace(problem, temperature=1.0))


# the first that gives all numbers is named
FAULTS: tuple[Fault[Nucleus], ...] = (
    Fault(
        "log-probabilities are normalized over the whole vocabulary, not over the tokens that are kept",
        replace(TOP_K_FIRST, normalized=over_all, entropy_of=over_kept),
        id="nucleus-not-renormalized",
    ),
    Fault(
        "nothing is cut: log-probabilities are those of the whole distribution",
        replace(TOP_K_FIRST, normalized=over_all),
        id="nucleus-missing",
    ),
    Fault(
        "the cut is made before the temperature: which tokens are kept is decided at temperature 1",
        replace(TOP_K_FIRST, keep=_in_another_temperature),
        id="nucleus-before-temperature",
    ),
    Fault(
        "the temperature is left out",
        Nucleus(_in_another_temperature, _without_temperature),
        id="temperature-missing",
    ),
    Fault(
        "the token that crosses top_p is left out",
        replace(TOP_K_FIRST, keep=_by_mass(at_least_one=True, include_next=False)),
        id="nucleus-without-crossing-token",
    ),
    Fault(
        "one token behind the one that crosses top_p is kept",
        replace(TOP_K_FIRST, keep=_by_mass(at_least_one=False, include_next=True)),
        id="nucleus-one-token-more",
    ),
    Fault(
        "top_p is left out",
        replace(TOP_K_FIRST, keep=_without_top_p),
        id="top-p-missing",
    ),
    Fault(
        "top_k is left out",
        replace(TOP_K_FIRST, keep=_without_top_k),
        id="top-k-missing",
    ),
    Fault(
        "top_k keeps one token more",
        replace(TOP_K_FIRST, keep=_one_more_or_less(1)),
        id="top-k-one-more",
    ),
    Fault(
        "top_k keeps one token less",
        replace(TOP_K_FIRST, keep=_one_more_or_less(-1)),
        id="top-k-one-less",
    ),
    Fault(
        "the entropy is that of the whole distribution",
        replace(TOP_K_FIRST, entropy_of=over_all),
        id="entropy-of-whole-distribution",
    ),
    Fault(
        "the gradient of the log-probabilities is that of the whole distribution",
        replace(TOP_K_FIRST, gradient_of=over_all),
        id="gradient-of-whole-distribution",
    ),
)


# ---- problems ------------------------------------------------------------------------
def _margin(problem: Problem) -> float:
    """Return how far the cuts of a problem are from another result: the least distance
    of a mass to p, at any temperature and in either order, and of two logits.
    """
    z = states(problem)
    least = float("inf")
    for temperature in {1.0, problem.temperature}:
        scaled = z / temperature
        if problem.top_k is not None:
            # the edge of top-k, and those of one token more or less
            edges = slice(max(problem.top_k - 2, 0), problem.top_k + 2)
            sorted_logits = scaled.sort(-1, descending=True).values[..., edges]
            least = min(least, float(-sorted_logits.diff(dim=-1).max()))
        in_k = cut_first(z, replace(problem, top_p=None, temperature=temperature))
        for cut in (scaled, scaled.masked_fill(~in_k, -torch.inf)):
            mass = cut.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
            if problem.top_p is not None and problem.top_p < 1:
                least = min(least, float((mass - problem.top_p).abs().min()))
    return least


def make_problem(
    kernel: Kernel,
    V: int,
    seed: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Problem:
    """Make a problem whose tokens are kept, and whose cuts are clear: no token is beside
    the edge.

    Args:
        kernel: the function, whose kind of inputs is made.
        V: ids of the vocabulary.
        seed: of all numbers.
        temperature: of the sampler.
        top_k, top_p: the cuts; None: there is none.

    Raises:
        InputError: no clear problem was found.
    """
    for draw in range(MOST_DRAWS):
        gen = torch.Generator().manual_seed(1000 * seed + draw)

        def normal(*size: int, gen: torch.Generator = gen) -> Tensor:
            """Return normal numbers."""
            return torch.randn(*size, generator=gen, dtype=torch.float64)

        x, W = normal(*TOKENS, HIDDEN), normal(V, HIDDEN)
        bias = normal(V) if "bias" in kernel.settings else None
        problem = Problem(
            x if kernel.kind == "hidden" else 2 * normal(*TOKENS, V),
            W if kernel.kind == "hidden" else None,
            torch.zeros(TOKENS, dtype=torch.long),
            normal(*TOKENS),
            normal(*TOKENS) if kernel.has_entropy else None,
            temperature,
            bias if kernel.kind == "hidden" else None,
            top_k=top_k,
            top_p=top_p,
        )
        if _margin(problem) > MARGIN:
            both = cut_first(states(problem), problem)
            both = both & cut_jointly(states(problem), problem)
            chance = torch.rand(both.shape, generator=gen) * both
            return replace(problem, tokens=chance.argmax(-1))
    raise InputError(
        f"no clear problem was found for top_k={top_k}, top_p={top_p}: try other numbers."
    )


class Worst(NamedTuple):
    """The number that differs most.

    Attributes:
        error: of it, in tolerances.
        name: of the numbers that it is one of.
        place: of it among them.
        expected, found: the number.
    """

    error: float
    name: str
    place: tuple[int, ...]
    expected: float
    found: float


@dataclass
class NucleusCase:
    """A function, the cut that it should have, and what was found so far."""

    kernel: Kernel
    top_k: int | None
    top_p: float | None
    how: Nucleus = TOP_K_FIRST
    failed: set[str] = field(default_factory=set)
    done: list[tuple[str, Problem, KernelOutcome]] = field(default_factory=list)

    def settings(self) -> Iterator[tuple[float, int | None, float | None]]:
        """Yield (temperature, top_k, top_p) of each problem: numbers that the function
        takes as arguments are varied.
        """
        takes_temperature = "temperature" in self.kernel.settings
        tried = TEMPERATURES if takes_temperature else TEMPERATURES[:1]
        for n, temperature in enumerate(tried):
            top_k, top_p = self.top_k, self.top_p
            yield temperature, top_k, top_p
            if top_k is not None and "top_k" in self.kernel.settings:
                top_k = TOP_KS[n]
            if top_p is not None and "top_p" in self.kernel.settings:
                top_p = TOP_PS[n]
            yield temperature, top_k, top_p

    def solve(self) -> list[tuple[str, Problem, KernelOutcome]]:
        """Return (words, problem, what the function makes of it), each solved once."""
        if self.done:
            return self.done
        seed = 0
        for temperature, top_k, top_p in dict.fromkeys(self.settings()):
            for size in VOCABULARIES:
                # above top_k, so that something is cut
                V = size if top_k is None or size > top_k else top_k + size
                seed += 1
                problem = make_problem(
                    self.kernel,
                    V,
                    seed,
                    temperature=temperature,
                    top_k=top_k,
                    top_p=top_p,
                )
                words = f"{V} ids, temperature {temperature:g}"
                words += "" if top_k is None else f", top_k {top_k}"
                words += "" if top_p is None else f", top_p {top_p:g}"
                self.done.append((words, problem, self.kernel(problem)))
        return self.done

    def fits(self, how: Nucleus) -> bool:
        """Tell whether a cut gives the numbers of all problems.

        Args:
            how: the cut.
        """
        return all(
            self.worst(problem, outcome, how).error <= 1
            for _, problem, outcome in self.solve()
        )

    def worst(self, problem: Problem, outcome: KernelOutcome, how: Nucleus) -> Worst:
        """Return the number that differs most; its error is 0 where all are equal.

        Args:
            problem: the inputs.
            outcome: what the function makes of them.
            how: the cut.
        """
        right = solved(problem, how).numbers
        worst = Worst(0.0, "", (), 0.0, 0.0)
        for name, found in outcome.numbers.items():
            expected = right[name]
            size = max(1.0, float(expected.nan_to_num(0, 0, 0).abs().max()))
            errors = torch.where(found == expected, 0, (found - expected).abs())
            errors = errors.nan_to_num(nan=torch.inf) / size
            error = float(errors.max()) / TOL
            if error > worst.error:
                index = tuple(
                    int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)
                )
                worst = Worst(
                    error, name, index, float(expected[index]), float(found[index])
                )
        return worst

    def cause(self) -> Cause:
        """Return the cause of the first known fault that gives all numbers of all
        problems; no cause without one.
        """
        found = first_fitting(FAULTS, lambda known: self.fits(known.change))
        return NO_CAUSE if found is None else found.cause


# ---- oracles -------------------------------------------------------------------------
@oracle("nucleus", 10)
def values_and_gradients(case: NucleusCase) -> Iterator[Finding]:
    """Compare log-probabilities, entropies and gradients on tokens that are kept. Yield a
    failure on the first problem that differs.
    """
    for words, problem, outcome in case.solve():
        worst = case.worst(problem, outcome, case.how)
        if worst.error <= 1:
            continue
        unit = f"{worst.name}{list(worst.place)}"
        numbers = number_pair(unit, worst.expected, worst.found)
        yield fail("nucleus", words, *numbers, _shown(problem), case.cause())
        return


@oracle("mutation", 20)
def mutation(case: NucleusCase) -> Iterator[Finding]:
    """Report inputs that are changed, and what is printed, on the first problem with
    either.
    """
    for _, _, outcome in case.solve():
        if outcome.wrote or outcome.printed:
            yield from untouched(outcome)
            return


def _wrong(case: NucleusCase) -> str:
    """Return why oracles of unusual problems are not run; "" where they are."""
    return "wrong on plain problems already" if "nucleus" in case.failed else ""


@oracle("outside", 30, _wrong)
def outside(case: NucleusCase) -> Iterator[Finding]:
    """Note a token that the cut leaves out and that does not get the log-probability -inf.
    NaN is a failure.
    """
    _, problem, _ = case.solve()[0]
    keep = case.how.keep(states(problem), problem)
    left_out = torch.where(keep.all(-1), problem.tokens, keep.int().argmin(-1))
    if bool(keep.all()):
        return
    outcome = case.kernel(replace(problem, tokens=left_out, g=None, g_H=None))
    lp = outcome.numbers["log-prob"][~keep.all(-1)]
    if lp.isneginf().all():
        return
    if lp.isnan().any():
        yield fail("outside", "a token that the cut leaves out", "log-prob -inf", "NaN")
        return
    yield note(
        "outside",
        "a token that the cut leaves out does not get -inf",
        Number(float("-inf"), "log-prob"),
        Number(float(lp[~lp.isneginf()][0]), "log-prob"),
        "an engine that cuts elsewhere by rounding may sample such a token",
    )


@oracle("ties", 40, _wrong)
def ties(case: NucleusCase) -> Iterator[Finding]:
    """Note a function of logits that keeps one of two equal logits at the edge of top-k,
    or whose numbers are not those of keeping both. Nothing is compared without a top-k,
    or with a top-p that is built in.
    """
    if case.top_k is None or case.kernel.kind == "hidden":
        return
    _, problem, _ = case.solve()[0]
    k = problem.top_k
    assert k is not None
    V = problem.x.shape[-1]
    z = torch.arange(V, 0, -1.0, dtype=torch.float64).repeat(*TOKENS, 1)
    z[..., k] = z[..., k - 1]
    tied = replace(
        problem,
        x=z,
        tokens=torch.zeros(TOKENS, dtype=torch.long),
        g=None,
        g_H=None,
        top_p=None if problem.top_p is None else 1.0,
    )
    if "top_p" not in case.kernel.settings and problem.top_p is not None:
        return
    outcome = case.kernel(tied)
    if case.worst(tied, outcome, case.how).error <= 1:
        return
    words = "with two equal logits at the edge of top_k its numbers are not those of keeping both"
    for column in (k - 1, k):
        one_of_both = replace(case.how, keep=_less(case.how.keep, column))
        if case.worst(tied, outcome, one_of_both).error <= 1:
            words = "of two equal logits at the edge of top_k one is kept"
    yield note("ties", words, cause="vLLM, transformers and NeMo-RL keep both")


def _less(keep: Callable[..., Tensor], column: int) -> Callable[..., Tensor]:
    """Return a cut that leaves out the token of this id too."""

    def keep_less(z: Tensor, problem: Problem) -> Tensor:
        """Return the tokens that it leaves."""
        return keep(z, problem) & (torch.arange(z.shape[-1]) != column)

    return keep_less


def _shown(problem: Problem) -> Example | None:
    """Return the problem as an example; None where it is too large to read."""
    if sum(leaf.numel() for leaf in problem.leaves.values()) > MOST_NUMBERS:
        return None
    inputs = {name: leaf.tolist() for name, leaf in problem.leaves.items()}
    return Example(inputs | {"tokens": problem.tokens.tolist()})


ORACLES: tuple[Oracle, ...] = (values_and_gradients, mutation, outside, ties)


def choose_order(case: NucleusCase) -> list[Finding]:
    """Set the order of the two cuts that the function has, where it has one of the two
    usual ones; top-k first where it has neither.

    Args:
        case: it is changed.

    Returns:
        A note where both cuts act on the whole distribution.
    """
    if case.top_k is None or case.top_p is None:
        return []
    if not case.fits(TOP_K_FIRST) and case.fits(JOINTLY):
        case.how = JOINTLY
        return [note("nucleus", JOINT)]
    return []
