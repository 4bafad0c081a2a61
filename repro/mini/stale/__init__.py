# SPDX-License-Identifier: Apache-2.0
"""Does UP help when data are stale, each method at its own learning rate? The third,
registered experiment.
"""
