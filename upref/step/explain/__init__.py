# SPDX-License-Identifier: Apache-2.0
"""Why the gradient of a step is not the objective's.

In: the `GradientComparison` and the `StepCase` of `upref.step.compare`.
Out: findings, the cause in the first one. A cause is returned only if the reference has
the gradient that was found once the fault is put into it.
First file: diagnose.py.
"""
