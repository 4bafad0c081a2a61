# SPDX-License-Identifier: Apache-2.0
"""Which causes of a gap are likeliest by what the file itself shows, where several share
a signature. The words of each are in words.py.

A score is no probability: it orders causes that the numbers allow. It is how usual the
cause is (USUAL) plus what the evidence adds (`_weights_of_evidence`); both were set by
hand, in one unit. A cause of score 0 or less is not named.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from upref.replay.schema import RecordedBatch
from upref.replay.undo import FEW, Columns
from upref.replay.values import is_bfloat16
from upref.replay.words import SUSPECTS

MOST_NAMED = 4  # causes of one finding
FAR = 2.0  # nats
BOTH_WAYS = 0.25  # times as many tokens far below the trainer as far above it
SIGNIFICANT = 5.0  # standard errors of a difference of means
LEAST_TOKENS = 30  # on either side of a comparison
LIKELIHOODS = 10  # parts of the tokens, in the order of their probability
LEAST_DIFFERENCE = 1e-3  # nats: below it a token does not count as different
SPARSE = 0.1  # the median of |d| over its mean, below which few tokens carry the gap
SMALL_GAP = 0.1  # nats, mean |d|: low precision makes such a gap
ONE_SIDED = 20.0  # times as many tokens above the trainer as below it
ROUNDING = 0.003  # nats
MOST_BELOW = 0.001  # of the tokens
SIDES = (0.1, 0.5)  # nats: from either on, one side is looked for

# Of each finding, how usual each of its causes is.
USUAL: dict[str, dict[str, float]] = {
    "two_policies": {
        "weights": 4.0,
        "arithmetic": 3.0,
        "settings": 2.0,
        "context": 1.8,
        "likeliest": 0.4,
        "order": 0.0,
        "penalties": 0.0,
        "temperature": 0.0,
    },
    "impossible_tokens": {
        "ids": 4.0,
        "context": 3.0,
        "arithmetic": 2.5,
        "weights": 1.6,
        "settings": 1.5,
        "order": 0.8,
        "likeliest": 0.8,
        "penalties": 0.0,
        "undrawn": 0.0,
        "temperature": 0.0,
    },
    "missing_mass": {
        "cut": 4.0,
        "weights": 2.0,
        "arithmetic": 2.0,
        "penalties": 1.5,
        "vocabulary": 1.4,
        "divided": 1.3,
        "context": 1.2,
        "likeliest": 1.0,
    },
    "cut": {"cut": 6.0, "likeliest": 3.0, "context": 2.0, "penalties": 1.0},
    "cut_or_divided": {
        "cut": 4.0,
        "likeliest": 2.0,
        "vocabulary": 2.0,
        "divided": 2.0,
        "penalties": 1.0,
    },
    "temperature": {
        "temperature": 4.0,
        "weights": 2.0,
        "context": 1.5,
        "penalties": 1.0,
    },
    "some_temperature": {
        "temperature": 4.0,
        "before_temperature": 3.0,
        "weights": 2.0,
        "context": 1.5,
        "penalties": 1.0,
    },
    "unrelated": {
        "order": 3.0,
        "ids": 2.5,
        "context": 2.0,
        "weights": 1.0,
        "penalties": 0.0,
    },
    "some_responses": {
        "rows": 2.5,
        "ids": 3.0,
        "weights": 2.5,
        "settings": 2.0,  # of a request
        "context": 1.5,
        "arithmetic": 1.0,
        "likeliest": -1.0,
    },
}
# a cause -> those whose words it has: beside it they are left out
INCLUDES: dict[str, tuple[str, ...]] = {
    "ids": ("context",),
    "penalties": ("settings",),
}


@dataclass(frozen=True)
class Evidence:
    """What the columns show beside the size of the gap.

    Args:
        repeats: whether tokens that stand earlier in their response, or in its prompt,
            have another mean difference than new ones that are as likely, and of the other
            sign, in the last half of the responses.
        stretched: whether one side is above the other on likely tokens and below it on
            rare ones, on average.
        position: whether the first and the last half of the responses have other gaps.
        sparse: whether few tokens carry the gap.
        small: whether the mean gap is one that low precision makes.
        one_sided: whether the sampler is above the trainer on nearly all tokens that
            differ.
        never_below: whether hardly any token is more likely for the trainer, by more than
            rounding: other weights raise many.
        both_ways: whether the sampler is far below the trainer about as often as far
            above it. Tokens that it drew with these probabilities do not: the mean of
            ρ is at most 1.
        certain: whether the sampler's number is 0 on most tokens that differ much.
        turns: whether the responses have several turns, or tools.
        same_ids: whether the sampler's own ids are recorded, and are the same.
        late: whether older weights sampled; None where the file does not tell.
        lags: the mean gap at the least and at the largest lag of the weights that
            sampled, in words; "" where the file does not tell.
        bfloat16: whether a column holds bfloat16 numbers.
    """

    repeats: bool
    stretched: bool
    position: bool
    sparse: bool
    small: bool
    one_sided: bool
    never_below: bool
    both_ways: bool
    certain: bool
    turns: bool
    same_ids: bool
    late: bool | None
    lags: str
    bfloat16: bool


def find_evidence(batch: RecordedBatch, c: Columns, compared: Columns) -> Evidence:
    """Measure what tells the causes of a gap apart: where it lies, on which tokens, and
    what else the file records.

    Args:
        batch: the recorded step.
        c: the columns of trainer and sampler, and the tokens whose gap is to be explained.
        compared: these columns with every token that is compared.
    """
    d = c.trained(c.log_rho)
    size = d.abs()
    far = size > FAR
    late = None
    if batch.version is not None and batch.step is not None:
        late = bool((batch.lags()[batch.mask] > 0).any())
    is_late_token = _is_in_last_half(c.mask)[c.mask]
    repeated = _stands_earlier(batch)[c.mask][is_late_token]
    likelihood = c.trained(c.trainer + c.sampler)
    bounded = d.clamp(-1, 1)  # so that one token does not outweigh a thousand
    is_far_below = d < -SIDES[0]
    share_above = float((d > ROUNDING).double().mean())
    number_far_above = int((d > FAR).sum())
    number_far_below = int((d < -FAR).sum())
    has_far_zeros = False
    if far.any():
        is_certain = c.trained(c.sampler) == 0
        has_far_zeros = float(is_certain[far].double().mean()) > 0.8
    return Evidence(
        repeats=_are_repeats_off(
            bounded[is_late_token], likelihood[is_late_token], repeated
        ),
        stretched=_has_both_signs(bounded, likelihood),
        position=_means_differ(size.clamp(max=1), is_late_token),
        sparse=bool(size.median() < SPARSE * size.mean()),
        small=bool(size.mean() < SMALL_GAP),
        one_sided=any(_is_one_sided(d, least) for least in SIDES),
        never_below=int(is_far_below.sum()) > LEAST_TOKENS and share_above < MOST_BELOW,
        both_ways=number_far_above > max(2, BOTH_WAYS * number_far_below),
        certain=has_far_zeros,
        turns=_has_turns(batch),
        same_ids=batch.sampler_ids is not None,
        late=late,
        lags="" if late is None else _gap_by_lag(batch, compared),
        bfloat16=is_bfloat16(c.trained(c.sampler)) or is_bfloat16(c.trained(c.trainer)),
    )


def _gap_by_lag(batch: RecordedBatch, compared: Columns) -> str:
    """Say how large the mean gap is, in nats, at the least and at the largest lag of
    the weights that sampled; once where these are one.
    """
    lags = batch.lags()[compared.mask]
    size = compared.trained(compared.log_rho).abs()
    words = [
        f"{float(size[lags == lag].mean()):.2g} nats at lag {int(lag)}"
        for lag in sorted({int(lags.min()), int(lags.max())})
    ]
    return f"by version, the mean gap is {' and '.join(words)}"


def _is_one_sided(d: Tensor, least: float) -> bool:
    """Return whether, of the tokens that differ by more than `least` nats, nearly all
    are more likely for the sampler than for the trainer, and at least FEW are.
    """
    above = int((d < -least).sum())
    below = int((d > least).sum())
    return above > ONE_SIDED * below and above >= FEW


def _means_differ(x: Tensor, is_one: Tensor) -> bool:
    """Return whether the mean of x [N] on some tokens is another than on the rest, by
    more than chance; False where there are fewer than LEAST_TOKENS of either.
    """
    one, other = x[is_one], x[~is_one]
    if min(len(one), len(other)) < LEAST_TOKENS:
        return False
    error = (one.var() / len(one) + other.var() / len(other)).sqrt()
    return bool((one.mean() - other.mean()).abs() > SIGNIFICANT * error)


def _less_mean_of_as_likely(x: Tensor, likelihood: Tensor) -> Tensor:
    """Return x [N] less its mean over the tokens that are about as likely (LIKELIHOODS
    equal parts): a temperature or a cut changes repeated tokens more only because they
    are more likely.
    """
    rest = x.clone()
    for part in likelihood.argsort().chunk(LIKELIHOODS):
        rest[part] -= x[part].mean()
    return rest


def _has_both_signs(d: Tensor, likelihood: Tensor) -> bool:
    """Return whether d [N] is below 0 on average in one quarter of the tokens that
    differ, ordered by their probability, and above it in another, by more than chance.
    False where a quarter has fewer than LEAST_TOKENS.

    Tokens are drawn from the sampler, so under other weights it is above the trainer on
    average whatever their probability.
    """
    differs = d.abs() > LEAST_DIFFERENCE
    quarters = d[differs][likelihood[differs].argsort()].chunk(4)
    if len(quarters) < 4 or len(quarters[-1]) < LEAST_TOKENS:
        return False
    errors = [_mean_in_errors(quarter) for quarter in quarters]
    return min(errors) < -SIGNIFICANT and max(errors) > SIGNIFICANT


def _mean_in_errors(x: Tensor) -> float:
    """Return the mean of x [N] in units of its standard error."""
    return float(x.mean() / (x.std() / len(x) ** 0.5 + 1e-12))


def _are_repeats_off(d: Tensor, likelihood: Tensor, repeated: Tensor) -> bool:
    """Return whether repeated tokens have another mean of d [N] than new ones that are
    as likely, and the other sign: a cut or a temperature, which changes what is likely
    or certain more, gives both kinds one sign.
    """
    have_other_signs = bool(d[repeated].mean() * d[~repeated].mean() < 0)
    rest = _less_mean_of_as_likely(d, likelihood)
    return have_other_signs and _means_differ(rest, repeated)


def _stands_earlier(batch: RecordedBatch) -> Tensor:
    """Return which tokens have an id that is earlier in their row too, [B, T]; ids that
    do not train count.
    """
    order = batch.ids.argsort(dim=1, stable=True)
    in_order = batch.ids.gather(1, order)
    is_same = torch.zeros_like(batch.mask)
    is_same[:, 1:] = in_order[:, 1:] == in_order[:, :-1]
    return torch.zeros_like(batch.mask).scatter(1, order, is_same)


def _is_in_last_half(mask: Tensor) -> Tensor:
    """Return which slots are in the last half of the tokens that train of their row,
    [B, T].
    """
    return mask.cumsum(1) > mask.sum(1, keepdim=True) / 2


def _has_turns(batch: RecordedBatch) -> bool:
    """Return whether the batch has several turns by the column turn, or a response of
    which a part between two others does not train.
    """
    if batch.turn is not None and len(batch.turn[batch.mask].unique()) > 1:
        return True
    starts = batch.mask[:, 1:] & ~batch.mask[:, :-1]
    number_of_parts = starts.sum(1) + batch.mask[:, 0]
    return bool((number_of_parts > 1).any())


def _weights_of_evidence(e: Evidence) -> dict[str, float]:
    """Return how much the evidence adds to the score of each cause of SUSPECTS; -100
    rules a cause out.
    """
    added = dict.fromkeys(SUSPECTS, 0.0)
    if e.repeats:
        added["penalties"] += 7
    if e.stretched:
        added["temperature"] += 8
        added["before_temperature"] += 1
    if e.position:
        added["context"] += 3
        added["ids"] += 1
    if e.sparse:
        added["ids"] += 1
        added["context"] += 0.5
    else:
        added["weights"] += 1
        added["arithmetic"] += 1
    if e.small:
        added["arithmetic"] += 1
    if e.one_sided:
        added["cut"] += 3
        added["settings"] += 2
        added["likeliest"] += 3.5
    if e.never_below:
        added["likeliest"] += 1
        added["weights"] -= 2
        added["arithmetic"] -= 2
    if e.both_ways:
        added["order"] += 5
        added["rows"] += 3
    if e.certain:
        added["undrawn"] += 6
        added["settings"] += 2
        added["penalties"] -= 100  # a grammar makes a sampler certain, and no penalty
    if e.turns:
        added["ids"] += 2
        added["context"] += 1
    if e.late:
        added["weights"] += 2
    if e.bfloat16:
        added["arithmetic"] += 2
    if e.same_ids:
        added["ids"] -= 100
    return added


def rank(finding: str, evidence: Evidence) -> list[str]:
    """Name the likeliest causes of a finding, the likeliest first.

    Args:
        finding: a key of USUAL.
        evidence: what the columns show.

    Returns:
        At most MOST_NAMED keys of words.SUSPECTS whose score is above 0. Of causes that
        share words (INCLUDES) one is named.
    """
    added = _weights_of_evidence(evidence)
    scores: Mapping[str, float] = {
        name: usual + added[name] for name, usual in USUAL[finding].items()
    }
    possible = [name for name, score in scores.items() if score > 0]
    named: list[str] = []
    said: set[str] = set()  # the named ones, and those whose words they share
    for name in sorted(possible, key=lambda name: -scores[name]):
        if name == "context" and "ids" in possible:
            name = "ids"  # whose words it shares
        if name not in said:
            named.append(name)
            said |= {name, *INCLUDES.get(name, ())}
    return named[:MOST_NAMED]


def causes_in_words(finding: str, evidence: Evidence) -> str:
    """Name the likeliest causes of a finding, each with what tells it from the others.

    Args:
        finding: a key of USUAL.
        evidence: what the columns show.

    Returns:
        "cause (how to tell); cause (how to tell)", without a full stop.
    """
    words = dict(SUSPECTS)  # name -> the cause, and how to tell it from the others
    if evidence.lags:
        # the file itself tells: its gaps by lag are in place of the advice
        cause, _ = SUSPECTS["weights"]
        words["weights"] = (cause, evidence.lags)
    named = [words[name] for name in rank(finding, evidence)]
    return "; ".join(f"{cause} ({how_to_tell})" for cause, how_to_tell in named)
