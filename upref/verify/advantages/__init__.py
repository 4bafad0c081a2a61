# SPDX-License-Identifier: Apache-2.0
"""Is this function of rewards the advantage estimator that it is meant to be?"""

from upref.verify.advantages.check import check_advantages

__all__ = ["check_advantages"]
