# SPDX-License-Identifier: Apache-2.0
"""Effects in print: points of 100 for shares, ×-factors for ratios."""

from math import exp

from repro.mini.experiment.effects import Effect
from repro.mini.experiment.questions import EQUAL, SHARES, Question

TITLES = {
    "avg": "Avg@32",
    "maj": "Maj@32",
    "best": "Best@32",
    "entropy": "entropy",
    "malformed": "malformed answers",
    "survival": "survival",
    EQUAL: "Best@32 at equal Avg@32",
}
LARGEST = 700  # of an exponent that a float can hold


def unit(question: Question) -> str:
    """Return the unit of a difference: "points", "steps", "nats", or "" for others."""
    if in_points(question):
        return "points"
    return {"survival": "steps", "entropy": "nats"}.get(question.metric, "")


def in_points(question: Question) -> bool:
    """Return whether it is a share, or a distance of curves of shares."""
    metric = question.terms[0].metric
    return metric in SHARES or metric == EQUAL or metric.startswith("pass@")


def rounded(question: Question, x: float, times: str = "×") -> str:
    """Return a number on the scale of d as text: with its sign, and one digit after the
    point for points, none for steps, three for others; of a ratio its factor.

    Args:
        question: whose number it is.
        x: the number; a logarithm if the question is a ratio.
        times: before a factor.
    """
    if question.ratio:
        factor = exp(min(x, LARGEST))
        return f"{times}{factor:{'.3f' if 0.1 <= factor < 10 else '.3g'}}"
    digits = 1 if in_points(question) else 3
    if question.metric == "survival":
        digits = 0
    return f"{round(x, digits) + 0.0:+.{digits}f}"  # no -0.0


def shown(e: Effect) -> str:
    """Return an effect as text, `+2.1 [+1.6, +2.6]`; its word where it has no
    interval.
    """
    if e.word in ("out of reach", "not finished"):
        return e.word
    mean = rounded(e.question, e.mean)
    low, high = (rounded(e.question, x, "") for x in (e.low, e.high))
    return f"{mean} [{low}, {high}]"


def by_base(e: Effect) -> str:
    """Return the mean over the seeds on each base, with commas between them."""
    return ", ".join(rounded(e.question, x) for x in e.by_base)


def level(question: Question) -> str:
    """Return the decoding of a question in words, `T = 1` or `top-p 0.7`: at equal
    Avg@32 it gives the level of Avg@32.
    """
    return question.decoding.replace("top_p_", "top-p ").replace("t_1", "T = 1")


def compared_at(question: Question) -> str:
    """Return what is compared and by which decoding, `in Best@32 at T = 1`; at equal
    Avg@32, where the decoding gives the level, `at the level of T = 1`.
    """
    if question.metric == EQUAL:
        return f"at the level of {level(question)}"
    return f"in {TITLES.get(question.metric, question.metric)} at {level(question)}"
