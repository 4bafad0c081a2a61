# SPDX-License-Identifier: Apache-2.0
"""Every objective trains a real, tiny transformer: tasks, policy (what samples), train (one
run), experiment (many runs).
"""
