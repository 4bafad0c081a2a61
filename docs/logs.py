# SPDX-License-Identifier: Apache-2.0
"""The table of docs/howto/logs.md: the scalars that `upref logs` knows."""

from upref.logs.names import BESIDE, SCALARS
from upref.markdown import table


def names() -> str:
    """Return the table of the scalars: what each is, and how frameworks call it."""
    beside = {scalar: name for name, (_, scalar) in BESIDE.items()}
    rows = []
    for key, scalar in SCALARS.items():
        called = [f"`{name}`" for name in scalar.names]
        if key in beside:
            called.append(f"`{beside[key]}` in TRL's GRPO with vLLM")
        rows.append((f"`{key}`", scalar.words, ", ".join(called)))
    return table(("scalar", "what it is", "names"), rows)
