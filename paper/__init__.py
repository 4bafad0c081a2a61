# SPDX-License-Identifier: Apache-2.0
"""Checks of one paper, fan2026up: `python -m paper` in a checkout."""

from upref import interrupt

interrupt.handled()
