# SPDX-License-Identifier: Apache-2.0
"""A cause that no catalogue has: one edit of the objective's own formula."""
