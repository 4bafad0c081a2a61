# SPDX-License-Identifier: Apache-2.0
"""Does UP give anything that a searched entropy bonus or a wider clip does not?
`python -m repro.mini.controls`.
"""
