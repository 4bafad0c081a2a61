# SPDX-License-Identifier: Apache-2.0
"""The engine of experiments: a plan as data, its runs, its effects and its page.

    python -m repro.mini.experiment            which experiments there are
    python -m repro.mini.experiment NAME       train what is missing, and report

In the order to read: questions.py (what is asked), records.py (what a run leaves),
effects.py (from runs to an interval or a p-value), plan.py (a plan.toml), claims.py (what
is said of a claim), page.py (the report), command.py.
"""
