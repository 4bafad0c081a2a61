# SPDX-License-Identifier: Apache-2.0
"""The prompt of a response as a number, which is the same in the files of every rank."""

import hashlib
from collections.abc import Iterable

BITS = 60  # of a number: it fits into an int64


def prompt_number(prompt: str | Iterable[int]) -> int:
    """Return the number of a prompt: 60 bits of a hash.

    Args:
        prompt: its name, or its token ids.

    Returns:
        A whole number, equal for equal prompts, in any file of the step.
    """
    if isinstance(prompt, str):
        text = prompt
    else:
        text = ",".join(str(int(token)) for token in prompt)
    return int(hashlib.sha256(text.encode()).hexdigest()[: BITS // 4], 16)
