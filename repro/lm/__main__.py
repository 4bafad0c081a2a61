# SPDX-License-Identifier: Apache-2.0
import sys

from repro.lm.command import main

sys.exit(main())
