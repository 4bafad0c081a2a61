# SPDX-License-Identifier: Apache-2.0
"""The objectives, a file each.

`NAME(lp, lp_old, A, *, hyperparameters)` is the paper's J of a token or a response before
aggregation. `NAME_weight(r, A, *, hyperparameters)` is its derivative dJ/dlp in closed
form, written by hand: 0 where a clip or a mask stops the token. A weight whose first
argument is `log_r` gets the logarithm of the ratio; arguments such as `mu`, `log_mu`,
`mask`, `entropy` and `group` are given to the functions that have them. upref.rollouts
defines the letters, and `upref.definition.Objective` the facts in the decorator.
"""
