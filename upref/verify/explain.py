# SPDX-License-Identifier: Apache-2.0
"""What a wrong loss is: the record, put into the reference, that reproduces its
weights; searched, never guessed.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.registry import Objective, get, names
from upref.rollouts import Rollouts
from upref.transforms import CORRECTIONS, up
from upref.verify.factors import FACTORS, aggregation_id, declared_aggregation
from upref.verify.faults import hyperparameter_id, known
from upref.verify.faults.batch_reading import floored, left_out, reweighted
from upref.verify.faults.corrections import corrected, retuned
from upref.verify.faults.denominators import OF_LENGTHS, divided, group_order_faults
from upref.verify.faults.losses import (
    KL_MISSING,
    OTHER_KL,
    TERM_OF,
    LossFault,
    fault,
    kl_added,
    kl_faults,
    ratio_power_faults,
    shape_of,
    term_slope,
    terms,
    words_for_other_kl,
)
from upref.verify.finding import NO_CAUSE, Cause
from upref.verify.measure import LossCase, kl_slope, unit_weights
from upref.weights.batches import (
    OFF_EDGES,
    on_policy_batch,
    random_batch,
    relative_error,
)

TERMS = 3  # KL terms that are tried with a fault of the rest
FEW = 24  # responses: most faults fail on a few already
NOTHING = fault(
    "no gradient reaches log_prob: it is detached, or rounded away",
    "stop-gradient",
    id="no-gradient",
    scale=lambda batch: 0.0,
)


def _has_gradient(case: LossCase) -> bool:
    """Whether any call of the loss so far had a gradient."""
    for question in case.loss.log:
        if question is not None and question.method == "measured":
            _, gradient = question.answer
            if gradient.any():
                return True
    return False


def explain(
    case: LossCase, batch: Rollouts, found: Tensor, ignore: Tensor, bounds: list[float]
) -> LossFault | None:
    """The first fault that, put into the reference, has the found weights on every
    token of the batch, and of others.

    Tried in this order: other hyperparameters, the catalogue, the plug-in, other
    objectives; then two together, one of the KL term and one of the rest; then any
    objective at hyperparameters recovered from the loss. ignore: tokens at a bound.

    Args:
        case: the loss and its objective.
        batch: a batch on which weights differ.
        found: the loss's weights on it, [B, T].
        ignore: tokens at a bound, which rounding decides, [B, T].
        bounds: ratios at which the loss was seen to change.

    Returns:
        The fault, or None.
    """
    use = batch.mask & ~ignore
    confirmation = _measure_confirmation(case)
    nothing = not _has_gradient(case)
    every = chain(
        [NOTHING] if nothing else [],
        two_gradients(case, batch),
        by_fixed_length(case),
        _retuned(case, bounds),
        _other_kl(case, batch, found, use),
        _kl_aggregated(case),
        known("losses", case.objective, case.hp, bounds),
        group_order_faults(case),
        reweighted(case),
        left_out(case),
        floored(case),
        retuned(case),
        divided(case),
        ratio_power_faults(case.objective, case.hp, case.scale),
        _others(case),
        corrected(case),
    )

    def holds(one: LossFault) -> bool:
        """Whether it agrees on other batches; of a length, on long responses too."""
        if not confirmation.fits(one, case):
            return False
        long = [case.stress_batch("lengths")] if one.id in OF_LENGTHS else []
        return _measure_on(case, long).fits(one, case)

    def first(faults: Iterable[LossFault]) -> LossFault | None:
        """The first of them that agrees, here and on other batches."""
        return reproduces(filter(holds, faults), case, batch, found, use)

    return (
        first(every)
        or _two(case, batch, found, use, bounds, confirmation)
        or first(_recovered(case))
    )


TWICE = "its gradient is there twice: its own .backward() leaves it, and the loss that it returns has it again"
LEFT = "its own .backward() leaves a gradient that is added to that of the loss that it returns, which is right alone"
RETURNED = "the loss that it returns adds its gradient to the one that its own .backward() leaves, which is right alone"


def two_gradients(case: LossCase, batch: Rollouts) -> Iterator[LossFault]:
    """A loss that calls .backward() and returns a loss with a gradient, where one of
    the two is right alone.

    Args:
        case: the loss and its objective.
        batch: a batch.
    """
    if case.loss.ask("measured", batch, 1, None, {})[0].own is None:
        return

    def left_weights(batch: Rollouts) -> Tensor:
        left_gradient = case.loss.ask("measured", batch, 1, None, {})[0].own
        return (
            torch.zeros_like(batch.logp)
            if left_gradient is None
            else left_gradient / case.factors(batch)
        )

    weights = case.expected(batch)
    id = "gradient-left-behind"
    words = LEFT
    if alike(left_weights(batch), weights):
        id = "gradient-twice"
        words = TWICE
    yield fault(
        words,
        "batches",
        id=id,
        weigh=lambda batch: case.expected(batch) + left_weights(batch),
        whole=True,
    )
    yield fault(
        RETURNED,
        "batches",
        id="own-gradient-added",
        weigh=lambda batch: (
            case.weights(batch) - left_weights(batch) + case.expected(batch)
        ),
        whole=True,
    )


LEAST_LENGTH = 16  # tokens: a smaller divisor is no response's greatest length


def by_fixed_length(case: LossCase) -> Iterator[LossFault]:
    """A sum over each response that is divided by one whole number, as Dr. GRPO's code
    divides by a length fixed beforehand.

    Args:
        case: the loss and its objective.
    """
    sums = case.agg == declared_aggregation(case.objective) == "seq-mean-token-sum"
    if not sums or not case.fits or not 0 < case.scale < 1:
        return
    length = round(1 / case.scale)
    if length < LEAST_LENGTH or abs(case.scale * length - 1) > 10 * case.tol:
        return
    yield fault(
        f"every weight is 1/{length} times what it should be: if {length} is the fixed length L of Dr. GRPO's code "
        "(seq-mean-token-sum-norm), check the loss times L",
        "rounding",
        id="weights-scaled",
        scale=lambda batch: case.scale,
    )


@dataclass(frozen=True)
class ConfirmationBatches:
    """Other batches, of other widths and compositions: what is said of the loss must be
    true there too.
    """

    # with the weights found, and the tokens that are used
    batches: list[tuple[Rollouts, Tensor, Tensor]]

    def fits(self, fault: LossFault, case: LossCase) -> bool:
        """Tell whether a fault has the gradients that were found on all these batches.

        Args:
            fault: the fault.
            case: the loss and its objective.
        """
        return all(
            fits(fault, case, *measured, 10 * case.tol) for measured in self.batches
        )

    def without(self, part: Callable[[Rollouts], Tensor]) -> "ConfirmationBatches":
        """Subtract a part from what was found.

        Args:
            part: of a batch, the gradient [B, T] that is explained already.

        Returns:
            The same batches with the rest.
        """
        return ConfirmationBatches(
            [(batch, found - part(batch), use) for batch, found, use in self.batches]
        )


def _measure_confirmation(case: LossCase, *more: Rollouts) -> ConfirmationBatches:
    """All of `confirmation_batches`, with what is found there."""
    return _measure_on(case, [*confirmation_batches(case), *more])


def _measure_on(case: LossCase, batches: list[Rollouts]) -> ConfirmationBatches:
    """These batches, with what is found there."""
    out = []
    for batch in batches:
        with contextlib.suppress(InputError):  # what it refuses is another finding
            found = case.weights(batch)
            out.append(
                (batch, found, batch.mask & found.isfinite() & ~case.rounded(batch))
            )
    return ConfirmationBatches(out)


def confirmation_batches(case: LossCase) -> list[Rollouts]:
    """On policy, with small advantages and with A > 0 alone too, near every bound,
    three random ones, and one of 64 responses; of an objective that corrects for its
    sampler, one whose sampler is far away.

    Args:
        case: the loss and its objective.

    Returns:
        Batches.
    """
    on_policy = case.ready(on_policy_batch())
    rng = np.random.default_rng
    small = on_policy.but(adv=on_policy.adv / 1000)
    grid = case.grid(seed=7, edges=OFF_EDGES, thin=3)
    sizes = (
        1 + torch.arange(len(on_policy.adv), dtype=on_policy.adv.dtype)[:, None] / 10
    )
    positive = on_policy.but(adv=on_policy.adv.abs() * sizes)
    random = [case.ready(random_batch(rng(seed), case.one_adv)) for seed in (0, 3, 5)]
    far_sampler = (
        [case.stress_batch("sampler")] if case.objective.sampler is not None else []
    )
    return [
        on_policy,
        small,
        positive,
        grid,
        *random,
        case.ready(random_batch(rng(4), case.one_adv, (64, 40))),
        *far_sampler,
    ]


def cause_if_confirmed(case: LossCase, fault: LossFault, *more: Rollouts) -> Cause:
    """A fault that reproduces the loss on every one of those batches, and on these;
    else none.

    Args:
        case: the loss and its objective.
        fault: the fault.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """
    return (
        fault.cause
        if _measure_confirmation(case, *more).fits(fault, case)
        else NO_CAUSE
    )


def first_confirmed(
    case: LossCase, faults: Iterable[LossFault], *more: Rollouts
) -> Cause:
    """The cause of the first fault that `cause_if_confirmed` accepts.

    Args:
        case: the loss and its objective.
        faults: in the order in which they are tried.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """
    for known_fault in faults:
        if cause := cause_if_confirmed(case, known_fault, *more):
            return cause
    return NO_CAUSE


def cause_if_confirmed_at(
    case: LossCase,
    fault: LossFault,
    batch: Rollouts,
    at: tuple[int, int],
    found: float,
    *more: Rollouts,
) -> Cause:
    """The cause of a fault, as by `cause_if_confirmed`, that also has the weight found
    at this token of the batch, where the reference has another.

    Args:
        case: the loss and its objective.
        fault: the fault.
        batch: the batch.
        at: the response and the column.
        found: the loss's weight there.
        *more: batches on which it must hold too.

    Returns:
        Its cause, or an empty one.
    """
    right, wrong = (
        w[at].item()
        for w in (
            case.expected(batch),
            fault.change.weights(case.objective, case.hp, batch),
        )
    )
    if abs(wrong - found) <= 1e-3 * abs(right - found):
        return cause_if_confirmed(case, fault, batch, *more)
    return NO_CAUSE


def holds_on_other_batches(
    case: LossCase, change: Callable[[Rollouts], tuple[Tensor, Tensor]], *more: Rollouts
) -> bool:
    """Whether what is found is what a change makes of the reference, on every one of
    `confirmation_batches` that the loss takes, three at least.

    For a cause that is no change of the weights.

    Args:
        case: the loss and its objective.
        change: of a batch, what is found and what the change makes of the reference.
        *more: batches on which it must hold too.
    """
    answers = []
    for batch in (*confirmation_batches(case), *more):
        with contextlib.suppress(InputError):
            answers.append(alike(*change(replace(batch, totals=None))))
    return len(answers) >= 3 and all(answers)


def alike(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors agree to 1e-5 of the largest number of the second.

    Args:
        x: any shape.
        y: of the same shape.
    """
    return bool((x - y).abs().max() <= 1e-5 * y.abs().max())


def _two(
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    use: Tensor,
    bounds: list[float],
    confirmation: ConfirmationBatches,
) -> LossFault | None:
    """A fault of the KL term, which stands alone where A = 0, and one of the rest, each
    put into the reference.
    """
    zero = use & (batch.adv.expand_as(use) == 0)
    if not zero.any():
        return None
    objective = case.objective
    hp = case.hp
    plain_hp = case.plain_hp | ({"beta": 0.0} if case.objective.kl else {})
    terms = [*_other_kl(case, batch, found, use)]
    if hp.get("beta"):
        terms += [KL_MISSING, *_kl_aggregated(case), *kl_faults(objective, hp)]

    def part(term: LossFault, batch: Rollouts) -> Tensor:
        """What this fault of the KL term leaves of it: the weights less the rest's."""
        return term.change.weights(objective, hp, batch) - unit_weights(
            objective, batch, plain_hp
        )

    without_kl = replace(case, hp=plain_hp)
    for term in [
        t
        for t in terms
        if (relative_error(found, part(t, batch), batch.adv)[zero] < case.tol).all()
    ][:TERMS]:
        without_term = confirmation.without(partial(part, term))
        rest = chain(
            _retuned(without_kl, bounds),
            known("losses", objective, plain_hp, bounds),
            _others(without_kl),
        )
        known_fault = reproduces(
            (
                candidate
                for candidate in rest
                if without_term.fits(candidate, without_kl)
            ),
            without_kl,
            batch,
            found - part(term, batch),
            use,
        )
        if known_fault is not None:

            def weights_of_two(
                batch: Rollouts,
                known_fault: LossFault = known_fault,
                term: LossFault = term,
            ) -> Tensor:
                """The weights with the two faults."""
                return known_fault.change.weights(objective, plain_hp, batch) + part(
                    term, batch
                )

            return fault(
                f"two faults together: {known_fault.words}; and {term.words}",
                known_fault.kind,
                id=known_fault.id,
                beside=term.id,
                weigh=weights_of_two,
            )
    return None


def _kl_aggregated(case: LossCase) -> Iterator[LossFault]:
    """The KL term with another aggregation than the rest."""
    objective, beta = case.objective, case.hp.get("beta") or 0.0
    for name in FACTORS if beta else ():
        if name != case.agg:

            def otherwise(batch: Rollouts, name: str = name) -> Tensor:
                w = unit_weights(objective, batch, case.plain_hp | {"beta": 0.0})
                return w - beta * kl_slope(objective.kl, batch) * (
                    case.factors(batch, name) / case.factors(batch)
                )

            words = f"the KL term has another aggregation than the rest: {name}"
            yield fault(
                words,
                "term",
                id=f"kl-{aggregation_id(name)}",
                weigh=otherwise,
                whole=True,
            )


def reproduces(
    faults: Iterable[LossFault],
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    use: Tensor,
) -> LossFault | None:
    """The first that agrees on all used tokens.

    Args:
        faults: in the order in which they are tried.
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights on it, [B, T].
        use: the tokens that are compared, [B, T].

    Returns:
        The fault, or None.
    """
    small, use = batch.but(group=None).take(slice(FEW)), use & ~case.rounded(batch)

    def fits_few(one: LossFault) -> bool:
        """Whether it agrees on the first rows, which cost little, or needs them all."""
        return one.whole or fits(one, case, small, found[:FEW], use[:FEW], case.tol)

    return next(
        (
            s
            for s in faults
            if fits_few(s) and fits(s, case, batch, found, use, case.tol)
        ),
        None,
    )


def fits(
    one: LossFault,
    case: LossCase,
    batch: Rollouts,
    found: Tensor,
    use: Tensor,
    tol: float,
) -> bool:
    """Whether the objective with this fault in it has the found weights on the used
    tokens.

    Args:
        one: the fault.
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights on it, [B, T].
        use: the tokens that are compared, [B, T].
        tol: the relative error that is allowed.
    """
    try:
        apart = relative_error(
            found, one.change.weights(case.objective, case.hp, batch), batch.adv
        )
    except (
        InputError,
        RuntimeError,
        TypeError,
    ):  # of other shapes: not this objective's form
        return False
    return bool((apart[use] < tol).all())


def _retuned(case: LossCase, bounds: list[float]) -> Iterator[LossFault]:
    """The objective at other hyperparameters: its two sides swapped, or as the matcher
    recovers them from the loss.
    """
    from upref.verify.match import recover

    hp = case.hp
    if {"eps_low", "eps_high"} <= hp.keys() and hp["eps_low"] != hp["eps_high"]:
        swapped = {"eps_low": hp["eps_high"], "eps_high": hp["eps_low"]}
        yield fault(
            "the two sides of the clip are swapped (eps_low, eps_high)",
            "hyperparameter",
            id="clip-sides-swapped",
            hp=swapped,
        )
    for changed in recover(case):
        yield fault(
            _said(changed, hp),
            "hyperparameter",
            id=hyperparameter_id(*changed),
            hp=changed,
        )
    if hp.get("beta"):
        yield KL_MISSING
        yield kl_added(hp["beta"])


def _other_kl(
    case: LossCase, batch: Rollouts, found: Tensor, use: Tensor
) -> Iterator[LossFault]:
    """A KL term of another size, or that the objective does not have: where A = 0
    nothing else is left.
    """
    zero = use & (batch.adv.expand_as(use) == 0)
    if not zero.any():
        return
    objective, plain, own_term = (
        case.objective,
        {k: v for k, v in case.hp.items() if k != "beta"},
        case.hp.get("beta") or 0.0,
    )

    def rest(batch: Rollouts) -> Tensor:
        """The weights without a KL term."""
        return unit_weights(objective, batch, objective.resolve(plain))

    def with_term(batch: Rollouts, beta: float, name: str) -> Tensor:
        """The weights with this KL term."""
        return rest(batch) - beta * term_slope(name, batch)

    found_term = TERM_OF.get(objective.kl, "")
    for name in terms(found_term, case.loss.reads):
        d = term_slope(name, batch)[zero]
        beta = -(found[zero] @ d / (d @ d)).item() if d.any() else 0.0
        is_own = name == found_term
        if is_own and abs(beta) > case.tol:
            yield fault(
                _said({"beta": beta}, case.hp),
                "hyperparameter",
                id=hyperparameter_id("beta"),
                hp={"beta": beta},
            )
        elif abs(beta) > case.tol and (
            not own_term or (beta > 0 and abs(beta - own_term) > case.tol)
        ):
            weigh = partial(with_term, beta=beta, name=name)
            if own_term:
                id = f"kl-gradient-of-{name}"
                words = f"the KL term has the gradient of {beta:.6g} {name}, not of {own_term:g} {objective.kl}: {OTHER_KL}"
            else:
                id = "kl-added" if is_own and beta < 0 else "kl-not-of-objective"
                words = words_for_other_kl(objective, beta, name)
            yield fault(words, "term", id=id, weigh=weigh)


def _number(v: float | None, digits: int) -> str:
    """A hyperparameter's value in words: None is one that is absent."""
    return "absent" if v is None else f"{v:.{digits}g}"


def _said(moved: dict[str, Any], hp: dict[str, Any]) -> str:
    """Hyperparameters with other values than these, in words."""
    said = "; ".join(
        f"{k} is {_number(v, 6)}, not {_number(hp[k], 6)}" for k, v in moved.items()
    )
    if moved and all(_absolute(k, v, hp[k]) for k, v in moved.items()):
        said += ": taken as absolute, not as a distance from 1"
    if moved and all(_of_log_r(k, v, hp[k]) for k, v in moved.items()):
        said += ": the bounds are on log r, not on r"
    if "c" in moved and hp["c"] is None and moved["c"] is not None:
        # a mask does the same
        said += f": where A < 0 no gradient is left beyond r = {moved['c']:.6g}"
    return said


def _absolute(key: str, v: Any, now: Any) -> bool:
    """Whether this distance from 1 makes the number itself the bound."""
    if v is None or now is None or key not in ("eps_low", "eps_high"):
        return False
    return abs((1 - v if key == "eps_low" else 1 + v) - now) < 1e-6


def _of_log_r(key: str, v: Any, now: Any) -> bool:
    """Whether this distance from 1 makes the number a bound of log r."""
    if v is None or now is None or key not in ("eps_low", "eps_high", "eps"):
        return False
    bounds = {"eps_low": (1 - v, -now), "eps_high": (1 + v, now), "eps": (1 + v, now)}
    ratio, log_r = bounds[key]
    return abs(ratio - math.exp(log_r)) < 1e-6


def _others(case: LossCase) -> Iterator[LossFault]:
    """Other objectives, at the hyperparameters that they share with this one and at
    their own.
    """
    objective = case.objective
    hp = case.hp
    if not shape_of(objective, hp).ignores_ratio[1.0]:  # it has no log π_θ there yet
        yield fault(
            f"its gradient is that of up({objective.name}): log π_θ in place of the clipped ratio where A > 0",
            "objective",
            id="up-of-objective",
            objective=up(objective),
            hp=hp,
        )
    for name in CORRECTIONS if objective.sampler else ():
        other = get(re.sub(f"({'|'.join(CORRECTIONS)})[(]", f"{name}(", objective.name))
        shared_hp = {k: v for k, v in hp.items() if k in other.hyperparameters}
        yield from (
            fault(
                f"its gradient is that of {_called(other, other_hp)}",
                "objective",
                id=f"other-objective-{other.name}",
                objective=other,
                hp=other_hp,
            )
            for other_hp in (shared_hp, {})
        )
    objectives = [
        get(n) for n in names() if n != objective.name and not get(n).batch_coupled
    ]
    for other in sorted(
        objectives, key=lambda other: declared_aggregation(other) != case.agg
    ):
        shared_hp = {
            k: v for k, v in hp.items() if k in other.hyperparameters and v is not None
        }
        for other_hp in (shared_hp, {}):
            yield fault(
                f"its gradient is that of {_called(other, other_hp)}{_other_aggregation(case, other)}",
                "objective",
                id=f"other-objective-{other.name}",
                objective=other,
                hp=other_hp,
            )


def _recovered(case: LossCase) -> Iterator[LossFault]:
    """Any objective, and up(...) of any, at the hyperparameters that the loss itself
    shows, with the KL term it has.
    """
    from upref.verify.match import fitting

    for box, other, hp in fitting(case.loss):
        own_hp = {k: v for k, v in hp.items() if k != "beta"}

        def objective_weights(
            batch: Rollouts,
            box: Any = box,
            objective: Objective = other,
            own_hp: dict[str, Any] = own_hp,
        ) -> Tensor:
            """The weights of the objective at these hyperparameters, times the scale,
            with the KL term.
            """
            return box.scale * (
                unit_weights(objective, batch, objective.resolve(own_hp))
                + box.kl_weights(batch)
            )

        times = f"{box.scale:.6g} times " if box.scale != 1 else ""
        term = f", with a KL term: {box.beta:.6g} {box.kl}" if box.kl else ""
        words = f"its gradient is {times}that of {_called(other, own_hp)}{term}{_other_aggregation(case, other)}"
        yield fault(
            words,
            "objective",
            id=f"other-objective-{other.name}",
            weigh=objective_weights,
        )


def _other_aggregation(case: LossCase, objective: Objective) -> str:
    """In words, that of the loss, where it is not that of an objective whose weights it
    has.
    """
    batch = case.ready(on_policy_batch())
    same = alike(
        case.factors(batch, declared_aggregation(objective)), case.factors(batch)
    )
    # without ids of groups the two are one, and the loss cannot have groups in mind
    agg = case.agg
    if agg == "group-token-mean" and "group" not in case.loss.reads:
        agg = "token-mean"
    return "" if same else f", aggregated by {agg}"


def _called(objective: Objective, h: dict[str, Any]) -> str:
    said = ", ".join(f"{k}={v:g}" for k, v in objective.resolve(h).items() if v)
    return f"{objective.name}({said})" if said else objective.name
