# SPDX-License-Identifier: Apache-2.0
"""Expectations of the objectives without sampling: tasks whose responses are all listed
(task.py), the expected objective (expected.py), gradient ascent on it (flow.py).
"""
