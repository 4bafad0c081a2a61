# SPDX-License-Identifier: Apache-2.0
"""The gradient that a step should have beside the gradient that it has.

In: an objective with its terms, the rows and the model of `upref.step.inputs`, and the
user's step, or what was recorded of it.
Out: a `StepCase` and a `GradientComparison`: both gradients and their relative error.
First file: case.py.
"""
