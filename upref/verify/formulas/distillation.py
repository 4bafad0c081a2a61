# SPDX-License-Identifier: Apache-2.0
"""`upref.check_distillation`: is this function of a student's and a teacher's logits the
divergence that it is meant to be? The gradient by the student's logits is compared, on
every token of the vocabulary.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from upref import catalog, distillation
from upref.distillation import DIVERGENCES, SAMPLED, TRUNCATIONS, Distillation
from upref.errors import InputError
from upref.user_code import names
from upref.user_code.named import NamedFunction, Vocabulary, read
from upref.verify.faults import Fault
from upref.verify.formulas.case import (
    CLAMPS,
    FLOAT32_TOL,
    Formula,
    FormulaCase,
    Inputs,
    Problem,
    Settings,
    alike,
    choose_case,
    guessed_settings,
    precision_in_words,
)
from upref.verify.formulas.losses import (
    AGGREGATIONS,
    UNREDUCED,
    PerToken,
    WrongLoss,
    aggregation_faults,
    batches,
    constant_input,
    determinism,
    gradient,
    gradient_formula,
    gradient_of_outcome,
    is_unreduced,
    mutation,
    nan_oracle,
    shift_faults,
    total,
    value_oracle,
    wrong_already,
)
from upref.verify.oracle import Oracle, oracle, run, validate_names
from upref.verify.report import Finding, Report, not_run, note, restores_state

USUAL: dict[str, tuple[float, ...]] = {
    "temperature": (1.0, 2.0, 0.5, 0.7, 0.9, 4.0),
    "k": (8, 1, 2, 3, 4, 5, 10, 16, 20),
    "beta": (0.5, 0.1, 0.9, 0.25, 0.75),
}
# a setting that the function takes is tried at these values
OTHER: tuple[dict[str, float], ...] = (
    {"temperature": 2.0, "k": 3, "beta": 0.1},
    {"temperature": 0.5, "k": 5, "beta": 0.75},
)
V, WIDE_V = 24, 40  # tokens of the vocabulary
REFUSED = 19.5  # nats; from 20 on a clamp of log π_T is a guard
IGNORED = -100  # the label of an untrained slot


# ---- what arguments are called -------------------------------------------------------
TEACHER = {"teacher", "ref", "reference", "expert", "target", "t", "tea"}
OLD = {"old", "prev", "previous", "behavior", "behaviour", "rollout", "sampler"}
STUDENT = {"student", "policy", "actor", "model", "s", "stu"}
LOGITS = {"logits", "logit", "z"}


def role(name: str) -> str:
    """Return the input that a name of an argument means, or "": the first of the rules
    below that fits decides.

    Args:
        name: of an argument.
    """
    words = names.words(name)
    every = set(words)
    of_teacher = bool(every & TEACHER)
    is_index = bool(every & {"id", "ids", "index", "indices", "idx", "token", "tokens"})
    if any(w.startswith("mask") for w in words) and "ids" not in every:
        return "mask"
    if every & {"label", "labels"}:
        return "labels"
    if of_teacher and is_index:
        return "teacher_ids"
    is_log_prob = names.LOG_P.search("_".join(words)) or every & {"logps", "logp"}
    if is_log_prob and of_teacher and (every & {"top", "topk"}):
        return "teacher_top_log_prob"
    if is_log_prob and not of_teacher and every & OLD:
        return "old_log_prob"
    if is_log_prob:
        return "teacher_log_prob" if of_teacher else "log_prob"
    if every & LOGITS:
        return "teacher_logits" if of_teacher else "student_logits"
    return ""


def setting(name: str) -> str:
    """Return the setting that a name of an argument means, or "".

    Args:
        name: of an argument.
    """
    words = set(names.words(name))
    if words & {"temperature", "temp", "tau"} or name in ("T", "τ"):
        return "temperature"
    if words & {"k", "topk"} or words >= {"top", "k"}:
        is_tensor = words & {"log", "logprobs", "logps", "ids", "indices", "teacher"}
        return "" if is_tensor else "k"
    return "beta" if words & {"beta", "alpha"} else ""


VOCABULARY = Vocabulary(
    "a distillation loss",
    role,
    setting,
    (
        "student_logits",
        "teacher_logits",
        "mask",
        "labels",
        "log_prob",
        "teacher_log_prob",
        "teacher_top_log_prob",
        "teacher_ids",
        "old_log_prob",
    ),
)


# ---- batches -------------------------------------------------------------------------
def _problem(words: str, lengths: list[int], width: int, v: int, seed: int) -> Problem:
    """Make a batch of random logits. Untrained slots have logits too."""
    rng = np.random.default_rng(seed)

    def eighths(*shape: int) -> Tensor:
        """Return numbers that are exact in float32."""
        return torch.tensor(rng.integers(-24, 25, shape) / 8.0)

    n = len(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    # no two tokens tie, so that the k likeliest are the same for all
    ladder = torch.tensor(rng.permuted(np.tile(np.arange(v), (n, width, 1)), axis=-1))
    inputs = {
        "student_logits": eighths(n, width, v) + ladder / 256,
        "teacher_logits": eighths(n, width, v) + ladder.flip(-1) / 256,
        "mask": mask,
        "labels": torch.where(
            mask, torch.tensor(rng.integers(0, v, (n, width))), IGNORED
        ),
        # of sampled tokens
        "log_prob": -eighths(n, width).abs() - 0.125,
        "teacher_log_prob": -eighths(n, width).abs() - 0.125,
    }
    return Problem(words, inputs)


def _far(problem: Problem) -> Problem:
    """Return the batch with a student that is nearly certain, of tokens that the teacher
    finds unlikely: a truncated sum is below 0 on some, and probabilities are tiny.
    """
    far = problem.inputs["student_logits"] * 6
    return problem.but("a student that is nearly certain", student_logits=far)


def _refused_by_teacher(problem: Problem) -> Problem:
    """Return the batch with a teacher to which the student's likeliest token has a
    probability of e^-REFUSED.
    """
    likeliest = problem.inputs["student_logits"].argmax(-1, keepdim=True)
    others = problem.inputs["teacher_logits"].scatter(-1, likeliest, -torch.inf)
    # a multiple of 1/8 is exact in float32
    rare = ((others.logsumexp(-1, keepdim=True) - REFUSED) * 8).round() / 8
    return problem.but(
        "a teacher that refuses what the student likes",
        teacher_logits=others.scatter(-1, likeliest, rare),
    )


def _sharper(problem: Problem) -> Problem:
    """Return the batch with a teacher whose k likeliest tokens have nearly all of the
    probability.
    """
    sharper = problem.inputs["teacher_logits"] * 3
    return problem.but("a teacher that is surer", teacher_logits=sharper)


PLAIN = _problem("no padding", [4, 4, 4], 4, V, 1)
PADDED = _problem("responses of several lengths", [3, 5, 1, 4], 6, V, 2)
WIDE = _problem("a vocabulary of 40 tokens", [3, 2], 3, WIDE_V, 3)
NEAR = PLAIN.but(
    "a student that is nearly the teacher",
    student_logits=PLAIN.inputs["teacher_logits"] + PLAIN.inputs["student_logits"] / 64,
)
SHIFTED = PLAIN.but(
    "logits that are shifted by 300",
    student_logits=PLAIN.inputs["student_logits"] + 300,
    teacher_logits=PLAIN.inputs["teacher_logits"] - 300,
)
_HOLES = _problem("untrained tokens before and between trained ones", [5] * 3, 5, V, 4)


def _masked(problem: Problem, rows: list[str]) -> Problem:
    """Return the batch with a mask that is written with x on trained slots."""
    mask = torch.tensor([[c == "x" for c in row] for row in rows])
    labels = torch.where(
        mask, problem.inputs["labels"].clamp(min=0), torch.tensor(IGNORED)
    )
    return problem.but(problem.words, mask=mask, labels=labels)


HOLES = _masked(_HOLES, ["x..xx", "..xx.", ".x.x."])
ONE_TOKEN = _masked(_problem("one trained token in all", [2], 2, V, 5), [".x"])
RARE = PADDED.but(
    "sampled tokens that are rare to the student or the teacher",
    log_prob=PADDED.inputs["log_prob"] * 6,
    teacher_log_prob=PADDED.inputs["teacher_log_prob"] * 6,
)
# The numbers of rows, of columns and of tokens of the vocabulary, and their ratios, are
# not those of PLAIN: a function without a mask is compared on full batches alone.
WIDE_FULL = _problem(
    "2 responses of 5 tokens, no padding, and a vocabulary of 40 tokens",
    [5, 5],
    5,
    WIDE_V,
    6,
)
# of the forms that have the sampled tokens alone
SAMPLED_PROBLEMS = (PLAIN, PADDED, HOLES, ONE_TOKEN, RARE, WIDE_FULL)
PROBLEMS = (
    PLAIN,
    PADDED,
    WIDE,
    _far(PLAIN),
    _refused_by_teacher(PLAIN),
    _sharper(PLAIN),
    NEAR,
    SHIFTED,
    HOLES,
    ONE_TOKEN,
    WIDE_FULL,
)


def _share_of_token(inputs: Inputs) -> float:
    """Return 1 over the number of trained tokens: smaller gradients are compared on the
    scale of a probability of 1.
    """
    return 1 / max(int(inputs["mask"].sum()), 1)


def _derive(is_sampled: bool, inputs: Inputs, settings: Settings) -> dict[str, Tensor]:
    """Return the inputs with log-probabilities of the logits, at the temperature, and the
    teacher's k most likely tokens; of sampled tokens with those of the old policy alone,
    which is the student, detached.
    """
    out = dict(inputs)
    if is_sampled:
        return out | {"old_log_prob": out["log_prob"].detach().clone()}
    temperature = settings.get("temperature", 1.0)
    lp = (inputs["student_logits"] / temperature).log_softmax(-1)
    lp_teacher = (inputs["teacher_logits"] / temperature).log_softmax(-1)
    top = lp_teacher.topk(min(int(settings.get("k", 8)), lp.shape[-1]), -1)
    derived = {
        "log_prob": lp,
        "teacher_log_prob": lp_teacher,
        "teacher_top_log_prob": top.values,
        "teacher_ids": top.indices,
    }
    return out | derived


# ---- faults --------------------------------------------------------------------------
# In the formulas below q is log π of the student and p is log π_T of the teacher, of each
# token of the vocabulary [B, T, V] or of the sampled one [B, T]; x are the inputs, s the
# settings.
def _log_probs(inputs: Inputs, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return log π and log π_T at the temperature, [B, T, V]."""
    temperature = settings["temperature"]
    lp = (inputs["student_logits"] / temperature).log_softmax(-1)
    return lp, (inputs["teacher_logits"] / temperature).log_softmax(-1)


def _other(name: str, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the divergence of this name, [B, T]. What only it has as a setting is at its
    default.
    """
    d = distillation.get(name)
    values = {k: v for k, v in settings.items() if k in d.hyperparameters}
    return d(inputs["student_logits"], inputs["teacher_logits"], **values)


def _scaled(
    name: str, student: float, teacher: float, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the divergence with the logits of student and teacher multiplied by these
    powers of the temperature: a power of 1 undoes the division by it.
    """
    temperature = settings["temperature"]
    changed = {
        **inputs,
        "student_logits": inputs["student_logits"] * temperature**student,
        "teacher_logits": inputs["teacher_logits"] * temperature**teacher,
    }
    return _other(name, changed, settings)


def _faults_of_divergence(d: Distillation) -> Iterator[WrongLoss]:
    """Yield what is done otherwise, in the order in which it is tried: clamps of a token's
    loss, other divergences, faults of a sum over the whole vocabulary, those of the
    temperature and the logits, and those of the k tokens of a truncation.
    """

    def right(inputs: Inputs, settings: Settings) -> Tensor:
        """Return the right loss of each token."""
        return _other(d.name, inputs, settings)

    def swapped(inputs: Inputs, settings: Settings) -> Tensor:
        """Return the divergence with student and teacher exchanged."""
        lp, lp_teacher = _log_probs(inputs, settings)
        return DIVERGENCES[d.divergence](lp_teacher, lp, **_beta(d, settings))

    yield WrongLoss(
        "a token's loss is clamped at 0: where the truncated sum is negative, its gradient is gone",
        "loss-clamped-at-zero",
        partial(_bounded, right, 0.0, None),
    )
    for bound in CLAMPS:
        yield WrongLoss(
            f"a token's loss is clamped at {bound:g}: beyond it the gradient is gone",
            "token-loss-clamped",
            partial(_bounded, right, None, bound),
        )
    for words, other in _other_divergences(d):
        yield WrongLoss(words, "other-divergence", other)
    for words, other in _other_divergences(d):
        if "top_k" in words:
            yield WrongLoss(
                f"{words}, and a token's loss is clamped at 0: where the sum is negative, its gradient is gone",
                "loss-clamped-at-zero",
                partial(_bounded, other, 0.0, None),
            )
    if d.divergence == "jsd" and not d.truncation:
        yield from _faults_of_jsd(swapped)
    elif not d.truncation:
        yield from _faults_of_terms(d)
    for words, fault_id, student, teacher in POWERS_OF_TEMPERATURE:
        yield WrongLoss(words, fault_id, partial(_scaled, d.name, student, teacher))
    yield WrongLoss(
        "the loss is multiplied by the temperature",
        "loss-times-temperature",
        lambda x, s: right(x, s) * s["temperature"],
    )
    yield WrongLoss(
        "the loss is multiplied by the square of the temperature, as in Hinton et al. 2015; the formula here has "
        "no such factor",
        "loss-times-square-of-temperature",
        lambda x, s: right(x, s) * s["temperature"] ** 2,
    )
    for bound in CLAMPS:
        yield WrongLoss(
            f"logits are clamped to ±{bound:g}: beyond it the gradient is gone",
            "logits-clamped",
            partial(_with_logits_clamped, d.name, bound),
        )
    yield WrongLoss(
        "it is averaged over the vocabulary, not summed",
        "vocabulary-averaged",
        lambda x, s: right(x, s) / x["student_logits"].shape[-1],
    )
    if d.truncation:
        yield from _faults_of_truncation(d, right)
    yield WrongLoss(
        "the sign is flipped: it pushes away from the teacher",
        "teacher-sign-flipped",
        (lambda x, s: -right(x, s)),
    )


# words, id, and the powers of the temperature by which the logits of student and teacher
# are multiplied
POWERS_OF_TEMPERATURE = (
    ("the temperature is left out", "temperature-missing", 1.0, 1.0),
    (
        "the temperature divides the teacher's logits alone",
        "temperature-of-student-missing",
        1.0,
        0.0,
    ),
    (
        "the temperature divides the student's logits alone",
        "temperature-of-teacher-missing",
        0.0,
        1.0,
    ),
    ("logits are multiplied by the temperature", "temperature-inverted", 2.0, 2.0),
    ("logits are divided by the temperature twice", "temperature-twice", -1.0, -1.0),
)


def _faults_of_truncation(d: Distillation, right: PerToken) -> Iterator[WrongLoss]:
    """Yield what a sum over k tokens does otherwise with these tokens.

    Args:
        d: the divergence, with a truncation.
        right: its loss of each token.
    """
    yield WrongLoss(
        "one token more than k counts",
        "top-k-off-by-one",
        partial(_with_more_tokens, d.name, 1),
    )
    yield WrongLoss(
        "one token less than k counts",
        "top-k-off-by-one",
        partial(_with_more_tokens, d.name, -1),
    )
    yield WrongLoss(
        "the student alone is normalized over the k tokens",
        "student-alone-renormalized",
        partial(_one_normalized, d, "student"),
    )
    yield WrongLoss(
        "the teacher alone is normalized over the k tokens",
        "teacher-alone-renormalized",
        partial(_one_normalized, d, "teacher"),
    )
    yield WrongLoss(
        "it is averaged over the k tokens, not summed",
        "vocabulary-averaged",
        lambda x, s: right(x, s) / s["k"],
    )


def _one_normalized(
    d: Distillation, normalized: str, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the divergence over k tokens of which one distribution is normalized, that of
    the "student" or of the "teacher".
    """
    q, p = _log_probs(inputs, settings)
    chooses = q if TRUNCATIONS[d.truncation].of_student else p
    k = min(int(settings["k"]), chooses.shape[-1])
    top = chooses.detach().topk(k, -1).indices
    q = q.gather(-1, top)
    p = p.gather(-1, top)
    if normalized == "student":
        q = q.log_softmax(-1)
    else:
        p = p.log_softmax(-1)
    return DIVERGENCES[d.divergence](q, p, **_beta(d, settings))


def _other_divergences(d: Distillation) -> Iterator[tuple[str, PerToken]]:
    """Yield the other divergences in words, a truncated one with every usual k where
    this one has none.
    """
    for name in distillation.names():
        if name in SAMPLED or name == d.name:
            continue
        if "top_k" not in name or d.truncation:
            yield f"it is {name}", partial(_other, name)
            continue
        for k in USUAL["k"]:
            yield f"it is {name} with k = {k:g}", partial(_other_with_k, name, int(k))


def _other_with_k(name: str, k: int, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the divergence of this name with k tokens."""
    return _other(name, inputs, {**settings, "k": k})


def _with_more_tokens(
    name: str, more: int, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the divergence with other than k tokens."""
    return _other_with_k(name, max(int(settings["k"]) + more, 1), inputs, settings)


def _with_logits_clamped(
    name: str, bound: float, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the divergence of clamped logits."""
    clamped = {
        role: inputs[role].clamp(-bound, bound)
        for role in ("student_logits", "teacher_logits")
    }
    return _other(name, {**inputs, **clamped}, settings)


def _bounded(
    loss: PerToken,
    low: float | None,
    high: float | None,
    inputs: Inputs,
    settings: Settings,
) -> Tensor:
    """Return the losses of tokens, clamped; None: no bound on that side."""
    return loss(inputs, settings).clamp(low, high)


def _with_teacher_moved(
    name: str, places: int, inputs: Inputs, settings: Settings
) -> Tensor:
    """Return the divergence from the teacher's distribution that is moved by so many slots
    to the right; what leaves a row comes in on its other side.
    """
    moved = inputs["teacher_logits"].roll(places, 1)
    return _other(name, {**inputs, "teacher_logits": moved}, settings)


def _sampled_with_clamp(bound: float, q: Tensor, p: Tensor) -> Tensor:
    """Return the loss of sampled tokens whose log-ratio is clamped."""
    return (q - p).clamp(-bound, bound).detach() * q


def _ratio_with_clamp(bound: float, q: Tensor, p: Tensor) -> Tensor:
    """Return the forward KL of sampled tokens whose ratio is clamped."""
    return -(p - q).exp().clamp(max=bound).detach() * q


def _beta(d: Distillation, settings: Settings) -> dict[str, float]:
    """Return β by its name, the setting that only jsd has; {} for another divergence."""
    return {"beta": settings["beta"]} if d.divergence == "jsd" else {}


def _faults_of_jsd(swapped: PerToken) -> Iterator[WrongLoss]:
    """Yield what jsd over the whole vocabulary does otherwise with β and the mixture.

    Args:
        swapped: its loss of each token with student and teacher exchanged.
    """
    yield WrongLoss("β and 1 - β are exchanged", "beta-inverted", swapped)
    yield WrongLoss(
        "the mixture is of log-probabilities, not of probabilities",
        "mixture-of-logs",
        lambda x, s: _jsd_of_logs(*_log_probs(x, s), s["beta"]),
    )
    yield WrongLoss(
        "the mixture is the softmax of mixed logits, not the mean of probabilities",
        "mixture-of-logits",
        lambda x, s: _jsd_of_logs(*_log_probs(x, s), s["beta"], normalized=True),
    )
    yield WrongLoss(
        "both divergences are taken from the mixture, KL(m ‖ π_T) and KL(m ‖ π), not to it",
        "mixture-exchanged",
        lambda x, s: _jsd_from_mixture(*_log_probs(x, s), s["beta"]),
    )
    yield WrongLoss(
        "β is in the mixture alone: both divergences count half",
        "beta-in-mixture-alone",
        lambda x, s: _jsd_unweighted(*_log_probs(x, s), s["beta"]) / 2,
    )
    yield WrongLoss(
        "the two divergences are added, not weighted by β and 1 - β",
        "beta-missing",
        lambda x, s: _jsd_unweighted(*_log_probs(x, s), s["beta"]),
    )


def _faults_of_terms(d: Distillation) -> Iterator[WrongLoss]:
    """Yield what a KL divergence over the whole vocabulary does otherwise with its terms.

    Args:
        d: reverse_kl or forward_kl, without a truncation.
    """

    def of_logs(formula: Callable[[Tensor, Tensor], Tensor]) -> PerToken:
        """Return a loss per token of log π and log π_T."""
        return lambda x, s: formula(*_log_probs(x, s))

    yield WrongLoss(
        "the weights π are detached: on the whole vocabulary its gradient is 0",
        "weights-detached",
        of_logs(lambda q, p: (q.exp().detach() * (q - p)).sum(-1)),
    )
    yield WrongLoss(
        "the log-ratio is detached: the gradient flows through the weights alone, which is right for "
        "reverse_kl",
        "log-ratio-detached",
        of_logs(lambda q, p: (p.exp() * (p - q).exp().detach() * q).sum(-1)),
    )
    yield WrongLoss(
        "the cross-entropy with the student's weights alone: the student's entropy is missing",
        "entropy-missing",
        of_logs(lambda q, p: -(q.exp() * p).sum(-1)),
    )
    yield WrongLoss(
        "the teacher is left out: it is the student's negative entropy",
        "teacher-missing",
        of_logs(lambda q, p: (q.exp() * q).sum(-1)),
    )
    yield WrongLoss(
        "absolute values of the terms are summed",
        "terms-absolute",
        of_logs(lambda q, p: (q.exp() * (q - p)).abs().sum(-1)),
    )
    yield WrongLoss(
        "the mean of the forward and the reverse KL",
        "other-divergence",
        of_logs(lambda q, p: ((q.exp() - p.exp()) * (q - p)).sum(-1) / 2),
    )
    yield WrongLoss(
        "the teacher's likeliest token is the label: its other probabilities are lost",
        "hard-labels",
        of_logs(lambda q, p: -q.gather(-1, p.argmax(-1, keepdim=True))[..., 0]),
    )
    for guard in (1e-4, 1e-5, 1e-6, 1e-8, 1e-10, 1e-12):
        yield WrongLoss(
            f"{guard:g} is added to probabilities inside of the logarithms",
            "guard-in-logarithm",
            of_logs(partial(_with_guard, d.divergence, guard)),
        )
    yield WrongLoss(
        "the squared difference of the probabilities",
        "squared-difference-of-probabilities",
        of_logs(lambda q, p: ((q.exp() - p.exp()) ** 2).sum(-1)),
    )
    yield WrongLoss(
        "the squared difference of the logits",
        "squared-difference-of-logits",
        lambda x, s: ((x["student_logits"] - x["teacher_logits"]) ** 2).sum(-1),
    )
    yield WrongLoss(
        "the logits are not normalized: their difference replaces log π - log π_T",
        "logits-not-normalized",
        lambda x, s: (
            (x["student_logits"] / s["temperature"]).softmax(-1)
            * (x["student_logits"] - x["teacher_logits"])
            / s["temperature"]
        ).sum(-1),
    )
    for bound in CLAMPS:
        yield WrongLoss(
            f"the log-ratio of each token is clamped to ±{bound:g}",
            "log-ratio-clamped",
            of_logs(partial(_clamped, d.divergence, bound)),
        )
    for places, where in ((1, "late"), (-1, "early")):
        yield WrongLoss(
            f"the teacher's distribution is one token too {where}",
            f"teacher-one-token-{where}",
            partial(_with_teacher_moved, d.name, places),
        )


def _with_guard(divergence: str, guard: float, q: Tensor, p: Tensor) -> Tensor:
    """Return a divergence with a number added inside of its logarithms."""
    ratio = (q.exp() + guard).log() - (p.exp() + guard).log()
    return _sum_of_terms(divergence, q, p, ratio)


def _clamped(divergence: str, bound: float, q: Tensor, p: Tensor) -> Tensor:
    """Return a divergence whose log-ratio is clamped."""
    ratio = (q - p).clamp(-bound, bound)
    return _sum_of_terms(divergence, q, p, ratio)


def _sum_of_terms(divergence: str, q: Tensor, p: Tensor, ratio: Tensor) -> Tensor:
    """Return Σ π ratio of reverse_kl, or -Σ π_T ratio of forward_kl, where `ratio` stands
    for log π - log π_T.
    """
    if divergence == "reverse_kl":
        return (q.exp() * ratio).sum(-1)
    return (-p.exp() * ratio).sum(-1)


def _mixture(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """Return log(β π_T + (1 - β) π)."""
    both = torch.stack([q + math.log(1 - beta), p + math.log(beta)])
    return both.logsumexp(0)


def _jsd_from_mixture(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """Return β KL(m ‖ π_T) + (1 - β) KL(m ‖ π)."""
    m = _mixture(q, p, beta)
    return (m.exp() * (m - beta * p - (1 - beta) * q)).sum(-1)


def _jsd_unweighted(q: Tensor, p: Tensor, beta: float) -> Tensor:
    """Return KL(π_T ‖ m) + KL(π ‖ m)."""
    m = _mixture(q, p, beta)
    return (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1)


def _jsd_of_logs(q: Tensor, p: Tensor, beta: float, normalized: bool = False) -> Tensor:
    """Return the divergence whose mixture is the mean of log-probabilities; `normalized`:
    their softmax, so that its probabilities add up to 1.
    """
    m = beta * p + (1 - beta) * q
    m = m.log_softmax(-1) if normalized else m
    first = (p.exp() * (p - m)).sum(-1)
    return beta * first + (1 - beta) * (q.exp() * (q - m)).sum(-1)


def _faults_of_sampled(name: str) -> Iterator[WrongLoss]:
    """Yield what is done otherwise in a form that has the sampled token alone.

    Args:
        name: a key of SAMPLED.
    """
    is_forward = name == "sampled_forward_kl"
    own_kl = "KL(π_T ‖ π)" if is_forward else "KL(π ‖ π_T)"

    def logs(formula: Callable[[Tensor, Tensor], Tensor]) -> PerToken:
        """Return a loss per token of the two log-probabilities."""
        return lambda x, s: formula(x["log_prob"], x["teacher_log_prob"])

    yield WrongLoss(
        f"log π - log π_T itself as a loss (k1): its gradient is 1 on every token, 0 in expectation, not that of {own_kl}",
        "k1-as-loss",
        logs(lambda q, p: q - p),
    )
    yield WrongLoss(
        "log π_T - log π itself as a loss: its gradient is -1 on every token, 0 in expectation",
        "k1-as-loss",
        logs(lambda q, p: p - q),
    )
    yield WrongLoss(
        "log π - log π_T is not detached in front of log π",
        "log-ratio-not-detached",
        logs(lambda q, p: (q - p) * q),
    )
    other = "sampled_reverse_kl" if is_forward else "sampled_forward_kl"
    words_of_other = f"its gradient is that of {other}"
    beside = " and of log π(o)" if is_forward else ", as of k3"
    yield WrongLoss(words_of_other, "other-divergence", logs(SAMPLED[other]))
    yield WrongLoss(
        f"{words_of_other}{beside}",
        "other-divergence",
        partial(with_baseline, other),
    )
    if is_forward:
        yield WrongLoss(
            "the ratio is π/π_T, not π_T/π: what the teacher prefers counts less",
            "teacher-ratio-inverted",
            logs(lambda q, p: -(q - p).detach().exp() * q),
        )
    else:
        yield WrongLoss(
            "sg(π/π_T) log π(o): a ratio of probabilities takes the place of the log-ratio",
            "teacher-ratio-inverted",
            logs(lambda q, p: (q - p).detach().exp() * q),
        )
    yield WrongLoss(
        "|log π - log π_T|: only the sign of the difference is left",
        "absolute-log-ratio",
        logs(lambda q, p: (q - p).abs()),
    )
    yield WrongLoss(
        "(log π - log π_T)²: twice k2",
        "k2-half-missing",
        logs(lambda q, p: (q - p) ** 2),
    )
    yield WrongLoss(
        "π (log π - log π_T): weighted by a probability though the token is sampled",
        "k1-times-probability",
        logs(lambda q, p: q.exp() * (q - p)),
    )
    yield WrongLoss(
        "π_T (log π_T - log π): weighted by a probability though the token is sampled",
        "k1-times-probability",
        logs(lambda q, p: p.exp() * (p - q)),
    )
    for bound in CLAMPS:
        yield WrongLoss(
            f"the log-ratio of each token is clamped to ±{bound:g}",
            "log-ratio-clamped",
            logs(partial(_sampled_with_clamp, bound)),
        )
        if is_forward:
            yield WrongLoss(
                f"the ratio π_T/π is clamped at {bound:g}",
                "teacher-ratio-clamped",
                logs(partial(_ratio_with_clamp, bound)),
            )
    yield WrongLoss(
        "the sign is flipped: it pushes away from the teacher",
        "teacher-sign-flipped",
        logs(lambda q, p: -SAMPLED[name](q, p)),
    )


def known(name: str, agg: str) -> tuple[Fault[Formula], ...]:
    """Return the known faults of a divergence, in the order in which they are tried.

    Args:
        name: one of upref.distillation.names().
        agg: the aggregation that it should have.
    """
    role_of_gradient = "log_prob" if name in SAMPLED else "student_logits"
    if name in SAMPLED:
        wrong_losses = tuple(_faults_of_sampled(name))
    else:
        wrong_losses = tuple(_faults_of_divergence(distillation.get(name)))
    cut = "no gradient reaches the student: it is detached, computed under no_grad, or it cancels"
    if any(wrong.id == "weights-detached" for wrong in wrong_losses):
        cut += ", or the weights π alone are detached, and Σ π ∇ log π is 0"
    no_gradient = Fault[Formula](
        cut,
        lambda inputs, settings: torch.zeros_like(inputs[role_of_gradient]),
        id="no-gradient",
    )
    of_sum = aggregation_faults(per_token(name), role_of_gradient, agg)
    of_terms = (
        Fault(
            wrong.words,
            gradient_formula(wrong.per_token, role_of_gradient),
            id=wrong.id,
        )
        for wrong in wrong_losses
    )
    is_sampled = name in SAMPLED
    shifts = shift_faults(
        per_token(name),
        role_of_gradient,
        agg,
        {
            "the student": (role_of_gradient,),
            "the teacher": ("teacher_log_prob" if is_sampled else "teacher_logits",),
            "the mask": ("mask",),
        },
    )
    return (no_gradient, *of_sum, *of_terms, *shifts)


def with_baseline(name: str, inputs: Inputs, settings: Settings) -> Tensor:
    """Return the loss of each sampled token with 1 more as its weight, which changes
    nothing in expectation.

    Args:
        name: a key of SAMPLED.
        inputs: tensors by role.
        settings: not read.
    """
    return per_token(name)(inputs, settings) + inputs["log_prob"]


def per_token(name: str) -> PerToken:
    """Return the right loss of each token.

    Args:
        name: one of upref.distillation.names().
    """
    if name in SAMPLED:
        return lambda x, s: SAMPLED[name](x["log_prob"], x["teacher_log_prob"])
    return partial(_other, name)


# ---- oracles -------------------------------------------------------------------------
@oracle("settings", not_run=wrong_already)
def settings(case: FormulaCase) -> Iterator[Finding]:
    """Compare at other values of the settings that the function takes, up to the first that
    fail. A gradient that is right but for the square of the temperature is a note.
    """
    for other in OTHER:
        changed = {k: v for k, v in other.items() if k in case.function.takes}
        changed = {k: v for k, v in changed.items() if k in case.settings}
        if not changed:
            return
        at_other = {**case.settings, **changed}
        words = ", ".join(f"{k} = {v:g}" for k, v in changed.items())
        if "temperature" in changed and _is_times_square(case, at_other):
            yield note(
                "settings",
                "the loss is multiplied by the square of the temperature",
                cause="usual beside a temperature (Hinton et al. 2015); the formula here has no such factor",
            )
            return
        problem = PLAIN.but(words)
        found = list(case.compare("settings", problem, at_other))
        yield from found
        if found:
            return


def _is_times_square(case: FormulaCase, at_other: Settings) -> bool:
    """Return whether the gradient is right times the square of the temperature."""
    square = at_other["temperature"] ** 2
    try:
        found = case.found(PLAIN, at_other)
    except InputError:
        return False
    return alike(square * case.expected(PLAIN, at_other), found, case.tol)


@oracle("impossible-tokens", not_run=wrong_already)
def impossible_tokens(case: FormulaCase) -> Iterator[Finding]:
    """Note that other gradients are not finite where both policies forbid a token, by
    logits of -inf, or that such logits are refused.
    """
    if "student_logits" not in case.function.reads or case.name in SAMPLED:
        return
    inputs = {}
    for which in ("student_logits", "teacher_logits"):
        x = PLAIN.inputs[which].clone()
        x[..., 0] = -torch.inf
        inputs[which] = x
    try:
        found = case.found(PLAIN.but("", **inputs))
    except InputError as e:
        yield note("impossible-tokens", "logits of -inf are refused", cause=str(e))
        return
    if not found[..., 1:].isfinite().all():
        text = "a token whose logits are -inf in both makes other gradients NaN"
        yield note(
            "impossible-tokens", text, cause="0 times infinity: masked vocabularies"
        )


def _value(name: str, inputs: Inputs, settings: Settings) -> float:
    """Return the right value of the loss."""
    x = per_token(name)(inputs, settings)
    return total(x, inputs["mask"], settings["agg"]).item()


def oracles(name: str) -> tuple[Oracle, ...]:
    """Return the oracles of a divergence.

    Args:
        name: one of upref.distillation.names().
    """
    if name in SAMPLED:
        inputs = ("log_prob", "teacher_log_prob")
        return (
            determinism,
            gradient,
            batches,
            constant_input("teacher_log_prob", "the teacher's log-probabilities"),
            nan_oracle(inputs),
            mutation,
        )
    return (
        determinism,
        gradient,
        settings,
        batches,
        value_oracle(partial(_value, name)),
        impossible_tokens,
        constant_input("teacher_logits", "the teacher's logits"),
        nan_oracle(("student_logits", "teacher_logits")),
        mutation,
    )


# ---- the check -----------------------------------------------------------------------
@restores_state
def check_distillation(
    fn: Any,
    divergence: str,
    *,
    agg: str = "token-mean",
    skip: tuple[str, ...] = (),
    **hp: Any,
) -> Report:
    """Compare the gradient of a function with that of a divergence from a teacher.

    Args:
        fn: a loss to minimize: a function of student_logits and teacher_logits
            [B, T, V] and mask [B, T], read by the names of its arguments; or its name.
            It returns a scalar, or one number per token, [B, T]. labels [B, T] (-100
            on untrained tokens) and log-probabilities of the whole vocabulary are
            recognized too. Of the sampled forms: log_prob and teacher_log_prob, [B, T],
            and old_log_prob, which equals log_prob.
        divergence: reverse_kl, forward_kl, jsd, student_top_k_tail(reverse_kl), ... of
            `upref.distillation.names()`.
        agg: how the tokens are summed: token-mean, seq-mean-token-mean,
            seq-mean-token-sum or token-sum.
        skip: names of oracles not to run.
        **hp: temperature, k, beta. What is not given is passed to a function that takes
            it, or found among usual values.

    Returns:
        A Report: true if nothing fails.

    Raises:
        InputError: fn cannot be read or run.
    """
    start = time.perf_counter()
    if not isinstance(divergence, str) or divergence not in distillation.names():
        raise catalog.unknown_distillation(divergence, distillation.names())
    if agg not in AGGREGATIONS:
        raise catalog.unknown_aggregation(agg, AGGREGATIONS)
    every = oracles(divergence)
    validate_names(every, skip)
    is_sampled = divergence in SAMPLED
    own: dict[str, float] = {}
    if not is_sampled:
        own = distillation.get(divergence).hyperparameters
    function = read(fn, VOCABULARY, (), hp, own)
    _require_inputs(function, is_sampled)
    if unknown := [k for k in hp if k not in own and k not in function.bound]:
        raise InputError(
            f"{divergence} has no setting {unknown[0]!r}, and {function.name} no such argument; it takes "
            f"{', '.join(own) or 'none'}."
        )
    given = {k: v for k, v in hp.items() if k in own}
    case, is_right = _choose_case(function, divergence, agg, own, given)
    findings, outcomes = run(every, case, skip)
    shown = {k: v for k, v in case.settings.items() if k != "agg"}
    objective = divergence
    if case.settings["agg"] != UNREDUCED and agg != "token-mean":
        objective += f" with {agg}"
    return Report(
        loss=function.name,
        objective=objective,
        hp=shown,
        findings=findings,
        read_as=function.read_as,
        assumptions=_assumptions(case, given, is_right),
        guessed=guessed_settings(case, given, is_right),
        oracles=outcomes,
        tolerances={"gradient, relative": case.tol},
        seconds=time.perf_counter() - start,
        not_checked=[*_not_checked(case), *not_run(outcomes)],
    )


def _require_inputs(function: NamedFunction, is_sampled: bool) -> None:
    """Raise InputError for a function that lacks a student or a teacher, or that takes an
    old policy beside logits.
    """
    # of each set the function takes one input at least
    of_student = {"student_logits", "log_prob"}
    of_teacher = {"teacher_logits", "teacher_log_prob", "teacher_top_log_prob"}
    if is_sampled:
        of_student = {"log_prob"}
        of_teacher = {"teacher_log_prob"}
    if "old_log_prob" in function.reads and not is_sampled:
        raise InputError(
            f"{function.name} takes log-probabilities of an old policy, which only the sampled forms have: "
            f"{' or '.join(SAMPLED)}."
        )
    for names_of_one in (of_student, of_teacher):
        if not names_of_one & function.reads:
            read_as = ", ".join(f"{p} ({r})" for p, r in function.roles.items())
            raise InputError(
                f"{function.name}: no argument is called {' or '.join(sorted(names_of_one))} or the like (read: "
                f"{read_as or 'none that is known'}). The names are {', '.join(VOCABULARY.roles)} and their usual variants."
            )


def _choose_case(
    function: NamedFunction,
    divergence: str,
    agg: str,
    own: Settings,
    given: Settings,
) -> tuple[FormulaCase, bool]:
    """Choose how inputs are passed, and the settings, as `choose_case` does; the first way
    in which the function runs tells whether it is unreduced. A sampled form whose weights
    have 1 added is compared with that.

    Raises:
        InputError: the function refuses every way.
    """
    grid = _grid(function, own, given)
    is_sampled = divergence in SAMPLED
    has_mask = bool({"mask", "labels"} & function.reads)
    problems: tuple[Problem, ...] = SAMPLED_PROBLEMS if is_sampled else PROBLEMS
    if not has_mask:
        problems = tuple(p for p in problems if bool(p.inputs["mask"].all()))

    loss = per_token(divergence)

    def make(way: NamedFunction, settings: Settings, tol: float) -> FormulaCase:
        """Return the case of a function at these settings."""
        role_of_gradient = "log_prob" if is_sampled else "student_logits"
        own_agg = settings["agg"]
        return FormulaCase(
            divergence,
            way,
            gradient_formula(loss, role_of_gradient),
            partial(gradient_of_outcome, way.name, role_of_gradient),
            settings,
            problems,
            known(divergence, own_agg),
            "d loss / d log π" if is_sampled else "d loss / d logit",
            gradient_of=role_of_gradient,
            least_scale=_share_of_token,
            tol=tol,
            derive=partial(_derive, is_sampled),
        )

    first_error: InputError | None = None
    for way in function.kinds():
        trial = make(way, {**grid[0], "agg": agg}, FLOAT32_TOL)
        try:
            outcome, inputs = trial.call(problems[0])
        except InputError as e:
            first_error = first_error or e
            continue
        own_agg = UNREDUCED if is_unreduced(outcome, inputs) else agg
        if is_sampled:
            shifted = partial(with_baseline, divergence)
            found = gradient_of_outcome(way.name, "log_prob", outcome, inputs)
            at_agg = {"agg": own_agg}
            right = gradient_formula(shifted, "log_prob")(inputs, at_agg)
            if alike(right, found, FLOAT32_TOL):
                loss = shifted
        return choose_case(function, make, [{**row, "agg": own_agg} for row in grid])
    assert first_error is not None
    raise first_error


def _grid(
    function: NamedFunction, own: Settings, given: Settings
) -> list[dict[str, Any]]:
    """Return the settings that are tried, each combination as a dictionary, the likeliest
    first: those that the user gave; the first value for those that the function takes;
    all usual values for the rest. A setting that only the function requires has its first
    usual value.
    """
    columns = []
    for key in own:
        if key in given:
            columns.append([given[key]])
        elif key in function.takes:
            columns.append([own[key]])
        else:
            columns.append(list(USUAL[key]))
    keys = [*own]
    for key in sorted(function.required - set(own)):
        keys.append(key)
        columns.append([USUAL[key][0]])
    return [dict(zip(keys, row, strict=True)) for row in itertools.product(*columns)]


def _assumptions(case: FormulaCase, given: Settings, is_right: bool) -> list[str]:
    """Return what was assumed of the function, as sentences."""
    sentences = []
    for key, value in case.settings.items():
        if key == "agg" or key in given:
            continue
        if key in case.function.takes:
            sentences.append(f"it takes {key}: compared at {value:g} and other values")
        elif is_right:
            sentences.append(f"{key} = {value:g} was found among the usual values")
    if case.name in SAMPLED and case.agrees(PLAIN) and _has_baseline(case):
        sentences.append(
            "1 is added to the weight of every token, as in k3: in expectation that changes nothing"
        )
    if case.settings["agg"] == UNREDUCED:
        sentences.append("it returns one number per token: its caller sums them")
    if precision := precision_in_words(case, is_right):
        sentences.append(precision)
    return sentences


def _has_baseline(case: FormulaCase) -> bool:
    """Return whether the weights of sampled tokens have 1 added."""
    formula = gradient_formula(partial(with_baseline, case.name), "log_prob")
    expected = formula(PLAIN.inputs, case.settings)
    return case.alike(PLAIN, expected, case.found(PLAIN))


def _not_checked(case: FormulaCase) -> list[str]:
    """Return what the verdict says nothing about, in words."""
    out = []
    if not case.has_mask and case.settings["agg"] != UNREDUCED:
        out.append("masks, which it does not take")
    if case.settings["agg"] == UNREDUCED:
        out.append("the aggregation, which its caller does")
    if "old_log_prob" in case.function.reads:
        out.append(
            "steps off policy: the old policy is the student, so that every ratio is 1"
        )
    return out
