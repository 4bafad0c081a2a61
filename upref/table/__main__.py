# SPDX-License-Identifier: Apache-2.0
"""`python -m upref.table` is the command `upref audit-table`."""

import sys

from upref.cli import main

if __name__ == "__main__":
    sys.exit(main(["audit-table", *sys.argv[1:]]))
