# SPDX-License-Identifier: Apache-2.0
"""The experiments of `python -m repro.exact`, a module each: ARMS are its objectives,
and `run` answers its question for them.
"""

# objectives that differ in what they make of a ratio, of more than one experiment
SURROGATES = [
    "dapo",
    "dapo_no_upper_clip",
    "up_dapo",
    "reinforce_off_policy",
    "cispo",
    "gppo",
    "sapo",
    "dppo_tv",
    "aspo",
]
