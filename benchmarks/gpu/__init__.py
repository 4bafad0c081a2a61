# SPDX-License-Identifier: Apache-2.0
"""What upref does on a GPU: `python -m benchmarks.gpu` (docs/gpu.md)."""
