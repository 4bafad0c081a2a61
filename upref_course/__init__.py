# SPDX-License-Identifier: Apache-2.0
"""The course: lessons, the grader of its exercises, and the explorer."""
