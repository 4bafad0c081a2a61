# SPDX-License-Identifier: Apache-2.0
"""Proofs: a user's function, run with a formula for every number, compared with a
reference for every value.

values      formulas in one normal form
operators   a rule for each operator of torch
trace       one call, with its formulas, its branches and what Python reads
sizes       what the code compares with sizes and counts
constants   the numbers in its own comparisons of such counts
state       what it keeps from call to call
domain      the inputs: small batches whose numbers are variables
rewards     the inputs of an advantage estimator, whose rewards are variables
subjects    what is compared: the gradient of a loss, a KL term, advantages
paths       all paths of two functions, and where they differ
solver      questions to z3
compare     all of it, over many batches
every_size  one call on a batch of open size

`upref.verify.proof` makes the verdict of it.
"""
