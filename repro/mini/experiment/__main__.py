# SPDX-License-Identifier: Apache-2.0
"""`python -m repro.mini.experiment`."""

import sys

from repro.mini.experiment.command import main

if __name__ == "__main__":
    sys.exit(main())
