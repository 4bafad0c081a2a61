# SPDX-License-Identifier: Apache-2.0
"""Losses written before the batches of a check were looked at again."""
