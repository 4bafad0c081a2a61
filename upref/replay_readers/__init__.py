# SPDX-License-Identifier: Apache-2.0
"""Readers of the files that frameworks write themselves, as recorded batches of docs/dump.md.

Each module has SUFFIXES, `recognizes(path)`, `step_of(path)` and `read(path)`, and imports `upref.replay` alone.
"""
