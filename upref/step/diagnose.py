# SPDX-License-Identifier: Apache-2.0
"""Why a gradient is not the objective's: parameters, then token weights, then the
forward pass; each claim verified.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from upref.errors import InputError
from upref.kl import ESTIMATORS
from upref.step.case import HALVES, Compared, StepCase
from upref.step.causes import named
from upref.step.forward import (
    SPAN,
    Forward,
    best_factors,
    clipped,
    expected,
    near,
    reproduces,
)
from upref.step.forwards import others, tried
from upref.step.goal import Goal
from upref.step.gradient_clipping import divided_after, find_change
from upref.step.normalizers import factor_words, right_factors
from upref.step.reference import Gradient, Model, TorchModel, text_config
from upref.step.rows import Padded, Row, locate
from upref.step.scores import Variant, quick
from upref.step.weights import (
    Tokens,
    TokenWeights,
    constant_between,
    gradient,
    head_residual,
    left_out,
    observed,
    read,
)
from upref.verify.faults import measured
from upref.verify.finding import NO_CAUSE, Cause, Number, join_causes
from upref.verify.report import UNKNOWN, Finding, fail

AFTER = 16  # tokens behind a row that may train
# forward passes whose token weights are read where one factor a response does not
# suffice
READ = 2
MOST = 150  # forward passes with a fault that are tried
PROMPTS = measured.PROMPTS_TRAIN.cause()
OTHER_WEIGHTS = Cause("with it the weights of tokens differ too, by no known cause")


class _Dtypes(TorchDispatchMode):
    """The dtypes that are computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.kinds |= {x.dtype for x in args if isinstance(x, Tensor)}
        return func(*args, **(kwargs or {}))


def half_precision(run: Callable[[], object]) -> torch.dtype | None:
    """The half precision in which a step computes, if any.

    Args:
        run: the step.
    """
    with _Dtypes() as seen:
        run()
    return next((k for k in HALVES if k in seen.kinds), None)


def parameters(model: Model, found: Tensor, want: Tensor, bound: float) -> list[str]:
    """Parameters whose gradient is wrong beyond a thousandth of itself.

    Args:
        model: the reference.
        found, want: gradients, [P].
        bound: the relative error that is allowed.

    Returns:
        Names of parameters.
    """
    size, parts = float(want.norm()), model.split(found)

    def tolerance(w: Tensor) -> float:
        """Of the gradient of one parameter; in half precision any difference is within
        it.
        """
        least = max(50 * bound * float(w.norm()), 0.25 * bound * size)
        return least if bound < 1e-2 else 1e9 * least

    return [
        n
        for n, w in model.split(want).items()
        if not float((parts[n] - w).norm()) <= tolerance(w)
    ]


def diagnosed(
    it: Compared,
    case: StepCase,
    bound: float,
    again: Callable[[], Gradient] | None,
    among: Cause = NO_CAUSE,
) -> list[Finding]:
    """Findings on a gradient that differs, the cause in the first one.

    Args:
        it: the gradient beside the right one.
        case: the rows and the reference's forward pass.
        bound: the relative error that is allowed.
        again: runs the step once more.
        among: a cause that was found on other rows; only what it names is tried.
    """
    goal = it.goal
    model = case.forward.model
    found = it.found
    want = it.want
    size = float(found.norm())
    numbers = (
        Number(float(want.norm()), "norm"),
        Number(size, "norm", f"off by {it.error:.2g} of the expected norm"),
    )

    def say(cause: Cause, *more: Finding) -> list[Finding]:
        return [fail("gradient", "over all parameters", *numbers, cause=cause), *more]

    if not found.isfinite().all():
        bad = [
            n
            for n, gradient in model.split(found).items()
            if not gradient.isfinite().all()
        ]
        return say(measured.GRADIENT_NOT_FINITE.cause(parameter=bad[0]))
    if size == 0:
        return say(measured.NO_GRADIENT.cause())
    if again is not None and not near(model.flat(again()), found, 10 * bound):
        first = _seeded(again)
        second = _seeded(again)
        if near(model.flat(first), model.flat(second), 10 * bound):
            return say(measured.RANDOM_STEP.cause())
        return say(measured.STEP_KEEPS_STATE.cause())
    parts = model.split(want)
    its = model.split(found)
    beside = [
        n
        for n, w in parts.items()
        if not w.any() and float(its[n].norm()) > 10 * bound * size
    ]
    if beside and (beside := _apart(case.forward, beside)):
        parameters_beside = _first_few(beside)
        return say(
            measured.LOSS_OF_OTHER_PARAMETERS.cause(parameters=parameters_beside)
        )
    if goal.clip is not None and near(found, it.rows.sum(0), bound):
        return say(measured.NORM_NOT_CLIPPED.cause())
    if goal.clip is not None:
        counts = {
            "tokens that train": int(case.b.mask.sum()),
            "responses": len(case.rows),
        }
        if cause := divided_after(goal.clip, it.rows.sum(0), found, counts, bound):
            return say(cause)
    if cause := find_change(goal, model, it.rows, want, found, bound):
        return say(cause)
    goal, gradient = _before_clip(it)
    plain = Terms.of(goal, case.forward, case.b)
    if cause := _terms_differ(
        plain, case.forward, case.b, gradient, bound
    ) or _term_by_row(goal, case.forward, case.b, plain, gradient, bound):
        return say(cause)  # a small term is beyond the bound in some parameters alone
    wrong = parameters(model, found, want, bound)
    right = [n for n in model.shapes if n not in wrong]
    alone = any(float(parts[n].norm()) > 1e-6 * float(want.norm()) for n in right)
    if alone and wrong and (of := _of_parameters(its, parts, wrong, bound)):
        return say(of)
    if alone and 0 < len(wrong) <= len(parts) // 4:
        return say(measured.SOME_PARAMETERS_WRONG.cause(parameters=_first_few(wrong)))
    return say(*_explained(it, plain, gradient, case.forward, case.b, bound, among))


def _seeded(run: Callable[[], Gradient]) -> Gradient:
    """The gradient of a run that begins with all random generators at one seed."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return run()


def _apart(forward: Forward, names: list[str]) -> list[str]:
    """Those of the parameters on which no logit depends, of tokens that do not train
    either.
    """
    random = torch.Generator().manual_seed(0)
    pulled = torch.zeros(())
    for z, ids in zip(forward.z, forward.ids, strict=True):
        dz = torch.randn(z.shape, generator=random, dtype=z.dtype)
        pulled = pulled + forward.model.pull(z, dz, ids).abs()
    parts = forward.model.split(pulled)
    return [n for n in names if not parts[n].any()]


def _before_clip(it: Compared) -> tuple[Goal, Tensor]:
    """The goal without a clip that does not act, and the gradient as it was before one
    that does.

    The norm that was clipped is not known; the one that is right stands for it.
    """
    goal = it.goal
    gradient = it.found
    if goal.clip is None:
        return goal, gradient
    if float(gradient.norm()) < (1 - 1e-3) * goal.clip:
        return replace(goal, clip=None), gradient
    return goal, gradient * float(it.rows.sum(0).norm() / it.want.norm())


def _of_parameters(
    found: Gradient, want: Gradient, wrong: list[str], bound: float
) -> Cause:
    """What is wrong with these parameters alone, the others being right."""
    zero = [n for n in wrong if not found[n].any()]
    parts = [f"no gradient: {_first_few(zero)}"] if zero else []
    for n in (n for n in wrong if n not in zero):
        gradient = found[n]
        w = want[n]
        k = float(gradient @ w / (w @ w).clamp(min=1e-300))
        if (gradient - k * w).norm() > 100 * bound * w.norm() or abs(
            k - 1
        ) < 100 * bound:
            return NO_CAUSE
        parts.append(f"{n} has {k:.5g} times its gradient")
    return measured.SOME_PARAMETERS_SCALED.cause(each="; ".join(parts[:4]))


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


# ---- weights and forward passes ------------------------------------------------------
def _explained(
    it: Compared,
    plain: "Terms",
    g: Tensor,
    forward: Forward,
    padded: Padded,
    bound: float,
    only: Cause = NO_CAUSE,
) -> list[Any]:
    """[cause, *more findings] by weights and forward passes.

    Args:
        it: the gradient beside the right one.
        plain: the terms of the right forward pass.
        g: the gradient that was found, before a clip.
        forward: the right forward pass.
        padded: its rows.
        bound: the relative error that is allowed.
        only: a cause that was found on other rows; only what it names is tried.
    """
    goal = plain.goal
    rows = it.rows
    span = max(SPAN, 3 * bound)
    k, left = best_factors(rows, g)
    if left <= bound and (cause := _terms_by_row(it, plain, forward, padded, k, bound)):
        return [cause]
    closest: list[tuple[float, Cause, Forward, Padded]] = []
    # those of which the head's gradient alone tells that they are not it
    farther: list[tuple[float, Cause, Forward, Padded]] = []
    residuals: list[float] = []
    stopped: list[int] = []  # after so many forward passes

    on_policy = replace(padded, old=None)
    still = padded.old is None or bool(
        ((plain.lp - padded.old) * padded.mask).abs().max() < 1e-6
    )
    own_old = NO_CAUSE
    if not still:
        own_old = measured.RATIO_ALWAYS_ONE.cause()

    def makes(its: Tensor) -> bool:
        """Whether this gradient by rows, clipped as the goal says, is the one that was
        found.
        """
        return near(it.found, clipped(its.sum(0), goal.clip), bound)

    def reads(
        cause: Cause,
        variant: Forward,
        of: Forward | None = None,
        whole: Tensor | None = None,
        batch: Padded = padded,
    ) -> list[Any]:
        """What the token weights of this forward pass say, where they make g; of: the
        pass whose tokens they are; batch: the rows as the step has them.
        """
        terms = plain if forward is (of or variant) else Terms.of(goal, variant, batch)
        policy = terms.without(g, "H", "Z")
        reading = read(variant, policy)
        residuals.append(reading.residual)
        if reading.residual > span:
            return []
        if cause and (term := _terms_differ(terms, variant, batch, g, bound)):
            return [join_causes(cause, term)]

        def makes_it(weights: list[Tensor]) -> bool:
            return reproduces(gradient(variant, weights), policy, 2 * span)

        return _said(
            of or variant, batch, reading, terms, bound, cause, makes_it, whole, only
        )

    def among(variants: Callable[[Forward], Iterator[Variant]]) -> list[Any]:
        """What the first forward pass that fits says.

        A loop that makes its old log-probabilities itself makes them with its fault, so
        r is 1: each quick pass is tried with the old log-probabilities of the rows, and
        with r = 1.
        """
        batches = [(padded, NO_CAUSE)]
        if variants is quick:
            batches.append((on_policy, own_old))
        for number, (fault, variant) in enumerate(tried(forward, variants, only)):
            if number == MOST:
                stopped.append(number)
                return []
            for batch, old in batches:
                cause = join_causes(fault, old)
                if (least := _least_residual(goal, variant, batch, g)) > 2 * span:
                    farther.append((least, cause, variant, batch))
                    if (
                        variants is others
                        and not (goal.entropy_coef or goal.z_loss_coef)
                        and head_residual(variant, g) <= 2 * span
                        and (said := reads(cause, variant, batch=batch))
                    ):
                        return said
                    continue
                try:
                    rows_of_variant = expected(goal, variant, batch)
                except (
                    InputError
                ):  # no backward pass: of a cache that is written in place
                    break
                _, residual = best_factors(rows_of_variant, g)
                closest.append((residual, cause, variant, batch))
                if makes(rows_of_variant):
                    return [cause]
                if (
                    residual <= span
                    and not (goal.entropy_coef or goal.z_loss_coef)
                    and (said := reads(cause, variant, batch=batch))
                ):
                    rest = it.found - clipped(rows_of_variant.sum(0), goal.clip)
                    left = float(rest.norm() / it.found.norm())
                    if said == [cause] and left > 3 * bound:
                        said = [join_causes(cause, _smaller_fault(left))]
                    return said
        return []

    _, on_policy_residual = best_factors(expected(goal, forward, on_policy), g)
    said = (min(left, on_policy_residual) > span and among(quick)) or reads(
        NO_CAUSE, forward, None, k if left <= span else None
    )
    after = _without_other_responses(forward)
    longer = [
        replace(r, response=r.response + x[:AFTER])
        for r, x in zip(forward.rows, after, strict=False)
    ]
    for z in _padding_logits(forward, longer) if any(after) and not said else []:
        said = said or reads(
            NO_CAUSE, Forward(forward.model, longer, goal.temperature, z), forward
        )
    said = said or among(others)
    for _, cause, variant, batch in sorted(farther, key=lambda x: x[0])[: 2 * READ]:
        if not said:
            with suppress(InputError):
                _, residual = best_factors(expected(goal, variant, batch), g)
                closest.append((residual, cause, variant, batch))
    for _, cause, variant, batch in sorted(closest, key=lambda x: x[0])[:READ]:
        said = said or reads(cause, variant, batch=batch)
    if said:
        return said
    bonus = read(forward, g, [plain.each["H"], plain.each["Z"]])
    if bonus.residual <= span:
        coefficients = ", ".join(f"{-x:.4g}" for x in bonus.extra)
        return [measured.ENTROPY_BONUS_OR_Z_LOSS.cause(coefficients=coefficients)]
    left_over = f"{residuals[0]:.2g} of it is left"
    words = (
        f"{UNKNOWN}; no weights of these tokens give the gradient: {left_over}, so "
        f"the forward pass differs, or other tokens train{_of_router(forward.model)}"
    )
    if stopped:
        words += f"; the search stopped after {stopped[0]} forward passes"
    return [Cause(words)]


def _least_residual(
    goal: Goal, forward: Forward, padded: Padded, gradient: Tensor
) -> float:
    """At least so much of the gradient is left by any factors of the rows: what is left
    of its entries that are the head's. 0 where the model has no head of its own.
    """
    try:
        head_rows = forward.of_head(
            goal.loss(goal.parts(*forward.statistics(), padded))
        )
    except InputError:
        return 0.0
    model = forward.model
    if (
        head_rows is None
        or not isinstance(model, TorchModel)
        or not head_rows.isfinite().all()
    ):
        return 0.0
    parts = model.split(gradient)
    found = torch.cat([parts[n] for n in model.head_names])
    if len(found) != head_rows.shape[1]:  # projections of the gradient alone are known
        return 0.0
    size = float(found.norm())
    if size:
        return best_factors(head_rows, found)[1] * size / float(gradient.norm())
    return 0.0


def _of_router(model: Model) -> str:
    """What a model with experts may add to its loss, in words; "" for any other."""
    if not isinstance(model, TorchModel):
        return ""
    coefficient = getattr(text_config(model.net), "router_aux_loss_coef", 0)
    if not coefficient:
        return ""
    return (
        f", or the router's auxiliary loss is in it (router_aux_loss_coef = {coefficient:g}): "
        "check_step does not compare that loss, so set it to 0 for the check"
    )


TERMS = {
    "J": "the policy term",
    "KL": "the KL term",
    "H": "the entropy bonus",
    "Z": "the z-loss",
}
TERM_IDS = {"J": "policy-term", "KL": "kl", "H": "entropy-bonus", "Z": "z-loss"}


@dataclass
class Terms:
    """The gradients of J, KL, H and Z, each of its own, negative as a loss has them."""

    goal: Goal
    each: dict[str, Tensor]
    slope: Tensor  # d(J - β KL)/dlp
    lp: Tensor

    @classmethod
    def of(cls, goal: Goal, forward: Forward, padded: Padded) -> "Terms":
        """Differentiate each term of the goal on these rows.

        Args:
            goal: the objective with its numbers.
            forward: the reference's forward pass over the rows.
            padded: the rows, padded.

        Returns:
            The terms.
        """
        lp, H, Z = forward.statistics()
        parts = goal.parts(lp, H, Z, padded)
        c = goal.coefficients
        each = {k: forward.by_row(-v).sum(0) for k, v in parts.items()}
        policy = parts["J"] + (c["KL"] * parts["KL"] if "KL" in parts else 0)
        (slope,) = torch.autograd.grad(goal.scale * policy, lp, retain_graph=True)
        return cls(goal, each, slope.detach(), lp.detach())

    def without(self, gradient: Tensor, *names: str) -> Tensor:
        """The gradient without these terms, as the goal has them.

        Args:
            gradient: a gradient, [P].
            *names: J, KL, H or Z.
        """
        c = self.goal.coefficients
        return gradient - self.goal.scale * sum(
            c[k] * self.each[k] for k in names if k in self.each
        )

    def _constant(self, fitted: float) -> float:
        """The constant factor of a gradient: the one that fits where an acting clip of
        the norm hides it, and 1 elsewhere.
        """
        return fitted if self.goal.clip is not None and fitted > 0 else 1.0

    def total(self) -> Tensor:
        """The gradient of the goal, all terms together, before a clip, [P]."""
        c = self.goal.coefficients
        return self.goal.scale * sum(
            (c[k] * each for k, each in self.each.items()), torch.zeros(())
        )

    def in_its_units(self, gradient: Tensor, added: Tensor) -> Tensor:
        """The gradient without the factor that an acting clip of the norm gave it, if it is the
        goal's gradient and some of another one.

        Args:
            gradient: the gradient that was found, [P].
            added: the other gradient, [P].
        """
        terms = torch.stack([self.total(), added], 1)
        x = torch.linalg.lstsq(terms, gradient[:, None], driver="gelsd").solution
        return gradient / self._constant(float(x[0]))

    def coefficients(self, gradient: Tensor, bound: float) -> Cause:
        """The coefficients at which the terms of the objective add up to the gradient, where they
        do.

        Args:
            gradient: the gradient that was found, [P].
            bound: the relative error that is allowed.
        """
        c = self.goal.coefficients
        names = [*self.each]
        G = torch.stack([self.each[k] for k in names], 1)
        y = gradient / self.goal.scale
        size = G.norm(dim=0).clamp(min=1e-300)
        x = (
            torch.linalg.lstsq(G / size, y[:, None], driver="gelsd").solution[:, 0]
            / size
        )
        rest = (G @ x - y).norm() / y.norm()
        times = self._constant(float(x[0]))
        if rest > bound or abs(x[0] / times - 1) > 1e-3:
            return NO_CAUSE
        x = x / times
        size = size * times
        said = []
        for k, v, part in zip(names, x.tolist(), size / y.norm(), strict=True):
            if abs(v - c[k]) * part <= 2 * bound:
                continue
            if abs(v) * part <= 2 * bound and abs(v) < 0.1 * abs(c[k]):
                words = f"{TERMS[k]} has no gradient"
                said.append(Cause(words, (f"{TERM_IDS[k]}-missing",)))
                continue
            sign = -1 if k in ("KL", "Z") else 1
            words = (
                f"the coefficient of {TERMS[k]} is {sign * v + 0.0:.4g}, "
                f"not {sign * c[k] + 0.0:.4g}"
            )
            said.append(Cause(words, (f"other-coefficient-of-{TERM_IDS[k]}",)))
        return join_causes(*said)


def _smaller_fault(left: float) -> Cause:
    """The cause of what one fault leaves of a gradient."""
    return Cause(f"{left:.2g} of the gradient is left, by another and smaller fault")


def _terms_differ(
    terms: Terms, forward: Forward, padded: Padded, gradient: Tensor, bound: float
) -> Cause:
    """Another coefficient of a term, or a term that is added, where it makes the gradient."""
    return terms.coefficients(gradient, bound) or _penalty(
        terms.goal, forward, padded, terms, gradient, bound
    )


def _penalty(
    goal: Goal,
    forward: Forward,
    padded: Padded,
    plain: Terms,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """A KL term that the goal lacks, with its coefficient, where that makes the
    difference. It is of the old policy, or of any: k1 has one gradient for all.
    """
    if (
        padded.old is None
        or float(((plain.lp - padded.old) * padded.mask).abs().max()) < 1e-6
    ):
        return NO_CAUSE
    for name in ESTIMATORS:
        of_old = replace(goal, o=replace(goal.o, kl=name))
        parts = of_old.parts(*forward.statistics(), replace(padded, ref=padded.old))
        # to the gradient of the loss
        added = goal.scale * forward.by_row(parts["KL"]).sum(0)
        in_units = plain.in_its_units(gradient, added)
        rest = in_units - plain.total()
        beta = float(rest @ added / (added @ added).clamp(min=1e-300))
        if beta > 0 and near(rest, beta * added, _share(bound, in_units, rest)):
            whose = "" if name == "k1" else " of the old policy"
            return measured.KL_NOT_OF_OBJECTIVE.cause(
                whose=whose, estimator=name, beta=beta
            )
    return NO_CAUSE


def _share(bound: float, gradient: Tensor, rest: Tensor) -> float:
    """The error that is allowed of a part of the gradient, relative to that part.

    At most a tenth: a part hardly larger than the bound would fit any term.
    """
    return min(0.1, bound * float(gradient.norm() / rest.norm()))


def _term_by_row(
    goal: Goal,
    forward: Forward,
    padded: Padded,
    plain: Terms,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Whether the KL term, or the bonus, is right up to one factor per response, and
    the aggregation of that.
    """
    c = goal.coefficients
    n = len(forward.rows)
    for key in ("H", "KL"):
        name = TERMS[key]
        id = TERM_IDS[key]
        if not c[key]:
            continue
        rest = plain.without(gradient, *(k for k in c if k != key))
        cold = Forward(forward.model, forward.rows, 1.0, forward.z)
        other = (
            cold.by_row(-goal.parts(*cold.statistics(), padded)[key]).sum(0)
            * goal.scale
            * c[key]
        )
        if near(rest, other, _share(bound, gradient, rest)):
            words = f"{name} is taken at temperature 1"
            return Cause(words, (f"{id}-at-temperature-1",))
        if key == "H" and (
            cause := _over_prompts(goal, forward, padded, rest, gradient, bound)
        ):
            return cause
        rows = forward.by_row(
            -n * goal.parts(*forward.statistics(), padded, "seq-mean-token-sum")[key]
        )
        k, residual = best_factors(rows, rest)
        if residual * rest.norm() <= bound * gradient.norm():
            times = goal.scale * c[key]
            known = factor_words(goal, forward.rows, padded, k / times, [], 1e-2)
            if (
                known
                and known[0]
                and (rest - times * known[1] @ rows).norm()
                <= 2 * bound * gradient.norm()
            ):
                ids = tuple(f"{id}-{id_}" for id_ in known[0].ids)
                return Cause(f"{name}: {known[0]}", ids)
            words = f"{name}: one factor a response that no known aggregation has"
            return Cause(words, (f"{id}-by-unknown-aggregation",))
    return NO_CAUSE


def _over_prompts(
    goal: Goal,
    forward: Forward,
    padded: Padded,
    rest: Tensor,
    gradient: Tensor,
    bound: float,
) -> Cause:
    """Whether the entropy bonus counts the tokens of prompts, and masked ones, too."""
    with torch.enable_grad():
        entropy = torch.zeros(())
        for i in range(len(forward.rows)):
            logp = (forward.logits(i, 1) / forward.temperature).log_softmax(-1)
            entropy = entropy - (logp.exp() * logp).sum()
    entropy_gradient = forward.by_row(-goal.scale * goal.entropy_coef * entropy).sum(0)
    counts = {
        "averaged": sum(len(row.ids) - 1 for row in forward.rows),
        "summed": int(padded.mask.sum()),
    }
    for how, n in counts.items():
        if near(rest, entropy_gradient / n, _share(bound, gradient, rest)):
            return measured.ENTROPY_BONUS_OVER_PROMPTS.cause(how=how)
    return NO_CAUSE


def _terms_by_row(
    it: Compared,
    plain: Terms,
    forward: Forward,
    padded: Padded,
    k: Tensor,
    bound: float,
) -> Cause:
    """The aggregation that the policy term and the bonus or z-loss share, where all of
    them have one factor a response, and it is the gradient's.

    Without such a term the weights of the tokens show it.

    Args:
        it: the gradient beside the right one.
        plain: the terms of the right forward pass.
        forward: the right forward pass.
        padded: its rows.
        k: the factors that fit best, [B].
        bound: the relative error that is allowed.
    """
    goal = it.goal
    if not (goal.entropy_coef or goal.z_loss_coef):
        return NO_CAUSE
    right = right_factors(goal, padded)
    dead = [i for i, x in enumerate(k) if abs(x) <= 1e-4 * k.abs().max()]
    weights_of_rows = (k * right).where(padded.mask.any(1), torch.nan)
    weights_of_rows[dead] = torch.nan
    moving = int((padded.mask & (plain.slope != 0)).sum())
    known = factor_words(
        goal, forward.rows, padded, weights_of_rows, dead, 1e-4, moving=moving
    )
    if known is None:
        return NO_CAUSE
    because, factor = known
    parts = (factor / right).where(~weights_of_rows.isnan(), 0)
    if not near(it.found, clipped(parts @ it.rows, goal.clip), 2 * bound):
        return NO_CAUSE
    return join_causes(left_out(dead) if dead else NO_CAUSE, because)


def _without_other_responses(forward: Forward) -> list[list[int]]:
    """What was fed behind each row, up to the next row's response, whose tokens train
    as that row's own.
    """
    out = []
    for fed in forward.after:
        places = [
            (place[1] + len(q.prompt))
            for q in forward.rows
            if (place := locate([fed], q))
        ]
        out.append(fed[: min(places, default=len(fed))])
    return out


def _padding_logits(forward: Forward, longer: list[Row]) -> Iterator[list[Tensor]]:
    """Logits of the rows with the padding, or the row, that was fed behind them."""
    logits = forward.model.logits
    yield [logits(r.ids) for r in longer]
    with suppress(TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        masked = []
        for r, ids in zip(longer, forward.ids, strict=True):
            mask = torch.arange(len(r.ids))[None] < len(ids)
            masked.append(
                logits(
                    r.ids, attention_mask=mask.long(), position_ids=mask.cumsum(1) - 1
                )
            )
        yield masked


def _said(
    forward: Forward,
    padded: Padded,
    reading: TokenWeights,
    terms: Terms,
    bound: float,
    cause: Cause,
    makes_it: Callable[[list[Tensor]], bool],
    whole: Tensor | None = None,
    only: Cause = NO_CAUSE,
) -> list[Any]:
    """[cause, *more findings]: the fault of a forward pass and the weights that were
    read with it.

    Args:
        forward: the pass whose tokens the weights are of.
        padded: its rows.
        reading: the weights.
        terms: of the objective, with that forward pass.
        bound: the relative error that is allowed.
        cause: the fault of the forward pass; empty where it has none.
        makes_it: whether weights of all tokens give the gradient; where not, the fault
            that has them is not named.
        whole: the factor of each response, where the gradient is one of each.
        only: a cause that was found on other rows; only what it names is tried.
    """
    padded = padded.widened()  # what is moved by one place does not wrap around

    def grow(x: Tensor) -> Tensor:
        """As wide as the widened batch."""
        return torch.nn.functional.pad(x, (0, padded.mask.shape[1] - x.shape[-1]))

    responses = []
    prompts = []
    outside = []
    for r, x in zip(forward.rows, reading.weights, strict=True):
        p = len(r.prompt) - 1
        n = len(r.ids) - 1
        prompts.append(x[:p])
        responses.append(grow(x[p:n]))
        outside.append(x[n:])
    expected = grow(terms.slope)
    found = torch.stack(responses)
    # what the norm was before its clip is not known, so a constant factor is not either
    times = 1.0 if terms.goal.clip is None else constant_between(found, expected)
    noise = max(1e-4, 30 * reading.residual, 20 * bound)
    plain = (
        Forward(forward.model, forward.rows, 1.0, forward.z).statistics()[0].detach()
    )
    w = Tokens(
        goal=terms.goal,
        rows=forward.rows,
        b=padded,
        lp=grow(terms.lp),
        found=times * found,
        prompts=[times * x for x in prompts],
        expected=expected,
        plain=grow(plain),
        largest=times * float(torch.cat(reading.weights).nan_to_num(0).abs().max()),
        tol=noise,
        whole=None if whole is None else times * whole,
    )
    seen = observed(w)
    findings_of_weights = [
        fail("weights", what.words, want, got) for what, want, got in seen
    ]
    said = [cause]
    tail = int(sum((~w.no_weight(times * x)).sum() for x in outside))
    if tail > 0:
        said.append(measured.TOKENS_BEHIND_RESPONSES_TRAIN.cause(tokens=tail))
    prompt = any(bool((~w.no_weight(p)).any()) for p in w.prompts)
    if w.same(
        torch.where(w.here, w.found, torch.nan), torch.where(padded.mask, w.expected, 0)
    ):
        if prompt:
            said.append(PROMPTS)
    elif (named_one := named(w, only)) and makes_it(
        _of_rows(prompts, named_one[1] / times, outside, forward.rows)
    ):
        said += [PROMPTS if prompt else NO_CAUSE, named_one[0]]
    elif seen:
        said += [what for what, _, _ in seen[:3]]
    elif cause:
        said.append(OTHER_WEIGHTS)
    return [join_causes(*said) or Cause(UNKNOWN), *findings_of_weights]


def _of_rows(
    prompts: list[Tensor], responses: Tensor, beyond: list[Tensor], rows: Sequence[Row]
) -> list[Tensor]:
    """The weights of each row's tokens, one behind the other."""
    parts = zip(prompts, responses, beyond, rows, strict=True)
    return [torch.cat([p, x[: len(r.response)], y]) for p, x, y, r in parts]
