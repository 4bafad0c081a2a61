# SPDX-License-Identifier: Apache-2.0
"""What a trainer's whole step does, over settings and models: `upref step`."""
