# SPDX-License-Identifier: Apache-2.0
"""Many runs and what they say: `python -m repro.mini.study.suite`."""
