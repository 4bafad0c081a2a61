# SPDX-License-Identifier: Apache-2.0
"""GRPO with two bounds, ε_low and ε_high, which the paper's Table A5 has and its Eq. 4
has not.

Its terms are DAPO's, its average is GRPO's, so it is neither of the two and is
registered here, for verl alone.
"""

from dataclasses import replace

import upref
from upref_frameworks.verl.training import register

grpo_clip_higher = replace(
    upref.get("dapo"),
    name="grpo_clip_higher",
    paper="fan2026up",
    eq="4, with the two bounds of Table A5",
    agg=upref.get("grpo").agg,
    adv=upref.get("grpo").adv,
)
OBJECTIVES = {"grpo_clip_higher": grpo_clip_higher}

register(grpo_clip_higher)
