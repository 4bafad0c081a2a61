# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers, their words, how they are sampled and how good they are."""
