# SPDX-License-Identifier: Apache-2.0
"""A fifth set of unseen functions, written before the checker ran on any of them.

`python -m tests.fifth_set` prints the table. Blind: faults that people make.
Aimed: written after reading the batches of the checks, so that they do not show them.
"""
