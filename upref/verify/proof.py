# SPDX-License-Identifier: Apache-2.0
"""`upref.prove`: is this loss the objective for every value? A proof, the input at which it
differs, or why there is neither.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from upref import catalog, kl
from upref.errors import InputError
from upref.proof import every_size
from upref.proof.compare import (
    Comparison,
    compare,
    is_different_anywhere,
    sizes_up_to,
)
from upref.proof.domain import (
    LEAST_LOG_PROB,
    MOST_LOG_RATIO,
    MOST_MEAN_LOG_RATIO,
    Pattern,
    TermDomain,
)
from upref.proof.paths import Counterexample, Limits, Outputs
from upref.proof.solver import require_z3
from upref.proof.state import (
    FAR,
    MORE,
    MOST,
    Kept,
    changed as changed_state,
    in_words,
    kept,
    moved,
)
from upref.proof.subjects import gradient_of, term_of
from upref.registry import Objective, get
from upref.result import Result
from upref.rollouts import Rollouts
from upref.user_code import Loss, no_objective, read
from upref.user_code.guard import state_restored
from upref.user_code.kl import Term, read as read_term
from upref.verify.finding import Example
from upref.verify.render import describe_example
from upref.verify.report import counted, describe_unbound, short

ROUNDED = (
    "a part of it, or of what it returns beside the loss, is computed in less than float64: "
    "the proof leaves that rounding out"
)
TIES_AT_ONE = (
    "tokens to which a policy gives the probability 1 are left out: there two arguments of a "
    "minimum or maximum are equal, and each gets half of the gradient"
)
NOT_PART = (
    *("ties of compared values", "what it reads beside its inputs"),
    *("rounding", "overflow", "side effects", "other dtypes", "micro-batches", "ranks"),
)
NOT_ALL = (
    f"it reaches more than {MOST:,} objects: what the others keep from call to call is "
    "not looked at"
)
# units of what is compared
GRADIENT, ADVANTAGE = "dJ/dlp", "A"
VALUE_OF_TERM, SLOPE_OF_TERM = "value", "gradient"
SECONDS = 60.0
FARTHEST = 1e300  # by which a state is moved
ONE_PER_RESPONSE = ("A_i", "A_it = A_i")
OTHER_ADVANTAGES = "masked slots with another advantage than their response"


@dataclass(frozen=True)
class Proof(Result):
    """The verdict of `prove`. Truth value: it is proved.

    Attributes:
        name: of the function.
        reference: what it is compared with, in words.
        unit: of the numbers that are compared.
        of_rewards: for which rewards and prompts an advantage estimator is proved.
        status: proved, differs, or "no proof".
        reason: why there is no proof.
        shapes: [rows, columns] of the batches.
        batches: how many masks and groupings of these there are.
        paths: how many ways through the code.
        per_response: whether a response has one advantage.
        bounds_mean: whether the mean of log r over a response has a bound of its own.
        reads: optional inputs that were variables.
        bounds: numbers with which the code compares sizes, and their lines.
        every_size: it is proved for every number of rows and columns.
        sizes_open: why it is not.
        with_prompts: the rows of some batches are of several prompts.
        place: where it differs, in words.
        numbers: of the counterexample, by their symbols.
        expected, found: the numbers there, of this unit.
        example: the counterexample.
        read_as: which argument was taken for what.
        remarks: what else the reader should know, a sentence each.
        left_out: what of this loss is not part of the proof, in words.
        seconds: of CPU time that it took.
    """

    name: str
    reference: str
    status: str
    reason: str = ""
    shapes: tuple[tuple[int, int], ...] = ()
    batches: int = 0
    paths: int = 0
    per_response: bool = False
    bounds_mean: bool = False
    reads: tuple[str, ...] = ()
    bounds: tuple[tuple[int, str], ...] = ()
    every_size: bool = False
    sizes_open: str = ""
    with_prompts: bool = False
    place: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    expected: float | None = None
    found: float | None = None
    example: Example | None = None
    read_as: str = ""
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    unit: str = GRADIENT
    of_rewards: str = ""
    seconds: float = field(default=0.0, compare=False)

    def __bool__(self) -> bool:
        return self.status == "proved"

    @property
    def domain(self) -> str:
        """For which inputs the proof holds, in words."""
        if self.unit == ADVANTAGE:
            return self.of_rewards
        if self.unit in (VALUE_OF_TERM, SLOPE_OF_TERM):
            return (
                "values and gradients, for every log-probability and reference of a token, "
                f"|log π_ref - log π_θ| <= {MOST_LOG_RATIO:g}, log π_θ >= {LEAST_LOG_PROB:g}"
            )
        of_A = (
            "advantage of a response" if self.per_response else "advantage of a token"
        )
        others = {
            "logp_ref": "reference",
            "logp_sampler": "sampler",
            "entropy": "entropy",
        }
        more = "".join(f", {others[name]}" for name in self.reads)
        ratios = {"logp_ref": "π_ref/π_θ", "logp_sampler": "π_old/μ"}
        bounds = [
            *(f"|log {ratios[name]}|" for name in self.reads if name in ratios),
            "|log r|",
        ]
        within = "".join(f", {x} <= {MOST_LOG_RATIO:g}" for x in bounds)
        if self.bounds_mean:
            within += f" (the mean of a response: {MOST_MEAN_LOG_RATIO:g})"
        return (
            f"for every log-probability{more} and {of_A}{within}, "
            f"log π_old >= {LEAST_LOG_PROB:g}"
        )

    def data(self) -> dict[str, Any]:
        """Return the fields of the proof, `ok` and `domain`.

        Returns:
            Their values by name.
        """
        bounds = [{"number": n, "line": line} for n, line in self.bounds]
        more = {"ok": bool(self), "domain": self.domain, "bounds": bounds}
        return asdict(self) | more

    def text(self, verbose: bool = False) -> str:
        """Return the verdict in words, as the command prints it.

        Args:
            verbose: also how the arguments were read.

        Returns:
            Lines, without a line break at the end.
        """
        if self.status == "no proof":
            lines = [
                f"no proof: {self.reason}   {short(self.name)} as {self.reference}"
            ]
        elif self.status == "differs":
            lines = [f"NOT {self.reference}   {short(self.name)}", *self._difference()]
        else:
            lines = [f"{short(self.name)} is {self.reference}: PROVED", *self._extent()]
        lines += [f"  {remark}" for remark in self.remarks]
        if self.status != "no proof":
            lines += [f"  not part of the proof: {self._not_part()}"]
        if self.read_as and verbose:
            lines.append(f"read as: {short(self.read_as)}")
        return "\n".join(lines)

    def _extent(self) -> list[str]:
        """Return lines that say for which inputs and sizes it is proved."""
        if self.unit == ADVANTAGE:
            return [*self._extent_of_rewards(), *self._bounds()]
        sizes = " and ".join(
            [
                ", ".join(f"[{b}, {t}]" for b, t in self.shapes[:-1]),
                "[{}, {}]".format(*self.shapes[-1]),
            ]
            if len(self.shapes) > 1
            else ["[{}, {}]".format(*self.shapes[0])]
        )
        if self.unit == VALUE_OF_TERM:
            return [
                f"  {self.domain}, in {self.batches} batches of {sizes}; "
                f"{counted(self.paths, 'path')}; {self.seconds:.1f} s",
                *self._bounds(),
            ]
        lines = [
            f"  {self.domain}, in {self.batches} batches of {sizes} (every mask with a "
            f"token in each row); {counted(self.paths, 'path')}; {self.seconds:.1f} s",
            f"  among them, {describe_special(self)}",
        ]
        if self.every_size:
            lines.append(
                "  and in every batch of any size, whatever its mask, if each row has a token"
            )
        return lines + self._bounds()

    def _extent_of_rewards(self) -> list[str]:
        """Return a line that says for which batches an advantage estimator is proved."""
        most = max(rows for rows, _ in self.shapes)
        return [
            f"  {self.domain}; in {self.batches} batches of up to {counted(most, 'response')}; "
            f"{counted(self.paths, 'path')}; {self.seconds:.1f} s"
        ]

    def _not_part(self) -> str:
        """Return what the proof leaves out, in words."""
        left_out = list(self.left_out)
        if self.status == "proved" and not self.every_size:
            why = f" ({self.sizes_open})" if self.sizes_open else ""
            left_out.append(f"batches of other sizes{why}")
        if self.status == "proved" and self.per_response:
            left_out.append(OTHER_ADVANTAGES)
        return "; ".join([*left_out, ", ".join(NOT_PART)])

    def _bounds(self) -> list[str]:
        """Return a line for each number with which the code compares a size: beyond it the
        code may do something else.
        """
        return [
            f"  a size, count, setting or kept state is compared with {number} ({line}): "
            "on the other side of it nothing is proved"
            for number, line in self.bounds
        ]

    def _difference(self) -> list[str]:
        """Return lines that say where it differs, and a batch that shows it."""
        at = ", ".join(
            f"{symbol} = {number:.6g}" for symbol, number in self.numbers.items()
        )
        where = f"{self.place}   (here {at})" if self.place else at
        # + 0.0 turns -0.0 into 0.0
        expected = math.nan if self.expected is None else self.expected + 0.0
        found = math.nan if self.found is None else self.found + 0.0
        lines = [
            f"FAIL  {where}",
            f"      expected  {self.unit} {expected:.6g}",
            f"      found     {self.unit} {found:.6g}",
        ]
        if self.example:
            lines += [
                f"      {line}" for line in describe_example(self.example).splitlines()
            ]
        return lines


def describe_special(proof: Proof) -> str:
    """Return in words which values are proved by themselves, and with which masks and
    prompts: `patterns` of upref/proof/domain.py.

    Args:
        proof: of a loss.
    """
    equal, certain = "equal policies", "probabilities of 1"
    if "logp_ref" in proof.reads:
        equal += ", with an equal and with another reference"
        certain += ", with both references"
    padding = "padding of 0"
    if proof.per_response:
        padding = "padding with log-probabilities of 0"
    words = (
        f"with every mask of the last row, the others full: {equal}; all advantages 0; {padding}. "
        "With full masks: advantages of 0 in some rows or one token, equal ones, 1 and -1; "
        f"{certain}"
    )
    if proof.with_prompts:
        words += (
            ". All of these with one prompt; with a prompt for each row on full masks, "
            "and where the last row has its last token alone"
        )
    return words


def prove(
    loss: Any,
    objective: str | Objective | Any,
    *,
    agg: str = "",
    rows: int = 2,
    columns: int = 3,
    seconds: float = SECONDS,
    **hp: Any,
) -> Proof:
    """Prove that the gradient of a loss is that of an objective for every value.

    Args:
        loss: as of `upref.check`.
        objective: a registered name, an Objective, or another loss: a callable, or
            FILE.py:FUNCTION.
        agg: aggregation in place of the objective's own.
        rows, columns: the largest batch; all masks of it are proved.
        seconds: the limit of CPU time.
        **hp: the objective's hyperparameters, as of `upref.check`.

    Returns:
        A Proof: true if it is proved.

    Raises:
        InputError: the loss cannot be run, or the solver is not installed.
    """
    require_z3()
    check_limits(seconds, rows=rows, columns=columns)
    is_other_loss = _find_objective(objective) is None
    given: list[Any] = [loss, objective] if is_other_loss else [loss]
    # those that are given by name have not been called yet
    first = None if any(isinstance(x, str) for x in given) else kept(_functions(given))
    with state_restored() as changed:
        both = _read_both(loss, objective, agg, hp)
        for n, x in enumerate(given):
            given[n] = both[n] if isinstance(x, str) else x

        def compared(is_small: bool) -> Proof:
            """Compare in batches of one token, or of up to the size that is asked for."""
            size = (1, 1) if is_small else (rows, columns)
            return _prove_losses(*both, *size, seconds)

        library = next((x.arrays.library for x in both[:2] if x.arrays), "")
        if library:
            return _of_another_library(both[0], both[3], library)
        proof = without_state(_functions(given), compared, first)
    not_passed = (*describe_unbound(both[0].unbound), *proof.remarks)
    return with_changes(replace(proof, remarks=not_passed), changed)


def _of_another_library(loss: Loss, words: str, library: str) -> Proof:
    """Return that there is no proof of a function that torch does not compute."""
    reason = (
        f"{library} computes it, and a proof reads torch operations alone: "
        "`upref check` compares its gradients"
    )
    return Proof(loss.name, words, "no proof", reason, read_as=loss.read_as)


def _functions(losses: list[Any]) -> tuple[Any, ...]:
    """Return losses as the functions that the user wrote."""
    return tuple(x.call if isinstance(x, Loss) else x for x in losses)


def without_state(
    function: Any,
    compared: Callable[[bool], Proof],
    first: dict[str, Kept] | None = None,
) -> Proof:
    """Return a proof; "no proof" where the function keeps a state that changes it.

    A state that has changed during the proof is moved far in both directions, and the
    smallest batches are compared again there. If the proof holds, the state does not
    matter. A random generator among the state is "no proof" at once.

    Args:
        function: the user's, or a tuple of two.
        compared: makes the proof; of the smallest batches where its argument is true.
        first: what it kept before its first call.
    """
    before = kept(function)
    proof = compared(False)
    if not proof:
        return proof
    after = kept(function)
    state = changed_state(before, after)
    if first is not None:
        state |= changed_state(first, after)
    if MORE in after:
        proof = replace(proof, remarks=(*proof.remarks, NOT_ALL))
    if not state:
        return proof
    unproved = replace(proof, status="no proof", every_size=False)
    chance = sorted(name for name, one in state.items() if one.is_chance)
    if chance:
        return replace(unproved, reason=f"it draws from {in_words(chance[0])}")
    # beyond each number with which the code compares: it may compare the state
    far = 2.0 * max([FAR, *(number for number, _ in proof.bounds)])
    for up, by in ((True, far), (False, far), (True, FARTHEST), (False, FARTHEST)):
        with moved(state, up, by) as is_whole:
            if not is_whole or not compared(True):
                name = in_words(min(state))
                reason = f"it keeps a state from call to call: {name} changes"
                return replace(unproved, reason=reason)
    return proof


def check_limits(seconds: Any, **sizes: Any) -> None:
    """Raise InputError for a size that is no whole number above 0, or a time limit that
    is no finite number above 0.

    Args:
        seconds: the limit.
        **sizes: by their names.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(
                f"{name} must be a whole number of at least 1, got {repr(size)[:60]}."
            )
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds < math.inf:
        raise InputError(f"seconds must be a number above 0, got {repr(seconds)[:60]}.")


def _read_both(
    loss: Any, objective: Any, agg: str, hp: dict[str, Any]
) -> tuple[Loss, Loss, Objective | None, str]:
    """Return the loss, the reference as a loss, its objective (None where the reference is
    another loss), and the reference in words.

    Raises:
        InputError: one of the two cannot be read, or agg is given for another loss.
    """
    reference = _find_objective(objective)
    if reference is not None:
        reference = reference.aggregated(agg) if agg else reference
        read_loss = read(loss, reference, hp)
        own_hp = {k: v for k, v in hp.items() if k in reference.hyperparameters}
        other = read(reference, reference, own_hp)
        words = _describe(reference, own_hp, agg)
    else:
        if agg:
            raise InputError("agg is the aggregation of an objective, not of a loss.")
        read_loss = read(loss, no_objective(), hp)
        other = read(objective, no_objective(), hp)
        words = other.name
    return read_loss, other, reference, words


def _find_objective(name: Any) -> Objective | None:
    """Return the objective that is meant; None where another loss is: a callable, or a
    name with a colon.
    """
    if isinstance(name, Objective):
        return name
    if isinstance(name, str) and ":" not in name:
        return get(name)
    return None


def _describe(objective: Objective, hp: dict[str, Any], agg: str) -> str:
    """Return an objective with its hyperparameters, in words."""
    settings = ", ".join(
        f"{name}={value:g}"
        for name, value in objective.resolve(hp).items()
        if value is not None
    )
    name = f"{objective.name}({settings})" if settings else objective.name
    return f"{name} with {agg}" if agg else name


# a proof within `check`: so much work at most, whatever else the machine does
# the reference is an objective or an edit of one, whose numbers batches have shown
WITHIN_CHECK = Limits(paths=6, operators=3000, solver=3_000_000, reference_points=1)
PAIR = ((True, True), (True, False))
FEW = (
    Pattern(((True,),)),
    Pattern(((True, False, True),)),
    Pattern(PAIR),
    Pattern(((True, False), (False, True))),
    Pattern(PAIR, on_policy=True),
    Pattern(PAIR, zeros=frozenset({(1, 0), (1, 1)})),
    Pattern(((True,),), certain=True),
)
FEW_PROMPTS = (Pattern(PAIR, (7, 3)), Pattern(PAIR, (7, 3), on_policy=True))
FEW_REFERENCES = (Pattern(PAIR, on_policy=True, free_reference=True),)


def compare_few(loss: Loss, objective: Objective, hp: dict[str, Any]) -> Comparison:
    """Compare a loss with an objective on a few batches, for every value.

    Args:
        loss: as read.
        objective: its aggregation is the one that is meant.
        hp: resolved hyperparameters.

    Returns:
        The Comparison.
    """
    return compare_few_losses(loss, read(objective, objective, hp), objective)


def compare_few_losses(
    loss: Loss, other: Loss, objective: Objective, seconds: float = SECONDS
) -> Comparison:
    """Compare two losses on a few batches, for every value.

    Args:
        loss: as read.
        other: as read.
        objective: of which they are meant to be.
        seconds: how long it may take.

    Returns:
        The Comparison.
    """
    with_prompts = _reads_prompts(loss, objective)
    one_per_response = _has_one_per_response(loss, objective)
    optional = _optional_reads(loss, other, objective)
    seeing = _seeing(other, loss)
    among: tuple[Pattern, ...] = FEW
    if with_prompts:
        among += FEW_PROMPTS
    if "logp_ref" in optional:
        among += FEW_REFERENCES
    return compare(
        gradient_of(loss),
        gradient_of(seeing),
        among,
        per_response=one_per_response or _may_have_one(objective),
        reads=optional,
        seconds=seconds,
        bounds_mean=objective.level == "sequence_mean",
        limits=WITHIN_CHECK,
    )


def _reads_prompts(loss: Loss, objective: Objective | None) -> bool:
    """Tell whether both depend on the prompts of the rows."""
    if "group" not in loss.reads:
        return False
    if objective is None:
        return True
    return objective.agg == "group-token-mean" or "group" in objective.reads


def _prove_losses(
    loss: Loss,
    other: Loss,
    objective: Objective | None,
    words: str,
    rows: int,
    columns: int,
    seconds: float,
) -> Proof:
    """Compare two losses; where they differ only for advantages that differ within a
    response, prove them for one advantage per response, with a remark.

    Args:
        loss: as read.
        other: the reference, as a loss.
        objective: the reference as an objective; None where it is another loss.
        words: the reference, in words.
        rows, columns: the largest batch.
        seconds: the limit of CPU time.

    Raises:
        InputError: they differ, and the policies of the loss were read by position alone.
    """
    reads = _optional_reads(loss, other, objective)
    with_prompts = _reads_prompts(loss, objective)
    among = sizes_up_to(rows, columns, with_prompts, "logp_ref" in reads)
    function, reference = gradient_of(loss), gradient_of(_seeing(other, loss))
    per_response = _has_one_per_response(loss, objective)
    of_responses = objective is not None and objective.level == "sequence_mean"
    found = compare(
        function,
        reference,
        among,
        per_response=per_response,
        reads=reads,
        seconds=seconds,
        bounds_mean=of_responses,
    )
    remarks: tuple[str, ...] = ()
    if found.status == "differs" and not per_response and _may_have_one(objective):
        left = max(1.0, seconds - found.seconds)
        again = compare(
            function,
            reference,
            among,
            per_response=True,
            reads=reads,
            seconds=left,
            bounds_mean=of_responses,
        )
        if again.status == "proved":
            remarks = (
                "with advantages that differ within a response it is another loss: "
                "pass one number for each response",
            )
            found = again
    if found.status == "differs" and loss.order_unknown:
        raise InputError(loss.order_unknown)
    proof = _report(loss.name, loss.read_as, words, found, remarks)
    proof = replace(proof, left_out=_left_out(loss, objective))
    return _for_every_size(proof, loss, other, objective) if proof else proof


def _left_out(loss: Loss, objective: Objective | None) -> tuple[str, ...]:
    """Return in words what of the aggregation is not part of the proof."""
    left_out = [loss.left_to_caller] if loss.left_to_caller else []
    by_prompt = objective is not None and objective.agg == "group-token-mean"
    if by_prompt and "group" not in loss.reads:
        left_out.append("the mean within each prompt (the loss takes no group ids)")
    return tuple(left_out)


def _for_every_size(
    proof: Proof, loss: Loss, other: Loss, objective: Objective | None
) -> Proof:
    """Return a proof with whether it holds for every number of rows and columns, and why
    not if it does not.
    """
    if proof.bounds:
        reason = "it compares a size, count, setting or kept state with a number"
        return replace(proof, sizes_open=reason)
    if _reads_prompts(loss, objective):
        return replace(proof, sizes_open="it reads the prompts of the rows")

    def function(batch: Rollouts, scale: Tensor) -> list[Tensor]:
        return every_size.gradient(loss, batch, scale)

    def reference(batch: Rollouts, scale: Tensor) -> list[Tensor]:
        """Return the gradient of the reference, as `function` does that of the loss."""
        if objective is None:
            return every_size.gradient(other, batch, scale)
        hp = other.bound_args
        return every_size.gradient_of_objective(objective, hp, batch, scale)

    reads = frozenset(proof.reads)
    reason = every_size.why_not(function, reference, proof.per_response, reads)
    return replace(proof, every_size=not reason, sizes_open=reason)


def _seeing(other: Loss, loss: Loss) -> Loss:
    """Return the reference as it sees the batches of the loss: without prompts where the
    loss takes none.
    """
    if "group" in loss.reads or "group" not in other.reads:
        return other
    return replace(other, reads=other.reads - {"group"})


def _optional_reads(
    loss: Loss, other: Loss, objective: Objective | None
) -> frozenset[str]:
    """Return the optional inputs, of logp_ref, logp_sampler and entropy, that are
    variables of the proof. With an objective these are what the loss reads and what the
    objective needs; the sampler's only where both read it.
    """
    everything = frozenset(("logp_ref", "logp_sampler", "entropy"))
    # a loss that takes a batch may read anything of it
    wanted = everything if loss.takes_batch or loss.framework else loss.reads
    reads = {"logp_ref", "entropy"} & (
        wanted | (other.reads if objective is None else set())
    )
    if objective is not None:
        if "entropy" in objective.reads:
            reads |= {"entropy"}
        if other.bound_args.get("beta"):
            reads |= {"logp_ref"}
        if objective.sampler is not None and "logp_sampler" in wanted:
            reads |= {"logp_sampler"}
    elif "logp_sampler" in wanted | other.reads:
        reads |= {"logp_sampler"}
    return frozenset(reads)


def _has_one_per_response(loss: Loss, objective: Objective | None) -> bool:
    """Tell whether the formula, or the loss, takes one advantage for each response."""
    one = objective is not None and objective.one_adv
    if objective is not None and objective.agg == "seq-mean-token-sum":
        # the action is the whole response: RLOO, W-REINFORCE
        one = one or objective.adv in ("leave_one_out", "signed")
    return one or loss.adv_shape != "BT"


def _may_have_one(objective: Objective | None) -> bool:
    """Tell whether the formula has one advantage for each response, A_i."""
    return objective is not None and "A_i" in objective.equation.replace("A_it", "")


def _report(
    name: str, read_as: str, words: str, found: Comparison, remarks: tuple[str, ...]
) -> Proof:
    """Return what was found as a Proof, with the token that differs most if there is a
    counterexample.

    Args:
        name: of the function.
        read_as: which argument was taken for what.
        words: the reference, in words.
        found: what the comparison found.
        remarks: sentences for the reader.
    """
    if found.is_rounded and found.status == "proved":
        remarks = (*remarks, ROUNDED)
    if found.ties_at_one and found.status == "proved":
        remarks = (*remarks, TIES_AT_ONE)
    proof = Proof(
        name,
        words,
        found.status,
        found.reason,
        tuple(dict.fromkeys(p.shape for p in found.patterns)),
        len(found.patterns),
        found.paths,
        found.per_response,
        found.bounds_mean,
        tuple(sorted(found.reads)),
        tuple((b.number, b.line) for b in found.bounds),
        with_prompts=any(pattern.group for pattern in found.patterns),
        read_as=read_as,
        remarks=remarks,
        seconds=found.seconds,
    )
    if found.counterexample is None:
        return proof
    batch = found.counterexample.batch
    expected, got = found.counterexample.expected, found.counterexample.found
    gap = (expected - got).abs().nan_to_num(float("inf"))
    index = int(gap.argmax())
    place = _place(found.counterexample)
    scale = found.counterexample.point["scale"]
    if scale != 1:
        remarks = (*proof.remarks, f"here the loss is multiplied by {scale:g}")
        proof = replace(proof, remarks=remarks)
    if expected.shape[0] == 1:
        expected, got = expected[0], got[0]
    numbers = {
        "A": batch.adv[place].item(),
        "r": (batch.logp - batch.logp_old)[place].exp().item(),
    }
    if batch.logp_ref is not None:
        numbers["π_ref/π_θ"] = (batch.logp_ref - batch.logp)[place].exp().item()
    where = describe_bounds(found.counterexample)
    if "π_old" in where or batch.logp_old[place] < RARE:
        numbers["log π_old"] = batch.logp_old[place].item()
    fields = {name: x.tolist() for name, x in batch.tensors().items()}
    example = Example(
        fields, rollouts=True, expected=expected.tolist(), found=got.tolist()
    )
    return replace(
        proof,
        place=where,
        numbers=numbers,
        expected=expected.reshape(-1)[index].item(),
        found=got.reshape(-1)[index].item(),
        example=example,
    )


RARE = -20.0  # log π_old of a token that may be the cause of a difference
SMALL = 1e-3  # a probability that is easier to read as its logarithm
AT_SOME_TOKENS = "at some tokens"
SYMBOLS = {"r": "r", "A": "A", "k": "π_ref/π_θ", "rho": "ρ", "mu": "π_old", "H": "H"}


def describe_bounds(counterexample: Counterexample) -> str:
    """Return in words where the token lies that differs most: `A > 50, r < 1.28`; with
    "at some tokens" where tokens within these bounds may be right.

    Args:
        counterexample: a batch and what of it makes the difference.
    """
    row, column = _place(counterexample)
    tightest: dict[tuple[str, str], float] = {}
    for name, sign, number in counterexample.bounds:
        symbol = name.rstrip("0123456789_")
        at = name.removeprefix(symbol)
        # of variables such as r1_2 and A1, those of the token and of its row
        if at in (f"{row}_{column}", f"{row}") and symbol in SYMBOLS:
            nearer = max if sign == ">" else min
            key = (SYMBOLS[symbol], sign)
            tightest[key] = nearer(tightest.get(key, number), number)
    words = [_bound(x, sign, n) for (x, sign), n in tightest.items()]
    if words and not counterexample.bounds_decide:
        words.append(AT_SOME_TOKENS)
    return ", ".join(words)


def _bound(symbol: str, sign: str, number: float) -> str:
    """Return a bound in words, such as "A > 50"; of a small probability, that of its
    logarithm.
    """
    if symbol == "π_old" and 0 < number < SMALL:
        symbol, number = f"log {symbol}", math.log(number)
    return f"{symbol} {sign} {number:.6g}"


def _place(counterexample: Counterexample) -> tuple[int, int]:
    """Return row and column of the token that differs most."""
    gap = (counterexample.expected - counterexample.found).abs().nan_to_num(math.inf)
    mask = counterexample.batch.mask
    return divmod(int(gap.argmax()) % mask.numel(), mask.shape[1])


def with_changes(proof: Proof, changed: set[str]) -> Proof:
    """Return the proof with a remark for each thing that the function changed of the
    process. One that moves a random generator is not proved.

    Args:
        proof: of the function.
        changed: names of what it changed.
    """
    drawn = sorted(name for name in changed if "random generator" in name)
    if drawn and proof.status == "proved":
        return replace(proof, status="no proof", reason=f"it draws from {drawn[0]}")
    others = tuple(f"it changes {name}" for name in sorted(changed - set(drawn)))
    return replace(proof, remarks=(*proof.remarks, *others))


def prove_kl(
    estimator: Any,
    name: str,
    *,
    rows: int = 2,
    columns: int = 3,
    seconds: float = SECONDS,
) -> Proof:
    """Prove that a function of two log-probabilities is a KL estimator for every value.

    Its values and its gradients are compared.

    Args:
        estimator: a function of (log_prob, ref_log_prob), or its name.
        name: of the estimator: k1, k2 or k3.
        rows, columns: the largest batch.
        seconds: the limit of CPU time.

    Returns:
        A Proof: true if it is proved.

    Raises:
        InputError: the function cannot be run, or the solver is not installed.
    """
    require_z3()
    check_limits(seconds, rows=rows, columns=columns)
    if name not in kl.ESTIMATORS:
        raise catalog.unknown_kl(name, kl.ESTIMATORS)
    first = None if isinstance(estimator, str) else kept(estimator)
    with state_restored() as changed:
        term, known = read_term(estimator), read_term(kl.ESTIMATORS[name])

        def compared(is_small: bool) -> Proof:
            """Compare in batches of one token, or of up to the size that is asked for."""
            size = (1, 1) if is_small else (rows, columns)
            return _prove_terms(term, known, name, *size, seconds)

        function = term.fn if isinstance(estimator, str) else estimator
        proof = without_state(function, compared, first)
    return with_changes(proof, changed)


def _prove_terms(
    term: Term, known: Term, name: str, rows: int, columns: int, seconds: float
) -> Proof:
    """Compare the values and gradients of two KL estimators.

    Args:
        term: the estimator.
        known: the reference.
        name: of the reference.
        rows, columns: the largest batch; every token of a batch is trained.
        seconds: the limit of CPU time.
    """
    shapes = dict.fromkeys([(1, 1), (1, columns), (rows, columns)])
    free = [Pattern(((True,) * t,) * b) for b, t in shapes]
    # where log π_ref - log π_θ is 0, a divisor may be 0
    equal = [replace(p, on_policy=True) for p in free]
    # ... and where π_θ is 1, whether π_ref is 1 too or not
    certain = [replace(p, certain=True) for p in free]
    certain += [replace(p, free_reference=True) for p in certain]
    of_term, of_known = term_of(term), term_of(known)
    found = compare(
        of_term,
        of_known,
        [*free, *equal, *certain],
        per_response=False,
        reads={"logp_ref"},
        seconds=seconds,
        differs=is_different_anywhere,
        domain_of=TermDomain,
    )
    proof = _report(term.name, str(term.reading), name, found, ())
    proof = replace(proof, unit=VALUE_OF_TERM)
    if found.counterexample is not None:
        batch = found.counterexample.batch
        proof = _shown_for_tokens(proof, batch, of_term, of_known)
    return proof


def _shown_for_tokens(
    proof: Proof, batch: Rollouts, of_estimator: Outputs, of_known: Outputs
) -> Proof:
    """Return the proof that a function is no KL estimator, with its value or gradient on
    this batch where it differs most.

    Args:
        proof: of the function.
        batch: on which it differs, with advantages in place of a gradient from above.
        of_estimator, of_known: values and gradients, [2, B, T].
    """
    alone = replace(batch, adv=torch.ones_like(batch.adv))
    one = torch.ones((), dtype=torch.float64)
    found, expected = of_estimator(alone, one), of_known(alone, one)
    gap = (found - expected).abs().nan_to_num(math.inf)
    layer, row, column = (int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    assert batch.logp_ref is not None
    log_k = (batch.logp_ref - batch.logp)[row, column].item()
    inputs = {"log_prob": batch.logp.tolist(), "ref_log_prob": batch.logp_ref.tolist()}
    return replace(
        proof,
        unit=SLOPE_OF_TERM if layer else VALUE_OF_TERM,
        numbers={"log π_ref - log π_θ": log_k},
        expected=expected[layer, row, column].item(),
        found=found[layer, row, column].item(),
        example=Example(
            inputs, expected=expected[layer].tolist(), found=found[layer].tolist()
        ),
    )
