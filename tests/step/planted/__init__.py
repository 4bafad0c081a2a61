# SPDX-License-Identifier: Apache-2.0
"""Thirty bugs planted in two training loops, and fifteen right loops.

All were written, with the words that a true cause holds, before the checker ran on any
of them. No test or loop of tests/step has these bugs.
"""
