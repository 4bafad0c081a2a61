# SPDX-License-Identifier: Apache-2.0
"""`upref/up_dapo` made wrong on purpose, a tenth too large: a trial has verl import
this behind the plug-in.
"""

from dataclasses import replace
from functools import wraps

import upref
from upref_frameworks.verl.training import register

right = upref.get("up_dapo")


@wraps(right.fn)
def wrong(*args, **hp):
    return 1.1 * right.fn(*args, **hp)


register(replace(right, fn=wrong))
