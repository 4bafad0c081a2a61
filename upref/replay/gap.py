# SPDX-License-Identifier: Apache-2.0
"""The gap between the sampler's log-probabilities and the trainer's, and its cause.

x = log π_old by the trainer, y = log μ by the sampler, d = x - y = log ρ on every
trained token. Tokens are drawn from μ, so E[ρ] is the mass that π_old gives to the
support of μ, and E[d] = -KL(μ || π_old):

    E[ρ] = 1, E[d] <= 0     two normalized policies: rounding, stale or quantized
                            weights, other experts
    E[ρ] < 1, d <= 0        μ was cut and renormalized: top_p, top_k, min_p
    E[ρ] < 1, d of any sign such a cut, hidden by rounding or by other weights
    E[d] > 0                impossible for the distribution that sampled: the column is another one

A *signature* is such a pattern of the signs and the means of d, which several causes
may share. The *mass* is E[ρ]. The partial sums of ρ - 1 are a martingale whatever the
lengths of the responses are, so their standard error is sqrt(Σ (ρ - 1)²). A cause that
can be undone is undone: a shift, exchanged rows, a factor, a floor, tokens that were
never drawn. It is a failure where the difference vanishes with it. All else is a note:
no statistic of one column proves a cause, and a healthy sampler must never fail.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from upref.replay.findings import Checked, ReplayFinding, Severity
from upref.replay.places import find_alignment, find_exchanged_rows, find_shift
from upref.replay.schema import SAME, RecordedBatch, expect_batch
from upref.replay.suspects import USUAL, causes_in_words, find_evidence
from upref.replay.undo import Columns, words_for_long
from upref.replay.values import (
    LEAST_EQUAL,
    find_factor,
    find_floor,
    find_placeholder,
    find_sums,
    is_bfloat16,
    is_constant,
    is_one_number_a_row,
    words_for_place,
)

SIGNIFICANT = 5.0  # standard errors: 3e-7 one-sided, and a run asks thousands of times
LARGE_EXPONENT = 30.0  # e^30 stays finite in sums of squares
# bfloat16 has 8 bits: a logit of 8 is off by 0.016, and log π by a few times that in a
# deep model. Larger mean gaps are beyond rounding in the models and engines that were
# measured; smaller ones need no explanation.
ROUNDING_GAP = 0.03  # nats, mean |d|
# Rounding that is off in one direction shifts E[d] by less than this; a temperature
# shifts it by a KL of this or more.
LEAST_KL = 0.01  # nats
# |E[ρ] - 1| that a note needs which rests on it alone: a few tokens that go to other
# experts move it by less
LEAST_MASS_OFF = 0.02
ROUNDED_ABOVE = 0.05  # nats above 0, which no rounding of a probability of 1 leaves
FAR_NATS = 4.0  # nats: the trainer finds a token e^4 times less likely than the sampler
LEAST_TOKENS = 3  # tokens: fewer are no pattern
LEAST_SEPARATION = 5  # times as far off as any other response
LARGEST_SHARE_OFF = (
    0.5  # of the responses, beyond which those that are off are no exception
)
ONE_SIDED = 10  # times as many tokens below as above
# mean sign of d among likely tokens, and among rare ones: seven of eight have that sign
LEAST_AGREEMENT = 0.75
# tokens of either kind: chance makes such a mean of 20 signs with probability 0.0004
LEAST_RARE = 20


@dataclass(frozen=True, kw_only=True)
class Gap(Checked):
    """The gap of one step, over the tokens that train and that the sampler drew.

    Args:
        tokens: number of tokens compared.
        mean: mean of d = log π_old - log μ, in nats.
        mean_abs: mean of |d|.
        largest: the largest |d|.
        rho_mean, rho_se: mean of ρ = π_old/μ and its standard error.
        inverse_mean: mean of 1/ρ.
        k3: mean of ρ - 1 - log ρ, which estimates KL(μ || π_old) in nats.
        effective: (Σ ρ)² / (n Σ ρ²), the share of tokens that counts under the weights
            ρ.
        cause: the cause of the first finding; "agree" if there is none.
    """

    tokens: int
    mean: float
    mean_abs: float
    largest: float
    rho_mean: float
    rho_se: float
    inverse_mean: float
    k3: float
    effective: float
    cause: str


# takes a severity, a cause and, by name, its numbers
AddFinding = Callable[..., None]


def gap(batch: RecordedBatch) -> Gap:
    """Compare the sampler's column with the trainer's, and name the cause of a
    difference.

    Args:
        batch: with the columns sampler and old (or now). Where old is the sampler's own
            column, now is compared.

    Returns:
        The Gap of the columns without what was undone. It is false where a cause was
        undone, unless that is the note "zero"; where tokens train that the sampler did
        not draw; where each response has one number for all its tokens; and where
        numbers of the sampler are above 0. A column of zeros, a copy, and one number
        for the whole step are notes.

    Raises:
        InputError: a column is missing.
    """
    expect_batch(batch, "the sampler's gap")
    batch.require("sampler", purpose="the sampler's gap")
    if batch.now is None:
        batch.require("old", purpose="the sampler's gap")
    assert batch.sampler is not None
    findings: list[ReplayFinding] = []

    def add_finding(severity: Severity, cause: str, **numbers: Any) -> None:
        """Append a finding to `findings`; the trainer's column has its right name."""
        if numbers.get("column") == "old" and trainer is batch.now:
            numbers["column"] = "now"
        findings.append(ReplayFinding("sampler", severity, cause, numbers))

    trainer = batch.beside_sampler()
    columns = Columns(trainer, batch.sampler, batch.mask)
    compared, is_explained = _find_causes(batch, columns, add_finding)
    columns = compared
    if not is_explained:
        columns = _without_responses_off(compared, add_finding)
        _report_signatures(columns, _first_draws(batch), add_finding)
    if findings and batch.old is not None and trainer is batch.now:
        add_finding("note", "now_compared")
    findings = [_with_likely_causes(f, batch, compared, columns) for f in findings]
    return _make_gap(columns, findings)


def _with_likely_causes(
    finding: ReplayFinding, batch: RecordedBatch, compared: Columns, columns: Columns
) -> ReplayFinding:
    """Add to a finding's numbers its likeliest causes, in words, where several share
    its signature (USUAL); any other finding is returned as it is.

    Args:
        finding: one cause.
        batch: the recorded step.
        compared: the log-probabilities of trainer and sampler without what was undone.
        columns: these without the responses that alone are off.
    """
    if finding.cause not in USUAL:
        return finding
    if finding.cause == "some_responses":  # which are left out of the columns
        is_off = compared.row_distance() > ROUNDING_GAP
        columns = compared.without(~is_off[:, None])
    evidence = find_evidence(batch, columns, compared)
    causes = causes_in_words(finding.cause, evidence)
    return replace(finding, numbers=finding.numbers | {"causes": causes})


def _find_causes(
    batch: RecordedBatch, columns: Columns, add_finding: AddFinding
) -> tuple[Columns, bool]:
    """Report the causes of the gap that can be undone, or that explain all of it.

    A column of the sampler that is 0, a copy, one number, or one number in each
    response ends the search. Otherwise each cause that is found is undone before the
    next one is sought, so that several may be reported.

    Args:
        batch: the recorded step.
        columns: the log-probabilities of trainer and sampler.
        add_finding: takes a severity, a cause and its numbers.

    Returns:
        The columns without what was undone, and whether a gap that is left needs no
        further cause.
    """
    columns = _without_unsampled(batch, columns, add_finding)
    if not columns.mask.any():
        return columns, True
    if not columns.trained(columns.sampler).any():
        add_finding("note", "all_zero")
        return columns, True
    if not (columns.trained(columns.log_rho).abs() > SAME).any():
        add_finding("note", "copied")
        return columns, True
    if is_constant(columns):
        value = float(columns.trained(columns.sampler)[0])
        add_finding("note", "constant", value=value)
        return columns, True
    if is_one_number_a_row(columns):
        is_long = columns.mask.sum(1) >= LEAST_EQUAL
        long = words_for_long(columns.mask, LEAST_EQUAL)
        add_finding("failure", "one_number", responses=int(is_long.sum()), long=long)
        return columns, True
    rows_were_exchanged = False
    for find_cause in (
        find_factor,
        find_sums,
        find_shift,
        find_alignment,
        find_exchanged_rows,
        find_placeholder,
        find_floor,
    ):
        undone = find_cause(columns)
        if undone is None:
            continue
        add_finding(
            undone.severity,
            undone.cause,
            **undone.numbers,
            before=undone.before,
            after=undone.after,
        )
        rows_were_exchanged |= undone.cause == "rows"
        columns = undone.columns
        if not columns.mask.any():
            return columns, True
    is_positive = columns.trained(columns.sampler) > ROUNDED_ABOVE
    if is_positive.any():
        add_finding(
            "failure",
            "positive",
            tokens=int(is_positive.sum()),
            trained=int(columns.mask.sum()),
        )
        return columns, True
    if rows_were_exchanged:
        # Other rows may be exchanged too: where nearly all tokens are certain, rows are
        # alike, and the gap that is left says nothing about the engines.
        return columns, True
    if _report_reference_weights(batch, columns, add_finding):
        return columns, True
    return columns, False


def _report_reference_weights(
    batch: RecordedBatch, columns: Columns, add_finding: AddFinding
) -> bool:
    """Add a note where the sampler's column is much nearer to π_ref's than to the
    trainer's; return whether it is. False without the column ref.
    """
    if batch.ref is None:
        return False
    against_ref = Columns(batch.ref, columns.sampler, columns.mask)
    before = columns.distance()
    after = against_ref.distance()
    # a gap that rounding does not explain, of which π_ref leaves at most a quarter
    is_nearer = before > 2 * ROUNDING_GAP and after < before / 4
    if not is_nearer:
        return False
    add_finding("note", "reference_weights", before=before, after=after)
    return True


def _without_responses_off(columns: Columns, add_finding: AddFinding) -> Columns:
    """Add a note on responses that alone are off, and leave them out; where there are
    none, return the columns as they are.
    """
    is_off = _find_responses_off(columns)
    if is_off is None:
        return columns
    differences = columns.log_rho.abs()
    add_finding(
        "note",
        "some_responses",
        mean_abs=float(differences[columns.mask & is_off[:, None]].mean()),
        rest=float(differences[columns.mask & ~is_off[:, None]].mean()),
        rows=int(is_off.sum()),
        of=int(columns.mask.any(1).sum()),
    )
    return columns.without(is_off[:, None])


def _without_unsampled(
    batch: RecordedBatch, columns: Columns, add_finding: AddFinding
) -> Columns:
    """Report and leave out the tokens that train and that the sampler did not draw:
    those from the first other id of a response on, and those whose number is NaN.
    """
    if batch.sampler_ids is not None:
        is_other = batch.mask & (batch.sampler_ids != batch.ids)
        if is_other.any():
            add_finding(
                "failure", "other_ids", tokens=int(is_other.sum()), trained=batch.tokens
            )
            # the tokens that follow an other id have another context
            columns = columns.without(is_other.cumsum(1) > 0)
    is_missing = columns.mask & columns.sampler.isnan()
    if is_missing.any():
        add_finding(
            "failure",
            "not_sampled",
            tokens=int(is_missing.sum()),
            trained=batch.tokens,
            value="missing",
            place=words_for_place(is_missing, batch.mask),
        )
        columns = columns.without(is_missing)
    return columns


def _find_responses_off(columns: Columns) -> Tensor | None:
    """Return which responses are off, [B], if all others agree to rounding.

    None where fewer than two are off or more than LARGEST_SHARE_OFF, where their
    distances are not clearly above those of all others, or where fewer than
    LEAST_TOKENS tokens of one are off. A cause that changes all tokens alike does not
    separate the two kinds, and one that changes single tokens is none of responses.
    """
    is_long_enough = columns.mask.sum(1) >= LEAST_TOKENS
    distances = torch.where(is_long_enough, columns.row_distance(), 0.0)
    if int(is_long_enough.sum()) < LEAST_TOKENS:
        return None
    median = float(distances[is_long_enough].median())
    # beyond rounding, and far above the usual response
    is_off = distances > max(ROUNDING_GAP, 10 * median)
    tokens_off = columns.mask & (columns.log_rho.abs() > ROUNDING_GAP)
    if bool((tokens_off.sum(1)[is_off] < LEAST_TOKENS).any()):
        return None
    if not 2 <= int(is_off.sum()) <= LARGEST_SHARE_OFF * int(is_long_enough.sum()):
        return None
    nearest_off = float(distances[is_off].min())
    farthest_other = float(distances[~is_off].max())
    is_separated = nearest_off > LEAST_SEPARATION * farthest_other
    others = columns.without(is_off[:, None])
    others_agree = others.distance() < ROUNDING_GAP / 3
    return is_off if is_separated and others_agree else None


def _report_signatures(
    columns: Columns, first_draws: Tensor, add_finding: AddFinding
) -> None:
    """Add notes on a gap that cannot be undone: one on impossible tokens, which are
    then left out, and one on the first that applies of a signature, a bfloat16 column,
    columns that are unrelated, missing mass, and a gap that rounding does not explain.

    Args:
        columns: the log-probabilities of trainer and sampler.
        first_draws: the first token drawn from each context, [B, T].
        add_finding: takes a severity, a cause and its numbers.
    """
    is_impossible = _find_impossible_tokens(columns)
    if is_impossible is not None:
        add_finding(
            "note",
            "impossible_tokens",
            tokens=int(is_impossible.sum()),
            trained=int(columns.mask.sum()),
            far=FAR_NATS,
        )
        columns = columns.without(is_impossible)
    trainer = columns.trained(columns.trainer)
    sampled = columns.trained(columns.sampler)
    log_rho = columns.trained(columns.log_rho)
    numbers = _statistics(log_rho)
    mean_abs = numbers["mean_abs"]
    has_unexplained_gap = mean_abs > ROUNDING_GAP and is_impossible is None
    policy_numbers = {
        "mean_abs": mean_abs,
        "rho": numbers["rho_mean"],
        "k3": numbers["k3"],
    }
    if len(trainer) < LEAST_RARE:  # too few for any signature
        if has_unexplained_gap:
            add_finding("note", "two_policies", **policy_numbers)
        return
    is_first = first_draws[columns.mask]
    signature = _find_signature_without_copies(trainer, sampled, is_first)
    lacks_mass = _lacks_mass(log_rho, least=LEAST_MASS_OFF) and _lacks_mass(
        log_rho[is_first], least=LEAST_MASS_OFF
    )
    bfloat16_columns = []
    if is_bfloat16(sampled):
        bfloat16_columns.append("sampler")
    if is_bfloat16(trainer):
        bfloat16_columns.append("old")
    if signature:
        cause, numbers_of_cause = _cause_of_signature(signature, columns, numbers)
        add_finding("note", cause, **numbers_of_cause)
    elif len(bfloat16_columns) == 1:
        add_finding(
            "note", "bfloat16_column", column=bfloat16_columns[0], mean_abs=mean_abs
        )
    elif has_unexplained_gap and columns.unrelated():
        add_finding(
            "note", "unrelated", correlation=columns.correlation(), **policy_numbers
        )
    elif has_unexplained_gap and lacks_mass:
        add_finding("note", "missing_mass", error=numbers["rho_se"], **policy_numbers)
    elif has_unexplained_gap:
        add_finding("note", "two_policies", **policy_numbers)


def _find_impossible_tokens(columns: Columns) -> Tensor | None:
    """Return the tokens that are more than FAR_NATS less likely for the trainer than
    for the sampler, [B, T]; None where they are too few to be a pattern, half of the
    tokens or more, or where the others do not agree to rounding.
    """
    log_rho = columns.trained(columns.log_rho)
    is_impossible = log_rho < -FAR_NATS
    others = log_rho[~is_impossible]
    # Weights that differ everywhere have a wide middle; lone tokens on a clean line
    # have a narrow one.
    typical = float(others.abs().median()) if len(others) else 0.0
    # fewer than one token in 500 are not reported
    least_lone = max(LEAST_TOKENS, 0.002 * len(log_rho))
    are_lone = least_lone <= int(is_impossible.sum()) < 0.5 * len(log_rho)
    if not (are_lone and typical < ROUNDING_GAP):
        return None
    return columns.mask & (columns.log_rho < -FAR_NATS)


def _cause_of_signature(
    signature: str, columns: Columns, numbers: dict[str, float]
) -> tuple[str, dict[str, Any]]:
    """Return the cause that a signature points to, and the numbers of its note.

    Args:
        signature: of `_find_signature`; not "".
        columns: the log-probabilities of trainer and sampler.
        numbers: the statistics of log ρ, of `_statistics`.

    Returns:
        A key of words.SAMPLER, and what its sentence quotes. For a one-sided signature
        `share` is the share of the tokens on that side, and `zeros` the share on which
        the sampler is certain and the trainer is not.
    """
    log_rho = columns.trained(columns.log_rho)
    rho = numbers["rho_mean"]
    if signature == "stretched":
        return _cause_of_stretch(log_rho, numbers["mean"]), {
            "mean": numbers["mean"],
            "mean_abs": numbers["mean_abs"],
            "rho": rho,
            "error": numbers["rho_se"],
        }
    if signature == "impossible mean":
        return "not_the_sampler", {
            "mean": numbers["mean"],
            "rho": rho,
            "inverse": numbers["inverse_mean"],
        }
    if signature == "above one":
        return "above_one", {"rho": rho, "error": numbers["rho_se"]}
    is_certain = columns.trained(columns.sampler) == 0
    zeros = float((is_certain & (log_rho < -ROUNDING_GAP / 10)).double().mean())
    if signature == "trainer above":
        cause = "trainer_above"
        has_side = log_rho > 0
    else:
        cause = "cut" if zeros > 0 else "cut_or_divided"
        has_side = log_rho < 0
    share = float(has_side.double().mean())
    return cause, {"share": share, "rho": rho, "zeros": zeros}


def _cause_of_stretch(log_rho: Tensor, mean: float) -> str:
    """Return which cause of a stretch the mean of log ρ allows.

    Returns:
        "raw_temperature" where the mean is above 0, which is impossible for the
        distribution that sampled; "temperature" where it is below 0. Where it is 0
        within the noise: "above_one" if the mass is above 1, else "some_temperature".
    """
    noise = SIGNIFICANT * _standard_error(log_rho)
    if mean > noise:
        return "raw_temperature"
    if abs(mean) > noise:
        return "temperature"
    return "above_one" if _has_excess_mass(log_rho) else "some_temperature"


def _find_signature_without_copies(
    trainer: Tensor, sampled: Tensor, is_first: Tensor
) -> str:
    """Return the signature of the differences of two columns, [N]; "" where the first
    draws from each context have another one. Then it depends on the copies of these
    draws, whose number is no evidence.

    Args:
        trainer, sampled: log π_old and log μ.
        is_first: whether a token is the first that was drawn from its context.
    """
    signature = _find_signature(trainer, sampled)
    if signature and _find_signature(trainer[is_first], sampled[is_first]) != signature:
        return ""
    return signature


def _find_signature(trainer: Tensor, sampled: Tensor) -> str:
    """Return the signature of the differences d = log ρ of two columns, [N].

    Args:
        trainer, sampled: log π_old and log μ.

    Returns:
        The first that applies: "stretched", "sampler above", "trainer above",
        "impossible mean" (E[d] > 0), "above one" (E[ρ] > 1); "" where none does, or
        where there are fewer than LEAST_RARE tokens.
    """
    d = trainer - sampled
    if len(d) < LEAST_RARE:
        return ""
    mean = float(d.mean())
    if float(d.abs().mean()) > ROUNDING_GAP and _is_stretched(trainer, sampled):
        return "stretched"
    side = _side_of_differences(d)
    if side < 0 and (_lacks_mass(d) or _is_rarely_above(d)):
        return "sampler above"
    if side > 0 and _lacks_mass(-d):
        return "trainer above"
    if mean > LEAST_KL and mean > SIGNIFICANT * _standard_error(d):
        return "impossible mean"
    if _has_excess_mass(d):
        return "above one"
    return ""


def _standard_error(d: Tensor) -> float:
    """Return the standard error of the mean of d [N], in nats."""
    return float(d.std()) / len(d) ** 0.5


def _first_draws(batch: RecordedBatch) -> Tensor:
    """Return which tokens are the first that train from their context, [B, T]. Responses
    that begin alike repeat a context.

    The partial sums of ρ - 1 are a martingale of independent draws. Where a draw is
    nearly certain, its copies repeat one difference, and their number says nothing.
    Which row comes first does not depend on what it drew.
    """
    generator = torch.Generator().manual_seed(0)
    width = batch.ids.shape[1]
    factors = torch.randint(-(2**62), 2**62, (width + 1,), generator=generator)
    # wraps around: a hash of the tokens before each slot
    hashed = batch.ids * factors[:width]
    context = hashed.cumsum(1) - hashed + torch.arange(width) * factors[width]
    if batch.group is not None:
        context = context + (batch.group * factors[0])[:, None]
    trained = batch.mask.nonzero()
    _, context_number = context[batch.mask].unique(return_inverse=True)
    order = torch.arange(len(context_number))
    first_places = torch.full(
        (int(context_number.max()) + 1,), len(context_number)
    ).scatter_reduce(0, context_number, order, "amin")
    is_first = torch.zeros_like(batch.mask)
    is_first[tuple(trained[first_places].T)] = True
    return is_first


def _side_of_differences(d: Tensor) -> int:
    """Return -1 where μ is above π_old on nearly every token that differs (d < 0), +1
    where it is below, else 0.

    At some threshold nearly all differences have one sign, and at no larger one is
    there a tail of the other sign: a temperature has one, at rare tokens.
    """
    thresholds = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # nats
    least_count = max(LEAST_TOKENS * ONE_SIDED, 0.05 * len(d))
    for side in (-1, 1):
        # of each threshold: tokens beyond it on this side, and those on the other one
        here = [int((side * d > t).sum()) for t in thresholds]
        there = [int((side * d < -t).sum()) for t in thresholds]
        has_tail = [
            other >= LEAST_TOKENS and ONE_SIDED * other >= own
            for own, other in zip(here, there, strict=True)
        ]
        for position, count in enumerate(here):
            if count >= least_count and not any(has_tail[position:]):
                return side
    return 0


def _lacks_mass(d: Tensor, least: float = 0.0) -> bool:
    """Return whether the mean of e^d is below 1, by more than chance and by more than
    `least`, and d varies little: mass is missing.

    Of quite other weights the few tokens with a large e^d, which would make the mean 1,
    are missing from a small batch; but their d varies.
    """
    ratio = d.clamp(max=LARGE_EXPONENT).exp()
    excess = ratio - 1
    is_missing = float(excess.sum()) < -SIGNIFICANT * float((excess**2).sum().sqrt())
    mass = float(ratio.mean())
    # mean(e^d) is at least e^mean(d) (Jensen), and near it where d varies little
    varies_little = mass < 1.5 * math.exp(float(d.mean()))
    return is_missing and mass < 1 - least and varies_little


def _is_rarely_above(d: Tensor) -> bool:
    """Return whether d is below 0 on most tokens and above it, by more than rounding,
    on fewer than one in a thousand.

    Other weights raise many tokens, whatever their size; a cut raises none, however
    little it keeps.
    """
    below = (d < -ROUNDING_GAP).double().mean()
    above = (d > ROUNDING_GAP / 10).double().mean()
    return float(below) > 0.5 and float(above) < 0.001


def _has_excess_mass(d: Tensor) -> bool:
    """Return whether the mean of ρ = e^d is above 1, by more than chance and by more
    than LEAST_MASS_OFF: no normalized policy gives more mass than 1.
    """
    excess = d.clamp(max=LARGE_EXPONENT).expm1()
    significant = float(excess.sum()) > SIGNIFICANT * float((excess**2).sum().sqrt())
    return significant and float(excess.mean()) > LEAST_MASS_OFF


def _is_stretched(x: Tensor, y: Tensor) -> bool:
    """Return whether one of the columns x, y [N] is above the other one on likely
    tokens and below it on rare ones, or the reverse, as at another temperature.

    Other weights and rounding move a token either way, whatever its probability. False
    where at most 2 LEAST_RARE tokens differ by more than 0.001 nats.
    """
    differs = (x - y).abs() > 1e-3
    signs = (x - y)[differs].sign()
    rarest_first = (x + y)[differs].argsort()
    sums = signs[rarest_first].cumsum(0)
    count = len(signs)
    if count <= 2 * LEAST_RARE:
        return False
    # every number of tokens that may be the rare ones
    rare = torch.arange(LEAST_RARE, count - LEAST_RARE)
    mean_of_rare = sums[rare - 1] / rare
    mean_of_likely = (sums[-1] - sums[rare - 1]) / (count - rare)
    are_opposite = mean_of_rare * mean_of_likely < 0
    agree = mean_of_rare.abs().minimum(mean_of_likely.abs()) > LEAST_AGREEMENT
    return bool((are_opposite & agree).any())


def _statistics(d: Tensor) -> dict[str, float]:
    """Return the fields of a Gap that follow from the differences d = log ρ, [N]: those
    of equal columns where there is no token.
    """
    if not len(d):
        zero = dict.fromkeys(("mean", "mean_abs", "largest", "k3", "rho_se"), 0.0)
        return zero | {"rho_mean": 1.0, "inverse_mean": 1.0, "effective": 1.0}
    rho = d.clamp(max=LARGE_EXPONENT).exp()
    return {
        "mean": float(d.mean()),
        "mean_abs": float(d.abs().mean()),
        "largest": float(d.abs().max()),
        "rho_mean": float(rho.mean()),
        "rho_se": float(((rho - 1) ** 2).sum().sqrt()) / len(d),
        "inverse_mean": float((-d).clamp(max=LARGE_EXPONENT).exp().mean()),
        "k3": float((d.expm1() - d).clamp(max=1e12).mean()),  # finite for any d
        "effective": float(rho.sum() ** 2 / (len(d) * (rho**2).sum())),
    }


def _make_gap(columns: Columns, findings: list[ReplayFinding]) -> Gap:
    """Return the Gap of the tokens that are compared, with these findings; the first of
    them names its cause.
    """
    cause = findings[0].cause if findings else "agree"
    d = columns.trained(columns.log_rho)
    return Gap(tokens=len(d), cause=cause, findings=tuple(findings), **_statistics(d))
