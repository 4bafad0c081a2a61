# SPDX-License-Identifier: Apache-2.0
"""What a trainer's mistake costs: the effects of the experiment `faults`, for
docs/findings.md.
"""

from docs.controls import effect_of
from repro.mini.experiment import plan, records
from repro.mini.experiment.effects import Effect
from repro.mini.experiment.words import shown
from upref.markdown import table

MISTAKES = {  # the arm -> its mistake, as repro/mini/train/faults.py makes it
    "penalty_added": "the KL term has the wrong sign",
    "shifted_old": "the old log-probabilities are those of the token before",
    "no_ratio": "no ratio, although the data are 4 rollouts stale",
    "clip_without_minimum": "clip(r) A, without the minimum of it and r A",
    "last_micro_batch": "of four micro-batches only the last one trains",
    "temperature_forgotten": "sampled at T = 0.7, trained on raw log-probabilities",
    "shifted_mask": "the mask begins one token late",
    "other_groups": "a reward is compared with rewards of other prompts",
    "micro_batch_means": "the mean of four micro-batches' own token means",
    "padding_counts": "the divisor counts padding",
}
METRICS = {
    "avg/t_1": "points of Avg@32, T = 1",
    "best/top_p_0.7": "points of Best@32, top-p 0.7",
}
WORDS = {  # the effect is the loss as it should be, minus the mistake
    "gains": "costs",
    "loses": "gains",
    "no difference": "no difference",
    "undecided": "undecided",
}


def text() -> str:
    """Return the table: one row for each mistake."""
    registered = plan.load("faults")
    found = registered.effects(records.load(registered.results))
    rows = [
        [words, *(_cost(effect_of(found, arm, metric)) for metric in METRICS)]
        for arm, words in MISTAKES.items()
    ]
    assert {e.question.other for e in found} == set(MISTAKES)
    return table(["mistake", *METRICS.values()], rows)


def _cost(effect: Effect) -> str:
    """Return what a mistake costs, with its interval and the word for it.

    Raises:
        KeyError: the effect has no interval.
    """
    word, _, margin = effect.word.partition(" by ")
    return f"{shown(effect)}, {WORDS[word]}{margin and ' by ' + margin}"
