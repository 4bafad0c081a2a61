# SPDX-License-Identifier: Apache-2.0
"""Functions of a person who had read the how-to page alone.

For each section of docs/howto/tokens-teachers-critics.md twenty wrong functions and ten
right ones, written as framework engineers write them, with the words of a true cause,
before any of them was checked. `python -m tests.second_person` prints the table. Four
were rewritten, for the mistakes of their author: two called torch.argsort wrongly, and
two that were written as wrong have the right gradient (a mixture of JSD that is
detached; a student that alone is normalized over its own tokens).
"""
