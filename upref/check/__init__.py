# SPDX-License-Identifier: Apache-2.0
"""Verification: the regime grid, adapters to frameworks, audits."""
