# SPDX-License-Identifier: Apache-2.0
"""The engine of experiments: a plan as data, its runs, its effects and its page.

    python -m repro.mini.experiment            which experiments there are
    python -m repro.mini.experiment NAME       train what is missing, and report

In the order to read: questions.py (what is asked), records.py (what a run leaves),
effects.py (from runs to an interval), plan.py (a plan.toml), answer.py (a plan's own
verdict), standing.py (how effects stand as claims), page.py (the report), command.py.

The words of all its modules:

    arm         one method: an objective with its hyperparameters ("up_dapo")
    group       one setting in which arms are compared ("s16": 16 rollouts stale)
    cell        one arm in one group
    base        the policy from which a run starts
    run         one training: an arm in a group, from a base, with a seed
    record      what a finished run leaves: one line of results/runs.jsonl
    question    which difference of numbers of runs is estimated; its estimate is an effect
    family      questions whose intervals hold together
    look        a number of seeds at which effects are judged
    margin      the smallest difference of interest
    choice      the learning rate, and the coefficient if an arm has one, of a cell
"""
