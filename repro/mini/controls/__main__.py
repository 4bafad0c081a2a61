# SPDX-License-Identifier: Apache-2.0
"""Trains what is missing of the experiment on UP's controls, and reports:
`python -m repro.mini.controls`.
"""

import sys
from pathlib import Path

from repro.mini.registered import command

if __name__ == "__main__":
    sys.exit(command.main(Path(__file__).parent))
