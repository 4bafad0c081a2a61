# SPDX-License-Identifier: Apache-2.0
"""The engine of registered experiments: a plan as data (plan.py), one rule (rule.py),
one report (report.py).
"""
