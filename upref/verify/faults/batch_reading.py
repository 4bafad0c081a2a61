# SPDX-License-Identifier: Apache-2.0
"""Known faults of losses in how they read a batch: tokens shifted or left out,
advantages changed before the loss.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref.errors import InputError
from upref.ops import mean_t
from upref.registry import REDUCE, Objective
from upref.rollouts import Rollouts, per_response
from upref.verify.factors import common_value, own_factor
from upref.verify.faults import Catalogue
from upref.verify.faults.losses import LossFault, fault, term_of
from upref.verify.measure import LossCase, unit_weights
from upref.weights.black_box import relative_error

# by its words, a number of tokens for each token: 0 where a discount is 1
POSITIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "from the first token on": lambda m: m.cumsum(1) - 1,
    "from the first column on": lambda m: torch.arange(m.shape[1]).expand(m.shape),
    "back from the last token": lambda m: m.flip(1).cumsum(1).flip(1) - 1,
    "back from the last column": lambda m: (
        torch.arange(m.shape[1]).flip(0).expand(m.shape)
    ),
    "back from column |o| - 1": lambda m: (
        m.sum(1, keepdim=True) - 1 - torch.arange(m.shape[1])
    ),
}


def _tokens_to_the_end(m: Tensor) -> Tensor:
    """Return the number of trained tokens from each token to its response's last."""
    return m.flip(1).cumsum(1).flip(1)


# Tokens that do not train because a number of theirs exceeds a limit: the id, the words
# with a place for the limit, the number of each token, and the limit as the words have it.
LEFT_OUT: tuple[
    tuple[str, str, Callable[[Rollouts], Tensor], Callable[[float], float]], ...
] = (
    (
        "late-tokens",
        "tokens behind the first {:g} of a response",
        lambda batch: batch.mask.cumsum(1),
        float,
    ),
    (
        "first-tokens",
        "the first {:g} tokens of each response",
        lambda batch: -batch.mask.cumsum(1),
        lambda x: -x - 1,
    ),
    (
        "early-tokens",
        "tokens in front of the last {:g} of a response",
        lambda batch: _tokens_to_the_end(batch.mask),
        float,
    ),
    (
        "last-tokens",
        "the last {:g} tokens of each response",
        lambda batch: -_tokens_to_the_end(batch.mask),
        lambda x: -x - 1,
    ),
    (
        "late-columns",
        "tokens behind the first {:g} columns",
        lambda batch: torch.arange(1, len(batch.mask[0]) + 1).expand(batch.mask.shape),
        float,
    ),
    (
        "long-responses",
        "responses of more than {:g} tokens",
        lambda batch: batch.mask.sum(1, keepdim=True).expand(batch.mask.shape),
        float,
    ),
    (
        "short-responses",
        "responses of fewer than {:g} tokens",
        lambda batch: -batch.mask.sum(1, keepdim=True).expand(batch.mask.shape),
        abs,
    ),
    (
        "likely-tokens",
        "tokens with a log_prob above {:g}",
        lambda batch: batch.logp,
        float,
    ),
    (
        "unlikely-tokens",
        "tokens with a log_prob below {:g}",
        lambda batch: -batch.logp,
        lambda x: -x,
    ),
)
# Tokens that a mask may lack: the id, the words, and the tokens as a mask.
LACKING: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    (
        "first-column",
        "the first column of the batch",
        lambda m: torch.arange(m.shape[1]) == 0,
    ),
    (
        "last-column",
        "the last column of the batch",
        lambda m: torch.arange(m.shape[1]) == m.shape[1] - 1,
    ),
    (
        "first-token",
        "the first token of each response",
        lambda m: m.cumsum(1) == 1,
    ),
    (
        "last-token",
        "the last token of each response",
        lambda m: m.flip(1).cumsum(1).flip(1) == 1,
    ),
    (
        "tokens-behind-hole",
        "every token behind the first masked slot of its row",
        lambda m: m & ~m.cumprod(1).bool(),
    ),
    (
        "tokens-behind-first-columns",
        "every token behind the first |o| columns of its row, |o| the response's length,",
        lambda m: m & (torch.arange(m.shape[1]) >= m.sum(1, keepdim=True)),
    ),
    (
        "responses-at-last-column",
        "every response that reaches the last column of the batch",
        lambda m: m[:, -1:].expand_as(m),
    ),
)


def left_out_id(tokens: str, counted: bool) -> str:
    """Return the id of the fault that some tokens do not train.

    Args:
        tokens: the id of the tokens, of LEFT_OUT or LACKING.
        counted: whether the denominator counts them.
    """
    return f"{tokens}-left-out-but-counted" if counted else f"{tokens}-left-out"


LARGE = 1e3  # a factor on the advantages that shows a bound on them
LONGEST = 40  # tokens of the longest response on which `left_out` measures


def moved(x: Tensor, by: int) -> Tensor:
    """Return each row moved by so many places to the right, or to the left where `by` is
    negative. Zeros fill the places that are left.
    """
    result = torch.zeros_like(x)
    if by > 0:
        result[:, by:] = x[:, :-by]
    elif by < 0:
        result[:, :by] = x[:, -by:]
    else:
        result = x.clone()
    return result


def moved_with_edge(x: Tensor, by: int) -> Tensor:
    """Return each row moved by one place to the right, or to the left where `by` is
    negative. The number at the edge stays there too.
    """
    if by > 0:
        return torch.cat([x[:, :1], x[:, :-1]], 1)
    return torch.cat([x[:, 1:], x[:, -1:]], 1)


def moved_cyclically(x: Tensor, by: int) -> Tensor:
    """Return each row moved by so many places to the right; what leaves it on one side
    comes in on the other.
    """
    return x.roll(by, 1)


def shifted(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that one argument is a token too late or too early. What its
    masked slots hold comes in at the mask's edge; or 0, where they are set to 0 before.

    Args:
        objective: the objective.
        hp: its hyperparameters.
    """
    # words, the beginning of the id, and the field of Rollouts
    arguments = [
        ("old_log_prob is", "old-log-prob", "logp_old"),
        ("the advantages are", "advantages", "adv"),
    ]
    if objective.sampler is not None:
        arguments.append(
            (
                "the sampler's log-probabilities are",
                "sampler-log-probs",
                "logp_sampler",
            )
        )
    if hp.get("beta"):
        arguments.append(("ref_log_prob is", "ref-log-prob", "logp_ref"))
    moves = (moved, moved_cyclically, moved_with_edge)
    for (by, where), move, zeros in product(
        ((1, "late"), (-1, "early")), moves, (False, True)
    ):
        moved_view = partial(_with_moved_fields, by=by, move=move, zeros=zeros)
        for what, argument_id, field in arguments:
            yield fault(
                f"{what} one token too {where}",
                "batches",
                id=f"{argument_id}-one-token-{where}",
                view=partial(moved_view, fields=[field]),
            )
        # log_prob too late is all else too early
        opposite_view = partial(_with_moved_fields, by=-by, move=move, zeros=zeros)
        yield fault(
            f"log_prob is one token too {where}",
            "batches",
            id=f"log-prob-one-token-{where}",
            view=partial(opposite_view, fields=["logp_old", "adv", "mask"]),
        )
        moved_alone = partial(_moved_mask, move=move, by=by)
        for counted in (False, True):
            words = f"the mask is one token too {where}"
            fault_id = f"mask-one-token-{where}"
            if counted:
                words += "; the denominator counts the right tokens"
                fault_id += "-but-counted"
            yield fault(
                words,
                "batches",
                id=fault_id,
                weigh=_weights_under_mask(objective, hp, moved_alone, counted),
                whole=True,
            )


def _with_moved_fields(
    batch: Rollouts,
    *,
    fields: Sequence[str],
    by: int,
    move: Callable[[Tensor, int], Tensor],
    zeros: bool,
) -> Rollouts:
    """Return the batch with these fields moved by so many tokens.

    Args:
        batch: the batch.
        fields: of Rollouts; one that the batch lacks is left out.
        by: 1 for one token too late, -1 for one too early.
        move: moves each row of a field.
        zeros: whether masked slots are set to 0 before.
    """
    values = {
        "logp_old": batch.logp_old,
        "adv": batch.adv.expand_as(batch.mask),
        "mask": batch.mask,
        "logp_ref": batch.logp_ref,
        "logp_sampler": batch.logp_sampler,
    }
    changed = {}
    for field in fields:
        x = values[field]
        if x is None:
            continue
        if zeros:
            x = torch.where(batch.mask, x, torch.zeros_like(x))
        changed[field] = move(x, by)
    return batch.but(**changed)


def _moved_mask(
    batch: Rollouts, move: Callable[[Tensor, int], Tensor], by: int
) -> Tensor:
    """Return the mask, moved by so many tokens."""
    return move(batch.mask, by)


def untrained(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the faults that the mask lacks some tokens, which the denominator counts or
    does not count.

    Args:
        objective: the objective.
        hp: its hyperparameters.
    """

    def mask_without(batch: Rollouts, tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the mask without these tokens."""
        return batch.mask & ~tokens(batch.mask)

    for (fault_id, tokens_in_words, tokens), counted in product(LACKING, (True, False)):
        though = "though" if counted else "and not"
        yield fault(
            f"{tokens_in_words} is not trained, {though} counted in the denominator",
            "batches",
            id=left_out_id(fault_id, counted),
            weigh=_weights_under_mask(
                objective, hp, partial(mask_without, tokens=tokens), counted
            ),
            whole=True,
        )


def uncounted(objective: Objective, hp: dict[str, Any]) -> Iterator[LossFault]:
    """Yield the four faults that the denominator does not count some tokens, for their
    advantage or because they have no gradient. Two of them do not train these tokens
    either.

    Args:
        objective: the objective.
        hp: its hyperparameters.
    """

    def advantages(batch: Rollouts) -> Tensor:
        """Return A of each token, [B, T]."""
        return batch.adv.expand_as(batch.mask)

    def mask_of(batch: Rollouts, tokens: Callable[[Rollouts], Tensor]) -> Tensor:
        """Return the mask of these tokens alone."""
        return batch.mask & tokens(batch)

    for fault_id, words, tokens in (
        (
            "zero-advantages-not-counted",
            "tokens with A = 0 are not counted",
            lambda batch: advantages(batch) != 0,
        ),
        (
            "not-positive-tokens-left-out",
            "tokens with A <= 0 are not trained, and not counted",
            lambda batch: advantages(batch) > 0,
        ),
        (
            "not-negative-tokens-left-out",
            "tokens with A >= 0 are not trained, and not counted",
            lambda batch: advantages(batch) < 0,
        ),
        (
            "tokens-without-gradient-not-counted",
            "tokens without a gradient, as clipped ones, are not counted",
            lambda batch: unit_weights(objective, batch, hp) != 0,
        ),
    ):
        yield fault(
            f"{words} in the denominator",
            "batches",
            id=fault_id,
            weigh=_weights_under_mask(objective, hp, partial(mask_of, tokens=tokens)),
            whole=True,
        )


def _weights_under_mask(
    objective: Objective,
    hp: dict[str, Any],
    mask: Callable[[Rollouts], Tensor],
    counted: bool = False,
) -> Callable[[Rollouts], Tensor]:
    """Return a function from a batch to the weights under another mask.

    Args:
        objective: the objective.
        hp: its hyperparameters.
        mask: from a batch to the other mask.
        counted: whether the denominator counts the tokens of the batch's own mask; if
            not, those of the other one.
    """

    def weights(batch: Rollouts) -> Tensor:
        """Return the weights under the other mask, 0 on the tokens that it lacks."""
        masked = batch.but(mask=mask(batch), totals=None)
        if counted:
            w = unit_weights(objective, batch, hp)
        else:
            factors = own_factor(objective)
            ratio_of_factors = (factors(masked) / factors(batch))[:, None]
            w = unit_weights(objective, masked, hp) * ratio_of_factors
        return torch.where(batch.mask & masked.mask, w, 0)

    return weights


def _advantages_of_tokens(batch: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the advantages of all tokens, [N], and which of them belong to the sample
    of each row: all, [B, N].
    """
    advantages = batch.adv.expand_as(batch.mask)[batch.mask]
    return advantages, advantages.new_ones(len(batch.mask), len(advantages))


def _advantages_of_slots(
    batch: Rollouts, masked_as_zero: bool
) -> tuple[Tensor, Tensor]:
    """Return the advantages of all slots, masked ones too, [B * T], and which of them
    belong to the sample of each row: all, [B, B * T].

    Args:
        batch: the batch.
        masked_as_zero: whether a masked slot counts as 0, not as what it holds.
    """
    advantages = batch.adv.expand_as(batch.mask)
    if masked_as_zero:
        advantages = torch.where(batch.mask, advantages, 0)
    slots = advantages.flatten()
    return slots, slots.new_ones(len(batch.mask), len(slots))


def _advantages_of_responses(
    batch: Rollouts, reduce: Callable[[Tensor, Tensor], Tensor], grouped: bool
) -> tuple[Tensor, Tensor]:
    """Return the advantages of all responses, [B], and which of them belong to the
    sample of each row: those of its group, or all, [B, B].

    Args:
        batch: the batch.
        reduce: from the advantages of tokens and the mask to those of responses.
        grouped: whether the sample of a row is its group.
    """
    advantages = reduce(batch.adv.expand_as(batch.mask), batch.mask)
    if grouped and batch.group is not None:
        group = batch.group
    else:
        group = torch.zeros(len(advantages))
    return advantages, torch.eq(group[:, None], group).to(advantages.dtype)


# What advantages are normalized over: the id, the words, and the function of a batch.
SAMPLES: tuple[tuple[str, str, Callable[..., tuple[Tensor, Tensor]]], ...] = (
    ("tokens", "the tokens of each batch", _advantages_of_tokens),
    *(
        (
            which,
            f"the responses of each {which}",
            partial(_advantages_of_responses, reduce=reduce, grouped=which == "group"),
        )
        for reduce, which in product((per_response, mean_t), ("batch", "group"))
    ),
    (
        "slots",
        "all slots of each batch: masked ones count",
        partial(_advantages_of_slots, masked_as_zero=False),
    ),
    (
        "slots",
        "all slots of each batch: masked ones count, as 0",
        partial(_advantages_of_slots, masked_as_zero=True),
    ),
)
# whether advantages are centered and divided: the id, and the words
NORMALIZATIONS = {
    (True, True): ("whitened", "whitened again"),
    (False, True): ("divided", "divided by their standard deviation"),
    (True, False): ("centered", "centered again"),
}


def renormalized() -> Iterator[LossFault]:
    """Yield the faults that the advantages are centered, or divided by their standard
    deviation, once more. The standard deviation has each usual ddof and eps, and eps
    stands beside it or under its root.
    """

    def view(
        batch: Rollouts,
        sample: Callable[[Rollouts], tuple[Tensor, Tensor]],
        center: bool,
        divide: bool,
        ddof: int,
        eps: float,
        eps_under_root: bool,
    ) -> Rollouts:
        """Return the batch with advantages that are normalized over a sample."""
        advantages, belongs = sample(batch)
        count = belongs.sum(1, keepdim=True)
        mean = (belongs @ advantages)[:, None] / count
        variance = (belongs @ advantages**2)[:, None] / count - mean**2
        normalized = batch.adv - mean if center else batch.adv
        if divide:
            variance = variance * count / (count - ddof)
            if eps_under_root:
                std = (variance + eps).clamp(min=0).sqrt()
            else:
                std = variance.clamp(min=0).sqrt() + eps
            normalized = normalized / std.nan_to_num()
        return batch.but(adv=normalized)

    for (sample_id, over, sample), ((center, divide), (step_id, how)) in product(
        SAMPLES, NORMALIZATIONS.items()
    ):
        if divide:
            forms = product((0, 1), (1e-8, 1e-6, 1e-5, 1e-4), (False, True))
        else:
            forms = product((0,), (0.0,), (False,))
        for ddof, eps, eps_under_root in forms:
            yield fault(
                f"the advantages are {how}, over {over}",
                "advantage",
                id=f"advantages-{step_id}-over-{sample_id}",
                view=partial(
                    view,
                    sample=sample,
                    center=center,
                    divide=divide,
                    ddof=ddof,
                    eps=eps,
                    eps_under_root=eps_under_root,
                ),
                whole=True,
            )


def reading_faults(
    objective: Objective, hp: dict[str, Any], bounds: list[float]
) -> Iterator[LossFault]:
    """Yield the faults of this file that need no measurement of the loss.

    Args:
        objective: the objective.
        hp: its hyperparameters.
        bounds: not read; every catalogue of losses takes them.
    """
    yield from untrained(objective, hp)
    yield from uncounted(objective, hp)
    yield from shifted(objective, hp)
    yield from renormalized()
    if objective.level == "custom" and "entropy" in objective.reads:
        yield fault(
            "the entropies of all responses of the batch are compared, not those of one response",
            "advantage",
            id="entropies-of-batch",
            weigh=partial(_weights_as_one_response, objective, hp),
            whole=True,
        )


def _weights_as_one_response(
    objective: Objective, hp: dict[str, Any], batch: Rollouts
) -> Tensor:
    """Return the weights of the tokens where all of them are one response, [B, T]."""

    def in_one_row(_field: str, x: Tensor) -> Tensor:
        """Return a field with all tokens in one row, [1, B T]."""
        return x.expand_as(batch.mask).reshape(1, -1)

    one_response = batch.but(group=None, totals=None).map(in_one_row)
    return unit_weights(objective, one_response, hp).reshape(batch.mask.shape)


CATALOGUE = Catalogue("losses", reading_faults)


def _length_of_response(m: Tensor) -> Tensor:
    """Return the number of trained tokens of each token's response, [B, T]."""
    return m.sum(1, keepdim=True).double().expand(m.shape)


def _slope_of_bonus(batch: Rollouts) -> Tensor:
    """Return the derivative of -π log π by log π of each token."""
    return torch.where(batch.mask, -batch.logp.exp() * (1 + batch.logp), 0)


def reweighted(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults with a number that is measured on policy: a factor on A by its
    sign, by the length of the response or by the position of the token; a bound on A; a
    number that is added to A; a factor on log-probabilities; a bonus. The number is
    fitted, so that a fault may be yielded that the loss does not have.

    Args:
        case: the loss and its objective.
    """
    batch = case.on_policy()
    found = case.weights(batch)
    expected = case.expected(batch)
    use = batch.mask & (batch.adv.expand_as(batch.mask) != 0) & found.isfinite()
    ratio = found / expected
    yield from _factors_by_sign(batch, ratio, use)
    if (ratio[use] > 0).all() and use.any():
        yield from _factors_by_length_or_position(batch, ratio, use)
    yield clipped(case)
    if constant := common_value((found - expected)[batch.mask]):
        yield fault(
            f"{constant:.5g} is added to every advantage",
            "advantage",
            id="constant-added-to-advantages",
            view=lambda batch: batch.but(adv=batch.adv + constant),
        )
    # where π_old + added divides, a weight is π_old / (π_old + added) times the right one
    added = common_value(((1 / ratio - 1) * batch.logp_old.exp())[use])
    if added is not None and added > 0:
        yield _added_to_old_probability(float(f"{added:.6g}"))
    # at r = 1 the derivative of exp(k log r) by log π_θ is k
    multiple = common_value(ratio[use]) if _has_ratio(case, batch) else None
    if multiple is not None and multiple > 0 and not math.isclose(multiple, 1):
        yield _factor_on_log_ratio(case, multiple)
    positive = use & (ratio > 0)
    if positive.sum() > 2:
        slope = _slope(batch.logp[positive], ratio[positive].log())
        yield from _factors_on_log_probs(case, slope)

    def weights_without_bonus(batch: Rollouts) -> Tensor:
        """Return the objective's weights."""
        return unit_weights(case.objective, batch, case.hp)

    of_bonus = _slope_of_bonus(batch)
    rest = found - weights_without_bonus(batch)
    # the coefficient of the bonus, by least squares
    c = float((rest * of_bonus).nan_to_num().sum() / (of_bonus**2).sum())
    yield fault(
        f"{c:.5g} times -π log π of the sampled token is added to J, which is not the entropy",
        "term",
        id="sampled-entropy-bonus",
        weigh=lambda batch: weights_without_bonus(batch) + c * _slope_of_bonus(batch),
    )


def _with_factor(batch: Rollouts, factor: Callable[[Rollouts], Tensor]) -> Rollouts:
    """Return the batch with each advantage times a factor."""
    return batch.but(adv=batch.adv * factor(batch))


def _factors_by_sign(
    batch: Rollouts, ratio: Tensor, use: Tensor
) -> Iterator[LossFault]:
    """Yield the fault that each sign of A has a factor of its own.

    Args:
        batch: a batch on policy.
        ratio: the weights found over those expected, [B, T].
        use: the tokens that are compared, [B, T].
    """
    A = batch.adv.expand_as(batch.mask)
    positive = common_value(ratio[use & (A > 0)])
    negative = common_value(ratio[use & (A < 0)])
    if not positive or not negative or abs(positive - negative) <= 1e-5:
        return
    words = [
        f"{factor:.5g} times what it should be where A {sign} 0"
        for factor, sign in ((positive, ">"), (negative, "<"))
        if abs(factor - 1) > 1e-5
    ]
    yield fault(
        f"every weight is {' and '.join(words)}",
        "advantage",
        id="weights-scaled-by-sign",
        view=partial(
            _with_factor,
            factor=lambda batch: torch.where(batch.adv > 0, positive, negative),
        ),
    )


def _factors_by_length_or_position(
    batch: Rollouts, ratio: Tensor, use: Tensor
) -> Iterator[LossFault]:
    """Yield the faults that A is multiplied by a power of the length of its response,
    or discounted by the position of its token. The exponent and the discount are fitted
    to the weights.

    Args:
        batch: a batch on policy.
        ratio: the weights found over those expected, [B, T], above 0.
        use: the tokens that are compared, [B, T].
    """
    log_ratio = ratio[use].log()
    power = _slope(_length_of_response(batch.mask)[use].log(), log_ratio)
    yield fault(
        f"every weight is multiplied by |o|^{power:.4g}, |o| its response's length",
        "advantage",
        id="weights-times-power-of-length",
        view=partial(
            _with_factor,
            factor=lambda batch: _length_of_response(batch.mask) ** power,
        ),
    )
    for where, position in POSITIONS.items():
        log_gamma = _slope(position(batch.mask)[use].double(), log_ratio)
        gamma = float(torch.tensor(log_gamma).exp())
        yield fault(
            f"A is discounted by {gamma:.6g} a token, {where}",
            "advantage",
            id="advantages-discounted",
            view=partial(_discounted, gamma=gamma, position=position),
        )


def _discounted(
    batch: Rollouts, gamma: float, position: Callable[[Tensor], Tensor]
) -> Rollouts:
    """Return the batch with each advantage times gamma to the power of a position."""
    return batch.but(adv=batch.adv * gamma ** position(batch.mask).double())


def _added_to_old_probability(added: float) -> LossFault:
    """Make the fault that a number is added to π_old, by which the ratio is divided."""
    return fault(
        f"{added:.6g} is added to π_old in the ratio: rare tokens lose their gradient",
        "ratio",
        id="number-added-to-old-probability",
        view=lambda batch: batch.but(logp_old=(batch.logp_old.exp() + added).log()),
    )


def _has_ratio(case: LossCase, batch: Rollouts) -> bool:
    """Return whether the objective's weights on a batch change where every π_old is a
    little smaller.
    """
    older = batch.but(logp_old=batch.logp_old - 0.05)
    weights = [unit_weights(case.objective, x, case.hp) for x in (batch, older)]
    return not torch.equal(*weights)


def _factor_on_log_ratio(case: LossCase, multiple: float) -> LossFault:
    """Make the fault that log r is multiplied by a factor."""
    j = term_of(case.objective, case.hp)
    return fault(
        f"log r is multiplied by {multiple:.5g}, as by one over a temperature",
        "ratio",
        id="log-ratio-scaled",
        J=lambda lp, old, A, m: j(old + multiple * (lp - old), old, A, m),
    )


def _factors_on_log_probs(case: LossCase, slope: float) -> Iterator[LossFault]:
    """Yield the faults that one of the two log-probabilities is multiplied by a factor.

    Args:
        case: the loss and its objective.
        slope: of the logarithm of found over expected weights, by log π.
    """
    j = term_of(case.objective, case.hp)
    as_by = "as by one over a temperature"
    yield fault(
        f"log_prob is multiplied by {1 + slope:.5g}, {as_by}, and old_log_prob is not",
        "ratio",
        id="log-prob-scaled",
        J=lambda lp, old, A, m: j(lp + slope * lp, old, A, m),
    )
    yield fault(
        f"old_log_prob is multiplied by {1 - slope:.5g}, {as_by}, and log_prob is not",
        "ratio",
        id="old-log-prob-scaled",
        view=lambda batch: batch.but(logp_old=batch.logp_old - slope * batch.logp_old),
    )


def clipped(case: LossCase, times: float = 1.0) -> LossFault:
    """Make the fault that advantages are clipped to the largest weight found on policy.
    The bound is infinite if no advantage of the batch is clipped, and 0 if the loss refuses
    the batch.

    Args:
        case: the loss and its objective.
        times: a factor on the advantages of the batch; a large one shows a large bound.
    """
    batch = case.on_policy()
    advantages = times * batch.adv
    bound = 0.0
    with contextlib.suppress(InputError):  # it refuses such advantages
        weights = case.weights(batch.but(adv=advantages))
        bound = float(weights.nan_to_num().abs().max())
    if bound > 0.999 * float(advantages[batch.mask].abs().max()):
        bound = math.inf  # nothing is clipped there
    return fault(
        f"advantages are clipped to ±{bound:.6g}",
        "advantage",
        id="advantages-clipped",
        view=lambda batch: batch.but(adv=batch.adv.clamp(-bound, bound)),
    )


def left_out(case: LossCase, batch: Rollouts | None = None) -> Iterator[LossFault]:
    """Yield the faults that tokens beyond a limit do not train: a limit on a position,
    a length or a log-probability. It must separate the tokens with a weight from those
    without one; nothing is yielded where none does, or where the loss refuses the batch.

    Args:
        case: the loss and its objective.
        batch: on which the limit is measured; None: on responses of 1 to 40 tokens.
    """
    if batch is None:
        batch = _short_responses(case)
    try:
        found = case.weights(batch)
        should_train = batch.mask & (case.expected(batch) != 0)
    except InputError:  # it refuses such a batch
        return
    yield from _left_out_beyond(case, batch, found, should_train)


def _short_responses(case: LossCase) -> Rollouts:
    """Return responses of 1 to 40 tokens, on policy, with A = -1 and A = 1 in turn. Their
    log-probabilities are spread from -6 to 0.
    """
    n = torch.arange(1, LONGEST + 1, dtype=torch.float64)[:, None]  # of a row's tokens
    # fractional parts of multiples of roots follow no pattern
    lp = -6 * (n * n.T.sqrt() % 1) - 0.01
    zeros = torch.zeros_like(lp)
    A = (-1.0) ** n + zeros
    entropy = 1 + n / LONGEST + zeros
    return case.ready(Rollouts(lp, lp, A, n.T <= n, entropy=entropy))


def _left_out_beyond(
    case: LossCase, batch: Rollouts, found: Tensor, should_train: Tensor
) -> Iterator[LossFault]:
    """Yield the faults of `left_out`, from the weights on a batch.

    Args:
        case: the loss and its objective.
        batch: the batch.
        found: the loss's weights on it, [B, T].
        should_train: the tokens that have a weight in the objective, [B, T].
    """

    def mask_within(
        batch: Rollouts, number: Callable[[Rollouts], Tensor], limit: float
    ) -> Tensor:
        """Return the mask of the tokens whose number is at most the limit."""
        return batch.mask & (number(batch) <= limit)

    for fault_id, words, number, limit_in_words in LEFT_OUT:
        numbers = number(batch)
        of_left_out = numbers[should_train & (found == 0)]
        of_trained = numbers[should_train & (found != 0)]
        if not len(of_left_out) or not len(of_trained):
            continue
        limit = between(float(of_trained.max()), float(of_left_out.min()))
        if limit is None:
            continue
        tokens = words.format(limit_in_words(limit))
        mask = partial(mask_within, number=number, limit=limit)
        for counted in (True, False):
            though = "though" if counted else "and not"
            yield fault(
                f"{tokens} are not trained, {though} counted in the denominator",
                "batches",
                id=left_out_id(fault_id, counted),
                weigh=_weights_under_mask(case.objective, case.hp, mask, counted),
                whole=True,
            )


FLOORS = np.linspace(-1, -80, 80)  # log-probabilities on which `floored` measures
HALVINGS = 50  # of an interval of log-probabilities, or of log-ratios


def floored(case: LossCase) -> Iterator[LossFault]:
    """Yield the faults that log-probabilities, of π_θ alone or of both policies, are at
    least a number. It is measured on policy; nothing is yielded if no rare token loses its
    gradient there.

    Args:
        case: the loss and its objective.
    """

    def has_lost_gradient(log_probs: np.ndarray) -> np.ndarray:
        """Return which tokens of these log-probabilities should have a weight and have
        none.
        """
        lp = torch.as_tensor(log_probs)[:, None]
        ones = torch.ones_like(lp)
        batch = case.ready(
            Rollouts(lp, lp, ones, ones.bool(), logp_ref=lp, entropy=ones)
        )
        return ((case.weights(batch) == 0) & (case.expected(batch) != 0))[:, 0].numpy()

    with contextlib.suppress(InputError):  # it refuses such a batch
        is_lost = has_lost_gradient(FLOORS)
        if not is_lost.any() or is_lost[0]:
            return
        first = int(is_lost.argmax())
        floor = bisected(
            lambda lp: bool(has_lost_gradient(np.array([lp]))[0]),
            FLOORS[first - 1],
            FLOORS[first],
        )
        yield from _floor_faults(case, float(f"{floor:.6g}"))


def bisected(holds: Callable[[float], bool], no: float, yes: float) -> float:
    """Find by bisection where a condition begins to hold.

    Args:
        holds: the condition on a number.
        no: a number for which it does not hold.
        yes: a number for which it holds, above or below the other one.

    Returns:
        The number next to the turn for which it holds.
    """
    for _ in range(HALVINGS):
        middle = (no + yes) / 2
        if holds(middle):
            yes = middle
        else:
            no = middle
    return yes


def _floor_faults(case: LossCase, low: float) -> Iterator[LossFault]:
    """Yield the faults that log-probabilities below a number are set to it, without
    those that the loss cannot be.

    Args:
        case: the loss and its objective.
        low: the number.
    """
    term = term_of(case.objective, case.hp)

    def of_both(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        """Return J where both policies have the floor."""
        return term(lp.clamp(min=low), old.clamp(min=low), A, m)

    def of_current(lp: Tensor, old: Tensor, A: Tensor, m: Tensor) -> Tensor:
        """Return J where π_θ alone has the floor."""
        return term(lp.clamp(min=low), old, A, m)

    if case.objective.level in REDUCE:
        # the ratios of the other tokens show that the token is not left out
        words_for_current = f"log_prob below {low:g} is set to it"
    else:
        words_for_current = (
            f"tokens with a log_prob below {low:g} have no gradient: they are left out, "
            "or log_prob is set to it"
        )

    def of_current_where_positive(
        lp: Tensor, old: Tensor, A: Tensor, m: Tensor
    ) -> Tensor:
        """Return J where π_θ has the floor on tokens of A > 0 alone."""
        return torch.where(A > 0, of_current(lp, old, A, m), term(lp, old, A, m))

    floors = [
        (
            "log-probs-floored",
            f"log-probabilities below {low:g} are set to it",
            of_both,
        ),
        ("log-prob-floored", words_for_current, of_current),
    ]
    if case.objective.level == "token":
        words = f"{words_for_current}, where A > 0 alone"
        floors.append(("log-prob-floored-a-positive", words, of_current_where_positive))
    for fault_id, words, J in floors:
        floor_fault = fault(words, "rounding", id=fault_id, J=J)
        if _fits_across_floor(case, floor_fault, low):
            yield floor_fault


DISTANCES_FROM_FLOOR = (0.02, 0.05, 1.0)  # of log-probabilities


def _fits_across_floor(case: LossCase, one: LossFault, low: float) -> bool:
    """Return whether a fault has the weights of the loss where log π_θ is above this
    number and log π_old is below it.
    """
    steps = torch.tensor(DISTANCES_FROM_FLOOR, dtype=torch.float64)
    above, below, A = torch.cartesian_prod(
        steps, steps, torch.tensor([1.0, -1.0], dtype=torch.float64)
    ).T[..., None]
    lp = low + above
    old = low - below
    ones = torch.ones_like(A)
    batch = case.ready(Rollouts(lp, old, A, ones.bool(), logp_ref=lp, entropy=ones))
    errors = relative_error(
        case.weights(batch),
        one.change.weights(case.objective, case.hp, batch),
        batch.adv,
    )
    return bool((errors < 10 * case.tol).all())


def between(low: float, high: float) -> float | None:
    """Return the number with the fewest decimal places that is at least `low` and below
    `high`, or None where there is none.
    """
    for places in range(9):
        number = math.ceil(low * 10**places) / 10**places
        if low <= number < high:
            return number
    return None


def _slope(x: Tensor, y: Tensor) -> float:
    """Return the slope of the line through these points, by least squares."""
    x = x - x.mean()
    return float((x * y).sum() / (x**2).sum())
