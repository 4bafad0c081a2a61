# SPDX-License-Identifier: Apache-2.0
"""The second round: rule, claims, seeds and power, registered before its runs; its runs
and what they say.
"""
