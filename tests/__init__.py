# SPDX-License-Identifier: Apache-2.0
"""A package, so that tests and scripts import `tests.support`; the folders of tests
beside it are none.
"""
