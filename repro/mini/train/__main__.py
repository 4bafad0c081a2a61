# SPDX-License-Identifier: Apache-2.0
import sys

from repro.mini.train.command import main

sys.exit(main())
