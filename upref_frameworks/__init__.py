# SPDX-License-Identifier: Apache-2.0
"""What is known of other people's trainers: audits, ledgers, recipes, steps, training
with verl and TRL.
"""

from pathlib import Path


def names() -> list[str]:
    """Return the frameworks that can be audited.

    Returns:
        Names in alphabetical order; each is a folder with an audit.py.
    """
    return sorted(f.parent.name for f in Path(__file__).parent.glob("*/audit.py"))
