# SPDX-License-Identifier: Apache-2.0
"""Write the page that draws a recorded batch: `python -m docs.site.picture FILE.html`."""

import sys

from docs.site import picture

if len(sys.argv) != 2:
    raise SystemExit(__doc__)
picture.write(sys.argv[1])
