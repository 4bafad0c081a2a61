# SPDX-License-Identifier: Apache-2.0
"""Where the steps of two trainers part: the same weights and the same rows through two
adapters.

Each case of the suite runs with both. Of two gradients that differ, the weights of the
tokens are read, and the first quantity in which they differ is named in the order in
which a trainer makes them. The settings are those of the adapters.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.conformance.adapter import Adapter
from upref.conformance.cases import CASES, Case
from upref.conformance.closing import Closing, find_closing
from upref.conformance.preparation import make_samples
from upref.conformance.runner import (
    Outcome,
    Status,
    make_model,
    make_rows,
    run,
)
from upref.errors import InputError
from upref.result import Result
from upref.step.compare.forward import Forward
from upref.step.compare.record import Recorded, Step, gradients, watched
from upref.step.explain.weights import read_weights
from upref.step.inputs.reference import Gradient, TorchModel
from upref.step.inputs.rows import Row
from upref.user_code.guard import one_thread

LARGEST_ROUNDING = 1e-3  # of a gradient's norm, where both agree with the objective
SAME = 5e-5  # of a gradient's norm: each of the two is within 2e-5 of the objective's
FIT = 1e-3  # of a gradient's norm: what is left of it where token weights explain it
NEAR = 1e-3  # of the largest weight: two weights so near are one
ZERO = 1e-4  # of the largest weight: such a token does not train
MOST_STEPS = 9  # optimizer steps that are kept: no case has more
AGREES = "agrees with the objective"


@dataclass(frozen=True)
class CaseDifference:
    """One case that both trainers have.

    Attributes:
        case: its id.
        quantity: the first that differs; "" where the gradients are the same.
        a, b: its values, in words.
        causes: why each differs from the objective, or that it agrees.
        settings: those of each, by the trainer's name.
        closings: of each trainer that can change its settings: whether some close the
            difference.
    """

    case: str
    quantity: str
    a: str
    b: str
    causes: tuple[str, str]
    settings: tuple[dict[str, str], dict[str, str]]
    closings: tuple[Closing, ...] = ()


@dataclass(frozen=True)
class StepDifference(Result):
    """Where the steps of two trainers differ. Truth value: a case was compared, and none
    differs.

    Attributes:
        a, b: the names of the trainers.
        compared: the cases that ran with both.
        left_out: case -> why it was not compared.
    """

    a: str
    b: str
    compared: tuple[CaseDifference, ...]
    left_out: dict[str, str]

    def __bool__(self) -> bool:
        """Return whether a case was compared and none differs."""
        return bool(self.compared) and not self.differing

    @property
    def differing(self) -> list[CaseDifference]:
        """The cases in which they differ."""
        return [one for one in self.compared if one.quantity]

    @property
    def failures(self) -> Sequence[str]:
        return [
            f"{one.case}: {one.quantity}: {one.a} and {one.b}" for one in self.differing
        ]

    def data(self) -> dict[str, Any]:
        """Return the fields, `same` first."""
        return {"same": bool(self)} | asdict(self)

    def text(self, verbose: bool = False) -> str:
        """Return the report: a line of counts, and the cases that differ, with both
        numbers, the causes and the settings.

        Args:
            verbose: with the cases that are the same, and those that were left out.
        """
        if not self.compared:
            head = f"no case was compared: {self.a} and {self.b} have none together"
        elif self:
            head = f"no difference was found between the steps of {self.a} and {self.b}"
        else:
            head = f"the steps of {self.a} and {self.b} differ"
        lines = [
            f"{head}   cases compared: {len(self.compared)}; different: {len(self.differing)}; "
            f"left out: {len(self.left_out)}"
        ]
        width = max(len(self.a), len(self.b))
        for one in self.differing:
            lines.append(f"DIFF  {one.case}: {one.quantity}")
            own_settings = _own_settings(one.settings)
            trainers = ((self.a, one.a), (self.b, one.b))
            for i, (name, value) in enumerate(trainers):
                lines.append(f"      {name:<{width}}  {value}")
                if one.causes[i] != value:
                    lines.append(f"      {'':<{width}}  {one.causes[i]}")
                if own_settings[i]:
                    lines.append(f"      {'':<{width}}  settings: {own_settings[i]}")
            lines += [f"      {closing.text()}" for closing in one.closings]
        if verbose:
            lines += [f"same  {one.case}" for one in self.compared if not one.quantity]
            lines.append(
                f"same: two gradients that both agree with the objective, to {LARGEST_ROUNDING:g} of "
                "their norm; of several steps, or with an entropy bonus, that both agree with it"
            )
            lines += [f"left out  {case}: {why}" for case, why in self.left_out.items()]
        return "\n".join(lines)


def _own_settings(settings: Sequence[dict[str, str]]) -> list[str]:
    """Return for each of two trainers the settings that the other has not, or has
    otherwise, as "key=value, key=value"; "" without any.
    """
    shared = settings[0].items() & settings[1].items()
    return [
        ", ".join(f"{k}={v}" for k, v in own.items() if (k, v) not in shared)
        for own in settings
    ]


class _Kept:
    """An adapter that keeps the optimizer steps of its first run.

    Args:
        adapter: the framework's.

    Attributes:
        steps: the optimizer steps; [] before a run.
    """

    def __init__(self, adapter: Adapter):
        """Take the attributes of the adapter, and its `train` if it has one."""
        self.adapter = adapter
        self.name = adapter.name
        self.supports = adapter.supports
        self.scale = adapter.scale
        self.settings = adapter.settings
        self.steps: list[Step] = []
        if hasattr(adapter, "train"):
            self.train = self._train

    def step(self, model: Any, rows: list[Row], case: Case) -> Any:
        """Let the adapter train, as its own `step` does, and keep its optimizer steps.

        Args:
            model: a small one.
            rows: the responses.
            case: of the suite.

        Returns:
            What the adapter returns.
        """
        steps: list[Step] = []
        with watched(model, steps, MOST_STEPS):
            out = self.adapter.step(model, rows, case)
        self._keep(model, out, steps)
        return out

    def _train(self, model: Any, rows: list[Row], case: Case, reference: Any) -> Any:
        """Let the adapter prepare and train, as its own `train` does."""
        trainer: Any = self.adapter
        steps: list[Step] = []
        with watched(model, steps, MOST_STEPS):
            out = trainer.train(model, rows, case, reference)
        self._keep(model, out, steps)
        return out

    def _keep(self, model: Any, out: Any, steps: list[Step]) -> None:
        """Keep the optimizer steps of the first run.

        Args:
            model: the trained model.
            out: what the adapter returned: recorded steps, or the gradients of one step
                by name. Anything else: the watched steps, or without one `.grad`.
            steps: those that were watched.
        """
        if self.steps:
            return
        if isinstance(out, Recorded):
            self.steps = out.steps
        elif isinstance(out, dict):
            self.steps = [Step({}, {n: torch.as_tensor(g) for n, g in out.items()})]
        else:
            self.steps = steps or [Step({}, gradients(model))]


def chosen_cases(beginnings: Sequence[str]) -> list[Case]:
    """Return the cases whose ids begin in one of these ways.

    Args:
        beginnings: of ids; []: all cases.

    Returns:
        The cases, in the suite's order. Cases of several ranks or of an engine are
        never among them.

    Raises:
        InputError: no id begins so.
    """
    every = [case for case in CASES.values() if case.ranks == 1 and not case.engine]
    for beginning in beginnings:
        if not any(case.id.startswith(beginning) for case in every):
            raise InputError(
                f"no case of one process begins with {beginning!r}: "
                "`python -m pytest --pyargs upref.conformance --collect-only -q --level 6` lists them."
            )
    if not beginnings:
        return every
    return [case for case in every if case.id.startswith(tuple(beginnings))]


@dataclass(frozen=True)
class Ran:
    """What a trainer made of cases of the suite.

    Attributes:
        name: the trainer's.
        ends: case -> how its run compares with the objective.
        steps: case -> its optimizer steps, without the documented factor of the loss.
        left_out: case -> why the trainer has no step of it.
    """

    name: str
    ends: dict[str, Outcome]
    steps: dict[str, list[Step]]
    left_out: dict[str, str]


def run_cases(adapter: Adapter, chosen: Sequence[Case], seed: int = 0) -> Ran:
    """Run cases of the suite with an adapter, and keep its optimizer steps.

    Args:
        adapter: of a trainer.
        chosen: the cases; those that `why_left_out` names are not run, and are in no
            field of the answer.
        seed: of the rows.

    Returns:
        What the trainer made of each.
    """
    ran = Ran(adapter.name, {}, {}, {})
    with one_thread():
        for case in chosen:
            if why_left_out(case):
                continue
            end, steps = _run_once(adapter, case, seed)
            if end.status in (Status.SKIPPED, Status.COULD_NOT_RUN):
                ran.left_out[case.id] = end.reason
                continue
            ran.ends[case.id] = end
            ran.steps[case.id] = steps
    return ran


def _run_once(
    adapter: Adapter, case: Case, seed: int, explain: bool = True
) -> tuple[Outcome, list[Step]]:
    """Run a case, and return its outcome and its optimizer steps, without the
    documented factor of the loss; [] where the case was skipped or could not run.
    """
    kept = _Kept(adapter)
    end = run(kept, case, seed=seed, explain=explain)
    if end.status in (Status.SKIPPED, Status.COULD_NOT_RUN):
        return end, []
    return end, _without_scale(kept, case)


def compare_runs(
    a: Ran, b: Ran, chosen: Sequence[Case], seed: int = 0
) -> StepDifference:
    """Compare what two trainers made of cases that both ran.

    Args:
        a, b: their runs.
        chosen: the cases.
        seed: of the rows, which were the same for both.

    Returns:
        A StepDifference: true where no difference was found. Trainers of one name are
        called NAME (1) and NAME (2). A case that either trainer lacks is left out.
    """
    names = (a.name, b.name)
    if a.name == b.name:
        names = (f"{a.name} (1)", f"{b.name} (2)")
    compared = []
    left_out = {}
    with one_thread():
        for case in chosen:
            reason = why_left_out(case)
            if not reason and case.id in a.left_out:
                reason = f"{names[0]}: {a.left_out[case.id]}"
            elif not reason and case.id in b.left_out:
                reason = f"{names[1]}: {b.left_out[case.id]}"
            if reason:
                left_out[case.id] = reason
                continue
            ends = [ran.ends[case.id] for ran in (a, b)]
            steps = [ran.steps[case.id] for ran in (a, b)]
            compared.append(_compare(case, seed, ends, steps))
    return StepDifference(*names, tuple(compared), left_out)


def diff_steps(
    a: Adapter, b: Adapter, chosen: Sequence[Case], seed: int = 0
) -> StepDifference:
    """Run cases of the suite with two adapters, and compare the gradients that their
    optimizers get.

    Args:
        a, b: the adapters of two trainers, or of one with two settings.
        chosen: the cases; those that `why_left_out` names are left out.
        seed: of the rows, which are the same for both.

    Returns:
        A StepDifference: true where no difference was found. For each case that
        differs, it has the settings with which nothing differs, as far as adapters name
        some.
    """
    first = run_cases(a, chosen, seed)
    # what the first has not is not run with the second
    second = run_cases(b, [case for case in chosen if case.id in first.ends], seed)
    found = compare_runs(first, second, chosen, seed)
    by_id = {case.id: case for case in chosen}
    names = (found.a, found.b)
    compared = []
    for one in found.compared:
        if one.quantity:
            case = by_id[one.case]
            one = _with_closings(one, case, (a, b), (first, second), names, seed)
        compared.append(one)
    return replace(found, compared=tuple(compared))


def _with_closings(
    one: CaseDifference,
    case: Case,
    adapters: tuple[Adapter, Adapter],
    runs: tuple[Ran, Ran],
    names: tuple[str, str],
    seed: int,
) -> CaseDifference:
    """Look for settings of each trainer with which nothing differs from the other one,
    by running the case with them.

    Args:
        one: how they differ in a case.
        case: the case.
        adapters: of both trainers.
        runs: of both.
        names: of both, as the report has them.
        seed: of the rows.
    """

    def closing_of(i: int) -> Closing | None:
        """Look for settings of trainer i, 0 or 1; the other one keeps its own."""
        other = runs[1 - i]

        def is_closed(adapter: Adapter) -> bool | None:
            """Return whether nothing differs; None where the case cannot run."""
            end, steps = _run_once(adapter, case, seed, explain=False)
            if end.status in (Status.SKIPPED, Status.COULD_NOT_RUN):
                return None
            ends = [end, other.ends[case.id]]
            return not _differ(case, ends, [steps, other.steps[case.id]])

        pair = (names[i], names[1 - i])
        settings = one.settings[1 - i]
        return find_closing(adapters[i], case, pair, settings, is_closed)

    with one_thread():
        closings = [closing_of(i) for i in range(2)]
    return replace(one, closings=tuple(filter(None, closings)))


def _is_through_objective(case: Case) -> bool:
    """Tell whether the steps of a case are compared with the objective's gradient
    alone, and not with each other.

    Two trainers have other rows or weights in a later step, adapters begin at random,
    and an entropy bonus is no weight of a token's log-probability.
    """
    return case.steps > 1 or case.reference == "adapter" or bool(case.entropy_coef)


def _without_scale(kept: _Kept, case: Case) -> list[Step]:
    """Return the steps that an adapter made, without the factor of the loss that it
    documents.
    """
    scale = kept.scale(case)
    return [
        replace(step, gradients={n: g / scale for n, g in step.gradients.items()})
        for step in kept.steps
    ]


def why_left_out(case: Case) -> str:
    """Tell why a case is not compared, whatever the trainers are.

    Args:
        case: of the suite.

    Returns:
        The reason; "" where it is compared.
    """
    if case.ranks > 1:
        return "it has several ranks"
    if case.engine:
        return "it reads weights, and not the gradient"
    if case.dtype != "float32":
        return "half precision rounds two gradients apart"
    return ""


def _compare(
    case: Case, seed: int, ends: Sequence[Outcome], steps: Sequence[list[Step]]
) -> CaseDifference:
    """Compare what two adapters made of one case.

    Args:
        case: the case.
        seed: of its rows.
        ends: how each run compares with the objective.
        steps: the optimizer steps of each.
    """
    causes = [end.reason or AGREES for end in ends]
    quantity, a, b = "", "", ""
    if _differ(case, ends, steps):
        quantity, a, b = _first_difference(case, seed, steps, causes)
    return CaseDifference(
        case.id,
        quantity,
        a,
        b,
        (causes[0], causes[1]),
        (ends[0].settings, ends[1].settings),
    )


def _differ(case: Case, ends: Sequence[Outcome], steps: Sequence[list[Step]]) -> bool:
    """Tell whether what two adapters made of a case differs. Where both agree with the
    objective, only a distance above LARGEST_ROUNDING does, and in a case that is compared
    through the objective nothing does. Elsewhere a distance above SAME does.
    """
    both_agree = all(end.status is Status.PASSED for end in ends)
    if both_agree and _is_through_objective(case):
        return False
    return not _are_same(steps, LARGEST_ROUNDING if both_agree else SAME)


def _are_same(steps: Sequence[list[Step]], limit: float) -> bool:
    """Tell whether two adapters made the same steps.

    Args:
        steps: of both.
        limit: of the distance of two gradients, relative to their norm.
    """
    ours, theirs = steps
    return len(ours) == len(theirs) and all(
        _distance(a.gradients, b.gradients) < limit
        for a, b in zip(ours, theirs, strict=True)
    )


def _distance(a: Gradient, b: Gradient) -> float:
    """Return |a - b| / |b| of two gradients; infinite where they are of other
    parameters, or b alone is 0.
    """
    if a.keys() != b.keys():
        return float("inf")
    difference = sum(float((a[n] - b[n]).pow(2).sum()) for n in b)
    norm = sum(float(g.pow(2).sum()) for g in b.values()) ** 0.5
    if not norm:
        return float("inf") if difference else 0.0
    return float(difference**0.5 / norm)


def _first_difference(
    case: Case, seed: int, steps: Sequence[list[Step]], causes: Sequence[str]
) -> tuple[str, str, str]:
    """Return the first quantity that differs, and its two values, in words: the
    log-probabilities, a mask, a weight, a divisor; ("the step", and the causes) where
    the weights of the tokens cannot be read.

    Args:
        case: the case.
        seed: of its rows.
        steps: of both adapters.
        causes: why each differs from the objective.
    """
    through_objective = ("the step", causes[0], causes[1])
    if _is_through_objective(case):
        return through_objective
    model = make_model(case)
    make = make_samples if case.advantages else make_rows
    rows = make(case, model, seed)
    reference = TorchModel(model)
    forward = Forward(reference, rows, case.temperature)
    try:
        read = [
            read_weights(forward, reference.flat(own[0].gradients)) for own in steps
        ]
    except InputError:
        return through_objective
    # the share of each gradient that no weights of the tokens give
    unexplained = [weights.residual for weights in read]
    if max(unexplained) > FIT:
        words = [
            f"{share:.2g} of the gradient is no gradient of these"
            for share in unexplained
        ]
        return "log-probabilities", words[0], words[1]
    # a weight that the gradient does not determine is NaN
    ours = [w.nan_to_num(0) for w in read[0].weights]
    theirs = [w.nan_to_num(0) for w in read[1].weights]
    return _compare_weights(case, rows, ours, theirs) or through_objective


@dataclass(frozen=True)
class _RowPair:
    """The weights of the tokens of one row, in the gradients of two trainers.

    Attributes:
        number: of the row.
        row: the row.
        a, b: of each trainer: the weights of all tokens but the first, [S - 1].
        a_trains, b_trains: of each trainer: whether a token trains.
    """

    number: int
    row: Row
    a: Tensor
    b: Tensor
    a_trains: Tensor
    b_trains: Tensor

    def words(self, quantity: str, t: int) -> tuple[str, str, str]:
        """Return the quantity with the place of token t, and the weight that each
        trainer gives this token, in words; the weight is 0 where it does not train.
        """
        a = float(self.a[t]) if self.a_trains[t] else 0
        b = float(self.b[t]) if self.b_trains[t] else 0
        place = _place(self.number, t, self.row)
        return f"{quantity}: {place}", f"weight {a:.6g}", f"weight {b:.6g}"


def _compare_weights(
    case: Case, rows: Sequence[Row], ours: list[Tensor], theirs: list[Tensor]
) -> tuple[str, str, str] | None:
    """Return the first quantity of the weights of tokens that differs, and its two
    values, in words: which tokens train, the weights within a response up to a factor,
    the factors of the responses, and last the one factor of all. None where no token
    trains in either, as in two gradients of 0.

    Args:
        case: the case.
        rows: its rows.
        ours, theirs: of each row the weights of all its tokens but the first.
    """
    pairs = _pair_rows(rows, ours, theirs)
    for pair in pairs:
        if found := _find_mask_difference(case, pair):
            return found
    factors = []
    for pair in pairs:
        if not (pair.a_trains.any() or pair.b_trains.any()):
            continue  # it trains in neither: it has no factor
        factor = _factor_of_response(pair)
        if found := _find_weight_difference(case, pair, factor):
            return found
        factors.append(factor)
    if not factors:
        return None
    spread = max(factors) - min(factors)
    if spread > NEAR * max(map(abs, factors)):
        quantity = "divisor of a response"
        if case.advantages:
            quantity = "advantage or divisor of a response"
        listed = ", ".join(f"{factor:.4g}" for factor in factors)
        return quantity, f"{listed} times the other's", "1 for each response"
    quantity = "clip of the gradient's norm" if case.clip else "divisor"
    return quantity, f"{factors[0]:.6g} times the other's", "1"


def _pair_rows(
    rows: Sequence[Row], ours: list[Tensor], theirs: list[Tensor]
) -> list[_RowPair]:
    """Join the weights of each row. A token trains where its weight is above ZERO of
    the trainer's largest weight.
    """
    largest_of_ours = max(float(w.abs().max()) for w in ours)
    largest_of_theirs = max(float(w.abs().max()) for w in theirs)
    pairs = []
    for number, row in enumerate(rows):
        a, b = ours[number], theirs[number]
        a_trains = a.abs() > ZERO * largest_of_ours
        b_trains = b.abs() > ZERO * largest_of_theirs
        pairs.append(_RowPair(number, row, a, b, a_trains, b_trains))
    return pairs


def _find_mask_difference(case: Case, pair: _RowPair) -> tuple[str, str, str] | None:
    """Return the first token of a row that only one trainer trains because of its mask,
    and its two weights, in words; None where there is none.
    """
    row = pair.row
    trains = [False] * (len(row.prompt) - 1) + row.trains
    # A token that the row trains has no weight where a clip acts: that is no mask. A case
    # that begins with rewards has r = 1, where no clip acts.
    is_on_policy = torch.tensor(bool(case.advantages))
    is_of_mask = torch.tensor(trains).logical_not() | is_on_policy
    differs = (pair.a_trains != pair.b_trains) & is_of_mask
    if not differs.any():
        return None
    return pair.words("mask", int(differs.nonzero()[0]))


def _factor_of_response(pair: _RowPair) -> float:
    """Return the factor of least squares in a = factor * b. Where b is 0, it is 1 if a
    is 0 too, else 0.
    """
    a, b = pair.a, pair.b
    if b.any():
        return float(a @ b / (b @ b))
    return float(not a.any())


def _find_weight_difference(
    case: Case, pair: _RowPair, factor: float
) -> tuple[str, str, str] | None:
    """Return the token of a row whose weights are farthest from a = factor * b, and its
    two weights, in words; None where no token is farther than NEAR.
    """
    largest = max(float(pair.a.abs().max()), 1e-300)  # 1e-300: a may be 0
    error = (pair.a - factor * pair.b).abs() / largest
    is_different = float(error.max()) > NEAR
    if not is_different:
        return None
    t = int(error.argmax())
    quantity = _weight_words(case)
    if pair.a_trains[t] != pair.b_trains[t]:
        quantity = f"mask, or {quantity}"
    return pair.words(quantity, t)


def _weight_words(case: Case) -> str:
    """Return what makes the weight of a token in a case."""
    if case.beta:
        return "weight of a token, KL term included"
    return "weight of a token"


def _place(i: int, t: int, row: Row) -> str:
    """Return which token this is, and the advantage of its response where it has one,
    in words.

    Args:
        i: number of the response.
        t: index among all tokens of the row but the first.
        row: the row.
    """
    column = t - (len(row.prompt) - 1)
    where = f"column {column}" if column >= 0 else "a token of the prompt"
    adv = ""
    if not isinstance(row.adv, list) and not math.isnan(row.adv):
        adv = f" (A = {row.adv:.4g})"
    return f"response {i}, {where}{adv}"
