# SPDX-License-Identifier: Apache-2.0
"""What a loss maximizes, on average.

A policy with two tokens is small enough to list all of its responses and all groups of
them. The expected gradient is then a sum, without sampling, and it is compared with the
gradients of named functions of the policy.

policy.py         the tiny policy: all responses, their log-probabilities
functions.py      named functions of the policy, and their gradients
expected.py       the expected gradient of a loss, an advantage or a KL term
maximization.py   the answer, and how it is printed
maximizes.py      `upref.maximizes`
"""
