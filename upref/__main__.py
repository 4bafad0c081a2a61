# SPDX-License-Identifier: Apache-2.0
"""`python -m upref` is the command `upref`."""

import sys

from upref.cli import main

if __name__ == "__main__":
    sys.exit(main())
