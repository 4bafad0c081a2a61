# SPDX-License-Identifier: Apache-2.0
class InputError(ValueError):
    """Bad input from the user: one sentence that says what is wrong and what to do."""
