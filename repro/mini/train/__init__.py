# SPDX-License-Identifier: Apache-2.0
"""One run: `python -m repro.mini.train`."""
